"""Take the rows of docs/performance.md and docs/profile.md: every benchmark with the arguments they were taken with.

Benchmarks run one after the other, each as a process of its own that compares before it times and appends its rows as it
measures them. What ended well is noted with commit and seconds in the folder of the rows; the same command goes on behind it.
The benchmark that a limit ends keeps its rows and begins anew: tables take the latest of equal rows.
"""

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfold import files
from kvfold.bench.rows import append, commit, need_gpu, progress, read, script
from kvfold.errors import KVFoldError

ROWS = Path("benchmarks/rows")
STOPPED = 124
"""Status of a benchmark that its limit ended, as of coreutils' ``timeout``."""


@dataclass(frozen=True)
class Task:
    """One command.

    Attributes
    ----------
    bench : str
        Its module here, and the file of its rows.
    arguments : str
        As typed, without ``--rows``.
    seconds : int
        What it may take: a guess, which counts until the command ended once beside these rows.
    tables : tuple of str
        Tables of the docs that are drawn from its rows, as ``scripts/tables.py`` names them.
    """

    bench: str
    arguments: str
    seconds: int
    tables: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.bench} {self.arguments}".strip()

    def command(self, rows: Path) -> list[str]:
        """Arguments of ``kvfold bench``."""
        return [self.bench, *shlex.split(self.arguments), "--rows", str(rows / f"{self.bench}.csv")]


@dataclass(frozen=True)
class Done:
    """A task that ended with status 0."""

    task: str
    seconds: float
    gpu: str
    commit: str


MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-2-13b")
LLAMA = "--batch 1 --context 131072 --methods"
TASKS = (
    Task("attention", "--calls decode", 180, ("attention",)),
    Task("attention", "--calls decode --dtype bfloat16", 180, ("attention",)),
    Task("attention", "--calls long", 120, ("long calls",)),
    Task("attention", "--calls plain", 30, ("plain order",)),
    Task("attention", "--calls readers", 240, ("fragments", "readers")),
    Task("decode", f"{LLAMA} fold turboquant qjl innerq turboquant:bits=3 zipcache kvarn", 120, ("decode",)),
    Task(
        "decode",
        f"{LLAMA} fold:bits=2 kivi none innerq:mode=asym innerq:paper=true innerq:paper=true,mode=asym squat gear",
        130,
        ("decode",),
    ),
    Task("decode", f"{LLAMA} fold:codebook=true fold:bits=2,codebook=true", 60, ("decode",)),
    Task(
        "decode",
        "--batch 1 --context 32768 --methods fold fold:bits=2 kivi turboquant qjl innerq gear zipcache squat",
        120,
        ("decode",),
    ),
    Task(
        "decode",
        "--batch 16 --context 32768 --methods fold fold:bits=2 kivi innerq innerq:mode=asym qjl turboquant",
        150,
        ("decode",),
    ),
    Task(
        "decode", "--model llama-2-7b --batch 16 --context 4096 --methods fold kivi innerq:mode=asym", 120, ("decode",)
    ),
    *(Task("generate", f"--prompts {n}", 120, ("generate",)) for n in (128, 8192, 30000)),
    Task("generate", "--batch 8 --prompts 30000", 150, ("generate",)),
    Task("prefill", "", 180, ("prefill",)),
    Task("encode", "", 120, ("encode",)),
    *(Task("modes", f"--models {m}", 60, ("modes",)) for m in MODELS),
    *(Task("matvec", f"--models {m}", 90, ("products", "layouts")) for m in MODELS),
    Task("memory", "", 300, ("memory", "memory gains")),
    Task(
        "memory",
        "--caches bf16 kivi:recent=32 kivi:recent=0 --batches 128 240 --step 32",
        240,
        ("memory", "memory gains"),
    ),
    Task(
        "memory",
        "--caches bf16 kivi:recent=32 --prompt 1792 --output 256 --batches 16 32 --chunk 8",
        240,
        ("memory", "memory gains"),
    ),
    Task(
        "memory",
        "--caches bf16 transformers fold:bits=2,sink=0,recent=0 --batches 128 240 --step 32",
        240,
        ("memory", "memory gains"),
    ),
    Task("profile", "--layers 8", 90, ("profile",)),
)
"""``serve`` is not among them: it needs vLLM. ``cpu`` needs no GPU, but an idle machine."""


def noted(rows: Path) -> list[Done]:
    """What ended well beside these rows, of every lane, oldest first."""
    found = []
    for path in sorted(rows.glob("done-*.csv")):
        try:
            found += [Done(r["task"], float(r["seconds"]), r["gpu"], r["commit"]) for r in read(path)]
        except (KeyError, TypeError, ValueError):
            raise KVFoldError(f"bench all: {path} does not list tasks, seconds, GPUs and commits; delete it") from None
    return found


def estimates(done: Iterable[Done], tasks: Sequence[Task] = TASKS) -> dict[str, tuple[float, bool]]:
    """Seconds of each task by its name, and whether these were measured."""
    took = {d.task: d.seconds for d in done}
    return {t.name: (took.get(t.name, t.seconds), t.name in took) for t in tasks}


