"""Layers without positions, in models whose other layers have rotary embeddings: their keys are stored as they are."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvfold
from families import configuration, model_of
from kvfold.calibration.collect import layer_specs
from kvfold.engines.transformers import saving
from kvfold.engines.transformers.planning import plan_layers
from kvfold.errors import CacheFileError, UnsupportedModelError
from kvfold.methods import get


def positionless(model: torch.nn.Module) -> list[bool]:
    """Which layers' keys are alike wherever one and the same token stands: those that are not rotated."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.full((1, 16), 7), past_key_values=cache)
    return [bool(torch.allclose(layer.keys, layer.keys[:, :, :1], atol=1e-4)) for layer in cache.layers]


@pytest.mark.parametrize("family", ["afmoe", "exaone4", "exaone_moe", "kolibri1", "smollm3", "llama", "qwen3"])
def test_keys_are_unrotated_where_the_model_rotated_them(family):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {family}")
    model = model_of(family)
    found = {item.spec.layer_idx: item.spec.rope is None for item in plan_layers(model, get("squat_pre")) if item.spec}
    expected = positionless(model)
    assert found and found == {layer: expected[layer] for layer in found}
    learned = {spec.layer_idx: spec.rope is None for spec in layer_specs(model) if spec is not None}
    assert learned == found


def test_layers_of_two_frequencies_are_refused_and_those_of_none_are_not_rotated():
    config = configuration("granite_swa")
    count = config.num_hidden_layers
    config.layer_types = ["full_attention"] * count
    config.layer_rope_theta = [1e4, 0.0] * (count // 2)
    model = AutoModelForCausalLM.from_config(config).eval()
    plan = plan_layers(model, get("squat_pre"))
    assert [item.spec.rope is None for item in plan] == [False, True] * (count // 2)
    config.layer_rope_theta = [1e4, 1e6] * (count // 2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="rotates its layers with different frequencies"):
        kvfold.fold(model, "squat_pre")
    assert kvfold.fold(model, "squat").folded


@pytest.mark.parametrize(
    "family, method, refused",
    [("exaone4", "squat_pre", True), ("exaone4", "squat", False), ("llama", "squat_pre", False)],
)
def test_caches_that_were_saved_before_are_refused_where_their_keys_have_another_meaning(family, method, refused):
    """Files of before did not say which layers rotate their keys."""
    model = model_of(family)
    cache = kvfold.fold(model, f"{method}:sink=0,recent=0")
    with torch.no_grad():
        model(torch.arange(64)[None] % model.config.vocab_size, past_key_values=cache)
    layers, tensors = saving.contents(cache)
    where = [layer.device if hasattr(layer, "device") else torch.device("cpu") for layer in cache.layers]
    saving.fill(kvfold.fold(model, cache.method), layers, tensors, where)
    for told in layers:
        told.pop("rotary", None)
    if refused:
        with pytest.raises(CacheFileError, match=r"are stored by another rotation than squat_pre.*prefill again"):
            saving.fill(kvfold.fold(model, cache.method), layers, tensors, where)
    else:
        saving.fill(kvfold.fold(model, cache.method), layers, tensors, where)
