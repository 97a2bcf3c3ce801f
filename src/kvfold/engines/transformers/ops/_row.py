# mypy: ignore-errors
"""One row times a weight, or two; see :mod:`kvfold.engines.transformers.ops.product`."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

import triton
import triton.language as tl


@triton.jit
def _part(weights, i: tl.constexpr, column, inside, K: tl.constexpr, C: tl.constexpr):
    """Channels ``i * C`` and following of a program's rows."""
    if (i + 1) * C <= K:
        return tl.load(weights + i * C, mask=inside, other=0.0)
    return tl.load(weights + i * C, mask=inside & (i * C + column < K)[None, :], other=0.0)


@triton.jit
def _rows(
    x_ptr, weight_ptr, other_ptr, bias_ptr, out_ptr, row, count,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The product of R rows of a weight; see :func:`row_kernel`."""
    column = tl.arange(0, C)
    inside = (row < count)[:, None]
    start = row.to(tl.int64)[:, None] * K + column[None, :]
    PARTS: tl.constexpr = (K + C - 1) // C
    held = ()
    others = ()
    for i in tl.static_range(AHEAD):
        held = held + (_part(weight_ptr + start, i, column, inside, K, C),)
        if GATED:
            others = others + (_part(other_ptr + start, i, column, inside, K, C),)
    if EARLY:  # whatever comes next waits for this kernel's end, which comes after that of the one before
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.full([R, C], 0.0, tl.float32)
    other = tl.full([R, C], 0.0, tl.float32)
    for i in tl.static_range(PARTS):
        if (i + 1) * C <= K:
            x = tl.load(x_ptr + i * C + column).to(tl.float32)
        else:
            x = tl.load(x_ptr + i * C + column, mask=i * C + column < K, other=0.0).to(tl.float32)
        acc += held[i % AHEAD].to(tl.float32) * x[None, :]
        if GATED:
            other += others[i % AHEAD].to(tl.float32) * x[None, :]
        if i + AHEAD < PARTS:
            new = _part(weight_ptr + start, i + AHEAD, column, inside, K, C)
            held = held[: i % AHEAD] + (new,) + held[i % AHEAD + 1 :]
            if GATED:
                new = _part(other_ptr + start, i + AHEAD, column, inside, K, C)
                others = others[: i % AHEAD] + (new,) + others[i % AHEAD + 1 :]
    kind = out_ptr.dtype.element_ty
    total = tl.reduce(acc, 1, tl.standard._sum_combine)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row, mask=row < count, other=0.0).to(tl.float32)
    if GATED:
        gate = total.to(kind).to(tl.float32)
        up = tl.reduce(other, 1, tl.standard._sum_combine).to(kind).to(tl.float32)
        total = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    tl.store(out_ptr + row, total.to(kind), mask=row < count)


@triton.jit(do_not_specialize=["count"])
def row_kernel(
    x_ptr, weight_ptr, other_ptr, bias_ptr, out_ptr, count,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: R of ``count`` rows of the weight, C of their K channels at a time.

    GATED: and of a second weight; SiLU of the first product times the second is written, rounded as
    :func:`kvfold.engines.transformers.ops.small.gated` rounds it.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    _rows(
        x_ptr, weight_ptr, other_ptr, bias_ptr, out_ptr, row, count, K, R, C, AHEAD, HAS_BIAS, GATED, EARLY
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "second", "third"])
def three_kernel(
    x_ptr, a_ptr, b_ptr, c_ptr, a_bias, b_bias, c_bias, out_ptr, first, second, third,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As :func:`row_kernel`, for three weights of ``first``, ``second`` and ``third`` rows: programs of the first come first,
    results lie one after the other."""
    program = tl.program_id(0)
    mine = (first + R - 1) // R
    weight = a_ptr
    bias = a_bias
    out = out_ptr
    count = first
    if program >= mine:
        program -= mine
        mine = (second + R - 1) // R
        weight = b_ptr
        bias = b_bias
        out += first
        count = second
        if program >= mine:
            program -= mine
            weight = c_ptr
            bias = c_bias
            out += second
            count = third
    row = program * R + tl.arange(0, R)
    _rows(x_ptr, weight, weight, bias, out, row, count, K, R, C, AHEAD, HAS_BIAS, False, EARLY)
