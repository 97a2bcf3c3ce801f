# mypy: ignore-errors
"""Vectors as sums of pairs of codes, and as sums of codes that bits choose (CommVQ's keys and values): Triton code of
:mod:`kvfold.kernels.commvq.encode`.

Centres are multiplied in fp16; what is left of a vector is kept in float32. Keys of some heads differ by a hundredth of what
they share, which fp16 would not resolve beside it: so the mean of the first stage's centres is taken off keys and centres
before, in float32.
"""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _fma, _max, _negative, _sum, _to_fp16
from kvfold.kernels.common._encode_nearest import _first_largest, _lane, _lowest, _pair, _stage_at, _vectors
from kvfold.kernels.fold._encode_codes import _store_plane

STEP = tl.constexpr(32)
"""Channels that are multiplied by the metric at a time."""
FARTHEST = tl.constexpr(64.0)
"""Of scaled values: gains stay below what marks a flipped bit."""
AHEAD = tl.constexpr(4)
"""Codes that are compared side by side."""
TINY = tl.constexpr(1.1754943508222875e-38)
LARGEST = tl.constexpr(60000.0)
"""Of what is multiplied in fp16."""


@triton.jit
def _centres(table, a, b, channel, N: tl.constexpr, D: tl.constexpr):
    """Sums of two halves of codes, float32 [tokens, D]."""
    half = tl.load(table + a[:, None] * D + channel[None, :]).to(tl.float32)
    return half + tl.load(table + (N + b)[:, None] * D + channel[None, :]).to(tl.float32)


@triton.jit
def _under(source, metric, token, inside, HALF: tl.constexpr, D: tl.constexpr, T: tl.constexpr, METRIC: tl.constexpr):
    """Vectors under the metric, float32 [T, D]."""
    channel = tl.arange(0, D)
    if not METRIC:
        return _vectors(source, token[:, None], channel[None, :], inside[:, None] & (channel >= 0)[None, :], HALF)
    under = tl.full((T, D), 0.0, tl.float32)
    for first in range(0, D, STEP):
        row = first + tl.arange(0, STEP)
        x = _vectors(source, token[:, None], row[None, :], inside[:, None] & (row >= 0)[None, :], HALF)
        under = tl.dot(x, tl.load(metric + row[:, None] * D + channel[None, :]), under, input_precision="tf32x3")
    return under


@triton.jit
def _bounded(x):
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float16)


