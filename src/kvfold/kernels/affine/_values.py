# mypy: ignore-errors
"""Outputs in the fused kernel: sums of the values of affine groups, weighted by probabilities."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._codes import _bytes, _signed
from kvfold.kernels.common._codes import _load_codes, _operand, code_bytes, step, weight
from kvfold.kernels.common._registers import ONES, _axpy4, _replace, _two, _zero4
from kvfold.kernels.common._softmax import LIFT, _headroom, _lighten
from kvfold.kernels.common._warp import (
    abs_halves,
    add_half2,
    as_float,
    as_int,
    high_halves,
    load_shared,
    low_halves,
    max_half2,
    mma,
    mma_tf32,
    mul_half2,
    negative_half,
    shuffle,
    times,
    unpack_half2,
)


@gluon.constexpr_function
def carried(axis):
    """log2 of the factor that sums of packed values carry beside what running maxima have: nothing for groups of channels
    (``axis`` 1), whose factor follows their scales and is in the maxima."""
    return 0 if axis == 1 else LIFT.value


@gluon.jit
def _value_room(base, lane, D: gl.constexpr, GROUP: gl.constexpr, NB: gl.constexpr, META: gl.constexpr):
    """log2 of the factor that probabilities of a stage may carry, where scales multiply them; see :func:`_headroom`."""
    NG: gl.constexpr = D // GROUP  # scales of a block's 32 tokens are 16 NG words
    EACH: gl.constexpr = max(1, NG // 2)
    at = base + lane * (4 * EACH) if NG > 1 else base + (lane % 16) * 4
    x = lane * 0
    for j in gl.static_range(NB):
        words = load_shared(at, META + 128 * NG * j, EACH)
        for i in gl.static_range(EACH):
            x = max_half2(x, words[i])
    return _headroom(x)


@gluon.jit
def _value_row(mine, zero, AT: gl.constexpr, NG: gl.constexpr):
    """Scales [column half, group] of this lane's pairs of tokens; zero-points of group g of both halves."""
    s = load_shared(mine, AT, NG) + load_shared(mine, AT + 16 * NG, NG)
    return s, load_shared(zero, AT + 64 * NG, 1)[0], load_shared(zero, AT + 80 * NG, 1)[0]


