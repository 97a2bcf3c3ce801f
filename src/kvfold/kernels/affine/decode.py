"""Decode attention over packed affine groups on the GPU: one pass over sink, packed and recent tokens, and a merge."""

import math
from dataclasses import dataclass, replace

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Format
from kvfold.kernels.affine._codes import meta_bytes
from kvfold.kernels.affine._decode import decode_kernel
from kvfold.kernels.call import Span, Windows
from kvfold.kernels.common import spans as over
from kvfold.kernels.common._codes import code_bytes
from kvfold.kernels.common.partials import Partials, early_launch
from kvfold.kernels.common.windows import attend_windows
from kvfold.kernels.device import STATIC_SHARED, DeviceInfo, device_info

MODES = {"asym": 0, "sym": 1, "hybrid": 2}
"""Query tokens that may lie in the windows already."""
LEFT = 8 * 1024
"""Bytes of shared memory of a multiprocessor that programs are not counted on."""
LONG_ROWS = 64
"""Query rows per KV head beyond which the warps of a program share what they read."""
WORKSPACE = 64 << 20
"""Bytes of partial results up to which the queries of a long call are taken at once."""


def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why the kernel cannot read these formats; None if it can."""
    for name, form in (("keys", key_format), ("values", value_format)):
        if not isinstance(form, AffineGroups):
            return f"{name}: {form.kind} storage"
        if form.head_dim not in (64, 128, 256):
            return f"{name}: head_dim={form.head_dim}; allowed: 64, 128, 256"
        if form.group % 32 or form.group > 128:
            return f"{name}: group={form.group}; allowed: 32, 64, 128"
        on_operand = (form.axis == "token") == (name == "keys")
        if on_operand and form.mode != "asym":
            return f"{name}: mode={form.mode} with groups along {form.axis}s; allowed: asym"
        if form.mode != "asym" and form.group != 32:
            return f"{name}: group={form.group} in mode {form.mode}; allowed: 32"
        if name == "values" and form.axis == "token" and form.group != 32:
            return f"values: group={form.group} along tokens; allowed: 32"
        if form.operand != name[:-1]:  # after what makes a layer be stored in another order, so that reports name that
            return f"{name}: operand={form.operand}; allowed: {name[:-1]}"
    assert isinstance(key_format, AffineGroups) and isinstance(value_format, AffineGroups)
    if (
        key_format.axis == value_format.axis
    ):  # its numbers were compared with the reference for a method's own pairs only
        return f"groups along {key_format.axis}s of keys and of values; allowed: along one's channels and the other's tokens"
    if key_format.mode != value_format.mode:
        return f"modes {key_format.mode} of keys and {value_format.mode} of values; allowed: the same"
    return None


def _stage_bytes(form: AffineGroups) -> int:
    """Bytes of 32 tokens in a warp's stage."""
    axis = int(form.axis == "channel")
    return code_bytes(form.head_dim, form.bits_per_code) + sum(
        meta_bytes(form.head_dim, axis, MODES[form.mode], form.group)
    )


@dataclass(frozen=True)
class Plan:
    """Launch shape of one layer's decode attention; depends on shapes only, never on lengths.

    Attributes
    ----------
    warps : int
        Warps per program.
    blocks : int
        Blocks of 32 tokens in a warp's stage.
    tiles : int
        Tiles of 8 query rows per program, or per warp where ``shared``.
    columns : int
        Programs that share the bytes of a KV head.
    splits, dense_splits : int
        Parts of the packed tokens; parts of the windows' slots.
    center : bool
        Keep the rounding of scaled queries out of a block's common score (keys in groups of tokens). Short vectors need it;
        longer ones average the error out and need the registers.
    registers : int or None
        Most registers of a thread; None leaves it to the compiler.
    shared : bool
        The warps of a program read the same tokens for query rows of their own: for calls of many rows.
    bytewise : int
        Products of bytes: sets of four query rows, which are eight columns (of pages 1 or 2, of fragments 1); 0: of halves.
    ahead : bool
        The matrix that queries go through comes nearer while the kernel before still runs (fragments alone).
    windows_first : bool
        The programs for the windows are launched first (pages alone).
    wide : bool
        The matrix that queries go through lies in shared memory, and four warps multiply with it together (fragments alone).
    window_heads : int
        KV heads whose windows a program attends to, one after the other; 0: a program for packed tokens attends to a part of
        its own head's windows as well, and there are none for windows alone (fragments alone).
    """

    warps: int
    blocks: int
    tiles: int
    columns: int
    splits: int
    dense_splits: int
    center: bool = False
    registers: int | None = None
    shared: bool = False
    bytewise: int = 0
    ahead: bool = False
    windows_first: bool = False
    wide: bool = False
    window_heads: int = 1

    def cap(self, has_bias: bool) -> int | None:
        """``registers``, unless a bias needs the few that the cap leaves."""
        return None if has_bias and self.registers == 168 else self.registers


