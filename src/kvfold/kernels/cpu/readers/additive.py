"""Sums of two-part codes in complex numbers, and a scale per token: CommVQ's keys."""

import torch

from kvfold.formats import Fields
from kvfold.formats.codebook import AdditiveCodes, KeySteps
from kvfold.kernels.cpu._numbers import TILE, address, carray, decoder, half, halves_at, loops, np
from kvfold.kernels.cpu._rows import BYTE, add_pairs, find_pairs
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, made, places
from kvfold.kernels.cpu.readers.tables import stored

MOST_STAGES = 128
"""Stages whose sums of whole steps, at most 254 a stage, are below 2^15."""


@loops
def _decode(row, batch, head, unit, tile, scratch):
    dim, stages, bits, rotary, kind = row[8], row[9], row[10], row[11], row[12]
    table = row[13] + head * row[14]
    words = halves_at(row, 0, batch, head, unit, stages * 2 * bits)
    scale = halves_at(row, 4, batch, head, unit, TILE)
    first, whole = scratch.ctypes.data, scratch[2 * TILE * stages :].view(np.int16)
    find_pairs(words.ctypes.data, stages, bits, dim, first)
    steps = carray(address(row[16] + head * dim * 8), (2, dim), np.float32) if kind == BYTE else tile
    for t in range(TILE):
        x, factor, rows = tile[t], half(scale[t]), first + 4 * t
        if kind == BYTE:
            add_pairs(kind, dim // 2, rows, stages, table, whole.ctypes.data)
            for i in range(dim):
                x[i] = (np.float32(whole[i]) + steps[1, i]) * (steps[0, i] * factor)
            continue
        if rotary > 0:
            add_pairs(kind, rotary // 2, rows, stages, table, x.ctypes.data)
        if rotary < dim:
            rest = (dim - rotary) // 2
            add_pairs(kind, rest, rows, stages, table + row[15], x[rotary:].ctypes.data)
        for i in range(dim):
            x[i] *= factor


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    space = carray(scratch, 2 * TILE * numbers[9] + (numbers[8] + 1) // 2)
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), space)


class AdditiveReader(CPUReader[AdditiveCodes]):
    decode = _read

    @property
    def scratch(self) -> int:
        return 2 * TILE * self.form.stages + (self.form.head_dim + 1) // 2

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes, scales, both by units; channels, stages, bits of a code, rotated channels; kind, address and bytes
        per head of centres, bytes of rotated channels; address of steps."""
        form, units = self.form, self.form.block // TILE
        assert form.codebook is not None
        book = form.codebook.on(torch.device("cpu"))
        row = places(form, fields, ("codes", "rms"), keep)
        row[3], row[7] = row[3] // units, row[7] // units
        row += [form.head_dim, form.stages, form.code_bits, book.rotary]
        steps = book.steps if form.stages <= MOST_STAGES else None
        if steps is None:
            kind, table = stored(book, "centres")
            return [*row, kind, *_place(table), book.rotary * table.itemsize]
        numbers, scales = made(book, "steps", lambda: _of_steps(steps))
        return [*row, BYTE, *_place(numbers), book.rotary, scales.data_ptr()]


def _place(table: torch.Tensor) -> tuple[int, int]:
    """Address of a table [heads, ...], and its bytes per head."""
    return table.data_ptr(), table[0].numel() * table.itemsize


def _of_steps(steps: KeySteps) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, and of each channel the step and what is added to sums of them: float32 [heads, 2, channels]."""
    real, imaginary = steps.shift.float().chunk(2, -1)
    middle = 2 * 64 * steps.numbers.shape[1]  # both parts of every stage; of real parts they cancel
    offset = torch.cat((real - imaginary, real + imaginary - middle), -1)
    return steps.numbers.contiguous(), torch.stack((torch.cat((steps.step, steps.step), -1).float(), offset), 1)
