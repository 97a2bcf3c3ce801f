"""The command ``kvfold recommend``."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvfold.commands.terminal import (
    JSON_HELP,
    SeveralTexts,
    complete_method,
    json_target,
    load,
    model_options,
    print_json,
    progress_bar,
    say,
    show,
    write_json,
)
from kvfold.errors import KVFoldError
from kvfold.files import expanded
from kvfold.sheet import Column, Sheet, as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from kvfold.evaluation.recommend import Measured
    from kvfold.evaluation.text import Text
    from kvfold.methods.losses import Choice

AIMS = ("retrieval", "text", "both")
NAMES = {"k": "keys", "v": "values"}
FULL = "none"
LENGTH = 512
"""Tokens of a text before those that are scored."""
CHECKED = 1024
"""Tokens before those of the check, where the model's context has room."""
EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""
FEW = 2.3
"""Bits per value up to which learned keys with fold's values lost least on three models (docs/recipes.md)."""
MOST = 1 << 40
"""Tokens of a cache that a size may be for."""


@click.command("recommend", cls=SeveralTexts, short_help="Propose bits for keys and values of every layer at a budget.")
@model_options
@click.option(
    "--budget",
    metavar="BITS|SIZE",
    required=True,
    help="Effective bits per value (2.5), or the size of a cache of --context tokens (0.5GB, 300MiB).",
)
@click.option("--context", metavar="N", type=int, help="Tokens that the size is for.  [default: the model's context]")
@click.option(
    "--method", "spec", metavar="X", default="fold", show_default=True, shell_complete=complete_method,
    help="Method whose bits are chosen; k_bits= or v_bits= in it keeps that side as it is.",
)  # fmt: skip
@click.option(
    "--for", "aim", type=click.Choice(AIMS), default="both", show_default=True,
    help="What is kept: exact retrieval, running text, or both.",
)  # fmt: skip
@click.option(
    "--text", "files", metavar="FILE ...", multiple=True,
    help="Running text to measure on, one or more files.  [default: a passage that is built in]",
)  # fmt: skip
@click.option("--length", metavar="N", type=int, help=f"Tokens of --text before the scored ones.  [default: {LENGTH}]")
@click.option(
    "--tokens", metavar="N", type=int, default=128, show_default=True, help="Tokens scored, of --text and of the check."
)
@click.option(
    "--check", metavar="N", type=int, default=6, show_default=True,
    help="Windows of each of two texts, and lists of key-value pairs, that the check compares with uniform bits on; 0: none.",
)  # fmt: skip
@click.option("--out", metavar="FOLDER", help="Keep the check's rows, as kvfold eval does.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def recommend(
    model: str | None,
    dtype: str | None,
    device: str | None,
    budget: str,
    context: int | None,
    spec: str,
    aim: str,
    files: tuple[str, ...],
    length: int | None,
    tokens: int,
    check: int,
    out: str | None,
    json_path: str | None,
) -> None:
    """Measure what a model loses when one layer's keys, or values, are quantized; propose bits for each within a budget.

    Lists that are asked for again and a text are built in. For fold it is the model's profile, measured once and kept, and
    the proposal is what fold:budget=BITS stores wherever no layer stays in full precision.
    Of a method whose keys are learned (tasq:bits=2,values=fold,artefact=FILE) the bits of values are chosen.
    The proposal is a method's string, which every command takes. It is then compared with the same bits for all layers, at
    equal effective bits, on texts and key-value pairs that were not measured on. float32, the default, shows small losses
    best: 16 bits have noise of their own.
    """
    from kvfold import methods
    from kvfold.evaluation import recommend as r
    from kvfold.evaluation.machine import device_name, versions
    from kvfold.evaluation.results import check_folder, weights_sha256
    from kvfold.evaluation.text import load_text
    from kvfold.methods.learned import places
    from kvfold.methods.losses import spread, uniform
    from kvfold.methods.profile import as_method

    asked = r.Budget.read(budget)
    method = methods.get(spec)
    if aim == "retrieval" and files:
        raise KVFoldError("text: running text has no part in --for retrieval; leave it out, or give --for text or both")
    if length is not None and not files:
        raise KVFoldError("length: the built-in prompts have lengths of their own; give it with --text")
    length = LENGTH if length is None else length
    for name, value, least in (("length", length, 64), ("tokens", tokens, 32), ("check", check, 0)):
        if value < least:
            raise KVFoldError(f"{name}: {value}; give at least {least}")
    if context is not None and not 1 <= context <= MOST:
        raise KVFoldError(f"context: {context}; allowed: 1 to {MOST:,} tokens")
    r.choices(method)
    methods.ready(method)
    target = json_target(json_path)
    folder = expanded(out) if out else None
    if folder:
        check_folder(folder)
    loaded, tokenizer, info = load(model, dtype or "float32", device)
    horizon = context or info.max_context or 4096
    r.check(loaded, method, asked, horizon)
    texts = [load_text(file) for file in files]
    own = r.texts([_ids(tokenizer, text, length, tokens, info.max_context) for text in texts], length)
    with progress_bar(_count()) as bar:
        found = r.measure(loaded, tokenizer, method, aim, own, info.max_context, _Steps(bar))
    aimed = found.aimed
    bits = r.within(loaded, method, aimed, asked, horizon)
    choice, alike = spread(aimed, bits, full=True), aimed.alike(uniform(aimed, bits))
    equal = spread(aimed, aimed.bits_of(alike), full=True)
    names = [str(as_method(method, c)) for c in (choice, alike, equal)]
    short = r.budget_of(method, found, bits, names[0]) if aim == "both" else None
    sizes = [r.bytes_of(loaded, methods.get(name), horizon) for name in names[:2]]
    result: dict[str, Any] = {
        "model": info.name,
        "parameters": info.parameters,
        "weights_sha256": weights_sha256(loaded),
        "dtype": info.dtype,
        "device": device_name(loaded.device),
        "versions": versions(),
        "texts": {text.source: text.sha256 for text in texts},
        "budget": bits,
        **r.to_dict(found, aim, choice, alike),
        **dict(zip(("proposal", "uniform", "at_equal_bits"), names, strict=True)),
        "same_as": short,
        "context": horizon,
        "bytes": sizes[0],
        "uniform_bytes": sizes[1],
    }
    if json_path != "-":
        show(_table(found, choice))
        for line in _losses(found, [text.source for text in texts]):
            say(line)
        click.echo()
        click.echo(names[0])
        tables = ", tables that all sequences share aside" if any(places(method)) else ""
        say(
            f"{aimed.bits_of(choice):.3f} effective bits{tables}, {as_bytes(sizes[0])} of {horizon:,} tokens; expected to "
            f"lose {_expected(found, choice)}"
        )
        say(
            f"uniform within the same budget: {names[1]} ({aimed.bits_of(alike):.3f} bits, {as_bytes(sizes[1])}); expected to "
            f"lose {_expected(found, alike)}"
        )
        if short is not None:
            say(f"{short} is this proposal on this model")
        if method.name == "fold" and aim == "text" and bits <= FEW:
            say(
                f"up to {FEW} bits learned keys lost less of running text on three models, and more of key-value pairs: kvfold "
                "calibrate --method tasq:bits=2,values=fold, then --method tasq:bits=2,values=fold,artefact=FILE here"
            )
        click.echo()
    if check:
        result["check"] = _check(loaded, tokenizer, info, names, check, tokens, folder, json_path != "-")
    if target:
        write_json(target, result)
        click.echo(f"written: {target}")
    if json_path == "-":
        print_json(result)


