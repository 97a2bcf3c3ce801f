"""Groups of channels as bytes: up to 256 codes for every KV head and group, and a scale per token. The storage of NOVA-KV and
TaSQ."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.arithmetic import beside
from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields
from kvfold.formats.packing import UNIT
from kvfold.formats.uniform import fitted
from kvfold.formats.vectors import VectorCodes

CHUNK = 1 << 23
"""Distances between vectors and codes that exist at once."""


class GroupBook:
    """Codebooks of a layer.

    Parameters
    ----------
    codes : Tensor, floating [num_kv_heads, groups, codes, vector]
    metric : Tensor or None, float32 [num_kv_heads, groups, vector, vector]
        A factor L of the distance's matrix: the code that is nearest to x makes ``|(x - code) L|`` least. None: the plain
        distance.
    mean : Tensor or None, fp16 [num_kv_heads, head_dim]
        What all vectors of a head share; codes are of vectors less it.
    """

    def __init__(
        self, codes: torch.Tensor, metric: torch.Tensor | None = None, mean: torch.Tensor | None = None
    ) -> None:
        self.codes, self.metric, self.mean = codes, metric, mean

    def on(self, device: torch.device) -> "GroupBook":
        """The same codebooks on another device; moved once."""
        return self if device == self.codes.device else self._moved(device)

    @beside
    def _moved(self, device: torch.device) -> "GroupBook":
        metric, mean = (None if x is None else x.to(device) for x in (self.metric, self.mean))
        return GroupBook(self.codes.to(device), metric, mean)


@dataclass(frozen=True)
class GroupCodes(VectorCodes):
    """Each group of ``vector`` channels as one code of its own codebook, times the token's scale; plus the head's mean,
    if it has one.

    Parameters
    ----------
    vector : int
        Channels that are quantized together; divides ``head_dim``.
    codes : int
        Codes of a codebook, at most 256: an index takes a byte.
    strided : bool
        Group channels i, i + head_dim / vector, ... instead of neighbours: both channels of RoPE's pairs lie in one group.
    fit : {"rms", "least", "size", "unbiased"}
        The stored scale: the vector's root mean square, which codes are chosen for; or what is fitted to the chosen codes
        (:mod:`kvfold.formats.uniform`).
    book : GroupBook or None
        Without it the format knows its size only.
    centred : bool
        Whether codes are of vectors less the book's mean.

    Notes
    -----
    Fields, per block and KV head: ``codes`` uint8 [block, head_dim / vector]; ``rms`` fp16 [block].
    """

    vector: int
    codes: int = 256
    strided: bool = False
    fit: str = "rms"
    book: GroupBook | None = field(default=None, compare=False, repr=False)
    centred: bool = False

    kind: ClassVar[str] = "group codes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.codes <= 256:
            raise ValueError(f"codes={self.codes}: allowed: 2 to 256")

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((self.block, self.groups), torch.uint8), "rms": ((self.block,), torch.float16)}

    def encode(self, x: torch.Tensor) -> Fields:
        assert self.book is not None
        x = x.float()
        if self.centred:
            x = x - self._mean(x.device)
        size = x.square().mean(-1, keepdim=True).sqrt()
        scale = to_fp16(size)
        unit = x / torch.where(size == 0, torch.ones_like(size), size)
        chosen = choose(self.split(unit), self.book.on(x.device))
        if self.fit != "rms":
            scale = to_fp16(fitted(x, self._vectors(chosen), self.fit))
        return {
            "codes": chosen.to(torch.uint8).unflatten(-2, (-1, self.block)),
            "rms": scale.squeeze(-1).unflatten(-1, (-1, self.block)),
        }

    def _mean(self, device: torch.device) -> torch.Tensor:
        """Float32 [num_kv_heads, 1, head_dim]."""
        assert self.book is not None
        mean = self.book.on(device).mean
        assert mean is not None, "centred codes need a book with a mean"
        return mean.float().unsqueeze(-2)

    def _vectors(self, codes: torch.Tensor) -> torch.Tensor:
        """Vectors of unit scale of codes, int64 [batch, heads, tokens, groups]: float32 [batch, heads, tokens, head_dim]."""
        assert self.book is not None
        book = self.book.on(codes.device).codes
        heads = torch.arange(book.shape[0], device=codes.device).view(-1, 1, 1)
        groups = torch.arange(self.groups, device=codes.device)
        return self.join(book[heads, groups, codes].float())

    def decode(self, fields: Fields) -> torch.Tensor:
        codes = fields["codes"].flatten(-3, -2).long().clamp_max(self.codes - 1)
        x = self._vectors(codes) * fields["rms"].flatten(-2).float().unsqueeze(-1)
        return x + self._mean(x.device) if self.centred else x

    def describe(self) -> str:
        less = " less its mean" if self.centred else ""
        return f"{self.codes} codes for {self.vector} channels of a head{less} ({self.bits:.2f} bits)"


def choose(x: torch.Tensor, book: GroupBook) -> torch.Tensor:
    """Nearest code of every group.

    Parameters
    ----------
    x : Tensor, float32 [batch, heads, tokens, groups, vector]
        ``tokens`` a multiple of 32: a product of its own for each 32 makes codes the same whatever the call's length.
    book : GroupBook

    Returns
    -------
    Tensor, int64 [batch, heads, tokens, groups]
    """
    codes = book.codes.float()
    batch, heads, tokens, groups, _ = x.shape
    if book.metric is not None:
        codes = codes @ book.metric
    half = codes.square().sum(-1).unsqueeze(-2) / 2  # [heads, groups, 1, codes]
    out = torch.empty(batch, heads, tokens, groups, dtype=torch.int64, device=x.device)
    step = max(UNIT, CHUNK // (batch * heads * groups * codes.shape[-2]) // UNIT * UNIT)
    for start in range(0, tokens, step):
        piece = x[:, :, start : start + step].unflatten(2, (-1, UNIT)).permute(0, 2, 1, 4, 3, 5)  # groups before tokens
        if book.metric is not None:
            piece = piece @ book.metric
        nearest = (half - piece @ codes.transpose(-1, -2)).argmin(-1)  # [batch, units, heads, groups, 32]
        out[:, :, start : start + step] = nearest.permute(0, 2, 1, 4, 3).flatten(2, 3)
    return out
