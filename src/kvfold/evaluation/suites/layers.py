"""What folding does to each layer's attention: to its scores, its weights and its output, on the queries of a text.

A prompt is run once; its keys, values and queries are folded by every method, and what is stored is decoded and attended to in
float32. So a layer's error is its own: no other layer's is in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.engines.transformers.shared import SharedPrompt
from kvfold.errors import KVFoldError
from kvfold.evaluation.sizes import sizes_of
from kvfold.evaluation.suites.base import Item, Measure, Own, Prompt, Suite
from kvfold.evaluation.suites.text import Divergence
from kvfold.evaluation.text import Text

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.methods.base import Method

QUERIES = 64
"""Newest tokens whose queries are asked with."""
DIRECTIONS = 5
"""Of the queries' subspace, as many as SQuat's rank."""
ERRORS = ("output", "weights", "scores", "keys", "values", "subspace")


@dataclasses.dataclass(frozen=True)
class LayerErrors(Suite):
    """Windows of texts, as those of ``divergence``.

    Attributes
    ----------
    tokenizer
    by_name
        The texts; each is a task.
    """

    tokenizer: PreTrainedTokenizerBase
    by_name: dict[str, Text]

    name = "layers"
    summary = "errors of each layer's attention alone: of its output, weights, scores, keys and values"
    measures = tuple(Measure(name, higher_is_better=False, shown="number") for name in ERRORS)
    along = "layer"

    @cached_property
    def _windows(self) -> Divergence:
        return Divergence(self.tokenizer, self.by_name)

    @cached_property
    def _last(self) -> dict[str, SharedPrompt]:
        """The newest item's prompt, as the model ran it."""
        return {}

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        return self._windows.items(lengths, limit, seeds)

    def prompt(self, item: Item) -> Prompt:
        """The last token is there because a prompt has one that is not prefilled; nothing reads it."""
        found = self._windows.prompt(item)
        return Prompt(found.ids[:, : found.prefilled + 1], found.prefilled)

    def ask(self, model: PreTrainedModel, item: Item, method: Method, chunk: int) -> Own:
        prompt = self.prompt(item)
        ids = prompt.ids[:, : prompt.prefilled].to(model.device)
        if item.name not in self._last:
            self._last.clear()
            self._last[item.name] = SharedPrompt()
            self._run(model, "none", ids, item)
        kept = self._last[item.name].kept
        if kept is None:
            raise KVFoldError(
                "suite: layers needs a model whose layers all fold, and memory for a prompt's keys, values and queries"
            )
        cache = self._run(model, method, ids, item)
        modules: list[Any] = list(model.modules())
        scales = {m.layer_idx: float(m.scaling) for m in modules if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
        found = []
        with torch.inference_mode():
            for index, layer in enumerate(cache.folded):
                taken = kept[index]
                whole = (taken.key[0].float(), taken.value[0].float())
                scale = scales.get(layer.spec.layer_idx, layer.spec.head_dim**-0.5)
                found.append(errors(taken.query[0].float(), whole, layer.decoded(0), scale))
        packed = any(any(layer.packed) for layer in cache.folded)
        series = {name: [row[name] for row in found] for name in ERRORS}
        means = {name: math.fsum(values) / len(values) for name, values in series.items()}
        tested = QUERIES if packed else 0
        return Own(dict(means), QUERIES, tested, sizes_of(cache), "", series)

    def _run(self, model: PreTrainedModel, method: str | Method, ids: torch.Tensor, item: Item) -> FoldedCache:
        cache = kvfold.fold(model, method, max_length=ids.shape[1])
        try:
            self._last[item.name].prefill(model, ids, cache)
        finally:
            kvfold.unfold(model)
        if len(cache.folded) < len(cache.layers):
            raise KVFoldError(f"methods: {method} leaves layers unfolded; layers compares layer by layer")
        return cache

    def options(self) -> dict[str, Any]:
        return {"queries": QUERIES, "directions": DIRECTIONS, "version": self.version}

    def texts(self) -> dict[str, str]:
        return self._windows.texts()


def errors(
    query: torch.Tensor,
    whole: tuple[torch.Tensor, torch.Tensor],
    folded: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> dict[str, float]:
    """Errors of one layer.

    Parameters
    ----------
    query : Tensor [num_heads, tokens, head_dim], float32
        The newest of them are asked with.
    whole, folded : Tensors [num_kv_heads, tokens, head_dim], float32
        Keys and values, exact and as decoded.

    Returns
    -------
    dict
        ``output``: RMS of the difference over that of the output. ``weights``: half the sum of the differences of attention
        weights (total variation, 0 to 1), mean over queries. ``scores``: RMS of the differences of scaled scores, in nats.
        ``keys``, ``values``: RMS of the differences over that of the vectors, about their mean. ``subspace``: share of the
        keys' squared differences that lies in the first directions of the queries, over the share of as many of all
        directions: 1 is no preference.
    """
    (key, value), (key_, value_) = whole, folded
    heads, tokens, dim = key.shape
    count = min(QUERIES, tokens)
    asked = query[:, tokens - count :].unflatten(0, (heads, -1))
    hidden = torch.ones(count, tokens, dtype=torch.bool, device=key.device).triu(tokens - count + 1)
    sums = dict.fromkeys(("output", "of_output", "weights", "scores"), 0.0)
    inside = 0.0
    for h in range(heads):
        exact, near = (
            (asked[h] @ k.mT * scale).masked_fill(hidden, -math.inf) for k in (key[h : h + 1], key_[h : h + 1])
        )
        sums["scores"] += float((exact - near).masked_fill(hidden, 0).square().sum())
        p, p_ = exact.softmax(-1), near.softmax(-1)
        out, out_ = p @ value[h], p_ @ value_[h]
        sums["weights"] += float((p - p_).abs().sum()) / 2
        sums["output"] += float((out - out_).square().sum())
        sums["of_output"] += float(out.square().sum())
        rows = asked[h].flatten(0, 1)
        basis = torch.linalg.eigh(rows.mT @ rows).eigenvectors[:, -DIRECTIONS:]
        inside += float(((key_[h] - key[h]) @ basis).square().sum())
    lost = float((key_ - key).square().sum())
    seen = heads * asked.shape[1] * float((~hidden).sum())
    return {
        "output": math.sqrt(sums["output"] / max(sums["of_output"], 1e-30)),
        "weights": sums["weights"] / (heads * asked.shape[1] * count),
        "scores": math.sqrt(sums["scores"] / seen),
        "keys": _relative(key_, key),
        "values": _relative(value_, value),
        "subspace": inside / lost / (min(DIRECTIONS, dim) / dim) if lost else 1.0,
    }


def _relative(near: torch.Tensor, exact: torch.Tensor) -> float:
    spread = exact - exact.mean(-2, keepdim=True)
    return math.sqrt(float((near - exact).square().sum()) / max(float(spread.square().sum()), 1e-30))
