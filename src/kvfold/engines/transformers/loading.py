"""Reading saved caches: whether a file is this model's, and folding the model with what is in it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvfold.arithmetic import storing
from kvfold.artefact import first_line, load_cached
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.fold import fold
from kvfold.engines.transformers.placing import layer_devices
from kvfold.engines.transformers.planning import transformer
from kvfold.engines.transformers.saving import fill, identity, path_of, read
from kvfold.errors import CacheFileError, KVFoldError
from kvfold.methods import Method, get
from kvfold.methods.learned import LearnedMethod, places

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@storing
def load_cache(
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    method: str | Method | None = None,
    *,
    kernel: str | None = None,
    max_length: int | None = None,
) -> FoldedCache:
    """Read a folded cache that :meth:`kvfold.FoldedCache.save` wrote, and fold ``model`` with its method.

    What is read is what was saved, bit for bit: packed tokens, windows, an encoder's state, padding. Every layer lies on the
    device of the model's layer. The model is switched to kvfold's attention as by :func:`kvfold.fold`; a cache that it was
    folded with before is not touched.

    Parameters
    ----------
    path : str or path
    model : PreTrainedModel
        The model that the cache was made with: the same configuration, weights and dtype.
    method : str or Method, optional
        Insist on this method. A learned method's artefact may lie elsewhere than it did: name its new place here.
        None: the file's.
    kernel : str or None
        As for :func:`kvfold.fold`.
    max_length : int or None
        Lay packed storage out as one piece for this many tokens, as decode graphs need it. None: as it was saved.

    Returns
    -------
    FoldedCache

    Raises
    ------
    CacheFileError
        If the file is missing, damaged, of a newer schema, or of another model, other weights, another dtype or method.
    MethodError, UnsupportedModelError
        As :func:`kvfold.fold`.

    Examples
    --------
    >>> cache.save("prompt.safetensors")  # doctest: +SKIP
    >>> cache = kvfold.load_cache("prompt.safetensors", model)  # doctest: +SKIP
    """
    path, model = path_of(path), transformer(model)
    fields, tensors = read(path)
    chosen = _method(path, fields, method)
    _check_model(path, fields["model"], model)
    _check_artefacts(path, fields["artefacts"], chosen)
    told_length = next((layer["max_length"] for layer in fields["layers"] if layer["class"] == "folded"), None)
    cache = fold(model, chosen, kernel=kernel, max_length=told_length if max_length is None else max_length)
    if len(cache.layers) != len(fields["layers"]):
        raise CacheFileError(f"cache: {path} has {len(fields['layers'])} layers, the model {len(cache.layers)}")
    try:
        fill(cache, fields["layers"], tensors, layer_devices(model, len(cache.layers)), max_length or 0)
    except KVFoldError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CacheFileError(
            f"cache: {path} is damaged: its layers do not fit together ({first_line(error)})"
        ) from error
    return cache


def _check_model(path: Path, told: dict[str, str], model: torch.nn.Module) -> None:
    found = identity(model)
    for field, what in (("config_hash", "another configuration"), ("weights_hash", "other weights")):
        if found[field] != told[field]:
            raise CacheFileError(
                f"cache: {path} was made with {told['name']}, and this model has {what} ({found[field][:12]} instead of "
                f"{told[field][:12]}); load it with the model it was made with, or prefill again"
            )
    if found["adapters"] != told["adapters"]:
        raise CacheFileError(
            f"cache: {path} was made with the adapters {told['adapters'] or '(none)'}, and this model has "
            f"{found['adapters'] or 'none'} switched on; switch on those that it was made with, or prefill again"
        )
    if found["dtype"] != told["dtype"]:
        raise CacheFileError(
            f"cache: {path} was made in dtype {told['dtype']}, and this model is in {found['dtype']}; "
            f"load the model in {told['dtype']}"
        )


def _method(path: Path, fields: dict[str, Any], asked: str | Method | None) -> Method:
    told = get(fields["method"])
    if asked is None:
        return told
    asked = get(asked)
    if str(_without_places(asked)) != str(_without_places(told)):
        raise CacheFileError(
            f"cache: {path} is folded with {told}, and {asked} is asked for; packed tokens cannot change their method: "
            "leave method out, or prefill again"
        )
    return asked


def _without_places(method: Method) -> Method:
    """A method apart from where its artefact lies."""
    return method.mapped(lambda part: replace(part, artefact="") if isinstance(part, LearnedMethod) else part)


def _check_artefacts(path: Path, told: list[str], method: Method) -> None:
    for place, expected in zip(places(method), told, strict=True):
        found = load_cached(place).metadata()["sha256"]
        if found != expected:
            raise CacheFileError(
                f"cache: {path} was made with another artefact than {place} ({found[:12]} instead of {expected[:12]}); "
                "name the place of the one it was made with: method='...artefact=PLACE'"
            )
