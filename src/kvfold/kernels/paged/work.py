"""What all layers of a step need, computed on the device once a step: what is packed, pieces of work, blocks to close."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.formats.paged import PAGE
from kvfold.kernels.common._sizes import PAGE as _PAGE
from kvfold.kernels.device import device_info
from kvfold.kernels.paged.call import IN_PLACE, PagedStep

PIECES = 64
"""Pieces of a long sequence, at most; they are longer for it."""

PAGES = 24
"""Pages of a piece, at the least, where they are not to follow the batch."""
WARPS, RESIDENT = 4, 3
"""Warps of a program that reads pieces, and such programs of a multiprocessor: fold's and KIVI's, at ``head_dim`` 128."""

RAW_TOKENS, RAW_PARTS, RAW_PAGES = 64, 4, 1
"""Raw tokens of a part, at the least; parts at most; and a program's time for so many tokens, in those of a warp for a page."""

_RAW = tl.constexpr(RAW_PAGES)
SHORT = tl.constexpr(IN_PLACE)


# tl.sum and tl.cumsum were compiled when Triton was imported; these can be interpreted as well
@triton.jit
def _sum(x):  # type: ignore[no-untyped-def]
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def _running(x):  # type: ignore[no-untyped-def]
    return tl.associative_scan(x, 0, tl.standard._sum_combine)


