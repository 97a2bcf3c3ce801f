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
import statistics
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

import kvfold
from kvfold import methods
from kvfold.bench.decode import SHAPES, build, replay_times
from kvfold.bench.rows import append, environment, need_gpu, options, progress, script, show
from kvfold.cache import FoldedCache
from kvfold.errors import KVFoldError
from kvfold.graph import DecodeGraph
from kvfold.layer import FoldedLayer
from kvfold.storage.sequences import COUNTS
from kvfold.storage.slabs import Slab

ROWS = Path("benchmarks/rows/memory.csv")
STATIC, PLAIN = "bf16", "transformers"
METHODS = ("kivi:recent=32", "kivi:recent=128")
"""KIVI and SQuat store the same; their papers measure windows of 32 and 128 tokens."""
PROMPT, OUTPUT = 161, 338
GATE_BATCH, GATE_STEPS = 4, 3
POINTS = 5
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


# ---- full precision in one buffer ------------------------------------------------------------------------------------


class StaticLayer(DynamicLayer):
    """Full precision in one buffer [batch, longest, num_kv_heads, head_dim], written in place.

    ``rows`` are the sequences that a prefill brings; ``used`` counts tokens, a step's included. Both are set from outside.
    """

    def __init__(self, batch: int, longest: int, heads: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.keys, self.values = (
            torch.empty(batch, longest, heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        self.rows, self.used = slice(0, batch), 0
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return 0  # positions are passed

    def update(self, key_states, value_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        assert self.keys is not None and self.values is not None
        tokens = key_states.shape[2]
        sides = (self.keys, key_states), (self.values, value_states)
        if tokens > 1:  # a prompt attends to itself
            for whole, new in sides:
                whole[self.rows, :tokens] = new.transpose(1, 2)
            return key_states, value_states
        for whole, new in sides:
            whole[:, self.used - 1] = new[:, :, 0]
        return tuple(whole[:, : self.used].transpose(1, 2) for whole, _ in sides)


def static_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
    """SDPA by cuDNN (by FlashAttention where cuDNN does not serve): over exactly the tokens given, without a mask."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=query.shape[2] > 1, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("kvfold_bench_static", static_attention)


# ---- one generation per kind of cache --------------------------------------------------------------------------------


@dataclass
class Timing:
    """What a run measured; seconds and bytes."""

    prefill: float
    capture: float
    decode: float
    peak: int
    reserved: int
    cache: int


class Generation:
    """A prefilled batch that can decode; subclasses say with which cache.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor, int64 [batch, prompt], on the device
    output : int
        Tokens to generate.
    chunk : int
        Sequences prefilled at a time.
    """

    cache: Any

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, output: int, chunk: int) -> None:
        self.model, self.ids, self.output, self.chunk = model, ids, output, chunk
        self.batch, self.prompt = ids.shape

    def prefill(self) -> torch.Tensor:
        """Take the prompts in; logits [batch, 1, vocabulary] after them."""
        raise NotImplementedError

    def prepare(self) -> None:
        """What is done once before decoding."""

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] after one more token per sequence, int64 [batch, 1]."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Bytes of the cache."""
        raise NotImplementedError

    def start(self) -> torch.Tensor:
        """:meth:`prefill`, with what is compiled for steps left out: a prompt's time is that of its matrix products."""
        with torch.compiler.set_stance("force_eager"):
            return self.prefill()

    def chunks(self) -> Iterator[slice]:
        for first in range(0, self.batch, self.chunk):
            yield slice(first, min(first + self.chunk, self.batch))

    def decode(self, ids: torch.Tensor) -> tuple[float, float]:
        """Seconds of what is done once, and of all steps; the first token, int64 [batch, 1], came with the prefill."""
        begun = time.perf_counter()
        self.prepare()
        torch.cuda.synchronize()
        ready = time.perf_counter()
        for _ in range(self.output - 1):
            ids = self.step(ids).argmax(-1)
        torch.cuda.synchronize()
        return ready - begun, time.perf_counter() - ready

    def run(self) -> Timing:
        """The whole generation, timed."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        ids = self.start().argmax(-1)
        torch.cuda.synchronize()
        filled = time.perf_counter()
        capture, decode = self.decode(ids)
        return Timing(
            filled - begun,
            capture,
            decode,
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
            self.nbytes(),
        )


class PlainGeneration(Generation):
    """Transformers' growing cache."""

    def prefill(self) -> torch.Tensor:
        self.model.set_attn_implementation("sdpa")
        self.cache = DynamicCache(config=self.model.config)
        return self._call(self.ids)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self._call(ids)

    def _call(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class StaticGeneration(Generation):
    """One full-precision buffer; a step in a CUDA graph, captured at some lengths (see the module's notes)."""

    def prefill(self) -> torch.Tensor:
        config, device = self.model.config, self.ids.device
        self.model.set_attn_implementation("kvfold_bench_static")
        longest = self.prompt + self.output
        self.cache = Cache(
            layers=[
                StaticLayer(self.batch, longest, config.num_key_value_heads, config.head_dim, device)
                for _ in range(config.num_hidden_layers)
            ]
        )
        self.input = torch.zeros(self.batch, 1, dtype=torch.long, device=device)
        positions = torch.arange(self.prompt, device=device).unsqueeze(0)
        logits = []
        for rows in self.chunks():
            for layer in self.cache.layers:
                layer.rows = rows
            logits.append(self._call(self.ids[rows], positions))
        self._set_used(self.prompt)
        return torch.cat(logits)

    def _call(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(
            input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits

    def _set_used(self, tokens: int) -> None:
        self.used = tokens
        self.positions = torch.full((self.batch, 1), tokens - 1, device=self.ids.device)
        for layer in self.cache.layers:
            layer.used = tokens

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self._set_used(self.used + 1)
        return self._call(ids, self.positions)

    def _step_seconds(self, used: int) -> tuple[float, float]:
        """A captured step, with the choice of the next token, at ``used`` tokens; and what capturing took."""
        self._set_used(used)

        def work() -> torch.Tensor:
            return self.input.copy_(self._call(self.input, self.positions).argmax(-1))

        begun = time.perf_counter()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        torch.cuda.synchronize()
        captured = time.perf_counter() - begun
        replay_times(graph, 2)
        return statistics.median(replay_times(graph, 5)) / 1e3, captured

    def decode(self, ids: torch.Tensor) -> tuple[float, float]:
        self.input.copy_(ids)
        first, last = self.prompt + 1, self.prompt + self.output - 1
        lengths = sorted({first + round(i * (last - first) / (POINTS - 1)) for i in range(POINTS)})
        found = [self._step_seconds(n) for n in lengths]
        total = 0.0
        for n in range(first, last + 1):
            i = min(bisect(lengths, n), len(lengths) - 1)
            a, b = lengths[max(i - 1, 0)], lengths[i]
            (low, _), (high, _) = found[max(i - 1, 0)], found[i]
            total += low + (high - low) * (n - a) / max(b - a, 1)
        return sum(captured for _, captured in found), total

    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class FoldedGeneration(Generation):
    """A folded cache; decoding in a CUDA graph."""

    method = ""
    kernel: str | None = None

    def _fold(self) -> FoldedCache:
        return kvfold.fold(self.model, self.method, kernel=self.kernel, max_length=self.prompt + self.output)

    def prefill(self) -> torch.Tensor:
        self.cache = self._fold()
        logits = []
        for rows in self.chunks():
            part = self._fold()
            logits.append(
                self.model(input_ids=self.ids[rows], past_key_values=part, use_cache=True, logits_to_keep=1).logits
            )
            for whole, some in zip(self.cache.folded, part.folded, strict=True):
                place(whole, some, rows.start, self.batch)
        return torch.cat(logits)

    def prepare(self) -> None:
        self.graph = DecodeGraph(self.model, self.cache, self.output)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.graph(ids)

    def nbytes(self) -> int:
        return self.cache.nbytes()["total"]


class EagerFoldedGeneration(FoldedGeneration):
    """The same without a graph."""

    def prepare(self) -> None:
        pass

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits


def place(whole: FoldedLayer, part: FoldedLayer, first: int, batch: int) -> None:
    """Copy the sequences of ``part``, all of one length, to rows ``first`` and after of a layer that will hold ``batch``.

    Storage of ``whole`` is allocated by the first part; nothing is copied twice.
    """
    assert len(part.slabs) <= 1
    if not whole.is_initialized:

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x.new_empty(batch, *x.shape[1:])

        whole.start(batch, part.dtype, part.device)
        whole.sink.pair = (rows(part.sink.keys), rows(part.sink.values))
        whole.ring.pair = (rows(part.ring.keys), rows(part.ring.values))
        whole.slabs.slabs = [
            Slab(s.first, s.blocks, *({n: rows(x) for n, x in side.items()} for side in (s.keys, s.values)))
            for s in part.slabs
        ]
        keys, values = ({n: rows(x) for n, x in side.items()} for side in part.slabs.shared)
        whole.slabs.shared = (keys, values)
        whole.slabs.fixed = part.slabs.fixed[:1] * batch
        whole.following.state = {n: rows(x) for n, x in part.following.state.items()}
        if part.following.ring is not None:  # as long as the prompt made it
            whole.following.ring = rows(part.following.ring)
        for name in COUNTS:
            setattr(whole.sequences, name, getattr(part.sequences, name)[:1] * batch)
        whole.following.made = part.following.made[:1] * batch
        whole.following.kept = part.following.kept[:1] * batch
        whole.columns.log(part.columns.count, None)
    count = len(part.sequences)
    pairs = [*zip(whole.sink, part.sink, strict=True), *zip(whole.ring, part.ring, strict=True)]
    for a, b in zip(whole.slabs, part.slabs, strict=True):
        pairs += zip(a.tensors(), b.tensors(), strict=True)
    sides = (*whole.slabs.shared, whole.following.state), (*part.slabs.shared, part.following.state)
    for held, of in zip(*sides, strict=True):
        pairs += [(held[n], x) for n, x in of.items()]
    if whole.following.ring is not None and part.following.ring is not None:
        pairs.append((whole.following.ring, part.following.ring))
    for to, source in pairs:
        to[first : first + count] = source


def kind(cache: str) -> type[Generation]:
    """The class that generates with a cache: ``bf16``, ``transformers`` or a method's spec.

    Raises
    ------
    MethodError
        For anything else.
    """
    if cache in (STATIC, PLAIN):
        return StaticGeneration if cache == STATIC else PlainGeneration
    methods.get(cache)
    return type("FoldedGeneration", (FoldedGeneration,), {"method": cache})


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
