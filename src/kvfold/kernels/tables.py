"""What launches of kernels with tables in shared memory share: CommVQ's (:mod:`kvfold.kernels.codebook`) and VQLLM's
(:mod:`kvfold.kernels.residual`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.formats.packing import UNIT
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.partials import LOG2E, early_launch
from kvfold.kernels.stored import room_between
from kvfold.kernels.windows import program_memory

MOST_ROWS = 8
"""Query rows of a KV head; with more, products are more work than tables."""
CHUNK = 32
"""Units of a warp between two changes of tables."""


@dataclass(frozen=True, kw_only=True)
class TablesPlan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    columns : int
        Query rows of a program, 4 or 8.
    warps, splits, chunk : int
    registers : int or None
        Most of a thread.
    kept : bool
        Whether lanes keep the cosines and sines of a tile's tokens, or read them from shared memory.
    """

    columns: int
    warps: int = 8
    splits: int = 1
    chunk: int = CHUNK
    registers: int | None = None
    kept: bool = False


def declines(call: AttentionCall, bytes_: int) -> str | None:
    """Why a kernel whose programs take ``bytes_`` of shared memory leaves a call to another; None if it does not."""
    rows, there = call.shape[2], program_memory(call.query.device)
    if rows > MOST_ROWS:
        return f"{rows} query rows; allowed: up to {MOST_ROWS}"
    if call.project is not None or call.first_position is None:
        return "projected queries"
    return None if bytes_ <= there else f"{there} bytes of shared memory; needed: {bytes_}"


def splits_of(plan: TablesPlan, jobs: int, rows: int, units: int, processors: int, passes: int, begin: int) -> int:
    """Programs of a KV head's ``rows`` query rows, of ``jobs`` such heads, over storage of ``units`` units.

    A unit is read ``passes`` times; ``begin`` is what beginning costs, in units of a warp.
    """
    jobs *= math.ceil(rows / plan.columns)

    def cost(splits: int) -> float:
        each = math.ceil(math.ceil(units / splits) / plan.warps)
        return math.ceil(jobs * splits / processors) * (each * passes + begin)

    return min(range(1, max(2, min(256, units // 8))), key=cost)


def shape_of(call: AttentionCall, span: Span) -> tuple[int, int, int, int]:
    """KV heads of all sequences, query rows of one, units of storage, and multiprocessors of the device."""
    batch, heads, rows, _ = call.shape
    return (
        batch * heads,
        rows,
        span.keys["codes"].shape[2] * call.key_format.block // UNIT,
        multiprocessors(call.query.device),
    )


def launch(
    kernel: Any,
    call: AttentionCall,
    span: Span,
    packed: torch.Tensor,
    read: Sequence[torch.Tensor],
    out: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    part: int,
    plan: TablesPlan,
    passes: int,
    early: bool = False,
    **constants: Any,
) -> None:
    """Write partial results over one span to the parts ``part`` to ``part + plan.splits``; as of
    :class:`kvfold.kernels.partials.Partials`. ``read``: stored fields and tables, in the order of the kernel's arguments;
    ``early``: the kernel waits by itself for the one before, and lets the next one start.

    Raises
    ------
    ValueError
        If keys and values have room for different numbers of tokens.
    """
    batch, heads, rows, _ = packed.shape
    room = {room_between(f, x) for f, x in ((call.key_format, span.keys), (call.value_format, span.values))}
    if len(room) > 1:
        raise ValueError(f"packed storage: keys and values have room for {sorted(room)} tokens; allowed: as many")
    columns = math.ceil(rows / plan.columns)
    programs = batch * heads * columns * plan.splits
    kept = programs * plan.warps * plan.chunk * 256 if passes > 1 else 0
    kernel[(batch * heads * columns, plan.splits)](
        packed.contiguous(),
        *read,
        call.packed_len,
        call.first_position,
        out,
        top,
        total,
        torch.empty(kept, dtype=torch.float32, device=packed.device),
        float(call.scale) * LOG2E,
        heads,
        rows,
        columns,
        span.start,
        room.pop() // UNIT,
        plan.splits,
        top.shape[1],
        part,
        plan.chunk,
        **constants,
        EARLY=early,
        num_warps=plan.warps,
        maxnreg=plan.registers,
        **early_launch(early),
    )
