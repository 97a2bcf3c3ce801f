"""What a kernel is given and what it returns. Kernels know formats, never methods."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvfold.formats import Fields, Format
from kvfold.rope import Rope

if TYPE_CHECKING:
    from kvfold.layer import FoldedLayer


@dataclass
class Span:
    """Blocks that lie together: ``keys`` and ``values`` are fields ``[batch, num_kv_heads, blocks, ...]``; ``start``
    is the index, within the packed part of every sequence, of the span's first token."""

    start: int
    keys: Fields
    values: Fields


@dataclass
class DensePart:
    """Full-precision tokens: ``keys``, ``values`` [batch, num_kv_heads, n, head_dim]; ``valid`` bool [batch, n]."""

    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True)
class Windows:
    """The sink and recent windows of a batch. Iterating gives them as :class:`DensePart`, with masks.

    Attributes
    ----------
    sink : pair of Tensor [batch, num_kv_heads, slots, head_dim], contiguous
        Keys and values; position p of a sequence lies in slot p. ``slots`` may be 0.
    ring : pair of Tensor [batch, num_kv_heads, slots, head_dim], contiguous
        Token n after the sink lies in slot n % slots; those from ``packed_len`` to ``packed_len + recent_len`` are valid.
    sink_len, packed_len, recent_len : Tensor, int32 [batch]
        On the device. Slots without a token may hold anything.
    """

    sink: tuple[torch.Tensor, torch.Tensor]
    ring: tuple[torch.Tensor, torch.Tensor]
    sink_len: torch.Tensor
    packed_len: torch.Tensor
    recent_len: torch.Tensor

    def __iter__(self) -> Iterator[DensePart]:
        sink, ring = (torch.arange(side[0].shape[2], device=side[0].device) for side in (self.sink, self.ring))
        if len(sink):
            yield DensePart(*self.sink, sink < self.sink_len.unsqueeze(-1))
        if len(ring):
            age = (ring - self.packed_len.unsqueeze(-1)) % len(ring)
            yield DensePart(*self.ring, age < self.recent_len.unsqueeze(-1))


