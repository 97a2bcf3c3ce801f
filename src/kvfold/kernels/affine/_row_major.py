# mypy: ignore-errors
"""Decode attention over 2-bit affine groups in plain order, with keys before or after RoPE: the Gluon kernel of
:mod:`kvfold.kernels.affine.row_major`.

Plain order (:mod:`kvfold.formats.packing`) keeps 32 tokens of a channel in eight bytes: byte (r, d) has tokens r, r + 8,
r + 16 and r + 24 of channel d in its fields. A row of bytes then is what lanes of ``mma.m16n8k16`` want of either operand:

* Keys. Lane (g, t) reads channels 16 c + 4 t to 16 c + 4 t + 3 of row g: contraction slots 2t, 2t + 1, 2t + 8, 2t + 9 of
  channel tile c, for tokens g, g + 8, g + 16, g + 24. The query has its channels in the same order.
* Values. It reads channels 16 c + 2 g and the next one of rows 2t and 2t + 1: tokens 8 f + 2t, 8 f + 2t + 1 in field f.

One permutation puts two bytes apart, one mask takes a field of both: a subnormal fp16 pair that counts 4^f. Keys before RoPE
are decoded and rotated instead, by their place in the page of 128 tokens, and the query back by the page's position.
Head sizes are multiples of 16. Rows of bytes lie apart in shared memory so that lanes use all banks.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import _fetch
from kvfold.kernels.common._registers import ONES, _kind, _replace, _zero4
from kvfold.kernels.common._rope import page_angles
from kvfold.kernels.common._sizes import PAGE
from kvfold.kernels.common._softmax import _finish, _headroom, _lighten, _nothing, _probabilities, _rescale
from kvfold.kernels.common._warp import (
    as_float,
    as_int,
    copy_async,
    copy_commit,
    copy_wait,
    either_bytes,
    fma_half2,
    load_fragment,
    load_pair,
    load_shared,
    load_shared4f,
    load_shared_short,
    max_half2,
    mma,
    mul_half2,
    negative_half2,
    pack_half2,
    program_sync,
    shared_base,
    shuffle,
    shuffle_xor,
    store_shared2,
    unpack_half2,
    warp_sync,
)

EXPONENT = gl.constexpr(-1)
"""The largest element of a query is scaled to [2^-1, 1): times any scale of 2-bit groups it stays below fp16's largest."""


