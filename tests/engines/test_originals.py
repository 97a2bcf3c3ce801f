"""What is not a folded layer attends as it did before the model was folded, to the last bit; `unfold` finds every copy."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteSpeechConfig,
    GraniteSpeechForConditionalGeneration,
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvfold
from helpers import BASE, build, dynamic, llama, logits, prompt, relative, tokens
from kvfold.engines.transformers import originals
from kvfold.engines.transformers.attention import attention_forward
from kvfold.engines.transformers.cache import FoldedCache

pytestmark = pytest.mark.cpu_only("which function is called, and with what")

BATCH, TOKENS, IMAGE = 2, 40, 95
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma():
    return build(GemmaForCausalLM, GemmaConfig, use_bidirectional_attention=True)


def paligemma():
    text, vision = {**BASE, "model_type": "gemma"}, {**VISION, "model_type": "siglip_vision_model"}
    shape = {"projection_dim": 64, "image_token_id": IMAGE}
    config = PaliGemmaConfig(text_config=text, vision_config={**vision, "projection_dim": 64}, **shape)
    return PaliGemmaForConditionalGeneration(config)


def idefics2():
    text = {**BASE, "model_type": "mistral", "sliding_window": None}
    resampler = {"hidden_size": 64, "resampler_n_latents": 3, "resampler_depth": 2, "resampler_n_heads": 4}
    resampler |= {"resampler_head_dim": 16, "num_key_value_heads": 2}
    config = Idefics2Config(
        text_config=text, vision_config=dict(VISION), perceiver_config=resampler, image_token_id=IMAGE
    )
    return Idefics2ForConditionalGeneration(config)


def granite_speech():
    encoder = {"input_dim": 16, "num_layers": 1, "hidden_dim": 32, "num_heads": 2, "feedforward_mult": 1}
    encoder |= {"output_dim": 8, "context_size": 20, "max_pos_emb": 32, "dim_head": 16, "conv_kernel_size": 3}
    projector = {"model_type": "blip_2_qformer", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    projector |= {"intermediate_size": 64, "encoder_hidden_size": 32}
    text = {**BASE, "model_type": "granite"}
    config = GraniteSpeechConfig(
        text_config=text,
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=IMAGE,
        has_lora_adapter=False,
    )
    return GraniteSpeechForConditionalGeneration(config)


BUILD = {
    "gemma-bidirectional": gemma,
    "paligemma": paligemma,
    "paligemma-prefix": paligemma,
    "idefics2-resampler": idefics2,
    "granite-speech-qformer": granite_speech,
}


def make(name: str, implementation: str):
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    model.set_attn_implementation(implementation)
    return model


def given(name: str) -> dict[str, torch.Tensor]:
    """What a processor would give: tokens, and an image or a sound in the places of some."""
    ids, generator = prompt(BATCH, TOKENS, vocab=90), torch.Generator().manual_seed(1)
    if name.startswith("paligemma"):
        ids[:, 2:6] = IMAGE
        found = {"pixel_values": torch.randn(BATCH, 3, 28, 28, generator=generator)}
        if name.endswith("prefix"):
            found["token_type_ids"] = (torch.arange(TOKENS) >= 20).long().expand(BATCH, -1)
        return {"input_ids": ids, **found}
    if name.startswith("idefics2"):
        ids[:, 2:5] = IMAGE
        return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 1, 3, 28, 28, generator=generator)}
    if name.startswith("granite"):
        ids[:, 2:8] = IMAGE
        sound = torch.randn(BATCH, 30, 16, generator=generator)
        return {"input_ids": ids, "input_features": sound, "input_features_mask": torch.ones(BATCH, 6).bool()}
    return {"input_ids": ids}


@torch.no_grad()
def turns(model, name: str, padded: bool, cache) -> list[torch.Tensor]:
    """Logits of a prompt, and, where there is a cache, of single tokens and of several on it."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, 0] = 0
    more = prompt(BATCH, 8, seed=2, vocab=90)

    def call(n: int, **inputs):
        extra = {"attention_mask": torch.cat([mask, mask.new_ones(BATCH, n)], 1)} if padded else {}
        return model(**inputs, **extra, past_key_values=cache, use_cache=cache is not None).logits

    found = [call(0, **given(name))]
    for start, stop in ((0, 1), (1, 2), (2, 8)) if cache is not None else ():
        found.append(call(stop, input_ids=more[:, start:stop]))
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", BUILD)
def test_attention_that_is_not_folded_is_what_it_was_and_a_folded_cache_agrees(name, implementation, padded):
    model = make(name, implementation)
    alone = turns(model, name, padded, None)
    expected = turns(model, name, padded, DynamicCache(config=model.config))
    cache = kvfold.fold(model, "none")
    assert len(cache.folded) == 2
    for got, was in zip(turns(model, name, padded, None), alone, strict=True):
        assert torch.equal(got, was)
    for got, was in zip(turns(model, name, padded, DynamicCache(config=model.config)), expected, strict=True):
        assert torch.equal(got, was)
    seen = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    seen[1, 0] = not padded
    for i, (got, was) in enumerate(zip(turns(model, name, padded, cache), expected, strict=True)):
        assert relative(got[seen], was[seen]) < 1e-5 if i == 0 else relative(got, was) < 1e-5
    if not padded and "bidirectional" in name and implementation == "sdpa":  # or the test would show nothing
        ahead = given(name)["input_ids"].clone()
        ahead[:, -1] = 3
        with torch.no_grad():
            assert relative(model(ahead).logits[:, 0], alone[0][:, 0]) > 1e-3


