# mypy: ignore-errors
"""Bits of values (CommVQ), chosen, flipped and packed by one Gluon kernel, for 64, 128 and 256 codes.

A warp has sixteen tokens, as ``mma.m16n8k16`` does: lane (g, t) has channels, and codes, 8t to 8t + 7 of every 32, of tokens g
and g + 8. Three products say what bits a token begins with, what these bits miss of it, and how its error falls along each
code. Columns stand in such an order that sums are of a lane's own codes and channels. So what is missed, packed to fp16, is the
next product's operand as it lies, and no sum is written to memory. Eight tokens' gains wait in shared memory while the others'
bits are flipped (:mod:`kvfold.kernels.commvq._flips`).

Warps of a program read the same operands at about the same time, so that most come from the multiprocessor's own cache.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    load_global4,
    load_shared4f,
    mma,
    pack_half2,
    shared_base,
    store_shared4,
    unpack_half2,
)
from kvfold.kernels.commvq._flips import flipped_bits, store_part, swapped_parts, token_of

FARTHEST = gl.constexpr(64.0)
"""Of scaled values: gains stay below what marks a flipped bit."""
MAGIC = gl.constexpr(12582912.0)
"""1.5 times 2^23: a sum with it is rounded to a whole number, halves to the even one, which its last bits are."""


@gluon.constexpr_function
def waiting_bytes(codes):
    """Bytes of shared memory of a warp: eight tokens' gains."""
    return 32 * codes


@gluon.jit
def _floats8(address, on):
    """Eight fp32 numbers of global memory."""
    words = load_global4(address, on) + load_global4(address + 16, on)
    out = ()
    for k in gl.static_range(8):
        out = out + (as_float(words[k]),)
    return out


@gluon.jit
def _given8(address, on, KIND: gl.constexpr):
    """Eight elements of global memory. KIND: 0 fp16, 1 bf16, 2 fp32."""
    if KIND == 2:
        return _floats8(address, on)
    else:
        words = load_global4(address, on)
        out = ()
        for k in gl.static_range(4):
            if KIND == 1:
                out = out + (as_float(words[k] << 16), as_float(words[k] & -65536))
            else:
                out = out + unpack_half2(words[k])
        return out


