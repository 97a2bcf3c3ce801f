"""Bits for keys and values of every layer, from what the model itself loses when a layer is quantized alone.

The measure and the choice are those of ``fold:budget=B``: losses by layer, side and bits come from gradients on a few prompts
(:mod:`kvfold.engines.transformers.losses`), and :func:`kvfold.methods.losses.spread` chooses, here with layers in full
precision as well. What is measured of ``fold`` on the built-in prompts is the model's profile, which both read. The proposal is
then evaluated on text and key-value pairs that it has not seen.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.artefact import load_cached
from kvfold.engines.transformers import profiles
from kvfold.engines.transformers.losses import measure as measured
from kvfold.engines.transformers.losses import steps
from kvfold.engines.transformers.names import passing
from kvfold.engines.transformers.probes import Probe, probes
from kvfold.engines.transformers.sizes import foretold
from kvfold.errors import KVFoldError
from kvfold.methods import Method, Pair, Recipe, get, profile
from kvfold.methods.learned import LearnedMethod
from kvfold.methods.losses import FULL_BITS, SIDES, Choice, Losses, Side, enough, spread

SHOWN = 2
"""Bits whose losses are shown, where a side has them."""
ANY = 4.0
"""A budget: a profile serves all."""
UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a cache may take: bits per element of what is packed, or bytes at some number of tokens."""

    bits: float | None = None
    bytes: float | None = None

    @classmethod
    def read(cls, text: str) -> Budget:
        """``2.5`` (bits) or ``0.5GB``, ``300MiB``.

        Raises
        ------
        KVFoldError
            It is neither.
        """
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(bits?|[kmg]i?b)?\s*", text, re.IGNORECASE)
        if not found or not float(found[1]):
            raise KVFoldError(f"budget: {text!r} is neither bits per value, as 2.5, nor a size, as 0.5GB or 300MiB")
        unit = (found[2] or "bits").lower()
        if unit.startswith("bit"):
            return cls(bits=float(found[1]))
        return cls(bytes=float(found[1]) * UNITS[unit])


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a model loses.

    Attributes
    ----------
    losses : dict
        By kind, ``retrieval`` and ``text``, or one of them: nats per predicted token, of the bits that may be chosen.
    aimed : Losses
        What is kept small: one of them, or both, each as a multiple of what the method's own bits lose.
    prompts : list of dict
        What was measured on.
    kept : Path or None
        The model's profile, where that is what was read.
    """

    losses: dict[str, Losses]
    aimed: Losses
    prompts: list[dict[str, Any]]
    kept: Path | None = None


def given(method: Method) -> dict[Side, int | None]:
    """Bits of keys and of values that the method names, ``k_bits=`` and ``v_bits=``; None: they are chosen."""
    usual = type(method).defaults(method.paper)
    return {s: None if own == usual[f"{s}_bits"] else own for s, own in (("k", method.k_bits), ("v", method.v_bits))}


def choices(method: Method) -> dict[Side, list[int]]:
    """Bits of keys and of values that there are to choose from; of what is learned, those of its artefact.

    Raises
    ------
    KVFoldError
        There is nothing to choose, or an artefact is missing.
    """
    if isinstance(method, Pair | Recipe) or {"k_bits", "v_bits"} & set(method.unused):
        raise KVFoldError(f"method: {method} has no bits of its own for keys and values; give fold, kivi or innerq")
    if method.spreads:
        raise KVFoldError(f"method: {method} has a budget of its own; leave it out, and give --budget")
    learned = method.learned_shape() if isinstance(method, LearnedMethod) else {}
    if {"k_bits", "v_bits"} <= learned.keys():
        raise KVFoldError(
            f"method: {method}: its tables are learned for one number of bits, so that there are none to choose; allowed: "
            "fold, kivi, innerq, and, for bits of values, tasq:bits=2,values=fold,artefact=FILE and nova:artefact=FILE"
        )
    if isinstance(method, LearnedMethod) and not method.artefact:
        raise method.missing()
    if not learned and method.bits != type(method).defaults(method.paper)["bits"]:
        raise KVFoldError(
            f"method: {method}: bits={method.bits} is both keys' and values', and leaves nothing to choose; leave it out, or "
            "give k_bits= or v_bits= for a side that is to stay as it is"
        )
    kept = given(method)
    found = {side: [b for b in every if kept[side] in (None, b)] for side, every in profile.variants(method).items()}
    for side, bits in kept.items():
        if bits is not None and not found[side]:
            every = ", ".join(map(str, profile.variants(method)[side]))
            raise KVFoldError(f"method: {method}: {side}_bits={bits} is not among what is measured; allowed: {every}")
    if all(len(every) == 1 for every in found.values()):
        raise KVFoldError(f"method: {method} leaves no bits to choose; give k_bits= or v_bits= for one side at most")
    return found


def texts(ids: Sequence[torch.Tensor], length: int) -> list[Probe]:
    """A person's own prompts of running text.

    Parameters
    ----------
    ids
        ``[1, length + tokens + 1]`` int64 each; what follows the first ``length`` is predicted.
    """
    return [Probe("text", own.cpu(), length, tuple(range(length + 1, own.shape[1]))) for own in ids]


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    aim: str = "both",
    own: Sequence[Probe] = (),
    most: int | None = None,
    on_step: profiles.Step | None = None,
) -> Measured:
    """Measure every layer's keys and values, or read the model's profile where that says it.

    Parameters
    ----------
    model
        Not folded; afterwards it is not folded either.
    aim
        One of :data:`kvfold.methods.profile.AIMS`: what is kept small.
    own
        Prompts of running text in place of the built-in one.
    most
        Tokens that the model's context has.
    on_step
        For progress: steps done, of how many, what was done.

    Raises
    ------
    KVFoldError
        As of :func:`choices` and :func:`kvfold.engines.transformers.losses.measure`, or nothing is packed after so few tokens.
    """
    choices(method)
    for prompt in own:
        _packed(method, prompt.prefilled)
    budgeted = None if own else profile.with_budget(method, ANY)
    if budgeted is not None:
        place = profiles.place_of(model, budgeted)
        if not place.is_file():
            profiles.measure(model, tokenizer, budgeted, None, on_step)
        artefact = load_cached(str(place))
        artefact.check_model(model.config)
        return _measured(method, aim, profile.losses(artefact), artefact.calibration["prompts"], place)
    asked = [p for p in probes(tokenizer, most) if aim in (p.kind, "both") and not (own and p.kind == "text")]
    asked += own if aim != "retrieval" else ()
    variants = profile.variants(method)
    count, done = steps(asked, variants), 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if on_step is not None:
            on_step(done, count, what)

    return _measured(method, aim, measured(model, asked, variants, step), profiles.described(asked), None)


def _measured(
    method: Method, aim: str, found: dict[str, Losses], prompts: list[dict[str, Any]], kept: Path | None
) -> Measured:
    both = profile.aimed(found, aim, (method.key_bits, method.value_bits))
    sides = given(method)
    return Measured({kind: of.only(**sides) for kind, of in found.items()}, both.only(**sides), prompts, kept)


def _packed(method: Method, length: int) -> None:
    least = method.sink + method.recent + method.block
    if length < least:
        windows = f"{method.sink} + {method.recent} tokens are in full precision"
        raise KVFoldError(f"length: after {length} tokens nothing is packed ({windows}); give at least {least}")


# ---- sizes -----------------------------------------------------------------------------------------------------------


def bytes_of(model: PreTrainedModel, method: Method, tokens: int) -> int:
    """What a cache of one sequence of so many tokens will take, in the model's dtype."""
    cache = kvfold.fold(model, method)
    try:
        with torch.inference_mode():  # shapes and types are known after a call
            model(torch.zeros(1, 2, dtype=torch.long, device=model.device), **passing(model, cache), use_cache=True)
    finally:
        kvfold.unfold(model)
    return foretold(cache, tokens, model.dtype).cache_bytes


