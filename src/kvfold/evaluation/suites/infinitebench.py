"""InfiniteBench's tasks (Zhang et al., 2024, arXiv 2402.13718) over its own records, with this project's wording.

Which tasks there are, how much may be generated and how answers are graded is the paper's; the nine here are those that
CommVQ's paper reports.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites import metrics
from kvfold.evaluation.suites.base import answers_of
from kvfold.evaluation.suites.records import Records, Task

WHERE = "https://huggingface.co/datasets/xinrongzhang2022/InfiniteBench"

_book = partial(Task, begin="This is a book. A question about it follows.\n\n")

TASKS: dict[str, Task] = {
    "passkey": Task(
        6, "A pass key is hidden in this text. Remember it.\n\n", "{input}", "The pass key is", metrics.first_digits
    ),
    "number_string": Task(
        12,
        "A string of digits is hidden in this text. Remember it.\n\n",
        "{input}",
        "The string of digits is",
        metrics.first_digits,
    ),
    "kv_retrieval": Task(50, "This is an object in JSON.\n\n", "{input}", grade=metrics.contains),
    "longbook_sum_eng": Task(1200, "This is a book.\n\n", "Summarize the book.", "Summary:", metrics.rouge_l),
    "longbook_qa_eng": _book(40, ask="Question: {input}\nAnswer with as few words as possible.", lead="Answer:"),
    "longbook_choice_eng": _book(
        40, ask="Question: {input}\nAnswer with the letter.", lead="The letter is", grade=metrics.choice, options=True
    ),
    "longdialogue_qa_eng": Task(
        40,
        "This is the script of a film. One name is replaced by $$MASK$$.\n\n",
        "Which name is replaced by $$MASK$$? Answer with the name.",
        "The name is",
        metrics.contains,
    ),
    "code_debug": Task(
        5, "This is a program.\n\n", "{input}\nAnswer with the letter.", "The letter is", metrics.choice, options=True
    ),
    "math_find": Task(3, "", "{input}", "The number is", metrics.first_number),
}


@dataclasses.dataclass(frozen=True)
class InfiniteBench(Records):
    """Records with ``input``, ``context``, ``answer`` and, where letters are asked for, ``options``."""

    name = "infinitebench"
    summary = "nine of InfiniteBench's tasks over its own records, each with its own grade"
    table = TASKS
    fields = ("input", "context", "answer")
    where = WHERE
    version = 2

    def expected(self, task: Task, record: dict[str, Any]) -> tuple[str, ...]:
        answers = answers_of(record["answer"])
        if not task.options:
            return answers
        held = record.get("options")
        if not isinstance(held, list) or len(held) < 2:
            raise KVFoldError(f"data: options {held!r} of a record that asks for a letter; give a list of two to four")
        options = [str(option) for option in held]
        letters = tuple("ABCD"[options.index(answer)] for answer in answers if answer in options[:4])
        letters += tuple(answer for answer in answers if answer in ("A", "B", "C", "D"))
        if not letters:
            raise KVFoldError(f"data: the answer {answers[0]!r} is none of the record's options")
        return letters
