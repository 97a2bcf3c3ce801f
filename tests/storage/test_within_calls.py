"""What a cache's methods do within a call of the model: they are right, or the call is refused."""

import copy
import warnings

import pytest
import torch

import kvfold
from cache_case import step
from helpers import assert_same_content, llama, prompt
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.errors import CacheStateError, KVFoldWarning

SMALL = "kivi:sink=0,recent=8"


def hooked(module: torch.nn.Module, cache: FoldedCache, method, times: int = 1):
    """Have ``method(cache)`` be called before ``module`` runs, ``times`` times; returns what it gave, as a list."""
    found = []

    def before(*_):
        if len(found) < times:
            found.append(method(cache))

    module.register_forward_pre_hook(before)
    return found


def places(model) -> list[torch.nn.Module]:
    """Before any layer has tokens, between layers, after one layer's attention, in the last one."""
    first, last = model.model.layers[0], model.model.layers[-1]
    return [first, first.mlp, last, last.mlp]


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("method", ["none", SMALL, "squat:sink=0,recent=8"])
def test_a_cache_that_is_sent_to_where_it_lies_loses_nothing(method, where):
    """Hooks of accelerate's send all that has ``to`` where a module computes, before each module."""
    model, ids = llama(num_hidden_layers=3), prompt(2, 140)
    cache, whole = (kvfold.fold(model, method) for _ in range(2))
    expected = [step(model, whole, ids, a, b) for a, b in ((0, 100), (100, 101), (101, 140))]
    hooked(places(model)[where], cache, lambda of: of.to("cpu"), times=99)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVFoldWarning)
        for (a, b), right in zip(((0, 100), (100, 101), (101, 140)), expected, strict=True):
            assert torch.equal(step(model, cache, ids, a, b), right)
            assert cache.get_seq_length() == b
    for one, other in zip(cache.folded, whole.folded, strict=True):
        assert_same_content(one, other)


@pytest.mark.parametrize("method", ["none", SMALL])
def test_models_that_accelerate_dispatches_decode_the_same_tokens(method, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids = llama(num_hidden_layers=3), prompt(1, 40)

    def generated(of) -> list[int]:
        cache = kvfold.fold(of, method)
        out = of.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False, eos_token_id=None)
        assert cache.get_seq_length() == 69
        return out[0, 40:].tolist()

    expected = generated(model)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.rotary_emb": "cpu", "model.norm": "cpu"}
    places |= {"model.layers.1": "cpu", "model.layers.2": "cpu", "lm_head": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVFoldWarning)
        assert generated(accelerate.dispatch_model(model, places, offload_dir=str(tmp_path))) == expected


@pytest.mark.parametrize("method", ["none", "squat:sink=0,recent=8"])
def test_a_call_moves_with_its_cache(method):
    """Onto a device without memory, where all that can be seen is that nothing stays behind."""
    model, ids = llama(num_hidden_layers=3), prompt(2, 140)
    cache = kvfold.fold(model, method)
    step(model, cache, ids, 0, 100)
    hooked(model.model.layers[1], cache, lambda of: of.to("meta"))
    with pytest.raises(CacheStateError, match=r"layer 1 lies on meta, the model passes tensors on cpu"):
        step(model, cache, ids, 100, 101)
    assert cache.get_seq_length() == 100
    with pytest.warns(KVFoldWarning, match="it was taken back"):
        cache.crop(0)
    held = [t for layer in cache.folded for some in layer.tensors().values() for t in some]
    assert held and all(t.is_meta for t in held) and cache.folded[0].lens == [100, 100]


@pytest.mark.parametrize("where", [1, 2])
def test_a_copy_within_a_call_holds_the_calls_before_it(where):
    model, ids = llama(num_hidden_layers=3), prompt(2, 140)
    cache, before, whole = (kvfold.fold(model, SMALL) for _ in range(3))
    for of in (cache, before):
        step(model, of, ids, 0, 100)
    step(model, whole, ids, 0, 100)
    expected = step(model, whole, ids, 100, 140)
    found = hooked(places(model)[where], cache, copy.deepcopy)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVFoldWarning)
        assert torch.equal(step(model, cache, ids, 100, 140), expected)
        twin = found.pop()
        assert cache.get_seq_length() == 140 and twin.get_seq_length() == 100
        assert torch.equal(step(model, twin, ids, 100, 140), expected)


