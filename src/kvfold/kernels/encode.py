"""Encoding into affine groups on the GPU: one pass over a block, from the model's keys and values to packed bytes.

Two launches share the code of a tile (32 tokens, or ``group`` tokens where groups run along them):

* :func:`encode_blocks` encodes many blocks of a prompt;
* :func:`append_and_close` is a decode step's share: it encodes the blocks that left the recent window and writes the
  step's tokens into the windows. Everything it decides, it decides from lengths on the device.

The bytes are those of :meth:`kvfold.formats.AffineGroups.encode` on a CPU: divisions are exact, rounding is to nearest even,
nothing is contracted into fused multiply-adds. Two exceptions: hybrid groups whose two errors are equal to within
float32's rounding may choose either mode, and SQuat's products round differently, which may flip a code now and then.

Order of a decode step, per layer::

    append_and_close(key, value, lengths, ...)  # closes what the step before left due, then writes the new tokens
    decode_attention(query, ...)                # reads lengths.sink, .packed, .recent: the new tokens lie in the windows

A block therefore closes one launch later than the host closes it, but attention of every step
reads the same: there, too, a step's tokens are packed after they were attended to. ``append_and_close(None, None, ...)``
closes what is due without new tokens, after which both hold the same content. In two launches, with the same content
after every step: ``append_and_close(..., close=False)``, attention, ``append_and_close(None, None, ...)``.
"""

# mypy: disable-error-code="assignment"
# (tuples of tensors grow in kernels)

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kvfold.formats import AffineGroups, Fields, Format
from kvfold.formats.packing import UNIT
from kvfold.kernels.lengths import Lengths

MODES = {"asym": 0, "sym": 1, "hybrid": 2}
HEAD_DIMS = (64, 128, 256)
MAX_TOKENS = 16
"""Tokens that one step may append."""

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to nearest even, and leaves the integer in the low bits
HUGE = tl.constexpr(1.0e18)  # as the cache bounds what it encodes: beyond every format, small enough for squares
HALF_MAX = tl.constexpr(65504.0)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class KeyTransform:
    """What happens to keys before they are encoded, in this order; all of it optional.

    Attributes
    ----------
    inv_freq : Tensor or None, float32 [rotary_dim / 2]
        Un-rotate keys (methods that store them before RoPE), together with ``first_position``.
    first_position : Tensor or None, integer [batch]
        Position of each sequence's first packed token.
    rope_factor : float
        Multiplies what was un-rotated: 1 over the model's scaling.
    mean, norm : Tensor or None, float32 [batch, num_kv_heads, head_dim]
        Subtracted; divided by.
    update : Tensor or None, float32 [batch, num_kv_heads, head_dim - g, head_dim - g]
        SQuat's update matrix for slices of g channels (:func:`kvfold.methods.squat.update_matrix`).
    numbers : Tensor or None, int64 [blocks]
        Blocks have updates of their own: ``update`` is ``[batch, states, num_kv_heads, ...]``, by the sequences of what is
        encoded, and this says which one each block takes.
    """

    inv_freq: torch.Tensor | None = None
    first_position: torch.Tensor | None = None
    rope_factor: float = 1.0
    mean: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    update: torch.Tensor | None = None
    numbers: torch.Tensor | None = None


def why_not(fmt: Format, device: torch.device, width: int | None = None) -> str | None:
    """Why the GPU cannot encode this format; None if it can.

    Parameters
    ----------
    fmt : Format
    device : torch.device
    width : int or None
        Channels of a slice of SQuat's update, if there is one.
    """
    if device.type != "cuda":
        return f"device {device.type}: encoding kernels run on cuda"
    why = unsupported(fmt, width)
    if why is None and width is not None and isinstance(fmt, AffineGroups):
        index = torch.cuda.current_device() if device.index is None else device.index
        room = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
        if _tile(fmt) * fmt.head_dim * 4 > room:
            why = f"head_dim={fmt.head_dim}, group={fmt.group}: a tile does not fit in {room} bytes of shared memory"
    return why


def unsupported(fmt: Format, width: int | None = None) -> str | None:
    """Like :func:`why_not`, whatever the device."""
    if not isinstance(fmt, AffineGroups):
        return f"{fmt.kind} storage"
    if fmt.operand not in ("key", "value"):
        return f"operand={fmt.operand}; allowed: key, value"
    if fmt.head_dim not in HEAD_DIMS:
        return f"head_dim={fmt.head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}"
    groups = (32, 64, 128) if fmt.mode == "asym" else (32,)
    if fmt.group not in groups:
        return f"group={fmt.group} in mode {fmt.mode}; allowed: {', '.join(map(str, groups))}"
    if width is not None:
        if fmt.axis != "token" or fmt.mode != "asym":
            return f"axis={fmt.axis}, mode={fmt.mode} with an update; allowed: axis=token, mode=asym"
        if width < 16 or width & (width - 1):
            return f"channels={width}: allowed are powers of two from 16"
        if fmt.group * fmt.head_dim > 128 * 128:
            return f"group={fmt.group} with an update of {fmt.head_dim} channels: a tile does not fit into registers"
    return None


# ---- one tile --------------------------------------------------------------------------------------------------------
#
# A tile is a tuple of *pieces*, small tensors [tokens, 16 channels] of a fragment's channel tile each. What lies in one
# 16-bit word (codes of the same place in several channel tiles) lies in one thread, at the same place of several pieces, so
# that packing is arithmetic on whole pieces: no code moves between threads. Groups along channels are two pieces (one
# shuffle finishes their reductions), groups along tokens are the pieces of one channel tile.


