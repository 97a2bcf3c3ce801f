# mypy: ignore-errors
"""Levels in tensor-core order, some elements in fp16 in their place (KVQuant), unpacked to 16 bits.

As :mod:`kvfold.kernels.long._rotated`, but that operands are multiplied with ones: so their tiles change to eight adjacent
channels of a token in each lane. Elements in fp16 are laid out in a warp's scratch, zeros but for them, and replace what a
lane made. Keys are then rotated as in :mod:`kvfold.kernels.long._tables`.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import code_bytes
from kvfold.kernels.common._registers import ONES, _zero4
from kvfold.kernels.common._stream import load_words4
from kvfold.kernels.common._tables import _dynamic_base, fetch_turns, reserved, rotated_keys
from kvfold.kernels.common._warp import (
    copy_commit,
    copy_wait,
    load_shared,
    mma,
    pack_half2,
    program_sync,
    store_shared2,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fragments._codes import masked_words
from kvfold.kernels.fragments._lookup import _replaced, _seen, load_outlier
from kvfold.kernels.fragments._mixed import _store_short
from kvfold.kernels.long._rotated import KIND_LEVELS, bounded_half2, load_half, operands, store_words4, transposed
from kvfold.kernels.long._tables import FAR, TURNS, _turns_at, leave_turn

PITCH = gl.constexpr(272)
"""Bytes of a token's channels in the scratch: rows begin in different banks."""


@gluon.constexpr_function
def shared_bytes(keys, warps):
    """Bytes of shared memory of a program: cosines and sines, of every warp a position's, and a scratch."""
    size = (TURNS.value if keys else 0) + warps * (FAR.value + 32 * PITCH.value)
    return (size + 1023) // 1024 * 1024


