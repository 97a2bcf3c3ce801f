"""Pieces of packed tokens where pages hold uniform codes for tensor cores (fold): launches the Gluon kernel."""

import math

import torch

from kvfold.formats import Fields, Format, Paged
from kvfold.kernels import pages
from kvfold.kernels.decode import STATIC_SHARED, Plan
from kvfold.kernels.paged._fold import fold_pieces_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.work import Workspace


def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why the kernel cannot read these formats; None if it can."""
    return pages.unsupported(key_format, value_format)


def make_plan(key_format: Paged, value_format: Paged, rows: int) -> tuple[Plan, int]:
    """A program's shape, and how many of them a multiprocessor holds."""
    dim = key_format.head_dim
    tiles = 2 if rows > 8 and dim < 128 else 1
    columns = math.ceil(rows / (8 * tiles))
    registers = pages.REGISTERS.get(dim)
    shapes = [Plan(warps, pages.BLOCKS, tiles, columns, 1, 0, False, registers) for warps in (4, 2, 1)]
    plan = next(s for s in shapes if pages.program_bytes(key_format, value_format, s) <= STATIC_SHARED)
    threads = 64 * 1024 // ((registers or 255) + 1) // 32 * 32
    size = pages.program_bytes(key_format, value_format, plan)
    return plan, max(1, min(threads // (32 * plan.warps), 227 * 1024 // (size + 1024)))


def pieces(call: PagedCall, query: torch.Tensor, rows: int, workspace: Workspace) -> None:
    """Write the parts of all pieces of packed tokens."""
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, Paged) and isinstance(values, Paged)
    step, dim = call.step, keys.head_dim
    if query.stride(1) != dim:
        query = query.contiguous()
    plan, resident = make_plan(keys, values, rows)
    k = _arrays(keys, call.keys)
    v = _arrays(values, call.values)[:3]
    page_step, head_step = byte_steps((*k, *v))
    fold_pieces_kernel[(workspace.processors * resident,)](
        query,
        query.stride(0),
        step.query_start,
        step.seq_lens,
        workspace.before,
        workspace.sink,
        workspace.packed,
        workspace.piece,
        workspace.items,
        workspace.item_list,
        step.table,
        step.table.stride(0),
        *k,
        pages._signs(keys, workspace.top),
        *v,
        pages._signs(values, workspace.top),
        page_step,
        head_step,
        workspace.out,
        workspace.top,
        workspace.total,
        float(call.scale),
        call.num_kv_heads,
        rows,
        step.max_query_len,
        plan.columns,
        step.seqs,
        **pages.constants(keys, values, plan, query.dtype == torch.bfloat16, False),
        num_warps=plan.warps,
        maxnreg=plan.registers,
    )


def _arrays(form: Paged, stored: Fields) -> tuple[torch.Tensor, ...]:
    """Codes, scales, means and norms; what is not there stands for itself in another tensor, and is never read."""
    names = ("codes", "scale", "mean" if form.mean else "scale", "norm" if form.norm else "codes")
    return tuple(stored[name] for name in names)


def byte_steps(fields: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Bytes from a page, and from a head, to the next: the same for all fields."""
    steps = {(t.stride(0) * t.element_size(), t.stride(1) * t.element_size()) for t in fields}
    if len(steps) > 1:
        raise ValueError(f"pages: fields have strides of {sorted(steps)} bytes; allowed: views of one region")
    return steps.pop()
