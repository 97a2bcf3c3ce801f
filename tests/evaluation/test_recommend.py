"""What is measured of a model's layers, what is proposed of it, and how the proposal is checked."""

import json
import random
from itertools import product

import pytest
import torch
from transformers import AutoConfig

import kvfold
from books_case import artefact
from kvfold import methods
from kvfold.cli import main
from kvfold.errors import KVFoldError
from kvfold.evaluation import windows
from kvfold.evaluation.perplexity import reference, score
from kvfold.evaluation.recommend import (
    BITS,
    PROBE,
    Budget,
    Sensitivity,
    as_method,
    bytes_of,
    check,
    measure,
    propose,
    total_loss,
    uniform,
    within,
)
from kvfold.evaluation.report import sources
from kvfold.evaluation.text import Text, load_text
from tiny_model import save, tiny_llama

FOLD = methods.get("fold")


def sensitivity(keys, values=None, extra=0.4, elements=64):
    """Of layers that lose so much alone at two bits; twice the bits lose a sixteenth."""
    values = values or keys
    alone = {(i, side): v for side, found in (("k", keys), ("v", values)) for i, v in enumerate(found)}
    together = {
        (side, b): sum(found) * 4.0 ** (PROBE - b) for side, found in (("k", keys), ("v", values)) for b in BITS
    }
    cost = {(i, side, b): b + extra for i in range(len(keys)) for side in "kv" for b in BITS}
    return Sensitivity(alone, together, cost, dict.fromkeys(range(len(keys)), elements))


# ---- proposing -------------------------------------------------------------------------------------------------------


def test_what_loses_more_gets_more_bits():
    found = sensitivity([1e-3, 1e-3, 1e-1, 1e-3], [1e-4] * 4)
    choice = propose(found, 2.4)
    assert choice[2][0] > choice[0][0] >= choice[0][1]
    assert found.bits_of(choice) <= 2.4


def test_a_layer_is_kept_where_that_saves_more():
    found = sensitivity([1e-6] * 7 + [10.0], [1e-6] * 7 + [10.0])
    assert propose(found, 4.4)[7] is None


@pytest.mark.parametrize("seed", range(20))
def test_a_proposal_fits_and_is_never_expected_to_be_worse_than_uniform(seed):
    draw = random.Random(seed)
    found = sensitivity(*([10 ** draw.uniform(-5, -1) for _ in range(6)] for _ in "kv"))
    for bits in (1.4, 1.41, 1.9, 2.4, 2.9, 3.33, 4.4, 7.0):
        choice = propose(found, bits)
        assert found.bits_of(choice) <= bits + 1e-9
        alike = dict.fromkeys(found.layers, uniform(found, bits))
        assert found.bits_of(alike) <= bits + 1e-9
        assert total_loss(found, choice) <= total_loss(found, alike)


@pytest.mark.parametrize("seed", range(5))
def test_a_proposal_is_near_the_best_there_is(seed):
    draw = random.Random(seed)
    found = sensitivity(*([10 ** draw.uniform(-3, -1) for _ in range(2)] for _ in "kv"))
    every = [dict(enumerate(own)) for own in product([None, *product(BITS, BITS)], repeat=2)]
    for bits in (1.9, 2.4, 3.4):
        best = min(total_loss(found, c) for c in every if found.bits_of(c) <= bits + 1e-9)
        assert total_loss(found, propose(found, bits)) <= 1.5 * best


def test_too_small_a_budget_is_refused():
    with pytest.raises(KVFoldError, match=r"^budget: 1\.2 bits per value; the least is 1\.4"):
        propose(sensitivity([1e-3]), 1.2)
    with pytest.raises(KVFoldError, match=r"^budget: 1\.2 bits per value; even the fewest bits take more"):
        uniform(sensitivity([1e-3]), 1.2)


def test_a_proposal_is_a_method_that_can_be_typed():
    choice = {0: (4, 2), 1: (3, 2), 2: (3, 2), 3: None, 4: (4, 2), 5: (1, 1)}
    method = as_method(FOLD, choice)
    spec = str(method)
    assert spec == "fold:k_bits=4,v_bits=2+keep=3+1,2=fold:k_bits=3,v_bits=2+5=fold:k_bits=1,v_bits=1"
    assert methods.get(spec) == method
    for layer, own in choice.items():
        at = method.at(layer)
        assert (None if at is None else (at.key_bits, at.value_bits)) == own
    assert str(as_method(FOLD, dict.fromkeys(range(3), (2, 1)))) == "fold:k_bits=2,v_bits=1"


@pytest.mark.parametrize(
    ("text", "bits", "size"),
    [
        ("2.5", 2.5, None),
        ("3 bits", 3, None),
        ("0.5GB", None, 5e8),
        ("300 MiB", None, 300 * 2**20),
        (".5kb", None, 500),
    ],
)
def test_budgets(text, bits, size):
    found = Budget.read(text)
    assert (found.bits, found.bytes) == (bits, size)


