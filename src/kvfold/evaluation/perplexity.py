"""Perplexity, KL divergence and top-1 agreement, decode-style.

A single forward pass over a text attends to full-precision keys and values only, whatever the cache stores. So the
prefix is prefilled into the cache, and the continuation goes through the same cache in chunks: every scored token reads
what was folded.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvfold.errors import KVFoldError

CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Reference:
    """Logits of the model with its own full-precision cache, on the same path as the scored ones.

    Attributes
    ----------
    logits
        ``[tokens, vocab]`` on the CPU, in the model's dtype: 4 bytes x tokens x vocab for a float32 model.
    prefix
        Tokens prefilled before the first scored one.
    chunk
        Query tokens per call.
    """

    logits: torch.Tensor
    prefix: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Score:
    """What the scored tokens say about a cache.

    Attributes
    ----------
    nll
        ``[tokens]`` float32, negative log-likelihood in nats of each scored token.
    kl
        ``[tokens]`` float32, KL(full || folded) in nats, between the predictions with a full-precision cache and with
        this one. Empty without a reference.
    agree
        ``[tokens]`` bool, whether both put the same token first. Empty without a reference.
    correct
        ``[tokens]`` bool, whether this cache's first choice is the text's token.
    last_logits
        ``[vocab]`` float32, the prediction after the last token, from which generation can go on.
    prefill_seconds, score_seconds
        Wall-clock time of the two parts.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor
    correct: torch.Tensor
    last_logits: torch.Tensor
    prefill_seconds: float
    score_seconds: float

    @property
    def ppl(self) -> float:
        """Perplexity of the scored tokens; infinite or NaN when the predictions are."""
        mean = float(self.nll.double().mean())
        return math.exp(mean) if mean < 700 else (math.nan if math.isnan(mean) else math.inf)

    @property
    def kld(self) -> float:
        """Mean KL divergence per token, in nats."""
        return float(self.kl.double().mean())

    @property
    def top1(self) -> float:
        """Share of tokens where both caches lead to the same first choice, 0 to 1."""
        return float(self.agree.double().mean())


def reference(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    prefix: int,
    chunk: int = CHUNK,
    on_tokens: Callable[[int], None] | None = None,
) -> Reference:
    """Run the model with its own `DynamicCache` over a text; see `score` for the parameters.

    The model must not be folded at that time.
    """
    cache = DynamicCache(config=model.config)
    parts = []
    _prefill(model, input_ids, prefix, cache)
    _say(on_tokens, prefix)
    for begin, _, logits in _continue(model, input_ids, prefix, chunk, cache):
        parts.append(logits.to("cpu"))
        _say(on_tokens, min(chunk, input_ids.shape[1] - 1 - begin))
    return Reference(torch.cat(parts), prefix, chunk)


def score(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    prefix: int,
    cache: Cache,
    chunk: int = CHUNK,
    reference: Reference | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> Score:
    """Prefill a prefix into a cache, then score the rest of the text through it.

    Parameters
    ----------
    model
        Causal language model; folded if the cache is a folded one.
    input_ids
        ``[1, prefix + tokens + 1]`` int64. The scored tokens are the last `tokens`: the first token after the prefix is
        predicted by the exact prefill, so it does not count.
    prefix
        Tokens of the prefill, at least 1.
    cache
        An empty cache; afterwards it holds ``prefix + tokens`` tokens.
    chunk
        Query tokens per call. 1 is token by token; more is faster, and the tokens of one chunk see each other unfolded.
    reference
        Full-precision logits of the same tokens, prefix and chunk. Without it there is no divergence and no agreement.
    on_tokens
        Called with the number of tokens done since its last call.

    Raises
    ------
    KVFoldError
        A wrong shape, or a reference made for another path.
    """
    _check(input_ids, prefix, chunk)
    tokens = input_ids.shape[1] - prefix - 1
    if reference is not None and (reference.logits.shape[0], reference.prefix, reference.chunk) != (
        tokens,
        prefix,
        chunk,
    ):
        raise KVFoldError(
            f"reference: made for {reference.logits.shape[0]} tokens after {reference.prefix} "
            f"in chunks of {reference.chunk}, not for {tokens} after {prefix} in chunks of {chunk}"
        )
    started = now(model)
    _prefill(model, input_ids, prefix, cache)
    prefilled = now(model)
    _say(on_tokens, prefix)
    nll, kl, agree, correct = [], [], [], []
    reading = 0.0
    logits = torch.empty(0)
    for begin, targets, logits in _continue(model, input_ids, prefix, chunk, cache):
        before = now(model)
        folded = torch.log_softmax(logits.float(), dim=-1)
        nll.append(-folded.gather(-1, targets[:, None]).squeeze(-1).cpu())
        correct.append((folded.argmax(-1) == targets).cpu())
        if reference is not None:
            at = begin - prefix
            full = reference.logits[at : at + len(targets)].to(folded.device)
            full = torch.log_softmax(full.float(), dim=-1)
            kl.append((full.exp() * (full - folded)).sum(-1).cpu())
            agree.append((full.argmax(-1) == folded.argmax(-1)).cpu())
        _say(on_tokens, len(targets))
        reading += now(model) - before
    return Score(
        nll=torch.cat(nll),
        kl=torch.cat(kl) if kl else torch.empty(0),
        agree=torch.cat(agree) if agree else torch.empty(0, dtype=torch.bool),
        correct=torch.cat(correct),
        last_logits=logits[-1].float(),
        prefill_seconds=prefilled - started,
        score_seconds=now(model) - prefilled - reading,
    )


def now(model: PreTrainedModel) -> float:
    """Seconds of a monotonic clock, after all work queued on the model's device is done."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _prefill(model: PreTrainedModel, input_ids: torch.Tensor, prefix: int, cache: Cache) -> None:
    with torch.inference_mode():
        model(input_ids[:, :prefix], past_key_values=cache, use_cache=True, logits_to_keep=1)


def _continue(
    model: PreTrainedModel, input_ids: torch.Tensor, prefix: int, chunk: int, cache: Cache
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Feed the continuation; yields (first position, targets ``[n]`` int64, logits ``[n, vocab]``)."""
    last = input_ids.shape[1] - 1
    for begin in range(prefix, last, chunk):
        end = min(begin + chunk, last)
        with torch.inference_mode():
            logits = model(input_ids[:, begin:end], past_key_values=cache, use_cache=True).logits[0]
        yield begin, input_ids[0, begin + 1 : end + 1], logits


def _check(input_ids: torch.Tensor, prefix: int, chunk: int) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise KVFoldError(f"input_ids: shape {tuple(input_ids.shape)}; one sequence is scored at a time: [1, tokens]")
    if prefix < 1:
        raise KVFoldError(f"prefix: {prefix}; at least 1 token is prefilled")
    if chunk < 1:
        raise KVFoldError(f"chunk: {chunk}; at least 1 token per call")
    if input_ids.shape[1] < prefix + 2:
        raise KVFoldError(f"input_ids: {input_ids.shape[1]} tokens leave nothing to score after a prefix of {prefix}")


def _say(on_tokens: Callable[[int], None] | None, tokens: int) -> None:
    if on_tokens is not None:
        on_tokens(tokens)
