"""The examples run as they stand, on a tiny model."""

import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvfold
from tiny_model import save, tiny_llama

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_and_short():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert all(f"test_{name}" in globals() for name in names)
    assert all(len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60 for name in names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save(tmp_path_factory.mktemp("examples") / "model", tiny_llama(max_position_embeddings=4096)))


def test_generate(folder, capsys):
    """What is printed are the sizes of a cache of the same tokens."""
    text = example("generate").main(folder, "kivi", 8, 1000)
    out = capsys.readouterr().out
    model = tiny_llama(max_position_embeddings=4096)
    cache = kvfold.fold(model, "kivi")
    with torch.inference_mode():
        model(torch.zeros(1, 1000 + 8 - 1, dtype=torch.int64), past_key_values=cache)
    sizes = cache.nbytes()
    assert text in out and f"unfolded {cache.full_nbytes():,}" in out
    assert f"1,007 tokens: {sizes['total']:,} bytes" in out and f"packed {sizes['packed']:,}" in out
    assert "3.00 bits" in out and sizes["total"] < cache.full_nbytes() / 2


def test_server():
    """vLLM's program, with kvfold as its attention; tests/engines/vllm/checks.py starts it."""
    command = example("server").command("model", "fold:bits=2", "--port", "9")
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "model"]
    assert json.loads(command[command.index("--additional-config") + 1]) == {"kvfold": "fold:bits=2"}
    assert command[-2:] == ["--port", "9"]


def test_client():
    """It reads what an OpenAI server streams."""
    asked = {}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(json.dumps({"data": [{"id": "a model"}]}))

        def do_POST(self):
            asked.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            events = [json.dumps({"choices": [{"text": text}]}) for text in ("It ", "scatters.")]
            self.answer("".join(f"data: {event}\n\n" for event in (*events, "[DONE]")))

        def answer(self, text):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pieces = list(example("client").stream(f"http://127.0.0.1:{server.server_port}", "Why?", 7))
        server.shutdown()
    assert pieces == ["It ", "scatters."]
    assert (asked["model"], asked["prompt"], asked["max_tokens"], asked["stream"]) == ("a model", "Why?", 7, True)


def test_own_method(folder, capsys):
    """It is measured beside the others, and keeps what all methods promise."""
    module = example("own_method")
    rows = {row.method: row for row in module.main(folder, 512, 96)}
    out = capsys.readouterr().out
    assert set(rows) == {"bytes", "fold", "kivi"} and all(name in out for name in rows)
    mine = rows["bytes"]
    assert mine.tested == 96
    assert mine.effective_bits == pytest.approx(8 + 32 / 64 + 4 * 64 * 16 / (2 * 480 * 64))  # 480 tokens in four pages
    assert 0 < mine.kld < rows["fold"].kld / 10 and mine.packed_bytes < mine.full_cache_bytes / 3
    model, ids = tiny_llama(), torch.randint(256, (1, 500), generator=torch.Generator().manual_seed(0))
    held = []
    for cuts in ([500], [300, 150, 1, 1, 48]):
        cache = kvfold.fold(model, module.ByteMethod(recent=32))
        with torch.inference_mode():
            for piece in ids.split(cuts, 1):
                model(piece, past_key_values=cache)
        held.append(cache.folded[0].decoded(0))
    for one, other in zip(
        *held, strict=True
    ):  # products round as they are cut: a code may be the next one, here and there
        assert ((one - other).abs() < 1e-5).float().mean() > 0.99
    with pytest.raises(kvfold.MethodError, match="option 'bits' has no effect"):
        module.ByteMethod(bits=4)


def test_system_prompt(folder, tmp_path, capsys):
    """The second run reads the first one's file, and answers alike."""
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
