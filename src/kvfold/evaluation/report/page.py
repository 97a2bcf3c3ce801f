"""One self-contained page of rows: tables, plots and verdicts, file by file. It holds nothing that is not in the rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from functools import cache, partial
from html import escape
from pathlib import Path

from kvfold.evaluation.report import figures, questions
from kvfold.evaluation.report.beside import Panel, Summary, no_panel, retrieval_panel
from kvfold.evaluation.report.layers import section as layers_section
from kvfold.evaluation.report.sources import Source, Sources, read
from kvfold.evaluation.report.tables import table as _rows
from kvfold.evaluation.results import Result, ResultFile
from kvfold.evaluation.suites import REGISTRY, Measure
from kvfold.evaluation.summary import Cell, shown, shown_difference, summarize
from kvfold.sheet import as_bytes

BASELINES = ("none", "fold")
FEW_BITS = 10.0
"""Beyond, hardly anything is folded, and a plot that held it would show all others as one point."""
BITS = figures.Axis("effective bits", low=0.0, limit=FEW_BITS, written=lambda v: f"{v:.4g}")
LAYER = "layer"
"""What the series of some suites go along; then each of their measures is drawn."""

STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --link: #2563eb; }
@media (prefers-color-scheme: dark) { :root { --link: #93c5fd; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-top: 2px solid var(--line); padding-top: 1rem; line-height: 1.25; }
h3 { margin: 1.5rem 0 .5rem; } a { color: var(--link); }
.wide { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--soft); text-align: right; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
td.words, th.words { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.grids { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); gap: 1rem; }
figure { margin: .6rem 0; } details { margin: .5rem 0; } figcaption { font-weight: 600; font-size: .9rem; }
svg { width: 100%; height: auto; color: inherit; } svg text { fill: currentColor; font: 10.5px system-ui, sans-serif; }
svg .tiny { font-size: 7.5px; } svg .grid { stroke: var(--soft); } svg .series, svg .frontier { fill: none; stroke-width: 1.8; }
svg .frontier { stroke: currentColor; opacity: .35; } svg circle { stroke: Canvas; }
.legend { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .8rem; }
.key { width: 24px; height: 10px; margin-right: .4rem; } .small { font-size: .82rem; opacity: .85; margin: .3rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .85rem; }
dt { opacity: .75; } dd { margin: 0; min-width: 0; } summary { cursor: pointer; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
"""


