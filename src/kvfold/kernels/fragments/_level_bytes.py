# mypy: ignore-errors
"""Scores and sums of values of one page by products of bytes, where a code of three bits stands for a level that is a whole
number, for up to four query rows of a KV head.

A permutation of bytes looks four codes up at once: its selector is four nibbles, and the eight levels are eight bytes with a
sign. So its result is an operand register of ``mma.m16n8k32``. Queries and probabilities are numbers of 16 bits in two columns,
and sums begin at an integer that fp32 reads as ``MAGIC``, as in :mod:`kvfold.kernels.fold._bytes`.

* Keys. The four nibbles of half a word are one token's codes at 2t (or 2t + 1) of four channel tiles. Operands of queries have
  their channels in the same order.
* Values. Nibbles of two words, of tokens 2t and 2t + 8, are put side by side: two bytes of the result are then one channel's
  codes of four tokens.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import code_bytes, scale_at
from kvfold.kernels.common._registers import _two
from kvfold.kernels.common._warp import (
    either_bytes,
    load_matrix4,
    look_up,
    mma_bytes,
    reciprocal,
    select,
    shuffle_xor,
    transpose8,
    unpack_half2,
)
from kvfold.kernels.fold._bytes import FULL, MAGIC, MAGIC_BITS, _byte_pairs, _whole
from kvfold.kernels.fragments._codes import level_words
from kvfold.kernels.fragments._queries import norm_words, normed_queries, through

LOW = gl.constexpr(0x0F0F0F0F)
FIRST = gl.constexpr("0x5410")  # the first halves of two words
SECOND = gl.constexpr("0x7632")
EVEN = gl.constexpr("0x4420")  # bytes 0 and 2 of a word, and nothing
ODD = gl.constexpr("0x4431")


@gluon.jit
def level_query_pages(base, scratch, far, table, lane, D: gl.constexpr, NORMS: gl.constexpr):
    """Queries through a matrix as operands of bytes, for two pages: of each the operands and the unit."""
    CT: gl.constexpr = D // 16
    norm_words(base, scratch, lane, D, True, NORMS, 2)
    accs = through(table, lane, normed_queries(far, scratch, lane, D, 2, True), D, CT)
    pages = ()
    for e in gl.static_range(2):
        big = gl.abs(accs[0][e])
        for ct in gl.static_range(CT):
            big = gl.maximum(big, gl.maximum(gl.abs(accs[ct][e]), gl.abs(accs[ct][e + 2])))
        big = gl.maximum(big, shuffle_xor(big, 4))
        big = gl.maximum(big, shuffle_xor(big, 8))
        big = gl.maximum(gl.maximum(big, shuffle_xor(big, 16)), 1e-3)
        s = reciprocal(big) * FULL
        q = ()
        for odd in gl.static_range(2):
            for i in gl.static_range(D // 128):
                w = ()
                for row in gl.static_range(2):  # channels g, and g + 8
                    r = ()
                    for f in gl.static_range(4):
                        r = r + (gl.fma(accs[_tile(D, odd, i, f)][e + 2 * row], s, MAGIC + 128.0),)
                    w = w + (transpose8(_byte_pairs(r[0], r[1])), transpose8(_byte_pairs(r[2], r[3])))
                q = q + (either_bytes(w[0], w[1], FIRST), either_bytes(w[2], w[3], FIRST))
                q = q + (either_bytes(w[0], w[1], SECOND), either_bytes(w[2], w[3], SECOND))
        pages = pages + (q + (big * (256.0 / FULL),),)
    return pages


@gluon.constexpr_function
def _tile(dim, odd, i, field):
    """Channel tile of a field of nibbles."""
    assert dim == 128 and i == 0
    return 2 * field + odd


@gluon.jit
def level_byte_scores(base, lane, q, levels, left, D: gl.constexpr, NB: gl.constexpr):
    """Scores of row t without its unit: two of each of the 2 NB tiles of 16 tokens. ``levels``: the eight bytes."""
    none = lane * 0
    begin = none + MAGIC_BITS
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:  # of tokens g and g + 8 of four tiles, as pairs
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, scale_at(D, 3, NB) + 64 * j, True)
        words = level_words(base, lane, j * code_bytes(D, 3), D, 3)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        for tt in gl.static_range(2):
            acc = (begin, begin, begin, begin)
            for odd in gl.static_range(2):
                for half in gl.static_range(2):
                    a = ()
                    for i in gl.static_range(4):
                        x = words[4 * (2 * tt + odd) + i]
                        if half == 1:
                            x = x >> 16
                        a = a + (look_up(levels[0], levels[1], x),)
                    b0, b1 = _two(q, 2 * odd + half)
                    acc = mma_bytes(a[0], a[1], a[2], a[3], b0, b1, acc, True, True)
            low, high = unpack_half2(scale[2 * (j % 2) + tt])
            scores = scores + (gl.fma(_whole((acc,), 0, 1), low, hidden), gl.fma(_whole((acc,), 2, 1), high, hidden))
    return scores


@gluon.jit
def _summed(ready, b0, b1, acc, AT: gl.constexpr):
    """A channel tile's sums, 32 tokens further: its field of quads of both token tiles, channels g and g + 8 of each."""
    return mma_bytes(ready[AT], ready[AT + 4], ready[AT + 16], ready[AT + 20], b0, b1, acc, False, True)


@gluon.jit
def level_byte_values(
    base, lane, p, levels, before, now, out, D: gl.constexpr, NB: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Sums of values of row t, channels g and g + 8 of each tile, in units of 256 times levels, a page further."""
    CT: gl.constexpr = D // 16
    none = lane * 0
    begin = none + MAGIC_BITS
    accs = ()
    for _ct in gl.static_range(CT):
        accs = accs + ((begin, begin, begin, begin),)
    for j in gl.static_range(NB):
        words = level_words(base, lane, AT + j * code_bytes(D, 3), D, 3)
        ready = ()
        for quad in gl.static_range(4):  # token tile, parity of channel tiles
            for row in gl.static_range(2):  # channels g, and g + 8
                a = words[4 * quad + row]
                c = words[4 * quad + row + 2]
                x = select(a, c << 4, LOW)
                y = select(a >> 4, c, LOW)
                ready = ready + (
                    look_up(levels[0], levels[1], either_bytes(x, none, EVEN)),
                    look_up(levels[0], levels[1], either_bytes(y, none, EVEN)),
                    look_up(levels[0], levels[1], either_bytes(x, none, ODD)),
                    look_up(levels[0], levels[1], either_bytes(y, none, ODD)),
                )  # fields 0 to 3
        new = ()
        for ct in gl.static_range(CT):
            new = new + (_summed(ready, p[2 * j], p[2 * j + 1], accs[ct], 8 * (ct % 2) + ct // 2),)
        accs = new
    sums = ()
    for ct in gl.static_range(CT):
        for h in gl.static_range(2):
            sums = sums + (gl.fma(out[2 * ct + h], before, _whole((accs[ct],), 2 * h, 1) * now),)
    return sums
