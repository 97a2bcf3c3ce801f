# mypy: ignore-errors
"""Keys as sums of pairs of codes (CommVQ): the Gluon kernel of :mod:`kvfold.kernels.commvq.encode` (64 codes, 128 channels).

A stage adds ``z_a + i z_b`` to a key. Codes are chosen in the order of :func:`kvfold.formats.codebook.choices`, by scores: of a
``<x, z_a> - |z_a|^2 / 2``, of b ``<x, i z_b> - |z_b|^2 / 2``, of both their sum less ``<z_a, i z_b>``.

How they are chosen is in :mod:`kvfold.kernels.commvq._pair_codes`. What is left of a key is without the codes ``c`` and ``d``
of a stage that is chosen again: scores make up for them by what they have in common with others, ``<z_c, z_a>``, and rows are
read only where a code changes.

Multiplication by i keeps products and turns their sign over: ``<i z_c, i z_a> = <z_c, z_a>``, and ``<z_a, i z_b>`` is minus
``<z_b, i z_a>``. So rows, products of warpgroups, and tables of what codes have in common are one for both sides.

A warp has 16 tokens. Lane (g, t) has channels 8t to 8t + 7 of every 32 channels of tokens g and g + 8, as fp16 pairs that are
operands of ``mma.m16n8k16`` as they lie. Scores are compared in fp16, two at a time.

Bytes of a stage's tables, which follow one another: rows of 64 codes, fp16 [64, 128], where odd codes have their two halves of
every 128 bytes in each other's place, so that eight lanes meet no bank twice; ``-<z_a, i z_b>`` fp16 [a, b];
``-|z_a|^2 / 2`` fp16 [64], and up to 25,600 nothing; WIDE: tiles of 64 rows and 64 channels, as products of warpgroups read
them once for 64 tokens; ``<z_c, z_a> - |z_a|^2 / 2`` fp16 [c, a].
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._tables import _dynamic_base, _fetch_rows, reserved
from kvfold.kernels.common._warp import (
    add_half2,
    copy_commit,
    copy_wait,
    load_global4,
    load_shared,
    mma,
    pack_half2,
    program_sync,
    shuffle_xor,
    store_shared1,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.common._warpgroup import arrive_at, begin_barrier, copy_all, products_of_pairs, wait_at
from kvfold.kernels.commvq._pair_codes import _from_many, _from_two, _once_more, line_of, more, sub_half2
from kvfold.kernels.device import HOPPER

BETWEEN = gl.constexpr(16384)
LESS = gl.constexpr(24576)
TILES = gl.constexpr(25600)
"""Bytes of a stage before what codes of both sides have in common, what lengths take off, and tiles."""


@gluon.constexpr_function
def common_bytes(wide):
    """Bytes of a stage's tables before those that only a choice made again reads."""
    return 25600 + 16384 if wide else 25600


@gluon.constexpr_function
def stage_bytes(wide):
    """Bytes of a stage's tables."""
    return common_bytes(wide) + 8192


@gluon.constexpr_function
def buffers(stages, tokens, wide):
    """Stages whose tables are in shared memory at once."""
    if not wide:
        return 2
    return 4 if 4 * stage_bytes(wide) + 4 * stages * tokens + 64 <= HOPPER.shared_memory else 3


@gluon.constexpr_function
def shared_bytes(stages, tokens, wide):
    """Bytes of shared memory of a program: stages' tables, a word for each stage of ``tokens``, and barriers."""
    size = buffers(stages, tokens, wide) * stage_bytes(wide) + 4 * stages * tokens + 64
    return (size + 1023) // 1024 * 1024


@gluon.constexpr_function
def _exchange_asm(of_b):
    lines = ["setp.eq.s32 p, $36, 0; @p bra same;"]
    for c in range(4):
        source = (c + 2) % 4 if of_b else c  # real channels of i z are minus z's imaginary ones
        for name, at in (("n", 32), ("o", 34)):
            lines.append(f"ld.shared.v4.b32 {{{name}0, {name}1, {name}2, {name}3}}, [${at + c % 2}+{64 * source}];")
        for i in range(4):
            lines.append(f"sub.rn.f16x2 o{i}, o{i}, n{i};")
            lines.append(f"{'sub' if of_b and c < 2 else 'add'}.rn.f16x2 ${4 * c + i}, ${4 * c + i}, o{i};")
    return f"{{ .reg .pred p; .reg .b32 n<4>, o<4>; {' '.join(lines)} same: }}"


