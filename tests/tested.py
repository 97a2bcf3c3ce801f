"""Whether the kernels are those that were tested last.

Compiling ahead, emulating lanes and interpreting kernels takes most of the checks' time, and its result depends on few files.
``tests/kernels/TESTED`` has the hash of these files as they were when all tests of tests/kernels passed:
``make test KERNELS=record`` writes it, and ``make test KERNELS=changed`` leaves those tests out, and says so, where the hash is
that of today's files. ``make test`` runs all.
"""

import hashlib
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FOLDER, RECORD = TESTS / "kernels", TESTS / "kernels" / "TESTED"
ALWAYS = FOLDER / "cpu"
"""Tests that are not left out."""
DEPENDS = (
    *("src/kvfold/kernels", "src/kvfold/formats", "src/kvfold/storage", "src/kvfold/methods"),
    *(
        "src/kvfold/arithmetic.py",
        "src/kvfold/errors.py",
        "src/kvfold/graph.py",
        "src/kvfold/plan.py",
        "src/kvfold/rope.py",
    ),
    *("tests/kernels", "tests/aot", "constraints.txt"),
)


def digest() -> str:
    """SHA-256 of all that tests of kernels depend on: these files and the tests' own helpers."""
    found = [
        path for name in DEPENDS for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    found += [path for path in TESTS.glob("*.py") if not path.name.startswith("test_")]
    hashed = hashlib.sha256()
    for path in sorted({path for path in found if path.suffix in (".py", ".bin", ".txt")}):
        hashed.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes() + b"\n")
    return hashed.hexdigest()


def unchanged() -> bool:
    """Whether all tests of kernels passed with today's files."""
    return RECORD.is_file() and RECORD.read_text().strip() == digest()


def left_out(path: Path) -> bool:
    """Whether a test's file is one that need not run where nothing has changed."""
    return FOLDER in path.parents and ALWAYS not in path.parents


def whole(arguments: list[str]) -> bool:
    """Whether what pytest was told to run has all tests of kernels."""
    return any((ROOT / argument).resolve() in (FOLDER, TESTS, ROOT) for argument in arguments)
