# mypy: ignore-errors
"""Vectors as the nearest sums of codes, and as levels beside the elements that deviate most: Triton code of
:mod:`kvfold.kernels.searched.encode`.

A program takes whole vectors. What it stores depends on these alone, not on how calls were cut.
"""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _finite, _max, _min, _reciprocal, _sum, _to_fp16
from kvfold.kernels.common._encode_nearest import (
    LARGEST,
    SLOTS,
    _beside,
    _halves,
    _lane,
    _lower,
    _lowest,
    _marked,
    _nearest,
    _quotient,
    _vectors,
)
from kvfold.kernels.fold._encode_codes import _store_plane


@triton.jit
def _pairs(source, token, channel, real, HALF: tl.constexpr):
    """What :func:`_vectors` gives of channels ``channel``, below HALF, and then of their partners: each is loaded once."""
    at = source[0] + token.to(tl.int64) * source[1] + channel
    x = _finite(tl.load(at, mask=real, other=0.0))
    y = _finite(tl.load(at + HALF, mask=real, other=0.0))
    angle = token * HALF + channel
    cosine = tl.load(source[2] + angle, mask=real, other=1.0)
    sine = tl.load(source[3] + angle, mask=real, other=0.0)
    return _beside((x * cosine + y * sine) * source[4], (y * cosine + -x * sine) * source[4])


@triton.jit
def _by_token(x, T: tl.constexpr, GROUPS: tl.constexpr):
    """Sums over the groups of each token: [T * GROUPS, channels] -> [T]."""
    return _sum(tl.reshape(_sum(x, 1), (T, GROUPS)), 1)


@triton.jit
def _to_rows(x, T: tl.constexpr, GROUPS: tl.constexpr):
    """A number of each token, [T], for each of its groups: [T * GROUPS, 1]."""
    return tl.reshape(tl.broadcast_to(x[:, None], (T, GROUPS)), (T * GROUPS,))[:, None]


@triton.jit
def _fitted(x, levels, T: tl.constexpr, GROUPS: tl.constexpr, FIT: tl.constexpr):
    """Scales [T] of ``levels``, as kvfold.formats.uniform.fitted has them."""
    if FIT == "unbiased":
        along = _by_token(x * levels, T, GROUPS)
        return tl.where(along > 0.0, _by_token(x * x, T, GROUPS) / tl.where(along > 0.0, along, 1.0), 0.0)
    size = _by_token(levels * levels, T, GROUPS)
    size = tl.where(size > 0.0, size, 1.0)
    if FIT == "least":
        return _by_token(x * levels, T, GROUPS) / size
    return tl.sqrt_rn(_by_token(x * x, T, GROUPS) / size)


