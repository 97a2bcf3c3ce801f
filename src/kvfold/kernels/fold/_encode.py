# mypy: ignore-errors
"""The Triton code of :mod:`kvfold.kernels.fold.encode`.

Sums run in the order of a fixed tree of additions, whatever the layout of their operands over threads, and nothing is
contracted. So a block has the same bytes whether it came with a prompt, of whatever strides, or was closed in a decode step,
on a GPU and in the interpreter.
"""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import ROUND, _divided, _finite, _fma, _max, _over, _sum, _to_fp16
from kvfold.kernels.common._encode_nearest import LARGEST, SLOTS, _halves, _nearest
from kvfold.kernels.common._encode_step import _advance, _append, _blocks_due
from kvfold.kernels.common._encode_tile import _encode_tile, _load_state, _tokens_at
from kvfold.kernels.common._encode_words import _log2, _tile_out
from kvfold.kernels.fold._encode_codes import _across, _codes_tile, _root, _store_plane

# What a side is encoded as, one tuple of constants (:func:`kvfold.kernels.fold.encode.side`)
KIND = tl.constexpr(0)  # of its inner format: 0 affine groups, 1 uniform levels, 2 levels of a table, 3 signs, 4 codes
TILE = tl.constexpr(1)  # tokens that are encoded together
BITS = tl.constexpr(2)
VECTOR = tl.constexpr(2)  # channels that share a code
MEAN = tl.constexpr(3)  # whether pages have a mean
NORM = tl.constexpr(4)  # their norms: 0 none, 1 rms, 2 max
PAGE_TOKENS = tl.constexpr(5)
SEEN = tl.constexpr(6)
NUMBERS = tl.constexpr(7)  # numbers of a vector through a dense basis
FIT = tl.constexpr(7)  # of uniform levels and of codes: 0 least, 1 size, 2 unbiased, 3 rms
ROTATION = tl.constexpr(8)  # channels of a Hadamard block; 0: no basis
GROUP = tl.constexpr(7)  # of affine groups
AXIS = tl.constexpr(8)
MODE = tl.constexpr(9)
ORDER = tl.constexpr(9)  # of others' levels: 0 keys', 1 values' of tensor cores, 2 plain
CODES = tl.constexpr(9)  # of a table of vectors

ROWS = tl.constexpr(16)
"""Tokens whose statistics are summed side by side."""
PART = tl.constexpr(32)
"""Codes that vectors are compared with at a time."""


@triton.constexpr_function
def _step(bits):
    """Spacing of levels with the least squared error for a standard normal (kvfold.formats.uniform.STEP)."""
    return {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352}[bits]


@triton.jit
def _down(x, N: tl.constexpr, D: tl.constexpr):
    """Sum over tokens, [N, D] -> [D]: of the two halves, and so on."""
    for level in tl.static_range(_log2(N)):
        x = _sum(tl.reshape(x, (2, N >> (level + 1), D)), 0)
    return tl.reshape(x, (D,))


