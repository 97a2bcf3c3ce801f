# mypy: ignore-errors
"""Vectors of a program, and the nearest of a table's codes: Triton code of kernels that search for them."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import INTERPRETED, _finite, _fma, _max, _min, _negative

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


@triton.jit
def _vectors(source, token, channel, real, HALF: tl.constexpr):
    """Elements of tokens as float32, un-rotated as kvfold.rope.Rope does it.

    ``source``: pointer to the first token, what tokens are apart, cosines and sines [tokens, HALF], factor. HALF: half of the
    rotated channels, 0 for none.
    """
    at = source[0] + token.to(tl.int64) * source[1]
    x = _finite(tl.load(at + channel, mask=real, other=0.0))
    if HALF > 0:
        turned = real & (channel < 2 * HALF)
        low = channel < HALF
        other = _finite(tl.load(at + tl.where(low, channel + HALF, channel - HALF), mask=turned, other=0.0))
        angle = token * HALF + tl.where(low, channel, channel - HALF)
        cosine = tl.load(source[2] + angle, mask=turned, other=1.0)
        sine = tl.load(source[3] + angle, mask=turned, other=0.0)
        rotated = (x * cosine + tl.where(low, other, -other) * sine) * source[4]
        x = tl.where(turned, rotated, x)
    return x


@triton.jit
def _lane(rows, heads, PICKED: tl.constexpr):
    """A program's place: number of its sequence in what is given, of its head, of both in storage."""
    index = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(rows + index).to(tl.int64) if PICKED else index
    return index, head, sequence * heads + head


@triton.jit
def _quotient(x, divisor, inverse):
    """x / divisor as division rounds it, for a divisor of 11 bits; as kvfold.kernels.common._encode_groups._codes."""
    near = x * inverse
    return _fma(_fma(_negative(near), divisor, x), inverse, near)


@triton.jit
def _first_largest(x, N: tl.constexpr):
    """Largest number of each line of x [n, N], and where it is first; N - 1 where a line has none."""
    most = _max(x, 1)
    place = tl.where(x == most[:, None], tl.arange(0, N)[None, :], N - 1)
    return most, _min(place, 1)


@triton.jit
def _stage_at(number, STAGES: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr, LATE: tl.constexpr):
    """Stage of choice ``number``, and whether it was chosen before (:func:`kvfold.formats.codebook.choices`)."""
    BACK: tl.constexpr = MIDDLE - LOW
    END: tl.constexpr = STAGES + BACK
    stage = tl.where(number < MIDDLE, number, number - BACK)
    stage = tl.where(number < END, stage, LATE + (number - END) % (STAGES - LATE))
    return stage, (number >= MIDDLE) & (number < MIDDLE + BACK) | (number >= END)


@triton.jit
def _pair(of_a, of_b, cross, had, again, N: tl.constexpr):
    """Pairs (a, b), int32 [tokens], by scores float32 [tokens, N or more] of both sides: beside each token's code b ``had``
    where ``again`` (:func:`kvfold.formats.codebook.next_pair`), else as :func:`kvfold.formats.codebook.first_pair`.

    ``cross``: float32 [N, N]; scores beyond N are minus infinity.
    """
    P: tl.constexpr = of_a.shape[1]
    code = tl.arange(0, P)
    most_a, a = _first_largest(of_a, P)
    most_b, b = _first_largest(of_b, P)
    a, b = tl.minimum(a, N - 1), tl.minimum(b, N - 1)
    inside = (code < N)[None, :] & (a >= 0)[:, None]
    begin = tl.where(again, had, b)
    top_a, best_a = _first_largest(
        of_a - tl.load(cross + code[None, :] * N + begin[:, None], mask=inside, other=0.0), P
    )
    best_a = tl.minimum(best_a, N - 1)
    line = cross + tl.where(again, best_a, a)[:, None] * N + code[None, :]
    top_b, best_b = _first_largest(of_b - tl.load(line, mask=inside, other=0.0), P)
    best_b = tl.minimum(best_b, N - 1)
    from_b = most_b + top_a >= most_a + top_b
    return tl.where(again | from_b, best_a, a), tl.where(again | ~from_b, best_b, b)
