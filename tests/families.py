"""A tiny random model of every causal family of the installed Transformers, and what folding it does.

A configuration is the family's default, with everything that makes a model large made small; `OPTIONS` has what a family
needs besides.
"""

import inspect
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvfold
from kvfold.engines.transformers.names import passing
from kvfold.errors import KVFoldError

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

VOCABULARY = 96
CUTS = [70, 30, 1, 9]
"""Tokens of the calls: a first one, and later ones of many, one and few."""
PLAIN = "none:sink=0,recent=0"
EIGHT = "kivi:bits=8,sink=0,recent=0"
BEFORE_ROPE = "squat_pre:sink=0,recent=0"

SMALL = {
    VOCABULARY: "vocab_size decoder_vocab_size unpadded_vocab_size audio_vocab_size vocab_size_per_layer_input",
    128: "hidden_size d_model n_embd emb_dim embedding_size input_embedding_size output_embedding_size word_embed_proj_dim "
    "lru_width embedding_dim hidden_size_global",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff d_inner n_inner "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size mamba_d_ssm",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size head_dim kv_channels attention_head_dim dim_head attention_head_size swa_head_dim "
    "index_head_dim d_kv kv_lora_rank q_lora_rank qk_head_dim",
    16: "qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window attention_chunk_size mamba_d_state state_size "
    "ssm_state_size mamba_head_dim mamba_d_head mamba_headdim linear_key_head_dim linear_value_head_dim linear_head_dim",
    4: "num_hidden_layers n_layer num_layers decoder_layers n_layers num_decoder_layers encoder_layers num_encoder_layers "
    "num_attention_heads n_head decoder_attention_heads encoder_attention_heads num_heads n_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts linear_num_key_heads linear_num_value_heads linear_num_heads mamba_num_heads "
    "mamba_n_heads n_mamba_heads zero_expert_num",
    8: "hidden_size_per_layer_input",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_top_k moe_k "
    "num_experts_per_token",
    1: "depth n_group topk_group num_expert_group first_k_dense_replace num_dense_layers",
    256: "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length",
    0.2: "initializer_range",
}
SIZES = {name: value for value, names in SMALL.items() for name in names.split()}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FOUR = ["sliding_attention", "full_attention"] * 2
MAMBA = ["linear_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 1e4}
INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 32, "budget": 64, "compress_ratio": 4}
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": FOUR,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 96,
    "intermediate_size": 64,
    "activation_sparsity_pattern": None,
}
ASSISTANT = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "layer_types": FOUR[:2],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
DECODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod reformer"""
"""Encoders that are decoders if asked."""
OPTIONS: dict[str, dict[str, Any]] = {name: {"is_decoder": True} for name in DECODERS.split()}
OPTIONS["reformer"] |= {"axial_pos_embds": False}
OPTIONS["xmod"] |= {"default_language": "en_XX"}
OPTIONS |= {
    "axk1": {"num_key_value_heads": 4, "head_dim": 16},
    "bamba": {"mamba_d_head": 64, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 16},
    "cohere_compass_text": {"layer_types": FOUR, "rope_parameters": dict.fromkeys(FOUR, ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 16},
    "granite_swa": {"attention_multiplier": 0.1},
    "granitemoe": {"attention_multiplier": 0.1},
    "granitemoe_swa": {"attention_multiplier": 0.1},
    "granitemoehybrid": {"mamba_d_head": 64, "layer_types": MAMBA, "attention_multiplier": 0.1},
    "granitemoeshared": {"attention_multiplier": 0.1},
    "granite": {"attention_multiplier": 0.1},
    "hrm_text": {"initializer_range": 0.05},  # 32 layers over each other: more would amplify rounding
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "ministral": {"head_dim": 32, "layer_types": FOUR},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "nemotron": {"head_dim": 32, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": [*MAMBA[:2], "moe", "full_attention"], "n_groups": 1},
    "phi3": {"sliding_window": None},
    "phimoe": {"sliding_window": None},
    "qwen4_exp_text": {f"indexer_{name}": value for name, value in INDEXER.items()},
    "starcoder2": {"sliding_window": None},
    "youtu": {"head_dim": 16},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "initializer_range": 0.1, "attention_head_dim": 64},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "initializer_range": 0.1, "mamba_headdim": 64},
    "zaya": {"num_experts_per_tok": 1},
}
NESTED: dict[str, dict[str, dict[str, Any]]] = {
    "blt": {
        name: {"num_hidden_layers": 2, "num_key_value_heads": None}
        for name in ("patcher_config", "encoder_config", "decoder_config", "global_config")
    },
    "dots3_note": {
        "audio_config": {"adapter_input_size": 128, "adapter_out_dim": 128},
        "vision_config": {"adapter_in_dim": 128, "adapter_out_dim": 128},
    },
    "gemma3n": {"text_config": SHARED},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "qwen4_exp": {"text_config": OPTIONS["qwen4_exp_text"]},
}
"""Options of the configurations within one."""
NESTED["blt"]["decoder_config"] |= {"cross_attn_k": 2}
OPTIONS["blt"] = {"encoder_hash_byte_group_vocab": 100}
DROPPED = {
    "nemotron_h": ("num_hidden_layers", "layer_types"),
    "zamba": ("layer_types", "attention_hidden_size"),
    "zamba2": ("layer_types", "attention_hidden_size"),
}
"""What is left to the family's configuration."""


