import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kvfold import models
from kvfold.errors import KVFoldError
from kvfold.models import ModelError
from tiny_model import CONTEXT, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tiny"))


def test_a_local_folder_loads_in_float32_on_a_cpu(folder):
    model, tokenizer, info = models.load(str(folder), device="cpu")
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (info.dtype, info.device, info.max_context) == ("float32", "cpu", CONTEXT)
    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert tokenizer.decode(tokenizer("Folded caches, öäü").input_ids) == "Folded caches, öäü"


def test_a_folder_with_the_embedded_models_name_is_that_folder(folder, tmp_path, monkeypatch):
    (tmp_path / models.DEFAULT_MODEL).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert models.load(models.DEFAULT_MODEL, device="cpu")[2].max_context == CONTEXT


def test_dtype_is_taken_by_name(folder):
    model, _, info = models.load(str(folder), dtype="bfloat16", device="cpu")
    assert info.dtype == "bfloat16" and model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "empty"),
        ("./not/there", "no folder or file"),
        ("/not/there", "no folder or file"),
        ("nobody/nothing", "the hub did not give it"),
        (__file__, "not a .gguf file"),
        (str(Path(__file__).parent), "no config.json"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(model, says):
    with pytest.raises(ModelError, match=r"^model: ") as error:
        models.load(model)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_hub_that_swallows_packets_gets_one_call_with_a_deadline(monkeypatch):
    import huggingface_hub

    calls = []

    def lost(self, repo_id, *, timeout):
        calls.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lost)
    with pytest.raises(ModelError, match="timed out"):
        models.load("org/name")
    assert calls == [10]


@pytest.mark.parametrize(("field", "value"), [("dtype", "int8"), ("device", "abacus"), ("device", "cuda:99")])
def test_dtype_and_device_errors_list_what_is_allowed(folder, field, value):
    with pytest.raises(ModelError, match=rf"^{field}: .*{value}.*(float32|cpu)"):
        models.load(str(folder), **{field: value})


def test_damaged_configurations_and_weights_are_user_errors(tmp_path):
    save(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{")
    save(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"\0" * 100)
    save(tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text()) | {"model_type": "abacus"}
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    for name in "abc":
        with pytest.raises(KVFoldError, match="cannot be loaded") as error:
            models.load(str(tmp_path / name))
        assert "\n" not in str(error.value)


def test_concurrent_conversions_happen_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path))
    conversions = []

    def convert(gguf, work, target, sha256):
        conversions.append(gguf)
        target.mkdir()
        (target / "config.json").write_text("{}")
        time.sleep(0.2)

    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setattr(models, "_embedded_gguf", lambda work: work / "x.gguf")
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(models.embedded())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(set(folders)) == 1 and (folders[0] / "config.json").is_file()
    assert not list(folders[0].parent.glob(".making-*"))


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path))

    def convert(gguf, work, target, sha256):
        target.mkdir()
        (target / "half").write_text("half")
        raise ModelError("model: disk full")

    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setattr(models, "_embedded_gguf", lambda work: work / "x.gguf")
    with pytest.raises(ModelError, match="disk full"):
        models.embedded()
    assert [p.suffix for p in (tmp_path / "models").iterdir()] in ([], [".lock"])


def test_a_file_with_another_hash_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 60)
    with pytest.raises(ModelError, match="SHA-256"):
        models._convert(tmp_path / "x.gguf", tmp_path, tmp_path / "model", models.EMBEDDED_SHA256)
    assert not (tmp_path / "model").exists()


def test_an_unwritable_home_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"^KVFOLD_HOME: cannot write"):
        models.embedded()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    """As in a container that runs as a number."""
    monkeypatch.delenv("KVFOLD_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ModelError, match=r"^KVFOLD_HOME: ~/.cache/kvfold is in nobody's home; set it to a folder"):
        models.home()


@pytest.mark.slow
def test_the_embedded_model_answers_from_the_converted_folder():
    model, tokenizer, info = models.load()
    assert info.name == models.DEFAULT_MODEL and info.max_context == 8192
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    chat = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
