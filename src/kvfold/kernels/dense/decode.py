"""Attention over vectors that are stored as they are (``none``): split over tokens, read once for all queries of a KV head."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Dense, Format
from kvfold.kernels.base import GPUKernel
from kvfold.kernels.call import AttentionCall, Span, Windows
from kvfold.kernels.device import DeviceInfo, device_info, no_triton

if TYPE_CHECKING:
    from kvfold.kernels.common.partials import Partials

MAX_DIM = 256
FEW_ROWS = 16
"""Query rows up to which a program takes all of a KV head's; the least that tensor cores multiply."""
LONG = 64
"""Query tokens from which on the platform's flash attention reads packed storage, if it can."""
WORKSPACE = 64 << 20
"""Bytes of partial results up to which the queries of a long call are taken at once."""
OTHERS = 9 << 10
"""Bytes of shared memory that a program of few rows has beside its tiles."""
START = 3
"""What starting and ending a program is worth, in tiles."""


class DenseKernel(GPUKernel):
    """Vectors as they are, in 16 bits, on NVIDIA GPUs (sm_80 and later); calls of any length, with padding or without.

    Calls of many tokens by sequences of one length read packed storage with the platform's flash attention.
    """

    name = "dense"
    unpacks_from = LONG

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        if why := no_triton(device):
            return why
        return "keys are stored before RoPE" if pre_rope else unsupported(key_format, value_format)

    def read_packed(self, call: AttentionCall) -> torch.Tensor:
        return attend(call)


def unsupported(key_format: Format, value_format: Format) -> str | None:
    """Why the kernel cannot read these formats; None if it can."""
    for side, form in (("keys", key_format), ("values", value_format)):
        if not isinstance(form, Dense):
            return f"{side}: {form.kind} storage; allowed: dense"
        if form.dtype not in (torch.float16, torch.bfloat16):
            return f"{side}: stored in {str(form.dtype).removeprefix('torch.')}; allowed: float16, bfloat16"
        if form.head_dim % 16 or form.head_dim > MAX_DIM:
            return f"{side}: head_dim={form.head_dim}; allowed: multiples of 16 up to {MAX_DIM}"
    assert isinstance(key_format, Dense) and isinstance(value_format, Dense)
    if (key_format.dtype, key_format.head_dim) != (value_format.dtype, value_format.head_dim):
        return "keys and values are stored in different shapes or dtypes"
    return None


