# mypy: ignore-errors
"""Which pair of codes a token takes (CommVQ's keys): rules of :mod:`kvfold.kernels.commvq._pairs`.

Scores are of a ``<x, z_a> - |z_a|^2 / 2``, of b ``<x, i z_b> - |z_b|^2 / 2``, and of both their sum less ``<z_a, i z_b>``.

- The first stage begins with the two best codes b and the best code a of each of four lanes, which have 16 codes of either
  side.
- Others begin with the best b and the best a (:func:`kvfold.formats.codebook.first_pair`). The better one of these with its
  partner is taken.
- A stage that is chosen again keeps its b, takes the best a for it, and then the best b for that
  (:func:`kvfold.formats.codebook.next_pair`).

Scores are compared in fp16, two at a time, with the number of their word in the three lowest bits: a maximum says which it is
of.
"""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._tables import _shuffled
from kvfold.kernels.common._warp import add_half2, high_halves, load_shared, low_halves, max_half2
from kvfold.kernels.commvq._flips import numbered

LOWEST = gl.constexpr(-67044352)
"""Two smallest numbers of fp16."""


@gluon.jit
def sub_half2(a, b):
    return gl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def swap_halves(x):
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x1032;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def equal_halves(a, b):
    """All ones in halves that are the same number, else 0."""
    return gl.inline_asm_elementwise(
        "set.eq.u32.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def where_bits(mask, a, b):
    """Bits of a where ``mask`` has ones, else of b."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [mask, a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _largest8(x):
    """Of eight words the largest number of each half."""
    # three at a time, as one instruction of sm_90 takes them
    a = max_half2(max_half2(x[0], x[1]), x[2])
    b = max_half2(max_half2(x[3], x[4]), x[5])
    return max_half2(max_half2(a, b), max_half2(x[6], x[7]))


@gluon.jit
def _in_both(x):
    """The larger half, twice."""
    return max_half2(x, swap_halves(x))


@gluon.jit
def _of_four(x, lane):
    """The largest numbers of four lanes."""
    x = max_half2(x, _shuffled(x, lane ^ 1))
    return max_half2(x, _shuffled(x, lane ^ 2))


@gluon.jit
def _numbered(x):
    """Eight words of scores, with their number in the three lowest bits of both halves."""
    out = ()
    for k in gl.static_range(8):
        out = out + (numbered(x[k], k * 0x10001, x[k] * 0 + -458760),)
    return out


@gluon.jit
def _best(own, most, lane, first, flip):
    """The code of a token whose score is ``most``, of four lanes that have ``own`` for the largest of their even and odd codes;
    both are of numbered scores."""
    equal = equal_halves(own, most)
    code = first + (((most & 7) * 2) ^ flip) + gl.where((equal & 0xFFFF) == 0, 2, 1)
    code = gl.where(equal == 0, 0, code)
    code = gl.maximum(code, _shuffled(code, lane ^ 1))
    code = gl.maximum(code, _shuffled(code, lane ^ 2))
    return gl.maximum(code - 1, 0)


@gluon.jit
def _best_of(x, lane, first, flip):
    """The largest of a token's 64 scores, and its code."""
    own = _largest8(_numbered(x))
    most = _of_four(_in_both(own), lane)
    return most, _best(own, most, lane, first, flip)


@gluon.jit
def line_of(line, near, far):
    """A lane's eight words of a line of 64 numbers, which begins at address ``line``."""
    return load_shared(line + near, 0, 4) + load_shared(line + far, 0, 4)


@gluon.jit
def more(x, w, LESS: gl.constexpr = False):
    """Eight words of scores and those of a line, or (LESS) less them."""
    out = ()
    for k in gl.static_range(8):
        out = out + (sub_half2(x[k], w[k]) if LESS else add_half2(x[k], w[k]),)
    return out


@gluon.jit
def _given(x, lines, code, near, far, OF_B: gl.constexpr):
    """Scores of codes a beside code b, or (OF_B) of codes b beside code a, of what lines of both sides say."""
    return more(x, line_of(lines + code * 128, near, far), not OF_B)


@gluon.jit
def _starts(of_b, own, lane, first, flip):
    """Of four lanes the code b that each has ``own`` for a numbered score, and above it that score: four words."""
    low = (equal_halves(of_b, own) & 0xFFFF) != 0
    start = (own & -65536) | (first + (((own & 7) * 2) ^ flip) + gl.where(low, 0, 1))
    quad = lane & -4
    return (
        _shuffled(start, quad), _shuffled(start, quad + 1), _shuffled(start, quad + 2), _shuffled(start, quad + 3)
    )  # fmt: skip


@gluon.jit
def _partners(of_a, starts, lines, lane, near, far, OF_B: gl.constexpr):
    """For two codes the largest score of the other side beside each, and that with the code's own: pairs of halves."""
    p = _largest8(_numbered(_given(of_a, lines, starts[0] & 63, near, far, OF_B)))
    q = _largest8(_numbered(_given(of_a, lines, starts[1] & 63, near, far, OF_B)))
    most = _of_four(max_half2(low_halves(p, q), high_halves(p, q)), lane)
    return most, add_half2(most, high_halves(starts[0], starts[1]))


@gluon.jit
def _from_one_side(of_a, of_b, lines, lane, first, flip, near, far, STARTS: gl.constexpr, OF_B: gl.constexpr):
    """Score of the best pair that holds one of each lane's STARTS best codes b, its a, and the best b for that. OF_B: sides
    are in each other's place."""
    known = _numbered(of_b)
    largest = _largest8(known)
    own = _in_both(largest)
    words = _starts(largest, own, lane, first, flip)
    if STARTS > 1:
        others = ()
        for k in gl.static_range(8):
            others = others + (where_bits(equal_halves(known[k], own), own * 0 + LOWEST, known[k]),)
        largest = _largest8(others)
        words = words + _starts(largest, _in_both(largest), lane, first, flip)
    COUNT: gl.constexpr = len(words) // 2
    most = ()
    sums = ()
    for i in gl.static_range(COUNT):
        p, s = _partners(of_a, (words[2 * i], words[2 * i + 1]), lines, lane, near, far, OF_B)
        most = most + (p,)
        sums = sums + (s,)
    best = sums[0]
    for i in gl.static_range(1, COUNT):
        best = max_half2(best, sums[i])
    best = _in_both(best)
    b = words[0]
    which = most[0]
    low = lane >= 0
    for i in gl.static_range(COUNT):
        equal = equal_halves(sums[i], best)
        here = equal != 0
        left = (equal & 0xFFFF) != 0
        b = gl.where(here, gl.where(left, words[2 * i], words[2 * i + 1]), b)
        which = gl.where(here, most[i], which)
        low = gl.where(here, left, low)
    which = gl.where(low, low_halves(which, which), high_halves(which, which))
    largest = _largest8(_numbered(_given(of_a, lines, b & 63, near, far, OF_B)))
    a = _best(largest, which, lane, first, flip)
    _, b = _best_of(_given(of_b, lines, a, near, far, not OF_B), lane, first, flip)
    return best, a, b


@gluon.jit
def _from_many(of_a, of_b, lines, lane, first, flip, near, far):
    """The pair (a, b) of each token from two codes b and one a of each lane."""
    best, a, b = _from_one_side(of_a, of_b, lines, lane, first, flip, near, far, 2, False)
    other, d, c = _from_one_side(of_b, of_a, lines, lane, first, flip, near, far, 1, True)
    same = equal_halves(max_half2(best, other), best) != 0
    return gl.where(same, a, c), gl.where(same, b, d)


@gluon.jit
def _from_two(of_a, of_b, lines, lane, first, flip, near, far):
    """The pair (a, b) of each token from its best b and from its best a."""
    most_a, a = _best_of(of_a, lane, first, flip)
    most_b, b = _best_of(of_b, lane, first, flip)
    own_a = _largest8(_numbered(_given(of_a, lines, b, near, far, False)))
    own_b = _largest8(_numbered(_given(of_b, lines, a, near, far, True)))
    beside_b = _of_four(_in_both(own_a), lane)
    beside_a = _of_four(_in_both(own_b), lane)
    from_b = add_half2(most_b, beside_b)
    with_b = equal_halves(max_half2(from_b, add_half2(most_a, beside_a)), from_b) != 0
    other = _best(gl.where(with_b, own_a, own_b), gl.where(with_b, beside_b, beside_a), lane, first, flip)
    return gl.where(with_b, other, a), gl.where(with_b, b, other)


@gluon.jit
def _once_more(of_a, of_b, had_a, had_b, lines, common, lane, first, flip, near, far):
    """The best a beside the b that a token has, and the best b beside that."""
    _, a = _best_of(more(of_a, line_of(common + had_a * 128, near, far)), lane, first, flip)
    y = more(of_b, line_of(common + had_b * 128, near, far))
    y = more(y, line_of(lines + had_a * 128, near, far), True)
    y = more(y, line_of(lines + a * 128, near, far))
    _, b = _best_of(y, lane, first, flip)
    return a, b
