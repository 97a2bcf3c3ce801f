"""A layer's steps before a server's first request, on a CPU by the reference."""

import pytest
import torch

from kvfold import methods
from kvfold.engines.vllm import step, warming
from kvfold.engines.vllm.settings import layer_spec, stored
from kvfold.engines.vllm.step import Layer
from kvfold.kernels import paged

HEADS, KV_HEADS, DIM = 4, 2, 64


def layer(method):
    found = stored(methods.get(method), layer_spec(0, 1, HEADS, KV_HEADS, DIM, torch.float32, False))
    return Layer(found, DIM**-0.5, None)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(warming, "_warm", set())
    called, own = [], paged.attend

    def attend(call, out):
        own(call, out)
        assert torch.isfinite(out).all()
        called.append((int(call.step.seq_lens[0]), call.step.max_query_len, call.step.host[0].packed))

    monkeypatch.setattr(step.paged, "attend", attend)
    return called


@pytest.mark.parametrize("method", ["fold", "kivi:recent=40", "squat", "qjl", "turboquant:sink=64"])
def test_a_prompt_a_chunk_and_a_decode_step_close_pages(method, calls):
    one = layer(method)
    warming.warm_up(one, HEADS, 8192, 32768)
    first = one.stored.method.sink + one.stored.method.recent + 264
    assert [c[:2] for c in calls] == [(first, first), (first + 129, 129), (first + 130, 1)]
    assert [c[2] > 255 for c in calls] == [False, True, True]  # packed before the step
    assert not one.keys and one.window_keys.numel() == 0 and one._bound is None


def test_layers_that_store_alike_are_warmed_once_and_servers_of_short_sequences_too(calls):
    for _ in range(2):
        warming.warm_up(layer("fold"), HEADS, 64, 100)
    assert [c[:2] for c in calls] == [(64, 64), (65, 1)]


def test_a_failure_is_said_and_ends_nothing(calls, monkeypatch, caplog):
    monkeypatch.setattr(warming, "run", lambda *args: 1 / 0)
    one = layer("fold")
    warming.try_to_warm(one, HEADS, 8192, 32768)
    assert "kernels were not compiled ahead (ZeroDivisionError" in caplog.text and not one.keys
