"""Plots as inline SVG: no script, no font, nothing from elsewhere. Every mark carries the numbers that it stands for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 42
COLORS = (
    "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2",
    "#be185d", "#65a30d", "#92400e", "#475569", "#0d9488", "#c026d3", "#ea580c",
)  # fmt: skip
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4")
LETTER = 5.6
"""Width of a label's letter, about."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes
    ----------
    label : str
    log : bool
    low, high : float or None
        Where it begins and ends; None: at the marks.
    limit : float
        What lies beyond has no place on it.
    written : callable
        A tick's text.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    limit: float = math.inf
    written: Callable[[float], str] = lambda value: f"{value:.10g}"

    def holds(self, value: float) -> bool:
        """Whether the axis has a place for it."""
        return math.isfinite(value) and value <= self.limit and (value > 0 or not self.log)


@dataclasses.dataclass(frozen=True)
class Point:
    """A method's place in a plot; ``low`` and ``high`` are the ends of y's interval."""

    method: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """A method's numbers along x."""

    method: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Color and dashes: a color for each kind of method, dashes for its settings."""
    families: dict[str, list[str]] = {}
    for method in methods:
        families.setdefault(family(method), []).append(method)
    return {
        method: (COLORS[i % len(COLORS)], DASHES[j % len(DASHES)])
        for i, members in enumerate(families.values())
        for j, method in enumerate(members)
    }


def family(method: str) -> str:
    """The method's name without options."""
    return method.split(":")[0].split("+")[0]


class _Scale:
    """From numbers to places of a picture."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis, self.start, self.end = axis, start, end
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.log:
            low, high = low / 1.25, high * 1.25
        elif high <= low:
            low, high = low - 0.5, high + 0.5
        else:
            room = (high - low) * 0.06
            low = low - room if axis.low is None else low
            high = high + room if axis.high is None else high
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        at, low, high = (math.log(v) if self.axis.log else v for v in (value, self.low, self.high))
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        if self.axis.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1,) if last - first > 3 else (1, 2, 5)
            return [v for e in range(first, last + 1) for s in steps if self.low <= (v := s * 10.0**e) <= self.high]
        raw = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _frame(x: _Scale, y: _Scale) -> list[str]:
    """Axes, ticks and what they are of."""
    parts = []
    bottom = HEIGHT - BOTTOM
    for value in x.ticks():
        at = x(value)
        parts.append(f'<line class="grid" x1="{at}" y1="{TOP}" x2="{at}" y2="{bottom}"/>')
        parts.append(_text(at, bottom + 15, x.axis.written(value), "middle"))
    for value in y.ticks():
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at}" x2="{WIDTH - RIGHT}" y2="{at}"/>')
        parts.append(_text(LEFT - 5, at + 4, y.axis.written(value), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x.axis.label, "middle"))
    middle = (TOP + bottom) / 2
    parts.append(_text(14, middle, y.axis.label, "middle", f' transform="rotate(-90 14 {middle})"'))
    return parts


def _svg(kind: str, name: str, parts: Sequence[str], width: float = WIDTH, height: float = HEIGHT) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(name)}">'
        + "".join(parts)
        + "</svg>"
    )


def _figure(title: str, svg: str, below: str = "") -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{below}</figure>"


def frontier(points: Sequence[Point], higher_is_better: bool) -> list[Point]:
    """Those that no other one beats: none has as little x and a better y. By x."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -p.y if higher_is_better else p.y)):
        if not best or (point.y > best[-1].y if higher_is_better else point.y < best[-1].y):
            best.append(point)
    return best


