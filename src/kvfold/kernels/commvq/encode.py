"""Encoding on the GPU for CommVQ: pairs of codes of keys (:class:`kvfold.formats.codebook.AdditiveCodes`), and flips of bits of
values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kvfold.formats.binary import BinaryCodes, BitGains, bit_gains
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, Search, choices, turning_points
from kvfold.kernels.common._encode_groups import INTERPRETED
from kvfold.kernels.common.encode_source import ORDERS, Source, misfit
from kvfold.kernels.commvq._bits import value_bits_kernel
from kvfold.kernels.commvq._encode import (
    bits_kernel,
    flips_kernel,
    gains_kernel,
    pairs_kernel,
    tables_kernel,
    units_kernel,
    values_kernel,
)
from kvfold.kernels.commvq._flips import flip_kernel
from kvfold.kernels.commvq._pairs import pairs_search_kernel, stage_bytes
from kvfold.kernels.device import device_info

PAIRS = {"T": 64, "num_warps": 4}
"""Tokens of a program of :func:`pairs_kernel`, and its warps."""
UNITS = {"T": 64, "num_warps": 4, "maxnreg": 255}
"""The same of :func:`units_kernel`."""
QUADS = {"WIDE": True, "num_warps": 16, "maxnreg": 128}
"""Whether four warps of :func:`pairs_search_kernel` multiply together (:func:`is_wide`), and its warps."""
VALUES = {"T": 32, "CODES": 64, "num_stages": 2}
"""Tokens of a program of :func:`values_kernel`, and codes of a warp."""
FLIPS = {"T": 2, "num_warps": 1}
GAINS = {"T": 32, "CODES": 64, "num_stages": 2}
"""The same of :func:`gains_kernel`."""
FLIP = {64: 64, 128: 96, 256: 168}
"""Registers of :func:`flip_kernel` by codes, for as many as it has."""
MOST = 32
"""Stages whose codes of a program's tokens lie in shared memory beside two stages' tables."""
TABLES = {"num_warps": 4, "num_stages": 1}
"""How :func:`tables_kernel` is launched."""
TOGETHER: dict[str, Any] = {"codes": (64, 128, 256), "EVERY": 1, "num_warps": 1}
"""Codes whose bits one kernel chooses and flips; flips after which that asks whether there are more, and its warps."""
CHOSEN = {64: 96, 128: 128, 256: 168}
"""Registers of :func:`value_bits_kernel` by codes."""
PIECE = 8192
"""Tokens whose bits exist as numbers at a time."""


def no_pairs(fmt: AdditiveCodes) -> str | None:
    """Why the kernel cannot find these codes; None if it can."""
    return misfit(("head_dim", fmt.head_dim, (32, 64, 128)), ("levels", fmt.levels, (16, 32, 64)))


def encode_pairs(fmt: AdditiveCodes, source: Source) -> None:
    """Encode whole blocks of keys.

    Raises
    ------
    ValueError
        If :func:`no_pairs` has something against the format.
    """
    if why := no_pairs(fmt):
        raise ValueError(f"encode: {why}")
    assert fmt.codebook is not None
    device = source.x.device
    tables = fmt.codebook.on(device)
    if is_quick(fmt):
        _search_quads(fmt, source, pair_tables(tables, is_wide(device)))
        return
    search, shift = shifted(tables.search())
    batch, heads, tokens, _ = source.x.shape
    part = PAIRS["T"]
    grid = (triton.cdiv(tokens, part), heads, batch)
    programs = grid[0] * heads * batch
    codes = source.fields["codes"]
    pairs_kernel[grid](
        *source.arguments(),
        tables.metric.float().contiguous(),
        shift,
        search.halves.half().contiguous(),
        search.squares.contiguous(),
        search.cross.contiguous(),
        torch.empty(programs * fmt.levels * part, dtype=torch.float32, device=device),
        torch.empty(programs * fmt.stages * 2 * part, dtype=torch.uint8, device=device),
        codes,
        source.fields["rms"],
        tokens,
        source.first_block * fmt.block,
        codes.shape[2] * fmt.block,
        heads,
        N=fmt.levels,
        STAGES=fmt.stages,
        **order(fmt),
        BITS=fmt.code_bits,
        METRIC=True,
        **source.constants(),
        **PAIRS,
        num_stages=1,
    )


def order(fmt: AdditiveCodes) -> dict[str, int]:
    """Constants of kernels that choose stages one by one: how many choices, and where they turn back
    (:func:`kvfold.formats.codebook.choices`). As many choices as stages: all pairs are compared in each."""
    middle, low, late = turning_points(fmt.stages)
    if fmt.passes == 0:
        middle = low = fmt.stages
    return {"COUNT": len(choices(fmt.stages, fmt.passes)), "MIDDLE": middle, "LOW": low, "LATE": late}


def is_quick(fmt: AdditiveCodes) -> bool:
    """Whether the kernel serves that compares few of the pairs."""
    book = fmt.codebook
    whole = book is not None and book.rotary == fmt.head_dim
    return whole and fmt.levels == 64 and fmt.head_dim == 128 and fmt.stages <= MOST


def shifted(search: Search) -> tuple[Search, torch.Tensor]:
    """The same search for vectors less what the first stage's centres have in common.

    Returns
    -------
    search : Search
    shift : Tensor, float32 [num_kv_heads, head_dim]
        What is to be taken off a vector: the sum of the first stage's mean ``z_a`` and mean ``i z_b``, under the metric.
    """
    first = search.halves[:, :1].unflatten(2, (2, -1))  # [heads, 1, 2, N, d]
    mean = first.mean(3, keepdim=True)
    left = first - mean
    halves = torch.cat((left.flatten(2, 3), search.halves[:, 1:]), 1)
    squares = torch.cat((left.square().sum(-1).flatten(2), search.squares[:, 1:]), 1)
    cross = torch.cat((2 * left[:, :, 0] @ left[:, :, 1].mT, search.cross[:, 1:]), 1)
    return Search(halves, squares, cross), mean.sum((1, 2, 3))


@dataclass(frozen=True)
class PairTables:
    """What :func:`pairs_search_kernel` and :func:`units_kernel` read of a codebook; made for each call, for it is larger.

    Attributes
    ----------
    stages : Tensor, float16 [num_kv_heads, stages, bytes / 2]
        As :mod:`kvfold.kernels.commvq._pairs` has them, less the first stage's means.
    shift, near_shift : Tensor, float32 and float16 [num_kv_heads, head_dim]
        What is to be taken off a key (:func:`shifted`).
    high, low : Tensor, float16 [num_kv_heads, head_dim, head_dim]
        The metric divided by ``scale``, and what that misses.
    scale : Tensor, float32 [num_kv_heads]
        Powers of two.
    """

    stages: torch.Tensor
    shift: torch.Tensor
    near_shift: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor
    scale: torch.Tensor


def pair_tables(book: KeyCodebook, wide: bool) -> PairTables:
    """Tables of a codebook of 64 vectors and 128 channels; ``wide``: for products of warpgroups, too."""
    heads, stages, _, dim = book.centres.shape
    size, device = stage_bytes(wide), book.centres.device

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(heads, *shape, dtype=dtype, device=device)

    made = PairTables(
        empty(stages, size // 2),
        empty(dim, dtype=torch.float32),
        empty(dim),
        empty(dim, dim),
        empty(dim, dim),
        empty(dtype=torch.float32),
    )
    tables_kernel[(stages + 1, heads)](
        book.centres.contiguous(),
        book.metric.contiguous(),
        *vars(made).values(),
        STAGES=stages,
        BYTES=size,
        WIDE=wide,
        **TABLES,
    )
    return made


def is_wide(device: torch.device) -> bool:
    """Whether four warps multiply together on this device."""
    return bool(QUADS["WIDE"]) and (device.type != "cuda" or device_info(device).has_wgmma)


def constants(fmt: AdditiveCodes, wide: bool | None = None) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants of :func:`pairs_search_kernel`, and how it is launched; ``wide``: None, or in place of what is the default."""
    fixed: dict[str, Any] = {"STAGES": fmt.stages} | order(fmt)
    fixed["WIDE"] = QUADS["WIDE"] if wide is None else wide
    return fixed, {name: QUADS[name] for name in ("num_warps", "maxnreg")}


