"""Encoding on the GPU for formats of vectors before RoPE: residual codes (VQLLM, GSRQ), codes of groups (TaSQ), levels with
outliers (KVQuant), additive and binary codes (CommVQ); and tiles in plain order (KVarN, values of NOVA-KV).

A launch reads the model's keys or values where they lie, un-rotates keys, and writes what the format's own encoding does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from kvfold.arithmetic import lasting
from kvfold.formats import Fields, Format, GroupCodes, Lookup, Outliers, Projected
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.formats.grouped import GroupBook
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.residual import ResidualCodes
from kvfold.formats.uniform import FITS
from kvfold.kernels.common._encode_nearest import SLOTS
from kvfold.kernels.common.encode_source import ORDERS, Source, misfit
from kvfold.kernels.commvq.encode import bits_test, encode_bits, encode_pairs, no_bits, no_pairs
from kvfold.kernels.searched._encode import group_kernel, outliers_kernel, search_kernel
from kvfold.kernels.searched.tiles import PIECE, encode_tiles, is_tile, mapped, no_map, no_tiles

POWERS = (16, 32, 64, 128, 256)
SEARCH = {"T": 32, "PART": 128, "num_warps": 4}
"""Tokens of a program of :func:`search_kernel`, codes that it compares at a time, and its warps."""
GROUPS = {"T": 64, "PART": 64, "num_warps": 4, "maxnreg": 128}
"""The same of :func:`group_kernel`."""
OUTLIERS = {"channel": {"num_warps": 2}, "range": {"num_warps": 4}}
"""Warps of a program of :func:`outliers_kernel`, of keys and of values."""


def why_not(fmt: Format, device: torch.device) -> str | None:
    """Why the GPU cannot encode this format; None if it can. Kernels are run once on the device, and compared."""
    if device.type != "cuda":
        return f"device {device.type}: encoding kernels run on cuda"
    if why := unsupported(fmt):
        return why
    return self_test(fmt, device) if torch.cuda.is_available() else None


TOLERANCE = 1e-2
"""Of the error of what :func:`self_test` stores, relative to that of the format's own encoding."""
NEAR = 0.1
"""Noise around vectors of the format's own codebook, of their deviation."""
NEAR_TOLERANCE = 0.05
"""The same of those: little is missed, and a search among few codes (CommVQ) misses some of them."""


@lasting(64)
def self_test(fmt: Format, device: torch.device) -> str | None:
    """Run the kernel once as it is compiled on this device; what went wrong, or None. Waits for the device."""
    if isinstance(fmt, BinaryCodes):  # what bits stand for is the method's
        return bits_test(fmt, device)
    draw = torch.Generator().manual_seed(0)
    heads = heads_of(fmt)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32, device="cpu").to(device)

    shape = 1, heads, 8 * fmt.block, fmt.head_dim
    cases = [(random(*shape), TOLERANCE, "")]
    own = _own(fmt, fmt.allocate(1, heads, 8, device), draw, random(*shape))
    if own is not None:
        cases.append((own, NEAR_TOLERANCE, " near their own codebook"))
    for x, tolerance, where in cases:
        fields = fmt.allocate(1, heads, 8, device)
        encode(fmt, Source(x, fields, 0))
        score = {}
        if (channels := _channels(fmt, device)) is not None:
            score = {"score": (x - channels.center.unsqueeze(-2)).abs() - channels.spread.unsqueeze(-2)}
        missed, expected = (float((fmt.decode(f) - x).square().sum()) for f in (fields, fmt.encode(x, **score)))
        if not abs(missed - expected) <= tolerance * expected:
            return f"{fmt.operand}s{where} encoded on this device miss {missed:.4g}, those of the format {expected:.4g}"
    return None


def _own(fmt: Format, fields: Fields, draw: torch.Generator, noise: torch.Tensor) -> torch.Tensor | None:
    """Vectors such as the format's codebook was learned from: float32 like ``noise``, [1, heads, tokens, head_dim]; None if it
    has none. What keys of a model share may be a hundred times what they differ by, which random numbers do not show.
    """
    if (channels := _channels(fmt, noise.device)) is not None:
        return channels.center.unsqueeze(-2) + channels.spread.unsqueeze(-2) * noise / 2
    inner = fmt.inner if isinstance(fmt, Projected) else fmt
    if not isinstance(inner, AdditiveCodes | ResidualCodes | GroupCodes):
        return None
    for stored in fields.values():
        if stored.is_floating_point():
            stored.copy_(torch.rand(stored.shape, generator=draw, device="cpu") + 0.5)
        else:
            bounds = torch.iinfo(stored.dtype)
            stored.copy_(torch.randint(bounds.min, bounds.max + 1, stored.shape, generator=draw, device="cpu"))
    x = fmt.decode(fields)
    return x + NEAR * x.std(-2, keepdim=True) * noise


