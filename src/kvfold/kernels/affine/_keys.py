# mypy: ignore-errors
"""Scores in the fused kernel: queries as operands, and their products with the keys of affine groups."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._codes import _bytes, _own_zero, _signed
from kvfold.kernels.common._codes import _load_codes, _operand, code_bytes, step, weight
from kvfold.kernels.common._registers import _axpy4, _query, _replace, _two, _unit_half2, _zero4, ask_queries
from kvfold.kernels.common._warp import (
    abs_halves,
    as_float,
    as_int,
    load_shared,
    mma,
    mma_tf32,
    mul_half2,
    negative_half,
    pack_half2,
    shuffle,
    shuffle_xor,
    times,
    transpose8,
    unpack_half2,
)


@gluon.constexpr_function
def _has_weight(dim, bits, k):
    return any(weight(dim, bits, c) == k for c in range(dim // 16))


@gluon.jit
def _key_sums(q, lane, n: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """Sum of the query over channel tiles FIRST to FIRST + COUNT, in every row of an accumulator (columns: query rows)."""
    CT: gl.constexpr = D // 16
    acc = _zero4(lane)
    for i in gl.static_range(COUNT):
        # the query carries 2^-k; its ones get 2^k
        one = _unit_half2(lane, weight(D, BITS, FIRST + i))
        b0, b1 = _two(q, n * CT + FIRST + i)
        acc = mma(one, one, one, one, b0, b1, acc, False)
    return acc


@gluon.jit
def _scores_operand(
    base, lane, q, code_factor, zero_factor, extra, D: gl.constexpr, BITS: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr, CENTER: gl.constexpr, FAR: gl.constexpr = False,
):  # fmt: skip
    """Groups of tokens: the scale multiplies the query; zero-points of all blocks of the stage are rows of one MMA.

    Scaled queries round to fp16, and codes are not centred: the error times the mean code would shift all scores of a block.
    With CENTER that part is taken back (row sums of the rounded query) and added exactly (scales as rows, like zero-points);
    it halves the error, and takes some ten registers.
    """
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    row = base + t * 16
    mine = row + (g % NB) * (4 * D)
    MEAN: gl.constexpr = ((1 << BITS) - 1) / 2
    z = ()
    u = ()
    for f in gl.static_range(CT // 2):
        z = z + load_shared(mine, META + 2 * D + 64 * f, 4)
        if CENTER:
            u = u + load_shared(mine, META + 64 * f, 4)
    nothing = lane * 0
    zeros = ()
    for n in gl.static_range(NT):
        z0 = _zero4(lane)[0]
        z1 = z0
        for k in gl.static_range(8):
            if _has_weight(D, BITS, k):
                acc = _zero4(lane)
                both = _zero4(lane)
                for ct in gl.static_range(CT):
                    if weight(D, BITS, ct) == k:
                        b0, b1 = _query(q, n * CT + ct, FAR)
                        acc = mma(z[2 * ct], nothing, z[2 * ct + 1], nothing, b0, b1, acc, False)
                        if CENTER:
                            both = mma(u[2 * ct], nothing, u[2 * ct + 1], nothing, b0, b1, both, False)
                z0 = gl.fma(gl.fma(both[0], MEAN, acc[0]), float(1 << k), z0)
                z1 = gl.fma(gl.fma(both[1], MEAN, acc[1]), float(1 << k), z1)
        zeros = zeros + (z0 * zero_factor[2 * n], z1 * zero_factor[2 * n + 1])
    scores = ()
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        s = ()
        for f in gl.static_range(CT // 2):
            s = s + load_shared(row, META + j * 4 * D + 64 * f, 4)
        rounded = ()
        for _n in gl.static_range(NT):
            rounded = rounded + (_zero4(lane),)
        accs = ()
        for _i in gl.static_range(2 * NT):
            accs = accs + (_zero4(lane),)
        for ct in gl.static_range(CT):
            a = _operand(words, 2 * ct, D, BITS)
            b = _operand(words, 2 * ct + 1, D, BITS)
            for n in gl.static_range(NT):
                b0, b1 = _query(q, n * CT + ct, FAR)
                b0 = mul_half2(b0, s[2 * ct])
                b1 = mul_half2(b1, s[2 * ct + 1])
                if CENTER:
                    one = _unit_half2(lane, weight(D, BITS, ct))
                    rounded = _replace(rounded, n, mma(one, one, one, one, b0, b1, rounded[n], False))
                accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], b0, b1, accs[n], False))
                accs = _replace(accs, NT + n, mma(b[0], b[1], b[2], b[3], b0, b1, accs[NT + n], False))
        for tt in gl.static_range(2):
            for n in gl.static_range(NT):
                if NB == 1:
                    z0 = zeros[2 * n]
                    z1 = zeros[2 * n + 1]
                else:
                    z0 = shuffle(zeros[2 * n], 4 * j + t)
                    z1 = shuffle(zeros[2 * n + 1], 4 * j + t)
                acc = accs[tt * NT + n]
                f0 = code_factor[2 * n] * (1.0 / (1 << (tt * step(D, BITS))))
                f1 = code_factor[2 * n + 1] * (1.0 / (1 << (tt * step(D, BITS))))
                e0 = z0 + extra[(j * NT + n) * 2]
                e1 = z1 + extra[(j * NT + n) * 2 + 1]
                if CENTER:
                    e0 = gl.fma(rounded[n][0], zero_factor[2 * n] * -MEAN, e0)
                    e1 = gl.fma(rounded[n][1], zero_factor[2 * n + 1] * -MEAN, e1)
                scores = scores + (
                    (gl.fma(acc[0], f0, e0), gl.fma(acc[1], f1, e1), gl.fma(acc[2], f0, e0), gl.fma(acc[3], f1, e1)),
                )
    return scores


@gluon.jit
def _scores_accumulator(
    base, lane, q, qsum, code_factor, extra, D: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr,
    GROUP: gl.constexpr, NT: gl.constexpr, NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr, AUX: gl.constexpr,
    FAR: gl.constexpr = False,
):  # fmt: skip
    """Groups of channels: each group has its own accumulator, which the scale multiplies."""
    CT: gl.constexpr = D // 16
    NG: gl.constexpr = D // GROUP
    PER: gl.constexpr = GROUP // 16
    SCALES: gl.constexpr = 64 * NG  # bytes of the scales of 32 tokens
    ROW: gl.constexpr = 2 * SCALES if MODE == 0 else SCALES
    g = lane // 4
    t = lane % 4
    mine = base + g * (8 * NG)
    row = base + g * (16 * NG)
    own = t % (NG if NG < 4 else 4)
    lift = 1 << (3 - t)  # a multiplication shifts by it elsewhere than where masks are applied
    scores = ()
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        sw = load_shared(mine, META + j * ROW, 2 * NG)  # [token tile, row half, group] as pairs
        s = ()
        for i in gl.static_range(2 * NG):
            if MODE == 2:
                s = s + unpack_half2(abs_halves(sw[i]))
            else:
                s = s + unpack_half2(sw[i])
        signs = ()
        asym = ()
        cut = words
        if MODE > 0:
            cut = _bytes(words, D, BITS)
            aux = load_shared(row, AUX + j * 2 * SCALES, 4 * NG)
            for i in gl.static_range(4 * NG):
                signs = signs + (times(aux[i], lift),)
                if MODE == 2:
                    asym = asym + (negative_half(sw[i // 2], i % 2),)
                else:
                    asym = asym + (aux[i],)
        for tt in gl.static_range(2):
            sums = ()
            for _n in gl.static_range(NT):
                sums = sums + (_zero4(lane),)
            if MODE == 2:
                # columns of the product with zero-points are groups: a lane holds its own group's
                for c in gl.static_range((NG + 3) // 4):
                    z0 = _own_zero(row, mine, own, AUX + j * 2 * SCALES, META + j * ROW, 2 * tt * NG + 4 * c)
                    z1 = _own_zero(row, mine, own, AUX + j * 2 * SCALES, META + j * ROW, (2 * tt + 1) * NG + 4 * c)
                    for n in gl.static_range(NT):
                        b0 = qsum[(n * ((NG + 3) // 4) + c) * 2]
                        b1 = qsum[(n * ((NG + 3) // 4) + c) * 2 + 1]
                        if tt * step(D, BITS) > 0:
                            b0 = as_int(as_float(b0) * (1 << (tt * step(D, BITS))))
                            b1 = as_int(as_float(b1) * (1 << (tt * step(D, BITS))))
                        sums = _replace(sums, n, mma_tf32(z0, z1, z0, z1, b0, b1, sums[n]))
            for group in gl.static_range(NG):
                accs = ()
                for _n in gl.static_range(NT):
                    accs = accs + (_zero4(lane),)
                for ks in gl.static_range(PER):
                    if MODE > 0:
                        a = _signed(
                            cut, (signs[2 * tt * NG + group], signs[(2 * tt + 1) * NG + group]),
                            (asym[2 * tt * NG + group], asym[(2 * tt + 1) * NG + group]),
                            2 * (group * PER + ks) + tt, 2 * (group * PER + 1 - ks) + tt, ks, D, BITS, MODE == 2,
                        )  # fmt: skip
                    else:
                        a = _operand(words, 2 * (group * PER + ks) + tt, D, BITS)
                    for n in gl.static_range(NT):
                        b0, b1 = _query(q, n * CT + group * PER + ks, FAR)
                        accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], b0, b1, accs[n], False))
                for n in gl.static_range(NT):
                    low = s[2 * tt * NG + group]
                    high = s[(2 * tt + 1) * NG + group]
                    sums = _replace(sums, n, _axpy4(low, high, accs[n], sums[n], group == 0 and MODE != 2))
            # code sums count in units of 2^(24 - step)
            unit = 1.0 / (1 << (24 - tt * step(D, BITS)))
            if MODE == 0:
                if NG == 1:
                    zw = load_shared(mine, META + j * ROW + SCALES + 4 * tt, 1)
                    z0 = zw[0] & 0xFFFF
                    z1 = (zw[0] >> 16) & 0xFFFF
                else:
                    column = mine + (t % (NG // 2)) * 4
                    z0 = load_shared(column, META + j * ROW + SCALES + 4 * NG * tt, 1)[0]
                    z1 = load_shared(column, META + j * ROW + SCALES + 4 * NG * tt + 2 * NG, 1)[0]
                for n in gl.static_range(NT):
                    z = mma(z0, z1, z0, z1, qsum[2 * n], qsum[2 * n + 1], _zero4(lane), False)
                    x = sums[n]
                    sums = _replace(
                        sums,
                        n,
                        (
                            gl.fma(z[0], unit, x[0]),
                            gl.fma(z[1], unit, x[1]),
                            gl.fma(z[2], unit, x[2]),
                            gl.fma(z[3], unit, x[3]),
                        ),
                    )
            for n in gl.static_range(NT):
                f0 = code_factor[2 * n] * (1.0 / (1 << (tt * step(D, BITS))))
                f1 = code_factor[2 * n + 1] * (1.0 / (1 << (tt * step(D, BITS))))
                e0 = extra[(j * NT + n) * 2]
                e1 = extra[(j * NT + n) * 2 + 1]
                x = sums[n]
                scores = scores + (
                    (gl.fma(x[0], f0, e0), gl.fma(x[1], f1, e1), gl.fma(x[2], f0, e0), gl.fma(x[3], f1, e1)),
                )
    return scores


@gluon.constexpr_function
def query_exponent(bits, on_operand):
    """The largest element of a query is scaled to [2^e, 2^(e + 1)): as large as the product with any scale allows.

    Scales that multiply queries are at most 2 * 65504 / (2^bits - 1), and fp16 themselves.
    """
    largest = min(65504, 2 * 65504 / ((1 << bits) - 1))
    e = 3
    while on_operand and 2.0 ** (e + 1) * largest > 65504:
        e -= 1
    return e


@gluon.jit
def _queries(
    asked, q_ptr, lane, g, t, row0, column0, rows, factor, varlen, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """Queries as B operands: scaled per row (see :func:`query_exponent`), times 2^-k of the channel tile.

    Also what turns products into ``factor`` times the score: for codes, and for zero-points. ``asked``: of
    :func:`kvfold.kernels.common._registers.ask_queries` for the first eight rows, or nothing; ``varlen``: see :func:`query_at`.
    """
    CT: gl.constexpr = D // 16
    E: gl.constexpr = query_exponent(BITS, AXIS == 0)
    q = ()
    code_factor = ()
    zero_factor = ()
    for n in gl.static_range(NT):
        if n == 0 and len(asked) > 0:
            raw = asked
        else:
            raw = ask_queries(q_ptr, t, row0, column0 + n * 8 + g, rows, varlen, D)
        big = gl.abs(raw[0])
        for i in gl.static_range(1, 4 * CT):
            big = gl.maximum(big, gl.abs(raw[i]))
        big = gl.maximum(big, shuffle_xor(big, 1))
        big = gl.maximum(big, shuffle_xor(big, 2))
        exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 252)
        down = as_float((254 + E - exponent) << 23)  # 2^E / 2^floor(log2(big))
        up = as_float((exponent - E) << 23) * factor
        for ct in gl.static_range(CT):
            f = down * (1.0 / (1 << weight(D, BITS, ct)))
            q = q + (
                pack_half2(raw[4 * ct] * f, raw[4 * ct + 1] * f, False),
                pack_half2(raw[4 * ct + 2] * f, raw[4 * ct + 3] * f, False),
            )
        for e in gl.static_range(2):
            z = shuffle(up, 8 * t + 4 * e)
            zero_factor = zero_factor + (z,)
            code_factor = code_factor + (z * 16777216.0,)
    return q, code_factor, zero_factor


@gluon.jit
def _query_sums(
    q, lane, g, t, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """Sums of the query over groups, in two parts, as B operands; nothing where no zero-point needs them."""
    qsum = ()
    if AXIS == 1 and MODE == 2:
        NG2: gl.constexpr = D // GROUP
        for n in gl.static_range(NT):
            for c in gl.static_range((NG2 + 3) // 4):
                x = _zero4(lane)[0]
                for i in gl.static_range(4 if NG2 > 4 else NG2):
                    s = _key_sums(q, lane, n, (4 * c + i) * (GROUP // 16), GROUP // 16, D, BITS)
                    even = shuffle(s[0], g // 2)
                    odd = shuffle(s[1], g // 2)
                    x = gl.where(t == i, gl.where(g % 2 == 0, even, odd), x)
                x = x * (1.0 / (1 << 24))  # the unit of code sums
                high = as_int(x) & -8192
                qsum = qsum + (high, as_int(x - as_float(high)))
    if AXIS == 1 and MODE == 0:
        NG: gl.constexpr = D // GROUP
        for n in gl.static_range(NT):
            high = lane * 0
            low = lane * 0
            for group in gl.static_range(NG):
                s = _key_sums(q, lane, n, group * (GROUP // 16), GROUP // 16, D, BITS)
                h = pack_half2(s[0], s[1], False)
                back = unpack_half2(h)
                r = transpose8(pack_half2(s[0] - back[0], s[1] - back[1], False))
                h = transpose8(h)  # the sum of query row g, twice
                if group % 2 == 0:
                    h = h & 0xFFFF
                    r = r & 0xFFFF
                else:
                    h = h & -65536
                    r = r & -65536
                high = gl.where(t == group // 2, high | h, high)
                low = gl.where(t == group // 2, low | r, low)
            qsum = qsum + (high, low)
    return qsum
