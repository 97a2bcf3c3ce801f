"""Standard output as it is: terminals without the letters, full disks, closed pipes, interrupts. Results outlive them."""

import contextlib
import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from kvfold import outlet
from kvfold.cli import main
from kvfold.errors import OutputError
from test_files import full_disk
from tiny_model import CONTEXT, save

COMPARE = ["compare", "--methods", "none", "--prefix", "320", "--tokens", "64", "--new-tokens", "4"]
DOMAINS = ["domains", "--methods", "none", "--domains", "prose", "--prefix", "320", "--tokens", "64", "--windows", "1"]
GENERATE = ["generate", "Hello", "--max-new-tokens", "8"]
RESULTS = {"compare": COMPARE, "domains": DOMAINS, "generate": GENERATE, "explain": ["explain"]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


class Broken(io.RawIOBase):
    """What standard output writes to, and cannot."""

    def __init__(self, number: int) -> None:
        self.number = number

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return len(bytes(data))


@pytest.fixture
def broken(monkeypatch):
    """Puts one in the place of standard output."""
    made = []

    def put(number: int) -> None:
        made.append(Broken(number))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(made[0]), encoding="utf-8"))

    yield put
    for raw in made:
        raw.number = 0  # so that what is left in the buffer goes somewhere


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_cannot_be_printed_is_written_all_the_same(name, tiny, tmp_path, broken, capsys):
    broken(errno.ENOSPC)
    status = main([*RESULTS[name], "--model", tiny, "--json", str(tmp_path / "x.json")])
    assert status == 1 and json.loads((tmp_path / "x.json").read_text())
    assert f"the result is in {tmp_path / 'x.json'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_closed_pipe_is_quiet_and_the_file_is_written(name, tiny, tmp_path, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    closed = open(writing, "w")
    monkeypatch.setattr(sys, "stdout", closed)
    status = main([*RESULTS[name], "--model", tiny, "--json", str(tmp_path / "x.json")])
    with contextlib.suppress(BrokenPipeError):  # what is left in its buffer
        closed.close()
    assert status == 1
    assert json.loads((tmp_path / "x.json").read_text())
    assert "rror" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["compare", "explain"])
def test_a_result_that_can_go_nowhere_else_goes_to_standard_error(name, tiny, broken, capsys):
    broken(errno.ENOSPC)
    assert main([*RESULTS[name], "--model", tiny]) == 1
    error = capsys.readouterr().err
    assert json.loads(error[error.index("\n{") : error.rindex("}") + 1])
    assert "standard output: No space left on device; the result is above" in error


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_cannot_be_written_is_printed_all_the_same(name, tiny, tmp_path, capsys):
    path = tmp_path / "x.json"
    command = [*RESULTS[name], "--model", tiny, "--json", str(path)]
    assert main(command) == 0
    size, old = path.stat().st_size, path.read_text()
    capsys.readouterr()
    with full_disk(size - 60):  # rows beside it, which have no indentation, fit
        status = main(command)
    out, err = capsys.readouterr()
    assert status == 1 and "json: cannot write" in err and "File too large" in err and "Traceback" not in err
    assert {"explain": "bytes per token", "generate": "tokens/s"}.get(name, "float32") in out
    assert path.read_text() == old and {p.name for p in tmp_path.iterdir()} - {"x.json.partial"} == {"x.json"}


def test_rows_are_kept_when_the_result_cannot_be_written_and_the_same_command_writes_it(tiny, tmp_path, capsys):
    """The disk holds the rows, but not the result, which is larger."""
    command = [*COMPARE, "--model", tiny, "--json", str(tmp_path / "x.json")]
    assert main(command) == 0
    size = (tmp_path / "x.json").stat().st_size
    (tmp_path / "x.json").unlink()
    capsys.readouterr()
    with full_disk(size - 60):
        status = main(command)
    first = capsys.readouterr()
    assert status == 1 and "1 rows are kept; the same command goes on from there" in first.err
    assert [p.name for p in tmp_path.iterdir()] == ["x.json.partial"] and "none" in first.out
    assert main(command) == 0
    assert "1 of 1 rows taken over" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 1


def test_a_file_that_no_run_left_is_not_replaced_by_rows(tiny, tmp_path, capsys):
    (tmp_path / "x.json.partial").write_text("mine")
    assert main([*COMPARE, "--model", tiny, "--json", str(tmp_path / "x.json")]) == 2
    assert "x.json.partial, where rows are kept, is another file" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json.partial", "mine")]