def _channels(fmt: Format, device: torch.device) -> ChannelScales | None:
    """Centres and ranges of channels, where levels lie within such."""
    if isinstance(fmt, Outliers) and isinstance(fmt.inner, Lookup) and fmt.inner.channels is not None:
        return fmt.inner.channels.on(device)
    return None


def heads_of(fmt: Format) -> int:
    """KV heads of what a format has tables of; 2 where it has none."""
    if isinstance(fmt, Outliers) and isinstance(fmt.inner, Lookup) and fmt.inner.channels is not None:
        return len(fmt.inner.channels.center)
    if isinstance(fmt, AdditiveCodes) and fmt.codebook is not None:
        return fmt.codebook.heads
    if isinstance(fmt, Projected):
        return heads_of(fmt.inner)
    if isinstance(fmt, GroupCodes) and fmt.book is not None:
        return len(fmt.book.codes)
    return 2


def unsupported(fmt: Format) -> str | None:
    """Why kernels cannot encode this format; None if they can."""
    if isinstance(fmt, ResidualCodes):
        return _no_search(fmt)
    if isinstance(fmt, GroupCodes):
        return _no_groups(fmt)
    if isinstance(fmt, Outliers):
        return _no_outliers(fmt)
    if isinstance(fmt, AdditiveCodes):
        return no_pairs(fmt)
    if isinstance(fmt, BinaryCodes):
        return no_bits(fmt)
    if isinstance(fmt, Projected):
        return unsupported(fmt.inner) or no_map(fmt)
    if is_tile(fmt):
        return no_tiles(fmt)
    return f"{fmt.kind} storage"


def _no_search(fmt: ResidualCodes) -> str | None:
    dtype = torch.float16 if fmt.book is None else fmt.book.codes.dtype
    return misfit(
        ("head_dim", fmt.head_dim, POWERS),
        ("vector", fmt.vector, (16, 32, 64, 128)),
        ("codes", fmt.codes, POWERS),
        ("fit", fmt.fit, ("rms", *FITS)),
        ("codes of", str(dtype).removeprefix("torch."), ("float16",)),
    )


def _no_groups(fmt: GroupCodes) -> str | None:
    return misfit(
        ("head_dim", fmt.head_dim, POWERS[1:]),
        ("vector", fmt.vector, (2, 4, 8)),
        ("codes", fmt.codes, POWERS),
    )


def _no_outliers(fmt: Outliers) -> str | None:
    inner = fmt.inner
    if not isinstance(inner, Lookup):
        return f"outliers beside {inner.kind} storage"
    wanted = ("channel", "token") if fmt.axis == "token" else ("range", "channel")
    return misfit(
        ("head_dim", fmt.head_dim, (64, 128, 256)),
        ("block", fmt.block, (32,)),
        ("bits", inner.bits_per_code, (1, 2, 3, 4)),
        ("scaling", inner.scaling, wanted[:1]),
    )


def encode(fmt: Format, source: Source) -> None:
    """Encode whole blocks.

    Raises
    ------
    ValueError
        If :func:`unsupported` has something against the format.
    """
    if why := unsupported(fmt):
        raise ValueError(f"encode: {why}")
    for name in fmt.fields():
        if not source.fields[name].is_contiguous():
            raise ValueError(f"{name}: packed storage must be contiguous")
    if source.x.shape[0] and source.x.shape[2]:
        encode_tiles(fmt, source) if is_tile(fmt) else _LAUNCH[type(fmt)](fmt, source)


def _encode_residual(fmt: ResidualCodes, source: Source) -> None:
    assert fmt.book is not None
    batch, heads, tokens, _ = source.x.shape
    fields, part = source.fields, SEARCH["T"]
    book = fmt.book.on(source.x.device).codes
    search_kernel[(triton.cdiv(tokens, part), heads, batch)](
        *source.arguments(),
        (-2 * book).contiguous(),
        book.float().square().sum(-1),
        fields["codes"],
        fields["rms"],
        tokens,
        source.first_block * fmt.block,
        fields["codes"].shape[2] * fmt.block,
        heads,
        VECTOR=fmt.vector,
        CODES=fmt.codes,
        STAGES=fmt.stages,
        STRIDED=fmt.strided,
        FIT=fmt.fit,
        **source.constants(),
        **SEARCH | {"PART": min(SEARCH["PART"], fmt.codes)},
        num_stages=1,
    )


