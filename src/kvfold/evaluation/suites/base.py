"""What a suite is: items, a prompt for each, and how an outcome is graded."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.perplexity import Score
from kvfold.evaluation.text import Text, load_text

if TYPE_CHECKING:
    from kvfold.methods.base import Method

LEAST = 64
"""Shortest prompt: of fewer tokens a method packs nothing."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number that a suite gives per item.

    Attributes
    ----------
    name : str
    higher_is_better : bool
    shown : {"number", "percent", "perplexity"}
        How tables print its mean; ``perplexity``: the exponential of a mean in nats.
    """

    name: str
    higher_is_better: bool = True
    shown: str = "percent"


@dataclasses.dataclass(frozen=True)
class Item:
    """Something asked; equal ones ask the same, however many others there are.

    Attributes
    ----------
    task : str
        Kind of item within the suite.
    length : int or None
        Tokens of the prompt.
    seed, index : int
        What it is drawn by.
    tags : tuple
        What else places it: (name, value) pairs.
    """

    task: str
    length: int | None
    seed: int
    index: int
    tags: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Identifies it within its suite: ``needle/4096/depth=50/0.3`` for seed 0, index 3."""
        parts = [self.task, *([str(self.length)] if self.length is not None else [])]
        parts += [f"{name}={value}" for name, value in self.tags]
        return "/".join([*parts, f"{self.seed}.{self.index}"])

    def draw(self, what: str = "") -> random.Random:
        """Random numbers of its own; the same for every method, and whatever else is run."""
        return random.Random(f"{self.name}|{what}")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """An item for a model.

    Attributes
    ----------
    ids
        ``[1, tokens]`` int64.
    prefilled
        Tokens of the first call, which attends exactly; fewer than there are.
    new_tokens
        Tokens to generate at most; 0: the tokens after the first call are scored.
    expected
        What an answer has to contain, or is compared with.
    any_of
        One of them is enough.
    stop
        Strings that end an answer.
    stop_at_once
        Whether they end one that has not begun, too: white space alone.
    answers
        Where, among scored tokens, answers lie: (first, one after the last).
    listed
        Where, among all tokens, what each of them repeats begins.
    """

    ids: torch.Tensor
    prefilled: int
    new_tokens: int = 0
    expected: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    any_of: bool = False
    answers: tuple[tuple[int, int], ...] = ()
    stop_at_once: bool = False
    listed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a method made of a prompt.

    Attributes
    ----------
    score
        Of scored tokens; None where tokens were generated.
    text, new_tokens, capped
        What was generated, how many tokens, and whether it ended because ``new_tokens`` were there.
    """

    score: Score | None = None
    text: str = ""
    new_tokens: int = 0
    capped: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a cache, or means over several.

    Attributes
    ----------
    bits
        Bits per cached element of the packed part, without and with the tables that all sequences share; None: nothing is.
    cache_bytes, full_cache_bytes
        Of its tensors, and of a full-precision cache of the same tokens.
    """

    bits: tuple[float | None, float | None]
    cache_bytes: int
    full_cache_bytes: int


@dataclasses.dataclass(frozen=True)
class Own:
    """What came of an item that its suite asks by itself: see :meth:`Suite.ask`.

    ``costs``, ``decode_tokens_per_s`` and ``decode_path`` are as in :class:`~kvfold.evaluation.results.Result`; ``seconds`` is
    given where not all of asking counts.
    """

    scores: dict[str, float | None]
    read: int
    tested: int
    sizes: Sizes
    answer: str
    series: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    questions: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    costs: dict[str, float] | None = None
    decode_tokens_per_s: float | None = None
    decode_path: str | None = None
    seconds: float | None = None


