"""Decoding in graphs, as far as it goes without a GPU: who is asked, what is refused, what is put back."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import kvfold
from helpers import assert_same_content, llama, prompt
from kvfold import errors
from kvfold.engines.transformers import graph
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import CacheStateError, KVFoldError, KVFoldWarning, UnsupportedModelError
from steps import Steps


def generate(model, ids, cache, tokens=60):
    return model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    "method", ["fold:sink=4,recent=16", "kivi:sink=4,recent=16", "innerq:sink=4,recent=16,paper=true"]
)
@pytest.mark.parametrize("length", [1, 20, 150])
def test_generate_decodes_in_a_graph_from_the_second_token_on(length, method, monkeypatch):
    """Where statistics are those of a whole sequence, as soon as something is packed."""
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    monkeypatch.setattr(Steps, "made", 0)
    model, ids = llama(), prompt(2, length)
    want = generate(model, ids, kvfold.fold(model, method))
    cache = kvfold.fold(model, method)
    with graph.decoding(model, cache, room=60) as steps:
        assert torch.equal(generate(model, ids, cache), want)
    before = max(0, 4 + 16 + 32 - length) if "paper" in method else 0  # decoded before a block is due
    assert Steps.made == 1 and steps.replayed == 59 - before and steps.reason is None
    assert str(steps) == f"{59 - before} tokens decoded in a CUDA graph"
    assert "forward" not in model.__dict__


def test_longer_calls_and_other_caches_go_to_the_model(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    cache, other = (kvfold.fold(model, "kivi:sink=0,recent=16") for _ in range(2))
    with torch.no_grad(), graph.decoding(model, cache, room=9) as steps:
        for cut in (ids[:, :140], ids[:, 140:141], ids[:, 141:148], ids[:, 148:149]):
            want = model(cut, past_key_values=other, use_cache=True).logits
            assert (model(cut, past_key_values=cache, use_cache=True).logits - want).abs().max() < 1e-5
    assert steps.replayed == 2


@pytest.mark.parametrize("method", ["fold", "qjl", "gear", "zipcache", "k=squat+v=turboquant"])
@pytest.mark.parametrize("start", [3, 150])
def test_blocks_that_no_kernel_encodes_are_those_of_steps(method, start, monkeypatch):
    """What a graph's step does on the device is done here by hand: it writes the token to the windows."""
    model, ids = llama(), prompt(2, 400)
    spec = "+".join(f"{part}:sink=5,recent=40" for part in method.split("+"))
    mask = torch.ones(2, start + 130, dtype=torch.long)
    mask[1, : min(20, start - 2)] = 0
    plain, other = (kvfold.fold(model, spec, max_length=400) for _ in range(2))
    with torch.no_grad():
        for cache in (plain, other):
            positions = (mask[:, :start].cumsum(-1) - 1).clamp_min(0)
            model(ids[:, :start], attention_mask=mask[:, :start], position_ids=positions, past_key_values=cache)
    for layer in other.folded:
        layer.following.make_room()
        layer.make_room(130)
        layer.static = SimpleNamespace(before=None, running=True)
    came = {}
    append = FoldedLayer.append

    def seen(layer, key, value, query, *args, **kwargs):
        came[layer.spec.layer_idx] = key.clone(), value.clone(), query.clone()
        return append(layer, key, value, query, *args, **kwargs)

    monkeypatch.setattr(FoldedLayer, "append", seen)
    for step in range(130):
        for layer in other.folded:
            layer.follow_static(step)
        with torch.no_grad():
            position = mask[:, : start + step + 1].sum(-1, keepdim=True) - 1
            model(ids[:, start + step : start + step + 1], position_ids=position, past_key_values=plain)
        for layer in other.folded:
            key, value, query = came[layer.spec.layer_idx]
            for row, length in enumerate(layer.lens):
                at = length + step
                if layer.following.ring is not None:
                    layer.following.ring[row, :, at % layer.following.slots] = query[row, :, 0]
                window, at = (layer.sink, at) if at < 5 else (layer.ring, (at - 5) % layer.ring.slots)
                for held, new in zip(window.pair, (key, value), strict=True):
                    held[row, :, at] = new[row, :, 0]
    for layer in other.folded:
        layer.leave_static(130)
    assert max(plain.folded[0].packed) >= 64 or (method, start) == ("zipcache", 3)  # whose blocks have 128 tokens
    for a, b in zip(plain.folded, other.folded, strict=True):
        assert (a.lens, a.packed, a.columns.count) == (b.lens, b.packed, b.columns.count)
        for row in range(2):
            for x, y in zip(a.decoded(row), b.decoded(row), strict=True):
                assert torch.equal(x, y)


