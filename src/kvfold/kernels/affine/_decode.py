# mypy: ignore-errors
"""Decode attention over packed affine groups: the Gluon kernel. :mod:`kvfold.kernels.affine.decode` launches it.

A warp computes ``S^T = K q^T`` (tokens x query rows) and ``O^T = V^T P^T`` (channels x query rows) with
``mma.m16n8k16``, so that packed codes are the first operand and up to eight query rows of a KV head share what is read.

* Codes: a masked field of a stored word is a pair of fp16 subnormals ``code * 2^(k - 24)``: one instruction for two
  elements. The weights ``2^-k`` go into the query or into the output, ``2^24`` into a fp32 factor.
* Scales: on the query (or the probability) where groups run across the contraction, on the accumulator where they run
  along it. Zero-points are a rank-one term, one small MMA for a whole stage.
* Memory: each warp has its own stage of shared memory, filled by asynchronous copies. Keys of the next stage fly while
  values are multiplied, and values while keys are.
* Queries are scaled by a power of two per row, so that neither large norms nor large scales leave fp16.
"""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._codes import _fetch_stage, meta_bytes
from kvfold.kernels.affine._keys import _queries, _query_sums, _scores_accumulator, _scores_operand
from kvfold.kernels.affine._values import (
    _value_room,
    _values_accumulator,
    _values_operand,
    _values_operand_apart,
    _whole_values,
    carried,
)
from kvfold.kernels.common._codes import code_bytes
from kvfold.kernels.common._registers import _item, _zero4, ask_queries
from kvfold.kernels.common._softmax import (
    LIFT,
    LOG2E,
    _finish,
    _nothing,
    _probabilities,
    _rescale,
    _softmax,
    _store_own,
)
from kvfold.kernels.common._warp import (
    copy_commit,
    copy_wait,
    launch_dependents,
    program_sync,
    shared_base,
    store_shared2,
    wait_for_previous,
    warp_sync,
)
from kvfold.kernels.common._windows import _dense

PAGE_BLOCKS = gl.constexpr(4)
"""Blocks of a page, where there is a table of them."""


@gluon.jit
def _place(stored, unit, table, steps, number, id):
    """Where block ``number`` of a head lies: addresses of keys and of values, and its number from there, in two parts."""
    if table is None:
        return stored[0], stored[1], unit, number
    else:
        at = stored[0] + id.to(gl.int64) * steps[0]
        k = (at, at + stored[1], at + stored[2])
        v = (at + stored[3], at + stored[4], at + stored[5])
        return k, v, unit, number % PAGE_BLOCKS


