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

    def many_tokens(self, key_format: Format, value_format: Format, pre_rope: bool) -> str | None:
        """What becomes of calls of many tokens, for reports; None where all calls are served alike."""
        return None

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention output [batch, num_heads, tokens, head_dim], float32 or of the query's dtype."""


class GPUKernel(AttentionKernel):
    """A kernel for 16-bit models on NVIDIA GPUs; short calls are written to the windows first, and decode graphs capture it.

    Here it is decided once, for all of these kernels, which calls are unpacked for the platform's flash attention
    (:mod:`kvfold.kernels.long.attend`).
    """

    in_place_tokens = 16
    captures = True
    dtypes = frozenset({torch.float16, torch.bfloat16})
    unpacks_from: ClassVar[int] = in_place_tokens + 1
    """Least query tokens of calls that are unpacked, of those whose tokens do not lie in the windows."""
    otherwise: ClassVar[str] = "this kernel reads them as they are"
    """What becomes of such calls on formats that cannot be unpacked, for reports."""

    def many_tokens(self, key_format: Format, value_format: Format, pre_rope: bool) -> str:
        from kvfold.kernels.long.attend import why_not

        beyond = max(self.in_place_tokens, self.unpacks_from - 1)
        calls = f"calls of more than {beyond} tokens{', or with padding,' if self.unpacks_from == 1 else ''}"
        why = why_not(key_format, value_format, pre_rope)
        if why is not None:
            return f"{calls} are not unpacked for flash attention ({why}); {self.otherwise}"
        return f"{calls} are unpacked to 16 bits in bounded pieces for flash attention"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.new is not None and call.tokens >= self.unpacks_from:
            from kvfold.kernels.long.attend import attend_unpacked, serves

            if serves(call):
                return attend_unpacked(call)
        return self.read_packed(call)

    @abstractmethod
    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        """As :meth:`attend`, of calls that are not unpacked."""


@dataclass
class Choice:
    """Which kernel serves a layer, and why not the ones before it in the list."""

    kernel: AttentionKernel
    passed_over: dict[str, str] = field(default_factory=dict)
    many_tokens: str | None = None
    """What becomes of calls of many tokens; see :meth:`AttentionKernel.many_tokens`."""

    @property
    def reason(self) -> str:
        """One line for reports."""
        if not self.passed_over:
            return "first choice"
        kernels: dict[str, list[str]] = {}
        for name, why in self.passed_over.items():
            kernels.setdefault(why, []).append(name)
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in kernels.items())
