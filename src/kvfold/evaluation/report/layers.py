"""What ``kvfold recommend`` measured, layer by layer."""

from __future__ import annotations

from html import escape
from typing import Any

from kvfold.evaluation.report import figures
from kvfold.evaluation.report.sources import Layers
from kvfold.evaluation.report.tables import table
from kvfold.evaluation.statistics import Difference, Estimate
from kvfold.evaluation.suites import REGISTRY
from kvfold.evaluation.summary import shown, shown_difference

SIDES = ("keys", "values")


def section(name: str, source: Layers) -> str:
    """A plot of what each layer loses alone, the proposal, and how it did on texts that were not measured on."""
    held = source.held
    texts = held.get("texts") or {held["text"]: held["text_sha256"]}
    read = " and ".join(f"{source} ({sha[:12]})" for source, sha in texts.items())
    said = (
        f"{held['dtype']}; measured on {held['tokens']} tokens after {held['length']} of {read}, one "
        f"layer's keys or values at {held['probe_bits']} bits at a time. "
        f"File {source.name} (SHA-256 {source.sha256[:12]})."
    )
    title = f"{held['model']}: what a layer loses"
    proposed = "".join(f"<p>{what}: <code>{escape(held[key])}</code></p>" for what, key in _PROPOSALS if key in held)
    return (
        f'<section id="{name}"><h2>{escape(title)}</h2><p class="small">{escape(said)}</p>'
        f'<div class="plots">{_plot(held)}</div>{proposed}{_check(held)}'
        f"<details><summary>Layer by layer</summary>{_layers(held)}</details></section>"
    )


_PROPOSALS = (
    ("Proposed", "proposal"),
    ("Uniform bits within the same budget", "uniform"),
    ("Proposed at the effective bits of those", "at_equal_bits"),
)


def _plot(held: dict[str, Any]) -> str:
    layers = tuple(float(row["layer"]) for row in held["alone"])
    found = [figures.Line(side, layers, tuple(row[side] for row in held["alone"])) for side in SIDES]
    y = figures.Axis("kld", log=True, written=lambda v: f"{v:.3g}")
    return figures.lines("One layer alone: kld", found, figures.Axis("layer"), y, SIDES)


def _layers(held: dict[str, Any]) -> str:
    def line(row: dict[str, Any]) -> list[str]:
        bits = row["proposed"] or ("full", "full")
        return [str(row["layer"]), *(f"{row[side]:.3e}" for side in SIDES), *map(str, bits)]

    return table(["layer", "keys lose", "values lose", "K bits", "V bits"], map(line, held["alone"]))


def _check(held: dict[str, Any]) -> str:
    """The proposal against uniform bits, on the same items."""
    main = REGISTRY["divergence"].measures[0]
    lines = []
    for cell in held.get("check", ()):
        if main.name not in cell["estimates"]:
            continue
        difference = cell["differences"].get(main.name)
        lines.append(
            [
                cell["method"],
                f"{cell['task']}, {cell['length']:,} tokens",
                f"{cell['effective_bits']:.3f}",
                str(cell["items"]),
                shown(main, Estimate(**cell["estimates"][main.name])),
                "" if difference is None else shown_difference(main, Difference(**difference)),
            ]
        )
    head = ["method", "text", "bits", "items", main.name, "against uniform bits"]
    return table(head, lines, (1,)) if lines else ""