@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("of", [None, False, True])
@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (1, 8)], ids=str)
def test_a_call_without_a_folded_cache_is_the_original_call(shape, of, is_causal):
    queries, columns = shape
    module = nn.Module().eval()
    module.num_key_value_groups = 2
    if of is not None:
        module.is_causal = of
    key, value, _ = tokens(2, columns)
    query = tokens(2, queries, seed=1)[2]
    options = {} if is_causal is None else {"is_causal": is_causal}
    expected, _ = sdpa_attention_forward(module, query, key, value, None, scaling=0.1, **options)
    got, _ = attention_forward(module, query, key, value, None, scaling=0.1, **options)
    assert torch.equal(got, expected)


def test_only_the_decoder_attends_through_kvfold():
    model = paligemma()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    kvfold.fold(model, "kivi")
    text, vision = model.config.text_config, model.config.vision_config
    assert originals.is_folded(text) and originals.is_folded(model.config) and not originals.is_folded(vision)
    assert vision._attn_implementation == "sdpa"
    kvfold.unfold(model)
    assert text._attn_implementation == "eager" and model.config._attn_implementation == "sdpa"


def test_weights_of_attention_come_back_where_the_model_gave_them():
    model, ids = llama(), prompt(1, 20)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
        kvfold.fold(model, "kivi")
        got = model(ids, output_attentions=True).attentions
    assert len(got) == 2 and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_implementation_of_somebody_elses_is_called_as_if_the_model_named_it():
    seen: list[tuple[str, str, object]] = []

    def own(module, query, key, value, attention_mask, **options):
        seen.append((module.config._attn_implementation, module.config.model_type, attention_mask))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("own_flash_attention_9", own)
    AttentionMaskInterface.register("own_flash_attention_9", sdpa_mask)
    model, ids = llama(), prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    model.config._attn_implementation = "own_flash_attention_9"
    expected = logits(model, dynamic(model), ids, [20, 10], mask)
    cache = kvfold.fold(model, "none")
    assert "flash" not in model.config._attn_implementation  # Transformers would make no masks
    seen.clear()
    assert torch.equal(logits(model, dynamic(model), ids, [20, 10], mask), expected)
    assert [row[:2] for row in seen] == [("own_flash_attention_9", "llama")] * 4
    assert all(row[2].shape[1] == 1 for row in seen)
    seen.clear()
    got = logits(model, cache, ids, [20, 10], mask)
    assert not seen and relative(got[mask.bool()], expected[mask.bool()]) < 1e-5
    kvfold.unfold(model)
    assert model.config._attn_implementation == "own_flash_attention_9"


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_in_full_precision_between_folded_ones_attends_as_it_did(implementation, padded):
    model, ids = llama(num_hidden_layers=3), prompt(2, 60)
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    given = mask if padded else None
    first: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda module, args, out: first.append(out))
    expected = logits(model, dynamic(model), ids, [30, 20, 1, 9], given)
    cache, own = kvfold.fold(model, "none"), dynamic(model)
    mixed = FoldedCache([own.layers[0], cache.layers[1], own.layers[2]], cache.method)
    got = logits(model, mixed, ids, [30, 20, 1, 9], given)
    assert own.layers[0].get_seq_length() == 60
    assert relative(got[mask.bool()], expected[mask.bool()]) < 1e-5
    for was, now in zip(first[:4], first[4:], strict=True):
        assert torch.equal(now, was)


# ---- giving it back --------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """What a PEFT model is to its base model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model.model, name)

    def get_base_model(self) -> nn.Module:
        return self.base_model.model

    def merge_and_unload(self) -> nn.Module:
        return self.base_model.model

    def forward(self, *args, **kwargs):
        return self.base_model.model(*args, **kwargs)


COPIES = {
    "deepcopy": lambda model: copy.deepcopy(model),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "wrapped afterwards": Wrapper,
    "a module of modules": lambda model: nn.ModuleList([model]),
    "deepcopy of a wrapper": lambda model: copy.deepcopy(Wrapper(model)),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", COPIES)
def test_unfold_finds_a_copy_of_a_folded_model_and_what_wraps_one(name, implementation):
    model, ids = llama(), prompt(1, 30)
    model.set_attn_implementation(implementation)
    expected = logits(model, dynamic(model), ids)
    kvfold.fold(model, "kivi")
    made = COPIES[name](model)
    kvfold.unfold(made)
    inner = next(module for module in made.modules() if type(module) is type(model))
    assert inner.config._attn_implementation == implementation
    assert torch.equal(logits(inner, dynamic(inner), ids), expected)
    assert originals.is_folded(model.config) == (inner is not model)


def test_a_model_taken_out_of_the_wrapper_that_was_folded_is_unfolded():
    wrapper, ids = Wrapper(llama()), prompt(1, 60)
    expected = logits(wrapper, dynamic(wrapper), ids, [40, 20])
    cache = kvfold.fold(wrapper, "none")
    assert relative(logits(wrapper, cache, ids, [40, 20]), expected) < 1e-5
    merged = wrapper.merge_and_unload()
    assert originals.is_folded(merged.config)
    kvfold.unfold(merged)
    assert merged.config._attn_implementation == "sdpa"
    kvfold.fold(merged, "kivi")
    kvfold.unfold(wrapper)
    assert merged.config._attn_implementation == "sdpa"


def test_what_was_folded_says_nothing_of_it_where_it_is_saved(tmp_path):
    model = llama()
    kvfold.fold(model, "kivi")
    model.save_pretrained(tmp_path)
    assert "kvfold" not in (tmp_path / "config.json").read_text()
    assert type(model).from_pretrained(tmp_path).config._attn_implementation == "sdpa"
