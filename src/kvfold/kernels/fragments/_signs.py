# mypy: ignore-errors
"""The loop over pages of :mod:`kvfold.kernels.fragments._decode` for signs of a sketch beside values in groups of channels, for
up to four query rows of a KV head; and scores of such signs for more rows.

Scores are products of bytes, as in :mod:`kvfold.kernels.fold._bytes`: a sign is a code of one bit, and one mask makes an
operand register of four of them. The columns of the product with the sketch's matrix are four query rows for two pages: row h
in columns 2h, for the even page, and 2h + 1, for the odd one. So lane (g, t) then has both pages of row t, which become bytes
page by page. Where registers are plenty, four pages share a reading of the matrix, or, with the matrix in shared memory, 16
pages of four warps (:mod:`kvfold.kernels.fragments._wide`). Values are multiplied as halves, with row t
in column 2t and nothing in 2t + 1.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._values import _values_operand, _whole_values
from kvfold.kernels.common._codes import code_bytes, nibble_step, page_operand, page_words
from kvfold.kernels.common._registers import _replace, _two, _zero4
from kvfold.kernels.common._softmax import LOWEST, _nothing
from kvfold.kernels.common._warp import (
    copy_commit,
    copy_wait,
    exp2_fast,
    load_fragment,
    load_matrix4,
    mma,
    pack_half2,
    prefetch,
    prefetch_bulk,
    reciprocal,
    shuffle,
    shuffle_xor,
    transpose8,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fold._bytes import FULL, byte_queries, byte_query_tile, byte_scores, byte_starts
from kvfold.kernels.fold._sums import _mean_scores
from kvfold.kernels.fragments._codes import bring_pages, fetch_side
from kvfold.kernels.fragments._queries import norm_words, normed_queries, through
from kvfold.kernels.fragments._wide import length, turn_pages, turned_page


@gluon.jit
def sign_scores(
    base, lane, q, start, bias, factor, left, WIDTH: gl.constexpr, BITS: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens, whose codes are uniform: 2 NB accumulators."""
    STEP: gl.constexpr = nibble_step(WIDTH, BITS)
    SCALES: gl.constexpr = NB * code_bytes(WIDTH, BITS)
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, SCALES + 64 * j, True)
        words = page_words(base, lane, j * code_bytes(WIDTH, BITS), WIDTH, BITS)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        accs = (_zero4(lane), _zero4(lane))
        for c in gl.static_range(WIDTH // 16):
            for tt in gl.static_range(2):
                a = page_operand(words, 2 * c + tt, WIDTH, BITS)
                accs = _replace(accs, tt, mma(a[0], a[1], a[2], a[3], q[2 * c], q[2 * c + 1], accs[tt], False))
        for tt in gl.static_range(2):
            low, high = unpack_half2(scale[2 * (j % 2) + tt])
            f0 = factor[0] * 0.5 ** (tt * STEP)
            f1 = factor[1] * 0.5 ** (tt * STEP)
            s0 = start[0] * 2.0 ** (tt * STEP)
            s1 = start[1] * 2.0 ** (tt * STEP)
            e0 = bias[0] + hidden
            e1 = bias[1] + hidden
            x = accs[tt]
            scores = scores + (
                (
                    gl.fma((x[0] + s0) * f0, low, e0),
                    gl.fma((x[1] + s1) * f1, low, e1),
                    gl.fma((x[2] + s0) * f0, high, e0),
                    gl.fma((x[3] + s1) * f1, high, e1),
                ),
            )
    return scores


@gluon.jit
def bring_matrix(table, thread, BYTES: gl.constexpr):
    """Bring a matrix to the first cache, 32 bytes a thread at a time."""
    STEP: gl.constexpr = 32 * 32 * gl.num_warps()
    for i in gl.static_range(BYTES // STEP):
        prefetch(table + thread * 32 + i * STEP)


@gluon.jit
def windows_at(lane, warp, head, dense, sinks, slots, D: gl.constexpr):
    """Where a head's windows begin, their bytes, and whether this lane brings them: sink and ring, keys and values of each."""
    of_sink = lane % 2 == 0
    size = gl.where(of_sink, sinks, slots) * (2 * D)
    keys = gl.where(of_sink, dense[0], dense[2])
    values = gl.where(of_sink, dense[1], dense[3])
    at = gl.where(lane < 2, keys, values) + head.to(gl.int64) * size
    return at, size, ((lane < 4) & (warp == 0) & (size > 0)).to(gl.int32)


@gluon.jit
def byte_query_pages(
    base, scratch, far, table, lane, D: gl.constexpr, WIDTH: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """Queries through a matrix as operands of bytes, for two pages: of each the operands, where products begin, the unit."""
    HALF: gl.constexpr = WIDTH // 32
    norm_words(base, scratch, lane, D, NORMS, 2)
    accs = through(table, lane, normed_queries(far, scratch, lane, D, 2, True), WIDTH, D // 16)
    pages = ()
    for e in gl.static_range(2):
        x = ()
        for j in gl.static_range(HALF):
            a = accs[j]
            b = accs[j + HALF]
            x = x + ((a[e], b[e], a[e + 2], b[e + 2]),)
        q, start, unit = byte_queries(x, lane, WIDTH, 1)
        pages = pages + (q + (start[0][0], start[0][1], start[1][0], start[1][1], unit),)
    return pages


@gluon.jit
def _lengths(x, lane, COUNT: gl.constexpr):
    """How long the vectors are whose COUNT operand pairs x are, those of a lane's two columns of a product."""
    own = length(x, lane, COUNT)  # of column g
    t = lane % 4
    return shuffle(own, 8 * t), shuffle(own, 8 * t + 4)


@gluon.jit
def sketched_pages(base, scratch, far, table, lane, D: gl.constexpr, WIDTH: gl.constexpr, NORMS: gl.constexpr):
    """As :func:`byte_query_pages`, for four pages: the matrix, of orthonormal rows in chunks of D, is read once for all. A sum
    is at most as large as its query is long, so operands are made tile by tile; of their 16 bits two are then unused.
    """
    HALF: gl.constexpr = WIDTH // 32
    CT: gl.constexpr = D // 16
    x = ()
    unit = ()
    factor = ()
    for s in gl.static_range(2):
        if s > 0:
            warp_sync(lane)
        norm_words(base, scratch, lane, D, NORMS + 2 * D * s, 2)
        y = normed_queries(far, scratch, lane, D, 2, True)
        x = x + y
        size = _lengths(y, lane, CT)
        for e in gl.static_range(2):
            big = gl.maximum(size[e] * 1.01, 1e-3)  # rows are rounded
            unit = unit + (big * (256.0 / FULL),)
            factor = factor + (reciprocal(big) * FULL,)
    q = ()
    for _i in gl.static_range(8 * HALF):
        q = q + (lane * 0,)
    for j in gl.static_range(0, HALF, 2):
        accs = ()
        for _i in gl.static_range(8):
            accs = accs + (_zero4(lane),)
        for c in gl.static_range(CT):
            for i in gl.static_range(4):  # tiles j, j + 1, and HALF further
                a = load_fragment(table, 512 * ((j + i % 2 + i // 2 * HALF) * CT + c))
                for s in gl.static_range(2):
                    b0, b1 = _two(x, CT * s + c)
                    accs = _replace(accs, 4 * s + i, mma(a[0], a[1], a[2], a[3], b0, b1, accs[4 * s + i], False))
        for i in gl.static_range(2):
            for e in gl.static_range(4):
                a = accs[e // 2 * 4 + i]
                b = accs[e // 2 * 4 + i + 2]
                low, high = byte_query_tile(a[e % 2], b[e % 2], a[e % 2 + 2], b[e % 2 + 2], factor[e], WIDTH, 1, j + i)
                q = _replace(q, (e * HALF + j + i) * 2, low)
                q = _replace(q, (e * HALF + j + i) * 2 + 1, high)
    pages = ()
    for e in gl.static_range(4):
        own = ()
        for i in gl.static_range(2 * HALF):
            own = own + (q[e * 2 * HALF + i],)
        start = byte_starts(own, lane, WIDTH, 1)
        pages = pages + (own + (start[0][0], start[0][1], start[1][0], start[1][1], unit[e]),)
    return pages


@gluon.jit
def row_weights(scores, unit, bias, top, NB: gl.constexpr, LIFT: gl.constexpr):
    """Running maximum of row t, factor of what was summed before, and 2^LIFT exp2(score - maximum) as B operands, row t in
    column 2t. Scores are without their unit, as :func:`kvfold.kernels.fold._bytes.byte_scores` returns them."""
    m = scores[0]
    for i in gl.static_range(1, 4 * NB):
        m = gl.maximum(m, scores[i])
    m = gl.maximum(m, shuffle_xor(m, 4))
    m = gl.maximum(m, shuffle_xor(m, 8))
    m = gl.maximum(m, shuffle_xor(m, 16))
    m = gl.maximum(gl.fma(m, unit, bias), top)
    shift = (bias - m) + LIFT
    none = bias * 0.0
    p = ()
    for i in gl.static_range(4 * NB):
        p = p + (transpose8(pack_half2(exp2_fast(gl.fma(scores[i], unit, shift)), none, False)),)
    return m, exp2_fast(top - m), p


@gluon.jit
def _rescale_rows(accs, factor):
    """Accumulators times a factor, in the columns that are query rows."""
    out = ()
    for c in gl.static_range(len(accs)):
        x = accs[c]
        out = out + ((x[0] * factor, x[1], x[2] * factor, x[3]),)
    return out


@gluon.jit
def attend_signs(
    base0, lane, warp, lo, hi, pages, blocks, stored, block0, page0, table, far, up, soon, D: gl.constexpr,
    K: gl.constexpr, WIDTH: gl.constexpr, V: gl.constexpr, PLACES: gl.constexpr, NB: gl.constexpr, PER: gl.constexpr,
    LIFT: gl.constexpr, PAGES: gl.constexpr = 2, WIDE: gl.constexpr = False,
):  # fmt: skip
    """Attention of four query rows over pages ``lo`` to ``hi`` of ``pages``, which the program's warps share; of ``blocks``
    blocks the scores count. PER stages of NB blocks are a page.

    ``stored``: addresses of keys' signs, scales, means and norms, and of values' codes and metadata; ``block0`` and
    ``page0``: where the head's begin. ``far``: a lane's address of the queries as operands, row h in columns 2h and 2h + 1;
    ``up``: what turns their products into scores; PAGES, 2 or 4, go through the matrix at once. ``table``: a lane's address of
    the matrix, or (WIDE) where tiles of it begin in shared memory, all of which all warps see; :func:`bring_pages` has begun,
    norms apart, and norms have come. ``soon``: what comes to L2 with the last stage, as
    :func:`windows_at` has it, or nothing. Returns the maxima of row t, sums of values and of
    probabilities: row t in column 2t.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    STEPS: gl.constexpr = WIDTH // 16
    K_AT: gl.constexpr = PLACES[0]
    V_IN: gl.constexpr = PLACES[1]
    V_AT: gl.constexpr = PLACES[2]
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each) * PER
    base = base0 + warp * PLACES[4]
    scratch = base + PLACES[3]
    start = first * (PER * NB)
    kc, km, kp, kn = stored[0]
    vc, vm = stored[1]
    if not WIDE:
        bring_pages(
            base0, lane, warp, lo, hi, pages, blocks, stored, block0, page0, D, K, WIDTH, V, PLACES, NB, PER, PAGES, False,
        )  # fmt: skip

    top = _zero4(lane)[0] + LOWEST
    _tops, out, side = _nothing(lane, CT, 1)
    now = ()
    for _i in gl.static_range(STEPS + 4):
        now = now + (lane * 0,)
    now = now + (_zero4(lane)[0],)
    second = now
    third = now
    fourth = now
    bias = _zero4(lane)[0]
    for i in range(each * PER):
        ahead = i + 1
        left = gl.where(i < count, blocks - (start + i * NB), 0)
        next_block = block0 + (start + ahead * NB)
        next_page = first + ahead // PER
        next_left = gl.where(ahead < count, blocks - (start + ahead * NB), 0)
        next_stats = gl.where(ahead % PER == 0, next_left, 0)
        next_norms = gl.where((ahead < count) & (ahead % (PAGES * PER) == 0), pages - next_page, 0)
        if WIDE:
            if i % (4 * PER) == 0:
                if i > 0:  # else norms have come before keys
                    copy_wait(lane, 1)
                turn_pages(base, scratch, far, table, base + PLACES[5], lane, D, WIDTH, K_AT[3])
                now = turned_page(base + PLACES[5], scratch, lane, 0, WIDTH)
        if len(soon) > 0:
            if ahead == each * PER:
                prefetch_bulk(soon[0], soon[1], soon[2])
        copy_wait(lane, 1)  # keys of this stage
        if PAGES == 2:
            if i % (2 * PER) == 0:
                now, second = byte_query_pages(base, scratch, far, table, lane, D, WIDTH, K_AT[3])
            elif i % PER == 0:
                now = second
        elif not WIDE:
            if i % (4 * PER) == 0:
                now, second, third, fourth = sketched_pages(base, scratch, far, table, lane, D, WIDTH, K_AT[3])
            elif i % (4 * PER) == PER:
                now = second
            elif i % (4 * PER) == 2 * PER:
                now = third
            elif i % (4 * PER) == 3 * PER:
                now = fourth
        if K[4]:
            if i % PER == 0:
                bias = _mean_scores(far, base, lane, (_zero4(lane)[0] + 1.0,), D, 1, K_AT[2], True)[0] * up
        begin = (
            (now[STEPS], now[STEPS + 1], now[STEPS], now[STEPS + 1]),
            (now[STEPS + 2], now[STEPS + 3], now[STEPS + 2], now[STEPS + 3]),
        )
        scores = byte_scores(base, lane, now, begin, left, None, WIDTH, 1, NB)
        unit = now[STEPS + 4]
        if WIDE:
            if PER == 1:  # what the next page takes is there when it begins
                now = turned_page(base + PLACES[5], scratch, lane, ahead % 4, WIDTH)
            elif ahead % PER == 0:
                now = turned_page(base + PLACES[5], scratch, lane, ahead // PER % 4, WIDTH)
        warp_sync(lane)
        fetch_side(
            base, lane, kc, km, kc, kp, kn, next_block, page0 + next_page, next_left, next_stats, next_norms, K_AT, 2, D,
            WIDTH, 1, 0, 0, K[4], PAGES, NB, 0,
        )  # fmt: skip
        copy_commit(lane)
        top, factor, p = row_weights(scores, unit * (up * K[6]), bias, top, NB, LIFT)
        out = _rescale_rows(out, factor)
        side = _rescale_rows(side, factor)
        copy_wait(lane, 1)  # values of this page
        out, side = _values_operand(base, lane, p, out, side, D, V[1], V[3], 1, NB, V_AT, V_AT + V_IN[0])
        warp_sync(lane)
        fetch_side(
            base, lane, vc, vm, vc, vc, vc, next_block, 0, next_left, 0, 0, V_IN, 0, D, D, V[1], 0, V[3], False, 0, NB, V_AT,
        )  # fmt: skip
        copy_commit(lane)
    copy_wait(lane, 0)
    return top, _whole_values(out, side, lane, D, V[1], 1, 0, V[3], 1), side
