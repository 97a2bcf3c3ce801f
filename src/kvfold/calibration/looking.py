"""A model's own attention, with somebody who looks at each layer's queries, keys and values on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvfold.kernels.prompt import attend_prompt

Look = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Given a layer's number, queries, keys and values after RoPE, [batch, heads, tokens, head_dim]: the keys and values to use."""


def register(name: str, look: Look) -> None:
    """Make the attention that folded models have (masks of the model's own, soft caps, learned sinks) known to Transformers
    as ``name``."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        key, value = look(module.layer_idx, query, key, value)  # type: ignore[arg-type]
        if softcap is not None or s_aux is not None:
            scale = scaling if scaling is not None else query.shape[-1] ** -0.5
            out = attend_prompt(query, key, value, attention_mask, scale, softcap, s_aux)
        else:
            out = nn.functional.scaled_dot_product_attention(
                query, key, value, attention_mask, is_causal=attention_mask is None, scale=scaling, enable_gqa=True
            )
        return out.transpose(1, 2).contiguous(), None

    register_both(name, attention)


def register_both(name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Register an attention function whose masks are those of sdpa: bool [batch, 1, tokens, tokens], or None."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextlib.contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Attend by the function of this name, and by the model's own again afterwards."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
