"""A model's profile: what it loses by layer, side and bits, of retrieval and of running text, kept as an artefact.

It is measured once (:func:`kvfold.engines.transformers.profiles.measure`), and serves every budget: the bits of
``fold:budget=B`` follow from it by :func:`kvfold.methods.losses.spread`, in closed form, and are a recipe like any other.
"""

from __future__ import annotations

import torch

from kvfold.artefact import Artefact
from kvfold.errors import KVFoldError, MethodError
from kvfold.methods.base import LayerSpec, Method
from kvfold.methods.losses import FULL_BITS, SIDES, Bits, Choice, Losses, spread
from kvfold.methods.recipe import Recipe, get

MEASURE = 1
"""Version of the measure: a profile of another one is measured anew, or refused where it is named."""
BITS: dict[str, tuple[int, ...]] = {"k": (1, 2, 3, 4, 8), "v": (1, 2, 3, 4)}
"""That a profile of fold says the losses of."""
KINDS = ("retrieval", "text")
AIMS = (*KINDS, "both")
_NAMES = {"k": "key", "v": "value"}


def as_method(method: Method, choice: Choice) -> Method:
    """A choice as one method: the commonest bits for most layers, others by number, the rest kept."""
    count: dict[Bits, int] = {}
    for own in choice.values():
        if own is not None:
            count[own] = count.get(own, 0) + 1
    if not count:
        return get("none")
    base = max(count, key=lambda own: (count[own], own))
    others = {layer: method.with_bits(own) for layer, own in choice.items() if own not in (None, base)}
    kept = [layer for layer, own in choice.items() if own is None]
    whole = method.with_bits(base)
    return get(str(Recipe(whole, kept, others))) if kept or others else whole  # what a person would type


def tensors(found: dict[str, Losses]) -> dict[str, torch.Tensor]:
    """Losses as an artefact has them: ``layers.<i>.key.retrieval``, ``.text`` and ``.cost``, a number for each of its bits."""
    first = found[KINDS[0]]
    held: dict[str, torch.Tensor] = {}
    for layer, size in first.elements.items():
        for side in SIDES:
            at = f"layers.{layer}.{_NAMES[side]}"
            every = first.bits(side)
            for kind in KINDS:
                held[f"{at}.{kind}"] = torch.tensor([found[kind].lost[layer, side, b] for b in every]).double()
            held[f"{at}.cost"] = torch.tensor([first.cost[layer, side, b] for b in every]).double()
        held[f"layers.{layer}.elements"] = torch.tensor(size)
    return held


def losses(profile: Artefact) -> dict[str, Losses]:
    """What :func:`tensors` wrote.

    Raises
    ------
    MethodError
        The artefact is no profile, or of another version of the measure.
    """
    if (version := profile.shape.get("measure")) != MEASURE:
        what = (
            "is no profile" if version is None else f"is of measure {version}, and this version of kvfold has {MEASURE}"
        )
        raise MethodError(f"artefact: what was made for {profile.model} with {profile.method} {what}; make it again")
    found = {}
    for kind in KINDS:
        lost, cost, elements = {}, {}, {}
        for layer in profile.shape["layers"]:
            held = profile.layer(layer)
            elements[layer] = int(held["elements"])
            for side in SIDES:
                at = _NAMES[side]
                for bits, loss, price in zip(
                    profile.shape[f"{side}_bits"],
                    held[f"{at}.{kind}"].tolist(),
                    held[f"{at}.cost"].tolist(),
                    strict=True,
                ):
                    lost[layer, side, bits], cost[layer, side, bits] = loss, price
        found[kind] = Losses(lost, cost, elements)
    return found


def aimed(found: dict[str, Losses], aim: str, at: Bits) -> Losses:
    """Losses of retrieval, of running text, or of both, each as a multiple of what the bits ``at`` lose everywhere."""
    return found["retrieval"].together(found["text"], at) if aim == "both" else found[aim]


def recipe(method: Method, profile: Artefact) -> Method:
    """A method with a budget as the recipe that it is on a profile's model.

    Raises
    ------
    MethodError
        The profile is none, is of other options of the method, or the budget is below the least.
    """
    plain = method.with_bits((3, 2))
    if profile.method != str(plain):
        raise MethodError(
            f"artefact: what was made for {profile.model} is of {profile.method}, and {plain} is asked for; make it with "
            f"--method {plain}"
        )
    found = aimed(losses(profile), "both", (method.key_bits, method.value_bits))
    try:
        choice = spread(found.only(method.k_bits, method.v_bits), method.budget)  # type: ignore[attr-defined]
    except KVFoldError as error:
        raise MethodError(f"{method}: {error}") from None
    return as_method(plain, choice)


def stand_in(method: Method, layers: int, head_dim: int) -> Method:
    """A recipe of as many bytes as a profile's would be, for sizes where a model was not measured yet."""
    lost, cost = {}, {}
    for layer in range(layers):
        spec = LayerSpec(layer, layers, 1, 1, head_dim)
        for side, every in BITS.items():
            for bits in every:
                own = method.with_bits((bits, bits))
                form = own.key_format(spec) if side == "k" else own.value_format(spec)
                cost[layer, side, bits] = float(form.bits)
                lost[layer, side, bits] = 4.0**-bits * (10 if side == "k" else 1)
    flat = Losses(lost, cost, dict.fromkeys(range(layers), head_dim))
    return as_method(method.with_bits((3, 2)), spread(flat.only(method.k_bits, method.v_bits), method.budget))  # type: ignore[attr-defined]


__all__ = [
    "AIMS",
    "BITS",
    "FULL_BITS",
    "KINDS",
    "MEASURE",
    "aimed",
    "as_method",
    "losses",
    "recipe",
    "stand_in",
    "tensors",
]
