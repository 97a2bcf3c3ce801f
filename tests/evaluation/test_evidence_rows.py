"""The command that takes all rows of evidence: what it runs, in what order, and what it keeps."""

import json
import lzma
import sys
import tarfile
from pathlib import Path

import pytest

from kvfold.errors import KVFoldError
from kvfold.evaluation.results import PACKED, ResultFile, content
from kvfold.methods import get

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import evidence_rows as rows  # noqa: E402  (a script, not a package)


class Process:
    """One that ends when a test says so."""

    def __init__(self):
        self.status = None

    def poll(self):
        return self.status

    def terminate(self):
        self.status = -15

    def wait(self):
        return self.status


def task(name, gib=1, methods=(), after=()):
    return rows.Task(name, ("eval", "--suite", "ppl"), methods, after, gib)


@pytest.fixture
def run(tmp_path):
    """A run whose processes are stand-ins, by name."""

    def make(tasks, gpus=1, memory=10):
        started = {}

        def start(task, command, gpu):
            started[task.name] = (Process(), list(command), gpu)
            return started[task.name][0]

        (tmp_path / "out").mkdir(exist_ok=True)
        return rows.Run(tasks, tmp_path, tmp_path / "out", start, gpus, memory), started

    return make


def test_every_method_of_every_task_is_one():
    found = rows.tasks(Path("texts"), Path("data"), "e")
    assert len({t.name for t in found}) == len(found)
    for spec in {m for t in found for m in t.methods}:
        get(spec)
    names = {t.name for t in found}
    assert all({*t.after, *t.behind} <= names for t in found)


def test_all_pairs_of_bits_of_fold_are_measured():
    assert len(set(rows.PLAIN)) == len(rows.PLAIN)
    assert len([m for m in rows.PLAIN if m.startswith("fold") and "codebook" not in m]) == 16


def test_parts_measure_the_same_methods_in_another_order():
    orders = [rows.turned(rows.PLAIN, part, 7) for part in range(1, 8)]
    assert len({order[0] for order in orders}) == 7
    assert all(sorted(order) == sorted(rows.PLAIN) for order in orders)


def test_chosen_methods_need_only_what_they_learn_from():
    found = rows.only_methods(rows.tasks(Path("texts"), Path("data"), "e"), ("kivi", rows.LEARNED_KEYS))
    some = rows.chosen(found, ["retrieval-4096", "divergence-*-plain"])
    assert {m for t in some for m in t.methods} == {"kivi", f"{rows.LEARNED_KEYS},artefact=tasq-2-e-1.5b.safetensors"}
    assert [t.name for t in some if t.name.startswith("learn-")] == ["learn-1.5b-tasq-2"]
    assert all("plain" in t.name for t in some if t.name.startswith("divergence"))


def test_rows_that_are_there_are_where_a_task_goes_on(tmp_path):
    have, out = tmp_path / "have", tmp_path / "rows"
    have.mkdir()
    for name in ("ruler-1", "needle-2"):
        (have / f"{name}.jsonl").write_text(name)
    (have / "needle-3.jsonl.xz").write_bytes(lzma.compress(b"needle-3"))
    (out / "ruler-4096-qa").mkdir(parents=True)
    (out / "ruler-4096-qa" / "ruler-1.jsonl").write_text("more")
    rows.begin_with(have, out, ["ruler-4096-qa", "needle-4096-1"])
    kept = {path.relative_to(out).as_posix(): path.read_text() for path in out.glob("*/*")}
    assert kept == {
        "ruler-4096-qa/ruler-1.jsonl": "more",
        "needle-4096-1/needle-2.jsonl": "needle-2",
        "needle-4096-1/needle-3.jsonl": "needle-3",
    }


def test_tasks_share_gpus_by_memory(run):
    ours, started = run([task("a", 6), task("b", 6), task("c", 4), task("d", 4)], gpus=2)
    ours.step()
    assert {name: gpu for name, (_, _, gpu) in started.items()} == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert ours.free == [0, 0]
    started["a"][0].status = 0
    ours.step()
    assert ours.free == [6, 0]


def test_a_task_larger_than_a_gpu_gets_one_of_its_own(run):
    ours, started = run([task("small", 2), task("large", 24)], memory=10)
    ours.step()
    assert list(started) == ["small"]
    started["small"][0].status = 0
    ours.step()
    assert list(started) == ["small", "large"]


