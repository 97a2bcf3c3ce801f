"""Making a folded cache for a model, and switching the model's attention to the one that reads it."""

from numbers import Integral
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers import attentions, originals, restarts
from kvfold.engines.transformers.attention import register
from kvfold.engines.transformers.cache import AnyLayer, FoldedCache
from kvfold.engines.transformers.hybrid import FoldedHybridLayer
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.placing import device_of, has_weights
from kvfold.engines.transformers.planning import CAPS_ALONE, KEPT, LayerPlan, plan_layers
from kvfold.errors import KVFoldError, UnsupportedModelError, warn_once
from kvfold.methods import Method
from kvfold.plan import choose_kernel


def make_cache(model: PreTrainedModel, method: Method, kernel: str | None, max_length: int | None) -> FoldedCache:
    """See :func:`fold`."""
    given: Any = max_length
    if given is not None and (isinstance(given, bool) or not isinstance(given, Integral) or given < 1):
        raise KVFoldError(f"max_length: {max_length!r} is not allowed; allowed: a number of tokens from 1 on, or None")
    if not has_weights(model):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} is on the meta device, without weights; load it before it is folded "
            "(kvfold.explain needs none)"
        )
    plan = plan_layers(model, method, kernel)
    layers = _layers(plan, model, kernel, max_length)
    kept = [str(i) for i, item in enumerate(plan) if item.spec is None and item.reason != KEPT]
    if kept:
        reasons = "; ".join(sorted({item.reason for item in plan if item.spec is None and item.reason != KEPT}))
        warn_once(f"kvfold: {len(kept)} of {len(plan)} layers stay in full precision ({reasons}): {', '.join(kept)}")
    folded = [item for item in plan if item.spec is not None]
    if any(item.caps_alone for item in folded):
        warn_once(f"kvfold: {CAPS_ALONE}; load the model with attn_implementation='eager'")
    if folded:
        _switch(model, attentions.storing(model))
        originals.note(model)
    restarts.begin(model)
    for module in (item.module for item in folded if item.module is not None):
        module.kvfold_folds = True  # type: ignore[assignment]
    return FoldedCache(layers, method, model)


@outside_autocast
def _layers(
    plan: list[LayerPlan], model: PreTrainedModel, kernel: str | None, max_length: int | None
) -> list[AnyLayer]:
    """The cache layers of a plan; refused where no kernel serves one."""
    layers: list[AnyLayer] = []
    for item in plan:
        if item.spec is None:
            layers.append(item.own)
            continue
        choose_kernel(item.method, item.spec, device_of(model), kernel)
        layers.append(_folded(item, kernel, max_length))
    return layers


def _switch(model: nn.Module, modules: list[nn.Module]) -> None:
    """Have these modules attend through kvfold."""
    for config in list(originals.configurations(model, modules)):
        if not originals.is_folded(config):
            config._attn_implementation_internal = register(config._attn_implementation)


def _folded(item: LayerPlan, kernel: str | None, max_length: int | None) -> FoldedLayer:
    assert item.spec is not None
    if isinstance(item.own, LinearAttentionAndFullAttentionLayer):
        return FoldedHybridLayer(item.method, item.spec, kernel, max_length, item.own)
    return FoldedLayer(item.method, item.spec, kernel, max_length)
