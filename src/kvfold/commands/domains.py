"""The command ``kvfold domains``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvfold.commands.scoring import (
    MORE,
    RESUME,
    artefact_methods,
    check_chunk,
    check_force,
    chunk_option,
    counts,
    force_option,
    prefix_option,
    say_earlier,
    say_kept,
    untested,
)
from kvfold.commands.terminal import (
    Checking,
    as_text,
    complete_method,
    json_target,
    load,
    model_options,
    publish,
    say,
    show,
)
from kvfold.errors import KVFoldError, OutputError
from kvfold.sheet import Column, Sheet

if TYPE_CHECKING:
    from kvfold.evaluation.domains import DomainRow, Mean
    from kvfold.evaluation.schema import Header


MOST_WINDOWS = 10_000
"""Of a text: what a person may wait for."""


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
@prefix_option("Tokens prefilled in a window; of several, each gives rows of its own.")
@click.option("--tokens", metavar="N", type=int, default=256, show_default=True, help="Tokens scored after them.")
@chunk_option
@click.option("--json", "json_path", metavar="FILE", help=RESUME)
@force_option
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
    force: bool,
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
        given[as_text(name, "text: a domain's name")] = path
    lengths = as_prefixes(prefixes)
    for value, what, least in ((windows, "windows", 1), (lengths[0], "prefix", 64), (tokens, "tokens", 32)):
        if value < least:
            raise KVFoldError(f"{what}: {value}; give at least {least}")
    if windows > MOST_WINDOWS:
        raise KVFoldError(f"windows: {windows}; give at most {MOST_WINDOWS}")
    check_chunk(chunk)
    target = json_target(json_path)
    check_force(force, target)
    chosen = [methods.ready(spec) for spec in specs or ("none", "kivi:bits=1", "kivi:bits=2")]
    texts = load_texts([name for part in names for name in part.split(",") if name], given)
    loaded, tokenizer, info = load(model, dtype, device)
    chosen += artefact_methods(artefacts, loaded)
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
                force=force,
                on_method=Checking(),
                on_earlier=partial(say_earlier, target),
                on_start=progress.start,
                on_row=progress.row,
            )
    except OutputError as error:
        (header, rows), failure = cast("tuple[Header, list[DomainRow]]", error.result), error

    def table() -> None:
        show(_domains_table(header, rows))
        say(
            f"{windows} windows a text, {counts(header.prefixes)} tokens prefilled and {tokens} scored; {header.dtype}, "
            f"{header.device}; bits: without the tables that all sequences share"
        )
        for line in untested(rows, chosen):
            say(line)
        if target and not failure:
            click.echo(f"written: {target}")

    publish(run.to_dict(header, rows), json_path, target, table, written=True, failure=failure)


class _DomainsProgress:
    """A line per row on standard error, with its divergence."""

    def __init__(self, target: Path | None) -> None:
        self.target, self.kept = target, 0

    def __enter__(self) -> _DomainsProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        say_kept(kind, self.target)

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
