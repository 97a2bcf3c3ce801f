# mypy: ignore-errors
"""Words of global memory that nobody writes while a kernel runs, by a lane each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _stream_asm(n, offset):
    vector = {1: "", 2: ".v2", 4: ".v4"}[n]
    outputs = ", ".join(f"${i}" for i in range(n))
    return f"ld.global.nc{vector}.b32 {{{outputs}}}, [${n}+{offset}];"


@gluon.jit
def load_words4(address, OFFSET: gl.constexpr):
    """16 bytes of global memory, which nobody writes meanwhile."""
    asm: gl.constexpr = _stream_asm(4, OFFSET)
    return gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,l", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def load_words2(address, OFFSET: gl.constexpr):
    asm: gl.constexpr = _stream_asm(2, OFFSET)
    return gl.inline_asm_elementwise(asm, "=r,=r,l", [address], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def load_word(address):
    return gl.inline_asm_elementwise(
        "ld.global.nc.b32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=True, pack=1
    )
