"""Bits that a matrix of every KV head turns into values (CommVQ), decoded to 16 bits; see
:mod:`kvfold.kernels._unpack_bits_gluon`."""

from typing import Any

import torch

from kvfold.formats import Fields, Format
from kvfold.formats.codebook import BinaryCodes
from kvfold.formats.packing import UNIT
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.stored import room_between

WARPS, RESIDENT, REGISTERS = 4, 2, 255
"""Of a program; programs of a multiprocessor at a time; registers that these have."""
CODES = (128, 256)
"""Bits of a vector."""


def serves(form: Format, device: torch.device) -> bool:
    """Whether :func:`unpack_bits` decodes a format whose vectors have 128 channels in the model."""
    if device.type != "cuda" or not isinstance(form, BinaryCodes):
        return False
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 6):
        return False
    return form.joint == 1 and form.codes in CODES and form.operand == "plain" and form.head_dim == 128


def operands(matrix: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Matrices as second operands, and offsets behind them.

    Parameters
    ----------
    matrix : Tensor, float16 [heads, codes, 128]
        No number is larger than 1.
    offset : Tensor, float32 [heads, 128]

    Returns
    -------
    Tensor, uint8 [heads, 256 codes + 512]
        fp16 [4, codes / 16, 2, 32 lanes, 2, 2, 2] of a head: blocks of 32 channels, steps of 16 bits, tiles of columns 2i and
        2i + 1, which of these, registers, pairs. Registers have bits of different weight.
    """
    codes, place = matrix.shape[1], matrix.device
    lane, pair, half = torch.arange(32, device=place), torch.arange(2, device=place), torch.arange(2, device=place)
    g, t = lane // 4, lane % 4
    step = torch.arange(codes // 16, device=place)
    first = step // 4 * 64 + step % 4 * 4
    row = (first[:, None] + 16 * t)[:, :, None, None] + half[:, None] + 2 * pair  # [steps, 32, 2, 2]
    tile, block = torch.arange(4, device=place).view(2, 2), torch.arange(4, device=place)
    column = 32 * block[:, None, None, None] + 8 * (g // 2) + g % 2 + 2 * tile[:, :, None]  # [4, 2, 2, 32]
    scaled = matrix.float().unsqueeze(-1) * (2.0**15 / 256.0**half)
    found = scaled[
        :,
        row[None, :, None, :, None],
        column.permute(0, 1, 3, 2)[:, None, :, :, :, None, None],
        half[:, None],
    ]
    raw = found.half().flatten(1).contiguous().view(torch.uint8)
    return torch.cat((raw, offset.float().contiguous().view(torch.uint8)), 1).contiguous()


def _kernel() -> Any:
    from kvfold.kernels._unpack_bits_gluon import unpack_bits_kernel

    return unpack_bits_kernel


def unpack_bits(
    form: Format, fields: Fields, first: int, out: torch.Tensor, tables: torch.Tensor, sizes: torch.Tensor
) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, 128], from number ``first`` on: whole units of 32.

    Parameters
    ----------
    tables : Tensor
        Of :func:`operands`.
    sizes : Tensor, float32 [heads]
        What products are multiplied with.
    """
    assert isinstance(form, BinaryCodes)
    batch, heads, tokens, _ = out.shape
    units = tokens // UNIT
    programs = min(units, max(1, multiprocessors(out.device) * RESIDENT // (batch * heads)))
    _kernel()[(programs, batch * heads)](
        fields["bits"],
        tables,
        sizes,
        out,
        heads,
        first // UNIT,
        units,
        room_between(form, fields) // UNIT,
        out.stride(1) // out.stride(2),
        CODES=form.codes,
        BF16=out.dtype == torch.bfloat16,
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
