"""The tables of the benchmarks' rows, as head and lines; ``tables.py`` writes them."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import torch
from evidence import plain

from kvfold.bench.cpu import BASELINE
from kvfold.bench.decode import TORCH
from kvfold.bench.generate import DEFAULT
from kvfold.bench.generate import STATIC as STATIC_CACHE
from kvfold.bench.generation import PLAIN, STATIC
from kvfold.bench.matvec import LAYOUTS, LENGTHS, MODELS, SIDES
from kvfold.bench.memory import gains
from kvfold.bench.rows import latest, of_last_commit, read
from kvfold.engines.vllm.shapes import Shape, dense, folded

ROWS = Path(__file__).resolve().parent.parent / "benchmarks" / "rows"
Table = tuple[list[str], list[list[str]]]
Choice = Callable[..., list[Any]]


def value(text: str) -> Any:
    """A cell of a CSV file as what it was before."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text or None


def rows(name: str, *columns: str, choose: Choice = latest) -> list[Any]:
    """Rows with attributes of their own types, of those with equal ``columns`` the last; no columns: all."""
    found: Any = read(ROWS / f"{name}.csv")
    return [
        SimpleNamespace(**{k: value(v) for k, v in row.items()})
        for row in (choose(found, *columns) if columns else found)
    ]


def number(x: float | None, form: str) -> str:
    return "-" if x is None else f"{x:{form}}"


FUSED = ("gluon", "pages", "dense")
"""Kernels of decode steps; plain Triton's rows have a table of their own."""
READ = ("blocks", "balanced", "mapped", "tables")
"""Kernels over codes in plain order. Rows of before "tables" had a name say "blocks" for both."""
GONE = ("balanced", "mapped")
"""Those that there are no more: their steps are no longer shown."""
BASELINES = ("vqllm", "gsrq", "tasq")
"""Methods that "tables" no longer reads, but for keys beside ``fold``'s values."""
COMPARED = ("turboquant", "gear", "zipcache", "kvquant")
"""Methods that "fragments" no longer reads."""
GONE_STEPS = {("kvarn", "0984cd3")}
"""Whole decode steps with a kernel that is gone, by method and commit."""
LAST = "ccc0b2d"
"""Commit of whole steps' last rows by those kernels."""
SHAPE = ("batch", "num_heads", "num_kv_heads", "head_dim", "query_tokens", "context")


def _shape(row: Any) -> str:
    heads = f"{row.num_heads}/{row.num_kv_heads} heads, d={row.head_dim}"
    calls = "" if row.query_tokens == 1 else f", {row.query_tokens} tokens"
    return f"B={row.batch}, N={row.context:,}, {heads}{calls}"


def _is_gone(method: str, kernel: str) -> bool:
    """Whether a row of a method is of a kernel that is gone; the kernels of plain order are there."""
    return kernel not in READ and method.partition(":")[0] in COMPARED


def _newest(found: Iterable[Mapping[str, str]], *columns: str) -> list[Any]:
    """:func:`latest`, where kernels of plain order count as one: a method's newest row counts, whichever reads it today."""

    def cell(row: Mapping[str, str], name: str) -> str:
        return READ[0] if name == "kernel" and row[name] in READ else row[name]

    return list({tuple(cell(row, name) for name in columns): row for row in found}.values())


def _served(row: Any) -> bool:
    """Whether the kernel that a decode step's row names still reads the method."""
    name, _, options = row.work.partition(":")
    of_tables = row.kernel == "tables" and name in BASELINES and "values=fold" not in options
    return row.kernel not in GONE and not of_tables and not _is_gone(row.work, row.kernel)


def _attention(dtype: str = "float16", without: tuple[str, ...] = ()) -> list[Any]:
    def choose(found: Iterable[Mapping[str, str]], *columns: str) -> list[Any]:
        return _newest((row for row in found if row["kernel"] not in without), *columns)

    found = rows("attention", "work", "dtype", "kernel", *SHAPE, choose=choose)
    return [row for row in found if row.dtype == dtype and row.kernel in (*FUSED, *READ, "triton", "fragments")]


