"""A batch that is prefilled and decodes, one class per kind of cache."""

import statistics
import time
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

import kvfold
from kvfold import methods
from kvfold.bench.decode import replay_times
from kvfold.bench.static import StaticLayer
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.graph import DecodeGraph
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.names import passing
from kvfold.storage.sequences import COUNTS
from kvfold.storage.slabs import Slab

STATIC, PLAIN = "bf16", "transformers"
POINTS = 5


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
        return self.model(input_ids=ids, **passing(self.model, self.cache), use_cache=True, logits_to_keep=1).logits

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
            input_ids=ids, position_ids=positions, **passing(self.model, self.cache), use_cache=True, logits_to_keep=1
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
        from kvfold.engines.transformers.fused import small_operations

        self._set_used(used)

        def work() -> torch.Tensor:
            return self.input.copy_(self._call(self.input, self.positions).argmax(-1))

        begun = time.perf_counter()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with small_operations(self.model):  # as in a folded step
            with torch.cuda.stream(stream):
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
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
                self.model(
                    input_ids=self.ids[rows], **passing(self.model, part), use_cache=True, logits_to_keep=1
                ).logits
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
        return self.model(input_ids=ids, **passing(self.model, self.cache), use_cache=True).logits


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
