"""CommVQ's keys, sums of codebook rows of whole steps, decoded to 16 bits; see :mod:`kvfold.kernels._unpack_steps_gluon`."""

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvfold.formats import Fields, Format
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook
from kvfold.formats.packing import UNIT
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.stored import room_between, rotation_of
from kvfold.kernels.windows import program_memory
from kvfold.rope import Rope

PAIRS = 64
WARPS = 8
"""Of a program, the only one of a multiprocessor: beside it there is room for one that unpacks values. Without such, 16 may do
better."""


def serves(form: Format, rope: Rope | None, device: torch.device) -> bool:
    """Whether :func:`unpack_steps` decodes a format, whose keys are stored before RoPE."""
    if device.type != "cuda" or not isinstance(form, AdditiveCodes) or form.head_dim != 2 * PAIRS:
        return False
    if rope is None or rope.inv_freq.numel() != PAIRS or form.codebook is None or form.codebook.steps is None:
        return False
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return form.levels == 64 and form.codebook.rotary == 2 * PAIRS and bytes_of(form) <= program_memory(device)


def bytes_of(form: AdditiveCodes) -> int:
    """Bytes of shared memory of a program."""
    from kvfold.kernels._unpack_steps_gluon import shared_bytes

    return int(shared_bytes(form.stages, WARPS))


def constants(form: AdditiveCodes, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {"STAGES": form.stages, "BF16": bf16}


def options() -> dict[str, int]:
    """Launch options: beside eight warps there is room for four with as many registers."""
    return {"num_warps": WARPS, "maxnreg": 168 if WARPS <= 8 else 128}


_rows: WeakKeyDictionary[KeyCodebook, torch.Tensor] = WeakKeyDictionary()


def rows_of(book: KeyCodebook) -> torch.Tensor:
    """Tables as lanes read them, made once: graphs know where they are.

    Of every head uint8 [stages, 64, 2, 4, 4, 4]: real and imaginary parts, lane, product, byte; channel m of a product's 16 is
    byte m % 4 of lane m / 4, and channel 8 (m % 8) + 2 i + m / 8 of the head, where i is the product's number. Then fp16 [128]
    what sums of numbers lack, and float32 [64] steps.
    """
    if book not in _rows:
        steps = book.steps
        assert steps is not None
        at = torch.arange(PAIRS, device=steps.numbers.device)
        m, i = at // 16 * 4 + at % 4, at // 4 % 4
        channel = 8 * (m % 8) + 2 * i + m // 8
        rows = steps.numbers[..., torch.cat((channel, channel + PAIRS))].flatten(1)
        real, imaginary = steps.shift.unflatten(-1, (2, -1)).unbind(1)
        more = torch.cat((real - imaginary, real + imaginary), -1).to(torch.float16)
        _rows[book] = torch.cat(
            (rows, more.view(torch.uint8), steps.step.contiguous().view(torch.uint8)), -1
        ).contiguous()
    return _rows[book]


@lru_cache(maxsize=256)
def turns(rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns per token of pairs and what float32 leaves of them, float32 [2, 64]; cosines and sines of eight tokens as lanes
    read them, fp16 [2, 2, 8, 4, 8]: of token 2 t + e the eight of pairs 8 g on, in the order e, cosine or sine, g, t."""
    from kvfold.kernels.fragments import _turns

    table = rotation_of(rope, PAIRS, 8, 1, 2 * PAIRS, device).table  # [2, tokens, 64]
    near = table.view(2, 4, 2, 8, 8).permute(2, 0, 3, 1, 4)
    return _turns(rope, device)[0], near.contiguous()


def make_tables(form: Format, rope: Rope | None, device: torch.device) -> None:
    """Make what :func:`unpack_steps` reads, on the current stream."""
    assert isinstance(form, AdditiveCodes) and form.codebook is not None and rope is not None
    rows_of(form.codebook.on(device))
    turns(rope, device)


def _kernel() -> Any:
    from kvfold.kernels._unpack_steps_gluon import unpack_steps_kernel

    return unpack_steps_kernel


def unpack_steps(
    form: Format,
    fields: Fields,
    start: int,
    first: int,
    out: torch.Tensor,
    rope: Rope | None,
    first_position: torch.Tensor | None,
) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], whole units from number ``first`` on; as of
    :func:`kvfold.kernels.unpack.unpack`."""
    assert isinstance(form, AdditiveCodes) and form.codebook is not None
    assert rope is not None and first_position is not None
    batch, heads, tokens, _ = out.shape
    units, device = tokens // UNIT, out.device
    programs = min(units, max(1, multiprocessors(device) // (batch * heads)))
    freq, near = turns(rope, device)
    _kernel()[(programs, batch * heads)](
        fields["codes"],
        fields["rms"],
        rows_of(form.codebook.on(device)),
        freq,
        near,
        first_position,
        out,
        heads,
        start,
        first // UNIT,
        units,
        room_between(form, fields) // UNIT,
        out.stride(1) // out.stride(2),
        float(rope.scaling),
        **constants(form, out.dtype == torch.bfloat16),
        **options(),
    )