def report(paths: Sequence[Path], baselines: Sequence[str] = BASELINES) -> str:
    """An HTML page of all rows in files and folders; the same rows give the same page.

    Parameters
    ----------
    paths
        Files and folders of ``kvfold eval``, ``compare`` and ``domains``.
    baselines
        Methods that the others are compared with, on the same items of the same file.

    Raises
    ------
    KVFoldError
        See :func:`kvfold.evaluation.report.sources.read`.
    """
    found = read(paths)
    summary: Summary = cache(summarize)
    sections = [_section(i, source, baselines, found.sources, summary) for i, source in enumerate(found.sources)]
    sections += [layers_section(f"layers-{i}", source) for i, source in enumerate(found.layers)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvfold: evaluation</title><style>{STYLE}</style></head><body>\n"
        + _head(found)
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _head(found: Sources) -> str:
    rows = sum(len(source.found.rows) for source in found.sources)
    links = "".join(
        f'<li><a href="#source-{i}">{escape(_title(source))}</a> '
        f'<span class="small">{escape(source.name)}, {len(source.found.rows)} rows</span></li>'
        for i, source in enumerate(found.sources)
    )
    links += "".join(
        f'<li><a href="#layers-{i}">{escape(layers.held["model"])}: what a layer loses</a> '
        f'<span class="small">{escape(layers.name)}</span></li>'
        for i, layers in enumerate(found.layers)
    )
    return (
        f"<h1>kvfold: evaluation</h1><p>{rows:,} rows in {len(found.sources)} files. The rows of one section have all settings "
        "alike. Rows of different sections are not compared: a panel of retrieval beside divergence is of its own rows.</p>"
        "<p>Scored and generated tokens read the folded cache. Intervals are of 95%. A verdict is about differences on the "
        "same items; “no difference shown” is no proof that there is none.</p>"
        f"<ol>{links}</ol>" + _missing(found)
    )


def _missing(found: Sources) -> str:
    """What a reader might look for and not find."""
    evaluated = [source.found for source in found.sources if source.command == "eval"]
    there = {file.settings.suite for file in evaluated}
    lines = [f"{name}: no rows of kvfold eval ({kind.summary})" for name, kind in REGISTRY.items() if name not in there]
    if not any(row.decode_tokens_per_s for source in found.sources for row in source.found.rows.values()):
        lines.append("decode time: no rows say it, so there is no plot of quality against it")
    if "divergence" in there and not any(row.series for file in evaluated for row in file.rows.values()):
        lines.append("divergence by position: no rows have it")
    silent = [
        source.name
        for source in found.sources
        if source.found.settings.suite == "retrieval" and not any(map(questions.has, source.found.rows.values()))
    ]
    if silent:
        lines.append(
            f"retrieval by position modulo {questions.PAGE}, by age and by depth: rows of {', '.join(silent)} do not say where "
            "the answers are"
        )
    if not found.layers:
        lines.append("error by layer: no file of kvfold recommend --json")
    older = [source.name for source in found.sources if source.command != "eval"]
    if older:
        lines.append(
            f"windows, hash of the weights and divergence by position of {len(older)} files of kvfold compare and domains: "
            "their rows do not say them"
        )
    if found.others:
        lines.append(f"not read, because they hold no rows of an evaluation: {', '.join(found.others)}")
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2 id="missing">What is missing</h2><ul>{items}</ul>' if lines else ""


def _title(source: Source) -> str:
    settings = source.found.settings
    lengths = sorted({row.length for row in source.found.rows.values() if row.length is not None})
    said = [settings.suite, settings.model, settings.dtype, settings.device]
    return ", ".join(said + ([_counts(lengths) + " tokens"] if lengths else []))


def _counts(values: Sequence[int]) -> str:
    """``1,024, 4,096 and 16,384``."""
    shown = [f"{value:,}" for value in values]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _section(index: int, source: Source, baselines: Sequence[str], sources: Sequence[Source], summary: Summary) -> str:
    file = source.found
    tables = {name: summary(file, name) for name in baselines if any(r.method == name for r in file.rows.values())}
    first, cells = next(iter(tables.items()), ("", summarize(file, "")))
    measures = REGISTRY[file.settings.suite].measures
    methods = list(dict.fromkeys(cell.method for cell in cells))
    panel = retrieval_panel(source, sources, BITS, methods, summary)
    several = source.command == "eval" and len({cell.task for cell in cells}) > 1
    parts = _groups(file, tables, cells, measures, first, methods, no_panel if several else panel)
    if several:
        whole = _all_tasks(file)
        tables = {name: summarize(whole, name) for name in tables}
        cells = next(iter(tables.values()), summarize(whole, ""))
        together = _groups(whole, tables, cells, measures, first, methods, panel)
        parts = f"{together}<details><summary>By task</summary>{parts}</details>"
    heats = _heats(list(file.rows.values()), measures[0], methods)
    body = f"{_settings(source)}{parts}{heats}"
    if source.command != "eval":
        body = f"<details><summary>Tables and plots</summary>{body}</details>"
    return f'<section id="source-{index}"><h2>{escape(_title(source))}</h2>{body}</section>'


def _groups(
    file: ResultFile,
    tables: dict[str, list[Cell]],
    cells: Sequence[Cell],
    measures: Sequence[Measure],
    first: str,
    methods: Sequence[str],
    panel: Panel,
) -> str:
    """Tables, plots and verdicts of each task and length; ``tables``: cells against each baseline."""
    parts = []
    for group in dict.fromkeys((cell.task, cell.length) for cell in cells):
        here = [cell for cell in cells if (cell.task, cell.length) == group]
        rows = [row for row in file.rows.values() if (row.task, row.length) == group]
        parts.append(f"<h3>{escape(_place(group))}</h3>")
        parts.append(_table(here, rows, measures, first))
        parts.append(_plots(group, here, rows, measures[0], methods, panel))
        parts.append(questions.section(_place(group), rows, methods))
        for name, all_cells in tables.items():
            parts.append(_verdicts([c for c in all_cells if (c.task, c.length) == group], measures, name))
    return "".join(parts)


def _all_tasks(file: ResultFile) -> ResultFile:
    """The same rows as if all were of one task: an item of any counts once."""
    whole = ResultFile(file.path, file.settings)
    whole.runs = file.runs
    whole.rows = {key: dataclasses.replace(row, task="all tasks") for key, row in file.rows.items()}
    return whole


def _place(group: tuple[str, int | None]) -> str:
    task, length = group
    return task if length is None else f"{task}, {length:,} tokens"


def _settings(source: Source) -> str:
    settings, runs = source.found.settings, source.found.runs
    unsaid = "not in the rows"
    windows = unsaid
    if settings.windows is not None:
        windows = f"{settings.windows[0]} first and {settings.windows[1]} newest tokens in full precision"
    elif source.command == "eval":
        windows = "each method's own"
    said = {
        "file": f"{source.name} (kvfold {source.command}; SHA-256 {source.sha256[:12]})",
        "model": f"{settings.model}, {settings.parameters:,} parameters, {settings.dtype}",
        "weights": settings.weights_sha256[:12] or unsaid,
        "device": settings.device,
        "windows": windows,
        "tokens per call": str(settings.chunk),
        "options": json.dumps(settings.options),
        "texts": ", ".join(f"{name} ({digest[:12]})" for name, digest in settings.texts.items()) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in settings.versions.items()),
        "runs": "; ".join(", ".join(f"{k} {v}" for k, v in run.items() if k != "run") for run in runs) or unsaid,
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in said.items())
    codes = {run.get("code") for run in runs if "code" in run}
    note = f'<p class="small">{len(codes)} states of the code made these rows.</p>' if len(codes) > 1 else ""
    return f"<details><summary>Settings</summary><dl>{items}</dl></details>{note}"


