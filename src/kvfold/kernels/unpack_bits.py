"""Bits that a matrix of every KV head turns into values (CommVQ), decoded to 16 bits; see
:mod:`kvfold.kernels._unpack_bits_gluon`."""

from typing import Any

import torch

from kvfold.formats import Fields, Format
from kvfold.formats.codebook import BinaryCodes
from kvfold.formats.packing import UNIT
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.stored import room_between

WARPS = 4
"""Of a program."""
WIDE = True
"""Whether the four multiply together where GPUs can."""
BESIDE = True
"""Whether such a program is small enough for one to run beside a program of :mod:`kvfold.kernels.unpack_steps`."""
REGISTERS = {False: 255, True: 168}
"""Of a thread, by :func:`is_wide`."""
CODES = (128, 256)
"""Bits of a vector."""


def serves(form: Format, device: torch.device) -> bool:
    """Whether :func:`unpack_bits` decodes a format whose vectors have 128 channels in the model."""
    if device.type != "cuda" or not isinstance(form, BinaryCodes):
        return False
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 6):
        return False
    return form.joint == 1 and form.codes in CODES and form.operand == "plain" and form.head_dim == 128


def is_wide(device: torch.device) -> bool:
    """Whether four warps multiply together on this device: GPUs of sm_90 do, those before and after have no such products."""
    return WIDE and (device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9)


def resident(wide: bool) -> int:
    """Programs of a multiprocessor at a time."""
    return 2 if not wide else 1 if BESIDE else 3


def constants(codes: int, bf16: bool, wide: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    return {"CODES": codes, "BF16": bf16, "WIDE": wide, "SLICES": 2 if wide and BESIDE and codes == 256 else 1}


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
        2i + 1, which of these, registers, pairs. Registers have bits of different weight. Where the device :func:`is_wide`
        [2, codes / 128, 2, 64, 64]: halves of the channels, tiles of 128 bits, halves of these, channels, and bits, whose 16
        bytes lie in another order by the last three bits of the channel's number.
    """
    codes, place = matrix.shape[1], matrix.device
    if is_wide(place):
        raw = _tiles(matrix).flatten(1).view(torch.uint8)
        return torch.cat((raw, offset.float().contiguous().view(torch.uint8)), 1).contiguous()
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


def _tiles(matrix: torch.Tensor) -> torch.Tensor:
    """Matrices fp16 [heads, codes, 128] as products of warpgroups read them."""
    codes, device = matrix.shape[1], matrix.device
    place, column = torch.arange(codes, device=device), torch.arange(128, device=device)
    step, half = place // 16, place // 8 % 2
    code = step // 4 * 64 + step % 4 * 4 + place % 8 // 2 * 16 + half + place % 2 * 2
    # a lane's columns 8 n + 2 t, for four n, are channels 8 t to 8 t + 7 of 32
    channel = column // 32 * 32 + column % 8 // 2 * 8 + column // 8 % 4 * 2 + column % 2
    scaled = matrix.float()[:, code[:, None], channel] * (2.0**15 / 256.0**half).unsqueeze(-1)
    tiles = scaled.half().mT.reshape(-1, 2, 64, codes // 128, 2, 8, 8).permute(0, 1, 3, 4, 2, 5, 6)
    eight = torch.arange(8, device=device)
    index = (eight ^ torch.arange(64, device=device).unsqueeze(1) % 8).unsqueeze(-1)  # [channel, 16 bytes, 1]
    return tiles.gather(-2, index.expand_as(tiles)).contiguous()


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
    units, wide = tokens // UNIT, is_wide(out.device)
    fixed = constants(form.codes, out.dtype == torch.bfloat16, wide)
    jobs = batch * heads * fixed["SLICES"]
    programs = min(-(-units // WARPS), max(1, multiprocessors(out.device) * resident(wide) // jobs))
    _kernel()[(programs, jobs)](
        fields["bits"],
        tables,
        sizes,
        out,
        heads,
        first // UNIT,
        units,
        room_between(form, fields) // UNIT,
        out.stride(1) // out.stride(2),
        **fixed,
        num_warps=WARPS,
        maxnreg=REGISTERS[wide],
    )
