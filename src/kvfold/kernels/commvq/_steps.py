# mypy: ignore-errors
"""Sums of CommVQ's centres that are in steps: rows of a byte per channel.

Lane (g, t) adds up 16 pairs of channels of token g: channels 8t to 8t + 7, and 32 further, and their imaginary parts. A row is
64 bytes of real and 64 of imaginary parts. Of ``a + i b`` lanes of even g read the real part of a while those of odd g read the
imaginary part of b, and so on, so that the two tokens of a quarter of a warp never meet in a bank. Lanes of odd g have their
real parts' differences the other way round, and turn their signs at the end.

Stages of a group share their pairs' steps (:func:`kvfold.formats.codebook.sharing`). Their numbers are so small that their
differences, with a bias, and their sums fill a byte: a stage takes one addition of three operands for each word. Then bytes
become halves of words under the exponent of 1024, which are multiplied with the group's steps as fp16 numbers. The last stages,
whose steps are shortest, come first, so that fp16 rounds small sums.

After a head's rows, 8,192 bytes a stage, lie fp16 [groups - 1, 64], the pairs' steps as multiples of those of stage 0, and
fp16 [128], what a centre has beyond its stages' numbers. Programs keep these in shared memory. float32 [64] follow, steps of
stage 0.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._tables import _funnel, _shuffled, _swapped, _weighted_bytes
from kvfold.kernels.common._warp import add_half2, as_float, fma_half2, load_global4, load_shared, low_halves


@gluon.constexpr_function
def kept_bytes(stages):
    """Bytes of a head's rows, and of what programs keep beside them."""
    return stages * 8192 + (stages + 2) // 4 * 128 + 256


@gluon.constexpr_function
def head_bytes(stages):
    """Bytes from a head's rows to the next one's."""
    return kept_bytes(stages) + 256


@gluon.constexpr_function
def _middle(stages):
    """Of sums of as many stages that share steps."""
    return 255 // (2 * stages) * stages


@gluon.constexpr_function
def _bias(stages):
    """What differences of as many stages have beyond their value, in each byte: with it none is negative."""
    return _middle(stages) * 0x1010101


@gluon.constexpr_function
def _too_much(stages):
    """1024 and the middle of sums of as many stages, negative, as two fp16 numbers."""
    half = 0xE400 + _middle(stages)
    return (half << 16 | half) - (1 << 32)


@gluon.constexpr_function
def _place(bit):
    """A row's 128 bytes as a weight of the byte from ``bit`` on."""
    return (128 << bit) - (1 << 32 if bit == 24 else 0)


@gluon.jit
def _with_difference(x, a, b):
    """x + a - b; in an order that the compiler keeps, and makes one instruction of."""
    asm: gl.constexpr = "{ .reg .b32 s; add.s32 s, $1, $2; sub.s32 $0, s, $3; }"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _with_sum(x, a, b):
    """x + a + b; in an order that the compiler keeps, and makes one instruction of."""
    asm: gl.constexpr = "{ .reg .b32 s; add.s32 s, $1, $2; add.s32 $0, s, $3; }"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _above_1024(x, order, ODD: gl.constexpr):
    """Bytes 0 and 2 of x, or 1 and 3, as two fp16 numbers, 1024 more; ``order`` has 0x64 in its highest byte. If the compiler
    knew that word, it would keep it in the instruction, and selectors in registers."""
    if ODD:
        asm: gl.constexpr = "prmt.b32 $0, $1, $2, 0x7371;"
    else:
        asm: gl.constexpr = "prmt.b32 $0, $1, $2, 0x7270;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [x, order], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def stage_words(codes, OFFSET: gl.constexpr, start, order):
    """A lane's stage's codes of tokens g and, 16 bits on, g + 8, a byte for each half, in the ``order`` of bytes that its low
    half says."""
    x = _funnel(load_shared(codes, OFFSET, 1)[0], load_shared(codes, OFFSET + 4, 1)[0], start)
    y = _funnel(load_shared(codes, OFFSET + 12, 1)[0], load_shared(codes, OFFSET + 16, 1)[0], start)
    both = low_halves(x, y)
    apart = (both & 0x3F003F) | (both << 2 & 0x3F003F00)
    return _swapped(apart, order)


@gluon.jit
def _byte_sums(words, first, second, PLACE: gl.constexpr, AT: gl.constexpr, COUNT: gl.constexpr):
    """COUNT stages' numbers of one token of every lane: four words of differences of real parts, four of sums of imaginary
    ones. PLACE: of the token's bits in ``words``."""
    near = first * 0 + _place(PLACE)
    far = first * 0 + _place(PLACE + 8)
    sums = ()
    for i in gl.static_range(COUNT):
        a = load_shared(_weighted_bytes(words[i], near, first), AT + i * 8192, 4)
        b = load_shared(_weighted_bytes(words[i], far, second), AT + i * 8192, 4)
        c = load_shared(_weighted_bytes(words[i], near, second), AT + i * 8192, 4)
        d = load_shared(_weighted_bytes(words[i], far, first), AT + i * 8192, 4)
        new = ()
        for j in gl.static_range(4):
            if i == 0:
                new = new + (_with_difference(first * 0 + _bias(COUNT), a[j], b[j]),)
            else:
                new = new + (_with_difference(sums[j], a[j], b[j]),)
        for j in gl.static_range(4):
            if i == 0:
                new = new + (c[j] + d[j],)
            else:
                new = new + (_with_sum(sums[4 + j], c[j], d[j]),)
        sums = new
    return sums


