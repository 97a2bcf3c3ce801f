"""Rows of tables and sums of them, as vectors that stay in registers from the first row to the last.

Numba's loops go over channels innermost and so keep sums in memory; here rows are innermost. A row is read as vectors, which
LLVM cuts to what the processor has.
"""
# mypy: ignore-errors

from llvmlite import ir
from numba import types

from kvfold.kernels.cpu._numbers import F32, I32, I64, TILE, has_halves, intrinsic

I8, F16 = ir.IntType(8), ir.HalfType()

BYTE, HALF, SINGLE = range(3)
"""How numbers of a table are stored; halves only where the processor converts them itself."""

STORED = {BYTE: (I8, 1), HALF: (F16, 2), SINGLE: (F32, 4)}
"""Type and bytes of a number."""


@intrinsic
def copy_rows(typing, kind, vector, codes, groups, last, table, between, scale, out):
    """Write a row of every group's table, scaled: float32 [groups, vector].

    Parameters
    ----------
    kind : int64
        :data:`HALF` or :data:`SINGLE`.
    vector, groups : int64
        At least 1.
    codes, table, out : int64
        Addresses: of uint8 [groups], of the first group's table [codes, vector], and of what is written.
    last : int64
        The largest code that there is; larger ones are taken as this one.
    between : int64
        Numbers from one group's table to the next.
    scale : float32
    """

    def build(context, builder, signature, args):
        kind, vector, codes, groups, last, table, between, scale, out = args

        def cut(stored, width, first):
            def one(index, _):
                at = _row(builder, stored, codes, index, last, table, vector, between, first)
                to = _after(builder, out, builder.add(builder.mul(index, vector), first), 4)
                _store(builder, _scaled(builder, _floats(builder, stored, width, at), scale), to)
                return []

            _loop(builder, groups, [], one)

        _cuts(builder, kind, vector, _floating((16, 8, 4, 2, 1), (8, 4, 1)), cut)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, types.float32, types.int64), build


@intrinsic
def add_rows(typing, kind, vector, codes, stages, last, table, between, scale, out):
    """Write the sum of a row of every stage's table, scaled: float32 [vector]. As :func:`copy_rows`, a code per stage."""

    def build(context, builder, signature, args):
        kind, vector, codes, stages, last, table, between, scale, out = args

        def cut(stored, width, first):
            def one(index, sums):
                at = _row(builder, stored, codes, index, last, table, vector, between, first)
                return [builder.fadd(sums[0], _floats(builder, stored, width, at))]

            (found,) = _loop(builder, stages, [ir.Constant(ir.VectorType(F32, width), None)], one)
            _store(builder, _scaled(builder, found, scale), _after(builder, out, first, 4))

        _cuts(builder, kind, vector, _floating((32, 16, 8, 4, 1), (16, 4, 1)), cut)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, types.float32, types.int64), build


@intrinsic
def deal_rows(typing, joined, groups, vector, out):
    """Transpose float32 [groups, vector] at address ``joined`` into ``out``: channels i, i + groups, ... are a group's."""

    def build(context, builder, signature, args):
        joined, groups, vector, out = args

        def cut(rows, width, first):
            """Of ``rows`` groups ``width`` numbers each, from number ``first`` on."""

            def some(index, _):
                group = builder.mul(index, _number(rows))
                block = []
                for i in range(rows):
                    number = builder.add(builder.mul(builder.add(group, _number(i)), vector), first)
                    block.append(_load(builder, SINGLE, width, _after(builder, joined, number, 4)))
                for i, x in enumerate(_transposed(builder, block)):
                    number = builder.add(builder.mul(builder.add(first, _number(i)), groups), group)
                    _store(builder, x, _after(builder, out, number, 4))
                return []

            _loop(builder, builder.sdiv(groups, _number(rows)), [], some)

        whole = [builder.icmp_signed("==", builder.srem(groups, _number(rows)), _number(0)) for rows in (4, 2)]
        rows = builder.select(whole[0], _number(4), builder.select(whole[1], _number(2), _number(1)))
        _cuts(builder, rows, vector, {4: (4, 1), 2: (4, 1), 1: (4, 1)}, cut)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


