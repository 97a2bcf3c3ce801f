"""Encoding on the GPU for affine groups with a low-rank part of what they miss (GEAR): :class:`kvfold.formats.LowRank`.

One launch quantizes a page, in registers, stores its groups in plain order, and finds the basis of what is missed by the
format's own iteration, in float32. Codes in the order of tensor cores are written by
:func:`kvfold.kernels.fold.encode.encode_pages`.
"""

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Fields, Format, LowRank
from kvfold.formats.lowrank import _start
from kvfold.kernels.affine.encode import TOLERANCE, _difference
from kvfold.kernels.common.step import or_any
from kvfold.kernels.fold.encode import encode_pages
from kvfold.kernels.fold.encode import unsupported as inner_unsupported
from kvfold.kernels.fragments._encode_rank import _rank_kernel

RANKS = range(1, 9)
DIMS = (32, 64, 128)


def unsupported(fmt: Format) -> str | None:
    """Why kernels cannot encode this format's prompts; None if they can."""
    if not isinstance(fmt, LowRank) or not isinstance(fmt.inner, AffineGroups) or fmt.inner.mode != "asym":
        return f"{fmt.kind} storage"
    for name, value, allowed in (
        ("rank", fmt.rank, RANKS),
        ("head_dim", fmt.head_dim, DIMS),
        ("page", fmt.page, (128,)),
        ("group", fmt.inner.group, (32,)),
    ):
        if value not in allowed:
            return f"{name}={value}; allowed: {', '.join(map(str, allowed))}"
    return None if is_plain(fmt) else inner_unsupported(fmt.inner)


def is_plain(fmt: LowRank) -> bool:
    """Whether groups are stored with what they miss; else :func:`kvfold.kernels.fold.encode.encode_pages` stores them."""
    return fmt.inner.operand == "plain"


def encode_rank(
    new: torch.Tensor,
    fields: Fields,
    fmt: LowRank,
    start: int,
    stop: int,
    first_block: int = 0,
    ring: torch.Tensor | None = None,
    old: int = 0,
    rows: torch.Tensor | None = None,
) -> None:
    """Encode whole blocks of tokens into packed storage, and the bases of pages that begin among them.

    Parameters are those of :func:`kvfold.kernels.fold.encode.encode_pages`.
    """
    if not is_plain(fmt):
        encode_pages(new, fields, fmt.inner, start, stop, first_block, ring, old, None, rows)
    encode_missed(new, fields, fmt, start, stop, first_block, ring, old, rows)


def encode_missed(
    new: torch.Tensor,
    fields: Fields,
    fmt: LowRank,
    start: int,
    stop: int,
    first_block: int = 0,
    ring: torch.Tensor | None = None,
    old: int = 0,
    rows: torch.Tensor | None = None,
) -> None:
    """The low-rank part, and groups in plain order: see :func:`encode_rank`."""
    if why := unsupported(fmt):
        raise ValueError(f"encode: {why}")
    inner = fmt.inner
    assert isinstance(inner, AffineGroups)
    begun = -(-start // fmt.page)
    seen = fmt.seen // fmt.block * fmt.block
    whole = stop if begun * fmt.page >= stop else max(stop, (-(-stop // fmt.page) - 1) * fmt.page + seen)
    if whole > old + new.shape[2]:
        raise ValueError(f"tokens up to {whole} are read: those up to {old + new.shape[2]} are given")
    if start == stop or not new.shape[0]:
        return
    if new.stride(-1) != 1:
        new = new.contiguous()
    batch, heads, _, dim = new.shape
    basis, row = fields["basis"], fields["row"]
    codes, meta = fields["codes"].view(torch.uint8), fields["meta"]
    for name, field in (("basis", basis), ("row", row), ("codes", codes), ("meta", meta)):
        if not field.is_contiguous():
            raise ValueError(f"{name}: packed storage must be contiguous, its strides are {field.stride()}")
    waiting = new if ring is None or not ring.numel() else ring
    first = start // fmt.page
    _rank_kernel[(-(-stop // fmt.page) - first, heads, batch)](
        waiting,
        waiting.stride(0),
        waiting.stride(1),
        new,
        *new.stride()[:3],
        or_any(rows, fields["codes"]),
        basis,
        row,
        codes,
        meta,
        _spare(dim, fmt.rank, fmt.seed, new.device),
        first * fmt.page,
        first - first_block * fmt.block // fmt.page,
        basis.shape[2],
        first * fmt.page - first_block * fmt.block,
        row.shape[2] * fmt.block,
        heads,
        start,
        stop,
        max(waiting.shape[2], 1),
        old,
        PAGE=fmt.page,
        SEEN=seen,
        D=dim,
        G=inner.group,
        AXIS=0 if inner.axis == "token" else 1,
        BITS=inner.bits_per_code,
        RANK=fmt.rank,
        LOOPS=fmt.loops,
        PICKED=rows is not None,
        PLAIN=is_plain(fmt),
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=False,
    )


@lasting(64)
def _spare(dim: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """The iteration's first columns, float32 [dim, rank]."""
    return _start(dim, rank, seed, device).float().contiguous()


@lasting(64)
def self_test(fmt: LowRank, device: torch.device) -> str | None:
    """Run the kernels once as they are compiled on this device, and compare with the format's own encoding.

    Returns
    -------
    str or None
        What went wrong; None if nothing did. Waits for the device, once per process and format.
    """
    draw = torch.Generator().manual_seed(0)
    count = 2 * fmt.page
    x = torch.randn(1, 2, count, fmt.head_dim, generator=draw, dtype=torch.float32, device="cpu")
    x = (x * torch.exp(x[:, :, :1]) + 3 * x[:, :, 1:2]).half().to(device)
    fields = fmt.allocate(1, 2, count // fmt.block, device)
    encode_rank(x, fields, fmt, 0, count)
    some = fmt.take({n: t.cpu() for n, t in fields.items()}, count // fmt.block)
    if (error := _difference(fmt, some, x.float().cpu())) > TOLERANCE:
        return f"{fmt.operand}s encoded on this device differ from the format's by {error:.2g} (relative RMS)"
    return None
