"""What one folded decode step does: kernels, copies, waits and allocations, step by step and in a CUDA graph.

A step is profiled at two lengths of context. The point: its work outside the kernels is constant. It does not wait for the
device, and what it allocates and copies does not grow with the context.

Counted within the step: kernels, copies and fills that the device ran; calls of the CUDA runtime and driver that wait for the
device; blocks and bytes that Torch's allocator handed out, and how often it had to ask CUDA for memory.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from kvfold.bench.decode import SHAPES, build, filled
from kvfold.bench.rows import append, environment, need_gpu, options, progress, script, show
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.graph import DecodeGraph
from kvfold.engines.transformers.names import passing
from kvfold.errors import KVFoldError
from kvfold.methods import get

ROWS = Path("benchmarks/rows/profile.csv")
CONTEXTS = (4096, 65536)
METHODS = ("kivi", "innerq:paper=true,mode=asym", "innerq:paper=true")
MARK = "kvfold_bench_step"
WAITS = frozenset(
    name
    for what in ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "CtxSynchronize")
    for name in (f"cuda{what}", f"cu{what}")
)
"""Calls that wait for the device. A blocking cudaMemcpy shows as a stream synchronization."""


@dataclass(frozen=True)
class ProfileRow:
    """One decode step.

    Attributes
    ----------
    model, method : str
    layers, batch, context : int
    mode : {"eager", "graph"}
    closes : bool
        Whether the step packs a block (one step in 32 does; in a graph, every step can).
    kernels : int
        That the device ran.
    launches : int
        Calls that start kernels or graphs.
    to_device, to_host, on_device : int
        Copies by direction; fills count as ``on_device``.
    waits : int
        Calls that wait for the device.
    allocations, allocated_bytes : int
        Blocks and bytes that Torch's allocator handed out.
    device_allocations : int
        Times that it asked CUDA for memory.
    gpu_ms : float
        Sum of the kernels' times, under the profiler.
    gpu, driver, torch, triton, commit : str
    """

    model: str
    method: str
    layers: int
    batch: int
    context: int
    mode: str
    closes: bool
    kernels: int
    launches: int
    to_device: int
    to_host: int
    on_device: int
    waits: int
    allocations: int
    allocated_bytes: int
    device_allocations: int
    gpu_ms: float
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str


def allocator_counts() -> tuple[int, int, int]:
    """Blocks and bytes handed out so far, and calls to CUDA for memory."""
    stats = torch.cuda.memory_stats()
    return (
        stats["allocation.all.allocated"],
        stats["allocated_bytes.all.allocated"],
        stats.get("num_device_alloc", stats["segment.all.allocated"]),
    )


def observe(step: Callable[[], Any]) -> dict[str, Any]:
    """Profile one call of ``step``; the counted columns of :class:`ProfileRow`."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        before = allocator_counts()
        with record_function(MARK):
            step()
        after = allocator_counts()
        torch.cuda.synchronize()  # after the mark: not the step's
    return {**count(recorded.profiler.kineto_results.events()), **_allocations(before, after)}


def _allocations(before: tuple[int, int, int], after: tuple[int, int, int]) -> dict[str, int]:
    names = ("allocations", "allocated_bytes", "device_allocations")
    return {name: b - a for name, a, b in zip(names, before, after, strict=True)}


def count(events: Sequence[Any]) -> dict[str, Any]:
    """Device work and runtime calls of the marked step, from the profiler's raw events."""
    cpu = DeviceType.CPU
    marks = [e for e in events if e.name() == MARK and e.device_type() == cpu]
    if len(marks) != 1:
        raise KVFoldError(f"bench profile: the profiler recorded {len(marks)} steps; expected 1")
    begin, end = marks[0].start_ns(), marks[0].end_ns()
    found = dict.fromkeys(("kernels", "launches", "to_device", "to_host", "on_device", "waits"), 0)
    spent = 0.0
    for event in events:
        name = event.name()
        if event.device_type() == cpu:
            if begin <= event.start_ns() < end:
                found["launches"] += name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch"))
                found["waits"] += name in WAITS
            continue
        if name == MARK:  # its shadow on the device
            continue
        if name.startswith("Memcpy"):
            found["to_device" if "HtoD" in name else "to_host" if "DtoH" in name else "on_device"] += 1
        elif name.startswith("Memset"):
            found["on_device"] += 1
        else:
            found["kernels"] += 1
            spent += event.duration_ns() / 1e6
    if not found["kernels"]:
        raise KVFoldError("bench profile: the profiler saw no kernel; is CUPTI available?")
    return {**found, "gpu_ms": spent}