def _uniform_bits(model: PreTrainedModel, method: Method) -> float:
    """Effective bits per element with one method for all layers."""
    layers = kvfold.fold(model, method).folded
    kvfold.unfold(model)
    sizes = [layer.spec.num_kv_heads * layer.spec.head_dim for layer in layers]
    each = [(layer.key_format.bits + layer.value_format.bits) / 2 for layer in layers]
    return math.fsum(bits * size for bits, size in zip(each, sizes, strict=True)) / sum(sizes)


def check(model: PreTrainedModel, method: Method, budget: Budget, tokens: int) -> None:
    """Refuse, before anything is measured, a budget that nothing fits or that full precision fits.

    Raises
    ------
    KVFoldError
        The least that there is takes more, or no layer needs to be folded.
    """
    allowed = choices(method)
    few = allowed["k"][0], allowed["v"][0]
    if budget.bits is not None:
        if budget.bits >= FULL_BITS:
            raise KVFoldError(
                f"budget: {budget.bits:.4g} bits per value; full precision takes {FULL_BITS}, nothing is folded; give fewer"
            )
        enough(budget.bits, _uniform_bits(model, method.with_bits(few)), few)
        return
    assert budget.bytes is not None
    least = bytes_of(model, method.with_bits(few), tokens)
    if least > budget.bytes:
        raise KVFoldError(
            f"budget: {budget.bytes:,.0f} bytes; a cache of {tokens:,} tokens takes at least {least:,}; give a larger budget "
            "or a smaller --context"
        )
    full = bytes_of(model, get("none"), tokens)
    if full <= budget.bytes:
        raise KVFoldError(
            f"budget: {budget.bytes:,.0f} bytes; a full-precision cache of {tokens:,} tokens takes {full:,}: nothing folds; "
            "give a smaller budget or a larger --context"
        )


