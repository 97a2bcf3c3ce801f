# mypy: ignore-errors
"""Scores and sums of values of one page of codes into a fixed table by products of bytes, for sets of four query rows.

As :mod:`kvfold.kernels.fold._bytes`, with rows of a table for codes: numbers of the table are whole steps, bytes with a sign.
In shared memory a row is repeated until it fills 128 bytes, and each lane reads its own copy, so that lanes never meet in a
bank.

* Keys. A row of four channels is an operand register as it lies. A transposing load of codes gives lane (g, t) those of token
  g and of tiles t and t + 4, four groups each; product c takes groups c. So the query is turned in another order: of the bits
  6 to 0 of a channel the Hadamard matrix takes 5, 4, 1 and 0 (columns in this order; rows so that lanes are tiles and a lane's
  pair of rows are neighbours), sums and differences of registers take 3 and 2, and those of columns take 6.
* Values. A lane reads rows of four tokens, and eight permutations make of four words four operand registers, each of one
  channel. Lane (g, t) ends with channels 16 g to 16 g + 15 of row t.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.formats import gaussian
from kvfold.kernels.common._codes import scale_at
from kvfold.kernels.common._hadamard import _entry
from kvfold.kernels.common._tables import _weighted_bytes
from kvfold.kernels.common._warp import (
    as_float,
    either_bytes,
    load_matrix4,
    load_shared,
    reciprocal,
    store_shared4,
)
from kvfold.kernels.fold._bytes import (
    FULL,
    MAGIC,
    MAGIC_BITS,
    both_halves,
    byte_query_tile,
    largest,
    mean_products,
    products,
    scaled_scores,
    zeros,
)
from kvfold.kernels.fold._codebook import codes_of, own_row, row_weights
from kvfold.kernels.fold._codes import hidden_block

STEP = gl.constexpr(gaussian.STEP)
LOW_PAIRS = gl.constexpr("0x5140")  # bytes 0 of two words, then bytes 1
HIGH_PAIRS = gl.constexpr("0x7362")
FIRST_HALVES = gl.constexpr("0x5410")
LAST_HALVES = gl.constexpr("0x7632")
WHOLE = gl.constexpr(8)
"""Bits of codes that count once, whatever their tile."""


@gluon.jit
def pair_matrix(g, t, MIX: gl.constexpr):
    """The Hadamard matrix of channels' bits 5, 4, 1 and 0 as the first operand: bit 0 is a row's highest, then 5, 4, 1."""
    MIXED: gl.constexpr = min(16, MIX // 4)  # two of its bits are others
    out = ()
    for r in gl.static_range(4):
        i = 2 * g + r % 2
        j = 2 * t + 8 * (r // 2)
        out = out + (_entry(i, j, MIXED, False) | (_entry(i, j + 1, MIXED, False) << 16),)
    return out


@gluon.jit
def lookup_row_means(q, base, lane, D: gl.constexpr, AT: gl.constexpr, FOURS: gl.constexpr):
    """As :func:`kvfold.kernels.fold._bytes.row_means`, with channels in this order."""
    t = lane % 4
    at = base + (t // 2 * 32 + t % 2 * 4)
    accs = zeros(lane, FOURS)
    for c in gl.static_range(D // 32):
        m = ()
        for r in gl.static_range(4):
            m = m + load_shared(at, AT + 8 * c + r % 2 * D + r // 2 * 64, 1)
        accs = mean_products(m, q, accs, c, D // 32, FOURS)
    return both_halves(accs, FOURS)


@gluon.jit
def lookup_byte_queries(x, lane, D: gl.constexpr):
    """Queries turned by :func:`pair_matrix` as operands of bytes, and their unit, which counts the table's steps."""
    HALF: gl.constexpr = D // 32
    big = largest(x, HALF)
    s = reciprocal(big) * FULL
    q = ()
    for j in gl.static_range(HALF):
        y = x[j]
        q = q + byte_query_tile(y[0], y[2], y[1], y[3], s, D, WHOLE, j)
    return q, big * (256.0 / FULL * STEP)


