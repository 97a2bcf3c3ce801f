"""The examples run as they stand, on a tiny model."""

import importlib.util
from pathlib import Path
from types import ModuleType

import kvfold
from tiny_model import save, tiny_llama

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_system_prompt(tmp_path, capsys):
    """The second run reads the first one's file, and answers alike."""
    folder = str(save(tmp_path / "model", tiny_llama(max_position_embeddings=4096)))
    module, file = example("system_prompt"), tmp_path / "prompt.safetensors"
    first = module.main(folder, str(file), 8)
    written = file.stat().st_mtime_ns
    assert module.main(folder, str(file), 8) == first and file.stat().st_mtime_ns == written
    out = capsys.readouterr().out
    assert all(question in out for question in module.QUESTIONS) and " tokens in " in out
    model = tiny_llama(max_position_embeddings=4096)
    cache = kvfold.load_cache(file, model)
    assert cache.get_seq_length() > 1000 and min(cache.folded[0].packed) > 800
    assert isinstance(first[0], str) and len(first) == 3
