"""Bits for keys and values of every layer, from what the model itself loses when a layer is folded alone.

Measured on a short text, by KL divergence: one layer's keys, or its values, at ``PROBE`` bits while all else is in full
precision; and the keys, or the values, of all layers at every number of bits. A layer at other bits is taken to lose what it
lost at ``PROBE`` bits, scaled as all layers together are. Where an artefact says how many bits keys have, those of values alone
are chosen. Losses are taken to add up. The proposal is then evaluated on text
that it has not seen.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.engines.transformers.names import passing
from kvfold.engines.transformers.sizes import foretold
from kvfold.errors import KVFoldError, MethodError
from kvfold.evaluation.decoding import room
from kvfold.evaluation.perplexity import CHUNK, Reference, reference, score
from kvfold.methods import Method, Pair, Recipe, get
from kvfold.methods.learned import LearnedMethod

BITS = (1, 2, 3, 4)
PROBE = 2
FULL_BITS = 16
"""Of a layer that stays in full precision; a cache of float32 counts its layers as if they were of 16 bits."""
UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

Side = str
"""``k`` or ``v``."""
Choice = dict[int, tuple[int, int] | None]
"""Layer to bits of keys and of values; None: in full precision."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a cache may take: bits per element of what is packed, or bytes at some number of tokens."""

    bits: float | None = None
    bytes: float | None = None

    @classmethod
    def read(cls, text: str) -> Budget:
        """``2.5`` (bits) or ``0.5GB``, ``300MiB``.

        Raises
        ------
        KVFoldError
            It is neither.
        """
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(bits?|[kmg]i?b)?\s*", text, re.IGNORECASE)
        if not found or not float(found[1]):
            raise KVFoldError(f"budget: {text!r} is neither bits per value, as 2.5, nor a size, as 0.5GB or 300MiB")
        unit = (found[2] or "bits").lower()
        if unit.startswith("bit"):
            return cls(bits=float(found[1]))
        return cls(bytes=float(found[1]) * UNITS[unit])


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What was measured.

    Attributes
    ----------
    alone : dict
        (layer, side) to the KL divergence with this alone at ``PROBE`` bits, nats per token.
    together : dict
        (side, bits) to that with all layers' keys, or values, at so many bits.
    cost : dict
        (layer, side, bits) to effective bits per element, statistics included.
    elements : dict
        Layer to the elements of keys (and of values) per token.
    """

    alone: dict[tuple[int, Side], float]
    together: dict[tuple[Side, int], float]
    cost: dict[tuple[int, Side, int], float]
    elements: dict[int, int]

    @property
    def layers(self) -> list[int]:
        """Those that can be folded."""
        return list(self.elements)

    def bits(self, side: Side) -> list[int]:
        """Those of keys, or of values, that were tried."""
        return sorted(bits for of, bits in self.together if of == side)

    @property
    def least(self) -> tuple[int, int]:
        """Fewest bits of keys and of values."""
        return self.bits("k")[0], self.bits("v")[0]

    def probe(self, side: Side) -> int:
        """The bits at which layers were compared."""
        return _probe(self.bits(side))

    def loss(self, layer: int, side: Side, bits: int) -> float:
        """What a layer's side is taken to lose at some bits; never more than at fewer."""
        scale = min(max(self.together[side, b], 0.0) for b in self.bits(side) if b <= bits)
        probe = max(self.together[side, self.probe(side)], 1e-12)
        return max(self.alone[layer, side], 0.0) * scale / probe

    def bits_of(self, choice: Choice) -> float:
        """Effective bits per element of a choice."""
        total = math.fsum(
            self.elements[layer] * (2 * FULL_BITS if own is None else sum(self._costs(layer, own)))
            for layer, own in choice.items()
        )
        return total / (2 * sum(self.elements.values()))

    def _costs(self, layer: int, own: tuple[int, int]) -> tuple[float, float]:
        return self.cost[layer, "k", own[0]], self.cost[layer, "v", own[1]]


def variant(method: Method, bits: tuple[int, int]) -> Method:
    """The method with other bits for keys and values; of what is learned, by its shortest name."""
    if isinstance(method, LearnedMethod):
        k_bits, v_bits = (None if width == method.bits else width for width in bits)
        return dataclasses.replace(method, k_bits=k_bits, v_bits=v_bits)
    return dataclasses.replace(method, k_bits=bits[0], v_bits=bits[1])