class Suite:
    """Items, prompts and grades.

    A suite is a frozen dataclass of its settings and the tokenizer. Its subclass sets `name`, `summary`, `measures` (the first
    is the one that verdicts are about) and defines :meth:`items`, :meth:`prompt` and :meth:`grade`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]
    compares: ClassVar[bool] = False
    """Whether outcomes are compared with the full-precision cache's logits, which are then made once per item."""
    along: ClassVar[str] = "tokens after the prefilled ones"
    """What :meth:`series` goes along."""
    panels: ClassVar[tuple[str, ...]] = ()
    """Measures that a report draws against bits beside the first."""
    seeds_repeat: ClassVar[bool] = False
    """Whether another seed asks the same problem in another way: items of one index are then one, their mean."""
    version: ClassVar[int] = 1
    """Of its prompts and grades; a change makes other settings."""
    tokenizer: PreTrainedTokenizerBase

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        """All items: ``limit`` of every task, length and seed."""
        raise NotImplementedError

    def prompt(self, item: Item) -> Prompt:
        """What the model is given.

        Raises
        ------
        KVFoldError
            The text is too short for the length, or the length for the task.
        """
        raise NotImplementedError

    def grade(self, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        """A number per measure."""
        raise NotImplementedError

    def ask(self, model: PreTrainedModel, item: Item, method: Method, chunk: int) -> Own | None:
        """Items of several requests, which the suite puts to a model itself; None: an item is its prompt."""
        return None

    def graded(self, item: Item, prompt: Prompt, outcome: Outcome) -> dict[str, float | None]:
        """The same, where grades depend on the item."""
        return self.grade(prompt, outcome)

    def series(self, outcome: Outcome) -> dict[str, list[float]]:
        """Numbers along the scored tokens."""
        return {}

    def by_question(self, prompt: Prompt, outcome: Outcome) -> dict[str, list[float]]:
        """Columns of a table with a line per question, where a prompt has several."""
        return {}

    def options(self) -> dict[str, Any]:
        """What must be alike for two rows of the suite to be compared, besides texts."""
        raise NotImplementedError

    def texts(self) -> dict[str, str]:
        """SHA-256 of what it reads, by name."""
        return {}


def place(item: Item) -> float:
    """Where in a text an item lies, 0 to 1: spread evenly over its seeds' items, however many of them there are."""
    return ((item.index + 0.5) * (5**0.5 - 1) / 2 + item.seed * 2**0.5) % 1


# ---- prompts ---------------------------------------------------------------------------------------------------------


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = True) -> list[int]:
    """Token ids of a text."""
    return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)


