"""The key oracle's page, docs/keys.md, from its rows: see key_oracle.py."""

from __future__ import annotations

import csv
import math
import pathlib

from key_prompts import SETTINGS

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "key-oracle.csv"
PAGE = ROOT / "docs" / "keys.md"


def fold_at(rows: list[dict[str, str]], prompt: str, bits: float, field: str) -> float:
    """What fold's own keys lose at these bits: between 2, 3 and 4 bits, log-linear for KL and linear for the rise."""
    points = sorted(
        (float(r["bits"]), math.log(float(r[field])) if field == "kl" else float(r[field]))
        for r in rows
        if r["prompt"] == prompt and r["variant"] in ("fold 2", "fold 3", "fold 4")
    )
    (x, y), (x_, y_) = points[:2] if bits <= points[1][0] else points[1:]
    found = y + (y_ - y) * (bits - x) / (x_ - x)
    return math.exp(found) if field == "kl" else found


def compared(rows: list[dict[str, str]], variant: str, pairs: bool) -> tuple[list[float], float] | None:
    """(KL over fold's at the same bits by prompt, rise of the negative log-likelihood less fold's)."""
    some = [r for r in rows if r["variant"] == variant and r["prompt"].startswith("pairs") == pairs]
    if not some:
        return None
    each = [float(r["kl"]) / fold_at(rows, r["prompt"], float(r["bits"]), "kl") for r in some]
    rises = [float(r["nll_rise"]) - fold_at(rows, r["prompt"], float(r["bits"]), "nll_rise") for r in some]
    return each, sum(rises) / len(rises)


def cell(found: tuple[list[float], float] | None, rise: bool) -> str:
    """A model's ratio with its range over prompts, and the difference in nats."""
    if found is None:
        return "-"
    each, difference = found
    mean = math.exp(sum(map(math.log, each)) / len(each))
    shown = f"{mean:.2f}"
    if len(each) > 1:
        shown += f" ({min(each):.2f}-{max(each):.2f})"
    return f"{shown}, {difference:+.2f}" if rise else shown


def table(rows: list[dict[str, str]]) -> list[str]:
    """Variants against fold at equal bytes."""
    names = list(SETTINGS)
    head = ["keys", "bits", *(f"pairs, {n}" for n in names), *(f"text, {n}" for n in names), "worst: pairs, text"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    variants = dict.fromkeys(
        r["variant"] for r in rows if not r["variant"].startswith(("fold", "entropy", "spacing")) and r["kl"]
    )
    order = sorted(variants, key=lambda v: (PARTS.index(part_of(v)), not v.endswith(" 3"), v.endswith(" 2.5")))
    for variant in order:
        of = {n: [r for r in rows if r["model"] == n] for n in names}
        bits = sorted({float(r["bits"]) for r in rows if r["variant"] == variant}, reverse=True)
        each = {(n, k): compared(of[n], variant, k) for k in (True, False) for n in names}
        worst = []
        for k in (True, False):
            means = [
                math.exp(sum(map(math.log, f[0])) / len(f[0])) for n in names if (f := each[n, k]) and len(f[0]) > 1
            ]
            worst.append(f"{max(means):.2f}" if len(means) > 1 else "-")
        lines.append(
            f"| {variant} | {', '.join(f'{b:.2f}' for b in dict.fromkeys((bits[0], bits[-1])))} | "
            + " | ".join(cell(each[n, k], k) for k in (True, False) for n in names)
            + f" | {', '.join(worst)} |"
        )
    return lines


PARTS = ("spread", "b", "c", "e", "bc")


def part_of(variant: str) -> str:
    """The part of the task that a variant belongs to."""
    if variant.startswith(("layers", "heads")):
        return "spread"
    if "less measured, eigen" in variant:
        return "bc"
    if variant.startswith(("less", "no page")):
        return "b"
    return "e" if variant.startswith(("coded", "learned")) else "c"


def layers(rows: list[dict[str, str]]) -> list[str]:
    """Where 2-bit keys lose, a layer or a head alone: shares of the sum over all."""
    lines = ["| model | pairs: layers | pairs: KV heads | text: layers |", "| --- | --- | --- | --- |"]
    for name in SETTINGS:
        cells = []
        for what, sign, pairs in (("layer", "L", True), ("head", "", True), ("layer", "L", False)):
            sums: dict[str, float] = {}
            for r in rows:
                words = r["variant"].split()
                if r["model"] == name and words[2:4] == ["in", what] and r["prompt"].startswith("pairs") == pairs:
                    sums[words[4]] = sums.get(words[4], 0.0) + float(r["kl"])
            top = sorted(sums.items(), key=lambda item: -item[1])[:4]
            cells.append(", ".join(f"{sign}{at} {100 * kl / sum(sums.values()):.0f} %" for at, kl in top) or "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page() -> None:
    """Put the tables into the page."""
    with ROWS.open() as file:
        rows = list(csv.DictReader(file))
    text = PAGE.read_text()
    for name, lines in (("variants", table(rows)), ("layers", layers(rows))):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        text = text[: text.index(begin)] + begin + "\n" + "\n".join(lines) + "\n" + text[text.index(end) :]
    PAGE.write_text(text)
