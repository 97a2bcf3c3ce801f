"""Pieces of packed tokens where codes are packed for tensor cores: launches the Gluon kernels (fold; KIVI, SQuat, InnerQ)."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Fields, Format, Paged
from kvfold.formats.paged import PAGE
from kvfold.kernels.affine import decode
from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.common.partials import early_launch
from kvfold.kernels.device import DeviceInfo, device_info
from kvfold.kernels.fold import decode as pages
from kvfold.kernels.paged._affine import affine_pieces_kernel
from kvfold.kernels.paged._fold import fold_pieces_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.work import Workspace, raw_parts


@lasting(256)
def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why the kernels cannot read these formats; None if one can."""
    kernel = decode if isinstance(key_format, AffineGroups) else pages
    why = kernel.unsupported(key_format, value_format)
    if why is None and (key_format.block > PAGE or PAGE % key_format.block):
        why = f"blocks of {key_format.block} tokens; allowed: those that divide {PAGE}"
    return why


@dataclass(frozen=True)
class Shape:
    """A kernel, how a program of it looks, how many of them a multiprocessor holds, and what it is specialized on."""

    kernel: Any
    plan: Plan
    resident: int
    fixed: dict[str, Any]


@lasting(256)
def shape(key_format: Format, value_format: Format, rows: int, bf16: bool, device: DeviceInfo) -> Shape:
    """What serves formats that :func:`unsupported` has nothing against, with ``rows`` query rows per KV head."""
    if isinstance(key_format, Paged):
        assert isinstance(value_format, Paged)
        plan, resident = paged_plan(key_format, value_format, rows, device)
        fixed = pages.constants(key_format, value_format, plan, bf16, device.has_pdl)
        of_slabs = ("FIRST",)
        return Shape(fold_pieces_kernel, plan, resident, {n: x for n, x in fixed.items() if n not in of_slabs})
    assert isinstance(key_format, AffineGroups) and isinstance(value_format, AffineGroups)
    plan, resident = affine_plan(key_format, value_format, rows, device)
    fixed = decode.constants(key_format, value_format, plan, bf16, False, device.has_pdl)
    return Shape(affine_pieces_kernel, plan, resident, {**fixed})


def pieces(call: PagedCall, query: torch.Tensor, rows: int, workspace: Workspace, out: torch.Tensor) -> None:
    """Write the parts of all pieces of packed tokens; where :func:`reads_windows`, read the others and merge, too."""
    keys, values = call.key_format, call.value_format
    chosen = shape(keys, values, rows, query.dtype == torch.bfloat16, device_info(query.device))
    k, v = arrays(keys, call.keys, True), arrays(values, call.values, False)
    steps, at = region_of((*k, *v))
    stored: tuple[torch.Tensor | int, ...] = (k[0], *steps)
    if isinstance(keys, Paged) and isinstance(values, Paged):
        stored = (*stored, *(pages._signs(form, workspace.top) for form in (keys, values)))
        stored = (*stored, *(pages.rows_of(form, workspace.top, chosen.plan.bytewise > 0) for form in (keys, values)))
    step, w = call.step, workspace
    if query.stride(1) != query.shape[2]:
        query = query.contiguous()
    chosen.kernel[(w.processors * chosen.resident,)](
        query,
        query.stride(0),
        w.items,
        w.item_list,
        step.table,
        step.table.stride(0),
        step.query_start,
        step.seq_lens,
        w.before,
        w.sink,
        w.packed,
        call.window_keys,
        *call.window_keys.stride()[:3],
        call.window_values,
        *call.window_values.stride()[:3],
        step.window_table,
        step.window_table.stride(0),
        *stored,
        w.out,
        w.top,
        w.total,
        w.counters,
        out,
        *out.stride()[:2],
        w.top if call.sinks is None else call.sinks,
        float(call.scale),
        call.num_kv_heads,
        rows,
        step.max_query_len,
        chosen.plan.columns,
        step.seqs,
        raw_parts(step, w) if reads_windows(call) else 1,
        AT=at,
        RAW=step.window_block if reads_windows(call) else 0,
        HAS_SINKS=call.sinks is not None,
        **chosen.fixed,
        num_warps=chosen.plan.warps,
        maxnreg=chosen.plan.registers,
        **early_launch(bool(chosen.fixed["EARLY"])),
    )


def reads_windows(call: PagedCall) -> bool:
    """Whether :func:`pieces` reads a call's raw tokens as well: where they are in the windows, 16 bytes at a time."""
    if call.new_keys is not None or unsupported(call.key_format, call.value_format) is not None:
        return False
    windows = (call.window_keys, call.window_values)
    return all(
        x.element_size() == 2 and x.data_ptr() % 16 == 0 and not any(step % 8 for step in x.stride()[:3])
        for x in windows
    )


def paged_plan(key_format: Paged, value_format: Paged, rows: int, device: DeviceInfo) -> tuple[Plan, int]:
    """A program's shape, and how many of them a multiprocessor holds."""
    dim = key_format.head_dim
    tiles = 2 if rows > 8 and dim < 128 else 1
    columns = math.ceil(rows / (8 * tiles))
    narrow = pages.bytewise(key_format, value_format, rows)
    shapes = [Plan(w, pages.BLOCKS, tiles, columns, 1, 0, bytewise=narrow) for w in (4, 2, 1)]
    most = pages.most_bytes(key_format, value_format)
    plan = next(s for s in shapes if pages.program_bytes(key_format, value_format, s) <= most)
    registers, resident = pages.residence(key_format, value_format, plan, device)
    return replace(plan, registers=registers), resident


def affine_plan(
    key_format: AffineGroups, value_format: AffineGroups, rows: int, device: DeviceInfo
) -> tuple[Plan, int]:
    """The same for affine groups."""
    plan = decode.make_plan(key_format, value_format, 1 << 12, rows, 1 << 12, 0, device, splits=1)
    resident = decode._resident(key_format, value_format, plan.warps, plan.blocks, device)
    if plan.registers is None and plan.tiles == 1:  # the loop over pieces must not cost a slab's warps
        most = device.registers // (32 * plan.warps * resident) // 8 * 8
        plan = replace(plan, registers=most if most < 255 else None)
    return plan, resident


def arrays(form: Format, stored: Fields, is_key: bool) -> list[torch.Tensor]:
    """A side's fields as the kernels take them, of keys norms as well; what is not there stands for itself in another tensor,
    and is never read."""
    if isinstance(form, Paged):
        scale = pages.scale_of(form)
        names = ["codes", scale, "mean" if form.mean else scale]
        if is_key:
            names.append("norm" if form.norm else "codes")
    else:
        assert isinstance(form, AffineGroups)
        names = ["codes", "meta", "codes"] if form.mode == "asym" else ["codes", "scale", "aux"]
    return [stored[name] for name in names]


def region_of(fields: tuple[torch.Tensor, ...]) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Bytes from a page, and from a head, to the next, the same for all fields; and from the first field to the others."""
    # strides of a dimension of one say nothing
    steps = {tuple(t.stride(i) * t.element_size() if t.shape[i] > 1 else 0 for i in (0, 1)) for t in fields}
    if len(steps) > 1:
        raise ValueError(f"pages: fields have strides of {sorted(steps)} bytes; allowed: views of one region")
    ((page, head),) = steps
    return (page, head), tuple(t.data_ptr() - fields[0].data_ptr() for t in fields[1:])
