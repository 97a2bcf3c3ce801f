# mypy: ignore-errors
"""Decode attention over residual vector codes (VQLLM) and codes of groups (TaSQ): the Gluon kernel.
:mod:`kvfold.kernels.residual.decode` and :mod:`kvfold.kernels.residual.groups` launch it.

As :mod:`kvfold.kernels.commvq._decode`: tables lie in shared memory, warps stream units of 32 tokens, and what a lane adds up
is an operand. A row has 32 channels, a byte each, of which lane (g, t) reads 8 for tokens g of every eight. The rows of four
stages lie together in 128 bytes; of each four tokens every one reads another stage first, so that they never meet in a bank.

Words of keys hold 4 real and 4 imaginary parts of RoPE's pairs, so that a lane has both. Those of values become operands by
transposing 8 x 8 matrices.

GROUPS, 1 or 2: codes of 16 groups of 8 channels, of a KV head's own codebooks. A row is 16 bytes of fp16, which a lane reads
at once: lane (g, t) those of groups 4 i + t. Rows of one code of eight groups lie together in 128 bytes, and every other token
reads the second four of them first: a quarter of a warp, two tokens, never meets in a bank. With 2 codes are of vectors less a
mean. That of keys meets a query by a second product, of a tile's cosines and sines; that of values joins a warp's result.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._softmax import LOWEST, _finish
from kvfold.kernels.common._tables import (
    _chosen,
    _dynamic_base,
    _fetch_rows,
    _odd_bytes,
    _pairs_of_queries,
    _weighted_bytes,
    mean_of_keys,
    query_pitch,
    reserved,
    shared_turns,
    tile_scores,
    unit_place,
    unit_queries,
)
from kvfold.kernels.common._warp import (
    as_int,
    copy_async,
    copy_commit,
    copy_wait,
    exp2_fast,
    fma_half2,
    launch_dependents,
    load_global4,
    load_shared,
    load_shared_short,
    mma,
    mul_half2,
    pack_half2,
    product_less_half2,
    program_sync,
    shuffle_xor,
    transpose8,
    unpack_half2,
    wait_for_previous,
    warp_sync,
)


@gluon.constexpr_function
def buffer_bytes(k_stages, v_stages):
    """Bytes of a unit: codes and norms of both sides."""
    return 128 * (k_stages + v_stages) + 128


@gluon.constexpr_function
def table_bytes(stages, groups):
    """Bytes of one side's tables."""
    return 65536 if groups else 8192 * stages


@gluon.constexpr_function
def query_bytes(columns, groups):
    """Bytes of a warp's queries, and of what their products with a mean of keys are made of."""
    return columns * query_pitch(columns) * max(groups, 1)


@gluon.constexpr_function
def shared_bytes(k_stages, v_stages, columns, warps, groups=0):
    """Bytes of shared memory of a program."""
    size = table_bytes(k_stages, groups) + table_bytes(v_stages, groups) + 8192
    size += warps * (2 * buffer_bytes(k_stages, v_stages) + query_bytes(columns, groups))
    return (max(size, warps * 128 * 32) + 8191) // 8192 * 8192


