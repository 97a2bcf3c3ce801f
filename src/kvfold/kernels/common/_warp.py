# mypy: ignore-errors
"""Instructions of one warp, for Gluon kernels that decide themselves what each lane holds.

A tensor here is one 32-bit register per thread: shape [threads of the program], one element per thread. What PTX offers and
Gluon does not name (fragments of ``mma.m16n8k16`` as plain registers, ``movmatrix``, static shared memory of a warp,
16-byte asynchronous copies with zero fill) is reached through inline assembly, so every warp of a program runs on its own
and meets the others only at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _outputs(n):
    return ", ".join(f"${i}" for i in range(n))


@gluon.constexpr_function
def _shared_asm(size):
    return f"{{ .shared .align 16 .b8 kvfold_stage[{size}]; mov.u32 $0, kvfold_stage; }}"


@gluon.constexpr_function
def _load_shared_asm(n, offset):
    vector = {1: "", 2: ".v2", 4: ".v4"}[n]
    return f"ld.shared{vector}.b32 {{{_outputs(n)}}}, [${n}+{offset}];"


@gluon.constexpr_function
def _copy_asm(offset_to, offset_from, guarded):
    copy = f"cp.async.cg.shared.global [$1+{offset_to}], [$2+{offset_from}], 16, $3;"
    if guarded:
        return f"{{ .reg .pred p; setp.ne.s32 p, $4, 0; @p {copy} mov.u32 $0, 0; }}"
    return f"{copy} mov.u32 $0, 0;"


@gluon.constexpr_function
def _mma_asm(bf16):
    kind = "bf16" if bf16 else "f16"
    operands = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13}"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {operands};"


@gluon.jit
def shared_base(lane, SIZE: gl.constexpr):
    """Address of the program's static shared memory; to be called once."""
    asm: gl.constexpr = _shared_asm(SIZE)
    return gl.inline_asm_elementwise(asm, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_shared4(address, OFFSET: gl.constexpr):
    asm: gl.constexpr = _load_shared_asm(4, OFFSET)
    return gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def load_shared(address, OFFSET: gl.constexpr, N: gl.constexpr):
    """N 32-bit words (1, 2, or a multiple of 4) at ``address + OFFSET``, as a tuple."""
    if N == 1:
        asm1: gl.constexpr = _load_shared_asm(1, OFFSET)
        return (gl.inline_asm_elementwise(asm1, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1),)
    elif N == 2:
        asm2: gl.constexpr = _load_shared_asm(2, OFFSET)
        return gl.inline_asm_elementwise(asm2, "=r,=r,r", [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1)
    else:
        words = ()
        for i in gl.static_range(N // 4):
            words = words + _load_shared4(address, OFFSET + 16 * i)
        return words


@gluon.constexpr_function
def _load_matrix_asm(offset, transposed):
    return f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"


@gluon.jit
def load_matrix4(address, OFFSET: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Four 8 x 8 matrices of 16-bit elements: lane 8 m + r gives the address (+ OFFSET) of row r of matrix m, 16 bytes.

    Lane (g, t) gets of each matrix row g, columns 2t, 2t + 1; TRANSPOSED: column g, rows 2t, 2t + 1.
    """
    asm: gl.constexpr = _load_matrix_asm(OFFSET, TRANSPOSED)
    return gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.constexpr_function
def _load_short_asm(offset):
    return f"{{ .reg .b16 h; ld.shared.b16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"


@gluon.jit
def load_shared_short(address, OFFSET: gl.constexpr):
    """16 bits at ``address + OFFSET``, without a sign."""
    asm: gl.constexpr = _load_short_asm(OFFSET)
    return gl.inline_asm_elementwise(asm, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_shared1(address, a):
    """One 32-bit word at ``address``."""
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, a], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_shared2(address, a, b):
    """Two 32-bit words at ``address``."""
    gl.inline_asm_elementwise(
        "st.shared.v2.b32 [$1], {$2,$3}; mov.u32 $0, 0;",
        "=r,r,r,r",
        [address, a, b],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_shared4(address, a, b, c, d):
    """Four fp32 words at ``address``."""
    gl.inline_asm_elementwise(
        "st.shared.v4.f32 [$1], {$2,$3,$4,$5}; mov.u32 $0, 0;",
        "=r,r,f,f,f,f",
        [address, a, b, c, d],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_shared4f(address):
    """Four fp32 words at ``address``."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];",
        "=f,=f,=f,=f,r",
        [address],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy_async(to, source, size, active, TO: gl.constexpr, FROM: gl.constexpr, GUARDED: gl.constexpr):
    """16 bytes from global to shared memory; ``size`` 0 writes zeros and reads nothing; GUARDED lanes need ``active``."""
    asm: gl.constexpr = _copy_asm(TO, FROM, GUARDED)
    if GUARDED:
        gl.inline_asm_elementwise(asm, "=r,r,l,r,r", [to, source, size, active], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise(asm, "=r,r,l,r", [to, source, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_commit(lane):
    gl.inline_asm_elementwise(
        "cp.async.commit_group; mov.u32 $0, 0;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _wait_asm(groups):
    waits = f"wait_group {groups}" if groups else "wait_all"
    return f"cp.async.{waits}; bar.warp.sync 0xffffffff; mov.u32 $0, 0;"


@gluon.jit
def copy_wait(lane, GROUPS: gl.constexpr):
    """Wait until all but the GROUPS newest groups of copies of this warp have arrived, and show them to all its lanes."""
    asm: gl.constexpr = _wait_asm(GROUPS)
    gl.inline_asm_elementwise(asm, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def warp_sync(lane):
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def program_sync(lane):
    """Barrier of all warps of the program."""
    gl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_global4(address, active):
    """16 bytes as four words; zeros in lanes that are not ``active``."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
        " @p ld.global.v4.b32 {$0,$1,$2,$3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r",
        [address, active],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def mma(a0, a1, a2, a3, b0, b1, c, BF16: gl.constexpr):
    """``mma.m16n8k16``: c + A B; operands are pairs of fp16 (or bf16) in 32-bit words, c four fp32 registers.

    Lane (g, t) holds A at rows (g, g + 8, g, g + 8) and columns 2t, 2t + 1 (+ 8 for a2, a3); B at rows 2t, 2t + 1 (+ 8 for
    b1) and column g; c at rows (g, g, g + 8, g + 8) and columns (2t, 2t + 1, 2t, 2t + 1).
    """
    asm: gl.constexpr = _mma_asm(BF16)
    return gl.inline_asm_elementwise(
        asm,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def mma_tf32(a0, a1, a2, a3, b0, b1, c):
    """``mma.m16n8k8`` of fp32 words, which it reads with 10 bits of mantissa: c + A B.

    Lane (g, t) holds A at rows (g, g + 8, g, g + 8) and columns (t, t, t + 4, t + 4); B at rows t and t + 4 and column g.
    """
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def transpose8(x):
    """Transpose an 8 x 8 matrix of 16-bit elements: lane (g, t) gives row g, columns 2t, 2t + 1, and gets them likewise."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def shuffle_xor(x, MASK: gl.constexpr):
    if MASK == 1:
        asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;"
    elif MASK == 2:
        asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;"
    elif MASK == 4:
        asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;"
    elif MASK == 8:
        asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 8, 0x1f, 0xffffffff;"
    else:
        asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def shuffle(x, source):
    """fp32 ``x`` of lane ``source``."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=f,f,r",
        [x, source],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def mul_half2(a, b):
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def product_less_half2(a, b, c):
    """a b - c in one instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 n; neg.f16x2 n, $3; fma.rn.f16x2 $0, $1, $2, n; }",
        "=r,r,r,r",
        [a, b, c],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def add_half2(a, b):
    return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pack_half2(low, high, BF16: gl.constexpr):
    """Two fp32 values rounded into one word."""
    if BF16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpack_half2(x):
    """A word of two fp16 values as two fp32 ones."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
        "=f,=f,r",
        [x],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def low_halves(a, b):
    """Low 16 bits of a and of b."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def high_halves(a, b):
    """High 16 bits of a and of b."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _either_asm(mask):
    return f"lop3.b32 $0, $1, $2, {mask}, 0xA8;"


@gluon.constexpr_function
def _without_asm(mask):
    return f"lop3.b32 $0, $1, $2, {mask}, 0x20;"


@gluon.jit
def either(a, b, MASK: gl.constexpr):
    """(a | b) & MASK in one instruction."""
    asm: gl.constexpr = _either_asm(MASK)
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def without(a, b, MASK: gl.constexpr):
    """a & ~b & MASK in one instruction."""
    asm: gl.constexpr = _without_asm(MASK)
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _select_asm(mask):
    return f"lop3.b32 $0, $1, $2, {mask}, 0xE4;"


@gluon.jit
def select(a, b, MASK: gl.constexpr):
    """(a & MASK) | (b & ~MASK) in one instruction."""
    asm: gl.constexpr = _select_asm(MASK)
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def times(x, y):
    """Product of integers, also where it is a shift that the compiler would give to the units that apply masks."""
    return gl.inline_asm_elementwise("mul.lo.s32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def abs_halves(x):
    """Two fp16 values without their signs."""
    return gl.inline_asm_elementwise("abs.f16x2 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def max_half2(a, b):
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def odd_bytes(x):
    """Bytes 1 and 3 of x, each in the low byte of its half."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def negative_half(x, HALF: gl.constexpr):
    """All ones where the sign bit of a half of x is set, else 0."""
    if HALF == 0:
        asm: gl.constexpr = "prmt.b32 $0, $1, 0, 0x9999;"
    else:
        asm: gl.constexpr = "prmt.b32 $0, $1, 0, 0xBBBB;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def exp2_fast(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def as_int(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_float(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def wait_for_previous(lane):
    """Wait for the kernels before this one, and for what they wrote, if it was launched before their end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents(lane):
    """Allow the next kernel of the stream, if launched for it, to start its programs now."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_pair(address, active, KIND: gl.constexpr):
    """Two adjacent elements as fp32, zeros in lanes that are not ``active``. KIND 0: fp16, 1: bf16, 2: fp32."""
    if KIND == 2:
        return gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.f32 {$0,$1}, [$2]; }",
            "=&f,=&f,l,r",
            [address, active],
            dtype=(gl.float32, gl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        word = gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=&r,l,r",
            [address, active],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        if KIND == 0:
            return unpack_half2(word)
        else:
            return as_float(word << 16), as_float(word & -65536)


@gluon.jit
def prefetch(address):
    """Bring what will be read soon nearer, from addresses int64."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _mma_bytes_asm(signed, levels):
    kinds = f"{'s8' if levels else 'u8'}.{'s8' if signed else 'u8'}"
    operands = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13}"
    return f"mma.sync.aligned.m16n8k32.row.col.s32.{kinds}.s32 {operands};"


@gluon.jit
def mma_bytes(a0, a1, a2, a3, b0, b1, c, SIGNED: gl.constexpr, LEVELS: gl.constexpr = False):
    """``mma.m16n8k32``: c + A B; operands are four bytes in a word, B's with a sign if SIGNED, A's if LEVELS; c four integers.

    Lane (g, t) holds A at rows (g, g + 8, g, g + 8) and columns 4t to 4t + 3 (+ 16 for a2, a3); B at rows 4t to 4t + 3 (+ 16
    for b1) and column g; c as :func:`mma`.
    """
    asm: gl.constexpr = _mma_bytes_asm(SIGNED, LEVELS)
    return gl.inline_asm_elementwise(
        asm,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _either_bytes_asm(which):
    return f"prmt.b32 $0, $1, $2, {which};"


@gluon.jit
def either_bytes(a, b, WHICH: gl.constexpr):
    """Four of the bytes of a (0 to 3) and b (4 to 7), the lowest one in the last digit of WHICH."""
    asm: gl.constexpr = _either_bytes_asm(WHICH)
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sqrt_fast(x):
    return gl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def prefetch_bulk(address, size, active):
    """Ask for ``size`` bytes (a multiple of 16) from an address int64 on to be brought to L2, where every kernel's writes go.

    Lanes that are ``active`` do. sm_90 and later.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [address, size, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fma_half2(a, b, c):
    return gl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def negative_half2(x):
    return gl.inline_asm_elementwise("neg.f16x2 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _fragment_asm(offset):
    return f"ld.global.nc.L1::evict_last.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"


@gluon.jit
def load_fragment(address, OFFSET: gl.constexpr):
    """A lane's four registers of a constant operand. Not pure: a loop is to read it each time, not to keep it."""
    asm: gl.constexpr = _fragment_asm(OFFSET)
    return gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,l", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
    )
