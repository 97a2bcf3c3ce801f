from types import SimpleNamespace

import pytest
import torch

import kvfold
from families import model_of
from kvfold import artefact as artefacts
from kvfold import methods
from kvfold.calibration.subspace import calibrate, moments
from kvfold.cli import main
from kvfold.engines.vllm.settings import layer_spec, stored
from kvfold.engines.vllm.subspace import update_of
from kvfold.errors import KVFoldError
from kvfold.evaluation.text import Text
from kvfold.methods import Observation
from kvfold.methods.squat import penalty_matrix, penalty_of
from tiny_model import byte_tokenizer, save, tiny_llama

TEXT = Text("The city lies on both banks of the river. " * 80, "prose.txt")


def words(text: str, **_: object) -> SimpleNamespace:
    """A tokenizer of ids that every family has."""
    return SimpleNamespace(input_ids=(torch.arange(len(text.split())) % 80 + 10)[None])


words.bos_token_id = None


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    out = tmp_path_factory.mktemp("subspace") / "squat.safetensors"
    calibrate(tiny_llama(), byte_tokenizer(), "tiny", methods.get("squat"), [TEXT], 2048, out)
    return out


@pytest.mark.parametrize("rank", [0, 5])
def test_a_penalty_needs_no_more_of_queries_than_their_moment(rank):
    queries = torch.randn(2, 300, 32, generator=torch.Generator().manual_seed(0)).double()
    moment = queries.mT @ queries / 300
    assert torch.allclose(penalty_matrix(queries, rank, 1.0, True), penalty_of(moment, rank, 1.0, True), atol=1e-9)


def test_moments_are_those_of_queries_after_rope():
    model, ids = tiny_llama(), torch.arange(64).view(1, 64)
    seen = {}
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(
            lambda m, a, out, n=layer.self_attn.layer_idx: seen.update({n: out})
        )
    found = moments(model, ids)
    assert sorted(found) == [0, 1] and model.config._attn_implementation != "kvfold_queries"
    for layer, moment in found.items():  # a rotation keeps lengths
        lengths = seen[layer].view(64, 2, 2 * 64).square().sum((0, 2)) / 64
        assert torch.allclose(moment.diagonal(dim1=-1, dim2=-2).sum(-1), lengths, rtol=1e-3)


def test_a_servers_update_is_the_methods_own_of_all_queries(artefact):
    method = methods.get("squat:lam=0.5,rank=4")
    spec = layer_spec(1, 2, 4, 2, 64, torch.float32, False)
    found = stored(method, spec, str(artefact))
    moment = artefacts.load(artefact).layer(1)["key.moment"]
    root = torch.linalg.cholesky(moment.double() + 1e-9 * torch.eye(64)).mT  # 64 queries with this moment
    queries = root.float().repeat_interleave(1, 0)[None]
    own = method.observe(Observation(queries.repeat_interleave(2, 1), torch.arange(64)[None]), spec)["update"][0]
    assert torch.allclose(found.update, own, atol=1e-3)
    assert stored(methods.get("kivi"), spec).update is None


def test_an_update_lies_where_kernels_read_it(artefact):
    spec = layer_spec(1, 2, 4, 2, 64, torch.float32, False)
    found = stored(methods.get("squat"), spec, str(artefact), "meta")
    assert found.update.device.type == found.steering.update.device.type == "meta"


def test_a_pair_is_steered_as_its_keys_are(artefact):
    spec = layer_spec(1, 2, 4, 2, 64, torch.float32, False)
    pair, alone = methods.get("k=squat+v=fold:recent=96"), stored(methods.get("squat"), spec, str(artefact))
    found = stored(pair, spec, str(artefact))
    assert torch.equal(found.update, alone.update) and not found.follows
    keys = torch.randn(1, 2, 32, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).view(1, 1, -1)
    both = [made._encode_keys(keys, positions, None)["codes"] for made in (found, alone)]
    assert torch.equal(*both)
    assert stored(pair, spec).follows and not stored(methods.get("k=kivi+v=fold"), spec).follows


def test_an_artefact_of_another_shape_is_refused_by_name(artefact):
    with pytest.raises(KVFoldError, match="it is for num_kv_heads=2, and the model has 4"):
        update_of(str(artefact), methods.get("squat"), layer_spec(1, 2, 4, 4, 64, torch.float32, False))


def test_the_command_writes_one(tmp_path, capsys):
    text, out = tmp_path / "prose.txt", tmp_path / "squat.safetensors"
    text.write_text(TEXT.text)
    model = save(tmp_path / "model")
    given = ["calibrate", "--model", str(model), "--method", "squat", "--text", str(text), "--tokens", "1024"]
    assert main([*given, "--out", str(out)]) == 0
    assert "kvfold_subspace" in capsys.readouterr().out
    assert artefacts.load(out).layer(0)["key.moment"].shape == (2, 64, 64)
    assert main([*given, "--out", str(out)]) == 2 and "exists" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "gpt2", "gpt_neox"])
def test_a_model_needs_no_rope_and_no_rope_of_llamas(family, tmp_path):
    model = model_of(family)
    found = calibrate(
        model, words, "tiny", methods.get("squat"), [Text("word " * 600, "words.txt")], 128, tmp_path / "a"
    )
    folded = [layer.layer_idx for layer in kvfold.explain(model, "squat").layers if layer.folded]
    assert sorted(found.tensors) == sorted(f"layers.{layer}.key.moment" for layer in folded)


def test_queries_that_are_not_finite_are_refused(tmp_path):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(KVFoldError, match="queries of layer 1 of tiny are not finite on this text"):
        calibrate(model, byte_tokenizer(), "tiny", methods.get("squat"), [TEXT], 2048, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_options_of_other_methods_are_refused(tmp_path, capsys):
    given = ["calibrate", "--method", "squat", "--text", "x", "--out", str(tmp_path / "a")]
    for more in (["--preset", "paper"], ["--encoder", "mlp"]):
        assert main([*given, *more]) == 2
        assert f"{more[0][2:]}: squat has none" in capsys.readouterr().err