@gluon.jit
def asked_queries(
    q_ptr, lane, row0, column0, rows, varlen, D: gl.constexpr, NT: gl.constexpr, SHARED: gl.constexpr = False
):
    """Queries of up to eight rows, asked for before blocks are; of more, which registers do not hold, nothing."""
    if NT == 1 and not SHARED:
        return ask_queries(q_ptr, lane % 4, row0, column0 + lane // 4, rows, varlen, D)
    else:
        return ()


@gluon.jit
def attend_blocks(
    base0, lane, thread, warp, lo, hi, stored, unit, table, steps, asked, q_ptr, bias_ptr, row0, column0, rows, to_log2,
    varlen,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_AXIS: gl.constexpr, K_MODE: gl.constexpr, K_GROUP: gl.constexpr,
    V_BITS: gl.constexpr, V_AXIS: gl.constexpr, V_MODE: gl.constexpr, V_GROUP: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, HAS_BIAS: gl.constexpr, CENTER: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Attention of ``8 NT`` query rows over blocks ``lo`` to ``hi``, which the program's warps share. All warps are done with
    shared memory at the end.

    In a slab, ``stored`` are the addresses of both sides' codes, metadata and sign words, and the head's storage begins at
    block ``unit``. With a ``table``, which points to the numbers of pages, ``stored`` is where the head's share of page 0
    begins, with the keys' codes, and bytes from there to the other fields; ``steps`` are bytes from a page to the next, and
    blocks at the beginning whose scores do not count. ``asked``: what :func:`asked_queries` asked for; ``to_log2``: the scale
    times log2(e); ``varlen``: see :func:`query_at`.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    K_ROW: gl.constexpr = _item(meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 0)
    K_WORDS: gl.constexpr = _item(meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 1)
    V_ROW: gl.constexpr = _item(meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 0)
    V_WORDS: gl.constexpr = _item(meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 1)
    K_CODE: gl.constexpr = code_bytes(D, K_BITS)
    V_CODE: gl.constexpr = code_bytes(D, V_BITS)
    V_AT: gl.constexpr = NB * (K_CODE + K_ROW + K_WORDS)
    STAGE: gl.constexpr = V_AT + NB * (V_CODE + V_ROW + V_WORDS)
    QUERY: gl.constexpr = NT * CT * 256  # bytes of a warp's queries
    g = lane // 4
    t = lane % 4
    if SHARED:
        base = base0
        each = hi - lo
        first = lo
        count = each
    else:
        base = base0 + warp * STAGE
        each = (hi - lo + W - 1) // W
        if table is not None:  # no stage is of two pages
            each = (each + NB - 1) // NB * NB
        first = lo + warp * each
        count = gl.minimum(hi - first, each)
    COPIERS: gl.constexpr = 32 * W if SHARED else 32
    copier = thread if SHARED else lane
    id = lane * 0
    if table is not None:
        id = gl.load(table + first // PAGE_BLOCKS, mask=count > 0, other=0)
    k, v, unit, block = _place(stored, unit, table, steps, first, id)
    _fetch_stage(
        base, copier, k[0], k[1], k[2], unit, block, count, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NB, 0, COPIERS
    )  # fmt: skip
    copy_commit(lane)
    _fetch_stage(
        base, copier, v[0], v[1], v[2], unit, block, count, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NB, V_AT, COPIERS
    )  # fmt: skip
    copy_commit(lane)
    if table is not None:  # the numbers of pages are a stage ahead of their bytes
        id = gl.load(table + (first + NB) // PAGE_BLOCKS, mask=count > NB, other=0)

    q, code_factor, zero_factor = _queries(
        asked, q_ptr, lane, g, t, row0, column0, rows, to_log2, varlen, D, K_BITS, K_AXIS, NT
    )  # fmt: skip
    qsum = _query_sums(q, lane, g, t, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NT)
    if SHARED:  # registers are for sums
        far = base0 + 2 * STAGE + warp * QUERY + lane * 8
        for i in gl.static_range(NT * CT):
            store_shared2(far + 256 * i, q[2 * i], q[2 * i + 1])
        warp_sync(lane)
        q = far

    bias = ()
    for n in gl.static_range(NT):
        for e in gl.static_range(2):
            if HAS_BIAS:
                column = column0 + n * 8 + 2 * t + e
                x = gl.load(bias_ptr + row0 + column, mask=column < rows, other=0.0) * to_log2
                bias = bias + (x,)
            else:
                bias = bias + (_zero4(lane)[0],)
    top, out, side = _nothing(lane, CT, NT)

    for i in range((each + NB - 1) // NB):
        left = count - i * NB
        following = first + (i + 1) * NB
        k, v, unit, block = _place(stored, unit, table, steps, following, id)
        if table is not None:
            id = gl.load(table + (following + NB) // PAGE_BLOCKS, mask=left > 2 * NB, other=0)
        if SHARED:
            # two buffers: all warps are done with the other one
            copy_wait(lane, 0)
            program_sync(lane)
            base = base0 + (i % 2) * STAGE
            other = base0 + ((i + 1) % 2) * STAGE
            _fetch_stage(
                other, copier, k[0], k[1], k[2], unit, block, left - NB, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NB, 0, COPIERS
            )  # fmt: skip
            _fetch_stage(
                other, copier, v[0], v[1], v[2], unit, block, left - NB, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NB, V_AT,
                COPIERS,
            )  # fmt: skip
            copy_commit(lane)
        else:
            copy_wait(lane, 1)  # keys of this stage
        extra = ()
        for j in gl.static_range(NB):
            if table is None:
                hidden = gl.where(left > j, 0.0, float("-inf"))
            else:
                hidden = gl.where((left > j) & (following - NB + j >= steps[1]), 0.0, float("-inf"))
            for e in gl.static_range(2 * NT):
                extra = extra + (hidden + bias[e],)
        if K_AXIS == 0:
            scores = _scores_operand(
                base, lane, q, code_factor, zero_factor, extra, D, K_BITS, NT, NB, 0, NB * K_CODE, CENTER, SHARED
            )
        else:
            scores = _scores_accumulator(
                base, lane, q, qsum, code_factor, extra, D, K_BITS, K_MODE, K_GROUP, NT, NB,
                0, NB * K_CODE, NB * (K_CODE + K_ROW), SHARED,
            )  # fmt: skip
        if not SHARED:
            warp_sync(lane)
            _fetch_stage(
                base, copier, k[0], k[1], k[2], unit, block, left - NB, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NB, 0, COPIERS
            )  # fmt: skip
            copy_commit(lane)
        if V_AXIS == 1:  # scales multiply probabilities, which make room for them
            if not SHARED:
                copy_wait(lane, 1)  # values of this stage
            room = _value_room(base, lane, D, V_GROUP, NB, V_AT + NB * V_CODE)
            top, factor, p = _probabilities(scores, top, room, 2 * NB, NT)
        else:
            top, factor, p = _softmax(scores, top, 2 * NB, NT, False, LIFT)
        if SHARED and V_AXIS == 1:
            out, side = _values_operand_apart(
                base, lane, p, factor, out, side, D, V_BITS, V_GROUP, NT, NB, V_AT, V_AT + NB * V_CODE
            )
        else:
            out = _rescale(out, factor, CT, NT)
            side = _rescale(side, factor, 1, NT)
            if V_AXIS == 1:
                out, side = _values_operand(
                    base, lane, p, out, side, D, V_BITS, V_GROUP, NT, NB, V_AT, V_AT + NB * V_CODE
                )
            else:
                if not SHARED:
                    copy_wait(lane, 1)  # values of this stage
                out, side = _values_accumulator(
                    base, lane, p, out, side, D, V_BITS, V_MODE, NT, NB, V_AT, V_AT + NB * V_CODE,
                    V_AT + NB * (V_CODE + V_ROW),
                )  # fmt: skip
        if not SHARED:
            warp_sync(lane)
            _fetch_stage(
                base, copier, v[0], v[1], v[2], unit, block, left - NB, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NB, V_AT,
                COPIERS,
            )  # fmt: skip
            copy_commit(lane)

    copy_wait(lane, 0)
    program_sync(lane)
    out = _whole_values(out, side, lane, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NT)
    return top, out, side


@gluon.jit(
    do_not_specialize=[
        "scale", "heads", "rows", "tokens", "first_token", "capacity", "sinks", "slots", "splits", "dense_splits", "parts",
        "part0",
    ],
    do_not_specialize_on_alignment=["columns"],
)  # fmt: skip
def decode_kernel(
    q_ptr, packed_q_ptr, bias_ptr,
    k_codes, k_meta, k_aux, v_codes, v_meta, v_aux,
    packed_len_ptr, sink_k, sink_v, sink_len_ptr, ring_k, ring_v, recent_len_ptr,
    part_out, part_top, part_sum,
    scale, heads, rows, tokens, columns, first_token, capacity, sinks, slots, splits, dense_splits, parts, part0,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_AXIS: gl.constexpr, K_MODE: gl.constexpr, K_GROUP: gl.constexpr,
    V_BITS: gl.constexpr, V_AXIS: gl.constexpr, V_MODE: gl.constexpr, V_GROUP: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, BF16: gl.constexpr, HAS_BIAS: gl.constexpr, CENTER: gl.constexpr,
    EARLY: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for ``8 NT`` query rows.

    Grid: (batch * heads * columns, splits + dense_splits): what shares bytes runs together, and the short programs of the
    windows fill the gaps at the end. Results go to parts ``part0`` and following of ``parts``.

    AXIS 0: groups of tokens, 1: groups of channels. MODE 0: asym, 1: sym, 2: hybrid. A stage is NB blocks of 32 tokens;
    ``capacity`` counts such blocks, the first of which holds the sequence's packed tokens from ``first_token`` on. EARLY: this
    may be launched before the kernel before it ends, and lets the merge be launched while it runs; each waits itself; sm_90
    and later. SHARED: the warps of a program share
    each stage, and each has ``8 NT`` query rows of its own; there are no windows.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    K_ROW: gl.constexpr = _item(meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 0)
    K_WORDS: gl.constexpr = _item(meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 1)
    V_ROW: gl.constexpr = _item(meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 0)
    V_WORDS: gl.constexpr = _item(meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 1)
    K_CODE: gl.constexpr = code_bytes(D, K_BITS)
    V_CODE: gl.constexpr = code_bytes(D, V_BITS)
    V_AT: gl.constexpr = NB * (K_CODE + K_ROW + K_WORDS)
    STAGE: gl.constexpr = V_AT + NB * (V_CODE + V_ROW + V_WORDS)
    MEET: gl.constexpr = NT * CT * 32 * 16  # bytes a warp leaves for the others at the end
    QUERY: gl.constexpr = NT * CT * 256  # bytes of a warp's queries
    CARRIED: gl.constexpr = carried(V_AXIS)
    base0 = shared_base(lane, 2 * STAGE + W * QUERY if SHARED else W * (STAGE if STAGE > MEET else MEET))

    if EARLY:
        wait_for_previous(lane)
        launch_dependents(lane)
    split = gl.program_id(1)
    column0 = (gl.program_id(0) % columns) * (8 * NT)
    if SHARED:
        column0 = column0 * W + warp * (8 * NT)
    head = gl.program_id(0) // columns
    batch = head // heads
    packed_len = gl.load(packed_len_ptr + batch)
    row0 = head.to(gl.int64) * rows
    live = gl.where(split < splits, rows, 0)
    asked = asked_queries(packed_q_ptr, lane, row0, column0, live, None, D, NT, SHARED)
    slot0 = head.to(gl.int64) * parts + (part0 + split)

    if (not SHARED) and split >= splits:
        sink_len = gl.load(sink_len_ptr + batch)
        recent_len = gl.load(recent_len_ptr + batch)
        top, out, side = _nothing(lane, CT, NT)
        for tile in range(split - splits, (sinks + slots + 16 * W - 1) // (16 * W), dense_splits):
            top, out, side = _dense(
                lane, warp, tile, head, q_ptr, row0, column0, rows, tokens,
                sink_k.to(gl.int64), sink_v.to(gl.int64), ring_k.to(gl.int64), ring_v.to(gl.int64),
                sinks, slots, sink_len, packed_len, recent_len, scale * LOG2E, top, out, side, D, NT, BF16, LIFT,
            )  # fmt: skip
        _finish(
            base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, True, D, NT, LIFT
        )
    else:
        # blocks of this split: contiguous, so that every warp streams
        blocks = gl.minimum(gl.maximum(packed_len - first_token, 0) // 32, capacity)
        lo = (blocks.to(gl.int64) * split // splits).to(gl.int32)
        hi = (blocks.to(gl.int64) * (split + 1) // splits).to(gl.int32)
        stored = (
            (k_codes.to(gl.int64), k_meta.to(gl.int64), k_aux.to(gl.int64)),
            (v_codes.to(gl.int64), v_meta.to(gl.int64), v_aux.to(gl.int64)),
        )
        top, out, side = attend_blocks(
            base0, lane, thread, warp, lo, hi, stored, head * capacity, None, None, asked, packed_q_ptr, bias_ptr, row0,
            column0, rows, scale * LOG2E, None, D, K_BITS, K_AXIS, K_MODE, K_GROUP, V_BITS, V_AXIS, V_MODE, V_GROUP, NT, NB,
            HAS_BIAS, CENTER, SHARED,
        )  # fmt: skip
        if SHARED:
            _store_own(lane, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, D, NT, CARRIED)
        else:
            _finish(
                base0,
                lane,
                warp,
                top,
                out,
                side,
                part_out,
                part_top,
                part_sum,
                slot0,
                column0,
                rows,
                False,
                D,
                NT,
                CARRIED,
            )
