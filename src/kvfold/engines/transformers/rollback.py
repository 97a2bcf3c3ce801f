"""Calls of a model over a cache: a call that dies before all layers have its tokens is taken back.

The first layer that gets tokens begins a call, and what every layer was before it is kept until the last layer is done.
If the next call begins earlier than that, the one before died. Everything is decided from what the host knows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvfold.engines.transformers.originals import is_folded
from kvfold.engines.transformers.states import crop_states, spare_columns, states_of
from kvfold.errors import CacheStateError

REPLACED = DynamicLayer, DynamicSlidingWindowLayer
"""Transformers' own layers that replace what they hold, and never write to it."""


class Call:
    """One call of a model: what its layers were before it.

    Parameters
    ----------
    layers : sequence of cache layers
    expected : set of int
        Layers that get every call's tokens.
    length : int
        Columns the cache held before.

    Attributes
    ----------
    first : int or None
        Layer at which the call began.
    missing : set of int
        Layers that do not have the call's tokens yet; the call is over when there are none.
    mask : Tensor or None
        Attention mask whose older columns were found to be those of the cache.
    again : int or None
        First tokens of the call that the cache holds already; None: nobody has looked.
    """

    def __init__(self, layers: Sequence[Any], expected: set[int], length: int) -> None:
        self.layers, self.length = layers, length
        self.missing = set(expected)
        self.before: dict[int, Any] = {}
        self.first: int | None = None
        self.last: int | None = None
        self.mask: torch.Tensor | None = None
        self.again: int | None = None

    def reach(self, index: int) -> None:
        """Layer ``index`` is about to get the call's tokens."""
        layer = self.layers[index]
        self.before[index] = layer.snapshot() if hasattr(layer, "snapshot") else dict(vars(layer))
        self.first = index if self.first is None else self.first
        self.last = index
        if hasattr(layer, "running"):
            layer.running = self, index

    def hide(self, mask: torch.Tensor, hidden: list[int]) -> None:
        """Have all folded layers drop the newest tokens of each sequence, which the call's mask hides. If the call dies, that
        stands."""
        folded = [
            (i, layer) for i, layer in enumerate(self.layers) if hasattr(layer, "snapshot") and layer.is_initialized
        ]
        if any(layer.columns.count != self.length for _, layer in folded):
            raise CacheStateError(
                "attention_mask: hides tokens that the cache holds, and layers before had another mask; allowed: one for all"
            )
        for index, layer in folded:
            layer.hide(mask, hidden)
            if index in self.before:
                self.before[index] = layer.snapshot()

    def read_again(self, count: int) -> None:
        """The call's first ``count`` tokens are held already.

        Raises
        ------
        CacheStateError
            If there are such, and layers that are not folded.
        """
        own = [index for index, layer in enumerate(self.layers) if not hasattr(layer, "snapshot")]
        if count and own:
            raise CacheStateError(
                f"input_ids: assisted generation reads the whole prompt again, of which the cache holds {count} tokens, and "
                f"layers that are not folded ({', '.join(map(str, own))}) would hold them twice; allowed: a new cache, or "
                "generate() without a draft"
            )
        self.again = count

    def finish(self, index: int) -> None:
        """Layer ``index`` has the call's tokens and attended to them."""
        self.missing.discard(index)
        if not self.missing:
            self._forget()

    def _forget(self) -> None:
        for index in self.before:
            if hasattr(self.layers[index], "running"):
                self.layers[index].running = None
        self.before.clear()
        self.mask = None

    def mask_sizes(self, index: int, query_length: int) -> tuple[int, int]:
        """Columns and their offset that layer ``index`` would have told before the call; the layer itself stays as it is."""
        layer, before = self.layers[index], self.before[index]
        if hasattr(layer, "snapshot"):
            return before.columns + query_length, 0
        twin = object.__new__(type(layer))
        vars(twin).update({**vars(layer), **before})
        return twin.get_mask_sizes(query_length)

    def take_back(self, within: bool = False) -> bool:
        """Make every layer what it was; returns whether any had taken tokens.

        ``within`` the next call, layers that are not folded may have begun with it: they are not even emptied then.

        Raises
        ------
        CacheStateError
            If a layer that is not folded has overwritten what it was.
        """
        stuck = [index for index, layer in enumerate(self.layers) if not _reversible(layer)]
        if stuck and (self.length or within):
            raise CacheStateError(
                f"cache: the last call of the model ended before all layers had its tokens, and layer {stuck[0]} "
                f"({type(self.layers[stuck[0]]).__name__}) cannot go back to the {self.length} tokens before it; call "
                "reset() and pass all tokens again"
            )
        for index in stuck:
            forget_keys(self.layers[index])
        changed = bool(stuck)
        for index, before in self.before.items():
            layer = self.layers[index]
            if index in stuck:
                continue
            if hasattr(layer, "restore"):
                changed |= layer.columns.count != before.columns
                layer.restore(before)
            else:
                changed = True
                vars(layer).clear()
                vars(layer).update(before)
        self.missing.clear()
        self._forget()
        return changed


