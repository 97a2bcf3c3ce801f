"""Tables as they are shown at 60, 80, 100, 120 and 200 columns, and where there is no terminal."""

import dataclasses
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

import kvfold
from kvfold import methods
from kvfold.commands import compare, domains
from kvfold.evaluation import Header, Row
from kvfold.evaluation.domains import DomainRow
from kvfold.sheet import Column, Sheet, wrap
from tiny_model import save, tiny_llama

WIDTHS = (60, 80, 100, 120, 200)
LONG = "commvq:artefact=/home/somebody/a/folder/with/artefacts/that-were-calibrated-at-length.safetensors"
NAMES = [*(str(methods.get(spec)) for spec in methods.DEFAULT), LONG]


def header(*prefixes):
    return Header({}, "model", 1, "float32", "a CPU", 2, "t", "0" * 64, {}, list(prefixes), 512, 32, 16, 0, "now")


def compare_rows(*prefixes, path="steps: no CUDA device"):
    shape = (512, 3.0, 3.0, 13_757_000, 73_700_000, 18.3, 0.0758, 0.951, 320.4, 7.9, path, 11.0, 1, 0, 0, 0, 1536, "")
    return [Row(name, prefix, *shape) for prefix in prefixes for name in NAMES]


def domain_rows(domains, prefixes=(1024,)):
    return [
        DomainRow(name, text, 0, prefix, 64, 3.0, 3.1, 9.0, 0.0123, 0.9, 1.0 if text == "retrieval" else None, 1.0)
        for prefix in prefixes
        for name in NAMES
        for text in domains
    ]


def sheets():
    yield "compare", compare._compare_table(header(1024), compare_rows(1024))
    yield "several", compare._compare_table(header(64, 16384), compare_rows(64, 16384, path="graph"))
    yield "domains", domains._domains_table(header(1024), domain_rows(["prose", "code", "retrieval"]))
    many = ["prose", "code", "retrieval", "gsm8k", "wiki", "law", "a-name-of-its-own"]
    yield "many domains", domains._domains_table(header(1024, 4096), domain_rows(many, (1024, 4096)))
    for name in ("fold", "kivi", "none", "squat", "qjl:paper=true,outliers=8,early_layers=1", "fold+0=kivi:bits=4"):
        yield f"explain {name}", kvfold.explain(tiny_llama(), name).sheet("a model")


SHEETS = dict(sheets())


def squeezed(text):
    """Without what wrapping changes."""
    return re.sub(r"\s", "", text)


def column(text, sheet, i, width):
    """One column's text as shown, line by line."""
    parts, _ = sheet.fit(width)
    widths = parts[0]
    start = sum(w + 2 for k, w in widths.items() if k < i)
    return [line[start : start + widths[i]] for line in text.splitlines()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SHEETS)
def test_no_line_is_wider_than_the_terminal(name, width):
    sheet = SHEETS[name]
    lines = sheet.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 4 * len(sheet.rows) * len(sheet.fit(width)[0]) + 60  # nothing is vertical


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [n for n in SHEETS if not n.startswith("explain")])
def test_the_name_of_every_method_is_there_and_not_vertical(name, width):
    sheet = SHEETS[name]
    at = [c.name for c in sheet.columns].index("method")
    shown = column(sheet.text(width), sheet, at, width)
    assert squeezed("".join(map(str, (row[at] for row in sheet.rows)))) in squeezed("".join(shown))
    assert sheet.fit(width)[0][0][at] >= min(16, max(map(len, NAMES)))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SHEETS)
def test_nothing_is_cut_and_what_is_left_out_is_said(name, width):
    sheet = SHEETS[name]
    text = sheet.text(width)
    parts, left = sheet.fit(width)
    assert sorted({i for part in parts for i in part} | set(left)) == list(range(len(sheet.columns)))
    assert "…" not in text and "..." not in text
    for i, col in enumerate(sheet.columns):
        if i not in left:
            assert all(len(piece) <= 200 for piece in col.name) and col.name.split()[0] in text
            assert not col.rank or i not in left
        elif col.below:
            for row in sheet.rows:
                assert squeezed(row[i]) in squeezed(text)
        else:
            said = text[text.index("not shown at this width") :]
            assert squeezed(col.name) in squeezed(said)
    for i in {i for part in parts for i in part}:
        if not sheet.columns[i].wraps:
            assert all(row[i] in text for row in sheet.rows)


@pytest.mark.parametrize("name", SHEETS)
def test_elsewhere_everything_is_there_a_row_a_line(name):
    sheet = SHEETS[name]
    lines = sheet.text(sheet.natural_width).splitlines()
    assert sheet.fit(sheet.natural_width)[1] == []
    for row in sheet.rows:
        assert any(all(cell in line for cell in row) for line in lines)


