"""Binary codes: bits that a codebook outside of the format turns into vectors (CommVQ values).

N_c bits per token and KV head; a value is ``bits @ C + offset`` with a codebook C that the method holds, so that the attention
weights meet the bits and C meets their sum (CommVQ, eq. 22).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.formats.base import Fields, Format
from kvfold.formats.packing import UNIT, pack, unpack, words_per_unit


@dataclass(frozen=True)
class BinaryCodes(Format):
    """Bits that a codebook outside the format turns into vectors (CommVQ, eq. 9).

    Parameters
    ----------
    codes : int
        N_c bits per token and KV head; a multiple of 16.
    joint : int
        Number of KV heads whose bits stand for one joint vector: decoding gives every head all of them. 1: none.

    Notes
    -----
    Field, per block and KV head: ``bits`` int16 [block / 32, 2 codes]. A decoded vector is ``[bits, 1]``: the last column, not
    stored, sums to the total attention weight, which the codebook's offset row is multiplied with.
    """

    codes: int = 16
    joint: int = 1

    kind: ClassVar[str] = "binary codes"

    def __post_init__(self) -> None:
        if self.codes < 16 or self.codes % 16:
            raise ValueError(f"codes={self.codes}: allowed: positive multiples of 16")
        if self.block % UNIT:
            raise ValueError(f"block={self.block}: must be a multiple of {UNIT} tokens")

    @property
    def width(self) -> int:
        return self.codes * self.joint + 1

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"bits": ((self.block // UNIT, words_per_unit(self.codes, 1)), torch.int16)}

    def encode(self, x: torch.Tensor) -> Fields:
        """``x``: [batch, num_kv_heads, tokens, codes]; a bit is set where x is positive."""
        return {"bits": pack(x > 0, 1, self.operand).unflatten(-2, (-1, self.block // UNIT))}

    def decode(self, fields: Fields) -> torch.Tensor:
        bits = unpack(fields["bits"].flatten(-3, -2), 1, self.operand, self.codes).float()
        if self.joint > 1:
            heads = bits.shape[1]
            bits = bits.transpose(1, 2).flatten(-2).unsqueeze(1).expand(-1, heads, -1, -1)
        return torch.nn.functional.pad(bits, (0, 1), value=1.0)

    def describe(self) -> str:
        return f"{self.codes} bits ({self.bits:.2f} bits)"


@dataclass(frozen=True)
class ValueSteps:
    """A codebook of values in whole steps, ``numbers * step``.

    Attributes
    ----------
    numbers : Tensor, int8 [heads, codes, d]
        -127 to 127.
    step : Tensor, float32 [heads, d]
        Of a channel.
    rest : Tensor, float32 [heads, d]
        What half of all codes lose by it in sum: values' offset makes up for that, for about half of their bits are set.
    """

    numbers: torch.Tensor
    step: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, codebook: torch.Tensor) -> ValueSteps:
        """The nearest to ``codebook``, float [heads, codes, d]."""
        book = codebook.float()
        step = book.abs().amax(1).clamp_min(2.0**-100) / 127
        numbers = (book / step.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
        return cls(numbers, step, (book - numbers.float() * step.unsqueeze(1)).sum(1) / 2)

    @property
    def codebook(self) -> torch.Tensor:
        """float32, as it was."""
        return self.numbers.float() * self.step.unsqueeze(1)

    def to(self, device: torch.device) -> ValueSteps:
        return ValueSteps(self.numbers.to(device), self.step.to(device), self.rest.to(device))


@dataclass(frozen=True)
class ValueRows:
    """Turns sums of decoded values, float32 [..., num_kv_heads, n, width], to outputs by ``rows`` [num_kv_heads, width, d];
    ``steps``: all rows but the last, of each KV head, where kernels may read those instead."""

    rows: torch.Tensor
    steps: ValueSteps | None = None

    def __call__(self, sums: torch.Tensor) -> torch.Tensor:
        return sums @ self.rows


@dataclass(frozen=True, eq=False)
class BitSearch:
    """How the bits of a value x of each KV head are chosen, folded into as few products as can be.

    Attributes
    ----------
    tables : tuple of Tensor, contiguous float32 [num_kv_heads, ...]
        Four of an encoder. Of levels: ``matrix`` [d, codes], ``shift``, ``top`` and ``place`` [codes]; bit c is binary digit
        ``place_c`` of ``round(x @ matrix + shift)_c`` in [0, top_c]. Of a network with ``hidden`` units: ``w1`` [d, hidden],
        ``b1``, ``w2`` [hidden, codes], ``b2``; bit c is whether ``silu(x @ w1 + b1) @ w2 + b2`` is positive. Then three for
        flips: ``along`` [d, codes], ``origin`` [codes] and ``gram`` [codes, codes], so that
        ``x @ along - origin - bits @ gram`` is half of how fast the squared error falls with each bit.
    flips : int
        Bits that are flipped, one by one, where that lowers the error.
    hidden : int
        0: levels.
    """

    tables: tuple[torch.Tensor, ...]
    flips: int
    hidden: int


FLIPPED = 32768.0
"""What a flip takes off the bit's own gain, so that it is not flipped again: beyond all gains."""


