"""Packed storage decoded to 16 bits by one kernel for every format with a reader; see :mod:`kvfold.kernels.generic._unpack`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvfold.formats import Fields, Format, Lookup, MixedTokens, Outliers, Paged, ResidualCodes
from kvfold.formats.binary import BinaryCodes, ValueRows
from kvfold.formats.packing import UNIT
from kvfold.formats.paged import PAGE, PagedFormat
from kvfold.kernels.device import device_info
from kvfold.kernels.generic.readers import Reader, reader_of
from kvfold.kernels.generic.readers import why_not as no_reader
from kvfold.kernels.generic.readers.fragments import FRAGMENTS
from kvfold.kernels.generic.readers.fragments import why_not as no_fragments
from kvfold.kernels.long import tables as unpack_tables
from kvfold.kernels.stored import basis_matrix, inner, pages_between, power, room_between, rotation_of, static
from kvfold.rope import Rope

MAX_DIM = 256
TURNED = 128
"""Tokens of a tile that passes a basis, or finds its tokens' ranks in blocks of as many; what looks up tables takes fewer, so
that more programs wait for them at once."""
OPTIONS = {"num_warps": 4, "num_stages": 1}
PROGRAMS, SHORT = 8, 16
"""Of a multiprocessor, in all: a few follow each other, and more where a tile is not multiplied."""

Map = Callable[[torch.Tensor], torch.Tensor]


def why_not(form: Format, pre_rope: bool = False) -> str | None:
    """Why a format cannot be unpacked; None if it can.

    Parameters
    ----------
    pre_rope : bool
        The format stores keys before RoPE.
    """
    own = inner(form)
    why = no_reader(own) if _is_plain(own) else no_fragments(own)
    if why is not None:
        return why
    if form.head_dim > MAX_DIM or _reader(form).width > MAX_DIM:
        return f"vectors of {_reader(form).width} stored channels; allowed: up to {MAX_DIM}"
    if isinstance(own, BinaryCodes) and own.joint > 1:
        return "one code for all heads"
    if PAGE % form.block and form.block % PAGE:
        return f"blocks of {form.block} tokens; allowed: those that divide {PAGE}, or are a multiple of it"
    if isinstance(form, PagedFormat) and form.page != PAGE:
        return f"statistics of {form.page or 'all'} tokens; allowed: {PAGE}"
    if pre_rope and isinstance(form, Paged):
        return "stored before RoPE, with statistics per page"
    if pre_rope and not _is_plain(own) and not isinstance(own, Lookup | Outliers):
        return f"{own.kind} storage before RoPE, packed for tensor cores; allowed: lookup, outliers"
    if pre_rope and form.head_dim % 8:
        return f"stored before RoPE, head_dim={form.head_dim}; allowed: multiples of 8"
    return None


def _is_plain(own: Format) -> bool:
    return own.operand == "plain" or no_reader(own) is None


def _reader(form: Format, rotary: int = 0) -> Reader[Any]:
    own = inner(form)
    if not _is_plain(own):
        return FRAGMENTS[type(own)](own)
    reader = reader_of(own)
    step = 16 * reader.groups
    basis = isinstance(form, Paged) and form.basis is not None
    reader.ordered = rotary > 0 and reader.groups > 1 and not (basis or form.head_dim % step or rotary % step)
    reader.eights = reader.ordered or not rotary or not (form.head_dim % 16 or rotary % 16)
    return reader


@dataclass(frozen=True)
class Turn:
    """What decoded vectors of every KV head are multiplied with, and what is added.

    Attributes
    ----------
    matrix : Tensor, float16 [heads, width, head_dim]
    size : Tensor, float32 [heads]
        Factor of the products.
    offset : Tensor, float32 [heads, head_dim]
    """

    matrix: torch.Tensor
    size: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, unproject: Map, form: Format, heads: int, device: torch.device) -> "Turn":
        """From a linear map of decoded vectors, [..., heads, n, width + 1] of which the last number is 1, to values."""
        rows = unproject(torch.eye(form.width, device=device, dtype=torch.float32).expand(1, heads, -1, -1))[0]
        rows, offset = rows[:, :-1], rows[:, -1]
        size = rows.abs().flatten(1).amax(1).clamp_min(2.0**-100)
        matrix = (rows / size.view(-1, 1, 1)).half().contiguous()
        return cls(matrix, size, offset.contiguous())


_turns = WeakIdKeyDictionary()


def turn_of(unproject: Map, form: Format, heads: int, device: torch.device) -> Turn:
    """:meth:`Turn.of`, made once where the map is a matrix of the layer's."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not isinstance(unproject, ValueRows) or (capturing and unproject.rows not in _turns):
        return Turn.of(unproject, form, heads, device)  # what is captured is not there before the first replay
    if unproject.rows not in _turns:
        _turns[unproject.rows] = Turn.of(unproject, form, heads, device)
    found: Turn = _turns[unproject.rows]
    return found


