"""Decode attention over 2-bit affine groups in plain order by a Gluon kernel: head sizes 80 and 96, keys before RoPE.

:mod:`kvfold.kernels.affine.tiles` asks :func:`declines` for each call, and serves what is declined itself.
"""

import math
from dataclasses import dataclass

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Format
from kvfold.formats.paged import PAGE
from kvfold.kernels.affine._row_major import plain_kernel, shared_bytes
from kvfold.kernels.call import AttentionCall, Span
from kvfold.kernels.common.partials import Partials, span_arguments
from kvfold.kernels.device import STATIC_SHARED, DeviceInfo, device_info, no_gpu
from kvfold.rope import Rope

"""Tokens that a query is rotated back for at once."""
MOST_ROWS = 16
"""Query rows of a KV head; each eight of them read all tokens."""
TURNED = frozenset({64, 96, 128})
"""Head sizes whose keys before RoPE a GPU has shown right."""


@dataclass(frozen=True)
class Plan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    warps : int
        Warps of a program.
    units : int
        Units of 32 tokens of a warp's stage.
    splits : int
        Parts of a span's tokens.
    registers : int
        Most registers of a thread.
    """

    warps: int
    units: int
    splits: int
    registers: int


def unsupported(key_format: Format, value_format: Format, rotary: int) -> str | None:
    """Why the kernel does not serve these formats; None if it does. ``rotary``: channels that are rotated as keys are read."""
    for name, form, axis in (("keys", key_format, "token"), ("values", value_format, "channel")):
        if not isinstance(form, AffineGroups) or form.operand != "plain":
            return f"{name}: {form.kind} storage; allowed: affine, in plain order"
        if form.bits_per_code != 2 or form.mode != "asym":
            return f"{name}: {form.bits_per_code} bits, mode={form.mode}; allowed: 2, asym"
        if form.axis != axis or form.block != 32:
            return f"{name}: groups along {form.axis}s in blocks of {form.block}; allowed: along {axis}s, 32"
        if form.head_dim % 16 or form.head_dim > 128:
            return f"{name}: head_dim={form.head_dim}; allowed: multiples of 16 up to 128"
        if form.group % 16 or (name == "keys" and form.group > 32):
            return f"{name}: group={form.group}; allowed: multiples of 16" + (" up to 32" if name == "keys" else "")
    if rotary and (rotary != key_format.head_dim or rotary % 32):
        return f"keys: RoPE of {rotary} of {key_format.head_dim} channels; allowed: all, a multiple of 32"
    return None


def declines(call: AttentionCall, rows: int, bias: torch.Tensor | None) -> str | None:
    """Why the kernel leaves a call to the plain Triton one; None if it does not."""
    if no_gpu(call.rows.device):
        return "needs a GPU of compute capability 8.0 or more"
    if rows > MOST_ROWS:
        return f"{rows} query rows of a KV head; allowed: up to {MOST_ROWS}"
    if bias is not None:
        return "scores with a bias"
    rotary = 0 if call.rope is None else 2 * call.rope.inv_freq.numel()
    if rotary and call.key_format.head_dim not in TURNED:
        return f"keys before RoPE at head_dim={call.key_format.head_dim}: not seen right on a GPU yet"
    return unsupported(call.key_format, call.value_format, rotary)


@lasting()
def make_plan(
    key_format: AffineGroups, value_format: AffineGroups, jobs: int, units: int, rotary: bool, device: DeviceInfo
) -> Plan:
    """Choose a launch shape for ``jobs`` KV heads (times blocks of query rows) and storage of ``units`` units."""
    registers = 168 if rotary else 128
    for warps, stage in ((4, 2), (4, 1), (2, 1)):
        size = program_bytes(key_format, value_format, stage, rotary, warps)
        if size <= STATIC_SHARED:
            break
    resident = max(1, min(device.threads(registers) // (32 * warps), device.programs(size)))
    pages = math.ceil(units / 4)

    def cost(n: int) -> float:
        """As in :func:`kvfold.kernels.affine.decode.make_plan`; starting and ending a program is worth 1.6 pages."""
        waves, rest = divmod(jobs * n, device.sms * resident)
        fill = math.ceil(rest / device.sms) / resident
        return (math.ceil(math.ceil(pages / n) / warps) + 1.6) * (waves + (max(9 / 16, fill**0.9) if rest else 0))

    splits = min(range(1, max(2, min(256, pages // warps + 2))), key=cost)
    return Plan(warps, stage, splits, registers)


def program_bytes(key_format: AffineGroups, value_format: AffineGroups, units: int, rotary: bool, warps: int) -> int:
    """Bytes of shared memory of a program."""
    return int(shared_bytes(key_format.head_dim, key_format.group, value_format.group, units, rotary, warps))


@lasting(64)
def turning(rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns per token of every pair of channels and what float32 leaves of them, float32 [2, 64]; half of RoPE's factor times
    cosines and sines of the places in a page, as operands: fp16 [token tiles, channel tiles, 2, 32, 8]."""
    freq = rope.inv_freq.double().cpu()
    turns = torch.zeros(64, dtype=torch.float64, device="cpu")
    turns[: freq.numel()] = freq / (2 * math.pi)
    parts = torch.stack((turns.float(), (turns - turns.float().double()).float()))
    angles = torch.arange(PAGE, dtype=torch.float64, device="cpu").unsqueeze(-1) * freq
    both = torch.stack((angles.cos(), angles.sin())) * (rope.scaling / 2)
    tiles = (
        both.half().unflatten(-1, (-1, 4, 2, 2)).unflatten(1, (8, 2, 8))
    )  # [which, tile, half, g, ct, t, half, pair]
    return parts.to(device), tiles.permute(1, 4, 0, 3, 5, 6, 2, 7).contiguous().to(device)


