# mypy: ignore-errors
"""Tokens in full precision (sink, ring) in the fused kernels."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import ONES, _kind, _replace, _two, _zero4, query_at
from kvfold.kernels.common._softmax import LOG2E, _finish, _nothing, _rescale, _softmax
from kvfold.kernels.common._warp import high_halves, load_global4, load_pair, low_halves, mma, pack_half2

ONES_BF16 = gl.constexpr(0x3F803F80)


@gluon.jit
def _window_slot(slot, sink_len, packed_len, recent_len, sinks, slots):
    """Of a slot of [sink | ring]: whether it holds a token, and the token's position in its sequence."""
    ring = slot - sinks
    age = ring - packed_len % slots
    age = gl.where(age < 0, age + slots, age)
    in_sink = slot < sinks
    valid = gl.where(in_sink, slot < sink_len, (age < recent_len) & (ring < slots))
    position = gl.where(in_sink, slot, sink_len + packed_len + age)
    return valid, position


@gluon.jit
def _row_address(sink, ring, slot, head, sinks, slots, bytes_per_row):
    ring_slot = gl.minimum(gl.maximum(slot - sinks, 0), slots - 1)
    sink_slot = gl.maximum(gl.minimum(slot, sinks - 1), 0)
    in_ring = ring + (head.to(gl.int64) * slots + ring_slot) * bytes_per_row
    in_sink = sink + (head.to(gl.int64) * sinks + sink_slot) * bytes_per_row
    return gl.where(slot < sinks, in_sink, in_ring)


@gluon.jit
def _dense(
    lane, warp, tile, head, q_ptr, row0, column0, rows, tokens, sink_k, sink_v, ring_k, ring_v, sinks, slots,
    sink_len, packed_len, recent_len, factor, top, before, before_side, D: gl.constexpr, NT: gl.constexpr, BF16: gl.constexpr,
    LIFT: gl.constexpr,
):  # fmt: skip
    """16 slots of the sink and recent windows per warp, after those of which the sums are given."""
    g = lane // 4
    t = lane % 4
    first = (tile * gl.num_warps() + warp) * 16
    total = sink_len + packed_len + recent_len
    valid0, position0 = _window_slot(first + g, sink_len, packed_len, recent_len, sinks, slots)
    valid1, position1 = _window_slot(first + g + 8, sink_len, packed_len, recent_len, sinks, slots)
    k0 = _row_address(sink_k, ring_k, first + g, head, sinks, slots, 2 * D)
    k1 = _row_address(sink_k, ring_k, first + g + 8, head, sinks, slots, 2 * D)
    v = ()
    for i in gl.static_range(4):
        slot = first + value_row(t, i)
        valid, _position = _window_slot(slot, sink_len, packed_len, recent_len, sinks, slots)
        v = v + ((_row_address(sink_v, ring_v, slot, head, sinks, slots, 2 * D), valid),)
    return attend_raw(
        lane, ((k0, valid0, position0), (k1, valid1, position1)), v, q_ptr, row0, column0, rows, None, total - tokens, tokens,
        factor, top, before, before_side, D, NT, BF16, LIFT,
    )  # fmt: skip


