"""Profiles: what layers lose, measured once, and budgets that are spread by them."""

import dataclasses
import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import kvfold
from kvfold.artefact import Artefact, read, save
from kvfold.cli import main
from kvfold.engines.transformers import losses, profiles
from kvfold.engines.transformers.probes import SCORED, probes
from kvfold.engines.vllm import settings, shapes
from kvfold.errors import KVFoldError, KVFoldWarning, MethodError
from kvfold.methods import Recipe, get
from kvfold.methods import profile as of
from kvfold.methods.losses import Losses, spread
from tiny_model import byte_tokenizer, tiny_llama
from tiny_model import save as saved

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "profiles"


@pytest.fixture(scope="module")
def model():
    found = tiny_llama(num_hidden_layers=3)
    profiles.remember(found, byte_tokenizer())
    return found


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    return profiles.measure(model, out=tmp_path_factory.mktemp("profile") / "tiny.safetensors")


def synthetic(key_losses):
    """Values lose nothing; keys of each layer so much at 2 bits, a quarter of it with every further bit."""
    lost, cost = {}, {}
    for layer, loss in enumerate(key_losses):
        for bits in (2, 3, 4, 8):
            lost[layer, "k", bits], cost[layer, "k", bits] = loss * 4.0 ** (2 - bits), bits + 0.5
        lost[layer, "v", 2], cost[layer, "v", 2] = 0.0, 2.25
    return Losses(lost, cost, dict.fromkeys(range(len(key_losses)), 128))


# ---- bits ------------------------------------------------------------------------------------------------------------


def test_bits_go_where_most_is_lost_and_stay_within_the_budget():
    found = synthetic([1e-6, 1.0, 1e-4, 1e-6, 0.01, 1e-6])
    same = found.alike((3, 2))
    choice = spread(found, found.bits_of(same))
    assert found.bits_of(choice) <= found.bits_of(same) and found.total(choice) < found.total(same) / 5
    assert choice[1][0] > choice[4][0] >= choice[2][0] >= choice[0][0] == 2


def test_a_choice_never_loses_more_than_the_same_bits_everywhere():
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        found = synthetic((10 ** (-4 * torch.rand(7, generator=draw))).tolist())
        for own in ((2, 2), (3, 2), (4, 2)):
            same = found.alike(own)
            choice = spread(found, found.bits_of(same))
            assert found.total(choice) <= found.total(same) + 1e-12
            assert found.bits_of(choice) <= found.bits_of(same) + 1e-9


def test_losses_of_two_kinds_count_by_what_the_same_bits_lose():
    text, retrieval = synthetic([1.0, 1e-3]), synthetic([1e-3, 1e3])
    both = retrieval.together(text, (3, 2))
    assert math.isclose(both.total(both.alike((3, 2))), 2.0)
    assert math.isclose(both.loss(0, "k", 3), both.loss(1, "k", 3), rel_tol=0.01)


def test_a_budget_below_the_least_says_what_the_least_is():
    with pytest.raises(KVFoldError, match=r"budget: 2 bits per value; the least is 2\.375, everything at 2 bit"):
        spread(synthetic([1.0]), 2.0)


# ---- the measure -----------------------------------------------------------------------------------------------------


def test_prompts_are_the_same_everywhere_and_ask_for_what_they_list():
    tokenizer = byte_tokenizer()
    found = probes(tokenizer, 1024)
    assert [p.kind for p in found] == ["retrieval", "retrieval", "text"]
    for probe, again in zip(found, probes(tokenizer, 1024), strict=True):
        assert torch.equal(probe.ids, again.ids)
        assert probe.ids.shape[1] <= probe.prefilled + SCORED + 8 and min(probe.predicted) > probe.prefilled
        text = tokenizer.decode(probe.ids[0])
        if probe.kind == "retrieval":
            listed, asked = text.split("\nOnce more:\n\n")
            lines = asked.strip().split("\n")
            assert lines and all(f"{line}\n" in listed for line in lines)


def test_too_short_a_context_is_refused():
    with pytest.raises(KVFoldError, match="a context of 256 tokens leaves nothing to fold"):
        probes(byte_tokenizer(), 256)


