# mypy: ignore-errors
"""Angles of rotary positions in kernels of Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._warp import store_shared2, warp_sync


@gluon.jit
def round_nearest(x):
    return gl.inline_asm_elementwise("cvt.rni.f32.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def cos_fast(x):
    return gl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sin_fast(x):
    return gl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def page_angles(freq, scratch, lane, position):
    """Cosines and sines of a page's position: float32 [64, 2] in a warp's scratch. ``freq``: turns per token, and what float32
    leaves of them."""
    for i in gl.static_range(2):
        j = lane + 32 * i
        f = gl.load(freq + j)
        rest = gl.load(freq + 64 + j)
        x = position.to(gl.float32)
        turns = x * f
        angle = (gl.fma(x, f, -round_nearest(turns)) + x * rest) * 6.283185307179586
        store_shared2(scratch + j * 8, _bits(cos_fast(angle)), _bits(sin_fast(angle)))
    warp_sync(lane)


@gluon.jit
def _bits(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)
