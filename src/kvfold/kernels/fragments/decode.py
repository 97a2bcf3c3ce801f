"""Decode attention over pages of affine groups or of signs in tensor-core order (InnerQ, QJL): one pass over all tokens."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Fields, Format, Paged, SignSketch, Sketch
from kvfold.formats.basis import Basis
from kvfold.formats.paged import PAGE
from kvfold.kernels.affine.decode import MODES, Plan
from kvfold.kernels.call import Span, Windows
from kvfold.kernels.common import spans as over
from kvfold.kernels.common._codes import nibble_weight
from kvfold.kernels.common.partials import Partials, early_launch
from kvfold.kernels.device import STATIC_SHARED, DeviceInfo, device_info, settled
from kvfold.kernels.fragments._codes import CHANNELS, TOKENS, UNIFORM
from kvfold.kernels.fragments._decode import fragments_kernel
from kvfold.kernels.fragments._layout import column_share, shared_bytes
from kvfold.kernels.fragments.layout import lane_tiles, wide_tiles

BLOCK = 32
BLOCKS = PAGE // BLOCK
"""Blocks of a page."""


@dataclass(frozen=True)
class Side:
    """Keys or values, as the kernel knows them.

    Attributes
    ----------
    names : tuple of str
        Fields with codes, scales, and sign words; the last may be a stand-in.
    constants : tuple
        (kind, bits, mode, group, mean, norm, factor of codes).
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
    if pre_rope:
        return "keys are stored before RoPE"
    if not isinstance(key_format, Paged):
        return f"keys: {key_format.kind} storage; allowed: paged"
    for name, form in (("keys", key_format), ("values", value_format)):
        if why := _unsupported(form, name):
            return f"{name}: {why}"
    if program_bytes(key_format, value_format, 1, 1, stage_blocks(key_format, value_format)) > STATIC_SHARED:
        return f"a page at head_dim={key_format.head_dim} is larger than shared memory"
    return None


def _unsupported(form: Format, name: str) -> str | None:
    paged = form if isinstance(form, Paged) else None
    inner = paged.inner if paged else form
    if form.head_dim not in (64, 128, 256):
        return f"head_dim={form.head_dim}; allowed: 64, 128, 256"
    page = paged.page if paged else PAGE
    if form.block != BLOCK or page != PAGE:
        return f"pages of {page or 'all'} tokens in blocks of {form.block}; allowed: {PAGE}, {BLOCK}"
    if isinstance(inner, AffineGroups):
        return _unsupported_groups(inner, paged, name)
    if not isinstance(inner, SignSketch):
        return f"{inner.kind} storage; allowed: affine, sign sketch"
    if name == "values" or len(inner.sketches) > 1 or inner.width not in (64, 128, 256, 512):
        return f"sketches of {'+'.join(map(str, inner.sketches))}; allowed: one for keys, of 64, 128, 256 or 512"
    if paged is None or not isinstance(paged.basis, Sketch):
        return f"{inner.kind} storage without a sketch"
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
    inner = paged.inner if paged else form
    mean, norm = (paged.mean, bool(paged.norm)) if paged else (False, False)
    if isinstance(inner, AffineGroups):
        names = ("codes", "scale", "aux") if inner.mode != "asym" else ("codes", "meta", "codes")
        kind = CHANNELS if inner.axis == "channel" else TOKENS
        fixed = (kind, inner.bits_per_code, MODES[inner.mode], inner.group, mean, norm, 1.0)
        return Side(names, fixed, form.head_dim, None)
    assert paged is not None and isinstance(inner, SignSketch)
    short = 1 / math.sqrt(form.head_dim)  # a row of the sketch is as long as sqrt(d): less would not fit fp16
    fixed = (UNIFORM, 1, 0, 0, mean, norm, 2 * inner.gains[0] * form.head_dim)
    return Side(("signs", "rms", "signs"), fixed, inner.width, paged.basis, short)


@lasting(1024)  # decode graphs know where they are
def _table(form: Format, device: torch.device, even: bool = False, wide: bool = False) -> torch.Tensor | None:
    """What queries go through, as fragments of an operand: fp16 [tiles, tiles, 32, 8].

    ``even``: queries of all tiles alike, where they are scaled afterwards. ``wide``: for products of warpgroups.
    """
    of = side(form)
    if of.basis is None:
        return None
    matrix = of.basis.restore(torch.eye(of.width, dtype=torch.float32, device=device)) * of.table_scale
    if wide:
        return settled(wide_tiles(matrix))
    if not even:  # codes of a tile count 2^k times
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
    if rows > 4 or not k.constants[5] or k.constants[0] != UNIFORM:
        return False
    return k.width == 2 * key_format.head_dim == 256 and v.constants[:3] == (CHANNELS, 2, MODES["asym"])


def stage_blocks(key_format: Format, value_format: Format, rows: int = 5) -> int:
    """Blocks of a stage: less than a page where the loop over whole ones would not fit the instruction cache."""
    return BLOCKS if key_format.head_dim == 64 or bytewise(key_format, value_format, rows) else BLOCKS // 2


