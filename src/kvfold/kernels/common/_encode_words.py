# mypy: ignore-errors
"""Where the encoding kernels put codes, as :mod:`kvfold.formats.packing` has them.

A tile is a tuple of *pieces*, small tensors [tokens, 16 channels] of a fragment's channel tile each. What lies in one
16-bit word (codes of the same place in several channel tiles) lies in one thread, at the same place of several pieces, so
that packing is arithmetic on whole pieces: no code moves between threads. Groups along channels are two pieces (one
shuffle finishes their reductions), groups along tokens are the pieces of one channel tile.
"""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _fma


@triton.constexpr_function
def _merged(d, width):
    """How many places of a channel tile one word of a plane of ``width`` bits joins: 1, both token tiles (2), and both
    halves of a fragment's eight rows (4)."""
    return max(1, 256 // (d * width))


@triton.constexpr_function
def _chunks(d, width):
    """How many channel tiles follow each other before a word of a plane takes its next code."""
    return max(1, d * width // 256)


@triton.constexpr_function
def _halves(d, bits, value):
    """Pieces a channel tile is cut into: two where a word joins both halves of a fragment's rows, and rows are channels."""
    return 2 if value and d * (1 if bits == 3 else bits) == 64 else 1


@triton.constexpr_function
def _splits(d, bits, value, axis, warps):
    """Subsets that the tokens of a unit are cut into."""
    merged = _merged(d, 1 if bits == 3 else bits)
    needed = min(2 * merged, 4) if value else merged
    return min(8, max(needed, (8 if axis == 0 else 2) // warps))


@triton.constexpr_function
def _index(c, h, u, halves, subsets, per_group, axis):
    """Where the codes of channel tile ``c``, half ``h``, token subset ``u`` are: groups lie together."""
    if axis == 0:
        return (c * halves + h) * subsets + u
    return ((c // per_group * subsets + u) * per_group + c % per_group) * halves + h


@triton.constexpr_function
def _subset(m, r, merged, splits, value):
    """Subset of tokens that is part ``m`` of those joined in a word, and number ``r`` of the others."""
    return (m // 2 * (splits // 2) if value and merged == 4 else m * (splits // merged)) + r


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def _half(m, h, merged, value):
    return m % 2 if value and merged == 4 else h


@triton.jit
def _tokens(u: tl.constexpr, SPLITS: tl.constexpr, VALUE: tl.constexpr):
    """Tokens of subset ``u`` of a tile; the subsets of a unit follow each other."""
    j = tl.arange(0, 32 // SPLITS)
    first = u // SPLITS * 32
    s = u % SPLITS
    if SPLITS == 1:
        return first + j
    if VALUE:
        if SPLITS == 2:  # pair
            return first + 2 * j + s
        if SPLITS == 4:  # token tile, pair
            return first + s // 2 * 16 + 2 * j + s % 2
        return first + s // 4 * 16 + s // 2 % 2 * 8 + 2 * j + s % 2  # token tile, half of its columns, pair
    if SPLITS == 2:  # token tile
        return first + s * 16 + j
    if SPLITS == 4:  # token tile, half of eight rows
        return first + s // 2 * 16 + j // 4 * 8 + s % 2 * 4 + j % 4
    return first + s // 4 * 16 + s % 2 * 8 + s // 2 % 2 * 4 + j  # token tile, half of eight rows, half of the tile


@triton.jit
def _channels(h: tl.constexpr, HALVES: tl.constexpr):
    """Channels of a piece within their channel tile."""
    i = tl.arange(0, 16 // HALVES)
    return i // (8 // HALVES) * 8 + h * (8 // HALVES) + i % (8 // HALVES)


@triton.jit
def _slot(group, token, D: tl.constexpr, G: tl.constexpr, AXIS: tl.constexpr, VALUE: tl.constexpr):
    """Where a group's metadata is stored (inverse of kvfold.formats.packing.group_order): group = channel for AXIS 0, group
    of a token for AXIS 1."""
    if AXIS == 0:
        if VALUE:  # channel = [tile, row_half, g]
            return (group % 8) * (D // 8) + group // 16 * 2 + group // 8 % 2
        return group // 32 * 32 + group // 2 % 4 * 8 + group // 16 % 2 * 4 + group // 8 % 2 * 2 + group % 2
    PER: tl.constexpr = D // G
    if VALUE:  # token = [tile, col_half, t, pair]
        return (token // 2 * PER + group) * 2 + token % 2
    return ((token % 8 * 2 + token // 16) * 2 + token // 8 % 2) * PER + group


@triton.jit
def _pack(
    words,
    codes,
    weight,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    PER: tl.constexpr,
    AXIS: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add the codes of STEP channel tiles to the words of a plane, which starts in word ``FIRST``; ``weight``: 2^(bit of the
    first)."""
    CHUNKS: tl.constexpr = _chunks(D, WIDTH)
    MERGED: tl.constexpr = _merged(D, WIDTH)
    OUTER: tl.constexpr = 1 if VALUE and MERGED == 4 else HALVES
    REST: tl.constexpr = SPLITS // (2 if VALUE and MERGED == 4 else MERGED)
    FIELDS: tl.constexpr = STEP // CHUNKS
    after = ()
    for unit in tl.static_range(T // 32):
        for chunk in tl.static_range(CHUNKS):
            for h in tl.static_range(OUTER):
                for r in tl.static_range(REST):
                    part = codes[_index(chunk, h, unit * SPLITS + r, HALVES, SPLITS * T // 32, PER, AXIS)]
                    for i in tl.static_range(1, FIELDS * MERGED):
                        code = codes[
                            _index(
                                i // MERGED * CHUNKS + chunk,
                                _half(i % MERGED, h, MERGED, VALUE),
                                unit * SPLITS + _subset(i % MERGED, r, MERGED, SPLITS, VALUE),
                                HALVES,
                                SPLITS * T // 32,
                                PER,
                                AXIS,
                            )
                        ]
                        part = _fma(code, 1.0 * (1 << (WIDTH * i)), part)
                    after += (_fma(part, weight, words[len(after)]),)
    return after


@triton.jit
def _no_words(
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Words of a plane before any code: 2^23, so that sums of codes, which are exact, fill the low 16 bits."""
    MERGED: tl.constexpr = _merged(D, WIDTH)
    words = ()
    for _ in tl.static_range(T // 32 * _chunks(D, WIDTH) * HALVES * SPLITS // MERGED):
        words += (tl.full((32 // SPLITS, 16 // HALVES), 8388608.0, tl.float32),)
    return words


@triton.jit
def _store_words(
    words,
    out,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store a plane as kvfold.formats.packing.pack does; ``out`` points to 32-bit words, STRIDE of them in a unit."""
    CHUNKS: tl.constexpr = _chunks(D, WIDTH)
    MERGED: tl.constexpr = _merged(D, WIDTH)
    OUTER: tl.constexpr = 1 if VALUE and MERGED == 4 else HALVES
    REST: tl.constexpr = SPLITS // (2 if VALUE and MERGED == 4 else MERGED)
    ROWS: tl.constexpr = 8 if MERGED < 4 else 4
    for unit in tl.static_range(T // 32):
        for chunk in tl.static_range(CHUNKS):
            for h in tl.static_range(OUTER):
                channel = _channels(h, HALVES)[None, :]
                for r in tl.static_range(REST // 2 if VALUE else REST):
                    # place in the fragment, [token tile, g, t, col_half, row_half], two words of a pair together
                    token = _tokens(r * 2 if VALUE else r, SPLITS, VALUE)[:, None]
                    tile = token // 16 if MERGED == 1 else 0
                    if VALUE:
                        low = words[((unit * CHUNKS + chunk) * OUTER + h) * REST + 2 * r]
                        high = words[((unit * CHUNKS + chunk) * OUTER + h) * REST + 2 * r + 1]
                        place = ((tile * ROWS + channel % ROWS) * 4 + token // 2 % 4) * 4
                        place += token // 8 % 2 * 2 + channel // 8
                    else:
                        both = words[((unit * CHUNKS + chunk) * OUTER + h) * REST + r]
                        low, high = tl.split(tl.reshape(both, (32 // SPLITS, 8, 2)))
                        pair = tl.arange(0, 8)[None, :]
                        place = ((tile * ROWS + token % ROWS) * 4 + pair % 4) * 4
                        place += pair // 4 * 2 + token // 8 % 2
                    bits = (low.to(tl.int32, bitcast=True) & 0xFFFF) | (high.to(tl.int32, bitcast=True) << 16)
                    tl.store(out + (unit * STRIDE + chunk * 256) + place, bits)


@triton.jit
def _cut(x, T: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr):
    """Keys [T, CHANNELS] -> pieces, those of a channel tile together, in the order of :func:`_tokens`."""
    # unit, token tile, half of the tile, half of eight rows, row; channel tile, channel
    x = tl.reshape(x, (T // 32, 2, 2, 2, 4, CHANNELS // 16, 16))
    if SPLITS == 1:
        x = tl.permute(x, (1, 2, 3, 4, 6, 5, 0))
    elif SPLITS == 2:
        x = tl.permute(x, (2, 3, 4, 6, 5, 0, 1))
    elif SPLITS == 4:
        x = tl.permute(x, (2, 4, 6, 5, 0, 1, 3))
    else:
        x = tl.permute(x, (4, 6, 5, 0, 1, 3, 2))
    ROWS: tl.constexpr = 32 // SPLITS
    COUNT: tl.constexpr = CHANNELS // 16 * (T // 32) * SPLITS
    pieces = (tl.reshape(x, (ROWS, 16, COUNT)),)
    for level in tl.static_range(_log2(COUNT)):
        first, second = (), ()
        for i in tl.static_range(len(pieces)):
            a, b = tl.split(tl.reshape(pieces[i], (ROWS, 16, COUNT >> (level + 1), 2)))
            first += (a,)
            second += (b,)
        pieces = first + second
    flat = ()
    for i in tl.static_range(len(pieces)):
        flat += (tl.reshape(pieces[i], (ROWS, 16)),)
    return flat


@triton.jit
def _sign_bit(member):
    """Bit of a group's 32 that holds a member's sign (kvfold.formats.packing.pack_signs)."""
    return member % 2 * 16 + member // 16 % 2 * 8 + member // 8 % 2 * 4 + member // 2 % 4


@triton.jit
def _tile_out(
    codes,
    meta,
    aux,
    tile,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Where a tile's codes, metadata and groups' 32 bits are stored."""
    GROUPS: tl.constexpr = D if AXIS == 0 else T * D // G
    META: tl.constexpr = 2 * GROUPS if MODE == 0 else GROUPS
    return codes + tile * (T * D * BITS // 32), meta + tile * META, aux + tile * GROUPS
