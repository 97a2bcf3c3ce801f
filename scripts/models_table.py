"""Write docs/models.md: what folding does to every causal family of the installed Transformers.

usage: python scripts/models_table.py [--check] [FAMILY ...]

Every family's tiny random model (tests/families.py) is folded and compared with its own cache. --check changes nothing and
exits 1 if the page is not what was measured. FAMILY: print these families' rows.
"""

import argparse
import logging
import pathlib
import sys
import warnings

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))

from families import EIGHT, FAMILIES, Row, row_of  # noqa: E402

INTRODUCTION = """# Models

What `kvfold.fold` does to the {count} causal families of Transformers {version}: {folded} are folded, {kept} have nothing to
fold and run as they do without kvfold, {refused} are refused by name before a token is computed.

Each row is measured on a tiny model of random weights with the family's default configuration made small, by
`python scripts/models_table.py`; a test compares this page with what runs. A family's real models may have fewer kinds of
layers: `kvfold explain --model NAME` says what happens to yours, layer by layer.

## Folded

*Layers*: how many of the tiny model's layers are folded. *none*: how far the logits of {tokens} tokens, fed in {calls} calls,
are from those of the model's own cache when `none` stores them in full precision (relative RMS in float32). *8 bits*: the same
for `{eight}`, on random weights, which are harder than trained ones. *Before RoPE*: whether
methods that store keys before RoPE (`squat_pre`, `commvq`, `kvquant`) fold it; all others do.
"""
KEPT = """
## Nothing to fold

These run through a folded cache as through their own, and nothing is packed.
"""
REFUSED = """
## Refused

`kvfold.fold` and `kvfold.explain` say so before a token is computed.
"""
PEERS = "\n## Transformers' own tests\n"
"""What follows is written by peer_tests.py."""
NUMBERS = ("none", "8 bits")
"""Columns that are measured: they differ a little from machine to machine."""


def kind(row: Row) -> str:
    """Which of the page's tables a row belongs to."""
    return "refused" if row.refused else "folded" if row.folded else "kept"


def cells(family: str, row: Row) -> dict[str, str]:
    """A row of the page, by column."""
    first = {"family": f"`{family}`", "class": f"`{row.name}`"}
    if row.refused:
        return first | {"refused": row.refused.replace("|", "\\|")}
    if not row.folded:
        return first | {"why": "; ".join(row.kept), "none": f"{row.none:.0e}"}
    return first | {
        "layers": f"{row.folded} of {row.layers}" + "".join(f", {note}" for note in row.notes),
        "in full precision": "; ".join(reason.removesuffix(" is not folded") for reason in row.kept) or "-",
        "none": f"{row.none:.0e}",
        "8 bits": f"{row.eight:.0e}",
        "before RoPE": short(row.before_rope),
    }


def short(reason: str) -> str:
    """A refusal without what the column's head says."""
    if reason == "yes":
        return reason
    reason = reason.split("; methods that")[0]
    return "no: " + (reason.split(" ", 2)[2] if reason.startswith("model: ") else reason)


def table(rows: dict[str, Row]) -> str:
    lines = [cells(family, row) for family, row in rows.items()]
    if not lines:
        return "None.\n"
    head = list(lines[0])
    numbers = ["---:" if name in NUMBERS else "---" for name in head]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, numbers, *(list(cell.values()) for cell in lines)))


def page(rows: dict[str, Row]) -> str:
    """The whole page."""
    from families import CUTS

    sorts = {name: {f: row for f, row in rows.items() if kind(row) == name} for name in ("folded", "kept", "refused")}
    introduction = INTRODUCTION.format(
        count=len(rows),
        version=transformers.__version__,
        tokens=sum(CUTS),
        calls=len(CUTS),
        eight=EIGHT,
        **{name: len(found) for name, found in sorts.items()},
    )
    parts = [introduction, table(sorts["folded"]), KEPT, table(sorts["kept"]), REFUSED, table(sorts["refused"])]
    peers = PEERS + PAGE.read_text(encoding="utf-8").split(PEERS)[1]
    return "\n".join(part.strip("\n") + "\n" for part in [*parts, peers])


def read() -> tuple[str, dict[str, dict[str, str]]]:
    """Transformers' version and every family's cells, as the page has them."""
    version, found, head = "", {}, []
    for line in PAGE.read_text(encoding="utf-8").split(PEERS)[0].splitlines():
        if "families of Transformers " in line:
            version = line.split("families of Transformers ")[1].split(":")[0]
        if not line.startswith("| "):
            continue
        values = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if values[0] == "family":
            head = values
        elif not values[0].startswith("---"):
            found[values[0].strip("`")] = dict(zip(head, values, strict=True))
    return version, found


def wrong(family: str, row: Row, told: dict[str, dict[str, str]]) -> str:
    """How the page differs from a row; empty if it does not."""
    mine, theirs = (
        {name: value for name, value in line.items() if name not in NUMBERS}
        for line in (cells(family, row), told.get(family, {}))
    )
    return "" if mine == theirs else f"{family}: the page says {theirs}, measured is {mine}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # for models this small, threads only wait for one another
    if unknown := set(given.families) - set(FAMILIES):
        parser.error(f"FAMILY: {', '.join(sorted(unknown))}; allowed: {', '.join(FAMILIES)}")
    rows = {family: row_of(family) for family in given.families or FAMILIES}
    if given.families:
        for family, row in rows.items():
            print(cells(family, row))
        return 0
    if not given.check:
        PAGE.write_text(page(rows), encoding="utf-8")
        return 0
    told = read()[1]
    lines = [line for family, row in rows.items() if (line := wrong(family, row, told))]
    lines += [
        f"{family}: not a family of Transformers {transformers.__version__}" for family in told.keys() - rows.keys()
    ]
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
