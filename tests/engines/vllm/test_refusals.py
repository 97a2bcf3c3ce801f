"""Models that are refused at start-up, as vLLM's configurations describe them. Needs no vLLM: `make serving` asks its own."""

from types import SimpleNamespace

import pytest

from kvfold import methods
from kvfold.engines.vllm import refusals

LLAMA = {
    "is_encoder_decoder": False,
    "is_hybrid": False,
    "is_attention_free": False,
    "use_mla": False,
    "uses_mrope": False,
}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("is_encoder_decoder", "encoder-decoder models are not served; leave --attention-backend CUSTOM out"),
        ("is_hybrid", "Mamba and other recurrent layers beside attention are not served"),
        ("is_attention_free", "Mamba and other recurrent layers beside attention are not served"),
        ("use_mla", "MLA: the cache is a latent already; leave --attention-backend CUSTOM out"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(what, why):
    assert list(refusals._model(SimpleNamespace(**LLAMA))) == []
    (found,) = refusals._model(SimpleNamespace(**LLAMA | {what: True}))
    assert found.startswith(why)


def test_keys_before_rope_are_refused_where_positions_have_several_parts():
    model = SimpleNamespace(**LLAMA | {"uses_mrope": True})
    assert list(refusals._before_rope(model, methods.get("fold"))) == []
    (found,) = refusals._before_rope(model, methods.get("kvquant"))
    assert found.startswith("kvquant: keys before RoPE of positions with several parts (M-RoPE); allowed: fold")
    assert list(refusals._before_rope(SimpleNamespace(**LLAMA), methods.get("kvquant"))) == []


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa", "draft_model"])
def test_draft_models_are_refused_by_name(method):
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method, num_speculative_tokens=4))
    (found,) = refusals._speculation(config, methods.get("fold"))
    assert found == f"speculative_config: method={method}: draft layers would be folded too; allowed: ngram"


@pytest.mark.parametrize(("recent", "refused"), [(32, False), (4, True), (0, True)])
def test_drafts_that_are_taken_back_lie_in_the_window(recent, refused):
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=4))
    found = list(refusals._speculation(config, methods.get(f"kivi:recent={recent}")))
    assert [f"recent={recent}: drafts" in why for why in found] == [True] * refused
    assert all("allowed: more than num_speculative_tokens=4" in why for why in found)


def test_vllms_reasons_come_with_a_remedy():
    known, other = refusals.named(["block_size not supported", "R-SWA not supported"])
    assert known == "kvfold: block_size: pages have 128 tokens; leave --block-size out"
    assert other == "kvfold: R-SWA not supported; leave --attention-backend CUSTOM out"
