"""Attention over the tokens in full precision: sink, ring of recent tokens, and the call's own tokens.

A plain Triton kernel (flash attention with running maxima) that writes one partial result per query row, in the format of
:class:`kvfold.kernels.common.partials.Partials`. Kernels that read packed storage write theirs beside it. For calls that
unpack it writes normalized results, as flash attention does.
"""

import torch
import triton
import triton.language as tl

from kvfold.kernels.call import NewTokens, Windows
from kvfold.kernels.common.partials import LOG2E, Partials, early_launch
from kvfold.kernels.device import device_info


# tl.max and tl.sum were compiled when Triton was imported; these can be interpreted as well
@triton.jit
def _row_max(x):  # type: ignore[no-untyped-def]
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def _row_sum(x):  # type: ignore[no-untyped-def]
    return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    q, keys, values, key_step, value_step, at, live, sees, channel, factor, top, total, acc, D: tl.constexpr
):  # fmt: skip
    """Tokens ``at`` [N]: what is not ``live`` [N] is never read, what is not ``sees`` [M, N] does not count."""
    k_at = keys + at.to(tl.int64)[:, None] * key_step
    v_at = values + at.to(tl.int64)[:, None] * value_step
    return tile_at(q, k_at, v_at, live, sees, channel, factor, top, total, acc, D)