@triton.jit
def _least(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.reduce(x, AXIS, tl.standard._elementwise_min)


@triton.jit
def _filling(pages, raw, jobs, processors, most, PIECES: tl.constexpr, WARPS: tl.constexpr, RESIDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pages of a piece, of 32 lengths the one with which the programs of a device are done first.

    The unit is a warp's time for a page; beginning and ending a piece takes 1.6 of it. ``jobs``: how often
    a piece is read, by KV heads and blocks of rows; ``raw``: parts of raw tokens, so often; ``most``: pieces there is room for.
    """
    programs = processors * RESIDENT
    best = float("inf")
    chosen = 1 << 20
    for i in range(4):
        c = 8 * i + tl.arange(0, 8)
        stages = tl.where(c < 8, c + 1, (8 * tl.exp2((c - 7) / 4.0)).to(tl.int32))
        size = tl.maximum((stages * WARPS)[:, None], ((pages + PIECES - 1) // PIECES)[None, :])
        pieces = (pages[None, :] + size - 1) // size
        each = (pages[None, :] + pieces - 1) // tl.maximum(pieces, 1)
        count = tl.reduce(pieces, 1, tl.standard._sum_combine)
        longest = tl.reduce((each + WARPS - 1) // WARPS, 1, tl.standard._elementwise_max)
        waves = count * jobs // programs
        rest = count * jobs % programs
        last = tl.where(rest > processors, 1.0, 0.75)  # alone on a multiprocessor a program is faster
        cost = (longest + 1.6) * (waves + tl.where(rest > 0, last, 0.0))
        # programs that have a piece less than others read raw tokens meanwhile
        spare = (longest + 1.6) * tl.where(rest > 0, programs - rest, 0)
        cost += tl.maximum(raw * _RAW - spare, 0.0) / programs
        cost = tl.where(count > most, float("inf"), cost)
        least = _least(cost, 0)
        if least < best:
            best = least
            chosen = _least(tl.where(cost == least, stages * WARPS, 1 << 20), 0)
    return chosen


@triton.jit
def _packed_length(length, recent, sink, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """P(n): tokens that are not read raw any more, the sink among them."""
    return tl.maximum(tl.maximum(length - recent, 0) // BLOCK * BLOCK, tl.minimum(sink, length))


@triton.jit
def _closed_length(length, BLOCK: tl.constexpr, SEEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens of closed blocks."""
    page = length // _PAGE * _PAGE
    return tl.where(length - page >= SEEN, length // BLOCK * BLOCK, page)


@triton.jit
def _closing(before, after, BLOCK: tl.constexpr, SEEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens that are closed by a step: from, to."""
    return _closed_length(before, BLOCK, SEEN), _closed_length(after, BLOCK, SEEN)


@triton.jit(do_not_specialize=["seqs", "recent", "sink", "null", "piece", "most", "raw", "jobs", "processors"])
def plan_kernel(  # type: ignore[no-untyped-def]
    query_start, seq_lens, window_table, window_step,
    before_ptr, sink_ptr, packed_ptr, items_ptr, closes_ptr,
    seqs, recent, sink, null, piece, most, raw, jobs, processors,
    S: tl.constexpr, BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, SEEN: tl.constexpr, LOOK: tl.constexpr,
    PIECES: tl.constexpr, WARPS: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """One program for all sequences. ``items_ptr`` and ``closes_ptr`` [seqs + 1]: where a sequence's pieces and pages to close
    begin in their lists. ``piece``: fewest pages of a piece, 0: see :func:`_filling`; ``most``: pieces that the workspace has
    room for. LOOK: window blocks between P(n0) and n0, at most."""
    s = tl.arange(0, S)
    live = s < seqs
    after = tl.load(seq_lens + s, mask=live, other=0)
    count = tl.load(query_start + s + 1, mask=live, other=0) - tl.load(query_start + s, mask=live, other=0)
    before = tl.where(after > 0, after - count, 0)
    own = tl.minimum(sink, before)
    at = _packed_length(before, recent, sink, BLOCK)
    row = window_table + s.to(tl.int64) * window_step
    lacks = tl.load(row, mask=live & (own > 0), other=null + 1) == null
    own = tl.where(lacks, 0, own)
    walks = at < before
    for _ in range(LOOK):
        entry = tl.load(row + at // WINDOW_BLOCK, mask=live & walks, other=null + 1)
        walks = walks & (entry == null)
        at = tl.where(walks, tl.minimum(at // WINDOW_BLOCK * WINDOW_BLOCK + WINDOW_BLOCK, before), at)
        walks = walks & (at < before)
    pages = tl.where(at > own, (at + _PAGE - 1) // _PAGE, 0)
    if piece == 0:
        piece = _filling(pages, raw, jobs, processors, most, PIECES, WARPS, RESIDENT)
    size = tl.maximum(piece, (pages + PIECES - 1) // PIECES)
    pieces = (pages + size - 1) // size
    for _ in range(16):  # only where the lengths are more than what the workspace was made for
        double = _sum(pieces) > most
        size = tl.where(double, 2 * size, size)
        pieces = (pages + size - 1) // size
    first, last = _closing(before, after, BLOCK, SEEN)
    closes = tl.where(last > first, (last + _PAGE - 1) // _PAGE - first // _PAGE, 0)
    tl.store(before_ptr + s, before, mask=live)
    tl.store(sink_ptr + s, own, mask=live)
    tl.store(packed_ptr + s, at, mask=live)
    tl.store(items_ptr + s + 1, _running(pieces), mask=live)
    tl.store(closes_ptr + s + 1, _running(closes), mask=live)
    tl.store(items_ptr + s, 0, mask=s == 0)
    tl.store(closes_ptr + s, 0, mask=s == 0)


@triton.jit(do_not_specialize=["recent", "sink", "null"])
def lists_kernel(  # type: ignore[no-untyped-def]
    query_start, seq_lens, window_table, window_step, before_ptr, sink_ptr, packed_ptr, items_ptr, closes_ptr,
    item_list, close_list, slots,
    recent, sink, null,
    BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, SEEN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program per sequence: its pieces, its pages to close, where its new tokens go (-1: nowhere).

    A piece: sequence, first page, page after the last, packed tokens, those of the sink that are read raw, first token of the
    step and their number. Pieces of a sequence are equally long, to a page.
    """
    s = tl.program_id(0)
    i = tl.arange(0, N)
    before, after = tl.load(before_ptr + s), tl.load(seq_lens + s)
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    packed = tl.load(packed_ptr + s)
    pages = (packed + _PAGE - 1) // _PAGE
    start, stop = tl.load(items_ptr + s), tl.load(items_ptr + s + 1)
    for at in range(start, stop, N):
        inside, number, item = at + i < stop, at + i - start, item_list + 8 * (at + i)
        tl.store(item, tl.zeros_like(i) + s, mask=inside)
        tl.store(item + 1, number * pages // (stop - start), mask=inside)
        tl.store(item + 2, (number + 1) * pages // (stop - start), mask=inside)
        tl.store(item + 3, tl.zeros_like(i) + packed, mask=inside)
        tl.store(item + 4, tl.zeros_like(i) + tl.load(sink_ptr + s), mask=inside)
        tl.store(item + 5, tl.zeros_like(i) + begin, mask=inside)
        tl.store(item + 6, tl.zeros_like(i) + (after - before), mask=inside)
    first, _ = _closing(before, after, BLOCK, SEEN)
    start, stop = tl.load(closes_ptr + s), tl.load(closes_ptr + s + 1)
    for at in range(start, stop, N):
        tl.store(close_list + 2 * (at + i), tl.zeros_like(i) + s, mask=at + i < stop)
        tl.store(close_list + 2 * (at + i) + 1, first // _PAGE + at + i - start, mask=at + i < stop)
    kept = tl.maximum(after - tl.maximum(recent, SHORT), 0) // BLOCK * BLOCK  # calls in place read their own tokens
    for at in range(begin, end, N):
        position = before + at - begin + i
        wanted = (at + i < end) & (after > 0) & ((position >= kept) | (position < sink))
        block = tl.load(window_table + s.to(tl.int64) * window_step + position // WINDOW_BLOCK, mask=wanted, other=null)
        slot = tl.where(wanted & (block != null), block.to(tl.int64) * WINDOW_BLOCK + position % WINDOW_BLOCK, -1)
        tl.store(slots + at + i, slot, mask=at + i < end)


@dataclass(frozen=True)
class Workspace:
    """What the kernels of all layers write to, made once; see :meth:`make`.

    Attributes
    ----------
    before, sink, packed : Tensor, int32 [max_seqs]
        Tokens before the step; those of the sink that are read raw; end of the packed ones.
    items, closes : Tensor, int32 [max_seqs + 1]
        Where a sequence's pieces, and pages to close, begin in their lists; at the end their number.
    item_list : Tensor, int32 [most, 8]
        Pieces: see :func:`lists_kernel`.
    close_list : Tensor, int32 [most, 2]
        Sequence and number of a page.
    slots : Tensor, int64 [max_tokens]
        Where a new token goes in the windows: block * window_block + place, or -1.
    updates : Tensor, float32 [elements]
        Of the pages that a step completes, where these follow their own queries.
    counters : Tensor, int32 [max_seqs * num_heads * short + 1]
        In a launch, parts of a sequence's rows that have been written, and after them parts of raw tokens that have been taken;
        zeros between launches.
    out, top, total : Tensor, float32
        Partial results. With ``r`` parts of raw tokens, those of sequence ``s`` begin with number ``items[s] + r s``, and piece
        ``i`` of the list, if it is of this sequence, is part ``i + r (s + 1)``.
    piece_pages, num_heads, num_kv_heads, short : int
        See :meth:`make`; ``piece_pages`` is 0 where pieces follow the batch.
    processors : int
        Multiprocessors.
    """

    before: torch.Tensor
    sink: torch.Tensor
    packed: torch.Tensor
    items: torch.Tensor
    closes: torch.Tensor
    item_list: torch.Tensor
    close_list: torch.Tensor
    slots: torch.Tensor
    updates: torch.Tensor
    counters: torch.Tensor
    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor
    piece_pages: int
    num_heads: int
    num_kv_heads: int
    processors: int
    short: int

    @classmethod
    def make(
        cls,
        max_seqs: int,
        max_tokens: int,
        max_len: int,
        num_heads: int,
        head_dim: int,
        device: torch.device | str,
        cached_tokens: int | None = None,
        short: int = 1,
        piece_pages: int | None = None,
        num_kv_heads: int | None = None,
        update_size: int = 0,
    ) -> "Workspace":
        """Allocate.

        Parameters
        ----------
        max_seqs, max_tokens : int
            Of a step.
        max_len : int
            Tokens of a sequence.
        num_heads, head_dim : int
            Query heads; the largest of all layers.
        cached_tokens : int or None
            Tokens that all sequences of a step have together; None: ``max_seqs * max_len``. With more (shared prefixes) pieces
            are longer, and their length then depends on the batch.
        short : int
            Most tokens of a sequence that the kernels of short calls serve, at most 16; more go another way
            (:mod:`kvfold.kernels.paged.long`).
        piece_pages : int or None
            Pages of a piece, at the least: the same whatever the batch, and so is what comes out. None: as many as keep the
            device busy, which depends on the lengths of a step's sequences; 24 without ``num_kv_heads``.
        num_kv_heads : int or None
            Of most layers.
        update_size : int
            Elements of a page's updates, all heads', where pages follow their own queries.
        """
        device = torch.device(device)
        if not 1 <= short <= IN_PLACE:
            raise ValueError(f"short={short}: allowed: 1 to {IN_PLACE}")

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        pages, least, processors = -(-max_len // PAGE), piece_pages or PAGES, device_info(device).sms
        each = max(1, min(PIECES, -(-pages // least)))
        most = max_seqs * each
        if cached_tokens is not None:
            most = min(most, max(max_seqs, -(-cached_tokens // (PAGE * least)) + max_seqs))
        follows = piece_pages is None and num_kv_heads is not None
        if follows:
            few = max_seqs + 2 * RESIDENT * processors // (num_kv_heads or 1)
            most = max(most, min(few, max_seqs * min(PIECES, pages)))
        rows = (most + RAW_PARTS * max_seqs) * num_heads * short
        sums = torch.zeros(2, rows, dtype=torch.float32, device=device)
        return cls(
            before=numbers(max_seqs),
            sink=numbers(max_seqs),
            packed=numbers(max_seqs),
            items=numbers(max_seqs + 1),
            closes=numbers(max_seqs + 1),
            item_list=numbers(max(most, 8 * processors), 8)[:most],  # programs look there before they know how many
            close_list=numbers(max_tokens // PAGE + 2 * max_seqs, 2),
            slots=torch.full((max_tokens,), -1, dtype=torch.int64, device=device),
            updates=torch.empty((max_tokens // PAGE + max_seqs) * update_size, dtype=torch.float32, device=device),
            counters=numbers(max_seqs * num_heads * short + 1),
            out=torch.empty(rows, head_dim, dtype=torch.float32, device=device),
            top=sums[0],
            total=sums[1],
            piece_pages=0 if follows else least,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or 0,
            processors=processors,
            short=short,
        )


def _shortest(step: PagedStep) -> int:
    """Parts of a sequence's raw tokens, as short as they may be."""
    return min(-(-(step.sink + step.recent + step.block - 1 + step.max_query_len) // RAW_TOKENS), RAW_PARTS)


def raw_parts(step: PagedStep, workspace: Workspace) -> int:
    """Parts of a sequence's raw tokens: fewer where there are more of them than programs, if they may depend on the batch."""
    if workspace.piece_pages:
        return _shortest(step)
    return max(1, min(_shortest(step), workspace.processors * RESIDENT // (step.seqs * workspace.num_kv_heads or 1)))


def prepare(step: PagedStep, workspace: Workspace, seen: int) -> None:
    """Compute a step's lists on the device, before its first layer: two small launches.

    Parameters
    ----------
    seen : int
        :attr:`PagedCall.seen` of the layers.
    """
    seqs, sizes = step.seqs, {"BLOCK": step.block, "WINDOW_BLOCK": step.window_block, "SEEN": seen}
    if seqs > workspace.before.shape[0]:
        raise ValueError(f"workspace: made for {workspace.before.shape[0]} sequences, the step has {seqs}")
    w = workspace
    rows = w.num_heads // (w.num_kv_heads or 1) * step.max_query_len
    plan_kernel[(1,)](
        step.query_start,
        step.seq_lens,
        step.window_table,
        step.window_table.stride(0),
        w.before,
        w.sink,
        w.packed,
        w.items,
        w.closes,
        seqs,
        step.recent,
        step.sink,
        step.null,
        w.piece_pages,
        w.item_list.shape[0],
        w.num_kv_heads * -(-rows // 8) * seqs * _shortest(step),
        w.num_kv_heads * -(-rows // 8),
        w.processors,
        S=max(16, triton.next_power_of_2(seqs)),
        LOOK=(max(step.recent, step.sink) + step.block) // step.window_block + 1,
        PIECES=PIECES,
        WARPS=WARPS,
        RESIDENT=RESIDENT,
        num_warps=8 if seqs > 64 else 4,
        **sizes,
    )
    lists_kernel[(seqs,)](
        step.query_start,
        step.seq_lens,
        step.window_table,
        step.window_table.stride(0),
        w.before,
        w.sink,
        w.packed,
        w.items,
        w.closes,
        w.item_list,
        w.close_list,
        w.slots,
        step.recent,
        step.sink,
        step.null,
        N=256,
        num_warps=2,
        **sizes,
    )


def closing_arguments(step: PagedStep, workspace: Workspace) -> tuple[Any, ...]:
    """Where a step's tokens lie and which blocks it completes, as kernels that store take it, in their order."""
    tables = step.window_table, step.window_table.stride(0), step.table, step.table.stride(0)
    return step.query_start, step.seq_lens, *tables, workspace.before, workspace.closes, workspace.close_list