def attention() -> Table:
    """Decode steps of the fused kernels."""
    bf16 = {tuple(getattr(r, k) for k in ("work", *SHAPE)): r for r in _attention("bfloat16")}
    lines = []
    for row in _attention():
        if row.kernel in FUSED and row.query_tokens == 1:
            other = bf16.get(tuple(getattr(row, k) for k in ("work", *SHAPE)))
            lines.append(
                [
                    f"{row.work}, {row.effective_bits:.1f} bits: {_shape(row)}",
                    number(row.p50_ms, ".4f"),
                    number(row.floor_percent, ".0f"),
                    number(row.ratio, ".2f"),
                    number(other and other.ratio, ".2f"),
                    f"{row.error:.1e}",
                ]
            )
    head = ["storage: shape", "ms", "% of floor", "times as fast as fp16", "bf16", "relative RMS error"]
    return head, lines


APART = frozenset("8f58b8e b838cb0 01173d7 f252b46 2d16a04 7aa710d ccc0b2d 30b4206 0984cd3 a9a38aa".split())
"""Commits of rows of long calls whose storage was unpacked by kernels of its own, which are gone; the last is 83fe957f."""
ALIKE, FAST = ("kivi", "innerq", "none"), ("fold", "qjl", "commvq", "tasq:bits=2,values=fold")
"""What was unpacked as it is now; of the rest, what is to be fast: its rows of before are starred, those of others leave."""


def long_calls() -> Table:
    """Calls of many tokens on an existing cache, unpacked, each beside fp16's time."""
    found: dict[str, dict[int, Any]] = {}
    starred = set()
    for row in _attention():
        if row.kernel != "triton" and row.query_tokens in (512, 2048) and row.batch == 1 and row.context == 32768:
            if row.commit.rstrip("+") in APART and not row.work.startswith(ALIKE):
                if not row.work.startswith(FAST):
                    continue
                starred.add(row.work)
            found.setdefault(row.work, {})[row.query_tokens] = row
    tokens = sorted({n for by_tokens in found.values() for n in by_tokens})

    def cell(row: Any) -> str:
        return "-" if row is None else f"{row.p50_ms:.3g} ({row.p50_ms / row.baseline_ms:.2f}x)"

    def fp16(n: int) -> str:
        times = sorted(by_tokens[n].baseline_ms for by_tokens in found.values() if n in by_tokens)
        return (
            f"{times[0]:.3g} (cuDNN, no mask)"
            if times[0] == times[-1]
            else f"{times[0]:.3g} - {times[-1]:.3g} (cuDNN, no mask)"
        )

    lines = [
        [f"`{work}`{' *' * (work in starred)}", *(cell(by_tokens.get(n)) for n in tokens)]
        for work, by_tokens in found.items()
    ]
    lines.append(["fp16, the fastest", *map(fp16, tokens)])
    return ["ms", *(f"{n:,} tokens" for n in tokens)], lines


def plain_order() -> Table:
    """The Triton kernel."""
    lines = [
        [
            f"{row.work.partition(',')[0]}, {row.effective_bits:.1f} bits: {_shape(row)}",
            number(row.p50_ms, ".4f"),
            number(row.floor_percent, ".0f"),
            number(row.ratio, ".2f"),
            f"{row.error:.1e}",
        ]
        for row in _attention()
        if row.kernel == "triton"
    ]
    return ["storage: shape", "ms", "% of floor", "times as fast as fp16", "relative RMS error"], lines


def fragments() -> Table:
    """Pages of other codes, with fp16's times of the same run."""
    slow = {(row.work, row.batch, row.context): row for row in _attention() if row.kernel == "blocks"}
    lines = [
        [
            f"`{row.work}`, {row.effective_bits:.1f} bits",
            f"B={row.batch}, N={row.context:,}",
            number(row.p50_ms, ".4f"),
            number(row.ratio, ".2f"),
            number(slow[key].p50_ms / row.p50_ms if key in slow else None, ".1f"),
            f"{row.error:.1e}",
        ]
        for row in _attention()
        if row.kernel == "fragments" and row.query_tokens == 1 and not _is_gone(row.work, row.kernel)
        for key in ((row.work, row.batch, row.context),)
    ]
    return ["method", "shape", "ms", "times as fast as fp16", "times as fast as blocks", "relative RMS error"], lines


