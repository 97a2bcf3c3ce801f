# mypy: ignore-errors
"""The Triton code of :mod:`kvfold.kernels.dense.decode`."""

import triton
import triton.language as tl


# tl.max and tl.sum were compiled when Triton was imported; these can be interpreted as well
@triton.jit
def _row_max(x):
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def _row_sum(x):
    return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def _attend(
    q, keys, values, slot, live, sees, factor, state,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Go on with tokens in slots ``slot`` [N] of ``keys``, ``values`` [slots, D]. What is not ``live`` [N] is never read, what
    is not ``sees`` [M, N] does not count. ``state``: maxima and sums [M], weighted sums of values [M, DP]."""
    top, total, acc = state
    channel = tl.arange(0, DP)
    mask = live[:, None]
    if D < DP:
        mask = mask & (channel < D)[None, :]
    at = slot[:, None] * D + channel[None, :]
    k = tl.load(keys + at, mask=mask, other=0.0)
    score = tl.dot(q, tl.trans(k)) * factor
    score = tl.where(sees, score, float("-inf"))
    new = tl.maximum(top, _row_max(score))
    p = tl.exp2(score - new[:, None])
    before = tl.exp2(top - new)
    v = tl.load(values + at, mask=mask, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * before[:, None])
    return new, total * before + _row_sum(p), acc


@triton.jit(
    do_not_specialize=[
        "heads", "rows", "row_blocks", "tokens", "start", "held", "room", "sinks", "slots", "splits", "part", "parts"
    ]
)  # fmt: skip
def dense_kernel(
    q_ptr, keys, values, packed_len_ptr,
    sink_k, sink_v, ring_k, ring_v, sink_len_ptr, recent_len_ptr,
    part_out, part_top, part_sum,
    factor, heads, rows, row_blocks, tokens, start, held, room, sinks, slots, splits, part, parts,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOWS: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of M query rows of one KV head of one sequence over one split of a span, or over the windows.

    Grid: (batch * heads * row_blocks, splits), and with WINDOWS one more in the second dimension: the first programs attend
    to the windows, where the call's ``tokens`` are the newest, and write part ``part``; splits follow. The span holds tokens
    ``start`` to ``start + held`` of every sequence's packed part; from one KV head's storage to the next are ``room`` tokens.
    ``factor`` is the scale times log2(e). DP is D padded to a power of two.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) // row_blocks
    batch = head // heads
    row = tl.program_id(0) % row_blocks * M + tl.arange(0, M)
    channel = tl.arange(0, DP)
    inside = (row < rows)[:, None] & (channel < D)[None, :]
    q = tl.load(q_ptr + (head.to(tl.int64) * rows + row)[:, None] * D + channel[None, :], mask=inside, other=0.0)
    packed_len = tl.load(packed_len_ptr + batch).to(tl.int32)

    top = tl.full([M], -1.0e30, tl.float32)  # finite, so that differences are never NaN
    total = tl.full([M], 0.0, tl.float32)
    acc = tl.full([M, DP], 0.0, tl.float32)
    index = tl.program_id(1)
    if WINDOWS and index == 0:
        sink_len = tl.load(sink_len_ptr + batch).to(tl.int32)
        recent_len = tl.load(recent_len_ptr + batch).to(tl.int32)
        query = sink_len + packed_len + recent_len - tokens + row % tokens  # positions
        base = head.to(tl.int64) * sinks * D
        for first in tl.range(0, sinks, N, num_stages=1):
            slot = first + tl.arange(0, N)
            live = slot < sink_len
            sees = live[None, :] & (slot[None, :] <= query[:, None])
            top, total, acc = _attend(
                q, sink_k + base, sink_v + base, slot, live, sees, factor, (top, total, acc), D, DP
            )
        base = head.to(tl.int64) * slots * D
        for first in tl.range(0, slots, N, num_stages=1):
            slot = first + tl.arange(0, N)
            age = slot - packed_len % slots
            age = tl.where(age < 0, age + slots, age)
            live = (age < recent_len) & (slot < slots)
            sees = live[None, :] & ((sink_len + packed_len + age)[None, :] <= query[:, None])
            top, total, acc = _attend(
                q, ring_k + base, ring_v + base, slot, live, sees, factor, (top, total, acc), D, DP
            )
    else:
        used = tl.minimum(packed_len - start, held)
        tiles = (tl.maximum(used, 0) + N - 1) // N
        each = (tiles + splits - 1) // splits
        begin = (index - (1 if WINDOWS else 0)) * each
        end = tl.minimum(begin + each, tiles)
        base = head.to(tl.int64) * room * D
        for tile in tl.range(begin, end, num_stages=STAGES):
            first = base + tile * (N * D)
            slot = tl.arange(0, N)
            live = slot < used - tile * N
            top, total, acc = _attend(
                q, keys + first, values + first, slot, live, live[None, :], factor, (top, total, acc), D, DP
            )

    to = (head.to(tl.int64) * parts + part + index) * rows + row
    tl.store(part_top + to, top, mask=row < rows)
    tl.store(part_sum + to, total, mask=row < rows)
    tl.store(part_out + to[:, None] * D + channel[None, :], acc, mask=inside)
