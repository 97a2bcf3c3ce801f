"""Suites over records of published benchmarks: one task per file, each with its question and its grade."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites import metrics
from kvfold.evaluation.suites.base import Form, Item, Measure, Outcome, Prompt, Suite, encode
from kvfold.evaluation.suites.sources import load_task

SPLIT = 32
"""Tokens of a program before its next line that are read through the folded cache."""

Grade = Callable[[str, str], float]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked of a record.

    Attributes
    ----------
    new_tokens
        Generated at most.
    begin
        Stands before the context.
    ask
        The question; ``{input}`` is the record's.
    lead
        How the answer begins.
    grade
        Of an answer and one of those expected; the best of them counts. None: by the record's classes.
    options
        Whether the record's options are asked for, and the right one's letter is expected.
    one_line
        Whether only the answer's first line counts.
    plain
        Whether the text is simply gone on with, without the chat template.
    """

    new_tokens: int
    begin: str = ""
    ask: str = "{input}"
    lead: str = ""
    grade: Grade | None = metrics.f1
    one_line: bool = False
    plain: bool = False
    options: bool = False


@dataclasses.dataclass(frozen=True)
class Records(Suite):
    """Records of each task, at each length; a prompt that is longer than it loses its middle.

    Attributes
    ----------
    tokenizer
    by_task
        Records by task, in the order of their files.
    hashes
        SHA-256 of them, by task.
    chat
        Whether the model's chat template is used; tasks that go on with a text never do.
    """

    tokenizer: PreTrainedTokenizerBase
    by_task: dict[str, list[dict[str, Any]]]
    hashes: dict[str, str]
    chat: bool = True

    table: ClassVar[dict[str, Task]]
    fields: ClassVar[tuple[str, ...]]
    """What a record has."""
    where: ClassVar[str]
    """Where the records can be had."""
    measures = (Measure("score"), Measure("tokens", higher_is_better=False, shown="number"))

    def __post_init__(self) -> None:
        for task, records in self.by_task.items():
            for number, record in enumerate(records):
                self.expected(self.table[task], record)  # refused before the first is asked
                if wrong := [name for name in ("input", "context") if record[name] is None]:
                    raise KVFoldError(
                        f"data: record {number} of {task} has no {wrong[0]}; give a text, which may be empty"
                    )

    @classmethod
    def load(cls, tokenizer: PreTrainedTokenizerBase, data: str | None, tasks: Sequence[str], chat: bool) -> Self:
        """With the records of some tasks; none: of all.

        Raises
        ------
        KVFoldError
            An unknown task, or data that are not there.
        """
        if wrong := [task for task in tasks if task not in cls.table]:
            raise KVFoldError(f"tasks: {wrong[0]!r} is no task of {cls.name}; allowed: {', '.join(cls.table)}")
        found = {task: load_task(data, cls.name, task, cls.fields, cls.where) for task in tasks or cls.table}
        return cls(tokenizer, {t: r for t, (r, _) in found.items()}, {t: d for t, (_, d) in found.items()}, chat)

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        """The first ``limit`` records of every task; a seed draws nothing here."""
        return [
            Item(task, length, 0, i)
            for task, records in self.by_task.items()
            for length in lengths
            for i in range(min(limit, len(records)))
        ]

    def _form(self, task: str) -> Form:
        return Form(self.tokenizer, self.chat and not self.table[task].plain)

    def prompt(self, item: Item) -> Prompt:
        assert item.length is not None
        task, record = self.table[item.task], self.by_task[item.task][item.index]
        ask = task.ask.replace("{input}", str(record["input"]))
        if task.options:
            ask += "".join(f"\n{letter}. {option}" for letter, option in zip("ABCD", record["options"], strict=False))
        answers = self.expected(task, record)
        stop = ("\n",) if task.one_line else ()
        room = item.length - task.new_tokens
        if task.plain:
            ids = encode(self.tokenizer, f"{task.begin}{record['context']}{ask}{task.lead}")
            kept = without_middle(ids, room)
            if len(kept) < 2:
                raise KVFoldError(f"data: record {item.index} of {item.task} has no text to go on with")
            return Prompt(torch.tensor([kept]), max(1, len(kept) - SPLIT), task.new_tokens, answers, stop, any_of=True)
        form = self._form(item.task)
        ids, cut = fitted(form, task.begin, str(record["context"]), ask, task.lead, room)
        return Prompt(torch.tensor([ids]), cut, task.new_tokens, answers, stop, any_of=True)

    def expected(self, task: Task, record: dict[str, Any]) -> tuple[str, ...]:
        """What an answer is compared with; the best match counts."""
        raise NotImplementedError

    def graded(self, item: Item, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        task, record = self.table[item.task], self.by_task[item.task][item.index]
        text = outcome.text.lstrip("\n").split("\n")[0] if task.one_line else outcome.text

        def score(expected: str) -> float:
            if task.grade is None:
                return metrics.among_classes(text, expected, record.get("all_classes") or prompt.expected)
            return task.grade(text, expected)

        return {"score": max(map(score, prompt.expected), default=0.0), "tokens": float(outcome.new_tokens)}

    def options(self) -> dict[str, Any]:
        return {"chat": self.chat, "version": self.version}

    def texts(self) -> dict[str, str]:
        return self.hashes


def without_middle(ids: list[int], room: int) -> list[int]:
    """At most ``room`` tokens: the first and the last of them."""
    if len(ids) <= room:
        return ids
    if room < 2:
        raise KVFoldError("lengths: they leave no room for a prompt beside its answer; give greater ones")
    return ids[: room // 2] + ids[len(ids) - (room - room // 2) :]


def fitted(form: Form, begin: str, context: str, ask: str, lead: str, room: int) -> tuple[list[int], int]:
    """Tokens of a prompt that has room for its context, whose middle is left out where there is not; and where it is cut."""
    text = form.text(f"{begin}{context}\n\n", ask, lead)
    ids = form.ids(text)
    if len(ids) > room:
        inner = encode(form.tokenizer, context, False)
        kept = without_middle(inner, room - (len(ids) - len(inner)) - 16)  # pieces do not add up to the token
        first, last = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        short = "".join(str(form.tokenizer.decode(part, clean_up_tokenization_spaces=False)) for part in (first, last))
        text = form.text(f"{begin}{short}\n\n", ask, lead)
        ids = form.ids(text)
    return ids, form.cut(text, ask, ids)
