"""What is measured of a model's layers, what is proposed of it, and how the proposal is checked."""

import json
import math
import random
from itertools import product

import pytest
import torch
from transformers import AutoConfig

import kvfold
from books_case import artefact
from kvfold import methods
from kvfold.cli import main
from kvfold.commands import recommend as command
from kvfold.engines.transformers import profiles
from kvfold.errors import KVFoldError
from kvfold.evaluation import windows
from kvfold.evaluation.perplexity import reference, score
from kvfold.evaluation.recommend import (
    Budget,
    budget_of,
    bytes_of,
    check,
    choices,
    measure,
    texts,
    within,
)
from kvfold.evaluation.report import report, sources
from kvfold.evaluation.text import Text, load_text
from kvfold.methods import profile
from kvfold.methods.losses import Losses, spread, uniform
from kvfold.methods.profile import as_method
from tiny_model import byte_tokenizer, save, tiny_llama

FOLD = methods.get("fold")
BITS = (1, 2, 3, 4)


def constructed(keys, values=None, extra=0.4, elements=64):
    """Of layers that lose so much alone at two bits; twice the bits lose a sixteenth."""
    lost = {
        (i, side, b): v * 4.0 ** (2 - b)
        for side, found in (("k", keys), ("v", values or keys))
        for i, v in enumerate(found)
        for b in BITS
    }
    return Losses(lost, {key: key[2] + extra for key in lost}, dict.fromkeys(range(len(keys)), elements))


# ---- proposing -------------------------------------------------------------------------------------------------------


def test_what_loses_more_gets_more_bits():
    found = constructed([1e-3, 1e-3, 1e-1, 1e-3], [1e-4] * 4)
    choice = spread(found, 2.4, full=True)
    assert choice[2][0] > choice[0][0] >= choice[0][1]
    assert found.bits_of(choice) <= 2.4


def test_a_layer_is_kept_where_that_saves_more():
    found = constructed([1e-6] * 7 + [10.0], [1e-6] * 7 + [10.0])
    assert spread(found, 4.4, full=True)[7] is None
    assert spread(found, 4.4)[7] == (4, 4)


@pytest.mark.parametrize("seed", range(20))
def test_a_proposal_fits_and_is_never_expected_to_be_worse_than_uniform(seed):
    draw = random.Random(seed)
    found = constructed(*([10 ** draw.uniform(-5, -1) for _ in range(6)] for _ in "kv"))
    for bits in (1.4, 1.41, 1.9, 2.4, 2.9, 3.33, 4.4, 7.0):
        choice = spread(found, bits, full=True)
        assert found.bits_of(choice) <= bits + 1e-9
        alike = found.alike(uniform(found, bits))
        assert found.bits_of(alike) <= bits + 1e-9
        assert found.total(choice) <= found.total(alike)


@pytest.mark.parametrize("seed", range(5))
def test_a_proposal_is_near_the_best_there_is(seed):
    draw = random.Random(seed)
    found = constructed(*([10 ** draw.uniform(-3, -1) for _ in range(2)] for _ in "kv"))
    every = [dict(enumerate(own)) for own in product([None, *product(BITS, BITS)], repeat=2)]
    for bits in (1.9, 2.4, 3.4):
        best = min(found.total(c) for c in every if found.bits_of(c) <= bits + 1e-9)
        assert found.total(spread(found, bits, full=True)) <= 1.5 * best


def test_too_small_a_budget_is_refused():
    with pytest.raises(KVFoldError, match=r"^budget: 1\.2 bits per value; the least is 1\.4"):
        spread(constructed([1e-3]), 1.2, full=True)
    with pytest.raises(KVFoldError, match=r"^budget: 1\.2 bits per value; even the fewest bits take more"):
        uniform(constructed([1e-3]), 1.2)


def test_aims_give_bits_to_other_layers():
    """Retrieval hangs on the keys of layer 1, running text on the values of layer 2."""
    flat = [1e-6] * 4
    found = {
        "retrieval": constructed([1e-6, 1.0, 1e-6, 1e-6], flat),
        "text": constructed(flat, [1e-6, 1e-6, 1e-2, 1e-6]),
    }
    chosen = {aim: spread(profile.aimed(found, aim, (3, 2)), 2.0, full=True) for aim in profile.AIMS}
    assert chosen["retrieval"][1] == (4, 1) and chosen["retrieval"][2] == (1, 1)
    assert chosen["text"][1] == (1, 1) and chosen["text"][2] == (1, 4)
    assert chosen["both"][1] == (4, 1) and chosen["both"][2] == (1, 2)
    for aim in ("retrieval", "text"):
        other = chosen["text" if aim == "retrieval" else "retrieval"]
        assert found[aim].total(chosen[aim]) <= found[aim].total(chosen["both"]) < found[aim].total(other)


