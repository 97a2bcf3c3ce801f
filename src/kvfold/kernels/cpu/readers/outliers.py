"""Another format, some elements of each block replaced by fp16 numbers: KVQuant's and GEAR's."""

import torch

from kvfold.formats import Fields, Outliers
from kvfold.kernels.cpu._numbers import TILE, address, carray, decode_inside, decoder, half, halves_at, loops, np
from kvfold.kernels.cpu.readers.base import ROW, places
from kvfold.kernels.cpu.readers.nested import NestedReader

INSIDE = 11
"""Where the inner format's row begins, behind its decoder's address."""


@loops
def _decode(row, batch, head, unit, tile, scratch):
    decode_inside(row, INSIDE, batch, head, unit, tile, scratch)
    dim, units, count = row[8], row[9], row[10]
    block = unit // units
    start, last = (unit - block * units) * TILE * dim, units * TILE * dim - 1
    values = halves_at(row, 0, batch, head, block, count)
    where = carray(address(row[4] + batch * row[5] + head * row[6] + block * row[7]), count, np.int16)
    for k in range(count):
        at = min(max(np.int64(where[k]), 0), last) - start
        if 0 <= at < TILE * dim:
            t = np.uint32(at) // np.uint32(dim)
            tile[t, at - t * dim] = half(values[k])


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    _decode(carray(row, ROW), batch, head, unit, carray(tile, (TILE, width)), carray(scratch, 0))


class OutlierReader(NestedReader[Outliers]):
    decode = _read

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Outliers and their indices, both by blocks; channels, units of a block, outliers; the inner format."""
        form = self.form
        row = places(form, fields, ("outlier", "where"), keep)
        return [*row, form.head_dim, form.block // TILE, form.count, *self.inside(fields, keep)]
