"""A choice of the registry for every format that has a reader: plain Triton, one kernel for all of them."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Fields, Format, Paged
from kvfold.formats.binary import BinaryCodes, ValueRows
from kvfold.formats.paged import PAGE, PagedFormat
from kvfold.kernels.base import GPUKernel
from kvfold.kernels.call import AttentionCall, Span, Windows
from kvfold.kernels.device import device_info, no_triton
from kvfold.kernels.stored import (
    basis_matrix,
    check_strides,
    inner,
    pages_between,
    power,
    room_of,
    rotation_of,
    static,
)

if TYPE_CHECKING:
    from kvfold.kernels.common.partials import Partials
    from kvfold.kernels.generic.readers import Reader

MAX_DIM = 256
TURNED = "ieee"
"""Precision of the products that turn sums of codes into values."""


class BlocksKernel(GPUKernel):
    """Formats with a reader, in plain order, on NVIDIA GPUs (sm_80 and later); calls of any length.

    Tiles are decoded to fp16, so layers of float32 models are left to the reference kernel. Longer calls unpack bounded
    pieces to 16 bits for the platform's flash attention.
    """

    name = "blocks"

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        return no_triton(device) or unsupported(key_format, value_format, pre_rope)

    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        return attend(call)


def unsupported(key_format: Format, value_format: Format, pre_rope: bool, any_order: bool = False) -> str | None:
    """Why the kernel cannot read these formats; None if it can. ``any_order``: packed for tensor cores, too."""
    from kvfold.kernels.generic.readers import why_not

    if isinstance(value_format, BinaryCodes) and value_format.joint > 1:
        return "values: one code for all heads"
    for side, form in (("keys", key_format), ("values", value_format)):
        if form.head_dim > MAX_DIM:
            return f"{side}: head_dim={form.head_dim}; allowed: up to {MAX_DIM}"
        if PAGE % form.block and form.block % PAGE:
            return f"{side}: blocks of {form.block} tokens; allowed: those that divide {PAGE}, or are a multiple of it"
        if isinstance(form, PagedFormat) and form.page != PAGE:
            return f"{side}: statistics of {form.page or 'all'} tokens; allowed: {PAGE}"
        if why := why_not(inner(form), any_order):
            return f"{side}: {why}"
        if inner(form).width > MAX_DIM + 1:
            return f"{side}: vectors of {inner(form).width} stored channels; allowed: up to {MAX_DIM}"
    if pre_rope and isinstance(key_format, Paged):
        return "keys: stored before RoPE, with statistics per page"
    if pre_rope and key_format.head_dim % 8:
        return f"keys: stored before RoPE, head_dim={key_format.head_dim}; allowed: multiples of 8"
    return None


@dataclass(frozen=True)
class Plan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    rows : int
        Query rows of a program.
    tokens : int
        Of a tile.
    warps, splits : int
    processors : int
        Multiprocessors that programs run on.
    """

    rows: int
    tokens: int
    warps: int
    splits: int
    processors: int = 1