@intrinsic
def find_pairs(typing, words, stages, bits, dim, rows):
    """Where the centres of a unit's codes lie in a table [stages, levels, dim].

    Parameters
    ----------
    words : int64
        Address of a stream of 32 codes ``a + levels b`` for every stage; see :func:`kvfold.formats.codebook.pack_codes`.
    stages, bits, dim : int64
        ``bits`` of a code: an even number, 2 to 16.
    rows : int64
        Address of int32 [stages, 2, 32]: how many numbers of the table lie before a token's a and b.
    """

    def build(context, builder, signature, args):
        words, stages, bits, dim, rows = args
        eight = ir.VectorType(I32, 8)

        def every(x):
            return _spread(builder, builder.trunc(x, I32), 8)

        for width in range(2, 17, 2):  # 8 codes take ``width`` bytes
            levels = 1 << width // 2
            pick = [min(t * width // 8 + i, width - 1) for t in range(8) for i in range(4)]  # four bytes for each
            shift = ir.Constant(eight, [t * width % 8 for t in range(8)])
            low, half = (ir.Constant(eight, [x] * 8) for x in (levels - 1, width // 2))

            def one(stage, _, width=width, levels=levels, pick=pick, shift=shift, low=low, half=half):
                first = every(builder.mul(builder.mul(stage, _number(levels)), dim))
                for i in range(4):
                    place = builder.add(builder.mul(stage, _number(4)), _number(i))
                    data = _load(builder, BYTE, width, _after(builder, words, place, width))
                    code = builder.lshr(builder.bitcast(_picked(builder, data, data, pick), eight), shift)
                    parts = builder.and_(code, low), builder.and_(builder.lshr(code, half), low)
                    for part, x in enumerate(parts):
                        to = builder.add(builder.mul(stage, _number(2 * TILE)), _number(part * TILE + 8 * i))
                        _store(builder, builder.add(first, builder.mul(x, every(dim))), _after(builder, rows, to, 4))
                return []

            with builder.if_then(builder.icmp_signed("==", bits, _number(width))):
                _loop(builder, stages, [], one)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), build


@intrinsic
def add_pairs(typing, kind, pairs, rows, count, table, steps, out):
    """Write a sum of complex vectors ``a + i b``, real parts and then imaginary ones: float32 [2, pairs].

    Parameters
    ----------
    kind : int64
        :data:`BYTE`: numbers are those of :class:`kvfold.formats.codebook.KeySteps`.
    pairs : int64
        Complex numbers of a vector, at least 1.
    rows : int64
        Address of int32 [count, 2, 32], of which the first of 32 is taken: how many of the table's numbers lie before a and
        before b.
    count : int64
        Vectors to sum, at least 1.
    table : int64
        Address; a vector's imaginary parts follow its real ones.
    steps : int64
        Address of steps of each group of vectors, float32 [groups, pairs]; not read for other kinds.
    out : int64
        Address of what is written.
    """

    def build(context, builder, signature, args):
        kind, pairs, rows, count, table, steps, out = args

        def cut(stored, width, first):
            wide = ir.VectorType(F32, width)
            imaginary = builder.add(first, pairs)

            def parts(index):
                before = builder.load(builder.gep(builder.inttoptr(rows, ir.PointerType(I32)), [index]))
                row = _after(builder, table, builder.sext(before, I64), STORED[stored][1])
                places = [_after(builder, row, part, STORED[stored][1]) for part in (first, imaginary)]
                return [(_load if stored == BYTE else _floats)(builder, stored, width, at) for at in places]

            def one(index, sums):
                first_row = builder.mul(index, _number(2 * TILE))
                (a, ai), (b, bi) = parts(first_row), parts(builder.add(first_row, _number(TILE)))
                if stored == BYTE:
                    terms = builder.sub(a, bi), builder.add(ai, b)
                    return [builder.add(x, term) for x, term in zip(sums, terms, strict=True)]
                terms = builder.fsub(a, bi), builder.fadd(ai, b)
                return [builder.fadd(x, term) for x, term in zip(sums, terms, strict=True)]

            if stored == BYTE:
                fours = builder.sdiv(builder.sub(count, _number(1)), _number(4))
                rest = builder.srem(builder.sub(count, _number(1)), _number(4))

                def group(number, begin, together, sums):
                    """Numbers are bytes with a sign once the middle is off, whatever their sums are before."""
                    fixed = isinstance(together, int)
                    some = _number(together) if fixed else together
                    middle = builder.mul(builder.udiv(_number(255), builder.mul(some, _number(2))), some)
                    less = _spread(builder, builder.trunc(builder.neg(middle), I8), width)
                    numbers = [ir.Constant(less.type, None), less]
                    for i in range(together if fixed else 0):
                        numbers = one(builder.add(begin, _number(i)), numbers)
                    if not fixed:
                        numbers = _loop(builder, some, numbers, lambda i, x: one(builder.add(begin, i), x))
                    at = builder.add(builder.mul(number, pairs), first)
                    step = _load(builder, SINGLE, width, _after(builder, steps, at, 4))
                    terms = (builder.fmul(builder.sitofp(x, wide), step, ("contract",)) for x in numbers)
                    return [builder.fadd(x, term, ("contract",)) for x, term in zip(sums, terms, strict=True)]

                def four(index, sums):
                    before = builder.add(_number(1), builder.add(rest, builder.mul(index, _number(4))))
                    return group(builder.add(builder.add(index, _number(1)), some_rest), before, 4, sums)

                sums = group(_number(0), _number(0), 1, [ir.Constant(wide, None)] * 2)
                has_rest = builder.icmp_signed(">", rest, _number(0))
                some_rest = builder.zext(has_rest, I64)
                sums = _if(builder, has_rest, sums, lambda x: group(_number(1), _number(1), rest, x))
                has_fours = builder.icmp_signed(">", fours, _number(0))
                sums = _if(builder, has_fours, sums, lambda x: _loop(builder, fours, x, four))
            else:
                sums = _loop(builder, count, [ir.Constant(wide, None)] * 2, one)
            for x, part in zip(sums, (first, imaginary), strict=True):
                _store(builder, x, _after(builder, out, part, 4))

        _cuts(builder, kind, pairs, {BYTE: (64, 32, 8, 1), **_floating((32, 8, 1), (32, 8, 1))}, cut)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), build


def _number(x: int) -> ir.Constant:
    return ir.Constant(I64, x)


def _after(builder, at, numbers, size):
    """Address of what lies behind some numbers."""
    return builder.add(at, builder.mul(numbers, _number(size)))


def _load(builder, stored, width, at):
    kind, size = STORED[stored]
    return builder.load(builder.inttoptr(at, ir.PointerType(ir.VectorType(kind, width))), align=size)


def _floats(builder, stored, width, at):
    x = _load(builder, stored, width, at)
    return builder.fpext(x, ir.VectorType(F32, width)) if stored == HALF else x


def _store(builder, x, at):
    builder.store(x, builder.inttoptr(at, ir.PointerType(x.type)), align=4)


def _spread(builder, x, width):
    """A vector of one number."""
    vector = ir.Constant(ir.VectorType(x.type, width), ir.Undefined)
    for lane in range(width):
        vector = builder.insert_element(vector, x, ir.Constant(I32, lane))
    return vector


def _scaled(builder, x, scale):
    return builder.fmul(x, _spread(builder, scale, x.type.count))


def _row(builder, stored, codes, index, last, table, vector, between, first):
    """Address of number ``first`` of the row that byte ``index`` of ``codes`` names in table ``index``."""
    code = builder.load(builder.inttoptr(builder.add(codes, index), ir.PointerType(I8)))
    code = builder.zext(code, I64)
    code = builder.select(builder.icmp_unsigned("<", code, last), code, last)
    before = builder.add(builder.mul(index, between), builder.mul(code, vector))
    return _after(builder, table, builder.add(before, first), STORED[stored][1])


def _transposed(builder, rows):
    """Columns of one, two or four vectors of one length."""
    if len(rows) == 4:
        upper, lower = _transposed(builder, rows[:2]), _transposed(builder, rows[2:])
        return [_picked(builder, a, b, range(4)) for a, b in zip(upper, lower, strict=True)]
    width = rows[0].type.count
    return [_picked(builder, rows[0], rows[-1], range(i, len(rows) * width, width)) for i in range(width)]


def _picked(builder, a, b, which):
    """Some numbers of two vectors, one after the other."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(which)), list(which)))


def _if(builder, condition, values, change):
    """``change(values)`` under a condition, ``values`` otherwise."""
    before = builder.block
    with builder.if_then(condition):
        changed, inside = change(values), builder.block
    found = [builder.phi(x.type) for x in values]
    for phi, x, y in zip(found, values, changed, strict=True):
        phi.add_incoming(x, before)
        phi.add_incoming(y, inside)
    return found


def _loop(builder, count, first, step):
    """``x = step(i, x)`` for i from 0 to ``count - 1``, at least once, from ``first`` on."""
    before, loop, after = builder.block, builder.append_basic_block("each"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, state = builder.phi(I64), [builder.phi(x.type) for x in first]
    found = [builder.add(index, _number(1)), *step(index, state)]
    for phi, begin, again in zip((index, *state), (_number(0), *first), found, strict=True):
        phi.add_incoming(begin, before)
        phi.add_incoming(again, builder.block)
    builder.cbranch(builder.icmp_signed("<", found[0], count), loop, after)
    builder.position_at_end(after)
    return found[1:]


def _floating(halves, singles):
    """Widths of vectors by the kind of numbers that are not bytes."""
    return {HALF: halves, SINGLE: singles} if has_halves() else {SINGLE: singles}


def _cuts(builder, kind, length, widths, body):
    """``body(kind, width, first)`` for vectors that cover ``length`` numbers; the last may overlap the one before.

    ``widths``: by what ``kind`` may be, from the largest to 1.
    """
    for stored, allowed in widths.items():
        with builder.if_then(builder.icmp_signed("==", kind, _number(stored))):
            for larger, width in zip((1 << 30, *allowed), allowed, strict=False):
                most = builder.icmp_signed("<", length, _number(larger))
                with builder.if_then(builder.and_(builder.icmp_signed(">=", length, _number(width)), most)):
                    _cut(builder, stored, width, length, body)


def _cut(builder, stored, width, length, body):
    def one(index, _):
        first, most = builder.mul(index, _number(width)), builder.sub(length, _number(width))
        body(stored, width, builder.select(builder.icmp_signed("<", first, most), first, most))
        return []

    count = builder.sdiv(builder.add(length, _number(width - 1)), _number(width))
    _loop(builder, count, [], one)
