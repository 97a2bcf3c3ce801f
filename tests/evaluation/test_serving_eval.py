import json
import sys
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import serving_eval

from tiny_model import byte_tokenizer

RECORDS = [{"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(1, 13)]


class Server(BaseHTTPRequestHandler):
    """Knows the answers of all problems but every third one, which it cannot know from the prompt's tokens alone."""

    tokenizer = byte_tokenizer()

    def _send(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self._send({"data": [{"id": "small"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "small" and asked["temperature"] == 0 and asked["max_tokens"] == 320
        text = self.tokenizer.decode(asked["prompt"])
        n = int(text.rpartition("What is ")[2].split()[0])
        answer = f"Sum: 1\n#### {2 * n if n % 3 else 0}"
        self._send({"choices": [{"text": answer, "finish_reason": "stop"}], "usage": {"completion_tokens": 5}})

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    byte_tokenizer().save_pretrained(folder / "model")
    solved = [{**record, "question": record["question"].replace("What", "How much")} for record in RECORDS[:6]]
    for name, records in (("test", RECORDS), ("train", solved)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_a_server_is_asked_every_problem_and_its_answers_are_graded(folder, capsys):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out = folder / "fold.jsonl"
    given = Namespace(server=f"http://127.0.0.1:{server.server_port}", tokenizer=str(folder / "model"), limit=9)
    given.data, given.examples = str(folder / "test.jsonl"), str(folder / "train.jsonl")
    given.clients, given.cache, given.out = 4, "fold", out
    serving_eval.ask(given)
    server.shutdown()
    server.server_close()
    rows = serving_eval.read(out)
    assert [row["item"] for row in rows] == [f"gsm8k/0.{i}" for i in range(9)]
    assert [row["scores"]["strict"] for row in rows] == [1, 1, 0] * 3
    assert "fold strict 0.6667" in capsys.readouterr().out

    base = folder / "bfloat16.jsonl"
    base.write_text(out.read_text().replace('"strict": 0.0', '"strict": 1.0').replace('"fold"', '"bfloat16"'))
    serving_eval.compare(Namespace(base=base, other=out))
    said = capsys.readouterr().out
    assert "bfloat16: 9 problems; strict 1" in said
    assert "strict: -0.3333" in said and "no difference shown" in said
    assert "word by word: 9 of 9" in said


def test_the_page_on_serving_says_what_its_rows_say(capsys):
    root = Path(__file__).parents[2]
    rows = root / "benchmarks" / "serving"
    page = (root / "docs" / "serving.md").read_text()
    for other in ("fold", "again"):
        serving_eval.compare(Namespace(base=rows / "gsm8k-bfloat16.jsonl", other=rows / f"gsm8k-{other}.jsonl"))
    said = capsys.readouterr().out
    assert "flexible: -0.0250 [-0.0700, +0.0200], p 0.386: no difference shown" in said
    assert "strict: -0.0100 [-0.0500, +0.0300], p 0.811: no difference shown" in said
    assert "flexible: +0.0250 [+0.0000, +0.0550]" in said and "93 of 200" in said and "146 of 200" in said
    for number in (
        "-2.5 points [-7.0, +2.0], p = 0.39",
        "-1.0 points [-5.0, +3.0], p = 0.81",
        "+2.5 points [0.0, +5.5]",
    ):
        assert number in page