def constants(form: Format, rotary: int = 0, turn: bool = False) -> dict[str, Any]:
    """What the kernel is specialized on; ``rotary`` channels are rotated (0: none), ``turn``: every head has a matrix."""
    reader, page = _reader(form, rotary), form if isinstance(form, Paged) else None
    dim, basis = form.head_dim, page is not None and page.basis is not None
    width = 2 * power(dim // 2) if rotary else power(reader.spec[0])
    tile = 64 if dim <= 128 and width <= 256 else 32
    if width <= 128 and ((basis and not isinstance(inner(form), Lookup)) or isinstance(inner(form), MixedTokens)):
        tile = TURNED
    elif isinstance(inner(form), Outliers | ResidualCodes):
        tile = 32
    return {
        "READ": reader.read,
        "SPEC": static(reader.spec_of_halves() if rotary and _is_plain(inner(form)) else reader.spec),
        "D": dim,
        "DP": power(dim) if basis or turn or rotary else width,
        "W": width,
        "T": tile,
        "MEAN": turn or (page is not None and page.mean),
        "NORM": page is not None and bool(page.norm),
        "BASIS": basis or turn,
        "BY_HEAD": turn,
        "ROTARY": rotary,
        "HALVES": rotary > 0 and _is_plain(inner(form)),
        "GROUPS": reader.groups if reader.ordered else 1,
        "SCRATCH": reader.scratch(tile),
        "OF_PAGES": reader.of_pages,
        "CENTRED": reader.centred,
    }


def make_constants(form: Format, device: torch.device, rope: Rope | None = None) -> None:
    """Make the tables that :func:`unpack` reads, on the current stream; launches on another one would not wait for that."""
    rotary = 0 if rope is None else 2 * rope.inv_freq.numel()
    reader, fixed = _reader(form, rotary), constants(form, rotary)
    reader.tables(device)
    if isinstance(form, Paged) and form.basis is not None:
        basis_matrix(form.basis, reader.width, device, False)
        form.basis.tables(device)
    if rope is not None:
        rotation_of(rope, fixed["W"] // 2, fixed["T"], fixed["GROUPS"], form.head_dim, device)
    if unpack_tables.serves(form, rope, device):
        unpack_tables.make_tables(form, rope, device)


def unpack(
    form: Format,
    fields: Fields,
    start: int,
    first: int,
    tokens: int,
    dtype: torch.dtype,
    rope: Rope | None = None,
    first_position: torch.Tensor | None = None,
    turn: Turn | None = None,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode ``tokens`` tokens of a span.

    Nothing depends on a value on the host.

    Parameters
    ----------
    form : Format
        That :func:`why_not` has nothing against.
    fields : Fields
        Of the span; all of the tokens are written.
    start, first : int
        Number of the span's first token in the packed part, and that of the first token to decode in the span, a multiple of
        128.
    dtype : torch.float16 or torch.bfloat16
    rope, first_position
        Where keys are stored before RoPE, as of :class:`kvfold.kernels.AttentionCall`.
    turn : Turn or None
        Where decoded vectors are not those of the model.

    whole : Tensor or None, contiguous [batch, num_kv_heads, ``tokens`` or more, head_dim]
        Where the first ``tokens`` are written; None: a new one.

    Returns
    -------
    Tensor, ``dtype`` [batch, num_kv_heads, tokens, head_dim], or ``whole``
    """
    from kvfold.kernels.generic._unpack import unpack_kernel

    if first % PAGE:
        raise ValueError(f"first={first}: allowed: multiples of {PAGE}")
    some = next(t for name, t in fields.items() if name in form.fields())
    batch, heads, device = *some.shape[:2], some.device
    rotary = 0 if rope is None else 2 * rope.inv_freq.numel()
    if 0 < rotary < form.head_dim and not _is_plain(inner(form)):
        raise ValueError(
            f"rope of {rotary} of {form.head_dim} channels: allowed where codes are packed for tensor cores: all"
        )
    reader, fixed = _reader(form, rotary), constants(form, rotary, turn is not None)
    if whole is None:
        whole = torch.empty(batch, heads, tokens, form.head_dim, dtype=dtype, device=device)
    out = whole[:, :, :tokens]
    if rope is not None and tokens % UNIT == 0 and unpack_tables.serves(form, rope, device):
        assert first_position is not None
        unpack_tables.unpack_tables(form, fields, start, first, out, rope, first_position)
        return whole
    mean = norm = basis = size = freq = table = out  # stand for tensors that are never read
    if isinstance(form, Paged):
        mean, norm = fields.get("mean", out), fields.get("norm", out)
        basis = out if form.basis is None else basis_matrix(form.basis, reader.width, device, False)
    if turn is not None:
        mean, basis, size = turn.offset, turn.matrix, turn.size
    if rope is not None:
        turning = rotation_of(rope, fixed["W"] // 2, fixed["T"], fixed["GROUPS"], form.head_dim, device)
        freq, table = turning.freq, turning.table
    tiles = math.ceil(tokens / fixed["T"])
    most = PROGRAMS if fixed["BASIS"] else SHORT
    each = max(1, math.ceil(tiles * batch * heads / (device_info(device).sms * most)))
    programs = math.ceil(tiles / each)
    scratch = torch.empty(fixed["SCRATCH"] * programs * batch * heads, dtype=torch.int64, device=device)
    unpack_kernel[(programs, batch * heads)](
        reader.fields(fields),
        reader.tables(device),
        mean,
        norm,
        basis,
        size,
        out if first_position is None else first_position,
        freq,
        table,
        scratch,
        out,
        heads,
        start,
        first,
        tokens,
        room_between(form, fields),
        pages_between(form, fields),
        each,
        whole.shape[2],
        **fixed,
        **OPTIONS,
    )
    return whole
