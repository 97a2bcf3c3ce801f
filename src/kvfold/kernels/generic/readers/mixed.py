"""Two precisions in one block: some tokens have further bits (ZipCache)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.formats import Fields, MixedTokens
from kvfold.kernels.generic.readers._codes import PLAIN, codes, token_of
from kvfold.kernels.generic.readers.affine import fma, per_channel, spread
from kvfold.kernels.generic.readers.base import Reader

PTX = tl.constexpr(not triton.knobs.runtime.interpret)
LIMIT = tl.constexpr(65400.0)


@triton.jit
def read_mixed(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    BITS: tl.constexpr = SPEC[1]
    EXTRA: tl.constexpr = SPEC[2]
    AXIS: tl.constexpr = SPEC[3]
    BLOCK: tl.constexpr = SPEC[4]
    SALIENT: tl.constexpr = SPEC[5]
    W: tl.constexpr = 4 * four.shape[0]
    FINE: tl.constexpr = 1.0 / ((1 << (BITS + EXTRA)) - 1)
    COARSE: tl.constexpr = 1.0 / ((1 << BITS) - 1)
    token = tl.minimum(token_of(T, BITS), left - 1)
    block = first // BLOCK
    offset = (first - block * BLOCK).to(tl.int32)
    step = tl.full([1, 1, 1, 1, 1], COARSE, tl.float32)
    if SALIENT > 0:
        which, row = _ranks(fields[2] + block * (BLOCK // 32), token, offset, BLOCK)
        row = (token + offset) // BLOCK * SALIENT + tl.minimum(row, SALIENT - 1)
        low = _low(fields[1] + block * (SALIENT * D * EXTRA // SPEC[6]), row, which, four, D, EXTRA, SPEC[6], SPEC[7])
        step = tl.where(which, FINE, step)
        weight = tl.where(which, 1.0 * (1 << EXTRA), 1.0).to(tl.float16)
    if AXIS == 0:
        unit = tl.arange(0, T // 32 if T > BLOCK else 1)[:, None, None, None, None] * 32
        part = (tl.minimum(unit, left - 1) + offset) // BLOCK
        meta = per_channel(fields[3] + block * D, part * D, four, D, 1)
    else:
        meta = tl.load(fields[3] + first + token)
    zero = (meta & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    span = (meta >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    # nothing decodes to an infinity
    span = tl.minimum(span.to(tl.float32), LIMIT - zero.to(tl.float32))
    x = codes(fields[0], first, left, four, T, D, BITS, PLAIN)
    if SALIENT > 0:
        x = fma(x, weight, _numbers(low, EXTRA))
    if AXIS == 0:
        x = fma(x * step.to(tl.float16), span.to(tl.float16), zero)
    else:
        x = fma(x, (span * step).to(tl.float16), zero)
    return tl.reshape(x, (T, W)), tl.full([T], 1.0, tl.float32)


@triton.jit
def _ranks(data, token, offset, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which tokens are salient, and how many salient ones their block has before them."""
    place = (token + offset) % BLOCK
    words = data + (token + offset) // 32
    word = tl.load(words)
    count = _ones(word & ((1 << place % 32) - 1))
    for j in tl.static_range(BLOCK // 32 - 1):
        before = tl.load(words - place // 32 + j)
        count += tl.where(j < place // 32, _ones(before), 0)
    return (word >> place % 32) & 1 != 0, count


@triton.jit
def _ones(x):  # type: ignore[no-untyped-def]
    """How many bits are set."""
    if PTX:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = (x & 0x55555555) + ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
        x = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
        return (x & 0xFFFF) + (x >> 16)


@triton.jit
def _low(data, row, which, four, D: tl.constexpr, EXTRA: tl.constexpr, WORD: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Low bits of fours of channels, lowest first: int32 [..., Q], above them nothing in particular; those of others are 0.

    ``WORD`` is the bits of a stored word; C channels lie in one for certain.
    """
    Q: tl.constexpr = four.shape[0]
    EACH: tl.constexpr = WORD // EXTRA
    column = (4 * four if C == 4 else tl.arange(0, 4 * Q // EACH) * EACH)[None, None, None, None, :]
    word = tl.load(data + (row * (D // EACH) + column // EACH), mask=which & (column < D), other=0)
    return spread(word.to(tl.int32), Q) >> (four * 4 % EACH * EXTRA)[None, None, None, None, :]


@triton.constexpr_function
def _assembly(extra: int) -> str:
    """Four fields of ``extra`` bits, from register $4's lowest bits on, as four fp16 numbers."""
    mask = ((1 << extra) - 1) * 0x10001
    far = f"shr.b32 t, t, 8; lop3.b32 b, t, {mask}, u, 0xEA; sub.rn.f16x2 b, b, u;"
    if extra < 4:  # where they lie, bits 2 extra on, they are that many times as large
        factor, shift = {1: (0x3400, 0xDC00), 2: (0x2C00, 0xD400)}[extra]
        far = f"""lop3.b32 b, t, {mask << 2 * extra}, u, 0xEA; mov.b32 u, {factor * 0x10001}; mov.b32 v, {shift * 0x10001};
            fma.rn.f16x2 b, b, u, v;"""
    return f"""{{ .reg .b32 a, b, t, u, v;
        and.b32 t, $4, {(1 << 4 * extra) - 1};
        shl.b32 u, t, {16 - extra};
        or.b32 t, t, u;
        mov.b32 u, 0x64006400;
        lop3.b32 a, t, {mask}, u, 0xEA;
        sub.rn.f16x2 a, a, u;
        {far}
        mov.b32 {{$0, $1}}, a;
        mov.b32 {{$2, $3}}, b; }}"""


@triton.jit
def _numbers(low, EXTRA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of fours of fields: fp16 [..., 4Q]."""
    if PTX:
        ASM: tl.constexpr = _assembly(EXTRA)
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,r", [low], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1
        )
        x = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        x = ((low[:, :, :, :, :, None] >> tl.arange(0, 4) * EXTRA) & ((1 << EXTRA) - 1)).to(tl.float16)
    return tl.reshape(x, (low.shape[0], low.shape[1], low.shape[2], low.shape[3], 4 * low.shape[4]))


class MixedReader(Reader[MixedTokens]):
    read = read_mixed
    names = ("codes", "low", "which", "meta")

    @property
    def spec(self) -> tuple[Any, ...]:
        form = self.form
        word = 16 if form.extra_bits == 1 else 32
        axis = 0 if form.axis == "token" else 1
        return (
            *(form.head_dim, form.bits_per_code, form.extra_bits, axis, form.block, form.salient),
            *(word, word // form.extra_bits),
        )

    def spec_of_halves(self) -> tuple[Any, ...]:
        return (*self.spec[:7], 4)

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        low = stored["low" if self.form.salient else "codes"]
        return (
            stored["codes"].view(torch.int32),
            low if self.form.extra_bits == 1 else low.view(torch.int32),
            stored["which"].view(torch.int32),
            stored["meta"].view(torch.int32),
        )
