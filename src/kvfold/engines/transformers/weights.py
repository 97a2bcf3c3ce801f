"""Weights of attention over a folded layer, for calls that ask for them (``output_attentions=True``)."""

from typing import Any

import torch
from torch import nn
from transformers.utils.output_capturing import _active_collector

from kvfold.engines.transformers import originals
from kvfold.engines.transformers.layer import FoldedLayer


def asked(previous: str | None, options: dict[str, Any]) -> bool:
    """Whether a call asks for weights, and the model's attention of before would give them: eager attention does, others none.

    Parameters
    ----------
    previous : str or None
        Implementation that the model had before it was folded.
    options : dict
        What the attention function was given by name. Not all models hand the question on to it: Transformers' collector of
        the call knows it, too, and whether the configuration asks.
    """
    if previous not in ("eager", None):
        return False
    return bool(options.get("output_attentions")) or any("attentions" in key for key in _active_collector.get() or ())


def weights_of(
    layer: FoldedLayer,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    valid: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Weights of a call's queries over what a layer holds and the call's own keys, before the layer takes these in.

    The model's own eager attention computes them in float32 from decoded keys, so that they have its form (caps, sinks). The
    layer is read, nothing in it changes.

    Parameters
    ----------
    query : Tensor [batch, num_heads, tokens, head_dim]
    key : Tensor [batch, num_kv_heads, tokens, head_dim]
    valid : Tensor or None, bool [batch, tokens]
        False at padding.
    options : dict
        What the attention function was given by name.

    Returns
    -------
    Tensor, like ``query`` [batch, num_heads, tokens, columns]
        Columns as the model counts them.
    """
    (batch, heads, tokens, dim), held = key.shape, layer.columns.count
    seen = torch.ones(batch, held + tokens, dtype=torch.bool, device=key.device)
    seen[:, :held] = layer.columns.valid(batch, key.device)
    if valid is not None:
        seen[:, held:] = valid
    keys = torch.zeros(batch, heads, held, dim, device=key.device, dtype=torch.float32)
    for row in range(batch if held else 0):
        keys[row, :, seen[row, :held]] = layer.decoded(row)[0]
    return _eager(module, query, torch.cat([keys, key.float()], -2), seen, options)


def among(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, valid: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """:func:`weights_of` tokens that attend to one another alone; [batch, num_heads, tokens, tokens]."""
    seen = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device) if valid is None else valid
    return _eager(module, query, key.float(), seen, options)


def _eager(
    module: nn.Module, query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """The model's own eager attention, for its weights; ``keys`` float32 [batch, num_kv_heads, columns, head_dim]."""
    full = query.float()
    mask = originals.causal_mask("eager", module, None if bool(seen.all()) else seen, full, keys.shape[-2])
    _, weights = originals.attend("eager", module, full, keys, keys, mask, **{**options, "dropout": 0.0})  # values: any
    return weights.to(query.dtype)