@pytest.mark.parametrize("length", [0, 100])
def test_sizes_are_told_within_a_call(length):
    model, ids = llama(num_hidden_layers=3), prompt(1, 140)
    cache, whole = (kvfold.fold(model, SMALL) for _ in range(2))
    if length:
        step(model, cache, ids, 0, length)
        step(model, whole, ids, 0, length)
    found = hooked(
        model.model.layers[1],
        cache,
        lambda of: (of.nbytes(), of.full_nbytes(), of.effective_bits(), of.get_seq_length()),
    )
    assert torch.equal(step(model, cache, ids, length, 140), step(model, whole, ids, length, 140))
    assert found[0][0]["total"] > 0 and found[0][3] == length


CHANGES = {
    "save()": lambda of, folder: of.save(folder / "cache.safetensors"),
    "crop()": lambda of, _: of.crop(-1),
    "reset()": lambda of, _: of.reset(),
    "reorder_cache()": lambda of, _: of.reorder_cache(torch.tensor([1, 0])),
    "batch_repeat_interleave()": lambda of, _: of.batch_repeat_interleave(1),
    "batch_select_indices()": lambda of, _: of.batch_select_indices(torch.tensor([1, 0])),
    "activate_past_recording()": lambda of, _: of.activate_past_recording(),
}


@pytest.mark.filterwarnings("ignore:kvfold")
@pytest.mark.parametrize("where", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_was_taken_back_does_not_go_on(name, where, tmp_path):
    """What the method did to the calls before stands; the call under way is refused at its next layer, by the method's name."""
    model, ids = llama(num_hidden_layers=3), prompt(2, 140)
    cache, whole = (kvfold.fold(model, SMALL) for _ in range(2))
    for of in (cache, whole):
        step(model, of, ids, 0, 100)
    hooked(places(model)[where], cache, lambda of: CHANGES[name](of, tmp_path))
    with pytest.raises(
        CacheStateError, match=rf"{name[:-2]}\(\) was called within a call of the model, before layer [12]"
    ):
        step(model, cache, ids, 100, 140)
    CHANGES[name](whole, tmp_path)
    at = whole.get_seq_length()
    assert cache.get_seq_length() == at
    assert torch.equal(step(model, cache, ids, at, 140), step(model, whole, ids, at, 140))


@pytest.mark.filterwarnings("ignore:kvfold")
@pytest.mark.parametrize("method", [lambda of: of.crop(-1), lambda of: of.reset(), lambda of: of.to("meta")])
def test_keys_that_were_taken_back_on_their_way_are_not_attended_to(method):
    """Between a layer's update and its attention."""
    model, ids = llama(), prompt(1, 60)
    cache = kvfold.fold(model, SMALL)
    step(model, cache, ids, 0, 40)
    of = cache.folded[0]
    real = of.update

    def update(*args, **given):
        found = real(*args, **given)
        method(cache)
        return found

    of.update = update
    with pytest.raises(CacheStateError, match="keys of layer 0 were taken back before they were attended to"):
        step(model, cache, ids, 40, 60)


def test_a_cache_is_not_filled_by_hand():
    model, ids = llama(), prompt(1, 40)
    cache = kvfold.fold(model, SMALL)
    keys = torch.randn(1, 2, 40, 64)
    cache.update(keys, keys, 0)
    with pytest.raises(
        CacheStateError, match=r"layer 0: the keys that update\(\) was given .* neither update\(\) by hand"
    ):
        cache.update(keys, keys, 1)
    assert cache.get_seq_length() == 0
    step(model, cache, ids, 0, 40)
    assert cache.get_seq_length() == 40
