# mypy: ignore-errors
"""Pages of uniform codes as the decode kernel reads them: where one lies in storage and in a warp's stage."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import _fetch, code_bytes, scale_at


@gluon.constexpr_function
def page_bytes(dim, bits, blocks, mean, norm):
    """Bytes of one side of a page: codes, a scale per token, the mean, the norms."""
    return blocks * (code_bytes(dim, bits) + 64) + (2 * dim if mean else 0) + (dim if norm else 0)


@gluon.constexpr_function
def mean_at(dim, bits, blocks):
    return blocks * (code_bytes(dim, bits) + 64)


@gluon.constexpr_function
def norm_at(dim, bits, blocks, mean):
    return blocks * (code_bytes(dim, bits) + 64) + (2 * dim if mean else 0)


@gluon.constexpr_function
def stage_bytes(dim, k_bits, k_mean, k_norm, v_bits, v_mean, blocks, v_words=0):
    """Bytes of a warp's stage: both sides of a page; norms as fp16, or (where codes of values are looked up) the values' mean
    as fp32."""
    sides = page_bytes(dim, k_bits, blocks, k_mean, k_norm) + page_bytes(dim, v_bits, blocks, v_mean, False)
    return sides + (4 if v_words else 2) * dim


@gluon.constexpr_function
def shared_bytes(dim, k_bits, k_mean, k_norm, v_bits, v_mean, tiles, blocks, far, warps, k_words=0, v_words=0):
    """Bytes of shared memory of a program: stages, the Hadamard matrix as an operand, the queries, and (where codes of keys are
    looked up) the matrix in another order; and, later, sums."""
    stage = stage_bytes(dim, k_bits, k_mean, k_norm, v_bits, v_mean, blocks, v_words)
    more = (tiles * dim * 16 if far else 0) + (512 if k_words else 0)
    return max(warps * stage + 512 + more, warps * tiles * dim * 32)


@gluon.jit
def page_place(stored, place, table, steps, number, id, NB: gl.constexpr):
    """Where page ``number`` of a head lies: the fields' addresses, first block and page of keys, and of values."""
    if table is None:
        block = place[0] + number * NB
        return stored[0], block, place[1] + number, stored[1], block, place[2] + number
    else:
        at = stored[0] + id.to(gl.int64) * steps[0]
        k = (at, at + stored[1], at + stored[2], at + stored[3])
        v = (at + stored[4], at + stored[5], at + stored[6], at)
        none = id * 0
        return k, none, none, v, none, none


@gluon.jit
def hidden_block(left, skip, J: gl.constexpr):
    """What scores of a page's block J are added to: 0, or minus infinity, of blocks from number ``left`` on, and of the first
    ``skip``, if it is not None."""
    if skip is None:
        return gl.where(left > J, 0.0, float("-inf"))
    else:
        return gl.where((left > J) & (skip <= J), 0.0, float("-inf"))


@gluon.jit
def fetch_page(
    base, lane, codes, scale, mean, norm, block, page, valid, D: gl.constexpr, BITS: gl.constexpr, MEAN: gl.constexpr,
    NORM: gl.constexpr, NB: gl.constexpr, TO: gl.constexpr, SWAP: gl.constexpr = 0,
    WHAT: gl.constexpr = 0,
):  # fmt: skip
    """One side of a page, whose first block is number ``block``; blocks from number ``valid`` on become zeros. WHAT: 1, codes
    and scales alone; 2, the page's statistics alone.

    SWAP, so that lanes use all banks where codes lie token by token: 1, tokens 4 and 5, and 6 and 7, of each eight change
    places, for lanes that read those of every other token (of 64 bytes, so do halves of tokens 2, 3, 6 and 7; of 8 bytes,
    nothing does); 2, so do halves of tokens 4 to 7, for lanes that read halves.
    """
    CODE: gl.constexpr = code_bytes(D, BITS)
    SCALE: gl.constexpr = TO + scale_at(D, BITS, NB)
    to = base + lane * 16
    at = block.to(gl.int64)
    here = to
    if SWAP == 2:
        here = base + (lane ^ (lane // 8 % 2)) * 16
    elif SWAP and CODE >= 512:
        EACH: gl.constexpr = CODE // 512  # of 16 bytes, of a token
        token = lane // EACH
        piece = lane % EACH
        if EACH == 4:
            piece = piece ^ (token // 2 % 2 * 2)
        here = base + ((token ^ (token // 4 % 2)) * EACH + piece) * 16
    if WHAT != 2:
        _fetch(here, codes + at * CODE + lane * 16, lane, valid, TO, CODE, NB, 32)
        _fetch(to, scale + at * 64 + lane * 16, lane, valid, SCALE, 64, NB, 32)
    at = page.to(gl.int64)
    if MEAN and WHAT != 1:
        _fetch(to, mean + at * (2 * D) + lane * 16, lane, valid, TO + mean_at(D, BITS, NB), 2 * D, 1, 32)
    if NORM and WHAT != 1:
        _fetch(to, norm + at * D + lane * 16, lane, valid, TO + norm_at(D, BITS, NB, MEAN), D, 1, 32)
