# mypy: ignore-errors
"""Two precisions in one page in the fused kernel (ZipCache): codes of all tokens, and two bits more of salient ones.

A token's number is ``zero + range * (w * code + low / (2^top - 1))``: w is one of two constants, ``low`` is there for salient
tokens alone, which lie together. So scores and sums have a second product over these. Scores come from there to their token,
and probabilities go there, by the token's rank among salient ones: how many bits of the page's mask come before its own.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import _load_codes, _operand, _pair_mask, code_bytes, step, weight
from kvfold.kernels.common._registers import ONES, _query, _replace, _zero4
from kvfold.kernels.common._softmax import _lighten
from kvfold.kernels.common._warp import (
    high_halves,
    load_shared,
    low_halves,
    mma,
    mul_half2,
    store_shared1,
    store_shared2,
    warp_sync,
)
from kvfold.kernels.fold._sums import _plain_mean

QUERY_PITCH = gl.constexpr(272)  # bytes from row to row of queries in scratch: 8 rows, and no bank twice


@gluon.constexpr_function
def rank_tiles(salient):
    return (salient + 15) // 16


@gluon.constexpr_function
def weight_pitch(salient):
    """Bytes from query row to query row of what salient tokens weigh."""
    return 32 * rank_tiles(salient) + 16


@gluon.constexpr_function
def scratch_bytes(salient):
    """Of a warp: scores of salient tokens (and, before, queries); what they weigh."""
    return max(8 * QUERY_PITCH.value, 512 * rank_tiles(salient)), 8 * weight_pitch(salient)


@gluon.jit
def _ones_of(x):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _rotated(x, by):
    """Bits of x, ``by`` to the right, around."""
    return gl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [x, by], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _store_short(address, x, active):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 h, i; setp.ne.s32 p, $3, 0; mov.b32 {h, i}, $2; @p st.shared.b16 [$1], h; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [address, x, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _before(group):
    """Bits of the tokens of a word before its group number ``group`` of eight."""
    mask = ((1 << (4 * group)) - 1) * 0x10001
    return mask - (1 << 32) if mask >> 31 else mask


@gluon.jit
def _low_scores(base, scratch, lane, b, BITS: gl.constexpr, LOW: gl.constexpr):
    """Scores of the low bits of 16 salient tokens, left in shared memory."""
    FINE: gl.constexpr = 1.0 / ((4 << BITS) - 1)
    g = lane // 4
    t = lane % 4
    at = base + g * 32 + 4 * t
    w = ()
    for r in gl.static_range(4):
        w = w + (load_shared(at, LOW + 256 * (r % 2) + 16 * (r // 2), 1)[0],)
    acc = _zero4(lane)
    for f in gl.static_range(8):
        a = ()
        for r in gl.static_range(4):
            a = a + ((w[r] >> (8 * (f // 4))) & _pair_mask(2, 2 * f % 8),)
        acc = mma(a[0], a[1], a[2], a[3], b[2 * f], b[2 * f + 1], acc, False)
    at = scratch + g * 32 + 8 * t
    store_shared2(at, _int(acc[0] * FINE), _int(acc[1] * FINE))
    store_shared2(at + 256, _int(acc[2] * FINE), _int(acc[3] * FINE))


@gluon.jit
def mixed_scores(
    base, far, scratch, lane, left, up, D: gl.constexpr, BITS: gl.constexpr, SALIENT: gl.constexpr, NB: gl.constexpr,
    META: gl.constexpr, WHICH: gl.constexpr, LOW: gl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens, whose channels have a zero and a range: 2 NB accumulators."""
    CT: gl.constexpr = D // 16
    RT: gl.constexpr = rank_tiles(SALIENT)
    FINE: gl.constexpr = 1.0 / ((4 << BITS) - 1)
    COARSE: gl.constexpr = 1.0 / ((1 << BITS) - 1)
    STEP: gl.constexpr = step(D, BITS)
    g = lane // 4
    t = lane % 4
    nothing = lane * 0
    zeros = (_zero4(lane), _zero4(lane))
    q = ()
    for c in gl.static_range(CT):
        b0, b1 = _query(far, c, True)
        x = load_shared(base + 8 * t, META + 64 * c, 2)
        y = load_shared(base + 8 * t, META + 64 * c + 32, 2)
        acc = mma(low_halves(x[0], x[1]), nothing, low_halves(y[0], y[1]), nothing, b0, b1, zeros[c % 2], False)
        zeros = _replace(zeros, c % 2, acc)
        b0 = mul_half2(b0, high_halves(x[0], x[1]))
        b1 = mul_half2(b1, high_halves(y[0], y[1]))
        at = scratch + g * QUERY_PITCH + 4 * t
        store_shared1(at + 32 * c, b0)
        store_shared1(at + 32 * c + 16, b1)
        q = q + (_lighten(b0, lane, weight(D, BITS, c)), _lighten(b1, lane, weight(D, BITS, c)))
    e0 = (zeros[0][0] + zeros[1][0]) * up[0]
    e1 = (zeros[0][1] + zeros[1][1]) * up[1]
    warp_sync(lane)
    # low bits: a lane's word holds channels 16 t to 16 t + 15, or 64 more; field f of both halves is one step
    at = scratch + g * QUERY_PITCH + 32 * t
    near = load_shared(at, 0, 8)
    off = load_shared(at, 128, 8)
    b = ()
    for f in gl.static_range(8):
        if f % 2 == 0:
            b0 = low_halves(near[f // 2], near[4 + f // 2])
            b1 = low_halves(off[f // 2], off[4 + f // 2])
        else:
            b0 = high_halves(near[f // 2], near[4 + f // 2])
            b1 = high_halves(off[f // 2], off[4 + f // 2])
        b = b + (_lighten(b0, lane, 2 * f % 8), _lighten(b1, lane, 2 * f % 8))
    warp_sync(lane)
    for tile in range(RT):  # a loop: code that is repeated would leave the instruction cache
        _low_scores(base + 512 * tile, scratch + 512 * tile, lane, b, BITS, LOW)
    warp_sync(lane)
    f0 = up[0] * 16777216.0
    f1 = up[1] * 16777216.0
    which = load_shared(base, WHICH, 4)
    mine = (((1 << (g >> 1)) - 1) * 0x10001) | ((g & 1) << (g >> 1))
    place = (g & 1) * 16 + (g >> 1)
    seen = lane * 0
    scores = ()
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, j * code_bytes(D, BITS), D, BITS)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        accs = (_zero4(lane), _zero4(lane))
        for c in gl.static_range(CT):
            for tt in gl.static_range(2):
                a = _operand(words, 2 * c + tt, D, BITS)
                accs = _replace(accs, tt, mma(a[0], a[1], a[2], a[3], q[2 * c], q[2 * c + 1], accs[tt], False))
        for tt in gl.static_range(2):
            x = accs[tt]
            out = ()
            for h in gl.static_range(2):
                is_salient = ((which[j] >> (place + 4 * (2 * tt + h))) & 1) != 0
                rank = seen + _ones_of(which[j] & (_before(2 * tt + h) | (mine << (4 * (2 * tt + h)))))
                rank = gl.minimum(rank, SALIENT - 1)
                y = load_shared(scratch + rank * 32 + 8 * t, 0, 2)
                w = gl.where(is_salient, 4 * FINE, COARSE) * 0.5 ** (tt * STEP)
                more0 = gl.where(is_salient, _float(y[0]), 0.0)
                more1 = gl.where(is_salient, _float(y[1]), 0.0)
                out = out + (
                    gl.fma(gl.fma(x[2 * h], w, more0), f0, e0 + hidden),
                    gl.fma(gl.fma(x[2 * h + 1], w, more1), f1, e1 + hidden),
                )
            scores = scores + (out,)
        seen = seen + _ones_of(which[j])
    return scores


@gluon.jit
def _float(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _int(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def no_weights(scratch, lane, SALIENT: gl.constexpr):
    """What salient tokens weigh, before any: zeros."""
    for i in gl.static_range((8 * weight_pitch(SALIENT) + 127) // 128):
        store_shared1(gl.minimum(scratch + 128 * i + 4 * lane, scratch + (8 * weight_pitch(SALIENT) - 4)), lane * 0)


@gluon.jit
def _low_values(accs, base, row, lane, D: gl.constexpr, BITS: gl.constexpr, LOW: gl.constexpr):
    """Sums of the low bits of 16 salient tokens."""
    t = lane % 4
    b0 = load_shared(row + 4 * t, 0, 1)[0]
    b1 = load_shared(row + 4 * t, 16, 1)[0]
    for half in gl.static_range(D // 64):
        w = ()
        for r in gl.static_range(4):
            w = w + (load_shared(base + 64 * t, LOW + 256 * (r // 2) + 32 * (r % 2) + 16 * half, 4),)
        for k in gl.static_range(4):
            accs = _low_sums(accs, w, b0, b1, 2 * (lane // 4), 4 * half + k, k, D, BITS)
    return accs


@gluon.jit
def mixed_values(
    base, scratch, norm, lane, p, factor, out, side, D: gl.constexpr, BITS: gl.constexpr, SALIENT: gl.constexpr,
    NB: gl.constexpr, AT: gl.constexpr, META: gl.constexpr, WHICH: gl.constexpr, LOW: gl.constexpr,
):  # fmt: skip
    """Sums of values and of probabilities, a page further. Tokens have a zero and a range, the page has norms of channels, at
    ``norm``."""
    CT: gl.constexpr = D // 16
    RT: gl.constexpr = rank_tiles(SALIENT)
    PITCH: gl.constexpr = weight_pitch(SALIENT)
    STEP: gl.constexpr = step(D, BITS)
    # eighths of a low bit's unit: of a code, of a salient one's, exact in fp16
    COARSE: gl.constexpr = ((4 << BITS) - 1) // ((1 << BITS) - 1)
    UNIT: gl.constexpr = 8.0 / ((4 << BITS) - 1)
    g = lane // 4
    t = lane % 4
    one = lane * 0 + ONES
    which = load_shared(base, AT + WHICH, 4)
    mine = ((1 << t) - 1) * 0x10001
    seen = lane * 0
    extra = (_zero4(lane), _zero4(lane))
    accs = ()
    for _c in gl.static_range(CT):
        accs = accs + (_zero4(lane),)
    row = scratch + g * PITCH
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, AT + j * code_bytes(D, BITS), D, BITS)
        for tt in gl.static_range(2):
            b = ()
            zeros = ()
            for h in gl.static_range(2):
                x = load_shared(base + 8 * t, AT + META + 128 * j + 64 * tt + 32 * h, 2)
                zeros = zeros + (low_halves(x[0], x[1]),)
                r = mul_half2(p[4 * j + 2 * tt + h], high_halves(x[0], x[1]))
                bits = which[j] >> (t + 4 * (2 * tt + h))
                first = (bits & 1) != 0
                second = ((bits >> 16) & 1) != 0
                rank = seen + _ones_of(which[j] & (_before(2 * tt + h) | (mine << (4 * (2 * tt + h)))))
                eighth = mul_half2(r, lane * 0 + 0x30003000)
                # both halves' factors, in eighths: 4 of salient ones
                w = gl.where(first, 0x3800, _eighths(COARSE)) | (gl.where(second, 0x3800, _eighths(COARSE)) << 16)
                _store_short(row + rank * 2, eighth, (first & (rank < SALIENT)).to(gl.int32))
                rank = rank + (bits & 1)
                _store_short(row + rank * 2, eighth >> 16, (second & (rank < SALIENT)).to(gl.int32))
                b = b + (_lighten(mul_half2(r, w), lane, tt * STEP),)
            extra = _replace(
                extra, tt, mma(zeros[0], one, zeros[1], one, p[4 * j + 2 * tt], p[4 * j + 2 * tt + 1], extra[tt], False)
            )
            for c in gl.static_range(CT):
                a = _operand(words, 2 * c + tt, D, BITS)
                accs = _replace(accs, c, mma(a[0], a[1], a[2], a[3], b[0], b[1], accs[c], False))
        seen = seen + _ones_of(which[j])
    warp_sync(lane)
    for tile in range(RT):
        accs = _low_values(accs, base + 512 * tile, row + 32 * tile, lane, D, BITS, AT + LOW)
    z0 = extra[0][0] + extra[1][0]
    z1 = extra[0][1] + extra[1][1]
    norms = _plain_mean(norm, lane, D, 0)
    full = ()
    for c in gl.static_range(CT):
        full = full + (_joined(out[c], factor, norms[c], accs[c], z0, z1, UNIT * (1 << (24 - weight(D, BITS, c)))),)
    s = side[0]
    side = (
        (
            s[0],
            s[1],
            gl.fma(s[2], factor[0], extra[0][2] + extra[1][2]),
            gl.fma(s[3], factor[1], extra[0][3] + extra[1][3]),
        ),
    )
    return full, side


@gluon.constexpr_function
def _eighths(n):
    """fp16 n / 8."""
    return {4: 0x3800, 5: 0x3900, 7: 0x3B00}[n]


@gluon.jit
def _low_sums(accs, w, b0, b1, twice, C: gl.constexpr, WORD: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """Low bits of channel tile C: field g of a half of word C belongs to row g, or g + 8."""
    K: gl.constexpr = weight(D, BITS, C)
    MASK: gl.constexpr = _pair_mask(2, K)
    by = twice - K
    a0 = _rotated(low_halves(w[0][WORD], w[1][WORD]), by) & MASK
    a1 = _rotated(high_halves(w[0][WORD], w[1][WORD]), by) & MASK
    a2 = _rotated(low_halves(w[2][WORD], w[3][WORD]), by) & MASK
    a3 = _rotated(high_halves(w[2][WORD], w[3][WORD]), by) & MASK
    return _replace(accs, C, mma(a0, a1, a2, a3, b0, b1, accs[C], False))


@gluon.jit
def _joined(before, factor, norm, x, z0, z1, F: gl.constexpr):
    """Sums so far and a page's: norm (F x + zeros)."""
    return (
        gl.fma(before[0], factor[0], norm[0] * gl.fma(x[0], F, z0)),
        gl.fma(before[1], factor[1], norm[1] * gl.fma(x[1], F, z1)),
        gl.fma(before[2], factor[0], norm[2] * gl.fma(x[2], F, z0)),
        gl.fma(before[3], factor[1], norm[3] * gl.fma(x[3], F, z1)),
    )
