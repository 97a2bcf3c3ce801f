"""Calibration of a small model: collecting, learning, resuming, and folding with the result."""

import dataclasses
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing

import kvfold
from kvfold import unfold
from kvfold.artefact import checksum, load, read
from kvfold.artefact import save as save_artefact
from kvfold.calibration import nova
from kvfold.calibration.collect import Collector, distance_factor, to_complex
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.run import LayerDone, calibrate, windows_of
from kvfold.cli import main
from kvfold.errors import KVFoldError, KVFoldWarning, MethodError
from kvfold.evaluation.perplexity import reference, score
from kvfold.evaluation.text import Text, python_prose
from kvfold.kernels import NewTokens
from kvfold.methods import LayerSpec, get
from kvfold.methods.learned import span
from tiny_model import byte_tokenizer, save, tiny_llama

QUICK = Schedule(window=128, em_tokens=0, em_steps=3, hard_steps=1, joint_rounds=1, value_rounds=1)
TEXT = Text(python_prose()[:20000], "prose")
METHOD = "commvq:bits=1,levels=16"


def learn(out: Path, method: str = METHOD, model=None, **options):
    options = {"schedule": QUICK, "tokens": 2048, **options}
    tokens = options.pop("tokens")
    return calibrate(model or tiny_llama(), byte_tokenizer(), "tiny", get(method), [TEXT], tokens, out, **options)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("artefact") / "one.safetensors"
    learn(out)
    return out


# ---- collecting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_collected_layers_are_the_models_own(batch):
    """Keys before RoPE and values equal the projections' outputs, and the last hidden states are the model's."""
    model = tiny_llama()
    windows = windows_of(byte_tokenizer(), [TEXT], 256, 64)
    seen: list[dict[str, torch.Tensor]] = [{}, {}]
    handles = []
    for i, layer in enumerate(model.model.layers):
        for name in ("k_proj", "v_proj"):
            module = getattr(layer.self_attn, name)
            handles.append(module.register_forward_hook(lambda m, a, out, i=i, n=name: seen[i].update({n: out})))
    with torch.inference_mode():
        model.model.norm = torch.nn.Identity()
        hidden = model.model(windows, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    collector = Collector(model, windows, batch)
    collector.start()
    for i in range(2):
        sample = collector.step()
        for name, got in (("k_proj", sample.keys), ("v_proj", sample.values)):
            expected = seen[i][name].unflatten(-1, (2, 64)).permute(2, 0, 1, 3).flatten(1, 2)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(collector.hidden, hidden, rtol=1e-3, atol=1e-3)
    assert model.config._attn_implementation != "kvfold_collect"


def test_weights_and_metrics_are_those_of_the_definition():
    model = tiny_llama(num_hidden_layers=1)
    windows = windows_of(byte_tokenizer(), [TEXT], 64, 32)
    collector = Collector(model, windows)
    collector.start()
    sample = collector.step()
    rope, d, n = sample.spec.rope, 64, 32
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(windows))
        plain = attention.q_proj(hidden).unflatten(-1, (4, d)).transpose(1, 2)
    positions = torch.arange(n).view(1, 1, -1)
    q = rope.rotate(plain, positions)
    k = rope.rotate(sample.keys.unflatten(1, (2, n)).transpose(0, 1), positions).repeat_interleave(2, 1)
    v = sample.values.unflatten(1, (2, n)).transpose(0, 1).repeat_interleave(2, 1)
    causal = torch.ones(n, n).tril() == 0
    p = (q @ k.mT / 8).masked_fill(causal, float("-inf")).softmax(-1)
    mass = p.square().sum(-2).unflatten(1, (2, 2)).sum(2).transpose(0, 1).flatten(1)
    torch.testing.assert_close(sample.value_weight, mass, rtol=1e-3, atol=1e-3)
    far = (v.unsqueeze(-3) - (p @ v).unsqueeze(-2)).square().sum(-1)
    expected = (p.square() * far).sum(-2).unflatten(1, (2, 2)).sum(2).transpose(0, 1).flatten(1)
    torch.testing.assert_close(sample.key_weight, expected, rtol=1e-3, atol=1e-3)
    # a key error's mean squared score over all queries and distances is e^H M e / 2, up to terms of rotating sign
    error = torch.randn(d, generator=torch.Generator().manual_seed(0)) * (torch.arange(d) % 32 < 12)
    heads = plain[:, :2].transpose(0, 1).flatten(1, 2)
    distances = torch.arange(n)
    turned = rope.rotate(heads[:, None].expand(-1, n, -1, -1), distances.view(1, -1, 1))
    truth = (turned[0] @ error).square().mean()
    c = to_complex(error, d)
    estimate = (c.conj() @ sample.key_metric[0] @ c).real / 2
    assert 0.5 < float(estimate / truth) < 2
    w = attention.o_proj.weight.detach()[:, :64]
    w2 = attention.o_proj.weight.detach()[:, 64:128]
    torch.testing.assert_close(sample.value_metric[0], w.T @ w + w2.T @ w2, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("context", "positions"), [(512, 16_384), (32_768, 32_768), (1 << 20, 131_072)])