def lanes(count: int, tasks: Sequence[Task] = TASKS) -> list[list[Task]]:
    """Tasks of ``count`` processes beside each other, about equally long by their guesses; one file has one lane.

    Guesses, not what was measured: lanes that begin at different times agree who does what.
    """
    total: dict[str, int] = {}
    for task in tasks:
        total[task.bench] = total.get(task.bench, 0) + task.seconds
    loads, owner = [0] * count, {}
    for bench in sorted(total, key=lambda name: (-total[name], name)):
        lane = loads.index(min(loads))
        owner[bench] = lane
        loads[lane] += total[bench]
    return [[t for t in tasks if owner[t.bench] == lane] for lane in range(count)]


def execute(command: Sequence[str], limit: float | None) -> int:
    """Run a benchmark as a process, for at most ``limit`` seconds; its status, 124 where the limit ended it."""
    with subprocess.Popen([sys.executable, "-m", f"kvfold.bench.{command[0]}", *command[1:]]) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            return STOPPED
        except BaseException:  # this command is ended, and what it started with it
            process.terminate()
            raise


Execute = Callable[[Sequence[str], float | None], int]


def run(
    tasks: Sequence[Task], rows: Path, notes: Path, gpu: str, seconds: float | None = None, execute: Execute = execute
) -> dict[str, int | None]:
    """Run what did not end well on this GPU at this commit yet.

    Parameters
    ----------
    tasks : sequence of Task
    rows : Path
        Folder of the rows, one CSV file a benchmark.
    notes : Path
        CSV file in it, to which what ended well is appended.
    gpu : str
    seconds : float, optional
        No task begins that is not expected to end within them, and one that does not is ended.
    execute : callable
        Command and limit to status.

    Returns
    -------
    dict
        Status of each task by its name; None: not begun, for lack of time.
    """
    now, begin, before = commit(), time.monotonic(), noted(rows)
    expected = estimates(before, tasks)
    # code without a commit may be other code than that of the notes
    ended = {d.task for d in before if (d.gpu, d.commit) == (gpu, now) and now != "unknown"}
    found: dict[str, int | None] = {}
    for task in tasks:
        if task.name in ended:
            progress(f"bench {task.name}: ended at {now} before")
            found[task.name] = 0
            continue
        left = None if seconds is None else seconds - (time.monotonic() - begin)
        if left is not None and left < expected[task.name][0]:
            found[task.name] = None
            continue
        progress(f"bench {task.name}")
        start = time.monotonic()
        found[task.name] = status = execute(task.command(rows), left)
        if status == 0:
            append(notes, [Done(task.name, time.monotonic() - start, gpu, now)])
        else:
            why = "ended by the limit" if status == STOPPED else f"status {status}"
            progress(f"bench {task.name}: {why}; what it measured is in {rows / task.bench}.csv")
    if waiting := [expected[name][0] for name, status in found.items() if status is None]:
        progress(
            f"{len(waiting)} of {len(tasks)} benchmarks not begun: about {sum(waiting):.0f} s; the same command goes on"
        )
    return found


def renewed(tasks: Sequence[Task], found: dict[str, int | None]) -> tuple[list[str], list[str]]:
    """Tables of which every task ended well, and those of which some did not."""
    names = list(dict.fromkeys(name for task in tasks for name in task.tables))
    whole = [n for n in names if all(found[t.name] == 0 for t in tasks if n in t.tables)]
    return whole, [n for n in names if n not in whole]


def _lane(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise KVFoldError(f"bench all: lane={text} is not allowed; allowed: I/N with 1 <= I <= N <= 99, such as 1/2")
    return int(match[1]), int(match[2])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvfold bench all", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=Path, metavar="DIR", help=f"folder of rows to append to, such as {ROWS}")
    parser.add_argument("--lane", default="1/1", metavar="I/N", help="the I-th of N parts, for N GPUs at once")
    parser.add_argument("--seconds", type=float, metavar="N", help="end after N seconds; the same command goes on")
    parser.add_argument("--list", action="store_true", help="print commands and seconds; measure nothing")
    args = parser.parse_args(argv)
    index, count = _lane(args.lane)
    if args.seconds is not None and not args.seconds > 0:
        raise KVFoldError(f"bench all: seconds={args.seconds:g} is not allowed; allowed: more than 0")
    tasks = lanes(count)[index - 1]
    if args.list:
        folder = args.rows or ROWS
        expected = estimates(noted(folder), tasks)
        for task in tasks:
            took, measured = expected[task.name]
            print(
                f"{took:6.0f} s {'measured' if measured else 'guess   '}  kvfold bench {shlex.join(task.command(folder))}"
            )
        print(f"{sum(took for took, _ in expected.values()):6.0f} s in all")
        return 0
    if args.rows is None:
        raise KVFoldError(f"bench all: rows is missing; allowed: a folder, such as {ROWS}")
    need_gpu("all")
    import torch

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    notes = args.rows / f"done-{index}-of-{count}.csv"
    try:
        args.rows.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVFoldError(f"bench all: rows={args.rows} is not a folder: {error.strerror}") from None
    files.check(notes, "rows")
    found = run(tasks, args.rows, notes, torch.cuda.get_device_name(), args.seconds)
    whole, partly = renewed(tasks, found)
    print(f"renewed: {', '.join(whole) or 'no table'}")
    if partly:
        print(f"not or partly renewed: {', '.join(partly)}")
    print("python scripts/tables.py draws them")
    return int(any(status not in (0, None) for status in found.values()))


if __name__ == "__main__":
    sys.exit(script(main))
