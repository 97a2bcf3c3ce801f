"""Sums of CommVQ's centres that are whole steps: rows of a byte per channel.

Lane (g, t) adds up 16 pairs of channels of token g: channels 8t to 8t + 7, and 32 further, and their imaginary parts. A row is
64 bytes of real and 64 of imaginary parts. Of ``a + i b`` lanes of even g read the real part of a while those of odd g read the
imaginary part of b, and so on, so that the two tokens of a quarter of a warp never meet in a bank. Lanes of odd g have their
real parts' differences the other way round, and turn their signs at the end.

Numbers have seven bits. Differences (128 more) and sums fill a byte; four stages of them fit the mantissa of an fp16 number,
so they are added up as whole numbers under the exponent of 1024.

After a head's rows, 8,192 bytes a stage, lie fp16 [128], what a centre has beyond its stages' numbers, and float32 [64], the
pairs' steps.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._tables_gluon import _funnel, _odd_bytes, _shuffled, _swapped, _weighted_bytes
from kvfold.kernels._warp import add_half2, load_global4, load_shared


@gluon.constexpr_function
def _too_much(stages):
    """1024 and the middle of the numbers of as many stages, negative, as two fp16 numbers."""
    half = {1: 0xE480, 2: 0xE500, 3: 0xE580, 4: 0xE600}[stages]  # -1152, -1280, -1408, -1536
    word = half << 16 | half
    return word - (1 << 32)


@gluon.constexpr_function
def _place(bit):
    """A row's 128 bytes as a weight of the byte from ``bit`` on."""
    return (128 << bit) - (1 << 32 if bit == 24 else 0)


@gluon.jit
def stage_words(codes, OFFSET: gl.constexpr, start, odd):
    """A lane's stage's codes of tokens g and, 16 bits on, g + 8, a byte for each half; for ``odd`` g the halves exchanged."""
    x = _funnel(load_shared(codes, OFFSET, 1)[0], load_shared(codes, OFFSET + 4, 1)[0], start)
    y = _funnel(load_shared(codes, OFFSET + 12, 1)[0], load_shared(codes, OFFSET + 16, 1)[0], start)
    both = (x & 0xFFF) | (y & 0xFFF) << 16
    apart = (both & 0x3F003F) | (both << 2 & 0x3F003F00)
    return _swapped(apart, gl.where(odd, 0x2301, 0x3210))


@gluon.jit
def _stage(at, other):
    """Four words of differences of real parts, four of sums of imaginary parts."""
    a = load_shared(at[0], at[1], 4)
    b = load_shared(other[0], other[1], 4)
    c = load_shared(at[0] ^ 64, at[1], 4)
    d = load_shared(other[0] ^ 64, other[1], 4)
    out = ()
    for i in gl.static_range(4):
        out = out + (a[i] - b[i] + -2139062144,)  # 128 in each byte
    for i in gl.static_range(4):
        out = out + (c[i] + d[i],)
    return out


@gluon.jit
def _four_stages(x, first, second, PLACE: gl.constexpr, AT: gl.constexpr, words, COUNT: gl.constexpr):
    """COUNT stages' centres of one token of every lane added to ``x``; PLACE: of the token's bits in ``words``."""
    sums = (first * 0 + 0x64006400,) * 16
    for i in gl.static_range(COUNT):
        near = _weighted_bytes(words[i], first * 0 + _place(PLACE), first)
        far = _weighted_bytes(words[i], first * 0 + _place(PLACE + 8), second)
        found = _stage((near, AT + i * 8192), (far, AT + i * 8192))
        new = ()
        for j in gl.static_range(8):
            new = new + (sums[2 * j] + (found[j] & 0xFF00FF), sums[2 * j + 1] + _odd_bytes(found[j]))
        sums = new
    out = ()
    for j in gl.static_range(16):
        out = out + (add_half2(x[j], add_half2(sums[j], first * 0 + _too_much(COUNT))),)
    return out


@gluon.jit
def _with_four(x, y, word, lane, first, second, AT: gl.constexpr, COUNT: gl.constexpr):
    """COUNT stages of both tokens of every lane; ``word``: see :func:`stage_words`."""
    words = ()
    for i in gl.static_range(COUNT):
        words = words + (_shuffled(word, (lane & 28) + i),)
    x = _four_stages(x, first, second, 0, AT, words, COUNT)
    y = _four_stages(y, first, second, 16, AT, words, COUNT)
    return x, y


@gluon.jit
def tile_steps(lane, odd, codes, start, base, shifts, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Sums of centres of tokens g and g + 8 of a tile of 16, in steps: two times 16 words.

    ``codes``: address of the unit's codes of stage t; ``shifts``: see :func:`shifts_of`.
    """
    g_odd = odd.to(gl.int32)
    first = base + g_odd * 64 + lane % 4 * 16
    second = base + (64 - g_odd * 64) + lane % 4 * 16
    x = shifts
    y = x
    FULL: gl.constexpr = STAGES // 4
    at = codes + TILE * 24
    near = first
    far = second
    for _j in range(FULL):
        x, y = _with_four(x, y, stage_words(at, 0, start, odd), lane, near, far, 0, 4)
        at = at + 192
        near = near + 32768
        far = far + 32768
    if STAGES % 4 > 0:
        word = stage_words(codes, TILE * 24 + FULL * 192, start, odd)
        x, y = _with_four(x, y, word, lane, first, second, FULL * 32768, STAGES % 4)
    sign = (0 - g_odd) & -2147450880
    near_out = ()
    far_out = ()
    for i in gl.static_range(8):
        near_out = near_out + (x[i] ^ sign,)
        far_out = far_out + (y[i] ^ sign,)
    for i in gl.static_range(8):
        near_out = near_out + (x[8 + i],)
        far_out = far_out + (y[8 + i],)
    return near_out, far_out


@gluon.jit
def shifts_of(tables, odd, t, STAGES: gl.constexpr):
    """What a lane's centres have beyond their stages' numbers: 16 words."""
    at = tables + STAGES * 8192 + t * 16
    on = t * 0 + 1
    words = load_global4(at, on) + load_global4(at + 64, on) + load_global4(at + 128, on) + load_global4(at + 192, on)
    sign = (0 - odd.to(gl.int32)) & -2147450880
    out = ()
    for i in gl.static_range(8):
        out = out + (words[i] ^ sign,)
    for i in gl.static_range(8):
        out = out + (words[8 + i],)
    return out
