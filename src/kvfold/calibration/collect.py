"""Keys and values of real text, one layer at a time.

The hidden states of all calibration tokens enter a layer, its keys, values and statistics come out, and the layer's
output replaces its input. Memory is that of one layer, whatever the depth of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvfold.calibration import looking
from kvfold.errors import KVFoldError, UnsupportedModelError
from kvfold.methods.base import LayerSpec
from kvfold.methods.learned import rotary_dim
from kvfold.methods.none import NoFolding
from kvfold.rope import Rope, rope_of

IMPLEMENTATION = "kvfold_collect"
QUERY_CHUNK = 256
"""Queries whose attention probabilities exist at once."""
NEWEST = 64
"""Tokens of a window whose hidden states are compared with the model's own."""
CLOSE = 0.05
"""Relative difference between them that is rounding's."""
OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of attention modules' output projections."""
OTHERWISE = "does not hand each layer's output to the next one as it is; calibration runs layers one by one"


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
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Exact attention; records keys before RoPE, values, weights and query statistics.

        Parameters
        ----------
        query : Tensor [batch, num_heads, tokens, head_dim]
        key, value : Tensor [batch, num_kv_heads, tokens, head_dim]
        mask : Tensor or None, bool [batch, 1, tokens, tokens]
            What each query sees; None: itself and all before it.
        softcap, sinks
            See :class:`kvfold.kernels.AttentionCall`.

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
            if softcap is not None:
                scores = (scores / softcap).tanh_() * softcap
            if mask is None:
                hidden = positions[rows, None] < positions[:stop]
            else:
                hidden = ~mask[:, :, None, rows, :stop]
            scores = scores.masked_fill_(hidden, float("-inf"))
            if sinks is not None:  # one more score, of a token without a value
                sink = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
                scores = torch.cat((scores, sink), -1)
            p = scores.softmax(-1)[..., :stop]
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = _probe.take(module, query, key, value, attention_mask, scale, softcap, s_aux)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


looking.register_both(IMPLEMENTATION, _collecting_attention)


class _Reached(Exception):
    """Ends a call of the model before a layer."""


