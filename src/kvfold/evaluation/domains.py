"""Quality on texts of several kinds and at several prefixes: does what a method learned, or assumes, hold elsewhere?

CommVQ's Table 6 asks it of codebooks learned on one kind of text. Here every method answers, on windows spread over each
text, token by token against the full-precision cache; key-value retrieval also counts exact answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from kvfold.errors import KVFoldError
from kvfold.evaluation import loop
from kvfold.evaluation.beside import Beside
from kvfold.evaluation.checked import OnMethod, checked
from kvfold.evaluation.earlier import Earlier
from kvfold.evaluation.machine import make_header
from kvfold.evaluation.perplexity import CHUNK, perplexity_of
from kvfold.evaluation.results import Result, made_of
from kvfold.evaluation.schema import Header, Sidecar, read_row, write_json
from kvfold.evaluation.suites.domains import Domains
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import Window
from kvfold.models import ModelInfo

if TYPE_CHECKING:
    from kvfold.methods.base import Method


@dataclasses.dataclass(frozen=True)
class DomainRow:
    """One method on one window at one prefix. Numbers that are not finite, or do not apply, are None.

    Attributes
    ----------
    method, domain, window
        What was run on what.
    prefix, tokens
        Tokens prefilled, as asked for, and scored.
    bits_without_tables, effective_bits
        Bits per cached element of the packed part, without and with the tables that all sequences share.
    ppl, kld, top1
        As in :class:`~kvfold.evaluation.schema.Row`; None where nothing was tested.
    exact
        Share of a retrieval window's answers whose tokens were all the model's first choice, 0 to 1.
    seconds
        Wall-clock time, without what is compiled; as in :class:`~kvfold.evaluation.results.Result`.
    prefilled
        Tokens that were prefilled: a retrieval window's pairs may not fill its prefix. None in files of before it was recorded.
    tested
        Scored tokens that read packed keys and values; None in files of before they were counted.
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
    prefilled: int | None = None
    tested: int | None = None

    @property
    def key(self) -> str:
        """Identifies the row within a run."""
        return f"{self.method}|{self.domain}|{self.window}|{self.prefix}"


def _key(method: str, window: Window) -> str:
    return f"{method}|{window.domain}|{window.index}|{window.prefix}"


def run(
    model: PreTrainedModel,
    info: ModelInfo,
    methods: Sequence[str | Method],
    windows: Sequence[Window],
    *,
    texts: dict[str, Text | None] | None = None,
    chunk: int = CHUNK,
    seed: int = 0,
    json_path: Path | None = None,
    force: bool = False,
    on_method: OnMethod | None = None,
    on_earlier: Callable[[int, int], None] | None = None,
    on_start: Callable[[int, int], None] | None = None,
    on_row: Callable[[DomainRow, int, int], None] | None = None,
) -> tuple[Header, list[DomainRow]]:
    """Score every window under every method.

    Full-precision logits are computed once per window and held while the methods run on it.

    Parameters
    ----------
    methods
        Method strings or objects.
    windows
        As :func:`~kvfold.evaluation.windows.make_windows` makes them.
    texts
        What they were made of; their hashes are written down.
    chunk
        Query tokens per scoring call.
    json_path
        Where the result goes, in one step at the end; a killed run with the same arguments goes on where it stopped.
        Other rows of the same settings that the file holds stay in it.
    force
        Replace the file, and rows beside it, whatever they are of.
    on_method
        For progress; see :func:`~kvfold.evaluation.checked.checked`.
    on_earlier
        Called with how many rows of the file stay and how many are made anew, where it holds any.
    on_start
        Called with the number of rows taken over from a killed run, and of all.
    on_row
        Called after every new row with the row, how many there are and how many there will be.

    Raises
    ------
    KVFoldError
        A method does not fit the model, or `json_path` holds rows of other settings. All are tried before the first is run.
    OutputError
        The result cannot be written; it carries header and rows, and the rows stay beside the file.
    """
    from kvfold import methods as registry

    if not methods:
        raise KVFoldError(f"methods: none given; known: {', '.join(registry.REGISTRY)}")
    specs = checked(model, methods, on_method)
    digest = hashlib.sha256()
    for window in windows:
        digest.update(f"{window.domain}|{window.index}|{window.prefix}|".encode() + window.ids.numpy().tobytes())
    header = make_header(
        model,
        info,
        text=", ".join(dict.fromkeys(w.domain for w in windows)),
        text_sha256=digest.hexdigest(),
        texts={f"{name}: {text.name}": text.sha256 for name, text in (texts or {}).items() if text is not None},
        prefixes=sorted({w.prefix for w in windows}),
        tokens=max(w.ids.shape[1] - w.prefilled - 1 for w in windows),
        chunk=chunk,
        new_tokens=0,
        seed=seed,
    )
    sidecar = Sidecar.of(json_path, DomainRow)
    origins = made_of(model, specs.values()) if sidecar else {}
    wanted = [_key(name, window) for window in windows for name in specs]
    asked = set(wanted)
    earlier = Earlier.of(json_path, DomainRow, header, origins, asked, force)
    earlier.tell(on_earlier)
    kept = sidecar.start(header, origins, force) if sidecar else {}
    done = {key: row for key, row in kept.items() if key in asked}
    if on_start is not None:
        on_start(len(done), len(wanted))
    suite = Domains(None, texts or {}, header.tokens)
    items = suite.hold(windows, seed=seed)
    window_of = {item.name: window for item, window in zip(items, windows, strict=True)}

    def read(result: Result) -> DomainRow:
        return row_of(result, window_of[result.item])

    keeper = Beside(sidecar, done, lambda method, item: _key(method, window_of[item]), read)
    for result in loop.rows(model, None, suite, items, loop.Plan(specs, [(suite, items)], None, chunk), keeper):
        if on_row is not None:
            on_row(done[_key(result.method, window_of[result.item])], len(done), len(wanted))
    rows = [done[key] for key in wanted]
    if json_path is not None:
        whole = earlier.joined(rows, [row for key, row in kept.items() if key not in asked], origins)
        write_json(json_path, to_dict(header, *whole), (header, rows))
    if sidecar is not None:
        sidecar.remove()
    return header, rows


