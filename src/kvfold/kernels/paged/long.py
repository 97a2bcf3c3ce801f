"""Calls of many tokens: bounded pieces of a sequence are unpacked for flash attention, and merged by log-sum-exp.

All that the host has to know of a sequence is where its tokens begin and how many there are; what lies raw and what packed is
read from the tables on the device. Sequences of few tokens in the same step (decoding beside a prompt's chunk) are left to the
kernels of short calls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvfold.formats.paged import PAGE
from kvfold.kernels.paged import reference, unpacking
from kvfold.kernels.paged.call import PagedCall, PagedStep
from kvfold.kernels.paged.work import Workspace

PIECE = 8192
"""Packed tokens that exist unpacked at a time, for each layer anew."""

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some tokens, [tokens, num_heads, head_dim], and the logarithm of the sums of exponentials, float32
[num_heads, tokens]."""


@dataclass(frozen=True)
class Flash:
    """A platform's flash attention.

    Attributes
    ----------
    attend : callable
        From queries [tokens, num_heads, head_dim], keys and values [n, num_kv_heads, head_dim], the scale, and whether query i
        sees keys 0 to i only (then n is ``tokens``), to a :data:`Part`.
    merge : callable
        Two parts over different tokens as one; may write to them.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], Part]
    merge: Callable[[Part, Part], Part]


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


def attend(call: PagedCall, out: torch.Tensor, workspace: Workspace | None, flash: Flash | None = None) -> torch.Tensor:
    """See :func:`kvfold.kernels.paged.attend`; some sequence has more tokens than the workspace's short calls.

    Parameters
    ----------
    workspace : Workspace or None
        For the sequences of few tokens; None: they are treated like the others.
    flash : Flash or None
        The platform's attention; None: Torch's.
    """
    from kvfold.kernels.paged import attention

    short = 0 if workspace is None else workspace.short
    rows = call.step.host_rows
    counts = [count for _, count, _ in rows if 0 < count <= short]
    if counts and workspace is not None:
        attention.attend(replace(call, step=replace(call.step, max_query_len=max(counts))), out, workspace)
    for i, (start, count, before) in enumerate(rows):
        if count > short:
            attend_chunk(call, Chunk(i, start, count, before), out, flash or TORCH)
    return out


def attend_chunk(call: PagedCall, chunk: Chunk, out: torch.Tensor, flash: Flash) -> None:
    """Attention of a chunk over what is cached and over itself, written to its rows of ``out`` [tokens, num_heads, head_dim].

    Parameters
    ----------
    call : PagedCall
        With query; the step has been stored.
    """
    assert call.query is not None
    if call.softcap is not None:
        raise ValueError("softcap: soft-capped scores are not computed over pages by kernels")
    query = call.query[chunk.span].to(call.window_keys.dtype)
    if call.new_keys is not None and call.new_values is not None:
        own = call.new_keys[chunk.span], call.new_values[chunk.span]
    else:
        at = torch.arange(chunk.before, chunk.before + chunk.count, device=query.device)
        own = tuple(_raw(call, chunk, at, window)[0] for window in (call.window_keys, call.window_values))  # type: ignore[assignment]
    whole = flash.attend(query, *own, call.scale, True)
    for keys, values in _cached(call, chunk):
        whole = flash.merge(flash.attend(query, keys, values, call.scale, False), whole)
    sums, total = whole
    if call.sinks is not None:
        sums = sums * torch.sigmoid(total - call.sinks.float().unsqueeze(1)).T.unsqueeze(-1)
    out[chunk.span] = sums


def _cached(call: PagedCall, chunk: Chunk) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the tokens before the step, [n, num_kv_heads, head_dim] of the windows' dtype, in bounded pieces."""
    raw_from = chunk.raw_from(call.step)
    end = raw_from or chunk.before
    for start in range(0, end, PIECE):
        stop = start + PIECE if start + PIECE < end else chunk.before  # raw tokens share the last one's call
        keys, values = _unpacked(call, chunk, start, stop)
        for first, last in ((0, call.step.sink), (raw_from, chunk.before)):
            first, last = max(first, start), min(last, stop)
            if first < last:
                some = slice(first - start, last - start)
                at = torch.arange(first, last, device=keys.device)
                for side, window in ((keys, call.window_keys), (values, call.window_values)):
                    raw, there = _raw(call, chunk, at, window)
                    side[some] = torch.where(there.view(-1, 1, 1), raw, side[some])
        yield keys, values


def _unpacked(call: PagedCall, chunk: Chunk, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What pages make of tokens ``start`` to ``stop``, [n, num_kv_heads, head_dim]; anything where they are not closed."""
    dtype, step = call.window_keys.dtype, call.step
    sides = ((call.key_format, call.keys), (call.value_format, call.values))
    plain = call.rope is None and call.unproject is None
    if call.window_keys.is_cuda and plain and not any(unpacking.why_not(form) for form, _ in sides):
        table = step.table[chunk.row]
        keys, values = (unpacking.any_unpack(form, fields, table, start, stop, dtype) for form, fields in sides)
        return keys, values
    end, count = -(-stop // step.block) * step.block, stop - start
    keys, values = reference.unpacked(call, Pages(step, chunk.row), start, end)  # type: ignore[arg-type]
    if call.unproject is not None:
        values = call.unproject(values)
    return keys[0, :, :count].transpose(0, 1).to(dtype), values[0, :, :count].transpose(0, 1).to(dtype)


def _raw(call: PagedCall, chunk: Chunk, at: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``at`` as they lie in a window, and which have a block there; anything where they have none."""
    step = call.step
    block = step.window_table[chunk.row, at // step.window_block].long()
    return window[block, at % step.window_block], block != step.null


def torch_flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Part:
    """Torch's flash attention, as :class:`Flash` says."""
    tokens, num_heads, _ = query.shape
    heads = keys.shape[1]
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))
    rows = query.transpose(0, 1).unsqueeze(0)
    if causal:
        keys, values = (x.repeat_interleave(num_heads // heads, 1) for x in (keys, values))
    else:  # every row sees every key: the query heads of a KV head are rows of one head
        rows = rows.reshape(1, heads, num_heads // heads * tokens, -1)
    if rows.device.type == "cpu":
        aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, total = aten(rows, keys, values, 0.0, causal, scale=scale)
    else:
        aten = torch.ops.aten._scaled_dot_product_flash_attention
        out, total = aten(rows, keys, values, 0.0, causal, False, scale=scale)[:2]
    return out.reshape(num_heads, tokens, -1).transpose(0, 1), total.reshape(num_heads, tokens).float()


def merged(a: Part, b: Part) -> Part:
    """Two parts as one, in float32."""
    total = torch.logaddexp(a[1], b[1])
    before, after = ((part[1] - total).exp_().T.unsqueeze(-1) for part in (a, b))
    return (a[0].float() * before).addcmul_(b[0].float(), after), total


TORCH = Flash(torch_flash, merged)
