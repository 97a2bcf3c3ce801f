# mypy: ignore-errors
"""Attention over packed storage of any format that has a reader, in plain Triton: tiles are decoded on chip and multiplied.

What is the same for all formats is here: splits, softmax, statistics and bases of pages, keys before RoPE. What differs is one
function, the format's reader (:mod:`kvfold.kernels.generic.readers`), which the kernel is compiled with.
"""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

import triton
import triton.language as tl

from kvfold.kernels.common._sizes import PAGE
from kvfold.kernels.generic.readers._codes import channels

NORM_STEPS = tl.constexpr(48.0)


# tl.max and tl.sum were compiled when Triton was imported; these can be interpreted as well
@triton.jit
def _max(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, tl.standard._elementwise_max)


@triton.jit
def _sum(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, tl.standard._sum_combine)


@triton.jit
def _half(x):
    """A tile as an operand; readers of codes in the order of tensor cores return fp32."""
    if x.dtype == tl.float32:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(tl.float16)


@triton.jit
def _norms(data, at, channel, D: tl.constexpr):
    code = tl.load(data + at * D + channel, mask=channel < D, other=0).to(tl.float32)
    return tl.exp2(code * (-1.0 / NORM_STEPS))


@triton.jit
def _means(data, at, channel, D: tl.constexpr):
    return tl.load(data + at * D + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def _channel(place, D: tl.constexpr, GROUPS: tl.constexpr):
    """Channels in the order of a reader that has channels i, i + GROUPS, ... together; those beyond D stay what they are."""
    if GROUPS == 1:
        return place
    else:
        return tl.where(place < D, place % (D // GROUPS) * GROUPS + place // (D // GROUPS), place)


@triton.jit
def clean_scratch(scratch_ptr, program, K_SCRATCH: tl.constexpr, V_SCRATCH: tl.constexpr):
    """A program's own memory, all zeros: the keys' reader's, then the values'."""
    scratch = scratch_ptr + program.to(tl.int64) * (K_SCRATCH + V_SCRATCH)
    for at in range(0, K_SCRATCH + V_SCRATCH, 1024):
        words = at + tl.arange(0, 1024)
        tl.store(scratch + words, tl.zeros_like(words).to(tl.int64), mask=words < K_SCRATCH + V_SCRATCH)
    tl.debug_barrier()
    return scratch


@triton.jit
def moved(fields, steps, page, head):
    """Pointers to what a page and head has of every field; ``steps``: elements from a page, and from a head, to the next."""
    out = ()
    for i in tl.static_range(len(fields)):
        out = out + (fields[i] + (page * steps[2 * i] + head * steps[2 * i + 1]),)
    return out


@triton.jit
def attend_tiles(
    q_row, inside, bias, position, place, table, begin, end, first, used, head,
    k_fields, k_tables, k_mean, k_norm, k_basis, v_fields, v_tables, v_mean, v_norm, v_basis,
    freq_ptr, table_ptr, part_out, part_top, part_sum, slot, factor,
    K_READ: tl.constexpr, K_SPEC, V_READ: tl.constexpr, V_SPEC,
    D: tl.constexpr, DP: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr, V_OUT: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr,
    K_MEAN: tl.constexpr, K_NORM: tl.constexpr, K_BASIS: tl.constexpr,
    V_MEAN: tl.constexpr, V_NORM: tl.constexpr, V_BASIS: tl.constexpr,
    ROTARY: tl.constexpr, K_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    K_OF_PAGES: tl.constexpr, V_OF_PAGES: tl.constexpr, K_CENTRED: tl.constexpr, V_CENTRED: tl.constexpr,
    V_ROWS: tl.constexpr = False,
):  # fmt: skip
    """Attention of M query rows of one KV head over tiles ``begin`` to ``end``; what both kernels share.

    ``q_row``, ``bias`` [M]: pointers to the rows' queries and biases; ``inside`` [M]: which rows there are; ``slot`` [M]: where
    their results go. Of tokens ``first`` to ``used`` the scores count; ``position`` is that of the first tile's first token.
    ``head``: the KV head.

    Without a ``table``, ``place`` says where the head's storage begins: its first token, and the first page of keys and of
    values. With one, ``table`` points to the numbers of pages, and ``place`` has the steps of :func:`moved`: of both sides'
    fields, and of both sides' mean and norm.

    With V_ROWS sums of codes are turned into values by a matrix of the head, float32 [width + 1, D] from ``v_basis`` on, whose
    last row is multiplied with the sum of the weights.

    With K_CENTRED and V_CENTRED decoded vectors lack a mean of the head, fp16 [heads, D], the second of the tables. A value's
    joins the sums once. A key's is rotated with its token: its score is a sum over pairs of channels of the token's cosine and
    sine, times two numbers of the pair that depend on the query alone.
    """
    # queries, as fp16 times a power of two, so that large ones do not overflow and rounded ones stay what they are
    H: tl.constexpr = KW // 2 if ROTARY else KW
    K_IN: tl.constexpr = DP if K_BASIS else KW
    K_REAL: tl.constexpr = D if K_BASIS or ROTARY else K_SPEC[0]
    a_four = tl.arange(0, H // 4)
    b_four = a_four
    # all channels are turned, and in order: halves lie together, and the compiler is to see it
    WHOLE: tl.constexpr = ROTARY == D and D == KW and K_GROUPS == 1
    if WHOLE:
        b_four = a_four + H // 4
        q_channel = tl.arange(0, H)
        b_channel = q_channel + H
    elif ROTARY:
        half: tl.constexpr = ROTARY // (8 * K_GROUPS)  # fours of a group
        rest: tl.constexpr = (D - ROTARY) // (8 * K_GROUPS)  # channels that are not rotated are pairs of angle 0
        live = a_four < D // 8
        group = a_four // (half + rest) * 2 * (half + rest)
        a_four %= half + rest
        turned = a_four < half
        a_four = group + tl.where(turned, a_four, a_four + half)
        b_four = a_four + tl.where(turned, half, rest)
        a_four = tl.where(live, a_four, D)  # beyond: nothing is read
        b_four = tl.where(live, b_four, D)
        q_channel = _channel(channels(a_four), D, K_GROUPS)
        b_channel = _channel(channels(b_four), D, K_GROUPS)
    else:
        q_channel = _channel(tl.arange(0, K_IN), D, K_GROUPS)
    q_at = q_row[None, :]
    q = tl.load(q_at + q_channel[:, None], mask=inside[None, :] & (q_channel < K_REAL)[:, None], other=0.0).to(
        tl.float32
    )
    largest = _max(tl.abs(q), 0)
    if ROTARY:
        q_b = tl.load(q_at + b_channel[:, None], mask=inside[None, :] & (b_channel < K_REAL)[:, None], other=0.0).to(
            tl.float32
        )
        largest = tl.maximum(largest, _max(tl.abs(q_b), 0))
        freq = tl.load(freq_ptr + tl.arange(0, H))
        gain = tl.load(freq_ptr + H + tl.arange(0, H))
        at = tl.arange(0, T)[:, None] * H + tl.arange(0, H)[None, :]
        cos, sin = tl.load(table_ptr + at), tl.load(table_ptr + T * H + at)
    exponent = tl.minimum(tl.maximum(largest, 1e-30), 1e37).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[None, :]
    q *= inverse
    if ROTARY:
        q_b *= inverse
    row_factor = factor * exponent.to(tl.float32, bitcast=True)
    q16 = q.to(tl.float16)
    if K_BASIS:
        d_channel = tl.arange(0, DP)
        w_channel = tl.arange(0, KW)
        inside_k = (d_channel < D)[None, :] & (w_channel < K_SPEC[0])[:, None]
        turn = tl.load(k_basis + w_channel[:, None] * D + d_channel[None, :], mask=inside_k, other=0.0)

    if K_CENTRED:
        mean_a = tl.load(k_tables[1] + head * D + q_channel, mask=q_channel < D, other=0.0).to(tl.float32)
        size = _max(tl.abs(mean_a), 0)
        if ROTARY:
            mean_b = tl.load(k_tables[1] + head * D + b_channel, mask=b_channel < D, other=0.0).to(tl.float32)
            size = tl.maximum(size, _max(tl.abs(mean_b), 0))
            # relative to a power of two, for fp16
            mean_size = (tl.maximum(size, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            mean_a = (mean_a / mean_size)[:, None]
            mean_b = (mean_b / mean_size)[:, None]
        else:
            mean_score = _sum(q * mean_a[:, None], 0)[None, :]

    v_channel = tl.arange(0, VW)
    v_four = tl.arange(0, VW // 4)
    m_channel = tl.arange(0, DP)
    top = tl.full([M], -1.0e30, tl.float32)  # finite, so that differences are never NaN
    total = tl.full([M], 0.0, tl.float32)
    acc = tl.full([VW, M], 0.0, tl.float32)
    mean_acc = tl.full([DP, M], 0.0, tl.float32)
    for tile in range(begin, end):
        left = used - tile * T
        if table is None:
            at_token = place[0] + tile * T
            k_page = place[1] + tile * T // PAGE
            v_page = place[2] + tile * T // PAGE
            k_here, k_mean_here, k_norm_here = k_fields, k_mean, k_norm
            v_here, v_mean_here, v_norm_here = v_fields, v_mean, v_norm
        else:  # the first of its page's storage
            page = tl.load(table + tile * T // PAGE).to(tl.int64)
            k_page = page * 0
            v_page = k_page
            at_token = k_page + (tile * T - tile * T // PAGE * PAGE)
            k_here = moved(k_fields, place[0], page, head)
            v_here = moved(v_fields, place[1], page, head)
            k_mean_here, k_norm_here = moved((k_mean, k_norm), place[2], page, head)
            v_mean_here, v_norm_here = moved((v_mean, v_norm), place[3], page, head)
        k_more, v_more = k_tables, v_tables
        if K_OF_PAGES:
            k_more = k_tables + (k_page,)
        if V_OF_PAGES:
            v_more = v_tables + (v_page,)
        k_a, k_scale = K_READ(k_here, k_more, head, at_token, left, a_four, T, K_SPEC)
        if ROTARY:
            k_b, _ = K_READ(k_here, k_more, head, at_token, left, b_four, T, K_SPEC)
            angle = (position + tile * T).to(tl.float32) * freq
            back_cos, back_sin = (tl.cos(angle) * gain)[:, None], (tl.sin(angle) * gain)[:, None]
            turned_a = k_a * cos - k_b * sin
            k_b = k_b * cos + k_a * sin
            query_a, query_b = q * back_cos + q_b * back_sin, q_b * back_cos - q * back_sin
            score = tl.dot(turned_a, query_a.to(tl.float16))
            score = tl.dot(k_b, query_b.to(tl.float16), score)
            if K_CENTRED:
                mean_score = tl.dot(cos, (mean_a * query_a + mean_b * query_b).to(tl.float16))
                mean_score = tl.dot(sin, (mean_a * query_b - mean_b * query_a).to(tl.float16), mean_score) * mean_size
        else:
            query = q16
            if K_NORM:
                query = (q * _norms(k_norm_here, k_page, q_channel, D)[:, None]).to(tl.float16)
            if K_BASIS:
                query = tl.dot(turn, query).to(tl.float16)
            score = tl.dot(_half(k_a), query)
        score = score * k_scale[:, None]
        if K_CENTRED:
            score += mean_score
        if K_MEAN:
            score += _sum(q * _means(k_mean_here, k_page, q_channel, D)[:, None], 0)[None, :]
        score = score * row_factor[None, :]
        score = tl.where((tl.arange(0, T) < left)[:, None], score, float("-inf"))
        if table is not None:
            score = tl.where((tl.arange(0, T) + tile * T >= first)[:, None], score, float("-inf"))
        new = tl.maximum(top, _max(score, 0))
        p = tl.exp2(score - new[None, :])
        before = tl.exp2(top - new)
        now = _sum(p, 0)
        total = total * before + now
        top = new
        v, v_scale = V_READ(v_here, v_more, head, at_token, left, v_four, T, V_SPEC)
        # relative to the tile's largest, so that small values keep their digits in fp16
        most = _max(tl.abs(v_scale), 0)
        most = tl.where(most > 0, most, 1.0)
        sums = tl.dot(tl.trans(_half(v)), (p * (v_scale / most)[:, None]).to(tl.float16)) * most
        if V_NORM:
            sums *= _norms(v_norm_here, v_page, v_channel, D)[:, None]
        acc = acc * before[None, :] + sums
        if V_MEAN:
            mean = _means(v_mean_here, v_page, m_channel, D)
            mean_acc = mean_acc * before[None, :] + now[None, :] * mean[:, None]

    if HAS_BIAS:  # the same for all packed tokens
        if begin < end:
            top += tl.load(bias, mask=inside, other=0.0) * factor
    tl.store(part_top + slot, top, mask=inside)
    tl.store(part_sum + slot, total, mask=inside)
    out = part_out + slot[None, :] * V_OUT
    if V_BASIS:
        size = _max(tl.abs(acc), 0)
        size = tl.where(size > 0, size, 1.0)[None, :]
        inside_v = (v_channel < V_SPEC[0])[None, :] & (m_channel < D)[:, None]
        back = tl.load(v_basis + m_channel[:, None] * V_SPEC[0] + v_channel[None, :], mask=inside_v, other=0.0)
        acc = tl.dot(back, (acc / size).to(tl.float16)) * size + mean_acc
        tl.store(out + m_channel[:, None], acc, mask=inside[None, :] & (m_channel < V_OUT)[:, None])
    elif V_ROWS:
        rows = v_basis + head * ((V_SPEC[0] + 1) * D)
        for first in range(0, DP, 16):
            channel = first + tl.arange(0, 16)
            real = (v_channel < V_SPEC[0])[:, None] & (channel < D)[None, :]
            some = tl.load(rows + v_channel[:, None] * D + channel[None, :], mask=real, other=0.0)
            whole = tl.load(rows + V_SPEC[0] * D + channel, mask=channel < D, other=0.0)
            value = tl.dot(tl.trans(some), acc, input_precision="tf32x3") + whole[:, None] * total[None, :]
            tl.store(out + channel[:, None], value, mask=inside[None, :] & (channel < D)[:, None])
    else:
        if V_MEAN:
            acc += mean_acc
        if V_CENTRED:
            mean = tl.load(v_tables[1] + head * D + v_channel, mask=v_channel < D, other=0.0).to(tl.float32)
            acc += mean[:, None] * total[None, :]
        tl.store(out + v_channel[:, None], acc, mask=inside[None, :] & (v_channel < V_OUT)[:, None])


@triton.jit(
    do_not_specialize=[
        "heads",
        "rows",
        "row_blocks",
        "start",
        "tokens",
        "room",
        "k_pages",
        "v_pages",
        "splits",
        "processors",
        "part",
        "parts",
    ]
)
def blocks_kernel(
    q_ptr, bias_ptr,
    k_fields, k_tables, k_mean, k_norm, k_basis,
    v_fields, v_tables, v_mean, v_norm, v_basis,
    packed_len_ptr, position_ptr, freq_ptr, table_ptr,
    part_out, part_top, part_sum,
    scratch_ptr, factor, heads, rows, row_blocks, start, tokens, room, k_pages, v_pages, splits, processors, part, parts,
    K_READ: tl.constexpr, K_SPEC, V_READ: tl.constexpr, V_SPEC,
    D: tl.constexpr, DP: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr, V_OUT: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr,
    K_MEAN: tl.constexpr, K_NORM: tl.constexpr, K_BASIS: tl.constexpr,
    V_MEAN: tl.constexpr, V_NORM: tl.constexpr, V_BASIS: tl.constexpr,
    ROTARY: tl.constexpr, K_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    K_SCRATCH: tl.constexpr, V_SCRATCH: tl.constexpr, K_OF_PAGES: tl.constexpr, V_OF_PAGES: tl.constexpr,
    BY_HEAD: tl.constexpr, K_CENTRED: tl.constexpr, V_CENTRED: tl.constexpr,
):  # fmt: skip
    """Attention of M query rows of one KV head of one sequence over one split of a span's packed tokens.

    Grid: (batch * heads * row_blocks, splits). The span holds tokens ``start`` to ``start + tokens`` of every sequence's packed
    part; from one KV head's storage to the next are ``room`` tokens, and ``k_pages`` and ``v_pages`` pages. ``factor`` is the
    scale times log2(e). A tile is T tokens of one page.

    Decoded keys have KW channels and values VW (powers of two, the last ones perhaps padding). With K_BASIS the kernel turns
    queries of D channels (DP with padding) into KW: ``k_basis`` is fp16 [width, D]. With V_BASIS it turns sums of VW channels
    back: ``v_basis`` is fp16 [D, width]. Products have tokens or channels as rows and queries as columns. V_OUT
    channels are written.

    With ROTARY, keys are stored before RoPE: tiles are read as the two halves of its pairs, KW / 2 channels each; queries are
    rotated back by the position of the tile's first token, and keys by the rest (``table_ptr``, fp16 [2, T, KW / 2]). With
    K_GROUPS, tiles have channels i, i + K_GROUPS, ... together, and each half of a group is a half's part.
    """
    job = tl.program_id(0)
    split = tl.program_id(1)
    if BY_HEAD:
        # programs begin one by one on all multiprocessors; those of one share a head, whose tables fill its cache
        programs = tl.num_programs(0) * splits
        place = split * tl.num_programs(0) + job
        where = place % processors
        place = where * (programs // processors) + tl.minimum(where, programs % processors) + place // processors
        job = place // splits
        split = place % splits
    head = job // row_blocks
    row = job % row_blocks * M + tl.arange(0, M)
    batch = head // heads
    used = tl.minimum((tl.load(packed_len_ptr + batch) - start).to(tl.int32), tokens)
    tiles = (tl.maximum(used, 0) + T - 1) // T
    each = (tiles + splits - 1) // splits
    begin = split * each
    end = tl.minimum(begin + each, tiles)
    storage = head.to(tl.int64) * room
    if K_SCRATCH + V_SCRATCH:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        scratch = clean_scratch(scratch_ptr, program, K_SCRATCH, V_SCRATCH)
        if K_SCRATCH:
            k_tables = k_tables + (scratch,)
        if V_SCRATCH:
            v_tables = v_tables + (scratch + K_SCRATCH,)
    inside = row < rows
    K_REAL: tl.constexpr = D if K_BASIS or ROTARY else K_SPEC[0]
    q_row = q_ptr + (head.to(tl.int64) * rows + row) * K_REAL
    position = 0
    if ROTARY:
        position = tl.load(position_ptr + batch) + start
    bias = bias_ptr + head.to(tl.int64) * rows + row
    slot = (head.to(tl.int64) * parts + part + split) * rows + row
    place = (storage, head.to(tl.int64) * k_pages, head.to(tl.int64) * v_pages)
    attend_tiles(
        q_row, inside, bias, position, place, None, begin, end, 0, used, head % heads,
        k_fields, k_tables, k_mean, k_norm, k_basis, v_fields, v_tables, v_mean, v_norm, v_basis,
        freq_ptr, table_ptr, part_out, part_top, part_sum, slot, factor,
        K_READ, K_SPEC, V_READ, V_SPEC, D, DP, KW, VW, V_OUT, M, T, K_MEAN, K_NORM, K_BASIS, V_MEAN, V_NORM, V_BASIS,
        ROTARY, K_GROUPS, HAS_BIAS, K_OF_PAGES, V_OF_PAGES, K_CENTRED, V_CENTRED,
    )  # fmt: skip
