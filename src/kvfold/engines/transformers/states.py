"""Convolution and recurrent states of Transformers' own layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin


def states_of(layer: Any) -> list[torch.Tensor]:
    """Convolution and recurrent states that a layer holds."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    return [t for states in (layer.conv_states, layer.recurrent_states) for t in states.values() if t is not None]


def select_states(layer: Any, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Rearrange the batch of a layer's states."""
    for states in (layer.conv_states, layer.recurrent_states):
        states.update({index: pick(t) for index, t in states.items() if t is not None})


def forget_states(layer: Any) -> None:
    """A layer's states as of a new one. Transformers' own ``reset`` keeps their shapes: of another batch, or of a convolution
    that recorded the past, which the next call cannot take."""
    for states, there in (
        (layer.conv_states, layer.is_conv_states_initialized),
        (layer.recurrent_states, layer.is_recurrent_states_initialized),
    ):
        for index in states:
            states[index], there[index] = None, False
    layer.has_previous_state.update(dict.fromkeys(layer.has_previous_state, False))


def spare_columns(layer: Any, total: int) -> int:
    """Columns of ``total`` that convolution states can lose, so that they are what they were before: those recorded."""
    spare = total
    for index, state in layer.conv_states.items():
        if state is not None and state.shape[-1] < total:
            spare = min(spare, state.shape[-1] - layer.conv_kernel_size[index])
    return spare


def crop_states(layer: Any, count: int, total: int) -> None:
    """Take the newest ``count`` of ``total`` columns from convolution states, as many as :func:`spare_columns`, or all."""
    if count and count >= total:
        forget_states(layer)
    elif count or layer.record_past:
        for index, state in layer.conv_states.items():
            if state is not None:
                size, kept = layer.conv_kernel_size[index], state[..., : state.shape[-1] - count]
                # columns before the first are zeros, as in a short first call
                layer.conv_states[index] = F.pad(kept, (max(0, size - kept.shape[-1]), 0))[..., -size:]
