"""RULER's families of tasks (Hsieh et al., 2024, arXiv 2404.06654), generated over a text of one's own.

The families and what makes them hard are the paper's; words and sizes are this project's, so that scores are compared with each
other and not with the paper's tables.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
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
    answers_of,
    as_prompt,
    digits,
    encode,
    inserted,
)
from kvfold.evaluation.text import Text
from kvfold.evaluation.words import THINGS, share

KEYS = 16
"""Keys of ``multikey``, one of which is asked for."""
VALUES = 4
"""Numbers of ``multivalue``'s key, all of which are asked for."""
HOPS = 4
"""Assignments in a chain of ``tracking`` after its first; there are two chains, and one is asked for."""
COMMON = 5
"""Words of ``aggregation`` that fill half of its list; of the others, all things share the other half."""
PASSAGE = 3
"""Passages' lengths by which ``qa`` may fall short of a length for want of other questions' passages."""
BEGUN = 6
"""Words of a sentence that ``qa`` gives; the next two are asked for."""

NEW_TOKENS = {"multikey": 24, "multivalue": 80, "tracking": 60, "aggregation": 60, "qa": 40}
TASKS = tuple(NEW_TOKENS)


@dataclasses.dataclass(frozen=True)
class Ruler(Suite):
    """Five families by length.

    Attributes
    ----------
    tokenizer
    text
        What fills the prompts.
    tasks
        Which families.
    questions
        For ``qa``: records with ``question``, ``context`` and ``answers``; None: a sentence of the text itself is to be
        completed.
    questions_sha256
        Of the file that they came from.
    chat
        Whether the model's chat template is used.
    """

    tokenizer: PreTrainedTokenizerBase
    text: Text
    tasks: tuple[str, ...] = TASKS
    questions: tuple[dict[str, Any], ...] | None = None
    questions_sha256: str = ""
    chat: bool = True

    name = "ruler"
    summary = "RULER's families: multi-key, multi-value, variable tracking, aggregation, QA"
    measures = (Measure("share"), Measure("exact"))
    version = 3

    def __post_init__(self) -> None:
        if wrong := [task for task in self.tasks if task not in TASKS]:
            raise KVFoldError(f"tasks: {wrong[0]!r} is no task of ruler; allowed: {', '.join(TASKS)}")
        for record in self.questions or ():
            answers_of(record["answers"])  # refused before a model is loaded

    @cached_property
    def _hay(self) -> Haystack:
        return Haystack(self.text, self.tokenizer)

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        return [
            Item(task, length, seed, i)
            for task in dict.fromkeys(self.tasks)
            for length in lengths
            for seed in range(seeds)
            for i in range(limit)
        ]

    def prompt(self, item: Item) -> Prompt:
        assert item.length is not None
        made: Callable[[Item, random.Random], Prompt] = getattr(self, f"_{item.task}")
        return made(item, item.draw())

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        found = share(prompt.expected, outcome.text)
        if prompt.any_of:
            found = float(found > 0)
        return {"share": found, "exact": float(found == 1)}

    def options(self) -> dict[str, Any]:
        return {"chat": self.chat, "version": self.version}

    def texts(self) -> dict[str, str]:
        found = {self.text.name: self.text.sha256}
        return found if self.questions is None else {**found, "questions": self.questions_sha256}

    # ---- families ----------------------------------------------------------------------------------------------------

    def _hidden(
        self,
        item: Item,
        draw: random.Random,
        begin: str,
        needles: Sequence[str],
        question: str,
        lead: str,
        expected: Sequence[str],
        in_order: bool = False,
    ) -> Prompt:
        """A prompt with sentences hidden anywhere in the text."""
        assert item.length is not None
        form = Form(self.tokenizer, self.chat)
        places = [draw.random() for _ in needles]
        if in_order:
            places.sort()

        def context(pieces: list[str]) -> str:
            return begin + inserted(pieces, needles, places)

        pieces = self._hay.fill(form, item.length, draw, lambda pieces: (context(pieces), question, lead))
        return as_prompt(form, context(pieces), question, lead, NEW_TOKENS[item.task], expected, (), item.length)

    def _multikey(self, item: Item, draw: random.Random) -> Prompt:
        keys, numbers = draw.sample(THINGS, KEYS), digits(draw, KEYS)
        needles = [f"The secret number of the {key} is {n}." for key, n in zip(keys, numbers, strict=True)]
        asked = draw.randrange(KEYS)
        return self._hidden(
            item,
            draw,
            "Some secret numbers are hidden in this text. Remember them.\n\n",
            needles,
            f"What is the secret number of the {keys[asked]} that the text mentions?",
            f"The secret number of the {keys[asked]} is",
            [numbers[asked]],
        )

    def _multivalue(self, item: Item, draw: random.Random) -> Prompt:
        (key, *others), numbers = draw.sample(THINGS, VALUES + 1), digits(draw, 2 * VALUES)
        needles = [f"One of the secret numbers of the {key} is {n}." for n in numbers[:VALUES]]
        needles += [
            f"One of the secret numbers of the {k} is {n}." for k, n in zip(others, numbers[VALUES:], strict=True)
        ]
        return self._hidden(
            item,
            draw,
            "Some secret numbers are hidden in this text. Remember them.\n\n",
            needles,
            f"What are all {VALUES} secret numbers of the {key} that the text mentions?",
            f"The {VALUES} secret numbers of the {key} are",
            numbers[:VALUES],
        )

    def _tracking(self, item: Item, draw: random.Random) -> Prompt:
        letters = ["".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(2 * (HOPS + 1))]
        if len(set(letters)) < len(letters):  # of 12 million names
            return self._tracking(item, draw)
        values = [str(n) for n in draw.sample(range(10_000, 100_000), 2)]
        chains = [letters[: HOPS + 1], letters[HOPS + 1 :]]
        lines = [
            [f"VAR {chain[0]} = {value}."] + [f"VAR {b} = VAR {a}." for a, b in pairwise(chain)]
            for chain, value in zip(chains, values, strict=True)
        ]
        # each chain in its order, the two mixed
        turns = draw.sample([0] * (HOPS + 1) + [1] * (HOPS + 1), 2 * (HOPS + 1))
        needles = [lines[turn].pop(0) for turn in turns]
        return self._hidden(
            item,
            draw,
            "Variables are assigned in this text, some from others. Remember them.\n\n",
            needles,
            f"Which {HOPS + 1} variables have the value {values[0]}, directly or from another variable?",
            f"The {HOPS + 1} variables with the value {values[0]} are",
            chains[0],
            in_order=True,
        )

    def _aggregation(self, item: Item, draw: random.Random) -> Prompt:
        assert item.length is not None
        form = Form(self.tokenizer, self.chat)
        words = draw.sample(THINGS, len(THINGS))
        often, rare = words[:COMMON], words[COMMON:]
        begin = "This list has words in it; some come often.\n\n"
        question = f"Which {COMMON} words come most often in the list?"
        lead = f"The {COMMON} words that come most often are"

        def listed(count: int) -> str:
            half = [often[i % COMMON] for i in range(count // 2)]
            half += [rare[i % len(rare)] for i in range(count - count // 2)]
            random.Random(item.name).shuffle(half)
            return " ".join(f"{i}. {word}" for i, word in enumerate(half, 1)) + "\n\n"

        def tokens(count: int) -> int:
            return len(form.ids(form.text(begin + listed(count), question, lead)))

        low, high = 8 * COMMON, item.length
        if tokens(low) > item.length:
            raise KVFoldError(f"lengths: {item.length} tokens hold no list of words; give at least {tokens(low)}")
        while low < high:  # the longest list that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if tokens(middle) <= item.length else (low, middle - 1)
        return as_prompt(form, begin + listed(low), question, lead, NEW_TOKENS["aggregation"], often, (), item.length)

    def _qa(self, item: Item, draw: random.Random) -> Prompt:
        return self._completed(item, draw) if self.questions is None else self._asked(item, draw)

    def _asked(self, item: Item, draw: random.Random) -> Prompt:
        """A question of the file about one of many passages."""
        assert item.length is not None and self.questions is not None
        form = Form(self.tokenizer, self.chat)
        record = self.questions[item.index % len(self.questions)]
        others = list(dict.fromkeys(r["context"] for r in self.questions if r["context"] != record["context"]))
        draw.shuffle(others)
        place = draw.random()
        question = f"Answer with a few words from the passages: {record['question']}"

        def context(count: int) -> str:
            passages = others[:count]
            passages.insert(round(place * count), record["context"])
            return "".join(f"Passage {i}:\n{text}\n\n" for i, text in enumerate(passages, 1))

        def tokens(count: int) -> int:
            return len(form.ids(form.text(context(count), question, "Answer:")))

        if tokens(0) > item.length:
            raise KVFoldError(f"lengths: {item.length} tokens hold no passage of the data; give at least {tokens(0)}")
        counts = [len(encode(self.tokenizer, f"Passage 10:\n{text}\n\n", False)) for text in others]
        room, count = item.length - tokens(0), 0
        while count < len(counts) and room >= counts[count]:
            room -= counts[count]
            count += 1
        if count == len(counts) and room > PASSAGE * max(counts, default=1):
            raise KVFoldError(
                f"data: its passages fill {item.length - room} tokens, not {item.length}; give more, or smaller --lengths"
            )
        while count and tokens(count) > item.length:
            count -= 1
        expected = answers_of(record["answers"])
        made = as_prompt(form, context(count), question, "Answer:", NEW_TOKENS["qa"], expected, ["\n"], item.length)
        return dataclasses.replace(made, any_of=True)

    def _completed(self, item: Item, draw: random.Random) -> Prompt:
        """A sentence of the text is begun and to be gone on with, word for word."""
        assert item.length is not None
        form = Form(self.tokenizer, self.chat)
        begin = "Read this text.\n\n"
        ask, long = "How does the sentence of the text go on that begins with these words? ", "extraordinary " * BEGUN
        pieces = self._hay.fill(
            form, item.length, draw, lambda p: (begin + "".join(p).rstrip() + "\n\n", ask + long, long)
        )
        once = [p.split() for p in pieces if p.strip()[-1:] in ".!?" and 10 <= len(p.split()) <= 40]
        whole_text = " ".join("".join(pieces).split())
        fit = [w for w in once if whole_text.count(" ".join(w[:BEGUN])) == 1 and _plain(w[BEGUN : BEGUN + 2])]
        if not fit:
            raise KVFoldError(
                f"text: no sentence among {item.length} tokens of {self.text.source} can be asked for; give another text"
            )
        chosen = draw.choice(fit)
        first, rest = " ".join(chosen[:BEGUN]), " ".join(chosen[BEGUN : BEGUN + 2])
        context = begin + "".join(pieces).rstrip() + "\n\n"
        return as_prompt(form, context, ask + first, first, NEW_TOKENS["qa"], [rest], (), item.length)


def _plain(words: Sequence[str]) -> bool:
    """Words without anything that an answer might write otherwise."""
    return len(words) == 2 and all(re.fullmatch(r"[A-Za-z]+", word) for word in words)
