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

from kvfold.engines.transformers.names import passing
from kvfold.engines.transformers.shared import SharedPrompt
from kvfold.errors import KVFoldError
from kvfold.kernels.compiling import compiling

CHUNK = 32
MOST_NATS = 700
"""Mean negative log-likelihood from which on a perplexity is infinite."""


def perplexity_of(nll: float | None) -> float | None:
    """Of a row's mean negative log-likelihood; None where there is none, or where it is infinite, which JSON cannot say."""
    return None if nll is None or nll >= MOST_NATS else math.exp(nll)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Logits of the model with its own full-precision cache, on the same path as the scored ones.

    Attributes
    ----------
    logits
        ``[tokens, vocab]`` in the model's dtype: 311 MB for 1,024 tokens of a 16-bit model with 151,936 words. On the model's
        device if they take at most a quarter of what is free there, else on the CPU.
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
    among5
        ``[tokens]`` bool, whether the full-precision cache's first choice is among this one's first five. Empty without a
        reference.
    correct
        ``[tokens]`` bool, whether this cache's first choice is the text's token.
    tested
        Scored tokens that read packed keys and values: their call found some in the cache. 0 for a cache that is not folded.
    last_logits
        ``[vocab]`` float32, the prediction after the last token, from which generation can go on.
    prefill_seconds, score_seconds
        Wall-clock time of the two parts; the second includes the comparison with the reference.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor
    among5: torch.Tensor
    correct: torch.Tensor
    tested: int
    last_logits: torch.Tensor
    prefill_seconds: float
    score_seconds: float

    @property
    def ppl(self) -> float:
        """Perplexity of the scored tokens; infinite or NaN when the predictions are."""
        mean = float(self.nll.double().mean())
        return math.exp(mean) if mean < MOST_NATS else (math.nan if math.isnan(mean) else math.inf)

    @property
    def kld(self) -> float:
        """Mean KL divergence per token, in nats."""
        return float(self.kl.double().mean())

    @property
    def top1(self) -> float:
        """Share of tokens where both caches lead to the same first choice, 0 to 1."""
        return float(self.agree.double().mean())

    @property
    def top5(self) -> float:
        """Share of tokens where the full-precision cache's first choice is among this one's first five, 0 to 1."""
        return float(self.among5.double().mean())


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
    kept: torch.Tensor | None = None
    prefill(model, input_ids, prefix, cache)
    _say(on_tokens, prefix)
    for begin, targets, logits in _continue(model, input_ids, prefix, chunk, cache):
        if kept is None:  # one piece: parts and their concatenation would be twice as much
            kept = _storage(logits, input_ids.shape[1] - 1 - prefix)
        kept[begin - prefix : begin - prefix + len(targets)] = logits
        _say(on_tokens, len(targets))
    assert kept is not None
    return Reference(kept, prefix, chunk)


def _storage(logits: torch.Tensor, tokens: int) -> torch.Tensor:
    """Room for all logits, ``[tokens, vocab]``, given the first ones."""
    place = logits.device
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        if 4 * tokens * logits.shape[-1] * logits.dtype.itemsize > free:
            place = torch.device("cpu")
    return torch.empty(tokens, logits.shape[-1], dtype=logits.dtype, device=place)


def score(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    prefix: int,
    cache: Cache,
    chunk: int = CHUNK,
    reference: Reference | None = None,
    on_tokens: Callable[[int], None] | None = None,
    shared: SharedPrompt | None = None,
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
    shared
        What other caches were given of the same prefix; None: the model runs it.

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
    prefill(model, input_ids, prefix, cache, shared)
    prefilled = now(model)
    _say(on_tokens, prefix)
    nll, kl, agree, among5, correct = [], [], [], [], []
    tested = 0
    logits = torch.empty(0)
    # Results stay on the device until the end: a copy per call would make the host wait for each of them.
    with torch.inference_mode():
        packed = packs(cache)
        for begin, targets, logits in _continue(model, input_ids, prefix, chunk, cache):
            tested += len(targets) if packed else 0
            packed = packs(cache)
            folded = torch.log_softmax(logits.float(), dim=-1)
            nll.append(-folded.gather(-1, targets[:, None]).squeeze(-1))
            correct.append(folded.argmax(-1) == targets)
            if reference is not None:
                at = begin - prefix
                full = reference.logits[at : at + len(targets)].to(folded.device)
                full = torch.log_softmax(full.float(), dim=-1)
                first = full.argmax(-1)
                agree.append(first == folded.argmax(-1))
                five = folded.topk(min(5, folded.shape[-1]), dim=-1).indices
                among5.append((five == first[:, None]).any(-1))
                kl.append((full.exp() * (full - folded)).sum(-1))
            _say(on_tokens, len(targets))
    return Score(
        nll=torch.cat(nll).cpu(),
        kl=torch.cat(kl).cpu() if kl else torch.empty(0),
        agree=torch.cat(agree).cpu() if agree else torch.empty(0, dtype=torch.bool),
        among5=torch.cat(among5).cpu() if among5 else torch.empty(0, dtype=torch.bool),
        correct=torch.cat(correct).cpu(),
        tested=tested,
        last_logits=logits[-1].float(),
        prefill_seconds=prefilled - started,
        score_seconds=now(model) - prefilled,
    )


def packs(cache: Cache) -> bool:
    """Whether the cache holds anything packed."""
    return any(any(layer.packed) for layer in getattr(cache, "folded", ()))


def now(model: PreTrainedModel) -> float:
    """Seconds of a monotonic clock, after all work queued on the model's device is done; compiling kernels takes none of it."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - compiling.seconds


def prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, prefix: int, cache: Cache, shared: SharedPrompt | None = None
) -> None:
    """Put the first ``prefix`` tokens of ``[1, tokens]`` into an empty cache, in one call."""
    if shared is not None:
        shared.prefill(model, input_ids[:, :prefix], cache)
        return
    with torch.inference_mode():
        model(input_ids[:, :prefix], **passing(model, cache), use_cache=True, logits_to_keep=1)


def _continue(
    model: PreTrainedModel, input_ids: torch.Tensor, prefix: int, chunk: int, cache: Cache
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Feed the continuation; yields (first position, targets ``[n]`` int64, logits ``[n, vocab]``)."""
    last = input_ids.shape[1] - 1
    for begin in range(prefix, last, chunk):
        end = min(begin + chunk, last)
        with torch.inference_mode():
            logits = model(input_ids[:, begin:end], **passing(model, cache), use_cache=True).logits[0]
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
