"""The CPU kernel's loops, compiled by Numba: tiles of 32 tokens are decoded into the first-level cache and used there.

What is read is described by tables of addresses and strides in bytes, so that one compiled function serves all formats,
dtypes and numbers of spans.
"""
# mypy: ignore-errors

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

TILE = 32
"""Tokens decoded at once: a packed unit."""

AFFINE, FLOAT32, FLOAT16, BFLOAT16, UNIFORM = range(5)
"""How an operand is stored (column 0 of ``sides``)."""

PAGE = 128
"""Tokens that share a mean and norms, where an operand has them."""

NORM_STEPS = 48
"""Steps of a norm's code per factor of two."""

PACKED, WINDOW, NEWEST = range(3)
"""What a part is: whole up to each sequence's packed length; slots that are valid or not; valid and causal."""

FAST = {"reassoc", "contract", "nsz"}
"""Sums may be reordered for vectors; NaN and infinity keep their meaning."""


def loops(function):
    """Compile a function, once for all processes if there is a place to keep the result."""
    try:
        return njit(fastmath=FAST, nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(fastmath=FAST, nogil=True)(function)


I32, F32 = ir.IntType(32), ir.FloatType()


# Numba widens integers to 64 bits, which halves vectors and has no conversion to float: these stay at 32.


@intrinsic
def _address(typing, x):
    """An integer as a pointer."""

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), build


@intrinsic
def _field(typing, byte, shift, mask):
    """``float32((byte >> shift) & mask)``."""

    def build(context, builder, signature, args):
        byte, shift, mask = builder.zext(args[0], I32), *(builder.trunc(a, I32) for a in args[1:])
        return builder.uitofp(builder.and_(builder.lshr(byte, shift), mask), F32)

    return types.float32(types.uint8, types.int64, types.int64), build


@intrinsic
def _half(typing, word):
    """Value of fp16 bits. A subnormal one is converted as an integer: processors may flush subnormals to zero."""

    def build(context, builder, signature, args):
        def constant(x: int) -> ir.Constant:
            return ir.Constant(I32, x)

        word = builder.zext(args[0], I32)
        size = builder.and_(word, constant(0x7FFF))
        small = builder.fmul(builder.uitofp(size, F32), ir.Constant(F32, 2.0**-24))
        high = builder.icmp_unsigned(">=", size, constant(0x7C00))  # infinity or NaN
        exponent = builder.select(high, constant(224 << 23), constant(112 << 23))
        normal = builder.bitcast(builder.add(builder.shl(size, constant(13)), exponent), F32)
        value = builder.select(builder.icmp_unsigned("<", size, constant(0x0400)), small, normal)
        sign = builder.shl(builder.and_(word, constant(0x8000)), constant(16))
        return builder.bitcast(builder.or_(builder.bitcast(value, I32), sign), F32)

    return types.float32(types.uint16), build


@intrinsic
def _as_float(typing, bits):
    """Float32 of 32 bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), build


@intrinsic
def _flip(typing, x, word, shift):
    """Negate ``x`` where bit ``31 - shift`` of ``word`` is set."""

    def build(context, builder, signature, args):
        bit = builder.and_(builder.shl(args[1], builder.trunc(args[2], I32)), ir.Constant(I32, 1 << 31))
        return builder.bitcast(builder.xor(builder.bitcast(args[0], I32), bit), F32)

    return types.float32(types.float32, types.int32, types.int64), build


@loops
def _exp(x):
    """``exp(x)`` for x <= 0 to float32's precision, in operations that have vector forms."""
    low = x if x > np.float32(-87.0) else np.float32(-87.0)
    n = np.int32(low * np.float32(1.44269504) - np.float32(0.5))
    f = np.float32(n)
    r = (low - f * np.float32(0.693359375)) + f * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    p = p * _as_float(np.int32((n + np.int32(127)) << np.int32(23)))
    below = np.float32(0.0) if x < np.float32(-87.0) else x  # NaN stays NaN
    return p if x >= np.float32(-87.0) else below


# ---- decoding a tile -------------------------------------------------------------------------------------------------


