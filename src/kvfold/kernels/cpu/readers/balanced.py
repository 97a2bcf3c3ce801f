"""Affine groups of balanced tiles, and a factor per token or per channel: KVarN's."""

import torch

from kvfold.formats import Balanced, Fields
from kvfold.kernels.cpu._numbers import TILE, carray, decode_inside, decoder, half, halves_at, loops, widen
from kvfold.kernels.cpu.readers.base import ROW, places
from kvfold.kernels.cpu.readers.nested import NestedReader

INSIDE = 7
"""Where the affine groups' row begins, behind their decoder's address."""


@loops
def _decode(row, batch, head, unit, tile, scratch):
    decode_inside(row, INSIDE, batch, head, unit, tile, scratch)
    dim, by_token, units = row[4], row[5], row[6]
    if by_token:
        stored = halves_at(row, 0, batch, head, unit, TILE)
        for t in range(TILE):
            x, factor = tile[t, :dim], half(stored[t])
            for i in range(dim):
                x[i] *= factor
        return
    factors = scratch[:dim]
    widen(halves_at(row, 0, batch, head, unit // units, dim), factors)
    for t in range(TILE):
        x = tile[t, :dim]
        for i in range(dim):
            x[i] *= factors[i]


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), carray(scratch, numbers[4]))


class BalancedReader(NestedReader[Balanced]):
    decode = _read

    @property
    def own_scratch(self) -> int:
        return self.form.head_dim

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Factors (of tokens: by units); channels, whether factors are tokens', units of a block; the affine groups."""
        form, units = self.form, self.form.block // TILE
        row = places(form, fields, ("factor",), keep)
        if form.by_token:
            row[3] //= units
        return [*row, form.head_dim, int(form.by_token), units, *self.inside(fields, keep)]
