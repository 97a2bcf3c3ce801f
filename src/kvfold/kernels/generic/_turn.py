# mypy: ignore-errors
"""Sums of codes turned into values, part by part, in plain Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "count", "step", "first"])
def turn_kernel(
    sums, matrix, out, heads, count, step, first, W: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``first + count`` of every head's ``step``: [W] numbers times the head's matrix [W, D].

    Grid: (batch * heads, blocks of M rows, D / N).
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * M + tl.arange(0, M)
    channel = tl.program_id(2) * N + tl.arange(0, N)
    inside = row < count
    at = head.to(tl.int64) * step + first + row
    matrix += (head % heads) * (W * D)
    acc = tl.zeros([M, N], tl.float32)
    for k in tl.static_range(0, W, K):
        element = k + tl.arange(0, K)
        x = tl.load(sums + at[:, None] * W + element[None, :], mask=inside[:, None] & (element < W)[None, :], other=0.0)
        y = tl.load(matrix + element[:, None] * D + channel[None, :], mask=(element < W)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    tl.store(out + at[:, None] * D + channel[None, :], acc, mask=inside[:, None])
