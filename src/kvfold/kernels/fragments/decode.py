"""Decode attention over pages of any codes in tensor-core order (InnerQ, QJL, TurboQuant): one pass over all tokens."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import (
    AffineGroups,
    Fields,
    Format,
    Lookup,
    LowRank,
    MixedTokens,
    Outliers,
    Paged,
    Rotation,
    SignSketch,
    Sketch,
)
from kvfold.formats.basis import Basis
from kvfold.formats.paged import PAGE, PagedFormat
from kvfold.kernels.affine.decode import MODES, Plan
from kvfold.kernels.call import AttentionCall, Span, Windows
from kvfold.kernels.common._codes import nibble_weight
from kvfold.kernels.common.partials import Partials, early_launch
from kvfold.kernels.common.spans import MAX_TOKENS
from kvfold.kernels.device import STATIC_SHARED, DeviceInfo, device_info, settled
from kvfold.kernels.fragments._codes import CHANNELS, CONSTANTS, LEVELS, MIXED, RANGES, TOKENS, UNIFORM
from kvfold.kernels.fragments._decode import fragments_kernel
from kvfold.kernels.fragments._layout import column_share, shared_bytes
from kvfold.kernels.fragments.layout import STILL, channel_constants, lane_tiles, rope_turns, whole_levels, wide_tiles
from kvfold.rope import Rope

Rotary = tuple[Rope, torch.Tensor] | None

BLOCK = 32
BLOCKS = PAGE // BLOCK
"""Blocks of a page."""


@dataclass(frozen=True)
class Side:
    """Keys or values, as the kernel knows them.

    Attributes
    ----------
    names : tuple of str
        Fields with codes, scales, and sign words or rows of a low-rank term; the last may be a stand-in.
    constants : tuple
        (kind, bits, mode, group, mean, norm, through a matrix, factor of codes, level table, rank).
    width : int
        Numbers of a stored vector.
    basis : Basis or None
    table_scale : float
        Of the matrix in memory.
    """

    names: tuple[str, str, str]
    constants: tuple[Any, ...]
    width: int
    basis: Basis | None
    table_scale: float = 1.0


def unsupported(key_format: Format, value_format: Format, pre_rope: bool = False) -> str | None:
    """Why the kernel cannot read these formats; None if it can."""
    return _foreign(key_format, value_format, pre_rope) or _other_order(key_format, value_format)


def _other_order(key_format: Format, value_format: Format) -> str | None:
    """Named last, for what makes a layer be stored in another order is the reason that a report should give."""
    for name, form in (("keys", key_format), ("values", value_format)):
        if form.operand != name[:-1]:
            return f"{name}: operand={form.operand}; allowed: {name[:-1]}"
    return None


def _foreign(key_format: Format, value_format: Format, pre_rope: bool) -> str | None:
    if isinstance(key_format, Outliers) and isinstance(key_format.inner, Lookup):
        return _unsupported_elements(key_format, value_format, pre_rope)
    if pre_rope:
        return "keys are stored before RoPE"
    if not any(isinstance(form, PagedFormat) for form in (key_format, value_format)):
        return f"keys: {key_format.kind} storage; allowed: paged"
    for name, form in (("keys", key_format), ("values", value_format)):
        if why := _unsupported(form, name):
            return f"{name}: {why}"
    if program_bytes(key_format, value_format, 1, 1, stage_blocks(key_format, value_format)) > STATIC_SHARED:
        return f"a page at head_dim={key_format.head_dim} is larger than shared memory"
    return None


def _unsupported_elements(key_format: Format, value_format: Format, pre_rope: bool) -> str | None:
    """As :func:`unsupported`, where elements of both sides are stored apart."""
    if not pre_rope:
        return "keys: constants per channel after RoPE; allowed: before it"
    for name, form, scaling in (("keys", key_format, "channel"), ("values", value_format, "range")):
        if form.head_dim != 128 or form.block != BLOCK:
            return f"{name}: head_dim={form.head_dim} in blocks of {form.block}; allowed: 128, {BLOCK}"
        if not (isinstance(form, Outliers) and isinstance(form.inner, Lookup) and form.inner.scaling == scaling):
            return f"{name}: {form.describe()}; allowed: levels with a {scaling}, and elements in fp16"
        if form.inner.bits_per_code not in (2, 3) or form.count > 64:
            return f"{name}: {form.inner.bits_per_code} bits, {form.count} elements; allowed: 2 and 3 bits, up to 64"
    return None


def _unsupported(form: Format, name: str) -> str | None:
    paged = form if isinstance(form, Paged) else None
    inner = form.inner if isinstance(form, Paged | LowRank) else form
    if form.head_dim not in (64, 128, 256):
        return f"head_dim={form.head_dim}; allowed: 64, 128, 256"
    page = form.page if isinstance(form, PagedFormat) else PAGE
    if isinstance(inner, MixedTokens):
        return _unsupported_mixed(form, inner, name)
    if form.block != BLOCK or page != PAGE:
        return f"pages of {page or 'all'} tokens in blocks of {form.block}; allowed: {PAGE}, {BLOCK}"
    if paged and paged.norm and name == "values":
        return "norms per page; allowed: none"
    if isinstance(form, LowRank):
        return _unsupported_ranks(form, name)
    if isinstance(inner, AffineGroups):
        return _unsupported_groups(inner, paged, name)
    if paged is None or not isinstance(paged.basis, Rotation | Sketch):
        return f"{inner.kind} storage without a rotation or a sketch"
    if isinstance(inner, SignSketch):
        if name == "values" or len(inner.sketches) > 1 or inner.width not in (64, 128, 256, 512):
            return f"sketches of {'+'.join(map(str, inner.sketches))}; allowed: one for keys, of 64, 128, 256 or 512"
        return None
    if not isinstance(inner, Lookup):
        return f"{inner.kind} storage in pages; allowed: affine, lookup, sign sketch"
    if inner.scaling != "rms" or any(a + b for a, b in zip(inner.levels, inner.levels[::-1], strict=True)):
        return "levels; allowed: symmetric ones, scaled by the rms of a token"
    if inner.bits_per_code > 3 or (inner.bits_per_code == 3 and form.head_dim == 64):
        return f"levels of {inner.bits_per_code} bits; allowed: 1, 2, and 3 at head_dim 128 and 256"
    return None


def _unsupported_mixed(form: Format, inner: MixedTokens, name: str) -> str | None:
    if form.head_dim != 128 or form.block != PAGE:
        return f"head_dim={form.head_dim} in blocks of {form.block}; allowed: 128, {PAGE}"
    if inner.extra_bits != 2 or inner.bits_per_code not in (1, 2) or not inner.salient:
        return f"{inner.describe()}; allowed: 1 or 2 bits, and 2 more of some"
    if inner.axis != ("token" if name == "keys" else "channel"):
        return f"a range per {inner.axis}"
    if isinstance(form, Paged) and (name == "keys" or form.mean or form.basis is not None or form.page != PAGE):
        return "statistics; allowed: norms of values per page"
    return None


def _unsupported_ranks(form: LowRank, name: str) -> str | None:
    inner = form.inner
    if not isinstance(inner, AffineGroups):
        return f"low rank beside {inner.kind}; allowed: affine"
    if form.rank not in (2, 4, 6, 8):
        return f"rank {form.rank}; allowed: 2, 4, 6, 8"
    if inner.axis != ("token" if name == "keys" else "channel") or inner.mode != "asym":
        return f"low rank beside {inner.describe()}; allowed: asym, keys along tokens and values along channels"
    if inner.group % 32 or inner.group > (32 if name == "keys" else 128):
        return f"group={inner.group}; allowed: 32, of values also 64 and 128"
    return None


def _unsupported_groups(inner: AffineGroups, paged: Paged | None, name: str) -> str | None:
    if paged and paged.basis is not None:
        return "groups in a basis; allowed: none"
    if paged and name == "values":
        return "groups with statistics per page; allowed: without"
    if name == "keys" and inner.axis == "token":
        return "groups along tokens; allowed: along channels"
    if inner.axis == "token" and inner.group != 32:
        return f"group={inner.group} along tokens; allowed: 32"
    if inner.group % 32 or inner.group > 128:
        return f"group={inner.group}; allowed: 32, 64, 128"
    if inner.mode != "asym" and (inner.group != 32 or (name == "values" and inner.axis == "channel")):
        return f"mode={inner.mode} with groups of {inner.group} along {inner.axis}s; allowed: asym"
    return None


@lasting(256)
def side(form: Format) -> Side:
    """A format that :func:`unsupported` has nothing against."""
    paged = form if isinstance(form, Paged) else None
    if isinstance(form.inner if isinstance(form, Paged) else form, MixedTokens):
        return _mixed_side(form)
    if isinstance(form, Outliers):
        assert isinstance(form.inner, Lookup)
        keys, table = form.inner.scaling == "channel", _level_table(form.inner.levels)
        kind, names = (CONSTANTS, ("codes", "codes", "where")) if keys else (RANGES, ("codes", "scale", "where"))
        return Side(
            names, (kind, form.inner.bits_per_code, 0, 0, False, False, False, 1.0, table, form.count), 128, None
        )
    rank = form.rank if isinstance(form, LowRank) else 0
    inner = form.inner if isinstance(form, Paged | LowRank) else form
    mean, norm = (paged.mean, bool(paged.norm)) if paged else (False, False)
    if isinstance(inner, AffineGroups):
        names = ("codes", "scale", "aux") if inner.mode != "asym" else ("codes", "meta", "row" if rank else "codes")
        kind = CHANNELS if inner.axis == "channel" else TOKENS
        fixed = (kind, inner.bits_per_code, MODES[inner.mode], inner.group, mean, norm, False, 1.0, "", rank)
        return Side(names, fixed, form.head_dim, None)
    assert paged is not None
    if isinstance(inner, SignSketch):  # a row of the sketch is as long as sqrt(d): less would not fit fp16
        short = 1 / math.sqrt(form.head_dim)
        factor = 2 * inner.gains[0] * form.head_dim
        return Side(
            ("signs", "rms", "signs"),
            (UNIFORM, 1, 0, 0, mean, norm, True, factor, "", 0),
            inner.width,
            paged.basis,
            short,
        )
    assert isinstance(inner, Lookup)
    bits, levels = inner.bits_per_code, inner.levels
    factor, table = (levels[1] - levels[0], "") if bits == 1 else (1.0, _level_table(levels))
    kind = UNIFORM if bits == 1 else LEVELS
    fixed = (kind, bits, 0, 0, mean, norm, True, factor, table, 0)
    return Side(("codes", "scale", "codes"), fixed, form.head_dim, paged.basis)


def _mixed_side(form: Format) -> Side:
    inner = form.inner if isinstance(form, Paged) else form
    assert isinstance(inner, MixedTokens)
    norm = isinstance(form, Paged) and bool(form.norm)
    fixed = (MIXED, inner.bits_per_code, 0, 0, False, norm, False, 1.0, "", inner.salient)
    return Side(("codes", "meta", "which"), fixed, form.head_dim, None)


def _level_table(levels: tuple[float, ...]) -> str:
    """Upper bytes of four levels, of the next four, and their lower bytes: four numbers as text, which constants may be."""
    numbers = torch.zeros(8, dtype=torch.float16, device="cpu")
    numbers[: len(levels)] = torch.tensor(levels, dtype=torch.float64, device="cpu").half()
    lower, upper = numbers.view(torch.uint8).view(8, 2).T.contiguous().view(torch.int32).tolist()
    return " ".join(f"{x & 0xFFFFFFFF:#x}" for x in (*upper, *lower))


@lasting(1024)  # decode graphs know where they are
def _table(
    form: Format, device: torch.device, back: bool, even: bool = False, wide: bool = False
) -> torch.Tensor | None:
    """What queries, or (``back``) sums of values, go through, as fragments of an operand: fp16 [tiles, tiles, 32, 8].

    ``even``: queries of all tiles alike, where they are scaled afterwards. ``wide``: for products of warpgroups.
    """
    of = side(form)
    if of.basis is None:
        return None
    matrix = of.basis.restore(torch.eye(of.width, dtype=torch.float32, device=device)) * of.table_scale
    if wide:
        return settled(wide_tiles(matrix, of.constants[1]))
    if back:
        matrix = matrix.T
    elif of.constants[0] == UNIFORM and not even:  # codes of a tile count 2^k times
        k = [nibble_weight(of.width, of.constants[1], c) for c in range(of.width // 16)]
        matrix = matrix * torch.tensor([2.0**-x for x in k], device=device).repeat_interleave(16)[:, None]
    return lane_tiles(matrix)


def pairs(key_format: Format, rows: int) -> int:
    """Pages that a query goes through a matrix for at once."""
    of = side(key_format)
    return 2 if rows <= 4 and of.basis is not None and of.constants[5] else 1


def bytewise(key_format: Format, value_format: Format, rows: int) -> bool:
    """Whether products of bytes serve: eight columns are then four query rows."""
    k, v = side(key_format), side(value_format)
    mixed = k.constants[:2] == v.constants[:2] == (MIXED, 2)
    if mixed or rows > 4 or not k.constants[5]:
        return mixed and rows <= 4
    if k.constants[:2] == (UNIFORM, 1):
        grouped = v.constants[:3] == (CHANNELS, 2, MODES["asym"]) and not v.constants[9]
        return k.width == 2 * key_format.head_dim == 256 and grouped
    return key_format.head_dim == 128 and bool(linear_levels(key_format, value_format))


def linear_levels(key_format: Format, value_format: Format) -> tuple[Any, ...]:
    """What products of bytes take of levels, of keys and of values: (bend, unit) of both; of others nothing.

    Four levels -b, -a, a, b are linear in the bits of a code u: ``unit * (u - 3/2 + bend * (u % 2 - 1/2))``. Eight levels that
    are whole numbers times a unit have no bend, and are two words of four bytes: those of keys and of values follow.
    """
    out: tuple[Any, ...] = ()
    words: tuple[int, ...] = ()
    bits = side(key_format).constants[1]
    for form in (key_format, value_format):
        inner = form.inner if isinstance(form, Paged) else form
        if side(form).constants[:2] != (LEVELS, bits) or not isinstance(inner, Lookup):
            return ()
        if bits == 3:
            found = whole_levels(inner.levels)
            if found is None:
                return ()
            out += (0.0, found[0])
            words += found[1]
            continue
        a, b = inner.levels[2:]
        unit = (a + b) / 2
        out += (2 * (b - 1.5 * unit) / unit, unit)
    return out + words


def stage_blocks(key_format: Format, value_format: Format, rows: int = 5) -> int:
    """Blocks of a stage: less than a page where the loop over whole ones would not fit the instruction cache."""
    if bytewise(key_format, value_format, rows):
        return BLOCKS
    sides = [side(form).constants for form in (key_format, value_format)]
    if any(of[0] >= CONSTANTS for of in sides):
        return 1
    whole = any(of[9] for of in sides)  # what a page has once serves all of it
    return BLOCKS if whole or key_format.head_dim == 64 else BLOCKS // 2


def program_bytes(
    key_format: Format,
    value_format: Format,
    pair: int,
    warps: int,
    blocks: int,
    bytewise: bool = False,
    wide: bool = False,
) -> int:
    """Bytes of shared memory of a program."""
    k, v = side(key_format), side(value_format)
    dim = key_format.head_dim
    return int(shared_bytes(k.constants, v.constants, dim, k.width, pair, blocks, warps, bytewise, wide))


REGISTERS: dict[int, int] = {64: 168, 128: 168}
"""Most registers of a thread, by ``head_dim``."""


@lasting()
def make_plan(
    key_format: Format,
    value_format: Format,
    batch_heads: int,
    rows: int,
    capacity: int,
    window_slots: int,
    device: DeviceInfo,
    warpgroups: bool = False,
) -> Plan:
    """Choose a launch shape, as :func:`kvfold.kernels.fold.decode.make_plan`; ``tiles`` are the pages that share a matrix.

    ``warpgroups``: whether four warps may multiply together, as they do on sm_90.
    """
    dim, pair = key_format.head_dim, pairs(key_format, rows)
    columns = math.ceil(rows * int(column_share(side(key_format).constants, pair)) / 8)
    pages = math.ceil(capacity / BLOCKS)
    narrow = bytewise(key_format, value_format, rows)
    blocks = stage_blocks(key_format, value_format, rows)
    warps = next(
        w
        for w in (4, 2, 1)
        if program_bytes(key_format, value_format, pair, w, blocks, narrow) <= STATIC_SHARED or w == 1
    )
    full = batch_heads * columns >= device.sms // 2
    mixed = side(key_format).constants[0] == MIXED
    ranked = any(side(form).constants[9] for form in (key_format, value_format))  # and elements in fp16
    # spills cost more than warps gain; where two programs of a multiprocessor are all there is, warps gain nothing
    registers = None if (mixed and full) or (ranked and not mixed and not full) else REGISTERS.get(dim)
    wide = (
        side(key_format).width > dim and full
    )  # a sketch with more rows than channels: small programs, and many of them
    if wide:
        warps = min(warps, 2)
    size = program_bytes(key_format, value_format, pair, warps, blocks, narrow)
    resident = max(1, min(device.threads((registers or 255) + 1) // (32 * warps), device.programs(size)))
    jobs = batch_heads * columns
    levels = narrow and (mixed or bool(linear_levels(key_format, value_format)))
    if warpgroups and narrow and not mixed and (plan := wide_plan(blocks, jobs, pages, device.sms)):
        return plan
    least = min(1.0, (8 if mixed else 9) / (resident * warps))

    def cost(n: int) -> float:
        stages = math.ceil(math.ceil(pages / n) / warps) + 1.6
        waves, rest = divmod(jobs * n, device.sms * resident)
        fill = math.ceil(rest / device.sms) / resident
        return stages * (waves + (max(least, fill ** (0.7 if wide or (levels and full) else 0.9)) if rest else 0))

    splits = min(range(1, max(2, min(256, pages // warps + 2))), key=cost)
    each = 3 if capacity >= 512 or 4 * jobs >= device.sms else 1
    dense = math.ceil(window_slots / (16 * warps * each))
    # few programs with many pages each: registers are worth more than programs, and a matrix of 64 KB is worth bringing
    # and, with all registers there are, reading once for four pages; one of 32 KB less than a warp's first page
    few = narrow and not full and (mixed or pages >= 4 * splits * warps)
    alone = jobs * (splits + dense) * warps <= 8 * device.sms  # all run at once, whatever their registers
    if levels:
        few = few and alone
    elif few and alone and program_bytes(key_format, value_format, 4, warps, blocks, True) <= STATIC_SHARED:
        pair = 4
    registers = None if few else registers
    return Plan(
        warps, blocks, pair, columns, splits, dense, registers=registers, bytewise=narrow, ahead=few,
        windows_first=few and levels,
    )  # fmt: skip


def wide_plan(blocks: int, jobs: int, pages: int, processors: int) -> Plan | None:
    """A program of eight warps on a multiprocessor, with the matrix in shared memory, for ``jobs`` KV heads of ``pages`` pages.

    Windows are left to multiprocessors that have no pages, some heads' one after the other, where that takes no longer than
    pages. Else programs attend to them after their pages. None where smaller programs would take less time: where few
    multiprocessors are used, or a warp has few pages.
    """
    plan = Plan(8, blocks, 4, 1, (processors - 1) // jobs, 1, bytewise=True, ahead=True, wide=True)
    if jobs * plan.splits >= 0.9 * processors:
        heads, each = math.ceil(jobs / (processors - jobs * plan.splits)), pages // (8 * plan.splits)
        if each >= max(
            2, 2 * heads - 2
        ):  # a head's windows take as long as two pages, beginning and ending as two more
            return replace(plan, window_heads=heads)
    splits = max(1, processors // jobs)
    waves, each = math.ceil(jobs * splits / processors), math.ceil(pages / (8 * splits))
    # of pages' time beginning and ending take 4, windows included, and smaller programs 1.4 for a page
    if each < 4 or waves * (each + 4) > 1.4 * jobs * pages / (8 * processors) + 2:
        return None
    return replace(plan, splits=splits, dense_splits=0, window_heads=0)


def parts(plan: Plan) -> int:
    """Partial results that a launch writes."""
    windows = plan.dense_splits if plan.window_heads else plan.splits
    return (1 if plan.bytewise else plan.tiles) * plan.splits + windows


def decode_attention(
    q: torch.Tensor,
    key_format: Format,
    value_format: Format,
    spans: list[Span],
    windows: Windows,
    scale: float,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    sinks: torch.Tensor | None = None,
    rotation: Rotary = None,
) -> torch.Tensor:
    """Attention of the newest tokens of every sequence over sink, packed and recent tokens.

    As :func:`kvfold.kernels.affine.decode.decode_attention`; what pages do to queries, the kernel does. ``rotation``: where
    keys are stored before RoPE, it and the position of each sequence's first packed token.
    """
    batch, num_heads, tokens, dim = q.shape
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"tokens={tokens}: 1 to {MAX_TOKENS} query tokens are allowed")
    heads = windows.sink[0].shape[1]
    rows = num_heads // heads * tokens
    slots = windows.sink[0].shape[2] + windows.ring[0].shape[2]
    plans = [
        make_plan(
            key_format,
            value_format,
            batch * heads,
            rows,
            unit_capacity_of(key_format, s),
            slots,
            device_info(q.device),
            device_info(q.device).has_wgmma,
        )
        for s in spans
    ]
    plans[0] = plan or plans[0]
    plans[1:] = [replace(p, dense_splits=0, window_heads=1) for p in plans[1:]]
    q = q.contiguous()
    early = device_info(q.device).has_pdl
    partials = Partials.empty(batch * heads, sum(map(parts, plans)), rows, dim, q.device)
    at = 0
    for each, span in zip(plans, spans, strict=True):
        _launch(q, key_format, value_format, span, windows, scale, partials, at, each, early, rotation)
        at += parts(each)
    return partials.merge(torch.empty_like(q) if out is None else out, early, sinks, tokens)


def rotary(call: AttentionCall) -> Rotary:
    """What :func:`decode_attention` is told of a call's RoPE."""
    return None if call.rope is None or call.first_position is None else (call.rope, call.first_position)


