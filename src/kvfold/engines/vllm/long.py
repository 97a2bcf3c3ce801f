"""vLLM's flash attention, for the chunks of prompts: :mod:`kvfold.kernels.paged.long` calls it, piece by piece."""

import torch

from kvfold.kernels.paged import Flash
from kvfold.kernels.paged.long import Part


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Part:
    """See :class:`kvfold.kernels.paged.Flash`."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    tokens, length = query.shape[0], keys.shape[0]

    def ends(n: int) -> torch.Tensor:
        return torch.arange(0, 2 * n, n, dtype=torch.int32, device=query.device)

    out, total = flash_attn_varlen_func(
        q=query,
        k=keys.contiguous(),
        v=values.contiguous(),
        max_seqlen_q=tokens,
        cu_seqlens_q=ends(tokens),
        max_seqlen_k=length,
        cu_seqlens_k=ends(length),
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        fa_version=get_flash_attn_version(head_size=query.shape[2]),
    )
    return out, total


def merged(a: Part, b: Part) -> Part:
    """Two parts as one."""
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    out, total = torch.empty_like(b[0]), torch.empty_like(b[1])
    merge_attn_states(out, a[0], a[1], b[0], b[1], total)
    return out, total


FLASH = Flash(flash, merged)
