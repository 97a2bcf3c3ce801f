"""Affine groups of a block whose tokens and channels were first brought to equal spread. The storage of KVarN.

A block is a tile of tokens and channels. A factor per token and a factor per channel, found by turns, give all of its rows and
columns the same standard deviation. Along the groups the factor is absorbed by scale and zero-point; along the other axis it
is stored, one number per token (groups of tokens: keys) or per channel (groups of channels: values).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.formats.affine import AffineGroups, to_fp16
from kvfold.formats.base import Fields, Format

LEAST = 1e-3
"""Standard deviations below this part of the tile's root mean square are not normalized: what is constant stays exact."""


@dataclass(frozen=True)
class Balanced(Format):
    """``inner`` on tiles divided by factors of the axis that ``inner``'s groups do not share.

    Parameters
    ----------
    inner : AffineGroups
        Mode asym; a group is all tokens of the block (axis "token") or all channels (axis "channel").
    rounds : int
        Times that both axes are normalized, at most; the most even tile of all rounds is taken.

    Notes
    -----
    Fields: the inner format's; ``factor`` fp16 [block] (axis "token") or [head_dim] (axis "channel").
    """

    inner: AffineGroups
    rounds: int = 8

    kind: ClassVar[str] = "balanced"

    def __post_init__(self) -> None:
        form = self.inner
        if (form.head_dim, form.block, form.operand, form.mode) != (self.head_dim, self.block, self.operand, "asym"):
            raise ValueError("inner: needs the head_dim, block and operand of the balanced format, and mode asym")
        if form.group != (form.block if form.axis == "token" else form.head_dim):
            raise ValueError(f"group={form.group}: a group is all tokens, or all channels, of a block")

    @property
    def by_token(self) -> bool:
        """Whether factors belong to tokens; else to channels."""
        return self.inner.axis == "token"

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        count = self.block if self.by_token else self.head_dim
        return {**self.inner.fields(), "factor": ((count,), torch.float16)}

    def encode(self, x: torch.Tensor) -> Fields:
        tiles = x.float().unflatten(-2, (-1, self.block))
        factor = to_fp16(factors(tiles, -2 if self.by_token else -1, self.rounds))
        # a factor that fp16 has no number for: the tile is as good as zero there
        factor = torch.where(factor == 0, torch.ones_like(factor), factor)
        axis = -1 if self.by_token else -2
        balanced = (tiles / factor.float().unsqueeze(axis)).flatten(-3, -2)
        return {**self.inner.encode(balanced), "factor": factor}

    def decode(self, fields: Fields) -> torch.Tensor:
        tiles = self.inner.decode(fields).unflatten(-2, (-1, self.block))
        return (tiles * fields["factor"].float().unsqueeze(-1 if self.by_token else -2)).flatten(-3, -2)

    def describe(self) -> str:
        what = "token" if self.by_token else "channel"
        return f"{self.inner.describe()} of balanced tiles, a factor per {what} ({self.bits:.2f} bits in all)"


def factors(tiles: torch.Tensor, axis: int, rounds: int) -> torch.Tensor:
    """What to divide tokens (``axis`` -2) or channels (-1) by, so that a tile is even with the best factors of the other axis.

    Parameters
    ----------
    tiles : Tensor, float32 [..., tokens, channels]
    rounds : int

    Returns
    -------
    Tensor, float32 [..., tokens or channels]
        Those of the round after which the largest standard deviations of rows and of columns were least above the smallest
        ones. Of tokens: with geometric mean 1, since groups of tokens have scales for the rest.
    """
    size = mean(tiles.square(), -2, -1).sqrt()
    start = tiles / torch.where(size > 0, size, torch.ones_like(size))
    other = -3 - axis
    own = torch.ones_like(start.narrow(other, 0, 1))
    rest = torch.ones_like(start.narrow(axis, 0, 1))
    least, best = _imbalance(start), own
    for _ in range(rounds):
        own = own * _spread(start / (own * rest), other)
        rest = rest * _spread(start / (own * rest), axis)
        found = _imbalance(start / (own * rest))
        best = torch.where(found < least, own, best)
        least = torch.minimum(found, least)
    if axis == -1:
        return (best * size).squeeze(other)
    return (best / mean(best.log(), axis).exp()).squeeze(other)


def sum_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over ``dim``, which stays, in an order that nothing but its size decides."""
    while (count := x.shape[dim]) > 1:
        half = count // 2
        pairs = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        if count % 2:
            pairs.narrow(dim, 0, 1).add_(x.narrow(dim, count - 1, 1))
        x = pairs
    return x


# A GPU's library orders sums by how many tiles there are. One last bit may decide which round is the most even one, and with
# it every code of a tile, so that what is stored would depend on how calls are cut. A CPU's library knows one order.


def mean(x: torch.Tensor, *dims: int, in_order: bool = False) -> torch.Tensor:
    """Mean over ``dims``, which stay; ``in_order``: on a CPU, too."""
    if x.device.type == "cpu" and not in_order:
        return x.mean(dims, keepdim=True)
    for dim in dims:
        x = sum_in_order(x, dim) / x.shape[dim]
    return x


def deviation(x: torch.Tensor, dim: int, in_order: bool = False) -> torch.Tensor:
    """Standard deviation over ``dim``, which stays."""
    if x.device.type == "cpu" and not in_order:
        return x.std(dim, keepdim=True)
    return (sum_in_order((x - mean(x, dim, in_order=True)).square(), dim) / (x.shape[dim] - 1)).sqrt()


def _spread(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation; 1 where there is next to none."""
    spread = deviation(x, dim)
    return torch.where(spread > LEAST, spread, torch.ones_like(spread))


def _imbalance(x: torch.Tensor) -> torch.Tensor:
    """How uneven a tile is, 2 at the least: [..., 1, 1]."""
    return _unevenness(x, -2) + _unevenness(x, -1)


def _unevenness(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Largest standard deviation over ``dim`` by the smallest one."""
    spread = deviation(x, dim)
    return spread.amax(-3 - dim, keepdim=True) / spread.amin(-3 - dim, keepdim=True).clamp_min(LEAST)
