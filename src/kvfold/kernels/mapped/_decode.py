# mypy: ignore-errors
"""Decode attention over keys under a map, a byte for four channels, and rotated 2-bit values (NOVA-KV): the Gluon kernel.

:mod:`kvfold.kernels.mapped.decode` launches it. A stage is one unit of 32 tokens of a KV head, or two of them, of which a warp
may find fewer: beyond are zeros.

* Keys. A head's table, 64 KB, lies in shared memory. A row is four channels, and part of an operand as it is: lane (g, t) reads
  rows of tokens g and g + 8. It has four groups in turn, and at a time reads one that no other lane of the same half of a warp
  reads, as in :mod:`kvfold.kernels.learned._scores`; the queries have their channels in the order that follows.
* Values are those of :mod:`kvfold.kernels.affine._row_major`, one group of all channels for each token. Their sums pass the
  Hadamard rotation back once, at a warp's end, as in :mod:`kvfold.kernels.balanced._decode`.
* Queries come through the map already; what the keys' mean adds to a row's scores is its ``bias``.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._row_major import EXPONENT, _fetch_values, leave_rows, pitch, plain_room, plain_values
from kvfold.kernels.balanced._decode import turned_back
from kvfold.kernels.common._codes import _fetch
from kvfold.kernels.common._registers import _replace, _zero4
from kvfold.kernels.common._softmax import _finish, _nothing, _probabilities, _rescale
from kvfold.kernels.common._tables import _dynamic_base, _fetch_rows, reserved
from kvfold.kernels.common._warp import (
    copy_async,
    copy_commit,
    copy_wait,
    launch_dependents,
    load_pair,
    load_shared,
    load_shared_short,
    mma,
    program_sync,
    unpack_half2,
    wait_for_previous,
    warp_sync,
)
from kvfold.kernels.learned._scores import KEYS, _four_rows

D = gl.constexpr(128)
GROUPS = gl.constexpr(32)
"""Bytes of a token's codes."""


@gluon.constexpr_function
def places(units):
    """Where keys' norms, values' codes and metadata begin in a warp's stage of so many units, and its bytes."""
    norms = units * 32 * GROUPS.value
    codes = norms + units * 64
    meta = codes + units * 8 * pitch(D.value)
    return norms, codes, meta, meta + units * 128


@gluon.constexpr_function
def shared_bytes(warps, units):
    """Bytes of shared memory of a program: a table, stages and queries; and, later, sums."""
    size = max(KEYS.value + warps * places(units)[3] + 16 * D.value, warps * D.value * 32)
    return (size + 1023) // 1024 * 1024