@triton.jit
def _hadamard(x, N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Hadamard blocks of SIZE channels of x [N, D], in the stages of kvfold.formats.basis.Hadamard."""
    first = tl.arange(0, 2)[None, None, :, None] == 0
    for stage in tl.static_range(_log2(SIZE)):
        pairs = tl.reshape(x, (N, D >> (stage + 1), 2, 1 << stage))
        total = _sum(pairs, 2)
        difference = _sum(tl.where(first, pairs, pairs * -1.0), 2)
        x = tl.reshape(tl.where(first, total[:, :, None, :], difference[:, :, None, :]), (N, D))
    if _log2(SIZE) % 2 == 0:
        return x * (1.0 / _root(SIZE))
    return _over(x, _root(SIZE))


@triton.jit
def _load(source, token, channel, real, RING: tl.constexpr):
    """Tokens [n] and channels [d] as float32 [n, d], 0 where they are not ``real``."""
    return _finite(tl.load(_tokens_at(source, token, RING) + channel[None, :], mask=real, other=0.0))


# ---- statistics ------------------------------------------------------------------------------------------------------


@triton.jit
def _counted(token, skip, COUNT: tl.constexpr, RING: tl.constexpr):
    """Which tokens of a page its statistics are taken of."""
    if RING == 3:
        return (token < COUNT) & (token >= skip)
    return token < COUNT


@triton.jit
def _count(skip, N: tl.constexpr, COUNT: tl.constexpr, RING: tl.constexpr):
    """Their number, float32 [N]."""
    if RING == 3:
        return tl.full((N,), 0.0, tl.float32) + (COUNT - skip)
    return tl.full((N,), COUNT, tl.float32)


@triton.jit
def _statistics(source, mean_out, norm_out, D: tl.constexpr, FORM: tl.constexpr, RING: tl.constexpr, skip=0):
    """Store what a page stores of its first tokens, with which ``source``
    (:func:`kvfold.kernels.common._encode_tile._tokens_at`) begins; with RING 3 of all but the first ``skip`` of them."""
    DP: tl.constexpr = triton.next_power_of_2(D)
    COUNT: tl.constexpr = FORM[SEEN]
    token = tl.arange(0, ROWS)
    channel = tl.arange(0, DP)
    known = channel < D
    mean = tl.full((DP,), 0.0, tl.float32)
    if FORM[MEAN]:
        total = tl.full((ROWS, DP), 0.0, tl.float32)
        for i in range(0, COUNT, ROWS):
            real = _counted(i + token, skip, COUNT, RING)[:, None] & known[None, :]
            total += _load(source, i + token, channel, real, RING)
        stored = _to_fp16(tl.math.div_rn(_down(total, ROWS, DP), _count(skip, DP, COUNT, RING)))
        tl.store(mean_out + channel, stored, mask=known)
        mean = stored.to(tl.float32)
    if FORM[NORM] > 0:
        sizes = tl.full((ROWS, DP), 0.0, tl.float32)
        for i in range(0, COUNT, ROWS):
            real = _counted(i + token, skip, COUNT, RING)[:, None] & known[None, :]
            x = tl.where(real, _load(source, i + token, channel, real, RING) - mean[None, :], 0.0)
            sizes = sizes + x * x if FORM[NORM] == 1 else tl.maximum(sizes, tl.abs(x))
        if FORM[NORM] == 1:
            size = tl.sqrt_rn(tl.math.div_rn(_down(sizes, ROWS, DP), _count(skip, DP, COUNT, RING)))
        else:
            size = _max(sizes, 0)
        most = _max(size, 0)
        relative = tl.maximum(tl.math.div_rn(size, tl.maximum(most, 1e-30) + tl.full((DP,), 0.0, tl.float32)), 1e-30)
        code = tl.minimum(tl.maximum(tl.log2(relative) * -24.0 + ROUND - ROUND, 0.0), 255.0)
        code = tl.where(most > 0.0, code, 0.0)
        tl.store(norm_out + channel, code.to(tl.int32).to(tl.uint8), mask=known)


@triton.jit(do_not_specialize=["first_page", "first_token", "old"])
def _statistics_kernel(
    ring,
    ring_stride_b,
    ring_stride_h,
    new,
    new_stride_b,
    new_stride_h,
    new_stride_t,
    rows,
    mean,
    norm,
    first_page,
    pages,
    heads,
    first_token,
    slots,
    old,
    D: tl.constexpr,
    FORM: tl.constexpr,
    PICKED: tl.constexpr,
):
    """Grid: (pages that begin at ``first_token`` and after, heads, batch)."""
    page = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    sequence = tl.load(rows + index).to(tl.int64) if PICKED else index
    source = (
        ring + sequence * ring_stride_b + head * ring_stride_h,
        D,
        1,
        first_token + page * FORM[PAGE_TOKENS],
        slots,
        new + index * new_stride_b + head * new_stride_h,
        new_stride_t,
        old,
    )
    at = ((sequence * heads + head) * pages + first_page + page) * D
    _statistics(source, mean + at, norm + at, D, FORM, 2)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@triton.jit
def _prepared(source, page, signs, first, N: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr, RING: tl.constexpr):
    """What the inner format stores of N tokens from ``first`` on, float32 [N, D padded to a power of two]; 0 in the padding.

    ``page``: the page's mean, the codes of its norms, the table of norms.
    """
    DP: tl.constexpr = triton.next_power_of_2(D)
    channel, token = tl.arange(0, DP), first + tl.arange(0, N)
    x = _load(source, token, channel, (token >= 0)[:, None] & (channel < D)[None, :], RING)
    inside = tl.where(channel < D, channel, 0)[None, :]
    mean, norm, inverse = _load_state(page, inside, FORM[MEAN], FORM[NORM] > 0, False)
    if FORM[MEAN]:
        x = x - mean
    if FORM[NORM] > 0:
        x = _divided(x, norm, inverse)
    if FORM[ROTATION] > 0:
        x = x * tl.load(signs + inside)
    if DP != D:
        x = tl.where((channel < D)[None, :], x, 0.0)
    return _hadamard(x, N, DP, FORM[ROTATION]) if FORM[ROTATION] > 1 else x


@triton.jit
def _levels(x, scale, real, MIDDLE: tl.constexpr):
    """Nearest levels of x [tokens, channels] over a scale per token (kvfold.formats.UniformTokens)."""
    # beyond these bounds nothing is left that fp16 could hold, and the reciprocal would not be finite
    size = tl.minimum(tl.maximum(tl.abs(scale), 1e-30), 1e30)
    safe = tl.where(scale == 0.0, 1.0, tl.where(scale < 0.0, size * -1.0, size))
    inverse, negative = tl.math.div_rn(1.0, safe)[:, None], (safe * -1.0)[:, None]
    near = x * inverse
    codes = _fma(_fma(near, negative, x), inverse, near) + MIDDLE + ROUND - ROUND
    return tl.where(real, tl.minimum(tl.maximum(codes, 0.0), 2 * MIDDLE) - MIDDLE, 0.0)


@triton.jit
def _fitted(size, along, squares, FIT: tl.constexpr):
    """Scales of levels (kvfold.formats.uniform.fitted) from a token's sums: of x squared, x times levels, levels squared."""
    if FIT == 2:
        return tl.where(along > 0.0, tl.math.div_rn(size, tl.where(along > 0.0, along, 1.0)), 0.0)
    squares = tl.where(squares > 0.0, squares, 1.0)
    return tl.math.div_rn(along, squares) if FIT == 0 else tl.sqrt_rn(tl.math.div_rn(size, squares))


@triton.jit
def _uniform_tile(source, page, signs, codes_out, scale_out, D: tl.constexpr, FORM: tl.constexpr, RING):
    """Encode 32 tokens; all pointers point to the first of them, or to their page."""
    DP: tl.constexpr = triton.next_power_of_2(D)
    BITS_: tl.constexpr = FORM[BITS]
    MIDDLE: tl.constexpr = ((1 << BITS_) - 1) / 2
    x = _prepared(source, page, signs, 0, 32, D, FORM, RING)
    real = (tl.arange(0, DP) < D)[None, :]
    size = _across(x * x, 32, DP)
    if BITS_ == 8:
        scale = tl.math.div_rn(_max(tl.abs(x), 1), tl.full((32,), MIDDLE, tl.float32))
    else:
        scale = tl.sqrt_rn(tl.math.div_rn(size, tl.full((32,), D, tl.float32))) * _step(BITS_)
    levels, along, squares = x, size, size
    for _ in range(3):  # once more than kvfold.formats.uniform.ROUNDS: the last codes are stored
        levels = _levels(x, scale, real, MIDDLE)
        along, squares = _across(x * levels, 32, DP), _across(levels * levels, 32, DP)
        scale = tl.math.div_rn(along, squares)
    if FORM[FIT] > 0:
        scale = _fitted(size, along, squares, FORM[FIT])
    tl.store(scale_out + tl.arange(0, 32), _to_fp16(scale))
    codes = tl.reshape((levels + MIDDLE).to(tl.int32), (32 * DP,))
    if BITS_ == 3:
        _store_plane(codes & 3, codes_out, D, 2, FORM[ORDER])
        _store_plane(codes >> 2, codes_out + 4 * D, D, 1, FORM[ORDER])
    else:
        _store_plane(codes, codes_out, D, BITS_, FORM[ORDER])


@triton.jit
def _vectors_tile(source, page, tables, codes_out, rms_out, D: tl.constexpr, FORM: tl.constexpr, RING):
    """Encode 32 tokens as codes of vectors; pointers as in :func:`_uniform_tile`. ``tables``: the Hadamard rotation's signs, if
    there is one, then what :func:`kvfold.kernels.common._encode_nearest._nearest` reads."""
    DP: tl.constexpr = triton.next_power_of_2(D)
    V: tl.constexpr = FORM[VECTOR]
    GROUPS: tl.constexpr = DP // V
    N: tl.constexpr = 2 * V  # tokens at a time: as many vectors as a program of DP / 16 warps has threads, for every V
    table = tables + (D if FORM[ROTATION] > 0 else 0)
    token, member, row = tl.arange(0, N), tl.arange(0, V), tl.arange(0, N * GROUPS)
    real = (tl.arange(0, DP) < D)[None, :]
    for first in range(0, 32, N):
        x = _prepared(source, page, tables, first, N, D, FORM, RING)
        size = _across(x * x, N, DP)
        scale = _to_fp16(tl.sqrt_rn(tl.math.div_rn(size, tl.full((N,), D, tl.float32))))
        safe = scale.to(tl.float32)
        safe = tl.where(safe == 0.0, 1.0, safe)[:, None]
        unit = _divided(x, safe, tl.math.div_rn(1.0, safe))
        unit = tl.reshape(tl.minimum(tl.maximum(unit, -LARGEST), LARGEST), (N * GROUPS, V))
        best = _nearest(_halves(unit), table, table + FORM[CODES] * SLOTS, FORM[CODES], min(PART, FORM[CODES]))
        out = codes_out + (first + row // GROUPS) * (D // V) + row % GROUPS
        tl.store(out, best.to(tl.uint8), mask=row % GROUPS < D // V)
        if FORM[FIT] < 3:
            levels = tl.reshape(tl.load(table + best[:, None] * SLOTS + member[None, :]) * -1.0, (N, DP))
            levels = tl.where(real, levels, 0.0)
            along, squares = _across(x * levels, N, DP), _across(levels * levels, N, DP)
            scale = _to_fp16(_fitted(size, along, squares, FORM[FIT]))
        tl.store(rms_out + first + token, scale)


@triton.jit
def _tile(
    source,
    page,
    signs,
    stored,
    unit,
    may_be_asym,
    D: tl.constexpr,
    FORM: tl.constexpr,
    VALUE: tl.constexpr,
    RING: tl.constexpr,
    WARPS: tl.constexpr,
    WIDTH: tl.constexpr = 0,
):
    """Encode the tokens of one tile, number ``unit`` of what ``stored`` (codes, metadata, 32 bits of each group) points to.

    WIDTH: of a slice of SQuat's update, which ``page[3]`` then points to.
    """
    codes, meta, aux = stored
    if FORM[KIND] == 4:
        _vectors_tile(
            source, page, signs, codes + unit * (32 * D // FORM[VECTOR]), meta + unit * 32, D, FORM, RING
        )  # fmt: skip
    elif FORM[KIND] > 1:
        at = unit * (2 * FORM[NUMBERS] * FORM[BITS])
        _codes_tile(
            source, page, signs, codes + at, meta + unit * 32, D, FORM[BITS], FORM[NUMBERS], FORM[MEAN], FORM[NORM] > 0,
            FORM[KIND] == 3, FORM[ORDER], RING,
        )  # fmt: skip
    elif FORM[KIND] == 1:
        at = unit * (2 * D * FORM[BITS])
        _uniform_tile(source, page, signs, codes + at, meta + unit * 32, D, FORM, RING)
    else:
        _encode_tile(
            source,
            page,
            (signs, 0, 0, 1.0),
            _tile_out(codes, meta, aux, unit, FORM[TILE], D, FORM[GROUP], FORM[AXIS], FORM[MODE], FORM[BITS]),
            may_be_asym,
            FORM[TILE],
            D,
            FORM[GROUP],
            FORM[AXIS],
            FORM[MODE],
            FORM[BITS],
            VALUE,
            FORM[MEAN],
            FORM[NORM] > 0,
            False,
            False,
            WIDTH,
            RING,
            WARPS,
        )


@triton.jit(do_not_specialize=["first_tile", "first_token", "old"])
def _blocks_kernel(
    ring,
    ring_stride_b,
    ring_stride_h,
    new,
    new_stride_b,
    new_stride_h,
    new_stride_t,
    rows,
    codes,
    meta,
    aux,
    mean,
    norm,
    table,
    signs,
    first_tile,
    tiles,
    pages,
    heads,
    first_token,
    slots,
    old,
    D: tl.constexpr,
    FORM: tl.constexpr,
    VALUE: tl.constexpr,
    PICKED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Grid: (tiles, heads, batch); the first tile is number ``first_tile`` of a sequence's storage, and token
    ``first_token``."""
    tile = first_tile + tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    sequence = tl.load(rows + index).to(tl.int64) if PICKED else index
    source = (
        ring + sequence * ring_stride_b + head * ring_stride_h,
        D,
        1,
        first_token + tl.program_id(0) * FORM[TILE],
        slots,
        new + index * new_stride_b + head * new_stride_h,
        new_stride_t,
        old,
    )
    lane = sequence * heads + head
    at = (lane * pages + tile * FORM[TILE] // FORM[PAGE_TOKENS]) * D
    page = (mean + at, norm + at, table, table)
    _tile(source, page, signs, (codes, meta, aux), lane * tiles + tile, True, D, FORM, VALUE, 2, WARPS)


# ---- a decode step ---------------------------------------------------------------------------------------------------


@triton.jit
def _close_side(
    ring,
    slots,
    stored,
    statistics,
    table,
    signs,
    boundary,
    storage,
    place,
    packed,
    due,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    FORM: tl.constexpr,
    VALUE: tl.constexpr,
    BOUNDARY: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Close the blocks that are due of one side (keys or values) of EACH heads of one sequence.

    ``statistics``: means and codes of norms of all pages; ``storage``: first block, blocks, pages; ``place``: sequence, the
    first head's number among all heads.
    """
    mean, norm = statistics
    first_block, blocks, pages = storage
    batch, lane = place
    PER_BLOCK: tl.constexpr = BLOCK // FORM[TILE]
    # the loop seldom runs: nothing of it is to be made, and kept in registers, before it
    for tile in tl.range(0, due * PER_BLOCK * EACH, disable_licm=True):
        i = tile
        if EACH > 1:
            i = tile % (due * PER_BLOCK)
            lane = place[1] + tile // (due * PER_BLOCK)
        first = packed + i * FORM[TILE]
        at = (lane * pages + (first - first_block * BLOCK) // FORM[PAGE_TOKENS]) * D
        source = (ring + lane * slots * D, D, 1, first, slots)
        if FORM[MEAN] or FORM[NORM] > 0:
            if first % FORM[PAGE_TOKENS] == 0:
                _statistics(source, mean + at, norm + at, D, FORM, True)
            tl.debug_barrier()  # what these threads stored, others read
        may_be_asym = (first // BLOCK + 1) * BLOCK <= tl.load(boundary + batch) if BOUNDARY else True
        unit = (lane * blocks - first_block) * PER_BLOCK + first // FORM[TILE]
        page = (mean + at, norm + at, table, table)
        _tile(source, page, signs, stored, unit, may_be_asym, D, FORM, VALUE, True, WARPS)


@triton.jit(do_not_specialize=["tokens", "first_block"])
def _step_kernel(
    key,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    k_stride_c,
    value,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    v_stride_c,
    sink_k,
    sink_v,
    ring_k,
    ring_v,
    k_codes,
    k_meta,
    k_aux,
    k_mean,
    k_norm,
    k_signs,
    v_codes,
    v_meta,
    v_aux,
    v_mean,
    v_norm,
    v_signs,
    table,
    boundary,
    counts,
    total_len,
    packed_len,
    sink_len,
    recent_len,
    ticket,
    tokens,
    heads,
    sinks,
    recent,
    slots,
    first_block,
    blocks,
    k_pages,
    v_pages,
    BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    CLOSE: tl.constexpr,
    ADVANCE: tl.constexpr,
    COUNTS: tl.constexpr,
    D: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BOUNDARY: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (2 heads / EACH, batch); even programs take keys, odd ones values. With EACH above 1, NEW is 0."""
    if EARLY:  # what attends begins after this kernel's end: its programs are to find empty multiprocessors
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0) // 2
    if EACH > 1:
        head *= EACH
    batch = tl.program_id(1)
    length = tl.load(total_len + batch).to(tl.int32)
    packed = tl.load(packed_len + batch).to(tl.int32)
    count = tl.load(counts + batch).to(tl.int32) if COUNTS else tokens
    due = _blocks_due(length, packed, sinks, recent, first_block, blocks, BLOCK) if CLOSE else 0
    lane = batch.to(tl.int64) * heads + head
    if tl.program_id(0) % 2 == 0:
        if CLOSE:
            _close_side(
                ring_k, slots, (k_codes, k_meta, k_aux), (k_mean, k_norm), table, k_signs, boundary,
                (first_block, blocks, k_pages), (batch, lane), packed, due, BLOCK, D, KEY, False, BOUNDARY, WARPS, EACH,
            )  # fmt: skip
        if NEW > 0:
            new = (key, k_stride_b, k_stride_h, k_stride_t, k_stride_c)
            _append(new, (sink_k, sinks, ring_k, slots), batch, head, lane, length, count, NEW, D)
    else:
        if CLOSE:
            _close_side(
                ring_v, slots, (v_codes, v_meta, v_aux), (v_mean, v_norm), table, v_signs, boundary,
                (first_block, blocks, v_pages), (batch, lane), packed, due, BLOCK, D, VALUE, True, BOUNDARY, WARPS, EACH,
            )  # fmt: skip
        if NEW > 0:
            new = (value, v_stride_b, v_stride_h, v_stride_t, v_stride_c)
            _append(new, (sink_v, sinks, ring_v, slots), batch, head, lane, length, count, NEW, D)
    if ADVANCE:
        after = length + (count if NEW > 0 else 0)
        closed = packed + due * BLOCK
        _advance(total_len, packed_len, sink_len, recent_len, ticket, batch, 2 * heads // EACH, after, closed, sinks)
