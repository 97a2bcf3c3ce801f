"""Greedy decoding over a folded cache, timed; and throw-away caches that compile what is timed later."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from kvfold.engines.transformers.graph import decoding
from kvfold.engines.transformers.names import passing
from kvfold.evaluation.perplexity import now, prefill

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.methods.base import Method


def warm_up(model: PreTrainedModel, method: Method, ids: torch.Tensor, prefix: int, chunk: int) -> None:
    """Fill a throw-away cache, so that what is compiled for a method is there before it is timed.

    On a GPU with all of the prefix, since kernels are compiled for lengths too. On a CPU with as many of its tokens as make a
    method pack some: its loops are the same for all lengths, and a prefill takes as long as the row.

    Parameters
    ----------
    ids
        ``[1, tokens]`` int64, more than `prefix` tokens.
    prefix, chunk
        Tokens that will be prefilled, and given to a scoring call.
    """
    import kvfold

    tokens = prefix
    if not on_gpu(model):
        tokens = min(prefix, method.sink + method.recent + 2 * method.block)
    more = ids[:, tokens : tokens + chunk]
    cache = kvfold.fold(model, method, max_length=room(model, tokens + more.shape[1] + 2))
    try:
        prefill(model, ids, tokens, cache)
        with torch.inference_mode():
            logits = model(more, **passing(model, cache), use_cache=True).logits[0, -1]
        decode(model, cache, logits, 2)
    finally:
        kvfold.unfold(model)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What :func:`decode` generated.

    Attributes
    ----------
    tokens
        Greedy choices, one after the other.
    seconds
        For all but the first.
    path
        ``graph``, or ``steps: `` and why not in one.
    """

    tokens: list[int]
    seconds: float
    path: str


def decode(model: PreTrainedModel, cache: FoldedCache, logits: torch.Tensor, new_tokens: int) -> Decoded:
    """Decode greedily after the cache's content; does not stop at an end token.

    On a GPU in a CUDA graph where there can be one. The first step is not timed: it captures the graph.

    Parameters
    ----------
    logits
        ``[vocab]``, the prediction of the first token.
    new_tokens
        At least 2.
    """
    graphs = decoding(model, cache, new_tokens, required=False) if on_gpu(model) else nullcontext()
    tokens = [logits.argmax().to(model.device).view(1, 1)]

    def step() -> None:
        logits = model(tokens[-1], **passing(model, cache), use_cache=True).logits
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))

    with torch.inference_mode(), graphs as steps:
        step()
        started = now(model)
        for _ in range(new_tokens - 1):
            step()
        seconds = now(model) - started
        path = "steps: no CUDA device" if steps is None else decode_path(steps.replayed, new_tokens, steps.reason)
    return Decoded(torch.cat(tokens[:new_tokens], dim=1)[0].tolist(), seconds, path)


def decode_path(replayed: int, tokens: int, reason: str | None) -> str:
    """How tokens were decoded, as rows say it: ``graph``, or ``steps: `` and the reason."""
    if replayed == tokens:
        return "graph"
    return f"steps: {reason}" if not replayed else f"steps: {tokens - replayed} of {tokens} tokens before a graph"


def room(model: PreTrainedModel, tokens: int) -> int | None:
    """`max_length` of a cache for so many tokens: on a GPU storage is taken at once, on a CPU as it is needed."""
    return tokens if on_gpu(model) else None


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether a model can decode in CUDA graphs."""
    return bool(model.device.type == "cuda")
