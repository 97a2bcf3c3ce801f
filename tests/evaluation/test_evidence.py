"""The tables of docs/evidence.md: what is paired, and when a claim is said to hold."""

import dataclasses
import pathlib
import sys
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import evidence
import evidence_claims
import evidence_plots
import evidence_tasks


def run(model, source="evidence/x", **methods):
    """Divergences by method: of windows one after the other, after 1,024 tokens, or a dict by length."""
    by_method = {
        name.replace("_", ":"): {
            ("prose", str(i)): value if isinstance(value, dict) else {1024: value} for i, value in enumerate(values)
        }
        for name, values in methods.items()
    }
    return evidence.Run(model, "cpu", source, dict.fromkeys(by_method, 3.0), by_method)


@pytest.fixture
def of(monkeypatch):
    def of(*found):
        evidence.pair.cache_clear()
        monkeypatch.setattr(evidence, "runs", lambda: found)
        return evidence.pair

    yield of
    evidence.pair.cache_clear()


BIG, MIDDLE, SMALL = evidence.MODELS


def test_a_claim_holds_where_every_model_says_so(of):
    pair = of(run(BIG, a=[0.5] * 4, kivi=[1.0, 1.1, 0.9, 1.0]), run(SMALL, a=[0.25] * 4, kivi=[1.0, 1.2, 0.8, 1.0]))
    found = pair("a", "kivi")
    assert found.items == 8 and 0.25 < found.value < 0.5 and found.low < found.value < found.high
    assert found.by_model[BIG] == pytest.approx(0.5, rel=0.01) and found.worst[0] == BIG
    assert evidence_claims.verdict(found) == "holds"
    assert evidence_claims.verdict(pair("kivi", "a")) == "does not hold here"
    assert evidence_claims.verdict(pair("a", "nothing")) == "not measured"


def test_one_model_that_says_otherwise_is_named(of):
    pair = of(run(BIG, a=[1.2] * 3, kivi=[1.0] * 3), run(SMALL, a=[0.1] * 9, kivi=[1.0] * 9))
    found = pair("a", "kivi")
    assert found.verdict == "better" and evidence_claims.verdict(found) == "does not hold on 1.5B"


def test_few_windows_and_noise_show_nothing(of):
    assert evidence_claims.verdict(of(run(BIG, a=[0.1] * 5, kivi=[1.0] * 5))("a", "kivi")) == "too few items"
    noise = [0.5, 2.0, 0.6, 1.8, 0.4, 2.2, 0.7, 1.5]
    assert evidence_claims.verdict(of(run(BIG, a=noise, kivi=[1.0] * 8))("a", "kivi")).startswith("no difference shown")


def test_lengths_of_a_window_are_one_item_and_only_common_ones_count(of):
    pair = of(run(BIG, a=[{1024: 0.5, 4096: 0.125, 16384: 9.0}] * 6, kivi=[{1024: 1.0, 4096: 1.0}] * 6))
    found = pair("a", "kivi")
    assert found.items == 6 and found.value == pytest.approx(0.25)


def test_methods_of_different_runs_are_not_paired(of):
    pair = of(run(BIG, "evidence/x", a=[0.5] * 6), run(BIG, "lengths", kivi=[1.0] * 6))
    assert pair("a", "kivi") is None


def test_learned_rows_count_only_where_the_others_lack_a_method(of):
    pair = of(
        run(BIG, "lengths", a=[0.5] * 6, kivi=[1.0] * 6),
        run(BIG, "learned", a=[0.1] * 6, kivi=[1.0] * 6, learned=[0.3] * 6),
    )
    assert pair("a", "kivi").value == pytest.approx(0.5) and pair("a", "kivi").items == 6
    assert pair("learned", "kivi").value == pytest.approx(0.3)


def test_the_committed_rows_give_every_table_and_a_picture():
    evidence.pair.cache_clear()
    for table in (evidence_claims.claims, evidence.equal_bytes, evidence.everything, evidence.texts, evidence.main):
        lines = table().splitlines()
        assert len(lines) > 5 and len({line.count(" | ") for line in lines}) == 1, table
    drawn = evidence_plots.pareto()
    assert drawn.startswith("<svg") and drawn.count(">fold</text>") == drawn.count("groups of 64</text>") == 2
    assert {evidence.plain("commvq:artefact=a/b.safetensors,bits=1"), evidence.plain("kivi")} == {
        "commvq:bits=1",
        "kivi",
    }


def test_the_second_panel_is_the_loss_on_exact_retrieval_and_names_whom_it_lacks():
    panels = ElementTree.fromstring(evidence_plots.pareto()).findall("{http://www.w3.org/2000/svg}svg")
    assert [panel.get("y") for panel in panels] == ["0", str(evidence_plots.HEIGHT)]
    above, below = ({m.get("data-method"): m for m in panel.iter() if m.get("data-method")} for panel in panels)
    assert {"fold", "kivi", evidence.BEST_BASE, evidence.LEARNED_KEYS} <= below.keys() and evidence.NOTHING not in below
    of = [one for one in evidence_tasks.asked() if one.suite == "retrieval" and not one.earlier]
    for name in ("fold", evidence.LEARNED_KEYS):
        both = evidence_tasks.both(of, name, evidence.NOTHING, "exact", 16_384)
        lost = 100 * sum(full - own for own, full in both) / len(both)
        assert float(below[name].get("data-y")) == pytest.approx(lost)
        assert below[name].get("data-x") == above[name].get("data-x")
        assert below[name].get("fill") == above[name].get("fill")
    said = evidence_plots.lacking()
    assert "16,384 tokens" in said and "`commvq`" in said and "`fold`," not in said


