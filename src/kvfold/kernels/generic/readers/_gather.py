# mypy: ignore-errors
"""Rows of tables in loads of eight fp16 numbers, and their sums: what codes into codebooks are read with."""

import triton
import triton.language as tl

from kvfold.kernels.generic.readers._codes import PTX


@triton.jit
def four_sum(x, y):
    """Sums of four fp16 numbers in an int64 each."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d;
            mov.b64 {a, b}, $1; mov.b64 {c, d}, $2;
            add.rn.f16x2 a, a, c; add.rn.f16x2 b, b, d;
            mov.b64 $0, {a, b}; }""",
            "=l,l,l",
            (x, y),
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        at = tl.arange(0, 4) * 16
        parts = (_four(x) + _four(y)).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        return _sum(parts << at, len(x.shape))


@triton.jit
def eight_numbers(x, y):
    """The fp16 numbers of two int64 [T, N]: [T, N, 8]."""
    if PTX:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d; mov.b64 {a, b}, $8; mov.b64 {c, d}, $9;
            mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,l,l",
            (x, y),
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    else:
        parts = tl.permute(tl.join(_four(x), _four(y)), (0, 1, 3, 2))
        return tl.reshape(parts, (x.shape[0], x.shape[1], 8))


@triton.jit
def four_numbers(x):
    """The fp16 numbers of int64 [T, N]: [T, N, 4]."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; mov.b64 {a, b}, $4; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }",
            "=h,=h,=h,=h,l",
            (x,),
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        return tl.join(tl.join(a, c), tl.join(b, d))
    else:
        return _four(x)


@triton.jit
def _four(x):
    parts = tl.expand_dims(x, len(x.shape)) >> tl.arange(0, 4) * 16
    return parts.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def gather(at):
    """Two int64 from each of ``at``, pointers to tables, multiples of 16: both [...].

    An instruction of its own, so that the compiler moves neither it nor what it reads to another thread.
    """
    if PTX:
        x, y = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b64 {$0, $1}, [$2];", "=l,=l,l", (at,), dtype=(tl.int64, tl.int64), is_pure=True, pack=1
        )
        return x, y
    else:
        return tl.load(at), tl.load(at + 1)


@triton.jit
def words(at):
    """Numbers behind pointers to int32 or uint8, int32.

    Like :func:`gather`: neighbouring threads have neighbours of the last dimension also where these are equal.
    """
    WIDE: tl.constexpr = at.dtype.element_ty.primitive_bitwidth == 32
    if PTX:
        ASM: tl.constexpr = "ld.global.nc.b32 $0, [$1];" if WIDE else "ld.global.nc.u8 $0, [$1];"
        return tl.inline_asm_elementwise(ASM, "=r,l", (at,), dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.load(at).to(tl.int32)


@triton.jit
def eights(four):
    """Numbers of eight channels, int32 [W / 8], where fours come in twos: 2n, 2n + 1."""
    first, _ = tl.split(tl.reshape(four, (four.shape[0] // 2, 2)))
    return first // 2


@triton.jit  # tl.sum was compiled when Triton was imported
def _sum(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, tl.standard._sum_combine)