@triton.jit(do_not_specialize=["tokens", "first_token"])
def search_kernel(
    x, stride_b, stride_h, stride_t, rows, cosines, sines, turns, factor, book, squares, codes, rms, tokens, first_token,
    room, heads, D: tl.constexpr, VECTOR: tl.constexpr, CODES: tl.constexpr, STAGES: tl.constexpr, STRIDED: tl.constexpr,
    HALF: tl.constexpr, T: tl.constexpr, PART: tl.constexpr, FIT: tl.constexpr,
    PICKED: tl.constexpr,
):  # fmt: skip
    """Residual codes, PART of a stage at a time. Grid: (parts of T tokens, heads, batch).

    ``book`` fp16 [STAGES, CODES, VECTOR], codes times -2, ``squares`` float32 [STAGES, CODES] of codes; ``codes`` uint8
    [lanes, room, D / VECTOR, STAGES]; ``rms`` fp16 [lanes, room]. Token 0 of what is given is ``first_token`` of storage.
    ``turns``: what sequences are apart in the tables of angles.
    """
    GROUPS: tl.constexpr = D // VECTOR
    index, head, lane = _lane(rows, heads, PICKED)
    row = tl.arange(0, T * GROUPS)
    token, group = tl.program_id(0) * T + row // GROUPS, row % GROUPS
    inside = token < tokens
    member = tl.arange(0, VECTOR)
    channel = member[None, :] * GROUPS + group[:, None] if STRIDED else group[:, None] * VECTOR + member[None, :]
    source = (x + index * stride_b + head * stride_h, stride_t, cosines + index * turns, sines + index * turns, factor)
    real = inside[:, None] & (channel < D)
    rest = _vectors(source, token[:, None], channel, real, HALF)

    scale = _to_fp16(tl.sqrt_rn(_by_token(rest * rest, T, GROUPS) / D))
    wide = scale.to(tl.float32)
    wide = tl.where(wide == 0.0, 1.0, wide)
    inverse = _to_rows(_reciprocal(wide), T, GROUPS)
    wide = _to_rows(wide, T, GROUPS)
    rest = _quotient(rest, wide, inverse)

    code = tl.arange(0, PART)[None, :]
    out = codes + ((lane * room + first_token + token) * GROUPS + group) * STAGES
    for stage in range(STAGES):
        table = book + stage * (CODES * VECTOR)
        near = tl.minimum(tl.maximum(rest, -LARGEST), LARGEST).to(tl.float16)
        least = tl.full((T * GROUPS,), float("inf"), tl.float32)
        for part in tl.static_range(0, CODES, PART):
            known = tl.load(table + (part + code) * VECTOR + member[:, None])
            square = tl.load(squares + stage * CODES + part + code)
            marked = _marked(tl.dot(near, known), square, part + code, CODES - 1)
            least = _lower(least, _lowest(marked))
        best = least.to(tl.int32, bitcast=True) & (CODES - 1)
        tl.store(out + stage, best.to(tl.uint8), mask=inside)
        rest += 0.5 * tl.load(table + best[:, None] * VECTOR + member[None, :]).to(tl.float32)

    if FIT != "rms":
        whole = _vectors(source, token[:, None], channel, real, HALF)
        scale = _to_fp16(_fitted(whole, _quotient(whole, wide, inverse) - rest, T, GROUPS, FIT))
    each = tl.program_id(0) * T + tl.arange(0, T)
    tl.store(rms + lane * room + first_token + each, scale, mask=each < tokens)


@triton.jit
def group_code(unit, tables, at, CODES: tl.constexpr, PART: tl.constexpr, FIT: tl.constexpr):
    """Nearest codes of a group of channels of unit vectors, float32 [tokens, channels], int32 [tokens]; what they add to the
    products of vectors with their codes, and to the codes' squared lengths, float32 [tokens], where a fit wants to know.

    ``tables``: as :func:`group_kernel` has them, ``table``, ``halves``, ``book`` and ``sizes``; ``at``: number of the group's
    first code.
    """
    best = _nearest(_halves(unit), tables[0] + at * SLOTS, tables[1] + at, CODES, PART)
    along, length = tl.full(best.shape, 0.0, tl.float32), tl.full(best.shape, 0.0, tl.float32)
    if FIT == "unbiased" or FIT == "least":
        place = (at + best)[:, None] * unit.shape[1] + tl.arange(0, unit.shape[1])[None, :]
        along = _sum(tl.load(tables[2] + place).to(tl.float32) * unit, 1)
    if FIT == "size" or FIT == "least":
        length = tl.load(tables[3] + at + best)
    return best, along, length


@triton.jit
def group_scale(size, along, length, D: tl.constexpr, FIT: tl.constexpr):
    """Scales of vectors, fp16 [tokens], of their root mean squares ``size`` and what :func:`group_code` adds up to."""
    scale = size
    if FIT == "unbiased":
        scale = tl.where(along > 0.0, size * D / tl.where(along > 0.0, along, 1.0), 0.0)
    if FIT == "least":
        scale = size * along / tl.where(length > 0.0, length, 1.0)
    if FIT == "size":
        scale = size * tl.sqrt_rn(D / tl.where(length > 0.0, length, 1.0))
    return _to_fp16(scale)


