"""A result's file that holds rows already: those of the same settings stay in it, others are refused and not lost."""

import json

import pytest

from kvfold import cli, models
from kvfold.errors import KVFoldError
from kvfold.evaluation import compare, domains, load_text, windows
from tiny_model import byte_tokenizer, save, tiny_llama

SETTINGS = {"prefix": 320, "tokens": 64, "new_tokens": 4}


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama()


def run(tiny, out, methods, **options):
    info = models.ModelInfo("tiny", "float32", "cpu", 1024, 1)
    return compare(tiny, byte_tokenizer(), info, methods, load_text(), json_path=out, **(SETTINGS | options))


def held(path):
    return [(row["method"], row["prefix"]) for row in json.loads(path.read_text())["rows"]]


def test_other_methods_join_a_file_and_those_asked_again_are_measured_anew(tiny, tmp_path):
    out, told = tmp_path / "out.json", []

    def tell(*counts):
        told.append(counts)

    run(tiny, out, ["none", "kivi:recent=32"], on_earlier=tell)
    assert told == []
    first = json.loads(out.read_text())
    result = run(tiny, out, ["fold:recent=32", "none"], on_earlier=tell)
    assert told == [(1, 1)] and [row.method for row in result.rows] == ["fold:recent=32", "none"]
    assert held(out) == [("fold:recent=32", 320), ("none", 320), ("kivi:recent=32", 320)]
    whole = json.loads(out.read_text())
    assert whole["rows"][2] == first["rows"][1] and whole["rows"][1] != first["rows"][0]  # seconds, at least
    run(tiny, out, ["kivi:bits=4,recent=32"], on_earlier=tell)
    assert told[1:] == [(3, 0)] and len(held(out)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"tokens": 65}, "tokens 64, now 65"), ({"seed": 1}, "seed 0, now 1"), ({"prefix": [320, 512]}, "prefixes")],
)
def test_rows_of_other_settings_are_refused_before_the_work(tiny, tmp_path, change, why):
    out, ran = tmp_path / "out.json", []
    run(tiny, out, ["none"])
    before = out.read_bytes()
    with pytest.raises(KVFoldError, match=rf"^json: .*out.json holds 1 row of other settings \({why}.*; .* --force$"):
        run(tiny, out, ["none"], on_row=ran.append, **change)
    assert ran == [] and out.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["out.json"]
    run(tiny, out, ["kivi:recent=32"], force=True, **change)
    assert {method for method, _ in held(out)} == {"kivi:recent=32"}


def test_rows_that_stay_are_of_the_same_weights(tiny, tmp_path):
    """A checkpoint that was trained on under its name, and a file of before weights were written down."""
    out = tmp_path / "out.json"
    run(tiny, out, ["none", "kivi:recent=32"])
    found = json.loads(out.read_text())
    for change, why in (
        ({"made_of": {"weights": "f" * 64}}, "weights f{12}, now"),
        ({"made_of": {}}, "weights are not"),
    ):
        out.write_text(json.dumps(found | change))
        with pytest.raises(KVFoldError, match=why):
            run(tiny, out, ["none"])
        run(tiny, out, ["none", "kivi:recent=32"])  # all of them are measured anew


@pytest.mark.parametrize("text", ['{"a": 1}', "[]", '{"header": {}, "rows": [{"method": "kivi"}]}', "{"])
def test_a_file_of_something_else_is_refused(tiny, tmp_path, text):
    out = tmp_path / "out.json"
    out.write_text(text)
    with pytest.raises(KVFoldError, match="holds something else than rows of this command; give another name"):
        run(tiny, out, ["none"])
    assert out.read_text() == text
    run(tiny, out, ["none"], force=True)
    assert held(out) == [("none", 320)]


def test_domains_keep_rows_alike(tiny, tmp_path):
    info = models.ModelInfo("tiny", "float32", "cpu", None, 1)
    texts = windows.load_texts(("prose",), {})
    out, told = tmp_path / "rows.json", []
    one, two = (windows.make_windows(byte_tokenizer(), texts, 320, 64, count) for count in (1, 2))
    domains.run(tiny, info, ["none"], one, json_path=out)
    domains.run(tiny, info, ["kivi:recent=32"], one, json_path=out, on_earlier=lambda *counts: told.append(counts))
    assert told == [(1, 0)] and held(out) == [("kivi:recent=32", 320), ("none", 320)]
    with pytest.raises(KVFoldError, match="holds 2 rows of other settings"):
        domains.run(tiny, info, ["none"], two, json_path=out)
    domains.run(tiny, info, ["none"], two, json_path=out, force=True)
    assert len(held(out)) == 2


def test_the_command_says_what_becomes_of_a_file(tmp_path, capsys):
    folder, out = save(tmp_path / "tiny"), tmp_path / "x.json"
    command = ["compare", "--model", str(folder), "--prefix", "320", "--new-tokens", "2", "--json", str(out)]
    assert cli.main([*command, "--tokens", "64", "--methods", "none", "kivi:recent=32"]) == 0
    assert "has rows" not in capsys.readouterr().err
    assert cli.main([*command, "--tokens", "64", "--methods", "none"]) == 0
    said = "x.json has rows of the same settings: 1 row of other methods kept, 1 row measured anew\n"
    assert said in capsys.readouterr().err and len(held(out)) == 2
    before = out.read_bytes()
    assert cli.main([*command, "--tokens", "65", "--methods", "none"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "json: " in shown.err and "tokens 64, now 65" in shown.err and out.read_bytes() == before
    assert cli.main([*command, "--tokens", "65", "--methods", "none", "--force"]) == 0 and len(held(out)) == 1
