"""Full precision in one buffer of the final length: the baseline of memory's benchmark without copies."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer


class StaticLayer(DynamicLayer):
    """Full precision in one buffer [batch, longest, num_kv_heads, head_dim], written in place.

    ``rows`` are the sequences that a prefill brings; ``used`` counts tokens, a step's included. Both are set from outside.
    """

    def __init__(self, batch: int, longest: int, heads: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.keys, self.values = (
            torch.empty(batch, longest, heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        self.rows, self.used = slice(0, batch), 0
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return 0  # positions are passed

    def update(self, key_states, value_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        assert self.keys is not None and self.values is not None
        tokens = key_states.shape[2]
        sides = (self.keys, key_states), (self.values, value_states)
        if tokens > 1:  # a prompt attends to itself
            for whole, new in sides:
                whole[self.rows, :tokens] = new.transpose(1, 2)
            return key_states, value_states
        for whole, new in sides:
            whole[:, self.used - 1] = new[:, :, 0]
        return tuple(whole[:, : self.used].transpose(1, 2) for whole, _ in sides)


def static_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
    """SDPA by cuDNN (by FlashAttention where cuDNN does not serve): over exactly the tokens given, without a mask."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=query.shape[2] > 1, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("kvfold_bench_static", static_attention)
