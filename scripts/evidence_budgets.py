"""The table of docs/recipes.md about ``fold:budget=B``: what was asked with and without a budget, of the same items.

``tables.py`` writes it, from rows of ``kvfold eval --methods none fold fold:budget=B`` in benchmarks/eval/ and
benchmarks/evidence/grid/.
"""

import pathlib

from evidence import GRID, MODELS, ROOT, markdown, plain

from kvfold.evaluation.results import ResultFile, files_in
from kvfold.evaluation.statistics import paired

FORMS = {"pairs": "key-value pairs", "records": "records in running text", "identifiers": "identifiers in code"}
LEAST = 6
"""Items for a line."""


def budgets() -> str:
    lines = []
    for model, (name, _) in MODELS.items():
        for suite, measure in (("retrieval", "exact"), ("divergence", "kld")):
            of = [file for file in _files(suite) if file.settings.model.startswith(model)]
            for task, length in sorted(
                {(row.task, row.length or 0) for file in of for row in file.rows.values()}, key=_order
            ):
                lines += [[name, *line] for line in _lines(of, task, length, measure)]
    head = ["model", "what", "items", "full precision", "`fold`", "bits", "with a budget", "bits", "difference [95%]"]
    return markdown(head, lines)


def _files(suite: str) -> list[ResultFile]:
    folders: tuple[pathlib.Path, ...] = (ROOT / "eval", ROOT / GRID)
    files = [ResultFile.read(path) for folder in folders for path in files_in(folder, f"{suite}-")]
    return [file for file in files if any(_budget(row.method) for row in file.rows.values())]


def _budget(method: str) -> bool:
    return method.startswith("fold:budget=")


def _order(of: tuple[str, int]) -> tuple[int, str, int]:
    forms = list(FORMS)
    return (forms.index(of[0]) if of[0] in forms else len(forms), of[0], of[1])


def _lines(files: list[ResultFile], task: str, length: int, measure: str) -> list[list[str]]:
    """A line for each budget."""
    by: dict[str, dict[str, float]] = {}
    bits: dict[str, float] = {}
    for file in files:
        for row in file.rows.values():
            value = row.scores.get(measure)
            if (row.task, row.length or 0) == (task, length) and value is not None:
                by.setdefault(plain(row.method), {})[row.item] = value
                bits[plain(row.method)] = row.bits_without_tables or 0.0
    found = []
    for method in sorted(filter(_budget, by), key=lambda name: -bits[name]):
        both = sorted(by[method].keys() & by.get("fold", {}).keys())
        if len(both) < LEAST:
            continue
        exact = measure == "exact"
        own, other = ([by[name][item] for item in both] for name in (method, "fold"))
        full = [by["none"][item] for item in both if item in by.get("none", {})]
        test = paired(own, other, higher_is_better=exact)
        ends = (
            "" if test.low is None or test.high is None else f" [{_said(test.low, exact)}, {_said(test.high, exact)}]"
        )
        what = FORMS.get(task, f"{task}, KL divergence")
        found.append(
            [
                f"{what}, {length:,}",
                str(len(both)),
                (_said(sum(full) / len(full), exact) if exact else "0") if full else "-",
                _said(sum(other) / len(other), exact),
                f"{bits['fold']:.2f}",
                _said(sum(own) / len(own), exact),
                f"{bits[method]:.2f}",
                f"{_said(test.mean, exact)}{ends}: {test.verdict}",
            ]
        )
    return found


def _said(value: float, exact: bool) -> str:
    return f"{100 * value:.1f}%" if exact else f"{value:.4f}"
