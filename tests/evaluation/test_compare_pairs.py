"""Key-value pairs of ``kvfold compare``: what is asked, what rows, tables and older files say of it."""

import json
import re

import pytest
import torch
from transformers import DynamicCache

from kvfold.cli import main
from kvfold.errors import KVFoldError
from kvfold.evaluation import score, windows
from test_evaluation import PREFIX, folded_score, run
from tiny_model import byte_tokenizer, save, tiny_llama

SMALL = ["--prefix", "320", "--tokens", "64", "--new-tokens", "4"]


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def command(capsys):
    def command(*arguments):
        capsys.readouterr()
        status = main(list(arguments))
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_retrieval_says_where_each_value_is_listed():
    window = windows.retrieval_window(byte_tokenizer(), 600, 200, 0)
    ids, scored = window.ids[0], window.ids[0, window.prefilled + 1 :]
    assert len(window.listed) == len(window.answers) > 2 and len(set(window.listed)) == len(window.listed)
    for place, (first, stop) in zip(window.listed, window.answers, strict=True):
        assert place + stop - first <= window.prefilled
        assert torch.equal(ids[place : place + stop - first], scored[first:stop])


def test_compare_asks_for_pairs_under_every_method(tiny, tmp_path):
    """Exact retrieval beside divergence, with full precision's own; the list is read once, by the model."""
    calls = []
    hook = tiny.register_forward_hook(lambda module, args, out: calls.append(args[0].shape[1]), with_kwargs=False)
    result = run(tiny, tmp_path / "out.json", ["fold", "kivi:bits=4,recent=32", "none"], pairs=3)
    hook.remove()
    window = windows.retrieval_window(byte_tokenizer(), PREFIX, None, 0, 3)
    assert len(window.answers) == 3 and calls.count(window.prefilled) == 1
    asked = window.ids.shape[1] - window.prefilled - 1
    assert asked < 128 and calls.count(asked) == 3  # full precision, which is none's as well, and two methods
    assert result.header.pairs == 3
    truth = score(tiny, window.ids, window.prefilled, DynamicCache(config=tiny.config), 128)
    nll = torch.cat([truth.nll[first:stop] for first, stop in window.answers]).mean()
    for row in result.rows:
        assert row.pairs == 3 and row.full_pairs_exact in (0, 1 / 3, 2 / 3, 1)
        assert row.full_pairs_nll == pytest.approx(float(nll), rel=1e-4)
    fold, four, none = result.rows
    assert (none.pairs_exact, none.pairs_nll) == (none.full_pairs_exact, none.full_pairs_nll)
    assert len({fold.pairs_nll, four.pairs_nll, none.pairs_nll}) == 3
    alone = folded_score(tiny, window.ids, "fold", None, window.prefilled)
    values = torch.cat([alone.nll[first:stop] for first, stop in window.answers])
    assert fold.pairs_nll == pytest.approx(float(values.mean()), rel=0.01)
    without = run(tiny, methods=["fold", "none"], pairs=0)
    assert without.header.pairs == 0 and without.rows[0].kld == fold.kld
    assert [(row.pairs, row.pairs_exact, row.full_pairs_nll) for row in without.rows] == [(0, None, None)] * 2


def test_pairs_that_a_prefix_does_not_list_are_not_asked_for(tiny):
    rows = run(tiny, methods=["none", "kivi"], prefix=[64, 96], tokens=32).rows
    assert [row.pairs for row in rows] == [0, 0, 2, 2]  # bytes are tokens here: 64 list none
    assert [row.pairs_exact is None for row in rows] == [True, True, False, True]  # 128 tokens of kivi's are in windows
    with pytest.raises(KVFoldError, match=r"^pairs: -1; give 0 or more$"):
        run(tiny, pairs=-1)
    with pytest.raises(
        KVFoldError, match=r"^pairs: 30 asked for after 960 tokens take \d+, which is beyond the model's con"
    ):
        run(tiny, prefix=960, tokens=32, pairs=30)


def test_a_file_of_before_there_were_pairs_goes_on_without_them(tiny, tmp_path):
    path = tmp_path / "out.json"
    run(tiny, path, ["none"], pairs=0)
    held = json.loads(path.read_text())
    del held["header"]["pairs"]
    for row in held["rows"]:
        for name in [name for name in row if "pairs" in name]:
            del row[name]
    path.write_text(json.dumps(held))
    with pytest.raises(KVFoldError, match=r"holds 1 row of other settings \(pairs 0, now 8\)"):
        run(tiny, path, ["kivi"])
    run(tiny, path, ["kivi"], pairs=0)
    assert [row["method"] for row in json.loads(path.read_text())["rows"]] == ["kivi", "none"]


def test_the_table_has_pairs_beside_divergence(command, folder, tmp_path):
    methods = ["none", "kivi:recent=32"]
    path = tmp_path / "x.json"
    status, out, _ = command("compare", "--model", folder, "--methods", *methods, *SMALL, "--json", str(path))
    assert status == 0
    result = json.loads(path.read_text())
    assert result["header"]["pairs"] == 8
    for row in result["rows"]:
        said = f"{round(row['pairs_exact'] * row['pairs'])}/{row['pairs']}", f"{row['pairs_nll']:.3f}"
        assert row["pairs"] == 8 and re.search(rf"^ *{re.escape(row['method'])} .* {said[0]} +{said[1]} ", out, re.M)
        assert row["full_pairs_nll"] == result["rows"][0]["pairs_nll"]
    assert f"full precision: {round(row['full_pairs_exact'] * 8)}/8, {row['full_pairs_nll']:.3f}" in out


def test_the_table_without_pairs_has_no_column_of_them(command, folder):
    status, out, _ = command("compare", "--model", folder, "--methods", "none", *SMALL, "--pairs", "0")
    assert status == 0 and "pairs" not in out
    status, _, err = command("compare", "--model", folder, "--methods", "none", *SMALL, "--pairs", "-1")
    assert status == 2 and [line for line in err.splitlines() if "error" in line] == [
        "kvfold: error: pairs: -1; give 0 or more"
    ]
    status, out, _ = command("compare", "--model", folder, "--methods", "none", *SMALL[2:], "--prefix", "64")
    assert status == 0 and "pairs: none asked for after 64 tokens, which list none" in out