def test_a_proposal_is_a_method_that_can_be_typed():
    choice = {0: (4, 2), 1: (3, 2), 2: (3, 2), 3: None, 4: (4, 2), 5: (1, 1)}
    method = as_method(FOLD, choice)
    spec = str(method)
    assert spec == "fold:k_bits=4,v_bits=2+keep=3+1,2=fold+5=fold:bits=1"
    assert methods.get(spec) == method
    for layer, own in choice.items():
        at = method.at(layer)
        assert (None if at is None else (at.key_bits, at.value_bits)) == own
    assert str(as_method(FOLD, dict.fromkeys(range(3), (2, 1)))) == "fold:k_bits=2,v_bits=1"
    kivi = methods.get("kivi:group=64")
    assert str(as_method(kivi, {0: (4, 2), 1: (2, 2), 2: (2, 2)})).count("group=64") == 2


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
def home(tmp_path_factory):
    """Where profiles of this module's model are kept."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("KVFOLD_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def of_text(model, *ids, length=320, method=FOLD, aim="text"):
    return measure(model, byte_tokenizer(), method, aim, texts(ids, length), 1024)


def drawn(seed):
    return torch.randint(0, 250, (1, 320 + 32 + 1), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def measured(model, home):
    seen = []
    found = measure(model, byte_tokenizer(), FOLD, most=1024, on_step=lambda *step: seen.append(step))
    return model, found, seen


def test_a_profile_is_measured_once_and_read_by_budgets(measured):
    model, found, seen = measured
    assert [done for done, _, _ in seen] == list(range(1, seen[-1][1] + 1))
    assert found.kept == profiles.place_of(model, methods.get("fold:budget=3")) and found.kept.is_file()
    again, steps = measure(model, byte_tokenizer(), FOLD, "retrieval", most=1024, on_step=seen.append), len(seen)
    assert len(seen) == steps and again.losses == found.losses and again.aimed == found.losses["retrieval"]
    for bits in (1.9, 2.406, 2.8123456, 3.2):
        proposal = str(as_method(FOLD, spread(found.aimed, bits, full=True)))
        short = budget_of(FOLD, found, bits, proposal)
        assert short is not None and short.startswith("fold:budget=")
        assert str(kvfold.fold(model, short).method) == proposal
        kvfold.unfold(model)
    assert budget_of(FOLD, found, 2.8, "fold:bits=1") is None


def test_each_side_of_each_layer_is_measured_alone(model):
    ids = drawn(0)
    found = of_text(model, ids).losses["text"]
    truth = reference(model, ids, 320)
    for layer, side in product(range(2), "kv"):
        sides = ("fold:bits=4", "none") if side == "k" else ("none", "fold:bits=4")
        cache = kvfold.fold(model, f"k={sides[0]}+v={sides[1]}+keep={1 - layer}")
        try:
            kld = score(model, ids, 320, cache, reference=truth).kld
        finally:
            kvfold.unfold(model)
        assert kld > 1e-6 and abs(math.log(found.lost[layer, side, 4] / kld)) < math.log(2), (layer, side)


def test_fewer_bits_lose_more_and_cost_less(measured):
    _, found, _ = measured
    for of, layer, side in product(found.losses.values(), range(2), "kv"):
        bits = of.bits(side)
        assert bits == list(profile.BITS[side])
        costs = [of.cost[layer, side, b] for b in bits]
        assert costs == sorted(costs) and all(b < c < b + 1 for b, c in zip(bits, costs, strict=True))
        losses = [of.loss(layer, side, b) for b in bits]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_of_several_texts_the_mean_counts(model):
    one, two, both = (of_text(model, *ids).aimed for ids in ((drawn(0),), (drawn(1),), (drawn(0), drawn(1))))
    for key, lost in both.lost.items():
        assert lost == pytest.approx((one.lost[key] + two.lost[key]) / 2)


def test_texts_of_ones_own_stand_in_for_the_passage(model, measured):
    found = of_text(model, drawn(0), aim="both")
    assert [p["kind"] for p in found.prompts] == ["retrieval", "retrieval", "text"] and found.kept is None
    assert found.losses["text"] == of_text(model, drawn(0)).losses["text"] != measured[1].losses["text"]
    for key, lost in measured[1].losses["retrieval"].lost.items():
        assert found.losses["retrieval"].lost[key] == pytest.approx(lost)


def test_bits_of_a_side_that_are_given_stay(model, measured):
    found = measure(model, byte_tokenizer(), methods.get("fold:k_bits=3"), most=1024)
    assert found.kept == measured[1].kept
    choice = spread(found.aimed, 3.2, full=True)
    assert {own[0] for own in choice.values()} == {3} and len({own[1] for own in choice.values()}) > 1
    short = budget_of(methods.get("fold:k_bits=3"), found, 3.2, str(as_method(FOLD, choice)))
    assert short == "fold:k_bits=3,budget=3.2"
    kivi = measure(model, byte_tokenizer(), methods.get("kivi:v_bits=2"), "retrieval", most=1024)
    assert {own[1] for own in spread(kivi.aimed, 4.0).values()} == {2}
    assert kivi.kept is None and list(kivi.losses) == ["retrieval"]


@pytest.mark.parametrize("spec", ["kivi", "innerq", "squat", "squat_pre", "qjl", "zipcache", "fold:codebook=true"])
def test_other_methods_are_measured_alike(spec, model, home):
    method = methods.get(spec)
    found = measure(model, byte_tokenizer(), method, most=1024)
    least = found.aimed.alike(found.aimed.least)
    bits = found.aimed.bits_of(least) + 0.5
    choice = spread(found.aimed, bits)
    assert 0 < found.aimed.total(choice) < found.aimed.total(least)
    cache = kvfold.fold(model, as_method(method, choice))
    try:
        with torch.inference_mode():
            logits = model(torch.arange(600)[None] % 250, past_key_values=cache).logits
        assert logits.isfinite().all() and cache.folded
    finally:
        kvfold.unfold(model)


def test_expected_bits_are_those_of_the_cache(measured):
    model, found, _ = measured
    choice = {0: (4, 2), 1: (3, 1)}
    ids = torch.randint(0, 250, (1, 32 + 96 + 256), generator=torch.Generator().manual_seed(0))  # two whole pages
    cache = kvfold.fold(model, as_method(FOLD, choice))
    try:
        with torch.inference_mode():
            model(ids, past_key_values=cache)
    finally:
        kvfold.unfold(model)
    assert found.aimed.bits_of(choice) == pytest.approx(float(cache.effective_bits(False)), rel=1e-6)


def test_a_size_is_kept_to(measured):
    model, measured_, _ = measured
    found = measured_.aimed

    def proposal(bits):
        return spread(found, bits, full=True)

    for size in (430_000, 470_000, 520_000):
        bits = within(model, FOLD, found, Budget(bytes=size), 1000)
        assert 0.85 * size < bytes_of(model, as_method(FOLD, proposal(bits)), 1000) <= size
    full = bytes_of(model, methods.get("none"), 1000)
    size = full - 100_000  # more than everything at the most bits: some layers stay in full precision
    choice = proposal(within(model, FOLD, found, Budget(bytes=size), 1000))
    assert None in choice.values() and bytes_of(model, as_method(FOLD, choice), 1000) <= size
    with pytest.raises(
        KVFoldError, match=rf"^budget: {full:,} bytes; a full-precision cache of 1,000 tokens takes {full:,}"
    ):
        within(model, FOLD, found, Budget(bytes=full), 1000)
    with pytest.raises(KVFoldError, match=r"^budget: 1,000 bytes; a cache of 1,000 tokens takes at least"):
        within(model, FOLD, found, Budget(bytes=1000), 1000)


def test_too_few_bits_are_refused_before_anything_is_measured(measured):
    model, found, _ = measured
    least = found.aimed.bits_of(found.aimed.alike((1, 1)))
    check(model, FOLD, Budget(bits=least), 1000)
    with pytest.raises(KVFoldError, match=rf"^budget: 1 bits per value; the least is {least:.4g}, everything at 1 bit"):
        check(model, FOLD, Budget(bits=1.0), 1000)
    with pytest.raises(KVFoldError, match=r"^budget: 2 bits per value; the least is .*, keys at 3 and values at 1 bit"):
        check(model, methods.get("fold:k_bits=3"), Budget(bits=2.0), 1000)


def test_where_nothing_is_packed_nothing_is_measured(model):
    with pytest.raises(KVFoldError, match=r"^length: after 64 tokens nothing is packed .*; give at least 160$"):
        of_text(model, torch.zeros(1, 64 + 33, dtype=torch.long), length=64)
    assert of_text(model, torch.zeros(1, 160 + 33, dtype=torch.long), length=160).aimed.layers


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("fold:bits=2", r"bits=2 is both keys' and values'.*give k_bits= or v_bits="),
        ("kivi:bits=4", r"bits=4 is both keys' and values'"),
        ("fold:budget=2.8", r"has a budget of its own; leave it out, and give --budget"),
        ("fold:k_bits=3,v_bits=2", r"leaves no bits to choose; give k_bits= or v_bits= for one side at most"),
        ("kivi:v_bits=8", r"v_bits=8 is not among what is measured; allowed: 1, 2, 3, 4"),
        ("none", "has no bits of its own"),
        ("k=fold+v=kivi", "has no bits of its own"),
    ],
)
def test_methods_that_leave_nothing_to_choose_are_refused(spec, said):
    with pytest.raises(KVFoldError, match=said):
        choices(methods.get(spec))


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(folder, home, tmp_path, capsys, monkeypatch):
    prose, code = load_text(), windows.library_source()
    monkeypatch.setattr(windows, "load_text", lambda path=None: Text(prose.text[:8000], "prose"))
    monkeypatch.setattr(windows, "library_source", lambda: Text(code.text[:8000], "code"))

    def run(*arguments):
        capsys.readouterr()
        status = main(["recommend", "--model", folder, "--device", "cpu", "--tokens", "32", *arguments])
        return status, *capsys.readouterr()

    return run


def test_the_command_proposes_and_checks(run, tmp_path):
    status, out, err = run(
        "--budget", "2.91", "--check", "2", "--out", str(tmp_path / "rows"), "--json", str(tmp_path / "r")
    )
    assert status == 0, err
    result = json.loads((tmp_path / "r").read_text())
    assert result["proposal"] in out.splitlines()
    assert str(methods.get(result["proposal"])) == result["proposal"]
    assert result["effective_bits"] <= result["budget"] == 2.91 and result["bytes"] > 0
    assert [p["kind"] for p in result["prompts"]] == ["retrieval", "retrieval", "text"] and result["texts"] == {}
    named = {result["proposal"], result["uniform"], result["at_equal_bits"]}
    for suite, tasks, also in (("divergence", {"prose", "code"}, set()), ("retrieval", {"pairs"}, {"none"})):
        cells = [cell for cell in result["check"] if cell["suite"] == suite]
        assert {cell["method"] for cell in cells} == named | also and {cell["task"] for cell in cells} == tasks
        assert all(cell["items"] == 2 for cell in cells)
        assert list((tmp_path / "rows").glob(f"{suite}-*.jsonl"))
    assert "kld against uniform" in out and "exact against uniform" in out, "their strings make a table as wide"
    checked = out.split("kld against uniform")[1]
    assert "proposal" in checked and result["proposal"] not in checked and "full precision" in checked
    page = report([tmp_path / "r"])
    assert "One layer alone: retrieval" in page and "One layer alone: text" in page
    assert "exact</th><th>against uniform bits" in page
    (layers,) = sources.read([tmp_path / "r"]).layers
    assert layers.held == result


def test_a_budget_of_fold_is_what_is_proposed(run, folder, home, tmp_path, capsys):
    status, out, err = run("--budget", "2.6", "--check", "0", "--json", str(tmp_path / "r"))
    assert status == 0, err
    result = json.loads((tmp_path / "r").read_text())
    assert result["same_as"] == "fold:budget=2.6" and "fold:budget=2.6 is this proposal on this model" in out
    model = kvfold.models.load(folder, "float32", "cpu")[0]
    assert str(kvfold.fold(model, result["same_as"]).method) == result["proposal"]
    assert str(profiles.place_of(model, methods.get("fold:budget=2.6"))) in " ".join(out.split())
    kvfold.unfold(model)
    assert run("--budget", "2.6", "--check", "0")[2].count("measuring") == 0, "it is kept"


def test_aims_and_texts_are_the_persons_choice(run, tmp_path):
    (tmp_path / "own").write_text(load_text().text[20_000:24_000], encoding="utf-8")
    found = {}
    for aim, more in (("retrieval", ()), ("text", ()), ("both", ("--text", str(tmp_path / "own"), "--length", "320"))):
        target = tmp_path / aim
        status, out, err = run("--budget", "2.3", "--check", "0", "--for", aim, *more, "--json", str(target))
        assert status == 0, err
        assert "fold:budget=" not in out
        found[aim] = json.loads(target.read_text())
        assert found[aim]["for"] == aim and found[aim]["same_as"] is None
    assert [name.rsplit("/", 1)[-1] for name in found["both"]["texts"]] == ["own"]
    assert found["both"]["prompts"][-1]["prefilled"] == 320
    assert found["text"]["expected"]["text"] <= found["retrieval"]["expected"]["text"]
    assert found["retrieval"]["expected"]["retrieval"] <= found["text"]["expected"]["retrieval"]


def test_a_budget_in_bytes_is_kept_to(run, tmp_path):
    status, out, err = run("--budget", "500kB", "--context", "1000", "--check", "0", "--json", str(tmp_path / "r"))
    assert status == 0, err
    result = json.loads((tmp_path / "r").read_text())
    assert 425_000 < result["bytes"] <= 500_000 and result["context"] == 1000
    assert result["effective_bits"] <= result["budget"] and result["same_as"] in out
    assert result["same_as"].startswith("fold:budget=")


def test_the_command_knows_what_the_measure_does():
    assert command.AIMS == profile.AIMS


@pytest.mark.parametrize(("spec", "least"), [("tasq:bits=2,values=fold", 1), ("tasq:values=fold", 1), ("nova", 1)])
def test_of_learned_keys_the_bits_of_values_are_chosen(spec, least, run, folder, tmp_path):
    """An artefact is for one number of bits of keys."""
    config = AutoConfig.from_pretrained(folder)
    given = artefact(spec, tmp_path / "a.safetensors", 2, 64, layers=2, config=config)
    keys = methods.get(spec).key_bits
    budget = str(keys / 2 + 1.7)
    status, out, err = run("--method", given, "--budget", budget, "--check", "0", "--json", str(tmp_path / "r"))
    assert status == 0, err
    result = json.loads((tmp_path / "r").read_text())
    found = methods.get(result["proposal"])
    assert result["proposal"] in out.splitlines() and result["effective_bits"] <= float(budget)
    assert {part.key_bits for part in found.parts()} == {keys} and "k_bits" not in result["proposal"]
    assert "tables that all sequences share aside" in out
    assert {part.artefact for part in found.parts()} == {str(tmp_path / "a.safetensors")}
    assert {(of["side"], of["bits"]) for of in result["losses"]} == {("k", keys), *(("v", b) for b in BITS)}
    assert result["shown_bits"] == {"k": keys, "v": 2}
    status, _, err = run("--method", given, "--budget", "1.2")
    assert status == 2 and (f"keys at {keys} and values at {least} bit" in err or f"everything at {least} bit" in err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "much"), "budget: 'much'"),
        (("--budget", "1.2", "--check", "0"), "budget: 1.2 bits per value; the least is"),
        (("--budget", "1kB", "--check", "0"), "budget: 1,000 bytes"),
        (
            ("--budget", "2.5", "--length", "500000", "--tokens", "64", "--text", "word"),
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
        (("--budget", "2.5", "--method", "fold:bits=2"), "leaves nothing to choose"),
        (("--budget", "2.5", "--method", "fold:budget=2.5"), "has a budget of its own"),
        (("--budget", "2.5", "--length", "400"), "length: the built-in prompts have lengths of their own"),
        (("--budget", "2.5", "--length", "32", "--text", "word"), "length: 32; give at least 64"),
        (("--budget", "2.5", "--for", "retrieval", "--text", "word"), "text: running text has no part in"),
        (("--budget", "2.5", "--for", "speed"), "'speed' is not one of 'retrieval', 'text', 'both'"),
        ((), "Missing option '--budget'"),
    ],
)
def test_wrong_input_is_refused(run, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word").write_text("word", encoding="utf-8")
    status, out, err = run(*arguments)
    assert status == 2 and said in err and "Traceback" not in err and not out