@triton.jit
def tile_at(q, k_at, v_at, live, sees, channel, factor, top, total, acc, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`_tile` of tokens that ``k_at`` and ``v_at``, pointers [N, 1], say."""
    mask = live[:, None] & (channel < D)[None, :]
    k = tl.load(k_at + channel[None, :], mask=mask, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    score = tl.where(sees, score, float("-inf"))
    new = tl.maximum(top, _row_max(score))
    p = tl.exp2(score - new[:, None])
    before = tl.exp2(top - new)
    v = tl.load(v_at + channel[None, :], mask=mask, other=0.0)
    acc = acc * before[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new, total * before + _row_sum(p), acc


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    q_ptr,
    sink_k, sink_v, ring_k, ring_v, sink_len_ptr, packed_len_ptr, recent_len_ptr,
    new_k, new_v, k_batch, k_head, k_token, v_batch, v_head, v_token, valid_ptr, valid_batch,
    part_out, part_top, part_sum,
    factor, block, head, heads, rows, tokens, first, sinks, slots, skip, splits, split,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_NEW: tl.constexpr, HAS_VALID: tl.constexpr,
    NORMAL: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Rows of number ``block`` of ``head``, counted over the batch; see :func:`windows_kernel`."""
    batch = head // heads
    row = block * M + tl.arange(0, M)
    token = row % tokens
    channel = tl.arange(0, DP)
    row0 = head.to(tl.int64) * rows
    inside = (row < rows)[:, None] & (channel < D)[None, :]
    q = tl.load(q_ptr + (row0 + row)[:, None] * D + channel[None, :], mask=inside, other=0.0)
    sink_len = tl.load(sink_len_ptr + batch)
    packed_len = tl.load(packed_len_ptr + batch)
    recent_len = tl.load(recent_len_ptr + batch)
    newest = sink_len + packed_len + recent_len  # position after the last cached token
    if HAS_NEW:
        query = newest + token
    else:
        query = newest - tokens + token

    top = tl.full([M], -1.0e30, tl.float32)  # finite, so that differences are never NaN
    total = tl.full([M], 0.0, tl.float32)
    acc = tl.full([M, DP], 0.0, tl.float32)
    base = head.to(tl.int64) * sinks * D
    in_sink, in_ring = sinks, slots
    if SKIPS:  # others attend to the oldest tokens
        in_sink, in_ring = tl.where(sink_len > skip, sinks, 0), tl.where(sink_len + recent_len > skip, slots, 0)
    for i in range(0, in_sink, N):
        slot = i + tl.arange(0, N)
        live = slot < sink_len
        if SKIPS:
            live = live & (slot >= skip)
        sees = live[None, :] & (slot[None, :] <= query[:, None])
        top, total, acc = _tile(
            q, sink_k + base, sink_v + base, D, D, slot, live, sees, channel, factor, top, total, acc, D
        )
    base = head.to(tl.int64) * slots * D
    for i in range(0, in_ring, N):
        slot = i + tl.arange(0, N)
        age = slot - packed_len % slots
        age = tl.where(age < 0, age + slots, age)
        live = (age < recent_len) & (slot < slots)
        if SKIPS:
            live = live & (age >= skip - sink_len)
        sees = live[None, :] & ((sink_len + packed_len + age)[None, :] <= query[:, None])
        top, total, acc = _tile(
            q, ring_k + base, ring_v + base, D, D, slot, live, sees, channel, factor, top, total, acc, D
        )
    if HAS_NEW:
        start = block * M
        stop = tl.minimum(start + M, rows) - 1
        # rows of one query head see up to their last token; rows of several see all
        last = tl.where(start // tokens == stop // tokens, stop % tokens, tokens - 1)
        keys = new_k + batch.to(tl.int64) * k_batch + (head % heads).to(tl.int64) * k_head
        values = new_v + batch.to(tl.int64) * v_batch + (head % heads).to(tl.int64) * v_head
        for i in range(0, first + last + 1, N):
            at = i + tl.arange(0, N)
            live = at <= first + last
            if HAS_VALID:
                live = live & (tl.load(valid_ptr + batch.to(tl.int64) * valid_batch + at, mask=live, other=0) != 0)
            sees = live[None, :] & (at[None, :] <= first + token[:, None])
            top, total, acc = _tile(
                q, keys, values, k_token, v_token, at, live, sees, channel, factor, top, total, acc, D
            )

    slot_row = (head.to(tl.int64) * splits + split) * rows + row
    if NORMAL:
        seen = tl.where(total > 0, total, 1.0)
        tl.store(
            part_sum + slot_row, tl.where(total > 0, (top + tl.log2(seen)) * 0.6931471805599453, top), mask=row < rows
        )
        acc = acc / seen[:, None]
    else:
        tl.store(part_top + slot_row, top, mask=row < rows)
        tl.store(part_sum + slot_row, total, mask=row < rows)
    tl.store(part_out + slot_row[:, None] * D + channel[None, :], acc.to(part_out.dtype.element_ty), mask=inside)


VARYING = "factor heads rows tokens first sinks slots skip splits split every".split()


@triton.jit(do_not_specialize=VARYING)
def windows_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    sink_k, sink_v, ring_k, ring_v, sink_len_ptr, packed_len_ptr, recent_len_ptr,
    new_k, new_v, k_batch, k_head, k_token, v_batch, v_head, v_token, valid_ptr, valid_batch,
    part_out, part_top, part_sum,
    factor, heads, rows, tokens, first, sinks, slots, skip, splits, split, every,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_NEW: tl.constexpr, HAS_VALID: tl.constexpr,
    EARLY: tl.constexpr, STAYS: tl.constexpr, NORMAL: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """One program: M query rows of one KV head of one sequence. Grid: (blocks of rows, batch * heads).

    ``factor`` is the scale times log2(e). DP is D padded to a power of two. Query number t of the call is number
    ``first + t`` of the new tokens. Without new tokens (HAS_NEW) the call's own already lie in the windows. EARLY: the kernel
    before this one, which has waited for those before it, runs beside it, and the next one waits by itself. STAYS: few
    programs, in one dimension, take blocks of ``every`` head one after the other, neighbours those of as many tokens. NORMAL:
    results are divided by their sums, and ``part_sum`` gets log-sum-exps in natural units. SKIPS: the ``skip`` oldest tokens
    of the windows are left out.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if STAYS:
        blocks = (rows + M - 1) // M
        for i in range(tl.program_id(0), blocks * every, tl.num_programs(0)):
            _block(
                q_ptr, sink_k, sink_v, ring_k, ring_v, sink_len_ptr, packed_len_ptr, recent_len_ptr,
                new_k, new_v, k_batch, k_head, k_token, v_batch, v_head, v_token, valid_ptr, valid_batch,
                part_out, part_top, part_sum,
                factor, blocks - 1 - i // every, i % every, heads, rows, tokens, first, sinks, slots, skip, splits, split,
                D, DP, M, N, HAS_NEW, HAS_VALID, NORMAL, SKIPS,
            )  # fmt: skip
    else:
        _block(
            q_ptr, sink_k, sink_v, ring_k, ring_v, sink_len_ptr, packed_len_ptr, recent_len_ptr,
            new_k, new_v, k_batch, k_head, k_token, v_batch, v_head, v_token, valid_ptr, valid_batch,
            part_out, part_top, part_sum,
            factor, tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), heads, rows, tokens, first, sinks, slots, skip,
            splits, split,
            D, DP, M, N, HAS_NEW, HAS_VALID, NORMAL, SKIPS,
        )  # fmt: skip
    if EARLY:  # this kernel's end is then that of both
        tl.extra.cuda.gdc_wait()


ROWS = 64
"""Query rows of a program of windows, at most: one of 128 has a multiprocessor of its own, and waits for itself."""


def tile_sizes(rows: int, head_dim: int, most: int = 128) -> tuple[int, int, int]:
    """Query rows, at most ``most``, and tokens of a tile, and warps of a program."""
    m = min(most if head_dim <= 128 else 64, max(16, triton.next_power_of_2(rows)))
    return m, 64 if head_dim <= 128 else 32, 8 if m == 128 else 4


def stages(head_dim: int, shared_memory: int) -> int:
    """Tiles that are in shared memory at once, where a program may have ``shared_memory`` bytes of it."""
    if shared_memory >= 160 * 1024:
        return 3
    return 2 if head_dim <= 128 else 1


def attend_windows(
    q: torch.Tensor,
    windows: Windows,
    scale: float,
    partials: Partials,
    split: int,
    new_keys: torch.Tensor | None = None,
    new_values: torch.Tensor | None = None,
    new_valid: torch.Tensor | None = None,
    first: int = 0,
    early: bool = False,
) -> None:
    """Attend to everything that is not packed, and write the result to one split of ``partials``.

    Nothing depends on a value on the device: no synchronization, fit for capture in a CUDA graph. Unused slots and padding
    may hold anything.

    Parameters
    ----------
    q : Tensor [batch, num_heads, tokens, head_dim], contiguous
        Queries after RoPE in the windows' dtype (fp16, bf16 or fp32); query heads of a KV head are adjacent. ``head_dim`` is
        a multiple of 16.
    windows : Windows
        Every query sees all of its tokens, unless ``new_keys`` is None.
    scale : float
        Of the scores, natural units.
    partials : Partials
        Of ``batch * num_kv_heads`` heads and ``num_heads // num_kv_heads * tokens`` rows.
    split : int
        Which split to write; all rows of it are written.
    new_keys, new_values : Tensor or None [batch, num_kv_heads, new tokens, head_dim], any strides but adjacent channels
        The call's own tokens. Query t sees those up to number ``first + t``. None: the call's tokens were written to the
        windows before (they are the newest ``tokens`` ones), and each query sees those up to itself.
    new_valid : Tensor or None, bool [batch, new tokens]
        False at padding, which no query sees; a padding query's own result has no meaning but is finite.
    first : int
        Number of the first query's token among the new ones: long calls may pass their queries in pieces.
    early : bool
        The kernel launched last allows this one to run beside it once it has waited for those before, and the next one waits
        by itself; see :attr:`kvfold.kernels.device.DeviceInfo.has_pdl`.
    """
    _, num_heads, tokens, dim = q.shape
    rows = num_heads // windows.sink[0].shape[1] * tokens
    if not q.is_contiguous() or partials.out.shape[2] != rows or partials.out.shape[3] != dim:
        raise ValueError(f"attend_windows: q {tuple(q.shape)} must be contiguous and fit partials of {rows} rows")
    results = partials.out, partials.top, partials.total
    new = None if new_keys is None or new_values is None else NewTokens(new_keys, new_values, new_valid)
    _launch(q, windows, scale, new, first, results, (partials.splits, split), early=early)


def windows_result(
    q: torch.Tensor, windows: Windows, scale: float, new: NewTokens, skip: int = 0, programs: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized attention over everything that is not packed, and its log-sum-exp, of a call whose own tokens are ``new``.

    Parameters
    ----------
    q, windows, scale
        As of :func:`attend_windows`.
    new : NewTokens
    skip : int
        So many tokens of the windows, the oldest ones, are left out: others attend to them.
    programs : int or None
        So many are launched, which take one block of rows after the other and have a multiprocessor each. None: one for
        each block.

    Returns
    -------
    pair of Tensor
        Like ``q`` [batch, num_kv_heads, rows, head_dim], and float32 [batch, num_kv_heads, rows], in natural units; a row that
        sees no token has 0 and -1e30.
    """
    batch, num_heads, tokens, dim = q.shape
    heads = windows.sink[0].shape[1]
    shape = batch, heads, num_heads // heads * tokens
    out, total = q.new_empty(*shape, dim), torch.empty(shape, dtype=torch.float32, device=q.device)
    _launch(q, windows, scale, new, 0, (out, total, total), (1, 0), skip, programs, normal=True)
    return out, total


def _launch(
    q: torch.Tensor,
    windows: Windows,
    scale: float,
    new: NewTokens | None,
    first: int,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    splits: tuple[int, int],
    skip: int = 0,
    programs: int | None = None,
    early: bool = False,
    normal: bool = False,
) -> None:
    batch, num_heads, tokens, dim = q.shape
    heads = windows.sink[0].shape[1]
    rows = num_heads // heads * tokens
    sink, ring = windows.sink, windows.ring
    keys, values, valid = *sink, windows.sink_len  # never read
    if new is not None:
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (new.keys, new.values))
        if new.valid is not None:
            valid = new.valid.contiguous().view(torch.uint8)
    stays = programs is not None
    m, n, warps = tile_sizes(rows, dim, 2 * ROWS if stays else ROWS)
    blocks = triton.cdiv(rows, m)
    windows_kernel[(blocks, batch * heads) if programs is None else (programs, 1)](
        q,
        *sink,
        *ring,
        windows.sink_len,
        windows.packed_len,
        windows.recent_len,
        keys,
        values,
        *keys.stride()[:3],
        *values.stride()[:3],
        valid,
        valid.stride(0),
        *results,
        float(scale) * LOG2E,
        heads,
        rows,
        tokens,
        first,
        sink[0].shape[2],
        ring[0].shape[2],
        skip,
        *splits,
        batch * heads,
        D=dim,
        DP=triton.next_power_of_2(dim),
        M=m,
        N=n,
        HAS_NEW=new is not None,
        HAS_VALID=new is not None and new.valid is not None,
        EARLY=early,
        STAYS=stays,
        NORMAL=normal,
        SKIPS=skip > 0,
        num_warps=warps,
        num_stages=stages(dim, device_info(q.device).shared_memory),
        **early_launch(early),
    )
