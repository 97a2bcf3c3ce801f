"""The CPU kernel's loops, compiled by Numba: tiles of 32 tokens are decoded into the first-level cache and used there.

What is read is described by tables of addresses and strides in bytes, and a format's reader is called by its address. So one
compiled function serves all formats, dtypes and numbers of spans.
"""
# mypy: ignore-errors

from kvfold.formats.paged import PAGE
from kvfold.kernels.cpu._numbers import (
    TILE,
    address,
    as_float,
    call,
    carray,
    copy,
    exp,
    half,
    loops,
    np,
)

READER, FLOAT32, FLOAT16, BFLOAT16 = range(4)
"""How an operand is stored (column 0 of ``sides``)."""

NORM_STEPS = 48
"""Steps of a norm's code per factor of two."""

PACKED, WINDOW, NEWEST = range(3)
"""What a part is: whole up to each sequence's packed length; slots that are valid or not; valid and causal."""

# ---- what a page adds ------------------------------------------------------------------------------------------------


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
        stored = carray(address(page[0] + b * page[1] + h * page[2] + index * dim * 2), dim, np.uint16)
        for i in range(dim):
            mean[i] = half(stored[i])


@loops
def _page_norm(page, b, h, index, dim, norm):
    """A page's channel norms; ones where pages have none."""
    for i in range(dim):
        norm[i] = np.float32(1.0)
    if page[3]:
        stored = carray(address(page[3] + b * page[4] + h * page[5] + index * dim), dim, np.uint8)
        for i in range(dim):
            norm[i] = np.float32(2.0) ** (np.float32(stored[i]) * np.float32(-1.0 / NORM_STEPS))


@loops
def _turned(x, matrix, y):
    """``y = matrix @ x``: y [rows or more], matrix [rows, n], x [n or more]."""
    n = matrix.shape[1]
    for j in range(matrix.shape[0]):
        row, total = matrix[j], np.float32(0.0)
        for i in range(n):
            total += row[i] * x[i]
        y[j] = total


@loops
def _rotated_back(queries, freq, position, scaling, turn, out):
    """Queries as keys before RoPE meet them that lie at ``position``: the rotation's inverse, times RoPE's own factor. ``turn``
    float32 [2, pairs] is overwritten."""
    pairs = freq.shape[0]
    for j in range(pairs):
        angle = freq[j] * position
        turn[0, j], turn[1, j] = np.float32(np.cos(angle)) * scaling, np.float32(np.sin(angle)) * scaling
    c, s = turn[0], turn[1]
    for r in range(out.shape[0]):
        x, y = queries[r], out[r]
        for j in range(pairs):
            a, b = x[j], x[j + pairs]
            y[j], y[j + pairs] = a * c[j] + b * s[j], b * c[j] - a * s[j]
        for i in range(2 * pairs, x.shape[0]):
            y[i] = x[i]


@loops
def _rotate_keys(tile, first, turns):
    """Rotate the pairs of a tile's tokens by the angles of the tokens ``first`` and following of a page: cosines and sines
    ``turns`` float32 [2, PAGE, pairs]."""
    pairs = turns.shape[2]
    for t in range(TILE):
        c, s = turns[0, first + t], turns[1, first + t]
        low, high = tile[t, :pairs], tile[t, pairs : 2 * pairs]
        for j in range(pairs):
            a, b = low[j], high[j]
            low[j] = a * c[j] - b * s[j]
            high[j] = b * c[j] + a * s[j]


@loops
def _page_queries(queries, mean, norm, signs, block, matrix, packed_q, shift):
    """Queries as a page's codes meet them, and their products with the page's mean."""
    dim = mean.shape[0]
    x = np.zeros(queries.shape[1], np.float32)
    for r in range(shift.shape[0]):
        total = np.float32(0.0)
        for i in range(dim):
            total += queries[r, i] * mean[i]
            x[i] = queries[r, i] * norm[i] * signs[i]
        shift[r] = total
        if block:
            _rotate(x[:dim], block)
        if matrix.shape[0]:
            _turned(x, matrix, packed_q[r])
        else:
            copy(x, packed_q[r])


