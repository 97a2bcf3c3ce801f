"""Storage that a basis turns, decoded to 16 bits; see :mod:`kvfold.kernels.long._rotated`."""

import math
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import (
    AffineGroups,
    Balanced,
    Fields,
    Format,
    Lookup,
    Paged,
    ResidualCodes,
    SignSketch,
    UniformTokens,
)
from kvfold.formats.basis import Basis, Hadamard
from kvfold.formats.packing import UNIT
from kvfold.formats.paged import PAGE
from kvfold.kernels.device import device_info
from kvfold.kernels.stored import basis_matrix, inner, pages_between, room_between, table_rows

HEAD_DIM = 128
WARPS = 4
ROWS_WARPS = 8
"""Of a program with a table of rows, of which it copies 32 KB."""
REGISTERS = {64: 128, 128: 168, 256: 255}
"""Of a thread, by channels that a basis mixes: with more, more is held at once."""


def serves(form: Format, device: torch.device) -> bool:
    """Whether :func:`unpack_turned` decodes a format."""
    if device.type != "cuda" or not isinstance(form, Paged) or form.basis is None or form.head_dim != HEAD_DIM:
        return False
    own = inner(form)
    if form.page != PAGE:
        return False
    if isinstance(own, ResidualCodes):
        one = (own.codes, own.stages, own.strided) == (256, 1, False) and own.block % UNIT == 0
        return one and own.vector in (4, 8) and own.book is not None
    if isinstance(own, Balanced):
        return own.block == PAGE and (own.inner.operand, own.inner.bits_per_code) == ("plain", 2)
    if isinstance(own, AffineGroups):
        what = (own.operand, own.bits_per_code, own.mode, own.axis, own.group)
        return what == ("plain", 2, "asym", "channel", own.head_dim)
    if own.operand not in ("key", "value"):
        return False
    if isinstance(own, SignSketch):
        return len(own.sketches) == 1 and own.sketches[0] in (128, 256)
    if isinstance(own, Lookup):
        return own.scaling == "rms" and own.bits_per_code in (2, 3)
    return isinstance(own, UniformTokens) and own.bits_per_code in (1, 2, 3, 4)


def mixed(form: Paged) -> int:
    """Channels of the blocks that the basis mixes, at least as many as operands have together."""
    least = 64 if _by_rows(inner(form)) else 32
    return max(form.basis.block, least) if isinstance(form.basis, Hadamard) else width_of(inner(form))


def _by_rows(own: Format) -> bool:
    """Whether numbers come in the order of :func:`kvfold.kernels.long._rotated.row_operands`."""
    return isinstance(own, ResidualCodes | Balanced | AffineGroups)


def _by_token(own: Format) -> bool:
    """Whether tokens have scales and zero-points that are applied before the basis: values in plain order."""
    return isinstance(own, AffineGroups) or (isinstance(own, Balanced) and not own.by_token)