def under_metric(source: Source, tables: PairTables) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys under the metric, divided by their root mean squares, less the shift; and those.

    Returns
    -------
    units : Tensor, float16 [batch, num_kv_heads, tokens, d]
    sizes : Tensor, float32 [batch, num_kv_heads, tokens]
    """
    batch, heads, tokens, _ = source.x.shape
    units = torch.empty(source.x.shape, dtype=torch.float16, device=source.x.device)
    sizes = torch.empty(batch, heads, tokens, dtype=torch.float32, device=source.x.device)
    units_kernel[(triton.cdiv(tokens, UNITS["T"]), heads, batch)](
        *source.arguments(), tables.high, tables.low, tables.scale, tables.shift, units, sizes, tokens, heads,
        **source.constants(), **UNITS, num_stages=1,
    )  # fmt: skip
    return units, sizes


def _search_quads(fmt: AdditiveCodes, source: Source, tables: PairTables) -> None:
    batch, heads, tokens, _ = source.x.shape
    units, sizes = under_metric(source, tables)
    codes = source.fields["codes"]
    fixed, options = constants(fmt, is_wide(source.x.device))
    pairs_search_kernel[(triton.cdiv(tokens, 16 * QUADS["num_warps"]), heads, batch)](
        units,
        sizes,
        tables.near_shift,
        tables.stages,
        codes if source.rows is None else source.rows,
        codes,
        source.fields["rms"],
        tokens,
        source.first_block * fmt.block,
        codes.shape[2] * fmt.block,
        heads,
        PICKED=source.rows is not None,
        **fixed,
        **options,
    )


def flip(bits: torch.Tensor, slope: torch.Tensor, gram: torch.Tensor, flips: int) -> None:
    """Flip bits of values in place, as :meth:`kvfold.methods.commvq.ValueCodebook.bits` does.

    Parameters
    ----------
    bits, slope : Tensor, float32 [heads, tokens, codes], contiguous
        0 or 1; products of what is missed with the codes.
    gram : Tensor, float32 [heads, codes, codes]
        Products of codes.
    flips : int
        At most so many of each token.
    """
    heads, tokens, codes = bits.shape
    square = gram.diagonal(dim1=-1, dim2=-2).contiguous()
    if not tokens:
        return
    flips_kernel[(triton.cdiv(tokens, FLIPS["T"]), heads)](
        bits,
        slope,
        gram.contiguous(),
        square,
        1e-6 * square.amax(-1),
        tokens,
        flips,
        codes,
        **FLIPS,
        enable_fp_fusion=False,
    )


def no_bits(fmt: BinaryCodes) -> str | None:
    """Why the kernels cannot find these bits; None if they can."""
    return misfit(
        ("codes", fmt.codes, (32, 64, 128, 256, 512)),
        ("one code for heads", fmt.joint, (1,)),
        ("block", fmt.block, (32,)),
    )


def encode_bits(fmt: BinaryCodes, source: Source) -> None:
    """Encode whole blocks of values; ``source.tables``: :class:`kvfold.methods.commvq.ValueCodebook`, and how many flips.

    Raises
    ------
    ValueError
        If :func:`no_bits` has something against the format.
    """
    if why := no_bits(fmt):
        raise ValueError(f"encode: {why}")
    book, flips = source.tables
    batch, _, tokens, _ = source.x.shape
    if not book.is_network and flips_by_lanes(fmt.codes):
        gains = book.gains()
        if is_together(fmt):
            choose_and_flip(fmt, gains, flips, source)
            return
        for first in range(0, tokens, PIECE):
            values = source.x[:, :, first : first + PIECE]
            flip_and_pack(fmt, first_gains(values, gains), gains, flips, source, first // fmt.block)
        return
    tables = None if book.is_network else book.level_tables()
    for first in range(0, tokens, PIECE):
        values = source.x[:, :, first : first + PIECE]
        count = values.shape[2]
        if tables is None:
            values = values.float().clamp(-1e18, 1e18)
            bits, slope, gram = book.start(values.transpose(0, 1).flatten(1, 2), flips > 0)
        else:
            (bits, slope), gram = first_bits(values, tables, flips > 0), tables[-1]
        if flips:
            bits, slope = bits.contiguous(), slope.contiguous()
            flip(bits, slope, gram, flips)
        _store(fmt, bits, source, first // fmt.block, batch, count)


def flips_by_lanes(codes: int) -> bool:
    """Whether :func:`flip_kernel` flips so many bits; Triton's interpreter does not run it."""
    return codes in FLIP and not INTERPRETED.value


