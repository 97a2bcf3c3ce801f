"""Decode attention over pages that are read from their own bytes (fold): one pass over sink, packed and recent tokens."""

import math
from dataclasses import replace

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Fields, Format, Hadamard, Paged, ResidualCodes, UniformTokens
from kvfold.formats.gaussian import STEP
from kvfold.formats.paged import PAGE
from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.call import Span, Windows
from kvfold.kernels.common import spans as over
from kvfold.kernels.common.partials import Partials, early_launch
from kvfold.kernels.device import LEAST_SHARED, STATIC_SHARED, DeviceInfo, device_info
from kvfold.kernels.fold._codebook import tables_bytes
from kvfold.kernels.fold._codes import shared_bytes
from kvfold.kernels.fold._decode import pages_kernel
from kvfold.kernels.fold._rows import row_bytes
from kvfold.kernels.stored import in_bytes, table_rows

BLOCK = 32
BLOCKS = PAGE // BLOCK
"""Blocks of a page, which is a stage."""


def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why the kernel cannot read these formats; None if it can."""
    for name, form in (("keys", key_format), ("values", value_format)):
        if not isinstance(form, Paged):
            return f"{name}: {form.kind} storage; allowed: paged"
        if form.head_dim not in (64, 128, 256):
            return f"{name}: head_dim={form.head_dim}; allowed: 64, 128, 256"
        if form.page != PAGE or form.block != BLOCK:
            return f"{name}: pages of {form.page or 'all'} tokens in blocks of {form.block}; allowed: {PAGE}, {BLOCK}"
        if isinstance(form.inner, ResidualCodes):
            if why := _no_lookups(form, name):
                return why
        elif not isinstance(form.inner, UniformTokens):
            return f"{name}: {form.inner.kind} storage in pages; allowed: uniform, codes into fold's table"
        if form.norm and name == "values":
            return "values: norms per page; allowed: none"
        if form.basis is not None and not isinstance(form.basis, Hadamard):
            return f"{name}: {type(form.basis).__name__.lower()} basis; allowed: hadamard"
        if not _words(form) and form.operand != name[:-1]:
            return f"{name}: operand={form.operand}; allowed: {name[:-1]}"
    assert isinstance(key_format, Paged) and isinstance(value_format, Paged)
    if _words(key_format) == _words(value_format) and not _same_book(key_format, value_format):
        return "values: another codebook than that of keys; allowed: the same"
    turns = {_mix(key_format), _mix(value_format)} - {1}
    if len({min(16, mix) for mix in turns}) > 1:
        return (
            f"rotations of {' and '.join(map(str, sorted(turns)))} channels; allowed: one of them, or at least 16 each"
        )
    if program_bytes(key_format, value_format, Plan(1, BLOCKS, 1, 1, 1, 1)) > most_bytes(key_format, value_format):
        bits = _bits(key_format), _bits(value_format)
        return f"{bits[0]} and {bits[1]} bits at head_dim={key_format.head_dim}: a page is larger than shared memory"
    return None


def _no_lookups(form: Paged, name: str) -> str | None:
    """Why the kernel cannot look up a side's codes; None if it can."""
    codes = form.inner
    assert isinstance(codes, ResidualCodes)
    allowed = (4,) if name == "keys" else (4, 8)
    if (codes.codes, codes.stages, codes.strided) != (256, 1, False) or codes.vector not in allowed:
        return f"{name}: {codes.describe()}; allowed: one stage of 256 codes for {' or '.join(map(str, allowed))} neighbours"
    if codes.book is None:
        return f"{name}: no codebook"
    if not in_bytes(codes.book):
        return f"{name}: a codebook whose numbers are no bytes; allowed: whole steps of {STEP}, up to {127 * STEP}"
    if _mix(form) < 16:
        return f"{name}: codes of channels that no Hadamard rotation of 16 or more mixes"
    return None


def _words(form: Paged, whole: bool = False) -> int:
    """Words of a row of the table that codes are looked up in, of halves or (``whole``) of bytes; 0: they are uniform."""
    return form.inner.vector // (4 if whole else 2) if isinstance(form.inner, ResidualCodes) else 0


def _same_book(key_format: Paged, value_format: Paged) -> bool:
    """Whether sides, if their codes are looked up, have one codebook: there is one table for rows of one length."""
    keys, values = key_format.inner, value_format.inner
    if not isinstance(keys, ResidualCodes) or not isinstance(values, ResidualCodes):
        return True
    assert keys.book is not None and values.book is not None
    return keys.book is values.book or torch.equal(keys.book.codes, values.book.codes)


def most_bytes(key_format: Paged, value_format: Paged) -> int:
    """Bytes of shared memory that a program may have."""
    return LEAST_SHARED if _words(key_format) or _words(value_format) else STATIC_SHARED


def _mix(form: Paged) -> int:
    return form.basis.block if isinstance(form.basis, Hadamard) else 1


