"""What a server gives: where a step's tokens lie, shared by all layers, and one layer's pages, windows and queries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch

from kvfold.arithmetic import lasting
from kvfold.errors import KVFoldError
from kvfold.formats import Fields, Format
from kvfold.formats.binary import BitSearch
from kvfold.formats.paged import PAGE
from kvfold.kernels.paged.layout import PageLayout, closed_from
from kvfold.rope import Rope

IN_PLACE = 16
"""Most tokens of a sequence in a call whose tokens are read from the windows."""


Encode = Callable[[torch.Tensor, torch.Tensor, Fields | None], Fields]


@dataclass(frozen=True)
class Steering:
    """How a method moves channels of keys before it encodes them (SQuat): for kernels, and as it does so itself.

    Equal where slices are as wide: kernels are checked once for all of them.

    Attributes
    ----------
    width : int
        Channels of a slice.
    update : Tensor, float32 [num_kv_heads, head_dim - width, head_dim - width]
    encode_keys : callable
        As :class:`PagedCall` takes it.
    """

    width: int
    update: torch.Tensor = field(compare=False)
    encode_keys: Encode = field(compare=False)


@dataclass(frozen=True)
class Maps:
    """What calls of a method need beside formats: :class:`PagedCall`'s fields of keys before RoPE and of codebooks, by name.

    Equal where there is as much of it: kernels are checked once for all layers.

    Attributes
    ----------
    heads : int
        KV heads that there are tables of.
    names : tuple of str
    given : mapping
    """

    heads: int
    names: tuple[str, ...]
    given: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, heads: int, given: Mapping[str, Any]) -> Self:
        return cls(heads, tuple(sorted(given)), given)


@dataclass(frozen=True)
class Following:
    """Steering by the queries of a page's own 128 tokens (SQuat): pages are encoded when they are whole.

    Of every token one query counts, that of a KV head's query heads in turn (:func:`in_turn`): it lies in the windows until the
    page is whole. So a page depends on its request's tokens alone.

    Attributes
    ----------
    width : int
        Channels of a slice.
    rank : int
        Directions that count; 0: all.
    lam : float
        Weight of the queries' second moments, which are divided by their mean over channels.
    encode_keys : callable
        From float32 keys [1, num_kv_heads, tokens, head_dim] of a page, their positions and its queries
        [1, num_kv_heads, 128, head_dim] to fields.
    """

    width: int
    rank: int
    lam: float
    encode_keys: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Fields] = field(compare=False)


def in_turn(query: torch.Tensor, positions: torch.Tensor, num_kv_heads: int, window_block: int) -> torch.Tensor:
    """The query of a token that counts, [tokens, num_kv_heads, head_dim].

    Parameters
    ----------
    query : Tensor [tokens, num_heads, head_dim]
    positions : Tensor, int64 [tokens]
    """
    grouped = query.unflatten(1, (num_kv_heads, -1))
    turn = positions % window_block % grouped.shape[2]
    return grouped[torch.arange(len(positions), device=query.device), :, turn]


@dataclass(frozen=True)
class PagedStep:
    """Which tokens a step computes, and where those before them lie: the same for all layers.

    A sequence that has ``n`` tokens after the step, ``n0`` of them before it, is read like this (positions are absolute):

    * ``0`` to ``min(sink, n0)`` raw,
    * from there to ``P(n0) = max((n0 - recent) // block * block, sink)`` packed,
    * ``P(n0)`` to ``n0`` raw,
    * and the step's own tokens, each seeing those before it and itself.

    Window blocks that are missing (``window_table`` says ``null``) at the beginning of a raw range are read packed: a shared
    prefix has no window. Pages hold every block of ``block`` tokens from the step on that completes it, and, where a format
    has statistics per page, all that these are taken of.

    Attributes
    ----------
    query_start : Tensor, int32 [seqs + 1]
        First token of each sequence among the step's tokens.
    seq_lens : Tensor, int32 [seqs]
        Tokens of each sequence after the step. 0: a padded row, of which nothing is read or written, whatever its
        ``query_start`` says.
    table : Tensor, int32 [seqs, max_pages]
        Packed page of tokens ``128 p`` to ``128 p + 127``. Read up to the last token before the step; the rest may hold
        anything.
    window_table : Tensor, int32 [seqs, max_window_blocks]
        Window block of the tokens from position ``window_block * i`` on. Read for the step's tokens, for ``P(n0)`` to ``n0``,
        for what closing needs (the tokens of an unfinished page) and for the sink; the rest may hold anything.
    max_query_len : int
        Most tokens that a sequence has in the step, or more.
    recent : int
        Newest tokens that are read raw, at least. 96 or more for statistics of whole pages.
    sink : int
        First tokens that are read raw, a multiple of ``block``.
    block : int
        Tokens of a format's block.
    window_block : int
        Tokens of a window block.
    null : int
        What ``window_table`` has where there is no block.
    host_query_start, host_seq_lens : sequence of int or None
        The same on the host, for calls that need them there; None: the device is asked.

    Notes
    -----
    Lengths are read on the device only, and launches depend on shapes, ``max_query_len`` and the workspace: fit for a CUDA
    graph. Calls of many tokens are the exception (:mod:`kvfold.kernels.paged.long`).
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor
    max_query_len: int
    recent: int
    sink: int = 0
    block: int = 32
    window_block: int = 16
    null: int = 0
    host_query_start: Sequence[int] | None = None
    host_seq_lens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.sink % self.block or self.sink < 0 or self.recent < 0:
            raise KVFoldError(
                f"sink={self.sink}, recent={self.recent}: allowed: at least 0, and a sink of whole blocks of {self.block}"
            )
        if self.block % self.window_block:
            raise KVFoldError(
                f"window_block={self.window_block}: allowed: what divides the block's {self.block} tokens"
            )

    @property
    def seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    @cached_property
    def host_rows(self) -> list[tuple[int, int, int]]:
        """Every sequence's first token in the step, its tokens there (none for padding), and those before the step; waits for
        the device where it has to be asked."""
        starts, lens = self.host_query_start, self.host_seq_lens
        starts = self.query_start.tolist() if starts is None else starts
        lens = self.seq_lens.tolist() if lens is None else lens
        counts = [int(starts[i + 1]) - int(starts[i]) if n else 0 for i, n in enumerate(lens)]
        return [(int(starts[i]), counts[i], int(n) - counts[i]) for i, n in enumerate(lens)]

    @cached_property
    def host(self) -> list["Row"]:
        """Every sequence's lengths and tables, on the host: waits for the device."""
        return [Row(self, i, start, count, before + count) for i, (start, count, before) in enumerate(self.host_rows)]


class Row:
    """One sequence of a step, on the host: the definition of what is read and what is closed.

    Attributes
    ----------
    index : int
    start, count : int
        The sequence's tokens among the step's: ``start`` to ``start + count``; none for padding.
    before, after : int
        Its length before and after the step.
    sink : int
        Tokens ``0`` to ``sink`` are read raw.
    packed : int
        Tokens ``sink`` to ``packed`` are read from pages; those from there to ``before`` are raw.
    kept : int
        Tokens from here on are written to the windows: those that are read raw in this step or later.
    """

    def __init__(self, step: PagedStep, index: int, start: int, count: int, after: int) -> None:
        self.step, self.index, self.start, self.after = step, index, start, after
        self.count = count if after else 0
        self.before = after - self.count
        self.sink = min(step.sink, self.before)
        planned = max((self.before - step.recent) // step.block * step.block, self.sink)
        if self._missing(0, self.sink):
            self.sink = 0
        self.packed = planned + self._missing(planned, self.before)
        self.kept = max((after - max(step.recent, IN_PLACE)) // step.block * step.block, 0)

    def _missing(self, start: int, stop: int) -> int:
        """Tokens from ``start`` on that have no window block, up to ``stop``."""
        step, at = self.step, start
        while at < stop and int(step.window_table[self.index, at // step.window_block]) == step.null:
            at += step.window_block
        return min(at, stop) - start

    def pages(self, stop: int) -> torch.Tensor:
        """Pages that hold tokens up to ``stop``, int64."""
        return self.step.table[self.index, : -(-stop // PAGE)].long()

    def slots(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Window blocks, and places in them, of tokens ``start`` to ``stop``, int64."""
        at = torch.arange(start, stop, device=self.step.window_table.device)
        return self.step.window_table[self.index, at // self.step.window_block].long(), at % self.step.window_block

    def due(self, seen: int) -> list[int]:
        """First tokens of the blocks that the step closes, where pages need ``seen`` tokens for their statistics."""
        block = self.step.block
        first = max(self.before - PAGE, 0) // block * block
        return [
            at
            for at in range(first, self.after - block + 1, block)
            if self.before < closing_length(at, block, seen) <= self.after
        ]


def closing_length(first: int, block: int, seen: int) -> int:
    """Length of a sequence with which the block from token ``first`` on is closed."""
    return max(first + block, first // PAGE * PAGE + seen)


@dataclass(frozen=True)
class PagedCall:
    """One layer's share of a step.

    Attributes
    ----------
    step : PagedStep
    key_format, value_format : Format
    keys, values : Fields
        Packed pages as :meth:`PageLayout.views` makes them.
    window_keys, window_values : Tensor [window_pages, window_block, num_kv_heads, head_dim]
        Raw tokens after RoPE, of any strides but adjacent channels.
    scale : float
        Of the scores.
    query : Tensor [tokens, num_heads, head_dim] or None
        After RoPE; query heads of a KV head are adjacent. None: the call only stores.
    new_keys, new_values : Tensor [tokens, num_kv_heads, head_dim] or None
        The step's own tokens, after RoPE. None for :func:`attend`: they lie in the windows already (decode).
    rope : Rope or None
        Where keys are packed before RoPE.
    unproject : callable or None
        As in :class:`kvfold.kernels.call.AttentionCall`.
    softcap : float or None
    sinks : Tensor or None, float [num_heads]
        Learned sinks: see :class:`kvfold.kernels.call.AttentionCall`.
    encode_keys, encode_values : callable or None
        What encodes blocks where it is more than the format itself does: from float32 [1, num_kv_heads, tokens, head_dim],
        positions int64 [1, 1, tokens] and the page's statistics (or None) to fields. For the reference, and for formats
        without encoding kernels.
    update : Tensor or None, float32 [num_kv_heads, head_dim - g, head_dim - g]
        SQuat's update matrix for the encoding kernels (:class:`kvfold.kernels.affine.encode.KeyTransform`).
    bits : BitSearch or None
        How a value's bits are chosen, for the encoding kernels.
    following : Following or None
        Where keys are steered by their page's queries; then :func:`store` needs ``query``.
    window_queries : Tensor or None [window_pages, window_block, num_kv_heads, head_dim]
        Beside ``window_keys``, with ``following``.
    """

    step: PagedStep
    key_format: Format
    value_format: Format
    keys: Fields
    values: Fields
    window_keys: torch.Tensor
    window_values: torch.Tensor
    scale: float
    query: torch.Tensor | None = None
    new_keys: torch.Tensor | None = None
    new_values: torch.Tensor | None = None
    rope: Rope | None = None
    unproject: Callable[[torch.Tensor], torch.Tensor] | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    encode_keys: Encode | None = None
    encode_values: Encode | None = None
    update: torch.Tensor | None = None
    bits: BitSearch | None = None
    following: Following | None = None
    window_queries: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.following is None) != (self.window_queries is None):
            raise ValueError("following, window_queries: one is given without the other")
        if why := unsupported(self.key_format, self.value_format, self.step.recent, self.step.sink):
            raise KVFoldError(f"pages: {why}")
        if self.key_format.block != self.step.block:
            raise ValueError(f"block={self.step.block}: the formats' blocks have {self.key_format.block} tokens")

    @property
    def num_kv_heads(self) -> int:
        return int(self.window_keys.shape[2])

    def side(self, is_key: bool) -> tuple[Format, Fields, torch.Tensor]:
        """Format, pages and windows of keys or of values."""
        if is_key:
            return self.key_format, self.keys, self.window_keys
        return self.value_format, self.values, self.window_values

    @property
    def seen(self) -> int:
        """Tokens of a page that must be there before its first block is closed."""
        return PAGE if self.following is not None else max(closed_from(self.key_format), closed_from(self.value_format))


@lasting(256)
def unsupported(key_format: Format, value_format: Format, recent: int, sink: int = 0) -> str | None:
    """Why formats cannot be served page by page; None if they can.

    Parameters
    ----------
    recent, sink : int
        As in :class:`PagedStep`.
    """
    if why := PageLayout.unsupported(key_format, value_format):
        return why
    for side, form in (("keys", key_format), ("values", value_format)):
        seen = closed_from(form)
        if seen > recent + form.block:
            return f"{side}: recent={recent}: statistics of {seen} tokens; allowed: recent from {seen - form.block} on"
        if seen and sink >= seen:
            return f"{side}: sink={sink}: statistics of a page's first {seen} tokens; allowed: a sink of fewer"
    return None