def _reversible(layer: Any) -> bool:
    """Whether a snapshot of a layer stays what it is while the layer goes on: what it holds is replaced, never written to."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False
    if hasattr(layer, "snapshot") or type(layer).__name__ == "DummyLayer":
        return True
    return type(layer) in REPLACED


def crop_layers(layers: Sequence[Any], count: int, total: int) -> None:
    """Take the newest ``count`` of ``total`` columns away from all layers, or from none.

    Raises
    ------
    CacheStateError
        If a sliding window or a convolution would lack tokens before them.
    """
    windows = {i: _spare(layer, count) for i, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer}
    states = {i: spare_columns(layer, total) for i, layer in enumerate(layers) if states_of(layer)}
    most = windows | states
    stuck = [i for i, spare in most.items() if count > spare and count < total]
    if stuck:
        kinds = (("sliding windows", windows), ("convolutions", states))
        what = " and ".join(name for name, of in kinds if any(i in of for i in stuck))
        raise CacheStateError(
            f"cache: crop({-count}) is not possible: the {what} of layers {', '.join(map(str, stuck))} can lose "
            f"{min(most[i] for i in stuck)} tokens; allowed: at most so many, which are those of the calls since "
            "activate_past_recording(). Else reset() the cache and prefill again"
        )
    for layer in layers:
        if type(layer) in REPLACED:
            _crop_own(layer, count)
        elif type(layer) is LinearAttentionLayer:
            crop_states(layer, count, total)
        else:
            layer.crop(-count)


def _spare(layer: DynamicSlidingWindowLayer, count: int) -> int:
    """Columns that a window can lose so that it has all that the next call sees; all of them, always."""
    total = layer.cumulative_length
    if count >= total or layer.keys is None:
        return count
    held = layer.keys.shape[-2]
    return total if held == total else held - layer.sliding_window + 1


def forget_keys(layer: Any) -> None:
    """A layer's keys and values as of a new one. The ``reset`` of older Transformers (5.17) leaves zeros, as many as there were
    keys, and the next call attends to them."""
    for keys, there in ((("keys", "values"), "is_initialized"), (("indexer_keys",), "is_indexer_initialized")):
        if hasattr(layer, there):
            vars(layer).update(dict.fromkeys(keys), **{there: False})
    layer.reset()


def _crop_own(layer: DynamicLayer, count: int) -> None:
    """Take the newest ``count`` columns from a layer that is not folded. One that keeps none takes another batch later."""
    if count > 0 and count >= layer.get_seq_length():
        forget_keys(layer)
    elif layer.is_initialized and (count or getattr(layer, "record_past", False)):
        layer.crop(-count)


def fed(model: nn.Module | None, layers: Sequence[Any]) -> set[int]:
    """Layers that get keys and values in every call. Not those of which the model says that nothing attends there, or that only
    cross-attention does, which may have nothing to look at."""
    named: dict[int, list[str]] = {}
    for module in model.modules() if model is not None else ():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            named.setdefault(index, []).append(type(module).__name__)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    kinds = list(getattr(text, "layers_block_type", None) or ())
    attends = {i: [n for n in names if "attention" in n.lower() or "attn" in n.lower()] for i, names in named.items()}

    def idle(index: int, layer: Any) -> bool:
        if isinstance(layer, LinearAttentionCacheLayerMixin) or not any(attends.values()):
            return False
        if kinds[index : index + 1] == ["recurrent"]:
            return True  # RecurrentGemma kept its states to itself once, beside a cache layer for each
        return index in named and all("Cross" in name for name in attends[index])

    found = [(i, layer) for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
    return {i for i, layer in found if not idle(i, layer)}


def attending(model: nn.Module | None) -> Any:
    """Configuration that says how the model's decoder attends; None where it does not say that kvfold does."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    return text if is_folded(text) else None