def as_method(method: Method, choice: Choice) -> Method:
    """A choice as one method: the commonest bits for most layers, others by number, the rest kept."""
    count: dict[tuple[int, int], int] = {}
    for own in choice.values():
        if own is not None:
            count[own] = count.get(own, 0) + 1
    if not count:
        return get("none")
    base = max(count, key=lambda own: (count[own], own))
    others = {layer: variant(method, own) for layer, own in choice.items() if own not in (None, base)}
    kept = [layer for layer, own in choice.items() if own is None]
    whole = variant(method, base)
    return get(str(Recipe(whole, kept, others))) if kept or others else whole  # what a person would type


def measure(
    model: PreTrainedModel,
    method: Method,
    ids: torch.Tensor | Sequence[torch.Tensor],
    length: int,
    chunk: int = CHUNK,
    on_start: Callable[[int], None] | None = None,
    on_done: Callable[[str], None] | None = None,
) -> Sensitivity:
    """Measure every layer's keys and values.

    Parameters
    ----------
    method
        With ``k_bits`` and ``v_bits``; those are set here.
    ids
        ``[1, length + tokens + 1]`` int64, or several such texts, whose divergences are averaged; what follows the first
        ``length`` is scored.
    on_start, on_done
        Called with the number of runs, and after each with what was folded.

    Raises
    ------
    KVFoldError
        The method takes no bits of its own for keys and values, or nothing is packed after so few tokens.
    """
    tried = choices(method)
    texts = [text.to(model.device) for text in ([ids] if isinstance(ids, torch.Tensor) else ids)]
    truths = [reference(model, text, length, chunk) for text in texts]
    probes = {side: _probe(bits) for side, bits in tried.items()}
    found = kvfold.fold(model, variant(method, (probes["k"], probes["v"])))
    kvfold.unfold(model)
    layers = [layer.spec.layer_idx for layer in found.folded]
    elements = {layer.spec.layer_idx: layer.spec.num_kv_heads * layer.spec.head_dim for layer in found.folded}
    if on_start is not None:
        on_start(sum(map(len, tried.values())) + 2 * len(layers))
    together, cost, alone = {}, {}, {}

    def mean(folded: Method) -> tuple[float, kvfold.FoldedCache]:
        each = [
            _divergence(model, folded, text, length, chunk, truth) for text, truth in zip(texts, truths, strict=True)
        ]
        return math.fsum(kld for kld, _ in each) / len(each), each[-1][1]

    for side in ("k", "v"):
        for bits in tried[side]:
            together[side, bits], cache = mean(_one_side(method, side, bits, probes))
            for layer in cache.folded:
                form = layer.key_format if side == "k" else layer.value_format
                cost[layer.spec.layer_idx, side, bits] = float(form.bits)
            _say(on_done, f"all layers' {_NAMES[side]} at {bits} bits")
        for index in layers:
            others = [other for other in layers if other != index]
            alone[index, side], _ = mean(Recipe(_one_side(method, side, probes[side], probes), others))
            _say(on_done, f"layer {index}'s {_NAMES[side]} at {probes[side]} bits")
    return Sensitivity(alone, together, cost, elements)


_NAMES = {"k": "keys", "v": "values"}


def _say(on_done: Callable[[str], None] | None, what: str) -> None:
    if on_done is not None:
        on_done(what)


def _probe(bits: Sequence[int]) -> int:
    return PROBE if PROBE in bits else bits[0]


def choices(method: Method) -> dict[Side, list[int]]:
    """Bits of keys and of values that the method has to choose from; of what is learned, those of its artefact.

    Raises
    ------
    KVFoldError
        There is nothing to choose, layers cannot be compared, or an artefact is missing.
    """
    if isinstance(method, Pair | Recipe) or {"k_bits", "v_bits"} & set(method.unused):
        raise KVFoldError(f"method: {method} has no bits of its own for keys and values; give fold, kivi or innerq")
    learned = method.learned_shape() if isinstance(method, LearnedMethod) else {}
    if {"k_bits", "v_bits"} <= learned.keys():
        raise KVFoldError(
            f"method: {method}: its tables are learned for one number of bits, so that there are none to choose; allowed: "
            "fold, kivi, innerq, and, for bits of values, tasq:bits=2,values=fold,artefact=FILE and nova:artefact=FILE"
        )
    if isinstance(method, LearnedMethod) and not method.artefact:
        raise method.missing()
    now = {"k": method.key_bits, "v": method.value_bits}

    def fits(side: Side, bits: int) -> bool:
        other = bits if not learned else now["k"]
        try:
            variant(method, (other, bits) if side == "v" else (bits, other))
        except MethodError:
            return False
        return True

    found: dict[Side, list[int]] = {
        side: [now[side]] if f"{side}_bits" in learned else [bits for bits in BITS if fits(side, bits)] for side in now
    }
    if any(PROBE not in found[side] for side in now if f"{side}_bits" not in learned):
        raise KVFoldError(f"method: {method} cannot store {PROBE} bits, at which layers are compared")
    return found


