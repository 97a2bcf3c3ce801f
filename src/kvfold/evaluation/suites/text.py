"""Tokens of texts, scored through the cache: divergence, perplexity, and key-value retrieval."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.lists import FORMS
from kvfold.evaluation.perplexity import Score
from kvfold.evaluation.suites.base import Item, Measure, Outcome, Prompt, Suite, encode, place
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import LONG, bos_of, retrieval_window, tail

PIECES = 8
"""Parts of the scored tokens that ``series`` has a mean of."""
SEED_STEP = 1_000_003


@dataclasses.dataclass(frozen=True)
class Divergence(Suite):
    """Every token of a text against the same model with a full-precision cache.

    Attributes
    ----------
    tokenizer
    by_name
        The texts; each is a task.
    tokens
        Tokens scored after the prefilled ones.
    """

    tokenizer: PreTrainedTokenizerBase
    by_name: dict[str, Text]
    tokens: int = 256

    name = "divergence"
    summary = "KL divergence, top-1, top-5 and perplexity of texts, also by position"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("kld", higher_is_better=False, shown="number"),
        Measure("top1"),
        Measure("top5"),
        Measure("nll", higher_is_better=False, shown="perplexity"),
    )
    compares = True

    @cached_property
    def _ids(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(encode(self.tokenizer, t.text[:LONG])) for name, t in self.by_name.items()}

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        return [
            Item(task, length, seed, i)
            for task in self.by_name
            for length in lengths
            for seed in range(seeds)
            for i in range(limit)
        ]

    def prompt(self, item: Item) -> Prompt:
        """A window of the text's second half, so that its scored tokens are the same at every length that fits before it."""
        assert item.length is not None
        ids = self._ids[item.task]
        first = max(len(ids) // 2, item.length)
        last = len(ids) - self.tokens - 1
        if last < first:
            raise KVFoldError(
                f"text: {self.by_name[item.task].source} has {len(ids)} tokens, and {item.length + self.tokens + 1} are "
                f"needed (length {item.length} + tokens {self.tokens} + 1); give a longer text with --text, or smaller "
                "--lengths or --tokens"
            )
        begin = first + int(place(item) * (last - first))
        window = tail(ids[: begin + self.tokens + 1], item.length + self.tokens + 1, bos_of(self.tokenizer, ids))
        return Prompt(window, item.length)

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        score = outcome.score
        assert score is not None
        nll = float(score.nll.double().mean())
        if not self.compares:
            return {"nll": nll}
        return {"kld": score.kld, "top1": score.top1, "top5": score.top5, "nll": nll}

    def series(self, outcome: Outcome) -> dict[str, list[float]]:
        score = outcome.score
        assert score is not None
        found = {"nll": score.nll, **({"kld": score.kl} if self.compares else {})}
        return {name: [float(part.double().mean()) for part in value.chunk(PIECES)] for name, value in found.items()}

    def options(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def texts(self) -> dict[str, str]:
        return {f"{name}: {text.name}": text.sha256 for name, text in self.by_name.items()}


@dataclasses.dataclass(frozen=True)
class Perplexity(Divergence):
    """Perplexity alone: no full-precision logits are held."""

    name = "ppl"
    summary = "perplexity of texts, without the full-precision logits that divergence holds"
    measures = (Measure("nll", higher_is_better=False, shown="perplexity"),)
    compares = False


@dataclasses.dataclass(frozen=True)
class Retrieval(Suite):
    """Random key-value pairs, listed once and then asked for in another order; each window has many questions.

    An answer is right when the model's first choice is right for each of its tokens, read through the cache.

    Attributes
    ----------
    tokenizer
    tokens
        Scored after the list.
    forms
        Of lists, each a task; by default pairs alone.
    """

    tokenizer: PreTrainedTokenizerBase
    tokens: int = 256
    forms: tuple[str, ...] = ("pairs",)

    name = "retrieval"
    summary = "random key-value pairs, listed once and then asked for"
    version = 2
    measures = (Measure("exact"), Measure("nll", higher_is_better=False, shown="perplexity"))

    def __post_init__(self) -> None:
        if wrong := [form for form in self.forms if form not in FORMS]:
            raise KVFoldError(f"forms: {wrong[0]!r} is no form of a list; allowed: {', '.join(FORMS)}")

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        drawn = range(seeds), range(limit)
        return [Item(form, length, *one) for form in self.forms for length in lengths for one in product(*drawn)]

    def prompt(self, item: Item) -> Prompt:
        assert item.length is not None
        drawn = item.index + SEED_STEP * item.seed
        window = retrieval_window(self.tokenizer, item.length, self.tokens, drawn, form=item.task)
        return Prompt(window.ids, window.prefilled, answers=window.answers, listed=window.listed)

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        score = outcome.score
        assert score is not None
        asked = torch.cat([score.nll[first:stop] for first, stop in prompt.answers])
        return {"exact": fmean(_right(prompt, score)), "nll": float(asked.double().mean())}

    def by_question(self, prompt: Prompt, outcome: Outcome) -> dict[str, list[float]]:
        """A line per question, in the order in which they are asked.

        Returns
        -------
        dict
            ``place``: where, among all tokens, the value begins in the list; ``age``: tokens from there to where it is asked
            for; ``exact``: 1 where it is right; ``nll``: mean of its tokens.
        """
        score = outcome.score
        assert score is not None
        answers = [prompt.prefilled + 1 + first for first, _ in prompt.answers]
        return {
            "place": [float(place) for place in prompt.listed],
            "age": [float(at - place) for at, place in zip(answers, prompt.listed, strict=True)],
            "exact": _right(prompt, score),
            "nll": [float(score.nll[first:stop].double().mean()) for first, stop in prompt.answers],
        }

    def options(self) -> dict[str, Any]:
        return {"tokens": self.tokens}


def _right(prompt: Prompt, score: Score) -> list[float]:
    """1 for each answer whose tokens are all the cache's first choice, 0 for others."""
    return [float(score.correct[first:stop].all()) for first, stop in prompt.answers]
