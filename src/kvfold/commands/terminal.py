"""What the commands share: options, where results go, tables. Loads no model and no torch by itself."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvfold import files, outlet
from kvfold.errors import KVFoldError, OutputError

if TYPE_CHECKING:
    from rich.console import Console

    from kvfold.sheet import Sheet

JSON_HELP = "Also write the result to FILE as JSON; - prints it instead of the table."
LISTS = ("--methods", "--prefix", "--domains", "--suite", "--lengths", "--depths", "--tasks", "--forms", "--grid")
"""Flags that take several values, one after the other."""
SEEDS = (1 << 63) - 1
"""The largest seed: what every generator takes."""


def spread(arguments: Sequence[str], flags: Sequence[str] = LISTS) -> list[str]:
    """``--methods A B`` as ``--methods A --methods B``: several values after one flag, which click does not have."""
    found: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in flags else ""
        elif flag and found[-1] != flag:
            found.append(flag)
        found.append(argument)
    return found


class SeveralTexts(click.Command):
    """Takes several files after one ``--text``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, ("--text",)))


METHOD_NAMES = (
    "none",
    "fold",
    "kivi",
    "squat",
    "squat_pre",
    "innerq",
    "qjl",
    "commvq",
    "turboquant",
    "gear",
    "zipcache",
    "kvarn",
    "kvquant",
    "vqllm",
    "gsrq",
    "nova",
    "tasq",
)
"""For completion in shells, which loads no method."""


def complete_method(_context: Any, _parameter: Any, begun: str) -> list[str]:
    """Names that a shell offers after ``--method``."""
    return [name for name in METHOD_NAMES if name.startswith(begun)]


def model_options(command: Any) -> Any:
    """Add ``--model``, ``--dtype`` and ``--device``."""
    for option in (
        click.option(
            "--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one, else cpu]"
        ),
        click.option(
            "--dtype", metavar="DTYPE", help="float32, bfloat16 or float16.  [default: float32 on cpu, else bfloat16]"
        ),
        click.option(
            "--model",
            metavar="M",
            help="Hub id, local folder or .gguf file.  [default: embedded SmolLM2-135M-Instruct]",
        ),
    ):
        command = option(command)
    return command


def check_temperature(value: float) -> None:
    """Refuse a temperature at which nothing can be sampled.

    Raises
    ------
    KVFoldError
        Names those that serve.
    """
    if value and not 0.001 <= value <= 1000:
        raise KVFoldError(f"temperature: {value}; give 0, or 0.001 to 1000")


def seed_option(text: str) -> Any:
    """Add ``--seed``."""

    def check(_context: Any, _parameter: Any, value: int) -> int:
        if not 0 <= value <= SEEDS:
            raise click.BadParameter(f"{value} is not allowed; allowed: 0 to {SEEDS}")
        return value

    return click.option("--seed", metavar="N", type=int, default=0, show_default=True, callback=check, help=text)


def method_option(text: str) -> Any:
    """Add ``--method``."""
    return click.option(
        "--method", "spec", metavar="X", default="fold", show_default=True, shell_complete=complete_method, help=text
    )


def sampling_options(tokens: int, text: str) -> Any:
    """Add ``--max-new-tokens``, ``--temperature`` and ``--seed``."""

    def add(command: Any) -> Any:
        for option in (
            seed_option("Seed of the sampling."),
            click.option(
                "--temperature",
                metavar="T",
                type=float,
                default=0.0,
                show_default=True,
                help="0: always the likeliest token; above: sample.",
            ),
            click.option("--max-new-tokens", metavar="N", type=int, default=tokens, show_default=True, help=text),
        ):
            command = option(command)
        return command

    return add


def progress_bar(amount: Any) -> Any:
    """A bar on standard error that goes when it is done; disabled where that is no terminal.

    Parameters
    ----------
    amount : rich.progress.ProgressColumn
        How much is done, after the bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


SLOW = 1.0
"""Seconds from which on a method's check is worth a line."""


class Checking:
    """What checks methods calls this for each: they go by in a bar on a terminal; elsewhere a line says which took long, as
    where its kernels are compiled.

    Parameters
    ----------
    bar : rich.progress.Progress, optional
        Of :func:`progress_bar`; the line in it goes with the last method. None: lines only.
    """

    def __init__(self, bar: Any = None) -> None:
        self.bar, self.before = bar, time.monotonic()
        self.task = bar.add_task("checking methods", total=None) if bar is not None else None

    def __call__(self, name: str, checked: int, of: int) -> None:
        took, self.before = time.monotonic() - self.before, time.monotonic()
        if (self.bar is None or self.bar.disable) and took >= SLOW:
            print(f"kvfold: [{checked}/{of}] methods checked: {name}, {took:.0f} s", file=sys.stderr, flush=True)
        if self.bar is not None:
            self.bar.update(self.task, completed=checked, total=of, description=f"checking methods: {name}")
            if checked == of:
                self.bar.remove_task(self.task)


def wake() -> None:
    """Import what takes seconds, many of them beside busy neighbours, and say so on a terminal. Elsewhere nothing is said:
    wrong input is answered by its error alone."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("importing PyTorch and Transformers ...") if console.is_terminal else nullcontext():
        from kvfold import models  # noqa: F401


def prepare(cache: Any, device: Any) -> None:
    """Have kernels compiled that a new cache will be read by on a device, before an answer begins; they say it if that takes
    long."""
    from kvfold.engines.transformers.layer import FoldedLayer
    from kvfold.plan import choose_kernel

    layers = [layer for layer in cache.layers if isinstance(layer, FoldedLayer)]
    for layer in {(layer.method, layer.spec.head_dim): layer for layer in layers}.values():
        choose_kernel(layer.method, layer.spec, device, layer.kernel_name).kernel.prepare(*layer.layout.read_as)


def load(model: str | None, dtype: str | None, device: str | None) -> Any:
    """As :func:`kvfold.models.load`, without the loaders' own talk."""
    from transformers.utils import logging

    from kvfold import models

    logging.set_verbosity_error()
    return models.load(model, dtype, device)