def closing_in(cache: FoldedCache) -> int:
    """How many more tokens a cache of sequences of one length takes until one of them closes a block."""
    layer = cache.folded[0]
    held = layer.lens[0]
    due = layer.packed_length(held)
    return next(n for n in range(1, 2 * layer.block + 1) if layer.packed_length(held + n) > due)


@torch.no_grad()
def measure(
    model: PreTrainedModel, name: str, method: str, batch: int, context: int, env: dict[str, Any]
) -> list[ProfileRow]:
    """An ordinary step, one that closes a block, and a graph's, of a cache of ``context`` tokens."""
    common = {"model": name, "method": method, "layers": model.config.num_hidden_layers, "batch": batch, **env}
    cache = filled(model, method, batch, context, 160)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)

    def eager() -> None:
        model(input_ids=ids, **passing(model, cache), use_cache=True)

    rows = []
    for _ in range(closing_in(cache)):  # warm up over a whole cycle, so that everything is compiled
        eager()
    for _ in range(2):
        eager()
    rows.append(ProfileRow(**common, context=cache.get_seq_length(), mode="eager", closes=False, **observe(eager)))
    for _ in range(closing_in(cache) - 1):
        eager()
    rows.append(ProfileRow(**common, context=cache.get_seq_length(), mode="eager", closes=True, **observe(eager)))
    held = cache.get_seq_length()
    graph = DecodeGraph(model, cache, 64)
    for _ in range(3):
        graph(ids)
    rows.append(ProfileRow(**common, context=held + 3, mode="graph", closes=True, **observe(lambda: graph(ids))))
    return rows


def run(
    shape: str,
    methods: Sequence[str] = METHODS,
    contexts: Sequence[int] = CONTEXTS,
    batch: int = 1,
    layers: int | None = None,
    rows: Path | None = None,
) -> list[ProfileRow]:
    """Profile each method at each length.

    Parameters
    ----------
    shape : str
        A key of :data:`kvfold.bench.decode.SHAPES`; weights are random, nothing is compiled.
    layers : int or None
        Fewer layers than the model has.
    rows : Path or None
        CSV file that rows are appended to.
    """
    if min(contexts) < 512:
        raise KVFoldError(f"bench profile: context={min(contexts)} is not allowed; allowed: 512 or more")
    for method in methods:
        get(method)
    device = need_gpu("profile")
    env = environment()
    progress(f"building {shape}")
    model = build(shape, device, compiled=False, layers=layers)
    found = []
    for method in methods:
        for context in contexts:
            progress(f"{method}, {context} tokens")
            new = measure(model, shape, method, batch, context, env)
            torch.cuda.empty_cache()
            if rows is not None:
                append(rows, new)
            found += new
    return found


COLUMNS = ("kernels", "launches", "to_device", "to_host", "on_device", "waits", "allocations", "device_allocations")


def grows(rows: Sequence[Any]) -> list[str]:
    """Which counts differ between the lengths of one method, mode and kind of step; empty if none does."""
    found = []
    kinds = sorted({(row.method, row.mode, row.closes) for row in rows})
    for method, mode, closes in kinds:
        same = [row for row in rows if (row.method, row.mode, row.closes) == (method, mode, closes)]
        for column in COLUMNS:
            values = {getattr(row, column) for row in same}
            if len(values) > 1:
                step = "closing " if closes else ""
                found.append(f"{method}, {mode} {step}step: {column} {' / '.join(map(str, sorted(values)))}")
    return found


def line(row: ProfileRow) -> str:
    """One row for people."""
    step = f"{row.mode}{', closes a block' if row.closes and row.mode == 'eager' else ''}"
    return (
        f"{row.method:20} {row.context:>7} tokens  {step:24} {row.kernels:>5} kernels  {row.launches:>5} launches  "
        f"{row.waits} waits  copies {row.to_device} to, {row.to_host} from the device  "
        f"{row.allocations:>5} allocations ({row.allocated_bytes / 1e6:.2f} MB, {row.device_allocations} by CUDA)  "
        f"{row.gpu_ms:.2f} ms"
    )


def main(argv: list[str] | None = None) -> int:
    parser = options("profile", __doc__, ROWS)
    parser.add_argument("--model", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--methods", nargs="+", action="extend", metavar="METHOD", help=f"default: {' '.join(METHODS)}")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="default: 4096 65536")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    args = parser.parse_args(argv)
    found = run(args.model, args.methods or METHODS, args.contexts, args.batch, args.layers, args.rows)
    for row in found:
        show(row, line(row), args.json)
    more = grows(found)
    if not args.json:
        print(f"at most {max(row.waits for row in found)} waits in a step")
        print("growing: " + "; ".join(more) if more else "no count depends on the context")
    return int(bool(more))


if __name__ == "__main__":
    sys.exit(script(main))
