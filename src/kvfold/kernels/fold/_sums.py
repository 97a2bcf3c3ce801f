# mypy: ignore-errors
"""Scores and sums of values of one page of uniform codes: what the loop of :mod:`kvfold.kernels.fold._decode` does with it."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import (
    code_bytes,
    nibble_step,
    nibble_weight,
    page_operand,
    page_words,
    scale_at,
    unit,
)
from kvfold.kernels.common._hadamard import turned_tiles, with_signs
from kvfold.kernels.common._registers import _query, _replace, _zero4, ask_queries
from kvfold.kernels.common._softmax import _headroom, _lighten
from kvfold.kernels.common._warp import (
    abs_halves,
    as_float,
    as_int,
    exp2_fast,
    load_matrix4,
    load_shared,
    load_shared_short,
    max_half2,
    mma,
    mul_half2,
    pack_half2,
    shuffle_xor,
    store_shared1,
    transpose8,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fold._codes import hidden_block, mean_at

ONES = gl.constexpr(0x3C003C00)  # two fp16 ones
NORM_STEP = gl.constexpr(-1.0 / 48)  # kvfold.formats.paged.NORM_STEPS


# ---- keys -----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _exponent(mix):
    """The largest element of the queries is scaled to [2^e, 2^(e + 1)): turned, it stays below 2^15."""
    return min(8, 15 - mix.bit_length())


@gluon.jit
def ask_tiles(q_ptr, lane, row0, column0, rows, varlen, D: gl.constexpr, NT: gl.constexpr):
    """Of NT tiles of eight query rows what :func:`kvfold.kernels.common._registers.ask_queries` asks for."""
    asked = ()
    for n in gl.static_range(NT):
        asked = asked + (ask_queries(q_ptr, lane % 4, row0, column0 + n * 8 + lane // 4, rows, varlen, D),)
    return asked


@gluon.jit
def _raw_queries(asked, factor, D: gl.constexpr, MIX: gl.constexpr):
    """Tiles of :func:`ask_tiles` as B operands, scaled by a power of two, and what turns products into ``factor`` times the
    score."""
    CT: gl.constexpr = D // 16
    E: gl.constexpr = _exponent(MIX)
    q = ()
    up = ()
    for n in gl.static_range(len(asked)):
        raw = asked[n]
        big = gl.abs(raw[0])
        for i in gl.static_range(1, 4 * CT):
            big = gl.maximum(big, gl.abs(raw[i]))
        for i in gl.static_range(5):
            big = gl.maximum(big, shuffle_xor(big, 1 << i))
        exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
        down = as_float((254 + E - exponent) << 23)
        up = up + (as_float((exponent - E) << 23) * factor,)
        for i in gl.static_range(2 * CT):
            q = q + (pack_half2(raw[2 * i] * down, raw[2 * i + 1] * down, False),)
    return q, up


@gluon.jit
def _norm_words(
    base, scratch, lane, signs, D: gl.constexpr, NORM: gl.constexpr, AT: gl.constexpr, LOOKUP: gl.constexpr = False
):  # fmt: skip
    """Leave the page's norms, with the rotation's signs, in a warp's scratch: fp16 [D]. LOOKUP: in the order of
    :mod:`kvfold.kernels.fold._codebook_bytes`."""
    for i in gl.static_range(D // 64):
        at = (lane + 32 * i) * 2
        if NORM:
            codes = load_shared_short(base + at, AT)
            low = exp2_fast((codes & 255).to(gl.float32) * NORM_STEP)
            high = exp2_fast((codes >> 8).to(gl.float32) * NORM_STEP)
            word = pack_half2(low, high, False)
        else:
            word = lane * 0 + ONES
        to = scratch + 2 * at
        if LOOKUP:
            to = scratch + (lane // 2 % 4 * 8 + lane // 16 * 4 + lane // 8 % 2 * 2 + lane % 2 + 32 * i) * 4
        store_shared1(to, with_signs(word, signs, i))
    warp_sync(lane)


@gluon.jit
def _vector(address, OFFSET: gl.constexpr, D: gl.constexpr):
    """A vector fp16 [D] in shared memory as pairs of an operand, the same in all rows: [channel tile, half]."""
    out = ()
    for i in gl.static_range(D // 32):
        out = out + load_matrix4(address, OFFSET + 64 * i, False)
    return out


@gluon.jit
def _turned_queries(
    q, scratch, lane, matrix, D: gl.constexpr, BITS: gl.constexpr, MIX: gl.constexpr, NT: gl.constexpr, FAR: gl.constexpr,
    LOOKUP: gl.constexpr = False,
):  # fmt: skip
    """Queries as a page's codes meet them: times norms and signs, turned (without the factor), times 2^-k of the tile.

    Also -o times their sums, in units of code sums. LOOKUP: neither is done where codes are looked up.
    """
    CT: gl.constexpr = D // 16
    MIDDLE: gl.constexpr = -((1 << BITS) - 1) / 2 / (1 << 24)
    norm = _vector(scratch + lane // 8 * 16, 0, D)
    one = lane * 0 + ONES
    out = ()
    start = ()
    for n in gl.static_range(NT):
        x = ()
        for ct in gl.static_range(CT):
            b0, b1 = _query(q, n * CT + ct, FAR)
            x = x + (mul_half2(b0, norm[2 * ct]), mul_half2(b1, norm[2 * ct + 1]))
        if MIX > 1:
            turned = turned_tiles(x, matrix, lane, CT, MIX)
            x = ()
            for ct in gl.static_range(CT):
                y = turned[ct]
                x = x + (transpose8(pack_half2(y[0], y[1], False)), transpose8(pack_half2(y[2], y[3], False)))
        if LOOKUP:
            out = out + x
        else:
            sums = (_zero4(lane), _zero4(lane))
            for ct in gl.static_range(CT):
                sums = _replace(sums, ct % 2, mma(one, one, one, one, x[2 * ct], x[2 * ct + 1], sums[ct % 2], False))
            start = start + ((sums[0][0] + sums[1][0]) * MIDDLE, (sums[0][1] + sums[1][1]) * MIDDLE)
            for ct in gl.static_range(CT):
                out = out + (
                    _lighten(x[2 * ct], lane, nibble_weight(D, BITS, ct)),
                    _lighten(x[2 * ct + 1], lane, nibble_weight(D, BITS, ct)),
                )
    return out, start


@gluon.jit
def _mean_scores(q, base, lane, up, D: gl.constexpr, NT: gl.constexpr, AT: gl.constexpr, FAR: gl.constexpr):
    """q . mean of the page, in units of scores, for a lane's columns.

    Two channel tiles of the mean are one operand, the first in rows 0 to 7, the second in rows 8 to 15: what a query's other
    tile gives there is left out.
    """
    CT: gl.constexpr = D // 16
    address = base + lane // 8 % 2 * 32 + lane // 16 * 16
    mean = ()
    for i in gl.static_range(CT // 2):
        mean = mean + (load_matrix4(address, AT + 64 * i, False),)
    out = ()
    for n in gl.static_range(NT):
        first = _zero4(lane)
        second = _zero4(lane)
        for i in gl.static_range(CT // 2):
            m = mean[i]
            b0, b1 = _query(q, n * CT + 2 * i, FAR)
            first = mma(m[0], m[1], m[2], m[3], b0, b1, first, False)
            b0, b1 = _query(q, n * CT + 2 * i + 1, FAR)
            second = mma(m[0], m[1], m[2], m[3], b0, b1, second, False)
        out = out + ((first[0] + second[2]) * up[n], (first[1] + second[3]) * up[n])
    return out


@gluon.jit
def _page_scores(
    base, lane, q, start, bias, code_factor, left, skip, D: gl.constexpr, BITS: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens: 2 NB x NT accumulators. Those of the first ``skip`` blocks, if it is not None, are hidden."""
    CT: gl.constexpr = D // 16
    STEP: gl.constexpr = nibble_step(D, BITS)
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:  # of tokens g and g + 8 of four tiles, as pairs
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, scale_at(D, BITS, NB) + 64 * j, True)
        words = page_words(base, lane, j * code_bytes(D, BITS), D, BITS)
        hidden = hidden_block(left, skip, j)
        accs = ()
        for _i in gl.static_range(2 * NT):
            accs = accs + (_zero4(lane),)
        for ct in gl.static_range(CT):
            for tt in gl.static_range(2):
                a = page_operand(words, 2 * ct + tt, D, BITS)
                for n in gl.static_range(NT):
                    acc = mma(
                        a[0], a[1], a[2], a[3], q[(n * CT + ct) * 2], q[(n * CT + ct) * 2 + 1], accs[tt * NT + n], False
                    )
                    accs = _replace(accs, tt * NT + n, acc)
        for tt in gl.static_range(2):
            low, high = unpack_half2(scale[2 * (j % 2) + tt])
            for n in gl.static_range(NT):
                f0 = low * (code_factor[n] * 0.5 ** (tt * STEP))
                f1 = high * (code_factor[n] * 0.5 ** (tt * STEP))
                s0 = start[2 * n] * 2.0 ** (tt * STEP)
                s1 = start[2 * n + 1] * 2.0 ** (tt * STEP)
                e0 = bias[2 * n] + hidden
                e1 = bias[2 * n + 1] + hidden
                x = accs[tt * NT + n]
                scores = scores + (
                    (
                        gl.fma(x[0], f0, gl.fma(s0, f0, e0)),
                        gl.fma(x[1], f0, gl.fma(s1, f0, e1)),
                        gl.fma(x[2], f1, gl.fma(s0, f1, e0)),
                        gl.fma(x[3], f1, gl.fma(s1, f1, e1)),
                    ),
                )
    return scores


