# mypy: ignore-errors
"""Codes in plain order (:mod:`kvfold.formats.packing`) as tiles of fp16: what several readers begin with.

A byte holds a code of each of several tokens of one channel. One load serves all of them, and a few instructions make four
channels of all of these tokens fp16: a field is masked off all four bytes at once, and bytes under the exponent of 1024 are
numbers already, or select a level's two bytes, or are shifted to the place of a sign.

==========  ===========================================
``KIND``    number of a code
==========  ===========================================
UNIFORM     ``code - (2^BITS - 1) / 2``
SIGN        -1 or 1
LEVELS      entry of a table of up to 16 fp16 numbers
PLAIN       the code
==========  ===========================================
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

import torch
import triton
import triton.language as tl

from kvfold.arithmetic import lasting

PTX = tl.constexpr(not triton.knobs.runtime.interpret)
"""Triton's interpreter knows no instructions; there codes are numbers step by step."""

UNIFORM, SIGN, LEVELS, PLAIN = (tl.constexpr(i) for i in range(4))


@triton.constexpr_function
def _assembly(kind: int, bits: int) -> str:
    """Four bytes as four fp16 numbers: of register $4 the field that begins at bit $5; with 3 bits, the third bits are those of
    register $6 at bit $7."""
    loads = "shr.b32 x, $4, $5;"
    if kind == SIGN:
        loads = "sub.s32 t, 7, $5; shf.l.wrap.b32 x, $4, $4, t; and.b32 x, x, 0x80808080;"
    else:
        wide = 2 if bits == 3 else bits
        mask = ((1 << wide) - 1) * 0x01010101
        loads += f"and.b32 x, x, {mask};"
    if bits == 3:
        loads += "sub.s32 t, 2, $7; shf.l.wrap.b32 y, $6, $6, t; lop3.b32 x, y, 0x04040404, x, 0xEA;"
    if kind == SIGN:
        number = """
            prmt.b32 a, x, 0, 0x1404;
            prmt.b32 b, x, 0, 0x3424;
            xor.b32 a, a, 0xBC00BC00;
            xor.b32 b, b, 0xBC00BC00;"""
    elif kind == LEVELS:
        first = 8 if bits == 3 else 6
        pools = [f"${first + i}" for i in range(8)]
        number = f"""
            shr.b32 t, x, 4;
            or.b32 t, t, x;
            prmt.b32 t, t, 0, 0x4420;
            prmt.b32 u, {pools[0]}, {pools[1]}, t;
            prmt.b32 v, {pools[2]}, {pools[3]}, t;"""
        if bits == 4:  # a selector's bit 3 would repeat a sign; here it says which eight levels are meant
            number = f"""
            and.b32 w, x, 0x07070707;
            shr.b32 t, w, 4;
            or.b32 t, t, w;
            prmt.b32 t, t, 0, 0x4420;
            prmt.b32 u, {pools[0]}, {pools[1]}, t;
            prmt.b32 v, {pools[2]}, {pools[3]}, t;
            prmt.b32 w, {pools[4]}, {pools[5]}, t;
            prmt.b32 t, {pools[6]}, {pools[7]}, t;
            shl.b32 y, x, 4;
            prmt.b32 y, y, 0, 0xBA98;
            lop3.b32 u, y, w, u, 0xCA;
            lop3.b32 v, y, t, v, 0xCA;"""
        number += """
            prmt.b32 a, v, u, 0x5140;
            prmt.b32 b, v, u, 0x7362;"""
    else:
        number = """
            mov.b32 t, 0x64006400;
            prmt.b32 a, x, 0x64646464, 0x5140;
            prmt.b32 b, x, 0x64646464, 0x7362;
            sub.rn.f16x2 a, a, t;
            sub.rn.f16x2 b, b, t;"""
    if kind == UNIFORM:
        middle = {1: 0x38003800, 2: 0x3E003E00, 3: 0x43004300, 4: 0x47804780, 8: 0x57F857F8}[
            bits
        ]  # (2^bits - 1) / 2, twice
        number += f"""
            mov.b32 t, {middle};
            sub.rn.f16x2 a, a, t;
            sub.rn.f16x2 b, b, t;"""
    return "{ .reg .b32 a, b, t, u, v, w, x, y;" + loads + number + "mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"


@triton.constexpr_function
def _constraints(kind: int, bits: int) -> str:
    tables = 0 if kind != LEVELS else 4 if bits < 4 else 8
    return ",".join(["=h"] * 4 + ["r"] * ((4 if bits == 3 else 2) + tables))


