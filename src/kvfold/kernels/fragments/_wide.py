# mypy: ignore-errors
"""Queries of four pages through a matrix by products of a warpgroup, as operands of bytes: a sketch of signs
(:mod:`kvfold.kernels.fragments._signs`) or a rotation before levels (:mod:`kvfold.kernels.fragments._levels`).

The matrix lies in the program's shared memory, which products read once for the four warps' 16 pages. Of their 64 rows a warp
has 16, the first operand, in its registers: query row h of its pages 0 and 1 in rows 2h and 2h + 1, of pages 2 and 3 in rows
2h + 8 and 2h + 9. So lane (g, t) has sums of row g // 2 of pages g % 2 and g % 2 + 2, and makes both bytes of them. The lane
that multiplies with a byte (see :mod:`kvfold.kernels.fold._bytes`) may be another one: bytes wait in the warp's stage.

A tile of the matrix is 64 rows fp16 [64, 128], in blocks of eight, which are columns of the product: what a word of bytes holds
is then one lane's. Of uniform codes they are rows 0 to 7 of channel tiles 2m and 2m + WIDTH / 32, rows 8 to 15 of both, and the
same of tiles 2m + 1 and 2m + 1 + WIDTH / 32; where codes are looked up (:mod:`kvfold.kernels.fragments._level_bytes`) rows 0
to 7 of tiles m, m + 2, m + 4 and m + 6, then rows 8 to 15.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    either_bytes,
    high_halves,
    load_shared,
    low_halves,
    reciprocal,
    shuffle_xor,
    sqrt_fast,
    store_shared1,
    store_shared4,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.common._warpgroup import start_wide, wait_wide
from kvfold.kernels.fold._bytes import FULL, MAGIC, PARTS, _lift, byte_starts
from kvfold.kernels.fragments._queries import norm_words, normed_queries

TILE = gl.constexpr(16384)
"""Bytes of a tile of the matrix."""
SIGNS = gl.constexpr(-2139062144)  # 0x80808080


@gluon.constexpr_function
def bent(kind, bits):
    """Whether codes' lowest bits have operands of their own: those of four levels."""
    return kind == 3 and bits == 2


@gluon.constexpr_function
def operand_bytes(width, twice):
    """Bytes of four pages' operands of a warp."""
    return 4 * 8 * width * (1 + twice)


@gluon.constexpr_function
def _sum_at(bits, word, i):
    """Which of a lane's 32 sums of a tile, if of row g, byte ``i`` of the tile's word number ``word`` is of."""
    if bits == 3:  # words of channels 2t, then of 2t + 1
        return 16 * (word % 2) + 4 * i + word // 2
    return 8 * word + i % 2 * 4 + i // 2


