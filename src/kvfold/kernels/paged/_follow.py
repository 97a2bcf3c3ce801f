# mypy: ignore-errors
"""Updates of whole pages from the queries of their own tokens: Triton code of :mod:`kvfold.kernels.paged.follow`."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _finite, _max, _sum
from kvfold.kernels.common._sizes import PAGE


@triton.jit
def _product(a, b):
    """Float32's precision, on tensor cores."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _inverse(p, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Of a symmetric matrix whose eigenvalues are 1 or more, by Newton's iteration."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    bound = _max(_sum(tl.abs(p), 1), 0)
    x = tl.where(row == column, 2.0 / (1.0 + bound), 0.0)
    for _ in range(ROUNDS):
        x = 2.0 * x - _product(x, _product(p, x))
    return x


@triton.jit(do_not_specialize=["seqs", "heads", "lam"])
def follow_kernel(
    window, w_block, w_place, w_head, query, q_token, q_head,
    query_start, window_table, window_step, before_ptr, closes_ptr, close_list, slots, updates,
    seqs, heads, lam,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, WINDOW_BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    """Any number of programs: each takes every so many-th token, whose query it appends, and page and head, whose update it
    makes. Tokens of the step are read from ``query``, so what one program appends none reads.

    ``updates`` [pages to close, heads, WIDTH, WIDTH]: rows are the last WIDTH channels, columns the first ones.
    """
    zero = tl.full([], 0, tl.int64)
    programs = tl.num_programs(0)
    low = tl.arange(0, WIDTH)[None, :]
    every = tl.arange(0, H)[:, None]
    channel = tl.arange(0, D)[None, :]
    for token in range(tl.program_id(0), tl.load(query_start + seqs), programs):
        slot = tl.load(slots + token)
        if slot >= 0:
            turn = (slot % WINDOW_BLOCK % GROUP).to(tl.int32)
            real = every < heads
            x = tl.load(query + (zero + token) * q_token + (every * GROUP + turn) * q_head + channel, mask=real)
            to = window + slot // WINDOW_BLOCK * w_block + slot % WINDOW_BLOCK * w_place + every * w_head + channel
            tl.store(to, x.to(window.dtype.element_ty), mask=real)
    for task in tl.range(tl.program_id(0), tl.load(closes_ptr + seqs) * heads, programs, disable_licm=True):
        head = task % heads
        entry = task // heads
        seq = tl.load(close_list + 2 * entry).to(tl.int64)
        position = tl.load(close_list + 2 * entry + 1) * PAGE + tl.arange(0, PAGE)
        late = position - tl.load(before_ptr + seq)
        number = tl.load(window_table + seq * window_step + position // WINDOW_BLOCK, mask=late < 0, other=0)
        place = position % WINDOW_BLOCK
        old = window + number.to(tl.int64) * w_block + place * w_place + head * w_head
        own = tl.load(query_start + seq).to(tl.int64) + late
        new = query + own * q_token + (head * GROUP + place % GROUP) * q_head
        at = tl.where(late < 0, old, new)[:, None]
        first, last = _finite(tl.load(at + low)), _finite(tl.load(at + WIDTH + low))
        size = (_sum(_sum(first * first, 1), 0) + _sum(_sum(last * last, 1), 0)) / D
        weight = lam / tl.maximum(size, 1e-30)
        turned = tl.trans(last)
        eye = tl.where(tl.arange(0, WIDTH)[:, None] == low, 1.0, 0.0)
        inverse = _inverse(eye + weight * _product(turned, last), WIDTH, ROUNDS)
        update = -_product(inverse, weight * _product(turned, first))
        wrong = _max(_max(tl.where(tl.abs(update) < 1e30, 0.0, 1.0), 1), 0) > 0.0
        out = updates + (zero + task) * (WIDTH * WIDTH) + tl.arange(0, WIDTH)[:, None] * WIDTH + low
        tl.store(out, tl.where(wrong, 0.0, update))
