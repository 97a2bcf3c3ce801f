"""Readers: one file per storage format, one function each, for all kernels in plain Triton.

A new format needs its own file here and its line in :data:`READERS`; the kernels (:mod:`kvfold.kernels.generic.decode`) do the
rest: pages, bases, rotation, softmax, splits, windows.
"""

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
    UniformTokens,
)
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.kernels.generic.readers import fragments
from kvfold.kernels.generic.readers.additive import AdditiveReader
from kvfold.kernels.generic.readers.affine import AffineReader
from kvfold.kernels.generic.readers.balanced import BalancedReader
from kvfold.kernels.generic.readers.base import Reader
from kvfold.kernels.generic.readers.binary import BinaryReader
from kvfold.kernels.generic.readers.grouped import GroupReader
from kvfold.kernels.generic.readers.lookup import LookupReader
from kvfold.kernels.generic.readers.lowrank import LowRankReader
from kvfold.kernels.generic.readers.mixed import MixedReader
from kvfold.kernels.generic.readers.outliers import OutliersReader
from kvfold.kernels.generic.readers.residual import ResidualReader
from kvfold.kernels.generic.readers.sketch import SketchReader
from kvfold.kernels.generic.readers.uniform import UniformReader

READERS: dict[type[Format], type[Reader[Any]]] = {
    AdditiveCodes: AdditiveReader,
    AffineGroups: AffineReader,
    Balanced: BalancedReader,
    BinaryCodes: BinaryReader,
    GroupCodes: GroupReader,
    Lookup: LookupReader,
    LowRank: LowRankReader,
    MixedTokens: MixedReader,
    Outliers: OutliersReader,
    ResidualCodes: ResidualReader,
    SignSketch: SketchReader,
    UniformTokens: UniformReader,
}


def why_not(form: Format, any_order: bool = False) -> str | None:
    """Why tiles of a format cannot be read; None if they can. ``any_order``: of codes in the order of tensor cores, too."""
    reader = READERS.get(type(form))
    if _is_of_fragments(form):
        return fragments.why_not(form) if any_order else "packed for tensor cores"
    if reader is None:
        return f"{form.kind} storage; allowed: {', '.join(sorted(kind.kind for kind in READERS))}"
    return reader.why_not(form)


def reader_of(form: Format) -> Reader[Any]:
    """The reader of a format that :func:`why_not` has nothing against."""
    if _is_of_fragments(form):
        return fragments.FRAGMENTS[type(form)](form)
    return READERS[type(form)](form)


def _is_of_fragments(form: Format) -> bool:
    reader = READERS.get(type(form))
    return form.operand != "plain" and not (reader is not None and reader.any_order)


__all__ = ["READERS", "Reader", "reader_of", "why_not"]
