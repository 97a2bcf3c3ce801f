"""The beginning of a text under every method: quality, sizes and speeds of one run, as ``kvfold compare`` shows them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.evaluation.decoding import decode, room, warm_up
from kvfold.evaluation.perplexity import Reference, now, reference, score
from kvfold.evaluation.sizes import sizes_of
from kvfold.evaluation.suites.base import Item, Measure, Own, Prompt, Suite
from kvfold.evaluation.suites.pairs import Pairs
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import MIN_PREFIX, encode

if TYPE_CHECKING:
    from kvfold.methods.base import Method

NEW_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Beginning(Suite):
    """One item a length: at each the same tokens are scored, those after the longest, and a shorter one begins later.

    Attributes
    ----------
    tokenizer
    text
    tokens, new_tokens
        Scored, and generated after them to time decoding.
    max_context
        Of the model; None: not checked here.
    on_tokens
        Called with what runs and how many tokens it has done.
    pairs
        Key-value pairs that are asked for after as many tokens, in a prompt of their own; 0: none.
    """

    tokenizer: PreTrainedTokenizerBase
    text: Text
    tokens: int = 512
    new_tokens: int = NEW_TOKENS
    max_context: int | None = None
    on_tokens: Callable[[str, int], None] | None = dataclasses.field(default=None, compare=False)
    pairs: int = 0

    name = "compare"
    summary = "a text's beginning: divergence, sizes, and the speed of prefill and decoding"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("kld", higher_is_better=False, shown="number"),
        Measure("top1"),
        Measure("top5"),
        Measure("nll", higher_is_better=False, shown="perplexity"),
        Measure("pairs_exact"),
        Measure("pairs_nll", higher_is_better=False, shown="number"),
    )
    panels = ("pairs_nll", "pairs_exact")

    def items(self, lengths: Sequence[int], limit: int, seeds: int) -> list[Item]:
        """A text has one beginning: there is one item a length and seed, whatever the limit."""
        tags = (("longest", max(lengths)),)
        return [Item(self._task, length, seed, 0, tags) for length in sorted(set(lengths)) for seed in range(seeds)]

    @property
    def _task(self) -> str:
        return Path(self.text.source).stem

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], torch.Tensor]:
        """Token ids by length and the longest length."""
        return {}

    @cached_property
    def _last(self) -> dict[tuple[int, int], Reference]:
        """Of the newest item."""
        return {}

    def prompt(self, item: Item) -> Prompt:
        assert item.length is not None
        at = (item.length, dict(item.tags)["longest"])
        if at not in self._pieces:
            found = encode(self.tokenizer, self.text, at, self.tokens, self.new_tokens, self.max_context)
            self._pieces[at] = found[item.length]
        return Prompt(self._pieces[at], item.length)

    @cached_property
    def _pairs(self) -> dict[int, Pairs]:
        """By length, until they are asked."""
        return {}

    def check_pairs(self, lengths: Sequence[int]) -> None:
        """Refuse more pairs than a model's context holds after one of the lengths.

        Raises
        ------
        KVFoldError
            Names the first that does not fit.
        """
        for length in lengths if self.pairs else ():
            self._pairs_at(length).check(self.max_context)

    def _pairs_at(self, length: int) -> Pairs:
        if length not in self._pairs:
            self._pairs[length] = Pairs(self.tokenizer, length, self.pairs)
        return self._pairs[length]

    def ask(self, model: PreTrainedModel, item: Item, method: Method, chunk: int) -> Own:
        assert item.length is not None
        for length in [length for length in self._pairs if length < item.length]:
            del self._pairs[length]  # items get longer, and keys and values of a list take memory
        own = self._read(model, item, method, chunk)
        pairs = self._pairs_at(item.length) if self.pairs else None
        if pairs is None or not pairs.count:
            return own
        torch.manual_seed(item.seed)
        full, found = pairs.full(model, chunk), pairs.ask(model, method, chunk)
        costs = {"pairs": float(pairs.count), "full_pairs_exact": full.exact, "full_pairs_nll": full.nll}
        scores = dict(own.scores)
        if found.tested:
            scores |= {"pairs_exact": found.exact, "pairs_nll": found.nll}
        known = {name: value for name, value in costs.items() if math.isfinite(value)}
        return dataclasses.replace(own, scores=scores, costs=(own.costs or {}) | known)

    def _read(self, model: PreTrainedModel, item: Item, method: Method, chunk: int) -> Own:
        """Prefill and score the text, and go on."""
        prompt = self.prompt(item)
        ids, prefix = prompt.ids.to(model.device), prompt.prefilled
        truth = self._truth(model, ids, prefix, chunk)
        name, say = str(method), self.on_tokens
        report = None if say is None else (lambda n: say(name, n))
        warm_up(model, method, ids, prefix, chunk)
        torch.manual_seed(item.seed)
        started = now(model)
        cache = kvfold.fold(model, method, max_length=room(model, ids.shape[1] - 1 + self.new_tokens))
        try:
            found = score(model, ids, prefix, cache, chunk, truth, report)
            sizes, held = sizes_of(cache), cache.nbytes()
            tokens = cache.get_seq_length()
            decoded = decode(model, cache, found.last_logits, self.new_tokens)
        finally:
            kvfold.unfold(model)
        if report is not None:
            report(self.new_tokens)
        seconds = now(model) - started
        costs = {
            "prefill_tokens_per_s": prefix / found.prefill_seconds,
            **{f"{part}_bytes": int(held[whole]) for part, whole in _PARTS.items()},
            "cache_tokens": int(tokens),
        }
        scores = {"kld": found.kld, "top1": found.top1, "top5": found.top5, "nll": float(found.nll.double().mean())}
        return Own(
            dict(scores),
            len(found.nll),
            found.tested,
            sizes,
            str(self.tokenizer.decode(decoded.tokens)),
            costs=costs,
            decode_tokens_per_s=(self.new_tokens - 1) / decoded.seconds,
            decode_path=decoded.path,
            seconds=seconds,
        )

    def _truth(self, model: PreTrainedModel, ids: torch.Tensor, prefix: int, chunk: int) -> Reference:
        """Full-precision logits, made once for all methods of an item."""
        at = (prefix, chunk)
        if at not in self._last:
            self._last.clear()
            # The first calls of a process pay for thread pools and lazy set-up: without this the first method would.
            with torch.inference_mode():
                model(ids[:, :MIN_PREFIX], logits_to_keep=1)
            say = self.on_tokens
            report = None if say is None else (lambda n: say("full precision", n))
            self._last[at] = reference(model, ids, prefix, chunk, report)
        return self._last[at]

    def options(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "new_tokens": self.new_tokens, **({"pairs": self.pairs} if self.pairs else {})}

    def texts(self) -> dict[str, str]:
        return {self.text.name: self.text.sha256}


_PARTS = {"packed": "packed", "window": "windows", "state": "state", "table": "tables"}
"""Parts of a cache's bytes, as rows and as caches call them."""
