"""Flips of bits of values (CommVQ): the Gluon kernel of :mod:`kvfold.kernels.encode_pairs` for 64, 128 and 256 codes.

A program is a warp with eight tokens, four lanes each. A lane has a quarter of its token's codes in registers: of each what its
flip would gain, half the fall of the squared error. To flip bit j adds ``-d_j d_k <c_j, c_k>`` to every other bit k's gain,
where d is 1 for a bit to be set and -1 for one to be taken away; a row of products of codes, in fp16, does so for all k, and
signs are those of bits at the beginning. In place of ``<c_j, c_j>`` rows have a large number, so that a flipped bit is not
chosen again: its own gain, which is the negative one afterwards, costs nothing in the loop. When no flip gains anything, what
such bits gain by being flipped back is looked up once, and flips go on.

Lanes of odd tokens read a row's two halves of every 128 bytes in the other order, so that eight lanes ask for 128 bytes.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._tables_gluon import _shuffled
from kvfold.kernels._turned_gluon import load_words4
from kvfold.kernels._warp import as_float, as_int, load_global4, unpack_half2

FLIPPED = gl.constexpr(32768.0)
"""In place of a code's product with itself. Gains are below it; see :func:`kvfold.formats.codebook.bit_gains`."""
SIGNS = gl.constexpr(-2147450880)
"""Sign bits of both halves of a word."""


