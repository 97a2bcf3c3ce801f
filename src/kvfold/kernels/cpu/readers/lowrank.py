"""Another format and a product of low rank: a row per token, a basis per page. GEAR's."""

import torch

from kvfold.formats import Fields, LowRank
from kvfold.kernels.cpu._numbers import (
    TILE,
    add_product,
    carray,
    decode_inside,
    decoder,
    halves_at,
    loops,
    widen,
)
from kvfold.kernels.cpu.readers.base import ROW, place, places
from kvfold.kernels.cpu.readers.nested import NestedReader

INSIDE = 11
"""Where the inner format's row begins, behind its decoder's address."""


@loops
def _decode(row, batch, head, unit, tile, scratch):
    decode_inside(row, INSIDE, batch, head, unit, tile, scratch)
    dim, rank, units = row[8], row[9], row[10]
    size = dim * rank
    stored, basis = scratch[:size], scratch[size : 2 * size].reshape(rank, dim)
    widen(halves_at(row, 4, batch, head, unit // units if units else 0, size), stored)
    for r in range(rank):
        b = basis[r]
        for i in range(dim):
            b[i] = stored[i * rank + r]
    rows = scratch[2 * size : 2 * size + TILE * rank]
    widen(halves_at(row, 0, batch, head, unit, TILE * rank), rows)
    add_product(rows.reshape(TILE, rank), basis, tile)


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    space = carray(scratch, numbers[9] * (2 * numbers[8] + TILE))
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), space)


class LowRankReader(NestedReader[LowRank]):
    decode = _read

    @property
    def own_scratch(self) -> int:
        return self.form.rank * (2 * self.form.head_dim + TILE)

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Rows by units, bases by pages; channels, rank, units of a page (0: one page); the inner format."""
        form = self.form
        row = places(form, fields, ("row",), keep)
        row[3] //= form.block // TILE
        row += place(fields["basis"], form.head_dim * form.rank, keep)
        return [*row, form.head_dim, form.rank, form.page // TILE, *self.inside(fields, keep)]
