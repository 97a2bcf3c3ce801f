# mypy: ignore-errors
"""Keys of codes into tables, stored before RoPE (CommVQ's sums, TaSQ's groups of four channels), unpacked to 16 bits.

Tables lie in shared memory; CommVQ's rows are added up as for decoding (:mod:`kvfold.kernels.commvq._steps`). A lane's numbers
are channels that lie together, which it stores as 16 or 8 bytes. Keys are rotated twice: by their token's place in its unit of
32, of which cosines and sines lie in shared memory, and by the unit's position.

A row of a group has four channels, 16 apart, in fp16: 8 bytes, which a half of a warp reads at once: four tokens. A lane has
as many rows of each quarter of a code's 128 bytes, and each of the four tokens begins with another quarter, so that they never
meet in a bank. What a lane makes first then is another part of its token's channels: its addresses say which.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._tables import (
    _dynamic_base,
    _fetch_rows,
    _weighted_bytes,
    fetch_turns,
    reserved,
    rotated_keys,
    shared_turns,
)
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    copy_async,
    copy_commit,
    copy_wait,
    fma_half2,
    load_shared,
    mul_half2,
    pack_half2,
    product_less_half2,
    program_sync,
    shuffle_xor,
    store_shared1,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.commvq._steps import head_bytes, kept_bytes, steps_of_pairs, tile_steps

TURNS = gl.constexpr(8192)
FAR = gl.constexpr(256)
"""Bytes of cosines and sines of a unit's tokens, and of a unit's position."""
ROWS = gl.constexpr(65536)
CODES = gl.constexpr(1024)
"""Bytes of a head's rows of groups, and of a unit's codes of them."""


@gluon.constexpr_function
def code_bytes(stages, steps):
    """Bytes of a unit's codes: of CommVQ's stages (``steps``), or of groups."""
    return 48 * stages if steps else CODES.value


@gluon.constexpr_function
def table_bytes(stages, steps):
    """Bytes of a head's tables."""
    return kept_bytes(stages) if steps else ROWS.value


@gluon.constexpr_function
def shared_bytes(stages, steps, warps):
    """Bytes of shared memory of a program: tables, cosines and sines, and of every warp codes of two units."""
    size = table_bytes(stages, steps) + TURNS.value + warps * warp_bytes(stages, steps)
    return (size + 1023) // 1024 * 1024


@gluon.constexpr_function
def buffer_bytes(stages, steps):
    """Bytes from a warp's codes of a unit to those of the next one; with steps, a unit's position has room there."""
    return max(code_bytes(stages, steps), FAR.value) if steps else code_bytes(stages, steps)


@gluon.constexpr_function
def warp_bytes(stages, steps):
    """Bytes of a warp's own shared memory."""
    return 2 * buffer_bytes(stages, steps) + (0 if steps else FAR.value)


@gluon.jit
def load_half(address):
    """An fp16 number of global memory, as fp32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 h; ld.global.nc.b16 h, [$1]; cvt.f32.f16 $0, h; }",
        "=f,l",
        [address],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def store_words4(address, a, b, c, d):
    gl.inline_asm_elementwise(
        "st.global.v4.b32 [$1], {$2,$3,$4,$5}; mov.u32 $0, 0;",
        "=r,l,r,r,r,r",
        [address, a, b, c, d],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_words2(address, a, b):
    gl.inline_asm_elementwise(
        "st.global.v2.b32 [$1], {$2,$3}; mov.u32 $0, 0;",
        "=r,l,r,r",
        [address, a, b],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def bounded_half2(x):
    """Two fp16 numbers without infinities."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.b32 a, 0x7BFF7BFF; min.f16x2 $0, $1, a; mov.b32 a, 0xFBFFFBFF; max.f16x2 $0, $0, a; }",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def cosine_sine(position, turns, rest):
    """Of ``position`` times ``turns + rest`` turns, as float32; ``position`` is a whole number of up to 24 bits.

    What the product's rounding loses is added to its fraction: positions of millions lose nothing.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .f32 w, n, p; mul.rn.f32 w, $2, $3; neg.f32 n, w; fma.rn.f32 p, $2, $3, n;
        cvt.rni.f32.f32 n, w; sub.rn.f32 w, w, n; fma.rn.f32 p, $2, $4, p; add.rn.f32 w, w, p;
        mul.rn.f32 w, w, 0f40C90FDB; cos.approx.ftz.f32 $0, w; sin.approx.ftz.f32 $1, w; }""",
        "=&f,=&f,f,f,f",
        [position, turns, rest],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _turns_at(address):
    """Eight words of cosines, and eight of sines, of a lane's 16 pairs: 8t to 8t + 7 and 32 further."""
    return (
        load_shared(address, 0, 4)
        + load_shared(address, 64, 4)
        + load_shared(address, 128, 4)
        + load_shared(address, 192, 4)
    )