@loops
def _unpack(data, bits, codes):
    """Codes of a unit as float32; see :mod:`kvfold.formats.packing`."""
    count = codes.shape[0]
    width = 2 if bits == 3 else bits
    size = count * width // 8
    for f in range(8 // width):
        for i in range(size):
            codes[f * size + i] = _field(data[i], f * width, (1 << width) - 1)
    if bits == 3:
        high = data[size:]
        size = count // 8
        for f in range(8):
            for i in range(size):
                codes[f * size + i] += np.float32(4.0) * _field(high[i], f, 1)


@loops
def _metadata(side, offsets, row, groups, form, scale, zero, sign):
    """Scales, zero-points and sign bits (words of 32, or 16 where groups are not multiples of 32) of a row of groups."""
    mode, group = form[2], form[3]
    if mode == 0:
        meta = carray(_address(side[5] + offsets[1] + row * groups * 4), 2 * groups, np.uint16)
        for i in range(groups):
            scale[i] = _half(meta[i])
        for i in range(groups):
            zero[i] = _half(meta[groups + i])
        return
    words = group // 16
    stored = carray(_address(side[5] + offsets[1] + row * groups * 2), groups, np.uint16)
    aux = carray(_address(side[9] + offsets[2] + row * groups * words * 2), groups * words, np.uint16)
    for i in range(groups):
        scale[i] = _half(np.uint16(stored[i] & 0x7FFF))
    step = 2 if words % 2 == 0 else 1
    for j in range(words // step):
        for i in range(groups):
            at = i * words + j * step
            word = np.int32(aux[at])
            if step == 2:
                word |= np.int32(np.int32(aux[at + 1]) << 16)
            sign[j * groups + i] = word
    if mode == 2:
        for i in range(groups):
            zero[i] = np.float32(0.0)
            if stored[i] & 0x8000:
                if group == 16:
                    zero[i] = _half(aux[i])
                else:
                    at = i * words
                    zero[i] = _as_float(np.int32(np.int32(aux[at]) | np.int32(np.int32(aux[at + 1]) << 16)))
                for j in range(words // step):
                    sign[j * groups + i] = 0


@loops
def _affine(side, offsets, form, unit, dim, codes, scale, zero, sign, tile):
    """Decode a unit of affine groups into ``tile`` [32, dim or more]."""
    bits, axis, mode, group = form[0], form[1], form[2], form[3]
    size = dim * bits * 4
    data = carray(_address(side[1] + offsets[0] + unit * size), size, np.uint8)
    _unpack(data, bits, codes)
    step = 32 if group % 32 == 0 else 16
    if axis == 1:
        per_token = dim // group
        _metadata(side, offsets, unit, TILE * per_token, form, scale, zero, sign)
        for t in range(TILE):
            for g in range(per_token):
                at = t * per_token + g
                s, z = scale[at], zero[at]
                for j in range(group // step):
                    first = g * group + j * step
                    c = codes[t * dim + first : t * dim + first + step]
                    x = tile[t, first : first + step]
                    if mode == 0:
                        for i in range(step):
                            x[i] = z + s * c[i]
                    else:
                        word = sign[j * TILE * per_token + at]
                        for i in range(step):
                            x[i] = z + _flip(s * c[i], word, 31 - i)
        return
    have = -1
    for start in range(0, TILE, step):
        token = unit * TILE + start  # groups divide blocks, so rows of groups count through
        row = token // group
        if row != have:
            _metadata(side, offsets, row, dim, form, scale, zero, sign)
            have = row
        word = sign[(token % group) // step * dim :]
        for t in range(start, start + step):
            c = codes[t * dim : (t + 1) * dim]
            x = tile[t]
            if mode == 0:
                for i in range(dim):
                    x[i] = zero[i] + scale[i] * c[i]
            else:
                shift = 31 - (t - start)
                for i in range(dim):
                    x[i] = zero[i] + _flip(scale[i] * c[i], word[i], shift)


@loops
def _uniform(side, offsets, form, unit, dim, codes, tile):
    """Decode a unit of uniform levels, one scale per token."""
    size = dim * form[0] * 4
    data = carray(_address(side[1] + offsets[0] + unit * size), size, np.uint8)
    _unpack(data, form[0], codes)
    scale = carray(_address(side[5] + offsets[1] + unit * TILE * 2), TILE, np.uint16)
    middle = np.float32(((1 << form[0]) - 1) * 0.5)
    for t in range(TILE):
        c, x, factor = codes[t * dim : (t + 1) * dim], tile[t], _half(scale[t])
        for i in range(dim):
            x[i] = factor * (c[i] - middle)


@loops
def _rotate(x, block):
    """Orthonormal Hadamard transform in place, ``block`` channels at a time."""
    size = 1
    while size < block:
        for first in range(0, x.shape[0], 2 * size):
            for i in range(first, first + size):
                a, b = x[i], x[i + size]
                x[i], x[i + size] = a + b, a - b
        size *= 2
    factor = np.float32(1.0 / np.sqrt(block))
    for i in range(x.shape[0]):
        x[i] *= factor


@loops
def _page_mean(page, b, h, index, dim, mean):
    """A page's mean; zeros where pages have none."""
    for i in range(dim):
        mean[i] = np.float32(0.0)
    if page[0]:
        stored = carray(_address(page[0] + b * page[1] + h * page[2] + index * dim * 2), dim, np.uint16)
        for i in range(dim):
            mean[i] = _half(stored[i])


@loops
def _page_norm(page, b, h, index, dim, norm):
    """A page's channel norms; ones where pages have none."""
    for i in range(dim):
        norm[i] = np.float32(1.0)
    if page[3]:
        stored = carray(_address(page[3] + b * page[4] + h * page[5] + index * dim), dim, np.uint8)
        for i in range(dim):
            norm[i] = np.float32(2.0) ** (np.float32(stored[i]) * np.float32(-1.0 / NORM_STEPS))


@loops
def _page_queries(queries, mean, norm, signs, block, packed_q, shift):
    """Queries as a page's codes meet them, and their products with the page's mean."""
    dim = mean.shape[0]
    for r in range(shift.shape[0]):
        total = np.float32(0.0)
        for i in range(dim):
            total += queries[r, i] * mean[i]
            packed_q[r, i] = queries[r, i] * norm[i] * signs[i]
        shift[r] = total
        if block:
            _rotate(packed_q[r, :dim], block)


@loops
def _dense(side, offset, index, count, dim, tile):
    """Copy the tokens ``index[:count]`` as float32."""
    for t in range(count):
        at = side[1] + offset + index[t] * side[4]
        x = tile[t]
        if side[0] == FLOAT32:
            wide = carray(_address(at), dim, np.float32)
            for i in range(dim):
                x[i] = wide[i]
        else:
            words = carray(_address(at), dim, np.uint16)
            if side[0] == FLOAT16:
                for i in range(dim):
                    x[i] = _half(words[i])
            else:
                for i in range(dim):
                    x[i] = _as_float(np.int32(np.int32(words[i]) << 16))


# ---- using it --------------------------------------------------------------------------------------------------------


@loops
def _scores(q, tile, s):
    """Products of a query with the tokens of a tile, four at a time."""
    n = q.shape[0]
    for t in range(0, TILE, 4):
        k0, k1, k2, k3 = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
        a0 = a1 = a2 = a3 = np.float32(0.0)
        for i in range(n):
            a0 += q[i] * k0[i]
            a1 += q[i] * k1[i]
            a2 += q[i] * k2[i]
            a3 += q[i] * k3[i]
        s[t], s[t + 1], s[t + 2], s[t + 3] = a0, a1, a2, a3


@loops
def _add(p, tile, acc):
    """``acc += p @ tile``."""
    n = acc.shape[0]
    for t in range(0, TILE, 4):
        p0, p1, p2, p3 = p[t], p[t + 1], p[t + 2], p[t + 3]
        v0, v1, v2, v3 = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
        for i in range(n):
            acc[i] += (p0 * v0[i] + p1 * v1[i]) + (p2 * v2[i] + p3 * v3[i])


@loops
def _weights(s, top):
    """Replace scores by exp(score - top); their sum."""
    total = np.float32(0.0)
    for t in range(TILE):
        s[t] = _exp(s[t] - top)
        total += s[t]
    return total


@loops
def _cap(s, cap):
    """Replace scores by ``cap * tanh(score / cap)``."""
    inverse = np.float32(1.0) / cap
    for t in range(TILE):
        x = s[t] * inverse
        size = abs(x)
        square = x * x
        # near 0 the quotient below loses digits to cancellation
        series = np.float32(2.0 / 15.0) + square * (np.float32(-17.0 / 315.0) + square * np.float32(62.0 / 2835.0))
        small = x + x * square * (np.float32(-1.0 / 3.0) + square * series)
        e = _exp(np.float32(-2.0) * size)
        large = (np.float32(1.0) - e) / (np.float32(1.0) + e)
        s[t] = cap * (small if size < np.float32(0.25) else (large if x > 0 else -large))


@loops
def _padded(x):
    return (x + 31) // 32 * 32


@loops
def attend(
    begin_item, end_item, splits, packed_queries, queries, bias, scale, softcap, parts, sides, forms, pages, signs, packed_len,
    tokens, part_out, part_top, part_sum,
):  # fmt: skip
    """Attention of KV heads' queries over shares of their tiles, unnormalized; :func:`merge` puts shares together.

    Parameters
    ----------
    begin_item, end_item, splits : int
        An item is one of ``splits`` shares of one KV head of one sequence: these of them.
    packed_queries, queries : float32 [batch, kv_heads, rows, head_dim]
    bias : float32 [batch, kv_heads, rows or 0]
    scale : float64
    softcap : float64
        Limit of the scores; 0: none.
    parts : int64 [parts, 5]
        Tokens (of the longest sequence), index of the first within the packed part, what it is, and address and batch
        stride of the tokens' validity as bytes (address 0: all are valid).
    sides : int64 [parts, 2, 13]
        Of keys and of values: how they are stored; address and strides of batch, head and token of the data; the same of
        scales and zero-points; the same of sign bits. Addresses and strides are in bytes.
    forms : int64 [2, 6]
        Bits, axis (0: token), mode (0: asym, 1: sym, 2: hybrid) and group of the formats of keys and values; whether pages
        have statistics; channels that a Hadamard block mixes (0: none).
    pages : int64 [parts, 2, 6]
        Of keys and of values: address and strides of batch and head of the pages' means, and of their norms (address 0:
        none). Addresses and strides are in bytes.
    signs : float32 [2, head_dim]
        Of the rotations of keys and of values.
    packed_len : int64 [batch]
    tokens : int
        Query tokens; rows are query heads times these.
    part_out : float32 [items, rows, value_dim]
    part_top, part_sum : float32 [items, rows]
    """
    factor, cap = np.float32(scale), np.float32(softcap)
    heads = queries.shape[1]
    rows, dim = queries.shape[2], queries.shape[3]
    value_dim = part_out.shape[2]
    wide, value_wide = _padded(dim), _padded(value_dim)
    # zeros: what pads a tile must be finite
    keys, values = np.zeros((TILE, wide), np.float32), np.zeros((TILE, value_wide), np.float32)
    packed_q, window_q = np.zeros((rows, wide), np.float32), np.zeros((rows, wide), np.float32)
    acc = np.zeros((rows, value_wide), np.float32)
    turned = forms[1, 5] > 0  # sums of rotated values are kept apart from those of the windows
    packed_acc = np.zeros((rows if turned else 0, value_wide), np.float32)
    mean, norm, value_mean = np.zeros(dim, np.float32), np.ones(dim, np.float32), np.zeros(value_dim, np.float32)
    shift = np.zeros(rows, np.float32)
    codes = np.empty(TILE * max(dim, value_dim), np.float32)
    groups = TILE * max(dim, value_dim) // 16
    row_scale, row_zero, row_sign = (
        np.empty(groups, np.float32),
        np.zeros(groups, np.float32),
        np.empty(groups, np.int32),
    )
    s = np.empty(TILE, np.float32)
    index = np.empty(TILE, np.int64)
    offsets = np.zeros((2, 3), np.int64)
    for item in range(begin_item, end_item):
        b, h, share = item // (heads * splits), item // splits % heads, item % splits
        out, top, total = part_out[item], part_top[item], part_sum[item]
        acc[:] = 0.0
        packed_acc[:] = 0.0
        for r in range(rows):
            for i in range(dim):
                window_q[r, i] = queries[b, h, r, i] * factor
                packed_q[r, i] = packed_queries[b, h, r, i] * factor
        for r in range(rows):
            top[r], total[r] = np.float32(-3.4e38), np.float32(0.0)

        tiles = 0
        for p in range(parts.shape[0]):
            n = parts[p, 0]
            if parts[p, 2] == PACKED:
                n = min(n, packed_len[b] - parts[p, 1])
            tiles += max(0, (n + TILE - 1) // TILE)
        begin, end = tiles * share // splits, tiles * (share + 1) // splits

        first = 0
        for p in range(parts.shape[0]):
            n, kind = parts[p, 0], parts[p, 2]
            if kind == PACKED:
                n = min(n, packed_len[b] - parts[p, 1])
            here = max(0, (n + TILE - 1) // TILE)
            for side in range(2):
                for field in range(3):
                    at = sides[p, side]
                    offsets[side, field] = b * at[4 * field + 2] + h * at[4 * field + 3]
            page = -1
            valid = carray(_address(parts[p, 3] + b * parts[p, 4]), max(1, parts[p, 0]), np.uint8)
            for tile in range(max(begin - first, 0), min(end - first, here)):
                start = tile * TILE
                stop = min(start + TILE, n)
                count = 0
                for t in range(start, stop):
                    if parts[p, 3] == 0 or valid[t]:
                        index[count] = t
                        count += 1
                if count == 0:
                    continue
                if kind == PACKED and start // PAGE != page:
                    page = start // PAGE
                    if forms[0, 4]:
                        _page_mean(pages[p, 0], b, h, page, dim, mean)
                        _page_norm(pages[p, 0], b, h, page, dim, norm)
                        _page_queries(window_q, mean, norm, signs[0], forms[0, 5], packed_q, shift)
                    if forms[1, 4]:
                        _page_mean(pages[p, 1], b, h, page, value_dim, value_mean)
                if sides[p, 0, 0] == AFFINE:
                    _affine(sides[p, 0], offsets[0], forms[0], tile, dim, codes, row_scale, row_zero, row_sign, keys)
                elif sides[p, 0, 0] == UNIFORM:
                    _uniform(sides[p, 0], offsets[0], forms[0], tile, dim, codes, keys)
                else:
                    _dense(sides[p, 0], offsets[0, 0], index, count, dim, keys)
                if sides[p, 1, 0] == AFFINE:
                    _affine(
                        sides[p, 1], offsets[1], forms[1], tile, value_dim, codes, row_scale, row_zero, row_sign, values
                    )
                elif sides[p, 1, 0] == UNIFORM:
                    _uniform(sides[p, 1], offsets[1], forms[1], tile, value_dim, codes, values)
                else:
                    _dense(sides[p, 1], offsets[1, 0], index, count, value_dim, values)
                for t in range(count, TILE):  # what an earlier tile left there may be infinite
                    keys[t] = np.float32(0.0)
                    values[t] = np.float32(0.0)
                for r in range(rows):
                    _scores(packed_q[r] if kind == PACKED else window_q[r], keys, s)
                    if kind == PACKED and (bias.shape[2] or forms[0, 4]):
                        more = shift[r] if forms[0, 4] else bias[b, h, r] * factor
                        for t in range(TILE):
                            s[t] += more
                    if cap > 0:
                        _cap(s, cap)
                    for t in range(count, TILE):
                        s[t] = np.float32(-np.inf)
                    if kind == NEWEST:
                        for t in range(count):
                            if index[t] > r % tokens:
                                s[t] = np.float32(-np.inf)
                    best = top[r]
                    for t in range(TILE):
                        best = max(best, s[t])
                    if best > top[r]:
                        shrink = _exp(top[r] - best)
                        total[r] *= shrink
                        for i in range(value_wide):
                            acc[r, i] *= shrink
                        if turned:
                            for i in range(value_wide):
                                packed_acc[r, i] *= shrink
                        top[r] = best
                    amount = _weights(s, best)
                    total[r] += amount
                    if kind == PACKED and forms[1, 4]:
                        for i in range(value_dim):
                            acc[r, i] += amount * value_mean[i]
                    _add(s, values, packed_acc[r] if kind == PACKED and turned else acc[r])
            first += here
        for r in range(rows):
            if turned:
                _rotate(packed_acc[r, :value_dim], forms[1, 5])
                for i in range(value_dim):
                    acc[r, i] += packed_acc[r, i] * signs[1, i]
            for i in range(value_dim):
                out[r, i] = acc[r, i]


@loops
def merge(part_out, part_top, part_sum, splits, sinks, out):
    """Merge shares by log-sum-exp and normalize: ``out`` float32 [batch * kv_heads, rows, value_dim].

    ``sinks`` float32 [kv_heads, rows or 0]: a score more in each row's softmax, for a value of zeros.
    """
    pairs, rows, dim = out.shape
    for pair in range(pairs):
        for r in range(rows):
            best = part_top[pair * splits, r]
            for share in range(1, splits):
                best = max(best, part_top[pair * splits + share, r])
            amount = np.float32(0.0)
            if sinks.shape[1]:
                sink = sinks[pair % sinks.shape[0], r]
                best = max(best, sink)
                amount = _exp(sink - best)
            for i in range(dim):
                out[pair, r, i] = np.float32(0.0)
            for share in range(splits):
                item = pair * splits + share
                factor = _exp(part_top[item, r] - best)
                amount += factor * part_sum[item, r]
                for i in range(dim):
                    out[pair, r, i] += factor * part_out[item, r, i]
            amount = max(amount, np.float32(1.1754944e-38))  # a padding row sees nothing and gets 0
            for i in range(dim):
                out[pair, r, i] /= amount
