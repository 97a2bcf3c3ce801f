"""Exact retrieval beside divergence: what methods lose of key-value pairs, by their bits, from other rows of the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from kvfold.evaluation.report import figures
from kvfold.evaluation.report.sources import Source
from kvfold.evaluation.results import ResultFile
from kvfold.evaluation.summary import Cell

Panel = Callable[[int | None, Sequence[str]], str]
"""A second panel for a length and the first panel's methods; empty where there is none."""
LOST = figures.Axis("exact lost, points", written=lambda v: f"{v:.3g}")


def no_panel(length: int | None, methods: Sequence[str]) -> str:
    """Of sections that have one panel."""
    return ""


Summary = Callable[[ResultFile, str], list[Cell]]
"""Cells of a file against a baseline, as :func:`~kvfold.evaluation.summary.summarize` makes them."""


def retrieval_panel(
    source: Source, sources: Sequence[Source], bits: figures.Axis, colors: Sequence[str], summary: Summary
) -> Panel:
    """For a file of divergence: the loss on exact retrieval in files of the same weights and type, a panel of each.

    Parameters
    ----------
    bits : Axis
        Of effective bits.
    colors : sequence of str
        The section's methods, which have these colors in all of its plots.
    summary : callable
        Which remembers: several files have panels of one.
    """
    mine = source.found.settings
    if source.command != "eval" or mine.suite != "divergence":
        return no_panel

    def alike(other: Source) -> bool:
        theirs = other.found.settings
        same = (theirs.model, theirs.weights_sha256, theirs.dtype) == (mine.model, mine.weights_sha256, mine.dtype)
        return other.command == "eval" and theirs.suite == "retrieval" and same

    found = [(other.name, summary(other.found, "none")) for other in sources if alike(other)]

    def panel(length: int | None, methods: Sequence[str]) -> str:
        return "".join(_drawn(name, cells, length, methods, bits, colors) for name, cells in found)

    return panel


def _drawn(
    name: str,
    cells: Sequence[Cell],
    length: int | None,
    methods: Sequence[str],
    bits: figures.Axis,
    colors: Sequence[str],
) -> str:
    points = []
    for cell in cells:
        lost = cell.differences.get("exact")
        if cell.length == length and lost is not None and cell.effective_bits is not None:
            low, high = (None if end is None else -100 * end for end in (lost.high, lost.low))
            points.append(figures.Point(cell.method, cell.effective_bits, -100 * lost.mean, low, high))
    there = {point.method for point in points}
    missing = [method for method in methods if method not in there and method != "none"]
    where = "" if length is None else f", {length:,} tokens"
    every = list(dict.fromkeys((*colors, *there)))
    title = f"key-value pairs{where}: exact lost by effective bits"
    drawn = figures.pareto(title, points, bits, LOST, False, every)
    said = f"Points of exact values against none on the same prompts, of {name}."
    if not drawn:
        said = f"Of {name} no two methods have rows of key-value pairs{where} to be drawn."
    elif missing:
        said += f" No rows: {', '.join(missing)}."
    return f'<div>{drawn}<p class="small">{escape(said)}</p></div>'