def test_all_positions_of_the_context_are_learned_from(context, positions):
    model = tiny_llama(max_position_embeddings=context)
    learner = nova.ByteCodesLearner(
        get("nova"), model, torch.arange(64).view(1, 64), torch.zeros(64, dtype=torch.bool), 0
    )
    assert span(model.config) == learner.positions == positions
    (layer, _), keys, firsts = learner.specs, torch.ones(2, 64, 64), []
    for seed in range(40):  # where the only window is put
        first = int(torch.randint(positions, (1,), generator=torch.Generator().manual_seed(seed)))
        at = (first + torch.arange(64)).view(1, 1, -1)
        placed = nova.placed(keys, 64, learner.positions, layer, torch.Generator().manual_seed(seed))
        assert torch.equal(placed, layer.rope.rotate(keys.unsqueeze(0), at)[0])
        firsts.append(first)
    assert max(firsts) > positions // 2


@pytest.mark.slow
def test_an_artefact_of_fewer_positions_than_the_model_has_says_so(tmp_path):
    model = tiny_llama(max_position_embeddings=32_768)
    out = tmp_path / "nova.safetensors"
    made = learn(out, "nova", model)
    assert made.calibration["positions"] == 32_768
    assert (
        "positions" not in learn(tmp_path / "vqllm.safetensors", "vqllm:bits=1,vector=16,codes=16", model).calibration
    )
    method = f"nova:artefact={out}"
    assert not any("positions" in note for note in kvfold.explain(model, method).notes)
    older = {name: value for name, value in made.calibration.items() if name != "positions"}
    save_artefact(dataclasses.replace(made, calibration=older), out)
    with pytest.warns(KVFoldWarning, match="learned for 16,384 positions of the model's 32,768"):
        notes = kvfold.explain(model, method).notes
    assert sum("learned for 16,384 positions of the model's 32,768" in note for note in notes) == 1
    assert not get(f"tasq:artefact={out}").notes(model.config), "keys before RoPE lie where they lie"


def test_distance_factor_keeps_slow_pairs_and_drops_unequal_fast_ones():
    from helpers import spec

    factor = distance_factor(spec(64), 512)
    torch.testing.assert_close(factor, factor.mH)
    torch.testing.assert_close(factor.diagonal(), torch.ones(32, dtype=torch.complex64))
    assert factor[0, 1].abs() < 0.05 and factor[30, 31].abs() > 0.95
    assert torch.linalg.eigvalsh(factor).min() > -1e-4


# ---- runs --------------------------------------------------------------------------------------------------------------