@gluon.jit
def numbered(x, number, mask):
    """x with ``number`` in its lowest bits, which ``mask`` has not."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [x, mask, number], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def signed_words(word, signs, turn):
    """``word ^ signs ^ turn`` in one instruction."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0x96;", "=r,r,r,r", [word, signs, turn], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _best(gains, mask):
    """The largest of a lane's gains as an integer, with its number in the lowest bits."""
    tops = ()
    for c in gl.static_range(len(gains) // 8):
        top = numbered(as_int(gains[8 * c]), 8 * c, mask)
        for k in gl.static_range(1, 8):
            top = gl.maximum(top, numbered(as_int(gains[8 * c + k]), 8 * c + k, mask))
        tops = tops + (top,)
    best = tops[0]
    for c in gl.static_range(1, len(tops)):
        best = gl.maximum(best, tops[c])
    return best


@gluon.jit
def _moved(gains, signs, even, odd, turn):
    """Gains after a flip, whose row of products with all codes is read at the addresses of its even and odd parts."""
    out = ()
    for c in gl.static_range(len(gains) // 8):
        words = load_words4(even if c % 2 == 0 else odd, 64 * c)
        for k in gl.static_range(4):
            low, high = unpack_half2(signed_words(words[k], signs[4 * c + k], turn))
            out = out + (gains[8 * c + 2 * k] + low, gains[8 * c + 2 * k + 1] + high)
    return out


@gluon.jit
def _bit(words, number):
    """Bit ``number`` of one or two words."""
    word = words[0]
    if len(words) > 1:
        word = gl.where(number < 32, words[0], words[1])
    return word >> (number & 31) & 1


@gluon.jit
def _with_bit(words, number, bit):
    """One or two words, ``bit`` added at ``number`` without a carry."""
    added = bit << (number & 31)
    if len(words) > 1:
        return (words[0] ^ gl.where(number < 32, added, 0), words[1] ^ gl.where(number < 32, 0, added))
    else:
        return (words[0] ^ added,)


@gluon.jit
def _flip_all(
    gains, signs, bits, left, row0, real, least, lane, t, odd, C: gl.constexpr,
):  # fmt: skip
    """Flip bits until none gains anything that has not been flipped, at most ``left`` times; and which were flipped."""
    N: gl.constexpr = C // 4
    # a register, which the compiler does not know: an instruction has room for one constant, and that is the number
    mask = (as_int(least) >> 31) - N + lane * 0
    flipped = ()
    for _k in gl.static_range(len(bits)):
        flipped = flipped + (lane * 0,)
    going = left
    while going > 0:
        best = _best(gains, mask)
        number = best & (N - 1)
        code = ((number >> 3) ^ odd) * 32 + t * 8 + (number & 7)
        best = (best & (-2 * C)) | (2 * code + _bit(bits, number))
        best = gl.maximum(best, _shuffled(best, lane ^ 1))
        best = gl.maximum(best, _shuffled(best, lane ^ 2))
        more = (as_float(best) > least) & real
        code = best >> 1 & (C - 1)
        own = more & ((code >> 3 & 3) == t)
        flipped = _with_bit(flipped, ((code >> 5) ^ odd) * 8 + (code & 7), own.to(gl.int32))
        row = row0 + gl.where(more, code, C) * (2 * C)
        turn = ((best & 1) - 1) & SIGNS
        gains = _moved(gains, signs, row + odd * 64, row - odd * 64, turn)
        left = left - 1
        going = gl.where(gl.max(more.to(gl.int32), 0) > 0, left, 0)
    return gains, flipped, left


@gluon.jit(do_not_specialize=["tokens", "flips"])
def flip_kernel(gains_ptr, gram_ptr, least_ptr, words_ptr, tokens, flips, C: gl.constexpr):
    """Bits of values, flipped up to ``flips`` times each. Grid: (eights of tokens, heads).

    ``gains`` float32 [heads, tokens, C], whose lowest bits are those that flips begin with; ``gram`` fp16 [heads, C + 1, C]:
    products of codes, :data:`FLIPPED` for a code with itself, last a row of zeros; ``least`` float32 [heads]: gains that are
    none. ``words`` int32 [heads, tokens, 4, C / 128 or 1]: code c has bit ``c % 8 + 8 (c // 32 % 4)`` of word ``[c // 8 % 4,
    c // 128]``.
    """
    N: gl.constexpr = C // 4
    WORDS: gl.constexpr = (C + 127) // 128
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    head = gl.program_id(1)
    t = lane % 4
    token = gl.program_id(0) * 8 + lane // 4
    odd = lane // 4 & 1
    real = token < tokens
    held = head.to(gl.int64) * tokens + gl.minimum(token, tokens - 1)
    at = gains_ptr.to(gl.int64) + held * (4 * C) + t * 32
    row0 = gram_ptr.to(gl.int64) + head.to(gl.int64) * (2 * C * (C + 1)) + t * 16
    least = gl.load(least_ptr + head)
    on = lane * 0 + 1

    gains = ()
    signs = ()
    bits = ()
    for c in gl.static_range(N // 8):
        if c % 4 == 0:
            bits = bits + (lane * 0,)
        here = at + (c * 128 + odd * 128 if c % 2 == 0 else c * 128 - odd * 128)
        words = load_global4(here, on) + load_global4(here + 16, on)
        some = bits[c // 4]
        for k in gl.static_range(8):
            gains = gains + (as_float(words[k]),)
            some = some | (words[k] & 1) << (8 * (c % 4) + k)
        bits = bits[: c // 4] + (some,)
        for k in gl.static_range(4):
            signs = signs + ((words[2 * k] & 1) << 15 | words[2 * k + 1] << 31,)

    gains, flipped, left = _flip_all(gains, signs, bits, flips, row0, real, least, lane, t, odd, C)
    bits = _xor(bits, flipped)
    if left > 0:
        turned = ()
        fixed = ()
        for k in gl.static_range(N // 2):
            pair = flipped[k // 16] >> (2 * k % 32)
            turned = turned + (signs[k] ^ ((pair & 1) << 15 | (pair & 2) << 30),)
            fixed = fixed + (
                gl.where((pair & 1) != 0, -FLIPPED - gains[2 * k], gains[2 * k]),
                gl.where((pair & 2) != 0, -FLIPPED - gains[2 * k + 1], gains[2 * k + 1]),
            )
        _, again, left = _flip_all(fixed, turned, bits, left, row0, real, least, lane, t, odd, C)
        bits = _xor(bits, again)

    to = words_ptr + (held * 4 + t) * WORDS
    for w in gl.static_range(WORDS):
        # a lane of an odd token has parts 1, 0, 3, 2
        turned_bits = (bits[w] >> 8 & 0x00FF00FF) | (bits[w] & 0x00FF00FF) << 8
        gl.store(to + w, gl.where(odd == 1, turned_bits, bits[w]), mask=real)


@gluon.jit
def _xor(a, b):
    out = ()
    for k in gl.static_range(len(a)):
        out = out + (a[k] ^ b[k],)
    return out
