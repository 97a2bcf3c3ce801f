# mypy: ignore-errors
"""Tiles of vectors through a dense basis: levels of a table with a scale per token, signs of a sketch with a norm.

Products are made channel by channel in float32, so that a block has the same bytes in a prompt and in a decode step.
"""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _divided, _finite, _sum, _to_fp16
from kvfold.kernels.common._encode_tile import _load_state, _tokens_at
from kvfold.kernels.common._encode_words import _log2

STEP = tl.constexpr(16)
"""Channels that are multiplied at a time."""


@triton.constexpr_function
def _root(n):
    return n**0.5


@triton.jit
def _across(x, N: tl.constexpr, D: tl.constexpr):
    """Sum over channels, [N, D] -> [N]: of neighbours, and so on."""
    for level in tl.static_range(_log2(D)):
        x = _sum(tl.reshape(x, (N, D >> (level + 1), 2)), 2)
    return tl.reshape(x, (N,))


@triton.jit
def _codes_tile(
    source, page, tables, codes_out, scale_out, D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, MEAN: tl.constexpr,
    NORM: tl.constexpr, SKETCH: tl.constexpr, ORDER: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Encode 32 tokens; all pointers point to the first of them, or to their page.

    ``tables``: float32, the basis [D, W], then 2^BITS - 1 borders between levels, ascending. ORDER: 0 keys', 1 values' of
    tensor cores, 2 plain.
    """
    WP: tl.constexpr = triton.next_power_of_2(W)
    token, column = tl.arange(0, 32), tl.arange(0, WP)
    real = (column < W)[None, :]
    y = tl.full((32, WP), 0.0, tl.float32)
    size = tl.full((32,), 0.0, tl.float32)
    at = _tokens_at(source, token, RING)
    for first in range(0, D, STEP):
        channel = (first + tl.arange(0, STEP))[None, :]
        x = _finite(tl.load(at + channel))
        mean, norm, inverse = _load_state(page, channel, MEAN, NORM, False)
        if MEAN:
            x = x - mean
        if NORM:
            x = _divided(x, norm, inverse)
        if SKETCH:
            size += _across(x * x, 32, STEP)
        row = first + tl.arange(0, STEP)
        basis = tl.load(tables + row[:, None] * W + column[None, :], mask=real, other=0.0)
        y = tl.dot(x, basis, y, input_precision="ieee")
    if SKETCH:
        scale = tl.math.div_rn(tl.sqrt_rn(size), tl.full((32,), _root(D), tl.float32))
        tl.store(scale_out + token, _to_fp16(scale))
        codes = tl.where(y >= 0.0, 1, 0)
    else:
        mean_square = tl.math.div_rn(_across(y * y, 32, WP), tl.full((32,), W, tl.float32))
        scale = _to_fp16(tl.sqrt_rn(mean_square))
        tl.store(scale_out + token, scale)
        safe = scale.to(tl.float32)
        safe = tl.where(safe == 0.0, 1.0, safe)[:, None]
        y = _divided(y, safe, tl.math.div_rn(1.0, safe))
        codes = tl.full((32, WP), 0, tl.int32)
        for i in tl.static_range((1 << BITS) - 1):
            codes += tl.where(y > tl.load(tables + D * W + i), 1, 0)
    codes = tl.reshape(codes, (32 * WP,))
    if BITS == 3:
        _store_plane(codes & 3, codes_out, W, 2, ORDER)
        _store_plane(codes >> 2, codes_out + 4 * W, W, 1, ORDER)
    else:
        _store_plane(codes, codes_out, W, BITS, ORDER)


@triton.jit
def _store_plane(codes, out, W: tl.constexpr, WIDTH: tl.constexpr, ORDER: tl.constexpr):
    """Store a plane of codes [32 tokens * channels] as kvfold.formats.packing.pack does: field f of word w is the code at
    ``f N + w`` of the stream of N words; words of plain order are bytes."""
    BITS: tl.constexpr = 8 if ORDER == 2 else 16
    N: tl.constexpr = 32 * W * WIDTH // BITS
    NP: tl.constexpr = triton.next_power_of_2(N)
    WP: tl.constexpr = triton.next_power_of_2(W)
    FIELDS: tl.constexpr = BITS // WIDTH
    n = tl.arange(0, FIELDS * NP)
    field = n // NP
    at = field * N + tl.minimum(n % NP, N - 1)
    if ORDER == 2:
        token, channel = at // W, at % W
    else:
        # of the stream: channel tile, token tile, g, t, col_half, row_half, pair
        row = at // 2 % 2 * 8 + at // 32 % 8
        column = at // 4 % 2 * 8 + at // 8 % 4 * 2 + at % 2
        channel = at // 512 * 16 + (row if ORDER == 1 else column)
        token = at // 256 % 2 * 16 + (column if ORDER == 1 else row)
    picked = tl.gather(codes, token * WP + channel, 0) << field * WIDTH
    words = _sum(tl.reshape(picked, (FIELDS, NP)), 0)
    i = tl.arange(0, NP)
    if ORDER == 2:
        tl.store(out.to(tl.pointer_type(tl.uint8), bitcast=True) + i, words.to(tl.uint8), mask=i < N)
    else:
        tl.store(out + i, words.to(tl.int16), mask=i < N)