@dataclass(frozen=True)
class Plan:
    """Launch shape; depends on shapes only, never on lengths.

    Attributes
    ----------
    rows, tokens : int
        Query rows of a program, and tokens of a tile.
    warps, stages : int
        Warps of a program, and tiles on their way at once.
    splits : int
        Parts of a span's tokens.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    splits: int


@lasting(1024)
def make_plan(head_dim: int, heads: int, rows: int, held: int, device: DeviceInfo) -> Plan:
    """Choose a launch shape.

    Parameters
    ----------
    heads : int
        KV heads of all sequences.
    rows : int
        Query rows per KV head.
    held : int
        Tokens that the storage holds.
    """
    from kvfold.kernels.common.windows import stages, tile_sizes

    m, n, warps = tile_sizes(rows, head_dim)
    depth, padded = stages(head_dim, device.shared_memory), _padded(head_dim)
    depth = max(depth, 2) if m == FEW_ROWS else depth
    tile = 4 * n * padded  # bytes of keys and values
    resident = max(1, min(4, device.shared_memory // ((depth - 1) * tile + OTHERS))) if m == FEW_ROWS else 1
    jobs, tiles = heads * math.ceil(rows / m), math.ceil(held / n)
    places = device.sms * resident

    def cost(splits: int) -> float:
        """Time in tiles. A wave that is not full takes as long as its fullest multiprocessor; fewer programs there read
        nearly as fast together."""
        waves, rest = divmod(jobs * splits, places)  # those of the windows are short
        return (math.ceil(tiles / splits) + START) * (waves + (math.ceil(rest / device.sms) / resident) ** 0.5)

    return Plan(m, n, warps, depth, min(range(1, max(1, min(256, tiles // 2)) + 1), key=cost))


def _padded(head_dim: int) -> int:
    """The next power of two."""
    return 1 << (head_dim - 1).bit_length()


def constants(head_dim: int, plan: Plan, windows: bool, early: bool) -> dict[str, int | bool]:
    """What the kernel is specialized on."""
    return {
        "D": head_dim,
        "DP": _padded(head_dim),
        "M": plan.rows,
        "N": plan.tokens,
        "WINDOWS": windows,
        "EARLY": early,
        "STAGES": plan.stages,
    }


def attend(call: AttentionCall, plan: Plan | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over packed spans, windows and new tokens; see :class:`AttentionCall`.

    Nothing depends on a value on the host. Beyond the output a call needs partial results of its query rows, of a long call
    at most :data:`WORKSPACE` bytes of them at a time.

    Parameters
    ----------
    call : AttentionCall
        Windows and storage are of one dtype, which queries are converted to; keys are after RoPE.
    plan : Plan or None
        Launch shape for every span; chosen from the shapes if None.
    out : Tensor or None, contiguous [batch, num_heads, tokens, head_dim]
        Result; allocated if None.

    Returns
    -------
    Tensor [batch, num_heads, tokens, head_dim], of the storage's dtype
    """
    windows = call.windows
    assert isinstance(windows, Windows) and call.rope is None and call.project is None and call.unproject is None
    query = call.query.to(windows.ring[0].dtype).contiguous()
    batch, heads, tokens, dim = query.shape
    out = torch.empty_like(query) if out is None else out
    most = max(1, WORKSPACE // (8 * batch * heads * dim)) if call.new is not None else tokens
    if tokens <= most:
        return _attend(call, query, 0, plan, out)
    for first in range(0, tokens, most):
        part = query[:, :, first : first + most].contiguous()
        out[:, :, first : first + most] = _attend(call, part, first, plan, torch.empty_like(part))
    return out


def _attend(call: AttentionCall, query: torch.Tensor, first: int, plan: Plan | None, out: torch.Tensor) -> torch.Tensor:
    """Attention of the query tokens ``first`` and following of a call."""
    from kvfold.kernels.common.partials import Partials
    from kvfold.kernels.common.windows import attend_windows

    windows, new = call.windows, call.new
    assert isinstance(windows, Windows)
    batch, num_heads, tokens, dim = query.shape
    heads = batch * call.num_kv_heads
    rows = num_heads // call.num_kv_heads * tokens
    plans = [plan or _plan(query, heads, rows, _held(span)) for span in call.spans]
    partials = Partials.empty(heads, 1 + sum(p.splits for p in plans), rows, dim, query.device)
    early = device_info(query.device).has_pdl
    within = new is None and len(plans) > 0  # the launch over the first span takes the windows as well
    if not within:
        attend_windows(
            query,
            windows,
            call.scale,
            partials,
            0,
            None if new is None else new.keys,
            None if new is None else new.values,
            None if new is None else new.valid,
            first,
        )
    at = 1
    for i, (each, span) in enumerate(zip(plans, call.spans, strict=True)):
        _launch(call, query, span, partials, at, each, within and i == 0, early)
        at += each.splits
    return partials.merge(out, early and len(plans) > 0, call.sinks, tokens)


def _plan(query: torch.Tensor, heads: int, rows: int, held: int) -> Plan:

    return make_plan(query.shape[-1], heads, rows, held, device_info(query.device))


def _held(span: Span) -> int:
    """Tokens that a span has room for."""
    x = span.keys["x"]
    return x.shape[2] * x.shape[3]


def _launch(
    call: AttentionCall,
    query: torch.Tensor,
    span: Span,
    partials: "Partials",
    at: int,
    plan: Plan,
    windows: bool,
    early: bool,
) -> None:
    """Write partial results over one span to parts ``at`` and following, and with ``windows`` theirs to the one before."""
    from kvfold.kernels.common.partials import LOG2E, early_launch
    from kvfold.kernels.dense._decode import dense_kernel

    given = call.windows
    assert isinstance(given, Windows)
    keys, values, dim = span.keys["x"], span.values["x"], query.shape[-1]
    for x in (keys, values):
        if x.stride()[2:] != (x.shape[3] * dim, dim, 1) or x.stride(0) != x.shape[1] * x.stride(1):
            raise ValueError(f"packed storage: strides {x.stride()} of {tuple(x.shape)} are not those of a slab")
        if x.dtype != query.dtype or x.stride() != keys.stride():
            raise ValueError(f"packed storage: {x.dtype} of strides {x.stride()}; queries are {query.dtype}")
    rows = partials.out.shape[2]
    blocks = math.ceil(rows / plan.rows)
    sink, ring = given.sink, given.ring
    dense_kernel[(partials.out.shape[0] * blocks, plan.splits + windows)](
        query,
        keys,
        values,
        call.packed_len,
        *sink,
        *ring,
        given.sink_len,
        given.recent_len,
        partials.out,
        partials.top,
        partials.total,
        float(call.scale) * LOG2E,
        call.num_kv_heads,
        rows,
        blocks,
        query.shape[2],
        span.start,
        _held(span),
        keys.stride(1) // dim,
        sink[0].shape[2],
        ring[0].shape[2],
        plan.splits,
        at - windows,
        partials.splits,
        **constants(dim, plan, windows, early),
        num_warps=plan.warps,
        num_stages=plan.stages,
        **early_launch(early),
    )
