# mypy: ignore-errors
"""A step's share of storing where vectors are encoded one by one (codes of learned codebooks, rotated groups): one side of all
heads, unit by unit."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_nearest import SLOTS
from kvfold.kernels.common._encode_words import _log2
from kvfold.kernels.common._sizes import PAGE
from kvfold.kernels.paged._encode_books import additive_tile, binary_tile, group_tile, residual_tile
from kvfold.kernels.paged._store import append_step
from kvfold.kernels.paged.work import _closing
from kvfold.kernels.searched._tiles import rotated_tile


@triton.jit(do_not_specialize=["seqs", "heads"])
def close_kernel(
    new, new_token, new_head, window, w_block, w_place, w_head,
    query_start, seq_lens, window_table, window_step, table, table_step, before_ptr, closes_ptr, close_list,
    codes, codes_page, codes_head, scale, scale_page, scale_head, tables, frequencies, factor, scratch,
    appended, seqs, heads,
    FORM: tl.constexpr, H: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Any number of programs; each takes every so many-th share of a unit of 32 tokens that the step completes, and token for
    the windows (:func:`kvfold.kernels.paged._store.append_step`).

    FORM: 0 and head_dim, vector, codes, stages, whether strided; 1 and head_dim, stages, levels, rotary channels, levels at a
    time, how many choices, and three stages where they turn back; 2 and head_dim, codes, flips, hidden units of a network; 3
    and head_dim, vector, codes, whether strided, how scales are fitted, whether a mean is taken off, codes at a time, whether
    there are maps; 4 and head_dim, bits, channels that are rotated together. Of ROPE channels RoPE's rotation is taken back.
    """
    D: tl.constexpr = FORM[1]
    # programs that share a unit
    PARTS: tl.constexpr = FORM[1] // FORM[2] if FORM[0] == 0 else 1 if FORM[0] > 2 else 2
    UNITS: tl.constexpr = 4  # of a page
    append_step(appended, query_start, seqs, heads, D, H, WINDOW_BLOCK)
    zero = tl.full([], 0, tl.int64)
    pages = tl.load(closes_ptr + seqs)
    for task in tl.range(tl.program_id(0), pages * heads * (UNITS * PARTS), tl.num_programs(0), disable_licm=True):
        # a decode step completes one unit of a page: those are shared out evenly
        part = task % PARTS
        head = zero + task // PARTS % heads
        entry = task // (PARTS * heads) % pages
        unit = task // (PARTS * heads * pages)
        seq = tl.load(close_list + 2 * entry).to(tl.int64)
        number = tl.load(close_list + 2 * entry + 1)
        before = tl.load(before_ptr + seq)
        first, last = _closing(before, tl.load(seq_lens + seq), BLOCK, SEEN)
        position = number * PAGE + unit * 32
        if (position >= first) & (position < last):
            page = tl.load(table + seq * table_step + number).to(tl.int64)
            begin = tl.load(query_start + seq).to(tl.int64)
            source = (
                window + head * w_head, w_place, 1, position, w_block, new + begin * new_token + head * new_head, new_token,
                before, window_table + seq * window_step, WINDOW_BLOCK,
            )  # fmt: skip
            to = codes + (page * codes_page + head * codes_head)
            sizes = scale + (page * scale_page + head * scale_head) + unit * 32
            if FORM[0] == 0:
                place = to + unit * (32 * (D // FORM[2]) * FORM[4])
                residual_tile(
                    source, position, (frequencies, factor), tables, (place, sizes), part,
                    D, FORM[2], FORM[3], FORM[4], FORM[5], ROPE, 3,
                )  # fmt: skip
            elif FORM[0] == 1:
                STAGES: tl.constexpr = FORM[2]
                LEVELS: tl.constexpr = FORM[3]
                place = to + unit * (STAGES * 4 * _log2(LEVELS))
                own = scratch + tl.program_id(0) * (16 * 64)
                of_head = (
                    tables[0] + head * (D * D),
                    tables[1] + head * (STAGES * LEVELS * D),
                    tables[2] + head * (STAGES * LEVELS),
                    tables[3] + head * (STAGES * LEVELS * LEVELS),
                )
                additive_tile(
                    source, position, (frequencies, factor), of_head, (place, sizes), part, own,
                    D, STAGES, LEVELS, FORM[4], FORM[5], FORM[6], FORM[7], FORM[8], FORM[9], ROPE, 3,
                )  # fmt: skip
            elif FORM[0] == 3:
                GROUPS: tl.constexpr = D // FORM[2]
                before_head = head * (GROUPS * FORM[3])  # codes of the heads before
                of_groups = (
                    tables[0] + before_head * SLOTS,
                    tables[1] + before_head,
                    tables[2] + before_head * FORM[2],
                    tables[3] + before_head,
                )
                FIT: tl.constexpr = FORM[5]  # text in a tuple is no constant by itself
                group_tile(
                    source, position, (frequencies, factor), of_groups, tables[4] + head * D,
                    (tables[5] + head * D, tables[6] + head * (D * D)), (to + unit * (32 * GROUPS), sizes),
                    scratch + tl.program_id(0) * (32 * D),
                    D, FORM[2], FORM[3], FORM[4], FIT, FORM[6], FORM[7], FORM[8], ROPE, 3,
                )  # fmt: skip
            elif FORM[0] == 4:
                # scale and zero-point of each of a unit's tokens
                rotated_tile(
                    source, tables[0], to + unit * (4 * D * FORM[2]), sizes + unit * 32, D, FORM[2], FORM[3], 3
                )
            else:
                CODES: tl.constexpr = FORM[2]
                HIDDEN: tl.constexpr = FORM[4]
                # the encoder's four, then what flips need
                if HIDDEN:
                    of_encoder = (
                        tables[0] + head * (D * HIDDEN),
                        tables[1] + head * HIDDEN,
                        tables[2] + head * (HIDDEN * CODES),
                        tables[3] + head * CODES,
                    )
                else:
                    of_encoder = (
                        tables[0] + head * (D * CODES),
                        tables[1] + head * CODES,
                        tables[2] + head * CODES,
                        tables[3] + head * CODES,
                    )
                of_flips = (
                    tables[4] + head * (D * CODES),
                    tables[5] + head * CODES,
                    tables[6] + head * (CODES * CODES),
                )
                binary_tile(
                    source, of_encoder + of_flips, (to + unit * (2 * CODES),), part, D, CODES, FORM[3], HIDDEN, 3
                )
