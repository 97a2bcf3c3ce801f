"""A step of one layer, on the pages and windows that vLLM allocated."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import torch

from kvfold.engines.vllm.long import FLASH
from kvfold.engines.vllm.settings import PAGE, Stored
from kvfold.formats import Fields
from kvfold.kernels import paged
from kvfold.kernels.paged import PagedCall, PagedStep, Workspace
from kvfold.kernels.paged.layout import closed_from
from kvfold.kernels.paged.long import Chunk, attend_chunk
from kvfold.methods import Method


@dataclass(frozen=True)
class Batch:
    """How a step divides, known on the host: decodes come first, and prompts' chunks follow.

    Attributes
    ----------
    decodes : int
        Sequences, padded ones among them, whose tokens the paged kernels serve.
    most : int
        Tokens that one of these has, at most.
    chunks : list of Chunk
        The others.
    """

    decodes: int
    most: int
    chunks: list[Chunk] = field(default_factory=list)

    @classmethod
    def of(cls, starts: list[int], lengths: list[int], short: int) -> Self:
        """From first tokens [seqs + 1] and lengths after the step [seqs]; ``short``: tokens of a decode, at most."""
        counts = [b - a for a, b in pairwise(starts)]
        decodes = next((i for i, n in enumerate(counts) if n > short), len(counts))
        chunks = [
            Chunk(row, starts[row], counts[row], lengths[row] - counts[row])
            for row in range(decodes, len(counts))
            if counts[row]
        ]
        return cls(decodes, max([1, *counts[:decodes]]), chunks)


@dataclass(frozen=True)
class Step:
    """What the layers of a step share whose windows share a table, and whose blocks are closed alike.

    Attributes
    ----------
    paged : PagedStep
        All sequences.
    decodes : PagedStep
        The first ones, which kernels serve.
    batch : Batch
    owner : object
        The layer that prepares the step, each time that it runs: a graph that is captured replays it.
    """

    paged: PagedStep
    decodes: PagedStep
    batch: Batch
    owner: object

    @classmethod
    def of(cls, method: Method, packed: Any, window_table: torch.Tensor, window_block: int, owner: object) -> Self:
        """From vLLM's metadata of the packed group, and the windows' block table."""
        whole = PagedStep(
            query_start=packed.query_start,
            seq_lens=packed.seq_lens,
            table=packed.block_table,
            window_table=window_table,
            max_query_len=packed.max_query_len,
            recent=method.recent,
            sink=method.sink,
            block=method.block,
            window_block=window_block,
        )
        n = packed.batch.decodes
        decodes = replace(
            whole,
            query_start=whole.query_start[: n + 1],
            seq_lens=whole.seq_lens[:n],
            table=whole.table[:n],
            window_table=window_table[:n],
            max_query_len=packed.batch.most,
        )
        return cls(whole, decodes, packed.batch, owner)


@dataclass
class Bench:
    """What the kernels of all layers write to, and the step that it was last prepared for."""

    workspace: Workspace
    prepared: Step | None = None

    def prepare(self, step: Step, layer: object, seen: int) -> None:
        """For a step's first layer always, so that a graph has it; for others where another step was in between."""
        if step.owner is layer or self.prepared is not step:
            paged.prepare(step.paged, self.workspace, seen)
            self.prepared = step


class Layer:
    """A layer's formats, and its views of what vLLM allocated."""

    def __init__(self, stored: Stored, scale: float, bench: Bench | None) -> None:
        self.stored, self.scale, self.bench = stored, scale, bench
        device = torch.device("cpu") if bench is None else bench.workspace.top.device
        self.maps = stored.maps(device)
        if bench is not None:
            paged.ready(*stored.formats, self.maps, device)
        self.seen = PAGE if stored.follows else max(closed_from(form) for form in stored.formats)
        self._bound: tuple[int, int] | None = None
        self.keys: Fields = {}
        self.values: Fields = {}
        self.window_keys = self.window_values = torch.empty(0)
        self.window_queries: torch.Tensor | None = None

    def bind(self, cache: torch.Tensor, window: torch.Tensor) -> None:
        """Look at the caches; anew only where they moved.

        Parameters
        ----------
        cache : Tensor [blocks, num_kv_heads, 128, bytes of a token / bytes of an element]
        window : Tensor [blocks, num_kv_heads, window_block, 2 head_dim, or 3 where pages follow their queries]
        """
        if self._bound == (cache.data_ptr(), window.data_ptr()):
            return
        self.keys, self.values = self.stored.layout.views(cache.flatten(2).view(torch.uint8))
        width = self.stored.spec.head_dim
        tokens = window.transpose(1, 2)
        self.window_keys, self.window_values = tokens[..., :width], tokens[..., width : 2 * width]
        if self.stored.follows:
            self.window_queries = tokens[..., 2 * width : 3 * width]
        self._bound = cache.data_ptr(), window.data_ptr()

    def unbind(self) -> None:
        """Look at nothing, and let go of it."""
        self._bound, self.keys, self.values, self.window_queries = None, {}, {}, None
        self.window_keys = self.window_values = torch.empty(0)
        if self.bench is not None:
            self.bench.prepared = None


def run(
    layer: Layer, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
) -> None:
    """Store the step's tokens, then attend: a request may read pages that another one completes in this step."""
    key_format, value_format = layer.stored.formats
    call = PagedCall(
        step=step.paged,
        key_format=key_format,
        value_format=value_format,
        keys=layer.keys,
        values=layer.values,
        window_keys=layer.window_keys,
        window_values=layer.window_values,
        window_queries=layer.window_queries,
        scale=layer.scale,
        query=query,
        new_keys=key,
        new_values=value,
        **layer.maps,
    )
    if layer.bench is None:
        paged.store(call)
        paged.attend(call, out)
        return
    layer.bench.prepare(step, layer, layer.seen)
    workspace = layer.bench.workspace
    paged.store(call, workspace)
    if step.batch.decodes:
        paged.attend(replace(call, step=step.decodes, new_keys=None, new_values=None), out, workspace)
    for chunk in step.batch.chunks:
        attend_chunk(call, chunk, out, FLASH)
