# mypy: ignore-errors
"""Codes that a basis turns (fold, TurboQuant, QJL's keys, KVarN, NOVA-KV's values), unpacked to 16 bits.

A warp decodes 32 tokens. Their codes become operands of ``mma.m16n8k16`` as they lie (those of values once the 8 x 8 pieces of
their words are transposed), and are multiplied with the basis, which is an operand in shared memory. Its columns stand in such
an order that a lane's sums are eight adjacent channels of a token: they are stored as 16 bytes, and no number passes from one
lane to another. Of a basis that mixes blocks of channels alone no zeros are kept, nor multiplied.

Codes of four or eight channels stand for rows of a fixed table (fold with ``codebook``). It lies in shared memory as often as
fills 128 bytes for each code: every lane that reads at once has a copy of its own, and they never meet in a bank. A lane's row
is a part of an operand as it is, since the rows of the basis stand in the order that its channels come in.

Affine groups in plain order (:mod:`kvfold.kernels.affine._row_major`) are read in that order, too: a lane's 16 bytes are four
tokens of 16 channels. They are decoded to quarters of their numbers, of which fp16 has none too large; the basis is four times
as big.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._row_major import _decoded
from kvfold.kernels.common._codes import _field, _main, _operand, code_bytes
from kvfold.kernels.common._registers import _item, _replace, _zero4
from kvfold.kernels.common._stream import load_word, load_words2, load_words4
from kvfold.kernels.common._tables import _dynamic_base, _weighted_bytes, held_table, leave_table, reserved
from kvfold.kernels.common._warp import (
    copy_async,
    copy_commit,
    copy_wait,
    either_bytes,
    exp2_fast,
    fma_half2,
    load_shared,
    mma,
    mul_half2,
    pack_half2,
    prefetch,
    program_sync,
    transpose8,
    unpack_half2,
    warp_sync,
)
from kvfold.kernels.fragments._codes import LEVELS, UNIFORM, level_operands, masked_words

ROWS, AFFINE, BALANCED = 7, 8, 9
"""Kinds of codes beside those of :mod:`kvfold.kernels.fragments._codes`: of a table's rows; in plain order, with a scale and a
zero-point of each token, or of tiles of a page that are also divided by factors of the other axis."""
QUARTER = gl.constexpr(0.25)
"""Of numbers in plain order that are decoded."""
KIND_UNIFORM, KIND_LEVELS, KIND_ROWS = gl.constexpr(UNIFORM), gl.constexpr(LEVELS), gl.constexpr(ROWS)
KIND_AFFINE, KIND_BALANCED = gl.constexpr(AFFINE), gl.constexpr(BALANCED)
MAGIC = gl.constexpr(0x64006400)  # two fp16 1024: with a number below 1024 in the last ten bits, that much more


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
def byte_number(word, I: gl.constexpr):
    """Byte I of a word, as fp32."""
    return ((word >> (8 * I)) & 255).to(gl.float32)


# ---- codes as operands ----------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _half_pair(number):
    """Two fp16 of a number that fp16 holds, as a signed word."""
    import struct

    word = int.from_bytes(struct.pack("<e", number), "little") * 0x10001
    return word - (1 << 32) if word >> 31 else word


@gluon.constexpr_function
def _shift(width, bits, tile):
    """k: codes of this tile count 2^k times in the operand of :func:`kvfold.kernels.common._codes._operand`."""
    return _field(width, _main(bits), tile)[1] % 8


@gluon.constexpr_function
def _made_as(dim, tile):
    """When :func:`kvfold.kernels.fragments._codes.level_operands` makes a tile, of all, in the order of :func:`operands`."""
    step = tile // (dim // 64)
    return (2 * (2 * (tile % (dim // 64)) + step % 2) + step // 4) * 2 + step // 2 % 2


@gluon.jit
def _centred(words, lane, TILE: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr):
    """The four registers of a tile's codes u as u - (2^BITS - 1) / 2."""
    K: gl.constexpr = _shift(WIDTH, BITS, TILE)
    MIDDLE: gl.constexpr = ((1 << BITS) - 1) / 2
    x = _operand(words, TILE, WIDTH, BITS)
    out = ()
    for i in gl.static_range(4):
        y = x[i] | MAGIC
        if K == 0:  # 1024 + MIDDLE is more than fp16 holds
            y = fma_half2(y, lane * 0 + _half_pair(1.0), lane * 0 + _half_pair(-1024.0))
            y = fma_half2(y, lane * 0 + _half_pair(1.0), lane * 0 + _half_pair(-MIDDLE))
        else:
            y = fma_half2(y, lane * 0 + _half_pair(2.0**-K), lane * 0 + _half_pair(-(2.0 ** (10 - K)) - MIDDLE))
        out = out + (y,)
    return out


