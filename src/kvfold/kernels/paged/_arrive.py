# mypy: ignore-errors
"""Parts of a sequence, put together by the program that writes the last of them."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._softmax import LOG2E, LOWEST

AT_ONCE = gl.constexpr(8)


@gluon.jit
def _is_last(counter, others):
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
def claim(queue, place):
    """The next number, for all threads of the program, by way of shared memory at ``place``."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p atom.relaxed.gpu.global.add.u32 t, [$1], 1; @p st.shared.u32 [$2], t; bar.sync 0; ld.shared.u32 $0, [$2];"
        " bar.sync 0; }",
        "=r,l,r",
        [queue, place],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def arrive(
    counters, query_start, seq_lens, before_ptr, items_ptr, part_out, part_top, part_sum, out, out_token, out_head, sinks,
    seq, head, heads, rows, tokens, column, columns, raw_parts, D: gl.constexpr, NT: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Note that a part of (sequence, KV head, ``8 NT`` query rows) has been written by all of the program; merge them all if no
    other is missing. ``counters``: zeros, and zeros again afterwards.
    """
    LANES: gl.constexpr = D // 4 if D < 128 else 32  # of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = gl.num_warps() * 32 // LANES
    items = gl.load(items_ptr + seq)
    parts = gl.load(items_ptr + seq + 1) - items + raw_parts
    count = gl.load(seq_lens + seq) - gl.load(before_ptr + seq)
    begin = gl.load(query_start + seq)
    counter = counters + (seq * heads + head) * columns + column
    if _is_last(counter.to(gl.int64), parts - 1):
        gl.store(counter, 0)
        channel = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
        first = (items + raw_parts * seq).to(gl.int64) * heads + head
        for start in range(column * (8 * NT), gl.minimum(column * (8 * NT) + 8 * NT, rows), ROWS):
            row = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            token = row % tokens
            live = (row < rows) & (token < count)
            query_head = head * (rows // tokens) + row // tokens
            best = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
            total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
            sums = gl.full([ROWS, D], 0.0, gl.float32, LAYOUT)
            if HAS_SINKS:
                best = gl.load(sinks + query_head, mask=live, other=0.0).to(gl.float32) * LOG2E
                total = total + 1.0
            for i in range(0, parts, AT_ONCE):
                found = ()
                new = best
                for j in gl.static_range(AT_ONCE):
                    inside = live & (i + j < parts)
                    at = (first + (i + j) * heads) * rows + row
                    # what other programs wrote: not from this multiprocessor's cache
                    top = gl.load(part_top + at, mask=inside, other=LOWEST, cache_modifier=".cg")
                    amount = gl.load(part_sum + at, mask=inside, other=0.0, cache_modifier=".cg")
                    x = gl.load(
                        part_out + (at[:, None] * D + channel), mask=inside[:, None], other=0.0, cache_modifier=".cg"
                    )
                    found = found + ((top, amount, x),)
                    new = gl.maximum(new, top)
                weight = gl.exp2(best - new)
                total = total * weight
                sums = sums * weight[:, None]
                for j in gl.static_range(AT_ONCE):
                    weight = gl.exp2(found[j][0] - new)
                    total = gl.fma(weight, found[j][1], total)
                    sums = sums + weight[:, None] * found[j][2]
                best = new
            result = sums / gl.where(total > 0, total, 1.0)[:, None]
            to = (begin + token).to(gl.int64) * out_token + query_head * out_head
            gl.store(out + (to[:, None] + channel), result.to(out.dtype.element_ty), mask=live[:, None])


__all__ = ["arrive"]