def pareto(
    title: str,
    points: Sequence[Point],
    x_axis: Axis,
    y_axis: Axis,
    higher_is_better: bool,
    colors: Sequence[str],
    named: Mapping[str, str] | None = None,
) -> str:
    """A point per method, its interval, and a line through those that no other one beats.

    What an axis has no place for is named below the plot. Empty where fewer than two points are left.

    Parameters
    ----------
    colors : sequence of str
        All methods of the source, so that a method has one color in all of its plots.
    named : mapping, optional
        What has to be written of some methods, at the end of a line if there is no room beside the point; others have their
        names where there is room.
    """
    named = named or {}
    shown = [p for p in points if x_axis.holds(p.x) and y_axis.holds(p.y)]
    if len(shown) < 2:
        return ""
    left = [p for p in points if p not in shown]
    ends = [v for p in shown for v in (p.y, p.low, p.high) if v is not None and y_axis.holds(v)]
    x = _Scale(x_axis, [p.x for p in shown], LEFT, WIDTH - RIGHT)
    y = _Scale(y_axis, ends, HEIGHT - BOTTOM, TOP)
    style = styles(colors)
    best = frontier(shown, higher_is_better)
    parts = _frame(x, y)
    parts.append(f'<polyline class="frontier" points="{" ".join(f"{x(p.x)},{y(p.y)}" for p in best)}"/>')
    for p in shown:
        if p.low is not None and p.high is not None and p.high > p.low:
            low = y(p.low) if y_axis.holds(p.low) else HEIGHT - BOTTOM
            parts.append(
                f'<line stroke="{style[p.method][0]}" x1="{x(p.x)}" y1="{low}" x2="{x(p.x)}" y2="{y(p.high)}"/>'
            )
    for p in shown:
        said = f"{p.method}: {x_axis.label} {x_axis.written(p.x)}, {y_axis.label} {y_axis.written(p.y)}"
        parts.append(
            f'<circle cx="{x(p.x)}" cy="{y(p.y)}" r="4.5" fill="{style[p.method][0]}" data-method="{escape(p.method)}" '
            f'data-x="{p.x!r}" data-y="{p.y!r}"><title>{escape(said)}</title></circle>'
        )
    first = [*(p for p in shown if p.method in named), *(p for p in best if p.method not in named)]
    parts += _labels([*first, *(p for p in shown if p not in first)], x, y, named)
    below = ""
    if left:
        names = ", ".join(f"{p.method} ({x_axis.written(p.x)}; {y_axis.written(p.y)})" for p in left)
        below = f'<p class="small">Outside of the axes: {escape(names)}.</p>'
    return _figure(title, _svg("pareto", title, parts), below)


BESIDE = ((8, 4, "start"), (-8, 4, "end"), (0, -9, "middle"), (0, 17, "middle"))
"""Where a name may stand, from its point, and which part of it is there."""


def _labels(points: Sequence[Point], x: _Scale, y: _Scale, named: Mapping[str, str]) -> list[str]:
    """Names beside points, the first ones first, where there is room; the others have theirs in the table."""
    taken = [(x(p.x) - 5, y(p.y) - 5, x(p.x) + 5, y(p.y) + 5) for p in points]
    parts = []
    for p in points:
        said = named.get(p.method, p.method)
        width = LETTER * len(said)
        for dx, dy, anchor in (*BESIDE, *(_around() if p.method in named else ())):
            at, base = x(p.x) + dx, y(p.y) + dy
            left = at - {"start": 0.0, "end": width, "middle": width / 2}[anchor]
            box = (left, base - 9, left + width, base + 2)
            inside = box[0] > LEFT and box[2] < WIDTH - RIGHT + 8 and box[1] > TOP - 8 and box[3] < HEIGHT - BOTTOM
            if inside and not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
                taken.append(box)
                if (dx, dy, anchor) not in BESIDE:
                    parts.append(f'<line stroke="#666" x1="{x(p.x)}" y1="{y(p.y)}" x2="{at:.1f}" y2="{base - 4:.1f}"/>')
                parts.append(_text(at, base, said, anchor))
                break
    return parts


