# mypy: ignore-errors
"""Tuples of registers in Gluon code: what a thread holds of an operand or an accumulator."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._warp import load_pair, load_shared

ONES = gl.constexpr(0x3C003C00)  # two fp16 ones


@gluon.constexpr_function
def _kind(dtype):
    """Element types that queries come in."""
    return {"fp16": 0, "bf16": 1, "fp32": 2}[dtype.name]


@gluon.constexpr_function
def _item(pair, i):
    return pair[i]


@gluon.jit
def _two(x, INDEX: gl.constexpr):
    """Registers 2 INDEX and 2 INDEX + 1: an operand's pair."""
    return x[2 * INDEX], x[2 * INDEX + 1]


@gluon.jit
def _query(q, INDEX: gl.constexpr, FAR: gl.constexpr):
    """A query's operand pair: from registers, or (FAR) from shared memory, where ``q`` is the lane's address."""
    if FAR:
        return load_shared(q, 256 * INDEX, 2)
    else:
        return q[2 * INDEX], q[2 * INDEX + 1]


@gluon.jit
def _unit_half2(lane, EXPONENT: gl.constexpr):
    """Two fp16 2^EXPONENT."""
    return lane * 0 + ((15 + EXPONENT) << 10) * 0x10001


@gluon.jit
def _zero4(lane):
    z = (lane * 0).to(gl.float32)
    return (z, z, z, z)


@gluon.jit
def _replace(x, I: gl.constexpr, value):
    out = ()
    for i in gl.static_range(len(x)):
        if i == I:
            out = out + (value,)
        else:
            out = out + (x[i],)
    return out


@gluon.jit
def _every(x, FIRST: gl.constexpr, STEP: gl.constexpr):
    """Every STEP-th register from number FIRST on."""
    out = ()
    for i in gl.static_range(FIRST, len(x), STEP):
        out = out + (x[i],)
    return out


@gluon.jit
def _axpy4(low, high, x, y, FIRST: gl.constexpr):
    """y + (low, low, high, high) x."""
    if FIRST:
        return (low * x[0], low * x[1], high * x[2], high * x[3])
    else:
        return (
            gl.fma(low, x[0], y[0]),
            gl.fma(low, x[1], y[1]),
            gl.fma(high, x[2], y[2]),
            gl.fma(high, x[3], y[3]),
        )


@gluon.jit
def ask_queries(q_ptr, t, row0, row, rows, varlen, D: gl.constexpr):
    """Channels 2t, 2t + 1, 2t + 8, ... of a query row, fp32; for ``varlen`` see :func:`query_at`.

    To be asked for before a kernel's first pages are: loads come back in order, and would wait for their bytes."""
    KIND: gl.constexpr = _kind(q_ptr.dtype.element_ty)
    SIZE: gl.constexpr = 4 if KIND == 2 else 2
    address, live = query_at(q_ptr, row0, row, rows, 2 * t, varlen, D, SIZE)
    raw = ()
    for i in gl.static_range(D // 8):
        raw = raw + load_pair(address + 8 * i * SIZE, live, KIND)
    return raw


@gluon.jit
def query_at(q_ptr, row0, row, rows, first, varlen, D: gl.constexpr, SIZE: gl.constexpr):
    """Address of channel ``first`` of a query row, and whether there is one. Rows lie one after the other from ``row0`` on.

    ``varlen``: None; or elements from a token to the next (its heads lie together), tokens that rows are counted in, and how
    many there are: then ``row0`` counts elements.
    """
    if varlen is None:
        return q_ptr.to(gl.int64) + ((row0 + row) * D + first) * SIZE, (row < rows).to(gl.int32)
    else:
        token = row % varlen[1]
        at = row0 + token.to(gl.int64) * varlen[0] + (row // varlen[1] * D + first)
        return q_ptr.to(gl.int64) + at * SIZE, ((row < rows) & (token < varlen[2])).to(gl.int32)
