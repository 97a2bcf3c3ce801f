# mypy: ignore-errors
"""What becomes of a group's numbers as they are encoded: scales, zero-points and codes, rounded as division rounds them."""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to nearest even, and leaves the integer in the low bits
HUGE = tl.constexpr(1.0e18)  # as the cache bounds what it encodes: beyond every format, small enough for squares
HALF_MAX = tl.constexpr(65504.0)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
