"""Models that mix attention with recurrent states: attention is folded, with rotary embeddings or without; states stay."""

import copy

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

import kvfold
from helpers import build, dynamic, llama, logits, prompt, relative
from kvfold.engines.transformers import losses
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.probes import Probe
from kvfold.errors import CacheStateError, UnsupportedModelError

CUTS = [150, 30, 1, 19]
MAMBA = {"mamba_d_state": 16, "mamba_n_heads": 4, "mamba_chunk_size": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = ["sliding_attention", "full_attention"]
SHARED = {"initializer_range": 0.1, "hidden_size": 128}


def granite(**options):
    return build(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        **(SHARED | MAMBA | EXPERTS),
        **{"mamba_d_head": 64, "shared_intermediate_size": 64, "attention_multiplier": 0.1},
        layer_types=["linear_attention", "full_attention"],
        **options,
    )


MODELS = {
    "falcon_h1": lambda: build(
        FalconH1ForCausalLM, FalconH1Config, **SHARED, **MAMBA, mamba_d_ssm=128, mamba_d_head=32, key_multiplier=0.5
    ),
    "zamba2": lambda: build(
        Zamba2ForCausalLM, Zamba2Config, **SHARED, num_key_value_heads=4, mamba_d_state=16, n_mamba_heads=4, chunk_size=16,
        mamba_headdim=64, layers_block_type=["mamba", "hybrid"],
    ),
    "zamba2-rope": lambda: build(
        Zamba2ForCausalLM, Zamba2Config, **SHARED, num_key_value_heads=4, mamba_d_state=16, n_mamba_heads=4, chunk_size=16,
        mamba_headdim=64, layers_block_type=["mamba", "hybrid"], use_mem_rope=True,
    ),
    "jamba": lambda: build(
        JambaForCausalLM, JambaConfig, **SHARED, num_experts=2, num_experts_per_tok=1, attn_layer_period=2,
        attn_layer_offset=1, mamba_d_state=16, use_mamba_kernels=False,
    ),
    "nemotron_h": lambda: build(
        NemotronHForCausalLM, NemotronHConfig, **SHARED, layers_block_type=["linear_attention", "full_attention"],
        ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=64, n_groups=1, chunk_size=16,
    ),
    "granite": lambda: granite(position_embedding_type=None),
    "granite-rope": lambda: granite(position_embedding_type="rope"),
    "bamba": lambda: build(
        BambaForCausalLM, BambaConfig, **SHARED, **MAMBA, mamba_d_head=64, attn_layer_indices=[1]
    ),
}  # fmt: skip
FOLDED = {"falcon_h1": [0, 1]}
MIXED = {
    "gemma3": lambda: build(Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=32, layer_types=SLIDING),
    "gpt_oss": lambda: build(
        GptOssForCausalLM, GptOssConfig, sliding_window=32, layer_types=SLIDING, **EXPERTS
    ),
    "lfm2": lambda: build(Lfm2ForCausalLM, Lfm2Config, layer_types=["conv", "full_attention"]),
}  # fmt: skip
NO_ROPE = ("zamba2", "jamba", "nemotron_h", "granite")


@pytest.mark.parametrize("name", MODELS)
def test_full_precision_equals_the_models_own_cache(name):
    model, ids = MODELS[name](), prompt(2, 200)
    expected = logits(model, dynamic(model), ids, CUTS, torch.ones_like(ids))
    cache = kvfold.fold(model, "none")
    assert [i for i, of in enumerate(cache.layers) if isinstance(of, FoldedLayer)] == FOLDED.get(name, [1])
    assert relative(logits(model, cache, ids, CUTS, torch.ones_like(ids)), expected) < 1e-5
    assert all(of.packed == [192, 192] for of in cache.folded)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["kivi", "fold"])
