"""A choice of the registry for what the fused kernels refuse: plain Triton over affine groups in plain order.

Head sizes that are no power of two, any group size, blocks of any length, and keys that are stored before RoPE.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Fields, Format
from kvfold.kernels.base import GPUKernel
from kvfold.kernels.call import AttentionCall, Span, Windows
from kvfold.kernels.device import device_info, no_triton
from kvfold.rope import Rope

if TYPE_CHECKING:
    from kvfold.kernels.affine import row_major as plain
    from kvfold.kernels.common.partials import Partials

MODES = {"asym": 0, "sym": 1, "hybrid": 2}
MAX_DIM = 256
WORKSPACE = 64 << 20
"""Bytes of partial results up to which the queries of a long call are taken at once."""
FEW_ROWS = 32
"""Query rows up to which programs are single warps, with 8 or 16 rows each; from there on they have :data:`MANY_ROWS`."""
MANY_ROWS = 64
WIDE = 64
"""Least channels of a piece in programs of many rows (of half a head, where keys are rotated, half as many): for sm_90 Triton
3.6 makes warpgroup MMAs of their products, and those of 64 channels followed by 16 or 32 gave wrong numbers on an H200."""


class TilesKernel(GPUKernel):
    """Affine groups in plain order on NVIDIA GPUs (sm_80 and later); calls of any length, with padding or without.

    Decoded tiles are fp16, so layers of float32 models are left to the reference kernel. Calls of more than 16 tokens unpack
    bounded pieces to 16 bits for the platform's flash attention.
    """

    name = "triton"

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        return no_triton(device) or unsupported(key_format, value_format, pre_rope)

    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        return attend(call)


def unsupported(key_format: Format, value_format: Format, pre_rope: bool) -> str | None:
    """Why the kernel cannot read these formats; None if it can."""
    for side, form in (("keys", key_format), ("values", value_format)):
        if not isinstance(form, AffineGroups):
            return f"{side}: {form.kind} storage; allowed: affine"
        if form.operand != "plain":
            return f"{side}: packed for tensor cores"
        if form.head_dim > MAX_DIM:
            return f"{side}: head_dim={form.head_dim}; allowed: up to {MAX_DIM}"
        if form.group & (form.group - 1):
            return f"{side}: group={form.group}; allowed: powers of two"
    if pre_rope and isinstance(key_format, AffineGroups) and key_format.axis != "token":
        return "keys: stored before RoPE in groups along channels; allowed: along tokens"
    return None


TURNED = 4
"""Tiles that a query is rotated back for at once."""


@dataclass(frozen=True)
class Plan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    rows : int
        Query rows of a program.
    units : int
        Units of 32 tokens in a tile.
    warps, stages : int
        Warps of a program, and stages of its loop (1: the loads of a tile wait for the tile before).
    splits : int
        Parts of a span's tokens.
    ahead : bool
        The next tile comes to the first cache while one is computed.
    """

    rows: int
    units: int
    warps: int
    stages: int
    splits: int
    ahead: bool = False


