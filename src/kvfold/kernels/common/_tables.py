# mypy: ignore-errors
"""What kernels with tables of codes in shared memory share: that memory, tables, rotation, queries that are rotated back."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._stream import load_word, load_words2, load_words4
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    copy_async,
    fma_half2,
    load_shared,
    mma,
    mul_half2,
    pack_half2,
    product_less_half2,
    shuffle_xor,
    store_shared1,
    store_shared4,
)


@gluon.jit
def _allocated(thread, BYTES: gl.constexpr):
    """Shared memory, of which the compiler is to know that it is used."""
    memory = gl.allocate_shared_memory(gl.int32, [BYTES // 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if BYTES // 4 >= thread.shape[0]:
        memory.slice(0, thread.shape[0]).store(thread)
    else:
        memory.store(gl.arange(0, BYTES // 4, thread.type.layout))
    return memory


@gluon.jit
def reserved(thread, BYTES: gl.constexpr):
    """A program's shared memory, BYTES of it, a multiple of 1,024: an allocation for each power of two, as they must be."""
    memory = ()
    for i in gl.static_range(8):
        if BYTES // 1024 >> i & 1:
            memory = memory + (_allocated(thread, 1024 << i),)
    return memory


@gluon.jit
def _dynamic_base(lane):
    """Address of the program's shared memory, the one allocation of which begins there."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _funnel(low, high, start):
    """32 bits from bit ``start`` on of two words."""
    return gl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, start], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _swapped(x, selector):
    """Bytes of x as ``selector`` says."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [x, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _weighted_bytes(word, weight, more):
    """Sum of the bytes of ``word`` times those of ``weight``, and ``more``."""
    return gl.inline_asm_elementwise(
        "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [word, weight, more], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _shuffled(x, source):
    """Word ``x`` of lane ``source``."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=r,r,r",
        [x, source],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _turn(angle):
    """Cosine and sine of angles up to 2^21, errors near 3e-5."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 n, r; mul.rn.f32 n, $2, 0f3E22F983; cvt.rni.f32.f32 n, n; neg.f32 n, n;
        fma.rn.f32 r, n, 0f40C90000, $2; fma.rn.f32 r, n, 0f3AFDAA22, r;
        cos.approx.ftz.f32 $0, r; sin.approx.ftz.f32 $1, r; }""",
        "=&f,=&f,f",
        [angle],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unit_place(unit, active, where):
    """A unit's number in the storage, and bytes to where that begins. ``where``: None, or a table of pages of four units and
    the bytes from a page to the next; what is not ``active`` may lie beyond the table."""
    if where is None:
        return unit.to(gl.int64), unit.to(gl.int64) * 0
    else:
        real = unit * active
        page = gl.load(where[0] + real // 4).to(gl.int64)
        return (real % 4).to(gl.int64), page * where[1]


@gluon.jit
def _fetch_rows(base, source, thread, BYTES: gl.constexpr, W: gl.constexpr):
    """Begin to copy tables; by all threads of the program."""
    whole = thread * 0 + 16
    for at in range(0, BYTES, 512 * W):
        here = (thread * 16 + at < BYTES).to(gl.int32)
        copy_async(base + thread * 16 + at, source + thread * 16 + at, whole, here, 0, 0, True)


@gluon.jit
def held_table(source, thread, WORDS: gl.constexpr):
    """A thread's share of a table's 256 rows of 1, 2 or 4 words, in registers; nobody writes them meanwhile."""
    W: gl.constexpr = gl.num_warps()
    held = ()
    for i in gl.static_range(8 // W):
        at = source + (thread + 32 * W * i) * (4 * WORDS)
        if WORDS == 1:
            held = held + (load_word(at),)
        elif WORDS == 2:
            held = held + load_words2(at, 0)
        else:
            held = held + load_words4(at, 0)
    return held


@gluon.jit
def leave_table(base, thread, held, FIRST: gl.constexpr, N: gl.constexpr):
    """Rows of N words that threads hold, from their register FIRST on, to shared memory, as often as 128 bytes have room for
    them: so a program reads 1 to 4 KB of a table, not 32."""
    W: gl.constexpr = gl.num_warps()
    for i in gl.static_range(8 // W):
        to = base + 4096 * W * i + thread * 128
        for c in gl.static_range(8):  # lanes side by side write to other banks
            store_shared4(
                to + (thread + c) % 8 * 16, as_float(held[FIRST + N * i]), as_float(held[FIRST + N * i + 1 % N]),
                as_float(held[FIRST + N * i + 2 % N]), as_float(held[FIRST + N * i + 3 % N]),
            )  # fmt: skip


@gluon.jit
def _pairs_of_queries(q, rows, column0, lane, pair, NEXT: gl.constexpr, C: gl.constexpr, weights):
    """Of C query rows the channels of a lane's two pairs, ``pair`` and the one NEXT further, a row's largest channel scaled
    to [1, 2); and what they have been divided by.

    ``q``: pointer to a KV head's first row, and None; or to its first query head of a sequence's first token in a step, and
    elements from a token to the next, tokens of each query head, and those that there are. ``weights``: None, or what the pairs
    are multiplied with first.
    """
    raw = ()
    ups = ()
    for i in gl.static_range(C):
        row = column0 + i
        inside = (lane * 0 + row) < rows
        if q[1] is None:
            at = q[0] + row.to(gl.int64) * 128 + pair
        else:
            token = row % q[1][1]
            at = q[0] + token.to(gl.int64) * q[1][0] + (row // q[1][1]) * 128 + pair
            inside = inside & (token < q[1][2])
        a0 = gl.load(at, mask=inside, other=0.0).to(gl.float32)
        a1 = gl.load(at + NEXT, mask=inside, other=0.0).to(gl.float32)
        b0 = gl.load(at + 64, mask=inside, other=0.0).to(gl.float32)
        b1 = gl.load(at + (64 + NEXT), mask=inside, other=0.0).to(gl.float32)
        if weights is not None:
            a0 *= weights[0]
            b0 *= weights[0]
            a1 *= weights[1]
            b1 *= weights[1]
        big = gl.maximum(gl.maximum(gl.abs(a0), gl.abs(a1)), gl.maximum(gl.abs(b0), gl.abs(b1)))
        for j in gl.static_range(5):
            big = gl.maximum(big, shuffle_xor(big, 1 << j))
        exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
        down = as_float((254 - exponent) << 23)
        raw = raw + (a0 * down, a1 * down, b0 * down, b1 * down)
        ups = ups + (as_float(exponent << 23),)
    return raw, ups


@gluon.constexpr_function
def query_pitch(columns):
    """Bytes from a turned query to the next. Two tokens of a quarter of a warp read two queries, which lie in other banks where
    there is room for that."""
    return 320 if columns <= 4 else 272


@gluon.jit
def unit_queries(to, raw, freq0, freq1, gain, position, lane, FAR: gl.constexpr, C: gl.constexpr):
    """Leave the queries, rotated back by ``position``, in shared memory."""
    PITCH: gl.constexpr = query_pitch(C)
    angle = position.to(gl.float32)
    c0, s0 = _turn(angle * freq0)
    c1, s1 = _turn(angle * freq1)
    c0 *= gain[0]
    s0 *= gain[0]
    c1 *= gain[1]
    s1 *= gain[1]
    for i in gl.static_range(C):
        a0 = raw[4 * i]
        a1 = raw[4 * i + 1]
        b0 = raw[4 * i + 2]
        b1 = raw[4 * i + 3]
        x0 = a0 * c0 + b0 * s0
        x1 = a1 * c1 + b1 * s1
        y0 = b0 * c0 - a0 * s0
        y1 = b1 * c1 - a1 * s1
        store_shared1(to + i * PITCH, pack_half2(x0, x1, False))
        store_shared1(to + (i * PITCH + FAR), pack_half2(y0, y1, False))


@gluon.jit
def _chosen(values, index):
    """Element ``index`` of a tuple, lane by lane."""
    out = values[0]
    for i in gl.static_range(1, len(values)):
        out = gl.where(index == i, values[i], out)
    return out


@gluon.jit
def fetch_turns(turns, turns_ptr, thread, lane, W: gl.constexpr, APART: gl.constexpr = False):
    """Begin to copy cosines and sines: a token's 64 cosines, then its sines. APART: halves of both, 64 bytes, change places in
    tokens 4 to 7 of every eight, so that lanes that read a token and the fourth one after it never meet in a bank."""
    for i in gl.static_range((512 + 32 * W - 1) // (32 * W)):
        piece = thread + i * (32 * W)
        source = turns_ptr.to(gl.int64) + (piece // 8 % 2 * 4096 + piece // 16 * 128 + piece % 8 * 16)
        place = piece
        if APART:
            place = piece ^ (piece // 64 % 2 * 4)
        copy_async(turns + place * 16, source, lane * 0 + 16, (piece < 512).to(gl.int32), 0, 0, True)


@gluon.jit
def shared_turns(address):
    """Of a token 8 words of cosines and 8 of sines of the lane's pairs, 64 bytes apart. ``address``: of the first of them; 128
    bytes whose halves have changed places are read as they were."""
    other = address ^ 64
    return (
        load_shared(address, 0, 4)
        + load_shared(other, 0, 4)
        + load_shared(address, 128, 4)
        + load_shared(other, 128, 4)
    )


@gluon.jit
def rotated_keys(x, turns):
    """Keys of one token of every lane, rotated by its place in the unit."""
    real = ()
    imaginary = ()
    for i in gl.static_range(8):
        a = x[i]
        b = x[i + 8]
        real = real + (product_less_half2(a, turns[i], mul_half2(b, turns[i + 8])),)
        imaginary = imaginary + (fma_half2(b, turns[i], mul_half2(a, turns[i + 8])),)
    return real + imaginary


@gluon.jit
def tile_scores(x, y, q, acc):
    """Products of a tile's keys with the queries."""
    for c in gl.static_range(8):
        acc = mma(x[2 * c], y[2 * c], x[2 * c + 1], y[2 * c + 1], q[2 * c], q[2 * c + 1], acc, False)
    return acc


@gluon.jit
def mean_of_keys(source, pair, NEXT: gl.constexpr):
    """Of a lane's two pairs both channels of a head's mean, over a power of two, so that products with queries are numbers of
    fp16, and that power. ``source``: pointer to 128 numbers."""
    some = ()
    for i in gl.static_range(4):
        some = some + (gl.load(source + pair + (NEXT * (i % 2) + 64 * (i // 2))).to(gl.float32),)
    big = gl.maximum(gl.maximum(gl.abs(some[0]), gl.abs(some[1])), gl.maximum(gl.abs(some[2]), gl.abs(some[3])))
    for j in gl.static_range(5):
        big = gl.maximum(big, shuffle_xor(big, 1 << j))
    exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
    down = as_float((254 - exponent) << 23)
    return (some[0] * down, some[1] * down, some[2] * down, some[3] * down, as_float(exponent << 23))
