"""Storage formats: how the bytes of keys and values lie. Formats know no method and no cache."""

from kvfold.formats.affine import AffineGroups
from kvfold.formats.balanced import Balanced
from kvfold.formats.base import Fields, Format
from kvfold.formats.basis import Basis, Hadamard, Rotation, Sketch
from kvfold.formats.dense import Dense
from kvfold.formats.grouped import GroupCodes
from kvfold.formats.lookup import Lookup
from kvfold.formats.lowrank import LowRank
from kvfold.formats.mixed import MixedTokens
from kvfold.formats.outliers import Outliers
from kvfold.formats.paged import PAGE, Paged, PagedFormat
from kvfold.formats.projected import Projected
from kvfold.formats.residual import ResidualCodes
from kvfold.formats.sketch import SignSketch, SketchedResidual, SplitSketch
from kvfold.formats.uniform import UniformTokens

__all__ = [
    "PAGE",
    "AffineGroups",
    "Balanced",
    "Basis",
    "Dense",
    "Fields",
    "Format",
    "GroupCodes",
    "Hadamard",
    "Lookup",
    "LowRank",
    "MixedTokens",
    "Outliers",
    "Paged",
    "PagedFormat",
    "Projected",
    "ResidualCodes",
    "Rotation",
    "SignSketch",
    "Sketch",
    "SketchedResidual",
    "SplitSketch",
    "UniformTokens",
]
