# mypy: ignore-errors
"""Raw tokens of a server's sequences, by the programs that read its pages."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._softmax import LIFT, _finish, _nothing
from kvfold.kernels.common._warp import program_sync
from kvfold.kernels.common._windows import attend_raw, value_row
from kvfold.kernels.paged._arrive import arrive, claim
from kvfold.kernels.paged.work import RAW_TOKENS

PART = gl.constexpr(RAW_TOKENS)


@gluon.jit
def _of_head(window, head, SIZE: gl.constexpr):
    """Address of a head's share, and elements from a block, and from a token, to the next."""
    return window[0].to(gl.int64) + head.to(gl.int64) * window[3] * SIZE, window[1], window[2]


@gluon.jit
def _slot(window, table, sink, packed, stop, index, SIZE: gl.constexpr, BLOCK: gl.constexpr):
    """Of raw token ``index``: address, whether there is one, position. ``window``: see :func:`_of_head`."""
    position = gl.where(index < sink, index, packed + (index - sink))
    valid = position < stop
    block = gl.load(table + position // BLOCK, mask=valid, other=0).to(gl.int64)
    return window[0] + (block * window[1] + (position % BLOCK) * window[2]) * SIZE, valid, position


@gluon.jit
def attend_windows(
    base, base0, lane, warp, q_ptr, q_token, lengths, windows, pieces, seqs, parts, heads, rows, tokens, columns,
    part_out, part_top, part_sum, result, to_log2,
    D: gl.constexpr, NT: gl.constexpr, BF16: gl.constexpr, BLOCK: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Write those of the ``parts`` of every (sequence, KV head, ``8 NT`` query rows) that fall to this program. Programs that
    have a piece less than others begin; what is left goes to those that are done first, part by part.

    ``base``: the program's shared memory. ``lengths``: pointers to first tokens of the step, lengths after it and before it,
    the sink's and the packed ones' ends, and where pieces begin. ``windows``: of keys and of values the address, and elements
    from a block, a token and a head to the next; the table, and elements from a sequence to the next. ``pieces``: how many of
    them programs have. ``result``: what :func:`kvfold.kernels.paged._arrive.arrive` needs to merge; after its counters lies
    that of the parts that were taken.
    """
    CT: gl.constexpr = D // 16
    W: gl.constexpr = gl.num_warps()
    tasks = seqs * heads * columns * parts
    programs = gl.num_programs(0)
    rest = pieces % programs
    idle = programs - rest
    queue = (result[0] + seqs * heads * columns).to(gl.int64)
    task = gl.program_id(0) - rest
    if task < 0:
        if tasks > idle:
            task = idle + claim(queue, base)
        else:
            task = tasks
    while task < tasks:
        part = task % parts
        seq = task // parts // (heads * columns)
        head = task // parts // columns % heads
        column0 = task // parts % columns * (8 * NT)
        after = gl.load(lengths[1] + seq)
        before = gl.load(lengths[2] + seq)
        sink = gl.load(lengths[3] + seq)
        packed = gl.load(lengths[4] + seq)
        row0 = gl.load(lengths[0] + seq).to(gl.int64) * q_token + head * (rows // tokens) * D
        slot0 = (gl.load(lengths[5] + seq) + parts * seq + part).to(gl.int64) * heads + head
        stop = gl.minimum(after, before + tokens)
        varlen = (q_token, tokens, after - before)
        table = windows[2] + seq.to(gl.int64) * windows[3]
        keys = _of_head(windows[0], head, 2)
        values = _of_head(windows[1], head, 2)
        top, out, side = _nothing(lane, CT, NT)
        raw = sink + gl.maximum(stop - packed, 0)
        each = gl.maximum((raw + parts * PART - 1) // (parts * PART), 1) * PART
        for tile in range((gl.minimum(raw - part * each, each) + 16 * W - 1) // (16 * W)):
            index = part * each + (tile * W + warp) * 16
            k = (
                _slot(keys, table, sink, packed, stop, index + lane // 4, 2, BLOCK),
                _slot(keys, table, sink, packed, stop, index + lane // 4 + 8, 2, BLOCK),
            )
            v = ()
            for i in gl.static_range(4):
                v = v + (_slot(values, table, sink, packed, stop, index + value_row(lane % 4, i), 2, BLOCK),)
            top, out, side = attend_raw(
                lane,
                k,
                v,
                q_ptr,
                row0,
                column0,
                rows,
                varlen,
                before,
                tokens,
                to_log2,
                top,
                out,
                side,
                D,
                NT,
                BF16,
                LIFT,
            )
        _finish(
            base0, lane, warp, top, out, side, part_out, part_top, part_sum, slot0, column0, rows, True, D, NT, LIFT
        )
        program_sync(lane)
        arrive(
            result[0], lengths[0], lengths[1], lengths[2], lengths[5], part_out, part_top, part_sum, result[1], result[2],
            result[3], result[4], seq, head, heads, rows, tokens, task // parts % columns, columns, parts, D, NT, HAS_SINKS,
        )  # fmt: skip
        if tasks > idle:
            task = idle + claim(queue, base)
        else:
            task = tasks
    if (tasks > idle) & (task == tasks + programs - 1):  # nobody asks after this program
        gl.store(result[0] + seqs * heads * columns, 0)


__all__ = ["attend_windows"]