def row_of(result: Result, window: Window) -> DomainRow:
    """A row of the suite ``domains`` in this command's schema."""
    return DomainRow(
        method=result.method,
        domain=window.domain,
        window=window.index,
        prefix=window.prefix,
        tokens=result.read,
        bits_without_tables=result.bits_without_tables,
        effective_bits=result.effective_bits,
        ppl=perplexity_of(result.scores["nll"]),
        kld=result.scores["kld"],
        top1=result.scores["top1"],
        exact=result.scores.get("exact"),
        seconds=result.seconds,
        prefilled=result.prefilled,
        tested=result.tested,
    )


def to_dict(header: Header, rows: Sequence[DomainRow], made_of: dict[str, Any] | None = None) -> dict[str, Any]:
    """Header and rows for JSON; with hashes of weights and artefacts, where they are known."""
    held = {"header": dataclasses.asdict(header), "rows": [dataclasses.asdict(row) for row in rows]}
    return held | ({"made_of": made_of} if made_of else {})


def read_rows(result: dict[str, Any]) -> list[DomainRow]:
    """Rows of a file that :func:`run` wrote, also of before there were several prefixes."""
    rows = [read_row(DomainRow, row) for row in result["rows"]]
    old = result["header"].get("prefix")
    # Then a retrieval row's prefix was what its pairs filled.
    return rows if old is None else [dataclasses.replace(r, prefix=old, prefilled=r.prefix) for r in rows]


@dataclasses.dataclass(frozen=True)
class Mean:
    """A method's means over a domain's windows; ``lowest`` and ``highest`` are of the KL divergence.

    None: a window's number is missing, not finite, or nothing was tested.
    """

    kld: float | None
    lowest: float | None
    highest: float | None
    top1: float | None
    exact: float | None


def means(rows: Sequence[DomainRow]) -> dict[str, dict[str, Mean]]:
    """By method, then by domain, in the order of the rows; of rows at one prefix."""
    table: dict[str, dict[str, list[DomainRow]]] = {}
    for row in rows:
        table.setdefault(row.method, {}).setdefault(row.domain, []).append(row)
    return {
        method: {
            domain: Mean(
                _mean([r.kld for r in found]),
                min((r.kld for r in found if r.kld is not None), default=None),
                max((r.kld for r in found if r.kld is not None), default=None),
                _mean([r.top1 for r in found]),
                _mean([r.exact for r in found]),
            )
            for domain, found in domains.items()
        }
        for method, domains in table.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None
