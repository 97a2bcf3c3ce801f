"""CommVQ's keys, sums of codebook rows of whole steps, unpacked to 16 bits.

Tables lie in shared memory, and reading them is what bounds the kernel: two rows of 128 bytes for every token and stage. A row
is 64 bytes of real and 64 of imaginary parts, of which lane (g, t) reads 16 of each for token g. Of ``a + i b`` lanes of even g
read the real part of a while those of odd g read the imaginary part of b, and so on, so that the two tokens of a quarter of a
warp never meet in a bank; odd tokens have their real parts' differences the other way round.

Tensor cores add up, exactly: a stage's differences (128 more) and sums fill a byte, and four of them are a lane's register of
the second operand of ``mma.m16n8k32``, whose 32 rows are 16 channels of two stages. The first operand is ones where a row is
its channel. A lane's results are eight adjacent pairs of channels, 8g to 8g + 7, of tokens 2t and 2t + 1: 16 bytes each to
store, of which eight lanes write a line of memory. They are rotated twice: by the token's place in its tile of eight, whose
cosines and sines a lane holds, and by the tile's position.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._steps_gluon import _place, stage_words
from kvfold.kernels._tables_gluon import (
    _dynamic_base,
    _fetch_rows,
    _fma_half2,
    _shuffled,
    _weighted_bytes,
    reserved,
)
from kvfold.kernels._turned_gluon import bounded_half2, store_words4
from kvfold.kernels._unpack_tables_gluon import FAR, fetch_codes, leave_turn
from kvfold.kernels._warp import (
    add_half2,
    as_float,
    copy_async,
    copy_commit,
    copy_wait_1,
    copy_wait_all,
    high_halves,
    load_global4,
    load_shared,
    low_halves,
    mma_bytes,
    mul_half2,
    pack_half2,
    program_sync,
    unpack_half2,
    warp_sync,
)

UNIT = gl.constexpr(32)
NORMS = gl.constexpr(64)
"""Bytes of a unit's norms."""
TURNS = gl.constexpr(2048)
"""Bytes of cosines and sines of a tile's tokens."""
PAST = gl.constexpr(384)
"""Bytes behind the last unit's codes that are read, and not used."""
MAGIC = gl.constexpr(12582912.0)
"""Of fp32 numbers near it the last bits count one by one."""


@gluon.constexpr_function
def code_bytes(stages):
    """Bytes of a unit's codes."""
    return 48 * stages


@gluon.constexpr_function
def head_bytes(stages):
    """Bytes of a head's rows, and of what lies beside them: see :func:`kvfold.kernels.unpack_steps.rows_of`."""
    return stages * 8192 + 512


@gluon.constexpr_function
def shared_bytes(stages, warps):
    """Bytes of shared memory of a program: tables, cosines and sines, and of every warp codes and norms of two units."""
    size = 8192 * stages + TURNS.value + warps * (2 * (code_bytes(stages) + NORMS.value) + FAR.value) + PAST.value
    return (size + 1023) // 1024 * 1024


@gluon.constexpr_function
def _first_bits(stages):
    """Bits of :data:`MAGIC` less what sums of so many stages have too much."""
    return 0x4B400000 - 128 * stages