@gluon.constexpr_function
def _light(width, bits, tile, word):
    """What a query of that word is multiplied with, for what its codes count."""
    return 1.0 if bits == 3 else 0.5 ** _lift(width, bits, 2 * tile + word // 2)


@gluon.jit
def length(x, lane, COUNT: gl.constexpr):
    """How long the vector is whose COUNT operand pairs x four lanes have."""
    square = _zero4(lane)[0]
    for i in gl.static_range(2 * COUNT):
        a, b = unpack_half2(x[i])
        square = gl.fma(a, a, square)
        square = gl.fma(b, b, square)
    square = square + shuffle_xor(square, 1)
    return sqrt_fast(square + shuffle_xor(square, 2))


@gluon.jit
def _parts(a, b, factor):
    """Two sums times ``factor`` as 16 bits each: their high bytes, then their low ones, of which the highest bit is turned."""
    a = gl.fma(a, factor, MAGIC + 128.0)
    b = gl.fma(b, factor, MAGIC + 128.0)
    return either_bytes(as_int(a), as_int(b), PARTS)


@gluon.jit
def _largest(sums, big, S: gl.constexpr):
    """The largest of ``big`` and of a tile's sums of row g + 8 S, without their signs; of this lane's columns."""
    for n in gl.static_range(8):
        big = gl.maximum(big, gl.maximum(gl.abs(sums[4 * n + 2 * S]), gl.abs(sums[4 * n + 2 * S + 1])))
    return big


@gluon.jit
def _keep_tile(
    page, sums, factor, lane, WIDTH: gl.constexpr, BITS: gl.constexpr, TILE: gl.constexpr, S: gl.constexpr, BEND: gl.constexpr,
):  # fmt: skip
    """Leave a tile's sums of row g + 8 S times ``factor`` and BEND as bytes at ``page``: high ones for column 2h, low ones for
    column 2h + 1 of query row h."""
    high = ()
    low = ()
    for w in gl.static_range(4):
        f = factor * (BEND * _light(WIDTH, BITS, TILE, w))
        x = ()
        for i in gl.static_range(4):
            x = x + (sums[_sum_at(BITS, w, i) + 2 * S],)
        a = _parts(x[0], x[1], f)
        b = _parts(x[2], x[3], f)
        high = high + (as_float(low_halves(a, b)),)
        low = low + (as_float(high_halves(a, b) ^ SIGNS),)
    store_shared4(page + lane * 16, high[0], high[1], high[2], high[3])
    store_shared4(page + (lane ^ 4) * 16, low[0], low[1], low[2], low[3])


@gluon.jit
def turn_pages(
    base, scratch, far, matrix, operands, lane, D: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr, BEND: gl.constexpr,
    NORMS: gl.constexpr,
):  # fmt: skip
    """Leave four pages' operands of bytes at address ``operands``, BEND: and those of codes' lowest bits, and their units, fp32
    [page, row], in the warp's scratch. All warps of a warpgroup do so together.

    Of a rotation the largest sum is 32,600. A sketch has more tiles than can wait for it: rows of the matrix are orthonormal in
    chunks of D, so that a sum is at most as large as its query is long; of 16 bits two are then unused. ``far``, NORMS: as
    :func:`kvfold.kernels.fragments._signs.sketched_pages`.
    """
    CT: gl.constexpr = D // 16
    TILES: gl.constexpr = WIDTH // 64
    PAGE: gl.constexpr = 8 * WIDTH * (2 if BEND != 0.0 else 1)
    g = lane // 4
    x = ()
    size = ()
    for s in gl.static_range(2):
        if s > 0:
            warp_sync(lane)
        norm_words(base, scratch, lane, D, True, NORMS + 2 * D * s, 2)
        y = normed_queries(far, scratch, lane, D, 2, True)
        x = x + y
        if TILES > 2:
            size = size + (length(y, lane, CT) * 1.01,)  # rows are rounded
    words = ()
    for c in gl.static_range(CT):
        words = words + (x[2 * c], x[2 * CT + 2 * c], x[2 * c + 1], x[2 * CT + 2 * c + 1])
    under_way = (start_wide(words, matrix), start_wide(words, matrix + TILE))
    if TILES == 2:
        sums = wait_wide(under_way[0], 1)
        more = wait_wide(under_way[1], 0)
        for s in gl.static_range(2):
            big = _largest(more, _largest(sums, gl.abs(sums[2 * s]), s), s)
            big = gl.maximum(big, shuffle_xor(big, 1))
            size = size + (gl.maximum(big, shuffle_xor(big, 2)),)
        under_way = (sums, more)
    unit = ()
    factor = ()
    for s in gl.static_range(2):
        big = gl.maximum(size[s], 1e-3)
        unit = unit + (big * (256.0 / FULL),)
        factor = factor + (reciprocal(big) * FULL,)
    warp_sync(lane)
    at = scratch + g % 2 * 16 + g // 2 * 4
    store_shared1(at, as_int(unit[0]))
    store_shared1(at + 32, as_int(unit[1]))
    page = operands + g % 2 * PAGE
    for m in gl.static_range(TILES):
        sums = under_way[0]
        if TILES > 2:
            sums = wait_wide(sums, 1 if m + 1 < TILES else 0)
        for s in gl.static_range(2):
            to = page + (2 * PAGE * s + 512 * m)
            _keep_tile(to, sums, factor[s], lane, WIDTH, BITS, m, s, 1.0)
            if BEND != 0.0:
                _keep_tile(to + 512 * TILES, sums, factor[s], lane, WIDTH, BITS, m, s, BEND)
        if m + 2 < TILES:
            under_way = (under_way[1], start_wide(words, matrix + TILE * (m + 2)))
        else:
            under_way = (under_way[1], under_way[1])
    warp_sync(lane)


@gluon.jit
def turned_page(
    operands, scratch, lane, page, WIDTH: gl.constexpr, BITS: gl.constexpr, BENT: gl.constexpr = False,
):  # fmt: skip
    """Of ``page``, 0 to 3, the operands that :func:`turn_pages` left, where products with them begin (not of codes that are
    looked up), and the unit of row t."""
    PARTS_: gl.constexpr = 2 if BENT else 1
    at = operands + page * (8 * WIDTH * PARTS_) + (lane ^ (page % 2 * 4)) * 16
    q = ()
    for m in gl.static_range(WIDTH // 64 * PARTS_):
        q = q + load_shared(at, 512 * m, 4)
    unit = as_float(load_shared(scratch + page * 16 + lane % 4 * 4, 0, 1)[0])
    if BITS < 3:
        start = byte_starts(q, lane, WIDTH, BITS, BENT)
        q = q + (start[0][0], start[0][1], start[1][0], start[1][1])
    return q + (unit,)
