"""What somebody sees in the first minutes: five methods compared, signs of life, and nothing done twice."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvfold
from conftest import _Whereabouts
from kvfold import methods, models
from kvfold.cli import main
from kvfold.commands import terminal
from tiny_model import byte_tokenizer, save, tiny_llama

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--prefix", "320", "--tokens", "64", "--new-tokens", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


# ---- compare ---------------------------------------------------------------------------------------------------------


def compared(capsys, tmp_path, *arguments):
    out_file = tmp_path / "rows.json"
    assert main(["compare", *arguments, *SMALL, "--json", str(out_file), "--force"]) == 0
    return [row["method"] for row in json.loads(out_file.read_text())["rows"]], capsys.readouterr().out


def test_compare_runs_five_methods_and_says_how_to_see_all(tiny, tmp_path, capsys, monkeypatch):
    names, out = compared(capsys, tmp_path, "--model", tiny)
    assert names == ["fold", "none", "kivi:k_bits=3,v_bits=2,group=64", "kivi", "kivi:bits=8"]
    assert f"5 of {len(methods.DEFAULT)} methods; all of them: kvfold compare --all, or make demo ALL=1" in out
    monkeypatch.setattr(methods, "DEFAULT", ("none", "kivi:recent=32"))
    names, out = compared(capsys, tmp_path, "--model", tiny, "--all")
    assert names == ["none", "kivi:recent=32"] and "--all" not in out
    names, out = compared(capsys, tmp_path, "--model", tiny, "--methods", "none")
    assert names == ["none"] and "--all" not in out
    assert main(["compare", "--model", tiny, "--all", "--methods", "none"]) == 2
    assert "give one of --all and --methods" in capsys.readouterr().err


def made(*arguments):
    """Commands that make would run."""
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", " ")


def test_the_demo_compares_five_and_the_committed_rows_are_of_all():
    assert "kvfold compare --all" not in made("demo") and "kvfold compare" in made("demo")
    assert "kvfold compare --all" in made("demo", "ALL=1")
    assert "kvfold compare --all" in made("table", "TEXT=a.txt")


# ---- tests of every day ----------------------------------------------------------------------------------------------


def test_the_fast_tests_are_all_but_those_of_gpu_kernels_and_flows():
    (line,) = (line for line in made("test", "FAST=1").splitlines() if "bin/pytest" in line)
    words = line.split()
    assert '-m "not slow"' in line and "tests/kernels/cpu" in words
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    left_out = {name for name in files if name not in words and not name.startswith("tests/kernels/cpu/")}
    assert all(name.startswith(("tests/kernels/", "tests/engines/test_flows")) for name in left_out)
    assert {"tests/engines/test_flows.py", "tests/kernels/test_kernels_compile.py"} <= left_out
    assert "not slow" not in made("test") and "tests/" not in made("test").partition("bin/pytest")[2]


def test_a_log_says_once_a_minute_where_the_tests_are(monkeypatch):
    lines, clock = [], [0.0]
    monkeypatch.setattr("conftest.time", SimpleNamespace(monotonic=lambda: clock[0]))
    reporter = SimpleNamespace(write=lines.append)
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter))
    where = _Whereabouts(config)
    where.pytest_sessionstart(SimpleNamespace(testscollected=2000))
    for number in range(1500):
        clock[0] += 0.1
        for when in ("setup", "call", "teardown"):
            where.pytest_runtest_logreport(SimpleNamespace(when=when, nodeid=f"tests/test_a.py::test[{number}]"))
    assert (
        len(lines) == 2 and lines[0].startswith("\n[1:00] ") and "of 2,000 tests, 30 %; in tests/test_a.py" in lines[0]
    )


# ---- before the first word -------------------------------------------------------------------------------------------


@pytest.fixture
def terminal_of(monkeypatch):
    """Standard error as a terminal, or not; what its status shows is kept."""

    def make(is_terminal):
        shown = []

        class Status:
            def __init__(self, what):
                self.what = what

            def __enter__(self):
                shown.append(self.what)

            def __exit__(self, *_):
                shown.append("gone")

        monkeypatch.setattr(
            "rich.console.Console", lambda **_: SimpleNamespace(is_terminal=is_terminal, status=Status, file=None)
        )
        return shown

    return make


def test_imports_are_announced_on_a_terminal_alone(terminal_of, capsys):
    shown = terminal_of(True)
    terminal.wake()
    assert shown == ["importing PyTorch and Transformers ...", "gone"]
    shown = terminal_of(False)
    terminal.wake()
    assert shown == [] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_says_what_goes_on_until_its_first_word(terminal_of, fails):
    shown = terminal_of(True)

    class File(io.StringIO):
        def write(self, text):
            shown.extend(filter(None, [text]))
            return len(text)

    stream = terminal.Stream(byte_tokenizer(), File())
    try:
        with stream.waiting("reading 3 tokens"):
            stream.put(torch.tensor([[1, 2, 3]]))
            if fails:
                raise KeyboardInterrupt
            assert shown == ["reading 3 tokens ..."]
            for token in byte_tokenizer()("a b ")["input_ids"]:
                stream.put(torch.tensor([token]))
            stream.end()
    except KeyboardInterrupt:
        pass
    assert shown[:2] == ["reading 3 tokens ...", "gone"] and shown.count("gone") == 1
    assert "".join(text for text in shown[2:]) == ("" if fails else "a b \n")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_generate_and_chat_say_that_a_prompt_is_read(command, tiny, terminal_of, monkeypatch, capsys):
    shown = terminal_of(True)
    monkeypatch.setattr(models, "_telling", lambda what: terminal.nullcontext())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello there\n")))
    assert main([command, "--model", tiny, "--max-new-tokens", "4"]) == 0
    assert shown[:2] == ["importing PyTorch and Transformers ...", "gone"]
    assert any(line.startswith("reading ") and line.endswith(" tokens ...") for line in shown)


SPECS = ("fold", "kivi", "kivi:bits=8", "none", "turboquant", "squat_pre", "qjl", "innerq")


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_compiled_ahead_is_what_steps_run(spec, monkeypatch):
    """Numba compiles for types: those of a call that was made up are those of real ones."""
    numba = pytest.importorskip("numba")
    from kvfold.kernels.cpu import kernel

    real, seen = kernel._loops(), {"attend": set(), "merge": set()}

    def recorded(name):
        def run(*arguments):
            seen[name].add(tuple(str(numba.typeof(x)) for x in arguments))
            return getattr(real, name)(*arguments)

        return run

    loops = SimpleNamespace(np=np, **{name: recorded(name) for name in seen})
    monkeypatch.setattr(kernel, "_loops", lambda: loops)
    model = tiny_llama()
    cache = kvfold.fold(model, spec)
    terminal.prepare(cache, model.device)
    ahead = {name: set(types) for name, types in seen.items()}
    assert all(len(types) == 1 for types in ahead.values())
    ids = torch.arange(300)[None] % 256
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        model(ids[:, :8], past_key_values=cache)
    assert cache.layers[0].packed[0] > 0 and seen == ahead


# ---- what was done twice ---------------------------------------------------------------------------------------------


def test_a_gguf_file_is_parsed_once_for_a_conversion(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_token_list([f"token {i}" for i in range(300)])
    writer.add_tensor("output.weight", np.arange(64, dtype=np.float32).reshape(8, 8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain, mapping = gguf.GGUFReader, gguf.get_tensor_name_map
    expected = plain(str(tmp_path / "a.gguf"))
    with models._parsing_once():
        found = gguf.GGUFReader(str(tmp_path / "a.gguf"))
        assert gguf.GGUFReader(str(tmp_path / "a.gguf")) is found and isinstance(found, plain)
        names = [gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) for _ in range(2)]
        assert names[0] is names[1]
        assert not isinstance(found.data, np.memmap)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (plain, mapping)
    assert list(found.fields) == list(expected.fields)
    for name, field in expected.fields.items():
        assert found.fields[name].contents() == field.contents()
    assert np.array_equal(found.tensors[0].data, expected.tensors[0].data)


def test_loops_are_compiled_without_strings():
    """An assignment between arrays brings Numba's strings, which take as long to compile as the loops around them."""
    numba = pytest.importorskip("numba")
    from numba.core import event

    from kvfold.kernels.cpu import _attend, _numbers
    from kvfold.kernels.cpu.readers import sketch

    array = numba.float32[::1]
    rows = numba.float32[:, ::1]
    compiled = []

    class Listener(event.Listener):
        def on_start(self, event):
            compiled.append(event.data["dispatcher"].py_func.__module__)

        def on_end(self, event):
            pass

    numba.njit(fastmath=_numbers.FAST)(lambda x: x + 1)  # what comes with the first of all
    with event.install_listener("numba:compile", Listener()):
        page = (rows, array, array, array, numba.int64, rows, rows, array)
        numba.njit(fastmath=_numbers.FAST)(_attend._page_queries.py_func).compile(page)
        split = (numba.int64[::1], numba.int64, numba.int64, numba.int64, rows, array)
        numba.njit(fastmath=_numbers.FAST)(sketch._split.py_func).compile(split)
    assert compiled and not [name for name in compiled if "unicode" in name]
