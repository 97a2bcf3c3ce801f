# mypy: ignore-errors
"""The Triton code of :mod:`kvfold.kernels.dense.encode`."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import HALF_MAX, HUGE
from kvfold.kernels.common._encode_step import _advance, _append, _blocks_due

UNIT = tl.constexpr(32)


@triton.jit
def _copied(source, target, D: tl.constexpr):
    """Copy tokens, at ``source`` [n, 1], to ``target`` [n, 1], within the range of what is stored."""
    channel = tl.arange(0, triton.next_power_of_2(D))[None, :]
    mask = channel < D
    x = tl.load(source + channel, mask=mask, other=0.0).to(tl.float32)
    limit = HALF_MAX if target.dtype.element_ty == tl.float16 else HUGE
    x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))  # NaN stays
    tl.store(target + channel, x.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["heads", "room", "first", "begin", "slots"])
def _copy_kernel(
    source, stride_b, stride_h, stride_t, rows, target, heads, room, first, begin, slots,
    D: tl.constexpr, PICKED: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """A unit of tokens of one head of one sequence into packed storage. Grid: (units, heads, batch).

    From one head's storage to the next are ``room`` tokens, and the first one goes to place ``first``. With RING the source is
    a ring of ``slots``, and the first token is number ``begin`` of its sequence; with PICKED, sequences of the storage, and of
    the ring, are ``rows``.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(rows + batch).to(tl.int64) if PICKED else batch
    token = tl.program_id(0) * UNIT + tl.arange(0, UNIT)[:, None]
    to = target + ((row * heads + head) * room + first + token) * D
    if RING:
        batch = row
        token = (begin + token) % slots
    at = source + batch * stride_b + head.to(tl.int64) * stride_h + token.to(tl.int64) * stride_t
    _copied(at, to, D)


@triton.jit
def _side(new, windows, target, place, lengths, first, room, D: tl.constexpr, NEW: tl.constexpr):
    """Close the blocks of a head that are due, then write its new tokens to the windows.

    ``new``: pointer and strides. ``windows``: sink, its slots, ring, its slots. ``place``: sequence, head, heads. ``lengths``:
    in all, packed, tokens due, new ones.
    """
    _, _, ring, slots = windows
    batch, head, heads = place
    length, packed, due, count = lengths
    lane = batch.to(tl.int64) * heads + head
    for at in tl.range(0, due, UNIT, num_stages=1):
        token = packed + at + tl.arange(0, UNIT)[:, None]
        _copied(ring + (lane * slots + token % slots) * D, target + (lane * room + token - first) * D, D)
    if NEW > 0:
        _append(new, windows, batch, head, lane, length, count, NEW, D)


@triton.jit(do_not_specialize=["tokens", "heads", "sinks", "recent", "slots", "first_block", "blocks"])
def _step_kernel(
    key, k_stride_b, k_stride_h, k_stride_t, k_stride_c, value, v_stride_b, v_stride_h, v_stride_t, v_stride_c,
    sink_k, sink_v, ring_k, ring_v, keys, values, total_len, packed_len, sink_len, recent_len, ticket,
    tokens, heads, sinks, recent, slots, first_block, blocks,
    BLOCK: tl.constexpr, D: tl.constexpr, NEW: tl.constexpr, ADVANCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (2 heads, batch); even programs take keys, odd ones values."""
    if EARLY:  # what attends begins after this kernel's end: its programs are to find empty multiprocessors
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0) // 2
    batch = tl.program_id(1)
    length = tl.load(total_len + batch).to(tl.int32)
    packed = tl.load(packed_len + batch).to(tl.int32)
    due = _blocks_due(length, packed, sinks, recent, first_block, blocks, BLOCK) * BLOCK
    place = (batch, head, heads)
    lengths = (length, packed, due, tokens)
    first, room = first_block * BLOCK, blocks * BLOCK
    if tl.program_id(0) % 2 == 0:
        new = (key, k_stride_b, k_stride_h, k_stride_t, k_stride_c)
        _side(new, (sink_k, sinks, ring_k, slots), keys, place, lengths, first, room, D, NEW)
    else:
        new = (value, v_stride_b, v_stride_h, v_stride_t, v_stride_c)
        _side(new, (sink_v, sinks, ring_v, slots), values, place, lengths, first, room, D, NEW)
    if ADVANCE:
        after = length + (tokens if NEW > 0 else 0)
        _advance(
            total_len, packed_len, sink_len, recent_len, ticket, batch, 2 * heads, after, packed + due, sinks
        )  # fmt: skip
