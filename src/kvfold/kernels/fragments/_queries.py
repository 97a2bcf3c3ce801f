# mypy: ignore-errors
"""Queries as a page's codes meet them: times the page's norms, and through a dense matrix.

The matrix lies in memory as fragments of ``mma.m16n8k16``'s first operand, 512 bytes for 16 x 16 numbers, which stay in the
first cache. With four query rows or fewer, the other columns of the operand are the same queries for the next page (PAIR 2), so
that a matrix is read once for two pages. Those columns stay apart to the end: each page counts for its own.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import weight
from kvfold.kernels.common._registers import _replace, _unit_half2, _zero4
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    exp2_fast,
    load_fragment,
    load_matrix4,
    load_shared,
    load_shared_short,
    mma,
    mul_half2,
    pack_half2,
    shuffle,
    shuffle_xor,
    store_shared1,
    store_shared2,
    transpose8,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fold._sums import NORM_STEP


@gluon.jit
def norm_words(base, scratch, lane, D: gl.constexpr, AT: gl.constexpr, PAIR: gl.constexpr):
    """Leave norms of PAIR pages in a warp's scratch: fp16 [PAIR, D]. A lane has adjacent channels, and all
    its codes are loaded before the first is needed."""
    EACH: gl.constexpr = (D + 64) // 128  # words of a lane's codes
    codes = ()
    for page in gl.static_range(PAIR):
        if D == 64:
            codes = codes + (load_shared_short(base + lane * 2, AT + page * D),)
        else:
            codes = codes + load_shared(base + lane * (D // 32), AT + page * D, D // 128)
    for page in gl.static_range(PAIR):
        words = ()
        for i in gl.static_range(D // 64):
            code = codes[page * EACH + i // 2] >> (i % 2 * 16)
            low = exp2_fast((code & 255).to(gl.float32) * NORM_STEP)
            high = exp2_fast((code >> 8 & 255).to(gl.float32) * NORM_STEP)
            words = words + (pack_half2(low, high, False),)
        at = scratch + lane * (D // 16)
        if D == 64:
            store_shared1(at + 2 * D * page, words[0])
        else:
            for i in gl.static_range(D // 128):
                store_shared2(at + (2 * D * page + 8 * i), words[2 * i], words[2 * i + 1])
    warp_sync(lane)


@gluon.jit
def column_row(column0, g, PAIR: gl.constexpr, BY_ROW: gl.constexpr):
    """Query row of a lane's column: PAIR columns of a row are ``8 / PAIR`` apart, or (BY_ROW) side by side."""
    if BY_ROW:
        return column0 + g // PAIR
    else:
        return column0 + g % (8 // PAIR)


@gluon.jit
def _raw_queries(raw, far, t, factor, D: gl.constexpr, E: gl.constexpr, LIGHT: gl.constexpr, BITS: gl.constexpr):
    """Leave the queries of eight columns, ``raw`` of :func:`kvfold.kernels.common._registers.ask_queries`, in shared memory,
    as B operands, the largest element of each scaled to [2^E, 2^(E + 1)); LIGHT: behind them again, times 2^-k of their
    channel's codes. What turns products into ``factor`` times the score, for a lane's two columns."""
    big = (t * 0).to(gl.float32)
    for i in gl.static_range(D // 8):
        big = gl.maximum(big, gl.maximum(gl.abs(raw[2 * i]), gl.abs(raw[2 * i + 1])))
    big = gl.maximum(big, shuffle_xor(big, 1))
    big = gl.maximum(big, shuffle_xor(big, 2))
    exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
    down = as_float((254 + E - exponent) << 23)
    for c in gl.static_range(D // 16):
        store_shared2(
            far + 256 * c,
            pack_half2(raw[4 * c] * down, raw[4 * c + 1] * down, False),
            pack_half2(raw[4 * c + 2] * down, raw[4 * c + 3] * down, False),
        )  # all warps have the same
        if LIGHT:
            less = down * (1.0 / (1 << weight(D, BITS, c)))
            store_shared2(
                far + (16 * D + 256 * c),
                pack_half2(raw[4 * c] * less, raw[4 * c + 1] * less, False),
                pack_half2(raw[4 * c + 2] * less, raw[4 * c + 3] * less, False),
            )
    up = as_float((exponent - E) << 23) * factor
    return shuffle(up, 8 * t), shuffle(up, 8 * t + 4)


@gluon.jit
def plain_queries(far, D: gl.constexpr):
    """Queries (a lane's address in shared memory): operand pairs of channel tiles."""
    out = ()
    for c in gl.static_range(D // 16):
        out = out + load_shared(far, 256 * c, 2)
    return out


@gluon.jit
def normed_queries(far, scratch, lane, D: gl.constexpr, PAIR: gl.constexpr, BY_ROW: gl.constexpr = False):
    """Queries (a lane's address in shared memory) times what :func:`norm_words` left: operand pairs of channel tiles.

    Columns of the second of PAIR pages are the last four, or (BY_ROW) every second one.
    """
    address = scratch + lane // 8 * 16
    if PAIR == 2:
        if BY_ROW:
            address = address + lane % 2 * (2 * D)
        else:
            address = address + lane % 8 // 4 * (2 * D)
    out = ()
    for i in gl.static_range(D // 32):
        norm = load_matrix4(address, 64 * i, False)
        for c in gl.static_range(2):
            b = load_shared(far, 256 * (2 * i + c), 2)
            out = out + (mul_half2(b[0], norm[2 * c]), mul_half2(b[1], norm[2 * c + 1]))
    return out


@gluon.jit
def page_sums(
    base, far, scratch, lane, g, D: gl.constexpr, GROUP: gl.constexpr, MEAN: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Of raw queries (a lane's address) with a page: products with its mean, for a lane's two columns; and sums, times norms,
    over groups of channels, in lanes of row g of group g.

    Both in one product: norms are its upper rows, each where its group is, and the mean its lower ones.
    """
    at = base + lane // 8 * 16
    norms = scratch + lane // 8 * 16
    accs = (_zero4(lane), _zero4(lane), _zero4(lane), _zero4(lane))
    for i in gl.static_range(D // 32):
        norm = load_matrix4(norms, 64 * i, False)
        mean = norm
        if MEAN:
            mean = load_matrix4(at, AT + 64 * i, False)
        for c in gl.static_range(2):
            b = load_shared(far, 256 * (2 * i + c), 2)
            own = g == (2 * i + c) // (GROUP // 16)
            low = gl.where(own, norm[2 * c], 0)
            high = gl.where(own, norm[2 * c + 1], 0)
            acc = mma(low, mean[2 * c], high, mean[2 * c + 1], b[0], b[1], accs[i % 2 * 2 + c], False)
            accs = _replace(accs, i % 2 * 2 + c, acc)
    sums = ()
    for i in gl.static_range(4):
        sums = sums + ((accs[0][i] + accs[1][i]) + (accs[2][i] + accs[3][i]),)
    return (sums[0], sums[1]), (sums[2], sums[3])


@gluon.jit
def _sums_by_row(x, lane, g, D: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr):
    """Sums of queries, which carry 2^-k, over groups of channels, for a lane's two columns: in lanes of row g of group g."""
    s0 = _zero4(lane)[0]
    s1 = s0
    for group in gl.static_range(D // GROUP):
        acc = _zero4(lane)
        for i in gl.static_range(GROUP // 16):
            one = _unit_half2(lane, weight(D, BITS, group * (GROUP // 16) + i))
            b0 = x[2 * (group * (GROUP // 16) + i)]
            b1 = x[2 * (group * (GROUP // 16) + i) + 1]
            acc = mma(one, one, one, one, b0, b1, acc, False)
        s0 = gl.where(g == group, acc[0], s0)
        s1 = gl.where(g == group, acc[1], s1)
    return s0, s1


@gluon.jit
def group_sums(
    x, lane, g, t, D: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """As :func:`kvfold.kernels.affine._keys._query_sums`, in a chain short enough for every page: sums over groups, in two
    parts, as the operand that meets zero-points."""
    if MODE == 1:
        return ()
    else:
        return sum_operands(_sums_by_row(x, lane, g, D, BITS, GROUP), g, t, D, MODE, GROUP)


@gluon.jit
def sum_operands(sums, g, t, D: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr):
    """Sums over groups, in lanes of row g of group g, in two parts as the operand that meets zero-points."""
    s0 = sums[0]
    s1 = sums[1]
    qsum = ()
    if MODE == 0:
        high = pack_half2(s0, s1, False)
        back = unpack_half2(high)
        qsum = (transpose8(high), transpose8(pack_half2(s0 - back[0], s1 - back[1], False)))
    if MODE == 2:
        for c in gl.static_range((D // GROUP + 3) // 4):
            # lane (g, t) takes group 4 c + t of query row g
            even = shuffle(s0, 4 * (4 * c + t) + g // 2)
            odd = shuffle(s1, 4 * (4 * c + t) + g // 2)
            y = gl.where(g % 2 == 0, even, odd) * (1.0 / (1 << 24))  # the unit of code sums
            high = as_int(y) & -8192
            qsum = qsum + (high, as_int(y - as_float(high)))
    return qsum


@gluon.jit
def through(table, lane, x, ROWS: gl.constexpr, CT: gl.constexpr):
    """The matrix times operand pairs x of CT channel tiles: accumulators of ROWS / 16 tiles. ``table`` is a lane's address."""
    out = ()
    for r in gl.static_range(ROWS // 64):
        accs = (_zero4(lane), _zero4(lane), _zero4(lane), _zero4(lane))
        for c in gl.static_range(CT):
            for i in gl.static_range(4):
                a = load_fragment(table, 512 * ((4 * r + i) * CT + c))
                accs = _replace(accs, i, mma(a[0], a[1], a[2], a[3], x[2 * c], x[2 * c + 1], accs[i], False))
        out = out + accs
    return out


@gluon.jit
def projected(table, lane, x, WIDTH: gl.constexpr, CT: gl.constexpr):
    """The same as operand pairs of WIDTH / 16 tiles."""
    accs = through(table, lane, x, WIDTH, CT)
    out = ()
    for c in gl.static_range(WIDTH // 16):
        y = accs[c]
        out = out + (transpose8(pack_half2(y[0], y[1], False)), transpose8(pack_half2(y[2], y[3], False)))
    return out


@gluon.jit
def middle_sums(x, lane, WIDTH: gl.constexpr, BITS: gl.constexpr):
    """-o times the sums of queries that carry 2^-k of their tile, in units of code sums, for a lane's two columns."""
    MIDDLE: gl.constexpr = -((1 << BITS) - 1) / 2 / (1 << 24)
    sums = (_zero4(lane), _zero4(lane))
    for c in gl.static_range(WIDTH // 16):
        one = _unit_half2(lane, weight(WIDTH, BITS, c))
        sums = _replace(sums, c % 2, mma(one, one, one, one, x[2 * c], x[2 * c + 1], sums[c % 2], False))
    return (sums[0][0] + sums[1][0]) * MIDDLE, (sums[0][1] + sums[1][1]) * MIDDLE
