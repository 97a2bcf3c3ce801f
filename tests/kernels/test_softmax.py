"""Softmaxes that are not plain: soft-capped scores, and learned sinks in the denominator."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
)

import kvfold
from helpers import build, dynamic, logits, relative
from helpers import prompt as prompt_of
from kvfold import kernels
from kvfold.errors import KVFoldWarning, UnsupportedModelError
from kvfold.formats import AffineGroups
from kvfold.kernels import AttentionCall, NewTokens, prompt
from kvfold.kernels.cpu import CPUKernel
from kvfold.kernels.prompt import attend_prompt
from kvfold.kernels.reference import ReferenceKernel
from targets import current
from test_kernels_cpu import affine, error, make

KINDS = {
    "capped": (1.5, None),
    "sinks": (None, "sinks"),
    "both": (0.7, "sinks"),
    "high cap": (80.0, None),
}


def sinks_of(heads: int) -> torch.Tensor:
    """Learned sinks of all sizes: one that takes everything, one that takes nothing."""
    sinks = torch.linspace(-2.0, 3.0, heads)
    sinks[0], sinks[-1] = 40.0, -1e4
    return sinks


def by_definition(query, key, value, sees, scale, softcap, sinks):
    """[batch, num_heads, tokens, head_dim] in float64: one softmax over scores and sink."""
    key, value = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~sees, -math.inf)
    if sinks is not None:
        more = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat((more, scores), -1).softmax(-1)[..., 1:]) @ value
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_definition(kind):
    softcap, sinks = KINDS[kind]
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, kv_heads, group, tokens, dim, packed = 2, 2, 3, 4, 64, 128
    form = AffineGroups(dim, 64, "plain", 8, "token", "asym", 32)
    stored = [form.encode(randn(batch, kv_heads, packed, dim)) for _ in range(2)]
    keys, values = (form.decode(fields) for fields in stored)
    query = 3 * randn(batch, kv_heads * group, tokens, dim)
    new = [randn(batch, kv_heads, tokens, dim) for _ in range(2)]
    sinks = sinks_of(kv_heads * group) if sinks else None
    call = AttentionCall(
        query, 0.125, kv_heads, form, form, [kernels.Span(0, *stored)], torch.tensor([packed] * batch), [], NewTokens(*new),
        True, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    got = ReferenceKernel().attend(call)
    sees = torch.ones(tokens, packed + tokens, dtype=torch.bool).tril(packed)
    whole = [torch.cat(pair, -2) for pair in ((keys, new[0]), (values, new[1]))]
    assert relative(got, by_definition(query, *whole, sees, 0.125, softcap, sinks)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 3, 64, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_kernel_equals_the_reference(kind, tokens, monkeypatch):
    pytest.importorskip("numba")
    softcap, sinks = KINDS[kind]
    call = make(affine(4), affine(4, "channel"), [192, 64, 0], 2, 3, tokens, cuts=(64,), size=3.0)
    call = replace(call, softcap=softcap, sinks=sinks_of(6) if sinks else None)
    plain = ReferenceKernel().attend(replace(call, softcap=None, sinks=None))
    assert relative(ReferenceKernel().attend(call), plain) > (0.01 if kind != "high cap" else 1e-4)
    assert error(call) < 1e-5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # shares of the tokens, merged with the sink
    monkeypatch.setattr("kvfold.kernels.cpu.kernel.TOKENS_PER_THREAD", 1)
    assert error(call) < 1e-5


def test_capped_scores_of_any_size_keep_their_digits():
    from kvfold.kernels.cpu import _attend

    for size in (1e-6, 1e-3, 0.1, 0.249, 0.25, 0.251, 1.0, 30.0, 1e6):
        scores = torch.linspace(-size, size, 32)
        got = (scores * 50.0).numpy()
        _attend._cap(got, torch.tensor(50.0).numpy()[()])
        assert relative(torch.from_numpy(got), 50 * scores.double().tanh()) < 1e-6, size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_call_is_the_definition(kind, padded, dtype, monkeypatch):
    softcap, sinks = KINDS[kind]
    monkeypatch.setattr(prompt, "WORKSPACE", 4 * 2 * 4 * 37 * 10)  # pieces of ten queries
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, n, 37, 64, generator=generator).to(dtype) for n in (4, 2, 2))
    sinks = sinks_of(4).to(dtype) if sinks else None
    sees = torch.ones(37, 37, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    if padded:
        sees[1, :, :, :11] = False
        sees |= torch.eye(37, dtype=torch.bool)
    got = attend_prompt(query, key, value, sees if padded else None, 0.125, softcap, sinks)
    expected = by_definition(query, key, value, sees, 0.125, softcap, sinks)
    assert got.dtype == dtype and relative(got, expected) < (1e-6 if dtype == torch.float32 else 5e-3)


def test_kernels_that_cannot_cap_scores_say_so():
    form = affine()
    for kernel in kernels.REGISTRY.values():
        assert kernel.caps_scores == isinstance(kernel, ReferenceKernel | CPUKernel)
    cpu = torch.device("cpu")
    assert kernels.choose(form, form, cpu, softcap=30.0).kernel.name == "cpu"
    assert kernels.choose(form, form, torch.device("meta"), softcap=30.0).kernel.name == "reference"


# ---- models ----------------------------------------------------------------------------------------------------------

MIXED = ["sliding_attention", "full_attention"]


def with_sinks(model):
    """Sinks, and scores of a size where they matter."""
    for block in model.model.layers:
        block.self_attn.q_proj.weight.data *= 0.1
        block.self_attn.sinks.data = torch.tensor([4.0, -3.0, 8.0, 5.5], dtype=current().dtype, device=model.device)
    return model


def gpt_oss():
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "layer_types": MIXED}
    model = build(GptOssForCausalLM, GptOssConfig, **options)
    return with_sinks(model)


def gemma2(layer_types=MIXED):
    """Eager: sdpa does not cap scores. Transformers 5.17 takes it for Gemma 2 by default all the same."""
    options = {"sliding_window": 16, "attn_logit_softcapping": 1.5, "layer_types": layer_types}
    return build(Gemma2ForCausalLM, Gemma2Config, "eager", **options)


def granite():
    model = build(
        GraniteSWAForCausalLM, GraniteSWAConfig, attention_multiplier=0.1, sliding_window=16, layer_types=MIXED
    )
    return with_sinks(model)


MODELS = {"gpt_oss": gpt_oss, "gemma2": gemma2, "granite_swa": granite}
CUTS = [150, 30, 1, 19, 70]  # a first call, and later ones of few tokens, one and many


@pytest.mark.targets
@pytest.mark.parametrize("name", MODELS)
def test_full_precision_equals_the_models_own_cache(name, target):
    model, ids = MODELS[name](), prompt_of(2, 270)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    expected = logits(model, dynamic(model), ids, CUTS)
    padded = logits(model, dynamic(model), ids, CUTS, mask)
    cache = kvfold.fold(model, "none:sink=4")
    assert relative(logits(model, cache, ids, CUTS), expected) < target.logits
    (of,) = cache.folded
    assert of.packed[0] >= 192
    got = logits(model, kvfold.fold(model, "none:sink=4"), ids, CUTS, mask)
    assert relative(got[mask.bool()], padded[mask.bool()]) < target.logits


def by_token(a, b):
    """Relative difference of each token's logits [tokens]."""
    a, b = a.cpu().double(), b.cpu().double()
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


