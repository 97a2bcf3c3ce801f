"""Keys and values of real text, one layer at a time.

The hidden states of all calibration tokens enter a layer, its keys, values and statistics come out, and the layer's
output replaces its input. Memory is that of one layer, whatever the depth of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvfold.errors import KVFoldError, UnsupportedModelError
from kvfold.methods.base import LayerSpec
from kvfold.methods.learned import rotary_dim
from kvfold.methods.none import NoFolding
from kvfold.rope import Rope, rope_of

IMPLEMENTATION = "kvfold_collect"
QUERY_CHUNK = 256
"""Queries whose attention probabilities exist at once."""


@dataclass(frozen=True)
class LayerSample:
    """What one layer shows of the calibration text.

    Attributes
    ----------
    spec : LayerSpec
    keys, values : Tensor, float32 [num_kv_heads, tokens, head_dim]
        Keys before RoPE. Windows follow one another.
    key_weight, value_weight : Tensor, float32 [num_kv_heads, tokens]
        How much an error of a token's key or value moves attention outputs: ``sum_q p_qn^2 |v_n - o_q|^2`` and
        ``sum_q p_qn^2`` over the queries q of the token's window, p the attention probabilities and o the outputs.
    key_metric : Tensor, complex64 [num_kv_heads, head_dim / 2, head_dim / 2]
        ``E[q q^H]`` of the queries as a key before RoPE meets them, averaged over distances; Hermitian. The mean squared
        error of a score is ``e^H M e / 2`` for a key error e in RoPE's complex pairs.
    query_moment : Tensor, complex64 [num_kv_heads, head_dim / 2, head_dim / 2]
        The same not averaged over distances: ``E[q q^H]`` of the queries before RoPE.
    value_metric : Tensor, float32 [num_kv_heads, head_dim, head_dim]
        ``sum_h W_h W_h'`` over the query heads h of the KV head, W_h the head's slice of the output projection: an error e
        of an attention output moves the layer's output by ``e M e'`` squared.
    """

    spec: LayerSpec
    keys: torch.Tensor
    values: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    key_metric: torch.Tensor
    query_moment: torch.Tensor
    value_metric: torch.Tensor

    def on(self, device: torch.device) -> LayerSample:
        """The same numbers on another device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self) if f.name != "spec"}
        return dataclasses.replace(self, **moved)


def to_complex(x: torch.Tensor, rotary: int) -> torch.Tensor:
    """RoPE's pairs as complex numbers: float [..., d] -> complex [..., d / 2], pair j = (x_j, x_{j + rotary / 2}).

    Channels that RoPE leaves alone are paired in the same way among themselves.
    """
    parts = [torch.complex(*half.chunk(2, -1)) for half in (x[..., :rotary], x[..., rotary:]) if half.shape[-1]]
    return torch.cat(parts, -1)


