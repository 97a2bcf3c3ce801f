"""Bits that a matrix of every KV head turns into values (CommVQ), decoded to 16 bits; see
:mod:`kvfold.kernels.long._bits`."""

from typing import Any

import torch

from kvfold.formats import Fields, Format
from kvfold.formats.binary import BinaryCodes, ValueSteps
from kvfold.formats.packing import UNIT
from kvfold.kernels.device import device_info
from kvfold.kernels.stored import room_between

WARPS, RESIDENT, REGISTERS = 4, 1, 168
"""Of a program, a multiple of four; programs of a multiprocessor, where keys' program has the rest of its memory; registers
that these have."""
APART = 2, 255
"""The last two where every warp multiplies by itself."""
WIDE = True
"""Whether four warps multiply together where GPUs have such products."""
CODES = (128, 256)
"""Bits of a vector."""


def serves(form: Format, device: torch.device) -> bool:
    """Whether :func:`unpack_bits` decodes a format whose vectors have 128 channels in the model."""
    if device.type != "cuda" or not isinstance(form, BinaryCodes):
        return False
    if torch.cuda.is_available() and device_info(device).capability < (8, 6):
        return False
    return form.joint == 1 and form.codes in CODES and form.operand == "plain" and form.head_dim == 128


def is_wide(device: torch.device) -> bool:
    """Whether four warps multiply together on this device."""
    return WIDE and (device.type != "cuda" or device_info(device).has_wgmma)


def operands(steps: ValueSteps, offset: torch.Tensor) -> torch.Tensor:
    """Matrices as second operands, steps and offsets behind them.

    Parameters
    ----------
    steps : ValueSteps
        Of [heads, codes, 128].
    offset : Tensor, float32 [heads, 128]

    Returns
    -------
    Tensor, uint8 [heads, 128 codes + 1024]
        Of a head int8 [codes / 128, 128, 8, 16]: blocks of 128 codes, columns, and of each column eight times 16 codes, number
        i at place ``i ^ column % 8``. Then fp32 [2, 128].
    """
    heads, codes, _ = steps.numbers.shape
    place = steps.numbers.device
    column, code = torch.arange(128, device=place), torch.arange(codes, device=place)
    channel = column // 32 * 32 + column % 8 // 2 * 8 + column // 8 % 4 * 2 + column % 2
    # 32 codes of a product: those of a lane's two words, 4 of each; lanes have 16 of 64 in a row
    near = code // 64 * 64 + code % 16 // 4 * 16 + code // 32 % 2 * 8 + code // 16 % 2 * 4 + code % 4
    matrix = steps.numbers[:, near][:, :, channel].mT.unflatten(-1, (-1, 8, 16)).transpose(1, 2)
    order = torch.arange(8, device=place) ^ column.unsqueeze(1) % 8  # what is at a place: swapping is its own inverse
    matrix = matrix.gather(3, order.view(1, 1, 128, 8, 1).expand_as(matrix)).contiguous()
    rest = torch.stack((steps.step, offset.float()), 1).contiguous()
    return torch.cat([x.view(torch.uint8).reshape(heads, -1) for x in (matrix, rest)], 1).contiguous()


def _kernel() -> Any:
    from kvfold.kernels.long._bits import unpack_bits_kernel

    return unpack_bits_kernel


def unpack_bits(form: Format, fields: Fields, first: int, out: torch.Tensor, tables: torch.Tensor) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, 128], from number ``first`` on: whole units of 32.

    Parameters
    ----------
    tables : Tensor
        Of :func:`operands`.
    """
    assert isinstance(form, BinaryCodes)
    batch, heads, tokens, _ = out.shape
    units, wide = tokens // UNIT, is_wide(out.device)
    resident, registers = (RESIDENT, REGISTERS) if wide else APART
    programs = min(-(-units // (WARPS // 2)), max(1, device_info(out.device).sms * resident // (batch * heads)))
    _kernel()[(programs, batch * heads)](
        fields["bits"],
        tables,
        out,
        heads,
        first // UNIT,
        units,
        room_between(form, fields) // UNIT,
        out.stride(1) // out.stride(2),
        CODES=form.codes,
        BF16=out.dtype == torch.bfloat16,
        WIDE=wide,
        num_warps=WARPS,
        maxnreg=registers,
    )
