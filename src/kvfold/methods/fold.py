"""fold: kvfold's own method. A mean and channel norms per page, a Hadamard rotation, uniform levels, a scale per token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.errors import MethodError
from kvfold.formats import Format, Hadamard, ResidualCodes, UniformTokens
from kvfold.formats.gaussian import gaussian_codes
from kvfold.methods.base import LayerSpec, Method
from kvfold.methods.losses import Bits
from kvfold.methods.options import Numbers, Problem
from kvfold.methods.specs import HELD, holds


@dataclass(frozen=True)
class Fold(Method):
    """Data-free and local to a page: what a page of 128 tokens holds is read from the page alone.

    Keys lose their page's mean, and each channel is divided by the square root of its RMS in the page (InnerQ's
    normalization, which balances a channel's error between its size and its weight). A Hadamard rotation with fixed signs
    then spreads what is large, so that uniform levels with one scale per token fit. The scale of a key keeps its length,
    that of a value makes it unbiased (:mod:`kvfold.formats.uniform`). Values are stored the same way without norms. Scores
    and outputs need no decoded copy: the query is scaled and rotated once per page, the output is rotated back once.

    Parameters
    ----------
    bits : {0, 1, 2, 3, 4, 8}
        Of keys and values; 0: 3 bits for keys and 2 for values. ``k_bits`` and ``v_bits`` set them apart.
    normalize : bool
        Divide key channels by norms per page.
    rotation : int
        Channels that a Hadamard block mixes, a power of two; 0: half of ``head_dim``, 1: none.
    seed : int
        Of the rotation's signs.
    codebook : bool
        Store what has 1 or 2 bits as a byte for 8 / bits channels, from a fixed table for Gaussian vectors, instead of
        uniform levels: less error at the same bits, and slower to decode.
    budget : float
        Effective bits per value, which are spread over layers by what a model loses (:mod:`kvfold.methods.profile`); bits of
        keys or values that are given stay. 0: every layer has the same bits.
    artefact : str
        Where the model's profile is, a file; empty: in kvfold's cache folder, where :func:`kvfold.fold` measures a missing one.
    """

    bits: int = 0
    center: str = "page"
    normalize: bool = True
    rotation: int = 0
    seed: int = 0
    codebook: bool = False
    budget: float = 0.0
    artefact: str = ""

    name = "fold"
    summary = "mean and norms per page, Hadamard rotation, uniform levels, a scale per token"
    source = "kvfold's own"
    url = ""
    centers = True
    bit_widths = (0, *Method.bit_widths)
    found: ClassVar[str] = ""
    """Where the profile of a budget without an artefact was found."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.paper:
            yield Problem("paper", (False,), " is not allowed: the method is published here")
        if self.rotation < 0 or self.rotation & (self.rotation - 1):
            powers = Numbers(0, 2, text="0 (half of head_dim) or a power of two that divides head_dim")
            yield Problem("rotation", powers)
        if self.codebook and not {self.key_bits, self.value_bits} & CODED.keys():
            yield Problem("codebook", (False,), " has no effect: there are tables for 1 and 2 bits")
        if self.budget and (self.bits or (self.k_bits and self.v_bits)):
            yield Problem("budget", (0,), " leaves nothing to choose beside bits, or beside both k_bits and v_bits")
        elif self.budget not in BUDGET and self.budget != 0:
            yield Problem("budget", BUDGET)
        if self.artefact and not self.budget:
            yield Problem("artefact", ("",), " has no effect without a budget")
        if not holds(self.artefact):
            yield Problem("artefact", ("",), f" is not allowed: {HELD}")

    @property
    def spreads(self) -> bool:
        return bool(self.budget)

    def with_bits(self, bits: Bits) -> Fold:
        k_bits, v_bits = bits
        if bits == (3, 2):
            return dataclasses.replace(self, budget=0.0, artefact="", bits=0, k_bits=None, v_bits=None)
        if k_bits == v_bits:
            return dataclasses.replace(self, budget=0.0, artefact="", bits=k_bits, k_bits=None, v_bits=None)
        return dataclasses.replace(self, budget=0.0, artefact="", bits=0, k_bits=k_bits, v_bits=v_bits)

    def check_shape(self, spec: LayerSpec) -> None:
        if self.spreads:
            self.with_bits((self.key_bits, self.value_bits)).check_shape(spec)
        else:
            super().check_shape(spec)

    @property
    def kernel_encodes(self) -> bool:
        return True

    @property
    def key_bits(self) -> int:
        return self.k_bits or self.bits or 3

    @property
    def value_bits(self) -> int:
        return self.v_bits or self.bits or 2

    def _basis(self, spec: LayerSpec) -> Hadamard | None:
        d = spec.head_dim
        if self.rotation == 1:
            return None
        # half of d as far as a power of two divides it: 64 at d = 128, 32 at 64 and 96, 16 at 80
        half = (d // 2) & -(d // 2)
        with self.refusing():
            return Hadamard(d, self.rotation or half, self.seed)

    def _format(self, spec: LayerSpec, operand: str, bits: int, fit: str, norm: str) -> Format:
        with self.refusing():
            codes: Format
            shape = spec.head_dim, self.block, spec.operand(operand)
            if self.codebook and bits in CODED:
                codes = ResidualCodes(*shape, CODED[bits], 256, 1, False, gaussian_codes(CODED[bits]), fit)
            else:
                codes = UniformTokens(*shape, bits, fit)
        return self.paged(codes, self.centered, norm, self._basis(spec))

    def key_format(self, spec: LayerSpec) -> Format:
        self._has_bits()
        return self._format(spec, "key", self.key_bits, "size", "rms" if self.normalize else "")

    def value_format(self, spec: LayerSpec) -> Format:
        self._has_bits()
        return self._format(spec, "value", self.value_bits, "unbiased", "")

    def _has_bits(self) -> None:
        if self.spreads:
            raise MethodError(
                f"{self}: a layer's bits are a model's: give the method to kvfold.fold, or a profile's recipe "
                "(kvfold.methods.profile.recipe)"
            )

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        basis = self._basis(spec)
        held = {} if basis is None else basis.tables(device)
        if self.codebook:
            place = torch.empty(0, device=device).device
            for bits in {self.key_bits, self.value_bits} & CODED.keys():
                held[f"codes{bits}"] = gaussian_codes(CODED[bits]).on(place).codes
        return held


BUDGET = Numbers(1, 8, 0, "0 (the same bits for all layers) or 1 to 8")

CODED = {1: 8, 2: 4}
"""Channels that share a byte of the fixed table, by bits."""
