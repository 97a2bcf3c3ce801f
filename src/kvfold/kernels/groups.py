"""Decode attention over TaSQ's storage: tables in shared memory; see :mod:`kvfold.kernels._residual_gluon`."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvfold.formats import Format, GroupCodes
from kvfold.formats.grouped import GroupBook
from kvfold.formats.packing import UNIT
from kvfold.kernels import tables
from kvfold.kernels._residual_gluon import residual_kernel, shared_bytes
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.partials import overlaps_launches
from kvfold.kernels.stored import rotation_of
from kvfold.kernels.tables import TablesPlan
from kvfold.rope import Rope

BEGIN = 20
"""What beginning costs a program, in units of a warp; 12 and 40 made no difference."""


def unsupported(key_format: Format, value_format: Format, rotary: int) -> str | None:
    """Why the kernel does not serve these formats; None if it does."""
    for side, form in (("keys", key_format), ("values", value_format)):
        if not isinstance(form, GroupCodes):
            return f"{side}: {form.kind} storage; allowed: {GroupCodes.kind}"
        if (form.head_dim, form.vector, form.codes) != (128, 8, 256):
            return f"{side}: {form.describe()} of {form.head_dim}; allowed: 256 codes for 8 channels of 128"
        if form.block % UNIT:
            return f"{side}: blocks of {form.block} tokens; allowed: multiples of {UNIT}"
        if form.strided != (side == "keys"):
            return f"{side}: strided={form.strided}; allowed: {side == 'keys'}"
        if form.book is None:
            return f"{side}: no codebook"
    if key_format.centred != value_format.centred:  # type: ignore[attr-defined]
        return "a mean of one side alone"
    if rotary != 128:
        return f"keys: RoPE of {rotary} channels; allowed: 128"
    return None


def declines(call: AttentionCall) -> str | None:
    """Why the kernel leaves a call on such formats to another; None if it does not."""
    keys, values = call.key_format, call.value_format
    return tables.declines(call, program_bytes(keys, values, TablesPlan.of(call.shape[2])))


def plan_of(call: AttentionCall, span: Span) -> TablesPlan:
    return tables.plan_of(call, span, BEGIN)


def attend_packed(
    call: AttentionCall,
    span: Span,
    packed: torch.Tensor,
    out: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    part: int,
    plan: TablesPlan,
) -> None:
    """Write partial results over one span; see :func:`kvfold.kernels.tables.launch`."""
    keys, values, rope, device = call.key_format, call.value_format, call.rope, packed.device
    assert rope is not None
    rows, means = tables_of(keys, values, device)
    read = (
        span.keys["codes"],
        span.keys["rms"],
        span.values["codes"],
        span.values["rms"],
        *rows,
        rotation_of(rope, 64, UNIT, 1, 128, device).freq,
        turns(rope, device),
        *means,
    )
    early, fixed = overlaps_launches(device), constants(keys, values, plan)
    tables.launch(residual_kernel, call, span, packed, read, out, top, total, part, plan, early, **fixed)


def constants(keys: Format, values: Format, plan: TablesPlan) -> dict[str, Any]:
    """What the kernel is specialized on."""
    assert isinstance(keys, GroupCodes)
    return {"K": 4, "V": 4, "C": plan.columns, "GROUPS": 2 if keys.centred else 1}


def program_bytes(keys: Format, values: Format, plan: TablesPlan) -> int:
    """Bytes of shared memory of a program."""
    fixed = constants(keys, values, plan)
    return int(shared_bytes(fixed["K"], fixed["V"], fixed["C"], plan.warps, fixed["GROUPS"]))


def tables_of(keys: Format, values: Format, device: torch.device) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Rows of keys and of values, and both means; where there are none, something else in their place."""
    assert isinstance(keys, GroupCodes) and isinstance(values, GroupCodes)
    assert keys.book is not None and values.book is not None
    books = keys.book.on(device), values.book.on(device)
    rows = _rows(books[0]), _rows(books[1])
    if not keys.centred:
        return rows, rows
    assert books[0].mean is not None and books[1].mean is not None
    return rows, (books[0].mean, books[1].mean)


_made: WeakKeyDictionary[GroupBook, torch.Tensor] = WeakKeyDictionary()


def _rows(book: GroupBook) -> torch.Tensor:
    """Rows as lanes read them, made once: graphs know where they are; fp16 [heads, 4, codes, 4, 8], of group 4 i + t."""
    if book not in _made:
        _made[book] = book.codes.to(torch.float16).unflatten(1, (4, 4)).transpose(2, 3).contiguous()
    return _made[book]


def turns(rope: Rope, device: torch.device) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes read them from shared memory, fp16 [tokens, 4, 4, 8].

    Of group 4 i + t four cosines, then four sines, of pairs 4 i + t + 16 m. Odd tokens have i 0 and 1, and 2 and 3, the other
    way round.
    """
    return tables.unit_turns(rope, device, (1, 3, 4, 0, 2))
