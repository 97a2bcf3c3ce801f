"""Decode attention over pages of uniform codes (fold): the Gluon kernel. :mod:`kvfold.kernels.pages` launches it.

As in :mod:`kvfold.kernels._decode_gluon`, a warp computes ``S^T = K q^T`` and ``O^T = V^T P^T`` with ``mma.m16n8k16``, packed
codes being the first operand as subnormal fp16 pairs. What is new is that a stage is a page of 128 tokens, which is read from
its own bytes:

* Keys. The query is multiplied by the page's norms and turned by the Hadamard rotation: 16 channels at a time by one MMA whose
  first operand is the 16 x 16 Hadamard matrix (four registers, made once), then by sums and differences of such tiles. Scores
  begin at ``-o sum(q)``, so that codes need no zero-point; the scale of a token multiplies its score, and the page's mean adds
  ``q . mean``, one more MMA per 16 channels.
* Values. The scale of a token multiplies its probability. Sums of a page begin at ``(sum of p) mean - o (sum of w)``, in the
  rotated basis, and join those before in fp32; they are turned back once, at the end.
* Probabilities carry a power of two that follows the page's largest scale, so that small values keep their digits.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._affine_codes import code_bytes
from kvfold.kernels._affine_keys import lift
from kvfold.kernels._affine_values import _lighten
from kvfold.kernels._hadamard import hadamard, sign_bits, turned_back, turned_tiles, with_signs
from kvfold.kernels._page_codes import (
    fetch_page,
    mean_at,
    norm_at,
    page_bytes,
    page_operand,
    page_words,
    scale_at,
    shared_bytes,
    step,
    unit,
    weight,
)
from kvfold.kernels._registers import _kind, _query, _replace, _zero4
from kvfold.kernels._softmax import LOG2E, _finish, _nothing
from kvfold.kernels._warp import (
    abs_halves,
    as_float,
    as_int,
    copy_commit,
    copy_wait_1,
    copy_wait_all,
    exp2_fast,
    launch_dependents,
    load_matrix4,
    load_pair,
    load_shared,
    load_shared_short,
    max_half2,
    mma,
    mul_half2,
    pack_half2,
    program_sync,
    shared_base,
    shuffle_xor,
    store_shared1,
    store_shared2,
    store_shared4,
    transpose8,
    unpack_half2,
    wait_for_previous,
    warp_sync,
)
from kvfold.kernels._windows_gluon import _dense

ONES = gl.constexpr(0x3C003C00)  # two fp16 ones
NORM_STEP = gl.constexpr(-1.0 / 48)  # kvfold.formats.paged.NORM_STEPS


# ---- keys -----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _exponent(mix):
    """The largest element of the queries is scaled to [2^e, 2^(e + 1)): turned, it stays below 2^15."""
    return min(8, 15 - mix.bit_length())


@gluon.jit
def _raw_queries(q_ptr, g, t, row0, column0, rows, factor, D: gl.constexpr, MIX: gl.constexpr, NT: gl.constexpr):
    """Eight queries as B operands, scaled by a power of two, and what turns products into ``factor`` times the score."""
    CT: gl.constexpr = D // 16
    KIND: gl.constexpr = _kind(q_ptr.dtype.element_ty)
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    E: gl.constexpr = _exponent(MIX)
    q = ()
    up = ()
    for n in gl.static_range(NT):
        row = column0 + n * 8 + g
        live = (row < rows).to(gl.int32)
        address = q_ptr.to(gl.int64) + ((row0 + row) * D + 2 * t) * SIZE
        raw = ()
        big = (g * 0).to(gl.float32)
        for i in gl.static_range(2 * CT):
            low, high = load_pair(address + 8 * i * SIZE, live, KIND)
            raw = raw + (low, high)
            big = gl.maximum(big, gl.maximum(gl.abs(low), gl.abs(high)))
        for i in gl.static_range(5):
            big = gl.maximum(big, shuffle_xor(big, 1 << i))
        exponent = gl.minimum(gl.maximum(as_int(big) >> 23, 32), 240)
        down = as_float((254 + E - exponent) << 23)
        up = up + (as_float((exponent - E) << 23) * factor,)
        for i in gl.static_range(2 * CT):
            q = q + (pack_half2(raw[2 * i] * down, raw[2 * i + 1] * down, False),)
    return q, up


@gluon.jit
def _norm_words(base, scratch, lane, signs, D: gl.constexpr, NORM: gl.constexpr, AT: gl.constexpr):
    """Leave the page's norms, with the rotation's signs, in a warp's scratch: fp16 [D]."""
    for i in gl.static_range(D // 64):
        at = (lane + 32 * i) * 2
        if NORM:
            codes = load_shared_short(base + at, AT)
            low = exp2_fast((codes & 255).to(gl.float32) * NORM_STEP)
            high = exp2_fast((codes >> 8).to(gl.float32) * NORM_STEP)
            word = pack_half2(low, high, False)
        else:
            word = lane * 0 + ONES
        store_shared1(scratch + 2 * at, with_signs(word, signs, i))
    warp_sync(lane)


@gluon.jit
def _vector(address, OFFSET: gl.constexpr, D: gl.constexpr):
    """A vector fp16 [D] in shared memory as pairs of an operand, the same in all rows: [channel tile, half]."""
    out = ()
    for i in gl.static_range(D // 32):
        out = out + load_matrix4(address, OFFSET + 64 * i, False)
    return out


@gluon.jit
def _turned_queries(
    q, scratch, lane, matrix, D: gl.constexpr, BITS: gl.constexpr, MIX: gl.constexpr, NT: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Queries as a page's codes meet them: times norms and signs, turned (without the factor), times 2^-k of the tile.

    Also -o times their sums, in units of code sums.
    """
    CT: gl.constexpr = D // 16
    MIDDLE: gl.constexpr = -((1 << BITS) - 1) / 2 / (1 << 24)
    norm = _vector(scratch + lane // 8 * 16, 0, D)
    one = lane * 0 + ONES
    out = ()
    start = ()
    for n in gl.static_range(NT):
        x = ()
        for ct in gl.static_range(CT):
            b0, b1 = _query(q, n * CT + ct, FAR)
            x = x + (mul_half2(b0, norm[2 * ct]), mul_half2(b1, norm[2 * ct + 1]))
        if MIX > 1:
            turned = turned_tiles(x, matrix, lane, CT, MIX)
            x = ()
            for ct in gl.static_range(CT):
                y = turned[ct]
                x = x + (transpose8(pack_half2(y[0], y[1], False)), transpose8(pack_half2(y[2], y[3], False)))
        sums = (_zero4(lane), _zero4(lane))
        for ct in gl.static_range(CT):
            sums = _replace(sums, ct % 2, mma(one, one, one, one, x[2 * ct], x[2 * ct + 1], sums[ct % 2], False))
        start = start + ((sums[0][0] + sums[1][0]) * MIDDLE, (sums[0][1] + sums[1][1]) * MIDDLE)
        for ct in gl.static_range(CT):
            out = out + (
                _lighten(x[2 * ct], lane, weight(D, BITS, ct)),
                _lighten(x[2 * ct + 1], lane, weight(D, BITS, ct)),
            )
    return out, start


@gluon.jit
def _mean_scores(q, base, lane, up, D: gl.constexpr, NT: gl.constexpr, AT: gl.constexpr, FAR: gl.constexpr):
    """q . mean of the page, in units of scores, for a lane's columns.

    Two channel tiles of the mean are one operand, the first in rows 0 to 7, the second in rows 8 to 15: what a query's other
    tile gives there is left out.
    """
    CT: gl.constexpr = D // 16
    address = base + lane // 8 % 2 * 32 + lane // 16 * 16
    mean = ()
    for i in gl.static_range(CT // 2):
        mean = mean + (load_matrix4(address, AT + 64 * i, False),)
    out = ()
    for n in gl.static_range(NT):
        first = _zero4(lane)
        second = _zero4(lane)
        for i in gl.static_range(CT // 2):
            m = mean[i]
            b0, b1 = _query(q, n * CT + 2 * i, FAR)
            first = mma(m[0], m[1], m[2], m[3], b0, b1, first, False)
            b0, b1 = _query(q, n * CT + 2 * i + 1, FAR)
            second = mma(m[0], m[1], m[2], m[3], b0, b1, second, False)
        out = out + ((first[0] + second[2]) * up[n], (first[1] + second[3]) * up[n])
    return out


@gluon.jit
def _page_scores(
    base, lane, q, start, bias, code_factor, left, D: gl.constexpr, BITS: gl.constexpr, NT: gl.constexpr,
    NB: gl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens: 2 NB x NT accumulators."""
    CT: gl.constexpr = D // 16
    STEP: gl.constexpr = step(D, BITS)
    scores = ()
    scale = ()
    for j in gl.static_range(NB):
        if j % 2 == 0:  # of tokens g and g + 8 of four tiles, as pairs
            scale = load_matrix4(base + lane // 8 * 32 + lane % 2 * 16, scale_at(D, BITS, NB) + 64 * j, True)
        words = page_words(base, lane, j * code_bytes(D, BITS), D, BITS)
        hidden = gl.where(left > j, 0.0, float("-inf"))
        accs = ()
        for _i in gl.static_range(2 * NT):
            accs = accs + (_zero4(lane),)
        for ct in gl.static_range(CT):
            for tt in gl.static_range(2):
                a = page_operand(words, 2 * ct + tt, D, BITS)
                for n in gl.static_range(NT):
                    acc = mma(
                        a[0], a[1], a[2], a[3], q[(n * CT + ct) * 2], q[(n * CT + ct) * 2 + 1], accs[tt * NT + n], False
                    )
                    accs = _replace(accs, tt * NT + n, acc)
        for tt in gl.static_range(2):
            low, high = unpack_half2(scale[2 * (j % 2) + tt])
            for n in gl.static_range(NT):
                f0 = low * (code_factor[n] * 0.5 ** (tt * STEP))
                f1 = high * (code_factor[n] * 0.5 ** (tt * STEP))
                s0 = start[2 * n] * 2.0 ** (tt * STEP)
                s1 = start[2 * n + 1] * 2.0 ** (tt * STEP)
                e0 = bias[2 * n] + hidden
                e1 = bias[2 * n + 1] + hidden
                x = accs[tt * NT + n]
                scores = scores + (
                    (
                        gl.fma(x[0], f0, gl.fma(s0, f0, e0)),
                        gl.fma(x[1], f0, gl.fma(s1, f0, e1)),
                        gl.fma(x[2], f1, gl.fma(s0, f1, e0)),
                        gl.fma(x[3], f1, gl.fma(s1, f1, e1)),
                    ),
                )
    return scores


# ---- probabilities --------------------------------------------------------------------------------------------------


@gluon.jit
def _shuffle_max(x):
    """Largest pair of the warp, element by element, and of the two."""
    for i in gl.static_range(5):
        x = max_half2(x, as_int(shuffle_xor(as_float(x), 1 << i)))
    return gl.maximum(x & 0xFFFF, x >> 16)


@gluon.jit
def _room(base, lane, NB: gl.constexpr, AT: gl.constexpr):
    """log2 of the factor that probabilities of a page may carry: up to 15, and so that times any scale it stays below 2^15."""
    x = lane * 0
    for i in gl.static_range(NB // 2):
        x = max_half2(x, abs_halves(load_shared(base + lane * 4, AT + 128 * i, 1)[0]))
    return gl.minimum(29 - (_shuffle_max(x) >> 10), 15).to(gl.float32)


@gluon.jit
def _probabilities(scores, top, room, COUNT: gl.constexpr, NT: gl.constexpr):
    """Running exponent, factor of what was summed before, and a page's exp2(score - exponent) as B operands.

    The exponent is the maximum less ``room``, or a later page's that is higher.
    """
    new_top = ()
    factor = ()
    for n in gl.static_range(NT):
        for e in gl.static_range(2):
            m = gl.maximum(scores[n][e], scores[n][e + 2])
            for i in gl.static_range(1, COUNT):
                m = gl.maximum(m, gl.maximum(scores[i * NT + n][e], scores[i * NT + n][e + 2]))
            m = gl.maximum(m, shuffle_xor(m, 4))
            m = gl.maximum(m, shuffle_xor(m, 8))
            m = gl.maximum(m, shuffle_xor(m, 16))
            m = gl.maximum(m - room, top[2 * n + e])
            new_top = new_top + (m,)
            factor = factor + (exp2_fast(top[2 * n + e] - m),)
    p = ()
    for i in gl.static_range(COUNT):
        for n in gl.static_range(NT):
            x = scores[i * NT + n]
            low = pack_half2(exp2_fast(x[0] - new_top[2 * n]), exp2_fast(x[1] - new_top[2 * n + 1]), False)
            high = pack_half2(exp2_fast(x[2] - new_top[2 * n]), exp2_fast(x[3] - new_top[2 * n + 1]), False)
            p = p + (transpose8(low), transpose8(high))
    return new_top, factor, p


@gluon.jit
def _sums(p, lane, n: gl.constexpr, COUNT: gl.constexpr, NT: gl.constexpr):
    """Sums over a page's tokens of what is in B operands, for a lane's columns."""
    one = lane * 0 + ONES
    sums = (_zero4(lane), _zero4(lane))
    for i in gl.static_range(COUNT):
        acc = mma(one, one, one, one, p[(i * NT + n) * 2], p[(i * NT + n) * 2 + 1], sums[i % 2], False)
        sums = _replace(sums, i % 2, acc)
    return sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]


# ---- values ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _turned_mean(base, lane, signs, matrix, D: gl.constexpr, MIX: gl.constexpr, AT: gl.constexpr):
    """The mean of a page's values in the rotated basis (without the factor): accumulators, all columns the same."""
    CT: gl.constexpr = D // 16
    for i in gl.static_range(D // 64):
        at = base + (lane + 32 * i) * 4
        store_shared1(at + AT, with_signs(load_shared(at, AT, 1)[0], signs, i))
    warp_sync(lane)
    return turned_tiles(_vector(base + lane // 8 * 16, AT, D), matrix, lane, CT, MIX)


@gluon.jit
def _plain_mean(base, lane, D: gl.constexpr, AT: gl.constexpr):
    """The mean of a page's values where there is no rotation, likewise."""
    out = ()
    for ct in gl.static_range(D // 16):
        at = base + (16 * ct + lane // 4) * 2
        a, b = unpack_half2(load_shared_short(at, AT) | (load_shared_short(at, AT + 16) << 16))
        out = out + ((a, a, b, b),)
    return out


@gluon.jit
def _page_values(
    base, lane, p, total, factor, out, signs, matrix, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr,
    MIX: gl.constexpr, NT: gl.constexpr, NB: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Sums of values, in the rotated basis and in units of codes (2^(k - 24)), and of probabilities, a page further."""
    CT: gl.constexpr = D // 16
    MIDDLE: gl.constexpr = ((1 << BITS) - 1) / 2
    FACTOR: gl.constexpr = MIX**-0.5
    STEP: gl.constexpr = step(D, BITS)
    scale = ()
    for j in gl.static_range(NB):  # of tokens 2t and 2t + 1 of eight, as pairs
        scale = scale + load_matrix4(base + lane // 8 * 16, AT + scale_at(D, BITS, NB) + 64 * j, False)
    w = ()
    for i in gl.static_range(2 * NB):
        for n in gl.static_range(NT):
            w = w + (
                mul_half2(p[(i * NT + n) * 2], scale[2 * i]),
                mul_half2(p[(i * NT + n) * 2 + 1], scale[2 * i + 1]),
            )
    mean = ()
    if MEAN:
        if MIX > 1:
            mean = _turned_mean(base, lane, signs, matrix, D, MIX, AT + mean_at(D, BITS, NB))
        else:
            mean = _plain_mean(base, lane, D, AT + mean_at(D, BITS, NB))
    new = ()
    accs = ()
    for n in gl.static_range(NT):
        p0, p1 = _sums(p, lane, n, 2 * NB, NT)
        z0, z1 = _sums(w, lane, n, 2 * NB, NT)
        f0 = factor[2 * n]
        f1 = factor[2 * n + 1]
        new = new + (gl.fma(total[2 * n], f0, p0), gl.fma(total[2 * n + 1], f1, p1))
        for ct in gl.static_range(CT):
            x = out[n * CT + ct]
            y0 = z0 * (-MIDDLE * unit(D, BITS, ct))
            y1 = z1 * (-MIDDLE * unit(D, BITS, ct))
            y = (y0, y1, y0, y1)
            if MEAN:
                m = mean[ct]
                q0 = p0 * (FACTOR * unit(D, BITS, ct))
                q1 = p1 * (FACTOR * unit(D, BITS, ct))
                y = (gl.fma(m[0], q0, y0), gl.fma(m[0], q1, y1), gl.fma(m[2], q0, y0), gl.fma(m[2], q1, y1))
            accs = accs + (
                (gl.fma(x[0], f0, y[0]), gl.fma(x[1], f1, y[1]), gl.fma(x[2], f0, y[2]), gl.fma(x[3], f1, y[3])),
            )
    for j in gl.static_range(NB):
        words = page_words(base, lane, AT + j * code_bytes(D, BITS), D, BITS)
        for tt in gl.static_range(2):
            b = ()
            for n in gl.static_range(NT):
                b = b + (
                    _lighten(w[((2 * j + tt) * NT + n) * 2], lane, tt * STEP),
                    _lighten(w[((2 * j + tt) * NT + n) * 2 + 1], lane, tt * STEP),
                )
            for ct in gl.static_range(CT):
                a = page_operand(words, 2 * ct + tt, D, BITS)
                for n in gl.static_range(NT):
                    acc = mma(a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1], accs[n * CT + ct], False)
                    accs = _replace(accs, n * CT + ct, acc)
    return accs, new


# ---- the kernel -----------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        "scale", "heads", "rows", "tokens", "first_token", "capacity", "k_pages", "v_pages", "sinks", "slots", "splits",
        "dense_splits", "parts", "part0",
    ],
    do_not_specialize_on_alignment=["columns"],
)  # fmt: skip
def pages_kernel(
    q_ptr, k_codes, k_scale, k_mean, k_norm, k_signs, v_codes, v_scale, v_mean, v_signs,
    packed_len_ptr, sink_k, sink_v, sink_len_ptr, ring_k, ring_v, recent_len_ptr,
    part_out, part_top, part_sum,
    scale, heads, rows, tokens, columns, first_token, capacity, k_pages, v_pages, sinks, slots, splits, dense_splits, parts,
    part0,
    D: gl.constexpr,
    K_BITS: gl.constexpr, K_MEAN: gl.constexpr, K_NORM: gl.constexpr, K_MIX: gl.constexpr,
    V_BITS: gl.constexpr, V_MEAN: gl.constexpr, V_MIX: gl.constexpr, SAME: gl.constexpr,
    NT: gl.constexpr, NB: gl.constexpr, FAR: gl.constexpr, BF16: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One program: one split of one KV head of one sequence, for ``8 NT`` query rows.

    Grid and parts are those of :func:`kvfold.kernels._decode_gluon.decode_kernel`. A stage is a page: NB blocks of 32 tokens.
    ``capacity`` counts blocks of a KV head's storage, ``k_pages`` and ``v_pages`` its pages. MIX is the rotation's block,
    1: none. FAR: the queries lie in shared memory, not in registers.
    """
    W: gl.constexpr = gl.num_warps()
    CT: gl.constexpr = D // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    t = lane % 4
    V_AT: gl.constexpr = page_bytes(D, K_BITS, NB, K_MEAN, K_NORM)
    K_MEAN_AT: gl.constexpr = mean_at(D, K_BITS, NB)
    K_NORM_AT: gl.constexpr = norm_at(D, K_BITS, NB, K_MEAN)
    SCRATCH: gl.constexpr = V_AT + page_bytes(D, V_BITS, NB, V_MEAN, False)
    STAGE: gl.constexpr = SCRATCH + 2 * D
    base0 = shared_base(lane, shared_bytes(D, K_BITS, K_MEAN, K_NORM, V_BITS, V_MEAN, NT, NB, FAR, W))

    if EARLY:
        wait_for_previous(lane)
        launch_dependents(lane)
    split = gl.program_id(1)
    column0 = (gl.program_id(0) % columns) * (8 * NT)
    head = gl.program_id(0) // columns
    batch = head // heads
    packed_len = gl.load(packed_len_ptr + batch)
    row0 = head.to(gl.int64) * rows
    slot0 = head.to(gl.int64) * parts + (part0 + split)

    if split >= splits:
        LIFT: gl.constexpr = lift(V_BITS, 0)
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
        # pages of this split, then of this warp: contiguous, so that every warp streams
        blocks = gl.minimum(gl.maximum(packed_len - first_token, 0) // 32, capacity)
        pages = (blocks + NB - 1) // NB
        lo = (pages.to(gl.int64) * split // splits).to(gl.int32)
        hi = (pages.to(gl.int64) * (split + 1) // splits).to(gl.int32)
        each = (hi - lo + W - 1) // W
        first = lo + warp * each
        count = gl.minimum(hi - first, each)
        base = base0 + warp * STAGE
        scratch = base + SCRATCH
        block0 = head * capacity
        k_page0 = head * k_pages
        v_page0 = head * v_pages
        kc = k_codes.to(gl.int64)
        ks = k_scale.to(gl.int64)
        km = k_mean.to(gl.int64)
        kn = k_norm.to(gl.int64)
        vc = v_codes.to(gl.int64)
        vs = v_scale.to(gl.int64)
        vm = v_mean.to(gl.int64)
        left = gl.where(count > 0, blocks - first * NB, 0)
        fetch_page(
            base, lane, kc, ks, km, kn, block0 + first * NB, k_page0 + first, left, D, K_BITS, K_MEAN, K_NORM, NB, 0
        )  # fmt: skip
        copy_commit(lane)
        fetch_page(
            base, lane, vc, vs, vm, vm, block0 + first * NB, v_page0 + first, left, D, V_BITS, V_MEAN, False, NB, V_AT
        )  # fmt: skip
        copy_commit(lane)

        q, up = _raw_queries(q_ptr, g, t, row0, column0, rows, scale * LOG2E, D, K_MIX, NT)
        if FAR:
            far = base0 + W * STAGE + 512 + lane * 8
            for i in gl.static_range(NT * CT):  # all warps have the same
                store_shared2(far + 256 * i, q[2 * i], q[2 * i + 1])
            q = far
        K_FACTOR: gl.constexpr = 16777216.0 * K_MIX**-0.5
        code_factor = ()
        for n in gl.static_range(NT):
            code_factor = code_factor + (up[n] * K_FACTOR,)
        # the Hadamard matrix waits in shared memory, which all warps fill alike
        matrix = base0 + W * STAGE + lane * 16
        m = hadamard(g, t, K_MIX if K_MIX > 1 else V_MIX, False)
        store_shared4(matrix, as_float(m[0]), as_float(m[1]), as_float(m[2]), as_float(m[3]))
        k_sign = lane * 0
        v_sign = lane * 0
        if K_MIX > 1:
            k_sign = sign_bits(k_signs, lane, D)
        if SAME:
            v_sign = k_sign
        elif V_MIX > 1:
            v_sign = sign_bits(v_signs, lane, D)
        program_sync(lane)
        if not K_NORM:  # what codes meet is the same for all pages
            _norm_words(base, scratch, lane, k_sign, D, False, 0)
            turned, start = _turned_queries(q, scratch, lane, matrix, D, K_BITS, K_MIX, NT, FAR)
        top, out, side = _nothing(lane, CT, NT)
        total = ()
        for _e in gl.static_range(2 * NT):
            total = total + (_zero4(lane)[0],)

        for i in range(each):
            following = first + i + 1
            left = gl.where(i < count, blocks - (following - 1) * NB, 0)
            next_left = gl.where(i + 1 < count, blocks - following * NB, 0)
            copy_wait_1(lane)  # keys of this page
            if K_NORM:
                _norm_words(base, scratch, lane, k_sign, D, True, K_NORM_AT)
                turned, start = _turned_queries(q, scratch, lane, matrix, D, K_BITS, K_MIX, NT, FAR)
            if K_MEAN:
                bias = _mean_scores(q, base, lane, up, D, NT, K_MEAN_AT, FAR)
            else:
                bias = ()
                for _e in gl.static_range(2 * NT):
                    bias = bias + (_zero4(lane)[0],)
            scores = _page_scores(base, lane, turned, start, bias, code_factor, left, D, K_BITS, NT, NB)
            warp_sync(lane)
            fetch_page(
                base, lane, kc, ks, km, kn, block0 + following * NB, k_page0 + following, next_left, D, K_BITS, K_MEAN,
                K_NORM, NB, 0,
            )  # fmt: skip
            copy_commit(lane)
            copy_wait_1(lane)  # values of this page
            room = _room(base, lane, NB, V_AT + scale_at(D, V_BITS, NB))
            top, factor, p = _probabilities(scores, top, room, 2 * NB, NT)
            out, total = _page_values(
                base, lane, p, total, factor, out, v_sign, matrix, D, V_BITS, V_MEAN, V_MIX, NT, NB, V_AT
            )
            warp_sync(lane)
            fetch_page(
                base, lane, vc, vs, vm, vm, block0 + following * NB, v_page0 + following, next_left, D, V_BITS, V_MEAN,
                False, NB, V_AT,
            )  # fmt: skip
            copy_commit(lane)

        copy_wait_all(lane)
        program_sync(lane)
        out = turned_back(out, lane, v_signs, D, V_BITS, V_MIX, NT)
        side = ()
        for n in gl.static_range(NT):
            side = side + ((total[2 * n], total[2 * n + 1], total[2 * n], total[2 * n + 1]),)
        _finish(base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, False, D, NT, 0)
