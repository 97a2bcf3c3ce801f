"""Attention of short calls over pages by kernels: raw tokens, pieces of packed ones, their merge; in one launch if possible."""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton

from kvfold.arithmetic import lasting
from kvfold.formats import Fields, Format, Paged, Projected
from kvfold.formats.binary import BinaryCodes, ValueRows
from kvfold.kernels.common.partials import LOG2E, early_launch
from kvfold.kernels.common.windows import stages, tile_sizes
from kvfold.kernels.device import device_info
from kvfold.kernels.generic import decode as blocks
from kvfold.kernels.gluon import tables_of
from kvfold.kernels.paged._attend import merge_pieces_kernel, pieces_kernel, raw_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.work import Workspace, raw_parts
from kvfold.kernels.stored import rotation_of
from kvfold.rope import Rope

Pieces = Callable[[PagedCall, torch.Tensor, int, Workspace, torch.Tensor], None]


def choose(key_format: Format, value_format: Format, pre_rope: bool, device: torch.device) -> Pieces:
    """The kernel that reads pages of these formats.

    Raises
    ------
    ValueError
        If none does.
    """
    if device.type == "cuda" and not pre_rope:
        from kvfold.kernels.paged import gluon

        if gluon.unsupported(key_format, value_format) is None:
            return gluon.pieces
    if why := unsupported(key_format, value_format, pre_rope):
        raise ValueError(f"attend: {why}")
    return pieces


def why_not(key_format: Format, value_format: Format, pre_rope: bool, device: torch.device) -> str | None:
    """Why no kernel reads pages of these formats; None if one does."""
    try:
        choose(key_format, value_format, pre_rope, device)
    except ValueError as error:
        return str(error).removeprefix("attend: ")
    return None


def serving(key_format: Format, value_format: Format, rope: Rope | None, rows: int, device: torch.device) -> str:
    """The kernel that reads pages of these formats in steps of ``rows`` query rows per KV head, as the registry names its
    kind; behind it, where there is a kernel with tables for such codes, why that does not.

    Raises
    ------
    ValueError
        If none does.
    """
    name = "blocks" if choose(key_format, value_format, rope is not None, device) is pieces else "gluon"
    if tables_of(key_format, value_format) is None:
        return name
    from kvfold.kernels.paged import tables

    why = tables.unsupported(key_format, value_format, rope, rows, device)
    return f"{name} (tables: {why})" if why else "tables"


@lasting(256)
def unsupported(key_format: Format, value_format: Format, pre_rope: bool = False) -> str | None:
    """Why the plain kernel cannot read these formats in pages; None if it can."""
    return blocks.unsupported(_under(key_format), value_format, pre_rope, any_order=not pre_rope)


def _under(key_format: Format) -> Format:
    """What holds the codes of keys: a learned map before it is the queries' affair."""
    return key_format.inner if isinstance(key_format, Projected) else key_format


