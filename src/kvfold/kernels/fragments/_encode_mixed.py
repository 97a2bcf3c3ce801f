# mypy: ignore-errors
"""Blocks in two precisions, those of a block's tokens that probes attend to most with more bits (ZipCache): Triton code of
:mod:`kvfold.kernels.fragments.encode_mixed`."""

import triton
import triton.language as tl

from kvfold.kernels.common._encode_groups import ROUND, _divided, _finite, _max, _min, _sum, _to_fp16
from kvfold.kernels.common._encode_nearest import _lane
from kvfold.kernels.common._encode_tile import _load_state
from kvfold.kernels.common._encode_words import _sign_bit
from kvfold.kernels.fold._encode import _statistics
from kvfold.kernels.fold._encode_codes import STEP, _store_plane

NO_RING = tl.constexpr(0)


@triton.jit
def _member_bit(member, ORDER: tl.constexpr):
    """Bit of 32 that says of a token whether it is salient (kvfold.formats.packing.pack_signs)."""
    return member if ORDER == 2 else _sign_bit(member)


@triton.jit
def _scores(at, probes, B: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PROBES: tl.constexpr, ROOT: tl.constexpr):
    """Mean attention that PROBES probes pay each token of a block: float32 [B]."""
    probe = tl.arange(0, P)
    real = probe < PROBES
    score = tl.full((B, P), 0.0, tl.float32)
    for first in range(0, D, STEP):
        channel = first + tl.arange(0, STEP)
        keys = _finite(tl.load(at + channel[None, :]))
        asked = tl.load(probes + probe[None, :] * D + channel[:, None], mask=real[None, :], other=0.0)
        score = tl.dot(keys, asked.to(tl.float32), score, input_precision="ieee")
    score = score / ROOT
    weight = tl.exp(score - _max(score, 0)[None, :])
    return _sum(tl.where(real[None, :], weight / _sum(weight, 0)[None, :], 0.0), 1) / PROBES


