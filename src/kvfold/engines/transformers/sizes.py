"""What a cache takes, what it will take with more tokens, and how the commands say so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvfold.formats import PagedFormat
from kvfold.methods import Observation
from kvfold.sheet import as_bytes

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.engines.transformers.layer import FoldedLayer

HORIZON = 4096
"""Tokens at which a young cache's size is foretold, where the model's context reaches as far."""


@dataclass(frozen=True)
class Sizes:
    """What a cache takes.

    Attributes
    ----------
    tokens : int
    cache_bytes, full_cache_bytes : int
        Of the tensors that exist, and of a full-precision cache of the same tokens in the model's dtype.
    fp16_cache_bytes : int
        Of a full-precision cache of the same tokens in 16 bits.
    """

    tokens: int
    cache_bytes: int
    full_cache_bytes: int
    fp16_cache_bytes: int

    @property
    def ratio(self) -> float:
        """How many times smaller than in the model's dtype."""
        return self.full_cache_bytes / max(self.cache_bytes, 1)

    @property
    def ratio_fp16(self) -> float:
        """How many times smaller than in 16 bits."""
        return self.fp16_cache_bytes / max(self.cache_bytes, 1)

    def said(self, dtype: str) -> str:
        """``3.10 MiB instead of 20.60 MiB in float32: 6.65x smaller, 3.32x smaller than in 16 bits``."""
        text = (
            f"{as_bytes(self.cache_bytes)} instead of {as_bytes(self.full_cache_bytes)} in {dtype}: {times(self.ratio)}"
        )
        if self.fp16_cache_bytes == self.full_cache_bytes:
            return text
        compared = times(self.ratio_fp16)
        return f"{text}, {compared} {'as' if compared == EQUAL else 'than'} in 16 bits"


EQUAL = "as large"


def times(ratio: float) -> str:
    """``4.90x smaller``, ``1.18x larger``, or ``as large`` within two percent."""
    if abs(ratio - 1) <= 0.02:
        return EQUAL
    return f"{ratio:.2f}x smaller" if ratio > 1 else f"{1 / max(ratio, 1e-9):.2f}x larger"


