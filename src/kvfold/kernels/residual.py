"""Decode attention over VQLLM's storage: tables in shared memory; see :mod:`kvfold.kernels._residual_gluon`."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvfold.formats import Format, ResidualCodes
from kvfold.formats.packing import UNIT
from kvfold.formats.residual import Codebook
from kvfold.kernels._residual_gluon import residual_kernel, shared_bytes
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.partials import LOG2E
from kvfold.kernels.stored import room_between, rotation_of
from kvfold.kernels.windows import program_memory
from kvfold.rope import Rope

MOST_ROWS = 8
"""Query rows of a KV head; with more, products are more work than tables."""
SEEN = frozenset({(4, 4), (8, 8)})
"""Stages of keys and of values whose numbers a run on a GPU has shown right."""
CHUNK = 32
"""Units of a warp between two changes of tables."""


@dataclass(frozen=True)
class Plan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    columns : int
        Query rows of a program, 4 or 8.
    both : bool
        Whether the tables of keys and of values lie in shared memory together.
    warps, splits, chunk : int
    registers : int or None
        Most of a thread.
    kept : bool
        Whether lanes keep the cosines and sines of a tile's tokens, or read them from shared memory.
    """

    columns: int
    both: bool
    warps: int
    splits: int
    chunk: int = CHUNK
    registers: int | None = None
    kept: bool = False


def unsupported(key_format: Format, value_format: Format, rotary: int) -> str | None:
    """Why the kernel does not serve these formats; None if it does."""
    for side, form in (("keys", key_format), ("values", value_format)):
        if not isinstance(form, ResidualCodes):
            return f"{side}: {form.kind} storage; allowed: {ResidualCodes.kind}"
        if (form.head_dim, form.vector, form.codes) != (128, 32, 256):
            return f"{side}: {form.describe()} of {form.head_dim}; allowed: 256 codes for 32 channels of 128"
        if form.block % UNIT:
            return f"{side}: blocks of {form.block} tokens; allowed: multiples of {UNIT}"
        if form.stages not in (4, 8):
            return f"{side}: {form.stages} stages; allowed: 4, 8"
        if form.strided != (side == "keys"):
            return f"{side}: strided={form.strided}; allowed: {side == 'keys'}"
    if rotary != 128:
        return f"keys: RoPE of {rotary} channels; allowed: 128"
    return None


def declines(call: AttentionCall) -> str | None:
    """Why the kernel leaves a call on such formats to another; None if it does not."""
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes)
    if (keys.stages, values.stages) not in SEEN:
        return f"{keys.stages} and {values.stages} stages: not seen right on a GPU yet"
    rows, bytes_ = call.rows.shape[2], program_memory(call.rows.device)
    if rows > MOST_ROWS:
        return f"{rows} query rows; allowed: up to {MOST_ROWS}"
    if call.project is not None or call.first_position is None:
        return "projected queries"
    need = int(shared_bytes(keys.stages, values.stages, False, 8, 8, False))
    return None if need <= bytes_ else f"{bytes_} bytes of shared memory; needed: {need}"


@lru_cache
def make_plan(k_stages: int, v_stages: int, jobs: int, rows: int, units: int, processors: int, bytes_: int) -> Plan:
    """Choose a launch shape for ``jobs`` KV heads of ``rows`` query rows and storage of ``units`` units; ``bytes_``: of shared
    memory."""
    columns, warps = 4 if rows <= 4 else 8, 8
    both = int(shared_bytes(k_stages, v_stages, True, columns, warps, False)) <= bytes_
    passes = 1 if both else 2
    begin = 12 * passes  # what beginning costs, in units of a warp
    jobs *= math.ceil(rows / columns)

    def cost(splits: int) -> float:
        each = math.ceil(math.ceil(units / splits) / warps)
        return math.ceil(jobs * splits / processors) * (each * passes + begin)

    splits = min(range(1, max(2, min(256, units // 8))), key=cost)
    return Plan(columns, both, warps, splits, kept=not both and rows <= 4)


def plan_of(call: AttentionCall, span: Span) -> Plan:
    batch, heads, rows, _ = call.rows.shape
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes)
    units = span.keys["codes"].shape[2] * keys.block // UNIT
    device = call.rows.device
    stages = keys.stages, values.stages
    return make_plan(*stages, batch * heads, rows, units, multiprocessors(device), program_memory(device))


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
    """Write partial results over one span to the parts ``part`` to ``part + plan.splits``."""
    keys, values, rope = call.key_format, call.value_format, call.rope
    assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes) and rope is not None
    assert keys.book is not None and values.book is not None
    batch, heads, rows, _ = packed.shape
    device = packed.device
    room = {room_between(f, x) for f, x in ((keys, span.keys), (values, span.values))}
    if len(room) > 1:
        raise ValueError(f"packed storage: keys and values have room for {sorted(room)} tokens; allowed: as many")
    columns = math.ceil(rows / plan.columns)
    programs = batch * heads * columns * plan.splits
    kept = 0 if plan.both else programs * plan.warps * plan.chunk * 256
    scratch = torch.empty(kept, dtype=torch.float32, device=device)
    residual_kernel[(batch * heads * columns, plan.splits)](
        packed.float().contiguous(),
        span.keys["codes"],
        span.keys["rms"],
        span.values["codes"],
        span.values["rms"],
        _rows(keys.book.on(device), True),
        _rows(values.book.on(device), False),
        rotation_of(rope, 64, UNIT, 1, 128, device).freq,
        turns(rope, device, plan.kept),
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
        **constants(keys, values, plan),
        num_warps=plan.warps,
        maxnreg=plan.registers,
    )


def constants(keys: ResidualCodes, values: ResidualCodes, plan: Plan) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {"K": keys.stages, "V": values.stages, "BOTH": plan.both, "C": plan.columns, "KEPT": plan.kept}


_made: WeakKeyDictionary[Codebook, dict[bool, torch.Tensor]] = WeakKeyDictionary()


def _rows(book: Codebook, keys: bool) -> torch.Tensor:
    """Rows as lanes read them, fp16 [stages / 2, codes, 2, 32], made once: graphs know where they are."""
    found = _made.setdefault(book, {})
    if keys not in found:
        at = torch.arange(32, device=book.codes.device)
        if keys:  # 8 t + 4 h + m is channel 16 h + 4 t + m of the group
            element = at // 4 % 2 * 16 + at // 8 * 4 + at % 4
        else:  # 8 t + 2 w + b is channel 8 w + 2 t + b
            element = at // 2 % 4 * 8 + at // 8 * 2 + at % 2
        rows = book.codes.to(torch.float16)[:, :, element]
        found[keys] = rows.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()
    return found[keys]


@lru_cache(maxsize=64)
def turns(rope: Rope, device: torch.device, kept: bool) -> torch.Tensor:
    """Cosines and sines of a unit's (``kept``: a tile's) tokens as lanes read them, fp16 [tokens, 4, 4, 8].

    Of group i, lane t four cosines, then four sines, of pairs 16 t + 4 m + i. In shared memory odd tokens have groups 0 and 1,
    and 2 and 3, the other way round.
    """
    tokens = UNIT // 2 if kept else UNIT
    table = rotation_of(rope, 64, tokens, 1, 128, device).table  # [2, tokens, 64]
    parts = table.view(2, tokens, 4, 4, 4).permute(1, 4, 2, 0, 3)  # [token, i, t, cos or sin, m]
    if kept:
        return parts.contiguous()
    odd = torch.arange(tokens, device=device) % 2 == 1
    return torch.where(odd.view(-1, 1, 1, 1, 1), parts[:, [1, 0, 3, 2]], parts).contiguous()