def test_blocks_beyond_their_storage_are_an_error():
    """Steps of a graph for which nobody made room."""
    model, ids = llama(), prompt(1, 120)
    cache = kvfold.fold(model, "kivi:sink=4,recent=16", max_length=110)
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
    (layer, *_) = cache.folded
    layer.static = SimpleNamespace(before=None, running=True)
    layer.sequences.lens[0] += 12
    with pytest.raises(IndexError, match="blocks 2 to 3 of a slab that has 2"):
        layer.follow_static(4)


def test_what_cannot_decode_in_a_graph_is_refused_by_name_or_said():
    model, ids = llama(), prompt(1, 150)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with (
        pytest.raises(UnsupportedModelError, match="decode graph: layer 0: its kernel is"),
        graph.decoding(model, cache, 9),
    ):
        generate(model, ids, cache, 9)
    assert "forward" not in model.__dict__
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with graph.decoding(model, cache, 9, required=False) as steps:
        generate(model, ids, cache, 9)
    assert steps.replayed == 0 and "decoded step by step: decode graph: layer 0: its kernel is" in str(steps)


@pytest.mark.parametrize("room", [0, -1, "9", None, 1.5, True], ids=str)
def test_room_that_is_no_number_of_tokens_is_refused_at_once(room):
    model = llama()
    cache = kvfold.fold(model, "kivi")
    with pytest.raises(KVFoldError, match=r"^room: .* is not allowed; allowed: a number of tokens from 1 on"):
        graph.decoding(model, cache, room).__enter__()
    assert "forward" not in model.__dict__


def test_a_block_without_a_call_on_its_cache_says_so(monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 20)
    cache = kvfold.fold(model, "kivi")
    with pytest.warns(KVFoldWarning, match="no call of this model brought its cache"), graph.decoding(model, cache, 9):
        model.generate(ids, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVFoldWarning)
        with graph.decoding(model, cache, 9, required=False):
            model.generate(ids, max_new_tokens=2)
        with graph.decoding(model, cache, 9):
            generate(model, ids, cache, 2)