def _encode_groups(fmt: GroupCodes, source: Source) -> None:
    assert fmt.book is not None
    batch, heads, tokens, _ = source.x.shape
    fields, part = source.fields, GROUPS["T"]
    book = fmt.book.on(source.x.device)
    group_kernel[(triton.cdiv(tokens, part), heads, batch)](
        *source.arguments(),
        *group_tables(book),
        book.mean if fmt.centred else fields["rms"],
        fields["codes"],
        fields["rms"],
        tokens,
        source.first_block * fmt.block,
        fields["codes"].shape[2] * fmt.block,
        heads,
        VECTOR=fmt.vector,
        CODES=fmt.codes,
        STRIDED=fmt.strided,
        FIT=fmt.fit,
        CENTRED=fmt.centred,
        **source.constants(),
        **GROUPS | {"PART": min(GROUPS["PART"], fmt.codes)},
        num_stages=1,
    )


def _encode_projected(fmt: Projected, source: Source) -> None:
    """What is mapped is kept for a piece of tokens at a time."""
    x = source.x
    batch, heads, tokens, dim = x.shape
    piece = min(tokens, PIECE // fmt.block * fmt.block)
    room = torch.empty(batch, heads, piece, dim, dtype=torch.float32, device=x.device)
    for start in range(0, tokens, piece):
        part = x[:, :, start : start + piece]
        mapped(fmt, part, room)
        out = room[:, :, : part.shape[2]]
        encode(fmt.inner, replace(source, x=out, first_block=source.first_block + start // fmt.block))


def group_tables(book: GroupBook) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`group_kernel` reads of a codebook.

    A distance is ``|c L|^2 / 2 - x L L' c'``: codes take the metric, vectors do not. Of the numbers that meet a vector the
    first are the codes for its fp16 part, then again for what that misses, then what the codes' own fp16 part misses.

    Returns
    -------
    table : Tensor, fp16 [num_kv_heads, groups, codes, SLOTS]
    halves : Tensor, float32 [num_kv_heads, groups, codes]
    book : Tensor [num_kv_heads, groups, codes, vector]
        The codes themselves.
    sizes : Tensor, float32 [num_kv_heads, groups, codes]
    """
    codes = book.codes.float()
    under = codes if book.metric is None else codes @ book.metric
    turned = -(under if book.metric is None else under @ book.metric.mT)
    high = turned.half()
    low = (turned - high.float()).half()
    table = high.new_zeros(*codes.shape[:-1], SLOTS.value)
    for at, some in enumerate((high, high, low)):
        first = at * codes.shape[-1]
        if first < SLOTS.value:
            table[..., first : first + codes.shape[-1]] = some
    return table, under.square().sum(-1) / 2, book.codes.contiguous(), codes.square().sum(-1)


@lasting(64)
def _borders(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    known = torch.tensor(levels, dtype=torch.float32, device=device)
    return (known[1:] + known[:-1]) / 2


def _encode_outliers(fmt: Outliers, source: Source) -> None:
    inner = fmt.inner
    assert isinstance(inner, Lookup)
    batch, heads, tokens, _ = source.x.shape
    fields, device = source.fields, source.x.device
    channels = None if inner.channels is None else inner.channels.on(device)
    borders = _borders(inner.levels, device)
    outliers_kernel[(tokens // fmt.block, heads, batch)](
        *source.arguments(),
        borders if channels is None else channels.center.contiguous(),
        borders if channels is None else channels.spread.contiguous(),
        borders,
        fields["codes"],
        fields.get("scale", fields["outlier"]),
        fields["outlier"],
        fields["where"],
        source.first_block,
        fields["codes"].shape[2],
        heads,
        BITS=inner.bits_per_code,
        ORDER=ORDERS[fmt.operand],
        COUNT=fmt.count,
        KEYS=inner.scaling == "channel",
        **source.constants(),
        **OUTLIERS[inner.scaling],
        num_stages=1,
        enable_fp_fusion=False,
    )


_LAUNCH: dict[type, Callable[[Any, Source], None]] = {
    ResidualCodes: _encode_residual,
    GroupCodes: _encode_groups,
    Projected: _encode_projected,
    Outliers: _encode_outliers,
    AdditiveCodes: encode_pairs,
    BinaryCodes: encode_bits,
}