def within(model: PreTrainedModel, method: Method, found: Losses, budget: Budget, tokens: int) -> float:
    """The budget in effective bits per element, for a cache of ``tokens`` tokens; refuses what :func:`check` does."""
    check(model, method, budget, tokens)
    if budget.bits is not None:
        return budget.bits
    assert budget.bytes is not None
    low, high = found.bits_of(found.alike(found.least)), float(FULL_BITS)
    for _ in range(22):  # sizes go in steps of pages, so they are tried
        middle = (low + high) / 2
        tried = profile.as_method(method, spread(found, middle, full=True))
        low, high = (middle, high) if bytes_of(model, tried, tokens) <= budget.bytes else (low, middle)
    return low


# ---- what is said ----------------------------------------------------------------------------------------------------


def budget_of(method: Method, found: Measured, bits: float, proposal: str) -> str | None:
    """``fold:budget=B`` where that is the proposal on this model; None where it is another, or reads no such measure."""
    if found.kept is None:
        return None
    for size in (math.floor(bits * 1000) / 1000, bits):
        short = profile.with_budget(method, size)
        if short is not None and str(profile.recipe(short, load_cached(str(found.kept)))) == proposal:
            return str(short)
    return None


def shown(found: Losses, side: Side) -> int:
    """The bits of a side whose losses are shown."""
    every = found.bits(side)
    return SHOWN if SHOWN in every else every[0]


def to_dict(found: Measured, aim: str, choice: Choice, same: Choice) -> dict[str, Any]:
    """For JSON: what was measured, what is proposed, and what it and the same bits everywhere are expected to lose."""
    of = found.aimed
    return {
        "measure": profile.MEASURE,
        "for": aim,
        "prompts": found.prompts,
        "losses": [
            {"layer": layer, "side": side, "bits": bits, "cost": of.cost[layer, side, bits]}
            | {kind: losses.lost[layer, side, bits] for kind, losses in found.losses.items()}
            for layer in of.layers
            for side in SIDES
            for bits in of.bits(side)
        ],
        "shown_bits": {side: shown(of, side) for side in SIDES},
        "layers": [
            {"layer": layer, "elements": of.elements[layer], "proposed": None if own is None else list(own)}
            for layer, own in choice.items()
        ],
        "effective_bits": of.bits_of(choice),
        "uniform_bits": of.bits_of(same),
        "expected": {kind: losses.total(choice) for kind, losses in found.losses.items()},
        "uniform_expected": {kind: losses.total(same) for kind, losses in found.losses.items()},
    }
