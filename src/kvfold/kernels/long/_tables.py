# mypy: ignore-errors
"""Sums of codebook rows (CommVQ's keys, VQLLM's keys and values), and rows of groups (TaSQ's), unpacked to 16 bits.

Tables lie in shared memory. CommVQ's rows are added up as for decoding (:mod:`kvfold.kernels.commvq._steps`). A row of
VQLLM's has 32 channels, a byte each, of which lane (g, t) reads 8 for tokens g of every eight. The rows of four stages lie
together in 128 bytes; of each four tokens every one reads another stage first, so that they never meet in a bank. A lane's
sums are channels that lie together, which it stores as 16 bytes. Keys are rotated twice: by their token's place in its unit
of 32, of which cosines and sines lie in shared memory, and by the unit's position.

A row of a group has 8 channels in fp16. Those of values are adjacent: lane (g, t) reads the rows of groups 4 i + t, and stores
them. Those of keys lie 16 channels apart, so lane (g, t) reads the rows of groups 4 t to 4 t + 3, and puts their channels 4 t
to 4 t + 3 of every 16 beside each other, 8 bytes to store. Four lanes write the 32 bytes that memory is written in.

A row of four channels is 8 bytes, which a half of a warp reads at once: four tokens. A lane has as many rows of each quarter of
a code's 128 bytes, and each of the four tokens begins with another quarter, so that they never meet in a bank. What a lane
makes first then is another part of its token's channels: its addresses say which.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._tables import (
    _dynamic_base,
    _fetch_rows,
    _odd_bytes,
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
    high_halves,
    load_global4,
    load_shared,
    low_halves,
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
from kvfold.kernels.long._rotated import bounded_half2, load_half, store_words2, store_words4

UNIT = gl.constexpr(32)
TURNS = gl.constexpr(8192)
FAR = gl.constexpr(256)
"""Bytes of cosines and sines of a unit's tokens, and of a unit's position."""


@gluon.constexpr_function
def table_bytes(stages, groups):
    """Bytes of one side's tables."""
    return 65536 if groups else 8192 * stages


@gluon.constexpr_function
def code_bytes(stages, steps):
    """Bytes of a unit's codes: of CommVQ's stages (``steps``), or VQLLM's."""
    return (48 if steps else 128) * stages


@gluon.constexpr_function
def shared_bytes(stages, steps, keys, warps, groups=0):
    """Bytes of shared memory of a program: tables, cosines and sines, and of every warp codes of two units."""
    size = kept_bytes(stages) if steps else table_bytes(stages, groups)
    size += (TURNS.value if keys else 0) + warps * warp_bytes(stages, steps)
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
def _turns_at(address, STEPS: gl.constexpr):
    """Eight words of cosines of a lane's 16 pairs, and eight of sines: pairs 8t to 8t + 7 and 32 further (STEPS), or 16t to
    16t + 15."""
    NEXT: gl.constexpr = 64 if STEPS else 16
    return (
        load_shared(address, 0, 4)
        + load_shared(address, NEXT, 4)
        + load_shared(address, 128, 4)
        + load_shared(address, 128 + NEXT, 4)
    )


