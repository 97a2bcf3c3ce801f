"""Layers that attend and keep a recurrent state as well (Falcon-H1, Zamba): their attention is folded, their states stay."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.states import crop_states, forget_states, select_states
from kvfold.methods import LayerSpec, Method
from kvfold.storage.devices import moved, present

STATES = (
    "number_of_states",
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
    "record_past",
)
"""Attributes of :class:`LinearAttentionLayer`."""


class FoldedHybridLayer(FoldedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A folded layer's keys and values, and the convolution and recurrent states of the same layer, as Transformers keeps them.

    Parameters
    ----------
    own : LinearAttentionLayer
        The layer that Transformers would use; says how many states there are.
    """

    def __init__(
        self,
        method: Method,
        spec: LayerSpec,
        kernel: str | None = None,
        max_length: int | None = None,
        own: LinearAttentionLayer | None = None,
    ) -> None:
        FoldedLayer.__init__(self, method, spec, kernel, max_length)
        LinearAttentionLayer.__init__(self, number_of_states=own.number_of_states if own is not None else 1)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop leaves no trace: a recurrent state cannot be taken back."""
        return LinearAttentionLayer.is_croppable.fget(self)  # type: ignore[attr-defined]

    def lazy_initialization(self, *args: Any, **states: Any) -> None:
        """Of keys and values (two arguments by position), or of a state (arguments by name)."""
        if args:
            FoldedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        FoldedLayer.reset(self)
        forget_states(self)

    def activate_past_recording(self) -> None:
        FoldedLayer.activate_past_recording(self)
        LinearAttentionLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        total = self.get_seq_length()
        FoldedLayer.crop(self, tokens_to_remove)
        crop_states(self, -int(tokens_to_remove), total)

    def _select(self, rows: list[int], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        FoldedLayer._select(self, rows, pick)
        select_states(self, pick)

    def to(self, device: torch.device | str | int) -> None:
        FoldedLayer.to(self, device)
        target = present(device)
        self.conv_states, self.recurrent_states = moved(self.conv_states, target), moved(self.recurrent_states, target)

    def states(self) -> dict[str, Any]:
        """What the layer keeps beside keys and values."""
        return {name: getattr(self, name) for name in STATES}