def readers() -> Table:
    """The kernel with readers and those with tables."""
    found = [row for row in _attention(without=GONE) if row.kernel in READ]
    newest = {(row.work, *(getattr(row, k) for k in SHAPE)): row for row in found if _served(row)}
    lines = [
        [
            f"`{row.work}`, {row.effective_bits:.1f} bits",
            _shape(row).removesuffix(", 32/8 heads, d=128"),
            number(row.p50_ms, ".3f"),
            number(row.ratio, ".2f"),
            f"{row.error:.1e}",
        ]
        for row in newest.values()
        if row.query_tokens == 1
    ]
    return ["method, keys and values", "shape", "ms", "times as fast as fp16", "relative RMS error"], lines


def encode() -> Table:
    """A prompt's blocks in all layers, or in one; a decode step."""
    lines = []
    for row in rows("encode", "work", *SHAPE):
        whole = row.baseline == "model prefill"
        heads = f"{row.num_kv_heads} heads, d={row.head_dim}"
        lines.append(
            [
                f"{row.work.removeprefix('encode ')}: B={row.batch}, N={row.context:,}, {heads}",
                number(row.p50_ms, ".4f"),
                number(row.floor_percent, ".0f"),
                number(100 * row.p50_ms / row.baseline_ms if whole and row.p50_ms else None, ".2f"),
                f"{row.error:.1e}",
            ]
        )
    return ["what: shape", "ms", "% of floor", "% of the model's prefill", "bytes that differ"], lines


def prefill() -> Table:
    """Folding a prompt into one layer, state included: rows that say what it takes behind other work."""
    lines = [
        [
            f"`{row.method}`, {'kernel' if row.encoder == 'triton' else 'Torch'}",
            number(row.p50_ms, ".2f"),
            number(row.busy_ms, ".2f"),
            number(row.percent, ".1f"),
            number(row.extra_mb, ".1f"),
            f"{row.error:.1e}",
        ]
        for row in rows("prefill", "method", "encoder", "context")
        if row.busy_ms is not None
    ]
    head = ["method, what encodes", "ms, idle GPU", "ms, busy GPU", "% of the prefill", "MB beyond what is kept"]
    return [*head, "bytes that differ"], lines


def modes() -> Table:
    """InnerQ's Figure 4: what the modes cost, relative to symmetric."""
    by: dict[tuple[int, int], dict[tuple[str, int], float]] = {}
    for row in rows("modes"):
        by.setdefault((row.num_kv_heads, row.head_dim), {})[row.work.rpartition(" ")[2], row.context] = row.p50_ms
    lines = []
    for (heads, dim), ms in by.items():
        for mode in ("asym", "hybrid"):
            found = [ms[mode, n] / ms["sym", n] if ms.get((mode, n)) and ms.get(("sym", n)) else None for n in LENGTHS]
            lines.append([f"{heads} heads, d={dim}: {mode}", *(number(x, ".2f") for x in found)])
        lines.append([f"{heads} heads, d={dim}: sym, ms", *(number(ms.get(("sym", n)), ".3f") for n in LENGTHS)])
    return ["times as long as sym", *(f"{n:,}" for n in LENGTHS)], lines


def decode() -> Table:
    def choose(found: Iterable[Mapping[str, str]], *columns: str) -> list[Any]:
        return latest((row for row in found if (row["method"], row["commit"]) not in GONE_STEPS), *columns)

    found = rows("decode", "model", "batch", "context", "method", choose=choose)
    # of every run, also where a later one has full precision of its own
    plain = {(row.model, row.batch, row.context, row.commit): row.ms for row in rows("decode") if row.method == TORCH}
    lines = []
    for row in found:
        if row.commit == LAST and _is_gone(row.method, "fragments"):
            continue
        base = plain.get((row.model, row.batch, row.context, row.commit))
        lines.append(
            [
                f"{row.model}, B={row.batch}, N={row.context:,}: `{row.method}`",
                f"{row.ms:.2f}",
                f"{row.tokens_per_s:,.0f}",
                f"{row.cache_gb:.1f}",
                number(row.ratio, ".2f"),
                number(None if base is None or row.method == TORCH else base / row.ms, ".2f"),
            ]
        )
    head = ["ms a step", "tokens/s", "cache, GB", "times as fast as bf16", "as bf16 by Torch"]
    return ["model, batch, context, cache", *head], lines


