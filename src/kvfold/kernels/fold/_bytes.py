# mypy: ignore-errors
"""Scores and sums of values of one page by products of bytes, for sets of four query rows of a KV head.

``mma.m16n8k32`` multiplies bytes: one mask makes an operand register of four codes, and half as many products do. Its eight
columns are four query rows twice. A query (or a probability) is a number of 16 bits, whose high byte is in column 2h and whose
low byte is in column 2h + 1. So lane (g, t) holds both parts of row t, of tokens (or channels) g and g + 8. Of more rows
(FOURS: sets of four), operands of codes are made once and meet those of one set after the other.

* Words of codes have channels of tile ct in even bytes and those of tile ct + D / 32 in odd ones. Words of keys are operands
  with masks alone; of values two are put together first, so that a register has one channel's codes of four tokens.
* Products are sums of integers. They begin at an integer that fp32 reads as 1.5 * 2^23 (``MAGIC``; 2^23 where no sum is
  negative): the sum is then that number's offset, and needs no conversion.
* Queries are scaled so that the largest turned channel of a page is 32,600; probabilities times scales stay below 65,536.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import _place, code_bytes, nibble_weight, page_words, scale_at
from kvfold.kernels.common._hadamard import mix_tiles
from kvfold.kernels.common._registers import _every, _kind, _query, _replace, _zero4, query_at
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    either_bytes,
    exp2_fast,
    load_matrix4,
    load_pair,
    load_shared,
    load_shared4f,
    max_half2,
    mma,
    mma_bytes,
    mul_half2,
    pack_half2,
    reciprocal,
    shuffle_xor,
    store_shared1,
    store_shared4,
    transpose8,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fold._codes import hidden_block

MAGIC = gl.constexpr(12582912.0)  # 1.5 * 2^23
MAGIC_BITS = gl.constexpr(0x4B400000)
BIG = gl.constexpr(8388608.0)  # 2^23, where sums have no sign
BIG_BITS = gl.constexpr(0x4B000000)
EVEN = gl.constexpr("0x6240")  # even bytes of two words, one after the other
ODD = gl.constexpr("0x7351")
PARTS = gl.constexpr("0x4051")  # high bytes of two numbers, low bytes of both
LOW_SIGNS = gl.constexpr(-2139095040)  # 0x80800000
FULL = gl.constexpr(32600.0)


@gluon.constexpr_function
def _byte_mask(bits, k):
    mask = (((1 << bits) - 1) << k) * 0x01010101
    return mask - (1 << 32) if mask >> 31 else mask


@gluon.constexpr_function
def sets(dim, bits):
    """Sums that keys' products are kept in. Codes of a set's tiles count at most 16 times as much as others: their queries are
    smaller by that, and would lose too many bits beyond."""
    return 2 if bits <= 2 else 1


@gluon.constexpr_function
def _lift(dim, bits, j):
    """log2 of what codes of tiles j and j + D / 32 count within their set."""
    k = nibble_weight(dim, bits, j)
    return k % 4 if bits <= 2 else k


@gluon.constexpr_function
def _set(dim, bits, j):
    return nibble_weight(dim, bits, j) // 4 if bits <= 2 else 0


@gluon.constexpr_function
def _word(dim, bits, tile):
    """The first of the four words that hold a tile's codes."""
    return 4 * _place(dim, bits, tile)[0]


