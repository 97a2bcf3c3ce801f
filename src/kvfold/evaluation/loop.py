"""The loop of every evaluation: item by item, under every method, a row each; it goes on where it was stopped."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.engines.transformers.shared import SharedPrompt
from kvfold.errors import KVFoldError
from kvfold.evaluation.answer import answers
from kvfold.evaluation.checked import OnMethod, checked
from kvfold.evaluation.decoding import room
from kvfold.evaluation.machine import device_name, versions
from kvfold.evaluation.perplexity import CHUNK, Reference, now, reference, score
from kvfold.evaluation.results import (
    Result,
    ResultFile,
    Settings,
    artefacts,
    as_folder,
    prompt_sha256,
    this_run,
    weights_sha256,
)
from kvfold.evaluation.schema import finite
from kvfold.evaluation.sizes import sizes_of
from kvfold.evaluation.suites import Item, Outcome, Prompt, Suite
from kvfold.evaluation.suites.base import LEAST, Own
from kvfold.models import ModelInfo

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.engines.transformers.layer import FoldedLayer
    from kvfold.methods.base import Method

LENGTHS = (1024,)
LIMIT = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be run: every item of every suite, under every method.

    Attributes
    ----------
    methods
        By their strings, the baseline first.
    suites
        With their items, in order.
    windows
        Those of all methods, or None where each keeps its own.
    chunk
        Query tokens per call.
    batch
        Prompts whose answers are generated together.
    """

    methods: dict[str, Method]
    suites: list[tuple[Suite, list[Item]]]
    windows: tuple[int, int] | None
    chunk: int
    batch: int = 1

    @property
    def rows(self) -> int:
        """How many there will be."""
        return len(self.methods) * sum(len(items) for _, items in self.suites)


def plan(
    model: PreTrainedModel,
    info: ModelInfo,
    methods: Sequence[str | Method],
    suites: Sequence[Suite],
    *,
    baseline: str | Method = "none",
    lengths: Sequence[int] = LENGTHS,
    limit: int = LIMIT,
    seeds: int = 1,
    own_windows: bool = False,
    chunk: int = CHUNK,
    part: tuple[int, int] = (1, 1),
    batch: int = 1,
    on_method: OnMethod | None = None,
) -> Plan:
    """Check everything that can be checked before the first item is run.

    Parameters
    ----------
    methods
        Method strings or objects; the baseline is added.
    lengths
        Tokens of a prompt, for suites that have lengths.
    limit, seeds
        Items of every task and length, and seeds that draw as many anew.
    own_windows
        Whether methods may keep different numbers of tokens in full precision.
    part
        (I, N): of every suite's items, every N-th, from the I-th on; for N processes or devices.
    batch
        Prompts whose answers are generated together, of those whose contexts have as many tokens.
    on_method
        For progress; see :func:`~kvfold.evaluation.checked.checked`.

    Raises
    ------
    KVFoldError
        A method does not fit the model, windows differ, or a length does not fit the model or the text.
    """
    for name, value, least in (("limit", limit, 1), ("seeds", seeds, 1), ("chunk", chunk, 1), ("batch", batch, 1)):
        if value < least:
            raise KVFoldError(f"{name}: {value}; give at least {least}")
    wanted = sorted(set(lengths))
    if not wanted or wanted[0] < LEAST:
        raise KVFoldError(f"lengths: {wanted[0] if wanted else 'none given'}; give at least {LEAST} tokens")
    chosen = checked(model, (baseline, *methods), on_method)
    windows = _windows(chosen, own_windows)
    first, parts = part
    if not 1 <= first <= parts:
        raise KVFoldError(f"part: {first}/{parts}; give I/N with I from 1 to N")
    found = [(suite, suite.items(wanted, limit, seeds)[first - 1 :: parts]) for suite in suites]
    for suite, items in found:
        _check(suite, items, info.max_context)
    return Plan(chosen, found, windows, chunk, batch)


def _windows(methods: dict[str, Method], own: bool) -> tuple[int, int] | None:
    """The windows of all methods; ``none`` keeps everything in full precision, so it has none."""
    if own:
        return None
    found: dict[tuple[int, int], str] = {}
    for name, method in methods.items():
        if method.name != "none":
            found.setdefault((method.sink, method.recent), name)
    if len(found) > 1:
        (a, first), (b, second), *_ = found.items()
        raise KVFoldError(
            f"methods: {first} keeps {a[0]} + {a[1]} tokens in full precision, {second} {b[0]} + {b[1]}; give them equal "
            "sink and recent, or --own-windows"
        )
    return next(iter(found), (0, 0))


def _check(suite: Suite, items: Sequence[Item], max_context: int | None) -> None:
    """Make the first prompt of every task and length."""
    if not items:
        raise KVFoldError(f"suite: {suite.name} has no items; give more, or fewer parts")
    seen = set()
    for item in items:
        if (item.task, item.length) in seen:
            continue
        seen.add((item.task, item.length))
        if max_context is not None and item.length is not None and item.length > max_context:
            raise KVFoldError(f"lengths: {item.length} is beyond the model's context of {max_context}")
        _fits(suite, item, suite.prompt(item), max_context)


