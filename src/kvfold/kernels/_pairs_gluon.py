"""Keys as sums of pairs of codes (CommVQ): the Gluon kernel of :mod:`kvfold.kernels.encode_pairs` (64 codes, 128 channels).

A stage adds ``z_a + i z_b`` to a key and looks for the pair with the largest ``<x, z_a> + <x, i z_b> - <z_a, i z_b>``,
squared lengths taken off. In the first turn all 4,096 pairs of the first stage are compared, whose centres are long beside what
codes miss. Otherwise each of four lanes, which has 16 codes a and 16 codes b of a token, begins with its best few; later turns,
which leave out the first fifth of the stages (:func:`kvfold.formats.codebook.again_from`), begin with the token's code b,
too. All partners of these are compared, and for the best pair's partner all codes of its side.

Warps have 16 M tokens. Lane (g, t) has channels 8t to 8t + 7 of every 32 channels of tokens g and g + 8 of each 16, as fp16
pairs that are operands of ``mma.m16n8k16`` as they lie. A code's row in shared memory serves products and sums alike. Scores
are summed in float32 and compared in fp16, two at a time.

Bytes of a stage's tables, which follow one another: rows of 128 codes (z_a, then i z_b), fp16 [128, 128], where odd codes have
their two halves of every 128 bytes in each other's place, so that eight lanes meet no bank twice; ``-<z_a, i z_b>`` fp16 [a, b]
and its transpose [b, a]; half of what squared lengths take off, float32 [128]. WIDE: 512 bytes between, and for a, then b,
tiles of 64 rows and 64 channels, as products of warpgroups read them once for 64 tokens.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._tables_gluon import _dynamic_base, _fetch_rows, _shuffled, reserved
from kvfold.kernels._warp import (
    add_half2,
    copy_commit,
    copy_wait_all,
    high_halves,
    load_global4,
    load_shared,
    load_shared4f,
    low_halves,
    max_half2,
    mma,
    pack_half2,
    program_sync,
    shuffle_xor,
    store_shared1,
    unpack_half2,
)
from kvfold.kernels._warpgroup import mma_wide, show_copies

TILES = gl.constexpr(50176)
"""Bytes of a stage's tables before tiles."""
LOWEST = gl.constexpr(-67044352)
"""Two smallest numbers of fp16."""
ALL = gl.constexpr(64)
"""Codes to begin with where all pairs are compared."""


@gluon.constexpr_function
def stage_bytes(wide):
    """Bytes of a stage's tables."""
    return 50176 + 32768 if wide else 49664


@gluon.constexpr_function
def shared_bytes(stages, tokens, wide):
    """Bytes of shared memory of a program: two stages' tables, and a word for each stage of ``tokens``."""
    return (2 * stage_bytes(wide) + 4 * stages * tokens + 1023) // 1024 * 1024


