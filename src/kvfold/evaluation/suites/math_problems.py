"""Competition problems with chains of thought, from the JSON lines of MATH (Hendrycks et al., 2021, arXiv 2103.03874)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import Form, Item, Measure, Outcome, Prompt, Suite
from kvfold.evaluation.suites.sources import load_task

NEW_TOKENS = 1024
WHERE = "https://huggingface.co/datasets/HuggingFaceH4/MATH-500 (test.jsonl, as math.jsonl)"
BEGIN = "Solve the problem step by step. End with the answer in \\boxed{}.\n\n"
TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
UNIT = re.compile(
    r"(?<=[\w}.)])\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$|\^\{?\\circ\}?$|°$|\\?%$|^\\?\$|\$$"
)
"""Words at an answer's end, such as square inches, degrees, per cents, dollars: of the question, not of the answer."""
SIZES = re.compile(r"\\(?:left(?![a-z])|right(?![a-z])|displaystyle|quad)|(?<!\\)\\[,;:! ]|[\s~$]")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE = re.compile(r"\\boxed\s+([^\s${}]+?)[.,]?(?:[\s$]|$)")
BRACE = re.compile(r"\\.|[{}]", re.S)
PART = r"(?:\d+|[a-zA-Z]|\\pi|\\sqrt\{\w+\})"
"""What may stand before or after a slash of a whole answer."""
NUMBER = re.compile(r"(-?)(\d+(?:\.\d*)?)?(?:\\frac\{(-?\d+)\}\{(\d+)\})?")


@dataclasses.dataclass(frozen=True)
class Math(Suite):
    """Problems in the order of their file.

    Attributes
    ----------
    tokenizer
    problems
        Records with ``problem`` and ``answer``, or with ``solution``, whose last ``\\boxed{}`` is the answer.
    sha256
        Of their file.
    chat
        Whether the model's chat template is used.
    """

    tokenizer: PreTrainedTokenizerBase
    problems: tuple[dict[str, Any], ...]
    sha256: str = ""
    chat: bool = True
    new_tokens: int = NEW_TOKENS

    version = 3
    name = "math"
    summary = "competition problems with chains of thought; the answer in \\boxed{}"
    measures = (
        Measure("exact"),
        Measure("tokens", higher_is_better=False, shown="number"),
        Measure("capped", higher_is_better=False),
    )

    def __post_init__(self) -> None:
        for record in self.problems:
            if not isinstance(record["problem"], str):
                raise KVFoldError(f"data: problem {record['problem']!r} is no text")
            if not expected(record):
                raise KVFoldError(
                    f"data: {record['problem'][:40]!r} has neither an answer nor a solution with \\boxed{{}}"
                )

    @classmethod
    def load(cls, tokenizer: PreTrainedTokenizerBase, data: str | None, chat: bool, **options: int) -> Math:
        """With the problems of a file, or of ``math.jsonl`` of a folder."""
        records, digest = load_task(data, cls.name, cls.name, ("problem",), WHERE)
        return cls(tokenizer, tuple(records), digest, chat, **options)

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        return [Item("math", None, 0, i) for i in range(min(limit, len(self.problems)))]

    def prompt(self, item: Item) -> Prompt:
        form, record = Form(self.tokenizer, self.chat), self.problems[item.index]
        question = f"Problem: {record['problem']}"
        ids = form.ids(form.text(BEGIN, question, "Solution:"))
        answer = expected(record)
        assert answer is not None
        cut = form.cut(form.text(BEGIN, question, "Solution:"), question, ids)
        return Prompt(torch.tensor([ids]), cut, self.new_tokens, (answer,), ("Problem:",))

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        given = boxed(outcome.text)
        return {
            "exact": float(given is not None and same(given, prompt.expected[0])),
            "tokens": float(outcome.new_tokens),
            "capped": float(outcome.capped),
        }

    def options(self) -> dict[str, Any]:
        return {"chat": self.chat, "new_tokens": self.new_tokens, "version": self.version}

    def texts(self) -> dict[str, str]:
        return {"problems": self.sha256}


def expected(record: dict[str, Any]) -> str | None:
    """A record's answer; None or nothing where it has none."""
    return str(record["answer"]).strip() if record.get("answer") is not None else boxed(str(record.get("solution", "")))


def boxed(text: str) -> str | None:
    """What the last ``\\boxed{}`` (or ``\\fbox{}``) of a text holds, braces within it too, or, where none has braces, what
    follows the last ``\\boxed``; None: there is none, or its braces are not closed.
    """
    begins = list(BOX.finditer(text))
    if not begins:
        bare = BARE.findall(text)
        return bare[-1] if bare else None
    depth, begin = 0, begins[-1].end()
    for mark in BRACE.finditer(text, begin):  # escaped ones are of sets
        if mark[0] == "{":
            depth += 1
        elif mark[0] == "}":
            if not depth:
                return text[begin : mark.start()]
            depth -= 1
    return None


def same(given: str, right: str) -> bool:
    """Whether two answers are one, however they are written: alike as text, or the same number."""
    a, b = plain(given), plain(right)
    if a == b:
        return True
    x, y = number(a), number(b)
    return x is not None and x == y


def number(answer: str) -> Fraction | None:
    """The number that a plain answer is: an integer, a decimal, a fraction, or a whole with one; None: another thing."""
    found = NUMBER.fullmatch(answer)
    if not found or not (found[2] or found[3]) or not int(found[4] or 1):
        return None
    return int(found[1] + "1") * (Fraction(found[2] or 0) + Fraction(int(found[3] or 0), int(found[4] or 1)))


def plain(answer: str) -> str:
    """An answer without what says nothing: spaces, dollars, sizes of brackets, units, the name of what is sought (``x=``)."""
    found = answer.strip().rstrip(".").strip().replace("\u2212", "-").removeprefix("+")
    while (shorter := UNIT.sub("", found).strip()) != found:
        found = shorter
    word = re.fullmatch(r"\(?([^\W\d]{2,}|[A-Z])\)?", TEXT.sub(r"\1", found).strip())
    if word:  # as well as the letter of a choice, but not the name of a variable
        return word[1].lower()
    found = TEXT.sub(r"\1", found)
    found = SIZES.sub("", found).replace("{,}", ",").replace("bmatrix", "pmatrix")
    found = re.sub(r"\\[dtc]frac", r"\\frac", found)
    found = re.sub(r"^[a-zA-Z](?:=|\\in(?![a-z]))", "", found)
    found = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", found)
    found = re.sub(r"([\^_])\{(\w)\}", r"\1\2", found)
    found = re.sub(r"\\frac(\w)", r"\\frac{\1}", found)
    found = re.sub(r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})(\w)", r"\1{\2}", found)
    found = re.sub(r"(?:(?<![\w.}])|(?<=matrix\}))(\d+)/(\d+)(?![\w.])", r"\\frac{\1}{\2}", found)
    found = re.sub(rf"^(-?)({PART}+)/(\d+|[a-zA-Z]|\\pi)$", r"\1\\frac{\2}{\3}", found)
    found = re.sub(r"(?<![\d.])\.(?=\d)", "0.", found)
    return found if found[:1] in ("(", "[", "\\") else re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", found)