class _Steps:
    """What was measured, in the bar; where there is none, a line when it begins and one every half minute."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.task = bar, bar.add_task("", total=None)
        self.said = time.monotonic()

    def __call__(self, done: int, count: int, what: str) -> None:
        self.bar.update(self.task, total=count, completed=done, description=what)
        if self.bar.disable and (done == 1 or time.monotonic() - self.said >= EVERY):
            self.said = time.monotonic()
            print(f"kvfold: measuring [{done}/{count}] {what}", file=sys.stderr, flush=True)


def _count() -> Any:
    from rich.progress import MofNCompleteColumn

    return MofNCompleteColumn()


def _ids(tokenizer: Any, text: Text, length: int, tokens: int, most: int | None) -> torch.Tensor:
    """The beginning of a text; the check scores its second half."""
    from kvfold.evaluation.windows import encode

    return encode(tokenizer, text, length, tokens, 2, most, "length")[length]


def _table(found: Measured, choice: Choice) -> Sheet:
    from kvfold.evaluation.recommend import shown

    kinds = [(side, kind) for side in NAMES for kind in found.losses]
    columns = [
        Column("layer", right=True, key=True),
        *(Column(f"{NAMES[side]}: {kind}", right=True) for side, kind in kinds),
        Column("K bits", right=True),
        Column("V bits", right=True),
    ]
    sheet = Sheet(columns, "", "")
    for layer, own in choice.items():
        lost = [found.losses[kind].loss(layer, side, shown(found.aimed, side)) for side, kind in kinds]
        proposed = ("full", "full") if own is None else (str(own[0]), str(own[1]))
        sheet.add(str(layer), *(f"{value:.2e}" for value in lost), *proposed)
    return sheet


def _losses(found: Measured, texts: Sequence[str]) -> Iterator[str]:
    """What the table's numbers are, and what all layers lose together."""
    from kvfold.evaluation.recommend import shown

    k, v = (shown(found.aimed, side) for side in NAMES)
    bits = f"{k} bits" if k == v else f"{k} bits (keys) and {v} bits (values)"
    lists = sum(prompt["kind"] == "retrieval" for prompt in found.prompts)
    read = [f"{lists} lists asked for again"] if lists else []
    if "text" in found.losses:
        read += texts or ["a passage"]
    where = f", kept in {found.kept}" if found.kept else ""
    yield (
        f"what one layer's keys or values lose at {bits}, nats per predicted token, by gradients on {', '.join(read)}{where}"
    )
    for kind, of in found.losses.items():
        for side in NAMES:
            total = ", ".join(
                f"{bits} bits {math.fsum(of.loss(layer, side, bits) for layer in of.layers):.3g}"
                for bits in of.bits(side)
            )
            yield f"{kind}, all layers' {NAMES[side]}: {total}"


