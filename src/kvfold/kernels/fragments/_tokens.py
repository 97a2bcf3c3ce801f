# mypy: ignore-errors
"""Codes with a scale per token in the fused kernel: scores of levels, sums of values of uniform codes and of levels, means."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import code_bytes, nibble_step, page_operand, page_words, unit
from kvfold.kernels.common._registers import _replace, _zero4
from kvfold.kernels.common._softmax import _lighten
from kvfold.kernels.common._warp import load_matrix4, load_shared4f, mma, mul_half2, store_shared4, unpack_half2
from kvfold.kernels.fold._sums import _plain_mean, _sums
from kvfold.kernels.fragments._codes import level_operands, level_tile, level_words


@gluon.jit
def _scored(accs, a, q, TILE: gl.constexpr):
    """Scores of two token tiles, one channel tile further."""
    acc = mma(a[0], a[1], a[2], a[3], q[TILE // 2 * 2], q[TILE // 2 * 2 + 1], accs[TILE % 2], False)
    return _replace(accs, TILE % 2, acc)


@gluon.jit
def _summed(accs, a, w, BLOCK: gl.constexpr, TILE: gl.constexpr):
    """Sums of channel tiles, one token tile of a block further."""
    B: gl.constexpr = 4 * BLOCK + 2 * (TILE % 2)
    return _replace(accs, TILE // 2, mma(a[0], a[1], a[2], a[3], w[B], w[B + 1], accs[TILE // 2], False))


@gluon.jit
def level_scores(
    base, lane, q, bias, factor, left, D: gl.constexpr, BITS: gl.constexpr, TABLE: gl.constexpr, NB: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens: 2 NB accumulators."""
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:  # of tokens g and g + 8 of four tiles, as pairs
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, SCALES + 64 * j, True)
        words = level_words(base, lane, j * code_bytes(D, BITS), D, BITS)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        accs = (_zero4(lane), _zero4(lane))
        for w in gl.static_range(D // 32):
            for half in gl.static_range(2):
                a = level_operands(words, (), w, half, TABLE)
                for i in gl.static_range(2):
                    accs = _scored(accs, a[i], q, level_tile(D, w, half, i))
        for tt in gl.static_range(2):
            low, high = unpack_half2(scale[2 * (j % 2) + tt])
            e0 = bias[0] + hidden
            e1 = bias[1] + hidden
            x = accs[tt]
            scores = scores + (
                (
                    gl.fma(x[0], low * factor[0], e0),
                    gl.fma(x[1], low * factor[1], e1),
                    gl.fma(x[2], high * factor[0], e0),
                    gl.fma(x[3], high * factor[1], e1),
                ),
            )
    return scores


@gluon.jit
def sign_scores(
    base, lane, q, start, bias, factor, left, WIDTH: gl.constexpr, BITS: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens, whose codes are uniform: 2 NB accumulators."""
    STEP: gl.constexpr = nibble_step(WIDTH, BITS)
    SCALES: gl.constexpr = NB * code_bytes(WIDTH, BITS)
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, SCALES + 64 * j, True)
        words = page_words(base, lane, j * code_bytes(WIDTH, BITS), WIDTH, BITS)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        accs = (_zero4(lane), _zero4(lane))
        for c in gl.static_range(WIDTH // 16):
            for tt in gl.static_range(2):
                a = page_operand(words, 2 * c + tt, WIDTH, BITS)
                accs = _replace(accs, tt, mma(a[0], a[1], a[2], a[3], q[2 * c], q[2 * c + 1], accs[tt], False))
        for tt in gl.static_range(2):
            low, high = unpack_half2(scale[2 * (j % 2) + tt])
            f0 = factor[0] * 0.5 ** (tt * STEP)
            f1 = factor[1] * 0.5 ** (tt * STEP)
            s0 = start[0] * 2.0 ** (tt * STEP)
            s1 = start[1] * 2.0 ** (tt * STEP)
            e0 = bias[0] + hidden
            e1 = bias[1] + hidden
            x = accs[tt]
            scores = scores + (
                (
                    gl.fma((x[0] + s0) * f0, low, e0),
                    gl.fma((x[1] + s1) * f1, low, e1),
                    gl.fma((x[2] + s0) * f0, high, e0),
                    gl.fma((x[3] + s1) * f1, high, e1),
                ),
            )
    return scores


@gluon.jit
def token_values(
    base, lane, p, total, factor, out, since, D: gl.constexpr, BITS: gl.constexpr, TABLE: gl.constexpr, NB: gl.constexpr,
    AT: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Sums of values in the units of codes, and of probabilities, a stage further. TABLE: of levels; empty for uniform codes.

    ``since``: sums of probabilities since the page began, and what sums before it have been multiplied with.
    """
    CT: gl.constexpr = D // 16
    MIDDLE: gl.constexpr = ((1 << BITS) - 1) / 2
    STEP: gl.constexpr = nibble_step(D, BITS)
    f0 = factor[0]
    f1 = factor[1]
    p0, p1 = _sums(p, lane, 0, 2 * NB, 1)
    new = (gl.fma(total[0], f0, p0), gl.fma(total[1], f1, p1))
    since = (gl.fma(since[0], f0, p0), gl.fma(since[1], f1, p1), since[2] * f0, since[3] * f1)
    scale = ()
    for j in gl.static_range(NB):  # of tokens 2t and 2t + 1 of eight, as pairs
        scale = scale + load_matrix4(base + lane // 8 * 16, AT + SCALES + 64 * j, False)
    w = ()
    for i in gl.static_range(4 * NB):
        w = w + (mul_half2(p[i], scale[i]),)
    accs = ()
    if TABLE == "":
        z0, z1 = _sums(w, lane, 0, 2 * NB, 1)
        for ct in gl.static_range(CT):
            y0 = z0 * (-MIDDLE * unit(D, BITS, ct))
            y1 = z1 * (-MIDDLE * unit(D, BITS, ct))
            x = out[ct]
            accs = accs + ((gl.fma(x[0], f0, y0), gl.fma(x[1], f1, y1), gl.fma(x[2], f0, y0), gl.fma(x[3], f1, y1)),)
        for j in gl.static_range(NB):
            words = page_words(base, lane, AT + j * code_bytes(D, BITS), D, BITS)
            for tt in gl.static_range(2):
                b0 = _lighten(w[4 * j + 2 * tt], lane, tt * STEP)
                b1 = _lighten(w[4 * j + 2 * tt + 1], lane, tt * STEP)
                for ct in gl.static_range(CT):
                    a = page_operand(words, 2 * ct + tt, D, BITS)
                    accs = _replace(accs, ct, mma(a[0], a[1], a[2], a[3], b0, b1, accs[ct], False))
    else:
        for ct in gl.static_range(CT):
            x = out[ct]
            accs = accs + ((x[0] * f0, x[1] * f1, x[2] * f0, x[3] * f1),)
        for j in gl.static_range(NB):
            words = level_words(base, lane, AT + j * code_bytes(D, BITS), D, BITS)
            for v in gl.static_range(D // 32):
                for half in gl.static_range(2):
                    a = level_operands(words, (), v, half, TABLE)
                    for i in gl.static_range(2):
                        accs = _summed(accs, a[i], w, j, level_tile(D, v, half, i))
    return accs, new, since


@gluon.jit
def take_means(base, lane, since, D: gl.constexpr, AT: gl.constexpr, MEANS: gl.constexpr):
    """Add a page's mean, times its probabilities, to the sums of means, which wait in shared memory: in registers they would
    cost warps. Returns ``since`` of a page that begins."""
    mean = _plain_mean(base, lane, D, AT)
    for ct in gl.static_range(D // 16):
        at = base + (MEANS + 512 * ct) + lane * 16
        x = load_shared4f(at)
        m = mean[ct]
        store_shared4(
            at, gl.fma(x[0], since[2], m[0] * since[0]), gl.fma(x[1], since[3], m[0] * since[1]),
            gl.fma(x[2], since[2], m[2] * since[0]), gl.fma(x[3], since[3], m[2] * since[1]),
        )  # fmt: skip
    z = _zero4(lane)[0]
    return z, z, z + 1.0, z + 1.0


@gluon.jit
def no_means(base, lane, D: gl.constexpr, MEANS: gl.constexpr):
    """Sums of means before any token."""
    z = _zero4(lane)[0]
    for ct in gl.static_range(D // 16):
        store_shared4(base + (MEANS + 512 * ct) + lane * 16, z, z, z, z)


@gluon.jit
def with_means(out, base, lane, D: gl.constexpr, MEANS: gl.constexpr):
    """Sums of values and of means."""
    full = ()
    for ct in gl.static_range(D // 16):
        x = out[ct]
        y = load_shared4f(base + (MEANS + 512 * ct) + lane * 16)
        full = full + ((x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]),)
    return full