@gluon.jit
def _more(x, sums, ratios, order, COUNT: gl.constexpr):
    """16 words ``x`` and sums of COUNT stages, times 8 words of ratios where there are any. ``order``: see
    :func:`_above_1024`."""
    less = sums[0] * 0 + _too_much(COUNT)
    out = ()
    for j in gl.static_range(16):
        whole = add_half2(_above_1024(sums[j // 2], order, j % 2 == 1), less)
        if len(ratios) > 0:
            out = out + (fma_half2(whole, ratios[j % 8], x[j]),)
        else:
            out = out + (add_half2(whole, x[j]),)
    return out


@gluon.jit
def _with_group(x, y, word, lane, order, first, second, ratios, AT: gl.constexpr, COUNT: gl.constexpr):
    """COUNT stages of both tokens of every lane; ``word``: see :func:`stage_words`; ``ratios``: address of the lane's, or
    None."""
    words = ()
    for i in gl.static_range(COUNT):
        words = words + (_shuffled(word, (lane & 28) + i),)
    ratio = ()
    if ratios is not None:
        ratio = load_shared(ratios, 0, 4) + load_shared(ratios, 64, 4)
    x = _more(x, _byte_sums(words, first, second, 0, AT, COUNT), ratio, order, COUNT)
    y = _more(y, _byte_sums(words, first, second, 16, AT, COUNT), ratio, order, COUNT)
    return x, y


@gluon.jit
def _with_shift(x, sign, shift):
    """A token's sums, real parts times ``sign``, and what centres have beyond them."""
    out = ()
    for i in gl.static_range(8):
        out = out + (fma_half2(x[i], sign, shift[i]),)
    for i in gl.static_range(8, 16):
        out = out + (add_half2(x[i], shift[i]),)
    return out


@gluon.jit
def tile_steps(lane, odd, codes, start, base, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Sums of centres of tokens g and g + 8 of a tile of 16, in steps of stage 0: two times 16 words.

    ``codes``: address of the unit's codes of stage t; ``base``: address of the head's rows, behind which lies what belongs to
    them.
    """
    FULL: gl.constexpr = (STAGES - 1) // 4
    REST: gl.constexpr = (STAGES - 1) % 4
    LAST: gl.constexpr = STAGES - 4
    BEHIND: gl.constexpr = STAGES * 8192 + (STAGES + 2) // 4 * 128
    g_odd = odd.to(gl.int32)
    order = gl.where(odd, 0x64002301, 0x64003210)  # halves of an odd token's codes are exchanged
    at = base + lane % 4 * 16
    first = at + g_odd * 64
    second = at + (64 - g_odd * 64)
    source = codes + (TILE * 24 + LAST * 48)
    near = first + LAST * 8192
    far = second + LAST * 8192
    ratios = at + (BEHIND - 128)
    x = (lane * 0,) * 16
    y = x
    for _j in range(FULL):
        x, y = _with_group(x, y, stage_words(source, 0, start, order), lane, order, near, far, ratios, 0, 4)
        source = source - 192
        near = near - 32768
        far = far - 32768
        ratios = ratios - 128
    if REST > 0:
        word = stage_words(codes, TILE * 24 + 48, start, order)
        x, y = _with_group(x, y, word, lane, order, first, second, at + STAGES * 8192, 8192, REST)
    x, y = _with_group(x, y, stage_words(codes, TILE * 24, start, order), lane, order, first, second, None, 0, 1)
    sign = 0x3C003C00 - g_odd * -2147450880
    shift = (
        load_shared(at, BEHIND, 4) + load_shared(at, BEHIND + 64, 4) + load_shared(at, BEHIND + 128, 4)
        + load_shared(at, BEHIND + 192, 4)
    )  # fmt: skip
    return _with_shift(x, sign, shift), _with_shift(y, sign, shift)


@gluon.jit
def steps_of_pairs(tables, lane, STAGES: gl.constexpr):
    """Steps of pairs 2 lane and 2 lane + 1 of a head's tables in stage 0."""
    words = load_global4(tables + kept_bytes(STAGES) + lane // 2 * 16, lane * 0 + 1)
    return (
        as_float(gl.where(lane % 2 == 1, words[2], words[0])),
        as_float(gl.where(lane % 2 == 1, words[3], words[1])),
    )
