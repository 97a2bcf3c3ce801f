"""Two precisions in one block, with ranges of channels or of tokens: ZipCache's."""

import torch

from kvfold.formats import Fields, MixedTokens
from kvfold.kernels.cpu._numbers import TILE, bytes_at, carray, decoder, field, half, halves_at, loops, np, unpack
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, places


@loops
def _refine(data, extra, codes):
    """``codes = codes << extra | low``: low bits of a token, neighbours in neighbouring bits."""
    if extra == 4:
        for i in range(codes.shape[0] // 2):
            byte = data[i]
            for f in range(2):
                codes[2 * i + f] = np.float32(16.0) * codes[2 * i + f] + field(byte, 4 * f, 15)
    elif extra == 2:
        for i in range(codes.shape[0] // 4):
            byte = data[i]
            for f in range(4):
                codes[4 * i + f] = np.float32(4.0) * codes[4 * i + f] + field(byte, 2 * f, 3)
    else:
        for i in range(codes.shape[0] // 8):
            byte = data[i]
            for f in range(8):
                codes[8 * i + f] = np.float32(2.0) * codes[8 * i + f] + field(byte, f, 1)


@loops
def _decode(row, batch, head, unit, tile, scratch):
    dim, bits, extra, salient, by_channel, units = row[16], row[17], row[18], row[19], row[20], row[21]
    size = TILE * dim
    codes, zero, span = scratch[:size], scratch[size : size + dim], scratch[size + dim : size + 2 * dim]
    unpack(bytes_at(row, 0, batch, head, unit, dim * bits * 4), bits, codes)
    block = unit // units
    first = (unit - block * units) * TILE
    length = dim * extra // 8
    lows = bytes_at(row, 4, batch, head, block, salient * length)
    which = bytes_at(row, 8, batch, head, block, units * 4)
    meta = halves_at(row, 12, batch, head, block, 2 * (dim if by_channel else units * TILE))
    if by_channel:
        for i in range(dim):
            zero[i], span[i] = half(meta[2 * i]), half(meta[2 * i + 1])
    before = 0
    for t in range(first):
        before += (which[t >> 3] >> (t & 7)) & 1
    coarse = np.float32(1.0 / ((1 << bits) - 1))
    fine = np.float32(1.0 / ((1 << (bits + extra)) - 1))
    for t in range(TILE):
        at = first + t
        c, x, factor = codes[t * dim : (t + 1) * dim], tile[t, :dim], coarse
        if salient and (which[at >> 3] >> (at & 7)) & 1:
            start = min(before, salient - 1) * length
            _refine(lows[start : start + length], extra, c)
            factor = fine
            before += 1
        if by_channel:
            for i in range(dim):
                x[i] = zero[i] + span[i] * (factor * c[i])
        else:
            offset, step = half(meta[2 * at]), half(meta[2 * at + 1]) * factor
            for i in range(dim):
                x[i] = offset + step * c[i]


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    space = carray(scratch, (TILE + 2) * numbers[16])
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), space)


class MixedReader(CPUReader[MixedTokens]):
    decode = _read

    @property
    def scratch(self) -> int:
        return (TILE + 2) * self.form.head_dim

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes by units; low bits, which tokens are salient, ranges, by blocks; channels, bits, extra bits, salient tokens,
        whether ranges are channels', units of a block."""
        form, units = self.form, self.form.block // TILE
        row = places(form, fields, ("codes", "low", "which", "meta"), keep)
        row[3] //= units
        constants = (form.head_dim, form.bits_per_code, form.extra_bits, form.salient, int(form.axis == "token"), units)
        return [*row, *constants]
