"""The attention function that Transformers calls, and switching a model to it and back."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold import attentions, kernels, originals
from kvfold.arithmetic import outside_autocast
from kvfold.cache import AnyLayer, FoldedCache
from kvfold.errors import KVFoldError, MethodError, UnsupportedModelError, warn_once
from kvfold.formats.paged import plain
from kvfold.hybrid import FoldedHybridLayer
from kvfold.kernels import NewTokens
from kvfold.kernels.prompt import attend_prompt
from kvfold.layer import FoldedLayer
from kvfold.methods import DEFAULT_METHOD, LayerSpec, Method, get
from kvfold.originals import IMPLEMENTATION
from kvfold.rope import Rope, rope_of

# arguments of attention functions that change the scores in ways a folded layer does not compute
REFUSED = ("position_bias", "sliding_window")


@torch.compiler.disable
def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    previous: str | None = "sdpa",
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Attention over a folded layer if ``key`` comes from one, and otherwise that of the implementation of before.

    Parameters
    ----------
    query : Tensor [batch, num_heads, tokens, head_dim]
    key, value : Tensor [batch, num_kv_heads, tokens, head_dim]
        This call's tokens, after RoPE, as :meth:`FoldedLayer.update` returned them.
    attention_mask : Tensor or None
        bool [batch, columns]: False at padding; as :func:`padding_mask` makes it.
    previous : str or None
        Implementation that the model had before it was folded.

    Returns
    -------
    Tensor [batch, tokens, num_heads, head_dim], None
        What is not a folded layer: whatever the implementation of before returns.

    Notes
    -----
    The first call attends exactly to its own keys and values. A later call reads what is packed for the older tokens
    and its own tokens in full precision. The tokens are appended after attending.
    """
    layer: FoldedLayer | None = getattr(key, "_kvfold_layer", None)
    options = {"dropout": dropout, "scaling": scaling, **kwargs}
    if layer is None:
        if getattr(key, "_kvfold_kept", False):
            attention_mask = _square_mask(previous, module, attention_mask, query, key.shape[-2])
        elif getattr(module, "kvfold_folds", False):
            warn_once(
                "kvfold: a folded model was called without its folded cache: nothing is folded. Pass the cache as "
                "past_key_values, or call kvfold.unfold(model)"
            )
        return originals.attend(previous, module, query, key, value, attention_mask, **options)
    out = _folded_attention(layer, module, query.to(key.dtype), key, value, attention_mask, previous, options)
    if query.requires_grad and not out.requires_grad and torch.is_grad_enabled():
        out = _NoGradients.apply(out, query)
    return out.to(query.dtype), None


