"""The command ``kvfold eval``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from kvfold.commands.scoring import tables_aside
from kvfold.commands.terminal import (
    JSON_HELP,
    Checking,
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
    from kvfold.evaluation.results import Result, ResultFile
    from kvfold.evaluation.suites import Options, Suite
    from kvfold.evaluation.summary import Cell

SUITES = (
    *(
        "divergence",
        "ppl",
        "layers",
        "compare",
        "domains",
        "needle",
        "ruler",
        "retrieval",
        "gsm8k",
        "math",
        "code",
        "longbench",
        "infinitebench",
    ),
    *("lm-eval:TASK", "paper:kivi", "paper:squat", "paper:qjl", "paper:innerq", "paper:commvq"),
)
"""For the help and completion, which load no suite."""


def _complete_suite(_context: Any, _parameter: Any, begun: str) -> list[str]:
    return [name for name in SUITES if name.startswith(begun) and name != "lm-eval:TASK"]


@click.command("eval", short_help="Evaluate methods on suites of tasks, item by item.")
@model_options
@click.option(
    "--methods",
    "specs",
    metavar="A B ...",
    multiple=True,
    shell_complete=complete_method,
    help="Methods to evaluate, one or more after the flag.  [default: fold kivi]",
)
@click.option(
    "--baseline",
    metavar="X",
    default="none",
    show_default=True,
    shell_complete=complete_method,
    help="Method that all others are compared with, on the same items; it is run too.",
)
@click.option(
    "--suite",
    "names",
    metavar="A B ...",
    multiple=True,
    shell_complete=_complete_suite,
    help=f"What is asked: {', '.join(SUITES)}.  [default: divergence]",
)
@click.option(
    "--lengths",
    metavar="N ...",
    type=int,
    multiple=True,
    default=[1024],
    help="Tokens of a prompt, one or more; longbench and infinitebench leave out the middle of what is longer; gsm8k, math and "
    "lm-eval have their own.  [default: 1024]",
)
@click.option(
    "--limit",
    metavar="N",
    type=int,
    default=5,
    show_default=True,
    help="Items of every task, length and seed; of records, the first ones.",
)
@click.option(
    "--seeds", metavar="K", type=int, default=1, show_default=True, help="Seeds; each draws as many items anew."
)
@click.option(
    "--text",
    "files",
    metavar="NAME=FILE",
    multiple=True,
    help="Text to score (divergence, ppl, layers, compare, domains), to hide things in (needle, ruler), or, named code, to go "
    "on with (code). May be given again.  [default: prose and code that ship with Python]",
)
@click.option(
    "--data",
    metavar="PATH",
    help="Records as JSON lines: a file (of gsm8k, math; for ruler's qa), a folder with a file for each task (longbench, "
    "infinitebench, paper:...), or hf:REPOSITORY. For lm-eval: a folder with tasks as YAML.",
)
@click.option("--examples", metavar="FILE", help="JSON lines with solved examples that gsm8k shows before a problem.")
@click.option("--shots", metavar="N", type=int, help="So many of them.  [default: 5]")
@click.option(
    "--tokens",
    metavar="N",
    type=int,
    default=256,
    show_default=True,
    help="Tokens scored (divergence, ppl, compare, domains, retrieval).",
)
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=int,
    help="Tokens of an answer.  [default: gsm8k 320, math 1024, code 48, compare 16]",
)
@click.option("--depths", metavar="N ...", type=int, multiple=True, help="Needles' depths.  [default: 0 25 50 75 100]")
@click.option(
    "--tasks",
    metavar="A B ...",
    multiple=True,
    help="Ruler's families, or LongBench's or InfiniteBench's tasks.  [default: all]",
)
@click.option(
    "--forms",
    metavar="A B ...",
    multiple=True,
    help="Retrieval's lists: pairs, records, identifiers.  [default: pairs]",
)
@click.option("--raw", is_flag=True, help="Ask in plain text, without the model's chat template.")
@click.option("--chunk", metavar="N", type=int, default=32, show_default=True, help="Query tokens per call.")
@click.option(
    "--batch",
    metavar="N",
    type=int,
    default=1,
    show_default=True,
    help="Prompts answered together, of those whose contexts are equally long, as gsm8k's are.",
)
@click.option(
    "--part",
    metavar="I/N",
    help="Every N-th item only, from the I-th on, for N processes or GPUs; each has an --out of its own, and `kvfold report` "
    "puts them together.",
)
@click.option(
    "--own-windows", is_flag=True, help="Compare methods that keep different numbers of tokens in full precision."
)
@click.option(
    "--out",
    metavar="RESULTS/",
    required=True,
    help="Folder of results: a row per item and method. The same command goes on where it was stopped.",
)
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def evaluate(
    model: str | None,
    dtype: str | None,
    device: str | None,
    specs: tuple[str, ...],
    baseline: str,
    names: tuple[str, ...],
    lengths: tuple[int, ...],
    limit: int,
    seeds: int,
    files: tuple[str, ...],
    data: str | None,
    examples: str | None,
    shots: int | None,
    tokens: int,
    max_new_tokens: int | None,
    depths: tuple[int, ...],
    tasks: tuple[str, ...],
    forms: tuple[str, ...],
    raw: bool,
    chunk: int,
    batch: int,
    part: str | None,
    own_windows: bool,
    out: str,
    json_path: str | None,
) -> None:
    """Evaluate methods on suites of tasks; say what is better, what is worse, and where no difference is shown.

    A prompt's context is prefilled; its question, every scored token and every generated token read the folded cache.
    Methods are compared with the baseline on the same items. Intervals are of 95%.
    """
    from kvfold import methods
    from kvfold.evaluation import loop
    from kvfold.evaluation.results import check_folder
    from kvfold.evaluation.suites import Options, make
    from kvfold.evaluation.summary import summarize, to_dict

    chosen = [methods.ready(spec) for spec in specs or ("fold", "kivi")]
    base = methods.ready(baseline)
    chooses: dict[str, Any] = {"depths": depths} if depths else {}
    chooses |= {"tasks": tuple(_words(tasks))} if tasks else {}
    chooses |= {"forms": tuple(_words(forms))} if forms else {}
    options = Options(_named(files), data, examples, tokens, max_new_tokens, shots, raw=raw, **chooses)
    wanted = _words(names) or ["divergence"]
    _check_names(wanted)
    _check_used(wanted, options)
    shard = _part(part)
    target = json_target(json_path)
    folder = expanded(out)
    check_folder(folder)
    loaded, tokenizer, info = load(model, dtype, device)
    suites = make(wanted, tokenizer, options)
    with _Progress() as progress:
        planned = loop.plan(
            loaded,
            info,
            chosen,
            suites,
            baseline=base,
            lengths=lengths,
            limit=limit,
            seeds=seeds,
            own_windows=own_windows,
            chunk=chunk,
            part=shard,
            batch=batch,
            on_method=Checking(progress.bar),
        )
        found = loop.run(loaded, tokenizer, info, planned, folder, on_start=progress.start, on_row=progress.row)
    cells: list[Cell] = []
    for file, (_, items) in zip(found, planned.suites, strict=True):
        cells += summarize(file, str(base), list(planned.methods), [item.name for item in items])
    result = to_dict(found, cells, str(base))
    if target:
        write_json(target, result)
    if json_path == "-":
        print_json(result)
        return
    for file in found:
        show(table(file, [cell for cell in cells if cell.suite == file.settings.suite], str(base)))
    for line in (*averages(wanted, cells, list(planned.methods)), *notes(found, cells, str(base))):
        say(line)
    if target:
        click.echo(f"written: {target}")


def _words(given: Sequence[str]) -> list[str]:
    """``a,b c`` as a, b and c."""
    return [name for part in given for name in part.split(",") if name]


def _part(given: str | None) -> tuple[int, int]:
    """``2/8`` as 2 and 8."""
    if given is None:
        return 1, 1
    first, slash, parts = given.partition("/")
    if not (slash and first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise KVFoldError(f"part: {given!r} is not I/N with I from 1 to N, for example 2/8")
    return int(first), int(parts)


def _named(files: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for text in files:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise KVFoldError(f"text: {text!r} is not NAME=FILE, for example novel=moby-dick.txt")
        given[name] = path
    return given


def _check_names(names: Sequence[str]) -> None:
    tasks = [name for name in names if name.startswith("lm-eval:") and name not in ("lm-eval:", "lm-eval:TASK")]
    known = [name for name in SUITES if name != "lm-eval:TASK"]
    if unknown := [name for name in names if name not in (*known, *tasks)]:
        raise KVFoldError(f"suite: {unknown[0]!r} is unknown; known: {', '.join(SUITES)}")


def _check_used(names: Sequence[str], options: Options) -> None:
    """Refuse what no suite would look at, before a model is loaded."""
    papers = {name for name in names if name.startswith("paper:")}
    of_records = {"gsm8k", "math", "longbench", "infinitebench", *papers}
    lm_tasks = {name for name in names if name.startswith("lm-eval:")}
    users = (
        ("data", options.data, {*of_records, *lm_tasks, "ruler"}),
        ("examples", options.examples, {"gsm8k", *papers}),
        ("shots", options.shots, {"gsm8k", *papers}),
        ("max-new-tokens", options.new_tokens, {"gsm8k", "math", "code", "compare", *papers}),
        ("tasks", options.tasks or None, {"ruler", "longbench", "infinitebench"}),
        ("forms", None if options.forms == type(options)().forms else options.forms, {"retrieval"}),
        ("depths", None if options.depths == type(options)().depths else options.depths, {"needle"}),
    )
    if options.data is None and (needing := [name for name in names if name in of_records]):
        raise KVFoldError(
            f"data: {needing[0]} needs its records; give --data with a file or a folder of JSON lines, or hf:REPOSITORY "
            "(docs/evaluation.md says which, and where to get them)"
        )
    for name, value, suites in users:
        if value is not None and not suites & set(names):
            known = [suite for suite in SUITES if suite in suites or (suite == "lm-eval:TASK" and name == "data")]
            raise KVFoldError(f"{name}: none of the suites {', '.join(names)} uses it; it is for {', '.join(known)}")


class _Progress:
    """A bar over all rows on a terminal; elsewhere a line per finished row."""

    def __init__(self) -> None:
        from rich.progress import MofNCompleteColumn

        self.bar = progress_bar(MofNCompleteColumn())
        self.done = self.total = 0

    def __enter__(self) -> _Progress:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self.bar.__exit__(kind, error, trace)
        if kind is not None and self.done:
            print(
                f"kvfold: {self.done} of {self.total} rows are kept; the same command goes on from there",
                file=sys.stderr,
            )

    def start(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if done:
            print(f"kvfold: {done} of {total} rows taken over from earlier runs", file=sys.stderr)
        self.task = self.bar.add_task("", total=total, completed=done)

    def row(self, suite: Suite, row: Result, done: int, total: int) -> None:
        self.done = done
        self.bar.update(self.task, completed=done, description=f"{suite.name} {row.item}: {row.method}")
        if self.bar.disable:
            main = suite.measures[0].name
            value = row.scores.get(main)
            said = "nothing tested" if not row.tested else "not finite" if value is None else f"{main} {value:z.4g}"
            print(
                f"kvfold: [{done}/{total}] {suite.name} {row.item}: {row.method}: {said}, {row.seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )


def table(
    found: ResultFile, cells: Sequence[Cell], baseline: str, called: Mapping[str, str] = MappingProxyType({})
) -> Sheet:
    """A row per task, length and method; ``called`` has other names of methods."""
    from kvfold.evaluation.suites import REGISTRY
    from kvfold.evaluation.summary import shown, shown_difference

    main, *others = REGISTRY[found.settings.suite].measures
    measures = (main, *(m for m in others if any(m.name in row.scores for row in found.rows.values())))
    lengths = any(cell.length is not None for cell in cells)
    columns = [Column("task", key=True), *([Column("length", right=True, key=True)] if lengths else [])]
    columns += [Column("method", wraps=True, key=True), Column("bits", right=True, rank=1)]
    columns += [Column("cache", right=True, rank=3), Column("items", right=True, rank=2)]
    names = {measure: "ppl" if measure.shown == "perplexity" else measure.name for measure in measures}
    columns += [Column(names[main], right=True), Column(f"{names[main]} against {called.get(baseline, baseline)}")]
    columns += [Column(names[measure], right=True, rank=5 + i) for i, measure in enumerate(measures[1:])]
    columns += [Column("s", right=True, rank=4)]
    sheet = Sheet(columns, found.settings.suite, "a wider terminal, a pipe or --json has them")
    last = None
    for cell in cells:
        if last is not None and (cell.task, cell.length) != last:
            sheet.end_section()
        where = [cell.task, *([f"{cell.length:,}" if cell.length is not None else ""] if lengths else [])]
        if (cell.task, cell.length) == last:
            where = ["" for _ in where]
        last = (cell.task, cell.length)
        none = "not finite" if cell.broken else "not tested"
        values = [shown(m, cell.estimates[m.name]) if m.name in cell.estimates else none for m in measures]
        difference = cell.differences.get(main.name)
        against = "" if difference is None else shown_difference(main, difference)
        sheet.add(
            *where,
            called.get(cell.method, cell.method),
            "-" if cell.effective_bits is None else f"{cell.effective_bits:.2f}",
            "-" if cell.cache_bytes is None else as_bytes(cell.cache_bytes),
            str(cell.items - cell.untested),
            values[0],
            against,
            *values[1:],
            f"{cell.seconds:.1f}",
        )
    return sheet


def averages(names: Sequence[str], cells: Sequence[Cell], methods: Sequence[str]) -> list[str]:
    """Lines with the papers' own averages."""
    from kvfold.evaluation.suites.papers import PAPERS
    from kvfold.evaluation.summary import average

    lines = []
    for name in names:
        if name in PAPERS:
            for what, weights in PAPERS[name].averages.items():
                means = {method: average(weights, cells, method) for method in methods}
                shown = [f"{method} {100 * mean:.2f}" for method, mean in means.items() if mean is not None]
                lines.append(
                    f"{PAPERS[name].title}; its average over {what}, per cent: "
                    f"{', '.join(shown) or 'not all tasks have numbers'}"
                )
    return lines


