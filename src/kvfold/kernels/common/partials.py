"""Partial results of attention over parts of the tokens, and the kernel that merges them (log-sum-exp).

Kernels that read packed storage write one partial result per query row and split; :mod:`kvfold.kernels.common.windows` writes
one for the tokens in full precision. All have one format, so one merge serves any mixture of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvfold.kernels.call import AttentionCall, Span

LOG2E = 1.4426950408889634
MANY_ROWS = 4096
"""Query rows from which on the merge has programs enough without cutting rows to pieces."""
FEW_ROWS = 256
"""Query rows below which a program merges few channels of one."""
FEW = (32, 4)
"""Channels of such a piece, and warps of its program."""


_product_follows = [False]


@contextmanager
def product_follows() -> Iterator[None]:
    """Within it a product by a weight follows attention: it may begin, and ask for the weight, while attention runs.

    Other kernels of attention may not: their programs would not find multiprocessors that are equally busy.
    """
    _product_follows.append(True)
    try:
        yield
    finally:
        _product_follows.pop()


def early_launch(early: bool) -> dict[str, bool]:
    """Launch option of a kernel that waits for the one before it by itself, so that it may be launched before its end."""
    return {"launch_pdl": True} if early else {}


@triton.jit(do_not_specialize=["splits", "kv_heads", "tokens"])
def merge_kernel(  # type: ignore[no-untyped-def]
    part_out,
    part_top,
    part_sum,
    out,
    sinks,
    rows,
    splits,
    kv_heads,
    tokens,
    D: tl.constexpr,
    PART: tl.constexpr,
    N: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Merge the splits of one query row, PART channels at a time.

    Grid: (heads * rows, pieces), or (heads, pieces, rows) where FLAT is not set, so that nothing is divided.

    A learned sink (HAS_SINKS; one per query head, in natural units) is what the sum begins with.
    """
    if FLAT:
        row = tl.program_id(0) % rows
        kv_head = tl.program_id(0) // rows
    else:
        row = tl.program_id(2)
        kv_head = tl.program_id(0)
    channel = tl.program_id(1) * PART + tl.arange(0, PART)
    first = kv_head.to(tl.int64) * splits * rows + row
    head = 0
    if HAS_SINKS:
        head = kv_head % kv_heads * (rows // tokens) + row // tokens
    at = (kv_head * rows + row).to(tl.int64) * D
    merge_parts(
        part_out, part_top, part_sum, out + at, sinks + head, first, rows, splits, channel, D, PART, N, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def merge_parts(  # type: ignore[no-untyped-def]
    part_out, part_top, part_sum, out, sink, first, step, splits, channel,
    D: tl.constexpr, PART: tl.constexpr, N: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge ``splits`` parts, number ``first`` and every ``step``-th after it, into ``out``."""
    best = -1.0e30  # as in the attention kernels: finite, and the maximum of a split without tokens
    total = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, PART], tl.float32)
    if HAS_SINKS:
        best = tl.load(sink).to(tl.float32) * 1.4426950408889634
        total = tl.where(tl.arange(0, N) == 0, 1.0, 0.0)
    for i in range(0, splits, N):
        s = i + tl.arange(0, N)
        at = first + s.to(tl.int64) * step
        top = tl.load(part_top + at, mask=s < splits, other=-1.0e30)
        amount = tl.load(part_sum + at, mask=s < splits, other=0.0)
        x = tl.load(part_out + at[:, None] * D + channel[None, :], mask=(s < splits)[:, None], other=0.0)
        new = tl.maximum(best, tl.reduce(top, 0, tl.standard._elementwise_max))
        weight = tl.exp2(top - new)
        before = tl.exp2(best - new)
        total = total * before + weight * amount
        acc = acc * before + weight[:, None] * x
        best = new
    total_sum = tl.reduce(total, 0, tl.standard._sum_combine)
    result = tl.reduce(acc, 0, tl.standard._sum_combine) / tl.where(total_sum > 0, total_sum, 1.0)
    tl.store(out + channel, result.to(out.dtype.element_ty))


@dataclass(frozen=True)
class Partials:
    """Workspace for ``splits`` partial results of every query row.

    Attributes
    ----------
    out : Tensor, float32 [batch * num_kv_heads, splits, rows, head_dim]
        Sums of ``2^(score - top) * value`` over the split's tokens. Rows are the query heads of a KV head times the call's
        tokens, tokens innermost: a contiguous query ``[batch, num_heads, tokens, head_dim]`` has them in this order.
    top : Tensor, float32 [batch * num_kv_heads, splits, rows]
        Any number near the split's largest score, scores in units of ``log2``; ``-1e30`` where a row sees no token.
    total : Tensor, like ``top``
        Sums of ``2^(score - top)``; 0 where a row sees no token.
    """

    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def empty(cls, heads: int, splits: int, rows: int, head_dim: int, device: torch.device) -> "Partials":
        """Uninitialized; every split must be written before :meth:`merge`."""
        out = torch.empty(heads, splits, rows, head_dim, dtype=torch.float32, device=device)
        return cls(out, *torch.empty(2, heads, splits, rows, dtype=torch.float32, device=device))

    @property
    def splits(self) -> int:
        return self.out.shape[1]

    def merge(
        self, out: torch.Tensor, early: bool = False, sinks: torch.Tensor | None = None, tokens: int = 1
    ) -> torch.Tensor:
        """Normalized attention over all splits together.

        Parameters
        ----------
        out : Tensor, contiguous, of ``batch * num_kv_heads * rows * head_dim`` elements
            Written, and returned. A row that sees no token at all gets zeros.
        early : bool
            The kernel launched last allows the next one to start; see :attr:`kvfold.kernels.device.DeviceInfo.has_pdl`.
        sinks : Tensor or None, contiguous float [num_heads]
            Learned sinks: a score more in the softmax of each query head, in natural units, for a value of zeros.
        tokens : int
            Query tokens of a call with sinks: rows are query heads times these.
        """
        heads, splits, rows, dim = self.out.shape
        shape = merge_shape(heads * rows, splits, dim)
        arguments = (
            self.out,
            self.top,
            self.total,
            out,
            self.total if sinks is None else sinks,
            rows,
            splits,
            1 if sinks is None else sinks.numel() * tokens // rows,
            tokens,
        )
        grid = (heads * rows, dim // shape.part) if shape.flat else (heads, dim // shape.part, rows)
        same = {
            "D": dim,
            "PART": shape.part,
            "HAS_SINKS": sinks is not None,
            "FLAT": shape.flat,
            "num_warps": shape.warps,
        }
        if early and shape.part % 16 == 0:  # four warps of four channels at least
            from kvfold.kernels.common._merge import merge_rows_kernel

            merge_rows_kernel[grid](*arguments, SOON=_product_follows[-1], **same, **early_launch(True))
        else:
            n = min(64, triton.next_power_of_2(splits)) if shape.flat else 64
            merge_kernel[grid](*arguments, N=n, **same)
        return out


class MergeShape(NamedTuple):
    """Channels of a merging program and its warps; ``flat``: a grid whose first dimension counts rows."""

    part: int
    warps: int
    flat: bool


def merge_shape(rows: int, splits: int, head_dim: int) -> MergeShape:
    """How ``rows`` query rows of all heads are merged. A warp has at most 128 channels."""
    whole = head_dim & -head_dim  # the largest power of two that divides it
    if rows >= MANY_ROWS:
        part = min(whole, 256)
        return MergeShape(part, max(1, part // 128) if splits <= 8 else 4, True)
    if rows >= FEW_ROWS:
        return MergeShape(min(whole, 128), 4, False)
    return MergeShape(min(whole, FEW[0]), FEW[1], False)


def span_arguments(
    call: AttentionCall,
    span: Span,
    turns: tuple[torch.Tensor, torch.Tensor],
    partials: Partials,
    part: int,
    splits: int,
    rows: tuple[int, int],
    units: tuple[int, int],
) -> tuple[Any, ...]:
    """What kernels over storage in plain order take after a span's fields, in their order.

    Parameters
    ----------
    turns : pair of Tensor
        Constants of RoPE; anything where keys are not rotated.
    part, splits : int
        Parts of ``partials`` that are written: the first, and how many.
    rows : pair of int
        Query rows of a KV head, and their blocks.
    units : pair of int
        Units of 32 tokens of the span, and those from one KV head's storage to the next's.
    """
    position = call.packed_len if call.first_position is None else call.first_position  # not read without RoPE
    results = partials.out, partials.top, partials.total
    scale, heads = float(call.scale) * LOG2E, call.rows.shape[1]
    return (
        call.packed_len,
        position,
        *turns,
        *results,
        scale,
        heads,
        *rows,
        span.start,
        *units,
        splits,
        part,
        partials.splits,
    )
