"""What every storage format is: named tensors per block of tokens, and the two maps between them and vectors."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

Fields = dict[str, torch.Tensor]
"""Stored tensors by name, each ``[batch, num_kv_heads, blocks, *shape]`` as :meth:`Format.fields` declares them."""


@dataclass(frozen=True)
class Format(ABC):
    """How the bytes of one operand (keys or values) of one layer lie.

    A format knows nothing of methods, sequences or caches. It maps blocks of ``block`` tokens to named tensors and
    back.

    Parameters
    ----------
    head_dim : int
        Length of the vectors it stores.
    block : int
        Tokens per block; a block is encoded at once and never touched again.
    operand : {"key", "value", "plain"}
        Which side of attention reads it, or that no tensor core does; packing differs.
    """

    head_dim: int
    block: int
    operand: str

    kind: ClassVar[str]

    @abstractmethod
    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (per block and KV head) and dtype of every stored tensor."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Fields:
        """Encode vectors. Formats may take options beside them.

        Parameters
        ----------
        x : Tensor, float32 [batch, num_kv_heads, tokens, head_dim]
            ``tokens`` is a multiple of ``block``; all values finite.

        Returns
        -------
        Fields
        """

    @abstractmethod
    def decode(self, fields: Fields) -> torch.Tensor:
        """Decode to float32 ``[batch, num_kv_heads, blocks * block, width]``; what kernels are compared with."""

    @property
    def width(self) -> int:
        """Length of a decoded vector; differs from ``head_dim`` for sketches, whose queries are projected likewise."""
        return self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one KV head, metadata included."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.fields().values())

    @property
    def bits(self) -> float:
        """Effective bits per element: everything stored, over the elements it stands for."""
        return 8 * self.block_bytes / (self.block * self.head_dim)

    def take(self, fields: Fields, blocks: int, first: int = 0) -> Fields:
        """``blocks`` blocks of stored fields from block ``first`` on, as views."""
        return {name: t[:, :, first : first + blocks] for name, t in fields.items()}

    def allocate(self, batch: int, heads: int, blocks: int, device: torch.device | str) -> Fields:
        """Uninitialized storage for ``blocks`` blocks."""
        return {
            name: torch.empty(batch, heads, blocks, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self.fields().items()
        }

    def describe(self) -> str:
        """One short phrase for reports."""
        return f"{self.kind} ({self.bits:.2f} bits)"