@gluon.jit
def _stage_bytes(word, first, second, R: gl.constexpr, AT: gl.constexpr):
    """Of a stage four words of differences of real parts, four of sums of imaginary parts; R: of eight stages."""
    at = _weighted_bytes(word, first * 0 + _place(R // 4 * 16), first)
    other = _weighted_bytes(word, first * 0 + _place(R // 4 * 16 + 8), second)
    a = load_shared(at, AT, 4)
    b = load_shared(other, AT, 4)
    c = load_shared(at ^ 64, AT, 4)
    d = load_shared(other ^ 64, AT, 4)
    out = ()
    for i in gl.static_range(4):
        out = out + (a[i] - b[i] + -2139062144,)  # 128 in each byte
    for i in gl.static_range(4):
        out = out + (c[i] + d[i],)
    return out


@gluon.jit
def eight_tokens(codes, start, odd, lane, first, second, ones, STAGES: gl.constexpr):
    """Sums of stages' numbers of a tile of 8 tokens: eight times four sums as of :func:`kvfold.kernels._warp.mma_bytes`, the
    first four of real parts (of odd tokens negative), the others of imaginary ones, all in the last bits of :data:`MAGIC`.

    ``codes``: address of the tile's codes of stage t; ``start``: bit where the lane's begin; ``ones``: the lane's words of the
    first operand.
    """
    acc = ()
    for _i in gl.static_range(8):
        acc = acc + (((lane * 0 + _first_bits(STAGES)),) * 4,)
    held = ()
    before = ()
    for s in gl.static_range(STAGES):
        if s % 8 == 0:
            word = stage_words(codes, 48 * s, start, odd, 192)
        if s % 4 == s % 8:
            held = held + (_shuffled(word, (lane & 28) + s % 4),)
        x = _stage_bytes(held[s // 8 * 4 + s % 4], first, second, s % 8, 8192 * s)
        if s % 2 == 1 or s + 1 == STAGES:
            new = ()
            for i in gl.static_range(8):
                if s % 2 == 1:
                    new = new + (mma_bytes(ones[0], ones[1], ones[0], ones[1], before[i], x[i], acc[i], False),)
                else:
                    new = new + (mma_bytes(ones[0], ones[1], ones[0], ones[1], x[i], lane * 0, acc[i], False),)
            acc = new
        before = x
    return acc


@gluon.jit
def _numbers(acc, E: gl.constexpr, shifts):
    """Eight words of a lane's channels of token 2t + E: of real parts, then of imaginary ones."""
    out = ()
    for i in gl.static_range(8):
        a = as_float(acc[i][E])
        b = as_float(acc[i][2 + E])
        if E == 1 and i < 4:
            out = out + (add_half2(pack_half2(MAGIC - a, MAGIC - b, False), shifts[i]),)
        else:
            out = out + (add_half2(pack_half2(a - MAGIC, b - MAGIC, False), shifts[i]),)
    return out


@gluon.jit
def _less_half2(a, b, c):
    """a times b less c."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 n; neg.f16x2 n, $3; fma.rn.f16x2 $0, $1, $2, n; }",
        "=r,r,r,r",
        [a, b, c],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _turned(x, turns):
    """Eight words of pairs' parts, rotated by four words of cosines and four of sines."""
    real = ()
    imaginary = ()
    for i in gl.static_range(4):
        real = real + (_less_half2(x[i], turns[i], mul_half2(x[4 + i], turns[4 + i])),)
        imaginary = imaginary + (_fma_half2(x[4 + i], turns[i], mul_half2(x[i], turns[4 + i])),)
    return real + imaginary


@gluon.jit
def _put(to, x, norms, E: gl.constexpr, BF16: gl.constexpr):
    """Store a token's eight words, times its norm, number E of ``norms``."""
    y = ()
    if BF16:
        both = unpack_half2(norms)
        for i in gl.static_range(8):
            a, b = unpack_half2(x[i])
            y = y + (pack_half2(a * both[E], b * both[E], True),)
    else:
        if E == 0:
            norm = low_halves(norms, norms)
        else:
            norm = high_halves(norms, norms)
        for i in gl.static_range(8):
            y = y + (bounded_half2(mul_half2(x[i], norm)),)
    store_words4(to, y[0], y[1], y[2], y[3])
    store_words4(to + 128, y[4], y[5], y[6], y[7])


@gluon.jit
def _near(address, E: gl.constexpr):
    """Cosines and sines of a lane's token 2t + E of a tile: four words of each."""
    return load_shared(address, 1024 * E, 4) + load_shared(address, 1024 * E + 512, 4)


@gluon.jit
def put_unit(
    codes, base, near, held, far, lane, position, turns, gains, shifts, ones, out, STAGES: gl.constexpr, BF16: gl.constexpr
):
    """Decode 32 tokens, whose codes and norms lie in shared memory.

    ``near``: a lane's address of :func:`_near`, or ``held``, those themselves; ``far``: address of room for cosines and sines
    of a tile's position, of which the first is ``position``; ``turns``, ``gains``: as of
    :func:`kvfold.kernels._unpack_tables_gluon.leave_turn`.
    """
    g = lane // 4
    t = lane % 4
    odd = g % 2 == 1
    start = g * 12 % 32
    first = base + g % 2 * 64 + t * 16
    second = base + (64 - g % 2 * 64) + t * 16
    word = codes + g * 12 // 32 * 4 + t * 48
    norms = codes + (code_bytes(STAGES) + t * 4)
    to = out + (t * 512 + g * 16)
    for _q in range(4):
        warp_sync(lane)
        leave_turn(far, lane, position, turns, gains)
        acc = eight_tokens(word, start, odd, lane, first, second, ones, STAGES)
        norm = load_shared(norms, 0, 1)[0]
        warp_sync(lane)
        turn = load_shared(far + g * 16, 0, 4) + load_shared(far + g * 16, 128, 4)
        for e in gl.static_range(2):
            x = _numbers(acc, e, shifts)
            if len(held) > 0:
                x = _turned(x, held[e])
            else:
                x = _turned(x, _near(near, e))
            _put(to + 256 * e, _turned(x, turn), norm, e, BF16)
        word += 12
        norms += 16
        position += 8
        to += 2048


@gluon.jit
def _fetch_unit(to, lane, codes, norms, unit, CODES: gl.constexpr):
    """Begin to copy a unit's codes and norms."""
    fetch_codes(to, lane, codes + unit.to(gl.int64) * CODES, CODES)
    source = norms + unit.to(gl.int64) * NORMS + lane * 16
    copy_async(to + lane * 16, source, lane * 0 + 16, (lane < 4).to(gl.int32), CODES, 0, True)
    copy_commit(lane)


@gluon.jit
def steps_of_pairs(tables, lane, STAGES: gl.constexpr):
    """Steps of pairs 2 lane and 2 lane + 1 of a head's tables."""
    words = load_global4(tables + (STAGES * 8192 + 256) + lane // 2 * 16, lane * 0 + 1)
    return (
        as_float(gl.where(lane % 2 == 1, words[2], words[0])),
        as_float(gl.where(lane % 2 == 1, words[3], words[1])),
    )


@gluon.jit(do_not_specialize=["heads", "start", "first", "units", "room", "wide"])
def unpack_steps_kernel(
    codes, norms, rows, turns_ptr, near_ptr, position_ptr, out, heads, start, first, units, room, wide, gain,
    STAGES: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode ``units`` units of 32 tokens of each KV head, from unit ``first`` of its storage on, to ``out`` [heads, wide,
    128].

    Grid: (programs, batch * heads). Every head has ``rows``, see :func:`kvfold.kernels.unpack_steps.rows_of`. The span's first
    token is number ``start`` after ``position_ptr``; ``turns_ptr``, float32 [2, 64]: turns per token of the pairs and what
    float32 leaves of them; ``near_ptr``: cosines and sines of a tile's tokens, see
    :func:`kvfold.kernels.unpack_steps.turns`; ``gain``: of RoPE. From one KV head's storage to the next are ``room`` units.
    """
    W: gl.constexpr = gl.num_warps()
    CODES: gl.constexpr = code_bytes(STAGES)
    BUFFER: gl.constexpr = CODES + NORMS
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, shared_bytes(STAGES, W))
    base = _dynamic_base(lane)
    program_sync(lane)
    head = gl.program_id(1)
    tables = rows.to(gl.int64) + (head % heads).to(gl.int64) * head_bytes(STAGES)
    near = base + STAGES * 8192
    stage = near + TURNS + warp * (2 * BUFFER + FAR)
    far = stage + 2 * BUFFER
    _fetch_rows(near, near_ptr.to(gl.int64), thread, TURNS, W)
    _fetch_rows(base, tables, thread, STAGES * 8192, W)

    lo = (units.to(gl.int64) * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    hi = (units.to(gl.int64) * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    each = (hi - lo + W - 1) // W
    begin = gl.minimum(lo + warp * each, hi - 1)
    block = head.to(gl.int64) * room + first
    code_at = codes.to(gl.int64) + block * CODES
    norm_at = norms.to(gl.int64) + block * NORMS
    to = out.to(gl.int64) + head.to(gl.int64) * wide * 256
    _fetch_unit(stage, lane, code_at, norm_at, begin, CODES)

    turns = ()
    for i in gl.static_range(2):
        for j in gl.static_range(2):
            turns = turns + (gl.load(turns_ptr + (2 * lane + (64 * i + j))),)
    position = (gl.load(position_ptr + head // heads) + start).to(gl.int32) + first * 32
    step = steps_of_pairs(tables, lane, STAGES)
    gains = (step[0] * gain, step[1] * gain)
    g = lane // 4
    t = lane % 4
    on = lane * 0 + 1
    shifts = load_global4(tables + STAGES * 8192 + g * 16, on) + load_global4(
        tables + (STAGES * 8192 + 128) + g * 16, on
    )
    one = (lane * 0 + 1) << (g % 4 * 8)
    ones = (gl.where(t == g // 4, one, 0), gl.where(t == g // 4 + 2, one, 0))
    copy_wait_all(lane)
    program_sync(lane)
    near = near + lane * 16
    held = ()
    if W <= 8:  # there are registers for them
        held = (_near(near, 0), _near(near, 1))
    for i in range(each):
        unit = gl.minimum(begin + i, hi - 1)
        warp_sync(lane)
        _fetch_unit(stage + (i + 1) % 2 * BUFFER, lane, code_at, norm_at, gl.minimum(begin + i + 1, hi - 1), CODES)
        copy_wait_1(lane)
        there = to + unit.to(gl.int64) * 8192
        here = stage + i % 2 * BUFFER
        place = position + unit * 32
        put_unit(here, base, near, held, far, lane, place, turns, gains, shifts, ones, there, STAGES, BF16)
    copy_wait_all(lane)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
