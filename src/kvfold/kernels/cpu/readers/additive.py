"""Sums of two-part codes in complex numbers, and a scale per token: CommVQ's keys."""

import torch

from kvfold.formats import Fields
from kvfold.formats.codebook import AdditiveCodes, KeySteps
from kvfold.kernels.cpu._numbers import TILE, address, carray, decoder, half, halves_at, loops, np
from kvfold.kernels.cpu._rows import BYTE, add_pairs, find_pairs
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, made, places
from kvfold.kernels.cpu.readers.tables import stored


@loops
def _decode(row, batch, head, unit, tile, scratch):
    dim, stages, bits, rotary, kind = row[8], row[9], row[10], row[11], row[12]
    table = row[13] + head * row[14]
    words = halves_at(row, 0, batch, head, unit, stages * 2 * bits)
    scale = halves_at(row, 4, batch, head, unit, TILE)
    first = scratch.ctypes.data
    find_pairs(words.ctypes.data, stages, bits, dim, first)
    steps = row[16] + head * row[17]
    offset = carray(address(steps + row[17] - dim * 4), dim, np.float32) if kind == BYTE else tile[0]
    for t in range(TILE):
        x, factor, rows = tile[t], half(scale[t]), first + 4 * t
        if kind == BYTE:
            add_pairs(kind, dim // 2, rows, stages, table, steps, x.ctypes.data)
            for i in range(dim):
                x[i] = (x[i] + offset[i]) * factor
            continue
        if rotary > 0:
            add_pairs(kind, rotary // 2, rows, stages, table, 0, x.ctypes.data)
        if rotary < dim:
            rest = (dim - rotary) // 2
            add_pairs(kind, rest, rows, stages, table + row[15], 0, x[rotary:].ctypes.data)
        for i in range(dim):
            x[i] *= factor


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    space = carray(scratch, 2 * TILE * numbers[9])
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), space)


class AdditiveReader(CPUReader[AdditiveCodes]):
    decode = _read

    @property
    def scratch(self) -> int:
        return 2 * TILE * self.form.stages

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes, scales, both by units; channels, stages, bits of a code, rotated channels; kind, address and bytes
        per head of centres, bytes of rotated channels; address and bytes per head of steps."""
        form, units = self.form, self.form.block // TILE
        assert form.codebook is not None
        book = form.codebook.on(torch.device("cpu"))
        row = places(form, fields, ("codes", "rms"), keep)
        row[3], row[7] = row[3] // units, row[7] // units
        row += [form.head_dim, form.stages, form.code_bits, book.rotary]
        steps = book.steps
        if steps is None:
            kind, table = stored(book, "centres")
            return [*row, kind, *_place(table), book.rotary * table.itemsize]
        numbers, beside = made(book, "steps", lambda: _of_steps(steps))
        return [*row, BYTE, *_place(numbers), book.rotary, *_place(beside)]


def _place(table: torch.Tensor) -> tuple[int, int]:
    """Address of a table [heads, ...], and its bytes per head."""
    return table.data_ptr(), table[0].numel() * table.itemsize


def _of_steps(steps: KeySteps) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers; and of each head groups' steps, float32 [groups, pairs], and then what each channel's sums lack."""
    each = torch.cat((steps.step.unsqueeze(1), steps.ratio.float() * steps.step.unsqueeze(1)), 1)
    real, imaginary = (steps.shift * torch.cat((steps.step, steps.step), -1)).chunk(2, -1)
    return steps.numbers.contiguous(), torch.cat((each.flatten(1), real - imaginary, real + imaginary), -1)