def _one_side(method: Method, side: Side, bits: int, probes: Mapping[Side, int]) -> Method:
    """Keys alone, or values alone."""
    folded = variant(method, (bits, probes["v"]) if side == "k" else (probes["k"], bits))
    return Pair(folded, "none") if side == "k" else Pair("none", folded)


def _divergence(
    model: PreTrainedModel, method: Method, ids: torch.Tensor, length: int, chunk: int, truth: Reference
) -> tuple[float, kvfold.FoldedCache]:
    cache = kvfold.fold(model, method, max_length=room(model, ids.shape[1]))
    try:
        found = score(model, ids, length, cache, chunk, truth)
    finally:
        kvfold.unfold(model)
    if not found.tested:
        windows = f"{method.sink} + {method.recent} tokens are in full precision"
        least = method.sink + method.recent + method.block + 1  # the last one is read with the scored tokens
        raise KVFoldError(f"length: after {length} tokens nothing is packed ({windows}); give at least {least}")
    if not math.isfinite(found.kld):
        raise KVFoldError(f"method: with {method} the model's predictions are not finite; nothing can be measured")
    return found.kld, cache


# ---- proposing -------------------------------------------------------------------------------------------------------


def propose(found: Sensitivity, bits: float) -> Choice:
    """The choice of least loss within some effective bits per element, as far as single steps find it.

    All begin at the fewest bits; the step that saves most per bit it costs is taken, as long as one fits: more bits for a
    layer's keys or values, or a layer in full precision. It is never expected to lose more than the best uniform bits.

    Raises
    ------
    KVFoldError
        Fewer than the least there are.
    """
    choice: Choice = dict.fromkeys(found.layers, found.least)
    least_bits = found.bits_of(choice)
    _enough(bits, least_bits, found.least)
    left = (bits - least_bits) * 2 * sum(found.elements.values()) + 1e-6
    while steps := [
        s for layer in found.layers for s in _steps(found, layer, choice[layer]) if s[0] > 0 and s[1] <= left
    ]:
        _, cost, layer, own = max(steps, key=lambda step: step[0] / step[1])
        choice[layer] = own
        left -= cost
    alike: Choice = dict.fromkeys(found.layers, uniform(found, bits))
    return min((choice, alike), key=lambda c: total_loss(found, c))


def _enough(bits: float, least: float, widths: tuple[int, int]) -> None:
    if bits < least - 1e-9:
        k, v = widths
        what = f"everything at {k} bit(s)" if k == v else f"keys at {k} and values at {v} bit(s)"
        raise KVFoldError(f"budget: {bits:.4g} bits per value; the least is {least:.4g}, {what}")


def _uniform_bits(model: PreTrainedModel, method: Method) -> float:
    """Effective bits per element with one method for all layers."""
    layers = kvfold.fold(model, method).folded
    kvfold.unfold(model)
    sizes = [layer.spec.num_kv_heads * layer.spec.head_dim for layer in layers]
    each = [(layer.key_format.bits + layer.value_format.bits) / 2 for layer in layers]
    return math.fsum(bits * size for bits, size in zip(each, sizes, strict=True)) / sum(sizes)


def _steps(
    found: Sensitivity, layer: int, own: tuple[int, int] | None
) -> Iterator[tuple[float, float, int, tuple[int, int] | None]]:
    """What may be done to a layer: how much less it loses, how many more bits that takes."""
    if own is None:
        return
    k, v = own
    size = found.elements[layer]
    loss = found.loss(layer, "k", k), found.loss(layer, "v", v)
    cost = found.cost[layer, "k", k], found.cost[layer, "v", v]
    for more in BITS:
        for side, at, other in (("k", k, (more, v)), ("v", v, (k, more))):
            i = "kv".index(side)
            if more > at and (side, more) in found.together:
                gain = loss[i] - found.loss(layer, side, more)
                yield gain, size * (found.cost[layer, side, more] - cost[i]), layer, other
    yield sum(loss), size * (2 * FULL_BITS - sum(cost)), layer, None


