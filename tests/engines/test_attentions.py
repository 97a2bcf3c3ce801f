"""Attention modules are read before a token is computed: folded, kept as they are, or refused by name."""

import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FuyuConfig,
    FuyuForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MllamaForCausalLM,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    RobertaConfig,
    RobertaModel,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import kvfold
from helpers import BASE, build, dynamic, llama, logits, prompt, relative
from kvfold.engines.transformers import attentions, originals
from kvfold.errors import UnsupportedModelError

pytestmark = pytest.mark.cpu_only("what modules are, not what they compute")

LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 32,
}


def t5gemma():
    half = {**BASE, "sliding_window": 16, "layer_types": ["full_attention"] * 2}
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=dict(half), decoder=dict(half), vocab_size=96))


def moonshine():
    sizes = {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 4}
    sizes |= {"decoder_num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 96}
    return MoonshineForConditionalGeneration(MoonshineConfig(**sizes))


def falcon():
    sizes = {name: BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return FalconForCausalLM(FalconConfig(**sizes))


def data_parallel():
    return nn.DataParallel(llama())


def bert(config, **options):
    return config(**{**BASE, "num_key_value_heads": 4, "head_dim": 16, **options})


def on_meta():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**BASE))


REFUSED = {
    "bert": (lambda: BertModel(bert(BertConfig)), "is_decoder=False: BertModel is an encoder"),
    "bert that fills gaps": (lambda: BertForMaskedLM(bert(BertConfig)), "is_decoder=False: BertForMaskedLM"),
    "bert that nobody made a decoder": (lambda: BertLMHeadModel(bert(BertConfig)), "is_decoder=False: BertLMHeadModel"),
    "roberta": (lambda: RobertaModel(bert(RobertaConfig)), "is_decoder=False: RobertaModel is an encoder"),
    "falcon": (
        falcon,
        "FalconForCausalLM computes attention itself",
    ),
    "gpt-neox-japanese": (
        lambda: build(GPTNeoXJapaneseForCausalLM, GPTNeoXJapaneseConfig, intermediate_multiple_size=1),
        "GPTNeoXJapaneseForCausalLM computes attention itself",
    ),
    "jetmoe": (
        lambda: build(JetMoeForCausalLM, JetMoeConfig, kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
        "JetMoeAttention changes keys or values after the cache returned them",
    ),
    "diffllama": (
        lambda: build(DiffLlamaForCausalLM, DiffLlamaConfig),
        "DiffLlamaAttention attends to its keys more than once",
    ),
    "doge": (lambda: build(DogeForCausalLM, DogeConfig), "DogeAttention makes an attention mask of its own"),
    "mllama": (
        lambda: build(MllamaForCausalLM, MllamaTextConfig, cross_attention_layers=[1], head_dim=None),
        r"cross_attention_layers=\[1\]: MllamaForCausalLM",
    ),
    "mamba": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1)),
        "MambaForCausalLM",
    ),
    "t5gemma": (t5gemma, "T5GemmaForConditionalGeneration is an encoder-decoder model"),
    "moonshine": (moonshine, "MoonshineForConditionalGeneration is an encoder-decoder model"),
    "not causal": (lambda: llama(is_causal=False), "is_causal=False: LlamaForCausalLM sees later tokens"),
    "a name": (
        lambda: "gpt2",
        r"'gpt2' is a name; load it first: transformers.AutoModelForCausalLM.from_pretrained\('gpt2'\)",
    ),
    "None": (lambda: None, "None is not a model"),
    "a class": (lambda: LlamaForCausalLM, "the class LlamaForCausalLM is not a model"),
    "a configuration": (lambda: LlamaConfig(), "LlamaConfig object is not a model"),
    "a module": (
        lambda: nn.Linear(2, 2),
        "Linear is not a Transformers model; allowed: a model that Transformers loaded",
    ),
    "DataParallel": (data_parallel, r"DataParallel runs copies .*allowed: the model inside, fold\(model.module\)"),
}