def test_columns_go_by_rank():
    left = {w: [SHEETS["compare"].columns[i].name for i in SHEETS["compare"].fit(w)[1]] for w in WIDTHS}
    assert left[200] == left[120] == [] and left[100] == []
    assert left[80] == ["prefill tok/s", "s"]
    assert left[60] == ["smaller", "prefill tok/s", "decode tok/s", "s"]


def test_columns_of_rank_0_follow_in_a_table_of_their_own():
    sheet = SHEETS["many domains"]
    parts, left = sheet.fit(60)
    assert len(parts) > 1 and [sheet.columns[i].name for i in left] == ["bits"]
    assert all({0, 1} <= set(part) for part in parts)
    assert len(sheet.fit(200)[0]) == 1


def test_an_explanation_is_one_table_at_60_columns():
    assert all(len(SHEETS[name].fit(60)[0]) == 1 for name in SHEETS if name.startswith("explain"))


def test_numbers_are_not_wrapped_for_the_sake_of_a_long_name():
    (widths,), _ = SHEETS["domains"].fit(80)
    assert [widths[i] for i in (2, 3)] == [11, 11] and widths[4] == 18


def test_a_column_of_text_that_is_left_out_is_listed_with_the_rows_that_have_it():
    sheet = Sheet([Column("layers", key=True), Column("kind", rank=1, below=True), Column("n" * 30)])
    sheet.add("0-3", "full", "a")
    sheet.add("4", "sliding", "b")
    assert sheet.text(36).splitlines()[-2:] == ["kind of 0-3: full", "kind of 4: sliding"]


def test_cells_are_text_and_not_markup():
    sheet = Sheet([Column("method", wraps=True, key=True)])
    sheet.add("artefact=[bold]/x[/bold]")
    assert "artefact=[bold]/x[/bold]" in sheet.text(80)
    assert "&lt;b&gt;" in Sheet([Column("<b>")]).html()


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(ValueError, match="cells: 1 for 2"):
        Sheet([Column("a"), Column("b")]).add("x")


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("turboquant:bits=3,residual=true", 20, ["turboquant:bits=3,", "residual=true"]),
        ("two words", 4, ["two", "word", "s"]),
        ("short", 20, ["short"]),
        ("", 5, [""]),
        ("a b c", 3, ["a b", "c"]),
        ("x " + "y" * 7, 4, ["x", "yyyy", "yyy"]),
        ("漢字漢字", 4, ["漢字", "漢字"]),
        ("one\ntwo", 9, ["one", "two"]),
        ("k=fold:bits=3+v=kivi+keep=0", 24, ["k=fold:bits=3+v=kivi+", "keep=0"]),
    ],
)
def test_wrapping(text, width, lines):
    assert wrap(text, width) == lines


# ---- explain as an object --------------------------------------------------------------------------------------------


def test_an_explanation_prints_a_line_per_field_where_there_is_no_terminal_and_its_repr_stays_a_dataclass():
    plan = kvfold.explain(tiny_llama(), "kivi")
    shown = str(plan)
    lines = shown.splitlines()
    assert lines[:4] == ["kivi", "layers 0-1", "  kind: full attention", "  folded: yes"]
    assert {"  bits: 3.00", "  kernel: cpu"} <= set(lines)
    assert sum(line.startswith("  ") for line in lines) == len(plan.sheet().columns) - 1
    assert "bytes per token once packed" in shown and "in float32" in shown and "not folded: nothing" in shown
    assert repr(plan).startswith("Explanation(method='kivi', layers=[LayerReport(layer_idx=0")
    assert plan.to_dict()["dtype"] == "float32"


def test_an_explanation_is_an_html_table_in_notebooks():
    plan = kvfold.explain(tiny_llama(), "fold")
    html = plan._repr_html_()
    assert html.count("<tr>") == 2 and "full attention" in html and "bytes per token" in html
    assert html.startswith("<table>") and html.count("<td") == html.count("</td>") == 9
    changed = dataclasses.replace(plan, method="<fold>", notes=["a < b"])
    assert "&lt;fold&gt;" in changed._repr_html_() and "a &lt; b" in changed._repr_html_()


# ---- a real terminal -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_explain_on_a_terminal_of_its_own(tmp_path, width=60):
    folder = save(tmp_path / "tiny")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    command = [sys.executable, "-m", "kvfold", "explain", "--model", str(folder)]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    done = subprocess.Popen(command, stdout=theirs, stdin=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    read = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        read += piece
    os.close(ours)
    assert done.wait(timeout=60) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", read.decode()).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("0-1 ") for line in lines) and any(line.startswith("windows: sink 32") for line in lines)