# ---- tables ----------------------------------------------------------------------------------------------------------


def _name(measure: Measure) -> str:
    return "perplexity" if measure.shown == "perplexity" else measure.name


def _table(cells: Sequence[Cell], rows: Sequence[Result], measures: Sequence[Measure], baseline: str) -> str:
    """A line per method: sizes, windows, means with intervals, and what differs from the baseline."""
    has = [m for m in measures if any(m.name in cell.estimates for cell in cells)] or list(measures[:1])
    main = has[0]
    sized = any(cell.cache_bytes is not None for cell in cells)
    speeds = any(row.decode_tokens_per_s for row in rows)
    head = ["method", "bits", *(["cache", "of full"] if sized else []), "windows", "items", _name(main)]
    head += [f"against {baseline}"] if baseline else []
    head += [_name(m) for m in has[1:]] + (["decode tokens/s"] if speeds else []) + ["s"]

    def line(cell: Cell) -> list[str]:
        mine = [row for row in rows if row.method == cell.method]
        none = "not finite" if cell.broken else "not tested" if cell.untested else "-"
        values = [shown(m, cell.estimates[m.name]) if m.name in cell.estimates else none for m in has]
        windows = {(row.sink, row.recent) for row in mine}
        found = [cell.method, "-" if cell.effective_bits is None else f"{cell.effective_bits:.3f}"]
        if sized:
            of_full = _share(cell.cache_bytes, cell.full_cache_bytes)
            found += ["-" if cell.cache_bytes is None else as_bytes(cell.cache_bytes), of_full]
        found.append(", ".join("-" if None in pair else f"{pair[0]} + {pair[1]}" for pair in sorted(windows, key=str)))
        found += [str(cell.items - cell.untested), values[0]]
        if baseline:
            difference = cell.differences.get(main.name)
            found.append("" if difference is None else shown_difference(main, difference))
        found += values[1:]
        if speeds:
            found.append(
                ", ".join(f"{r.decode_tokens_per_s:.1f} ({r.decode_path})" for r in mine if r.decode_tokens_per_s)
            )
        return [*found, f"{cell.seconds:.1f}"]

    return _rows(head, map(line, cells)) + _notes(cells)


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.0f}%"


def _notes(cells: Sequence[Cell]) -> str:
    lines = []
    for cell in cells:
        if cell.broken:
            lines.append(
                f"{cell.method}: numbers of {cell.broken} of {cell.items} items are not finite; it has no mean"
            )
        if cell.untested:
            lines.append(f"{cell.method}: in {cell.untested} of {cell.items} items no token read anything packed")
        elif cell.tested < cell.read:
            lines.append(f"{cell.method}: {cell.tested:,} of {cell.read:,} tokens read something packed")
    return "".join(f'<p class="small">{escape(line)}.</p>' for line in lines)


def _verdicts(cells: Sequence[Cell], measures: Sequence[Measure], baseline: str) -> str:
    """Every measure of every method against a baseline."""
    rows = [
        [
            cell.method,
            _name(m),
            shown_difference(m, d).removesuffix(f" {d.verdict}"),
            str(d.items),
            f"{d.p:.3f}",
            d.verdict,
        ]
        for cell in cells
        for m in measures
        if (d := cell.differences.get(m.name)) is not None
    ]
    if not rows:
        return ""
    head = ["method", "measure", "difference (of perplexities: ratio)", "items", "p", "verdict"]
    said = f"Verdicts against {escape(baseline)}, on the same items"
    return f"<details><summary>{said}</summary>{_rows(head, rows, (1, 5))}</details>"


# ---- plots -----------------------------------------------------------------------------------------------------------


def _axis(measure: Measure, label: str = "") -> figures.Axis:
    label = label or _name(measure)
    if measure.shown == "percent":
        return figures.Axis(label, low=0.0, high=1.0, written=lambda v: f"{100 * v:.0f}%")
    if measure.shown == "perplexity":
        return figures.Axis(f"{label} (mean nats)", written=lambda v: f"{v:.3g} ({math.exp(min(v, 700)):.3g})")
    return figures.Axis(label, log=True, written=lambda v: f"{v:.3g}")


