"""Keys that fill a call up to a number that cuDNN has compiled for: what they add to a softmax is known, and taken off again.

They are copies of the last 32 keys, equally many of each, and their values are zeros. So attention over all of them has the
right sums of values, and a normalizer with ``copies * sum(exp(q . k))`` of those 32 too much. As these keys are among the real
ones, that is at most ``copies`` times the real normalizer: the difference loses no more than a factor of copies + 1 of float32.
"""

import torch
import triton
import triton.language as tl

OF = 32
"""Keys that are copied."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["tokens", "room"])
def _fill_kernel(keys, values, tokens, room, D: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid: (tokens to fill / 32, heads); see :func:`fill`."""
    head = tl.program_id(1).to(tl.int64) * room
    row = tl.arange(0, 32)
    channel = tl.arange(0, DP)
    inside = (channel < D)[None, :] & (row < room)[:, None]
    at = row[:, None] * D + channel[None, :]
    copied = tl.load(keys + (head + tokens - 32) * D + at, mask=inside)
    to = (head + tokens + tl.program_id(0) * 32) * D
    tl.store(keys + to + at, copied, mask=inside)
    tl.store(values + to + at, tl.zeros_like(copied), mask=inside)


@triton.jit(do_not_specialize=["rows", "keys_head", "factor", "copies"])
def _excess_kernel(  # type: ignore[no-untyped-def]
    q, keys, out, rows, keys_head, factor, copies, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Grid: (blocks of M rows, heads); see :func:`excess`."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    channel = tl.arange(0, DP)
    inside = (row < rows)[:, None] & (channel < D)[None, :]
    x = tl.load(q + (head * rows + row)[:, None] * D + channel[None, :], mask=inside, other=0.0)
    at = tl.arange(0, 32)[:, None] * D + channel[None, :]
    k = tl.load(keys + head * keys_head + at, mask=(channel < D)[None, :], other=0.0)
    score = tl.dot(x, tl.trans(k), input_precision="ieee") * (factor * LOG2E)
    top = tl.reduce(score, 1, tl.standard._elementwise_max)
    total = tl.reduce(tl.exp2(score - top[:, None]), 1, tl.standard._sum_combine)
    tl.store(out + head * rows + row, top + tl.log2(total * copies), mask=row < rows)


def fill(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Fill contiguous keys and values [batch, num_kv_heads, room, head_dim] up behind their first ``tokens``: with copies of
    the last 32 of those, and zeros. Both numbers are multiples of 32."""
    batch, heads, room, dim = keys.shape
    _fill_kernel[((room - tokens) // OF, batch * heads)](
        keys, values, tokens, room, D=dim, DP=triton.next_power_of_2(dim), num_warps=4
    )


def excess(rows: torch.Tensor, keys: torch.Tensor, tokens: int, scale: float) -> torch.Tensor:
    """What copies add to the normalizers of a softmax, as its base-2 logarithm: float32 [batch, num_kv_heads, rows].

    Parameters
    ----------
    rows : Tensor [batch, num_kv_heads, rows, head_dim], contiguous
        Queries.
    keys : Tensor [batch, num_kv_heads, room, head_dim], contiguous
        Of which the first ``tokens`` are real; the last 32 of these are read.
    scale : float
        Of the scores, natural units.
    """
    batch, heads, count, dim = rows.shape
    room = keys.shape[2]
    out = torch.empty(batch, heads, count, dtype=torch.float32, device=rows.device)
    block = 64
    _excess_kernel[(triton.cdiv(count, block), batch * heads)](
        rows,
        keys[:, :, tokens - OF :],
        out,
        count,
        room * dim,
        float(scale),
        (room - tokens) // OF,
        D=dim,
        DP=max(16, triton.next_power_of_2(dim)),
        M=block,
        num_warps=4,
    )
    return out