def _on_operand(key_format: AffineGroups, value_format: AffineGroups) -> bool:
    return key_format.axis == "token" and value_format.axis == "channel"


def _resident(key_format: AffineGroups, value_format: AffineGroups, warps: int, blocks: int, device: DeviceInfo) -> int:
    """Programs that a multiprocessor holds at once: registers (as compiled for sm_90) and shared memory decide."""
    size = _stage_bytes(key_format) + _stage_bytes(value_format)
    by_dim = {64: 16, 128: 16 if _on_operand(key_format, value_format) else 12, 256: 8}  # warps
    if blocks > 2 and key_format.head_dim == 128:
        by_dim[128] -= 4
    return max(
        1,
        min(
            by_dim[key_format.head_dim] // warps, (device.shared_memory_per_sm - LEFT) // (warps * blocks * size + 1024)
        ),
    )


@lasting()
def make_plan(
    key_format: AffineGroups,
    value_format: AffineGroups,
    batch_heads: int,
    rows: int,
    capacity: int,
    window_slots: int,
    device: DeviceInfo,
    splits: int | None = None,
) -> Plan:
    """Choose a launch shape.

    Parameters
    ----------
    batch_heads : int
        Sequences times KV heads.
    rows : int
        Query rows per KV head: query heads of it times query tokens.
    capacity : int
        Blocks of 32 tokens that the packed storage of a sequence can hold.
    window_slots : int
        Slots of the sink and recent windows.
    """
    dim = key_format.head_dim
    tiles = 2 if rows > 8 and dim <= 128 else 1
    columns = math.ceil(rows / (8 * tiles))
    size = _stage_bytes(key_format) + _stage_bytes(value_format)
    fitting = [n for n in (4, 2, 1) if 4 * n * size <= STATIC_SHARED]
    warps, blocks = (4, fitting[0]) if fitting else (2, 1)
    jobs = batch_heads * columns
    # short sequences, and enough of them: a warp takes one whole, and has no other to meet
    alone = splits is None and capacity <= 64 and jobs >= 12 * device.sms
    if alone:
        warps, splits = 1, 1
    # next to long packed parts, or many programs, there is time for several tiles of a window
    each = 12 if alone else 3 if capacity >= 512 or 4 * jobs >= device.sms else 1
    dense_splits = math.ceil(window_slots / (16 * warps * each))
    registers = None
    if splits is None:
        resident = _resident(key_format, value_format, warps, blocks, device)
        least = min(1.0, 9 / (resident * warps))  # nine warps of a multiprocessor already keep HBM busy

        def cost(n: int) -> float:
            """Time in stages, a model fitted to measurements: starting and ending a program is worth 1.6 of them, and a wave
            that does not fill the GPU is faster."""
            stages = math.ceil(math.ceil(capacity / n / warps) / blocks) + 1.6
            waves, rest = divmod(jobs * n, device.sms * resident)
            fill = math.ceil(rest / device.sms) / resident  # multiprocessors get whole programs
            return stages * (waves + (max(least, fill**0.9) if rest else 0))

        splits = min(range(1, max(2, min(256, capacity // (warps * blocks) + 2))), key=cost)
        if blocks == 4 and capacity <= 12 * splits * warps:
            blocks = 2  # few stages: start computing earlier
            registers = 168 if dim == 128 and tiles == 1 else None  # three programs of four warps
    center = key_format.axis == "token" and dim == 64
    if warps > 1 and tiles == 1:
        registers = _cap(key_format, value_format) or registers
    return Plan(warps, blocks, tiles, columns, splits, dense_splits, center, registers)


def _cap(key_format: AffineGroups, value_format: AffineGroups) -> int | None:
    """Most registers of a thread, where the compiler's own choice costs more warps than it gains; as measured on an H200."""
    dim, bits, mode = key_format.head_dim, key_format.bits_per_code, key_format.mode
    on_operand = _on_operand(key_format, value_format)
    if (
        dim == 128 and on_operand and bits in (4, 8)
    ):  # the compiler takes 128 or 129, and 129 cost a quarter of the warps
        return 128
    if dim == 128 and mode == "hybrid" and bits in (2, 4):
        return 168
    if dim == 64 and mode == "asym" and bits in (2, 4):
        return 128
    if dim == 64 and ((on_operand and bits == 1) or (mode != "asym" and bits == 2)):
        return 168
    return None


@lasting()
def make_long_plan(
    key_format: AffineGroups,
    value_format: AffineGroups,
    batch_heads: int,
    rows: int,
    capacity: int,
    device: DeviceInfo,
) -> Plan:
    """Choose a launch shape for calls of many tokens: parameters as for :func:`make_plan`.

    The warps of a program share each stage and take 16 query rows each (8 at ``head_dim`` 256). There are as many splits as
    fill the GPU once, each of at least a dozen stages.
    """
    if rows <= LONG_ROWS:
        return make_plan(key_format, value_format, batch_heads, rows, capacity, 0, device)
    dim = key_format.head_dim
    tiles = 2 if dim <= 128 else 1
    size = _stage_bytes(key_format) + _stage_bytes(value_format)

    def fits(warps: int, blocks: int) -> bool:  # two stages and the queries
        return 2 * blocks * size + 16 * warps * tiles * dim <= STATIC_SHARED

    roomy = dim == 64 or (dim == 128 and key_format.bits_per_code == 2)  # elsewhere more blocks would spill
    shapes = [(4, 4)] if _on_operand(key_format, value_format) and roomy else []
    warps, blocks = next(shape for shape in [*shapes, (4, 2), (4, 1), (2, 1)] if fits(*shape))
    columns = math.ceil(rows / (8 * tiles * warps))
    splits = max(1, min(device.sms * 8 // warps // (batch_heads * columns), capacity // (12 * blocks)))
    return Plan(warps, blocks, tiles, columns, splits, 0, key_format.axis == "token" and dim == 64, None, True)


def decode_attention(
    q: torch.Tensor,
    key_format: AffineGroups,
    value_format: AffineGroups,
    spans: list[Span],
    windows: Windows,
    scale: float,
    packed_q: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest tokens of every sequence over sink, packed and recent tokens.

    Nothing depends on a value on the host: no synchronization, fit for capture in a CUDA graph. Unused storage may hold
    anything.

    Parameters
    ----------
    q : Tensor [batch, num_heads, tokens, head_dim]
        Queries of the newest ``tokens`` (1 to 16) tokens, which already lie in the windows; fp16, bf16 or fp32. Query heads
        of a KV head are adjacent.
    spans : list of Span, at least one
        Packed storage; see :func:`attend_packed`. Every query token sees every packed token.
    windows : Windows
        In fp16 or bf16. ``packed_len`` is a multiple of 32.
    scale : float
        Of the scores, natural units.
    packed_q : Tensor or None, like q
        The queries as packed keys meet them, where that differs from ``q``.
    bias : Tensor or None, float32 [batch, num_heads, tokens]
        Added to the scores of packed tokens before ``scale``.
    out : Tensor or None
        Result, like ``q``; allocated if None.
    plan : Plan or None
        Launch shape of the first span; chosen from the shapes if None.
    sinks : Tensor or None, float [num_heads]
        Learned sinks; see :class:`kvfold.kernels.AttentionCall`.

    Returns
    -------
    Tensor, like q
    """
    jobs, rows, slots = over.sizes(q, windows)
    device = device_info(q.device)
    plans = [make_plan(key_format, value_format, jobs, rows, unit_capacity(s), slots, device) for s in spans]
    plans[0] = plan or plans[0]
    plans[1:] = [replace(p, dense_splits=0) for p in plans[1:]]  # the first launch takes the windows
    q = q.contiguous()
    packed_q = q if packed_q is None else packed_q.contiguous()
    bias = None if bias is None else bias.contiguous()

    def launch(span: Span, partials: Partials, part: int, plan: Plan, early: bool) -> None:
        _launch(q, packed_q, bias, key_format, value_format, span, windows, scale, partials, part, plan, early)

    return over.attend(q, windows, spans, plans, launch, over.parts, out, sinks)


def long_attention(
    q: torch.Tensor,
    key_format: AffineGroups,
    value_format: AffineGroups,
    spans: list[Span],
    windows: Windows,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    new_valid: torch.Tensor | None,
    scale: float,
    packed_q: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    plan: Plan | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of any number of new tokens, with padding or without, over everything cached and over themselves.

    Packed bytes are unpacked in registers; the workspace grows with the call's tokens up to :data:`WORKSPACE`, beyond which
    queries are taken in pieces, and never with the context. Nothing depends on a value on the host.

    Parameters
    ----------
    q, packed_q, bias, spans, windows, scale, sinks
        As for :func:`decode_attention`, but for any number of tokens, which are not in the windows; ``q`` in the windows'
        dtype; ``spans`` may be empty.
    new_keys, new_values, new_valid
        As for :func:`kvfold.kernels.common.windows.attend_windows`.
    plan : Plan or None
        Launch shape for every span and piece of the call; chosen from the shapes if None.

    Returns
    -------
    Tensor, like q
    """
    batch, num_heads, tokens, dim = q.shape
    heads = windows.sink[0].shape[1]
    outs, device = [], device_info(q.device)
    step = _piece(batch * num_heads * dim, len(spans), tokens)
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        piece = q[:, :, part].contiguous()
        rows = num_heads // heads * piece.shape[2]
        plans = [
            plan or make_long_plan(key_format, value_format, batch * heads, rows, unit_capacity(s), device)
            for s in spans
        ]
        partials = Partials.empty(batch * heads, 1 + sum(p.splits for p in plans), rows, dim, q.device)
        packed_piece = piece if packed_q is None else packed_q[:, :, part].contiguous()
        bias_piece = None if bias is None else bias[:, :, part].contiguous()
        at = 1
        for each, span in zip(plans, spans, strict=True):
            _launch(
                piece, packed_piece, bias_piece, key_format, value_format, span, windows, scale, partials, at, each, False
            )  # fmt: skip
            at += each.splits
        attend_windows(piece, windows, scale, partials, 0, new_keys, new_values, new_valid, first)
        outs.append(partials.merge(torch.empty_like(piece), False, sinks, piece.shape[2]))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _piece(elements: int, spans: int, tokens: int) -> int:
    """Query tokens to take at once, ``elements`` of one of them: as equal pieces as the workspace allows."""
    most = max(over.MAX_TOKENS, WORKSPACE // (4 * elements * (spans + 1)))
    pieces = math.ceil(tokens / most)
    return min(tokens, -(-math.ceil(tokens / pieces) // 64) * 64)


def unit_capacity(span: Span) -> int:
    """Blocks of 32 tokens from one KV head's storage to the next one's."""
    codes = span.keys["codes"]
    return codes.stride(1) // codes.stride(2) * codes.shape[3]


def _names(form: AffineGroups) -> tuple[str, str, str]:
    """Codes, scales and sign words; without a third field the first stands for it."""
    return ("codes", "meta", "codes") if form.mode == "asym" else ("codes", "scale", "aux")


def _launch(
    q: torch.Tensor,
    packed_q: torch.Tensor,
    bias: torch.Tensor | None,
    key_format: AffineGroups,
    value_format: AffineGroups,
    span: Span,
    windows: Windows,
    scale: float,
    partials: Partials,
    part: int,
    plan: Plan,
    early: bool,
) -> None:
    """Write partial results of one span (and, if planned, of the windows) to parts ``part`` and following."""
    decode_kernel[(partials.out.shape[0] * plan.columns, plan.splits + plan.dense_splits)](
        q,
        packed_q,
        q if bias is None else bias,
        *over.slab_fields(span.keys, _names(key_format)),
        *over.slab_fields(span.values, _names(value_format)),
        *over.arguments(windows, partials, part, plan, span, scale, q.shape[2], [unit_capacity(span)]),
        **constants(key_format, value_format, plan, windows.ring[0].dtype == torch.bfloat16, bias is not None, early),
        num_warps=plan.warps,
        maxnreg=plan.cap(bias is not None),
        **early_launch(early),
    )


def constants(
    key_format: AffineGroups, value_format: AffineGroups, plan: Plan, bf16: bool, has_bias: bool, early: bool
) -> dict[str, int | bool]:
    """What the kernel is specialized on."""
    named: dict[str, int | bool] = {"D": key_format.head_dim}
    for letter, form in (("K", key_format), ("V", value_format)):
        named |= {
            f"{letter}_BITS": form.bits_per_code,
            f"{letter}_AXIS": int(form.axis == "channel"),
            f"{letter}_MODE": MODES[form.mode],
            f"{letter}_GROUP": form.group,
        }
    return named | {
        "NT": plan.tiles,
        "NB": plan.blocks,
        "BF16": bf16,
        "HAS_BIAS": has_bias,
        "CENTER": plan.center,
        "EARLY": early,
        "SHARED": plan.shared,
    }
