# mypy: ignore-errors
"""Decode attention over balanced tiles (KVarN): 2-bit codes in plain order, factors of tokens and channels, a rotation.

:mod:`kvfold.kernels.balanced.decode` launches it. A stage is a block of 128 tokens of one KV head. Codes become operands as in
:mod:`kvfold.kernels.affine._row_major`; what differs follows from a group that is all of a tile:

* Keys. Scales multiply the query once a block, and zero-points give one number for all of its tokens. A token's factor
  multiplies its score.
* Values. A token's scale multiplies its weight. A channel's factor belongs to the block, so a block has sums of its own, which
  join the others times the factor.
* The Hadamard rotation. Queries pass it once, before anything is read; sums pass it back once, at a warp's end. Both are
  stages of sums and differences: between registers for some bits of a channel's number, between lanes for the others.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._row_major import (
    EXPONENT,
    _fetch_codes,
    _tile_operand,
    _value_tile,
    ask_rows,
    leave_rows,
    pitch,
    plain_room,
)
from kvfold.kernels.common._codes import _fetch
from kvfold.kernels.common._registers import ONES, _replace, _zero4
from kvfold.kernels.common._softmax import _finish, _lighten, _nothing, _probabilities, _rescale
from kvfold.kernels.common._warp import (
    copy_commit,
    copy_wait,
    either_bytes,
    launch_dependents,
    load_shared,
    load_shared_short,
    mma,
    mul_half2,
    program_sync,
    shared_base,
    shuffle_xor,
    unpack_half2,
    wait_for_previous,
    warp_sync,
)

UNITS = gl.constexpr(4)
"""Units of 32 tokens of a block."""


@gluon.constexpr_function
def places(dim):
    """Where keys' metadata and factors, values' codes, metadata and factors begin in a warp's stage, and its bytes."""
    codes = 32 * pitch(dim)
    at = [codes]
    for size in (4 * dim, 256, codes, 512, 2 * dim):
        at.append(at[-1] + size)
    return tuple(at)


@gluon.constexpr_function
def shared_bytes(dim, warps):
    """Bytes of shared memory of a program: stages and queries; and, later, sums."""
    return max(warps * places(dim)[5] + 16 * dim, warps * dim * 32)


# ---- the rotation ---------------------------------------------------------------------------------------------------


@gluon.jit
def _between_registers(x, BIT: gl.constexpr):
    """Sums and differences of numbers whose places differ in BIT."""
    out = ()
    for i in gl.static_range(len(x)):
        if i // BIT % 2 == 0:
            out = out + (x[i] + x[i + BIT],)
        else:
            out = out + (x[i - BIT] - x[i],)
    return out


