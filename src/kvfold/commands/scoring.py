"""What the commands that score methods on texts share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvfold.commands.terminal import JSON_HELP
from kvfold.errors import KVFoldError
from kvfold.files import expanded

if TYPE_CHECKING:
    from kvfold.evaluation.domains import DomainRow
    from kvfold.evaluation.schema import Row
    from kvfold.evaluation.summary import Cell

MORE = "a wider terminal, a pipe or --json has them"
RESUME = (
    JSON_HELP
    + " A killed run with a FILE goes on where it stopped. Rows of the same settings stay in it; a FILE of others is refused."
)
force_option = click.option("--force", is_flag=True, help="Replace --json's FILE, whatever it holds.")


chunk_option = click.option(
    "--chunk", metavar="N", type=int, default=32, show_default=True, help="Query tokens per scoring call."
)


def prefix_option(text: str) -> Any:
    """Add ``--prefix``, several tokens."""
    return click.option(
        "--prefix",
        "prefixes",
        metavar="N ...",
        type=int,
        multiple=True,
        default=[1024],
        show_default="1024",
        help=text,
    )


def check_force(force: bool, target: Path | None) -> None:
    """Refuse to replace nothing."""
    if force and target is None:
        raise KVFoldError("force: there is no file to replace; give --json FILE, or leave it out")


def check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise KVFoldError(f"chunk: {chunk}; give at least 1")


def artefact_methods(folder: str | None, model: Any) -> list[Any]:
    """Methods of the artefacts in a folder that fit the model, in the order of their files' names."""
    from kvfold import methods
    from kvfold.artefact import load as load_artefact

    if folder is None:
        return []
    path = expanded(folder)
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
            spec = shlex.quote(with_artefact(found.method, file))
            why = f"{found.model}, which has the same shape but other weights"
            click.echo(
                f"kvfold: {file.name} was made for {why}; left out (name it to use it: --methods {spec})", err=True
            )
            continue
        chosen.append(methods.get(with_artefact(found.method, file)))
    return chosen


def with_artefact(spec: str, file: Path) -> str:
    return f"{spec}{',' if ':' in spec else ':'}artefact={file}"


def say_earlier(target: Path | None, stay: int, anew: int) -> None:
    """What becomes of the rows that a result's file holds."""
    from kvfold.evaluation.schema import number

    said = [f"{number(stay)} of other methods kept"] if stay else []
    said += [f"{number(anew)} measured anew"] if anew else []
    print(f"kvfold: {target} has rows of the same settings: {', '.join(said)}", file=sys.stderr)


def say_kept(kind: type[BaseException] | None, target: Path | None) -> None:
    """After a failure, what the next run will take over."""
    from kvfold.evaluation.schema import Sidecar

    if kind is not None and target is not None and (kept := Sidecar.kept(target)):
        print(f"kvfold: {kept} rows are kept; the same command goes on from there", file=sys.stderr)


WEIGHTY = 1.1
"""Times the bits without tables from which on bits with them are explained."""


def tables_aside(rows: Sequence[Row] | Sequence[Cell]) -> list[str]:
    """A line that says which methods' bits are shared tables for the most part, and what they are without."""
    found: dict[str, list[float]] = {}
    for row in rows:
        bits, counted = row.bits_without_tables, row.effective_bits
        if bits is not None and counted is not None and counted >= WEIGHTY * bits:
            found.setdefault(row.method, []).append(bits)
    if not found:
        return []
    said = ", ".join(f"{method} {sum(bits) / len(bits):.2f}" for method, bits in found.items())
    return [
        f"bits count tables that all sequences share, which weigh most where few tokens are packed; without them: {said}"
    ]


def untested(rows: Sequence[Row] | Sequence[DomainRow], chosen: Sequence[Any], tokens: int | None = None) -> list[str]:
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


def counts(values: Sequence[int]) -> str:
    """``1,024, 4,096 and 16,384``."""
    shown = [f"{value:,}" for value in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
