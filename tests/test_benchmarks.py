"""The committed rows: how large they are, and that they are read packed as they were read before."""

import json
import lzma
import sys
from pathlib import Path

import pytest

from kvfold.errors import KVFoldError
from kvfold.evaluation.report import sources
from kvfold.evaluation.results import PACKED, Result, ResultFile, Settings, files_in

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import pack_rows  # noqa: E402  (a script, not a package)

LIMIT = 3_000_000
"""Bytes of all files of benchmarks/."""
SETTINGS = Settings(
    suite="gsm8k",
    options={"version": 3},
    texts={"problems": "0" * 64},
    model="tiny",
    parameters=1,
    weights_sha256="0" * 64,
    dtype="float32",
    device="cpu",
    windows=(32, 96),
    chunk=64,
    versions={"kvfold": "0"},
)


def row(answer: str | None, item: str = "gsm8k/0.0") -> Result:
    return Result(
        method="kivi",
        item=item,
        task="gsm8k",
        length=None,
        seed=0,
        tags={},
        prompt_sha256="0" * 16,
        prefilled=40,
        read=10,
        tested=10,
        scores={"strict": 1.0, "tokens": 1 / 3},
        series={},
        bits_without_tables=3.0,
        effective_bits=3.0,
        cache_bytes=1,
        full_cache_bytes=2,
        sink=32,
        recent=96,
        seconds=0.1,
        run=0,
        answer=answer,
    )


def written(folder: Path) -> Path:
    file = ResultFile.of(folder, SETTINGS)
    for item, answer in (("a", "It is four."), ("b", "It is four."), ("c", "It is five."), ("d", None)):
        file.add(row(answer, item), {"date": "2026-01-01", "threads": 1, "code": "0"})
    return file.path


def test_benchmarks_are_small():
    """Rows are committed by ``python scripts/pack_rows.py``; one-off studies are not."""
    sizes = {path: path.stat().st_size for path in (ROOT / "benchmarks").rglob("*") if path.is_file()}
    largest = sorted(sizes, key=sizes.__getitem__)[-5:]
    assert sum(sizes.values()) <= LIMIT, [f"{path.relative_to(ROOT)}: {sizes[path]:,}" for path in largest]


def test_committed_answers_are_hashes():
    files = [path for path in (ROOT / "benchmarks").rglob(f"*.jsonl{PACKED}") if "divergence" not in path.name]
    answers = [line.answer for path in files[:4] for line in ResultFile.read(path).rows.values() if line.answer]
    assert answers and all(len(answer) == 23 and answer.startswith("sha256:") for answer in answers)


def test_packing_keeps_every_number_and_which_answers_are_equal(tmp_path):
    path = written(tmp_path)
    before = ResultFile.read(path)
    assert pack_rows.main([str(tmp_path)]) == 0
    (packed,) = tmp_path.iterdir()
    assert packed.name == path.name + PACKED and files_in(tmp_path, "gsm8k-") == [packed]
    after = ResultFile.read(packed)
    assert after.settings == before.settings and after.runs == before.runs and list(after.rows) == list(before.rows)
    a, b, c, d = (found.answer for found in after.rows.values())
    assert a == b != c and a.startswith("sha256:") and d is None
    for old, new in zip(before.rows.values(), after.rows.values(), strict=True):
        assert {**vars(old), "answer": None} == {**vars(new), "answer": None}
    again = tmp_path / "again" / path.name
    again.parent.mkdir()
    again.write_bytes(lzma.decompress(packed.read_bytes()))
    assert pack_rows.packed(again) == packed.read_bytes()


def test_packed_rows_are_reported(tmp_path):
    written(tmp_path)
    (plain,) = sources.read([tmp_path]).sources
    (tmp_path / "layers.json").write_text(json.dumps(dict.fromkeys(sources.LAYERS)))
    pack_rows.main([str(tmp_path)])
    found = sources.read([tmp_path])
    (packed,) = found.sources
    assert packed.found.rows.keys() == plain.found.rows.keys() and len(found.layers) == 1 and not found.others


def test_packed_rows_are_not_gone_on_with_and_damaged_ones_are_named(tmp_path):
    path = written(tmp_path)
    pack_rows.main([str(path)])
    with pytest.raises(KVFoldError, match=r"^out: .*jsonl\.xz holds rows of these settings, compressed; unpack it"):
        ResultFile.of(tmp_path, SETTINGS)
    packed = path.with_name(path.name + PACKED)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(KVFoldError, match=r"^results: cannot read .*jsonl\.xz"):
        ResultFile.read(packed)
