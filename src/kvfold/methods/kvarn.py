"""KVarN: rotation, then tiles whose tokens and channels have equal variance (Muller et al., 2026, arXiv 2606.03458)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.formats import PAGE, AffineGroups, Balanced, Format, Hadamard
from kvfold.methods.base import GROUPS, LayerSpec, Method
from kvfold.methods.options import Numbers, Problem


@dataclass(frozen=True)
class KVarN(Method):
    """Data-free: a Hadamard rotation spreads large channels, factors by token and by channel spread large tokens.

    From the source: the rotation of all of ``head_dim``; tiles of 128 tokens; standard deviations of both axes divided out by
    turns, the most even tile of all rounds kept; asymmetric rounding of keys by channel over the tile's tokens and of
    values by token; the groups' own factors absorbed in scale and zero-point, one further fp16 factor stored. Our reading:
    no factor depends on the tile's absolute size, an axis of next to no variance is left alone, and the rotation has fixed
    random signs.

    Parameters
    ----------
    group : int
        Tokens of a tile, encoded together.
    rounds : int
        Times that both axes are normalized; 0: not at all, which leaves rotation and affine groups.
    rotation : int
        Channels that a Hadamard block mixes, a power of two; 0: as many of ``head_dim`` as a power of two divides it,
        1: none.
    seed : int
        Of the rotation's signs.
    """

    group: int = 128
    rounds: int = 8
    rotation: int = 0
    seed: int = 0

    name = "kvarn"
    summary = "Hadamard rotation, equal variance of tokens and channels of a tile, asymmetric groups"
    source = "KVarN: Variance-Normalized KV-Cache Quantization Mitigates Error Accumulation (arXiv 2606.03458)"
    url = "https://arxiv.org/abs/2606.03458"

    def problems(self) -> Iterator[Problem]:
        if self.group not in TILES:
            yield Problem("group", TILES)
        yield from super().problems()
        if self.rounds not in ROUNDS:
            yield Problem("rounds", ROUNDS)
        if self.rotation < 0 or self.rotation & (self.rotation - 1):
            powers = Numbers(0, 2, text="0 (as many channels as possible) or a power of two that divides head_dim")
            yield Problem("rotation", powers)

    def _format(self, spec: LayerSpec, operand: str, bits: int, axis: str) -> Format:
        d = spec.head_dim
        with self.refusing():
            group = self.block if axis == "token" else d
            inner = AffineGroups(d, self.block, spec.operand(operand), bits, axis, "asym", group)
            tile = Balanced(d, self.block, inner.operand, inner, self.rounds)
        return self.paged(tile, False, "", self._basis(spec))

    @property
    def kernel_encodes(self) -> bool:
        return True

    @property
    def page(self) -> int:
        """As published, too: a tile is all that anything is computed of."""
        return PAGE

    def _basis(self, spec: LayerSpec) -> Hadamard | None:
        d = spec.head_dim
        if self.rotation == 1:
            return None
        with self.refusing():
            return Hadamard(d, self.rotation or d & -d, self.seed)

    def key_format(self, spec: LayerSpec) -> Format:
        return self._format(spec, "key", self.key_bits, "token")

    def value_format(self, spec: LayerSpec) -> Format:
        return self._format(spec, "value", self.value_bits, "channel")

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        basis = self._basis(spec)
        return {} if basis is None else basis.tables(device)


TILES = tuple(size for size in GROUPS if size % 32 == 0 and PAGE % size == 0)
ROUNDS = Numbers(0, 64)
