"""What vLLM cannot serve with folded caches, and what it says."""

import os

from engine import Engine, model_path


def check_refusals():
    """What cannot be served ends at start-up, with a sentence that names it and what to do."""
    import vllm
    from vllm import EngineArgs

    from kvfold.engines.vllm import refusals
    from kvfold.engines.vllm.settings import method_of

    def problems(method="fold", change=lambda config: None, **options):
        arguments = EngineArgs(model_path(), additional_config={"kvfold": method}, max_model_len=512, **options)
        config = arguments.create_engine_config()
        change(config)
        return list(refusals.problems(config, method_of(config.additional_config)))

    def parallel(name):
        return lambda config: setattr(config.parallel_config, name, 2)

    def drafting(method):
        return lambda config: setattr(config.speculative_config, "method", method)

    assert problems() == []
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    assert problems(speculative_config=ngram) == []
    for expected, found in {
        "recent=0: drafts that are taken back": problems("kivi:recent=0", speculative_config=ngram),
        "squat: recent=64: a page waits for its 128 tokens": problems("squat:recent=64"),
        "zipcache: its encoder follows each request's queries": problems("zipcache"),
        "joint=true makes one code of all KV heads": problems("commvq:joint=true"),
        "vqllm's tables are of all KV heads": problems("vqllm", tensor_parallel_size=3),
        "disable_hybrid_kv_cache_manager": problems(disable_hybrid_kv_cache_manager=True),
        "kv_transfer_config": problems(kv_transfer_config=connector),
        "kv_transfer_config: connectors": problems(kv_offloading_size=1.0),
        "decode_context_parallel_size=2: allowed: 1": problems(change=parallel("decode_context_parallel_size")),
        "prefill_context_parallel_size=2: allowed: 1": problems(change=parallel("prefill_context_parallel_size")),
        **{
            f"speculative_config: method={name}: draft layers": problems(
                speculative_config=ngram, change=drafting(name)
            )
            for name in ("eagle3", "mtp", "draft_model")
        },
    }.items():
        assert any(expected in problem for problem in found), (expected, found)
    real, vllm.__version__ = vllm.__version__, "0.33.0"
    assert problems()[0].startswith("vllm=0.33.0: allowed: 0.29.x, 0.31.x, 0.32.x"), problems()
    vllm.__version__ = real
    layer = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "softcap": None}
    layer |= {"attn_type": "decoder", "shared": None, "others": {}}
    refusals.check_layer(**layer)
    for name, value, expected in (
        ("alibi_slopes", [1.0], "ALiBi"),
        ("sliding_window", 128, "backend_per_kind"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype bfloat16"),
        ("softcap", 30.0, "soft-capped"),
        ("attn_type", "encoder_decoder", "allowed: decoder"),
        ("shared", "model.layers.0", "another one's cache"),
        ("others", {"sinks": 1}, "learned sinks"),
    ):
        refuses(lambda layer=layer | {name: value}: refusals.check_layer(**layer), expected)
    refuses_what_vllm_names()
    refuses_without_kernels()
    for wrong, expected in (("fodl", "did you mean fold"), (None, "names no method")):
        refuses(lambda wrong=wrong: Engine(wrong), expected)
    changes_nothing()
    print("refusals name what they refuse; what is not chosen changes nothing")


def refuses_what_vllm_names():
    """vLLM's reasons against a backend: for each that is listed vLLM has one of these words, and the backend a remedy."""
    import inspect

    import torch
    from vllm.config import ModelConfig

    from kvfold.engines.vllm import refusals
    from kvfold.engines.vllm.backend import FoldedBackend

    given = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": False}
    given |= {"has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False}
    given |= {"device_capability": None, "attn_type": "decoder"}
    assert FoldedBackend.validate_configuration(**given) == []
    known = inspect.signature(FoldedBackend.__mro__[2].validate_configuration).parameters
    for name, value, expected in (
        ("kv_cache_dtype", "fp8", "pass --kv-cache-dtype bfloat16"),
        ("block_size", 64, "pages have 128 tokens; leave --block-size out"),
        ("use_mla", True, "MLA: the cache is a latent already"),
        ("has_sink", True, "learned sinks"),
        ("has_sliding_window", True, "backend_per_kind"),
        ("use_kv_connector", True, "kv_transfer_config"),
        ("use_dcp", True, "decode_context_parallel_size: allowed: 1"),
        ("use_pcp", True, "prefill_context_parallel_size: allowed: 1"),
        ("use_batch_invariant", True, "VLLM_BATCH_INVARIANT: allowed: 0"),
        ("dtype", torch.float64, "dtype: allowed"),
        ("use_mm_prefix", True, "leave --attention-backend CUSTOM out"),
        ("attn_type", "encoder", "leave --attention-backend CUSTOM out"),
    ):
        if name in known:  # older releases do not ask for all
            (reason,) = FoldedBackend.validate_configuration(**given | {name: value})
            assert reason.startswith("kvfold: ") and expected in reason, (name, reason)
    for name in ("is_encoder_decoder", "is_hybrid", "is_attention_free", "use_mla", "uses_mrope"):
        assert hasattr(ModelConfig, name), name
    assert set(refusals.REMEDIES) >= {"MLA not supported", "KV connector not supported"}


def refuses_without_kernels():
    """On a GPU: without FlashAttention, head sizes and methods without kernels."""
    import torch
    from vllm.v1.attention.backends import fa_utils

    from kvfold import methods
    from kvfold.engines.vllm import refusals
    from kvfold.engines.vllm.settings import layer_spec, stored

    def layer(method, dim=128):
        return stored(methods.get(method), layer_spec(0, 32, 32, 8, dim, torch.bfloat16, True))

    gpu, real = torch.device("cuda"), fa_utils.is_flash_attn_varlen_func_available
    fa_utils.is_flash_attn_varlen_func_available = lambda: False
    refuses(lambda: refusals.check_kernel(layer("fold"), gpu), "FlashAttention is not there, which prompts need")
    fa_utils.is_flash_attn_varlen_func_available = lambda: True
    for method, dim, expected in (
        ("fold", 72, "fold: head_dim=72: packed formats need a multiple of 16"),
        ("fold", 96, "head_dim=96; allowed: powers of two; leave --attention-backend CUSTOM out"),
        ("kivi", 96, "no kernel attends to its pages: keys: head_dim=96"),
        ("squat", 256, "no kernel encodes its pages: keys: head_dim=256 with a page's own queries; allowed: 64, 128"),
        ("gear", 128, "no kernel encodes its pages: keys: low rank storage; allowed: fold, kivi"),
    ):
        refuses(lambda m=method, d=dim: refusals.check_kernel(layer(m, d), gpu), expected)
    fa_utils.is_flash_attn_varlen_func_available = real


def changes_nothing():
    """Installed but not chosen: vLLM's own attention is what it was."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvfold.engines.vllm import plugin

    AttentionBackendEnum.CPU_ATTN.clear_override()
    del os.environ[plugin.ON_CPU]
    plugin.register()
    plugin.register()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND


def refuses(what, expected):
    try:
        what()
    except Exception as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"not refused: {expected}")
