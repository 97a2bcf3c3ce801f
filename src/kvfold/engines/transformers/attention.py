"""The attention function that Transformers calls."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers import names, originals
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.prompts import check_prompt, read_again
from kvfold.engines.transformers.tracing import NOT_TRACED
from kvfold.engines.transformers.weights import among, asked, weights_of
from kvfold.errors import CacheStateError, UnsupportedModelError, warn_once
from kvfold.kernels import NewTokens
from kvfold.kernels.cpu.importing import NumbaError
from kvfold.kernels.device import launching
from kvfold.kernels.prompt import attend_prompt

# arguments of attention functions that change the scores in ways a folded layer does not compute
REFUSED = ("position_bias", "sliding_window")


@torch.compiler.disable(reason=NOT_TRACED)
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
    Tensor [batch, tokens, num_heads, head_dim]
    Tensor [batch, num_heads, tokens, columns] or None
        Weights, where they are asked for and the implementation of before is eager, which gives them; see :func:`weights_of`.
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
        elif getattr(module, "kvfold_folds", False) and not module.training:
            warn_once(
                "kvfold: a folded model was called without its folded cache: nothing is folded. Pass the cache as "
                f"{names.CACHE}=, or call kvfold.unfold(model)"
            )
        return originals.attend(previous, module, query, key, value, attention_mask, **options)
    recorded = layer.recorded  # before this call
    with launching(query.device):
        attend = _folded_attention
        if again := read_again(layer, options.get("position_ids"), query.shape[-2]):
            attend = partial(_from, again)
        out, weights = attend(layer, module, query.to(key.dtype), key, value, attention_mask, previous, options)
    if torch.is_grad_enabled() and query.requires_grad:
        if recorded or not out.requires_grad:
            out = _NoGradients.apply(out, query, CONSTANT if recorded else NO_GRADIENTS)
        layer.recorded = recorded or key.requires_grad
    return out.to(query.dtype), weights


NO_GRADIENTS = (
    "backward: gradients do not pass a folded cache's kernels; allowed: the first call on a cache, or "
    "kernel='reference'"
)
CONSTANT = (
    "backward: gradients do not reach tokens of an earlier call, which a folded cache holds as constants; allowed: one call "
    "for all tokens, or the earlier calls within torch.no_grad()"
)


class _NoGradients(torch.autograd.Function):
    """What has no gradients, or some of them alone: to ask for them is an error, not a part of them."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor, why: str) -> torch.Tensor:
        ctx.why = why
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedModelError(ctx.why)


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`attention_forward` over a folded layer; all tensors are of its dtype."""
    scaling, dropout = options["scaling"], options["dropout"]
    if layer.dropped:
        raise CacheStateError(
            f"cache: the keys of layer {layer.spec.layer_idx} were taken back before they were attended to: a method of the "
            "cache was called within a call of the model; call it between calls"
        )
    if not layer.pending:
        raise UnsupportedModelError(
            f"layer {layer.spec.layer_idx}: its keys are used by a second layer; models that share keys are not folded"
        )
    layer.pending = False  # whatever follows, the keys arrived here
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if layer.static is not None:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        with output_follows():
            return layer.static_step(key, value, query, scale, layer.static, sinks).transpose(1, 2).contiguous(), None
    refused = [name for name in REFUSED if options.get(name) is not None]
    backwards = options.get("is_causal") is False and not layer.is_empty
    if softcap is not None and layer.spec.softcap is None:  # its kernel was chosen for others
        refused.append("softcap")
    if refused or backwards or (dropout and module.training):
        dropped = f"dropout={dropout} in train mode; allowed: model.eval(), or use_cache=False"
        what = ", ".join(refused) or ("is_causal=False" if backwards else dropped)
        raise UnsupportedModelError(
            f"layer {layer.spec.layer_idx}: a folded cache does not support attention with {what}"
        )
    own_mask = attention_mask
    if layer.is_empty:
        whole = own_mask is not None and own_mask.ndim == 4  # the caller's own; nothing in it is padding
        attention_mask = getattr(own_mask, "_kvfold_padding", (None if whole else own_mask,))[0]
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedModelError(
            f"attention_mask: a folded cache that holds tokens takes padding masks [batch, columns], not {attention_mask.ndim} "
            "dimensions; allowed: such a mask of 4 in the first call, which is attended to as the model does"
        )
    tokens = query.shape[-2]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    check_prompt(layer, options.get("position_ids"), tokens, attention_mask)
    valid = layer.new_columns(attention_mask, tokens)
    weighs = asked(previous, options)
    weights = weights_of(layer, module, query, key, valid, options) if weighs else None
    if layer.is_empty and (own_mask is not attention_mask or not _is_causal(module, options)):
        mask = _square_mask(previous, module, own_mask, query, tokens)
        out, own_weights = originals.attend(previous, module, query, key, value, mask, **options)
        weights = own_weights if weighs else None
    elif layer.is_empty:
        out = _among_themselves(module, query, key, value, valid, options)
    elif layer.writes_first(tokens, valid):
        layer.append(key, value, query, valid, options.get("position_ids"), pack=False)
        out = _attend(layer, query, None, scale, None, sinks)
        layer.pack_due()
        layer.finish()
        return out, weights
    else:
        out = _attend(layer, query, NewTokens(key, value, valid), scale, softcap, sinks)
    layer.append(key, value, query, valid, options.get("position_ids"))
    layer.finish()
    return out, weights


def _among_themselves(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Causal attention of tokens to their own keys and values, exactly; ``valid``: see :func:`_causal`."""
    scaling, softcap, sinks = options["scaling"], options.get("softcap"), options.get("s_aux")
    mask = None if valid is None else _causal(valid, query.shape[-2])
    if softcap is None and sinks is None:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=True)
        return out
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend_prompt(query, key, value, mask, scale, softcap, sinks).transpose(1, 2).contiguous()


