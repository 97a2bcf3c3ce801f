"""Bits for keys and values of every layer, from what a model loses when one layer's keys, or values, are quantized alone.

Losses of layers are taken to add up. They may be of any kind, as long as they are all of one: nats per token of retrieval, of
running text, or both, each as a multiple of what the same bits everywhere lose (:meth:`Losses.together`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from kvfold.errors import KVFoldError

Side = str
"""``k`` or ``v``."""
SIDES = ("k", "v")
Bits = tuple[int, int]
"""Of keys and of values."""
Choice = dict[int, Bits | None]
"""Layer to bits of keys and of values; None: in full precision."""
Key = tuple[int, Side, int]
"""Layer, side, bits."""
FULL_BITS = 16
"""Of a layer that stays in full precision; a cache of float32 counts its layers as if they were of 16 bits."""


@dataclasses.dataclass(frozen=True)
class Losses:
    """What was measured of a model with a method.

    Attributes
    ----------
    lost : dict
        (layer, side, bits) to what is lost with this alone at so many bits.
    cost : dict
        (layer, side, bits) to effective bits per element, statistics included.
    elements : dict
        Layer to the elements of keys (and of values) per token.
    """

    lost: Mapping[Key, float]
    cost: Mapping[Key, float]
    elements: Mapping[int, int]

    @property
    def layers(self) -> list[int]:
        """Those that can be folded."""
        return list(self.elements)

    def bits(self, side: Side) -> list[int]:
        """Those of keys, or of values, that were tried."""
        return sorted({bits for _, of, bits in self.lost if of == side})

    @property
    def least(self) -> Bits:
        """Fewest bits of keys and of values."""
        return self.bits("k")[0], self.bits("v")[0]

    def loss(self, layer: int, side: Side, bits: int) -> float:
        """What a layer's side loses at some bits; never more than at fewer."""
        return min(max(self.lost[layer, side, b], 0.0) for b in self.bits(side) if b <= bits)

    def bits_of(self, choice: Choice) -> float:
        """Effective bits per element of a choice."""
        total = math.fsum(
            self.elements[layer] * (2 * FULL_BITS if own is None else sum(self.costs(layer, own)))
            for layer, own in choice.items()
        )
        return total / (2 * sum(self.elements.values()))

    def costs(self, layer: int, own: Bits) -> tuple[float, float]:
        """Effective bits per element of a layer's keys and of its values."""
        return self.cost[layer, "k", own[0]], self.cost[layer, "v", own[1]]

    def total(self, choice: Choice) -> float:
        """What a choice loses."""
        return math.fsum(
            self.loss(layer, side, bits)
            for layer, own in choice.items()
            if own is not None
            for side, bits in zip(SIDES, own, strict=True)
        )

    def alike(self, own: Bits) -> Choice:
        """The same bits for all layers."""
        return dict.fromkeys(self.layers, own)

    def together(self, other: Losses, at: Bits) -> Losses:
        """Both kinds of losses as one, each as a multiple of what ``at`` loses everywhere."""
        scales = [1 / max(found.total(found.alike(at)), 1e-30) for found in (self, other)]
        lost = {key: scales[0] * self.lost[key] + scales[1] * other.lost[key] for key in self.lost}
        return dataclasses.replace(self, lost=lost)

    def only(self, k: int | None = None, v: int | None = None) -> Losses:
        """With the bits of keys, or of values, given: None leaves them to be chosen."""
        given = {"k": k, "v": v}
        kept = {key: lost for key, lost in self.lost.items() if given[key[1]] in (None, key[2])}
        return dataclasses.replace(self, lost=kept)


def spread(found: Losses, bits: float, full: bool = False) -> Choice:
    """The choice of least loss within some effective bits per element, as far as single steps find it.

    All begin at the fewest bits; the step that saves most per bit it costs is taken, as long as one fits: more bits for a
    layer's keys or values, or (``full``) a layer in full precision. It never loses more than the best uniform bits.

    Raises
    ------
    KVFoldError
        Fewer than the least there are.
    """
    choice: Choice = dict.fromkeys(found.layers, found.least)
    least_bits = found.bits_of(choice)
    enough(bits, least_bits, found.least)
    left = (bits - least_bits) * 2 * sum(found.elements.values()) + 1e-6
    while steps := [
        s for layer in found.layers for s in _steps(found, layer, choice[layer], full) if s[0] > 0 and s[1] <= left
    ]:
        _, cost, layer, own = max(steps, key=lambda step: step[0] / step[1])
        choice[layer] = own
        left -= cost
    return min((choice, found.alike(uniform(found, bits))), key=found.total)


def enough(bits: float, least: float, widths: Bits) -> None:
    """Refuse a budget below the least.

    Raises
    ------
    KVFoldError
        Says what the least is.
    """
    if bits < least - 1e-9:
        k, v = widths
        what = f"everything at {k} bit(s)" if k == v else f"keys at {k} and values at {v} bit(s)"
        raise KVFoldError(f"budget: {bits:.4g} bits per value; the least is {least:.4g}, {what}")


def _steps(found: Losses, layer: int, own: Bits | None, full: bool) -> Iterator[tuple[float, float, int, Bits | None]]:
    """What may be done to a layer: how much less it loses, how many more bits that takes."""
    if own is None:
        return
    k, v = own
    size = found.elements[layer]
    loss = found.loss(layer, "k", k), found.loss(layer, "v", v)
    cost = found.costs(layer, own)
    for side, at in zip(SIDES, own, strict=True):
        i = SIDES.index(side)
        for more in found.bits(side):
            if more > at:
                gain = loss[i] - found.loss(layer, side, more)
                other = (more, v) if side == "k" else (k, more)
                yield gain, size * (found.cost[layer, side, more] - cost[i]), layer, other
    if full:
        yield sum(loss), size * (2 * FULL_BITS - sum(cost)), layer, None


def uniform(found: Losses, bits: float) -> Bits:
    """The same bits of keys and values for all layers within some effective bits: those of least loss.

    Raises
    ------
    KVFoldError
        None are so few.
    """
    every = {(k, v): found.alike((k, v)) for k in found.bits("k") for v in found.bits("v")}
    fitting = [own for own, choice in every.items() if found.bits_of(choice) <= bits + 1e-9]
    if not fitting:
        raise KVFoldError(f"budget: {bits:.4g} bits per value; even the fewest bits take more")
    return min(fitting, key=lambda own: found.total(every[own]))
