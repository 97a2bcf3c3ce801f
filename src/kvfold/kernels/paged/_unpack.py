# mypy: ignore-errors
"""Pages of uniform levels behind a Hadamard rotation, decoded to 16 bits."""

import triton
import triton.language as tl

from kvfold.kernels.common._sizes import PAGE

UNIT = tl.constexpr(32)


@triton.jit
def _plane(base, place, BITS: tl.constexpr, D: tl.constexpr):
    """Fields of one plane: code ``place`` of the stream lies in field ``place // words`` of word ``place % words``."""
    words = UNIT * D * BITS // 16
    word = tl.load(base + place % words).to(tl.int32)
    return (word >> (place // words * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _codes(base, place, BITS: tl.constexpr, D: tl.constexpr):
    """Codes of one unit, three bits of them in two planes."""
    if BITS == 3:
        return _plane(base, place, 2, D) + 4 * _plane(base + UNIT * D * 2 // 16, place, 1, D)
    else:
        return _plane(base, place, BITS, D)


@triton.jit
def _places(token, channel, VALUE: tl.constexpr):
    """Places in the stream of tokens [32, 1] and channels [1, D] (:mod:`kvfold.formats.packing`)."""
    row, col = token % 16, channel % 16
    if VALUE:
        row, col = channel % 16, token % 16
    lane = row % 8 * 4 + col % 8 // 2
    inside = ((lane * 2 + col // 8) * 2 + row // 8) * 2 + col % 2
    return (channel // 16 * 2 + token // 16) * 256 + inside


@triton.jit
def _hadamard(D: tl.constexpr, MIX: tl.constexpr):
    """Signs of a Hadamard matrix in blocks of MIX channels, float16 [D, D]."""
    i, j = tl.arange(0, D)[:, None], tl.arange(0, D)[None, :]
    odd = (i & j) % MIX
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    return tl.where(i // MIX == j // MIX, 1 - 2 * odd, 0).to(tl.float16)


@triton.jit(do_not_specialize=["first", "start", "stop"])
def unpack_kernel(
    codes, codes_page, codes_head, scale, scale_page, scale_head, mean, mean_page, mean_head, norm, norm_page, norm_head,
    signs, table, out, out_token, out_head, first, start, stop,
    D: tl.constexpr, BITS: tl.constexpr, MIX: tl.constexpr, VALUE: tl.constexpr, HAS_NORM: tl.constexpr,
    WORDS: tl.constexpr, GAIN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program for each page, from page ``first`` of the sequence on, and head; writes tokens ``start`` to ``stop``."""
    number, head = first + tl.program_id(0), tl.program_id(1).to(tl.int64)
    page = tl.load(table + number).to(tl.int64)
    channel = tl.arange(0, D)
    middle = tl.load(mean + page * mean_page + head * mean_head + channel).to(tl.float32)
    factor = tl.load(signs + channel) * GAIN
    if HAS_NORM:
        code = tl.load(norm + page * norm_page + head * norm_head + channel).to(tl.float32)
        factor = factor * tl.exp2(code * (-1.0 / STEPS))
    mix = _hadamard(D, MIX)
    token = tl.arange(0, UNIT)
    place = _places(token[:, None], channel[None, :], VALUE)
    for unit in range(PAGE // UNIT):
        at = number * PAGE + unit * UNIT + token
        levels = _codes(codes + page * codes_page + head * codes_head + unit * WORDS, place, BITS, D).to(tl.float32)
        levels = (levels - ((1 << BITS) - 1) / 2).to(tl.float16)
        each = tl.load(scale + page * scale_page + head * scale_head + unit * UNIT + token).to(tl.float32)
        x = tl.dot(levels, mix) * each[:, None] * factor[None, :] + middle[None, :]
        to = out + (at - start)[:, None].to(tl.int64) * out_token + head * out_head + channel[None, :]
        tl.store(to, x.to(out.dtype.element_ty), mask=((at >= start) & (at < stop))[:, None])
