# mypy: ignore-errors
"""Decode attention over learned keys (TaSQ) and values by fold's codebook: the Gluon kernel.
:mod:`kvfold.kernels.learned.decode` launches it.

As :mod:`kvfold.kernels.commvq._decode`: tables lie in shared memory, a row that a lane reads is part of an operand, keys are
rotated by their place in a unit of 32 tokens and queries back by the unit's position. What differs:

* A step is a page, four units. Products have places of one unit as rows 0 to 7 and the same places of the next one as rows 8
  to 15, so that one rotation serves both. Four query rows turned for the first unit are columns 0 to 3, and for the second one
  columns 4 to 7; a lane takes the half of its products that belong together. The mean of keys meets queries in a product of
  the rotations alone, whose rows are places of two eights.
* Keys. A row is four channels, 8 bytes. At a time lane (g, t) reads one of its four groups that no other lane of the same half
  of a warp reads, so that they never meet in a bank; then rows are put in order.
* Values are those of :mod:`kvfold.kernels.fold._codebook`: sums in the rotated basis, with a page's mean turned into it. What
  warps leave is joined and turned back once.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._hadamard import hadamard
from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._softmax import LOWEST
from kvfold.kernels.common._tables import (
    _chosen,
    _dynamic_base,
    _fetch_rows,
    _pairs_of_queries,
    held_table,
    leave_table,
    mean_of_keys,
    reserved,
)
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    copy_async,
    copy_commit,
    copy_wait,
    exp2_fast,
    launch_dependents,
    load_shared_short,
    pack_half2,
    program_sync,
    shuffle_xor,
    store_shared2,
    store_shared4,
    transpose8,
    unpack_half2,
    wait_for_previous,
    warp_sync,
)
from kvfold.kernels.fold._bytes import mean_signs
from kvfold.kernels.fold._codebook import (
    ROWS,
    codes_of,
    own_row,
    row_weights,
    sum_rows,
    turned_mean,
    with_mean,
)
from kvfold.kernels.fold._rows import join_rows, row_stride, turn_signs
from kvfold.kernels.learned._scores import (
    KEYS,
    MATRIX,
    MEAN,
    OWN,
    RAW,
    mean_at,
    page_scores,
    query_at,
    shared_bytes,
    side_bytes,
    unit_queries,
    warp_bytes,
)

# ---- from storage ---------------------------------------------------------------------------------------------------


@gluon.jit
def _place(page, there, where):
    """Units, and pages, from where the head's storage begins to a page; bytes to where that begins.

    ``where``: the head's first unit and page in a slab, and None; or a table of pages, and the bytes from one to the next. A
    page that is not ``there`` may lie beyond the table.
    """
    if where[1] is None:
        return where[0][0].to(gl.int64) + 4 * page, where[0][1].to(gl.int64) + page, page.to(gl.int64) * 0
    else:
        number = gl.load(where[0] + gl.where(there, page, 0)).to(gl.int64)
        return number * 0, number * 0, number * where[1]


@gluon.jit
def _fetch_side(to, lane, codes, norms, place, valid, BYTES: gl.constexpr, TO: gl.constexpr, SWAP: gl.constexpr):
    """Begin to copy a page of one side; of its units the first ``valid`` count, others become zeros.

    ``to``: a lane's address of what comes to TO. SWAP: both 16 bytes of codes change places in every other four tokens, so
    that lanes that read the same ones of eight tokens use all banks.
    """
    at, _, away = place
    codes = codes + away + at * (32 * BYTES) + lane * 16
    here = to
    if SWAP:
        here = to + (lane // 8 % 2) * (16 - lane % 2 * 32)
    for j in gl.static_range(BYTES // 4):
        size = gl.where(valid > j * 32 // (2 * BYTES), 16, 0)
        copy_async(here, codes, size, valid, TO + 512 * j, 512 * j, True)
    size = gl.where(lane // 4 < valid, 16, 0)
    few = valid * (lane < 16).to(gl.int32)
    copy_async(to, norms + away + at * 64 + lane * 16, size, few, TO + 128 * BYTES, 0, True)


@gluon.jit
def _fetch_keys(to, lane, stored, page, left, where):
    valid = gl.minimum(gl.maximum(left, 0), 4)
    place = _place(page, valid > 0, where)
    _fetch_side(to, lane, stored[0], stored[1], place, valid, 32, 0, True)


@gluon.jit
def _fetch_values(to, lane, stored, page, left, where, V: gl.constexpr):
    valid = gl.minimum(gl.maximum(left, 0), 4)
    place = _place(page, valid > 0, where)
    _fetch_side(to, lane, stored[2], stored[3], place, valid, V, side_bytes(32), False)
    size = gl.where(valid > 0, 16, 0)  # a mean of zeros where there is none, which weights of 0 are multiplied with
    mean = stored[4] + place[2] + place[1] * 256 + lane * 16
    copy_async(to, mean, size, (lane < 16).to(gl.int32), mean_at(V), 0, True)


# ---- weights --------------------------------------------------------------------------------------------------------


@gluon.jit
def _over_places(x):
    """Sum over the lanes that have other places of the same unit and query rows."""
    for i in gl.static_range(3):
        x = x + shuffle_xor(x, 4 << i)
    return x


@gluon.constexpr_function
def _norm_at(k, c):
    """Bytes from the first of a lane's norms to the one of its score number ``k``: of pairs of units, or of units."""
    unit = k // 2 % 2 * 2 if c == 4 else k // 8 * 2 + k // 2 % 2
    return 64 * unit + 16 * (k % 8 // 4 * 2 + k % 2)


@gluon.jit
def _page_weights(scores, norms, top, C: gl.constexpr):
    """Exponents of two query rows, factors of what was summed before, sums of probabilities of a lane's units, and
    probabilities times norms: words of query rows' pairs of places, as transposed. ``scores`` [tokens][2], ``norms`` [tokens]:
    lanes 4, 8 and 16 apart have other tokens of the same query rows, and of four query rows those 2 apart, too."""
    FIRST: gl.constexpr = C // 2
    most = gl.abs(norms[0])
    for i in gl.static_range(1, len(norms)):
        most = gl.maximum(most, gl.abs(norms[i]))
    for i in gl.static_range(4 if C == 4 else 3):
        most = gl.maximum(most, shuffle_xor(most, FIRST << i))
    room = gl.minimum(142 - (as_int(most) >> 23), 35).to(gl.float32) - 1.0  # norms times 2^room stay below 2^15
    new_top = ()
    factor = ()
    for e in gl.static_range(2):
        m = scores[0][e]
        for i in gl.static_range(1, len(scores)):
            m = gl.maximum(m, scores[i][e])
        for i in gl.static_range(4 if C == 4 else 3):
            m = gl.maximum(m, shuffle_xor(m, FIRST << i))
        m = gl.maximum(m - room, top[e])
        new_top = new_top + (m,)
        factor = factor + (exp2_fast(top[e] - m),)
    p = ()
    sums = (new_top[0] * 0.0, new_top[0] * 0.0)
    for i in gl.static_range(len(scores)):
        low = exp2_fast(scores[i][0] - new_top[0])
        high = exp2_fast(scores[i][1] - new_top[1])
        sums = (sums[0] + low, sums[1] + high)
        p = p + (transpose8(pack_half2(low * norms[i], high * norms[i], False)),)
    return new_top, factor, (_over_places(sums[0]), _over_places(sums[1])), p


# ---- values ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _page_values(out, codes, p, near, far, row, V: gl.constexpr, C: gl.constexpr):
    """Sums of values a page further; ``codes``: address of the codes of a lane's channels; ``near`` and ``far``: all ones
    in lanes whose query rows have weights of first, and of second units, where C is 4."""
    AT: gl.constexpr = side_bytes(32)
    WORDS: gl.constexpr = 64 // V
    weights = row_weights(row, WORDS)
    for h in gl.static_range(4):
        mask = far if h % 2 else near
        for pair in gl.static_range(2):
            if C == 4:
                b0 = p[4 * pair + h // 2 * 2] & mask
                b1 = p[4 * pair + h // 2 * 2 + 1] & mask
            else:
                b0 = p[h // 2 * 8 + 4 * pair + h % 2 * 2]
                b1 = p[h // 2 * 8 + 4 * pair + h % 2 * 2 + 1]
            words = (
                codes_of(codes[0], AT + (32 * h + 16 * pair) * V, WORDS),
                codes_of(codes[1], AT + (32 * h + 16 * pair) * V, WORDS),
                codes_of(codes[0], AT + (32 * h + 16 * pair + 8) * V, WORDS),
                codes_of(codes[1], AT + (32 * h + 16 * pair + 8) * V, WORDS),
            )
            out = sum_rows(words, weights, row, (b0, b1), out, 0, WORDS)
    return out


# ---- the loop -------------------------------------------------------------------------------------------------------


@gluon.jit
def attend_pages(
    base, lane, warp, q, column0, rows, scale, freq_ptr, position, stored, where, first, each, count, lo, hi, means, signs_ptr,
    V: gl.constexpr, MIX: gl.constexpr, CENTRED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Exponents of query rows, sums of values in the rotated basis and of weights of each warp's pages, ``first`` to
    ``first + count``, left in shared memory for :func:`join_rows`.

    ``q`` as :func:`_pairs_of_queries` takes it; ``stored``: where codes and norms of keys, those of values, and means of values
    begin; tables and turns come to ``base``; ``position`` of the storage's first token; ``where``: see :func:`_place`; of
    units ``lo`` to ``hi`` tokens count; ``means``: pointer to the mean of the head's keys.
    """
    g = lane // 4
    t = lane % 4
    second = t // 2  # which of two units' scores the lane has
    own = base + (OWN + warp * warp_bytes(V))
    to = own + lane * 16
    shared = base + lane * 16  # what all warps read
    V_AT: gl.constexpr = side_bytes(32)
    QUERY: gl.constexpr = query_at(V)
    MEAN_AT: gl.constexpr = mean_at(V)
    left = gl.where(count > 0, hi - 4 * first, 0)
    _fetch_keys(to, lane, stored, first, left, where)
    copy_commit(lane)
    _fetch_values(to, lane, stored, first, left, where, V)
    copy_commit(lane)

    # a lane turns pairs G and G + 32 of group G, its number
    gain = (gl.load(freq_ptr + lane + 64), gl.load(freq_ptr + lane + 96))
    mine, ups = _pairs_of_queries(q, rows, column0, lane, lane, 32, C, gain)
    for i in gl.static_range(C):  # all warps leave the same, here and below
        store_shared4(shared + (RAW + 512 * i), mine[4 * i], mine[4 * i + 1], mine[4 * i + 2], mine[4 * i + 3])
    factor0 = _chosen(ups, 2 * t % C) * scale
    factor1 = _chosen(ups, 2 * t % C + 1) * scale
    freq = (gl.load(freq_ptr + lane), gl.load(freq_ptr + lane + 32))
    size = factor0 * 0.0
    if CENTRED:
        m = mean_of_keys(means, lane, 32)
        at = base + (MEAN + lane // 4 % 4 * 64 + lane // 16 * 32 + lane % 4 * 8)
        store_shared2(at, pack_half2(m[0], m[1], False), pack_half2(m[2], m[3], False))
        size = m[4]
    h = hadamard(g, t, MIX, False)
    store_shared4(shared + MATRIX, as_float(h[0]), as_float(h[1]), as_float(h[2]), as_float(h[3]))
    v_sign = mean_signs(signs_ptr, g, t)

    weights = ()
    places = ()
    for k in gl.static_range(4):
        j = g % 4 ^ k
        weights = weights + ((lane * 0 + 128) << 8 * j,)
        places = places + (base + (t * 32 + j * 8),)
    odd = g % 2 == 1
    high = g // 2 % 2 == 1
    token = g ^ (g >> 2)  # of eight; tokens of lanes that read at once lie in different banks
    k_codes = own + (token * 32 + t * 4)
    k_codes = (k_codes + token // 4 * 16, k_codes + (1 - token // 4) * 16)
    norms_at = own + ((second * 64 if C == 4 else 0) + token * 2)
    even_token = 2 * t ^ (t >> 1)
    v_codes = (own + (even_token * V + g * (V // 8)), own + ((even_token ^ 1) * V + g * (V // 8)))
    v_row = own_row(base + KEYS, lane, 64 // V)
    near = gl.where(g < 4, lane * 0 - 1, 0)
    far = near ^ -1
    to_query = own + QUERY + (lane // 16 * 2 + lane // 2 % 2) * 576 + lane // 4 % 4 * 16 + lane % 2 * 8

    zero = _zero4(lane)[0]
    top = (zero + LOWEST, zero + LOWEST)
    total = (zero, zero)
    out = ()
    for _i in gl.static_range(8):
        out = out + (_zero4(lane),)
    copy_wait(lane, 1)
    program_sync(lane)
    for i in range(each):
        page = first + i
        next_left = gl.where(i + 1 < count, hi - 4 * (page + 1), 0)
        products = ()
        for half in gl.static_range(C // 4):
            if half:
                warp_sync(lane)
            unit_queries(to_query, shared, freq, position + page * 128 + 64 * half, C)
            if half:
                warp_sync(lane)
            else:
                copy_wait(lane, 1)  # keys of this page
            products = products + page_scores(
                k_codes, shared, to, base + t * 64, norms_at, size, weights, places, odd, high, second == 1, lane, QUERY,
                CENTRED, C, half,
            )  # fmt: skip
        warp_sync(lane)
        _fetch_keys(to, lane, stored, page + 1, next_left, where)
        copy_commit(lane)
        alive = ()  # by unit, or by pairs of units of which the lane has one
        for u in gl.static_range(C // 2):
            unit = 4 * page + (2 * u + second if C == 4 else u)
            alive = alive + ((i < count) & (unit >= lo) & (unit < hi),)
        scores = ()
        for k in gl.static_range(2 * C):
            near_score = gl.where(alive[k // 8 * 2 + k // 2 % 2], products[k][0] * factor0, float("-inf"))
            far_score = gl.where(alive[k // 8 * 2 + k // 2 % 2], products[k][1] * factor1, float("-inf"))
            scores = scores + ((near_score, far_score),)
        copy_wait(lane, 1)  # values of this page
        norms = ()
        for k in gl.static_range(2 * C):
            norm, _ = unpack_half2(load_shared_short(norms_at, _norm_at(k, C) + (V_AT + 128 * V)))
            norms = norms + (gl.where(alive[k // 8 * 2 + k // 2 % 2], norm, 1.0),)
        top, factor, share, p = _page_weights(scores, norms, top, C)
        total = (gl.fma(total[0], factor[0], share[0]), gl.fma(total[1], factor[1], share[1]))
        mean = turned_mean(own, own, lane, v_sign, shared + MATRIX, MEAN_AT, MEAN_AT + 256, MIX)
        share = (share[0] * MIX**-0.5, share[1] * MIX**-0.5)
        out = _page_values(with_mean(out, factor, mean, share, 0), v_codes, p, near, far, v_row, V, C)
        warp_sync(lane)
        _fetch_values(to, lane, stored, page + 1, next_left, where, V)
        copy_commit(lane)

    copy_wait(lane, 0)
    program_sync(lane)
    if C == 4:
        _leave(base, lane, warp, top, out, total)
    else:
        _leave_eight(base, lane, warp, top, out, total)


@gluon.jit
def _leave(base, lane, warp, top, out, total):
    """Join the units' sums and leave a warp's in shared memory; lanes whose unit is the second one leave the later channels."""
    W: gl.constexpr = gl.num_warps()
    ROW: gl.constexpr = row_stride(128)
    g = lane // 4
    second = lane % 4 // 2
    row = warp * 4 + lane % 2 * 2
    x = ()
    for c in gl.static_range(8):
        sums = ()
        for e in gl.static_range(4):
            sums = sums + (out[c][e] + shuffle_xor(out[c][e], 2),)
        x = x + (sums,)
    for e in gl.static_range(2):
        for i in gl.static_range(2):
            y = ()
            for k in gl.static_range(4):
                y = y + (gl.where(second == 1, x[4 + 2 * i + k // 2][e + k % 2 * 2], x[2 * i + k // 2][e + k % 2 * 2]),)
            store_shared4(base + (row + e) * ROW + g * 64 + second * 32 + 16 * i, y[0], y[1], y[2], y[3])
        amount = total[e] + shuffle_xor(total[e], 2)
        store_shared2(base + 4 * W * ROW + (row + e) * 8, as_int(top[e]), as_int(amount))


@gluon.jit
def _leave_eight(base, lane, warp, top, out, total):
    """Leave a warp's sums of eight query rows in shared memory."""
    W: gl.constexpr = gl.num_warps()
    ROW: gl.constexpr = row_stride(128)
    row = warp * 8 + lane % 4 * 2
    for e in gl.static_range(2):
        for i in gl.static_range(4):
            a = out[2 * i]
            b = out[2 * i + 1]
            store_shared4(base + (row + e) * ROW + lane // 4 * 64 + 16 * i, a[e], a[2 + e], b[e], b[2 + e])
        store_shared2(base + 8 * W * ROW + (row + e) * 8, as_int(top[e]), as_int(total[e]))


@gluon.jit
def fetch_tables(base, k_rows, v_rows, turns, thread, W: gl.constexpr, V: gl.constexpr):
    """Begin to copy rows of keys, and turns; leave those of values, whose codes are V bytes a token."""
    _fetch_rows(base + (KEYS + ROWS), turns, thread, 8192, W)
    _fetch_rows(base, k_rows, thread, KEYS, W)
    leave_table(base + KEYS, thread, held_table(v_rows, thread, 64 // V), 0, 64 // V)


@gluon.jit(do_not_specialize=["scale", "heads", "rows", "columns", "start", "capacity", "splits", "parts", "part0"])
def learned_keys_kernel(
    q_ptr, k_codes_ptr, k_norms_ptr, v_codes_ptr, v_norms_ptr, v_mean_ptr, k_rows_ptr, v_rows_ptr, freq_ptr, turns_ptr,
    k_mean_ptr, signs_ptr, packed_len_ptr, position_ptr, part_out, part_top, part_sum,
    scale, heads, rows, columns, start, capacity, splits, parts, part0,
    V: gl.constexpr, MIX: gl.constexpr, CENTRED: gl.constexpr, C: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for C query rows, 4 or 8.

    Grid: (batch * heads * columns, splits). ``capacity`` counts units of a KV head's storage, which has as many pages as hold
    them; V is the bytes of a token's codes of values. ``k_mean_ptr``, [heads, 128], is read where CENTRED.
    """
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, shared_bytes(V, C, W))
    base = _dynamic_base(lane)
    program_sync(lane)

    split = gl.program_id(1)
    column0 = (gl.program_id(0) % columns) * C
    head = gl.program_id(0) // columns
    batch = head // heads
    kv_head = (head % heads).to(gl.int64)
    fetch_tables(
        base, k_rows_ptr.to(gl.int64) + kv_head * KEYS, v_rows_ptr.to(gl.int64), turns_ptr.to(gl.int64), thread, W, V
    )
    copy_commit(lane)
    if EARLY:  # tables are nobody's results
        wait_for_previous(lane)
        launch_dependents(lane)
    units = gl.minimum(gl.maximum(gl.load(packed_len_ptr + batch) - start, 0) // 32, capacity)
    pages = (units + 3) // 4
    lo = (pages.to(gl.int64) * split // splits).to(gl.int32)
    hi = (pages.to(gl.int64) * (split + 1) // splits).to(gl.int32)
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    position = (gl.load(position_ptr + batch) + start).to(gl.int32)
    stored = (
        k_codes_ptr.to(gl.int64), k_norms_ptr.to(gl.int64), v_codes_ptr.to(gl.int64), v_norms_ptr.to(gl.int64),
        v_mean_ptr.to(gl.int64),
    )  # fmt: skip
    where = ((head * capacity, head * ((capacity + 3) // 4)), None)
    attend_pages(
        base, lane, warp, (q_ptr + head.to(gl.int64) * rows * 128, None), column0, rows, scale, freq_ptr, position, stored,
        where, first, each, count, 0, units, k_mean_ptr + kv_head * 128, signs_ptr, V, MIX, CENTRED, C,
    )  # fmt: skip
    slot0 = head.to(gl.int64) * parts + (part0 + split)
    signs = turn_signs(signs_ptr, lane // 4, lane % 4)
    join_rows(base, lane, warp, signs, part_out, part_top, part_sum, slot0, column0, rows, 128, MIX, C)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
