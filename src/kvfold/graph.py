"""Decoding in a CUDA graph: one capture of the model's step, replayed without a decision on the host.

Lengths live on the device. A step closes the blocks that the step before left due, writes the new token into the windows,
and attends; what every layer needs to know of the lengths is computed once, at the start of the step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from kvfold.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvfold.cache import FoldedCache, FoldedLayer
    from kvfold.kernels.encode import Lengths


@dataclass
class StaticLengths:
    """Lengths before and after the step that runs; shared by all layers."""

    before: "Lengths"
    after: "Lengths"

    def begin(self, tokens: int, sink: int, recent: int, block: int) -> None:
        """Compute the lengths after a step of ``tokens`` (on the device)."""
        before, after = self.before, self.after
        due = (before.total - sink - recent).clamp_min(0).div(block, rounding_mode="floor") * block
        after.packed.copy_(torch.maximum(before.packed, due))
        after.total.copy_(before.total + tokens)
        after.sink.copy_(after.total.clamp_max(sink))
        after.recent.copy_(after.total - after.sink - after.packed)

    def end(self) -> None:
        """The step is over: what was after it is before the next."""
        for name in ("total", "packed", "sink", "recent"):
            getattr(self.before, name).copy_(getattr(self.after, name))


def why_not(layer: "FoldedLayer", room: int) -> str | None:
    """Why a layer cannot decode in a graph for ``room`` more tokens; None if it can."""
    method = layer.method
    if layer.kernel.name != "gluon":
        return f"its kernel is {layer.kernel.name}; needs gluon"
    if layer.encoder.name != "triton":
        return f"it is encoded by {layer.encoder.name}: {layer.encoder.reason}"
    if not layer.slabs or (method.stateful and not all(layer.ready)):
        return "nothing is packed yet; prefill a longer prompt first"
    if not layer.is_contiguous:
        return f"its packed storage grew to {len(layer.slabs)} slabs; fold with a max_length"
    if layer.packed_length(max(layer.lens) + room) > layer.slabs[0].blocks * layer.block:
        return f"its packed storage ends at {layer.slabs[0].blocks * layer.block} tokens; fold with a larger max_length"
    return None


class DecodeGraph:
    """A captured decode step of a model over a folded cache.

    Parameters
    ----------
    model : PreTrainedModel
        On a CUDA device, folded.
    cache : FoldedCache
        Holding the prompt; made with a ``max_length`` that leaves room. Until :meth:`finish` only this object may use it.
    room : int
        Tokens that will be decoded at most.

    Raises
    ------
    UnsupportedModelError
        If a layer cannot decode in a graph; the message says why.

    Notes
    -----
    Sequences may have different lengths. Every call decodes one token per sequence.
    """

    def __init__(self, model: PreTrainedModel, cache: "FoldedCache", room: int) -> None:
        from kvfold.kernels.encode import Lengths

        folded = cache.folded
        if len(folded) != len(cache.layers):
            raise UnsupportedModelError("decode graph: every layer must be folded")
        for layer in folded:
            if why := why_not(layer, room):
                raise UnsupportedModelError(f"decode graph: layer {layer.spec.layer_idx}: {why}")
        first = folded[0]
        self.model, self.cache, self.room, self.steps = model, cache, room, 0
        self.method = cache.method
        sink = self.method.sink
        self.lengths = StaticLengths(
            *(Lengths.of(first.lens, first.packed, sink, first.device) for _ in range(2)),
        )
        self.ids = torch.zeros(len(first.lens), 1, dtype=torch.long, device=first.device)
        self.positions = torch.tensor([[n] for n in first.lens], device=first.device)
        for layer in folded:
            layer.enter_static(self.lengths)
        self._capture()

    def _step(self) -> torch.Tensor:
        method = self.method
        self.lengths.begin(1, method.sink, method.recent, method.block)
        out: Any = self.model(
            input_ids=self.ids, position_ids=self.positions, past_key_values=self.cache, use_cache=True
        )
        self.lengths.end()
        self.positions.add_(1)
        return out.logits

    def _capture(self) -> None:
        saved = self._save()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):  # compile and warm up; undone below
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._restore(saved)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.logits = self._step()
        self._restore(saved)

    def _save(self) -> list[torch.Tensor]:
        """What the warm-up changes and must not: lengths and positions. The tokens it wrote are written over."""
        return [t.clone() for t in self._moving()]

    def _restore(self, saved: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._moving(), saved, strict=True):
            tensor.copy_(value)

    def _moving(self) -> list[torch.Tensor]:
        of = self.lengths.before
        return [of.total, of.packed, of.sink, of.recent, self.positions]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Decode one token.

        Parameters
        ----------
        ids : Tensor, int64 [batch, 1]

        Returns
        -------
        Tensor [batch, 1, vocabulary]
            Logits; overwritten by the next call.
        """
        if self.steps == self.room:
            raise ValueError(f"decode graph: room={self.room} tokens are decoded")
        self.ids.copy_(ids)
        self.graph.replay()
        self.steps += 1
        return self.logits

    def finish(self) -> None:
        """Give the cache back: close what is due and bring its lengths on the host up to date."""
        for layer in self.cache.folded:
            layer.leave_static(self.steps)
