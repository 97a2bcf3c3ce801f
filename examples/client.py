"""Ask a server of examples/server.py, and print the answer as it comes: python examples/client.py "Why is the sky blue?" """

import json
import sys
import urllib.request
from collections.abc import Iterator


def post(server: str, path: str, **body: object) -> urllib.request.Request:
    """A request of the OpenAI API."""
    return urllib.request.Request(server + path, json.dumps(body).encode(), {"Content-Type": "application/json"})


def stream(server: str, prompt: str, tokens: int = 128) -> Iterator[str]:
    """Pieces of the answer to a prompt."""
    with urllib.request.urlopen(f"{server}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    asked = post(server, "/v1/completions", model=model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True)
    with urllib.request.urlopen(asked) as answer:
        for line in answer:
            event = line.decode().removeprefix("data: ").strip()
            if event and event != "[DONE]":
                yield json.loads(event)["choices"][0]["text"]


if __name__ == "__main__":
    for piece in stream(sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000", sys.argv[1]):
        print(piece, end="", flush=True)
    print()
