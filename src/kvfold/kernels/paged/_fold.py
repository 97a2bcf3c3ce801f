# mypy: ignore-errors
"""Pieces of pages of uniform codes (fold), by a table: the loop of :func:`kvfold.kernels.fold._decode.attend_pages`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._softmax import LOG2E, _finish
from kvfold.kernels.common._warp import launch_dependents, prefetch, program_sync, shared_base, wait_for_previous
from kvfold.kernels.fold._bytes import ask_rows
from kvfold.kernels.fold._codebook import held_rows, leave_rows, tables_bytes, with_tables
from kvfold.kernels.fold._codes import shared_bytes
from kvfold.kernels.fold._decode import attend_pages, tile_signs
from kvfold.kernels.fold._rows import attend_rows, finish_rows, rotation_signs, row_bytes
from kvfold.kernels.fold._sums import ask_tiles
from kvfold.kernels.paged._arrive import arrive
from kvfold.kernels.paged._raw import attend_windows


@gluon.jit
def _prefetch_next(following, table, table_step, warp):
    """Bring the numbers of the next task's first pages nearer."""
    W: gl.constexpr = gl.num_warps()
    first = gl.load(following + 1) + warp * ((gl.load(following + 2) - gl.load(following + 1) + W - 1) // W)
    prefetch((table + gl.load(following).to(gl.int64) * table_step + first).to(gl.int64))


@gluon.jit(
    do_not_specialize=["scale", "heads", "rows", "tokens", "seqs", "raw_parts"],
    do_not_specialize_on_alignment=["columns"],
)
def fold_pieces_kernel(
    q_ptr, q_token, items_ptr, item_list, table, table_step,
    query_start, seq_lens, before_ptr, sink_ptr, packed_ptr,
    window_k, wk_block, wk_place, wk_head, window_v, wv_block, wv_place, wv_head, window_table, window_step,
    region, page_step, head_step, k_signs, v_signs, k_rows, v_rows,
    part_out, part_top, part_sum, counters, out_ptr, out_token, out_head, sinks,
    scale, heads, rows, tokens, columns, seqs, raw_parts,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_MEAN: gl.constexpr, K_NORM: gl.constexpr, K_MIX: gl.constexpr,
    V_BITS: gl.constexpr, V_MEAN: gl.constexpr, V_MIX: gl.constexpr, SAME: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, FAR: gl.constexpr, BF16: gl.constexpr, EARLY: gl.constexpr,
    BYTES: gl.constexpr, K_WORDS: gl.constexpr, V_WORDS: gl.constexpr, AT: gl.constexpr, RAW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Any number of programs; each takes every so many-th (piece, KV head, ``8 NT`` query rows).

    ``region``: where pages' bytes lie, from the keys' codes on; AT: bytes from there to the keys' scale, mean and norms, and to
    the values' codes, scale and mean. ``page_step`` and ``head_step``: bytes from a page, and from a head, to the next. Query
    heads lie together, ``q_token`` elements from a token to the next. RAW: tokens of a window block where raw tokens are read,
    too, which lie in the windows, the step's own among them, and the program that writes the last part of a row merges them
    all; 0: neither. EARLY: as in the slab's kernel.
    """
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    memory = ()
    BYTES_OF: gl.constexpr = (
        row_bytes(D, K_BITS, K_MEAN, K_NORM, V_BITS, V_MEAN, NB, W, K_WORDS, BYTES)
        if BYTES
        else shared_bytes(D, K_BITS, K_MEAN, K_NORM, V_BITS, V_MEAN, NT, NB, FAR, W, K_WORDS, V_WORDS)
    )
    if K_WORDS or V_WORDS:
        memory, base = with_tables(gl.program_id(0), thread, BYTES_OF, K_WORDS, V_WORDS)
        held = held_rows(thread, k_rows, v_rows, K_WORDS, V_WORDS)
        leave_rows(
            lane * 0 + base - tables_bytes(K_WORDS, V_WORDS), thread, held, K_WORDS, V_WORDS
        )  # others are shown them
    else:
        base = shared_base(gl.program_id(0), BYTES_OF)
    base0 = lane * 0 + base
    if BYTES:
        signs = rotation_signs(k_signs, v_signs, lane, D, K_MIX, V_MEAN, V_MIX)
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
        lo = gl.load(place + 1)
        hi = gl.load(place + 2)
        blocks = gl.load(place + 3) // 32
        count = gl.load(place + 6)
        following = item_list + 8 * (gl.minimum(task + gl.num_programs(0), tasks - 1) // (heads * columns))
        prefetch(following.to(gl.int64) + lane * 0)
        stored = (region.to(gl.int64) + head.to(gl.int64) * head_step, AT[0], AT[1], AT[2], AT[3], AT[4], AT[5])
        steps = (page_step, gl.load(place + 4) // 32)
        row0 = gl.load(place + 5).to(gl.int64) * q_token + head * (rows // tokens) * D
        slot0 = (item + raw_parts * (seq + 1)).to(gl.int64) * heads + head
        slots = (part_out, part_top, part_sum, slot0, column0, rows)
        varlen = (q_token, tokens, count)
        numbers = table + seq.to(gl.int64) * table_step
        if BYTES:
            asked = ask_rows(q_ptr, lane, warp, row0, column0, rows, varlen, D, 4 * BYTES)
            top, out, total = attend_rows(
                base0, lane, warp, lo, hi, blocks, stored, None, numbers, steps, asked, scale * LOG2E, signs[0], signs[1],
                D, K_BITS, K_MEAN, K_NORM, K_MIX, V_BITS, V_MEAN, V_MIX, NB, K_WORDS, V_WORDS, BYTES, (),
            )  # fmt: skip
            _prefetch_next(following, table, table_step, warp)
            finish_rows(base0, lane, warp, top, out, total, signs[2], *slots, D, V_BITS, V_MIX, V_WORDS)
        else:
            # made anew for each task, or registers would hold them while windows are read
            signs = tile_signs(k_signs, v_signs, lane, D, K_MIX, V_MEAN, V_MIX, SAME, V_WORDS)
            asked = ask_tiles(q_ptr, lane, row0, column0, rows, varlen, D, NT)
            top, out, total = attend_pages(
                base0, lane, warp, lo, hi, blocks, stored, None, numbers, steps,
                asked, scale * LOG2E, signs[0], signs[1], v_signs,
                D, K_BITS, K_MEAN, K_NORM, K_MIX, V_BITS, V_MEAN, V_MIX, SAME, NT, NB, FAR, K_WORDS, V_WORDS, (),
            )  # fmt: skip
            _prefetch_next(following, table, table_step, warp)
            side = ()
            for n in gl.static_range(NT):
                side = side + ((total[2 * n], total[2 * n + 1], total[2 * n], total[2 * n + 1]),)  # noqa: RUF005
            _finish(base0, lane, warp, top, out, side, *slots, False, D, NT, 0)
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
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
