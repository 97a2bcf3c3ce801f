"""A decode step that is compiled, as far as it goes without a GPU: what the compiler is given, and what is refused.

Inductor's own code is compared on a GPU (test_gpu_graph.py); here `aot_eager` runs what was traced.
"""

import logging
import time

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvfold
from helpers import build, llama, prompt
from kvfold.engines.transformers import compiled, graph
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import UnsupportedModelError
from kvfold.kernels import NewTokens
from kvfold.kernels.compiling import Compiling
from steps import Steps

MODELS = [
    (LlamaForCausalLM, LlamaConfig),
    (Qwen2ForCausalLM, Qwen2Config),
    (Qwen3ForCausalLM, Qwen3Config),
    (GemmaForCausalLM, GemmaConfig),
]


@pytest.fixture
def traced(monkeypatch):
    """Layers are traced in one piece and run as traced; each layer attends as a captured step has it, and stores nothing."""
    own = torch.compile
    counted = []

    def compile(function, *, options, **how):
        def backend(graph, inputs):
            counted.append(sum(node.target is torch.ops.kvfold.step.default for node in graph.graph.nodes))
            return graph.forward

        assert how == {"fullgraph": True, "dynamic": False}
        return own(function, backend=backend, **how)

    def step(self, key, value, query, scale, lengths, sinks=None):
        assert lengths == "of the graph"
        return self.kernel.attend(self.reader.call(query, NewTokens(key, value), scale, sinks=sinks))

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(FoldedLayer, "static_step", step)
    return counted


def owned(model, ids):
    cache = kvfold.fold(model, "kivi:sink=4,recent=16")
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for layer in cache.folded:
        layer.static = "of the graph"
    return cache


def step(model, cache, ids, at):
    with torch.no_grad():
        ids = ids.contiguous()
        return compiled.run(model, cache, ids, torch.full_like(ids, at))


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind[0].__name__)
def test_layers_share_one_piece_and_a_step_equals_a_step(kind, traced):
    """Every layer, a second cache and a second prompt take what is there; another batch size does not."""
    model = build(*kind, num_hidden_layers=3)
    for batch, length, pieces in ((2, 60, 1), (2, 90, 1), (1, 60, 2)):
        ids = prompt(batch, length)
        cache, plain = owned(model, ids), kvfold.fold(model, "kivi:sink=4,recent=16")
        with torch.no_grad():
            model(ids, past_key_values=plain, use_cache=True)
            want = model(ids[:, :1], past_key_values=plain, use_cache=True).logits
        got = step(model, cache, ids[:, :1], length)
        assert sorted(traced) == 2 * pieces * [0] + pieces * [1]  # rotations, a norm, a layer
        assert got.shape == want.shape and (got - want).norm() < 1e-5 * want.norm()
    assert model.config._attn_implementation == "kvfold"


def test_many_batch_sizes_are_compiled(traced):
    """Dynamo allows eight programs for one function; each model and batch size has a function of its own."""
    model = llama(num_hidden_layers=1)
    for batch in range(1, 10):
        ids = prompt(batch, 60)
        step(model, owned(model, ids), ids[:, :1], 60)
    assert sum(traced) == 9


def test_what_cannot_be_traced_is_refused_by_name(traced):
    model, ids = llama(), prompt(1, 60)

    class Breaks(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x

    model.model.layers[1].input_layernorm = Breaks()
    cache = owned(model, ids)
    with pytest.raises(UnsupportedModelError, match=r"torch\.compile cannot take a layer of LlamaForCausalLM"):
        step(model, cache, ids[:, :1], 60)
    assert model.config._attn_implementation == "kvfold" and not compiled._running


def test_a_forward_of_somebody_else_is_refused_before_anything_is_captured():
    model, ids = llama(), prompt(1, 60)
    cache = kvfold.fold(model, "kivi")
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match=r"stands in place of LlamaForCausalLM\.forward"):
        graph.DecodeGraph(model, cache, 4, compile=True)
    del model.forward
    with graph.decoding(model, cache, 4, compile=True):  # kvfold's own stands in place of it there
        compiled.check(model)


def test_layers_in_another_order_than_the_cache_are_refused():
    model = llama()
    kvfold.fold(model, "kivi")
    assert compiled.pieces(model) == list(model.model.layers)
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    with pytest.raises(UnsupportedModelError, match="no list of layers in the cache's order"):
        compiled.pieces(model)


@pytest.mark.parametrize("compile", [False, True])
def test_decoding_hands_on_that_a_step_is_compiled(compile, monkeypatch):
    made = []

    class Seen(Steps):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self.compile)

    monkeypatch.setattr(graph, "DecodeGraph", Seen)
    model, ids = llama(), prompt(1, 60)
    cache = kvfold.fold(model, "kivi:sink=4,recent=16")
    with graph.decoding(model, cache, 9, compile=compile) as steps:
        model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert made == [compile]
    assert str(steps) == f"8 tokens decoded in a {'compiled ' if compile else ''}CUDA graph"


def test_compiling_a_model_is_said_once_and_is_no_part_of_a_speed(traced, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "compiling", listener := Compiling())
    model, spent = llama(), [0.0]
    with caplog.at_level(logging.WARNING, "kvfold"):
        for batch, new in ((1, True), (1, False), (2, True)):
            ids = prompt(batch, 60)
            cache, begun = owned(model, ids), time.perf_counter()
            step(model, cache, ids[:, :1], 60)
            wall = time.perf_counter() - begun
            took = listener.seconds - spent[-1]
            assert wall > took > 0 if new else took == 0
            spent.append(listener.seconds)
    assert [record.getMessage()[:37] for record in caplog.records] == ["kvfold: compiling the model's layers,"]


def test_kernels_that_are_compiled_with_a_model_count_once(monkeypatch):
    ticks = iter([10.0, 25.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    listener = Compiling()
    listener.seconds = 3.0
    with listener.model():
        listener.seconds += 4.0  # as a kernel of kvfold's does
    assert listener.seconds == 18.0