@gluon.jit
def sub_half2(a, b):
    return gl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def swap_halves(x):
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x1032;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def equal_halves(a, b):
    """All ones in halves that are the same number, else 0."""
    return gl.inline_asm_elementwise(
        "set.eq.u32.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def where_bits(mask, a, b):
    """Bits of a where ``mask`` has ones, else of b."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [mask, a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _largest8(x):
    """Of eight words the largest number of each half."""
    # three at a time, as one instruction of sm_90 takes them
    a = max_half2(max_half2(x[0], x[1]), x[2])
    b = max_half2(max_half2(x[3], x[4]), x[5])
    return max_half2(max_half2(a, b), max_half2(x[6], x[7]))


@gluon.jit
def _in_both(x):
    """The larger half, twice."""
    return max_half2(x, swap_halves(x))


@gluon.jit
def _of_four(x, lane):
    """The largest numbers of four lanes."""
    x = max_half2(x, _shuffled(x, lane ^ 1))
    return max_half2(x, _shuffled(x, lane ^ 2))


@gluon.jit
def _number(x, best):
    """1 to 16: which of a lane's 16 numbers is ``best`` (twice in its word); 0: none."""
    found = best * 0
    for k in gl.static_range(8):
        found = where_bits(equal_halves(x[k], best), found * 0 + (2 * k + 1 + ((2 * k + 2) << 16)), found)
    return gl.maximum(found & 0xFFFF, found >> 16)


@gluon.jit
def _code(number, lane, first, flip):
    """Code of a number that some of four lanes have: 0 to 63."""
    code = gl.where(number > 0, first + ((number - 1) ^ flip) + 1, 0)
    code = gl.maximum(code, _shuffled(code, lane ^ 1))
    code = gl.maximum(code, _shuffled(code, lane ^ 2))
    return gl.maximum(code - 1, 0)


@gluon.jit
def _without(x, line, near, far):
    """Scores less what their pairs with one code take off, whose line is at address ``line``."""
    p = load_shared(line + near, 0, 4)
    q = load_shared(line + far, 0, 4)
    return (
        add_half2(x[0], p[0]), add_half2(x[1], p[1]), add_half2(x[2], p[2]), add_half2(x[3], p[3]),
        add_half2(x[4], q[0]), add_half2(x[5], q[1]), add_half2(x[6], q[2]), add_half2(x[7], q[3]),
    )  # fmt: skip


@gluon.jit
def _beside(x, lines, code, lane, first, flip, near, far):
    """The best code beside ``code`` of the other side."""
    left = _without(x, lines + code * 128, near, far)
    return _code(_number(left, _of_four(_in_both(_largest8(left)), lane)), lane, first, flip)


@gluon.jit
def _starts(of_b, own, lane, first, flip):
    """Of four lanes the code b that each has ``own`` for a score, and above it that score: four words."""
    start = (own & -65536) | ((first + ((_number(of_b, own) - 1) ^ flip)) & 63)
    quad = lane & -4
    return (
        _shuffled(start, quad), _shuffled(start, quad + 1), _shuffled(start, quad + 2), _shuffled(start, quad + 3)
    )  # fmt: skip


@gluon.jit
def _start_of(of_b, b, lane, flip):
    """Code b, and above it its score."""
    number = (b & 15) ^ flip
    word = of_b[0]
    for k in gl.static_range(1, 8):
        word = gl.where(number // 2 == k, of_b[k], word)
    word = gl.where((number & 1) == 1, word & -65536, word << 16)
    return _shuffled(word, (lane & -4) + (b >> 4)) | b


@gluon.jit
def _partners(of_a, starts, lines, lane, near, far):
    """For two codes b the largest score of a beside each, and that with the score of b: pairs of halves."""
    p = _largest8(_without(of_a, lines + (starts[0] & 63) * 128, near, far))
    q = _largest8(_without(of_a, lines + (starts[1] & 63) * 128, near, far))
    most = _of_four(max_half2(low_halves(p, q), high_halves(p, q)), lane)
    return most, add_half2(most, high_halves(starts[0], starts[1]))


@gluon.jit
def _from_one_side(of_a, of_b, kept, lines, beside, lane, first, flip, near, far, STARTS: gl.constexpr):
    """Score of the best pair that holds one of each lane's STARTS best codes b or the one that is ``kept``, its a, and the best
    b for that. ``lines``, ``beside``: addresses of what a pair takes off, by b and by a."""
    own = _in_both(_largest8(of_b))
    words = _starts(of_b, own, lane, first, flip)
    if STARTS > 1:
        others = ()
        for k in gl.static_range(8):
            others = others + (where_bits(equal_halves(of_b[k], own), own * 0 + LOWEST, of_b[k]),)
        words = words + _starts(others, _in_both(_largest8(others)), lane, first, flip)
    words = words + kept + kept
    COUNT: gl.constexpr = len(words) // 2
    most = ()
    sums = ()
    for i in gl.static_range(COUNT):
        p, s = _partners(of_a, (words[2 * i], words[2 * i + 1]), lines, lane, near, far)
        most = most + (p,)
        sums = sums + (s,)
    best = sums[0]
    for i in gl.static_range(1, COUNT):
        best = max_half2(best, sums[i])
    best = _in_both(best)
    b = words[0]
    which = most[0]
    low = lane >= 0
    for i in gl.static_range(COUNT):
        equal = equal_halves(sums[i], best)
        here = equal != 0
        left = (equal & 0xFFFF) != 0
        b = gl.where(here, gl.where(left, words[2 * i], words[2 * i + 1]), b)
        which = gl.where(here, most[i], which)
        low = gl.where(here, left, low)
    which = gl.where(low, low_halves(which, which), high_halves(which, which))
    a = _code(_number(_without(of_a, lines + (b & 63) * 128, near, far), which), lane, first, flip)
    return best, a, _beside(of_b, beside, a, lane, first, flip, near, far)


@gluon.jit
def _of_all(of_a, of_b, lines, beside, lane, first, flip, near, far):
    """The best of all pairs (a, b)."""
    quad = lane & -4
    best = lane * 0 + LOWEST
    which = best
    b = lane * 0
    words = of_b
    for i in range(8):
        code = first + ((2 * i) ^ flip)
        for half in gl.static_range(2):
            if half == 0:
                start = words[0] << 16 | code
            else:
                start = (words[0] & -65536) | code + 1
            for k in gl.static_range(2):
                pair = (_shuffled(start, quad + 2 * k), _shuffled(start, quad + 2 * k + 1))
                most, total = _partners(of_a, pair, lines, lane, near, far)
                above = max_half2(best, total)
                same = equal_halves(above, best)
                best = above
                which = where_bits(same, which, most)
                b = where_bits(same, b, low_halves(pair[0], pair[1]) & 0x3F003F)
        words = (words[1], words[2], words[3], words[4], words[5], words[6], words[7], words[0])
    low = (equal_halves(best, _in_both(best)) & 0xFFFF) != 0
    which = gl.where(low, low_halves(which, which), high_halves(which, which))
    b = gl.where(low, b & 63, b >> 16)
    a = _code(_number(_without(of_a, lines + b * 128, near, far), which), lane, first, flip)
    return a, _beside(of_b, beside, a, lane, first, flip, near, far)


@gluon.jit
def _pair(of_a, of_b, kept, table, lane, first, flip, near, far, STARTS: gl.constexpr):
    """The pair (a, b) of each token, whose scores four lanes have, from STARTS codes of each lane: of b, one more than of a or
    as many, and the one that is ``kept``, if any."""
    by_a = table + 32768
    by_b = table + 40960
    best, a, b = _from_one_side(of_a, of_b, kept, by_b, by_a, lane, first, flip, near, far, (STARTS + 1) // 2)
    if STARTS > 1:
        other, d, c = _from_one_side(of_b, of_a, (), by_a, by_b, lane, first, flip, near, far, STARTS // 2)
        same = equal_halves(max_half2(best, other), best) != 0
        a = gl.where(same, a, c)
        b = gl.where(same, b, d)
    return a, b


@gluon.jit
def _scores(rest, table, at, square, odd, HALF: gl.constexpr):
    """Scores of the lane's 16 codes for both of its tokens, for every 16 of the warp's: eight words each, in the order in which
    the lane reads lines. ``at``: addresses of its first code's even and odd chunks; HALF: 0 for a, 1 for b."""
    M: gl.constexpr = len(rest)
    words = ()
    for n in gl.static_range(8):
        if n % 2 == 0:
            less = load_shared4f(square + (256 * HALF + 8 * n))
        accs = ()
        for _m in gl.static_range(M):
            accs = accs + ((less[n % 2 * 2], less[n % 2 * 2 + 1], less[n % 2 * 2], less[n % 2 * 2 + 1]),)
        for c in gl.static_range(4):
            z = load_shared(at[c % 2], 16384 * HALF + 512 * n + 64 * (c - c % 2), 4)
            new = ()
            for m in gl.static_range(M):
                x = rest[m]
                acc = mma(x[4 * c], x[16 + 4 * c], x[4 * c + 1], x[17 + 4 * c], z[0], z[1], accs[m], False)
                new = new + (mma(x[4 * c + 2], x[18 + 4 * c], x[4 * c + 3], x[19 + 4 * c], z[2], z[3], acc, False),)
            accs = new
        for m in gl.static_range(M):
            acc = accs[m]
            words = words + (pack_half2(acc[0], acc[1], False), pack_half2(acc[2], acc[3], False))
    out = ()
    for m in gl.static_range(M):
        for r in gl.static_range(2):
            line = ()
            for k in gl.static_range(8):
                line = line + (gl.where(odd, words[2 * M * (k ^ 4) + 2 * m + r], words[2 * M * k + 2 * m + r]),)
            out = out + (line,)
    return out


@gluon.jit
def _operands(x):
    """A lane's words of 16 tokens in the order in which products take them."""
    words = ()
    for c in gl.static_range(8):
        words = words + (x[2 * c], x[16 + 2 * c], x[2 * c + 1], x[17 + 2 * c])
    return words


@gluon.jit
def _scores_wide(rest, table, square, odd, HALF: gl.constexpr):
    """The same by products of a warpgroup."""
    M: gl.constexpr = len(rest)
    start = ()
    for n in gl.static_range(8):
        if n % 2 == 0:
            less = load_shared4f(square + (256 * HALF + 8 * n))
        start = start + (less[n % 2 * 2], less[n % 2 * 2 + 1], less[n % 2 * 2], less[n % 2 * 2 + 1])
    out = ()
    for m in gl.static_range(M):
        sums = mma_wide(start, _operands(rest[m]), table + (TILES + 16384 * HALF))
        words = ()
        for n in gl.static_range(8):
            words = words + (
                pack_half2(sums[4 * n], sums[4 * n + 1], False), pack_half2(sums[4 * n + 2], sums[4 * n + 3], False)
            )  # fmt: skip
        for r in gl.static_range(2):
            line = ()
            for k in gl.static_range(8):
                line = line + (gl.where(odd, words[2 * (k ^ 4) + r], words[2 * k + r]),)
            out = out + (line,)
    return out


@gluon.jit
def _row(table, code, t):
    """A code's channels that the lane has: 16 words."""
    line = table + code * 256 + t * 16
    turned = (code & 1) * 64
    even = line + turned
    odd = line - turned
    return load_shared(even, 0, 4) + load_shared(odd, 64, 4) + load_shared(even, 128, 4) + load_shared(odd, 192, 4)


@gluon.jit
def _moved(x, table, a, b, t, R: gl.constexpr, BACK: gl.constexpr):
    """What is left of the keys, with the pair of tokens g + 8 R taken off, or put back."""
    za = _row(table, a, t)
    zb = _row(table, b + 64, t)
    out = ()
    for k in gl.static_range(32):
        if k // 16 != R:
            out = out + (x[k],)
        elif BACK:
            out = out + (add_half2(add_half2(x[k], za[k % 16]), zb[k % 16]),)
        else:
            out = out + (sub_half2(sub_half2(x[k], za[k % 16]), zb[k % 16]),)
    return out


@gluon.jit
def _stage(rest, table, codes, lane, g, t, AGAIN: gl.constexpr, STARTS: gl.constexpr, WIDE: gl.constexpr):
    """One stage of a warp's tokens; ``codes``: address of its first token's word. AGAIN: the code b that a token has is one
    more that the search begins with."""
    M: gl.constexpr = len(rest)
    odd = (g & 1) == 1
    flip = (g & 1) * 8
    first = 16 * t
    near = 32 * t + 2 * flip
    far = 32 * t + 16 - 2 * flip
    had = ()
    if AGAIN:
        back = ()
        for m in gl.static_range(M):
            x = rest[m]
            for r in gl.static_range(2):
                old = load_shared(codes + g * 4, 64 * m + 32 * r, 1)[0]
                had = had + (old >> 6,)
                x = _moved(x, table, old & 63, old >> 6, t, r, True)
            back = back + (x,)
        rest = back
    code0 = table + (16 * (g // 2) + (g & 1)) * 256 + t * 16
    at = (code0 + 64 * (g & 1), code0 + 64 - 64 * (g & 1))
    square = table + 49152 + 64 * t
    if WIDE:
        of_b = _scores_wide(rest, table, square, odd, 1)
        of_a = _scores_wide(rest, table, square, odd, 0)
    else:
        of_b = _scores(rest, table, at, square, odd, 1)
        of_a = _scores(rest, table, at, square, odd, 0)
    out = ()
    for m in gl.static_range(M):
        x = rest[m]
        for r in gl.static_range(2):
            x_a = of_a[2 * m + r]
            x_b = of_b[2 * m + r]
            if STARTS == ALL:
                a, b = _of_all(x_a, x_b, table + 40960, table + 32768, lane, first, flip, near, far)
            else:
                kept = ()
                if AGAIN:
                    kept = (_start_of(x_b, had[2 * m + r], lane, flip),)
                a, b = _pair(x_a, x_b, kept, table, lane, first, flip, near, far, STARTS)
            x = _moved(x, table, a, b, t, r, False)
            store_shared1(codes + (64 * m + 32 * r) + g * 4, a + 64 * b)
        out = out + (x,)
    return out


@gluon.jit
def _stage_at(number, STAGES: gl.constexpr, SKIPPED: gl.constexpr):
    """Which stage is chosen as number ``number``: all of them, then again and again those from number SKIPPED on."""
    return gl.where(number < STAGES, number, SKIPPED + (number - STAGES) % (STAGES - SKIPPED))


@gluon.jit
def _round(
    rest, of, begin, count, STAGES: gl.constexpr, SKIPPED: gl.constexpr, TOKENS: gl.constexpr, W: gl.constexpr,
    AGAIN: gl.constexpr, STARTS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """``count`` choices from number ``begin`` on; the first one's tables are on their way. ``of``: addresses of tables in
    shared memory, in global memory, of the warp's first words; thread, lane, its parts; how many choices there are at all."""
    base, tables, words, thread, lane, g, t, last = of
    STAGE: gl.constexpr = stage_bytes(WIDE)
    for i in range(count):
        number = begin + i
        stage = _stage_at(number, STAGES, SKIPPED)
        copy_wait_all(lane)
        if WIDE:
            show_copies(lane)
        program_sync(lane)
        if number + 1 < last:
            following = tables + _stage_at(number + 1, STAGES, SKIPPED) * STAGE
            _fetch_rows(base + (number + 1) % 2 * STAGE, following, thread, STAGE, W)
            copy_commit(lane)
        rest = _stage(rest, base + number % 2 * STAGE, words + stage * (4 * TOKENS), lane, g, t, AGAIN, STARTS, WIDE)
    return rest


@gluon.jit
def _gain(given, shift, rest, R: gl.constexpr):
    """What the sum of a token's codes is multiplied with: of four lanes' channels, of which ``shift`` was taken off."""
    along = 0.0
    length = 0.0
    for k in gl.static_range(16):
        x = unpack_half2(given[k])
        y = unpack_half2(rest[16 * R + k])
        z = unpack_half2(shift[k])
        for i in gl.static_range(2):
            centre = x[i] - y[i] + z[i]
            along += (x[i] + z[i]) * centre
            length += centre * centre
    along += shuffle_xor(along, 1)
    along += shuffle_xor(along, 2)
    length += shuffle_xor(length, 1)
    length += shuffle_xor(length, 2)
    return along / gl.maximum(length, 1e-12)


@gluon.jit(do_not_specialize=["tokens", "first_token", "room"])
def pairs_search_kernel(
    unit_ptr, size_ptr, shift_ptr, tables_ptr, rows_ptr, codes_ptr, rms_ptr, tokens, first_token, room, heads,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SKIPPED: gl.constexpr, M: gl.constexpr, FIRST: gl.constexpr,
    LATER: gl.constexpr, PICKED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Codes and norms of keys. Grid: (parts of 16 M tokens a warp, heads, batch).

    ``unit`` fp16 [batch, heads, tokens, 128] under the metric, divided by ``size`` float32 [batch, heads, tokens], less
    ``shift`` fp16 [heads, 128]; ``tables`` [heads, STAGES, 49,664 bytes]. ``codes`` int16 [lanes, room / 32, STAGES, 24],
    ``rms`` fp16 [lanes, room].
    """
    W: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = 16 * M * W
    STAGE: gl.constexpr = stage_bytes(WIDE)
    BYTES: gl.constexpr = shared_bytes(STAGES, TOKENS, WIDE)
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, BYTES)
    base = _dynamic_base(lane)
    program_sync(lane)
    index = gl.program_id(2)
    head = gl.program_id(1)
    place = index
    if PICKED:
        place = gl.load(rows_ptr + index).to(gl.int32)
    held = (place * heads + head).to(gl.int64) * room + first_token
    given = (index * heads + head).to(gl.int64) * tokens
    tables = tables_ptr.to(gl.int64) + head.to(gl.int64) * (STAGES * STAGE)
    _fetch_rows(base, tables, thread, STAGE, W)
    copy_commit(lane)

    g = lane // 4
    t = lane % 4
    token = gl.program_id(0) * TOKENS + warp * (16 * M) + g
    on = lane * 0 + 1
    rest = ()
    for m in gl.static_range(M):
        x = ()
        for r in gl.static_range(2):
            real = gl.minimum(token + (16 * m + 8 * r), tokens - 1)
            at = unit_ptr.to(gl.int64) + (given + real) * 256 + t * 16
            for c in gl.static_range(4):
                x = x + load_global4(at + 64 * c, on)
        rest = rest + (x,)
    words = base + 2 * STAGE
    mine = words + warp * (64 * M)
    LAST: gl.constexpr = STAGES + (TURNS - 1) * (STAGES - SKIPPED)
    of = (base, tables, mine, thread, lane, g, t, LAST)
    rest = _round(rest, of, 0, 1, STAGES, SKIPPED, TOKENS, W, False, ALL, WIDE)
    if STAGES > 1:
        rest = _round(rest, of, 1, STAGES - 1, STAGES, SKIPPED, TOKENS, W, False, FIRST, WIDE)
    if TURNS > 1:
        rest = _round(rest, of, STAGES, LAST - STAGES, STAGES, SKIPPED, TOKENS, W, True, LATER, WIDE)

    shift = ()
    for c in gl.static_range(4):
        shift = shift + load_global4(shift_ptr.to(gl.int64) + head * 256 + t * 16 + 64 * c, on)
    for m in gl.static_range(M):
        for r in gl.static_range(2):
            here = token + (16 * m + 8 * r)
            real = gl.minimum(here, tokens - 1)
            given_words = ()
            for c in gl.static_range(4):
                given_words = given_words + load_global4(
                    unit_ptr.to(gl.int64) + (given + real) * 256 + t * 16 + 64 * c, on
                )
            rms = gl.load(size_ptr + given + real) * _gain(given_words, shift, rest[m], r)
            rms = gl.minimum(gl.maximum(rms, -65504.0), 65504.0)
            gl.store(rms_ptr + held + here, rms.to(gl.float16), mask=(t == 0) & (here < tokens))
    program_sync(lane)
    _store_codes(codes_ptr, held, words, thread, tokens, STAGES, TOKENS, W)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()


@gluon.jit
def _store_codes(codes_ptr, held, words, thread, tokens, STAGES: gl.constexpr, TOKENS: gl.constexpr, W: gl.constexpr):
    """Store the program's codes ``a + 64 b``, 12 bits each without gaps, 32 tokens of a stage in 24 words of 16 bits."""
    EACH: gl.constexpr = 24 * (TOKENS // 32)
    part = gl.program_id(0) * TOKENS
    for first in range(0, STAGES * EACH, 32 * W):
        number = first + thread
        inside = number < STAGES * EACH
        number = gl.where(inside, number, 0)
        unit = number // (24 * STAGES)
        stage = number // 24 % STAGES
        word = number % 24
        at = words + (stage * TOKENS + 32 * unit + word // 3 * 4 + word % 3) * 4
        shift = word % 3 * 4
        value = load_shared(at, 0, 1)[0] >> shift | load_shared(at, 4, 1)[0] << (12 - shift)
        to = (held + part) // 32 * (24 * STAGES) + number
        gl.store(codes_ptr + to, value.to(gl.int16), mask=inside & (part + 32 * unit < tokens))
