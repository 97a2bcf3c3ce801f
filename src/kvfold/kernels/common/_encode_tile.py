# mypy: ignore-errors
"""Encoding a tile, from tokens to packed bytes, and the kernel of many: Triton code of :mod:`kvfold.kernels.affine.encode`."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _asym, _finite, _signed, _sum, _transformed
from kvfold.kernels.common._encode_words import (
    _channels,
    _chunks,
    _cut,
    _halves,
    _merged,
    _no_words,
    _pack,
    _sign_bit,
    _slot,
    _splits,
    _store_words,
    _tile_out,
    _tokens,
)


@triton.jit
def _load_state(state, channel, MEAN: tl.constexpr, NORM: tl.constexpr, INVERSE: tl.constexpr):
    """Mean, norm and its reciprocal of these channels; what is not there is 0. Norms of a page are codes, and ``state[2]`` a
    table: 256 norms, and then their reciprocals."""
    mean, norm, inverse = 0.0, 0.0, 0.0
    if MEAN:
        mean = tl.load(state[0] + channel).to(tl.float32)
    if NORM:
        norm = tl.load(state[1] + channel)
        if norm.dtype == tl.uint8:
            at = state[2] + norm.to(tl.int32)
            norm, inverse = tl.load(at), tl.load(at + 256)
        else:
            inverse = tl.load(state[2] + channel) if INVERSE else tl.math.div_rn(1.0, norm)
    return mean, norm, inverse


@triton.jit
def _tokens_at(source, token, RING: tl.constexpr):
    """Pointers to tokens [n] as [n, 1]; ``source``: pointer, strides of tokens and channels, first token, slots of a ring.

    RING 2: tokens from ``source[7]`` on lie elsewhere, from pointer ``source[5]`` on, ``source[6]`` apart. RING 3: so they do,
    and those before lie in blocks of ``source[9]`` tokens, ``source[4]`` apart, whose numbers a table has (``source[8]``).
    """
    if RING == 3:
        position = source[3] + token
        late = position - source[7]
        block = tl.load(source[8] + position // source[9], mask=late < 0, other=0).to(tl.int64)
        old = source[0] + block * source[4] + (position % source[9]).to(tl.int64) * source[1]
        return tl.where(late < 0, old, source[5] + late.to(tl.int64) * source[6])[:, None]
    slot = source[3] + token
    if RING:
        slot = slot % source[4]
    at = source[0] + slot.to(tl.int64)[:, None] * source[1]
    if RING == 2:
        late = (source[3] + token - source[7])[:, None]
        at = tl.where(late < 0, at, source[5] + late.to(tl.int64) * source[6])
    return at


@triton.jit
def _steered(
    source,
    state,
    rope,
    T: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Pieces of a tile of keys that are un-rotated, or of which SQuat moves the channels that follow a slice of WIDTH by what
    the slice's error says (kvfold.methods.squat.steer)."""
    PART: tl.constexpr = WIDTH if WIDTH > 0 else 32
    inverse_frequencies, position, half, factor = rope
    at = _tokens_at(source, tl.arange(0, T), RING)
    parts = ()
    for p in tl.static_range(D // PART):
        channel = (p * PART + tl.arange(0, PART))[None, :]
        x = _finite(tl.load(at + channel * source[2]))
        if ROPE:
            rotary = channel < 2 * half
            low = channel < half
            partner = tl.where(low, channel + half, channel - half)
            other = _finite(tl.load(at + partner * source[2], mask=rotary, other=0.0))
            frequency = tl.load(inverse_frequencies + tl.where(low, channel, channel - half), mask=rotary, other=0.0)
            angle = (position + tl.arange(0, T)[:, None]).to(tl.float32) * frequency
            turned = (x * tl.cos(angle) + tl.where(low, other, -other) * tl.sin(angle)) * factor
            x = tl.where(rotary, turned, x)
        mean, norm, inverse = _load_state(state, channel, MEAN, NORM, INVERSE)
        parts += (_transformed(x, mean, norm, inverse, MEAN, NORM),)
    if WIDTH > 0:
        SIDE: tl.constexpr = D - WIDTH
        for s in tl.static_range(D // WIDTH - 1):
            codes, scale, zero = _asym((parts[s],), 0, BITS)
            read = zero.to(tl.float32)[None, :] + scale.to(tl.float32)[None, :] * codes[0]
            moved = ()
            for q in tl.static_range(D // WIDTH):
                if q > s:
                    update = state[3] + ((q - 1) * SIDE + s) * WIDTH
                    moved += (parts[q] + _delta(read - parts[s], update, T, SIDE, WIDTH),)
                else:
                    moved += (parts[q],)
            parts = moved
    pieces = ()
    for p in tl.static_range(D // PART):
        pieces += _cut(parts[p], T, PART, SPLITS)
    return pieces


@triton.jit
def _delta(error, update, T: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """What the error of a slice adds to another: 32 channels' share at a time, for more would not fit into registers."""
    DEPTH: tl.constexpr = min(WIDTH, 32)
    out = tl.arange(0, WIDTH)[None, :] * SIDE
    row = tl.arange(0, DEPTH)[:, None]
    which = tl.arange(0, WIDTH // DEPTH)[None, :, None]
    delta = tl.full((T, WIDTH), 0.0, tl.float32)
    for p in range(WIDTH // DEPTH):
        share = _sum(tl.where(which == p, tl.reshape(error, (T, WIDTH // DEPTH, DEPTH)), 0.0), 1)
        # three products of tf32 parts: float32's precision, on tensor cores
        delta = tl.dot(share, tl.load(update + out + p * DEPTH + row), delta, input_precision="tf32x3")
    return delta


@triton.jit
def _encode_tile(
    source,
    state,
    rope,
    out,
    may_be_asym,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Encode T tokens.

    ``source`` as :func:`_tokens_at` takes it; ``state``: mean, norm, its reciprocal, SQuat's update; ``rope``: frequencies,
    position of the first token, half of the rotated channels, factor; ``out``: codes in 32-bit words, metadata, 32 bits of
    each group. All pointers point to this tile's, head's or sequence's first element.
    """
    HALVES: tl.constexpr = _halves(D, BITS, VALUE)
    SPLITS: tl.constexpr = _splits(D, BITS, VALUE, AXIS, WARPS)
    SUBSETS: tl.constexpr = SPLITS * (T // 32)
    CUT: tl.constexpr = ROPE or WIDTH > 0
    PER: tl.constexpr = G // 16
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    STEP: tl.constexpr = max(_chunks(D, LOW), PER if AXIS == 1 else 1)
    LOW_STEP: tl.constexpr = 1.0 * (1 << (LOW * STEP * _merged(D, LOW) // _chunks(D, LOW)))
    TOP_STEP: tl.constexpr = 1.0 * (1 << (STEP * _merged(D, 1) // _chunks(D, 1)))
    low = _no_words(LOW, T, D, VALUE, HALVES, SPLITS)
    top = _no_words(1, T, D, VALUE, HALVES, SPLITS) if BITS == 3 else ()
    low_weight, top_weight = 1.0, 1.0
    if CUT:
        pieces = _steered(source, state, rope, T, D, BITS, MEAN, NORM, INVERSE, ROPE, WIDTH, RING, SPLITS)
        for k in tl.static_range(D // 16 // STEP):
            members = ()
            for i in tl.static_range(STEP * HALVES * SUBSETS):
                members += (pieces[k * STEP * HALVES * SUBSETS + i],)
            codes = _encode_step(
                members, k * STEP * 16, state, out, may_be_asym,
                D, G, AXIS, MODE, BITS, VALUE, False, False, False, STEP, HALVES, SPLITS, SUBSETS
            )  # fmt: skip
            low, top = _add(low, top, codes, low_weight, top_weight, T, D, PER, AXIS, BITS, VALUE, STEP, HALVES, SPLITS)
            low_weight *= LOW_STEP
            top_weight *= TOP_STEP
    else:
        for k in range(D // 16 // STEP):
            raw = ()
            for c in tl.static_range(STEP):
                for h in tl.static_range(HALVES):
                    channel = ((k * STEP + c) * 16 + _channels(h, HALVES))[None, :]
                    for u in tl.static_range(SUBSETS):
                        at = _tokens_at(source, _tokens(u, SPLITS, VALUE), RING)
                        raw += (tl.load(at + channel * source[2]),)
            codes = _encode_step(
                raw, k * STEP * 16, state, out, may_be_asym,
                D, G, AXIS, MODE, BITS, VALUE, MEAN, NORM, INVERSE, STEP, HALVES, SPLITS, SUBSETS
            )  # fmt: skip
            low, top = _add(low, top, codes, low_weight, top_weight, T, D, PER, AXIS, BITS, VALUE, STEP, HALVES, SPLITS)
            low_weight *= LOW_STEP
            top_weight *= TOP_STEP
    _store_words(low, out[0], D * BITS, LOW, T, D, VALUE, HALVES, SPLITS)
    if BITS == 3:
        _store_words(top, out[0] + 2 * D, D * BITS, 1, T, D, VALUE, HALVES, SPLITS)


@triton.jit
def _add(
    low,
    top,
    codes,
    low_weight,
    top_weight,
    T: tl.constexpr,
    D: tl.constexpr,
    PER: tl.constexpr,
    AXIS: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add a step's codes to both planes of three bits, or to the only one."""
    if BITS == 3:
        rest, tops = (), ()
        for i in tl.static_range(len(codes)):
            is_high = codes[i] >= 4.0
            rest += (tl.where(is_high, codes[i] - 4.0, codes[i]),)
            tops += (tl.where(is_high, 1.0, 0.0),)
        low = _pack(low, rest, low_weight, 2, T, D, PER, AXIS, VALUE, STEP, HALVES, SPLITS)
        top = _pack(top, tops, top_weight, 1, T, D, PER, AXIS, VALUE, STEP, HALVES, SPLITS)
    else:
        low = _pack(low, codes, low_weight, BITS, T, D, PER, AXIS, VALUE, STEP, HALVES, SPLITS)
    return low, top


@triton.jit
def _encode_step(
    raw,
    first,
    state,
    out,
    may_be_asym,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    STEP: tl.constexpr,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
    SUBSETS: tl.constexpr,
):
    """Codes of STEP channel tiles from channel ``first`` on, in the order of :func:`_index`; metadata is stored."""
    PER: tl.constexpr = G // 16
    codes = ()
    if AXIS == 0:
        bits = ()
        for u in tl.static_range(SUBSETS):
            bits += (1 << _sign_bit(_tokens(u, SPLITS, VALUE))[:, None],)
        for c in tl.static_range(STEP):
            for h in tl.static_range(HALVES):
                channel = first + c * 16 + _channels(h, HALVES)
                mean, norm, inverse = _load_state(state, channel[None, :], MEAN, NORM, INVERSE)
                members = ()
                for u in tl.static_range(SUBSETS):
                    x = raw[(c * HALVES + h) * SUBSETS + u]
                    members += (_transformed(x, mean, norm, inverse, MEAN, NORM),)
                slot = _slot(channel, 0, D, G, AXIS, VALUE)
                codes += _encode_group(members, bits, slot, D, out, may_be_asym, AXIS, MODE, BITS)
    else:
        for i in tl.static_range(STEP // PER):
            given, bits = (), ()
            for j in tl.static_range(PER):
                for h in tl.static_range(HALVES):
                    channel = j * 16 + _channels(h, HALVES)[None, :]
                    given += (_load_state(state, first + i * G + channel, MEAN, NORM, INVERSE),)
                    bits += (1 << _sign_bit(channel),)
            for u in tl.static_range(SUBSETS):
                members = ()
                for j in tl.static_range(PER):
                    for h in tl.static_range(HALVES):
                        mean, norm, inverse = given[j * HALVES + h]
                        x = raw[((i * PER + j) * HALVES + h) * SUBSETS + u]
                        members += (_transformed(x, mean, norm, inverse, MEAN, NORM),)
                slot = _slot(first // G + i, _tokens(u, SPLITS, VALUE), D, G, AXIS, VALUE)
                codes += _encode_group(members, bits, slot, 32 * D // G, out, may_be_asym, AXIS, MODE, BITS)
    return codes


@triton.jit
def _encode_group(
    members,
    bits,
    slot,
    GROUPS: tl.constexpr,
    out,
    may_be_asym,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Codes of the members of groups that lie side by side; their metadata is stored."""
    if MODE == 0:
        codes, scale, zero = _asym(members, AXIS, BITS)
        tl.store(out[1] + slot, scale)
        tl.store(out[1] + GROUPS + slot, zero)
    else:
        codes, scale, aux = _signed(members, bits, may_be_asym, AXIS, MODE == 2, BITS)
        tl.store(out[1] + slot, scale)
        tl.store(out[2] + slot, aux)
    return codes


@triton.jit(do_not_specialize=["first_tile", "first_token", "capacity", "states"])
def _encode_kernel(
    x,
    stride_b,
    stride_h,
    stride_t,
    stride_c,
    rows,
    codes_out,
    meta_out,
    aux_out,
    first_tile,
    tiles_per_row,
    heads,
    mean,
    norm,
    inverse,
    update,
    inv_freq,
    first_position,
    first_token,
    half,
    rope_factor,
    capacity,
    numbers,
    states,
    tiles_per_block,
    T: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    RING: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBERS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Grid: (tiles, heads, batch)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.program_id(2).to(tl.int64)
    sequence = tl.load(rows + index).to(tl.int64) if ROWS else index
    lane = sequence * heads + head
    at = (sequence if RING else index) * stride_b + head.to(tl.int64) * stride_h
    first = first_token + tile * T if RING else tile * T
    position = tl.load(first_position + sequence) + first_token + tile * T if ROPE else 0
    matrix = lane
    if NUMBERS:
        matrix = (index * states + tl.load(numbers + tile // tiles_per_block)) * heads + head
    state = (mean + lane * D, norm + lane * D, inverse + lane * D, update + matrix * ((D - WIDTH) * (D - WIDTH)))
    _encode_tile(
        (x + at, stride_t, stride_c, first, capacity),
        state,
        (inv_freq, position, half, rope_factor),
        _tile_out(codes_out, meta_out, aux_out, lane * tiles_per_row + first_tile + tile, T, D, G, AXIS, MODE, BITS),
        True,
        T,
        D,
        G,
        AXIS,
        MODE,
        BITS,
        VALUE,
        MEAN,
        NORM,
        True,
        ROPE,
        WIDTH,
        RING,
        WARPS,
    )
