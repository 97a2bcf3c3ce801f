# mypy: ignore-errors
"""Decode attention over sums of codebook rows (CommVQ): the Gluon kernel. :mod:`kvfold.kernels.commvq.decode` launches it.

A program keeps one KV head's tables in shared memory, and its warps stream units of 32 tokens on their own. What lanes add up
(:mod:`kvfold.kernels.commvq._steps`) are operands of ``mma.m16n8k16`` as they come: lane (g, t) has channels 8t to 8t + 7 of
every 32 channels of tokens g and g + 8.

Keys are stored before RoPE. A unit has its query rotated back by the position of its first token, and its keys by the rest, by
cosines and sines that lie in shared memory.

Row r of a tile's 8 is token 4 (r % 2) + r / 2: then the probabilities of a lane, transposed, are those of the tokens whose bits
one byte of a channel holds.
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
    _pairs_of_queries,
    fetch_turns,
    query_pitch,
    reserved,
    rotated_keys,
    shared_turns,
    tile_scores,
    unit_place,
    unit_queries,
)
from kvfold.kernels.common._warp import (
    copy_async,
    copy_commit,
    copy_wait,
    exp2_fast,
    launch_dependents,
    load_shared,
    load_shared_short,
    mma,
    pack_half2,
    program_sync,
    shuffle_xor,
    transpose8,
    unpack_half2,
    wait_for_previous,
    warp_sync,
)
from kvfold.kernels.commvq._steps import head_bytes, kept_bytes, steps_of_pairs, tile_steps

UNIT = gl.constexpr(32)


@gluon.constexpr_function
def stage_bytes(stages, bits):
    """Bytes of a unit: codes of ``stages`` stages, norms, and values of ``bits``."""
    return 48 * stages + 64 + 4 * bits


@gluon.constexpr_function
def shared_bytes(stages, bits, columns, warps):
    """Bytes of shared memory of a program."""
    size = kept_bytes(stages) + 8192 + warps * (2 * stage_bytes(stages, bits) + query_pitch(columns) * columns)
    return (max(size, warps * bits * 32) + 1023) // 1024 * 1024


@gluon.constexpr_function
def _byte_asm(i):
    return f"prmt.b32 $0, $1, 0, {0x4040 | i | i << 8:#x};"


@gluon.jit
def _byte_twice(x, I: gl.constexpr):
    """Byte I of x in the low byte of each half."""
    asm: gl.constexpr = _byte_asm(I)
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _fetch(to, lane, codes, norms, bits, unit, active, where, STAGES: gl.constexpr, V: gl.constexpr):
    """Begin to copy a unit: codes, norms and bits of values."""
    whole = lane * 0 + 16
    at, away = unit_place(unit, active, where)
    norms = norms + away
    bits = bits + away
    source = codes + away + at * (48 * STAGES) + lane * 16
    place = to + lane * 16
    for j in gl.static_range((3 * STAGES + 31) // 32):
        here = active & (lane + 32 * j < 3 * STAGES).to(gl.int32)
        copy_async(place, source, whole, here, 512 * j, 512 * j, True)
    copy_async(place, norms + at * 64 + lane * 16, whole, active & (lane < 4).to(gl.int32), 48 * STAGES, 0, True)
    for j in gl.static_range(V // 128):
        copy_async(place, bits + at * (4 * V) + lane * 16, whole, active, 48 * STAGES + 64 + 512 * j, 512 * j, True)


@gluon.jit
def _weights(scores, top, odd):
    """Running maxima, factor of what was summed before, and weights of a unit's tokens as B operands.

    A byte's bit f counts 2^(f - 24) as an operand, so its token's weight is 2^(15 - f) times its probability.
    """
    new_top = ()
    factor = ()
    shift = ()
    for e in gl.static_range(2):
        m = gl.maximum(gl.maximum(scores[0][e], scores[0][e + 2]), gl.maximum(scores[1][e], scores[1][e + 2]))
        m = gl.maximum(m, shuffle_xor(m, 4))
        m = gl.maximum(m, shuffle_xor(m, 8))
        m = gl.maximum(m, shuffle_xor(m, 16))
        m = gl.maximum(m, top[e])
        new_top = new_top + (m,)
        factor = factor + (exp2_fast(top[e] - m),)
        shift = shift + (gl.where(odd, 14.0, 15.0) - m,)
    p = ()
    for i in gl.static_range(2):
        x = scores[i]
        for h in gl.static_range(2):
            low = exp2_fast(x[2 * h] + (shift[0] - (4.0 * i + 2.0 * h)))
            high = exp2_fast(x[2 * h + 1] + (shift[1] - (4.0 * i + 2.0 * h)))
            p = p + (transpose8(pack_half2(low, high, False)),)
    return new_top, factor, p


@gluon.jit
def _bit_sums(address, p, factor, out, side, lane, V: gl.constexpr):
    """Sums of bits times weights, a unit further: ``out`` accumulators of channels V / 8 g + 2 i and the next, ``side`` those
    of the weights."""
    words = load_shared(address, 0, V // 32)
    new = ()
    for i in gl.static_range(V // 16):
        x = _byte_twice(words[i // 2], i % 2 * 2)
        y = _byte_twice(words[i // 2], i % 2 * 2 + 1)
        acc = out[i]
        acc = (acc[0] * factor[0], acc[1] * factor[1], acc[2] * factor[0], acc[3] * factor[1])
        for s in gl.static_range(2):
            near = 0x20001 << (4 * s)
            far = 0x80004 << (4 * s)
            acc = mma(x & near, y & near, x & far, y & far, p[2 * s], p[2 * s + 1], acc, False)
        new = new + (acc,)
    sums = (side[0] * factor[0], side[1] * factor[1], side[2] * factor[0], side[3] * factor[1])
    for s in gl.static_range(2):
        near = lane * 0 + (0x20001 << (4 * s))
        far = lane * 0 + (0x80004 << (4 * s))
        sums = mma(near, near, far, far, p[2 * s], p[2 * s + 1], sums, False)
    return new, sums


@gluon.jit
def _over_units(
    top, out, side, lane, odd, token, g, t, begin, word, stage, query, base, turns, lane_query, raw, freq0, freq1, gain,
    position, factor0, factor1, codes, norms, bits, unit0, where, each, count, STAGES: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """A warp's units, whose first one is on its way; ``turns``: address of the lane's cosines and sines."""
    BUFFER: gl.constexpr = stage_bytes(STAGES, V)
    for at in range(each):
        here = stage + at % 2 * BUFFER
        warp_sync(lane)
        next_unit = (at + 1 < count).to(gl.int32)
        _fetch(stage + (at + 1) % 2 * BUFFER, lane, codes, norms, bits, unit0 + at + 1, next_unit, where, STAGES, V)
        copy_commit(lane)
        unit_queries(query + lane * 4, raw, freq0, freq1, gain, position + at * 32, lane, 128, C)
        copy_wait(lane, 1)
        scores = ()
        for tile in gl.static_range(2):
            x, y = tile_steps(lane, odd, here + word, begin, base, tile, STAGES)
            x = rotated_keys(x, shared_turns(turns + tile * 4096))
            y = rotated_keys(y, shared_turns(turns + (tile * 4096 + 2048)))
            q = ()  # read again, for registers are few while centres are added up
            for j in gl.static_range(4):
                q = q + load_shared(lane_query, 64 * j, 4)
            acc = tile_scores(x, y, q, _zero4(lane))
            near, _ = unpack_half2(load_shared_short(here + token * 2, 48 * STAGES + 32 * tile))
            far, _ = unpack_half2(load_shared_short(here + token * 2, 48 * STAGES + 32 * tile + 16))
            alive = at < count
            hidden = float("-inf")
            acc = (
                gl.where(alive, acc[0] * (near * factor0), hidden),
                gl.where(alive, acc[1] * (near * factor1), hidden),
                gl.where(alive, acc[2] * (far * factor0), hidden),
                gl.where(alive, acc[3] * (far * factor1), hidden),
            )
            scores = scores + (acc,)
        top, factor, p = _weights(scores, top, odd)
        out, side = _bit_sums(here + (48 * STAGES + 64) + t * V + g * (V // 8), p, factor, out, side, lane, V)
    return top, out, side


@gluon.jit
def attend_units(
    base, turns, lane, warp, q, column0, rows, unit_factor, freq_ptr, position, stored, tables, unit0, where, each, count,
    STAGES: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Maxima, sums of bits and of weights of each warp's units, ``unit0`` to ``unit0 + count``, as :func:`_finish` takes them.

    ``q`` as :func:`_pairs_of_queries` takes it; ``stored``: where codes, norms and bits begin; ``tables``: the head's, of which
    copies begin before this; ``turns``: address of cosines and sines in shared memory; ``position`` of the warp's first token;
    ``where``: see :func:`unit_place`.
    """
    W: gl.constexpr = gl.num_warps()
    codes, norms, bits = stored[0], stored[1], stored[2]
    g = lane // 4
    t = lane % 4
    odd = g % 2 == 1
    query = turns + 8192 + warp * (C * query_pitch(C))
    stage = turns + (8192 + W * C * query_pitch(C)) + warp * (2 * stage_bytes(STAGES, V))
    _fetch(stage, lane, codes, norms, bits, unit0, (count > 0).to(gl.int32), where, STAGES, V)
    copy_commit(lane)

    pair = 2 * lane
    # pairs of channels have steps of their own, which rotation does not mix
    raw, ups = _pairs_of_queries(q, rows, column0, lane, pair, 1, C, steps_of_pairs(tables, lane, STAGES))
    factor0 = _chosen(ups, 2 * t % C) * unit_factor
    factor1 = _chosen(ups, (2 * t + 1) % C) * unit_factor
    freq0 = gl.load(freq_ptr + pair)
    freq1 = gl.load(freq_ptr + pair + 1)
    gain = (gl.load(freq_ptr + 64 + pair), gl.load(freq_ptr + 65 + pair))

    token = 4 * (g % 2) + g // 2  # of every eight, a lane's
    begin = token * 12 % 32
    word = token * 12 // 32 * 4 + t * 48
    lane_query = query + g % C * query_pitch(C) + t * 16
    lane_turns = turns + token * 256 + t * 16 + g % 2 * 64  # as of fetch_turns
    top = (_zero4(lane)[0] + LOWEST, _zero4(lane)[0] + LOWEST)
    side = _zero4(lane)
    out = ()
    for _i in gl.static_range(V // 16):
        out = out + (_zero4(lane),)

    copy_wait(lane, 1)
    program_sync(lane)
    top, out, side = _over_units(
        top, out, side, lane, odd, token, g, t, begin, word, stage, query, base, lane_turns, lane_query,
        raw, freq0, freq1, gain, position, factor0, factor1, codes, norms, bits, unit0, where, each, count,
        STAGES, V, C,
    )  # fmt: skip
    copy_wait(lane, 0)
    program_sync(lane)
    return top, out, (side,)


@gluon.jit(do_not_specialize=["scale", "heads", "rows", "columns", "start", "capacity", "splits", "parts", "part0"])
def codebook_kernel(
    q_ptr, codes_ptr, norms_ptr, bits_ptr, rows_ptr, size_ptr, freq_ptr, turns_ptr, packed_len_ptr, position_ptr,
    part_out, part_top, part_sum, scale, heads, rows, columns, start, capacity, splits, parts, part0,
    STAGES: gl.constexpr, V: gl.constexpr, C: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for C query rows.

    Grid: (batch * heads * columns, splits). ``capacity`` counts units of a KV head's storage.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = shared_bytes(STAGES, V, C, W)
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, BYTES)
    base = _dynamic_base(lane)
    program_sync(lane)
    turns = base + kept_bytes(STAGES)

    split = gl.program_id(1)
    column0 = (gl.program_id(0) % columns) * C
    head = gl.program_id(0) // columns
    batch = head // heads
    tables = rows_ptr.to(gl.int64) + (head % heads).to(gl.int64) * head_bytes(STAGES)

    fetch_turns(turns, turns_ptr, thread, lane, W, True)
    _fetch_rows(base, tables, thread, kept_bytes(STAGES), W)
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
    stored = (codes_ptr.to(gl.int64), norms_ptr.to(gl.int64), bits_ptr.to(gl.int64))
    q = (q_ptr + head.to(gl.int64) * rows * 128, None)
    top, out, side = attend_units(
        base, turns, lane, warp, q, column0, rows, scale * gl.load(size_ptr + head % heads), freq_ptr, position, stored, tables,
        unit0, None, each, count, STAGES, V, C,
    )  # fmt: skip
    slot0 = head.to(gl.int64) * parts + (part0 + split)
    _finish(base, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, True, V, 1, -9.0, 1)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
