"""Folding a model's cache, and taking it back."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers import originals, restarts
from kvfold.engines.transformers.always import WISH, Wish, begin, check, end
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.making import make_cache
from kvfold.engines.transformers.planning import transformer
from kvfold.errors import UnsupportedModelError
from kvfold.methods import DEFAULT_METHOD, Method, get


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

    ``output_attentions=True`` gives the weights over what the cache holds where the model's attention was eager, and none with
    others, as without kvfold. A configuration may ask for them before its model is folded; Transformers lets nobody set or save
    that in one whose model is.
    """
    model = transformer(model)
    if always:
        check(model)
    cache = make_cache(model, get(method), kernel, max_length)
    if always:
        begin(model, Wish(cache.method, kernel, max_length))
    return cache


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
    if not isinstance(model, nn.Module) or not originals.restore(model):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} object has no Transformers model inside; allowed: what fold() was given"
        )
    end(model)
    restarts.end(model)


@contextmanager
def folding(
    model: PreTrainedModel,
    method: str | Method = DEFAULT_METHOD,
    *,
    kernel: str | None = None,
    max_length: int | None = None,
) -> Iterator[PreTrainedModel]:
    """Within it, ``model`` makes a folded cache for every call that brings none, ``generate`` and pipelines included.

    Afterwards the model is what it was: unfolded, or folded as before.

    Parameters
    ----------
    model, method, kernel, max_length
        As for :func:`kvfold.fold`.

    Raises
    ------
    MethodError, UnsupportedModelError
        As :func:`kvfold.fold`.

    Examples
    --------
    >>> with kvfold.folding(model, "fold:bits=2"):  # doctest: +SKIP
    ...     pipeline("text-generation", model=model, tokenizer=tokenizer)("The KV cache")
    """
    before = next((m.__dict__[WISH] for m in model.modules() if WISH in m.__dict__), None)
    was_folded = originals.is_folded(model.config)
    fold(model, method, kernel=kernel, max_length=max_length, always=True)
    try:
        yield model
    finally:
        if not was_folded:
            unfold(model)
        elif before is None:
            end(model)
        else:
            begin(transformer(model), before)
