"""Tokens that are taken back, and batches that are rearranged."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import kvfold
from cache_case import METHODS, cut, step
from helpers import (
    OF_FIRST_PACKING,
    assert_same_content,
    build,
    feed,
    layer,
    left_padding,
    llama,
    packed_fields,
    prompt,
    relative,
    same_bytes,
    tokens,
    until_packed,
)
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.errors import CacheStateError

pytestmark = [pytest.mark.targets, pytest.mark.takes_turns]


@pytest.mark.parametrize("method", METHODS)
def test_a_crop_within_the_recent_window_leaves_no_trace(method):
    count = 350
    of = layer(method)
    least = min(n for n in range(count + 1) if of.packed_length(n) == of.packed_length(count))
    for removed in {1, (count - least) // 2, count - least} - {0}:
        wrong, new = tokens(1, count, seed=1), tokens(1, 400, seed=2)
        for t, right in zip(wrong, new, strict=True):
            t[:, :, : count - removed] = right[:, :, : count - removed]
        first = least if method in OF_FIRST_PACKING else count - removed  # tokens that stay, in the first call
        cropped = feed(layer(method), wrong, [first, count - first] if method in OF_FIRST_PACKING else None)
        cropped.crop(-removed)
        rest = [count - removed - first] if first < count - removed else []
        assert_same_content(cropped, feed(layer(method), cut(new, 0, count - removed), [first, *rest]))
        assert cropped.get_seq_length() == count - removed
        feed(cropped, cut(new, count - removed), start=count - removed)
        assert_same_content(cropped, feed(layer(method), new, [first, 400 - first]))


@pytest.mark.parametrize("in_place", [False, True], ids=["after", "in place"])
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    first=st.sampled_from([20, 150, 220, 255, 290, 500]),
    drafts=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), min_size=3, max_size=6),
)
@example(first=220, drafts=[(1, 0), (36, 36), (1, 0)])  # blocks of the old state are due when the new one's tokens stay
@example(first=20, drafts=[(1, 0), (19, 19), (25, 25), (36, 36), (60, 60)])  # packs first when recording is over
def test_recording_takes_back_the_newest_call_exactly(method, in_place, first, drafts):
    """Speculative decoding: drafts are appended, all but some of their tokens are taken back, and nothing remains, also
    where a draft went over a block's boundary, or over one at which an encoder's state is made. Blocks close all the same."""
    drafts = [(size, min(kept, size)) for size, kept in drafts]
    new, junk = tokens(1, first + 500, seed=first), tokens(1, 400, seed=9)
    speculating, at = layer(method), first
    feed(speculating, cut(new, 0, first))
    speculating.activate_past_recording()
    stayed = [first]
    for size, kept in drafts:
        k, v, q = draft = tuple(
            torch.cat((good[:, :, at : at + kept], bad[:, :, kept:size]), 2)
            for good, bad in zip(new, junk, strict=True)
        )
        assert speculating.packed[0] <= speculating.packed_length(at)
        if in_place and len(speculating.slabs) and all(speculating.slabs.fixed):  # as kernels that write first do
            speculating.append(k, v, q, None, torch.arange(at, at + size, device=k.device)[None], pack=False)
            speculating.pack_due()
        else:
            feed(speculating, draft, start=at)
        assert speculating.packed == [speculating.packed_length(at)]
        speculating.crop(-(size - kept))
        at += kept
        stayed.append(kept)
        assert speculating.lens == [at]
    packed = speculating.packed[0] > 0
    speculating.writer.recording = False
    at += 1
    feed(speculating, cut(new, at - 1, at), start=at - 1)
    stayed = [n for n in (*stayed, 1) if n]
    if not packed:  # what packs first when recording is over takes the statistics of the last call's token as well
        stayed[-2:] = [sum(stayed[-2:])]
    # statistics of the first packing are those of the tokens that stayed
    same = until_packed(method, stayed) if method in OF_FIRST_PACKING else 1
    rest = at - sum(stayed[:same])
    expected = feed(layer(method), cut(new, 0, at), [*stayed[:same], *([rest] if rest else [])])
    assert_same_content(speculating, expected)


@pytest.mark.parametrize("method", METHODS)
def test_recording_from_the_first_token_on(method):
    """A long prompt of which nothing may be packed yet: statistics and states are made later, of the same tokens."""
    new = tokens(1, 1500, seed=12)
    of = layer(method)
    of.activate_past_recording()
    feed(of, cut(new, 0, 1400), [1400])
    assert of.packed == [0]
    feed(of, cut(new, 1400, 1450), start=1400)
    assert of.packed == [of.packed_length(1400)]
    of.writer.recording = False
    feed(of, cut(new, 1450), start=1450)
    assert_same_content(of, feed(layer(method), new, [1400, 100]))


@pytest.mark.parametrize("method", METHODS)
def test_a_crop_into_packed_storage_keeps_what_was_read(method, target):
    """Whole blocks keep their bytes; the rest of the cut block moves to the window with the values it had."""
    of = feed(layer(method), tokens(1, 420))
    before, fields = of.decoded(0), packed_fields(of, 0)
    length = of.method.sink + of.packed[0] - of.block - 11
    of.crop(-(420 - length))
    whole = (length - of.method.sink) // of.block
    assert of.lens == [length] and of.packed == [whole * of.block]
    for old, now in zip(fields, packed_fields(of, 0), strict=True):
        for name in now:
            assert same_bytes(old[name][:, : now[name].shape[1]], now[name])  # blocks, or the pages that hold them
    for old, now in zip(before, of.decoded(0), strict=True):
        off = max(1e-5, torch.finfo(target.dtype).eps)  # of the window that takes them
        assert torch.allclose(old[:, :length], now, rtol=off, atol=off)
    more = tokens(1, 200, seed=7)
    feed(of, more, [50, 1, 149], start=length)
    assert of.lens == [length + 200] and of.packed == [max(of.packed_length(length + 200), whole * of.block)]
    keys, values = of.decoded(0)
    assert keys.isfinite().all() and values.isfinite().all()
    recent = length + 200 - of.method.sink - of.packed[0]
    if recent:
        assert torch.equal(keys[:, -recent:], more[0][0, :, -recent:])


def held(of, row: int = 0) -> torch.Tensor:
    return torch.cat(of.decoded(row), -1)


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_that_is_cut_again_and_again_loses_nothing_after_the_first_time(method, target):
    """Requests that follow one prefix: each is cut off where the prefix ends, within a block that was packed again of what
    was left. A cut further on, and one before it, are others' first."""
    of = feed(layer(method), tokens(1, 300))
    feed(of, tokens(1, 300, seed=1), start=300)
    assert of.method.sink + of.packed[0] > 300
    of.crop(-300)
    once = held(of)
    for turn, count in enumerate((45, 260, 130, 99)):
        feed(of, tokens(1, count, seed=2 + turn), [count - 1, 1], start=300)
        if turn % 2:  # an answer that is asked for once more
            of.crop(-(count - 9))
            feed(of, tokens(1, 150, seed=9), start=309)
            longer = held(of)[:, :309]
            of.crop(-150)
            assert torch.equal(held(of)[:, :300], once)
            feed(of, tokens(1, 140, seed=8), start=309)
            of.crop(-140)
            assert relative(held(of), longer) < 0.6 and of.lens == [309]
            of.crop(-9)
        else:
            of.crop(-count)
        assert torch.equal(held(of), once)
    of.crop(-10)
    shorter, off = held(of), max(1e-5, torch.finfo(target.dtype).eps)  # the window may take tokens of a block before
    assert torch.allclose(shorter, once[:, :290], rtol=off, atol=off)
    feed(of, tokens(1, 150, seed=7), start=290)
    of.crop(-150)
    assert torch.equal(held(of), shorter)