def uniform(found: Sensitivity, bits: float) -> tuple[int, int]:
    """The same bits of keys and values for all layers within some effective bits: those of least loss.

    Raises
    ------
    KVFoldError
        None are so few.
    """
    every: Mapping[tuple[int, int], Choice] = {
        (k, v): dict.fromkeys(found.layers, (k, v)) for k in found.bits("k") for v in found.bits("v")
    }
    fitting = [own for own, choice in every.items() if found.bits_of(choice) <= bits + 1e-9]
    if not fitting:
        raise KVFoldError(f"budget: {bits:.4g} bits per value; even the fewest bits take more")
    return min(fitting, key=lambda own: total_loss(found, every[own]))


def total_loss(found: Sensitivity, choice: Choice) -> float:
    """What a choice is taken to lose, nats per token."""
    return math.fsum(
        found.loss(layer, "k", own[0]) + found.loss(layer, "v", own[1])
        for layer, own in choice.items()
        if own is not None
    )


def bytes_of(model: PreTrainedModel, method: Method, tokens: int) -> int:
    """What a cache of one sequence of so many tokens will take, in the model's dtype."""
    cache = kvfold.fold(model, method)
    try:
        with torch.inference_mode():  # shapes and types are known after a call
            model(torch.zeros(1, 2, dtype=torch.long, device=model.device), **passing(model, cache), use_cache=True)
    finally:
        kvfold.unfold(model)
    return foretold(cache, tokens, model.dtype).cache_bytes


def check(model: PreTrainedModel, method: Method, budget: Budget, tokens: int) -> None:
    """Refuse, before anything is measured, a budget that nothing fits or that full precision fits.

    Raises
    ------
    KVFoldError
        The least that there is takes more, or no layer needs to be folded.
    """
    allowed = choices(method)
    few = allowed["k"][0], allowed["v"][0]
    if budget.bits is not None:
        if budget.bits >= FULL_BITS:
            raise KVFoldError(
                f"budget: {budget.bits:.4g} bits per value; full precision takes {FULL_BITS}, nothing is folded; give fewer"
            )
        _enough(budget.bits, _uniform_bits(model, variant(method, few)), few)
        return
    assert budget.bytes is not None
    least = bytes_of(model, variant(method, few), tokens)
    if least > budget.bytes:
        raise KVFoldError(
            f"budget: {budget.bytes:,.0f} bytes; a cache of {tokens:,} tokens takes at least {least:,}; give a larger budget "
            "or a smaller --context"
        )
    full = bytes_of(model, get("none"), tokens)
    if full <= budget.bytes:
        raise KVFoldError(
            f"budget: {budget.bytes:,.0f} bytes; a full-precision cache of {tokens:,} tokens takes {full:,}: nothing folds; "
            "give a smaller budget or a larger --context"
        )


def within(model: PreTrainedModel, method: Method, found: Sensitivity, budget: Budget, tokens: int) -> float:
    """The budget in effective bits per element, for a cache of ``tokens`` tokens; refuses what :func:`check` does."""
    check(model, method, budget, tokens)
    if budget.bits is not None:
        return budget.bits
    assert budget.bytes is not None
    low, high = found.bits_of(dict.fromkeys(found.layers, found.least)), float(FULL_BITS)
    for _ in range(22):  # sizes go in steps of pages, so they are tried
        middle = (low + high) / 2
        fits = bytes_of(model, as_method(method, propose(found, middle)), tokens) <= budget.bytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def rows(found: Sensitivity, choice: Choice) -> list[tuple[int, float, float, tuple[int, int] | None]]:
    """Layer, what its keys and its values lose alone at ``PROBE`` bits, and what is proposed."""
    return [(i, found.alone[i, "k"], found.alone[i, "v"], choice[i]) for i in found.layers]


def to_dict(found: Sensitivity, choice: Choice, names: Sequence[str]) -> dict[str, object]:
    """For JSON: what was measured and what is proposed."""
    return {
        "probe_bits": found.probe("v"),
        **({"probe_bits_of_keys": found.probe("k")} if found.probe("k") != found.probe("v") else {}),
        "alone": [
            {"layer": i, "keys": k, "values": v, "proposed": None if own is None else list(own)}
            for i, k, v, own in rows(found, choice)
        ],
        "together": [{"side": side, "bits": b, "kld": kld} for (side, b), kld in found.together.items()],
        "proposal": names[0],
        "uniform": names[1],
        "effective_bits": found.bits_of(choice),
        "expected_kld": total_loss(found, choice),
    }