def test_losses_are_the_divergence_of_small_changes(model, monkeypatch):
    """The mean over many draws, against the KL divergence with the changed keys in their place."""
    monkeypatch.setattr(losses, "DRAWS", 96)
    (probe,) = (p for p in probes(byte_tokenizer(), 1024) if p.kind == "text")
    bits = 4
    variants = {side: {bits: get(f"fold:bits={bits}")} for side in ("k", "v")}
    found = losses.measure(model, [probe], variants)["text"]
    stored = losses._Stored(model, probe.ids[:, : probe.prefilled])
    changes = stored.changes(get(f"fold:bits={bits}"), [("k", bits), ("v", bits)], {})
    rows = [at - probe.prefilled - 1 for at in probe.predicted]

    def predictions(changed=None):
        cache = stored.own()
        if changed is not None:
            layer, name = cache.layers[changed[0]], {"k": "keys", "v": "values"}[changed[1]]
            setattr(layer, name, getattr(layer, name) + changes[*changed, bits])
        with torch.inference_mode():
            return (
                model(probe.ids[:, probe.prefilled :], past_key_values=cache).logits[0, rows].double().log_softmax(-1)
            )

    exact = predictions()
    for layer in range(3):
        for side in "kv":
            near = predictions((layer, side))
            kld = float((exact.exp() * (exact - near)).sum(-1).mean())
            assert found.lost[layer, side, bits] == pytest.approx(kld, rel=0.5), (layer, side)


def test_nothing_is_compiled_for_a_profile(model, monkeypatch):
    """Compiling kernels of five numbers of bits took 70 s of a first profile's 76 on a GPU."""
    monkeypatch.setattr("kvfold.plan._why_not", None)
    cache, taken = losses._Stored(model, torch.arange(1, 251)[None])._filled(get("fold"))
    assert {str(of.encoder) for of in cache.folded} == {"torch: no kernel was asked for"}
    assert {of.kernel.name for of in cache.folded} == {"reference"}
    assert sorted(taken) == [0, 1, 2]


def test_the_same_model_has_the_same_profile(model, made, tmp_path):
    again = read(profiles.measure(model, out=tmp_path / "again.safetensors"))
    first = read(made)
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert not model.training and not kvfold.explain(model).notes == []


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_fold_measures_a_missing_profile_once_and_says_so(model, home, capsys):
    cache = kvfold.fold(model, "fold:budget=3.2")
    said = capsys.readouterr().err
    assert "measuring once" in said and str(home) in said
    (place,) = home.iterdir()
    stamp = place.stat().st_mtime_ns
    assert isinstance(cache.method, Recipe) or cache.method.name == "fold"
    model(torch.arange(1, 250)[None], past_key_values=cache)
    assert sum(f.bits for layer in cache.folded for f in (layer.key_format, layer.value_format)) / 6 <= 3.2
    kvfold.unfold(model)
    other = kvfold.fold(model, "fold:budget=2.6")
    kvfold.unfold(model)
    assert capsys.readouterr().err == "" and place.stat().st_mtime_ns == stamp
    assert str(other.method) != str(cache.method)


def test_a_budget_is_of_the_layers_that_fold(home):
    """Sliding windows stay as they are, and no bits are given to them."""
    torch.manual_seed(0)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    options = {name: value for name, value in vars(tiny_llama().config).items() if name in SIZES}
    model = Qwen3ForCausalLM(
        Qwen3Config(**options, num_hidden_layers=3, layer_types=kinds, use_sliding_window=True, sliding_window=64)
    ).eval()
    profiles.remember(model, byte_tokenizer())
    with pytest.warns(KVFoldWarning, match="1 of 3 layers stay in full precision"):
        cache = kvfold.fold(model, "fold:budget=2.7")
    assert [layer.spec.layer_idx for layer in cache.folded] == [0, 2]
    ids = torch.arange(1, 251)[None]
    model(ids, past_key_values=cache)
    assert sum(f.bits for layer in cache.folded for f in (layer.key_format, layer.value_format)) / 4 <= 2.7
    again = kvfold.explain(model, "fold:budget=2.7")
    assert any("profile" in note for note in again.notes)