def is_together(fmt: BinaryCodes) -> bool:
    """Whether one kernel chooses bits and flips them."""
    return fmt.codes in TOGETHER["codes"] and fmt.head_dim % 32 == 0


KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


def choose_and_flip(fmt: BinaryCodes, tables: BitGains, flips: int, source: Source) -> None:
    """Encode whole blocks of values, whose first bits are by levels, by one kernel."""
    batch, heads, tokens, dim = source.x.shape
    x, stored, warps = source.x, source.fields["bits"], TOGETHER["num_warps"]
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s * x.element_size() % 16 for s in x.stride()[:3]):
        x = x.contiguous()  # lanes read 16 bytes
    value_bits_kernel[(triton.cdiv(tokens, 16 * warps), heads, batch)](
        x,
        *x.stride()[:3],
        tables.offset,
        tables.scale,
        tables.vectors,
        tables.operands,
        tables.rows,
        tables.least,
        stored if source.rows is None else source.rows,
        stored.view(torch.int32),
        tokens,
        flips,
        source.first_block,
        stored.shape[2],
        heads,
        D=dim,
        C=fmt.codes,
        KIND=KINDS[x.dtype],
        EVERY=TOGETHER["EVERY"],
        ORDER=ORDERS[fmt.operand],
        PICKED=source.rows is not None,
        num_warps=warps,
        maxnreg=CHOSEN[fmt.codes],
    )