def program_bytes(
    key_format: Format, value_format: Format, pair: int, warps: int, blocks: int, wide: bool = False
) -> int:
    """Bytes of shared memory of a program."""
    k, v = side(key_format), side(value_format)
    dim = key_format.head_dim
    return int(shared_bytes(k.constants, v.constants, dim, k.width, pair, blocks, warps, wide))


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
    columns = math.ceil(rows * int(column_share(pair)) / 8)
    pages = math.ceil(capacity / BLOCKS)
    narrow = bytewise(key_format, value_format, rows)
    blocks = stage_blocks(key_format, value_format, rows)
    warps = next(
        w for w in (4, 2, 1) if program_bytes(key_format, value_format, pair, w, blocks) <= STATIC_SHARED or w == 1
    )
    full = batch_heads * columns >= device.sms // 2
    registers = REGISTERS.get(dim)
    wide = (
        side(key_format).width > dim and full
    )  # a sketch with more rows than channels: small programs, and many of them
    if wide:
        warps = min(warps, 2)
    size = program_bytes(key_format, value_format, pair, warps, blocks)
    resident = max(1, min(device.threads((registers or 255) + 1) // (32 * warps), device.programs(size)))
    jobs = batch_heads * columns
    if warpgroups and narrow and (plan := wide_plan(blocks, jobs, pages, device.sms)):
        return plan
    least = min(1.0, 9 / (resident * warps))

    def cost(n: int) -> float:
        stages = math.ceil(math.ceil(pages / n) / warps) + 1.6
        waves, rest = divmod(jobs * n, device.sms * resident)
        fill = math.ceil(rest / device.sms) / resident
        return stages * (waves + (max(least, fill ** (0.7 if wide else 0.9)) if rest else 0))

    splits = min(range(1, max(2, min(256, pages // warps + 2))), key=cost)
    each = 3 if capacity >= 512 or 4 * jobs >= device.sms else 1
    dense = math.ceil(window_slots / (16 * warps * each))
    # few programs with many pages each: registers are worth more than programs, and a matrix of 64 KB is worth bringing
    # and, with all registers there are, reading once for four pages
    few = narrow and not full and pages >= 4 * splits * warps
    alone = jobs * (splits + dense) * warps <= 8 * device.sms  # all run at once, whatever their registers
    if few and alone and program_bytes(key_format, value_format, 4, warps, blocks) <= STATIC_SHARED:
        pair = 4
    registers = None if few else registers
    return Plan(warps, blocks, pair, columns, splits, dense, registers=registers, bytewise=narrow, ahead=few)


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
) -> torch.Tensor:
    """Attention of the newest tokens of every sequence over sink, packed and recent tokens.

    As :func:`kvfold.kernels.affine.decode.decode_attention`; what pages do to queries, the kernel does.
    """
    jobs, rows, slots = over.sizes(q, windows)
    device = device_info(q.device)
    rooms = [unit_capacity_of(key_format, span) for span in spans]
    plans = [make_plan(key_format, value_format, jobs, rows, n, slots, device, device.has_wgmma) for n in rooms]
    plans[0] = plan or plans[0]
    plans[1:] = [replace(p, dense_splits=0, window_heads=1) for p in plans[1:]]
    q = q.contiguous()

    def launch(span: Span, partials: Partials, part: int, plan: Plan, early: bool) -> None:
        _launch(q, key_format, value_format, span, windows, scale, partials, part, plan, early)

    return over.attend(q, windows, spans, plans, launch, parts, out, sinks)


def unit_capacity_of(form: Format, span: Span) -> int:
    """Blocks of 32 tokens from one KV head's storage to the next one's."""
    codes = span.keys[side(form).names[0]]
    return codes.stride(1) // codes.stride(2) * codes.shape[3]


def _arrays(form: Format, stored: Fields, even: bool = False, wide: bool = False) -> list[torch.Tensor]:
    """Codes, scales, sign words, means, norms, the matrix, as the kernel takes them: of values the first three."""
    of = side(form)
    statistics = ["mean" if of.constants[4] else of.names[0], "norm" if of.constants[5] else of.names[0]]
    arrays = over.slab_fields(stored, [*of.names, *statistics])
    table = _table(form, arrays[0].device, even, wide)
    return [*arrays, arrays[0] if table is None else table]


def _pages(form: Format, stored: Fields) -> int:
    """Pages from one KV head's storage to the next one's."""
    names = list(form.page_fields()) if isinstance(form, Paged) else []
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
) -> None:
    """Write partial results of one span (and, if planned, of the windows) to parts ``part`` and following."""
    heads, rows = windows.sink[0].shape[1], partials.out.shape[2]
    sink, ring = windows.sink, windows.ring
    fragments_kernel[(partials.out.shape[0] * plan.columns, plan.splits + plan.dense_splits)](
        q,
        *_arrays(key_format, span.keys, plan.bytewise > 0, plan.wide),
        *_arrays(value_format, span.values)[:3],
        windows.packed_len,
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
        plan.splits,
        sink[0].shape[2],
        ring[0].shape[2],
        partials.splits,
        part,
        plan.dense_splits,
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
        "AHEAD": plan.ahead,
        "WIDE": plan.wide,
        "SHARE": plan.window_heads,
    }
