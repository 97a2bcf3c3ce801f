"""Residual vector quantization: a byte per stage and group of channels, and a scale per token. The storage of VQLLM."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields
from kvfold.formats.uniform import fitted
from kvfold.formats.vectors import VectorCodes

CHUNK = {"cpu": 8192, "cuda": 1 << 17}
"""Vectors whose distances to all codes exist at once: few stay in a CPU's caches, many keep a GPU busy."""


class Codebook:
    """Codes of all stages, shared by the KV heads of a layer: floating [stages, codes, vector]; fp16 halves them."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes
        self._devices: dict[torch.device, Codebook] = {codes.device: self}

    def on(self, device: torch.device) -> "Codebook":
        """The same codebook on another device; moved once."""
        if device not in self._devices:
            self._devices[device] = Codebook(self.codes.to(device))
        return self._devices[device]


@dataclass(frozen=True)
class ResidualCodes(VectorCodes):
    """Each group of ``vector`` channels as the sum of one code per stage, times the token's scale.

    Parameters
    ----------
    vector : int
        Channels that are quantized together; divides ``head_dim``.
    codes : int
        Codes per stage, at most 256: an index takes a byte.
    stages : int
    strided : bool
        Group channels i, i + head_dim / vector, ... instead of neighbours.
    book : Codebook or None
        Without it the format knows its size only.
    fit : {"rms", "least", "size", "unbiased"}
        The stored scale: the vector's root mean square, which codes are chosen for; or what is fitted to the chosen codes
        (:mod:`kvfold.formats.uniform`).

    Notes
    -----
    Fields, per block and KV head: ``codes`` uint8 [block, head_dim / vector, stages]; ``rms`` fp16 [block].
    """

    vector: int
    codes: int
    stages: int
    strided: bool = False
    book: Codebook | None = field(default=None, compare=False, repr=False)
    fit: str = "rms"

    kind: ClassVar[str] = "residual codes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.codes <= 256 or self.stages < 1:
            raise ValueError(f"codes={self.codes}, stages={self.stages}: 2 to 256 codes and at least 1 stage")

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "codes": ((self.block, self.groups, self.stages), torch.uint8),
            "rms": ((self.block,), torch.float16),
        }

    def encode(self, x: torch.Tensor) -> Fields:
        assert self.book is not None
        x = x.float()
        rms = to_fp16(x.square().mean(-1, keepdim=True).sqrt())
        safe = torch.where(rms == 0, torch.ones_like(rms), rms).float()
        vectors = self.split(x / safe)
        codes = choose(vectors.flatten(0, -2), self.book.on(x.device).codes.float()).view(
            *vectors.shape[:-1], self.stages
        )
        if self.fit != "rms":
            rms = to_fp16(fitted(x, self._vectors(codes), self.fit))
        return {
            "codes": codes.to(torch.uint8).unflatten(-3, (-1, self.block)),
            "rms": rms.squeeze(-1).unflatten(-1, (-1, self.block)),
        }

    def _vectors(self, codes: torch.Tensor) -> torch.Tensor:
        """Vectors of unit scale of codes, int64 [..., groups, stages]: float32 [..., head_dim]."""
        assert self.book is not None
        stages = self.book.on(codes.device).codes.float()
        vectors = stages[0][codes[..., 0]]
        for stage in range(1, self.stages):
            vectors = vectors + stages[stage][codes[..., stage]]
        return self.join(vectors)

    def decode(self, fields: Fields) -> torch.Tensor:
        codes = fields["codes"].flatten(-4, -3).long().clamp_max(self.codes - 1)
        return self._vectors(codes) * fields["rms"].flatten(-2).float().unsqueeze(-1)

    def describe(self) -> str:
        return f"{self.stages} stages of {self.codes} codes for {self.vector} channels ({self.bits:.2f} bits)"


def choose(x: torch.Tensor, stages: torch.Tensor) -> torch.Tensor:
    """Nearest code of each stage to what the stages before it left over.

    Parameters
    ----------
    x : Tensor, float32 [n, vector]
    stages : Tensor, float32 [stages, codes, vector]

    Returns
    -------
    Tensor, int64 [n, stages]
    """
    chosen = torch.empty(len(x), len(stages), dtype=torch.int64, device=x.device)
    chunk = CHUNK[x.device.type]
    for start in range(0, len(x), chunk):
        rest = x[start : start + chunk]
        for index, codes in enumerate(stages):
            best = nearest(rest, codes)
            chosen[start : start + chunk, index] = best
            rest = rest - codes[best]
    return chosen


def nearest(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Index of the nearest code: x [n, vector], codes [codes, vector] -> int64 [n]."""
    return torch.addmm(codes.square().sum(-1), x, codes.T, alpha=-2).argmin(-1)