def test_an_artefact_says_what_it_is(artefact):
    found = load(artefact)
    assert found.method == METHOD and found.model == "tiny"
    assert found.calibration["tokens"] == 2048 and found.calibration["held_out_tokens"] == 256
    assert found.calibration["texts"] == [{"name": "prose", "sha256": TEXT.sha256}]
    assert set(found.errors) == {"0", "1"}
    assert all(0 < value < 1 for row in found.errors.values() for value in row.values())
    assert {str(t.dtype) for t in found.tensors.values()} == {"torch.float16", "torch.int16"}
    assert not artefact.with_name(artefact.name + ".partial").exists()


def test_same_seed_same_artefact(artefact, tmp_path):
    again, other = learn(tmp_path / "a.safetensors"), learn(tmp_path / "b.safetensors", seed=1)
    first = read(artefact)
    assert all(torch.equal(again.tensors[name], t) for name, t in first.tensors.items())
    assert not torch.equal(other.tensors["layers.0.key.centres"], first.tensors["layers.0.key.centres"])


def test_windows_begin_as_the_tokenizer_has_texts_begin():
    plain, begun = byte_tokenizer(), byte_tokenizer()
    begun.bos_token = "<end>"
    begun.backend_tokenizer.post_processor = TemplateProcessing("<end> $A", special_tokens=[("<end>", 257)])
    without, found = (windows_of(tokenizer, [TEXT], 1024, 128) for tokenizer in (plain, begun))
    assert (found[:, 0] == 257).all() and not (without == 257).any()
    assert torch.equal(found[0, 1:], without[0, :-1])


class _Stop(Exception):
    pass


def test_an_interrupted_run_goes_on(artefact, tmp_path):
    out = tmp_path / "a.safetensors"

    def stop(done: LayerDone) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        learn(out, on_layer=stop)
    assert not out.exists() and out.with_name(out.name + ".partial").is_dir()
    seen: list[LayerDone] = []
    learn(out, on_layer=seen.append)
    assert [done.seconds > 0 for done in seen] == [False, True]
    result, first = read(out), read(artefact)
    assert all(torch.equal(result.tensors[name], t) for name, t in first.tensors.items())


def test_other_arguments_do_not_take_over_layers(tmp_path):
    out = tmp_path / "a.safetensors"

    def stop(done: LayerDone) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        learn(out, on_layer=stop)
    seen: list[LayerDone] = []
    learn(out, seed=5, on_layer=seen.append)
    assert all(done.seconds > 0 for done in seen)


@pytest.mark.parametrize("spec", ["kvquant:bits=2", "vqllm:bits=1,vector=16,codes=16"])
def test_another_dtype_does_not_take_over_layers(spec, tmp_path):
    """A run that began on a CPU in float32 is not gone on with in a GPU's bfloat16."""
    out = tmp_path / "a.safetensors"

    def stop(done: LayerDone) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        learn(out, spec, on_layer=stop)
    seen: list[LayerDone] = []
    learn(out, spec, tiny_llama().to(torch.bfloat16), on_layer=seen.append)
    assert all(done.seconds > 0 for done in seen)


LEARNED = (
    METHOD,
    "commvq:bits=2,levels=16,joint=true",
    "kvquant",
    "vqllm:bits=1,vector=16,codes=16",
    "nova",
    "tasq",
    "tasq:bits=2,values=fold",
)