@lasting()
def make_plan(
    width: int,
    heads: int,
    rows: int,
    tokens: int,
    processors: int,
    turned: bool = False,
    most: int = 4,
    tile: int = 128,
) -> Plan:
    """Choose a launch shape.

    Parameters
    ----------
    width : int
        Channels of the wider side.
    heads : int
        KV heads of all sequences.
    rows : int
        Query rows per KV head.
    tokens : int
        That the storage holds.
    turned : bool
        Whether queries are turned once a tile, which then is a page.
    most : int
        Programs that a multiprocessor has registers for.
    tile : int
        Most tokens of a tile.

    Notes
    -----
    For four warps and 16 query rows or more Triton 3.6 makes warpgroup MMAs, which gave wrong numbers on an H200; of two warps
    it cannot.
    """
    if rows <= 8:
        m, resident = 8, 4
        tile = min(tile, 128 if turned and width <= 128 else 64)
        warps = 4 if tile > 32 else 2
    else:
        m, warps, resident = 16 if rows <= 16 else 32, 2, 4
        tile = min(tile, 64 if width <= 128 else 32)
    jobs = heads * math.ceil(rows / m)
    resident = min(resident, most)
    splits = max(1, min(processors * resident // jobs, tokens // (2 * tile), 256))
    return Plan(m, tile, warps, splits, processors)


class Packed(Protocol):
    """What reads packed spans in the place of the kernel with readers; it takes queries as they come."""

    def early(self, call: AttentionCall) -> bool:
        """Whether its kernel is launched before the end of the one before, for which it waits, and lets the next one start."""

    def plan_of(self, call: AttentionCall, span: Span) -> Any:
        """A launch shape for a call over one span, with ``splits``."""

    def attend_packed(
        self,
        call: AttentionCall,
        span: Span,
        packed: torch.Tensor,
        out: torch.Tensor,
        top: torch.Tensor,
        total: torch.Tensor,
        part: int,
        plan: Any,
    ) -> None:
        """Write partial results over one span to the parts ``part`` to ``part + plan.splits``."""


def attend(call: AttentionCall, plan: "Plan | None" = None, of: Packed | None = None) -> torch.Tensor:
    """Attention over packed spans, windows and new tokens; see :class:`AttentionCall`.

    Nothing depends on a value on the host.

    Parameters
    ----------
    plan : Plan or None
        Launch shape for every span; chosen from the shapes if None.
    of : Packed or None

    Returns
    -------
    Tensor [batch, num_heads, tokens, head_dim], of the query's dtype
    """
    from kvfold.kernels.common.partials import Partials
    from kvfold.kernels.common.windows import attend_windows

    windows, new, device = call.windows, call.new, call.query.device
    assert isinstance(windows, Windows)
    batch, heads, count, dim = call.shape
    plan_of = plain_plan if of is None else of.plan_of
    plans = [plan or plan_of(call, span) for span in call.spans]
    packed, bias = (call.grouped(call.query), None) if of is not None or not plans else call.projected
    partials = Partials.empty(batch * heads, 1 + sum(p.splits for p in plans), count, dim, device)
    query = call.query.to(windows.ring[0].dtype).contiguous()
    early = of is not None and bool(plans) and of.early(call)
    at, sums = 1, []
    for each, span in zip(plans, call.spans, strict=True):
        sums.append((sum_packed(call, span, packed, bias, partials, at, each, of), at, at + each.splits))
        at += each.splits
    attend_windows(
        query,
        windows,
        call.scale,
        partials,
        0,
        None if new is None else new.keys,
        None if new is None else new.values,
        None if new is None else new.valid,
        early=early,
    )
    for out, start, stop in sums:
        early = unproject(call, out, partials, start, stop, early)
    result = torch.empty_like(call.query, memory_format=torch.contiguous_format)
    return partials.merge(result, early, call.sinks, call.tokens)


def plain_plan(call: AttentionCall, span: Span) -> Plan:
    """The launch shape of the kernel with readers."""
    batch, heads, rows, _ = call.shape
    width = max(inner(form).width for form in (call.key_format, call.value_format))
    tokens, turned = _tokens(call.key_format, span.keys), is_turned(call.key_format)
    readers = readers_of(call.key_format, call.value_format, 0)
    shape = width, batch * heads, rows, tokens, device_info(call.query.device).sms
    return make_plan(*shape, turned, resident(readers), most_tokens(readers))


def is_turned(key_format: Format) -> bool:
    """Whether the kernel turns queries, page by page."""
    return isinstance(key_format, Paged) and key_format.basis is not None


def _tokens(form: Format, fields: Fields) -> int:
    return next(t for name, t in fields.items() if name in form.fields()).shape[2] * form.block


def constants(
    key_format: Format, value_format: Format, plan: Plan, rotary: int = 0, has_bias: bool = False
) -> dict[str, Any]:
    """What the kernel is specialized on; ``rotary`` channels are rotated as keys are read (0: none)."""
    readers = readers_of(key_format, value_format, rotary)
    dim = key_format.head_dim
    named: dict[str, Any] = {"D": dim, "DP": power(dim), "M": plan.rows, "T": plan.tokens}
    named["KW"] = 2 * power(dim // 2) if rotary else power(readers[0].width)
    named["VW"] = power(readers[1].spec[0])
    named["V_OUT"] = readers[1].spec[0]
    named["K_GROUPS"] = readers[0].groups if readers[0].ordered else 1
    for letter, form, reader in zip("KV", (key_format, value_format), readers, strict=True):
        spec = reader.spec_of_halves() if rotary and letter == "K" else reader.spec
        named[f"{letter}_READ"], named[f"{letter}_SPEC"] = reader.read, static(spec)
        page = form if isinstance(form, Paged) else None
        named[f"{letter}_SCRATCH"] = reader.scratch(plan.tokens)
        named[f"{letter}_OF_PAGES"] = reader.of_pages
        named[f"{letter}_CENTRED"] = reader.centred
        named[f"{letter}_MEAN"] = page is not None and page.mean
        named[f"{letter}_NORM"] = page is not None and bool(page.norm)
        named[f"{letter}_BASIS"] = page is not None and page.basis is not None
    named["BY_HEAD"] = any(reader.by_head for reader in readers)
    if named["V_BASIS"]:
        named["V_OUT"] = dim
    return named | {"ROTARY": rotary, "HAS_BIAS": has_bias}


def readers_of(key_format: Format, value_format: Format, rotary: int) -> "list[Reader[Any]]":
    """Both sides' readers, as the kernel uses them."""
    from kvfold.kernels.generic.readers import reader_of

    keys, values = (reader_of(inner(form)) for form in (key_format, value_format))
    turned = is_turned(key_format)
    if turned and max(keys.width, values.width) <= 128:  # three programs hide what turning a query waits for
        keys.resident, keys.ahead = 3, False
    step = 16 * keys.groups
    keys.ordered = keys.groups > 1 and not (turned or key_format.head_dim % step or rotary % step)
    keys.eights = keys.ordered or not rotary or not (key_format.head_dim % 16 or rotary % 16)
    return [keys, values]


def resident(readers: "list[Reader[Any]]") -> int:
    """Programs of a multiprocessor at a time."""
    return min(reader.resident or 4 for reader in readers)


def most_tokens(readers: "list[Reader[Any]]") -> int:
    """Of a tile."""
    return min(reader.most_tokens or 128 for reader in readers)


def options(readers: "list[Reader[Any]]", warps: int) -> dict[str, int | None]:
    """What the kernel is compiled with."""
    registers = 65536 // (32 * warps * resident(readers)) // 8 * 8  # in eights, as a multiprocessor hands them out
    limited = registers < 255 and any(reader.resident for reader in readers)
    return {"num_warps": warps, "num_stages": stages(readers), "maxnreg": registers if limited else None}


def stages(readers: "list[Reader[Any]]") -> int:
    """Tiles that are loaded ahead of time."""
    return 3 if all(reader.ahead for reader in readers) else 1


def attend_packed(
    call: AttentionCall,
    span: Span,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    partials: "Partials",
    part: int,
    plan: Any,
    of: Packed | None = None,
) -> None:
    """Write partial results over one span to the parts ``part`` to ``part + plan.splits`` of ``partials``; see
    :func:`sum_packed`."""
    sums = sum_packed(call, span, packed, bias, partials, part, plan, of)
    unproject(call, sums, partials, part, part + plan.splits)


def sum_packed(
    call: AttentionCall,
    span: Span,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    partials: "Partials",
    part: int,
    plan: Any,
    of: Packed | None = None,
) -> torch.Tensor:
    """Partial results over one span, before ``call.unproject``: float32 [batch * num_kv_heads, parts, rows, width].

    The parts ``part`` to ``part + plan.splits`` are written, here and of the other fields of ``partials``.

    Parameters
    ----------
    packed : Tensor, float [batch, num_kv_heads, rows, width]
        Queries as decoded keys meet them: after RoPE also where keys are stored before it.
    bias : Tensor or None, float32 [batch, num_kv_heads, rows]
        Added to scores before ``call.scale``.
    plan : Plan, or what ``of`` made
    """
    batch, heads, rows, _ = packed.shape
    # codes whose sums another map turns into vectors, in a tensor of their own
    out = partials.out
    if call.unproject is not None:
        width = call.value_format.width if of is not None else _summed(call.value_format)
        out = torch.empty(batch * heads, partials.splits, rows, width, dtype=torch.float32, device=packed.device)
    if isinstance(plan, Plan):
        _launch(call, span, packed, bias, out, partials, part, plan)
    else:
        assert of is not None
        of.attend_packed(call, span, packed, out, partials.top, partials.total, part, plan)
    return out


def unproject(
    call: AttentionCall, out: torch.Tensor, partials: "Partials", part: int, stop: int, early: bool = False
) -> bool:
    """Turn what :func:`sum_packed` wrote into values, if they are not.

    ``early``, and what is returned: whether the next kernel may be launched before the end of the last one. That which turns is
    not: programs that wait lie on the few multiprocessors that others left, and work there.
    """
    if call.unproject is None:
        return early
    if isinstance(call.unproject, ValueRows) and out.shape[-1] == call.value_format.width:
        _turn(out, call.unproject.rows, partials, part, stop)
        return early
    sums = out[:, part:stop]
    if sums.shape[-1] < call.value_format.width:
        sums = torch.cat((sums, partials.total[:, part:stop].unsqueeze(-1)), -1)
    heads, splits, rows, _ = sums.shape
    turned = call.unproject(sums.unflatten(0, (-1, call.num_kv_heads)).flatten(2, 3))
    partials.out[:, part:stop] = turned.reshape(heads, splits, rows, -1)
    return False


def _turn(
    out: torch.Tensor, matrix: torch.Tensor, partials: "Partials", part: int, stop: int, early: bool = False
) -> None:
    """Turn sums, float32 [batch * heads, splits, rows, width], of some parts into values."""
    from kvfold.kernels.generic._turn import turn_kernel

    heads, splits, rows, width = out.shape
    count, dim = (stop - part) * rows, partials.out.shape[-1]
    pieces = dim & -dim
    n = min(32, pieces)
    turn_kernel[(heads, math.ceil(count / 16), dim // n)](
        out,
        matrix.contiguous(),
        partials.out,
        matrix.shape[0],
        count,
        splits * rows,
        part * rows,
        W=width,
        D=dim,
        M=16,
        N=n,
        K=64,
        PRECISION=TURNED,
        num_warps=4,
    )


def _summed(value_format: Format) -> int:
    """Numbers of a value that the kernels sum."""
    from kvfold.kernels.generic.readers import reader_of

    turned = isinstance(value_format, Paged) and value_format.basis is not None
    return value_format.head_dim if turned else int(reader_of(inner(value_format)).spec[0])


def _launch(
    call: AttentionCall,
    span: Span,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partials: "Partials",
    part: int,
    plan: Plan,
) -> None:
    """Write parts ``part`` and following of ``out``, and of the other fields of ``partials``."""
    from kvfold.kernels.common.partials import LOG2E
    from kvfold.kernels.generic._decode import blocks_kernel

    batch, heads, rows, _ = packed.shape
    device = packed.device
    sides = ((call.key_format, span.keys), (call.value_format, span.values))
    room = room_of(*sides)
    rotary = 0 if call.rope is None else 2 * call.rope.inv_freq.numel()
    readers = readers_of(call.key_format, call.value_format, rotary)
    fixed = constants(call.key_format, call.value_format, plan, rotary, bias is not None)
    nothing = partials.total  # stands for tensors that are never read
    arguments: list[Any] = []
    for i, ((form, fields), reader) in enumerate(zip(sides, readers, strict=True)):
        arguments += [
            reader.fields(fields),
            reader.tables(device),
            *_of_pages(form, fields, reader.width, device, nothing, i == 1),
        ]
    freq, table = nothing, nothing
    if call.rope is not None:
        rotation = rotation_of(call.rope, fixed["KW"] // 2, plan.tokens, fixed["K_GROUPS"], fixed["D"], device)
        freq, table = rotation.freq, rotation.table
    row_blocks = math.ceil(rows / plan.rows)
    words = (fixed["K_SCRATCH"] + fixed["V_SCRATCH"]) * batch * heads * row_blocks * plan.splits
    scratch = torch.empty(words, dtype=torch.int64, device=device)
    blocks_kernel[(batch * heads * row_blocks, plan.splits)](
        packed.float().contiguous(),
        nothing if bias is None else bias.float().contiguous(),
        *arguments,
        call.packed_len,
        call.packed_len if call.first_position is None else call.first_position,
        freq,
        table,
        out,
        partials.top,
        partials.total,
        scratch,
        float(call.scale) * LOG2E,
        heads,
        rows,
        row_blocks,
        span.start,
        _tokens(call.key_format, span.keys),
        room,
        pages_between(call.key_format, span.keys),
        pages_between(call.value_format, span.values),
        plan.splits,
        plan.processors,
        part,
        partials.splits,
        **fixed,
        **options(readers, plan.warps),
    )


def _of_pages(
    form: Format, fields: Fields, width: int, device: torch.device, nothing: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means, norms and basis, where a format has them."""
    if isinstance(form, PagedFormat):
        for name in form.page_fields():
            check_strides(name, fields[name], fields[name].stride(1) // fields[name].stride(2))
    if not isinstance(form, Paged):
        return nothing, nothing, nothing
    return (
        fields["mean"] if form.mean else nothing,
        fields["norm"] if form.norm else nothing,
        basis_of(form, width, device, back, nothing),
    )


def basis_of(form: Format, width: int, device: torch.device, back: bool, nothing: torch.Tensor) -> torch.Tensor:
    """What a side is turned with (:func:`~kvfold.kernels.stored.basis_matrix`), or ``nothing``."""
    if not isinstance(form, Paged) or form.basis is None:
        return nothing
    return basis_matrix(form.basis, width, device, back)
