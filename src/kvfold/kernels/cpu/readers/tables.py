"""What readers of codebooks share: how tables lie, and how a token's groups become its channels."""

from typing import Any, TypeVar

import torch

from kvfold.formats import Fields
from kvfold.formats.vectors import VectorCodes
from kvfold.kernels.cpu._numbers import TILE, has_halves
from kvfold.kernels.cpu._rows import HALF, SINGLE
from kvfold.kernels.cpu.readers.base import CPUReader, made, places

V = TypeVar("V", bound=VectorCodes)


def stored(book: Any, name: str) -> tuple[int, torch.Tensor]:
    """A codebook's table as kernels read it, and its kind: in fp16 if it is, so that nothing is copied, otherwise float32."""

    def make() -> tuple[int, torch.Tensor]:
        table: torch.Tensor = getattr(book, name).detach()
        if table.dtype == torch.float16 and has_halves():
            return HALF, table.contiguous()
        return SINGLE, table.float().contiguous()

    return made(book, name, make)


class VectorReader(CPUReader[V]):
    """A reader of codes for groups of channels, each vector with a scale."""

    @property
    def scratch(self) -> int:
        return self.form.head_dim

    def begun(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """The row's first eight numbers: places of codes and of scales, by units."""
        units = self.form.block // TILE
        row = places(self.form, fields, ("codes", "rms"), keep)
        row[3], row[7] = row[3] // units, row[7] // units
        return row
