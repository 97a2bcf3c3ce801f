"""What kernels with tables in shared memory share: CommVQ's (:mod:`kvfold.kernels.commvq.decode`) and that of TaSQ's keys with
fold's values (:mod:`kvfold.kernels.learned.decode`)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Format
from kvfold.formats.packing import UNIT
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.common.partials import LOG2E, early_launch
from kvfold.kernels.device import device_info
from kvfold.kernels.stored import room_of
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


@lasting()
def make_plan(jobs: int, plan: TablesPlan, rows: int, units: int, processors: int, begin: int) -> TablesPlan:
    """Split ``plan`` for ``jobs`` KV heads of ``rows`` query rows and storage of ``units`` units, of which warps take one at a
    time; ``begin``: what beginning costs, in units of a warp."""
    jobs *= math.ceil(rows / plan.columns)

    def cost(splits: int) -> float:
        each = math.ceil(math.ceil(units / splits) / plan.warps)
        return math.ceil(jobs * splits / processors) * (each + begin)

    return replace(plan, splits=min(range(1, max(2, min(256, units // 8))), key=cost))


class Tables(ABC):
    """The kernel over one kind of storage: what it reads there and beside it, and what it is compiled for."""

    begin: ClassVar[int]
    """What beginning costs a program, in units of a warp."""
    waits: ClassVar[bool]
    """Whether the kernel waits by itself for the one before, and lets the next one start."""
    value_fields: ClassVar[tuple[str, ...]]
    """What it reads of stored values; of keys it reads codes and "rms"."""

    @abstractmethod
    def foreign(self, key_format: Format, value_format: Format) -> str | None:
        """Why the kernel does not read these formats; None if it does."""

    def unseen(self, key_format: Format, value_format: Format) -> str | None:
        """Which numbers no run on a GPU has shown right, of formats that it reads; None if all have been."""
        return None

    @abstractmethod
    def kernel(self) -> Any:
        """What is launched over slabs."""

    @abstractmethod
    def constants(self, key_format: Format, value_format: Format, plan: TablesPlan) -> dict[str, Any]:
        """What the kernel is specialized on, over slabs and over pages."""

    def shape(self, rows: int) -> TablesPlan:
        """Launch shape for a KV head's ``rows`` query rows, not split yet."""
        return TablesPlan(columns=4 if rows <= 4 else 8)

    @abstractmethod
    def program_bytes(self, key_format: Format, value_format: Format, plan: TablesPlan) -> int:
        """Bytes of shared memory of a program."""

    @abstractmethod
    def beside(
        self, key_format: Format, value_format: Format, rope: Rope, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """What the kernel reads beside storage, in the order of its arguments; made once: graphs know where it is."""

    def unsupported(self, key_format: Format, value_format: Format, rotary: int) -> str | None:
        """Why the kernel does not serve these formats, with RoPE of ``rotary`` channels; None if it does."""
        if why := self.foreign(key_format, value_format) or self.unseen(key_format, value_format):
            return why
        return None if rotary == 128 else f"keys: RoPE of {rotary} channels; allowed: 128"

    def no_room(self, key_format: Format, value_format: Format, rows: int, device: torch.device) -> str | None:
        """Why the kernel leaves ``rows`` query rows of a KV head to another; None if it does not."""
        if rows > MOST_ROWS:
            return f"{rows} query rows; allowed: up to {MOST_ROWS}"
        needs, there = self.program_bytes(key_format, value_format, self.shape(rows)), device_info(device).shared_memory
        return None if needs <= there else f"{there} bytes of shared memory; needed: {needs}"

    def declines(self, call: AttentionCall) -> str | None:
        """Why the kernel leaves a call on formats that it serves to another; None if it does not."""
        if call.project is not None or call.first_position is None:
            return "projected queries"
        return self.no_room(call.key_format, call.value_format, call.shape[2], call.query.device)

    def early(self, call: AttentionCall) -> bool:
        """Whether the kernel is launched before the one before it ends."""
        return self.waits and device_info(call.query.device).has_pdl

    def plan_of(self, call: AttentionCall, span: Span) -> TablesPlan:
        """Choose a launch shape for a call over one span."""
        batch, heads, rows, _ = call.shape
        units = span.keys["codes"].shape[2] * call.key_format.block // UNIT
        return make_plan(batch * heads, self.shape(rows), rows, units, device_info(call.query.device).sms, self.begin)

    def room(self, call: AttentionCall, span: Span) -> int:
        """Tokens from one KV head's storage to the next one's, of fields that lie as the kernel takes them.

        Raises
        ------
        ValueError
            If keys and values have room for different numbers of tokens.
        """
        return room_of((call.key_format, span.keys), (call.value_format, span.values))

    def attend_packed(
        self,
        call: AttentionCall,
        span: Span,
        packed: torch.Tensor,
        out: torch.Tensor,
        top: torch.Tensor,
        total: torch.Tensor,
        part: int,
        plan: TablesPlan,
    ) -> None:
        """Write partial results over one span to the parts ``part`` to ``part + plan.splits``; as of
        :class:`kvfold.kernels.common.partials.Partials`.

        Raises
        ------
        ValueError
            If keys and values have room for different numbers of tokens.
        """
        keys, values, rope, device = call.key_format, call.value_format, call.rope, packed.device
        assert rope is not None
        batch, heads, rows, _ = packed.shape
        room = self.room(call, span)
        columns = math.ceil(rows / plan.columns)
        early = self.early(call)
        self.kernel()[(batch * heads * columns, plan.splits)](
            packed.contiguous(),
            span.keys["codes"],
            span.keys["rms"],
            *(span.values[name] for name in self.value_fields),
            *self.beside(keys, values, rope, device),
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
            room // UNIT,
            plan.splits,
            top.shape[1],
            part,
            **self.constants(keys, values, plan),
            EARLY=early,
            num_warps=plan.warps,
            **early_launch(early),
        )
