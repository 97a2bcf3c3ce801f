# mypy: ignore-errors
"""The nearest of a table's codes: Triton code of kernels that search for them."""

import triton
import triton.language as tl

from kvfold.kernels._encode_groups import INTERPRETED, _min

LARGEST = tl.constexpr(60000.0)
"""Of what is multiplied in fp16."""
SLOTS = tl.constexpr(16)
"""Numbers of a code that meet a vector's: the least that a product in fp16 takes."""


@triton.jit
def _marked(x, y, number, MASK: tl.constexpr):
    """Float32 x + y with ``number``, up to MASK, in its lowest bits: a minimum of such says which it was."""
    if INTERPRETED:
        return (((x + y).to(tl.int32, bitcast=True) & -1 - MASK) | number).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 sum; add.f32 sum, $1, $2; lop3.b32 $0, sum, $3, $4, 0xea; }",
        "=f,f,f,r,r",
        [x, y, -1 - MASK, number],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _lower(x, y):
    """The smaller of two float32 numbers that are not NaN, in one instruction."""
    if INTERPRETED:
        return tl.minimum(x, y)
    return tl.inline_asm_elementwise("min.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


@triton.jit
def _lowest(x):
    """The smallest number of each line: [lines, numbers] -> [lines]."""
    if INTERPRETED:  # which goes element by element through a combination that it does not know
        return _min(x, 1)
    return tl.reduce(x, 1, _lower)


@triton.jit
def _beside(x, y):
    """Columns of x [n, m], then those of y."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def _halves(x):
    """Vectors x, float32 [n, 2, 4 or 8], as their codes' SLOTS numbers meet them: the fp16 part and what it misses, again and
    again."""
    high = x.to(tl.float16)
    near = _beside(high, (x - high.to(tl.float32)).to(tl.float16))
    if x.shape[1] < 8:
        near = _beside(near, near)
    if x.shape[1] < 4:
        near = _beside(near, near)
    return near


@triton.jit
def _nearest(near, table, halves, CODES: tl.constexpr, PART: tl.constexpr):
    """Numbers of the nearest codes to vectors (:func:`_halves`): int32 [n]. PART codes are compared at a time.

    ``table``: [CODES, SLOTS] numbers that fp16 holds, negative codes in the order of :func:`_halves`; ``halves``: float32
    [CODES], half of their squared lengths.
    """
    slot, code = tl.arange(0, SLOTS)[:, None], tl.arange(0, PART)[None, :]
    least = tl.full((near.shape[0], PART), float("inf"), tl.float32)
    # one part after the other: side by side, their sums take all registers there are
    for first in range(0, CODES, PART):
        known = tl.load(table + (first + code) * SLOTS + slot).to(tl.float16)
        half = tl.load(halves + first + code)
        least = _lower(least, _marked(tl.dot(near, known), half, first + code, CODES - 1))
    return _lowest(least).to(tl.int32, bitcast=True) & (CODES - 1)