def _expected(found: Measured, choice: Choice) -> str:
    lost = [f"{of.total(choice):.3g} of {kind}" for kind, of in found.losses.items()]
    return f"{' and '.join(lost)}, nats per token"


def _check(
    loaded: Any, tokenizer: Any, info: Any, names: list[str], items: int, tokens: int, folder: Path | None, shown: bool
) -> list[dict[str, Any]]:
    """Compare proposals with uniform bits on what was not measured on; returns the cells."""
    from kvfold.commands.eval import notes, table
    from kvfold.evaluation import loop
    from kvfold.evaluation.suites import Options, make
    from kvfold.evaluation.summary import summarize, to_dict

    most = info.max_context or 1 << 30
    length = max(64, min(CHECKED, most - tokens - 1))
    proposal, same, equal = names
    called = {equal: "proposal, equal bits", proposal: "proposal", same: "uniform", FULL: "full precision"}
    print(
        f"kvfold: comparing with {same} on {items} windows of each of two texts, and on {items} lists of key-value pairs ...",
        file=sys.stderr,
    )
    every: list[dict[str, Any]] = []
    for suite, more in (("divergence", ()), ("retrieval", (FULL,))):
        planned = loop.plan(
            loaded,
            info,
            list(dict.fromkeys((equal, proposal, *more))),
            make([suite], tokenizer, Options(tokens=tokens)),
            baseline=same,
            lengths=[length],
            limit=items,
        )
        with tempfile.TemporaryDirectory() as kept:
            (file,) = loop.run(loaded, tokenizer, info, planned, folder or Path(kept))
        cells = summarize(file, same, list(planned.methods), [item.name for _, own in planned.suites for item in own])
        if shown:
            show(table(file, cells, same, called))
            for line in notes([file], cells, same)[: None if folder else -1]:
                say(line)
        every += to_dict([file], cells, same)["cells"]
    return every
