# mypy: ignore-errors
"""Packed storage of any format that has a reader, decoded to 16 bits, in plain Triton: what long calls attend to.

What is the same for all formats is here: statistics and bases of pages, keys before RoPE. What differs is the format's reader.
"""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

import triton
import triton.language as tl

from kvfold.kernels.common._sizes import PAGE
from kvfold.kernels.generic._decode import _channel, _norms
from kvfold.kernels.generic.readers._codes import channels

MOST = tl.constexpr(65504.0)


@triton.jit
def _put(out, x, token, channel, left, D: tl.constexpr):
    """Write a tile, float32 [T, W]; nothing becomes an infinity."""
    x = x.to(out.dtype.element_ty)
    if out.dtype.element_ty == tl.float16:
        most = tl.full([1, 1], MOST, tl.float16)
        x = tl.minimum(tl.maximum(x, -most), most)
    inside = (token < left)[:, None] & (channel < D)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * D + channel[None, :], x, mask=inside)


@triton.jit
def _in_order(x, GROUPS: tl.constexpr):
    """Channels of a half, group by group, as they lie."""
    x = tl.reshape(x, (x.shape[0], GROUPS, x.shape[1] // GROUPS))
    return tl.reshape(tl.permute(x, (0, 2, 1)), (x.shape[0], x.shape[1] * x.shape[2]))


@triton.jit(do_not_specialize=["heads", "start", "first", "tokens", "room", "pages", "each", "wide"])
def unpack_kernel(
    fields, tables, mean_ptr, norm_ptr, basis_ptr, size_ptr, position_ptr, freq_ptr, table_ptr, scratch_ptr, out_ptr,
    heads, start, first, tokens, room, pages, each, wide,
    READ: tl.constexpr, SPEC, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
    MEAN: tl.constexpr, NORM: tl.constexpr, BASIS: tl.constexpr, BY_HEAD: tl.constexpr, ROTARY: tl.constexpr,
    HALVES: tl.constexpr, GROUPS: tl.constexpr, SCRATCH: tl.constexpr, OF_PAGES: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Decode tokens ``first`` to ``first + tokens`` of a span to ``out_ptr``, [batch * heads, wide, D].

    Grid: (tiles / each, batch * heads); a program decodes ``each`` tiles of T tokens. The span's first token is number
    ``start`` of a sequence's packed part; from one KV head's storage to the next are ``room`` tokens and ``pages`` pages.
    Decoded vectors have W channels (a power of two, the last ones perhaps padding).

    With BASIS they are multiplied with ``basis_ptr``, fp16 [width, D]. With BY_HEAD every KV head has its own, to be
    multiplied with ``size_ptr``, float32 [heads], and MEAN means a vector of each head, float32 [heads, D]; without, one of
    each page.
    With ROTARY tiles are read as the two halves of RoPE's pairs, as in :func:`kvfold.kernels.generic._decode.blocks_kernel`,
    and rotated by their position; without HALVES as a whole, which is then cut. With CENTRED a mean of the head is added, fp16
    [heads, D], the second of the tables.
    """
    head = tl.program_id(1)
    batch = head // heads
    storage = head.to(tl.int64) * room + first
    if SCRATCH:
        program = (head * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        scratch = scratch_ptr + program * SCRATCH
        for at in range(0, SCRATCH, 1024):
            words = at + tl.arange(0, 1024)
            tl.store(scratch + words, tl.zeros_like(words).to(tl.int64), mask=words < SCRATCH)
        tl.debug_barrier()
        tables = tables + (scratch,)
    if ROTARY:
        H: tl.constexpr = W // 2
        # all channels are turned: halves lie together, and the compiler is to see it
        WHOLE: tl.constexpr = ROTARY == D and D == W
        a_four = tl.arange(0, H // 4)
        if WHOLE and GROUPS == 1:
            b_four = a_four + H // 4
        else:
            half: tl.constexpr = ROTARY // (8 * GROUPS)  # fours of a group
            rest: tl.constexpr = (D - ROTARY) // (8 * GROUPS)  # channels that are not rotated are pairs of angle 0
            live = a_four < D // 8
            group = a_four // (half + rest) * 2 * (half + rest)
            a_four %= half + rest
            turned = a_four < half
            a_four = group + tl.where(turned, a_four, a_four + half)
            b_four = a_four + tl.where(turned, half, rest)
            a_four = tl.where(live, a_four, D)  # beyond: nothing is read
            b_four = tl.where(live, b_four, D)
        if WHOLE:
            a_channel = tl.arange(0, H)
            b_channel = a_channel + H
        else:
            a_channel = _channel(channels(a_four), D, GROUPS)
            b_channel = _channel(channels(b_four), D, GROUPS)
            if GROUPS == 1:
                a_channel = tl.max_contiguous(tl.multiple_of(a_channel, 4), 4)
                b_channel = tl.max_contiguous(tl.multiple_of(b_channel, 4), 4)
        freq = tl.load(freq_ptr + tl.arange(0, H))
        gain = tl.load(freq_ptr + H + tl.arange(0, H))
        at = tl.arange(0, T)[:, None] * H + tl.arange(0, H)[None, :]
        position = tl.load(position_ptr + batch) + start + first
        if CENTRED:
            own_a = _channel(channels(a_four), D, GROUPS)
            own_b = _channel(channels(b_four), D, GROUPS)
            mean_a = tl.load(tables[1] + head % heads * D + own_a, mask=own_a < D, other=0.0).to(tl.float32)
            mean_b = tl.load(tables[1] + head % heads * D + own_b, mask=own_b < D, other=0.0).to(tl.float32)
    four = tl.arange(0, W // 4)
    channel = tl.arange(0, DP)
    if BASIS:
        w_channel = tl.arange(0, W)
        basis = basis_ptr + w_channel[:, None] * D + channel[None, :]
        if BY_HEAD:
            basis += head % heads * (SPEC[0] * D)
            size = tl.load(size_ptr + head % heads)
        matrix = tl.load(basis, mask=(w_channel < SPEC[0])[:, None] & (channel < D)[None, :], other=0.0)
    token = tl.arange(0, T)
    for i in range(0, each):
        tile = tl.program_id(0) * each + i
        left = tokens - tile * T
        if left > 0:
            page = head.to(tl.int64) * pages + (first + tile * T) // PAGE
            more = tables
            if OF_PAGES:
                more = tables + (page,)
            out = out_ptr + (head.to(tl.int64) * wide + tile * T) * D
            at_token = storage + tile * T
            if ROTARY:
                if HALVES:
                    a, scale = READ(fields, more, head % heads, at_token, left, a_four, T, SPEC)
                    b, _ = READ(fields, more, head % heads, at_token, left, b_four, T, SPEC)
                else:
                    x, scale = READ(fields, more, head % heads, at_token, left, four, T, SPEC)
                    a, b = tl.split(tl.permute(tl.reshape(x, (T, 2, H)), (0, 2, 1)))
                angle = (position + tile * T).to(tl.float32) * freq
                far_cos, far_sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
                near_cos, near_sin = tl.load(table_ptr + at), tl.load(table_ptr + T * H + at)
                cos = (far_cos * near_cos - far_sin * near_sin) * gain[None, :]
                sin = (far_sin * near_cos + far_cos * near_sin) * gain[None, :]
                a = a.to(tl.float32) * scale[:, None]
                b = b.to(tl.float32) * scale[:, None]
                if CENTRED:
                    a += mean_a[None, :]
                    b += mean_b[None, :]
                a, b = a * cos - b * sin, b * cos + a * sin
                if WHOLE and GROUPS > 1:
                    a = _in_order(a, GROUPS)
                    b = _in_order(b, GROUPS)
                _put(out, a, token, a_channel, left, D)
                _put(out, b, token, b_channel, left, D)
            else:
                x, scale = READ(fields, more, head % heads, at_token, left, four, T, SPEC)
                if BASIS:
                    y = tl.dot(x.to(tl.float16), matrix)
                    if BY_HEAD:
                        y *= size
                else:
                    y = x.to(tl.float32)
                y *= scale[:, None]
                if CENTRED:
                    y += tl.load(tables[1] + head % heads * D + channel, mask=channel < D, other=0.0).to(tl.float32)[
                        None, :
                    ]
                if NORM:
                    y *= _norms(norm_ptr, page, channel, D)[None, :]
                if MEAN:
                    place = (head % heads).to(tl.int64) if BY_HEAD else page
                    y += tl.load(mean_ptr + place * D + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
                _put(out, y, token, channel, left, D)