def test_eight_bits_are_near_full_precision(method, name):
    model, ids = MODELS[name](), prompt(1, 200)
    expected = logits(model, dynamic(model), ids, CUTS, torch.ones_like(ids))
    cache = kvfold.fold(model, f"{method}:bits=8,sink=0,recent=0")
    got = logits(model, cache, ids, CUTS, torch.ones_like(ids))
    assert relative(got[:, :150], expected[:, :150]) < 1e-5
    assert 1e-7 < relative(got[:, 150:], expected[:, 150:]) < 0.03


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_padding_and_beams_agrees(name):
    model, ids = MODELS[name](), prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    for more in ({}, {"num_beams": 2}):
        expected = model.generate(ids, **options, **more)
        cache = kvfold.fold(model, "none:recent=16")
        assert torch.equal(model.generate(ids, past_key_values=cache, **options, **more), expected)
        kvfold.unfold(model)


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2", "jamba"])
def test_sequences_are_rearranged_with_their_states(name):
    model, ids = MODELS[name](), prompt(3, 100)
    order = torch.tensor([2, 0, 0])

    def after(change, rows):
        cache = kvfold.fold(model, "kivi:recent=16")
        with torch.no_grad():
            model(ids[:, :90], past_key_values=cache)
            change(cache)
            positions = torch.arange(90, 100).expand(len(rows), -1)
            return model(ids[rows][:, 90:], past_key_values=cache, position_ids=positions).logits

    plain = after(lambda cache: None, torch.arange(3))
    assert relative(after(lambda cache: cache.reorder_cache(order), order), plain[order]) < 1e-5
    assert relative(after(lambda cache: cache.batch_select_indices(order[:2]), order[:2]), plain[order[:2]]) < 1e-5
    twice = torch.arange(3).repeat_interleave(2)
    assert relative(after(lambda cache: cache.batch_repeat_interleave(2), twice), plain[twice]) < 1e-5


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2"])
def test_states_are_reset_copied_saved_and_counted(name, tmp_path):
    model, ids = MODELS[name](), prompt(2, 120)
    cache = kvfold.fold(model, "kivi:recent=16")

    def go(cache, part):
        with torch.no_grad():
            positions = torch.arange(120)[part].expand(2, -1)
            return model(ids[:, part], past_key_values=cache, position_ids=positions).logits

    first = go(cache, slice(0, 100))
    states = sum(
        t.nbytes for of in cache.layers for kept in (of.conv_states, of.recurrent_states) for t in kept.values()
    )
    assert states and cache.nbytes()["windows"] > states and cache.full_nbytes() > states
    copied = copy.deepcopy(cache)
    cache.save(tmp_path / "prompt.safetensors")
    loaded = kvfold.load_cache(tmp_path / "prompt.safetensors", model)
    second = go(cache, slice(100, 120))
    assert torch.equal(go(copied, slice(100, 120)), second) and torch.equal(go(loaded, slice(100, 120)), second)
    cache.reset()
    assert relative(go(cache, slice(0, 100)), first) < 1e-6


def test_a_crop_that_states_cannot_follow_is_refused_before_anything_changes():
    model, ids = MODELS["falcon_h1"](), prompt(1, 100)
    cache = kvfold.fold(model, "none")
    logits(model, cache, ids[:, :80])
    with pytest.raises(CacheStateError, match=r"crop\(-3\) is not possible: layers 0, 1 hold recurrent states"):
        cache.crop(-3)
    assert cache.get_seq_length() == 80 and not cache.is_croppable
    with pytest.raises(ValueError, match=r"assisted|rollback|stateful"):
        model.generate(ids[:, :60], past_key_values=kvfold.fold(model, "none"), prompt_lookup_num_tokens=3)


def lfm2(*layer_types):
    return build(Lfm2ForCausalLM, Lfm2Config, layer_types=list(layer_types), block_ff_dim=64, hidden_size=128)


@pytest.mark.parametrize(
    "recorded, count, spare", [(None, 2, 0), (0, 1, 0), (4, 5, 4)], ids=["nothing", "from now on", "four tokens"]
)
def test_a_crop_that_convolutions_cannot_follow_is_refused_before_anything_changes(recorded, count, spare):
    """Attention comes first, so it would have lost its tokens already. With too few recorded, states were of other tokens."""
    model, ids = lfm2("full_attention", "conv"), prompt(1, 40)
    full = model(ids, use_cache=False).logits
    cache = kvfold.fold(model, "none:recent=4")
    logits(model, cache, ids[:, :30])
    if recorded is not None:
        cache.activate_past_recording()
        if recorded:
            logits(model, cache, ids[:, 30 : 30 + recorded])
    at = 30 + (recorded or 0)
    with pytest.raises(CacheStateError, match=rf"the convolutions of layers 1 can lose {spare} tokens"):
        cache.crop(-count)
    assert cache.get_seq_length() == at
    if spare:
        cache.crop(-spare)
        at -= spare
    assert relative(logits(model, cache, ids[:, at:]), full[:, at:]) < 1e-5


