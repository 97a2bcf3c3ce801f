"""Learning KVQuant's datatypes: gradients, ranges of key channels, and weighted k-means in one dimension."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import safetensors
import torch
from torch import nn
from transformers import PreTrainedModel

from kvfold.calibration import looking
from kvfold.calibration.learner import Learner
from kvfold.calibration.state import Fit, State, share_of
from kvfold.formats import Outliers
from kvfold.formats.affine import to_fp16
from kvfold.formats.lookup import ChannelScales
from kvfold.methods.base import LayerSpec
from kvfold.methods.kvquant import KVQuant, Learned, beyond

IMPLEMENTATION = "kvfold_gradients"
BINS = 1024
"""Points that the levels of many elements are computed from."""


@dataclass
class Gradients:
    """One layer's keys before RoPE and values, and the loss's squared gradients with respect to them.

    Attributes
    ----------
    keys, values : Tensor, float16 [num_kv_heads, tokens, head_dim]
    key_fisher, value_fisher : Tensor, bfloat16 [num_kv_heads, tokens, head_dim]
        Diagonal of the Fisher information up to a factor (sec. 3.3); squares of gradients need bfloat16's range.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_fisher: torch.Tensor
    value_fisher: torch.Tensor

    def float(self) -> Gradients:
        """The same in float32."""
        return Gradients(*(x.float() for x in (self.keys, self.values, self.key_fisher, self.value_fisher)))


# ---- gradients -------------------------------------------------------------------------------------------------------


