# mypy: ignore-errors
"""Decode attention over pages of uniform codes (fold): the Gluon kernel. :mod:`kvfold.kernels.fold.decode` launches it.

As in :mod:`kvfold.kernels.affine._decode`, a warp computes ``S^T = K q^T`` and ``O^T = V^T P^T`` with ``mma.m16n8k16``, packed
codes being the first operand as subnormal fp16 pairs. What is new is that a stage is a page of 128 tokens, which is read from
its own bytes:

* Keys. The query is multiplied by the page's norms and turned by the Hadamard rotation: 16 channels at a time by one MMA whose
  first operand is the 16 x 16 Hadamard matrix (four registers, made once), then by sums and differences of such tiles. Scores
  begin at ``-o sum(q)``, so that codes need no zero-point; the scale of a token multiplies its score, and the page's mean adds
  ``q . mean``, one more MMA per 16 channels.
* Values. The scale of a token multiplies its probability. Sums of a page begin at ``(sum of p) mean - o (sum of w)``, in the
  rotated basis, and join those before in fp32; they are turned back once, at the end.
* Probabilities carry a power of two that follows the page's largest scale, so that small values keep their digits.

Either side may have codes into a fixed table instead of uniform ones (WORDS, of a row, not 0):
:mod:`kvfold.kernels.fold._codebook`. Tables then lie before the stages.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import scale_at
from kvfold.kernels.common._hadamard import hadamard, sign_bits, turned_back
from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._softmax import LIFT, LOG2E, _finish, _nothing, _probabilities
from kvfold.kernels.common._warp import (
    as_float,
    copy_commit,
    copy_wait,
    launch_dependents,
    program_sync,
    shared_base,
    store_shared2,
    store_shared4,
    wait_for_previous,
    warp_sync,
)
from kvfold.kernels.common._windows import _dense
from kvfold.kernels.fold._bytes import ask_rows
from kvfold.kernels.fold._codebook import (
    ROWS,
    held_rows,
    in_tiles,
    leave_rows,
    lookup_matrix,
    lookup_scores,
    lookup_values,
    row_signs,
    tables_bytes,
    with_tables,
)
from kvfold.kernels.fold._codes import fetch_page, mean_at, norm_at, page_bytes, page_place, shared_bytes, stage_bytes
from kvfold.kernels.fold._rows import attend_rows, finish_rows, rotation_signs, row_bytes
from kvfold.kernels.fold._sums import (
    _mean_scores,
    _norm_words,
    _page_scores,
    _page_values,
    _raw_queries,
    _room,
    _turned_queries,
    ask_tiles,
)

# ---- pages, one after the other -------------------------------------------------------------------------------------


@gluon.jit
def attend_pages(
    base0, lane, warp, lo, hi, blocks, stored, place, table, steps, asked, to_log2, k_sign, v_sign, v_signs,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_MEAN: gl.constexpr, K_NORM: gl.constexpr, K_MIX: gl.constexpr,
    V_BITS: gl.constexpr, V_MEAN: gl.constexpr, V_MIX: gl.constexpr, SAME: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, FAR: gl.constexpr, K_WORDS: gl.constexpr, V_WORDS: gl.constexpr,
    held,
):  # fmt: skip
    """Attention of ``8 NT`` query rows over pages ``lo`` to ``hi``, which the program's warps share; of ``blocks`` blocks the
    scores count. All warps are done with shared memory at the end.

    In a slab, ``stored`` are the addresses of both sides' fields, and ``place`` says where the head's storage begins: first
    block, first page of keys and of values. With a ``table``, which points to the numbers of pages, ``stored`` is where the
    head's share of page 0 begins, with the keys' codes, and bytes from there to the other fields; ``steps`` are bytes from a
    page to the next, and blocks at the beginning whose scores do not count. ``asked``: the queries, of :func:`ask_tiles`;
    ``to_log2``: the scale times log2(e); signs are those of :func:`tile_signs`.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    V_AT: gl.constexpr = page_bytes(D, K_BITS, NB, K_MEAN, K_NORM)
    K_MEAN_AT: gl.constexpr = mean_at(D, K_BITS, NB)
    K_NORM_AT: gl.constexpr = norm_at(D, K_BITS, NB, K_MEAN)
    SCRATCH: gl.constexpr = V_AT + page_bytes(D, V_BITS, NB, V_MEAN, False)
    STAGE: gl.constexpr = stage_bytes(D, K_BITS, K_MEAN, K_NORM, V_BITS, V_MEAN, NB, V_WORDS)
    g = lane // 4
    t = lane % 4
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    base = base0 + warp * STAGE
    scratch = base + SCRATCH
    left = gl.where(count > 0, blocks - first * NB, 0)
    id = lane * 0
    if table is not None:
        id = gl.load(table + first, mask=count > 0, other=0)
    k_at, k_block, k_page, v_at, v_block, v_page = page_place(stored, place, table, steps, first, id, NB)
    fetch_page(base, lane, k_at[0], k_at[1], k_at[2], k_at[3], k_block, k_page, left, D, K_BITS, K_MEAN, K_NORM, NB, 0)
    copy_commit(lane)
    fetch_page(
        base, lane, v_at[0], v_at[1], v_at[2], v_at[3], v_block, v_page, left, D, V_BITS, V_MEAN, False, NB, V_AT,
        1 if V_WORDS else 0,
    )  # fmt: skip
    copy_commit(lane)
    if table is not None:  # the numbers of pages are a page ahead of their bytes
        id = gl.load(table + first + 1, mask=count > 1, other=0)

    q, up = _raw_queries(asked, to_log2, D, K_MIX)
    if FAR:
        far = base0 + W * STAGE + 512 + lane * 8
        for i in gl.static_range(NT * CT):  # all warps have the same
            store_shared2(far + 256 * i, q[2 * i], q[2 * i + 1])
        q = far
    K_FACTOR: gl.constexpr = (1.0 if K_WORDS else 16777216.0) * K_MIX**-0.5
    code_factor = ()
    for n in gl.static_range(NT):
        code_factor = code_factor + (up[n] * K_FACTOR,)
    # the Hadamard matrix waits in shared memory, which all warps fill alike
    matrix = base0 + W * STAGE + lane * 16
    m = hadamard(g, t, K_MIX if K_MIX > 1 else V_MIX, False)
    store_shared4(matrix, as_float(m[0]), as_float(m[1]), as_float(m[2]), as_float(m[3]))
    k_matrix = matrix
    if K_WORDS:
        k_matrix = matrix + (512 + (NT * D * 16 if FAR else 0))
        m = lookup_matrix(g, t, K_MIX)
        store_shared4(k_matrix, as_float(m[0]), as_float(m[1]), as_float(m[2]), as_float(m[3]))
    k_table = base0 - tables_bytes(K_WORDS, V_WORDS)
    if len(held) > 0:  # tables that are not in shared memory yet
        leave_rows(k_table, lane + 32 * warp, held, K_WORDS, V_WORDS)
    program_sync(lane)
    if not K_NORM:  # what codes meet is the same for all pages
        _norm_words(base, scratch, lane, k_sign, D, False, 0)
        turned, start = _turned_queries(q, scratch, lane, k_matrix, D, K_BITS, K_MIX, NT, FAR, K_WORDS > 0)
    top, out, _side = _nothing(lane, CT, NT)
    total = ()
    for _e in gl.static_range(2 * NT):
        total = total + (_zero4(lane)[0],)

    for i in range(each):
        following = first + i + 1
        left = gl.where(i < count, blocks - (following - 1) * NB, 0)
        next_left = gl.where(i + 1 < count, blocks - following * NB, 0)
        k_at, k_block, k_page, v_at, v_block, v_page = page_place(stored, place, table, steps, following, id, NB)
        skip = None
        if table is not None:
            id = gl.load(table + following + 1, mask=i + 2 < count, other=0)
            skip = steps[1] - (following - 1) * NB
        copy_wait(lane, 1)  # keys of this page
        if K_NORM:
            _norm_words(base, scratch, lane, k_sign, D, True, K_NORM_AT)
            turned, start = _turned_queries(q, scratch, lane, k_matrix, D, K_BITS, K_MIX, NT, FAR, K_WORDS > 0)
        if K_MEAN:
            bias = _mean_scores(q, base, lane, up, D, NT, K_MEAN_AT, FAR)
        else:
            bias = ()
            for _e in gl.static_range(2 * NT):
                bias = bias + (_zero4(lane)[0],)
        if K_WORDS:
            scores = lookup_scores(base, lane, turned, bias, code_factor, left, skip, k_table, D, K_BITS, NT, NB)
        else:
            scores = _page_scores(base, lane, turned, start, bias, code_factor, left, skip, D, K_BITS, NT, NB)
        warp_sync(lane)
        fetch_page(
            base, lane, k_at[0], k_at[1], k_at[2], k_at[3], k_block, k_page, next_left, D, K_BITS, K_MEAN, K_NORM, NB, 0
        )
        copy_commit(lane)
        copy_wait(lane, 1)  # values of this page
        room = _room(base, lane, NB, V_AT + scale_at(D, V_BITS, NB))
        top, factor, p = _probabilities(scores, top, room, 2 * NB, NT)
        if V_WORDS:
            out, total = lookup_values(
                base, scratch, lane, p, total, factor, out, v_sign, matrix, base0 - ROWS, D, V_BITS, V_MEAN, V_MIX, NT, NB,
                V_AT, V_AT + mean_at(D, V_BITS, NB),
            )  # fmt: skip
        else:
            out, total = _page_values(
                base, lane, p, total, factor, out, v_sign, matrix, D, V_BITS, V_MEAN, V_MIX, NT, NB, V_AT
            )
        warp_sync(lane)
        fetch_page(
            base,
            lane,
            v_at[0],
            v_at[1],
            v_at[2],
            v_at[3],
            v_block,
            v_page,
            next_left,
            D,
            V_BITS,
            V_MEAN,
            False,
            NB,
            V_AT,
            1 if V_WORDS else 0,
        )
        copy_commit(lane)

    copy_wait(lane, 0)
    program_sync(lane)
    if V_WORDS:
        out = in_tiles(out, base, lane, D, NT)
        program_sync(lane)
    out = turned_back(out, lane, v_signs, D, 0 if V_WORDS else V_BITS, V_MIX, NT)
    return top, out, total


