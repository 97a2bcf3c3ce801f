"""What caches a model is to make by itself, and who wants them: ``fold(always=True)``, and ``with`` blocks that may overlap.

Blocks of several threads, or of generators that wait, end in any order. A model makes folded caches until the last has ended.
What it is told lies on the model, so that copies of it know it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.making import make_cache
from kvfold.methods import Method

WISHES = "_kvfold_always"

changing = RLock()
"""Held while a model is folded or unfolded."""


@dataclass(eq=False)
class Wish:
    """What caches to make, until :func:`kvfold.unfold` or, if it is that of a ``with`` block, until that has ended."""

    method: Method
    kernel: str | None = None
    max_length: int | None = None
    of_block: bool = False
    ended: bool = False

    def cache(self, model: PreTrainedModel) -> FoldedCache:
        return make_cache(model, self.method, self.kernel, self.max_length)


_entered: ContextVar[tuple[Wish, ...]] = ContextVar("entered", default=())
"""Of blocks that this thread, or this task, is in; those that have ended may be among them."""


@dataclass
class Wishes:
    """Of a model.

    Attributes
    ----------
    told : list of Wish
        Oldest first; one of them at most is not a block's.
    stays : bool
        The model is folded besides, and stays so when no block is left.
    """

    told: list[Wish] = field(default_factory=list)
    stays: bool = False

    def add(self, wish: Wish) -> None:
        """Only the newest of those that no block has is kept."""
        self.told = [*(one for one in self.told if wish.of_block or one.of_block), wish]
        if wish.of_block:
            _entered.set((*(one for one in _entered.get() if not one.ended), wish))

    def drop(self, wish: Wish) -> None:
        """A block has ended."""
        wish.ended = True
        self.told = [one for one in self.told if one is not wish]

    def newest(self) -> Wish | None:
        """What a call gets: the newest of what this thread's blocks and ``fold`` said, else what others' said."""
        told, entered = self.told, _entered.get()
        near = [wish for wish in told if not wish.of_block or any(wish is one for one in entered)]
        return next(reversed(near or told), None)


def of(model: nn.Module) -> Wishes | None:
    """What a model was told, if it was."""
    found: Any = model.__dict__.get(WISHES)
    return found


def cache_for(model: Any) -> FoldedCache | None:
    """The cache that a model makes for a call; None if it was unfolded meanwhile."""
    wishes = of(model)
    wish = wishes.newest() if wishes is not None else None
    return None if wish is None else wish.cache(model)
