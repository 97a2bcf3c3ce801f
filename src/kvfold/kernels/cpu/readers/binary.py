"""Bits as zeros and ones, and a last column of ones: CommVQ's values."""

import torch

from kvfold.formats import Fields
from kvfold.formats.binary import BinaryCodes
from kvfold.kernels.cpu._numbers import TILE, bytes_at, carray, decoder, field, loops, np
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, places


@loops
def _decode(row, batch, head, unit, tile):
    codes, joint = row[4], row[5]
    first = head if joint == 1 else 0
    for j in range(joint):
        bits = bytes_at(row, 0, batch, first + j, unit, 4 * codes)
        for t in range(TILE):  # a token's bits are bit t / 4 of a quarter of the bytes
            data, x = bits[t % 4 * codes :], tile[t, j * codes :]
            for i in range(codes):
                x[i] = field(data[i], t // 4, 1)
    for t in range(TILE):
        tile[t, joint * codes] = np.float32(1.0)


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    _decode(carray(row, ROW), batch, head, unit, carray(tile, (TILE, width)))


class BinaryReader(CPUReader[BinaryCodes]):
    decode = _read

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Bits, by units; codes of a head, heads whose bits a vector holds."""
        row = places(self.form, fields, ("bits",), keep)
        row[3] //= self.form.block // TILE
        return [*row, self.form.codes, self.form.joint]