@triton.jit
def _store_rows(rows, out, WIDE: tl.constexpr):
    """Store a stage's 64 rows fp16 [64, 128], and tiles of them."""
    code, channel = tl.arange(0, 64)[:, None], tl.arange(0, 128)[None, :]
    tl.store(out + code * 128 + (channel ^ code % 2 * 32), rows)
    if WIDE:
        # a lane's sums are of 16 codes in a row; channels 32 c + 8 t + 2 j lie in word t of 16 bytes number 4 c + j
        line = code // 2 % 8 * 8 + code // 16 * 2 + code % 2
        place = (channel // 32 % 2 * 4 + channel // 2 % 4) ^ line % 8
        at = channel // 64 * 4096 + line * 64 + place * 8 + channel // 8 % 4 * 2 + channel % 2
        tl.store(out + 12800 + at, rows)


@triton.jit
def tables_kernel(
    centres, metric, out, shift, near_shift, high, low, scale, STAGES: tl.constexpr, BYTES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Tables of a stage as :mod:`kvfold.kernels.commvq._pairs` reads them, of ``centres`` [heads, STAGES, 64, 128] under
    ``metric`` [heads, 128, 128]; ``out`` fp16 [heads, STAGES, BYTES / 2]. Grid: (STAGES + 1, heads).

    RoPE is to rotate all channels: channels j and j + 64 are a pair, and the metric commutes with multiplication by i. The
    first stage's are of centres less their means, ``shift`` float32 and ``near_shift`` fp16 [heads, 128], as
    :func:`kvfold.kernels.commvq.encode.shifted` takes them off. The last program cuts the metric in two: ``high`` and ``low``
    fp16 [heads, 128, 128], which count ``scale`` times, float32 [heads].
    """
    stage, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    code, channel = tl.arange(0, 64), tl.arange(0, 128)
    matrix = metric + head * 16384
    if stage == STAGES:
        whole = tl.load(matrix + channel[:, None] * 128 + channel[None, :]).to(tl.float32)
        bits = tl.maximum(_max(_max(tl.abs(whole), 1), 0), 1e-30).to(tl.int32, bitcast=True)
        power = tl.minimum((bits + 0x007FFFFF) & 0x7F800000, 0x7E000000)
        whole = whole * (0x7F000000 - power).to(tl.float32, bitcast=True)
        near = whole.to(tl.float16)
        at = head * 16384 + channel[:, None] * 128 + channel[None, :]
        tl.store(high + at, near)
        tl.store(low + at, (whole - near.to(tl.float32)).to(tl.float16))
        tl.store(scale + head, power.to(tl.float32, bitcast=True))
    else:
        number = head * STAGES + stage
        z = tl.full((64, 128), 0.0, tl.float32)
        for first in range(0, 128, STEP):
            row = first + tl.arange(0, STEP)
            known = tl.load(centres + (number * 64 + code[:, None]) * 128 + row[None, :]).to(tl.float32)
            part = tl.load(matrix + row[:, None] * 128 + channel[None, :]).to(tl.float32)
            z = tl.dot(known, part, z, input_precision="tf32x3")
        if stage == 0:
            mean = _sum(z, 0) / 64
            z = z - mean[None, :]
            tl.store(shift + head * 128 + channel, mean)
            tl.debug_barrier()
            # with i times the mean, whose real channels are minus the imaginary ones
            turned = tl.load(shift + head * 128 + (channel ^ 64))
            mean += tl.where(channel < 64, -turned, turned)
            tl.debug_barrier()
            tl.store(shift + head * 128 + channel, mean)
            tl.store(near_shift + head * 128 + channel, _bounded(mean))
        to = out + number * (BYTES // 2)
        rounded = _bounded(z)
        _store_rows(rounded, to, WIDE)
        tl.debug_barrier()
        # rows are taken off as they are stored, so their products are of these
        opposite = tl.load(to + code[:, None] * 128 + (channel[None, :] ^ 64 ^ code[:, None] % 2 * 32))
        opposite = tl.where((channel < 64)[None, :], -opposite, opposite)
        less = 0.5 * _sum(z * z, 1)
        tl.store(to + 12288 + code, _bounded(-less))
        line = code[:, None] * 64 + code[None, :]
        tl.store(to + 8192 + line, _bounded(-tl.dot(rounded, tl.trans(opposite))))
        tl.store(to + (BYTES // 2 - 4096) + line, _bounded(tl.dot(rounded, tl.trans(rounded)) - less[None, :]))


@triton.jit(do_not_specialize=["tokens"])
def units_kernel(
    x, stride_b, stride_h, stride_t, rows, cosines, sines, turns, factor, high, low, scale, shift, units, sizes, tokens, heads,
    D: tl.constexpr, HALF: tl.constexpr, T: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """Keys under the metric, divided by their root mean squares, less ``shift`` float32 [heads, D]: ``units`` fp16 [batch,
    heads, tokens, D], ``sizes`` float32 [batch, heads, tokens]. Grid: (parts of T tokens, heads, batch).

    ``high`` and ``low`` fp16 [heads, D, D]: two halves of the metric divided by ``scale`` float32 [heads]. Keys are divided by
    a power of two and cut in two as well; of four products the smallest is left out.
    """
    index, head, _ = _lane(rows, heads, PICKED)
    channel = tl.arange(0, D)
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = token < tokens
    source = (x + index * stride_b + head * stride_h, stride_t, cosines + index * turns, sines + index * turns, factor)
    given = _vectors(source, token[:, None], channel[None, :], inside[:, None] & (channel >= 0)[None, :], HALF)
    # exponents of the largest elements: two to their power, and one over that
    power = tl.maximum(
        tl.minimum(_max(tl.abs(given), 1).to(tl.int32, bitcast=True) & 0x7F800000, 0x7C000000), 0x02000000
    )
    given = given * (0x7F000000 - power).to(tl.float32, bitcast=True)[:, None]
    near = given.to(tl.float16)
    rest = (given - near.to(tl.float32)).to(tl.float16)
    at = head * (D * D) + channel[:, None] * D + channel[None, :]
    table = tl.load(high + at)
    under = tl.dot(near, tl.load(low + at), tl.full((T, D), 0.0, tl.float32))
    under = tl.dot(rest, table, under)
    under = tl.dot(near, table, under)
    size = tl.sqrt_rn(_sum(under * under, 1) / D)
    under = under * (1.0 / tl.maximum(size, TINY))[:, None] - tl.load(shift + head * D + channel)[None, :]
    place = (index * heads + head) * tokens + token
    tl.store(sizes + place, size * power.to(tl.float32, bitcast=True) * tl.load(scale + head), mask=inside)
    tl.store(units + place[:, None] * D + channel[None, :], under.to(tl.float16), mask=inside[:, None])


@triton.jit
def _best_pair(of_a, of_b, cross, scores, N: tl.constexpr):
    """Places (a, b), int32 [tokens], of the best of all N^2 pairs, scores float32 [tokens, N]; ``scores``: float32 [N, tokens],
    the program's own."""
    T: tl.constexpr = of_a.shape[0]
    slot, code = tl.arange(0, T), tl.arange(0, N)
    tl.debug_barrier()
    tl.store(scores + code[None, :] * T + slot[:, None], of_a)
    tl.debug_barrier()
    most = tl.full((T,), float("-inf"), tl.float32)
    a = tl.full((T,), 0, tl.int32)
    for first in range(0, N, AHEAD):
        for i in tl.static_range(AHEAD):
            line = tl.load(cross + (first + i) * N + code)[None, :]
            best = _max(of_b - line, 1) + tl.load(scores + (first + i) * T + slot)
            better = best > most
            most = tl.where(better, best, most)
            a = tl.where(better, first + i, a)
    _, b = _first_largest(of_b - tl.load(cross + a[:, None] * N + code[None, :]), N)
    return a, b


@triton.jit(do_not_specialize=["tokens", "first_token", "room"])
def pairs_kernel(
    x, stride_b, stride_h, stride_t, rows, cosines, sines, turns, factor, metric, shift, halves, squares, cross, scratch,
    chosen, codes, rms, tokens, first_token, room, heads, D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    COUNT: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr, LATE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr,
    T: tl.constexpr, METRIC: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """Codes of keys, in COUNT choices (:func:`kvfold.kernels.commvq.encode.order`). Grid: (parts of T tokens, heads, batch).

    ``metric`` float32 [heads, D, D]; ``shift`` float32 [heads, D], taken off keys; ``halves`` fp16 [heads, STAGES, 2N, D] and
    ``squares`` float32 [heads, STAGES, 2N] under the metric; ``cross`` float32 [heads, STAGES, N, N]. ``scratch`` float32
    [programs, N, T] and ``chosen`` uint8 [programs, STAGES, 2, T] are a program's own. ``codes`` int16 [lanes, room / 32,
    STAGES, 2 BITS], ``rms`` fp16 [lanes, room].
    """
    index, head, lane = _lane(rows, heads, PICKED)
    program = (tl.program_id(2) * heads + tl.program_id(1)).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    slot, channel, code = tl.arange(0, T), tl.arange(0, D), tl.arange(0, N)
    token = tl.program_id(0) * T + slot
    inside = token < tokens
    source = (x + index * stride_b + head * stride_h, stride_t, cosines + index * turns, sines + index * turns, factor)
    rest = _under(source, metric + head * (D * D), token, inside, HALF, D, T, METRIC)
    size = tl.sqrt_rn(_sum(rest * rest, 1) / D)
    rest = tl.math.div_rn(rest, tl.broadcast_to(tl.maximum(size, TINY)[:, None], (T, D)))
    rest -= tl.load(shift + head * D + channel)[None, :]
    scores, own = scratch + program * (N * T), chosen + program * (STAGES * 2 * T) + slot
    for choice in range(COUNT):
        stage, again = _stage_at(choice, STAGES, MIDDLE, LOW, LATE)
        number = head * STAGES + stage
        table = halves + number * (2 * N * D)
        place = own + stage * (2 * T)
        tl.debug_barrier()  # codes that other lanes stored
        had = tl.load(place + T, mask=again & (slot >= 0), other=0).to(tl.int32)
        if again:
            rest += _centres(table, tl.load(place).to(tl.int32), had, channel, N, D)
        near = rest.to(tl.float16)
        known_a = tl.load(table + code[None, :] * D + channel[:, None])
        score_a = 2 * tl.dot(near, known_a) - tl.load(squares + number * (2 * N) + code)[None, :]
        known_b = tl.load(table + (N + code)[None, :] * D + channel[:, None])
        score_b = 2 * tl.dot(near, known_b) - tl.load(squares + number * (2 * N) + N + code)[None, :]
        mixed = cross + number * (N * N)
        if COUNT == STAGES:
            a, b = _best_pair(score_a, score_b, mixed, scores, N)
        elif choice == 0:
            a, b = _best_pair(score_a, score_b, mixed, scores, N)
        else:
            a, b = _pair(score_a, score_b, mixed, had, again, N)
        rest -= _centres(table, a, b, channel, N, D)
        tl.store(place, a.to(tl.uint8))
        tl.store(place + T, b.to(tl.uint8))
    tl.debug_barrier()
    whole = _under(source, metric + head * (D * D), token, inside, HALF, D, T, METRIC)
    whole = tl.math.div_rn(whole, tl.broadcast_to(tl.maximum(size, TINY)[:, None], (T, D)))
    centre = whole - rest
    gain = _sum(whole * centre, 1) / tl.maximum(_sum(centre * centre, 1), 1e-12)
    tl.store(rms + lane * room + first_token + token, _to_fp16(size * gain), mask=inside)
    _store_streams(own, codes, lane * room + first_token + tl.program_id(0) * T, tokens, N, STAGES, BITS, T)


@triton.jit
def _store_streams(
    own, codes, first, tokens, N: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr
):
    """Store codes ``a + N b`` of BITS bits without gaps, 32 tokens at a time (kvfold.formats.codebook.pack_codes). ``own``: of
    the first token's slots; ``first``: place of the program's first token in storage."""
    WORDS: tl.constexpr = 2 * BITS
    word = tl.arange(0, triton.next_power_of_2(WORDS))
    unit = tl.arange(0, T // 32)
    shift = tl.arange(0, 32)[None, :, None] * BITS - 16 * word[None, None, :]
    near = (shift > -BITS) & (shift < 16)
    up, down = tl.minimum(tl.maximum(shift, 0), 31), tl.minimum(tl.maximum(-shift, 0), 31)
    inside = (tl.program_id(0) * T + unit * 32 < tokens)[:, None] & (word < WORDS)[None, :]
    for stage in range(STAGES):
        a = tl.load(own + stage * (2 * T)).to(tl.int32)
        b = tl.load(own + stage * (2 * T) + T).to(tl.int32)
        code = tl.reshape(a + N * b, (T // 32, 32))[:, :, None]
        words = _sum(tl.where(near, ((code << up) >> down) & 0xFFFF, 0), 1)
        at = ((first // 32 + unit)[:, None] * STAGES + stage) * WORDS + word[None, :]
        tl.store(codes + at, words.to(tl.int16), mask=inside)


@triton.jit
def _plus_product(x, table, total, EXACT: tl.constexpr):
    """``total + x @ table`` in float32's precision. EXACT: x has no more than tf32's 11 bits, so that two halves of the table
    do."""
    if not EXACT:
        return tl.dot(x, table, total, input_precision="tf32x3")
    high = (table.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    total = tl.dot(x, high, total, input_precision="tf32")
    return tl.dot(x, table - high, total, input_precision="tf32")


@triton.jit
def _products(source, token, inside, table, D: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """Tokens times ``table`` float32 [D, C]: float32 [tokens, C]."""
    code = tl.arange(0, C)
    total = tl.full((token.shape[0], C), 0.0, tl.float32)
    for first in range(0, D, STEP):
        row = first + tl.arange(0, STEP)
        known = (row < D)[:, None] & (code >= 0)[None, :]
        some = _vectors(source, token[:, None], row[None, :], inside[:, None] & (row < D)[None, :], 0)
        part = tl.load(table + row[:, None] * C + code[None, :], mask=known, other=0.0)
        total = _plus_product(some, part, total, EXACT)
    return total


@triton.jit(do_not_specialize=["tokens", "heads", "batch"])
def values_kernel(
    x, stride_b, stride_h, stride_t, matrix, shift, top, place, along, origin, gram, bits, slope, tokens, heads, batch,
    D: tl.constexpr, C: tl.constexpr, T: tl.constexpr, FLIPS: tl.constexpr,
):  # fmt: skip
    """Values' bits by levels, and how fast the error falls with each. Grid: (parts of T tokens, heads, batch).

    Seven tables as :class:`kvfold.formats.binary.BitSearch` has them. ``bits`` and (with FLIPS) ``slope``, float32 [heads,
    batch, tokens, C]: what :func:`flips_kernel` begins with.
    """
    EXACT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * T + tl.arange(0, T)
    code = tl.arange(0, C)
    inside = token < tokens
    source = (x + index * stride_b + head * stride_h, stride_t, matrix, matrix, 1.0)
    said = _products(source, token, inside, matrix + head * (D * C), D, C, EXACT)
    said += tl.load(shift + head * C + code)[None, :]
    # to the nearest whole number, halves to the even one
    near = tl.minimum(tl.maximum(said, 0.0), tl.load(top + head * C + code)[None, :]) + 12582912.0 - 12582912.0
    digit = tl.load(place + head * C + code).to(tl.int32)[None, :]
    at = ((head * batch + index) * tokens + token)[:, None] * C
    tl.store(bits + at + code[None, :], ((near.to(tl.int32) >> digit) & 1).to(tl.float32), mask=inside[:, None])
    if FLIPS:
        rise = _products(source, token, inside, along + head * (D * C), D, C, EXACT)
        moved = tl.full((T, C), 0.0, tl.float32)
        tl.debug_barrier()  # other lanes' bits
        for first in range(0, C, STEP):
            row = first + tl.arange(0, STEP)
            some = tl.load(bits + at + row[None, :], mask=inside[:, None], other=0.0)
            part = tl.load(gram + (head * C + row[:, None]) * C + code[None, :])
            moved = _plus_product(some, part, moved, True)
        rise -= tl.load(origin + head * C + code)[None, :] + moved
        tl.store(slope + at + code[None, :], rise, mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens", "heads", "batch"])
def gains_kernel(
    x, stride_b, stride_h, stride_t, offset, scale, matrix, shift, top, place, along, gram, half, bits, gains, tokens, heads,
    batch, D: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Values' bits by levels, and what flipping each gains. Grid: (parts of T tokens, heads, batch).

    Tables as :class:`kvfold.formats.binary.BitGains` has them. ``bits`` uint8 [heads, batch, tokens, C] is written for the
    program's own use; ``gains`` float32 of that shape: what :func:`kvfold.kernels.commvq._flips.flip_kernel` begins with.
    """
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * T + tl.arange(0, T)
    code = tl.arange(0, C)
    inside = token < tokens
    source = (x + index * stride_b + head * stride_h, stride_t, offset, offset, 1.0)
    factor = tl.load(scale + head)
    said = tl.full((T, C), 0.0, tl.float32)
    rise = tl.full((T, C), 0.0, tl.float32)
    for first in range(0, D, STEP):
        row = first + tl.arange(0, STEP)
        known = (row < D)[:, None] & (code >= 0)[None, :]
        place_of = head * (D * C) + row[:, None] * C + code[None, :]
        some = _vectors(source, token[:, None], row[None, :], inside[:, None] & (row < D)[None, :], 0)
        some = (some - tl.load(offset + head * D + row, mask=row < D, other=0.0)[None, :]) * factor
        some = tl.minimum(tl.maximum(some, -FARTHEST), FARTHEST).to(tl.float16)
        said = tl.dot(some, tl.load(matrix + place_of, mask=known, other=0.0), said)
        rise = tl.dot(some, tl.load(along + place_of, mask=known, other=0.0), rise)
    said += tl.load(shift + head * C + code)[None, :]
    # to the nearest whole number, halves to the even one
    near = tl.minimum(tl.maximum(said, 0.0), tl.load(top + head * C + code)[None, :]) + 12582912.0 - 12582912.0
    digit = tl.load(place + head * C + code).to(tl.int32)[None, :]
    chosen = (near.to(tl.int32) >> digit) & 1
    at = ((head * batch + index) * tokens + token)[:, None] * C
    tl.store(bits + at + code[None, :], chosen.to(tl.uint8), mask=inside[:, None])
    tl.debug_barrier()  # other lanes' bits
    moved = tl.full((T, C), 0.0, tl.float32)
    for first in range(0, C, STEP):
        row = first + tl.arange(0, STEP)
        some = tl.load(bits + at + row[None, :], mask=inside[:, None], other=0)
        moved = tl.dot(some.to(tl.float16), tl.load(gram + (head * C + row[:, None]) * C + code[None, :]), moved)
    rise -= moved
    gain = tl.where(chosen > 0, -rise, rise) - tl.load(half + head * C + code)[None, :]
    gain = (gain.to(tl.int32, bitcast=True) & -2 | chosen).to(tl.float32, bitcast=True)
    tl.store(gains + at + code[None, :], gain, mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens", "flips"])
def flips_kernel(bits, slope, gram, square, least, tokens, flips, C: tl.constexpr, T: tl.constexpr):
    """Flip the bit that lowers a value's error most, up to ``flips`` times. Grid: (parts of T tokens, heads).

    ``bits`` and ``slope`` float32 [heads, tokens, C], bits in place; ``gram`` float32 [heads, C, C] of products of codes,
    ``square`` [heads, C] its diagonal; ``least`` [heads]: gains that are none. A bit's loss carries its number, and which way
    it flips, in its lowest bits, so that one minimum finds all: of losses that are alike to C 2^-22 any is taken.
    """
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * T + tl.arange(0, T)
    code = tl.arange(0, C)
    inside = token < tokens
    at = (head * tokens + token)[:, None] * C + code[None, :]
    start = tl.load(bits + at, mask=inside[:, None], other=0.0)
    back = 4 * start - 2  # -2 where a bit would be set, 2 where it would be taken away
    number = 2 * code[None, :] + start.to(tl.int32)
    rise = tl.load(slope + at, mask=inside[:, None], other=0.0)
    size = tl.load(square + head * C + code)[None, :] + tl.full((T, C), 0.0, tl.float32)
    low = tl.load(least + head)
    left = flips
    while left > 0:
        loss = _fma(back, rise, size).to(tl.int32, bitcast=True) & (-2 * C) | number
        loss = _lowest(loss.to(tl.float32, bitcast=True))
        mark = loss.to(tl.int32, bitcast=True) & (2 * C - 1)
        more = (loss < -low) & inside
        here = (2 * code[None, :] == (mark & -2)[:, None]) & more[:, None]
        line = gram + (head * C + (mark >> 1))[:, None] * C + code[None, :]
        step = tl.where(more, 1.0 - 2.0 * (mark & 1).to(tl.float32), 0.0)
        step = -step[:, None] + tl.full((T, C), 0.0, tl.float32)
        rise = _fma(step, tl.load(line, mask=more[:, None], other=0.0), rise)
        back = tl.where(here, _negative(back), back)
        number = tl.where(here, number ^ 1, number)
        left = tl.where(_max(more.to(tl.int32), 0) > 0, left - 1, 0)
    tl.store(bits + at, 0.25 * back + 0.5, mask=inside[:, None])


@triton.jit(do_not_specialize=["first_block"])
def bits_kernel(
    bits,
    rows,
    words,
    tokens,
    first_block,
    blocks,
    heads,
    batch,
    C: tl.constexpr,
    ORDER: tl.constexpr,
    PICKED: tl.constexpr,
):
    """Pack 32 tokens' bits, float32 [heads, batch, tokens, C], to int16 [lanes, blocks, 2 C]. Grid: (units, heads, batch)."""
    index, head, lane = _lane(rows, heads, PICKED)
    code, token = tl.arange(0, C), tl.program_id(0) * 32 + tl.arange(0, 32)
    held = ((head * batch + index) * tokens + token)[:, None]
    chosen = tl.reshape((tl.load(bits + held * C + code[None, :]) > 0.5).to(tl.int32), (32 * C,))
    _store_plane(chosen, words + (lane * blocks + first_block + tl.program_id(0)) * (2 * C), C, 1, ORDER)
