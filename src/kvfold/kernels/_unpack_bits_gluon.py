"""Bits that every KV head has a matrix for (CommVQ's values), unpacked to 16 bits.

A warp decodes 32 tokens. A byte has a channel's bits of eight tokens: shifted by a lane's row, one mask makes two of its bits
a register of an operand, as subnormal fp16 numbers, which the matrix makes up for. Its rows stand in the order that bits come
in, its columns as in :mod:`kvfold.kernels._turned_gluon`: a lane stores eight adjacent channels of a token.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._registers import _replace, _zero4
from kvfold.kernels._stream import load_words4
from kvfold.kernels._tables_gluon import _dynamic_base, _fetch_rows, reserved
from kvfold.kernels._turned_gluon import store_words4
from kvfold.kernels._unpack_mixed_gluon import finite_half2
from kvfold.kernels._warp import (
    copy_commit,
    copy_wait_all,
    load_shared,
    load_shared4f,
    mma,
    pack_half2,
    prefetch,
    program_sync,
)


@gluon.constexpr_function
def table_bytes(codes):
    """Bytes of a head's matrix as operands, and of its offsets, fp32 [128]."""
    return 256 * codes + 512


@gluon.jit
def put_unit(matrix, offsets, lane, bits, size, out, CODES: gl.constexpr, BF16: gl.constexpr):
    """Decode 32 tokens. ``matrix``: a lane's address of the operands in shared memory; ``offsets``: that of the offsets there;
    ``bits``, ``out``: addresses of the tokens' bits and of where they go."""
    g = lane // 4
    t = lane % 4
    x = ()
    for q in gl.static_range(4):  # bit f of a byte is token 4 f + q
        for m in gl.static_range(CODES // 64):
            words = load_words4(bits + t * 16, CODES * q + 64 * m)
            for w in gl.static_range(4):
                x = x + (words[w] >> g,)
    C: gl.constexpr = CODES // 16
    to = out + g * 1024 + t * 16
    for i in gl.static_range(4):
        accs = ()
        for _j in gl.static_range(8):
            accs = accs + (_zero4(lane),)
        for c in gl.static_range(C):
            b = load_shared(matrix, 1024 * (i * C + c), 4) + load_shared(matrix, 1024 * (i * C + c) + 512, 4)
            for p in gl.static_range(2):
                near = x[2 * p * C + c]
                far = x[(2 * p + 1) * C + c]
                for j in gl.static_range(4):
                    y = mma(
                        near & 0x00010001, far & 0x00010001, near & 0x01000100, far & 0x01000100,
                        b[2 * j], b[2 * j + 1], accs[4 * p + j], False,
                    )  # fmt: skip
                    accs = _replace(accs, 4 * p + j, y)
        more = load_shared4f(offsets + (128 * i) + t * 32) + load_shared4f(offsets + (128 * i + 16) + t * 32)
        for q in gl.static_range(4):
            y = ()
            for j in gl.static_range(4):
                acc = accs[4 * (q // 2) + j]
                a = gl.fma(acc[2 * (q % 2)], size, more[2 * j])
                b = gl.fma(acc[2 * (q % 2) + 1], size, more[2 * j + 1])
                z = pack_half2(a, b, BF16)
                if not BF16:
                    z = finite_half2(z)
                y = y + (z,)
            store_words4(to + (256 * q + 64 * i), y[0], y[1], y[2], y[3])


@gluon.jit(do_not_specialize=["heads", "first", "units", "room", "wide"])
def unpack_bits_kernel(
    bits, tables, sizes, out, heads, first, units, room, wide, CODES: gl.constexpr, BF16: gl.constexpr
):
    """Decode ``units`` units of 32 tokens of each KV head, from unit ``first`` of its storage on, to ``out`` [heads, wide,
    128].

    Grid: (programs, batch * heads). ``tables``: of every KV head what :func:`kvfold.kernels.unpack_bits.operands` makes, and
    ``sizes``, float32 [heads], what products are multiplied with. From one KV head's storage to the next are ``room`` units.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = (table_bytes(CODES) + 1023) // 1024 * 1024
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    memory = reserved(thread, BYTES)
    base = _dynamic_base(lane)
    program_sync(lane)
    head = gl.program_id(1)
    own = head % heads
    _fetch_rows(base, tables.to(gl.int64) + own.to(gl.int64) * table_bytes(CODES), thread, table_bytes(CODES), W)
    copy_commit(lane)
    size = gl.load(sizes + own) * 512.0  # bits and matrices count 2^-9 times
    copy_wait_all(lane)
    program_sync(lane)
    number = gl.program_id(0) * W + thread // 32
    total = gl.num_programs(0) * W
    begin = units * number // total
    each = (units + total - 1) // total
    end = units * (number + 1) // total
    for i in range(each):
        unit = gl.maximum(gl.minimum(begin + i, end - 1), 0)
        after = gl.minimum(unit + 1, units - 1)
        at = bits.to(gl.int64) + (head.to(gl.int64) * room + first) * (4 * CODES)
        prefetch(at + after.to(gl.int64) * (4 * CODES) + lane % (CODES // 32) * 128)
        put_unit(
            base + lane * 16, base + 256 * CODES, lane, at + unit.to(gl.int64) * (4 * CODES), size,
            out.to(gl.int64) + (head.to(gl.int64) * wide + unit * 32) * 256, CODES, BF16,
        )  # fmt: skip
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
