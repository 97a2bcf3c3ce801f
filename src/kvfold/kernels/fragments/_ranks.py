# mypy: ignore-errors
"""Low-rank terms in the fused kernel (GEAR): rows of tokens times a basis of the page, as two small products."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import weight
from kvfold.kernels.common._registers import _query, _replace, _zero4
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    load_shared,
    load_shared_short,
    mma,
    pack_half2,
    shuffle_xor,
    transpose8,
)


@gluon.jit
def _pairs_down(base, lane, AT: gl.constexpr, RANK: gl.constexpr):
    """Of a matrix fp16 [16, RANK] in shared memory, its transpose as operand: registers a0 and a2 (rows from RANK on are 0)."""
    g = lane // 4
    at = base + (2 * (lane % 4) * RANK + gl.minimum(g, RANK - 1)) * 2
    out = ()
    for half in gl.static_range(2):
        low = load_shared_short(at, AT + 16 * RANK * half)
        high = load_shared_short(at, AT + 16 * RANK * half + 2 * RANK)
        out = out + (gl.where(g < RANK, low | (high << 16), 0),)
    return out


@gluon.jit
def _pairs_along(base, lane, AT: gl.constexpr, RANK: gl.constexpr):
    """The matrix itself as operand: registers a0 and a1 (columns from RANK on are 0)."""
    t = lane % 4
    at = base + (lane // 4 * RANK + 2 * gl.minimum(t, RANK // 2 - 1)) * 2
    x = load_shared(at, AT, 1)[0]
    y = load_shared(at, AT + 16 * RANK, 1)[0]
    return gl.where(2 * t < RANK, x, 0), gl.where(2 * t < RANK, y, 0)


@gluon.jit
def rank_scores(
    scores, base, lane, far, up, D: gl.constexpr, RANK: gl.constexpr, NB: gl.constexpr, ROWS: gl.constexpr,
    BASIS: gl.constexpr,
):  # fmt: skip
    """Scores and what rows of tokens add to them. ``up`` turns products of the query into scores."""
    zero = lane * 0
    both = (_zero4(lane), _zero4(lane))
    for c in gl.static_range(D // 16):
        a0, a2 = _pairs_down(base, lane, BASIS + 32 * RANK * c, RANK)
        b0, b1 = _query(far, c, True)
        both = _replace(both, c % 2, mma(a0, zero, a2, zero, b0, b1, both[c % 2], False))
    b = transpose8(pack_half2(both[0][0] + both[1][0], both[0][1] + both[1][1], False))
    out = ()
    for i in gl.static_range(2 * NB):
        a0, a1 = _pairs_along(base, lane, ROWS + 32 * RANK * i, RANK)
        y = mma(a0, a1, zero, zero, b, zero, _zero4(lane), False)
        x = scores[i]
        out = out + (
            (
                gl.fma(y[0], up[0], x[0]),
                gl.fma(y[1], up[1], x[1]),
                gl.fma(y[2], up[0], x[2]),
                gl.fma(y[3], up[1], x[3]),
            ),
        )
    return out


@gluon.jit
def rank_values(
    out, base, lane, p, D: gl.constexpr, BITS: gl.constexpr, RANK: gl.constexpr, NB: gl.constexpr, ROWS: gl.constexpr,
    BASIS: gl.constexpr,
):  # fmt: skip
    """Sums of values, in units of codes (2^(k - 24)), and what rows of tokens add to them."""
    zero = lane * 0
    both = (_zero4(lane), _zero4(lane))
    for i in gl.static_range(2 * NB):
        a0, a2 = _pairs_down(base, lane, ROWS + 32 * RANK * i, RANK)
        both = _replace(both, i % 2, mma(a0, zero, a2, zero, p[2 * i], p[2 * i + 1], both[i % 2], False))
    sums = ()
    up = ()
    for e in gl.static_range(2):
        x = both[0][e] + both[1][e]
        big = gl.abs(x)
        big = gl.maximum(big, shuffle_xor(big, 4))
        big = gl.maximum(big, shuffle_xor(big, 8))
        big = gl.maximum(big, shuffle_xor(big, 16))
        exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
        sums = sums + (x * as_float((254 - exponent) << 23),)
        up = up + (as_float(exponent << 23),)
    b = transpose8(pack_half2(sums[0], sums[1], False))
    full = ()
    for c in gl.static_range(D // 16):
        a0, a1 = _pairs_along(base, lane, BASIS + 32 * RANK * c, RANK)
        y = mma(a0, a1, zero, zero, b, zero, _zero4(lane), False)
        x = out[c]
        f0 = up[0] * (1.0 / (1 << (24 - weight(D, BITS, c))))
        f1 = up[1] * (1.0 / (1 << (24 - weight(D, BITS, c))))
        full = full + (
            (gl.fma(y[0], f0, x[0]), gl.fma(y[1], f1, x[1]), gl.fma(y[2], f0, x[2]), gl.fma(y[3], f1, x[3])),
        )
    return full
