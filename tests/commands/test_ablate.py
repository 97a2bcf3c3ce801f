"""``kvfold ablate``: combinations of options through the loop of ``kvfold eval``."""

import json

import pytest

from kvfold.cli import main
from kvfold.commands.ablate import combinations
from kvfold.errors import KVFoldError
from tiny_model import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(folder, tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("".join(f"Line {i} says {i * 7919 % 1000}.\n" for i in range(200)))

    def run(*arguments):
        capsys.readouterr()
        status = main(
            [
                *("ablate", "--model", folder, "--dtype", "float32", "--device", "cpu", "--text", f"a={text}"),
                *("--tokens", "32", "--lengths", "300", "--limit", "2", "--out", str(tmp_path / "out"), *arguments),
            ]
        )
        return status, *capsys.readouterr()

    return run


def test_every_combination_in_order():
    assert combinations("squat", ["rank=5,10", "lam=0.1,1"]) == [
        "squat:rank=5,lam=0.1",
        "squat:rank=5,lam=1",
        "squat:rank=10,lam=0.1",
        "squat:rank=10,lam=1",
    ]
    assert combinations("squat:recent=32", ["rank=5, 5,,10"]) == ["squat:recent=32,rank=5", "squat:recent=32,rank=10"]


@pytest.mark.parametrize(
    ("spec", "grid", "said"),
    [
        ("squat", [], "grid: none given"),
        ("squat", ["rank"], "grid: 'rank' is not OPTION=VALUE"),
        ("squat", ["rank="], "grid: 'rank=' is not OPTION=VALUE"),
        ("squat", ["rank=1", "rank=2"], "grid: rank is given twice"),
        ("fold+keep=0", ["bits=1"], "method: fold.keep=0 is made of several"),
        ("squat", [f"{name}={','.join(map(str, range(11)))}" for name in ("rank", "lam", "sink")], "grid: 1331 "),
    ],
)
def test_what_is_no_grid_is_refused(spec, grid, said):
    with pytest.raises(KVFoldError, match=f"^{said}"):
        combinations(spec, grid)


def test_rows_of_every_combination_and_the_second_run_makes_none(run, tmp_path):
    given = ("--method", "squat:recent=32", "--grid", "rank=4,8", "lam=0,1")
    status, out, err = run(*given, "--json", str(tmp_path / "result.json"))
    assert status == 0, err
    assert "against squat:recent=32" in out
    cells = json.loads((tmp_path / "result.json").read_text())["cells"]
    found = [cell["method"] for cell in cells]
    assert found[0] == "squat:recent=32" and len(set(found)) == len(found) == 1 + 4
    assert {cell["items"] for cell in cells} == {2}
    by_name = {cell["method"]: cell["estimates"]["kld"]["mean"] for cell in cells}
    # without its penalty SQuat is KIVI, whatever the rank
    assert by_name["squat:recent=32,rank=4,lam=0.0"] == by_name["squat:recent=32,rank=8,lam=0.0"]
    assert by_name["squat:recent=32,rank=4"] != by_name["squat:recent=32,rank=8"]
    status, again, err = run(*given)
    assert status == 0 and "10 of 10 rows taken over" in err and again.splitlines()[:9] == out.splitlines()[:9]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "squat", "--grid", "rang=1,2"), "option 'rang' is not known"),
        (("--method", "squat:rank=4", "--grid", "rank=1,2"), "option 'rank' is given twice"),
        (("--method", "squat", "--grid", "recent=32,96"), "--own-windows"),
        (("--grid", "rank=1,2"), "Missing option '--method'"),
    ],
)
def test_wrong_input_runs_nothing(run, tmp_path, arguments, said):
    status, _, err = run(*arguments)
    assert status == 2 and said in err and "Traceback" not in err
    assert not list((tmp_path / "out").glob("*.jsonl"))
