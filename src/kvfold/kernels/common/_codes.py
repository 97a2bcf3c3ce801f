# mypy: ignore-errors
"""Packed codes in kernels of Gluon: where they lie, how they come to a warp, how they become operands of tensor cores.

Of :mod:`kvfold.formats.packing`'s orders the one of tensor cores. The same codes are read in two ways: as they are stored
(``weight``, ``step``), or with 3 bits put together as nibbles first (``nibble_weight``, ``nibble_step``).
"""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _item
from kvfold.kernels.common._warp import copy_async, load_shared, select


@gluon.constexpr_function
def code_bytes(dim, bits):
    """Bytes of the codes of 32 tokens."""
    return 4 * dim * bits


@gluon.constexpr_function
def _main(bits):
    """Bits of the plane that holds the low bits."""
    return 2 if bits == 3 else bits


@gluon.constexpr_function
def _arrays(dim, bits):
    """256-word arrays in a plane; a lane's 8 words of one are 16 bytes."""
    return max(1, dim * bits // 128)


@gluon.constexpr_function
def _field(dim, bits, tile):
    """Array, and first bit, of the codes of a tile in a plane."""
    if dim * bits < 128:  # half an array: a tile takes two fields, the second one for lanes 16 to 31
        return 0, 2 * tile * bits
    arrays = dim * bits // 128
    return tile % arrays, tile // arrays * bits


@gluon.constexpr_function
def weight(dim, bits, channel_tile):
    """k: the codes of this channel tile count 2^k times (first token tile)."""
    return _field(dim, _main(bits), 2 * channel_tile)[1] % 8


@gluon.constexpr_function
def step(dim, bits):
    """The codes of the second token tile count 2^(k + step) times."""
    return _field(dim, _main(bits), 1)[1] % 8 - weight(dim, bits, 0)


@gluon.constexpr_function
def _high_shift(dim, tile):
    """3 bits: how far to the left the 1-bit plane's field goes to sit above the 2-bit plane's."""
    low, high = _field(dim, 2, tile)[1], _field(dim, 1, tile)[1]
    assert low // 8 == high // 8
    return low % 8 + 2 - high % 8


@gluon.constexpr_function
def _pair_mask(bits, k):
    return (((1 << bits) - 1) << k) * 0x10001


@gluon.jit
def _load_plane(base, lane, OFFSET: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    if D * BITS < 128:
        raw = load_shared(base + (lane % 16) * 16, OFFSET, 4)
        half = lane // 16 * BITS
        return (raw[0] >> half, raw[1] >> half, raw[2] >> half, raw[3] >> half)
    else:
        words = ()
        for a in gl.static_range(D * BITS // 128):
            words = words + load_shared(base + lane * 16, OFFSET + 512 * a, 4)
        return words


@gluon.jit
def _load_codes(base, lane, OFFSET: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """A lane's words of the codes of 32 tokens."""
    if BITS == 3:
        low = _load_plane(base, lane, OFFSET, D, 2)
        return low + _load_plane(base, lane, OFFSET + 8 * D, D, 1)
    else:
        return _load_plane(base, lane, OFFSET, D, BITS)


@gluon.jit
def _operand(words, TILE: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """The four registers of a tile's codes as subnormal fp16 pairs."""
    MAIN: gl.constexpr = _main(BITS)
    ARRAY: gl.constexpr = _item(_field(D, MAIN, TILE), 0)
    BIT: gl.constexpr = _item(_field(D, MAIN, TILE), 1)
    HIGH: gl.constexpr = _item(_field(D, 1, TILE), 0) + _arrays(D, 2)
    LEFT: gl.constexpr = _high_shift(D, TILE)
    out = ()
    for i in gl.static_range(4):
        x = words[4 * ARRAY + i]
        if BIT >= 8:
            x = x >> 8
        x = x & _pair_mask(MAIN, BIT % 8)
        if BITS == 3:
            y = words[4 * HIGH + i]
            if BIT >= 8:
                y = y >> (8 - LEFT)
            else:
                y = y << LEFT
            x = x | (y & _pair_mask(1, BIT % 8 + 2))
        out = out + (x,)
    return out


@gluon.jit
def _fetch(to, source, copier, valid, TO: gl.constexpr, BLOCK: gl.constexpr, NB: gl.constexpr, COPIERS: gl.constexpr):
    """NB adjacent blocks of BLOCK bytes, by COPIERS threads; those from number ``valid`` on become zeros."""
    TOTAL: gl.constexpr = BLOCK * NB
    STEP: gl.constexpr = 16 * COPIERS
    for i in gl.static_range((TOTAL + STEP - 1) // STEP):
        if BLOCK % STEP == 0:
            block = copier * 0 + i * STEP // BLOCK
        else:
            block = (copier * 16 + i * STEP) // BLOCK
        size = gl.where(block < valid, 16, 0)
        active = (copier * 16 < TOTAL - i * STEP).to(gl.int32)
        copy_async(to, source, size, active, TO + STEP * i, STEP * i, TOTAL - i * STEP < STEP)


@gluon.constexpr_function
def _nibbles(dim, bits):
    """Whether codes of 3 bits are first put together: two words of 3-bit fields in nibbles from one of 2-bit fields."""
    return bits == 3 and dim % 128 == 0


@gluon.constexpr_function
def _place(dim, bits, tile):
    """Word (of four), bits to shift it right by, and then the first bit k of the codes of a tile."""
    if _nibbles(dim, bits):
        arrays = dim // 64
        i = tile // arrays
        return 2 * (tile % arrays) + i % 2, 12 if i // 2 == 3 else 0, i // 2 % 3 * 4
    array, bit = _field(dim, _main(bits), tile)
    return array, bit // 8 * 8, bit % 8


@gluon.constexpr_function
def nibble_weight(dim, bits, channel_tile):
    """k: the codes of this channel tile count 2^k times (first token tile)."""
    return _place(dim, bits, 2 * channel_tile)[2]


@gluon.constexpr_function
def nibble_step(dim, bits):
    """The codes of the second token tile count 2^(k + nibble_step) times."""
    return _place(dim, bits, 1)[2] - nibble_weight(dim, bits, 0)


@gluon.jit
def page_words(base, lane, OFFSET: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """A lane's words of the codes of 32 tokens, 3-bit codes as nibbles."""
    return nibble_words(_load_codes(base, lane, OFFSET, D, BITS), D, BITS)


@gluon.jit
def nibble_words(words, D: gl.constexpr, BITS: gl.constexpr):
    """Words of a lane as they are stored, with 3-bit codes put together as nibbles."""
    if _nibbles(D, BITS):
        LOW: gl.constexpr = D // 64
        HIGH: gl.constexpr = D // 128
        out = ()
        for a in gl.static_range(LOW):
            for odd in gl.static_range(2):
                for i in gl.static_range(4):
                    x = words[4 * a + i]
                    y = words[4 * (LOW + a % HIGH) + i]
                    if odd == 1:
                        x = x >> 2
                    if 2 - 2 * odd >= a // HIGH:
                        y = y << (2 - 2 * odd - a // HIGH)
                    else:
                        y = y >> (a // HIGH + 2 * odd - 2)
                    out = out + (select(x, y, 0x33333333),)
        return out
    else:
        return words


@gluon.jit
def page_operand(words, TILE: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """The four registers of a tile's codes as subnormal fp16 pairs (up to bit 10: the exponent's first bit counts as much)."""
    if BITS == 3 and not _nibbles(D, BITS):
        return _operand(words, TILE, D, BITS)
    else:
        WORD: gl.constexpr = _item(_place(D, BITS, TILE), 0)
        RIGHT: gl.constexpr = _item(_place(D, BITS, TILE), 1)
        K: gl.constexpr = _item(_place(D, BITS, TILE), 2)
        out = ()
        for i in gl.static_range(4):
            out = out + ((words[4 * WORD + i] >> RIGHT) & _pair_mask(BITS, K),)
        return out


@gluon.constexpr_function
def unit(dim, bits, channel_tile):
    """What a code of this channel tile counts as a subnormal fp16: 2^(k - 24)."""
    return 2.0 ** (nibble_weight(dim, bits, channel_tile) - 24)


@gluon.constexpr_function
def scale_at(dim, bits, blocks):
    return blocks * code_bytes(dim, bits)
