"""How a command's threads wait: set before torch is loaded, unless the user has, and never by the library."""

import os
import re
import subprocess
import sys

import pytest

from kvfold import cli, threads
from tiny_model import save


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    monkeypatch.setattr(threads, "quota", lambda: None)


def test_waiting_threads_sleep_and_it_is_said_in_one_line():
    environment = {"PATH": "x"}
    said = threads.settle(environment)
    assert environment == {"PATH": "x", "GOMP_SPINCOUNT": str(threads.SPINS), "KMP_BLOCKTIME": "0"}
    assert f"GOMP_SPINCOUNT={threads.SPINS}" in said and "\n" not in said
    assert threads.settle(environment) is None


@pytest.mark.parametrize("name", threads.WAITING)
def test_what_the_user_has_set_stays(name):
    environment = {name: "7"}
    assert threads.settle(environment) is None and environment == {name: "7"}


def test_a_quota_below_the_cores_limits_the_threads(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 64)
    for allowed, expected in ((2, "2"), (64, None), (None, None)):
        monkeypatch.setattr(threads, "quota", lambda allowed=allowed: allowed)
        environment = {"OMP_WAIT_POLICY": "ACTIVE"}
        said = threads.settle(environment)
        assert environment.get("OMP_NUM_THREADS") == expected
        assert (said is None) == (expected is None) and (said is None or "OMP_NUM_THREADS=2" in said)
    environment = {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "ACTIVE"}
    monkeypatch.setattr(threads, "quota", lambda: 2)
    assert threads.settle(environment) is None and environment["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.max": "nonsense\n"}, None),
    ],
)
def test_quotas_of_both_kinds_of_control_groups_are_read(tmp_path, monkeypatch, files, allowed):
    monkeypatch.undo()
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert threads.quota(tmp_path) == allowed


def test_only_commands_that_compute_decide_and_only_before_torch_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in threads.WAITING:
        os.environ.pop(name, None)
    cli._settle(["compare"])  # the tests have loaded torch
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delitem(sys.modules, "torch")
    for arguments in ([], ["methods"], ["bench", "cpu"], ["compare", "--help"]):
        cli._settle(arguments)
        assert "GOMP_SPINCOUNT" not in os.environ
    assert capsys.readouterr().err == ""
    cli._settle(["compare", "--methods", "kivi"])
    assert os.environ["GOMP_SPINCOUNT"] == str(threads.SPINS)
    assert capsys.readouterr().err == ""  # the input may be wrong
    threads.tell()
    threads.tell()
    assert re.fullmatch("kvfold: threads sleep while they wait.*\n", capsys.readouterr().err)


def test_neither_the_library_nor_the_command_loads_torch_before_it_is_needed():
    script = (
        "import sys, os; before = dict(os.environ); import kvfold, kvfold.cli, kvfold.threads; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; "
        "assert callable(kvfold.fold) and callable(kvfold.explain) and kvfold.methods.DEFAULT is kvfold.DEFAULT; "
        "import kvfold.engines.transformers.explanation; assert callable(kvfold.explain); "
        "assert not hasattr(kvfold, 'nothing') and 'fold' in dir(kvfold); "
        "assert {k: v for k, v in os.environ.items() if 'OMP' in k or 'KMP' in k} == "
        "{k: v for k, v in before.items() if 'OMP' in k or 'KMP' in k}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_command_settles_before_torch_reads_the_variables(tmp_path):
    """libgomp prints what it has read when it is loaded."""
    environment = {k: v for k, v in os.environ.items() if k not in threads.WAITING} | {"OMP_DISPLAY_ENV": "VERBOSE"}
    command = [sys.executable, "-m", "kvfold", "generate", "x", "--method", "fodl"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "did you mean fold" in done.stderr and "threads sleep" not in done.stderr
    model = save(tmp_path / "tiny")
    command = [sys.executable, "-m", "kvfold", "generate", "x", "--model", str(model), "--max-new-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stderr.count("threads sleep while they wait") == 1
    assert "threads sleep" not in done.stdout
    if "GOMP_SPINCOUNT" in done.stderr.replace("(GOMP_SPINCOUNT", ""):
        assert f"GOMP_SPINCOUNT = '{threads.SPINS}'" in done.stderr
