# mypy: ignore-errors
"""Pieces of pages whose tables of codes lie in shared memory (CommVQ, TaSQ's keys with fold's values), by a table of pages: the
loops of :mod:`kvfold.kernels.commvq._decode` and :mod:`kvfold.kernels.learned._decode`."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._softmax import _finish
from kvfold.kernels.common._tables import _dynamic_base, _fetch_rows, fetch_turns, reserved
from kvfold.kernels.common._warp import as_float, copy_commit, load_global4, program_sync
from kvfold.kernels.commvq._decode import attend_units as attend_sums
from kvfold.kernels.commvq._decode import shared_bytes as sums_bytes
from kvfold.kernels.commvq._steps import head_bytes, kept_bytes
from kvfold.kernels.fold._rows import join_rows, turn_signs
from kvfold.kernels.learned._decode import attend_pages, fetch_tables
from kvfold.kernels.learned._scores import KEYS
from kvfold.kernels.learned._scores import shared_bytes as learned_bytes


@gluon.jit
def _piece(item_list, item, warp, W: gl.constexpr):
    """Sequence of a piece; a warp's share of its units: number of the first, of every warp's, of its own; where the step's
    tokens begin, and their number."""
    place = item_list + 8 * item
    lo = gl.maximum(gl.load(place + 1) * 4, gl.load(place + 4) // 32)
    hi = gl.minimum(gl.load(place + 2) * 4, gl.load(place + 3) // 32)
    each = (gl.maximum(hi - lo, 0) + W - 1) // W
    first = lo + warp * each
    return gl.load(place), first, each, gl.minimum(hi - first, each), gl.load(place + 5), gl.load(place + 6)


@gluon.jit(do_not_specialize=["scale", "heads", "rows", "tokens", "seqs"])
def learned_keys_pieces_kernel(
    q_ptr, q_token, items_ptr, item_list, table, table_step, region, page_step, head_step,
    k_rows_ptr, v_rows_ptr, freq_ptr, turns_ptr, k_mean_ptr, signs_ptr, part_out, part_top, part_sum,
    scale, heads, rows, tokens, seqs,
    V: gl.constexpr, MIX: gl.constexpr, CENTRED: gl.constexpr, C: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Any number of programs; each takes every so many-th piece and KV head, and C query rows, 4 or 8, at a time.

    ``region``: where pages' bytes lie, from the keys' codes on; AT: bytes from there to the keys' norms, and to the values'
    codes, norms and means. ``page_step`` and ``head_step``: bytes from a page, and from a head, to the next. Query heads lie
    together, ``q_token`` elements from a token to the next. The rest is the slab kernel's.
    """
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, learned_bytes(V, C, W))
    base = _dynamic_base(lane)
    zero = gl.program_id(0) * 0
    columns = (rows + C - 1) // C
    for task in range(gl.program_id(0), gl.load(items_ptr + seqs) * heads * columns, gl.num_programs(0)):
        item = zero + task // (heads * columns)
        head = zero + task // columns % heads
        column0 = zero + task % columns * C
        place = item_list + 8 * item
        seq = gl.load(place)
        lo = gl.maximum(gl.load(place + 1) * 4, gl.load(place + 4) // 32)
        hi = gl.minimum(gl.load(place + 2) * 4, gl.load(place + 3) // 32)
        pages = gl.maximum((hi + 3) // 4 - lo // 4, 0)
        each = (pages + W - 1) // W
        count = gl.minimum(pages - warp * each, each)
        program_sync(lane)
        k_rows = k_rows_ptr.to(gl.int64) + head.to(gl.int64) * KEYS
        fetch_tables(base, k_rows, v_rows_ptr.to(gl.int64), turns_ptr.to(gl.int64), thread, W, V)
        copy_commit(lane)
        at = region.to(gl.int64) + head.to(gl.int64) * head_step
        where = (table + seq.to(gl.int64) * table_step, page_step)
        start = gl.load(place + 5).to(gl.int64) * q_token
        q = (q_ptr + (start + head * (rows // tokens) * 128), (q_token, tokens, gl.load(place + 6)))
        attend_pages(
            base, lane, warp, q, column0, rows, scale, freq_ptr, zero,
            (at, at + AT[0], at + AT[1], at + AT[2], at + AT[3]), where, lo // 4 + warp * each, each, count, lo, hi,
            k_mean_ptr + head * 128, signs_ptr, V, MIX, CENTRED, C,
        )  # fmt: skip
        slot0 = (item + seq + 1).to(gl.int64) * heads + head
        signs = turn_signs(signs_ptr, lane // 4, lane % 4)
        join_rows(base, lane, warp, signs, part_out, part_top, part_sum, slot0, column0, rows, 128, MIX, C)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()


@gluon.jit
def _load_again(address):
    """Words that this program has stored."""
    return gl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _turned(sums, matrix, part_sum, to, thread, rows, V: gl.constexpr, C: gl.constexpr):
    """Turn C rows of sums of bits [V] into values, by a head's ``matrix`` [V + 1, 128]; halves of the program share them."""
    EACH: gl.constexpr = C // 2
    channel = thread % 128
    row0 = thread // 128 * EACH
    at = sums.to(gl.int64) + row0.to(gl.int64) * (4 * V)
    column = matrix + channel
    acc = ()
    for _i in gl.static_range(EACH):
        acc = acc + (channel.to(gl.float32) * 0.0,)
    for k in range(0, V, 4):
        m = ()
        for j in gl.static_range(4):
            m = m + (gl.load(column + (k + j) * 128),)
        new = ()
        for i in gl.static_range(EACH):
            x = load_global4(at + (i * 4 * V) + k * 4, channel * 0 + 1)
            total = acc[i]
            for j in gl.static_range(4):
                total = gl.fma(as_float(x[j]), m[j], total)
            new = new + (total,)
        acc = new
    whole = gl.load(column + V * 128)
    for i in gl.static_range(EACH):
        row = row0 + i
        weight = as_float(_load_again(part_sum.to(gl.int64) + gl.minimum(row, rows - 1) * 4))
        gl.store(to + (row * 128 + channel), gl.fma(whole, weight, acc[i]), mask=row < rows)


@gluon.jit(do_not_specialize=["scale", "heads", "rows", "tokens", "seqs"])
def codebook_pieces_kernel(
    q_ptr, q_token, items_ptr, item_list, table, table_step, region, page_step, head_step,
    rows_ptr, size_ptr, freq_ptr, turns_ptr, matrix_ptr, part_out, part_top, part_sum, sums_ptr,
    scale, heads, rows, tokens, seqs, STAGES: gl.constexpr, V: gl.constexpr, C: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """As :func:`learned_keys_pieces_kernel`, with at most C query rows; AT: bytes to norms and bits.

    Sums of bits become values before they are stored, by ``matrix_ptr``, float32 [heads, V + 1, 128]; ``sums_ptr``, float32
    [programs, 8, V], has room for them.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = sums_bytes(STAGES, V, C, W)
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, BYTES)
    base = _dynamic_base(lane)
    turns = base + kept_bytes(STAGES)
    program = gl.program_id(0).to(gl.int64)
    own_sums = sums_ptr + program * (8 * V)
    zero = gl.program_id(0) * 0
    for task in range(gl.program_id(0), gl.load(items_ptr + seqs) * heads, gl.num_programs(0)):
        item = zero + task // heads
        head = zero + task % heads
        seq, first, each, count, begin, own = _piece(item_list, item, warp, W)
        tables = rows_ptr.to(gl.int64) + head.to(gl.int64) * head_bytes(STAGES)
        program_sync(lane)
        fetch_turns(turns, turns_ptr, thread, lane, W, True)
        _fetch_rows(base, tables, thread, kept_bytes(STAGES), W)
        copy_commit(lane)
        stored = region.to(gl.int64) + head.to(gl.int64) * head_step
        where = (table + seq.to(gl.int64) * table_step, page_step)
        q = (q_ptr + (begin.to(gl.int64) * q_token + head * (rows // tokens) * 128), (q_token, tokens, own))
        top, out, side = attend_sums(
            base, turns, lane, warp, q, zero, rows, scale * gl.load(size_ptr + head), freq_ptr, first * 32,
            (stored, stored + AT[0], stored + AT[1]), tables, first, where, each, count, STAGES, V, C,
        )  # fmt: skip
        slot0 = (item + seq + 1).to(gl.int64) * heads + head
        _finish(
            base, lane, warp, top, out, side, own_sums + slot0 * rows * (0 - V), part_top, part_sum, slot0, zero, rows, True, V,
            1, -9.0,
        )  # fmt: skip
        program_sync(lane)
        matrix = matrix_ptr + head * ((V + 1) * 128)
        to = part_out + slot0 * rows * 128
        _turned(own_sums, matrix, part_sum + slot0 * rows, to, thread, rows, V, C)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
