"""Another format and a low-rank approximation of what it misses, with a basis per page (GEAR)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.formats import AffineGroups, Fields, LowRank
from kvfold.kernels.readers._codes import channels, of_tokens
from kvfold.kernels.readers.affine import AffineReader
from kvfold.kernels.readers.base import Reader

FEW = tl.constexpr(4)
"""Ranks that are added one by one; more are a product of their own."""


@triton.jit
def read_lowrank(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    RANK: tl.constexpr = SPEC[1]
    row_data = fields[SPEC[2]]
    basis = fields[SPEC[2] + 1] + tables[-1] * (D * RANK)
    column = channels(four)
    if RANK <= FEW:
        # loaded before the codes, whose layout is the one that large tensors are to keep
        a, b = _term(row_data, basis, first, left, column, T, D, RANK, 0)
        if RANK > 1:
            c, d = _term(row_data, basis, first, left, column, T, D, RANK, 1)
        if RANK > 2:
            e, f = _term(row_data, basis, first, left, column, T, D, RANK, 2)
        if RANK > 3:
            g, h = _term(row_data, basis, first, left, column, T, D, RANK, 3)
        x, scale = SPEC[3](fields, tables, head, first, left, four, T, SPEC[4])
        x += a * b
        if RANK > 1:
            x += c * d
        if RANK > 2:
            x += e * f
        if RANK > 3:
            x += g * h
    else:
        P: tl.constexpr = SPEC[5]
        term = tl.arange(0, P)
        token = tl.minimum(tl.arange(0, T), left - 1)[:, None]
        row = tl.load(row_data + (first + token) * RANK + term[None, :], mask=(term < RANK)[None, :], other=0.0)
        inside = (term < RANK)[:, None] & (column < D)[None, :]
        turn = tl.load(basis + column[None, :] * RANK + term[:, None], mask=inside, other=0.0)
        x, scale = SPEC[3](fields, tables, head, first, left, four, T, SPEC[4])
        x += tl.dot(row, turn).to(tl.float16)
    most = tl.full([1, 1], 65504.0, tl.float16)
    return tl.minimum(tl.maximum(x, -most), most), scale


@triton.jit
def _term(row_data, basis, first, left, column, T: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Term R of a tile's low-rank part: numbers of tokens, fp16 [T, 1], and of channels, fp16 [1, W]."""
    row = of_tokens(row_data, first, left, T, RANK, R).to(tl.float16)
    return row[:, None], tl.load(basis + column * RANK + R, mask=column < D, other=0.0)[None, :]


class LowRankReader(Reader[LowRank]):
    """Fields: the inner format's, rows of tokens, bases of pages."""

    read = read_lowrank
    of_pages = True

    def __init__(self, form: LowRank) -> None:
        super().__init__(form)
        assert isinstance(form.inner, AffineGroups)
        self.inner = AffineReader(form.inner)
        self.names = (*self.inner.names, "row", "basis")

    @staticmethod
    def why_not(form: LowRank) -> str | None:
        if not isinstance(form.inner, AffineGroups):
            return f"low rank beside {form.inner.kind}; allowed: affine"
        return AffineReader.why_not(form.inner)

    @property
    def spec(self) -> tuple[Any, ...]:
        return self._spec(self.inner.spec)

    def spec_of_halves(self) -> tuple[Any, ...]:
        return self._spec(self.inner.spec_of_halves())

    def _spec(self, inner: tuple[Any, ...]) -> tuple[Any, ...]:
        rank = self.form.rank
        return (
            self.form.head_dim,
            rank,
            len(self.inner.names),
            self.inner.read,
            inner,
            max(16, 1 << (rank - 1).bit_length()),
        )

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        return (*self.inner.fields(stored), stored["row"], stored["basis"])
