"""Folded caches without passing one: what a model does by itself after ``fold(model, method, always=True)``.

See :mod:`kvfold.engines.transformers.wishes` for what it is told; :func:`kvfold.unfold` finds that within wrappers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvfold.engines.transformers import names
from kvfold.engines.transformers.tracing import NOT_TRACED, refuse_tracing
from kvfold.engines.transformers.wishes import WISHES, Wish, Wishes, cache_for, of
from kvfold.errors import UnsupportedModelError, warn_once

PREPARES = "_prepare_cache_for_generation"
"""Where Transformers' ``generate`` makes the cache of a call that brings none."""


def check(model: PreTrainedModel) -> None:
    """Refuse a model whose ``forward`` takes no cache.

    Raises
    ------
    UnsupportedModelError
    """
    if names.of(model) is None:
        raise UnsupportedModelError(f"always: {type(model).__name__} takes no {names.CACHE}; allowed: always=False")


def begin(model: PreTrainedModel, wish: Wish, stays: bool) -> None:
    """Have ``model`` make a folded cache for every call that needs one and brings none.

    ``stays``: the model is folded without that, too; what counts is said by the first of several that begin.
    """
    wishes = of(model)
    if wishes is not None:
        wishes.add(wish)
        return
    wishes = Wishes(stays=stays)
    wishes.add(wish)
    setattr(model, WISHES, wishes)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    if hasattr(model, PREPARES):
        setattr(model, PREPARES, _Preparing(model))


def end(model: nn.Module) -> None:
    """Take back what :func:`begin` did to a model, a copy of it, or one within ``model``."""
    for module in model.modules():
        module.__dict__.pop(WISHES, None)
        if isinstance(module.__dict__.get(PREPARES), _Preparing):
            del module.__dict__[PREPARES]
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _before_forward:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


@torch.compiler.disable(reason=NOT_TRACED)  # a cache is planned
def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """A forward pre-hook: give a call that would make a cache a folded one. A cache that is passed stays what it is."""
    given = kwargs
    if len(args) > 1:
        given = {**inspect.signature(type(model).forward).bind_partial(model, *args).arguments, **kwargs}
    asked = given.get("use_cache")
    wanted = asked if asked is not None else getattr(model.config.get_text_config(decoder=True), "use_cache", True)
    if not wanted or model.training or names.given(given) is not None:
        return None
    refuse_tracing()
    cache = cache_for(model)
    if cache is None:
        return None
    name = names.of(model)
    assert name is not None  # else `check` refused it
    if name not in given or name in kwargs:
        return args, names.put(kwargs, cache, name)
    place = list(inspect.signature(type(model).forward).parameters)[1:].index(name)  # None was passed by position
    return (*args[:place], cache, *args[place + 1 :]), kwargs


class _Preparing:
    """In place of a model's own :data:`PREPARES`: make a folded cache for a ``generate`` that was given none.

    An object, so that a copy or a pickle of a model has one of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        own = getattr(type(model), PREPARES)
        if names.given(model_kwargs) is not None or generation_config.use_cache is False:
            return own(model, generation_config, model_kwargs, *args, **kwargs)
        if model.training:  # as in `_before_forward`
            warn_once("kvfold: generate in train mode makes no folded cache; call model.eval(), or pass a cache")
            return own(model, generation_config, model_kwargs, *args, **kwargs)
        asked = generation_config.cache_implementation
        if asked is not None and asked != model.generation_config.cache_implementation:
            raise UnsupportedModelError(
                f"cache_implementation: {asked!r} is asked for, and the model was folded with always=True; allowed: leave it "
                f"out, or pass such a cache as {names.CACHE}=, or call kvfold.unfold(model) first"
            )
        if asked is not None:  # nobody's wish for this call
            warn_once(
                f"kvfold: a folded cache takes the place of the generation config's cache_implementation={asked!r}"
            )
            generation_config.cache_implementation = None
        cache = cache_for(model)
        if cache is None:
            return own(model, generation_config, model_kwargs, *args, **kwargs)
        model_kwargs[names.CACHE] = cache
        if getattr(generation_config, "is_assistant", False):  # its drafts are taken back
            cache.activate_past_recording()
        return None
