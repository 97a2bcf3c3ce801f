"""Dense storage: the vectors themselves in one floating-point dtype."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.formats.base import Fields, Format


@dataclass(frozen=True)
class Dense(Format):
    """Vectors as they are. Field ``x``: ``dtype`` [block, head_dim].

    What lies beyond the dtype's range (centred keys may) takes its largest value, as in the other formats.
    """

    dtype: torch.dtype = torch.float32

    kind: ClassVar[str] = "dense"

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"x": ((self.block, self.head_dim), self.dtype)}

    def encode(self, x: torch.Tensor) -> Fields:
        most = min(torch.finfo(self.dtype).max, torch.finfo(x.dtype).max)
        return {"x": x.clamp(-most, most).to(self.dtype).unflatten(-2, (-1, self.block))}

    def decode(self, fields: Fields) -> torch.Tensor:
        return fields["x"].flatten(-3, -2).float()

    def describe(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} ({self.bits:.0f} bits)"
