"""The house: who imports whom, read from the source. No circle, no arrow upwards, no room that is too large."""

import ast
from functools import cache
from pathlib import Path

import pytest

import kvfold

ROOT = Path(kvfold.__file__).parent
MOST_LINES = 600
MOST_DEVICE_LINES = 1200
"""Of a module of device code: a kernel is read as a whole, with the loop that calls its parts."""
DEVICE = "# mypy: ignore-errors\n"
"""First line of modules of device code."""

FLOORS = (
    ("errors", "version", "arithmetic", "threads", "files", "outlet", "sheet"),
    ("formats", "rope", "artefact"),
    ("methods", "kernels"),
    ("plan",),
    ("storage",),
    ("engines", "models", "graph"),
    ("",),
    ("evaluation", "bench", "calibration"),
    ("commands", "cli", "__main__"),
)
"""From the ground up; "" is the package itself, which names what users import. A room may use its own floor and those below."""


def rooms() -> dict[str, Path]:
    """Modules by name, within the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def arrows() -> dict[str, dict[str, int]]:
    """What each module imports of the package, and in which line: anywhere in it, in functions and for type checkers too."""
    known = rooms()

    def names(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where they lead"
            return [f"{node.module}.{alias.name}" for alias in node.names]
        return []

    def room(name: str) -> str:
        """The module that an imported name is, or lies in."""
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    found: dict[str, dict[str, int]] = {}
    for module, path in known.items():
        found[module] = {}
        for node in ast.walk(ast.parse(path.read_text())):
            for name in names(node):
                if name.split(".")[0] == "kvfold":
                    found[module].setdefault(room(name.partition(".")[2]), node.lineno)  # type: ignore[attr-defined]
        found[module].pop(module, None)
    return found


def floor(module: str) -> int:
    return next(i for i, names in enumerate(FLOORS) if module.split(".")[0] in names)


def test_every_room_is_on_a_floor():
    assert {m for m in rooms() if not any(m.split(".")[0] in names for names in FLOORS)} == set()


def test_no_arrow_leads_upwards():
    wrong = [
        f"{module or 'kvfold'}:{line} imports {other or 'kvfold'}"
        for module, others in arrows().items()
        for other, line in others.items()
        if floor(other) > floor(module)
    ]
    assert not wrong, wrong


def test_methods_and_kernels_know_nothing_of_each_other():
    for one, other in (("methods", "kernels"), ("kernels", "methods")):
        wrong = [
            m for m, to in arrows().items() if m.split(".")[0] == one and any(t.split(".")[0] == other for t in to)
        ]
        assert not wrong, wrong


def test_there_is_no_circle():
    """Rooms whose imports are all taken away are taken away themselves; what stays goes round."""
    left = {module: set(others) for module, others in arrows().items()}
    while done := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in done}
    assert not left, {module: sorted(others & left.keys()) for module, others in left.items()}


def test_device_code_is_known_by_its_name():
    """And leaves mypy out by its own first line, so that a kernel more is no change of settings."""
    said = {m for m, path in rooms().items() if path.read_text().startswith(DEVICE)}
    named = {m for m in rooms() if m.startswith("kernels.") and m.rpartition(".")[2].startswith("_")}
    compiled = {m for m in named if m.startswith("kernels.cpu.")}  # by Numba, which is Python that mypy checks
    assert {m for m in said if m.startswith("kernels.")} == named - compiled
    assert all(m.rpartition(".")[2].startswith("_") for m in said)


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT).as_posix()) for path in rooms().values()))
def test_a_room_can_be_seen_at_a_glance(name):
    text = (ROOT / name).read_text()
    lines, most = len(text.splitlines()), MOST_DEVICE_LINES if text.startswith(DEVICE) else MOST_LINES
    assert lines <= most, f"{name} has {lines} lines; cut it along what it does"


def test_so_can_tests_and_scripts():
    here = Path(__file__).parents[1]
    paths = [path for folder in ("tests", "scripts", "examples") for path in (here / folder).rglob("*.py")]
    long = {path.name: len(path.read_text().splitlines()) for path in paths}
    long = {name: lines for name, lines in long.items() if lines > MOST_LINES}
    assert not long, f"{long}; cut them along what they test"
