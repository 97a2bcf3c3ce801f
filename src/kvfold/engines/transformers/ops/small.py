"""A model's small operations between attention and matrix products, one launch each, rounded where Transformers' own round.

A norm of the root mean square is eight of Torch's kernels, a rotation of queries and keys ten, a gate two. In a decode step
each takes longer to begin and to end than it computes. These write what those write: every number that the model's code rounds
to 16 bits is rounded here, so only the order of a norm's sum and the last bit of an exponential differ.
"""

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from kvfold.kernels.common.partials import early_launch
from kvfold.kernels.device import device_info

Rounding = Literal["normed", "whole", "above one"]
"""What of a norm is rounded: what is then multiplied by the weight (Llama); the product alone (OLMo 2, GPT-OSS); the product
with one plus the weight (Gemma)."""
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
OPTIONS = {"enable_fp_fusion": False}
"""A product that is rounded stays so: fused with the sum that follows it would not be."""


def norm_by_definition(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding) -> torch.Tensor:
    """What :func:`rms_norm` computes, in the operations of Transformers' models."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "normed":
        return weight * normed.to(x.dtype)
    return (weight * normed if rounding == "whole" else normed * (1.0 + weight.float())).to(x.dtype)


def rotate_by_definition(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`rotate` computes, in the operations of Transformers' models."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)

    return turned(q), turned(k)


def gated_by_definition(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What :func:`gated` computes, in the operations of Transformers' models."""
    return torch.nn.functional.silu(gate) * up


@triton.jit(do_not_specialize=["eps"])
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, more_ptr, weight_ptr, sum_ptr, out_ptr, eps,
    D: tl.constexpr, DP: tl.constexpr, ROUNDING: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one row of D numbers, or (ADDS) of the sum of two, which is written. DP is D padded to a power of two."""
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, DP)
    inside = at < D
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(more_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        both = (x + more).to(kind)
        tl.store(sum_ptr + row + at, both, mask=inside)
        x = both.to(tl.float32)
    mean = tl.reduce(x * x, 0, tl.standard._sum_combine) * (1.0 / D)
    normed = x * tl.rsqrt(mean + eps)
    if ROUNDING == "normed":
        normed = normed.to(kind).to(tl.float32)
    if ROUNDING == "above one":
        weight = weight + 1.0
    tl.store(out_ptr + row + at, (normed * weight).to(kind), mask=inside)


@triton.jit(do_not_specialize=["heads"])
def _rotate_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out, k_out, q_batch, q_head, k_batch, k_head, angles, heads,
    D: tl.constexpr, DP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one head of the queries, or after those of the keys, of one sequence. Grid: (heads of both, batch)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, DP)
    inside = at < D
    partner = tl.where(at < D // 2, at + D // 2, at - D // 2)
    if head < heads:
        source = q_ptr + batch * q_batch + head * q_head
        to = q_out + (batch * heads + head) * D
    else:
        source = k_ptr + batch * k_batch + (head - heads) * k_head
        to = k_out + (batch * (tl.num_programs(0) - heads) + head - heads) * D
    kind = q_ptr.dtype.element_ty
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + batch * angles + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + batch * angles + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(at < D // 2, -y, y)
    out = (x * cos).to(kind).to(tl.float32) + (y * sin).to(kind).to(tl.float32)
    tl.store(to + at, out.to(kind), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _gate_kernel(gate_ptr, up_ptr, out_ptr, count, N: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: N numbers."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = at < count
    kind = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, ((gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up).to(kind), mask=inside)


def warps_of(size: int) -> int:
    """Warps of a norm's program."""
    return min(max(triton.next_power_of_2(size) // 256, 1), 8)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding) -> torch.Tensor:
    """``x`` over its root mean square along the last dimension, times ``weight``.

    Parameters
    ----------
    x : Tensor, float16 or bfloat16 [..., size], contiguous
    weight : Tensor, of the same dtype [size]
    eps : float
        Added to the mean square.
    rounding : str
        One of :data:`ROUNDINGS`.

    Returns
    -------
    Tensor, as ``x``
    """
    out = x.new_empty(x.shape)
    _norm(x, None, weight, None, out, eps, rounding)
    return out


def added_norm(
    x: torch.Tensor, more: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding
) -> torch.Tensor:
    """:func:`rms_norm` of ``x + more``, a sum that is written to ``total``; all are shaped like ``x``."""
    out = x.new_empty(x.shape)
    _norm(x, more, weight, total, out, eps, rounding)
    return out


def _norm(
    x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, total: torch.Tensor | None, out: torch.Tensor,
    eps: float, rounding: Rounding,
) -> None:  # fmt: skip
    size, early = x.shape[-1], device_info(x.device).has_pdl
    _norm_kernel[(x.numel() // size,)](
        x, x if more is None else more, weight, out if total is None else total, out, eps, D=size,
        DP=triton.next_power_of_2(size), ROUNDING=rounding, ADDS=more is not None, EARLY=early, num_warps=warps_of(size),
        **early_launch(early), **OPTIONS,
    )  # fmt: skip


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of one token per sequence, rotated: channel ``i`` of the first half with channel ``i`` of the second.

    Parameters
    ----------
    q : Tensor, float16 or bfloat16 [batch, num_heads, 1, head_dim], channels adjacent
    k : Tensor, of the same dtype [batch, num_kv_heads, 1, head_dim], channels adjacent
    cos, sin : Tensor, of the same dtype [batch or 1, 1, head_dim], contiguous

    Returns
    -------
    tuple of Tensor
        As ``q`` and ``k``.
    """
    batch, heads, _, dim = q.shape
    outs, early = (q.new_empty(q.shape), k.new_empty(k.shape)), device_info(q.device).has_pdl
    _rotate_kernel[(heads + k.shape[1], batch)](
        q, k, cos, sin, *outs, q.stride(0), q.stride(1), k.stride(0), k.stride(1), dim if cos.shape[0] > 1 else 0, heads,
        D=dim, DP=triton.next_power_of_2(dim), EARLY=early, num_warps=1, **early_launch(early), **OPTIONS,
    )  # fmt: skip
    return outs


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU of ``gate``, times ``up``.

    Parameters
    ----------
    gate, up : Tensor, float16 or bfloat16, both of one dtype and shape, contiguous

    Returns
    -------
    Tensor, as ``gate``
    """
    out, numbers, early = gate.new_empty(gate.shape), 512, device_info(gate.device).has_pdl
    _gate_kernel[(triton.cdiv(gate.numel(), numbers),)](
        gate, up, out, gate.numel(), N=numbers, EARLY=early, num_warps=4, **early_launch(early), **OPTIONS
    )
    return out
