"""Answers read through a folded cache.

The first call of a folded cache attends exactly. So a prompt's context alone is given to it; the question follows through the
cache, and so does every generated token.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.engines.transformers.graph import decoding
from kvfold.evaluation.compare import on_gpu
from kvfold.evaluation.perplexity import packs, prefill
from kvfold.evaluation.shared import SharedPrompt
from kvfold.evaluation.suites.base import Outcome, Prompt

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache

STRIDE = 16
"""Tokens decoded on a GPU before the host looks whether the answer has ended; what follows its end is dropped."""


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    cache: FoldedCache,
    chunk: int,
    shared: SharedPrompt | None = None,
) -> tuple[Outcome, int]:
    """Generate greedily until an end token, a stop string, or ``new_tokens``.

    Parameters
    ----------
    cache
        Empty.
    chunk
        Tokens of the question per call.
    shared
        What other caches were given of the same context; None: the model runs it.

    Returns
    -------
    Outcome, int
        And how many of the question's and the generated tokens read packed keys and values.
    """
    ids = prompt.ids.to(model.device)
    prefill(model, ids, prompt.prefilled, cache, shared)
    tested = 0
    logits = torch.empty(0)
    with torch.inference_mode():
        for begin in range(prompt.prefilled, ids.shape[1], chunk):
            part = ids[:, begin : begin + chunk]
            tested += part.shape[1] if packs(cache) else 0
            logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    ends = end_tokens(model, tokenizer)
    graphs = decoding(model, cache, prompt.new_tokens, required=False) if on_gpu(model) else nullcontext()
    tokens = [logits[:, -1].argmax(-1, keepdim=True)]
    packed = packs(cache)  # the first token is the question's last call's
    read = int(tested > 0)
    new: list[int] = []
    stride = STRIDE if on_gpu(model) else 1
    stopped = False
    with torch.inference_mode(), graphs:
        while not stopped:
            if len(tokens) == prompt.new_tokens or not len(tokens) % stride:
                new, stopped = _ended(tokenizer, torch.cat(tokens, 1)[0].tolist(), ends, prompt)
            if stopped or len(tokens) == prompt.new_tokens:
                break
            read += int(packed)
            out = model(tokens[-1], past_key_values=cache, use_cache=True).logits
            packed = packed or packs(cache)
            tokens.append(out[:, -1].argmax(-1, keepdim=True))
    text = _text(tokenizer, new, ends, prompt)
    return Outcome(None, text, len(new), capped=not stopped), tested + min(read, len(new))


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end an answer."""
    found: set[int] = set()
    for ends in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if ends is not None:
            found |= set(ends) if isinstance(ends, list) else {int(ends)}
    return found


def _ended(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: set[int], prompt: Prompt
) -> tuple[list[int], bool]:
    """The answer's own tokens, and whether it has ended before or with the last of them."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1], True
    if not prompt.stop or not _stop_at(str(tokenizer.decode(tokens)), prompt):
        return tokens, False
    first = 1  # the shortest beginning that has the stop string; several were decoded since the last look
    while not _stop_at(str(tokenizer.decode(tokens[:first])), prompt):
        first += 1
    return tokens[:first], True


def _stop_at(text: str, prompt: Prompt) -> bool:
    """Whether a stop string ends the answer."""
    return any(s in text[_begin(text, prompt) :] for s in prompt.stop)


def _begin(text: str, prompt: Prompt) -> int:
    """Where stop strings count from: the answer's first letter, or its start."""
    return 0 if prompt.stop_at_once else len(text) - len(text.lstrip())


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: set[int], prompt: Prompt) -> str:
    """The answer without its end."""
    kept = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    text = str(tokenizer.decode(kept, clean_up_tokenization_spaces=False))
    cuts = [at for s in prompt.stop if (at := text.find(s, _begin(text, prompt))) >= 0]
    return text[: min(cuts)] if cuts else text
