"""A prompt's chunk on a GPU: pages are unpacked to 16 bits, piece by piece, for the platform's own flash attention.

Its parts (the chunk itself and raw tokens before it; pieces of packed tokens) are merged by log-sum-exp. All that the host has
to know of a chunk is where it begins; what lies raw and what packed is read from the windows' table on the device.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.engines.vllm.plugin import UNSEEN
from kvfold.formats.paged import PAGE
from kvfold.kernels.paged import PagedCall, PagedStep, reference, unpacking

PIECE = 8192
"""Packed tokens that exist unpacked at a time."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens of one sequence.

    Attributes
    ----------
    row : int
        The sequence.
    start, count : int
        Its tokens among the step's.
    before : int
        Tokens that it has before the step.
    """

    row: int
    start: int
    count: int
    before: int

    def raw_from(self, step: PagedStep) -> int:
        """First of the tokens that lie raw up to the chunk, apart from the sink; 0 where all before it do."""
        packed = max(self.before - step.recent, 0) // step.block * step.block
        return packed if packed > step.sink else 0

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.count)


class Pages:
    """A sequence's pages, as the reference asks for them; the host does not look at the table."""

    def __init__(self, step: PagedStep, row: int) -> None:
        self.table = step.table[row]

    def pages(self, stop: int) -> torch.Tensor:
        return self.table[: -(-stop // PAGE)].long()


def attend_chunk(call: PagedCall, chunk: Chunk, out: torch.Tensor) -> None:
    """Attention of a chunk over what is cached and over itself, written to its rows of ``out`` [tokens, num_heads, head_dim].

    Parameters
    ----------
    call : PagedCall
        With query and new tokens; the step has been stored.
    """
    assert call.query is not None and call.new_keys is not None and call.new_values is not None
    query, keys, values = (t[chunk.span] for t in (call.query, call.new_keys, call.new_values))
    raw_from = chunk.raw_from(call.step)
    if chunk.before:
        old_keys, old_values = either(call, chunk, raw_from, chunk.before)
        keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
    whole = flash(query, keys, values, call.scale, causal=True)
    for start in range(0, raw_from, PIECE):
        part = flash(query, *packed(call, chunk, start, min(start + PIECE, raw_from)), call.scale, causal=False)
        whole = merged(part, whole)
    out[chunk.span] = whole[0]


def packed(call: PagedCall, chunk: Chunk, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens ``start`` to ``stop``, which are packed but for the sink; [tokens, num_kv_heads, head_dim]."""
    keys, values = unpacked(call, chunk, start, stop)
    sink = min(call.step.sink, stop)
    if start < sink:
        for side, window in ((keys, call.window_keys), (values, call.window_values)):
            side[: sink - start] = chosen(call, chunk, start, side[: sink - start], window)
    return keys, values


def either(call: PagedCall, chunk: Chunk, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens that lie raw, or, where a shared prefix has no window, packed."""
    found: Iterator[torch.Tensor] = iter(unpacked(call, chunk, start, stop))
    keys, values = (
        chosen(call, chunk, start, side, window)
        for side, window in zip(found, (call.window_keys, call.window_values), strict=True)
    )
    return keys, values


def unpacked(call: PagedCall, chunk: Chunk, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What pages make of tokens ``start`` to ``stop``; anything where they are not closed."""
    dtype, step = call.window_keys.dtype, call.step
    sides = ((call.key_format, call.keys), (call.value_format, call.values))
    if os.environ.get(UNSEEN) == "1" and not any(unpacking.unsupported(form) for form, _ in sides):
        table = step.table[chunk.row]
        keys, values = (unpacking.unpack(form, fields, table, start, stop, dtype) for form, fields in sides)
        return keys, values
    end, count = -(-stop // step.block) * step.block, stop - start
    keys, values = reference.unpacked(call, Pages(step, chunk.row), start, end)  # type: ignore[arg-type]
    return keys[0, :, :count].transpose(0, 1).to(dtype), values[0, :, :count].transpose(0, 1).to(dtype)


def chosen(call: PagedCall, chunk: Chunk, start: int, packed: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """Tokens from ``start`` on: raw where the window has a block, else as they are packed."""
    step = call.step
    at = torch.arange(start, start + packed.shape[0], device=packed.device)
    block = step.window_table[chunk.row, at // step.window_block].long()
    raw = window[block, at % step.window_block]
    return torch.where((block != step.null).view(-1, 1, 1), raw, packed)


Part = tuple[torch.Tensor, torch.Tensor]


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Part:
    """Attention and its log-sum-exp [num_heads, tokens]; causal: the queries are the last of the keys' tokens."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    tokens, length = query.shape[0], keys.shape[0]

    def ends(n: int) -> torch.Tensor:
        return torch.arange(0, 2 * n, n, dtype=torch.int32, device=query.device)

    out, total = flash_attn_varlen_func(
        q=query,
        k=keys.contiguous(),
        v=values.contiguous(),
        max_seqlen_q=tokens,
        cu_seqlens_q=ends(tokens),
        max_seqlen_k=length,
        cu_seqlens_k=ends(length),
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        fa_version=get_flash_attn_version(head_size=query.shape[2]),
    )
    return out, total


def merged(a: Part, b: Part) -> Part:
    """Two parts as one."""
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    out, total = torch.empty_like(b[0]), torch.empty_like(b[1])
    merge_attn_states(out, a[0], a[1], b[0], b[1], total)
    return out, total