@pytest.mark.parametrize("how", ["batch", "copy", "select", "save", "to"])
@pytest.mark.parametrize("method", ["kivi", "squat_pre", "qjl", "turboquant", "fold"])
def test_what_was_cut_is_remembered_by_sequence_and_goes_along(method, how, tmp_path):
    model, ids = llama(), prompt(3, 420)
    mask = torch.ones_like(ids)
    mask[1, :31] = mask[2, :77] = 0
    cache = kvfold.fold(model, method)
    step(model, cache, ids, 0, 300, attention_mask=mask[:, :300])
    step(model, cache, ids, 300, 420, attention_mask=mask)
    cache.crop(-120)
    once = [[held(of, row) for row in range(3)] for of in cache.folded]
    assert cache.nbytes()["windows"] > sum(t.nbytes for of in cache.folded for t in (*of.sink, *of.ring))
    order = [0, 1, 2]
    if how == "copy":
        cache = copy.deepcopy(cache)
    elif how == "select":
        order = [2, 0]
        cache.batch_select_indices(torch.tensor(order))
    elif how == "save":
        cache.save(tmp_path / "cache.safetensors")
        cache = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    elif how == "to":
        cache.to("cpu").to(ids.device)
    for turn in range(2):
        more = prompt(len(order), 120 + turn)
        whole = torch.cat((mask[order][:, :300], torch.ones_like(more)), 1)
        step(model, cache, torch.cat((ids[order][:, :300], more), 1), 300, whole.shape[1], attention_mask=whole)
        cache.crop(-more.shape[1])
        for of, expected in zip(cache.folded, once, strict=True):
            for at, row in enumerate(order):
                assert torch.equal(held(of, at), expected[row])
    cache.reset()
    assert not any(list(of.writer.cuts.tensors()) for of in cache.folded)


