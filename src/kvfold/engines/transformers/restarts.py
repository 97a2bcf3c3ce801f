"""Models whose ``generate`` drops its cache at some length and reads all tokens again: their folded cache begins anew.

A model of Phi-3's family has other rotary frequencies beyond ``original_max_position_embeddings``, and its
``prepare_inputs_for_generation`` takes the cache out of the call that crosses it. The model would go on in a cache of its own.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.graph import release
from kvfold.errors import UnsupportedModelError

PREPARES = "prepare_inputs_for_generation"
"""Where Transformers' ``generate`` asks a model what a call is given."""
REST = "next_sequence_length"
"""How many tokens of those so far the call is given; None: all."""


def begin(model: PreTrainedModel) -> None:
    """Have a folded cache that ``model`` drops begin anew. Twice is once."""
    own = model.__dict__.get(PREPARES)
    if hasattr(model, PREPARES) and not isinstance(own, _Preparing):
        setattr(model, PREPARES, _Preparing(model, own))


def end(model: nn.Module) -> None:
    """Take back what :func:`begin` did to a model, a copy of it, or one within ``model``."""
    for module in model.modules():
        made = module.__dict__.get(PREPARES)
        if isinstance(made, _Preparing):
            del module.__dict__[PREPARES]
            if made.own is not None:
                setattr(module, PREPARES, made.own)


class _Preparing:
    """In place of a model's own :data:`PREPARES`.

    An object, so that a copy or a pickle of a model has one of its own; one that keeps no model alive.

    Parameters
    ----------
    model : PreTrainedModel
    own : callable or None
        What somebody else had put in place of the class's function.
    """

    def __init__(self, model: PreTrainedModel, own: Any) -> None:
        self.model, self.own = weakref.ref(model), own

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model(), self.own)

    @property
    def __wrapped__(self) -> Any:  # `generate` looks at its signature
        model: Any = self.model()
        return self.own if self.own is not None else getattr(type(model), PREPARES).__get__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        prepare = self.__wrapped__
        inputs = prepare(*args, **kwargs)
        name, cache = next(((n, value) for n, value in kwargs.items() if isinstance(value, FoldedCache)), ("", None))
        if cache is None or kwargs.get("use_cache") is False or any(value is cache for value in inputs.values()):
            return inputs
        model = self.model()
        other = next((type(value).__name__ for value in inputs.values() if isinstance(value, Cache)), None)
        if other is not None:
            raise UnsupportedModelError(
                f"model: the generate of {type(model).__name__} goes on in a {other} in place of the folded cache; allowed: to "
                "call the model itself, or kvfold.unfold(model)"
            )
        release(model, cache)
        restart(cache)
        if REST in kwargs:  # not all of these models ask for all tokens again
            kwargs[REST] = None
        return {**prepare(*args, **kwargs), name: cache}


def restart(cache: FoldedCache) -> None:
    """Empty a cache in the midst of ``generate``, which goes on to record what it may take back."""
    records = any(layer.writer.recording for layer in cache.folded)
    cache.reset()
    if records:
        cache.activate_past_recording()
    cache.restarts += 1
