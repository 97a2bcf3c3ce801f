# mypy: ignore-errors
"""Bits that every KV head has a matrix for (CommVQ's values), unpacked to 16 bits.

The matrix is in whole steps: a byte a number, a step a channel. A byte of storage has a code's bits of eight tokens, and bit g
is that of a token in row g of an operand. So one mask, which is a lane's own, makes four codes an operand's register, and sums
of row g count 2^g times. They begin at an integer that fp32 reads as 1.5 * 2^23, and need no conversion.

A warp decodes 16 tokens, those of two bits of four; two warps share a unit of 32. On sm_90 four warps multiply together
(WIDE), so that shared memory is read once for 64 tokens; elsewhere every warp reads it. Columns are in the order of
:mod:`kvfold.kernels.long._rotated`: a lane stores eight adjacent channels of a token.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _replace
from kvfold.kernels.common._stream import load_words4
from kvfold.kernels.common._tables import _dynamic_base, _fetch_rows, reserved
from kvfold.kernels.common._warp import (
    as_float,
    copy_commit,
    copy_wait,
    load_matrix4,
    mma_bytes,
    pack_finite_half2,
    prefetch,
    program_sync,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.common._warpgroup import show_copies, start_bytes, wait_bytes
from kvfold.kernels.fold._bytes import MAGIC, MAGIC_BITS
from kvfold.kernels.long._rotated import store_words4


@gluon.constexpr_function
def matrix_bytes(codes):
    """Bytes of a head's matrix, all of a program's shared memory."""
    return 128 * codes


@gluon.constexpr_function
def table_bytes(codes):
    """Bytes of a head's matrix, its steps and its offsets, fp32 [128] both."""
    return matrix_bytes(codes) + 1024


