# mypy: ignore-errors
"""Flips of bits of values (CommVQ): the Gluon kernel of :mod:`kvfold.kernels.commvq.encode` for 64, 128 and 256 codes.

A program is a warp with eight tokens, four lanes each. A lane has a quarter of its token's codes in registers: of each what its
flip would gain, half the fall of the squared error. To flip bit j adds ``-d_j d_k <c_j, c_k>`` to every other bit k's gain,
where d is 1 for a bit to be set and -1 for one to be taken away; a row of products of codes, in fp16, does so for all k, and
signs are those of bits at the beginning. In place of ``<c_j, c_j>`` rows have a large number, so that a flipped bit is not
chosen again: its own gain, which is the negative one afterwards, costs nothing in the loop. When no flip gains anything, what
such bits gain by being flipped back is looked up once, and flips go on.

Lanes of odd tokens read a row's two halves of every 128 bytes in the other order, so that eight lanes ask for 128 bytes.

Of 32 tokens a warp has those whose bits are packed in the same words: lanes read each other's bits and store such words.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._stream import load_words4
from kvfold.kernels.common._tables import _shuffled
from kvfold.kernels.common._warp import as_float, as_int, load_global4, mul_half2, unpack_half2

FLIPPED = gl.constexpr(32768.0)
"""In place of a code's product with itself. Gains are below it; see :func:`kvfold.formats.binary.bit_gains`."""
ONES = gl.constexpr(0x3C003C00)
"""Two fp16 ones."""
MINUS_ONE = gl.constexpr(-1082130432)
"""An fp32 -1."""


@gluon.jit
def numbered(x, number, mask):
    """x with ``number`` in its lowest bits, which ``mask`` has not."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [x, mask, number], dtype=gl.int32, is_pure=True, pack=1
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
            # by units that multiply: those that apply masks have the numbers and the maximum to do
            low, high = unpack_half2(mul_half2(words[k], signs[4 * c + k]))
            out = out + (gl.fma(low, turn, gains[8 * c + 2 * k]), gl.fma(high, turn, gains[8 * c + 2 * k + 1]))
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
    gains, signs, bits, left, row0, least, lane, t, odd, C: gl.constexpr, EVERY: gl.constexpr,
):  # fmt: skip
    """Flip bits until none gains anything that has not been flipped, at most ``left`` times; which were flipped, and how many
    flips are left. EVERY: flips after which it is asked whether there may be more."""
    N: gl.constexpr = C // 4
    # a register, which the compiler does not know: an instruction has room for one constant, and that is the number
    mask = (as_int(least) >> 31) - N + lane * 0
    flipped = ()
    for _k in gl.static_range(len(bits)):
        flipped = flipped + (lane * 0,)
    going = gl.max(left, 0)
    while going > 0:
        for _i in range(EVERY):
            best = _best(gains, mask)
            number = best & (N - 1)
            code = ((number >> 3) ^ odd) * 32 + t * 8 + (number & 7)
            best = (best & (-2 * C)) | (2 * code + _bit(bits, number))
            best = gl.maximum(best, _shuffled(best, lane ^ 1))
            best = gl.maximum(best, _shuffled(best, lane ^ 2))
            more = (as_float(best) > least) & (left > 0)
            left = gl.where(more, left - 1, 0)
            code = best >> 1 & (C - 1)
            own = more & ((code >> 3 & 3) == t)
            flipped = _with_bit(flipped, ((code >> 5) ^ odd) * 8 + (code & 7), own.to(gl.int32))
            row = row0 + gl.where(more, code, C) * (2 * C)
            gains = _moved(gains, signs, row + odd * 64, row - odd * 64, as_float(best << 31 ^ MINUS_ONE))
        going = gl.max(left, 0)
    return gains, flipped


@gluon.jit
def _count(words):
    """Bits that are set in one or two words."""
    count = 0
    for k in gl.static_range(len(words)):
        x = words[k] - (words[k] >> 1 & 0x55555555)
        x = (x & 0x33333333) + (x >> 2 & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        count += (x * 0x01010101) >> 24 & 63
    return count


@gluon.jit
def swapped_parts(x, odd):
    """A lane's bits or, of an odd token, those with parts 1, 0, 3, 2 in the place of 0, 1, 2, 3."""
    return gl.where(odd == 1, (x >> 8 & 0x00FF00FF) | (x & 0x00FF00FF) << 8, x)


