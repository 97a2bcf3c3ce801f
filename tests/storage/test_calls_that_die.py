"""Calls that die are taken back: a cache goes on as if they had never been."""

from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvfold
from cache_case import small, step, storages
from helpers import (
    assert_same_content,
    build,
    llama,
    prompt,
)
from kvfold.errors import CacheStateError, KVFoldWarning

pytestmark = [pytest.mark.targets, pytest.mark.takes_turns]


FAULTY = ("fold", "squat", "squat_pre", "innerq:mode=hybrid_prefill", "zipcache", "squat:paper=true")


class Dies(Exception):
    """What a test raises in the middle of a call."""


@contextmanager
def dying(module: torch.nn.Module, error: type[BaseException] = Dies):
    """Calls die when they come to ``module``."""

    def die(*_):
        raise error

    hook = module.register_forward_pre_hook(die)
    try:
        with pytest.raises(error):
            yield
    finally:
        hook.remove()


def places(model) -> dict[str, torch.nn.Module]:
    return {
        "the first layer": model.model.layers[0],
        "after the first layer's attention": model.model.layers[0].mlp,
        "the last layer": model.model.layers[-1],
    }


@pytest.mark.parametrize("place", ["the first layer", "after the first layer's attention", "the last layer"])
@pytest.mark.parametrize("method", FAULTY)
def test_a_call_that_dies_counts_for_nothing(method, place, target):
    """In the first call, in a step that closes a block, in a turn over many blocks: a retry, cut otherwise or not, finds
    what was there before."""
    model, ids = llama(), prompt(2, 400)
    cache, whole = (kvfold.fold(model, small(method), max_length=target.max_length) for _ in range(2))
    cuts, at = [60, 12, *[1] * 33, 150, 20], 0
    for count, size in enumerate(cuts):
        expected = step(model, whole, ids, at, at + size)
        dies = count % 3 == 0 or size > 1
        if dies:
            with dying(places(model)[place], (Dies, KeyboardInterrupt)[count % 2]):
                step(model, cache, ids, at, at + size + 30 * (size > 1))
            assert cache.get_seq_length() == at
        changed = dies and place != "the first layer"
        with pytest.warns(KVFoldWarning, match="it was taken back") if changed else nullcontext():
            got = step(model, cache, ids, at, at + size)
        assert torch.equal(got, expected)
        at += size
    for one, other in zip(cache.folded, whole.folded, strict=True):
        for row in range(2):
            assert_same_content(one, other, row, row)


PLACES = (
    "writer._append",
    "writer.take",
    "writer._pack",
    "writer._encode",
    "ring.write",
    "ring.fit",
    "columns.log",
    "sequences.groups",
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_layer_that_dies_while_it_takes_tokens_is_what_it_was(place, nth, monkeypatch, target):
    model, ids = llama(), prompt(3, 300)
    mask = torch.ones_like(ids)
    mask[1, :31] = mask[2, :77] = 0
    cache, whole = (kvfold.fold(model, small("squat"), max_length=target.max_length) for _ in range(2))
    for of in (cache, whole):
        step(model, of, ids, 0, 130, attention_mask=mask[:, :130])
    part, name = place.split(".")
    of, left = getattr(cache.folded[1], part), [nth]
    real = getattr(of, name)

    def interrupted(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(of, name, interrupted)
    with suppress(KeyboardInterrupt):
        step(model, cache, ids, 130, 240, attention_mask=mask[:, :240])
    died = left[0] <= 0
    assert died or nth > 1
    monkeypatch.undo()
    assert cache.get_seq_length() == (130 if died else 240)
    with pytest.warns(KVFoldWarning) if died else nullcontext():
        cache.reorder_cache(torch.tensor([0, 1, 2], device=ids.device))
    if not died:
        cache.crop(-110)
        return
    for of in (cache, whole):
        step(model, of, ids, 130, 300, attention_mask=mask)
    for one, other in zip(cache.folded, whole.folded, strict=True):
        for row in range(3):
            assert_same_content(one, other, row, row)


def test_what_a_snapshot_holds_is_gone_when_the_call_is_over():
    model, ids = llama(), prompt(1, 400)
    cache = kvfold.fold(model, "squat")
    for a, b in ((0, 100), (100, 250), (250, 251), (251, 400)):
        step(model, cache, ids, a, b)
        held = sum(storages(cache, set(), {}).values())
        assert held == cache.nbytes()["total"] - cache.nbytes()["tables"]


def test_a_step_copies_no_window_in_case_it_dies():
    """Also where the step closes a block: the ring has one slot more than what waits."""
    model, ids = llama(), prompt(1, 400)
    cache = kvfold.fold(model, "squat:sink=5,recent=40")
    step(model, cache, ids, 0, 150)
    rings = [(of.ring.pair, of.following.ring) for of in cache.folded]
    for at in range(150, 230):
        step(model, cache, ids, at, at + 1)
    assert cache.folded[0].packed == [160]
    for of, (ring, queries) in zip(cache.folded, rings, strict=True):
        assert of.ring.pair is ring and of.following.ring is queries


@pytest.mark.cpu_only("the layers beside the folded ones are Transformers' own")
def test_layers_that_are_not_folded_go_back_too_or_the_call_is_refused():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"sliding_window": 16, "layer_types": kinds, "num_hidden_layers": 4}
    model, ids = build(Gemma3ForCausalLM, Gemma3TextConfig, **options), prompt(1, 100)
    cache, whole = (kvfold.fold(model, "kivi:sink=0,recent=8") for _ in range(2))
    for a, b in ((0, 50), (50, 51), (51, 100)):
        with dying(model.model.layers[3].mlp):
            step(model, whole, ids, a, b)  # the last layer has its tokens
        with dying(model.model.layers[3]):
            step(model, cache, ids, a, b)
        with pytest.warns(KVFoldWarning):
            got = step(model, cache, ids, a, b)
        assert torch.equal(got, step(model, kvfold.fold(model, "kivi:sink=0,recent=8"), ids, 0, b)[:, a:]) or a
        assert whole.get_seq_length() == cache.get_seq_length() == b
    for one, other in zip(cache.folded, whole.folded, strict=True):
        assert_same_content(one, other)
    stuck = kvfold.fold(model, "kivi:sink=0,recent=8")
    step(model, stuck, ids, 0, 50)

    class Other(DynamicSlidingWindowLayer):
        pass

    stuck.layers[0].__class__ = Other
    with dying(model.model.layers[3]):
        step(model, stuck, ids, 50, 60)
    for _ in range(2):
        with pytest.raises(CacheStateError, match=r"layer 0 \(Other\) cannot go back to the 50 tokens.*reset\(\)"):
            step(model, stuck, ids, 50, 60)
    stuck.reset()
    assert torch.isfinite(step(model, stuck, ids, 0, 50)).all()
