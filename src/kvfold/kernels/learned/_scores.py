# mypy: ignore-errors
"""Scores of learned keys (TaSQ) for :mod:`kvfold.kernels.learned._decode`, which says how, and where things lie in shared
memory."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._tables import (
    _turn,
    _weighted_bytes,
)
from kvfold.kernels.common._warp import (
    as_float,
    fma_half2,
    load_shared,
    load_shared_short,
    mma,
    mul_half2,
    pack_half2,
    store_shared2,
    unpack_half2,
)
from kvfold.kernels.fold._codebook import (
    ROWS,
)
from kvfold.kernels.fold._rows import row_stride

KEYS = gl.constexpr(65536)
"""Bytes of a head's rows of keys: [2, codes, 4, 4] of 8 bytes, of group 16 b + 4 t + j."""
QUERIES = gl.constexpr(2304)
"""Of four query rows turned for two units, or of eight for one: four times 512, 64 bytes apart."""
TURNS = gl.constexpr(KEYS.value + ROWS.value)
"""Where cosines and sines begin; behind them the mean of keys, the Hadamard matrix, queries as they come, and warps' own."""
MEAN = gl.constexpr(TURNS.value + 8192)
MATRIX = gl.constexpr(MEAN.value + 256)
RAW = gl.constexpr(MATRIX.value + 512)
OWN = gl.constexpr(RAW.value + 4096)


@gluon.jit
def minus_product_half2(a, b, c):
    """c - a b in one instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 n; neg.f16x2 n, $1; fma.rn.f16x2 $0, n, $2, $3; }",
        "=r,r,r,r",
        [a, b, c],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def side_bytes(codes):
    """Bytes of a page of one side, whose tokens have ``codes`` bytes of codes: codes and norms."""
    return 128 * codes + 256


@gluon.constexpr_function
def warp_bytes(v):
    """Bytes of a warp: a page of both sides and the mean of values; that mean, turned; queries."""
    return query_at(v) + 2 * QUERIES.value


@gluon.constexpr_function
def mean_at(v):
    """Bytes from where a warp's own begin to the mean of values."""
    return side_bytes(32) + side_bytes(v)


@gluon.constexpr_function
def query_at(v):
    """The same to its queries, which follow the turned mean."""
    return mean_at(v) + 256 + 512


@gluon.constexpr_function
def shared_bytes(v, columns, warps):
    """Bytes of shared memory of a program for so many query rows."""
    size = max(OWN.value + warps * warp_bytes(v), warps * columns * (row_stride(128) + 8))
    return (size + 1023) // 1024 * 1024


# ---- keys -----------------------------------------------------------------------------------------------------------