@gluon.jit
def tile_signs(
    k_signs, v_signs, lane, D: gl.constexpr, K_MIX: gl.constexpr, V_MEAN: gl.constexpr, V_MIX: gl.constexpr, SAME: gl.constexpr,
    V_WORDS: gl.constexpr,
):  # fmt: skip
    """Signs of the rotations as queries meet them, and as means of values do. No kernel before writes them."""
    k_sign = lane * 0
    v_sign = lane * 0
    if K_MIX > 1:
        k_sign = sign_bits(k_signs, lane, D)
    if V_WORDS:
        if V_MEAN:
            v_sign = row_signs(v_signs, lane // 4, lane % 4, D)
    elif SAME:
        v_sign = k_sign
    elif V_MIX > 1:
        v_sign = sign_bits(v_signs, lane, D)
    return k_sign, v_sign


# ---- the kernel -----------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        "scale", "heads", "rows", "tokens", "first_token", "capacity", "k_pages", "v_pages", "sinks", "slots", "splits",
        "dense_splits", "parts", "part0",
    ],
    do_not_specialize_on_alignment=["columns"],
)  # fmt: skip
def pages_kernel(
    q_ptr, k_codes, k_scale, k_mean, k_norm, k_signs, v_codes, v_scale, v_mean, v_signs, k_rows, v_rows,
    packed_len_ptr, sink_k, sink_v, sink_len_ptr, ring_k, ring_v, recent_len_ptr,
    part_out, part_top, part_sum,
    scale, heads, rows, tokens, columns, first_token, capacity, k_pages, v_pages, sinks, slots, splits, dense_splits, parts,
    part0,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_MEAN: gl.constexpr, K_NORM: gl.constexpr, K_MIX: gl.constexpr,
    V_BITS: gl.constexpr, V_MEAN: gl.constexpr, V_MIX: gl.constexpr, SAME: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, FAR: gl.constexpr, BF16: gl.constexpr, EARLY: gl.constexpr, BYTES: gl.constexpr,
    FIRST: gl.constexpr, K_WORDS: gl.constexpr, V_WORDS: gl.constexpr,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for ``8 NT`` query rows.

    Grid and parts are those of :func:`kvfold.kernels.affine._decode.decode_kernel`. A stage is a page: NB blocks of 32 tokens.
    ``k_rows`` and ``v_rows``: repeated rows of tables, where codes are looked up; read whatever the kernel before does.
    ``capacity`` counts blocks of a KV head's storage, ``k_pages`` and ``v_pages`` its pages. MIX is the rotation's block,
    1: none. FAR: the queries lie in shared memory, not in registers. BYTES: sets of four query rows, see
    :func:`attend_rows`; 0: :func:`attend_pages`. FIRST: programs for the
    windows come before the others.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
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
        memory, base0 = with_tables(lane, thread, BYTES_OF, K_WORDS, V_WORDS)
    else:
        base0 = shared_base(lane, BYTES_OF)

    held = held_rows(thread, k_rows, v_rows, K_WORDS, V_WORDS)
    split = gl.program_id(1)
    if FIRST:
        split = gl.where(split < dense_splits, split + splits, split - dense_splits)
    head = gl.program_id(0) // columns
    batch = head // heads
    if BYTES:
        signs = rotation_signs(k_signs, v_signs, lane, D, K_MIX, V_MEAN, V_MIX)
    else:
        signs = tile_signs(k_signs, v_signs, lane, D, K_MIX, V_MEAN, V_MIX, SAME, V_WORDS)
    if EARLY:
        wait_for_previous(lane)
        launch_dependents(lane)
    column0 = (gl.program_id(0) % columns) * (8 * NT)
    packed_len = gl.load(packed_len_ptr + batch)
    row0 = head.to(gl.int64) * rows
    live = gl.where(split < splits, rows, 0)
    if BYTES:
        asked = ask_rows(q_ptr, lane, warp, row0, column0, live, None, D, 4 * BYTES)
    else:
        asked = ask_tiles(q_ptr, lane, row0, column0, live, None, D, NT)
    slot0 = head.to(gl.int64) * parts + (part0 + split)

    if split >= splits:
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
        # pages of this split, then of this warp: contiguous, so that every warp streams
        blocks = gl.minimum(gl.maximum(packed_len - first_token, 0) // 32, capacity)
        pages = (blocks + NB - 1) // NB
        lo = pages * split // splits
        hi = pages * (split + 1) // splits
        stored = (
            (k_codes.to(gl.int64), k_scale.to(gl.int64), k_mean.to(gl.int64), k_norm.to(gl.int64)),
            (v_codes.to(gl.int64), v_scale.to(gl.int64), v_mean.to(gl.int64), v_mean.to(gl.int64)),
        )
        at = (head * capacity, head * k_pages, head * v_pages)
        if BYTES:
            best, sums, total = attend_rows(
                base0, lane, warp, lo, hi, blocks, stored, at, None, None,
                asked, scale * LOG2E, signs[0], signs[1],
                D, K_BITS, K_MEAN, K_NORM, K_MIX, V_BITS, V_MEAN, V_MIX, NB, K_WORDS, V_WORDS, BYTES, held,
            )  # fmt: skip
            finish_rows(
                base0, lane, warp, best, sums, total, signs[2], part_out, part_top, part_sum, slot0, column0, rows,
                D, V_BITS, V_MIX, V_WORDS,
            )  # fmt: skip
        else:
            top, out, total = attend_pages(
                base0, lane, warp, lo, hi, blocks, stored, at, None, None,
                asked, scale * LOG2E, signs[0], signs[1], v_signs,
                D, K_BITS, K_MEAN, K_NORM, K_MIX, V_BITS, V_MEAN, V_MIX, SAME, NT, NB, FAR, K_WORDS, V_WORDS, held,
            )  # fmt: skip
            side = ()
            for n in gl.static_range(NT):
                side = side + ((total[2 * n], total[2 * n + 1], total[2 * n], total[2 * n + 1]),)
            _finish(
                base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, False, D, NT, 0
            )
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
