"""Write the five kinds of text that the rows of benchmarks/evidence/ were measured on.

``python scripts/evidence_texts.py DATA FOLDER``: DATA has ``wikitext-2-raw/wiki.test.raw``, ``gutenberg/moby-dick.txt`` and
``gsm8k/test.jsonl`` as their authors publish them. Code and tool calls are those of the Python that runs this: rows carry each
text's hash.
"""

import argparse
import json
import pathlib
import re

from kvfold.evaluation.transcripts import tool_calls
from kvfold.evaluation.windows import library_source

CHARACTERS = 500_000


def dialogue(path: pathlib.Path) -> str:
    """GSM8K's test problems as turns of a user and an assistant, without the marks of its calculator."""
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    turns = ((record["question"], re.sub(r"<<.*?>>", "", record["answer"])) for record in records)
    return "\n\n".join(f"User: {question}\n\nAssistant: {answer}" for question, answer in turns)


def texts(data: pathlib.Path) -> dict[str, str]:
    """All of them by name."""
    return {
        "encyclopedia": (data / "wikitext-2-raw/wiki.test.raw").read_text(encoding="utf-8"),
        "prose": (data / "gutenberg/moby-dick.txt").read_text(encoding="utf-8"),
        "code": library_source().text,
        "dialogue": dialogue(data / "gsm8k/test.jsonl"),
        "tools": tool_calls().text,
    }


def main() -> None:
    """Write the first half million characters of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts(asked.data).items():
        (asked.folder / f"{name}.txt").write_text(text[:CHARACTERS], encoding="utf-8")
        print(f"{name}.txt: {min(len(text), CHARACTERS):,} characters")


if __name__ == "__main__":
    main()
