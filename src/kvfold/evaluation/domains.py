"""Quality on texts of several kinds: does what a method learned, or assumes, hold where the text is another?

CommVQ's Table 6 asks it of codebooks learned on one kind of text. Here every method answers, on windows spread over each
text, token by token against the full-precision cache; key-value retrieval also counts exact answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import KVFoldError
from kvfold.evaluation.compare import make_header
from kvfold.evaluation.perplexity import CHUNK, Score, reference, score
from kvfold.evaluation.schema import Header, Sidecar, finite, write_json
from kvfold.evaluation.text import Text, load_text
from kvfold.models import ModelInfo

if TYPE_CHECKING:
    from kvfold.methods.base import Method

PREFIX, TOKENS, WINDOWS = 1024, 256, 3
SOURCES = ("argparse", "asyncio/base_events", "decimal", "doctest", "inspect", "mailbox", "tarfile", "typing")
"""Modules of the standard library whose source is the text of ``code``; those that are there."""
BUILT_IN = ("prose", "code", "retrieval")
"""Domains that need no file: CPython's documentation, its library's source, and random pairs."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A piece of text to score.

    Attributes
    ----------
    domain, index
        Which text, which of its windows.
    ids
        ``[1, prefix + tokens + 1]`` int64.
    prefix
        Tokens prefilled.
    answers
        Where, among the scored tokens, each answer of a retrieval window lies: (first, one after the last).
    """

    domain: str
    index: int
    ids: torch.Tensor
    prefix: int
    answers: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class DomainRow:
    """One method on one window. Numbers that are not finite, or do not apply, are None.

    Attributes
    ----------
    method, domain, window
        What was run on what.
    prefix, tokens
        Tokens prefilled and scored.
    bits_without_tables, effective_bits
        Bits per cached element of the packed part, without and with the tables that all sequences share.
    ppl, kld, top1
        As in :class:`~kvfold.evaluation.schema.Row`.
    exact
        Share of a retrieval window's answers whose tokens were all the model's first choice, 0 to 1.
    seconds
        Wall-clock time.
    """

    method: str
    domain: str
    window: int
    prefix: int
    tokens: int
    bits_without_tables: float | None
    effective_bits: float | None
    ppl: float | None
    kld: float | None
    top1: float | None
    exact: float | None
    seconds: float

    @property
    def key(self) -> str:
        """Identifies the row within a run."""
        return f"{self.method}|{self.domain}|{self.window}"


def windows_of(
    tokenizer: PreTrainedTokenizerBase, domain: str, text: Text, prefix: int, tokens: int, count: int
) -> list[Window]:
    """``count`` windows in the middle of as many equal parts of a text.

    Raises
    ------
    KVFoldError
        The text is too short for them.
    """
    ids = tokenizer(text.text, return_tensors="pt", verbose=False).input_ids[0]
    length = prefix + tokens + 1
    if len(ids) < count * length:
        raise KVFoldError(
            f"text: {text.source} has {len(ids)} tokens, and {count} windows need {count * length}; give a longer text, or "
            "smaller --prefix, --tokens or --windows"
        )
    starts = [(2 * i + 1) * len(ids) // (2 * count) - length // 2 for i in range(count)]
    return [Window(domain, i, ids[None, at : at + length].long(), prefix) for i, at in enumerate(starts)]


def retrieval(tokenizer: PreTrainedTokenizerBase, prefix: int, tokens: int, count: int) -> list[Window]:
    """Windows of random key-value pairs, listed once and then asked for in another order.

    The list fills the prefix as far as whole pairs do, the questions the scored tokens.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    windows = []
    for index in range(count):
        draw = random.Random(index)
        ids = encode("Each key has a value.\n")
        pairs = []
        while True:
            key, value = (f"{draw.randrange(1 << 16):04x}" for _ in range(2))
            question, answer = encode(f"Key {key} has the value"), encode(f" {value}.\n")
            if len(ids) + len(question) + len(answer) + 16 > prefix:
                break
            ids += question + answer
            pairs.append((question, answer))
        ids += encode("The same in another order:\n")
        listed = len(ids)
        answers: list[tuple[int, int]] = []
        draw.shuffle(pairs)
        for question, answer in pairs:
            if len(ids) + len(question) + len(answer) > listed + tokens:
                break
            ids += question
            answers.append((len(ids) - listed - 1, len(ids) + len(answer) - listed - 1))
            ids += answer
        if not answers:
            raise KVFoldError(f"tokens: {tokens} holds no question of the retrieval text; give at least 32")
        windows.append(Window("retrieval", index, torch.tensor([ids]), listed, tuple(answers)))
    return windows


