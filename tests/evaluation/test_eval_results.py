import dataclasses
import json
import os
import signal

import pytest

from kvfold.commands.eval import notes
from kvfold.errors import KVFoldError
from kvfold.evaluation.results import (
    Result,
    ResultFile,
    Settings,
    as_folder,
    check_folder,
    code_sha256,
    differing,
    prompt_sha256,
    this_run,
    weights_sha256,
)
from kvfold.evaluation.summary import compared, summarize, to_dict
from tiny_model import tiny_llama

SETTINGS = Settings(
    suite="needle",
    options={"new_tokens": 24},
    texts={"a.txt": "0" * 64},
    model="tiny",
    parameters=1,
    weights_sha256="1" * 64,
    dtype="float32",
    device="a cpu",
    windows=(32, 96),
    chunk=32,
    versions={"kvfold": "0", "torch": "2"},
)


def result(method="kivi", index=0, exact=1.0, **options):
    fields = {
        "item": f"needle/512/{index}",
        "task": "needle",
        "length": 512,
        "seed": 0,
        "tags": {"depth": 50},
        "prompt_sha256": f"{index:016x}",
        "prefilled": 480,
        "read": 40,
        "tested": 40,
        "scores": {"exact": exact},
        "series": {},
        "bits_without_tables": 2.5,
        "effective_bits": 2.5,
        "cache_bytes": 100,
        "full_cache_bytes": 800,
        "sink": 32,
        "recent": 96,
        "seconds": 0.5,
        "run": 0,
        "answer": " 123",
    }
    return Result(method=method, **{**fields, **options})


def filled(folder, rows, settings=SETTINGS):
    file = ResultFile.of(folder, settings)
    for row in rows:
        file.add(row, this_run(1))
    return file


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [result(index=i) for i in range(3)]
    file = filled(tmp_path, rows)
    assert file.path.name == f"needle-{SETTINGS.digest}.jsonl"
    again = ResultFile.of(tmp_path, SETTINGS)
    assert list(again.rows.values()) == rows and again.settings == SETTINGS
    assert [r["run"] for r in again.runs] == [0] and again.runs[0]["code"] == code_sha256()
    lines = file.path.read_text().splitlines()
    assert len(lines) == 5 and "settings" in json.loads(lines[0])


def test_rows_of_one_recipe_under_two_names_are_one_methods(tmp_path):
    pair, name = "k=tasq:bits=2+v=fold:bits=2,codebook=true", "tasq:bits=2,values=fold"
    file = filled(tmp_path, [result(pair), result(name, index=1), result(name)])
    found = ResultFile.read(file.path)
    assert {row.method for row in found.rows.values()} == {name} and len(found.rows) == 2
    assert all(found.has(name, row.item, row.prompt_sha256) for row in found.rows.values())


def test_every_setting_has_a_file_of_its_own(tmp_path):
    changes = [
        {"dtype": "bfloat16"},
        {"weights_sha256": "2" * 64},
        {"windows": None},
        {"windows": (0, 128)},
        {"texts": {"a.txt": "3" * 64}},
        {"options": {"new_tokens": 25}},
        {"versions": {"kvfold": "1", "torch": "2"}},
        {"chunk": 16},
        {"device": "another"},
    ]
    others = [dataclasses.replace(SETTINGS, **change) for change in changes]
    for settings in (SETTINGS, *others):
        filled(tmp_path, [result()], settings)
    assert len(list(tmp_path.glob("*.jsonl"))) == 10
    for change, settings in zip(changes, others, strict=True):
        (line,) = differing(SETTINGS, settings)
        assert line.startswith(next(iter(change)))


def test_a_line_that_a_kill_cut_short_is_made_again(tmp_path):
    file = filled(tmp_path, [result(index=0), result(index=1)])
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-30])
    again = ResultFile.of(tmp_path, SETTINGS)
    assert [row.item for row in again.rows.values()] == ["needle/512/0"]
    again.add(result(index=1), this_run(1))
    rows = ResultFile.of(tmp_path, SETTINGS).rows
    assert [row.item for row in rows.values()] == ["needle/512/0", "needle/512/1"]
    assert {row.run for row in rows.values()} == {0} and again.run == 1