def _mapped(call: PagedCall, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries as packed keys meet them, [tokens, num_heads, head_dim], and what is added to their scores, float32 [tokens,
    num_heads]; None: nothing."""
    if not isinstance(call.key_format, Projected):
        return query, None
    assert call.key_format.maps is not None
    grouped = query.unflatten(1, (call.num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)[None]
    mapped, bias = call.key_format.maps.on(query.device).queries(grouped)
    tokens = len(query)
    mapped, bias = (x[0].unflatten(1, (tokens, -1)).transpose(0, 1).flatten(1, 2).contiguous() for x in (mapped, bias))
    return mapped, bias


def attend(call: PagedCall, out: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """See :func:`kvfold.kernels.paged.attend`; the step was prepared, and no sequence has more than the workspace's tokens."""
    assert call.query is not None
    step, (_, num_heads, dim) = call.step, call.query.shape
    if call.softcap is not None:
        raise ValueError("softcap: soft-capped scores are not computed over pages by kernels")
    if isinstance(call.value_format, BinaryCodes) != isinstance(call.unproject, ValueRows):
        raise ValueError(f"unproject: {call.unproject!r}; allowed: ValueRows, for sums of bits")
    tokens, heads = step.max_query_len, call.num_kv_heads
    rows = num_heads // heads * tokens
    kernel = _with_tables(call, rows) or choose(
        call.key_format, call.value_format, call.rope is not None, call.query.device
    )
    at_once = kernel is not pieces and _reads_windows(call)
    parts = workspace.item_list.shape[0] + (raw_parts(step, workspace) if at_once else 1) * step.seqs
    if parts * heads * rows > workspace.top.numel() or dim > workspace.out.shape[1]:
        raise ValueError(f"workspace: too small for {step.seqs} sequences of {tokens} tokens and {num_heads} heads")
    query = call.query.to(call.window_keys.dtype)
    if query.stride(-1) != 1:
        query = query.contiguous()
    if at_once:
        kernel(call, query, rows, workspace, out)
        return out
    _raw(call, query, rows, workspace)
    kernel(call, query, rows, workspace, out)
    early = device_info(query.device).has_pdl
    whole = min(dim & -dim, 256 if step.seqs * heads * rows >= 4096 else 32)
    merge_pieces_kernel[(step.seqs * heads * rows, dim // whole)](
        workspace.out,
        workspace.top,
        workspace.total,
        out,
        *out.stride()[:2],
        workspace.top if call.sinks is None else call.sinks,
        step.query_start,
        step.seq_lens,
        workspace.before,
        workspace.items,
        heads,
        rows,
        tokens,
        D=dim,
        PART=whole,
        N=16 if whole > 32 else 64,
        HAS_SINKS=call.sinks is not None,
        EARLY=early,
        num_warps=1 if whole > 32 else 4,
        **early_launch(early),
    )
    return out


def _with_tables(call: PagedCall, rows: int) -> Pieces | None:
    """The kernel that keeps tables of codes in shared memory, where one serves the call."""
    assert call.query is not None
    if call.query.device.type != "cuda" or call.rope is None:
        return None
    from kvfold.kernels.paged import tables

    why = tables.unsupported(call.key_format, call.value_format, call.rope, rows, call.query.device)
    return None if why else tables.pieces


def _reads_windows(call: PagedCall) -> bool:
    from kvfold.kernels.paged import gluon

    return gluon.reads_windows(call)


def _raw(call: PagedCall, query: torch.Tensor, rows: int, workspace: Workspace) -> None:
    """Write the raw tokens' part of every sequence."""
    step, dim = call.step, query.shape[2]
    m, n, warps = tile_sizes(rows, dim)
    early = device_info(query.device).has_pdl
    has_new = call.new_keys is not None
    new_keys, new_values = (call.new_keys, call.new_values) if has_new else (query, query)
    assert new_keys is not None and new_values is not None
    raw_kernel[(triton.cdiv(rows, m), step.seqs * call.num_kv_heads)](
        query,
        *query.stride()[:2],
        step.query_start,
        step.seq_lens,
        workspace.before,
        workspace.sink,
        workspace.packed,
        workspace.items,
        call.window_keys,
        *call.window_keys.stride()[:3],
        call.window_values,
        *call.window_values.stride()[:3],
        step.window_table,
        step.window_table.stride(0),
        new_keys,
        *new_keys.stride()[:2],
        new_values,
        *new_values.stride()[:2],
        workspace.out,
        workspace.top,
        workspace.total,
        float(call.scale) * LOG2E,
        call.num_kv_heads,
        rows,
        step.max_query_len,
        D=dim,
        DP=triton.next_power_of_2(dim),
        M=m,
        N=n,
        HAS_NEW=has_new,
        WINDOW_BLOCK=step.window_block,
        EARLY=early,
        num_warps=warps,
        num_stages=stages(dim, device_info(query.device).shared_memory),
        **early_launch(early),
    )


def pieces(call: PagedCall, query: torch.Tensor, rows: int, workspace: Workspace, out: torch.Tensor) -> None:
    """Write the parts of all pieces of packed tokens."""
    step, heads, key_format = call.step, call.num_kv_heads, _under(call.key_format)
    query, bias = _mapped(call, query)
    rotary = 0 if call.rope is None else 2 * call.rope.inv_freq.numel()
    readers = blocks.readers_of(key_format, call.value_format, rotary)
    most = blocks.resident(readers)
    plan = _plan(key_format, readers, step.seqs * heads, rows, workspace.processors)
    fixed = blocks.constants(key_format, call.value_format, plan, rotary, bias is not None)
    nothing, device = workspace.top, query.device
    sides = ((key_format, call.keys), (call.value_format, call.values))
    arguments: list[Any] = []
    for i, ((form, fields), reader) in enumerate(zip(sides, readers, strict=True)):
        stored = reader.fields(fields)
        of_pages = _of_pages(form, fields, nothing)
        arguments += [
            stored,
            steps(stored),
            reader.tables(device),
            *of_pages,
            blocks.basis_of(form, reader.width, device, i == 1, nothing),
            steps(of_pages),
        ]
    fixed["V_ROWS"] = isinstance(call.unproject, ValueRows)
    if isinstance(call.unproject, ValueRows):
        fixed["V_OUT"], arguments[-2] = fixed["D"], call.unproject.rows
    freq, table = nothing, nothing
    if call.rope is not None:
        rotation = rotation_of(call.rope, fixed["KW"] // 2, plan.tokens, fixed["K_GROUPS"], fixed["D"], device)
        freq, table = rotation.freq, rotation.table
    row_blocks = math.ceil(rows / plan.rows)
    programs = workspace.processors * min(most, 4)
    words = (fixed["K_SCRATCH"] + fixed["V_SCRATCH"]) * programs
    pieces_kernel[(programs,)](
        query,
        *query.stride()[:2],
        nothing if bias is None else bias,
        workspace.items,
        workspace.item_list,
        step.table,
        step.table.stride(0),
        *arguments,
        freq,
        table,
        workspace.out,
        workspace.top,
        workspace.total,
        torch.empty(words, dtype=torch.int64, device=device),
        float(call.scale) * LOG2E,
        heads,
        rows,
        row_blocks,
        step.max_query_len,
        step.seqs,
        **fixed,
        **blocks.options(readers, plan.warps),
    )


def ready(key_format: Format, value_format: Format, rope: Rope | None, device: torch.device) -> None:
    """Make the tables that :func:`pieces` reads, for any number of query rows."""
    if why_not(key_format, value_format, rope is not None, device):
        return
    if choose(key_format, value_format, rope is not None, device) is not pieces:
        return
    if device.type == "cuda":
        from kvfold.kernels.paged import tables

        tables.ready(key_format, value_format, rope, device)
    rotary = 0 if rope is None else 2 * rope.inv_freq.numel()
    readers = blocks.readers_of(_under(key_format), value_format, rotary)
    for reader in readers:
        reader.tables(device)
    if isinstance(key_format, Projected) and key_format.maps is not None:
        key_format.maps.on(device)
    if rope is None:
        return
    for rows in (8, 16, 32):
        plan = _plan(key_format, readers, 1, rows, 1)
        fixed = blocks.constants(key_format, value_format, plan, rotary)
        rotation_of(rope, fixed["KW"] // 2, plan.tokens, fixed["K_GROUPS"], fixed["D"], device)


def _plan(key_format: Format, readers: list[Any], jobs: int, rows: int, processors: int) -> blocks.Plan:
    width, turned = max(reader.width for reader in readers), blocks.is_turned(key_format)
    return blocks.make_plan(width, jobs, rows, 1 << 20, processors, turned, blocks.resident(readers))


def steps(fields: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Elements from a page, and from a head, to the next, field by field."""
    return tuple(step for t in fields for step in (t.stride()[:2] if t.ndim > 1 else (0, 0)))


def _of_pages(form: Format, fields: Fields, nothing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and norms of pages, where a format has them."""
    if not isinstance(form, Paged):
        return nothing, nothing
    return fields["mean"] if form.mean else nothing, fields["norm"] if form.norm else nothing
