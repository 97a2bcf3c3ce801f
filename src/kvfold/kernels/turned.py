"""Storage in tensor-core order that a basis turns, decoded to 16 bits; see :mod:`kvfold.kernels._turned_gluon`."""

import math
from functools import lru_cache
from typing import Any

import torch

from kvfold.formats import Fields, Format, Lookup, Paged, SignSketch, UniformTokens
from kvfold.formats.basis import Basis, Hadamard
from kvfold.formats.packing import UNIT
from kvfold.formats.paged import PAGE
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.stored import basis_matrix, inner, pages_between, room_between

HEAD_DIM = 128
WARPS = 4
REGISTERS = {64: 128, 128: 168, 256: 255}
"""Of a thread, by channels that a basis mixes: with more, more is held at once."""


def serves(form: Format, device: torch.device) -> bool:
    """Whether :func:`unpack_turned` decodes a format."""
    if device.type != "cuda" or not isinstance(form, Paged) or form.basis is None or form.head_dim != HEAD_DIM:
        return False
    own = inner(form)
    if form.page != PAGE or own.operand not in ("key", "value"):
        return False
    if isinstance(own, SignSketch):
        return len(own.sketches) == 1 and own.sketches[0] in (128, 256)
    if isinstance(own, Lookup):
        return own.scaling == "rms" and own.bits_per_code in (2, 3)
    return isinstance(own, UniformTokens) and own.bits_per_code in (1, 2, 3, 4)


def mixed(form: Paged) -> int:
    """Channels of the blocks, at least 32, that the basis mixes."""
    return max(form.basis.block, 32) if isinstance(form.basis, Hadamard) else width_of(inner(form))


@lru_cache(maxsize=1024)  # graphs know where they are
def matrix_of(basis: Basis, width: int, block: int, device: torch.device) -> torch.Tensor:
    """The basis, which mixes blocks of ``block`` channels, as second operands, fp16 [d / 32, block / 16, 2, 32 lanes, 2, 2, 2].

    Of four tiles of eight columns column g of tile j is channel ``8 (g // 2) + 2j + g % 2`` of 32: a lane's two columns of each
    are eight adjacent channels.
    """
    matrix = basis_matrix(basis, width, device, False)
    # of rows: tile, half, t, pair; of columns: 32 channels, g // 2, tiles 2i and 2i + 1, which, g % 2
    tiles = matrix.unflatten(-1, (-1, 4, 2, 2, 2)).unflatten(0, (-1, 2, 4, 2)).permute(4, 0, 6, 5, 8, 2, 7, 1, 3)
    own = torch.arange(width // block, device=device)  # of 32 channels, the rows of their block
    blocks = tiles.unflatten(1, (-1, block // 16)).unflatten(0, (len(own), -1))
    return blocks[own, :, own].flatten(0, 1).contiguous()


def constants(form: Format, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    from kvfold.kernels._fragment_codes import LEVELS, UNIFORM
    from kvfold.kernels.fragments import _level_table

    assert isinstance(form, Paged)
    own = inner(form)
    kind, factor, table = UNIFORM, 1.0, ""
    if isinstance(own, SignSketch):
        bits, factor = 1, 2 * own.gains[0] * math.sqrt(form.head_dim)  # a code is -1/2 or 1/2
    else:
        assert isinstance(own, Lookup | UniformTokens)
        bits = own.bits_per_code
    if isinstance(own, Lookup):
        kind, table = LEVELS, _level_table(own.levels)
    return {
        "D": form.head_dim,
        "WIDTH": width_of(own),
        "BLOCK": mixed(form),
        "BITS": bits,
        "KIND": kind,
        "VALUE": own.operand == "value",
        "MEAN": form.mean,
        "NORM": bool(form.norm),
        "FACTOR": factor,
        "TABLE": table,
        "BF16": bf16,
    }


def width_of(own: Format) -> int:
    return own.sketches[0] if isinstance(own, SignSketch) else own.head_dim


def options(form: Paged) -> dict[str, int]:
    """Launch options."""
    return {"num_warps": WARPS, "maxnreg": REGISTERS[max(64, mixed(form))]}


def make_tables(form: Paged, device: torch.device) -> None:
    """Make what :func:`unpack_turned` reads, on the current stream."""
    assert form.basis is not None
    matrix_of(form.basis, width_of(inner(form)), mixed(form), device)


def arrays(form: Format, fields: Fields) -> tuple[torch.Tensor, ...]:
    """Codes, scales, means and norms; something else stands for what is not stored."""
    names = ("signs", "rms") if isinstance(inner(form), SignSketch) else ("codes", "scale")
    own = tuple(fields[name] for name in names)
    return (*own, fields.get("mean", own[1]), fields.get("norm", own[1]))


def unpack_turned(form: Format, fields: Fields, first: int, out: torch.Tensor) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], from number ``first`` on, a multiple of 128.

    Whole units of 32 tokens.
    """
    from kvfold.kernels._turned_gluon import turned_kernel

    batch, heads, tokens, _ = out.shape
    assert isinstance(form, Paged) and form.basis is not None and tokens % UNIT == 0
    units = tokens // UNIT
    count = units * batch * heads
    launch = options(form)
    resident = (1 << 16) // (32 * WARPS * launch["maxnreg"])  # programs of a multiprocessor
    each = max(1, math.ceil(count / (multiprocessors(out.device) * resident * WARPS)))
    turned_kernel[(math.ceil(count / (each * WARPS)),)](
        *arrays(form, fields),
        matrix_of(form.basis, width_of(inner(form)), mixed(form), out.device),
        out,
        units,
        count,
        room_between(form, fields) // UNIT,
        pages_between(form, fields),
        first // UNIT,
        each,
        out.stride(1) // out.stride(2),
        **constants(form, out.dtype == torch.bfloat16),
        **launch,
    )