def to_real(z: torch.Tensor, rotary: int) -> torch.Tensor:
    """Inverse of :func:`to_complex`: complex [..., d / 2] -> float [..., d]."""
    parts = [z[..., : rotary // 2], z[..., rotary // 2 :]]
    return torch.cat([part for half in parts if half.shape[-1] for part in (half.real, half.imag)], -1)


def distance_factor(spec: LayerSpec, length: int) -> torch.Tensor:
    """``E[exp(i (theta_j - theta_k) D)]`` over distances D = 0 ... length - 1, complex64 [d / 2, d / 2].

    Pairs of different frequency meet a distant key with unrelated phases: their correlation averages out, while the slow
    pairs keep theirs.
    """
    freq = torch.zeros(spec.head_dim // 2, dtype=torch.float64)
    scaling = 1.0
    if spec.rope is not None:
        freq[: spec.rope.inv_freq.numel()] = spec.rope.inv_freq.double().cpu()
        scaling = spec.rope.scaling**2
    phases = torch.polar(torch.ones(()).double(), torch.arange(length).double()[:, None] * freq)
    return (phases.T @ phases.conj() / length * scaling).to(torch.complex64)


def _layer_index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int)
    return index


class _Probe:
    """Where the attention function of a collecting model puts what it sees."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []
        self.ropes: dict[int, Rope | None] = {}

    def take(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Exact causal attention; records keys before RoPE, values, weights and query statistics.

        Parameters
        ----------
        query : Tensor [batch, num_heads, tokens, head_dim]
        key, value : Tensor [batch, num_kv_heads, tokens, head_dim]
        window : int
            Tokens a query sees; 0: all before it.

        Returns
        -------
        Tensor, float32 [batch, num_heads, tokens, head_dim]
        """
        batch, kv_heads, tokens, _ = key.shape
        query, key, value = query.float(), key.float(), value.float()
        positions = torch.arange(tokens, device=key.device)
        rope = self.ropes.get(_layer_index(module))
        plain_key, plain_query = key, query
        if rope is not None:
            plain_key = rope.unrotate(key, positions.expand(batch, 1, -1))
            plain_query = rope.unrotate(query, positions.expand(batch, 1, -1))
        grouped = query.unflatten(1, (kv_heads, -1))
        out = torch.empty_like(grouped)
        value_weight = key.new_zeros(batch, kv_heads, tokens)
        key_weight = key.new_zeros(batch, kv_heads, tokens)
        for start in range(0, tokens, QUERY_CHUNK):
            rows = slice(start, min(start + QUERY_CHUNK, tokens))
            stop = rows.stop
            scores = grouped[:, :, :, rows] @ key[:, :, None, :stop].transpose(-1, -2) * scale
            distance = positions[rows, None] - positions[:stop]
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            p = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
            o = p @ value[:, :, None, :stop]
            out[:, :, :, rows] = o
            squared = p.square_().flatten(2, 3)  # all queries of the KV head's query heads
            o = o.flatten(2, 3)
            mass = squared.sum(-2)
            value_weight[..., :stop] += mass
            # sum_q p^2 |v - o|^2, expanded
            v = value[:, :, :stop]
            cross = (v * (squared.transpose(-1, -2) @ o)).sum(-1)
            far = (squared.transpose(-1, -2) @ o.square().sum(-1, keepdim=True)).squeeze(-1)
            key_weight[..., :stop] += (mass * v.square().sum(-1) - 2 * cross + far).clamp_min_(0)
        self.seen.append(
            {
                "keys": plain_key,
                "values": value,
                "queries": plain_query.unflatten(1, (kv_heads, -1)).flatten(2, 3),
                "key_weight": key_weight,
                "value_weight": value_weight,
            }
        )
        return out.flatten(1, 2)


_probe = _Probe()


def _collecting_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = _probe.take(module, query, key, value, scale, sliding_window or 0)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _collecting_attention)
AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)


