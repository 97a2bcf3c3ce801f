"""Write the tables of README.md and docs/ from the committed rows.

usage: python scripts/tables.py [--check]
       python scripts/tables.py --lengths FILE

--check changes nothing and exits 1 if a table is not what the committed rows say. --lengths prints the divergence by prefix of
the rows that `kvfold domains --prefix A B C --json FILE` wrote.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import claims
import evidence
import evidence_budgets
import evidence_claims
import evidence_plots
import evidence_tasks
from bench_tables import BENCH, OTHERS, subspaces

from kvfold.evaluation.domains import DomainRow, read_rows
from kvfold.evaluation.results import content, files_in
from kvfold.methods import DEFAULT_METHOD, METHODS, get
from kvfold.methods.learned import LearnedMethod

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


Result = dict[str, Any]


def read(name: str | pathlib.Path) -> Result:
    """A file of benchmarks/, or of any path."""
    result: Result = json.loads(content(BENCHMARKS / name))
    return result


def prefixes(result: Result) -> list[int]:
    """Prefixes of a file's rows; older files have one, in their header."""
    header = result["header"]
    return list(header["prefixes"]) if "prefixes" in header else [header["prefix"]]


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table whose columns after the first are aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def method(spec: str) -> str:
    """A method's name without the place of its artefact."""
    return f"`{evidence.plain(spec)}`"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


MAIN = (
    "fold",
    "none",
    "fold:bits=2",
    "fold:k_bits=4,v_bits=3",
    "kivi",
    "squat",
    "squat_pre",
    "innerq",
    "turboquant:bits=3",
    "qjl",
    "gear",
    "zipcache",
    "kivi:paper=true",
)
"""What the README shows of the rows of ``make demo ALL=1``."""


def catalogue() -> str:
    """What the methods are: bits of heads of 128 channels in the limit of long contexts, tables aside."""
    lines = []
    for kind in sorted(METHODS, key=lambda kind: (kind.name != DEFAULT_METHOD, kind.name == "none")):
        bits = f"{get(kind.name).effective_bits(128, 32):.2f}"
        learned = " (learned once per model)" if issubclass(kind, LearnedMethod) else ""
        page = kind.name.removesuffix("_pre")
        paper = re.search(r"arXiv ([\d.]+)", kind.source)
        source = f"[{paper[1]}]({kind.url})" if paper else kind.source
        lines.append([f"[`{kind.name}`](docs/methods/{page}.md)", bits, kind.summary + learned, source])
    return "\n".join(
        f"| {' | '.join(line)} |"
        for line in [["method", "bits", "what it stores", "paper"], ["---", "---:", "---", "---"], *lines]
    )


def comparison(name: str, only: Callable[[str], bool] = lambda spec: True) -> Callable[[], str]:
    """Rows of ``kvfold compare``; of several prefixes, each row says its own. ``only``: which methods."""

    def table() -> str:
        result = read(name)
        several = len(prefixes(result)) > 1
        head = ["effective bits", "bits, tables aside", "cache, MB", "ppl", "KL divergence", "top-1 agreement"]
        rows = (
            [
                method(row["method"]),
                *([f"{row['prefix']:,}"] if several else []),
                number(row["effective_bits"], ".2f"),
                number(row["bits_without_tables"], ".2f"),
                f"{row['cache_bytes'] / 1e6:.1f}",
                *(
                    (number(row["ppl"], ".2f"), number(row["kld"], "z.4f"), f"{100 * row['top1']:.1f} %")
                    if row.get("tested") != 0
                    else ("not tested", "-", "-")
                ),
                f"{row['decode_tokens_per_s']:.1f}",
            ]
            for row in result["rows"]
            if only(row["method"])
        )
        return markdown(["method", *(["prefix"] if several else []), *head, "decode, tokens/s"], rows)

    return table


MODELS = {
    "Qwen2.5-Coder-1.5B": ("qwen2.5-coder-1.5b", (1024, 4096, 16384)),
    "Qwen2.5-Coder-0.5B": ("qwen2.5-coder-0.5b", (1024, 4096, 16384)),
    "SmolLM2-135M": ("smollm2-135m", (1024, 4096)),
}
"""Models whose divergence by length is committed: the beginning of their files' names in benchmarks/lengths/, and prefixes."""

BASE = "kivi"
"""The method that ratios are of: KIVI at 2 bits (3.0 with its scales), at the windows of every method."""


