# mypy: ignore-errors
"""Attention over pages in plain Triton: pieces of packed tokens, raw tokens, and both put together.

What is done with a tile is the slab kernels' (:mod:`kvfold.kernels.generic._decode`, :mod:`kvfold.kernels.common.windows`,
:mod:`kvfold.kernels.common.partials`); here is where it lies. Rows of a KV head are its query heads times ``tokens``, tokens
innermost; rows of tokens that a sequence does not have are computed with nothing and left out.
"""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

import triton
import triton.language as tl

from kvfold.kernels.common._sizes import PAGE
from kvfold.kernels.common.partials import merge_parts
from kvfold.kernels.common.windows import tile_at
from kvfold.kernels.generic._decode import attend_tiles, clean_scratch


@triton.jit
def _rows(q, begin, count, head, row, rows, tokens):
    """Pointers to the queries of rows [M], and which there are. ``q``: pointer, strides of tokens and heads; ``begin``: first
    of ``count`` tokens."""
    token = row % tokens
    at = (begin + token).to(tl.int64) * q[1] + (head * (rows // tokens) + row // tokens).to(tl.int64) * q[2]
    return q[0] + at, (row < rows) & (token < count)


@triton.jit(do_not_specialize=["heads", "rows", "row_blocks", "tokens", "seqs"])
def pieces_kernel(
    q_ptr, q_token, q_head, bias_ptr, items_ptr, item_list, table, table_step,
    k_fields, k_steps, k_tables, k_mean, k_norm, k_basis, k_page_steps,
    v_fields, v_steps, v_tables, v_mean, v_norm, v_basis, v_page_steps,
    freq_ptr, table_ptr, part_out, part_top, part_sum, scratch_ptr,
    factor, heads, rows, row_blocks, tokens, seqs,
    K_READ: tl.constexpr, K_SPEC, V_READ: tl.constexpr, V_SPEC,
    D: tl.constexpr, DP: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr, V_OUT: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr,
    K_MEAN: tl.constexpr, K_NORM: tl.constexpr, K_BASIS: tl.constexpr,
    V_MEAN: tl.constexpr, V_NORM: tl.constexpr, V_BASIS: tl.constexpr,
    ROTARY: tl.constexpr, K_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    K_SCRATCH: tl.constexpr, V_SCRATCH: tl.constexpr, K_OF_PAGES: tl.constexpr, V_OF_PAGES: tl.constexpr,
    BY_HEAD: tl.constexpr, K_CENTRED: tl.constexpr, V_CENTRED: tl.constexpr, V_ROWS: tl.constexpr,
):  # fmt: skip
    """Any number of programs; each takes every so many-th (piece, KV head, block of rows).

    ``bias_ptr`` float32 [tokens, query heads], with HAS_BIAS: what a row's scores of packed tokens have in common.
    """
    programs = tl.num_programs(0)
    if K_SCRATCH + V_SCRATCH:
        scratch = clean_scratch(scratch_ptr, tl.program_id(0), K_SCRATCH, V_SCRATCH)
        if K_SCRATCH:
            k_tables = k_tables + (scratch,)
        if V_SCRATCH:
            v_tables = v_tables + (scratch + K_SCRATCH,)
    for task in range(tl.program_id(0), tl.load(items_ptr + seqs) * heads * row_blocks, programs):
        item = task // (heads * row_blocks)
        head = task // row_blocks % heads
        row = task % row_blocks * M + tl.arange(0, M)
        place = item_list + 8 * item
        seq = tl.load(place)
        used = tl.load(place + 3)
        begin = tl.load(place + 1) * (PAGE // T)
        end = tl.minimum(tl.load(place + 2) * (PAGE // T), (used + T - 1) // T)
        q_row, inside = _rows((q_ptr, q_token, q_head), tl.load(place + 5), tl.load(place + 6), head, row, rows, tokens)
        bias = q_row
        if HAS_BIAS:
            bias = _rows((bias_ptr, heads * (rows // tokens), 1), tl.load(place + 5), 0, head, row, rows, tokens)[0]
        slot = ((item + seq + 1).to(tl.int64) * heads + head) * rows + row
        attend_tiles(
            q_row, inside, bias, begin * 0,
            (k_steps, v_steps, k_page_steps, v_page_steps), table + seq.to(tl.int64) * table_step,
            begin, end, tl.load(place + 4), used, head,
            k_fields, k_tables, k_mean, k_norm, k_basis, v_fields, v_tables, v_mean, v_norm, v_basis,
            freq_ptr, table_ptr, part_out, part_top, part_sum, slot, factor,
            K_READ, K_SPEC, V_READ, V_SPEC, D, DP, KW, VW, V_OUT, M, T, K_MEAN, K_NORM, K_BASIS, V_MEAN, V_NORM, V_BASIS,
            ROTARY, K_GROUPS, HAS_BIAS, K_OF_PAGES, V_OF_PAGES, K_CENTRED, V_CENTRED, V_ROWS,
        )  # fmt: skip


@triton.jit
def _slots(window, table, position, live, WINDOW_BLOCK: tl.constexpr):
    """Pointers [N, 1] to raw tokens. ``window``: of a head; strides of blocks and places."""
    block = tl.load(table + position // WINDOW_BLOCK, mask=live, other=0).to(tl.int64)
    return (window[0] + (block * window[1] + (position % WINDOW_BLOCK).to(tl.int64) * window[2]))[:, None]


@triton.jit(do_not_specialize=["factor", "heads", "rows", "tokens"])
def raw_kernel(
    q_ptr, q_token, q_head, query_start, seq_lens, before_ptr, sink_ptr, packed_ptr, items_ptr,
    window_k, wk_block, wk_place, wk_head, window_v, wv_block, wv_place, wv_head, window_table, window_step,
    new_k, k_token, k_head, new_v, v_token, v_head,
    part_out, part_top, part_sum, factor, heads, rows, tokens,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_NEW: tl.constexpr, WINDOW_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """M query rows of one KV head over a sequence's raw tokens. Grid: (blocks of rows, seqs * heads).

    Without new tokens (HAS_NEW) the step's own lie in the windows. ``factor`` is the scale times log2(e).
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1) % heads
    seq = tl.program_id(1) // heads
    before = tl.load(before_ptr + seq)
    after = tl.load(seq_lens + seq)
    row = tl.program_id(0) * M + tl.arange(0, M)
    channel = tl.arange(0, DP)
    begin = tl.load(query_start + seq)
    q_row, inside = _rows((q_ptr, q_token, q_head), begin, after - before, head, row, rows, tokens)
    token = row % tokens
    if after > 0:
        q = tl.load(q_row[:, None] + channel[None, :], mask=inside[:, None] & (channel < D)[None, :], other=0.0)
        top = tl.full([M], -1.0e30, tl.float32)  # finite, so that differences are never NaN
        total = tl.full([M], 0.0, tl.float32)
        acc = tl.full([M, DP], 0.0, tl.float32)
        table = window_table + seq.to(tl.int64) * window_step
        keys = (window_k + head.to(tl.int64) * wk_head, wk_block, wk_place)
        values = (window_v + head.to(tl.int64) * wv_head, wv_block, wv_place)
        sink = tl.load(sink_ptr + seq)
        for i in range(0, sink, N):
            position = i + tl.arange(0, N)
            live = position < sink
            k_at = _slots(keys, table, position, live, WINDOW_BLOCK)
            v_at = _slots(values, table, position, live, WINDOW_BLOCK)
            sees = live[None, :] & inside[:, None]
            top, total, acc = tile_at(q, k_at, v_at, live, sees, channel, factor, top, total, acc, D)
        stop = before if HAS_NEW else tl.minimum(after, before + tokens)
        for i in range(tl.load(packed_ptr + seq), stop, N):
            position = i + tl.arange(0, N)
            live = position < stop
            k_at = _slots(keys, table, position, live, WINDOW_BLOCK)
            v_at = _slots(values, table, position, live, WINDOW_BLOCK)
            sees = live[None, :] & inside[:, None] & (position[None, :] <= (before + token)[:, None])
            top, total, acc = tile_at(q, k_at, v_at, live, sees, channel, factor, top, total, acc, D)
        if HAS_NEW:
            count = tl.minimum(after - before, tokens)  # later ones have no row here
            for i in range(0, count, N):
                at = i + tl.arange(0, N)
                live = at < count
                place = (begin + at).to(tl.int64)
                k_at = (new_k + head.to(tl.int64) * k_head + place * k_token)[:, None]
                v_at = (new_v + head.to(tl.int64) * v_head + place * v_token)[:, None]
                sees = live[None, :] & inside[:, None] & (at[None, :] <= token[:, None])
                top, total, acc = tile_at(q, k_at, v_at, live, sees, channel, factor, top, total, acc, D)
        slot = ((tl.load(items_ptr + seq) + seq).to(tl.int64) * heads + head) * rows + row
        tl.store(part_top + slot, top, mask=inside)
        tl.store(part_sum + slot, total, mask=inside)
        tl.store(part_out + slot[:, None] * D + channel[None, :], acc, mask=inside[:, None] & (channel < D)[None, :])


@triton.jit(do_not_specialize=["heads", "rows", "tokens"])
def merge_pieces_kernel(
    part_out, part_top, part_sum, out, out_token, out_head, sinks, query_start, seq_lens, before_ptr, items_ptr,
    heads, rows, tokens,
    D: tl.constexpr, PART: tl.constexpr, N: tl.constexpr, HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row. Grid: (seqs * heads * rows, pieces of PART channels)."""
    row = tl.program_id(0) % rows
    head = tl.program_id(0) // rows % heads
    seq = tl.program_id(0) // rows // heads
    count = tl.load(seq_lens + seq) - tl.load(before_ptr + seq)
    token = row % tokens
    items = tl.load(items_ptr + seq)
    parts = tl.load(items_ptr + seq + 1) - items + 1
    begin = tl.load(query_start + seq)
    if EARLY:  # what was read so far is older than the kernel before
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if token < count:
        first = ((items + seq).to(tl.int64) * heads + head) * rows + row
        query_head = head * (rows // tokens) + row // tokens
        to = (begin + token).to(tl.int64) * out_token + query_head.to(tl.int64) * out_head
        channel = tl.program_id(1) * PART + tl.arange(0, PART)
        merge_parts(
            part_out, part_top, part_sum, out + to, sinks + query_head, first, heads * rows,
            parts, channel, D, PART, N, HAS_SINKS,
        )  # fmt: skip