def _apart(found: Sequence[ResultFile]) -> list[str]:
    """Lines that say which rows of the same suites lie beside these and are not compared with them, and why."""
    from kvfold.evaluation.results import SUFFIX, ResultFile, differing

    lines = []
    for file in found:
        for path in sorted(file.path.parent.glob(f"{file.settings.suite}-*{SUFFIX}")):
            if path == file.path:
                continue
            try:
                why = "; ".join(differing(file.settings, ResultFile.read(path).settings))
            except KVFoldError as error:  # it lies beside; what was run is shown all the same
                why = str(error)
            lines.append(f"not compared with {path.name}: {why}")
    return lines


def notes(found: Sequence[ResultFile], cells: Sequence[Cell], baseline: str) -> list[str]:
    """What was run, and what a reader has to know of it."""
    first = found[0].settings
    windows = "each method's own" if first.windows is None else f"{first.windows[0]} + {first.windows[1]} tokens"
    lines = [
        f"{first.model} (weights {first.weights_sha256[:12]}), {first.dtype}, {first.device}; windows: {windows}",
        f"means over items with 95% intervals; against {baseline}: mean difference on the same items (perplexity: ratio), and "
        "what it shows",
    ]
    lines += tables_aside(cells)
    for cell in cells:
        where = f"{cell.suite} {cell.task}" + ("" if cell.length is None else f" of {cell.length:,} tokens")
        if cell.broken:
            lines.append(f"{where}, {cell.method}: numbers of {cell.broken} of {cell.items} items are not finite")
        if cell.repeats:
            lines.append(
                f"{where}, {cell.method}: {cell.repeats} more items ask what another asks; each prompt counts once"
            )
        if cell.untested:
            lines.append(
                f"{where}, {cell.method}: in {cell.untested} of {cell.items} items no token read anything packed"
            )
        elif cell.tested < cell.read:
            lines.append(f"{where}, {cell.method}: {cell.tested} of {cell.read} tokens read something packed")
    for file in found:
        codes = {run["code"] for run in file.runs}
        if len(codes) > 1:
            lines.append(f"{file.path.name}: its rows were made by {len(codes)} states of the code; see its runs")
    lines += _apart(found)
    lines.append(f"rows: {', '.join(str(file.path) for file in found)}")
    return lines
