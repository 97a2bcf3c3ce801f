"""Uniform levels and a scale per token: fold's."""

import torch

from kvfold.formats import Fields, UniformTokens
from kvfold.kernels.cpu._numbers import TILE, bytes_at, carray, decoder, half, halves_at, loops, np, unpack
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, places


@loops
def _decode(row, batch, head, unit, tile, codes):
    dim, bits = row[8], row[9]
    unpack(bytes_at(row, 0, batch, head, unit, dim * bits * 4), bits, codes)
    scale = halves_at(row, 4, batch, head, unit, TILE)
    middle = np.float32(((1 << bits) - 1) * 0.5)
    for t in range(TILE):
        c, x, factor = codes[t * dim : (t + 1) * dim], tile[t], half(scale[t])
        for i in range(dim):
            x[i] = factor * (c[i] - middle)


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), carray(scratch, TILE * numbers[8]))


class UniformReader(CPUReader[UniformTokens]):
    decode = _read

    @property
    def scratch(self) -> int:
        return TILE * self.form.head_dim

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes, scales; channels, bits. Places are of units."""
        units = self.form.block // TILE
        row = places(self.form, fields, ("codes", "scale"), keep)
        row[3], row[7] = row[3] // units, row[7] // units
        return [*row, self.form.head_dim, self.form.bits_per_code]
