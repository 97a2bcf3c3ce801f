# mypy: ignore-errors
"""Rotated tiles in affine groups, of KVarN after tokens and channels were brought to equal spread; and products with a learned
map: Triton code of :mod:`kvfold.kernels.searched.tiles`.

A program has a whole tile in registers. Sums have an order that the tile's shape decides alone, and what lanes share is
rounded alike in all of them: nothing is contracted but where it is written.
"""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import _asym, _fma, _max, _min, _sum, _to_fp16
from kvfold.kernels.common._encode_nearest import _lane, _quotient, _vectors
from kvfold.kernels.fold._encode import _hadamard, _load

LEAST = tl.constexpr(1e-3)
"""As kvfold.formats.balanced has it."""


@triton.jit
def _variances(x, weight, AXIS: tl.constexpr):
    """Variance over AXIS of x times ``weight``, a number for each place along AXIS: in two passes, as the format's."""
    N: tl.constexpr = x.shape[AXIS]
    weight = tl.expand_dims(weight, 1 - AXIS) + tl.full(x.shape, 0.0, tl.float32)
    least = tl.expand_dims(_sum(x * weight, AXIS) * (-1.0 / N), AXIS) + tl.full(x.shape, 0.0, tl.float32)
    off = _fma(x, weight, least)
    return _sum(off * off, AXIS) * (1.0 / (N - 1))


@triton.jit
def _unevenness(variance):
    """Largest standard deviation by the smallest one."""
    return tl.sqrt(tl.fdiv(_max(variance, 0), tl.maximum(_min(variance, 0), LEAST * LEAST)))


@triton.jit
def _factors(x, AXIS: tl.constexpr, ROUNDS: tl.constexpr):
    """What to divide tokens (AXIS 0) or channels (1) of x by (kvfold.formats.balanced.factors).

    ``own`` and ``rest`` are reciprocals of the factors of AXIS and of the other axis. A place's deviation is that of x under
    the other axis' factors by its own factor. So where it is divided out, that is the new factor, and what is left is 1.
    """
    OTHER: tl.constexpr = 1 - AXIS
    size = tl.sqrt_rn(_sum(_sum(x * x, 1), 0) * (1.0 / (x.shape[0] * x.shape[1])))
    inverse = tl.math.div_rn(1.0, tl.where(size > 0.0, size, 1.0))
    own = tl.full((x.shape[AXIS],), 1.0, tl.float32)
    rest = tl.full((x.shape[OTHER],), 1.0, tl.float32) * inverse
    best = own
    of_own = _variances(x, rest, OTHER)
    least = _unevenness(of_own) + _unevenness(_variances(x, own, AXIS) * (inverse * inverse))
    for _ in range(ROUNDS):
        own = tl.where(of_own * (own * own) > LEAST * LEAST, tl.math.rsqrt(of_own), own)
        of_rest = _variances(x, own, AXIS)
        left = of_rest * (rest * rest)
        rest = tl.where(left > LEAST * LEAST, tl.math.rsqrt(of_rest), rest)
        of_own = _variances(x, rest, OTHER)
        found = _unevenness(of_own * (own * own)) + _unevenness(tl.where(left > LEAST * LEAST, 1.0, left))
        best = tl.where(found < least, own, best)
        least = tl.minimum(found, least)
    if AXIS == 1:
        return tl.math.div_rn(size, best)
    return tl.math.div_rn(tl.exp2(_sum(tl.log2(best), 0) * (1.0 / x.shape[0])), best)