def test_explain_names_the_profile_and_measures_nothing(model, home):
    with pytest.raises(MethodError, match=r"this model has no profile yet: kvfold\.fold"):
        kvfold.explain(model, "fold:budget=3")
    assert not home.exists()
    profiles.measure(model)
    said = kvfold.explain(model, "fold:budget=3")
    assert said.method == "fold:budget=3.0"
    (note,) = (note for note in said.notes if "profile" in note)
    assert str(home) in note


def test_a_budget_is_a_recipe_in_every_way(model, made, tmp_path):
    spec = f"fold:budget=3,artefact={made}"
    ids = torch.arange(1, 301)[None] % 250
    with kvfold.folding(model, spec) as folded:
        one = folded.generate(ids, max_new_tokens=8, do_sample=False)
    recipe = of.recipe(get(spec), read(made))
    with kvfold.folding(model, recipe) as folded:
        assert torch.equal(one, folded.generate(ids, max_new_tokens=8, do_sample=False))
    cache = kvfold.fold(model, spec)
    model(ids, past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    assert str(loaded.method) == str(recipe) and loaded.get_seq_length() == 300
    kvfold.unfold(model)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("fold:budget=0.5", r"budget=0\.5 is not allowed; allowed: 0 .* or 1 to 8"),
        ("fold:bits=2,budget=3", "leaves nothing to choose beside bits"),
        ("fold:k_bits=3,v_bits=2,budget=3", "leaves nothing to choose"),
        ("fold:artefact=x", "artefact=x has no effect without a budget"),
    ],
)
def test_options_that_do_not_go_with_a_budget_are_refused(spec, said):
    with pytest.raises(MethodError, match=said):
        get(spec)


def test_what_a_budget_cannot_be_is_refused_by_name(model, made, home, tmp_path):
    with pytest.raises(MethodError, match="spreads its bits over all layers; allowed: by itself"):
        kvfold.fold(model, "fold:budget=3+keep=0")
    with pytest.raises(MethodError, match=r"budget: 1 bits per value; the least is"):
        kvfold.fold(model, f"fold:budget=1,artefact={made}")
    with pytest.raises(MethodError, match=r"is of fold, and fold:rotation=1 is asked for"):
        kvfold.fold(model, f"fold:budget=3,rotation=1,artefact={made}")
    with pytest.raises(KVFoldError, match="configuration differs"):
        kvfold.fold(tiny_llama(num_hidden_layers=2), f"fold:budget=3,artefact={made}")
    old = read(made)
    save(dataclasses.replace(old, shape={**old.shape, "measure": 0}), tmp_path / "old.safetensors")
    with pytest.raises(MethodError, match="is of measure 0, and this version of kvfold has 1"):
        kvfold.fold(model, f"fold:budget=3,artefact={tmp_path / 'old.safetensors'}")
    with pytest.raises(MethodError, match="a layer's bits are a model's: give the method"):
        get("fold:budget=3").effective_bits()
    assert not home.exists()


def test_a_method_is_measured_at_the_bits_that_it_has(model, tmp_path):
    """A codebook has tables for 1 and 2 bits."""
    place = profiles.measure(model, method="fold:budget=2.2,codebook=true", out=tmp_path / "codes.safetensors")
    assert of.losses(read(place))["text"].bits("k") == of.losses(read(place))["text"].bits("v") == [1, 2]
    found = of.recipe(get("fold:budget=2.2,codebook=true"), read(place))
    assert all(part.codebook for part in found.parts())
    stand_in = of.stand_in(get("fold:budget=2.2,codebook=true"), 4, 64)
    assert all(part.codebook for part in stand_in.parts())


def test_given_bits_of_a_side_stay(made):
    found = of.recipe(get("fold:budget=3,v_bits=2"), read(made))
    assert {found.at(layer).value_bits for layer in range(3)} == {2}


def test_a_model_without_a_tokenizer_says_what_to_do(home):
    model = tiny_llama()
    with pytest.raises(KVFoldError, match=r"tokenizer: none was found .*kvfold.measure\(model, tokenizer\)"):
        kvfold.fold(model, "fold:budget=3")
    assert not list(home.glob("*"))


