# mypy: ignore-errors
"""Choosing codes of learned codebooks, a tile at a time: VQLLM's vectors, groups of channels (TaSQ, NOVA-KV), CommVQ's keys and
the bits of CommVQ's values.

What a tile's tokens are read from is a source as :func:`kvfold.kernels.common._encode_tile._tokens_at` takes it, so that pages
and slabs can share these functions. Products have float32's precision: of tf32 parts, or of fp16 parts where tables are fp16.
"""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _finite, _max, _min, _sum, _to_fp16
from kvfold.kernels.common._encode_nearest import _pair, _stage_at
from kvfold.kernels.common._encode_tile import _tokens_at
from kvfold.kernels.common._encode_words import _log2
from kvfold.kernels.searched._encode import group_code, group_scale


@triton.jit
def _first(x, best):
    """Lowest place along the last axis of x [n, m] at which it is ``best`` [n], int32."""
    place = tl.arange(0, x.shape[1])[None, :]
    return _min(tl.where(x == best[:, None], place, x.shape[1] - 1), 1)


@triton.jit
def _picked(x, index):
    """Element ``index`` [n] of rows of x [n, m]."""
    return _sum(tl.where(tl.arange(0, x.shape[1])[None, :] == index[:, None], x, 0), 1)


@triton.jit
def _share(x, i, SIZE: tl.constexpr):
    """Columns ``i * SIZE`` and following of x [n, m], SIZE of them."""
    N: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = x.shape[1] // SIZE
    mine = tl.arange(0, PARTS)[None, :, None] == i
    return _sum(tl.where(mine, tl.reshape(x, (N, PARTS, SIZE)), 0.0), 1)


@triton.jit
def _before_rope(source, token, channel, position, rope, D: tl.constexpr, ROPE: tl.constexpr, RING: tl.constexpr):
    """Tokens [n] and channels [c] as float32 [n, c], 0 beyond D; of ROPE channels the rotation is taken back.

    ``position``: of the source's first token; ``rope``: frequencies and a factor.
    """
    at = _tokens_at(source, token, RING)
    real = (channel < D)[None, :]
    x = _finite(tl.load(at + channel[None, :] * source[2], mask=real, other=0.0))
    if ROPE > 0:
        half: tl.constexpr = ROPE // 2
        rotary = (channel < ROPE)[None, :]
        low = (channel < half)[None, :]
        partner = tl.where(channel < half, channel + half, channel - half)
        other = _finite(tl.load(at + partner[None, :] * source[2], mask=rotary, other=0.0))
        place = tl.where(channel < half, channel, channel - half)
        frequency = tl.load(rope[0] + place, mask=channel < ROPE, other=0.0)
        angle = (position + token).to(tl.float32)[:, None] * frequency[None, :]
        turned = (x * tl.cos(angle) + tl.where(low, other, -other) * tl.sin(angle)) * rope[1]
        x = tl.where(rotary, turned, x)
    return x


