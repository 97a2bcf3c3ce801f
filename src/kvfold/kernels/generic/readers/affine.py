"""Affine groups: a scale and a zero-point, or signs, of groups along tokens or channels (KIVI, SQuat, InnerQ)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.formats import AffineGroups, Fields
from kvfold.kernels.generic.readers._codes import PLAIN, codes, token_of
from kvfold.kernels.generic.readers.base import Reader

PTX = tl.constexpr(not triton.knobs.runtime.interpret)
LIMIT = tl.constexpr(65400.0)
MODES = {"asym": 0, "sym": 1, "hybrid": 2}


@triton.jit
def read_affine(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    BITS: tl.constexpr = SPEC[1]
    AXIS: tl.constexpr = SPEC[2]
    MODE: tl.constexpr = SPEC[3]
    G: tl.constexpr = SPEC[4]
    W: tl.constexpr = 4 * four.shape[0]
    EACH: tl.constexpr = 2 if MODE == 0 else 1  # numbers of a group beside each other
    LEVELS: tl.constexpr = (1 << BITS) - 1
    token = token_of(T, BITS)
    column = four[None, None, None, None, :]
    inside = column < D // 4
    if AXIS == 0:
        start = tl.minimum(_parts(T, BITS, G), left - 1)
        base = first // G
        row = (start + (first - base * G).to(tl.int32)) // G
        at = row * (EACH * D // 4) + column
        data = fields[1] + base * (EACH * D // 4)
        scale = _fours(data + at, inside)
        if MODE == 0:
            zero = _fours(data + D // 4 + at, inside)
        else:
            GROUP_WORDS: tl.constexpr = max(G // 32, 1)  # int32 words of a group's signs, int16 for groups of 16
            aux = fields[2] + base * (D * GROUP_WORDS)
            words = _words_of_tokens(aux, row, start, first, base, four, D, G)
            if MODE == 2:
                asym = scale.to(tl.int16, bitcast=True) < 0  # a negative scale, -0 included, marks an asymmetric group
                if G == 16:
                    zero = words.to(tl.float16, bitcast=True)
                else:
                    heads = words
                    if GROUP_WORDS > 1:
                        heads = per_channel(aux, row * D * GROUP_WORDS, four, D, GROUP_WORDS)
                    zero = _fp16(heads.to(tl.float32, bitcast=True))
                zero = tl.where(asym, zero, 0.0)
                words = tl.where(asym, 0, words)
                scale = tl.abs(scale)
    else:
        N: tl.constexpr = 32 * D // G
        C: tl.constexpr = SPEC[5]
        # channels that share a group for certain
        begin = (4 * four if C == 4 else tl.arange(0, W // C) * C)[None, None, None, None, :]
        seen = begin < D
        row = tl.minimum(token, left - 1)
        at = row * (D // G) + begin // G
        if MODE == 0:
            at += row // 32 * N  # zero-points lie behind every unit's scales
        base = first // 32 * (EACH * N)
        scale = tl.load(fields[1] + base + at, mask=seen, other=0.0)
        if MODE == 0:
            zero = tl.load(fields[1] + base + N + at, mask=seen, other=0.0)
        else:
            WORD: tl.constexpr = 32 if G % 32 == 0 else 16
            PART: tl.constexpr = min(C, WORD)
            aux = fields[2] + first * (D // WORD) + row * (D // WORD)
            part = (4 * four if C == 4 else tl.arange(0, W // PART) * PART)[None, None, None, None, :]
            words = tl.load(aux + part // WORD, mask=part < D, other=0)
            if MODE == 2:
                asym = scale.to(tl.int16, bitcast=True) < 0
                zero = _zero(words, aux, begin, seen, G)
                zero = tl.where(asym, zero, 0.0).to(tl.float16)
                words = tl.where(spread(asym, W // PART), 0, words)
                scale = tl.abs(scale)
            nibble = spread(words.to(tl.int32), W // 4) >> (four * 4 % WORD)[None, None, None, None, :]
    x = codes(fields[0], first, left, four, T, D, BITS, PLAIN)
    if MODE != 0:
        if AXIS == 0:
            x = _signed_by_token(x, words, token, G)
        else:
            x = _signed_by_channel(x, nibble)
    # nothing decodes to an infinity
    if MODE == 1:
        x = x * spread(tl.minimum(scale, tl.full([1], LIMIT / LEVELS, tl.float16)), W)
    else:
        scale = tl.minimum(scale, (zero.to(tl.float32) * (-1.0 / LEVELS) + LIMIT / LEVELS).to(tl.float16))
        x = fma(x, spread(scale, W), spread(zero, W))
    return tl.reshape(x, (T, W)), tl.full([T], 1.0, tl.float32)


@triton.jit
def _parts(T: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """First tokens of what lies in one group of G tokens for certain: int32, dimensions as of codes."""
    unit = tl.arange(0, T // 32)[:, None, None, None, None] * 32
    if G % 32 == 0:
        return unit
    elif BITS == 8:
        return token_of(T, BITS)
    else:
        F: tl.constexpr = 8 // (2 if BITS == 3 else BITS)
        return unit + tl.arange(0, F)[None, :, None, None, None] * (32 // F) // 16 * 16


@triton.jit
def spread(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of neighbouring channels as N numbers of parts of them, in the last dimension."""
    if x.shape[4] == N:
        return x
    else:
        A: tl.constexpr = x.shape[0]
        B: tl.constexpr = x.shape[1]
        C: tl.constexpr = x.shape[2]
        E: tl.constexpr = x.shape[3]
        P: tl.constexpr = x.shape[4]
        return tl.reshape(tl.broadcast_to(x[:, :, :, :, :, None], (A, B, C, E, P, N // P)), (A, B, C, E, N))


@triton.jit
def _zero(words, aux, begin, seen, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero-points of groups of channels, which begin where their signs would: fp32, or fp16 for groups of 16."""
    if G == 16:
        return words.to(tl.float16, bitcast=True)
    elif G == 32:
        return _fp16(words.to(tl.float32, bitcast=True))
    elif G % 32 == 0:
        return _fp16(tl.load(aux + begin // G * (G // 32), mask=seen, other=0).to(tl.float32, bitcast=True))
    else:
        at = aux + begin // G * (G // 16)
        low = tl.load(at, mask=seen, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(at + 1, mask=seen, other=0).to(tl.int32)
        return _fp16((low | (high << 16)).to(tl.float32, bitcast=True))


@triton.jit
def fma(x, scale, zero):  # type: ignore[no-untyped-def]
    """``x scale + zero``, rounded once: the product alone may be beyond fp16's range."""
    if PTX:
        return tl.fma(x, scale, zero)
    else:
        return (x.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32)).to(tl.float16)


@triton.jit
def _fp16(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _fours(at, inside):  # type: ignore[no-untyped-def]
    """Four fp16 numbers at each address of an int64: fp16 [..., 4Q] of [..., Q]."""
    x = tl.load(at, mask=inside, other=0)
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    E: tl.constexpr = x.shape[3]
    Q: tl.constexpr = x.shape[4]
    a = _half(x, 0)
    b = _half(x, 16)
    c = _half(x, 32)
    d = _half(x, 48)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (A, B, C, E, 4 * Q))


@triton.jit
def _half(x, BIT: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x >> BIT).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def per_channel(data, at, four, D: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word per channel, STEP apart, from ``at`` on: [..., W]."""
    channel = four[:, None] * 4 + tl.arange(0, 4)[None, :]
    channel = channel[None, None, None, None, :, :]
    x = tl.load(data + (at[:, :, :, :, :, None] + channel * STEP), mask=channel < D, other=0)
    return tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], 4 * four.shape[0]))


@triton.jit
def _words_of_tokens(data, row, start, first, base, four, D: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signs of parts of groups of tokens: int32, or int16 for groups of 16, [..., W]."""
    if G == 16:
        return per_channel(data, row * D, four, D, 1)
    else:
        word = (start + (first - base * G).to(tl.int32)) % G // 32
        return per_channel(data, row * (D * G // 32) + word, four, D, G // 32)


@triton.jit
def _signed_by_token(x, words, token, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers, negative where bit ``token`` of their words is set."""
    bit = token % (16 if G == 16 else 32)
    words = words.to(tl.int32)
    if PTX:
        four = tl.reshape(
            words, (words.shape[0], words.shape[1], words.shape[2], words.shape[3], words.shape[4] // 4, 2, 2)
        )
        even, odd = tl.split(four)
        a, c = tl.split(even)
        b, d = tl.split(odd)
        signs = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $4, $5, $9;
            prmt.b32 b, $6, $7, $9;
            shl.b32 a, a, $8;
            shl.b32 b, b, $8;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            }""",
            "=h,=h,=h,=h,r,r,r,r,r,r", [a, b, c, d, 15 - bit % 16, 0x5410 + bit // 16 * 0x2222],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
        return _signed(x, tl.join(tl.join(signs[0], signs[2]), tl.join(signs[1], signs[3])))
    else:
        return _signed(x, ((words >> bit) & 1) << 15)


@triton.jit
def _signed_by_channel(x, nibble):  # type: ignore[no-untyped-def]
    """Numbers, negative where their bit of the nibble of their four is set."""
    if PTX:
        signs = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, n;
            and.b32 n, $4, 15;
            mul.lo.u32 a, n, 0x40008000;
            mul.lo.u32 b, n, 0x10002000;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            }""",
            "=h,=h,=h,=h,r", [nibble], dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
        return _signed(x, tl.join(tl.join(signs[0], signs[2]), tl.join(signs[1], signs[3])))
    else:
        return _signed(x, ((nibble[:, :, :, :, :, None] >> tl.arange(0, 4)) & 1) << 15)


@triton.jit
def _signed(x, sign):  # type: ignore[no-untyped-def]
    """Numbers, negative where the highest bit of their int16 is set."""
    sign = tl.reshape(sign.to(tl.int16), x.shape)
    if PTX:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $2, 0x80008000, $1, 0x6A;", "=r,r,r", [x, sign], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (x.to(tl.int16, bitcast=True) ^ sign).to(tl.float16, bitcast=True)


class AffineReader(Reader[AffineGroups]):
    read = read_affine

    def __init__(self, form: AffineGroups) -> None:
        super().__init__(form)
        self.names = ("codes", "meta") if form.mode == "asym" else ("codes", "scale", "aux")

    @staticmethod
    def why_not(form: AffineGroups) -> str | None:
        if form.axis == "token" and form.group % 32 and form.group != 16:
            return f"groups of {form.group} tokens; allowed: 16, and multiples of 32"
        return None

    @property
    def spec(self) -> tuple[Any, ...]:
        form = self.form
        common = form.group & -form.group  # channels, a power of two, that no group's border parts
        axis = 0 if form.axis == "token" else 1
        return (form.head_dim, form.bits_per_code, axis, MODES[form.mode], form.group, common)

    def spec_of_halves(self) -> tuple[Any, ...]:
        return (*self.spec[:5], 4)

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        """Scales of channels as int64, four of them; signs as int32 where a group has whole words of them."""
        tokens = self.form.axis == "token"
        numbers = stored[self.names[1]]
        out = [stored["codes"].view(torch.int32), numbers.view(torch.int64) if tokens else numbers]
        if self.form.mode != "asym":
            aux = stored["aux"]
            out.append(aux.view(torch.int32) if self.form.group % 32 == 0 else aux)
        return tuple(out)