@loops
def _dense(side, offset, index, count, dim, tile):
    """Copy the tokens ``index[:count]`` as float32."""
    for t in range(count):
        at = side[1] + offset + index[t] * side[4]
        x = tile[t]
        if side[0] == FLOAT32:
            wide = carray(address(at), dim, np.float32)
            for i in range(dim):
                x[i] = wide[i]
        else:
            words = carray(address(at), dim, np.uint16)
            if side[0] == FLOAT16:
                for i in range(dim):
                    x[i] = half(words[i])
            else:
                for i in range(dim):
                    x[i] = as_float(np.int32(np.int32(words[i]) << 16))


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
        s[t] = exp(s[t] - top)
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
        e = exp(np.float32(-2.0) * size)
        large = (np.float32(1.0) - e) / (np.float32(1.0) + e)
        s[t] = cap * (small if size < np.float32(0.25) else (large if x > 0 else -large))


@loops
def _padded(x):
    return (x + 31) // 32 * 32


@loops
def attend(
    begin_item, end_item, splits, packed_queries, queries, bias, scale, softcap, parts, sides, forms, pages, key_signs,
    value_signs, key_matrix, value_matrix, freq, turns, scaling, first_position, packed_len, tokens, scratch_size,
    part_out, part_top, part_sum,
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
    sides : int64 [parts, 2, 1 + ROW]
        Of keys and of values: how they are stored, and what their reader is given; of dense ones the address and the strides of
        batch, head and token, in bytes.
    forms : int64 [2, 5]
        Of keys and of values: their reader's address, channels of what it decodes, whether they are paged, whether pages are of
        128 tokens (else one is the whole sequence), channels that a Hadamard block mixes (0: none).
    pages : int64 [parts, 2, 6]
        Of keys and of values: address and strides of batch and head of the pages' means, and of their norms (address 0:
        none). Addresses and strides are in bytes.
    key_signs, value_signs : float32 [head_dim]
        Of Hadamard rotations.
    key_matrix : float32 [channels, head_dim], or no rows
        Decoded keys times it are keys of the model: another basis.
    value_matrix : float32 [kv_heads or 1, channels, value_dim], or no rows
        The same of values.
    freq : float64 [pairs], or none
        Angles per position, where keys are stored before RoPE.
    turns : float32 [2, PAGE, pairs]
        Cosines and sines of the first positions.
    scaling : float64
        RoPE's own factor.
    first_position : int64 [batch]
        Position of each sequence's first packed token.
    packed_len : int64 [batch]
    tokens : int
        Query tokens; rows are query heads times these.
    scratch_size : int
        Floats that readers need.
    part_out : float32 [items, rows, value_dim]
    part_top, part_sum : float32 [items, rows]
    """
    factor, cap, gain = np.float32(scale), np.float32(softcap), np.float32(scaling)
    heads = queries.shape[1]
    rows, dim = queries.shape[2], queries.shape[3]
    value_dim = part_out.shape[2]
    wide, value_wide = _padded(dim), _padded(value_dim)
    packed_wide, packed_value_wide = _padded(forms[0, 1]), _padded(forms[1, 1])
    # zeros: what pads a tile must be finite
    keys, values = np.zeros((TILE, wide), np.float32), np.zeros((TILE, value_wide), np.float32)
    packed_keys = np.zeros((TILE, packed_wide), np.float32)
    packed_values = np.zeros((TILE, packed_value_wide), np.float32)
    window_q, back_q = np.zeros((rows, wide), np.float32), np.zeros((rows, wide), np.float32)
    given_dim = packed_queries.shape[3]
    given_q = np.zeros((rows, _padded(given_dim)), np.float32)
    packed_q = np.zeros((rows, packed_wide), np.float32)
    acc = np.zeros((rows, value_wide), np.float32)
    # sums of values in another basis are kept apart from those of the windows
    turned = forms[1, 4] > 0 or value_matrix.shape[1] > 0
    packed_acc = np.zeros((rows if turned else 0, packed_value_wide), np.float32)
    mean, norm, value_mean = np.zeros(dim, np.float32), np.ones(dim, np.float32), np.zeros(value_dim, np.float32)
    shift, value_norm = np.zeros(rows, np.float32), np.ones(value_dim, np.float32)
    scratch = np.zeros(scratch_size, np.float32)
    s = np.empty(TILE, np.float32)
    index = np.empty(TILE, np.int64)
    rotated, turn = freq.shape[0] > 0, np.empty((2, freq.shape[0]), np.float32)
    for item in range(begin_item, end_item):
        b, h, share = item // (heads * splits), item // splits % heads, item % splits
        out, top, total = part_out[item], part_top[item], part_sum[item]
        acc[:] = 0.0
        packed_acc[:] = 0.0
        for r in range(rows):
            for i in range(dim):
                window_q[r, i] = queries[b, h, r, i] * factor
            for i in range(given_dim):
                given_q[r, i] = packed_queries[b, h, r, i] * factor
        if forms[0, 2] == 0 and not rotated:
            for r in range(rows):
                copy(given_q[r], packed_q[r])
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
            page = -1
            valid = carray(address(parts[p, 3] + b * parts[p, 4]), max(1, parts[p, 0]), np.uint8)
            k, v = (packed_keys, packed_values) if kind == PACKED else (keys, values)
            sums = packed_acc if kind == PACKED and turned else acc
            q = packed_q if kind == PACKED else window_q
            shifted = kind == PACKED and (bias.shape[2] > 0 or forms[0, 2] > 0)
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
                place = parts[p, 1] + start  # within the packed part
                if kind == PACKED and place // PAGE != page:
                    changes = rotated or page < 0
                    page = place // PAGE
                    here_q = given_q
                    if rotated:
                        here_q = back_q
                        _rotated_back(given_q, freq, first_position[b] + page * PAGE, gain, turn, back_q)
                    if forms[0, 2]:
                        if changes or (forms[0, 3] and (pages[p, 0, 0] or pages[p, 0, 3])):
                            at = start // PAGE if forms[0, 3] else 0
                            _page_mean(pages[p, 0], b, h, at, dim, mean)
                            _page_norm(pages[p, 0], b, h, at, dim, norm)
                            _page_queries(here_q, mean, norm, key_signs, forms[0, 4], key_matrix, packed_q, shift)
                    elif rotated:
                        for r in range(rows):
                            copy(back_q[r], packed_q[r])
                    if forms[1, 2]:
                        at = start // PAGE if forms[1, 3] else 0
                        _page_mean(pages[p, 1], b, h, at, value_dim, value_mean)
                        if pages[p, 1, 3]:
                            _page_norm(pages[p, 1], b, h, at, value_dim, value_norm)
                for side in range(2):
                    x = k if side == 0 else v
                    stored = sides[p, side]
                    if stored[0] == READER:
                        call(
                            forms[side, 0], stored.ctypes.data + 8, b, h, tile, x.ctypes.data, x.shape[1],
                            scratch.ctypes.data,
                        )  # fmt: skip
                    else:
                        _dense(stored, b * stored[2] + h * stored[3], index, count, dim if side == 0 else value_dim, x)
                if kind == PACKED and pages[p, 1, 3]:
                    for t in range(TILE):
                        row = v[t]
                        for i in range(value_dim):
                            row[i] *= value_norm[i]
                if kind == PACKED and rotated:
                    _rotate_keys(k, place % PAGE, turns)
                for t in range(count, TILE):  # what an earlier tile left there may be infinite
                    k[t] = np.float32(0.0)
                    v[t] = np.float32(0.0)
                for r in range(rows):
                    _scores(q[r], k, s)
                    if shifted:
                        more = shift[r] if forms[0, 2] else bias[b, h, r] * factor
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
                        shrink = exp(top[r] - best)
                        total[r] *= shrink
                        for i in range(value_wide):
                            acc[r, i] *= shrink
                        if turned:
                            for i in range(packed_value_wide):
                                packed_acc[r, i] *= shrink
                        top[r] = best
                    amount = _weights(s, best)
                    total[r] += amount
                    if kind == PACKED and forms[1, 2]:
                        for i in range(value_dim):
                            acc[r, i] += amount * value_mean[i]
                    _add(s, v, sums[r])
            first += here
        for r in range(rows):
            if value_matrix.shape[1]:
                matrix = value_matrix[h if value_matrix.shape[0] > 1 else 0]
                for j in range(matrix.shape[0]):
                    row, weight = matrix[j], packed_acc[r, j]
                    for i in range(value_dim):
                        acc[r, i] += weight * row[i]
            elif turned:
                _rotate(packed_acc[r, :value_dim], forms[1, 4])
                for i in range(value_dim):
                    acc[r, i] += packed_acc[r, i] * value_signs[i]
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
                amount = exp(sink - best)
            for i in range(dim):
                out[pair, r, i] = np.float32(0.0)
            for share in range(splits):
                item = pair * splits + share
                factor = exp(part_top[item, r] - best)
                amount += factor * part_sum[item, r]
                for i in range(dim):
                    out[pair, r, i] += factor * part_out[item, r, i]
            amount = max(amount, np.float32(1.1754944e-38))  # a padding row sees nothing and gets 0
            for i in range(dim):
                out[pair, r, i] /= amount
