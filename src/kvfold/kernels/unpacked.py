"""Calls of many tokens on packed storage: bounded pieces are unpacked to 16 bits for the platform's own flash attention.

A call of hundreds of tokens reads every packed byte for hundreds of queries, so that unpacking once costs less than masks in
the inner loop do. Every query sees every packed token: no mask is needed, and query heads of a KV head are rows of one call.
"""

from collections.abc import Iterator

import torch

from kvfold.formats import Dense, Fields, Format
from kvfold.kernels.call import AttentionCall, Span, Windows
from kvfold.kernels.merge import Partial
from kvfold.kernels.partials import LOG2E, Partials
from kvfold.kernels.windows import attend_windows

PIECE = 8192
"""Packed tokens that exist unpacked at a time."""


def serves(call: AttentionCall) -> bool:
    """Whether :func:`attend_unpacked` can compute this call."""
    return (
        call.new is not None
        and call.uniform
        and isinstance(call.windows, Windows)
        and call.softcap is None
        and call.project is None
        and call.rope is None
        and call.unproject is None
        and call.new.keys.dtype in (torch.float16, torch.bfloat16)
        and not call.query.requires_grad
    )


def attend_unpacked(call: AttentionCall) -> torch.Tensor:
    """Attention of a call's tokens over everything cached and over themselves.

    Parameters
    ----------
    call : AttentionCall
        That :func:`serves` accepts.

    Returns
    -------
    Tensor [batch, num_heads, tokens, head_dim], float32
    """
    assert call.new is not None and isinstance(call.windows, Windows)
    query = call.query.to(call.new.keys.dtype).contiguous()
    rows = call.grouped(query)
    batch, heads, count, dim = rows.shape
    partials = Partials.empty(batch * heads, 1, count, dim, query.device)
    attend_windows(query, call.windows, call.scale, partials, 0, call.new.keys, call.new.values, call.new.valid)
    whole = Partial(
        partials.out.view(rows.shape),
        partials.top.view(batch, heads, count, 1) / LOG2E,
        partials.total.view(batch, heads, count, 1),
    )
    for span in call.spans:
        for keys, values in _pieces(call, span, rows.dtype):
            whole = Partial.join(whole, _flash(rows, keys, values, call.scale))
    if call.sinks is not None:
        whole = Partial.join(whole, Partial.of_sinks(call.sinks, whole))
    return call.ungrouped(Partial.merge([whole]))


def _pieces(call: AttentionCall, span: Span, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Decoded keys and values of a span, piece by piece."""
    blocks, step = next(iter(span.keys.values())).shape[2], PIECE // call.key_format.block
    if isinstance(call.key_format, Dense) and isinstance(call.value_format, Dense):
        step = blocks  # nothing comes into being
    for first in range(0, blocks, step):
        count = min(step, blocks - first)
        sides = ((call.key_format, span.keys), (call.value_format, span.values))
        keys, values = (_decoded(form, form.take(fields, count, first), dtype) for form, fields in sides)
        yield keys, values


def _decoded(form: Format, fields: Fields, dtype: torch.dtype) -> torch.Tensor:
    """Vectors [batch, num_kv_heads, tokens, head_dim]; where they are stored as such, they themselves."""
    if isinstance(form, Dense) and form.dtype == dtype:
        return fields["x"].flatten(-3, -2)
    return form.decode(fields).to(dtype)


def _flash(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Partial:
    """Attention of rows [batch, num_kv_heads, rows, head_dim] over all of the keys, with its log-sum-exp."""
    if rows.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, total = flash(rows, keys, values, 0.0, False, scale=scale)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, total = flash(rows, keys, values, 0.0, False, False, scale=scale)[:2]
    total = total.unsqueeze(-1)
    return Partial(out.float(), total, torch.ones_like(total))
