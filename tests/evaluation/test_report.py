"""The page of ``kvfold report``, read as a browser would read it."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest

from kvfold.cli import main
from kvfold.evaluation.report import figures, report, sources
from kvfold.evaluation.results import ResultFile, content
from kvfold.evaluation.suites import REGISTRY
from test_eval_results import SETTINGS, result

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOADS = {"src", "srcset", "data", "action", "poster", "background", "formaction", "xlink:href"}
BITS = {"none": 32.0, "fold": 2.9, "kivi": 3.0, "fold:bits=1": 1.4}


class Page(HTMLParser):
    """Tags with their attributes, and the text of every section."""

    VOID = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.tags, self.sections, self.open = [], {}, []
        self.section = None
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), self.section))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"]

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), self.section))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "section":
            self.section = None

    def handle_data(self, data):
        self.sections[self.section] = self.sections.get(self.section, "") + data + " "

    def marks(self, tag, **wanted):
        return [a for t, a, _ in self.tags if t == tag and all(a.get(k) == v for k, v in wanted.items())]


def write(folder, rows, **settings):
    folder.mkdir(exist_ok=True)
    file = ResultFile.of(folder, dataclasses.replace(SETTINGS, **settings))
    for row in rows:
        file.add(row, {"date": "then", "threads": 1, "code": "abc"})
    return file


def divergences(methods=tuple(BITS), items=8, **options):
    """Rows whose numbers are all different."""
    for j, method in enumerate(methods):
        for i in range(items):
            kld = 0.0 if method == "none" else 0.01 * (j + 1) + 0.001 * i
            scores = {"kld": kld, "top1": 0.9 - 0.01 * j, "top5": 1.0, "nll": 2.5 + 0.01 * j}
            series = {"kld": [kld * (k + 1) / 4 for k in range(4)], "nll": [2.5] * 4}
            yield dataclasses.replace(
                result(method, i, **options),
                item=f"prose/1024/0.{i}",
                task="prose",
                length=1024,
                tags={},
                scores=scores,
                series=series,
                effective_bits=BITS[method],
            )


def needles(methods=("none", "kivi")):
    for method in methods:
        for length in (512, 1024):
            for depth in (0, 50, 100):
                for i in range(2):
                    row = result(method, i, exact=float(method == "none" or (depth + length + i) % 3 == 0))
                    name = f"needle/{length}/depth={depth}/0.{i}"
                    yield dataclasses.replace(row, item=name, length=length, tags={"depth": depth})


# ---- self-contained --------------------------------------------------------------------------------------------------


def check_nothing_is_loaded(text):
    page = Page(text)
    for tag, attrs, _ in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img", "base", "image", "use"), tag
        assert not LOADS & attrs.keys(), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        assert attrs.get("href", "#").startswith("#"), attrs
        assert not re.search(r"url\s*\(|@import|//", attrs.get("style", ""))
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.S)
    assert not re.search(r"url\s*\(|@import|//", style)
    ids = {a["id"] for _, a, _ in page.tags if "id" in a}
    assert {a["href"][1:] for _, a, _ in page.tags if "href" in a} <= ids
    return page


def test_a_page_refers_to_nothing_outside_of_it(tmp_path):
    write(tmp_path / "rows", divergences(), suite="divergence")
    write(tmp_path / "rows", needles())
    check_nothing_is_loaded(report([tmp_path / "rows"]))


def test_names_are_text_whatever_they_hold(tmp_path):
    name = '<script src="//x">&'
    write(tmp_path / "rows", divergences(), suite="divergence", model=name, texts={name: "0" * 64})
    page = check_nothing_is_loaded(report([tmp_path / "rows"]))
    assert name in page.sections["source-0"]


def test_the_same_rows_give_the_same_page(tmp_path):
    write(tmp_path / "rows", divergences(), suite="divergence")
    assert report([tmp_path / "rows"]) == report([tmp_path / "rows"])


# ---- what plots show -------------------------------------------------------------------------------------------------


def test_points_are_the_rows(tmp_path):
    file = write(tmp_path / "rows", divergences(), suite="divergence")
    page = Page(report([tmp_path / "rows"]))
    points = {a["data-method"]: (float(a["data-x"]), float(a["data-y"])) for a in page.marks("circle")}
    assert points.keys() == {"fold", "kivi", "fold:bits=1"}
    for method, (x, y) in points.items():
        mine = [row for row in file.rows.values() if row.method == method]
        assert x == pytest.approx(fmean(row.effective_bits for row in mine), rel=1e-12)
        assert y == pytest.approx(fmean(row.scores["kld"] for row in mine), rel=1e-12)
    assert "Outside of the axes: none (32; 0)." in " ".join(page.sections["source-0"].split())


def test_marks_lie_where_their_numbers_say(tmp_path):
    write(tmp_path / "rows", divergences(), suite="divergence")
    marks = Page(report([tmp_path / "rows"])).marks("circle")
    by_x = sorted(marks, key=lambda a: float(a["data-x"]))
    by_y = sorted(marks, key=lambda a: float(a["data-y"]))
    assert by_x == sorted(marks, key=lambda a: float(a["cx"]))
    assert by_y == sorted(marks, key=lambda a: -float(a["cy"]))
    low, middle, high = ((math.log(float(a["data-y"])), float(a["cy"])) for a in by_y)
    slope = (high[1] - low[1]) / (high[0] - low[0])
    assert middle[1] == pytest.approx(low[1] + slope * (middle[0] - low[0]), abs=0.2)


def test_lines_are_the_rows_by_position(tmp_path):
    file = write(tmp_path / "rows", divergences(), suite="divergence")
    lines = Page(report([tmp_path / "rows"])).marks("polyline", **{"class": "series"})
    assert {a["data-method"] for a in lines} == {"fold", "kivi", "fold:bits=1"}
    for a in lines:
        series = [row.series["kld"] for row in file.rows.values() if row.method == a["data-method"]]
        expected = [fmean(values) for values in zip(*series, strict=True)]
        assert [float(v) for v in a["data-y"].split()] == pytest.approx(expected, rel=1e-12)
        assert [float(v) for v in a["data-x"].split()] == [5, 15, 25, 35]  # of 40 tokens


def test_errors_by_layer_are_drawn_for_every_measure(tmp_path):
    names = [measure.name for measure in REGISTRY["layers"].measures]
    rows = [
        dataclasses.replace(
            row, scores=dict.fromkeys(names, 0.5), series={n: [0.1, 0.2, k + 1.0] for k, n in enumerate(names)}
        )
        for row in divergences()
    ]
    write(tmp_path / "rows", rows, suite="layers")
    lines = Page(report([tmp_path / "rows"])).marks("polyline", **{"class": "series", "data-method": "fold"})
    assert [a["data-x"] for a in lines] == ["0.0 1.0 2.0"] * len(names)
    assert [float(a["data-y"].split()[-1]) for a in lines] == [k + 1.0 for k in range(len(names))]


def test_heat_maps_are_the_rows_by_depth_and_length(tmp_path):
    file = write(tmp_path / "rows", needles())
    cells = Page(report([tmp_path / "rows"])).marks("rect")
    assert len(cells) == 2 * 2 * 3
    for a in cells:
        mine = [
            row.scores["exact"]
            for row in file.rows.values()
            if (row.method, row.length, row.tags["depth"])
            == (a["data-method"], int(a["data-length"]), int(a["data-depth"]))
        ]
        assert (float(a["data-value"]), int(a["data-items"])) == (fmean(mine), len(mine))


def retrievals(methods=("none", "fold", "kivi"), items=4):
    """Rows whose questions' values lie at every fourth token of 512; values are right where that is before 64 of a page."""
    for method in methods:
        for i in range(items):
            place = [float(p) for p in range(4 * i, 512, 16)]
            exact = [float(method == "none" or p % 128 < 64) for p in place]
            nll = [1.0 + p / 512 for p in place]
            asked = {"place": place, "age": [600 - p for p in place], "exact": exact, "nll": nll}
            scores = {"exact": fmean(exact), "nll": fmean(nll)}
            placed = {"item": f"pairs/512/0.{i}", "task": "pairs", "tags": {}, "scores": scores, "prefilled": 512}
            yield dataclasses.replace(
                result(method, i), **placed, effective_bits=BITS.get(method, 2.3), questions=asked, answer=None
            )