def _fits(suite: Suite, item: Item, prompt: Prompt, max_context: int | None) -> None:
    total = prompt.ids.shape[1] + prompt.new_tokens
    if max_context is not None and total > max_context:
        what = "lengths" if item.length is not None else "max-new-tokens"
        shots = " or --shots" if suite.options().get("shots") else ""
        raise KVFoldError(
            f"{what}: {suite.name}'s {item.name} has {prompt.ids.shape[1]} tokens, with those to be generated {total}: beyond "
            f"the model's context of {max_context}; give smaller --{what}{shots}"
        )


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    info: ModelInfo,
    planned: Plan,
    out: Path,
    *,
    on_start: Callable[[int, int], None] | None = None,
    on_row: Callable[[Suite, Result, int, int], None] | None = None,
) -> list[ResultFile]:
    """Run what is planned and not in the folder yet.

    Parameters
    ----------
    out
        Folder of results; made if it is not there. Other results in it are left alone.
    on_start
        Called with the number of rows that are there already, and of all.
    on_row
        Called after every new row: its suite, the row, how many are done and how many there will be.

    Returns
    -------
    list of ResultFile
        One per suite. They may hold rows of other methods and items too, of earlier runs with the same settings.

    Raises
    ------
    KVFoldError
        The folder cannot be written, somebody else is writing the same results, or an artefact has changed under its name.
    """
    folder = as_folder(out)
    weights = weights_sha256(model)
    found = [ResultFile.of(folder, settings_of(model, info, suite, planned, weights)) for suite, _ in planned.suites]
    with contextlib.ExitStack() as stack:
        for file in found:
            stack.callback(file.lock().release, force=True)
        found = [ResultFile.of(folder, file.settings) for file in found]  # what was added until we held the lock
        learned = artefacts(planned.methods.values())
        for file in found:
            file.check_artefacts(learned)
        done = sum(_count(file, planned, items) for file, (_, items) in zip(found, planned.suites, strict=True))
        if on_start is not None:
            on_start(done, planned.rows)
        for file, (suite, items) in zip(found, planned.suites, strict=True):
            for row in rows(model, tokenizer, suite, items, planned, file, info.max_context):
                done += 1
                if on_row is not None:
                    on_row(suite, row, done, planned.rows)
    return found


def _count(file: ResultFile, planned: Plan, items: Sequence[Item]) -> int:
    names = {item.name for item in items}
    return len(
        {(row.method, row.item) for row in file.rows.values() if row.method in planned.methods and row.item in names}
    )


def settings_of(model: PreTrainedModel, info: ModelInfo, suite: Suite, planned: Plan, weights: str) -> Settings:
    """What rows of a suite have to have alike."""
    return Settings(
        suite=suite.name,
        options={
            "version": suite.version,
            **suite.options(),
            **({"batch": planned.batch} if planned.batch > 1 else {}),
        },
        texts=suite.texts(),
        model=info.name,
        parameters=info.parameters,
        weights_sha256=weights,
        dtype=info.dtype,
        device=device_name(model.device),
        windows=planned.windows,
        chunk=planned.chunk,
        versions=versions(),
    )


class Keeper(Protocol):
    """Where rows go: a file of results, or one beside a command's JSON."""

    @property
    def run(self) -> int:
        """Number of the process that adds rows now."""
        ...

    def has(self, method: str, item: str, prompt_sha256: str) -> bool:
        """Whether a row is there already."""
        ...

    def add(self, row: Result, run: dict[str, Any]) -> None:
        """Put a row on disk."""
        ...


def rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    suite: Suite,
    items: Sequence[Item],
    planned: Plan,
    kept: Keeper,
    max_context: int | None = None,
) -> Iterator[Result]:
    """New rows of a suite, item by item, each on disk before it is given.

    Parameters
    ----------
    tokenizer
        None where no answers are generated.
    planned
        Its methods, ``chunk`` and ``batch`` are looked at.
    kept
        What is there already is not run.
    max_context
        Of the model; None: not checked here.
    """
    this = this_run(torch.get_num_threads(), artefacts(planned.methods.values()))
    for group in _groups(suite, items, planned.batch, max_context):
        truth = None
        shared: dict[tuple[str, ...], SharedPrompt] = {}
        for name, method in planned.methods.items():
            missing = [asked for asked in group if not kept.has(name, asked.item.name, asked.digest)]
            if not missing:
                continue
            if suite.compares and truth is None:
                prompt = missing[0].prompt
                truth = reference(model, prompt.ids.to(model.device), prompt.prefilled, planned.chunk)
            torch.manual_seed(missing[0].item.seed)
            same = shared.setdefault(tuple(asked.digest for asked in missing), SharedPrompt())
            for row in measure(model, tokenizer, suite, missing, method, planned.chunk, truth, kept.run, same):
                kept.add(row, this)
                yield row


