"""A format and a low-rank approximation of what it misses, with a basis per page. The storage of GEAR."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.arithmetic import lasting
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
    wide = x.double()
    gram = wide.transpose(-1, -2) @ wide
    start = _start(x.shape[-1], rank, seed, x.device)
    basis = start.expand(*gram.shape[:-1], rank)
    # a residual of zero has no direction; the start's serve as well as any
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    some, scale = size > 0, size.clamp_min(1e-300)
    for _ in range(loops):
        basis = _orthonormal(torch.where(some, gram @ basis / scale, basis), start)
    return basis.float()


@lasting(64)
def _start(dim: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """Orthonormal columns, float64 [dim, rank], always the same."""
    draw = torch.Generator().manual_seed(seed)
    block = torch.randn(dim, rank, generator=draw, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(block).Q.to(device)


def _orthonormal(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of ``x``, float64 [..., dim, rank], by Cholesky's factorization, twice: Householder's
    takes a GPU a launch for every matrix. Where columns depend on one another, ``start`` has directions to go on with."""
    for spare in (1e-9, 0.0):
        products = x.mT @ x
        products.diagonal(dim1=-2, dim2=-1).mul_(1 + 1e-13)
        lower, _ = torch.linalg.cholesky_ex(products)  # does not wait for the device
        x = torch.linalg.solve_triangular(lower.mT, x, upper=True, left=False)
        if spare:
            x = x + spare * start
    return x
