"""Rows beside a command's JSON file, while it is being made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from kvfold.evaluation.results import Result
from kvfold.evaluation.schema import RowType, Sidecar


class Beside(Generic[RowType]):
    """A :class:`~kvfold.evaluation.loop.Keeper` for commands with a schema of their own.

    Parameters
    ----------
    sidecar
        Where rows lie; None: in memory alone.
    kept
        Those of an earlier run, by key; new ones are added.
    key, read
        The key of a method's row of an item, by their names; and a row of what the loop gives.
    """

    run = 0

    def __init__(
        self,
        sidecar: Sidecar[RowType] | None,
        kept: dict[str, RowType],
        key: Callable[[str, str], str],
        read: Callable[[Result], RowType],
    ) -> None:
        self.sidecar, self.kept, self.key, self.read = sidecar, kept, key, read

    def has(self, method: str, item: str, prompt_sha256: str) -> bool:
        return self.key(method, item) in self.kept

    def add(self, row: Result, run: dict[str, Any]) -> None:
        made = self.read(row)
        self.kept[made.key] = made
        if self.sidecar is not None:
            self.sidecar.add(made)
