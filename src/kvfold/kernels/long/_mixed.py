# mypy: ignore-errors
"""Codes of two precisions in tensor-core order (ZipCache), unpacked to 16 bits.

A warp decodes 32 tokens. Codes are operands as they lie, subnormal fp16 numbers, and the other operand is 1 on the diagonal,
times what they count: a product brings eight adjacent channels of a token to one lane. Its sums begin with the low bits of
salient tokens and count codes four times, so that they are 16 times whole codes, as integers. A lane stores 16 bytes.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import _operand, code_bytes, weight
from kvfold.kernels.common._registers import _item
from kvfold.kernels.common._stream import load_word, load_words4
from kvfold.kernels.common._tables import _dynamic_base, reserved
from kvfold.kernels.common._warp import (
    exp2_fast,
    fma_half2,
    high_halves,
    load_shared,
    low_halves,
    mul_half2,
    pack_half2,
    prefetch,
    program_sync,
    store_shared2,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fragments._mixed import _ones_of
from kvfold.kernels.long._rotated import _half_pair, byte_number, store_words4, transposed

D, BITS = gl.constexpr(128), gl.constexpr(2)
CODE = gl.constexpr(code_bytes(128, 2))
"""Bytes of the codes of 32 tokens."""
STAGE = gl.constexpr(256)
"""Bytes of shared memory of a warp: norms of a page's channels, fp16."""
MAGIC = gl.constexpr(0x64006400)
"""Two fp16 1024: with a number below 1024 in the last ten bits, that much more."""


@gluon.constexpr_function
def _one(tile):
    """fp16 bits of 64 times what takes back how much codes of this tile of channels count."""
    return (21 - weight(D.value, BITS.value, tile)) << 10


