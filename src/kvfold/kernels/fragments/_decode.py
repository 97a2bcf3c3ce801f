# mypy: ignore-errors
"""Decode attention over pages in tensor-core order, affine groups beside a page's means and norms (InnerQ) or signs of a sketch
(QJL): the Gluon kernel.

:mod:`kvfold.kernels.fragments.decode` launches it. As in :mod:`kvfold.kernels.fold._decode` a stage is a page of 128 tokens,
packed codes are the first operand of ``mma.m16n8k16``, and a page's statistics go into the query. What a code stands for is
what differs (:mod:`kvfold.kernels.fragments._codes`):

* Affine groups are multiplied as in :mod:`kvfold.kernels.affine._decode`; sums of the query belong to a page.
* Signs of a sketch are uniform codes of one bit, whose middle is half of the query's sum. The query goes through the sketch's
  matrix once for two pages (:mod:`kvfold.kernels.fragments._queries`).
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._keys import _scores_accumulator
from kvfold.kernels.affine._values import _values_accumulator, _values_operand, _whole_values
from kvfold.kernels.common._registers import _zero4, ask_queries
from kvfold.kernels.common._softmax import LOG2E, _finish, _nothing, _rescale, _softmax
from kvfold.kernels.common._tables import _dynamic_base, _fetch_rows, reserved
from kvfold.kernels.common._warp import (
    copy_commit,
    copy_wait,
    launch_dependents,
    program_sync,
    shared_base,
    wait_for_previous,
    warp_sync,
)
from kvfold.kernels.common._warpgroup import show_copies
from kvfold.kernels.common._windows import attend_windows
from kvfold.kernels.fold._rows import finish_rows
from kvfold.kernels.fold._sums import _mean_scores
from kvfold.kernels.fragments._codes import bring_pages, fetch_side
from kvfold.kernels.fragments._layout import _lift, _lightened, column_share, layout, matrix_bytes, shared_bytes
from kvfold.kernels.fragments._queries import (
    _raw_queries,
    column_row,
    group_sums,
    middle_sums,
    norm_words,
    normed_queries,
    page_sums,
    plain_queries,
    projected,
    sum_operands,
)
from kvfold.kernels.fragments._signs import attend_signs, bring_matrix, sign_scores, windows_at


@gluon.jit
def _met(
    base, scratch, far, table, lane, g, t, D: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr, BITS: gl.constexpr,
    MODE: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr, AT: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Queries as codes meet them, and what zero-points or the middle of codes need of them."""
    if KIND == 0:  # with norms: _met_by_groups
        x = plain_queries(far + 16 * D, D)
        return x, group_sums(x, lane, g, t, D, BITS, MODE, GROUP)
    else:
        if NORM:
            norm_words(base, scratch, lane, D, AT, PAIR)
            x = normed_queries(far, scratch, lane, D, PAIR)
        else:
            x = plain_queries(far, D)
        x = projected(table, lane, x, WIDTH, D // 16)
        return x, middle_sums(x, lane, WIDTH, BITS)


@gluon.jit
def _met_by_groups(
    base, scratch, far, lane, g, t, up, D: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr, AT: gl.constexpr,
    MEAN: gl.constexpr, MEAN_AT: gl.constexpr,
):  # fmt: skip
    """As :func:`_met`, for groups of channels with norms; also q . mean of the page, in units of scores."""
    norm_words(base, scratch, lane, D, AT, 1)
    sums, products = page_sums(base, far, scratch, lane, g, D, GROUP, MEAN, MEAN_AT)
    x = normed_queries(far + 16 * D, scratch, lane, D, 1)
    bias = (products[0] * up[0], products[1] * up[1])
    if not MEAN:
        bias = (_zero4(lane)[0], _zero4(lane)[0])
    return x, sum_operands(sums, g, t, D, MODE, GROUP), bias


@gluon.jit
def _nothing_met(
    lane, D: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What :func:`_met` returns, before any page."""
    met = ()
    more = ()
    for _i in gl.static_range(WIDTH // 8):
        met = met + (lane * 0,)
    if KIND == 0 and MODE != 1:
        for _i in gl.static_range(2 * ((D // GROUP + 3) // 4) if MODE == 2 else 2):
            more = more + (lane * 0,)
    if KIND == 2:
        more = (_zero4(lane)[0], _zero4(lane)[0])
    return met, more


@gluon.jit
def _page_bias(base, far, lane, up, D: gl.constexpr, AT: gl.constexpr):
    """q . mean of the page, in units of scores, for a lane's columns."""
    one = _zero4(lane)[0] + 1.0
    products = _mean_scores(far, base, lane, (one,), D, 1, AT, True)
    return products[0] * up[0], products[1] * up[1]


@gluon.jit(
    do_not_specialize=[
        "scale", "heads", "rows", "tokens", "first_token", "capacity", "k_pages", "splits", "sinks", "slots", "parts", "part0",
        "dense_splits",
    ],
    do_not_specialize_on_alignment=["columns"],
)  # fmt: skip
def fragments_kernel(
    q_ptr, k_codes, k_meta, k_aux, k_mean, k_norm, k_table, v_codes, v_meta, v_aux, packed_len_ptr,
    sink_k, sink_v, sink_len_ptr, ring_k, ring_v, recent_len_ptr, part_out, part_top, part_sum,
    scale, heads, rows, tokens, columns, first_token, capacity, k_pages, splits, sinks, slots, parts, part0, dense_splits,
    D: gl.constexpr, K: gl.constexpr, K_WIDTH: gl.constexpr, V: gl.constexpr, PAIR: gl.constexpr, NB: gl.constexpr,
    PER: gl.constexpr, BF16: gl.constexpr, EARLY: gl.constexpr, BYTES: gl.constexpr = False, AHEAD: gl.constexpr = False,
    WIDE: gl.constexpr = False, SHARE: gl.constexpr = 1,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for ``8 / column_share`` query rows.

    Grid: (batch * heads * columns, splits + dense_splits); a split writes PAIR parts, of even and of odd pages, or (BYTES,
    products of bytes: see :func:`kvfold.kernels.fragments._signs.attend_signs`) one. AHEAD: the matrix comes nearer while the
    kernel before still runs. Windows are attended to by the programs after splits, each those of up to SHARE heads; or,
    SHARE 0, each split attends to a part of its head's, after its pages, and writes one more. PER stages of NB blocks of 32
    tokens are a page. ``capacity`` counts blocks of a KV head's storage, ``k_pages`` its pages. K and V: (kind, bits, mode,
    group, mean, norm, factor of codes); values have neither means nor norms.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    t = lane % 4
    K_KIND: gl.constexpr = K[0]
    K_BITS: gl.constexpr = K[1]
    V_KIND: gl.constexpr = V[0]
    V_BITS: gl.constexpr = V[1]
    PLACES: gl.constexpr = layout(K, V, D, K_WIDTH, PAIR, NB, WIDE)
    K_AT: gl.constexpr = PLACES[0]
    V_IN: gl.constexpr = PLACES[1]
    V_AT: gl.constexpr = PLACES[2]
    SCRATCH: gl.constexpr = PLACES[3]
    STAGE: gl.constexpr = PLACES[4]
    V_SCALES: gl.constexpr = V_IN[0]
    LIFT: gl.constexpr = _lift(V_KIND, V_BITS)
    PARTS: gl.constexpr = 1 if BYTES else PAIR
    SHARED: gl.constexpr = column_share(PAIR)
    ROOM: gl.constexpr = shared_bytes(K, V, D, K_WIDTH, PAIR, NB, W, WIDE)
    MATRIX: gl.constexpr = matrix_bytes(D, K_WIDTH, WIDE)
    memory = ()
    if WIDE:
        memory = reserved(thread, ROOM)
        base0 = _dynamic_base(lane) + MATRIX
        program_sync(lane)
    else:
        base0 = shared_base(lane, ROOM)

    split = gl.program_id(1)
    column0 = (gl.program_id(0) % columns) * (8 // SHARED)
    head = gl.program_id(0) // columns
    batch = head // heads
    if WIDE:  # no kernel before this one writes it
        if split < splits:
            _fetch_rows(base0 - MATRIX, k_table.to(gl.int64), thread, MATRIX, W)
            copy_commit(lane)
    elif BYTES and AHEAD:
        bring_matrix(k_table.to(gl.int64), thread, 2 * D * K_WIDTH)
    if EARLY:
        wait_for_previous(lane)
        launch_dependents(lane)
    packed_len = gl.load(packed_len_ptr + batch)
    row0 = head.to(gl.int64) * rows
    asked = ()
    if WIDE or not BYTES:  # before the first pages: loads come back in order
        asker = column_row(column0, g, 2 if BYTES else SHARED, BYTES)
        asked = ask_queries(q_ptr, t, row0, asker, gl.where(split < splits, rows, 0), None, D)

    dense = (sink_k.to(gl.int64), sink_v.to(gl.int64), ring_k.to(gl.int64), ring_v.to(gl.int64))
    lens = (sink_len_ptr, recent_len_ptr)
    to = (part_out, part_top, part_sum)
    if split >= splits:
        at = part0 + (PARTS - 1) * splits + split
        if SHARE == 1:
            attend_windows(
                base0, lane, warp, split - splits, dense_splits, head, batch, column0, rows, tokens, q_ptr, dense, sinks, slots,
                packed_len, lens, scale, to, at, parts, D, BF16, LIFT,
            )  # fmt: skip
        elif SHARE > 1:
            jobs = gl.num_programs(0)
            step = (jobs + SHARE - 1) // SHARE
            own = gl.program_id(0)
            count = gl.where(own < jobs - step, 0, own // step + 1)  # the first ones have nothing to do, and make room
            for i in range(count):
                job = own - i * step
                program_sync(lane)
                sequence = job // columns // heads
                attend_windows(
                    base0, lane, warp, split - splits, dense_splits, job // columns, sequence, job % columns * (8 // SHARED),
                    rows, tokens, q_ptr, dense, sinks, slots, gl.load(packed_len_ptr + sequence), lens, scale, to, at, parts, D,
                    BF16, LIFT,
                )  # fmt: skip
    elif BYTES:
        blocks = gl.minimum(gl.maximum(packed_len - first_token, 0) // 32, capacity)
        pages = (blocks + PER * NB - 1) // (PER * NB)
        k_stored = (k_codes.to(gl.int64), k_meta.to(gl.int64), k_mean.to(gl.int64), k_norm.to(gl.int64))
        v_stored = (v_codes.to(gl.int64), v_meta.to(gl.int64))
        if WIDE:
            lo = pages * split // splits
            hi = pages * (split + 1) // splits
            bring_pages(
                base0, lane, warp, lo, hi, pages, blocks, (k_stored, v_stored), head * capacity,
                head * k_pages, D, K, K_WIDTH, V, PLACES, NB, PER, PAIR, True,
            )  # fmt: skip
        else:
            lo = (pages.to(gl.int64) * split // splits).to(gl.int32)
            hi = (pages.to(gl.int64) * (split + 1) // splits).to(gl.int32)
        far = base0 + W * STAGE + lane * 8
        if WIDE:
            up = _raw_queries(asked, far, t, scale * LOG2E, D, 8, _lightened(K), K_BITS)
        else:
            row = column_row(column0, g, 2, True)
            own = ask_queries(q_ptr, t, row0, row, rows, None, D)
            up = _raw_queries(own, far, t, scale * LOG2E, D, 8, _lightened(K), K_BITS)
        if WIDE:
            copy_wait(lane, 2)  # the matrix, and norms
            show_copies(lane)
        program_sync(lane)
        soon = ()
        if SHARE == 0:
            soon = windows_at(lane, warp + split, head, dense, sinks, slots, D)
        k_lane = k_table.to(gl.int64) + lane * 16
        if WIDE:
            k_lane = base0 - MATRIX
        best, out, side = attend_signs(
            base0, lane, warp, lo, hi, pages, blocks, (k_stored, v_stored),
            head * capacity, head * k_pages, k_lane, far, up[0], soon, D, K, K_WIDTH, V, PLACES, NB, PER, LIFT, PAIR, WIDE,
        )  # fmt: skip
        program_sync(lane)
        slot0 = head.to(gl.int64) * parts + (part0 + split)
        sums = ()
        for c in gl.static_range(CT):
            sums = sums + (out[c][0], out[c][2])
        finish_rows(
            base0, lane, warp, (best - LIFT,), sums, (side[0][2],), lane, part_out, part_top, part_sum, slot0, column0, rows, D,
            0, 1,
        )  # fmt: skip
        if SHARE == 0:
            program_sync(lane)
            attend_windows(
                base0, lane, warp, split, splits, head, batch, column0, rows, tokens, q_ptr, dense, sinks, slots, packed_len,
                lens, scale, to, part0 + splits + split, parts, D, BF16, LIFT,
            )  # fmt: skip
    else:
        # pages of this split, then of this warp: contiguous, so that every warp streams
        blocks = gl.minimum(gl.maximum(packed_len - first_token, 0) // 32, capacity)
        pages = (blocks + PER * NB - 1) // (PER * NB)
        lo = (pages.to(gl.int64) * split // splits).to(gl.int32)
        hi = (pages.to(gl.int64) * (split + 1) // splits).to(gl.int32)
        each = (hi - lo + W - 1) // W
        first = lo + warp * each
        count = gl.minimum(hi - first, each) * PER
        start = first * (PER * NB)
        base = base0 + warp * STAGE
        scratch = base + SCRATCH
        block0 = head * capacity
        k_page0 = head * k_pages
        kc = k_codes.to(gl.int64)
        km = k_meta.to(gl.int64)
        ka = k_aux.to(gl.int64)
        kp = k_mean.to(gl.int64)
        kn = k_norm.to(gl.int64)
        vc = v_codes.to(gl.int64)
        vm = v_meta.to(gl.int64)
        va = v_aux.to(gl.int64)
        k_lane = k_table.to(gl.int64) + lane * 16
        left = gl.where(count > 0, blocks - start, 0)
        norms = gl.where(count > 0, pages - first, 0)
        NORMS: gl.constexpr = PAIR * K[5]
        fetch_side(
            base, lane, kc, km, ka, kp, kn, block0 + start, k_page0 + first, left, left, norms, K_AT, K_KIND, D, K_WIDTH,
            K_BITS, K[2], K[3], K[4], NORMS, NB, 0,
        )  # fmt: skip
        copy_commit(lane)
        fetch_side(
            base, lane, vc, vm, va, vc, vc, block0 + start, 0, left, 0, 0, V_IN, V_KIND, D, D, V_BITS, V[2], V[3], False, 0, NB,
            V_AT,
        )  # fmt: skip
        copy_commit(lane)

        far = base0 + W * STAGE + lane * 8
        up = _raw_queries(asked, far, t, scale * LOG2E, D, 8, _lightened(K), K_BITS)
        UNIT: gl.constexpr = K[6] * 16777216.0
        code_factor = (up[0] * UNIT, up[1] * UNIT)
        program_sync(lane)
        met, more = _nothing_met(lane, D, K_WIDTH, K_KIND, K[2], K[3])
        if not K[5]:  # what codes meet is the same for all pages
            met, more = _met(
                base, scratch, far, k_lane, lane, g, t, D, K_WIDTH, K_KIND, K_BITS, K[2], K[3], False, 0, PAIR
            )
        top, out, side = _nothing(lane, CT, 1)
        shared_page = t // 2  # of two pages, the one that a lane's columns count for
        bias = (_zero4(lane)[0], _zero4(lane)[0])

        for i in range(each * PER):
            ahead = i + 1
            left = gl.where(i < count, blocks - (start + i * NB), 0)
            next_block = start + ahead * NB
            next_page = first + ahead // PER
            next_left = gl.where(ahead < count, blocks - next_block, 0)
            next_stats = gl.where(ahead % PER == 0, next_left, 0)
            next_norms = gl.where((ahead < count) & (ahead % (PER * PAIR) == 0), pages - next_page, 0)
            copy_wait(lane, 1)  # keys of this stage
            if K[5]:
                if K_KIND == 0:
                    if i % PER == 0:
                        met, more, bias = _met_by_groups(
                            base, scratch, far, lane, g, t, up, D, K[2], K[3], K_AT[3], K[4], K_AT[2]
                        )
                elif PER * PAIR == 1:
                    met, more = _met(
                        base, scratch, far, k_lane, lane, g, t, D, K_WIDTH, K_KIND, K_BITS, K[2], K[3], True, K_AT[3], 1
                    )
                else:
                    if i % (PER * PAIR) == 0:
                        met, more = _met(
                            base, scratch, far, k_lane, lane, g, t, D, K_WIDTH, K_KIND, K_BITS, K[2], K[3], True, K_AT[3],
                            PAIR,
                        )  # fmt: skip
            if K[4] and (K_KIND != 0 or not K[5]):
                if PER == 1:
                    bias = _page_bias(base, far, lane, up, D, K_AT[2])
                else:
                    if i % PER == 0:
                        bias = _page_bias(base, far, lane, up, D, K_AT[2])
            seen = bias
            if PAIR == 2:
                hidden = gl.where(shared_page == i // PER % 2, 0.0, float("-inf"))
                seen = (bias[0] + hidden, bias[1] + hidden)
            if K_KIND == 0:
                extra = ()
                for j in gl.static_range(NB):
                    hidden = gl.where(left > j, 0.0, float("-inf"))
                    extra = extra + (seen[0] + hidden, seen[1] + hidden)
                scores = _scores_accumulator(
                    base, lane, met, more, code_factor, extra, D, K_BITS, K[2], K[3], 1, NB, 0, K_AT[0], K_AT[1]
                )
            else:
                scores = sign_scores(base, lane, met, more, seen, code_factor, left, K_WIDTH, K_BITS, NB)
            warp_sync(lane)
            fetch_side(
                base, lane, kc, km, ka, kp, kn, block0 + next_block, k_page0 + next_page, next_left, next_stats, next_norms,
                K_AT, K_KIND, D, K_WIDTH, K_BITS, K[2], K[3], K[4], NORMS, NB, 0,
            )  # fmt: skip
            copy_commit(lane)
            top, factor, p = _softmax(scores, top, 2 * NB, 1, False, LIFT)
            out = _rescale(out, factor, CT, 1)
            side = _rescale(side, factor, 1, 1)
            copy_wait(lane, 1)  # values of this page
            if V_KIND == 0:
                out, side = _values_operand(base, lane, p, out, side, D, V_BITS, V[3], 1, NB, V_AT, V_AT + V_SCALES)
            else:
                out, side = _values_accumulator(
                    base, lane, p, out, side, D, V_BITS, V[2], 1, NB, V_AT, V_AT + V_SCALES, V_AT + V_IN[1]
                )
            warp_sync(lane)
            fetch_side(
                base, lane, vc, vm, va, vc, vc, block0 + next_block, 0, next_left, 0, 0, V_IN, V_KIND, D, D, V_BITS, V[2], V[3],
                False, 0, NB, V_AT,
            )  # fmt: skip
            copy_commit(lane)

        copy_wait(lane, 0)
        out = _whole_values(out, side, lane, D, V_BITS, int(V_KIND == 0), V[2], V[3], 1)
        program_sync(lane)
        slot0 = head.to(gl.int64) * parts + (part0 + PAIR * split)
        if SHARED == 2:
            slots_of_lanes = slot0 + shared_page * (PAIR - 1)
            columns_of_lanes = column0 - 4 * shared_page
            _finish(
                base0, lane, warp, top, out, side, part_out, part_top, part_sum, slots_of_lanes, columns_of_lanes, rows,
                False, D, 1, LIFT,
            )  # fmt: skip
        else:
            _finish(
                base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, False, D, 1, LIFT
            )
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
