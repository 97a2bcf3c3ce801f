"""Uniform codes in tensor-core order that a Hadamard rotation turns (fold), unpacked to 16 bits.

A warp decodes 32 tokens. Codes are operands as they lie: subnormal fp16 numbers, times powers of two that the other operand
takes back. That one is the 32 x 32 Hadamard matrix, which a lane holds in 16 registers for all of its tokens; larger blocks are
sums and differences of tiles. Sums are halves of whole numbers, below 1,024, so that fp16 keeps them exactly. What zero-points
leave is in a block's first channel alone, where sums begin. Columns stand as in :mod:`kvfold.kernels._turned_gluon`: a lane
stores eight adjacent channels of a token.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._affine_codes import _field, _main, _operand, code_bytes
from kvfold.kernels._fragment_lookup import fma_half2
from kvfold.kernels._tables_gluon import _dynamic_base, reserved
from kvfold.kernels._turned_gluon import _half_pair, byte_number, load_half, load_words4, store_words4, transposed
from kvfold.kernels._unpack_mixed_gluon import finite_half2, load_word, mma_half
from kvfold.kernels._warp import (
    as_int,
    exp2_fast,
    load_shared,
    mul_half2,
    pack_half2,
    prefetch,
    program_sync,
    store_shared2,
    unpack_half2,
    warp_sync,
)

D = gl.constexpr(128)
STAGE = gl.constexpr(256)
"""Bytes of shared memory of a warp: norms of a page's channels with signs, or signs, fp16."""


@gluon.constexpr_function
def _weight(bits, tile):
    """k: codes of this tile count 2^k times in the operand of :func:`kvfold.kernels._affine_codes._operand`."""
    return _field(128, _main(bits), tile)[1] % 8


@gluon.constexpr_function
def _apart(bits):
    """How much more codes of a pair's second tile of channels count, as an exponent: in all pairs alike."""
    found = {_weight(bits, 4 * i + 2 + tt) - _weight(bits, 4 * i + tt) for i in range(4) for tt in (0, 1)}
    assert len(found) == 1
    return found.pop()


@gluon.constexpr_function
def _start(bits, i, tt):
    """Middles of the codes of 32 channels of a token, negative, as sums have them: fp16 bits."""
    return _half_pair(-16.0 * ((1 << bits) - 1) * 2.0 ** (_weight(bits, 4 * i + tt) - 9)) & 0xFFFF


@gluon.constexpr_function
def _factor(bits, mix, i, tt, sign):
    """Takes back what codes count in sums over 32 channels, and has a power of two of ``mix ** -0.5``: a pair of fp16."""
    half = {32: 2, 64: 3, 128: 3}[mix]
    return _half_pair(sign * 2.0 ** (9 - _weight(bits, 4 * i + tt) - half))


@gluon.constexpr_function
def rest_of(mix):
    """What that leaves of ``mix ** -0.5``."""
    return 1.0 if mix == 64 else 0.5**0.5


@gluon.constexpr_function
def _one(bits, half):
    return (30 - half * _apart(bits)) << 10


@gluon.jit
def _entry(i, j, ONE: gl.constexpr):
    """16 bits: element (i, j) of the 32 x 32 Hadamard matrix times ONE."""
    x = i & j
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    return ONE | (((x ^ (x >> 1)) & 1) << 15)


