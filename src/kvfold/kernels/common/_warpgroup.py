# mypy: ignore-errors
"""Products of a warpgroup's four warps together, whose second operand lies in shared memory (sm_90)."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _sums():
    """Types of a lane's 32 sums."""
    return (gl.float32,) * 32


@gluon.constexpr_function
def _start_asm():
    """Eight products of a warpgroup's 64 tokens, 16 channels each, with 64 codes; a tile has two parts of 64 channels."""
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
    """Begin products of tokens with 64 codes, all 128 channels, which go on while the warps do something else: 32 sums of a
    lane, as :func:`_warp.mma` has those of eight columns of 16 tokens, eight times. :func:`wait_wide` is to take what is
    returned, and nothing else may.

    ``words``: operands, four for each 16 channels; ``tile``: address of the codes in shared memory, two parts of 64 channels,
    whose 16 bytes lie in another order by the last three bits of the row.
    """
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
def _pairs_asm():
    """Sixteen products of a warpgroup's 64 tokens, 16 channels each, with 64 codes, and with as many multiplied by i."""
    lines = []
    for side in range(2):
        sums = ", ".join(f"${16 * side + i}" for i in range(16))
        for step in range(8):
            words = ", ".join(f"${32 + 4 * step + i}" for i in range(4))
            part = (step // 4 + side) % 2
            sign = -1 if side and step < 4 else 1
            lines.append(f"add.s64 at, $64, {part * 512 + step % 4 * 2};")
            lines.append(f"wgmma.mma_async.sync.aligned.m64n64k16.f16.f16.f16 {{{sums}}}, {{{words}}},")
            lines.append(f"at, {int(step > 0)}, {sign}, 1, 0;")
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    return f"{{ .reg .b64 at; wgmma.fence.sync.aligned; {' '.join(lines)} {end} }}"


@gluon.constexpr_function
def _pairs_constraints():
    return ",".join(["=&r"] * 32 + ["r"] * 32 + ["l"])


@gluon.jit
def products_of_pairs(words, tile):
    """Products of tokens x with 64 codes z, and with i z, summed in fp16: 16 words of a lane of each, two sums side by side as
    :func:`start_wide` has them; ``words`` and ``tile`` as there. Parts of a tile are real and imaginary channels."""
    place = ((tile & 0x3FFFF) >> 4).to(gl.int64) + 0x4000004000010000
    asm: gl.constexpr = _pairs_asm()
    constraints: gl.constexpr = _pairs_constraints()
    return gl.inline_asm_elementwise(
        asm,
        constraints,
        words + (place,),
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


@gluon.jit
def begin_barrier(address, count, active):
    """Make a barrier of shared memory, 8 bytes, which ``count`` arrivals open; by one ``active`` thread, before the program's
    own barrier."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p mbarrier.init.shared::cta.b64 [$1], $2;"
        " @p fence.mbarrier_init.release.cluster; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [address, count, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy_all(to, source, size, barrier, active):
    """Begin to copy ``size`` bytes, a multiple of 16, to shared memory, by one ``active`` thread; the barrier opens when they
    are there."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], $3;"
        " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$4]; mov.u32 $0, 0; }",
        "=r,r,l,r,r,r",
        [to, source, size, barrier, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_at(barrier, parity, active):
    """Wait until a barrier has opened for the time of that ``parity``; ``active`` threads do."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @!p bra open; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
        " @!p bra wait; open: mov.u32 $0, 0; }",
        "=r,r,r,r",
        [barrier, parity, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def arrive_at(barrier, active):
    """Arrive at a barrier; ``active`` threads do."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.u32 $0, 0; }",
        "=r,r,r",
        [barrier, active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
