# mypy: ignore-errors
"""Tiles of codes in the order of tensor cores; see :mod:`kvfold.kernels.generic.readers.fragments`."""

import triton
import triton.language as tl

from kvfold.kernels.generic.readers._codes import PTX, bounded, of_tokens


@triton.jit
def fragment_codes(data, first, left, T: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, KEY: tl.constexpr):
    """Codes of a tile, int16 [T, D]; parameters as of :func:`kvfold.kernels.generic.readers._codes.codes`."""
    data += first // 32 * (2 * D * BITS)
    if BITS == 3:
        low = _stream(data, left, T, D, 2, 6 * D)
        code = low + _stream(data + 4 * D, left, T, D, 1, 6 * D) * 4
    else:
        code = _stream(data, left, T, D, BITS, 2 * D * BITS)
    U: tl.constexpr = T // 32
    # unit, channel tile, token tile, g, t, col_half, row_half, pair
    code = tl.reshape(code, (U, D // 16, 2, 8, 4, 2, 2, 2))
    if KEY:
        code = tl.permute(code, (0, 2, 6, 3, 1, 5, 4, 7))
    else:
        code = tl.permute(code, (0, 2, 5, 4, 7, 1, 6, 3))
    return tl.reshape(code, (T, D))


@triton.jit
def _stream(data, left, T: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr):
    """Fields of a plane in the order of the stream, int16 [T * D]; units are STEP words apart."""
    F: tl.constexpr = 16 // BITS
    N: tl.constexpr = 2 * D * BITS
    unit = tl.minimum(tl.arange(0, T // 32), (left - 1) // 32)
    x = tl.load(data + unit[:, None] * STEP + tl.arange(0, N)[None, :])
    field = (x[:, None, :].to(tl.int32) >> (tl.arange(0, F) * BITS)[None, :, None]) & ((1 << BITS) - 1)
    return tl.reshape(field.to(tl.int16), (T * D,))


@triton.jit
def _numbers(codes):
    """Codes as float32: by 2^23's last bits, which is quicker than what converts integers of 16 bits."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def read_uniform(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):
    BITS: tl.constexpr = SPEC[1]
    x = fragment_codes(fields[0], first, left, T, SPEC[0], BITS, SPEC[2])
    return x.to(tl.float16) - 0.5 * ((1 << BITS) - 1), of_tokens(fields[1], first, left, T, 1, 0)


@triton.jit
def read_affine(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):
    D: tl.constexpr = SPEC[0]
    AXIS: tl.constexpr = SPEC[3]
    MODE: tl.constexpr = SPEC[4]
    G: tl.constexpr = SPEC[5]
    U: tl.constexpr = T // 32
    EACH: tl.constexpr = 2 if MODE == 0 else 1  # numbers of a group in a row
    x = _numbers(fragment_codes(fields[0], first, left, T, D, SPEC[1], SPEC[2]))
    unit = tl.minimum(tl.arange(0, U), (left - 1) // 32)
    if AXIS == 0:
        row = (first + unit * 32) // G
        group = tl.load(tables[0] + tl.arange(0, D))[None, :]
        at = row[:, None] * (EACH * D) + group
        zero_at = D
        OF: tl.constexpr = 1  # tokens, and channels, that a number is loaded for
        CHANNELS: tl.constexpr = D
    else:
        C: tl.constexpr = D // G
        row = first // 32 + unit
        group = tl.load(tables[0] + tl.arange(0, 32 * C))[None, :]
        at = row[:, None] * (EACH * 32 * C) + group
        zero_at = 32 * C
        OF: tl.constexpr = 32
        CHANNELS: tl.constexpr = C
    scale = tl.load(fields[1] + at).to(tl.float32)
    if MODE == 0:
        zero = _spread(tl.load(fields[1] + at + zero_at).to(tl.float32), U, OF, CHANNELS, D)
    else:
        word = tl.load(fields[2] + at)
        if MODE == 2:
            asym = scale.to(tl.int32, bitcast=True) < 0  # a negative scale, -0 included, marks an asymmetric group
            zero = _spread(tl.where(asym, word.to(tl.float32, bitcast=True), 0.0), U, OF, CHANNELS, D)
            word = tl.where(asym, 0, word)
            scale = tl.abs(scale)
        if AXIS == 0:
            bit = tl.load(tables[1] + tl.arange(0, T) % 32)[:, None]
        else:
            bit = tl.load(tables[1] + tl.arange(0, D) % 32)[None, :]
        negative = (_spread(word, U, OF, CHANNELS, D) >> bit) & 1
        x = tl.where(negative != 0, -x, x)
    x = x * _spread(scale, U, OF, CHANNELS, D)
    if MODE != 1:
        x += zero
    return x, tl.full([T], 1.0, tl.float32)


@triton.jit
def _spread(x, U: tl.constexpr, OF: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Numbers [units, OF * C] of OF parts of a unit's tokens and C parts of the channels: [32 units, D]."""
    x = tl.reshape(x, (U, OF, 1, C, 1))
    return tl.reshape(tl.broadcast_to(x, (U, OF, 32 // OF, C, D // C)), (32 * U, D))


@triton.jit
def read_lookup(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):
    D: tl.constexpr = SPEC[0]
    SCALING: tl.constexpr = SPEC[3]
    x = tl.load(tables[0] + fragment_codes(fields[0], first, left, T, D, SPEC[1], SPEC[2]).to(tl.int32))
    scale = tl.full([T], 1.0, tl.float32)
    if SCALING == 0:
        scale = of_tokens(fields[1], first, left, T, 1, 0)
    elif SCALING == 1:
        at = fields[1] + (first + tl.minimum(tl.arange(0, T), left - 1)) * 2
        x = bounded(tl.load(at)[:, None] + tl.load(at + 1)[:, None] * x)
    else:
        at = tables[1] + head * (2 * D) + tl.arange(0, D)
        x = tl.load(at)[None, :] + tl.load(at + D)[None, :] * x
    return x, scale


@triton.jit
def read_sketch(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):
    FACTOR: tl.constexpr = SPEC[2]
    code = fragment_codes(fields[0], first, left, T, SPEC[0], 1, SPEC[1])
    sign = (code << 15) ^ -17408  # fp16's -1, or without its sign
    return sign.to(tl.float16, bitcast=True), of_tokens(fields[1], first, left, T, 1, 0) * FACTOR


@triton.jit
def read_lowrank(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):
    D: tl.constexpr = SPEC[0]
    RANK: tl.constexpr = SPEC[1]
    x, scale = SPEC[3](fields, tables, head, first, left, four, T, SPEC[4])
    basis = fields[SPEC[2] + 1] + tables[len(tables) - 1] * (D * RANK)
    for r in tl.static_range(RANK):
        row = of_tokens(fields[SPEC[2]], first, left, T, RANK, r)
        x += row[:, None] * tl.load(basis + tl.arange(0, D) * RANK + r).to(tl.float32)[None, :]
    return x, scale


@triton.jit
def _ones(x):
    """How many bits of an int32 are set."""
    if PTX:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", (x,), dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = (x & 0x55555555) + ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
        x = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
        return (x & 0xFFFF) + (x >> 16)


@triton.jit
def read_mixed(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):
    """``which`` has the bits of a block's tokens in the order of signs."""
    D: tl.constexpr = SPEC[0]
    BITS: tl.constexpr = SPEC[1]
    EXTRA: tl.constexpr = SPEC[3]
    AXIS: tl.constexpr = SPEC[4]
    BLOCK: tl.constexpr = SPEC[5]
    SALIENT: tl.constexpr = SPEC[6]
    FINE: tl.constexpr = 1.0 / ((1 << (BITS + EXTRA)) - 1)
    COARSE: tl.constexpr = 1.0 / ((1 << BITS) - 1)
    x = _numbers(fragment_codes(fields[0], first, left, T, D, BITS, SPEC[2]))
    token = tl.minimum(tl.arange(0, T), left - 1)
    place = first + token  # of the storage, whose blocks follow each other
    block = place // BLOCK
    if SALIENT > 0:
        words = fields[2] + block * (BLOCK // 32)
        unit = (place % BLOCK // 32).to(tl.int32)
        bit = tl.load(tables[0] + token % 32)
        word = tl.load(words + unit)
        salient = (word >> bit) & 1 != 0
        rank = _ones(word & tl.load(tables[1] + token % 32))
        for i in tl.static_range(BLOCK // 32 - 1):
            rank += tl.where(i < unit, _ones(tl.load(words + i)), 0)
        row = block * SALIENT + tl.minimum(rank, SALIENT - 1)
        EACH: tl.constexpr = 16 // EXTRA
        channel = tl.arange(0, D)
        low = tl.load(
            fields[1] + row[:, None] * (D // EACH) + (channel // EACH)[None, :], mask=salient[:, None], other=0
        )
        low = (low.to(tl.int32) >> (channel % EACH * EXTRA)[None, :]) & ((1 << EXTRA) - 1)
        x = tl.where(salient[:, None], (x * (1 << EXTRA) + low.to(tl.float32)) * FINE, x * COARSE)
    else:
        x = x * COARSE
    if AXIS == 0:
        meta = tl.load(fields[3] + block[:, None] * D + tl.arange(0, D)[None, :])
    else:
        meta = tl.load(fields[3] + place)[:, None]
    zero = (meta & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    span = (meta >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return zero + span * x, tl.full([T], 1.0, tl.float32)
