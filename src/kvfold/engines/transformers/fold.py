"""Folding a model's cache, and taking it back."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers import originals, restarts
from kvfold.engines.transformers.always import begin, check, end
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.making import make_cache
from kvfold.engines.transformers.planning import transformer
from kvfold.engines.transformers.profiles import resolved
from kvfold.engines.transformers.wishes import Wish, changing, of
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
        ``model.generate``, a pipeline. A cache that is passed stays what it is; ``use_cache=False`` and train mode make none.
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
    ``fold:budget=2.8`` spreads its bits over layers by the model's profile, which is measured at the first use and kept
    (:func:`kvfold.measure`): seconds on a GPU, minutes on a CPU. The cache's method is then the recipe that came of it.

    A later call's ``attention_mask`` says which of its own tokens are padding. It may hide the newest cached tokens of a
    sequence, padding that followed its end while others went on: they are dropped. Other cached tokens stay visible, and a
    mask that hides them is refused.

    Layers that cannot be folded (sliding windows, linear attention, latent attention) keep Transformers' own cache in
    full precision; a warning says so once, and :func:`kvfold.explain` says which.

    ``output_attentions=True`` gives the weights over what the cache holds where the model's attention was eager, and none with
    others, as without kvfold. A configuration may ask for them before its model is folded; Transformers lets nobody set or save
    that in one whose model is.
    """
    model = transformer(model)
    if always:
        check(model)
    method = resolved(model, get(method), measuring=True)
    with changing:
        cache = make_cache(model, method, kernel, max_length)
        if always:
            begin(model, Wish(cache.method, kernel, max_length), stays=True)
        if (wishes := of(model)) is not None:
            wishes.stays = True
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
    with changing:
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

    Afterwards the model is what it was: unfolded, or folded as before. Blocks may overlap, in threads or generators, and end in
    any order: a call gets a cache by the newest block of its thread or task, from outside of all by the newest. The last to end
    gives the model back; a :func:`fold` meanwhile stays, an :func:`unfold` ends all.

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
    inside = transformer(model)
    check(inside)
    method = resolved(inside, get(method), measuring=True)
    with changing:
        was_folded = originals.folds(inside)
        cache = make_cache(inside, method, kernel, max_length)
        wish = Wish(cache.method, kernel, max_length, of_block=True)
        begin(inside, wish, stays=was_folded)
    try:
        yield model
    finally:
        with changing:
            wishes = of(inside)
            if wishes is not None:
                wishes.drop(wish)
                if not wishes.told and wishes.stays:
                    end(inside)
                elif not wishes.told:
                    unfold(inside)
