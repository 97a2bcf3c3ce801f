"""Uniform codes that a Hadamard rotation turns (fold), decoded to 16 bits; see
:mod:`kvfold.kernels._unpack_hadamard_gluon`."""

import math
from typing import Any

import torch

from kvfold.formats import Fields, Format, Hadamard, Paged, UniformTokens
from kvfold.formats.packing import UNIT
from kvfold.formats.paged import PAGE
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.stored import inner, pages_between, room_between
from kvfold.kernels.turned import arrays

WARPS, RESIDENT, REGISTERS = 4, 4, 128
"""Of a program; programs of a multiprocessor at a time; registers that suffice for these."""

USED = False
"""Whether calls take it: right on a GPU, not timed yet."""


def serves(form: Format, device: torch.device) -> bool:
    """Whether :func:`unpack_hadamard` decodes a format: keys with means and norms, values with means."""
    own = inner(form)
    if device.type != "cuda" or not isinstance(form, Paged) or not isinstance(own, UniformTokens):
        return False
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 6):
        return False
    if form.head_dim != 128 or form.page != PAGE or not form.mean or own.bits_per_code not in (1, 2, 3, 4):
        return False
    if not isinstance(form.basis, Hadamard) or form.basis.block not in (32, 64, 128):
        return False
    return (own.operand, bool(form.norm)) in (("key", True), ("value", False))


def constants(form: Format, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    own = inner(form)
    assert isinstance(form, Paged) and isinstance(form.basis, Hadamard) and isinstance(own, UniformTokens)
    return {"BITS": own.bits_per_code, "MIX": form.basis.block, "VALUE": own.operand == "value", "BF16": bf16}


def _kernel() -> Any:
    from kvfold.kernels._unpack_hadamard_gluon import unpack_hadamard_kernel

    return unpack_hadamard_kernel


def unpack_hadamard(form: Format, fields: Fields, first: int, out: torch.Tensor) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], from number ``first`` on, a multiple of 128.

    Whole units of 32 tokens.
    """
    assert isinstance(form, Paged) and isinstance(form.basis, Hadamard)
    batch, heads, tokens, _ = out.shape
    units = tokens // UNIT
    count = units * batch * heads
    each = max(1, math.ceil(count / (multiprocessors(out.device) * RESIDENT * WARPS)))
    _kernel()[(math.ceil(count / (each * WARPS)),)](
        *arrays(form, fields),
        form.basis.signs(out.device),
        out,
        units,
        count,
        room_between(form, fields) // UNIT,
        pages_between(form, fields),
        first // UNIT,
        each,
        out.stride(1) // out.stride(2),
        **constants(form, out.dtype == torch.bfloat16),
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
