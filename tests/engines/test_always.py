"""Models that make folded caches by themselves: every call that would make a cache, no other, and an end to it."""

import copy
import pickle
import threading
import time

import pytest
import torch
from transformers import DynamicCache, StaticCache, pipeline

import kvfold
from helpers import dynamic, llama, logits, prompt
from kvfold.engines.transformers import names
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.errors import MethodError, UnsupportedModelError
from tiny_model import byte_tokenizer, tiny_llama

NEW = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
METHOD = "fold:bits=2,sink=0,recent=32"


@pytest.fixture
def model():
    return llama()


@torch.no_grad()
def kinds(model, **options) -> type:
    return type(model(prompt(1, 40), **options).past_key_values)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "return-sequences": {"do_sample": True, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate_makes_the_cache_that_would_have_been_passed(model, mode):
    ids = prompt(1, 150)
    options = {**NEW, **MODES[mode], "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
    cache = kvfold.fold(model, METHOD)
    torch.manual_seed(0)
    expected = model.generate(ids, past_key_values=cache, **options).sequences
    kvfold.fold(model, METHOD, always=True)
    for _ in range(2):  # every call has a cache of its own
        torch.manual_seed(0)
        out = model.generate(ids, **options)
        assert torch.equal(out.sequences, expected)
        assert isinstance(out.past_key_values, FoldedCache) and str(out.past_key_values.method) == METHOD
        assert max(out.past_key_values.folded[0].packed) >= 96


def test_forward_makes_a_cache_where_the_model_would_and_nowhere_else(model):
    own = kinds(model)
    kvfold.fold(model, METHOD, always=True, max_length=640)
    assert kinds(model) is FoldedCache and own is DynamicCache
    assert kinds(model, use_cache=True) is FoldedCache
    assert kinds(model, past_key_values=None) is FoldedCache
    assert kinds(model, use_cache=False) is type(None)
    assert kinds(model, past_key_values=dynamic(model)) is DynamicCache
    other = kvfold.fold(model, "kivi")
    with torch.no_grad():
        assert model(prompt(1, 40), past_key_values=other).past_key_values is other
        assert model.model(prompt(1, 40)).past_key_values.__class__ is DynamicCache  # the part was not asked
        out = model(prompt(1, 300), None, None, None)
        assert isinstance(out.past_key_values, FoldedCache)
        assert out.past_key_values.folded[0].slabs[0].blocks >= 600 // 32
        as_tuple = model(prompt(1, 40), return_dict=False)
    assert any(isinstance(part, FoldedCache) for part in as_tuple)
    model.config.use_cache = False
    assert kinds(model) is type(None) and kinds(model, use_cache=True) is FoldedCache


def test_calls_without_a_cache_are_exact_and_training_makes_none(model):
    ids = prompt(2, 60)
    expected = model(ids, labels=ids).loss
    kvfold.fold(model, METHOD, always=True)
    assert torch.allclose(model(ids, labels=ids).loss, expected, rtol=1e-5)
    model.train()
    out = model(ids, labels=ids)
    assert not isinstance(out.past_key_values, FoldedCache)
    out.loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_generate_in_train_mode_makes_none_and_a_cache_that_is_passed_takes_no_dropout(recwarn, monkeypatch):
    monkeypatch.setattr("kvfold.errors._warned", set())
    model, ids = llama(attention_dropout=0.3).train(), prompt(1, 60)
    options = {**NEW, "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
    torch.manual_seed(0)
    expected = model.generate(ids, **options).sequences
    cache = kvfold.fold(model, METHOD, always=True)
    torch.manual_seed(0)
    out = model.generate(ids, **options)
    assert torch.equal(out.sequences, expected) and type(out.past_key_values) is DynamicCache
    assert [str(w.message) for w in recwarn if "kvfold" in str(w.message)] == [
        "kvfold: generate in train mode makes no folded cache; call model.eval(), or pass a cache"
    ]
    with pytest.raises(
        UnsupportedModelError, match=r"attention with dropout=0.3 in train mode; allowed: model.eval\(\)"
    ):
        model.generate(ids, past_key_values=cache, **options)
    assert isinstance(model.eval().generate(ids, **options).past_key_values, FoldedCache)


def test_turns_go_on_from_the_cache_that_a_call_made(model):
    ids = prompt(1, 300)
    expected = logits(model, kvfold.fold(model, METHOD), ids, [200, 100])
    kvfold.fold(model, METHOD, always=True)
    with torch.no_grad():
        first = model(ids[:, :200])
        second = model(ids[:, 200:], past_key_values=first.past_key_values)
    assert torch.equal(second.logits, expected[:, 200:])


def test_a_pipeline_needs_no_word_of_it():
    model, tokenizer = tiny_llama(), byte_tokenizer()
    text = "The quick brown fox jumps over the lazy dog. " * 5
    run = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 24, "do_sample": False}
    with kvfold.folding(model, "none"):
        same = run(text, **options)
    assert same == run(text, **options)
    seen = []
    with kvfold.folding(model, METHOD):
        handle = model.register_forward_pre_hook(lambda m, a, k: seen.append(names.given(k)), with_kwargs=True)
        run([text, "Another one. " + text], batch_size=2, **options)
        chat = run([{"role": "user", "content": text}], **options)
        handle.remove()
    assert all(isinstance(cache, FoldedCache) for cache in seen) and len({id(cache) for cache in seen}) == 2
    assert chat[0]["generated_text"][-1]["role"] == "assistant"
    assert min(seen[0].folded[0].packed) > 64


def test_an_assistant_and_its_model_may_both_be_folded(model):
    ids = prompt(1, 150)
    options = {**NEW, "attention_mask": torch.ones_like(ids)}
    assistant = llama(num_hidden_layers=1)
    passed = kvfold.fold(model, METHOD)
    expected = model.generate(ids, assistant_model=assistant, past_key_values=passed, **options)
    kvfold.fold(model, METHOD, always=True)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)
    kvfold.fold(assistant, METHOD, always=True)
    assert model.generate(ids, assistant_model=assistant, **options).shape == expected.shape
    kvfold.fold(model, "none", always=True)
    greedy = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), greedy)


