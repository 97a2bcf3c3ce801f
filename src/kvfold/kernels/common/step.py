"""A decode step's share of storing, as every step kernel is given it: new tokens, windows, and lengths on the device."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from kvfold.kernels.common.partials import early_launch
from kvfold.kernels.device import device_info
from kvfold.kernels.lengths import Lengths

MAX_TOKENS = 16
"""New tokens of a step at most."""
Pair = tuple[torch.Tensor, torch.Tensor]


def or_any(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A tensor, or one that stands for it and is never read."""
    return other if x is None else x.contiguous()


@dataclass(frozen=True)
class Step:
    """What :func:`kvfold.kernels.affine.encode.append_and_close` is given, whatever the format.

    Attributes
    ----------
    key, value : Tensor or None [batch, num_kv_heads, tokens, head_dim]
        The step's tokens; None: blocks are closed only.
    lengths : Lengths
        Before the step.
    sink, ring : pair of Tensor [batch, num_kv_heads, slots, head_dim]
        Of keys and of values.
    recent : int
        A block is closed once so many newer tokens exist.
    """

    key: torch.Tensor | None
    value: torch.Tensor | None
    lengths: Lengths
    sink: Pair
    ring: Pair
    recent: int

    @property
    def tokens(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def check(self, blocks: tuple[int, int], dims: tuple[int, int]) -> None:
        """Refuse tokens that a step does not take, windows that are too small or not contiguous, and formats that do not go
        together: their blocks, and channels.

        Raises
        ------
        ValueError
        """
        slots, dim = self.ring[0].shape[2:]
        if blocks[0] != blocks[1] or dims != (dim, dim):
            raise ValueError(f"formats: blocks {blocks[0]}, {blocks[1]}; head_dim {dims[0]}, {dims[1]}, {dim}")
        if (self.key is None) != (self.value is None) or self.tokens > MAX_TOKENS:
            raise ValueError(f"tokens={self.tokens}: a step appends 1 to {MAX_TOKENS} keys and as many values")
        needed = self.recent + blocks[0] - 1 + self.tokens
        if slots < needed:
            raise ValueError(f"ring: has {slots} slots; recent={self.recent}, block={blocks[0]} need {needed}")
        self.check_windows()

    def check_windows(self) -> None:
        """Refuse windows that are not contiguous."""
        for name, x in zip(("sink", "sink", "ring", "ring"), (*self.sink, *self.ring), strict=True):
            if not x.is_contiguous():
                raise ValueError(f"{name}: must be contiguous, its strides are {x.stride()}")

    def check_stored(self, key: torch.Size, value: torch.Size) -> None:
        """Refuse packed storage ``[batch, num_kv_heads, blocks]`` that is not the windows'."""
        batch, heads = self.ring[0].shape[:2]
        if key[:2] != (batch, heads) or value != key:
            raise ValueError(f"fields: {tuple(key)}, {tuple(value)} for {batch} x {heads}")

    def new_and_windows(self) -> list[Any]:
        """The kernels' first arguments: new keys and values with their strides, sink, ring."""
        new = self.ring if self.key is None or self.value is None else (self.key, self.value)
        return [new[0], *new[0].stride(), new[1], *new[1].stride(), *self.sink, *self.ring]

    def lengths_and_sizes(self) -> list[Any]:
        """The kernels' arguments from ``total`` to ``slots``."""
        of = self.lengths
        counts = [of.total, of.packed, of.sink, of.recent, or_any(of.ticket, of.sink)]
        heads, slots = self.ring[0].shape[1:3]
        return [*counts, self.tokens, heads, self.sink[0].shape[2], self.recent, slots]

    def constants(self, block: int) -> dict[str, Any]:
        """What the kernels are specialized on beside formats, and their launch option."""
        early = device_info(self.ring[0].device).has_pdl
        return {
            "BLOCK": block,
            "NEW": triton.next_power_of_2(self.tokens) if self.tokens else 0,
            "ADVANCE": self.lengths.ticket is not None,
            "D": self.ring[0].shape[3],
            "EARLY": early,
            **early_launch(early),
        }