def _bits(form: Paged) -> int:
    if isinstance(form.inner, ResidualCodes):
        return 8 // form.inner.vector
    assert isinstance(form.inner, UniformTokens)
    return form.inner.bits_per_code


def program_bytes(key_format: Paged, value_format: Paged, plan: Plan, far: bool = True) -> int:
    """Bytes of shared memory of a program."""
    words = _words(key_format, plan.bytewise > 0), _words(value_format, plan.bytewise > 0)
    if plan.bytewise:
        norm, sides = bool(key_format.norm), (key_format, value_format)
        bits, means = [_bits(form) for form in sides], [form.mean for form in sides]
        own = row_bytes(
            key_format.head_dim, bits[0], means[0], norm, bits[1], means[1], BLOCKS, plan.warps, words[0], plan.bytewise
        )
        return int(tables_bytes(*words) + own)
    size = shared_bytes(
        key_format.head_dim, _bits(key_format), key_format.mean, bool(key_format.norm), _bits(value_format),
        value_format.mean, plan.tiles, BLOCKS, far, plan.warps, *words,
    )  # fmt: skip
    return int(tables_bytes(*words) + size)


def bytewise(key_format: Paged, value_format: Paged, rows: int) -> int:
    """Sets of four query rows that a program serves with products of bytes, where eight columns are four rows; 0: halves do.

    Two sets make operands of codes once, which is worth it where codes are looked up.
    """
    sides = (key_format, value_format)
    able = (
        key_format.head_dim == 128
        and all(_bits(form) in (2, 3, 4) or _words(form) for form in sides)
        and len({min(16, _mix(form)) for form in sides}) == 1
    )
    if not able or rows > 8:
        return 0
    if rows <= 4:
        return 1
    return 2 if any(_words(form) for form in sides) else 0