def gains_options(codes: int) -> dict[str, int]:
    """How :func:`gains_kernel` is launched."""
    return {"num_warps": max(1, codes // GAINS["CODES"]), "num_stages": GAINS["num_stages"]}


def first_gains(values: torch.Tensor, tables: BitGains) -> torch.Tensor:
    """Bits that flips begin with, and what to flip each gains.

    Parameters
    ----------
    values : Tensor [batch, num_kv_heads, tokens, head_dim]

    Returns
    -------
    Tensor, float32 [num_kv_heads, batch, tokens, codes]
        Half the fall of the squared error, times ``tables.size``; lowest bits are the values' bits.
    """
    batch, heads, tokens, dim = values.shape
    codes = tables.half.shape[-1]
    x = values if values.stride(-1) == 1 else values.contiguous()
    gains = torch.empty(heads, batch, tokens, codes, dtype=torch.float32, device=x.device)
    bits = torch.empty(gains.shape, dtype=torch.uint8, device=x.device)
    if tokens:
        gains_kernel[(triton.cdiv(tokens, GAINS["T"]), heads, batch)](
            x,
            *x.stride()[:3],
            tables.offset,
            tables.scale,
            tables.matrix,
            tables.shift,
            tables.top,
            tables.place,
            tables.along,
            tables.gram,
            tables.half,
            bits,
            gains,
            tokens,
            heads,
            batch,
            D=dim,
            C=codes,
            T=GAINS["T"],
            **gains_options(codes),
        )
    return gains


def flip_and_pack(
    fmt: BinaryCodes, gains: torch.Tensor, tables: BitGains, flips: int, source: Source, block: int
) -> None:
    """Flip bits of values up to ``flips`` times each while that gains anything, and pack them.

    Parameters
    ----------
    gains : Tensor, float32 [heads, batch, tokens, codes]
        Of :func:`first_gains`.
    block : int
        Number of the source's block where the first token goes.
    """
    heads, batch, tokens, codes = gains.shape
    stored = source.fields["bits"]
    flip_kernel[(tokens // 8, heads, batch)](
        gains,
        tables.rows,
        tables.least,
        stored if source.rows is None else source.rows,
        stored.view(torch.int32),
        tokens,
        flips,
        source.first_block + block,
        stored.shape[2],
        heads,
        batch,
        C=codes,
        ORDER=ORDERS[fmt.operand],
        PICKED=source.rows is not None,
        num_warps=1,
        maxnreg=FLIP[codes],
    )


def values_options(codes: int) -> dict[str, int]:
    """How :func:`values_kernel` is launched."""
    return {"num_warps": max(1, codes // VALUES["CODES"]), "num_stages": VALUES["num_stages"]}


def first_bits(
    values: torch.Tensor, tables: tuple[torch.Tensor, ...], flips: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :meth:`kvfold.methods.commvq.ValueCodebook.start` says of values, by a kernel.

    Parameters
    ----------
    values : Tensor [batch, num_kv_heads, tokens, head_dim]
    tables : tuple of Tensor
        Seven, of levels: :class:`kvfold.formats.binary.BitSearch`.

    Returns
    -------
    bits, slope : Tensor, float32 [num_kv_heads, batch * tokens, codes]
        ``slope`` is ``bits`` without ``flips``.
    """
    batch, heads, tokens, dim = values.shape
    codes = tables[0].shape[-1]
    x = values if values.stride(-1) == 1 else values.contiguous()
    bits = torch.empty(heads, batch * tokens, codes, dtype=torch.float32, device=x.device)
    slope = torch.empty_like(bits) if flips else bits
    values_kernel[(triton.cdiv(tokens, VALUES["T"]), heads, batch)](
        x,
        *x.stride()[:3],
        *tables,
        bits,
        slope,
        tokens,
        heads,
        batch,
        D=dim,
        C=codes,
        T=VALUES["T"],
        FLIPS=flips,
        **values_options(codes),
    )
    return bits, slope


def _store(fmt: BinaryCodes, bits: torch.Tensor, source: Source, block: int, batch: int, tokens: int) -> None:
    """Pack bits [heads, batch * tokens, codes] to block number ``block`` of the source's and those after it."""
    words = source.fields["bits"]
    bits_kernel[(tokens // 32, len(bits), batch)](
        bits.contiguous(), words if source.rows is None else source.rows, words, tokens, source.first_block + block,
        words.shape[2], len(bits), batch, C=fmt.codes, ORDER=ORDERS[fmt.operand], PICKED=source.rows is not None, num_warps=8,
    )  # fmt: skip


def bits_test(fmt: BinaryCodes, device: torch.device) -> str | None:
    """Run the kernels once as they are compiled on this device; what went wrong, or None. Waits for the device."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32, device="cpu").to(device)

    if flips_by_lanes(fmt.codes):
        return _lanes_test(fmt, random)
    book = random(2, fmt.codes, fmt.head_dim)
    gram, bits = book @ book.mT, (random(2, 64, fmt.codes) > 0).float()
    missed = random(2, 64, fmt.head_dim) * fmt.codes**0.5
    before, start = float(missed.square().sum()), bits.clone()
    flip(bits, (missed @ book.mT).contiguous(), gram, 32)
    after = float((missed - (bits - start) @ book).square().sum())
    fields = fmt.allocate(1, 2, 2, device)
    _store(fmt, bits, Source(missed.unsqueeze(0), fields, 0), 0, 1, 64)
    # levels whose first digit is the bit, where no tie is near
    x, matrix, top = random(1, 2, 64, fmt.head_dim), random(2, fmt.head_dim, fmt.codes), random(2, fmt.codes) * 0 + 3
    tables = (matrix, top - 1.5, top, top * 0, matrix, top, gram)
    first, slope = first_bits(x, tables, True)
    said = (x[0] @ matrix + tables[1].unsqueeze(1)).round().clamp(0, 3)
    fall = x[0] @ matrix - top.unsqueeze(1) - first @ gram
    if not ((said % 2 == first).float().mean() > 0.99 and (slope - fall).norm() < 1e-2 * fall.norm()):
        return "bits that values begin with on this device are others than those of the method"
    if not after < 0.9 * before:
        return f"flips of bits on this device leave {after:.4g} of an error of {before:.4g}"
    if not torch.equal(fmt.decode(fields)[0, :, :, : fmt.codes], bits):
        return "bits packed on this device are others than those of the format"
    return None


def _lanes_test(fmt: BinaryCodes, random: Callable[..., torch.Tensor]) -> str | None:
    """The same of kernels that flip by lanes: of random tables, and values that lie around an offset."""
    book, matrix, offset = (
        random(2, fmt.codes, fmt.head_dim),
        random(2, fmt.head_dim, fmt.codes),
        random(2, fmt.head_dim),
    )
    rest, gram, three = random(2, 64, fmt.head_dim) * fmt.codes**0.5 / 2, book @ book.mT, random(2, fmt.codes) * 0 + 3
    shift = 1.5 - (offset.unsqueeze(1) @ matrix).squeeze(1)
    tables = bit_gains((matrix, shift, three, three * 0, book.mT, three, gram), book, offset)
    x = (rest + offset.unsqueeze(1)).unsqueeze(0)
    fields = fmt.allocate(1, 2, 2, x.device)
    source = Source(x, fields, 0)
    said = (rest @ matrix + 1.5).round().clamp(0, 3) % 2
    square = gram.diagonal(dim1=-1, dim2=-2).unsqueeze(1)
    wrong = "bits that values begin with on this device are others than those of the method"
    if is_together(fmt):
        choose_and_flip(fmt, tables, 0, source)
        bits = fmt.decode(fields)[0, :, :, : fmt.codes]
        if not (said == bits).float().mean() > 0.99:
            return wrong
        choose_and_flip(fmt, tables, 32, source)
    else:
        gains = first_gains(x, tables)
        bits = (gains.view(torch.int32) & 1).float().squeeze(1)
        want = (1 - 2 * bits) * (rest @ book.mT - bits @ gram) - 0.5 * square
        found = gains.squeeze(1) / tables.size[:, None, None]
        if not ((said == bits).float().mean() > 0.99 and (found - want).norm() < 1e-2 * want.norm()):
            return wrong
        flip_and_pack(fmt, gains, tables, 32, source, 0)
    for _ in range(32):
        turn = 1 - 2 * bits
        gain, which = (turn * (rest @ book.mT - bits @ gram) - 0.5 * square).max(-1, keepdim=True)
        bits = bits.scatter_add(-1, which, turn.gather(-1, which) * (gain > 0))
    stored = fmt.decode(fields)[0, :, :, : fmt.codes]
    after, expected = (float((rest - b @ book).square().sum()) for b in (stored, bits))
    if not abs(after - expected) < 2e-2 * expected:
        return f"flips of bits on this device leave an error of {after:.4g}, those of the method {expected:.4g}"
    return None
