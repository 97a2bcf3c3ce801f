"""Peak memory, largest batch and throughput of whole generations under a memory cap, folded against bf16.

The defaults are the experiment of KIVI's paper, which SQuat's repeats: Llama-2-7B, every sequence a prompt of 161 tokens and
338 generated ones (ShareGPT's averages), the batch raised until memory ends, here under 80 GB. Weights are random.

A run prefills the batch and decodes greedily, one token per sequence and step. Caches:

* ``bf16``: one buffer of the final length, no copies, cuDNN's attention over exactly the tokens that exist, in a CUDA graph.
  No such kernel of Torch takes the length from the device, so that a graph serves one length: steps are captured at five
  lengths, and the time of those between is interpolated. A real program would not be faster.
* ``transformers``: ``DynamicCache`` and SDPA as Transformers' ``generate`` runs them, the baseline of the papers: the whole
  batch prefilled at once, keys and values concatenated in every step, no graph.
* any method: a folded cache, decoding in a CUDA graph.

``bf16`` and folded caches are prefilled some sequences at a time, so that activations do not decide the batch. Before a time
is taken, logits are compared at a small batch: ``bf16`` with ``transformers``, folded with the reference kernel over the same
storage.
"""

import gc
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfold.bench.decode import SHAPES, build
from kvfold.bench.generation import PLAIN, STATIC, EagerFoldedGeneration, Generation, PlainGeneration, Timing, kind
from kvfold.bench.rows import append, environment, need_gpu, options, progress, script, show
from kvfold.errors import KVFoldError

ROWS = Path("benchmarks/rows/memory.csv")
METHODS = ("kivi:recent=32", "kivi:recent=128")
"""KIVI and SQuat store the same; their papers measure windows of 32 and 128 tokens."""
PROMPT, OUTPUT = 161, 338
GATE_BATCH, GATE_STEPS = 4, 3
LIMIT = 1e-1
"""Relative RMS error of a bf16 model's logits between two ways to compute the same."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One batch of one cache.

    Attributes
    ----------
    model, cache : str
    prompt, output, batch : int
        Tokens of a sequence: given, generated; sequences.
    cap_gb : float
        Memory that tensors may take, 10^9 bytes; weights and activations included.
    fits : bool
        Whether the run ended; without, only ``error`` and ``limit`` are measured.
    largest : bool
        Whether the next larger batch (by the step) did not fit.
    error, limit : float
        Relative RMS error of the logits of a small batch, and the most that is allowed.
    peak_gb, reserved_gb, cache_gb : float or None
        Most bytes in tensors, most bytes held by the allocator, and the cache at the end.
    prefill_s, decode_s, capture_s : float or None
        Seconds; capturing the graph, done once per batch size, counts in neither throughput.
    tokens_per_s, decode_tokens_per_s : float or None
        Generated tokens over prefill and decoding; over decoding alone.
    gpu, driver, torch, triton, commit : str
    """

    model: str
    cache: str
    prompt: int
    output: int
    batch: int
    cap_gb: float
    fits: bool = False
    largest: bool = False
    error: float
    limit: float
    peak_gb: float | None = None
    reserved_gb: float | None = None
    cache_gb: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    capture_s: float | None = None
    tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str


# ---- measuring -------------------------------------------------------------------------------------------------------


def prompts(model: PreTrainedModel, batch: int, prompt: int) -> torch.Tensor:
    """Random token ids, int64 [batch, prompt]."""
    generator = torch.Generator(model.device).manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (batch, prompt), device=model.device, generator=generator)