def test_what_is_remembered_of_cuts_is_bounded():
    of = feed(layer("kivi"), tokens(1, 2000))
    for length in range(1900, 100, -37):
        of.crop(length - of.lens[0])
        feed(of, tokens(1, 150), start=length)
        (row,) = of.writer.cuts.rows
        assert len(row) <= 8 and all(keys.shape[1] < of.block for keys, _ in row.values())
    for _ in range(12):  # blocks that stay in the sequence, each cut once
        feed(of, tokens(1, 311), start=of.lens[0])
        of.crop(-183)
    assert len(of.writer.cuts.rows[0]) == 8


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    method=st.sampled_from(METHODS),
    lengths=st.lists(st.integers(1, 330), min_size=2, max_size=3),
    removed=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    more=st.integers(1, 120),
)
def test_crops_of_a_padded_batch_are_those_of_its_sequences(method, lengths, removed, more):
    """Columns are cut, each sequence loses its own tokens of them, and goes on as it would alone."""
    width = max(lengths)
    new, later = tokens(len(lengths), width, seed=width), tokens(len(lengths), more, seed=5)
    offset, valid = left_padding(lengths, width)
    batch = feed(layer(method), new, None, valid, offset=offset)
    alone = [feed(layer(method), tuple(t[row : row + 1, :, width - n :] for t in new)) for row, n in enumerate(lengths)]
    left = width
    for count in removed:
        batch.crop(-count)
        for of in alone:
            of.crop(-count)
        left = max(0, left - count)
    assert batch.get_seq_length() == left
    feed(batch, later, start=left, offset=offset.clamp_max(left))
    for row, of in enumerate(alone):
        part = tuple(t[row : row + 1] for t in later)
        feed(of, part, start=of.lens[0])
        assert_same_content(batch, of, row, 0)


def test_crop_counts_and_refuses():
    of = feed(layer("kivi"), tokens(1, 50))
    with pytest.raises(ValueError, match=r"crop\(3\): pass a negative number"):
        of.crop(3)
    of.crop(0)
    assert of.lens == [50]
    of.crop(-500)
    assert of.lens == [0] and of.get_seq_length() == 0 and of.packed == [0]
    layer("kivi").crop(-3)  # nothing there yet


# ---- batches -------------------------------------------------------------------------------------------------------

