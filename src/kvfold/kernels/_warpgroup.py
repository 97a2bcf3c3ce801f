"""Products of a warpgroup's four warps together, whose second operand lies in shared memory (sm_90)."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _sums():
    """Types of a lane's 32 sums."""
    return (gl.float32,) * 32


@gluon.constexpr_function
def _wide_asm():
    """Eight products of a warpgroup's 64 tokens, 16 channels each, with 64 codes; a tile has two parts of 64 channels."""
    sums = ", ".join(f"${i}" for i in range(32))
    lines = []
    for step in range(8):
        words = ", ".join(f"${64 + 4 * step + i}" for i in range(4))
        lines.append(f"add.s64 at, $96, {step // 4 * 512 + step % 4 * 2};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{sums}}}, {{{words}}}, at, 1, 1, 1, 0;")
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    return f"{{ .reg .b64 at; wgmma.fence.sync.aligned; {' '.join(lines)} {end} }}"


@gluon.constexpr_function
def _wide_constraints():
    return ",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["r"] * 32 + ["l"])


@gluon.jit
def mma_wide(sums, words, tile):
    """``sums`` + tokens times 64 codes, all 128 channels: 32 sums of a lane, as :func:`_warp.mma` has those of eight columns of
    16 tokens, eight times; ``words``: operands, four for each 16 channels; ``tile``: address of the codes in shared memory, two
    parts of 64 channels, whose 16 bytes lie in another order by the last three bits of the row."""
    place = ((tile & 0x3FFFF) >> 4).to(gl.int64) + 0x4000004000010000
    asm: gl.constexpr = _wide_asm()
    constraints: gl.constexpr = _wide_constraints()
    return gl.inline_asm_elementwise(
        asm,
        constraints,
        sums + words + (place,),
        dtype=_sums(),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _start_asm():
    """The same products from zero, which go on while the warps do something else."""
    sums = ", ".join(f"${i}" for i in range(32))
    lines = []
    for step in range(8):
        words = ", ".join(f"${32 + 4 * step + i}" for i in range(4))
        lines.append(f"add.s64 at, $64, {step // 4 * 512 + step % 4 * 2};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{sums}}}, {{{words}}}, at, {int(step > 0)}, 1, 1, 0;"
        )
    return f"{{ .reg .b64 at; wgmma.fence.sync.aligned; {' '.join(lines)} wgmma.commit_group.sync.aligned; }}"


@gluon.constexpr_function
def _start_constraints():
    return ",".join(["=&f"] * 32 + ["r"] * 32 + ["l"])


@gluon.constexpr_function
def _wait_asm(pending):
    return f"wgmma.wait_group.sync.aligned {pending};"


@gluon.constexpr_function
def _wait_constraints():
    return ",".join(["=f"] * 32 + [str(i) for i in range(32)])


@gluon.jit
def start_wide(words, tile):
    """Begin the products of :func:`mma_wide` without sums before them; :func:`wait_wide` is to take what is returned, and
    nothing else may."""
    place = ((tile & 0x3FFFF) >> 4).to(gl.int64) + 0x4000004000010000
    asm: gl.constexpr = _start_asm()
    constraints: gl.constexpr = _start_constraints()
    return gl.inline_asm_elementwise(
        asm,
        constraints,
        words + (place,),
        dtype=_sums(),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def wait_wide(sums, PENDING: gl.constexpr):
    """What :func:`start_wide` began, once all but the newest PENDING of the warpgroup's products are there."""
    asm: gl.constexpr = _wait_asm(PENDING)
    constraints: gl.constexpr = _wait_constraints()
    return gl.inline_asm_elementwise(
        asm,
        constraints,
        sums,
        dtype=_sums(),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _integers():
    """Types of a lane's 32 sums."""
    return (gl.int32,) * 32


@gluon.constexpr_function
def _start_bytes_asm(steps, begin):
    """Products of a warpgroup's 64 tokens, 32 codes each, with 64 channels, 16 KB further after four of them."""
    sums = ", ".join(f"${i}" for i in range(32))
    lines = [f"mov.b32 ${i}, {begin};" for i in range(32)] + ["wgmma.fence.sync.aligned;"]
    for step in range(steps):
        words = ", ".join(f"${32 + 4 * step + i}" for i in range(4))
        lines.append(f"add.s64 at, ${32 + 4 * steps}, {step // 4 * 1024 + step % 4 * 2};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {{{sums}}}, {{{words}}}, at, 1;")
    return f"{{ .reg .b64 at; {' '.join(lines)} wgmma.commit_group.sync.aligned; }}"


@gluon.constexpr_function
def _start_bytes_constraints(steps):
    return ",".join(["=&r"] * 32 + ["r"] * (4 * steps) + ["l"])


@gluon.jit
def start_bytes(words, tile, BEGIN: gl.constexpr):
    """Begin products of 64 tokens' bytes, without signs, with 64 channels' numbers, which have signs; sums begin at BEGIN.

    ``words``: operands, four for each 32 codes, as :func:`_warp.mma_bytes` has them. ``tile``: address in shared memory of the
    channels' rows of 128 codes, whose 16 bytes lie in another order by the last three bits of the row; those of the next 128
    codes lie 16 KB further. :func:`wait_bytes` is to take the 32 sums, and nothing else may. It leaves them as
    :func:`_warp.mma_bytes` has those of eight columns of 16 tokens, eight times.
    """
    place = ((tile & 0x3FFFF) >> 4).to(gl.int64) + 0x4000004000010000
    asm: gl.constexpr = _start_bytes_asm(len(words) // 4, BEGIN)
    constraints: gl.constexpr = _start_bytes_constraints(len(words) // 4)
    return gl.inline_asm_elementwise(
        asm,
        constraints,
        words + (place,),
        dtype=_integers(),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _wait_bytes_constraints():
    return ",".join(["=r"] * 32 + [str(i) for i in range(32)])


@gluon.jit
def wait_bytes(sums, PENDING: gl.constexpr):
    """What :func:`start_bytes` began, once all but the newest PENDING of the warpgroup's products are there."""
    asm: gl.constexpr = _wait_asm(PENDING)
    constraints: gl.constexpr = _wait_bytes_constraints()
    return gl.inline_asm_elementwise(
        asm,
        constraints,
        sums,
        dtype=_integers(),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def show_copies(lane):
    """Show what this thread has copied to shared memory to products of warpgroups."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )
