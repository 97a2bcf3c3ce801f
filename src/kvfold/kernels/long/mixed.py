"""Codes of two precisions (ZipCache), decoded to 16 bits; see :mod:`kvfold.kernels.long._mixed`."""

import math
from typing import Any

import torch

from kvfold.formats import Fields, Format, MixedTokens, Paged
from kvfold.formats.packing import UNIT
from kvfold.formats.paged import PAGE
from kvfold.kernels.device import device_info
from kvfold.kernels.generic.readers.fragments import _bits_before
from kvfold.kernels.stored import inner, pages_between, room_between

WARPS, RESIDENT, REGISTERS = 4, 4, 128
"""Of a program; programs of a multiprocessor at a time; registers that suffice for these."""


def serves(form: Format, device: torch.device) -> bool:
    """Whether :func:`unpack_mixed` decodes a format: keys with ranges of channels, values with ranges of tokens and norms."""
    own = inner(form)
    if device.type != "cuda" or not isinstance(own, MixedTokens) or form.head_dim != 128 or own.block != PAGE:
        return False
    if torch.cuda.is_available() and device_info(device).capability < (8, 6):
        return False
    if (own.bits_per_code, own.extra_bits) != (2, 2) or own.salient < 1:
        return False
    if isinstance(form, Paged):
        good = form.page == PAGE and form.basis is None and not form.mean and bool(form.norm)
        return good and (own.operand, own.axis) == ("value", "channel")
    return (own.operand, own.axis) == ("key", "token")


def constants(form: Format, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    own = inner(form)
    assert isinstance(own, MixedTokens)
    return {"SALIENT": own.salient, "VALUE": own.operand == "value", "BF16": bf16}


def _kernel() -> Any:
    from kvfold.kernels.long._mixed import unpack_mixed_kernel

    return unpack_mixed_kernel


def unpack_mixed(form: Format, fields: Fields, first: int, out: torch.Tensor) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], from number ``first`` on, a multiple of 128.

    Whole units of 32 tokens.
    """
    batch, heads, tokens, _ = out.shape
    units = tokens // UNIT
    count = units * batch * heads
    each = max(1, math.ceil(count / (device_info(out.device).sms * RESIDENT * WARPS)))
    _kernel()[(math.ceil(count / (each * WARPS)),)](
        fields["codes"],
        fields["low"],
        fields["which"],
        fields["meta"],
        fields.get("norm", fields["codes"]),
        _bits_before(out.device),
        out,
        units,
        count,
        room_between(form, fields) // PAGE,
        pages_between(form, fields),
        first // PAGE,
        each,
        out.stride(1) // out.stride(2),
        **constants(form, out.dtype == torch.bfloat16),
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