@gluon.constexpr_function
def pitch(dim):
    """Bytes from a row of codes to the next in shared memory: an odd multiple of 16."""
    return dim + 16 * (1 - dim // 16 % 2)


@gluon.constexpr_function
def places(dim, k_group, v_group, units):
    """Where keys' metadata, values' codes and metadata begin in a warp's stage, what follows, and its bytes with angles."""
    k_meta = units * 8 * pitch(dim)
    v_codes = k_meta + units * 4 * dim * (32 // k_group)
    v_meta = v_codes + units * 8 * pitch(dim)
    end = v_meta + units * 128 * (dim // v_group)
    return k_meta, v_codes, v_meta, end


@gluon.constexpr_function
def stage_bytes(dim, k_group, v_group, units, rotary):
    return places(dim, k_group, v_group, units)[3] + (512 if rotary else 0)  # angles of 64 pairs


@gluon.constexpr_function
def shared_bytes(dim, k_group, v_group, units, rotary, warps):
    """Bytes of shared memory of a program: stages and queries; and, later, sums."""
    return max(warps * stage_bytes(dim, k_group, v_group, units, rotary) + 16 * dim, warps * dim * 32)


@gluon.constexpr_function
def _pair_of(low, high):
    """Selector of two halves of two words as a pair."""
    return "0x" + ("76" if high else "54") + ("32" if low else "10")


@gluon.jit
def _fetch_codes(to, codes, lane, unit, valid, D: gl.constexpr, UNITS: gl.constexpr, TO: gl.constexpr):
    """Rows of codes of UNITS units, apart in shared memory; units from number ``valid`` on become zeros."""
    TOTAL: gl.constexpr = UNITS * 8 * D // 16
    source = codes + unit.to(gl.int64) * (8 * D)
    for i in gl.static_range((TOTAL + 31) // 32):
        chunk = lane + 32 * i
        row = chunk // (D // 16)
        at = to + row * (pitch(D) - D) + chunk * 16
        size = gl.where(row // 8 < valid, 16, 0)
        copy_async(at, source + chunk * 16, size, (chunk < TOTAL).to(gl.int32), TO, 0, TOTAL - 32 * i < 32)


@gluon.jit
def _fetch_keys(
    base, lane, codes, meta, unit, valid, D: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, AT: gl.constexpr
):
    ROW: gl.constexpr = 4 * D * (32 // GROUP)
    _fetch_codes(base, codes, lane, unit, valid, D, UNITS, 0)
    _fetch(base + lane * 16, meta + unit.to(gl.int64) * ROW + lane * 16, lane, valid, AT[0], ROW, UNITS, 32)


@gluon.jit
def _fetch_values(
    base, lane, codes, meta, unit, valid, D: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, AT: gl.constexpr
):
    ROW: gl.constexpr = 128 * (D // GROUP)
    _fetch_codes(base, codes, lane, unit, valid, D, UNITS, AT[1])
    _fetch(base + lane * 16, meta + unit.to(gl.int64) * ROW + lane * 16, lane, valid, AT[2], ROW, UNITS, 32)


@gluon.jit
def ask_rows(q_ptr, g, t, row0, column0, rows, D: gl.constexpr):
    """Channels 16 c + 4 t to 16 c + 4 t + 3 of the query of column g, as float32; zeros where there is none."""
    KIND: gl.constexpr = _kind(q_ptr.dtype.element_ty)
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    live = (column0 + g < rows).to(gl.int32)
    address = q_ptr.to(gl.int64) + ((row0 + column0 + g) * D + 4 * t) * SIZE
    raw = ()
    for c in gl.static_range(D // 16):
        for h in gl.static_range(2):
            low, high = load_pair(address + (16 * c + 2 * h) * SIZE, live, KIND)
            raw = raw + (low, high)
    return raw


@gluon.jit
def leave_rows(raw, far, t, factor, D: gl.constexpr, E: gl.constexpr):
    """Leave what :func:`ask_rows` gives in shared memory as B operands, the largest element of each query scaled to [2^E,
    2^(E + 1)): slots 2t, 2t + 1, 2t + 8, 2t + 9 of a tile are its channels 4t to 4t + 3. What turns products into ``factor``
    times the score, for a lane's two columns."""
    big = gl.abs(raw[0])
    for i in gl.static_range(1, D // 4):
        big = gl.maximum(big, gl.abs(raw[i]))
    big = gl.maximum(big, shuffle_xor(big, 1))
    big = gl.maximum(big, shuffle_xor(big, 2))
    exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
    down = as_float((254 + E - exponent) << 23)
    for c in gl.static_range(D // 16):
        store_shared2(
            far + 256 * c,
            pack_half2(raw[4 * c] * down, raw[4 * c + 1] * down, False),
            pack_half2(raw[4 * c + 2] * down, raw[4 * c + 3] * down, False),
        )  # all warps have the same
    up = as_float((exponent - E) << 23) * factor
    return shuffle(up, 8 * t), shuffle(up, 8 * t + 4)


@gluon.jit
def plain_rows(q_ptr, far, g, t, row0, column0, rows, factor, D: gl.constexpr, E: gl.constexpr):
    """:func:`leave_rows` of the queries of eight columns."""
    return leave_rows(ask_rows(q_ptr, g, t, row0, column0, rows, D), far, t, factor, D, E)


@gluon.jit
def _tile_operand(low, high, F: gl.constexpr):
    """Registers of tokens 8 F + g and 8 (F + 1) + g of a channel tile, from bytes put apart: their fields F and F + 1."""
    A: gl.constexpr = 3 << (2 * F)
    B: gl.constexpr = 12 << (2 * F)
    return low & (A * 0x10001), low & (B * 0x10001), high & (A * 0x10001), high & (B * 0x10001)


@gluon.jit
def plain_scores(
    base, lane, g, t, far, up, left, D: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Scores of a stage: accumulators of two token tiles of a unit. Scales multiply the query; zero-points of all groups of
    tokens of the stage are rows of one product."""
    PARTS: gl.constexpr = 32 // GROUP
    row = base + (g % (UNITS * PARTS)) * (4 * D) + t * 8
    acc = _zero4(lane)
    nothing = lane * 0
    for c in gl.static_range(D // 16):
        z = load_shared(row, META + 2 * D + 32 * c, 2)
        b = load_shared(far, 256 * c, 2)
        acc = mma(z[0], nothing, z[1], nothing, b[0], b[1], acc, False)
    zeros = (acc[0] * up[0], acc[1] * up[1])
    scores = ()
    for j in gl.static_range(UNITS):
        accs = (_zero4(lane), _zero4(lane))
        for c in gl.static_range(D // 16):
            word = load_shared(base + g * pitch(D) + t * 4, j * 8 * pitch(D) + 16 * c, 1)[0]
            low = either_bytes(word, nothing, "0x4140")
            high = either_bytes(word, nothing, "0x4342")
            b = load_shared(far, 256 * c, 2)
            for tt in gl.static_range(2):
                s = load_shared(base + t * 8, META + (j * PARTS + tt * (PARTS - 1)) * (4 * D) + 32 * c, 2)
                a = _tile_operand(low, high, 2 * tt)
                x = mma(a[0], a[1], a[2], a[3], mul_half2(b[0], s[0]), mul_half2(b[1], s[1]), accs[tt], False)
                accs = _replace(accs, tt, x)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        for tt in gl.static_range(2):
            source = 4 * (j * PARTS + tt * (PARTS - 1)) + t
            e0 = shuffle(zeros[0], source) + hidden
            e1 = shuffle(zeros[1], source) + hidden
            f0 = up[0] * 2.0 ** (24 - 4 * tt)
            f1 = up[1] * 2.0 ** (24 - 4 * tt)
            x = accs[tt]
            scores = scores + (
                (
                    gl.fma(x[0], f0, e0), gl.fma(x[1], f1, e1),
                    gl.fma(x[2], f0 * 0.25, e0), gl.fma(x[3], f1 * 0.25, e1),
                ),
            )  # fmt: skip
    return scores


@gluon.jit
def turned_queries(far, angles, t, D: gl.constexpr):
    """Queries rotated back by a page's position: operand pairs of channel tiles."""
    HALF: gl.constexpr = D // 32
    at = angles + t * 32
    first = ()
    second = ()
    for c in gl.static_range(HALF):
        for h in gl.static_range(2):
            turn = load_shared4f(at + (128 * c + 16 * h))
            a = unpack_half2(load_shared(far, 256 * c + 4 * h, 1)[0])
            b = unpack_half2(load_shared(far, 256 * (c + HALF) + 4 * h, 1)[0])
            first = first + (pack_half2(a[0] * turn[0] + b[0] * turn[1], a[1] * turn[2] + b[1] * turn[3], False),)
            second = second + (pack_half2(b[0] * turn[0] - a[0] * turn[1], b[1] * turn[2] - a[1] * turn[3], False),)
    return first + second


@gluon.constexpr_function
def _halves(x):
    """A pair of fp16 that is a power of two, or minus one."""
    import math

    sign, size = (0x8000, -x) if x < 0 else (0, x)
    word = (sign | (int(math.log2(size)) + 15) << 10) * 0x10001
    return word - (1 << 32) if word >> 31 else word


@gluon.jit
def _decoded(bytes, s, z, nothing, F: gl.constexpr, PART: gl.constexpr = 1.0):
    """A pair of numbers from bytes under the exponent of 1024: field F, scale, zero-point; the part PART of them, a power of
    two, if ``z`` is that of the zero-point."""
    number = bytes & ((0x6400 | (3 << (2 * F))) * 0x10001)
    code = fma_half2(number, nothing + _halves(PART * 0.25**F), nothing + _halves(-1024 * PART * 0.25**F))
    return fma_half2(code, s, z)


@gluon.jit
def _group(base, AT: gl.constexpr, D: gl.constexpr):
    """Scales and zero-points of a lane's channels of a tile."""
    return load_shared(base, AT, 2), load_shared(base, AT + 2 * D, 2)


@gluon.jit
def turned_scores(
    base, lane, g, t, q, table, up, left, D: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Scores of a stage whose keys are rotated as they are read. ``table``: a lane's address of half the cosines and sines of
    the stage's places in the page, as operands: [token tile, channel tile, which]."""
    PARTS: gl.constexpr = 32 // GROUP
    HALF: gl.constexpr = D // 32
    nothing = lane * 0
    scores = ()
    for j in gl.static_range(UNITS):
        accs = (_zero4(lane), _zero4(lane))
        for c in gl.static_range(HALF):
            at = base + g * pitch(D) + t * 4
            x = load_shared(at, j * 8 * pitch(D) + 16 * c, 1)[0]
            y = load_shared(at, j * 8 * pitch(D) + 16 * (c + HALF), 1)[0]
            k = (either_bytes(x, nothing + 0x64646464, "0x4140"), either_bytes(x, nothing + 0x64646464, "0x4342"))
            m = (either_bytes(y, nothing + 0x64646464, "0x4140"), either_bytes(y, nothing + 0x64646464, "0x4342"))
            for tt in gl.static_range(2):
                ks, kz = _group(base + t * 8, META + (j * PARTS + tt * (PARTS - 1)) * (4 * D) + 32 * c, D)
                ms, mz = _group(base + t * 8, META + (j * PARTS + tt * (PARTS - 1)) * (4 * D) + 32 * (c + HALF), D)
                cos = load_fragment(table, ((2 * j + tt) * HALF + c) * 1024)
                sin = load_fragment(table, ((2 * j + tt) * HALF + c) * 1024 + 512)
                first = ()
                second = ()
                for r in gl.static_range(4):
                    a = _decoded(k[r // 2], ks[r // 2], kz[r // 2], nothing, 2 * tt + r % 2)
                    b = _decoded(m[r // 2], ms[r // 2], mz[r // 2], nothing, 2 * tt + r % 2)
                    first = first + (fma_half2(a, cos[r], negative_half2(mul_half2(b, sin[r]))),)
                    second = second + (fma_half2(b, cos[r], mul_half2(a, sin[r])),)
                acc = mma(first[0], first[1], first[2], first[3], q[2 * c], q[2 * c + 1], accs[tt], False)
                b0 = q[2 * (c + HALF)]
                b1 = q[2 * (c + HALF) + 1]
                accs = _replace(accs, tt, mma(second[0], second[1], second[2], second[3], b0, b1, acc, False))
        hidden = gl.where(left > j, 0.0, float("-inf"))
        for tt in gl.static_range(2):
            x = accs[tt]
            scores = scores + (
                (
                    gl.fma(x[0], up[0] * 2.0, hidden), gl.fma(x[1], up[1] * 2.0, hidden),
                    gl.fma(x[2], up[0] * 2.0, hidden), gl.fma(x[3], up[1] * 2.0, hidden),
                ),
            )  # fmt: skip
    return scores


@gluon.jit
def plain_room(base, lane, UNITS: gl.constexpr, GROUPS: gl.constexpr, META: gl.constexpr):
    """log2 of the factor that a stage's probabilities may carry, where scales multiply them."""
    x = lane * 0
    for j in gl.static_range(UNITS):
        for i in gl.static_range((GROUPS + 1) // 2):
            at = gl.minimum(lane + 32 * i, 16 * GROUPS - 1)
            x = max_half2(x, load_shared(base + at * 4, META + 128 * GROUPS * j, 1)[0])
    return _headroom(x)


@gluon.jit
def _zero_pair(own, AT: gl.constexpr, NG: gl.constexpr):
    """Zero-points of a lane's two tokens, of its group."""
    return load_shared_short(own, AT) | (load_shared_short(own, AT + 2 * NG) << 16)


@gluon.constexpr_function
def _value_mask(f):
    return (3 << (2 * f)) * 0x10001


@gluon.jit
def _value_tile(base, acc, b, CODES: gl.constexpr, NEXT: gl.constexpr):
    """Sums of a channel tile, a unit further; NEXT bytes from a row of codes to the next."""
    x = load_shared_short(base, CODES)
    y = load_shared_short(base, CODES + NEXT)
    low = either_bytes(x, y, "0x3430")
    high = either_bytes(x, y, "0x3531")
    for tt in gl.static_range(2):
        acc = mma(
            low & _value_mask(2 * tt), high & _value_mask(2 * tt), low & _value_mask(2 * tt + 1),
            high & _value_mask(2 * tt + 1), b[2 * tt], b[2 * tt + 1], acc, False,
        )  # fmt: skip
    return acc


@gluon.jit
def plain_values(
    base, lane, g, t, p, out, side, D: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, CODES: gl.constexpr,
    META: gl.constexpr,
):  # fmt: skip
    """Sums of values in units of codes' subnormals. Rows of ``side``: zero-points of groups, then probabilities."""
    NG: gl.constexpr = D // GROUP
    PER: gl.constexpr = GROUP // 16
    one = lane * 0 + ONES
    own = base + (2 * t * NG + g % NG) * 2
    at = base + t * (2 * pitch(D)) + g * 2
    for j in gl.static_range(UNITS):
        w = ()
        s = ()
        for f in gl.static_range(4):
            w = w + (_lighten(p[4 * j + f], lane, 2 * f),)
            for i in gl.static_range(NG):
                s = s + load_shared(base + t * (4 * NG), META + 128 * NG * j + 16 * NG * f + 4 * i, 1)
        for tt in gl.static_range(2):
            z0 = _zero_pair(own, META + 128 * NG * j + 64 * NG + 32 * NG * tt, NG)
            z1 = _zero_pair(own, META + 128 * NG * j + 64 * NG + 32 * NG * tt + 16 * NG, NG)
            side = (mma(z0, one, z1, one, p[4 * j + 2 * tt], p[4 * j + 2 * tt + 1], side[0], False),)
        for group in gl.static_range(NG):
            b = ()
            for f in gl.static_range(4):
                scale = either_bytes(
                    s[NG * f + group // 2], s[NG * f + (NG + group) // 2], _pair_of(group % 2, (NG + group) % 2)
                )
                b = b + (mul_half2(w[f], scale),)
            for i in gl.static_range(PER):
                acc = _value_tile(
                    at, out[group * PER + i], b, CODES + j * 8 * pitch(D) + 16 * (group * PER + i), pitch(D)
                )
                out = _replace(out, group * PER + i, acc)
    return out, side


@gluon.jit
def attend_plain(
    base0, lane, warp, lo, hi, used, stored, units0, far, up, position, freq, table, D: gl.constexpr, K_GROUP: gl.constexpr,
    V_GROUP: gl.constexpr, UNITS: gl.constexpr, ROTARY: gl.constexpr,
):  # fmt: skip
    """Attention of eight query rows over pages ``lo`` to ``hi``, which the program's warps share; of ``used`` units the scores
    count. ``stored``: addresses of keys' codes and metadata, and values'; ``units0``: where the head's begin."""
    W: gl.constexpr = gl.num_warps()
    AT: gl.constexpr = places(D, K_GROUP, V_GROUP, UNITS)
    PER: gl.constexpr = PAGE // (32 * UNITS)
    g = lane // 4
    t = lane % 4
    each = (hi - lo + W - 1) // W
    first = (lo + warp * each) * (PER * UNITS)
    count = gl.minimum(hi - lo - warp * each, each) * PER
    base = base0 + warp * stage_bytes(D, K_GROUP, V_GROUP, UNITS, ROTARY)
    kc, km, vc, vm = stored
    left = gl.where(count > 0, used - first, 0)
    _fetch_keys(base, lane, kc, km, units0 + first, left, D, K_GROUP, UNITS, AT)
    copy_commit(lane)
    _fetch_values(base, lane, vc, vm, units0 + first, left, D, V_GROUP, UNITS, AT)
    copy_commit(lane)
    top, out, side = _nothing(lane, D // 16, 1)
    q = ()
    for _i in gl.static_range(D // 8 if ROTARY else 0):
        q = q + (lane * 0,)
    for i in range(each * PER):
        left = gl.where(i < count, used - (first + i * UNITS), 0)
        following = first + (i + 1) * UNITS
        next_left = gl.where(i + 1 < count, used - following, 0)
        copy_wait(lane, 1)  # keys of this stage
        if ROTARY:
            if i % PER == 0:
                page_angles(freq, base + AT[3], lane, position + (first + i * UNITS) * 32)
                q = turned_queries(far, base + AT[3], t, D)
            scores = turned_scores(
                base, lane, g, t, q, table + i % PER * (UNITS * 64 * D), up, left, D, K_GROUP, UNITS, AT[0]
            )  # fmt: skip
        else:
            scores = plain_scores(base, lane, g, t, far, up, left, D, K_GROUP, UNITS, AT[0])
        warp_sync(lane)
        _fetch_keys(base, lane, kc, km, units0 + following, next_left, D, K_GROUP, UNITS, AT)
        copy_commit(lane)
        copy_wait(lane, 1)  # values of this stage
        room = plain_room(base, lane, UNITS, D // V_GROUP, AT[2])
        top, factor, p = _probabilities(scores, top, room, 2 * UNITS, 1)
        out = _rescale(out, factor, D // 16, 1)
        side = _rescale(side, factor, 1, 1)
        out, side = plain_values(base, lane, g, t, p, out, side, D, V_GROUP, UNITS, AT[1], AT[2])
        warp_sync(lane)
        _fetch_values(base, lane, vc, vm, units0 + following, next_left, D, V_GROUP, UNITS, AT)
        copy_commit(lane)
    copy_wait(lane, 0)
    whole = ()
    for ct in gl.static_range(D // 16):
        source = 4 * (ct * 16 // V_GROUP) + t
        z0 = shuffle(side[0][0], source)
        z1 = shuffle(side[0][1], source)
        x = out[ct]
        f = 16777216.0
        whole = whole + ((gl.fma(x[0], f, z0), gl.fma(x[1], f, z1), gl.fma(x[2], f, z0), gl.fma(x[3], f, z1)),)
    program_sync(lane)
    return top, whole, side


@gluon.jit(
    do_not_specialize=["factor", "heads", "rows", "start", "units", "room", "splits", "part", "parts"],
    do_not_specialize_on_alignment=["row_blocks"],
)  # fmt: skip
def plain_kernel(
    q_ptr, k_codes, k_meta, v_codes, v_meta, packed_len_ptr, position_ptr, freq_ptr, table_ptr, part_out, part_top, part_sum,
    factor, heads, rows, row_blocks, start, units, room, splits, part, parts,
    D: gl.constexpr, K_GROUP: gl.constexpr, V_GROUP: gl.constexpr, UNITS: gl.constexpr, ROTARY: gl.constexpr,
):  # fmt: skip
    """Attention of eight query rows of one KV head of one sequence over one split of a span's packed tokens.

    Grid and arguments are those of :func:`kvfold.kernels.affine._tiles.tiles_kernel`, without a bias.
    """
    W: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    STAGE: gl.constexpr = stage_bytes(D, K_GROUP, V_GROUP, UNITS, ROTARY)
    base0 = shared_base(lane, shared_bytes(D, K_GROUP, V_GROUP, UNITS, ROTARY, W))
    head = gl.program_id(0) // row_blocks
    column0 = gl.program_id(0) % row_blocks * 8
    batch = head // heads
    split = gl.program_id(1)
    used = gl.minimum((gl.load(packed_len_ptr + batch) - start).to(gl.int32) // 32, units)
    pages = (gl.maximum(used, 0) + 3) // 4
    lo = (pages.to(gl.int64) * split // splits).to(gl.int32)
    hi = (pages.to(gl.int64) * (split + 1) // splits).to(gl.int32)
    row0 = head.to(gl.int64) * rows
    far = base0 + W * STAGE + lane * 8
    up = plain_rows(q_ptr, far, lane // 4, lane % 4, row0, column0, rows, factor, D, 8 if ROTARY else EXPONENT)
    program_sync(lane)
    position = lane * 0
    if ROTARY:
        position = (gl.load(position_ptr + batch) + start).to(gl.int32)
    top, out, side = attend_plain(
        base0, lane, warp, lo, hi, used,
        (k_codes.to(gl.int64), k_meta.to(gl.int64), v_codes.to(gl.int64), v_meta.to(gl.int64)),
        head.to(gl.int64) * room, far, up, position, freq_ptr, table_ptr.to(gl.int64) + lane * 16,
        D, K_GROUP, V_GROUP, UNITS, ROTARY,
    )  # fmt: skip
    slot0 = head.to(gl.int64) * parts + (part + split)
    _finish(base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, 2, D, 1, 0)