# ---- probabilities --------------------------------------------------------------------------------------------------


@gluon.jit
def _room(base, lane, NB: gl.constexpr, AT: gl.constexpr):
    """log2 of the factor that probabilities of a page may carry; see :func:`_headroom`."""
    x = lane * 0
    for i in gl.static_range(NB // 2):
        x = max_half2(x, abs_halves(load_shared(base + lane * 4, AT + 128 * i, 1)[0]))
    return _headroom(x)


@gluon.jit
def _sums(p, lane, n: gl.constexpr, COUNT: gl.constexpr, NT: gl.constexpr):
    """Sums over a page's tokens of what is in B operands, for a lane's columns."""
    one = lane * 0 + ONES
    sums = (_zero4(lane), _zero4(lane))
    for i in gl.static_range(COUNT):
        acc = mma(one, one, one, one, p[(i * NT + n) * 2], p[(i * NT + n) * 2 + 1], sums[i % 2], False)
        sums = _replace(sums, i % 2, acc)
    return sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]


# ---- values ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _turned_mean(base, lane, signs, matrix, D: gl.constexpr, MIX: gl.constexpr, AT: gl.constexpr):
    """The mean of a page's values in the rotated basis (without the factor): accumulators, all columns the same."""
    CT: gl.constexpr = D // 16
    for i in gl.static_range(D // 64):
        at = base + (lane + 32 * i) * 4
        store_shared1(at + AT, with_signs(load_shared(at, AT, 1)[0], signs, i))
    warp_sync(lane)
    return turned_tiles(_vector(base + lane // 8 * 16, AT, D), matrix, lane, CT, MIX)


@gluon.jit
def _plain_mean(base, lane, D: gl.constexpr, AT: gl.constexpr):
    """The mean of a page's values where there is no rotation, likewise."""
    out = ()
    for ct in gl.static_range(D // 16):
        at = base + (16 * ct + lane // 4) * 2
        a, b = unpack_half2(load_shared_short(at, AT) | (load_shared_short(at, AT + 16) << 16))
        out = out + ((a, a, b, b),)
    return out


@gluon.jit
def _page_values(
    base, lane, p, total, factor, out, signs, matrix, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr,
    MIX: gl.constexpr, NT: gl.constexpr, NB: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Sums of values, in the rotated basis and in units of codes (2^(k - 24)), and of probabilities, a page further."""
    CT: gl.constexpr = D // 16
    MIDDLE: gl.constexpr = ((1 << BITS) - 1) / 2
    FACTOR: gl.constexpr = MIX**-0.5
    STEP: gl.constexpr = nibble_step(D, BITS)
    scale = ()
    for j in gl.static_range(NB):  # of tokens 2t and 2t + 1 of eight, as pairs
        scale = scale + load_matrix4(base + lane // 8 * 16, AT + scale_at(D, BITS, NB) + 64 * j, False)
    w = ()
    for i in gl.static_range(2 * NB):
        for n in gl.static_range(NT):
            w = w + (
                mul_half2(p[(i * NT + n) * 2], scale[2 * i]),
                mul_half2(p[(i * NT + n) * 2 + 1], scale[2 * i + 1]),
            )
    mean = ()
    if MEAN:
        if MIX > 1:
            mean = _turned_mean(base, lane, signs, matrix, D, MIX, AT + mean_at(D, BITS, NB))
        else:
            mean = _plain_mean(base, lane, D, AT + mean_at(D, BITS, NB))
    new = ()
    accs = ()
    for n in gl.static_range(NT):
        p0, p1 = _sums(p, lane, n, 2 * NB, NT)
        z0, z1 = _sums(w, lane, n, 2 * NB, NT)
        f0 = factor[2 * n]
        f1 = factor[2 * n + 1]
        new = new + (gl.fma(total[2 * n], f0, p0), gl.fma(total[2 * n + 1], f1, p1))
        for ct in gl.static_range(CT):
            x = out[n * CT + ct]
            y0 = z0 * (-MIDDLE * unit(D, BITS, ct))
            y1 = z1 * (-MIDDLE * unit(D, BITS, ct))
            y = (y0, y1, y0, y1)
            if MEAN:
                m = mean[ct]
                q0 = p0 * (FACTOR * unit(D, BITS, ct))
                q1 = p1 * (FACTOR * unit(D, BITS, ct))
                y = (gl.fma(m[0], q0, y0), gl.fma(m[0], q1, y1), gl.fma(m[2], q0, y0), gl.fma(m[2], q1, y1))
            accs = accs + (
                (gl.fma(x[0], f0, y[0]), gl.fma(x[1], f1, y[1]), gl.fma(x[2], f0, y[2]), gl.fma(x[3], f1, y[3])),
            )
    for j in gl.static_range(NB):
        words = page_words(base, lane, AT + j * code_bytes(D, BITS), D, BITS)
        for tt in gl.static_range(2):
            b = ()
            for n in gl.static_range(NT):
                b = b + (
                    _lighten(w[((2 * j + tt) * NT + n) * 2], lane, tt * STEP),
                    _lighten(w[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * STEP),
                )
            for ct in gl.static_range(CT):
                a = page_operand(words, 2 * ct + tt, D, BITS)
                for n in gl.static_range(NT):
                    acc = mma(a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1], accs[n * CT + ct], False)
                    accs = _replace(accs, n * CT + ct, acc)
    return accs, new