@lasting()
def make_plan(head_dim: int, heads: int, rows: int, units: int, rotary: bool, multiprocessors: int) -> Plan:
    """Choose a launch shape.

    Parameters
    ----------
    heads : int
        KV heads of all sequences.
    rows : int
        Query rows per KV head.
    units : int
        Units of 32 tokens that the storage holds.
    """
    if rows <= FEW_ROWS:  # a warp per program: more would exchange their tiles through shared memory
        m = 8 if rows <= 8 or rotary or head_dim > 128 else 16  # more would not fit in registers
        n, warps, resident = 1, 1, 8 if rotary else 12
    else:
        m = MANY_ROWS
        n, warps, resident = (2, 8, 1) if rotary or head_dim > 128 else (2, 4, 3)
    jobs = heads * math.ceil(rows / m)
    splits = max(1, min(multiprocessors * resident // jobs, units // (2 * n), 256))
    return Plan(m, n, warps, 1, splits, rows <= FEW_ROWS)


def pieces(head_dim: int, least: int = 16) -> tuple[int, int]:
    """Powers of two, at least ``least``, the second one or 0, that hold all channels."""
    whole = max(least, 1 << (head_dim.bit_length() - 1))
    rest = max(head_dim - whole, 0)
    return whole, rest and max(least, 1 << (rest - 1).bit_length())


def constants(
    key_format: AffineGroups, value_format: AffineGroups, plan: Plan, rotary: int, has_bias: bool
) -> dict[str, int | bool]:
    """What the kernel is specialized on; ``rotary`` channels are rotated as keys are read (0: none)."""
    dim = key_format.head_dim
    few = plan.rows < MANY_ROWS
    low, high = pieces(dim, 16 if few else WIDE)
    named: dict[str, int | bool] = {"D": dim, "VA": low, "VB": high, "KA": low, "KB": high, "K_SPLIT": low, "HINT": 16}
    if rotary:
        half = max(16 if few else WIDE // 2, 1 << (dim // 2 - 1).bit_length())
        named |= {"KA": half, "KB": half, "HINT": math.gcd(16, rotary // 2, (dim - rotary) // 2)}
    for letter, form in (("K", key_format), ("V", value_format)):
        named |= {
            f"{letter}_BITS": form.bits_per_code,
            f"{letter}_AXIS": int(form.axis == "channel"),
            f"{letter}_MODE": MODES[form.mode],
            f"{letter}_GROUP": form.group,
        }
    sizes = {
        "M": plan.rows,
        "UNITS": plan.units,
        "FLIP": few,
        "STAGES": plan.stages,
        "AHEAD": plan.ahead,
        "TURNED": TURNED,
    }
    return named | sizes | {"ROTARY": rotary, "HAS_BIAS": has_bias}


@dataclass(frozen=True)
class Rotation:
    """Constants of a model's RoPE, pair by pair; pairs that are not rotated, and padding, have frequency 0.

    Attributes
    ----------
    freq : Tensor, float32 [3, pairs]
        Turns per position, what float32 leaves of them, and factors of rotated pairs.
    table : Tensor, float16 [2, tokens, pairs]
        Cosines and sines of the angles of as many positions.
    """

    freq: torch.Tensor
    table: torch.Tensor


@lasting(64)
def _rotation(rope: Rope, pairs: int, tokens: int, device: torch.device) -> Rotation:
    freq = torch.zeros(pairs, dtype=torch.float64, device="cpu")
    gain = torch.ones(pairs, dtype=torch.float64, device="cpu")
    count = rope.inv_freq.numel()
    freq[:count], gain[:count] = rope.inv_freq.cpu().double(), rope.scaling
    angles = torch.arange(tokens, dtype=torch.float64, device="cpu").unsqueeze(-1) * freq
    table = torch.stack((angles.cos(), angles.sin()))
    turns = freq / (2 * math.pi)
    rest = turns - turns.float().double()
    return Rotation(torch.stack((turns, rest, gain)).float().to(device), table.half().contiguous().to(device))


def attend(call: AttentionCall, plan: Plan | None = None) -> torch.Tensor:
    """Attention over packed spans, windows and new tokens; see :class:`AttentionCall`.

    Nothing depends on a value on the host. Beyond the output a call needs partial results of its query rows, at most
    :data:`WORKSPACE` bytes of them at a time.

    Parameters
    ----------
    plan : Plan or None
        Launch shape for every span; chosen from the shapes if None.

    Returns
    -------
    Tensor, float32 [batch, num_heads, tokens, head_dim]
    """
    batch, heads, rows, dim = call.rows.shape
    tokens = call.tokens
    projected, shift = call.projected if call.spans else (None, None)
    most = max(1, WORKSPACE // (4 * batch * heads * (rows // tokens) * dim * (len(call.spans) + 1)))
    if tokens <= most:
        return call.ungrouped(_attend(call, call.rows, projected, shift, tokens, 0, plan))
    out = torch.empty(batch, heads, rows // tokens, tokens, dim, dtype=torch.float32, device=call.rows.device)

    def cut(x: torch.Tensor | None, part: slice) -> torch.Tensor | None:
        return None if x is None else x.unflatten(2, (-1, tokens))[:, :, :, part].flatten(2, 3)

    for first in range(0, tokens, most):
        part = slice(first, min(first + most, tokens))
        rows_of, packed, bias = (cut(x, part) for x in (call.rows, projected, shift))
        assert rows_of is not None
        piece = _attend(call, rows_of, packed, bias, part.stop - first, first, plan)
        out[:, :, :, part] = piece.unflatten(2, (rows // tokens, -1))
    return out.flatten(1, 2)


def _attend(
    call: AttentionCall,
    rows: torch.Tensor,
    packed: torch.Tensor | None,
    bias: torch.Tensor | None,
    tokens: int,
    first: int,
    plan: "Plan | plain.Plan | None",
) -> torch.Tensor:
    """Attention of the query tokens ``first`` to ``first + tokens`` of a call."""
    from kvfold.kernels.common.partials import Partials
    from kvfold.kernels.common.windows import attend_windows

    windows, new = call.windows, call.new
    assert isinstance(windows, Windows)
    batch, heads, count, dim = rows.shape
    plans = [plan or _plan(call, span, count, bias) for span in call.spans]
    partials = Partials.empty(batch * heads, 1 + sum(p.splits for p in plans), count, dim, rows.device)
    at = 1
    for each, span in zip(plans, call.spans, strict=True):
        assert packed is not None
        attend_packed(call, span, packed, bias, partials, at, each)
        at += each.splits
    if call.unproject is not None and call.spans:
        sums = partials.out[:, 1:].unflatten(0, (batch, heads)).flatten(2, 3)
        partials.out[:, 1:] = call.unproject(sums).view(batch * heads, at - 1, count, dim)
    attend_windows(
        rows.unflatten(2, (-1, tokens)).flatten(1, 2).to(windows.ring[0].dtype).contiguous(),
        windows,
        call.scale,
        partials,
        0,
        None if new is None else new.keys,
        None if new is None else new.values,
        None if new is None else new.valid,
        first,
    )
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return partials.merge(out, False, call.sinks, tokens)


def _plan(call: AttentionCall, span: Span, rows: int, bias: torch.Tensor | None) -> "Plan | plain.Plan":
    from kvfold.kernels.affine import row_major as plain

    batch, heads, _, dim = call.rows.shape
    units = _units(span)
    if plain.declines(call, rows, bias) is None:
        return plain.plan_of(call, units, rows)
    return make_plan(dim, batch * heads, rows, units, call.rope is not None, device_info(call.rows.device).sms)


def _units(span: Span) -> int:
    """Units of 32 tokens of a span."""
    codes = span.keys["codes"]
    return codes.shape[2] * codes.shape[3]


def attend_packed(
    call: AttentionCall,
    span: Span,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    partials: "Partials",
    part: int,
    plan: "Plan | plain.Plan",
) -> None:
    """Write partial results over one span to the parts ``part`` to ``part + plan.splits`` of ``partials``.

    Parameters
    ----------
    packed : Tensor, float [batch, num_kv_heads, rows, head_dim]
        Queries as decoded keys meet them: after RoPE also where keys are stored before it.
    bias : Tensor or None, float32 [batch, num_kv_heads, rows]
        Added to scores before ``call.scale``.
    """
    from kvfold.kernels.affine._tiles import tiles_kernel
    from kvfold.kernels.common.partials import span_arguments

    key_format, value_format = call.key_format, call.value_format
    assert isinstance(key_format, AffineGroups) and isinstance(value_format, AffineGroups)
    batch, heads, rows, _ = packed.shape
    keys, room = _arrays(key_format, span.keys)
    values, room_v = _arrays(value_format, span.values)
    assert room == room_v
    if not isinstance(plan, Plan):
        from kvfold.kernels.affine import row_major as plain

        arrays = [*keys[:2], *values[:2]]
        return plain.attend_packed(call, span, packed, arrays, _units(span), room, partials, part, plan)
    rotary = 0 if call.rope is None else 2 * call.rope.inv_freq.numel()
    fixed = constants(key_format, value_format, plan, rotary, bias is not None)
    nothing = partials.total  # stands for tensors that are never read
    turns = (nothing, nothing)
    if call.rope is not None:
        rotation = _rotation(call.rope, fixed["KA"], 32 * plan.units * fixed["TURNED"], packed.device)
        turns = (rotation.freq, rotation.table)
    blocks = math.ceil(rows / plan.rows)
    tiles_kernel[(batch * heads * blocks, plan.splits)](
        packed.contiguous(),
        nothing if bias is None else bias.float().contiguous(),
        *keys,
        *values,
        *span_arguments(call, span, turns, partials, part, plan.splits, (rows, blocks), (_units(span), room)),
        **fixed,
        num_warps=plan.warps,
    )


def _arrays(form: AffineGroups, fields: Fields) -> tuple[list[torch.Tensor], int]:
    """Codes as bytes, scales (and zero-points), sign words; and the units from one KV head's storage to the next's."""
    names = ("codes", "meta", "meta") if form.mode == "asym" else ("codes", "scale", "aux")
    codes = fields["codes"]
    room = codes.stride(1) // codes.stride(2) * codes.shape[3]
    for name in names:
        x = fields[name]
        inner = x[0, 0, 0].numel()
        if (
            x.stride(1) * codes.shape[3] != room * inner
            or x.stride(2) != inner
            or x.stride(0) != x.shape[1] * x.stride(1)
        ):
            raise ValueError(
                f"packed storage: {name} has strides {x.stride()} of {tuple(x.shape)}, not those of a slab"
            )
    return [codes.view(torch.uint8), *(fields[name] for name in names[1:])], room