def runs(stem: str, folder: str = "lengths") -> list[DomainRow]:
    """Rows of all runs of a model."""
    return [row for file in files_in(BENCHMARKS / folder, stem, ".json") for row in read_rows(read(file))]


def by_length(rows: Iterable[DomainRow]) -> dict[str, dict[int, float]]:
    """Mean KL divergence by method and prefix, over the texts that KIVI-2 was run on at that prefix; methods that miss one of
    them are left out there."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row.kld is not None:
            found.setdefault((row.method, row.prefix), {})[row.domain] = row.kld
    table: dict[str, dict[int, float]] = {}
    for (spec, prefix), texts in found.items():
        wanted = found.get((BASE, prefix), texts)
        if set(wanted) <= set(texts):
            table.setdefault(spec, {})[prefix] = sum(texts[name] for name in wanted) / len(wanted)
    return table


def lengths(*stems: str | pathlib.Path, only: Callable[[str], bool] = lambda spec: True) -> Callable[[], str]:
    """KL divergence by prefix, a column each, and as multiples of KIVI-2's.

    Parameters
    ----------
    stems
        Beginnings of the names of files in benchmarks/lengths/, or paths of files that ``kvfold domains`` wrote; of one model.
    only
        Which methods.

    Effective bits are those at the longest prefix.
    """

    def table() -> str:
        rows = [row for stem in stems for row in (runs(stem) if isinstance(stem, str) else read_rows(read(stem)))]
        columns = sorted({row.prefix for row in rows})
        bits = {row.method: row.effective_bits for row in rows if row.prefix == columns[-1]}
        found = by_length(rows)
        kivi = found.get(BASE, {})
        lines = []
        for spec, by_prefix in found.items():
            if only(spec):
                values = [by_prefix.get(p) for p in columns]
                line = [method(spec), number(bits.get(spec), ".2f"), *(number(v, "z.4f") for v in values)]
                line += [ratio(v, kivi.get(p)) for v, p in zip(values, columns, strict=True)]
                lines.append(line)
        head = ["method", "effective bits", *by_column("KL at", columns), *by_column("of KIVI-2's at", columns)]
        return markdown(head, lines)

    return table


def worst(
    only: Callable[[str], bool] = lambda spec: True, folder: str = "lengths", shared: bool = False
) -> Callable[[], str]:
    """Divergence as a multiple of KIVI-2's in the same run: every model and length, and the worst of them.

    Parameters
    ----------
    only
        Which methods.
    folder
        Of benchmarks/.
    shared
        With a column of the bits that count tables too, which all sequences share, at the longest prefix of the first model.
    """

    def table() -> str:
        head, bits, counted = ["method", "bits", *(["with tables"] if shared else [])], {}, {}
        cells: dict[str, list[float | None]] = {}
        models = {name: runs(stem, folder) for name, (stem, _) in MODELS.items()}
        order = list(dict.fromkeys(row.method for rows in models.values() for row in rows))
        for name, (_, columns) in MODELS.items():
            head += by_column(f"{name},", list(columns))
            found = by_length(models[name])
            for spec in order:
                mine = found.get(spec, {})
                cells.setdefault(spec, []).extend(mine[p] / found[BASE][p] if p in mine else None for p in columns)
            last = [row for row in models[name] if row.prefix == max(columns)]
            bits = {row.method: row.bits_without_tables for row in last} | bits
            counted = {row.method: row.effective_bits for row in last} | counted
        lines = []
        for spec in order:
            if only(spec):
                known = [v for v in cells[spec] if v is not None]
                line = [method(spec), *(number(b.get(spec), ".2f") for b in ((bits, counted) if shared else (bits,)))]
                line += [number(v, "z.2f") for v in cells[spec]]
                lines.append([*line, number(max(known, default=None), "z.2f")])
        return markdown([*head, "worst"], lines)

    return table


def result(*specs: str) -> Callable[[], str]:
    """The first sentence of a method's page: divergences over KIVI-2's, of the rows that README and evidence speak of."""

    def sentence() -> str:
        said, items = [], 0
        for spec in specs:
            bits, ratio = evidence.bits_of(spec), evidence.pair(spec, evidence.BASE)
            assert bits is not None and ratio is not None
            said.append(f"{method(spec)} at {bits:.2f} bits has {between(ratio.by_model.values())} times")
            items = ratio.items
        best = evidence.pair(specs[0], evidence.BEST_BASE)
        said[0] += " the divergence of KIVI-2 at 3.00 bits"
        if best is not None:
            least = between(best.by_model.values())
            said[0] += f" and {least} times that of the best KIVI at 3.00 (`{evidence.BEST_BASE}`)"
        where = f"on three models, {items} windows of five kinds of text, up to 30,000 tokens"
        return f"**Result.** {', '.join(said)}, {where} ([all](../evidence.md); [earlier rows](#measured-result))."

    return sentence


def between(numbers: Iterable[float]) -> str:
    """The least and the largest, to two places."""
    ends = sorted({f"{x:.2f}" for x in numbers}, key=float)
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def headline() -> str:
    """The README's first claims."""
    bits, ratio = evidence.bits_of("fold"), evidence.pair("fold", evidence.BASE)
    best = evidence.pair("fold", evidence.BEST_BASE)
    assert bits is not None and best is not None and ratio is not None
    return f"{claims.headline(bits, best, ratio)}\n{evidence_tasks.headline()}"