def generate() -> Table:
    lines = []
    for row in rows("generate", "model", "batch", "prompt", "cache", "steps"):
        name = {DEFAULT: "Transformers, default", STATIC_CACHE: "Transformers, static cache, compiled"}.get(row.cache)
        lines.append(
            [
                f"B={row.batch}, {row.prompt:,} tokens: {name or f'`{row.cache}`, {row.steps}'}",
                f"{row.ms:.2f}",
                f"{row.tokens_per_s:,.0f}",
                number(row.times_default, ".1f"),
                number(row.times_best, ".2f"),
                f"{row.begin_ms / 1e3:.2f}",
            ]
        )
    return [
        "",
        "ms a step",
        "tokens/s",
        "times as fast as the default",
        "as the faster of the two",
        "begins in, s",
    ], lines


def _memory() -> list[Any]:
    return rows("memory", "cache", "prompt", "output", choose=of_last_commit)


def memory() -> Table:
    lines = [
        [
            f"`{row.cache}`, {row.prompt} + {row.output}",
            f"{row.batch}{' (largest)' if row.largest else ''}",
            f"{row.peak_gb:.1f}",
            f"{row.cache_gb:.1f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.decode_tokens_per_s:,.0f}",
            f"{row.prefill_s:.1f}",
        ]
        for row in _memory()
        if row.fits
    ]
    head = ["cache, prompt + output", "batch", "peak, GB", "cache, GB", "tokens/s", "decoding alone", "prefill, s"]
    return head, lines


def memory_gains() -> Table:
    all_rows = _memory()
    names = {STATIC: "static bf16", PLAIN: "Transformers' `DynamicCache`"}
    lines = []
    for prompt, output in dict.fromkeys((row.prompt, row.output) for row in all_rows):
        for gain in gains([row for row in all_rows if (row.prompt, row.output) == (prompt, output)]):
            lines.append(
                [
                    f"`{gain.cache}`, {prompt} + {output}, against {names[gain.baseline]}",
                    f"{gain.memory[0]:.2f} - {gain.memory[1]:.2f}",
                    f"{gain.batch:.2f}",
                    f"{gain.throughput:.2f}",
                    f"{gain.decode_throughput:.2f}",
                ]
            )
    return ["", "less memory at equal batch", "larger batch", "throughput", "decoding alone"], lines


def products() -> Table:
    by = {(row.work, row.context): row for row in rows("matvec")}
    lines = []
    for model in MODELS:
        for side in SIDES.values():
            for layout in LAYOUTS:
                found = [by.get((f"{model} {side} {layout}", n)) for n in LENGTHS]
                lines.append([f"{model} {side} {layout}", *(number(row and row.ratio, ".2f") for row in found)])
    return ["times as fast as torch.matmul", *(f"{n:,}" for n in LENGTHS)], lines


def layouts() -> Table:
    by = {(row.work, row.context): row.p50_ms for row in rows("matvec")}
    lines = []
    for model in MODELS:
        for side in SIDES.values():
            pairs = [[by.get((f"{model} {side} {layout}", n)) for layout in ("outer", "inner")] for n in LENGTHS]
            lines.append([f"{model} {side}", *(number(a / b if a and b else None, ".2f") for a, b in pairs)])
    return ["inner, times as fast as outer", *(f"{n:,}" for n in LENGTHS)], lines


def profile() -> Table:
    what = {("eager", False): "step", ("eager", True): "step that closes a block", ("graph", True): "replayed step"}
    lines = [
        [
            f"`{row.method}`, {what[row.mode, row.closes]}, {row.context:,}",
            f"{row.kernels:,}",
            f"{row.launches:,}",
            f"{row.to_device} / {row.to_host}",
            str(row.waits),
            f"{row.allocations:,}",
            f"{row.allocated_bytes / 1e6:.1f}",
            str(row.device_allocations),
        ]
        for row in rows("profile", "method", "mode", "closes", "context")
    ]
    head = ["method, step, tokens of context", "kernels", "launches", "copies to / from the device", "waits"]
    return [*head, "allocations", "MB", "of them by CUDA"], lines


def uneven(row: Any) -> str:
    """Of one long request beside equal short ones."""
    return f"1 x {row.context:,} + {row.batch - 1} x {(row.total - row.context) // (row.batch - 1):,}"