@gluon.jit
def _values_operand(
    base, lane, p, out, side, D: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Groups of channels: the scale multiplies the probability. Rows of ``side``: zero-point sums, then row sums."""
    CT: gl.constexpr = D // 16
    NG: gl.constexpr = D // GROUP
    PER: gl.constexpr = GROUP // 16
    ROW: gl.constexpr = 128 * NG
    g = lane // 4
    t = lane % 4
    mine = base + t * (4 * NG)
    zero = mine + (g % NG) * 4
    one = lane * 0 + ONES
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        for tt in gl.static_range(2):
            s, z0, z1 = _value_row(mine, zero, META + j * ROW + 32 * NG * tt, NG)
            for n in gl.static_range(NT):
                p0, p1 = _two(p, (2 * j + tt) * NT + n)
                side = _replace(side, n, mma(z0, one, z1, one, p0, p1, side[n], False))
            for group in gl.static_range(NG):
                b = ()
                for n in gl.static_range(NT):
                    p0 = _lighten(p[((2 * j + tt) * NT + n) * 2], lane, tt * step(D, BITS))
                    p1 = _lighten(p[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * step(D, BITS))
                    b = b + (mul_half2(p0, s[group]), mul_half2(p1, s[NG + group]))
                for i in gl.static_range(PER):
                    a = _operand(words, 2 * (group * PER + i) + tt, D, BITS)
                    for n in gl.static_range(NT):
                        acc = out[n * CT + group * PER + i]
                        acc = mma(a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1], acc, False)
                        out = _replace(out, n * CT + group * PER + i, acc)
    return out, side


@gluon.jit
def _join(before, factor, n: gl.constexpr, x, FIRST: gl.constexpr):
    """Sums so far, times the factor of their query rows if this is the FIRST that joins them in a stage, and ``x``."""
    if FIRST:
        f0 = factor[2 * n]
        f1 = factor[2 * n + 1]
        return (
            gl.fma(before[0], f0, x[0]),
            gl.fma(before[1], f1, x[1]),
            gl.fma(before[2], f0, x[2]),
            gl.fma(before[3], f1, x[3]),
        )
    else:
        return (before[0] + x[0], before[1] + x[1], before[2] + x[2], before[3] + x[3])


@gluon.jit
def _values_operand_apart(
    base, lane, p, factor, out, side, D: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """As :func:`_values_operand`, but sums of two blocks begin at zero and join those before, times ``factor``, in fp32.

    Tensor cores cut off what they add to an accumulator instead of rounding it. Over thousands of tokens that shows, for sums
    of codes are much larger than what zero-points leave of them.
    """
    CT: gl.constexpr = D // 16
    NG: gl.constexpr = D // GROUP
    PER: gl.constexpr = GROUP // 16
    ROW: gl.constexpr = 128 * NG
    g = lane // 4
    t = lane % 4
    mine = base + t * (4 * NG)
    zero = mine + (g % NG) * 4
    one = lane * 0 + ONES
    for j0 in gl.static_range(0, NB, 2):
        words = ()
        for j in gl.static_range(j0, min(j0 + 2, NB)):
            words = words + (_load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS),)
        for n in gl.static_range(NT):
            sums = _zero4(lane)
            for j in gl.static_range(j0, min(j0 + 2, NB)):
                for tt in gl.static_range(2):
                    z0 = load_shared(zero, META + j * ROW + 32 * NG * tt + 64 * NG, 1)[0]
                    z1 = load_shared(zero, META + j * ROW + 32 * NG * tt + 80 * NG, 1)[0]
                    p0, p1 = _two(p, (2 * j + tt) * NT + n)
                    sums = mma(z0, one, z1, one, p0, p1, sums, False)
            side = _replace(side, n, _join(side[n], factor, n, sums, j0 == 0))
        for group in gl.static_range(NG):
            b = ()
            for j in gl.static_range(j0, min(j0 + 2, NB)):
                for tt in gl.static_range(2):
                    s0 = load_shared(mine, META + j * ROW + 32 * NG * tt + 4 * group, 1)[0]
                    s1 = load_shared(mine, META + j * ROW + 32 * NG * tt + 16 * NG + 4 * group, 1)[0]
                    for n in gl.static_range(NT):
                        p0 = _lighten(p[((2 * j + tt) * NT + n) * 2], lane, tt * step(D, BITS))
                        p1 = _lighten(p[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * step(D, BITS))
                        b = b + (mul_half2(p0, s0), mul_half2(p1, s1))
            for i in gl.static_range(PER):
                accs = ()
                for _n in gl.static_range(NT):
                    accs = accs + (_zero4(lane),)
                for j in gl.static_range(j0, min(j0 + 2, NB)):
                    for tt in gl.static_range(2):
                        a = _operand(words[j - j0], 2 * (group * PER + i) + tt, D, BITS)
                        for n in gl.static_range(NT):
                            b0, b1 = _two(b, (2 * (j - j0) + tt) * NT + n)
                            accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], b0, b1, accs[n], False))
                for n in gl.static_range(NT):
                    x = _join(out[n * CT + group * PER + i], factor, n, accs[n], j0 == 0)
                    out = _replace(out, n * CT + group * PER + i, x)
    return out, side


@gluon.jit
def _values_accumulator(
    base, lane, p, out, side, D: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr, AUX: gl.constexpr,
):  # fmt: skip
    """Groups of 32 tokens: each block has its own accumulator, which the scale multiplies."""
    CT: gl.constexpr = D // 16
    ROW: gl.constexpr = 4 * D if MODE == 0 else 2 * D
    g = lane // 4
    t = lane % 4
    mine = base + g * (D // 4)
    one = lane * 0 + ONES
    lift = 1 << (3 - t)
    zw = ()
    parts = ()
    totals = ()
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        sw = load_shared(mine, META + j * ROW, CT)  # pairs: rows g and g + 8 of a channel tile
        if MODE == 0:
            zw = zw + load_shared(mine, META + j * ROW + 2 * D, CT)
        aux = ()
        cut = words
        if MODE > 0:
            aux = load_shared(base + g * (D // 2), AUX + j * 4 * D, 2 * CT)
            cut = _bytes(words, D, BITS)
        for n in gl.static_range(NT):
            p0, p1 = _two(p, 2 * j * NT + n)
            p2, p3 = _two(p, (2 * j + 1) * NT + n)
            block = mma(one, one, one, one, p0, p1, _zero4(lane), False)
            block = mma(one, one, one, one, p2, p3, block, False)
            if MODE == 2:
                totals = totals + (block,)
            x = side[n]
            side = _replace(side, n, (x[0], x[1], x[2] + block[0], x[3] + block[1]))
            if MODE == 0:  # what this lane's columns of the zero-point MMA hold
                parts = parts + (add_half2(add_half2(p0, p1), add_half2(p2, p3)),)
        for ct in gl.static_range(CT):
            signs = ()
            asym = ()
            if MODE == 2:
                s = unpack_half2(abs_halves(sw[ct]))
                asym = (negative_half(sw[ct], 0), negative_half(sw[ct], 1))
            else:
                s = unpack_half2(sw[ct])
                asym = (lane, lane)
            if MODE > 0:
                signs = (times(aux[2 * ct], lift), times(aux[2 * ct + 1], lift))
            s0 = s[0]
            s1 = s[1]
            if MODE == 0:
                s0 = s0 * (1 << (24 - weight(D, BITS, ct)))
                s1 = s1 * (1 << (24 - weight(D, BITS, ct)))
            accs = ()
            for _n in gl.static_range(NT):
                accs = accs + (_zero4(lane),)
            for tt in gl.static_range(2):
                if MODE > 0:
                    a = _signed(cut, signs, asym, 2 * ct + tt, 2 * ct + 1 - tt, tt, D, BITS, MODE == 2)
                else:
                    a = _operand(words, 2 * ct + tt, D, BITS)
                for n in gl.static_range(NT):
                    p0 = _lighten(p[((2 * j + tt) * NT + n) * 2], lane, tt * step(D, BITS))
                    p1 = _lighten(p[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * step(D, BITS))
                    accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], p0, p1, accs[n], False))
            for n in gl.static_range(NT):
                x = _axpy4(s0, s1, accs[n], out[n * CT + ct], False)
                out = _replace(out, n * CT + ct, x)
    if MODE == 2:
        # columns of the product with zero-points are blocks: a lane holds its own block's; their sums of probabilities come
        # in two parts, for the product reads 10 bits of each
        own = t % NB
        sw = load_shared(mine + own * ROW, META, CT)
        aux = load_shared(base + g * (D // 2) + own * (4 * D), AUX, 2 * CT)
        b = ()
        for n in gl.static_range(NT):
            total = _zero4(lane)[0]
            for j in gl.static_range(NB):
                x = totals[j * NT + n]
                even = shuffle(x[0], g // 2)
                odd = shuffle(x[1], g // 2)
                total = gl.where(t == j, gl.where(g % 2 == 0, even, odd), total)
            high = as_int(total) & -8192
            b = b + (as_float(high), total - as_float(high))
        for ct in gl.static_range(CT):
            z0 = aux[2 * ct] & negative_half(sw[ct], 0)
            z1 = aux[2 * ct + 1] & negative_half(sw[ct], 1)
            for n in gl.static_range(NT):
                unit = 1.0 / (1 << (24 - weight(D, BITS, ct)))
                b0 = as_int(b[2 * n] * unit)
                b1 = as_int(b[2 * n + 1] * unit)
                acc = mma_tf32(z0, z1, z0, z1, b0, b1, out[n * CT + ct])
                out = _replace(out, n * CT + ct, acc)
    if MODE == 0:
        # contraction of the zero-point MMA: lane t holds its own tokens' sums, columns (pair, half) are the blocks
        nothing = lane * 0
        for n in gl.static_range(NT):
            b = ()
            for i in gl.static_range(2):
                if 2 * i + 1 < NB:
                    x = parts[2 * i * NT + n]
                    y = parts[(2 * i + 1) * NT + n]
                    b = b + (add_half2(low_halves(x, y), high_halves(x, y)),)
                elif 2 * i < NB:
                    x = parts[2 * i * NT + n]
                    b = b + (add_half2(low_halves(x, nothing), high_halves(x, nothing)),)
                else:
                    b = b + (nothing,)
            for ct in gl.static_range(CT):
                a = ()
                for i in gl.static_range(2):
                    if 2 * i + 1 < NB:
                        x = zw[2 * i * CT + ct]
                        y = zw[(2 * i + 1) * CT + ct]
                        a = a + (low_halves(x, y), high_halves(x, y))
                    elif 2 * i < NB:
                        x = zw[2 * i * CT + ct]
                        a = a + (low_halves(x, nothing), high_halves(x, nothing))
                    else:
                        a = a + (nothing, nothing)
                acc = mma(a[0], a[1], a[2], a[3], b[0], b[1], out[n * CT + ct], False)
                out = _replace(out, n * CT + ct, acc)
    return out, side


@gluon.jit
def _whole_values(
    out, side, lane, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """Sums of values from what the loop over stages leaves: weights of codes taken out, zero-points added."""
    CT: gl.constexpr = D // 16
    t = lane % 4
    if AXIS == 0 and MODE > 0:  # values still carry 2^(k - 24)
        full = ()
        for n in gl.static_range(NT):
            for ct in gl.static_range(CT):
                f = float(1 << (24 - weight(D, BITS, ct)))
                x = out[n * CT + ct]
                full = full + ((x[0] * f, x[1] * f, x[2] * f, x[3] * f),)
        out = full
    if AXIS == 1:  # codes still carry 2^(k - 24); zero-point sums lie in the rows of their group
        full = ()
        for n in gl.static_range(NT):
            for ct in gl.static_range(CT):
                f = float(1 << (24 - weight(D, BITS, ct)))
                source = 4 * (ct * 16 // GROUP) + t
                z0 = shuffle(side[n][0], source)
                z1 = shuffle(side[n][1], source)
                x = out[n * CT + ct]
                full = full + ((gl.fma(x[0], f, z0), gl.fma(x[1], f, z1), gl.fma(x[2], f, z0), gl.fma(x[3], f, z1)),)
        out = full
    return out
