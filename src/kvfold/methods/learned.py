"""What methods share that read an artefact: codebooks or datatypes learned once per model by ``kvfold calibrate``."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from kvfold.arithmetic import lasting
from kvfold.artefact import Artefact, load_cached
from kvfold.errors import MethodError, warn_once
from kvfold.methods.base import LayerSpec, Method
from kvfold.methods.recipe import get
from kvfold.methods.specs import HELD, holds


@dataclass(frozen=True)
class LearnedMethod(Method):
    """A method with learned tables.

    Parameters
    ----------
    artefact : str
        Where the tables are: a file, a folder or a hub id; made by ``kvfold calibrate``.
    """

    artefact: str = ""

    shapes_only: ClassVar[bool] = False
    """Whether tables have the right shapes and no meaning; see :meth:`by_shapes`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not holds(self.artefact):
            raise MethodError(f"{self.name}: artefact={self.artefact!r} is not allowed: {HELD}")

    def learned_shape(self) -> dict[str, object]:
        """Options that an artefact must have been made with; written into it and compared when it is read."""
        return {"k_bits": self.key_bits, "v_bits": self.value_bits}

    @abstractmethod
    def build(self, parts: dict[str, torch.Tensor], rotary: int) -> Any:
        """A layer's tables from its tensors in the artefact; ``rotary`` channels are turned by RoPE."""

    @abstractmethod
    def blank(self, num_kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
        """A layer's tensors as ``kvfold calibrate`` makes them, in shapes and dtypes; their numbers mean nothing."""

    def by_shapes(self) -> Self:
        """The same method with :meth:`blank` tables in place of an artefact's, for sizes: nothing is to be stored with it."""
        found = copy.copy(self)
        object.__setattr__(found, "shapes_only", True)
        return found

    def learned(self, spec: LayerSpec) -> Any:
        """What :meth:`build` made of a layer's tensors; made once.

        Raises
        ------
        MethodError
            If there is no artefact, or it is for other options or another shape of model.
        """
        if self.shapes_only:
            return _of_shapes(self, spec.layer_idx, spec.num_kv_heads, spec.head_dim, rotary_dim(spec))
        if not self.artefact:
            raise self.missing()
        loaded = load_cached(self.artefact)
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim, rotary_dim(spec))
        try:
            return _built(loaded, self, spec.layer_idx, *shape)
        except MethodError as error:
            raise MethodError(f"{self.name}: artefact={self.artefact}: {error}") from None

    def missing(self) -> MethodError:
        """The error of a method without its artefact."""
        return MethodError(
            f"{self.name}: artefact is missing: what it needs is learned per model; make it with 'kvfold calibrate "
            f'--method "{self}" --text FILE --out FILE.safetensors\' and give artefact=FILE.safetensors'
        )

    def with_bits(self, bits: tuple[int, int]) -> Self:
        k_bits, v_bits = (None if width == self.bits else width for width in bits)
        return replace(self, k_bits=k_bits, v_bits=v_bits)

    def check_model(self, config: object) -> None:
        """Refuse a model that the artefact was not made for, and warn of what :meth:`notes` says."""
        if self.artefact:
            load_cached(self.artefact).check_model(config)
            for note in self.notes(config):
                warn_once(note)


SHORTEST, LONGEST = 16_384, 131_072
"""Tokens of context that a model is taken to have at least and at most."""


def span(config: object) -> int:
    """Positions that keys are taken to lie at, and distances that queries are taken to look back, while tables are learned:
    the model's context, between 16,384 and 131,072 tokens.

    What is learned for half of the positions fails at the others: with 16,384 of 32,768, NOVA-KV lost two to four times as
    much at 30,000 tokens as at 16,384.
    """
    return min(max(getattr(config, "max_position_embeddings", None) or SHORTEST, SHORTEST), LONGEST)


def ready(spec: str | Method) -> Method:
    """:func:`kvfold.methods.get`, for what loads a model next: artefacts are read first, and what is wrong with them is said.

    Raises
    ------
    MethodError
        As of :func:`kvfold.methods.get`, and for a part that has no artefact and needs one.
    ArtefactError
        For an artefact that is not there, or is none.
    """
    method = get(spec)
    for part in method.parts():
        if isinstance(part, LearnedMethod):
            if not part.artefact:
                raise part.missing()
    for place in places(method):
        load_cached(place)
    return method


def places(method: Method) -> Iterator[str]:
    """Where the artefacts of a method's parts are, those that have one; profiles of budgets among them."""
    named = (getattr(part, "artefact", "") or getattr(part, "found", "") for part in method.parts())
    yield from filter(None, named)


def rotary_dim(spec: LayerSpec) -> int:
    """Channels that RoPE rotates; where there is no RoPE any pairing serves, and all channels are paired."""
    return spec.head_dim if spec.rope is None else 2 * spec.rope.inv_freq.numel()


@lasting(1024)
def _built(
    artefact: Artefact,
    method: LearnedMethod,
    layer: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    rotary: int,
) -> Any:
    expected = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary,
        **method.learned_shape(),
    }
    if layer in artefact.shape.get("no_rope_layers", []):
        del expected["rotary_dim"]
    has = {"mean": False, **artefact.shape, "method": artefact.method.partition(":")[0]}
    for name, value in {"method": method.name, **expected}.items():
        if name == "v_bits" and name not in has:
            raise MethodError(
                f"it holds keys alone, learned as {artefact.method}, and codes of values are asked for; give values= as there, "
                "for keys of a pair (k=) too"
            )
        if has.get(name) != value:
            raise MethodError(
                f"it is for {name}={has.get(name)}, and {name}={value} is asked for (it is for {artefact.model})"
            )
    parts = artefact.layer(layer)
    if not parts:
        raise MethodError(f"it holds nothing for layer {layer}")
    return method.build(parts, rotary)


@lasting(256)
def _of_shapes(method: LearnedMethod, layer: int, num_kv_heads: int, head_dim: int, rotary: int) -> Any:
    """A layer's own, as an artefact has them, so that they are counted alike."""
    return method.build(method.blank(num_kv_heads, head_dim), rotary)
