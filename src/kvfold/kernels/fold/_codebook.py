# mypy: ignore-errors
"""Scores and sums of values of one page of codes into a fixed table (fold's codebook), as the loops over pages take them.

The table is one for all groups, heads and layers: 256 rows of 4 or 8 channels. In shared memory a row is repeated until it
fills 128 bytes, and each lane reads its own copy, so that lanes never meet in a bank.

* Keys. A row of a token's group is part of an operand: lane (g, t) reads those of groups 4 c + t, which are channels 4 t to
  4 t + 3 of tile c. The query is turned by a Hadamard matrix whose rows are in that order.
* Values. A lane reads rows of tokens 2t and 2t + 1, and one word of each makes an operand. Lane (g, t) has channels 16 g to
  16 g + 15, at head size 256 of either half, at 64 channels 8 g to 8 g + 7; :func:`in_tiles` gives sums the places that they
  have elsewhere, once, at the end.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import scale_at
from kvfold.kernels.common._hadamard import _entry
from kvfold.kernels.common._registers import _replace, _zero4
from kvfold.kernels.common._tables import _dynamic_base, _weighted_bytes, held_table, leave_table, reserved
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    high_halves,
    load_matrix4,
    load_shared,
    load_shared_short,
    low_halves,
    mma,
    mul_half2,
    program_sync,
    store_shared1,
    store_shared4,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fold._bytes import mean_signs, mix_lanes
from kvfold.kernels.fold._codes import hidden_block
from kvfold.kernels.fold._sums import _sums

ROWS = gl.constexpr(32768)
"""Bytes of a table's repeated rows."""


@gluon.constexpr_function
def tables_bytes(k_words, v_words):
    """Bytes of the tables of both sides, whose rows have so many words (0: no table); one where they are the same."""
    return ROWS.value * len({k_words, v_words} - {0})


