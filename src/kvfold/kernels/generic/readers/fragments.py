"""Codes in the order of tensor cores (:mod:`kvfold.formats.packing`), to be unpacked.

The kernels that attend to these orders multiply words as they lie and have readers of their own.
"""

import math
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import (
    AffineGroups,
    Fields,
    Format,
    Lookup,
    LowRank,
    MixedTokens,
    Outliers,
    SignSketch,
    UniformTokens,
)
from kvfold.formats.packing import group_order
from kvfold.kernels.generic.readers._fragments import (
    read_affine,
    read_lookup,
    read_lowrank,
    read_mixed,
    read_sketch,
    read_uniform,
)
from kvfold.kernels.generic.readers.base import Reader
from kvfold.kernels.generic.readers.lookup import SCALING, constants_of, levels_on
from kvfold.kernels.generic.readers.outliers import OutliersReader

MODES = {"asym": 0, "sym": 1, "hybrid": 2}


class UniformFragments(Reader[UniformTokens]):
    read = read_uniform
    names = ("codes", "scale")
    words = ()

    @property
    def spec(self) -> tuple[int, ...]:
        return (self.form.head_dim, self.form.bits_per_code, int(self.form.operand == "key"))


class AffineFragments(Reader[AffineGroups]):
    """``tables``: where a row's groups lie, in plain order, and bits of a group's signs."""

    read = read_affine

    def __init__(self, form: AffineGroups) -> None:
        super().__init__(form)
        self.names = ("codes", "meta") if form.mode == "asym" else ("codes", "scale", "aux")
        self.words = ("aux",)

    @property
    def spec(self) -> tuple[int, ...]:
        form = self.form
        axis = int(form.axis == "channel")
        return (form.head_dim, form.bits_per_code, int(form.operand == "key"), axis, MODES[form.mode], form.group)

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        return tuple(stored[n].view(torch.int32) if n in self.words else stored[n] for n in self.names)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        form = self.form
        groups = form.head_dim if form.axis == "token" else 32 * form.head_dim // form.group
        return (_places(form.operand, form.axis, groups, device), _sign_bits(device))


class LookupFragments(Reader[Lookup]):
    """``tables``: the levels; for constants per channel also those."""

    read = read_lookup
    words = ()

    def __init__(self, form: Lookup) -> None:
        super().__init__(form)
        self.names = ("codes",) if form.scaling == "channel" else ("codes", "scale")

    @property
    def spec(self) -> tuple[int, ...]:
        form = self.form
        return (form.head_dim, form.bits_per_code, int(form.operand == "key"), SCALING[form.scaling])

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        form = self.form
        levels = levels_on(form.levels, device)
        if form.scaling != "channel":
            return (levels,)
        assert form.channels is not None
        return (levels, constants_of(form.channels.on(device), max(map(abs, form.levels))))


class OutliersFragments(OutliersReader):
    """Elements of a block in fp16 lie as in plain order."""

    def __init__(self, form: Outliers) -> None:
        super().__init__(form)
        assert isinstance(form.inner, Lookup)
        self.inner = LookupFragments(form.inner)
        self.words = ()


class SketchFragments(Reader[SignSketch]):
    read = read_sketch
    names = ("signs", "rms")
    words = ()

    @property
    def spec(self) -> tuple[float, ...]:
        form = self.form
        return (form.sketches[0], int(form.operand == "key"), form.gains[0] * math.sqrt(form.head_dim))


class LowRankFragments(Reader[LowRank]):
    """Fields: the inner format's, rows of tokens, bases of pages."""

    read = read_lowrank
    of_pages = True

    def __init__(self, form: LowRank) -> None:
        super().__init__(form)
        assert isinstance(form.inner, AffineGroups)
        self.inner = AffineFragments(form.inner)
        self.names = (*self.inner.names, "row", "basis")

    @property
    def spec(self) -> tuple[Any, ...]:
        return (self.form.head_dim, self.form.rank, len(self.inner.names), self.inner.read, self.inner.spec)

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        return (*self.inner.fields(stored), stored["row"], stored["basis"])

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return self.inner.tables(device)


class MixedFragments(Reader[MixedTokens]):
    """``tables``: bits of a unit's tokens, and those of the tokens before each."""

    read = read_mixed
    names = ("codes", "low", "which", "meta")
    words = ("which", "meta")

    @property
    def spec(self) -> tuple[int, ...]:
        form = self.form
        return (
            *(form.head_dim, form.bits_per_code, int(form.operand == "key"), form.extra_bits),
            *(int(form.axis == "channel"), form.block, form.salient),
        )

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        low = stored["low" if self.form.salient else "codes"]
        return (stored["codes"], low, stored["which"].view(torch.int32), stored["meta"].view(torch.int32))

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (_sign_bits(device), _bits_before(device))


@lasting()
def _places(operand: str, axis: str, groups: int, device: torch.device) -> torch.Tensor:
    return torch.argsort(group_order(operand, axis, groups)).to(device=device, dtype=torch.int32)


@lasting()
def _sign_bits(device: torch.device) -> torch.Tensor:
    """Bit of the sign of each of a group's 32 members; see :func:`kvfold.formats.packing.pack_signs`."""
    i = torch.arange(32, device="cpu")
    return (i % 2 * 16 + i // 16 * 8 + i % 16 // 8 * 4 + i % 8 // 2).to(device=device, dtype=torch.int32)


@lasting()
def _bits_before(device: torch.device) -> torch.Tensor:
    """Bits of the tokens before each of a unit's 32, int32 [32]."""
    bits = 1 << _sign_bits(torch.device("cpu")).long()
    return (bits.cumsum(0) - bits).to(device=device, dtype=torch.int32)


FRAGMENTS: dict[type[Format], type[Reader[Any]]] = {
    UniformTokens: UniformFragments,
    AffineGroups: AffineFragments,
    Lookup: LookupFragments,
    LowRank: LowRankFragments,
    MixedTokens: MixedFragments,
    Outliers: OutliersFragments,
    SignSketch: SketchFragments,
}


def why_not(form: Format) -> str | None:
    """Why a format in the order of tensor cores cannot be unpacked; None if it can."""
    if type(form) not in FRAGMENTS:
        return f"{form.kind} storage packed for tensor cores; allowed: {', '.join(kind.kind for kind in FRAGMENTS)}"
    if form.head_dim & (form.head_dim - 1):
        return f"head_dim={form.head_dim}; allowed: powers of two"
    if isinstance(form, LowRank):
        if not isinstance(form.inner, AffineGroups):
            return f"low rank beside {form.inner.kind}; allowed: affine"
        return why_not(form.inner)
    if isinstance(form, SignSketch) and (len(form.sketches) != 1 or form.sketches[0] & (form.sketches[0] - 1)):
        return f"sketches of {'+'.join(map(str, form.sketches))} rows; allowed: one, of a power of two"
    if isinstance(form, Outliers):
        return OutliersReader.why_not(form)
    if isinstance(form, AffineGroups):
        if form.group % 32:
            return f"group={form.group}; allowed: multiples of 32"
        if form.axis == "channel" and form.group & (form.group - 1):
            return f"group={form.group}; allowed: powers of two"
        if form.mode != "asym" and form.group != 32:
            return f"group={form.group} in mode {form.mode}; allowed: 32"
    return None
