# mypy: ignore-errors
"""The loop over pages of :mod:`kvfold.kernels.fold._decode` by products of bytes: for up to four query rows of a KV head,
or (FOURS: 2) up to eight as two sets of four. What is made of codes and of a page's statistics serves both sets."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import nibble_weight, scale_at
from kvfold.kernels.common._hadamard import hadamard, rest, sign_bits
from kvfold.kernels.common._registers import _every, _zero4
from kvfold.kernels.common._softmax import LOWEST
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    copy_commit,
    copy_wait,
    exp2_fast,
    load_shared,
    mma,
    pack_half2,
    program_sync,
    store_shared1,
    store_shared2,
    store_shared4,
    warp_sync,
)
from kvfold.kernels.fold._bytes import (
    byte_queries,
    byte_room,
    byte_scores,
    byte_values,
    leave_rows,
    mean_signs,
    mix_lanes,
    page_scales,
    row_means,
    set_weights,
    turned_mean,
    turned_rows,
)
from kvfold.kernels.fold._codebook import ROWS, tables_bytes
from kvfold.kernels.fold._codebook import leave_rows as leave_table_rows
from kvfold.kernels.fold._codebook import turned_mean as turned_mean_in_rows
from kvfold.kernels.fold._codebook_bytes import (
    leave_channels,
    lookup_byte_queries,
    lookup_byte_scores,
    lookup_byte_values,
    lookup_row_means,
    pair_matrix,
)
from kvfold.kernels.fold._codes import fetch_page, mean_at, norm_at, page_bytes, page_place
from kvfold.kernels.fold._sums import _exponent, _norm_words


@gluon.constexpr_function
def row_stage(dim, k_bits, k_mean, k_norm, v_bits, v_mean, blocks):
    """Bytes of a warp's stage: both sides of a page; norms as fp16, or the values' mean as fp32."""
    sides = page_bytes(dim, k_bits, blocks, k_mean, k_norm) + page_bytes(dim, v_bits, blocks, v_mean, False)
    return sides + 4 * dim


@gluon.constexpr_function
def row_bytes(dim, k_bits, k_mean, k_norm, v_bits, v_mean, blocks, warps, k_words=0, fours=1):
    """Bytes of shared memory of a program: stages, the Hadamard matrix as an operand, the queries, and (where codes of keys are
    looked up) the matrix in another order; and, later, sums."""
    stage = row_stage(dim, k_bits, k_mean, k_norm, v_bits, v_mean, blocks)
    more = 512 + fours * dim * 8 + (512 if k_words else 0)
    sums = warps * max(dim * 32, 4 * fours * (row_stride(dim) + 8))  # of windows, and of pages
    return max(warps * stage + more, sums)


@gluon.jit
def attend_rows(
    base0, lane, warp, lo, hi, blocks, stored, at, table, steps, asked, to_log2, k_sign, v_sign,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_MEAN: gl.constexpr, K_NORM: gl.constexpr, K_MIX: gl.constexpr,
    V_BITS: gl.constexpr, V_MEAN: gl.constexpr, V_MIX: gl.constexpr, NB: gl.constexpr, K_WORDS: gl.constexpr,
    V_WORDS: gl.constexpr, FOURS: gl.constexpr, held,
):  # fmt: skip
    """As :func:`kvfold.kernels.fold._decode.attend_pages`, of FOURS sets of four query rows in eight columns: of each set lanes
    (g, t) have the maximum of row t, its sum of probabilities, and sums of values in the rotated basis; see
    :func:`finish_rows`.

    ``asked``: a warp's share of the queries, of :func:`kvfold.kernels.fold._bytes.ask_rows`; signs are the first two of
    :func:`rotation_signs`. WORDS: of a row of the table of bytes in which a side's codes are looked up; 0: they are uniform.
    Tables lie before ``base0``; those that do not yet are ``held`` by threads."""
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    V_AT: gl.constexpr = page_bytes(D, K_BITS, NB, K_MEAN, K_NORM)
    K_MEAN_AT: gl.constexpr = mean_at(D, K_BITS, NB)
    K_NORM_AT: gl.constexpr = norm_at(D, K_BITS, NB, K_MEAN)
    SCRATCH: gl.constexpr = V_AT + page_bytes(D, V_BITS, NB, V_MEAN, False)
    V_MEAN_AT: gl.constexpr = V_AT + mean_at(D, V_BITS, NB)
    APART: gl.constexpr = K_WORDS > 0 or V_WORDS > 0
    STAGE: gl.constexpr = SCRATCH + 4 * D
    g = lane // 4
    t = lane % 4
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    base = base0 + warp * STAGE
    scratch = base + SCRATCH
    left = gl.where(count > 0, blocks - first * NB, 0)
    id = lane * 0
    if table is not None:
        id = gl.load(table + first, mask=count > 0, other=0)
    k_at, k_block, k_page, v_at, v_block, v_page = page_place(stored, at, table, steps, first, id, NB)
    _fetch_keys(base, lane, k_at, k_block, k_page, left, D, K_BITS, K_MEAN, K_NORM, NB, K_WORDS, APART)
    fetch_page(
        base, lane, v_at[0], v_at[1], v_at[2], v_at[3], v_block, v_page, left, D, V_BITS, V_MEAN, False, NB, V_AT,
        1 if V_WORDS else 0,
    )  # fmt: skip
    copy_commit(lane)
    if table is not None:  # the numbers of pages are a page ahead of their bytes
        id = gl.load(table + first + 1, mask=count > 1, other=0)

    far = base0 + W * STAGE + 512
    leave_rows(asked, far, base0 + SCRATCH, lane, warp, STAGE, D, _exponent(K_MIX), K_WORDS > 0)
    far = far + lane * 8
    # the Hadamard matrix waits in shared memory, which all warps fill alike
    matrix = base0 + W * STAGE + lane * 16
    m = hadamard(g, t, K_MIX, False)
    store_shared4(matrix, as_float(m[0]), as_float(m[1]), as_float(m[2]), as_float(m[3]))
    k_matrix = matrix
    if K_WORDS:
        k_matrix = matrix + (512 + FOURS * D * 8)
        m = pair_matrix(g, t, K_MIX)
        store_shared4(k_matrix, as_float(m[0]), as_float(m[1]), as_float(m[2]), as_float(m[3]))
    k_table = base0 - tables_bytes(K_WORDS, V_WORDS)
    if len(held) > 0:
        leave_table_rows(k_table, lane + 32 * warp, held, K_WORDS, V_WORDS)
    program_sync(lane)
    ups = ()
    for n in gl.static_range(FOURS):
        ups = ups + (as_float(load_shared(scratch + t * 4, 16 * n, 1)[0]) * (to_log2 * K_MIX**-0.5),)
    if not K_NORM:  # what codes meet is the same for all pages
        warp_sync(lane)  # all lanes have read what lay in the scratch
        _norm_words(base, scratch, lane, k_sign, D, False, 0, K_WORDS > 0)
        turned, start, unit = _met_queries(far, scratch, lane, k_matrix, ups, D, K_BITS, K_MIX, K_WORDS)
    zero = _zero4(lane)[0]
    top = ()
    total = ()
    out = ()
    for _n in gl.static_range(FOURS):
        top = top + (zero + LOWEST,)
        total = total + (zero,)
        for _i in gl.static_range(2 * CT):
            out = out + (zero,)

    for i in range(each):
        following = first + i + 1
        left = gl.where(i < count, blocks - (following - 1) * NB, 0)
        next_left = gl.where(i + 1 < count, blocks - following * NB, 0)
        k_at, k_block, k_page, v_at, v_block, v_page = page_place(stored, at, table, steps, following, id, NB)
        skip = None
        if table is not None:
            id = gl.load(table + following + 1, mask=i + 2 < count, other=0)
            skip = steps[1] - (following - 1) * NB
        _wait(lane, APART)  # statistics of this page's keys
        if K_NORM:
            _norm_words(base, scratch, lane, k_sign, D, True, K_NORM_AT, K_WORDS > 0)
            turned, start, unit = _met_queries(far, scratch, lane, k_matrix, ups, D, K_BITS, K_MIX, K_WORDS)
        bias = ()
        if K_MEAN:
            if K_WORDS:
                means = lookup_row_means(far, base, lane, D, K_MEAN_AT, FOURS)
            else:
                means = row_means(far, base, lane, D, K_MEAN_AT, FOURS)
            for n in gl.static_range(FOURS):
                bias = bias + (means[n] * (ups[n] * K_MIX**0.5),)
        else:
            for _n in gl.static_range(FOURS):
                bias = bias + (zero,)
        if APART:
            copy_wait(lane, 1)  # their codes
        if K_WORDS:
            scores = lookup_byte_scores(base, lane, turned, left, skip, k_table, D, K_BITS, NB, FOURS)
        else:
            scores = byte_scores(base, lane, turned, start, left, skip, D, K_BITS, NB, FOURS)
        warp_sync(lane)
        _fetch_keys(base, lane, k_at, k_block, k_page, next_left, D, K_BITS, K_MEAN, K_NORM, NB, K_WORDS, APART)
        _wait(lane, APART)  # values of this page
        scale = page_scales(base, lane, NB, V_AT + scale_at(D, V_BITS, NB))
        room = byte_room(scale, NB)
        p = ()
        before = ()
        now = ()
        new_top = ()
        new_total = ()
        page_totals = ()
        for n in gl.static_range(FOURS):
            own, page_top, page_total = set_weights(_every(scores, n, FOURS), unit[n], bias[n], scale, room, NB)
            best = gl.maximum(top[n], page_top)
            p = p + own
            before = before + (exp2_fast(top[n] - best),)
            now = now + (exp2_fast(page_top - best),)
            new_top = new_top + (best,)
            page_totals = page_totals + (page_total,)
            new_total = new_total + (gl.fma(total[n], before[n], page_total * now[n]),)
        top = new_top
        total = new_total
        mean = ()
        if V_WORDS:
            if V_MEAN:
                mean = turned_mean_in_rows(base, scratch, lane, v_sign, matrix, V_MEAN_AT, 0, V_MIX)
            out = lookup_byte_values(
                base, lane, p, before, now, page_totals, mean, out, base0 - ROWS, D, V_BITS, V_MEAN, V_MIX, NB, V_AT
            )
        else:
            if V_MEAN:
                mean = turned_mean(base, scratch, lane, v_sign, matrix, D, V_MIX, V_MEAN_AT)
            out = byte_values(base, lane, p, before, now, page_totals, mean, out, D, V_BITS, V_MEAN, V_MIX, NB, V_AT)
        warp_sync(lane)
        fetch_page(
            base,
            lane,
            v_at[0],
            v_at[1],
            v_at[2],
            v_at[3],
            v_block,
            v_page,
            next_left,
            D,
            V_BITS,
            V_MEAN,
            False,
            NB,
            V_AT,
            1 if V_WORDS else 0,
        )
        copy_commit(lane)

    copy_wait(lane, 0)
    program_sync(lane)
    return top, out, total


@gluon.jit
def _fetch_keys(
    base, lane, at, block, page, left, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr, NORM: gl.constexpr,
    NB: gl.constexpr, WORDS: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Ask for a page's keys as a group of copies; APART: for its statistics as a group of their own before, so that queries are
    turned while codes are on their way. That gains 3 to 7 % where codes are looked up, and nothing where they are uniform."""
    SWAP: gl.constexpr = 2 if WORDS else 0
    if APART:
        fetch_page(base, lane, at[0], at[1], at[2], at[3], block, page, left, D, BITS, MEAN, NORM, NB, 0, SWAP, 2)
        copy_commit(lane)
    fetch_page(
        base, lane, at[0], at[1], at[2], at[3], block, page, left, D, BITS, MEAN, NORM, NB, 0, SWAP, 1 if APART else 0
    )
    copy_commit(lane)