def test_what_is_no_file_of_results_is_refused_by_its_line(tmp_path):
    file = filled(tmp_path, [result()])
    file.path.write_text(file.path.read_text() + '{"method": "kivi"}\n')
    with pytest.raises(KVFoldError, match=r"^results: line 4 of .*needle-.*missing"):
        ResultFile.of(tmp_path, SETTINGS)
    (tmp_path / "x.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(KVFoldError, match=r"^results: line 1 of .*x.jsonl"):
        ResultFile.read(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(KVFoldError, match="no settings"):
        ResultFile.read(tmp_path / "x.jsonl")


def test_a_folder_is_made_and_a_file_is_refused(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    assert as_folder(tmp_path / "a" / "b").is_dir()
    check_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "f").write_text("x")
    with pytest.raises(KVFoldError, match=r"^out: .* is a file"):
        as_folder(tmp_path / "f")


def test_only_one_process_adds_rows(tmp_path):
    file = ResultFile.of(tmp_path, SETTINGS)
    lock = file.lock()
    with pytest.raises(KVFoldError, match=r"^out: another process is writing .*; wait"):
        ResultFile.of(tmp_path, SETTINGS).lock()
    lock.release(force=True)
    ResultFile.of(tmp_path, SETTINGS).lock().release(force=True)


def test_weights_and_prompts_are_told_apart():
    one, other = tiny_llama(), tiny_llama()
    assert weights_sha256(one) == weights_sha256(other)
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    assert weights_sha256(one) != weights_sha256(other)
    assert len({prompt_sha256([1, 2], 1), prompt_sha256([1, 2], 2), prompt_sha256([1, 3], 1)}) == 3


# ---- summaries -------------------------------------------------------------------------------------------------------


def test_methods_are_paired_on_the_items_that_both_have(tmp_path):
    rows = [result("none", i) for i in range(10)]
    rows += [result("kivi", i, exact=0.0) for i in range(3, 12)]
    cells = {cell.method: cell for cell in summarize(filled(tmp_path, rows))}
    assert cells["kivi"].items == 9 and cells["kivi"].differences["exact"].items == 7
    assert cells["kivi"].differences["exact"].verdict == "worse"
    assert cells["kivi"].estimates["exact"].mean == 0 and cells["none"].differences == {}
    json.dumps(to_dict([filled(tmp_path, [])], list(cells.values()), "none"), allow_nan=False)


def test_items_with_another_prompt_are_no_pair(tmp_path):
    rows = [result("none", i) for i in range(8)]
    rows += [result("kivi", i, exact=0.0, prompt_sha256=f"{i:015x}f") for i in range(8)]
    cells = {cell.method: cell for cell in summarize(filled(tmp_path, rows))}
    assert cells["kivi"].differences == {} and cells["kivi"].estimates["exact"].items == 8


def test_the_same_prompt_twice_is_one_item_and_of_one_item_the_newest_prompt_counts(tmp_path):
    """Ten rows of one question, all answered alike, would be ten items with a narrow interval and a verdict."""
    rows = [result("none", i, prompt_sha256="e" * 16) for i in range(10)]
    rows += [result("kivi", i, exact=0.0, prompt_sha256="e" * 16) for i in range(10)]
    rows += [result("squat", i, prompt_sha256="d" * 16) for i in range(2)]
    rows += [result("squat", i, exact=0.0, prompt_sha256=f"{i:016x}") for i in range(2)]
    cells = {cell.method: cell for cell in summarize(filled(tmp_path, rows))}
    assert (cells["kivi"].items, cells["kivi"].repeats) == (1, 9)
    assert cells["kivi"].differences["exact"].verdict == "too few items"
    assert (cells["squat"].items, cells["squat"].repeats) == (2, 0) and cells["squat"].estimates["exact"].mean == 0
    said = notes([filled(tmp_path, [])], list(cells.values()), "none")
    assert any("kivi: 9 more items ask what another asks" in line for line in said)


def test_seeds_that_ask_the_same_problems_make_no_more_problems(tmp_path):
    """Three seeds of GSM8K show other examples before the same eight problems: eight items, not 24."""
    settings = dataclasses.replace(SETTINGS, suite="gsm8k")
    rows = [
        result(method, 10 * seed + i, **{"item": f"gsm8k/{seed}.{i}", "task": "gsm8k", "length": None, "seed": seed})
        for method in ("none", "kivi")
        for seed in range(3)
        for i in range(8)
    ]
    rows = [dataclasses.replace(row, scores={"strict": float(row.method == "none" or row.seed > 0)}) for row in rows]
    cells = {cell.method: cell for cell in summarize(filled(tmp_path, rows, settings))}
    found = cells["kivi"]
    assert found.items == 24 and found.estimates["strict"].items == found.differences["strict"].items == 8
    assert found.estimates["strict"].mean == pytest.approx(2 / 3) and found.differences["strict"].verdict == "worse"


def test_rows_of_different_settings_are_refused(tmp_path):
    here = filled(tmp_path, [result("kivi", i) for i in range(8)])
    there = filled(tmp_path, [result("none", i) for i in range(8)], dataclasses.replace(SETTINGS, dtype="bfloat16"))
    with pytest.raises(KVFoldError, match=r"needle of kivi and of none are not compared.*dtype float32 and bfloat16"):
        compared(here, list(here.rows.values()), there, list(there.rows.values()))


def test_untested_items_are_in_no_mean_and_broken_ones_leave_none(tmp_path):
    rows = [result("kivi", 0), result("kivi", 1, exact=None, tested=0)]
    rows += [result("squat", 0), result("squat", 1, exact=None)]
    cells = {cell.method: cell for cell in summarize(filled(tmp_path, rows))}
    assert (cells["kivi"].untested, cells["kivi"].broken) == (1, 0) and cells["kivi"].estimates["exact"].items == 1
    assert (cells["squat"].untested, cells["squat"].broken) == (0, 1) and cells["squat"].estimates == {}


def test_a_killed_process_keeps_its_rows_and_holds_no_lock(tmp_path):
    child = os.fork()
    if not child:
        file = ResultFile.of(tmp_path, SETTINGS)
        file.lock()
        for i in range(5):
            file.add(result(index=i), this_run(1))
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    again = ResultFile.of(tmp_path, SETTINGS)
    again.lock().release(force=True)
    assert len(again.rows) == 5


def test_bits_that_are_tables_for_the_most_part_are_explained(tmp_path):
    file = filled(
        tmp_path, [result("none"), result("fold"), result("vqllm", bits_without_tables=2.25, effective_bits=8.0)]
    )
    cells = summarize(file, "none", ["none", "fold", "vqllm"], ["needle/512/0"])
    (line,) = (line for line in notes([file], cells, "none") if "share" in line)
    assert line.startswith("bits count tables") and line.endswith("without them: vqllm 2.25")
    assert not any("share" in line for line in notes([file], cells[:2], "none"))


def test_files_that_began_as_copies_are_joined_without_repeating_runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    common = filled(tmp_path, [result(index=0)])
    parts = []
    for number, name in enumerate("ab", 1):
        (tmp_path / name / common.path.name).write_bytes(common.path.read_bytes())
        part = ResultFile.of(tmp_path / name, SETTINGS)
        part.add(result(index=number, run=1), {**this_run(1), "date": name})
        parts.append(ResultFile.read(part.path))
    whole = ResultFile.joined(parts)
    assert [run["run"] for run in whole.runs] == [0, 1, 2] and [run["date"] for run in whole.runs[1:]] == ["a", "b"]
    assert sorted((row.item, row.run) for row in whole.rows.values()) == [(f"needle/512/{n}", n) for n in range(3)]


def test_parts_that_began_within_one_second_stay_two_runs(tmp_path):
    parts = []
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        parts.append(filled(tmp_path / name, [result(index=number)]))
    assert parts[0].runs == parts[1].runs
    whole = ResultFile.joined(parts)
    assert [run["run"] for run in whole.runs] == [0, 1] and [row.run for row in whole.rows.values()] == [0, 1]