@triton.jit(do_not_specialize=["tokens", "first_token"])
def group_kernel(
    x, stride_b, stride_h, stride_t, rows, cosines, sines, turns, factor, table, halves, book, sizes, mean, codes, rms,
    tokens, first_token, room, heads, D: tl.constexpr, VECTOR: tl.constexpr, CODES: tl.constexpr, STRIDED: tl.constexpr,
    HALF: tl.constexpr, T: tl.constexpr, PART: tl.constexpr, FIT: tl.constexpr, CENTRED: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """A code of its own codebook for each group of VECTOR channels. Grid: (parts of T tokens, heads, batch).

    ``table`` fp16 [heads, groups, CODES, SLOTS], codes under the metric, negative, as :func:`_nearest` takes them;
    ``halves`` float32 [heads, groups, CODES] of their squared lengths; ``book`` [heads, groups, CODES, VECTOR] and ``sizes``
    float32 [heads, groups, CODES], codes as they are decoded and their squared lengths. ``codes`` uint8 [lanes, room,
    groups]; ``rms`` fp16 [lanes, room]; see :func:`search_kernel`. With CENTRED they are of vectors less ``mean``, fp16
    [heads, D].
    """
    GROUPS: tl.constexpr = D // VECTOR
    index, head, lane = _lane(rows, heads, PICKED)
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = (token < tokens)[:, None]
    source = (x + index * stride_b + head * stride_h, stride_t, cosines + index * turns, sines + index * turns, factor)
    square = tl.full((T,), 0.0, tl.float32)
    PAIRS: tl.constexpr = STRIDED and 2 * HALF == D and VECTOR % 4 == 0  # a group has both channels of RoPE's pairs
    for first in range(0, D, 16):
        if PAIRS:
            pair = first // 2 + tl.arange(0, 8)
            some = _pairs(source, token[:, None], pair[None, :], inside, HALF)
            place = tl.arange(0, 16)
            channel = first // 2 + place % 8 + place // 8 * HALF
        else:
            channel = first + tl.arange(0, 16)
            some = _vectors(source, token[:, None], channel[None, :], inside, HALF)
        if CENTRED:
            some -= tl.load(mean + head * D + channel).to(tl.float32)[None, :]
        square += _sum(some * some, 1)
    size = tl.sqrt_rn(square / D)
    inverse = (1.0 / tl.where(size == 0.0, 1.0, size))[:, None]

    member = tl.arange(0, VECTOR)
    tables = (table, halves, book, sizes)
    out = codes + (lane * room + first_token + token) * GROUPS
    along = tl.full((T,), 0.0, tl.float32)
    length = tl.full((T,), 0.0, tl.float32)
    for group in range(GROUPS):
        channel = member * GROUPS + group if STRIDED else group * VECTOR + member
        if PAIRS:
            pair = tl.arange(0, VECTOR // 2) * GROUPS + group
            unit = _pairs(source, token[:, None], pair[None, :], inside, HALF)
        else:
            unit = _vectors(source, token[:, None], channel[None, :], inside, HALF)
        if CENTRED:
            unit -= tl.load(mean + head * D + channel).to(tl.float32)[None, :]
        unit *= inverse
        best, more, longer = group_code(unit, tables, (head * GROUPS + group) * CODES, CODES, PART, FIT)
        tl.store(out + group, best.to(tl.uint8), mask=token < tokens)
        along += more
        length += longer
    tl.store(rms + lane * room + first_token + token, group_scale(size, along, length, D, FIT), mask=token < tokens)


# ---- outliers --------------------------------------------------------------------------------------------------------


@triton.jit
def _ordered(x):
    """Integers of the same order as these float32 numbers; of a number and back."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _running(x, AXIS: tl.constexpr):
    """Sums of a line's numbers up to each."""
    return tl.associative_scan(x, AXIS, tl.standard._sum_combine)


@triton.jit
def _unordered(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _kth(order, COUNT: tl.constexpr, AXIS: tl.constexpr):
    """The COUNT-th largest integer along AXIS, bit by bit."""
    bit = _min(order, AXIS) * 0 + (-2147483648)
    least = bit
    for _ in range(32):
        more = least ^ bit  # the first is 0, in the middle of all integers
        bit = (bit >> 1) & 0x7FFFFFFF
        enough = _sum((order >= tl.expand_dims(more, AXIS)).to(tl.int32), AXIS) >= COUNT
        least = tl.where(enough, more, least)
    return least


@triton.jit(do_not_specialize=["first_block"])
def outliers_kernel(
    x, stride_b, stride_h, stride_t, rows, cosines, sines, turns, factor, centers, spreads, borders, codes, scales, outlier,
    where, first_block, blocks, heads, D: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr,
    KEYS: tl.constexpr, HALF: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """Levels of a table, and the COUNT elements of a block that deviate most. Grid: (blocks of 32 tokens, heads, batch).

    KEYS: ``centers`` and ``spreads`` float32 [heads, D] are channels' constants, and elements deviate by how far they lie
    outside; else ``scales`` fp16 [lanes, blocks, 32, 2] is written, and they deviate by their distance from the token's median.
    ``borders``: between levels, float32 [2^BITS - 1]. ``outlier`` fp16, ``where`` int16 [lanes, blocks, COUNT].
    """
    index, head, lane = _lane(rows, heads, PICKED)
    first = tl.program_id(0) * 32
    block = lane * blocks + first_block + tl.program_id(0)
    token, channel = tl.arange(0, 32), tl.arange(0, D)
    source = (x + index * stride_b + head * stride_h, stride_t, cosines + index * turns, sines + index * turns, factor)
    known = (token >= 0)[:, None] & (channel >= 0)[None, :]
    here = _vectors(source, first + token[:, None], channel[None, :], known, HALF)
    if KEYS:
        offset = tl.load(centers + head * D + channel)[None, :]
        spread = tl.load(spreads + head * D + channel)[None, :]
        score = tl.abs(here - offset) - spread
        middle = _unordered(_kth(_ordered(here), 32 - 15, 0))[None, :]
    else:
        middle = _unordered(_kth(_ordered(here), D - (D - 1) // 2, 1))[:, None]
        score = tl.abs(here - middle)

    order = tl.reshape(_ordered(score), (1, 32 * D))
    least = _kth(order, COUNT, 1)[:, None]
    above, equal = order > least, order == least
    wanted = COUNT - _sum(above.to(tl.int32), 1)[:, None]
    taken = above | (equal & (_running(equal.to(tl.int32), 1) <= wanted))
    slot = _running(taken.to(tl.int32), 1) - 1
    at = tl.arange(0, 32 * D)[None, :]
    tl.store(where + block * COUNT + slot, at.to(tl.int16), mask=taken)
    tl.store(outlier + block * COUNT + slot, _to_fp16(tl.reshape(here, (1, 32 * D))), mask=taken)
    here = tl.where(tl.reshape(taken, (32, D)), middle, here)

    if KEYS:
        size = tl.broadcast_to(spread, (32, D))
    else:
        low, high = _min(here, 1), _max(here, 1)
        center = _to_fp16(low + (high - low) * 0.5)
        wide = center.to(tl.float32)
        half = _to_fp16(tl.maximum(high - wide, wide - low))
        out = scales + (block * 32 + token) * 2
        tl.store(out, center)
        tl.store(out + 1, half)
        offset = wide[:, None]
        size = tl.broadcast_to(half.to(tl.float32)[:, None], (32, D))
    level = tl.math.div_rn(here - offset, tl.where(size == 0.0, 1.0, size))
    code = tl.full((32, D), 0, tl.int32)
    for i in tl.static_range((1 << BITS) - 1):
        code += tl.where(level > tl.load(borders + i), 1, 0)
    code = tl.reshape(code, (32 * D,))
    words = codes + block * (2 * D * BITS)
    if BITS == 3:
        _store_plane(code & 3, words, D, 2, ORDER)
        _store_plane(code >> 2, words + 4 * D, D, 1, ORDER)
    else:
        _store_plane(code, words, D, BITS, ORDER)
