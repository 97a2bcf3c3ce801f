"""Affine groups in every mode, width and axis: KIVI's, SQuat's and InnerQ's."""

import torch

from kvfold.formats import AffineGroups, Fields
from kvfold.kernels.cpu._numbers import (
    TILE,
    address,
    as_float,
    carray,
    decoder,
    flip,
    half,
    loops,
    np,
    unpack,
)
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, places

MODES = {"asym": 0, "sym": 1, "hybrid": 2}


@loops
def _metadata(row, first, second, groups, mode, group, scale, zero, sign):
    """Scales, zero-points and sign bits (words of 32, or 16 where groups are not multiples of 32) of a row of groups.

    ``first``, ``second``: addresses of scales (and zero-points) and of sign bits.
    """
    if mode == 0:
        meta = carray(address(first + row * groups * 4), 2 * groups, np.uint16)
        for i in range(groups):
            scale[i] = half(meta[i])
        for i in range(groups):
            zero[i] = half(meta[groups + i])
        return
    words = group // 16
    stored = carray(address(first + row * groups * 2), groups, np.uint16)
    aux = carray(address(second + row * groups * words * 2), groups * words, np.uint16)
    for i in range(groups):
        scale[i] = half(np.uint16(stored[i] & 0x7FFF))
    step = 2 if words % 2 == 0 else 1
    for j in range(words // step):
        for i in range(groups):
            at = i * words + j * step
            word = np.int32(aux[at])
            if step == 2:
                word |= np.int32(np.int32(aux[at + 1]) << 16)
            sign[j * groups + i] = word
    for i in range(groups):
        zero[i] = np.float32(0.0)
    if mode == 2:
        for i in range(groups):
            if stored[i] & 0x8000:
                if group == 16:
                    zero[i] = half(aux[i])
                else:
                    at = i * words
                    zero[i] = as_float(np.int32(np.int32(aux[at]) | np.int32(np.int32(aux[at + 1]) << 16)))
                for j in range(words // step):
                    sign[j * groups + i] = 0


@loops
def decode_affine(codes_at, first, second, unit, dim, bits, axis, mode, group, tile, codes, scale, zero, sign):
    """Decode a unit of affine groups into ``tile`` [32, dim or more].

    ``codes_at``, ``first``, ``second``: addresses of the head's codes, scales and zero-points, and sign bits.
    """
    size = dim * bits * 4
    unpack(carray(address(codes_at + unit * size), size, np.uint8), bits, codes)
    step = 32 if group % 32 == 0 else 16
    if axis == 1:
        per_token = dim // group
        _metadata(unit, first, second, TILE * per_token, mode, group, scale, zero, sign)
        for t in range(TILE):
            for g in range(per_token):
                at = t * per_token + g
                s, z = scale[at], zero[at]
                for j in range(group // step):
                    start = g * group + j * step
                    c = codes[t * dim + start : t * dim + start + step]
                    x = tile[t, start : start + step]
                    if mode == 0:
                        for i in range(step):
                            x[i] = z + s * c[i]
                    else:
                        word = sign[j * TILE * per_token + at]
                        for i in range(step):
                            x[i] = z + flip(s * c[i], word, 31 - i)
        return
    have = -1
    for start in range(0, TILE, step):
        token = unit * TILE + start  # groups divide blocks, so rows of groups count through
        row = token // group
        if row != have:
            _metadata(row, first, second, dim, mode, group, scale, zero, sign)
            have = row
        word = sign[(token % group) // step * dim :]
        for t in range(start, start + step):
            c = codes[t * dim : (t + 1) * dim]
            x = tile[t]
            if mode == 0:
                for i in range(dim):
                    x[i] = zero[i] + scale[i] * c[i]
            else:
                shift = 31 - (t - start)
                for i in range(dim):
                    x[i] = zero[i] + flip(scale[i] * c[i], word[i], shift)


@loops
def _decode(row, batch, head, unit, tile, scratch):
    dim, bits, axis, mode, group = row[12], row[13], row[14], row[15], row[16]
    starts = np.empty(3, np.int64)
    for i in range(3):
        starts[i] = row[4 * i] + batch * row[4 * i + 1] + head * row[4 * i + 2]
    size = TILE * dim
    codes, scale, zero = scratch[:size], scratch[size : 2 * size], scratch[2 * size : 3 * size]
    sign = scratch[3 * size : 4 * size].view(np.int32)
    decode_affine(starts[0], starts[1], starts[2], unit, dim, bits, axis, mode, group, tile, codes, scale, zero, sign)


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    space = carray(scratch, 4 * TILE * numbers[12])
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), space)


class AffineReader(CPUReader[AffineGroups]):
    decode = _read

    @property
    def scratch(self) -> int:
        return 4 * TILE * self.form.head_dim

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes, scales (and zero-points), sign bits; channels, bits, axis, mode, group."""
        form = self.form
        row = places(form, fields, ("codes", "meta") if form.mode == "asym" else ("codes", "scale", "aux"), keep)
        row += [0] * (12 - len(row))
        return [*row, form.head_dim, form.bits_per_code, int(form.axis == "channel"), MODES[form.mode], form.group]
