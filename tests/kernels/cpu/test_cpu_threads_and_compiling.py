"""How the CPU kernel shares its work, what it leaves to the reference, and what it says of compiling and of Numba."""

import logging
import math
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

import numba

import kvfold
from blocks_case import CASES, Case
from helpers import llama, logits, prompt, relative
from kvfold import kernels
from kvfold.errors import KVFoldError
from kvfold.kernels.compiling import Compiling
from kvfold.kernels.cpu import CPUKernel, _numbers, importing
from kvfold.kernels.cpu import kernel as module

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 3, 4, 7, 50])
def test_shares_are_equal_or_many(threads, monkeypatch):
    """Four KV heads: no thread has much more to do than another, and no share is cut where there are enough."""
    case = Case(**CASES["affine-asym-4bit"])
    splits, run = [], module._run
    monkeypatch.setattr(module, "_run", lambda *given: splits.append((found := run(*given)).splits) or found)
    monkeypatch.setattr(module, "TOKENS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert relative(CPUKernel().attend(case.call), case.expected()) < 2e-6
    assert splits == [threads // math.gcd(threads, 4)]
    del splits[:]
    case = Case(**CASES["affine-asym-4bit"], packed=(64, 32) * 8)
    assert relative(CPUKernel().attend(case.call), case.expected()) < 2e-6
    assert splits == [1 if threads <= 4 else threads // math.gcd(threads, 32)]


def test_gradients_of_sinks_alone_are_there_and_nothing_is_left_out_without_gradients(monkeypatch):
    """A model whose other weights are frozen; and parameters, which need gradients, under ``no_grad``."""
    call = Case(**CASES["affine-asym-4bit"]).call
    sinks = torch.zeros(call.query.shape[1], requires_grad=True)
    CPUKernel().attend(replace(call, sinks=sinks)).sum().backward()
    assert sinks.grad is not None and sinks.grad.norm() > 0
    monkeypatch.setattr(module.ReferenceKernel, "attend", None)
    query = call.query.clone().requires_grad_()
    with torch.no_grad():
        got = CPUKernel().attend(replace(call, sinks=sinks, query=query))
    assert torch.equal(got, CPUKernel().attend(replace(call, sinks=sinks.detach())))


def test_compiling_is_said_once_and_counted_once(monkeypatch, caplog):
    monkeypatch.setattr(_numbers, "compiling", new := Compiling())

    def inner(x):
        return x + 1

    inner.__module__ = "kvfold.inner"
    inner = numba.njit(inner)

    def outer(x):
        return inner(x) + 1

    outer.__module__ = "kvfold.outer"
    outer = numba.njit(outer)
    with caplog.at_level(logging.WARNING, "kvfold"):
        assert outer(1) == 3
        spent = new.seconds
        assert spent > 0 and outer(2) == 4 and new.seconds == spent
        assert outer(1.5) == 3.5 and new.seconds > spent
        numba.njit(lambda x: x)(1)  # somebody else's
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("kvfold: compiling kernels for this CPU") and "cached" in said


def test_numba_that_cannot_be_imported_is_named(monkeypatch):
    """Plans do not import it: what is in a process decides what else can be loaded there."""
    call = Case(**CASES["affine-asym-4bit"]).call
    assert kernels.choose(call.key_format, call.value_format, CPU).kernel.name == "cpu"
    with without_numba(monkeypatch):
        with pytest.raises(
            KVFoldError, match=r"kernel: cpu needs Numba, which cannot be imported .*; allowed: reference"
        ):
            CPUKernel().attend(call)
        choice = kernels.choose(call.key_format, call.value_format, CPU)
        assert choice.kernel.name == "reference"
        assert "cpu: numba is installed and cannot be imported (ModuleNotFoundError: " in choice.reason
        with pytest.raises(KVFoldError, match="kernel: cpu does not support this layer: numba is installed and cannot"):
            kernels.choose(call.key_format, call.value_format, CPU, name="cpu")


def cache_formats(model):
    return kvfold.fold(model, "fold").folded[0].layout.read_as


@contextmanager
def without_numba(monkeypatch):
    """Within, it is installed and does not import."""
    module._loops.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importing, "known", importing.Known())
        patch.setitem(sys.modules, "kvfold.kernels.cpu._attend", None)
        patch.delattr("kvfold.kernels.cpu._attend", raising=False)
        yield
    module._loops.cache_clear()


@pytest.mark.parametrize("why", ["import", "jit"])
def test_the_reference_attends_where_numba_does_not_serve_and_says_so_once(why, monkeypatch, recwarn):
    monkeypatch.setattr("kvfold.errors._warned", set())
    model, ids = llama(), prompt(1, 150)
    expected = logits(model, kvfold.fold(model, "fold", kernel="reference"), ids, [140, 1, 9])
    with without_numba(monkeypatch):
        CPUKernel().prepare(*cache_formats(model))  # as commands do it before an answer
    with without_numba(monkeypatch) if why == "import" else nullcontext():
        if why == "jit":
            monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
        cache = kvfold.fold(model, "fold")
        assert torch.equal(logits(model, cache, ids, [140, 1, 9]), expected)
        assert {layer.kernel.name for layer in cache.folded} == {"reference"}
        insisted = "NUMBA_DISABLE_JIT=1: numba compiles nothing" if why == "jit" else "numba is installed and cannot be"
        with pytest.raises(KVFoldError, match=f"kernel: cpu does not support this layer: {insisted}"):
            kvfold.fold(model, "fold", kernel="cpu")
    said = [str(w.message) for w in recwarn if "kernel reference attends on this CPU instead of cpu" in str(w.message)]
    assert len(said) == 1 and insisted in said[0]


EXPLAINED = """
import kvfold
from helpers import llama
row = kvfold.explain(llama(), "fold").layers[0]
assert row.kernel == "reference", row.kernel
assert "cpu: numba is installed and cannot be imported (AttributeError: _ARRAY_API not found)" in row.reason, row.reason
"""


def test_explain_says_that_numba_does_not_serve(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text('raise AttributeError("_ARRAY_API not found")', encoding="utf-8")
    here = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, here, *sys.path)))}
    done = subprocess.run([sys.executable, "-c", EXPLAINED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PLANNED = """
import sys
import kvfold
from helpers import llama
for method in ("fold", "turboquant", "qjl", "gear", "zipcache", "kvarn", "squat_pre"):
    assert kvfold.explain(llama(), method).layers[0].kernel == "cpu"
assert "numba" not in sys.modules
"""


def test_plans_import_no_numba():
    here = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    done = subprocess.run([sys.executable, "-c", PLANNED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