SERVED = ("bfloat16", "fp8", "turboquant", "int4", "fold", "kivi", "squat")
"""Caches of vLLM and methods, as columns."""


def serving_results() -> Table:
    """vLLM, a column per cache: what fits, steps, prompts; ``fold`` against bfloat16."""
    found = rows("serving", "what", "model", "cache", "batch", "context", "total", "gpus")
    lines = []
    for what, title, show in (
        ("capacity", "tokens that fit, in requests of {}", lambda row: f"{row.tokens:,}"),
        ("decode", "ms a step, {}", lambda row: f"{row.ms:.2f}"),
        ("prefill", "ms of a prompt, {}", lambda row: f"{row.ms:,.0f}"),
    ):
        works: dict[tuple[int, ...], dict[str, Any]] = {}
        for row in found:
            if row.what == what and (row.gpus == 1 if what == "capacity" else not _most(row, row.cache)):
                works.setdefault((row.gpus, -row.total, -row.batch, row.context), {})[row.cache] = row
        for (gpus, *_), each in sorted(works.items()):
            name = title.format(_work(next(iter(each.values())))) + (f", {gpus} GPUs" if gpus > 1 else "")
            cells = [show(each[cache]) if cache in each else "-" for cache in SERVED]
            lines.append([name, *cells, _against(what, each)])
    steps = {cache: [row for row in found if _most(row, cache)] for cache in SERVED}
    most = {cache: max(each, key=lambda row: row.batch) for cache, each in steps.items() if each}
    cells = [f"{most[c].tokens_per_s:,.0f} ({most[c].batch})" if c in most else "-" for c in SERVED]
    gain = number(most["fold"].tokens_per_s / most["bfloat16"].tokens_per_s, ".2f")
    lines.append(["tokens a second, as many requests of 32,768 as fit (how many)", *cells, gain])
    return ["measure", *(f"`{cache}`" for cache in SERVED), "`fold` against `bfloat16`"], lines


LEAST = 8
"""Requests of 32,768 tokens that are measured whatever fits."""


def _most(row: Any, cache: str) -> bool:
    return (row.what, row.cache, row.context, row.gpus) == ("decode", cache, 32_768, 1) and row.batch > LEAST


def _work(row: Any) -> str:
    if row.what == "capacity":
        return f"{row.context:,}"
    even = row.total == max(row.batch, 1) * row.context
    return f"{row.batch} x {row.context:,}" if even else uneven(row)


def _against(what: str, each: dict[str, Any]) -> str:
    """How many times as good: more tokens, less time."""
    fold, plain = each.get("fold"), each.get("bfloat16")
    if not (fold and plain):
        return "-"
    return number(fold.tokens / plain.tokens if what == "capacity" else plain.ms / fold.ms, ".2f")


ROOM = 109_200_000_000
"""Bytes that an H200 has for caches beside Llama-3.1-8B."""


def serving_capacity() -> Table:
    """Tokens that fit, by vLLM's arithmetic."""
    contexts, methods = (33280, 8704, 4096, 2048, 1024), ("fold", "fold:bits=2", "kivi", "kivi:bits=4")
    shape = Shape("Llama-3.1-8B", 32, 32, 8, 128, torch.bfloat16, 1, 0)
    lines = []
    for context in contexts:
        plain = dense(shape, ROOM, context).tokens
        each = [folded(shape, ROOM, context, method).tokens for method in methods]
        lines.append([f"{context:,}", f"{plain:,}", *(f"{n:,} ({n / plain:.2f}x)" for n in each)])
    return ["context", "bfloat16", *(f"`{method}`" for method in methods)], lines


SUBSPACES = {
    "turn": "the page's 128 tokens, one query of each: what a server takes",
    "turnhalf": "the newest 64 of them, one query of each",
    "page": "the page's 128 tokens, all query heads",
    "half": "the newest 64 of them, all query heads",
    "sketch": "the page's 128 tokens, heads summed with random signs",
    "sofar": "all tokens up to the page's end",
    "own": "the newest 64 before 128, 256, 512, ... tokens: kvfold's own caches",
    "calibrated": "a novel that was read beforehand",
}
"""Whose queries make SQuat's subspace: variants of the rows."""


