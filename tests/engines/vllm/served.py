"""The OpenAI server with folded caches, and its clients."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine import model_path, prompt

HERE = Path(__file__).parent


class Server:
    """The OpenAI server of examples/server.py on a CPU, as long as a ``with`` block lasts."""

    def __init__(self, model, *options):
        self.port = 18000 + os.getpid() % 2000
        sys.path.insert(0, str(HERE.parents[2] / "examples"))
        import server

        given = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--served-model-name", "m"]
        given += ["--port", str(self.port), "--max-num-seqs", "32", *options]
        self.command = server.command(model, "fold:bits=8", *given)

    def __enter__(self):
        with open(os.environ.get("KVFOLD_SERVER_LOG", os.devnull), "w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        for _ in range(240):
            assert self.process.poll() is None, "the server ended"
            try:
                self.get("/health", raw=True)
                return self
            except OSError:
                time.sleep(1)
        raise AssertionError("the server does not answer")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def get(self, path, body=None, raw=False):
        import json
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            text = answer.read().decode()
        return text if raw else json.loads(text)


def check_server():
    """The OpenAI server with eight clients: each gets what it gets alone, and the example's client streams it."""
    with Server(model_path()) as server:

        def ask(tokens):
            body = {"model": "m", "prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            return server.get("/v1/completions", body)["choices"][0]["text"]

        prompts = [prompt(40 + 30 * i, seed=70 + i) for i in range(8)]
        with ThreadPoolExecutor(8) as clients:
            together = list(clients.map(ask, prompts))
        assert len(set(together)) == 8
        assert [ask(tokens) for tokens in prompts[:3]] == together[:3]
        import client

        answer = "".join(client.stream(f"http://127.0.0.1:{server.port}", "The capital of France is", 8))
        assert answer.startswith(" Paris"), answer
        print("eight clients: the same answers as alone; the example's client:", answer.strip())


def tiny_model(folder):
    """Two layers with sharp answers, and the demo model's tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 49152, "max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.08, tie_word_embeddings=False))
    model.lm_head.weight.data *= 4
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(model_path(), name), folder)
    return folder


def check_soak():
    """500 requests, 32 at a time: some hang up, some are nonsense or too long; the others are answered as alone."""
    import json
    import random
    import re
    import socket
    import tempfile
    import urllib.error

    import psutil

    with (
        tempfile.TemporaryDirectory() as folder,
        Server(tiny_model(folder), "--num-gpu-blocks-override", "400") as server,
    ):
        prompts = [prompt(random.Random(i).randrange(1, 600), seed=i) for i in range(40)]

        def body(i, **more):
            return {
                "model": "m",
                "prompt": prompts[i],
                "max_tokens": 4 + i % 29,
                "temperature": 0,
                "ignore_eos": True,
            } | more

        def ask(i):
            return server.get("/v1/completions", body(i, logprobs=2))["choices"][0]["logprobs"]

        def right(found, expected):
            """The same tokens, as likely, up to where two are nearly as likely: what is packed depends on how calls are cut."""
            for token, mine, other, top in zip(
                found["tokens"],
                found["token_logprobs"],
                expected["token_logprobs"],
                expected["top_logprobs"],
                strict=True,
            ):
                if token not in top or abs(mine - top[token]) > 0.2:
                    return False
                if top[token] < other:
                    return other - top[token] < 0.2
            return True

        alone = [ask(i) for i in range(len(prompts))]

        def refused(body):
            try:
                server.get("/v1/completions", body)
            except urllib.error.HTTPError as error:
                return 400 <= error.code < 500
            return False

        def hang_up(i):
            """A client that is killed in the middle of a stream, or before it."""
            data = json.dumps(body(i, stream=True, max_tokens=200)).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(head.encode() + data)
                if i % 2:
                    client.recv(200)
            return True

        def one(number):
            i = random.Random(number).randrange(len(prompts))
            kind = number % 10
            if kind == 7:
                return hang_up(i)
            if kind == 8:
                return refused({"model": "m", "prompt": [10] * 5000, "max_tokens": 4})
            if kind == 9:
                return refused({"model": "m", "prompt": {"no": "prompt"}, "max_tokens": "many"})
            return right(ask(i), alone[i])

        def used():
            found = re.search(r"^vllm:kv_cache_usage_perc\S*\s+(\S+)", server.get("/metrics", raw=True), re.M)
            return float(found[1])

        def memory():
            root = psutil.Process(server.process.pid)
            return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])

        sizes = []
        results = []
        for part in range(5):
            with ThreadPoolExecutor(32) as clients:
                results += list(clients.map(one, range(100 * part, 100 * part + 100)))
            sizes.append(memory() / 1e6)
        assert server.process.poll() is None, "the server ended"
        assert not right(alone[0] | {"tokens": alone[1]["tokens"][:4]}, alone[0]), "no answer would be wrong"
        wrong = [i for i, right in enumerate(results) if not right]
        assert not wrong, f"wrong answers: {wrong}"
        for _ in range(30):
            if used() == 0:
                break
            time.sleep(1)
        assert used() == 0, f"blocks are held: {used()}"
        print(f"500 requests, none wrong; memory after each hundred, MB: {', '.join(f'{size:.0f}' for size in sizes)}")
        assert sizes[-1] < 1.05 * sizes[1]