class _Probe:
    """Additive zeros on every layer's keys and values, whose gradients are those of the keys and values themselves."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def look(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = [torch.zeros_like(x, requires_grad=True) for x in (key, value)]
        self.seen[layer] = (key.detach(), value.detach(), zeros[0], zeros[1])
        return key + zeros[0], value + zeros[1]


_probe = _Probe()
looking.register(IMPLEMENTATION, _probe.look)


@contextlib.contextmanager
def _probing(model: PreTrainedModel) -> Iterator[None]:
    needed = [p for p in model.parameters() if p.requires_grad]
    for parameter in needed:  # gradients of the weights would cost memory and time, and nobody asks for them
        parameter.requires_grad_(False)
    try:
        with looking.attending(model, IMPLEMENTATION):
            yield
    finally:
        _probe.seen.clear()
        for parameter in needed:
            parameter.requires_grad_(True)


def gradients(model: PreTrainedModel, specs: Sequence[LayerSpec | None], ids: torch.Tensor) -> dict[int, Gradients]:
    """Keys, values and squared gradients of the next-token loss, of all layers, on one window.

    Parameters
    ----------
    model : PreTrainedModel
    specs : sequence
        Layers' shapes and rotations; None: the layer is left out.
    ids : Tensor, int64 [1, length]
        Token ids of one sequence.

    Returns
    -------
    dict
        By layer. 4 bytes per element of the cache: for SmolLM2-135M 46 KB per token.
    """
    found: dict[int, Gradients] = {}
    ids = ids.to(model.device)
    with _probing(model), torch.enable_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
        positions = torch.arange(ids.shape[1], device=ids.device).view(1, 1, -1)
        for layer, (key, value, key_probe, value_probe) in _probe.seen.items():
            spec = specs[layer]
            if spec is None:
                continue
            assert key_probe.grad is not None and value_probe.grad is not None
            both = [key.float(), key_probe.grad.float()]
            if spec.rope is not None:  # a rotation: gradients turn back as the keys do, up to a factor
                both = [spec.rope.unrotate(x, positions) for x in both]
            kept = [to_fp16(x) for x in (both[0], value.float())]
            kept += [x.square().to(torch.bfloat16) for x in (both[1], value_probe.grad.float())]
            found[layer] = Gradients(*(x[0].cpu() for x in kept))
    return found


class KVQuantLearner(Learner):
    """Backward passes for all layers first, window by window onto the disk; then a layer at a time."""

    def __init__(
        self, method: KVQuant, model: PreTrainedModel, windows: torch.Tensor, held: torch.Tensor, seed: int
    ) -> None:
        super().__init__(model, windows, held, seed)
        self.method = method

    def start(self, state: State, on_window: Callable[[int, int], None] | None) -> int:
        for index, ids in enumerate(self.windows.split(1)):
            if state.about(self._name(index)) is None:
                found = gradients(self.model, self.specs, ids)
                parts = {f"{layer}.{name}": t for layer, one in found.items() for name, t in vars(one).items()}
                state.save(self._name(index), parts, {})
            if on_window is not None:
                on_window(index + 1, len(self.windows))
        return state.done()

    @staticmethod
    def _name(index: int) -> str:
        return f"window-{index:05d}"

    def learn(self, layer: int, state: State) -> Fit:
        spec = self.specs[layer]
        if spec is None:
            return Fit({}, {})
        parts: dict[str, list[torch.Tensor]] = {}
        for index in range(len(self.windows)):
            with safetensors.safe_open(state.path(self._name(index)), framework="pt") as file:
                for field in dataclasses.fields(Gradients):
                    parts.setdefault(field.name, []).append(file.get_tensor(f"{layer}.{field.name}"))
        return learn(Gradients(**{n: torch.cat(t, 1) for n, t in parts.items()}), self.held, self.method, spec)


# ---- datatypes -------------------------------------------------------------------------------------------------------


def learn(found: Gradients, held: torch.Tensor, method: KVQuant, spec: LayerSpec) -> Fit:
    """Learn one layer's ranges and levels.

    Parameters
    ----------
    found : Gradients
    held : Tensor, bool [tokens]
        Tokens to measure errors on instead of learning from them.

    Returns
    -------
    Fit
        ``key.levels``, ``key.center``, ``key.spread``, ``value.levels``.
        Errors are squared error over squared length, and the same weighted by sensitivity, on held-out tokens.
    """
    found = found.float()
    keys, values = found.keys[:, ~held], found.values[:, ~held]
    tail = method.outliers / 2
    low, high = (keys.quantile(q, dim=1) for q in (tail, 1 - tail))
    channels = ChannelScales((low + high) / 2, ((high - low) / 2).clamp_min(1e-6))
    offset, factor = channels.center.unsqueeze(-2), channels.spread.unsqueeze(-2)
    unit = (keys - offset) / factor
    inside = unit.abs() <= 1
    # an error of a normalized element counts as much as its range is wide
    weight = found.key_fisher[:, ~held] * factor.square()
    key_levels = fit(unit[inside], weight[inside], method.key_bits)

    form = method.format(spec, "value")
    whole = values.shape[1] // form.block * form.block
    values = values[:, :whole].unsqueeze(0)
    weight = found.value_fisher[:, ~held][:, :whole].unsqueeze(0)
    if isinstance(form, Outliers):
        filled, where, _ = form.split(values)
        weight = weight.unflatten(-2, (-1, form.block)).flatten(-2).scatter(-1, where, 0.0).view_as(weight)
        values = filled
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    half = ((high - low) / 2).clamp_min(1e-6)
    value_levels = fit(
        ((values - (high + low) / 2) / half).flatten(), (weight * half.square()).flatten(), method.value_bits
    )

    learned = Learned(key_levels, value_levels, channels)
    tensors = {
        "key.levels": torch.tensor(key_levels),
        "key.center": channels.center,
        "key.spread": channels.spread,
        "value.levels": torch.tensor(value_levels),
    }
    return Fit(tensors, _errors(found, held, method, spec, learned))


def _errors(
    found: Gradients, held: torch.Tensor, method: KVQuant, spec: LayerSpec, learned: Learned
) -> dict[str, float]:
    errors = {}
    sides = (("key", found.keys, found.key_fisher), ("value", found.values, found.value_fisher))
    for operand, x, fisher in sides:
        form = method.format(spec, operand, learned)
        whole = int(held.sum()) // form.block * form.block
        x, fisher = x[:, held][:, :whole].unsqueeze(0), fisher[:, held][:, :whole].unsqueeze(0)
        if operand == "key" and isinstance(form, Outliers):
            fields = form.encode(x, beyond(x, learned.channels))
        else:
            fields = form.encode(x)
        error = (form.decode(fields) - x).square()
        errors[operand] = share_of(error.sum(), x.square().sum())
        errors[f"{operand}_weighted"] = share_of((error * fisher).sum(), (x.square() * fisher).sum())
    return errors


def fit(x: torch.Tensor, weights: torch.Tensor, bits: int) -> tuple[float, ...]:
    """The 2^bits levels of least weighted squared error (eq. 3).

    Parameters
    ----------
    x, weights : Tensor, float [n]
        Elements and their sensitivities.

    Returns
    -------
    tuple of float
        Ascending. The optimum where ``x`` has up to ``BINS`` different values; otherwise the optimum of the means of
        ``BINS`` bins.
    """
    x, weights = x.flatten().double(), weights.flatten().double()
    if not weights.sum() > 0:
        weights = torch.ones_like(weights)
    points, index = x.unique(return_inverse=True)
    if len(points) > BINS:
        low, high = points[0], points[-1]
        index = ((x - low) / (high - low) * BINS).long().clamp_max(BINS - 1)
    count = int(index.max()) + 1
    mass = torch.zeros(count, dtype=torch.float64).index_add_(0, index, weights)
    moment = torch.zeros(count, dtype=torch.float64).index_add_(0, index, weights * x)
    used = mass > 0
    return kmeans_1d((moment / mass.clamp_min(1e-300))[used], mass[used], 1 << bits)


def kmeans_1d(x: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[float, ...]:
    """Weighted k-means of sorted points, exactly: clusters are intervals, and dynamic programming finds the best ones.

    Parameters
    ----------
    x, weights : Tensor, float64 [n]
        Ascending; weights above 0.
    count : int
        Clusters. With fewer points than that, the last level is repeated.

    Returns
    -------
    tuple of float
        Ascending.

    Notes
    -----
    ``best[k, j] = min_i best[k - 1, i] + cost(i, j)``, with cost(i, j) the squared error of points i ... j - 1 about their
    mean, from running sums (H. Wang and M. Song, 2011). O(count n^2).
    """
    n = len(x)
    zero = torch.zeros(1, dtype=torch.float64)
    shifted = x - x.mean()  # against cancellation in the squares
    mass, moment, square = (torch.cat([zero, (weights * shifted**power).cumsum(0)]) for power in range(3))
    total = mass[None, :] - mass[:, None]
    sums = moment[None, :] - moment[:, None]
    cost = (square[None, :] - square[:, None]) - sums.square() / total.clamp_min(1e-300)
    cost = torch.where(total > 0, cost.clamp_min(0), float("inf"))
    clusters = min(count, n)
    best = cost[0]
    cuts = []
    for _ in range(1, clusters):
        best, start = (best.unsqueeze(-1) + cost).min(0)
        cuts.append(start)
    stop, levels = n, []
    for start in [*reversed(cuts), torch.zeros(n + 1, dtype=torch.int64)]:
        first = int(start[stop])
        levels.append(float((weights * x)[first:stop].sum() / weights[first:stop].sum()))
        stop = first
    levels.reverse()
    return tuple(levels + [levels[-1]] * (count - clusters))