def unit_capacity_of(form: Format, span: Span) -> int:
    """Blocks of 32 tokens from one KV head's storage to the next one's."""
    codes = span.keys[side(form).names[0]]
    return codes.stride(1) // codes.stride(2) * codes.shape[3]


def _arrays(form: Format, stored: Fields, back: bool, even: bool = False, wide: bool = False) -> list[torch.Tensor]:
    """Codes, scales, sign words, means, norms, the matrix, as the kernel takes them."""
    of = side(form)
    arrays = [stored[n] for n in of.names]
    own = {MIXED: "low", CONSTANTS: "outlier", RANGES: "outlier"}.get(of.constants[0], "basis")
    more = "mean" if of.constants[4] else own if of.constants[9] else of.names[0]
    arrays.append(stored[more])
    arrays.append(stored["norm"] if of.constants[5] else arrays[0])
    for x in arrays:
        if not (x.is_contiguous() or x.stride(0) == x.shape[1] * x.stride(1)):
            raise ValueError(f"packed storage: strides {x.stride()} of {tuple(x.shape)} are not those of a slab")
    table = (
        _table(form, arrays[0].device, back, even, wide)
        if of.constants[0] != CONSTANTS
        else channel_constants(form, arrays[0].device)
    )
    return [*arrays, arrays[0] if table is None else table]


