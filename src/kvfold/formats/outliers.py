"""Sparse outliers: a few elements of a block kept in fp16 beside another format. Part of GEAR and KVQuant."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields, Format


@dataclass(frozen=True)
class Outliers(Format):
    """``inner`` for all elements, and ``count`` elements per block that replace what it decodes to.

    The number is fixed, so that storage is static: a threshold, as the papers have it, would make a block's size depend
    on its content.

    Parameters
    ----------
    inner : Format
        With this format's ``head_dim``, ``block`` and ``operand``; decodes to vectors of ``head_dim``.
    count : int
        Outliers per block and KV head, at least 1.
    axis : {"token", "channel"}
        Along what the inner format's statistics run: an outlier enters them as the median of its channel (over the
        block's tokens) or of its token, so that it widens no range.

    Notes
    -----
    Fields: the inner format's; ``outlier`` fp16 [count] and ``where`` int16 [count], the outlier's index in the block's
    ``[token, channel]`` grid, ascending. An outlier costs 32 bits.
    """

    inner: Format
    count: int
    axis: str

    kind: ClassVar[str] = "outliers"

    def __post_init__(self) -> None:
        size = self.block * self.head_dim
        if size > 1 << 15:
            raise ValueError(f"block={self.block}: outliers need at most 32768 elements per block, it has {size}")
        if not 1 <= self.count <= size:
            raise ValueError(f"count={self.count}: outliers per block are 1 to {size}")

    @property
    def width(self) -> int:
        return self.inner.width

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            **self.inner.fields(),
            "outlier": ((self.count,), torch.float16),
            "where": ((self.count,), torch.int16),
        }

    def encode(self, x: torch.Tensor, score: torch.Tensor | None = None) -> Fields:
        """Encode; the ``count`` elements of largest ``score`` are the outliers.

        Parameters
        ----------
        x : Tensor, float32 [batch, num_kv_heads, tokens, head_dim]
        score : Tensor or None
            Of the same shape; None: distance from the median.
        """
        filled, where, outlier = self.split(x, score)
        return {**self.inner.encode(filled), "outlier": to_fp16(outlier), "where": where.to(torch.int16)}

    def split(
        self, x: torch.Tensor, score: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the inner format gets (as x, outliers replaced by medians), indices and values of the outliers.

        Returns
        -------
        filled : Tensor, float32 [batch, num_kv_heads, tokens, head_dim]
        where : Tensor, int64 [batch, num_kv_heads, blocks, count]
        outlier : Tensor, float32 [batch, num_kv_heads, blocks, count]
        """
        blocks = x.float().unflatten(-2, (-1, self.block))
        lines = blocks.transpose(-1, -2) if self.axis == "token" else blocks  # of which a median is taken
        if score is None:
            medians = median(lines)
            score = (blocks - medians.unsqueeze(-2 if self.axis == "token" else -1)).abs()
            where = largest(score.flatten(-2), self.count)
            ordinary = medians.gather(-1, self._line(where))
        else:  # medians of the outliers' lines are enough
            where = largest(score.unflatten(-2, (-1, self.block)).flatten(-2), self.count)
            line = self._line(where).unsqueeze(-1).expand(*where.shape, lines.shape[-1])
            ordinary = median(lines.gather(-2, line))
        outlier = blocks.flatten(-2).gather(-1, where)
        filled = blocks.flatten(-2).scatter(-1, where, ordinary)
        return filled.view_as(blocks).flatten(-3, -2), where, outlier

    def _line(self, where: torch.Tensor) -> torch.Tensor:
        """The channel or token that an element of a block belongs to, whichever a median is taken of."""
        return where % self.head_dim if self.axis == "token" else where // self.head_dim

    def decode(self, fields: Fields) -> torch.Tensor:
        x = self.inner.decode(fields).unflatten(-2, (-1, self.block))
        # storage that nothing was written to yet may hold any index
        where = fields["where"].long().clamp(0, self.block * self.head_dim - 1)
        return x.flatten(-2).scatter(-1, where, fields["outlier"].float()).view_as(x).flatten(-3, -2)

    def describe(self) -> str:
        return f"{self.inner.describe()} + {self.count} outliers per {self.block} tokens ({self.bits:.2f} bits)"


def outlier_count(fraction: float, block: int, head_dim: int) -> int:
    """How many elements of a block a fraction is, at least 1 unless it is 0."""
    return max(1, round(fraction * block * head_dim)) if fraction else 0


def median(x: torch.Tensor) -> torch.Tensor:
    """The lower median of the last dimension: float32 [..., n] -> [...]."""
    if x.is_cuda:  # where a median takes a program per line
        return x.sort(-1).values[..., (x.shape[-1] - 1) // 2]
    return x.median(-1).values


def largest(score: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest elements, ascending: int64 [..., count]. Of equal ones the first are taken, on every
    device; NaN counts as the largest.

    Parameters
    ----------
    score : Tensor, float32 [..., n]
    """
    bits = (score + 0.0).contiguous().view(torch.int32)  # -0.0 is 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # of the same order as the numbers
    order = torch.where(score.isnan(), torch.iinfo(torch.int32).max, order)
    place = torch.arange(score.shape[-1] - 1, -1, -1, device=score.device)
    # no two are alike now, so that what is chosen depends on no algorithm
    return (order * score.shape[-1] + place).topk(count, dim=-1, sorted=False).indices.sort(-1).values
