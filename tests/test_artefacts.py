"""Artefacts: what they carry, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold import artefact as artefacts
from kvfold.artefact import Artefact, config_hash, load, load_cached, push, read, save
from kvfold.cli import main
from kvfold.errors import KVFoldError
from tiny_model import tiny_llama


def made(**changes: object) -> Artefact:
    fields = {
        "model": "tiny",
        "config_hash": config_hash(tiny_llama().config),
        "method": "commvq:bits=1",
        "shape": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "k_bits": 1, "v_bits": 1},
        "calibration": {
            "texts": [{"name": "prose.txt", "sha256": "0" * 64}],
            "tokens": 512,
            "held_out_tokens": 64,
            "preset": "fast",
            "seed": 0,
        },
        "errors": {"0": {"key_mse": 0.25}, "1": {"key_mse": 0.75}},
        "versions": {"kvfold": "0"},
        "created": "2026-01-01T00:00:00+00:00",
        "tensors": {
            "layers.0.key.centres": torch.arange(64).half(),
            "layers.1.key.place": torch.ones(3, dtype=torch.int16),
        },
    }
    return Artefact(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "a.safetensors"
    save(made(), target)
    return target


def rewrite(path: Path, change) -> None:
    """Change the metadata of a file and nothing else."""
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        fields = json.loads(file.metadata()["kvfold"])
    change(fields)
    save_file(load_file(path), path, metadata={"kvfold": json.dumps(fields)})


def test_roundtrip(path):
    back, first = read(path), made()
    for field in dataclasses.fields(Artefact):
        if field.name != "tensors":
            assert getattr(back, field.name) == getattr(first, field.name)
    assert all(torch.equal(back.tensors[name], t) for name, t in first.tensors.items())
    assert list(back.layer(1)) == ["key.place"] and back.layer(7) == {}
    assert back.mean_errors() == {"key_mse": 0.5}
    assert oct(path.stat().st_mode & 0o444) == "0o444"


def test_truncated_file_is_refused(path):
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(KVFoldError, match="cut short"):
        read(path)


def test_changed_tensor_is_refused(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(KVFoldError, match="checksum"):
        read(path)


def test_changed_metadata_is_refused(path):
    rewrite(path, lambda fields: fields.update(model="another"))
    with pytest.raises(KVFoldError, match="checksum"):
        read(path)


def test_newer_schema_is_refused(path):
    rewrite(path, lambda fields: fields.update(schema=artefacts.SCHEMA + 1))
    with pytest.raises(KVFoldError, match="upgrade kvfold"):
        read(path)


def test_other_files_are_refused(tmp_path):
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.zeros(1)}, plain)
    with pytest.raises(KVFoldError, match="not one that kvfold calibrate wrote"):
        read(plain)
    text = tmp_path / "text.safetensors"
    text.write_text("hello")
    with pytest.raises(KVFoldError, match="not a safetensors file"):
        read(text)
    with pytest.raises(KVFoldError, match="no file, folder or hub id"):
        load(str(tmp_path / "missing.safetensors"))
    with pytest.raises(KVFoldError, match=r"holds no kvfold\.safetensors"):
        load(tmp_path)


def test_other_model_is_refused():
    artefact = made()
    artefact.check_model(tiny_llama().config)
    for change in ({"num_hidden_layers": 3}, {"rope_theta": 5e5}, {"head_dim": 32}):
        with pytest.raises(KVFoldError, match="made for tiny"):
            artefact.check_model(tiny_llama(**change).config)


def test_config_hash_ignores_names_and_dtypes():
    one, two = tiny_llama().config, tiny_llama().config
    two._name_or_path, two.dtype = "elsewhere", torch.bfloat16
    assert config_hash(one) == config_hash(two)


def test_push_to_a_folder_and_load_from_it(path, tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    assert push(path, str(folder)) == str(folder)
    assert load(folder).method == "commvq:bits=1"
    path.write_bytes(b"damaged")
    with pytest.raises(KVFoldError):
        push(path, str(folder))
    assert load(folder).method == "commvq:bits=1"


def test_hub_ids(path, monkeypatch):
    """Names reach the hub's functions as they should; its errors become one line."""
    import huggingface_hub

    asked = []

    def download(repo, file, revision=None, **kwargs):
        asked.append((repo, file, revision))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load("owner/name").model == "tiny"
    load("owner/name@v2")
    load("owner/name/one-bit.safetensors")
    assert asked == [
        ("owner/name", "kvfold.safetensors", None),
        ("owner/name", "kvfold.safetensors", "v2"),
        ("owner/name", "one-bit.safetensors", None),
    ]

    def refuse(*args, **kwargs):
        raise OSError("no network\nand a long page")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(KVFoldError, match=r"hub did not give it \(no network\)"):
        load("owner/name")

    calls = []

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo, exist_ok):
            calls.append(repo)

        def upload_file(self, path_or_fileobj, path_in_repo, repo_id):
            calls.append((Path(path_or_fileobj).name, path_in_repo, repo_id))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push(path, "owner/name") == "owner/name"
    assert calls == ["owner/name", ("a.safetensors", "kvfold.safetensors", "owner/name")]


def test_cached_load_sees_a_replaced_file(path):
    assert load_cached(str(path)) is load_cached(str(path))
    save(made(model="a longer name"), path)
    assert load_cached(str(path)).model == "a longer name"


def test_commands(path, tmp_path, capsys):
    assert main(["artefact", "info", str(path)]) == 0
    shown = capsys.readouterr().out
    layers = [int(line.split()[1].rstrip(":")) for line in shown.splitlines() if line.startswith("  layer")]
    assert layers == sorted(layers)
    assert all(part in shown for part in ("tiny", "commvq:bits=1", "512 tokens", "prose.txt", "key_mse 0.5000"))
    assert main(["artefact", "info", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == artefacts.SCHEMA
    assert main(["artefact", "verify", str(path)]) == 0
    assert "sound" in capsys.readouterr().out
    folder = tmp_path / "published"
    folder.mkdir()
    assert main(["artefact", "push", str(path), str(folder)]) == 0
    capsys.readouterr()
    path.write_bytes(path.read_bytes()[:100])
    assert main(["artefact", "verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cut short" in error