@gluon.jit
def _beside(x):
    """Keys of VQLLM, four words of each of four interleaved groups: 8 words of 16 adjacent real parts, then 8 of imaginary
    ones."""
    out = ()
    for part in gl.static_range(2):
        for m in gl.static_range(4):
            for i in gl.static_range(2):
                a = x[8 * i + 2 * part + m // 2]
                b = x[8 * i + 4 + 2 * part + m // 2]
                if m % 2 == 0:
                    out = out + (low_halves(a, b),)
                else:
                    out = out + (high_halves(a, b),)
    return out


@gluon.jit
def _put(to, x, norm, pair, STEPS: gl.constexpr, KEYS: gl.constexpr, BF16: gl.constexpr):
    """Store a token's 16 words, times its norm: float32, and twice as fp16."""
    y = ()
    for i in gl.static_range(16):
        if BF16:
            a, b = unpack_half2(x[i])
            y = y + (pack_half2(a * norm, b * norm, True),)
        else:
            y = y + (bounded_half2(mul_half2(x[i], pair)),)
    NEXT: gl.constexpr = 64 if STEPS or not KEYS else 16
    store_words4(to, y[0], y[1], y[2], y[3])
    store_words4(to + NEXT, y[4], y[5], y[6], y[7])
    store_words4(to + 128, y[8], y[9], y[10], y[11])
    store_words4(to + (128 + NEXT), y[12], y[13], y[14], y[15])


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
def _group_sums(words, places, AT: gl.constexpr, STAGES: gl.constexpr):
    """Four words of the sum of a group's rows; ``words``: its codes; ``places``: see :func:`_places`; AT: of the tables.

    Numbers of seven bits are added as whole numbers: two stages byte by byte, then odd bytes in halves with the exponent of
    1024. Whole words are added, too, whatever is carried from byte to byte: less the odd bytes, they are the even ones.
    """
    odd = (words[0] * 0 + 0x64006400,) * 2
    whole = (words[0] * 0 + 0x64646400,) * 2  # 257 times the exponents
    for j in gl.static_range(STAGES // 4):
        x = ()
        for i in gl.static_range(4):
            at = _weighted_bytes(words[j], places[i], places[4 + i])
            x = x + (load_shared(at, AT + j * 32768, 2),)
        new_odd = ()
        new_whole = ()
        for i in gl.static_range(2):
            a = x[0][i] + x[1][i]
            b = x[2][i] + x[3][i]
            new_odd = new_odd + (odd[i] + _odd_bytes(a) + _odd_bytes(b),)
            new_whole = new_whole + (whole[i] + a + b,)
        odd = new_odd
        whole = new_whole
    sums = (whole[0] - odd[0] * 256, odd[0], whole[1] - odd[1] * 256, odd[1])
    out = ()
    for i in gl.static_range(4):
        out = out + (fma_half2(sums[i], places[8 + i], places[12 + i]),)
    return out


@gluon.jit
def _token_sums(codes, places, AT: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr = 0):
    """16 words of one token of every lane: four of each group. ``codes``: address of the token's."""
    words = load_shared(codes, 0, STAGES)
    out = ()
    if GROUPS:
        for i in gl.static_range(2):
            out = out + _two_groups(words[2 * i], words[2 * i + 1], places, AT + 32768 * i)
    else:
        for i in gl.static_range(4):
            if STAGES == 4:
                out = out + _group_sums((words[i],), places, AT, STAGES)
            else:
                out = out + _group_sums((words[2 * i], words[2 * i + 1]), places, AT, STAGES)
    return out


@gluon.jit
def _places(base, rows_ptr, g, t, STAGES: gl.constexpr):
    """Of a lane for :func:`_group_sums`: weights that pick the code of a stage and multiply it by a row's 128 bytes, addresses
    of its eight bytes of these stages, and its channels' steps and what sums of numbers have too much. Four stages lie
    together in a row; tokens of a half of a warp read different ones at once."""
    weights = ()
    addresses = ()
    for i in gl.static_range(4):
        stage = g % 4 ^ i
        weights = weights + ((g * 0 + 128) << 8 * stage,)
        addresses = addresses + (base + stage * 32 + t * 8,)
    at = rows_ptr + STAGES * 8192 + t * 16
    return weights + addresses + load_global4(at, g * 0 + 1) + load_global4(at + 64, g * 0 + 1)


@gluon.jit
def put_unit(
    codes, base, near, turn, lane, own, norms, out,
    STAGES: gl.constexpr, STEPS: gl.constexpr, KEYS: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode 32 tokens, whose codes lie in shared memory. ``own``: what a lane knows of the tables; ``norms``: address of the
    tokens' fp16 norms; ``near``: address of cosines and sines; ``turn``: those of the unit's position."""
    g = lane // 4
    t = lane % 4
    odd = g % 2 == 1
    token = g
    if STEPS:
        token = 4 * (g % 2) + g // 2
    place = t * 32
    if STEPS or not KEYS:
        place = t * 16
    for tile in gl.static_range(2):
        if STEPS:
            begin = token * 12 % 32
            word = token * 12 // 32 * 4 + t * 48
            x, y = tile_steps(lane, odd, codes + word, begin, base, tile, STAGES)
        else:
            x = _token_sums(codes + (g * (4 * STAGES) + tile * (64 * STAGES)), own, 0, STAGES)
            y = _token_sums(codes + (g * (4 * STAGES) + (tile * (64 * STAGES) + 32 * STAGES)), own, 0, STAGES)
            if KEYS:
                x = _beside(x)
                y = _beside(y)
        for e in gl.static_range(2):
            z = x if e == 0 else y
            at = token + (16 * tile + 8 * e)
            if STEPS:
                z = rotated_keys(rotated_keys(z, shared_turns(near + at * 256 + place + g % 2 * 64)), turn)
            elif KEYS:
                z = rotated_keys(rotated_keys(z, _turns_at(near + at * 256 + place, STEPS)), turn)
            norm = load_half(norms + at * 2)
            _put(out + (at * 256 + place), z, norm, pack_half2(norm, norm, False), STEPS, KEYS, BF16)


# ---- codes of groups -------------------------------------------------------------------------------------------------


@gluon.jit
def _two_groups(near, far, places, AT: gl.constexpr):
    """Rows of two groups, whose codes are in words ``near`` and ``far``; ``places``: see :func:`_group_places`. Odd tokens read
    the second one first."""
    odd = places[3]
    a = load_shared(_weighted_bytes(gl.where(odd, far, near), places[0], places[1]), AT, 4)
    b = load_shared(_weighted_bytes(gl.where(odd, near, far), places[0], places[2]), AT, 4)
    first = ()
    second = ()
    for i in gl.static_range(4):
        first = first + (gl.where(odd, b[i], a[i]),)
        second = second + (gl.where(odd, a[i], b[i]),)
    return first + second


@gluon.jit
def _group_places(base, g, t):
    """The same of codes of groups: a weight that picks the lane's code of four, times the 128 bytes of a code of two groups;
    the address of its 16 bytes of the group that is read first, and of the other one; whether that is the second."""
    odd = g % 2 == 1
    first = base + t * 16 + odd.to(gl.int32) * 64
    return ((g * 0 + 128) << 8 * t, first, first ^ 64, odd)


@gluon.jit
def _rotated(x, turns):
    """Keys of one token of every lane, rotated by its place in the tile."""
    out = ()
    for i in gl.static_range(4):
        a0 = x[4 * i]
        a1 = x[4 * i + 1]
        b0 = x[4 * i + 2]
        b1 = x[4 * i + 3]
        out = out + (
            product_less_half2(a0, turns[4 * i + 0], mul_half2(b0, turns[4 * i + 2])),
            product_less_half2(a1, turns[4 * i + 1], mul_half2(b1, turns[4 * i + 3])),
            fma_half2(b0, turns[4 * i + 0], mul_half2(a0, turns[4 * i + 2])),
            fma_half2(b1, turns[4 * i + 1], mul_half2(a1, turns[4 * i + 3])),
        )
    return out


@gluon.jit
def _fetch_groups(base, source, thread, W: gl.constexpr):
    """Begin to copy a head's rows as of :func:`kvfold.kernels.long.tables.eights`, [2, codes, 2, 4] of 16 bytes; here they
    are [4, codes, 4], of group 4 a + b in [b, code, a]."""
    whole = thread * 0 + 16
    for at in range(0, 4096, 32 * W):
        piece = thread + at
        to = base + piece % 4 * 16384 + piece // 8 % 256 * 64 + (piece // 2048 * 2 + piece // 4 % 2) * 16
        copy_async(to, source + piece * 16, whole, (piece < 4096).to(gl.int32), 0, 0, True)


@gluon.jit
def _halves_of(a, b, selector):
    """A half of a and one of b, as ``selector`` says."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _begins_with(g, STAGES: gl.constexpr, KEYS: gl.constexpr):
    """Which part a lane makes first of a token's channels: part i of :func:`_channel` is what it makes as number i ^ that."""
    if STAGES == 4:
        return g * 0
    elif KEYS:
        return g // 2 % 2
    else:
        return g % 4


@gluon.jit
def _channel(t, first, W: gl.constexpr, KEYS: gl.constexpr):
    """First channel of word W of a lane's 16: of 4 adjacent channels of pairs real parts, then imaginary ones; or of 8.
    ``first``: see :func:`_begins_with`."""
    if KEYS:
        return t * 4 + (first ^ (W // 4)) * 16 + (W % 4 // 2 * 64 + W % 2 * 2)
    else:
        return t * 8 + (first ^ (W // 4)) * 32 + W % 4 * 2


@gluon.jit
def _mean_words(source, t, first, KEYS: gl.constexpr):
    """A head's mean, 16 words of the lane's channels, and its largest number. ``source``: pointer to 128 numbers."""
    words = ()
    big = t.to(gl.float32) * 0.0
    for w in gl.static_range(16):
        at = source + _channel(t, first, w, KEYS)
        a = gl.load(at).to(gl.float32)
        b = gl.load(at + 1).to(gl.float32)
        words = words + (pack_half2(a, b, False),)
        big = gl.maximum(big, gl.maximum(gl.abs(a), gl.abs(b)))
    big = gl.maximum(big, shuffle_xor(big, 1))
    return words, gl.maximum(big, shuffle_xor(big, 2))


@gluon.jit
def _places_of_fours(base, g, t, KEYS: gl.constexpr):
    """Of a lane for :func:`_keys_of_fours` and :func:`_values_of_fours`: weights that pick a group's code of four and multiply
    it by the 128 bytes of a code; addresses of the lane's 8 bytes in quarters of these; selectors of halves.

    Tables are as of :func:`kvfold.kernels.long.tables.fours`.
    """
    weights = ()
    addresses = ()
    if KEYS:
        odd = g % 2
        first = g // 2 % 2
        for i in gl.static_range(4):
            weights = weights + ((g * 0 + 128) << 8 * (odd ^ i),)
            addresses = addresses + (base + (first ^ (i // 2)) * 64 + (odd ^ (i % 2)) * 32 + t * 8,)
        low = gl.where(odd == 1, 0x1054, 0x5410)
        return weights + addresses + (low, low + 0x2222)
    else:
        for i in gl.static_range(2):
            weights = weights + ((g * 0 + 128) << 8 * (t % 2 * 2 + i),)
        for i in gl.static_range(4):
            addresses = addresses + (base + (g % 4 ^ i) * 32 + t * 8,)
        return weights + addresses


@gluon.jit
def _keys_of_groups(word, place):
    """Keys of one token of every lane, 16 words as of :func:`_channel`.

    ``word``: the codes of the lane's four groups; ``place``: the lane's address of the rows.
    """
    rows = ()
    for i in gl.static_range(4):
        rows = rows + load_shared(_weighted_bytes(word, place * 0 + (64 << 8 * i), place), 16384 * i, 4)
    out = ()
    for m in gl.static_range(4):  # numbers m and m + 4 of a row are a pair
        for half in gl.static_range(2):
            for i in gl.static_range(2):
                a = rows[8 * i + 2 * half + m // 2]
                b = rows[8 * i + 4 + 2 * half + m // 2]
                if m % 2 == 0:
                    out = out + (low_halves(a, b),)
                else:
                    out = out + (high_halves(a, b),)
    return out


@gluon.jit
def _keys_of_fours(codes, t, first, own):
    """The same of groups of four channels, 4 t to 4 t + 3, and as many 16 further; ``codes``: address of the token's 32. Odd
    tokens read the odd one of two groups first."""
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
def _values_of_fours(codes, t, first, own):
    """Values of one token of every lane, of groups 8 i + 2 t and the next one; ``codes``: address of the token's 32."""
    out = ()
    for i in gl.static_range(4):
        word = load_shared(codes + t // 2 * 4 + (first ^ i) * 8, 0, 1)[0]
        for odd in gl.static_range(2):
            out = out + load_shared(_weighted_bytes(word, own[odd], own[2 + i]), odd * 32768, 2)
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
def _put_group_values(to, x, norm, means, AT: gl.constexpr, GROUPS: gl.constexpr, BF16: gl.constexpr):
    """Store a token's 16 words, times its norm and more by the mean. ``to``: where parts of 32 channels go, AT bytes
    further."""
    pair = pack_half2(norm, norm, False)
    y = ()
    for i in gl.static_range(16):
        if BF16:
            a, b = unpack_half2(x[i])
            if GROUPS == 2:
                c, d = unpack_half2(means[i])
                y = y + (pack_half2(gl.fma(a, norm, c), gl.fma(b, norm, d), True),)
            else:
                y = y + (pack_half2(a * norm, b * norm, True),)
        elif GROUPS == 2:
            y = y + (bounded_half2(fma_half2(x[i], pair, means[i])),)
        else:
            y = y + (bounded_half2(mul_half2(x[i], pair)),)
    for i in gl.static_range(4):
        store_words4(to[i] + AT, y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3])


@gluon.jit
def put_group_unit(
    codes, near, far, lane, own, means, largest, norms, out,
    STAGES: gl.constexpr, KEYS: gl.constexpr, BF16: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Decode 32 tokens of codes of groups; as :func:`put_unit`. ``means``, ``largest``: see :func:`_mean_words`.

    With a mean, keys are scaled down by the power of two of their norm, or of the mean's largest number, so that they are
    numbers of fp16 while they are rotated.
    """
    g = lane // 4
    t = lane % 4
    first = _begins_with(g, STAGES, KEYS)
    PART: gl.constexpr = 32 if KEYS else 64
    to = ()
    for m in gl.static_range(4):
        to = to + (out + (g * 256 + t * (PART // 4) + (first ^ m) * PART),)
    turn = ()
    if KEYS:
        for m in gl.static_range(4):
            at = far + t * 8 + (first ^ (m % 2)) * 32
            turn = turn + load_shared(at, m // 2 * 64, 2) + load_shared(at, m // 2 * 64 + 128, 2)
    for e in gl.static_range(4):
        at = g + 8 * e
        norm = load_half(norms + at * 2)
        if KEYS:
            if STAGES == 4:
                x = _keys_of_groups(load_shared(codes + at * 16 + t * 4, 0, 1)[0], own[0])
            else:
                x = _keys_of_fours(codes + at * 32, t, first, own)
            up = norm
            if GROUPS == 2:
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
            x = _rotated(x, shared_turns(near + at * 256 + (g % 2 ^ first) * 64 + t * 16))
            x = _rotated(x, turn)
            _put_group_keys(to, x, up, 2048 * e, BF16)
        else:
            if STAGES == 4:
                x = _token_sums(codes + at * 16, own, 0, 4, GROUPS)
            else:
                x = _values_of_fours(codes + at * 32, t, first, own)
            _put_group_values(to, x, norm, means, 2048 * e, GROUPS, BF16)


@gluon.jit(do_not_specialize=["heads", "start", "first", "units", "room", "wide"])
def unpack_tables_kernel(
    codes, norms, rows, turns_ptr, near_ptr, position_ptr, mean_ptr, out, heads, start, first, units, room, wide, gain,
    STAGES: gl.constexpr, STEPS: gl.constexpr, KEYS: gl.constexpr, BF16: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Decode ``units`` units of 32 tokens of each KV head, from unit ``first`` of its storage on, to ``out`` [heads, wide,
    128].

    Grid: (programs, batch * heads). STEPS: CommVQ's keys, of which every head has ``rows``; else VQLLM's. KEYS are rotated: the
    span's first token is number ``start`` after ``position_ptr``; ``turns_ptr``, float32 [2, 64]: turns per token of the pairs
    and what float32 leaves of them; ``near_ptr``: fp16 [2, 32, 64], cosines and sines of a unit's tokens; ``gain``: of RoPE.
    From one KV head's storage to the next are ``room`` units. GROUPS, 1 or 2: TaSQ's codes of groups, of which every head has
    ``rows``; near turns then are [32, 4, 4, 8], see :func:`kvfold.kernels.long.tables.group_turns`. With 2 vectors are more
    by ``mean_ptr``, fp16 [heads, 128]. STAGES is a quarter of the bytes of a token's codes: 4 of groups of eight channels, 8 of
    four.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = shared_bytes(STAGES, STEPS, KEYS, W, GROUPS)
    TABLES: gl.constexpr = kept_bytes(STAGES) if STEPS else table_bytes(STAGES, GROUPS)
    CODES: gl.constexpr = code_bytes(STAGES, STEPS)
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
    if GROUPS:
        tables = tables + (head % heads).to(gl.int64) * TABLES
    near = base + TABLES
    stage = near + warp * warp_bytes(STAGES, STEPS)
    if KEYS:
        stage = stage + TURNS
        if GROUPS:
            _fetch_rows(near, near_ptr.to(gl.int64), thread, TURNS, W)
        else:
            fetch_turns(near, near_ptr, thread, lane, W, STEPS)
    far = stage + 2 * BUFFER
    if GROUPS and KEYS and STAGES == 4:
        _fetch_groups(base, tables, thread, W)
    else:
        _fetch_rows(base, tables, thread, TABLES, W)

    lo = (units.to(gl.int64) * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    hi = (units.to(gl.int64) * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    each = (hi - lo + W - 1) // W
    begin = gl.minimum(lo + warp * each, hi - 1)
    block = head.to(gl.int64) * room + first
    source = codes.to(gl.int64) + block * CODES
    norm_at = norms.to(gl.int64) + block * 64
    to = out.to(gl.int64) + head.to(gl.int64) * wide * 256
    _fetch_codes(stage, lane, source + begin.to(gl.int64) * CODES, CODES)
    copy_commit(lane)

    turns = ()
    gains = ()
    position = lane * 0
    if KEYS:
        for i in gl.static_range(2):
            for j in gl.static_range(2):
                turns = turns + (gl.load(turns_ptr + (2 * lane + (64 * i + j))),)
        position = (gl.load(position_ptr + head // heads) + start).to(gl.int32) + first * 32
        gains = (lane.to(gl.float32) * 0.0 + gain, lane.to(gl.float32) * 0.0 + gain)
    own = ()
    if STEPS:
        step = steps_of_pairs(tables, lane, STAGES)
        gains = (gains[0] * step[0], gains[1] * step[1])
    elif GROUPS and STAGES == 4 and KEYS:
        own = (base + lane % 4 * 16,)
    elif GROUPS and STAGES == 4:
        own = _group_places(base, lane // 4, lane % 4)
    elif GROUPS:
        own = _places_of_fours(base, lane // 4, lane % 4, KEYS)
    else:
        own = _places(base, tables, lane // 4, lane % 4, STAGES)
    means = ()
    largest = lane.to(gl.float32) * 0.0
    if GROUPS == 2:
        begins = _begins_with(lane // 4, STAGES, KEYS)
        means, largest = _mean_words(mean_ptr + head % heads * 128, lane % 4, begins, KEYS)
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
            turn = _turns_at(there + lane % 4 * 16, STEPS)
            warp_sync(lane)
        _fetch_codes(there, lane, source + after.to(gl.int64) * CODES, CODES)
        copy_commit(lane)
        if KEYS and not STEPS:
            leave_turn(far, lane, position + unit * 32, turns, gains)
        copy_wait(lane, 1)
        if KEYS and not STEPS and not GROUPS:
            turn = _turns_at(far + lane % 4 * 32, STEPS)
        here = stage + i % 2 * BUFFER
        norms_here = norm_at + unit.to(gl.int64) * 64
        out_here = to + unit.to(gl.int64) * 8192
        if GROUPS:
            put_group_unit(here, near, far, lane, own, means, largest, norms_here, out_here, STAGES, KEYS, BF16, GROUPS)
        else:
            put_unit(here, base, near, turn, lane, own, norms_here, out_here, STAGES, STEPS, KEYS, BF16)
    copy_wait(lane, 0)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