def test_a_loaded_models_tokenizer_is_known(tmp_path, home):
    from kvfold import models

    loaded, _, _ = models.load(str(saved(tmp_path / "model")))
    assert kvfold.fold(loaded, "fold:budget=3").method.name.startswith("fold")


def test_a_profile_is_an_artefact_that_says_what_it_was_made_of(made):
    found = read(made)
    assert isinstance(found, Artefact) and found.method == "fold" and found.shape["measure"] == of.MEASURE
    assert [p["kind"] for p in found.calibration["prompts"]] == ["retrieval", "retrieval", "text"]
    assert found.errors["0"]["retrieval, keys at 2 bits"] > 0
    held = of.losses(found)["text"]
    assert held.layers == [0, 1, 2] and held.cost[0, "k", 8] > held.cost[0, "k", 2] > 2


# ---- commands and servers --------------------------------------------------------------------------------------------


def test_calibrate_writes_what_a_server_reads(tmp_path, home, capsys):
    folder, out = saved(tmp_path / "model", tiny_llama(num_hidden_layers=3)), tmp_path / "profile.safetensors"
    asked = ["calibrate", "--model", str(folder), "--method", "fold:budget=3"]
    assert main([*asked, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"use it with --method fold:budget=3.0,artefact={out}" in said
    method = settings.method_of({"kvfold": f"fold:budget=3,artefact={out}"})
    assert f"bits by layer of fold:budget=3.0: {method}\n" in said
    assert not home.exists()
    assert main([*asked, "--out", str(out)]) == 2 and "exists (fold for" in capsys.readouterr().err
    assert main([*asked, "--out", str(tmp_path / "b"), "--text", "x"]) == 2
    assert "text: a profile is measured on prompts that are built in" in capsys.readouterr().err
    assert main(["calibrate", "--model", str(folder), "--out", str(tmp_path / "b")]) == 2
    assert "text: commvq is learned from text" in capsys.readouterr().err


def test_a_server_measures_nothing_and_takes_no_other_models_profile(made):
    with pytest.raises(KVFoldError, match=r"a server takes a profile that is there: make it with 'kvfold calibrate"):
        settings.method_of({"kvfold": "fold:budget=3"})
    with pytest.raises(KVFoldError, match="configuration differs"):
        settings.method_of({"kvfold": f"fold:budget=3,artefact={made}"}, tiny_llama(num_hidden_layers=2).config)


def test_a_server_stores_layers_with_bits_of_their_own(model, made):
    method = settings.method_of({"kvfold": f"fold:budget=3,artefact={made}"}, model.config)
    specs = [settings.layer_spec(i, 3, 4, 2, 64, torch.bfloat16, False) for i in range(3)]
    sizes = [settings.stored(method, spec).layout.bytes for spec in specs]
    assert len(set(sizes)) > 1 and sum(sizes) * 8 / (3 * 128 * 128) <= 3


@pytest.mark.parametrize("budget", [2.3, 2.78, 3.5])
def test_a_plan_counts_a_budget_that_no_profile_was_measured_for(tmp_path, budget):
    shape = shapes.of_model(str(saved(tmp_path / "model", tiny_llama(num_hidden_layers=8, head_dim=128))), 1)
    stored, _ = shapes.page_bytes(shape, f"fold:budget={budget}")
    bits = stored * 8 / (8 * 2 * 128 * 128)
    assert budget - 0.15 < bits <= budget + 1e-6


def test_evaluation_names_the_profile_it_was_made_with(model, home):
    from kvfold.evaluation.checked import checked
    from kvfold.evaluation.results import artefacts

    found = checked(model, ["fold:budget=3"])
    assert list(found) == ["fold:budget=3.0"] == [str(method) for method in found.values()]
    assert list(artefacts(found.values())) == [str(path) for path in home.iterdir()]


def test_generate_measures_what_is_missing(tmp_path, home, capsys):
    folder = saved(tmp_path / "model")
    assert (
        main(["generate", "--model", str(folder), "--method", "fold:budget=3", "--max-new-tokens", "2", "hello"]) == 0
    )
    captured = capsys.readouterr()
    assert "measuring once" in captured.err and len(list(home.iterdir())) == 1
