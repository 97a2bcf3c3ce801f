"""A byte for a few channels, with codes of every head's groups, and a scale per token: NOVA-KV's and TaSQ's."""

import torch

from kvfold.formats import Fields, GroupCodes
from kvfold.kernels.cpu._numbers import TILE, address, bytes_at, carray, decoder, half, halves_at, loops, np
from kvfold.kernels.cpu._rows import copy_rows, deal_rows
from kvfold.kernels.cpu.readers.base import ROW, made
from kvfold.kernels.cpu.readers.tables import VectorReader, stored


@loops
def _decode(row, batch, head, unit, tile, joined):
    dim, vector, last, strided, kind = row[8], row[9], row[10], row[11], row[12]
    table = row[13] + head * row[14]
    groups = dim // vector
    codes = bytes_at(row, 0, batch, head, unit, TILE * groups)
    scale = halves_at(row, 4, batch, head, unit, TILE)
    for t in range(TILE):
        x = joined if strided else tile[t]
        first = codes[t * groups :].ctypes.data
        copy_rows(kind, vector, first, groups, last, table, (last + 1) * vector, half(scale[t]), x.ctypes.data)
        if strided:
            deal_rows(joined.ctypes.data, groups, vector, tile[t].ctypes.data)
    if row[15]:
        mean = carray(address(row[15] + head * dim * 4), dim, np.float32)
        for t in range(TILE):
            x = tile[t]
            for i in range(dim):
                x[i] += mean[i]


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), carray(scratch, numbers[8]))


class GroupedReader(VectorReader[GroupCodes]):
    decode = _read

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes, scales, both by units; channels, channels of a group, last code, strided; kind, address and bytes per head
        of codes; address of means."""
        form, row = self.form, self.begun(fields, keep)
        assert form.book is not None
        book = form.book.on(torch.device("cpu"))
        kind, table = stored(book, "codes")
        row += [form.head_dim, form.vector, form.codes - 1, int(form.strided)]
        row += [kind, table.data_ptr(), table[0].numel() * table.itemsize]
        if not form.centred:
            return [*row, 0]
        mean = book.mean
        assert mean is not None, "centred codes need a book with a mean"
        return [*row, made(book, "mean", lambda: mean.detach().float().contiguous()).data_ptr()]