@dataclass(frozen=True)
class _Passed:
    """What the model gives a layer beside hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def projections(model: PreTrainedModel, specs: Sequence[LayerSpec | None]) -> dict[int, torch.Tensor]:
    """Weights of the output projections of folded layers' attention modules, [hidden, num_heads * head_dim].

    Raises
    ------
    UnsupportedModelError
        If a module has none by a known name, or one whose weight is stored in another way.
    """
    from kvfold.engines.transformers.attentions import of_decoder

    modules = of_decoder(model)
    found = {}
    for spec in specs:
        if spec is None:
            continue
        module = modules.get(spec.layer_idx)
        weights = [getattr(getattr(module, name, None), "weight", None) for name in OUTPUTS]
        wide = [t for t in weights if isinstance(t, torch.Tensor) and t.shape[-1] == spec.num_heads * spec.head_dim]
        if not wide:
            raise UnsupportedModelError(
                f"model: the attention of layer {spec.layer_idx} of {type(model).__name__} has no output projection of "
                f"{spec.num_heads} heads of {spec.head_dim} channels that calibration could read ({', '.join(OUTPUTS)})"
            )
        found[spec.layer_idx] = wide[0]
    return found


def layer_specs(model: PreTrainedModel) -> list[LayerSpec | None]:
    """Every layer's shape, with its rotation; None where kvfold keeps the layer in full precision."""
    from kvfold.engines.transformers.attentions import rotates
    from kvfold.engines.transformers.planning import plan_layers

    rope, config = rope_of(model), model.config.get_text_config(decoder=True)
    specs: list[LayerSpec | None] = []
    for index, item in enumerate(plan_layers(model, NoFolding())):
        own = rope if rotates(item.module, config, index) else None
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
        If the model has no list of decoder layers that can be run one by one, or an attention module no output projection
        that is known.
    """

    def __init__(self, model: PreTrainedModel, windows: torch.Tensor, batch: int = 1) -> None:
        self.model, self.windows, self.batch = model, windows, batch
        self.specs = layer_specs(model)
        layers = getattr(model.base_model, "layers", None)
        if layers is None or len(layers) != len(self.specs):
            raise UnsupportedModelError(
                f"model: {type(model).__name__} does not list its decoder layers as 'layers'; calibration runs them one by one"
            )
        self.layers: nn.ModuleList = layers
        self.projections = projections(model, self.specs)
        self.passed: dict[int, list[_Passed]] = {}  # by windows in a call: what layers are given beside hidden states
        self.seen: list[torch.Tensor] = []  # the newest of the hidden states that the model gives its layers
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

    def _call(self, ids: torch.Tensor, count: int, look: Callable[[torch.Tensor, _Passed], None]) -> None:
        """Call the model up to its layer ``count``, and look at what it passes to those before."""
        order = iter(self.layers[:count])

        def reached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _probe.seen.clear()
            if module is not next(order):
                raise UnsupportedModelError(f"model: {type(self.model).__name__} {OTHERWISE}")
            look(args[0] if args else kwargs.pop("hidden_states"), _Passed(args[1:], kwargs))
            if module is self.layers[count - 1]:
                raise _Reached

        handles = [layer.register_forward_pre_hook(reached, with_kwargs=True) for layer in self.layers[:count]]
        try:
            self.model(ids.to(self.model.device), use_cache=False)
        except _Reached:
            return
        finally:
            for handle in handles:
                handle.remove()
        raise UnsupportedModelError(f"model: {type(self.model).__name__} {OTHERWISE}")

    def _first_hidden(self, ids: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        self._call(ids, 1, lambda hidden, _: found.append(hidden))
        return found[0].cpu()

    def _passed_to(self, index: int, ids: torch.Tensor) -> _Passed:
        """What a layer is given: the same for all calls of as many windows, whose positions are the same."""
        if len(ids) not in self.passed:
            passed: list[_Passed] = []
            seen: list[torch.Tensor] = []

            def look(hidden: torch.Tensor, more: _Passed) -> None:
                seen.append(hidden[:, -NEWEST:].cpu())
                passed.append(more)

            self._call(ids, len(self.layers), look)
            self.passed[len(ids)] = passed
            self.seen = self.seen or seen
        return self.passed[len(ids)][index]

    def start(self, hidden: torch.Tensor | None = None, done: int = 0) -> None:
        """Begin at the first layer, or go on after ``done`` layers with the hidden states they left behind."""
        self.done = done
        with self._collecting(), torch.inference_mode():
            if hidden is None:
                hidden = torch.cat([self._first_hidden(ids) for ids in self.windows.split(self.batch)])
        if hidden.shape[:2] != self.windows.shape:
            raise KVFoldError(f"calibration: hidden states of shape {tuple(hidden.shape)} belong to another text")
        self.hidden = hidden

    def step(self) -> LayerSample | None:
        """Run the next layer on all windows; returns its sample, or None if kvfold keeps the layer in full precision.

        Raises
        ------
        UnsupportedModelError
            If the model does more between its layers than to hand one's output to the next.
        KVFoldError
            If the layer's output is not finite.
        """
        assert self.hidden is not None
        index, spec = self.done, self.specs[self.done]
        length = self.windows.shape[1]
        parts: list[dict[str, torch.Tensor]] = []
        gram: torch.Tensor | None = None
        new = torch.empty_like(self.hidden)
        with self._collecting(), torch.inference_mode():
            for first in range(0, len(self.windows), self.batch):
                rows = slice(first, first + self.batch)
                passed = self._passed_to(index, self.windows[rows])
                _probe.seen.clear()
                out = self.layers[index](self.hidden[rows].to(self.model.device), *passed.args, **passed.kwargs)
                new[rows] = (out[0] if isinstance(out, tuple) else out).cpu()
                if spec is None:
                    continue
                seen = _probe.seen.pop()
                queries = to_complex(seen.pop("queries"), rotary_dim(spec))
                moment = torch.einsum("bhqj,bhqk->hjk", queries, queries.conj())
                gram = moment if gram is None else gram + moment
                parts.append({name: t.transpose(0, 1).flatten(1, 2).cpu() for name, t in seen.items()})
        self._check(index, new)
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

    def _check(self, index: int, new: torch.Tensor) -> None:
        """Refuse a layer's output that is no number, or not what the model gives its next layer."""
        name = type(self.model).__name__
        if not new.isfinite().all():
            raise KVFoldError(
                f"model: what layer {index} of {name} gives is not finite on this text in "
                f"{str(new.dtype).removeprefix('torch.')}; nothing can be learned from it"
            )
        if index + 1 < len(self.seen):
            expected = self.seen[index + 1].double()
            got = new[: len(expected), -NEWEST:].double()
            if not (got.shape == expected.shape and (got - expected).norm() <= CLOSE * expected.norm()):
                raise UnsupportedModelError(f"model: {name} {OTHERWISE}")

    def _value_metric(self, spec: LayerSpec) -> torch.Tensor:
        weight = self.projections[spec.layer_idx].detach().float().cpu()  # [hidden, num_heads * d]
        heads = weight.T.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
        return torch.einsum("hgdo,hgeo->hde", heads, heads)
