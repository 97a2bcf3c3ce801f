# mypy: ignore-errors
"""A step's share of storing: new tokens to the windows, and the blocks that they complete, encoded, to their pages."""

import triton
import triton.language as tl

from kvfold.kernels.common._sizes import PAGE
from kvfold.kernels.fold._encode import MEAN, NORM, TILE, _statistics, _tile
from kvfold.kernels.paged.work import _closing


@triton.jit
def _at(stored, steps, page, head, I: tl.constexpr):
    """Where field number I of a page and head begins."""
    return stored[I] + (page * steps[2 * I] + head * steps[2 * I + 1])


@triton.jit
def _close_page(
    source, stored, steps, statistics, signs, update, page, head, begins, start, stop, sink,
    D: tl.constexpr, FORM: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Encode tokens ``start`` to ``stop`` of one page of one side of one head. The statistics are made first where the step
    closes the page from its beginning (``begins``): by every program that closes some of it, which all leave the same.

    ``source`` as :func:`kvfold.kernels.common._encode_tile._tokens_at` takes it, without the first token.
    """
    mean, norm = _at(stored, steps, page, head, 3), _at(stored, steps, page, head, 4)
    fields = (_at(stored, steps, page, head, 0), _at(stored, steps, page, head, 1), _at(stored, steps, page, head, 2))
    if FORM[MEAN] or FORM[NORM] > 0:
        if begins:
            first = start // PAGE * PAGE
            _statistics(_from(source, first), mean, norm, D, FORM, 3, tl.where(first == 0, sink, 0))
        tl.debug_barrier()  # what these threads stored, others read
    for i in tl.range(0, (stop - start) // FORM[TILE], disable_licm=True):
        first = start + i * FORM[TILE]
        _tile(
            _from(source, first), (mean, norm, statistics, update), signs, fields, first % PAGE // FORM[TILE], True,
            D, FORM, VALUE, 3, WARPS, WIDTH,
        )  # fmt: skip


@triton.jit
def _from(source, first):
    """``source`` from token ``first`` on."""
    window, place_step, block_step, new, new_step, before, table, size = source
    return (window, place_step, 1, first, block_step, new, new_step, before, table, size)


@triton.jit
def _append(new, window, token, slot, heads, D: tl.constexpr, H: tl.constexpr, WINDOW_BLOCK: tl.constexpr):
    """Write one token of all heads. ``new``: pointer, strides of tokens and heads; ``window``: of blocks, places, heads."""
    head = tl.arange(0, H)[:, None]
    channel = tl.arange(0, triton.next_power_of_2(D))[None, :]
    real = (head < heads) & (channel < D)
    x = tl.load(new[0] + token * new[1] + head * new[2] + channel, mask=real, other=0.0)
    to = window[0] + slot // WINDOW_BLOCK * window[1] + slot % WINDOW_BLOCK * window[2] + head * window[3] + channel
    tl.store(to, x.to(window[0].dtype.element_ty), mask=real)


@triton.jit
def append_step(appended, query_start, seqs, heads, D: tl.constexpr, H: tl.constexpr, WINDOW_BLOCK: tl.constexpr):
    """A step's tokens to the windows, each by one of the launch's programs; H 0: by another launch.

    ``appended``: new keys, strides of tokens and heads, the same of values; windows of keys, strides of blocks, places and
    heads, the same of values; where tokens go.
    """
    if H > 0:
        zero = tl.full([], 0, tl.int64)
        keys, values = (appended[0], appended[1], appended[2]), (appended[3], appended[4], appended[5])
        to_keys = (appended[6], appended[7], appended[8], appended[9])
        to_values = (appended[10], appended[11], appended[12], appended[13])
        for token in range(tl.program_id(0), tl.load(query_start + seqs), tl.num_programs(0)):
            slot = tl.load(appended[14] + token)
            if slot >= 0:
                _append(keys, to_keys, zero + token, slot, heads, D, H, WINDOW_BLOCK)
                _append(values, to_values, zero + token, slot, heads, D, H, WINDOW_BLOCK)


@triton.jit
def _due(entry, share, shares, seq_lens, before_ptr, close_list, BLOCK: tl.constexpr, SEEN: tl.constexpr):
    """Of an entry of the list of pages to close: its sequence, the page's number, the sequence's tokens before the step,
    whether the step closes the page from its beginning, and which tokens of it a program encodes that has one of ``shares``."""
    seq = tl.load(close_list + 2 * entry).to(tl.int64)
    number = tl.load(close_list + 2 * entry + 1)
    before = tl.load(before_ptr + seq)
    first, last = _closing(before, tl.load(seq_lens + seq), BLOCK, SEEN)
    size = PAGE // shares
    start = tl.maximum(first, number * PAGE + share * size)
    stop = tl.maximum(tl.minimum(last, number * PAGE + share * size + size), start)
    return seq, number, before, first <= number * PAGE, start, stop


@triton.jit(do_not_specialize=["seqs", "heads", "sink"])
def close_pages_kernel(
    new, new_token, new_head, window, w_block, w_place, w_head,
    query_start, seq_lens, window_table, window_step, table, table_step, before_ptr, closes_ptr, close_list,
    stored, steps, signs, norm_table, update, update_step, appended,
    seqs, heads, sink,
    D: tl.constexpr, H: tl.constexpr, FORM: tl.constexpr, VALUE: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, SEEN: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """What :func:`store_kernel` closes of one side, where the other one's encoder is another kernel."""
    append_step(appended, query_start, seqs, heads, D, H, WINDOW_BLOCK)
    zero = tl.full([], 0, tl.int64)
    programs = tl.num_programs(0)
    pages = tl.load(closes_ptr + seqs) * heads
    shares = tl.where(pages * (PAGE // BLOCK) <= programs, PAGE // BLOCK, 1)
    for task in tl.range(tl.program_id(0), pages * shares, programs, disable_licm=True):
        entry = task // shares // heads
        head = zero + task // shares % heads
        seq, number, before, begins, start, stop = _due(
            entry, task % shares, shares, seq_lens, before_ptr, close_list, BLOCK, SEEN
        )
        page = tl.load(table + seq * table_step + number).to(tl.int64)
        begin = tl.load(query_start + seq).to(tl.int64)
        source = (
            window + head * w_head, w_place, w_block, new + begin * new_token + head * new_head, new_token, before,
            window_table + seq * window_step, WINDOW_BLOCK,
        )  # fmt: skip
        matrix = update + (entry * update_step + head * ((D - WIDTH) * (D - WIDTH)))
        _close_page(
            source, stored, steps, norm_table, signs, matrix, page, head, begins, start, stop, sink,
            D, FORM, VALUE, WIDTH, WARPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seqs", "heads", "sink"])
def store_kernel(
    key, k_token, k_head, value, v_token, v_head,
    window_k, wk_block, wk_place, wk_head, window_v, wv_block, wv_place, wv_head,
    query_start, seq_lens, window_table, window_step, table, table_step, before_ptr, closes_ptr, close_list, slots,
    k_stored, k_steps, k_signs, v_stored, v_steps, v_signs, norm_table, update, update_step,
    seqs, heads, sink,
    D: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, SEEN: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Any number of programs; each takes every so many-th token, and page to close of one side of one head.

    Tokens of before the step are read from the windows, those of the step from ``key`` and ``value``: what one program appends
    none reads.
    """
    zero = tl.full([], 0, tl.int64)
    programs = tl.num_programs(0)
    keys, values = (key, k_token, k_head), (value, v_token, v_head)
    windows = (window_k, wk_block, wk_place, wk_head, window_v, wv_block, wv_place, wv_head)
    append_step(keys + values + windows + (slots,), query_start, seqs, heads, D, H, WINDOW_BLOCK)
    # a few pages are shared out block by block, many page by page
    pages = tl.load(closes_ptr + seqs) * heads * 2
    shares = tl.where(pages * (PAGE // BLOCK) <= programs, PAGE // BLOCK, 1)
    # seldom anything: nothing of it is to be made, and kept in registers, before it
    for task in tl.range(tl.program_id(0), pages * shares, programs, disable_licm=True):
        share = task % shares
        side = task // shares % 2
        entry = task // shares // (2 * heads)
        head = zero + task // shares // 2 % heads
        seq, number, before, begins, start, stop = _due(
            entry, share, shares, seq_lens, before_ptr, close_list, BLOCK, SEEN
        )
        page = tl.load(table + seq * table_step + number).to(tl.int64)
        begin = tl.load(query_start + seq).to(tl.int64)
        row = window_table + seq * window_step
        if side == 0:
            source = (
                window_k + head * wk_head, wk_place, wk_block, key + begin * k_token + head * k_head, k_token, before, row,
                WINDOW_BLOCK,
            )  # fmt: skip
            matrix = update + (entry * update_step + head * ((D - WIDTH) * (D - WIDTH)))
            _close_page(
                source, k_stored, k_steps, norm_table, k_signs, matrix, page, head, begins, start, stop, sink,
                D, KEY, False, WIDTH, WARPS,
            )  # fmt: skip
        else:
            source = (
                window_v + head * wv_head, wv_place, wv_block, value + begin * v_token + head * v_head, v_token, before, row,
                WINDOW_BLOCK,
            )  # fmt: skip
            _close_page(
                source, v_stored, v_steps, norm_table, v_signs, update, page, head, begins, start, stop, sink,
                D, VALUE, True, 0, WARPS,
            )  # fmt: skip