@gluon.jit
def _scaled(address, offsets, scale, on, D: gl.constexpr, KIND: gl.constexpr):
    """A lane's channels of a token, less ``offsets``, times ``scale``: D / 8 words."""
    out = ()
    for m in gl.static_range(D // 32):
        x = _given8(address + m * (128 if KIND == 2 else 64), on, KIND)
        less = _floats8(offsets + 128 * m, on)
        for k in gl.static_range(4):
            low = (x[2 * k] - less[2 * k]) * scale
            high = (x[2 * k + 1] - less[2 * k + 1]) * scale
            low = gl.minimum(gl.maximum(low, -FARTHEST), FARTHEST)
            high = gl.minimum(gl.maximum(high, -FARTHEST), FARTHEST)
            out = out + (pack_half2(low, high, False),)
    return out


@gluon.constexpr_function
def _operand_asm(offset):
    return f"ld.global.nc.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"


@gluon.jit
def operand_words(address, OFFSET: gl.constexpr):
    """16 bytes of an operand, not earlier than they are asked for: many would wait in registers."""
    asm: gl.constexpr = _operand_asm(OFFSET)
    return gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,l", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def _plus_product(accs, x, y, at):
    """Sums of 32 codes, eight columns of ``mma`` at a time, and of sixteen tokens' words ``x`` and ``y`` times a part of an
    operand, which is at address ``at``."""
    K: gl.constexpr = len(x) // 4
    out = accs
    for m in gl.static_range(K):
        new = ()
        for i in gl.static_range(4):
            z = operand_words(at, 512 * (i * K + m))
            acc = mma(x[4 * m], y[4 * m], x[4 * m + 1], y[4 * m + 1], z[0], z[1], out[i], False)
            new = new + (mma(x[4 * m + 2], y[4 * m + 2], x[4 * m + 3], y[4 * m + 3], z[2], z[3], acc, False),)
        out = new
    return out


@gluon.jit
def _first_bits(x, y, at, vectors, on, four, C: gl.constexpr):
    """Bits by levels of a lane's codes, of both of its tokens: one word or two each. ``vectors``: address of the lane's part of
    what is added, of largest levels and of digits."""
    bits = ()
    others = ()
    for w in gl.static_range((C + 127) // 128):
        word = on * 0
        other = on * 0
        for i in range(four if C > 64 else 2):
            c = 4 * w + i
            here = vectors + 128 * c
            more = _floats8(here, on)
            accs = ()
            for n in gl.static_range(4):
                accs = accs + ((more[2 * n], more[2 * n + 1], more[2 * n], more[2 * n + 1]),)
            accs = _plus_product(accs, x, y, at + c * (512 * len(x)))
            top = _floats8(here + 4 * C, on)
            place = load_global4(here + 8 * C, on) + load_global4(here + (8 * C + 16), on)
            for k in gl.static_range(8):
                acc = accs[k // 2]
                near = gl.minimum(gl.maximum(acc[k % 2], 0.0), top[k]) + MAGIC
                far = gl.minimum(gl.maximum(acc[2 + k % 2], 0.0), top[k]) + MAGIC
                word = word | (as_int(near) >> place[k] & 1) << (8 * i + k)
                other = other | (as_int(far) >> place[k] & 1) << (8 * i + k)
        bits = bits + (word,)
        others = others + (other,)
    return bits, others


@gluon.jit
def _apart(x):
    """Even bits in the low half, odd ones in the high half."""
    y = (x ^ x >> 1) & 0x22222222
    x = x ^ y ^ y << 1
    y = (x ^ x >> 2) & 0x0C0C0C0C
    x = x ^ y ^ y << 2
    y = (x ^ x >> 4) & 0x00F000F0
    x = x ^ y ^ y << 4
    y = (x ^ x >> 8) & 0x0000FF00
    return x ^ y ^ y << 8


@gluon.constexpr_function
def _minus_asm(k):
    return f"{{ .reg .b32 x; shr.b32 x, $1, {k}; and.b32 x, x, 0x10001; mul.lo.u32 $0, x, 0xBC00; }}"


@gluon.jit
def minus_ones(x, K: gl.constexpr):
    """Two fp16 numbers: -1 where bit K of a half is set, else 0. Made again for each product: many would wait in registers."""
    asm: gl.constexpr = _minus_asm(K)
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _missed_part(x, y, bits, others, at, four, C: gl.constexpr, FIRST: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """What bits miss of a lane's words ``x`` and ``y``: N words of each, of channels from FIRST on."""
    accs = ()
    for n in gl.static_range(N):
        near = unpack_half2(x[FIRST // 8 + n])
        far = unpack_half2(y[FIRST // 8 + n])
        accs = accs + ((near[0], near[1], far[0], far[1]),)
    for w in gl.static_range(len(bits)):
        for i in range(four if C > 64 else 2):
            a = ()
            for k in gl.static_range(4):
                a = a + (minus_ones(bits[w] >> 4 * i, k), minus_ones(others[w] >> 4 * i, k))
            here = at + (4 * w + i) * (64 * D)
            new = ()
            for n in gl.static_range(N):
                z = operand_words(here, 64 * FIRST + 512 * n)
                acc = mma(a[0], a[1], a[2], a[3], z[0], z[1], accs[n], False)
                new = new + (mma(a[4], a[5], a[6], a[7], z[2], z[3], acc, False),)
            accs = new
    near = ()
    far = ()
    for n in gl.static_range(N):
        near = near + (pack_half2(accs[n][0], accs[n][1], False),)
        far = far + (pack_half2(accs[n][2], accs[n][3], False),)
    return near, far


@gluon.jit
def _missed(x, y, bits, others, at, four, C: gl.constexpr, D: gl.constexpr):
    """Words ``x`` and ``y`` of a lane's channels, of two tokens, less the codes of their bits, of which even and odd ones are
    in halves of words (:func:`_apart`). Sums are in fp32, as many at a time as registers hold; what is missed is fp16 again."""
    out = ()
    others_out = ()
    WIDTH: gl.constexpr = 128 if C > 128 else 64
    for first in gl.static_range(0, D, WIDTH):
        near, far = _missed_part(x, y, bits, others, at, four, C, first, min(WIDTH, D - first) // 8, D)
        out = out + near
        others_out = others_out + far
    return out, others_out


@gluon.jit
def _signed(x, bits, K: gl.constexpr, less):
    """What flipping bit number K gains, of how the error falls along its code."""
    return as_float(as_int(x) ^ (bits >> K) << 31) - less


@gluon.jit(do_not_specialize=["tokens", "flips", "first_block", "stride_b", "stride_h", "stride_t"])
def value_bits_kernel(
    x_ptr, stride_b, stride_h, stride_t, offset_ptr, scale_ptr, vectors_ptr, operands_ptr, gram_ptr, least_ptr, rows_ptr,
    bits_ptr, tokens, flips, first_block, blocks, heads, D: gl.constexpr, C: gl.constexpr, KIND: gl.constexpr,
    EVERY: gl.constexpr, ORDER: gl.constexpr, PICKED: gl.constexpr,
):  # fmt: skip
    """Bits of values by levels, flipped up to ``flips`` times each, and packed. Grid: (16 tokens a warp, heads, batch).

    Tables as :class:`kvfold.formats.binary.BitGains` has them; ``gram``: its ``rows``. ``bits`` int32 [lanes, blocks, C].
    """
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = C // 4
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    wait = shared_base(lane, waiting_bytes(C) * W) + warp * waiting_bytes(C) + lane * 16
    head = gl.program_id(1)
    index = gl.program_id(2)
    place = index
    if PICKED:
        place = gl.load(rows_ptr + index).to(gl.int32)
    g = lane // 4
    t = lane % 4
    odd = g & 1
    number = gl.program_id(0) * W + warp
    real = number < tokens // 16
    number = gl.minimum(number, tokens // 16 - 1)
    unit = number // 2
    part = number % 2 * 2
    on = lane * 0 + 1
    scale = gl.load(scale_ptr + head)
    # a warp without tokens flips nothing
    least = gl.where(real, gl.load(least_ptr + head), float("inf"))
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    own = x_ptr.to(gl.int64) + (index.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h + t * 8) * SIZE
    first = unit * 32 + token_of(part, g, ORDER)
    second = unit * 32 + token_of(part + 1, g, ORDER)
    offsets = offset_ptr.to(gl.int64) + head * (4 * D) + t * 32
    x = _scaled(own + first.to(gl.int64) * stride_t * SIZE, offsets, scale, on, D, KIND)
    y = _scaled(own + second.to(gl.int64) * stride_t * SIZE, offsets, scale, on, D, KIND)
    at = operands_ptr.to(gl.int64) + head.to(gl.int64) * (6 * C * D) + lane * 16
    vectors = vectors_ptr.to(gl.int64) + head * (16 * C) + t * 32
    # which the compiler does not know: it would unroll loops, whose operands take more registers than there are
    four = gl.minimum(tokens // 8, 4)
    bits, others = _first_bits(x, y, at, vectors, on, four, C)

    apart = ()
    others_apart = ()
    for w in gl.static_range(len(bits)):
        apart = apart + (_apart(bits[w]),)
        others_apart = others_apart + (_apart(others[w]),)
    x, y = _missed(x, y, apart, others_apart, at + 2 * C * D, four, C, D)
    gains = ()
    for w in gl.static_range(len(bits)):
        held = ()
        for _k in gl.static_range(N // len(bits)):
            held = held + (lane * 0.0,)
        for i in range(N // (8 * len(bits))):
            c = 4 * w + i
            accs = ()
            for _i in gl.static_range(4):
                accs = accs + ((lane * 0.0, lane * 0.0, lane * 0.0, lane * 0.0),)
            accs = _plus_product(accs, x, y, at + 4 * C * D + c * (64 * D))
            half = _floats8(vectors + (12 * C + 128 * c), on)
            now = ()
            later = ()
            for k in gl.static_range(8):
                acc = accs[k // 2]
                now = now + (_signed(acc[k % 2], bits[w] >> 8 * i, k, half[k]),)
                later = later + (_signed(acc[2 + k % 2], others[w] >> 8 * i, k, half[k]),)
            held = held[8:] + now  # places in registers have no numbers that a loop could count
            store_shared4(wait + 1024 * c, later[0], later[1], later[2], later[3])
            store_shared4(wait + (1024 * c + 512), later[4], later[5], later[6], later[7])
        gains = gains + held

    swapped = ()
    for k in gl.static_range(N):
        swapped = swapped + (gl.where(odd == 1, gains[k ^ 8], gains[k]),)
    gains = swapped
    row0 = gram_ptr.to(gl.int64) + head.to(gl.int64) * (2 * C * (C + 1)) + t * 16
    out = bits_ptr + ((place * heads + head).to(gl.int64) * blocks + first_block + unit) * C
    for r in range(2):
        turned = ()
        for w in gl.static_range(len(bits)):
            turned = turned + (swapped_parts(bits[w], odd),)
        store_part(flipped_bits(gains, turned, flips, row0, least, lane, C, EVERY), part + r, lane, out, real, C, ORDER)
        gains = ()
        for k in gl.static_range(N // 8):
            here = wait + (1024 * k + odd * 1024 if k % 2 == 0 else 1024 * k - odd * 1024)
            gains = gains + load_shared4f(here) + load_shared4f(here + 512)
        bits = others
