"""Compilation is said once, counts once, and is no part of a speed."""

import logging

import pytest

pytest.importorskip("triton")

import triton

import aot
from kvfold.commands.terminal import Stream
from kvfold.kernels.compiling import Compiling, compiling


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """An empty cache of kernels, and who listens to the compiler put back at the end."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    before = triton.knobs.compilation.listener
    yield
    triton.knobs.compilation.listener = before


def test_said_once_and_counted_once(cold, caplog):
    heard = []
    triton.knobs.compilation.listener = lambda **about: heard.append(about["cache_hit"])
    new = Compiling()
    new.listen()
    new.listen()
    with caplog.at_level(logging.WARNING, "kvfold"):
        aot.compile_merge(64)
        first = new.seconds
        assert first > 0
        aot.compile_merge(128)
        assert new.seconds > first
        spent = new.seconds
        aot.compile_merge(128)
    assert new.seconds == spent and heard == [False, False, True]
    (said,) = [r.getMessage() for r in caplog.records if r.name == "kvfold"]
    assert said.startswith("kvfold: compiling kernels for this GPU, about ") and "cached" in said


def test_others_kernels_are_none_of_it():
    class Other:
        class fn:
            __module__ = "torch._inductor"

    new = Compiling()
    new(src=Other, cache_hit=False, times=None)
    assert new.seconds == 0.0


def test_speed_leaves_compilation_out(monkeypatch):
    ticks = iter([0.0, 1.0, 1.5, 12.0, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(compiling, "seconds", 0.0)
    stream = Stream.__new__(Stream)
    stream.times, stream.printer = [], type("Nobody", (), {"put": lambda self, value: None})()
    for step in range(5):
        if step == 3:
            compiling.seconds += 10.0
        stream.put(None)
    assert stream.tokens_per_s() == 3 / 1.5