@gluon.jit
def with_tables(like, thread, BYTES: gl.constexpr, K_WORDS: gl.constexpr, V_WORDS: gl.constexpr):
    """A program's shared memory, and where BYTES of it begin, in ``like``'s shape; tables are what is before."""
    TABLES: gl.constexpr = tables_bytes(K_WORDS, V_WORDS)
    memory = reserved(thread, (TABLES + BYTES + 1023) // 1024 * 1024)
    base = _dynamic_base(like)
    program_sync(thread)
    return memory, base + TABLES


@gluon.jit
def held_rows(thread, k_rows, v_rows, K_WORDS: gl.constexpr, V_WORDS: gl.constexpr):
    """A thread's share of the rows of both tables, in registers."""
    held = ()
    if K_WORDS:
        held = held + held_table(k_rows.to(gl.int64), thread, K_WORDS)
    if V_WORDS and V_WORDS != K_WORDS:
        held = held + held_table(v_rows.to(gl.int64), thread, V_WORDS)
    return held


@gluon.jit
def leave_rows(base, thread, held, K_WORDS: gl.constexpr, V_WORDS: gl.constexpr):
    """Repeat :func:`held_rows` in shared memory, from ``base`` on."""
    if K_WORDS:
        leave_table(base, thread, held, 0, K_WORDS)
    if V_WORDS and V_WORDS != K_WORDS:
        leave_table(
            base + (tables_bytes(K_WORDS, V_WORDS) - ROWS), thread, held, K_WORDS * (8 // gl.num_warps()), V_WORDS
        )


@gluon.jit
def own_row(table, lane, WORDS: gl.constexpr):
    """Address of the lane's copy of row 0."""
    return table + lane % (32 // WORDS) * (4 * WORDS)


@gluon.jit
def lookup_matrix(g, t, MIX: gl.constexpr):
    """The 16 x 16 Hadamard matrix as the first operand, with channels 4t, 4t + 1 as rows 2t, 2t + 1, and the next two as rows
    8 + 2t, 9 + 2t."""
    out = ()
    for r in gl.static_range(4):
        i = g // 2 * 4 + g % 2 + r % 2 * 2
        j = 2 * t + 8 * (r // 2)
        out = out + (_entry(i, j, MIX, False) | (_entry(i, j + 1, MIX, False) << 16),)
    return out


@gluon.jit
def lookup_scores(
    base, lane, q, bias, code_factor, left, skip, table, D: gl.constexpr, BITS: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens: 2 NB x NT accumulators. Those of the first ``skip`` blocks, if it is not None, are hidden."""
    CT: gl.constexpr = D // 16
    weight = (lane * 0 + 128) << lane % 4 * 8
    row = own_row(table, lane, 2)
    codes = base + lane // 4 * (D // 4)
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:  # of tokens g and g + 8 of four tiles, as pairs
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, scale_at(D, BITS, NB) + 64 * j, True)
        hidden = hidden_block(left, skip, j)
        for tt in gl.static_range(2):
            near = load_shared(codes, (32 * j + 16 * tt) * (D // 4), D // 16)
            far = load_shared(codes, (32 * j + 16 * tt + 8) * (D // 4), D // 16)
            accs = ()
            for _n in gl.static_range(NT):
                accs = accs + (_zero4(lane),)
            for ct in gl.static_range(CT):
                x = load_shared(_weighted_bytes(near[ct], weight, row), 0, 2)
                y = load_shared(_weighted_bytes(far[ct], weight, row), 0, 2)
                for n in gl.static_range(NT):
                    acc = mma(x[0], y[0], x[1], y[1], q[(n * CT + ct) * 2], q[(n * CT + ct) * 2 + 1], accs[n], False)
                    accs = _replace(accs, n, acc)
            low, high = unpack_half2(scale[2 * (j % 2) + tt])
            for n in gl.static_range(NT):
                f0 = low * code_factor[n]
                f1 = high * code_factor[n]
                e0 = bias[2 * n] + hidden
                e1 = bias[2 * n + 1] + hidden
                a = accs[n]
                scores = scores + (
                    (gl.fma(a[0], f0, e0), gl.fma(a[1], f0, e1), gl.fma(a[2], f1, e0), gl.fma(a[3], f1, e1)),
                )
    return scores


# ---- values ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _half(dim):
    """Channels that a warp's lanes have side by side."""
    return min(dim, 128)


@gluon.constexpr_function
def _swaps(dim, bits):
    """Whether tokens change places where they are fetched: eight of them fill all banks at least once."""
    return dim * bits >= 128


@gluon.jit
def row_weights(lane, WORDS: gl.constexpr, D: gl.constexpr = 128):
    """What picks each code of a lane's channels and multiplies it by a row's bytes."""
    out = ()
    if D == 64 and WORDS == 4:  # 16 bits are codes of two lanes
        out = out + ((lane * 0 + 128) << lane // 4 % 2 * 8,)
    else:
        for i in gl.static_range(_half(D) // 16 // WORDS):
            out = out + ((lane * 0 + 128) << 8 * i,)
    return out


@gluon.jit
def sum_rows(words, weights, row, b, out, FIRST: gl.constexpr, WORDS: gl.constexpr, NEXT: gl.constexpr = 0):
    """``out`` and the products of rows of 16 tokens with ``b``: an operand's two registers of each eight query rows, whose
    accumulators are those from FIRST, FIRST + NEXT and so on. ``words``: codes of a lane's channels, of tokens 2t and 2t + 1,
    and of those eight further on."""
    for i in gl.static_range(len(weights)):
        x = ()
        for e in gl.static_range(4):
            x = x + (load_shared(_weighted_bytes(words[e], weights[i], row), 0, WORDS),)
        for j in gl.static_range(WORDS):
            a0 = low_halves(x[0][j], x[1][j])
            a1 = high_halves(x[0][j], x[1][j])
            a2 = low_halves(x[2][j], x[3][j])
            a3 = high_halves(x[2][j], x[3][j])
            for n in gl.static_range(len(b) // 2):
                acc = mma(a0, a1, a2, a3, b[2 * n], b[2 * n + 1], out[FIRST + NEXT * n + WORDS * i + j], False)
                out = _replace(out, FIRST + NEXT * n + WORDS * i + j, acc)
    return out


@gluon.jit
def codes_of(address, AT: gl.constexpr, WORDS: gl.constexpr):
    """The codes of a lane's 16 channels of a token."""
    if WORDS == 2:
        return load_shared(address, AT, 1)[0]
    else:
        return load_shared_short(address, AT)


@gluon.jit
def row_signs(signs, g, t, D: gl.constexpr):
    """:func:`kvfold.kernels.fold._bytes.mean_signs` for :func:`turned_mean`; of channels 128 and further in bits 13 and 29, and
    12 and 28."""
    if D == 64:
        return mean_signs(signs, g % 4, t)
    elif D == 256:
        return mean_signs(signs, g, t) | ((mean_signs(signs + 128, g, t) >> 2) & 0x30003000)
    else:
        return mean_signs(signs, g, t)


@gluon.jit
def turned_mean(
    base, scratch, lane, signs, matrix, AT: gl.constexpr, SCRATCH: gl.constexpr, MIX: gl.constexpr, D: gl.constexpr = 128
):  # fmt: skip
    """The mean of a page's values in the rotated basis (without the factor), of a lane's channels; ``signs`` are those of
    :func:`row_signs`."""
    TILES: gl.constexpr = _half(D) // 16
    g = lane // 4
    t = lane % 4
    m = load_shared(matrix, 0, 4)
    at = base + (g % TILES * 32 + t * 4)
    x = ()
    for h in gl.static_range((D + 127) // 128):
        b0 = load_shared(at, AT + 256 * h, 1)[0] ^ ((signs << 2 * h) & (-2147450880))
        b1 = load_shared(at, AT + (256 * h + 16), 1)[0] ^ ((signs << 2 * h + 1) & (-2147450880))
        x = x + (mix_lanes(mma(m[0], m[1], m[2], m[3], b0, b1, _zero4(lane), False), t, MIX),)
    if MIX == 256:
        a = x[0]
        b = x[1]
        x = (
            (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]), (a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]),
        )  # fmt: skip
    to = scratch + (SCRATCH + t % (TILES // 2) * 128 + g * 4)
    for h in gl.static_range((D + 127) // 128):
        for e in gl.static_range(4):
            store_shared1(to + (512 * h + e % 2 * 64 + e // 2 * 32), as_int(x[h][e]))
    warp_sync(lane)
    out = ()
    for h in gl.static_range((D + 127) // 128):
        for i in gl.static_range(TILES // 2):
            y = load_shared(scratch + g * (TILES * 8), SCRATCH + 512 * h + 16 * i, 4)
            out = out + (as_float(y[0]), as_float(y[1]), as_float(y[2]), as_float(y[3]))
    return out


@gluon.jit
def with_mean(out, factor, mean, share, FIRST: gl.constexpr):
    """Accumulators of two query rows, as many as the mean has pairs, times their factors, and a page's mean times ``share``."""
    new = ()
    for c in gl.static_range(len(mean) // 2):
        x = out[FIRST + c]
        a = mean[2 * c]
        b = mean[2 * c + 1]
        new = new + (
            (
                gl.fma(x[0], factor[0], a * share[0]),
                gl.fma(x[1], factor[1], a * share[1]),
                gl.fma(x[2], factor[0], b * share[0]),
                gl.fma(x[3], factor[1], b * share[1]),
            ),
        )
    return new


@gluon.jit
def _row_places(base, g, t, D: gl.constexpr, BITS: gl.constexpr, ODD: gl.constexpr):
    """Where codes of a lane's channels begin, of token 2t (ODD: 2t + 1) of eight, one for each half of 128 channels: as
    :func:`kvfold.kernels.fold._codes.fetch_page` leaves them with SWAP 1."""
    token = 2 * t + ODD
    if _swaps(D, BITS):
        token = token ^ (t // 2)
    at = base + token * (D * BITS // 8)
    if D == 64:
        return (at + (g * BITS & -2),)
    elif D == 128:
        return (at + g * (2 * BITS),)
    elif BITS == 2:
        return (at + (g * 4 + t % 2 * 32), at + (g * 4 + (1 - t % 2) * 32))
    else:
        return (at + g * 2, at + (g * 2 + 16))


@gluon.jit
def lookup_values(
    base, scratch, lane, p, total, factor, out, signs, matrix, table, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr,
    MIX: gl.constexpr, NT: gl.constexpr, NB: gl.constexpr, AT: gl.constexpr, MEAN_AT: gl.constexpr,
):  # fmt: skip
    """Sums of values, in the rotated basis, and of probabilities, a page further."""
    CT: gl.constexpr = D // 16
    WORDS: gl.constexpr = 4 // BITS
    BYTES: gl.constexpr = D * BITS // 8  # of a token
    SHORT: gl.constexpr = 4 if D == 64 else WORDS
    g = lane // 4
    t = lane % 4
    scale = ()
    for j in gl.static_range(NB):  # of tokens 2t and 2t + 1 of eight, as pairs
        scale = scale + load_matrix4(base + lane // 8 * 16, AT + scale_at(D, BITS, NB) + 64 * j, False)
    mean = ()
    if MEAN:
        mean = turned_mean(base, scratch, lane, signs, matrix, MEAN_AT, 0, MIX, D)
    else:
        for _c in gl.static_range(2 * CT):
            mean = mean + (_zero4(lane)[0],)
    new = ()
    sums = ()
    for n in gl.static_range(NT):
        p0, p1 = _sums(p, lane, n, 2 * NB, NT)
        f = (factor[2 * n], factor[2 * n + 1])
        new = new + (gl.fma(total[2 * n], f[0], p0), gl.fma(total[2 * n + 1], f[1], p1))
        sums = sums + with_mean(out, f, mean, (p0 * MIX**-0.5, p1 * MIX**-0.5), CT * n)
    out = sums
    even = _row_places(base, g, t, D, BITS, 0)
    odd = _row_places(base, g, t, D, BITS, 1)
    weights = row_weights(lane, WORDS, D)
    row = own_row(table, lane, WORDS)
    for i in gl.static_range(2 * NB):
        b = ()
        for n in gl.static_range(NT):
            b = b + (
                mul_half2(p[(i * NT + n) * 2], scale[2 * i]), mul_half2(p[(i * NT + n) * 2 + 1], scale[2 * i + 1]),
            )  # fmt: skip
        for h in gl.static_range(len(even)):
            words = (
                codes_of(even[h], AT + 16 * i * BYTES, SHORT), codes_of(odd[h], AT + 16 * i * BYTES, SHORT),
                codes_of(even[h], AT + (16 * i + 8) * BYTES, SHORT), codes_of(odd[h], AT + (16 * i + 8) * BYTES, SHORT),
            )  # fmt: skip
            out = sum_rows(words, weights, row, b, out, 8 * h, WORDS, CT)
    return out, new


@gluon.jit
def in_tiles(out, base, lane, D: gl.constexpr, NT: gl.constexpr):
    """Accumulators of eight query rows and D channels, so that lane (g, t) has channels g and g + 8 of each tile; by way of
    ``32 D + 256`` bytes of shared memory of the warp."""
    CT: gl.constexpr = D // 16
    ROW: gl.constexpr = 4 * D + 32  # so that lanes use all banks
    g = lane // 4
    t = lane % 4
    tiles = ()
    for n in gl.static_range(NT):
        warp_sync(lane)
        for e in gl.static_range(2):
            to = base + (2 * t + e) * ROW + g * (_half(D) // 2)
            for i in gl.static_range(CT // 2):
                a = out[CT * n + 2 * i]
                b = out[CT * n + 2 * i + 1]
                store_shared4(to + (i // 4 * 512 + i % 4 * 16), a[e], a[2 + e], b[e], b[2 + e])
        warp_sync(lane)
        at = base + 2 * t * ROW + g * 4
        for c in gl.static_range(CT):
            x = ()
            for e in gl.static_range(4):
                x = x + (as_float(load_shared(at, 64 * c + e % 2 * ROW + e // 2 * 32, 1)[0]),)
            tiles = tiles + (x,)
    return tiles
