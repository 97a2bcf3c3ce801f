"""Decode attention over packed affine groups: the Gluon kernel. :mod:`kvfold.kernels.decode` launches it.

A warp computes ``S^T = K q^T`` (tokens x query rows) and ``O^T = V^T P^T`` (channels x query rows) with
``mma.m16n8k16``, so that packed codes are the first operand and up to eight query rows of a KV head share what is read.

* Codes: a masked field of a stored word is a pair of fp16 subnormals ``code * 2^(k - 24)``: one instruction for two
  elements. The weights ``2^-k`` go into the query or into the output, ``2^24`` into a fp32 factor.
* Scales: on the query (or the probability) where groups run across the contraction, on the accumulator where they run
  along it. Zero-points are a rank-one term, one small MMA for a whole stage.
* Memory: each warp has its own stage of shared memory, filled by asynchronous copies. Keys of the next stage fly while
  values are multiplied, and values while keys are.
* Queries are scaled by a power of two per row, so that neither large norms nor large scales leave fp16.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._warp import (
    abs_halves,
    add_half2,
    as_float,
    as_int,
    copy_async,
    copy_commit,
    copy_wait_1,
    copy_wait_all,
    either,
    exp2_fast,
    high_halves,
    launch_dependents,
    load_global4,
    load_pair,
    load_shared,
    load_shared4f,
    low_halves,
    mma,
    mma_tf32,
    mul_half2,
    negative_half,
    odd_bytes,
    pack_half2,
    program_sync,
    shared_base,
    shuffle,
    shuffle_xor,
    store_shared2,
    store_shared4,
    times,
    transpose8,
    unpack_half2,
    wait_for_previous,
    warp_sync,
    without,
)

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1.0e30)  # running maximum before any token: finite, so that differences are never NaN
SIGN_BITS = gl.constexpr(-2147450880)  # 0x80008000
ONES = gl.constexpr(0x3C003C00)  # two fp16 ones
ONES_BF16 = gl.constexpr(0x3F803F80)


# ---- where the codes of a tile lie (kvfold.formats.packing) ----------------------------------------------------------


@gluon.constexpr_function
def code_bytes(dim, bits):
    """Bytes of the codes of 32 tokens."""
    return 4 * dim * bits


@gluon.constexpr_function
def meta_bytes(dim, axis_channel, mode, group):
    """Bytes of (scales and zero-points, or scales; sign words) of a row of groups."""
    groups = 32 * dim // group if axis_channel else dim
    return (4 * groups, 0) if mode == 0 else (2 * groups, 4 * groups)


@gluon.constexpr_function
def _main(bits):
    """Bits of the plane that holds the low bits."""
    return 2 if bits == 3 else bits


@gluon.constexpr_function
def _arrays(dim, bits):
    """256-word arrays in a plane; a lane's 8 words of one are 16 bytes."""
    return max(1, dim * bits // 128)


@gluon.constexpr_function
def _field(dim, bits, tile):
    """Array, and first bit, of the codes of a tile in a plane."""
    if dim * bits < 128:  # half an array: a tile takes two fields, the second one for lanes 16 to 31
        return 0, 2 * tile * bits
    arrays = dim * bits // 128
    return tile % arrays, tile // arrays * bits


@gluon.constexpr_function
def weight(dim, bits, channel_tile):
    """k: the codes of this channel tile count 2^k times (first token tile)."""
    return _field(dim, _main(bits), 2 * channel_tile)[1] % 8


@gluon.constexpr_function
def step(dim, bits):
    """The codes of the second token tile count 2^(k + step) times."""
    return _field(dim, _main(bits), 1)[1] % 8 - weight(dim, bits, 0)


@gluon.constexpr_function
def _high_shift(dim, tile):
    """3 bits: how far to the left the 1-bit plane's field goes to sit above the 2-bit plane's."""
    low, high = _field(dim, 2, tile)[1], _field(dim, 1, tile)[1]
    assert low // 8 == high // 8
    return low % 8 + 2 - high % 8


@gluon.constexpr_function
def _kind(dtype):
    """Element types that queries come in."""
    return {"fp16": 0, "bf16": 1, "fp32": 2}[dtype.name]


@gluon.constexpr_function
def _item(pair, i):
    return pair[i]


@gluon.constexpr_function
def _pair_mask(bits, k):
    return (((1 << bits) - 1) << k) * 0x10001


@gluon.jit
def _load_plane(base, lane, OFFSET: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    if D * BITS < 128:
        raw = load_shared(base + (lane % 16) * 16, OFFSET, 4)
        half = lane // 16 * BITS
        return (raw[0] >> half, raw[1] >> half, raw[2] >> half, raw[3] >> half)
    else:
        words = ()
        for a in gl.static_range(D * BITS // 128):
            words = words + load_shared(base + lane * 16, OFFSET + 512 * a, 4)
        return words


@gluon.jit
def _load_codes(base, lane, OFFSET: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """A lane's words of the codes of 32 tokens."""
    if BITS == 3:
        low = _load_plane(base, lane, OFFSET, D, 2)
        return low + _load_plane(base, lane, OFFSET + 8 * D, D, 1)
    else:
        return _load_plane(base, lane, OFFSET, D, BITS)


@gluon.jit
def _operand(words, TILE: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """The four registers of a tile's codes as subnormal fp16 pairs."""
    MAIN: gl.constexpr = _main(BITS)
    ARRAY: gl.constexpr = _item(_field(D, MAIN, TILE), 0)
    BIT: gl.constexpr = _item(_field(D, MAIN, TILE), 1)
    HIGH: gl.constexpr = _item(_field(D, 1, TILE), 0) + _arrays(D, 2)
    LEFT: gl.constexpr = _high_shift(D, TILE)
    out = ()
    for i in gl.static_range(4):
        x = words[4 * ARRAY + i]
        if BIT >= 8:
            x = x >> 8
        x = x & _pair_mask(MAIN, BIT % 8)
        if BITS == 3:
            y = words[4 * HIGH + i]
            if BIT >= 8:
                y = y >> (8 - LEFT)
            else:
                y = y << LEFT
            x = x | (y & _pair_mask(1, BIT % 8 + 2))
        out = out + (x,)
    return out


@gluon.constexpr_function
def _kept(dim, bits, tiles, j):
    """Which sign bits of a lane stay in the word that is shifted for register j of a group's fragments (two tiles).

    A lane finds its signs at bits 3, 7, 11, 15 of each half. Shifted so that bit 3 + 4j comes to be the operand's sign, those
    of registers j + 1 and j + 2 (mod 4) lie on bits 3 and 7: they may stay where no code lies there. One choice for all
    registers of a group lets them share a word.
    """
    low = [_field(dim, _main(bits), tile)[1] % 8 for tile in tiles]
    on3 = any(k <= 3 < k + bits for k in low)
    on7 = any(k <= 7 < k + bits for k in low)
    if on3 and on7:
        kept = {j}
    elif on3:
        kept = {j, (j + 2) % 4}
    elif on7:
        kept = {j, j ^ 1}
    else:
        kept = {0, 1, 2, 3}
    mask = sum(1 << (3 + 4 * i) for i in kept) * 0x10001
    return mask - (1 << 32) if mask >> 31 else mask


@gluon.constexpr_function
def _signed_mask(bits, k):
    return (((((1 << bits) - 1) << k) | 0x8000) * 0x10001) - (1 << 32)


@gluon.jit
def _bytes(words, D: gl.constexpr, BITS: gl.constexpr):
    """Words of codes cut in two, so that no code lies on an operand's sign bit; 3 bits stay as they are."""
    if BITS == 3:
        return words
    else:
        low = ()
        high = ()
        for i in gl.static_range(len(words)):
            low = low + (words[i] & 0x00FF00FF,)
            high = high + (odd_bytes(words[i]),)
        return low + high


@gluon.jit
def _counting(signs, asym, KEPT: gl.constexpr, HYBRID: gl.constexpr):
    if HYBRID:
        return without(signs, asym, KEPT)
    else:
        return signs & KEPT


@gluon.jit
def _signed_register(
    cut, signs, asym, I: gl.constexpr, J: gl.constexpr, TILE: gl.constexpr, OTHER: gl.constexpr, D: gl.constexpr,
    BITS: gl.constexpr, HYBRID: gl.constexpr,
):  # fmt: skip
    ARRAY: gl.constexpr = _item(_field(D, BITS, TILE), 0)
    BIT: gl.constexpr = _item(_field(D, BITS, TILE), 1)
    HALF: gl.constexpr = 4 * _arrays(D, BITS) if BIT >= 8 else 0
    s = _counting(signs, asym, _kept(D, BITS, (TILE, OTHER), J), HYBRID)
    return either(cut[HALF + 4 * ARRAY + I], s << (12 - 4 * J), _signed_mask(BITS, BIT % 8))


@gluon.jit
def _signed(
    cut, signs, asym, TILE: gl.constexpr, OTHER: gl.constexpr, KS: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr,
    HYBRID: gl.constexpr,
):  # fmt: skip
    """As :func:`_operand`, with signs: ``signs`` are the words of the group's two rows, bits shifted left by 3 - t; those
    where ``asym`` is all ones do not count. TILE is number KS of the group's two tiles."""
    out = ()
    if BITS == 3:
        plain = _operand(cut, TILE, D, BITS)
        for i in gl.static_range(4):
            s = _counting(signs[i % 2] << (12 - 4 * (2 * KS + i // 2)), asym[i % 2], SIGN_BITS, HYBRID)
            out = out + (plain[i] | s,)
    else:
        for i in gl.static_range(4):
            out = out + (
                _signed_register(cut, signs[i % 2], asym[i % 2], i, 2 * KS + i // 2, TILE, OTHER, D, BITS, HYBRID),
            )
    return out


@gluon.jit
def _own_zero(base, mine, own, AUX: gl.constexpr, META: gl.constexpr, AT: gl.constexpr):
    """The fp32 zero-point of group AT + own of a hybrid row, 0 if it has none."""
    zero = load_shared(base + own * 4, AUX + 4 * AT, 1)[0]
    pair = load_shared(mine + own // 2 * 4, META + 2 * AT, 1)[0]
    return gl.where(times(pair, 1 << (16 - own % 2 * 16)) < 0, zero, 0)


@gluon.jit
def _two(x, INDEX: gl.constexpr):
    """Registers 2 INDEX and 2 INDEX + 1: an operand's pair."""
    return x[2 * INDEX], x[2 * INDEX + 1]


@gluon.jit
def _query(q, INDEX: gl.constexpr, FAR: gl.constexpr):
    """A query's operand pair: from registers, or (FAR) from shared memory, where ``q`` is the lane's address."""
    if FAR:
        return load_shared(q, 256 * INDEX, 2)
    else:
        return q[2 * INDEX], q[2 * INDEX + 1]


@gluon.jit
def _unit_half2(lane, EXPONENT: gl.constexpr):
    """Two fp16 2^EXPONENT."""
    return lane * 0 + ((15 + EXPONENT) << 10) * 0x10001


@gluon.jit
def _zero4(lane):
    z = (lane * 0).to(gl.float32)
    return (z, z, z, z)


@gluon.jit
def _replace(x, I: gl.constexpr, value):
    out = ()
    for i in gl.static_range(len(x)):
        if i == I:
            out = out + (value,)
        else:
            out = out + (x[i],)
    return out


@gluon.jit
def _axpy4(low, high, x, y, FIRST: gl.constexpr):
    """y + (low, low, high, high) x."""
    if FIRST:
        return (low * x[0], low * x[1], high * x[2], high * x[3])
    else:
        return (
            gl.fma(low, x[0], y[0]),
            gl.fma(low, x[1], y[1]),
            gl.fma(high, x[2], y[2]),
            gl.fma(high, x[3], y[3]),
        )


# ---- keys: scores of the tokens of a stage --------------------------------------------------------------------------


@gluon.constexpr_function
def _has_weight(dim, bits, k):
    return any(weight(dim, bits, c) == k for c in range(dim // 16))


@gluon.jit
def _key_sums(q, lane, n: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """Sum of the query over channel tiles FIRST to FIRST + COUNT, in every row of an accumulator (columns: query rows)."""
    CT: gl.constexpr = D // 16
    acc = _zero4(lane)
    for i in gl.static_range(COUNT):
        # the query carries 2^-k; its ones get 2^k
        one = _unit_half2(lane, weight(D, BITS, FIRST + i))
        b0, b1 = _two(q, n * CT + FIRST + i)
        acc = mma(one, one, one, one, b0, b1, acc, False)
    return acc


@gluon.jit
def _scores_operand(
    base, lane, q, code_factor, zero_factor, extra, D: gl.constexpr, BITS: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr, CENTER: gl.constexpr, FAR: gl.constexpr = False,
):  # fmt: skip
    """Groups of tokens: the scale multiplies the query; zero-points of all blocks of the stage are rows of one MMA.

    Scaled queries round to fp16, and codes are not centred: the error times the mean code would shift all scores of a block.
    With CENTER that part is taken back (row sums of the rounded query) and added exactly (scales as rows, like zero-points);
    it halves the error, and takes some ten registers.
    """
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    row = base + t * 16
    mine = row + (g % NB) * (4 * D)
    MEAN: gl.constexpr = ((1 << BITS) - 1) / 2
    z = ()
    u = ()
    for f in gl.static_range(CT // 2):
        z = z + load_shared(mine, META + 2 * D + 64 * f, 4)
        if CENTER:
            u = u + load_shared(mine, META + 64 * f, 4)
    nothing = lane * 0
    zeros = ()
    for n in gl.static_range(NT):
        z0 = _zero4(lane)[0]
        z1 = z0
        for k in gl.static_range(8):
            if _has_weight(D, BITS, k):
                acc = _zero4(lane)
                both = _zero4(lane)
                for ct in gl.static_range(CT):
                    if weight(D, BITS, ct) == k:
                        b0, b1 = _query(q, n * CT + ct, FAR)
                        acc = mma(z[2 * ct], nothing, z[2 * ct + 1], nothing, b0, b1, acc, False)
                        if CENTER:
                            both = mma(u[2 * ct], nothing, u[2 * ct + 1], nothing, b0, b1, both, False)
                z0 = gl.fma(gl.fma(both[0], MEAN, acc[0]), float(1 << k), z0)
                z1 = gl.fma(gl.fma(both[1], MEAN, acc[1]), float(1 << k), z1)
        zeros = zeros + (z0 * zero_factor[2 * n], z1 * zero_factor[2 * n + 1])
    scores = ()
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        s = ()
        for f in gl.static_range(CT // 2):
            s = s + load_shared(row, META + j * 4 * D + 64 * f, 4)
        rounded = ()
        for _n in gl.static_range(NT):
            rounded = rounded + (_zero4(lane),)
        accs = ()
        for _i in gl.static_range(2 * NT):
            accs = accs + (_zero4(lane),)
        for ct in gl.static_range(CT):
            a = _operand(words, 2 * ct, D, BITS)
            b = _operand(words, 2 * ct + 1, D, BITS)
            for n in gl.static_range(NT):
                b0, b1 = _query(q, n * CT + ct, FAR)
                b0 = mul_half2(b0, s[2 * ct])
                b1 = mul_half2(b1, s[2 * ct + 1])
                if CENTER:
                    one = _unit_half2(lane, weight(D, BITS, ct))
                    rounded = _replace(rounded, n, mma(one, one, one, one, b0, b1, rounded[n], False))
                accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], b0, b1, accs[n], False))
                accs = _replace(accs, NT + n, mma(b[0], b[1], b[2], b[3], b0, b1, accs[NT + n], False))
        for tt in gl.static_range(2):
            for n in gl.static_range(NT):
                if NB == 1:
                    z0 = zeros[2 * n]
                    z1 = zeros[2 * n + 1]
                else:
                    z0 = shuffle(zeros[2 * n], 4 * j + t)
                    z1 = shuffle(zeros[2 * n + 1], 4 * j + t)
                acc = accs[tt * NT + n]
                f0 = code_factor[2 * n] * (1.0 / (1 << (tt * step(D, BITS))))
                f1 = code_factor[2 * n + 1] * (1.0 / (1 << (tt * step(D, BITS))))
                e0 = z0 + extra[(j * NT + n) * 2]
                e1 = z1 + extra[(j * NT + n) * 2 + 1]
                if CENTER:
                    e0 = gl.fma(rounded[n][0], zero_factor[2 * n] * -MEAN, e0)
                    e1 = gl.fma(rounded[n][1], zero_factor[2 * n + 1] * -MEAN, e1)
                scores = scores + (
                    (gl.fma(acc[0], f0, e0), gl.fma(acc[1], f1, e1), gl.fma(acc[2], f0, e0), gl.fma(acc[3], f1, e1)),
                )
    return scores


@gluon.jit
def _scores_accumulator(
    base, lane, q, qsum, code_factor, extra, D: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr,
    GROUP: gl.constexpr, NT: gl.constexpr, NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr, AUX: gl.constexpr,
    FAR: gl.constexpr = False,
):  # fmt: skip
    """Groups of channels: each group has its own accumulator, which the scale multiplies."""
    CT: gl.constexpr = D // 16
    NG: gl.constexpr = D // GROUP
    PER: gl.constexpr = GROUP // 16
    SCALES: gl.constexpr = 64 * NG  # bytes of the scales of 32 tokens
    ROW: gl.constexpr = 2 * SCALES if MODE == 0 else SCALES
    g = lane // 4
    t = lane % 4
    mine = base + g * (8 * NG)
    row = base + g * (16 * NG)
    own = t % (NG if NG < 4 else 4)
    lift = 1 << (3 - t)  # a multiplication shifts by it elsewhere than where masks are applied
    scores = ()
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        sw = load_shared(mine, META + j * ROW, 2 * NG)  # [token tile, row half, group] as pairs
        s = ()
        for i in gl.static_range(2 * NG):
            if MODE == 2:
                s = s + unpack_half2(abs_halves(sw[i]))
            else:
                s = s + unpack_half2(sw[i])
        signs = ()
        asym = ()
        cut = words
        if MODE > 0:
            cut = _bytes(words, D, BITS)
            aux = load_shared(row, AUX + j * 2 * SCALES, 4 * NG)
            for i in gl.static_range(4 * NG):
                signs = signs + (times(aux[i], lift),)
                if MODE == 2:
                    asym = asym + (negative_half(sw[i // 2], i % 2),)
                else:
                    asym = asym + (aux[i],)
        for tt in gl.static_range(2):
            sums = ()
            for _n in gl.static_range(NT):
                sums = sums + (_zero4(lane),)
            if MODE == 2:
                # columns of the product with zero-points are groups: a lane holds its own group's
                for c in gl.static_range((NG + 3) // 4):
                    z0 = _own_zero(row, mine, own, AUX + j * 2 * SCALES, META + j * ROW, 2 * tt * NG + 4 * c)
                    z1 = _own_zero(row, mine, own, AUX + j * 2 * SCALES, META + j * ROW, (2 * tt + 1) * NG + 4 * c)
                    for n in gl.static_range(NT):
                        b0 = qsum[(n * ((NG + 3) // 4) + c) * 2]
                        b1 = qsum[(n * ((NG + 3) // 4) + c) * 2 + 1]
                        if tt * step(D, BITS) > 0:
                            b0 = as_int(as_float(b0) * (1 << (tt * step(D, BITS))))
                            b1 = as_int(as_float(b1) * (1 << (tt * step(D, BITS))))
                        sums = _replace(sums, n, mma_tf32(z0, z1, z0, z1, b0, b1, sums[n]))
            for group in gl.static_range(NG):
                accs = ()
                for _n in gl.static_range(NT):
                    accs = accs + (_zero4(lane),)
                for ks in gl.static_range(PER):
                    if MODE > 0:
                        a = _signed(
                            cut, (signs[2 * tt * NG + group], signs[(2 * tt + 1) * NG + group]),
                            (asym[2 * tt * NG + group], asym[(2 * tt + 1) * NG + group]),
                            2 * (group * PER + ks) + tt, 2 * (group * PER + 1 - ks) + tt, ks, D, BITS, MODE == 2,
                        )  # fmt: skip
                    else:
                        a = _operand(words, 2 * (group * PER + ks) + tt, D, BITS)
                    for n in gl.static_range(NT):
                        b0, b1 = _query(q, n * CT + group * PER + ks, FAR)
                        accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], b0, b1, accs[n], False))
                for n in gl.static_range(NT):
                    low = s[2 * tt * NG + group]
                    high = s[(2 * tt + 1) * NG + group]
                    sums = _replace(sums, n, _axpy4(low, high, accs[n], sums[n], group == 0 and MODE != 2))
            # code sums count in units of 2^(24 - step)
            unit = 1.0 / (1 << (24 - tt * step(D, BITS)))
            if MODE == 0:
                if NG == 1:
                    zw = load_shared(mine, META + j * ROW + SCALES + 4 * tt, 1)
                    z0 = zw[0] & 0xFFFF
                    z1 = (zw[0] >> 16) & 0xFFFF
                else:
                    column = mine + (t % (NG // 2)) * 4
                    z0 = load_shared(column, META + j * ROW + SCALES + 4 * NG * tt, 1)[0]
                    z1 = load_shared(column, META + j * ROW + SCALES + 4 * NG * tt + 2 * NG, 1)[0]
                for n in gl.static_range(NT):
                    z = mma(z0, z1, z0, z1, qsum[2 * n], qsum[2 * n + 1], _zero4(lane), False)
                    x = sums[n]
                    sums = _replace(
                        sums,
                        n,
                        (
                            gl.fma(z[0], unit, x[0]),
                            gl.fma(z[1], unit, x[1]),
                            gl.fma(z[2], unit, x[2]),
                            gl.fma(z[3], unit, x[3]),
                        ),
                    )
            for n in gl.static_range(NT):
                f0 = code_factor[2 * n] * (1.0 / (1 << (tt * step(D, BITS))))
                f1 = code_factor[2 * n + 1] * (1.0 / (1 << (tt * step(D, BITS))))
                e0 = extra[(j * NT + n) * 2]
                e1 = extra[(j * NT + n) * 2 + 1]
                x = sums[n]
                scores = scores + (
                    (gl.fma(x[0], f0, e0), gl.fma(x[1], f1, e1), gl.fma(x[2], f0, e0), gl.fma(x[3], f1, e1)),
                )
    return scores


@gluon.constexpr_function
def query_exponent(bits, on_operand):
    """The largest element of a query is scaled to [2^e, 2^(e + 1)): as large as the product with any scale allows.

    Scales that multiply queries are at most 2 * 65504 / (2^bits - 1), and fp16 themselves.
    """
    largest = min(65504, 2 * 65504 / ((1 << bits) - 1))
    e = 3
    while on_operand and 2.0 ** (e + 1) * largest > 65504:
        e -= 1
    return e


@gluon.jit
def _queries(
    q_ptr, lane, g, t, row0, column0, rows, factor, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """Queries as B operands: scaled per row (see :func:`query_exponent`), times 2^-k of the channel tile.

    Also what turns products into ``factor`` times the score: for codes, and for zero-points.
    """
    CT: gl.constexpr = D // 16
    KIND: gl.constexpr = _kind(q_ptr.dtype.element_ty)
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    E: gl.constexpr = query_exponent(BITS, AXIS == 0)
    q = ()
    code_factor = ()
    zero_factor = ()
    for n in gl.static_range(NT):
        row = column0 + n * 8 + g
        live = (row < rows).to(gl.int32)
        address = q_ptr.to(gl.int64) + ((row0 + row) * D + 2 * t) * SIZE
        raw = ()
        big = _zero4(lane)[0]
        for i in gl.static_range(2 * CT):
            low, high = load_pair(address + 8 * i * SIZE, live, KIND)
            raw = raw + (low, high)
            big = gl.maximum(big, gl.maximum(gl.abs(low), gl.abs(high)))
        big = gl.maximum(big, shuffle_xor(big, 1))
        big = gl.maximum(big, shuffle_xor(big, 2))
        exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 252)
        down = as_float((254 + E - exponent) << 23)  # 2^E / 2^floor(log2(big))
        up = as_float((exponent - E) << 23) * factor
        for ct in gl.static_range(CT):
            f = down * (1.0 / (1 << weight(D, BITS, ct)))
            q = q + (
                pack_half2(raw[4 * ct] * f, raw[4 * ct + 1] * f, False),
                pack_half2(raw[4 * ct + 2] * f, raw[4 * ct + 3] * f, False),
            )
        for e in gl.static_range(2):
            z = shuffle(up, 8 * t + 4 * e)
            zero_factor = zero_factor + (z,)
            code_factor = code_factor + (z * 16777216.0,)
    return q, code_factor, zero_factor


@gluon.jit
def _query_sums(
    q, lane, g, t, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """Sums of the query over groups, in two parts, as B operands; nothing where no zero-point needs them."""
    qsum = ()
    if AXIS == 1 and MODE == 2:
        NG2: gl.constexpr = D // GROUP
        for n in gl.static_range(NT):
            for c in gl.static_range((NG2 + 3) // 4):
                x = _zero4(lane)[0]
                for i in gl.static_range(4 if NG2 > 4 else NG2):
                    s = _key_sums(q, lane, n, (4 * c + i) * (GROUP // 16), GROUP // 16, D, BITS)
                    even = shuffle(s[0], g // 2)
                    odd = shuffle(s[1], g // 2)
                    x = gl.where(t == i, gl.where(g % 2 == 0, even, odd), x)
                x = x * (1.0 / (1 << 24))  # the unit of code sums
                high = as_int(x) & -8192
                qsum = qsum + (high, as_int(x - as_float(high)))
    if AXIS == 1 and MODE == 0:
        NG: gl.constexpr = D // GROUP
        for n in gl.static_range(NT):
            high = lane * 0
            low = lane * 0
            for group in gl.static_range(NG):
                s = _key_sums(q, lane, n, group * (GROUP // 16), GROUP // 16, D, BITS)
                h = pack_half2(s[0], s[1], False)
                back = unpack_half2(h)
                r = transpose8(pack_half2(s[0] - back[0], s[1] - back[1], False))
                h = transpose8(h)  # the sum of query row g, twice
                if group % 2 == 0:
                    h = h & 0xFFFF
                    r = r & 0xFFFF
                else:
                    h = h & -65536
                    r = r & -65536
                high = gl.where(t == group // 2, high | h, high)
                low = gl.where(t == group // 2, low | r, low)
            qsum = qsum + (high, low)
    return qsum


# ---- softmax --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def lift(bits, axis):
    """log2 of the factor that probabilities carry, so that small ones are not subnormal: 4 where scales multiply sums, and
    as much of it as the product with any scale allows where they multiply probabilities (groups of channels, ``axis`` 1)."""
    return query_exponent(bits, axis == 1) + 1


@gluon.jit
def _softmax(scores, top, COUNT: gl.constexpr, NT: gl.constexpr, BF16: gl.constexpr, LIFT: gl.constexpr):
    """Running maximum, factor of what was summed before, and 2^LIFT exp2(score - maximum) as B operands.

    Scores are a tuple of COUNT * NT accumulators.
    """
    new_top = ()
    factor = ()
    shift = ()
    for n in gl.static_range(NT):
        for e in gl.static_range(2):
            m = gl.maximum(scores[n][e], scores[n][e + 2])
            for i in gl.static_range(1, COUNT):
                m = gl.maximum(m, gl.maximum(scores[i * NT + n][e], scores[i * NT + n][e + 2]))
            m = gl.maximum(m, shuffle_xor(m, 4))
            m = gl.maximum(m, shuffle_xor(m, 8))
            m = gl.maximum(m, shuffle_xor(m, 16))
            m = gl.maximum(m, top[2 * n + e])
            new_top = new_top + (m,)
            factor = factor + (exp2_fast(top[2 * n + e] - m),)
            shift = shift + (LIFT - m,)
    p = ()
    for i in gl.static_range(COUNT):
        for n in gl.static_range(NT):
            x = scores[i * NT + n]
            low = pack_half2(exp2_fast(x[0] + shift[2 * n]), exp2_fast(x[1] + shift[2 * n + 1]), BF16)
            high = pack_half2(exp2_fast(x[2] + shift[2 * n]), exp2_fast(x[3] + shift[2 * n + 1]), BF16)
            p = p + (transpose8(low), transpose8(high))
    return new_top, factor, p


@gluon.jit
def _rescale(accs, factor, COUNT: gl.constexpr, NT: gl.constexpr):
    """Accumulators [NT, COUNT] times the factor of their query rows."""
    out = ()
    for n in gl.static_range(NT):
        for c in gl.static_range(COUNT):
            x = accs[n * COUNT + c]
            out = out + (
                (x[0] * factor[2 * n], x[1] * factor[2 * n + 1], x[2] * factor[2 * n], x[3] * factor[2 * n + 1]),
            )
    return out


# ---- values ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _lighten(p, lane, BY: gl.constexpr):
    """fp16 pairs times 2^-BY."""
    if BY == 0:
        return p
    else:
        return mul_half2(p, _unit_half2(lane, -BY))


@gluon.jit
def _value_row(mine, zero, AT: gl.constexpr, NG: gl.constexpr):
    """Scales [column half, group] of this lane's pairs of tokens; zero-points of group g of both halves."""
    s = load_shared(mine, AT, NG) + load_shared(mine, AT + 16 * NG, NG)
    return s, load_shared(zero, AT + 64 * NG, 1)[0], load_shared(zero, AT + 80 * NG, 1)[0]


@gluon.jit
def _values_operand(
    base, lane, p, out, side, D: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """Groups of channels: the scale multiplies the probability. Rows of ``side``: zero-point sums, then row sums."""
    CT: gl.constexpr = D // 16
    NG: gl.constexpr = D // GROUP
    PER: gl.constexpr = GROUP // 16
    ROW: gl.constexpr = 128 * NG
    g = lane // 4
    t = lane % 4
    mine = base + t * (4 * NG)
    zero = mine + (g % NG) * 4
    one = lane * 0 + ONES
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        for tt in gl.static_range(2):
            s, z0, z1 = _value_row(mine, zero, META + j * ROW + 32 * NG * tt, NG)
            for n in gl.static_range(NT):
                p0, p1 = _two(p, (2 * j + tt) * NT + n)
                side = _replace(side, n, mma(z0, one, z1, one, p0, p1, side[n], False))
            for group in gl.static_range(NG):
                b = ()
                for n in gl.static_range(NT):
                    p0 = _lighten(p[((2 * j + tt) * NT + n) * 2], lane, tt * step(D, BITS))
                    p1 = _lighten(p[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * step(D, BITS))
                    b = b + (mul_half2(p0, s[group]), mul_half2(p1, s[NG + group]))
                for i in gl.static_range(PER):
                    a = _operand(words, 2 * (group * PER + i) + tt, D, BITS)
                    for n in gl.static_range(NT):
                        acc = out[n * CT + group * PER + i]
                        acc = mma(a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1], acc, False)
                        out = _replace(out, n * CT + group * PER + i, acc)
    return out, side


@gluon.jit
def _join(before, factor, n: gl.constexpr, x, FIRST: gl.constexpr):
    """Sums so far, times the factor of their query rows if this is the FIRST that joins them in a stage, and ``x``."""
    if FIRST:
        f0 = factor[2 * n]
        f1 = factor[2 * n + 1]
        return (
            gl.fma(before[0], f0, x[0]),
            gl.fma(before[1], f1, x[1]),
            gl.fma(before[2], f0, x[2]),
            gl.fma(before[3], f1, x[3]),
        )
    else:
        return (before[0] + x[0], before[1] + x[1], before[2] + x[2], before[3] + x[3])


@gluon.jit
def _values_operand_apart(
    base, lane, p, factor, out, side, D: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """As :func:`_values_operand`, but sums of two blocks begin at zero and join those before, times ``factor``, in fp32.

    Tensor cores cut off what they add to an accumulator instead of rounding it. Over thousands of tokens that shows, for sums
    of codes are much larger than what zero-points leave of them.
    """
    CT: gl.constexpr = D // 16
    NG: gl.constexpr = D // GROUP
    PER: gl.constexpr = GROUP // 16
    ROW: gl.constexpr = 128 * NG
    g = lane // 4
    t = lane % 4
    mine = base + t * (4 * NG)
    zero = mine + (g % NG) * 4
    one = lane * 0 + ONES
    for j0 in gl.static_range(0, NB, 2):
        words = ()
        for j in gl.static_range(j0, min(j0 + 2, NB)):
            words = words + (_load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS),)
        for n in gl.static_range(NT):
            sums = _zero4(lane)
            for j in gl.static_range(j0, min(j0 + 2, NB)):
                for tt in gl.static_range(2):
                    z0 = load_shared(zero, META + j * ROW + 32 * NG * tt + 64 * NG, 1)[0]
                    z1 = load_shared(zero, META + j * ROW + 32 * NG * tt + 80 * NG, 1)[0]
                    p0, p1 = _two(p, (2 * j + tt) * NT + n)
                    sums = mma(z0, one, z1, one, p0, p1, sums, False)
            side = _replace(side, n, _join(side[n], factor, n, sums, j0 == 0))
        for group in gl.static_range(NG):
            b = ()
            for j in gl.static_range(j0, min(j0 + 2, NB)):
                for tt in gl.static_range(2):
                    s0 = load_shared(mine, META + j * ROW + 32 * NG * tt + 4 * group, 1)[0]
                    s1 = load_shared(mine, META + j * ROW + 32 * NG * tt + 16 * NG + 4 * group, 1)[0]
                    for n in gl.static_range(NT):
                        p0 = _lighten(p[((2 * j + tt) * NT + n) * 2], lane, tt * step(D, BITS))
                        p1 = _lighten(p[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * step(D, BITS))
                        b = b + (mul_half2(p0, s0), mul_half2(p1, s1))
            for i in gl.static_range(PER):
                accs = ()
                for _n in gl.static_range(NT):
                    accs = accs + (_zero4(lane),)
                for j in gl.static_range(j0, min(j0 + 2, NB)):
                    for tt in gl.static_range(2):
                        a = _operand(words[j - j0], 2 * (group * PER + i) + tt, D, BITS)
                        for n in gl.static_range(NT):
                            b0, b1 = _two(b, (2 * (j - j0) + tt) * NT + n)
                            accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], b0, b1, accs[n], False))
                for n in gl.static_range(NT):
                    x = _join(out[n * CT + group * PER + i], factor, n, accs[n], j0 == 0)
                    out = _replace(out, n * CT + group * PER + i, x)
    return out, side


@gluon.jit
def _values_accumulator(
    base, lane, p, out, side, D: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr, AUX: gl.constexpr,
):  # fmt: skip
    """Groups of 32 tokens: each block has its own accumulator, which the scale multiplies."""
    CT: gl.constexpr = D // 16
    ROW: gl.constexpr = 4 * D if MODE == 0 else 2 * D
    g = lane // 4
    t = lane % 4
    mine = base + g * (D // 4)
    one = lane * 0 + ONES
    lift = 1 << (3 - t)
    zw = ()
    parts = ()
    totals = ()
    for j in gl.static_range(NB):
        words = _load_codes(base, lane, CODES + j * code_bytes(D, BITS), D, BITS)
        sw = load_shared(mine, META + j * ROW, CT)  # pairs: rows g and g + 8 of a channel tile
        if MODE == 0:
            zw = zw + load_shared(mine, META + j * ROW + 2 * D, CT)
        aux = ()
        cut = words
        if MODE > 0:
            aux = load_shared(base + g * (D // 2), AUX + j * 4 * D, 2 * CT)
            cut = _bytes(words, D, BITS)
        for n in gl.static_range(NT):
            p0, p1 = _two(p, 2 * j * NT + n)
            p2, p3 = _two(p, (2 * j + 1) * NT + n)
            block = mma(one, one, one, one, p0, p1, _zero4(lane), False)
            block = mma(one, one, one, one, p2, p3, block, False)
            if MODE == 2:
                totals = totals + (block,)
            x = side[n]
            side = _replace(side, n, (x[0], x[1], x[2] + block[0], x[3] + block[1]))
            if MODE == 0:  # what this lane's columns of the zero-point MMA hold
                parts = parts + (add_half2(add_half2(p0, p1), add_half2(p2, p3)),)
        for ct in gl.static_range(CT):
            signs = ()
            asym = ()
            if MODE == 2:
                s = unpack_half2(abs_halves(sw[ct]))
                asym = (negative_half(sw[ct], 0), negative_half(sw[ct], 1))
            else:
                s = unpack_half2(sw[ct])
                asym = (lane, lane)
            if MODE > 0:
                signs = (times(aux[2 * ct], lift), times(aux[2 * ct + 1], lift))
            s0 = s[0]
            s1 = s[1]
            if MODE == 0:
                s0 = s0 * (1 << (24 - weight(D, BITS, ct)))
                s1 = s1 * (1 << (24 - weight(D, BITS, ct)))
            accs = ()
            for _n in gl.static_range(NT):
                accs = accs + (_zero4(lane),)
            for tt in gl.static_range(2):
                if MODE > 0:
                    a = _signed(cut, signs, asym, 2 * ct + tt, 2 * ct + 1 - tt, tt, D, BITS, MODE == 2)
                else:
                    a = _operand(words, 2 * ct + tt, D, BITS)
                for n in gl.static_range(NT):
                    p0 = _lighten(p[((2 * j + tt) * NT + n) * 2], lane, tt * step(D, BITS))
                    p1 = _lighten(p[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * step(D, BITS))
                    accs = _replace(accs, n, mma(a[0], a[1], a[2], a[3], p0, p1, accs[n], False))
            for n in gl.static_range(NT):
                x = _axpy4(s0, s1, accs[n], out[n * CT + ct], False)
                out = _replace(out, n * CT + ct, x)
    if MODE == 2:
        # columns of the product with zero-points are blocks: a lane holds its own block's; their sums of probabilities come
        # in two parts, for the product reads 10 bits of each
        own = t % NB
        sw = load_shared(mine + own * ROW, META, CT)
        aux = load_shared(base + g * (D // 2) + own * (4 * D), AUX, 2 * CT)
        b = ()
        for n in gl.static_range(NT):
            total = _zero4(lane)[0]
            for j in gl.static_range(NB):
                x = totals[j * NT + n]
                even = shuffle(x[0], g // 2)
                odd = shuffle(x[1], g // 2)
                total = gl.where(t == j, gl.where(g % 2 == 0, even, odd), total)
            high = as_int(total) & -8192
            b = b + (as_float(high), total - as_float(high))
        for ct in gl.static_range(CT):
            z0 = aux[2 * ct] & negative_half(sw[ct], 0)
            z1 = aux[2 * ct + 1] & negative_half(sw[ct], 1)
            for n in gl.static_range(NT):
                unit = 1.0 / (1 << (24 - weight(D, BITS, ct)))
                b0 = as_int(b[2 * n] * unit)
                b1 = as_int(b[2 * n + 1] * unit)
                acc = mma_tf32(z0, z1, z0, z1, b0, b1, out[n * CT + ct])
                out = _replace(out, n * CT + ct, acc)
    if MODE == 0:
        # contraction of the zero-point MMA: lane t holds its own tokens' sums, columns (pair, half) are the blocks
        nothing = lane * 0
        for n in gl.static_range(NT):
            b = ()
            for i in gl.static_range(2):
                if 2 * i + 1 < NB:
                    x = parts[2 * i * NT + n]
                    y = parts[(2 * i + 1) * NT + n]
                    b = b + (add_half2(low_halves(x, y), high_halves(x, y)),)
                elif 2 * i < NB:
                    x = parts[2 * i * NT + n]
                    b = b + (add_half2(low_halves(x, nothing), high_halves(x, nothing)),)
                else:
                    b = b + (nothing,)
            for ct in gl.static_range(CT):
                a = ()
                for i in gl.static_range(2):
                    if 2 * i + 1 < NB:
                        x = zw[2 * i * CT + ct]
                        y = zw[(2 * i + 1) * CT + ct]
                        a = a + (low_halves(x, y), high_halves(x, y))
                    elif 2 * i < NB:
                        x = zw[2 * i * CT + ct]
                        a = a + (low_halves(x, nothing), high_halves(x, nothing))
                    else:
                        a = a + (nothing, nothing)
                acc = mma(a[0], a[1], a[2], a[3], b[0], b[1], out[n * CT + ct], False)
                out = _replace(out, n * CT + ct, acc)
    return out, side


@gluon.jit
def _whole_values(
    out, side, lane, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """Sums of values from what the loop over stages leaves: weights of codes taken out, zero-points added."""
    CT: gl.constexpr = D // 16
    t = lane % 4
    if AXIS == 0 and MODE > 0:  # values still carry 2^(k - 24)
        full = ()
        for n in gl.static_range(NT):
            for ct in gl.static_range(CT):
                f = float(1 << (24 - weight(D, BITS, ct)))
                x = out[n * CT + ct]
                full = full + ((x[0] * f, x[1] * f, x[2] * f, x[3] * f),)
        out = full
    if AXIS == 1:  # codes still carry 2^(k - 24); zero-point sums lie in the rows of their group
        full = ()
        for n in gl.static_range(NT):
            for ct in gl.static_range(CT):
                f = float(1 << (24 - weight(D, BITS, ct)))
                source = 4 * (ct * 16 // GROUP) + t
                z0 = shuffle(side[n][0], source)
                z1 = shuffle(side[n][1], source)
                x = out[n * CT + ct]
                full = full + ((gl.fma(x[0], f, z0), gl.fma(x[1], f, z1), gl.fma(x[2], f, z0), gl.fma(x[3], f, z1)),)
        out = full
    return out


# ---- from global memory to a warp's stage ---------------------------------------------------------------------------


@gluon.jit
def _fetch(to, source, copier, valid, TO: gl.constexpr, BLOCK: gl.constexpr, NB: gl.constexpr, COPIERS: gl.constexpr):
    """NB adjacent blocks of BLOCK bytes, by COPIERS threads; those from number ``valid`` on become zeros."""
    TOTAL: gl.constexpr = BLOCK * NB
    STEP: gl.constexpr = 16 * COPIERS
    for i in gl.static_range((TOTAL + STEP - 1) // STEP):
        if BLOCK % STEP == 0:
            block = copier * 0 + i * STEP // BLOCK
        else:
            block = (copier * 16 + i * STEP) // BLOCK
        size = gl.where(block < valid, 16, 0)
        active = (copier * 16 < TOTAL - i * STEP).to(gl.int32)
        copy_async(to, source, size, active, TO + STEP * i, STEP * i, TOTAL - i * STEP < STEP)


@gluon.jit
def _fetch_stage(
    base, copier, codes, meta, aux, unit, first, valid, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr,
    MODE: gl.constexpr, GROUP: gl.constexpr, NB: gl.constexpr, TO: gl.constexpr, COPIERS: gl.constexpr,
):  # fmt: skip
    """One operand of a stage: blocks ``first`` to ``first + NB`` of the region that starts at block ``unit``."""
    CODE: gl.constexpr = code_bytes(D, BITS)
    ROW: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 0)
    WORDS: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 1)
    to = base + copier * 16
    at = (unit + first).to(gl.int64)
    _fetch(to, codes + at * CODE + copier * 16, copier, valid, TO, CODE, NB, COPIERS)
    if AXIS == 0 and GROUP > 32:
        for j in gl.static_range(NB):
            row = (unit + (first + j)) // (GROUP // 32)
            source = meta + row.to(gl.int64) * ROW + copier * 16
            _fetch(to, source, copier, valid - j, TO + NB * CODE + j * ROW, ROW, 1, COPIERS)
    else:
        _fetch(to, meta + at * ROW + copier * 16, copier, valid, TO + NB * CODE, ROW, NB, COPIERS)
    if MODE > 0:
        _fetch(to, aux + at * WORDS + copier * 16, copier, valid, TO + NB * (CODE + ROW), WORDS, NB, COPIERS)


# ---- full-precision tokens ------------------------------------------------------------------------------------------


@gluon.jit
def _window_slot(slot, sink_len, packed_len, recent_len, sinks, slots):
    """Of a slot of [sink | ring]: whether it holds a token, and the token's position in its sequence."""
    ring = slot - sinks
    age = ring - packed_len % slots
    age = gl.where(age < 0, age + slots, age)
    in_sink = slot < sinks
    valid = gl.where(in_sink, slot < sink_len, (age < recent_len) & (ring < slots))
    position = gl.where(in_sink, slot, sink_len + packed_len + age)
    return valid, position


@gluon.jit
def _row_address(sink, ring, slot, head, sinks, slots, bytes_per_row):
    ring_slot = gl.minimum(gl.maximum(slot - sinks, 0), slots - 1)
    sink_slot = gl.maximum(gl.minimum(slot, sinks - 1), 0)
    in_ring = ring + (head.to(gl.int64) * slots + ring_slot) * bytes_per_row
    in_sink = sink + (head.to(gl.int64) * sinks + sink_slot) * bytes_per_row
    return gl.where(slot < sinks, in_sink, in_ring)


@gluon.jit
def _nothing(lane, CT: gl.constexpr, NT: gl.constexpr):
    """Running maxima, sums of values and of probabilities before any token."""
    top = ()
    out = ()
    side = ()
    for _n in gl.static_range(NT):
        top = top + (_zero4(lane)[0] + LOWEST, _zero4(lane)[0] + LOWEST)
        side = side + (_zero4(lane),)
        for _c in gl.static_range(CT):
            out = out + (_zero4(lane),)
    return top, out, side


@gluon.jit
def _dense(
    lane, warp, tile, head, q_ptr, row0, column0, rows, tokens, sink_k, sink_v, ring_k, ring_v, sinks, slots,
    sink_len, packed_len, recent_len, factor, top, before, before_side, D: gl.constexpr, NT: gl.constexpr, BF16: gl.constexpr,
    LIFT: gl.constexpr,
):  # fmt: skip
    """16 slots of the sink and recent windows per warp, after those of which the sums are given."""
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    first = (tile * gl.num_warps() + warp) * 16
    total = sink_len + packed_len + recent_len
    valid0, position0 = _window_slot(first + g, sink_len, packed_len, recent_len, sinks, slots)
    valid1, position1 = _window_slot(first + g + 8, sink_len, packed_len, recent_len, sinks, slots)
    k0 = _row_address(sink_k, ring_k, first + g, head, sinks, slots, 2 * D) + t * 16
    k1 = _row_address(sink_k, ring_k, first + g + 8, head, sinks, slots, 2 * D) + t * 16
    k = ()
    for c in gl.static_range(D // 32):
        k = k + load_global4(k0 + 64 * c, valid0.to(gl.int32)) + load_global4(k1 + 64 * c, valid1.to(gl.int32))
    # values: rows of the fragment are channels in the order 16 g + (2 tile + half), so that a lane reads 32 adjacent bytes
    v = ()
    for i in gl.static_range(4):
        slot = first + 2 * t + i % 2 + 8 * (i // 2)
        valid, _position = _window_slot(slot, sink_len, packed_len, recent_len, sinks, slots)
        address = _row_address(sink_v, ring_v, slot, head, sinks, slots, 2 * D) + g * (D // 4)
        words = ()
        for c in gl.static_range(D // 64):
            words = words + load_global4(address + 16 * c, valid.to(gl.int32))
        v = v + (words,)
    # contraction order is free as long as both operands agree: a lane takes 8 adjacent channels of every 32
    KIND: gl.constexpr = _kind(q_ptr.dtype.element_ty)
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    q = ()
    for n in gl.static_range(NT):
        row = column0 + n * 8 + g
        live = (row < rows).to(gl.int32)
        address = q_ptr.to(gl.int64) + ((row0 + row) * D + t * 8) * SIZE
        for c in gl.static_range(D // 32):
            if KIND == (1 if BF16 else 0):
                q = q + load_global4(address + 32 * c * SIZE, live)
            else:
                for i in gl.static_range(4):
                    low, high = load_pair(address + (32 * c + 2 * i) * SIZE, live, KIND)
                    q = q + (pack_half2(low, high, BF16),)
    accs = ()
    for _n in gl.static_range(NT):
        accs = accs + (_zero4(lane),)
    for c in gl.static_range(D // 32):
        for n in gl.static_range(NT):
            q0, q1 = _two(q, (n * (D // 32) + c) * 2)
            q2, q3 = _two(q, (n * (D // 32) + c) * 2 + 1)
            x = mma(k[8 * c], k[8 * c + 4], k[8 * c + 1], k[8 * c + 5], q0, q1, accs[n], BF16)
            x = mma(k[8 * c + 2], k[8 * c + 6], k[8 * c + 3], k[8 * c + 7], q2, q3, x, BF16)
            accs = _replace(accs, n, x)
    scores = ()
    never = _zero4(lane)[0] - float("inf")
    for n in gl.static_range(NT):
        x = ()
        for e in gl.static_range(4):
            # rows of a KV head are [query head, token]; the tokens are the newest of the sequence
            query = total - tokens + (column0 + n * 8 + 2 * t + e % 2) % tokens
            if e < 2:
                sees = valid0 & (position0 <= query)
            else:
                sees = valid1 & (position1 <= query)
            x = x + (gl.where(sees, accs[n][e] * factor, never),)
        scores = scores + (x,)
    top, scaled, p = _softmax(scores, top, 1, NT, BF16, LIFT)
    before = _rescale(before, scaled, CT, NT)
    before_side = _rescale(before_side, scaled, 1, NT)
    one = lane * 0
    if BF16:
        one = one + ONES_BF16
    else:
        one = one + ONES
    out = ()
    side = ()
    for n in gl.static_range(NT):
        for ct in gl.static_range(CT):
            a0 = low_halves(v[0][ct], v[1][ct])
            a1 = high_halves(v[0][ct], v[1][ct])
            a2 = low_halves(v[2][ct], v[3][ct])
            a3 = high_halves(v[2][ct], v[3][ct])
            out = out + (mma(a0, a1, a2, a3, p[2 * n], p[2 * n + 1], before[n * CT + ct], BF16),)
        side = side + (mma(one, one, one, one, p[2 * n], p[2 * n + 1], before_side[n], BF16),)
    return top, out, side


# ---- meeting of the warps, and store --------------------------------------------------------------------------------


@gluon.jit
def _store_sums(part_top, part_sum, at, column, rows, writes, top0, top1, sum0, sum1, LIFT: gl.constexpr):
    """Maxima and sums of two query rows. The factor that probabilities carry goes into the maxima."""
    gl.store(part_top + at, top0 - LIFT, mask=writes & (column < rows))
    gl.store(part_top + at + 1, top1 - LIFT, mask=writes & (column + 1 < rows))
    gl.store(part_sum + at, sum0, mask=writes & (column < rows))
    gl.store(part_sum + at + 1, sum1, mask=writes & (column + 1 < rows))


@gluon.jit
def _store_own(
    lane, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, D: gl.constexpr, NT: gl.constexpr,
    LIFT: gl.constexpr,
):  # fmt: skip
    """Store the partial results of a warp that has query rows to itself."""
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    for n in gl.static_range(NT):
        column = column0 + n * 8 + 2 * t
        at = slot0 * rows + column
        _store_sums(
            part_top, part_sum, at, column, rows, g == 0, top[2 * n], top[2 * n + 1], side[n][2], side[n][3], LIFT
        )  # fmt: skip
        to = part_out + at.to(gl.int64) * D + g
        for ct in gl.static_range(CT):
            x = out[n * CT + ct]
            gl.store(to + ct * 16, x[0], mask=column < rows)
            gl.store(to + (D + ct * 16), x[1], mask=column + 1 < rows)
            gl.store(to + (ct * 16 + 8), x[2], mask=column < rows)
            gl.store(to + (D + ct * 16 + 8), x[3], mask=column + 1 < rows)


@gluon.jit
def _finish(
    base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, DENSE: gl.constexpr,
    D: gl.constexpr, NT: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """Merge the warps of the program and store one partial result per query row."""
    CT: gl.constexpr = D // 16
    W: gl.constexpr = gl.num_warps()
    g = lane // 4
    t = lane % 4
    # maxima and sums: [query row, warp]
    best = ()
    factor = ()
    for n in gl.static_range(NT):
        store_shared4(base0 + ((n * W + warp) * 4 + t) * 16, top[2 * n], top[2 * n + 1], side[n][2], side[n][3])
    program_sync(lane)
    for n in gl.static_range(NT):
        a = ()
        for w in gl.static_range(W):
            a = a + (load_shared4f(base0 + ((n * W + w) * 4 + t) * 16),)
        m0 = a[0][0]
        m1 = a[0][1]
        for w in gl.static_range(1, W):
            m0 = gl.maximum(m0, a[w][0])
            m1 = gl.maximum(m1, a[w][1])
        l0 = _zero4(lane)[0]
        l1 = l0
        for w in gl.static_range(W):
            l0 = gl.fma(a[w][2], exp2_fast(a[w][0] - m0), l0)
            l1 = gl.fma(a[w][3], exp2_fast(a[w][1] - m1), l1)
        best = best + (m0, m1)
        factor = factor + (exp2_fast(top[2 * n] - m0), exp2_fast(top[2 * n + 1] - m1))
        column = column0 + n * 8 + 2 * t
        _store_sums(
            part_top, part_sum, slot0 * rows + column, column, rows, (warp == 0) & (g == 0), m0, m1, l0, l1, LIFT
        )  # fmt: skip
    program_sync(lane)
    # outputs: [tile, warp, lane] of four registers; each warp then sums its share of the tiles
    for n in gl.static_range(NT):
        for ct in gl.static_range(CT):
            x = out[n * CT + ct]
            store_shared4(
                base0 + (((n * CT + ct) * W + warp) * 32 + lane) * 16,
                x[0] * factor[2 * n],
                x[1] * factor[2 * n + 1],
                x[2] * factor[2 * n],
                x[3] * factor[2 * n + 1],
            )
    program_sync(lane)
    for i in gl.static_range(NT * CT // W):
        tile = i * W + warp
        total = load_shared4f(base0 + (tile * W * 32 + lane) * 16)
        for w in gl.static_range(1, W):
            x = load_shared4f(base0 + ((tile * W + w) * 32 + lane) * 16)
            total = (total[0] + x[0], total[1] + x[1], total[2] + x[2], total[3] + x[3])
        ct = tile % CT
        column = column0 + tile // CT * 8 + 2 * t
        if DENSE:
            channel = g * (D // 8) + 2 * ct
            half = 1
        else:
            channel = ct * 16 + g
            half = 8
        at = (slot0 * rows + column).to(gl.int64) * D + channel
        gl.store(part_out + at, total[0], mask=column < rows)
        gl.store(part_out + at + D, total[1], mask=column + 1 < rows)
        gl.store(part_out + at + half, total[2], mask=column < rows)
        gl.store(part_out + at + D + half, total[3], mask=column + 1 < rows)


@gluon.jit(
    do_not_specialize=[
        "scale", "heads", "rows", "tokens", "first_token", "capacity", "sinks", "slots", "splits", "dense_splits", "parts",
        "part0",
    ],
    do_not_specialize_on_alignment=["columns"],
)  # fmt: skip
def decode_kernel(
    q_ptr, packed_q_ptr, bias_ptr,
    k_codes, k_meta, k_aux, v_codes, v_meta, v_aux,
    packed_len_ptr, sink_k, sink_v, sink_len_ptr, ring_k, ring_v, recent_len_ptr,
    part_out, part_top, part_sum,
    scale, heads, rows, tokens, columns, first_token, capacity, sinks, slots, splits, dense_splits, parts, part0,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_AXIS: gl.constexpr, K_MODE: gl.constexpr, K_GROUP: gl.constexpr,
    V_BITS: gl.constexpr, V_AXIS: gl.constexpr, V_MODE: gl.constexpr, V_GROUP: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, BF16: gl.constexpr, HAS_BIAS: gl.constexpr, CENTER: gl.constexpr,
    EARLY: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for ``8 NT`` query rows.

    Grid: (batch * heads * columns, splits + dense_splits): what shares bytes runs together, and the short programs of the
    windows fill the gaps at the end. Results go to parts ``part0`` and following of ``parts``.

    AXIS 0: groups of tokens, 1: groups of channels. MODE 0: asym, 1: sym, 2: hybrid. A stage is NB blocks of 32 tokens;
    ``capacity`` counts such blocks, the first of which holds the sequence's packed tokens from ``first_token`` on. EARLY: this
    may be launched before the kernel before it ends, and lets the merge be launched while it runs; each waits itself; sm_90
    and later. SHARED: the warps of a program share
    each stage, and each has ``8 NT`` query rows of its own; there are no windows.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    t = lane % 4
    K_ROW: gl.constexpr = _item(meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 0)
    K_WORDS: gl.constexpr = _item(meta_bytes(D, K_AXIS, K_MODE, K_GROUP), 1)
    V_ROW: gl.constexpr = _item(meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 0)
    V_WORDS: gl.constexpr = _item(meta_bytes(D, V_AXIS, V_MODE, V_GROUP), 1)
    K_CODE: gl.constexpr = code_bytes(D, K_BITS)
    V_CODE: gl.constexpr = code_bytes(D, V_BITS)
    V_AT: gl.constexpr = NB * (K_CODE + K_ROW + K_WORDS)
    STAGE: gl.constexpr = V_AT + NB * (V_CODE + V_ROW + V_WORDS)
    MEET: gl.constexpr = NT * CT * 32 * 16  # bytes a warp leaves for the others at the end
    QUERY: gl.constexpr = NT * CT * 256  # bytes of a warp's queries
    LIFT: gl.constexpr = lift(V_BITS, V_AXIS)
    base0 = shared_base(lane, 2 * STAGE + W * QUERY if SHARED else W * (STAGE if STAGE > MEET else MEET))

    if EARLY:
        wait_for_previous(lane)
        launch_dependents(lane)
    split = gl.program_id(1)
    column0 = (gl.program_id(0) % columns) * (8 * NT)
    if SHARED:
        column0 = column0 * W + warp * (8 * NT)
    head = gl.program_id(0) // columns
    batch = head // heads
    packed_len = gl.load(packed_len_ptr + batch)
    row0 = head.to(gl.int64) * rows
    slot0 = head.to(gl.int64) * parts + (part0 + split)

    if (not SHARED) and split >= splits:
        sink_len = gl.load(sink_len_ptr + batch)
        recent_len = gl.load(recent_len_ptr + batch)
        top, out, side = _nothing(lane, CT, NT)
        for tile in range(split - splits, (sinks + slots + 16 * W - 1) // (16 * W), dense_splits):
            top, out, side = _dense(
                lane, warp, tile, head, q_ptr, row0, column0, rows, tokens,
                sink_k.to(gl.int64), sink_v.to(gl.int64), ring_k.to(gl.int64), ring_v.to(gl.int64),
                sinks, slots, sink_len, packed_len, recent_len, scale * LOG2E, top, out, side, D, NT, BF16, LIFT,
            )  # fmt: skip
        _finish(
            base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, True, D, NT, LIFT
        )
    else:
        # blocks of this split, then of this warp: contiguous, so that every warp streams
        blocks = gl.minimum(gl.maximum(packed_len - first_token, 0) // 32, capacity)
        lo = (blocks.to(gl.int64) * split // splits).to(gl.int32)
        hi = (blocks.to(gl.int64) * (split + 1) // splits).to(gl.int32)
        if SHARED:
            base = base0
            each = hi - lo
            first = lo
            count = each
        else:
            base = base0 + warp * STAGE
            each = (hi - lo + W - 1) // W
            first = lo + warp * each
            count = gl.minimum(hi - first, each)
        COPIERS: gl.constexpr = 32 * W if SHARED else 32
        copier = thread if SHARED else lane
        unit = head * capacity
        kc = k_codes.to(gl.int64)
        km = k_meta.to(gl.int64)
        ka = k_aux.to(gl.int64)
        vc = v_codes.to(gl.int64)
        vm = v_meta.to(gl.int64)
        va = v_aux.to(gl.int64)
        _fetch_stage(
            base, copier, kc, km, ka, unit, first, count, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NB, 0, COPIERS
        )  # fmt: skip
        copy_commit(lane)
        _fetch_stage(
            base, copier, vc, vm, va, unit, first, count, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NB, V_AT, COPIERS
        )  # fmt: skip
        copy_commit(lane)

        q, code_factor, zero_factor = _queries(
            packed_q_ptr, lane, g, t, row0, column0, rows, scale * LOG2E, D, K_BITS, K_AXIS, NT
        )  # fmt: skip
        qsum = _query_sums(q, lane, g, t, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NT)
        if SHARED:  # registers are for sums
            far = base0 + 2 * STAGE + warp * QUERY + lane * 8
            for i in gl.static_range(NT * CT):
                store_shared2(far + 256 * i, q[2 * i], q[2 * i + 1])
            warp_sync(lane)
            q = far

        bias = ()
        for n in gl.static_range(NT):
            for e in gl.static_range(2):
                if HAS_BIAS:
                    column = column0 + n * 8 + 2 * t + e
                    x = gl.load(bias_ptr + row0 + column, mask=column < rows, other=0.0) * (scale * LOG2E)
                    bias = bias + (x,)
                else:
                    bias = bias + (_zero4(lane)[0],)
        top, out, side = _nothing(lane, CT, NT)

        for i in range((each + NB - 1) // NB):
            left = count - i * NB
            following = first + (i + 1) * NB
            if SHARED:
                # two buffers: all warps are done with the other one
                copy_wait_all(lane)
                program_sync(lane)
                base = base0 + (i % 2) * STAGE
                other = base0 + ((i + 1) % 2) * STAGE
                _fetch_stage(
                    other, copier, kc, km, ka, unit, following, left - NB, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NB, 0, COPIERS
                )  # fmt: skip
                _fetch_stage(
                    other, copier, vc, vm, va, unit, following, left - NB, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NB, V_AT,
                    COPIERS,
                )  # fmt: skip
                copy_commit(lane)
            else:
                copy_wait_1(lane)  # keys of this stage
            extra = ()
            for j in gl.static_range(NB):
                hidden = gl.where(left > j, 0.0, float("-inf"))
                for e in gl.static_range(2 * NT):
                    extra = extra + (hidden + bias[e],)
            if K_AXIS == 0:
                scores = _scores_operand(
                    base, lane, q, code_factor, zero_factor, extra, D, K_BITS, NT, NB, 0, NB * K_CODE, CENTER, SHARED
                )
            else:
                scores = _scores_accumulator(
                    base, lane, q, qsum, code_factor, extra, D, K_BITS, K_MODE, K_GROUP, NT, NB,
                    0, NB * K_CODE, NB * (K_CODE + K_ROW), SHARED,
                )  # fmt: skip
            if not SHARED:
                warp_sync(lane)
                _fetch_stage(
                    base, copier, kc, km, ka, unit, following, left - NB, D, K_BITS, K_AXIS, K_MODE, K_GROUP, NB, 0, COPIERS
                )  # fmt: skip
                copy_commit(lane)
            top, factor, p = _softmax(scores, top, 2 * NB, NT, False, LIFT)
            if SHARED and V_AXIS == 1:
                out, side = _values_operand_apart(
                    base, lane, p, factor, out, side, D, V_BITS, V_GROUP, NT, NB, V_AT, V_AT + NB * V_CODE
                )
            else:
                out = _rescale(out, factor, CT, NT)
                side = _rescale(side, factor, 1, NT)
                if not SHARED:
                    copy_wait_1(lane)  # values of this stage
                if V_AXIS == 1:
                    out, side = _values_operand(
                        base, lane, p, out, side, D, V_BITS, V_GROUP, NT, NB, V_AT, V_AT + NB * V_CODE
                    )
                else:
                    out, side = _values_accumulator(
                        base, lane, p, out, side, D, V_BITS, V_MODE, NT, NB, V_AT, V_AT + NB * V_CODE,
                        V_AT + NB * (V_CODE + V_ROW),
                    )  # fmt: skip
            if not SHARED:
                warp_sync(lane)
                _fetch_stage(
                    base, copier, vc, vm, va, unit, following, left - NB, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NB, V_AT,
                    COPIERS,
                )  # fmt: skip
                copy_commit(lane)

        copy_wait_all(lane)
        program_sync(lane)
        out = _whole_values(out, side, lane, D, V_BITS, V_AXIS, V_MODE, V_GROUP, NT)
        if SHARED:
            _store_own(lane, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, D, NT, LIFT)
        else:
            _finish(
                base0,
                lane,
                warp,
                top,
                out,
                side,
                part_out,
                part_top,
                part_sum,
                slot0,
                column0,
                rows,
                False,
                D,
                NT,
                LIFT,
            )
