"""Means, intervals and paired differences: what a number of items shows, and what it does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import product

import torch

LEVEL = 0.95
RESAMPLES = 2000
"""Bootstrap resamples; they are drawn with a fixed seed, so that the same rows give the same interval."""
LEAST = 6
"""Fewer pairs cannot show a difference: of five, one way or the other, the chance is 1 in 16."""
EXACT = 12
"""Up to so many pairs that differ, all sign flips are counted; beyond, they are drawn."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over items and its 95% interval; the interval is None for a single item, which has none.

    Attributes
    ----------
    mean : float
    low, high : float or None
    items : int
    """

    mean: float
    low: float | None
    high: float | None
    items: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """A method minus the baseline on the same items.

    Attributes
    ----------
    mean, low, high
        Of the differences, as in :class:`Estimate`.
    items : int
        Items that both have.
    p : float
        Chance of a mean at least as far from 0 if both were alike: the sign of every difference flipped at random.
    verdict : {"better", "worse", "no difference shown", "too few items"}
        ``better`` and ``worse`` need an interval without 0 and p below 0.05.
    """

    mean: float
    low: float | None
    high: float | None
    items: int
    p: float
    verdict: str


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval: Wilson's for values that are 0 or 1, where the bootstrap of all alike is empty; else the bootstrap's.

    Raises
    ------
    ValueError
        There are no values.
    """
    if not values:
        raise ValueError("values: none given")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, None, None, 1)
    if all(value in (0, 1) for value in values):
        return Estimate(mean, *wilson(mean, len(values)), len(values))
    return Estimate(mean, *bootstrap(values), len(values))


def wilson(share: float, items: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    z = 1.959964
    middle = share + z * z / (2 * items)
    spread = z * math.sqrt(share * (1 - share) / items + z * z / (4 * items * items))
    scale = 1 + z * z / items
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentile interval of the mean over resampled items."""
    known = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(known), (RESAMPLES, len(known)), generator=generator)
    means = known[picked].mean(1)
    low, high = torch.quantile(means, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)).tolist()
    return low, high


def flips(differences: Sequence[float]) -> float:
    """How often flipping signs at random gives a mean at least as far from 0; two-sided, without assuming a distribution."""
    nonzero = torch.tensor([value for value in differences if value], dtype=torch.float64)
    if not len(nonzero):
        return 1.0
    seen = float(nonzero.sum().abs())
    if len(nonzero) <= EXACT:
        signs = torch.tensor(list(product((-1.0, 1.0), repeat=len(nonzero))), dtype=torch.float64)
        added = 0
    else:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (10_000, len(nonzero)), generator=generator).double() * 2 - 1
        added = 1  # what was seen is one of them
    sums = (signs @ nonzero).abs()
    far = int((sums >= seen * (1 - 1e-12)).sum())
    return (far + added) / (len(signs) + added)


def paired(values: Sequence[float], baseline: Sequence[float], higher_is_better: bool) -> Difference:
    """Compare two methods on the same items.

    Parameters
    ----------
    values, baseline
        One number per item, item by item alike.

    Raises
    ------
    ValueError
        There are none, or not as many of one as of the other.
    """
    if not values or len(values) != len(baseline):
        raise ValueError(f"values: {len(values)} and {len(baseline)}; give as many, item by item")
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    mean = math.fsum(differences) / len(differences)
    p = flips(differences)
    if len(differences) == 1:
        return Difference(mean, None, None, 1, p, "too few items")
    low, high = bootstrap(differences)
    if len(differences) < LEAST:
        verdict = "too few items"
    elif low <= 0 <= high or p >= 1 - LEVEL:
        verdict = "no difference shown"
    else:
        verdict = "better" if (mean > 0) == higher_is_better else "worse"
    return Difference(mean, low, high, len(differences), p, verdict)