@triton.jit
def codes(
    data, first, left, four, T: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, table=None
):
    """Numbers of the codes of a tile: fp16 [T / 32, fields, halves, tokens, W].

    The order of the first four dimensions is that of tokens (:func:`token_of`), so that a reshape to [T, W] is the tile.
    ``halves`` is 2 for 3 bits, whose last bits are a plane of their own with four tokens a field, and otherwise 1.

    Parameters
    ----------
    data : pointer to int32
        Codes of the storage's first token, D of them a token.
    first : int64
        Number of the tile's first token in the storage, a multiple of 32.
    left : int32
        Tokens from there on that are written; what lies beyond is not read.
    four : int32 [W / 4]
        Which fours of channels; those from D on are not read.
    table : pointer to int32, or None
        Of KIND LEVELS: what :func:`level_table` makes.
    """
    WIDE: tl.constexpr = 2 if BITS == 3 else BITS
    F: tl.constexpr = 8 // WIDE
    H: tl.constexpr = 2 if BITS == 3 else 1
    R: tl.constexpr = 32 // F // H
    Q: tl.constexpr = four.shape[0]
    unit = tl.minimum(tl.arange(0, T // 32), (left - 1) // 32)[:, None, None, None, None]
    half = tl.arange(0, H)[None, None, :, None, None]
    row = tl.arange(0, R)[None, None, None, :, None]
    column = four[None, None, None, None, :]
    inside = column < D // 4
    data += first // 32 * (D * BITS)
    x = tl.load(data + (unit * (D * BITS) + (half * R + row) * (D // 4) + column), mask=inside, other=0)
    field = tl.arange(0, F)[None, :, None, None, None]
    start = field * WIDE
    if BITS == 3:
        high = tl.load(data + (unit * (D * BITS) + 2 * D + row * (D // 4) + column), mask=inside, other=0)
        place = field * 2 + half
    if PTX:
        args = (x, start)
        if BITS == 3:
            args = args + (high, place)
        if KIND == LEVELS:
            args = args + (tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3))
            if BITS == 4:
                args = args + (tl.load(table + 4), tl.load(table + 5), tl.load(table + 6), tl.load(table + 7))
        ASM: tl.constexpr = _assembly(KIND, BITS)
        HOW: tl.constexpr = _constraints(KIND, BITS)
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, HOW, args, dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1
        )
        out = tl.join(tl.join(a, c), tl.join(b, d))
        return tl.reshape(out, (T // 32, F, H, R, 4 * Q))
    else:
        byte = tl.arange(0, 4) * 8
        code = ((x[:, :, :, :, :, None] >> byte) >> start[:, :, :, :, :, None]) & ((1 << WIDE) - 1)
        if BITS == 3:
            code += ((high[:, :, :, :, :, None] >> byte >> place[:, :, :, :, :, None]) & 1) << 2
        code = tl.reshape(code, (T // 32, F, H, R, 4 * Q))
        if KIND == LEVELS:
            entry = table + code // 8 * 4 + code % 8 // 4
            at = code % 4 * 8
            bits = ((tl.load(entry) >> at) & 255) << 8 | ((tl.load(entry + 2) >> at) & 255)
            return bits.to(tl.int16).to(tl.float16, bitcast=True)
        elif KIND == SIGN:
            return (code * 2 - 1).to(tl.float16)
        elif KIND == UNIFORM:
            return (code.to(tl.float32) - ((1 << BITS) - 1) / 2).to(tl.float16)
        else:
            return code.to(tl.float16)


@triton.jit
def channels(four):
    """Channels, int32 [W], of fours, int32 [W / 4]."""
    return tl.reshape(four[:, None] * 4 + tl.arange(0, 4)[None, :], (4 * four.shape[0],))


@triton.jit
def token_of(T: tl.constexpr, BITS: tl.constexpr):
    """Number within the tile of every token of :func:`codes`: int32 [T / 32, fields, halves, tokens, 1]."""
    F: tl.constexpr = 8 // (2 if BITS == 3 else BITS)
    H: tl.constexpr = 2 if BITS == 3 else 1
    R: tl.constexpr = 32 // F // H
    token = tl.arange(0, T // 32)[:, None, None, None, None] * F + tl.arange(0, F)[None, :, None, None, None]
    token = token * H + tl.arange(0, H)[None, None, :, None, None]
    return token * R + tl.arange(0, R)[None, None, None, :, None]


@triton.jit
def of_tokens(data, first, left, T: tl.constexpr, EACH: tl.constexpr, AT: tl.constexpr):
    """Number AT of the EACH numbers that every token of a tile has: float32 [T]."""
    token = tl.minimum(tl.arange(0, T), left - 1)
    return tl.load(data + (first + token) * EACH + AT).to(tl.float32)


@lasting(1024)
def level_table(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Up to 16 levels for :func:`codes`: int32 [8], upper bytes of eight levels, their lower ones, then those of the others."""
    halves = torch.zeros(16, dtype=torch.float16, device="cpu")
    halves[: len(levels)] = torch.tensor(levels, dtype=torch.float64, device="cpu").to(torch.float16)
    eights = halves.view(torch.uint8).view(2, 8, 2).flip(-1).transpose(1, 2)  # [which eight, upper or lower, level]
    return eights.contiguous().view(torch.int32).flatten().to(device)


@triton.jit
def bounded(x):  # type: ignore[no-untyped-def]
    """fp16 without infinities."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, 0x7BFF7BFF; min.f16x2 $0, $1, a; mov.b32 a, 0xFBFFFBFF; max.f16x2 $0, $0, a; }",
            "=r,r",
            (x,),
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
