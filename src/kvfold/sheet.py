"""Tables that fit where they are shown: names wrap, the least important columns go, and what went is said.

Nothing is cut off. Where there is no terminal there is no width, and a table is as wide as it has to be, or, of long texts, a
line per field.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

GAP = 2
"""Cells between columns."""
COMFORTABLE = 20
"""Width below which columns of lower rank go before text is wrapped further."""
TIGHT = 12
"""Width down to which text is wrapped rather than a table continued in another."""
LEAST = 16
"""Words longer than this are broken where there is no room for them."""


@dataclass(frozen=True)
class Column:
    """A column of a sheet.

    Parameters
    ----------
    name : str
    right : bool
        Aligned to the right, as numbers are.
    wraps : bool
        Whether its text may take several lines.
    rank : int
        Columns with the highest rank are left out first; those of rank 0 never: where they do not fit, they follow in a table
        of their own.
    key : bool
        Names the row; repeated where the table is continued.
    below : bool
        If it is left out, its values are listed below the table.
    """

    name: str
    right: bool = False
    wraps: bool = False
    rank: int = 0
    key: bool = False
    below: bool = False


class Sheet:
    """A table of strings; :mod:`rich` prints it at the width of the console.

    Parameters
    ----------
    columns : sequence of Column
    title : str
    more : str
        Where to find what is left out, said with what it is.
    fields : bool
        Whether rows are shown by :meth:`listing` where there is no terminal: their texts are long.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        title: str = "",
        more: str = "a wider terminal shows them",
        fields: bool = False,
    ) -> None:
        self.columns, self.title, self.more, self.fields = list(columns), title, more, fields
        self.rows: list[tuple[str, ...]] = []
        self.sections: set[int] = set()

    def add(self, *cells: str) -> None:
        """Add a row, one string per column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"cells: {len(cells)} for {len(self.columns)} columns")
        self.rows.append(cells)

    def end_section(self) -> None:
        """Leave a gap after the last row."""
        self.sections.add(len(self.rows) - 1)

    @property
    def natural_width(self) -> int:
        """Cells that everything takes without wrapping; 0 for a sheet without columns."""
        widths = [self._natural(i) for i in range(len(self.columns))]
        return max(sum(widths) + GAP * (len(widths) - 1), _length(self.title))

    def fit(self, width: int) -> tuple[list[dict[int, int]], list[int]]:
        """Widths by column of each part that the table is shown in at ``width``, and the columns that are left out."""
        shown, left = list(range(len(self.columns))), []
        while not self._fits(shown, width, COMFORTABLE):
            rank = max(self.columns[i].rank for i in shown)
            if not rank:
                break
            gone = max(i for i in shown if self.columns[i].rank == rank)
            shown.remove(gone)
            left.append(gone)
        parts: list[list[int]] = [[]]
        keys = [i for i in shown if self.columns[i].key]
        for i in shown:
            fits = self._fits([*parts[-1], i], width, TIGHT)
            if not fits and set(parts[-1]) - set(keys) and i not in keys:
                parts.append(list(keys))
            parts[-1].append(i)
        return [self._widths(part, width) for part in parts], sorted(left)

    def lines_below(self, left: Sequence[int]) -> list[str]:
        """What is said of columns that were left out."""
        lines, gone = [], []
        for i in left:
            values: dict[str, list[str]] = {}
            for row in self.rows:
                values.setdefault(row[i], []).append(", ".join(row[k] for k, c in enumerate(self.columns) if c.key))
            if not self.columns[i].below:
                gone.append(self.columns[i].name)
            elif len(values) == 1:
                lines.append(f"{self.columns[i].name}: {next(iter(values))}")
            else:
                lines += [f"{self.columns[i].name} of {', '.join(names)}: {v}" for v, names in values.items()]
        if gone:
            lines.append(f"not shown at this width: {', '.join(gone)} ({self.more})")
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        parts, left = self.fit(options.max_width)
        for number, part in enumerate(parts):
            yield self._table(part, self.title if not number else "")
        for line in self.lines_below(left):
            yield Text("\n".join(wrap(line, options.max_width)))

    def listing(self) -> str:
        """A line for what names a row, and below it a line per field: ``layers 0-29``, ``  bits: 2.91``."""
        lines = [self.title] if self.title else []
        for row in self.rows:
            cells = list(zip(self.columns, row, strict=True))
            lines.append(", ".join(f"{column.name} {cell}" for column, cell in cells if column.key))
            lines += [f"  {column.name}: {cell}" for column, cell in cells if not column.key]
        return "\n".join(lines)

    def text(self, width: int | None = None) -> str:
        """Without colours, at ``width``; None: of the terminal that standard output is, or in full."""
        from rich.console import Console

        if width is None:
            here = Console()
            wide = here.is_terminal and sys.stdout.isatty()
            if self.fields and not wide:
                return self.listing()
            width = here.width if wide else self.natural_width
        out = Console(file=io.StringIO(), width=max(width, 1), color_system=None, force_terminal=False, highlight=False)
        with out.capture() as captured:
            out.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def html(self) -> str:
        """As an HTML table, for notebooks."""
        aligned = ["right" if column.right else "left" for column in self.columns]

        def line(tag: str, cells: Sequence[str]) -> str:
            inside = "".join(
                f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
                for cell, side in zip(cells, aligned, strict=True)
            )
            return f"<tr>{inside}</tr>"

        head = line("th", [column.name for column in self.columns])
        body = "".join(line("td", row) for row in self.rows)
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"

    # ---- widths ------------------------------------------------------------------------------------------------------

    def _cells(self, i: int) -> Iterator[str]:
        return (row[i] for row in self.rows)

    def _natural(self, i: int) -> int:
        return max([_length(self.columns[i].name), *map(_length, self._cells(i))])

    def _least(self, i: int) -> int:
        """Narrowest that reads well: no word is broken but in names, after their punctuation, and beyond LEAST."""
        head = max(map(_length, self.columns[i].name.split()), default=0)
        if not self.columns[i].wraps:
            return max([head, *map(_length, self._cells(i))])
        pieces = (_length(piece) for cell in self._cells(i) for word in cell.split() for piece in _pieces(word))
        return max(head, min(max(pieces, default=0), LEAST))

    def _fits(self, shown: Sequence[int], width: int, comfortable: int) -> bool:
        needed = 0
        for i in shown:
            least = self._least(i)
            needed += max(least, min(self._natural(i), comfortable)) if self.columns[i].wraps else least
        return needed + GAP * (len(shown) - 1) <= width

    def _widths(self, shown: Sequence[int], width: int) -> dict[int, int]:
        """Least widths, and what is left over: first to columns that soon need no wrapping, then to whom it helps most."""
        found = {i: self._least(i) for i in shown}
        wanted = {i: self._natural(i) for i in shown}
        room = width - sum(found.values()) - GAP * (len(shown) - 1)
        while room < 0 and (wide := [i for i in shown if self.columns[i].wraps and found[i] > 4]):
            found[max(wide, key=lambda i: found[i])] -= 1
            room += 1
        texts = [i for i in shown if self.columns[i].wraps]
        while room > 0 and (soon := [i for i in texts if found[i] < wanted[i] <= COMFORTABLE]):
            found[min(soon, key=lambda i: wanted[i] - found[i])] += 1
            room -= 1
        while room > 0 and (low := [i for i in texts if found[i] < min(wanted[i], COMFORTABLE)]):
            found[min(low, key=lambda i: found[i])] += 1
            room -= 1
        while room > 0 and (narrow := [i for i in shown if found[i] < wanted[i]]):
            found[max(narrow, key=lambda i: wanted[i] / found[i])] += 1
            room -= 1
        return found

    def _table(self, widths: dict[int, int], title: str) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.padding = (0, GAP - 1, 0, 0)
        for i, width in widths.items():
            column = self.columns[i]
            table.add_column(
                Text("\n".join(wrap(column.name, width))),
                width=width,
                justify="right" if column.right else "left",
                style="bold" if column.key else "",
                overflow="fold",
            )
        for number, row in enumerate(self.rows):
            table.add_row(*(Text("\n".join(wrap(row[i], width))) for i, width in widths.items()))
            if number in self.sections:
                table.add_section()
        return table


def wrap(text: str, width: int) -> list[str]:
    """Break text to lines of ``width`` cells: between words, in long words after punctuation, else anywhere."""
    from rich.cells import chop_cells

    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split():
            joined = f"{line} {word}" if line else word
            if _length(joined) <= width:
                line = joined
                continue
            if line:
                lines.append(line)
            line = ""
            for piece in [word] if _length(word) <= width else _pieces(word):
                for part in [piece] if _length(piece) <= width else chop_cells(piece, width):
                    if line and _length(line + part) > width:
                        lines.append(line)
                        line = ""
                    line += part
        lines.append(line)
    return lines


def _pieces(word: str) -> list[str]:
    """``kivi:bits=4,sink=0+keep=0`` as ``kivi:``, ``bits=4,``, ``sink=0+`` and ``keep=0``."""
    return re.findall(r"[^,:;/+]*[,:;/+]+|[^,:;/+]+", word)


def _length(text: str) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for line in text.split("\n")), default=0)


def as_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
