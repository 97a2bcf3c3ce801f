"""Tables of results: means with intervals, and every method against a baseline on the same items."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvfold.errors import KVFoldError
from kvfold.evaluation.results import Result, ResultFile, differing
from kvfold.evaluation.statistics import Difference, Estimate, estimate, paired
from kvfold.evaluation.suites import REGISTRY, Measure


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method on the items of one task and length.

    Attributes
    ----------
    suite, task, length, method
    items
        Different prompts that were asked.
    repeats
        Further items with one of these prompts: they are one question, and the same answer again is no evidence.
    untested
        Those of them in which nothing was tested; they are in no mean.
    broken
        Those of them in which something was tested and a number is not finite. The measure then has no mean: one of the others
        would flatter.
    tested, read
        Tokens that read packed keys and values, of all that were scored or generated.
    effective_bits, bits_without_tables, cache_bytes, full_cache_bytes, seconds
        Means over rows; None where they do not say.
    estimates
        By measure; a measure without any number is left out.
    differences
        Against the baseline on the items that both have, by measure; empty for the baseline itself.
    """

    suite: str
    task: str
    length: int | None
    method: str
    items: int
    untested: int
    broken: int
    tested: int
    read: int
    effective_bits: float | None
    bits_without_tables: float | None
    cache_bytes: float | None
    full_cache_bytes: float | None
    seconds: float
    estimates: dict[str, Estimate]
    differences: dict[str, Difference]
    repeats: int = 0


def summarize(
    found: ResultFile, baseline: str = "none", methods: Sequence[str] = (), items: Sequence[str] | None = None
) -> list[Cell]:
    """Cells of a file: task by task, length by length, in the order of the methods.

    Parameters
    ----------
    baseline
        Method that the others are compared with, where it has rows.
    methods
        Which, and in which order; none: all, as they come.
    items
        Which items; None: all.
    """
    wanted = None if items is None else set(items)
    rows = [row for row in found.rows.values() if wanted is None or row.item in wanted]
    order = list(methods) or list(dict.fromkeys(row.method for row in rows))
    groups = dict.fromkeys((row.task, row.length) for row in rows)
    cells = []
    for task, length in groups:
        here: dict[str, list[Result]] = {name: [] for name in order}
        for row in rows:
            if (row.task, row.length) == (task, length) and row.method in here:
                here[row.method].append(row)
        base = here.get(baseline, [])
        for method, mine in here.items():
            if mine:
                against = {} if method == baseline or not base else compared(found, mine, found, base)
                asked = different(mine)
                repeats = len({row.item for row in mine}) - len(asked)
                cells.append(_cell(found, task, length, method, asked, against, repeats))
    return cells


def different(rows: Sequence[Result]) -> list[Result]:
    """Rows of one method, one for each prompt: of an item that was asked again in other words the newest counts, of items with
    the same prompt the first."""
    newest = {row.item: row for row in rows}
    by_prompt: dict[str, Result] = {}
    for row in newest.values():
        by_prompt.setdefault(row.prompt_sha256, row)
    return list(by_prompt.values())


def compared(a: ResultFile, rows: Sequence[Result], b: ResultFile, baseline: Sequence[Result]) -> dict[str, Difference]:
    """Differences by measure, on the items that both have with the same prompt and a number.

    Raises
    ------
    KVFoldError
        The settings of the two files differ: says in what.
    """
    if wrong := differing(a.settings, b.settings):
        raise KVFoldError(
            f"results: {a.settings.suite} of {rows[0].method} and of {baseline[0].method} are not compared; they differ in "
            + "; ".join(wrong)
        )
    by_prompt = {(row.item, row.prompt_sha256): row for row in baseline}
    asked = different([row for row in rows if (row.item, row.prompt_sha256) in by_prompt])
    pairs = [(row, by_prompt[row.item, row.prompt_sha256]) for row in asked]
    found = {}
    for measure in REGISTRY[a.settings.suite].measures:
        both = [(x.scores.get(measure.name), y.scores.get(measure.name)) for x, y in pairs if x.tested and y.tested]
        known = [(x, y) for x, y in both if x is not None and y is not None]
        if known and len(known) == len(both):
            tested = [row for row, base in pairs if row.tested and base.tested]
            mine, theirs = (_by_problem(a.settings.suite, tested, side) for side in zip(*known, strict=True))
            found[measure.name] = paired(mine, theirs, measure.higher_is_better)
    return found


