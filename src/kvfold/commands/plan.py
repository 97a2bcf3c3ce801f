"""The command ``kvfold plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvfold.commands.terminal import JSON_HELP, json_target, publish, say, show
from kvfold.errors import KVFoldError
from kvfold.sheet import Column, Sheet, as_bytes

if TYPE_CHECKING:
    from kvfold.engines.vllm.capacity import Capacity

METHODS = ("fold", "fold:bits=2", "kivi", "innerq", "turboquant", "qjl")
GIB = 1 << 30
SHARE = 0.92
"""Of a GPU's memory that vLLM takes (--gpu-memory-utilization)."""
OVERHEAD = 2.3e9
"""Bytes that vLLM takes beside weights and caches with its defaults: activations of a profiling run, graphs."""


class Whole(click.IntRange):
    """A whole number; what is none is called so."""

    name = "integer"


@click.command(short_help="Say how many tokens and sequences fit when vLLM serves a model with folded caches.")
@click.option(
    "--model", metavar="M", help="Hub id, local folder or .gguf file.  [default: embedded SmolLM2-135M-Instruct]"
)
@click.option("--context", metavar="N", type=Whole(1), required=True, help="Tokens of a sequence (--max-model-len).")
@click.option("--tp", metavar="T", type=Whole(1), default=1, show_default=True, help="GPUs (--tensor-parallel-size).")
@click.option("--kv-bytes", metavar="B", type=Whole(1), help="Bytes for caches per GPU (--kv-cache-memory-bytes).")
@click.option("--gpu-memory", metavar="GB", type=click.FloatRange(1), help="Memory of a GPU, of which vLLM takes 92 %.")
@click.option("--methods", metavar="X ...", multiple=True, help="Methods.  [default: " + " ".join(METHODS) + "]")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def plan(
    model: str | None,
    context: int,
    tp: int,
    kv_bytes: int | None,
    gpu_memory: float | None,
    methods: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Say how many tokens and sequences fit, method by method, when vLLM serves a model with folded caches (docs/serving.md).

    With --kv-bytes the numbers are those that vLLM logs; with --gpu-memory an estimate. Shorter contexts follow, since a
    request's window takes the same room however short it is. Methods that learn need no artefact here: their codebooks are
    counted from their shapes.
    """
    if (kv_bytes is None) == (gpu_memory is None):
        raise click.UsageError("give one of --kv-bytes and --gpu-memory")
    target = json_target(json_path)
    from kvfold.engines.vllm import shapes

    shape = shapes.of_model(model, tp)
    room = kv_bytes if kv_bytes is not None else _room(shape, gpu_memory or 0.0, tp)
    chosen = methods or tuple(m for m in METHODS if shapes.fits(shape, m))
    lengths = sorted({context, *(n for n in (1024, 4096, 8192) if n < context)}, reverse=True)
    tables = {name: shapes.tables(shape, name) for name in chosen}
    rows = [
        {"method": name, "context": n, "table_bytes": held, **_row(found, n, shape)}
        for n in lengths
        for name, held, found in [
            ("none", 0, shapes.dense(shape, room, n)),
            *((m, tables[m][0], shapes.folded(shape, room, n, m)) for m in chosen),
        ]
    ]
    notes = [
        f"{name}: {as_bytes(held)} of learned tables"
        + (", counted from their shapes (no artefact is named)," if by_shapes else "")
        + " and what kernels make of them lie beside the caches"
        + (", not in the estimate" if kv_bytes is None else "")
        for name, (held, by_shapes) in tables.items()
        if held
    ]
    notes += [
        f"{name}: no kernel encodes its pages ({why}), so that a server on a GPU does not start with it; one on a CPU does"
        for name in chosen
        if (why := shapes.unstored(shape, name))
    ]
    notes += _alike({name: shapes.page_bytes(shape, name) for name in chosen}, shape)
    if not shapes.knows_kernels():
        notes.append("methods: not checked for what encodes them on a GPU, for Triton is not installed here")
    if shape.context is not None and context > shape.context:
        notes.append(f"context: the model's ends at {shape.context:,} tokens; vLLM refuses a longer one")
    plain = {row["context"]: row["tokens"] for row in rows if row["method"] == "none"}

    def table() -> None:
        names = ("tokens", "sequences", "bytes per token", "window per sequence", "against none")
        sheet = Sheet(
            [Column("context", right=True, key=True), Column("method", key=True, wraps=True)]
            + [Column(name, right=True) for name in names],
            f"{shape.name}, {room:,} bytes for caches per GPU, {tp} GPU{'s' if tp > 1 else ''}",
        )
        for row in rows:
            full = plain[row["context"]]
            sheet.add(
                f"{row['context']:,}",
                row["method"],
                f"{row['tokens']:,}",
                f"{row['sequences']:.1f}",
                f"{row['bytes_per_token']:,.0f}",
                f"{row['window_bytes']:,}",
                f"{row['tokens'] / full:.2f}x" if full else "-",
            )
        show(sheet)
        if kv_bytes is None:
            say("an estimate: vLLM measures what is left of the GPU at start-up, and logs the cache's size")
        for line in notes:
            say(line)

    result = {"model": shape.name, "tp": tp, "kv_bytes": room, "rows": rows, "notes": notes}
    publish(result, json_path, target, table)


def _alike(sizes: dict[str, tuple[int, int]], shape: Any) -> list[str]:
    """Lines on methods whose pages take as much room though they store more and less."""
    from kvfold.engines.vllm.settings import PAGE

    by_room: dict[int, list[str]] = {}
    for name, (_, room) in sizes.items():
        by_room.setdefault(room, []).append(name)
    size = shape.dtype.itemsize
    return [
        f"{', '.join(names)}: as many bytes per token, though what they store differs "
        f"({', '.join(f'{sizes[name][0] / shape.layers:,.0f}' for name in names)} bytes in a page of {PAGE} tokens of a KV "
        f"head): vLLM gives every token whole numbers of {size} bytes, so that pages are filled up to "
        f"{room / shape.layers:,.0f}, a multiple of {PAGE * size}"
        for room, names in by_room.items()
        if len({sizes[name][0] for name in names}) > 1
    ]


def _room(shape: Any, gpu_memory: float, tp: int) -> int:
    room = int(SHARE * gpu_memory * GIB - shape.weight_bytes / tp - OVERHEAD)
    if room <= 0:
        raise KVFoldError(
            f"gpu-memory: {gpu_memory:g} GiB do not hold the weights' {shape.weight_bytes / tp / GIB:.1f}; give more, or --tp"
        )
    return room


def _row(found: Capacity, context: int, shape: Any) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "sequences": found.sequences,
        "bytes_per_token": found.request_blocks * found.block_bytes * shape.tp / context,
        "window_bytes": found.window_bytes * shape.tp,
        "block_bytes": found.block_bytes,
        "blocks": found.blocks,
    }