@triton.constexpr_function
def _merged(d, width):
    """How many places of a channel tile one word of a plane of ``width`` bits joins: 1, both token tiles (2), and both
    halves of a fragment's eight rows (4)."""
    return max(1, 256 // (d * width))


@triton.constexpr_function
def _chunks(d, width):
    """How many channel tiles follow each other before a word of a plane takes its next code."""
    return max(1, d * width // 256)


@triton.constexpr_function
def _halves(d, bits, value):
    """Pieces a channel tile is cut into: two where a word joins both halves of a fragment's rows, and rows are channels."""
    return 2 if value and d * (1 if bits == 3 else bits) == 64 else 1


@triton.constexpr_function
def _splits(d, bits, value, axis, warps):
    """Subsets that the tokens of a unit are cut into."""
    merged = _merged(d, 1 if bits == 3 else bits)
    needed = min(2 * merged, 4) if value else merged
    return min(8, max(needed, (8 if axis == 0 else 2) // warps))


@triton.constexpr_function
def _index(c, h, u, halves, subsets, per_group, axis):
    """Where the codes of channel tile ``c``, half ``h``, token subset ``u`` are: groups lie together."""
    if axis == 0:
        return (c * halves + h) * subsets + u
    return ((c // per_group * subsets + u) * per_group + c % per_group) * halves + h


@triton.constexpr_function
def _subset(m, r, merged, splits, value):
    """Subset of tokens that is part ``m`` of those joined in a word, and number ``r`` of the others."""
    return (m // 2 * (splits // 2) if value and merged == 4 else m * (splits // merged)) + r


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def _half(m, h, merged, value):
    return m % 2 if value and merged == 4 else h


@triton.jit
def _tokens(u: tl.constexpr, SPLITS: tl.constexpr, VALUE: tl.constexpr):
    """Tokens of subset ``u`` of a tile; the subsets of a unit follow each other."""
    j = tl.arange(0, 32 // SPLITS)
    first = u // SPLITS * 32
    s = u % SPLITS
    if SPLITS == 1:
        return first + j
    if VALUE:
        if SPLITS == 2:  # pair
            return first + 2 * j + s
        if SPLITS == 4:  # token tile, pair
            return first + s // 2 * 16 + 2 * j + s % 2
        return first + s // 4 * 16 + s // 2 % 2 * 8 + 2 * j + s % 2  # token tile, half of its columns, pair
    if SPLITS == 2:  # token tile
        return first + s * 16 + j
    if SPLITS == 4:  # token tile, half of eight rows
        return first + s // 2 * 16 + j // 4 * 8 + s % 2 * 4 + j % 4
    return first + s // 4 * 16 + s % 2 * 8 + s // 2 % 2 * 4 + j  # token tile, half of eight rows, half of the tile


@triton.jit
def _channels(h: tl.constexpr, HALVES: tl.constexpr):
    """Channels of a piece within their channel tile."""
    i = tl.arange(0, 16 // HALVES)
    return i // (8 // HALVES) * 8 + h * (8 // HALVES) + i % (8 // HALVES)


@triton.jit
def _fma(a, b, c):
    """a * b + c, rounded once."""
    if INTERPRETED:  # the interpreter's own rounds twice
        return (a.to(tl.float64) * b + c).to(tl.float32)
    return tl.math.fma(a, b, c)


@triton.jit
def _negative(x):
    """-x, per group; elements are never negated, which costs an instruction."""
    return x * -1.0


@triton.jit
def _min(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, tl.standard._elementwise_min)


@triton.jit
def _max(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, tl.standard._elementwise_max)


@triton.jit
def _sum(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, tl.standard._sum_combine)


@triton.jit
def _spread(x, AXIS: tl.constexpr):
    """Per group -> per element."""
    return x[None, :] if AXIS == 0 else x[:, None]


@triton.jit
def _finite(x):
    return tl.minimum(tl.maximum(x.to(tl.float32), -HUGE), HUGE)


@triton.jit
def _to_fp16(x):
    return tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX).to(tl.float16)


@triton.jit
def _floor_fp16(x):
    rounded = _to_fp16(x)
    bits = rounded.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(rounded > 0.0, bits - 1, tl.where(rounded < 0.0, bits + 1, -0x7FFF))
    down = (rounded.to(tl.float32) > x) & (x >= -HALF_MAX)
    return tl.where(down, below, bits).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _over(x, LEVELS: tl.constexpr):
    """x / LEVELS as division rounds it, for x that fp16 does not round to 0 (see :func:`_codes`)."""
    near = x * (1.0 / LEVELS)
    return _fma(_fma(near, LEVELS * -1.0, x), 1.0 / LEVELS, near)


@triton.jit
def _reciprocal(x):
    """1 / x as division rounds it, for positive x of 11 bits."""
    root = tl.math.rsqrt(x)
    near = root * root
    return _fma(_fma(_negative(x), near, 1.0), near, near)


@triton.jit
def _asym_scale(low, high, LEVELS: tl.constexpr):
    """fp16 scale and zero-point of groups with these extremes, and whether they are constant."""
    zero = _floor_fp16(low)
    wide = zero.to(tl.float32)
    constant = low == high
    return _to_fp16(tl.where(constant, low - wide, _over(high - wide, LEVELS))), zero, constant


@triton.jit
def _sym_scale(least, most, LEVELS: tl.constexpr):
    """fp16 scale of groups with these extreme sizes, and whether all sizes are equal."""
    constant = least == most
    return _to_fp16(tl.where(constant, most, _over(most, LEVELS))), constant


@triton.jit
def _divisor(scale, constant, AXIS: tl.constexpr):
    """What :func:`_codes` needs of a group's scale (float32 of an fp16), per element: the scale's negative, its rounded
    reciprocal, and the code of all elements where the reciprocal is 0."""
    nothing = (scale == 0.0) | constant
    inverse = tl.where(nothing, 0.0, _reciprocal(tl.where(nothing, 1.0, tl.abs(scale))))
    inverse = tl.where(scale < 0.0, _negative(inverse), inverse)  # of a group below fp16's range
    return _spread(_negative(scale), AXIS), _spread(inverse, AXIS), _spread(constant.to(tl.float32), AXIS)


@triton.jit
def _codes(x, divisor, SIGNED: tl.constexpr, LEVELS: tl.constexpr):
    """Nearest codes of x over a scale, as float32; ``SIGNED``: x may be negative.

    One step of Newton gives what division gives: a scale has 11 bits, which keeps quotients further from the middle of two
    floats than the step misses them by.
    """
    negative, inverse, start = divisor
    near = _fma(x, inverse, start)
    codes = _fma(_fma(near, negative, x), inverse, near) + ROUND - ROUND
    if SIGNED:
        codes = tl.maximum(codes, 0.0)
    return tl.minimum(codes, LEVELS * 1.0)


@triton.jit
def _extremes(members, AXIS: tl.constexpr):
    low, high = members[0], members[0]
    for i in tl.static_range(1, len(members)):
        low = tl.minimum(low, members[i])
        high = tl.maximum(high, members[i])
    return _min(low, AXIS), _max(high, AXIS)


@triton.jit
def _asym(members, AXIS: tl.constexpr, BITS: tl.constexpr):
    """Codes of the members of groups; fp16 scale and zero-point of the groups."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    low, high = _extremes(members, AXIS)
    scale, zero, constant = _asym_scale(low, high, LEVELS)
    divisor = _divisor(scale.to(tl.float32), constant, AXIS)
    codes = ()
    for i in tl.static_range(len(members)):
        above = members[i] - _spread(zero.to(tl.float32), AXIS)
        codes += (_codes(above, divisor, True, LEVELS),)
    return codes, scale, zero


@triton.jit
def _signed(members, bits, may_be_asym, AXIS: tl.constexpr, HYBRID: tl.constexpr, BITS: tl.constexpr):
    """Codes of the members of symmetric or hybrid groups, the groups' stored scale and 32 bits.

    ``bits``: where the signs of each member go.
    """
    LEVELS: tl.constexpr = (1 << BITS) - 1
    least = tl.abs(members[0])
    for i in tl.static_range(1, len(members)):
        least = tl.minimum(least, tl.abs(members[i]))
    least = _min(least, AXIS)
    if HYBRID:
        low, high = _extremes(members, AXIS)
        most = tl.maximum(tl.abs(low), tl.abs(high))
    else:
        most = tl.abs(members[0])
        for i in tl.static_range(1, len(members)):
            most = tl.maximum(most, tl.abs(members[i]))
        most = _max(most, AXIS)
    scale, same = _sym_scale(least, most, LEVELS)
    divisor = _divisor(scale.to(tl.float32), same, AXIS)
    if HYBRID:
        a_scale, a_zero, constant = _asym_scale(low, high, LEVELS)
        zero = _spread(a_zero.to(tl.float32), AXIS)
        a_divisor = _divisor(a_scale.to(tl.float32), constant, AXIS)
        # of a group that lies below fp16's range the scale would be negative; negative marks the mode
        a_read = tl.maximum(a_scale.to(tl.float32), 0.0)
        a_step = _spread(_negative(a_read), AXIS)
    signs = tl.full(members[0].shape, 0, tl.int32)
    a_error = tl.full(members[0].shape, 0.0, tl.float32)
    s_error = tl.full(members[0].shape, 0.0, tl.float32)
    codes, a_codes = (), ()
    for i in tl.static_range(len(members)):
        x = members[i]
        signs = tl.where(x < 0.0, signs | bits[i], signs)
        code = _codes(tl.abs(x), divisor, False, LEVELS)
        codes += (code,)
        if HYBRID:
            above = x - zero
            a_code = _codes(above, a_divisor, True, LEVELS)
            a_codes += (a_code,)
            off = _fma(a_code, a_step, above)
            a_error = _fma(off, off, a_error)
            off = _fma(code, divisor[0], tl.abs(x))
            s_error = _fma(off, off, s_error)
    stored = scale.to(tl.int16, bitcast=True).to(tl.int32)
    aux = _sum(signs, AXIS)
    if HYBRID:
        # constant groups: 32 bits of zero-point hold the value itself, where fp16's scale may not
        off = scale.to(tl.float32) - tl.abs(low)
        wins = tl.where(constant, off * off > 0.0, _sum(a_error - s_error, AXIS) < 0.0) & may_be_asym
        a_bits = tl.where(constant, 0.0, a_read).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        stored = tl.where(wins, a_bits | -0x8000, stored)  # the sign bit marks the mode, of zero too
        aux = tl.where(wins, tl.where(constant, low, a_zero.to(tl.float32)).to(tl.int32, bitcast=True), aux)
        chosen = ()
        for i in tl.static_range(len(members)):
            chosen += (tl.where(_spread(wins, AXIS), a_codes[i], codes[i]),)
        codes = chosen
    return codes, stored.to(tl.int16).to(tl.float16, bitcast=True), aux


@triton.jit
def _slot(group, token, D: tl.constexpr, G: tl.constexpr, AXIS: tl.constexpr, VALUE: tl.constexpr):
    """Where a group's metadata is stored (inverse of kvfold.formats.packing.group_order): group = channel for AXIS 0, group
    of a token for AXIS 1."""
    if AXIS == 0:
        if VALUE:  # channel = [tile, row_half, g]
            return (group % 8) * (D // 8) + group // 16 * 2 + group // 8 % 2
        return group // 32 * 32 + group // 2 % 4 * 8 + group // 16 % 2 * 4 + group // 8 % 2 * 2 + group % 2
    PER: tl.constexpr = D // G
    if VALUE:  # token = [tile, col_half, t, pair]
        return (token // 2 * PER + group) * 2 + token % 2
    return ((token % 8 * 2 + token // 16) * 2 + token // 8 % 2) * PER + group


@triton.jit
def _pack(
    words,
    codes,
    weight,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    PER: tl.constexpr,
    AXIS: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add the codes of STEP channel tiles to the words of a plane, which starts in word ``FIRST``; ``weight``: 2^(bit of the
    first)."""
    CHUNKS: tl.constexpr = _chunks(D, WIDTH)
    MERGED: tl.constexpr = _merged(D, WIDTH)
    OUTER: tl.constexpr = 1 if VALUE and MERGED == 4 else HALVES
    REST: tl.constexpr = SPLITS // (2 if VALUE and MERGED == 4 else MERGED)
    FIELDS: tl.constexpr = STEP // CHUNKS
    after = ()
    for unit in tl.static_range(T // 32):
        for chunk in tl.static_range(CHUNKS):
            for h in tl.static_range(OUTER):
                for r in tl.static_range(REST):
                    part = codes[_index(chunk, h, unit * SPLITS + r, HALVES, SPLITS * T // 32, PER, AXIS)]
                    for i in tl.static_range(1, FIELDS * MERGED):
                        code = codes[
                            _index(
                                i // MERGED * CHUNKS + chunk,
                                _half(i % MERGED, h, MERGED, VALUE),
                                unit * SPLITS + _subset(i % MERGED, r, MERGED, SPLITS, VALUE),
                                HALVES,
                                SPLITS * T // 32,
                                PER,
                                AXIS,
                            )
                        ]
                        part = _fma(code, 1.0 * (1 << (WIDTH * i)), part)
                    after += (_fma(part, weight, words[len(after)]),)
    return after


@triton.jit
def _no_words(
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Words of a plane before any code: 2^23, so that sums of codes, which are exact, fill the low 16 bits."""
    MERGED: tl.constexpr = _merged(D, WIDTH)
    words = ()
    for _ in tl.static_range(T // 32 * _chunks(D, WIDTH) * HALVES * SPLITS // MERGED):
        words += (tl.full((32 // SPLITS, 16 // HALVES), 8388608.0, tl.float32),)
    return words


@triton.jit
def _store_words(
    words,
    out,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store a plane as kvfold.formats.packing.pack does; ``out`` points to 32-bit words, STRIDE of them in a unit."""
    CHUNKS: tl.constexpr = _chunks(D, WIDTH)
    MERGED: tl.constexpr = _merged(D, WIDTH)
    OUTER: tl.constexpr = 1 if VALUE and MERGED == 4 else HALVES
    REST: tl.constexpr = SPLITS // (2 if VALUE and MERGED == 4 else MERGED)
    ROWS: tl.constexpr = 8 if MERGED < 4 else 4
    for unit in tl.static_range(T // 32):
        for chunk in tl.static_range(CHUNKS):
            for h in tl.static_range(OUTER):
                channel = _channels(h, HALVES)[None, :]
                for r in tl.static_range(REST // 2 if VALUE else REST):
                    # place in the fragment, [token tile, g, t, col_half, row_half], two words of a pair together
                    token = _tokens(r * 2 if VALUE else r, SPLITS, VALUE)[:, None]
                    tile = token // 16 if MERGED == 1 else 0
                    if VALUE:
                        low = words[((unit * CHUNKS + chunk) * OUTER + h) * REST + 2 * r]
                        high = words[((unit * CHUNKS + chunk) * OUTER + h) * REST + 2 * r + 1]
                        place = ((tile * ROWS + channel % ROWS) * 4 + token // 2 % 4) * 4
                        place += token // 8 % 2 * 2 + channel // 8
                    else:
                        both = words[((unit * CHUNKS + chunk) * OUTER + h) * REST + r]
                        low, high = tl.split(tl.reshape(both, (32 // SPLITS, 8, 2)))
                        pair = tl.arange(0, 8)[None, :]
                        place = ((tile * ROWS + token % ROWS) * 4 + pair % 4) * 4
                        place += pair // 4 * 2 + token // 8 % 2
                    bits = (low.to(tl.int32, bitcast=True) & 0xFFFF) | (high.to(tl.int32, bitcast=True) << 16)
                    tl.store(out + (unit * STRIDE + chunk * 256) + place, bits)


@triton.jit
def _divided(x, divisor, inverse):
    """x / divisor as division rounds it, given the divisor's rounded reciprocal: two steps of Newton (Markstein)."""
    negative = _negative(divisor)
    near = x * inverse
    near = _fma(_fma(near, negative, x), inverse, near)
    return _fma(_fma(near, negative, x), inverse, near)


@triton.jit
def _transformed(x, mean, norm, inverse, MEAN: tl.constexpr, NORM: tl.constexpr):
    x = _finite(x)
    if MEAN:
        x = x - mean
    if NORM:
        x = _divided(x, norm, inverse)
    return x


@triton.jit
def _load_state(state, channel, MEAN: tl.constexpr, NORM: tl.constexpr, INVERSE: tl.constexpr):
    """Mean, norm and its reciprocal of these channels; what is not there is 0. Norms of a page are codes, and ``state[2]`` a
    table: 256 norms, and then their reciprocals."""
    mean, norm, inverse = 0.0, 0.0, 0.0
    if MEAN:
        mean = tl.load(state[0] + channel).to(tl.float32)
    if NORM:
        norm = tl.load(state[1] + channel)
        if norm.dtype == tl.uint8:
            at = state[2] + norm.to(tl.int32)
            norm, inverse = tl.load(at), tl.load(at + 256)
        else:
            inverse = tl.load(state[2] + channel) if INVERSE else tl.math.div_rn(1.0, norm)
    return mean, norm, inverse


@triton.jit
def _tokens_at(source, token, RING: tl.constexpr):
    """Pointers to tokens [n] as [n, 1]; ``source``: pointer, strides of tokens and channels, first token, slots of a ring.

    RING 2: tokens from ``source[7]`` on lie elsewhere, from pointer ``source[5]`` on, ``source[6]`` apart.
    """
    slot = source[3] + token
    if RING:
        slot = slot % source[4]
    at = source[0] + slot.to(tl.int64)[:, None] * source[1]
    if RING == 2:
        late = (source[3] + token - source[7])[:, None]
        at = tl.where(late < 0, at, source[5] + late.to(tl.int64) * source[6])
    return at


@triton.jit
def _steered(
    source,
    state,
    rope,
    T: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Pieces of a tile of keys that are un-rotated, or of which SQuat moves the channels that follow a slice of WIDTH by what
    the slice's error says (kvfold.methods.squat.steer)."""
    PART: tl.constexpr = WIDTH if WIDTH > 0 else 32
    inverse_frequencies, position, half, factor = rope
    at = _tokens_at(source, tl.arange(0, T), RING)
    parts = ()
    for p in tl.static_range(D // PART):
        channel = (p * PART + tl.arange(0, PART))[None, :]
        x = _finite(tl.load(at + channel * source[2]))
        if ROPE:
            rotary = channel < 2 * half
            low = channel < half
            partner = tl.where(low, channel + half, channel - half)
            other = _finite(tl.load(at + partner * source[2], mask=rotary, other=0.0))
            frequency = tl.load(inverse_frequencies + tl.where(low, channel, channel - half), mask=rotary, other=0.0)
            angle = (position + tl.arange(0, T)[:, None]).to(tl.float32) * frequency
            turned = (x * tl.cos(angle) + tl.where(low, other, -other) * tl.sin(angle)) * factor
            x = tl.where(rotary, turned, x)
        mean, norm, inverse = _load_state(state, channel, MEAN, NORM, INVERSE)
        parts += (_transformed(x, mean, norm, inverse, MEAN, NORM),)
    if WIDTH > 0:
        SIDE: tl.constexpr = D - WIDTH
        for s in tl.static_range(D // WIDTH - 1):
            codes, scale, zero = _asym((parts[s],), 0, BITS)
            read = zero.to(tl.float32)[None, :] + scale.to(tl.float32)[None, :] * codes[0]
            moved = ()
            for q in tl.static_range(D // WIDTH):
                if q > s:
                    update = state[3] + ((q - 1) * SIDE + s) * WIDTH
                    moved += (parts[q] + _delta(read - parts[s], update, T, SIDE, WIDTH),)
                else:
                    moved += (parts[q],)
            parts = moved
    pieces = ()
    for p in tl.static_range(D // PART):
        pieces += _cut(parts[p], T, PART, SPLITS)
    return pieces


@triton.jit
def _delta(error, update, T: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """What the error of a slice adds to another: 32 channels' share at a time, for more would not fit into registers."""
    DEPTH: tl.constexpr = min(WIDTH, 32)
    out = tl.arange(0, WIDTH)[None, :] * SIDE
    row = tl.arange(0, DEPTH)[:, None]
    which = tl.arange(0, WIDTH // DEPTH)[None, :, None]
    delta = tl.full((T, WIDTH), 0.0, tl.float32)
    for p in range(WIDTH // DEPTH):
        share = _sum(tl.where(which == p, tl.reshape(error, (T, WIDTH // DEPTH, DEPTH)), 0.0), 1)
        # three products of tf32 parts: float32's precision, on tensor cores
        delta = tl.dot(share, tl.load(update + out + p * DEPTH + row), delta, input_precision="tf32x3")
    return delta


@triton.jit
def _cut(x, T: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr):
    """Keys [T, CHANNELS] -> pieces, those of a channel tile together, in the order of :func:`_tokens`."""
    # unit, token tile, half of the tile, half of eight rows, row; channel tile, channel
    x = tl.reshape(x, (T // 32, 2, 2, 2, 4, CHANNELS // 16, 16))
    if SPLITS == 1:
        x = tl.permute(x, (1, 2, 3, 4, 6, 5, 0))
    elif SPLITS == 2:
        x = tl.permute(x, (2, 3, 4, 6, 5, 0, 1))
    elif SPLITS == 4:
        x = tl.permute(x, (2, 4, 6, 5, 0, 1, 3))
    else:
        x = tl.permute(x, (4, 6, 5, 0, 1, 3, 2))
    ROWS: tl.constexpr = 32 // SPLITS
    COUNT: tl.constexpr = CHANNELS // 16 * (T // 32) * SPLITS
    pieces = (tl.reshape(x, (ROWS, 16, COUNT)),)
    for level in tl.static_range(_log2(COUNT)):
        first, second = (), ()
        for i in tl.static_range(len(pieces)):
            a, b = tl.split(tl.reshape(pieces[i], (ROWS, 16, COUNT >> (level + 1), 2)))
            first += (a,)
            second += (b,)
        pieces = first + second
    flat = ()
    for i in tl.static_range(len(pieces)):
        flat += (tl.reshape(pieces[i], (ROWS, 16)),)
    return flat


@triton.jit
def _encode_tile(
    source,
    state,
    rope,
    out,
    may_be_asym,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Encode T tokens.

    ``source`` as :func:`_tokens_at` takes it; ``state``: mean, norm, its reciprocal, SQuat's update; ``rope``: frequencies,
    position of the first token, half of the rotated channels, factor; ``out``: codes in 32-bit words, metadata, 32 bits of
    each group. All pointers point to this tile's, head's or sequence's first element.
    """
    HALVES: tl.constexpr = _halves(D, BITS, VALUE)
    SPLITS: tl.constexpr = _splits(D, BITS, VALUE, AXIS, WARPS)
    SUBSETS: tl.constexpr = SPLITS * (T // 32)
    CUT: tl.constexpr = ROPE or WIDTH > 0
    PER: tl.constexpr = G // 16
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    STEP: tl.constexpr = max(_chunks(D, LOW), PER if AXIS == 1 else 1)
    LOW_STEP: tl.constexpr = 1.0 * (1 << (LOW * STEP * _merged(D, LOW) // _chunks(D, LOW)))
    TOP_STEP: tl.constexpr = 1.0 * (1 << (STEP * _merged(D, 1) // _chunks(D, 1)))
    low = _no_words(LOW, T, D, VALUE, HALVES, SPLITS)
    top = _no_words(1, T, D, VALUE, HALVES, SPLITS) if BITS == 3 else ()
    low_weight, top_weight = 1.0, 1.0
    if CUT:
        pieces = _steered(source, state, rope, T, D, BITS, MEAN, NORM, INVERSE, ROPE, WIDTH, RING, SPLITS)
        for k in tl.static_range(D // 16 // STEP):
            members = ()
            for i in tl.static_range(STEP * HALVES * SUBSETS):
                members += (pieces[k * STEP * HALVES * SUBSETS + i],)
            codes = _encode_step(
                members, k * STEP * 16, state, out, may_be_asym,
                D, G, AXIS, MODE, BITS, VALUE, False, False, False, STEP, HALVES, SPLITS, SUBSETS
            )  # fmt: skip
            low, top = _add(low, top, codes, low_weight, top_weight, T, D, PER, AXIS, BITS, VALUE, STEP, HALVES, SPLITS)
            low_weight *= LOW_STEP
            top_weight *= TOP_STEP
    else:
        for k in range(D // 16 // STEP):
            raw = ()
            for c in tl.static_range(STEP):
                for h in tl.static_range(HALVES):
                    channel = ((k * STEP + c) * 16 + _channels(h, HALVES))[None, :]
                    for u in tl.static_range(SUBSETS):
                        at = _tokens_at(source, _tokens(u, SPLITS, VALUE), RING)
                        raw += (tl.load(at + channel * source[2]),)
            codes = _encode_step(
                raw, k * STEP * 16, state, out, may_be_asym,
                D, G, AXIS, MODE, BITS, VALUE, MEAN, NORM, INVERSE, STEP, HALVES, SPLITS, SUBSETS
            )  # fmt: skip
            low, top = _add(low, top, codes, low_weight, top_weight, T, D, PER, AXIS, BITS, VALUE, STEP, HALVES, SPLITS)
            low_weight *= LOW_STEP
            top_weight *= TOP_STEP
    _store_words(low, out[0], D * BITS, LOW, T, D, VALUE, HALVES, SPLITS)
    if BITS == 3:
        _store_words(top, out[0] + 2 * D, D * BITS, 1, T, D, VALUE, HALVES, SPLITS)


@triton.jit
def _add(
    low,
    top,
    codes,
    low_weight,
    top_weight,
    T: tl.constexpr,
    D: tl.constexpr,
    PER: tl.constexpr,
    AXIS: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add a step's codes to both planes of three bits, or to the only one."""
    if BITS == 3:
        rest, tops = (), ()
        for i in tl.static_range(len(codes)):
            is_high = codes[i] >= 4.0
            rest += (tl.where(is_high, codes[i] - 4.0, codes[i]),)
            tops += (tl.where(is_high, 1.0, 0.0),)
        low = _pack(low, rest, low_weight, 2, T, D, PER, AXIS, VALUE, STEP, HALVES, SPLITS)
        top = _pack(top, tops, top_weight, 1, T, D, PER, AXIS, VALUE, STEP, HALVES, SPLITS)
    else:
        low = _pack(low, codes, low_weight, BITS, T, D, PER, AXIS, VALUE, STEP, HALVES, SPLITS)
    return low, top


@triton.jit
def _encode_step(
    raw,
    first,
    state,
    out,
    may_be_asym,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    STEP: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
    SUBSETS: tl.constexpr,
):
    """Codes of STEP channel tiles from channel ``first`` on, in the order of :func:`_index`; metadata is stored."""
    PER: tl.constexpr = G // 16
    codes = ()
    if AXIS == 0:
        bits = ()
        for u in tl.static_range(SUBSETS):
            bits += (1 << _sign_bit(_tokens(u, SPLITS, VALUE))[:, None],)
        for c in tl.static_range(STEP):
            for h in tl.static_range(HALVES):
                channel = first + c * 16 + _channels(h, HALVES)
                mean, norm, inverse = _load_state(state, channel[None, :], MEAN, NORM, INVERSE)
                members = ()
                for u in tl.static_range(SUBSETS):
                    x = raw[(c * HALVES + h) * SUBSETS + u]
                    members += (_transformed(x, mean, norm, inverse, MEAN, NORM),)
                slot = _slot(channel, 0, D, G, AXIS, VALUE)
                codes += _encode_group(members, bits, slot, D, out, may_be_asym, AXIS, MODE, BITS)
    else:
        for i in tl.static_range(STEP // PER):
            given, bits = (), ()
            for j in tl.static_range(PER):
                for h in tl.static_range(HALVES):
                    channel = j * 16 + _channels(h, HALVES)[None, :]
                    given += (_load_state(state, first + i * G + channel, MEAN, NORM, INVERSE),)
                    bits += (1 << _sign_bit(channel),)
            for u in tl.static_range(SUBSETS):
                members = ()
                for j in tl.static_range(PER):
                    for h in tl.static_range(HALVES):
                        mean, norm, inverse = given[j * HALVES + h]
                        x = raw[((i * PER + j) * HALVES + h) * SUBSETS + u]
                        members += (_transformed(x, mean, norm, inverse, MEAN, NORM),)
                slot = _slot(first // G + i, _tokens(u, SPLITS, VALUE), D, G, AXIS, VALUE)
                codes += _encode_group(members, bits, slot, 32 * D // G, out, may_be_asym, AXIS, MODE, BITS)
    return codes


@triton.jit
def _sign_bit(member):
    """Bit of a group's 32 that holds a member's sign (kvfold.formats.packing.pack_signs)."""
    return member % 2 * 16 + member // 16 % 2 * 8 + member // 8 % 2 * 4 + member // 2 % 4


@triton.jit
def _encode_group(
    members,
    bits,
    slot,
    GROUPS: tl.constexpr,
    out,
    may_be_asym,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Codes of the members of groups that lie side by side; their metadata is stored."""
    if MODE == 0:
        codes, scale, zero = _asym(members, AXIS, BITS)
        tl.store(out[1] + slot, scale)
        tl.store(out[1] + GROUPS + slot, zero)
    else:
        codes, scale, aux = _signed(members, bits, may_be_asym, AXIS, MODE == 2, BITS)
        tl.store(out[1] + slot, scale)
        tl.store(out[2] + slot, aux)
    return codes


@triton.jit(do_not_specialize=["first_tile", "first_token", "capacity", "states"])
def _encode_kernel(
    x,
    stride_b,
    stride_h,
    stride_t,
    stride_c,
    rows,
    codes_out,
    meta_out,
    aux_out,
    first_tile,
    tiles_per_row,
    heads,
    mean,
    norm,
    inverse,
    update,
    inv_freq,
    first_position,
    first_token,
    half,
    rope_factor,
    capacity,
    numbers,
    states,
    tiles_per_block,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    RING: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBERS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Grid: (tiles, heads, batch)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.program_id(2).to(tl.int64)
    sequence = tl.load(rows + index).to(tl.int64) if ROWS else index
    lane = sequence * heads + head
    at = (sequence if RING else index) * stride_b + head.to(tl.int64) * stride_h
    first = first_token + tile * T if RING else tile * T
    position = tl.load(first_position + sequence) + first_token + tile * T if ROPE else 0
    matrix = lane
    if NUMBERS:
        matrix = (index * states + tl.load(numbers + tile // tiles_per_block)) * heads + head
    state = (mean + lane * D, norm + lane * D, inverse + lane * D, update + matrix * ((D - WIDTH) * (D - WIDTH)))
    _encode_tile(
        (x + at, stride_t, stride_c, first, capacity),
        state,
        (inv_freq, position, half, rope_factor),
        _tile_out(codes_out, meta_out, aux_out, lane * tiles_per_row + first_tile + tile, T, D, G, AXIS, MODE, BITS),
        True,
        T,
        D,
        G,
        AXIS,
        MODE,
        BITS,
        VALUE,
        MEAN,
        NORM,
        True,
        ROPE,
        WIDTH,
        RING,
        WARPS,
    )


@triton.jit
def _tile_out(
    codes,
    meta,
    aux,
    tile,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Where a tile's codes, metadata and groups' 32 bits are stored."""
    GROUPS: tl.constexpr = D if AXIS == 0 else T * D // G
    META: tl.constexpr = 2 * GROUPS if MODE == 0 else GROUPS
    return codes + tile * (T * D * BITS // 32), meta + tile * META, aux + tile * GROUPS


# ---- a decode step ---------------------------------------------------------------------------------------------------


@triton.jit
def _close_and_append(
    new,
    windows,
    stored,
    state,
    rope,
    boundary,
    place,
    lengths,
    BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDARY: tl.constexpr,
    WARPS: tl.constexpr,
):
    """One side (keys or values) of one head of one sequence.

    ``new``: pointer and strides; ``windows``: sink and its slots, ring and its slots; ``stored``: codes, metadata, 32 bits
    of each group, first block, blocks; ``rope``: frequencies, first positions, half, factor; ``place``: sequence, head,
    heads; ``lengths``: in all, packed, blocks due, new tokens.
    """
    _, _, ring, slots = windows
    codes, meta, aux, first_block, blocks = stored
    frequencies, first_position, half, factor = rope
    batch, head, heads = place
    length, packed, due, count = lengths
    lane = batch.to(tl.int64) * heads + head
    for i in range(0, due * (BLOCK // T)):
        first = packed + i * T
        out = (lane * blocks - first_block) * (BLOCK // T) + first // T
        may_be_asym = (first // BLOCK + 1) * BLOCK <= tl.load(boundary + batch) if BOUNDARY else True
        position = tl.load(first_position + batch) + first if ROPE else 0
        _encode_tile(
            (ring + lane * slots * D, D, 1, first, slots),
            (state[0] + lane * D, state[1] + lane * D, state[1], state[2] + lane * ((D - WIDTH) * (D - WIDTH))),
            (frequencies, position, half, factor),
            _tile_out(codes, meta, aux, out, T, D, G, AXIS, MODE, BITS),
            may_be_asym,
            T,
            D,
            G,
            AXIS,
            MODE,
            BITS,
            VALUE,
            MEAN,
            NORM,
            False,
            ROPE,
            WIDTH,
            True,
            WARPS,
        )
    if NEW > 0:
        _append(new, windows, batch, head, lane, length, count, NEW, D)


@triton.jit
def _append(new, windows, batch, head, lane, length, count, NEW: tl.constexpr, D: tl.constexpr):
    """Write ``count`` new tokens of a sequence of ``length`` to its windows."""
    tokens, stride_b, stride_h, stride_t, stride_c = new
    sink_window, sinks, ring, slots = windows
    tl.debug_barrier()  # the slots that new tokens take may be those just read
    j = tl.arange(0, NEW)[:, None]
    c = tl.arange(0, triton.next_power_of_2(D))[None, :]
    real = (j < count) & (c < D)
    at = tokens + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + j * stride_t + c * stride_c
    token = tl.load(at, mask=real, other=0.0).to(ring.dtype.element_ty)
    to = length + j
    tl.store(sink_window + (lane * sinks + to) * D + c, token, mask=real & (to < sinks))
    slot = tl.maximum(to - sinks, 0) % slots
    tl.store(ring + (lane * slots + slot) * D + c, token, mask=real & (to >= sinks))


@triton.jit
def _blocks_due(length, packed, sinks, recent, first_block, blocks, BLOCK: tl.constexpr):
    """Whole blocks older than the recent window; never past the end of the storage."""
    due = tl.maximum(length - sinks - recent - packed, 0) // BLOCK
    return tl.maximum(tl.minimum(due, first_block + blocks - packed // BLOCK), 0)


@triton.jit
def _advance(total_len, packed_len, sink_len, recent_len, ticket, batch, programs, after, closed, sinks):
    """All ``programs`` of a sequence have read its lengths; the last one to get here advances them for the next launch."""
    tl.debug_barrier()
    if tl.atomic_add(ticket + batch, 1) == programs - 1:
        tl.store(total_len + batch, after.to(total_len.dtype.element_ty))
        tl.store(packed_len + batch, closed.to(packed_len.dtype.element_ty))
        tl.store(sink_len + batch, tl.minimum(after, sinks))
        tl.store(recent_len + batch, tl.maximum(after - sinks, 0) - closed)
        tl.store(ticket + batch, 0)


@triton.jit(do_not_specialize=["tokens", "first_block"])
def _step_kernel(
    key,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    k_stride_c,
    value,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    v_stride_c,
    sink_k,
    sink_v,
    ring_k,
    ring_v,
    k_codes,
    k_meta,
    k_aux,
    v_codes,
    v_meta,
    v_aux,
    mean,
    norm,
    update,
    inv_freq,
    first_position,
    half,
    rope_factor,
    boundary,
    counts,
    total_len,
    packed_len,
    sink_len,
    recent_len,
    ticket,
    tokens,
    heads,
    sinks,
    recent,
    slots,
    first_block,
    blocks,
    BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    CLOSE: tl.constexpr,
    ADVANCE: tl.constexpr,
    COUNTS: tl.constexpr,
    D: tl.constexpr,
    KT: tl.constexpr,
    KG: tl.constexpr,
    K_AXIS: tl.constexpr,
    K_MODE: tl.constexpr,
    K_BITS: tl.constexpr,
    VT: tl.constexpr,
    VG: tl.constexpr,
    V_AXIS: tl.constexpr,
    V_MODE: tl.constexpr,
    V_BITS: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDARY: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Grid: (2 heads, batch); even programs take keys, odd ones values."""
    head = tl.program_id(0) // 2
    batch = tl.program_id(1)
    length = tl.load(total_len + batch).to(tl.int32)
    packed = tl.load(packed_len + batch).to(tl.int32)
    count = tl.load(counts + batch).to(tl.int32) if COUNTS else tokens
    due = 0
    if CLOSE:
        due = _blocks_due(length, packed, sinks, recent, first_block, blocks, BLOCK)
    state = (mean, norm, update)
    rope = (inv_freq, first_position, half, rope_factor)
    place = (batch, head, heads)
    lengths = (length, packed, due, count)
    if tl.program_id(0) % 2 == 0:
        _close_and_append(
            (key, k_stride_b, k_stride_h, k_stride_t, k_stride_c),
            (sink_k, sinks, ring_k, slots),
            (k_codes, k_meta, k_aux, first_block, blocks),
            state,
            rope,
            boundary,
            place,
            lengths,
            BLOCK,
            NEW,
            KT,
            D,
            KG,
            K_AXIS,
            K_MODE,
            K_BITS,
            False,
            MEAN,
            NORM,
            ROPE,
            WIDTH,
            BOUNDARY,
            WARPS,
        )
    else:
        _close_and_append(
            (value, v_stride_b, v_stride_h, v_stride_t, v_stride_c),
            (sink_v, sinks, ring_v, slots),
            (v_codes, v_meta, v_aux, first_block, blocks),
            state,
            rope,
            boundary,
            place,
            lengths,
            BLOCK,
            NEW,
            VT,
            D,
            VG,
            V_AXIS,
            V_MODE,
            V_BITS,
            True,
            False,
            False,
            False,
            0,
            BOUNDARY,
            WARPS,
        )
    if ADVANCE:
        _advance(
            total_len,
            packed_len,
            sink_len,
            recent_len,
            ticket,
            batch,
            2 * heads,
            length + (count if NEW > 0 else 0),
            packed + due * BLOCK,
            sinks,
        )


# ---- launches --------------------------------------------------------------------------------------------------------


def _tile(fmt: AffineGroups) -> int:
    """Tokens that are encoded together."""
    return fmt.group if fmt.axis == "token" else UNIT


def _warps(*formats: AffineGroups, cut: bool = False) -> int:
    """Warps of a program: a thread has 128 elements of a tile; ``cut``: 32, because it holds all of them at once."""
    return max(1, max(_tile(f) * f.head_dim for f in formats) // (1024 if cut else 4096))


def _stored(fmt: AffineGroups, fields: Fields) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, metadata and sign words as the kernels address them: codes and sign words as int32."""
    names = ("meta",) if fmt.mode == "asym" else ("scale", "aux")
    for name in ("codes", *names):
        if not fields[name].is_contiguous():
            raise ValueError(f"{name}: packed storage must be contiguous, its strides are {fields[name].stride()}")
    codes = fields["codes"].view(torch.int32)
    return codes, fields[names[0]], codes if fmt.mode == "asym" else fields["aux"].view(torch.int32)


def _check(fmt: Format, update: torch.Tensor | None) -> AffineGroups:
    why = unsupported(fmt, None if update is None else fmt.head_dim - update.shape[-1])
    if why:
        raise ValueError(f"encode: {why}")
    assert isinstance(fmt, AffineGroups)
    return fmt


def _or_any(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A tensor, or one that stands for it and is never read."""
    return other if x is None else x.contiguous()


def _constants(fmt: AffineGroups, mode: str | None = None) -> tuple[int, int, int, int, int]:
    """Tokens of a tile, group, axis, mode, bits."""
    chosen = MODES["sym" if mode == "sym" and fmt.mode == "hybrid" else fmt.mode]
    return _tile(fmt), fmt.group, int(fmt.axis == "channel"), chosen, fmt.bits_per_code


def encode_blocks(
    x: torch.Tensor,
    fields: Fields,
    fmt: Format,
    block_offset: int,
    transform: KeyTransform | None = None,
    mode: str | None = None,
    rows: torch.Tensor | None = None,
    first_block: int = 0,
    ring_blocks: int | None = None,
) -> None:
    """Encode whole blocks into packed storage, in one pass and without a float32 copy.

    Parameters
    ----------
    x : Tensor [batch, num_kv_heads, tokens, head_dim]
        fp16, bf16 or fp32 of any strides; ``tokens`` is a multiple of the format's block. With ``ring_blocks``: a ring
        ``[sequences, num_kv_heads, slots, head_dim]``, token t of a sequence in slot ``t % slots``.
    fields : Fields
        Contiguous storage ``[sequences, num_kv_heads, blocks, ...]``, filled in place.
    fmt : Format
        An :class:`AffineGroups` that :func:`why_not` has nothing against.
    block_offset : int
        Where in ``fields`` the first block goes.
    transform : KeyTransform or None
        Its tensors are indexed like ``fields``, by sequence.
    mode : {"sym", None}
        "sym": a hybrid format takes symmetric groups throughout.
    rows : Tensor or None, integer [batch]
        Which sequence of ``fields`` each sequence of ``x`` is; None: the same one.
    first_block : int
        Index of the first block of ``fields`` within the sequence; matters for rings and for un-rotating keys.
    ring_blocks : int or None
        ``x`` is a ring, of which this many blocks are encoded, from token ``(first_block + block_offset) * block`` on.
    """
    how = transform or KeyTransform()
    form = _check(fmt, how.update)
    batch, heads, slots, dim = x.shape
    tokens = slots if ring_blocks is None else ring_blocks * form.block
    if ring_blocks is not None and rows is not None:
        batch = rows.numel()
    blocks = fields["codes"].shape[2]
    if tokens > slots:
        raise ValueError(f"ring_blocks={ring_blocks}: {tokens} tokens do not fit in {slots} slots")
    if tokens % form.block or dim != form.head_dim:
        raise ValueError(f"x: shape {tuple(x.shape)} is not whole blocks of {form.block} tokens by {form.head_dim}")
    if fields["codes"].shape[1] != heads or (rows is None and fields["codes"].shape[0] != batch):
        raise ValueError(f"fields: hold {tuple(fields['codes'].shape[:2])} sequences and heads, x {(batch, heads)}")
    if not 0 <= block_offset <= blocks - tokens // form.block:
        raise ValueError(f"block_offset={block_offset}: {tokens // form.block} blocks do not fit in {blocks}")
    if how.numbers is not None:
        if how.update is None or how.update.dim() != 5 or how.update.shape[0] != batch:
            raise ValueError(
                "numbers: say which update a block takes; there must be some, of each sequence that is encoded"
            )
        if how.numbers.numel() != tokens // form.block:
            raise ValueError(f"numbers: {how.numbers.numel()} of them for {tokens // form.block} blocks")
    if not tokens or not batch:
        return
    per_block = form.block // _tile(form)
    codes, meta, aux = _stored(form, fields)
    tile, group, axis, chosen, bits = _constants(form, mode)
    warps = _warps(form, cut=how.update is not None or how.inv_freq is not None)
    _encode_kernel[(tokens // tile, heads, batch)](
        x,
        *x.stride(),
        _or_any(rows, codes),
        codes,
        meta,
        aux,
        block_offset * per_block,
        blocks * per_block,
        heads,
        _or_any(how.mean, meta),
        _or_any(how.norm, meta),
        _or_any(None if how.norm is None else how.norm.reciprocal(), meta),
        _or_any(how.update, meta),
        _or_any(how.inv_freq, meta),
        _or_any(how.first_position, codes),
        (first_block + block_offset) * form.block,
        0 if how.inv_freq is None else how.inv_freq.numel(),
        how.rope_factor,
        slots,
        _or_any(how.numbers, codes),
        1 if how.numbers is None or how.update is None else how.update.shape[1],
        per_block,
        T=tile,
        D=dim,
        G=group,
        AXIS=axis,
        MODE=chosen,
        BITS=bits,
        VALUE=form.operand == "value",
        ROWS=rows is not None,
        RING=ring_blocks is not None,
        MEAN=how.mean is not None,
        NORM=how.norm is not None,
        ROPE=how.inv_freq is not None,
        WIDTH=0 if how.update is None else dim - how.update.shape[-1],
        NUMBERS=how.numbers is not None,
        WARPS=warps,
        num_warps=warps,
        num_stages=1,  # nothing to prefetch: a loop over due blocks runs once, if at all
        enable_fp_fusion=False,
    )


def append_and_close(
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    lengths: Lengths,
    sink: tuple[torch.Tensor, torch.Tensor],
    ring: tuple[torch.Tensor, torch.Tensor],
    recent: int,
    key_fields: Fields,
    key_format: Format,
    value_fields: Fields,
    value_format: Format,
    transform: KeyTransform | None = None,
    boundary: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    close: bool = True,
    first_block: int = 0,
) -> None:
    """Close the blocks that are due, write a step's tokens into the windows, advance the lengths: one launch.

    No value is read on the host: fit for capture in a CUDA graph. Sequences may have different lengths. The state of
    every sequence (mean, norms, update) must be fixed already.

    Parameters
    ----------
    key, value : Tensor or None [batch, num_kv_heads, tokens, head_dim]
        The step's 1 to 16 tokens, after RoPE, any strides; None: close only.
    lengths : Lengths
        Before the step.
    sink : pair of Tensor [batch, num_kv_heads, sink, head_dim]
        Contiguous; token t lies in slot t.
    ring : pair of Tensor [batch, num_kv_heads, slots, head_dim]
        Contiguous; token t, counted from the end of the sink, lies in slot ``t % slots``. At least ``recent + block - 1 +
        tokens`` slots.
    recent : int
        A block is closed once ``recent`` tokens newer than it exist.
    key_fields, value_fields : Fields
        Contiguous ``[batch, num_kv_heads, blocks, ...]`` with room for what the sequences grow to; blocks beyond it are
        not closed.
    key_format, value_format : Format
    transform : KeyTransform or None
        Of the keys.
    boundary : Tensor or None, integer [batch]
        Blocks that end after this many packed tokens take symmetric groups (hybrid formats only); None: no limit.
    counts : Tensor or None, integer [batch]
        How many of the step's tokens, from the first, each sequence takes; None: all.
    close : bool
        False: only append.
    first_block : int
        Index of the first block of the fields within the sequences.
    """
    how = transform or KeyTransform()
    k_form, v_form = _check(key_format, how.update), _check(value_format, None)
    batch, heads, slots, dim = ring[0].shape
    tokens = 0 if key is None else key.shape[2]
    block = k_form.block
    if v_form.block != block or k_form.head_dim != dim or v_form.head_dim != dim:
        raise ValueError(
            f"formats: blocks {block}, {v_form.block}; head_dim {k_form.head_dim}, {v_form.head_dim}, {dim}"
        )
    if (key is None) != (value is None) or tokens > MAX_TOKENS:
        raise ValueError(f"tokens={tokens}: a step appends 1 to {MAX_TOKENS} keys and as many values")
    if slots < recent + block - 1 + tokens:
        raise ValueError(f"ring: has {slots} slots; recent={recent}, block={block} need {recent + block - 1 + tokens}")
    for name, window in zip(("sink", "sink", "ring", "ring"), (*sink, *ring), strict=True):
        if not window.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, its strides are {window.stride()}")
    k_stored, v_stored = _stored(k_form, key_fields), _stored(v_form, value_fields)
    k_codes = k_stored[0]
    blocks = k_codes.shape[2]
    if k_codes.shape[:2] != (batch, heads) or v_stored[0].shape[:3] != k_codes.shape[:3]:
        raise ValueError(f"fields: {tuple(k_codes.shape[:3])}, {tuple(v_stored[0].shape[:3])} for {batch} x {heads}")
    kt, kg, k_axis, k_mode, k_bits = _constants(k_form)
    vt, vg, v_axis, v_mode, v_bits = _constants(v_form)
    warps = _warps(k_form, v_form, cut=how.update is not None or how.inv_freq is not None)
    new_k, new_v = (ring[0], ring[1]) if key is None or value is None else (key, value)
    _step_kernel[(2 * heads, batch)](
        new_k,
        *new_k.stride(),
        new_v,
        *new_v.stride(),
        *sink,
        *ring,
        *k_stored,
        *v_stored,
        _or_any(how.mean, k_stored[1]),
        _or_any(how.norm, k_stored[1]),
        _or_any(how.update, k_stored[1]),
        _or_any(how.inv_freq, k_stored[1]),
        _or_any(how.first_position, k_codes),
        0 if how.inv_freq is None else how.inv_freq.numel(),
        how.rope_factor,
        _or_any(boundary, k_codes),
        _or_any(counts, k_codes),
        lengths.total,
        lengths.packed,
        lengths.sink,
        lengths.recent,
        _or_any(lengths.ticket, lengths.sink),
        tokens,
        heads,
        sink[0].shape[2],
        recent,
        slots,
        first_block,
        blocks,
        BLOCK=block,
        NEW=triton.next_power_of_2(tokens) if tokens else 0,
        CLOSE=close,
        ADVANCE=lengths.ticket is not None,
        COUNTS=counts is not None,
        D=dim,
        KT=kt,
        KG=kg,
        K_AXIS=k_axis,
        K_MODE=k_mode,
        K_BITS=k_bits,
        VT=vt,
        VG=vg,
        V_AXIS=v_axis,
        V_MODE=v_mode,
        V_BITS=v_bits,
        MEAN=how.mean is not None,
        NORM=how.norm is not None,
        ROPE=how.inv_freq is not None,
        WIDTH=0 if how.update is None else dim - how.update.shape[-1],
        BOUNDARY=boundary is not None,
        WARPS=warps,
        num_warps=warps,
        num_stages=1,  # nothing to prefetch: a loop over due blocks runs once, if at all
        enable_fp_fusion=False,
    )


TOLERANCE = 0.02
"""Of :func:`self_test`, relative RMS: some rounding ties may differ, a misplaced code in a hundred may not."""


@lru_cache(maxsize=256)
def self_test(
    key_format: AffineGroups, value_format: AffineGroups, width: int | None, device: torch.device
) -> str | None:
    """Run the kernels once as they are compiled on this device, and compare with the formats' own encoding.

    Compilers err, and wrong bytes would be silent: an earlier version of these kernels, right in the interpreter, was
    compiled to something else for some shapes.

    Parameters
    ----------
    key_format, value_format : AffineGroups
        That :func:`why_not` has nothing against.
    width : int or None
        Channels of a slice of SQuat's update, if there is one.

    Returns
    -------
    str or None
        What went wrong; None if nothing did. Waits for the device, once per process and formats.
    """
    draw = torch.Generator().manual_seed(0)
    heads, block, dim = 2, key_format.block, key_format.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, heads, *shape, generator=draw, dtype=torch.float32, device="cpu").to(device)

    keys, values = random(2 * block, dim).half(), random(2 * block, dim).half()
    mean, norm = random(dim), random(dim).abs() + 0.5
    # an update of zeros goes the whole way of SQuat and changes nothing
    update, of_blocks = None, KeyTransform()
    if width is not None:
        update = torch.zeros(1, heads, dim - width, dim - width, dtype=torch.float32, device=device)
        numbers = torch.arange(2, device=device)
        of_blocks = KeyTransform(update=torch.stack((update, update), 1), numbers=numbers)
    shifted = (keys.float() - mean.unsqueeze(-2)) / norm.unsqueeze(-2)
    for form, x, how, expected in (
        (key_format, keys, of_blocks, keys.float()),
        (key_format, keys, replace(of_blocks, mean=mean, norm=norm), shifted),
        (value_format, values, None, values.float()),
    ):
        fields = form.allocate(1, heads, 2, device)
        encode_blocks(x, fields, form, 0, how)
        if (error := _difference(form, fields, expected)) > TOLERANCE:
            return f"{form.operand}s encoded on this device differ from the format's by {error:.2g} (relative RMS)"
    stored = [form.allocate(1, heads, 1, device) for form in (key_format, value_format)]
    nothing = keys[:, :, :0].contiguous()
    lengths = Lengths.of([block], [0], 0, device)
    append_and_close(
        None, None, lengths, (nothing, nothing), (keys, values), 0, stored[0], key_format, stored[1], value_format,
        KeyTransform(update=update),
    )  # fmt: skip
    for form, fields, x in ((key_format, stored[0], keys), (value_format, stored[1], values)):
        if (error := _difference(form, fields, x[:, :, :block].float())) > TOLERANCE:
            return f"{form.operand}s closed on this device differ from the format's by {error:.2g} (relative RMS)"
    return None


def _difference(fmt: Format, fields: Fields, x: torch.Tensor) -> float:
    """Relative RMS between what is stored and what the format itself would store; infinite where that is not finite."""
    expected = fmt.decode(fmt.encode(x))
    error = float((fmt.decode(fields) - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    return error if math.isfinite(error) else math.inf
