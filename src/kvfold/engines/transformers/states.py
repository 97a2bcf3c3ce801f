"""Convolution and recurrent states of Transformers' own layers."""

from collections.abc import Callable
from typing import Any

import torch
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