@gluon.jit
def flipped_bits(gains, bits, flips, row0, least, lane, C: gl.constexpr, EVERY: gl.constexpr):
    """Bits after up to ``flips`` flips of each token, as :func:`store_part` takes them.

    ``gains``, ``bits``: of the lane's codes, lanes of odd tokens have parts 1, 0, 3, 2; ``row0``: address of its part of the
    first code's products.
    """
    N: gl.constexpr = C // 4
    t = lane % 4
    odd = lane // 4 & 1
    signs = ()
    for k in gl.static_range(N // 2):
        pair = bits[k // 16] >> (2 * k % 32)
        signs = signs + ((pair & 1) << 15 ^ (pair & 2) << 30 ^ ONES,)
    left = lane * 0 + flips
    gains, flipped = _flip_all(gains, signs, bits, left, row0, least, lane, t, odd, C, EVERY)
    # a token's flips lie with its four lanes
    count = _count(flipped)
    count += _shuffled(count, lane ^ 1)
    left = left - (count + _shuffled(count, lane ^ 2))
    bits = _xor(bits, flipped)
    if gl.max(left, 0) > 0:
        turned = ()
        fixed = ()
        for k in gl.static_range(N // 2):
            pair = flipped[k // 16] >> (2 * k % 32)
            turned = turned + (signs[k] ^ ((pair & 1) << 15 | (pair & 2) << 30),)
            fixed = fixed + (
                gl.where((pair & 1) != 0, -FLIPPED - gains[2 * k], gains[2 * k]),
                gl.where((pair & 2) != 0, -FLIPPED - gains[2 * k + 1], gains[2 * k + 1]),
            )
        _, again = _flip_all(fixed, turned, bits, left, row0, least, lane, t, odd, C, EVERY)
        bits = _xor(bits, again)
    out = ()
    for w in gl.static_range(len(bits)):
        out = out + (swapped_parts(bits[w], odd),)
    return out


@gluon.jit
def _tile_word(bits, part, m, C: gl.constexpr):
    """Two adjacent words of 16 bits of values as tensor cores take them, and the first one's number / 2: a part's number m."""
    n = m // 4 * 16 + part % 2 * 8 + m // 2 % 2 * 4 + part // 2 * 2 + m % 2
    out = ()
    for half in gl.static_range(2):
        source = m // 2 % 2 * 8 + half * 4 + m % 2
        word = m * 0
        # bits of a lane's bytes go to fields that are 8, 4 or 2 apart
        if C == 256:
            for w in gl.static_range(2):
                some = m * 0
                for u in gl.static_range(2):
                    x = _shuffled(bits[w], source + n // 128 * 16 + 2 * u)
                    some = some | (x >> n // 16 % 8 & 0x01010101) << u
                some = (some | some >> 6) & 0x000F000F
                word = word | ((some | some >> 12) & 0xFF) << 8 * w
        else:
            for tile in gl.static_range(2):
                for u in gl.static_range(2):
                    x = _shuffled(bits[0], source + (16 * tile + 2 * u))
                    if C == 128:
                        word = word | (x >> n // 16 & 0x01010101) << 2 * u + tile
                    else:
                        for k in gl.static_range(2):
                            word = word | (x >> n // 16 + 4 * k & 0x01010101) << 4 * u + 2 * tile + k
            if C == 128:
                word = (word | word >> 4) & 0x00FF00FF
                word = word | word >> 8
        out = out + (word & 0xFFFF,)
    return out[0] | out[1] << 16, n


@gluon.jit
def _plain_word(bits, part, m, C: gl.constexpr):
    """Four adjacent bytes of values in plain order, and the first one's number / 4: a part's number m."""
    out = m * 0
    for f in gl.static_range(8):
        x = _shuffled(bits[0], 4 * f + m // 2 % 4)
        if C == 256:
            x = gl.where(m < 32, x, _shuffled(bits[1], 4 * f + m // 2 % 4))
        x = x >> m // 8 % 4 * 8 + m % 2 * 4 & 15
        out = out | (x * 0x00204081 & 0x01010101) << f
    return out, part * (C // 4) + m


@gluon.jit
def token_of(part, slot, ORDER: gl.constexpr):
    """Of 32 tokens that of a part's slot: eight whose bits lie in the same words. ORDER: 1 values' of tensor cores, 2 plain."""
    if ORDER == 2:
        return 4 * slot + part
    else:
        return slot // 4 * 16 + part * 4 + slot % 4


@gluon.jit
def store_part(bits, part, lane, out, real, C: gl.constexpr, ORDER: gl.constexpr):
    """Store the packed bits of a part of 32 tokens, whose C words lie at ``out``. ``bits``: of a lane's quarter of its token's
    codes, one word or two: bit ``8 q + k`` of word w is that of code ``128 w + 32 q + 8 (lane % 4) + k``."""
    for first in gl.static_range(0, C // 4, 32):
        m = lane + first
        if ORDER == 2:
            word, n = _plain_word(bits, part, m % (C // 4), C)
        else:
            word, n = _tile_word(bits, part, m % (C // 4), C)
        gl.store(out + n, word, mask=real & (m < C // 4))


@gluon.jit(do_not_specialize=["tokens", "flips", "first_block"])
def flip_kernel(
    gains_ptr, gram_ptr, least_ptr, rows_ptr, bits_ptr, tokens, flips, first_block, blocks, heads, batch, C: gl.constexpr,
    ORDER: gl.constexpr, PICKED: gl.constexpr,
):  # fmt: skip
    """Bits of values, flipped up to ``flips`` times each, and packed. Grid: (quarters of 32 tokens, heads, batch).

    ``gains`` float32 [heads, batch, tokens, C], whose lowest bits are those that flips begin with; ``gram`` fp16 [heads, C + 1,
    C]: products of codes, :data:`FLIPPED` for a code with itself, last a row of zeros; ``least`` float32 [heads]: gains that
    are none. ``bits`` int32 [lanes, blocks, C].
    """
    N: gl.constexpr = C // 4
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    head = gl.program_id(1)
    index = gl.program_id(2)
    place = index
    if PICKED:
        place = gl.load(rows_ptr + index).to(gl.int32)
    t = lane % 4
    odd = lane // 4 & 1
    unit = gl.program_id(0) // 4
    part = gl.program_id(0) % 4
    held = (head * batch + index).to(gl.int64) * tokens + (unit * 32 + token_of(part, lane // 4, ORDER))
    at = gains_ptr.to(gl.int64) + held * (4 * C) + t * 32
    row0 = gram_ptr.to(gl.int64) + head.to(gl.int64) * (2 * C * (C + 1)) + t * 16
    least = gl.load(least_ptr + head)
    on = lane * 0 + 1

    gains = ()
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
    bits = flipped_bits(gains, bits, flips, row0, least, lane, C, 1)
    block = (place * heads + head).to(gl.int64) * blocks + first_block + unit
    store_part(bits, part, lane, bits_ptr + block * C, lane >= 0, C, ORDER)


@gluon.jit
def _xor(a, b):
    out = ()
    for k in gl.static_range(len(a)):
        out = out + (a[k] ^ b[k],)
    return out
