"""Readers of the CPU kernel: one file per storage format, one function each.

A new format needs its own file here and its line in :data:`READERS`; the loops (:mod:`kvfold.kernels.cpu._attend`) do the rest:
pages, bases, rotation, softmax, shares of threads, windows. Files are imported, and functions compiled, as formats are met.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

from kvfold.formats import (
    AffineGroups,
    Balanced,
    Format,
    GroupCodes,
    Lookup,
    LowRank,
    MixedTokens,
    Outliers,
    ResidualCodes,
    SignSketch,
    SketchedResidual,
    SplitSketch,
    UniformTokens,
)
from kvfold.formats.codebook import AdditiveCodes, BinaryCodes
from kvfold.kernels.cpu.readers.base import CPUReader, made

READERS: dict[type[Format], tuple[str, str]] = {
    AdditiveCodes: ("additive", "AdditiveReader"),
    AffineGroups: ("affine", "AffineReader"),
    Balanced: ("balanced", "BalancedReader"),
    BinaryCodes: ("binary", "BinaryReader"),
    GroupCodes: ("grouped", "GroupedReader"),
    Lookup: ("lookup", "LookupReader"),
    LowRank: ("lowrank", "LowRankReader"),
    MixedTokens: ("mixed", "MixedReader"),
    Outliers: ("outliers", "OutlierReader"),
    ResidualCodes: ("residual", "ResidualReader"),
    SignSketch: ("sketch", "SignReader"),
    SketchedResidual: ("sketch", "SketchedReader"),
    SplitSketch: ("sketch", "SplitReader"),
    UniformTokens: ("uniform", "UniformReader"),
}
"""The file of a format's reader, and its class; Numba is imported with it."""


def why_not(form: Format) -> str | None:
    """Why units of a format cannot be read; None if they can. Needs Numba."""
    if type(form) not in READERS:
        return f"{form.kind} storage; allowed: {', '.join(sorted(kind.kind for kind in READERS))}, dense"
    reader = _class_of(type(form))
    if reader.ordered and form.operand != "plain":
        return "packed for tensor cores"
    return reader.why_not(form)


def reader_of(form: Format) -> CPUReader[Any]:
    """The reader of a format that :func:`why_not` has nothing against."""
    found: CPUReader[Any] = made(form, "reader", lambda: _class_of(type(form))(form))
    return found


@lru_cache
def _class_of(kind: type[Format]) -> type[CPUReader[Any]]:
    file, name = READERS[kind]
    found: type[CPUReader[Any]] = getattr(import_module(f"{__name__}.{file}"), name)
    return found
