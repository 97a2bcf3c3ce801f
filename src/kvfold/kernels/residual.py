"""Decode attention over VQLLM's storage: tables in shared memory; see :mod:`kvfold.kernels._residual_gluon`."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvfold.formats import Format, ResidualCodes
from kvfold.formats.packing import UNIT
from kvfold.formats.residual import Codebook
from kvfold.kernels import tables
from kvfold.kernels._residual_gluon import residual_kernel, shared_bytes
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.partials import overlaps_launches
from kvfold.kernels.stored import rotation_of
from kvfold.kernels.windows import program_memory
from kvfold.rope import Rope

SEEN = frozenset({(4, 4), (8, 8)})
"""Stages of keys and of values whose numbers a run on a GPU has shown right."""


@dataclass(frozen=True, kw_only=True)
class Plan(tables.TablesPlan):
    """Launch shape; see :class:`kvfold.kernels.tables.TablesPlan`.

    Attributes
    ----------
    both : bool
        Whether the tables of keys and of values lie in shared memory together.
    """

    both: bool


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
        if form.book is None or form.book.steps is None:
            return f"{side}: a codebook that is not in whole steps"
    if rotary != 128:
        return f"keys: RoPE of {rotary} channels; allowed: 128"
    return None


def declines(call: AttentionCall) -> str | None:
    """Why the kernel leaves a call on such formats to another; None if it does not."""
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes)
    if (keys.stages, values.stages) not in SEEN:
        return f"{keys.stages} and {values.stages} stages: not seen right on a GPU yet"
    return tables.declines(call, int(shared_bytes(keys.stages, values.stages, False, 8, 8, False)))


@lru_cache
def make_plan(
    k_stages: int, v_stages: int, jobs: int, rows: int, units: int, processors: int, bytes_: int, pages: bool = False
) -> Plan:
    """Choose a launch shape for ``jobs`` KV heads of ``rows`` query rows and storage of ``units`` units; ``bytes_``: of shared
    memory. ``pages``: the shape that a GPU has shown right over pages, up to 2 % slower."""
    columns, warps = 4 if rows <= 4 else 8, 8
    both = int(shared_bytes(k_stages, v_stages, True, columns, warps, False)) <= bytes_
    plan, passes = Plan(columns=columns, warps=warps, both=both, kept=pages and rows <= 4), 1 if both else 2
    return replace(plan, splits=tables.splits_of(plan, jobs, rows, units, processors, passes, 12 * passes))


def plan_of(call: AttentionCall, span: Span) -> Plan:
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes)
    return make_plan(
        keys.stages,
        values.stages,
        *tables.shape_of(call, span),
        program_memory(call.query.device),
    )


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
    """Write partial results over one span; see :func:`kvfold.kernels.tables.launch`."""
    keys, values, rope, device = call.key_format, call.value_format, call.rope, packed.device
    assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes) and rope is not None
    assert keys.book is not None and values.book is not None
    read = (
        span.keys["codes"],
        span.keys["rms"],
        span.values["codes"],
        span.values["rms"],
        _rows(keys.book.on(device), True),
        _rows(values.book.on(device), False),
        rotation_of(rope, 64, UNIT, 1, 128, device).freq,
        turns(rope, device, plan.kept),
    )
    passes, fixed = 1 if plan.both else 2, constants(keys, values, plan)
    early = overlaps_launches(device)
    tables.launch(residual_kernel, call, span, packed, read, out, top, total, part, plan, passes, early, **fixed)


def constants(keys: ResidualCodes, values: ResidualCodes, plan: Plan) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {
        "K": keys.stages,
        "V": values.stages,
        "BOTH": plan.both,
        "C": plan.columns,
        "KEPT": plan.kept,
    }


_made: WeakKeyDictionary[Codebook, dict[bool, torch.Tensor]] = WeakKeyDictionary()


def _rows(book: Codebook, keys: bool) -> torch.Tensor:
    """Rows as lanes read them, made once: graphs know where they are.

    Bytes [stages / 4, codes, 4, 32], then fp16 [2, 32]: steps, and what sums of numbers and 1024 have too much, negative.
    """
    found = _made.setdefault(book, {})
    if keys not in found:
        at = torch.arange(32, device=book.codes.device)
        if keys:  # 8 t + 4 h + m is channel 16 h + 4 t + m of the group
            element = at // 4 % 2 * 16 + at // 8 * 4 + at % 4
        else:  # 8 t + 2 w + b is channel 8 w + 2 t + b
            element = at // 2 % 4 * 8 + at // 8 * 2 + at % 2
        found[keys] = _with_steps(book, element)
    return found[keys]


def _with_steps(book: Codebook, element: torch.Tensor) -> torch.Tensor:
    steps = book.steps
    assert steps is not None
    # bytes 0 and 2, and 1 and 3, of each four become words of two channels
    rows = steps.numbers[:, :, element.view(-1, 2, 2).mT.flatten()]
    rows = rows.unflatten(0, (-1, 4)).transpose(1, 2).contiguous()
    extra = (steps.shift - 64 * len(steps.numbers) - 1024) * steps.step
    both = torch.stack((steps.step, extra))[:, element].to(torch.float16)
    return torch.cat((rows.flatten(), both.flatten().view(torch.uint8))).view(torch.float16)


@lru_cache(maxsize=64)
def turns(rope: Rope, device: torch.device, kept: bool) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes read them (``kept``: into registers), fp16 [tokens, 4, 4, 8].

    Of group i, lane t four cosines, then four sines, of pairs 16 t + 4 m + i. In shared memory odd tokens have groups 0 and 1,
    and 2 and 3, the other way round.
    """
    table = rotation_of(rope, 64, UNIT, 1, 128, device).table  # [2, tokens, 64]
    parts = table.view(2, UNIT, 4, 4, 4).permute(1, 4, 2, 0, 3)  # [token, i, t, cos or sin, m]
    if kept:
        return parts.contiguous()
    odd = torch.arange(UNIT, device=device) % 2 == 1
    return torch.where(odd.view(-1, 1, 1, 1, 1), parts[:, [1, 0, 3, 2]], parts).contiguous()
