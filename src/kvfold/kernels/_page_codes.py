# mypy: ignore-errors
"""Pages of uniform codes as the decode kernel reads them: where they lie, and codes as operands of tensor cores."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._affine_codes import _fetch, _field, _load_codes, _main, _operand, _pair_mask, code_bytes
from kvfold.kernels._registers import _item
from kvfold.kernels._warp import select

# ---- codes as operands ----------------------------------------------------------------------------------------------


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
def weight(dim, bits, channel_tile):
    """k: the codes of this channel tile count 2^k times (first token tile)."""
    return _place(dim, bits, 2 * channel_tile)[2]


@gluon.constexpr_function
def step(dim, bits):
    """The codes of the second token tile count 2^(k + step) times."""
    return _place(dim, bits, 1)[2] - weight(dim, bits, 0)


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


# ---- where a page lies in a warp's stage ----------------------------------------------------------------------------


@gluon.constexpr_function
def page_bytes(dim, bits, blocks, mean, norm):
    """Bytes of one side of a page: codes, a scale per token, the mean, the norms."""
    return blocks * (code_bytes(dim, bits) + 64) + (2 * dim if mean else 0) + (dim if norm else 0)


@gluon.constexpr_function
def unit(dim, bits, channel_tile):
    """What a code of this channel tile counts as a subnormal fp16: 2^(k - 24)."""
    return 2.0 ** (weight(dim, bits, channel_tile) - 24)


@gluon.constexpr_function
def scale_at(dim, bits, blocks):
    return blocks * code_bytes(dim, bits)


@gluon.constexpr_function
def mean_at(dim, bits, blocks):
    return blocks * (code_bytes(dim, bits) + 64)


@gluon.constexpr_function
def norm_at(dim, bits, blocks, mean):
    return blocks * (code_bytes(dim, bits) + 64) + (2 * dim if mean else 0)


@gluon.constexpr_function
def stage_bytes(dim, k_bits, k_mean, k_norm, v_bits, v_mean, blocks, v_words=0):
    """Bytes of a warp's stage: both sides of a page; norms as fp16, or (where codes of values are looked up) the values' mean
    as fp32."""
    sides = page_bytes(dim, k_bits, blocks, k_mean, k_norm) + page_bytes(dim, v_bits, blocks, v_mean, False)
    return sides + (4 if v_words else 2) * dim


@gluon.constexpr_function
def shared_bytes(dim, k_bits, k_mean, k_norm, v_bits, v_mean, tiles, blocks, far, warps, k_words=0, v_words=0):
    """Bytes of shared memory of a program: stages, the Hadamard matrix as an operand, the queries, and (where codes of keys are
    looked up) the matrix in another order; and, later, sums."""
    stage = stage_bytes(dim, k_bits, k_mean, k_norm, v_bits, v_mean, blocks, v_words)
    more = (tiles * dim * 16 if far else 0) + (512 if k_words else 0)
    return max(warps * stage + 512 + more, warps * tiles * dim * 32)


@gluon.jit
def page_place(stored, place, table, steps, number, id, NB: gl.constexpr):
    """Where page ``number`` of a head lies: the fields' addresses, first block and page of keys, and of values."""
    if table is None:
        block = place[0] + number * NB
        return stored[0], block, place[1] + number, stored[1], block, place[2] + number
    else:
        at = stored[0] + id.to(gl.int64) * steps[0]
        k = (at, at + stored[1], at + stored[2], at + stored[3])
        v = (at + stored[4], at + stored[5], at + stored[6], at)
        none = id * 0
        return k, none, none, v, none, none


@gluon.jit
def hidden_block(left, skip, J: gl.constexpr):
    """What scores of a page's block J are added to: 0, or minus infinity, of blocks from number ``left`` on, and of the first
    ``skip``, if it is not None."""
    if skip is None:
        return gl.where(left > J, 0.0, float("-inf"))
    else:
        return gl.where((left > J) & (skip <= J), 0.0, float("-inf"))


@gluon.jit
def fetch_page(
    base, lane, codes, scale, mean, norm, block, page, valid, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr,
    NORM: gl.constexpr, NB: gl.constexpr, TO: gl.constexpr, SWAP: gl.constexpr = 0,
    WHAT: gl.constexpr = 0,
):  # fmt: skip
    """One side of a page, whose first block is number ``block``; blocks from number ``valid`` on become zeros. WHAT: 1, codes
    and scales alone; 2, the page's statistics alone.

    SWAP, so that lanes use all banks where codes lie token by token: 1, tokens 4 and 5, and 6 and 7, of each eight change
    places, for lanes that read those of every other token (of 64 bytes, so do halves of tokens 2, 3, 6 and 7; of 8 bytes,
    nothing does); 2, so do halves of tokens 4 to 7, for lanes that read halves.
    """
    CODE: gl.constexpr = code_bytes(D, BITS)
    SCALE: gl.constexpr = TO + scale_at(D, BITS, NB)
    to = base + lane * 16
    at = block.to(gl.int64)
    here = to
    if SWAP == 2:
        here = base + (lane ^ (lane // 8 % 2)) * 16
    elif SWAP and CODE >= 512:
        EACH: gl.constexpr = CODE // 512  # of 16 bytes, of a token
        token = lane // EACH
        piece = lane % EACH
        if EACH == 4:
            piece = piece ^ (token // 2 % 2 * 2)
        here = base + ((token ^ (token // 4 % 2)) * EACH + piece) * 16
    if WHAT != 2:
        _fetch(here, codes + at * CODE + lane * 16, lane, valid, TO, CODE, NB, 32)
        _fetch(to, scale + at * 64 + lane * 16, lane, valid, SCALE, 64, NB, 32)
    at = page.to(gl.int64)
    if MEAN and WHAT != 1:
        _fetch(to, mean + at * (2 * D) + lane * 16, lane, valid, TO + mean_at(D, BITS, NB), 2 * D, 1, 32)
    if NORM and WHAT != 1:
        _fetch(to, norm + at * D + lane * 16, lane, valid, TO + norm_at(D, BITS, NB, MEAN), D, 1, 32)