def test_retrieval_is_drawn_by_position_modulo_128_by_age_and_by_depth(tmp_path):
    file = write(tmp_path / "rows", retrievals(), suite="retrieval")
    page = check_nothing_is_loaded(report([tmp_path / "rows"]))
    figures_ = [a["aria-label"] for t, a, _ in page.tags if t == "svg" and a.get("class") == "lines"]
    assert figures_ == [
        f"pairs, 512 tokens: {measure} by {what}"
        for measure in ("exact", "nll")
        for what in ("position modulo 128", "age", "depth")
    ]
    assert "retrieval by position" not in page.sections[None]
    lines = page.marks("polyline", **{"class": "series"})
    assert [a["data-method"] for a in lines] == ["none", "fold", "kivi"] * 6
    by = {(a["data-method"], i // 3): a for i, a in enumerate(lines)}
    x, y = ([float(v) for v in by["kivi", 0][name].split()] for name in ("data-x", "data-y"))
    assert x == [8 + 16 * i for i in range(8)] and y == [1.0] * 4 + [0.0] * 4
    assert [float(v) for v in by["none", 0]["data-y"].split()] == [1.0] * 8
    ages = [float(v) for v in by["kivi", 1]["data-x"].split()]
    assert ages == [92 + (i + 0.5) * (600 - 92) / 8 for i in range(8)]
    depths, rise = ([float(v) for v in by["fold", 5][name].split()] for name in ("data-x", "data-y"))
    assert depths == [(i + 0.5) / 8 for i in range(8)]
    mine = [row.questions for row in file.rows.values() if row.method == "fold"]
    first = [nll for asked in mine for place, nll in zip(asked["place"], asked["nll"], strict=True) if place < 64]
    assert rise[0] == pytest.approx(fmean(first))


def test_divergence_has_a_second_panel_of_exact_retrieval_of_the_same_weights(tmp_path):
    write(tmp_path / "rows", divergences(("none", "fold", "kivi", "fold:bits=1"), items=6), suite="divergence")

    def asked(methods, length):
        for row in retrievals(methods):
            tag = {"length": length, "item": row.item.replace("512", str(length))}
            yield dataclasses.replace(row, **tag)

    file = write(tmp_path / "rows", asked(("none", "fold", "kivi", "fold:bits=2"), 1024), suite="retrieval")
    write(tmp_path / "rows", asked(("none", "fold", "kivi"), 1024), suite="retrieval", weights_sha256="2" * 64)
    page = check_nothing_is_loaded(report([tmp_path / "rows"]))
    title = "key-value pairs, 1,024 tokens: exact lost by effective bits"
    assert len(page.marks("svg", **{"aria-label": title})) == 1  # other weights are another model
    marks = [a for t, a, section in page.tags if t == "circle" and section == "source-0"]
    lost = {a["data-method"]: (float(a["data-x"]), float(a["data-y"])) for a in marks[3:]}
    assert lost == {"fold": (2.9, 50.0), "kivi": (3.0, 50.0), "fold:bits=2": (2.3, 50.0)}
    fills = [{a["data-method"]: a["fill"] for a in some} for some in (marks[:3], marks[3:])]
    assert all(fills[0][name] == fills[1][name] for name in ("fold", "kivi"))
    text = " ".join(page.sections["source-0"].split())
    assert f"on the same prompts, of {file.path.name}. No rows: fold:bits=1." in text
    write(tmp_path / "far", divergences(("none", "fold", "kivi"), items=6), suite="divergence")
    far = write(tmp_path / "far", asked(("none", "fold", "kivi"), 4096), suite="retrieval")
    text = " ".join(Page(report([tmp_path / "far"])).sections["source-0"].split())
    assert f"Of {far.path.name} no two methods have rows of key-value pairs, 1,024 tokens to be drawn." in text


def test_rows_of_compare_with_pairs_are_drawn(tmp_path):
    held = json.loads((BENCHMARKS / "compare-smollm2-135m.json").read_text())
    held["rows"] = [row for row in held["rows"] if row["method"] in ("none", "fold", "kivi", "squat")]
    for i, row in enumerate(held["rows"]):
        row |= {"pairs": 8, "pairs_exact": i / 8, "pairs_nll": 1.0 + i, "full_pairs_exact": 0.5, "full_pairs_nll": 1.0}
    held["header"]["pairs"] = 8
    (tmp_path / "rows.json").write_text(json.dumps(held))
    page = check_nothing_is_loaded(report([tmp_path]))
    shown = [a["aria-label"].split(": ")[1] for t, a, _ in page.tags if t == "svg" and a.get("class") == "pareto"]
    assert shown[:3] == [f"{name} by effective bits" for name in ("kld", "pairs_exact", "pairs_nll")]
    text = " ".join(page.sections["source-0"].split())
    assert "pairs_exact" in text and "12.5%" in text and text.startswith("compare, ")


def test_rows_of_retrieval_that_do_not_say_where_answers_are_are_named(tmp_path):
    old = [dataclasses.replace(row, questions=None) for row in retrievals()]
    file = write(tmp_path / "rows", old, suite="retrieval")
    page = Page(report([tmp_path / "rows"]))
    assert (
        f"retrieval by position modulo 128, by age and by depth: rows of {file.path.name} do not say"
        in page.sections[None]
    )
    assert not page.marks("polyline", **{"class": "series"})
    mixed = [row for row in retrievals() if row.method != "kivi"] + [row for row in old if row.method == "kivi"]
    write(tmp_path / "mixed", mixed, suite="retrieval")
    page = Page(report([tmp_path / "mixed"]))
    assert "4 rows do not say where their answers are: of kivi." in page.sections["source-0"]
    assert {a["data-method"] for a in page.marks("polyline", **{"class": "series"})} == {"none", "fold"}


def test_a_question_whose_number_is_not_finite_has_no_line(tmp_path):
    rows = list(retrievals())
    asked = {**rows[-1].questions, "nll": [None, *rows[-1].questions["nll"][1:]]}
    write(tmp_path / "rows", [*rows[:-1], dataclasses.replace(rows[-1], questions=asked)], suite="retrieval")
    page = Page(report([tmp_path / "rows"]))
    drawn = [a["data-method"] for a in page.marks("polyline", **{"class": "series"})]
    assert drawn == ["none", "fold", "kivi"] * 3 + ["none", "fold"] * 3
    assert page.sections["source-0"].count("Outside of the axes: kivi.") == 3


def test_a_mean_without_one_of_its_numbers_is_no_point(tmp_path):
    rows = list(divergences())
    broken = dataclasses.replace(rows[-1], scores={**rows[-1].scores, "kld": None})
    write(tmp_path / "rows", [*rows[:-1], broken], suite="divergence")
    page = Page(report([tmp_path / "rows"]))
    assert {a["data-method"] for a in page.marks("circle")} == {"fold", "kivi"}
    assert "fold:bits=1: numbers of 1 of 8 items are not finite" in page.sections["source-0"]


def test_the_frontier_is_what_no_other_point_beats():
    def point(name, x, y):
        return figures.Point(name, x, y)

    points = [point("a", 1, 5), point("b", 2, 2), point("c", 3, 2), point("d", 4, 1), point("e", 2, 3)]
    assert [p.method for p in figures.frontier(points, higher_is_better=False)] == ["a", "b", "d"]
    assert [p.method for p in figures.frontier(points, higher_is_better=True)] == ["a"]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [(0.003, 4.2), (1.0, 1.0), (1e-9, 2e-9), (250.0, 90000.0)])
def test_axes_have_ticks_within_them(values, log):
    axis = figures._Scale(figures.Axis("x", log=log), values, 0, 100)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(-0.1 <= axis(tick) <= 100.1 for tick in ticks)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_verdicts_are_paired_and_said(tmp_path):
    alike = [dataclasses.replace(row, method="kivi:bits=4") for row in divergences() if row.method == "fold"]
    write(tmp_path / "rows", [*divergences(), *alike], suite="divergence")
    text = " ".join(Page(report([tmp_path / "rows"])).sections["source-0"].split())
    assert "Verdicts against none" in text and "Verdicts against fold" in text
    against_fold = text[text.index("Verdicts against fold") :]
    assert re.search(r"kivi:bits=4 kld 0\.0000 \[0\.0000, 0\.0000\] 8 1\.000 no difference shown", against_fold)
    assert re.search(r"kivi kld \+0\.0100 \[.*?\] 8 0\.008 worse", against_fold)


def test_tasks_stand_together_first_and_then_apart(tmp_path):
    def as_code(row):
        other = {
            "item": row.item.replace("prose", "code"),
            "prompt_sha256": "f" + row.prompt_sha256[1:],
            "task": "code",
        }
        return dataclasses.replace(row, **other, scores={**row.scores, "kld": 0.5})

    code = map(as_code, divergences(["none", "kivi"]))
    write(tmp_path / "rows", [*divergences(["none", "kivi"]), *code], suite="divergence")
    text = " ".join(Page(report([tmp_path / "rows"])).sections["source-0"].split())
    places = [
        text.index(name) for name in ("all tasks, 1,024 tokens", "By task", "prose, 1,024 tokens", "code, 1,024 tokens")
    ]
    assert places == sorted(places)
    together = text[places[0] : places[1]]
    kivi = fmean([0.5] * 8 + [0.02 + 0.001 * i for i in range(8)])
    assert f"16 {kivi:.4f}" in together


def test_files_with_the_most_rows_come_first(tmp_path):
    write(tmp_path / "rows", divergences(["none"]), suite="divergence")
    write(tmp_path / "rows", divergences(["none", "fold", "kivi"]), suite="divergence", dtype="bfloat16")
    assert "bfloat16" in Page(report([tmp_path / "rows"])).sections["source-0"]


def test_rows_of_different_settings_are_not_compared(tmp_path):
    write(tmp_path / "rows", divergences(["none", "fold"]), suite="divergence")
    write(tmp_path / "rows", divergences(["kivi"]), suite="divergence", dtype="bfloat16")
    page = Page(report([tmp_path / "rows"]))
    sections = {name: " ".join(text.split()) for name, text in page.sections.items() if name}
    assert len(sections) == 2
    (other,) = (text for text in sections.values() if "kivi" in text)
    assert "bfloat16" in other and "against" not in other and "fold" not in other.replace("kvfold", "")


def test_what_is_missing_is_said(tmp_path):
    write(tmp_path / "rows", needles())
    (tmp_path / "rows" / "speed.csv").write_text("method,ms\nfold,1\n")
    (tmp_path / "rows" / "half.json").write_text('{"header": {}, "rows": [{"method": "fold"}]}')
    text = Page(report([tmp_path / "rows"])).sections[None]
    for suite in ("divergence", "ruler", "gsm8k"):
        assert f"{suite}: no rows" in text
    assert "needle: no rows" not in text and "decode time: no rows" in text and "error by layer: no file" in text
    assert "not read, because they hold no rows of an evaluation: half.json, speed.csv" in text


def test_what_layers_lose(tmp_path):
    """As ``kvfold recommend --json`` writes it (test_recommend.py holds that it is read)."""
    cells = [
        {
            "method": name,
            "task": "code",
            "length": 1024,
            "effective_bits": 2.9,
            "items": 8,
            "estimates": {"kld": {"mean": 0.5, "low": 0.4, "high": 0.6, "items": 8}},
            "differences": differences,
        }
        for name, differences in (
            ("fold", {}),
            (
                "fold+1=fold:bits=4",
                {"kld": {"mean": -0.1, "low": -0.2, "high": -0.05, "items": 8, "p": 0.01, "verdict": "better"}},
            ),
        )
    ]
    held = {
        "model": "<tiny>",
        "dtype": "float32",
        "text": "a.txt",
        "text_sha256": "0" * 64,
        "length": 512,
        "tokens": 128,
        "probe_bits": 2,
        "alone": [{"layer": i, "keys": 0.01 * (i + 1), "values": 0.002, "proposed": [3, 2]} for i in range(3)],
        "together": [],
        "proposal": "fold+1=fold:bits=4",
        "uniform": "fold",
        "check": cells,
    }
    (tmp_path / "layers.json").write_text(json.dumps(held))
    page = check_nothing_is_loaded(report([tmp_path]))
    lines = {a["data-method"]: a for a in page.marks("polyline", **{"class": "series"})}
    assert [float(v) for v in lines["keys"]["data-y"].split()] == [row["keys"] for row in held["alone"]]
    assert [float(v) for v in lines["values"]["data-x"].split()] == [0, 1, 2]
    text = " ".join(page.sections["layers-0"].split())
    assert "<tiny>" in text and "Proposed: fold+1=fold:bits=4" in text
    assert (
        "fold+1=fold:bits=4 code, 1,024 tokens 2.900 8 0.5000 [0.4000, 0.6000] -0.1000 [-0.2000, -0.0500] better"
        in text
    )


# ---- rows of compare and domains -------------------------------------------------------------------------------------


def test_rows_of_compare_with_their_decode_times():
    path = BENCHMARKS / "compare-smollm2-135m.json"
    rows = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    page = Page(report([path]))
    times = [a for a in page.marks("circle") if float(a["data-x"]) > 10]
    assert len(times) > 10
    for a in page.marks("circle"):
        row = rows[a["data-method"]]
        x = 1000 / row["decode_tokens_per_s"] if a in times else row["effective_bits"]
        assert (float(a["data-x"]), float(a["data-y"])) == pytest.approx((x, row["kld"]), rel=1e-12)
    text = page.sections["source-0"]
    assert "steps: no CUDA device" in text and "not in the rows" in text


def test_rows_of_domains():
    path = BENCHMARKS / "lengths" / "smollm2-135m.json.xz"
    rows = json.loads(content(path))["rows"]
    known = {(row["method"], row["effective_bits"], row["kld"]) for row in rows}
    marks = Page(report([path])).marks("circle")
    assert len(marks) == sum(row["method"] != "none" for row in rows)
    assert {(a["data-method"], float(a["data-x"]), float(a["data-y"])) for a in marks} <= known


def test_every_committed_file_of_rows_is_read():
    others = sources.read([BENCHMARKS]).others
    assert not [name for name in others if re.search(r"compare|lengths/|learned/|eval", name)], others


@pytest.mark.slow
def test_a_page_of_every_committed_file_is_made():
    """As ``make report`` makes it."""
    found = sources.read([BENCHMARKS])
    sections = re.findall(r'<section id="([a-z]+)-\d+"><h2>', report([BENCHMARKS]))
    assert sections == ["source"] * len(found.sources) + ["layers"] * len(found.layers)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page(tmp_path, capsys):
    write(tmp_path / "rows", divergences(), suite="divergence")
    target = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "rows"), "--out", str(target), "--baseline", "kivi"]) == 0
    assert capsys.readouterr().out == f"written: {target}\n"
    assert target.read_text(encoding="utf-8") == report([tmp_path / "rows"], ["kivi"])
    assert "against kivi" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "results: there is no nowhere"),
        (["empty"], "results: no rows of kvfold eval, compare or domains in empty"),
        (["speed.csv"], "results: speed.csv has no rows"),
        (["bad.jsonl"], "line 2 of bad.jsonl"),
        (["empty", "--out", "no/page.html"], "out: there is no folder"),
        (["empty", "--baseline", "kiwi"], "'kiwi' is not known"),
    ],
)
def test_wrong_input_writes_nothing(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "speed.csv").write_text("method,ms\n")
    line = json.dumps({"settings": SETTINGS.to_dict()})
    (tmp_path / "bad.jsonl").write_text(line + '\n{"method": "fold"}\n')
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert not (tmp_path / "report.html").exists()
