"""Storage and constants as kernels take them."""

from dataclasses import dataclass
from typing import Any

import torch

from kvfold.arithmetic import beside, lasting
from kvfold.formats import Fields, Format, Paged
from kvfold.formats.basis import Basis
from kvfold.formats.gaussian import STEP
from kvfold.formats.paged import PagedFormat
from kvfold.formats.residual import Codebook
from kvfold.kernels.device import settled
from kvfold.rope import Rope


def inner(form: Format) -> Format:
    """What a reader reads of a format; the kernel does what pages add."""
    return form.inner if isinstance(form, Paged) else form


def power(n: int) -> int:
    """The power of two that holds n channels; at least 16, for a tensor core's product."""
    return max(16, 1 << (n - 1).bit_length())


@lasting(1024)  # decode graphs know where they are
def basis_matrix(basis: Basis, width: int, device: torch.device, back: bool) -> torch.Tensor:
    """What queries are multiplied with, fp16 [width, d], or (``back``) sums of decoded vectors, its transpose."""
    matrix = basis.restore(torch.eye(width, dtype=torch.float32, device=device))
    return (matrix.T if back else matrix).to(torch.float16).contiguous()


@dataclass(frozen=True)
class Rotation:
    """Constants of a model's RoPE, pair by pair; padding has frequency 0.

    Attributes
    ----------
    freq : Tensor, float32 [2, pairs]
        Angles per position, and factors of rotated pairs.
    table : Tensor, float16 [2, tokens of a tile, pairs]
        Cosines and sines of the angles within a tile.
    """

    freq: torch.Tensor
    table: torch.Tensor


@lasting(1024)
def rotation_of(rope: Rope, pairs: int, tokens: int, groups: int, dim: int, device: torch.device) -> Rotation:
    freq = torch.zeros(pairs, dtype=torch.float64, device="cpu")
    gain = torch.ones(pairs, dtype=torch.float64, device="cpu")
    count = rope.inv_freq.numel()
    place = torch.arange(dim // 2, device="cpu").view(groups, -1)[
        :, : count // groups
    ]  # of every rotated pair, by group
    order = torch.arange(count, device="cpu").view(-1, groups).T
    freq[place], gain[place] = rope.inv_freq.cpu().double()[order], rope.scaling
    angles = torch.arange(tokens, dtype=torch.float64, device="cpu").unsqueeze(-1) * freq
    table = torch.stack((angles.cos(), angles.sin()))
    return Rotation(torch.stack((freq, gain)).float().to(device), table.half().contiguous().to(device))


def static(spec: tuple[Any, ...]) -> Any:
    """A reader's numbers and functions as the kernel's constants. Functions stay: Triton's cache knows their text."""
    interpret, constexpr = _triton()
    if interpret:
        return Numbers(spec)
    return tuple(static(x) if isinstance(x, tuple) else x if callable(x) else constexpr(x) for x in spec)


@lasting()
def _triton() -> tuple[bool, Any]:
    """Whether kernels are interpreted, and what makes a constant."""
    from triton import knobs
    from triton.language import constexpr

    return knobs.runtime.interpret, constexpr


class Numbers:
    """Constants for Triton's interpreter, which makes tensors of a tuple's."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = tuple(Numbers(x) if isinstance(x, tuple) else x for x in values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


@beside
def table_rows(book: Codebook, whole: bool = False) -> torch.Tensor:
    """Rows of a codebook's first stage, made once: graphs know where they are; fp16 [codes, vector] or, ``whole``, whole steps
    of :data:`kvfold.formats.gaussian.STEP`, int8; see :func:`in_bytes`."""
    numbers = (book.codes[0].float() / STEP).to(torch.int8) if whole else book.codes[0].to(torch.float16)
    return settled(numbers.contiguous())


@beside
def in_bytes(book: Codebook) -> bool:
    """Whether all numbers of a codebook are whole steps, seven bits and a sign; looked at once."""
    numbers = book.codes.float() / STEP
    return bool((numbers == numbers.round()).all()) and float(numbers.abs().max()) <= 127


def pages_between(form: Format, fields: Fields) -> int:
    """Pages from one KV head's storage to the next one's."""
    if not isinstance(form, PagedFormat) or not form.page_fields():
        return 0
    x = fields[next(iter(form.page_fields()))]
    return x.stride(1) // x.stride(2)


def room_between(form: Format, fields: Fields) -> int:
    """Tokens from one KV head's storage to the next one's, in every field the same."""
    own = [(name, fields[name]) for name in form.fields()]
    room = own[0][1].stride(1) // own[0][1].stride(2)
    for name, x in own:
        check_strides(name, x, room)
    return room * form.block


def room_of(*sides: tuple[Format, Fields]) -> int:
    """:func:`room_between` of both sides.

    Raises
    ------
    ValueError
        If keys and values have room for different numbers of tokens.
    """
    room = {room_between(form, fields) for form, fields in sides}
    if len(room) > 1:
        raise ValueError(f"packed storage: keys and values have room for {sorted(room)} tokens; allowed: as many")
    return room.pop()


def check_strides(name: str, x: torch.Tensor, room: int) -> None:
    each = x[0, 0, 0].numel()
    if each and (x.stride(2) != each or x.stride(1) != room * each or x.stride(0) != x.shape[1] * x.stride(1)):
        raise ValueError(f"packed storage: {name} has strides {x.stride()} of {tuple(x.shape)}, not those of a slab")
