# mypy: ignore-errors
"""Pages in tensor-core order: where they lie in a warp's stage, and how they come there.

=====  =====================  ==============================================  ==================================
KIND   name                   a code u stands for                             beside the codes
=====  =====================  ==============================================  ==================================
0      affine, channels       see :mod:`kvfold.formats.affine`                scales of groups of a token
1      affine, tokens         the same; values alone                          scales of groups of a channel
2      uniform                ``u - o``, times the token's scale; keys alone  a scale per token
=====  =====================  ==============================================  ==================================
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.affine._codes import meta_bytes
from kvfold.kernels.common._codes import _fetch, code_bytes
from kvfold.kernels.common._warp import copy_commit

CHANNELS, TOKENS, UNIFORM = range(3)

# ---- where a side of a page lies in a warp's stage ------------------------------------------------------------------


@gluon.constexpr_function
def row_bytes(kind, dim, mode, group):
    """Bytes per 32 tokens of what lies beside codes: scales and zero-points; sign words."""
    return (64, 0) if kind == 2 else meta_bytes(dim, kind == 0, mode, group)


@gluon.constexpr_function
def places(kind, dim, width, bits, mode, group, mean, norms, blocks):
    """Where (scales, sign words, the mean, norms of ``norms`` pages, what follows) begin in a side of a page."""
    row, words = row_bytes(kind, dim, mode, group)
    at = [blocks * code_bytes(width, bits)]
    for size in (blocks * row, blocks * words, 2 * dim * mean, norms * dim):
        at.append(at[-1] + size)
    return tuple(at)


@gluon.jit
def fetch_side(
    base, lane, codes, meta, aux, mean, norm, block, page, valid, stats, norms, AT: gl.constexpr, KIND: gl.constexpr,
    D: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr, MEAN: gl.constexpr,
    NORMS: gl.constexpr, NB: gl.constexpr, TO: gl.constexpr,
):  # fmt: skip
    """One side of a stage, whose first block is number ``block``; blocks from number ``valid`` on become zeros, the mean of
    page number ``page`` if ``stats`` is 0, and norms of NORMS pages from number ``norms`` on."""
    CODE: gl.constexpr = code_bytes(WIDTH, BITS)
    SIZES: gl.constexpr = row_bytes(KIND, D, MODE, GROUP)
    to = base + lane * 16
    at = block.to(gl.int64)
    _fetch(to, codes + at * CODE + lane * 16, lane, valid, TO, CODE, NB, 32)
    _fetch(to, meta + at * SIZES[0] + lane * 16, lane, valid, TO + AT[0], SIZES[0], NB, 32)
    if SIZES[1] > 0:
        _fetch(to, aux + at * SIZES[1] + lane * 16, lane, valid, TO + AT[1], SIZES[1], NB, 32)
    if MEAN:
        _fetch(to, mean + page.to(gl.int64) * (2 * D) + lane * 16, lane, stats, TO + AT[2], 2 * D, 1, 32)
    if NORMS > 0:
        _fetch(to, norm + page.to(gl.int64) * D + lane * 16, lane, norms, TO + AT[3], D, NORMS, 32)


@gluon.jit
def bring_pages(
    base0, lane, warp, lo, hi, pages, blocks, stored, block0, page0, D: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr,
    V: gl.constexpr, PLACES: gl.constexpr, NB: gl.constexpr, PER: gl.constexpr, PAGES: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Begin to copy a warp's first stage, keys with norms of PAGES pages and then values; APART: norms before both. Sides have
    no sign words. See :func:`kvfold.kernels.fragments._signs.attend_signs`."""
    W: gl.constexpr = gl.num_warps()
    K_AT: gl.constexpr = PLACES[0]
    V_IN: gl.constexpr = PLACES[1]
    V_AT: gl.constexpr = PLACES[2]
    each = (hi - lo + W - 1) // W
    first = lo + warp * each
    count = gl.minimum(hi - first, each)
    base = base0 + warp * PLACES[4]
    start = first * (PER * NB)
    left = gl.where(count > 0, blocks - start, 0)
    norms = gl.where(count > 0, pages - first, 0)
    kc, km, kp, kn = stored[0]
    vc, vm = stored[1]
    if APART:
        at = kn + (page0 + first).to(gl.int64) * D
        _fetch(base + lane * 16, at + lane * 16, lane, norms, K_AT[3], D, PAGES, 32)
        copy_commit(lane)
    fetch_side(
        base, lane, kc, km, kc, kp, kn, block0 + start, page0 + first, left, left, norms, K_AT, K[0], D, WIDTH, K[1], K[2],
        K[3], K[4], 0 if APART else PAGES, NB, 0,
    )  # fmt: skip
    copy_commit(lane)
    fetch_side(
        base, lane, vc, vm, vc, vc, vc, block0 + start, 0, left, 0, 0, V_IN, V[0], D, D, V[1], V[2], V[3], False, 0, NB, V_AT,
    )  # fmt: skip
    copy_commit(lane)
