"""Methods that an evaluation was asked for, checked against a model before anything is run."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from kvfold.methods.base import Method

OnMethod = Callable[[str, int, int], None]
"""Told of a method that has been checked: its string, how many have been, and of how many."""


def checked(
    model: PreTrainedModel, methods: "Sequence[str | Method]", on_method: OnMethod | None = None
) -> "dict[str, Method]":
    """Methods by their strings; repeated ones once. A profile that one needs is measured, if it is missing, and named.

    Parameters
    ----------
    model
        Each method has to fit it.
    methods
        Strings or objects.
    on_method
        For progress: on a GPU kernels are compiled meanwhile, which takes minutes for many methods the first time.

    Raises
    ------
    KVFoldError
        A method is unknown or does not fit.
    """
    import kvfold
    from kvfold import methods as registry
    from kvfold.engines.transformers.profiles import ready

    chosen = {str(m): m for m in (registry.get(m) if isinstance(m, str) else m for m in methods)}
    for number, (name, method) in enumerate(list(chosen.items()), 1):
        chosen[name] = ready(model, method)
        kvfold.explain(model, chosen[name])
        if on_method is not None:
            on_method(name, number, len(chosen))
    return chosen
