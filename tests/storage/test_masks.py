"""Masks of calls on a cache that holds tokens, and who reads the cache."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import kvfold
from cache_case import small, step
from helpers import (
    assert_same_content,
    dynamic,
    llama,
    prompt,
    relative,
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


ENDS = [4, 9, 12]
"""Real tokens of each sequence's answer; padding follows while others go on."""


def chat(turns: int = 2):
    """Ids and mask [3, columns] of turns of a left-padded batch, each a question of 60 tokens and an answer of up to 12; and
    where the turns begin."""
    ids = prompt(3, 72 * turns)
    mask = torch.ones_like(ids)
    mask[1, :31] = 0
    for turn in range(turns):
        for row, end in enumerate(ENDS):
            mask[row, 72 * turn + 60 + end : 72 * (turn + 1)] = 0
    return ids, mask, range(0, 72 * turns, 72)


def fed(model, cache, ids, mask, start: int, stop: int) -> torch.Tensor:
    """A call whose mask says of its own columns that all are real but for padding on the left, as ``generate`` says."""
    seen = mask[:, :stop].clone()
    begin = start // 72 * 72
    seen[:, begin:] = 1
    if not begin:
        seen[1, :31] = 0
    positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, start:]
    return step(model, cache, ids, start, stop, attention_mask=seen, position_ids=positions)


@pytest.mark.float32("a batch and its rows alone are compared closely")
@pytest.mark.parametrize("method", ["none", "kivi", "fold", "squat_pre", "qjl", "zipcache", "kivi:sink=0,recent=16"])
def test_padding_after_a_sequences_end_is_dropped_where_the_next_turns_mask_hides_it(method):
    """Rows of a batched chat end at different times; each goes on as it would alone."""
    model, (ids, mask, turns) = llama(), chat(4)
    cache = kvfold.fold(model, method)
    alone = [kvfold.fold(model, method) for _ in ENDS]
    held = [0, 0, 0]
    for start in turns[:3]:
        cuts = [(start, start + 60), *((at, at + 1) for at in range(start + 60, start + 72))]
        for a, b in cuts:
            got = fed(model, cache, ids, mask, a, b)
            for row, of in enumerate(alone):
                real = mask[row, a:b].bool()
                if real.any():
                    new = ids[row : row + 1, a:b][:, real]
                    want = step(model, of, new, 0, new.shape[1])
                    held[row] += new.shape[1]
                    assert relative(got[row, real], want[0]) < 1e-3
    fed(model, cache, ids, mask, 216, 240)
    lens = [of.lens for of in cache.folded]
    assert lens == [[n + 24 for n in held]] * 2
    again = torch.ones_like(mask)
    again[1, :31] = 0
    with pytest.raises(CacheStateError, match="shows what was padding, in column 64 of sequence 0"):
        step(model, cache, ids, 240, 260, attention_mask=again[:, :260])
    assert [of.lens for of in cache.folded] == lens


@pytest.mark.parametrize("method", ["none", "kivi:sink=0,recent=0"])
def test_padding_that_was_packed_is_dropped_too(method):
    model, ids = llama(), prompt(2, 240)
    cache, alone = kvfold.fold(model, method), kvfold.fold(model, method)
    step(model, cache, ids, 0, 200)
    mask = torch.ones_like(ids)
    mask[0, 130:200] = 0
    positions = mask.cumsum(-1)[:, 200:] - 1
    got = step(model, cache, ids, 200, 240, attention_mask=mask, position_ids=positions)
    step(model, alone, ids[:1], 0, 200)
    alone.crop(-70)
    want = step(model, alone, ids[:1], 200, 240)
    assert relative(got[:1], want) < 1e-5
    for one, other in zip(cache.folded, alone.folded, strict=True):
        assert one.lens == [170, 240] and one.columns.count == 240
        assert_same_content(one, other)


def test_a_call_that_dies_after_padding_was_dropped_is_as_if_it_had_been_cropped():
    model, ids = llama(num_hidden_layers=3), prompt(2, 150)
    mask = torch.ones_like(ids)
    mask[0, 90:100] = 0
    cache, whole = (kvfold.fold(model, "kivi:sink=0,recent=0") for _ in range(2))
    for of in (cache, whole):
        step(model, of, ids, 0, 100)

    def die(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(die)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache, ids, 100, 150, attention_mask=mask)
    hook.remove()
    assert cache.get_seq_length() == 100
    want = step(model, whole, ids, 100, 150, attention_mask=mask)
    with pytest.warns(KVFoldWarning, match="taken back"):
        assert torch.equal(step(model, cache, ids, 100, 150, attention_mask=mask), want)
    for one, other in zip(cache.folded, whole.folded, strict=True):
        assert one.lens == [140, 150]
        for row in range(2):
            assert_same_content(one, other, row, row)


@pytest.mark.float32("greedy tokens of a batch and of its rows alone are equal")
def test_a_batched_chat_by_generate_answers_as_each_row_alone():
    model = llama()
    ids, mask, _ = chat(1)
    ids, mask = ids[:, :60], mask[:, :60]
    ids = ids.masked_fill(mask == 0, 0)

    class Ends:
        def __call__(self, seen, scores):
            scores[:, :3] = -1e9  # no padding, begin or end by itself
            for row, end in enumerate(ENDS):
                if seen.shape[1] == 60 + end:
                    scores[row], scores[row, 2] = -1e9, 0
            return scores

    def answered(cache, tokens, mask):
        return model.generate(
            tokens,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=13,
            do_sample=False,
            logits_processor=[Ends()],
        )

    cache = kvfold.fold(model, "none")
    out, new = answered(cache, ids, mask), prompt(3, 20, seed=4)
    two = torch.cat((out, new), 1)
    seen = torch.cat((mask, (out[:, 60:] != 0).long(), torch.ones_like(new)), 1)
    got = model.generate(two, attention_mask=seen, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert not bool(seen[0, 65:73].any())
    for row in range(3):
        one = two[row, seen[row].bool()][None]
        want = model.generate(one, past_key_values=kvfold.fold(model, "none"), max_new_tokens=6, do_sample=False)
        assert torch.equal(got[row, -6:], want[0, -6:])


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
