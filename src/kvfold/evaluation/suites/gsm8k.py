"""Word problems with chains of thought, from GSM8K's JSON lines (Cobbe et al., 2021, arXiv 2110.14168)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import Form, Item, Measure, Outcome, Prompt, Suite

NEW_TOKENS = 320
SHOTS = 5
STRICT = re.compile(r"#### *(-?\$?-?(?:[0-9][0-9.,]*|\.[0-9]+))")
NUMBER = re.compile(r"-?\$?-?(?:[0-9][0-9.,]*|(?<![\w.])\.[0-9]+)")


@dataclasses.dataclass(frozen=True)
class Gsm8k(Suite):
    """Problems in the order of their file, after solved examples.

    Attributes
    ----------
    tokenizer
    problems
        Records with ``question`` and ``answer``; the answer ends with ``#### NUMBER``.
    examples
        Records like these, of another split; empty: the chat template asks for a step-by-step solution instead.
    shots
        Examples before a problem; the seed draws which.
    hashes
        SHA-256 of both files, by name.
    chat
        Whether the model's chat template is used.
    """

    tokenizer: PreTrainedTokenizerBase
    problems: tuple[dict[str, Any], ...]
    examples: tuple[dict[str, Any], ...] = ()
    shots: int = SHOTS
    hashes: dict[str, str] = dataclasses.field(default_factory=dict)
    chat: bool = True
    new_tokens: int = NEW_TOKENS

    seeds_repeat = True
    name = "gsm8k"
    summary = "word problems with chains of thought; answers taken strictly (#### N) and flexibly (the last number)"
    measures = (
        Measure("strict"),
        Measure("flexible"),
        Measure("tokens", higher_is_better=False, shown="number"),
        Measure("capped", higher_is_better=False),
    )

    def __post_init__(self) -> None:
        for record in (*self.problems, *self.examples):
            if wrong := [name for name in ("question", "answer") if not isinstance(record[name], str)]:
                raise KVFoldError(f"data: {wrong[0]} {record[wrong[0]]!r} is no text")
            if STRICT.search(record["answer"]) is None:
                raise KVFoldError(
                    f"data: the answer to {record['question'][:40]!r} does not end with #### and a number"
                )
        if len(self._others) < self.shots:
            raise KVFoldError(
                f"shots: {self.shots} of {len(self._others)} examples that are not among the problems; give at most as many, "
                "or a longer --examples file"
            )

    @cached_property
    def _others(self) -> list[dict[str, Any]]:
        """Examples that are no problems themselves: those would show their answers."""
        asked = {record["question"].strip() for record in self.problems}
        return [record for record in self.examples if record["question"].strip() not in asked]

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        """The first ``limit`` problems; seeds draw other examples, and nothing where there are none."""
        count = min(limit, len(self.problems))
        return [Item("gsm8k", None, seed, i) for seed in range(seeds if self.shots else 1) for i in range(count)]

    def prompt(self, item: Item) -> Prompt:
        form = Form(self.tokenizer, self.chat)
        problem = self.problems[item.index]
        # one draw for all problems: they are asked alike
        shown = Item("gsm8k", None, item.seed, 0).draw("examples").sample(self._others, self.shots)
        context = "".join(f"Question: {r['question']}\nAnswer: {_solution(r['answer'])}\n\n" for r in shown)
        question = f"Question: {problem['question']}"
        if not shown:
            context = "Solve the problem step by step. End with a line that has #### and then the number only.\n\n"
        text = form.text(context, question, "Answer:")
        ids = form.ids(text)
        expected = number_of(STRICT, problem["answer"])
        assert expected is not None
        return Prompt(
            torch.tensor([ids]), form.cut(text, question, ids), self.new_tokens, (expected,), ("Question:", "\n\n\n")
        )

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        (expected,) = prompt.expected
        return {
            "strict": float(number_of(STRICT, outcome.text) == expected),
            "flexible": float(number_of(NUMBER, outcome.text, last=True) == expected),
            "tokens": float(outcome.new_tokens),
            "capped": float(outcome.capped),
        }

    def options(self) -> dict[str, Any]:
        return {"chat": self.chat, "shots": self.shots, "new_tokens": self.new_tokens, "version": self.version}

    def texts(self) -> dict[str, str]:
        return self.hashes


def _solution(answer: str) -> str:
    """Without the calculator's notes that GSM8K's answers have in <<>>."""
    return re.sub(r"<<.*?>>", "", answer)


def number_of(pattern: re.Pattern[str], text: str, last: bool = False) -> str | None:
    """A number as it is compared: without dollars, commas, a last full stop and zeros that say nothing; None: there is none."""
    found = pattern.findall(text.replace("\u2212", "-"))
    if not found:
        return None
    number = found[-1 if last else 0].replace("$", "").replace(",", "").rstrip(".")
    whole, point, part = number.removeprefix("-").partition(".")
    if "." in part or "-" in whole:
        return number  # none
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    sign = "-" if number.startswith("-") and (whole, part) != ("0", "") else ""
    return f"{sign}{whole}{point if part else ''}{part}"
