"""Files of rows, as a report reads them; those of ``compare`` and ``domains`` are turned into rows of ``eval``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvfold.errors import KVFoldError
from kvfold.evaluation.domains import DomainRow, read_rows
from kvfold.evaluation.results import PACKED, SUFFIX, Result, ResultFile, Settings, content
from kvfold.evaluation.schema import Row, read_row


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows that have everything alike but the method and the item.

    Attributes
    ----------
    name
        Of its file, from the folder that was given.
    command
        ``eval``, ``compare`` or ``domains``.
    sha256
        Of the file, unpacked.
    found
        Its rows. Those of ``compare`` and ``domains`` say nothing of windows and of the weights' hash.
    """

    name: str
    command: str
    sha256: str
    found: ResultFile


@dataclasses.dataclass(frozen=True)
class Layers:
    """What ``kvfold recommend --json`` measured of a model's layers.

    Attributes
    ----------
    name, sha256
        As of :class:`Source`.
    held
        The file's object.
    """

    name: str
    sha256: str
    held: dict[str, Any]


LAYERS = (
    "alone",
    "together",
    "proposal",
    "uniform",
    "probe_bits",
    "model",
    "dtype",
    "length",
    "tokens",
)
"""What such a file has at least."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """All that was found, and the names of files that hold no rows of an evaluation."""

    sources: list[Source]
    layers: list[Layers]
    others: list[str]


def read(paths: Sequence[Path]) -> Sources:
    """Read files and, to any depth, folders.

    Raises
    ------
    KVFoldError
        There is no such file or folder, one cannot be read, a file that was named has no rows of an evaluation, or none has.
    """
    sources: list[Source] = []
    layers: list[Layers] = []
    others: list[str] = []
    for given in paths:
        if not given.exists():
            raise KVFoldError(f"results: there is no {given}; give a folder that kvfold eval wrote, or a file of it")
        for path in _files(given) if given.is_dir() else [given]:
            name = path.relative_to(given).as_posix() if given.is_dir() else path.name
            source = _source(path, name)
            if isinstance(source, Layers):
                layers.append(source)
            elif source is not None:
                sources.append(source)
            elif given.is_dir():
                others.append(name)
            else:
                raise KVFoldError(f"results: {path} has no rows of kvfold eval, compare or domains")
    if not sources and not layers:
        raise KVFoldError(
            f"results: no rows of kvfold eval, compare or domains in {', '.join(map(str, paths))}; make some with "
            "kvfold eval --out"
        )
    order = ("eval", "compare", "domains")
    together = _together(sources)
    rows = Counter[str]()
    for source in together:
        rows[source.found.settings.model] += len(source.found.rows)

    def place(source: Source) -> tuple[int, int, str, int, str]:
        """Commands apart; models and then files with the most rows first."""
        model = source.found.settings.model
        return order.index(source.command), -rows[model], model, -len(source.found.rows), source.name

    return Sources(
        sorted(together, key=place),
        layers,
        others,
    )


def _together(sources: Sequence[Source]) -> list[Source]:
    """Files of ``eval`` with the same settings as one: parts of a suite that several processes ran."""
    found: dict[str, list[Source]] = {}
    for source in sources:
        alike = source.found.settings.digest if source.command == "eval" else f"{source.command} {len(found)}"
        found.setdefault(alike, []).append(source)
    return [group[0] if len(group) == 1 else _joined(group) for group in found.values()]


def _joined(group: Sequence[Source]) -> Source:
    digest = hashlib.sha256("".join(source.sha256 for source in group).encode()).hexdigest()
    names = ", ".join(dict.fromkeys(source.name for source in group))
    return Source(names, "eval", digest, ResultFile.joined([source.found for source in group]))


def _files(folder: Path) -> Iterable[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root) / name for name in sorted(names) if not name.startswith("."))


def _source(path: Path, name: str) -> Source | Layers | None:
    """What a file holds; None where that is something else."""
    lines = content(path)
    digest = hashlib.sha256(lines).hexdigest()
    if path.name.removesuffix(PACKED).endswith(SUFFIX):
        first = lines[: lines.find(b"\n") + 1]
        return Source(name, "eval", digest, ResultFile.read(path)) if b'"settings"' in first else None
    try:
        held = json.loads(lines)
    except ValueError:
        return None
    if isinstance(held, dict) and all(key in held for key in LAYERS):
        return Layers(name, digest, held)
    if not isinstance(held, dict) or not isinstance(held.get("header"), dict) or not held.get("rows"):
        return None
    try:
        command = "domains" if "domain" in held["rows"][0] else "compare"
        return Source(name, command, digest, (_domains if command == "domains" else _compare)(path, held))
    except (KVFoldError, KeyError, TypeError):
        return None  # a table of something else


def _settings(header: dict[str, Any], suite: str) -> Settings:
    """The settings of ``compare`` and ``domains``, as far as they are written down."""
    return Settings(
        suite=suite,
        options={"tokens": header["tokens"], "seed": header["seed"]},
        texts=header.get("texts") or {header["text"]: header["text_sha256"]},
        model=header["model"],
        parameters=header["parameters"],
        weights_sha256="",
        dtype=header["dtype"],
        device=header["device"],
        windows=None,
        chunk=header["chunk"],
        versions=header["versions"],
    )


def _filled(path: Path, header: dict[str, Any], suite: str, rows: Iterable[Result]) -> ResultFile:
    found = ResultFile(path, _settings(header, suite))
    found.rows = {row.key: row for row in rows}
    found.runs = [{"run": 0, "date": header["date"], "threads": header["threads"]}]
    return found


def _compare(path: Path, held: dict[str, Any]) -> ResultFile:
    header = held["header"]
    task = Path(header["text"]).stem

    def result(row: Row) -> Result:
        return Result(
            method=row.method,
            item=f"{task}/{row.prefix}",
            task=task,
            length=row.prefix,
            prompt_sha256=str(row.prefix),
            prefilled=row.prefix,
            read=header["tokens"],
            tested=row.tested,
            scores=_scores(row) | _pairs(row),
            cache_bytes=row.cache_bytes,
            full_cache_bytes=row.full_cache_bytes,
            decode_tokens_per_s=row.decode_tokens_per_s,
            decode_path=row.decode_path,
            **_common(row),
        )

    return _filled(path, header, "compare", (result(read_row(Row, row)) for row in held["rows"]))


def _domains(path: Path, held: dict[str, Any]) -> ResultFile:
    def result(row: DomainRow) -> Result:
        return Result(
            item=f"{row.domain}/{row.prefix}/{row.window}",
            task=row.domain,
            length=row.prefix,
            method=row.method,
            prompt_sha256=f"{row.prefix}|{row.window}",
            prefilled=row.prefix if row.prefilled is None else row.prefilled,
            read=row.tokens,
            tested=row.tokens if row.tested is None else row.tested,
            scores=_scores(row),
            cache_bytes=None,
            full_cache_bytes=None,
            **_common(row),
        )

    return _filled(path, held["header"], "divergence", map(result, read_rows(held)))


def _scores(row: Row | DomainRow) -> dict[str, float | None]:
    return {"kld": row.kld, "top1": row.top1, "nll": None if row.ppl is None else math.log(row.ppl)}


def _pairs(row: Row) -> dict[str, float | None]:
    """Retrieval, where it was asked for and tested."""
    return {"pairs_exact": row.pairs_exact, "pairs_nll": row.pairs_nll} if row.pairs_exact is not None else {}


def _common(row: Row | DomainRow) -> dict[str, Any]:
    return {
        "seed": 0,
        "tags": {},
        "series": {},
        "bits_without_tables": row.bits_without_tables,
        "effective_bits": row.effective_bits,
        "sink": None,
        "recent": None,
        "seconds": row.seconds,
        "run": 0,
    }
