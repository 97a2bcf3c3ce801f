"""Decode attention over keys under a map and rotated 2-bit values (NOVA-KV); see :mod:`kvfold.kernels.mapped._decode`."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Format, GroupCodes, Hadamard, Paged
from kvfold.formats.basis import Basis
from kvfold.formats.packing import UNIT
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.common.partials import LOG2E, early_launch
from kvfold.kernels.device import device_info
from kvfold.kernels.learned.decode import key_rows
from kvfold.kernels.mapped._decode import mapped_kernel, shared_bytes
from kvfold.kernels.stored import inner, room_of

HEAD_DIM = 128
MOST_ROWS = 16
"""Query rows of a KV head; each eight of them read all tokens."""
WARPS, REGISTERS = 16, 128
"""Of a program, and of a thread at most: one program has room on a multiprocessor."""


@dataclass(frozen=True)
class Plan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    splits : int
        Parts of a span's tokens.
    units : int
        Units of 32 tokens of a warp's stage: two, or one where each warp has few of them.
    """

    splits: int
    units: int


def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why the kernel does not serve these formats; None if it does."""
    if not isinstance(key_format, GroupCodes):
        return f"keys: {key_format.kind} storage; allowed: {GroupCodes.kind}"
    if (key_format.head_dim, key_format.vector, key_format.codes) != (HEAD_DIM, 4, 256):
        return (
            f"keys: {key_format.describe()} of {key_format.head_dim}; allowed: 256 codes for 4 channels of {HEAD_DIM}"
        )
    if key_format.strided or key_format.centred:
        return "keys: strided groups, or less a mean; allowed: groups of neighbours"
    if key_format.book is None:
        return "keys: no codebook"
    own = inner(value_format)
    if not isinstance(own, AffineGroups) or (isinstance(value_format, Paged) and value_format.page_fields()):
        return f"values: {own.kind} storage; allowed: {AffineGroups.kind}"
    if (own.operand, own.bits_per_code, own.mode) != ("plain", 2, "asym"):
        return f"values: {own.bits_per_code} bits, mode={own.mode}, operand={own.operand}; allowed: 2, asym, plain"
    if (own.axis, own.group) != ("channel", HEAD_DIM):
        return f"values: groups of {own.group} along {own.axis}s; allowed: of {HEAD_DIM} along channels"
    if not isinstance(_basis(value_format), Hadamard | None):
        return "values: a basis that is no Hadamard rotation"
    for side, form in (("keys", key_format), ("values", value_format)):
        if form.block % UNIT:
            return f"{side}: blocks of {form.block} tokens; allowed: multiples of {UNIT}"
    return None


def no_room(rows: int, device: torch.device) -> str | None:
    """Why the kernel leaves ``rows`` query rows of a KV head to another; None if it does not."""
    if rows > MOST_ROWS:
        return f"{rows} query rows; allowed: up to {MOST_ROWS}"
    needs, there = program_bytes(), device_info(device).shared_memory
    return None if needs <= there else f"{there} bytes of shared memory; needed: {needs}"


def _basis(form: Format) -> Basis | None:
    return form.basis if isinstance(form, Paged) else None


def program_bytes(units: int = 2) -> int:
    """Bytes of shared memory of a program."""
    return int(shared_bytes(WARPS, units))


@lasting()
def make_plan(jobs: int, units: int, processors: int) -> Plan:
    """Choose a launch shape for ``jobs`` KV heads (times eights of query rows) and storage of ``units`` units.

    Stages of two units save a warp about 5 % of the time, once it has several. Beginning, of
    which a table is the largest part, is worth six units.
    """

    def cost(plan: Plan) -> float:
        each = math.ceil(math.ceil(math.ceil(units / plan.units) / plan.splits) / WARPS)
        own = 1.9 * each + 0.4 if plan.units == 2 else 1.03 * each
        return math.ceil(jobs * plan.splits / processors) * (own + 6)

    plans = (Plan(splits, size) for size in (2, 1) for splits in range(1, max(2, min(256, units // 4 + 1))))
    return min(plans, key=cost)


class MappedTiles:
    """What reads packed spans of keys under a map; see :func:`kvfold.kernels.generic.decode.attend`. It takes queries through
    the map itself, where the call has one."""

    def early(self, call: AttentionCall) -> bool:
        return device_info(call.query.device).has_pdl

    def plan_of(self, call: AttentionCall, span: Span) -> Plan:
        """Choose a launch shape for a call over one span."""
        batch, heads, rows, _ = call.shape
        jobs = batch * heads * math.ceil(rows / 8)
        return make_plan(jobs, _units(call, span), device_info(call.query.device).sms)

    def attend_packed(
        self,
        call: AttentionCall,
        span: Span,
        packed: torch.Tensor,
        out: torch.Tensor,
        top: torch.Tensor,
        total: torch.Tensor,
        part: int,
        plan: Plan,
    ) -> None:
        """Write partial results over one span to the parts ``part`` to ``part + plan.splits``; as of
        :class:`kvfold.kernels.common.partials.Partials`.

        Raises
        ------
        ValueError
            If keys and values have room for different numbers of tokens.
        """
        queries, bias = call.projected
        batch, heads, rows, _ = queries.shape
        keys, values = call.key_format, call.value_format
        assert isinstance(keys, GroupCodes) and keys.book is not None
        room = room_of((keys, span.keys), (values, span.values))
        if bias is None:
            bias = torch.zeros(batch, heads, rows, dtype=torch.float32, device=queries.device)
        basis, columns, early = _basis(values), math.ceil(rows / 8), self.early(call)
        mapped_kernel[(batch * heads * columns, plan.splits)](
            queries.contiguous(),
            bias.contiguous(),
            span.keys["codes"],
            span.keys["rms"],
            span.values["codes"].view(torch.uint8),
            span.values["meta"],
            key_rows(keys.book.on(queries.device)),
            basis.signs(queries.device) if isinstance(basis, Hadamard) else total,
            call.packed_len,
            out,
            top,
            total,
            float(call.scale) * LOG2E,
            heads,
            rows,
            columns,
            span.start,
            _units(call, span),
            room // UNIT,
            plan.splits,
            part,
            top.shape[1],
            **constants(values, plan),
            EARLY=early,
            num_warps=WARPS,
            maxnreg=REGISTERS,
            **early_launch(early),
        )


def _units(call: AttentionCall, span: Span) -> int:
    return span.keys["codes"].shape[2] * call.key_format.block // UNIT


def constants(value_format: Format, plan: Plan) -> dict[str, Any]:
    """What the kernel is specialized on."""
    basis = _basis(value_format)
    return {"MIX": basis.block if isinstance(basis, Hadamard) else 1, "UNITS": plan.units}
