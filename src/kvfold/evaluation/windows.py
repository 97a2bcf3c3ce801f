"""Pieces of text to score: which tokens are prefilled, which are scored, at one or more prefixes.

At every prefix the same tokens are scored: a shorter one begins later in the text. What differs between two prefixes is then
how much was folded, not what was read.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.lists import FORMS, MOST
from kvfold.evaluation.text import Text, load_text
from kvfold.evaluation.transcripts import tool_calls

PREFIX, TOKENS, WINDOWS = 1024, 256, 3
SOURCES = ("argparse", "asyncio/base_events", "decimal", "doctest", "inspect", "mailbox", "tarfile", "typing")
"""Modules of the standard library whose source is the text of ``code``; those that are there."""
BUILT_IN = ("prose", "code", "tools", "retrieval")
"""Domains that need no file: CPython's documentation, its library's source, calls of tools about it, and random pairs."""
LONG = 4_000_000
"""Characters beyond which a text is tokenized around its windows only: all of it would take longer than scoring them."""
# Fewer say nothing: the windows alone of most methods hold 128 tokens.
MIN_PREFIX = 64
MIN_TOKENS = 32
MIN_NEW_TOKENS = 2  # the first one's step is not timed
CHARACTERS = 32
"""More than a token has, on average over a window, in any text."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A piece of text to score.

    Attributes
    ----------
    domain, index
        Which text, which of its windows.
    ids
        ``[1, prefilled + tokens + 1]`` int64.
    prefix
        Tokens to be prefilled, as asked for.
    prefilled
        Tokens prefilled: fewer than `prefix` where a retrieval text's pairs do not fill it.
    answers
        Where, among the scored tokens, each answer of a retrieval window lies: (first, one after the last).
    listed
        Where, among all tokens, the value that each answer repeats begins.
    """

    domain: str
    index: int
    ids: torch.Tensor
    prefix: int
    prefilled: int
    answers: tuple[tuple[int, int], ...] = ()
    listed: tuple[int, ...] = ()


def as_prefixes(prefix: int | Sequence[int]) -> list[int]:
    """One or more prefixes as a list, ascending and each once.

    Raises
    ------
    KVFoldError
        There is none.
    """
    found = sorted({prefix} if isinstance(prefix, int) else set(prefix))
    if not found:
        raise KVFoldError("prefix: none given; give one or more numbers of tokens")
    return found


def check_context(
    prefixes: Sequence[int], tokens: int, new_tokens: int, max_context: int | None, called: str = "prefix"
) -> None:
    """Refuse prefixes that leave no room for the tokens to be scored and generated; ``called`` names them in the error.

    Raises
    ------
    KVFoldError
        Names the first prefix that does not fit, and what does.
    """
    for prefix in prefixes:
        total = prefix + tokens + new_tokens
        if max_context is None or total <= max_context:
            continue
        generated = f" + generated {new_tokens}" if new_tokens else ""
        if max_context > prefix + new_tokens:
            raise KVFoldError(
                f"tokens: {called} {prefix} + tokens {tokens}{generated} = {total} is beyond the model's context of "
                f"{max_context}; give at most {max_context - prefix - new_tokens} tokens"
            )
        raise KVFoldError(
            f"{called}: {prefix} tokens do not fit the model's context of {max_context}"
            + (
                f"; give at most {max_context - tokens - new_tokens} with {tokens} tokens scored{generated}"
                if max_context > tokens + new_tokens
                else "; give fewer, and fewer tokens to score"
            )
        )


def tail(ids: torch.Tensor, length: int, bos: int | None) -> torch.Tensor:
    """The last tokens of a text, beginning with the token that the tokenizer puts before every text, if it puts one.

    Parameters
    ----------
    ids
        ``[n]`` int64.
    length
        Tokens wanted, at most n.
    bos
        That token, or None.

    Returns
    -------
    torch.Tensor
        ``[1, length]`` int64.
    """
    found = ids[len(ids) - length :].clone()
    if bos is not None:
        found[0] = bos
    return found[None].long()


def bos_of(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> int | None:
    """The token that the tokenizer put before a text of ``[n]`` tokens; None if it puts none."""
    bos = tokenizer.bos_token_id
    return int(ids[0]) if bos is not None and len(ids) and int(ids[0]) == bos else None


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    prefix: int | Sequence[int],
    tokens: int,
    new_tokens: int,
    max_context: int | None,
    called: str = "prefix",
) -> dict[int, torch.Tensor]:
    """The beginning of a text, as it is read at every prefix.

    At each the same tokens are scored, those after the longest prefix; a shorter one begins later. ``called`` is the prefix's
    name in an error.

    Returns
    -------
    dict
        Prefix to ``[1, prefix + tokens + 1]`` int64, ascending.

    Raises
    ------
    KVFoldError
        Too few tokens asked for, more than the model's context, or more than the text has.
    """
    prefixes = as_prefixes(prefix)
    if prefixes[0] < MIN_PREFIX:
        raise KVFoldError(f"prefix: {prefixes[0]} is too small; give at least {MIN_PREFIX} tokens")
    if tokens < MIN_TOKENS:
        raise KVFoldError(f"tokens: {tokens} is too small; give at least {MIN_TOKENS}")
    if new_tokens < MIN_NEW_TOKENS:
        raise KVFoldError(f"new_tokens: {new_tokens} is too small; give at least {MIN_NEW_TOKENS}")
    check_context(prefixes, tokens, new_tokens, max_context, called)
    needed = prefixes[-1] + tokens + 1
    # Encoding all of a long book would take longer than a method; its beginning nearly always has the tokens.
    ids = tokenizer(text.text[: CHARACTERS * needed], return_tensors="pt", verbose=False).input_ids[0, :needed]
    if len(ids) < needed:
        ids = tokenizer(text.text, return_tensors="pt", verbose=False).input_ids[0, :needed]
    if len(ids) < needed:
        raise KVFoldError(
            f"text: {text.source} has {len(ids)} tokens, and {needed} are needed "
            f"({called} {prefixes[-1]} + tokens {tokens} + 1); give a longer text, or smaller --{called} or --tokens"
        )
    bos = bos_of(tokenizer, ids)
    return {p: tail(ids, p + tokens + 1, bos) for p in prefixes}


def windows_of(
    tokenizer: PreTrainedTokenizerBase,
    domain: str,
    text: Text,
    prefix: int | Sequence[int],
    tokens: int,
    count: int,
) -> list[Window]:
    """``count`` windows in the middle of as many equal parts of a text, at every prefix.

    Windows of different prefixes end alike.

    Raises
    ------
    KVFoldError
        The text is too short for them.
    """
    prefixes = as_prefixes(prefix)
    length = prefixes[-1] + tokens + 1
    long = len(text.text) > max(LONG, CHARACTERS * length * count)
    parts = _around(text.text, length, count) if long else [text.text]
    encoded = [tokenizer(part, return_tensors="pt", verbose=False).input_ids[0] for part in parts]
    if long:
        middles = [(ids, len(ids) // 2) for ids in encoded]
        enough = all(len(ids) >= length for ids in encoded)
    else:
        (ids,) = encoded
        enough = len(ids) >= count * length
        middles = [(ids, (2 * i + 1) * len(ids) // (2 * count)) for i in range(count if enough else 0)]
    if not enough:
        most = len(encoded[0]) // length
        raise KVFoldError(
            f"text: {text.source} has {min(map(len, encoded))} tokens, and {count} windows need {count * length} "
            f"(prefix {prefixes[-1]} + tokens {tokens} + 1 each); give a longer text, or smaller --prefix, --tokens or "
            + (f"--windows (at most {most})" if most else "--windows")
        )
    ends = [(ids[: middle - length // 2 + length], bos_of(tokenizer, ids)) for ids, middle in middles]
    return [
        Window(domain, i, tail(ids, p + tokens + 1, bos), p, p) for p in prefixes for i, (ids, bos) in enumerate(ends)
    ]


def _around(text: str, length: int, count: int) -> list[str]:
    """Characters around the middles of ``count`` equal parts that surely hold ``length`` tokens."""
    middles = [(2 * i + 1) * len(text) // (2 * count) for i in range(count)]
    return [text[middle - CHARACTERS * length // 2 : middle + CHARACTERS * length // 2] for middle in middles]


def retrieval(tokenizer: PreTrainedTokenizerBase, prefix: int, tokens: int, count: int) -> list[Window]:
    """Windows of random key-value pairs, listed once and then asked for in another order; see :func:`retrieval_window`."""
    return [retrieval_window(tokenizer, prefix, tokens, index) for index in range(count)]


def retrieval_window(
    tokenizer: PreTrainedTokenizerBase,
    prefix: int,
    tokens: int | None,
    index: int,
    most: int | None = None,
    form: str = "pairs",
) -> Window:
    """One of them: ``index`` draws its pairs.

    The list fills the prefix as far as whole pairs do, the questions the scored tokens.

    Parameters
    ----------
    tokens
        Scored at most; None: as many as the questions take.
    most
        Questions at most. There may be fewer then, and none where the prefix holds no pair.
    form
        Of :data:`kvfold.evaluation.lists.FORMS`.

    Raises
    ------
    KVFoldError
        The scored tokens hold no question, and `most` is None.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    draw, of = random.Random(index), FORMS[form]
    ids = encode(of.head)
    pairs = []
    keys: set[str] = set()
    for _ in range(MOST):
        key, asked, answered = of.draw(draw)
        if key in keys:  # two values would both be right
            continue
        keys.add(key)
        question, answer = encode(asked), encode(answered)
        if len(ids) + len(question) + len(answer) + 16 > prefix:
            break
        ids += question
        pairs.append((question, answer, len(ids)))
        ids += answer
    ids += encode(of.again)
    end = len(ids)
    answers: list[tuple[int, int]] = []
    draw.shuffle(pairs)
    for question, answer, _ in pairs[:most]:
        if tokens is not None and len(ids) + len(question) + len(answer) > end + tokens:
            break
        ids += question
        answers.append((len(ids) - end - 1, len(ids) + len(answer) - end - 1))
        ids += answer
    if not answers and most is None:
        if not pairs:
            raise KVFoldError(f"prefix: {prefix} tokens hold no pair of the retrieval text; give {prefix + 32} or more")
        least = len(pairs[0][0]) + len(pairs[0][1])
        raise KVFoldError(f"tokens: {tokens} holds no question of the retrieval text; give at least {max(least, 32)}")
    listed = tuple(place for _, _, place in pairs[: len(answers)])
    return Window("retrieval", index, torch.tensor([ids]), prefix, end, tuple(answers), listed)


