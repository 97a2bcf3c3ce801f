"""Adapters of PEFT whose keys are their own: refused by name, before and after the model is folded."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kvfold
from helpers import llama, prompt
from kvfold.errors import KVFoldError, UnsupportedModelError

NEW = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def adapted(model: nn.Module, kind: object) -> nn.Module:
    """As PEFT wraps a model."""
    wrapper = nn.ModuleDict({"base_model": model})
    wrapper.active_peft_config = SimpleNamespace(peft_type=kind)
    return wrapper


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", SimpleNamespace(value="PREFIX_TUNING"), "CARTRIDGE"], ids=str)
def test_a_model_that_brings_keys_of_its_own_is_refused(kind):
    model = llama()
    for use in (kvfold.fold, kvfold.explain, lambda wrapped: kvfold.folding(wrapped).__enter__()):
        with pytest.raises(UnsupportedModelError, match=r"keys of its own .*peft_type=(PREFIX|CART).*LoRA.*unfold"):
            use(adapted(model, kind))
    kvfold.fold(adapted(model, "LORA"))
    kvfold.unfold(adapted(model, kind))


def test_a_folded_cache_says_why_it_has_no_length_to_put_another_in_its_place():
    cache = kvfold.fold(llama(), "none")
    assert not hasattr(cache, "max_cache_len")
    with pytest.raises(UnsupportedModelError, match="max_cache_len is what PEFT's prefix tuning asks"):
        _ = cache.max_cache_len


@pytest.mark.parametrize("always", [False, True], ids=["passed", "always"])
def test_prefix_tuning_of_a_folded_model_is_refused(always):
    peft = pytest.importorskip("peft")
    model, ids = llama(), prompt(1, 40)
    cache = kvfold.fold(model, "none", always=always)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapper = peft.get_peft_model(model, config)
    options = {**NEW, "attention_mask": torch.ones_like(ids), **({} if always else {"past_key_values": cache})}
    with pytest.raises(KVFoldError, match="PEFT's prefix tuning"):
        wrapper.generate(input_ids=ids, **options)
    kvfold.unfold(wrapper)
    wrapper.eval().generate(input_ids=ids, **NEW)
