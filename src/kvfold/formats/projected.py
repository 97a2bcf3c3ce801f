"""Another format for vectors that a learned map of their KV head prepared: a mean, and a matrix that need not be orthogonal."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.arithmetic import beside
from kvfold.formats.base import Fields, Format
from kvfold.formats.basis import by_block


class HeadMaps:
    """Static maps of a layer's KV heads, learned beforehand.

    Parameters
    ----------
    mean : Tensor, float32 [num_kv_heads, head_dim]
    apply, restore : Tensor, float32 [num_kv_heads, head_dim, head_dim]
        What rows are multiplied with, and its inverse.
    """

    def __init__(self, mean: torch.Tensor, apply: torch.Tensor, restore: torch.Tensor) -> None:
        self.mean, self.apply, self.restore = mean.contiguous(), apply.contiguous(), restore.contiguous()

    def on(self, device: torch.device) -> "HeadMaps":
        """The same maps on another device; moved once."""
        return self if device == self.mean.device else self._moved(device)

    @beside
    def _moved(self, device: torch.device) -> "HeadMaps":
        return HeadMaps(self.mean.to(device), self.apply.to(device), self.restore.to(device))

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries as stored keys meet them, and what the keys' mean adds to their scores.

        Parameters
        ----------
        x : Tensor [batch, num_kv_heads, rows, head_dim]

        Returns
        -------
        projected : Tensor, float32, of the same shape
        bias : Tensor, float32 [batch, num_kv_heads, rows]
        """
        maps, x = self.on(x.device), x.float()
        return x @ maps.restore.transpose(-1, -2), (x * maps.mean.unsqueeze(-2)).sum(-1)


@dataclass(frozen=True)
class Projected(Format):
    """``inner`` of ``(x - mean) @ apply``.

    Attention needs no decoded copy: a query meets stored keys after :meth:`HeadMaps.queries`, once a call.

    Parameters
    ----------
    inner : Format
        With this format's ``head_dim``, ``block`` and ``operand``.
    maps : HeadMaps or None
        Without them the format knows its size only.
    """

    inner: Format
    maps: HeadMaps | None = field(default=None, compare=False, repr=False)

    kind: ClassVar[str] = "projected"

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self.inner.fields()

    def encode(self, x: torch.Tensor) -> Fields:
        assert self.maps is not None
        maps = self.maps.on(x.device)
        return self.inner.encode(by_block(x.float() - maps.mean.unsqueeze(-2), maps.apply.unsqueeze(-3)))

    def decode(self, fields: Fields) -> torch.Tensor:
        assert self.maps is not None
        inner = self.inner.decode(fields)
        maps = self.maps.on(inner.device)
        return inner @ maps.restore + maps.mean.unsqueeze(-2)

    def describe(self) -> str:
        return f"{self.inner.describe()} of keys less a mean, under a learned map"
