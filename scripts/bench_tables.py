"""The tables of the benchmarks' rows, as head and lines; ``tables.py`` writes them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvfold.bench.matvec import LAYOUTS, LENGTHS, MODELS, SIDES
from kvfold.bench.memory import PLAIN, STATIC, gains
from kvfold.bench.rows import read

ROWS = Path(__file__).resolve().parent.parent / "benchmarks" / "rows"
Table = tuple[list[str], list[list[str]]]


def value(text: str) -> Any:
    """A cell of a CSV file as what it was before."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text or None


def rows(name: str) -> list[Any]:
    """Rows with attributes of their own types."""
    return [SimpleNamespace(**{k: value(v) for k, v in row.items()}) for row in read(ROWS / f"{name}.csv")]


def number(x: float | None, form: str) -> str:
    return "-" if x is None else f"{x:{form}}"


def decode() -> Table:
    lines = [
        [
            f"{row.model}, B={row.batch}, N={row.context:,}: `{row.method}`",
            f"{row.ms:.2f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.cache_gb:.1f}",
            number(row.ratio, ".2f"),
        ]
        for row in rows("decode")
    ]
    return ["model, batch, context, cache", "ms a step", "tokens/s", "cache, GB", "times as fast as bf16"], lines


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
        for row in rows("memory")
        if row.fits
    ]
    head = ["cache, prompt + output", "batch", "peak, GB", "cache, GB", "tokens/s", "decoding alone", "prefill, s"]
    return head, lines


def memory_gains() -> Table:
    all_rows = rows("memory")
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
        for row in rows("profile")
    ]
    head = ["method, step, tokens of context", "kernels", "launches", "copies to / from the device", "waits"]
    return [*head, "allocations", "MB", "of them by CUDA"], lines


BENCH = {
    "docs/performance.md": {
        "decode": decode,
        "memory": memory,
        "memory gains": memory_gains,
        "products": products,
        "layouts": layouts,
    },
    "docs/profile.md": {"profile": profile},
}
