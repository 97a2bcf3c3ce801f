"""Keys that fill a call up to a number that cuDNN has compiled for: the windows', and copies, which are taken off again.

A call's queries see all tokens of its windows, as they see all packed ones. So those come first, with their values, where
unpacked keys have a room to fill; windows' own kernel then leaves them out.

What is still empty is filled with copies of 32 keys, equally many of each but for one, and their values are zeros. So attention
over all of them has the right sums of values, and a normalizer with ``sum(copies * exp(q . k))`` of those 32 too much. As these
keys are among the real ones, that is at most ``copies`` times the real normalizer, and copies are at most 64: no more than a
factor of copies + 1 is lost of float32, and of the smallest numbers of attention's 16 bits. The newest tokens of the windows
are copied, which are there before anything is unpacked; or the last packed ones, where windows may hold fewer than 32, or
queries meet packed keys in other coordinates than theirs.
"""

import torch
import triton
import triton.language as tl

from kvfold.kernels.call import Windows

OF = 32
"""Keys that are copied."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _at(token, sink_len, packed_len, slots, sinks, head, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where tokens of the windows, the oldest is number 0, lie in the sink of a head, and in its ring."""
    slot = (packed_len + token - sink_len) % tl.maximum(slots, 1)
    return (head * sinks + token) * D, (head * slots + slot) * D


@triton.jit(do_not_specialize=["heads", "sinks", "slots", "tokens", "room"])
def _fill_kernel(  # type: ignore[no-untyped-def]
    keys, values, sink_k, sink_v, ring_k, ring_v, sink_len_ptr, packed_len_ptr, recent_len_ptr,
    heads, sinks, slots, tokens, room, D: tl.constexpr, DP: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens to fill / 32, batch * heads); see :func:`fill`."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, 32)
    channel = tl.arange(0, DP)
    inside = (channel < D)[None, :] & (row < room)[:, None]
    to = (head * room + tokens + tl.program_id(0) * 32 + row)[:, None] * D + channel[None, :]
    if WINDOWS:
        batch = tl.program_id(1) // heads
        sink_len, recent_len = tl.load(sink_len_ptr + batch), tl.load(recent_len_ptr + batch)
        live = sink_len + recent_len
        number = tl.program_id(0) * 32 + row
        token = tl.where(number < live, number, live - 32 + (number - live) % 32)
        in_sink, in_ring = _at(token, sink_len, tl.load(packed_len_ptr + batch), slots, sinks, head, D)
        first = inside & (token < sink_len)[:, None]
        later = inside & (token >= sink_len)[:, None]
        key = tl.load(sink_k + in_sink[:, None] + channel[None, :], mask=first, other=0.0)
        key += tl.load(ring_k + in_ring[:, None] + channel[None, :], mask=later, other=0.0)
        real = (number < live)[:, None]
        value = tl.load(sink_v + in_sink[:, None] + channel[None, :], mask=first & real, other=0.0)
        value += tl.load(ring_v + in_ring[:, None] + channel[None, :], mask=later & real, other=0.0)
        tl.store(values + to, value, mask=inside)
    else:
        key = tl.load(keys + (head * room + tokens - 32 + row)[:, None] * D + channel[None, :], mask=inside)
        tl.store(values + to, tl.zeros_like(key), mask=inside)
    tl.store(keys + to, key, mask=inside)