@dataclass(frozen=True, eq=False)
class BitGains:
    """How fast the squared error falls with each flip of a bit of a value x, as kernels multiply in fp16.

    Numbers of a KV head are scaled by powers of two, so that the largest product of a code with itself is 8 to 16 and elements
    of ``along`` are 3 at most. Of ``y = clamp((x - offset) * scale, -64, 64)`` in fp16 the first bits are as in
    :class:`BitSearch`, with ``matrix`` and ``shift``. Flipping bit c lowers the error by twice
    ``d (y @ along - bits @ gram)_c - half_c``, where d is 1 for a bit that is 0 and -1 for one that is 1. With the codes
    themselves, scaled as y is, the difference is ``(y - bits @ codebook) @ along``, for ``gram = codebook @ along``.

    Attributes
    ----------
    offset, shift, top, place, half : Tensor, float32 [num_kv_heads, d or codes]
    scale, size, least : Tensor, float32 [num_kv_heads]
        ``size``: what gains were multiplied with; ``least``: gains that are none.
    matrix, along : Tensor, float16 [num_kv_heads, d, codes]
    gram, rows : Tensor, float16 [num_kv_heads, codes, codes], [num_kv_heads, codes + 1, codes]
        Products of codes; the same with :data:`FLIPPED` in place of a code's with itself, and last a row of zeros.
    operands : Tensor, float16 [num_kv_heads, 3 * d * codes]
        ``matrix``, ``codebook`` [codes, d] and ``along`` in the order of :mod:`kvfold.kernels.commvq._bits`; none if d is no
        multiple of 32.
    vectors : Tensor, float32 [num_kv_heads, 4, codes]
        ``shift``, ``top``, ``place`` as the bits of integers, and ``half``.
    """

    offset: torch.Tensor
    scale: torch.Tensor
    size: torch.Tensor
    shift: torch.Tensor
    top: torch.Tensor
    place: torch.Tensor
    half: torch.Tensor
    least: torch.Tensor
    matrix: torch.Tensor
    along: torch.Tensor
    gram: torch.Tensor
    rows: torch.Tensor
    operands: torch.Tensor
    vectors: torch.Tensor


def _operand(table: torch.Tensor, rows_first: bool = False) -> torch.Tensor:
    """A table [num_kv_heads, n, columns] as second operand of ``mma.m16n8k16``.

    A lane's eight numbers of a column stand side by side, and columns in such an order that a lane's sums are of eight columns
    in a row. ``rows_first``: all columns of 32 rows together, instead of all rows of 32 columns.
    """
    parts = table.mT.unflatten(-1, (-1, 4, 8)).unflatten(1, (-1, 4, 4, 2))  # columns: part, g / 2, tile, g % 2
    order = (5, 1, 3) if rows_first else (1, 3, 5)
    return parts.permute(0, *order, 2, 4, 6, 7).flatten(1)


def bit_gains(tables: tuple[torch.Tensor, ...], codebook: torch.Tensor, offset: torch.Tensor) -> BitGains:
    """From the seven tables of levels that :class:`BitSearch` has, float32.

    Parameters
    ----------
    codebook, offset : Tensor, float32 [num_kv_heads, codes, d], [num_kv_heads, d]
        Values are sums of codes and the offset.
    """
    matrix, shift, top, place, along, _, gram = tables
    square = gram.diagonal(dim1=-1, dim2=-2)
    size = torch.exp2(4 - square.amax(-1).clamp_min(1e-30).log2().ceil())
    along, gram, half = (x * size.view(-1, *[1] * (x.ndim - 1)) for x in (along, gram, 0.5 * square))
    scale = torch.exp2((0.5 * along.abs().amax((1, 2)).clamp_min(1e-30)).log2().round())
    shift = shift + (offset.unsqueeze(1) @ matrix).squeeze(1)
    matrix, along = (x / scale[:, None, None] for x in (matrix, along))
    gram = gram.half()
    rows = torch.nn.functional.pad(gram, (0, 0, 0, 1))
    rows[:, :-1].diagonal(dim1=-1, dim2=-2).fill_(FLIPPED)
    vectors = {"offset": offset, "scale": scale, "size": size, "shift": shift, "top": top, "place": place, "half": half}
    vectors["least"] = 1e-6 * half.amax(-1)
    limit = torch.finfo(torch.float16).max
    matrix, codes, along = (x.clamp(-limit, limit).half() for x in (matrix, codebook * scale[:, None, None], along))
    whole = offset.shape[-1] % 32 == 0
    parts = [_operand(matrix), _operand(codes, True), _operand(along)] if whole else [gram[:, :0, 0]]
    products = {"matrix": matrix, "along": along, "gram": gram, "rows": rows, "operands": torch.cat(parts, -1)}
    digits = place.to(torch.int32).view(torch.float32)
    vectors["vectors"] = torch.stack((vectors["shift"].float(), top.float(), digits, vectors["half"].float()), 1)
    return BitGains(
        **{name: x.float().contiguous() for name, x in vectors.items()},
        **{name: x.contiguous() for name, x in products.items()},
    )
