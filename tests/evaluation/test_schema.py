"""Rows and headers as files."""

import dataclasses
import hashlib
import json

import pytest

from kvfold import files
from kvfold.errors import KVFoldError
from kvfold.evaluation import Row, Text, domains
from kvfold.evaluation.schema import Header, Sidecar, read_row, write_json

PREFIX, TOKENS = 320, 96


def test_rows_of_another_schema_are_refused():
    with pytest.raises(KVFoldError, match="row: fields"):
        read_row(Row, {"method": "none"})


def test_rows_of_before_a_field_was_there_are_read():
    """Those of `kvfold domains` with one prefix, in the header; then a retrieval row's own was what its pairs filled."""
    row = {"method": "kivi", "window": 0, "tokens": 250, "bits_without_tables": 3.0, "effective_bits": 3.0, "ppl": 9.0}
    row |= {"kld": 0.1, "top1": 0.9, "seconds": 1.0}
    prose, retrieval = {"domain": "prose", "prefix": 1024, "exact": None}, {"domain": "retrieval", "prefix": 1003}
    rows = domains.read_rows({"header": {"prefix": 1024}, "rows": [row | prose, row | retrieval | {"exact": 0.5}]})
    assert [(r.domain, r.prefix, r.prefilled, r.exact) for r in rows] == [
        ("prose", 1024, 1024, None),
        ("retrieval", 1024, 1003, 0.5),
    ]
    assert {r.tested for r in rows} == {None}


def test_writing_replaces_a_result_in_one_step(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_paths_that_cannot_be_written_are_found_before_the_work(tmp_path):
    with pytest.raises(KVFoldError, match=r"json: .* is a folder"):
        files.check(tmp_path, "json")
    with pytest.raises(KVFoldError, match="json: there is no folder"):
        files.check(tmp_path / "no" / "out.json", "json")
    files.check(tmp_path / "out.json", "json")
    assert list(tmp_path.iterdir()) == []


def test_a_text_carries_its_hash():
    assert Text("a", "b").sha256 == hashlib.sha256(b"a").hexdigest()


def test_rows_of_other_weights_or_artefacts_under_the_same_names_are_not_taken_over(tmp_path):
    """A checkpoint that was trained on, or an artefact made anew, while a run was killed: one table would hold both. They are
    lost only where that is asked for."""
    header = Header({}, "m", 1, "float32", "cpu", 1, "t", "", {}, [64], 32, 32, 0, 0, "now")
    row = domains.DomainRow("kivi", "prose", 0, 64, 32, 2.0, 2.0, 1.0, 0.1, 0.9, None, 1.0)
    sidecar = Sidecar.of(tmp_path / "out.json", domains.DomainRow)

    def kept(weights, force=False, **artefacts):
        return list(sidecar.start(header, {"weights": weights, "artefacts": artefacts}, force).values())

    assert kept("w", a="1") == []
    sidecar.add(row)
    assert kept("w", a="1") == kept("w", b="1") == kept("w", a="1", b="1") == [row]  # of other methods, too
    with pytest.raises(
        KVFoldError, match=r"1 row of a stopped run of other settings \(artefact a 1, now 2\); .* --force"
    ):
        kept("w", a="2")
    assert kept("w", force=True, a="2") == []
    sidecar.add(row)
    with sidecar.path.open("a") as file:
        file.write('{"method": "kiv')  # a kill; the next row gets a line of its own
    sidecar.add(dataclasses.replace(row, window=1))
    assert len(kept("w", a="2")) == 2
    with pytest.raises(KVFoldError, match="weights w, now v"):
        kept("v", a="2")
    assert kept("v", force=True, a="2") == kept("x") == []  # without rows nothing is lost


def test_rows_of_other_fields_are_not_dropped_without_a_word(tmp_path):
    """Those of another command, say; and of one's own a row that cannot be read costs none behind it."""
    header = Header({}, "m", 1, "float32", "cpu", 1, "t", "", {}, [64], 32, 32, 0, 0, "now")
    row = domains.DomainRow("kivi", "prose", 0, 64, 32, 2.0, 2.0, 1.0, 0.1, 0.9, None, 1.0)
    hashes = {"weights": "w", "artefacts": {"a": "1"}}
    sidecar = Sidecar.of(tmp_path / "out.json", domains.DomainRow)
    sidecar.start(header, hashes)
    with sidecar.path.open("a") as file:
        file.write('{"method": "kivi", "what": 1}\n')
    sidecar.add(row)
    assert list(sidecar.start(header, hashes).values()) == [row]
    other = dataclasses.replace(header, tokens=16)
    with sidecar.path.open("a") as file:
        file.write('{"method": "kivi", "what": 1}\n')
    held = sidecar.path.read_bytes()
    with pytest.raises(KVFoldError, match="2 rows of a stopped run of other settings"):
        sidecar.start(other, {"weights": "w", "artefacts": {"a": "2"}})
    assert sidecar.path.read_bytes() == held
    assert sidecar.start(other, {"weights": "w", "artefacts": {}}, force=True) == {}
    assert '"artefacts": {}' in sidecar.path.read_text()  # what was dropped leaves no hash behind