@pytest.mark.parametrize("text", ["", "much", "-2", "0", "2.5TB", "GB", "nan"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(KVFoldError, match=r"^budget: "):
        Budget.read(text)


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    model = tiny_llama()
    ids = torch.randint(0, 250, (1, 320 + 32 + 1), generator=torch.Generator().manual_seed(0))
    seen = []
    return model, ids, measure(model, FOLD, ids, 320, on_start=seen.append, on_done=seen.append), seen


def test_each_side_of_each_layer_is_measured_alone(measured):
    model, ids, found, seen = measured
    assert seen[0] == len(seen) - 1 == 2 * (4 + 2)
    truth = reference(model, ids, 320)
    for (layer, side), kld in found.alone.items():
        sides = ("fold:bits=2", "none") if side == "k" else ("none", "fold:bits=2")
        cache = kvfold.fold(model, f"k={sides[0]}+v={sides[1]}+keep={1 - layer}")
        try:
            assert score(model, ids, 320, cache, reference=truth).kld == pytest.approx(kld, rel=1e-3, abs=1e-7)
        finally:
            kvfold.unfold(model)
    assert all(kld > 1e-6 for kld in found.alone.values())


def test_fewer_bits_lose_more_and_cost_less(measured):
    *_, found, _ = measured
    for side in "kv":
        losses = [found.together[side, b] for b in found.bits(side)]
        assert losses == sorted(losses, reverse=True)
        for layer in found.layers:
            costs = [found.cost[layer, side, b] for b in found.bits(side)]
            assert costs == sorted(costs) and all(b < c < b + 1 for b, c in zip(found.bits(side), costs, strict=True))
            losses = [found.loss(layer, side, b) for b in found.bits(side)]
            assert losses == sorted(losses, reverse=True)
            assert found.loss(layer, side, PROBE) == pytest.approx(found.alone[layer, side])


def test_of_several_texts_the_mean_counts(measured):
    model, ids, one, _ = measured
    other = torch.randint(0, 250, ids.shape, generator=torch.Generator().manual_seed(1))
    two, both = measure(model, FOLD, other, 320), measure(model, FOLD, [ids, other], 320)
    for what in ("alone", "together"):
        for key, kld in getattr(both, what).items():
            assert kld == pytest.approx((getattr(one, what)[key] + getattr(two, what)[key]) / 2)


def test_expected_bits_are_those_of_the_cache(measured):
    model, _, found, _ = measured
    choice = {0: (4, 2), 1: (3, 1)}
    ids = torch.randint(0, 250, (1, 32 + 96 + 256), generator=torch.Generator().manual_seed(0))  # two whole pages
    cache = kvfold.fold(model, as_method(FOLD, choice))
    try:
        with torch.inference_mode():
            model(ids, past_key_values=cache)
    finally:
        kvfold.unfold(model)
    assert found.bits_of(choice) == pytest.approx(float(cache.effective_bits(False)), rel=1e-6)


def test_a_size_is_kept_to(measured):
    model, _, found, _ = measured
    for size in (430_000, 470_000, 520_000):
        bits = within(model, FOLD, found, Budget(bytes=size), 1000)
        assert 0.85 * size < bytes_of(model, as_method(FOLD, propose(found, bits)), 1000) <= size
    full = bytes_of(model, methods.get("none"), 1000)
    size = full - 100_000  # more than everything at four bits: some layers stay in full precision
    choice = propose(found, within(model, FOLD, found, Budget(bytes=size), 1000))
    assert None in choice.values() and bytes_of(model, as_method(FOLD, choice), 1000) <= size
    with pytest.raises(
        KVFoldError, match=rf"^budget: {full:,} bytes; a full-precision cache of 1,000 tokens takes {full:,}"
    ):
        within(model, FOLD, found, Budget(bytes=full), 1000)
    with pytest.raises(KVFoldError, match=r"^budget: 1,000 bytes; a cache of 1,000 tokens takes at least"):
        within(model, FOLD, found, Budget(bytes=1000), 1000)


def test_too_few_bits_are_refused_before_anything_is_measured(measured):
    model, _, found, _ = measured
    least = found.bits_of(dict.fromkeys(found.layers, (1, 1)))
    check(model, FOLD, Budget(bits=least), 1000)
    with pytest.raises(KVFoldError, match=rf"^budget: 1 bits per value; the least is {least:.4g}, everything at 1 bit"):
        check(model, FOLD, Budget(bits=1.0), 1000)


def test_where_nothing_is_packed_nothing_is_measured():
    ids = torch.zeros(1, 64 + 33, dtype=torch.long)
    with pytest.raises(KVFoldError, match=r"^length: after 64 tokens nothing is packed .*; give at least 161$"):
        measure(tiny_llama(), FOLD, ids, 64)
    assert measure(tiny_llama(), FOLD, torch.zeros(1, 161 + 2, dtype=torch.long), 161).layers


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    prose, code = load_text(), windows.library_source()
    monkeypatch.setattr(windows, "load_text", lambda path=None: Text(prose.text[:8000], "prose"))
    monkeypatch.setattr(windows, "library_source", lambda: Text(code.text[:8000], "code"))

    def run(*arguments):
        capsys.readouterr()
        status = main(
            ["recommend", "--model", folder, "--device", "cpu", "--length", "320", "--tokens", "32", *arguments]
        )
        return status, *capsys.readouterr()

    return run


def test_the_command_proposes_and_checks(run, tmp_path):
    status, out, err = run(
        "--budget", "2.91", "--check", "1", "--out", str(tmp_path / "rows"), "--json", str(tmp_path / "r")
    )
    assert status == 0, err
    result = json.loads((tmp_path / "r").read_text())
    assert result["proposal"] in out.splitlines()
    assert str(methods.get(result["proposal"])) == result["proposal"]
    assert result["effective_bits"] <= 2.91 and result["bytes"] > 0
    assert list(result["texts"]) == ["prose", "code"]
    assert {cell["method"] for cell in result["check"]} == {
        result["proposal"],
        result["uniform"],
        result["at_equal_bits"],
    }
    assert {cell["task"] for cell in result["check"]} == {"prose", "code"}
    assert "against uniform" in out, "methods' strings make the table as wide as they are"
    checked = out.split("against uniform")[1]
    assert "proposal" in checked and result["proposal"] not in checked
    assert list((tmp_path / "rows").glob("divergence-*.jsonl"))
    (layers,) = sources.read([tmp_path / "r"]).layers
    assert layers.held == result


@pytest.mark.parametrize(("spec", "least"), [("tasq:bits=2,values=fold", 1), ("tasq:values=fold", 1), ("nova", 1)])
def test_of_learned_keys_the_bits_of_values_are_chosen(spec, least, run, folder, tmp_path):
    """An artefact is for one number of bits of keys."""
    config = AutoConfig.from_pretrained(folder)
    given = artefact(spec, tmp_path / "a.safetensors", 2, 64, layers=2, config=config)
    keys = methods.get(spec).key_bits
    budget = str(keys / 2 + 1.7)
    status, out, err = run("--method", given, "--budget", budget, "--check", "0", "--json", str(tmp_path / "r"))
    assert status == 0, err
    assert "kvfold: measuring 9 times" in err  # keys as they are, values at four numbers of bits, and two layers' sides
    result = json.loads((tmp_path / "r").read_text())
    found = methods.get(result["proposal"])
    assert result["proposal"] in out.splitlines() and result["effective_bits"] <= float(budget)
    assert {part.key_bits for part in found.parts()} == {keys} and "k_bits" not in result["proposal"]
    assert "tables that all sequences share aside" in out
    assert {part.artefact for part in found.parts()} == {str(tmp_path / "a.safetensors")}
    assert {(of["side"], of["bits"]) for of in result["together"]} == {("k", keys), *(("v", b) for b in BITS)}
    assert ("probe_bits_of_keys" in result) == (keys != PROBE)
    status, _, err = run("--method", given, "--budget", "1.2")
    assert status == 2 and (f"keys at {keys} and values at {least} bit" in err or f"everything at {least} bit" in err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "much"), "budget: 'much'"),
        (("--budget", "1.2", "--check", "0"), "budget: 1.2 bits per value; the least is"),
        (("--budget", "1kB", "--check", "0"), "budget: 1,000 bytes"),
        (
            ("--budget", "2.5", "--length", "500000", "--tokens", "64"),
            "length: 500000 tokens do not fit the model's context",
        ),
        (("--budget", "2.5", "--length", "400", "--text", "word"), "smaller --length or --tokens"),
        (("--budget", "16", "--check", "0"), "budget: 16 bits per value; full precision takes 16"),
        (("--budget", "2.5", "--context", "0"), "context: 0"),
        (("--budget", "2.5", "--context", str(10**20)), "000; allowed: 1 to 1,099,511,627,776 tokens"),
        (("--budget", "2.5", "--check", "-1"), "check: -1"),
        (("--budget", "2.5", "--method", "fold+keep=0"), "has no bits of its own"),
        (("--budget", "2.5", "--method", "kiwi"), "'kiwi' is not known"),
        (
            ("--budget", "2.5", "--method", "commvq"),
            "so that there are none to choose; allowed: fold",
        ),
        (("--budget", "2.5", "--method", "tasq:artefact=x"), "learned for one number of bits"),
        (
            ("--budget", "2.5", "--method", "tasq:bits=2,values=fold"),
            'kvfold calibrate --method "tasq:bits=2,values=fold"',
        ),
        ((), "Missing option '--budget'"),
    ],
)
def test_wrong_input_is_refused(run, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word").write_text("word", encoding="utf-8")
    status, out, err = run(*arguments)
    assert status == 2 and said in err and "Traceback" not in err and not out