@triton.jit
def _projected(
    source, token, position, rope, matrix, column, W: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """Tokens [n] before RoPE times ``matrix`` float32 [D, W]: float32 [n, columns]."""
    total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
    for k in range(0, D, 32):
        channel = k + tl.arange(0, 32)
        x = _before_rope(source, token, channel, position, rope, D, ROPE, RING)
        inside = (channel < D)[:, None] & (column < W)[None, :]
        some = tl.load(matrix + channel[:, None] * W + column[None, :], mask=inside, other=0.0)
        total = tl.dot(x, some, total, input_precision="tf32x3")
    return total


# ---- residual codes (VQLLM) ------------------------------------------------------------------------------------------


@triton.jit
def residual_tile(
    source, position, rope, tables, out, group,
    D: tl.constexpr, VECTOR: tl.constexpr, CODES: tl.constexpr, STAGES: tl.constexpr, STRIDED: tl.constexpr,
    ROPE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Codes of one group of channels of 32 tokens, and (with group 0) their scales.

    ``tables``: codes fp16 [STAGES, CODES, VECTOR] and their squared lengths, float32 [STAGES, CODES]; ``out``: of the tokens,
    codes uint8 [32, groups, STAGES] and scales fp16 [32].
    """
    GROUPS: tl.constexpr = D // VECTOR
    VP: tl.constexpr = max(16, triton.next_power_of_2(VECTOR))
    CP: tl.constexpr = max(16, CODES)
    token, element, code = tl.arange(0, 32), tl.arange(0, VP), tl.arange(0, CP)
    square = tl.zeros([32], tl.float32)
    for k in range(0, D, 32):
        x = _before_rope(source, token, k + tl.arange(0, 32), position, rope, D, ROPE, RING)
        square += _sum(x * x, 1)
    scale = _to_fp16(tl.sqrt_rn(square * (1.0 / D)))
    if group == 0:
        tl.store(out[1] + token, scale)
    safe = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    channel = group + element * GROUPS if STRIDED else group * VECTOR + element
    channel = tl.where(element < VECTOR, channel, D)
    rest = tl.math.div_rn(
        _before_rope(source, token, channel, position, rope, D, ROPE, RING), safe[:, None] + tl.zeros([32, VP], tl.float32)
    )  # fmt: skip
    for stage in range(STAGES):
        table = tables[0] + stage * (CODES * VECTOR)
        inside = (element < VECTOR)[:, None] & (code < CODES)[None, :]
        book = tl.load(table + code[None, :] * VECTOR + element[:, None], mask=inside, other=0.0)
        # codes are fp16: two products with the halves of float32 numbers
        high = tl.minimum(tl.maximum(rest, -60000.0), 60000.0).to(tl.float16)
        low = tl.minimum(tl.maximum(rest - high.to(tl.float32), -60000.0), 60000.0).to(tl.float16)
        products = tl.dot(high, book, tl.dot(low, book))
        size = tl.load(tables[1] + stage * CODES + code, mask=code < CODES, other=float("inf"))
        distance = size[None, :] - 2.0 * products
        best = _first(distance, _min(distance, 1))
        tl.store(out[0] + (token * GROUPS + group) * STAGES + stage, best.to(tl.uint8))
        inside = (element < VECTOR)[None, :] & (token >= 0)[:, None]
        rest -= tl.load(table + best[:, None] * VECTOR + element[None, :], mask=inside, other=0.0).to(tl.float32)


# ---- codes of groups (TaSQ, NOVA-KV) ---------------------------------------------------------------------------------


@triton.jit
def _pairs_before_rope(source, token, pair, position, rope, ROPE: tl.constexpr, RING: tl.constexpr):
    """Channels ``pair`` [c], below ROPE / 2, of tokens [n] before RoPE, and then their partners: float32 [n, c] each."""
    half: tl.constexpr = ROPE // 2
    at = _tokens_at(source, token, RING) + pair[None, :] * source[2]
    real = (pair < half)[None, :]
    x = _finite(tl.load(at, mask=real, other=0.0))
    y = _finite(tl.load(at + half * source[2], mask=real, other=0.0))
    frequency = tl.load(rope[0] + pair, mask=pair < half, other=0.0)
    angle = (position + token).to(tl.float32)[:, None] * frequency[None, :]
    cosine, sine = tl.cos(angle), tl.sin(angle)
    return (x * cosine + y * sine) * rope[1], (y * cosine + -x * sine) * rope[1]


@triton.jit
def _keep(x, own, channel, real, mean, CENTRED: tl.constexpr):
    """Put channels [c] of 32 tokens, less their mean, where :func:`group_tile` finds them; sums of their squares."""
    if CENTRED:
        x -= tl.load(mean + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    token = tl.arange(0, 32)
    tl.store(own + channel[None, :] * 32 + token[:, None], x, mask=real[None, :] & (token >= 0)[:, None])
    return _sum(x * x, 1)


@triton.jit
def group_tile(
    source, position, rope, tables, mean, maps, out, own,
    D: tl.constexpr, VECTOR: tl.constexpr, CODES: tl.constexpr, STRIDED: tl.constexpr, FIT: tl.constexpr,
    CENTRED: tl.constexpr, PART: tl.constexpr, MAPPED: tl.constexpr, ROPE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Codes and scales of 32 tokens.

    ``tables``: of the head, as :func:`kvfold.kernels.searched._encode.group_code` takes them; ``mean``: fp16 [D], with CENTRED;
    ``maps``: with MAPPED, another mean and a matrix under which vectors are brought first, float32 [D] and [D, D]; ``out``: of
    the tokens, codes uint8 [32, D / VECTOR] and scales fp16 [32]; ``own``: float32 [D, 32], the program's own, where vectors
    wait until their groups are looked at.
    """
    GROUPS: tl.constexpr = D // VECTOR
    token, member, some = tl.arange(0, 32), tl.arange(0, VECTOR), tl.arange(0, 16)
    square = tl.zeros([32], tl.float32)
    tl.debug_barrier()  # of the last tile everything was read
    if MAPPED:
        column = tl.arange(0, D)
        total = tl.zeros([32, D], tl.float32)
        for k in range(0, D, 16):
            x = _before_rope(source, token, k + some, position, rope, D, 0, RING) - tl.load(maps[0] + k + some)[None, :]
            part = tl.load(maps[1] + (k + some)[:, None] * D + column[None, :])
            total = tl.dot(x, part, total, input_precision="tf32x3")
        square = _keep(total, own, column, column < D, mean, CENTRED)
    else:
        if ROPE > 0:
            HALF: tl.constexpr = ROPE // 2
            for k in range(0, HALF, 16):
                pair = k + some
                x, y = _pairs_before_rope(source, token, pair, position, rope, ROPE, RING)
                square += _keep(x, own, pair, pair < HALF, mean, CENTRED)
                square += _keep(y, own, pair + HALF, pair < HALF, mean, CENTRED)
        for k in range(ROPE, D, 16):
            x = _before_rope(source, token, k + some, position, rope, D, 0, RING)
            square += _keep(x, own, k + some, k + some < D, mean, CENTRED)
    size = tl.sqrt_rn(square / D)
    inverse = (1.0 / tl.where(size == 0.0, 1.0, size))[:, None]
    tl.debug_barrier()  # what these threads stored, others read
    along, length = tl.zeros([32], tl.float32), tl.zeros([32], tl.float32)
    for group in range(GROUPS):
        channel = member * GROUPS + group if STRIDED else group * VECTOR + member
        unit = tl.load(own + channel[None, :] * 32 + token[:, None]) * inverse
        best, more, longer = group_code(unit, tables, group * CODES, CODES, PART, FIT)
        tl.store(out[0] + token * GROUPS + group, best.to(tl.uint8))
        along += more
        length += longer
    tl.store(out[1] + token, group_scale(size, along, length, D, FIT))


# ---- additive codes (CommVQ's keys) ----------------------------------------------------------------------------------


@triton.jit
def _times_i(channel, D: tl.constexpr, ROTARY: tl.constexpr):
    """Channel whose number i puts in each channel, and the sign that it gets (kvfold.formats.codebook.times_i)."""
    half: tl.constexpr = ROTARY // 2
    rest: tl.constexpr = (D - ROTARY) // 2
    size = tl.where(channel < ROTARY, half, rest)
    low = (channel < half) | ((channel >= ROTARY) & (channel < ROTARY + rest))
    return tl.where(low, channel + size, channel - size), tl.where(low, -1.0, 1.0)


@triton.jit
def _centre(table, a, b, channel, D: tl.constexpr, ROTARY: tl.constexpr):
    """``z_a + i z_b``, float32 [n, channels]; ``table`` float32 [levels, D]."""
    other, sign = _times_i(channel, D, ROTARY)
    real = (channel < D)[None, :] & (a >= 0)[:, None]
    x = tl.load(table + a[:, None] * D + channel[None, :], mask=real, other=0.0)
    return x + tl.load(table + b[:, None] * D + other[None, :], mask=real, other=0.0) * sign[None, :]


@triton.jit
def _scores(rest, table, sizes, ROTARY: tl.constexpr, TURNED: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr):
    """``2 <rest, z> - |z|^2`` for every z of ``table`` [LEVELS, D], or (TURNED) for ``i z``: float32 [tokens, levels]."""
    NP: tl.constexpr = max(16, LEVELS)
    level = tl.arange(0, NP)
    total = tl.zeros([rest.shape[0], NP], tl.float32)
    for k in range(rest.shape[1] // 16):
        channel = k * 16 + tl.arange(0, 16)
        inside = (level < LEVELS)[:, None] & (channel < D)[None, :]
        if TURNED:
            other, sign = _times_i(channel, D, ROTARY)
            z = tl.load(table + level[:, None] * D + other[None, :], mask=inside, other=0.0) * sign[None, :]
        else:
            z = tl.load(table + level[:, None] * D + channel[None, :], mask=inside, other=0.0)
        total = tl.dot(_share(rest, k, 16), tl.trans(z), total, input_precision="tf32x3")
    size = tl.load(sizes + level, mask=level < LEVELS, other=float("inf"))
    return 2.0 * total - size[None, :]


@triton.jit
def _nearest(of_a, of_b, cross, LEVELS: tl.constexpr, EACH: tl.constexpr):
    """Places (a, b), int32 [tokens], of the best of all pairs, by scores (:func:`_scores`) of both sides: ``of_a`` points to
    [levels, tokens], of which EACH levels are compared side by side. Warps share no token, so what is compared stays in one."""
    NP: tl.constexpr = max(16, LEVELS)
    T: tl.constexpr = of_b.shape[0]
    level, slot = tl.arange(0, NP), tl.arange(0, T)
    best = tl.full([T], float("-inf"), tl.float32)
    a = tl.zeros([T], tl.int32)
    for first in range(0, LEVELS, EACH):
        for i in tl.static_range(EACH):
            between = tl.load(cross + (first + i) * LEVELS + level, mask=level < LEVELS, other=0.0)
            some = _max(of_b - between[None, :], 1) + tl.load(of_a + (first + i) * T + slot)
            a = tl.where(some > best, first + i, a)
            best = tl.maximum(some, best)
    inside = (level < LEVELS)[None, :] & (a >= 0)[:, None]
    left = of_b - tl.load(cross + a[:, None] * LEVELS + level[None, :], mask=inside, other=0.0)
    return a, _first(left, _max(left, 1))


@triton.jit
def additive_tile(
    source, position, rope, tables, out, half, scratch,
    D: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr, ROTARY: tl.constexpr, EACH: tl.constexpr,
    COUNT: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr, LATE: tl.constexpr, ROPE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Codes and norms of tokens ``16 half`` to ``16 half + 15`` of a unit, in COUNT choices
    (:func:`kvfold.kernels.commvq.encode.order`).

    ``tables``: of the head, float32: the metric [D, D]; centres z under it [STAGES, LEVELS, D]; their squared lengths; and
    ``2 <z_a, i z_b>`` [STAGES, LEVELS, LEVELS]. ``out``: of the unit, words int16 and norms fp16 [32];
    ``scratch``: float32 [LEVELS, 16] or, of fewer levels, [16, 16], the program's own, where scores wait.
    """
    T: tl.constexpr = 16
    DP: tl.constexpr = max(16, triton.next_power_of_2(D))
    SP: tl.constexpr = triton.next_power_of_2(STAGES)
    token, channel = half * T + tl.arange(0, T), tl.arange(0, DP)
    stages = tl.arange(0, SP)[None, :]
    own = scratch + tl.arange(0, max(16, LEVELS))[None, :] * T + tl.arange(0, T)[:, None]
    unit = _projected(source, token, position, rope, tables[0], channel, D, D, ROPE, RING)
    rms = tl.sqrt_rn(_sum(unit * unit, 1) * (1.0 / D))
    unit = tl.math.div_rn(unit, tl.maximum(rms, 1.1754944e-38)[:, None] + tl.zeros([T, DP], tl.float32))
    rest = unit
    codes = tl.zeros([T, SP], tl.int32)
    for choice in range(COUNT):
        r, again = _stage_at(choice, STAGES, MIDDLE, LOW, LATE)
        table, sizes, cross = tables[1] + r * (LEVELS * D), tables[2] + r * LEVELS, tables[3] + r * (LEVELS * LEVELS)
        old = _sum(tl.where(stages == r, codes, 0), 1)
        if again:
            rest += _centre(table, old % LEVELS, old // LEVELS, channel, D, ROTARY)
        tl.debug_barrier()
        tl.store(own, _scores(rest, table, sizes, ROTARY, False, D, LEVELS))
        of_b = _scores(rest, table, sizes, ROTARY, True, D, LEVELS)
        tl.debug_barrier()
        if COUNT == STAGES:
            a, b = _nearest(scratch, of_b, cross, LEVELS, EACH)
        elif choice == 0:
            a, b = _nearest(scratch, of_b, cross, LEVELS, EACH)
        else:
            a, b = _pair(tl.load(own), of_b, cross, old // LEVELS, again, LEVELS)
        codes = tl.where(stages == r, (a + LEVELS * b)[:, None], codes)
        rest -= _centre(table, a, b, channel, D, ROTARY)
    centre = unit - rest
    gain = tl.math.div_rn(_sum(unit * centre, 1), tl.maximum(_sum(centre * centre, 1), 1e-12))
    tl.store(out[1] + token, _to_fp16(rms * gain))
    for r in range(STAGES):
        code = _sum(tl.where(stages == r, codes, 0), 1)
        _store_codes(out[0] + r * (4 * _log2(LEVELS)) + half * (2 * _log2(LEVELS)), code, 2 * _log2(LEVELS))


@triton.jit
def _store_codes(out, code, BITS: tl.constexpr):
    """Codes of 16 tokens as BITS words without gaps (kvfold.formats.codebook.pack_codes)."""
    word = tl.arange(0, triton.next_power_of_2(BITS))
    shift = (tl.arange(0, 16) * BITS)[None, :] - (word * 16)[:, None]
    up, down = tl.minimum(tl.maximum(shift, 0), 16), tl.minimum(tl.maximum(-shift, 0), 31)
    parts = (code[None, :] << up >> down) & 0xFFFF
    tl.store(out + word, _sum(parts, 1).to(tl.int16), mask=word < BITS)


# ---- binary codes (CommVQ's values) ----------------------------------------------------------------------------------


@triton.jit
def binary_tile(
    source, tables, out, half,
    D: tl.constexpr, CODES: tl.constexpr, FLIPS: tl.constexpr, HIDDEN: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Bits of half of a unit's tokens: of those whose number has remainder ``2 half`` or ``2 half + 1`` modulo 4, whose bits
    share bytes. ``tables``: of the head, as :class:`kvfold.formats.binary.BitSearch` has them; ``out``: the unit's bytes.
    """
    CP: tl.constexpr = max(16, triton.next_power_of_2(CODES))
    row, code = tl.arange(0, 16), tl.arange(0, CP)
    token = row // 2 * 4 + 2 * half + row % 2
    real = code < CODES
    nothing = (source[0], 1.0)
    if HIDDEN:
        said = tl.zeros([16, CP], tl.float32) + tl.load(tables[3] + code, mask=real, other=0.0)[None, :]
        for h in range(0, HIDDEN, 32):
            unit = h + tl.arange(0, 32)
            x = _projected(source, token, 0, nothing, tables[0], unit, HIDDEN, D, 0, RING)
            x += tl.load(tables[1] + unit, mask=unit < HIDDEN, other=0.0)[None, :]
            x = x / (1.0 + tl.exp(-x))
            inside = (unit < HIDDEN)[:, None] & real[None, :]
            some = tl.load(tables[2] + unit[:, None] * CODES + code[None, :], mask=inside, other=0.0)
            said = tl.dot(x, some, said, input_precision="tf32x3")
        bits = tl.where(real[None, :] & (said > 0.0), 1.0, 0.0)
    else:
        said = _projected(source, token, 0, nothing, tables[0], code, CODES, D, 0, RING)
        said += tl.load(tables[1] + code, mask=real, other=0.0)[None, :]
        top = tl.load(tables[2] + code, mask=real, other=0.0)[None, :]
        place = tl.load(tables[3] + code, mask=real, other=0.0).to(tl.int32)[None, :]
        near = tl.minimum(tl.maximum(said, 0.0), top) + 12582912.0 - 12582912.0  # to the nearest even
        bits = tl.where(real[None, :], ((near.to(tl.int32) >> place) & 1).to(tl.float32), 0.0)
    if FLIPS:
        slope = _projected(source, token, 0, nothing, tables[4], code, CODES, D, 0, RING)
        slope -= tl.load(tables[5] + code, mask=real, other=0.0)[None, :]
        moved = tl.zeros([16, CP], tl.float32)
        for k in range(CP // 16):
            which = k * 16 + tl.arange(0, 16)
            inside = (which < CODES)[:, None] & real[None, :]
            some = tl.load(tables[6] + which[:, None] * CODES + code[None, :], mask=inside, other=0.0)
            moved = tl.dot(_share(bits, k, 16), some, moved, input_precision="tf32x3")
        slope -= moved
        square = tl.load(tables[6] + code * (CODES + 1), mask=real, other=0.0)
        least = _max(square, 0) * 1e-6
        for _ in range(FLIPS):
            way = 1.0 - 2.0 * bits
            gain = tl.where(real[None, :], 2.0 * way * slope - square[None, :], float("-inf"))
            most = _max(gain, 1)
            which = _first(gain, most)
            step = tl.where(most > least, _picked(way, which), 0.0)
            bits += tl.where(code[None, :] == which[:, None], step[:, None], 0.0)
            inside = real[None, :] & (which >= 0)[:, None]
            some = tl.load(tables[6] + which[:, None] * CODES + code[None, :], mask=inside, other=0.0)
            slope -= step[:, None] * some
    field = tl.arange(0, 8)[:, None, None]
    bytes_ = _sum(tl.reshape(bits.to(tl.int32), (8, 2, CP)) << field, 0)
    at = (2 * half + tl.arange(0, 2))[:, None] * CODES + code[None, :]
    to = out[0].to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(to + at, bytes_.to(tl.uint8), mask=real[None, :] & (tl.arange(0, 2) >= 0)[:, None])
