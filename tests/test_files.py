"""Files: replaced in one step, written through where they are no regular files, and as they were after a failure.

Nothing here names a real device: a mistake would replace it. Pipes and terminals are made for the purpose.
"""

import contextlib
import dataclasses
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvfold import files
from kvfold.artefact import check_target
from kvfold.artefact import save as save_artefact
from kvfold.bench.rows import append as append_rows
from kvfold.cli import main
from kvfold.errors import KVFoldError, OutputError
from kvfold.evaluation.schema import write_json
from test_artefacts import made


@dataclasses.dataclass(frozen=True)
class Sample:
    name: str
    value: float
    count: int


@contextlib.contextmanager
def full_disk(free: int = 0):
    """No file may grow beyond ``free`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def reading(path: Path):
    """What a reader gets from a FIFO that is made at ``path``: a list of one text, once the block is left."""
    os.mkfifo(path)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    yield got
    reader.join(timeout=30)
    assert not reader.is_alive()


WRITERS = {
    "files": lambda path: files.write(path, "new\n"),
    "json": lambda path: write_json(path, {"a": 1}),
    "artefact": lambda path: save_artefact(made(), path),
}
"""What writes a whole file."""


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_stays_a_link_and_what_it_points_to_is_replaced(name, tmp_path):
    (tmp_path / "real").mkdir()
    target, link, second = tmp_path / "real" / "x", tmp_path / "link", tmp_path / "second"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("real/x")
    second.symlink_to(link)
    before = target.stat().st_ino
    WRITERS[name](second)
    assert link.is_symlink() and second.is_symlink() and target.read_bytes() != b"old"
    assert target.stat().st_ino != before and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["x"]


def test_a_link_to_nothing_makes_its_target(tmp_path):
    (tmp_path / "link").symlink_to("new")
    files.check(tmp_path / "link", "json")
    files.write(tmp_path / "link", b"1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "new").read_bytes() == b"1"


@pytest.mark.parametrize("name", WRITERS)
def test_a_fifo_is_written_through(name, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    WRITERS[name](fifo)
    reader.join(timeout=30)
    assert len(got[0]) > 3 and stat.S_ISFIFO(fifo.stat().st_mode) and [p.name for p in tmp_path.iterdir()] == ["fifo"]


def test_a_terminal_is_written_through(tmp_path):
    leader, follower = os.openpty()
    path = Path(os.ttyname(follower))
    try:
        for name in (path, tmp_path / "link"):
            if name != path:
                name.symlink_to(path)
            files.check(name, "json")
            write_json(name, [1])
            assert os.read(leader, 100).replace(b"\r", b"") == b"[\n  1\n]\n"
        assert stat.S_ISCHR(path.stat().st_mode)
    finally:
        os.close(leader)
        os.close(follower)


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_written_through_in_order(target, tmp_path):
    """Also where it is a file: replacing that would lose what is printed before and after."""
    code = f"from pathlib import Path; from kvfold import files; print('a'); files.write(Path({target!r}), 'b\\n'); print('c')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "a\nb\nc\n"
    piped = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    assert piped.stdout == "a\nb\nc\n"


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(name, tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with full_disk(3), pytest.raises((OSError, KVFoldError), match="too large"):
        WRITERS[name](path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_could_not_be_written_is_handed_on(tmp_path):
    with full_disk(4), pytest.raises(OutputError, match=r"^json: cannot write .*x: File too large") as error:
        write_json(tmp_path / "x", {"a": 1}, result="all of it")
    assert error.value.result == "all of it"


def test_names_that_are_no_text_are_escaped(tmp_path):
    import json

    write_json(tmp_path / "x", {"model": "caf\udce9", "text": "é"})
    assert json.loads((tmp_path / "x").read_text()) == {"model": "caf\udce9", "text": "é"}


def test_appending_adds_whole_lines_or_nothing(tmp_path):
    path = tmp_path / "x"
    files.append(path, "a\n")
    with path.open("a") as file:
        file.write("cut sho")
    files.append(path, "b\n")
    assert path.read_text() == "a\ncut sho\nb\n"
    with full_disk(14), pytest.raises(OSError):
        files.append(path, "c" * 50 + "\n")
    assert path.read_text() == "a\ncut sho\nb\n"


def test_rows_of_a_benchmark_go_through_a_fifo_with_one_header(tmp_path):
    fifo = tmp_path / "rows"
    with reading(fifo) as got:
        for i in (1, 2):
            append_rows(fifo, [Sample("a", 1.0, i)])
        files._streams.pop(fifo).close()  # as when the process ends
    head, *rows = got[0].splitlines()
    assert head.startswith("name,") and [row[-1] for row in rows] == ["1", "2"]


@pytest.mark.parametrize("written", ["nothing", "a part", "all"])
def test_an_interrupt_keeps_what_is_written_whole(tmp_path, monkeypatch, written):
    path = tmp_path / "x"
    files.append(path, "a\n")

    def press(descriptor):
        if written != "all":
            os.ftruncate(descriptor, {"nothing": 2, "a part": 3}[written])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", press)
    with pytest.raises(KeyboardInterrupt):
        files.append(path, "bc\n")
    assert path.read_text() == ("a\nbc\n" if written == "all" else "a\n")


def test_a_row_that_cannot_be_appended_is_said(tmp_path):
    path = tmp_path / "rows.csv"
    append_rows(path, [Sample("a", 1.0, 1)])
    before = path.read_bytes()
    with full_disk(len(before)), pytest.raises(OutputError, match=r"rows: cannot write .*not in it: second,2,3"):
        append_rows(path, [Sample("second", 2.0, 3)])
    assert path.read_bytes() == before
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(KVFoldError, match="is not a CSV file"):
        append_rows(path, [Sample("a", 1.0, 1)])


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    import socket

    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, why in (
            ("", "is a folder"),
            ("no/x", "there is no folder"),
            ("n" * 300, "too long"),
            ("loop", "Too many levels"),
            ("socket", "is a socket"),
        ):
            with pytest.raises(KVFoldError, match=f"^rows: .*{why}"):
                files.check(tmp_path / name, "rows")
    with pytest.raises(KVFoldError, match="names no file"):
        files.check(Path(""), "rows")
    with pytest.raises(KVFoldError, match="is not open for writing"), open(os.devnull) as closed:
        files.check(Path(f"/dev/fd/{closed.fileno()}"), "rows")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loop", "socket"]


def test_benchmarks_refuse_a_rows_file_before_they_measure(tmp_path, capsys):
    assert main(["bench", "cpu", "--rows", str(tmp_path), "--model", "/not/there"]) == 2
    assert "rows: " in capsys.readouterr().err
    assert main(["bench", "cpu", "--rows", str(tmp_path / "new" / "x.csv"), "--model", "/not/there"]) == 2
    assert "model: " in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_an_artefact_is_no_stream(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(KVFoldError, match=r"out: .*is a device or pipe"):
        check_target(tmp_path / "fifo", force=True)