@gluon.constexpr_function
def _exchange_constraints():
    return ",".join(["=r"] * 16 + [str(i) for i in range(16)] + ["r"] * 5)


@gluon.constexpr_function
def _sixteen():
    return (gl.int32,) * 16


@gluon.jit
def exchange(x, new, old, changed, OF_B: gl.constexpr):
    """What is left of a token's 16 words with a code's row taken back and another's taken off, of ``z`` or (OF_B) ``i z``; as
    it is where ``changed`` is 0. ``new``, ``old``: addresses of even and of odd chunks."""
    asm: gl.constexpr = _exchange_asm(OF_B)
    constraints: gl.constexpr = _exchange_constraints()
    return gl.inline_asm_elementwise(
        asm, constraints, x + new + old + (changed,), dtype=_sixteen(), is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _in_order(words, odd, START: gl.constexpr):
    """A lane's 16 scores of both of its tokens, in the order in which it reads lines."""
    out = ()
    for r in gl.static_range(2):
        line = ()
        for k in gl.static_range(8):
            line = line + (gl.where(odd, words[START + 2 * (k ^ 4) + r], words[START + 2 * k + r]),)
        out = out + (line,)
    return out


@gluon.jit
def _products(x, at, lane, OF_B: gl.constexpr):
    """Products of keys with the lane's 16 codes ``z``, or (OF_B) ``i z``: 16 words. ``at``: addresses of its first code's even
    and odd chunks."""
    words = ()
    for n in gl.static_range(8):
        acc = _zero4(lane)
        for i in gl.static_range(4):
            if OF_B:
                if i == 2:  # i z has minus z's imaginary channels for real ones
                    acc = (-acc[0], -acc[1], -acc[2], -acc[3])
            z = load_shared(at[i % 2], 512 * n + 64 * ((i + 2 * OF_B) % 4 - i % 2), 4)
            acc = mma(x[4 * i], x[16 + 4 * i], x[4 * i + 1], x[17 + 4 * i], z[0], z[1], acc, False)
            acc = mma(x[4 * i + 2], x[18 + 4 * i], x[4 * i + 3], x[19 + 4 * i], z[2], z[3], acc, False)
        words = words + (pack_half2(acc[0], acc[1], False), pack_half2(acc[2], acc[3], False))
    return words


@gluon.jit
def _operands(x):
    """A lane's words of 16 tokens in the order in which products take them."""
    words = ()
    for c in gl.static_range(8):
        words = words + (x[2 * c], x[16 + 2 * c], x[2 * c + 1], x[17 + 2 * c])
    return words


@gluon.jit
def _scores(rest, table, lane, g, t, WIDE: gl.constexpr):
    """Products of both tokens of a lane with its 16 codes ``z``, and with ``i z``."""
    odd = (g & 1) == 1
    if WIDE:
        words = products_of_pairs(_operands(rest), table + TILES)
    else:
        code0 = table + (16 * (g // 2) + (g & 1)) * 256 + t * 16
        at = (code0 + 64 * (g & 1), code0 + 64 - 64 * (g & 1))
        words = _products(rest, at, lane, False) + _products(rest, at, lane, True)
    return _in_order(words, odd, 0), _in_order(words, odd, 16)


@gluon.jit
def _places(table, code, t):
    """Addresses of a code's channels that the lane has: of even and of odd chunks."""
    line = table + code * 256 + t * 16
    turned = (code & 1) * 64
    return line + turned, line - turned


@gluon.jit
def _row(table, code, t):
    """A code's channels that the lane has: 16 words."""
    even, odd = _places(table, code, t)
    return load_shared(even, 0, 4) + load_shared(odd, 64, 4) + load_shared(even, 128, 4) + load_shared(odd, 192, 4)


@gluon.jit
def _without(x, table, a, b, t):
    """What is left of a token's 16 words without ``z_a + i z_b``."""
    z = _row(table, a, t)
    w = _row(table, b, t)
    out = ()
    for k in gl.static_range(8):
        out = out + (add_half2(sub_half2(x[k], z[k]), w[k + 8]),)
    for k in gl.static_range(8):
        out = out + (sub_half2(sub_half2(x[k + 8], z[k + 8]), w[k]),)
    return out


@gluon.jit
def _token(rest, R: gl.constexpr):
    """One token's 16 words."""
    x = ()
    for k in gl.static_range(16):
        x = x + (rest[16 * R + k],)
    return x


@gluon.jit
def _stage(rest, table, codes, lane, g, t, AGAIN: gl.constexpr, MANY: gl.constexpr, WIDE: gl.constexpr):
    """One stage of a warp's tokens; ``codes``: address of its first token's word. AGAIN: it has been chosen before. MANY: the
    search begins with many codes."""
    flip = (g & 1) * 8
    first = 16 * t
    near = 32 * t + 2 * flip
    far = 32 * t + 16 - 2 * flip
    lines = table + BETWEEN
    of_a, of_b = _scores(rest, table, lane, g, t, WIDE)
    less = ()
    if not AGAIN:
        less = line_of(table + LESS, near, far)
    out = ()
    for r in gl.static_range(2):
        x = _token(rest, r)
        if AGAIN:
            word = load_shared(codes + g * 4, 32 * r, 1)[0]
            a, b = _once_more(
                of_a[r], of_b[r], word & 63, word >> 6, lines, table + common_bytes(WIDE), lane, first, flip, near, far
            )  # fmt: skip
            x = exchange(x, _places(table, a, t), _places(table, word & 63, t), a ^ word & 63, False)
            x = exchange(x, _places(table, b, t), _places(table, word >> 6, t), b ^ word >> 6, True)
        else:
            x_a = more(of_a[r], less)
            x_b = more(of_b[r], less)
            if MANY:
                a, b = _from_many(x_a, x_b, lines, lane, first, flip, near, far)
            else:
                a, b = _from_two(x_a, x_b, lines, lane, first, flip, near, far)
            x = _without(x, table, a, b, t)
        store_shared1(codes + 32 * r + g * 4, a + 64 * b)
        out = out + x
    return out


@gluon.jit
def _stage_at(number, STAGES: gl.constexpr, MIDDLE: gl.constexpr, LOW: gl.constexpr, LATE: gl.constexpr):
    """Which stage is chosen as number ``number`` of :func:`kvfold.formats.codebook.choices`."""
    rest = number - (STAGES + MIDDLE - LOW)
    stage = gl.where(number < MIDDLE, number, number - (MIDDLE - LOW))
    return gl.where(rest >= 0, LATE + rest % (STAGES - LATE), stage)


@gluon.jit
def _is_again(number, STAGES: gl.constexpr, MIDDLE: gl.constexpr, LOW: gl.constexpr):
    """1 if choice number ``number`` is of a stage that has been chosen before, else 0."""
    back = gl.minimum(gl.maximum(number - MIDDLE + 1, 0), 1) * gl.minimum(gl.maximum(2 * MIDDLE - LOW - number, 0), 1)
    return back + gl.minimum(gl.maximum(number - (STAGES + MIDDLE - LOW) + 1, 0), 1)


@gluon.jit
def _fetch(
    of, number, waits, STAGES: gl.constexpr, MIDDLE: gl.constexpr, LOW: gl.constexpr, LATE: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    """Begin to copy the tables of choice number ``number`` as a whole, once nobody reads what is in their place: the thread
    that copies ``waits`` for that."""
    base, tables, _, thread, _, _, _, barriers, _ = of
    BYTES: gl.constexpr = stage_bytes(True)
    leads = (thread == 0).to(gl.int32)
    at = number % B
    wait_at(barriers + 8 * (B + at), (number // B + 1) & 1, waits.to(gl.int32))
    size = common_bytes(True) + _is_again(number, STAGES, MIDDLE, LOW) * 8192
    source = tables + _stage_at(number, STAGES, MIDDLE, LOW, LATE) * BYTES
    copy_all(base + at * BYTES, source, size, barriers + 8 * at, leads)


@gluon.jit
def _round(
    rest, of, begin, last, STAGES: gl.constexpr, MIDDLE: gl.constexpr, LOW: gl.constexpr, LATE: gl.constexpr,
    TOKENS: gl.constexpr, W: gl.constexpr, AGAIN: gl.constexpr, MANY: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Choices number ``begin`` to ``last``, whose first tables are on their way. ``of``: addresses of tables in shared memory,
    in global memory, of the warp's first words; thread, lane, its parts; address of barriers; how many choices there are.

    WIDE: one thread copies tables as a whole, two choices ahead, and warps wait for these and for nobody else. Others copy the
    next choice's together, and meet.
    """
    base, tables, words, thread, lane, g, t, barriers, count = of
    STAGE: gl.constexpr = stage_bytes(WIDE)
    B: gl.constexpr = buffers(STAGES, TOKENS, WIDE)
    for number in range(begin, last):
        stage = _stage_at(number, STAGES, MIDDLE, LOW, LATE)
        here = number % B
        if WIDE:
            if number + 2 < count:
                _fetch(of, number + 2, (thread == 0) & (number + 2 >= B), STAGES, MIDDLE, LOW, LATE, B)
            wait_at(barriers + 8 * here, (number // B) & 1, lane * 0 + 1)
        else:
            copy_wait(lane, 0)
            program_sync(lane)
            if number + 1 < count:
                following = tables + _stage_at(number + 1, STAGES, MIDDLE, LOW, LATE) * STAGE
                _fetch_rows(base + (number + 1) % B * STAGE, following, thread, STAGE, W)
                copy_commit(lane)
        at = words + stage * (4 * TOKENS)
        rest = _stage(rest, base + here * STAGE, at, lane, g, t, AGAIN, MANY, WIDE)
        if WIDE:
            warp_sync(lane)
            arrive_at(barriers + 8 * (B + here), (lane == 0).to(gl.int32))
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
    STAGES: gl.constexpr, COUNT: gl.constexpr, MIDDLE: gl.constexpr, LOW: gl.constexpr, LATE: gl.constexpr,
    PICKED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Codes and norms of keys. Grid: (parts of 16 tokens a warp, heads, batch).

    ``unit`` fp16 [batch, heads, tokens, 128] under the metric, divided by ``size`` float32 [batch, heads, tokens], less
    ``shift`` fp16 [heads, 128]; ``tables`` [heads, STAGES, :func:`stage_bytes`]. ``codes`` int16 [lanes, room / 32, STAGES,
    24], ``rms`` fp16 [lanes, room]. COUNT choices in the order of :func:`kvfold.formats.codebook.choices`; as many as stages:
    each begins with many codes.
    """
    W: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = 16 * W
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
    g = lane // 4
    t = lane % 4
    token = gl.program_id(0) * TOKENS + warp * 16 + g
    on = lane * 0 + 1
    rest = ()
    for r in gl.static_range(2):
        real = gl.minimum(token + 8 * r, tokens - 1)
        at = unit_ptr.to(gl.int64) + (given + real) * 256 + t * 16
        for c in gl.static_range(4):
            rest = rest + load_global4(at + 64 * c, on)
    B: gl.constexpr = buffers(STAGES, TOKENS, WIDE)
    words = base + B * STAGE
    mine = words + warp * 64
    barriers = words + 4 * STAGES * TOKENS
    of = (base, tables, mine, thread, lane, g, t, barriers, COUNT)
    if WIDE:
        for i in gl.static_range(2 * B):
            begin_barrier(barriers + 8 * i, 1 if i < B else W, (thread == 0).to(gl.int32))
        program_sync(lane)
        for i in gl.static_range(min(COUNT, 2)):
            _fetch(of, i, thread < 0, STAGES, MIDDLE, LOW, LATE, B)
    else:
        _fetch_rows(base, tables, thread, STAGE, W)
        copy_commit(lane)
    if COUNT > STAGES:
        rest = _round(rest, of, 0, 1, STAGES, MIDDLE, LOW, LATE, TOKENS, W, False, True, WIDE)
        rest = _round(rest, of, 1, MIDDLE, STAGES, MIDDLE, LOW, LATE, TOKENS, W, False, False, WIDE)
        BACK: gl.constexpr = 2 * MIDDLE - LOW
        rest = _round(rest, of, max(MIDDLE, 1), BACK, STAGES, MIDDLE, LOW, LATE, TOKENS, W, True, False, WIDE)
        LEFT: gl.constexpr = STAGES + MIDDLE - LOW
        rest = _round(rest, of, max(BACK, 1), LEFT, STAGES, MIDDLE, LOW, LATE, TOKENS, W, False, False, WIDE)
        rest = _round(rest, of, LEFT, COUNT, STAGES, MIDDLE, LOW, LATE, TOKENS, W, True, False, WIDE)
    else:
        rest = _round(rest, of, 0, COUNT, STAGES, MIDDLE, LOW, LATE, TOKENS, W, False, True, WIDE)

    shift = ()
    for c in gl.static_range(4):
        shift = shift + load_global4(shift_ptr.to(gl.int64) + head * 256 + t * 16 + 64 * c, on)
    for r in gl.static_range(2):
        here = token + 8 * r
        real = gl.minimum(here, tokens - 1)
        given_words = ()
        for c in gl.static_range(4):
            given_words = given_words + load_global4(unit_ptr.to(gl.int64) + (given + real) * 256 + t * 16 + 64 * c, on)
        rms = gl.load(size_ptr + given + real) * _gain(given_words, shift, rest, r)
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