def _pages(form: Format, stored: Fields) -> int:
    """Pages from one KV head's storage to the next one's."""
    names = ["low"] if "low" in stored else list(form.page_fields()) if isinstance(form, PagedFormat) else []
    if not names:
        return 0
    x = stored[names[0]]
    return x.stride(1) // x.stride(2)


def _launch(
    q: torch.Tensor,
    key_format: Format,
    value_format: Format,
    span: Span,
    windows: Windows,
    scale: float,
    partials: Partials,
    part: int,
    plan: Plan,
    early: bool,
    rotation: Rotary,
) -> None:
    """Write partial results of one span (and, if planned, of the windows) to parts ``part`` and following."""
    heads, rows = windows.sink[0].shape[1], partials.out.shape[2]
    sink, ring = windows.sink, windows.ring
    position, tables = windows.packed_len, (partials.top, partials.top)
    if rotation is not None:
        position, tables = rotation[1], rope_turns(rotation[0], q.device)
    elif side(key_format).constants[0] == CONSTANTS:
        tables = rope_turns(STILL, q.device)
    fragments_kernel[(partials.out.shape[0] * plan.columns, plan.splits + plan.dense_splits)](
        q,
        *_arrays(key_format, span.keys, False, plan.bytewise > 0, plan.wide),
        *_arrays(value_format, span.values, True),
        windows.packed_len,
        position,
        *tables,
        *sink,
        windows.sink_len,
        *ring,
        windows.recent_len,
        partials.out,
        partials.top,
        partials.total,
        float(scale),
        heads,
        rows,
        q.shape[2],
        plan.columns,
        span.start,
        unit_capacity_of(key_format, span),
        _pages(key_format, span.keys),
        _pages(value_format, span.values),
        sink[0].shape[2],
        ring[0].shape[2],
        plan.splits,
        plan.dense_splits,
        partials.splits,
        part,
        **constants(key_format, value_format, plan, ring[0].dtype == torch.bfloat16, early),
        num_warps=plan.warps,
        maxnreg=plan.registers,
        **early_launch(early),
    )


def constants(key_format: Format, value_format: Format, plan: Plan, bf16: bool, early: bool) -> dict[str, Any]:
    """What the kernel is specialized on."""
    k, v = side(key_format), side(value_format)
    return {
        "D": key_format.head_dim,
        "K": k.constants,
        "K_WIDTH": k.width,
        "V": v.constants,
        "PAIR": plan.tiles,
        "NB": plan.blocks,
        "PER": BLOCKS // plan.blocks,
        "BF16": bf16,
        "EARLY": early,
        "BYTES": plan.bytewise,
        "AHEAD": int(plan.ahead) + (plan.ahead and plan.windows_first),
        "FIRST": plan.windows_first,
        "WIDE": plan.wide,
        "SHARE": plan.window_heads,
        "LEVELS": linear_levels(key_format, value_format) if plan.bytewise else (),
    }
