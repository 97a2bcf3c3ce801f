"""Columns of the padded batch, as the model counts them, and which of them hold tokens."""

from collections.abc import Callable
from typing import Any

import torch

from kvfold.errors import CacheStateError

AS_IT_BEGINS = (
    "generate() takes a prompt that begins with what the cache holds and is longer. For another prompt call cache.reset(), "
    "or make a new cache; to go back in this one, cache.crop(-number of tokens)"
)


class Columns:
    """The columns that calls brought.

    Attributes
    ----------
    count : int
    calls : list of (int, Tensor or None)
        Columns of a call and their validity, bool [batch, columns]; None: all hold tokens. Calls without padding are joined.
    newest : int
        Columns of the last call.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = self.newest = 0
        self.calls: list[tuple[int, torch.Tensor | None]] = []

    def log(self, tokens: int, valid: torch.Tensor | None) -> None:
        """A call brought ``tokens`` columns."""
        self.count += tokens
        if valid is None and self.calls and self.calls[-1][1] is None:
            self.calls[-1] = (self.calls[-1][0] + tokens, None)
        else:
            self.calls.append((tokens, None if valid is None else valid.clone()))  # not a view of the caller's mask

    def valid(self, batch: int, device: torch.device) -> torch.Tensor:
        """Which columns hold tokens, bool [batch, count]."""
        shown = torch.ones(batch, self.count, dtype=torch.bool, device=device)
        at = 0
        for tokens, valid in self.calls:
            if valid is not None:
                shown[:, at : at + tokens] = valid
            at += tokens
        return shown

    def remove(self, count: int, batch: int) -> list[int]:
        """Forget the last ``count`` columns; returns how many tokens each of ``batch`` sequences loses."""
        removed = [0] * batch
        self.count -= count
        while count:
            tokens, valid = self.calls.pop()
            gone = min(tokens, count)
            lost = [gone] * batch if valid is None else valid[:, tokens - gone :].sum(-1).tolist()
            removed = [a + b for a, b in zip(removed, lost, strict=True)]
            if gone < tokens:
                self.calls.append((tokens - gone, None if valid is None else valid[:, : tokens - gone]))
            count -= gone
        return removed

    def check_width(self, mask: torch.Tensor, new: int) -> None:
        """Refuse a mask that has too few columns for those held and ``new`` ones."""
        if mask.shape[1] < self.count + new:
            raise CacheStateError(
                f"attention_mask: has {mask.shape[1]} columns; the cache holds {self.count} and {new} are new, which "
                f"needs {self.count + new}; {AS_IT_BEGINS}"
            )

    def hidden(self, mask: torch.Tensor, device: torch.device) -> list[int] | None:
        """How many of each sequence's newest tokens a mask hides: padding that followed a sequence's end while others went on.

        ``mask``: bool [batch, columns]. None: it says of all columns what the calls said that they came with.

        Raises
        ------
        CacheStateError
            If it hides other tokens, or shows padding.
        """
        at = 0
        for columns, valid in self.calls:
            shown = mask[:, at : at + columns].to(device).bool()
            if not (bool(shown.all()) if valid is None else torch.equal(shown, valid)):
                return self._hidden(mask[:, : self.count].to(device).bool())
            at += columns
        return None

    def _hidden(self, shown: torch.Tensor) -> list[int]:
        """See :meth:`hidden`, of a mask that differs."""
        before = self.valid(len(shown), shown.device)
        hides = before & ~shown
        ends = (before & shown).flip(-1).cumsum(-1).flip(-1) == 0  # nothing is visible from here on
        wrong = (hides & ~ends) | (shown & ~before)
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            what = "hides a token that the cache holds" if before[row, column] else "shows what was padding"
            raise CacheStateError(
                f"attention_mask: {what}, in column {column} of sequence {row}; allowed: the mask of the calls before, which "
                "may hide the newest tokens of a sequence (padding after its end, which is dropped), with columns for the new "
                "tokens. Other tokens of a folded cache stay visible; crop() takes the newest away"
            )
        return hides.sum(-1).tolist()

    def hide(self, mask: torch.Tensor, device: torch.device) -> None:
        """Count what :meth:`hidden` found as padding from now on."""
        at, calls = 0, []
        for columns, valid in self.calls:
            shown = mask[:, at : at + columns].to(device).bool()
            calls.append((columns, None if valid is None and bool(shown.all()) else shown.clone()))
            at += columns
        self.calls = calls

    def select(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rearrange the batch."""
        self.calls = [(n, valid if valid is None else pick(valid)) for n, valid in self.calls]

    def move(self, device: torch.device) -> None:
        self.calls = [(n, valid if valid is None else valid.to(device)) for n, valid in self.calls]

    def tensors(self) -> list[torch.Tensor]:
        return [valid for _, valid in self.calls if valid is not None]

    def snapshot(self) -> tuple[Any, ...]:
        """What there is; tensors, which nothing writes to, are not copied."""
        return self.count, self.newest, self.calls.copy()

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Be again what :meth:`snapshot` saw."""
        self.count, self.newest, self.calls = snapshot
