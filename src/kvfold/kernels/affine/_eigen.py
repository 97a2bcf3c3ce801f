# mypy: ignore-errors
"""What a state of queries needs of a GPU: products of queries with themselves, and eigenvectors without a wait for the host."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import HUGE, INTERPRETED, _max, _sum


@triton.jit
def gram_kernel(
    queries, stride_n, stride_h, stride_t, out, tokens, heads, splits,
    D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sums of ``q q'`` over PART tokens and the GROUP query heads of a KV head. Grid: (splits, KV heads, n).

    ``queries`` 16 bits; ``out`` float64 [n, heads, splits, D, D]. A product of two is exact in float32; sums of T tokens
    are the tensor cores', those of more have 48 bits.
    """
    split, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, row = tl.arange(0, DP), tl.arange(0, T)
    high = tl.full((DP, DP), 0.0, tl.float32)
    low = tl.full((DP, DP), 0.0, tl.float32)
    for one in range(GROUP):
        base = queries + n * stride_n + (head * GROUP + one).to(tl.int64) * stride_h
        for first in range(split * PART, tl.minimum((split + 1) * PART, tokens), T):
            token = first + row
            inside = (token < tokens)[:, None] & (channel < D)[None, :]
            x = tl.load(base + token[:, None].to(tl.int64) * stride_t + channel[None, :], mask=inside, other=0.0)
            wide = x.to(tl.float32)
            wide = tl.where(wide > HUGE, HUGE, wide)  # not a minimum: NaN stays
            wide = tl.where(wide < -HUGE, -HUGE, wide)
            x = wide if INTERPRETED else wide.to(x.dtype)  # the interpreter multiplies no bf16
            some = tl.dot(tl.trans(x), x)
            total = high + some
            back = total - high
            low += (high - (total - back)) + (some - back)
            high = total
    at = ((n * heads + head) * splits + split) * (D * D) + channel[:, None] * D + channel[None, :]
    real = (channel < D)[:, None] & (channel < D)[None, :]
    tl.store(out + at, high.to(tl.float64) + low.to(tl.float64), mask=real)


@triton.jit
def _partners(turn, N: tl.constexpr):
    """Which columns meet in a turn of a round-robin tournament of N: two of int32 [N / 2]; N - 1 turns are a sweep."""
    pair = tl.arange(0, N // 2)
    one = tl.where(pair == 0, N - 1, (turn + pair) % (N - 1))
    return one, (turn + N - 1 - pair) % (N - 1)


@triton.jit
def jacobi_kernel(
    matrices, work, turned, needed, values, vectors,
    D: tl.constexpr, N: tl.constexpr, R: tl.constexpr, SWEEPS: tl.constexpr, CLOSE: tl.constexpr,
):  # fmt: skip
    """Columns of a symmetric matrix made orthogonal by rotations (Hestenes, 1958); then their lengths are the eigenvalues.

    ``matrices`` float64 [n, D, D]; ``work``, ``turned`` float64 [n, N, N], column by column in memory, for the matrix and its
    rotations; ``needed`` bool [n], False leaves a matrix alone, or None; ``values`` float64 [n, D], ascending; ``vectors``
    float64 [n, D, D], one after another. Grid: (n,). It ends with a sweep that found no two columns whose product exceeds CLOSE
    times the longer one's and the matrix's length, or after SWEEPS.
    """
    at = tl.program_id(0).to(tl.int64)
    wanted = True
    if needed is not None:
        wanted = tl.load(needed + at) != 0
    if wanted:
        matrices += at * (D * D)
        work += at * (N * N)
        turned += at * (N * N)
        row, column = tl.arange(0, R), tl.arange(0, N)
        whole = tl.full((N,), 0.0, tl.float64)
        for first in range(0, N, R):
            inside = (first + row < D)[:, None] & (column < D)[None, :]
            some = tl.load(matrices + (first + row)[:, None] * D + column[None, :], mask=inside, other=0.0)
            tl.store(work + (first + row)[:, None] * N + column[None, :], some)
            one_there = ((first + row)[:, None] == column[None, :]).to(tl.float64)
            tl.store(turned + (first + row)[:, None] * N + column[None, :], one_there)
            whole += _sum(some * some, 0)
        least = _sum(whole, 0) * (CLOSE * CLOSE)
        going = 1
        sweep = 0
        while (going == 1) & (sweep < SWEEPS):
            going = 0
            for turn in range(N - 1):
                one, two = _partners(turn, N)
                aa = tl.full((N // 2,), 0.0, tl.float64)
                bb = tl.full((N // 2,), 0.0, tl.float64)
                ab = tl.full((N // 2,), 0.0, tl.float64)
                tl.debug_barrier()
                for first in range(0, N, R):
                    a = tl.load(work + one[None, :] * N + (first + row)[:, None])
                    b = tl.load(work + two[None, :] * N + (first + row)[:, None])
                    aa += _sum(a * a, 0)
                    bb += _sum(b * b, 0)
                    ab += _sum(a * b, 0)
                far = ab * ab > least * tl.maximum(aa, bb)
                going = tl.maximum(going, _max(far.to(tl.int32), 0))
                # the smaller of the two angles: t = tan, t^2 + 2 z t - 1 = 0
                safe = tl.where(far, ab, 1.0)
                z = (bb - aa) / (2.0 * safe)
                size = tl.abs(z)
                t = 1.0 / (size + tl.where(size > 1e100, size, tl.sqrt(1.0 + tl.where(size > 1e100, 0.0, z * z))))
                t = tl.where(z < 0.0, -t, t)
                cosine = 1.0 / tl.sqrt(1.0 + t * t)
                sine = tl.where(far, t * cosine, 0.0)[None, :]
                cosine = tl.where(far, cosine, 1.0)[None, :]
                tl.debug_barrier()
                for first in range(0, N, R):
                    place = one[None, :] * N + (first + row)[:, None]
                    other = two[None, :] * N + (first + row)[:, None]
                    a, b = tl.load(work + place), tl.load(work + other)
                    c, d = tl.load(turned + place), tl.load(turned + other)
                    tl.debug_barrier()  # of small tiles several threads hold the same
                    tl.store(work + place, cosine * a - sine * b)
                    tl.store(work + other, sine * a + cosine * b)
                    tl.store(turned + place, cosine * c - sine * d)
                    tl.store(turned + other, sine * c + cosine * d)
            sweep += 1
        tl.debug_barrier()
        value = tl.full((N,), 0.0, tl.float64)
        for first in range(0, N, R):
            place = column[None, :] * N + (first + row)[:, None]
            value += _sum(tl.load(work + place) * tl.load(turned + place), 0)
        key = tl.where(value == value, value, float("inf"))
        tl.debug_barrier()
        tl.store(work + column, key)  # to be had in another order
        tl.debug_barrier()
        rank = tl.full((N,), 0, tl.int32)
        for first in range(0, N, R):
            other = tl.load(work + first + row)[:, None]
            earlier = (first + row)[:, None] < column[None, :]
            before = (other < key[None, :]) | ((other == key[None, :]) & earlier)
            rank += _sum((before & (first + row < D)[:, None]).to(tl.int32), 0)
        tl.store(values + at * D + rank, value, mask=column < D)
        for first in range(0, N, R):
            some = tl.load(turned + column[None, :] * N + (first + row)[:, None])
            inside = (first + row < D)[:, None] & (column < D)[None, :]
            tl.store(vectors + at * (D * D) + rank[None, :] * D + (first + row)[:, None], some, mask=inside)