@gluon.jit
def _group_sums(words, places, AT: gl.constexpr, STAGES: gl.constexpr):
    """Four words of the sum of a group's rows; ``words``: its codes; ``places``: see :func:`_places`; AT: of the tables.

    Numbers of seven bits are added as whole numbers: two stages byte by byte, then odd bytes in halves with the exponent of
    1024. Whole words are added, too, whatever is carried from byte to byte: less the odd bytes, they are the even ones.
    """
    odd = (words[0] * 0 + 0x64006400,) * 2
    whole = (words[0] * 0 + 0x64646400,) * 2  # 257 times the exponents
    for j in gl.static_range(STAGES // 4):
        x = ()
        for i in gl.static_range(4):
            at = _weighted_bytes(words[j], places[i], places[4 + i])
            x = x + (load_shared(at, AT + j * 32768, 2),)
        new_odd = ()
        new_whole = ()
        for i in gl.static_range(2):
            a = x[0][i] + x[1][i]
            b = x[2][i] + x[3][i]
            new_odd = new_odd + (odd[i] + _odd_bytes(a) + _odd_bytes(b),)
            new_whole = new_whole + (whole[i] + a + b,)
        odd = new_odd
        whole = new_whole
    sums = (whole[0] - odd[0] * 256, odd[0], whole[1] - odd[1] * 256, odd[1])
    out = ()
    for i in gl.static_range(4):
        out = out + (fma_half2(sums[i], places[8 + i], places[12 + i]),)
    return out


@gluon.jit
def _token_sums(codes, places, AT: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr = 0):
    """16 words of one token of every lane: four of each group. ``codes``: address of the token's."""
    words = load_shared(codes, 0, STAGES)
    out = ()
    if GROUPS:
        for i in gl.static_range(2):
            out = out + _two_groups(words[2 * i], words[2 * i + 1], places, AT + 32768 * i)
    else:
        for i in gl.static_range(4):
            if STAGES == 4:
                out = out + _group_sums((words[i],), places, AT, STAGES)
            else:
                out = out + _group_sums((words[2 * i], words[2 * i + 1]), places, AT, STAGES)
    return out


@gluon.jit
def _two_groups(near, far, places, AT: gl.constexpr):
    """Rows of two groups, whose codes are in words ``near`` and ``far``; ``places``: see :func:`_group_places`. Odd tokens read
    the second one first."""
    odd = places[3]
    a = load_shared(_weighted_bytes(gl.where(odd, far, near), places[0], places[1]), AT, 4)
    b = load_shared(_weighted_bytes(gl.where(odd, near, far), places[0], places[2]), AT, 4)
    first = ()
    second = ()
    for i in gl.static_range(4):
        first = first + (gl.where(odd, b[i], a[i]),)
        second = second + (gl.where(odd, a[i], b[i]),)
    return first + second


@gluon.jit
def _places(base, rows_ptr, g, t, STAGES: gl.constexpr):
    """Of a lane for :func:`_group_sums`: weights that pick the code of a stage and multiply it by a row's 128 bytes, addresses
    of its eight bytes of these stages, and its channels' steps and what sums of numbers have too much. Four stages lie
    together in a row; tokens of a half of a warp read different ones at once."""
    weights = ()
    addresses = ()
    for i in gl.static_range(4):
        stage = g % 4 ^ i
        weights = weights + ((g * 0 + 128) << 8 * stage,)
        addresses = addresses + (base + stage * 32 + t * 8,)
    at = rows_ptr + STAGES * 8192 + t * 16
    return weights + addresses + load_global4(at, g * 0 + 1) + load_global4(at + 64, g * 0 + 1)


@gluon.jit
def _group_places(base, g, t):
    """The same of codes of groups: a weight that picks the lane's code of four, times the 128 bytes of a code of two groups;
    the address of its 16 bytes of the group that is read first, and of the other one; whether that is the second."""
    odd = g % 2 == 1
    first = base + t * 16 + odd.to(gl.int32) * 64
    return ((g * 0 + 128) << 8 * t, first, first ^ 64, odd)


@gluon.jit
def _rotated(x, turns):
    """Keys of one token of every lane, rotated by its place in the tile."""
    out = ()
    for i in gl.static_range(4):
        a0 = x[4 * i]
        a1 = x[4 * i + 1]
        b0 = x[4 * i + 2]
        b1 = x[4 * i + 3]
        out = out + (
            product_less_half2(a0, turns[4 * i + 0], mul_half2(b0, turns[4 * i + 2])),
            product_less_half2(a1, turns[4 * i + 1], mul_half2(b1, turns[4 * i + 3])),
            fma_half2(b0, turns[4 * i + 0], mul_half2(a0, turns[4 * i + 2])),
            fma_half2(b1, turns[4 * i + 1], mul_half2(a1, turns[4 * i + 3])),
        )
    return out


@gluon.jit
def _fetch(to, lane, k_codes, v_codes, k_norms, v_norms, unit, active, where, K: gl.constexpr, V: gl.constexpr):
    """Begin to copy a unit: codes of keys and of values, norms of keys and of values."""
    whole = lane * 0 + 16
    at, away = unit_place(unit, active, where)
    k_codes = k_codes + away
    v_codes = v_codes + away
    k_norms = k_norms + away
    v_norms = v_norms + away
    place = to + lane * 16
    few = active & (lane < 4).to(gl.int32)
    for j in gl.static_range(K // 4):
        copy_async(place, k_codes + at * (128 * K) + lane * 16, whole, active, 512 * j, 512 * j, True)
    for j in gl.static_range(V // 4):
        copy_async(place, v_codes + at * (128 * V) + lane * 16, whole, active, 128 * K + 512 * j, 512 * j, True)
    copy_async(place, k_norms + at * 64 + lane * 16, whole, few, 128 * (K + V), 0, True)
    copy_async(place, v_norms + at * 64 + lane * 16, whole, few, 128 * (K + V) + 64, 0, True)


@gluon.jit
def _weights(scores, norms, top, total):
    """Running exponents, factor of what was summed before, sums of a lane's probabilities, and probabilities times norms as B
    operands. ``norms``: of a lane's tokens, four."""
    most = gl.maximum(gl.maximum(gl.abs(norms[0]), gl.abs(norms[1])), gl.maximum(gl.abs(norms[2]), gl.abs(norms[3])))
    most = gl.maximum(most, shuffle_xor(most, 4))
    most = gl.maximum(most, shuffle_xor(most, 8))
    most = gl.maximum(most, shuffle_xor(most, 16))
    room = 142 - (as_int(most) >> 23)
    room = gl.minimum(room, 35).to(gl.float32) - 1.0  # norms times 2^room stay below 2^15
    new_top = ()
    factor = ()
    sums = ()
    p = ()
    for e in gl.static_range(2):
        m = gl.maximum(gl.maximum(scores[0][e], scores[0][e + 2]), gl.maximum(scores[1][e], scores[1][e + 2]))
        m = gl.maximum(m, shuffle_xor(m, 4))
        m = gl.maximum(m, shuffle_xor(m, 8))
        m = gl.maximum(m, shuffle_xor(m, 16))
        m = gl.maximum(m - room, top[e])
        new_top = new_top + (m,)
        factor = factor + (exp2_fast(top[e] - m),)
        sums = sums + (total[e] * factor[e],)
    s0 = sums[0]
    s1 = sums[1]
    for i in gl.static_range(2):
        x = scores[i]
        for h in gl.static_range(2):
            low = exp2_fast(x[2 * h] - new_top[0])
            high = exp2_fast(x[2 * h + 1] - new_top[1])
            s0 += low
            s1 += high
            p = p + (transpose8(pack_half2(low * norms[2 * i + h], high * norms[2 * i + h], False)),)
    return new_top, factor, (s0, s1), p


@gluon.jit
def _over_units(
    top, out, total, lane, g, t, stage, query, k_places, v_places, turns, lane_query, to_query, raw, freq0, freq1, gain,
    mean, position, factor0, factor1, k_codes, v_codes, k_norms, v_norms, unit0, where, each, count,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A warp's units, whose first one is on its way; ``turns``: address of the lane's cosines and sines; ``mean``: of keys, see
    :func:`mean_of_keys`."""
    BUFFER: gl.constexpr = buffer_bytes(K, V)
    VALUES: gl.constexpr = table_bytes(K, GROUPS)
    for at in range(each):
        here = stage + at % 2 * BUFFER
        warp_sync(lane)
        next_unit = (at + 1 < count).to(gl.int32)
        _fetch(
            stage + (at + 1) % 2 * BUFFER,
            lane,
            k_codes,
            v_codes,
            k_norms,
            v_norms,
            unit0 + at + 1,
            next_unit,
            where,
            K,
            V,
        )
        copy_commit(lane)
        unit_queries(to_query, raw, freq0, freq1, gain, position + at * 32, lane, 8, C, mean)
        copy_wait(lane, 1)
        q = ()
        for j in gl.static_range(4):
            q = q + load_shared(lane_query, 64 * j, 4)
        products = ()
        common = ()
        for tile in gl.static_range(2):
            x = _token_sums(here + g * (4 * K) + tile * (64 * K), k_places, 0, K, GROUPS)
            y = _token_sums(here + g * (4 * K) + (tile * (64 * K) + 32 * K), k_places, 0, K, GROUPS)
            x_turns = shared_turns(turns + tile * 4096)
            y_turns = shared_turns(turns + (tile * 4096 + 2048))
            x = _rotated(x, x_turns)
            y = _rotated(y, y_turns)
            products = products + (tile_scores(x, y, q, _zero4(lane)),)
            if GROUPS == 2:
                m = ()
                for j in gl.static_range(4):
                    m = m + load_shared(lane_query, C * query_pitch(C) + 64 * j, 4)
                common = common + (tile_scores(x_turns, y_turns, m, _zero4(lane)),)
        scores = ()
        norms = ()
        alive = at < count
        hidden = float("-inf")
        for tile in gl.static_range(2):
            acc = products[tile]
            near, _ = unpack_half2(load_shared_short(here + g * 2, 128 * (K + V) + 32 * tile))
            far, _ = unpack_half2(load_shared_short(here + g * 2, 128 * (K + V) + 32 * tile + 16))
            if GROUPS == 2:
                m = common[tile]
                sums = (
                    gl.fma(acc[0], near, m[0] * mean[4]) * factor0,
                    gl.fma(acc[1], near, m[1] * mean[4]) * factor1,
                    gl.fma(acc[2], far, m[2] * mean[4]) * factor0,
                    gl.fma(acc[3], far, m[3] * mean[4]) * factor1,
                )
            else:
                sums = (
                    acc[0] * (near * factor0),
                    acc[1] * (near * factor1),
                    acc[2] * (far * factor0),
                    acc[3] * (far * factor1),
                )
            shown = ()
            for e in gl.static_range(4):
                shown = shown + (gl.where(alive, sums[e], hidden),)
            scores = scores + (shown,)
            near, _ = unpack_half2(load_shared_short(here + g * 2, 128 * (K + V) + 64 + 32 * tile))
            far, _ = unpack_half2(load_shared_short(here + g * 2, 128 * (K + V) + 64 + 32 * tile + 16))
            norms = norms + (gl.where(alive, near, 1.0), gl.where(alive, far, 1.0))
        top, factor, total, p = _weights(scores, norms, top, total)
        scaled = ()
        for c in gl.static_range(8):
            acc = out[c]
            scaled = scaled + ((acc[0] * factor[0], acc[1] * factor[1], acc[2] * factor[0], acc[3] * factor[1]),)
        out = scaled
        for tile in gl.static_range(2):
            x = _token_sums(here + g * (4 * V) + (128 * K + tile * (64 * V)), v_places, VALUES, V, GROUPS)
            y = _token_sums(here + g * (4 * V) + (128 * K + tile * (64 * V) + 32 * V), v_places, VALUES, V, GROUPS)
            new = ()
            for c in gl.static_range(8):
                new = new + (
                    mma(
                        transpose8(x[2 * c]), transpose8(x[2 * c + 1]), transpose8(y[2 * c]), transpose8(y[2 * c + 1]),
                        p[2 * tile], p[2 * tile + 1], out[c], False,
                    ),
                )  # fmt: skip
            out = new
    return top, out, total


@gluon.jit
def _with_mean(out, sums, source, g):
    """Sums of values, and a head's mean times the sums of their weights."""
    new = ()
    for c in gl.static_range(8):
        acc = out[c]
        at = source + (g // 2 * 8 + g % 2 + (c // 2 * 32 + c % 2 * 4))
        near = gl.load(at).to(gl.float32)
        far = gl.load(at + 2).to(gl.float32)
        new = new + (
            (
                gl.fma(sums[0], near, acc[0]),
                gl.fma(sums[1], near, acc[1]),
                gl.fma(sums[0], far, acc[2]),
                gl.fma(sums[1], far, acc[3]),
            ),
        )
    return new


@gluon.jit
def attend_units(
    base, turns, lane, warp, q, column0, rows, scale, freq_ptr, position, stored, rows_of, unit0, where, each, count,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUPS: gl.constexpr = 0, means=None,
):  # fmt: skip
    """Maxima, sums of values and of weights of each warp's units, ``unit0`` to ``unit0 + count``, as ``_finish`` takes them.

    ``q`` as :func:`_pairs_of_queries` takes it; ``stored``: where codes and norms of keys, and those of values, begin;
    ``rows_of``: the tables, of which copies begin before this; ``turns``: address of cosines and sines in shared memory;
    ``position`` of the warp's first token; ``where``: see :func:`unit_place`; ``means``: pointers to those of both sides.
    """
    Q: gl.constexpr = query_bytes(C, GROUPS)
    W: gl.constexpr = gl.num_warps()
    k_codes, k_norms, v_codes, v_norms = stored[0], stored[1], stored[2], stored[3]
    g = lane // 4
    t = lane % 4
    query = turns + 8192 + warp * Q
    stage = turns + (8192 + W * Q) + warp * (2 * buffer_bytes(K, V))
    _fetch(stage, lane, k_codes, v_codes, k_norms, v_norms, unit0, (count > 0).to(gl.int32), where, K, V)
    copy_commit(lane)

    # a lane turns pairs 16 t' + 4 m + i, m = 0, 1 or 2, 3, of group i: those that lane t' of every four reads of the group;
    # of groups 4 i + t' pairs 4 i + t' + 16 m
    NEXT: gl.constexpr = 16 if GROUPS else 4
    if GROUPS:
        pair = lane // 8 * 4 + lane // 2 % 4 + lane % 2 * 32
    else:
        pair = lane // 2 % 4 * 16 + lane % 2 * 8 + lane // 8
    raw, ups = _pairs_of_queries(q, rows, column0, lane, pair, NEXT, C, None)
    factor0 = _chosen(ups, 2 * t % C) * scale
    factor1 = _chosen(ups, (2 * t + 1) % C) * scale
    freq0 = gl.load(freq_ptr + pair)
    freq1 = gl.load(freq_ptr + pair + NEXT)
    gain = (gl.load(freq_ptr + 64 + pair), gl.load(freq_ptr + (64 + NEXT) + pair))
    mean = None
    if GROUPS == 2:
        mean = mean_of_keys(means[0], pair, NEXT)

    if GROUPS:
        k_places = _group_places(base, g, t)
        v_places = k_places
    else:
        k_places = _places(base, rows_of[0], g, t, K)
        v_places = _places(base, rows_of[1], g, t, V)
    lane_turns = turns + g * 256 + g % 2 * 64 + t * 16
    lane_query = query + g % C * query_pitch(C) + t * 16
    to_query = query + lane // 8 * 64 + lane // 2 % 4 * 16 + lane % 2 * 4
    top = (_zero4(lane)[0] + LOWEST, _zero4(lane)[0] + LOWEST)
    total = (_zero4(lane)[0], _zero4(lane)[0])
    out = ()
    for _i in gl.static_range(8):
        out = out + (_zero4(lane),)
    copy_wait(lane, 1)
    program_sync(lane)
    top, out, total = _over_units(
        top, out, total, lane, g, t, stage, query, k_places, v_places, lane_turns, lane_query, to_query, raw, freq0, freq1,
        gain, mean, position, factor0, factor1, k_codes, v_codes, k_norms, v_norms, unit0, where, each, count, K, V, C, GROUPS,
    )  # fmt: skip
    copy_wait(lane, 0)
    program_sync(lane)
    s0 = total[0]
    s1 = total[1]
    for i in gl.static_range(3):
        s0 += shuffle_xor(s0, 4 << i)
        s1 += shuffle_xor(s1, 4 << i)
    if GROUPS == 2:
        out = _with_mean(out, (s0, s1), means[1], g)
    return top, out, ((s0, s1, s0, s1),)


@gluon.jit(do_not_specialize=["scale", "heads", "rows", "columns", "start", "capacity", "splits", "parts", "part0"])
def residual_kernel(
    q_ptr, k_codes_ptr, k_norms_ptr, v_codes_ptr, v_norms_ptr, k_rows_ptr, v_rows_ptr, freq_ptr, turns_ptr,
    k_mean_ptr, v_mean_ptr, packed_len_ptr, position_ptr, part_out, part_top, part_sum,
    scale, heads, rows, columns, start, capacity, splits, parts, part0,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for C query rows.

    Grid: (batch * heads * columns, splits). ``capacity`` counts units of a KV head's storage; K and V are stages of keys and of
    values. ``k_mean_ptr`` and ``v_mean_ptr``, [heads, 128], are read where GROUPS is 2. With GROUPS tables are those of a head.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = shared_bytes(K, V, C, W, GROUPS)
    KEYS: gl.constexpr = table_bytes(K, GROUPS)
    VALUES: gl.constexpr = table_bytes(V, GROUPS)
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, BYTES)
    base = _dynamic_base(lane)
    program_sync(lane)
    turns = base + (KEYS + VALUES)

    split = gl.program_id(1)
    column0 = (gl.program_id(0) % columns) * C
    head = gl.program_id(0) // columns
    batch = head // heads
    stored = (k_codes_ptr.to(gl.int64), k_norms_ptr.to(gl.int64), v_codes_ptr.to(gl.int64), v_norms_ptr.to(gl.int64))
    k_rows = k_rows_ptr.to(gl.int64)
    v_rows = v_rows_ptr.to(gl.int64)
    kv_head = (head % heads).to(gl.int64)
    if GROUPS:
        k_rows += kv_head * KEYS
        v_rows += kv_head * VALUES

    _fetch_rows(turns, turns_ptr.to(gl.int64), thread, 8192, W)
    _fetch_rows(base, k_rows, thread, KEYS, W)
    _fetch_rows(base + KEYS, v_rows, thread, VALUES, W)
    copy_commit(lane)
    if EARLY:  # tables are nobody's results
        wait_for_previous(lane)
        launch_dependents(lane)
    units = gl.minimum(gl.maximum(gl.load(packed_len_ptr + batch) - start, 0) // 32, capacity)
    lo = (units.to(gl.int64) * split // splits).to(gl.int32)
    hi = (units.to(gl.int64) * (split + 1) // splits).to(gl.int32)
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    unit0 = head * capacity + first
    position = (gl.load(position_ptr + batch) + start).to(gl.int32) + first * 32
    q = (q_ptr + head.to(gl.int64) * rows * 128, None)
    top, out, side = attend_units(
        base, turns, lane, warp, q, column0, rows, scale, freq_ptr, position, stored, (k_rows, v_rows), unit0, None, each,
        count, K, V, C, GROUPS, (k_mean_ptr + kv_head * 128, v_mean_ptr + kv_head * 128),
    )  # fmt: skip
    slot0 = head.to(gl.int64) * parts + (part0 + split)
    dense: gl.constexpr = 3 if GROUPS else 0
    _finish(base, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, dense, 128, 1, 0.0)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