@gluon.jit
def mma_half(a, b0, b1, c0, c1):
    """``mma.m16n8k16`` of fp16: as of :func:`kvfold.kernels.common._warp.mma`, the sums are two words: of row g, and of row g
    + 8."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {$0,$1}, {$2,$3,$4,$5}, {$6,$7}, {$8,$9};",
        "=r,=r,r,r,r,r,r,r,r,r",
        [a[0], a[1], a[2], a[3], b0, b1, c0, c1],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def finite_half2(x):
    """Two fp16 numbers without infinities, by one instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.b32 a, 0x7BFF7BFF; min.xorsign.abs.f16x2 $0, $1, a; }",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def load_short(address, there):
    """16 bits of global memory where ``there`` is not 0, else 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 h; mov.b16 h, 0; setp.ne.b32 p, $2, 0; @p ld.global.nc.b16 h, [$1]; cvt.u32.u16 $0, h; }",
        "=r,l,r",
        [address, there],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def diagonal(lane, TILE: gl.constexpr):
    """Second operands of two tiles of channels, TILE and the next: two registers of each of four tiles of columns.

    Column g of tile j is channel ``8 (g // 2) + 2j + g % 2`` of 32.
    """
    g = lane // 4
    t = lane % 4
    out = ()
    for h in gl.static_range(2):
        for j in gl.static_range(4):
            column = 8 * (g // 2) + 2 * j + g % 2
            for e in gl.static_range(2):
                row = 16 * h + 8 * e + 2 * t
                out = out + (_ones_at(row, column, _one(TILE + h)),)
    return out


@gluon.jit
def _ones_at(row, column, ONE: gl.constexpr):
    return gl.where(row == column, ONE, 0) | gl.where(row + 1 == column, ONE << 16, 0)


@gluon.jit
def leave_norms(to, lane, norm):
    """Leave norms of a page's channels in shared memory, fp16."""
    x = load_word(norm + lane * 4)
    n = ()
    for i in gl.static_range(4):
        n = n + (exp2_fast(byte_number(x, i) * (-1.0 / 48)),)
    store_shared2(to + lane * 8, pack_half2(n[0], n[1], False), pack_half2(n[2], n[3], False))


@gluon.jit
def _eighth(span, lane):
    """Ranges of 15 codes as those of eight, rounded once."""
    HIGH: gl.constexpr = _item(_parts(8 / 15), 0)
    LOW: gl.constexpr = _item(_parts(8 / 15), 1)
    return fma_half2(span, lane * 0 + HIGH, mul_half2(span, lane * 0 + LOW))


@gluon.jit
def _middle(zero, span, lane):
    HALF: gl.constexpr = _half_pair(0.5)
    return fma_half2(span, lane * 0 + HALF, zero)


@gluon.constexpr_function
def _parts(number):
    """Two fp16 numbers whose sum is nearly ``number``, as pairs."""
    import struct

    high = struct.unpack("<e", struct.pack("<e", number))[0]
    return _half_pair(high), _half_pair(number - high)


@gluon.jit
def _finished(x, take, off, span, middle, norm, VALUE: gl.constexpr, BF16: gl.constexpr):
    """Two channels of a token from their codes: ``(code take + off) span + middle``, times norms."""
    x = fma_half2(x | MAGIC, take, off)
    if BF16:
        a, b = unpack_half2(x)
        s0, s1 = unpack_half2(span)
        z0, z1 = unpack_half2(middle)
        a = gl.fma(a, s0, z0)
        b = gl.fma(b, s1, z1)
        if VALUE:
            n0, n1 = unpack_half2(norm)
            a = a * n0
            b = b * n1
        return pack_half2(a, b, True)
    else:
        x = fma_half2(x, span, middle)
        if VALUE:
            x = mul_half2(x, norm)
        return finite_half2(x)


@gluon.jit
def put_unit(
    lane, first, second, words, low, salient, meta, stage, out, VALUE: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode 32 tokens. ``words``: a lane's codes; ``low``: of tokens g, g + 8, ..., four words of low bits, 0 where there are
    none; ``salient``: whether there are; ``meta``: address of zeros and ranges of channels or (VALUE) tokens."""
    g = lane // 4
    t = lane % 4
    none = lane * 0
    if VALUE:
        words = transposed(words)
    take = ()
    off = ()
    spans = ()
    middles = ()
    FINE: gl.constexpr = _half_pair(1 / 128)
    COARSE: gl.constexpr = _half_pair(5 / 512)
    OFF_FINE: gl.constexpr = _half_pair(-8 - 7.5 / 8)
    OFF_COARSE: gl.constexpr = _half_pair(-10 - 7.5 / 8)
    for r in gl.static_range(4):  # codes of four bits (those of two times five) less 7.5, over 8
        take = take + (gl.where(salient[r] != 0, none + FINE, none + COARSE),)
        off = off + (gl.where(salient[r] != 0, none + OFF_FINE, none + OFF_COARSE),)
        if VALUE:
            x = load_word(meta + (g + 8 * r) * 4)
            span = high_halves(x, x)
            spans = spans + (_eighth(span, lane),)
            middles = middles + (_middle(low_halves(x, x), span, lane),)
    for i in gl.static_range(4):
        norms = ()
        if VALUE:
            norms = load_shared(stage + t * 16, 64 * i, 4)
        else:
            x = load_words4(meta + t * 32, 128 * i) + load_words4(meta + t * 32, 128 * i + 16)
            middles = ()
            spans = ()
            for j in gl.static_range(4):
                span = high_halves(x[2 * j], x[2 * j + 1])
                spans = spans + (_eighth(span, lane),)
                middles = middles + (_middle(low_halves(x[2 * j], x[2 * j + 1]), span, lane),)
        if i % 2 == 0:
            one = first
        else:
            one = second
        for tt in gl.static_range(2):
            a = _operand(words, 4 * i + tt, D, BITS)
            b = _operand(words, 4 * i + 2 + tt, D, BITS)
            near = low[8 * tt + i]
            far = low[8 * tt + 4 + i]
            near = near | (near << 14)
            far = far | (far << 14)
            y = ((), ())
            for j in gl.static_range(4):
                if j == 0:
                    c0 = (near << 4) & 0x00300030
                    c1 = (far << 4) & 0x00300030
                else:
                    c0 = (near >> (4 * j - 4)) & 0x00300030
                    c1 = (far >> (4 * j - 4)) & 0x00300030
                c0, c1 = mma_half(a, one[2 * j], one[2 * j + 1], c0, c1)
                c0, c1 = mma_half(b, one[8 + 2 * j], one[8 + 2 * j + 1], c0, c1)
                acc = (c0, c1)
                new = ()
                for r in gl.static_range(2):
                    if VALUE:
                        z = _finished(
                            acc[r], take[2 * tt + r], off[2 * tt + r], spans[2 * tt + r], middles[2 * tt + r], norms[j],
                            True, BF16,
                        )  # fmt: skip
                    else:
                        z = _finished(
                            acc[r], take[2 * tt + r], off[2 * tt + r], spans[j], middles[j], none, False, BF16
                        )
                    new = new + (z,)
                y = (y[0] + (new[0],), y[1] + (new[1],))
            for r in gl.static_range(2):
                z = y[r]
                store_words4(out + ((g + (16 * tt + 8 * r)) * 256 + t * 16 + 64 * i), z[0], z[1], z[2], z[3])


@gluon.jit(do_not_specialize=["units", "count", "room", "pages", "first", "each", "wide"])
def unpack_mixed_kernel(
    codes, low, which, meta, norm, before_ptr, out, units, count, room, pages, first, each, wide,
    SALIENT: gl.constexpr, VALUE: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode ``count`` units of 32 tokens, ``units`` of each KV head of a sequence, to ``out``, [heads, wide, 128].

    From one KV head's storage to the next are ``room`` blocks of 128 tokens and ``pages`` pages of norms; a head's ``units``
    begin with block ``first`` of its storage. ``before_ptr``: int32 [32], bits of the tokens before each of a unit. A warp
    decodes ``each`` units, one after the other.
    """
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, STAGE * W)
    stage = _dynamic_base(lane) + warp * STAGE
    program_sync(lane)
    g = lane // 4
    t = lane % 4
    before = ()
    for r in gl.static_range(4):
        before = before + (gl.load(before_ptr + (g + 8 * r)),)
    even = diagonal(lane, 0)
    odd = diagonal(lane, 2)
    begin = (gl.program_id(0) * W + warp) * each
    for i in range(each):
        number = gl.minimum(begin + i, count - 1)
        head = number // units
        unit = number % units
        block = head.to(gl.int64) * room + first + unit // 4
        part = unit % 4
        source = codes.to(gl.int64) + (block * 4 + part) * CODE + lane * 16
        words = load_words4(source, 0) + load_words4(source, 512)
        marks = load_words4(which.to(gl.int64) + block * 16, 0)
        mark = gl.where(part == 0, marks[0], gl.where(part == 1, marks[1], gl.where(part == 2, marks[2], marks[3])))
        past = lane * 0
        for q in gl.static_range(3):
            past = past + gl.where(part > q, _ones_of(marks[q]), 0)
        rows = low.to(gl.int64) + block * (SALIENT * 32)
        rest = ()
        salient = ()
        for r in gl.static_range(4):  # token g + 8 r has bit 16 (g % 2) + 4 r' + g // 2, r' = 2, 0: r % 2, r // 2
            there = (mark >> (g % 2 * 16 + g // 2 + (r // 2 * 8 + r % 2 * 4))) & 1
            rank = gl.minimum(past + _ones_of(mark & before[r]), SALIENT - 1)
            at = rows + rank * 32 + t * 2
            salient = salient + (there,)
            for j in gl.static_range(4):
                rest = rest + (load_short(at + 8 * j, there),)
        # the next unit's codes, and low bits of the same block, come nearer meanwhile
        after = gl.minimum(past + _ones_of(mark), SALIENT - 5)
        ahead = gl.where(
            lane < 8,
            codes.to(gl.int64) + (block * 4 + part + gl.where(unit + 1 < units, 1, 0)) * CODE + lane * 128,
            rows + gl.maximum(after, 0) * 32 + lane % 8 * 64,
        )
        prefetch(ahead)
        page = head.to(gl.int64) * pages + first + unit // 4
        about = meta.to(gl.int64) + block * 512
        if VALUE:
            about = about + part * 128
            leave_norms(stage, lane, norm.to(gl.int64) + page * 128)
            warp_sync(lane)
        to = out.to(gl.int64) + (head.to(gl.int64) * wide + unit * 32) * 256
        put_unit(lane, even, odd, words, rest, salient, about, stage, to, VALUE, BF16)
        warp_sync(lane)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
