"""Make files of rows small before they are committed: answers become their hashes, and the file is compressed.

    python scripts/pack_rows.py FILE_OR_FOLDER...

FILE.jsonl of ``kvfold eval --out`` becomes FILE.jsonl.xz, and FILE.json of other commands' ``--json`` FILE.json.xz. Every
number stays. An answer becomes the first 16 hexadecimal digits of its SHA-256, which say whether two answers are equal; its
text is kept nowhere.
"""

import argparse
import hashlib
import json
import lzma
import sys
from pathlib import Path
from typing import Any

from kvfold import files
from kvfold.evaluation.results import PACKED, SUFFIX, ResultFile, content

HASH = "sha256:"


def hashed(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose answer is a hash; one that is a hash already stays."""
    answer = row.get("answer")
    if answer is None or answer.startswith(HASH):
        return row
    return row | {"answer": HASH + hashlib.sha256(answer.encode()).hexdigest()[:16]}


def packed(path: Path) -> bytes:
    """What takes the place of a file; the same rows give the same bytes.

    Raises
    ------
    KVFoldError
        It is named as rows of ``kvfold eval`` are, and holds none.
    """
    if path.suffix == SUFFIX:
        ResultFile.read(path)
    lines = (hashed(json.loads(line)) for line in _lines(path))
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def _lines(path: Path) -> list[str]:
    text = content(path).decode()
    return [line for line in text.split("\n") if line] if path.suffix == SUFFIX else [text]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files of rows, and folders of them at any depth")
    for given in parser.parse_args(arguments).paths:
        for path in sorted(given.rglob("*.json*")) if given.is_dir() else [given]:
            if path.suffix not in (SUFFIX, ".json"):
                continue
            target = path.with_name(path.name + PACKED)
            files.write(target, packed(path))
            print(f"{target}: {target.stat().st_size:,} bytes instead of {path.stat().st_size:,}")
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
