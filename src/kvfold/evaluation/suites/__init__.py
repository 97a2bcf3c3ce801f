"""What is asked of every method: one file per kind of task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import Item, Measure, Outcome, Prompt, Suite, load_records
from kvfold.evaluation.suites.code import Code
from kvfold.evaluation.suites.gsm8k import SHOTS, Gsm8k
from kvfold.evaluation.suites.needle import DEPTHS, Needle
from kvfold.evaluation.suites.ruler import TASKS, Ruler
from kvfold.evaluation.suites.text import Divergence, Perplexity, Retrieval
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import load_texts

__all__ = ["REGISTRY", "Item", "Measure", "Options", "Outcome", "Prompt", "Suite", "make"]

REGISTRY: dict[str, type[Suite]] = {
    kind.name: kind for kind in (Divergence, Perplexity, Needle, Ruler, Retrieval, Gsm8k, Code)
}

DOMAINS = ("prose", "code")
"""Texts of ``divergence`` and ``ppl`` where none are given."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a person may choose; every suite takes what it knows.

    Attributes
    ----------
    texts
        Name to UTF-8 file. ``divergence`` and ``ppl`` score all of them, ``code`` reads the one named ``code``, ``needle`` and
        ``ruler`` hide in the first that has another name.
    data, examples
        JSON lines: GSM8K's problems and solved examples; ``data`` also questions for ``ruler``'s qa.
    tokens
        Tokens scored.
    new_tokens
        Tokens generated at most by ``gsm8k`` and ``code``; None: the suite's own number.
    shots
        Solved examples before a problem; None: five where there are examples, else none.
    depths
        Per cent, of ``needle``.
    tasks
        Families of ``ruler``.
    raw
        Plain text instead of the chat template.
    """

    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    data: str | None = None
    examples: str | None = None
    tokens: int = 256
    new_tokens: int | None = None
    shots: int | None = None
    depths: tuple[int, ...] = DEPTHS
    tasks: tuple[str, ...] = TASKS
    raw: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("tokens", self.tokens, 32), ("max-new-tokens", self.new_tokens, 2)):
            if value is not None and value < least:
                raise KVFoldError(f"{name}: {value}; give at least {least}")
        if self.shots is not None and self.shots < 0:
            raise KVFoldError(f"shots: {self.shots}; give 0 or more")


def make(names: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: Options) -> list[Suite]:
    """Suites by name, with their texts and data read.

    Raises
    ------
    KVFoldError
        An unknown suite, one without the data it needs, or data that cannot be read.
    """
    if not names:
        raise KVFoldError(f"suite: none given; known: {', '.join(REGISTRY)}")
    if unknown := [name for name in names if name not in REGISTRY]:
        raise KVFoldError(f"suite: {unknown[0]!r} is unknown; known: {', '.join(REGISTRY)}")
    return [_make(name, tokenizer, options) for name in dict.fromkeys(names)]


def _make(name: str, tokenizer: PreTrainedTokenizerBase, options: Options) -> Suite:
    chat = not options.raw and bool(tokenizer.chat_template)
    if name in ("divergence", "ppl"):
        texts = load_texts(() if options.texts else DOMAINS, options.texts)
        given = {key: text for key, text in texts.items() if text is not None}
        return (Divergence if name == "divergence" else Perplexity)(tokenizer, given, options.tokens)
    if name == "retrieval":
        return Retrieval(tokenizer, options.tokens)
    if name == "needle":
        return Needle(tokenizer, _hay(options), options.depths, chat)
    if name == "ruler":
        questions, digest = None, ""
        if options.data is not None and "qa" in options.tasks:
            records, digest = load_records(options.data, "data", ("question", "context", "answers"))
            questions = tuple(records)
        return Ruler(tokenizer, _hay(options), options.tasks, questions, digest, chat)
    if name == "code":
        texts = (
            load_texts((), {"code": options.texts["code"]}) if "code" in options.texts else load_texts(("code",), {})
        )
        text = texts["code"]
        assert text is not None
        return Code(tokenizer, text, **_given(new_tokens=options.new_tokens))
    return _gsm8k(tokenizer, options, chat)


def _gsm8k(tokenizer: PreTrainedTokenizerBase, options: Options, chat: bool) -> Suite:
    if options.data is None:
        raise KVFoldError('data: gsm8k needs its problems; give JSON lines with "question" and "answer" as --data FILE')
    fields = ("question", "answer")
    problems, digest = load_records(options.data, "data", fields)
    examples: list[dict[str, Any]] = []
    hashes = {"problems": digest}
    if options.examples is not None:
        examples, hashes["examples"] = load_records(options.examples, "examples", fields)
    shots = options.shots if options.shots is not None else min(SHOTS, len(examples))
    return Gsm8k(
        tokenizer,
        tuple(problems),
        tuple(examples),
        shots,
        hashes,
        chat,
        **_given(new_tokens=options.new_tokens),
    )


def _given(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _hay(options: Options) -> Text:
    """The text that things are hidden in."""
    names = [name for name in options.texts if name != "code"] or list(options.texts)
    texts = load_texts((), {names[0]: options.texts[names[0]]}) if names else load_texts(("prose",), {})
    (text,) = texts.values()
    assert text is not None
    return text
