"""Updates of the pages that a step completes, from the queries of their own tokens: a launch a layer, before it stores."""

import math

import torch
import triton

from kvfold.formats.paged import PAGE
from kvfold.kernels.paged._follow import follow_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.work import Workspace

DIMS = (64, 128)
WARPS = 8
MOST = 16.0
"""Largest weight: the inverse is found in float32."""


def unsupported(head_dim: int, width: int, rank: int, lam: float) -> str | None:
    """Why the kernel does not make such updates; None if it does."""
    if head_dim not in DIMS:
        return f"head_dim={head_dim} with a page's own queries; allowed: {', '.join(map(str, DIMS))}"
    if width * 2 != head_dim:
        return f"channels={width} with a page's own queries; allowed: half of head_dim={head_dim}"
    if rank:
        return f"rank={rank} with a page's own queries; allowed: 0, all directions"
    if lam > MOST:
        return f"lam={lam:g} with a page's own queries; allowed: up to {MOST:g}"
    return None


def rounds(head_dim: int, lam: float) -> int:
    """Of Newton's iteration: eigenvalues lie between 1 and ``1 + lam head_dim``, and errors are squared in each."""
    return math.ceil(math.log2(16 * (1 + lam * head_dim))) + 1


def follow(call: PagedCall, workspace: Workspace) -> torch.Tensor:
    """Append the step's queries to the windows, and make the updates of pages that the step completes.

    Returns
    -------
    Tensor, float32 [most pages, num_kv_heads, width, width]
        In the order of the workspace's list. Overwritten by the next layer.
    """
    following, window, query, step = call.following, call.window_queries, call.query, call.step
    assert following is not None and window is not None
    if query is None:
        raise ValueError("query: storing needs it where pages follow their queries")
    dim, heads = window.shape[3], call.num_kv_heads
    if why := unsupported(dim, following.width, following.rank, following.lam):
        raise ValueError(f"store: {why}")
    most, side = workspace.slots.shape[0] // PAGE + workspace.before.shape[0], following.width
    if workspace.updates.numel() < most * heads * side * side:
        raise ValueError(f"workspace: made without room for updates of {heads} heads of {side} channels")
    query = query if query.stride(-1) == 1 else query.contiguous()
    follow_kernel[(2 * workspace.processors,)](
        window,
        *window.stride()[:3],
        query,
        *query.stride()[:2],
        step.query_start,
        step.window_table,
        step.window_table.stride(0),
        workspace.before,
        workspace.closes,
        workspace.close_list,
        workspace.slots,
        workspace.updates,
        step.seqs,
        heads,
        float(following.lam),
        GROUP=query.shape[1] // heads,
        D=dim,
        WIDTH=side,
        WINDOW_BLOCK=step.window_block,
        ROUNDS=rounds(dim, following.lam),
        H=triton.next_power_of_2(heads),
        num_warps=WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return workspace.updates


__all__ = ["follow", "unsupported"]
