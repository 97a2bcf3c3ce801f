"""Decode attention over CommVQ's storage: tables of a KV head in shared memory; see :mod:`kvfold.kernels._codebook_gluon`."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvfold.formats import Format
from kvfold.formats.codebook import AdditiveCodes, BinaryCodes, KeyCodebook
from kvfold.formats.packing import UNIT
from kvfold.kernels import tables
from kvfold.kernels._codebook_gluon import codebook_kernel, shared_bytes
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.stored import rotation_of
from kvfold.kernels.tables import TablesPlan

SEEN = frozenset({(11, 128), (21, 256)})
"""Stages of keys and bits of values whose numbers a run on a GPU has shown right."""
BEGIN = 10
"""What beginning costs a program, in units of a warp."""


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
    if key_format.codebook.steps is None:
        return "keys: centres that are not in whole steps"
    if value_format.operand != "plain":
        return f"values: operand={value_format.operand}; allowed: plain"
    return None


def declines(call: AttentionCall) -> str | None:
    """Why the kernel leaves a call on such formats to another; None if it does not."""
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, AdditiveCodes) and isinstance(values, BinaryCodes)
    if (keys.stages, values.codes) not in SEEN:
        return f"{keys.stages} stages, {values.codes} bits of values: not seen right on a GPU yet"
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
    form, rope = call.key_format, call.rope
    assert isinstance(form, AdditiveCodes) and form.codebook is not None and rope is not None
    table, size = rows_of(form.codebook.on(packed.device))
    turning = rotation_of(rope, 64, UNIT, 1, 128, packed.device)
    read = span.keys["codes"], span.keys["rms"], span.values["bits"], table, size, turning.freq, turning.table
    fixed = constants(form, call.value_format, plan)
    tables.launch(codebook_kernel, call, span, packed, read, out, top, total, part, plan, **fixed)


def constants(keys: AdditiveCodes, values: Format, plan: TablesPlan) -> dict[str, Any]:
    """What the kernel is specialized on."""
    assert isinstance(values, BinaryCodes)
    return {"STAGES": keys.stages, "V": values.codes, "C": plan.columns}


def program_bytes(keys: AdditiveCodes, values: BinaryCodes, plan: TablesPlan) -> int:
    """Bytes of shared memory of a program."""
    return int(shared_bytes(keys.stages, values.codes, plan.columns, plan.warps))


_made: WeakKeyDictionary[KeyCodebook, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()


def rows_of(book: KeyCodebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as lanes read them, and what scores are multiplied with by head; made once: graphs know where they are.

    Of every head uint8 [stages, 64, 2, 4, 16], then fp16 [128] what sums of numbers lack, and float32 [64] steps.
    """
    if book not in _made:
        steps = book.steps
        assert steps is not None
        at = torch.arange(64, device=steps.numbers.device)
        # byte p of word v of lane t: bytes 0 and 2, and 1 and 3, are neighbours
        word = at // 4 % 4 * 2 + at % 2
        channel = word // 4 * 32 + at // 16 * 8 + word % 4 * 2 + at // 2 % 2
        rows = steps.numbers[..., torch.cat((channel, channel + 64))].flatten(1)
        real, imaginary = steps.shift.unflatten(-1, (2, -1)).unbind(1)
        more = torch.cat((real - imaginary, real + imaginary), -1).to(torch.float16)
        whole = torch.cat((rows, more.view(torch.uint8), steps.step.contiguous().view(torch.uint8)), -1)
        _made[book] = whole.view(torch.float16).contiguous(), torch.ones_like(steps.step[:, 0])
    return _made[book]