@gluon.jit
def unit_queries(to, raw, freq, position, C: gl.constexpr):
    """Leave C queries, rotated back by the positions of 16 / C units, in shared memory: a lane has two pairs of each.

    ``raw``: of where the lane's channels of the queries lie at RAW, 512 bytes from one to the next.
    """
    turns = ()
    for h in gl.static_range(16 // C):
        angle = (position + 32 * h).to(gl.float32)
        c0, s0 = _turn(angle * freq[0])
        c1, s1 = _turn(angle * freq[1])
        turns = turns + ((c0, s0, c1, s1),)
    for i in gl.static_range(C):
        x = load_shared(raw, RAW + 512 * i, 4)
        x = (as_float(x[0]), as_float(x[1]), as_float(x[2]), as_float(x[3]))
        for h in gl.static_range(16 // C):
            c0, s0, c1, s1 = turns[h]
            real = pack_half2(x[0] * c0 + x[2] * s0, x[1] * c1 + x[3] * s1, False)
            imaginary = pack_half2(x[2] * c0 - x[0] * s0, x[3] * c1 - x[1] * s1, False)
            store_shared2(to + (h * C // 8 * QUERIES + h * C % 8 * 64 + 64 * i), real, imaginary)


@gluon.jit
def _four_rows(word, weights, places, odd, high, AT: gl.constexpr):
    """Eight words: two of each of a token's four groups whose codes are the bytes of ``word``."""
    x = ()
    for k in gl.static_range(4):
        x = x + load_shared(_weighted_bytes(word, weights[k], places[k]), AT, 2)
    near = ()
    for k in gl.static_range(4):
        for w in gl.static_range(2):
            near = near + (gl.where(odd, x[2 * (k ^ 1) + w], x[2 * k + w]),)
    out = ()
    for k in gl.static_range(4):
        for w in gl.static_range(2):
            out = out + (gl.where(high, near[2 * (k ^ 2) + w], near[2 * k + w]),)
    return out


@gluon.jit
def _rotated(a, b, cosine, sine):
    """Two pairs of a key, rotated by its place."""
    return (
        minus_product_half2(b, sine, mul_half2(a, cosine)),
        fma_half2(b, cosine, mul_half2(a, sine)),
    )


@gluon.jit
def _turns_of(address, AT: gl.constexpr):
    """Of four groups two cosines and two sines of a place each."""
    return load_shared(address, TURNS + AT, 4) + load_shared(address, TURNS + (AT + 512), 4)


@gluon.jit
def _eight_scores(lookup, near, far, q, acc, AT: gl.constexpr, NEXT: gl.constexpr, B: gl.constexpr):
    """acc and the products of half of the channels of eight tokens, and of the eight NEXT bytes further, with the queries;
    ``near`` and ``far`` turn them. ``lookup``: address of their codes, and what :func:`_four_rows` takes."""
    codes, weights, places, odd, high = lookup
    x = _four_rows(load_shared(codes, AT, 1)[0], weights, places, odd, high, 32768 * B)
    y = _four_rows(load_shared(codes, AT + NEXT, 1)[0], weights, places, odd, high, 32768 * B)
    for j in gl.static_range(4):
        x0, x1 = _rotated(x[2 * j], x[2 * j + 1], near[2 * j], near[2 * j + 1])
        y0, y1 = _rotated(y[2 * j], y[2 * j + 1], far[2 * j], far[2 * j + 1])
        acc = mma(x0, y0, x1, y1, q[2 * j], q[2 * j + 1], acc, False)
    return acc


@gluon.jit
def _mean_queries(mean, q):
    """What cosines and sines of a key's rotation count in the products of queries with the mean of keys."""
    out = ()
    for j in gl.static_range(4):
        real = q[2 * j]
        imaginary = q[2 * j + 1]
        out = out + (
            fma_half2(real, mean[2 * j], mul_half2(imaginary, mean[2 * j + 1])),
            minus_product_half2(real, mean[2 * j + 1], mul_half2(imaginary, mean[2 * j])),
        )
    return out


@gluon.jit
def _mean_scores(near, far, m, acc):
    """acc and the products of :func:`_mean_queries` with the turns of two eights of places."""
    for j in gl.static_range(4):
        acc = mma(
            near[2 * j], far[2 * j], near[2 * j + 1], far[2 * j + 1], m[2 * j], m[2 * j + 1], acc, False
        )  # fmt: skip
    return acc


@gluon.jit
def page_scores(
    codes, turns, queries, mean, norms, size, weights, places, odd, high, second, lane, QUERY: gl.constexpr,
    CENTRED: gl.constexpr, C: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Scores of two query rows without their factor: of four eights of places of each two units, of the unit that the lane has;
    or with C, 8, of four eights of places of two units, half of a page.

    ``codes``: addresses of the codes of a lane's place and groups; ``turns``, ``queries``, ``mean``: lanes' addresses of TURNS,
    QUERY and MEAN; ``norms``: of the lane's tokens' norms, 4,096 bytes further; ``second``: whether the lane's units are the
    second ones.
    """
    sums = ()
    common = ()
    for _i in gl.static_range(32 // C):
        sums = sums + (_zero4(lane),)
    for _i in gl.static_range(4):
        common = common + (_zero4(lane),)
    for b in gl.static_range(2):
        q = ()
        m = ()
        for u in gl.static_range(2):
            of_unit = load_shared(queries, QUERY + (u * QUERIES + 1152 * b), 4)
            of_unit = of_unit + load_shared(queries, QUERY + (u * QUERIES + 1152 * b + 576), 4)
            q = q + (of_unit,)
        if CENTRED:
            x = load_shared(mean, MEAN + 32 * b, 4) + load_shared(mean, MEAN + (32 * b + 16), 4)
            for u in gl.static_range(2):
                m = m + (_mean_queries(x, q[u]),)
        new = ()
        new_common = ()
        for pair in gl.static_range(2):
            near = _turns_of(turns, 4096 * pair + 1024 * b)
            far = _turns_of(turns, 4096 * pair + 2048 + 1024 * b)
            for u in gl.static_range(2):
                lookup = (codes[b], weights, places, odd, high)
                if C == 4:
                    acc = _eight_scores(
                        lookup, near, near, q[u], sums[4 * pair + 2 * u], 2048 * u + 512 * pair, 1024, b
                    )
                    other = _eight_scores(
                        lookup, far, far, q[u], sums[4 * pair + 2 * u + 1], 2048 * u + 512 * pair + 256, 1024, b
                    )
                    new = new + (acc, other)
                else:
                    acc = _eight_scores(
                        lookup, near, far, q[u], sums[2 * pair + u], 2048 * HALF + 1024 * u + 512 * pair, 256, b
                    )
                    new = new + (acc,)
                if CENTRED:
                    new_common = new_common + (_mean_scores(near, far, m[u], common[2 * pair + u]),)
        sums = new
        common = new_common
    scores = ()
    for pair in gl.static_range(2):
        for u in gl.static_range(2):
            for e in gl.static_range(2):
                if C == 4:
                    acc = sums[4 * pair + 2 * u + e]
                    norm, _ = unpack_half2(load_shared_short(norms, 4096 + 128 * u + 16 * (2 * pair + e)))
                    x0 = gl.where(second, acc[2], acc[0]) * norm
                    x1 = gl.where(second, acc[3], acc[1]) * norm
                else:
                    acc = sums[2 * pair + u]
                    norm, _ = unpack_half2(load_shared_short(norms, 4096 + 128 * HALF + 64 * u + 16 * (2 * pair + e)))
                    x0 = acc[2 * e] * norm
                    x1 = acc[2 * e + 1] * norm
                if CENTRED:
                    x0 = gl.fma(common[2 * pair + u][2 * e], size, x0)
                    x1 = gl.fma(common[2 * pair + u][2 * e + 1], size, x1)
                scores = scores + ((x0, x1),)
    return scores
