"""InnerQ's Figure 4: what encoding costs in symmetric, asymmetric and hybrid mode.

Keys and values of one layer are encoded into InnerQ's 2-bit groups of 32 along the inner dimension, for the paper's models
and lengths. The paper's claim: hybrid mode, which tries both and keeps the better, costs no more than symmetric mode. What is
measured, and against what it is checked first, is that of ``kvfold bench encode``.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvfold.bench import encode
from kvfold.bench.matvec import LENGTHS, MODELS, check_lengths
from kvfold.bench.rows import Row, append, environment, need_gpu, options, read, script, show
from kvfold.errors import KVFoldError

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


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Figure 4's comparison: milliseconds of one layer's encoding by mode, and hybrid over symmetric.

    ``rows`` have the columns of :class:`Row`; of several rows of a shape and mode the last counts. Those of ``bench encode``
    for one layer will do.
    """
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in rows:
        mode = re.search(r"encode (?:one layer innerq-)?(sym|asym|hybrid)\b", str(row["work"]))
        if mode and row["p50_ms"] not in (None, ""):
            shape = (int(row["num_kv_heads"]), int(row["head_dim"]), int(row["context"]))
            found.setdefault(shape, {})[mode[1]] = float(row["p50_ms"])
    lines = [f"{'KV heads':>8} {'d':>4} {'tokens':>8}" + "".join(f"{m + ', ms':>12}" for m in MODES) + "  hybrid / sym"]
    for (heads, dim, tokens), ms in sorted(found.items()):
        cells = "".join(f"{format(ms[m], '.4f') if m in ms else '-':>12}" for m in MODES)
        ratio = format(ms["hybrid"] / ms["sym"], ".2f") if {"hybrid", "sym"} <= set(ms) else "-"
        lines.append(f"{heads:>8} {dim:>4} {tokens:>8}{cells}{ratio:>14}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = options("modes", __doc__, ROWS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="TOKENS")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="measure nothing; print the figure from these rows")
    args = parser.parse_args(argv)
    if args.saved is not None:
        lines = table(read(args.saved))
        if len(lines) == 1:
            raise KVFoldError(f"bench modes: {args.saved} has no row of one layer encoded in InnerQ's modes")
        print("\n".join(lines))
        return 0
    found = []
    for row in run(args.models, args.lengths, args.rows):
        show(row, line(row), args.json)
        found.append(row)
    if not args.json:
        print("\n".join(table([asdict(row) for row in found])))
    return int(any(row.p50_ms is None for row in found))


if __name__ == "__main__":
    sys.exit(script(main))