def _cell(
    found: ResultFile,
    task: str,
    length: int | None,
    method: str,
    rows: list[Result],
    against: dict[str, Difference],
    repeats: int,
) -> Cell:
    estimates = {}
    measures = REGISTRY[found.settings.suite].measures
    for measure in measures:
        values = [row.scores.get(measure.name) for row in rows if row.tested]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            tested = [row for row in rows if row.tested]
            estimates[measure.name] = estimate(_by_problem(found.settings.suite, tested, known))
    return Cell(
        suite=found.settings.suite,
        task=task,
        length=length,
        method=method,
        items=len(rows),
        untested=sum(not row.tested for row in rows),
        broken=sum(row.tested > 0 and any(v is None for v in row.scores.values()) for row in rows),
        tested=sum(row.tested for row in rows),
        read=sum(row.read for row in rows),
        effective_bits=_mean([row.effective_bits for row in rows]),
        bits_without_tables=_mean([row.bits_without_tables for row in rows]),
        cache_bytes=_mean([row.cache_bytes for row in rows]),
        full_cache_bytes=_mean([row.full_cache_bytes for row in rows]),
        seconds=_known([row.seconds for row in rows]),
        estimates=estimates,
        differences=against,
        repeats=repeats,
    )


def _by_problem(suite: str, rows: Sequence[Result], values: Sequence[float]) -> list[float]:
    """A value per row, or per problem where seeds ask the same ones again: their answers are no independent ones."""
    if not REGISTRY[suite].seeds_repeat:
        return list(values)
    found: dict[str, list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        found.setdefault(row.item.rpartition(".")[2], []).append(value)
    return [_known(own) for own in found.values()]


def average(weights: Mapping[str, float], cells: Sequence[Cell], method: str) -> float | None:
    """An average of a paper, of a method, 0 to 1; None where one of its tasks has no number, or two lengths have.

    A task of several (bbh) is the mean of them.
    """
    total = 0.0
    for task, weight in weights.items():
        found = [c for c in cells if c.method == method and (c.task == task or c.task.startswith(f"{task}_"))]
        mains = [c.estimates.get(REGISTRY[c.suite].measures[0].name) for c in found]
        means = [main.mean for main in mains if main is not None]
        if not found or len(means) < len(found) or len({c.length for c in found}) > 1:
            return None
        total += weight * math.fsum(means) / len(means)
    return total


def to_dict(found: Sequence[ResultFile], cells: Sequence[Cell], baseline: str) -> dict[str, Any]:
    """For JSON: the settings of every file and all cells."""
    return {
        "baseline": baseline,
        "settings": [{"file": file.path.name, **file.settings.to_dict()} for file in found],
        "runs": [{"file": file.path.name, **run} for file in found for run in file.runs],
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }


def shown(measure: Measure, value: Estimate) -> str:
    """``97.5% [86.2, 99.6]``."""
    middle = _number(measure, value.mean) + ("%" if measure.shown == "percent" else "")
    if value.low is None or value.high is None:
        return middle
    return f"{middle} [{_number(measure, value.low)}, {_number(measure, value.high)}]"


def shown_difference(measure: Measure, value: Difference) -> str:
    """``-4.0 [-7.1, -0.9] worse``; of perplexities, the ratio."""
    cells = [None if v is None else _signed(measure, v) for v in (value.mean, value.low, value.high)]
    interval = f" [{cells[1]}, {cells[2]}]" if cells[1] is not None else ""
    return f"{cells[0]}{interval} {value.verdict}"


def _signed(measure: Measure, value: float) -> str:
    if measure.shown == "perplexity":
        return f"x{_number(measure, value)}"
    return f"{'+' if value > 0 else ''}{_number(measure, value)}"


def _number(measure: Measure, value: float) -> str:
    if measure.shown == "percent":
        return f"{100 * value:z.1f}"
    if measure.shown == "perplexity":
        value = math.exp(min(value, 700))
    if abs(value) >= 1e4:
        return f"{value:.1e}"
    return f"{value:z.4f}" if abs(value) < 1 else f"{value:z.3f}" if abs(value) < 100 else f"{value:z.1f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _known(known) if known else None


def _known(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
