"""Windows of texts of several kinds, and key-value pairs: does what a method learned on one hold on another?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import Item, Measure, Outcome, Prompt, Suite
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import Window, make_windows

DOMAINS = ("prose", "code", "retrieval")


@dataclasses.dataclass(frozen=True)
class Domains(Suite):
    """Windows in the middle of equal parts of each text, as many as the limit says.

    Attributes
    ----------
    tokenizer
        None where windows are given: see :meth:`hold`.
    by_name
        Texts; None is one of random key-value pairs.
    tokens
        Tokens scored after the prefilled ones.
    """

    tokenizer: PreTrainedTokenizerBase | None  # type: ignore[assignment]
    by_name: dict[str, Text | None]
    tokens: int = 256

    name = "domains"
    summary = "windows of texts of several kinds, and key-value pairs (exact: answers that are right in full)"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("kld", higher_is_better=False, shown="number"),
        Measure("top1"),
        Measure("top5"),
        Measure("nll", higher_is_better=False, shown="perplexity"),
        Measure("exact"),
    )
    compares = True
    version = 2

    @cached_property
    def _windows(self) -> dict[str, Window]:
        """By their items' names."""
        return {}

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        """Windows depend on how many there are and on the longest: both are in an item's name."""
        if seeds > 1:
            raise KVFoldError(f"seeds: {seeds}; windows of domains are not drawn, give a larger --limit instead")
        assert self.tokenizer is not None
        tags = (("of", limit), ("longest", max(lengths)))
        return self.hold(make_windows(self.tokenizer, self.by_name, lengths, self.tokens, limit), tags)

    def hold(self, windows: Iterable[Window], tags: tuple[tuple[str, Any], ...] = (), seed: int = 0) -> list[Item]:
        """Items of given windows."""
        found = []
        for window in windows:
            item = Item(window.domain, window.prefix, seed, window.index, tags)
            self._windows[item.name] = window
            found.append(item)
        return found

    def prompt(self, item: Item) -> Prompt:
        if item.name not in self._windows:
            assert item.length is not None
            how = dict(item.tags)
            self.items(sorted({item.length, how["longest"]}), how["of"], 1)
        window = self._windows[item.name]
        return Prompt(window.ids, window.prefilled, answers=window.answers)

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        score = outcome.score
        assert score is not None
        found = {
            "kld": score.kld,
            "top1": score.top1,
            "top5": score.top5,
            "nll": float(score.nll.double().mean()),
        }
        if prompt.answers:
            right = [bool(score.correct[first:stop].all()) for first, stop in prompt.answers]
            found["exact"] = sum(right) / len(right)
        return dict(found)

    def options(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def texts(self) -> dict[str, str]:
        return {f"{name}: {text.name}": text.sha256 for name, text in self.by_name.items() if text is not None}