@gluon.jit
def lookup_byte_scores(
    base, lane, q, left, skip, table, D: gl.constexpr, BITS: gl.constexpr, NB: gl.constexpr, FOURS: gl.constexpr
):  # fmt: skip
    """Scores of row t without its unit: two of each of the 2 NB tiles of 16 tokens, each of all sets."""
    HALF: gl.constexpr = D // 32
    weights = row_weights(lane, 2)
    row = own_row(table, lane, 1)
    codes = base + (lane % 16 * (D // 4) + (lane // 16 ^ lane // 4 % 2) * (D // 8))
    begin = lane * 0 + MAGIC_BITS
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:  # of tokens g and g + 8 of four tiles, as pairs
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, scale_at(D, BITS, NB) + 64 * j, True)
        hidden = hidden_block(left, skip, j)
        for tt in gl.static_range(2):
            own = load_matrix4(codes, (32 * j + 16 * tt) * (D // 4), False)
            accs = ()
            for _n in gl.static_range(FOURS):
                accs = accs + ((begin, begin, begin, begin),)
            for c in gl.static_range(HALF):
                a = ()
                for r in gl.static_range(4):
                    a = a + load_shared(_weighted_bytes(own[r], weights[c], row), 0, 1)
                accs = products(a, q, accs, 0, c, HALF, FOURS, True, True)
            scores = scores + scaled_scores(accs, scale[2 * (j % 2) + tt], hidden, 1, FOURS)
    return scores


@gluon.jit
def four_channels(a, b, c, d):
    """Of words of four tokens, whose bytes are channels, words of four channels, whose bytes are tokens."""
    low = either_bytes(a, b, LOW_PAIRS)
    more = either_bytes(c, d, LOW_PAIRS)
    high = either_bytes(a, b, HIGH_PAIRS)
    last = either_bytes(c, d, HIGH_PAIRS)
    return (
        either_bytes(low, more, FIRST_HALVES), either_bytes(low, more, LAST_HALVES),
        either_bytes(high, last, FIRST_HALVES), either_bytes(high, last, LAST_HALVES),
    )  # fmt: skip


@gluon.jit
def _four_rows(even, odd, AT: gl.constexpr, FURTHER: gl.constexpr, WORDS: gl.constexpr):
    """Codes of a lane's channels of tokens 2t, 2t + 8, 2t + 1 and 2t + 9, as bytes of probabilities have them."""
    return (
        codes_of(even, AT, 2 * WORDS), codes_of(even, AT + FURTHER, 2 * WORDS), codes_of(odd, AT, 2 * WORDS),
        codes_of(odd, AT + FURTHER, 2 * WORDS),
    )  # fmt: skip


@gluon.jit
def lookup_byte_values(
    base, lane, p, before, now, total, mean, out, table, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr,
    MIX: gl.constexpr, NB: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Sums of values of each set's row t, channels 16 g to 16 g + 15, in the rotated basis, in units of 256 steps, a page
    further. ``p``, ``before``, ``now``, ``total``: as :func:`kvfold.kernels.fold._bytes.byte_values` takes them; ``mean``: the
    page's, of the same channels, without the rotation's factor."""
    FOURS: gl.constexpr = len(now)
    WORDS: gl.constexpr = 2 // BITS  # of a row
    BYTES: gl.constexpr = 16 * BITS  # of a token's codes
    g = lane // 4
    t = lane % 4
    begin = lane * 0 + MAGIC_BITS  # sums have a sign
    accs = ()
    for _c in gl.static_range(8 * FOURS):
        accs = accs + ((begin, begin, begin, begin),)
    even = base + ((2 * t ^ (t // 2)) * BYTES + g * (2 * BITS))
    odd = base + ((2 * t ^ (t // 2) ^ 1) * BYTES + g * (2 * BITS))
    weights = row_weights(lane, 2 * WORDS)
    row = own_row(table, lane, WORDS)
    for j in gl.static_range(NB):
        near = _four_rows(even, odd, AT + 32 * j * BYTES, 8 * BYTES, WORDS)
        far = _four_rows(even, odd, AT + (32 * j + 16) * BYTES, 8 * BYTES, WORDS)
        for i in gl.static_range(4 // WORDS):
            x = ()
            y = ()
            for e in gl.static_range(4):
                x = x + (load_shared(_weighted_bytes(near[e], weights[i], row), 0, WORDS),)
                y = y + (load_shared(_weighted_bytes(far[e], weights[i], row), 0, WORDS),)
            for w in gl.static_range(WORDS):
                a = four_channels(x[0][w], x[1][w], x[2][w], x[3][w])
                b = four_channels(y[0][w], y[1][w], y[2][w], y[3][w])
                for e in gl.static_range(2):
                    four = (a[2 * e], a[2 * e + 1], b[2 * e], b[2 * e + 1])
                    accs = products(four, p, accs, (2 * (WORDS * i + w) + e) * FOURS, j, NB, FOURS, False, True)
    sums = ()
    for n in gl.static_range(FOURS):
        share = total[n] * now[n] * (MIX**-0.5 / (256 * STEP))
        for c in gl.static_range(8):
            acc = accs[c * FOURS + n]
            for h in gl.static_range(2):
                x = as_float(acc[2 * h]) - (MAGIC * (1 + 1 / 256))
                x = gl.fma(as_float(acc[2 * h + 1]), 1 / 256, x) * now[n]
                if MEAN:
                    x = gl.fma(mean[2 * c + h], share, x)
                sums = sums + (gl.fma(out[16 * n + 2 * c + h], before[n], x),)
    return sums


@gluon.jit
def leave_channels(to, g, out, FIRST: gl.constexpr):
    """Store a lane's 16 sums of a row, :func:`lookup_byte_values`, from number FIRST on, where channels begin at ``to``."""
    f = 256.0 * STEP
    for i in gl.static_range(4):
        store_shared4(
            to + (g * 64 + 16 * i), out[FIRST + 4 * i] * f, out[FIRST + 4 * i + 1] * f, out[FIRST + 4 * i + 2] * f,
            out[FIRST + 4 * i + 3] * f,
        )  # fmt: skip