@gluon.jit
def _put(to, x, norm, pair, BF16: gl.constexpr):
    """Store a token's 16 words, times its norm: float32, and twice as fp16."""
    y = ()
    for i in gl.static_range(16):
        if BF16:
            a, b = unpack_half2(x[i])
            y = y + (pack_half2(a * norm, b * norm, True),)
        else:
            y = y + (bounded_half2(mul_half2(x[i], pair)),)
    for i in gl.static_range(4):
        store_words4(to + 64 * i, y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3])


@gluon.jit
def _fetch_codes(to, lane, source, BYTES: gl.constexpr):
    for j in gl.static_range((BYTES + 511) // 512):
        here = (lane * 16 < BYTES - 512 * j).to(gl.int32)
        copy_async(to + lane * 16, source + lane * 16, lane * 0 + 16, here, 512 * j, 512 * j, True)


@gluon.jit
def leave_turn(to, lane, position, turns, gains):
    """Leave cosines and sines of a position, times ``gains``, in shared memory: of 64 pairs, two of every lane."""
    at = position.to(gl.float32)
    c0, s0 = cosine_sine(at, turns[0], turns[2])
    c1, s1 = cosine_sine(at, turns[1], turns[3])
    store_shared1(to + lane * 4, pack_half2(c0 * gains[0], c1 * gains[1], False))
    store_shared1(to + (lane * 4 + 128), pack_half2(s0 * gains[0], s1 * gains[1], False))


@gluon.jit
def put_unit(codes, base, near, turn, lane, norms, out, STAGES: gl.constexpr, BF16: gl.constexpr):
    """Decode 32 tokens of CommVQ's, whose codes lie in shared memory. ``norms``: address of the tokens' fp16 norms; ``near``:
    address of cosines and sines; ``turn``: those of the unit's position."""
    g = lane // 4
    t = lane % 4
    odd = g % 2 == 1
    token = 4 * (g % 2) + g // 2
    place = t * 16
    for tile in gl.static_range(2):
        begin = token * 12 % 32
        word = token * 12 // 32 * 4 + t * 48
        x, y = tile_steps(lane, odd, codes + word, begin, base, tile, STAGES)
        for e in gl.static_range(2):
            z = x if e == 0 else y
            at = token + (16 * tile + 8 * e)
            z = rotated_keys(rotated_keys(z, shared_turns(near + at * 256 + place + g % 2 * 64)), turn)
            norm = load_half(norms + at * 2)
            _put(out + (at * 256 + place), z, norm, pack_half2(norm, norm, False), BF16)


# ---- codes of groups -------------------------------------------------------------------------------------------------


@gluon.jit
def _halves_of(a, b, selector):
    """A half of a and one of b, as ``selector`` says."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _begins_with(g):
    """Which part a lane makes first of a token's channels: part i of :func:`_channel` is what it makes as number i ^ that."""
    return g // 2 % 2


@gluon.jit
def _channel(t, first, W: gl.constexpr):
    """First channel of word W of a lane's 16: of 4 adjacent channels of pairs real parts, then imaginary ones. ``first``: see
    :func:`_begins_with`."""
    return t * 4 + (first ^ (W // 4)) * 16 + (W % 4 // 2 * 64 + W % 2 * 2)


@gluon.jit
def _mean_words(source, t, first):
    """A head's mean, 16 words of the lane's channels, and its largest number. ``source``: pointer to 128 numbers."""
    words = ()
    big = t.to(gl.float32) * 0.0
    for w in gl.static_range(16):
        at = source + _channel(t, first, w)
        a = gl.load(at).to(gl.float32)
        b = gl.load(at + 1).to(gl.float32)
        words = words + (pack_half2(a, b, False),)
        big = gl.maximum(big, gl.maximum(gl.abs(a), gl.abs(b)))
    big = gl.maximum(big, shuffle_xor(big, 1))
    return words, gl.maximum(big, shuffle_xor(big, 2))


@gluon.jit
def _places_of_fours(base, g, t):
    """Of a lane for :func:`_keys_of_fours`: weights that pick a group's code of four and multiply it by the 128 bytes of a
    code; addresses of the lane's 8 bytes in quarters of these; selectors of halves.

    Tables are as of :func:`kvfold.kernels.long.tables.fours`.
    """
    weights = ()
    addresses = ()
    odd = g % 2
    first = g // 2 % 2
    for i in gl.static_range(4):
        weights = weights + ((g * 0 + 128) << 8 * (odd ^ i),)
        addresses = addresses + (base + (first ^ (i // 2)) * 64 + (odd ^ (i % 2)) * 32 + t * 8,)
    low = gl.where(odd == 1, 0x1054, 0x5410)
    return weights + addresses + (low, low + 0x2222)


@gluon.jit
def _keys_of_fours(codes, t, first, own):
    """Keys of one token of every lane, 16 words as of :func:`_channel`, of groups 4 t to 4 t + 3, and as many 16 further;
    ``codes``: address of the token's 32. Odd tokens read the odd one of two groups first."""
    rows = ()
    for far in gl.static_range(2):
        word = load_shared(codes + t * 4 + (first ^ far) * 16, 0, 1)[0]
        for i in gl.static_range(4):
            rows = rows + load_shared(_weighted_bytes(word, own[i], own[4 + 2 * far + i % 2]), i // 2 * 32768, 2)
    out = ()
    for m in gl.static_range(4):  # numbers m // 2 and m // 2 + 2 of a row are a pair
        for half in gl.static_range(2):
            for i in gl.static_range(2):
                a = rows[m % 2 * 8 + i * 4 + half]
                b = rows[m % 2 * 8 + i * 4 + 2 + half]
                out = out + (_halves_of(a, b, own[8 + m // 2]),)
    return out


@gluon.jit
def _rotated_by_fours(x, turns):
    """Keys of one token of every lane, 16 words as of :func:`_channel`, rotated; ``turns``: two cosines, then two sines, of
    each four words."""
    out = ()
    for i in gl.static_range(4):
        for j in gl.static_range(4 * i, 4 * i + 2):
            out = out + (product_less_half2(x[j], turns[j], mul_half2(x[j + 2], turns[j + 2])),)
        for j in gl.static_range(4 * i, 4 * i + 2):
            out = out + (fma_half2(x[j + 2], turns[j], mul_half2(x[j], turns[j + 2])),)
    return out


@gluon.jit
def _put_group_keys(to, x, up, AT: gl.constexpr, BF16: gl.constexpr):
    """Store a token's 16 words as of :func:`_channel`, times ``up``. ``to``: where parts of 16 channels go, AT bytes
    further."""
    pair = pack_half2(up, up, False)
    y = ()
    for i in gl.static_range(16):
        if BF16:
            a, b = unpack_half2(x[i])
            y = y + (pack_half2(a * up, b * up, True),)
        else:
            y = y + (bounded_half2(mul_half2(x[i], pair)),)
    for m in gl.static_range(4):
        for half in gl.static_range(2):
            store_words2(to[m] + (AT + 128 * half), y[4 * m + 2 * half], y[4 * m + 2 * half + 1])


@gluon.jit
def put_group_unit(
    codes, near, far, lane, own, means, largest, norms, out, CENTRED: gl.constexpr, BF16: gl.constexpr
):  # fmt: skip
    """Decode 32 tokens of codes of groups; as :func:`put_unit`. ``far``: address of cosines and sines of the unit's position;
    ``own``: see :func:`_places_of_fours`; ``means``, ``largest``: see :func:`_mean_words`.

    With a mean, keys are scaled down by the power of two of their norm, or of the mean's largest number, so that they are
    numbers of fp16 while they are rotated.
    """
    g = lane // 4
    t = lane % 4
    first = _begins_with(g)
    to = ()
    for m in gl.static_range(4):
        to = to + (out + (g * 256 + t * 8 + (first ^ m) * 32),)
    turn = ()
    for m in gl.static_range(4):
        at = far + t * 8 + (first ^ (m % 2)) * 32
        turn = turn + load_shared(at, m // 2 * 64, 2) + load_shared(at, m // 2 * 64 + 128, 2)
    for e in gl.static_range(4):
        at = g + 8 * e
        norm = load_half(norms + at * 2)
        x = _keys_of_fours(codes + at * 32, t, first, own)
        up = norm
        if CENTRED:
            exponent = gl.minimum(gl.maximum(as_int(gl.maximum(norm, largest)) >> 23, 112), 142)
            down = as_float((254 - exponent) << 23)
            up = as_float(exponent << 23)
            size = norm * down
            size = pack_half2(size, size, False)
            down = pack_half2(down, down, False)
            y = ()
            for i in gl.static_range(16):
                y = y + (fma_half2(means[i], down, mul_half2(x[i], size)),)
            x = y
        x = _rotated_by_fours(x, shared_turns(near + at * 256 + (g % 2 ^ first) * 64 + t * 16))
        x = _rotated_by_fours(x, turn)
        _put_group_keys(to, x, up, 2048 * e, BF16)


@gluon.jit(do_not_specialize=["heads", "start", "first", "units", "room", "wide"])
def unpack_tables_kernel(
    codes, norms, rows, turns_ptr, near_ptr, position_ptr, mean_ptr, out, heads, start, first, units, room, wide, gain,
    STAGES: gl.constexpr, STEPS: gl.constexpr, CENTRED: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode ``units`` units of 32 tokens of each KV head, from unit ``first`` of its storage on, to ``out`` [heads, wide,
    128].

    Grid: (programs, batch * heads). Every head has ``rows``: STEPS of CommVQ's STAGES, or those of groups of four channels,
    whose vectors are more by ``mean_ptr``, fp16 [heads, 128], where they are CENTRED. Keys are rotated: the span's first token
    is number ``start`` after ``position_ptr``; ``turns_ptr``, float32 [2, 64]: turns per token of the pairs and what float32
    leaves of them; ``near_ptr``: cosines and sines of a unit's tokens, fp16 [2, 32, 64], or of groups [32, 4, 4, 8], see
    :func:`kvfold.kernels.long.tables.group_turns`; ``gain``: of RoPE. From one KV head's storage to the next are ``room``
    units.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = shared_bytes(STAGES, STEPS, W)
    TABLES: gl.constexpr = table_bytes(STAGES, STEPS)
    CODE: gl.constexpr = code_bytes(STAGES, STEPS)
    BUFFER: gl.constexpr = buffer_bytes(STAGES, STEPS)
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, BYTES)
    base = _dynamic_base(lane)
    program_sync(lane)
    head = gl.program_id(1)
    tables = rows.to(gl.int64)
    if STEPS:
        tables = tables + (head % heads).to(gl.int64) * head_bytes(STAGES)
    else:
        tables = tables + (head % heads).to(gl.int64) * TABLES
    near = base + TABLES
    stage = near + warp * warp_bytes(STAGES, STEPS)
    stage = stage + TURNS
    if STEPS:
        fetch_turns(near, near_ptr, thread, lane, W, True)
    else:
        _fetch_rows(near, near_ptr.to(gl.int64), thread, TURNS, W)
    far = stage + 2 * BUFFER
    _fetch_rows(base, tables, thread, TABLES, W)

    lo = (units.to(gl.int64) * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    hi = (units.to(gl.int64) * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    each = (hi - lo + W - 1) // W
    begin = gl.minimum(lo + warp * each, hi - 1)
    block = head.to(gl.int64) * room + first
    source = codes.to(gl.int64) + block * CODE
    norm_at = norms.to(gl.int64) + block * 64
    to = out.to(gl.int64) + head.to(gl.int64) * wide * 256
    _fetch_codes(stage, lane, source + begin.to(gl.int64) * CODE, CODE)
    copy_commit(lane)

    turns = ()
    for i in gl.static_range(2):
        for j in gl.static_range(2):
            turns = turns + (gl.load(turns_ptr + (2 * lane + (64 * i + j))),)
    position = (gl.load(position_ptr + head // heads) + start).to(gl.int32) + first * 32
    gains = (lane.to(gl.float32) * 0.0 + gain, lane.to(gl.float32) * 0.0 + gain)
    own = ()
    if STEPS:
        step = steps_of_pairs(tables, lane, STAGES)
        gains = (gains[0] * step[0], gains[1] * step[1])
    else:
        own = _places_of_fours(base, lane // 4, lane % 4)
    means = ()
    largest = lane.to(gl.float32) * 0.0
    if CENTRED:
        means, largest = _mean_words(mean_ptr + head % heads * 128, lane % 4, _begins_with(lane // 4))
    copy_wait(lane, 0)
    program_sync(lane)
    for i in range(each):
        unit = gl.minimum(begin + i, hi - 1)
        after = gl.minimum(begin + i + 1, hi - 1)
        warp_sync(lane)
        there = stage + (i + 1) % 2 * BUFFER
        turn = ()
        if STEPS:  # until codes arrive there
            leave_turn(there, lane, position + unit * 32, turns, gains)
            warp_sync(lane)
            turn = _turns_at(there + lane % 4 * 16)
            warp_sync(lane)
        _fetch_codes(there, lane, source + after.to(gl.int64) * CODE, CODE)
        copy_commit(lane)
        if not STEPS:
            leave_turn(far, lane, position + unit * 32, turns, gains)
        copy_wait(lane, 1)
        here = stage + i % 2 * BUFFER
        norms_here = norm_at + unit.to(gl.int64) * 64
        out_here = to + unit.to(gl.int64) * 8192
        if STEPS:
            put_unit(here, base, near, turn, lane, norms_here, out_here, STAGES, BF16)
        else:
            put_group_unit(here, near, far, lane, own, means, largest, norms_here, out_here, CENTRED, BF16)
    copy_wait(lane, 0)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
