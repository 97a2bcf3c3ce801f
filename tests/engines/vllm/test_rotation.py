import pytest
import torch
from transformers import AutoConfig

from families import configuration
from kvfold.engines.vllm.rotation import rope_of_config
from kvfold.errors import KVFoldError
from kvfold.rope import rope_of
from tiny_model import tiny_llama

SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 256}


@pytest.mark.parametrize("rope", [None, SCALED, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}])
def test_a_configuration_rotates_as_its_model(rope):
    model = tiny_llama(**({} if rope is None else {"rope_parameters": rope}))
    ours, theirs = rope_of_config(model.config), rope_of(model)
    assert torch.equal(ours.inv_freq, theirs.inv_freq) and ours.scaling == theirs.scaling
    assert (rope is None) == torch.equal(ours.inv_freq, rope_of(tiny_llama()).inv_freq)


def test_layers_without_rotation_are_refused_by_name():
    config = AutoConfig.for_model("smollm3", num_hidden_layers=4, hidden_size=64, num_attention_heads=2)
    with pytest.raises(KVFoldError, match="no_rope_layers"):
        rope_of_config(config)


@pytest.mark.parametrize("family", ["afmoe", "exaone4", "kolibri1"])
def test_layers_without_positions_are_refused_by_their_numbers(family):
    """A server has one rotation for all layers."""
    with pytest.raises(KVFoldError, match=r"^layers [\d, ]+ have no positions: methods that store keys before RoPE"):
        rope_of_config(configuration(family))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "phi3"])
def test_models_that_rotate_all_layers_are_not_refused(family):
    assert rope_of_config(configuration(family)).inv_freq.numel()


def test_frequencies_that_change_with_length_are_refused_by_name():
    config = tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).config
    with pytest.raises(KVFoldError, match="rope_type=dynamic"):
        rope_of_config(config)
