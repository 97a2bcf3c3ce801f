"""What a cache takes, as rows say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.evaluation.suites.base import Sizes

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache


def sizes_of(cache: FoldedCache) -> Sizes:
    """Of a cache that holds something."""
    held = cache.nbytes()
    without, within = (float(cache.effective_bits(tables)) if held["packed"] else None for tables in (False, True))
    return Sizes((without, within), int(held["total"]), int(cache.full_nbytes()))