def now(cache: FoldedCache, dtype: torch.dtype) -> Sizes:
    """Of a cache as it is; ``dtype``: the model's."""
    full = cache.full_nbytes()
    return Sizes(int(cache.get_seq_length()), int(cache.nbytes()["total"]), full, full * 2 // dtype.itemsize)


def packs_at(cache: FoldedCache) -> int | None:
    """Tokens of a sequence when its first block is packed; None if no layer is folded."""
    folded = cache.folded
    return min((layer.method.sink + layer.method.recent + layer.block for layer in folded), default=None)


def folds(cache: FoldedCache) -> bool:
    """Whether the method stores anything in fewer bits than the model; ``none`` does not."""
    layers = ((layer.key_format.bits + layer.value_format.bits, layer.spec.dtype.itemsize) for layer in cache.folded)
    return any(bits < 16 * item for bits, item in layers)


def is_packed(cache: FoldedCache) -> bool:
    """Whether anything is packed yet."""
    return any(len(layer.slabs) for layer in cache.folded)


def foretold(cache: FoldedCache, tokens: int, dtype: torch.dtype) -> Sizes:
    """Of the same cache after a prompt of ``tokens`` tokens; computed from its formats, nothing is run.

    Parameters
    ----------
    cache : FoldedCache
        In use, with one sequence: layers that are not folded are extrapolated.
    """
    total = full = 0
    tables: dict[int, int] = {}
    for layer in cache.layers:
        if layer in cache.folded:
            total += _layer_bytes(layer, tokens)
            full += 2 * layer.spec.num_kv_heads * layer.spec.head_dim * dtype.itemsize * tokens
            tables.update((t.data_ptr(), t.nbytes) for t in layer.tables())
            continue
        for side in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(side, torch.Tensor) and side.ndim == 4 and side.shape[-2]:
                held = min(tokens, getattr(layer, "sliding_window", None) or tokens)
                total += side.nbytes // side.shape[-2] * held
                full += side.nbytes // side.shape[-2] * held
    return Sizes(tokens, total + sum(tables.values()), full, full * 2 // dtype.itemsize)


def _layer_bytes(layer: FoldedLayer, tokens: int) -> int:
    """Packed storage, windows and encoder state of one sequence."""
    method, spec, heads = layer.method, layer.spec, layer.spec.num_kv_heads
    item = layer.dtype.itemsize
    blocks = math.ceil(layer.packed_length(tokens) / layer.block / layer.layout.page_blocks) * layer.layout.page_blocks
    total = 2 * heads * spec.head_dim * item * (method.sink + layer.ring.base)
    for form in (layer.key_format, layer.value_format):
        total += sum(t.nbytes for t in form.allocate(1, heads, blocks, "meta").values())
        if isinstance(form, PagedFormat) and not form.page:
            total += heads * form.page_bytes
    if layer.following.active:
        window = method.query_window
        queries = torch.linspace(
            -1, 1, spec.num_heads * window * spec.head_dim, dtype=torch.float32, device=layer.device
        )
        seen = Observation(
            queries.view(1, spec.num_heads, window, spec.head_dim).to(layer.dtype),
            torch.arange(window, device=layer.device).unsqueeze(0),
        )
        total += sum(t.nbytes for t in method.observe(seen, spec).values())
        if not method.paper:
            total += spec.num_heads * spec.head_dim * item * layer.following.most_slots
    return total


def horizon(max_context: int | None) -> int:
    """Tokens at which sizes are foretold."""
    return min(HORIZON, max_context or HORIZON)


def to_dict(cache: FoldedCache, dtype: torch.dtype, max_context: int | None) -> dict[str, Any]:
    """Sizes for JSON: now, by part, and foretold."""
    here, parts, bits = now(cache, dtype), cache.nbytes(), cache.effective_bits()
    ahead = foretold(cache, horizon(max_context), dtype)
    return {
        "cache_tokens": here.tokens,
        "cache_bytes": here.cache_bytes,
        **{f"{name}_bytes": parts[part] for name, part in PARTS.items()},
        "full_cache_bytes": here.full_cache_bytes,
        "fp16_cache_bytes": here.fp16_cache_bytes,
        "ratio": here.ratio,
        "ratio_fp16": here.ratio_fp16,
        "effective_bits": bits if math.isfinite(bits) else None,
        "kernel": ", ".join(sorted({layer.kernel.name for layer in cache.folded if layer.is_initialized})),
        "packs_at": packs_at(cache),
        "foretold": {"tokens": ahead.tokens, "cache_bytes": ahead.cache_bytes, "ratio_fp16": ahead.ratio_fp16},
    }


PARTS = {"packed": "packed", "window": "windows", "state": "state", "table": "tables"}
"""Names of rows' fields, and of ``FoldedCache.nbytes``."""


def said(cache: FoldedCache, dtype: torch.dtype) -> str:
    """One phrase: the cache's size, or that nothing is packed yet."""
    here = now(cache, dtype)
    name = str(dtype).removeprefix("torch.")
    if not folds(cache):
        return f"cache of {here.tokens:,} tokens: {here.said(name)}"
    if is_packed(cache):
        packed = max(max(layer.packed) for layer in cache.folded if layer.is_initialized)
        return f"cache of {here.tokens:,} tokens, {packed:,} of them packed: {here.said(name)}"
    return (
        f"cache of {here.tokens:,} tokens: nothing is packed yet, {as_bytes(here.cache_bytes)} of windows "
        f"({as_bytes(here.full_cache_bytes)} in {name} without them)"
    )


def ahead(cache: FoldedCache, dtype: torch.dtype, max_context: int | None) -> str:
    """One sentence on what a young cache will be; empty for one that is half as long as what would be foretold."""
    begins, tokens, at = packs_at(cache), int(cache.get_seq_length()), horizon(max_context)
    if begins is None or not folds(cache) or 2 * tokens >= at:
        return ""
    begin = "" if is_packed(cache) else f"packing begins at {begins:,} tokens; "
    if begins > at:
        return f"{begin}the model's context ends at {at:,}"
    return f"{begin}at {at:,} tokens: {foretold(cache, at, dtype).said(str(dtype).removeprefix('torch.'))}"