@gluon.jit
def _wait(lane, APART: gl.constexpr):
    """Wait for the oldest group of copies; as of :func:`_fetch_keys`, two or one are younger."""
    if APART:
        copy_wait(lane, 2)
    else:
        copy_wait(lane, 1)


@gluon.jit
def _met_queries(
    far, scratch, lane, matrix, ups, D: gl.constexpr, BITS: gl.constexpr, MIX: gl.constexpr, WORDS: gl.constexpr
):  # fmt: skip
    """Queries of all sets as codes meet them, where products begin, and what turns those into scores; ``ups``: factors of
    queries."""
    q = ()
    start = ()
    unit = ()
    for n in gl.static_range(len(ups)):
        x = turned_rows(far + n * (8 * D), scratch, lane, matrix, D, MIX, True, WORDS > 0)
        if WORDS:
            own, of_own = lookup_byte_queries(x, lane, D)
        else:
            own, begin, of_own = byte_queries(x, lane, D, BITS)
            start = start + begin
        q = q + own
        unit = unit + (of_own * ups[n],)
    return q, start, unit


@gluon.jit
def rotation_signs(
    k_signs, v_signs, lane, D: gl.constexpr, K_MIX: gl.constexpr, V_MEAN: gl.constexpr, V_MIX: gl.constexpr
):
    """Signs of both rotations: as queries meet them, as means of values do, and as :func:`finish_rows` takes them. No kernel
    before writes them."""
    k_sign = lane * 0
    v_sign = lane * 0
    signs = lane * 0
    if K_MIX > 1:
        k_sign = sign_bits(k_signs, lane, D)
    if V_MEAN and V_MIX > 1:
        v_sign = mean_signs(v_signs, lane // 4, lane % 4)
    if V_MIX > 1:
        signs = turn_signs(v_signs, lane // 4, lane % 4)
    return k_sign, v_sign, signs


@gluon.jit
def turn_signs(signs, g, t):
    """Signs of channels g, g + 16, g + 8 and g + 24 from 32 t on, in bits 31 to 28."""
    out = g * 0
    for i in gl.static_range(4):
        x = as_int(gl.load(signs + 32 * t + g + (i % 2 * 16 + i // 2 * 8)))
        out = out | ((x >> 31 << 31 >> i) & (1 << (31 - i) if i else -2147483648))
    return out


@gluon.constexpr_function
def row_stride(dim):
    """Bytes from a row's sums to the next one's, so that lanes use all banks."""
    return 4 * dim + 32


@gluon.jit
def finish_rows(
    base0, lane, warp, top, out, total, signs, part_out, part_top, part_sum, slot0, column0, rows, D: gl.constexpr,
    BITS: gl.constexpr, MIX: gl.constexpr, WORDS: gl.constexpr = 0,
):  # fmt: skip
    """Leave the warps' sums, of each set of four rows, in shared memory, and :func:`join_rows` them. BITS: of codes in whose
    units sums are; 0: they are in those of values. WORDS: codes were looked up."""
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = 4 * len(top)
    CT: gl.constexpr = D // 16
    ROW: gl.constexpr = row_stride(D)
    g = lane // 4
    t = lane % 4
    for n in gl.static_range(R // 4):
        row = warp * R + 4 * n + t
        to = base0 + row * ROW + g * 4
        if WORDS:
            leave_channels(base0 + row * ROW, g, out, 16 * n)
        else:
            for ct in gl.static_range(CT):
                f = 2.0 ** (8 - nibble_weight(D, BITS, ct % (CT // 2))) if BITS else 1.0
                store_shared1(to + 64 * ct, as_int(out[2 * (n * CT + ct)] * f))
                store_shared1(to + (64 * ct + 32), as_int(out[2 * (n * CT + ct) + 1] * f))
        store_shared2(base0 + R * W * ROW + row * 8, as_int(top[n]), as_int(total[n]))
    join_rows(base0, lane, warp, signs, part_out, part_top, part_sum, slot0, column0, rows, D, MIX, R)


@gluon.jit
def join_rows(
    base0, lane, warp, signs, part_out, part_top, part_sum, slot0, column0, rows, D: gl.constexpr, MIX: gl.constexpr,
    R: gl.constexpr = 4,
):  # fmt: skip
    """Join what warps left of R query rows, turn it back and store one partial result per row; each of up to R warps does so
    for its share of the rows.

    Of each warp and row ``base0`` has D sums, in :func:`row_stride` bytes; then of each an exponent and a sum of weights. A
    row's channel tiles are the columns of the product that turns them, in two bf16 parts, which keep 16 bits.
    """
    W: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = R // W if W < R else 1
    ROW: gl.constexpr = row_stride(D)
    g = lane // 4
    t = lane % 4
    side = base0 + R * W * ROW
    m = ()
    if MIX > 1:
        m = hadamard(g, t, MIX, True)
    program_sync(lane)
    live = rows
    if W > R:
        live = gl.where(warp < R, rows, 0)
        warp = warp % R
    for i in gl.static_range(EACH):
        row = warp * EACH + i
        tops = ()
        for w in gl.static_range(W):
            tops = tops + (load_shared(side + row * 8, 8 * R * w, 2),)
        best = as_float(tops[0][0])
        for w in gl.static_range(1, W):
            best = gl.maximum(best, as_float(tops[w][0]))
        amount = _zero4(lane)[0]
        x = _zero4(lane)
        place = base0 + row * ROW + g * 64 + t * 8
        for w in gl.static_range(W):
            f = exp2_fast(as_float(tops[w][0]) - best)
            amount = gl.fma(as_float(tops[w][1]), f, amount)
            a = load_shared(place, R * w * ROW, 2)
            b = load_shared(place, R * w * ROW + 32, 2)
            x = (
                gl.fma(as_float(a[0]), f, x[0]), gl.fma(as_float(a[1]), f, x[1]),
                gl.fma(as_float(b[0]), f, x[2]), gl.fma(as_float(b[1]), f, x[3]),
            )  # fmt: skip
        column = column0 + row
        at = slot0 * rows + column
        gl.store(part_top + at, best, mask=(lane == 0) & (column < live))
        gl.store(part_sum + at, amount, mask=(lane == 0) & (column < live))
        to_out = part_out + at.to(gl.int64) * D
        if MIX > 1:
            low = pack_half2(x[0], x[1], True)
            high = pack_half2(x[2], x[3], True)
            l0, l1 = rest(x[0], x[1], low)
            h0, h1 = rest(x[2], x[3], high)
            y = mma(
                m[0], m[1], m[2], m[3], pack_half2(l0, l1, True), pack_half2(h0, h1, True), _zero4(lane), True
            )  # fmt: skip
            y = mix_lanes(mma(m[0], m[1], m[2], m[3], low, high, y, True), t, MIX)
            for e in gl.static_range(4):
                z = as_float(as_int(y[e] * (MIX**-0.5)) ^ ((signs << e) & (-2147483648)))
                gl.store(to_out + (32 * t + g + (e % 2 * 16 + e // 2 * 8)), z, mask=column < live)
        else:
            for e in gl.static_range(4):
                gl.store(to_out + (16 * g + 2 * t + (e % 2 + e // 2 * 8)), x[e], mask=column < live)
