"""Lists that are asked for again: what an entry of one reads like, drawn at random."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from kvfold.evaluation.words import THINGS

Entry = tuple[str, str, str]
"""What no two entries share, what is asked, and what is answered."""
MOST = 1 << 16
"""Entries of a list."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How a list reads.

    Attributes
    ----------
    head, again
        Before the list, and before the questions.
    draw
        Makes an entry.
    """

    head: str
    again: str
    draw: Callable[[random.Random], Entry]


def _pair(draw: random.Random) -> Entry:
    key, value = (f"{draw.randrange(1 << 16):04x}" for _ in range(2))
    return key, f"Key {key} has the value", f" {value}.\n"


NAMES = (
    "Ada Alma Anton Bertha Bruno Carla Clemens Clara David Dora Edgar Edith Emil Erna Felix Flora Georg Greta Hanna Hugo Ida "
    "Irma Jakob Johanna Karl Kathe Leo Lotte Ludwig Martha Max Nora Otto Paula Peter Rosa Rudolf Selma Simon Thea Theodor "
    "Ulrich Vera Viktor Walter Wilma Xaver Zita"
).split()
FAMILIES = (
    "Adler Bauer Becker Berger Brandt Braun Busch Dietrich Ebert Engel Fischer Franke Fuchs Graf Gruber Haas Hahn Hartmann "
    "Heller Herzog Hoffmann Huber Jung Kaiser Keller Koch Kraus Kuhn Lang Lehmann Lorenz Maier Martin Moser Neumann Otten "
    "Peters Pfeiffer Pohl Reuter Richter Roth Sauer Schenk Schilling Schmitt Schuster Seidel Simon Sommer Stein Thoma Unger "
    "Vogel Voss Wagner Weber Weiss Werner Winkler Wirth Wolff Zeller Ziegler"
).split()
TOWNS = "Altdorf Birkenau Durlach Erbach Freiberg Goslar Hameln Ilmenau Kronach Lindau Meldorf Naumburg Ohrdruf Plauen".split()
PARTS = "batch buffer cursor entry event field frame graph index job layer limit node offset page query record route".split()


def _record(draw: random.Random) -> Entry:
    """A sentence of running text."""
    who = f"{draw.choice(NAMES)} {draw.choice(FAMILIES)}"
    what = f"{who} of {draw.choice(TOWNS)} came in {draw.randrange(1780, 1900)} and brought"
    return who, what, f" {draw.randrange(100, 1000)} {draw.choice(THINGS)}s. "


def _identifier(draw: random.Random) -> Entry:
    """A line of code."""
    name = f"{draw.choice(THINGS)}_{draw.choice(PARTS)}_{draw.choice(PARTS)}"
    return name, f"    {name} =", f" {draw.choice(THINGS)}.{draw.choice(PARTS)}_{draw.randrange(10, 100)}\n"


FORMS = {
    "pairs": Form("Each key has a value.\n", "The same in another order:\n", _pair),
    "records": Form("From the register of the market:\n\n", "\n\nOnce more, in another order:\n\n", _record),
    "identifiers": Form("def first():\n", "\n\ndef second():\n", _identifier),
}
"""Random hexadecimal keys with values, who brought what in running text, and assignments of a program."""
