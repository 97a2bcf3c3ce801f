"""What Transformers calls the cache of a model: ``cache`` from 5.24 on, ``past_key_values`` before.

No other module knows the two names. From 5.24 on the older one still passes a cache, with a warning of Transformers; kvfold's
own calls use the name that a model declares.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

NEW, OLD = "cache", "past_key_values"


def _declared(function: Callable[..., Any]) -> str | None:
    parameters = inspect.signature(function).parameters
    return next((name for name in (NEW, OLD) if name in parameters), None)


CACHE: str = _declared(GenerationMixin.prepare_inputs_for_generation) or OLD
"""The name in the Transformers that is installed: an argument of ``generate``, a key of its ``model_kwargs``, and a field of
what models return."""

TAKEN = (NEW, OLD) if CACHE == NEW else (OLD,)
"""Names under which models take a cache. Before 5.24 the newer name is nothing that a model looks at."""

OF_ATTENTION = (NEW, OLD, "past_key_value", "layer_past", "curr_past_key_values", "current_past_key_values")
"""Names under which attention modules are given the cache."""


@lru_cache(maxsize=256)
def _of(kind: type[nn.Module]) -> str | None:
    return _declared(kind.forward)


def of(model: Any) -> str | None:
    """The name under which a model's ``forward`` takes its cache; None if it declares none."""
    kind: Any = type(model)
    return _of(kind)


def passing(model: Any, cache: Any) -> dict[str, Any]:
    """``cache`` as the keyword argument that ``model`` takes it as.

    A model that passes on what it is given (a compiled model, a PEFT model) gets it as :data:`CACHE`.

    Examples
    --------
    >>> model(ids, **passing(model, cache), use_cache=True)  # doctest: +SKIP
    """
    return {of(model) or CACHE: cache}


def given(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments that were passed by name, whatever its name; None if there is none."""
    return next((arguments[name] for name in TAKEN if arguments.get(name) is not None), None)


def put(arguments: Mapping[str, Any], cache: Any, name: str = CACHE) -> dict[str, Any]:
    """Arguments with ``cache`` as ``name``, in place of what they have under any name (None, say)."""
    return {**{key: value for key, value in arguments.items() if key not in TAKEN}, name: cache}


def output(logits: Any, cache: Any) -> CausalLMOutputWithPast:
    """What a causal model returns.

    Parameters
    ----------
    logits : Tensor [batch, tokens, vocabulary]
    cache : Cache
    """
    fields: dict[str, Any] = {CACHE: cache}
    return CausalLMOutputWithPast(logits=logits, **fields)
