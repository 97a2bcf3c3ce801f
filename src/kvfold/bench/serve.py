"""vLLM decoding and prefilling, folded and by its own caches: one engine after the other, random weights in a real shape."""

import contextlib
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold.bench.decode import SHAPES
from kvfold.bench.rows import append, environment, need_gpu, options, progress, script, show
from kvfold.errors import KVFoldError

ROWS = Path("benchmarks/rows/serving.csv")
OWN = {"bfloat16": "auto", "fp8": "fp8", "int4": "int4_per_token_head", "turboquant": "turboquant_4bit_nc"}
"""vLLM's own caches: our name, its ``kv_cache_dtype``."""
STEPS = 128
"""Decode steps that are timed, unless told: every sequence fills a page in them."""
FIRST = 5
"""Decode steps before these."""


@dataclass
class ServeRow:
    """One measure: ``what`` is decode (``ms`` of a step, mean), prefill (``ms`` of a prompt) or capacity (``tokens``).

    ``context`` is the longest request's, ``total`` that of all.
    """

    what: str
    model: str
    cache: str
    batch: int
    context: int
    total: int
    ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    tokens_per_s: float | None
    tokens: int
    budget: int
    runner: str
    asynchronous: bool
    gpus: int
    vllm: str
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str


class Server:
    """vLLM in this process."""

    def __init__(
        self, shape: str, cache: str, context: int, budget: int, sizes: list[int], kv_bytes: int | None, tp: int = 1
    ) -> None:
        from vllm import LLM

        if tp > 1:  # functions travel to the workers
            os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

        given: dict[str, Any] = {"kv_cache_dtype": OWN[cache]} if cache in OWN else {}
        if cache not in OWN:
            given = {"attention_backend": "CUSTOM", "additional_config": {"kvfold": cache}}
        if kv_bytes is not None:  # vLLM looks at nothing but whether this share of the GPU is free
            given["gpu_memory_utilization"] = 0.5
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
            tensor_parallel_size=tp,
            **given,
        )
        self.engine = self.llm.llm_engine
        self.config = self.engine.vllm_config
        self.number = 0
        self.steps = STEPS
        self.profiles = False

    @property
    def tokens(self) -> int:
        """Capacity at the longest request, as vLLM logs it."""
        return int(self.config.cache_config.kv_cache_size_tokens or 0)

    def capacity(self, context: int) -> int:
        """Tokens that fit in requests of ``context``, as vLLM would log them if none were longer."""
        from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

        model, core = self.config.model_config, self._core
        longest, model.max_model_len = model.max_model_len, context
        try:
            return int(get_kv_cache_capacity(self.config, core.scheduler.kv_cache_config)[0])
        finally:
            model.max_model_len = longest

    @property
    def _core(self) -> Any:
        """vLLM's engine, which is in this process where the environment says so."""
        return self.engine.engine_core.engine_core

    def close(self) -> None:
        """Give its memory back."""
        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()
        torch.cuda.empty_cache()

    def facts(self) -> dict[str, Any]:
        import vllm

        return {
            "budget": self.config.scheduler_config.max_num_batched_tokens,
            "runner": "V2" if self.config.use_v2_model_runner else "V1",
            "asynchronous": bool(self.config.scheduler_config.async_scheduling),
            "gpus": self.config.parallel_config.tensor_parallel_size,
            "vllm": vllm.__version__,
        }

    def add(self, length: int, answer: int) -> None:
        from vllm import SamplingParams

        self.number += 1
        chosen = random.Random(self.number)
        prompt = chosen.choices(range(10, 30000), k=length)
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

    def scatter(self) -> None:
        """Bytes of 0 to 63 at random to all caches: as numbers of any type they are finite."""
        self.engine.collective_rpc(_scatter)

    @contextlib.contextmanager
    def without_model(self) -> Iterator[None]:
        """Prompts are computed by nobody: vLLM gives their tokens places in the caches, which hold what they hold."""
        width, dtype = self.config.model_config.get_hidden_size(), self.config.model_config.dtype

        def nothing(positions: torch.Tensor, **others: Any) -> torch.Tensor:
            return torch.zeros(positions.shape[-1], width, dtype=dtype, device=positions.device)

        def put(worker: Any, forward: Any) -> None:
            if forward is None:
                del worker.get_model().forward
            else:
                worker.get_model().forward = forward

        self.engine.collective_rpc(partial(put, forward=nothing))
        try:
            yield
        finally:
            self.engine.collective_rpc(partial(put, forward=None))

    def decode(self, lengths: list[int]) -> list[float]:
        """Milliseconds of every step in which all requests decode, after the first few; then they have ``lengths``.

        Raises
        ------
        KVFoldError
            If not all of them fit.
        """
        budget, many = self.config.scheduler_config.max_num_batched_tokens, len(lengths)
        ends = [-(-sum(lengths[: i + 1]) // budget) for i in range(many)]
        for length, end in zip(lengths, ends, strict=True):  # what it decodes while others' prompts are placed
            self.add(max(1, length - (ends[-1] - end)), 2 * self.steps + 2000)
        with self.without_model():
            for _ in range(2 * ends[-1] + 50):
                if self.step()[1] == many:
                    break
        for _ in range(FIRST):
            self.step()
        steps = [self.step() for _ in range(self.steps)]
        if self.profiles:
            self.profile()
        self.engine.abort_request([str(self.number - i) for i in range(many)])
        self.finish()
        if any(count != many for _, count in steps):
            raise KVFoldError(f"work: {many} requests of up to {max(lengths)} tokens do not fit together; give fewer")
        return [ms for ms, _ in steps]

    def profile(self, steps: int = 3) -> None:
        """Say which kernels some steps run, the longest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(steps):
                self.step()
        for event in sorted(seen.key_averages(), key=lambda e: -e.device_time_total)[:14]:
            each = event.device_time_total / 1e3 / steps
            progress(f"{each:7.3f} ms a step in {event.count // steps} calls: {event.key[:90]}")

    def prefill(self, length: int) -> list[float]:
        """Milliseconds of a prompt, the second and third of its kind."""
        times = []
        for _ in range(3):
            self.add(length, 1)
            total = 0.0
            while self.engine.has_unfinished_requests():
                total += self.step()[0]
            times.append(total)
        if self.profiles:
            self.add(length, 1)
            self.profile(-(-length // self.config.scheduler_config.max_num_batched_tokens))
            self.finish()
        return times[1:]


def _scatter(worker: Any) -> None:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    caches = [c for layer in layers if isinstance(c := getattr(layer, "kv_cache", None), torch.Tensor)]
    storages = {s.data_ptr(): s for cache in caches if (s := cache.untyped_storage()).nbytes()}
    assert storages
    for storage in storages.values():
        for piece in torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).split(1 << 30):
            piece.random_(0, 64)


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


def measure(server: Server, cache: str, shape: str, given: Namespace) -> Iterator[ServeRow]:
    """Rows of one engine, as they come."""
    facts = server.facts() | environment()
    longest = server.config.model_config.max_model_len
    for context in given.capacity or [longest]:
        tokens = server.capacity(context)
        yield ServeRow("capacity", shape, cache, 0, context, context, None, None, None, None, tokens, **facts)

    def timed(what: str, lengths: list[int], times: list[float], tokens: int) -> ServeRow:
        tenths = statistics.quantiles(times, n=10) if len(times) > 2 else sorted(times * 5)[:9]
        mean, longest, total = statistics.fmean(times), max(lengths), sum(lengths)
        numbers = mean, tenths[1], tenths[7], 1e3 * tokens / mean, server.tokens
        return ServeRow(what, shape, cache, len(lengths), longest, total, *numbers, **facts)

    server.scatter()
    for work in given.work:
        lengths = workload(work)
        try:
            yield timed("decode", lengths, server.decode(lengths), len(lengths))
        except KVFoldError as error:
            progress(f"{cache}: {error}")
    if given.prefill:
        yield timed("prefill", [given.prefill], server.prefill(given.prefill), given.prefill)


def main(argv: list[str] | None = None) -> int:
    """Measure one cache after the other."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parser = options("serve", __doc__, ROWS)
    parser.add_argument(
        "--shape", choices=SHAPES, default="llama-3.1-8b", help="the model's shape (default: llama-3.1-8b)"
    )
    parser.add_argument(
        "--cache",
        nargs="*",
        default=["fold"],
        help=f"methods, and vLLM's own: {', '.join(OWN)} (default: fold)",
    )
    parser.add_argument(
        "--work",
        nargs="*",
        default=["8x32768"],
        help="requests that decode together; their caches are filled with random bytes (default: 8x32768)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"decode steps to time (default: {STEPS}, in which every request fills a page)",
    )
    parser.add_argument("--prefill", type=int, default=0, metavar="N", help="also time a prompt of N tokens")
    parser.add_argument("--capacity", type=int, nargs="*", metavar="N", help="say what fits in requests of N tokens")
    parser.add_argument("--context", type=int, default=33280, help="longest request (default: 33280)")
    parser.add_argument("--budget", type=int, default=8192, help="max_num_batched_tokens (default: 8192)")
    parser.add_argument("--kv-bytes", type=int, help="memory for caches (default: what vLLM finds)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model (default: 1)")
    parser.add_argument("--profile", action="store_true", help="say which kernels a step runs")
    given = parser.parse_args(argv)
    if given.steps < 2:
        raise KVFoldError(f"steps: {given.steps} is not allowed; time 2 or more")
    sizes = sorted({1, *(len(workload(work)) for work in given.work)})
    need_gpu("serve")
    for cache in given.cache:
        server = Server(given.shape, cache, given.context, given.budget, sizes, given.kv_bytes, given.tp)
        server.profiles, server.steps = given.profile, given.steps
        for row in measure(server, cache, given.shape, given):
            _tell(row, given)
        server.close()
    return 0


def _tell(row: ServeRow, given: Namespace) -> None:
    """Print a row, and write it."""
    speed = "" if row.ms is None else f"{row.ms:9.2f} ms  {row.tokens_per_s:9.0f} tokens/s"
    text = f"{row.what:<9} {row.cache:<12} {row.batch:>3} x {row.context:>6} {speed} {row.tokens:>10,}"
    show(row, text, given.json)
    if given.rows:
        append(given.rows, [row])


if __name__ == "__main__":
    sys.exit(script(main))
