"""What all layers of a step need, computed on the device once a step: what is packed, pieces of work, blocks to close."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvfold.formats.paged import PAGE
from kvfold.kernels.device import multiprocessors
from kvfold.kernels.paged.call import IN_PLACE, PagedStep

PIECES = 64
"""Pieces of a long sequence, at most; they are longer for it."""

_PAGE = tl.constexpr(PAGE)
SHORT = tl.constexpr(IN_PLACE)


# tl.sum and tl.cumsum were compiled when Triton was imported; these can be interpreted as well
@triton.jit
def _sum(x):  # type: ignore[no-untyped-def]
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def _running(x):  # type: ignore[no-untyped-def]
    return tl.associative_scan(x, 0, tl.standard._sum_combine)


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


@triton.jit(do_not_specialize=["seqs", "recent", "sink", "null", "piece", "most"])
def plan_kernel(  # type: ignore[no-untyped-def]
    query_start, seq_lens, window_table, window_step,
    before_ptr, sink_ptr, packed_ptr, items_ptr, closes_ptr,
    seqs, recent, sink, null, piece, most,
    S: tl.constexpr, BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, SEEN: tl.constexpr, LOOK: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """One program for all sequences. ``items_ptr`` and ``closes_ptr`` [seqs + 1]: where a sequence's pieces and pages to close
    begin in their lists. ``piece``: fewest pages of a piece; ``most``: pieces that the workspace has room for. LOOK: window
    blocks between P(n0) and n0, at most."""
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
    size = tl.full([S], 1, tl.int32) * piece
    for _ in range(16):
        size = tl.where(pages > PIECES * size, 2 * size, size)
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
    out, top, total : Tensor, float32
        Partial results; part ``i + s + 1`` is piece ``i`` of sequence ``s``, and part ``items[s] + s`` its raw tokens.
    piece_pages, short : int
        See :meth:`make`.
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
    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor
    piece_pages: int
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
        piece_pages: int = 24,
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
        piece_pages : int
            Pages of a piece, at the least.
        """
        device = torch.device(device)
        if not 1 <= short <= IN_PLACE:
            raise ValueError(f"short={short}: allowed: 1 to {IN_PLACE}")

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        pages = -(-max_len // PAGE)
        each = max(1, min(PIECES, -(-pages // piece_pages)))
        most = max_seqs * each
        if cached_tokens is not None:
            most = min(most, max(max_seqs, -(-cached_tokens // (PAGE * piece_pages)) + max_seqs))
        rows = (most + max_seqs) * num_heads * short
        sums = torch.zeros(2, rows, dtype=torch.float32, device=device)
        return cls(
            before=numbers(max_seqs),
            sink=numbers(max_seqs),
            packed=numbers(max_seqs),
            items=numbers(max_seqs + 1),
            closes=numbers(max_seqs + 1),
            item_list=numbers(most, 8),
            close_list=numbers(max_tokens // PAGE + 2 * max_seqs, 2),
            slots=torch.full((max_tokens,), -1, dtype=torch.int64, device=device),
            out=torch.empty(rows, head_dim, dtype=torch.float32, device=device),
            top=sums[0],
            total=sums[1],
            piece_pages=piece_pages,
            processors=multiprocessors(device),
            short=short,
        )


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
        S=max(16, triton.next_power_of_2(seqs)),
        LOOK=(max(step.recent, step.sink) + step.block) // step.window_block + 1,
        PIECES=PIECES,
        num_warps=4,
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
