"""A format and a low-rank approximation of what it misses, with a basis per page. The storage of GEAR."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields, Format
from kvfold.formats.paged import PagedFormat


@dataclass(frozen=True)
class LowRank(PagedFormat):
    """``x = inner + a B'``: B (head_dim x rank) per page, of what ``inner`` misses; a row per token.

    Parameters
    ----------
    inner : Format
    rank, loops, seed : int
        Of B, and of the power iteration that finds it (GEAR, Algorithm 2).

    Notes
    -----
    Fields: the inner format's; ``row`` fp16 [block, rank] per block; ``basis`` fp16 [head_dim, rank] per page.
    """

    inner: Format
    rank: int
    loops: int = 3
    seed: int = 0

    kind: ClassVar[str] = "low rank"

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {**self.inner.fields(), "row": ((self.block, self.rank), torch.float16)}

    def page_fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"basis": ((self.head_dim, self.rank), torch.float16)}

    def _missed(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.inner.decode(self.inner.encode(x))

    def statistics(self, first: torch.Tensor) -> Fields:
        tokens = first.shape[-2] // self.block * self.block
        missed = self._missed(first[..., :tokens, :].flatten(2, 3)).unflatten(-2, (first.shape[2], -1))
        return {"basis": row_space(missed, self.rank, self.loops, self.seed).to(torch.float16)}

    def encode(self, x: torch.Tensor, page: Fields | None = None, **how: object) -> Fields:
        page, made = self.with_statistics(x, page)
        x = x.float()
        # one product per block: the same rows whatever the call's length; B's columns are orthonormal, so this a is the best
        inner = self.inner.encode(x, **how)
        missed = self._missed(x) if how else x - self.inner.decode(inner)
        rows = missed.unflatten(-2, (-1, self.block)) @ page["basis"].float()
        return {**inner, "row": to_fp16(rows), **made}

    def decode(self, fields: Fields) -> torch.Tensor:
        inner, page = self.split(fields)
        row = inner.pop("row").float()
        return self.inner.decode(inner) + (row @ page["basis"].float().transpose(-1, -2)).flatten(-3, -2)

    def describe(self) -> str:
        where = "page" if self.page else "sequence"
        return f"{self.inner.describe()} + rank {self.rank} of a basis per {where} ({self.bits:.2f} bits in all)"


def row_space(x: torch.Tensor, rank: int, loops: int, seed: int) -> torch.Tensor:
    """Orthonormal basis near the top right singular vectors, by power iteration (GEAR, Algorithm 2).

    Parameters
    ----------
    x : Tensor, float32 [..., tokens, d]

    Returns
    -------
    Tensor, float32 [..., d, rank]
    """
    gram = x.double().transpose(-1, -2) @ x.double()
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(x.shape[-1], rank, generator=draw, dtype=torch.float64, device="cpu")
    basis = torch.linalg.qr(start).Q.to(x.device).expand(*gram.shape[:-1], rank)
    for _ in range(loops):
        # a residual of zero has no direction; the start's serve as well as any
        size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        basis = torch.linalg.qr(torch.where(size > 0, gram @ basis / size.clamp_min(1e-300), basis)).Q
    return basis.float()
