"""What a command's JSON file holds before it is written again: rows of the same settings stay, those of others are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Generic

from kvfold import files
from kvfold.errors import KVFoldError
from kvfold.evaluation.schema import NOW, Header, RowType, differing, differing_origins, identity_of, number, read_row

REMEDY = "give another name, move it away, or replace it with --force"


@dataclasses.dataclass(frozen=True)
class Earlier(Generic[RowType]):
    """Rows of a finished file.

    Attributes
    ----------
    rows
        That this run does not make: they stay in the file.
    anew
        How many it makes again.
    artefacts
        Hashes of what the methods of `rows` learned, by place.
    """

    rows: list[RowType]
    anew: int
    artefacts: dict[str, str]

    @classmethod
    def of(
        cls,
        path: Path | None,
        kind: type[RowType],
        header: Header,
        made_of: dict[str, Any],
        asked: Collection[str],
        force: bool = False,
    ) -> Earlier[RowType]:
        """What a file holds beside what is asked for.

        Parameters
        ----------
        kind
            Of its rows.
        header, made_of
            Of this run: what was read, and the hashes of weights and artefacts.
        asked
            Keys of the rows that this run makes.
        force
            Replace the file, whatever it holds.

        Raises
        ------
        KVFoldError
            It holds rows of other settings, weights or artefacts, or something else: those would be lost, or stand in one
            table with others.
        """
        nothing = cls([], 0, {})
        if path is None or force or files.is_stream(path) or not path.is_file():
            return nothing
        try:
            text = path.read_text(encoding="utf-8")
            if not text.strip():
                return nothing
            held = json.loads(text)
            theirs, rows = {**held["header"]}, [read_row(kind, row) for row in held["rows"]]
        except (OSError, ValueError, KeyError, TypeError, KVFoldError):
            raise KVFoldError(f"json: {path} holds something else than rows of this command; {REMEDY}") from None
        why = differing(identity_of(theirs), header.identity(), NOW)
        rest = [row for row in rows if row.key not in asked]
        origins = held.get("made_of", {})
        if rest and not why:
            why = differing_origins(origins, made_of) if origins else ["its weights are not written down"]
        if why:
            raise KVFoldError(f"json: {path} holds {number(len(rows))} of other settings ({'; '.join(why)}); {REMEDY}")
        return cls(rest, len(rows) - len(rest), origins.get("artefacts", {}) if rest else {})

    def tell(self, on_earlier: Callable[[int, int], None] | None) -> None:
        """Call with how many rows stay and how many are made anew, where the file holds any."""
        if on_earlier is not None and (self.rows or self.anew):
            on_earlier(len(self.rows), self.anew)

    def joined(
        self, made: Sequence[RowType], kept: Sequence[RowType], made_of: dict[str, Any]
    ) -> tuple[list[RowType], dict[str, Any]]:
        """Rows that the file holds in the end, and the hashes of what they were made of.

        Parameters
        ----------
        made, kept
            Rows that were asked for, and others that a stopped run of the same settings left.
        """
        late = {row.key for row in kept}
        rest = [*(row for row in self.rows if row.key not in late), *kept]
        origins = {**made_of, "artefacts": self.artefacts | made_of["artefacts"]} if made_of else {}
        return [*made, *rest], origins
