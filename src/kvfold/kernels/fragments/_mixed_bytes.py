# mypy: ignore-errors
"""The loop over pages of :mod:`kvfold.kernels.fragments._decode` for two precisions (ZipCache at 2 and 4 bits), keys and
values, for up to four query rows of a KV head.

Both products are of bytes, as in :mod:`kvfold.kernels.fold._bytes`: a query times ranges of channels, and a probability times a
token's range, is a number of 16 bits in two columns. Low bits of salient tokens are operands as they lie: of keys a token's row
of 16 bytes, of values the column of eight channels that a transposing load gives a lane. So their sums of values are of other
channels than those of codes, 8g to 8g + 7 and 64 further, and wait in registers of their own to the end.

In units of a fifteenth of a range a salient token is four codes and its low bits, another one five codes.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import code_bytes, nibble_weight, page_words
from kvfold.kernels.common._registers import _replace, _two, _zero4
from kvfold.kernels.common._softmax import LOWEST
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    copy_commit,
    copy_wait,
    either_bytes,
    exp2_fast,
    load_matrix4,
    load_shared,
    look_up,
    mma_bytes,
    reciprocal,
    shuffle_xor,
    store_shared1,
    store_shared4,
    transpose8,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fold._bytes import (
    BIG,
    BIG_BITS,
    EVEN,
    FULL,
    MAGIC,
    MAGIC_BITS,
    ODD,
    PARTS,
    _byte_mask,
    _byte_pairs,
    _product,
    _whole,
)
from kvfold.kernels.fold._sums import _plain_mean
from kvfold.kernels.fragments._codes import fetch_side
from kvfold.kernels.fragments._mixed import _before, _ones_of, _store_short, rank_tiles
from kvfold.kernels.fragments._queries import norm_words

ROW = gl.constexpr(144)  # bytes from column to column of a query's bytes: lanes of a warp then use all banks
FIRST = gl.constexpr("0x6420")  # even bytes of two words, those of the first one first
SECOND = gl.constexpr("0x7531")
UNIT = gl.constexpr(8.0 / 15)  # of what values' operands and codes multiply to


@gluon.constexpr_function
def row_pitch(salient):
    """Bytes from query row to query row of what salient tokens weigh: 16 bits each, of 32 tokens at a time."""
    return 64 * ((salient + 31) // 32) + 16


@gluon.constexpr_function
def byte_scratch(salient):
    """Of a warp: bytes of queries and scores of salient tokens; what they weigh."""
    return 8 * ROW.value + 256 * rank_tiles(salient), 4 * row_pitch(salient)


@gluon.jit
def own_queries(far, lane, D: gl.constexpr):
    """Queries of row t, channels g and g + 8 of each tile, from operands that have row h in columns 2h and 2h + 1."""
    q = ()
    for c in gl.static_range(D // 16):
        for x in gl.static_range(2):
            word = transpose8(load_shared(far + 4 * x, 256 * c, 1)[0])
            q = q + (unpack_half2(word)[0],)
    return q


@gluon.jit
def _all_sum(x):
    """Sums over g."""
    x = x + shuffle_xor(x, 4)
    x = x + shuffle_xor(x, 8)
    return x + shuffle_xor(x, 16)


@gluon.jit
def _all_max(x):
    x = gl.maximum(x, shuffle_xor(x, 4))
    x = gl.maximum(x, shuffle_xor(x, 8))
    return gl.maximum(x, shuffle_xor(x, 16))


@gluon.jit
def mixed_queries(base, scratch, lane, own, D: gl.constexpr, META: gl.constexpr):
    """Queries times ranges of a page's channels as operands of bytes, for codes and for low bits; their unit; and the sum of
    queries times zeros."""
    HALF: gl.constexpr = D // 32
    g = lane // 4
    t = lane % 4
    zero = _zero4(lane)[0]
    big = zero
    x = ()
    for c in gl.static_range(D // 16):
        for h in gl.static_range(2):
            low, span = unpack_half2(load_shared(base + 4 * g, META + 64 * c + 32 * h, 1)[0])
            zero = gl.fma(own[2 * c + h], low, zero)
            y = own[2 * c + h] * span
            big = gl.maximum(big, gl.abs(y))
            x = x + (y,)
    zero = _all_sum(zero)
    big = gl.maximum(_all_max(big), 1e-9)
    s = reciprocal(big) * FULL
    q = ()
    for j in gl.static_range(HALF):
        for h in gl.static_range(2):
            r0 = gl.fma(x[2 * j + h], s, MAGIC + 128.0)
            r1 = gl.fma(x[2 * (j + HALF) + h], s, MAGIC + 128.0)
            q = q + (transpose8(_byte_pairs(r0, r1)),)
    for j in gl.static_range(HALF):
        a, b = _two(q, j)
        store_shared1(scratch + g * ROW + 4 * t + 16 * j, either_bytes(a, b, FIRST))
        store_shared1(scratch + g * ROW + 4 * t + (16 * j + D // 2), either_bytes(a, b, SECOND))
    warp_sync(lane)
    low = ()
    near = load_shared(scratch + g * ROW + 16 * t, 0, 4)
    away = load_shared(scratch + g * ROW + 16 * t, D // 2, 4)
    for f in gl.static_range(4):
        if f % 2 == 0:
            low = low + (either_bytes(near[f // 2], near[2 + f // 2], EVEN),)
            low = low + (either_bytes(away[f // 2], away[2 + f // 2], EVEN),)
        else:
            low = low + (either_bytes(near[f // 2], near[2 + f // 2], ODD),)
            low = low + (either_bytes(away[f // 2], away[2 + f // 2], ODD),)
    return q, low, big * (256.0 / FULL), zero


@gluon.jit
def _field(a0, a1, a2, a3, b0, b1, acc, K: gl.constexpr, SIGNED: gl.constexpr):
    """acc and the product of the two bits from bit K of bytes on."""
    MASK: gl.constexpr = _byte_mask(2, K)
    return mma_bytes(a0 & MASK, a1 & MASK, a2 & MASK, a3 & MASK, b0, b1, acc, SIGNED)


@gluon.jit
def _quarters(a, b, accs):
    """Two sums further: a product with fields 0 and 1 of bytes, and one with fields 2 and 3, which count 16 times as much.
    ``a``: four words; ``b``: operand pairs of the fields."""
    out = ()
    for s in gl.static_range(2):
        acc = _field(a[0], a[1], a[2], a[3], b[4 * s], b[4 * s + 1], accs[s], 4 * s, True)
        acc = _field(a[0] >> 2, a[1] >> 2, a[2] >> 2, a[3] >> 2, b[4 * s + 2], b[4 * s + 3], acc, 4 * s, True)
        out = out + (acc,)
    return out


@gluon.jit
def _rank(which, seen, mine, GROUP: gl.constexpr, SALIENT: gl.constexpr):
    """A token's place among salient ones: number g of the word's group of eight."""
    rank = seen + _ones_of(which & (_before(GROUP) | (mine << (4 * GROUP))))
    return gl.minimum(rank, SALIENT - 1)


@gluon.jit
def _masks(lane):
    """Bits of a group of eight tokens: those before number g, and where its own is."""
    g = lane // 4
    return (((1 << (g >> 1)) - 1) * 0x10001) | ((g & 1) << (g >> 1)), (g & 1) * 16 + (g >> 1)


@gluon.jit
def mixed_byte_scores(
    base, scratch, lane, q, low, left, D: gl.constexpr, SALIENT: gl.constexpr, NB: gl.constexpr, WHICH: gl.constexpr,
    LOW: gl.constexpr,
):  # fmt: skip
    """Scores of row t, tokens g and g + 8 of the 2 NB tiles of 16, without zeros: in units of a fifteenth of queries' own."""
    g = lane // 4
    t = lane % 4
    none = lane * 0
    x = none + MAGIC_BITS
    begin = ((x, x, x, x), (x, x, x, x))
    at = base + (lane % 16) * 32 + lane // 16 * 16
    for tile in gl.static_range(rank_tiles(SALIENT)):
        sums = _quarters(load_matrix4(at, LOW + 512 * tile, False), low, begin)
        store_shared1(scratch + g * 16 + 4 * t + 256 * tile, as_int(_whole(sums, 0, 2)))
        store_shared1(scratch + g * 16 + 4 * t + (256 * tile + 128), as_int(_whole(sums, 2, 2)))
    which = load_shared(base, WHICH, 4)
    mine, place = _masks(lane)
    seen = none
    accs = ()
    for j in gl.static_range(NB):
        words = page_words(base, lane, j * code_bytes(D, 2), D, 2)
        for tt in gl.static_range(2):
            w = (words[4 * tt], words[4 * tt + 1], words[4 * tt + 2], words[4 * tt + 3])
            accs = accs + (_quarters(w, q, begin),)
    warp_sync(lane)
    scores = ()
    for j in gl.static_range(NB):
        hidden = gl.where(left > j, 0.0, float("-inf"))
        for i in gl.static_range(4):
            rank = _rank(which[j], seen, mine, i, SALIENT)
            more = as_float(load_shared(scratch + rank * 16 + 4 * t, 0, 1)[0])
            x = _whole(accs[2 * j + i // 2], 2 * (i % 2), 2)
            salient = ((which[j] >> (place + 4 * i)) & 1) != 0
            scores = scores + (gl.where(salient, gl.fma(x, 4.0, more), x * 5.0) + hidden,)
        seen = seen + _ones_of(which[j])
    return scores


@gluon.jit
def mixed_byte_weights(
    base, scratch, lane, scores, unit, bias, SALIENT: gl.constexpr, NB: gl.constexpr, META: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """As :func:`kvfold.kernels.fold._bytes.byte_weights`, with tokens' ranges times 5/8, or 4/8 of salient tokens, whose
    weights are left in ``scratch``; also sums of probabilities times zeros."""
    g = lane // 4
    t = lane % 4
    meta = ()
    big = bias * 0.0 + 2.0**-14
    m = scores[0]
    for i in gl.static_range(4 * NB):
        word = load_shared(base + 4 * g, META + 32 * i, 1)[0]
        meta = meta + (word,)
        big = gl.maximum(big, unpack_half2(word)[1])
        m = gl.maximum(m, scores[i])
    room = (142 - (as_int(_all_max(big)) >> 23)).to(gl.float32)  # largest range times 2^room is below 2^16
    top = gl.maximum(gl.fma(_all_max(m), unit, bias), -1.0e30) - room
    bias = bias - top
    which = load_shared(base, WHICH, 4)
    mine, place = _masks(lane)
    seen = lane * 0
    to = scratch + t * row_pitch(SALIENT)
    p = ()
    total = bias * 0.0
    zeros = total
    for j in gl.static_range(NB):
        own = ()
        for i in gl.static_range(4):
            low, span = unpack_half2(meta[4 * j + i])
            a = exp2_fast(gl.fma(scores[4 * j + i], unit, bias))
            total = total + a
            zeros = gl.fma(a, low, zeros)
            salient = ((which[j] >> (place + 4 * i)) & 1) != 0
            number = as_int(gl.fma(a, span * gl.where(salient, 0.5, 0.625), BIG))
            rank = _rank(which[j], seen, mine, i, SALIENT)
            _store_short(to + rank * 2, number, salient.to(gl.int32))
            own = own + (number,)
        for tt in gl.static_range(2):
            p = p + (transpose8(either_bytes(own[2 * tt], own[2 * tt + 1], PARTS)),)
        seen = seen + _ones_of(which[j])
    warp_sync(lane)
    return p, top, _all_sum(total), _all_sum(zeros)


@gluon.jit
def mixed_byte_values(
    base, scratch, norm, lane, p, before, now, zeros, out, more, D: gl.constexpr, SALIENT: gl.constexpr, NB: gl.constexpr,
    AT: gl.constexpr, LOW: gl.constexpr,
):  # fmt: skip
    """Sums of values of row t, a page further: of codes and zeros (channels g and g + 8 of each tile), and of low bits
    (channels 8g to 8g + 7, and 64 further). Norms of the page's channels are at ``norm``."""
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    none = lane * 0
    x = none + BIG_BITS
    begin = (x, x, x, x)
    accs = ()
    for _ct in gl.static_range(CT):
        accs = accs + (begin,)
    for j in gl.static_range(NB):
        words = page_words(base, lane, AT + j * code_bytes(D, 2), D, 2)
        ready = ()
        for i in gl.static_range(len(words) // 4):
            a = words[4 * i]
            b = words[4 * i + 1]
            c = words[4 * i + 2]
            d = words[4 * i + 3]
            ready = ready + (
                either_bytes(a, c, EVEN), either_bytes(b, d, EVEN), either_bytes(a, c, ODD), either_bytes(b, d, ODD),
            )  # fmt: skip
        for ct in gl.static_range(CT):
            acc = _product(
                ready, 2 * (ct % (CT // 2)), 0, 1, 2 * (ct // (CT // 2)), p[2 * j], p[2 * j + 1], accs[ct], D, 2, False
            )
            accs = _replace(accs, ct, acc)
    lows = ()
    for _i in gl.static_range(8):
        lows = lows + (begin,)
    part = 0x6240 + (1 - g % 2) * 0x1111  # high bytes for even columns
    row = scratch + g // 2 * row_pitch(SALIENT) + 4 * t
    at = base + (lane % 16) * 32 + lane // 16 * 16
    for s in gl.static_range((SALIENT + 31) // 32):
        b = ()
        a = ()
        for u in gl.static_range(2):
            x = load_shared(row, 64 * s + 32 * u, 1)[0]
            y = load_shared(row, 64 * s + 32 * u + 16, 1)[0]
            b = b + (look_up(x, y, part),)
            m = load_matrix4(at, AT + LOW + 1024 * s + 512 * u, True)
            a = a + (either_bytes(m[0], m[1], EVEN), either_bytes(m[2], m[3], EVEN))
            a = a + (either_bytes(m[0], m[1], ODD), either_bytes(m[2], m[3], ODD))
        for i in gl.static_range(8):
            acc = _field(
                a[i // 4 * 2], a[i // 4 * 2 + 1], a[i // 4 * 2 + 4], a[i // 4 * 2 + 5], b[0], b[1], lows[i], 2 * (i % 4), False
            )  # fmt: skip
            lows = _replace(lows, i, acc)
    norms = _plain_mean(norm, lane, D, 0)
    sums = ()
    for ct in gl.static_range(CT):
        for h in gl.static_range(2):
            x = gl.fma(_bare(accs[ct], h), UNIT * 256.0 / (1 << nibble_weight(D, 2, ct % (CT // 2))), zeros) * now
            sums = sums + (gl.fma(out[2 * ct + h], before, x * norms[ct][2 * h]),)
    rest = ()
    for h in gl.static_range(2):
        words = load_shared(norm + 16 * g, D * h, 4)
        for i in gl.static_range(8):
            x = _bare(lows[i], h) * (now * (UNIT * 64.0 / (1 << (2 * (i % 4)))))
            rest = rest + (gl.fma(more[8 * h + i], before, x * unpack_half2(words[i // 2])[i % 2]),)
    return sums, rest


@gluon.jit
def _bare(acc, H: gl.constexpr):
    """Integer sums that began at BIG, high and low, in units of the high one."""
    return gl.fma(as_float(acc[2 * H + 1]), 1 / 256, as_float(acc[2 * H]) - (BIG * (1 + 1 / 256)))


@gluon.jit
def attend_mixed(
    base0, lane, warp, lo, hi, pages, blocks, stored, block0, pages0, far, up, D: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, PLACES: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Attention of four query rows over pages ``lo`` to ``hi`` of ``pages``, which the program's warps share; of ``blocks``
    blocks the scores count.

    ``stored``: addresses of codes, zeros and ranges, masks and low bits of keys, and the same and norms of values;
    ``block0`` and ``pages0``: where the head's begin. ``far``: a lane's address of the queries as operands, row h in columns
    2h and 2h + 1; ``up``: what turns their products into scores. Returns maxima of row t, sums of values (channels g and
    g + 8 of each tile) and of probabilities.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    K_AT: gl.constexpr = PLACES[0]
    V_IN: gl.constexpr = PLACES[1]
    V_AT: gl.constexpr = PLACES[2]
    K_SALIENT: gl.constexpr = K[9]
    V_SALIENT: gl.constexpr = V[9]
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    base = base0 + warp * PLACES[5]
    norm = base + PLACES[3]
    near = base + PLACES[4]  # queries' bytes, and scores of salient tokens
    weights = base + PLACES[6]
    left = gl.where(count > 0, blocks - first * NB, 0)
    kc, km, ka, kp = stored[0]
    vc, vm, va, vp, vn = stored[1]
    fetch_side(
        base, lane, kc, km, ka, kp, kc, block0 + first * NB, pages0[0] + first, left, left, 0, K_AT, 4, D, D, 2, 0, 0,
        K_SALIENT, 0, 0, NB, 0,
    )  # fmt: skip
    copy_commit(lane)
    fetch_side(
        base, lane, vc, vm, va, vp, vn, block0 + first * NB, pages0[1] + first, left, left, left, V_IN, 4, D, D, 2, 0, 0,
        V_SALIENT, 0, V[5], NB, V_AT,
    )  # fmt: skip
    copy_commit(lane)
    END: gl.constexpr = 4 * row_pitch(V_SALIENT)
    for i in gl.static_range((END + 127) // 128):  # what no salient token weighs stays zero
        store_shared1(gl.minimum(weights + 128 * i + 4 * lane, weights + (END - 4)), lane * 0)
    own = own_queries(far, lane, D)
    zero = _zero4(lane)[0]
    top = zero + LOWEST
    total = zero
    out = ()
    for _i in gl.static_range(2 * CT):
        out = out + (zero,)
    more = out
    for i in range(each):
        following = first + i + 1
        left = gl.where(i < count, blocks - (following - 1) * NB, 0)
        next_left = gl.where(i + 1 < count, blocks - following * NB, 0)
        copy_wait(lane, 1)  # keys of this page
        q, low, unit, bias = mixed_queries(base, near, lane, own, D, K_AT[0])
        scores = mixed_byte_scores(base, near + 8 * ROW, lane, q, low, left, D, K_SALIENT, NB, K_AT[1], K_AT[2])
        warp_sync(lane)
        fetch_side(
            base, lane, kc, km, ka, kp, kc, block0 + following * NB, pages0[0] + following, next_left, next_left, 0, K_AT, 4,
            D, D, 2, 0, 0, K_SALIENT, 0, 0, NB, 0,
        )  # fmt: skip
        copy_commit(lane)
        copy_wait(lane, 1)  # values of this page
        norm_words(base, norm, lane, D, V[5], V_AT + V_IN[3], 1)
        p, page_top, page_total, zeros = mixed_byte_weights(
            base,
            weights,
            lane,
            scores,
            unit * (up * (1 / 15)),
            bias * up,
            V_SALIENT,
            NB,
            V_AT + V_IN[0],
            V_AT + V_IN[1],
        )
        new_top = gl.maximum(top, page_top)
        before = exp2_fast(top - new_top)
        share = exp2_fast(page_top - new_top)
        top = new_top
        total = gl.fma(total, before, page_total * share)
        out, more = mixed_byte_values(
            base, weights, norm, lane, p, before, share, zeros, out, more, D, V_SALIENT, NB, V_AT, V_IN[2]
        )
        warp_sync(lane)
        fetch_side(
            base, lane, vc, vm, va, vp, vn, block0 + following * NB, pages0[1] + following, next_left, next_left, next_left,
            V_IN, 4, D, D, 2, 0, 0, V_SALIENT, 0, V[5], NB, V_AT,
        )  # fmt: skip
        copy_commit(lane)
    copy_wait(lane, 0)
    return top, _with_low(base, lane, out, more, D), total


@gluon.jit
def _with_low(base, lane, out, more, D: gl.constexpr):
    """Sums of low bits, by shared memory, to those of codes."""
    AWAY: gl.constexpr = 4 * D + 16
    g = lane // 4
    to = base + lane % 4 * AWAY
    for i in gl.static_range(4):
        store_shared4(
            to + 32 * g + (16 * (i % 2) + 2 * D * (i // 2)),
            more[4 * i],
            more[4 * i + 1],
            more[4 * i + 2],
            more[4 * i + 3],
        )
    warp_sync(lane)
    sums = ()
    for ct in gl.static_range(D // 16):
        for h in gl.static_range(2):
            sums = sums + (out[2 * ct + h] + as_float(load_shared(to + 4 * g, 64 * ct + 32 * h, 1)[0]),)
    return sums
