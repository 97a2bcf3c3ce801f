# mypy: ignore-errors
"""The kernel that merges partial results where kernels overlap (sm_90 and later); :mod:`kvfold.kernels.common.partials`
launches it.

A decode step of one sequence waits for it, so nothing in it waits for anything else: a lane reads every so many-th part of four
channels, all of them at once; lanes of one warp meet by shuffles, and warps never do.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._softmax import LOG2E, LOWEST
from kvfold.kernels.common._warp import (
    as_float,
    exp2_fast,
    launch_dependents,
    load_global4,
    shuffle_xor,
    wait_for_previous,
)


@gluon.constexpr_function
def lanes_of(part, warps):
    """Lanes of a warp that share its channels, four each."""
    return part // warps // 4


@gluon.jit
def _ask(out, tops, sums, first, part, step, splits, D: gl.constexpr, EACH: gl.constexpr, GROUPS: gl.constexpr):
    """A lane's parts from number ``part`` on, every GROUPS-th: the exponent, the sum of weights and four channels of each."""
    asked = ()
    for i in gl.static_range(EACH):
        n = part + i * GROUPS
        live = n < splits
        at = first + n.to(gl.int64) * step
        top = gl.load(tops + at, mask=live, other=-1.0e30)
        amount = gl.load(sums + at, mask=live, other=0.0)
        asked = asked + ((top, amount, load_global4(out + at * (4 * D), live.to(gl.int32))),)
    return asked


@gluon.jit
def _join(asked, best, total, acc):
    """A lane's sums, and parts more."""
    new = best
    for i in gl.static_range(len(asked)):
        new = gl.maximum(new, asked[i][0])
    before = exp2_fast(best - new)
    total = total * before
    a, b, c, d = acc[0] * before, acc[1] * before, acc[2] * before, acc[3] * before
    for i in gl.static_range(len(asked)):
        x = asked[i][2]
        weight = exp2_fast(asked[i][0] - new)
        total = gl.fma(weight, asked[i][1], total)
        a = gl.fma(weight, as_float(x[0]), a)
        b = gl.fma(weight, as_float(x[1]), b)
        c = gl.fma(weight, as_float(x[2]), c)
        d = gl.fma(weight, as_float(x[3]), d)
    return new, total, (a, b, c, d)


@gluon.jit(do_not_specialize=["rows", "splits", "kv_heads", "tokens"])
def merge_rows_kernel(
    part_out, part_top, part_sum, out, sinks, rows, splits, kv_heads, tokens,
    D: gl.constexpr, PART: gl.constexpr, HAS_SINKS: gl.constexpr, SOON: gl.constexpr, FLAT: gl.constexpr,
):  # fmt: skip
    """As :func:`kvfold.kernels.common.partials.merge_kernel`, whose grid and parameters these are: PART channels of a query
    row."""
    W: gl.constexpr = gl.num_warps()
    QUADS: gl.constexpr = lanes_of(PART, W)
    GROUPS: gl.constexpr = 32 // QUADS
    EACH: gl.constexpr = 8 if GROUPS == 1 else 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, LAYOUT)
    lane = thread % 32
    group = lane // QUADS
    if SOON:
        launch_dependents(lane)
    if FLAT:
        row = gl.program_id(0) % rows
        kv_head = gl.program_id(0) // rows
    else:
        row = gl.program_id(2)
        kv_head = gl.program_id(0)
    channel = gl.program_id(1) * PART + thread // 32 * (PART // W) + lane % QUADS * 4
    first = kv_head.to(gl.int64) * splits * rows + row
    x = part_out.to(gl.int64) + channel.to(gl.int64) * 4
    best = _zero4(lane)[0] + LOWEST
    total = _zero4(lane)[0]
    if HAS_SINKS:
        sink = gl.load(sinks + (kv_head % kv_heads * (rows // tokens) + row // tokens)).to(gl.float32)
        best = best * 0.0 + sink * LOG2E
        total = gl.where(group == 0, 1.0, 0.0)
    wait_for_previous(lane)
    if not SOON:  # here or at the very end: in between, the next kernel's programs lie unevenly on multiprocessors
        launch_dependents(lane)
    asked = _ask(x, part_top, part_sum, first, group, rows, splits, D, EACH, GROUPS)
    best, total, acc = _join(asked, best, total, _zero4(lane))
    for i in range(EACH * GROUPS, splits, EACH * GROUPS):
        asked = _ask(x, part_top, part_sum, first, i + group, rows, splits, D, EACH, GROUPS)
        best, total, acc = _join(asked, best, total, acc)
    most = best
    for i in gl.static_range(5):
        if QUADS >> i <= 1:
            most = gl.maximum(most, shuffle_xor(most, 1 << i))
    factor = exp2_fast(best - most)
    sums = (total * factor, acc[0] * factor, acc[1] * factor, acc[2] * factor, acc[3] * factor)
    for i in gl.static_range(5):
        if QUADS >> i <= 1:
            more = ()
            for e in gl.static_range(5):
                more = more + (sums[e] + shuffle_xor(sums[e], 1 << i),)
            sums = more
    whole = gl.where(sums[0] > 0, sums[0], 1.0)
    to = out + ((kv_head * rows + row).to(gl.int64) * D + channel)
    for e in gl.static_range(4):
        gl.store(to + e, sums[1 + e] / whole, mask=group == 0)