@gluon.jit
def _between_lanes(x, lane, BIT: gl.constexpr):
    """Sums and differences of the same number of lanes that differ in BIT."""
    sign = gl.where(lane // BIT % 2 == 0, 1.0, -1.0)
    out = ()
    for i in gl.static_range(len(x)):
        out = out + (gl.fma(x[i], sign, shuffle_xor(x[i], BIT)),)
    return out


@gluon.constexpr_function
def _steps_of_tiles(block):
    """Steps between registers whose channel tiles a block mixes; a tile has four."""
    return tuple(4 << i for i in range(max(0, block.bit_length() - 5)))


@gluon.jit
def _mixed_tiles(x, BLOCK: gl.constexpr):
    """The stages between channel tiles."""
    STEPS: gl.constexpr = _steps_of_tiles(BLOCK)
    for i in gl.static_range(len(STEPS)):
        x = _between_registers(x, STEPS[i])
    return x


@gluon.jit
def _signed(x, signs, BLOCK: gl.constexpr):
    """Numbers times the rotation's signs and 1 / sqrt(BLOCK). Neighbours share a sign where there are fewer signs."""
    SHARED: gl.constexpr = len(x) // len(signs)
    FACTOR: gl.constexpr = BLOCK**-0.5
    out = ()
    for i in gl.static_range(len(x)):
        out = out + (x[i] * (signs[i // SHARED] * FACTOR),)
    return out


@gluon.jit
def turned_rows(x, signs, lane, BLOCK: gl.constexpr):
    """A query's channels 16 c + 4 t to 16 c + 4 t + 3, in the rotated basis."""
    if BLOCK > 1:
        x = _signed(x, signs, BLOCK)
        x = _between_registers(x, 1)
        if BLOCK > 2:
            x = _between_registers(x, 2)
        if BLOCK > 4:
            x = _between_lanes(x, lane, 1)
        if BLOCK > 8:
            x = _between_lanes(x, lane, 2)
        x = _mixed_tiles(x, BLOCK)
    return x


@gluon.jit
def turned_back(x, signs, lane, BLOCK: gl.constexpr):
    """Sums of channels 16 c + 2 g and the next one, two columns each, in the model's basis."""
    if BLOCK > 1:
        x = _between_registers(x, 2)
        if BLOCK > 2:
            x = _between_lanes(x, lane, 4)
        if BLOCK > 4:
            x = _between_lanes(x, lane, 8)
        if BLOCK > 8:
            x = _between_lanes(x, lane, 16)
        x = _mixed_tiles(x, BLOCK)
        x = _signed(x, signs, BLOCK)
    return x


# ---- queries, scores, values ----------------------------------------------------------------------------------------


@gluon.jit
def balanced_rows(
    q_ptr, signs_ptr, far, lane, row0, column0, rows, factor, D: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Leave the rotated queries of eight columns in shared memory; see :func:`kvfold.kernels.affine._row_major.leave_rows`."""
    g = lane // 4
    t = lane % 4
    raw = ask_rows(q_ptr, g, t, row0, column0, rows, D)
    signs = ()
    for c in gl.static_range(D // 16 if BLOCK > 1 else 0):
        for i in gl.static_range(4):
            signs = signs + (gl.load(signs_ptr + (16 * c + i) + 4 * t),)
    return leave_rows(turned_rows(raw, signs, lane, BLOCK), far, t, factor, D, EXPONENT)


@gluon.jit
def balanced_scores(base, lane, g, t, far, up, there, D: gl.constexpr, META: gl.constexpr, FACTORS: gl.constexpr):
    """Scores of a block: accumulators of two token tiles of a unit. ``there``: whether there is such a block."""
    nothing = lane * 0
    zeros = _zero4(lane)
    q = ()
    for c in gl.static_range(D // 16):
        s = load_shared(base + t * 8, META + 32 * c, 2)
        z = load_shared(base + t * 8, META + 2 * D + 32 * c, 2)
        b = load_shared(far, 256 * c, 2)
        zeros = mma(z[0], z[0], z[1], z[1], b[0], b[1], zeros, False)
        q = q + (mul_half2(b[0], s[0]), mul_half2(b[1], s[1]))
    e0 = zeros[0] * up[0]
    e1 = zeros[1] * up[1]
    hidden = gl.where(there, 0.0, float("-inf"))
    scores = ()
    for j in gl.static_range(UNITS):
        accs = (_zero4(lane), _zero4(lane))
        for c in gl.static_range(D // 16):
            word = load_shared(base + g * pitch(D) + t * 4, j * 8 * pitch(D) + 16 * c, 1)[0]
            low = either_bytes(word, nothing, "0x4140")
            high = either_bytes(word, nothing, "0x4342")
            for tt in gl.static_range(2):
                a = _tile_operand(low, high, 2 * tt)
                x = mma(a[0], a[1], a[2], a[3], q[2 * c], q[2 * c + 1], accs[tt], False)
                accs = _replace(accs, tt, x)
        for tt in gl.static_range(2):
            own = base + g * 2
            near, _ = unpack_half2(load_shared_short(own, FACTORS + 64 * j + 32 * tt))
            next, _ = unpack_half2(load_shared_short(own, FACTORS + 64 * j + 32 * tt + 16))
            f0 = up[0] * 2.0 ** (24 - 4 * tt)
            f1 = up[1] * 2.0 ** (24 - 4 * tt)
            x = accs[tt]
            scores = scores + (
                (
                    gl.fma(gl.fma(x[0], f0, e0), near, hidden), gl.fma(gl.fma(x[1], f1, e1), near, hidden),
                    gl.fma(gl.fma(x[2], f0 * 0.25, e0), next, hidden), gl.fma(gl.fma(x[3], f1 * 0.25, e1), next, hidden),
                ),
            )  # fmt: skip
    return scores


@gluon.jit
def balanced_values(
    base, lane, g, t, p, out, side, D: gl.constexpr, CODES: gl.constexpr, META: gl.constexpr, FACTORS: gl.constexpr
):  # fmt: skip
    """Sums of values, in units of codes' subnormals, and (the second half of ``side``) of weights, a block further."""
    one = lane * 0 + ONES
    at = base + t * (2 * pitch(D)) + g * 2
    pair = base + t * 4
    sums = ()
    for _c in gl.static_range(D // 16):
        sums = sums + (_zero4(lane),)
    own = _zero4(lane)  # sums of zero-points in every row, then those of weights
    for j in gl.static_range(UNITS):
        b = ()
        for f in gl.static_range(4):
            scale = load_shared(pair, META + 128 * j + 16 * f, 1)[0]
            b = b + (mul_half2(_lighten(p[4 * j + f], lane, 2 * f), scale),)
        for tt in gl.static_range(2):
            z0 = load_shared(pair, META + 128 * j + 64 + 32 * tt, 1)[0]
            z1 = load_shared(pair, META + 128 * j + 64 + 32 * tt + 16, 1)[0]
            own = mma(z0, one, z1, one, p[4 * j + 2 * tt], p[4 * j + 2 * tt + 1], own, False)
        for c in gl.static_range(D // 16):
            sums = _replace(sums, c, _value_tile(at, sums[c], b, CODES + j * 8 * pitch(D) + 16 * c, pitch(D)))
    z0 = own[0] * 2.0**-24
    z1 = own[1] * 2.0**-24
    new = ()
    for c in gl.static_range(D // 16):
        low, high = unpack_half2(load_shared(base + g * 4, FACTORS + 32 * c, 1)[0])
        x = sums[c]
        y = out[c]
        new = new + (
            (
                gl.fma(x[0] + z0, low, y[0]), gl.fma(x[1] + z1, low, y[1]),
                gl.fma(x[2] + z0, high, y[2]), gl.fma(x[3] + z1, high, y[3]),
            ),
        )  # fmt: skip
    return new, ((side[0][0], side[0][1], side[0][2] + own[2], side[0][3] + own[3]),)


@gluon.jit
def _fetch_keys(base, lane, stored, block, valid, D: gl.constexpr, AT: gl.constexpr):
    codes, meta, factors = stored
    at = block.to(gl.int64)
    _fetch_codes(base, codes, lane, block * UNITS, valid * UNITS, D, UNITS, 0)
    _fetch(base + lane * 16, meta + at * (4 * D) + lane * 16, lane, valid, AT[0], 4 * D, 1, 32)
    _fetch(base + lane * 16, factors + at * 256 + lane * 16, lane, valid, AT[1], 256, 1, 32)


@gluon.jit
def _fetch_values(base, lane, stored, block, valid, D: gl.constexpr, AT: gl.constexpr):
    codes, meta, factors = stored
    at = block.to(gl.int64)
    _fetch_codes(base, codes, lane, block * UNITS, valid * UNITS, D, UNITS, AT[2])
    _fetch(base + lane * 16, meta + at * 512 + lane * 16, lane, valid, AT[3], 512, 1, 32)
    _fetch(base + lane * 16, factors + at * (2 * D) + lane * 16, lane, valid, AT[4], 2 * D, 1, 32)


@gluon.jit
def attend_balanced(
    base0, lane, warp, lo, hi, keys, values, block0, far, up, signs_ptr, D: gl.constexpr, BLOCK: gl.constexpr
):
    """Attention of eight query rows over blocks ``lo`` to ``hi``, which the program's warps share. ``keys``, ``values``:
    addresses of codes, metadata and factors; ``block0``: where the head's begin."""
    W: gl.constexpr = gl.num_warps()
    AT: gl.constexpr = places(D)
    g = lane // 4
    t = lane % 4
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    base = base0 + warp * AT[5]
    here = (count > 0).to(gl.int32)
    _fetch_keys(base, lane, keys, block0 + first, here, D, AT)
    copy_commit(lane)
    _fetch_values(base, lane, values, block0 + first, here, D, AT)
    copy_commit(lane)
    top, out, side = _nothing(lane, D // 16, 1)
    for i in range(each):
        following = (i + 1 < count).to(gl.int32)
        copy_wait(lane, 1)  # keys of this block
        scores = balanced_scores(base, lane, g, t, far, up, i < count, D, AT[0], AT[1])
        warp_sync(lane)
        _fetch_keys(base, lane, keys, block0 + first + (i + 1), following, D, AT)
        copy_commit(lane)
        copy_wait(lane, 1)  # values of this block
        room = plain_room(base, lane, UNITS, 1, AT[3])
        top, factor, p = _probabilities(scores, top, room, 2 * UNITS, 1)
        out = _rescale(out, factor, D // 16, 1)
        side = _rescale(side, factor, 1, 1)
        out, side = balanced_values(base, lane, g, t, p, out, side, D, AT[2], AT[3], AT[4])
        warp_sync(lane)
        _fetch_values(base, lane, values, block0 + first + (i + 1), following, D, AT)
        copy_commit(lane)
    copy_wait(lane, 0)
    x = ()
    signs = ()
    for c in gl.static_range(D // 16):
        for i in gl.static_range(4):
            x = x + (out[c][i] * 16777216.0,)
        if BLOCK > 1:
            for i in gl.static_range(2):
                signs = signs + (gl.load(signs_ptr + (16 * c + i) + 2 * g),)
    x = turned_back(x, signs, lane, BLOCK)
    out = ()
    for c in gl.static_range(D // 16):
        out = out + ((x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]),)
    program_sync(lane)
    return top, out, side


@gluon.jit(
    do_not_specialize=["factor", "heads", "rows", "start", "blocks", "room", "splits", "part", "parts"],
    do_not_specialize_on_alignment=["row_blocks"],
)  # fmt: skip
def balanced_kernel(
    q_ptr, k_codes, k_meta, k_factor, v_codes, v_meta, v_factor, signs_ptr, packed_len_ptr, part_out, part_top, part_sum,
    factor, heads, rows, row_blocks, start, blocks, room, splits, part, parts, D: gl.constexpr, BLOCK: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Attention of eight query rows of one KV head of one sequence over one split of a span's packed tokens.

    Grid: (batch * heads * row_blocks, splits). The span has ``blocks`` blocks from token ``start`` on, and a KV head's storage
    room for ``room``. The rotation mixes BLOCK channels (1: there is none) after ``signs_ptr``, float32 [D]. Results are parts
    ``part`` to ``part + splits`` of ``parts``.
    """
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    base0 = shared_base(lane, shared_bytes(D, W))
    if EARLY:
        wait_for_previous(lane)
        launch_dependents(lane)
    head = gl.program_id(0) // row_blocks
    column0 = gl.program_id(0) % row_blocks * 8
    split = gl.program_id(1)
    packed = gl.load(packed_len_ptr + head // heads)
    used = gl.maximum(gl.minimum((packed - start).to(gl.int32) // 128, blocks), 0)
    lo = (used.to(gl.int64) * split // splits).to(gl.int32)
    hi = (used.to(gl.int64) * (split + 1) // splits).to(gl.int32)
    far = base0 + W * places(D)[5] + lane * 8
    up = balanced_rows(q_ptr, signs_ptr, far, lane, head.to(gl.int64) * rows, column0, rows, factor, D, BLOCK)
    program_sync(lane)
    top, out, side = attend_balanced(
        base0, lane, warp, lo, hi,
        (k_codes.to(gl.int64), k_meta.to(gl.int64), k_factor.to(gl.int64)),
        (v_codes.to(gl.int64), v_meta.to(gl.int64), v_factor.to(gl.int64)),
        head.to(gl.int64) * room, far, up, signs_ptr, D, BLOCK,
    )  # fmt: skip
    slot0 = head.to(gl.int64) * parts + (part + split)
    _finish(base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, 2, D, 1, 0)
