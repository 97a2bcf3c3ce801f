"""What formats share whose codes are of several channels at once: how channels are dealt out to groups."""

import torch

from kvfold.formats.base import Format
from kvfold.formats.uniform import FITS


class VectorCodes(Format):
    """A code per group of ``vector`` channels.

    ``strided``: groups of channels i, i + head_dim / vector, ... instead of neighbours. ``fit``: "rms", or how the stored scale
    is fitted (:mod:`kvfold.formats.uniform`).
    """

    vector: int
    strided: bool
    fit: str

    def __post_init__(self) -> None:
        if self.vector < 1 or self.head_dim % self.vector:
            allowed = [v for v in range(1, self.head_dim + 1) if self.head_dim % v == 0]
            raise ValueError(f"vector={self.vector} does not divide head_dim={self.head_dim}; allowed: {allowed}")
        if self.fit not in ("rms", *FITS):
            raise ValueError(f"fit={self.fit}: allowed: rms, {', '.join(FITS)}")

    @property
    def groups(self) -> int:
        return self.head_dim // self.vector

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] -> [..., groups, vector]."""
        if self.strided:
            return x.unflatten(-1, (self.vector, -1)).transpose(-1, -2)
        return x.unflatten(-1, (-1, self.vector))

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`split`."""
        return (x.transpose(-1, -2) if self.strided else x).flatten(-2)