class _NoGradients(torch.autograd.Function):
    """What a kernel computed without gradients: to ask for them is an error, not a part of them."""

    @staticmethod
    def forward(_: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedModelError(
            "backward: gradients do not pass a folded cache's kernels; allowed: the first call on a cache, or "
            "kernel='reference'"
        )


@outside_autocast
def _folded_attention(
    layer: FoldedLayer,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    previous: str | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """:func:`attention_forward` over a folded layer; all tensors are of its dtype."""
    scaling, dropout = options["scaling"], options["dropout"]
    if not layer.pending:
        raise UnsupportedModelError(
            f"layer {layer.spec.layer_idx}: its keys are used by a second layer; models that share keys are not folded"
        )
    layer.pending = False  # whatever follows, the keys arrived here
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if layer.static is not None:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return layer.static_step(key, value, query, scale, layer.static, sinks).transpose(1, 2).contiguous()
    refused = [name for name in REFUSED if options.get(name) is not None]
    backwards = options.get("is_causal") is False and not layer.is_empty
    if softcap is not None and layer.spec.softcap is None:  # its kernel was chosen for others
        refused.append("softcap")
    if refused or backwards or (dropout and module.training):
        what = ", ".join(refused) or ("is_causal=False" if backwards else "dropout")
        raise UnsupportedModelError(
            f"layer {layer.spec.layer_idx}: a folded cache does not support attention with {what}"
        )
    own_mask = attention_mask
    if layer.is_empty:
        attention_mask = getattr(own_mask, "_kvfold_padding", (own_mask,))[0]
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedModelError(
            f"attention_mask: a folded cache takes padding masks [batch, columns], not {attention_mask.ndim} dimensions"
        )
    tokens = query.shape[-2]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer.check_prompt(options.get("position_ids"), tokens)
    valid = layer.new_columns(attention_mask, tokens)
    if layer.is_empty and (own_mask is not attention_mask or not _is_causal(module, options)):
        mask = _square_mask(previous, module, own_mask, query, tokens)
        out, _ = originals.attend(previous, module, query, key, value, mask, **options)
    elif layer.is_empty:
        mask = None if valid is None else _causal(valid, tokens)
        if softcap is None and sinks is None:
            out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=True)
        else:
            out = attend_prompt(query, key, value, mask, scale, softcap, sinks).transpose(1, 2).contiguous()
    elif layer.writes_first(tokens, valid):
        layer.append(key, value, query, valid, options.get("position_ids"), pack=False)
        out = _attend(layer, query, None, scale, None, sinks)
        layer.pack_due()
        layer.finish()
        return out
    else:
        out = _attend(layer, query, NewTokens(key, value, valid), scale, softcap, sinks)
    layer.append(key, value, query, valid, options.get("position_ids"))
    layer.finish()
    return out


def _attend(
    layer: FoldedLayer,
    query: torch.Tensor,
    new: NewTokens | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """By the layer's kernel; [batch, tokens, num_heads, head_dim]."""
    out = layer.kernel.attend(layer.reader.call(query, new, scale, softcap, sinks))
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _causal(valid: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool [batch, 1, tokens, columns]: causal without padding; a padding query sees itself, so that nothing is NaN."""
    columns = valid.shape[-1]
    causal = torch.ones(tokens, columns, dtype=torch.bool, device=valid.device).tril(columns - tokens)
    itself = torch.eye(columns, dtype=torch.bool, device=valid.device)[columns - tokens :]
    return (causal & valid[:, None, None, :]) | itself


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether a call without a mask is causal, as Transformers decides it."""
    asked = options.get("is_causal")
    return bool(asked if asked is not None else getattr(module, "is_causal", True))


def _square_mask(
    previous: str | None, module: nn.Module, mask: torch.Tensor | None, query: torch.Tensor, columns: int
) -> Any:
    """The mask that the implementation of before would have made, where :func:`padding_mask` left it out."""
    if mask is None or mask.ndim != 2:
        return mask if mask is not None else originals.causal_mask(previous, module, mask, query, columns)
    made = getattr(mask, "_kvfold_square", None)  # to look at a mask, as sdpa's does, waits for the device
    if made is None or made[0] != (previous, columns, query.shape, query.dtype):
        made = (
            (previous, columns, query.shape, query.dtype),
            originals.causal_mask(previous, module, mask, query, columns),
        )
        mask._kvfold_square = made  # type: ignore[attr-defined]
    return made[1]


def padding_mask(
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    previous: str | None = "sdpa",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Transformers' mask function for ``kvfold``: for a folded cache the padding mask itself where attention is causal.

    For everything else, and for layers of a folded cache that are not folded themselves, the mask of the implementation of
    before. Where it is not plainly causal (tokens of an image that see one another), it brings the padding mask along: a
    folded layer's first call attends as the model would.
    """
    folded = isinstance(kwargs.get("kv_offset"), bool)  # FoldedCache.get_mask_sizes says so
    if folded and mask_function is causal_mask_function:
        return attention_mask
    mask = originals.mask_of(previous, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    if folded and mask_function is bidirectional_mask_function:
        raise UnsupportedModelError("model: its attention looks ahead; a folded cache holds what was seen before")
    if folded and mask is not None and _is_plain(mask, mask_function, attention_mask, previous, kwargs):
        return attention_mask
    if folded and mask is not None:
        mask._kvfold_padding = (attention_mask,)
    return attention_mask if folded and mask is None else mask


def _is_plain(
    mask: torch.Tensor, mask_function: Callable, attention_mask: torch.Tensor | None, previous: str | None, options: Any
) -> bool:
    """Whether a later call's mask shows each query all before it and nothing else: what may see one another (tokens of an
    image) is not among its own tokens. Of a single token that is known without looking."""
    if not options["q_offset"]:
        return False
    if options["q_length"] == 1:
        return mask_function.__name__ == "or_mask"  # adds to what is seen, and nothing is left to add
    plain = originals.mask_of(previous, mask_function=causal_mask_function, attention_mask=attention_mask, **options)
    return isinstance(plain, torch.Tensor) and torch.equal(mask, plain)


def _register(previous: str | None) -> str:
    return originals.register(previous, attention_forward, padding_mask)


for _name in (*ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager", None):
    _register(_name)


# ---- switching a model -----------------------------------------------------------------------------------------------


@outside_autocast
def fold(
    model: PreTrainedModel,
    method: str | Method = DEFAULT_METHOD,
    *,
    kernel: str | None = None,
    max_length: int | None = None,
    always: bool = False,
) -> FoldedCache:
    """Make a folded cache for ``model`` and switch the model's attention to the one that reads it.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder, as Transformers loads it, or what wraps one (a compiled or a PEFT model).
    method : str or Method
        ``name`` or ``name:key=value,key=value``; several joined by ``+``, as in ``k=fold:bits=3+v=kivi+keep=0,1``, or
        :class:`kvfold.Pair` and :class:`kvfold.Recipe`; see :func:`kvfold.methods.get`.
    kernel : str or None
        Insist on an attention kernel; None takes the first that supports each layer (``explain`` shows which).
    max_length : int or None
        Allocate packed storage for this many tokens at the first packing, instead of growing.
    always : bool
        Have the model make such a cache by itself for every call that would make one and is given none: ``model(ids)``,
        ``model.generate``, a pipeline. A cache that is passed stays what it is; ``use_cache=False`` and training make none.
        Until :func:`unfold`; :func:`kvfold.folding` is the same for a ``with`` block.

    Returns
    -------
    FoldedCache
        For one batch of sequences; pass it as ``past_key_values``. Make a new one, or ``reset()`` it, for the next
        batch.

    Raises
    ------
    MethodError
        For an unknown or unfitting method.
    UnsupportedModelError
        For a model that cannot be folded; the message says why. Some methods need rotary embeddings, whose rotation they undo.
    KVFoldError
        For an unknown kernel, or a ``max_length`` that is none.

    Notes
    -----
    A later call's ``attention_mask`` says which of its own tokens are padding; tokens already cached stay visible, and a mask
    that hides them is refused.

    Layers that cannot be folded (sliding windows, linear attention, latent attention) keep Transformers' own cache in
    full precision; a warning says so once, and :func:`kvfold.explain` says which.
    """
    model = transformer(model)
    if always:
        from kvfold.always import Wish, begin, check

        check(model)
    cache = make_cache(model, get(method), kernel, max_length)
    if always:
        begin(model, Wish(cache.method, kernel, max_length))
    return cache


def make_cache(model: PreTrainedModel, method: Method, kernel: str | None, max_length: int | None) -> FoldedCache:
    """See :func:`fold`."""
    given: Any = max_length
    if given is not None and (isinstance(given, bool) or not isinstance(given, Integral) or given < 1):
        raise KVFoldError(f"max_length: {max_length!r} is not allowed; allowed: a number of tokens from 1 on, or None")
    if all(parameter.device.type == "meta" for parameter in model.parameters()):
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
    for module in (item.module for item in folded if item.module is not None):
        module.kvfold_folds = True  # type: ignore[assignment]
    return FoldedCache(layers, method, model)


@outside_autocast
def _layers(
    plan: list["LayerPlan"], model: PreTrainedModel, kernel: str | None, max_length: int | None
) -> list[AnyLayer]:
    """The cache layers of a plan; refused where no kernel serves one."""
    layers: list[AnyLayer] = []
    for item in plan:
        if item.spec is None:
            layers.append(item.own)
            continue
        kernels.choose(
            plain(item.method.key_format(item.spec)),
            item.method.value_format(item.spec),
            model.device,
            item.method.pre_rope,
            kernel,
            model.dtype,
            item.spec.softcap,
        )
        layers.append(_folded(item, kernel, max_length))
    return layers


def _switch(model: nn.Module, modules: list[nn.Module]) -> None:
    """Have these modules attend through kvfold."""
    for config in list(originals.configurations(model, modules)):
        if not originals.is_folded(config):
            config._attn_implementation_internal = _register(config._attn_implementation)


def unfold(model: nn.Module) -> None:
    """Give a model back the attention it had before :func:`fold`, and the caches it made; nothing happens if it was not folded.

    Parameters
    ----------
    model : nn.Module
        A folded model, a copy of one, or a module with one inside.

    Raises
    ------
    UnsupportedModelError
        If there is no Transformers model inside.
    """
    from kvfold.always import end

    if not isinstance(model, nn.Module) or not originals.restore(model):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} object has no Transformers model inside; allowed: what fold() was given"
        )
    end(model)


def _folded(item: "LayerPlan", kernel: str | None, max_length: int | None) -> FoldedLayer:
    assert item.spec is not None
    if isinstance(item.own, LinearAttentionAndFullAttentionLayer):
        return FoldedHybridLayer(item.method, item.spec, kernel, max_length, item.own)
    return FoldedLayer(item.method, item.spec, kernel, max_length)


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
    plan = []
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
        layer_rope = rope if chosen.pre_rope and getattr(module, "use_rope", True) else None
        softcap = getattr(module, "attn_logit_softcapping", None)
        spec = LayerSpec(
            index, count, shape.heads, shape.kv_heads, shape.head_dim, model.dtype, layer_rope, softcap=softcap
        )
        _check_shapes(chosen, spec)
        plan.append(LayerPlan(_packed_for(chosen, spec, model.device, kernel), layer, "", chosen, module))
    if all(item.spec is None for item in plan) and any(item.reason == KEPT for item in plan):
        raise MethodError(f"keep: {method} folds no layer of this model; allowed: to leave some")
    return plan


def _check_interface(model: nn.Module) -> None:
    """Refuse a model none of whose modules attends through Transformers' attention functions."""
    for kind in {type(module) for module in model.modules()}:
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None and "get_interface" in code.co_names:
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
        If there is none, or one of several copies.
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


def _packed_for(method: Method, spec: LayerSpec, device: torch.device, kernel: str | None) -> LayerSpec:
    """The spec with codes packed for tensor cores or in plain order, whichever the better kernel reads; where it makes no
    difference, plain on a CPU."""

    def rank(spec: LayerSpec) -> int:
        try:
            formats = plain(method.key_format(spec)), method.value_format(spec)
            choice = kernels.choose(*formats, device, method.pre_rope, kernel, spec.dtype, spec.softcap)
        except KVFoldError:  # the named kernel does not read this order
            return len(kernels.REGISTRY)
        return list(kernels.REGISTRY).index(choice.kernel.name)

    on_cpu = device.type == "cpu"
    return min((replace(spec, fragments=fragments) for fragments in (not on_cpu, on_cpu)), key=rank)


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


__all__ = ["IMPLEMENTATION", "LayerPlan", "Rope", "attention_forward", "fold", "padding_mask", "plan_layers", "unfold"]
