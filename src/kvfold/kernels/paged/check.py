"""Kernels over pages, run once as they are compiled on a device and compared with the reference: wrong bytes are silent."""

import math
from dataclasses import replace

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Format
from kvfold.formats.paged import PAGE
from kvfold.kernels.paged import attention, books, reference, storing
from kvfold.kernels.paged.call import Following, Maps, PagedCall, PagedStep, Row, Steering
from kvfold.kernels.paged.layout import PageLayout
from kvfold.kernels.paged.work import Workspace, prepare

TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of attention, relative RMS."""
STORED = 0.02
"""Of what pages hold, relative RMS: some rounding ties may differ, a misplaced code in a hundred may not."""
TOLERANCE = 1e-2
"""Of the squared error of codes that are searched for: a random code in a hundred adds several times that."""
LENGTHS = (2 * PAGE + 107, 40)
ROWS = (2, 4)
"""Query heads of a KV head: for some formats there is a kernel for four."""


@lasting(64)
def self_test(
    key_format: Format,
    value_format: Format,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    steering: Steering | Following | None = None,
    maps: Maps | None = None,
) -> str | None:
    """Store two short sequences and attend to them, by kernels and by the reference.

    Parameters
    ----------
    steering : Steering, Following or None
        With which keys are stored.
    maps : Maps or None
        Of keys before RoPE, and of codebooks.

    Returns
    -------
    str or None
        What went wrong; None if nothing did. Waits for the device, once per process and formats.
    """
    dim, block = key_format.head_dim, key_format.block
    heads = next(filter(None, map(books.heads_of, (key_format, value_format))), 2)
    width = None if steering is None else steering.width
    following = steering if isinstance(steering, Following) else None
    if isinstance(steering, Steering):
        heads = steering.update.shape[0]
    calls = [_call(key_format, value_format, heads, device, dtype, following) for _ in "kr"]
    if isinstance(steering, Steering):
        calls = [replace(call, update=steering.update, encode_keys=steering.encode_keys) for call in calls]
    if maps is not None:
        heads = maps.heads
        calls = [replace(_call(key_format, value_format, heads, device, dtype, None), **maps.given) for _ in "kr"]
    by_kernel = storing.unsupported(key_format, value_format, width) is None
    if following is not None and storing.unfollowed(key_format, following):
        by_kernel = False
    sizes = len(LENGTHS), sum(LENGTHS), max(LENGTHS) + 1, heads * max(ROWS), dim, device
    space = Workspace.make(*sizes, piece_pages=1, update_size=heads * following.width**2 if following else 0)
    for call, kernel in zip(calls, (by_kernel, False), strict=True):
        if kernel:
            prepare(call.step, space, call.seen)
            storing.store(call, space)
        else:
            reference.store(call)
    row = calls[0].step.host[0]
    closed = row.after // PAGE * PAGE if calls[0].seen else row.after // block * block
    sides = (key_format, calls[0].new_keys, "keys"), (value_format, calls[0].new_values, "values")
    for got, want, (form, new, side) in zip(*(_unpacked(c, row, closed) for c in calls), sides, strict=True):
        assert new is not None
        near = books.searches(form) and _as_near(got, want, new[:closed])
        if not (error := _difference(got, want)) <= STORED and not near:
            return f"{side} stored in pages on this device differ from the format's by {error:.2g} (relative RMS)"
    for rows in ROWS:
        call = _next(calls[1], rows)
        assert call.query is not None
        prepare(call.step, space, call.seen)
        out, truth = (torch.zeros(call.query.shape, dtype=torch.float32, device=device) for _ in "ot")
        attention.attend(call, out, space)
        if not (error := _difference(out, reference.attend(call, truth))) <= TOLERANCES[dtype]:
            return f"attention over pages on this device differs from the reference's by {error:.2g} (relative RMS)"
    return None


def _unpacked(call: PagedCall, row: Row, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tokens' keys and values, as attention sees them."""
    keys, values = reference.unpacked(call, row, 0, stop)
    return keys, values if call.unproject is None else call.unproject(values)


def _as_near(got: torch.Tensor, want: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether what was stored misses the tokens by as much as what the format stores: other codes were as near."""
    x = new.float().transpose(0, 1).unsqueeze(0)
    missed, expected = (float((y - x).square().sum()) for y in (got, want))
    return abs(missed - expected) <= TOLERANCE * expected


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def _call(
    key_format: Format,
    value_format: Format,
    heads: int,
    device: torch.device,
    dtype: torch.dtype,
    following: Following | None,
) -> PagedCall:
    """A step in which the sequences begin; the same every time."""
    draw, dim, block = torch.Generator().manual_seed(0), key_format.head_dim, key_format.block
    pages, blocks = -(-(max(LENGTHS) + 1) // PAGE), -(-(max(LENGTHS) + 1) // 16)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def tokens(count: int, lanes: int) -> torch.Tensor:
        x = torch.randn(count, lanes, dim, generator=draw, dtype=torch.float32, device="cpu")
        return (x * torch.exp(x[:1]) + 3 * x[1:2]).to(device=device, dtype=dtype)

    layout = PageLayout(key_format, value_format)
    region = torch.zeros(1 + pages * len(LENGTHS), heads, layout.bytes, dtype=torch.uint8, device=device)
    table = (torch.randperm(pages * len(LENGTHS), generator=draw, device="cpu") + 1).view(-1, pages)
    places = (torch.randperm(blocks * len(LENGTHS), generator=draw, device="cpu") + 1).view(-1, blocks)
    window = torch.zeros(1 + blocks * len(LENGTHS), heads, 16, 3 * dim, dtype=dtype, device=device).transpose(1, 2)
    step = PagedStep(
        query_start=numbers(0, LENGTHS[0], sum(LENGTHS)),
        seq_lens=numbers(*LENGTHS),
        table=table.to(device=device, dtype=torch.int32),
        window_table=places.to(device=device, dtype=torch.int32),
        max_query_len=max(LENGTHS),
        recent=PAGE - 32,
        block=block,
    )
    keys, values = layout.views(region)
    windows = window.split(dim, -1)
    scale = 1 / math.sqrt(dim)
    new = tokens(sum(LENGTHS), heads), tokens(sum(LENGTHS), heads)
    call = PagedCall(step, key_format, value_format, keys, values, windows[0], windows[1], scale, None, *new)
    if following is None:
        return call
    return replace(call, query=tokens(sum(LENGTHS), 2 * heads), following=following, window_queries=windows[2])


def _next(call: PagedCall, rows: int) -> PagedCall:
    """A decode step of the same sequences, by the last of their tokens again, which lie in the windows."""
    assert call.new_keys is not None
    step = call.step
    after = PagedStep(
        query_start=torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=call.new_keys.device),
        seq_lens=step.seq_lens,
        table=step.table,
        window_table=step.window_table,
        max_query_len=1,
        recent=step.recent,
        block=step.block,
    )
    query = call.new_keys[: len(LENGTHS)].repeat(1, rows, 1) / 4
    return replace(call, step=after, query=query, new_keys=None, new_values=None)
