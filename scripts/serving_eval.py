"""Ask a server of the OpenAI API the problems of GSM8K, and compare two servers' answers item by item.

    python scripts/serving_eval.py ask http://127.0.0.1:8000 --tokenizer MODEL --data test.jsonl --examples train.jsonl \
        --limit 200 --cache fold --out fold.jsonl
    python scripts/serving_eval.py compare bfloat16.jsonl fold.jsonl

Prompts and grades are those of ``kvfold eval --suite gsm8k``; answers are greedy.
"""

import argparse
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvfold.evaluation.statistics import estimate, paired
from kvfold.evaluation.suites import Item, Options, Outcome, make
from kvfold.evaluation.suites.gsm8k import Gsm8k

PATIENCE = 1200
"""Seconds that an answer may take."""


def post(url: str, **body: object) -> Any:
    """What the server answers."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        return json.load(answer)


def model_of(server: str) -> str:
    """The model that it serves."""
    with urllib.request.urlopen(f"{server}/v1/models", timeout=PATIENCE) as answer:
        return str(json.load(answer)["data"][0]["id"])


def answered(server: str, model: str, suite: Gsm8k, item: Item, cache: str) -> dict[str, Any]:
    """One problem's row."""
    prompt = suite.prompt(item)
    asked = {"max_tokens": prompt.new_tokens, "temperature": 0, "stop": list(prompt.stop)}
    got = post(f"{server}/v1/completions", model=model, prompt=prompt.ids[0].tolist(), **asked)
    choice = got["choices"][0]
    outcome = Outcome(
        text=choice["text"], new_tokens=got["usage"]["completion_tokens"], capped=choice["finish_reason"] == "length"
    )
    tokens = {"prompt_tokens": prompt.ids.shape[1], "text": outcome.text}
    return {"item": item.name, "cache": cache, "scores": suite.grade(prompt, outcome)} | tokens


def ask(given: argparse.Namespace) -> None:
    """Write a row per problem, in the order of the problems."""
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    (suite,) = make(["gsm8k"], tokenizer, Options(data=given.data, examples=given.examples))
    assert isinstance(suite, Gsm8k)
    items, model = suite.items((), given.limit, 1), model_of(given.server)
    with ThreadPoolExecutor(given.clients) as pool, given.out.open("w", encoding="utf-8") as file:
        for row in pool.map(lambda item: answered(given.server, model, suite, item, given.cache), items):
            print(json.dumps(row), file=file, flush=True)
    print(given.cache, *summary(read(given.out)))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Of each measure the mean, and its interval."""
    found = []
    for name in rows[0]["scores"]:
        mean = estimate([row["scores"][name] for row in rows])
        found.append(f"{name} {mean.mean:.4g} [{mean.low:.4g}, {mean.high:.4g}]")
    return found


def compare(given: argparse.Namespace) -> None:
    """Say how the second server's answers differ from the first's."""
    base, other = ({row["item"]: row for row in read(path)} for path in (given.base, given.other))
    shared = [name for name in base if name in other]
    for rows in (base, other):
        chosen = [rows[name] for name in shared]
        print(f"{chosen[0]['cache']}: {len(shared)} problems; {'; '.join(summary(chosen))}")
    for measure in ("strict", "flexible"):
        values = [[rows[name]["scores"][measure] for name in shared] for rows in (other, base)]
        found = paired(values[0], values[1], higher_is_better=True)
        print(f"{measure}: {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}], p {found.p:.3f}: {found.verdict}")
    same = sum(base[name]["text"] == other[name]["text"] for name in shared)
    print(f"equal answers, word by word: {same} of {len(shared)}")


def main() -> int:
    """Ask, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    asks = commands.add_parser("ask", help="ask a server, and write its answers")
    asks.add_argument("server", help="http://127.0.0.1:8000")
    asks.add_argument("--tokenizer", required=True, help="the model's folder or name")
    asks.add_argument("--data", required=True, help="problems, as JSON lines")
    asks.add_argument("--examples", required=True, help="solved examples, as JSON lines")
    asks.add_argument("--limit", type=int, default=200, help="problems (default: 200)")
    asks.add_argument("--clients", type=int, default=32, help="problems asked at a time (default: 32)")
    asks.add_argument("--cache", required=True, help="what rows say of the server's cache")
    asks.add_argument("--out", type=Path, required=True, help="file of rows")
    asks.set_defaults(run=ask)
    compares = commands.add_parser("compare", help="compare two files of answers")
    compares.add_argument("base", type=Path)
    compares.add_argument("other", type=Path)
    compares.set_defaults(run=compare)
    given = parser.parse_args()
    given.run(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
