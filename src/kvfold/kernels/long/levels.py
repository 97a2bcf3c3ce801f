"""Levels with some elements in fp16 (KVQuant), decoded to 16 bits; see :mod:`kvfold.kernels.long._levels`."""

import math
from typing import Any

import torch

from kvfold.formats import Fields, Format, Lookup, Outliers
from kvfold.formats.packing import UNIT
from kvfold.kernels.device import device_info
from kvfold.kernels.generic.readers.lookup import constants_of
from kvfold.kernels.long.tables import PAIRS, turns
from kvfold.kernels.stored import room_between
from kvfold.rope import Rope

WARPS, RESIDENT, REGISTERS = 4, 3, 168
"""Of a program; programs of a multiprocessor at a time; registers that suffice for these."""
MOST = 64
"""Elements in fp16 of a block."""
BITS = frozenset({2, 3})
"""Bits of a code."""


def serves(form: Format, rope: Rope | None, device: torch.device) -> bool:
    """Whether :func:`unpack_levels` decodes a format, with keys before RoPE where there is one."""
    if device.type != "cuda" or not isinstance(form, Outliers) or not isinstance(form.inner, Lookup):
        return False
    own = form.inner
    if (form.head_dim, form.block) != (2 * PAIRS, UNIT) or form.count > MOST or own.operand not in ("key", "value"):
        return False
    if own.bits_per_code not in BITS or own.scaling not in ("channel", "range"):
        return False
    if own.scaling == "channel" and own.channels is None:
        return False
    return rope is None or (rope.inv_freq.numel() == PAIRS and own.operand == "key")


def constants(form: Outliers, rotated: bool, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    from kvfold.kernels.fragments.decode import _level_table

    own = form.inner
    assert isinstance(own, Lookup)
    return {
        "BITS": own.bits_per_code,
        "TABLE": _level_table(own.levels),
        "COUNT": form.count,
        "VALUE": own.operand == "value",
        "RANGES": own.scaling == "range",
        "KEYS": rotated,
        "BF16": bf16,
    }


def make_tables(form: Format, rope: Rope | None, device: torch.device) -> None:
    """Make what :func:`unpack_levels` reads, on the current stream."""
    assert isinstance(form, Outliers)
    _of_channels(form, device)
    if rope is not None:
        turns(rope, device)


def _of_channels(form: Outliers, device: torch.device) -> torch.Tensor | None:
    own = form.inner
    assert isinstance(own, Lookup)
    if own.scaling != "channel":
        return None
    assert own.channels is not None
    return constants_of(own.channels.on(device), max(map(abs, own.levels)))


def _kernel() -> Any:
    from kvfold.kernels.long._levels import unpack_levels_kernel

    return unpack_levels_kernel


def unpack_levels(
    form: Format,
    fields: Fields,
    start: int,
    first: int,
    out: torch.Tensor,
    rope: Rope | None,
    first_position: torch.Tensor | None,
) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], whole units from number ``first`` on; as of
    :func:`kvfold.kernels.generic.unpack.unpack`."""
    assert isinstance(form, Outliers)
    batch, heads, tokens, _ = out.shape
    units, device = tokens // UNIT, out.device
    count = units * batch * heads
    each = max(1, math.ceil(count / (device_info(device).sms * RESIDENT * WARPS)))
    codes, of_channels = fields["codes"], _of_channels(form, device)
    freq, near, position = codes, codes, codes  # not read where nothing is rotated
    if rope is not None:
        assert first_position is not None
        (freq, near), position = turns(rope, device), first_position
    _kernel()[(math.ceil(count / (each * WARPS)),)](
        codes,
        fields.get("scale", codes),
        fields["outlier"],
        fields["where"],
        codes if of_channels is None else of_channels,
        freq,
        near,
        position,
        out,
        heads,
        start,
        first // UNIT,
        units,
        count,
        room_between(form, fields) // UNIT,
        each,
        out.stride(1) // out.stride(2),
        1.0 if rope is None else float(rope.scaling),
        **constants(form, rope is not None, out.dtype == torch.bfloat16),
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
