"""Pieces of pages of CommVQ, and of TaSQ's keys with fold's values, by kernels that keep tables of codes in shared memory:
launches them."""

from typing import Any

import torch

from kvfold.formats import Format
from kvfold.formats.binary import ValueRows
from kvfold.formats.codebook import AdditiveCodes
from kvfold.kernels.common.partials import LOG2E
from kvfold.kernels.common.tables import MOST_ROWS, Tables
from kvfold.kernels.gluon import TABLED, tables_of
from kvfold.kernels.learned.decode import LearnedKeyTables
from kvfold.kernels.paged._tables import codebook_pieces_kernel, learned_keys_pieces_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.gluon import region_of
from kvfold.kernels.paged.work import Workspace
from kvfold.rope import Rope


def unsupported(
    key_format: Format, value_format: Format, rope: Rope | None, rows: int, device: torch.device
) -> str | None:
    """Why these kernels do not serve pages, with ``rows`` query rows per KV head; None if one does."""
    of = tables_of(key_format, value_format)
    if of is None:
        return f"keys: {key_format.kind} storage; allowed: {', '.join(TABLED)}"
    if device.type != "cuda" or rope is None or rows > MOST_ROWS:
        turned = None if rope is None else "given"
        return f"device {device.type}, rope {turned}, {rows} query rows; allowed: cuda, a rotation, up to {MOST_ROWS}"
    if why := of.unsupported(key_format, value_format, 2 * rope.inv_freq.numel()):
        return why
    return of.no_room(key_format, value_format, rows, device)


def ready(key_format: Format, value_format: Format, rope: Rope | None, device: torch.device) -> None:
    """Make what kernels read beside pages, for any number of query rows."""
    if any(unsupported(key_format, value_format, rope, rows, device) is None for rows in (4, 8)):
        of = tables_of(key_format, value_format)
        assert of is not None and rope is not None
        of.beside(key_format, value_format, rope, device)


def kernel_of(of: Tables) -> Any:
    """What reads pages of the codes that ``of`` reads in slabs."""
    return learned_keys_pieces_kernel if isinstance(of, LearnedKeyTables) else codebook_pieces_kernel


def pieces(call: PagedCall, query: torch.Tensor, rows: int, workspace: Workspace, out: torch.Tensor) -> None:
    """Write the parts of all pieces of packed tokens."""
    keys, values, device = call.key_format, call.value_format, query.device
    of = tables_of(keys, values)
    assert of is not None and call.rope is not None
    plan = of.shape(rows)
    fields = (call.keys["codes"], call.keys["rms"], *(call.values[name] for name in of.value_fields))
    (page, head), at = region_of(fields)
    if query.stride(1) != query.shape[2]:
        query = query.contiguous()
    step, w = call.step, workspace
    fixed = of.constants(keys, values, plan)
    more: tuple[torch.Tensor, ...] = ()
    sums: tuple[torch.Tensor, ...] = ()
    if isinstance(keys, AdditiveCodes):
        assert isinstance(call.unproject, ValueRows)
        more = (call.unproject.rows,)
        sums = (torch.empty(w.processors * 8 * fixed["V"], dtype=torch.float32, device=device),)
    kernel_of(of)[(w.processors,)](
        query,
        query.stride(0),
        w.items,
        w.item_list,
        step.table,
        step.table.stride(0),
        fields[0],
        page,
        head,
        *of.beside(keys, values, call.rope, device),
        *more,
        w.out,
        w.top,
        w.total,
        *sums,
        float(call.scale) * LOG2E,
        call.num_kv_heads,
        rows,
        step.max_query_len,
        step.seqs,
        AT=at,
        **fixed,
        num_warps=plan.warps,
    )
