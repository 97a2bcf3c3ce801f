"""The commands ``kvfold compare`` and ``kvfold domains``; mounted by :mod:`kvfold.cli`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvfold.errors import KVFoldError, OutputError
from kvfold.sheet import Column, Sheet
from kvfold.terminal import (
    JSON_HELP,
    as_bytes,
    check_text,
    complete_method,
    json_target,
    load,
    model_options,
    progress_bar,
    publish,
    say,
    seed_option,
    show,
)

if TYPE_CHECKING:
    from kvfold.evaluation.compare import Comparison, Job
    from kvfold.evaluation.domains import DomainRow, Mean
    from kvfold.evaluation.schema import Header, Row

MORE = "a wider terminal, a pipe or --json has them"
MOST_WINDOWS = 10_000
"""Of a text: what a person may wait for."""
RESUME = JSON_HELP + " A killed run with a FILE goes on where it stopped."


@click.command(short_help="Compare methods on a text: quality, size, speed.")
@model_options
@click.option(
    "--methods",
    "specs",
    metavar="A B ...",
    multiple=True,
    shell_complete=complete_method,
    help="Methods to compare, one or more after the flag.  [default: one row of every method]",
)
@click.option(
    "--artefacts",
    metavar="DIR",
    help="Also compare the methods of all artefacts in DIR that were made for the model.",
)
@click.option(
    "--text", "text_path", metavar="FILE", help="UTF-8 text to read.  [default: the prose that ships with Python]"
)
@click.option(
    "--tokens", metavar="N", type=int, default=512, show_default=True, help="Tokens scored through the cache."
)
@click.option(
    "--prefix",
    "prefixes",
    metavar="N ...",
    type=int,
    multiple=True,
    default=[1024],
    show_default="1024",
    help="Tokens prefilled before them; of several, each gives a row of every method.",
)
@click.option("--chunk", metavar="N", type=int, default=32, show_default=True, help="Query tokens per scoring call.")
@click.option(
    "--new-tokens",
    metavar="N",
    type=int,
    default=16,
    show_default=True,
    help="Tokens generated to measure the decode speed, at least 2.",
)
@seed_option("Seed given to torch.")
@click.option("--json", "json_path", metavar="FILE", help=RESUME)
def compare(
    model: str | None,
    dtype: str | None,
    device: str | None,
    specs: tuple[str, ...],
    artefacts: str | None,
    text_path: str | None,
    tokens: int,
    prefixes: tuple[int, ...],
    chunk: int,
    new_tokens: int,
    seed: int,
    json_path: str | None,
) -> None:
    """Read the same text under every method; print quality, size and speed.

    The first tokens are prefilled, the next ones scored through the folded cache, so that every score depends on it.
    KL divergence (kld, nats per token) and top-1 agreement compare with the same model and a full-precision cache.
    At every prefix the same tokens are scored.
    """
    from kvfold import methods
    from kvfold.evaluation import compare as run
    from kvfold.evaluation import load_text
    from kvfold.evaluation.compare import encode

    chosen = [methods.get(spec) for spec in specs or methods.DEFAULT]
    text = load_text(text_path)
    target = json_target(json_path)
    _check_chunk(chunk)
    loaded, tokenizer, info = load(model, dtype, device)
    chosen += _artefact_methods(artefacts, loaded)
    encode(tokenizer, text, prefixes, tokens, new_tokens, info.max_context)
    progress = _CompareProgress(tokens, new_tokens, target)
    failure = None
    try:
        with progress:
            result = run(
                loaded,
                tokenizer,
                info,
                chosen,
                text,
                prefix=prefixes,
                tokens=tokens,
                new_tokens=new_tokens,
                chunk=chunk,
                seed=seed,
                json_path=target,
                on_start=progress.start,
                on_tokens=progress.tokens,
                on_row=progress.row,
            )
    except OutputError as error:
        result, failure = cast("Comparison", error.result), error

    def table() -> None:
        show(_compare_table(result.header, result.rows))
        for line in _compare_notes(result.header, result.rows):
            say(line)
        if target and not failure:
            click.echo(f"written: {target}")

    publish(result.to_dict(), json_path, target, table, written=True, failure=failure)


@click.command(short_help="Score methods on several kinds of text.")
@model_options
@click.option(
    "--methods",
    "specs",
    metavar="A B ...",
    multiple=True,
    shell_complete=complete_method,
    help="Methods to score.  [default: none, kivi at 1 and 2 bits]",
)
@click.option("--artefacts", metavar="DIR", help="Also score the methods of all artefacts in DIR made for the model.")
@click.option(
    "--text",
    "files",
    metavar="NAME=FILE",
    multiple=True,
    help="A further domain, or a text instead of a built-in one; UTF-8 or JSON lines. May be given again.",
)
@click.option(
    "--domains",
    "names",
    metavar="A B ...",
    multiple=True,
    default=["prose", "code", "retrieval"],
    show_default="prose code retrieval",
    help="Built-in ones; with --text and '' for none, only texts of your own.",
)
@click.option("--windows", metavar="N", type=int, default=3, show_default=True, help="Windows of each domain.")
@click.option(
    "--prefix",
    "prefixes",
    metavar="N ...",
    type=int,
    multiple=True,
    default=[1024],
    show_default="1024",
    help="Tokens prefilled in a window; of several, each gives rows of its own.",
)
@click.option("--tokens", metavar="N", type=int, default=256, show_default=True, help="Tokens scored after them.")
@click.option("--chunk", metavar="N", type=int, default=32, show_default=True, help="Query tokens per scoring call.")
@click.option("--json", "json_path", metavar="FILE", help=RESUME)
def domains(
    model: str | None,
    dtype: str | None,
    device: str | None,
    specs: tuple[str, ...],
    artefacts: str | None,
    files: tuple[str, ...],
    names: tuple[str, ...],
    windows: int,
    prefixes: tuple[int, ...],
    tokens: int,
    chunk: int,
    json_path: str | None,
) -> None:
    """Score methods on texts of several kinds: does what was learned on one hold on another?

    prose is CPython's documentation, code its library's source, retrieval random pairs that are listed once and then asked
    for (exact: answers that are right in full). KL divergence and top-1 agreement are means over the windows, against the
    same model with a full-precision cache. At every prefix the same tokens are scored, but for retrieval.
    """
    from kvfold import methods
    from kvfold.evaluation import domains as run
    from kvfold.evaluation.windows import as_prefixes, check_context, load_texts, make_windows

    given: dict[str, str] = {}
    for text in files:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise KVFoldError(f"text: {text!r} is not NAME=FILE, for example gsm8k=test.jsonl")
        check_text(name, "text: a domain's name")
        given[name] = path
    lengths = as_prefixes(prefixes)
    for value, what, least in ((windows, "windows", 1), (lengths[0], "prefix", 64), (tokens, "tokens", 32)):
        if value < least:
            raise KVFoldError(f"{what}: {value}; give at least {least}")
    if windows > MOST_WINDOWS:
        raise KVFoldError(f"windows: {windows}; give at most {MOST_WINDOWS}")
    _check_chunk(chunk)
    target = json_target(json_path)
    chosen = [methods.get(spec) for spec in specs or ("none", "kivi:bits=1", "kivi:bits=2")]
    texts = load_texts([name for part in names for name in part.split(",") if name], given)
    loaded, tokenizer, info = load(model, dtype, device)
    chosen += _artefact_methods(artefacts, loaded)
    check_context(lengths, tokens, 0, info.max_context)
    pieces = make_windows(tokenizer, texts, lengths, tokens, windows)
    failure = None
    try:
        with _DomainsProgress(target) as progress:
            header, rows = run.run(
                loaded,
                info,
                chosen,
                pieces,
                texts=texts,
                chunk=chunk,
                json_path=target,
                on_start=progress.start,
                on_row=progress.row,
            )
    except OutputError as error:
        (header, rows), failure = cast("tuple[Header, list[DomainRow]]", error.result), error

    def table() -> None:
        show(_domains_table(header, rows))
        say(
            f"{windows} windows a text, {_counts(header.prefixes)} tokens prefilled and {tokens} scored; {header.dtype}, "
            f"{header.device}; bits: without the tables that all sequences share"
        )
        for line in _untested(rows, chosen):
            say(line)
        if target and not failure:
            click.echo(f"written: {target}")

    publish(run.to_dict(header, rows), json_path, target, table, written=True, failure=failure)


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise KVFoldError(f"chunk: {chunk}; give at least 1")


def _artefact_methods(folder: str | None, model: Any) -> list[Any]:
    """Methods of the artefacts in a folder that fit the model, in the order of their files' names."""
    from kvfold import methods
    from kvfold.calibration.artefact import load as load_artefact

    if folder is None:
        return []
    path = Path(folder).expanduser()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise KVFoldError(f"artefacts: {folder} is not a folder with artefacts; make some with kvfold calibrate")
    chosen = []
    for file in files:
        found = load_artefact(str(file))
        try:
            found.check_model(model.config)
        except KVFoldError:
            click.echo(f"kvfold: {file.name} was made for {found.model}; left out", err=True)
            continue
        try:
            found.check_weights(model)
        except KVFoldError:
            spec = shlex.quote(_with_artefact(found.method, file))
            why = f"{found.model}, which has the same shape but other weights"
            click.echo(
                f"kvfold: {file.name} was made for {why}; left out (name it to use it: --methods {spec})", err=True
            )
            continue
        chosen.append(methods.get(_with_artefact(found.method, file)))
    return chosen