@gluon.jit
def _operand(
    words, TILE: gl.constexpr, STEP: gl.constexpr, NEXT: gl.constexpr, FIRST: gl.constexpr, D: gl.constexpr,
    BITS: gl.constexpr,
):  # fmt: skip
    """A tile's codes: two words from FIRST on, and two of the next tile (NEXT) or STEP further."""
    A: gl.constexpr = _word(D, BITS, TILE) + FIRST
    B: gl.constexpr = _word(D, BITS, TILE + NEXT) + FIRST + STEP
    MASK: gl.constexpr = _byte_mask(BITS, nibble_weight(D, BITS, TILE // 2))
    return words[A] & MASK, words[A + 1] & MASK, words[B] & MASK, words[B + 1] & MASK


@gluon.jit
def products(a, b, accs, I: gl.constexpr, J: gl.constexpr, EACH: gl.constexpr, FOURS: gl.constexpr, SIGNED: gl.constexpr,
             CODES: gl.constexpr = False):  # fmt: skip
    """``accs`` with the products of one operand and pair J of every set's EACH pairs added to those from number I on."""
    for n in gl.static_range(FOURS):
        acc = mma_bytes(
            a[0], a[1], a[2], a[3], b[2 * (n * EACH + J)], b[2 * (n * EACH + J) + 1], accs[I + n], SIGNED, CODES
        )  # fmt: skip
        accs = _replace(accs, I + n, acc)
    return accs


@gluon.jit
def ask_rows(q_ptr, lane, warp, row0, column0, rows, varlen, D: gl.constexpr, R: gl.constexpr):
    """A warp's share of R query rows of D = 128 channels, fp32: of each channels 4 lane to 4 lane + 3.

    To be asked for before a kernel's first pages are: loads come back in order, and would wait for their bytes."""
    W: gl.constexpr = gl.num_warps()
    KIND: gl.constexpr = _kind(q_ptr.dtype.element_ty)
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    asked = ()
    for i in gl.static_range(R // W):
        address, live = query_at(q_ptr, row0, column0 + warp * (R // W) + i, rows, 4 * lane, varlen, D, SIZE)
        asked = asked + (load_pair(address, live, KIND) + load_pair(address + 2 * SIZE, live, KIND),)
    return asked


@gluon.jit
def leave_rows(
    asked, far, ups, lane, warp, STEP: gl.constexpr, D: gl.constexpr, E: gl.constexpr, LOOKUP: gl.constexpr = False
):  # fmt: skip
    """Leave what a warp asked for in shared memory, for all warps: of each set of four rows B operands, at ``far``, tiles 0 to
    D / 32 of row h in column 2h and the others in column 2h + 1, scaled by a power of two; and of each row and warp, from
    ``ups`` on in steps of STEP bytes, what undoes it. LOOKUP: channels of each half are in the order of
    :mod:`kvfold.kernels.fold._codebook_bytes`."""
    W: gl.constexpr = gl.num_warps()
    low = lane % 16
    if LOOKUP:
        column = low // 4 % 2 * 2
        pair = low % 4 * 2 + low // 8
    else:
        column = low % 2 * 2
        pair = low // 2
    for i in gl.static_range(len(asked)):
        a, b, c, d = asked[i]
        big = gl.maximum(gl.maximum(gl.abs(a), gl.abs(b)), gl.maximum(gl.abs(c), gl.abs(d)))
        for k in gl.static_range(5):
            big = gl.maximum(big, shuffle_xor(big, 1 << k))
        exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
        down = as_float((254 + E - exponent) << 23)
        row = warp * len(asked) + i
        to = far + row // 4 * (8 * D) + pair // 2 * 256 + (row % 4 * 8 + lane // 16 * 4 + column) * 8 + pair % 2 * 4
        store_shared1(to, pack_half2(a * down, b * down, False))
        store_shared1(to + 8, pack_half2(c * down, d * down, False))
        store_shared1(ups + lane % W * STEP + 4 * row, (exponent - E) << 23)


@gluon.jit
def turned_rows(
    q, norms, lane, matrix, D: gl.constexpr, MIX: gl.constexpr, FAR: gl.constexpr, LOOKUP: gl.constexpr = False
):  # fmt: skip
    """Queries times norms and signs, turned (without the factor): row t, channels g and g + 8 of tiles ct and ct + D / 32.

    LOOKUP: channels are in the order of :mod:`kvfold.kernels.fold._codebook_bytes`, whose tiles any rotation mixes."""
    HALF: gl.constexpr = D // 32
    address = norms + lane % 2 * D + lane // 8 % 2 * 16 + lane // 16 * 32
    m = load_shared(matrix, 0, 4)
    x = ()
    for i in gl.static_range(HALF // 2):
        norm = load_matrix4(address, 64 * i, False)
        for c in gl.static_range(2):
            b0, b1 = _query(q, 2 * i + c, FAR)
            b0 = mul_half2(b0, norm[2 * c])
            b1 = mul_half2(b1, norm[2 * c + 1])
            x = x + (mma(m[0], m[1], m[2], m[3], b0, b1, _zero4(lane), False),)
    x = mix_tiles(x, HALF, MIX if MIX <= D // 2 and not LOOKUP else D // 2)
    if MIX == D:
        mixed = ()
        for ct in gl.static_range(HALF):
            y = x[ct]
            mixed = mixed + ((y[0] + y[1], y[0] - y[1], y[2] + y[3], y[2] - y[3]),)
        x = mixed
    return x


@gluon.jit
def _byte_pairs(a, b):
    """Of two numbers of 16 bits, with 128 added, the signed bytes: a's high one, b's, a's low one, b's."""
    return either_bytes(as_int(a), as_int(b), PARTS) ^ LOW_SIGNS


@gluon.jit
def byte_query_tile(x0, x1, x2, x3, factor, D: gl.constexpr, BITS: gl.constexpr, J: gl.constexpr):
    """Operands of bytes of row t, channels g and g + 8 of tiles J and J + D / 32, times ``factor`` and what codes of the tile
    count."""
    f = factor * 0.5 ** _lift(D, BITS, J)
    r0 = gl.fma(x0, f, MAGIC + 128.0)
    r1 = gl.fma(x1, f, MAGIC + 128.0)
    r2 = gl.fma(x2, f, MAGIC + 128.0)
    r3 = gl.fma(x3, f, MAGIC + 128.0)
    return transpose8(_byte_pairs(r0, r1)), transpose8(_byte_pairs(r2, r3))


@gluon.jit
def byte_starts(q, lane, D: gl.constexpr, BITS: gl.constexpr):
    """Where products with operands of bytes begin, so that codes need no zero-point."""
    HALF: gl.constexpr = D // 32
    start = ()
    none = lane * 0
    for s in gl.static_range(sets(D, BITS)):
        acc = (none, none, none, none)
        for j in gl.static_range(HALF):
            if _set(D, BITS, j) == s:
                top = none + _byte_mask(BITS, nibble_weight(D, BITS, j))  # twice the middle
                acc = mma_bytes(top, top, top, top, q[2 * j], q[2 * j + 1], acc, True)
        high = MAGIC_BITS - (acc[0] >> 1)
        low = MAGIC_BITS - ((acc[1] >> 1) + ((acc[0] & 1) << 7))
        start = start + ((high, low, high, low),)
    return start


@gluon.jit
def largest(x, COUNT: gl.constexpr):
    """The largest size of row t in COUNT accumulators; at least 1e-3."""
    big = gl.abs(x[0][0])
    for ct in gl.static_range(COUNT):
        for e in gl.static_range(4):
            if ct + e > 0:
                big = gl.maximum(big, gl.abs(x[ct][e]))
    big = gl.maximum(big, shuffle_xor(big, 4))
    big = gl.maximum(big, shuffle_xor(big, 8))
    big = gl.maximum(gl.maximum(big, shuffle_xor(big, 16)), 1e-3)
    return big


@gluon.jit
def byte_queries(x, lane, D: gl.constexpr, BITS: gl.constexpr):
    """Turned queries as operands of bytes, where their products begin so that codes need no zero-point, and their unit."""
    HALF: gl.constexpr = D // 32
    big = largest(x, HALF)
    s = reciprocal(big) * FULL
    q = ()
    for j in gl.static_range(HALF):
        y = x[j]
        q = q + byte_query_tile(y[0], y[1], y[2], y[3], s, D, BITS, j)
    return q, byte_starts(q, lane, D, BITS), big * (256.0 / FULL)


@gluon.jit
def row_means(q, base, lane, D: gl.constexpr, AT: gl.constexpr, FOURS: gl.constexpr):
    """q . mean of the page for each set's row t: one half of its channels in rows 0 to 7, the other one in rows 8 to 15."""
    HALF: gl.constexpr = D // 32
    address = base + lane // 8 % 2 * D + lane // 16 * 16
    accs = zeros(lane, FOURS)
    for ct in gl.static_range(HALF):
        accs = mean_products(load_matrix4(address, AT + 32 * ct, False), q, accs, ct, HALF, FOURS)
    return both_halves(accs, FOURS)


@gluon.jit
def zeros(lane, COUNT: gl.constexpr):
    """So many accumulators of zeros."""
    out = ()
    for _n in gl.static_range(COUNT):
        out = out + (_zero4(lane),)
    return out


@gluon.jit
def mean_products(m, q, accs, C: gl.constexpr, HALF: gl.constexpr, FOURS: gl.constexpr):
    """``accs`` with the products of a part of the page's mean and part C of each set's queries, which lie at ``q``, added."""
    for n in gl.static_range(FOURS):
        b0, b1 = _query(q, n * HALF + C, True)
        accs = _replace(accs, n, mma(m[0], m[1], m[2], m[3], b0, b1, accs[n], False))
    return accs


@gluon.jit
def both_halves(accs, FOURS: gl.constexpr):
    """Of each set's accumulators, row t's sum of both halves of its channels."""
    out = ()
    for n in gl.static_range(FOURS):
        out = out + (accs[n][0] + accs[n][3],)
    return out


@gluon.jit
def byte_scores(
    base, lane, q, start, left, skip, D: gl.constexpr, BITS: gl.constexpr, NB: gl.constexpr, FOURS: gl.constexpr = 1,
):  # fmt: skip
    """Scores of row t without its unit: two of each of the 2 NB tiles of 16 tokens, each of all sets."""
    HALF: gl.constexpr = D // 32
    SETS: gl.constexpr = sets(D, BITS)
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:  # of tokens g and g + 8 of four tiles, as pairs
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, scale_at(D, BITS, NB) + 64 * j, True)
        words = page_words(base, lane, j * code_bytes(D, BITS), D, BITS)
        hidden = hidden_block(left, skip, j)
        for tt in gl.static_range(2):
            sums = ()
            for s in gl.static_range(SETS):
                accs = _every(start, s, SETS)
                for c in gl.static_range(HALF):
                    if _set(D, BITS, c) == s:
                        a = _operand(words, 2 * c + tt, 2, 0, 0, D, BITS)
                        accs = products(a, q, accs, 0, c, HALF, FOURS, True)
                sums = sums + accs
            scores = scores + scaled_scores(sums, scale[2 * (j % 2) + tt], hidden, SETS, FOURS)
    return scores


@gluon.jit
def scaled_scores(sums, scale, hidden, SETS: gl.constexpr, FOURS: gl.constexpr):
    """Scores of a tile's tokens g, of all sets of rows, then those of tokens g + 8; ``scale``: of both tokens."""
    low, high = unpack_half2(scale)
    near = ()
    far = ()
    for n in gl.static_range(FOURS):
        own = _every(sums, n, FOURS)
        near = near + (gl.fma(_whole(own, 0, SETS), low, hidden),)
        far = far + (gl.fma(_whole(own, 2, SETS), high, hidden),)
    return near + far


@gluon.jit
def _whole(sums, I: gl.constexpr, SETS: gl.constexpr):
    """Of integer sums that began at MAGIC, high and low, in units of the high one."""
    if SETS == 1:
        x = as_float(sums[0][I]) - (MAGIC * (1 + 1 / 256))
    else:
        x = as_float(sums[0][I]) - (MAGIC * (1 + 1 / 256) * (1 + 1 / 16))
    x = gl.fma(as_float(sums[0][I + 1]), 1 / 256, x)
    if SETS == 2:
        x = gl.fma(as_float(sums[1][I]), 1 / 16, x)
        x = gl.fma(as_float(sums[1][I + 1]), 1 / 4096, x)
    return x


@gluon.jit
def byte_room(scale, NB: gl.constexpr):
    """log2 of what the largest scale of a page leaves to 16 bits."""
    most = scale[0]
    for i in gl.static_range(1, 2 * NB):
        most = max_half2(most, scale[i])
    for i in gl.static_range(3):
        most = max_half2(most, as_int(shuffle_xor(as_float(most), 4 << i)))
    return (30 - (gl.maximum(most & 0x7FFF, (most >> 16) & 0x7FFF) >> 10)).to(gl.float32)


@gluon.jit
def set_weights(scores, unit, bias, scale, room, NB: gl.constexpr):
    """Probabilities times values' scales as operands of bytes, the exponent they are relative to, and their sum.

    The exponent is the page's own maximum less ``room`` (:func:`byte_room`). ``scale``: pairs of tokens g and g + 8 of a tile.
    """
    m = scores[0]
    for i in gl.static_range(1, 4 * NB):
        m = gl.maximum(m, scores[i])
    m = gl.maximum(m, shuffle_xor(m, 4))
    m = gl.maximum(m, shuffle_xor(m, 8))
    m = gl.maximum(m, shuffle_xor(m, 16))
    top = gl.maximum(gl.fma(m, unit, bias), -1.0e30) - room
    bias = bias - top
    p = ()
    total = bias * 0.0
    for i in gl.static_range(2 * NB):
        low, high = unpack_half2(scale[i])
        a = exp2_fast(gl.fma(scores[2 * i], unit, bias))
        b = exp2_fast(gl.fma(scores[2 * i + 1], unit, bias))
        total = total + (a + b)
        a = as_int(gl.fma(a, low, BIG))
        b = as_int(gl.fma(b, high, BIG))
        p = p + (transpose8(either_bytes(a, b, PARTS)),)
    total = total + shuffle_xor(total, 4)
    total = total + shuffle_xor(total, 8)
    total = total + shuffle_xor(total, 16)
    return p, top, total


@gluon.jit
def page_scales(base, lane, NB: gl.constexpr, AT: gl.constexpr):
    """Scales of tokens g and g + 8 of a page's tiles, as pairs."""
    out = ()
    for j in gl.static_range(NB // 2):
        out = out + load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, AT + 128 * j, True)
    return out


@gluon.jit
def mean_signs(signs, g, t):
    """Whether channels 16 g + 2t and the next change sign, in bits 15 and 31; and channels 8 further on, in bits 14 and 30."""
    out = g * 0
    for i in gl.static_range(2):
        low = gl.load(signs + 16 * g + 2 * t + 8 * i)
        high = gl.load(signs + 16 * g + 2 * t + 8 * i + 1)
        word = ((as_int(low) >> 16) & 0x8000) | (as_int(high) & (-2147483648))
        out = out | ((word >> i) & (-2147450880 if i == 0 else 0x40004000))
    return out


@gluon.jit
def mix_lanes(x, t, MIX: gl.constexpr):
    """Sums and differences of tiles that are columns: what is left of the rotation of blocks of MIX channels."""
    if MIX >= 32:
        x = (x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3])
    for s in gl.static_range(2):
        if (64 << s) <= MIX:
            sign = gl.where((t >> s) % 2 == 0, 1.0, -1.0)
            x = (
                gl.fma(x[0], sign, shuffle_xor(x[0], 1 << s)),
                gl.fma(x[1], sign, shuffle_xor(x[1], 1 << s)),
                gl.fma(x[2], sign, shuffle_xor(x[2], 1 << s)),
                gl.fma(x[3], sign, shuffle_xor(x[3], 1 << s)),
            )
    return x


@gluon.jit
def turned_mean(base, scratch, lane, signs, matrix, D: gl.constexpr, MIX: gl.constexpr, AT: gl.constexpr):
    """The mean of a page's values in the rotated basis (without the factor): of each tile channels g and g + 8.

    A column is a tile, so that one product turns all; tiles are then mixed across lanes and come to all of them by ``scratch``.
    """
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    m = load_shared(matrix, 0, 4)
    at = base + g * 32 + t * 4
    b0 = load_shared(at, AT, 1)[0] ^ (signs & (-2147450880))
    b1 = load_shared(at, AT + 16, 1)[0] ^ ((signs << 1) & (-2147450880))
    x = mma(m[0], m[1], m[2], m[3], b0, b1, _zero4(lane), False)
    x = mix_lanes(x, t, MIX)
    store_shared4(scratch + t * 128 + g * 16, x[0], x[1], x[2], x[3])
    warp_sync(lane)
    out = ()
    for i in gl.static_range(CT // 2):
        y = load_shared4f(scratch + i * 128 + g * 16)
        out = out + ((y[0], y[2]), (y[1], y[3]))
    return out


@gluon.jit
def byte_values(
    base, lane, p, before, now, total, mean, out, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr,
    MIX: gl.constexpr, NB: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Sums of values of each set's row t, channels g and g + 8 of each tile, in the rotated basis, in units of 256 times codes
    (times 2^k), a page further. ``before``, ``now``, ``total``: of each set, what sums so far count, what those of the page
    count, and its probabilities."""
    CT: gl.constexpr = D // 16
    FOURS: gl.constexpr = len(now)
    none = lane * 0
    begin = none + BIG_BITS
    top = none + _byte_mask(BITS, 0)
    middle = ()
    share = ()
    for n in gl.static_range(FOURS):
        acc = (none, none, none, none)
        for j in gl.static_range(NB):
            acc = mma_bytes(top, top, top, top, p[2 * (n * NB + j)], p[2 * (n * NB + j) + 1], acc, False)
        middle = middle + ((acc[0].to(gl.float32) + acc[1].to(gl.float32) * (1 / 256)) * (-0.5 * now[n]),)
        share = share + (total[n] * now[n] * (MIX**-0.5 / 256),)
    accs = ()
    for _ct in gl.static_range(CT * FOURS):
        accs = accs + ((begin, begin, begin, begin),)
    for j in gl.static_range(NB):
        words = page_words(base, lane, AT + j * code_bytes(D, BITS), D, BITS)
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
            a = _operand(ready, 2 * (ct % (CT // 2)), 0, 1, 2 * (ct // (CT // 2)), D, BITS)
            accs = products(a, p, accs, ct * FOURS, j, NB, FOURS, False)
    sums = ()
    for n in gl.static_range(FOURS):
        for ct in gl.static_range(CT):
            f = 2.0 ** nibble_weight(D, BITS, ct % (CT // 2))
            z = middle[n] * f
            acc = accs[ct * FOURS + n]
            for h in gl.static_range(2):
                y = z
                if MEAN:
                    y = gl.fma(mean[ct][h], share[n] * f, z)
                x = as_float(acc[2 * h]) - (BIG * (1 + 1 / 256))
                x = gl.fma(as_float(acc[2 * h + 1]), 1 / 256, x)
                sums = sums + (gl.fma(out[2 * (n * CT + ct) + h], before[n], gl.fma(x, now[n], y)),)
    return sums