@gluon.jit
def _signs(words, TILE: gl.constexpr, WIDTH: gl.constexpr):
    """The four registers of a tile's codes of one bit as -1/2 or 1/2."""
    ARRAY: gl.constexpr = _item(_field(WIDTH, 1, TILE), 0)
    BIT: gl.constexpr = _item(_field(WIDTH, 1, TILE), 1)
    out = ()
    for i in gl.static_range(4):
        out = out + ((((words[4 * ARRAY + i] << (15 - BIT)) & -2147450880) ^ -1207977984),)  # 0x80008000, 0xB800B800
    return out


@gluon.jit
def transposed(words):
    """Words of values' codes as keys' are: their 8 x 8 pieces transposed, each for all tiles that share them."""
    out = ()
    for i in gl.static_range(len(words) // 4):
        out = out + (
            transpose8(words[4 * i]),
            transpose8(words[4 * i + 2]),
            transpose8(words[4 * i + 1]),
            transpose8(words[4 * i + 3]),
        )
    return out


@gluon.jit
def operands(
    words, lane, TT: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, TABLE: gl.constexpr
):
    """Numbers of the codes of 16 tokens, tile by tile: first operands with tokens as rows. ``words``: as keys' are stored, or
    those of :func:`kvfold.kernels.fragments._codes.masked_words`."""
    made = ()
    if KIND == KIND_LEVELS:
        for word in gl.static_range(len(words) // 4):
            for half in gl.static_range(2):
                a, b = level_operands(words, (), word, half, TABLE)
                made = made + (a, b)
    out = ()
    for c in gl.static_range(WIDTH // 16):
        if KIND == KIND_LEVELS:
            x = made[_made_as(WIDTH, 2 * c + TT)]
        elif BITS == 1:
            x = _signs(words, 2 * c + TT, WIDTH)
        else:
            x = _centred(words, lane, 2 * c + TT, WIDTH, BITS)
        out = out + (x,)
    return out


# ---- codes of a table's rows ----------------------------------------------------------------------------------------


@gluon.constexpr_function
def rows_bytes(kind):
    """Bytes of the table's copies."""
    return 32768 if kind == ROWS else 0


@gluon.jit
def _rows_of(word, rows, lane, BITS: gl.constexpr):
    """16 adjacent channels of a token, eight words: of four codes of four channels, or (BITS 1) two of eight, which the
    lane's half of the word has.

    Words that are loaded together lie in registers beside each other, words of an operand in others: the compiler copies them
    for every product, but what it calculates once. So it is not to know that a grid of one dimension has no third.
    """
    unknown = gl.program_id(2)
    out = ()
    for i in gl.static_range(2 * BITS):
        weight = (lane * 0 + 128) << (8 * i)
        if BITS == 1:
            weight = weight << (lane % 2 * 16)
        row = load_shared(_weighted_bytes(word, weight, rows), 0, 4 // BITS)
        for j in gl.static_range(4 // BITS):
            out = out + (row[j] ^ unknown,)
    return out


@gluon.jit
def row_operands(words, rows, lane, FIRST: gl.constexpr, COUNT: gl.constexpr, PARTS: gl.constexpr, BITS: gl.constexpr):
    """Numbers of the codes of 32 tokens, COUNT parts of 64 channels of all PARTS: :func:`operands` of each 16 tokens, but that
    tile c of a part has channels 16 t + 4 c to 16 t + 4 c + 3 in lane t of every four.

    ``words``: a lane's codes of the parts of its four tokens; ``rows``: its address of the table.
    """
    out = ()
    for tt in gl.static_range(2):
        made = ()
        for part in gl.static_range(FIRST, FIRST + COUNT):
            near = _rows_of(words[2 * tt * PARTS + part], rows, lane, BITS)
            far = _rows_of(words[(2 * tt + 1) * PARTS + part], rows, lane, BITS)
            for c in gl.static_range(4):
                made = made + ((near[2 * c], far[2 * c], near[2 * c + 1], far[2 * c + 1]),)
        out = out + (made,)
    return out


# ---- codes in plain order -------------------------------------------------------------------------------------------


@gluon.constexpr_function
def is_plain(kind):
    return kind in (AFFINE, BALANCED)


@gluon.constexpr_function
def scale_bytes(kind, value):
    """Bytes of a unit's scales: of plain order's values zero-points follow them."""
    return 128 if is_plain(kind) and value else 64


@gluon.jit
def _load_words8(address, OFFSET: gl.constexpr):
    """16 adjacent fp16 numbers."""
    return load_words4(address, OFFSET) + load_words4(address, OFFSET + 16)


@gluon.jit
def _quarters(words):
    out = ()
    for i in gl.static_range(len(words)):
        out = out + (mul_half2(words[i], words[i] * 0 + _half_pair(QUARTER)),)
    return out


@gluon.jit
def plain_operands(codes, scale, more, lane, WIDTH: gl.constexpr, KIND: gl.constexpr, VALUE: gl.constexpr):
    """A quarter of the numbers of 32 tokens, in the order of :func:`row_operands`. Addresses, the same for all lanes:
    ``codes``; ``scale``: of values' scales and zero-points by token; ``more``: of keys' by channel, or of values' factors."""
    g = lane // 4
    t = lane % 4
    nothing = lane * 0
    by_token = ()
    zeros_by_token = ()
    if VALUE:
        for f in gl.static_range(4):
            s = load_half(scale + g * 2 + 16 * f)
            z = load_half(scale + g * 2 + (16 * f + 64)) * QUARTER
            by_token = by_token + (pack_half2(s, s, False),)
            zeros_by_token = zeros_by_token + (pack_half2(z, z, False),)
    low_tokens = ()
    high_tokens = ()
    for part in gl.static_range(WIDTH // 64):
        words = load_words4(codes + (g * WIDTH + t * 16), 64 * part)
        by_channel = ()
        zeros = ()
        if not VALUE:
            by_channel = _load_words8(more + t * 32, 128 * part)
            zeros = _quarters(_load_words8(more + t * 32, 128 * part + 2 * WIDTH))
        elif KIND == KIND_BALANCED:
            by_channel = _load_words8(more + t * 32, 128 * part)
        for c in gl.static_range(4):
            low = either_bytes(words[c], nothing + 0x64646464, "0x4140")
            high = either_bytes(words[c], nothing + 0x64646464, "0x4342")
            made = ()
            for f in gl.static_range(4):
                if VALUE:
                    a = _decoded(low, by_token[f], zeros_by_token[f], nothing, f, QUARTER)
                    b = _decoded(high, by_token[f], zeros_by_token[f], nothing, f, QUARTER)
                    if KIND == KIND_BALANCED:
                        a = bounded_half2(mul_half2(a, by_channel[2 * c]))
                        b = bounded_half2(mul_half2(b, by_channel[2 * c + 1]))
                else:
                    a = _decoded(low, by_channel[2 * c], zeros[2 * c], nothing, f, QUARTER)
                    b = _decoded(high, by_channel[2 * c + 1], zeros[2 * c + 1], nothing, f, QUARTER)
                made = made + (a, b)
            low_tokens = low_tokens + ((made[0], made[2], made[1], made[3]),)
            high_tokens = high_tokens + ((made[4], made[6], made[5], made[7]),)
    return low_tokens, high_tokens


# ---- 32 tokens ------------------------------------------------------------------------------------------------------


@gluon.jit
def _channels(mean, norm, MEAN: gl.constexpr, NORM: gl.constexpr):
    """Norms and means of eight channels of a page, from words with them."""
    means = ()
    norms = ()
    if MEAN:
        for j in gl.static_range(4):
            a, b = unpack_half2(mean[j])
            means = means + (a, b)
    if NORM:
        for j in gl.static_range(8):
            norms = norms + (exp2_fast(byte_number(norm[j // 4], j % 4) * (-1.0 / 48)),)
    return norms, means


@gluon.jit
def _finished(x, scale, norms, means, J: gl.constexpr, MEAN: gl.constexpr, NORM: gl.constexpr, BF16: gl.constexpr):
    """Channels 2J and 2J + 1 of a lane's eight, of one token."""
    a = x[0] * scale
    b = x[1] * scale
    if MEAN and NORM:
        a = gl.fma(a, norms[2 * J], means[2 * J])
        b = gl.fma(b, norms[2 * J + 1], means[2 * J + 1])
    elif MEAN:
        a = gl.fma(x[0], scale, means[2 * J])
        b = gl.fma(x[1], scale, means[2 * J + 1])
    elif NORM:
        a = a * norms[2 * J]
        b = b * norms[2 * J + 1]
    y = pack_half2(a, b, BF16)
    if not BF16:
        y = bounded_half2(y)
    return y


@gluon.jit
def turn_unit(
    matrix, rows, lane, codes, scale, mean, norm, out, D: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr,
    BITS: gl.constexpr, KIND: gl.constexpr, VALUE: gl.constexpr, MEAN: gl.constexpr, NORM: gl.constexpr,
    FACTOR: gl.constexpr, TABLE: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode 32 tokens. ``matrix``: a lane's address of the basis in shared memory; ``rows``: of the table, if there is one, or
    as :func:`plain_operands` says; the others, of the tokens' codes, scales, mean, norms and of where they go, are int64 and
    the same for all lanes."""
    g = lane // 4
    t = lane % 4
    words = ()
    if KIND == KIND_ROWS:
        at = codes + (g * (WIDTH // 8 * BITS) + t * BITS // 2 * 4)
        for r in gl.static_range(4):
            for part in gl.static_range(WIDTH // 64):
                words = words + (load_word(at + (WIDTH * BITS * r + 8 * BITS * part)),)
    elif not is_plain(KIND):
        for i in gl.static_range(code_bytes(WIDTH, BITS) // 512):
            words = words + load_words4(codes + lane * 16, 512 * i)
    scales = ()
    for r in gl.static_range(4):
        if is_plain(KIND) and VALUE:
            scales = scales + (1.0,)
        else:
            scales = scales + (load_half(scale + g * 2 + 16 * r) * FACTOR,)
    if VALUE and KIND != KIND_ROWS:
        words = transposed(words)
    if KIND == KIND_LEVELS:
        words = masked_words(words, WIDTH, BITS)
    x = ()
    if is_plain(KIND):
        x = plain_operands(codes, scale, rows, lane, WIDTH, KIND, VALUE)
    elif KIND != KIND_ROWS:
        x = (
            operands(words, lane, 0, WIDTH, BITS, KIND, TABLE),
            operands(words, lane, 1, WIDTH, BITS, KIND, TABLE),
        )
    to = out + g * (2 * D) + t * 16
    for i in gl.static_range(D // 32):
        if KIND == KIND_ROWS and 32 * i % BLOCK == 0:
            x = row_operands(words, rows, lane, 32 * i // BLOCK * (BLOCK // 64), BLOCK // 64, WIDTH // 64, BITS)
        if i:
            warp_sync(lane)  # or reads of channels to come are begun so early that registers do not suffice
        means = ()
        norms = ()
        if MEAN:
            means = load_words4(mean + t * 16, 64 * i)
        if NORM:
            norms = load_words2(norm + t * 8, 32 * i)
        accs = ()
        for _j in gl.static_range(8):
            accs = accs + (_zero4(lane),)
        for c in gl.static_range(BLOCK // 16):
            b = load_shared(matrix, 1024 * (i * (BLOCK // 16) + c), 4)
            b = b + load_shared(matrix, 1024 * (i * (BLOCK // 16) + c) + 512, 4)
            for tt in gl.static_range(2):
                if KIND == KIND_ROWS:
                    a = x[tt][c]
                else:
                    a = x[tt][32 * i // BLOCK * (BLOCK // 16) + c]
                for j in gl.static_range(4):
                    y = mma(a[0], a[1], a[2], a[3], b[2 * j], b[2 * j + 1], accs[4 * tt + j], False)
                    accs = _replace(accs, 4 * tt + j, y)
        norms, means = _channels(means, norms, MEAN, NORM)
        for r in gl.static_range(4):
            y = ()
            for j in gl.static_range(4):
                acc = accs[4 * (r // 2) + j]
                pair = (acc[2 * (r % 2)], acc[2 * (r % 2) + 1])
                y = y + (_finished(pair, scales[r], norms, means, j, MEAN, NORM, BF16),)
            store_words4(to + (8 * r * 2 * D + 64 * i), y[0], y[1], y[2], y[3])


@gluon.jit(do_not_specialize=["units", "count", "room", "pages", "first", "each", "wide"])
def turned_kernel(
    codes, scale, mean, norm, table, rows, out, units, count, room, pages, first, each, wide,
    D: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, VALUE: gl.constexpr,
    MEAN: gl.constexpr, NORM: gl.constexpr, FACTOR: gl.constexpr, TABLE: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Decode ``count`` units of 32 tokens, ``units`` of each KV head of a sequence, to ``out``, [heads, wide, D].

    From one KV head's storage to the next are ``room`` units and ``pages`` pages; a head's ``units`` begin with unit ``first``
    of its storage, which begins a page. ``table``: the basis as :func:`kvfold.kernels.long.rotated.matrix_of` makes it; it
    mixes blocks of BLOCK channels. ``rows``: of KIND_ROWS, as :func:`kvfold.kernels.stored.table_rows` makes them; of
    KIND_BALANCED keys' scales and zero-points, values' factors. A warp decodes ``each`` units, those of the grid's warps lie
    side by side.
    """
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    SIZE: gl.constexpr = 2 * D * BLOCK
    ROWS_SIZE: gl.constexpr = rows_bytes(KIND)
    memory = reserved(thread, SIZE + ROWS_SIZE)
    base = _dynamic_base(lane)
    program_sync(lane)
    source = table.to(gl.int64) + thread.to(gl.int64) * 16
    for i in gl.static_range(SIZE // (512 * W)):
        copy_async(base + thread * 16, source, lane * 0 + 16, lane * 0 + 1, 512 * W * i, 512 * W * i, False)
    if KIND == KIND_ROWS:
        leave_table(base + SIZE, thread, held_table(rows.to(gl.int64), thread, 4 // BITS), 0, 4 // BITS)
    copy_commit(lane)
    copy_wait(lane, 0)
    program_sync(lane)
    copy = base + SIZE
    if KIND == KIND_ROWS:
        copy = copy + lane % (8 * BITS) * (16 // BITS)
    CODE: gl.constexpr = code_bytes(WIDTH, BITS)
    SCALES: gl.constexpr = scale_bytes(KIND, VALUE)
    number = gl.program_id(0) * W + thread // 32
    for i in range(each):
        unit = gl.minimum(number * each + i, count - 1)
        head = unit // units
        block = head.to(gl.int64) * room + first + unit % units
        # a warp's units follow each other: the next one's codes and scales come nearer meanwhile
        ahead = gl.where(
            lane < CODE // 128, codes.to(gl.int64) + (block + 1) * CODE, scale.to(gl.int64) + (block + 1) * SCALES
        )
        ahead = ahead + gl.where(lane < CODE // 128, lane, 0) * 128
        prefetch(gl.where(unit % units + 1 < units, ahead, codes.to(gl.int64)))
        page = head.to(gl.int64) * pages + (first + unit % units) // 4
        more = copy
        if KIND == KIND_BALANCED:  # tiles are of a page
            more = rows.to(gl.int64) + block // 4 * (2 * WIDTH if VALUE else 4 * WIDTH)
        to = out.to(gl.int64) + (head.to(gl.int64) * wide + unit % units * 32) * (2 * D)
        turn_unit(
            base + lane * 16, more, lane, codes.to(gl.int64) + block * CODE, scale.to(gl.int64) + block * SCALES,
            mean.to(gl.int64) + page * (2 * D), norm.to(gl.int64) + page * D, to,
            D, WIDTH, BLOCK, BITS, KIND, VALUE, MEAN, NORM, FACTOR, TABLE, BF16,
        )  # fmt: skip
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
