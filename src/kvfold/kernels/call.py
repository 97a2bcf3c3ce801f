"""The one value that a kernel is given: queries, and what they attend to. Kernels know formats, never methods or layers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from kvfold.formats import Fields, Format
from kvfold.rope import Rope

Project = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor | None]]
"""As ``project`` of :class:`AttentionCall`."""


@dataclass
class Span:
    """Blocks that lie together: ``keys`` and ``values`` are fields ``[batch, num_kv_heads, blocks, ...]``; ``start``
    is the index, within the packed part of every sequence, of the span's first token."""

    start: int
    keys: Fields
    values: Fields


@dataclass
class DensePart:
    """Full-precision tokens: ``keys``, ``values`` [batch, num_kv_heads, n, head_dim]; ``valid`` bool [batch, n], or
    [batch, tokens, n] where query tokens see different ones."""

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

    def of(self, sequences: slice) -> "Windows":
        """Those of some sequences."""
        sink, ring = ((keys[sequences], values[sequences]) for keys, values in (self.sink, self.ring))
        return Windows(sink, ring, *(n[sequences] for n in (self.sink_len, self.packed_len, self.recent_len)))

    def of_newest(self, tokens: int) -> Iterator[DensePart]:
        """The same for the newest ``tokens`` tokens of every sequence, which lie in the windows: each sees those before it and
        itself."""
        sink, ring = (torch.arange(side[0].shape[2], device=side[0].device) for side in (self.sink, self.ring))
        sink_len, packed_len, recent_len = (n.view(-1, 1, 1) for n in (self.sink_len, self.packed_len, self.recent_len))
        later = torch.arange(tokens - 1, -1, -1, device=sink_len.device).view(1, -1, 1)  # tokens that follow a query's
        if len(sink):  # all tokens lie there, or the sequence is longer, and later ones lie in the ring
            yield DensePart(*self.sink, sink < sink_len - (later - recent_len).clamp_min(0))
        if len(ring):
            yield DensePart(*self.ring, (ring - packed_len) % len(ring) < recent_len - later)


@dataclass(frozen=True)
class NewTokens:
    """A call's own tokens: ``keys``, ``values`` [batch, num_kv_heads, tokens, head_dim]; ``valid`` bool [batch, tokens], False
    at padding, or None."""

    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor | None = None

    def of(self, sequences: slice) -> "NewTokens":
        """Those of some sequences."""
        return NewTokens(
            self.keys[sequences], self.values[sequences], None if self.valid is None else self.valid[sequences]
        )


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention of a few new tokens over everything cached and over themselves (causal).

    The call's own keys and values are given (``new``), or they lie in the windows already, as their newest tokens.

    Attributes
    ----------
    query : Tensor [batch, num_heads, tokens, head_dim]
        After RoPE; query heads of a KV head are adjacent.
    scale : float
        Of the scores.
    num_kv_heads : int
    key_format, value_format : Format
        Of packed storage, apart from statistics that ``project`` puts into the query.
    spans : list of Span
        Packed storage; none where nothing is packed.
    packed_len : Tensor, int32 [batch]
        Packed tokens of each sequence; what lies beyond is uninitialized.
    windows : Windows, or list of DensePart
        Sink and recent windows.
    new : NewTokens or None
        None: the call's tokens lie in the windows, and none is padding.
    uniform : bool
        Whether all sequences have as many packed tokens as ``spans`` hold.
    packed : tuple of int or None
        Packed tokens of every sequence, where the host knows them.
    project : callable or None
        From queries [batch, num_kv_heads, rows, head_dim] and a dtype to (the same as decoded keys meet them, of that dtype;
        what is added to their scores of packed tokens before ``scale``, float32 [batch, num_kv_heads, rows], or None). None:
        queries meet keys as they are.
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

    Notes
    -----
    ``rows`` and what follows from it are computed when a kernel first asks for them.
    """

    query: torch.Tensor
    scale: float
    num_kv_heads: int
    key_format: Format
    value_format: Format
    spans: list[Span]
    packed_len: torch.Tensor
    windows: Iterable[DensePart]
    new: NewTokens | None
    uniform: bool = False
    project: Project | None = None
    rope: Rope | None = None
    first_position: torch.Tensor | None = None
    unproject: Callable[[torch.Tensor], torch.Tensor] | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    packed: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.query.shape[2]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of ``rows``."""
        batch, heads, tokens, dim = self.query.shape
        return batch, self.num_kv_heads, heads // self.num_kv_heads * tokens, dim

    @cached_property
    def rows(self) -> torch.Tensor:
        """Queries, all query heads of a KV head together: float32 [batch, num_kv_heads, heads_per_kv * tokens, head_dim]."""
        return self.grouped(self.query.float())

    @cached_property
    def projected(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``rows`` as packed keys meet them, float32, and their bias; see ``project``."""
        return (self.rows, None) if self.project is None else self.project(self.grouped(self.query), torch.float32)

    def grouped(self, query: torch.Tensor) -> torch.Tensor:
        """[batch, num_heads, tokens, ...] as [batch, num_kv_heads, heads_per_kv * tokens, ...]."""
        return query.unflatten(1, (self.num_kv_heads, -1)).flatten(2, 3)

    def ungrouped(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`grouped`."""
        return rows.unflatten(2, (-1, self.tokens)).flatten(1, 2)

    def parts(self) -> Iterable[DensePart]:
        """The windows, with what each query token sees of them."""
        if self.new is not None:
            return self.windows
        assert isinstance(self.windows, Windows)
        return self.windows.of_newest(self.tokens)
