"""What a reader is: one function in plain Triton that decodes a tile of a format, and what it is given."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch

from kvfold.formats import Fields, Format

F = TypeVar("F", bound=Format)


class Reader(ABC, Generic[F]):
    """How tiles of a format's decoded vectors are read.

    ``read`` is a ``triton.jit`` function ``(fields, tables, head, first, left, four, T, SPEC) -> (tile, scale)``:

    fields, tables : tuples of pointers
        What :meth:`fields` and :meth:`tables` return.
    head : int32
        KV head.
    first : int64
        Number of the tile's first token in the storage: its tokens lie one after the other, KV head by KV head.
    left : int32
        Tokens of the tile that are written, at least 1; more are not to be read.
    four : int32 [W / 4]
        Which channels: number n means 4n to 4n + 3. Those beyond the format's width are not read, and zeros.
    T : constexpr
        Tokens of a tile, a multiple of 32.
    SPEC : tuple
        :attr:`spec`; its first number is the format's width.
    tile : fp16 [T, W]
        Decoded vectors but for their scale.
    scale : float32 [T]
        A factor of each token.
    """

    read: ClassVar[Any]
    any_order: ClassVar[bool] = False
    """Whether the format's storage is the same for every operand."""
    names: tuple[str, ...]
    """Stored fields that ``read`` takes."""
    words: tuple[str, ...] = ("codes",)
    """Those of them that it takes as int32."""
    groups: int = 1
    """Channels i, i + groups, ... are better read together, one group after the other. Where the kernel can, it sets
    ``ordered``, and ``four`` means fours in that order: number n of channels ``4n % v * groups + 4n // v`` and the next three
    of the group, with v the channels of a group."""
    ordered: bool = False
    eights: bool = True
    """Whether ``four`` comes in twos, 2n and 2n + 1; the kernel says so."""
    ahead: bool = True
    """Whether the compiler may load several tiles ahead, through shared memory; not where most loads are of tables."""
    by_head: ClassVar[bool] = False
    """Whether every KV head has tables of its own, so large that a multiprocessor's cache holds those of one."""
    resident: int | None = None
    """Programs of a multiprocessor at a time, for which the compiler is to make registers suffice; None: as it comes."""
    most_tokens: ClassVar[int | None] = None
    """Of a tile, where more need more registers than there are; None: as it comes."""
    of_pages: ClassVar[bool] = False
    """Whether it also needs the number, int64, of the tile's page in the storage, as last of ``tables``."""

    centred: bool = False
    """Whether decoded vectors lack a mean of their head, which is then the second of ``tables``, fp16 [heads, head_dim]."""

    def __init__(self, form: F) -> None:
        self.form = form

    @staticmethod
    def why_not(form: Any) -> str | None:
        """Why a format of this kind cannot be read; None if it can."""
        return None

    @property
    @abstractmethod
    def spec(self) -> tuple[Any, ...]:
        """Static numbers and functions of ``read``."""

    def spec_of_halves(self) -> tuple[Any, ...]:
        """:attr:`spec` where the channels that are read are not 0 to W - 1, but any fours (keys before RoPE)."""
        return self.spec

    @property
    def width(self) -> int:
        """Channels of a decoded vector."""
        return self.form.width

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        """What of the storage ``read`` takes."""
        return tuple(_words(stored[name]) if name in self.words else stored[name] for name in self.names)

    def scratch(self, tokens: int) -> int:
        """int64 words of memory that a program has for itself, its last table: zeros, and zeros again after every tile."""
        return 0

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Constants of the layer."""
        return ()


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)