def library_source() -> Text:
    """The source of some modules of Python's standard library."""
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
    for number, line in enumerate(text.text.splitlines(), 1):
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
    prefix: int = PREFIX,
    tokens: int = TOKENS,
    count: int = WINDOWS,
) -> list[Window]:
    """All windows to score; see :func:`windows_of` and :func:`retrieval`."""
    windows: list[Window] = []
    for name, text in texts.items():
        if text is None:
            windows += retrieval(tokenizer, prefix, tokens, count)
        else:
            windows += windows_of(tokenizer, name, text, prefix, tokens, count)
    return windows


def run(
    model: PreTrainedModel,
    info: ModelInfo,
    methods: Sequence[str | Method],
    windows: Sequence[Window],
    *,
    chunk: int = CHUNK,
    seed: int = 0,
    json_path: Path | None = None,
    on_row: Callable[[DomainRow, int, int], None] | None = None,
) -> tuple[Header, list[DomainRow]]:
    """Score every window under every method.

    Parameters
    ----------
    methods
        Method strings or objects.
    json_path
        Where the result goes, in one step at the end; a killed run with the same arguments goes on where it stopped.
    on_row
        Called after every row with the row, how many there are and how many there will be.

    Raises
    ------
    KVFoldError
        A method does not fit the model. All are tried before the first is run.
    """
    import kvfold
    from kvfold import methods as registry

    specs = {str(m): m for m in (registry.get(m) if isinstance(m, str) else m for m in methods)}
    for method in specs.values():
        kvfold.explain(model, method)
    digest = hashlib.sha256()
    for window in windows:
        digest.update(f"{window.domain}|{window.index}|{window.prefix}|".encode() + window.ids.numpy().tobytes())
    header = make_header(
        model,
        info,
        text=", ".join(dict.fromkeys(w.domain for w in windows)),
        text_sha256=digest.hexdigest(),
        prefix=max(w.prefix for w in windows),
        tokens=max(w.ids.shape[1] - w.prefix - 1 for w in windows),
        chunk=chunk,
        new_tokens=0,
        seed=seed,
    )
    sidecar = Sidecar.of(json_path, DomainRow) if json_path else None
    done = sidecar.start(header) if sidecar else {}
    total = len(windows) * len(specs)
    rows: list[DomainRow] = []
    for window in windows:
        ids = window.ids.to(model.device)
        truth = None
        for name, method in specs.items():
            known = done.get(f"{name}|{window.domain}|{window.index}")
            if known is None:
                if truth is None:
                    truth = reference(model, ids, window.prefix, chunk)
                torch.manual_seed(seed)
                started = time.perf_counter()
                cache = kvfold.fold(model, method)
                try:
                    result = score(model, ids, window.prefix, cache, chunk, truth)
                finally:
                    kvfold.unfold(model)
                bits = [cache.effective_bits(tables) if cache.nbytes()["packed"] else None for tables in (False, True)]
                known = _row(name, window, result, bits, time.perf_counter() - started)
                if sidecar is not None:
                    sidecar.add(known)
            rows.append(known)
            if on_row is not None:
                on_row(known, len(rows), total)
    if json_path is not None and sidecar is not None:
        write_json(json_path, to_dict(header, rows))
        sidecar.remove()
    return header, rows


def _row(name: str, window: Window, result: Score, bits: list[float | None], seconds: float) -> DomainRow:
    right = result.correct
    answers = [bool(right[first:stop].all()) for first, stop in window.answers]
    return DomainRow(
        method=name,
        domain=window.domain,
        window=window.index,
        prefix=window.prefix,
        tokens=len(result.nll),
        bits_without_tables=bits[0],
        effective_bits=bits[1],
        ppl=finite(result.ppl),
        kld=finite(result.kld),
        top1=finite(result.top1),
        exact=sum(answers) / len(answers) if answers else None,
        seconds=seconds,
    )


def to_dict(header: Header, rows: Sequence[DomainRow]) -> dict[str, Any]:
    """Header and rows for JSON."""
    return {"header": dataclasses.asdict(header), "rows": [dataclasses.asdict(row) for row in rows]}


@dataclasses.dataclass(frozen=True)
class Mean:
    """A method's means over a domain's windows; ``lowest`` and ``highest`` are of the KL divergence."""

    kld: float | None
    lowest: float | None
    highest: float | None
    top1: float
    exact: float | None


def means(rows: Sequence[DomainRow]) -> dict[str, dict[str, Mean]]:
    """By method, then by domain, in the order of the rows."""
    table: dict[str, dict[str, list[DomainRow]]] = {}
    for row in rows:
        table.setdefault(row.method, {}).setdefault(row.domain, []).append(row)

    def mean(values: list[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return sum(known) / len(known) if len(known) == len(values) and known else None

    return {
        method: {
            domain: Mean(
                mean([r.kld for r in found]),
                min((r.kld for r in found if r.kld is not None), default=None),
                max((r.kld for r in found if r.kld is not None), default=None),
                mean([r.top1 for r in found]) or 0.0,
                mean([r.exact for r in found]),
            )
            for domain, found in domains.items()
        }
        for method, domains in table.items()
    }
