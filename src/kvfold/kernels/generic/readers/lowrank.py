"""Another format and a low-rank approximation of what it misses, with a basis per page (GEAR)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.formats import AffineGroups, Fields, LowRank
from kvfold.kernels.generic.readers._codes import channels, of_tokens
from kvfold.kernels.generic.readers.affine import AffineReader
from kvfold.kernels.generic.readers.base import Reader

MOST = 32
"""Ranks; each is a multiply-add of every element."""


@triton.jit
def read_lowrank(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    RANK: tl.constexpr = SPEC[1]
    row_data = fields[SPEC[2]]
    basis = fields[SPEC[2] + 1] + tables[-1] * (D * RANK)
    column = channels(four)
    x, scale = SPEC[3](fields, tables, head, first, left, four, T, SPEC[4])
    for r in tl.static_range(RANK):
        row = of_tokens(row_data, first, left, T, RANK, r).to(tl.float16)
        turn = tl.load(basis + column * RANK + r, mask=column < D, other=0.0)
        x += row[:, None] * turn[None, :]
    most = tl.full([1, 1], 65504.0, tl.float16)
    return tl.minimum(tl.maximum(x, -most), most), scale


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
        if form.rank > MOST:
            return f"rank {form.rank}; allowed: up to {MOST}"
        return AffineReader.why_not(form.inner)

    @property
    def spec(self) -> tuple[Any, ...]:
        return self._spec(self.inner.spec)

    def spec_of_halves(self) -> tuple[Any, ...]:
        return self._spec(self.inner.spec_of_halves())

    def _spec(self, inner: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.form.head_dim, self.form.rank, len(self.inner.names), self.inner.read, inner)

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        return (*self.inner.fields(stored), stored["row"], stored["basis"])
