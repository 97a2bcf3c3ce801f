"""InnerQ's Figure 4: what encoding costs in symmetric, asymmetric and hybrid mode.

Keys and values of one layer are encoded into InnerQ's 2-bit groups of 32 along the inner dimension, for the paper's models
and lengths. The paper's claim: hybrid mode, which tries both and keeps the better, costs no more than symmetric mode. What is
measured, and against what it is checked first, is that of ``kvfold bench encode``.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfold.bench import encode
from kvfold.bench.matvec import LENGTHS, MODELS, check_lengths
from kvfold.bench.rows import Row, append, environment, need_gpu, options, script, show

ROWS = Path("benchmarks/rows/modes.csv")
MODES = ("sym", "asym", "hybrid")


def works(models: Sequence[str] = tuple(MODELS), lengths: Sequence[int] = LENGTHS) -> list[tuple[str, encode.Work]]:
    """Model and work, in the order of the rows: the three modes of a length follow one another."""
    return [
        (name, encode.Work(f"innerq-{mode}", context=n, layers=1, **MODELS[name]))
        for name in models
        for n in lengths
        for mode in MODES
    ]


def run(models: Sequence[str], lengths: Sequence[int], rows: Path | None = None) -> Iterator[Row]:
    """Measure, model by model; a row's baseline is symmetric mode of the same shape."""
    check_lengths("modes", lengths)
    device, env = need_gpu("modes"), environment()
    known: dict[encode.Work, float] = {}
    for name, work in works(models, lengths):
        row = encode.measure(work, device, env, known)
        reference = known.get(replace(work, method="innerq-sym"))
        timed = row.p50_ms is not None and reference is not None
        row = replace(
            row,
            work=f"{name} encode {work.method.partition('-')[2]}",
            baseline="symmetric" if timed else "",
            baseline_ms=reference if timed else None,
            ratio=reference / row.p50_ms if timed else None,  # type: ignore[operator]
        )
        if rows is not None:
            append(rows, [row])
        yield row


def line(row: Any) -> str:
    """One row for people."""
    head = f"{row.work:32} {row.context:>7} tokens"
    if row.p50_ms is None:
        return f"{head}  {row.error:.1e} of the bytes differ > {row.limit:.0e}: not timed"
    against = "" if row.ratio is None else f"  {row.p50_ms / row.baseline_ms:.2f} of symmetric"
    return (
        f"{head}  {row.p50_ms:.4f} ms ({row.p20_ms:.4f} - {row.p80_ms:.4f})  {row.floor_percent:.0f}% of floor{against}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = options("modes", __doc__, ROWS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="TOKENS")
    args = parser.parse_args(argv)
    failed = False
    for row in run(args.models, args.lengths, args.rows):
        failed |= row.p50_ms is None
        show(row, line(row), args.json)
    return int(failed)


if __name__ == "__main__":
    sys.exit(script(main))
