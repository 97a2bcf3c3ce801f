"""Key-value pairs that ``kvfold compare`` asks for after each prefix, beside the text: the divergence of a text does not show
what exact retrieval loses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.engines.transformers.shared import SharedPrompt
from kvfold.errors import KVFoldError
from kvfold.evaluation.decoding import room
from kvfold.evaluation.perplexity import score
from kvfold.evaluation.windows import retrieval_window

if TYPE_CHECKING:
    from kvfold.methods.base import Method

PAIRS = 8
"""Asked for by default: as many as a call of ``CALL`` tokens holds."""
CALL = 128
"""Tokens of a call that asks, at least. None of them helps another: what is asked for is in the list alone."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a method made of the questions.

    Attributes
    ----------
    exact
        Share of values whose every token is the first choice.
    nll
        Mean negative log-likelihood of the values' tokens, in nats.
    tested
        Tokens that read something packed.
    """

    exact: float
    nll: float
    tested: int


class Pairs:
    """A list of pairs, which a model reads once, and questions about some of them for every method.

    Parameters
    ----------
    tokenizer
    prefix
        Tokens that the list fills.
    count
        Values to ask for at most; the list may have fewer.

    Attributes
    ----------
    count
        Values that are asked for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prefix: int, count: int) -> None:
        self.window = retrieval_window(tokenizer, prefix, None, 0, count)
        self.count = len(self.window.answers)
        self._shared = SharedPrompt()
        self._full: Asked | None = None

    def check(self, max_context: int | None) -> None:
        """Refuse more questions than the model's context holds.

        Raises
        ------
        KVFoldError
            Names how many tokens they take.
        """
        tokens = self.window.ids.shape[1]
        if max_context is not None and tokens > max_context:
            raise KVFoldError(
                f"pairs: {self.count} asked for after {self.window.prefix} tokens take {tokens}, which is beyond the model's "
                f"context of {max_context}; give fewer, or --pairs 0"
            )

    def full(self, model: PreTrainedModel, chunk: int) -> Asked:
        """With everything in full precision, once for all methods."""
        if self._full is None:
            self._full = self._ask(model, "none", chunk)
        return self._full

    def ask(self, model: PreTrainedModel, method: Method, chunk: int) -> Asked:
        """Through a method's cache; the model is not folded afterwards."""
        return self.full(model, chunk) if method.name == "none" else self._ask(model, method, chunk)

    def _ask(self, model: PreTrainedModel, method: str | Method, chunk: int) -> Asked:
        ids = self.window.ids.to(model.device)
        cache = kvfold.fold(model, method, max_length=room(model, ids.shape[1]))
        try:
            found = score(model, ids, self.window.prefilled, cache, max(chunk, CALL), shared=self._shared)
        finally:
            kvfold.unfold(model)
        right = [bool(found.correct[first:stop].all()) for first, stop in self.window.answers]
        values = torch.cat([found.nll[first:stop] for first, stop in self.window.answers])
        return Asked(sum(right) / len(right), float(values.double().mean()), found.tested)
