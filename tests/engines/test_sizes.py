"""What the commands say of a cache's size, now and with more tokens."""

import pytest
import torch

import kvfold
from kvfold import methods
from kvfold.engines.transformers import sizes
from tiny_model import tiny_llama

OTHERS = ("kivi:group=64", "fold:sink=0,recent=0", "fold+keep=0", "k=fold:bits=3+v=kivi", "fold+1=kivi:bits=4,sink=0")


def filled(model, spec, tokens):
    cache = kvfold.fold(model, spec)
    with torch.inference_mode():
        model(torch.arange(tokens).unsqueeze(0) % 250, past_key_values=cache)
    return cache


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.mark.parametrize("spec", [*methods.DEFAULT, *OTHERS])
def test_what_is_foretold_of_a_young_cache_is_what_comes(model, spec):
    young, later = filled(model, spec, 20), filled(model, spec, 600)
    foretold = sizes.foretold(young, 600, torch.float32)
    assert foretold.cache_bytes == later.nbytes()["total"]
    assert foretold.full_cache_bytes == later.full_nbytes() == 2 * foretold.fp16_cache_bytes
    assert sizes.now(later, torch.float32) == foretold


@pytest.mark.parametrize("spec", [*methods.DEFAULT, *OTHERS])
def test_packing_begins_where_it_is_said(model, spec):
    begins = sizes.packs_at(kvfold.fold(model, spec))
    assert not sizes.is_packed(filled(model, spec, begins - 1)) and sizes.is_packed(filled(model, spec, begins))


def test_layers_that_are_not_folded_are_extrapolated_up_to_their_window():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = Gemma3ForCausalLM(config).eval()
    young, later = filled(model, "kivi", 20), filled(model, "kivi", 400)
    foretold = sizes.foretold(young, 400, torch.float32)
    assert foretold.cache_bytes == pytest.approx(later.nbytes()["total"], rel=0.01)
    assert foretold.full_cache_bytes == pytest.approx(later.full_nbytes(), rel=0.01)


def test_a_young_cache_says_that_nothing_is_packed_and_what_it_will_be(model):
    cache = filled(model, "kivi", 20)
    assert sizes.said(cache, torch.float32).startswith("cache of 20 tokens: nothing is packed yet, ")
    at = sizes.foretold(cache, 1024, torch.float32)
    assert at.ratio > 2
    expected = f"packing begins at 160 tokens; at 1,024 tokens: {at.said('float32')}"
    assert sizes.ahead(cache, torch.float32, 1024) == expected
    assert expected.endswith(f"{at.ratio:.2f}x smaller, {at.ratio_fp16:.2f}x smaller than in 16 bits")
    assert "at 4,096 tokens" in sizes.ahead(cache, torch.float32, None)
    assert sizes.ahead(cache, torch.float32, 159) == "packing begins at 160 tokens; the model's context ends at 159"


def test_a_longer_cache_says_its_size_alone(model):
    cache = filled(model, "kivi", 600)
    said = sizes.now(cache, torch.float32).said("float32")
    assert sizes.said(cache, torch.float32) == f"cache of 600 tokens, 448 of them packed: {said}"
    assert sizes.ahead(cache, torch.float32, 1024) == ""
    assert sizes.ahead(filled(model, "kivi", 200), torch.float32, 1024).startswith("at 1,024 tokens: ")


def test_json_has_the_parts_and_no_number_that_is_none():
    model = tiny_llama()
    young, later = (sizes.to_dict(filled(model, "qjl", n), torch.float32, 1024) for n in (20, 600))
    assert young["effective_bits"] is None and young["packed_bytes"] == 0
    assert 2 < later["effective_bits"] < 4 and later["kernel"] in ("cpu", "reference")
    for found in (young, later):
        assert found["cache_bytes"] == sum(found[f"{part}_bytes"] for part in sizes.PARTS)
        assert found["ratio_fp16"] == found["ratio"] / 2 == found["fp16_cache_bytes"] / found["cache_bytes"]
        assert found["packs_at"] == 64 + 0 + 32 or found["packs_at"] == 160
    assert young["foretold"] == later["foretold"] and young["foretold"]["tokens"] == 1024


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (4.9, "4.90x smaller"),
        (1.03, "1.03x smaller"),
        (1.01, "as large"),
        (0.99, "as large"),
        (0.5, "2.00x larger"),
        (0, "larger"),
    ],
)
def test_larger_is_not_called_smaller(ratio, said):
    assert sizes.times(ratio).endswith(said)


def test_16_bits_are_said_apart_only_where_they_are_others():
    assert sizes.Sizes(1, 10, 40, 20).said("float32").endswith(": 4.00x smaller, 2.00x smaller than in 16 bits")
    assert sizes.Sizes(1, 30, 40, 20).said("float32").endswith(": 1.33x smaller, 1.50x larger than in 16 bits")
    assert sizes.Sizes(1, 10, 20, 20).said("bfloat16").endswith("20 B in bfloat16: 2.00x smaller")
    assert sizes.Sizes(1, 20, 40, 20).said("float32").endswith(": 2.00x smaller, as large as in 16 bits")