def test_a_number_of_tokens_to_keep_is_no_crop():
    """Transformers' own layers take it as one, so kept ones would have lost tokens."""
    model = llama()
    cache = kvfold.fold(model, "none+keep=0")
    logits(model, cache, prompt(1, 20))
    with pytest.raises(ValueError, match=r"crop\(5\): pass a negative number"):
        cache.crop(5)
    assert [of.get_seq_length() for of in cache.layers] == [20, 20]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("batch, empty", [(1, lambda cache: cache.crop(-20)), (2, lambda cache: cache.reset())])
def test_a_crop_of_everything_or_a_reset_forgets_convolutions(batch, empty, recorded):
    """A reset takes another batch, as it does for attention."""
    model, ids = lfm2("conv", "full_attention"), prompt(2, 40)
    expected = model(ids[:batch, 20:], use_cache=False).logits
    cache = kvfold.fold(model, "none:recent=4")
    if recorded:
        cache.activate_past_recording()
    logits(model, cache, ids[:1, :20])
    empty(cache)
    assert relative(logits(model, cache, ids[:batch, 20:], [9, 1, 10]), expected) < 1e-5


def test_convolutions_alone_are_cropped():
    model, ids = lfm2("conv", "full_attention"), prompt(1, 60)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "prompt_lookup_num_tokens": 3}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, past_key_values=kvfold.fold(model, "none:recent=16"), **options), expected)


@pytest.mark.parametrize("name", [*NO_ROPE, "gpt2"])
def test_without_rotary_embeddings_only_methods_that_need_them_are_refused(name):
    gpt2 = {"n_positions": 256, "hidden_size": 256, "n_layer": 2, "num_key_value_heads": 4}
    model = build(GPT2LMHeadModel, GPT2Config, **gpt2) if name == "gpt2" else MODELS[name]()
    with pytest.raises(
        UnsupportedModelError, match="has no rotary position embeddings; methods that store keys before"
    ):
        kvfold.fold(model, "squat_pre")
    ids = prompt(1, 200)
    expected = logits(model, dynamic(model), ids, CUTS)
    assert relative(logits(model, kvfold.fold(model, "none"), ids, CUTS), expected) < 1e-5


@pytest.mark.parametrize("name", ["falcon_h1", "jamba"])
def test_after_a_call_that_died_only_reset_remains(name):
    """A recurrent state is written over: nothing can take tokens out of it."""
    model, ids = MODELS[name](), prompt(1, 60)
    cache = kvfold.fold(model, "kivi:sink=0,recent=8")
    expected = logits(model, kvfold.fold(model, "kivi:sink=0,recent=8"), ids, [40, 20])

    def die(*_):
        raise KeyboardInterrupt

    last = cache.folded[-1]
    for start, stop in ((0, 40), (40, 60)):
        if start:
            logits(model, cache, ids[:, :start])
        real, last.finish = last.finish, die
        with pytest.raises(KeyboardInterrupt):
            logits(model, cache, ids[:, start:stop])
        last.finish = real
        assert cache.get_seq_length() == start
        for _ in range(2):
            with pytest.raises(CacheStateError, match=rf"cannot go back to the {start} tokens.*; call reset\(\)"):
                logits(model, cache, ids[:, start:stop])
        cache.reset()
    assert relative(logits(model, cache, ids, [40, 20]), expected) < 1e-5


@pytest.mark.parametrize("name", MODELS | MIXED)
def test_what_layers_lose_is_measured_beside_layers_that_do_not_fold(name):
    """Of the layers that fold, with the others in their own states: expected is what the changed cache does lose."""
    model = (MODELS | MIXED)[name]()
    ids = prompt(1, 320)
    probe = Probe("text", ids, 256, tuple(range(257, 320)))
    method = kvfold.methods.get("fold:bits=4,sink=0,recent=0")
    found = losses.measure(model, [probe], {"k": {4: method}, "v": {4: method}})["text"]
    assert found.layers == FOLDED.get(name, [1])
    stored = losses._Stored(model, ids[:, :256])
    changes = stored.changes(method, [("k", 4), ("v", 4)], {})

    def predictions(side=None):
        cache = stored.own()
        for layer in found.layers if side else ():
            of, attribute = cache.layers[layer], {"k": "keys", "v": "values"}[side]
            setattr(of, attribute, getattr(of, attribute) + changes[layer, side, 4])
        with torch.no_grad():
            return model(ids[:, 256:], past_key_values=cache).logits[0, :-1].double().log_softmax(-1)

    exact = predictions()
    for side in "kv":
        near = predictions(side)
        kld = float((exact.exp() * (exact - near)).sum(-1).mean())
        assert 0.25 < sum(found.lost[layer, side, 4] for layer in found.layers) / kld < 4
