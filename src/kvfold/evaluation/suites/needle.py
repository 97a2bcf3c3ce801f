"""A sentence at some depth of a long text, and a question about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import (
    Form,
    Haystack,
    Item,
    Measure,
    Outcome,
    Prompt,
    Suite,
    as_prompt,
    digits,
    inserted,
)
from kvfold.evaluation.text import Text
from kvfold.evaluation.words import THINGS, whole

DEPTHS = (0, 25, 50, 75, 100)
NEW_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Needle(Suite):
    """One number hidden in a text, by length and depth.

    Attributes
    ----------
    tokenizer
    text
        What it is hidden in.
    depths
        Per cent of the text before it.
    chat
        Whether the model's chat template is used.
    """

    tokenizer: PreTrainedTokenizerBase
    text: Text
    depths: tuple[int, ...] = DEPTHS
    chat: bool = True
    new_tokens: int = NEW_TOKENS

    name = "needle"
    summary = "a number hidden at some depth of a text (length x depth)"
    measures = (Measure("exact"),)
    version = 2

    def __post_init__(self) -> None:
        if wrong := [depth for depth in self.depths if not 0 <= depth <= 100]:
            raise KVFoldError(f"depths: {wrong[0]} is no per cent of a text; give 0 to 100")

    @cached_property
    def _hay(self) -> Haystack:
        return Haystack(self.text, self.tokenizer)

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        return [
            Item("needle", length, seed, i, (("depth", depth),))
            for length in lengths
            for depth in dict.fromkeys(self.depths)
            for seed in range(seeds)
            for i in range(limit)
        ]

    def prompt(self, item: Item) -> Prompt:
        assert item.length is not None
        draw = item.draw()
        thing, (number,) = draw.choice(THINGS), digits(draw, 1)
        needle = f"The secret number of the {thing} is {number}."
        question = f"What is the secret number of the {thing} that the text mentions? Answer with the number."
        lead = f"The secret number of the {thing} is"
        depth = dict(item.tags)["depth"] / 100
        form = Form(self.tokenizer, self.chat)

        def context(pieces: list[str]) -> str:
            return "Read this text and remember the secret number in it.\n\n" + inserted(pieces, [needle], [depth])

        pieces = self._hay.fill(form, item.length, draw, lambda pieces: (context(pieces), question, lead))
        return as_prompt(form, context(pieces), question, lead, self.new_tokens, [number], ["\n"])

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        return {"exact": float(whole(prompt.expected[0], outcome.text))}

    def options(self) -> dict[str, Any]:
        return {"chat": self.chat, "new_tokens": self.new_tokens, "version": self.version}

    def texts(self) -> dict[str, str]:
        return {self.text.name: self.text.sha256}
