"""Where in a prompt a method finds what it is asked for: retrieval by position in a page, by age and by depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from kvfold.evaluation.report import figures
from kvfold.evaluation.results import Result

PAGE = 128
"""Tokens of a page of most methods. A hole in what they keep of a page would be at the same positions modulo it."""
BINS = 8
"""Parts of an axis that a line has a mean of."""
MEASURES = {
    "exact": figures.Axis("exact", low=0.0, high=1.0, written=lambda v: f"{100 * v:.0f}%"),
    "nll": figures.Axis("nll of values' tokens", written=lambda v: f"{v:.3g}"),
}
COLUMNS = ("place", "age", *MEASURES)

Line = dict[str, float | None]
"""A question: its row's columns, and the prompt's tokens before the questions as ``prefilled``."""
Along = tuple[str, Callable[[Line], float], tuple[float, float] | None, figures.Axis]
"""What a plot is by: its name, a question's place on its axis, the axis' ends or None for those of the questions, and it."""


def _tokens(value: float) -> str:
    return f"{value:,.0f}"


ALONG: tuple[Along, ...] = (
    (
        f"position modulo {PAGE}",
        lambda line: (line["place"] or 0.0) % PAGE,
        (0.0, float(PAGE)),
        figures.Axis(f"position modulo {PAGE} of the value in the list", low=0.0, high=float(PAGE)),
    ),
    (
        "age",
        lambda line: line["age"] or 0.0,
        None,
        figures.Axis("tokens from the value in the list to its question", low=0.0, written=_tokens),
    ),
    (
        "depth",
        lambda line: (line["place"] or 0.0) / (line["prefilled"] or 1.0),
        (0.0, 1.0),
        figures.Axis(
            "depth of the value in the list", low=0.0, high=1.0, written=lambda v: f"{100 * v:.0f}%"
        ),
    ),
)  # fmt: skip


def has(row: Result) -> bool:
    """Whether a row says where its questions' answers are, and what came of each."""
    return row.questions is not None and all(name in row.questions for name in COLUMNS)


def section(place: str, rows: Sequence[Result], methods: Sequence[str]) -> str:
    """A plot of each measure along each axis, a line per method. Empty where no rows have questions.

    Parameters
    ----------
    place : str
        Of what the rows are, for titles.
    methods : sequence of str
        All of the source's, so that a method has one color in all of its plots.
    """
    asked = {method: _lines([row for row in rows if row.method == method]) for method in methods}
    asked = {method: lines for method, lines in asked.items() if lines}
    if not asked:
        return ""
    parts = []
    for measure, axis in MEASURES.items():
        for name, at, ends, along in ALONG:
            low, high = ends or _ends([at(line) for lines in asked.values() for line in lines])
            found = [_mean(method, lines, at, measure, low, high) for method, lines in asked.items()]
            parts.append(figures.lines(f"{place}: {measure} by {name}", found, along, axis, methods))
    counts = sorted({len(lines) for lines in asked.values()})
    many = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    lacking = [row.method for row in rows if not has(row)]
    note = f"{many} questions of each method, a point for those of each of {BINS} parts of an axis."
    if lacking:
        note += f" {len(lacking)} rows do not say where their answers are: of {', '.join(dict.fromkeys(lacking))}."
    return f'<h4>{escape(place)}: by position</h4><p class="small">{escape(note)}</p><div class="plots">{"".join(parts)}</div>'


def _lines(rows: Sequence[Result]) -> list[Line]:
    """Questions of rows."""
    found: list[Line] = []
    for row in rows:
        if has(row):
            assert row.questions is not None
            columns = zip(*(row.questions[name] for name in COLUMNS), strict=True)
            found += [
                dict(zip(COLUMNS, values, strict=True)) | {"prefilled": float(row.prefilled)} for values in columns
            ]
    return found


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _mean(
    method: str, lines: Sequence[Line], at: Callable[[Line], float], measure: str, low: float, high: float
) -> figures.Line:
    """Means of a measure by part of an axis; parts without questions are left out. What is not finite has no place there."""
    parts: list[list[float]] = [[] for _ in range(BINS)]
    for line in lines:
        value = line[measure]
        part = min(int((at(line) - low) / (high - low) * BINS), BINS - 1)
        parts[part].append(math.inf if value is None else value)
    there = [i for i, part in enumerate(parts) if part]
    step = (high - low) / BINS
    return figures.Line(
        method,
        tuple(low + (i + 0.5) * step for i in there),
        tuple(math.fsum(parts[i]) / len(parts[i]) for i in there),
    )
