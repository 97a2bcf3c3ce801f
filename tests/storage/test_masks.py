"""Masks of calls on a cache that holds tokens, and who reads the cache."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import kvfold
from cache_case import small, step
from helpers import (
    dynamic,
    llama,
    prompt,
)
from kvfold import errors
from kvfold.engines.transformers import names
from kvfold.errors import CacheStateError, KVFoldWarning

pytestmark = [pytest.mark.targets, pytest.mark.takes_turns]


@pytest.mark.parametrize("tokens_then", [1, 30])
def test_a_mask_that_later_hides_cached_tokens_is_refused(tokens_then):
    model, ids = llama(), prompt(2, 90)
    cache = kvfold.fold(model, small("kivi"))
    step(model, cache, ids, 0, 60)
    mask = torch.ones_like(ids)[:, : 60 + tokens_then]
    mask[1, :30] = 0
    with pytest.raises(CacheStateError, match="hides a token that the cache holds, in column 0 of sequence 1"):
        step(model, cache, ids, 60, 60 + tokens_then, attention_mask=mask)
    mask[1] = 1
    want = step(model, whole := kvfold.fold(model, small("kivi")), ids, 0, 60)
    want = step(model, whole, ids, 60, 60 + tokens_then)
    assert torch.equal(step(model, cache, ids, 60, 60 + tokens_then, attention_mask=mask), want)


def test_a_mask_that_later_shows_padding_is_refused():
    model, ids = llama(), prompt(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    for first in (60, 10):
        cache = kvfold.fold(model, "kivi")
        step(model, cache, ids, 0, first, attention_mask=mask[:, :first])
        with pytest.raises(CacheStateError, match="shows what was padding, in column 0 of sequence 1"):
            step(model, cache, ids, first, 61, attention_mask=torch.ones_like(ids)[:, :61])
        step(model, cache, ids, first, 61, attention_mask=mask[:, :61])
        for of in cache.folded:
            assert of.lens == [61, 31]


def test_the_first_step_after_a_longer_call_looks_at_the_mask_on_every_device(monkeypatch):
    """Where to look costs a wait, once a turn is what it may cost."""
    model, ids = llama(), prompt(1, 90)
    cache = kvfold.fold(model, "kivi")
    step(model, cache, ids, 0, 60)
    looked = []
    for of in cache.folded:
        monkeypatch.setattr(of, "device", SimpleNamespace(type="elsewhere"))
        monkeypatch.setattr(of, "check_mask", lambda mask: looked.append(mask.shape[1]))
    ones = torch.ones(1, 100, dtype=torch.bool)
    for of in cache.folded:
        assert of.new_columns(ones, 1) is None
        of.columns.newest = 1
        assert of.new_columns(ones, 1) is None
    assert looked == [100, 100]


# ---- who reads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("how", ["unfold", "sdpa", "eager"])
def test_other_attention_is_refused_before_logits_are_returned(layers, how):
    model, ids = llama(num_hidden_layers=layers), prompt(1, 90)
    cache, whole = (kvfold.fold(model, small("kivi")) for _ in range(2))
    for of in (cache, whole):
        step(model, of, ids, 0, 60)
    kvfold.unfold(model) if how == "unfold" else model.set_attn_implementation(how)
    for _ in range(2):
        with pytest.raises(CacheStateError, match="did not attend through kvfold"):
            step(model, cache, ids, 60, 90)
    kvfold.fold(model, "kivi")
    assert torch.equal(step(model, cache, ids, 60, 90), step(model, whole, ids, 60, 90))


def test_a_folded_model_without_its_cache_says_so_once(monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    model, ids = llama(), prompt(1, 40)
    kvfold.fold(model, "kivi")
    with torch.no_grad(), pytest.warns(KVFoldWarning, match=f"nothing is folded.*{names.CACHE}=") as said:
        for _ in range(2):
            model(ids)
            model(ids, **names.passing(model, dynamic(model)))
    assert len(said) == 1
    kvfold.unfold(model)
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, dynamic(model), ids, 0, 40)
        cache = kvfold.fold(model, "kivi")
        step(model, cache, ids, 0, 40)


@pytest.mark.parametrize("tokens", [103, 110, 153, 199, 203, 204])
def test_generate_with_a_prompt_no_longer_than_the_cache_is_refused(tokens):
    """It passes on the tokens from ``held - tokens`` on, which the cache holds already."""
    model, ids = llama(), prompt(1, 240)
    cache = kvfold.fold(model, "kivi")
    step(model, cache, ids, 0, 204)
    with pytest.raises(CacheStateError, match=f"input_ids: .* {tokens} tokens.* the 204 that the cache holds"):
        model.generate(ids[:, :tokens], past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == 204
    out = model.generate(ids[:, :205], past_key_values=cache, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    whole = kvfold.fold(model, "kivi")
    step(model, whole, ids, 0, 204)
    assert torch.equal(step(model, whole, ids, 204, 205)[:, -1].argmax(-1), out[:, 205])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_key_value_heads": 4}, "layer 0 was folded for 2 heads of 64 channels, the model passes 4 of 64"),
        ({"num_hidden_layers": 3}, "has 2 layers, the model passes layer 2"),
    ],
)
def test_a_cache_meets_a_model_of_another_shape(options, message):
    model, other, ids = llama(), llama(**options), prompt(1, 80)
    cache = kvfold.fold(model, "kivi")
    kvfold.fold(other, "kivi")
    with pytest.raises(CacheStateError, match=f"{message}.*kvfold.fold\\(model, method\\)"):
        step(other, cache, ids, 0, 60)


def test_a_cache_meets_a_model_of_fewer_layers():
    model, other, ids = llama(num_hidden_layers=3), llama(num_hidden_layers=2), prompt(1, 80)
    cache = kvfold.fold(model, "kivi")
    kvfold.fold(other, "kivi")
    step(other, cache, ids, 0, 60)
    with pytest.warns(KVFoldWarning, match="the model has fewer layers than the cache"):
        step(other, cache, ids, 60, 61)
