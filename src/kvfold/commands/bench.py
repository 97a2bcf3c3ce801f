"""``kvfold bench``: one subcommand per benchmark, each a module with a ``main``."""

import importlib

import click

BENCHMARKS = {
    "attention": "Decode attention over packed caches against the fastest fp16 attention (GPU).",
    "matvec": "q K' and p V apart, as in InnerQ's Tables 3 and 4 (GPU).",
    "encode": "Encoding a prompt and closing blocks while decoding (GPU).",
    "prefill": "Folding a prompt into a layer: time and memory by kernel and by torch (GPU).",
    "modes": "Encoding in symmetric, asymmetric and hybrid mode, InnerQ's Figure 4 (GPU).",
    "decode": "A whole model decoding in a CUDA graph, folded against bf16 (GPU).",
    "generate": "What model.generate gives, folded against Transformers' own caches (GPU).",
    "memory": "Peak memory, largest batch and throughput under a memory cap (GPU).",
    "profile": "Kernels, allocations, copies and waits of one decode step (GPU).",
    "serve": "vLLM with folded caches against its own: steps, prompts, capacity (GPU).",
    "cpu": "Decoding on a CPU against Transformers' own cache.",
    "plot": "Draw the committed rows.",
}


@click.group("bench", short_help="Measure kernels, each behind a correctness gate.")
def bench() -> None:
    """Measure kernels. A time is only reported after the same call agreed with its reference.

    Every benchmark prints a table, or with --json one object per row, and with --rows FILE appends its rows to a CSV file;
    without, nothing is written. "kvfold bench NAME --help" lists its options. Those marked GPU need a CUDA device.
    """


def _add(name: str, summary: str) -> None:
    @bench.command(
        name, help=summary, add_help_option=False, context_settings={"ignore_unknown_options": True}, short_help=summary
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> int:
        try:
            return int(importlib.import_module(f"kvfold.bench.{name}").main(list(arguments)) or 0)
        except SystemExit as stop:  # how argparse ends, after --help as well
            return stop.code if isinstance(stop.code, int) else 2


for _name, _summary in BENCHMARKS.items():
    _add(_name, _summary)
_add("all", "All of those behind docs/performance.md, in lanes, going on where it was ended (GPU).")
