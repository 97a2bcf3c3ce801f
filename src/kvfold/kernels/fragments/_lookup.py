# mypy: ignore-errors
"""Levels with constants per channel or a range per token, some elements in fp16 in their place, and keys before RoPE (KVQuant).

A key is ``center + spread * level``, which one fp16 multiply-add makes of an operand's pair. Elements that are stored apart are
laid out in a warp's scratch as operands lie, zeros but for them, and replace what a lane made. Then a key is rotated by its
place in the page, with its tile's cosines and sines as operands lie; the query was rotated back by the page's position.

Roundings to fp16 are what errors are made of. Those of a rotated query would be a whole page's, so it is an operand in two
parts, which share the eight columns of a product: four query rows, and what fp16 leaves of them.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import code_bytes
from kvfold.kernels.common._registers import ONES, _replace, _zero4
from kvfold.kernels.common._warp import (
    fma_half2,
    high_halves,
    load_fragment,
    load_shared,
    load_shared4f,
    low_halves,
    mma,
    mul_half2,
    negative_half2,
    pack_half2,
    shuffle_xor,
    store_shared2,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fragments._codes import level_operands, level_words
from kvfold.kernels.fragments._mixed import _store_short

PLACES_BYTES = gl.constexpr(8192)  # a block of 32 tokens and 128 channels in fp16


@gluon.jit
def load_outlier(where, value, active):
    """An element's number in its block, and above it its value: 16 bits each; -1 in lanes that are not ``active``."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 a, b; setp.ne.s32 p, $3, 0; mov.b16 a, 0xFFFF; mov.b16 b, 0xFFFF;"
        " @p ld.global.b16 a, [$1]; @p ld.global.b16 b, [$2]; mov.b32 $0, {a, b}; }",
        "=r,l,l,r",
        [where, value, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_outliers(where, value, lane, block, valid, COUNT: gl.constexpr, NB: gl.constexpr):
    """A lane's elements of NB blocks from number ``block`` on: two of each."""
    out = ()
    for j in gl.static_range(NB):
        for i in gl.static_range(2):
            number = lane + 32 * i
            at = ((block + j).to(gl.int64) * COUNT + number) * 2
            out = out + (load_outlier(where + at, value + at, ((number < COUNT) & (j < valid)).to(gl.int32)),)
    return out


@gluon.jit
def _replaced(x, outlier):
    """``outlier``, in halves where it is not 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 m, z; mov.b32 z, 0; set.ne.u32.f16x2 m, $2, z; lop3.b32 $0, $1, m, $2, 0xBA; }",
        "=r,r,r",
        [x, outlier],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _element(word, VALUE: gl.constexpr):
    """Token and channel of an element, whether there is one, and where it lies in the scratch."""
    number = word & 0xFFFF
    token = number >> 7
    channel = number & 127
    if VALUE:
        row = channel
        column = token
        tile = (token >> 4 & 1) * 8 + (channel >> 4)
    else:
        row = token
        column = channel
        tile = (token >> 4 & 1) * 8 + (channel >> 4)
    place = tile * 512 + ((row & 7) * 4 + (column >> 1 & 3)) * 16
    place = place + ((row >> 3 & 1) + 2 * (column >> 3 & 1)) * 4 + (column & 1) * 2
    return token, number < 4096, place


@gluon.jit
def _seen(value):
    """fp16 in the low half, the smallest number for 0."""
    return gl.where((value & 0x7FFF) == 0, 1, value)


@gluon.jit
def clear_places(scratch, lane):
    """Nothing is replaced."""
    for i in gl.static_range(32):
        store_shared2(scratch + 256 * i + lane * 8, lane * 0, lane * 0)


@gluon.jit
def _own_part(x, y, lane):
    """A pair as an operand's columns 0 to 3 have it; in columns 4 to 7 what fp16 leaves of it."""
    near = pack_half2(x, y, False)
    back = unpack_half2(near)
    return gl.where(lane < 16, near, pack_half2(x - back[0], y - back[1], False))


@gluon.jit
def rotated_queries(far, angles, lane):
    """Queries (a lane's address in shared memory; columns 4 to 7 have those of 0 to 3) rotated back by :func:`page_angles`, in
    two parts: operand pairs of eight channel tiles."""
    at = angles + lane % 4 * 16
    first = ()
    second = ()
    for c in gl.static_range(4):
        for h in gl.static_range(2):
            turn = load_shared4f(at + (128 * c + 64 * h))
            a = unpack_half2(load_shared(far, 256 * c + 4 * h, 1)[0])
            b = unpack_half2(load_shared(far, 256 * (c + 4) + 4 * h, 1)[0])
            first = first + (_own_part(a[0] * turn[0] + b[0] * turn[1], a[1] * turn[2] + b[1] * turn[3], lane),)
            second = second + (_own_part(b[0] * turn[0] - a[0] * turn[1], b[1] * turn[2] - a[1] * turn[3], lane),)
    return first + second


@gluon.jit
def _both_parts(x):
    """Products with both parts of the queries together."""
    return x + shuffle_xor(x, 2)


@gluon.jit
def _key_pair(acc, a, b, q, consts, places, table, C: gl.constexpr, PLACE: gl.constexpr, TABLE: gl.constexpr):
    """Scores of a token tile, channel tiles C and C + 4 further: levels to keys, replaced, rotated."""
    x = load_shared(consts, 64 * C, 4)
    y = load_shared(consts, 64 * (C + 4), 4)
    o = load_shared(places, PLACE + 512 * C, 4)
    u = load_shared(places, PLACE + 512 * (C + 4), 4)
    cos = load_fragment(table, TABLE)
    sin = load_fragment(table, TABLE + 512)
    first = ()
    second = ()
    for r in gl.static_range(4):
        k = _replaced(fma_half2(a[r], x[r // 2 * 2], x[r // 2 * 2 + 1]), o[r])
        m = _replaced(fma_half2(b[r], y[r // 2 * 2], y[r // 2 * 2 + 1]), u[r])
        first = first + (fma_half2(k, cos[r], negative_half2(mul_half2(m, sin[r]))),)
        second = second + (fma_half2(m, cos[r], mul_half2(k, sin[r])),)
    acc = mma(first[0], first[1], first[2], first[3], q[2 * C], q[2 * C + 1], acc, False)
    return mma(second[0], second[1], second[2], second[3], q[2 * C + 8], q[2 * C + 9], acc, False)


@gluon.jit
def constant_scores(
    base, places, consts, table, lane, q, outliers, held, up, left, BITS: gl.constexpr, TABLE: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Scores of a stage's tokens: 2 NB accumulators. ``consts`` is a lane's address of (spread, center) pairs, ``table`` of
    cosines and sines of the stage's first tile."""
    at = places + lane * 16
    scores = ()
    for j in gl.static_range(NB):
        for i in gl.static_range(2):
            _token, there, place = _element(outliers[2 * j + i], False)
            value = _seen(outliers[2 * j + i] >> 16 & 0xFFFF)
            _store_short(places + place, value, there.to(gl.int32))
        warp_sync(lane)
        words = level_words(base, lane, j * code_bytes(128, BITS), 128, BITS)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        for tt in gl.static_range(2):
            acc = _zero4(lane)
            for odd in gl.static_range(2):
                a = level_operands(words, held, 2 * tt + odd, 0, TABLE)
                b = level_operands(words, held, 2 * tt + odd, 1, TABLE)
                for i in gl.static_range(2):
                    acc = _key_pair(
                        acc, a[i], b[i], q, consts, at, table, odd + 2 * i, 4096 * tt,
                        1024 * (4 * (2 * j + tt) + odd + 2 * i),
                    )  # fmt: skip
            scores = scores + (
                (
                    gl.fma(_both_parts(acc[0]), up[0], hidden),
                    gl.fma(_both_parts(acc[1]), up[1], hidden),
                    gl.fma(_both_parts(acc[2]), up[0], hidden),
                    gl.fma(_both_parts(acc[3]), up[1], hidden),
                ),
            )
        warp_sync(lane)
        for i in gl.static_range(2):
            _token, there, place = _element(outliers[2 * j + i], False)
            _store_short(places + place, lane * 0, there.to(gl.int32))
        warp_sync(lane)
    return scores


@gluon.jit
def _value_tile(accs, a, places, w0, w1, C: gl.constexpr, PLACE: gl.constexpr):
    o = load_shared(places, PLACE + 512 * C, 4)
    acc = mma(
        _replaced(a[0], o[0]),
        _replaced(a[1], o[1]),
        _replaced(a[2], o[2]),
        _replaced(a[3], o[3]),
        w0,
        w1,
        accs[C],
        False,
    )
    return _replace(accs, C, acc)


@gluon.jit
def range_values(
    base, places, lane, p, factor, out, side, outliers, held, middles, BITS: gl.constexpr, TABLE: gl.constexpr,
    NB: gl.constexpr, AT: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Sums of values, whose tokens have a middle and half of their range, of probabilities, and of middles, a stage further."""
    t = lane % 4
    one = lane * 0 + ONES
    extra = (_zero4(lane), _zero4(lane))
    accs = ()
    for c in gl.static_range(8):
        x = out[c]
        accs = accs + ((x[0] * factor[0], x[1] * factor[1], x[2] * factor[0], x[3] * factor[1]),)
    at = places + lane * 16
    for j in gl.static_range(NB):
        for i in gl.static_range(2):
            token, there, place = _element(outliers[2 * j + i], True)
            middle, half = unpack_half2(load_shared(base + gl.minimum(token, 31) * 4, AT + META + 128 * j, 1)[0])
            value, _high = unpack_half2(outliers[2 * j + i] >> 16 & 0xFFFF)
            # in the levels' units
            x = gl.where(half == 0.0, 0.0, (value - middle) / gl.where(half == 0.0, 1.0, half))
            x = gl.minimum(gl.maximum(x, -65504.0), 65504.0)
            _store_short(places + place, _seen(pack_half2(x, x, False) & 0xFFFF), there.to(gl.int32))
        warp_sync(lane)
        words = level_words(base, lane, AT + j * code_bytes(128, BITS), 128, BITS)
        for tt in gl.static_range(2):
            x = load_shared(base + 8 * t, AT + META + 128 * j + 64 * tt, 2)
            y = load_shared(base + 8 * t, AT + META + 128 * j + 64 * tt + 32, 2)
            p0 = p[4 * j + 2 * tt]
            p1 = p[4 * j + 2 * tt + 1]
            acc = mma(low_halves(x[0], x[1]), one, low_halves(y[0], y[1]), one, p0, p1, extra[tt], False)
            extra = _replace(extra, tt, acc)
            w0 = mul_half2(p0, high_halves(x[0], x[1]))
            w1 = mul_half2(p1, high_halves(y[0], y[1]))
            for odd in gl.static_range(2):
                for half_word in gl.static_range(2):
                    a = level_operands(words, held, 2 * tt + odd, half_word, TABLE)
                    for i in gl.static_range(2):
                        accs = _value_tile(accs, a[i], at, w0, w1, odd + 4 * half_word + 2 * i, 4096 * tt)
        warp_sync(lane)
        for i in gl.static_range(2):
            _token, there, place = _element(outliers[2 * j + i], True)
            _store_short(places + place, lane * 0, there.to(gl.int32))
        warp_sync(lane)
    middles = (
        gl.fma(middles[0], factor[0], extra[0][0] + extra[1][0]),
        gl.fma(middles[1], factor[1], extra[0][1] + extra[1][1]),
    )
    s = side[0]
    side = (
        (
            s[0],
            s[1],
            gl.fma(s[2], factor[0], extra[0][2] + extra[1][2]),
            gl.fma(s[3], factor[1], extra[0][3] + extra[1][3]),
        ),
    )
    return accs, side, middles


@gluon.jit
def with_middles(out, middles):
    """Sums of values with those of their middles."""
    full = ()
    for c in gl.static_range(8):
        x = out[c]
        full = full + ((x[0] + middles[0], x[1] + middles[1], x[2] + middles[0], x[3] + middles[1]),)
    return full