@pytest.mark.targets
@pytest.mark.parametrize("method", ["kivi", "fold", "innerq", "turboquant", "squat_pre"])
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_storage_is_near_the_models_own(method, name, target):
    """Without the sink, or the cap, the difference would be several times as large."""
    bits = "bits=4" if method == "turboquant" else "bits=8"
    model, ids = MODELS[name](), prompt_of(1, 270)
    expected = logits(model, dynamic(model), ids, CUTS)
    cache = kvfold.fold(model, f"{method}:{bits},sink=0,recent=0", max_length=512)
    got = logits(model, cache, ids, CUTS)
    assert relative(got[:, :150], expected[:, :150]) < target.logits  # the first call is exact
    off = by_token(got[0, 150:], expected[0, 150:])
    assert off.median() < max(0.03, 0.5 * target.logits)
    assert (off > 0.15).sum() <= 5  # a router that all but hesitates between two experts takes the other


@pytest.mark.parametrize("name", MODELS)
def test_generation_beams_and_assistance_agree(name):
    model, ids = MODELS[name](), prompt_of(1, 60)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    for more in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        expected = model.generate(ids, **options, **more)
        cache = kvfold.fold(model, "none:recent=16")
        got = model.generate(ids, past_key_values=cache, **options, **more)
        kvfold.unfold(model)
        assert torch.equal(got, expected), more


@pytest.mark.targets
def test_explain_says_where_scores_are_capped(target):
    rows = kvfold.explain(gemma2(), "kivi")
    row = rows.layers[1]
    assert row.folded and row.kernel == ("reference" if target.is_gpu else "cpu")
    assert any("soft-capped at 1.5" in note for note in rows.notes)
    if target.is_gpu:
        assert "soft-capped scores" in row.reason
    assert not any("soft-capped" in note for note in kvfold.explain(gpt_oss(), "kivi").notes)


def test_scores_are_capped_whatever_attention_the_model_had(monkeypatch):
    """Also in place of sdpa, which does not cap them; that folded layers then differ from the model's own is said."""
    monkeypatch.setattr(kvfold.errors, "_warned", set())
    model, ids = gemma2(["full_attention"] * 2), prompt_of(1, 270)
    expected = logits(model, dynamic(model), ids, CUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative(logits(model, kvfold.fold(model, "none"), ids, CUTS), expected) < 1e-5
    kvfold.unfold(model)
    model.config._attn_implementation_internal = "sdpa"
    with pytest.warns(KVFoldWarning, match=r"sdpa attention does not compute.*attn_implementation='eager'"):
        cache = kvfold.fold(model, "none")
    assert relative(logits(model, cache, ids, CUTS), expected) < 1e-5
    said = [note for note in kvfold.explain(model, "none").notes if "sdpa attention does not compute" in note]
    assert len(said) == 1  # of a folded model as well
    assert not any("sdpa" in note for note in kvfold.explain(gpt_oss(), "none").notes)


def test_a_cap_that_was_not_planned_for_is_refused():
    model = gemma2()
    cache = kvfold.fold(model, "kivi")
    layout = cache.layers[1].layout
    layout.spec = replace(layout.spec, softcap=None)
    with pytest.raises(UnsupportedModelError, match="does not support attention with softcap"):
        logits(model, cache, prompt_of(1, 20))
