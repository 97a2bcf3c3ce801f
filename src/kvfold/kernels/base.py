"""What an attention kernel is: what it supports, and one function of one value."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.formats import Format
from kvfold.kernels.call import AttentionCall


class AttentionKernel(ABC):
    """An implementation of attention over packed caches."""

    name: ClassVar[str]
    in_place_tokens: ClassVar[int] = 0
    """Most query tokens of calls whose tokens lie in the windows already (``call.new`` is None)."""
    captures: ClassVar[bool] = False
    """Whether such a call launches the same kernels with the same arguments whatever the lengths are, and so can be captured
    in a CUDA graph."""
    limits: ClassVar[str] = ""
    """Calls that it hands to another kernel, for reports."""
    dtypes: ClassVar[frozenset[torch.dtype] | None] = None
    """Element types of queries and windows that it reads; None: any."""
    caps_scores: ClassVar[bool] = False
    """Whether it serves layers of soft-capped scores."""

    @abstractmethod
    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        """Why this kernel cannot serve these formats on this device; None if it can."""

    def why_not_queries(
        self, key_format: Format, value_format: Format, device: torch.device, rows: int, rotary: int
    ) -> str | None:
        """Why this kernel leaves a layer's steps to another, on a device and over formats that it reads; None if it does not.

        Parameters
        ----------
        rows : int
            Query rows of a KV head in a step of one token.
        rotary : int
            Channels that are rotated as keys are read; 0: keys are stored after RoPE.
        """
        return None

    def prepare(self, key_format: Format, value_format: Format) -> None:
        """Compile what calls over these formats run, or read it from where it is kept, before an answer waits for it.

        Kernels that are compiled for lengths as well leave it to the calls.
        """
        return None

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention output [batch, num_heads, tokens, head_dim], float32 or of the query's dtype."""


class GPUKernel(AttentionKernel):
    """A kernel for 16-bit models on NVIDIA GPUs; short calls are written to the windows first, and decode graphs capture it."""

    in_place_tokens = 16
    captures = True
    dtypes = frozenset({torch.float16, torch.bfloat16})


@dataclass
class Choice:
    """Which kernel serves a layer, and why not the ones before it in the list."""

    kernel: AttentionKernel
    passed_over: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """One line for reports."""
        if not self.passed_over:
            return "first choice"
        kernels: dict[str, list[str]] = {}
        for name, why in self.passed_over.items():
            kernels.setdefault(why, []).append(name)
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in kernels.items())
