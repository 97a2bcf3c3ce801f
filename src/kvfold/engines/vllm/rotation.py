"""The model's rotary embedding, for methods that store keys before it: vLLM hands keys on after it."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvfold.engines.transformers.attentions import of_decoder, rotates
from kvfold.errors import KVFoldError
from kvfold.rope import Rope, find_rotary_module, rope_of

PLACES = (0, 1, 17, 300)
"""Positions at which vLLM's angles are compared with ours."""


def rope_of_config(config: Any) -> Rope:
    """The rotation of a model, from its configuration; none of its weights is made.

    Raises
    ------
    KVFoldError
        If layers differ, or rotate otherwise than in halves and by fixed frequencies.
    """
    text = config.get_text_config()
    if getattr(text, "no_rope_layers", None):
        raise KVFoldError("no_rope_layers: methods that store keys before RoPE serve models that rotate all layers")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    module = find_rotary_module(model)
    still = [at for at, attention in sorted(of_decoder(model).items()) if at >= 0 and not rotates(attention, text, at)]
    if still:
        raise KVFoldError(
            f"layers {', '.join(map(str, still))} have no positions: methods that store keys before RoPE serve models that "
            "rotate all layers"
        )
    holder = nn.Module()
    with torch.device("cpu"):
        holder.rotary = type(module)(config=text)
    return rope_of(holder)


def check(rope: Rope) -> None:
    """Compare with what vLLM rotates by, in this process.

    Raises
    ------
    KVFoldError
        If it is something else.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    for theirs in _ROPE_DICT.values():
        table = getattr(theirs, "cos_sin_cache", torch.empty(0, 0))
        places = [at for at in PLACES if at < table.shape[0]]
        angles = torch.tensor(places, dtype=torch.float32)[:, None] * rope.inv_freq
        ours = torch.cat((angles.cos(), angles.sin()), -1) * rope.scaling
        right = getattr(theirs, "is_neox_style", False) and table.shape[-1] == ours.shape[-1]
        if not right or not torch.allclose(table[places].float().cpu(), ours, atol=1e-2):
            raise KVFoldError(
                f"{type(theirs).__name__}: vLLM rotates keys otherwise than in halves and by fixed frequencies; methods that "
                "store keys before RoPE are not served; allowed: methods that store them after it"
            )
