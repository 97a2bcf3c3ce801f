"""Lengths of sequences where kernels read them: on the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Lengths:
    """Lengths of a batch's sequences on the device.

    With a ``ticket``, :func:`kvfold.kernels.affine.encode.append_and_close` advances them, and every layer needs its own.
    Without one, whoever made them keeps them: a launch reads ``total`` and ``packed``, and layers may share them.

    Attributes
    ----------
    total : Tensor, integer [batch]
        Tokens in the cache.
    packed : Tensor, integer [batch]
        Tokens in packed storage, a multiple of the block.
    sink, recent : Tensor, int32 [batch]
        Tokens in the sink window and in the ring, for the attention kernel.
    ticket : Tensor or None, int32 [batch]
        Zero between launches.
    """

    total: torch.Tensor
    packed: torch.Tensor
    sink: torch.Tensor
    recent: torch.Tensor
    ticket: torch.Tensor | None = None

    @classmethod
    def of(
        cls, total: list[int], packed: list[int], sink: int, device: torch.device | str, advance: bool = False
    ) -> "Lengths":
        """From lengths on the host; ``sink`` is the size of the sink window, ``advance`` asks for a ticket."""
        rows = (
            total,
            packed,
            [min(n, sink) for n in total],
            [max(n - sink, 0) - p for n, p in zip(total, packed, strict=True)],
            *([[0] * len(total)] if advance else []),
        )
        return cls(*(torch.tensor(row, dtype=torch.int32, device=device) for row in rows))
