"""Models whose ``generate`` drops its cache where their rotary frequencies change: a folded one holds all tokens."""

import copy
import functools
import gc
import inspect
import json
import pickle
import weakref

import pytest
import torch
from click.testing import CliRunner
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

import families
import kvfold
from helpers import llama, prompt
from kvfold.cli import cli
from kvfold.commands.conversation import Conversation
from kvfold.engines.transformers import graph, names
from kvfold.errors import UnsupportedModelError
from kvfold.models import load
from steps import Steps
from tiny_model import save

LIMIT = 64
READS_ALL = "next_sequence_length" in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
"""Older ones drop the cache in the midst of a text, and read its end only."""
METHOD = "fold:bits=2,sink=0,recent=32"
NEW = {
    "max_new_tokens": 30,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}


def phi3(vocabulary=96):
    """With other frequencies beyond LIMIT tokens."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0 + i for i in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, **factors}
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": vocabulary}
    torch.manual_seed(0)
    config = Phi3Config(
        **sizes,
        rope_parameters=rope,
        original_max_position_embeddings=LIMIT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 2,
    )
    return Phi3ForCausalLM(config).eval()


def family(name):
    model = families.model_of(name)
    model.config.original_max_position_embeddings = LIMIT
    return model


MODELS = {"longrope": phi3, **{name: lambda name=name: family(name) for name in ("phi3", "phimoe", "phi4_multimodal")}}


def generated(model, ids, **options):
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **NEW, **options})


@pytest.mark.parametrize("always", [False, True], ids=["passed", "always"])
@pytest.mark.parametrize("length", [50, 90], ids=["crossed-while-decoding", "crossed-by-the-prompt"])
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_that_was_passed_holds_all_tokens(name, length, always, recwarn):
    model, ids = MODELS[name](), prompt(2, length)
    expected = generated(model, ids, use_cache=False).sequences
    cache = kvfold.fold(model, "none:sink=0,recent=0", always=always)
    out = generated(model, ids, **({} if always else {"past_key_values": cache}))
    assert torch.equal(out.sequences, expected)
    assert always or out.past_key_values is cache
    assert out.past_key_values.get_seq_length() == length + 29 and out.past_key_values.restarts == 1
    assert not [w for w in recwarn if "without its folded cache" in str(w.message)]


def test_the_next_turn_goes_on_and_reads_its_own_tokens_only():
    model, ids = phi3(), prompt(1, 50)
    cache = kvfold.fold(model, METHOD)
    so_far = generated(model, ids, past_key_values=cache).sequences
    assert cache.restarts == 1 and max(cache.folded[0].packed) >= 32
    more, read = torch.cat([so_far, prompt(1, 20, seed=1)], 1), []
    model.register_forward_pre_hook(lambda m, a, k: read.append(k["input_ids"].shape[1]), with_kwargs=True)
    out = generated(model, more, past_key_values=cache)
    assert out.past_key_values is cache and cache.get_seq_length() == 129
    assert cache.restarts == 1 and read[:2] == [21, 1]


@pytest.mark.parametrize("how", ["beams", "lookup", "assistant"])
def test_other_ways_to_decode_cross_it_too(how):
    model, ids = phi3(), prompt(1, 25).repeat(1, 2)
    modes = {"beams": {"num_beams": 3}, "lookup": {"prompt_lookup_num_tokens": 3}}
    modes["assistant"] = {"assistant_model": llama(num_hidden_layers=1)}
    # a draft that crosses it is read, with the tokens before it, by the other frequencies: only a cache does that
    expected = generated(model, ids, use_cache=how != "beams", **modes[how]).sequences
    cache = kvfold.fold(model, "none:sink=0,recent=0")
    out = generated(model, ids, past_key_values=cache, **modes[how])
    assert torch.equal(out.sequences, expected) or (how != "beams" and not READS_ALL)
    assert out.past_key_values is cache
    assert cache.restarts >= 1 and cache.get_seq_length() >= 78


def test_a_decode_graph_ends_where_all_is_read_again_and_another_begins(monkeypatch):
    monkeypatch.setattr(graph, "DecodeGraph", Steps)
    monkeypatch.setattr(Steps, "made", 0)
    ended = []
    monkeypatch.setattr(Steps, "finish", lambda self: ended.append(self.cache.get_seq_length()))
    model, ids = phi3(), prompt(1, 50)
    expected = generated(model, ids, past_key_values=kvfold.fold(model, METHOD)).sequences
    cache = kvfold.fold(model, METHOD)
    with graph.decoding(model, cache, room=60) as steps:
        assert torch.equal(generated(model, ids, past_key_values=cache).sequences, expected)
    assert Steps.made == 2 and ended == [LIMIT, 79] and steps.replayed == 28


def test_models_that_keep_their_cache_keep_it_and_are_copied_and_given_back():
    model, ids = llama(), prompt(1, 90)
    before = dict(vars(model))
    cache = kvfold.fold(model, METHOD)
    assert generated(model, ids, past_key_values=cache).past_key_values is cache and not cache.restarts
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in (*twins, model):
        kvfold.unfold(twin)
        assert vars(twin).keys() == before.keys()
        assert isinstance(generated(twin, ids).past_key_values, DynamicCache)
    seen, own = [], model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = there = functools.wraps(own)(lambda *a, **k: seen.append(1) or own(*a, **k))
    generated(model, ids, past_key_values=kvfold.fold(model, METHOD))
    kvfold.unfold(model)
    assert seen and vars(model)["prepare_inputs_for_generation"] is there


def test_a_copy_prepares_its_own_calls():
    model, ids = phi3(), prompt(1, 50)
    kvfold.fold(model, METHOD)
    twin = copy.deepcopy(model)
    del model
    cache = kvfold.fold(twin, METHOD)
    assert generated(twin, ids, past_key_values=cache).past_key_values is cache


def test_a_folded_model_is_freed_when_nobody_has_it():
    model = phi3()
    cache = kvfold.fold(model, METHOD)
    generated(model, prompt(1, 50), past_key_values=cache)
    seen = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_a_model_that_goes_on_in_another_cache_is_refused(monkeypatch):
    model = llama()
    own = type(model).prepare_inputs_for_generation

    def replaces(self, *args, **kwargs):
        return own(self, *args, **names.put(kwargs, DynamicCache()))

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", replaces)
    cache = kvfold.fold(model, METHOD)
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM goes on in a DynamicCache in place of the folded"
    ):
        generated(model, prompt(1, 50), past_key_values=cache)


def test_commands_say_what_the_cache_holds_and_what_was_read(tmp_path, capsys):
    folder = save(tmp_path / "phi3", phi3(vocabulary=258))
    for text in ("x" * 90, "x" * 50):
        run = CliRunner().invoke(
            cli,
            ["generate", "--model", str(folder), "--raw", "--max-new-tokens", "30", "--json", "-", text],
        )
        assert run.exit_code == 0, run.output
        told = json.loads(run.stdout)
        assert told["cache_tokens"] == told["prompt_tokens"] + told["new_tokens"] - 1
    model, tokenizer, info = load(str(folder), "float32", "cpu")
    talk = Conversation(model, tokenizer, info, METHOD, max_new_tokens=4)
    with open(tmp_path / "answers", "w", encoding="utf-8") as file:
        first = talk.ask("a short one", file)
        held = talk.cache.get_seq_length()
        second = talk.ask("words " * 12, file)
    assert first.read_tokens == first.prompt_tokens < LIMIT and not first.dropped
    assert second.read_tokens == second.prompt_tokens > LIMIT and second.dropped == held
    assert second.why_dropped == "from this length on the model reads them otherwise"
    assert talk.cache.get_seq_length() == len(talk.held)
