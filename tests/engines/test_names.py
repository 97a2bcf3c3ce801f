"""Both names of a model's cache: ``past_key_values``, and ``cache`` from Transformers 5.24 on."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import kvfold
from helpers import llama, prompt
from kvfold.engines.transformers import graph, names
from kvfold.engines.transformers.attentions import read
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.errors import UnsupportedModelError
from kvfold.evaluation import decoding, perplexity
from steps import Steps

METHOD = "kivi:sink=4,recent=16"


class New(LlamaForCausalLM):
    """Takes its cache as models of 5.24 do, on every release."""

    def forward(self, input_ids=None, attention_mask=None, cache=None, past_key_values=None, use_cache=None, **kwargs):
        assert past_key_values is None
        given = {names.CACHE: cache, "use_cache": use_cache, "attention_mask": attention_mask, **kwargs}
        return super().forward(input_ids, **given)


class Old(LlamaForCausalLM):
    """Takes its cache as models of before 5.24 do."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None, **kwargs):
        given = {names.CACHE: past_key_values, "use_cache": use_cache, "attention_mask": attention_mask, **kwargs}
        return super().forward(input_ids, **given)


class Passes(LlamaForCausalLM):
    """Says nothing of what it passes on."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def made(kind):
    model = llama()
    model.__class__ = kind
    return model


def test_no_other_module_knows_them():
    """But docstrings, which tell users."""
    found = []
    for path in Path(kvfold.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        told = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
        }
        for node in ast.walk(tree):
            word = getattr(node, "arg", getattr(node, "attr", getattr(node, "value", "")))
            if isinstance(word, str) and "past_key_values" in word and id(node) not in told:
                found.append(path.name)
    assert set(found) == {"names.py"}


def test_the_name_is_the_models_own():
    assert [names.of(made(kind)) for kind in (New, Old, Passes)] == ["cache", "past_key_values", None]
    assert names.of(llama()) == names.CACHE
    assert [next(iter(names.passing(made(kind), 1))) for kind in (New, Old, Passes)] == [
        "cache",
        "past_key_values",
        names.CACHE,
    ]


def test_arguments_hold_the_cache_under_any_name_that_models_take(monkeypatch):
    monkeypatch.setattr(names, "TAKEN", ("cache", "past_key_values"))
    assert names.given({"cache": 1, "past_key_values": None}) == names.given({"past_key_values": 1}) == 1
    assert names.given({"cache": None}) is names.given({}) is None
    assert names.put({"past_key_values": None, "use_cache": True}, 1, "cache") == {"cache": 1, "use_cache": True}
    monkeypatch.setattr(names, "TAKEN", ("past_key_values",))
    assert names.given({"cache": 1}) is None  # models of before 5.24 do not look at it


@pytest.mark.parametrize("kind", [New, Old])
def test_a_model_makes_its_own_caches_whatever_it_calls_them(kind, monkeypatch):
    monkeypatch.setattr(names, "TAKEN", ("cache", "past_key_values"))
    model, ids = made(kind), prompt(1, 40)
    kvfold.fold(model, METHOD, always=True)
    seen = []
    model.model.register_forward_pre_hook(lambda m, args, given: seen.append(names.given(given)), with_kwargs=True)
    with torch.no_grad():
        model(ids)
        model(ids, **{names.of(model): None})
        model(ids, None, None)  # by position
        own = kvfold.fold(model, "none")
        kvfold.fold(model, METHOD, always=True)
        model(ids, **names.passing(model, own))
    assert [isinstance(cache, FoldedCache) for cache in seen] == [True] * 4
    assert seen[3] is own and own not in seen[:3]


def test_a_model_that_takes_no_cache_is_refused():
    with pytest.raises(UnsupportedModelError, match=f"always: Passes takes no {names.CACHE}; allowed: always=False"):
        kvfold.fold(made(Passes), METHOD, always=True)


@pytest.mark.parametrize("kind", [New, Old])
def test_decoding_knows_its_cache_by_any_name(kind, monkeypatch):
    monkeypatch.setattr(names, "TAKEN", ("cache", "past_key_values"))
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    monkeypatch.setattr(graph, "is_ready", lambda layer: True)
    model, ids = made(kind), prompt(1, 60)
    cache = kvfold.fold(model, METHOD)
    with torch.no_grad(), graph.decoding(model, cache, 4, required=False) as steps:
        model(ids, **{names.of(model): cache})
        out = model(ids[:, :1], **{names.of(model): cache})
    assert steps.called and steps.replayed == 1
    assert out[names.CACHE] is cache and out.to_tuple()[1] is cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_attention_is_read_by_either_name(name):
    space = {"torch": torch}
    exec(f"def forward(self, hidden_states, {name}=None):\n    return hidden_states\n", space)  # without a source
    kind = type("Attention", (torch.nn.Module,), {"forward": space["forward"]})
    assert read(kind).stores


def test_our_own_calls_are_not_warned_of():
    model, ids = llama(), prompt(1, 80)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = kvfold.fold(model, METHOD)
        perplexity.prefill(model, ids, 60, cache)
        assert decoding.decode(model, cache, torch.ones(8), 4).tokens
        kvfold.unfold(model)
        kvfold.fold(model, METHOD, always=True)
        model(ids)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