@triton.jit
def _choose(score, which, B: tl.constexpr, SALIENT: tl.constexpr, ORDER: tl.constexpr):
    """Store which SALIENT tokens have the largest scores, of equal ones the first: 32 bits of each unit of tokens."""
    token = tl.arange(0, B)
    more = score[None, :] > score[:, None]
    before = (score[None, :] == score[:, None]) & (token[None, :] < token[:, None])
    taken = _sum((more | before).to(tl.int32), 1) < SALIENT
    bit = _member_bit(tl.arange(0, 32), ORDER)[None, :]
    words = _sum(tl.reshape(taken.to(tl.int32), (B // 32, 32)) << bit, 1)
    tl.store(which + tl.arange(0, B // 32), words)


@triton.jit
def _vectors_of(at, page, D: tl.constexpr, NORM: tl.constexpr):
    """Tokens [n, D] as they are encoded: those of values over their channels' norms."""
    channel = tl.arange(0, D)[None, :]
    x = _finite(tl.load(at + channel))
    if NORM:
        _, norm, inverse = _load_state(page, channel, False, True, False)
        x = _divided(x, norm, inverse)
    return x


@triton.jit
def _range(low, high):
    """fp16 zero and range of groups with these extremes."""
    zero = _to_fp16(low)
    return zero, _to_fp16(high - zero.to(tl.float32))


@triton.jit
def _store_side(
    x, stride, page, which, codes, low_out, meta, B: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    EXTRA: tl.constexpr, ORDER: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Encode one side of a block; ``which``: its tokens' 32 bits per unit."""
    channel, token = tl.arange(0, D), tl.arange(0, 32)
    if not VALUES:
        at = x + tl.arange(0, B).to(tl.int64)[:, None] * stride
        block = _vectors_of(at, page, D, False)
        zero, span = _range(_min(block, 0), _max(block, 0))
        tl.store(meta + channel * 2, zero)
        tl.store(meta + channel * 2 + 1, span)
    TOP: tl.constexpr = BITS + EXTRA
    WORDS: tl.constexpr = D * EXTRA // 16
    row = 0
    for unit in range(B // 32):
        own = _vectors_of(x + (unit * 32 + token).to(tl.int64)[:, None] * stride, page, D, VALUES)
        if VALUES:
            zero, span = _range(_min(own, 1), _max(own, 1))
            out = meta + (unit * 32 + token) * 2
            tl.store(out, zero)
            tl.store(out + 1, span)
            first, wide = zero.to(tl.float32)[:, None], span.to(tl.float32)[:, None]
        else:
            first, wide = zero.to(tl.float32)[None, :], span.to(tl.float32)[None, :]
        size = tl.broadcast_to(tl.where(wide == 0.0, 1.0, wide), (32, D))
        part = tl.minimum(tl.maximum(tl.math.div_rn(own - first, size), 0.0), 1.0)
        fine = (part * ((1 << TOP) - 1.0) + ROUND - ROUND).to(tl.int32)
        coarse = (part * ((1 << BITS) - 1.0) + ROUND - ROUND).to(tl.int32)

        word = tl.load(which + unit)
        taken = (word >> _member_bit(token, ORDER)) & 1
        codes_of = tl.reshape(tl.where(taken[:, None] > 0, fine >> EXTRA, coarse), (32 * D,))
        words = codes + unit * (2 * D * BITS)
        _store_plane(codes_of, words, D, BITS, ORDER)

        rest = tl.reshape(fine & ((1 << EXTRA) - 1), (32, WORDS, 16 // EXTRA))
        packed = _sum(rest << (EXTRA * tl.arange(0, 16 // EXTRA))[None, None, :], 2)
        earlier = (((word >> _member_bit(token, ORDER)[None, :]) & 1) > 0) & (token[None, :] < token[:, None])
        place = row + _sum(earlier.to(tl.int32), 1)
        column = tl.arange(0, WORDS)[None, :]
        tl.store(low_out + place[:, None] * WORDS + column, packed.to(tl.int16), mask=taken[:, None] > 0)
        row += _sum(taken, 0)


@triton.jit(do_not_specialize=["first_block"])
def mixed_kernel(
    key, k_stride_b, k_stride_h, k_stride_t, value, v_stride_b, v_stride_h, v_stride_t, rows, probes, states, numbers,
    k_codes, k_low, k_which, k_meta, v_codes, v_low, v_which, v_meta, v_norm, table, first_block, blocks, heads,
    FORM: tl.constexpr, B: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PROBES: tl.constexpr, ROOT: tl.constexpr,
    SALIENT: tl.constexpr, K_BITS: tl.constexpr, K_EXTRA: tl.constexpr, V_BITS: tl.constexpr, V_EXTRA: tl.constexpr,
    K_ORDER: tl.constexpr, V_ORDER: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of B tokens, heads, batch). ``probes`` fp16 [batch, states, heads, P, D], of which each block takes the one
    that ``numbers`` says. FORM: of values (:mod:`kvfold.kernels.fold._encode`), whose statistics belong to the block."""
    index, head, lane = _lane(rows, heads, PICKED)
    first = tl.program_id(0) * B
    block = lane * blocks + first_block + tl.program_id(0)
    state = index * states + tl.load(numbers + tl.program_id(0))
    key += index * k_stride_b + head * k_stride_h + first.to(tl.int64) * k_stride_t
    value += index * v_stride_b + head * v_stride_h + first.to(tl.int64) * v_stride_t
    token = tl.arange(0, B).to(tl.int64)[:, None]
    score = _scores(key + token * k_stride_t, probes + (state * heads + head) * (PROBES * D), B, D, P, PROBES, ROOT)
    k_words, v_words = k_which + block * (B // 32), v_which + block * (B // 32)
    _choose(score, k_words, B, SALIENT, K_ORDER)
    _choose(score, v_words, B, SALIENT, V_ORDER)
    norm = v_norm + block * D
    _statistics((value, v_stride_t, 1, 0, 1), norm, norm, D, FORM, NO_RING)
    tl.debug_barrier()  # what these threads stored, others read
    page = (norm, norm, table)
    _store_side(
        key, k_stride_t, page, k_words, k_codes + block * (2 * D * K_BITS * B // 32),
        k_low + block * (SALIENT * D * K_EXTRA // 16), k_meta + block * (2 * D), B, D, K_BITS, K_EXTRA, K_ORDER, False,
    )  # fmt: skip
    _store_side(
        value, v_stride_t, page, v_words, v_codes + block * (2 * D * V_BITS * B // 32),
        v_low + block * (SALIENT * D * V_EXTRA // 16), v_meta + block * (2 * B), B, D, V_BITS, V_EXTRA, V_ORDER, True,
    )  # fmt: skip
