"""Tables of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = ()) -> str:
    """An HTML table that scrolls sideways where it is too wide; ``words``: columns that are text."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (f'<{tag} class="words">' if i in words else f"<{tag}>" for i in range(len(cells)))
        return "<tr>" + "".join(f"{m}{escape(c)}</{tag}>" for m, c in zip(marked, cells, strict=True)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'
