"""One row times a weight: products of a decode step, whose weights are on their way before the row is there.

Torch's kernels begin to read a weight when the kernel before has ended, and end program by program while nothing else runs.
From sm_90 on these are launched while the kernel before still runs: a program asks for its weights, waits for that kernel's
end, and then reads the row. Products are summed in float32, in another order than Torch's.
"""

from typing import NamedTuple

import torch
import triton

from kvfold.engines.transformers.ops._row import row_kernel, three_kernel
from kvfold.kernels.common.partials import early_launch
from kvfold.kernels.device import device_info


class Plan(NamedTuple):
    """Rows of the weight that a program takes, channels it reads at once, how many of those before it waits, and warps."""

    rows: int
    channels: int
    ahead: int
    warps: int


def make_plan(channels: int, gated: bool) -> Plan:
    """A launch shape for weights of so many channels. Up to 4,096 of them are all asked for before a program waits."""
    long = 2048 < channels <= 4096 or (gated and channels > 4096)
    rows, part, warps = (1, 1024, 4) if long else (1 if gated else 2, 512, 2)
    part = min(part, triton.next_power_of_2(channels))
    return Plan(rows, part, min(4, triton.cdiv(channels, part)), warps)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor | None, bias: torch.Tensor | None, plan: Plan | None
) -> torch.Tensor:
    count, channels = weight.shape
    plan = plan or make_plan(channels, other is not None)
    out, early = x.new_empty(*x.shape[:-1], count), device_info(x.device).has_pdl
    row_kernel[(triton.cdiv(count, plan.rows),)](
        x, weight, weight if other is None else other, weight if bias is None else bias, out, count, K=channels, R=plan.rows,
        C=plan.channels, AHEAD=plan.ahead, HAS_BIAS=bias is not None, GATED=other is not None, EARLY=early,
        num_warps=plan.warps, **early_launch(early),
    )  # fmt: skip
    return out


def row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, plan: Plan | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` of one row.

    Parameters
    ----------
    x : Tensor, float16 or bfloat16 [..., channels], one row, contiguous
    weight : Tensor, of the same dtype [count, channels], contiguous, rows of a multiple of 16 bytes
    bias : Tensor or None, of the same dtype [count]
    plan : Plan or None
        Another launch shape than the one that is chosen.

    Returns
    -------
    Tensor [..., count]
    """
    return _launch(x, weight, None, bias, plan)


def gated_row_product(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, plan: Plan | None = None) -> torch.Tensor:
    """SiLU of ``x @ gate.T``, times ``x @ up.T``, of one row; otherwise as :func:`row_product`."""
    return _launch(x, gate, up, None, plan)


def three_row_products(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], plan: Plan | None = None
) -> tuple[torch.Tensor, ...]:
    """:func:`row_product` of one row and three weights in one launch, with three biases or none: queries, keys and values.

    Returns
    -------
    tuple of Tensor [..., count], which lie one after the other
    """
    counts, channels = [len(w) for w in weights], x.shape[-1]
    plan = plan or make_plan(channels, False)
    out, early = x.new_empty(*x.shape[:-1], sum(counts)), device_info(x.device).has_pdl
    more = [weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    three_kernel[(sum(triton.cdiv(count, plan.rows) for count in counts),)](
        x, *weights, *more, out, *counts, K=channels, R=plan.rows, C=plan.channels, AHEAD=plan.ahead,
        HAS_BIAS=biases[0] is not None, EARLY=early, num_warps=plan.warps, **early_launch(early),
    )  # fmt: skip
    return out.split(counts, -1)