def test_a_task_waits_for_what_it_needs(run):
    learned = ("kivi", "tasq:artefact=tasq-e-1.5b.safetensors")
    learn = task("learn-1.5b-tasq")
    ours, started = run([task("last", methods=learned, after=("first",)), task("first"), learn])
    ours.step()
    assert set(started) == {"first", "learn-1.5b-tasq"}
    started["first"][0].status = 0
    ours.step()
    assert "last" not in started
    started["learn-1.5b-tasq"][0].status = 1
    ours.step()
    assert "last" in started  # what it learns from ended, though not well


def test_a_model_is_converted_when_its_file_is_there(run, tmp_path):
    ours, started = run([task("convert-1.5b", 0), task("after", after=("convert-1.5b",))])
    assert ours.step() and not started
    (tmp_path / rows.MODELS[rows.LARGEST]).touch()
    assert ours.step() and list(started) == ["convert-1.5b"]


def test_missing_models_are_named_at_once(tmp_path):
    with pytest.raises(KVFoldError, match=r"models: .* has no qwen2.5-coder-1.5b.*SmolLM2.*--wait"):
        rows.main(["--models", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_needs_a_failed_task_is_not_run(run):
    ours, started = run([task("first"), task("last", after=("first",))])
    ours.step()
    started["first"][0].status = 2
    while ours.step():
        pass
    assert ours.ended == {"first": 2, "last": 1} and "last" not in started


def test_methods_whose_artefact_could_not_be_learned_are_left_out(run, tmp_path):
    (tmp_path / "there.safetensors").touch()
    methods = ("kivi", "tasq:artefact=there.safetensors", "gsrq:bits=1,artefact=missing.safetensors")
    ours, started = run([task("some", methods=methods), task("none", methods=methods[2:])])
    ours.step()
    command = started["some"][1]
    at = command.index("--methods")
    assert command[at + 1 : command.index("--out")] == ["kivi", "tasq:artefact=there.safetensors"]
    assert ours.ended["none"] == 1


def test_what_ended_well_is_not_run_again_unless_it_changes(run):
    ours, started = run([task("a"), task("b")])
    ours.step()
    started["a"][0].status, started["b"][0].status = 0, 1
    ours.step()
    again, started = run([task("a"), task("b")])
    again.step()
    assert list(started) == ["b"]
    other, started = run([task("a", methods=("kivi",))])
    other.step()
    assert list(started) == ["a"]


def test_stopping_ends_what_runs(run):
    ours, started = run([task("a")])
    ours.step()
    ours.stop()
    assert started["a"][0].status == -15


def test_a_snapshot_has_the_rows_of_all_parts(tmp_path):
    source = ROOT / "benchmarks/evidence/needle-4ce90bad.jsonl.xz"
    settings, *others = content(source).decode().splitlines()
    name = source.name.removesuffix(PACKED)
    runs = [line for line in others if '"method"' not in line]
    measured = [line for line in others if '"method"' in line][:10]
    for part, lines in (("a", measured[:6]), ("b", measured[4:])):
        (tmp_path / "rows" / part).mkdir(parents=True)
        text = "\n".join([settings, *runs, *lines, '{"cut short'])
        (tmp_path / "rows" / part / name).write_text(text)
    assert rows.snapshot(tmp_path / "rows", tmp_path / "all.tar.xz") == 10
    with tarfile.open(tmp_path / "all.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    found = ResultFile.read(tmp_path / "back" / name)
    assert {row.key for row in found.rows.values()} == {
        f"{row['method']}|{row['item']}|{row['prompt_sha256']}" for row in map(json.loads, measured)
    }
    assert not (tmp_path / "all.tar.xz.partial").exists()


def test_a_name_that_no_task_has_is_refused():
    found = rows.tasks(Path("texts"), Path("data"), "e")
    with pytest.raises(KVFoldError, match="only: no task begins with nothing"):
        rows.chosen(found, ["nothing"])
    kept = [t.name for t in rows.chosen(found, ["gsm8k-1"])]
    assert kept[-1] == "gsm8k-1" and "convert-1.5b" in kept and "learn-1.5b-tasq" in kept and "gsm8k-2" not in kept


def test_all_commands_are_listed(capsys):
    assert rows.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows.tasks(Path("texts"), Path("data"), "e"))