def _with_artefact(spec: str, file: Path) -> str:
    return f"{spec}{',' if ':' in spec else ':'}artefact={file}"


class _CompareProgress:
    """A bar over all tokens of all rows on a terminal; elsewhere a line per finished row."""

    def __init__(self, scored: int, new_tokens: int, target: Path | None) -> None:
        from rich.progress import TaskProgressColumn

        self.scored, self.new_tokens, self.target = scored, new_tokens, target
        self.bar = progress_bar(TaskProgressColumn())
        self.count = self.at = 0
        self.several = False

    def __enter__(self) -> _CompareProgress:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self.bar.__exit__(kind, error, trace)
        _say_kept(kind, self.target)

    def start(self, jobs: list[Job], done: dict[Job, Row]) -> None:
        self.count, self.at = len(jobs), len(done)
        self.several = len({prefix for _, prefix in jobs}) > 1
        if done:
            print(f"kvfold: {len(done)} of {len(jobs)} rows taken over from an earlier run", file=sys.stderr)
        todo = [job for job in jobs if job not in done]
        rows = sum(prefix + self.scored + self.new_tokens for _, prefix in todo)
        references = sum(prefix + self.scored for prefix in {prefix for _, prefix in todo})
        self.task = self.bar.add_task("", total=rows + references)

    def tokens(self, name: str, done: int) -> None:
        self.bar.update(self.task, advance=done, description=name)

    def row(self, row: Row) -> None:
        self.at += 1
        if self.bar.disable:
            where = f" after {row.prefix:,}" if self.several else ""
            print(
                f"kvfold: [{self.at}/{self.count}] {row.method}{where}: {row.seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )


def _say_kept(kind: type[BaseException] | None, target: Path | None) -> None:
    """After a failure, what the next run will take over."""
    from kvfold.evaluation.schema import Sidecar

    if kind is not None and target is not None and (kept := Sidecar.kept(target)):
        print(f"kvfold: {kept} rows are kept; the same command goes on from there", file=sys.stderr)


class _DomainsProgress:
    """A line per row on standard error, with its divergence."""

    def __init__(self, target: Path | None) -> None:
        self.target, self.kept = target, 0

    def __enter__(self) -> _DomainsProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        _say_kept(kind, self.target)

    def start(self, done: int, total: int) -> None:
        self.kept = done
        if done:
            print(f"kvfold: {done} of {total} rows taken over from an earlier run", file=sys.stderr)

    def row(self, row: DomainRow, done: int, total: int) -> None:
        self.kept = done
        kld = "nothing tested" if not row.tested else "not finite" if row.kld is None else f"KL {row.kld:z.4f}"
        where = f"{row.domain} {row.window} after {row.prefix:,}"
        print(
            f"kvfold: [{done}/{total}] {where}: {row.method}: {kld}, {row.seconds:.1f} s", file=sys.stderr, flush=True
        )


def _compare_table(header: Header, rows: Sequence[Row]) -> Sheet:
    several = len(header.prefixes) > 1
    graphs = any(row.decode_path == "graph" for row in rows)
    columns = [Column("prefix", right=True, key=True)] if several else []
    columns += [
        Column("method", wraps=True, key=True),
        Column("bits", right=True),
        Column("cache", right=True, rank=1),
        Column("smaller", right=True, rank=4),
        Column("ppl", right=True, rank=2),
        Column("kld", right=True),
        Column("top-1", right=True),
        Column("prefill tok/s", right=True, rank=5),
        Column("decode tok/s", right=True, rank=3),
        *([Column("by", right=True, rank=6)] if graphs else []),
        Column("s", right=True, rank=7),
    ]
    sheet = Sheet(columns, more=MORE)
    for prefix, group in groupby(rows, lambda row: row.prefix):
        for i, row in enumerate(group):
            quality = (
                "not finite" if row.ppl is None else f"{row.ppl:.3f}" if row.ppl < 1e4 else f"{row.ppl:.2e}",
                "not finite" if row.kld is None else f"{row.kld:z.4f}",
                "-" if row.top1 is None else f"{100 * row.top1:.1f}%",
            )
            cells = (
                row.method,
                "-" if row.effective_bits is None else f"{row.effective_bits:.2f}",
                as_bytes(row.cache_bytes),
                f"{row.full_cache_bytes / max(row.cache_bytes, 1):.2f}x",
                *(quality if row.tested else ("-", "not tested", "-")),
                f"{row.prefill_tokens_per_s:.0f}",
                f"{row.decode_tokens_per_s:.1f}",
                *([row.decode_path.partition(":")[0]] if graphs else []),
                f"{row.seconds:.1f}",
            )
            sheet.add(*([f"{prefix:,}" if not i else ""] if several else []), *cells)
        sheet.end_section()
    return sheet


def _compare_notes(header: Header, rows: Sequence[Row]) -> list[str]:
    from kvfold import methods

    bits = {"float32": 32}.get(header.dtype, 16)
    lines = [
        f"{header.model}, {header.dtype}, {header.device}, {header.threads} threads; text {header.text} "
        f"(sha256 {header.text_sha256[:12]}): {_counts(header.prefixes)} tokens prefilled, {header.tokens} scored",
        "bits: per cached value of the packed part, everything included; cache: all of it, full-precision windows too",
        "kld, top-1: against the same model with a full-precision cache",
    ]
    if bits == 32:
        lines.append(
            "smaller: than a float32 cache, as this model runs in float32 here; halve it to compare with 16 bits"
        )
    by_path: dict[str, list[str]] = {}
    for row in rows:
        by_path.setdefault(row.decode_path, [])
        if row.method not in by_path[row.decode_path]:
            by_path[row.decode_path].append(row.method)
    for path, found in by_path.items():
        who = "all" if len(by_path) == 1 else ", ".join(found)
        if path == "graph":
            lines.append(f"decoded in a CUDA graph: {who}")
        else:
            lines.append(f"decoded step by step: {who} ({path.partition(': ')[2]})")
    names = dict.fromkeys(row.method for row in rows)
    return lines + _untested(rows, [methods.get(name) for name in names], header.tokens)


def _untested(rows: Sequence[Row] | Sequence[DomainRow], chosen: Sequence[Any], tokens: int | None = None) -> list[str]:
    """Lines that say after which prefix which methods' scored tokens, none of them or not all, read anything packed."""
    methods = {str(method): method for method in chosen}
    found: dict[tuple[int, int, int, int, int], dict[str, int]] = {}
    for row in rows:
        count = tokens if tokens is not None else row.tokens  # type: ignore[union-attr]
        if row.tested is None or row.tested >= count:
            continue
        method = methods[row.method]
        alike = (row.prefix, count, row.tested, method.sink, method.recent)
        found.setdefault(alike, {})[row.method] = method.sink + method.recent + method.block
    lines = []
    for (prefix, count, tested, sink, recent), names in found.items():
        what = f"only {tested} of {count} scored tokens read anything packed"
        if not tested:
            what = "nothing was tested: no scored token read anything packed"
        whose = "its" if len(names) == 1 else "their"
        lines.append(
            f"{', '.join(names)} after {prefix:,} tokens: {what} ({whose} windows hold {sink} + {recent} tokens); "
            f"give --prefix {max(names.values())} or more"
        )
    return lines


def _domains_table(header: Header, rows: Sequence[DomainRow]) -> Sheet:
    from kvfold.evaluation.domains import means

    several = len(header.prefixes) > 1
    columns = [Column("prefix", right=True, key=True)] if several else []
    columns += [Column("method", wraps=True, key=True), Column("bits", right=True, rank=1)]
    columns += [Column(name, right=True, wraps=True) for name in dict.fromkeys(row.domain for row in rows)]
    sheet = Sheet(columns, f"{header.model}: KL divergence / top-1 agreement (exact answers)", MORE)
    for prefix in header.prefixes:
        here = [row for row in rows if row.prefix == prefix]
        bits = {row.method: row.bits_without_tables for row in here}
        untested = {(row.method, row.domain) for row in here if row.tested == 0}
        for i, (method, by_domain) in enumerate(means(here).items()):
            cells = ["not tested" if (method, d) in untested else _mean_cell(m) for d, m in by_domain.items()]
            shown = "-" if bits[method] is None else f"{bits[method]:.2f}"
            sheet.add(*([f"{prefix:,}" if not i else ""] if several else []), method, shown, *cells)
        sheet.end_section()
    return sheet


def _mean_cell(mean: Mean) -> str:
    kld = "not finite" if mean.kld is None else f"{mean.kld:z.3f}"
    top1 = "-" if mean.top1 is None else f"{100 * mean.top1:.0f}%"
    return f"{kld} / {top1}" + ("" if mean.exact is None else f" ({100 * mean.exact:.0f}%)")


def _counts(values: Sequence[int]) -> str:
    """``1,024, 4,096 and 16,384``."""
    shown = [f"{value:,}" for value in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