REARRANGED = {
    "reorder": (lambda of: of.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda of: of.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "indices": (lambda of: of.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "mask": (lambda of: of.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
}


@pytest.mark.parametrize("how", REARRANGED)
@pytest.mark.parametrize("method", METHODS)
def test_rearranged_batches_hold_the_same_sequences_and_go_on_alone(method, how):
    lengths, width = [330, 150, 245], 330
    new = tokens(3, width, seed=4)
    offset, valid = left_padding(lengths, width)
    of = feed(layer(method), new, [330], valid, offset=offset)
    rearrange, rows = REARRANGED[how]
    rearrange(of)
    assert of.lens == [lengths[row] for row in rows]
    later = tokens(len(rows), 70, seed=6)
    feed(of, later, [1, 69], start=width, offset=offset[rows])
    for at, row in enumerate(rows):
        alone = feed(layer(method), tuple(t[row : row + 1, :, width - lengths[row] :] for t in new))
        feed(alone, tuple(t[at : at + 1] for t in later), start=lengths[row])
        assert_same_content(of, alone, at, 0)


def test_rearranged_past_recording_is_cropped_by_each_sequences_own_columns():
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, 10:20] = False
    of = feed(layer("kivi"), tokens(2, 40), None, valid)
    of.reorder_cache(torch.tensor([1, 1]))
    of.crop(-25)
    assert of.lens == [10, 10]


@pytest.mark.parametrize("method", METHODS)
def test_reset_forgets_everything(method):
    of = feed(layer(method), tokens(3, 350, seed=8))
    of.reset()
    assert (
        of.is_empty
        and of.get_seq_length() == 0
        and not len(of.slabs)
        and not of.following.state
        and not any(of.slabs.shared)
    )
    assert all(not tensors for tensors in of.tensors().values())
    new = tokens(1, 350)
    assert_same_content(feed(of, new), feed(layer(method), new))


@pytest.mark.parametrize("method", METHODS)
def test_a_deep_copy_goes_its_own_way(method):
    new = tokens(1, 420)
    of = feed(layer(method), cut(new, 0, 300))
    twin = copy.deepcopy(of)
    mine = {t.untyped_storage().data_ptr() for ts in of.tensors().values() for t in ts if t.numel()}
    theirs = {t.untyped_storage().data_ptr() for ts in twin.tensors().values() for t in ts if t.numel()}
    assert not mine & theirs
    feed(twin, tokens(1, 90, seed=3), start=300)
    feed(of, cut(new, 300), start=300)
    assert_same_content(of, feed(layer(method), new, [300, 120]))


def sliding():
    kinds = ["full_attention", "sliding_attention"]
    return build(Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=16, layer_types=kinds)


@pytest.mark.cpu_only("a model of both kinds of layers")
def test_a_crop_that_a_sliding_window_cannot_follow_is_refused_before_anything_changes():
    model, ids = sliding(), prompt(1, 60)
    cache = kvfold.fold(model, "none")
    step(model, cache, ids, 0, 40)
    cache.crop(0)
    with pytest.raises(CacheStateError, match=r"crop\(-3\).*windows of layers 1 can lose 0 tokens"):
        cache.crop(-3)
    assert [of.get_seq_length() for of in cache.layers] == [40, 40]
    cache.activate_past_recording()
    step(model, cache, ids, 40, 45)
    with pytest.raises(CacheStateError, match=r"crop\(-6\).*can lose 5 tokens"):
        cache.crop(-6)
    cache.crop(-4)
    got, fresh = step(model, cache, ids, 41, 60), kvfold.fold(model, "none")
    assert relative(got, step(model, fresh, ids, 0, 60)[:, 41:]) < 1e-5


@pytest.mark.cpu_only("a model of both kinds of layers")
def test_when_all_was_cropped_or_forgotten_sliding_windows_take_another_batch():
    model, ids = sliding(), prompt(3, 40)
    expected = step(model, kvfold.fold(model, "none"), ids[:1], 0, 40)
    for length in (10, 30):
        cache = kvfold.fold(model, "none")
        cache.crop(-1)  # of nothing
        step(model, cache, ids, 0, length)
        cache.crop(-length)
        cache.batch_select_indices(torch.tensor([0]))
        assert relative(step(model, cache, ids[:1], 0, 40), expected) < 1e-5
    cache.activate_past_recording()
    cache.reset()
    step(model, cache, ids, 0, 40)
    assert cache.layers[1].keys.shape[2] == 15


def test_sequences_are_not_repeated_less_than_once():
    of = feed(layer("kivi"), tokens(2, 50))
    cache = FoldedCache([of], of.method)
    for repeats in (0, -1):
        with pytest.raises(CacheStateError, match=f"repeats: {repeats}.*allowed: 1 or more"):
            cache.batch_repeat_interleave(repeats)
    assert of.lens == [50, 50]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0, 2])), r"beam_idx: \[0, 2\]: the cache holds 2 sequences"),
        (lambda cache: cache.reorder_cache(torch.tensor([-1, 0])), "allowed: one or more of 0 to 1"),
        (lambda cache: cache.batch_select_indices(torch.tensor([2])), "allowed: one or more of -2 to 1"),
        (lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)), "indices: "),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, False])), "one of 2 or more"),
        (lambda cache: cache.batch_select_indices(torch.tensor([True])), "as many as there are"),
    ],
)
def test_sequences_that_are_not_there_are_refused_before_anything_moves(change, message):
    model = llama()
    cache = kvfold.fold(model, "none")
    with torch.no_grad():
        model(prompt(2, 40), past_key_values=cache)
        before = model(prompt(2, 1), past_key_values=copy.deepcopy(cache)).logits
        with pytest.raises(CacheStateError, match=message):
            change(cache)
        assert torch.equal(model(prompt(2, 1), past_key_values=cache).logits, before)
