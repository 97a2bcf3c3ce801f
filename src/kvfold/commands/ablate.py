"""The command ``kvfold ablate``: a method under every combination of some options, through the loop of ``kvfold eval``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import click

from kvfold.commands.eval import evaluate
from kvfold.commands.terminal import complete_method
from kvfold.errors import KVFoldError

MOST = 1000
"""Combinations; more are a slip of the keyboard."""


def combinations(spec: str, grid: Sequence[str]) -> list[str]:
    """A method's string with every combination of the options' values, the last option varying fastest.

    Raises
    ------
    KVFoldError
        An axis is no ``OPTION=VALUE,VALUE``, is given twice or is an option of the method already; or the method is a recipe.
    """
    if "+" in spec:
        raise KVFoldError(f"method: {spec} is made of several; give a single one, whose options are varied")
    if not grid:
        raise KVFoldError("grid: none given; give options and their values, for example --grid bits=1,2,4")
    axes: dict[str, list[str]] = {}
    for axis in grid:
        name, equals, values = (part.strip() for part in axis.partition("="))
        listed = list(dict.fromkeys(filter(None, (value.strip() for value in values.split(",")))))
        if not (name and equals and listed):
            raise KVFoldError(f"grid: {axis!r} is not OPTION=VALUE,VALUE, for example bits=1,2,4")
        if name in axes:
            raise KVFoldError(f"grid: {name} is given twice")
        axes[name] = listed
    count = 1
    for listed in axes.values():
        count *= len(listed)
    if count > MOST:
        raise KVFoldError(f"grid: {count} combinations; give at most {MOST}")
    head = f"{spec}{',' if ':' in spec else ':'}"
    return [
        head + ",".join(f"{name}={value}" for name, value in zip(axes, values, strict=True))
        for values in product(*axes.values())
    ]


@click.command("ablate", short_help="Evaluate a method under every combination of some options.")
@click.option("--method", "spec", metavar="X", required=True, shell_complete=complete_method, help="Method to vary.")
@click.option(
    "--grid",
    metavar="OPTION=VALUE,VALUE ...",
    multiple=True,
    help="Options and their values; every combination is evaluated.",
)
@click.option(
    "--baseline", metavar="X", help="What all combinations are compared with.  [default: the method as given]"
)
def ablate(spec: str, grid: tuple[str, ...], baseline: str | None, **options: Any) -> None:
    """Evaluate a method under every combination of some options, on the same items, and compare each with the method as given.

    \b
    kvfold ablate --method squat --grid rank=5,10,20 lam=0.1,1 --limit 8 --out results/

    Everything else is as in kvfold eval: suites, lengths, rows, and a killed run goes on where it was stopped.
    """
    run: Any = evaluate.callback
    run(specs=tuple(combinations(spec, grid)), baseline=baseline or spec, **options)


ablate.params += [p for p in evaluate.params if p.name not in ("specs", "baseline")]
