# mypy: ignore-errors
"""The two products of a decode step apart: the fused kernel's own code, without the softmax between them.

:mod:`kvfold.bench.matvec` launches these. Each warp has two stages of shared memory; the next one's bytes fly while this one
is multiplied. In the fused kernel keys and values take turns in the same way.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._codes import _fetch_stage, meta_bytes
from kvfold.kernels.affine._keys import _queries, _query_sums, _scores_accumulator, _scores_operand
from kvfold.kernels.affine._values import _values_accumulator, _values_operand, _whole_values
from kvfold.kernels.common._codes import code_bytes
from kvfold.kernels.common._registers import _item, _zero4
from kvfold.kernels.common._softmax import _finish, _nothing
from kvfold.kernels.common._warp import (
    copy_commit,
    copy_wait,
    pack_half2,
    program_sync,
    shared_base,
    transpose8,
    warp_sync,
)


@gluon.jit
def _share(packed_len_ptr, head, heads, split, splits, warp):
    """Of the blocks of a KV head, the first that this warp takes, how many, and how many its longest companion takes."""
    W: gl.constexpr = gl.num_warps()
    blocks = gl.load(packed_len_ptr + head // heads) // 32
    lo = (blocks.to(gl.int64) * split // splits).to(gl.int32)
    hi = (blocks.to(gl.int64) * (split + 1) // splits).to(gl.int32)
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    return first, gl.minimum(hi - first, each), each


@gluon.jit(do_not_specialize=["scale", "heads", "rows", "capacity", "splits"])
def scores_kernel(
    q_ptr, codes, meta, aux, packed_len_ptr, out_ptr, scale, heads, rows, capacity, splits,
    D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, CENTER: gl.constexpr,
):  # fmt: skip
    """``scale * q K'`` as fp16 [heads, rows, 32 capacity]; ``out_ptr`` counts pairs. Grid: (batch * heads, splits)."""
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    CODE: gl.constexpr = code_bytes(D, BITS)
    ROW: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 0)
    WORDS: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 1)
    STAGE: gl.constexpr = NB * (CODE + ROW + WORDS)
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    t = lane % 4
    base = shared_base(lane, 2 * W * STAGE) + warp * (2 * STAGE)
    head = gl.program_id(0)
    row0 = head.to(gl.int64) * rows
    first, count, each = _share(packed_len_ptr, head, heads, gl.program_id(1), splits, warp)
    unit = head * capacity
    c = codes.to(gl.int64)
    m = meta.to(gl.int64)
    a = aux.to(gl.int64)
    _fetch_stage(base, lane, c, m, a, unit, first, count, D, BITS, AXIS, MODE, GROUP, NB, 0, 32)
    copy_commit(lane)
    q, code_factor, zero_factor = _queries((), q_ptr, lane, g, t, row0, 0, rows, scale, None, D, BITS, AXIS, NT)
    qsum = _query_sums(q, lane, g, t, D, BITS, AXIS, MODE, GROUP, NT)
    extra = ()
    for _i in gl.static_range(2 * NT * NB):
        extra = extra + (_zero4(lane)[0],)
    for i in range((each + NB - 1) // NB):
        left = count - i * NB
        here = base + (i % 2) * STAGE
        there = base + ((i + 1) % 2) * STAGE
        following = first + (i + 1) * NB
        _fetch_stage(there, lane, c, m, a, unit, following, left - NB, D, BITS, AXIS, MODE, GROUP, NB, 0, 32)
        copy_commit(lane)
        copy_wait(lane, 1)
        if AXIS == 0:
            scores = _scores_operand(
                here, lane, q, code_factor, zero_factor, extra, D, BITS, NT, NB, 0, NB * CODE, CENTER
            )  # fmt: skip
        else:
            scores = _scores_accumulator(
                here, lane, q, qsum, code_factor, extra, D, BITS, MODE, GROUP, NT, NB, 0, NB * CODE, NB * (CODE + ROW)
            )  # fmt: skip
        warp_sync(lane)
        for k in gl.static_range(2 * NB):
            for n in gl.static_range(NT):
                x = scores[k * NT + n]
                low = transpose8(pack_half2(x[0], x[1], False))  # tokens 2t, 2t + 1 of query row g
                high = transpose8(pack_half2(x[2], x[3], False))
                at = (row0 + (n * 8 + g)) * (capacity * 16) + ((first + i * NB) * 16 + k * 8 + t)
                live = (n * 8 + g < rows) & (left > k // 2)
                gl.store(out_ptr + at, low, mask=live)
                gl.store(out_ptr + at + 4, high, mask=live)
    copy_wait(lane, 0)


@gluon.jit(do_not_specialize=["heads", "rows", "capacity", "splits"])
def values_kernel(
    p_ptr, codes, meta, aux, packed_len_ptr, part_out, part_top, part_sum, heads, rows, capacity, splits,
    D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """``p V`` and the sums of ``p``, split over tokens; p fp16 [heads, rows, 32 capacity], counted in pairs.

    Grid: (batch * heads, splits).
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    CODE: gl.constexpr = code_bytes(D, BITS)
    ROW: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 0)
    WORDS: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 1)
    STAGE: gl.constexpr = NB * (CODE + ROW + WORDS)
    MEET: gl.constexpr = NT * CT * 32 * 16
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    t = lane % 4
    base0 = shared_base(lane, W * (2 * STAGE if 2 * STAGE > MEET else MEET))
    base = base0 + warp * (2 * STAGE)
    head = gl.program_id(0)
    split = gl.program_id(1)
    row0 = head.to(gl.int64) * rows
    first, count, each = _share(packed_len_ptr, head, heads, split, splits, warp)
    unit = head * capacity
    c = codes.to(gl.int64)
    m = meta.to(gl.int64)
    a = aux.to(gl.int64)
    _fetch_stage(base, lane, c, m, a, unit, first, count, D, BITS, AXIS, MODE, GROUP, NB, 0, 32)
    copy_commit(lane)
    _top, out, side = _nothing(lane, CT, NT)
    for i in range((each + NB - 1) // NB):
        left = count - i * NB
        here = base + (i % 2) * STAGE
        there = base + ((i + 1) % 2) * STAGE
        p = ()
        for k in gl.static_range(2 * NB):
            for n in gl.static_range(NT):
                at = (row0 + (n * 8 + g)) * (capacity * 16) + ((first + i * NB) * 16 + k * 8 + t)
                live = (n * 8 + g < rows) & (left > k // 2)
                p = p + (gl.load(p_ptr + at, mask=live, other=0), gl.load(p_ptr + at + 4, mask=live, other=0))
        following = first + (i + 1) * NB
        _fetch_stage(there, lane, c, m, a, unit, following, left - NB, D, BITS, AXIS, MODE, GROUP, NB, 0, 32)
        copy_commit(lane)
        copy_wait(lane, 1)
        if AXIS == 1:
            out, side = _values_operand(here, lane, p, out, side, D, BITS, GROUP, NT, NB, 0, NB * CODE)
        else:
            out, side = _values_accumulator(
                here, lane, p, out, side, D, BITS, MODE, NT, NB, 0, NB * CODE, NB * (CODE + ROW)
            )  # fmt: skip
        warp_sync(lane)
    copy_wait(lane, 0)
    program_sync(lane)
    out = _whole_values(out, side, lane, D, BITS, AXIS, MODE, GROUP, NT)
    zero = ()
    for _i in gl.static_range(2 * NT):  # all splits weigh the same
        zero = zero + (_zero4(lane)[0],)
    slot0 = head.to(gl.int64) * splits + split
    _finish(base0, lane, warp, zero, out, side, part_out, part_top, part_sum, slot0, 0, rows, False, D, NT, 0)
