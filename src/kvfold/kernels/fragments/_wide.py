# mypy: ignore-errors
"""Queries of four pages through a sketch's matrix by products of a warpgroup, as operands of bytes
(:mod:`kvfold.kernels.fragments._signs`).

The matrix lies in the program's shared memory, which products read once for the four warps' 16 pages. Of their 64 rows a warp
has 16, the first operand, in its registers: query row h of its pages 0 and 1 in rows 2h and 2h + 1, of pages 2 and 3 in rows
2h + 8 and 2h + 9. So lane (g, t) has sums of row g // 2 of pages g % 2 and g % 2 + 2, and makes both bytes of them. The lane
that multiplies with a byte (see :mod:`kvfold.kernels.fold._bytes`) may be another one: bytes wait in the warp's stage.

A tile of the matrix is 64 rows fp16 [64, 128], in blocks of eight, which are columns of the product: what a word of bytes holds
is then one lane's. They are rows 0 to 7 of channel tiles 2m and 2m + WIDTH / 32, rows 8 to 15 of both, and the same of tiles
2m + 1 and 2m + 1 + WIDTH / 32.
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
def operand_bytes(width):
    """Bytes of four pages' operands of a warp."""
    return 4 * 8 * width


@gluon.constexpr_function
def _sum_at(word, i):
    """Which of a lane's 32 sums of a tile, if of row g, byte ``i`` of the tile's word number ``word`` is of."""
    return 8 * word + i % 2 * 4 + i // 2


@gluon.constexpr_function
def _light(width, tile, word):
    """What a query of that word is multiplied with, for what its codes count."""
    return 0.5 ** _lift(width, 1, 2 * tile + word // 2)


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
def _keep_tile(page, sums, factor, lane, WIDTH: gl.constexpr, TILE: gl.constexpr, S: gl.constexpr):
    """Leave a tile's sums of row g + 8 S times ``factor`` as bytes at ``page``: high ones for column 2h, low ones for column
    2h + 1 of query row h."""
    high = ()
    low = ()
    for w in gl.static_range(4):
        f = factor * _light(WIDTH, TILE, w)
        x = ()
        for i in gl.static_range(4):
            x = x + (sums[_sum_at(w, i) + 2 * S],)
        a = _parts(x[0], x[1], f)
        b = _parts(x[2], x[3], f)
        high = high + (as_float(low_halves(a, b)),)
        low = low + (as_float(high_halves(a, b) ^ SIGNS),)
    store_shared4(page + lane * 16, high[0], high[1], high[2], high[3])
    store_shared4(page + (lane ^ 4) * 16, low[0], low[1], low[2], low[3])


@gluon.jit
def turn_pages(
    base, scratch, far, matrix, operands, lane, D: gl.constexpr, WIDTH: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """Leave four pages' operands of bytes at address ``operands``, and their units, fp32 [page, row], in the warp's scratch.
    All warps of a warpgroup do so together.

    A sketch has more tiles than can wait for their largest sum: rows of the matrix are orthonormal in chunks of D, so that a
    sum is at most as large as its query is long; of 16 bits two are then unused. ``far``, NORMS: as
    :func:`kvfold.kernels.fragments._signs.sketched_pages`.
    """
    CT: gl.constexpr = D // 16
    TILES: gl.constexpr = WIDTH // 64
    PAGE: gl.constexpr = 8 * WIDTH
    g = lane // 4
    x = ()
    size = ()
    for s in gl.static_range(2):
        if s > 0:
            warp_sync(lane)
        norm_words(base, scratch, lane, D, NORMS + 2 * D * s, 2)
        y = normed_queries(far, scratch, lane, D, 2, True)
        x = x + y
        size = size + (length(y, lane, CT) * 1.01,)  # rows are rounded
    words = ()
    for c in gl.static_range(CT):
        words = words + (x[2 * c], x[2 * CT + 2 * c], x[2 * c + 1], x[2 * CT + 2 * c + 1])
    under_way = (start_wide(words, matrix), start_wide(words, matrix + TILE))
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
        sums = wait_wide(under_way[0], 1 if m + 1 < TILES else 0)
        for s in gl.static_range(2):
            to = page + (2 * PAGE * s + 512 * m)
            _keep_tile(to, sums, factor[s], lane, WIDTH, m, s)
        if m + 2 < TILES:
            under_way = (under_way[1], start_wide(words, matrix + TILE * (m + 2)))
        else:
            under_way = (under_way[1], under_way[1])
    warp_sync(lane)


@gluon.jit
def turned_page(operands, scratch, lane, page, WIDTH: gl.constexpr):
    """Of ``page``, 0 to 3, the operands that :func:`turn_pages` left, where products with them begin, and the unit of row t."""
    at = operands + page * (8 * WIDTH) + (lane ^ (page % 2 * 4)) * 16
    q = ()
    for m in gl.static_range(WIDTH // 64):
        q = q + load_shared(at, 512 * m, 4)
    unit = as_float(load_shared(scratch + page * 16 + lane % 4 * 4, 0, 1)[0])
    start = byte_starts(q, lane, WIDTH, 1)
    return q + (start[0][0], start[0][1], start[1][0], start[1][1], unit)
