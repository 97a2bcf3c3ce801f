"""Readers of the CPU kernel: one file per storage format, one function each.

A new format needs its own file here and its line in :data:`READERS`; the loops (:mod:`kvfold.kernels.cpu._attend`) do the rest:
pages, bases, rotation, softmax, shares of threads, windows. Files are imported, and functions compiled, as formats are met.
"""

from importlib import import_module
from typing import Any

from kvfold.arithmetic import lasting
from kvfold.formats import (
    PAGE,
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
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.formats.packing import UNIT
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


UNORDERED = (AdditiveCodes, GroupCodes, ResidualCodes)
"""Formats whose bytes lie in one order for every operand."""


def why_not(form: Format) -> str | None:
    """Why units of a format cannot be read; None if they can. Plans ask it, so it imports no Numba."""
    if type(form) not in READERS:
        return f"{form.kind} storage; allowed: {', '.join(sorted(kind.kind for kind in READERS))}, dense"
    if form.operand != "plain" and type(form) not in UNORDERED:
        return "packed for tensor cores"
    if form.block % UNIT:
        return f"blocks of {form.block} tokens; allowed: multiples of {UNIT}"
    if isinstance(form, LowRank) and form.page not in (0, PAGE):
        return f"a basis per {form.page} tokens; allowed: {PAGE}, or one of the sequence"
    if isinstance(form, SplitSketch) and form.page not in (0, PAGE):
        return f"outlier channels per {form.page} tokens; allowed: {PAGE}, or once"
    if isinstance(form, Balanced | LowRank | Outliers | SketchedResidual):
        return why_not(form.inner)
    return None


def reader_of(form: Format) -> CPUReader[Any]:
    """The reader of a format that :func:`why_not` has nothing against."""
    found: CPUReader[Any] = made(form, "reader", lambda: _class_of(type(form))(form))
    return found


@lasting()
def _class_of(kind: type[Format]) -> type[CPUReader[Any]]:
    file, name = READERS[kind]
    found: type[CPUReader[Any]] = getattr(import_module(f"{__name__}.{file}"), name)
    return found
