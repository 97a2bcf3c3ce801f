"""A layer's kernels compiled while a server starts: the graphs that vLLM captures then run decode steps only, and a prompt's
kernels would be compiled in the first request."""

import logging
from types import SimpleNamespace

import torch

from kvfold.engines.vllm.settings import PAGE, WINDOW_BLOCK
from kvfold.engines.vllm.step import Batch, Layer, Step, run

log = logging.getLogger("kvfold")
_warm: set[object] = set()
"""Kinds of layers that were warmed in this process."""


def try_to_warm(layer: Layer, num_heads: int, most_tokens: int, most_length: int) -> None:
    """:func:`warm_up`, whose failure is said and ends no server: its first request then compiles what is missing."""
    try:
        with torch.no_grad():
            warm_up(layer, num_heads, most_tokens, most_length)
    except Exception as error:
        layer.unbind()
        log.warning(
            "kvfold: kernels were not compiled ahead (%s: %s); the first request does that", type(error).__name__, error
        )


def warm_up(layer: Layer, num_heads: int, most_tokens: int, most_length: int) -> None:
    """Run a prompt of a few pages, another chunk and a decode step on storage of their own; once for layers that store alike.

    Parameters
    ----------
    layer : Layer
        Not bound to a server's storage yet.
    num_heads : int
        Query heads.
    most_tokens, most_length : int
        Of a step, and of a sequence; what is longer is left out.
    """
    stored = layer.stored
    kind = (
        *(form.describe() for form in stored.formats),
        stored.spec.dtype,
        num_heads,
        stored.spec.num_kv_heads,
        stored.follows,
    )
    if kind in _warm:
        return
    _warm.add(kind)
    method, short = stored.method, 1 if layer.bench is None else layer.bench.workspace.short
    first = method.sink + method.recent + 2 * PAGE + 8
    counts = (min(first, most_tokens, most_length - 1), min(PAGE + short, most_tokens), 1)
    device = torch.device("cpu") if layer.bench is None else layer.bench.workspace.top.device
    layer.bind(*_storage(layer, -(-(sum(counts) + 1) // PAGE), device))
    before = 0
    for tokens in counts:
        if before + tokens <= most_length:
            _rehearse(layer, num_heads, before, tokens, short, -(-most_length // PAGE), device)
            before += tokens
    layer.unbind()


def _storage(layer: Layer, pages: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and windows of one sequence, as a server allocates them; block 0 is nobody's."""
    stored = layer.stored
    spec, size = stored.spec, stored.spec.dtype.itemsize
    cache = torch.zeros(
        1 + pages, spec.num_kv_heads, PAGE, stored.page_bytes // PAGE // size, dtype=spec.dtype, device=device
    )
    blocks = 1 + pages * PAGE // WINDOW_BLOCK
    window = torch.zeros(
        blocks, spec.num_kv_heads, WINDOW_BLOCK, (2 + stored.follows) * spec.head_dim, dtype=spec.dtype, device=device
    )
    return cache, window


def _rehearse(
    layer: Layer, num_heads: int, before: int, tokens: int, short: int, width: int, device: torch.device
) -> None:
    """A step of one sequence of ``before`` tokens that is given ``tokens`` more, zeros. ``width``: pages of a server's table,
    whose strides kernels are compiled for."""
    spec, end = layer.stored.spec, before + tokens

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def table(used: int, blocks: int) -> torch.Tensor:
        out = torch.zeros(1, blocks, dtype=torch.int32, device=device)
        out[0, :used] = torch.arange(1, 1 + used)
        return out

    packed = SimpleNamespace(
        block_table=table(-(-end // PAGE), width), query_start=numbers(0, tokens), seq_lens=numbers(end),
        max_query_len=tokens, batch=Batch.of([0, tokens], [end], short),
    )  # fmt: skip
    each = PAGE // WINDOW_BLOCK
    windows = table(-(-end // PAGE) * each, width * each)
    step = Step.of(layer.stored.method, packed, windows, WINDOW_BLOCK, layer)
    query, key, value, out = (
        torch.zeros(tokens, heads, spec.head_dim, dtype=spec.dtype, device=device)
        for heads in (num_heads, spec.num_kv_heads, spec.num_kv_heads, num_heads)
    )
    run(layer, step, query, key, value, out)
