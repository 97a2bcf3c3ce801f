# mypy: ignore-errors
"""The loop over pages of :mod:`kvfold.kernels.fragments._decode` for four or eight levels of a table (TurboQuant), keys and
values, for up to four query rows of a KV head.

Both products are of bytes, as in :mod:`kvfold.kernels.fold._bytes`. Four levels -b, -a, a, b of codes u are linear in the
codes' two bits: ``(a + b) / 2 * ((u - 3/2) + bend * (u % 2 - 1/2))``. So a product with uniform codes is followed by one with
their lowest bits, whose queries (or probabilities) are ``bend`` times as large, in the same sums. Eight levels that are whole
numbers are looked up (:mod:`kvfold.kernels.fragments._level_bytes`).

Queries go through the rotation for two pages at once, as in :mod:`kvfold.kernels.fragments._signs`, or, with the rotation in
shared memory, for 16 pages of four warps (:mod:`kvfold.kernels.fragments._wide`). Sums of values are turned back once; those of
their means, which are not rotated, wait in shared memory.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import nibble_weight
from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._softmax import LOWEST
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    copy_commit,
    copy_wait,
    exp2_fast,
    load_fragment,
    load_shared,
    load_shared4f,
    mma,
    pack_half2,
    prefetch_bulk,
    program_sync,
    shuffle,
    shuffle_xor,
    store_shared1,
    store_shared2,
    store_shared4,
    warp_sync,
)
from kvfold.kernels.fold._bytes import byte_scores, byte_values, byte_weights, page_scales
from kvfold.kernels.fold._sums import _mean_scores, _plain_mean
from kvfold.kernels.fragments._codes import bring_pages, fetch_side
from kvfold.kernels.fragments._level_bytes import level_byte_scores, level_byte_values, level_query_pages
from kvfold.kernels.fragments._signs import byte_query_pages
from kvfold.kernels.fragments._wide import turn_pages, turned_page


@gluon.jit
def no_row_means(base, lane, D: gl.constexpr, MEANS: gl.constexpr):
    """Sums of means of row t before any page."""
    z = _zero4(lane)[0]
    for i in gl.static_range(D // 32):
        store_shared4(base + (MEANS + 512 * i) + lane * 16, z, z, z, z)


@gluon.jit
def take_row_means(base, lane, before, share, D: gl.constexpr, AT: gl.constexpr, MEANS: gl.constexpr):
    """Add a page's mean, times its share, to what is left (``before``) of the sums of row t, channels g and g + 8."""
    mean = _plain_mean(base, lane, D, AT)
    for i in gl.static_range(D // 32):
        at = base + (MEANS + 512 * i) + lane * 16
        x = load_shared4f(at)
        a = mean[2 * i]
        b = mean[2 * i + 1]
        store_shared4(
            at, gl.fma(x[0], before, a[0] * share), gl.fma(x[1], before, a[2] * share),
            gl.fma(x[2], before, b[0] * share), gl.fma(x[3], before, b[2] * share),
        )  # fmt: skip


@gluon.jit
def finish_levels(
    base0, lane, warp, top, out, total, table, part_out, part_top, part_sum, slot0, column0, rows, D: gl.constexpr,
    BITS: gl.constexpr, UNIT: gl.constexpr, MEAN: gl.constexpr, MEANS: gl.constexpr, STAGE: gl.constexpr,
    FREE: gl.constexpr = 0,
):  # fmt: skip
    """Join the warps' sums of values, turn them back, add those of means and store one partial result per query row; each warp
    does so for its share of the channels. Rows are columns of the product that turns them, each scaled by a power of two. FREE:
    bytes before the stages that sums may lie in; else they lie in the first one, before its means."""
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    ROW: gl.constexpr = 4 * D + 32  # bytes, so that lanes use all banks
    g = lane // 4
    t = lane % 4
    room = base0 - FREE
    to = room + (warp * 4 + t) * ROW + g * 4
    for ct in gl.static_range(CT):
        f = UNIT * 2.0 ** (8 - (nibble_weight(D, 2, ct % (CT // 2)) if BITS == 2 else 0))
        store_shared1(to + 64 * ct, as_int(out[2 * ct] * f))
        store_shared1(to + (64 * ct + 32), as_int(out[2 * ct + 1] * f))
    side = room + 4 * W * ROW
    store_shared2(side + (warp * 4 + t) * 8, as_int(top), as_int(total))
    program_sync(lane)
    column = g % 4  # this lane's row as an operand
    best, share, amount = _joined(side, column)
    x = ()
    big = _zero4(lane)[0]
    for i in gl.static_range(2 * CT):
        low = _zero4(lane)[0]
        high = low
        for w in gl.static_range(W):
            y = load_shared(room + column * ROW + t * 8, 4 * w * ROW + 32 * i, 2)
            low = gl.fma(as_float(y[0]), share[w], low)
            high = gl.fma(as_float(y[1]), share[w], high)
        big = gl.maximum(big, gl.maximum(gl.abs(low), gl.abs(high)))
        x = x + (low, high)
    big = gl.maximum(big, shuffle_xor(big, 1))
    big = gl.maximum(big, shuffle_xor(big, 2))
    exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
    down = as_float((254 + 8 - exponent) << 23)
    up = as_float((exponent - 8) << 23)
    q = ()
    for i in gl.static_range(2 * CT):
        q = q + (pack_half2(x[2 * i] * down, x[2 * i + 1] * down, False),)
    at = (slot0 * rows + column0 + column).to(gl.int64)
    writes = (warp == 0) & (t == 0) & (g < 4) & (column0 + column < rows)
    gl.store(part_top + at, best, mask=writes)
    gl.store(part_sum + at, amount, mask=writes)
    first = t * 2 % 4  # of the two rows that this lane has of the product
    up0 = shuffle(up, first * 4)
    up1 = shuffle(up, first * 4 + 4)
    _best, share0, _amount = _joined(side, first)
    _best, share1, _amount = _joined(side, first + 1)
    own = table + warp.to(gl.int64) * (512 * CT * CT // W)
    to_out = part_out + (slot0 * rows + column0 + first).to(gl.int64) * D + g
    for r in gl.static_range(CT // W):
        acc = _zero4(lane)
        for c in gl.static_range(CT):
            a = load_fragment(own, 512 * (r * CT + c))
            acc = mma(a[0], a[1], a[2], a[3], q[2 * c], q[2 * c + 1], acc, False)
        tile = warp * (CT // W) + r
        y = (acc[0] * up0, acc[1] * up1, acc[2] * up0, acc[3] * up1)
        if MEAN:
            place = base0 + (g * 4 + first) * 16 + tile // 2 * 512 + tile % 2 * 8
            for w in gl.static_range(W):
                a = load_shared(place, w * STAGE + MEANS, 2)
                b = load_shared(place, w * STAGE + MEANS + 16, 2)
                y = (
                    gl.fma(as_float(a[0]), share0[w], y[0]), gl.fma(as_float(b[0]), share1[w], y[1]),
                    gl.fma(as_float(a[1]), share0[w], y[2]), gl.fma(as_float(b[1]), share1[w], y[3]),
                )  # fmt: skip
        for e in gl.static_range(4):
            live = (t < 2) & (column0 + first + e % 2 < rows)
            gl.store(to_out + (tile * 16 + (e % 2 * D + e // 2 * 8)), y[e], mask=live)


@gluon.jit
def _joined(side, row):
    """Of a row: the warps' greatest maximum, the factors of their sums, and what their sums of probabilities are together."""
    W: gl.constexpr = gl.num_warps()
    tops = ()
    for w in gl.static_range(W):
        tops = tops + (load_shared(side + row * 8, 32 * w, 2),)
    best = as_float(tops[0][0])
    for w in gl.static_range(1, W):
        best = gl.maximum(best, as_float(tops[w][0]))
    share = ()
    amount = best * 0.0
    for w in gl.static_range(W):
        f = exp2_fast(as_float(tops[w][0]) - best)
        share = share + (f,)
        amount = gl.fma(as_float(tops[w][1]), f, amount)
    return best, share, amount


@gluon.jit
def attend_levels(
    base0, lane, warp, lo, hi, pages, blocks, stored, block0, pages0, table, far, up, soon, D: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, LEVELS: gl.constexpr, PLACES: gl.constexpr, NB: gl.constexpr, WIDE: gl.constexpr = False,
):  # fmt: skip
    """Attention of four query rows over pages ``lo`` to ``hi`` of ``pages``, which the program's warps share; of ``blocks``
    blocks the scores count; see :func:`finish_levels`.

    ``stored``: addresses of codes, scales, means and norms of keys, and of codes, scales and means of values; ``block0`` and
    ``pages0``: where the head's begin. ``table``: a lane's address of keys' rotation as operands, or (WIDE) where it begins in
    shared memory, as :func:`kvfold.kernels.fragments._signs.attend_signs` has it. ``far``: of the queries as operands, row h in
    columns 2h and 2h + 1; ``up``: what turns their products into scores. LEVELS: bend and unit of keys, and of values
    (:func:`kvfold.kernels.fragments.decode.linear_levels`), and of eight levels the bytes.
    ``soon``: what comes to L2 with the last page, as :func:`kvfold.kernels.fragments._ahead.windows_at` has it, or nothing.
    Returns maxima of row t, sums of values (channels g and g + 8 of each tile) and of probabilities.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    BITS: gl.constexpr = K[1]
    STEPS: gl.constexpr = D // 8 if BITS == 2 else D // 16 - 4
    PAGES: gl.constexpr = 4 if WIDE else 2
    K_AT: gl.constexpr = PLACES[0]
    V_IN: gl.constexpr = PLACES[1]
    V_AT: gl.constexpr = PLACES[2]
    MEANS: gl.constexpr = PLACES[4]
    K_BEND: gl.constexpr = LEVELS[0]
    V_BEND: gl.constexpr = LEVELS[2]
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    base = base0 + warp * PLACES[5]
    scratch = base + PLACES[3]
    kc, km, kp, kn = stored[0]
    vc, vm, vp = stored[1]
    if not WIDE:
        bring_pages(
            base0, lane, warp, lo, hi, pages, blocks, stored, block0, pages0, D, K, D, V, PLACES, NB, 1, PAGES, False
        )

    zero = _zero4(lane)[0]
    top = zero + LOWEST
    total = zero
    out = ()
    for _i in gl.static_range(2 * CT):
        out = out + (zero,)
    now = ()
    for _i in gl.static_range(STEPS + 4):
        now = now + (lane * 0,)
    now = now + (zero,)
    later = now
    bias = zero
    k_levels = (lane, lane)
    v_levels = (lane, lane)
    if BITS == 3:  # registers that the compiler does not know to be constant: it would bring them anew each time
        none = lane * 0 + (blocks >> 31)
        k_levels = (none ^ LEVELS[4], none ^ LEVELS[5])
        v_levels = (none ^ LEVELS[6], none ^ LEVELS[7])
    if V[4]:
        no_row_means(base, lane, D, MEANS)
    for i in range(each):
        following = first + i + 1
        left = gl.where(i < count, blocks - (following - 1) * NB, 0)
        next_left = gl.where(i + 1 < count, blocks - following * NB, 0)
        next_norms = gl.where((i + 1 < count) & ((i + 1) % PAGES == 0), pages - following, 0)
        if WIDE:
            if i % 4 == 0:
                if i > 0:  # else norms have come before keys
                    copy_wait(lane, 1)
                turn_pages(base, scratch, far, table, base + PLACES[6], lane, D, D, BITS, K_BEND, K_AT[3])
                now = turned_page(base + PLACES[6], scratch, lane, 0, D, BITS, BITS == 2)
        if len(soon) > 0:
            if i == each - 1:
                prefetch_bulk(soon[0], soon[1], soon[2])
        copy_wait(lane, 1)  # keys of this page
        if not WIDE:
            if i % 2 == 0:
                if BITS == 2:
                    now, later = byte_query_pages(base, scratch, far, table, lane, D, D, K_AT[3], 2, K_BEND)
                else:
                    now, later = level_query_pages(base, scratch, far, table, lane, D, K_AT[3])
            else:
                now = later
        if K[4]:
            bias = _mean_scores(far, base, lane, (zero + 1.0,), D, 1, K_AT[2], True)[0] * up
        if BITS == 2:
            begin = (
                (now[STEPS], now[STEPS + 1], now[STEPS], now[STEPS + 1]),
                (now[STEPS + 2], now[STEPS + 3], now[STEPS + 2], now[STEPS + 3]),
            )
            scores = byte_scores(base, lane, now, begin, left, None, D, 2, NB, True)
        else:
            scores = level_byte_scores(base, lane, now, k_levels, left, D, NB)
        unit = now[len(now) - 1]
        if WIDE:  # what the next page takes is there when it begins
            now = turned_page(base + PLACES[6], scratch, lane, (i + 1) % 4, D, BITS, BITS == 2)
        warp_sync(lane)
        fetch_side(
            base, lane, kc, km, kc, kp, kn, block0 + following * NB, pages0[0] + following, next_left, next_left, next_norms,
            K_AT, 3, D, D, BITS, 0, 0, 0, K[4], PAGES, NB, 0,
        )  # fmt: skip
        copy_commit(lane)
        copy_wait(lane, 1)  # values of this page
        scale = page_scales(base, lane, NB, V_AT + V_IN[0])
        p, page_top, page_total = byte_weights(scores, unit * (up * LEVELS[1]), bias, scale, NB, V_BEND)
        new_top = gl.maximum(top, page_top)
        before = exp2_fast(top - new_top)
        share = exp2_fast(page_top - new_top)
        top = new_top
        total = gl.fma(total, before, page_total * share)
        if BITS == 2:
            out = byte_values(
                base, lane, p, (before,), (share,), (page_total,), (), out, D, 2, False, 1, NB, V_AT, True
            )  # fmt: skip
        else:
            out = level_byte_values(base, lane, p, v_levels, before, share, out, D, NB, V_AT)
        if V[4]:
            take_row_means(base, lane, before, page_total * share, D, V_AT + V_IN[2], MEANS)
        warp_sync(lane)
        fetch_side(
            base, lane, vc, vm, vc, vp, vc, block0 + following * NB, pages0[1] + following, next_left, next_left, 0, V_IN, 3,
            D, D, BITS, 0, 0, 0, V[4], 0, NB, V_AT,
        )  # fmt: skip
        copy_commit(lane)
    copy_wait(lane, 0)
    return top, out, total