def plan_of(call: AttentionCall, units: int, rows: int) -> Plan:
    keys, values = call.key_format, call.value_format
    assert isinstance(keys, AffineGroups) and isinstance(values, AffineGroups)
    batch, heads = call.rows.shape[:2]
    jobs = batch * heads * math.ceil(rows / 8)
    return make_plan(keys, values, jobs, units, call.rope is not None, device_info(call.rows.device))


def attend_packed(
    call: AttentionCall,
    span: Span,
    packed: torch.Tensor,
    arrays: list[torch.Tensor],
    units: int,
    room: int,
    partials: Partials,
    part: int,
    plan: Plan,
) -> None:
    """Write partial results over one span to the parts ``part`` to ``part + plan.splits`` of ``partials``.

    Parameters
    ----------
    packed : Tensor, float [batch, num_kv_heads, rows, head_dim]
    arrays : list of Tensor
        Codes and metadata of keys, and of values.
    units, room : int
        Units of 32 tokens of the span; those from one KV head's storage to the next's.
    """
    batch, heads, rows, _ = packed.shape
    nothing = partials.total  # stands for tensors that are never read
    turns = (nothing, nothing) if call.rope is None else turning(call.rope, packed.device)
    blocks = math.ceil(rows / 8)
    plain_kernel[(batch * heads * blocks, plan.splits)](
        packed.contiguous(),
        *arrays,
        *span_arguments(call, span, turns, partials, part, plan.splits, (rows, blocks), (units, room)),
        **constants(call.key_format, call.value_format, plan, call.rope is not None),
        num_warps=plan.warps,
        maxnreg=plan.registers,
    )


def constants(key_format: Format, value_format: Format, plan: Plan, rotary: bool) -> dict[str, int | bool]:
    """What the kernel is specialized on."""
    assert isinstance(key_format, AffineGroups) and isinstance(value_format, AffineGroups)
    return {
        "D": key_format.head_dim,
        "K_GROUP": key_format.group,
        "V_GROUP": value_format.group,
        "UNITS": plan.units,
        "ROTARY": rotary,
    }