def library_source() -> Text:
    """The source of some modules of Python's standard library, in a fixed order: about 700,000 characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [folder / f"{name}.py" for name in SOURCES if (folder / f"{name}.py").is_file()]
    if not found:
        raise KVFoldError(f"code: this Python has no source in {folder}; leave the domain out")
    return Text("\n".join(path.read_text(encoding="utf-8") for path in found), "python standard library")


def load_domain(name: str, path: str) -> Text:
    """A text of a file; of a ``.jsonl`` file, the strings of every line's object."""
    text = load_text(path)
    if not path.endswith(".jsonl"):
        return text
    parts = []
    for number, line in enumerate(text.text.split("\n"), 1):  # strings of JSON may hold other ends of lines
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            parts.append("\n".join(value for value in record.values() if isinstance(value, str)))
        except (ValueError, AttributeError) as error:
            raise KVFoldError(f"text: line {number} of {path} is not a JSON object; give JSON lines") from error
    return Text("\n\n".join(parts) + "\n", text.source)


def load_texts(domains: Sequence[str], files: dict[str, str]) -> dict[str, Text | None]:
    """The text of every domain; None for retrieval, which is made for the tokenizer.

    Parameters
    ----------
    domains
        Built-in ones, by name.
    files
        Further ones: name to UTF-8 file. A built-in name is replaced.

    Raises
    ------
    KVFoldError
        An unknown domain, or a text that cannot be read.
    """
    texts: dict[str, Text | None] = {}
    for name in (*domains, *files):
        if name in files:
            texts[name] = load_domain(name, files[name])
        elif name == "prose":
            texts[name] = load_text()
        elif name == "code":
            texts[name] = library_source()
        elif name == "tools":
            texts[name] = tool_calls()
        elif name == "retrieval":
            texts[name] = None
        else:
            raise KVFoldError(
                f"domain: {name!r} is not built in; allowed: {', '.join(BUILT_IN)}, or a text of your own as NAME=FILE"
            )
    if not texts:
        raise KVFoldError(f"domains: none given; built in: {', '.join(BUILT_IN)}")
    return texts


def make_windows(
    tokenizer: PreTrainedTokenizerBase,
    texts: dict[str, Text | None],
    prefix: int | Sequence[int] = PREFIX,
    tokens: int = TOKENS,
    count: int = WINDOWS,
) -> list[Window]:
    """All windows to score, text by text and prefix by prefix; see :func:`windows_of` and :func:`retrieval`.

    Raises
    ------
    KVFoldError
        A text is too short.
    """
    windows: list[Window] = []
    for name, text in texts.items():
        if text is None:
            windows += [w for p in as_prefixes(prefix) for w in retrieval(tokenizer, p, tokens, count)]
        else:
            windows += windows_of(tokenizer, name, text, prefix, tokens, count)
    return windows
