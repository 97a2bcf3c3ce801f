"""All benchmarks by one command: what is run, where it goes on, and that its commands are those behind the committed rows."""

import csv
import importlib
import pathlib
import signal
import sys

import pytest

from kvfold.bench import all as everything
from kvfold.bench import matvec
from kvfold.bench.all import TASKS, Done, Task, estimates, lanes, noted, renewed, run
from kvfold.cli import main
from kvfold.errors import KVFoldError

ROOT = pathlib.Path(__file__).parents[2]
SHORT = (Task("encode", "", 10, ("a", "b")), Task("modes", "--models x", 20, ("b",)), Task("modes", "", 5, ("c",)))


class Clock:
    """Time that passes where a benchmark runs."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(everything, "commit", lambda: "abc")
    monkeypatch.setattr(everything, "time", Clock())
    return everything.time


def executing(clock, seconds=1.0, **statuses):
    ran = []

    def execute(command, limit):
        ran.append((command, limit))
        clock.now += seconds
        return statuses.get(command[0], 0)

    return execute, ran


def test_every_task_is_a_command_that_its_benchmark_takes(monkeypatch, tmp_path):
    """Each gets as far as to ask for a GPU: options, methods and models exist."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert len({task.name for task in TASKS}) == len(TASKS)
    for task in TASKS:
        name, *arguments = task.command(tmp_path)
        with pytest.raises(KVFoldError, match="a CUDA GPU is needed"):
            importlib.import_module(f"kvfold.bench.{name}").main(arguments)


def test_tasks_bring_every_table_of_speed_and_every_method_of_the_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from bench_tables import BENCH

    tables = {name for page in ("docs/performance.md", "docs/profile.md") for name in BENCH[page]}
    assert {name for task in TASKS for name in task.tables} == tables
    assert everything.MODELS == tuple(matvec.MODELS)
    with (ROOT / "benchmarks/rows/decode.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if not row["method"].startswith("bf16")]
    for row in rows:
        shape = f"--batch {row['batch']} --context {row['context']} --methods"
        tasks = [t for t in TASKS if t.bench == "decode" and shape in t.arguments]
        assert any(row["method"] in t.arguments.split() for t in tasks), row


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_lanes_share_all_tasks_and_no_file(count):
    found = lanes(count)
    assert len(found) == count and sorted(t.name for lane in found for t in lane) == sorted(t.name for t in TASKS)
    files = [bench for lane in found for bench in {t.bench for t in lane}]
    assert len(files) == len(set(files))
    if count == 2:
        loads = [sum(t.seconds for t in lane) for lane in found]
        assert max(loads) < 1.2 * min(loads)


def test_it_goes_on_where_it_was_ended(clock, tmp_path):
    notes = tmp_path / "done-1-of-1.csv"
    execute, ran = executing(clock, 12.0)
    assert run(SHORT, tmp_path, notes, "H", 25, execute) == {"encode": 0, "modes --models x": None, "modes": 0}
    assert ran == [
        (["encode", "--rows", str(tmp_path / "encode.csv")], 25.0),
        (["modes", "--rows", str(tmp_path / "modes.csv")], 13.0),
    ]
    assert noted(tmp_path) == [Done("encode", 12.0, "H", "abc"), Done("modes", 12.0, "H", "abc")]
    assert estimates(noted(tmp_path), SHORT)["modes"] == (12.0, True)
    execute, ran = executing(clock)
    assert set(run(SHORT, tmp_path, tmp_path / "done-2-of-2.csv", "H", None, execute).values()) == {0}
    assert [command[:2] for command, _ in ran] == [["modes", "--models"]]
    execute, ran = executing(clock)
    run(SHORT, tmp_path, notes, "another GPU", None, execute)
    assert len(ran) == len(SHORT)


def test_what_failed_or_was_ended_is_not_noted_and_others_go_on(clock, tmp_path):
    notes = tmp_path / "done-1-of-1.csv"
    execute, ran = executing(clock, encode=1)
    found = run(SHORT, tmp_path, notes, "H", None, execute)
    assert found == {"encode": 1, "modes --models x": 0, "modes": 0} and len(ran) == 3
    assert [d.task for d in noted(tmp_path)] == ["modes --models x", "modes"]
    assert renewed(SHORT, found) == (["c"], ["a", "b"])


def test_a_process_that_takes_too_long_is_ended(monkeypatch, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ncase $2 in *slow) exec sleep 30;; esac\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert everything.execute(["slow"], 0.2) == everything.STOPPED
    assert everything.execute(["quick"], 20) == 3


def test_code_without_a_commit_goes_on_behind_nothing(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(everything, "commit", lambda: "unknown")
    for _ in range(2):
        execute, ran = executing(clock)
        run(SHORT[:1], tmp_path, tmp_path / "done-1-of-1.csv", "gpu", execute=execute)
        assert len(ran) == 1


def test_who_ends_it_ends_the_benchmark(monkeypatch):
    started = []

    class Ended(everything.subprocess.Popen):
        def wait(self, timeout=None):
            if self not in started:  # the first wait, during which the command is told to end
                started.append(self)
                raise SystemExit(143)
            return super().wait(timeout)

    monkeypatch.setattr(everything.subprocess, "Popen", lambda command: Ended(["sleep", "100"]))
    with pytest.raises(SystemExit):
        everything.execute(("encode",), None)
    assert started[0].returncode == -signal.SIGTERM


def test_list_needs_no_gpu_and_prints_commands(capsys, tmp_path):
    assert main(["bench", "all", "--list", "--lane", "2/2", "--rows", str(tmp_path / "none")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(lanes(2)[1]) + 1 and all("kvfold bench " in line for line in lines[:-1])


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--lane", "3/2"], "lane=3/2"),
        (["--lane", "0/2"], "lane=0/2"),
        (["--seconds", "-1"], "seconds=-1"),
        ([], "rows is missing"),
    ],
)
def test_wrong_options_are_named(capsys, arguments, named):
    assert main(["bench", "all", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_file_that_is_not_a_list_of_tasks_is_named(tmp_path):
    (tmp_path / "done-1-of-1.csv").write_text("task,when\nencode,today\n")
    with pytest.raises(KVFoldError, match=r"done-1-of-1\.csv"):
        noted(tmp_path)
