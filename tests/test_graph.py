"""Decoding in graphs, as far as it goes without a GPU: who is asked, what is refused, what is put back."""

import pytest
import torch

import kvfold
from helpers import llama, prompt
from kvfold import graph
from kvfold.errors import CacheStateError, UnsupportedModelError


class Steps:
    """In place of :class:`DecodeGraph`: runs the model's own step and keeps count."""

    made = 0

    def __init__(self, model, cache, room):
        self.model, self.cache, self.room, self.steps = model, cache, room, 0
        assert all(graph.is_packed(layer) for layer in cache.folded)
        type(self).made += 1

    def __call__(self, ids):
        assert self.steps < self.room
        self.steps += 1
        return type(self.model).forward(self.model, input_ids=ids, past_key_values=self.cache, use_cache=True).logits

    def finish(self):
        self.cache = None


def generate(model, ids, cache, tokens=60):
    return model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("length", [20, 150])
def test_generate_decodes_in_a_graph_as_soon_as_something_is_packed(length, monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    monkeypatch.setattr(Steps, "made", 0)
    model, ids, method = llama(), prompt(2, length), "kivi:sink=4,recent=16"
    want = generate(model, ids, kvfold.fold(model, method))
    cache = kvfold.fold(model, method)
    with graph.decoding(model, cache, room=60) as steps:
        assert torch.equal(generate(model, ids, cache), want)
    before = max(0, 4 + 16 + 32 - length)  # decoded before a block is due
    assert Steps.made == 1 and steps.replayed == 59 - before and steps.reason is None
    assert str(steps) == f"{59 - before} tokens decoded in a CUDA graph"
    assert "forward" not in model.__dict__


def test_longer_calls_and_other_caches_go_to_the_model(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    cache, other = (kvfold.fold(model, "kivi:recent=16") for _ in range(2))
    with torch.no_grad(), graph.decoding(model, cache, room=9) as steps:
        for cut in (ids[:, :140], ids[:, 140:141], ids[:, 141:148], ids[:, 148:149]):
            want = model(cut, past_key_values=other, use_cache=True).logits
            assert (model(cut, past_key_values=cache, use_cache=True).logits - want).abs().max() < 1e-5
    assert steps.replayed == 2


def test_what_cannot_decode_in_a_graph_is_refused_by_name_or_said():
    model, ids = llama(), prompt(1, 150)
    cache = kvfold.fold(model, "kivi:recent=16")
    with (
        pytest.raises(UnsupportedModelError, match="decode graph: layer 0: its kernel is"),
        graph.decoding(model, cache, 9),
    ):
        generate(model, ids, cache, 9)
    assert "forward" not in model.__dict__
    cache = kvfold.fold(model, "kivi:recent=16")
    with graph.decoding(model, cache, 9, required=False) as steps:
        generate(model, ids, cache, 9)
    assert steps.replayed == 0 and "decoded step by step: decode graph: layer 0: its kernel is" in str(steps)


def test_outputs_that_a_graph_does_not_have_are_refused(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    cache = kvfold.fold(model, "kivi:recent=16")
    with torch.no_grad(), graph.decoding(model, cache, 9):
        model(ids, past_key_values=cache, use_cache=True)
        with pytest.raises(UnsupportedModelError, match="output_hidden_states is not supported"):
            model(ids[:, :1], past_key_values=cache, use_cache=True, output_hidden_states=True)


def test_a_forward_that_was_put_in_place_before_is_put_back():
    model = llama()
    hooked = model.forward
    model.forward = hooked
    with graph.decoding(model, kvfold.fold(model, "kivi"), 9):
        assert model.forward is not hooked
    assert model.forward is hooked


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.crop(-1),
        lambda cache: cache.reset(),
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        lambda cache: cache.activate_past_recording(),
        lambda cache: cache.folded[0].decoded(0),
    ],
    ids=["crop", "reset", "reorder", "repeat", "select", "record", "decoded"],
)
def test_a_cache_that_a_graph_owns_refuses_others(use):
    model, ids = llama(), prompt(1, 150)
    cache = kvfold.fold(model, "kivi:recent=16")
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    owner = graph.StaticLengths(None, None, steps=3)
    for layer in cache.folded:
        layer.static = owner
    assert cache.get_seq_length() == 153
    with pytest.raises(CacheStateError, match="a decode graph owns it"):
        use(cache)
    with torch.no_grad(), pytest.raises(CacheStateError, match="a decode graph owns it"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)