@lasting(1024)  # graphs know where they are
def matrix_of(
    basis: Basis, width: int, block: int, rows: bool, device: torch.device, size: float = 1.0
) -> torch.Tensor:
    """The basis times ``size``, which mixes blocks of ``block`` channels, as second operands, fp16 [d / 32, block / 16, 2, 32
    lanes, 2, 2, 2].

    Of four tiles of eight columns column g of tile j is channel ``8 (g // 2) + 2j + g % 2`` of 32: a lane's two columns of each
    are eight adjacent channels. ``rows``: those of the basis come as :func:`kvfold.kernels.long._rotated.row_operands` says.
    """
    matrix = basis_matrix(basis, width, device, False) * size
    if rows:  # of 64: t, tile, half, pair
        matrix = matrix.unflatten(0, (-1, 4, 4, 2, 2)).permute(0, 2, 3, 1, 4, 5).flatten(0, 4)
    # of rows: tile, half, t, pair; of columns: 32 channels, g // 2, tiles 2i and 2i + 1, which, g % 2
    tiles = matrix.unflatten(-1, (-1, 4, 2, 2, 2)).unflatten(0, (-1, 2, 4, 2)).permute(4, 0, 6, 5, 8, 2, 7, 1, 3)
    own = torch.arange(width // block, device=device)  # of 32 channels, the rows of their block
    blocks = tiles.unflatten(1, (-1, block // 16)).unflatten(0, (len(own), -1))
    return blocks[own, :, own].flatten(0, 1).contiguous()


def constants(form: Format, bf16: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    from kvfold.kernels.fragments._codes import LEVELS, UNIFORM
    from kvfold.kernels.fragments.decode import _level_table
    from kvfold.kernels.long._rotated import AFFINE, BALANCED, ROWS

    assert isinstance(form, Paged)
    own = inner(form)
    kind, factor, table = UNIFORM, 1.0, ""
    if isinstance(own, SignSketch):
        bits, factor = 1, 2 * own.gains[0] * math.sqrt(form.head_dim)  # a code is -1/2 or 1/2
    elif isinstance(own, ResidualCodes):
        bits, kind = 8 // own.vector, ROWS
    elif isinstance(own, Balanced | AffineGroups):
        bits, kind = 2, BALANCED if isinstance(own, Balanced) else AFFINE
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
        "VALUE": own.operand == "value" or _by_token(own),
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
    warps = ROWS_WARPS if isinstance(inner(form), ResidualCodes) else WARPS
    return {"num_warps": warps, "maxnreg": REGISTERS[max(64, mixed(form))]}


def make_tables(form: Paged, device: torch.device) -> None:
    """Make what :func:`unpack_turned` reads, on the current stream."""
    tables_of(form, device)


def tables_of(form: Paged, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The basis, and copies of a table's rows; something else stands for these where there is no table."""
    from kvfold.kernels.long._rotated import QUARTER

    own = inner(form)
    assert form.basis is not None
    size = 1 / QUARTER.value if isinstance(own, Balanced | AffineGroups) else 1.0
    matrix = matrix_of(form.basis, width_of(own), mixed(form), _by_rows(own), device, size)
    if not isinstance(own, ResidualCodes):
        return matrix, matrix
    assert own.book is not None
    return matrix, table_rows(own.book.on(device))


def arrays(form: Format, fields: Fields) -> tuple[torch.Tensor, ...]:
    """Codes, scales, means and norms; something else stands for what is not stored. Keys of balanced tiles have factors for
    scales."""
    own = inner(form)
    names = list(own.fields())
    if isinstance(own, Balanced) and own.by_token:
        names.remove("meta")
    codes, scale = (fields[name] for name in names[:2])
    return codes, scale, fields.get("mean", scale), fields.get("norm", scale)


def beside(form: Format, fields: Fields) -> torch.Tensor | None:
    """What tiles store of channels: keys' scales and zero-points, values' factors; None where there are no tiles."""
    own = inner(form)
    return fields["meta" if own.by_token else "factor"] if isinstance(own, Balanced) else None


def _kernel() -> Any:
    from kvfold.kernels.long._rotated import turned_kernel

    return turned_kernel


def unpack_turned(form: Format, fields: Fields, first: int, out: torch.Tensor) -> None:
    """Decode tokens of a span to ``out`` [batch, num_kv_heads, tokens, head_dim], from number ``first`` on, a multiple of 128.

    Whole units of 32 tokens.
    """
    batch, heads, tokens, _ = out.shape
    assert isinstance(form, Paged) and tokens % UNIT == 0
    units = tokens // UNIT
    count = units * batch * heads
    launch = options(form)
    resident = (1 << 16) // (32 * launch["num_warps"] * launch["maxnreg"])  # programs of a multiprocessor
    warps = resident * launch["num_warps"]
    each = max(1, math.ceil(count / (device_info(out.device).sms * warps)))
    (matrix, rows), of_channels = tables_of(form, out.device), beside(form, fields)
    _kernel()[(math.ceil(count / (each * launch["num_warps"])),)](
        *arrays(form, fields),
        matrix,
        rows if of_channels is None else of_channels,
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
