"""Pieces of pages of CommVQ, VQLLM and TaSQ by kernels that keep tables of codes in shared memory: launches them."""

from typing import Any

import torch

from kvfold.formats import Format, GroupCodes, ResidualCodes
from kvfold.formats.codebook import AdditiveCodes, BinaryCodes, ValueRows
from kvfold.formats.packing import UNIT
from kvfold.kernels import codebook, groups, residual
from kvfold.kernels.paged._tables import codebook_pieces_kernel, residual_pieces_kernel
from kvfold.kernels.paged.call import PagedCall
from kvfold.kernels.paged.gluon import region_of
from kvfold.kernels.paged.work import Workspace
from kvfold.kernels.partials import LOG2E
from kvfold.kernels.stored import rotation_of
from kvfold.kernels.tables import MOST_ROWS, TablesPlan
from kvfold.kernels.windows import program_memory
from kvfold.rope import Rope

SEEN: frozenset[tuple[str, int, int]] = frozenset(
    {("additive codes", 11, 128), ("additive codes", 21, 256), ("residual codes", 4, 4), ("residual codes", 8, 8)}
)
"""Kinds of keys, their stages, and bits or stages of values, whose numbers a run on a GPU has shown right."""


def unsupported(
    key_format: Format, value_format: Format, rope: Rope | None, rows: int, device: torch.device
) -> str | None:
    """Why these kernels do not serve pages, with ``rows`` query rows per KV head; None if one does."""
    if not isinstance(key_format, AdditiveCodes | ResidualCodes | GroupCodes):
        return (
            f"keys: {key_format.kind} storage; allowed: {AdditiveCodes.kind}, {ResidualCodes.kind}, {GroupCodes.kind}"
        )
    if device.type != "cuda" or rope is None or rows > MOST_ROWS:
        return f"device {device.type}, rope {rope}, {rows} query rows; allowed: cuda, a rotation, up to {MOST_ROWS}"
    of: Any = _of(key_format)
    if why := of.unsupported(key_format, value_format, 2 * rope.inv_freq.numel()):
        return str(why)
    if not isinstance(key_format, GroupCodes):
        sizes = key_format.stages, value_format.codes if isinstance(value_format, BinaryCodes) else value_format.stages  # type: ignore[attr-defined]
        if (key_format.kind, *sizes) not in SEEN:
            return f"{sizes[0]} stages, {sizes[1]} of values: not seen right on a GPU yet"
    needs, there = of.program_bytes(key_format, value_format, TablesPlan.of(rows)), program_memory(device)
    return None if needs <= there else f"{there} bytes of shared memory; needed: {needs}"


def _of(keys: Format) -> Any:
    """The module that has a kernel's tables and constants."""
    return codebook if isinstance(keys, AdditiveCodes) else groups if isinstance(keys, GroupCodes) else residual


def ready(key_format: Format, value_format: Format, rope: Rope | None, device: torch.device) -> None:
    """Make what kernels read beside pages, for any number of query rows."""
    if any(unsupported(key_format, value_format, rope, rows, device) is None for rows in (4, 8)):
        assert rope is not None
        _read(key_format, value_format, rope, device)


def _read(keys: Format, values: Format, rope: Rope, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tables and rotation, in the order of the kernel's arguments."""
    if isinstance(keys, AdditiveCodes):
        assert keys.codebook is not None
        turning = rotation_of(rope, 64, UNIT, 1, 128, device)
        return *codebook.rows_of(keys.codebook.on(device)), turning.freq, turning.table
    freq = rotation_of(rope, 64, UNIT, 1, 128, device).freq
    if isinstance(keys, GroupCodes):
        rows, means = groups.tables_of(keys, values, device)
        return *rows, freq, groups.turns(rope, device), *means
    assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes)
    assert keys.book is not None and values.book is not None
    books = keys.book.on(device), values.book.on(device)
    rows = residual._rows(books[0], True), residual._rows(books[1], False)
    return *rows, freq, residual.turns(rope, device), *rows  # no means


def pieces(call: PagedCall, query: torch.Tensor, rows: int, workspace: Workspace, out: torch.Tensor) -> None:
    """Write the parts of all pieces of packed tokens."""
    keys, values, device = call.key_format, call.value_format, query.device
    assert call.rope is not None
    plan = TablesPlan.of(rows)
    additive = isinstance(keys, AdditiveCodes)
    names = ("bits",) if additive else ("codes", "rms")
    fields = (call.keys["codes"], call.keys["rms"], *(call.values[name] for name in names))
    (page, head), at = region_of(fields)
    if query.stride(1) != query.shape[2]:
        query = query.contiguous()
    step, w = call.step, workspace
    fixed: dict[str, Any]
    more: tuple[torch.Tensor, ...] = ()
    sums: tuple[torch.Tensor, ...] = ()
    if isinstance(keys, AdditiveCodes):
        fixed = codebook.constants(keys, values, plan)
        assert isinstance(call.unproject, ValueRows)
        more = (call.unproject.rows,)
        sums = (torch.empty(w.processors * 8 * fixed["V"], dtype=torch.float32, device=device),)
    elif isinstance(keys, GroupCodes):
        fixed = groups.constants(keys, values, plan)
    else:
        assert isinstance(keys, ResidualCodes) and isinstance(values, ResidualCodes)
        fixed = residual.constants(keys, values, plan) | {"GROUPS": 0}
    (codebook_pieces_kernel if additive else residual_pieces_kernel)[(w.processors,)](
        query,
        query.stride(0),
        w.items,
        w.item_list,
        step.table,
        step.table.stride(0),
        fields[0],
        page,
        head,
        *_read(keys, values, call.rope, device),
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
