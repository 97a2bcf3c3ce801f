# mypy: ignore-errors
"""Pieces of affine groups (KIVI, SQuat, InnerQ), by a table: the loop of
:func:`kvfold.kernels.affine._decode.attend_blocks`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._codes import meta_bytes
from kvfold.kernels.affine._decode import asked_queries, attend_blocks
from kvfold.kernels.affine._values import carried
from kvfold.kernels.common._codes import code_bytes
from kvfold.kernels.common._registers import _item
from kvfold.kernels.common._softmax import LOG2E, _finish
from kvfold.kernels.common._warp import launch_dependents, prefetch, program_sync, shared_base, wait_for_previous
from kvfold.kernels.paged._arrive import arrive
from kvfold.kernels.paged._raw import attend_windows


@gluon.jit(
    do_not_specialize=["scale", "heads", "rows", "tokens", "seqs", "raw_parts"],
    do_not_specialize_on_alignment=["columns"],
)
def affine_pieces_kernel(
    q_ptr, q_token, items_ptr, item_list, table, table_step,
    query_start, seq_lens, before_ptr, sink_ptr, packed_ptr,
    window_k, wk_block, wk_place, wk_head, window_v, wv_block, wv_place, wv_head, window_table, window_step,
    region, page_step, head_step,
    part_out, part_top, part_sum, counters, out_ptr, out_token, out_head, sinks,
    scale, heads, rows, tokens, columns, seqs, raw_parts,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_AXIS: gl.constexpr, K_MODE: gl.constexpr, K_GROUP: gl.constexpr,
    V_BITS: gl.constexpr, V_AXIS: gl.constexpr, V_MODE: gl.constexpr, V_GROUP: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, BF16: gl.constexpr, HAS_BIAS: gl.constexpr, CENTER: gl.constexpr,
    EARLY: gl.constexpr, SHARED: gl.constexpr,
    AT: gl.constexpr, RAW: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """As :func:`kvfold.kernels.paged._fold.fold_pieces_kernel`; AT: bytes to the keys' metadata and sign words, and to the
    values' codes, metadata and sign words."""
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
    base = shared_base(gl.program_id(0), W * (STAGE if STAGE > MEET else MEET))
    base0 = lane * 0 + base
    if EARLY:
        wait_for_previous(lane)
        launch_dependents(lane)
    prefetch((item_list + 8 * (gl.program_id(0) // (heads * columns))).to(gl.int64) + lane * 0)
    tasks = gl.load(items_ptr + seqs) * heads * columns
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        item = task // (heads * columns)
        head = task // columns % heads
        column0 = task % columns * (8 * NT)
        place = item_list + 8 * item
        seq = gl.load(place)
        lo = gl.load(place + 1) * 4
        hi = gl.minimum(gl.load(place + 2) * 4, gl.load(place + 3) // 32)
        count = gl.load(place + 6)
        following = item_list + 8 * (gl.minimum(task + gl.num_programs(0), tasks - 1) // (heads * columns))
        prefetch(following.to(gl.int64) + lane * 0)
        stored = (region.to(gl.int64) + head.to(gl.int64) * head_step, AT[0], AT[1], AT[2], AT[3], AT[4])
        steps = (page_step, gl.load(place + 4) // 32)
        row0 = gl.load(place + 5).to(gl.int64) * q_token + head * (rows // tokens) * D
        slot0 = (item + raw_parts * (seq + 1)).to(gl.int64) * heads + head
        varlen = (q_token, tokens, count)
        asked = asked_queries(q_ptr, lane, row0, column0, rows, varlen, D, NT)
        top, out, side = attend_blocks(
            base0, lane, thread, warp, lo, hi, stored, head * 0, table + seq.to(gl.int64) * table_step, steps,
            asked, q_ptr, q_ptr, row0, column0, rows, scale * LOG2E, varlen,
            D, K_BITS, K_AXIS, K_MODE, K_GROUP, V_BITS, V_AXIS, V_MODE, V_GROUP, NT, NB, False, CENTER, False,
        )  # fmt: skip
        first = gl.load(following + 1) + warp * ((gl.load(following + 2) - gl.load(following + 1) + W - 1) // W)
        prefetch((table + gl.load(following).to(gl.int64) * table_step + first).to(gl.int64))
        _finish(
            base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, False, D, NT, CARRIED
        )
        program_sync(lane)
        if RAW:
            arrive(
                counters, query_start, seq_lens, before_ptr, items_ptr, part_out, part_top, part_sum, out_ptr, out_token,
                out_head, sinks, seq, head, heads, rows, tokens, task % columns, columns, raw_parts, D, NT, HAS_SINKS,
            )  # fmt: skip
    if RAW:
        lengths = (query_start, seq_lens, before_ptr, sink_ptr, packed_ptr, items_ptr)
        keys = (window_k, wk_block, wk_place, wk_head)
        values = (window_v, wv_block, wv_place, wv_head)
        attend_windows(
            base, base0, lane, warp, q_ptr, q_token, lengths, (keys, values, window_table, window_step), tasks,
            seqs, raw_parts, heads, rows, tokens, columns, part_out, part_top, part_sum,
            (counters, out_ptr, out_token, out_head, sinks), scale * LOG2E, D, NT, BF16, RAW, HAS_SINKS,
        )  # fmt: skip