def by_column(what: str, columns: list[int]) -> list[str]:
    return [f"{what} {columns[0]:,}", *(f"{p:,}" for p in columns[1:])]


def of_method(*names: str) -> Callable[[str], bool]:
    """Whether a spec is of one of these methods, or KIVI at 2 bits, which ratios are of."""
    return lambda spec: spec.partition(":")[0] in names or spec == BASE


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:z.2f}"


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


PAGES = ("fold", "kivi", "squat", "innerq", "qjl", "turboquant", "gear", "zipcache")

RESULTS = {
    "fold": ("fold", "fold:bits=2"),
    "squat": ("squat", "squat_pre"),
    "innerq": ("innerq",),
    "qjl": ("qjl",),
    "turboquant": ("turboquant:bits=3", "turboquant"),
    "gear": ("gear",),
    "zipcache": ("zipcache",),
}
"""Methods that their pages begin with."""

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "headline": headline,
        "methods": catalogue,
        "serving": claims.serving,
        "attention": claims.attention,
        "throughput": claims.throughput,
        "laptop": claims.laptop,
        "at their best": evidence.at_their_best,
        "evidence": evidence.main,
        "answers": evidence_tasks.beside_full,
        "compare": comparison("compare-smollm2-135m.json", only=MAIN.__contains__),
    },
    **{
        f"docs/methods/{name}.md": {
            "lengths": worst(of_method(name, f"{name}_pre")),
            **({"result": result(*RESULTS[name])} if name in RESULTS else {}),
        }
        for name in PAGES
    },
    **{
        f"docs/methods/{name}.md": {"learned": worst(of_method(name, "fold"), "learned", shared=True)}
        for name in ("vqllm", "kvquant")
    },
    "docs/recipes.md": {"learned keys": evidence.learned_keys, "budget": evidence_budgets.budgets},
    "docs/methods/commvq.md": {
        "learned": worst(of_method("commvq", "fold"), "learned", shared=True),
        "ablation keys": ablation("9", "10", "figure 4"),
        "ablation values": ablation("11"),
        "training": ablation("training"),
    },
}


def bench(table: Callable[[], tuple[list[str], list[list[str]]]]) -> Callable[[], str]:
    return lambda: markdown(*table())


TABLES["docs/evidence.md"] = {
    "rows": evidence.rows_there,
    "claims": evidence_claims.claims,
    "at their best": evidence.at_their_best,
    "equal bytes": evidence.equal_bytes,
    "texts": evidence.texts,
    "by length": evidence.lengths,
    "everything": evidence.everything,
    "second panel": evidence_plots.lacking,
    **evidence_tasks.TABLES,
}
TABLES["docs/methods/squat.md"]["subspaces"] = bench(subspaces)
PICTURES = {"docs/plots/pareto.svg": evidence_plots.pareto}
for pages in (BENCH, OTHERS):
    for file, tables in pages.items():
        TABLES.setdefault(file, {}).update({name: bench(table) for name, table in tables.items()})
TABLES["docs/serving.md"]["serving"] = claims.serving


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    parser.add_argument("--lengths", type=pathlib.Path, metavar="FILE", help="print the divergence by prefix of a file")
    arguments = parser.parse_args()
    if arguments.lengths is not None:
        print(lengths(arguments.lengths.resolve())())
        return 0
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
            if not arguments.check:
                path.write_text(new, encoding="utf-8")
    for file, draw in PICTURES.items():
        path, drawn = ROOT / file, draw()
        if not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            stale.append(file)
            if not arguments.check:
                path.write_text(drawn, encoding="utf-8")
    if stale:
        print(f"{'stale' if arguments.check else 'written'}: {', '.join(stale)}")
    return int(bool(stale) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
