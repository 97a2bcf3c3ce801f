"""Every architecture: folded layers equal the model's own cache; layers that cannot be folded keep their own attention."""

import warnings

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StaticCache,
)

import kvfold
import kvfold.errors
from helpers import build, dynamic, llama, logits, prompt, relative
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import KVFoldError, UnsupportedModelError
from kvfold.rope import rope_of

pytestmark = [pytest.mark.targets, pytest.mark.takes_turns]

MIXED = ["sliding_attention", "full_attention"]
CUTS = [150, 30, 1, 19]
FOLDED = {
    "llama": llama,
    "llama-mha": lambda: llama(num_key_value_heads=4),
    "llama-multi-query": lambda: llama(num_key_value_heads=1),
    "llama-linear": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama-llama3": lambda: llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    ),
    "llama-yarn": lambda: llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    ),
    "mistral": lambda: build(MistralForCausalLM, MistralConfig, sliding_window=None),
    "qwen2": lambda: build(Qwen2ForCausalLM, Qwen2Config),
    "qwen3": lambda: build(Qwen3ForCausalLM, Qwen3Config),
    "phi3": lambda: build(Phi3ForCausalLM, Phi3Config, hidden_size=256, sliding_window=None),
    "phi3-partial": lambda: build(
        Phi3ForCausalLM, Phi3Config, hidden_size=256, sliding_window=None, partial_rotary_factor=0.5
    ),
    "granite": lambda: build(GraniteForCausalLM, GraniteConfig, attention_multiplier=0.05, hidden_size=256),
    "smollm3": lambda: build(SmolLM3ForCausalLM, SmolLM3Config, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
}
KEPT = {
    "gemma2": lambda: build(
        Gemma2ForCausalLM, Gemma2Config, "eager", sliding_window=40, attn_logit_softcapping=2.0, layer_types=MIXED
    ),
    "gpt_oss": lambda: build(
        GptOssForCausalLM,
        GptOssConfig,
        "eager",
        sliding_window=40,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=MIXED,
    ),
    "mistral": lambda: build(MistralForCausalLM, MistralConfig, sliding_window=40),
    "qwen2": lambda: build(
        Qwen2ForCausalLM, Qwen2Config, sliding_window=40, use_sliding_window=True, layer_types=MIXED
    ),
    "gemma3": lambda: build(Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=40, layer_types=MIXED),
    "deepseek": lambda: build(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        head_dim=16,
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_full_precision_equals_the_models_own_cache(name, target):
    model, ids = FOLDED[name](), prompt(2, 200)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    expected = logits(model, dynamic(model), ids, CUTS)
    padded = logits(model, dynamic(model), ids, CUTS, mask)
    cache = kvfold.fold(model, "none")
    assert len(cache.folded) == len(cache.layers)
    assert relative(logits(model, cache, ids, CUTS), expected) < target.logits
    assert all(of.packed == [192, 192] for of in cache.folded)
    got = logits(model, kvfold.fold(model, "none"), ids, CUTS, mask)
    assert relative(got[mask.bool()], padded[mask.bool()]) < target.logits


EIGHT = ("fold", "kivi", "squat", "squat_pre", "innerq")


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("method", EIGHT)
def test_eight_bits_are_near_full_precision(method, name, target):
    """Near enough that a key rotated to another position, or a scale of scores that is not the model's, would show."""
    model, ids = FOLDED[name](), prompt(1, 200)
    expected = logits(model, dynamic(model), ids, CUTS)
    cache = kvfold.fold(model, f"{method}:bits=8,sink=0,recent=0", max_length=512)
    got = logits(model, cache, ids, CUTS)
    assert all(of.packed == [192] for of in cache.folded)
    assert relative(got[:, 150:], expected[:, 150:]) < max(0.08, 1.5 * target.logits)


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("method", ["fold", "kivi:bits=1", "innerq:mode=sym", "qjl", "turboquant", "gear", "zipcache"])
def test_every_method_runs_and_moves_the_logits(method, name, target):
    model, ids = FOLDED[name](), prompt(1, 260)
    expected = logits(model, dynamic(model), ids, [200, 60])
    joint = "," if ":" in method else ":"
    cache = kvfold.fold(model, f"{method}{joint}sink=0,recent=0")
    got = logits(model, cache, ids, [200, 60])
    assert got.isfinite().all() and all(of.packed[0] >= 192 for of in cache.folded)
    assert relative(got[:, :200], expected[:, :200]) < target.logits  # the first call is exact
    assert relative(got[:, 200:], expected[:, 200:]) > 1e-4


@pytest.mark.parametrize("name", [n for n in FOLDED if n.startswith(("llama", "qwen2", "smollm3"))])
def test_unrotated_keys_are_the_projections_own(name, target):
    model, ids = FOLDED[name](), prompt(1, 100)
    seen: dict[int, torch.Tensor] = {}
    for index, block in enumerate(model.model.layers):
        block.self_attn.k_proj.register_forward_hook(lambda m, i, out, index=index: seen.__setitem__(index, out))
    cache = kvfold.fold(model, "squat_pre:bits=8,lam=0,sink=0,recent=0")
    logits(model, cache, ids)
    turned = 0
    for index, of in enumerate(cache.folded):
        keys = seen[index].unflatten(-1, (of.spec.num_kv_heads, -1)).transpose(1, 2)
        stored = of.key_format.decode({n: t[:, :, :3] for n, t in of.slabs[0].keys.items()})
        assert relative(stored, keys[:, :, :96]) < max(0.01, 2 * torch.finfo(target.dtype).eps)
        turned += relative(of.decoded(0)[0][:, :96], keys[0, :, :96]) > 0.1
        assert (of.spec.rope is None) == (name == "smollm3" and index == 3)
    assert turned == (3 if name == "smollm3" else 2)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("method", ["none", "kivi:sink=0,recent=0"])
def test_layers_that_stay_are_reported_warned_of_once_and_equal_the_models_own(name, method, monkeypatch, target):
    monkeypatch.setattr(kvfold.errors, "_warned", set())
    model, ids = KEPT[name](), prompt(2, 200)
    expected = logits(model, dynamic(model), ids, CUTS)
    with pytest.warns(UserWarning, match="layers stay in full precision"):
        cache = kvfold.fold(model, method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvfold.fold(model, method)
    rows = kvfold.explain(model, method).layers
    kept = [row.layer_idx for row in rows if not row.folded]
    assert kept == ([0, 1] if name in ("mistral", "deepseek") else [0])
    got = logits(model, cache, ids, CUTS)
    if method == "none" or len(kept) == 2:
        assert relative(got, expected) < target.logits
    else:
        assert got.isfinite().all() and relative(got[:, :150], expected[:, :150]) < target.logits
    for row in rows:
        assert ("latent" in row.reason if name == "deepseek" else "sliding" in row.reason) == (not row.folded)


def test_what_cannot_be_folded_is_refused_by_name_and_still_works():
    model, ids = build(GPT2LMHeadModel, GPT2Config, n_positions=256, hidden_size=256), prompt(2, 100)
    expected, before = logits(model, dynamic(model), ids, [70, 30]), model.config._attn_implementation
    for act in (kvfold.fold, kvfold.explain):
        with pytest.raises(
            UnsupportedModelError, match="GPT2LMHeadModel has no rotary position embeddings; methods that"
        ):
            act(model, "squat_pre")
    assert model.config._attn_implementation == before
    assert torch.equal(logits(model, dynamic(model), ids, [70, 30]), expected)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_change_with_length_are_refused_before_rope_only(kind, target):
    if kind == "dynamic":
        model = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    else:
        factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
        parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, **factors}
        options = {"hidden_size": 256, "sliding_window": None, "original_max_position_embeddings": 128}
        model = build(Phi3ForCausalLM, Phi3Config, rope_parameters=parameters, **options)
    with pytest.raises(UnsupportedModelError, match=f"rope_type={kind}: .*allowed: default, linear, llama3, yarn"):
        kvfold.fold(model, "squat_pre")
    ids = prompt(1, 100)
    expected = logits(model, dynamic(model), ids, [70, 30])
    assert relative(logits(model, kvfold.fold(model, "none"), ids, [70, 30]), expected) < target.logits


@pytest.mark.cpu_only("frequencies, compared in float32")
def test_rope_is_the_models_own():
    for name in ("llama-llama3", "llama-yarn", "phi3-partial"):
        model = FOLDED[name]()
        ours, module = rope_of(model), model.model.rotary_emb
        positions = torch.tensor([[0, 3, 150]])
        cos, sin = module(torch.zeros(1, 3, 64), positions)
        x = torch.randn(1, 2, 3, 64)
        n = cos.shape[-1]
        half = torch.cat((-x[..., n // 2 : n], x[..., : n // 2]), -1)
        expected = torch.cat((x[..., :n] * cos + half * sin, x[..., n:]), -1)
        assert relative(ours.rotate(x, positions[:, None]), expected) < 1e-5
    assert rope_of(FOLDED["llama-yarn"]()).scaling > 1.1


@pytest.mark.parametrize("name", [*FOLDED, "gemma3", "deepseek"])
@pytest.mark.parametrize("method", ["kivi", "squat_pre", "innerq", "qjl_outliers"])
def test_explain_says_what_folding_does(method, name, target):
    model = FOLDED[name]() if name in FOLDED else KEPT[name]()
    if name in KEPT and method == "squat_pre":
        method = "squat"
    report = kvfold.explain(model, method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = kvfold.fold(model, method)
    assert [row.layer_idx for row in report.layers] == list(range(len(cache.layers)))
    per_token = full = 0.0
    for row, of in zip(report.layers, cache.layers, strict=True):
        assert row.folded == isinstance(of, FoldedLayer)
        if not isinstance(of, FoldedLayer):
            assert row.effective_bits == 8 * target.dtype.itemsize and row.windows == "all" and row.kernel == "sdpa"
            continue
        assert row.effective_bits == (of.key_format.bits + of.value_format.bits) / 2
        assert (row.key_format, row.value_format) == (of.key_format.describe(), of.value_format.describe())
        assert row.windows == f"sink {of.method.sink}, recent {of.method.recent} to {of.method.recent + of.block - 1}"
        per_token += of.spec.num_kv_heads * sum(f.bits * f.head_dim / 8 for f in (of.key_format, of.value_format))
        full += 2 * of.spec.num_kv_heads * of.spec.head_dim * target.dtype.itemsize
    assert (report.bytes_per_token, report.full_bytes_per_token) == (per_token, full)
    kept = [row for row in report.layers if not row.folded]
    assert any("stay in full precision" in note for note in report.notes) == bool(kept)
    if per_token:
        logits(model, cache, prompt(1, 70))
        assert {row.kernel for row in report.layers if row.folded} == {of.kernel.name for of in cache.folded}


def test_a_static_cache_on_a_folded_model_is_served_or_refused(target):
    model, ids = llama(), prompt(2, 60)

    def run():
        return logits(model, StaticCache(config=model.config, max_cache_len=100), ids, [40, 19, 1])

    expected = run()
    kvfold.fold(model, "none")
    try:
        got = run()
    except KVFoldError:
        return
    assert relative(got, expected) < target.logits


def test_a_refused_call_leaves_the_cache_usable():
    model, ids = llama(), prompt(1, 60)
    cache = kvfold.fold(model, "kivi")
    logits(model, cache, ids)
    with pytest.raises(KVFoldError, match="attention_mask"), torch.no_grad():
        model(ids[:, :2], past_key_values=cache, attention_mask=torch.zeros(1, 1, 2, 62, device=ids.device))
    assert logits(model, cache, ids[:, :2]).isfinite().all()