@gluon.jit
def ask_fours(q_ptr, g, t, row0, column0, rows):
    """The query of column g as float32, zeros where there is none: of tile 4 b + j channels 64 b + 16 t + 4 j to those + 3."""
    live = (column0 + g < rows).to(gl.int32)
    address = q_ptr.to(gl.int64) + ((row0 + column0 + g) * D + 16 * t) * 4
    raw = ()
    for c in gl.static_range(D // 16):
        for h in gl.static_range(2):
            low, high = load_pair(address + (c // 4 * 64 + c % 4 * 4 + 2 * h) * 4, live, 2)
            raw = raw + (low, high)
    return raw


@gluon.jit
def own_rows(base, lane):
    """What a lane of a table at ``base`` looks rows up with; see :func:`kvfold.kernels.learned._scores._four_rows`."""
    g = lane // 4
    t = lane % 4
    weights = ()
    places = ()
    for k in gl.static_range(4):
        j = g % 4 ^ k
        weights = weights + ((lane * 0 + 128) << 8 * j,)
        places = places + (base + (t * 32 + j * 8),)
    return weights, places, g % 2 == 1, g // 2 % 2 == 1


@gluon.jit
def mapped_scores(base, lane, own, far, up, bias, left, UNITS: gl.constexpr):
    """Scores of a stage: accumulators of two token tiles of a unit. Units from number ``left`` on are hidden."""
    AT: gl.constexpr = places(UNITS)
    weights, rows, odd, high = own
    g = lane // 4
    codes = base + g * GROUPS + lane % 4 * 4
    accs = ()
    for _i in gl.static_range(2 * UNITS):
        accs = accs + (_zero4(lane),)
    for b in gl.static_range(2):
        q = ()
        for j in gl.static_range(4):
            q = q + load_shared(far, 256 * (4 * b + j), 2)
        here = codes + (g // 4 ^ b) * 16  # both halves of every other four tokens changed places
        for i in gl.static_range(2 * UNITS):
            x = _four_rows(load_shared(here, 16 * i * GROUPS, 1)[0], weights, rows, odd, high, 32768 * b)
            y = _four_rows(load_shared(here, (16 * i + 8) * GROUPS, 1)[0], weights, rows, odd, high, 32768 * b)
            acc = accs[i]
            for j in gl.static_range(4):
                acc = mma(x[2 * j], y[2 * j], x[2 * j + 1], y[2 * j + 1], q[2 * j], q[2 * j + 1], acc, False)
            accs = _replace(accs, i, acc)
    scores = ()
    for i in gl.static_range(2 * UNITS):
        hidden = gl.where(left > i // 2, 0.0, float("-inf"))
        near, _ = unpack_half2(load_shared_short(base + g * 2, AT[0] + 32 * i))
        next, _ = unpack_half2(load_shared_short(base + g * 2, AT[0] + 32 * i + 16))
        e0 = bias[0] + hidden
        e1 = bias[1] + hidden
        x = accs[i]
        scores = scores + (
            (
                gl.fma(x[0] * up[0], near, e0), gl.fma(x[1] * up[1], near, e1),
                gl.fma(x[2] * up[0], next, e0), gl.fma(x[3] * up[1], next, e1),
            ),
        )  # fmt: skip
    return scores


@gluon.jit
def _fetch_keys(base, lane, stored, unit, valid, UNITS: gl.constexpr):
    """Of every other four tokens both halves of the codes change places: eight tokens fill all banks."""
    ROW: gl.constexpr = 32 * GROUPS
    valid = gl.minimum(gl.maximum(valid, 0), UNITS)
    to = base + lane * 16
    codes = stored[0] + unit.to(gl.int64) * ROW + lane * 16
    for j in gl.static_range(ROW * UNITS // 512):
        size = gl.where(valid > j * 512 // ROW, 16, 0)
        copy_async(to + lane // 8 % 2 * (16 - lane % 2 * 32), codes, size, valid, 512 * j, 512 * j, True)
    _fetch(to, stored[1] + unit.to(gl.int64) * 64 + lane * 16, lane, valid, UNITS * ROW, 64, UNITS, 32)


@gluon.jit
def attend_mapped(
    base0, table, lane, warp, lo, hi, used, stored, unit0, far, up, bias, signs_ptr, MIX: gl.constexpr, UNITS: gl.constexpr
):  # fmt: skip
    """Attention of eight query rows over stages ``lo`` to ``hi``, which the program's warps share; of ``used`` units the scores
    count. ``stored``: addresses of keys' codes and norms, and of values' codes and metadata; ``unit0``: where the head's
    begin; ``bias``: of a lane's two columns, with the scores' factor."""
    W: gl.constexpr = gl.num_warps()
    AT: gl.constexpr = places(UNITS)
    g = lane // 4
    t = lane % 4
    each = (hi - lo + W - 1) // W
    first = (lo + warp * each) * UNITS
    count = gl.minimum(hi - lo - warp * each, each)
    base = base0 + warp * AT[3]
    left = gl.where(count > 0, used - first, 0)
    _fetch_keys(base, lane, stored, unit0 + first, left, UNITS)
    copy_commit(lane)
    _fetch_values(base, lane, stored[2], stored[3], unit0 + first, left, D, D, UNITS, AT)
    copy_commit(lane)
    own = own_rows(table, lane)
    top, out, side = _nothing(lane, D // 16, 1)
    copy_wait(lane, 1)
    program_sync(lane)  # rows of keys
    for i in range(each):
        left = gl.where(i < count, used - (first + i * UNITS), 0)
        following = first + (i + 1) * UNITS
        next_left = gl.where(i + 1 < count, used - following, 0)
        copy_wait(lane, 1)  # keys of this stage
        scores = mapped_scores(base, lane, own, far, up, bias, left, UNITS)
        warp_sync(lane)
        _fetch_keys(base, lane, stored, unit0 + following, next_left, UNITS)
        copy_commit(lane)
        copy_wait(lane, 1)  # values of this stage
        room = plain_room(base, lane, UNITS, 1, AT[2])
        top, factor, p = _probabilities(scores, top, room, 2 * UNITS, 1)
        out = _rescale(out, factor, D // 16, 1)
        side = _rescale(side, factor, 1, 1)
        out, side = plain_values(base, lane, g, t, p, out, side, D, D, UNITS, AT[1], AT[2])
        warp_sync(lane)
        _fetch_values(base, lane, stored[2], stored[3], unit0 + following, next_left, D, D, UNITS, AT)
        copy_commit(lane)
    copy_wait(lane, 0)
    x = ()
    signs = ()
    for c in gl.static_range(D // 16):
        for i in gl.static_range(4):  # zero-points are the same for all channels
            x = x + (gl.fma(out[c][i], 16777216.0, side[0][i % 2]),)
        if MIX > 1:
            for i in gl.static_range(2):
                signs = signs + (gl.load(signs_ptr + (16 * c + i) + 2 * g),)
    x = turned_back(x, signs, lane, MIX)
    out = ()
    for c in gl.static_range(D // 16):
        out = out + ((x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]),)
    program_sync(lane)
    return top, out, side


@gluon.jit(
    do_not_specialize=["factor", "heads", "rows", "start", "units", "room", "splits", "part", "parts"],
    do_not_specialize_on_alignment=["row_blocks"],
)  # fmt: skip
def mapped_kernel(
    q_ptr, bias_ptr, k_codes, k_norms, v_codes, v_meta, rows_ptr, signs_ptr, packed_len_ptr, part_out, part_top, part_sum,
    factor, heads, rows, row_blocks, start, units, room, splits, part, parts, MIX: gl.constexpr,
    UNITS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Attention of eight query rows of one KV head of one sequence over one split of a span's packed tokens.

    Grid: (batch * heads * row_blocks, splits). The span has ``units`` units of 32 tokens from token ``start`` on, and a KV
    head's storage room for ``room``. Queries, float32 [batch * heads, rows, 128], have passed the keys' map; ``bias_ptr``,
    float32 [batch * heads, rows], is added to scores before their ``factor``. ``rows_ptr``: as
    :func:`kvfold.kernels.learned.decode.key_rows` makes them. The rotation of values mixes MIX channels (1: there is none)
    after ``signs_ptr``, float32 [128]. A stage is UNITS units. Results are parts ``part`` to ``part + splits`` of ``parts``.
    """
    W: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane = thread % 32
    warp = thread // 32
    memory = reserved(thread, shared_bytes(W, UNITS))
    table = _dynamic_base(lane)
    program_sync(lane)
    head = gl.program_id(0) // row_blocks
    column0 = gl.program_id(0) % row_blocks * 8
    split = gl.program_id(1)
    _fetch_rows(table, rows_ptr.to(gl.int64) + (head % heads).to(gl.int64) * KEYS, thread, KEYS, W)
    copy_commit(lane)
    if EARLY:  # rows are nobody's results
        wait_for_previous(lane)
        launch_dependents(lane)
    used = gl.minimum((gl.load(packed_len_ptr + head // heads) - start).to(gl.int32) // 32, units)
    stages = (gl.maximum(used, 0) + (UNITS - 1)) // UNITS
    lo = (stages.to(gl.int64) * split // splits).to(gl.int32)
    hi = (stages.to(gl.int64) * (split + 1) // splits).to(gl.int32)
    base0 = table + KEYS
    far = base0 + W * places(UNITS)[3] + lane * 8
    row0 = head.to(gl.int64) * rows
    up = leave_rows(ask_fours(q_ptr, lane // 4, lane % 4, row0, column0, rows), far, lane % 4, factor, D, EXPONENT)
    column = column0 + lane % 4 * 2
    bias = ()
    for e in gl.static_range(2):
        bias = bias + (gl.load(bias_ptr + row0 + column + e, mask=column + e < rows, other=0.0) * factor,)
    program_sync(lane)
    top, out, side = attend_mapped(
        base0, table, lane, warp, lo, hi, used,
        (k_codes.to(gl.int64), k_norms.to(gl.int64), v_codes.to(gl.int64), v_meta.to(gl.int64)),
        head.to(gl.int64) * room, far, up, bias, signs_ptr, MIX, UNITS,
    )  # fmt: skip
    slot0 = head.to(gl.int64) * parts + (part + split)
    _finish(table, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, 2, D, 1, 0)
    for i in gl.static_range(len(memory)):
        memory[i]._keep_alive()
