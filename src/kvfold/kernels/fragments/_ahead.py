# mypy: ignore-errors
"""What :mod:`kvfold.kernels.fragments._decode` reads first, brought nearer while the kernel before it still runs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import code_bytes
from kvfold.kernels.common._warp import prefetch_bulk
from kvfold.kernels.fragments._codes import page_bytes, row_bytes


@gluon.jit
def _ask(at, size, lane, own, address, bytes):
    """One field for one lane."""
    return gl.where(lane == own, address, at), gl.where(lane == own, bytes, size)


@gluon.jit
def _ask_side(
    at, size, lane, side, block, page, blocks, pages, FIRST: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr,
    WIDTH: gl.constexpr, BITS: gl.constexpr, MODE: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr,
    MEAN: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """Fields of one side for lanes FIRST and following; see :func:`kvfold.kernels.fragments._codes.fetch_side`. Of ``blocks``
    blocks, and of norms ``pages`` pages."""
    CODE: gl.constexpr = code_bytes(WIDTH, BITS)
    SIZES: gl.constexpr = row_bytes(KIND, D, MODE, GROUP, RANK)
    EACH: gl.constexpr = page_bytes(KIND, D, RANK, MEAN)
    at, size = _ask(at, size, lane, FIRST, side[0] + block * CODE, blocks * CODE)
    if SIZES[0] > 0:
        at, size = _ask(at, size, lane, FIRST + 1, side[1] + block * SIZES[0], blocks * SIZES[0])
    if SIZES[1] > 0:
        at, size = _ask(at, size, lane, FIRST + 2, side[2] + block * SIZES[1], blocks * SIZES[1] // 16 * 16)
    if EACH > 0:
        at, size = _ask(at, size, lane, FIRST + 3, side[3] + page * EACH, gl.minimum(blocks, 1) * EACH)
    if NORMS > 0:
        at, size = _ask(at, size, lane, FIRST + 4, side[4] + page * D, gl.minimum(pages, NORMS) * D)
    return at, size


@gluon.jit
def windows_at(lane, warp, head, dense, sinks, slots, D: gl.constexpr):
    """Where a head's windows begin, their bytes, and whether this lane brings them: sink and ring, keys and values of each."""
    of_sink = lane % 2 == 0
    size = gl.where(of_sink, sinks, slots) * (2 * D)
    keys = gl.where(of_sink, dense[0], dense[2])
    values = gl.where(of_sink, dense[1], dense[3])
    at = gl.where(lane < 2, keys, values) + head.to(gl.int64) * size
    return at, size, ((lane < 4) & (warp == 0) & (size > 0)).to(gl.int32)


@gluon.jit
def bring_first(
    lane, warp, split, head, packed_len, first_token, capacity, k_pages, v_pages, splits, sinks, slots, dense, k_side, v_side,
    D: gl.constexpr, K: gl.constexpr, K_WIDTH: gl.constexpr, V: gl.constexpr, PAIR: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """A warp's first page of PAGE blocks, or a head's windows, to L2. ``packed_len`` may be older than the kernel before: it
    says what to bring, and nothing else. ``dense``: addresses of sink and ring, keys and values of each."""
    W: gl.constexpr = gl.num_warps()
    if split >= splits:
        at, size, live = windows_at(lane, warp, head, dense, sinks, slots, D)
        prefetch_bulk(at, size, live)
    else:
        blocks = gl.minimum(gl.maximum(packed_len - first_token, 0) // 32, capacity)
        pages = (blocks + PAGE - 1) // PAGE
        lo = (pages.to(gl.int64) * split // splits).to(gl.int32)
        hi = (pages.to(gl.int64) * (split + 1) // splits).to(gl.int32)
        each = (hi - lo + W - 1) // W
        first = lo + warp * each
        live = gl.where(first < hi, gl.minimum(blocks - first * PAGE, PAGE), 0)
        block = (head * capacity + first * PAGE).to(gl.int64)
        at = k_side[0] + lane.to(gl.int64) * 0
        size = lane * 0
        at, size = _ask_side(
            at, size, lane, k_side, block, (head * k_pages + first).to(gl.int64), live, pages - first, 0, K[0], D, K_WIDTH,
            K[1], K[2], K[3], K[9], K[4], PAIR * K[5],
        )  # fmt: skip
        at, size = _ask_side(
            at, size, lane, v_side, block, (head * v_pages + first).to(gl.int64), live, pages - first, 5, V[0], D, D, V[1],
            V[2], V[3], V[9], V[4], V[5],
        )  # fmt: skip
        prefetch_bulk(at, size, ((size > 0) & (live > 0)).to(gl.int32))
