"""Lengths of sequences on the device: as the host counts them, and as a captured step moves them."""

from dataclasses import dataclass

import torch

from kvfold.arithmetic import lasting
from kvfold.kernels.lengths import Lengths


@lasting(8)
def lengths_of(total: tuple[int, ...], packed: tuple[int, ...], sink: int, device: torch.device) -> Lengths:
    """Made once a step, not once a layer, and without waiting for the device."""
    rows = [
        total,
        packed,
        [min(n, sink) for n in total],
        [n - min(n, sink) - p for n, p in zip(total, packed, strict=True)],
    ]
    return Lengths(*_send(torch.tensor(rows, dtype=torch.int32, device="cpu"), device))


@lasting(64)
def on_device(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64, made once for all layers and steps; not to be written to."""
    return _send(torch.tensor(values, device="cpu"), device)


def _send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device, without waiting for it."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass
class StaticLengths:
    """Lengths before and after the step that runs; shared by all layers."""

    before: Lengths
    after: Lengths
    slots: torch.Tensor | None = None
    """Where the step's queries go in the rings that encoders follow, int64 [batch, 1, 1, 1]; None: nobody keeps queries."""
    ring: int = 0
    """Slots of these rings."""
    steps: int = 0
    """Steps replayed so far, for the host."""
    running: bool = False
    """Whether the model's step is being captured."""

    def begin(self, tokens: int, sink: int, recent: int, block: int) -> None:
        """Compute the lengths after a step of ``tokens`` (on the device)."""
        before, after = self.before, self.after
        if self.slots is not None:
            self.slots.copy_((before.total % self.ring).view(-1, 1, 1, 1))
        due = (before.total - sink - recent).clamp_min(0).div(block, rounding_mode="floor") * block
        after.packed.copy_(torch.maximum(before.packed, due))
        after.total.copy_(before.total + tokens)
        after.sink.copy_(after.total.clamp_max(sink))
        after.recent.copy_(after.total - after.sink - after.packed)

    def end(self) -> None:
        """The step is over: what was after it is before the next."""
        for name in ("total", "packed", "sink", "recent"):
            getattr(self.before, name).copy_(getattr(self.after, name))