def test_outputs_that_a_graph_does_not_have_are_refused(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with torch.no_grad(), graph.decoding(model, cache, 9):
        model(ids, past_key_values=cache, use_cache=True)
        with pytest.raises(UnsupportedModelError, match="output_hidden_states is not supported"):
            model(ids[:, :1], past_key_values=cache, use_cache=True, output_hidden_states=True)


@pytest.mark.parametrize("where", ["a layer", "the head"])
def test_a_model_on_several_devices_is_refused_by_name(where):
    """As ``device_map`` splits one; another kind of device stands for a second GPU."""
    model, ids = llama(), prompt(1, 60)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        if where == "a layer":
            cache.folded[1].device = torch.device("meta")
        else:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"), requires_grad=False)
        with pytest.raises(UnsupportedModelError, match="the model lies on cpu, meta; allowed: one device"):
            graph.DecodeGraph(model, cache, 4)
    assert all(layer.static is None for layer in cache.folded)


def test_a_model_on_several_devices_decodes_step_by_step(monkeypatch):
    model, ids = llama(), prompt(1, 60)
    want = generate(model, ids, kvfold.fold(model, "kivi:sink=0,recent=16"), 8)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    places = {torch.device("cuda", 0), torch.device("cuda", 1)}
    monkeypatch.setattr(graph, "_devices", lambda model, folded: places)
    with graph.decoding(model, cache, room=8, required=False) as steps:
        assert torch.equal(generate(model, ids, cache, 8), want)
    assert steps.replayed == 0 and "the model lies on cuda:0, cuda:1" in steps.reason
    with pytest.raises(UnsupportedModelError, match="cuda:0, cuda:1"), graph.decoding(model, cache, room=8):
        generate(model, torch.cat((want, ids[:, :1]), 1), cache, 8)


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
        lambda cache: cache.effective_bits(),
        lambda cache: cache.full_nbytes(),
    ],
    ids=["crop", "reset", "reorder", "repeat", "select", "record", "decoded", "bits", "bytes"],
)
def test_a_cache_that_a_graph_owns_refuses_others(use):
    model, ids = llama(), prompt(1, 150)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
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


def prefilled(method="kivi:sink=0,recent=16", length=150, batch=1):
    model = llama()
    cache = kvfold.fold(model, method)
    with torch.no_grad():
        model(prompt(batch, length), past_key_values=cache, use_cache=True)
    return model, cache


def lengths(cache):
    return [(layer.static, layer.pending, layer.lens, layer.packed) for layer in cache.folded]


@pytest.mark.parametrize("required", [True, False])
def test_a_capture_that_fails_gives_the_cache_and_the_model_back(required, monkeypatch):
    def fails(self):
        self.cache.folded[0].pending = True
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graph, "why_not", lambda layer: None)
    monkeypatch.setattr(graph.DecodeGraph, "_capture", fails)
    model, cache = prefilled()
    before = lengths(cache)
    with pytest.raises(RuntimeError, match="out of memory"), graph.decoding(model, cache, 9, required):
        model(prompt(1, 1), past_key_values=cache, use_cache=True)
    assert lengths(cache) == before and "forward" not in model.__dict__
    with torch.no_grad():
        model(prompt(1, 1), past_key_values=cache, use_cache=True)