@gluon.jit
def _ones(lane):
    """Second operands that give a lane eight adjacent channels of 32, of which an operand's two tiles hold half each: of each
    tile four times two registers."""
    g = lane // 4
    t = lane % 4
    out = ()
    for e in gl.static_range(2):
        for j in gl.static_range(4):
            channel = 8 * (g // 2) + 2 * j + g % 2
            for h in gl.static_range(2):
                row = 16 * e + 8 * h + 2 * t
                pair = gl.where(row == channel, ONES & 0xFFFF, 0) | gl.where(row + 1 == channel, ONES & -65536, 0)
                out = out + (pair,)
    return out


@gluon.jit
def _outlier_place(scratch, word):
    """Where a block's element lies in the scratch; see :func:`kvfold.kernels.fragments._lookup.load_outlier`."""
    number = word & 0xFFFF
    return scratch + (number >> 7) * PITCH + (number & 127) * 2, (number < 4096).to(gl.int32)


@gluon.jit
def put_unit(
    lane, words, near, far, scratch, constants, ranges, out, BITS: gl.constexpr, TABLE: gl.constexpr,
    VALUE: gl.constexpr, RANGES: gl.constexpr, KEYS: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode 32 tokens. ``words``: a lane's codes; ``near``, ``far``: addresses of cosines and sines; ``constants``: of the
    head's centers and spreads, fp16 [2, 128]; ``ranges``: of the tokens' middles and halves, fp16 [32, 2]."""
    g = lane // 4
    t = lane % 4
    ones = _ones(lane)
    if VALUE:
        words = transposed(words)
    words = masked_words(words, 128, BITS)
    turn = ()
    if KEYS:
        turn = _turns_at(far + t * 16, True)
    for tt in gl.static_range(2):
        x = operands(words, lane, tt, 128, BITS, KIND_LEVELS, TABLE)
        rows = ((), ())
        for i in gl.static_range(4):
            center = ()
            spread = ()
            if not RANGES:
                center = load_words4(constants + t * 16, 64 * i)
                spread = load_words4(constants + t * 16, 256 + 64 * i)
            near_words = ()
            far_words = ()
            for j in gl.static_range(4):
                acc = _zero4(lane)
                for e in gl.static_range(2):
                    a = x[2 * i + e]
                    acc = mma(a[0], a[1], a[2], a[3], ones[8 * e + 2 * j], ones[8 * e + 2 * j + 1], acc, False)
                if not RANGES:
                    c0, c1 = unpack_half2(center[j])
                    s0, s1 = unpack_half2(spread[j])
                    acc = (
                        gl.fma(acc[0], s0, c0),
                        gl.fma(acc[1], s1, c1),
                        gl.fma(acc[2], s0, c0),
                        gl.fma(acc[3], s1, c1),
                    )
                else:
                    at = ranges + (16 * tt + g) * 4
                    m0 = load_half(at)
                    h0 = load_half(at + 2)
                    m1 = load_half(at + 32)
                    h1 = load_half(at + 34)
                    acc = (
                        gl.fma(acc[0], h0, m0),
                        gl.fma(acc[1], h0, m0),
                        gl.fma(acc[2], h1, m1),
                        gl.fma(acc[3], h1, m1),
                    )
                low = pack_half2(acc[0], acc[1], False)
                high = pack_half2(acc[2], acc[3], False)
                if RANGES:  # constants of channels are such that nothing becomes an infinity
                    low = bounded_half2(low)
                    high = bounded_half2(high)
                near_words = near_words + (low,)
                far_words = far_words + (high,)
            rows = (rows[0] + near_words, rows[1] + far_words)
        for r in gl.static_range(2):
            at = g + (16 * tt + 8 * r)
            y = ()
            for i in gl.static_range(4):
                apart = load_shared(scratch + at * PITCH + t * 16, 64 * i, 4)
                for j in gl.static_range(4):
                    y = y + (_replaced(rows[r][4 * i + j], apart[j]),)
            if KEYS:
                y = rotated_keys(rotated_keys(y, _turns_at(near + at * 256 + t * 16, True)), turn)
            for i in gl.static_range(4):
                z = ()
                for j in gl.static_range(4):
                    word = y[4 * i + j]
                    if BF16:
                        a, b = unpack_half2(word)
                        word = pack_half2(a, b, True)
                    elif KEYS:
                        word = bounded_half2(word)
                    z = z + (word,)
                store_words4(out + (at * 256 + t * 16 + 64 * i), z[0], z[1], z[2], z[3])


@gluon.jit(do_not_specialize=["heads", "start", "first", "units", "count", "room", "each", "wide"])
def unpack_levels_kernel(
    codes, ranges, outlier, where, constants, turns_ptr, near_ptr, position_ptr, out,
    heads, start, first, units, count, room, each, wide, gain,
    BITS: gl.constexpr, TABLE: gl.constexpr, COUNT: gl.constexpr, VALUE: gl.constexpr, RANGES: gl.constexpr,
    KEYS: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode ``count`` units of 32 tokens, ``units`` of each KV head of a sequence, to ``out``, [heads, wide, 128].

    A head's ``units`` begin with unit ``first`` of its storage; from one KV head's storage to the next are ``room`` units. A
    unit has COUNT elements in fp16. KEYS are rotated: see :func:`kvfold.kernels.long._tables.unpack_tables_kernel`.
    Values of RANGES have a middle and half a range of each token; else channels of every KV head have ``constants``, fp16
    [heads, 2, 128]. A warp decodes ``each`` units, one after the other.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = shared_bytes(KEYS, W)
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, BYTES)
    near = _dynamic_base(lane)
    program_sync(lane)
    far = near + warp * (FAR + 32 * PITCH)
    turns = ()
    gains = ()
    if KEYS:
        far = far + TURNS
        fetch_turns(near, near_ptr, thread, lane, W)
        copy_commit(lane)
        for i in gl.static_range(2):
            for j in gl.static_range(2):
                turns = turns + (gl.load(turns_ptr + (2 * lane + (64 * i + j))),)
        one = lane.to(gl.float32) * 0.0 + gain
        gains = (one, one)
    scratch = far + FAR
    for i in gl.static_range(32 * PITCH // 256):
        store_shared2(scratch + (256 * i + lane * 8), lane * 0, lane * 0)
    copy_wait(lane, 0)
    program_sync(lane)
    CODE: gl.constexpr = code_bytes(128, BITS)
    begin = (gl.program_id(0) * W + warp) * each
    for i in range(each):
        number = gl.minimum(begin + i, count - 1)
        head = number // units
        unit = number % units
        block = head.to(gl.int64) * room + first + unit
        words = ()
        for j in gl.static_range(CODE // 512):
            words = words + load_words4(codes.to(gl.int64) + block * CODE + lane * 16, 512 * j)
        apart = ()
        for j in gl.static_range((COUNT + 31) // 32):
            at = (block * COUNT + (lane + 32 * j)) * 2
            there = (lane + 32 * j < COUNT).to(gl.int32)
            apart = apart + (load_outlier(where.to(gl.int64) + at, outlier.to(gl.int64) + at, there),)
        if KEYS:
            position = gl.load(position_ptr + head // heads).to(gl.int32) + start + (first + unit) * 32
            leave_turn(far, lane, position, turns, gains)
        for j in gl.static_range(len(apart)):
            place, there = _outlier_place(scratch, apart[j])
            _store_short(place, _seen((apart[j] >> 16) & 0xFFFF), there)
        warp_sync(lane)
        put_unit(
            lane, words, near, far, scratch, constants.to(gl.int64) + (head % heads).to(gl.int64) * 512,
            ranges.to(gl.int64) + block * 128, out.to(gl.int64) + (head.to(gl.int64) * wide + unit * 32) * 256,
            BITS, TABLE, VALUE, RANGES, KEYS, BF16,
        )  # fmt: skip
        warp_sync(lane)
        for j in gl.static_range(len(apart)):
            place, there = _outlier_place(scratch, apart[j])
            _store_short(place, lane * 0, there)
        warp_sync(lane)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
