# mypy: ignore-errors
"""Elements in fp16 among levels of a table (KVQuant), as :mod:`kvfold.kernels.long._levels` unpacks them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_outlier(where, value, active):
    """An element's number in its block, and above it its value: 16 bits each; -1 in lanes that are not ``active``."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 a, b; setp.ne.s32 p, $3, 0; mov.b16 a, 0xFFFF; mov.b16 b, 0xFFFF;"
        " @p ld.global.b16 a, [$1]; @p ld.global.b16 b, [$2]; mov.b32 $0, {a, b}; }",
        "=r,l,l,r",
        [where, value, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _replaced(x, outlier):
    """``outlier``, in halves where it is not 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 m, z; mov.b32 z, 0; set.ne.u32.f16x2 m, $2, z; lop3.b32 $0, $1, m, $2, 0xBA; }",
        "=r,r,r",
        [x, outlier],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _seen(value):
    """fp16 in the low half, the smallest number for 0."""
    return gl.where((value & 0x7FFF) == 0, 1, value)
