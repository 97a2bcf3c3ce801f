"""Decode attention over VQLLM's storage: tables in shared memory; see :mod:`kvfold.kernels._residual_gluon`."""

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
from kvfold.kernels.tables import TablesPlan
from kvfold.rope import Rope

SEEN = frozenset({(4, 4), (8, 8)})
"""Stages of keys and of values whose numbers a run on a GPU has shown right."""
BEGIN = 12
"""What beginning costs a program, in units of a warp."""


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
        turns(rope, device),
        span.keys["rms"],  # no means
        span.values["rms"],
    )
    early, fixed = overlaps_launches(device), constants(keys, values, plan)
    tables.launch(residual_kernel, call, span, packed, read, out, top, total, part, plan, early, GROUPS=0, **fixed)


def constants(keys: ResidualCodes, values: ResidualCodes, plan: TablesPlan) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {"K": keys.stages, "V": values.stages, "C": plan.columns}


def program_bytes(keys: ResidualCodes, values: ResidualCodes, plan: TablesPlan) -> int:
    """Bytes of shared memory of a program."""
    return int(shared_bytes(keys.stages, values.stages, plan.columns, plan.warps))


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


def turns(rope: Rope, device: torch.device) -> torch.Tensor:
    """Cosines and sines of a unit's tokens as lanes read them from shared memory, fp16 [tokens, 4, 4, 8].

    Of group i, lane t four cosines, then four sines, of pairs 16 t + 4 m + i. Odd tokens have groups 0 and 1, and 2 and 3, the
    other way round.
    """
    return tables.unit_turns(rope, device, (1, 4, 2, 0, 3))
