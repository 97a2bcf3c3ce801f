"""Sums of a code per stage for a few channels, and a scale per token: VQLLM's and GSRQ's."""

import torch

from kvfold.formats import Fields, ResidualCodes
from kvfold.kernels.cpu._numbers import TILE, bytes_at, carray, decoder, half, halves_at, loops
from kvfold.kernels.cpu._rows import add_rows, copy_rows, deal_rows
from kvfold.kernels.cpu.readers.base import ROW
from kvfold.kernels.cpu.readers.tables import VectorReader, stored


@loops
def _decode(row, batch, head, unit, tile, joined):
    dim, vector, last, stages, strided, kind, table = row[8], row[9], row[10], row[11], row[12], row[13], row[14]
    groups = dim // vector
    codes = bytes_at(row, 0, batch, head, unit, TILE * groups * stages)
    scale = halves_at(row, 4, batch, head, unit, TILE)
    for t in range(TILE):
        x = joined if strided else tile[t]
        first, to = codes[t * groups * stages :].ctypes.data, x.ctypes.data
        if stages == 1:
            copy_rows(kind, vector, first, groups, last, table, 0, half(scale[t]), to)
        else:
            for g in range(groups):
                at = first + g * stages
                add_rows(
                    kind, vector, at, stages, last, table, (last + 1) * vector, half(scale[t]), to + g * vector * 4
                )
        if strided:
            deal_rows(joined.ctypes.data, groups, vector, tile[t].ctypes.data)


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), carray(scratch, numbers[8]))


class ResidualReader(VectorReader[ResidualCodes]):
    decode = _read

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes, scales, both by units; channels, those of a group, last code, stages, strided; kind and address of codes."""
        form, row = self.form, self.begun(fields, keep)
        assert form.book is not None
        kind, table = stored(form.book.on(torch.device("cpu")), "codes")
        return [
            *row,
            form.head_dim,
            form.vector,
            form.codes - 1,
            form.stages,
            int(form.strided),
            kind,
            table.data_ptr(),
        ]
