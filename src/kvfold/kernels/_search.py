"""Nearest codes of residual stages, one stage after the other, without a distance that leaves the multiprocessor."""

import triton
import triton.language as tl


@triton.jit
def _choose_kernel(
    x,
    codes,
    squares,
    chosen,
    count,
    STAGES: tl.constexpr,
    CODES: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``x`` float32 [count, VECTOR]; ``codes`` fp16 [STAGES, CODES, VECTOR]; ``squares`` float32 [STAGES, CODES], their squared
    lengths; ``chosen`` uint8 [count, STAGES]. ROWS vectors per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, VECTOR)
    code = tl.arange(0, CODES)
    inside = row < count
    rest = tl.load(x + row[:, None] * VECTOR + channel[None, :], mask=inside[:, None], other=0.0)
    for stage in range(STAGES):
        table = codes + stage * (CODES * VECTOR)
        book = tl.load(table + code[None, :] * VECTOR + channel[:, None])
        # codes are fp16: two products with the halves of float32 numbers have float32's precision, nearly
        high = rest.to(tl.float16)
        low = (rest - high.to(tl.float32)).to(tl.float16)
        products = tl.dot(high, book, tl.dot(low, book))
        distance = tl.load(squares + stage * CODES + code)[None, :] - 2 * products
        best = tl.argmin(distance, 1)
        tl.store(chosen + row * STAGES + stage, best.to(tl.uint8), mask=inside)
        rest -= tl.load(table + best[:, None] * VECTOR + channel[None, :]).to(tl.float32)
