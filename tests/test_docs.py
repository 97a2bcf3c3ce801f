"""The documentation's links lead somewhere, and the files and commands that it names exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from test_readme import parsed

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LINK = re.compile(r"!?\[[^]\[]*(?:\[[^]]*\][^]\[]*)*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
FOLDERS = ("", "src/kvfold", "src/kvfold/engines/transformers", "tests", "docs")
"""Where a path in a text may begin."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(name: str) -> str:
    """Without fenced code."""
    return FENCE.sub("", text_of(name))


@cache
def anchors(name: str) -> frozenset[str]:
    """Of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", prose(name), re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def links(name: str) -> list[str]:
    return [link for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(name))) if ":" not in link]


def lost(name: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    wrong = []
    for link in links(name):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.exists() or not target.resolve().is_relative_to(ROOT):
            wrong.append(link)
        elif anchor and anchor not in anchors(target.resolve().relative_to(ROOT).as_posix()):
            wrong.append(link)
    return wrong


def commands_of(name: str) -> list[str]:
    """Lines of code that begin with ``kvfold``."""
    text = re.sub(r" \\\n +", " ", text_of(name))
    fenced = [code for language, code in FENCE.findall(text) if not language]
    indented = re.findall(r"^(?: {4}.*\n)+", FENCE.sub("", text), re.M)
    lines = (line.strip().replace(" ... ", " ") for code in [*fenced, *indented] for line in code.splitlines())
    return [line for line in lines if line.startswith("kvfold ")]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    assert lost(name) == []


def test_there_are_links_and_a_wrong_one_is_found(tmp_path, monkeypatch):
    assert sum(len(links(name)) for name in NAMES) > 80
    (tmp_path / "a.md").write_text(
        "# One: `two`, *three*\n[x](a.md#one-two-three) [y](#one-two) [z](b.md) ![p](p.svg)\n```\n[no](c.md)\n```\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert lost("a.md") == ["#one-two", "b.md", "p.svg"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_files_that_are_named_exist(name):
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|csv|json|svg))`", text_of(name)))
    real = {path for path in named if Path(path).stem not in ("yours", "NAME")}
    assert {path for path in real if not any((ROOT / folder / path).exists() for folder in FOLDERS)} == set()


def test_the_rooms_of_architecture_are_those_of_the_house():
    """The tree names files that exist, and every folder."""
    (tree,) = (code for _, code in FENCE.findall(text_of("docs/architecture.md")) if code.startswith("src/kvfold/"))
    package = ROOT / "src" / "kvfold"
    files = {path.name for path in package.rglob("*.py")}
    folders = {path.parent.name for path in package.rglob("__init__.py")} - {"kvfold"}
    assert set(re.findall(r"\w+\.py", tree)) <= files
    named = {name for path in re.findall(r"(?:\w+/)+", tree) for name in path.split("/") if name}
    assert named - {"src", "kvfold"} == folders


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_scripts_and_rows_that_are_named_exist(name):
    named = re.findall(r"\b(?:scripts/\w+\.py|benchmarks/[\w./-]*\w)", text_of(name))
    assert {path for path in named if not (ROOT / path).exists()} == set()


EVENING = re.compile(r"^\*\*The (\w+): .*?\*\* \(([\d,]+) lines\)(.*?)(?=^\*\*The|^## |^\[CONTRIB)", re.M | re.S)
"""Of the reading path: which one, how many lines it says, and what it names."""


def test_the_reading_path_of_three_evenings_is_there():
    """Its files exist, in numbered lines, and are as long as the page says, without what needs no GPU."""
    evenings = EVENING.findall(text_of("docs/architecture.md"))
    assert [name for name, *_ in evenings] == ["first", "second", "third"]
    for name, said, text in evenings:
        steps = re.findall(r"^\d\. (.*)$", text.split(" Without a GPU")[0], re.M)
        files = [ROOT / "src/kvfold" / path for step in steps for path in re.findall(r"`([\w/]+\.py)`", step)]
        assert len(steps) >= 3 and all(path.is_file() for path in files), (name, files)
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        assert 0.85 < lines / int(said.replace(",", "")) < 1.15, (name, lines, said)


def test_pages_that_the_code_names_exist():
    named = {
        (page, path.relative_to(ROOT).as_posix())
        for folder in ("src", "tests", "examples", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"docs/[\w/-]+\.(?:md|svg)", path.read_text(encoding="utf-8"))
    }
    assert named and not {(page, by) for page, by in named if not (ROOT / page).exists()}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "README.md"])
def test_commands_are_commands(name):
    """README's are tried in test_readme.py."""
    for line in commands_of(name):
        parsed(line)


def test_commands_are_found():
    assert sum(len(commands_of(name)) for name in NAMES) > 20
    assert any("--lengths 1024 4096" in line and "--out rows/" in line for line in commands_of("docs/evidence.md"))


def test_folds_headline_is_the_same_wherever_it_is_said():
    """README, the method's page and evidence once had ranges of different rows."""
    bits, ends = r"([\d.]+)", r"([\d.]+ to [\d.]+)"
    said = {
        "README.md": rf"\*\*{ends} of the divergence of the best KIVI.* {bits} bits; {ends} of KIVI-2's",
        "docs/methods/fold.md": rf"at {bits} bits has {ends} times .* and {ends} times that of the best",
        "docs/evidence.md": rf"`fold` at {bits} bits has {ends} of that of the best.* `fold` has {ends},",
    }
    found = {name: set(re.search(pattern, text_of(name)).groups()) for name, pattern in said.items()}
    assert len(set(map(frozenset, found.values()))) == 1, found
