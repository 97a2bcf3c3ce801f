"""Codes in the order of tensor cores (:mod:`kvfold.formats.packing`), to be unpacked: uniform levels and affine groups.

The kernels that attend to these orders multiply words as they lie and have readers of their own.
"""

from functools import lru_cache
from typing import Any

import torch

from kvfold.formats import AffineGroups, Fields, Format, UniformTokens
from kvfold.formats.packing import group_order
from kvfold.kernels.readers._fragments import read_affine, read_uniform
from kvfold.kernels.readers.base import Reader

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


@lru_cache
def _places(operand: str, axis: str, groups: int, device: torch.device) -> torch.Tensor:
    return torch.argsort(group_order(operand, axis, groups)).to(device=device, dtype=torch.int32)


@lru_cache
def _sign_bits(device: torch.device) -> torch.Tensor:
    """Bit of the sign of each of a group's 32 members; see :func:`kvfold.formats.packing.pack_signs`."""
    i = torch.arange(32, device="cpu")
    return (i % 2 * 16 + i // 16 * 8 + i % 16 // 8 * 4 + i % 8 // 2).to(device=device, dtype=torch.int32)


FRAGMENTS: dict[type[Format], type[Reader[Any]]] = {
    UniformTokens: UniformFragments,
    AffineGroups: AffineFragments,
}


def why_not(form: Format) -> str | None:
    """Why a format in the order of tensor cores cannot be unpacked; None if it can."""
    if type(form) not in FRAGMENTS:
        return f"{form.kind} storage packed for tensor cores; allowed: uniform, affine"
    if form.head_dim & (form.head_dim - 1):
        return f"head_dim={form.head_dim}; allowed: powers of two"
    if isinstance(form, AffineGroups):
        if form.group % 32:
            return f"group={form.group}; allowed: multiples of 32"
        if form.axis == "channel" and form.group & (form.group - 1):
            return f"group={form.group}; allowed: powers of two"
        if form.mode != "asym" and form.group != 32:
            return f"group={form.group} in mode {form.mode}; allowed: 32"
    return None
