"""One prompt under many methods: the model works on it once, and every method folds the same keys, values and queries.

The first call of a folded cache attends exactly: what the model computes does not depend on the method. A prompt of 16,000
tokens takes a model longer than folding it and scoring some hundred tokens after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.names import passing

MEMORY = 4
"""A prompt is kept where it takes at most this part of what is free on the device."""
ON_CPU = 2 << 30
"""Bytes at most of a prompt that is kept on a CPU."""


class Taken(NamedTuple):
    """What a layer was given: see :meth:`FoldedLayer.append`."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    position_ids: torch.Tensor | None


class SharedPrompt:
    """A prompt's first call, run once by the model and then given to other caches.

    All caches are of one model, and all calls are of the same tokens. Caches with layers that are neither folded nor plain
    Transformers layers are filled by the model, each anew, and so are all where a prompt would not fit into memory.
    """

    def __init__(self) -> None:
        self.kept: dict[int, Taken] | None = None

    def prefill(self, model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> None:
        """Put ``ids`` ``[batch, tokens]``, the same each time, into an empty cache."""
        if self.kept is not None and _takes(cache):
            self._give(cache)
            return
        with torch.inference_mode(), self._recording(model, cache, ids.numel()):
            model(ids, **passing(model, cache), use_cache=True, logits_to_keep=1)

    @contextmanager
    def _recording(self, model: PreTrainedModel, cache: Cache, tokens: int) -> Iterator[None]:
        layers = _all_folded(cache)
        if self.kept is not None or layers is None or not _fits(model, layers, tokens):
            yield
            return
        with taking(layers) as taken:
            yield
        if len(taken) == len(layers):
            self.kept = taken

    def _give(self, cache: Cache) -> None:
        assert self.kept is not None
        with torch.inference_mode():
            for index, taken in self.kept.items():
                layer = cache.layers[index]
                key, value = cache.update(taken.key, taken.value, index)
                if isinstance(layer, FoldedLayer):
                    layer.append(key, value, taken.query, None, taken.position_ids)
                    layer.finish()


@contextmanager
def taking(layers: Sequence[FoldedLayer]) -> Iterator[dict[int, Taken]]:
    """What layers are given in a call without padding, by the layer's number in its model."""
    taken: dict[int, Taken] = {}
    before = [vars(layer).get("append") for layer in layers]
    for layer in layers:
        vars(layer)["append"] = _recorder(layer, taken)  # in place of the method until the call is over
    try:
        yield taken
    finally:
        for layer, append in zip(layers, before, strict=True):
            if append is None:
                del vars(layer)["append"]
            else:
                vars(layer)["append"] = append


def _recorder(layer: FoldedLayer, taken: dict[int, Taken]) -> Any:
    append = layer.append

    def record(key: Any, value: Any, query: Any, valid: Any, position_ids: Any = None, pack: bool = True) -> None:
        if valid is None:
            taken[layer.spec.layer_idx] = Taken(key, value, query, position_ids)
        append(key, value, query, valid, position_ids, pack)

    return record


def _all_folded(cache: Cache) -> list[FoldedLayer] | None:
    """The layers, if each of them is folded: what is recorded has to be all that others may ask for."""
    folded = cache.folded if isinstance(cache, FoldedCache) else []
    return folded if folded and len(folded) == len(cache.layers) else None


def _takes(cache: Cache) -> bool:
    return isinstance(cache, FoldedCache) and all(
        isinstance(layer, FoldedLayer) or type(layer) is DynamicLayer for layer in cache.layers
    )


def _fits(model: PreTrainedModel, layers: Sequence[FoldedLayer], tokens: int) -> bool:
    specs = [layer.spec for layer in layers]
    width = sum((2 * spec.num_kv_heads + spec.num_heads) * spec.head_dim for spec in specs)
    needed = width * tokens * model.dtype.itemsize
    if model.device.type != "cuda":
        return needed <= ON_CPU
    free, _ = torch.cuda.mem_get_info(model.device)
    return needed * MEMORY <= free + torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(
        model.device
    )