def test_another_kind_of_cache_is_refused_by_name_or_honoured(model, recwarn):
    ids = prompt(1, 60)
    options = {**NEW, "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
    kvfold.fold(model, METHOD, always=True)
    for kind in ("static", "dynamic", "offloaded", "quantized"):
        with pytest.raises(
            UnsupportedModelError, match=f"cache_implementation: '{kind}' is asked for.*leave it out.*unfold"
        ):
            model.generate(ids, cache_implementation=kind, **options)
    static = StaticCache(model.config, max_cache_len=90)
    assert model.generate(ids, past_key_values=static, **options).past_key_values is static
    assert model.generate(ids, use_cache=False, **options).past_key_values is None
    model.generation_config.cache_implementation = "static"
    assert isinstance(model.generate(ids, **options).past_key_values, FoldedCache)
    assert any(
        "takes the place of the generation config's cache_implementation='static'" in str(w.message) for w in recwarn
    )
    assert model.generation_config.cache_implementation == "static"


def test_unfold_ends_it(model):
    before = dict(model.__dict__)
    kvfold.fold(model, METHOD, always=True)
    kvfold.fold(model, "kivi", always=True)  # the newest wish counts
    assert str(model(prompt(1, 40)).past_key_values.method) == "kivi"
    kvfold.unfold(model)
    assert kinds(model) is DynamicCache
    assert model.__dict__.keys() == before.keys() and not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_a_copy_makes_its_own_caches_and_ends_alone(model):
    kvfold.fold(model, METHOD, always=True)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.zero_()
    ids = prompt(1, 40)
    options = {**NEW, "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
    out = twin.generate(ids, **options)
    assert out.past_key_values.model is twin
    third = pickle.loads(pickle.dumps(twin))
    assert (
        third.generate(ids, **options).past_key_values.model is third
        and not out.past_key_values.folded[0].sink.keys.any()
    )
    kvfold.unfold(twin)
    assert kinds(third) is FoldedCache
    assert kinds(twin) is DynamicCache and kinds(model) is FoldedCache
    wrapped = torch.nn.ModuleDict({"inner": model})
    kvfold.unfold(wrapped)
    assert kinds(model) is DynamicCache


class Wrapper(torch.nn.Module):
    """As adapters wrap a model: its attributes show through, and its forward takes anything."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_a_wrapped_model_makes_them_too(model):
    wrapper, ids = Wrapper(model), prompt(1, 60)
    options = {**NEW, "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
    with kvfold.folding(wrapper, METHOD):
        assert kinds(wrapper) is FoldedCache and kinds(model) is FoldedCache
        assert isinstance(wrapper.generate(ids, **options).past_key_values, FoldedCache)
        with kvfold.folding(model, "kivi"):
            pass
        assert str(wrapper(ids).past_key_values.method) == METHOD
    assert kinds(wrapper) is DynamicCache


def test_a_with_block_leaves_the_model_as_it_was(model):
    with kvfold.folding(model, METHOD) as same:
        assert same is model and kinds(model) is FoldedCache
        with kvfold.folding(model, "kivi"):
            assert str(model(prompt(1, 40)).past_key_values.method) == "kivi"
        assert str(model(prompt(1, 40)).past_key_values.method) == METHOD
    assert kinds(model) is DynamicCache and model.config._attn_implementation == "sdpa"
    cache = kvfold.fold(model, "squat")
    with pytest.raises(RuntimeError, match="stop"), kvfold.folding(model, METHOD):
        raise RuntimeError("stop")
    assert kinds(model) is DynamicCache
    logits(model, cache, prompt(1, 40))  # still folded
    with pytest.raises(MethodError), kvfold.folding(model, "nonsense"):
        pass
    assert kinds(model, past_key_values=None) is DynamicCache


def test_blocks_that_overlap_each_fold_and_the_last_gives_the_model_back(model):
    def requests(method):
        with kvfold.folding(model, method):
            while True:
                yield str(model(prompt(1, 40)).past_key_values.method)

    first, second, third = requests("kivi"), requests(METHOD), requests("none")
    assert [next(first), next(second), next(third)] == ["kivi", METHOD, "none"]
    first.close()
    assert [next(third), next(second)] == ["none", "none"]  # of one thread: the newest counts
    third.close()
    assert next(second) == METHOD and kinds(model) is FoldedCache
    second.close()
    assert kinds(model) is DynamicCache and model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_blocks_in_threads_make_caches_by_their_own_methods(model):
    methods = ["kivi", METHOD, "none", "fold:bits=4"]
    together, found = threading.Barrier(len(methods)), {}

    def request(method, turn):
        with kvfold.folding(model, method):
            together.wait(30)
            with torch.no_grad():
                out = model.generate(prompt(1, 60), **NEW, return_dict_in_generate=True)
            found[method] = str(out.past_key_values.method)
            time.sleep(0.02 * turn)

    threads = [threading.Thread(target=request, args=(method, turn)) for turn, method in enumerate(methods)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {method: method for method in methods}
    assert kinds(model) is DynamicCache and model.config._attn_implementation == "sdpa"


def test_a_worker_of_a_block_and_what_is_folded_meanwhile(model):
    found = []
    with kvfold.folding(model, METHOD):
        worker = threading.Thread(target=lambda: found.append(kinds(model)))
        worker.start()
        worker.join()
        cache = kvfold.fold(model, "kivi")
    assert found == [FoldedCache] and kinds(model) is DynamicCache
    logits(model, cache, prompt(1, 40))  # a fold within a block outlives it
    kvfold.unfold(model)
    with kvfold.folding(model, METHOD):
        kvfold.fold(model, "kivi", always=True)
    assert str(model(prompt(1, 40)).past_key_values.method) == "kivi"
    with kvfold.folding(model, METHOD):
        kvfold.unfold(model)
        assert kinds(model) is DynamicCache
    assert kinds(model) is DynamicCache and model.config._attn_implementation == "sdpa"


def test_models_of_one_configuration_are_folded_and_unfolded_each_for_itself(model):
    twin, ids = type(model)(model.config).eval(), prompt(1, 40)
    assert twin.config is model.config
    cache = kvfold.fold(model, METHOD)
    kvfold.unfold(twin)
    logits(model, cache, ids)
    with kvfold.folding(twin, METHOD):
        assert kinds(twin) is FoldedCache and kinds(model) is DynamicCache
    assert kinds(twin) is DynamicCache
    logits(model, cache, prompt(1, 40))
    other = kvfold.fold(twin, "kivi")
    kvfold.unfold(model.model)  # a part of it
    logits(twin, other, ids)
    kvfold.unfold(twin)
    assert model.config._attn_implementation == "sdpa"


def test_saved_models_say_nothing_of_it(model, tmp_path):
    kvfold.fold(model, METHOD, always=True)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert kinds(again) is DynamicCache