def small(config: PretrainedConfig) -> dict[str, Any]:
    """Options of a configuration like this one for a tiny model."""
    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            options[name] = small(value)
        elif name == "layer_types" and value:
            kinds = list(dict.fromkeys(value))  # of each at least one
            options[name] = list(value[:4]) if set(value[:4]) == set(kinds) else (kinds * 4)[:4]
        elif name == "mlp_layer_types" and value:
            options[name] = (list(dict.fromkeys(value)) * 4)[:4]
        elif name in SIZES and isinstance(value, int | float) and not isinstance(value, bool) and value:
            options[name] = SIZES[name]
        elif name in TOKENS and value is not None:
            options[name] = TOKENS[name]
    if "kv_lora_rank" in options:
        options["num_key_value_heads"] = 4
    return options


def configuration(family: str) -> PretrainedConfig:
    """A tiny configuration of a family."""
    kind = CONFIG_MAPPING[family]
    if family.startswith("gemma4") and family.endswith("assistant"):  # its default is refused by itself
        return kind(text_config=ASSISTANT, backbone_hidden_size=128)
    options = small(kind())
    for name in DROPPED.get(family, ()):
        options.pop(name, None)
    options |= OPTIONS.get(family, {})
    for part, more in NESTED.get(family, {}).items():
        options[part] = options.get(part, {}) | more
    return kind(**options)


def model_of(family: str) -> PreTrainedModel:
    """A tiny random model."""
    torch.manual_seed(0)
    config = configuration(family)
    if family == "gemma3n":  # its vision tower needs a package of its own
        config = config.text_config
    if family.startswith("musicgen"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config.decoder).eval()
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:  # sdpa caps none
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if family.endswith("assistant"):  # reads the keys of another model: without that it cannot be built
        config.text_config.num_kv_shared_layers = 0
        model = AutoModelForCausalLM.from_config(config).eval()
        model.config.get_text_config().num_kv_shared_layers = 2
        return model
    return AutoModelForCausalLM.from_config(config).eval()


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, cuts: Sequence[int] = CUTS) -> torch.Tensor:
    """Of random tokens in calls of ``cuts`` tokens, with the positions that ``generate`` would give."""
    ids = torch.randint(5, VOCABULARY, (1, sum(cuts)), generator=torch.Generator().manual_seed(0))
    takes = inspect.signature(model.forward).parameters
    out, at = [], 0
    for count in cuts:
        part = slice(at, at + count)
        positions = {"position_ids": torch.arange(at, at + count)[None]} if "position_ids" in takes else {}
        result = model(ids[:, part], **passing(model, cache), use_cache=True, **positions)
        out.append(result.logits)
        at += count
    return torch.cat(out, 1)


@dataclass(frozen=True)
class Row:
    """What folding a family's tiny model does.

    Attributes
    ----------
    name : str
        Of the model's class.
    folded, layers : int
    kept : tuple of str
        Why layers stay in full precision.
    notes : tuple of str
        What is particular about the attention.
    none, eight : float
        Difference from the model's own cache: in full precision, and at 8 bits.
    before_rope : str
        "yes", or why methods that store keys before RoPE are refused.
    refused : str
        The refusal's sentence; empty if the family is folded.
    """

    name: str
    folded: int = 0
    layers: int = 0
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    none: float = 0.0
    eight: float = 0.0
    before_rope: str = ""
    refused: str = ""


def row_of(family: str) -> Row:
    """Fold a family's tiny model, and compare.

    Raises
    ------
    Exception
        Whatever is raised that is not a refusal in :func:`kvfold.fold`.
    """
    model = model_of(family)
    name = type(model).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = kvfold.fold(model, PLAIN)
    except KVFoldError as error:
        return Row(name, refused=str(error))
    got = logits(model, cache)
    kvfold.unfold(model)
    expected = logits(model, DynamicCache(config=model.config))
    report = kvfold.explain(model, PLAIN)
    notes = []
    if any(getattr(module, "sinks", None) is not None for module in model.modules()):
        notes.append("learned sinks")
    if any("soft-capped" in note for note in report.notes):
        notes.append("soft-capped scores")
    return Row(
        name,
        len(cache.folded),
        len(cache.layers),
        tuple(sorted({layer.reason for layer in report.layers if not layer.folded})),
        tuple(notes),
        difference(got, expected),
        _difference_at(model, EIGHT, expected),
        _before_rope(model, expected) if cache.folded else "-",
    )


def _difference_at(model: PreTrainedModel, method: str, expected: torch.Tensor) -> float:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return difference(logits(model, kvfold.fold(model, method)), expected)
    finally:
        kvfold.unfold(model)


def _before_rope(model: PreTrainedModel, expected: torch.Tensor) -> str:
    try:
        _difference_at(model, BEFORE_ROPE, expected)
    except KVFoldError as error:
        return str(error)
    return "yes"


def rows(families: Iterable[str] = FAMILIES) -> dict[str, Row]:
    """All of them."""
    return {family: row_of(family) for family in families}