class _FirstLayerReached(Exception):
    """Carries what the model passes to its first layer."""

    def __init__(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.hidden, self.kwargs = hidden, kwargs


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Attention modules by layer."""
    return {_layer_index(m): m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")}


def layer_specs(model: PreTrainedModel) -> list[LayerSpec | None]:
    """Every layer's shape, with its rotation; None where kvfold keeps the layer in full precision."""
    from kvfold.engines.transformers.planning import plan_layers

    rope, attentions = rope_of(model), attention_modules(model)
    specs: list[LayerSpec | None] = []
    for index, item in enumerate(plan_layers(model, NoFolding())):
        own = rope if getattr(attentions.get(index), "use_rope", True) else None
        specs.append(None if item.spec is None else dataclasses.replace(item.spec, rope=own))
    return specs


class Collector:
    """Runs calibration text through a model layer by layer.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder that kvfold folds, on the device that is to compute.
    windows : Tensor, int64 [num_windows, length]
        Token ids; every window starts at position 0.
    batch : int
        Windows computed at once.

    Raises
    ------
    UnsupportedModelError
        If the model has no list of decoder layers that can be run one by one.
    """

    def __init__(self, model: PreTrainedModel, windows: torch.Tensor, batch: int = 1) -> None:
        self.model, self.windows, self.batch = model, windows, batch
        self.specs = layer_specs(model)
        self.attentions = attention_modules(model)
        layers = getattr(model.base_model, "layers", None)
        if layers is None or len(layers) != len(self.specs):
            raise UnsupportedModelError(
                f"model: {type(model).__name__} does not list its decoder layers as 'layers'; calibration runs them one by one"
            )
        self.layers: nn.ModuleList = layers
        self.hidden: torch.Tensor | None = None
        self.done = 0

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        previous = self.model.config._attn_implementation
        self.model.set_attn_implementation(IMPLEMENTATION)
        _probe.ropes = {spec.layer_idx: spec.rope for spec in self.specs if spec is not None}
        try:
            yield
        finally:
            _probe.seen.clear()
            self.model.set_attn_implementation(previous)

    def _first_inputs(self, ids: torch.Tensor) -> _FirstLayerReached:
        def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            raise _FirstLayerReached(hidden, {k: v for k, v in kwargs.items() if k != "hidden_states"})

        handle = self.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model(ids.to(self.model.device), use_cache=False)
        except _FirstLayerReached as reached:
            return reached
        finally:
            handle.remove()
        raise UnsupportedModelError(f"model: {type(self.model).__name__} does not run its first layer")

    def start(self, hidden: torch.Tensor | None = None, done: int = 0) -> None:
        """Begin at the first layer, or go on after ``done`` layers with the hidden states they left behind."""
        self.done = done
        with self._collecting(), torch.inference_mode():
            if hidden is None:
                parts = [self._first_inputs(ids).hidden.cpu() for ids in self.windows.split(self.batch)]
                hidden = torch.cat(parts)
        if hidden.shape[:2] != self.windows.shape:
            raise KVFoldError(f"calibration: hidden states of shape {tuple(hidden.shape)} belong to another text")
        self.hidden = hidden

    def step(self) -> LayerSample | None:
        """Run the next layer on all windows; returns its sample, or None if kvfold keeps the layer in full precision."""
        assert self.hidden is not None
        index, spec = self.done, self.specs[self.done]
        length = self.windows.shape[1]
        parts: list[dict[str, torch.Tensor]] = []
        gram: torch.Tensor | None = None
        new = torch.empty_like(self.hidden)
        with self._collecting(), torch.inference_mode():
            # positions and their cos and sin are the same for all windows of a batch
            kwargs: dict[str, Any] = {}
            for first in range(0, len(self.windows), self.batch):
                ids = self.windows[first : first + self.batch]
                if not kwargs or len(ids) != self.batch:
                    kwargs = self._first_inputs(ids).kwargs
                _probe.seen.clear()
                out = self.layers[index](self.hidden[first : first + self.batch].to(self.model.device), **kwargs)
                new[first : first + self.batch] = (out[0] if isinstance(out, tuple) else out).cpu()
                if spec is None:
                    continue
                seen = _probe.seen.pop()
                queries = to_complex(seen.pop("queries"), rotary_dim(spec))
                moment = torch.einsum("bhqj,bhqk->hjk", queries, queries.conj())
                gram = moment if gram is None else gram + moment
                parts.append({name: t.transpose(0, 1).flatten(1, 2).cpu() for name, t in seen.items()})
        self.hidden, self.done = new, index + 1
        if spec is None or gram is None:
            return None
        joined = {name: torch.cat([p[name] for p in parts], 1).clone() for name in parts[0]}
        count = len(self.windows) * length * (spec.num_heads // spec.num_kv_heads)
        moment = gram.cpu() / count
        return LayerSample(
            spec,
            **joined,
            key_metric=moment * distance_factor(spec, length),
            query_moment=moment,
            value_metric=self._value_metric(spec),
        )

    def _value_metric(self, spec: LayerSpec) -> torch.Tensor:
        projection = self.attentions[spec.layer_idx].o_proj
        assert isinstance(projection, nn.Module) and isinstance(projection.weight, torch.Tensor)
        weight = projection.weight.detach().float().cpu()  # [hidden, num_heads * d]
        heads = weight.T.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
        return torch.einsum("hgdo,hgeo->hde", heads, heads)