@outside_autocast
def _from(
    start: int,
    layer: FoldedLayer,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    previous: str | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`_folded_attention` of a call whose first ``start`` tokens the cache holds: they attend to one another and are not
    stored again; the rest goes on from the cache."""
    old, new = slice(None, start), slice(start, None)
    valid = None if attention_mask is None else attention_mask[:, :start].bool()
    read = _among_themselves(module, query[:, :, old], key[:, :, old], value[:, :, old], valid, options)
    own = among(module, query[:, :, old], key[:, :, old], valid, options) if asked(previous, options) else None
    query, key, value = query[:, :, new], key[:, :, new], value[:, :, new]
    options = {**options, "position_ids": options["position_ids"][:, new]}
    out, weights = _folded_attention(layer, module, query, key, value, attention_mask, previous, options)
    if own is not None and weights is not None:
        weights = torch.cat((nn.functional.pad(own, (0, weights.shape[-1] - start)), weights), 2)
    return torch.cat((read, out), 1), weights


def output_follows() -> AbstractContextManager[None]:
    """See :func:`kvfold.kernels.common.partials.product_follows`."""
    if find_spec("triton") is None:
        return nullcontext()
    from kvfold.kernels.common.partials import product_follows

    return product_follows()


def _attend(
    layer: FoldedLayer,
    query: torch.Tensor,
    new: NewTokens | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """By the layer's kernel; [batch, tokens, num_heads, head_dim]."""
    call = layer.reader.call(query, new, scale, softcap, sinks)
    try:
        out = layer.kernel.attend(call)
    except NumbaError:  # found when it is first needed, before anything is computed
        layer.choose_kernel()
        out = layer.kernel.attend(call)
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


def register(previous: str | None) -> str:
    return originals.register(previous, attention_forward, padding_mask)


for _name in (*ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager", None):
    register(_name)