def test_a_window_that_two_runs_scored_is_one(of):
    windows = {"a": [0.5] * 6, "kivi": [1.0] * 6}
    pair = of(run(BIG, "evidence/x", **windows), run(BIG, "evidence/y", a=[2.0] * 6, kivi=[1.0] * 6))
    found = pair("a", "kivi")
    assert found.items == 6 and found.value == pytest.approx(1.0)
    assert of(run(BIG, "evidence/x", **windows), run(BIG, "lengths", **windows))("a", "kivi").items == 12


def score(value):
    return type("Row", (), {"scores": {"exact": value}, "length": 4096, "bits_without_tables": 3.0})()


def test_answers_are_paired_item_by_item_and_a_loss_is_bounded(monkeypatch):
    def answered(**methods):
        rows = {name: {str(i): score(v) for i, v in enumerate(values)} for name, values in methods.items()}
        return evidence_tasks.Asked("needle", BIG, rows)

    one = answered(none=[1.0] * 100, good=[1.0] * 99 + [0.0], bad=[0.0] * 50 + [1.0] * 50, fold=[0.0] * 60)
    monkeypatch.setattr(evidence_tasks, "asked", lambda: (one,))
    loss = evidence_tasks.Claim("p", "s", "good", "none", "needle", alike=True)
    found = {name: evidence_tasks.difference([one], name, "none", "exact") for name in ("good", "bad", "fold")}
    assert evidence_tasks.verdict(loss, found["good"]).startswith("no loss shown, of ")
    assert evidence_tasks.verdict(loss, found["bad"]) == "does not hold here"
    assert found["fold"].verdict == "worse" and evidence_tasks.verdict(loss, found["fold"]) == "fewer than 100 items"
    unsure = dataclasses.replace(found["good"], low=-0.1, high=-0.01)
    assert evidence_tasks.verdict(loss, unsure) == "not decided: a loss of 10.0 points at most"
    line = evidence_tasks.tasks().splitlines()[-1]
    assert "| 100 |" in line and "50.0 -" in line and "99.0 |" in line  # what is shown to be worse is marked
    assert "| 0.0 (60) |" in line  # not of few items, whose number is said


def test_an_item_that_two_files_asked_is_one():
    def asked(*values):
        rows = {name: {f"i{i}": score(v) for i, v in enumerate(values)} for name in ("none", "fold")}
        return evidence_tasks.Asked("needle", BIG, rows)

    files = [asked(1.0, 0.0), asked(0.0, 0.0, 1.0)]
    assert evidence_tasks.of_items(files, "fold", "exact") == [0.5, 0.0, 1.0]
    del files[1].by_method["none"]["i2"]  # full precision did not answer it there
    assert evidence_tasks.of_items(files, "fold", "exact") == [0.5, 0.0]


def test_the_grid_counts_alone_where_it_has_both_methods(of):
    grid = run(BIG, evidence.GRID + "x", a=[0.5] * 6, kivi=[1.0] * 6)
    older = run(BIG, "evidence/y", a=[2.0] * 9, kivi=[1.0] * 9, b=[4.0] * 9)
    pair = of(grid, older, run(SMALL, "evidence/z", a=[2.0] * 6, kivi=[1.0] * 6))
    assert pair("a", "kivi").by_model == pytest.approx({BIG: 0.5, SMALL: 2.0}) and pair("a", "kivi").items == 12
    assert pair("b", "kivi").value == pytest.approx(4.0)


def test_ratios_by_length_are_of_windows_that_both_have(monkeypatch):
    by_method = {"a": [{1024: 0.5, 30000: 3.0}, {1024: 0.5}], "kivi": [{1024: 1.0, 30000: 1.0}, {30000: 1.0}]}
    monkeypatch.setattr(evidence, "runs", lambda: (run(BIG, evidence.GRID + "x", **by_method),))
    monkeypatch.setattr(evidence, "BY_LENGTH", ("a",))
    head, _, line = evidence.lengths().splitlines()
    assert head == "| method | 1,024 tokens | 30,000 tokens |" and line == "| `a` | 0.50 (1.5B) | 3.00 (1.5B) |"


def test_claims_rest_on_a_suites_newest_prompts():
    of = evidence_tasks.asked()
    earlier = {one.suite for one in of if one.earlier}
    assert "ruler" in earlier and not any(one.earlier for one in evidence_tasks.current("ruler"))
    assert any(one.earlier for one in evidence_tasks.current("retrieval"))