class Asked(NamedTuple):
    """An item, what the model is given for it, and the hash of that."""

    item: Item
    prompt: Prompt
    digest: str


def _groups(suite: Suite, items: Sequence[Item], batch: int, max_context: int | None) -> Iterator[list[Asked]]:
    """Items that are run together: each alone, or such as have equally long contexts and are answered in one batch."""
    waiting: dict[tuple[int, int, tuple[str, ...]], list[Asked]] = {}
    for item in items:
        prompt = suite.prompt(item)
        _fits(suite, item, prompt, max_context)
        asked = Asked(item, prompt, prompt_sha256(prompt.ids[0].tolist(), prompt.prefilled))
        if batch == 1 or not prompt.new_tokens:
            yield [asked]
            continue
        alike = (prompt.prefilled, prompt.new_tokens, prompt.stop)
        group = waiting.setdefault(alike, [])
        group.append(asked)
        if len(group) == batch:
            yield waiting.pop(alike)
    yield from waiting.values()


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    suite: Suite,
    group: Sequence[Asked],
    method: Method,
    chunk: int,
    truth: Reference | None,
    run: int,
    shared: SharedPrompt | None = None,
) -> list[Result]:
    """One method on one item, or on several that are answered in one batch: a row each, with its part of bytes and seconds."""
    import kvfold

    first = group[0].prompt
    started = now(model)
    outcomes: list[tuple[Outcome, int]] = []
    by: tuple[str | None, str | None] = (None, None)
    own = suite.ask(model, group[0].item, method, chunk)
    if own is None:
        longest = max(asked.prompt.ids.shape[1] for asked in group)
        cache = kvfold.fold(model, method, max_length=room(model, longest + first.new_tokens))
        try:
            if first.new_tokens:
                assert tokenizer is not None
                prompts = [asked.prompt for asked in group]
                outcomes = answers(model, tokenizer, prompts, cache, chunk, shared)
            else:
                found = score(model, first.ids.to(model.device), first.prefilled, cache, chunk, truth, shared=shared)
                outcomes = [(Outcome(found), found.tested)]
        finally:
            kvfold.unfold(model)
        sizes, by = sizes_of(cache), _served(cache)
    else:
        sizes = own.sizes
    seconds = (now(model) - started) / len(group)
    if own is not None and own.seconds is not None:
        seconds = own.seconds

    def row(asked: Asked, own: Own, answer: str | None) -> Result:
        item = asked.item
        return Result(
            method=str(method),
            item=item.name,
            task=item.task,
            length=item.length,
            seed=item.seed,
            tags=dict(item.tags),
            prompt_sha256=asked.digest,
            prefilled=asked.prompt.prefilled,
            read=own.read,
            tested=own.tested,
            scores={key: _finite(value) if own.tested else None for key, value in own.scores.items()},
            series=_columns(own.series) if own.tested else {},
            bits_without_tables=own.sizes.bits[0],
            effective_bits=own.sizes.bits[1],
            cache_bytes=own.sizes.cache_bytes // len(group),
            full_cache_bytes=own.sizes.full_cache_bytes // len(group),
            sink=method.sink,
            recent=method.recent,
            seconds=round(seconds, 3),
            run=run,
            answer=answer,
            kernel=by[0],
            encoder=by[1],
            decode_tokens_per_s=own.decode_tokens_per_s,
            decode_path=own.decode_path,
            costs=own.costs,
            questions=_columns(own.questions) or None if own.tested else None,
        )

    if own is not None:
        return [row(group[0], own, own.answer or None)]
    found_rows = []
    for asked, (outcome, tested) in zip(group, outcomes, strict=True):
        prompt = asked.prompt
        read = prompt.ids.shape[1] - prompt.prefilled + outcome.new_tokens
        if outcome.score is not None:
            read = len(outcome.score.nll)
        graded = Own(
            suite.graded(asked.item, prompt, outcome),
            read,
            tested,
            sizes,
            outcome.text,
            series=suite.series(outcome),
            questions=suite.by_question(prompt, outcome),
        )
        found_rows.append(row(asked, graded, outcome.text if prompt.new_tokens else None))
    return found_rows


def _served(cache: FoldedCache) -> tuple[str | None, str | None]:
    """The kernels that attended to a cache's folded layers and those that encoded them, by name."""
    layers = [layer for layer in cache.folded if layer.is_initialized]
    kernels, encoders = ({found(layer) for layer in layers} for found in (_kernel_of, _encoder_of))
    return "+".join(sorted(kernels)) or None, "+".join(sorted(encoders)) or None


def _kernel_of(layer: FoldedLayer) -> str:
    return layer.kernel.name


def _encoder_of(layer: FoldedLayer) -> str:
    return layer.encoder.name


def _columns(found: Mapping[str, Sequence[float]]) -> dict[str, list[float | None]]:
    return {key: [_finite(v) for v in values] for key, values in found.items()}


def _finite(value: float | None) -> float | None:
    return None if value is None else finite(value)