@dataclasses.dataclass(frozen=True)
class Form:
    """How a question is put: as a message of the model's chat template, or as plain text that is continued.

    Attributes
    ----------
    tokenizer
    chat : bool
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool

    def text(self, context: str, question: str, lead: str) -> str:
        """All of a prompt.

        Parameters
        ----------
        context, question : str
            They follow each other in the user's message.
        lead : str
            How the answer begins.

        Raises
        ------
        KVFoldError
            The model's chat template refuses it.
        """
        if not self.chat:
            return f"{context}{question}\n{lead}"
        message = [{"role": "user", "content": context + question}]
        try:
            rendered = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise KVFoldError(f"model: its chat template refuses a question ({error}); give --raw") from error
        assert isinstance(rendered, str)
        return f"{rendered}{lead}"

    def ids(self, text: str) -> list[int]:
        """A template brings its own special tokens."""
        return encode(self.tokenizer, text, special=not self.chat)

    def cut(self, text: str, question: str, ids: list[int]) -> int:
        """Tokens that end before the question begins: those that the first call prefills. The rest, the question too, reads the
        folded cache."""
        at = text.rfind(question.strip())  # templates strip what they are given
        if at < 0:
            raise KVFoldError("model: its chat template rewrites the question; give --raw")
        before = self.ids(text[:at])
        return max(1, min(common(before, ids), len(ids) - 1))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TAIL = 256
"""Tokens at the end of prompts of one length that are not prefilled, so that as many are of each and one batch answers them."""


def as_prompt(
    form: Form,
    context: str,
    question: str,
    lead: str,
    new_tokens: int,
    expected: Sequence[str],
    stop: Sequence[str] = (),
    length: int = 0,
) -> Prompt:
    """A prompt whose context is prefilled and whose question is read through the folded cache.

    Parameters
    ----------
    length
        Where it has room for it, all but the last ``TAIL`` of so many tokens are prefilled, and the rest of the context is
        read through the folded cache, too; 0: all of the context is prefilled.
    """
    text = form.text(context, question, lead)
    ids = form.ids(text)
    cut = form.cut(text, question, ids)
    if length >= 4 * TAIL:
        cut = min(cut, length - TAIL)
    return Prompt(torch.tensor([ids]), cut, new_tokens, tuple(expected), tuple(stop))


# ---- text to fill prompts with ---------------------------------------------------------------------------------------

PIECE = 400
"""Characters at most of a piece; needles lie between pieces."""


class Haystack:
    """A text in pieces (sentences, lines) that keep their white space, and how many tokens each has."""

    def __init__(self, text: Text, tokenizer: PreTrainedTokenizerBase) -> None:
        self.source = text.source
        self.pieces = pieces_of(text.text)
        counts = tokenizer(self.pieces, add_special_tokens=False, verbose=False).input_ids
        self.counts = [len(ids) for ids in counts]

    def fill(
        self, form: Form, length: int, draw: random.Random, make: Callable[[list[str]], Sequence[str]]
    ) -> list[str]:
        """As many pieces, one after the other from somewhere in the text, as a prompt of ``length`` tokens takes.

        Parameters
        ----------
        make : callable
            Context, question and lead of a prompt with such pieces.

        Returns
        -------
        list of str
            So many that the prompt has ``length`` tokens, or as few less as a piece has.

        Raises
        ------
        KVFoldError
            The text is too short, or the prompt too long without any.
        """

        def tokens(pieces: list[str]) -> int:
            return len(form.ids(form.text(*make(pieces))))

        room = length - tokens([])
        if room < 0:
            raise KVFoldError(f"lengths: {length} tokens hold no prompt of this task; give at least {length - room}")
        start = draw.randrange(len(self.pieces))
        rotated = self.pieces[start:] + self.pieces[:start]
        ends = list(accumulate(self.counts[start:] + self.counts[:start]))
        count = bisect_right(ends, room)
        left = length - tokens(rotated[:count])
        # pieces in a row have fewer tokens than each by itself
        while left > 0 and (more := bisect_right(ends, (ends[count - 1] if count else 0) + left)) > count:
            count, left = more, length - tokens(rotated[:more])
        if count == len(rotated) and left > max(self.counts):
            raise KVFoldError(
                f"text: {self.source} has {room - left} tokens, and a prompt of {length} needs {room}; give a longer text with "
                "--text, or smaller --lengths"
            )
        while count and (over := tokens(rotated[:count]) - length) > 0:
            count = min(count - 1, bisect_right(ends, ends[count - 1] - over))
        return rotated[: max(count, 0)]


def pieces_of(text: str) -> list[str]:
    """Sentences or lines with the white space after them; longer ones are cut."""
    found = re.findall(r".+?(?:[.!?][\"'”’)]*\s+|\n\s*|$)", text, re.S)
    return [piece[at : at + PIECE] for piece in found for at in range(0, len(piece), PIECE)]


def inserted(pieces: Sequence[str], needles: Sequence[str], places: Sequence[float]) -> str:
    """Pieces with needles between them.

    Parameters
    ----------
    places : sequence of float
        Of each needle, 0 (before everything) to 1 (after everything).
    """
    at: dict[int, list[str]] = {}
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        at.setdefault(round(place * len(pieces)), []).append(needle)
    found: list[str] = []
    for i in range(len(pieces) + 1):
        for needle in at.get(i, ()):
            if found and not found[-1][-1:].isspace():
                found.append(" ")
            found.append(f"{needle} ")
        if i < len(pieces):
            found.append(pieces[i])
    return "".join(found).rstrip() + "\n\n"


def digits(draw: random.Random, count: int) -> list[str]:
    """Different numbers of seven digits, as text."""
    return [str(number) for number in draw.sample(range(1_000_000, 10_000_000), count)]


# ---- data files ------------------------------------------------------------------------------------------------------


def load_records(path: str | Path, field: str, needs: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Objects of a JSON-lines file, and the SHA-256 of its text.

    Parameters
    ----------
    field : str
        The option that named it; errors begin with it.
    needs : sequence of str
        Keys that every object has.

    Raises
    ------
    KVFoldError
        It cannot be read, or a line has no such object; names the line.
    """
    try:
        text = load_text(path)
    except KVFoldError as error:
        raise KVFoldError(f"{field}: {str(error).removeprefix('text: ')}") from error
    found = []
    for number, line in enumerate(text.text.split("\n"), 1):  # strings of JSON may hold other ends of lines
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise KVFoldError(f"{field}: line {number} of {path} is not JSON; give JSON lines") from error
        missing = [key for key in needs if not isinstance(record, dict) or key not in record]
        if missing:
            raise KVFoldError(
                f"{field}: line {number} of {path} has no {', '.join(missing)}; needed: {', '.join(needs)}"
            )
        found.append(record)
    return found, text.sha256


def answers_of(held: Any) -> tuple[str, ...]:
    """What a record's answers are compared as: one, or a list of several, without blank ones, which all answers would hold.

    Raises
    ------
    KVFoldError
        None is left, or one is neither text nor a number.
    """
    found = held if isinstance(held, list | tuple) else [held]
    if any(isinstance(answer, bool) or not isinstance(answer, str | int | float) for answer in found):
        raise KVFoldError(f"data: {str(held)[:60]} are no answers; give a text or a number, or a list of them")
    known = tuple(str(answer) for answer in found if str(answer).strip())
    if not known:
        raise KVFoldError(f"data: a record has no answers but {held!r}; leave it out, or give it one")
    return known
