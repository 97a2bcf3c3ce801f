"""Calibration sees what the model computes, in families whose attention has more than keys, values and a causal mask."""

import pytest
import torch

from families import model_of
from kvfold.calibration import collect, looking
from kvfold.calibration.collect import Collector
from kvfold.calibration.kvquant import gradients
from kvfold.errors import KVFoldError, UnsupportedModelError
from tiny_model import tiny_llama

FAMILIES = {
    "gpt_oss": "learned sinks, sliding windows",
    "gemma2": "soft-capped scores, sliding windows",
    "granite_swa": "sinks, layers without RoPE",
    "olmo_hybrid": "linear attention first, whose layers are given no cos and sin",
    "gpt_neox": "an output projection with the name dense",
    "lfm2": "one with the name out_proj",
}
IDS = torch.randint(5, 96, (3, 64), generator=torch.Generator().manual_seed(0))


def tiny(family: str) -> torch.nn.Module:
    model = model_of(family)
    model.set_attn_implementation("eager")
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):  # low enough for small scores to feel it
            module.attn_logit_softcapping = 0.5
    return model


def outputs(model: torch.nn.Module, layers: torch.nn.ModuleList) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}

    def keep(index: int):
        return lambda module, args, out: found.update({index: out[0] if isinstance(out, tuple) else out})

    handles = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(layers)]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    return [found[index] for index in range(len(layers))]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_gives_what_it_gives_in_the_model(family):
    model = tiny(family)
    collector = Collector(model, IDS, 2)
    expected = outputs(model, collector.layers)
    collector.start()
    for layer in expected:
        sample = collector.step()
        assert float((collector.hidden - layer).norm() / layer.norm()) < 1e-4
        assert sample is None or sample.value_metric.shape[-1] == sample.spec.head_dim


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "granite_swa", "llama4_text"])
def test_looking_changes_nothing(family):
    looking.register("kvfold_looking", lambda layer, query, key, value: (key, value))
    model = tiny(family)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        with looking.attending(model, "kvfold_looking"):
            got = model(IDS, use_cache=False).logits
    assert float((got - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_gradients_pass_sinks_and_soft_caps(family):
    model = tiny(family)
    specs = collect.layer_specs(model)
    found = gradients(model, specs, IDS[:1])
    assert sorted(found) == [i for i, spec in enumerate(specs) if spec is not None]
    first = min(found)
    value = model.get_decoder().layers[first].self_attn.v_proj
    seen: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    handle = value.register_forward_hook(keep)
    logits = model(IDS[:1], use_cache=False).logits[0, :-1].float()
    torch.nn.functional.cross_entropy(logits, IDS[0, 1:], reduction="sum").backward()
    handle.remove()
    expected = seen[0].grad[0].unflatten(-1, (specs[first].num_kv_heads, -1)).transpose(0, 1).square()
    got = found[first].value_fisher.float()
    assert float((got - expected).norm() / expected.norm()) < 1e-2


def test_a_model_that_does_more_between_its_layers_is_refused():
    model, ran = tiny_llama(), []
    first, second = model.model.layers
    first.register_forward_hook(lambda module, args, out: ran.append(True))
    second.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]) if ran and ran.pop() else None)
    with pytest.raises(UnsupportedModelError, match="does not hand each layer's output to the next one"):
        _all(Collector(model, IDS))


def test_what_is_not_finite_teaches_nothing():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(
        KVFoldError, match="what layer 1 of LlamaForCausalLM gives is not finite on this text in float32"
    ):
        _all(Collector(model, IDS))


def test_an_output_projection_by_another_name_is_refused():
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.other = attention._modules.pop("o_proj")
    with pytest.raises(UnsupportedModelError, match="no output projection of 4 heads of 64 channels"):
        Collector(model, IDS)


def _all(collector: Collector) -> None:
    collector.start()
    while collector.done < len(collector.specs):
        collector.step()