@gluon.jit
def load_bits(address, CODES: gl.constexpr):
    """A lane's words of two bits of four: codes 64 m + 16 t on of each 64, first of one, then of the other."""
    words = ()
    for q in gl.static_range(2):
        for m in gl.static_range(CODES // 64):
            words = words + load_words4(address, CODES * q + 64 * m)
    return words


@gluon.jit
def operands(words, mask):
    """Four registers of each 32 codes."""
    HALF: gl.constexpr = len(words) // 2
    out = ()
    for i in gl.static_range(HALF // 2):
        out = out + (
            words[2 * i] & mask, words[HALF + 2 * i] & mask, words[2 * i + 1] & mask, words[HALF + 2 * i + 1] & mask,
        )  # fmt: skip
    return out


@gluon.jit
def products(words, matrix, lane):
    """As :func:`kvfold.kernels.common._warpgroup.start_bytes`, of a warp's own 16 tokens, finished."""
    sums = ()
    none = lane * 0 + MAGIC_BITS
    for _j in gl.static_range(8):
        sums = sums + ((none, none, none, none),)
    row = lane % 8
    for s in gl.static_range(len(words) // 4):
        at = matrix + lane // 16 * 1024 + row * 128 + ((s % 4 * 2 + lane // 8 % 2) ^ row) * 16
        for j in gl.static_range(4):
            b = load_matrix4(at, s // 4 * 16384 + 2048 * j, False)
            for k in gl.static_range(2):
                y = mma_bytes(
                    words[4 * s], words[4 * s + 1], words[4 * s + 2], words[4 * s + 3], b[2 * k], b[2 * k + 1],
                    sums[2 * j + k], True,
                )  # fmt: skip
                sums = _replace(sums, 2 * j + k, y)
    out = ()
    for j in gl.static_range(8):
        out = out + (sums[j][0], sums[j][1], sums[j][2], sums[j][3])
    return out


@gluon.jit
def load_steps(address):
    """A lane's 32 steps, and as many offsets as fp16 in 16 words."""
    steps = ()
    offsets = ()
    for i in gl.static_range(4):
        for j in gl.static_range(2):
            s = load_words4(address, 128 * i + 16 * j)
            o = load_words4(address, 128 * i + 16 * j + 512)
            for k in gl.static_range(4):
                steps = steps + (as_float(s[k]),)
            for k in gl.static_range(2):
                offsets = offsets + (pack_finite_half2(as_float(o[2 * k]), as_float(o[2 * k + 1]), False),)
    return steps, offsets


@gluon.jit
def put_sums(sums, share, less, steps, offsets, out, PART: gl.constexpr, BF16: gl.constexpr):
    """Store 64 channels of a lane's two tokens, the first or (PART 1) the last ones. ``share``: what their sums are multiplied
    with, ``less`` what that makes of where they began; ``steps``, ``offsets``: see :func:`load_steps`; ``out``: where the first
    token goes."""
    for i in gl.static_range(2):
        y = ()
        for j in gl.static_range(4):
            low, high = unpack_half2(offsets[8 * PART + 4 * i + j])
            s = (steps[16 * PART + 8 * i + 2 * j], steps[16 * PART + 8 * i + 2 * j + 1])
            for h in gl.static_range(2):
                a = gl.fma(as_float(sums[16 * i + 4 * j + 2 * h]), share, less)
                b = gl.fma(as_float(sums[16 * i + 4 * j + 2 * h + 1]), share, less)
                y = y + (pack_finite_half2(gl.fma(a, s[0], low), gl.fma(b, s[1], high), BF16),)
        for h in gl.static_range(2):
            store_words4(out + (256 * h + 64 * i), y[h], y[2 + h], y[4 + h], y[6 + h])


@gluon.jit(do_not_specialize=["heads", "first", "units", "room", "wide"])
def unpack_bits_kernel(
    bits, tables, out, heads, first, units, room, wide, CODES: gl.constexpr, BF16: gl.constexpr, WIDE: gl.constexpr
):
    """Decode ``units`` units of 32 tokens of each KV head, from unit ``first`` of its storage on, to ``out`` [heads, wide,
    128].

    Grid: (programs, batch * heads). ``tables``: of every KV head what :func:`kvfold.kernels.long.bits.operands` makes. From
    one KV head's storage to the next are ``room`` units. Programs have a multiple of four warps, or (not WIDE) of two.
    """
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    t = lane % 4
    BYTES: gl.constexpr = matrix_bytes(CODES)
    memory = reserved(thread, BYTES)
    base = _dynamic_base(lane)
    program_sync(lane)
    head = gl.program_id(1)
    table = tables.to(gl.int64) + (head % heads).to(gl.int64) * table_bytes(CODES)
    _fetch_rows(base, table, thread, BYTES, W)
    copy_commit(lane)
    steps, offsets = load_steps(table + BYTES + t.to(gl.int64) * 32)
    mask = (lane * 0 + 0x01010101) << g
    share = as_float((127 - g) << 23)
    less = share * (-MAGIC)
    at = bits.to(gl.int64) + (head.to(gl.int64) * room + first) * (4 * CODES) + (warp % 2 * (2 * CODES) + t * 16)
    to = out.to(gl.int64) + head.to(gl.int64) * wide * 256 + (g * 1024 + warp % 2 * 512 + t * 16)
    # programs take as many of W / 2 units one after the other; units of warps that have one less are decoded again
    sets = (units + W // 2 - 1) // (W // 2)
    begin = sets * gl.program_id(0) // gl.num_programs(0)
    end = sets * (gl.program_id(0) + 1) // gl.num_programs(0)
    unit = gl.minimum(begin * (W // 2) + warp // 2, units - 1)
    words = load_bits(at + unit.to(gl.int64) * (4 * CODES), CODES)
    copy_wait(lane, 0)
    if WIDE:
        show_copies(lane)
    program_sync(lane)
    for i in range(begin, end):
        after = gl.minimum((i + 1) * (W // 2) + warp // 2, units - 1)
        later = gl.minimum((i + 2) * (W // 2) + warp // 2, units - 1)
        prefetch(at + later.to(gl.int64) * (4 * CODES) + g % (CODES // 64) * 128)
        here = to + unit.to(gl.int64) * 8192
        a = operands(words, mask)
        if WIDE:
            near = start_bytes(a, base, MAGIC_BITS)
            far = start_bytes(a, base + 8192, MAGIC_BITS)
            put_sums(wait_bytes(near, 1), share, less, steps, offsets, here, 0, BF16)
            warp_sync(lane)  # or the compiler waits here for both
            sums = wait_bytes(far, 0)
        else:
            put_sums(products(a, base, lane), share, less, steps, offsets, here, 0, BF16)
            sums = products(a, base + 8192, lane)
        words = load_bits(at + after.to(gl.int64) * (4 * CODES), CODES)
        put_sums(sums, share, less, steps, offsets, here + 128, 1, BF16)
        unit = after
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
