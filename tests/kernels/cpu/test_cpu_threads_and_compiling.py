"""How the CPU kernel shares its work, what it leaves to the reference, and what it says of compiling and of Numba."""

import logging
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba")

import numba

from blocks_case import CASES, Case
from helpers import relative
from kvfold import kernels
from kvfold.kernels.compiling import Compiling
from kvfold.kernels.cpu import CPUKernel, _numbers
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


def test_numba_that_cannot_be_imported_is_as_good_as_none(monkeypatch):
    def fail():
        raise ImportError("Numba needs NumPy 2.2 or less")

    monkeypatch.setattr(module, "_loops", fail)
    call = Case(**CASES["affine-asym-4bit"]).call
    choice = kernels.choose(call.key_format, call.value_format, CPU)
    assert choice.kernel.name == "reference" and "Numba needs NumPy 2.2" in choice.reason