def test_a_warm_up_writes_no_token_but_the_next(monkeypatch):
    """With recent + 31 tokens in the ring there is one free slot; a second token would take the slot of one in use."""
    model, cache = prefilled("kivi:sink=0,recent=32", 32 + 31)
    monkeypatch.setattr(graph, "why_not", lambda layer: None)
    dummy = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {"Stream": lambda: dummy, "current_stream": lambda: dummy, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    seen = []

    def step(self):
        method = self.method
        self.lengths.begin(1, method.sink, method.recent, method.block)
        seen.append((self.lengths.before.total.tolist(), self.positions.tolist()))
        self.lengths.end()
        self.positions.add_(1)

    monkeypatch.setattr(graph.DecodeGraph, "_step", step)
    captured = graph.DecodeGraph(model, cache, 9)
    assert seen == [([63], [[63]])] * len(seen) and len(seen) > 1
    assert captured.lengths.before.total.tolist() == [63] and captured.positions.tolist() == [[63]]


def test_a_graph_needs_a_ring_for_tokens_even_where_none_waits():
    _, cache = prefilled("kivi:sink=0,recent=0", 64)
    layer = cache.folded[0]
    assert layer.packed == [64]
    layer.make_room(9)
    assert layer.ring.slots == layer.ring.base > 0


@pytest.mark.parametrize("method", ["kivi:sink=8,recent=16", "fold:sink=8,recent=16"])
@pytest.mark.parametrize("tokens", [3, 150, 600])
def test_a_graph_finds_room_at_fixed_addresses(method, tokens):
    """However long the prompt was, and however its storage grew: one slab, whole windows, and the same numbers."""
    model, ids = llama(), prompt(2, tokens + 1)
    cache, other = (kvfold.fold(model, method) for _ in range(2))
    for part in ids[:, :tokens].split(100, 1):
        with torch.no_grad():
            for each in (cache, other):
                model(part, past_key_values=each, use_cache=True)
    for layer in cache.folded:
        layer.make_room(500)
        assert len(layer.slabs) == 1 and layer.sink.slots == 8 and layer.ring.slots >= 16 + 32
        assert layer.slabs[0].blocks * 32 >= layer.packed_length(tokens + 500)
    for a, b in zip(cache.folded, other.folded, strict=True):
        assert_same_content(a, b, 1, 1)
    with torch.no_grad():
        want, got = (model(ids[:, tokens:], past_key_values=each, use_cache=True).logits for each in (other, cache))
    assert torch.equal(got, want)
    for a, b in zip(cache.folded, other.folded, strict=True):
        assert_same_content(a, b, 1, 1)


def test_why_a_layer_is_refused():
    model, cache = prefilled()
    layer = cache.folded[0]
    assert "it holds nothing yet" in graph.why_not(kvfold.fold(model, "kivi").folded[0])
    layer.static = graph.StaticLengths(None, None)
    assert graph.why_not(layer) == "another decode graph owns it"
    layer.static = None
    cache.activate_past_recording()
    assert "for a crop" in graph.why_not(layer)


@pytest.mark.parametrize("method", ["innerq:paper=true,recent=32", "squat:paper=true"])
def test_a_sequence_without_statistics_is_not_decoded_in_a_graph(method):
    """Statistics of a whole sequence are there once it packs, and gone with the last of its packed tokens."""
    model, cache = prefilled(method, 63)
    layer = cache.folded[0]
    assert not graph.is_ready(layer)
    with torch.no_grad():
        model(prompt(1, 137), past_key_values=cache, use_cache=True)
    assert graph.is_ready(layer) and layer.packed == [layer.packed_length(200)]
    cache.crop(-200)
    assert layer.packed == [0] and not graph.is_ready(layer)


def test_calls_of_another_batch_are_refused(monkeypatch):
    monkeypatch.setattr(graph, "why_not", lambda layer: None)
    monkeypatch.setattr(graph.DecodeGraph, "_capture", lambda self: None)
    model, cache = prefilled(batch=2)
    with pytest.raises(ValueError, match=r"input_ids \[1, 1\] is not allowed; allowed: \[2, 1\]"):
        graph.DecodeGraph(model, cache, 9)(prompt(1, 1))


def test_positions_are_those_of_the_call(monkeypatch):
    """Of a left-padded batch the model counts columns where it is given no positions, and tokens where it is."""
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(2, 151)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    for given in (False, True):
        position = (mask.cumsum(-1) - 1).clamp_min(0)
        first, second = ({"position_ids": p} if given else {} for p in (position[:, :150], position[:, 150:]))
        results = []
        for graphs in (False, True):
            cache = kvfold.fold(model, "kivi:sink=0,recent=16")
            with torch.no_grad():
                model(ids[:, :150], attention_mask=mask[:, :150], past_key_values=cache, use_cache=True, **first)
                with graph.decoding(model, cache, 9) if graphs else nullcontext() as steps:
                    out = model(ids[:, 150:], past_key_values=cache, use_cache=True, **second).logits
            results.append(out)
        assert steps.replayed == 1 and torch.equal(*results)


def test_tuples_and_ids_by_position(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, cache = prefilled()
    with torch.no_grad(), graph.decoding(model, cache, 9) as steps:
        logits, kept = model(prompt(1, 1), past_key_values=cache, return_dict=False, use_cache=False)
        assert logits.shape[:2] == (1, 1) and kept is cache
    assert steps.replayed == 1


def test_a_prompt_may_ask_for_what_steps_may_not(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    embeds = model.get_input_embeddings()(ids).detach()
    caches = [kvfold.fold(model, "kivi:sink=0,recent=16") for _ in range(2)]
    want = generate(model, ids, caches[0], 9)[:, 150:]
    with graph.decoding(model, caches[1], 9) as steps:
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(inputs_embeds=embeds, past_key_values=caches[1], **options), want)
    assert steps.replayed == 8
    with torch.no_grad(), graph.decoding(model, kvfold.fold(model, "kivi"), 9) as steps:
        assert model(ids, past_key_values=steps.cache, output_hidden_states=True).hidden_states is not None


def test_two_caches_decode_inside_of_each_other(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, first = prefilled()
    own = kvfold.fold(model, "kivi:sink=0,recent=16")
    with torch.no_grad():
        model(prompt(1, 150), past_key_values=own, use_cache=True)
        with graph.decoding(model, first, 9) as outer:
            with graph.decoding(model, own, 9) as inner:
                for cache in (first, own, first):
                    model(prompt(1, 1), past_key_values=cache, use_cache=True)
            model(prompt(1, 1), past_key_values=first, use_cache=True)
    assert (outer.replayed, inner.replayed) == (3, 1) and "forward" not in model.__dict__


def test_sampling_of_several_sequences(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 20, "pad_token_id": 0}
    results = []
    for graphs in (False, True):
        cache = kvfold.fold(model, "kivi:sink=0,recent=16")
        torch.manual_seed(0)
        with graph.decoding(model, cache, 20) if graphs else nullcontext():
            results.append(model.generate(ids, past_key_values=cache, **options))
    assert torch.equal(*results)


def test_beyond_its_room_a_graph_is_refused_or_the_model_goes_on(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    want = generate(model, ids, kvfold.fold(model, "kivi:sink=0,recent=16"), 9)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with graph.decoding(model, cache, room=5, required=False) as steps:
        assert torch.equal(generate(model, ids, cache, 9), want)
    assert steps.replayed == 5 and "room=5" in steps.reason
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with pytest.raises(UnsupportedModelError, match="room=5"), graph.decoding(model, cache, room=5):
        generate(model, ids, cache, 9)


def test_outputs_that_the_configuration_asks_for_are_refused_too(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, ids = llama(), prompt(1, 150)
    model.config.output_hidden_states = True
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with torch.no_grad(), graph.decoding(model, cache, 9):
        assert model(ids, past_key_values=cache, use_cache=True).hidden_states is not None
        with pytest.raises(UnsupportedModelError, match="output_hidden_states is not supported"):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with torch.no_grad(), graph.decoding(model, cache, 9, required=False) as steps:
        for cut in (ids, ids[:, :1]):
            assert model(cut, past_key_values=cache, use_cache=True).hidden_states is not None
    assert steps.replayed == 0


def counted(model, cache, monkeypatch, room=40):
    """A graph whose step, on the host, does to lengths what the captured one does, and nothing else."""
    monkeypatch.setattr(graph, "why_not", lambda layer: None)
    monkeypatch.setattr(graph.DecodeGraph, "_capture", lambda self: None)
    monkeypatch.setattr(FoldedLayer, "_close", lambda *args: None)
    made = graph.DecodeGraph(model, cache, room)
    made.logits = None

    def replay():
        made.lengths.begin(1, made.method.sink, made.method.recent, made.method.block)
        made.lengths.end()
        made.positions.add_(1)

    made.graph = SimpleNamespace(replay=replay)
    return made


def on_device(made):
    of = made.lengths.before
    return [t.tolist() for t in (of.total, of.packed, of.sink, of.recent, made.positions)]


@pytest.mark.parametrize("ran", [False, True], ids=["before it ran", "after it ran"])
@pytest.mark.parametrize("died_at", range(0, 40, 3))
def test_a_step_that_dies_counts_for_nothing(died_at, ran, monkeypatch):
    """Host and device agree again, whether the device ran the step or not, also where it closed a block."""
    (model, cache), (_, whole) = (prefilled("squat:sink=4,recent=16", batch=2) for _ in range(2))
    made, expected = (counted(model, of, monkeypatch) for of in (cache, whole))
    token = prompt(2, 1)
    for step in range(40):
        if step == died_at:
            replay = made.graph.replay

            def dies(replay=replay):
                if ran:
                    replay()
                raise KeyboardInterrupt

            made.graph.replay = dies
            with pytest.raises(KeyboardInterrupt):
                made(token)
            made.graph.replay = replay
        made(token)
        expected(token)
        assert made.steps == expected.steps == step + 1
        assert on_device(made) == on_device(expected)
    for of in (made, expected):
        of.finish()
        of.finish()
    for one, other in zip(cache.folded, whole.folded, strict=True):
        assert one.sequences.snapshot() == other.sequences.snapshot() and one.static is other.static is None
        assert one.columns.snapshot() == other.columns.snapshot()
        assert one.following.kept == other.following.kept and one.lens == [190, 190]


def test_a_step_that_dies_last_is_not_in_the_cache(monkeypatch):
    model, cache = prefilled("kivi:sink=4,recent=16")
    made = counted(model, cache, monkeypatch)
    replay, token = made.graph.replay, prompt(1, 1)
    made(token)

    def dies():
        replay()
        raise KeyboardInterrupt

    made.graph.replay = dies
    with pytest.raises(KeyboardInterrupt):
        made(token)
    assert cache.get_seq_length() == 151
    made.finish()
    assert [of.lens for of in cache.folded] == [[151]] * 2 and cache.get_seq_length() == 151


def test_giving_the_cache_back_survives_an_interrupt(monkeypatch):
    """Half of the layers were given back: the rest follows, and none counts twice."""
    model, cache = prefilled("kivi:sink=4,recent=16")
    token, left = prompt(1, 1), [2]
    own = graph.DecodeGraph.__init__

    def made(self, *args):
        own(self, *args)
        self.graph, self.logits = SimpleNamespace(replay=lambda: None), torch.zeros(1, 1, 96)

    def closing(*args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(graph, "why_not", lambda layer: None)
    monkeypatch.setattr(graph.DecodeGraph, "_capture", lambda self: None)
    monkeypatch.setattr(graph.DecodeGraph, "__init__", made)
    monkeypatch.setattr(FoldedLayer, "_close", closing)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt), graph.decoding(model, cache, 9):
        for _ in range(3):
            model(token, past_key_values=cache, use_cache=True)
    assert [(of.lens, of.columns.count, of.static) for of in cache.folded] == [([153], 153, None)] * 2


def test_a_graph_is_not_made_for_a_mask_that_hides_cached_tokens(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    model, cache = prefilled()
    mask = torch.ones(1, 151, dtype=torch.long)
    mask[0, :30] = 0
    with torch.no_grad(), graph.decoding(model, cache, 9) as steps:
        with pytest.raises(CacheStateError, match="hides a token that the cache holds"):
            model(prompt(1, 1), attention_mask=mask, past_key_values=cache, use_cache=True)
        model(prompt(1, 1), attention_mask=torch.ones_like(mask), past_key_values=cache, use_cache=True)
    assert steps.replayed == 1


def test_a_graph_is_made_of_whole_calls(monkeypatch):
    """A call that died before is taken back first."""
    model, cache = prefilled()

    def die(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(die)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(prompt(1, 20), past_key_values=cache, use_cache=True)
    hook.remove()
    assert [of.lens for of in cache.folded] == [[170], [150]]
    with pytest.warns(KVFoldWarning, match="taken back"):
        made = counted(model, cache, monkeypatch)
    assert made.lengths.before.total.tolist() == [150] and [of.lens for of in cache.folded] == [[150]] * 2