@pytest.mark.parametrize("method", ["none", "fold", "squat_pre"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_folded_is_refused_before_a_token_is_computed(name, method):
    make, message = REFUSED[name]
    given = make()
    for act in (kvfold.fold, kvfold.explain):
        with pytest.raises(UnsupportedModelError, match=message):
            act(given, method)
    if isinstance(given, nn.Module):
        assert not any(originals.is_folded(getattr(module, "config", None)) for module in given.modules())


@pytest.mark.parametrize("given", ["gpt2", None, 5, LlamaForCausalLM, nn.Linear(2, 2)], ids=str)
def test_unfold_refuses_what_no_model_is_in(given):
    with pytest.raises(UnsupportedModelError, match="has no Transformers model inside"):
        kvfold.unfold(given)


def test_a_model_without_weights_is_explained_and_not_folded():
    model = on_meta()
    assert len(kvfold.explain(model, "kivi").layers) == 2
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is on the meta device, without weights"):
        kvfold.fold(model, "kivi")
    with pytest.raises(UnsupportedModelError, match="on the meta device, without numbers to rotate by"):
        kvfold.explain(model, "squat_pre")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_does_not_change_what_is_folded(dtype):
    model = llama()
    torch.set_default_dtype(dtype)
    try:
        kvfold.fold(model, "squat_pre")
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_compiled_model_is_folded_as_the_model_inside():
    model, ids = llama(), prompt(1, 30)
    compiled = torch.compile(model)
    cache = kvfold.fold(compiled, "none")
    assert originals.is_folded(model.config) and len(cache.folded) == 2
    assert relative(logits(model, cache, ids, [20, 10]), logits(model, dynamic(model), ids, [20, 10])) < 1e-5
    kvfold.unfold(compiled)
    assert model.config._attn_implementation == "sdpa"


LATENT_SPARSE = {
    "deepseek_v32": lambda: build(DeepseekV32ForCausalLM, DeepseekV32Config, **LATENT),
    "glm_moe_dsa": lambda: build(GlmMoeDsaForCausalLM, GlmMoeDsaConfig, **LATENT),
}


@pytest.mark.parametrize("name", LATENT_SPARSE)
def test_a_model_of_which_nothing_is_folded_is_left_as_it_is(name):
    """These ask which implementation they have: sparse attention is a mask only under some."""
    model, ids = LATENT_SPARSE[name](), prompt(2, 60)
    expected = logits(model, dynamic(model), ids, [30, 20, 1, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = kvfold.fold(model, "kivi")
    assert not cache.folded and model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, cache, ids, [30, 20, 1, 9]), expected)


def fuyu():
    text = {**BASE, "model_type": "persimmon", "num_key_value_heads": 4, "head_dim": 16}
    return FuyuForCausalLM(FuyuConfig(**{**BASE, "text_config": text}))


def gemma4():
    layers = ["sliding_attention", "full_attention"]
    options = {"layer_types": layers, "sliding_window": 16, "global_head_dim": 128}
    options |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    return build(Gemma4ForCausalLM, Gemma4TextConfig, **options)


WORK = {"gemma4": (gemma4, 1), "fuyu": (fuyu, 2)}


@pytest.mark.parametrize("name", WORK)
def test_heads_are_those_of_the_modules_whatever_the_configuration_calls_them(name):
    torch.manual_seed(0)
    make, folded = WORK[name]
    model, ids = make().eval(), prompt(2, 60, vocab=90)
    expected = logits(model, dynamic(model), ids, [30, 20, 1, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = kvfold.fold(model, "none:sink=0,recent=0")
    assert len(cache.folded) == folded
    assert relative(logits(model, cache, ids, [30, 20, 1, 9]), expected) < 1e-5
    if name == "gemma4":
        assert (cache.folded[0].spec.head_dim, cache.folded[0].spec.num_kv_heads) == (128, 2)


# ---- reading ---------------------------------------------------------------------------------------------------------


class Kept(LlamaAttention):
    """Its forward function is another's."""


class Doubling(LlamaAttention):
    def forward(self, hidden_states, past_key_values=None, attention_mask=None):
        key, value = past_key_values.update(hidden_states, hidden_states, self.layer_idx)
        value = value * 2
        attend = transformers.AttentionInterface().get_interface(self.config._attn_implementation, None)
        return attend(self, hidden_states, key, value, attention_mask)


class ByName(LlamaAttention):
    def forward(self, hidden_states, past_key_values=None, attention_mask=None):
        key, value = past_key_values.update(hidden_states, hidden_states, self.layer_idx)
        attend = transformers.AttentionInterface().get_interface(self.config._attn_implementation, None)
        return attend(self, query=hidden_states, key=key, value=value, attention_mask=attention_mask)


class Sparse(LlamaAttention):
    indexer = None

    def forward(self, hidden_states, past_key_values=None, attention_mask=None):
        key, value = past_key_values.update(hidden_states, hidden_states, self.layer_idx)
        if self.indexer is not None:
            attention_mask = self.indexer(hidden_states)
        attend = transformers.AttentionInterface().get_interface(self.config._attn_implementation, None)
        return attend(self, hidden_states, key, value, attention_mask)


class Looped(LlamaAttention):
    """In some of its calls it attends to what another call left."""

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, left=None):
        if left is not None:
            key, value = left, left
        elif past_key_values is not None:
            key, value = past_key_values.update(hidden_states, hidden_states, self.layer_idx)
        attend = transformers.AttentionInterface().get_interface(self.config._attn_implementation, None)
        return attend(self, hidden_states, key, value, attention_mask)


class OfTwoKinds(LlamaAttention):
    """Some modules never store, and those that do attend to nothing else."""

    shares = False

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, left=None):
        if self.shares:
            key, value = left, left
        else:
            key, value = past_key_values.update(hidden_states, hidden_states, self.layer_idx)
        attend = transformers.AttentionInterface().get_interface(self.config._attn_implementation, None)
        return attend(self, hidden_states, key, value, attention_mask)


def test_attention_is_read_from_the_source_of_its_forward_function():
    config = LlamaConfig(**BASE)
    for kind in (LlamaAttention, Kept, ByName, Sparse, OfTwoKinds):
        assert attentions.read(kind).stores and attentions.why_not(kind(config, 0)) == ""
    assert "changes keys or values" in attentions.why_not(Doubling(config, 0))
    why = "Looped attends to keys and values that the cache did not return"
    assert attentions.why_not(Looped(config, 0)) == why
    sparse = Sparse(config, 0)
    sparse.indexer = str  # any
    assert "makes an attention mask of its own" in attentions.why_not(sparse)
    assert not attentions.read(nn.Linear).stores


def test_code_of_others_may_look_its_attention_up_by_name_or_call_it_there():
    config = LlamaConfig(**BASE)
    for kind in (FirstForm, InPlace):
        assert attentions.read(kind).stores and attentions.why_not(kind(config, 0)) == ""


class FirstForm(LlamaAttention):
    """As code on the hub was written when attention functions came."""

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, cache=None, **kwargs
    ):
        past_key_values = past_key_values if cache is None else cache  # as the layer around it calls it
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        function = eager_attention_forward
        if self.config._attn_implementation != "eager":
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = function(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class InPlace(LlamaAttention):
    def forward(self, hidden_states, past_key_values=None, attention_mask=None):
        key, value = past_key_values.update(hidden_states, hidden_states, self.layer_idx)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, hidden_states, key, value, attention_mask)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", ["none", "squat_pre:bits=8,sink=0,recent=0"])
def test_a_model_with_such_attention_is_folded(method, implementation, monkeypatch):
    model, ids = llama(implementation=implementation), prompt(1, 90)
    expected = logits(model, dynamic(model), ids, [70, 20])
    monkeypatch.setattr(LlamaAttention, "forward", FirstForm.forward)
    got = logits(model, kvfold.fold(model, method), ids, [70, 20])
    assert relative(got, expected) < (1e-5 if method == "none" else 0.05)


def test_a_decoder_of_an_encoders_kind_is_folded():
    model, ids = BertLMHeadModel(bert(BertConfig, is_decoder=True)).eval(), prompt(1, 60)
    expected = logits(model, dynamic(model), ids, [40, 20])
    assert relative(logits(model, kvfold.fold(model, "none"), ids, [40, 20]), expected) < 1e-5


def test_without_source_nothing_is_held_against_a_module():
    made: dict = {}
    exec("def forward(self, x, past_key_values=None):\n    return x\n", made)
    kind = type("Frozen", (nn.Module,), {"forward": made["forward"]})
    assert attentions.read(kind) == attentions.Reading(True)