@triton.jit(do_not_specialize=["heads", "sinks", "slots", "rows", "tokens", "room", "factor"])
def _excess_kernel(  # type: ignore[no-untyped-def]
    q, keys, sink_k, ring_k, sink_len_ptr, packed_len_ptr, recent_len_ptr, out,
    heads, sinks, slots, rows, tokens, room, factor,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of M rows, batch * heads); see :func:`excess`."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    channel = tl.arange(0, DP)
    number = tl.arange(0, 32)
    inside = (channel < D)[None, :]
    more = room - tokens
    if WINDOWS:
        batch = tl.program_id(1) // heads
        sink_len, recent_len = tl.load(sink_len_ptr + batch), tl.load(recent_len_ptr + batch)
        live = sink_len + recent_len
        more = tl.maximum(more - live, 0)
        token = live - 32 + number
        in_sink, in_ring = _at(token, sink_len, tl.load(packed_len_ptr + batch), slots, sinks, head, D)
        first = inside & (token < sink_len)[:, None]
        later = inside & (token >= sink_len)[:, None]
        k = tl.load(sink_k + in_sink[:, None] + channel[None, :], mask=first, other=0.0)
        k += tl.load(ring_k + in_ring[:, None] + channel[None, :], mask=later, other=0.0)
    else:
        k = tl.load(keys + (head * room + tokens - 32 + number)[:, None] * D + channel[None, :], mask=inside, other=0.0)
    at = head * rows + row
    copies = more // 32 + tl.where(number < more % 32, 1, 0)
    if more > 0:
        x = tl.load(q + at[:, None] * D + channel[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
        score = tl.dot(x, tl.trans(k), input_precision="ieee") * (factor * LOG2E)
        score = tl.where((copies > 0)[None, :], score + tl.log2(tl.maximum(copies, 1).to(tl.float32))[None, :], -1.0e30)
        top = tl.reduce(score, 1, tl.standard._elementwise_max)
        total = tl.reduce(tl.exp2(score - top[:, None]), 1, tl.standard._sum_combine)
        tl.store(out + at, top + tl.log2(total), mask=row < rows)
    else:
        tl.store(out + at, tl.full([M], -1.0e30, tl.float32), mask=row < rows)


def takes_windows(windows: Windows) -> bool:
    """Whether windows of sequences with packed tokens, which have all of their sinks, hold ``OF`` at least."""
    return windows.sink[0].shape[2] >= OF


def fill(keys: torch.Tensor, values: torch.Tensor, tokens: int, windows: Windows | None = None) -> None:
    """Fill contiguous keys and values [batch, num_kv_heads, room, head_dim] up behind their first ``tokens``. Both numbers are
    multiples of 32.

    With ``windows``, of the same batch and of 32 tokens at least, the first of these follow, then copies of their newest 32
    keys, and zeros; without, copies of the last 32 keys, and zeros.
    """
    batch, heads, room, dim = keys.shape
    _fill_kernel[((room - tokens) // OF, batch * heads)](
        keys,
        values,
        *_of(windows, (keys, values), keys),
        heads,
        *_slots(windows),
        tokens,
        room,
        D=dim,
        DP=triton.next_power_of_2(dim),
        WINDOWS=windows is not None,
        num_warps=4,
    )


def excess(
    rows: torch.Tensor, keys: torch.Tensor, tokens: int, scale: float, windows: Windows | None = None
) -> torch.Tensor:
    """What copies add to the normalizers of a softmax, as its base-2 logarithm: float32 [batch, num_kv_heads, rows].

    Parameters
    ----------
    rows : Tensor [batch, num_kv_heads, rows, head_dim], contiguous
        Queries.
    keys : Tensor [batch, num_kv_heads, room, head_dim], contiguous
        Of which the first ``tokens`` are packed ones. Without ``windows`` the last 32 of these are read.
    scale : float
        Of the scores, natural units.
    windows : Windows or None
        As of :func:`fill`.
    """
    batch, heads, count, dim = rows.shape
    out = torch.empty(batch, heads, count, dtype=torch.float32, device=rows.device)
    block = 64
    sink, _, ring, _, *lengths = _of(windows, (keys, keys), keys)
    _excess_kernel[(triton.cdiv(count, block), batch * heads)](
        rows,
        keys,
        sink,
        ring,
        *lengths,
        out,
        heads,
        *_slots(windows),
        count,
        tokens,
        keys.shape[2],
        float(scale),
        D=dim,
        DP=max(16, triton.next_power_of_2(dim)),
        M=block,
        WINDOWS=windows is not None,
        num_warps=4,
    )
    return out


def _of(
    windows: Windows | None, sides: tuple[torch.Tensor, torch.Tensor], lengths: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Tensors of windows, or what stands for them and is not read."""
    if windows is None:
        return *sides, *sides, lengths, lengths, lengths
    return *windows.sink, *windows.ring, windows.sink_len, windows.packed_len, windows.recent_len


def _slots(windows: Windows | None) -> tuple[int, int]:
    return (0, 0) if windows is None else (windows.sink[0].shape[2], windows.ring[0].shape[2])