@gluon.jit
def columns(lane, BITS: gl.constexpr):
    """The matrix as second operands: two registers of each of two tiles of rows and four of columns."""
    g = lane // 4
    t = lane % 4
    out = ()
    for h in gl.static_range(2):
        for j in gl.static_range(4):
            column = 8 * (g // 2) + 2 * j + g % 2
            for e in gl.static_range(2):
                row = 16 * h + 8 * e + 2 * t
                out = out + (_entry(row, column, _one(BITS, h)) | (_entry(row + 1, column, _one(BITS, h)) << 16),)
    return out


@gluon.jit
def sign_words(signs, lane):
    """Whether channels 4 lane to 4 lane + 3 change sign: two words, of which bits 15 and 31 are set."""
    out = ()
    for i in gl.static_range(2):
        low = as_int(gl.load(signs + (4 * lane + 2 * i)))
        high = as_int(gl.load(signs + (4 * lane + (2 * i + 1))))
        out = out + (((low >> 16) & 0x8000) | (high & (-2147483648)),)
    return out


@gluon.jit
def leave_norms(to, lane, norm, signs):
    """Leave norms of a page's channels with signs in shared memory, fp16."""
    x = load_word(norm + lane * 4)
    n = ()
    for i in gl.static_range(4):
        n = n + (exp2_fast(byte_number(x, i) * (-1.0 / 48)),)
    low = pack_half2(n[0], n[1], False) ^ signs[0]
    store_shared2(to + lane * 8, low, pack_half2(n[2], n[3], False) ^ signs[1])


@gluon.jit
def _finished(x, scale, pair, turn, mean, VALUE: gl.constexpr, BF16: gl.constexpr):
    """Two channels of a token. ``scale``: fp32, and ``pair``: twice as fp16; ``turn``: norms with signs, or (VALUE) signs."""
    if VALUE:
        x = x ^ turn
    if BF16:
        a, b = unpack_half2(x)
        m0, m1 = unpack_half2(mean)
        a = a * scale
        b = b * scale
        if VALUE:
            a = a + m0
            b = b + m1
        else:
            n0, n1 = unpack_half2(turn)
            a = gl.fma(a, n0, m0)
            b = gl.fma(b, n1, m1)
        return pack_half2(a, b, True)
    else:
        if VALUE:
            return finite_half2(fma_half2(x, pair, mean))
        else:
            return finite_half2(fma_half2(mul_half2(x, pair), turn, mean))


@gluon.jit
def _sums(words, matrix, lane, TT: gl.constexpr, BITS: gl.constexpr):
    """Sums over 32 channels each: eight words of each of four blocks, two of every tile of columns."""
    first = lane % 4 == 0
    none = lane * 0
    out = ()
    for i in gl.static_range(4):
        a = _operand(words, 4 * i + TT, D, BITS)
        b = _operand(words, 4 * i + 2 + TT, D, BITS)
        for j in gl.static_range(4):
            c0 = none
            if j == 0:
                c0 = gl.where(first, none + _start(BITS, i, TT), none)
            c0, c1 = mma_half(a, matrix[2 * j], matrix[2 * j + 1], c0, c0)
            c0, c1 = mma_half(b, matrix[8 + 2 * j], matrix[8 + 2 * j + 1], c0, c1)
            out = out + (c0, c1)
    return out


@gluon.jit
def _blocks(x, lane, TT: gl.constexpr, BITS: gl.constexpr, MIX: gl.constexpr):
    """Sums over 32 channels as sums over blocks of MIX."""
    none = lane * 0
    out = ()
    for i in gl.static_range(4):
        for w in gl.static_range(8):
            if MIX == 32:
                y = mul_half2(x[8 * i + w], none + _factor(BITS, MIX, i, TT, 1.0))
            elif i % 2 == 0:
                y = mul_half2(x[8 * i + w], none + _factor(BITS, MIX, i, TT, 1.0))
                y = fma_half2(x[8 * i + 8 + w], none + _factor(BITS, MIX, i + 1, TT, 1.0), y)
            else:
                y = mul_half2(x[8 * i - 8 + w], none + _factor(BITS, MIX, i - 1, TT, 1.0))
                y = fma_half2(x[8 * i + w], none + _factor(BITS, MIX, i, TT, -1.0), y)
            out = out + (y,)
    if MIX == 128:
        x = out
        out = ()
        for i in gl.static_range(4):
            for w in gl.static_range(8):
                if i < 2:
                    y = fma_half2(x[8 * i + 16 + w], none + _half_pair(1.0), x[8 * i + w])
                else:
                    y = fma_half2(x[8 * i + w], none + _half_pair(-1.0), x[8 * i - 16 + w])
                out = out + (y,)
    return out


@gluon.jit
def put_unit(
    lane, matrix, words, scale, mean, stage, out,
    BITS: gl.constexpr, MIX: gl.constexpr, VALUE: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode 32 tokens. ``words``: a lane's codes; ``scale``, ``mean``, ``out``: addresses of the tokens' scales, their page's
    mean and where they go; ``stage``: of norms with signs, or (VALUE) signs, in shared memory."""
    g = lane // 4
    t = lane % 4
    if VALUE:
        words = transposed(words)
    means = ()
    scales = ()
    for i in gl.static_range(4):
        means = means + load_words4(mean + t * 16, 64 * i)
        scales = scales + (load_half(scale + (g + 8 * i) * 2) * rest_of(MIX),)
    for tt in gl.static_range(2):
        x = _blocks(_sums(words, matrix, lane, tt, BITS), lane, tt, BITS, MIX)
        for r in gl.static_range(2):
            own = scales[2 * tt + r]
            pair = pack_half2(own, own, False)
            for i in gl.static_range(4):
                turn = load_shared(stage + t * 16, 64 * i, 4)
                y = ()
                for j in gl.static_range(4):
                    y = y + (
                        _finished(x[8 * i + 2 * j + r], own, pair, turn[j], means[4 * i + j], VALUE, BF16),
                    )  # fmt: skip
                store_words4(out + ((g + (16 * tt + 8 * r)) * 256 + t * 16 + 64 * i), y[0], y[1], y[2], y[3])


@gluon.jit(do_not_specialize=["units", "count", "room", "pages", "first", "each", "wide"])
def unpack_hadamard_kernel(
    codes, scale, mean, norm, signs, out, units, count, room, pages, first, each, wide,
    BITS: gl.constexpr, MIX: gl.constexpr, VALUE: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode as :func:`kvfold.kernels._turned_gluon.turned_kernel` does; ``signs``: float32 [128], of the rotation of blocks of
    MIX channels. Keys have norms of channels, values (VALUE) have none; both have means."""
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    memory = reserved(thread, STAGE * W)
    stage = _dynamic_base(lane) + thread // 32 * STAGE
    program_sync(lane)
    CODE: gl.constexpr = code_bytes(128, BITS)
    turns = sign_words(signs, lane)
    matrix = columns(lane, BITS)
    if VALUE:
        store_shared2(stage + lane * 8, turns[0], turns[1])
        warp_sync(lane)
    number = gl.program_id(0) * W + thread // 32
    for i in range(each):
        unit = gl.minimum(number * each + i, count - 1)
        head = unit // units
        block = head.to(gl.int64) * room + first + unit % units
        words = ()
        for j in gl.static_range(CODE // 512):
            words = words + load_words4(codes.to(gl.int64) + block * CODE + lane * 16, 512 * j)
        # a warp's units follow each other: the next one's codes and scales come nearer meanwhile
        ahead = gl.where(
            lane < CODE // 128, codes.to(gl.int64) + (block + 1) * CODE, scale.to(gl.int64) + (block + 1) * 64
        )
        ahead = ahead + gl.where(lane < CODE // 128, lane, 0) * 128
        prefetch(gl.where(unit % units + 1 < units, ahead, codes.to(gl.int64)))
        page = head.to(gl.int64) * pages + (first + unit % units) // 4
        if not VALUE:
            leave_norms(stage, lane, norm.to(gl.int64) + page * 128, turns)
            warp_sync(lane)
        to = out.to(gl.int64) + (head.to(gl.int64) * wide + unit % units * 32) * 256
        put_unit(
            lane, matrix, words, scale.to(gl.int64) + block * 64, mean.to(gl.int64) + page * 256, stage, to,
            BITS, MIX, VALUE, BF16,
        )  # fmt: skip
        if not VALUE:
            warp_sync(lane)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
