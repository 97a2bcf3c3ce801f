"""Decoding on a CPU: time per token with folded caches against Transformers' own cache, in one run.

    kvfold bench cpu --methods none kivi innerq squat --context 4096 --rows benchmarks/rows/cpu.csv

Every cache is filled with the same keys and values: a prompt's, over and over. Then the caches take turns, one token each,
so that whatever else the machine does meets all of them alike; the median over the turns counts.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvfold import fold, unfold
from kvfold.bench.rows import append, options, script, show
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.names import passing
from kvfold.errors import KVFoldError
from kvfold.methods import get
from kvfold.models import load

ROWS = Path("benchmarks/rows/cpu.csv")
METHODS = (
    *("none", "fold", "fold:bits=2,codebook=true", "kivi", "innerq", "squat", "squat_pre", "turboquant:bits=3", "qjl"),
    *("gear", "zipcache", "kvarn"),
)
BASELINE = "DynamicCache"
PROMPT = 512
"""Tokens that go through the model before measuring; a step's time depends on the number of cached tokens only."""
WARMUP = 3
"""Steps of each cache before measuring."""


@dataclass(frozen=True)
class CPURow:
    """Decode speed of one cache.

    Attributes
    ----------
    cache : str
        ``DynamicCache`` with SDPA, or a method.
    kernel : str
        What attends.
    p20_ms, p50_ms, p80_ms : float
        Time of a step of one token.
    ratio : float
        Median, over the baseline's in the same run.
    turn_ratio : float
        Median over the turns of this step's time over the baseline's step of the same turn; a busy machine moves it less.
    cpu_ms : float
        Processor time of a step, all threads together.
    page_faults : float
        Pages that the system had to map in a step. Transformers' cache makes a new copy of itself in every step; where the
        allocator returns memory to the system, mapping the copy can take longer than writing it.
    cache_mb : float
        Bytes of the cache.
    load : float
        Mean number of processes that wanted to run in the minute before the end, this one's threads included.
    """

    model: str
    dtype: str
    context: int
    threads: int
    turns: int
    cache: str
    kernel: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    ratio: float
    turn_ratio: float
    cpu_ms: float
    page_faults: float
    cache_mb: float
    load: float
    cpu: str
    torch: str
    transformers: str
    numba: str
    commit: str


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _page_faults() -> int:
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def _fill(cache: Cache, prompt: Cache, length: int) -> None:
    """Lengthen a cache that holds ``prompt``'s tokens to ``length`` by repeating their keys and values."""
    layers: list[tuple[Any, Any]] = list(zip(cache.layers, prompt.layers, strict=True))
    for to, source in layers:
        have = to.get_seq_length()
        index = torch.arange(have, length)
        k, v = (x[:, :, index % have] for x in (source.keys, source.values))
        to.update(k, v)
        if isinstance(to, FoldedLayer):
            queries = k.repeat_interleave(to.spec.num_heads // to.spec.num_kv_heads, 1)
            to.append(k, v, queries, None, index.unsqueeze(0))


@torch.inference_mode()
def measure(
    model: PreTrainedModel, name: str, methods: list[str], context: int, turns: int, kernel: str | None = None
) -> list[CPURow]:
    """Decode with each cache in turn.

    Parameters
    ----------
    name : str
        Of the model, for the rows.
    methods : list of str
    context : int
        Tokens in each cache before the first measured step.
    turns : int
        Measured steps of each cache.
    kernel : str or None
        Insist on an attention kernel.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (1, min(PROMPT, context - WARMUP)), generator=generator)
    own = model.config._attn_implementation
    caches: dict[str, Any] = {}
    for spec in (BASELINE, *methods):
        caches[spec] = DynamicCache(config=model.config) if spec == BASELINE else fold(model, spec, kernel=kernel)
        model(ids, **passing(model, caches[spec]), use_cache=True, logits_to_keep=1)
        unfold(model)
        _fill(caches[spec], caches[BASELINE], context - WARMUP)

    def step(spec: str) -> tuple[float, float, int]:
        # without set_attn_implementation, whose checks take longer than a step
        model.config._attn_implementation = own if spec == BASELINE else "kvfold"
        token, faults = ids[:, -1:], _page_faults()
        begun, used = time.perf_counter(), time.process_time()
        model(token, **passing(model, caches[spec]), use_cache=True)
        wall, processor = time.perf_counter() - begun, time.process_time() - used
        return 1e3 * wall, 1e3 * processor, _page_faults() - faults

    times: dict[str, list[tuple[float, float, int]]] = {spec: [] for spec in caches}
    try:
        for turn in range(turns + WARMUP):
            for spec in caches:
                took = step(spec)
                if turn >= WARMUP:
                    times[spec].append(took)
    finally:
        model.config._attn_implementation = own
    base = [t[0] for t in times[BASELINE]]
    rows = []
    for spec, cache in caches.items():
        wall = [t[0] for t in times[spec]]
        cuts = statistics.quantiles(wall, n=10)
        folded = spec != BASELINE
        size = cache.nbytes()["total"] if folded else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        rows.append(
            CPURow(
                model=name,
                dtype=str(model.dtype).removeprefix("torch."),
                context=context,
                threads=torch.get_num_threads(),
                turns=turns,
                cache=spec,
                kernel=", ".join(sorted({x.kernel.name for x in cache.folded})) if folded else "sdpa",
                p20_ms=cuts[1],
                p50_ms=statistics.median(wall),
                p80_ms=cuts[7],
                ratio=statistics.median(wall) / statistics.median(base),
                turn_ratio=statistics.median(a / b for a, b in zip(wall, base, strict=True)),
                cpu_ms=statistics.mean(t[1] for t in times[spec]),
                page_faults=statistics.median(t[2] for t in times[spec]),
                cache_mb=size / 1e6,
                load=_load(),
                cpu=_cpu(),
                torch=_version("torch"),
                transformers=_version("transformers"),
                numba=_version("numba"),
                commit=_commit(),
            )
        )
    return rows


def line(row: CPURow) -> str:
    """One row for people."""
    return (
        f"{row.cache:<14} {row.kernel:<8} p50 {row.p50_ms:6.1f} ms (p20 {row.p20_ms:.1f}, p80 {row.p80_ms:.1f})  "
        f"ratio {row.ratio:.2f}, by turns {row.turn_ratio:.2f}  cpu {row.cpu_ms:6.1f} ms  {row.cache_mb:6.1f} MB  "
        f"page faults {row.page_faults:.0f}  load {row.load:.1f}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = options("cpu", __doc__, ROWS)
    parser.add_argument("--model", default=None, help="as everywhere in kvfold; default: the embedded model")
    parser.add_argument("--dtype", default=None, help="default: float32")
    parser.add_argument("--methods", nargs="+", action="extend", metavar="METHOD", help=f"default: {' '.join(METHODS)}")
    parser.add_argument("--context", type=int, default=4096, help="default: 4096")
    parser.add_argument("--turns", type=int, default=40, help="default: 40")
    parser.add_argument("--threads", type=int, default=None, help="default: Torch's own choice")
    parser.add_argument("--kernel", default=None, help="insist on an attention kernel")
    args = parser.parse_args(argv)
    for name, least in (("context", 2 * WARMUP), ("turns", 2)):
        if getattr(args, name) < least:
            raise KVFoldError(f"bench cpu: {name}={getattr(args, name)} is not allowed; allowed: {least} or more")
    chosen = args.methods or list(METHODS)
    for method in chosen:
        get(method)
    if args.threads:
        torch.set_num_threads(args.threads)
    model, _, info = load(args.model, dtype=args.dtype, device="cpu")
    name = Path(info.name).name if Path(info.name).exists() else info.name
    rows = measure(model, name, chosen, args.context, args.turns, args.kernel)
    for row in rows:
        show(row, line(row), args.json)
    if args.rows is not None:
        append(args.rows, rows)
    return 0


if __name__ == "__main__":
    sys.exit(script(main))
