"""Attention of a sequence's first tokens to themselves, where the platform's own attention lacks something.

Exact: nothing is packed yet, and keys and values are those of the call.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvfold.kernels.merge import Partial

WORKSPACE = 256 << 20
"""Bytes of scores that exist at a time where they are capped."""
EXTRA = 8
"""Channels that a learned sink adds to queries and keys: three are used, and fused kernels want a multiple of eight."""


def attend_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention with soft-capped scores or learned sinks.

    Parameters
    ----------
    query : Tensor [batch, num_heads, tokens, head_dim]
    key, value : Tensor [batch, num_kv_heads, tokens, head_dim]
    mask : Tensor or None, bool [batch, 1, tokens, tokens]
        What each query sees; None: itself and all before it.
    softcap, sinks
        See :class:`kvfold.kernels.AttentionCall`.

    Returns
    -------
    Tensor, like ``query``
    """
    if softcap is not None:
        return _capped(query, key, value, mask, scale, softcap, sinks)
    assert sinks is not None
    return _with_sinks(query, key, value, mask, scale, sinks)


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """By fused attention: a first key that every query sees, whose score is the sink, and whose value is 0.

    The sink lies in three more channels of the queries, where only that key is not 0; three, so that it keeps its digits in
    16 bits. A first query goes with the key, so that the causal mask fits.
    """
    dim, rest = query.shape[-1], sinks.float() / scale
    query, key, value = (pad(x, (0, EXTRA, 1, 0)) for x in (query, key, value))
    for channel in range(dim, dim + 3):
        part = rest.to(query.dtype)
        query[..., channel] = part.view(-1, 1)
        rest = rest - part.float()
    key[:, :, 0, dim : dim + 3] = 1.0
    if mask is not None:
        mask = pad(mask, (1, 0, 1, 0), value=True)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scale,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[:, :, 1:, :dim]


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """In float32, some queries at a time."""
    batch, num_heads, tokens, _ = query.shape
    heads = key.shape[1]
    keys, values = key.float(), value.float()
    step = max(1, WORKSPACE // (4 * batch * num_heads * tokens))
    outs = []
    for first in range(0, tokens, step):
        stop = min(first + step, tokens)
        rows = query[:, :, first:stop].float().unflatten(1, (heads, -1)).flatten(2, 3)
        if mask is None:
            sees = torch.ones(stop - first, stop, dtype=torch.bool, device=query.device).tril(first)[None, None]
        else:
            sees = mask[:, :, first:stop, :stop]
        scores = (rows @ keys[:, :, :stop].transpose(-1, -2) * (scale / softcap)).tanh() * softcap
        part = Partial.of(scores, sees.repeat(1, 1, num_heads // heads, 1), values[:, :, :stop])
        whole = [part] if sinks is None else [part, Partial.of_sinks(sinks, part)]
        outs.append(Partial.merge(whole).unflatten(2, (-1, stop - first)).flatten(1, 2).to(query.dtype))
    return torch.cat(outs, 2)
