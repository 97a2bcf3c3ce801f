"""What becomes of each layer of a model: folded, kept, or refused by name."""

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers import attentions, originals
from kvfold.engines.transformers.cache import PREFIXES, AnyLayer
from kvfold.engines.transformers.placing import device_of
from kvfold.errors import MethodError, UnsupportedModelError
from kvfold.methods import LayerSpec, Method
from kvfold.plan import packed_for
from kvfold.rope import rope_of

OWN_KEYS = "PREFIX_TUNING", "CARTRIDGE"
"""PEFT's kinds of adapters that are keys and values."""
KEPT = "kept in full precision, as the method says"
CAPS_ALONE = (
    "the model's scores are soft-capped, which Transformers' sdpa attention does not compute: folded layers cap them, the "
    "model's own attention does not"
)


class LayerPlan:
    """Whether a layer is folded: its method, spec and attention module, or the cache layer it keeps and why."""

    def __init__(
        self, spec: LayerSpec | None, own: AnyLayer, reason: str, method: Method, module: nn.Module | None = None
    ) -> None:
        self.spec, self.own, self.reason, self.method, self.module = spec, own, reason, method, module

    @property
    def caps_alone(self) -> bool:
        """Whether the layer's scores are capped where it is folded, and not where it is not."""
        capped = self.spec is not None and self.spec.softcap is not None
        return capped and originals.previous_of(getattr(self.module, "config", None)) == "sdpa"


@outside_autocast
def plan_layers(model: PreTrainedModel, method: Method, kernel: str | None = None) -> list[LayerPlan]:
    """What becomes of each layer of ``model`` under ``method``; codes are packed as ``kernel``, or the first kernel that can
    serve the layer in any order, reads them.

    Raises
    ------
    UnsupportedModelError, MethodError
        As :func:`fold`.
    """
    model = transformer(model)
    config = model.config.get_text_config(decoder=True)
    _check_kind(model, config)
    _check_interface(model)
    method.check_model(config)
    rope = rope_of(model) if method.pre_rope else None
    count = config.num_hidden_layers
    method.check_layers(count)
    own: list[Any] = list(DynamicCache(config=config).layers)
    own += [DynamicLayer() for _ in range(count - len(own))]
    modules = attentions.of_decoder(model)
    sizes = list(getattr(config, "per_layer_config", None) or [])
    plan, device = [], device_of(model)
    for index, layer in enumerate(own):
        module = modules.get(index, modules.get(-1))
        own_config = sizes[index] if index < len(sizes) else config
        shape = attentions.shape_of(module, own_config)
        latent = getattr(own_config, "kv_lora_rank", None) is not None
        reason = shape.why_not
        if latent:
            reason = "latent attention (MLA) already stores a compressed cache"
        elif type(layer) not in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
            reason = f"{_kind(layer)} is not folded"
        elif module is not None and (why := attentions.why_not(module)):
            raise UnsupportedModelError(f"model: {type(model).__name__} is not folded: {why}")
        elif not modules:
            raise UnsupportedModelError(
                f"model: {type(model).__name__} is not folded: no module of layer {index} hands its keys to the cache"
            )
        if reason and index in method.named:
            raise MethodError(f"layer {index}: {reason}; leave it out of the method")
        chosen = method.at(index)
        if reason or chosen is None:
            plan.append(LayerPlan(None, layer, reason or KEPT, method))
            continue
        layer_rope = rope if chosen.pre_rope and attentions.rotates(module, config, index) else None
        softcap = getattr(module, "attn_logit_softcapping", None)
        spec = LayerSpec(
            index, count, shape.heads, shape.kv_heads, shape.head_dim, model.dtype, layer_rope, softcap=softcap
        )
        _check_shapes(chosen, spec)
        plan.append(LayerPlan(packed_for(chosen, spec, device, kernel), layer, "", chosen, module))
    if all(item.spec is None for item in plan) and any(item.reason == KEPT for item in plan):
        raise MethodError(f"keep: {method} folds no layer of this model; allowed: to leave some")
    return plan