@pytest.mark.parametrize("spec", [*LEARNED, "gsrq:bits=1,vector=16,codes=16"])
@pytest.mark.parametrize("what", ["one letter", "no values"])
def test_what_has_hardly_any_directions_can_be_learned(spec, what, tmp_path):
    """A text of one letter, whose keys and queries are alike, and a model whose values are zero."""
    model = tiny_llama()
    if what == "no values":
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
    text = Text("a" * 4000, "one letter") if what == "one letter" else TEXT
    schedule = QUICK if spec.startswith("commvq") else None
    out = tmp_path / "a.safetensors"
    found = calibrate(model, byte_tokenizer(), "tiny", get(spec), [text], 1024, out, schedule=schedule)
    assert all(t.isfinite().all() for t in found.tensors.values())
    blank = get(spec).blank(2, 64)  # what sizes are counted from where there is no artefact
    assert {name: t.shape for name, t in blank.items()} == {name: t.shape for name, t in found.layer(0).items()}
    assert math.isclose(
        sum(t.nbytes for t in blank.values()), sum(t.nbytes for t in found.layer(0).values()), rel_tol=0.1
    )
    assert all(math.isfinite(value) for row in found.errors.values() for value in row.values())
    cache = kvfold.fold(model, dataclasses.replace(get(spec), artefact=str(out)))
    with torch.inference_mode():
        model(prose_ids(250), past_key_values=cache)
        assert model(prose_ids(1), past_key_values=cache).logits.isfinite().all()
    unfold(model)


