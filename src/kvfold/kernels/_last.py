"""Parts of rows of attention, merged by the program that writes the last of them: no kernel of its own."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels._registers import _zero4
from kvfold.kernels._softmax import LOWEST
from kvfold.kernels._warp import as_float, exp2_fast, load_fresh4

AT_ONCE = gl.constexpr(17)
"""Parts whose loads are under way together: two turns for the 33 of one sequence on 132 multiprocessors."""


@gluon.jit
def is_last(counter, others):
    """Count one more, for all that the program wrote; whether ``others`` were there before. The program's threads meet."""
    # a reduction over the program's threads needs no shared memory, of which static stages leave nothing
    return (
        gl.inline_asm_elementwise(
            "{ .reg .pred p, q; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.ne.u32 q, t, t; bar.sync 0;"
            " @p atom.acq_rel.gpu.global.add.u32 t, [$1], 1; @p setp.eq.u32 q, t, $2;"
            " bar.red.or.pred p, 0, q; selp.u32 $0, 1, 0, p; }",
            "=r,l,r",
            [counter, others],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        == 1
    )


@gluon.jit
def merge_rows(lane, warp, part_out, part_top, part_sum, out, head, parts, rows, D: gl.constexpr):
    """Merge the ``parts`` parts of up to four rows of a KV head, a row by a warp, and write them to ``out`` [heads, rows, 128].

    A lane has four channels. Rows that see no token become zeros. Parts are of other multiprocessors: they are read from L2.
    """
    gl.static_assert(D == 128, "a warp's lanes have four channels of 128")
    W: gl.constexpr = gl.num_warps()
    for i in gl.static_range(4 // W):
        row = warp + W * i
        live = row + lane * 0 < rows
        best = _zero4(lane)[0] + LOWEST
        total = _zero4(lane)[0]
        x = _zero4(lane)
        for start in range(0, parts, AT_ONCE):
            tops = ()
            sums = ()
            words = ()
            new = best
            for j in gl.static_range(AT_ONCE):
                inside = live & (start + j < parts)
                at = (head.to(gl.int64) * parts + (start + j)) * rows + row
                tops = tops + (gl.load(part_top + at, mask=inside, other=LOWEST, cache_modifier=".cg"),)
                sums = sums + (gl.load(part_sum + at, mask=inside, other=0.0, cache_modifier=".cg"),)
                place = part_out.to(gl.int64) + at * (4 * D) + lane * 16
                words = words + (load_fresh4(place, inside.to(gl.int32)),)
            for j in gl.static_range(AT_ONCE):
                new = gl.maximum(new, tops[j])
            f = exp2_fast(best - new)
            best = new
            total = total * f
            x = (x[0] * f, x[1] * f, x[2] * f, x[3] * f)
            for j in gl.static_range(AT_ONCE):
                f = exp2_fast(tops[j] - new)
                total = gl.fma(f, sums[j], total)
                y = words[j]
                x = (
                    gl.fma(f, as_float(y[0]), x[0]), gl.fma(f, as_float(y[1]), x[1]),
                    gl.fma(f, as_float(y[2]), x[2]), gl.fma(f, as_float(y[3]), x[3]),
                )  # fmt: skip
        share = 1.0 / gl.where(total > 0, total, 1.0)
        to = out + ((head.to(gl.int64) * rows + row) * D + lane * 4)
        for e in gl.static_range(4):
            gl.store(to + e, x[e] * share, mask=live)


__all__ = ["is_last", "merge_rows"]