def _check_interface(model: nn.Module) -> None:
    """Refuse a model none of whose modules attends through Transformers' attention functions."""
    for kind in {type(module) for module in model.modules()}:
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None and not attentions.LOOKUPS.isdisjoint(code.co_names):
            return
    raise UnsupportedModelError(
        f"model: {type(model).__name__} computes attention itself, or has none; kvfold folds models that attend through "
        "Transformers' attention functions"
    )


def transformer(model: Any) -> PreTrainedModel:
    """The Transformers model that is meant: itself, or inside a compiled model, a PEFT model or another module.

    Raises
    ------
    UnsupportedModelError
        If there is none, or one of several copies, or if PEFT gives it keys of its own.
    """
    wanted = "allowed: a model that Transformers loaded, or a PEFT model of one"
    if isinstance(model, str):
        raise UnsupportedModelError(
            f"model: {model!r} is a name; load it first: transformers.AutoModelForCausalLM.from_pretrained({model!r})"
        )
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} object"
        raise UnsupportedModelError(f"model: {'None' if model is None else what} is not a model; {wanted}")
    if isinstance(model, nn.DataParallel):
        raise UnsupportedModelError(
            "model: DataParallel runs copies of a model, which cannot share one cache; allowed: the model inside, "
            "fold(model.module)"
        )
    adapted = getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if getattr(adapted, "value", adapted) in OWN_KEYS:
        raise UnsupportedModelError(
            f"model: {type(model).__name__} puts a DynamicCache with keys of its own in place of every cache "
            f"(peft_type={getattr(adapted, 'value', adapted)}); {PREFIXES}"
        )
    inside = _models_in(model)
    if not inside:
        raise UnsupportedModelError(f"model: {type(model).__name__} is not a Transformers model; {wanted}")
    if len(inside) > 1:
        names = ", ".join(type(found).__name__ for found in inside)
        raise UnsupportedModelError(
            f"model: {type(model).__name__} has several models inside ({names}); give one of them"
        )
    return inside[0]


def _models_in(module: nn.Module) -> list[PreTrainedModel]:
    """Transformers' models within a module, without those within these."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in _models_in(child)]


def _check_kind(model: PreTrainedModel, config: Any) -> None:
    """Refuse, by name, what no layer of a model could serve."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model: {name} is an encoder-decoder model, whose cache also holds what the encoder gave; kvfold folds decoder "
            "models"
        )
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"is_causal=False: {name} sees later tokens in every call; a folded cache holds what was seen before"
        )
    attending = attentions.storing(model)
    if attending and not getattr(config, "is_decoder", True) and not any(map(attentions.is_causal, attending)):
        raise UnsupportedModelError(
            f"is_decoder=False: {name} is an encoder, which sees later tokens and goes on from no cache; allowed: decoders"
        )
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(f"num_kv_shared_layers={shared}: models with shared keys are not folded")
    if getattr(config, "cross_attention_layers", None) is not None:
        raise UnsupportedModelError(
            f"cross_attention_layers={config.cross_attention_layers}: {name} keeps an image's keys in its cache; models with "
            "cross-attention are not folded"
        )
    dynamic = getattr(model, "_supports_default_dynamic_cache", None)
    if dynamic is not None and not dynamic():
        raise UnsupportedModelError(f"model: {name} takes a cache of its own only, which is not folded")
    for field in ("num_hidden_layers", "hidden_size"):
        if not isinstance(getattr(config, field, None), int):
            raise UnsupportedModelError(f"model: {name} has no {field} in its text configuration: no attention to fold")


def _kind(layer: AnyLayer) -> str:
    if getattr(layer, "is_sliding", False):
        return "sliding-window attention"
    named = {"DynamicIndexedLayer": "indexed attention", "DummyLayer": "a layer without keys of its own"}
    if type(layer).__name__ in named:
        return named[type(layer).__name__]
    return "linear attention" if "Linear" in type(layer).__name__ else type(layer).__name__


def _check_shapes(method: Method, spec: LayerSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModelError(
            f"model: {spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} key/value heads"
        )
    method.check_shape(spec)