def _plots(
    group: tuple[str, int | None],
    cells: Sequence[Cell],
    rows: Sequence[Result],
    main: Measure,
    methods: Sequence[str],
    panel: Panel,
) -> str:
    place = _place(group)
    y = _axis(main)
    known = [(cell, cell.estimates[main.name]) for cell in cells if main.name in cell.estimates]
    points = [
        figures.Point(cell.method, cell.effective_bits, e.mean, e.low, e.high)
        for cell, e in known
        if cell.effective_bits is not None
    ]
    plot = partial(figures.pareto, higher_is_better=main.higher_is_better, colors=methods)
    parts = [plot(f"{place}: {y.label} by effective bits", points, BITS, y)]
    parts += _panels(place, cells, BITS, methods)
    parts.append(panel(group[1], [cell.method for cell in cells]))
    times = []
    for cell, e in known:
        speeds = [row.decode_tokens_per_s for row in rows if row.method == cell.method]
        if speeds and all(speeds):
            mean = math.fsum(1000 / speed for speed in speeds if speed) / len(speeds)
            times.append(figures.Point(cell.method, mean, e.mean, e.low, e.high))
    x = figures.Axis("decode ms per token", low=0.0, written=lambda v: f"{v:.4g}")
    parts.append(plot(f"{place}: {y.label} by decode time", times, x, y))
    if cells:
        suite = REGISTRY[cells[0].suite]
        for measure in suite.measures if suite.along == LAYER else (main,):
            parts.append(_positions(place, rows, measure, methods, suite.along))
    return f'<div class="plots">{"".join(parts)}</div>' if any(parts) else ""


def _panels(place: str, cells: Sequence[Cell], x: figures.Axis, methods: Sequence[str]) -> list[str]:
    """A suite's further measures by effective bits."""
    suite = REGISTRY[cells[0].suite]
    parts = []
    for measure in (m for m in suite.measures if m.name in suite.panels):
        y = _axis(measure)
        points = [
            figures.Point(cell.method, cell.effective_bits, e.mean, e.low, e.high)
            for cell in cells
            if (e := cell.estimates.get(measure.name)) is not None and cell.effective_bits is not None
        ]
        title = f"{place}: {y.label} by effective bits"
        parts.append(figures.pareto(title, points, x, y, measure.higher_is_better, methods))
    return parts


def _positions(place: str, rows: Sequence[Result], main: Measure, methods: Sequence[str], along: str) -> str:
    """Means over items of the main measure's series, along the scored tokens or the layers."""
    found = []
    for method in methods:
        mine = [row for row in rows if row.method == method and row.tested]
        series = [row.series.get(main.name) for row in mine]
        known = [[v for v in values if v is not None] for values in series if values is not None]
        if not known or len(known) < len(mine) or len({len(values) for values in known}) > 1:
            continue
        pieces, read = len(known[0]), math.fsum(row.read for row in mine) / len(mine)
        xs = tuple(float(i) if along == LAYER else (i + 0.5) / pieces * read for i in range(pieces))
        found.append(
            figures.Line(method, xs, tuple(math.fsum(v[i] for v in known) / len(known) for i in range(pieces)))
        )
    kept = [line for line in found if line.method != "none" or not _axis(main).log]
    axis = figures.Axis(along, low=0.0)
    what = LAYER if along == LAYER else "position"
    return figures.lines(f"{place}: {_name(main)} by {what}", kept, axis, _axis(main), methods)


def _heats(rows: Sequence[Result], main: Measure, methods: Sequence[str]) -> str:
    """A grid per method where rows have depths."""
    placed = [row for row in rows if "depth" in row.tags and row.length is not None and row.tested]
    if not placed:
        return ""
    depths = sorted({row.tags["depth"] for row in placed})
    lengths = sorted({row.length for row in placed if row.length is not None})
    parts = []
    for method in methods:
        cells: dict[tuple[int, int], tuple[float, int]] = {}
        for depth in depths:
            for length in lengths:
                here = [r for r in placed if (r.method, r.tags["depth"], r.length) == (method, depth, length)]
                values = [v for r in here if (v := r.scores.get(main.name)) is not None]
                if values and len(values) == len(here):
                    cells[depth, length] = (math.fsum(values) / len(values), len(values))
        if cells:
            parts.append(figures.heat(method, depths, lengths, cells))
    return (
        f'<h3>By depth and length: {escape(_name(main))}</h3><div class="grids">{"".join(parts)}</div>' if parts else ""
    )