@dataclass
class AttentionCall:
    """One layer's attention of a few new tokens over everything cached and over themselves (causal).

    Attributes
    ----------
    rows : Tensor, float32 [batch, num_kv_heads, heads_per_kv * tokens, head_dim]
        Queries after RoPE, all query heads of a KV head together.
    packed_queries : Tensor or None, float32 [batch, num_kv_heads, heads_per_kv * tokens, key_format.width]
        The same as decoded keys meet them; None when nothing is packed.
    packed_bias : Tensor or None, float32 [batch, num_kv_heads, heads_per_kv * tokens]
        Added to the scores of packed tokens, before ``scale``.
    scale : float
    key_format, value_format : Format
    spans : list of Span
    packed_len : Tensor, int32 [batch]
        Packed tokens of each sequence; what lies beyond is uninitialized.
    uniform : bool
        Whether all sequences have the same number, so that nothing in ``spans`` lies beyond.
    dense : Windows, or list of DensePart
        Sink and recent windows.
    new_keys, new_values : Tensor [batch, num_kv_heads, tokens, head_dim]
    new_valid : Tensor or None, bool [batch, tokens]
        False at padding.
    rope, first_position
        Where keys are stored before RoPE: the rotation, and the position of each sequence's first packed token, int64
        [batch].
    unproject : callable or None
        Linear map from sums of decoded values, float32 [batch, num_kv_heads, rows, value_format.width], to outputs
        [..., head_dim]; None where values decode to themselves.
    softcap : float or None
        Scores, scaled, go into the softmax as ``softcap * tanh(score / softcap)``.
    sinks : Tensor or None, float [num_heads]
        Learned sinks: a query head's softmax has one score more, this one, for a value of zeros.
    """

    rows: torch.Tensor
    packed_queries: torch.Tensor | None
    packed_bias: torch.Tensor | None
    scale: float
    key_format: Format
    value_format: Format
    spans: list[Span]
    packed_len: torch.Tensor
    uniform: bool
    dense: Iterable[DensePart]
    new_keys: torch.Tensor
    new_values: torch.Tensor
    new_valid: torch.Tensor | None
    first_position: torch.Tensor
    rope: Rope | None = None
    unproject: Callable[[torch.Tensor], torch.Tensor] | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionKernel(ABC):
    """An implementation of attention over packed caches."""

    name: ClassVar[str]
    in_place_tokens: ClassVar[int] = 0
    """Most query tokens of :meth:`attend_in_place`."""
    limits: ClassVar[str] = ""
    """Calls that it hands to the reference kernel, for reports."""
    dtypes: ClassVar[frozenset[torch.dtype] | None] = None
    """Element types of queries and windows that it reads; None: any."""
    caps_scores: ClassVar[bool] = False
    """Whether it serves layers of soft-capped scores."""

    @abstractmethod
    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        """Why this kernel cannot serve these formats on this device; None if it can."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention output [batch, num_kv_heads, heads_per_kv * tokens, head_dim], float32 or of the new keys' dtype."""

    def attend_in_place(
        self,
        layer: "FoldedLayer",
        query: torch.Tensor,
        scale: float,
        lengths: Any = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the newest tokens, which already lie in the layer's windows.

        Parameters
        ----------
        query : Tensor [batch, num_heads, tokens, head_dim]
        lengths : Lengths or None
            With int32 ``packed``, ``sink`` and ``recent`` [batch]; None: the layer's. A decode graph keeps its own.
        sinks : Tensor or None, float [num_heads]
            See :class:`AttentionCall`.

        Returns
        -------
        Tensor, like ``query``
        """
        raise NotImplementedError(self.name)


@dataclass
class Partial:
    """Attention over part of the tokens: unnormalized output, row maxima and row sums of exp(score - maximum)."""

    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor, valid: torch.Tensor | None, values: torch.Tensor) -> "Partial":
        """From scores float32 [batch, heads, rows, n], their validity (broadcastable) and values [batch, heads, n, d].

        Invalid tokens may hold anything, NaN included. None: all are valid.
        """
        if valid is None:
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp_()
            return cls(weights @ values, top, weights.sum(-1, keepdim=True))
        scores = scores.masked_fill(~valid, float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
        weights = (scores - top).exp()
        seen = valid.any(-2).unsqueeze(-1)  # what no row may see is set to 0, for 0 x NaN would be NaN
        return cls(weights @ values.masked_fill(~seen, 0.0), top, weights.sum(-1, keepdim=True))

    @classmethod
    def of_sinks(cls, sinks: torch.Tensor, like: "Partial") -> "Partial":
        """Learned sinks, float [num_heads], as a part: one score per query head, whose value is 0."""
        _, heads, rows, _ = like.top.shape
        top = sinks.float().view(heads, -1, 1).expand(-1, -1, rows * heads // sinks.numel()).reshape(1, heads, rows, 1)
        return cls(torch.zeros_like(like.out), top.expand_as(like.top), torch.ones_like(like.total))

    @staticmethod
    def merge(parts: "list[Partial]") -> torch.Tensor:
        """Normalized attention over all parts together (log-sum-exp)."""
        top = torch.stack([p.top for p in parts]).amax(0)
        factors = [(p.top - top).exp() for p in parts]
        total = sum((f * p.total for f, p in zip(factors, parts, strict=True)), torch.zeros_like(top))
        out = sum((f * p.out for f, p in zip(factors, parts, strict=True)), torch.zeros_like(parts[0].out))
        return out / total.clamp_min(torch.finfo(total.dtype).tiny)  # a padding row sees nothing and gets 0


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
        return "; ".join(f"{name}: {why}" for name, why in self.passed_over.items())
