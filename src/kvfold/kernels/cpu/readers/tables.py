"""What readers of codebooks share: how tables lie, and how a token's groups become its channels."""

from typing import Any

import torch

from kvfold.kernels.cpu._numbers import TILE, has_halves
from kvfold.kernels.cpu._rows import HALF, SINGLE
from kvfold.kernels.cpu.readers.base import made


def stored(book: Any, name: str) -> tuple[int, torch.Tensor]:
    """A codebook's table as kernels read it, and its kind: in fp16 if it is, so that nothing is copied, otherwise float32."""

    def make() -> tuple[int, torch.Tensor]:
        table: torch.Tensor = getattr(book, name).detach()
        if table.dtype == torch.float16 and has_halves():
            return HALF, table.contiguous()
        return SINGLE, table.float().contiguous()

    return made(book, name, make)


def whole_units(form: Any) -> str | None:
    """Why a format's blocks cannot be read in units; None if they can."""
    return f"blocks of {form.block} tokens; allowed: multiples of {TILE}" if form.block % TILE else None
