# mypy: ignore-errors
"""Attention over packed affine groups in plain order, in plain Triton: tiles are decoded on chip and multiplied at once.

A tile is UNITS units of 32 tokens by W channels, decoded to fp16 in three instructions for two elements: a byte under the
exponent of 1024 is a number already once all but its field is masked off, one multiply-add makes it the code itself, and one
more applies scale and zero-point. A byte holds several tokens of one channel; each of them loads it, which costs the L1 cache a
little and spares a rearrangement. Products accumulate in float32.

For few query rows (FLIP) a tile is loaded in five dimensions, the first two of them the lanes of a warp, so that each lane
loads and decodes what it needs as the A operand of its MMAs: a product does not mind the order of what it sums over, nor of
its rows. Channels of keys are reordered together with those of the query, tokens of values together with the weights.

A head whose size is no power of two is read in two pieces of channels, a power of two each (the second may be padded).
"""

import triton
import triton.language as tl

PTX = tl.constexpr(not triton.knobs.runtime.interpret)
"""Unpack two elements with one instruction; Triton's interpreter cannot."""


@triton.jit
def _load(at, mask):
    if mask is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def _bytes(data, unit, token, channel, seen, D: tl.constexpr, UNIT_BYTES: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes of a plane of ``WIDTH`` bits, each as often as it holds tokens."""
    rows: tl.constexpr = 4 * WIDTH  # rows of bytes in a unit
    return _load(data + (unit * UNIT_BYTES + token % rows * D + channel), seen)


@triton.jit
def _codes(x, token, WIDTH: tl.constexpr):
    """Codes of a plane as fp16: field ``token // (4 * WIDTH)`` of its bytes."""
    rows: tl.constexpr = 4 * WIDTH
    at = (token // rows * WIDTH).to(tl.uint16)
    mask = ((((1 << WIDTH) - 1) << at) | 0x6400).to(tl.uint16)  # leaves 1024 + code * 2^at
    scale = ((15 - at) << 10).to(tl.uint16)  # 2^-at as fp16: its exponent plus 15, at bit 10
    shift = ((25 - at) << 10 | 0x8000).to(tl.uint16)  # -1024 * 2^-at
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $2, 0x64646464, 0x5140;
            prmt.b32 b, $2, 0x64646464, 0x7362;
            and.b32 a, a, $3;
            and.b32 b, b, $4;
            fma.rn.f16x2 $0, a, $5, $7;
            fma.rn.f16x2 $1, b, $6, $8;
            }""",
            "=r,=r,r,r,r,r,r,r,r", [x, mask, scale, shift], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        number = ((x.to(tl.uint16) | 0x6400) & mask).to(tl.float16, bitcast=True)
        return number * scale.to(tl.float16, bitcast=True) + shift.to(tl.float16, bitcast=True)


@triton.jit
def _signed(codes, words, bit):
    """Codes, negative where bit ``bit`` of their sign word is set."""
    sign = ((words.to(tl.uint16, bitcast=True) >> bit.to(tl.uint16)) & 1) << 15
    return (codes.to(tl.uint16, bitcast=True) ^ sign).to(tl.float16, bitcast=True)


@triton.jit
def _zero_of(aux, at, words, mask, GROUP: tl.constexpr):
    """Zero-points of asymmetric groups of a hybrid format, fp16; their words begin at ``at``."""
    if GROUP == 16:
        return words.to(tl.float16, bitcast=True)
    else:
        low, high = _load(aux + at, mask).to(tl.int32), _load(aux + at + 1, mask).to(tl.int32)
        wide = ((low & 0xFFFF) | (high << 16)).to(tl.float32, bitcast=True)
        return tl.minimum(tl.maximum(wide, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _tokens(UNITS: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr):
    """Tokens of a tile as its codes are loaded; see :func:`_tile`."""
    high, low = tl.arange(0, UNITS * 32 // LANES)[None, None, :, None, None], tl.arange(0, LANES)
    if KEYS:
        return high * LANES + low[None, :, None, None, None]
    else:
        return high * LANES + low[:, None, None, None, None]


@triton.jit
def _channels(W: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, KEYS: tl.constexpr):
    """First channels of the chunks of B that lanes load, CHUNKS of them side by side; see :func:`_tile`."""
    some, chunk = tl.arange(0, W // (CHUNKS * B))[None, None, None, :, None], tl.arange(0, CHUNKS)
    if KEYS:
        return (some * CHUNKS + chunk[:, None, None, None, None]) * B
    else:
        return (some * CHUNKS + chunk[None, :, None, None, None]) * B


@triton.jit
def _units(index, last, UNITS: tl.constexpr):
    """Units of tokens of a tile; those after the last one are that one."""
    if UNITS == 1:
        return index // 32
    else:
        return tl.minimum(index // 32, last)


@triton.jit
def _tile(
    codes, meta, aux, first, last, channel, seen, START: tl.constexpr, W: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr,
    KEYS: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Load a tile: bytes of its codes (of both planes), scales, zero-points, and sign words, for :func:`_decoded`.

    ``first`` is its first unit, ``last`` the last one of it that exists; later ones repeat it. Channels that are not ``seen``
    become 0; None: all are. Where groups run along channels (AXIS 1), ``channel`` is START, START + 1, ...

    With KEYS dimensions are [channel / B % 4, token % 8, token / 8, channel / 4B, channel % B], else [token % 4,
    channel / B % 8, token / 4, channel / 8B, channel % B]. Without FLIP they are plainly [channel / B, 1, token, 1,
    channel % B].
    """
    LANES: tl.constexpr = (8 if KEYS else 4) if FLIP else 1
    index = _tokens(UNITS, LANES, KEYS)
    unit = _units(index, last, UNITS)
    token = index % 32
    data = codes + first.to(tl.int64) * (4 * D * BITS)
    x = _bytes(data, unit, token, channel, seen, D, 4 * D * BITS, 2 if BITS == 3 else BITS)
    more = x
    if BITS == 3:
        more = _bytes(data + 8 * D, unit, token, channel, seen, D, 4 * D * BITS, 1)
    if AXIS == 0:
        PARTS: tl.constexpr = 2 if GROUP == 16 or MODE != 0 else 1  # of a unit
        N: tl.constexpr = D
        base = first.to(tl.int64) * 32 // GROUP
        part = tl.arange(0, UNITS * PARTS)[None, None, :, None, None]
        start = _units(part // PARTS * 32, last, UNITS) * 32 + part % PARTS * 16
        if GROUP > 32:
            start += first * 32 - base.to(tl.int32) * GROUP  # from the beginning of the tile's first group
        row = start // GROUP
        column = channel
        word = start % GROUP // 16
        mask = seen
    else:
        N: tl.constexpr = 32 * D // GROUP
        base = first.to(tl.int64)
        begin = START + _channels(W, B, (4 if KEYS else 8) if FLIP else W // B, KEYS)
        row = unit
        column = token * (D // GROUP) + begin // GROUP
        word = begin % GROUP // 16
        mask = None if seen is None else begin < D
    EACH: tl.constexpr = 2 if MODE == 0 else 1  # numbers per group in ``meta``
    meta += base * (EACH * N)
    at = row * (EACH * N) + column
    scale = _load(meta + at, mask)
    zero = scale
    words = scale
    if MODE == 0:
        zero = _load(meta + (N + at), mask)
    else:
        aux += base * (N * GROUP // 16)
        at = at * (GROUP // 16)
        words = _load(aux + (at + word), mask)
        if MODE == 2:
            zero = _zero_of(aux, at, words, mask, GROUP)
    return x, more, scale, zero, words


@triton.jit
def _decoded(
    tile, channel, BITS: tl.constexpr, AXIS: tl.constexpr, MODE: tl.constexpr, UNITS: tl.constexpr, LIMIT: tl.constexpr,
    KEYS: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Decode to fp16 what :func:`_tile` loaded, in its dimensions."""
    LANES: tl.constexpr = (8 if KEYS else 4) if FLIP else 1
    A: tl.constexpr = UNITS * 32 // LANES
    token = _tokens(UNITS, LANES, KEYS) % 32
    codes, more, scale, zero, words = tile
    x = _codes(codes, token, 2 if BITS == 3 else BITS)
    if BITS == 3:
        x += 4.0 * _codes(more, token, 1)
    if MODE != 0:
        if MODE == 2:
            asym = scale.to(tl.int16, bitcast=True) < 0  # a negative scale, -0 included, marks an asymmetric group
            zero = tl.where(asym, zero, 0.0).to(tl.float16)
            words = tl.where(asym, 0, words).to(tl.int16)
            scale = tl.abs(scale)
        else:
            zero = tl.zeros_like(scale)
        x = _signed(x, _over(words, AXIS, A, UNITS), token % 16 if AXIS == 0 else channel % 16)
    LEVELS: tl.constexpr = (1 << BITS) - 1
    scale = tl.minimum(scale, LIMIT / LEVELS - zero * (1.0 / LEVELS))  # nothing decodes to an infinity
    x = x * _over(scale, AXIS, A, UNITS)
    if MODE != 1:
        x += _over(zero, AXIS, A, UNITS)
    return x


@triton.jit
def _ahead(
    codes, meta, first, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Bring codes and metadata of the tile that begins with unit ``first`` to the first cache, 128 bytes a lane."""
    CODES: tl.constexpr = UNITS * 4 * D * BITS
    META: tl.constexpr = UNITS * 32 * D // GROUP * (4 if MODE == 0 else 2)
    LINES: tl.constexpr = (CODES + 127) // 128
    COUNT: tl.constexpr = LINES + (META + 127) // 128
    if PTX:
        i = tl.arange(0, 32 if COUNT <= 32 else 64 if COUNT <= 64 else 128)
        unit = first.to(tl.int64)
        at = codes.to(tl.int64) + unit * (4 * D * BITS) + i * 128
        more = meta.to(tl.int64) + unit * (META // UNITS) + (i - LINES) * 128
        at = tl.where(i < LINES, at, tl.where(i < COUNT, more, codes.to(tl.int64)))
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _over(x, AXIS: tl.constexpr, A: tl.constexpr, UNITS: tl.constexpr):
    """Numbers of parts of units [parts, ...], to be broadcast over their tokens [A, ...]; those of tokens as they are."""
    if AXIS == 0:
        E: tl.constexpr = x.shape[0]
        F: tl.constexpr = x.shape[1]
        P: tl.constexpr = x.shape[2]
        C: tl.constexpr = x.shape[3]
        B: tl.constexpr = x.shape[4]
        return tl.reshape(tl.broadcast_to(x[:, :, :, None, :, :], (E, F, P, A // P, C, B)), (E, F, A, C, B))
    else:
        return x


@triton.jit
def _keys(x, FLIP: tl.constexpr):
    """Keys as an operand [tokens, channels]. With FLIP, channels are in the order in which lanes have them."""
    L: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    A: tl.constexpr = x.shape[2]
    C: tl.constexpr = x.shape[3]
    B: tl.constexpr = x.shape[4]
    if FLIP:
        x = tl.permute(tl.reshape(x, (L, K, A, C, B // 4, 4)), (2, 1, 3, 4, 0, 5))
    else:
        x = tl.permute(x, (2, 1, 3, 0, 4))
    return tl.reshape(x, (A * K, C * L * B))


@triton.jit
def _values(x, FLIP: tl.constexpr):
    """Values as an operand: [tokens, channels], or with FLIP [channels, tokens] in the order in which lanes have them."""
    L: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    A: tl.constexpr = x.shape[2]
    C: tl.constexpr = x.shape[3]
    B: tl.constexpr = x.shape[4]
    if FLIP:
        x = tl.permute(tl.reshape(x, (L, K, A // 4, 4, C, B)), (4, 5, 1, 2, 0, 3))
        return tl.reshape(x, (C * B * K, A * L))
    else:
        return _keys(x, False)


@triton.jit
def _value_channels(x, FLIP: tl.constexpr):
    """Channels of the sums of :func:`_values`."""
    if FLIP:
        K: tl.constexpr = x.shape[1]
        C: tl.constexpr = x.shape[3]
        B: tl.constexpr = x.shape[4]
        return tl.reshape(tl.permute(tl.reshape(x, (K, C, B)), (1, 2, 0)), (C * B * K,))
    else:
        return tl.reshape(_keys(x, False), (x.shape[0] * x.shape[3] * x.shape[4],))


@triton.jit
def _weights(p, FLIP: tl.constexpr):
    """Weights of tokens in the order of :func:`_values`."""
    if FLIP:
        T: tl.constexpr = p.shape[0]
        M: tl.constexpr = p.shape[1]
        p = tl.reshape(tl.permute(tl.reshape(p, (T // 16, 4, 4, M)), (0, 2, 1, 3)), (T, M))
    return p


@triton.jit
def _rotated(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _cos_sin(turns):
    """Cosine and sine of turns in [-1/2, 1/2]."""
    angle = turns * 6.283185307179586
    if PTX:
        cos, sin = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $2; sin.approx.f32 $1, $2;", "=f,=f,f", [angle], dtype=(tl.float32, tl.float32), is_pure=True,
            pack=1,
        )  # fmt: skip
        return cos, sin
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def _turned_back(q_a, q_b, freq_ptr, pair, position, KA: tl.constexpr):
    """Queries rotated back by a position, as fp16. ``freq_ptr``: turns per token, what float32 leaves of them, gains."""
    x = position.to(tl.float32)
    turns, rest, gain = tl.load(freq_ptr + pair), tl.load(freq_ptr + KA + pair), tl.load(freq_ptr + 2 * KA + pair)
    whole = tl.floor(x * turns + 0.5)
    cos, sin = _cos_sin(tl.fma(x, turns, -whole) + x * rest)
    q_a, q_b = _rotated(q_a, q_b, (cos * gain)[None, :], (sin * -gain)[None, :])
    return q_a.to(tl.float16), q_b.to(tl.float16)


@triton.jit
def _scores(q, k, score, FLIP: tl.constexpr):
    """Products [rows, tokens], or [tokens, rows], of queries [rows, channels] and keys [tokens, channels], plus ``score``."""
    if FLIP:
        return tl.dot(k, tl.trans(q), score)
    else:
        return tl.dot(q, tl.trans(k), score)


@triton.jit
def _sums(p, v, acc, FLIP: tl.constexpr):
    """Weighted sums [rows, channels], or [channels, rows], of values [tokens, channels], plus ``acc``."""
    if FLIP:
        return tl.dot(v, p, acc)
    else:
        return tl.dot(p, v, acc)


@triton.jit
def _of_rows(x, FLIP: tl.constexpr):
    """A number per query row as it meets scores and sums."""
    if FLIP:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def _of_tokens(x, FLIP: tl.constexpr):
    """A number per token as it meets scores."""
    return _of_rows(x, not FLIP)


@triton.jit(do_not_specialize=["start", "units", "room", "splits", "part", "parts", "rows", "row_blocks", "heads"])
def tiles_kernel(
    q_ptr, bias_ptr, k_codes, k_meta, k_aux, v_codes, v_meta, v_aux, packed_len_ptr,
    position_ptr, freq_ptr, table_ptr,
    part_out, part_top, part_sum,
    factor, heads, rows, row_blocks, start, units, room, splits, part, parts,
    D: tl.constexpr, M: tl.constexpr, UNITS: tl.constexpr, FLIP: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, K_SPLIT: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr,
    ROTARY: tl.constexpr, HINT: tl.constexpr, HAS_BIAS: tl.constexpr,
    K_BITS: tl.constexpr, K_AXIS: tl.constexpr, K_MODE: tl.constexpr, K_GROUP: tl.constexpr,
    V_BITS: tl.constexpr, V_AXIS: tl.constexpr, V_MODE: tl.constexpr, V_GROUP: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Attention of M query rows of one KV head of one sequence over one split of a span's packed tokens.

    Grid: (batch * heads * row_blocks, splits). The span holds tokens ``start`` to ``start + 32 * units`` of every sequence's
    packed part; from one KV head's storage to the next are ``room`` units. ``factor`` is the scale times log2(e).

    Keys are read in pieces of KA and KB channels (KB may be 0), the second from channel K_SPLIT; values in pieces of VA and VB.
    With ROTARY, keys are stored before RoPE and the pieces are the two halves of its pairs: queries are rotated back by the
    position of the first token of TURNED tiles, in float32, and keys by the rest.

    With FLIP, for few query rows, products are computed transposed, so that tokens and channels are the rows of an MMA and
    queries its 8 columns.
    """
    A_COUNT: tl.constexpr = D // 2 if ROTARY else D
    T: tl.constexpr = UNITS * 32
    KB0: tl.constexpr = KB if KB else 16
    VB0: tl.constexpr = VB if VB else 16
    # adjacent channels that a lane loads
    BA: tl.constexpr = min(8 if ROTARY else 16, KA // 4 if FLIP else KA)
    BB: tl.constexpr = BA if ROTARY else min(16, KB0 // 4 if FLIP else KB0)
    CA: tl.constexpr = min(16, VA // 8 if FLIP else VA)
    CB: tl.constexpr = min(16, VB0 // 8 if FLIP else VB0)
    TOKENS: tl.constexpr = 0 if FLIP else 1  # axis of scores
    K_LIMIT: tl.constexpr = 46000.0 if ROTARY else 65400.0  # rotated, it may grow by the root of two
    head = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * M + tl.arange(0, M)
    batch = head // heads
    split = tl.program_id(1)
    used = tl.minimum((tl.load(packed_len_ptr + batch) - start).to(tl.int32) // 32, units)
    tiles = (tl.maximum(used, 0) + UNITS - 1) // UNITS
    each = (tiles + splits - 1) // splits
    begin = split * each
    end = tl.minimum(begin + each, tiles)

    units_before = head.to(tl.int64) * room
    k_codes += units_before * (4 * D * K_BITS)
    v_codes += units_before * (4 * D * V_BITS)
    k_meta += units_before * (32 * D // K_GROUP * (2 if K_MODE == 0 else 1))
    v_meta += units_before * (32 * D // V_GROUP * (2 if V_MODE == 0 else 1))
    k_aux += units_before * (2 * D)
    v_aux += units_before * (2 * D)

    # channels of the pieces
    a_index = _channels(KA, BA, 4 if FLIP else KA // BA, True) + tl.arange(0, BA)[None, None, None, None, :]
    b_index = _channels(KB0, BB, 4 if FLIP else KB0 // BB, True) + tl.arange(0, BB)[None, None, None, None, :]
    a_channel, b_channel = a_index, b_index + K_SPLIT
    k_seen_a, k_seen_b = None, None
    if ROTARY:
        rest = D - ROTARY  # channels that are not rotated are pairs of angle 0
        a_channel = tl.where(a_index < ROTARY // 2, a_index, a_index + ROTARY // 2)
        b_channel = a_channel + tl.where(a_index < ROTARY // 2, ROTARY // 2, rest // 2)
        a_channel = tl.max_contiguous(tl.multiple_of(a_channel, [1, 1, 1, 1, HINT]), [1, 1, 1, 1, HINT])
        b_channel = tl.max_contiguous(tl.multiple_of(b_channel, [1, 1, 1, 1, HINT]), [1, 1, 1, 1, HINT])
        if 2 * KA != D:
            k_seen_a = a_index < D // 2
            k_seen_b = k_seen_a
    else:
        if KA > D:
            k_seen_a = a_channel < D
        if KB and K_SPLIT + KB > D:
            k_seen_b = b_channel < D
    a_pair = tl.reshape(_keys(a_index, FLIP), (KA,))
    a_of = tl.reshape(_keys(a_channel, FLIP), (KA,))
    b_of = tl.reshape(_keys(b_channel, FLIP), (KB0,))

    # queries, as fp16 times a power of two, so that large ones do not overflow and rounded ones stay what they are
    inside = row < rows
    q_row = q_ptr + (head.to(tl.int64) * rows + row)[:, None] * D
    a_mask = inside[:, None] & (a_pair < A_COUNT)[None, :]
    q_a = tl.load(q_row + a_of[None, :], mask=a_mask, other=0).to(tl.float32)
    largest = tl.max(tl.abs(q_a), 1)
    if KB:
        b_mask = a_mask if ROTARY else inside[:, None] & (b_of < D)[None, :]
        q_b = tl.load(q_row + b_of[None, :], mask=b_mask, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(q_b), 1))
    exponent = tl.minimum(tl.maximum(largest, 1e-30), 1e37).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None]
    q_a *= inverse
    if KB:
        q_b *= inverse
    if ROTARY:
        position = tl.load(position_ptr + batch) + start
        at = _tokens(UNITS, 8 if FLIP else 1, True) * KA + a_index
    row_factor = factor * exponent.to(tl.float32, bitcast=True)
    q16_a = q_a.to(tl.float16)
    if KB:
        q16_b = q_b.to(tl.float16)

    va_load = _channels(VA, CA, 8 if FLIP else VA // CA, not FLIP) + tl.arange(0, CA)[None, None, None, None, :]
    vb_load = _channels(VB0, CB, 8 if FLIP else VB0 // CB, not FLIP) + tl.arange(0, CB)[None, None, None, None, :] + VA
    v_seen_a = va_load < D if VA > D else None
    v_seen_b = vb_load < D if VB and VA + VB > D else None

    top = tl.full([M], -1.0e30, tl.float32)  # finite, so that differences are never NaN
    total = tl.zeros([M], tl.float32)
    acc_a = tl.zeros([VA, M] if FLIP else [M, VA], tl.float32)
    acc_b = tl.zeros([VB if VB else 16, M] if FLIP else [M, VB if VB else 16], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        first = tile * UNITS
        last = used - 1 - first
        k_a = _tile(
            k_codes, k_meta, k_aux, first, last, a_channel, k_seen_a, 0, KA, BA,
            D, K_BITS, K_AXIS, K_MODE, K_GROUP, UNITS, True, FLIP,
        )  # fmt: skip
        if KB:
            k_b = _tile(
                k_codes, k_meta, k_aux, first, last, b_channel, k_seen_b, K_SPLIT, KB, BB,
                D, K_BITS, K_AXIS, K_MODE, K_GROUP, UNITS, True, FLIP,
            )  # fmt: skip
        if AHEAD:
            later = tl.minimum(tile + 1, end - 1) * UNITS
            _ahead(k_codes, k_meta, later, D, K_BITS, K_GROUP, UNITS, K_MODE)
            _ahead(v_codes, v_meta, later, D, V_BITS, V_GROUP, UNITS, V_MODE)
        k_a = _decoded(k_a, a_channel, K_BITS, K_AXIS, K_MODE, UNITS, K_LIMIT, True, FLIP)
        if KB:
            k_b = _decoded(k_b, b_channel, K_BITS, K_AXIS, K_MODE, UNITS, K_LIMIT, True, FLIP)
        if ROTARY:
            if (tile == begin) | (tile % TURNED == 0):
                again_a = tl.load(q_row + a_of[None, :], mask=a_mask, other=0).to(tl.float32) * inverse
                again_b = tl.load(q_row + b_of[None, :], mask=b_mask, other=0).to(tl.float32) * inverse
                q16_a, q16_b = _turned_back(
                    again_a, again_b, freq_ptr, a_pair, position + tile // TURNED * (TURNED * T), KA
                )
            turn = table_ptr + tile % TURNED * (T * KA)
            k_a, k_b = _rotated(k_a, k_b, tl.load(turn + at), tl.load(turn + TURNED * T * KA + at))
        score = _scores(q16_a, _keys(k_a, FLIP), None, FLIP)
        if KB:
            score = _scores(q16_b, _keys(k_b, FLIP), score, FLIP)
        score = score * _of_rows(row_factor, FLIP)
        score = tl.where(_of_tokens(tl.arange(0, T) // 32 <= last, FLIP), score, float("-inf"))
        new = tl.maximum(top, tl.max(score, TOKENS))
        p = tl.exp2(score - _of_rows(new, FLIP))
        before = tl.exp2(top - new)
        total = total * before + tl.sum(p, TOKENS)
        top = new
        p = _weights(p.to(tl.float16), FLIP)
        before = _of_rows(before, FLIP)
        v_a = _tile(
            v_codes, v_meta, v_aux, first, last, va_load, v_seen_a, 0, VA, CA,
            D, V_BITS, V_AXIS, V_MODE, V_GROUP, UNITS, not FLIP, FLIP,
        )  # fmt: skip
        v_a = _decoded(v_a, va_load, V_BITS, V_AXIS, V_MODE, UNITS, 65400.0, not FLIP, FLIP)
        acc_a = _sums(p, _values(v_a, FLIP), acc_a * before, FLIP)
        if VB:
            v_b = _tile(
                v_codes, v_meta, v_aux, first, last, vb_load, v_seen_b, VA, VB, CB,
                D, V_BITS, V_AXIS, V_MODE, V_GROUP, UNITS, not FLIP, FLIP,
            )  # fmt: skip
            v_b = _decoded(v_b, vb_load, V_BITS, V_AXIS, V_MODE, UNITS, 65400.0, not FLIP, FLIP)
            acc_b = _sums(p, _values(v_b, FLIP), acc_b * before, FLIP)

    if HAS_BIAS:  # the same for all packed tokens
        if begin < end:
            top += tl.load(bias_ptr + head.to(tl.int64) * rows + row, mask=inside, other=0.0) * factor
    slot = (head.to(tl.int64) * parts + part + split) * rows + row
    tl.store(part_top + slot, top, mask=inside)
    tl.store(part_sum + slot, total, mask=inside)
    if FLIP:
        acc_a, acc_b = tl.trans(acc_a), tl.trans(acc_b)
    va_channel, vb_channel = _value_channels(va_load, FLIP), _value_channels(vb_load, FLIP)
    out = part_out + slot[:, None] * D
    tl.store(out + va_channel[None, :], acc_a, mask=inside[:, None] & (va_channel < D)[None, :])
    if VB:
        tl.store(out + vb_channel[None, :], acc_b, mask=inside[:, None] & (vb_channel < D)[None, :])
