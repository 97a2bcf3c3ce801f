"""Answers read through a folded cache.

The first call of a folded cache attends exactly. So a prompt's context alone is given to it; the question follows through the
cache, and so does every generated token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.engines.transformers.graph import decoding
from kvfold.engines.transformers.names import passing
from kvfold.engines.transformers.shared import SharedPrompt
from kvfold.errors import KVFoldError
from kvfold.evaluation.decoding import on_gpu
from kvfold.evaluation.perplexity import packs, prefill
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
    """Generate greedily until an end token, a stop string, or ``new_tokens``; see :func:`answers`."""
    (found,) = answers(model, tokenizer, [prompt], cache, chunk, shared)
    return found


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    cache: FoldedCache,
    chunk: int,
    shared: SharedPrompt | None = None,
) -> list[tuple[Outcome, int]]:
    """Generate greedily until an end token, a stop string, or ``new_tokens``, for several prompts as one batch.

    Parameters
    ----------
    prompts
        With as many prefilled tokens each, and the same stop strings and ``new_tokens``. Questions may differ in length: before
        shorter ones the batch has columns of padding, which a folded cache does not store.
    cache
        Empty.
    chunk
        Tokens of the question per call. Those of one call see each other unfolded, and calls are cut alike for the whole batch:
        only with questions in one call each are answers those of one prompt at a time.
    shared
        What other caches were given of the same contexts; None: the model runs them.

    Returns
    -------
    list of (Outcome, int)
        By prompt; and how many of the question's and the generated tokens read packed keys and values.

    Raises
    ------
    KVFoldError
        Prompts do not fit one batch.
    """
    first = prompts[0]
    if any((p.prefilled, p.new_tokens, p.stop) != (first.prefilled, first.new_tokens, first.stop) for p in prompts):
        raise KVFoldError("prompts: they differ in prefilled tokens, stop strings or new_tokens; ask one at a time")
    batch = _Batch(prompts, model.device)
    prefill(model, batch.contexts, first.prefilled, cache, shared)
    tested = [0] * len(prompts)
    logits = torch.empty(0)
    with torch.inference_mode():
        for begin in range(0, batch.width, chunk):
            if packs(cache):
                tested = [count + new for count, new in zip(tested, batch.counted(begin, chunk), strict=True)]
            part = batch.questions[:, begin : begin + chunk]
            how = batch.how(begin, part.shape[1])
            logits = model(part, **passing(model, cache), use_cache=True, logits_to_keep=1, **how).logits
    ends = end_tokens(model, tokenizer)
    graphs = decoding(model, cache, first.new_tokens, required=False) if on_gpu(model) else nullcontext()
    tokens = [logits[:, -1].argmax(-1, keepdim=True)]
    packed = packs(cache)  # the first token is the question's last call's
    read = int(any(tested))
    found: list[tuple[list[int], bool]] = [([], False)] * len(prompts)
    stride = STRIDE if on_gpu(model) else 1
    with torch.inference_mode(), graphs:
        while True:
            if len(tokens) == first.new_tokens or not len(tokens) % stride:
                rows = torch.cat(tokens, 1).tolist()
                found = [
                    old if old[1] else _ended(tokenizer, row, ends, first) for old, row in zip(found, rows, strict=True)
                ]
            if len(tokens) == first.new_tokens or all(stopped for _, stopped in found):
                break
            read += int(packed)
            how = batch.how(batch.width + len(tokens) - 1, 1)
            out = model(tokens[-1], **passing(model, cache), use_cache=True, **how).logits
            packed = packed or packs(cache)
            tokens.append(out[:, -1].argmax(-1, keepdim=True))
    return [
        (Outcome(None, _text(tokenizer, new, ends, first), len(new), capped=not stopped), count + min(read, len(new)))
        for (new, stopped), count in zip(found, tested, strict=True)
    ]


class _Batch:
    """Prompts side by side: contexts of one length, then questions that end together.

    Attributes
    ----------
    contexts : Tensor, int64 [batch, prefilled]
    questions : Tensor, int64 [batch, width]
    valid : Tensor or None, bool [batch, width]
        False at padding; None where there is none.
    """

    def __init__(self, prompts: Sequence[Prompt], device: torch.device) -> None:
        cut = prompts[0].prefilled
        self.contexts = torch.cat([p.ids[:, :cut] for p in prompts]).to(device)
        asked = [p.ids[0, cut:] for p in prompts]
        self.width = max(map(len, asked))
        self.counts = [len(question) for question in asked]
        self.questions = torch.stack([pad(question, (self.width - len(question), 0)) for question in asked]).to(device)
        self.valid: torch.Tensor | None = None
        if min(self.counts) < self.width:
            starts = torch.tensor([self.width - count for count in self.counts])
            self.valid = (torch.arange(self.width) >= starts[:, None]).to(device)

    def counted(self, begin: int, chunk: int) -> list[int]:
        """Tokens of each question among the columns of a call."""
        end = min(begin + chunk, self.width)
        return [max(0, end - max(begin, self.width - count)) for count in self.counts]

    def how(self, begin: int, count: int) -> dict[str, torch.Tensor]:
        """Mask and positions of a call of ``count`` columns, the ``begin``-th after the contexts first; {} without padding."""
        if self.valid is None:
            return {}
        rows, cut = self.contexts.shape
        new = self.valid.new_ones(rows, max(0, begin + count - self.width))
        valid = torch.cat([self.valid[:, : begin + count], new], 1)
        positions = cut + valid.long().cumsum(1) - 1
        mask = torch.cat([valid.new_ones(rows, cut), valid], 1)
        return {"attention_mask": mask.long(), "position_ids": positions[:, begin:]}


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
    if not prompt.stop or not _stop_at(_decoded(tokenizer, tokens), prompt):
        return tokens, False
    first = 1  # the shortest beginning that has the stop string; several were decoded since the last look
    while not _stop_at(_decoded(tokenizer, tokens[:first]), prompt):
        first += 1
    return tokens[:first], True


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int], special: bool = True) -> str:
    """As the model wrote it: a tokenizer may be set to take spaces before full stops away. ``special``: with special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def _stop_at(text: str, prompt: Prompt) -> bool:
    """Whether a stop string ends the answer."""
    return any(s in text[_begin(text, prompt) :] for s in prompt.stop)


def _begin(text: str, prompt: Prompt) -> int:
    """Where stop strings count from: the answer's first letter, or its start."""
    return 0 if prompt.stop_at_once else len(text) - len(text.lstrip())


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: set[int], prompt: Prompt) -> str:
    """The answer without its end and without special tokens, which may have ended it."""
    kept = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    text = _decoded(tokenizer, kept, special=False)
    cuts = [at for s in prompt.stop if (at := text.find(s, _begin(text, prompt))) >= 0]
    return text[: min(cuts)] if cuts else text
