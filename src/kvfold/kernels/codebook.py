"""Decode attention over CommVQ's storage: tables of a KV head in shared memory; see :mod:`kvfold.kernels._codebook_gluon`."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kvfold.formats import Format
from kvfold.formats.codebook import AdditiveCodes, BinaryCodes
from kvfold.formats.packing import UNIT
from kvfold.kernels._codebook_gluon import codebook_kernel, shared_bytes
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.partials import LOG2E
from kvfold.kernels.readers.additive import tables_of
from kvfold.kernels.stored import room_between, rotation_of
from kvfold.kernels.windows import program_memory

MOST = 11
"""Stages whose tables fit shared memory."""
MOST_ROWS = 8
"""Query rows of a KV head; with more, products are more work than tables."""
SEEN = frozenset({(11, 128), (21, 256)})
"""Stages of keys and bits of values whose numbers a run on a GPU has shown right."""
CHUNK = 32
"""Units of a warp between two changes of tables."""


@dataclass(frozen=True)
class Plan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    columns : int
        Query rows of a program, 4 or 8.
    stages : int
        Whose tables lie in shared memory at once.
    warps, splits, chunk : int
    unrolled : bool
        Whether the loop over stages is.
    registers : int or None
        Most of a thread.
    kept : bool
        Whether lanes keep the cosines and sines of a tile's tokens, or read them from shared memory.
    """

    columns: int
    stages: int
    warps: int
    splits: int
    chunk: int = CHUNK
    unrolled: bool = False
    registers: int | None = None
    kept: bool = False


def unsupported(key_format: Format, value_format: Format, rotary: int) -> str | None:
    """Why the kernel does not serve these formats; None if it does."""
    if not isinstance(key_format, AdditiveCodes):
        return f"keys: {key_format.kind} storage; allowed: {AdditiveCodes.kind}"
    if not isinstance(value_format, BinaryCodes) or value_format.joint > 1:
        return f"values: {value_format.kind} storage; allowed: {BinaryCodes.kind}, of every head its own"
    if key_format.head_dim != 128 or value_format.codes not in (128, 256):
        return f"head_dim={key_format.head_dim}, {value_format.codes} bits of values; allowed: 128, and 128 or 256"
    if key_format.levels != 64:
        return f"keys: levels={key_format.levels}; allowed: 64"
    if rotary != 128 or key_format.codebook is None or key_format.codebook.rotary != 128:
        return f"keys: RoPE of {rotary} channels; allowed: 128"
    if value_format.operand != "plain":
        return f"values: operand={value_format.operand}; allowed: plain"
    return None


def declines(call: AttentionCall) -> str | None:
    """Why the kernel leaves a call on such formats to another; None if it does not."""
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, AdditiveCodes) and isinstance(values, BinaryCodes)
    if (keys.stages, values.codes) not in SEEN:
        return f"{keys.stages} stages, {values.codes} bits of values: not seen right on a GPU yet"
    rows, bytes_ = call.rows.shape[2], program_memory(call.rows.device)
    if rows > MOST_ROWS:
        return f"{rows} query rows; allowed: up to {MOST_ROWS}"
    if call.project is not None or call.first_position is None:
        return "projected queries"
    need = program_bytes(values, _shape(keys.stages, rows, 1))
    return None if need <= bytes_ else f"{bytes_} bytes of shared memory; needed: {need}"


def _shape(stages: int, rows: int, splits: int) -> Plan:
    passes = math.ceil(stages / MOST)  # of several, unrolled loops would be too long for the cache of instructions
    kept = passes > 1 and rows <= 4  # an unrolled loop has no registers for them
    return Plan(4 if rows <= 4 else 8, math.ceil(stages / passes), 8, splits, unrolled=passes == 1, kept=kept)


@lru_cache
def make_plan(stages: int, jobs: int, rows: int, units: int, processors: int) -> Plan:
    """Choose a launch shape for ``jobs`` KV heads of ``rows`` query rows and storage of ``units`` units."""
    plan = _shape(stages, rows, 1)
    passes = math.ceil(stages / plan.stages)
    begin = 6 + 4 * passes  # what beginning costs, in units of a warp
    jobs *= math.ceil(rows / plan.columns)

    def cost(splits: int) -> float:
        each = math.ceil(math.ceil(units / splits) / plan.warps)
        return math.ceil(jobs * splits / processors) * (each * passes + begin)

    return replace(plan, splits=min(range(1, max(2, min(256, units // 8))), key=cost))


def plan_of(call: AttentionCall, span: Span) -> Plan:
    batch, heads, rows, _ = call.rows.shape
    form = call.key_format
    assert isinstance(form, AdditiveCodes)
    units = span.keys["codes"].shape[2] * form.block // UNIT
    return make_plan(form.stages, batch * heads, rows, units, multiprocessors(call.rows.device))


def attend_packed(
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
    :class:`kvfold.kernels.partials.Partials`."""
    form, rope = call.key_format, call.rope
    assert isinstance(form, AdditiveCodes) and form.codebook is not None and rope is not None
    batch, heads, rows, _ = packed.shape
    device = packed.device
    room = {room_between(f, x) for f, x in ((form, span.keys), (call.value_format, span.values))}
    if len(room) > 1:
        raise ValueError(f"packed storage: keys and values have room for {sorted(room)} tokens; allowed: as many")
    table, size = tables_of(form.codebook.on(device))
    turning = rotation_of(rope, 64, UNIT, 1, 128, device)
    columns = math.ceil(rows / plan.columns)
    programs = batch * heads * columns * plan.splits
    kept = programs * plan.warps * plan.chunk * 256 if plan.stages < form.stages else 0
    scratch = torch.empty(kept, dtype=torch.float32, device=device)
    codebook_kernel[(batch * heads * columns, plan.splits)](
        packed.float().contiguous(),
        span.keys["codes"],
        span.keys["rms"],
        span.values["bits"],
        table,
        size,
        turning.freq,
        turning.table,
        call.packed_len,
        call.first_position,
        out,
        top,
        total,
        scratch,
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
        **constants(form, call.value_format, plan),
        num_warps=plan.warps,
        maxnreg=plan.registers,
    )


def constants(keys: AdditiveCodes, values: Format, plan: Plan) -> dict[str, Any]:
    """What the kernel is specialized on."""
    assert isinstance(values, BinaryCodes)
    named = {"STAGES": keys.stages, "PASS": plan.stages, "V": values.codes, "C": plan.columns}
    return named | {"UNROLLED": plan.unrolled, "KEPT": plan.kept}


def program_bytes(values: BinaryCodes, plan: Plan) -> int:
    """Bytes of shared memory of a program."""
    return int(shared_bytes(plan.stages, values.codes, plan.columns, plan.warps, plan.kept))
