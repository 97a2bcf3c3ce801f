"""``output_attentions=True`` of folded models whose attention was eager: every layer's weights, of what the cache holds."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
)

import kvfold
from helpers import build, llama, logits, prompt

CUTS = [40, 17, 1, 2]
EXACT = "none:sink=0,recent=0"


MODELS = {
    "llama": lambda: llama(implementation="eager"),
    "gemma2": lambda: build(
        Gemma2ForCausalLM, Gemma2Config, "eager", num_hidden_layers=4, sliding_window=16, head_dim=32
    ),
    "gpt-oss": lambda: build(
        GptOssForCausalLM, GptOssConfig, "eager", num_local_experts=4, sliding_window=16, head_dim=32
    ),
    # its layers do not hand the question on
    "gpt2": lambda: build(GPT2LMHeadModel, GPT2Config, "eager", num_key_value_heads=4, head_dim=16),
}


@torch.no_grad()
def weights(model, cache, ids, mask=None, **asks):
    """Of each call, a tensor per layer."""
    found, at = [], 0
    for size in CUTS:
        extra = {} if mask is None else {"attention_mask": mask[:, : at + size]}
        if mask is not None:
            extra["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, at : at + size]
        out = model(ids[:, at : at + size], past_key_values=cache, use_cache=True, **extra, **asks)
        found.append(out.attentions)
        at += size
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model_for_every_layer_in_its_order(name, padded, recwarn):
    model, ids = MODELS[name](), prompt(2, sum(CUTS))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    given, real = (mask if padded else None), mask.bool() if padded else torch.ones_like(ids, dtype=torch.bool)
    expected = weights(model, DynamicCache(config=model.config), ids, given, output_attentions=True)
    got = weights(model, kvfold.fold(model, EXACT), ids, given, output_attentions=True)
    at = 0
    for now, before in zip(got, expected, strict=True):
        assert len(now) == len(before) == model.config.num_hidden_layers
        for a, b in zip(now, before, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            looks = real[:, at : at + a.shape[2]]
            assert torch.allclose(a.transpose(1, 2)[looks], b.transpose(1, 2)[looks], atol=1e-4)
        at += now[0].shape[2]


def test_weights_are_of_what_the_cache_holds_and_change_no_answer():
    model, ids = llama(implementation="eager"), prompt(1, 300)
    plain = logits(model, kvfold.fold(model, "kivi:bits=2"), ids, [250, 50])
    cache = kvfold.fold(model, "kivi:bits=2")
    with torch.no_grad():
        first = model(ids[:, :250], past_key_values=cache)
        keys = cache.folded[0].decoded(0)[0]
        seen = []
        attention = model.model.layers[0].self_attn
        attention.q_proj.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
        second = model(ids[:, 250:], past_key_values=cache, output_attentions=True)
    assert first.attentions is None
    assert torch.equal(torch.cat([first.logits, second.logits], 1), plain)
    hidden, queries = seen[0]
    cos, sin = model.model.rotary_emb(hidden, torch.arange(250, 300)[None])
    queries = queries.view(1, 50, 4, 64).transpose(1, 2)
    turned = torch.cat((-queries[..., 32:], queries[..., :32]), -1)
    queries = queries * cos[:, None] + turned * sin[:, None]
    scores = queries @ keys.repeat_interleave(2, 0).transpose(-1, -2) * 64**-0.5
    got = second.attentions[0][..., :250].log()  # equal but for what each row is divided by
    assert torch.allclose(got - got[..., :1], scores - scores[..., :1], atol=1e-3)
    assert torch.allclose(second.attentions[0].sum(-1), torch.ones(1, 4, 50), atol=1e-5)


def test_generate_returns_them_and_an_assistant_may_draft():
    model, ids = llama(implementation="eager"), prompt(1, 150)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    options |= {"attention_mask": torch.ones_like(ids), "output_attentions": True}
    expected = model.generate(ids, **options)
    helped = model.generate(ids, assistant_model=llama(num_hidden_layers=1), **options)
    with kvfold.folding(model, EXACT):
        got = model.generate(ids, **options)
        drafted = model.generate(ids, assistant_model=llama(num_hidden_layers=1), **options)
    for now, before in ((got, expected), (drafted, helped)):
        assert torch.equal(now.sequences, before.sequences)
        shapes = [[[w.shape for w in step] for step in out.attentions] for out in (now, before)]
        assert shapes[0] == shapes[1] and len(shapes[0][0]) == 2


def test_the_configuration_may_ask_before_the_model_is_folded():
    model, ids = llama(implementation="eager"), prompt(1, 40)
    model.config.output_attentions = True
    with torch.no_grad():
        expected = model(ids).attentions
        kvfold.fold(model, EXACT, always=True)
        got = model(ids).attentions
        assert model(ids, output_attentions=False).attentions is None
    assert len(got) == 2 and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


def test_a_model_whose_attention_gives_none_gives_none_folded():
    model, ids = llama(), prompt(1, 40)
    with torch.no_grad():
        assert model(ids, output_attentions=True).attentions == ()
        kvfold.fold(model, EXACT, always=True)
        assert model(ids, output_attentions=True).attentions == ()
