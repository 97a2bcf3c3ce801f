# mypy: ignore-errors
"""Instructions that :mod:`kvfold.kernels.long._mixed` and :mod:`kvfold.kernels.long._levels` need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _ones_of(x):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _store_short(address, x, active):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b16 h, i; setp.ne.s32 p, $3, 0; mov.b32 {h, i}, $2; @p st.shared.b16 [$1], h; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [address, x, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
