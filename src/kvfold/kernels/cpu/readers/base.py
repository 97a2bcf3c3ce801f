"""What a reader of the CPU kernel is: one compiled function that decodes a unit of a format, and what it is given."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from kvfold.formats import Fields, Format

F = TypeVar("F", bound=Format)
T = TypeVar("T")

ROW = 48
"""Most integers that a reader is given, those of the readers inside it among them."""

Place = tuple[int, int, int, int]
"""Address of a field, and its strides of batch, head and block (or page) in bytes."""


class CPUReader(ABC, Generic[F]):
    """How units (32 tokens) of a format's decoded vectors are read, in plain order.

    ``decode``, under :func:`~kvfold.kernels.cpu._numbers.decoder`, takes pointers and integers ``(row, batch, head, unit, tile,
    width, scratch)`` and returns nothing:

    row : int64 [ROW]
        What :meth:`row` returned for the span: addresses, strides, constants.
    batch, head, unit : int64
        Sequence, KV head, and the number of the unit in the span, all of it written.
    tile : float32 [32, width]
        Where to put the unit's decoded vectors. ``width`` is at least the format's; what lies beyond is to stay as it is.
    scratch : float32 [:attr:`scratch`]
        Memory for anything, of this thread alone.
    """

    decode: ClassVar[Any]

    def __init__(self, form: F) -> None:
        self.form = form

    @property
    def scratch(self) -> int:
        """Floats of memory that ``decode`` needs beside the tile."""
        return 0

    @abstractmethod
    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """What ``decode`` is given of a span's fields; tensors that addresses point to are put into ``keep``."""


def _counts(form: Format) -> dict[str, int]:
    """Elements per block of every field."""
    return made(form, "counts", lambda: {name: math.prod(shape) for name, (shape, _) in form.fields().items()})


def places(form: Format, fields: Fields, names: tuple[str, ...], keep: list[torch.Tensor]) -> list[int]:
    """Places of fields of blocks, one after the other: four integers each."""
    counts = _counts(form)
    return [number for name in names for number in place(fields[name], counts[name], keep)]


def place(x: torch.Tensor, inner: int, keep: list[torch.Tensor]) -> Place:
    """Where a tensor [batch, heads, blocks, ...] lies; blocks, of ``inner`` elements, are adjacent."""
    stride = x.stride()
    if (x.shape[2] > 1 and stride[2] != inner) or (inner > 1 and stride[-1] != 1):
        x = x.contiguous()
        stride = x.stride()
    keep.append(x)
    size = x.itemsize
    return x.data_ptr(), stride[0] * size, stride[1] * size, inner * size


KEPT = "_cpu"
"""Attribute of formats, codebooks and rotations under which lies what was made for them."""


class Kept(dict[str, Any]):
    """What was made for its owner. A copy or a pickle of the owner begins with nothing: a decoder's address means nothing in
    another process."""

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()


def made(owner: object, name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns for one of them, made once and kept beside its own attributes: equal formats may have
    different tables.

    Two threads that come first at once may both make it. All get what is kept, for addresses of it are used.
    """
    kept: Kept = vars(owner).get(KEPT) or vars(owner).setdefault(KEPT, Kept())
    if name not in kept:
        kept.setdefault(name, make())
    found: T = kept[name]
    return found
