"""Write the tables of README.md and docs/ from the committed rows.

usage: python scripts/tables.py [--check]

--check changes nothing and exits 1 if a table is not what the committed rows say.
"""

import json
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from bench_tables import BENCH

from kvfold.evaluation.domains import DomainRow, means
from kvfold.evaluation.schema import read_row

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))
    return result


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table whose columns after the first are aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def method(spec: str) -> str:
    """A method's name without the place of its artefact, which differs from machine to machine."""
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option and not option.startswith("artefact=")]
    return f"`{name}{':' if kept else ''}{','.join(kept)}`"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def comparison() -> str:
    head = ["method", "effective bits", "bits, tables aside", "cache, MB", "ppl", "KL divergence", "top-1 agreement"]
    rows = (
        [
            method(row["method"]),
            number(row["effective_bits"], ".2f"),
            number(row["bits_without_tables"], ".2f"),
            f"{row['cache_bytes'] / 1e6:.1f}",
            number(row["ppl"], ".2f"),
            number(row["kld"], "z.4f"),
            f"{100 * row['top1']:.1f} %",
            f"{row['decode_tokens_per_s']:.1f}",
        ]
        for row in read("compare-smollm2-135m.json")["rows"]
    )
    return markdown([*head, "decode, tokens/s"], rows)


def domains(name: str) -> Callable[[], str]:
    def table() -> str:
        rows = [read_row(DomainRow, row) for row in read(name)["rows"]]
        bits = {row.method: row.bits_without_tables for row in rows}
        found = means(rows)
        columns = list(next(iter(found.values())))
        lines = []
        for spec, by_domain in found.items():
            cells = [
                f"{max(m.kld or 0.0, 0.0):.3f} / {100 * m.top1:.0f} %"
                + ("" if m.exact is None else f" / {100 * m.exact:.0f} %")
                for m in by_domain.values()
            ]
            lines.append([method(spec), number(bits[spec], ".2f"), *cells])
        return markdown(["method", "bits", *columns], lines)

    return table


def baselines(*names: str) -> Callable[[], str]:
    """Rows of some methods, with the full-precision cache first and KIVI last."""

    def table() -> str:
        rows = read("compare-baselines-wikitext.json")["rows"]
        chosen = [row for name in ("none", *names) for row in rows if row["method"].partition(":")[0] == name]
        kivi = [row for row in rows if method(row["method"]) in KIVI[names[0]]]
        lines = (
            [
                method(row["method"]),
                number(row["bits_without_tables"], ".2f"),
                number(row["effective_bits"], ".2f"),
                number(row["ppl"], ".2f"),
                number(row["kld"], "z.3f"),
                f"{100 * row['top1']:.0f} %",
            ]
            for row in chosen + kivi
        )
        return markdown(
            ["method", "bits, tables aside", "effective bits", "ppl", "KL divergence", "top-1 agreement"], lines
        )

    return table


KIVI = {
    "turboquant": ("`kivi`",),
    "gear": ("`kivi`",),
    "zipcache": ("`kivi`",),
    "kvquant": ("`kivi`", "`kivi:sink=1`"),
    "vqllm": ("`kivi`", "`kivi:bits=1`"),
}
"""What a page compares its method with."""


def ablation(*tables: str) -> Callable[[], str]:
    def table() -> str:
        rows = [row for row in read("commvq-ablation.json")["rows"] if row["table"] in tables]
        shape = [name for name in ("g", "N", "R") if name in rows[0]]
        last = "MSE" if "training" not in tables else "held-out error"
        seconds = [] if "training" not in tables else ["s"]
        head = (["paper's table"] if shape else ["what"]) + [*shape, "bits", last, *seconds]
        return markdown(
            head,
            (
                [
                    row["table"] if shape else row["what"],
                    *(str(row[name]) for name in shape),
                    f"{row['bits']:.3g}",
                    f"{row['mse']:.3g}",
                    *(f"{row['seconds']:.0f}" for _ in seconds),
                ]
                for row in rows
            ),
        )

    return table


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"compare": comparison},
    "docs/results.md": {
        "domains smollm2": domains("domains-smollm2-135m.json"),
        "domains learned": domains("domains-smollm2-135m-learned.json"),
        "domains qwen2.5": domains("domains-qwen2.5-coder-0.5b.json"),
    },
    **{f"docs/methods/{name}.md": {"measured": baselines(name)} for name in KIVI},
    "docs/methods/commvq.md": {
        "ablation keys": ablation("9", "10", "figure 4"),
        "ablation values": ablation("11"),
        "training": ablation("training"),
    },
}


def bench(table: Callable[[], tuple[list[str], list[list[str]]]]) -> Callable[[], str]:
    return lambda: markdown(*table())


TABLES |= {file: {name: bench(table) for name, table in tables.items()} for file, tables in BENCH.items()}


def main() -> int:
    stale = []
    for file, tables in TABLES.items():
        path = ROOT / file
        text = new = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
            before, found, rest = new.partition(begin)
            _, closed, after = rest.partition(end)
            if not found or not closed:
                raise SystemExit(f"{file}: has no {begin} ... {end}")
            new = f"{before}{begin}\n{table()}\n{end}{after}"
        if new != text:
            stale.append(file)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale)}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