def test_a_run_whose_rows_cannot_be_kept_goes_on(tiny, tmp_path, capsys):
    """The disk takes what comes before the first row; without any room the run is refused before the work."""
    command = [*COMPARE[:3], "kivi", *COMPARE[3:], "--model", tiny, "--json", str(tmp_path / "x.json")]
    with full_disk(10):
        assert main(command) == 2
    assert "json: cannot keep rows in" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with full_disk(1300):
        status = main(command)
    out, err = capsys.readouterr()
    assert status == 1 and err.count("a row is not kept in x.json.partial: File too large") == 1
    assert "kivi" in out and "none" in out


def test_a_terminal_without_the_letters_gets_escapes(tiny, tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main([*COMPARE, "--model", tiny]) == 0
    sys.stdout.flush()
    assert b"none" in raw.getvalue() and sys.stdout.errors == "strict"
    with outlet.forgiving():
        print("caf\xe9 \ud800")
    sys.stdout.flush()
    assert raw.getvalue().endswith(b"caf\\xe9 \\ud800\n")


def test_json_means_the_same_in_every_encoding():
    value = {"text": "caf\xe9 \u4e2d", "path": "\udcff"}
    for encoding in ("utf-8", "ascii", "latin-1", None):
        assert json.loads(outlet.as_json(value, encoding).encode(encoding or "utf-8")) == value
    assert "\u4e2d" in outlet.as_json({"a": "\u4e2d"})


def test_what_was_not_written_is_told_after_it_was_printed(capsys):
    def fail():
        raise OutputError("json: full")

    with pytest.raises(OutputError, match="json: full"):
        outlet.publish([1], lambda: print("table"), write=fail)
    assert capsys.readouterr().out == "table\n"


# ---- in a process of its own -----------------------------------------------------------------------------------------


def kvfold(*arguments, prefix=(), **options):
    return subprocess.run(
        [sys.executable, *prefix, "-m", "kvfold", *arguments], stderr=subprocess.PIPE, text=True, timeout=120, **options
    )


def test_a_full_disk_behind_standard_output_is_one_line(tmp_path):
    """Nothing of the interpreter's own end either."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with (tmp_path / "out").open("w") as out:
        done = kvfold(
            "--help",
            stdout=out,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},  # drops half a write
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit)),
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.stderr.endswith("kvfold: error: standard output: File too large\n")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_standard_output_or_error_is_none(closed, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, closed, None)
    assert main(["explain", "--model", tiny, "--json", str(tmp_path / "x.json")]) == 0
    assert getattr(sys, closed) is None and json.loads((tmp_path / "x.json").read_text())
    assert main(["explain", "--model", tiny, "--json", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "is a folder" in shown.err if closed == "stdout" else "bytes per token" in shown.out


def test_a_closed_pipe_ends_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = kvfold("--help", stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 1 and done.stderr == ""


def test_bytes_that_are_no_text_are_one_line(tiny):
    done = kvfold("generate", b"\xff\xfe", "--model", tiny, stdout=subprocess.PIPE)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "kvfold: error: prompt: it is not UTF-8 text (character 0)"


def test_a_prompt_beyond_the_context_is_told_to_be_shorter(tiny, capsys):
    for length, says in ((CONTEXT, "prompt: it has"), (CONTEXT - 4, "max-new-tokens: prompt")):
        assert main(["generate", "x" * length, "--model", tiny, "--raw", "--max-new-tokens", "8"]) == 2
        err = capsys.readouterr().err
        assert f"kvfold: error: {says}" in err and "at most 0" not in err
        assert ("give at most 4, or a shorter prompt" in err) == (length < CONTEXT)


def test_text_of_utf_8_is_text_whatever_the_locale_says(tiny, tmp_path):
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ["generate", "--model", tiny, "--raw", "--max-new-tokens", "1", "--json", "-", "Grüße".encode()]
    done = kvfold(*arguments, stdout=subprocess.PIPE, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == len("Grüße".encode())  # a token per byte
    out = "Grüße.safetensors".encode()
    arguments = ["calibrate", "--method", "commvq", "--text", str(tmp_path / "text"), "--out", out]
    done = kvfold(*arguments, stdout=subprocess.PIPE, env=env)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "kvfold: error: out: it has characters that the encoding of this locale"
    )


@pytest.mark.parametrize("module", ["click", "torch._utils", "torch._C", "transformers.utils"])
def test_an_interrupt_while_modules_are_loaded_is_one_line(module, tiny):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "kvfold", "explain", "--model", tiny],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.split("|")[-1].strip() == module:
            break
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, rest = process.communicate(timeout=60)
    own = [line for line in [*seen, *rest.splitlines()] if not line.startswith("import time:") and line.strip()]
    assert process.returncode == 130 and out == "", own
    assert own[-1] == "kvfold: interrupted" and not any("Traceback" in line for line in own)
    assert time.monotonic() - started < 30
