"""Uniform levels about zero and one scale per token: the storage of fold.

Least squares, which has the lowest error of a vector, also makes it too short: what rounding loses is uncorrelated with what is
stored. Attention minds that. Errors of values average out over tokens and shortness does not, so values are stored with the
scale that makes ``x . decoded = |x|^2``; a key's length is a factor of its score, so keys keep ``|decoded| = |x|``.

A code u of b bits stands for ``scale * (u - o)`` with ``o = (2^b - 1) / 2``. There is no zero-point, so a kernel needs the
codes by masks alone, one factor per token, and ``o`` times the sum of the query. Uniform levels have 1 % (2 bits) and 8 %
(3 bits) more squared error than Lloyd-Max levels on Gaussian channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields, Format
from kvfold.formats.packing import PLANES, UNIT, pack, unpack, words_per_unit

STEP = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352}
"""Spacing of 2^b uniform levels with the least squared error for a standard normal (Max, 1960)."""

ROUNDS = 2
"""Times that a scale is fitted to its codes by least squares, and codes are chosen for it."""

FITS = ("least", "size", "unbiased")


@dataclass(frozen=True)
class UniformTokens(Format):
    """Codes of ``bits_per_code`` bits on uniform levels about 0, one scale per token.

    The scale starts where a Gaussian vector of this size has the least error (for 8 bits: at the largest channel) and is
    fitted to the codes by least squares, the codes being chosen anew each time. The scale that is stored then follows ``fit``.

    Parameters
    ----------
    bits_per_code : {1, 2, 3, 4, 8}
    fit : {"least", "size", "unbiased"}
        Of the stored scale to the codes: least squared error, the vector's own length, or no shrinkage along the vector.

    Notes
    -----
    Fields, per block and KV head: ``codes`` int16 [block / 32, 2 d b], in the order of :mod:`kvfold.formats.packing`;
    ``scale`` fp16 [block].
    """

    bits_per_code: int
    fit: str = "least"

    kind: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        if self.bits_per_code not in PLANES:
            raise ValueError(f"bits={self.bits_per_code}: uniform levels take one of {sorted(PLANES)} bits")
        if self.fit not in FITS:
            raise ValueError(f"fit={self.fit}: allowed: {', '.join(FITS)}")
        if self.head_dim % 16:
            raise ValueError(f"head_dim={self.head_dim}: packed formats need a multiple of 16")
        if self.block % UNIT:
            raise ValueError(f"block={self.block}: must be a multiple of {UNIT} tokens")

    @property
    def middle(self) -> float:
        """o: half of the largest code."""
        return ((1 << self.bits_per_code) - 1) / 2

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "codes": ((self.block // UNIT, words_per_unit(self.head_dim, self.bits_per_code)), torch.int16),
            "scale": ((self.block,), torch.float16),
        }

    def encode(self, x: torch.Tensor) -> Fields:
        x = x.float()
        if self.bits_per_code in STEP:
            scale = x.square().mean(-1, keepdim=True).sqrt() * STEP[self.bits_per_code]
        else:
            scale = x.abs().amax(-1, keepdim=True) / self.middle
        for _ in range(ROUNDS):
            levels = self._levels(x, scale)
            scale = (x * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
        levels = self._levels(x, scale)
        scale = fitted(x, levels, self.fit)
        words = pack((levels + self.middle).to(torch.uint8), self.bits_per_code, self.operand)
        return {
            "codes": words.unflatten(-2, (-1, self.block // UNIT)),
            "scale": to_fp16(scale).squeeze(-1).unflatten(-1, (-1, self.block)),
        }

    def _levels(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Nearest level of x / scale: ``u - o``."""
        top = 2 * self.middle
        safe = torch.where(scale == 0, torch.ones_like(scale), scale)
        return (x / safe + self.middle).round().clamp(0, top) - self.middle

    def decode(self, fields: Fields) -> torch.Tensor:
        codes = unpack(fields["codes"].flatten(-3, -2), self.bits_per_code, self.operand, self.head_dim, torch.float32)
        return fields["scale"].flatten(-2).float().unsqueeze(-1) * (codes - self.middle)

    def describe(self) -> str:
        return f"{self.bits_per_code}-bit uniform, a scale per token ({self.bits:.2f} bits)"


def fitted(x: torch.Tensor, levels: torch.Tensor, fit: str) -> torch.Tensor:
    """What a vector of levels is to be multiplied with, to stand for x: [..., d] and [..., d] -> [..., 1]; see :data:`FITS`.

    0 where levels are, or are orthogonal to x (whatever is stored of a vector of zeros decodes to zeros).
    """
    along, codes = (x * levels).sum(-1, keepdim=True), levels.square().sum(-1, keepdim=True)
    size = x.square().sum(-1, keepdim=True)
    none = torch.zeros_like(along)
    if fit == "unbiased":
        return torch.where(along > 0, size / along, none)
    codes = torch.where(codes > 0, codes, torch.ones_like(codes))
    return along / codes if fit == "least" else (size / codes).sqrt()
