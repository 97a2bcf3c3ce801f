"""Pieces of affine groups (KIVI, SQuat, InnerQ), by a table: the loop of :func:`kvfold.kernels._decode_gluon.attend_blocks`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._affine_codes import code_bytes, meta_bytes
from kvfold.kernels._affine_values import carried
from kvfold.kernels._decode_gluon import attend_blocks
from kvfold.kernels._registers import _item
from kvfold.kernels._softmax import LOG2E, _finish
from kvfold.kernels._warp import launch_dependents, program_sync, shared_base, wait_for_previous


@gluon.jit(do_not_specialize=["scale", "heads", "rows", "tokens", "seqs"], do_not_specialize_on_alignment=["columns"])
def affine_pieces_kernel(
    q_ptr, q_token, query_start, seq_lens, before_ptr,
    sink_ptr, packed_ptr, piece_ptr, items_ptr, item_list, table, table_step,
    k_codes, k_meta, k_aux, v_codes, v_meta, v_aux, page_step, head_step,
    part_out, part_top, part_sum, scale, heads, rows, tokens, columns, seqs,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_AXIS: gl.constexpr, K_MODE: gl.constexpr, K_GROUP: gl.constexpr,
    V_BITS: gl.constexpr, V_AXIS: gl.constexpr, V_MODE: gl.constexpr, V_GROUP: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, BF16: gl.constexpr, HAS_BIAS: gl.constexpr, CENTER: gl.constexpr,
    EARLY: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """As :func:`kvfold.kernels.paged._fold.fold_pieces_kernel`."""
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    CARRIED: gl.constexpr = carried(V_AXIS)
    K_META: gl.constexpr = _item(meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 0) + _item(
        meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 1
    )
    V_META: gl.constexpr = _item(meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 0) + _item(
        meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 1
    )
    STAGE: gl.constexpr = NB * (code_bytes(D, K_BITS) + K_META + code_bytes(D, V_BITS) + V_META)
    MEET: gl.constexpr = NT * (D // 16) * 32 * 16
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    base0 = shared_base(lane, W * (STAGE if STAGE > MEET else MEET))
    if EARLY:
        launch_dependents(lane)
    for task in range(gl.program_id(0), gl.load(items_ptr + seqs) * heads * columns, gl.num_programs(0)):
        item = task // (heads * columns)
        head = task // columns % heads
        column0 = task % columns * (8 * NT)
        seq = gl.load(item_list + 2 * item)
        number = gl.load(item_list + 2 * item + 1)
        begin = gl.load(query_start + seq)
        count = gl.load(seq_lens + seq) - gl.load(before_ptr + seq)
        blocks = gl.load(piece_ptr + seq) * 4
        lo = number * blocks
        hi = gl.minimum(lo + blocks, gl.load(packed_ptr + seq) // 32)
        stored = (
            (k_codes.to(gl.int64), k_meta.to(gl.int64), k_aux.to(gl.int64)),
            (v_codes.to(gl.int64), v_meta.to(gl.int64), v_aux.to(gl.int64)),
        )
        steps = (page_step, head.to(gl.int64) * head_step, gl.load(sink_ptr + seq) // 32)
        row0 = begin.to(gl.int64) * q_token + head * (rows // tokens) * D
        slot0 = (item + seq + 1).to(gl.int64) * heads + head
        top, out, side = attend_blocks(
            base0, lane, thread, warp, lo, hi, stored, head * 0, table + seq.to(gl.int64) * table_step, steps,
            q_ptr, q_ptr, row0, column0, rows, scale * LOG2E, (q_token, tokens, count),
            D, K_BITS, K_AXIS, K_MODE, K_GROUP, V_BITS, V_AXIS, V_MODE, V_GROUP, NT, NB, False, CENTER, False,
        )  # fmt: skip
        _finish(
            base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, False, D, NT, CARRIED
        )
        program_sync(lane)
    if EARLY:  # the merge waits for these programs alone: the raw tokens' kernel must have ended, too
        wait_for_previous(lane)