@gluon.jit
def value_row(t, i: gl.constexpr):
    """Which of 16 tokens a lane reads values of, for ``i`` from 0 to 3."""
    return 2 * t + i % 2 + 8 * (i // 2)


@gluon.jit
def attend_raw(
    lane, keys, values, q_ptr, row0, column0, rows, varlen, newest, tokens, factor, top, before, before_side,
    D: gl.constexpr, NT: gl.constexpr, BF16: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """16 raw tokens per warp, after those of which the sums are given.

    ``keys``: of tokens ``lane // 4`` and 8 after it, the address, whether there is one, and its position; ``values``: the first
    two, of the four tokens that :func:`value_row` names. The call's first token has position ``newest``; for ``varlen`` see
    :func:`kvfold.kernels.common._registers.query_at`.
    """
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    k0 = keys[0][0] + t * 16
    k1 = keys[1][0] + t * 16
    valid0 = keys[0][1]
    valid1 = keys[1][1]
    k = ()
    for c in gl.static_range(D // 32):
        k = k + load_global4(k0 + 64 * c, valid0.to(gl.int32)) + load_global4(k1 + 64 * c, valid1.to(gl.int32))
    # values: rows of the fragment are channels in the order 16 g + (2 tile + half), so that a lane reads 32 adjacent bytes
    v = ()
    for i in gl.static_range(4):
        address = values[i][0] + g * (D // 4)
        words = ()
        for c in gl.static_range(D // 64):
            words = words + load_global4(address + 16 * c, values[i][1].to(gl.int32))
        v = v + (words,)
    # contraction order is free as long as both operands agree: a lane takes 8 adjacent channels of every 32
    KIND: gl.constexpr = _kind(q_ptr.dtype.element_ty)
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    q = ()
    for n in gl.static_range(NT):
        address, live = query_at(q_ptr, row0, column0 + n * 8 + g, rows, t * 8, varlen, D, SIZE)
        for c in gl.static_range(D // 32):
            if KIND == (1 if BF16 else 0):
                q = q + load_global4(address + 32 * c * SIZE, live)
            else:
                for i in gl.static_range(4):
                    low, high = load_pair(address + (32 * c + 2 * i) * SIZE, live, KIND)
                    q = q + (pack_half2(low, high, BF16),)
    accs = ()
    for _n in gl.static_range(NT):
        accs = accs + (_zero4(lane),)
    for c in gl.static_range(D // 32):
        for n in gl.static_range(NT):
            q0, q1 = _two(q, (n * (D // 32) + c) * 2)
            q2, q3 = _two(q, (n * (D // 32) + c) * 2 + 1)
            x = mma(k[8 * c], k[8 * c + 4], k[8 * c + 1], k[8 * c + 5], q0, q1, accs[n], BF16)
            x = mma(k[8 * c + 2], k[8 * c + 6], k[8 * c + 3], k[8 * c + 7], q2, q3, x, BF16)
            accs = _replace(accs, n, x)
    scores = ()
    never = _zero4(lane)[0] - float("inf")
    for n in gl.static_range(NT):
        x = ()
        for e in gl.static_range(4):
            # rows of a KV head are [query head, token]; the tokens are the newest of the sequence
            query = newest + (column0 + n * 8 + 2 * t + e % 2) % tokens
            if e < 2:
                sees = valid0 & (keys[0][2] <= query)
            else:
                sees = valid1 & (keys[1][2] <= query)
            x = x + (gl.where(sees, accs[n][e] * factor, never),)
        scores = scores + (x,)
    top, scaled, p = _softmax(scores, top, 1, NT, BF16, LIFT)
    before = _rescale(before, scaled, CT, NT)
    before_side = _rescale(before_side, scaled, 1, NT)
    one = lane * 0
    if BF16:
        one = one + ONES_BF16
    else:
        one = one + ONES
    out = ()
    side = ()
    for n in gl.static_range(NT):
        for ct in gl.static_range(CT):
            a0 = low_halves(v[0][ct], v[1][ct])
            a1 = high_halves(v[0][ct], v[1][ct])
            a2 = low_halves(v[2][ct], v[3][ct])
            a3 = high_halves(v[2][ct], v[3][ct])
            out = out + (mma(a0, a1, a2, a3, p[2 * n], p[2 * n + 1], before[n * CT + ct], BF16),)
        side = side + (mma(one, one, one, one, p[2 * n], p[2 * n + 1], before_side[n], BF16),)
    return top, out, side


@gluon.jit
def attend_windows(
    base0, lane, warp, first, splits, head, batch, column0, rows, tokens, q_ptr, dense, sinks, slots, packed_len, lens,
    scale, to, at, parts, D: gl.constexpr, BF16: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """Attention over a head's windows, every one of ``splits`` tiles from number ``first`` on. ``dense``: addresses of sink and
    ring, keys and values of each; ``lens``: of sink and recent tokens; ``to``: where parts go, as number ``at``."""
    W: gl.constexpr = gl.num_warps()
    sink_len = gl.load(lens[0] + batch)
    recent_len = gl.load(lens[1] + batch)
    row0 = head.to(gl.int64) * rows
    top, out, side = _nothing(lane, D // 16, 1)
    for tile in range(first, (sinks + slots + 16 * W - 1) // (16 * W), splits):
        top, out, side = _dense(
            lane, warp, tile, head, q_ptr, row0, column0, rows, tokens, dense[0], dense[1], dense[2], dense[3], sinks, slots,
            sink_len, packed_len, recent_len, scale * LOG2E, top, out, side, D, 1, BF16, LIFT,
        )  # fmt: skip
    slot0 = head.to(gl.int64) * parts + at
    _finish(base0, lane, warp, top, out, side, to[0], to[1], to[2], slot0, column0, rows, True, D, 1, LIFT)