def as_text(given: str, field: str) -> str:
    """An argument as text. Python has half characters for bytes that the locale's encoding lacks; they may be UTF-8 yet.

    Raises
    ------
    KVFoldError
        They are no text; names the place of the first.
    """
    try:
        given.encode("utf-8")
        return given
    except UnicodeEncodeError as error:
        first = error.start
    try:
        return os.fsencode(given).decode("utf-8")
    except UnicodeError:
        raise KVFoldError(f"{field}: it is not UTF-8 text (character {first})") from None


def check_name(given: str, field: str) -> None:
    """Refuse a file's name of bytes that are no text here.

    Raises
    ------
    KVFoldError
    """
    if as_text(given, field) != given:
        raise KVFoldError(
            f"{field}: it has characters that the encoding of this locale ({sys.getfilesystemencoding()}) lacks; allowed: a "
            "plain name, or PYTHONUTF8=1"
        )


def prompt_text(given: str | None) -> str:
    """The prompt that was given, or standard input for none or ``-``.

    Raises
    ------
    KVFoldError
        It is empty or no text, or there is none: standard input is a terminal.
    """
    text = given
    if given is None and (sys.stdin is None or sys.stdin.isatty()):
        raise KVFoldError("prompt: there is none; give some text, or - to read standard input")
    if given is None or given == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise KVFoldError(f"prompt: standard input is not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise KVFoldError(f"prompt: cannot read standard input: {error.strerror}") from None
    if not text or not text.strip():
        raise KVFoldError("prompt: it is empty; give some text")
    text = as_text(text, "prompt")
    return text if given not in (None, "-") else text.removesuffix("\n").removesuffix("\r")


class Stream:
    """A streamer for ``generate``: prints tokens as words as they come, and keeps the times of the decode steps.

    Where they cannot be printed (:attr:`failed`) generation goes on unless the text is ``needed`` there.
    """

    def __init__(self, tokenizer: Any, file: Any, needed: bool = True) -> None:
        from transformers import TextStreamer

        self.times: list[float] = []
        self.file = file
        self.needed = needed
        self.failed: OSError | None = None
        self.status = ExitStack()
        outer = self

        class Printer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                outer.show(text, "\n" if stream_end else "")

        self.printer = Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show on a terminal what goes on, until the first letters are printed."""
        from rich.console import Console

        console = Console(stderr=True)
        with self.status:
            if console.is_terminal:
                self.status.enter_context(console.status(f"{what} ..."))
            yield

    def put(self, value: Any) -> None:
        from kvfold.kernels.compiling import compiling

        self.times.append(time.perf_counter() - compiling.seconds)
        self.printer.put(value)

    def show(self, text: str, end: str) -> None:
        """Print a piece of the answer."""
        if text:
            self.status.close()
        if self.failed is not None:
            return
        try:
            print(text, end=end, file=self.file, flush=True)
        except OSError as error:
            if self.needed:
                raise
            self.failed = error

    def end(self) -> None:
        self.printer.end()

    def tokens_per_s(self) -> float | None:
        """Decode speed: the prompt, the first token, which the prefill makes, the first step, in which kernels are loaded and a
        graph is captured, and compilation of kernels are left out. None for an answer of one or two tokens."""
        steps = self.times[2:]
        return (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else None


def json_target(path: str | None) -> Path | None:
    """The file that ``--json`` names, or None; fails now if it could not be written later."""
    if path is None or path == "-":
        return None
    target = files.expanded(path)
    files.check(target, "json", "JSON", ("{", "["))
    return target


def write_json(path: Path, value: Any) -> None:
    """Write a result in one step."""
    from kvfold.evaluation.schema import write_json

    write_json(path, value)


def print_json(value: Any) -> None:
    """Print a result as JSON."""
    click.echo(outlet.as_json(value, sys.stdout.encoding))


def publish(
    value: Any,
    json_path: str | None,
    target: Path | None,
    table: Callable[[], None],
    written: bool = False,
    failure: OutputError | None = None,
) -> None:
    """Write a command's result where ``--json`` says and print it, so that neither is lost with the other.

    Parameters
    ----------
    json_path, target
        What ``--json`` says, and the file that it names.
    table
        Prints the result for people.
    written, failure
        Whether it has been written already, or why that failed.

    Raises
    ------
    OutputError, OSError
        As :func:`kvfold.outlet.publish`.
    """
    write = None if written or failure or target is None else partial(write_json, target, value)
    show = partial(print_json, value) if json_path == "-" else table
    outlet.publish(value, show, write, target, failure)


def console(width: int | None = None) -> Console:
    """Standard output; where it is a file or a pipe, which have no width, as wide as said: rather long lines than cut words."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=width or 140)


def show(sheet: Sheet) -> None:
    """Print a table, fitted to the terminal; in full where there is none, of long texts a line per field."""
    here = console(sheet.natural_width)
    if sheet.fields and not here.is_terminal:
        click.echo(sheet.listing())
    else:
        here.print(sheet)
    click.echo()


def say(line: str) -> None:
    """Print a sentence, broken between words on a terminal, in one line elsewhere."""
    if sys.stdout.isatty():
        width = max(console().width, 20)
        line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    click.echo(line)
