"""Text to measure on: a file, or English prose that every CPython ships."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import re
from pathlib import Path
from typing import BinaryIO

from kvfold.errors import KVFoldError
from kvfold.files import expanded

DEFAULT_SOURCE = "pydoc_data.topics"


class TextError(KVFoldError):
    """A text that cannot be read, is not text, or is too short."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text and where it came from.

    Attributes
    ----------
    text
        The characters.
    source
        File path, or the name of the module it was taken from.
    sha256
        Of the text in UTF-8, hexadecimal.
    """

    text: str
    source: str

    @property
    def name(self) -> str:
        """Of the file without its folder: rows are of the same text wherever it lies."""
        return Path(self.source).name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def load_text(path: str | Path | None = None) -> Text:
    """Read a UTF-8 file, or the default prose.

    Raises
    ------
    TextError
        The file does not exist, cannot be read, is not UTF-8 text, or holds nothing but white space.
    """
    if path is None:
        return Text(python_prose(), DEFAULT_SOURCE)
    try:
        with expanded(path).open("rb") as file:
            text = _decoded(file, path)
    except OSError as error:
        raise TextError(f"text: cannot read {str(path)!r}: {error.strerror or error}") from error
    if not text.strip():
        raise TextError(f"text: {path} is empty; give a plain text file")
    return Text(text, str(path))


def _decoded(file: BinaryIO, path: str | Path) -> str:
    """Piece by piece, so that a device without an end is refused at its beginning."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    parts, at = [], 0
    while True:
        piece = file.read(1 << 20)
        begun = at - len(decoder.getstate()[0])
        try:
            parts.append(decoder.decode(piece, final=not piece))
        except UnicodeDecodeError as error:
            where = f"byte {max(begun, 0) + error.start}"
            raise TextError(f"text: {path} is not UTF-8 text ({where}); give a plain text file") from error
        if "\0" in parts[-1]:
            raise TextError(f"text: {path} holds zero bytes: it is not text; give a plain text file")
        if not piece:
            return "".join(parts)
        at += len(piece)


def python_prose() -> str:
    """Paragraphs of English from the language reference that CPython's ``help()`` prints.

    Titles, code, grammar and tables are left out. The same for every run of one Python version; other versions word
    some paragraphs differently, so results carry the text's hash.
    """
    from pydoc_data.topics import topics

    kept: list[str] = []
    seen: set[str] = set()
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            lines = block.splitlines()
            if any(re.match(r"\s*([|+*=>~^-]{2,}|>>>|\.\.\.|\S+ +::=)", line) for line in lines):
                continue
            indents = {len(line) - len(line.lstrip()) for line in lines}
            paragraph = " ".join(" ".join(lines).split())
            prose = sum(c.isalpha() or c == " " for c in paragraph) >= 0.9 * len(paragraph)
            if (
                len(indents) == 1
                and prose
                and len(paragraph) >= 120
                and paragraph[0].isupper()
                and paragraph[-1] in ".:"
            ):
                if paragraph not in seen:
                    seen.add(paragraph)
                    kept.append(paragraph)
    return "\n\n".join(kept) + "\n"