def logits_of(generation: Generation, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the steps that take the given tokens, int64 [batch, steps]; float32 [batch, steps, vocabulary]."""
    generation.start()
    generation.prepare()
    return torch.cat([generation.step(tokens[:, i : i + 1]).float() for i in range(tokens.shape[1])], 1)


def gate(model: PreTrainedModel, cache: str, prompt: int) -> float:
    """Relative RMS error of a small batch's logits against another computation of the same; 0 for ``transformers``."""
    if cache == PLAIN:
        return 0.0
    ids, tokens = prompts(model, GATE_BATCH, prompt + GATE_STEPS).split([prompt, GATE_STEPS], 1)
    made: Callable[..., Generation] = kind(cache)
    chunk = (
        3  # in both: a prompt rounds as its batch does, and codes of a folded cache fall to either side of a rounding
    )
    got = logits_of(made(model, ids, GATE_STEPS + 1, chunk), tokens)
    if cache == STATIC:
        want = logits_of(PlainGeneration(model, ids, GATE_STEPS + 1, chunk), tokens)
    else:
        other: Callable[..., Generation] = type(
            "Reference", (EagerFoldedGeneration,), {"method": cache, "kernel": "reference"}
        )
        want = logits_of(other(model, ids, GATE_STEPS + 1, chunk), tokens)
    error = float((got - want).norm() / want.norm())
    return error if bool(torch.isfinite(got).all()) else math.inf


def attempt(make: Callable[[], Generation]) -> Timing | None:
    """Run a generation; None if memory ended. Nothing of it stays behind."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        return make().run()
    except RuntimeError as error:
        # while a graph is captured, running out of memory also breaks the capture, which then is what is raised
        if not (isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError)):
            raise
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return None


class Search:
    """Raise the batch of one cache until memory ends.

    Parameters
    ----------
    run : callable
        Batch -> bytes it needed, or None if it did not fit.
    step : int
        Batches tried are multiples of it, apart from those asked for.
    cap : float
        Bytes.
    """

    def __init__(self, run: Callable[[int], int | None], step: int, cap: float) -> None:
        self.run, self.step, self.cap = run, step, cap
        self.held: dict[int, int] = {}

    def _fits(self, batch: int) -> bool:
        held = self.run(batch)
        if held is not None:
            self.held[batch] = held
        return held is not None

    def __call__(self, batches: Sequence[int]) -> int | None:
        """Run ``batches``, then the largest that fits; returns it, or None if none of all fitted."""
        for batch in sorted(batches):
            if not self._fits(batch):
                return self._down(batch)
        # memory is nearly linear in the batch: start where the two largest so far say that it ends
        (b0, m0), (b1, m1) = sorted(self.held.items())[-2:]
        guess = b1 + (self.cap - m1) * (b1 - b0) / max(m1 - m0, 1)
        at = max(int(guess) // self.step, b1 // self.step + 1) * self.step
        if not self._fits(at):
            return self._down(at)
        while self._fits(at + self.step):
            at += self.step
        return at

    def _down(self, failed: int) -> int | None:
        """The largest batch below one that does not fit."""
        at = (failed - 1) // self.step * self.step
        while at > 0 and at not in self.held and not self._fits(at):
            at -= self.step
        return max(self.held, default=None)


def measure(
    model: PreTrainedModel,
    name: str,
    cache: str,
    batches: Sequence[int],
    prompt: int,
    output: int,
    cap: float,
    step: int,
    chunk: int,
    env: dict[str, Any],
) -> list[MemoryRow]:
    """Rows of one cache: the batches asked for, and the largest that fits under ``cap`` bytes."""
    error = gate(model, cache, prompt)
    gc.collect()
    torch.cuda.empty_cache()
    rows: dict[int, MemoryRow] = {}
    base = MemoryRow(
        model=name,
        cache=cache,
        prompt=prompt,
        output=output,
        batch=GATE_BATCH,
        cap_gb=cap / 1e9,
        error=error,
        limit=LIMIT,
        **env,
    )
    if not error <= LIMIT:
        return [base]
    made = kind(cache)

    def run(batch: int) -> int | None:
        found = attempt(lambda: made(model, prompts(model, batch, prompt), output, chunk))
        rows[batch] = replace(base, batch=batch)
        if found is None:
            progress(f"{cache} B={batch}: memory ended")
            return None
        rows[batch] = replace(
            rows[batch],
            fits=True,
            peak_gb=found.peak / 1e9,
            reserved_gb=found.reserved / 1e9,
            cache_gb=found.cache / 1e9,
            prefill_s=found.prefill,
            decode_s=found.decode,
            capture_s=found.capture,
            tokens_per_s=batch * output / (found.prefill + found.decode),
            decode_tokens_per_s=batch * (output - 1) / found.decode,
        )
        progress(line(rows[batch]))
        # a growing cache leaves freed blocks with the allocator, which gives them back when memory ends
        return found.peak if cache == PLAIN else found.reserved

    largest = Search(run, step, cap)(batches)
    if largest is not None:
        rows[largest] = replace(rows[largest], largest=True)
    return [rows[batch] for batch in sorted(rows)]


def limit_memory(cap: float) -> None:
    """Let tensors take ``cap`` bytes of the GPU at most.

    Raises
    ------
    KVFoldError
        If the GPU has less.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    if not 0 < cap <= total:
        raise KVFoldError(f"bench memory: cap={cap / 1e9:g} GB is not allowed; this GPU has {total / 1e9:.1f} GB")
    torch.cuda.set_per_process_memory_fraction(cap / total)


@torch.no_grad()
def run(
    shape: str,
    caches: Sequence[str],
    batches: Sequence[int],
    prompt: int = PROMPT,
    output: int = OUTPUT,
    cap: float = 80e9,
    step: int = 8,
    chunk: int = 8,
    rows: Path | None = None,
) -> list[MemoryRow]:
    """Measure caches one after the other in one process.

    Parameters
    ----------
    shape : str
        A key of :data:`kvfold.bench.decode.SHAPES`.
    caches : sequence of str
        Folded caches after full-precision ones are also run at the largest batch of those.
    batches : sequence of int
        At least two; larger ones follow until memory ends.
    cap : float
        Bytes.
    rows : Path or None
        CSV file that rows are appended to, cache by cache.
    """
    if len(set(batches)) < 2 or min(batches) < 1:
        raise KVFoldError(f"bench memory: batches={list(batches)} is not allowed; allowed: two or more different ones")
    for cache in caches:
        kind(cache)
    device = need_gpu("memory")
    limit_memory(cap)
    env = environment()
    progress(f"building {shape}")
    model = build(shape, device, dynamic=True)
    found: list[MemoryRow] = []
    common: set[int] = set()
    for cache in caches:
        new = measure(model, shape, cache, sorted({*batches, *common}), prompt, output, cap, step, chunk, env)
        if rows is not None:
            append(rows, new)
        if cache in (STATIC, PLAIN):
            common |= {row.batch for row in new if row.largest}
        found += new
    return found


# ---- reporting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """A folded cache against a full-precision one: memory at equal batch (least, most), largest batch, throughput."""

    cache: str
    baseline: str
    memory: tuple[float, float]
    batch: float
    throughput: float
    decode_throughput: float


def gains(rows: Sequence[Any]) -> list[Gain]:
    """What rows of one model and one pair of lengths say; rows need the attributes of :class:`MemoryRow`."""
    by: dict[str, dict[int, Any]] = {}
    for row in rows:
        if row.fits:
            by.setdefault(row.cache, {})[row.batch] = row
    found = []
    for cache, own in by.items():
        for baseline in (STATIC, PLAIN) if cache not in (STATIC, PLAIN) else ():
            other = by.get(baseline, {})
            shared = sorted(set(own) & set(other))
            if not shared:
                continue
            ratios = [other[b].peak_gb / own[b].peak_gb for b in shared]
            top, reference = own[max(own)], other[max(other)]
            found.append(
                Gain(
                    cache,
                    baseline,
                    (min(ratios), max(ratios)),
                    top.batch / reference.batch,
                    max(r.tokens_per_s for r in own.values()) / max(r.tokens_per_s for r in other.values()),
                    max(r.decode_tokens_per_s for r in own.values())
                    / max(r.decode_tokens_per_s for r in other.values()),
                )
            )
    return found


def line(row: MemoryRow) -> str:
    """One row for people."""
    head = f"{row.cache:24} {row.prompt}+{row.output} B={row.batch:<5}"
    if not row.error <= row.limit:
        return f"{head} error {row.error:.1e} > {row.limit:.0e}: not timed"
    if not row.fits:
        return f"{head} memory ended"
    return (
        f"{head} peak {row.peak_gb:.1f} GB (cache {row.cache_gb:.1f})  {row.tokens_per_s:.0f} tokens/s "
        f"(decoding alone {row.decode_tokens_per_s:.0f})  prefill {row.prefill_s:.1f} s  "
        f"error {row.error:.1e}{'  largest' if row.largest else ''}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = options("memory", __doc__, ROWS)
    parser.add_argument("--model", choices=list(SHAPES), default="llama-2-7b")
    parser.add_argument(
        "--caches",
        nargs="+",
        metavar="CACHE",
        default=[STATIC, PLAIN, *METHODS],
        help=f"{STATIC}, {PLAIN}, or methods; default: {STATIC} {PLAIN} {' '.join(METHODS)}",
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128], help="run first; default: 64 128")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens; default: {PROMPT}")
    parser.add_argument("--output", type=int, default=OUTPUT, help=f"tokens generated; default: {OUTPUT}")
    parser.add_argument("--cap", type=float, default=80, metavar="GB", help="memory cap, 10^9 bytes; default: 80")
    parser.add_argument("--step", type=int, default=8, help="sequences by which the batch is raised; default: 8")
    parser.add_argument("--chunk", type=int, default=8, help="sequences prefilled at a time; default: 8")
    args = parser.parse_args(argv)
    for name, least in (("prompt", 2), ("output", 2), ("step", 1), ("chunk", 1)):
        if getattr(args, name) < least:
            raise KVFoldError(f"bench memory: {name}={getattr(args, name)} is not allowed; allowed: {least} or more")
    found = run(
        args.model,
        args.caches,
        args.batches,
        args.prompt,
        args.output,
        args.cap * 1e9,
        args.step,
        args.chunk,
        args.rows,
    )
    for row in found:
        show(row, line(row), args.json)
    for gain in () if args.json else gains(found):
        print(
            f"{gain.cache} against {gain.baseline}: {gain.memory[0]:.2f} - {gain.memory[1]:.2f}x less memory at equal "
            f"batch, {gain.batch:.2f}x the batch, {gain.throughput:.2f}x the throughput (decoding alone "
            f"{gain.decode_throughput:.2f}x)"
        )
    return int(any(not row.error <= row.limit for row in found))


if __name__ == "__main__":
    sys.exit(script(main))
