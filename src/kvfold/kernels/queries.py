"""What queries meet before they meet packed keys: statistics of whole sequences, or a map of their head, in one launch each."""

import torch
import triton
import triton.language as tl

from kvfold.formats.paged import NORM_STEPS, norms
from kvfold.formats.projected import HeadMaps
from kvfold.kernels.device import device_info

OPTIONS = {"enable_fp_fusion": False}
"""A product that is rounded stays so: fused with the sum that follows it would not be."""
MANY_ROWS = 32
"""Query rows of a KV head beyond which programs take all channels under its map."""


@triton.jit(do_not_specialize=["rows"])
def _statistics_kernel(  # type: ignore[no-untyped-def]
    q_ptr, norm_ptr, mean_ptr, out_ptr, bias_ptr, rows, q_batch, q_head, q_row, heads, step,
    D: tl.constexpr, DP: tl.constexpr, HAS_NORM: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """One program: one query row of one KV head. Grid: (batch * heads, rows)."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    at = tl.arange(0, DP)
    inside = at < D
    x = tl.load(q_ptr + head // heads * q_batch + head % heads * q_head + row * q_row + at, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + head * D + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(bias_ptr + head * rows + row, tl.reduce(x * mean, 0, tl.standard._sum_combine))
    if HAS_NORM:
        x = x * tl.exp2(tl.load(norm_ptr + head * D + at, mask=inside, other=0).to(tl.float32) * step)
    tl.store(out_ptr + (head * rows + row) * D + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _map_kernel(  # type: ignore[no-untyped-def]
    q_ptr, matrix_ptr, mean_ptr, out_ptr, bias_ptr, rows, q_batch, q_head, q_row, heads,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """M query rows of one KV head times N rows of its matrix; with the first of these, also their products with its mean.
    Grid: (blocks of rows, blocks of N channels, batch * heads). EARLY: what attends may begin, and waits for the results."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(2).to(tl.int64)
    own = head % heads
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside, there = (row < rows)[:, None], (column < D)[None, :]
    source = q_ptr + head // heads * q_batch + own * q_head + row[:, None].to(tl.int64) * q_row
    total = tl.full((M, N), 0.0, tl.float32)
    bias = tl.full((M,), 0.0, tl.float32)
    for first in range(0, D, STEP):
        channel = first + tl.arange(0, STEP)
        x = tl.load(source + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        part = tl.load(matrix_ptr + (own * D + column[None, :]) * D + channel[:, None], mask=there, other=0.0)
        total = tl.dot(x, part, total, input_precision="tf32x3")
        bias += tl.reduce(x * tl.load(mean_ptr + own * D + channel)[None, :], 1, tl.standard._sum_combine)
    at = head * rows + row
    tl.store(out_ptr + at[:, None] * D + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside & there)
    tl.store(bias_ptr + at, bias, mask=(row < rows) & (tl.program_id(1) == 0))


def with_statistics_by_definition(
    queries: torch.Tensor, norm: torch.Tensor | None, mean: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What :func:`with_statistics` computes, in Torch's operations."""
    bias = None if mean is None else (queries * mean.float()).sum(-1)
    return (queries if norm is None else queries * norms(norm)), bias


def with_statistics(
    queries: torch.Tensor, norm: torch.Tensor | None, mean: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries times the norms of whole sequences' channels, and their products with the means.

    Parameters
    ----------
    queries : Tensor [batch, num_kv_heads, rows, head_dim], channels adjacent
    norm : Tensor or None, uint8 [batch, num_kv_heads, 1, head_dim]
        Codes; see :func:`kvfold.formats.paged.norms`.
    mean : Tensor or None, float16 [batch, num_kv_heads, 1, head_dim]
    dtype : torch.dtype
        Of what is returned first.

    Returns
    -------
    Tensor, ``dtype``, shaped as ``queries``
    Tensor or None, float32 [batch, num_kv_heads, rows]
    """
    batch, heads, rows, dim = queries.shape
    norm, mean = (None if x is None else x.contiguous() for x in (norm, mean))
    out = queries.new_empty(queries.shape, dtype=dtype)
    bias = None if mean is None else queries.new_empty(batch, heads, rows, dtype=torch.float32)
    _statistics_kernel[(batch * heads, rows)](
        queries, out if norm is None else norm, out if mean is None else mean, out, out if bias is None else bias, rows,
        *queries.stride()[:3], heads, -1 / NORM_STEPS, D=dim, DP=triton.next_power_of_2(dim), HAS_NORM=norm is not None,
        HAS_MEAN=mean is not None, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return out, bias


def map_shape(rows: int, dim: int) -> dict[str, int]:
    """Constants of :func:`_map_kernel`, and its warps: many programs where there are few rows."""
    if rows <= MANY_ROWS:  # all is asked for at once
        return {"D": dim, "M": 16, "N": 16, "STEP": dim & -dim, "num_warps": 4 if dim & -dim >= 64 else 1}
    return {"D": dim, "M": 64, "N": triton.next_power_of_2(dim), "STEP": 16, "num_warps": 4}


def through_maps(
    maps: HeadMaps, queries: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """:meth:`HeadMaps.queries` in one launch.

    Parameters
    ----------
    maps : HeadMaps
        Of a multiple of 16 channels.
    queries : Tensor [batch, num_kv_heads, rows, head_dim], channels adjacent
    dtype : torch.dtype
        Of what is returned first.

    Returns
    -------
    Tensor, ``dtype``, shaped as ``queries``
    Tensor, float32 [batch, num_kv_heads, rows]
    """
    batch, heads, rows, dim = queries.shape
    own, shape = maps.on(queries.device), map_shape(rows, dim)
    out = queries.new_empty(queries.shape, dtype=dtype)
    bias = queries.new_empty(batch, heads, rows, dtype=torch.float32)
    _map_kernel[(triton.cdiv(rows, shape["M"]), triton.cdiv(dim, shape["N"]), batch * heads)](
        queries, own.restore, own.mean, out, bias, rows, *queries.stride()[:3], heads, **shape,
        EARLY=device_info(queries.device).has_pdl,
    )  # fmt: skip
    return out, bias
