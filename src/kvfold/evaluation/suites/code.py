"""The next line of a program, generated after what stands before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import Item, Measure, Outcome, Prompt, Suite, encode, place
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import CHARACTERS, bos_of

NEW_TOKENS = 48
SHORTEST = 12
"""Characters of a line that is worth guessing."""
SPLIT = 32
"""Tokens before the line that are read through the folded cache."""


@dataclasses.dataclass(frozen=True)
class Code(Suite):
    """Lines spread over a program text; LongBench's LCC and RepoBench ask for one in this way.

    Attributes
    ----------
    tokenizer
    text
        The program.
    """

    tokenizer: PreTrainedTokenizerBase
    text: Text
    new_tokens: int = NEW_TOKENS

    name = "code"
    summary = "the next line of a program: the same, and how similar"
    measures = (Measure("similarity"), Measure("exact"))

    @cached_property
    def _lines(self) -> list[int]:
        """Where lines begin that are asked for."""
        found, at = [], 0
        for line in self.text.text.splitlines(keepends=True):
            stripped = line.strip()
            if len(stripped) >= SHORTEST and stripped[:1].isalpha():
                found.append(at)
            at += len(line)
        return found

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        return [Item("line", length, seed, i) for length in lengths for seed in range(seeds) for i in range(limit)]

    def prompt(self, item: Item) -> Prompt:
        """The line lies in the second half of the text, so that it is the same at every length that fits before it."""
        assert item.length is not None
        later = [at for at in self._lines if at >= len(self.text.text) // 2]
        if not later:
            raise KVFoldError(f"text: {self.text.source} has no lines of {SHORTEST} characters to ask for")
        at = later[int(place(item) * len(later))]
        before = self.text.text[max(0, at - CHARACTERS * item.length) : at]
        ids = torch.tensor(encode(self.tokenizer, before))
        if len(ids) < item.length:
            raise KVFoldError(
                f"text: {self.text.source} has {len(ids)} tokens before a line, and {item.length} are needed; give a "
                "longer text with --text, or smaller --lengths"
            )
        bos = bos_of(self.tokenizer, torch.tensor(encode(self.tokenizer, "a")))
        kept = ids[-item.length :].clone()
        if bos is not None:
            kept[0] = bos
        line = self.text.text[at:].split("\n", 1)[0]
        return Prompt(kept[None], max(1, item.length - SPLIT), self.new_tokens, (line,), ("\n",))

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        expected, given = prompt.expected[0].strip(), outcome.text.split("\n", 1)[0].strip()
        return {
            "similarity": SequenceMatcher(None, expected, given, autojunk=False).ratio(),
            "exact": float(expected == given),
        }

    def options(self) -> dict[str, Any]:
        return {"new_tokens": self.new_tokens, "version": self.version}

    def texts(self) -> dict[str, str]:
        return {self.text.name: self.text.sha256}
