"""vLLM decoding and prefilling, folded and by its own caches: one engine per process, random weights in a real shape."""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfold.bench.decode import SHAPES
from kvfold.bench.rows import append, environment, need_gpu, options, progress, script, show
from kvfold.errors import KVFoldError

ROWS = Path("benchmarks/rows/serving.csv")
OWN = {"bfloat16": "auto", "fp8": "fp8", "int4": "int4_per_token_head", "turboquant": "turboquant_4bit_nc"}
"""vLLM's own caches: our name, its ``kv_cache_dtype``."""
STEPS = 40


@dataclass
class ServeRow:
    """One measure: ``what`` is decode (``ms`` of a step), prefill (``ms`` of a prompt) or capacity (``tokens``)."""

    what: str
    model: str
    cache: str
    batch: int
    context: int
    ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    tokens_per_s: float | None
    tokens: int
    budget: int
    runner: str
    asynchronous: bool
    vllm: str
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str


class Server:
    """vLLM in this process."""

    def __init__(
        self, shape: str, cache: str, context: int, budget: int, sizes: list[int], kv_bytes: int | None
    ) -> None:
        from vllm import LLM

        given: dict[str, Any] = {"kv_cache_dtype": OWN[cache]} if cache in OWN else {}
        if cache not in OWN:
            given = {"attention_backend": "CUSTOM", "additional_config": {"kvfold": cache}}
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        self.llm = LLM(
            _folder(shape),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=context,
            max_num_batched_tokens=budget,
            max_num_seqs=max(sizes),
            enable_prefix_caching=False,
            compilation_config=graphs,
            kv_cache_memory_bytes=kv_bytes,
            **given,
        )
        self.engine = self.llm.llm_engine
        self.config = self.engine.vllm_config
        self.number = 0
        self.profiles = False

    @property
    def tokens(self) -> int:
        """Capacity, as vLLM logs it."""
        return int(self.config.cache_config.kv_cache_size_tokens or 0)

    def facts(self) -> dict[str, Any]:
        import vllm

        return {
            "budget": self.config.scheduler_config.max_num_batched_tokens,
            "runner": "V2" if self.config.use_v2_model_runner else "V1",
            "asynchronous": bool(self.config.scheduler_config.async_scheduling),
            "vllm": vllm.__version__,
        }

    def add(self, length: int, answer: int) -> None:
        from vllm import SamplingParams

        self.number += 1
        chosen = random.Random(self.number)
        prompt = [chosen.randrange(10, 30000) for _ in range(length)]
        self.engine.add_request(
            str(self.number),
            {"prompt_token_ids": prompt},
            SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True),
        )

    def step(self) -> tuple[float, int]:
        """Milliseconds from a step's tokens to the next one's, and requests that got one."""
        begin = time.perf_counter()
        outs = self.engine.step()
        return 1e3 * (time.perf_counter() - begin), len(outs)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def decode(self, lengths: list[int]) -> list[float]:
        """Milliseconds of every step in which all requests decode, after the first few."""
        for length in lengths:
            self.add(length, 2 * STEPS + 2000)
        while self.step()[1] < len(lengths):
            pass
        for _ in range(5):
            self.step()
        times = [self.step()[0] for _ in range(STEPS)]
        if self.profiles:
            self.profile()
        self.engine.abort_request([str(self.number - i) for i in range(len(lengths))])
        self.finish()
        return times

    def profile(self) -> None:
        """Say which kernels three steps run, the longest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                self.step()
        for event in sorted(seen.key_averages(), key=lambda e: -e.device_time_total)[:12]:
            each = event.device_time_total / 3e3
            progress(f"{each:7.3f} ms a step in {event.count // 3} calls: {event.key[:90]}")

    def prefill(self, length: int) -> list[float]:
        """Milliseconds of a prompt, the second and third of its kind."""
        times = []
        for _ in range(3):
            self.add(length, 1)
            total = 0.0
            while self.engine.has_unfinished_requests():
                total += self.step()[0]
            times.append(total)
        return times[1:]


def _folder(shape: str) -> str:
    """A folder with a model's configuration, and no weights."""
    folder = Path(tempfile.mkdtemp(prefix="kvfold-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rope_theta": 5e5,
    }
    (folder / "config.json").write_text(json.dumps(config | SHAPES[shape]))
    return str(folder)


def workload(text: str) -> list[int]:
    """Lengths of ``8x32768`` or ``1x131072+63x2048``.

    Raises
    ------
    KVFoldError
        If it is something else.
    """
    try:
        pairs = [tuple(int(n) for n in part.split("x")) for part in text.split("+")]
        return [length for count, length in pairs for _ in range(count)]
    except ValueError:
        raise KVFoldError(f"work: {text!r} is not allowed; write 8x32768, or 1x131072+63x2048") from None


def measure(server: Server, cache: str, shape: str, works: list[str], prefill: int) -> Iterator[ServeRow]:
    """Rows of one engine, as they come."""
    facts = server.facts() | environment()
    longest, capacity = server.config.model_config.max_model_len, server.tokens
    yield ServeRow("capacity", shape, cache, 0, longest, None, None, None, None, capacity, **facts)

    def timed(what: str, batch: int, context: int, times: list[float], tokens: int) -> ServeRow:
        tenths = statistics.quantiles(times, n=10) if len(times) > 2 else sorted(times * 5)[:9]
        middle = statistics.median(times)
        speed = 1e3 * tokens / middle
        return ServeRow(what, shape, cache, batch, context, middle, tenths[1], tenths[7], speed, capacity, **facts)

    for work in works:
        lengths = workload(work)
        yield timed("decode", len(lengths), max(lengths), server.decode(lengths), len(lengths))
    if prefill:
        yield timed("prefill", 1, prefill, server.prefill(prefill), prefill)


def main(argv: list[str] | None = None) -> int:
    """Measure one cache."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parser = options("serve", __doc__, ROWS)
    parser.add_argument(
        "--shape", choices=SHAPES, default="llama-3.1-8b", help="the model's shape (default: llama-3.1-8b)"
    )
    parser.add_argument(
        "--cache", default="fold", help=f"a method, or one of vLLM's own: {', '.join(OWN)} (default: fold)"
    )
    parser.add_argument(
        "--work", nargs="*", default=["8x32768"], help="requests that decode together (default: 8x32768)"
    )
    parser.add_argument("--prefill", type=int, default=0, metavar="N", help="also time a prompt of N tokens")
    parser.add_argument("--context", type=int, default=33280, help="longest request (default: 33280)")
    parser.add_argument("--budget", type=int, default=8192, help="max_num_batched_tokens (default: 8192)")
    parser.add_argument("--kv-bytes", type=int, help="memory for caches (default: what vLLM finds)")
    parser.add_argument("--profile", action="store_true", help="say which kernels a step runs")
    given = parser.parse_args(argv)
    need_gpu("serve")
    sizes = sorted({1, *(len(workload(work)) for work in given.work)})
    server = Server(given.shape, given.cache, given.context, given.budget, sizes, given.kv_bytes)
    server.profiles = given.profile
    for row in measure(server, given.cache, given.shape, given.work, given.prefill):
        speed = "" if row.ms is None else f"{row.ms:9.2f} ms  {row.tokens_per_s:9.0f} tokens/s"
        show(
            row,
            f"{row.what:<9} {row.cache:<12} {row.batch:>3} x {row.context:>6} {speed} {row.tokens:>10,}",
            given.json,
        )
        if given.rows:
            append(given.rows, [row])
    return 0


if __name__ == "__main__":
    sys.exit(script(main))
