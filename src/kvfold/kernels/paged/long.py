"""Calls of many tokens: bounded pieces of a sequence are unpacked for flash attention, and merged by log-sum-exp.

Lengths are read on the host, once a step. Sequences of few tokens in the same step (decoding beside a prompt's chunk) are left
to the kernels of short calls.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from kvfold.kernels.paged import reference
from kvfold.kernels.paged.call import PagedCall, Row
from kvfold.kernels.paged.work import Workspace

PIECE = 8192
"""Packed tokens that exist unpacked at a time, for each layer anew."""

Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""From queries [tokens, num_heads, head_dim], keys and values [n, num_kv_heads, head_dim], whether query i sees keys 0 to i
only (then n is ``tokens``), and the scale: outputs like the queries, and the logarithm of the sums of exponentials, float32
[tokens, num_heads]."""


def attend(call: PagedCall, out: torch.Tensor, workspace: Workspace | None, flash: Flash | None = None) -> torch.Tensor:
    """See :func:`kvfold.kernels.paged.attend`; some sequence has more tokens than the workspace's short calls.

    Parameters
    ----------
    workspace : Workspace or None
        For the sequences of few tokens; None: they are treated like the others.
    flash : callable or None
        The platform's attention; None: Torch's.
    """
    from kvfold.kernels.paged import attention

    if call.softcap is not None:
        raise ValueError("softcap: soft-capped scores are not computed over pages by kernels")
    short = 0 if workspace is None else workspace.short
    counts = [row.count for row in call.step.host if 0 < row.count <= short]
    if counts and workspace is not None:
        attention.attend(replace(call, step=replace(call.step, max_query_len=max(counts))), out, workspace)
    for row in call.step.host:
        if row.count > short:
            out[row.start : row.start + row.count] = _attend_row(call, row, flash or torch_flash)
    return out


def _attend_row(call: PagedCall, row: Row, flash: Flash) -> torch.Tensor:
    """Attention of one sequence's tokens, float32 [tokens, num_heads, head_dim]."""
    assert call.query is not None
    own = slice(row.start, row.start + row.count)
    query = call.query[own].to(call.window_keys.dtype)
    if call.new_keys is not None and call.new_values is not None:
        new = call.new_keys[own], call.new_values[own]
    else:
        slots = row.slots(row.before, row.after)
        new = call.window_keys[slots], call.window_values[slots]
    sums, total = flash(query, *new, True, call.scale)
    sums = sums.float()
    for keys, values in _cached(call, row):
        more, other = flash(query, keys, values, False, call.scale)
        both = torch.logaddexp(total, other)
        sums = sums.mul_((total - both).exp_().unsqueeze(-1)).addcmul_(
            more.float(), (other - both).exp_().unsqueeze(-1)
        )
        total = both
    if call.sinks is not None:
        sums *= torch.sigmoid(total - call.sinks.float()).unsqueeze(-1)
    return sums


def _cached(call: PagedCall, row: Row) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the tokens before the step, [n, num_kv_heads, head_dim] of the windows' dtype, in bounded pieces."""
    dtype = call.window_keys.dtype
    windows = call.window_keys, call.window_values
    raw = [[window[row.slots(*span)] for span in ((0, row.sink), (row.packed, row.before))] for window in windows]
    if row.packed <= row.sink:
        if row.before:
            yield torch.cat(raw[0]), torch.cat(raw[1])
        return
    for start in range(row.sink, row.packed, PIECE):
        stop = min(start + PIECE, row.packed)
        keys, values = reference.unpacked(call, row, start, stop)
        if call.unproject is not None:
            values = call.unproject(values)
        pair = [x[0].transpose(0, 1).to(dtype) for x in (keys, values)]
        if stop == row.packed:  # raw tokens share the last one's call
            pair = [torch.cat((x, *some)) for x, some in zip(pair, raw, strict=True)]
        yield pair[0], pair[1]


def torch_flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's flash attention, as :data:`Flash` says."""
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
    out, total = out.reshape(num_heads, tokens, -1), total.reshape(num_heads, tokens)
    return out.transpose(0, 1), total.transpose(0, 1).float()
