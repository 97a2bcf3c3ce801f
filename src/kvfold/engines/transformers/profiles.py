"""Profiles of models: measured once, kept in kvfold's cache folder, and read where a method spreads a budget over layers."""

from __future__ import annotations

import copy
import datetime
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvfold import artefact as artefacts
from kvfold.artefact import Artefact, ArtefactError, config_hash, load_cached, weights_hash
from kvfold.engines.transformers.placing import has_weights
from kvfold.errors import KVFoldError, MethodError
from kvfold.files import expanded, home
from kvfold.methods import Method, get
from kvfold.methods import profile as profiles
from kvfold.methods.learned import places
from kvfold.version import __version__

Step = Callable[[int, int, str], None]
"""Steps done, of how many, and what was done."""

_tokenizers: WeakKeyDictionary[PreTrainedModel, PreTrainedTokenizerBase] = WeakKeyDictionary()


def remember(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whose tokenizer it is, for models that do not say where theirs can be had."""
    _tokenizers[model] = tokenizer


def place_of(model: PreTrainedModel, method: Method) -> Path:
    """Where the profile of a model and a method with a budget is, or would be: the file's name has both, and the measure."""
    if named := next(places(method), ""):
        return artefacts.resolve(named)
    about = f"{weights_hash(model)} {method.with_bits((3, 2))} {profiles.MEASURE}"
    return home() / "profiles" / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.safetensors"


def resolved(model: PreTrainedModel, method: Method, measuring: bool = False) -> Method:
    """A method as it serves a model: one with a budget is its profile's recipe, every other is itself.

    Parameters
    ----------
    measuring
        Measure a profile that is missing, and say so.

    Raises
    ------
    MethodError
        A method with a budget is part of a recipe; the profile is missing, or for another model or other options.
    """
    if not method.spreads:
        for part in method.parts():
            if part.spreads:
                raise MethodError(f"{method}: {part} spreads its bits over all layers; allowed: by itself")
        return method
    if not has_weights(model):
        raise MethodError(f"{method}: the model is on the meta device, without weights; a profile is of weights")
    place = place_of(model, method)
    if not place.is_file():
        if not measuring:
            raise missing(method)
        _tell(model, method)
    found = load_cached(str(place))
    found.check_model(model.config)
    return profiles.recipe(method, found)


def ready(model: PreTrainedModel, method: Method) -> Method:
    """A method with what it needs: one with a budget knows where its profile is, which is measured if it is missing."""
    if not method.spreads:
        return method
    resolved(model, method, measuring=True)
    found = copy.copy(method)
    object.__setattr__(found, "found", str(place_of(model, method)))
    return found


def origin(model: PreTrainedModel, method: Method) -> str:
    """Where a method's bits by layer come from, for people."""
    place = place_of(model, method)
    found = load_cached(str(place))
    return f"bits by layer from the profile of {found.model}, measured {found.created[:10]}, in {place}"


def missing(method: Method) -> MethodError:
    """The error of a method whose profile is not there where nothing can be measured."""
    return MethodError(
        f"{method}: this model has no profile yet: kvfold.fold(model, {str(method)!r}) measures it, or 'kvfold calibrate "
        f'--method "{method}" --out FILE.safetensors\' for artefact=FILE.safetensors'
    )


def tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The model's tokenizer, by the name it was loaded with.

    Raises
    ------
    KVFoldError
        There is none by that name.
    """
    if (known := _tokenizers.get(model)) is not None:
        return known
    name = str(getattr(model.config, "_name_or_path", "") or "")
    try:
        if not name:
            raise OSError("it has no name")
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub's errors, and tokenizers', have many types
        raise KVFoldError(
            f"tokenizer: none was found for {name or type(model).__name__} ({artefacts.first_line(error)}); give it: "
            "kvfold.measure(model, tokenizer)"
        ) from error
    return found


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    method: str | Method = "fold:budget=2.8",
    out: str | os.PathLike[str] | None = None,
    on_step: Step | None = None,
) -> Path:
    """Measure what a model loses by layer, side and bits, and keep it: the profile that ``fold:budget=B`` reads.

    Two synthetic lists that are asked for again and a text, both built in, and eight gradients of each: no data set is read.
    Seconds on a GPU, a minute for 135M parameters on two cores. See :mod:`kvfold.engines.transformers.losses`.

    Parameters
    ----------
    model
        Not folded; it is given back so.
    tokenizer
        None: by the name the model was loaded with.
    method
        With a budget, whose size does not matter: a profile serves all.
    out
        The file; None: where :func:`kvfold.fold` looks for it.
    on_step
        For progress.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    KVFoldError
        The method has no budget, there is no tokenizer, the model has layers that do not fold, its context is too short, or the
        file cannot be written.
    """
    from kvfold.engines.transformers.losses import measure as measured
    from kvfold.engines.transformers.losses import steps
    from kvfold.engines.transformers.planning import transformer
    from kvfold.engines.transformers.probes import probes

    method, model = get(method), transformer(model)
    if not method.spreads:
        raise KVFoldError(f"method: {method} spreads no budget; allowed: fold:budget=2.8")
    place = place_of(model, method) if out is None else expanded(out)
    if out is None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"{place.parent} cannot be made ({error.strerror}); give another folder"
            raise ArtefactError(f"KVFOLD_HOME: {why}") from error
    artefacts.check_target(place, force=True)
    tokenizer = tokenizer or tokenizer_of(model)
    plain = method.with_bits((3, 2))
    config = model.config.get_text_config(decoder=True)
    prompts = probes(tokenizer, getattr(config, "max_position_embeddings", None))
    variants = {side: {b: plain.with_bits((b, b)) for b in every} for side, every in profiles.BITS.items()}
    count, done = steps(prompts, variants), 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if on_step is not None:
            on_step(done, count, what)

    found = measured(model, prompts, variants, step)
    text = found["text"]
    made = Artefact(
        model=str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        config_hash=config_hash(model.config),
        method=str(plain),
        shape={
            "measure": profiles.MEASURE,
            "num_layers": config.num_hidden_layers,
            "layers": text.layers,
            **{f"{side}_bits": list(every) for side, every in profiles.BITS.items()},
        },
        calibration={
            "prompts": [
                {"kind": p.kind, "sha256": _sha256(p.ids), "tokens": p.ids.shape[1], "prefilled": p.prefilled}
                for p in prompts
            ],
            "tokens": sum(p.ids.shape[1] for p in prompts),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        errors={
            str(layer): {f"{kind}, keys at 2 bits": found[kind].lost[layer, "k", 2] for kind in found}
            for layer in text.layers
        },
        versions={"kvfold": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tensors=profiles.tensors(found),
        weights_hash=weights_hash(model),
    )
    artefacts.save(made, place)
    return place


def _sha256(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def _tell(model: PreTrainedModel, method: Method) -> None:
    """Measure, with a line before and after it, and a bar where there is a terminal."""
    from tqdm.auto import tqdm

    print(f"kvfold: measuring once what this model's layers lose, for {method} ...", file=sys.stderr, flush=True)
    bar: Any = None

    def step(done: int, count: int, what: str) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=count, disable=None, leave=False)
        bar.update(1)

    try:
        place = measure(model, None, method, None, step)
    finally:
        if bar is not None:
            bar.close()
    print(f"kvfold: kept in {place}", file=sys.stderr, flush=True)
