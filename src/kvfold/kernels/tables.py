"""What launches of kernels with tables in shared memory share: CommVQ's (:mod:`kvfold.kernels.codebook`), VQLLM's
(:mod:`kvfold.kernels.residual`) and TaSQ's (:mod:`kvfold.kernels.groups`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kvfold.formats.packing import UNIT
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.partials import LOG2E, early_launch
from kvfold.kernels.stored import room_between, rotation_of
from kvfold.kernels.windows import program_memory
from kvfold.rope import Rope

MOST_ROWS = 8
"""Query rows of a KV head; with more, products are more work than tables."""


@dataclass(frozen=True, kw_only=True)
class TablesPlan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    columns : int
        Query rows of a program, 4 or 8.
    warps, splits : int
    """

    columns: int
    warps: int = 8
    splits: int = 1

    @classmethod
    def of(cls, rows: int) -> "TablesPlan":
        """For a KV head's ``rows`` query rows, not split yet."""
        return cls(columns=4 if rows <= 4 else 8)


def declines(call: AttentionCall, bytes_: int) -> str | None:
    """Why a kernel whose programs take ``bytes_`` of shared memory leaves a call to another; None if it does not."""
    rows, there = call.shape[2], program_memory(call.query.device)
    if rows > MOST_ROWS:
        return f"{rows} query rows; allowed: up to {MOST_ROWS}"
    if call.project is not None or call.first_position is None:
        return "projected queries"
    return None if bytes_ <= there else f"{there} bytes of shared memory; needed: {bytes_}"


@lru_cache
def make_plan(jobs: int, rows: int, units: int, processors: int, begin: int) -> TablesPlan:
    """Choose a launch shape for ``jobs`` KV heads of ``rows`` query rows and storage of ``units`` units; ``begin``: what
    beginning costs, in units of a warp."""
    plan = TablesPlan.of(rows)
    jobs *= math.ceil(rows / plan.columns)

    def cost(splits: int) -> float:
        each = math.ceil(math.ceil(units / splits) / plan.warps)
        return math.ceil(jobs * splits / processors) * (each + begin)

    return replace(plan, splits=min(range(1, max(2, min(256, units // 8))), key=cost))


def plan_of(call: AttentionCall, span: Span, begin: int) -> TablesPlan:
    """Choose a launch shape for a call over one span; ``begin`` as of :func:`make_plan`."""
    batch, heads, rows, _ = call.shape
    units = span.keys["codes"].shape[2] * call.key_format.block // UNIT
    return make_plan(batch * heads, rows, units, multiprocessors(call.query.device), begin)


@lru_cache(maxsize=64)
def unit_turns(rope: Rope, device: torch.device, order: tuple[int, ...]) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes read them from shared memory, fp16 [tokens, 4, 4, 2, 4].

    ``order``: which of (cosine or sine, token, and the three digits to base 4 of a pair's number) come as token, i, lane of
    four, cosine or sine, and m. Odd tokens have i 0 and 1, and 2 and 3, the other way round.
    """
    table = rotation_of(rope, 64, UNIT, 1, 128, device).table  # [2, tokens, 64]
    parts = table.view(2, UNIT, 4, 4, 4).permute(order)
    odd = torch.arange(UNIT, device=device) % 2 == 1
    return torch.where(odd.view(-1, 1, 1, 1, 1), parts[:, [1, 0, 3, 2]], parts).contiguous()


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
    kernel[(batch * heads * columns, plan.splits)](
        packed.contiguous(),
        *read,
        call.packed_len,
        call.first_position,
        out,
        top,
        total,
        float(call.scale) * LOG2E,
        heads,
        rows,
        columns,
        span.start,
        room.pop() // UNIT,
        plan.splits,
        top.shape[1],
        part,
        **constants,
        EARLY=early,
        num_warps=plan.warps,
        **early_launch(early),
    )