@triton.jit
def _store_plain(codes, out, WIDTH: tl.constexpr, TOTAL: tl.constexpr):
    """Store a plane of WIDTH bits of codes int32 [T, D] in plain order (kvfold.formats.packing.pack); ``out``: bytes of the
    first 32 tokens' plane, of TOTAL bits a channel in all."""
    T: tl.constexpr = codes.shape[0]
    D: tl.constexpr = codes.shape[1]
    FIELDS: tl.constexpr = 8 // WIDTH
    ROWS: tl.constexpr = 32 // FIELDS
    if FIELDS > 1:
        field = tl.arange(0, FIELDS)[None, :, None, None]
        codes = _sum(tl.reshape(codes, (T // 32, FIELDS, ROWS, D)) << field * WIDTH, 1)
    codes = tl.reshape(codes, (T * ROWS // 32, D))
    row = tl.arange(0, T * ROWS // 32)
    at = row // ROWS * (4 * D * TOTAL) + row % ROWS * D
    tl.store(out + at[:, None] + tl.arange(0, D)[None, :], codes.to(tl.uint8))


@triton.jit
def store_groups(tile, codes, meta, BITS: tl.constexpr, AXIS: tl.constexpr):
    """Store the affine groups of a tile, float32 [T, D], in plain order: codes and metadata of its first tokens on; AXIS as in
    :func:`tile_kernel`."""
    T: tl.constexpr = tile.shape[0]
    D: tl.constexpr = tile.shape[1]
    levels, scale, zero = _asym((tile,), AXIS, BITS)
    if AXIS == 0:
        channel = tl.arange(0, D)
        tl.store(meta + channel, scale)
        tl.store(meta + channel + D, zero)
    else:
        token = tl.arange(0, T)
        at = meta + token // 32 * 64 + token % 32
        tl.store(at, scale)
        tl.store(at + 32, zero)
    code = levels[0].to(tl.int32)
    if BITS == 3:
        _store_plain(code & 3, codes, 2, 3)
        _store_plain(code >> 2, codes + 8 * D, 1, 3)
    else:
        _store_plain(code, codes, BITS, BITS)


@triton.jit
def rotated_tile(
    source, signs, codes, meta, D: tl.constexpr, BITS: tl.constexpr, ROTATION: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """Rotate 32 tokens and store each as a group. ``source`` as :func:`kvfold.kernels.common._encode_tile._tokens_at` takes
    it."""
    token, channel = tl.arange(0, 32), tl.arange(0, D)
    tile = _load(source, token, channel, (token >= 0)[:, None] & (channel >= 0)[None, :], RING)
    tile = _hadamard(tile * tl.load(signs + channel)[None, :], 32, D, ROTATION)
    store_groups(tile, codes, meta, BITS, 1)


@triton.jit(do_not_specialize=["first_block", "blocks", "heads"])
def tile_kernel(
    x, stride_b, stride_h, stride_t, rows, signs, codes, meta, factor, first_block, blocks, heads,
    D: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr, ROTATION: tl.constexpr,
    FACTORS: tl.constexpr, ROUNDS: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of T tokens, balance it, store its affine groups. Grid: (tiles, heads, batch).

    ``signs`` float32 [D] of a Hadamard rotation of ROTATION channels (0: none). AXIS 0: a group is all tokens of a channel, and
    a factor belongs to a token; 1: a group is all channels of a token, a factor belongs to a channel. ``codes`` uint8 [lanes,
    blocks, T / 32, 4 D BITS], ``meta`` fp16 [lanes, blocks, 2, D] or [lanes, blocks, T / 32, 2, 32], ``factor`` fp16 [lanes,
    blocks, T or D]. The tile becomes block ``first_block`` and those after it.
    """
    index, head, lane = _lane(rows, heads, PICKED)
    token, channel = tl.arange(0, T), tl.arange(0, D)
    source = (x + index * stride_b + head * stride_h, stride_t, signs, signs, 1.0)
    known = (token >= 0)[:, None] & (channel >= 0)[None, :]
    tile = _vectors(source, tl.program_id(0) * T + token[:, None], channel[None, :], known, 0)
    if ROTATION > 0:
        tile = _hadamard(tile * tl.load(signs + channel)[None, :], T, D, ROTATION)
    block = lane * blocks + first_block + tl.program_id(0)
    if FACTORS:
        COUNT: tl.constexpr = T if AXIS == 0 else D
        stored = _to_fp16(_factors(tile, AXIS, ROUNDS))
        stored = tl.where(stored == 0.0, 1.0, stored).to(tl.float16)
        tl.store(factor + block * COUNT + tl.arange(0, COUNT), stored)
        wide = stored.to(tl.float32)
        inverse = tl.math.div_rn(tl.full((COUNT,), 1.0, tl.float32), wide)
        tile = _quotient(tile, tl.expand_dims(wide, 1 - AXIS), tl.expand_dims(inverse, 1 - AXIS))
    store_groups(tile, codes + block * (T * D * BITS // 8), meta + block * (2 * (D if AXIS == 0 else T)), BITS, AXIS)


@triton.jit(do_not_specialize=["tokens", "room"])
def project_kernel(
    x, stride_b, stride_h, stride_t, mean, matrix, out, tokens, room, heads,
    D: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Vectors less their head's mean, times its matrix, float32 [batch, heads, room, D]. Grid: (parts of T tokens, heads,
    batch). ``mean`` float32 [heads, D], ``matrix`` float32 [heads, D, D]."""
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = (token < tokens)[:, None]
    column = tl.arange(0, D)[None, :]
    source = (x + index * stride_b + head * stride_h, stride_t, mean, mean, 1.0)
    total = tl.full((T, D), 0.0, tl.float32)
    for first in range(0, D, STEP):
        channel = first + tl.arange(0, STEP)
        some = (
            _vectors(source, token[:, None], channel[None, :], inside, 0) - tl.load(mean + head * D + channel)[None, :]
        )
        part = tl.load(matrix + (head * D + channel[:, None]) * D + column)
        total = tl.dot(some, part, total, input_precision="tf32x3")
    tl.store(out + ((index * heads + head) * room + token[:, None]) * D + column, total, mask=inside)
