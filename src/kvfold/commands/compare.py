"""The command ``kvfold compare``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
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
    tables_aside,
    untested,
)
from kvfold.commands.terminal import (
    Checking,
    complete_method,
    json_target,
    load,
    model_options,
    progress_bar,
    publish,
    say,
    seed_option,
    show,
    wake,
)
from kvfold.errors import KVFoldError, OutputError
from kvfold.sheet import Column, Sheet, as_bytes

if TYPE_CHECKING:
    from kvfold.evaluation.compare import Comparison, Job
    from kvfold.evaluation.schema import Header, Row


@click.command(short_help="Compare methods on a text: quality, size, speed.")
@model_options
@click.option(
    "--methods",
    "specs",
    metavar="A B ...",
    multiple=True,
    shell_complete=complete_method,
    help="Methods to compare, one or more after the flag.  [default: fold, full precision, and KIVI at three sizes]",
)
@click.option("--all", "every", is_flag=True, help="Compare every method, at equal windows and as published.")
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
@prefix_option("Tokens prefilled before them; of several, each gives a row of every method.")
@chunk_option
@click.option(
    "--new-tokens",
    metavar="N",
    type=int,
    default=16,
    show_default=True,
    help="Tokens generated to measure the decode speed, at least 2.",
)
@click.option(
    "--pairs",
    metavar="N",
    type=int,
    default=8,
    show_default=True,
    help="Key-value pairs asked for after a list of them that fills the prefix, 0: none.",
)
@seed_option("Seed given to torch.")
@click.option("--json", "json_path", metavar="FILE", help=RESUME)
@force_option
def compare(
    model: str | None,
    dtype: str | None,
    device: str | None,
    specs: tuple[str, ...],
    every: bool,
    artefacts: str | None,
    text_path: str | None,
    tokens: int,
    prefixes: tuple[int, ...],
    chunk: int,
    new_tokens: int,
    pairs: int,
    seed: int,
    json_path: str | None,
    force: bool,
) -> None:
    """Read the same text under every method; print quality, size and speed.

    The first tokens are prefilled, the next ones scored through the folded cache, so that every score depends on it.
    KL divergence (kld, nats per token) and top-1 agreement compare with the same model and a full-precision cache.
    At every prefix the same tokens are scored.

    Then values of a list of random key-value pairs are asked for (pairs: how many are exact; pairs nll: nats per token of
    theirs). Exact retrieval may lose where divergence shows nothing.
    """
    wake()
    from kvfold import methods
    from kvfold.evaluation import compare as run
    from kvfold.evaluation import load_text
    from kvfold.evaluation.windows import encode

    if every and specs:
        raise click.UsageError("give one of --all and --methods")
    chosen = [methods.ready(spec) for spec in specs or (methods.DEFAULT if every else methods.FEW)]
    text = load_text(text_path)
    target = json_target(json_path)
    check_force(force, target)
    check_chunk(chunk)
    if pairs < 0:
        raise KVFoldError(f"pairs: {pairs}; give 0 or more")
    loaded, tokenizer, info = load(model, dtype, device)
    chosen += artefact_methods(artefacts, loaded)
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
                pairs=pairs,
                chunk=chunk,
                seed=seed,
                json_path=target,
                force=force,
                on_method=Checking(progress.bar),
                on_earlier=partial(say_earlier, target),
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
        if not specs and not every:
            say(
                f"{len(methods.FEW)} of {len(methods.DEFAULT)} methods; all of them: kvfold compare --all, or make demo ALL=1"
            )
        if target and not failure:
            click.echo(f"written: {target}")

    publish(result.to_dict(), json_path, target, table, written=True, failure=failure)


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
        try:
            self.bar.__exit__(kind, error, trace)
        finally:  # a second interrupt may come while the bar is taken down
            say_kept(kind, self.target)

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


def _compare_table(header: Header, rows: Sequence[Row]) -> Sheet:
    several = len(header.prefixes) > 1
    graphs = any(row.decode_path == "graph" for row in rows)
    asked = any(row.pairs for row in rows)
    columns = [Column("prefix", right=True, key=True)] if several else []
    columns += [
        Column("method", wraps=True, key=True),
        Column("bits", right=True),
        Column("cache", right=True, rank=1),
        Column("smaller", right=True, rank=4),
        Column("ppl", right=True, rank=2),
        Column("kld", right=True),
        Column("top-1", right=True),
        *([Column("pairs", right=True, rank=4), Column("pairs nll", right=True, rank=1)] if asked else []),
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
                *(_pairs(row) if asked else ()),
                f"{row.prefill_tokens_per_s:.0f}",
                f"{row.decode_tokens_per_s:.1f}",
                *([row.decode_path.partition(":")[0]] if graphs else []),
                f"{row.seconds:.1f}",
            )
            sheet.add(*([f"{prefix:,}" if not i else ""] if several else []), *cells)
        sheet.end_section()
    return sheet


def _pairs(row: Row) -> tuple[str, str]:
    """How many values were exact of those that were asked for, and what their tokens cost; dashes where nothing was tested."""
    if row.pairs_exact is None:
        return "-", "-"
    nll = "not finite" if row.pairs_nll is None else f"{row.pairs_nll:.3f}"
    return f"{round(row.pairs_exact * row.pairs)}/{row.pairs}", nll


def _full_pairs(rows: Sequence[Row]) -> str:
    """What full precision makes of the pairs: ``2/8, 0.550``, after each prefix where there are several."""
    several = len({row.prefix for row in rows}) > 1
    said = {}
    for row in rows:
        if row.pairs and row.full_pairs_exact is not None:
            nll = "not finite" if row.full_pairs_nll is None else f"{row.full_pairs_nll:.3f}"
            where = f" after {row.prefix:,}" if several else ""
            said[row.prefix] = f"{round(row.full_pairs_exact * row.pairs)}/{row.pairs}, {nll}{where}"
    return "; ".join(said.values())


def _compare_notes(header: Header, rows: Sequence[Row]) -> list[str]:
    from kvfold import methods

    bits = {"float32": 32}.get(header.dtype, 16)
    lines = [
        f"{header.model}, {header.dtype}, {header.device}, {header.threads} threads; text {header.text} "
        f"(sha256 {header.text_sha256[:12]}): {counts(header.prefixes)} tokens prefilled, {header.tokens} scored",
        "bits: per cached value of the packed part, everything included; cache: all of it, full-precision windows too",
        *tables_aside(rows),
        "kld, top-1: against the same model with a full-precision cache",
    ]
    if any(row.pairs for row in rows):
        lines.append(
            "pairs: values of random key-value pairs that are exact, of those asked for; pairs nll: nats per token of theirs; "
            f"full precision: {_full_pairs(rows)}"
        )
    if header.pairs and (none := sorted({row.prefix for row in rows if not row.pairs})):
        lines.append(f"pairs: none asked for after {counts(none)} tokens, which list none")
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
    return lines + untested(rows, [methods.get(name) for name in names], header.tokens)
