# mypy: ignore-errors
"""What affine groups miss of a page, as a product of rank RANK, and those groups in plain order: Triton code of
:mod:`kvfold.kernels.fragments.encode_rank`."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import (
    _asym_scale,
    _finite,
    _fma,
    _max,
    _min,
    _negative,
    _reciprocal,
    _sum,
    _to_fp16,
)
from kvfold.kernels.common._encode_tile import _tokens_at

ROUND = tl.constexpr(12582912.0)


@triton.jit
def _missed(x, AXIS: tl.constexpr, LEVELS: tl.constexpr):
    """x [., ., .] less what its groups along AXIS decode to; their codes, scales and zero-points."""
    low, high = _min(x, AXIS), _max(x, AXIS)
    scale, zero, constant = _asym_scale(low, high, LEVELS)
    wide = scale.to(tl.float32)
    nothing = (wide == 0.0) | constant
    inverse = tl.where(nothing, 0.0, _reciprocal(tl.where(nothing, 1.0, tl.abs(wide))))
    inverse = tl.expand_dims(tl.where(wide < 0.0, _negative(inverse), inverse), AXIS)
    down = tl.expand_dims(_negative(wide), AXIS)
    base = tl.expand_dims(zero.to(tl.float32), AXIS)
    above = x - base
    near = _fma(above, inverse, tl.expand_dims(constant.to(tl.float32), AXIS))
    codes = _fma(_fma(near, down, above), inverse, near) + ROUND - ROUND
    codes = tl.minimum(tl.maximum(codes, 0.0), LEVELS * 1.0)
    return x - (base - down * codes), codes, scale, zero


@triton.jit
def _store_plain(codes, out, due, PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Store a plane of a page's codes, uint8 [PAGE, D], as kvfold.formats.packing.pack does in plain order.

    STRIDE: bytes of 32 tokens. ``due``: bool [PAGE / 32], which 32 tokens are stored.
    """
    FIELDS: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = 32 * D // FIELDS
    fields = tl.reshape(codes, (PAGE // 32, FIELDS, BYTES)).to(tl.int32)
    words = _sum(fields << (WIDTH * tl.arange(0, FIELDS))[None, :, None], 1)
    unit = tl.arange(0, PAGE // 32)[:, None]
    tl.store(out + unit * STRIDE + tl.arange(0, BYTES)[None, :], words.to(tl.uint8), mask=due[:, None])


@triton.jit
def _store_groups(
    codes, scale, zero, out, meta, units, PAGE: tl.constexpr, D: tl.constexpr, G: tl.constexpr, AXIS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Store a page's groups in plain order, of 32 tokens from number ``units[0]`` to ``units[1]``."""
    unit = tl.arange(0, PAGE // 32)
    due = (unit >= units[0]) & (unit < units[1])
    small = tl.reshape(codes, (PAGE, D)).to(tl.int32)
    if BITS == 3:
        _store_plain((small & 3).to(tl.uint8), out, due, PAGE, D, 2, 12 * D)
        _store_plain((small >> 2).to(tl.uint8), out + 8 * D, due, PAGE, D, 1, 12 * D)
    else:
        _store_plain(small.to(tl.uint8), out, due, PAGE, D, BITS, 4 * D * BITS)
    GROUPS: tl.constexpr = D if AXIS == 0 else 32 * D // G  # of 32 tokens
    at = meta + unit[:, None] * (2 * GROUPS) + tl.arange(0, GROUPS)[None, :]
    tl.store(at, tl.reshape(scale, (PAGE // 32, GROUPS)), mask=due[:, None])
    tl.store(at + GROUPS, tl.reshape(zero, (PAGE // 32, GROUPS)), mask=due[:, None])


@triton.jit
def _orthonormal(columns, spare, RANK: tl.constexpr):
    """Columns made orthonormal in their order; where one depends on those before, ``spare`` has a direction to go on with."""
    done = ()
    for r in tl.static_range(RANK):
        v = columns[r]
        size = _sum(v * v, 0)
        v = v * tl.where(size > 0.0, tl.rsqrt(tl.where(size > 0.0, size, 1.0)), 0.0)
        for _ in tl.static_range(2):
            for s in tl.static_range(len(done)):
                v -= _sum(v * done[s], 0) * done[s]
        left = _sum(v * v, 0)
        v = tl.where(left > 1e-10, v, spare[r])
        for _ in tl.static_range(2):
            for s in tl.static_range(len(done)):
                v -= _sum(v * done[s], 0) * done[s]
            v = v * tl.rsqrt(_sum(v * v, 0))
        done += (v,)
    return done


@triton.jit
def _rank_kernel(
    ring,
    ring_stride_b,
    ring_stride_h,
    new,
    new_stride_b,
    new_stride_h,
    new_stride_t,
    rows,
    basis,
    row,
    codes,
    meta,
    spare,
    first_token,
    first_page,
    pages,
    first_row,
    row_tokens,
    heads,
    start,
    stop,
    slots,
    old,
    PAGE: tl.constexpr,
    SEEN: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    AXIS: tl.constexpr,
    BITS: tl.constexpr,
    RANK: tl.constexpr,
    LOOPS: tl.constexpr,
    PICKED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Grid: (pages from that of ``start`` on, heads, batch). ``first_token``: of the first page; ``first_page``, ``first_row``:
    where it and its first token lie in storage of ``pages`` pages and ``row_tokens`` tokens. PLAIN: groups are stored, too,
    in plain order."""
    page = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    sequence = tl.load(rows + index).to(tl.int64) if PICKED else index
    lane = sequence * heads + head
    begin = first_token + page * PAGE
    source = (
        ring + sequence * ring_stride_b + head * ring_stride_h,
        D,
        1,
        begin,
        slots,
        new + index * new_stride_b + head * new_stride_h,
        new_stride_t,
        old,
    )
    begins = begin >= start  # a page that began before has its basis
    token = tl.arange(0, PAGE)
    channel = tl.arange(0, D)
    due = (begin + token >= start) & (begin + token < stop)
    there = due | (begins & (token < SEEN))
    x = _finite(tl.load(_tokens_at(source, token, 2) + channel[None, :], mask=there[:, None], other=0.0))
    if AXIS == 0:
        missed, small, scale, zero = _missed(tl.reshape(x, (PAGE // G, G, D)), 1, (1 << BITS) - 1)
    else:
        missed, small, scale, zero = _missed(tl.reshape(x, (PAGE, D // G, G)), 2, (1 << BITS) - 1)
    missed = tl.reshape(missed, (PAGE, D))
    if PLAIN:
        place = lane * (row_tokens // 32) + (first_row + page * PAGE) // 32
        units = (tl.maximum(start - begin, 0) // 32, tl.minimum(stop - begin, PAGE) // 32)
        _store_groups(
            small, scale, zero, codes + place * (4 * D * BITS), meta + place * (2 * (D if AXIS == 0 else 32 * D // G)), units,
            PAGE, D, G, AXIS, BITS,
        )  # fmt: skip
    at = basis + ((lane * pages + first_page + page) * D + channel) * RANK
    if begins:
        seen = tl.where((token < SEEN)[:, None], missed, 0.0)
        most = _max(_max(tl.abs(seen), 1), 0)
        seen = seen * tl.where(most > 0.0, 1.0 / tl.where(most > 0.0, most, 1.0), 0.0)
        first = ()
        for r in tl.static_range(RANK):
            first += (tl.load(spare + channel * RANK + r),)
        columns = first
        for _ in tl.static_range(LOOPS):
            turned = ()
            for r in tl.static_range(RANK):
                along = _sum(seen * columns[r][None, :], 1)
                turned += (_sum(seen * along[:, None], 0),)
            columns = _orthonormal(turned, first, RANK)
        for r in tl.static_range(RANK):
            tl.store(at + r, columns[r].to(tl.float16))
        tl.debug_barrier()
    to = row + (lane * row_tokens + first_row + page * PAGE + token) * RANK
    for r in tl.static_range(RANK):
        column = tl.load(at + r).to(tl.float32)
        tl.store(to + r, _to_fp16(_sum(missed * column[None, :], 1)), mask=due)
