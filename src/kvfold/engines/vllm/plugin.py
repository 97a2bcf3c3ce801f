"""What vLLM calls in each of its processes: names the backend, loads nothing, changes nothing for who does not choose it."""

import os

BACKEND = "kvfold.engines.vllm.backend.FoldedBackend"
ON_CPU = "KVFOLD_VLLM_CPU"
"""Environment variable: ``1`` puts the backend in the place of vLLM's attention on CPUs, where vLLM offers no choice."""


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; may be called again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if os.environ.get(ON_CPU) == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
