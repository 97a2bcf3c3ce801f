"""The command ``kvfold recommend``."""

from __future__ import annotations

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
    import torch

    from kvfold.evaluation.recommend import Choice, Sensitivity
    from kvfold.evaluation.text import Text

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
    help="Method whose bits are chosen.",
)  # fmt: skip
@click.option(
    "--text", "files", metavar="FILE ...", multiple=True,
    help="Texts to measure on, one or more files.  [default: prose and code that ship with Python]",
)  # fmt: skip
@click.option("--length", metavar="N", type=int, default=512, show_default=True, help="Tokens before the scored ones.")
@click.option("--tokens", metavar="N", type=int, default=128, show_default=True, help="Tokens scored.")
@click.option(
    "--check", metavar="N", type=int, default=6, show_default=True,
    help="Windows of each of two texts that the proposal is compared on with uniform bits; 0: none.",
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
    files: tuple[str, ...],
    length: int,
    tokens: int,
    check: int,
    out: str | None,
    json_path: str | None,
) -> None:
    """Measure what a model loses when one layer's keys, or values, are folded alone; propose bits for each within a budget.

    Of a method whose keys are learned (tasq:bits=2,values=fold,artefact=FILE) the bits of values are chosen.
    The proposal is a method's string, which every command takes. It is then compared with the same bits for all layers, at
    equal effective bits, on texts and windows that were not measured on. float32, the default, shows small losses best: 16 bits
    have noise of their own.
    """
    from kvfold import methods
    from kvfold.evaluation import recommend as r
    from kvfold.evaluation.machine import device_name, versions
    from kvfold.evaluation.results import check_folder, weights_sha256
    from kvfold.evaluation.text import load_text
    from kvfold.evaluation.windows import load_texts
    from kvfold.methods.learned import places

    asked = r.Budget.read(budget)
    method = methods.get(spec)
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
    texts = [load_text(file) for file in files] or [t for t in load_texts(("prose", "code"), {}).values() if t]
    with progress_bar(_count()) as bar:
        steps = _Steps(bar)
        found = r.measure(
            loaded,
            method,
            [_ids(tokenizer, text, length, tokens, info.max_context) for text in texts],
            length,
            on_start=steps.start,
            on_done=steps.done,
        )
    bits = r.within(loaded, method, found, asked, horizon)
    choice, same = r.propose(found, bits), r.uniform(found, bits)
    alike: Choice = dict.fromkeys(found.layers, same)
    equal = r.propose(found, found.bits_of(alike))
    names = [str(r.as_method(method, c)) for c in (choice, alike, equal)]
    result: dict[str, Any] = {
        "model": info.name,
        "parameters": info.parameters,
        "weights_sha256": weights_sha256(loaded),
        "dtype": info.dtype,
        "device": device_name(loaded.device),
        "versions": versions(),
        "texts": {text.source: text.sha256 for text in texts},
        "length": length,
        "tokens": tokens,
        **r.to_dict(found, choice, names),
    }
    sizes = [r.bytes_of(loaded, methods.get(name), horizon) for name in names[:2]]
    result |= {"context": horizon, "bytes": sizes[0], "uniform_bytes": sizes[1], "at_equal_bits": names[2]}
    if json_path != "-":
        show(_table(found, choice))
        k, v = found.probe("k"), found.probe("v")
        probed = f"{k}" if k == v else f"{k} (keys) and {v} (values)"
        say(
            f"measured at {probed} bits, one layer's keys or values at a time, on {tokens} tokens after {length} of "
            f"{' and '.join(text.source for text in texts)}: KL divergence, nats per token"
        )
        for side, name in (("k", "keys"), ("v", "values")):
            shown = ", ".join(f"{b} bits {found.together[side, b]:.3g}" for b in found.bits(side))
            say(f"all layers' {name}: {shown}")
        click.echo()
        click.echo(names[0])
        tables = ", tables that all sequences share aside" if any(places(method)) else ""
        say(
            f"{found.bits_of(choice):.3f} effective bits{tables}, {as_bytes(sizes[0])} of {horizon:,} tokens; expected to lose "
            f"{r.total_loss(found, choice):.3g} nats per token"
        )
        say(
            f"uniform within the same budget: {names[1]} ({found.bits_of(alike):.3f} bits, {as_bytes(sizes[1])}); expected to "
            f"lose {r.total_loss(found, alike):.3g}"
        )
        if method.name == "fold" and bits <= FEW:
            say(
                f"up to {FEW} bits learned keys lost less on three models: kvfold calibrate --method tasq:bits=2,values=fold, "
                "then --method tasq:bits=2,values=fold,artefact=FILE here"
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
        self.count = self.at = 0
        self.said = time.monotonic()

    def start(self, count: int) -> None:
        self.count = count
        self.bar.update(self.task, total=count)
        if self.bar.disable:
            print(f"kvfold: measuring {count} times, one layer's keys or values after the other ...", file=sys.stderr)

    def done(self, what: str) -> None:
        self.at += 1
        self.bar.update(self.task, advance=1, description=what)
        if self.bar.disable and time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            print(f"kvfold: [{self.at}/{self.count}] {what}", file=sys.stderr, flush=True)


def _count() -> Any:
    from rich.progress import MofNCompleteColumn

    return MofNCompleteColumn()


def _ids(tokenizer: Any, text: Text, length: int, tokens: int, most: int | None) -> torch.Tensor:
    """The beginning of a text; the check scores its second half."""
    from kvfold.evaluation.windows import encode

    return encode(tokenizer, text, length, tokens, 2, most, "length")[length]


def _table(found: Sensitivity, choice: Choice) -> Sheet:
    from kvfold.evaluation.recommend import rows

    columns = [
        Column("layer", right=True, key=True),
        Column("keys lose", right=True),
        Column("values lose", right=True),
    ]
    sheet = Sheet([*columns, Column("K bits", right=True), Column("V bits", right=True)], "", "")
    for layer, keys, values, own in rows(found, choice):
        proposed = ("full", "full") if own is None else (str(own[0]), str(own[1]))
        sheet.add(str(layer), f"{keys:.2e}", f"{values:.2e}", *proposed)
    return sheet


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
    suites = make(["divergence"], tokenizer, Options(tokens=tokens))
    proposal, same, equal = names
    planned = loop.plan(
        loaded, info, list(dict.fromkeys((equal, proposal))), suites, baseline=same, lengths=[length], limit=items
    )
    print(f"kvfold: comparing with {same} on {items} windows of each of two texts ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as kept:
        (file,) = loop.run(loaded, tokenizer, info, planned, folder or Path(kept))
    cells = summarize(file, same, list(planned.methods), [item.name for _, own in planned.suites for item in own])
    if shown:
        called = {equal: "proposal, equal bits", proposal: "proposal", same: "uniform"}
        show(table(file, cells, same, called))
        for line in notes([file], cells, same)[: None if folder else -1]:
            say(line)
    found: list[dict[str, Any]] = to_dict([file], cells, same)["cells"]
    return found
