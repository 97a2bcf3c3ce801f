"""Models whose weights Accelerate keeps elsewhere: they are folded where they compute."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload

import kvfold
from helpers import llama, prompt
from kvfold.engines.transformers.placing import device_of, has_weights
from kvfold.errors import UnsupportedModelError

NEW = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("method", ["none", "squat_pre:bits=8"])
@pytest.mark.parametrize("when", ["before", "after", "always"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_model_that_is_offloaded_whole_generates_as_it_does_in_memory(where, when, method, tmp_path):
    model, ids = llama(), prompt(1, 150)
    mask = torch.ones_like(ids)
    plain = llama()
    expected = plain.generate(ids, attention_mask=mask, past_key_values=kvfold.fold(plain, method), **NEW)

    def offload():
        if where == "cpu":
            return cpu_offload(model, torch.device("cpu")) or model
        return disk_offload(model, str(tmp_path), torch.device("cpu")) or model

    if when == "after":
        offload()
        assert model.device.type == "meta" and device_of(model).type == "cpu" and has_weights(model)
        kvfold.explain(model, method)
    cache = kvfold.fold(model, method, always=when == "always")
    if when != "after":
        offload()
    out = model.generate(
        ids,
        attention_mask=mask,
        return_dict_in_generate=True,
        **NEW,
        **({} if when == "always" else {"past_key_values": cache}),
    )
    assert torch.equal(out.sequences, expected) and type(out.past_key_values) is type(cache)
    assert out.past_key_values.get_seq_length() == 157 and out.past_key_values.folded[0].kernel.name == "cpu"


def test_a_model_that_nobody_has_weights_of_is_refused():
    model = llama().to("meta")
    assert not has_weights(model) and device_of(model).type == "meta"
    with pytest.raises(UnsupportedModelError, match="on the meta device, without weights; load it"):
        kvfold.fold(model, "none")
    kvfold.explain(model, "none")
