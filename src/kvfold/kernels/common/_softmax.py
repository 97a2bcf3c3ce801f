# mypy: ignore-errors
"""Softmax as the fused kernels run it: a warp's running maximum and sums, how warps meet, and the parts they store."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _unit_half2, _zero4
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    exp2_fast,
    load_shared4f,
    max_half2,
    mul_half2,
    pack_half2,
    program_sync,
    shuffle_xor,
    store_shared4,
    transpose8,
)

LOG2E = gl.constexpr(1.4426950408889634)
LIFT = gl.constexpr(4)
"""log2 of the factor that probabilities carry where no scale multiplies them, so that small ones are not subnormal."""
LOWEST = gl.constexpr(-1.0e30)  # running maximum before any token: finite, so that differences are never NaN


@gluon.jit
def _softmax(scores, top, COUNT: gl.constexpr, NT: gl.constexpr, BF16: gl.constexpr, LIFT: gl.constexpr):
    """Running maximum, factor of what was summed before, and 2^LIFT exp2(score - maximum) as B operands.

    Scores are a tuple of COUNT * NT accumulators.
    """
    new_top = ()
    factor = ()
    shift = ()
    for n in gl.static_range(NT):
        for e in gl.static_range(2):
            m = gl.maximum(scores[n][e], scores[n][e + 2])
            for i in gl.static_range(1, COUNT):
                m = gl.maximum(m, gl.maximum(scores[i * NT + n][e], scores[i * NT + n][e + 2]))
            m = gl.maximum(m, shuffle_xor(m, 4))
            m = gl.maximum(m, shuffle_xor(m, 8))
            m = gl.maximum(m, shuffle_xor(m, 16))
            m = gl.maximum(m, top[2 * n + e])
            new_top = new_top + (m,)
            factor = factor + (exp2_fast(top[2 * n + e] - m),)
            shift = shift + (LIFT - m,)
    p = ()
    for i in gl.static_range(COUNT):
        for n in gl.static_range(NT):
            x = scores[i * NT + n]
            low = pack_half2(exp2_fast(x[0] + shift[2 * n]), exp2_fast(x[1] + shift[2 * n + 1]), BF16)
            high = pack_half2(exp2_fast(x[2] + shift[2 * n]), exp2_fast(x[3] + shift[2 * n + 1]), BF16)
            p = p + (transpose8(low), transpose8(high))
    return new_top, factor, p


@gluon.jit
def _headroom(x):
    """log2 of the factor that probabilities of a stage may carry: up to 15, and so that times any scale it stays below 2^15.

    ``x`` are pairs of fp16 scales, the largest that a lane has seen.
    """
    for i in gl.static_range(5):
        x = max_half2(x, as_int(shuffle_xor(as_float(x), 1 << i)))
    return gl.minimum(29 - (gl.maximum(x & 0xFFFF, x >> 16) >> 10), 15).to(gl.float32)


@gluon.jit
def _probabilities(scores, top, room, COUNT: gl.constexpr, NT: gl.constexpr):
    """Running exponent, factor of what was summed before, and a stage's exp2(score - exponent) as B operands.

    Scores are a tuple of COUNT * NT accumulators. The exponent is the maximum less ``room``, or that of a stage before if it is
    higher.
    """
    new_top = ()
    factor = ()
    for n in gl.static_range(NT):
        for e in gl.static_range(2):
            m = gl.maximum(scores[n][e], scores[n][e + 2])
            for i in gl.static_range(1, COUNT):
                m = gl.maximum(m, gl.maximum(scores[i * NT + n][e], scores[i * NT + n][e + 2]))
            m = gl.maximum(m, shuffle_xor(m, 4))
            m = gl.maximum(m, shuffle_xor(m, 8))
            m = gl.maximum(m, shuffle_xor(m, 16))
            m = gl.maximum(m - room, top[2 * n + e])
            new_top = new_top + (m,)
            factor = factor + (exp2_fast(top[2 * n + e] - m),)
    p = ()
    for i in gl.static_range(COUNT):
        for n in gl.static_range(NT):
            x = scores[i * NT + n]
            low = pack_half2(exp2_fast(x[0] - new_top[2 * n]), exp2_fast(x[1] - new_top[2 * n + 1]), False)
            high = pack_half2(exp2_fast(x[2] - new_top[2 * n]), exp2_fast(x[3] - new_top[2 * n + 1]), False)
            p = p + (transpose8(low), transpose8(high))
    return new_top, factor, p


@gluon.jit
def _rescale(accs, factor, COUNT: gl.constexpr, NT: gl.constexpr):
    """Accumulators [NT, COUNT] times the factor of their query rows."""
    out = ()
    for n in gl.static_range(NT):
        for c in gl.static_range(COUNT):
            x = accs[n * COUNT + c]
            out = out + (
                (x[0] * factor[2 * n], x[1] * factor[2 * n + 1], x[2] * factor[2 * n], x[3] * factor[2 * n + 1]),
            )
    return out


@gluon.jit
def _nothing(lane, CT: gl.constexpr, NT: gl.constexpr):
    """Running maxima, sums of values and of probabilities before any token."""
    top = ()
    out = ()
    side = ()
    for _n in gl.static_range(NT):
        top = top + (_zero4(lane)[0] + LOWEST, _zero4(lane)[0] + LOWEST)
        side = side + (_zero4(lane),)
        for _c in gl.static_range(CT):
            out = out + (_zero4(lane),)
    return top, out, side


# ---- meeting of the warps, and store --------------------------------------------------------------------------------


@gluon.jit
def _store_sums(part_top, part_sum, at, column, rows, writes, top0, top1, sum0, sum1, LIFT: gl.constexpr):
    """Maxima and sums of two query rows. The maxima have the factor that probabilities carry."""
    gl.store(part_top + at, top0 - LIFT, mask=writes & (column < rows))
    gl.store(part_sum + at, sum0, mask=writes & (column < rows))
    gl.store(part_top + at + 1, top1 - LIFT, mask=writes & (column + 1 < rows))
    gl.store(part_sum + at + 1, sum1, mask=writes & (column + 1 < rows))


@gluon.jit
def _store_own(
    lane, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, D: gl.constexpr, NT: gl.constexpr,
    LIFT: gl.constexpr,
):  # fmt: skip
    """Store the partial results of a warp that has query rows to itself."""
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    for n in gl.static_range(NT):
        column = column0 + n * 8 + 2 * t
        at = slot0 * rows + column
        _store_sums(
            part_top, part_sum, at, column, rows, g == 0, top[2 * n], top[2 * n + 1], side[n][2], side[n][3], LIFT
        )  # fmt: skip
        to = part_out + at.to(gl.int64) * D + g
        for ct in gl.static_range(CT):
            x = out[n * CT + ct]
            gl.store(to + ct * 16, x[0], mask=column < rows)
            gl.store(to + (D + ct * 16), x[1], mask=column + 1 < rows)
            gl.store(to + (ct * 16 + 8), x[2], mask=column < rows)
            gl.store(to + (D + ct * 16 + 8), x[3], mask=column + 1 < rows)


@gluon.jit
def _finish(
    base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, DENSE: gl.constexpr,
    D: gl.constexpr, NT: gl.constexpr, LIFT: gl.constexpr, MORE: gl.constexpr = 0,
):  # fmt: skip
    """Merge the warps of the program and store one partial result per query row; with MORE, 1, its sum after it once more.

    DENSE says which channels a lane has of a tile: adjacent ones of
    all tiles (1), adjacent ones of each (2), or those of rows g and g + 8 (0).
    """
    CT: gl.constexpr = D // 16
    W: gl.constexpr = gl.num_warps()
    g = lane // 4
    t = lane % 4
    # maxima and sums: [query row, warp]
    best = ()
    factor = ()
    for n in gl.static_range(NT):
        store_shared4(base0 + ((n * W + warp) * 4 + t) * 16, top[2 * n], top[2 * n + 1], side[n][2], side[n][3])
    program_sync(lane)
    for n in gl.static_range(NT):
        a = ()
        for w in gl.static_range(W):
            a = a + (load_shared4f(base0 + ((n * W + w) * 4 + t) * 16),)
        m0 = a[0][0]
        m1 = a[0][1]
        for w in gl.static_range(1, W):
            m0 = gl.maximum(m0, a[w][0])
            m1 = gl.maximum(m1, a[w][1])
        l0 = _zero4(lane)[0]
        l1 = l0
        for w in gl.static_range(W):
            l0 = gl.fma(a[w][2], exp2_fast(a[w][0] - m0), l0)
            l1 = gl.fma(a[w][3], exp2_fast(a[w][1] - m1), l1)
        best = best + (m0, m1)
        factor = factor + (exp2_fast(top[2 * n] - m0), exp2_fast(top[2 * n + 1] - m1))
        column = column0 + n * 8 + 2 * t
        _store_sums(
            part_top, part_sum, slot0 * rows + column, column, rows, (warp == 0) & (g == 0), m0, m1, l0, l1, LIFT
        )  # fmt: skip
        if MORE:
            to = part_out + (slot0 * rows + column).to(gl.int64) * (D + MORE) + D
            gl.store(to, l0, mask=(warp == 0) & (g == 0) & (column < rows))
            gl.store(to + (D + MORE), l1, mask=(warp == 0) & (g == 0) & (column + 1 < rows))
    program_sync(lane)
    # outputs: [tile, warp, lane] of four registers; each warp then sums its share of the tiles
    for n in gl.static_range(NT):
        for ct in gl.static_range(CT):
            x = out[n * CT + ct]
            store_shared4(
                base0 + (((n * CT + ct) * W + warp) * 32 + lane) * 16,
                x[0] * factor[2 * n],
                x[1] * factor[2 * n + 1],
                x[2] * factor[2 * n],
                x[3] * factor[2 * n + 1],
            )
    program_sync(lane)
    for i in gl.static_range((NT * CT + W - 1) // W):
        tile = i * W + warp
        live = rows
        if NT * CT % W > 0:
            live = gl.where(tile < NT * CT, rows, 0)
            tile = gl.minimum(tile, NT * CT - 1)
        total = load_shared4f(base0 + (tile * W * 32 + lane) * 16)
        for w in gl.static_range(1, W):
            x = load_shared4f(base0 + ((tile * W + w) * 32 + lane) * 16)
            total = (total[0] + x[0], total[1] + x[1], total[2] + x[2], total[3] + x[3])
        ct = tile % CT
        column = column0 + tile // CT * 8 + 2 * t
        if DENSE == 2:
            channel = ct * 16 + 2 * g
            half = 1
        elif DENSE:
            channel = g * (D // 8) + 2 * ct
            half = 1
        else:
            channel = ct * 16 + g
            half = 8
        at = (slot0 * rows + column).to(gl.int64) * (D + MORE) + channel
        gl.store(part_out + at, total[0], mask=column < live)
        gl.store(part_out + at + half, total[2], mask=column < live)
        gl.store(part_out + at + (D + MORE), total[1], mask=column + 1 < live)
        gl.store(part_out + at + (D + MORE) + half, total[3], mask=column + 1 < live)


@gluon.jit
def _lighten(p, lane, BY: gl.constexpr):
    """fp16 pairs times 2^-BY."""
    if BY == 0:
        return p
    else:
        return mul_half2(p, _unit_half2(lane, -BY))