@lasting()
def make_plan(
    key_format: Paged,
    value_format: Paged,
    batch_heads: int,
    rows: int,
    capacity: int,
    window_slots: int,
    device: DeviceInfo,
    sets: int | None = None,
) -> Plan:
    """Choose a launch shape; parameters are those of :func:`kvfold.kernels.affine.decode.make_plan`, ``capacity`` in blocks.

    ``sets``: of four rows that products of bytes take, 0 for those of halves; None: as :func:`bytewise` says.
    """
    dim = key_format.head_dim
    tiles = 2 if rows > 8 and dim < 128 else 1
    columns = math.ceil(rows / (8 * tiles))
    pages = math.ceil(capacity / BLOCKS)
    narrow = bytewise(key_format, value_format, rows) if sets is None else sets
    jobs = batch_heads * columns
    uniform = not (_words(key_format) or _words(value_format))  # a table is too large for programs of a warp
    if narrow == 1 and uniform and capacity <= SHORT and jobs >= ALONE * device.sms:
        dense = math.ceil(window_slots / (16 * 12))
        return Plan(1, BLOCKS, tiles, columns, 1, dense, registers=ALONE_REGISTERS, bytewise=1)
    shapes = [Plan(warps, BLOCKS, tiles, columns, 1, 1, bytewise=narrow) for warps in (4, 2, 1)]
    most = most_bytes(key_format, value_format)
    shape = next(s for s in shapes if program_bytes(key_format, value_format, s) <= most)
    warps = shape.warps
    registers, resident = residence(key_format, value_format, shape, device)
    least = min(1.0, 9 / (resident * warps))

    def cost(n: int) -> float:
        """As in :func:`kvfold.kernels.affine.decode.make_plan`; starting and ending a program is worth 1.6 stages."""
        stages = math.ceil(math.ceil(pages / n) / warps) + 1.6
        waves, rest = divmod(jobs * n, device.sms * resident)
        fill = math.ceil(rest / device.sms) / resident
        return stages * (waves + (max(least, fill**0.9) if rest else 0))

    splits = min(range(1, max(2, min(256, pages // warps + 2))), key=cost)
    each = 3 if capacity >= 512 or 4 * jobs >= device.sms else 2
    dense = math.ceil(window_slots / (16 * warps * each))
    few = (
        jobs * (splits + dense) <= 2 * device.sms
    )  # beyond, windows at the end fill multiprocessors that have nothing else
    return replace(shape, splits=splits, dense_splits=dense, registers=registers, windows_first=few)


def residence(key_format: Paged, value_format: Paged, plan: Plan, device: DeviceInfo) -> tuple[int | None, int]:
    """Most registers of a thread (None leaves them to the compiler), and how many programs a multiprocessor holds.

    Two sets of rows need more than 168 registers. They have them where codes are looked up, or where shared memory holds no
    more than eight warps.
    """
    dim, fit = key_format.head_dim, device.programs(program_bytes(key_format, value_format, plan))
    registers = REGISTERS.get(dim)
    tables = _words(key_format) or _words(value_format)
    if plan.bytewise == 2 and (tables or fit * plan.warps <= 8):
        registers = 255
    elif dim == 64 and plan.tiles == 1 and tables:
        registers = TABLE_REGISTERS
    return registers, max(1, min(device.threads((registers or 255) + 1) // (32 * plan.warps), fit))


REGISTERS: dict[int, int] = {128: 168}
"""Most registers of a thread, by ``head_dim``; as measured on an H200."""
TABLE_REGISTERS = 160
"""The same where codes are looked up at head size 64: the compiler's choice, up to 190, leaves a multiprocessor two programs
instead of three; with 160 nothing is spilled in the loop."""
SHORT, ALONE, ALONE_REGISTERS = 64, 12, 128
"""Of sequences with room for so many blocks at most, and so many of their KV heads for each multiprocessor, a warp takes one
whole and has no other to meet; its registers then."""


def decode_attention(
    q: torch.Tensor,
    key_format: Paged,
    value_format: Paged,
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
    plans = [make_plan(key_format, value_format, jobs, rows, capacity(s), slots, device) for s in spans]
    plans[0] = plan or plans[0]
    if 4 * plans[0].bytewise < min(rows, 8) and plans[0].bytewise:
        raise ValueError(f"bytewise={plans[0].bytewise}: so many sets of four are not {rows} query rows of a KV head")
    plans[1:] = [replace(p, dense_splits=0) for p in plans[1:]]
    q = q.contiguous()

    def launch(span: Span, partials: Partials, part: int, plan: Plan, early: bool) -> None:
        _launch(q, key_format, value_format, span, windows, scale, partials, part, plan, early)

    return over.attend(q, windows, spans, plans, launch, over.parts, out, sinks)


def capacity(span: Span) -> int:
    """Blocks from one KV head's storage to the next one's."""
    codes = span.keys["codes"]
    return codes.stride(1) // codes.stride(2)


def _arrays(form: Paged, stored: Fields, signs: torch.Tensor, norm: bool) -> list[torch.Tensor]:
    """Codes, scales, means (and norms) as the kernel takes them, then the rotation's signs."""
    scale = scale_of(form)
    names = ["codes", scale, "mean" if form.mean else scale, *(["norm" if form.norm else "codes"] if norm else [])]
    return [*over.slab_fields(stored, names), signs]


def scale_of(form: Paged) -> str:
    """The field that has a scale per token."""
    return "rms" if _words(form) else "scale"


def rows_of(form: Paged, like: torch.Tensor, whole: bool) -> torch.Tensor:
    """Rows of the table that codes are looked up in, fp16 or (``whole``) int8; ``like`` where there is none."""
    if not isinstance(form.inner, ResidualCodes):
        return like
    assert form.inner.book is not None
    return table_rows(form.inner.book.on(like.device), whole)


def _pages(form: Paged, stored: Fields) -> int:
    """Pages from one KV head's storage to the next one's."""
    if not form.page_fields():
        return 0
    x = stored["mean" if form.mean else "norm"]
    return x.stride(1) // x.stride(2)


def _signs(form: Paged, like: torch.Tensor) -> torch.Tensor:
    return form.basis.signs(like.device) if isinstance(form.basis, Hadamard) else like


def _launch(
    q: torch.Tensor,
    key_format: Paged,
    value_format: Paged,
    span: Span,
    windows: Windows,
    scale: float,
    partials: Partials,
    part: int,
    plan: Plan,
    early: bool,
) -> None:
    """Write partial results of one span (and, if planned, of the windows) to parts ``part`` and following."""
    rooms = capacity(span), _pages(key_format, span.keys), _pages(value_format, span.values)
    pages_kernel[(partials.out.shape[0] * plan.columns, plan.splits + plan.dense_splits)](
        q,
        *_arrays(key_format, span.keys, _signs(key_format, partials.top), True),
        *_arrays(value_format, span.values, _signs(value_format, partials.top), False),
        *(rows_of(form, partials.top, plan.bytewise > 0) for form in (key_format, value_format)),
        *over.arguments(windows, partials, part, plan, span, scale, q.shape[2], rooms),
        **constants(key_format, value_format, plan, windows.ring[0].dtype == torch.bfloat16, early),
        num_warps=plan.warps,
        maxnreg=plan.registers,
        **early_launch(early),
    )


def constants(key_format: Paged, value_format: Paged, plan: Plan, bf16: bool, early: bool) -> dict[str, int | bool]:
    """What the kernel is specialized on."""
    return {
        "D": key_format.head_dim,
        "K_BITS": _bits(key_format),
        "K_MEAN": key_format.mean,
        "K_NORM": bool(key_format.norm),
        "K_MIX": _mix(key_format),
        "V_BITS": _bits(value_format),
        "V_MEAN": value_format.mean,
        "V_MIX": _mix(value_format),
        "SAME": key_format.basis == value_format.basis,
        "NT": plan.tiles,
        "NB": plan.blocks,
        "FAR": True,
        "BF16": bf16,
        "EARLY": early,
        "BYTES": int(plan.bytewise),
        "FIRST": plan.windows_first,
        "K_WORDS": _words(key_format, plan.bytewise > 0),
        "V_WORDS": _words(value_format, plan.bytewise > 0),
    }