def subspaces() -> Table:
    """SQuat's divergence in a server as a multiple of KIVI's, by whose queries its subspace is of."""
    found: Any = read(ROWS.parent / "serving" / "squat-subspace.csv")
    windows: dict[tuple[str, ...], dict[str, float]] = {}
    for row in found:
        windows.setdefault((row["model"], row["text"], row["first"]), {})[row["variant"]] = float(row["kl"])
    models = sorted({key[0] for key in windows}, reverse=True)
    lines = []
    for variant, text in SUBSPACES.items():
        ratios = {key: each[variant] / each["kivi"] for key, each in windows.items()}
        means = [geometric_mean(r for key, r in ratios.items() if key[0] == model) for model in models]
        better = sum(each[variant] < each["calibrated"] for each in windows.values())
        beaten = "-" if variant == "calibrated" else f"{better} of {len(windows)}"
        lines.append(
            [text, *(f"{x:.2f}" for x in means), f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}", beaten]
        )
    return ["queries of", *models, "least and most", "windows in which it beats the novel's"], lines


def h100() -> Table:
    """Decode attention on an H100."""
    found = [row for row in rows("attention-h100", "work", *SHAPE) if _served(row)]
    lines = [
        [
            row.work,
            _shape(row),
            *(f"{x:.4f}" for x in (row.p50_ms, row.baseline_ms)),
            f"{row.ratio:.2f}",
            f"{row.error:.1e}",
        ]
        for row in found
    ]
    return ["method", "shape", "ms", "fp16, ms", "times as fast", "relative RMS error"], lines


def on_cpu(model: str, context: int) -> dict[tuple[int, str, str], Any]:
    """The last rows by threads, cache and kernel; ``base``: the row of Transformers' cache that a run begins with."""
    found, base = {}, None
    for row in rows("cpu"):
        base = row if row.cache == BASELINE else base
        row.base = base
        if (row.model, row.context) == (model, context):
            found[row.threads, row.cache, row.kernel] = row
    return found


def cpu() -> Table:
    """Steps of SmolLM2-135M on a CPU: the kernel with two threads and with one, and the reference, over Transformers' cache."""
    at = on_cpu("SmolLM2-135M-Instruct", 4096)
    base = at[2, "none", "cpu"].base
    lines = [[f"`{BASELINE}`", number(base.p50_ms, ".1f"), "1.00", "1.00", "-", f"{base.cache_mb:.1f}"]]
    for threads, cache, kernel in at:
        if threads == 2 and kernel == "cpu":
            row, one, slow = at[2, cache, kernel], at.get((1, cache, kernel)), at.get((2, cache, "reference"))
            cells = number(row.p50_ms, ".1f"), number(row.ratio, ".2f"), number(one and one.ratio, ".2f")
            lines.append([f"`{plain(cache)}`", *cells, number(slow and slow.ratio, ".2f"), f"{row.cache_mb:.1f}"])
    return ["cache", "ms", "times `DynamicCache`", "one thread", "by the reference", "MB"], lines


def cpu_long() -> Table:
    """Steps of the 1.5B model at a long context on a CPU."""
    lines = [
        [f"`{plain(r.cache)}`", number(r.p50_ms, ".0f"), number(r.ratio, ".2f"), f"{r.cache_mb:,.0f}"]
        for r in on_cpu("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 16384).values()
    ]
    return ["cache", "ms", "times `DynamicCache`", "MB"], lines


BENCH = {
    "docs/performance.md": {
        "attention": attention,
        "long calls": long_calls,
        "plain order": plain_order,
        "fragments": fragments,
        "readers": readers,
        "encode": encode,
        "prefill": prefill,
        "modes": modes,
        "decode": decode,
        "generate": generate,
        "memory": memory,
        "memory gains": memory_gains,
        "products": products,
        "layouts": layouts,
    },
    "docs/serving.md": {
        "serving capacity": serving_capacity,
        "serving results": serving_results,
    },
    "docs/profile.md": {"profile": profile},
}
"""Of the rows of ``kvfold bench``, by page and name."""
OTHERS = {
    "docs/performance.md": {"h100": h100},
    "docs/performance-cpu.md": {"cpu": cpu, "cpu long": cpu_long},
}
"""Of other rows."""
