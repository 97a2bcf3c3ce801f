"""The attention a model had before it was folded: finding it, calling it, and giving it back.

A folded model's configurations name an implementation of kvfold's, one for each implementation that a model may have had.
The name is all that is kept, so copies of a model, and models taken out of wrappers, know what they had. Whatever is not a
folded layer (encoders, cross-attention, vision towers, calls without a folded cache) is served by the functions of before.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.errors import UnsupportedModelError

IMPLEMENTATION = "kvfold"

_before: dict[str, str | None] = {}
"""Names of kvfold's implementations, and the one that each stands in for."""


def folded_name(previous: str | None) -> str:
    """Implementation of kvfold's that stands in for another.

    Transformers takes every name with "flash" in it for one that reads no masks: it must not be in these.
    """
    return IMPLEMENTATION if previous == "sdpa" else f"{IMPLEMENTATION}_{previous}".replace("flash_attention_", "fa")


def register(previous: str | None, attention: Callable, mask: Callable) -> str:
    """Have an implementation that stands in for ``previous``; ``attention`` and ``mask`` are told which by ``previous=``."""
    name = folded_name(previous)
    if name not in _before:
        _before[name] = previous

        def attention_function(*args: Any, **kwargs: Any) -> Any:
            return attention(*args, previous=previous, **kwargs)

        def mask_function(*args: Any, **kwargs: Any) -> Any:
            return mask(*args, previous=previous, **kwargs)

        AttentionInterface.register(name, attention_function)
        AttentionMaskInterface.register(name, mask_function)
    return name


def is_folded(config: Any) -> bool:
    """Whether a configuration names one of kvfold's implementations."""
    return getattr(config, "_attn_implementation", None) in _before


_folded: WeakSet[nn.Module] = WeakSet()
"""Models that were folded, copies of them left out."""


def note(model: nn.Module) -> None:
    """A model is folded."""
    if model not in _folded:
        _folded.add(model)


def folds(model: PreTrainedModel) -> bool:
    """Whether a model is folded: not only another one that was made of the same configuration."""
    return is_folded(model.config) and (model in _folded or id(model.config) not in _of_others(model))


def _of_others(model: nn.Module) -> set[int]:
    """Configurations, by id, of folded models that share no module with ``model``."""
    own = set(model.modules())
    others = [other for other in list(_folded) if own.isdisjoint(other.modules())]
    return {id(getattr(module, "config", None)) for other in others for module in other.modules()}


def previous_of(config: Any) -> str | None:
    """Implementation that a configuration names, or named before its model was folded."""
    name = getattr(config, "_attn_implementation", None)
    return _before.get(name, name)  # type: ignore[arg-type]


def configurations(model: nn.Module, attentions: list[nn.Module]) -> Iterator[PreTrainedConfig]:
    """Configurations that decide how these modules attend: their own, and those of the models around them."""
    wanted, seen = set(map(id, attentions)), set()
    around = {""}
    for name, module in model.named_modules():
        if id(module) in wanted:
            parts = name.split(".")
            around.update(".".join(parts[:n]) for n in range(len(parts) + 1))
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        decides = id(module) in wanted or (name in around and isinstance(module, PreTrainedModel))
        if decides and isinstance(config, PreTrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config


def restore(model: nn.Module) -> bool:
    """Give every configuration within a model the implementation that it had; returns whether there is any configuration.

    Not those that another folded model was made of, too: it attends by them.
    """
    found, kept = False, _of_others(model)
    own = set(model.modules())
    for other in list(_folded):
        if not own.isdisjoint(other.modules()):
            _folded.discard(other)
    for module in model.modules():
        config = getattr(module, "config", None)
        found |= isinstance(config, PreTrainedConfig)
        if isinstance(config, PreTrainedConfig) and is_folded(config) and id(config) not in kept:
            config._attn_implementation_internal = _before[config._attn_implementation]
    return found


def attention_of(module: nn.Module, previous: str | None) -> Callable:
    """The function that a module attended with.

    Raises
    ------
    UnsupportedModelError
        If the module has no function of its own for eager attention.
    """
    if previous in ("eager", None):
        forward: Any = inspect.unwrap(type(module).forward)
        names = [name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")]
        if not names:
            raise UnsupportedModelError(
                f"model: {type(module).__name__} has no eager attention that kvfold could call; load the model with "
                "attn_implementation='sdpa'"
            )
        return forward.__globals__[names[0]]
    return ALL_ATTENTION_FUNCTIONS[previous]


def attend(previous: str | None, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Attention as the module had it before."""
    function = attention_of(module, previous)
    if previous in ("sdpa", "eager", None):
        return function(module, *args, **kwargs)
    return function(_Before(module, config=_Before(module.config, _attn_implementation=previous)), *args, **kwargs)


def mask_of(previous: str | None, **kwargs: Any) -> Any:
    """Mask as the implementation of before makes it; None where it makes none."""
    if previous not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[previous](**kwargs)


def causal_mask(
    previous: str | None, module: nn.Module, mask: torch.Tensor | None, query: torch.Tensor, columns: int
) -> Any:
    """Causal mask as the implementation of before makes it.

    Parameters
    ----------
    mask : Tensor or None
        bool [batch, columns]: False at padding.
    query : Tensor [batch, num_heads, tokens, head_dim]
        Of the newest tokens.
    columns : int
        Tokens in all.
    """
    return mask_of(
        previous,
        batch_size=query.shape[0],
        q_length=query.shape[-2],
        kv_length=columns,
        q_offset=columns - query.shape[-2],
        kv_offset=0,
        mask_function=causal_mask_function,
        attention_mask=mask,
        allow_is_causal_skip=True,
        dtype=query.dtype,
        config=getattr(module, "config", None),
        use_vmap=False,
        device=query.device,
    )


class _Before:
    """A module or configuration as it was: some attributes are others."""

    def __init__(self, of: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
