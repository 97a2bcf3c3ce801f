"""Serve a model with folded caches by vLLM: python examples/server.py MODEL [METHOD] [options of vLLM ...]

Clients speak to it as to any OpenAI server (examples/client.py). On a machine without a GPU, vLLM's build for CPUs serves small
models for trying it out: set KVFOLD_VLLM_CPU=1.
"""

import json
import os
import sys


def command(model: str, method: str = "fold", *options: str) -> list[str]:
    """What starts the server: vLLM's own program, with kvfold as its attention."""
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--attention-backend",
        "CUSTOM",
        "--additional-config",
        json.dumps({"kvfold": method}),
        *options,
    ]


if __name__ == "__main__":
    os.execv(sys.executable, command(*sys.argv[1:]))
