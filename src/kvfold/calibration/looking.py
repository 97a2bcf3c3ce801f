"""A model's own attention, with somebody who looks at each layer's queries, keys and values on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

Look = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Given a layer's number, queries, keys and values after RoPE, [batch, heads, tokens, head_dim]: the keys and values to use."""


def register(name: str, look: Look) -> None:
    """Make causal attention, within sliding windows where layers have them, known to Transformers as ``name``."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        key, value = look(module.layer_idx, query, key, value)  # type: ignore[arg-type]
        tokens, mask = query.shape[-2], None
        if sliding_window:
            ones = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
            mask = ones.tril() & ~ones.tril(-sliding_window)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


@contextlib.contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Attend by the function of this name, and by the model's own again afterwards."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
