"""What is asked of every method: one file per kind of task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.suites.base import Item, Measure, Outcome, Prompt, Suite, load_records
from kvfold.evaluation.suites.beginning import NEW_TOKENS as GENERATED
from kvfold.evaluation.suites.beginning import Beginning
from kvfold.evaluation.suites.code import Code
from kvfold.evaluation.suites.domains import DOMAINS as SHIFTS
from kvfold.evaluation.suites.domains import Domains
from kvfold.evaluation.suites.gsm8k import SHOTS, Gsm8k
from kvfold.evaluation.suites.infinitebench import InfiniteBench
from kvfold.evaluation.suites.layers import LayerErrors
from kvfold.evaluation.suites.lm_tasks import PREFIX, LmEval
from kvfold.evaluation.suites.longbench import LongBench
from kvfold.evaluation.suites.math_problems import Math
from kvfold.evaluation.suites.needle import DEPTHS, Needle
from kvfold.evaluation.suites.papers import PAPERS
from kvfold.evaluation.suites.ruler import TASKS, Ruler
from kvfold.evaluation.suites.sources import load_task
from kvfold.evaluation.suites.text import Divergence, Perplexity, Retrieval
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import load_texts
from kvfold.files import expanded

__all__ = ["KNOWN", "PAPERS", "REGISTRY", "Item", "Measure", "Options", "Outcome", "Prompt", "Suite", "make"]

REGISTRY: dict[str, type[Suite]] = {
    kind.name: kind
    for kind in (
        Divergence,
        Perplexity,
        LayerErrors,
        Beginning,
        Domains,
        Needle,
        Ruler,
        Retrieval,
        Gsm8k,
        Math,
        Code,
        LongBench,
        InfiniteBench,
        LmEval,
    )
}

KNOWN = (*(name for name in REGISTRY if name != LmEval.name), f"{PREFIX}TASK", *PAPERS)
"""What :func:`make` takes."""
GSM8K = "https://github.com/openai/grade-school-math (test.jsonl, as gsm8k.jsonl)"
DOMAINS = ("prose", "code")
"""Texts of ``divergence`` and ``ppl`` where none are given."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a person may choose; every suite takes what it knows.

    Attributes
    ----------
    texts
        Name to UTF-8 file. ``divergence``, ``ppl`` and ``domains`` score all of them, ``compare`` the first, ``code`` reads the
        one named ``code``, ``needle`` and ``ruler`` hide in the first that has another name.
    data, examples
        JSON lines: GSM8K's problems and solved examples; ``data`` also MATH's problems and questions for ``ruler``'s qa.
        A folder has a file for each task: ``TASK.jsonl`` of ``longbench`` and ``infinitebench``, ``gsm8k.jsonl``,
        ``gsm8k-train.jsonl`` and ``math.jsonl``. For ``lm-eval`` tasks: a folder of YAML files.
    tokens
        Tokens scored.
    new_tokens
        Tokens generated at most by ``gsm8k``, ``math`` and ``code``, and by ``compare``; None: the suite's own number.
    shots
        Solved examples before a problem; None: five where there are examples, else none.
    depths
        Per cent, of ``needle``.
    tasks
        Families of ``ruler``, or tasks of ``longbench`` or ``infinitebench``; none: all.
    forms
        Of ``retrieval``'s lists.
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
    tasks: tuple[str, ...] = ()
    forms: tuple[str, ...] = ("pairs",)
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
        raise KVFoldError(f"suite: none given; known: {', '.join(KNOWN)}")
    wanted: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name in PAPERS:
            for suite, tasks in PAPERS[name].suites.items():
                wanted[suite] = tuple(dict.fromkeys((*wanted.get(suite, ()), *tasks)))
        elif (name in REGISTRY and name != LmEval.name) or (name.startswith(PREFIX) and name != PREFIX):
            wanted.setdefault(name, options.tasks)
        else:
            raise KVFoldError(f"suite: {name!r} is unknown; known: {', '.join(KNOWN)}")
    tasks = tuple(name.removeprefix(PREFIX) for name in wanted if name.startswith(PREFIX))
    found = [
        _make(name, tokenizer, dataclasses.replace(options, tasks=chosen))
        for name, chosen in wanted.items()
        if not name.startswith(PREFIX)
    ]
    if tasks:
        found.append(LmEval(tokenizer, tasks, options.data, not options.raw and bool(tokenizer.chat_template)))
    return found


def _make(name: str, tokenizer: PreTrainedTokenizerBase, options: Options) -> Suite:
    chat = not options.raw and bool(tokenizer.chat_template)
    if name in ("divergence", "ppl", "layers"):
        texts = load_texts(() if options.texts else DOMAINS, options.texts)
        given = {key: text for key, text in texts.items() if text is not None}
        if name == "layers":
            return LayerErrors(tokenizer, given)
        return (Divergence if name == "divergence" else Perplexity)(tokenizer, given, options.tokens)
    if name == "compare":
        return Beginning(tokenizer, _hay(options), options.tokens, options.new_tokens or GENERATED)
    if name == "domains":
        return Domains(
            tokenizer, load_texts(("retrieval",) if options.texts else SHIFTS, options.texts), options.tokens
        )
    if name == "retrieval":
        return Retrieval(tokenizer, options.tokens, options.forms)
    if name == "needle":
        return Needle(tokenizer, _hay(options), options.depths, chat)
    if name == "ruler":
        questions, digest = None, ""
        tasks = options.tasks or TASKS
        if options.data is not None and "qa" in tasks and not expanded(options.data).is_dir():
            records, digest = load_records(options.data, "data", ("question", "context", "answers"))
            questions = tuple(records)
        return Ruler(tokenizer, _hay(options), tasks, questions, digest, chat)
    if name == "code":
        texts = (
            load_texts((), {"code": options.texts["code"]}) if "code" in options.texts else load_texts(("code",), {})
        )
        text = texts["code"]
        assert text is not None
        return Code(tokenizer, text, **_given(new_tokens=options.new_tokens))
    if name == "math":
        return Math.load(tokenizer, options.data, chat, **_given(new_tokens=options.new_tokens))
    if name in ("longbench", "infinitebench"):
        kind = LongBench if name == "longbench" else InfiniteBench
        return kind.load(tokenizer, options.data, options.tasks, chat)
    return _gsm8k(tokenizer, options, chat)


def _gsm8k(tokenizer: PreTrainedTokenizerBase, options: Options, chat: bool) -> Suite:
    fields = ("question", "answer")
    problems, digest = load_task(options.data, "gsm8k", "gsm8k", fields, GSM8K)
    examples: list[dict[str, Any]] = []
    hashes = {"problems": digest}
    known = options.examples or _beside(options.data, "gsm8k-train.jsonl")
    if known is not None:
        examples, hashes["examples"] = load_records(known, "examples", fields)
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


def _beside(data: str | None, name: str) -> str | None:
    """A file of the folder of data, if there are both."""
    path = expanded(data or "") / name
    return str(path) if data is not None and path.is_file() else None


def _given(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _hay(options: Options) -> Text:
    """The text that things are hidden in."""
    names = [name for name in options.texts if name != "code"] or list(options.texts)
    texts = load_texts((), {names[0]: options.texts[names[0]]}) if names else load_texts(("prose",), {})
    (text,) = texts.values()
    assert text is not None
    return text