@pytest.mark.parametrize("spec", ["kvquant:bits=2", "vqllm:bits=1,vector=16,codes=16"])
def test_the_baselines_go_on_as_well(spec, tmp_path):
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    learn(whole, spec)

    def stop(*_: object) -> None:
        raise _Stop

    with pytest.raises(_Stop):  # while the first layer, or KVQuant's first window, is finished
        learn(cut, spec, on_layer=stop, on_window=stop)
    with pytest.raises(_Stop):
        learn(cut, spec, on_layer=stop)
    seen: list[LayerDone] = []
    learn(cut, spec, on_layer=seen.append)
    assert [done.seconds > 0 for done in seen] == [False, True]
    assert all(torch.equal(read(cut).tensors[name], t) for name, t in read(whole).tensors.items())
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path):
    folder = save(tmp_path / "model", tiny_llama(num_hidden_layers=6))
    text = tmp_path / "text.txt"
    text.write_text(TEXT.text)
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    command = ["calibrate", "--model", str(folder), "--method", METHOD, "--tokens", "2048", "--text", str(text)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvfold", *command, "--out", str(cut), "--device", "cpu"],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    first = cut.with_name(cut.name + ".partial") / "layer-001.safetensors"
    deadline = time.monotonic() + 60
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert first.exists() and not cut.exists()
    assert main([*command, "--out", str(cut), "--device", "cpu"]) == 0
    assert main([*command, "--out", str(whole), "--device", "cpu"]) == 0
    one, two = read(cut), read(whole)
    assert all(torch.equal(one.tensors[name], t) for name, t in two.tensors.items())


def test_wrong_inputs_are_one_line(tmp_path, capsys):
    folder = save(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("too short")
    base = ["calibrate", "--model", str(folder), "--text", str(text), "--device", "cpu"]
    out = ["--out", str(tmp_path / "a.safetensors")]
    for arguments, message in (
        ([*base, *out, "--method", "kivi"], "learns nothing"),
        ([*base, "--out", str(tmp_path)], "is a folder"),
        ([*base, *out], "tokens"),
        ([*base, *out, "--preset", "slow"], "preset"),
        (["calibrate", *out], "--text"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error and error.startswith("kvfold: error:")


def test_text_takes_several_files():
    from kvfold.commands.terminal import spread

    given = ["calibrate", "--text", "a", "b", "--tokens", "5", "--out", "c"]
    assert spread(given, ("--text",)) == ["calibrate", "--text", "a", "--text", "b", "--tokens", "5", "--out", "c"]


# ---- the command's edges -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    save(folder / "model")
    (folder / "text.txt").write_text(TEXT.text)
    return folder


def command(place: Path, method: str, out: Path, *more: str) -> list[str]:
    given = ["--model", str(place / "model"), "--method", method, "--tokens", "1024", "--device", "cpu", *more]
    return ["calibrate", *given, "--text", str(place / "text.txt"), "--out", str(out)]


@pytest.mark.parametrize("spec", ["vqllm:bits=1,vector=16,codes=16", "kvquant", "commvq:bits=1,levels=16,sink=4"])
def test_the_method_that_is_printed_is_one_the_command_line_takes(spec, place, tmp_path, capsys):
    out = tmp_path / "one file.safetensors"
    assert main(command(place, spec, out)) == 0
    printed = capsys.readouterr().out.strip().splitlines()[-1].partition("use it with --method ")[2]
    method = get(shlex.split(printed)[0])
    assert method == dataclasses.replace(get(spec), artefact=str(out))
    text, ids = shlex.split(printed)[0], prose_ids(200)
    kvfold.fold(model := tiny_llama(), text)
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()
    unfold(model)


@pytest.mark.parametrize("name", ["with blank", "a=b;c:d", "it's", 'say "x"', "$HOME", "\u00e9", "-dash", "100%"])
def test_the_command_that_is_printed_works_as_pasted(name, place, tmp_path, monkeypatch, capsys):
    """Through a shell's words, from the same folder."""
    monkeypatch.chdir(tmp_path)
    assert main(command(place, "vqllm:bits=1,vector=16,codes=16", Path(f"./{name}.safetensors"))) == 0
    printed = capsys.readouterr().out.strip().splitlines()[-1].partition("use it with ")[2]
    assert main(["explain", "--model", str(place / "model"), *shlex.split(printed)]) == 0
    assert "artefact=" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a,b", "a ", "a+v=kivi", "a+keep=0"])
def test_a_name_that_no_option_can_hold_is_refused(name, place, tmp_path, capsys):
    assert main(command(place, "kvquant", tmp_path / name)) == 2
    error = capsys.readouterr().err
    assert "out: kvquant: artefact=" in error and "allowed: a name without" in error


def test_an_artefact_is_replaced_only_when_asked(place, tmp_path, capsys):
    out = tmp_path / "a.safetensors"
    assert main(command(place, "vqllm:bits=1,vector=16,codes=16", out)) == 0
    before = out.read_bytes()
    capsys.readouterr()
    for method in ("kvquant", "vqllm:bits=1,vector=16,codes=16"):
        assert main(command(place, method, out)) == 2
        error = capsys.readouterr().err
        assert f"out: {out} exists (vqllm:bits=1,vector=16,codes=16 for" in error and "--force" in error
    assert out.read_bytes() == before and not list(tmp_path.glob("*.partial"))
    with pytest.raises(KVFoldError, match="exists"):
        learn(out)
    assert main(command(place, "kvquant", out, "--force")) == 0
    assert read(out).method == "kvquant"
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert main(command(place, "kvquant", notes)) == 2
    assert "not a sound artefact" in capsys.readouterr().err and notes.read_text() == "mine"


def test_verify_compares_weights(place, tmp_path, capsys):
    out = tmp_path / "a.safetensors"
    assert main(command(place, "kvquant", out)) == 0
    verify = ["artefact", "verify", str(out), "--model"]
    assert main([*verify, str(place / "model")]) == 0
    assert "fits" in capsys.readouterr().out
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight[-1] += 0.05
    assert main([*verify, str(save(tmp_path / "other", other))]) == 2
    assert "same configuration but other weights" in capsys.readouterr().err
    half = save(tmp_path / "half", tiny_llama().to(torch.bfloat16))
    assert main([*verify, str(half)]) == 0

    fields = json.loads(json.dumps(read(out).metadata()))
    for name in ("sha256", "weights_hash"):
        del fields[name]
    fields["schema"] = 1
    tensors = read(out).tensors
    fields["sha256"] = checksum(fields, tensors)
    save_file(tensors, out, metadata={"kvfold": json.dumps(fields, sort_keys=True)})
    capsys.readouterr()
    assert main([*verify, str(tmp_path / "other")]) == 0
    assert "weights not compared" in capsys.readouterr().out


def test_compare_leaves_artefacts_of_other_weights_out(place, tmp_path, capsys):
    out = tmp_path / "a.safetensors"
    assert main(command(place, "kvquant", out)) == 0
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight[-1] += 0.05
    folder = save(tmp_path / "other", other)
    short = ["--methods", "none", "--prefix", "320", "--tokens", "64", "--new-tokens", "2", "--json", "-"]
    for model, expected in ((place / "model", 2), (folder, 1)):
        capsys.readouterr()
        assert main(["compare", "--model", str(model), "--artefacts", str(tmp_path), *short]) == 0
        printed = capsys.readouterr()
        assert len(json.loads(printed.out)["rows"]) == expected
    assert "the same shape but other weights; left out (name it to use it: --methods kvquant:" in printed.err


def test_a_folder_of_other_files_is_left_alone(place, tmp_path, capsys):
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "weights.safetensors").write_text("mine")
    assert main(command(place, "kvquant", tmp_path / "a")) == 2
    assert "a.partial, where finished layers go, has other files" in capsys.readouterr().err
    assert (tmp_path / "a.partial" / "weights.safetensors").read_text() == "mine" and not (tmp_path / "a").exists()


def test_calibrate_refuses_options_that_a_method_has_not(place, tmp_path, capsys):
    for method, more, says in (
        ("kvquant", ("--preset", "paper"), "preset: kvquant has none"),
        ("vqllm", ("--encoder", "mlp"), "encoder: vqllm has none"),
        ("kvquant:artefact=x", (), "method: artefact=x is what calibrate makes"),
    ):
        assert main(command(place, method, tmp_path / "a", *more)) == 2
        assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_value_network_is_an_option(place, tmp_path, capsys, monkeypatch):
    from kvfold.calibration import commvq_schedule

    monkeypatch.setitem(commvq_schedule.PRESETS, "fast", dataclasses.replace(QUICK, network_steps=5, network_batch=64))
    spec, network, plain = "commvq:bits=1,levels=16", tmp_path / "network.safetensors", tmp_path / "plain.safetensors"
    assert main(command(place, spec, network, "--encoder", "mlp")) == 0
    assert main(command(place, spec, plain)) == 0
    assert "value.w1" in read(network).layer(0) and "value.w1" not in read(plain).layer(0)
    assert torch.equal(read(network).layer(0)["key.centres"], read(plain).layer(0)["key.centres"])
    assert read(network).calibration["preset"] == "fast" and read(network).calibration["schedule"]["encoder"] == "mlp"
    capsys.readouterr()
    assert main(["artefact", "info", str(network)]) == 0
    assert "fast, value encoder mlp, seed 0" in capsys.readouterr().out
    model, ids = tiny_llama(), prose_ids(300)
    kvfold.fold(model, f"{spec},artefact={network}")
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()
    unfold(model)
    for method, encoder in ((spec, "deep"), ("kvquant", "mlp")):
        assert main(command(place, method, tmp_path / "c.safetensors", "--encoder", encoder)) == 2
        assert "encoder:" in capsys.readouterr().err


# ---- folding with the result -------------------------------------------------------------------------------------------


def prose_ids(count: int) -> torch.Tensor:
    return byte_tokenizer()(TEXT.text[5000:], return_tensors="pt").input_ids[:, :count]


@pytest.mark.parametrize("option", ["", ",passes=0,flips=0", ",sink=4,recent=32"])
def test_a_folded_model_reads_it(artefact, option):
    model, ids = tiny_llama(), prose_ids(400)
    full = reference(model, ids, 300)
    cache = kvfold.fold(model, f"{METHOD},artefact={artefact}{option}")
    result = score(model, ids, 300, cache, reference=full)
    unfold(model)
    assert torch.isfinite(result.kl).all() and 0 < float(result.kl.mean()) < 2
    sizes = cache.nbytes()
    stored = sum(t.nbytes for i in range(2) for t in load(artefact).layer(i).values())
    assert sizes["tables"] == stored
    layer = cache.folded[0]
    assert layer.key_format.bits == pytest.approx((8 * 8 + 16) / 64)
    assert sizes["packed"] == sum(2 * layer.packed[0] * (layer.key_format.bits + 1) * 64 / 8 for layer in cache.folded)


def test_eq_22_reordered_values_equal_decoded_ones(artefact):
    """Attention through sums of bits equals attention over the decoded keys and values."""
    model, ids = tiny_llama(), prose_ids(300)
    cache = kvfold.fold(model, f"{METHOD},artefact={artefact},recent=32")
    with torch.inference_mode():
        model(ids[:, :-1], past_key_values=cache)
        layer = cache.folded[1]
        keys, values = layer.decoded(0)
        q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(0))
        new = torch.randn(2, 1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
        got = layer.kernel.attend(layer.reader.call(q, NewTokens(new[0], new[1]), 0.125))
    unfold(model)
    k, v = (
        torch.cat((old, fresh[0]), -2).repeat_interleave(2, 0) for old, fresh in zip((keys, values), new, strict=True)
    )
    expected = (q[0] @ k.mT * 0.125).softmax(-1) @ v
    torch.testing.assert_close(got[0], expected, rtol=1e-3, atol=1e-3)


def test_content_does_not_depend_on_cuts_or_padding(artefact):
    model, ids = tiny_llama(), prose_ids(256)
    spec = f"{METHOD},artefact={artefact},recent=32"
    decoded = []
    for cuts in ([256], [100, 60, 96]):
        cache = kvfold.fold(model, spec)
        with torch.inference_mode():
            for a, b in itertools.pairwise([0, *itertools.accumulate(cuts)]):
                model(ids[:, a:b], past_key_values=cache)
        decoded.append(cache.folded[0].decoded(0))
    padded = torch.cat((torch.full((1, 7), 256), ids), 1)
    mask = (torch.arange(263) >= 7).long()[None]
    cache = kvfold.fold(model, spec)
    with torch.inference_mode():
        model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), past_key_values=cache)
    decoded.append(cache.folded[0].decoded(0))
    unfold(model)
    for other in decoded[1:]:
        for a, b in zip(decoded[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_joint_values_and_the_papers_network(tmp_path):
    out = tmp_path / "joint.safetensors"
    schedule = dataclasses.replace(QUICK, encoder="mlp", network_steps=20, network_batch=64, network_width=1)
    learn(out, METHOD + ",joint=true", schedule=schedule)
    model, ids = tiny_llama(), prose_ids(300)
    full = reference(model, ids, 250)
    cache = kvfold.fold(model, f"{METHOD},joint=true,artefact={out}")
    result = score(model, ids, 250, cache, reference=full)
    unfold(model)
    assert torch.isfinite(result.kl).all()


def test_unfitting_artefacts_are_refused(artefact):
    model = tiny_llama()
    for spec, message in (
        (f"commvq:bits=2,levels=16,artefact={artefact}", "k_bits=1"),
        (f"commvq:bits=1,artefact={artefact}", "levels=16"),
        (f"{METHOD},joint=true,artefact={artefact}", "joint"),
        (METHOD, "artefact is missing"),
    ):
        with pytest.raises(MethodError, match=message):
            kvfold.fold(model, spec)
    with pytest.raises(KVFoldError, match="made for tiny"):
        kvfold.fold(tiny_llama(num_hidden_layers=3), f"{METHOD},artefact={artefact}")
    with pytest.raises(KVFoldError, match="made for tiny"):
        get(f"{METHOD},artefact={artefact}").check_model(tiny_llama(rope_theta=5e5).config)


def test_tables_are_those_of_the_layer(artefact):
    method = get(f"{METHOD},artefact={artefact}")
    spec = LayerSpec(1, 2, 4, 2, 64)
    tables = method.tables(spec, "cpu")
    assert tables["key.centres"].shape == (2, 8, 16, 64) and tables["value.codebook"].shape == (2, 64, 64)
    assert tables["key.centres"] is method.tables(spec, "cpu")["key.centres"]
