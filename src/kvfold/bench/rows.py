"""What every measured row records, and how rows are appended to a file."""

import argparse
import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from kvfold import files
from kvfold.errors import KVFoldError, OutputError


@dataclass(frozen=True)
class Row:
    """One measurement of one kernel at one shape.

    Attributes
    ----------
    work : str
        What was measured.
    batch, num_heads, num_kv_heads, head_dim, query_tokens, context, dtype
        The shape; ``context`` counts all cached tokens of a sequence.
    kernel : str
    error, limit : float
        Relative RMS error against float32 attention over the decoded cache, and the most that is allowed.
    p20_ms, p50_ms, p80_ms : float or None
        None where the error is over the limit.
    gb_per_s : float or None
        Packed bytes read per second at the median.
    floor_percent : float or None
        Time to read the packed bytes at 4.35 TB/s, over the median.
    effective_bits : float
        Packed bytes over elements.
    baseline : str
        The fastest full-precision kernel of the same run.
    baseline_ms, ratio : float or None
        Its median, and how many times as long that is.
    gpu, driver, torch, triton, commit : str
    """

    work: str
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_tokens: int
    context: int
    dtype: str
    kernel: str
    error: float
    limit: float
    p20_ms: float | None
    p50_ms: float | None
    p80_ms: float | None
    gb_per_s: float | None
    floor_percent: float | None
    effective_bits: float
    baseline: str
    baseline_ms: float | None
    ratio: float | None
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str


def environment() -> dict[str, str]:
    """GPU, driver, versions and commit of this run."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this code; "unknown" where it is not in a repository."""
    return _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")


def _output(*command: str) -> str:
    """A program's first line; "unknown" where it has none."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip().splitlines()[0] if found.stdout.strip() else "unknown"


def options(name: str, text: str | None, rows: Path) -> argparse.ArgumentParser:
    """The parser of a benchmark's command line, with what all have: ``--json`` and ``--rows``."""
    parser = argparse.ArgumentParser(prog=f"kvfold bench {name}", description=(text or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of the table")
    parser.add_argument("--rows", action=RowsFile, metavar="FILE", help=f"CSV file to append rows to, such as {rows}")
    return parser


def script(main: Callable[[], int]) -> int:
    """Run a benchmark as a program: wrong input gives one line and status 2."""
    try:
        return main()
    except KVFoldError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, OutputError) else 2


def progress(text: str) -> None:
    """Say on standard error what is being done."""
    print(f"kvfold: {text}", file=sys.stderr, flush=True)


def need_gpu(benchmark: str) -> torch.device:
    """The CUDA device that a benchmark runs on.

    Raises
    ------
    KVFoldError
        Without one.
    """
    if not torch.cuda.is_available():
        raise KVFoldError(f"bench {benchmark}: device=cpu is not measured; a CUDA GPU is needed")
    return torch.device("cuda")


class RowsFile(argparse.Action):
    """A file to append to: refused before anything is measured where that cannot be."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        path = files.expanded(str(values))
        if path.name and not path.parent.exists():  # made when there are rows
            files.check(next(p for p in path.parents if p.exists()) / path.name, "rows")
        else:
            files.check(path, "rows")
        setattr(namespace, self.dest, path)


def append(path: Path, rows: Sequence[Any]) -> None:
    """Append rows, dataclasses of one kind, to a CSV file; its header is written when the file is new.

    Raises
    ------
    KVFoldError
        If the file's header names other columns: its rows and these would be mixed up.
    OutputError
        If it cannot be written; it is then as it was, and the message has the rows.
    """
    if not rows:
        return
    names = [f.name for f in fields(rows[0])]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    for row in rows:
        writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
    lines, head = text.getvalue(), ",".join(names) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if files.is_stream(path):
            new = path not in _begun
            _begun.add(path)
        else:
            found = _columns(path)
            new = not found
            if found and found != names:
                raise KVFoldError(f"rows: {path} has other columns than this benchmark; allowed: {', '.join(names)}")
        files.append(path, (head if new else "") + lines)
    except OSError as error:
        why = f"rows: cannot write {path}: {error.strerror or error}"
        raise OutputError(f"{why}; not in it: {' '.join(lines.splitlines())}", list(rows)) from error


_begun: set[Path] = set()
"""Devices and pipes that have their header."""


def _columns(path: Path) -> list[str]:
    """What a CSV file's header names; nothing where the file is empty or not there."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])
    except FileNotFoundError:
        return []
    except (ValueError, csv.Error) as error:
        raise KVFoldError(f"rows: {path} is not a CSV file ({error})") from None


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, as they stand there.

    Raises
    ------
    KVFoldError
        If there is no such file, or it is not one.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise KVFoldError(f"rows: cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise KVFoldError(f"rows: {path} is not a CSV file ({error})") from None


def show(row: Any, text: str, as_json: bool) -> None:
    """Print a row: one JSON object, or its line for people."""
    print(json.dumps(asdict(row)) if as_json else text, flush=True)


def latest(rows: Iterable[Mapping[str, str]], *columns: str) -> list[Mapping[str, str]]:
    """Of rows that are equal in ``columns`` the last one, where the first stood."""
    return list({tuple(row[name] for name in columns): row for row in rows}.values())


def of_last_commit(rows: Sequence[Mapping[str, str]], *columns: str) -> list[Mapping[str, str]]:
    """Rows of the last commit that has any with their ``columns``: those of several runs are not to be mixed."""
    last = {tuple(row[name] for name in columns): row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == last[tuple(row[name] for name in columns)]]
