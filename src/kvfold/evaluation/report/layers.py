"""What ``kvfold recommend`` measured, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import starmap
from typing import Any

from kvfold.evaluation.report import figures
from kvfold.evaluation.report.sources import Layers
from kvfold.evaluation.report.tables import table
from kvfold.evaluation.statistics import Difference, Estimate
from kvfold.evaluation.suites import REGISTRY
from kvfold.evaluation.summary import shown, shown_difference

SIDES = {"keys": "k", "values": "v"}


def section(name: str, source: Layers) -> str:
    """Plots of what each layer loses alone, the proposal, and how it did on what was not measured on."""
    held = source.held
    said = f"{held['dtype']}; {_measured(held)}. File {source.name} (SHA-256 {source.sha256[:12]})."
    title = f"{held['model']}: what a layer loses"
    proposed = "".join(f"<p>{what}: <code>{escape(held[key])}</code></p>" for what, key in _PROPOSALS if held.get(key))
    return (
        f'<section id="{name}"><h2>{escape(title)}</h2><p class="small">{escape(said)}</p>'
        f'<div class="plots">{"".join(_plots(held))}</div>{proposed}{_check(held)}'
        f"<details><summary>Layer by layer</summary>{_layers(held)}</details></section>"
    )


def _measured(held: dict[str, Any]) -> str:
    """On what, and how."""
    texts = held.get("texts") or ({held["text"]: held["text_sha256"]} if "text" in held else {})
    read = " and ".join(f"{source} ({sha[:12]})" for source, sha in texts.items())
    if "alone" in held:
        return (
            f"measured on {held['tokens']} tokens after {held['length']} of {read}, one layer's keys or values at "
            f"{held['probe_bits']} bits at a time"
        )
    prompts = ", ".join(f"{p['kind']} of {p['tokens']} ({p['sha256'][:12]})" for p in held["prompts"])
    bits = held["shown_bits"]
    return (
        f"proposed for {held['for']}; measure {held['measure']}, by gradients, on prompts of tokens: {prompts}"
        + (f", of {read}" if read else "")
        + f"; losses of keys at {bits['k']} bits and values at {bits['v']}"
    )


def _lost(held: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """What each layer loses alone: by what it is a loss of, by side."""
    if "alone" in held:
        return {"kld": {side: [row[side] for row in held["alone"]] for side in SIDES}}
    kinds = [kind for kind in ("retrieval", "text") if kind in held["losses"][0]]
    of = {(row["layer"], row["side"], row["bits"]): row for row in held["losses"]}
    layers, bits = [row["layer"] for row in held["layers"]], held["shown_bits"]
    return {
        kind: {side: [of[layer, short, bits[short]][kind] for layer in layers] for side, short in SIDES.items()}
        for kind in kinds
    }


def _proposed(held: dict[str, Any]) -> list[dict[str, Any]]:
    """Layers with their bits, in order."""
    found: list[dict[str, Any]] = held["alone"] if "alone" in held else held["layers"]
    return found


_PROPOSALS = (
    ("Proposed", "proposal"),
    ("Uniform bits within the same budget", "uniform"),
    ("Proposed at the effective bits of those", "at_equal_bits"),
)


def _plots(held: dict[str, Any]) -> Iterator[str]:
    layers = tuple(float(row["layer"]) for row in _proposed(held))
    for kind, lost in _lost(held).items():
        found = [figures.Line(side, layers, tuple(lost[side])) for side in SIDES]
        y = figures.Axis(kind if kind == "kld" else f"nats of {kind}", log=True, written=lambda v: f"{v:.3g}")
        yield figures.lines(f"One layer alone: {kind}", found, figures.Axis("layer"), y, tuple(SIDES))


def _layers(held: dict[str, Any]) -> str:
    lost = [(kind, side, losses) for kind, sides in _lost(held).items() for side, losses in sides.items()]
    several = len(lost) > len(SIDES)
    head = [f"{side} lose" + (f", {kind}" if several else "") for kind, side, _ in lost]

    def line(at: int, row: dict[str, Any]) -> list[str]:
        bits = row["proposed"] or ("full", "full")
        return [str(row["layer"]), *(f"{losses[at]:.3e}" for _, _, losses in lost), *map(str, bits)]

    return table(["layer", *head, "K bits", "V bits"], starmap(line, enumerate(_proposed(held))))


def _check(held: dict[str, Any]) -> str:
    """The proposal against uniform bits, on the same items."""
    found = []
    for suite in ("divergence", "retrieval"):
        main = REGISTRY[suite].measures[0]
        lines = []
        for cell in held.get("check", ()):
            if main.name not in cell["estimates"]:
                continue
            difference = cell["differences"].get(main.name)
            lines.append(
                [
                    cell["method"],
                    f"{cell['task']}, {cell['length']:,} tokens",
                    "-" if cell["effective_bits"] is None else f"{cell['effective_bits']:.3f}",
                    str(cell["items"]),
                    shown(main, Estimate(**cell["estimates"][main.name])),
                    "" if difference is None else shown_difference(main, Difference(**difference)),
                ]
            )
        head = ["method", "text", "bits", "items", main.name, "against uniform bits"]
        found += [table(head, lines, (1,))] if lines else []
    return "".join(found)