def _around() -> Iterator[tuple[float, float, str]]:
    """Places farther and farther from a point."""
    for distance in range(20, 240, 10):
        for step in range(16):
            dx, dy = (distance * turn(math.pi * step / 8) for turn in (math.cos, math.sin))
            yield dx, dy, "start" if dx >= 0 else "end"


def lines(title: str, found: Sequence[Line], x_axis: Axis, y_axis: Axis, colors: Sequence[str]) -> str:
    """A line per method; one with a number that the axis has no place for is named below. Empty where there is none."""
    shown = [line for line in found if all(map(y_axis.holds, line.y)) and len(line.x) > 1]
    if not shown:
        return ""
    left = [line.method for line in found if line not in shown]
    x = _Scale(x_axis, [v for line in shown for v in line.x], LEFT, WIDTH - RIGHT)
    y = _Scale(y_axis, [v for line in shown for v in line.y], HEIGHT - BOTTOM, TOP)
    style = styles(colors)
    parts = _frame(x, y)
    legend = []
    for line in shown:
        color, dash = style[line.method]
        at = " ".join(f"{x(a)},{y(b)}" for a, b in zip(line.x, line.y, strict=True))
        parts.append(
            f'<polyline class="series" stroke="{color}" stroke-dasharray="{dash}" points="{at}" '
            f'data-method="{escape(line.method)}" data-x="{_numbers(line.x)}" data-y="{_numbers(line.y)}">'
            f"<title>{escape(line.method)}</title></polyline>"
        )
        key = f'<line x1="0" y1="5" x2="24" y2="5" stroke="{color}" stroke-dasharray="{dash}"/>'
        legend.append(f'<li><svg class="key" viewBox="0 0 24 10">{key}</svg>{escape(line.method)}</li>')
    below = f'<ul class="legend">{"".join(legend)}</ul>'
    if left:
        below += f'<p class="small">Outside of the axes: {escape(", ".join(left))}.</p>'
    return _figure(title, _svg("lines", title, parts), below)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(repr(value) for value in values)


def heat(
    title: str, rows: Sequence[int], columns: Sequence[int], cells: dict[tuple[int, int], tuple[float, int]]
) -> str:
    """Shares, 0 to 1, by depth (down) and length (across), each with its number of items.

    Parameters
    ----------
    cells : dict
        (depth, length) to (share, items); missing ones stay empty.
    """
    wide, high, left, top = 58, 34, 52, 20
    width, height = left + wide * len(columns) + 4, top + high * len(rows) + 20
    parts = [_text(left + wide * (i + 0.5), 14, f"{c:,}", "middle") for i, c in enumerate(columns)]
    for j, depth in enumerate(rows):
        parts.append(_text(left - 5, top + high * (j + 0.5) + 4, f"{depth}%", "end"))
        for i, length in enumerate(columns):
            if (depth, length) not in cells:
                continue
            share, items = cells[depth, length]
            color, ink = _shade(share)
            parts.append(
                f'<rect x="{left + wide * i}" y="{top + high * j}" width="{wide - 2}" height="{high - 2}" fill="{color}" '
                f'data-method="{escape(title)}" data-depth="{depth}" data-length="{length}" data-value="{share!r}" '
                f'data-items="{items}"/>'
            )
            x, y = left + wide * (i + 0.5) - 1, top + high * (j + 0.5)
            parts.append(_text(x, y, f"{100 * share:.0f}%", "middle", f' style="fill: {ink}"'))
            parts.append(_text(x, y + 11, f"n={items}", "middle", f' style="fill: {ink}" class="tiny"'))
    parts.append(_text(left, height - 5, "depth down, tokens across"))
    return _figure(title, _svg("heat", title, parts, width, height))


def _shade(share: float) -> tuple[str, str]:
    """A cell's color and that of its text."""
    empty, full = (254, 226, 226), (22, 101, 52)
    mixed = [round(a + (b - a) * share) for a, b in zip(empty, full, strict=True)]
    return "#" + "".join(f"{v:02x}" for v in mixed), "#111" if share < 0.55 else "#fff"
