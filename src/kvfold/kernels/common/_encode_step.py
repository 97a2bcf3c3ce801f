# mypy: ignore-errors
"""A decode step's share of encoding: it closes blocks that are due, writes new tokens, and advances lengths on the device."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_tile import _encode_tile
from kvfold.kernels.common._encode_words import _tile_out


@triton.jit
def _close_and_append(
    new,
    windows,
    stored,
    state,
    rope,
    boundary,
    place,
    lengths,
    BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDARY: tl.constexpr,
    WARPS: tl.constexpr,
):
    """One side (keys or values) of one head of one sequence.

    ``new``: pointer and strides; ``windows``: sink and its slots, ring and its slots; ``stored``: codes, metadata, 32 bits
    of each group, first block, blocks; ``rope``: frequencies, first positions, half, factor; ``place``: sequence, head,
    heads; ``lengths``: in all, packed, blocks due, new tokens.
    """
    _, _, ring, slots = windows
    codes, meta, aux, first_block, blocks = stored
    frequencies, first_position, half, factor = rope
    batch, head, heads = place
    length, packed, due, count = lengths
    lane = batch.to(tl.int64) * heads + head
    for i in range(0, due * (BLOCK // T)):
        first = packed + i * T
        out = (lane * blocks - first_block) * (BLOCK // T) + first // T
        may_be_asym = (first // BLOCK + 1) * BLOCK <= tl.load(boundary + batch) if BOUNDARY else True
        position = tl.load(first_position + batch) + first if ROPE else 0
        _encode_tile(
            (ring + lane * slots * D, D, 1, first, slots),
            (state[0] + lane * D, state[1] + lane * D, state[1], state[2] + lane * ((D - WIDTH) * (D - WIDTH))),
            (frequencies, position, half, factor),
            _tile_out(codes, meta, aux, out, T, D, G, AXIS, MODE, BITS),
            may_be_asym,
            T,
            D,
            G,
            AXIS,
            MODE,
            BITS,
            VALUE,
            MEAN,
            NORM,
            False,
            ROPE,
            WIDTH,
            True,
            WARPS,
        )
    if NEW > 0:
        _append(new, windows, batch, head, lane, length, count, NEW, D)


@triton.jit
def _append(new, windows, batch, head, lane, length, count, NEW: tl.constexpr, D: tl.constexpr):
    """Write ``count`` new tokens of a sequence of ``length`` to its windows."""
    tokens, stride_b, stride_h, stride_t, stride_c = new
    sink_window, sinks, ring, slots = windows
    tl.debug_barrier()  # the slots that new tokens take may be those just read
    j = tl.arange(0, NEW)[:, None]
    c = tl.arange(0, triton.next_power_of_2(D))[None, :]
    real = (j < count) & (c < D)
    at = tokens + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + j * stride_t + c * stride_c
    token = tl.load(at, mask=real, other=0.0).to(ring.dtype.element_ty)
    to = length + j
    tl.store(sink_window + (lane * sinks + to) * D + c, token, mask=real & (to < sinks))
    slot = tl.maximum(to - sinks, 0) % slots
    tl.store(ring + (lane * slots + slot) * D + c, token, mask=real & (to >= sinks))


@triton.jit
def _blocks_due(length, packed, sinks, recent, first_block, blocks, BLOCK: tl.constexpr):
    """Whole blocks older than the recent window; never past the end of the storage."""
    due = tl.maximum(length - sinks - recent - packed, 0) // BLOCK
    return tl.maximum(tl.minimum(due, first_block + blocks - packed // BLOCK), 0)


@triton.jit
def _advance(total_len, packed_len, sink_len, recent_len, ticket, batch, programs, after, closed, sinks):
    """All ``programs`` of a sequence have read its lengths; the last one to get here advances them for the next launch."""
    tl.debug_barrier()
    if tl.atomic_add(ticket + batch, 1) == programs - 1:
        tl.store(total_len + batch, after.to(total_len.dtype.element_ty))
        tl.store(packed_len + batch, closed.to(packed_len.dtype.element_ty))
        tl.store(sink_len + batch, tl.minimum(after, sinks))
        tl.store(recent_len + batch, tl.maximum(after - sinks, 0) - closed)
        tl.store(ticket + batch, 0)


@triton.jit(do_not_specialize=["tokens", "first_block"])
def _step_kernel(
    key,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    k_stride_c,
    value,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    v_stride_c,
    sink_k,
    sink_v,
    ring_k,
    ring_v,
    k_codes,
    k_meta,
    k_aux,
    v_codes,
    v_meta,
    v_aux,
    mean,
    norm,
    update,
    inv_freq,
    first_position,
    half,
    rope_factor,
    boundary,
    counts,
    total_len,
    packed_len,
    sink_len,
    recent_len,
    ticket,
    tokens,
    heads,
    sinks,
    recent,
    slots,
    first_block,
    blocks,
    BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    CLOSE: tl.constexpr,
    ADVANCE: tl.constexpr,
    COUNTS: tl.constexpr,
    D: tl.constexpr,
    KT: tl.constexpr,
    KG: tl.constexpr,
    K_AXIS: tl.constexpr,
    K_MODE: tl.constexpr,
    K_BITS: tl.constexpr,
    VT: tl.constexpr,
    VG: tl.constexpr,
    V_AXIS: tl.constexpr,
    V_MODE: tl.constexpr,
    V_BITS: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDARY: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (2 heads, batch); even programs take keys, odd ones values."""
    if EARLY:  # what attends begins after this kernel's end: its programs are to find empty multiprocessors
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0) // 2
    batch = tl.program_id(1)
    length = tl.load(total_len + batch).to(tl.int32)
    packed = tl.load(packed_len + batch).to(tl.int32)
    count = tl.load(counts + batch).to(tl.int32) if COUNTS else tokens
    due = 0
    if CLOSE:
        due = _blocks_due(length, packed, sinks, recent, first_block, blocks, BLOCK)
    state = (mean, norm, update)
    rope = (inv_freq, first_position, half, rope_factor)
    place = (batch, head, heads)
    lengths = (length, packed, due, count)
    if tl.program_id(0) % 2 == 0:
        _close_and_append(
            (key, k_stride_b, k_stride_h, k_stride_t, k_stride_c),
            (sink_k, sinks, ring_k, slots),
            (k_codes, k_meta, k_aux, first_block, blocks),
            state,
            rope,
            boundary,
            place,
            lengths,
            BLOCK,
            NEW,
            KT,
            D,
            KG,
            K_AXIS,
            K_MODE,
            K_BITS,
            False,
            MEAN,
            NORM,
            ROPE,
            WIDTH,
            BOUNDARY,
            WARPS,
        )
    else:
        _close_and_append(
            (value, v_stride_b, v_stride_h, v_stride_t, v_stride_c),
            (sink_v, sinks, ring_v, slots),
            (v_codes, v_meta, v_aux, first_block, blocks),
            state,
            rope,
            boundary,
            place,
            lengths,
            BLOCK,
            NEW,
            VT,
            D,
            VG,
            V_AXIS,
            V_MODE,
            V_BITS,
            True,
            False,
            False,
            False,
            0,
            BOUNDARY,
            WARPS,
        )
    if ADVANCE:
        _advance(
            total_len,
            packed_len,
            sink_len,
            recent_len,
            ticket,
            batch,
            2 * heads,
            length + (count if NEW > 0 else 0),
            packed + due * BLOCK,
            sinks,
        )
