"""The command line: parses, calls, prints. Wrong input exits with status 2 and one line, an interrupt with 130."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import kvfold
from kvfold.errors import KVFoldError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvfold.evaluation.schema import Header, Row

JSON_HELP = "Also write the result to FILE as JSON; - prints it instead of the table."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; default: those of the process.

    Returns
    -------
    int
        Exit status: 0, 2 for wrong input, 130 when interrupted.
    """
    arguments = _spread_methods(list(sys.argv[1:] if argv is None else argv))
    try:
        result = cli(arguments, prog_name="kvfold", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "kvfold"
        return _fail(f"{_line(error.format_message())} (see {command} --help)")
    except KVFoldError as error:
        return _fail(_line(str(error)))
    except click.Abort:  # what click makes of KeyboardInterrupt, once it has ended the line
        print("kvfold: interrupted", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(f"kvfold: error: {message}", file=sys.stderr)
    return 2


def _line(message: str) -> str:
    return " ".join(message.split())


def _spread_methods(arguments: list[str]) -> list[str]:
    """``--methods A B`` as ``--methods A --methods B``: several values after one flag, which click does not have."""
    spread: list[str] = []
    listing = False
    for argument in arguments:
        if argument == "--methods":
            listing = True
            spread.append(argument)
        elif listing and not argument.startswith("-"):
            if spread[-1] != "--methods":
                spread.append("--methods")
            spread.append(argument)
        else:
            listing = False
            spread.append(argument)
    return spread


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(kvfold.__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Fold the KV cache of a transformer into 1 to 4 bits per value, and see what that costs and saves.

    A method is named by a string: NAME, or NAME:KEY=VALUE,KEY=VALUE (for example kivi:bits=2,sink=32).
    """


def _model_options(command: Any) -> Any:
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


@cli.command()
@_model_options
@click.option(
    "--methods",
    "specs",
    metavar="A B ...",
    multiple=True,
    help="Methods to compare, one or more after the flag.  [default: one row of every method]",
)
@click.option(
    "--artefacts",
    metavar="DIR",
    help="Also compare the methods of all artefacts in DIR that were made for the model.",
)
@click.option(
    "--text", "text_path", metavar="FILE", help="UTF-8 text to read.  [default: the prose that ships with Python]"
)
@click.option(
    "--tokens", metavar="N", type=int, default=512, show_default=True, help="Tokens scored through the cache."
)
@click.option("--prefix", metavar="N", type=int, default=1024, show_default=True, help="Tokens prefilled before them.")
@click.option("--chunk", metavar="N", type=int, default=32, show_default=True, help="Query tokens per scoring call.")
@click.option(
    "--new-tokens",
    metavar="N",
    type=int,
    default=16,
    show_default=True,
    help="Tokens generated to measure the decode speed.",
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed given to torch.")
@click.option(
    "--json", "json_path", metavar="FILE", help=JSON_HELP + " A killed run with a FILE goes on where it stopped."
)
def compare(
    model: str | None,
    dtype: str | None,
    device: str | None,
    specs: tuple[str, ...],
    artefacts: str | None,
    text_path: str | None,
    tokens: int,
    prefix: int,
    chunk: int,
    new_tokens: int,
    seed: int,
    json_path: str | None,
) -> None:
    """Read the same text under every method; print quality, size and speed.

    The first tokens are prefilled, the next ones scored through the folded cache, so that every score depends on it.
    KL divergence (kld, nats per token) and top-1 agreement compare with the same model and a full-precision cache.
    """
    from kvfold import methods
    from kvfold.evaluation import compare as run
    from kvfold.evaluation import load_text
    from kvfold.evaluation.compare import encode

    chosen = [methods.get(spec) for spec in specs or methods.DEFAULT]
    text = load_text(text_path)
    target = _json_target(json_path)
    if chunk < 1:
        raise KVFoldError(f"chunk: {chunk}; give at least 1")
    loaded, tokenizer, info = _load(model, dtype, device)
    chosen += _artefact_methods(artefacts, loaded)
    encode(tokenizer, text, prefix, tokens, new_tokens, info.max_context)
    progress = _CompareProgress(prefix + tokens, new_tokens, target)
    with progress:
        result = run(
            loaded,
            tokenizer,
            info,
            chosen,
            text,
            prefix=prefix,
            tokens=tokens,
            new_tokens=new_tokens,
            chunk=chunk,
            seed=seed,
            json_path=target,
            on_start=progress.start,
            on_tokens=progress.tokens,
            on_row=progress.row,
        )
    if json_path == "-":
        _print_json(result.to_dict())
        return
    console = _console()
    console.print(_compare_table(result.header, result.rows))
    for line in _compare_notes(result.header):
        click.echo(line)
    if target:
        click.echo(f"written: {target}")


@cli.command()
@_model_options
@click.option(
    "--methods",
    "specs",
    metavar="A B ...",
    multiple=True,
    help="Methods to score.  [default: none, kivi at 1 and 2 bits]",
)
@click.option("--artefacts", metavar="DIR", help="Also score the methods of all artefacts in DIR made for the model.")
@click.option(
    "--text",
    "texts",
    metavar="NAME=FILE",
    multiple=True,
    help="A further domain, or a text instead of a built-in one; UTF-8 or JSON lines. May be given again.",
)
@click.option(
    "--domains", "names", metavar="A,B", default="prose,code,retrieval", show_default=True, help="Built-in ones."
)
@click.option("--windows", metavar="N", type=int, default=3, show_default=True, help="Windows of each domain.")
@click.option("--prefix", metavar="N", type=int, default=1024, show_default=True, help="Tokens prefilled in a window.")
@click.option("--tokens", metavar="N", type=int, default=256, show_default=True, help="Tokens scored after them.")
@click.option(
    "--json", "json_path", metavar="FILE", help=JSON_HELP + " A killed run with a FILE goes on where it stopped."
)
def domains(
    model: str | None,
    dtype: str | None,
    device: str | None,
    specs: tuple[str, ...],
    artefacts: str | None,
    texts: tuple[str, ...],
    names: str,
    windows: int,
    prefix: int,
    tokens: int,
    json_path: str | None,
) -> None:
    """Score methods on texts of several kinds: does what was learned on one hold on another?

    prose is CPython's documentation, code its library's source, retrieval random pairs that are listed once and then asked
    for (exact: answers that are right in full). KL divergence and top-1 agreement are means over the windows, against the
    same model with a full-precision cache.
    """
    from kvfold import methods
    from kvfold.evaluation import domains as run

    files: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise KVFoldError(f"text: {text!r} is not NAME=FILE, for example gsm8k=test.jsonl")
        files[name] = path
    for value, what, least in ((windows, "windows", 1), (prefix, "prefix", 64), (tokens, "tokens", 32)):
        if value < least:
            raise KVFoldError(f"{what}: {value}; give at least {least}")
    target = _json_target(json_path)
    chosen = [methods.get(spec) for spec in specs or ("none", "kivi:bits=1", "kivi:bits=2")]
    loaded_texts = run.load_texts([name for name in names.split(",") if name], files)
    loaded, tokenizer, info = _load(model, dtype, device)
    chosen += _artefact_methods(artefacts, loaded)
    if info.max_context is not None and prefix + tokens > info.max_context:
        raise KVFoldError(f"tokens: prefix {prefix} + {tokens} is beyond the model's context of {info.max_context}")
    pieces = run.make_windows(tokenizer, loaded_texts, prefix, tokens, windows)

    def tell(row: Any, done: int, total: int) -> None:
        print(f"kvfold: [{done}/{total}] {row.domain} {row.window}: {row.method}", file=sys.stderr, flush=True)

    header, rows = run.run(loaded, info, chosen, pieces, json_path=target, on_row=tell)
    if json_path == "-":
        _print_json(run.to_dict(header, rows))
        return
    table = _table(f"{info.name}: KL divergence / top-1 agreement (exact answers)")
    found = run.means(rows)
    table.add_column("method", style="bold", overflow="fold")
    table.add_column("bits", justify="right")
    for name in next(iter(found.values())):
        table.add_column(name, justify="right", no_wrap=True)
    bits = {row.method: row.bits_without_tables for row in rows}
    for method, by_domain in found.items():
        cells = [
            ("not finite" if m.kld is None else f"{m.kld:z.3f}")
            + f" / {100 * m.top1:.0f}%"
            + ("" if m.exact is None else f" ({100 * m.exact:.0f}%)")
            for m in by_domain.values()
        ]
        table.add_row(method, "-" if bits[method] is None else f"{bits[method]:.2f}", *cells)
    _console().print(table)
    click.echo(
        f"{windows} windows of {prefix} tokens prefilled and {tokens} scored; {header.dtype}, {header.device}; "
        "bits: without the tables that all sequences share"
    )
    if target:
        click.echo(f"written: {target}")


def _artefact_methods(folder: str | None, model: Any) -> list[Any]:
    """Methods of the artefacts in a folder that fit the model, in the order of their files' names."""
    from kvfold import methods
    from kvfold.calibration.artefact import load

    if folder is None:
        return []
    path = Path(folder).expanduser()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise KVFoldError(f"artefacts: {folder} is not a folder with artefacts; make some with kvfold calibrate")
    chosen = []
    for file in files:
        found = load(str(file))
        try:
            found.check_model(model.config)
        except KVFoldError:
            click.echo(f"kvfold: {file.name} was made for {found.model}; left out", err=True)
            continue
        spec = found.method
        chosen.append(methods.get(f"{spec}{',' if ':' in spec else ':'}artefact={file}"))
    return chosen


@cli.command()
@click.argument("prompt")
@click.option("--method", "spec", metavar="X", default="kivi:bits=2", show_default=True, help="Method of the cache.")
@_model_options
@click.option(
    "--max-new-tokens", metavar="N", type=int, default=128, show_default=True, help="Stop after so many tokens."
)
@click.option(
    "--temperature",
    metavar="T",
    type=float,
    default=0.0,
    show_default=True,
    help="0: always the likeliest token; above: sample.",
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of the sampling.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the model's chat template.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def generate(
    prompt: str,
    spec: str,
    model: str | None,
    dtype: str | None,
    device: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    raw: bool,
    json_path: str | None,
) -> None:
    """Answer PROMPT with a folded cache, as a stream; then say speed, cache size and saving."""
    import torch

    from kvfold import methods
    from kvfold.graph import decoding

    if not prompt.strip():
        raise KVFoldError("prompt: it is empty; give some text")
    if max_new_tokens < 1:
        raise KVFoldError(f"max-new-tokens: {max_new_tokens}; give at least 1")
    if not 0 <= temperature < float("inf"):
        raise KVFoldError(f"temperature: {temperature}; give 0 or more")
    method = methods.get(spec)
    target = _json_target(json_path)
    loaded, tokenizer, info = _load(model, dtype, device)
    inputs = _prompt_inputs(tokenizer, prompt, raw).to(loaded.device)
    prompt_tokens = inputs["input_ids"].shape[1]
    if info.max_context is not None and prompt_tokens + max_new_tokens > info.max_context:
        raise KVFoldError(
            f"max-new-tokens: prompt {prompt_tokens} + {max_new_tokens} tokens is beyond the model's context "
            f"of {info.max_context}; give at most {max(info.max_context - prompt_tokens, 0)}, or a shorter prompt"
        )
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    # None rather than the model's own values: they only warn when nothing is sampled.
    sampling |= {"temperature": temperature} if temperature > 0 else {"temperature": None, "top_p": None, "top_k": None}
    if tokenizer.pad_token_id is None:
        sampling["pad_token_id"] = tokenizer.eos_token_id
    on_gpu = loaded.device.type == "cuda"
    cache = kvfold.fold(loaded, method, max_length=prompt_tokens + max_new_tokens if on_gpu else None)
    streamer = _Stream(tokenizer, sys.stderr if json_path == "-" else sys.stdout)
    graphs = decoding(loaded, cache, max_new_tokens, required=False) if on_gpu else nullcontext()
    with torch.inference_mode(), graphs as steps:
        output = loaded.generate(
            **inputs, past_key_values=cache, max_new_tokens=max_new_tokens, streamer=streamer, **sampling
        )
    new = output[0, prompt_tokens:]
    sizes, full = cache.nbytes(), cache.full_nbytes()
    result = {
        "method": str(method),
        "model": info.name,
        "dtype": info.dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(new),
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens_per_s": streamer.tokens_per_s(),
        "decoding": "step by step" if steps is None else str(steps),
        "cache_tokens": int(cache.get_seq_length()),
        "cache_bytes": int(sizes["total"]),
        "full_cache_bytes": int(full),
    }
    if target:
        _write_json(target, result)
    if json_path == "-":
        _print_json(result)
        return
    speed = "" if result["tokens_per_s"] is None else f", {result['tokens_per_s']:.1f} tokens/s"
    click.echo(
        f"\n[{method}] {len(new)} tokens{speed}; cache of {result['cache_tokens']} tokens: {_bytes(sizes['total'])} "
        f"instead of {_bytes(full)} in {info.dtype}: {full / max(sizes['total'], 1):.2f}x smaller"
        + (f"; {steps}" if steps is not None else "")
    )


@cli.command()
@_model_options
@click.option("--method", "spec", metavar="X", default="kivi:bits=2", show_default=True, help="Method to explain.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def explain(model: str | None, dtype: str | None, device: str | None, spec: str, json_path: str | None) -> None:
    """Say, layer by layer, what a method does to a model's cache, and what stays as it is."""
    from kvfold import methods

    method = methods.get(spec)
    target = _json_target(json_path)
    loaded, _, info = _load(model, dtype, device)
    plan = kvfold.explain(loaded, method)
    if target:
        _write_json(target, plan.to_dict())
    if json_path == "-":
        _print_json(plan.to_dict())
        return
    table = _table(f"{info.name} with {method}")
    for name in ("layer", "kind", "folded", "keys", "values"):
        table.add_column(name)
    table.add_column("bits", justify="right")
    for name in ("windows", "kernel", "why"):
        table.add_column(name, overflow="fold")
    for first, last, layer in _runs(plan.layers):
        table.add_row(
            str(first) if first == last else f"{first}-{last}",
            layer.kind,
            "yes" if layer.folded else "no",
            layer.key_format,
            layer.value_format,
            f"{layer.effective_bits:.2f}",
            _cell(layer.windows),
            layer.kernel,
            layer.reason,
        )
    _console().print(table)
    folded, full = plan.bytes_per_token, plan.full_bytes_per_token
    click.echo(
        f"{folded:,.0f} bytes per token once packed, {full:,.0f} in {info.dtype}: "
        f"{full / max(folded, 1e-9):.2f}x smaller; context up to {info.max_context or 'unknown'} tokens"
    )
    left = [layer.layer_idx for layer in plan.layers if not layer.folded]
    click.echo(f"not folded: {'layers ' + ', '.join(map(str, left)) if left else 'nothing'}")
    for note in plan.notes:
        click.echo(f"note: {note}")


@cli.command("methods")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def list_methods(json_path: str | None) -> None:
    """List every method: what it is, its paper, effective bits, and options with their defaults."""
    from kvfold import methods

    target = _json_target(json_path)
    entries: list[dict[str, Any]] = []
    for name, kind in methods.REGISTRY.items():
        entries.append(
            {
                "name": name,
                "summary": kind.summary,
                "paper": kind.source,
                "url": kind.url,
                "effective_bits": kind().effective_bits(head_dim=128),
                "options": {key: default for key, (_, default) in methods.options_of(kind).items()},
                "presets": {key: spec for key, spec in methods.PRESETS.items() if methods.get(spec).name == name},
            }
        )
    if target:
        _write_json(target, entries)
    if json_path == "-":
        _print_json(entries)
        return
    table = _table()
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("bits", justify="right")
    table.add_column("what", ratio=2, overflow="fold")
    table.add_column("options with defaults; presets", ratio=2, overflow="fold")
    for entry in entries:
        options = ", ".join(f"{key}={_cell(value)}" for key, value in entry["options"].items())
        source = " ".join(str(part) for part in (entry["paper"], entry["url"]) if part)
        what = "\n".join(filter(None, (entry["summary"], source)))
        presets = "".join(f"\n{key} = {spec}" for key, spec in entry["presets"].items())
        table.add_row(entry["name"], f"{entry['effective_bits']:.2f}", what, options + presets)
    _console().print(table)
    click.echo(
        "bits: effective bits per cached value with the defaults, head_dim 128, everything but the windows included"
    )


class _Stream:
    """Prints tokens as words as they come, and keeps the times of the decode steps."""

    def __init__(self, tokenizer: Any, file: Any) -> None:
        from transformers import TextStreamer

        self.times: list[float] = []
        self.file = file
        outer = self

        class Printer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                print(text, end="\n" if stream_end else "", file=outer.file, flush=True)

        self.printer = Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.printer.put(value)

    def end(self) -> None:
        self.printer.end()

    def tokens_per_s(self) -> float | None:
        """Decode speed: the prompt and the first token, which the prefill makes, are left out."""
        steps = self.times[1:]
        return (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else None


class _CompareProgress:
    """A bar over all tokens of all methods on a terminal; elsewhere a line per finished row."""

    def __init__(self, scored: int, new_tokens: int, target: Path | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self.scored, self.new_tokens, self.target = scored, new_tokens, target
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.count = self.at = 0

    def __enter__(self) -> _CompareProgress:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self.bar.__exit__(kind, error, trace)
        if kind is KeyboardInterrupt and self.target is not None and self.at:
            print(f"kvfold: {self.at} rows are kept; the same command goes on from there", file=sys.stderr)

    def start(self, names: list[str], done: dict[str, Row]) -> None:
        self.count, self.at = len(names), len(done)
        if done:
            print(f"kvfold: {len(done)} of {len(names)} rows taken over from an earlier run", file=sys.stderr)
        todo = self.count - self.at
        self.task = self.bar.add_task("", total=todo * (self.scored + self.new_tokens) + (self.scored if todo else 0))

    def tokens(self, name: str, done: int) -> None:
        self.bar.update(self.task, advance=done, description=name)

    def row(self, row: Row) -> None:
        self.at += 1
        if self.bar.disable:
            print(f"kvfold: [{self.at}/{self.count}] {row.method}: {row.seconds:.1f} s", file=sys.stderr, flush=True)


def _compare_table(header: Header, rows: Sequence[Row]) -> Table:
    table = _table()
    table.add_column("method", overflow="fold", style="bold")  # an artefact's path may be long
    for name in ("bits", "cache", "smaller", "ppl", "kld", "top-1", "prefill tok/s", "decode tok/s", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method,
            "-" if row.effective_bits is None else f"{row.effective_bits:.2f}",
            _bytes(row.cache_bytes),
            f"{row.full_cache_bytes / max(row.cache_bytes, 1):.2f}x",
            "not finite" if row.ppl is None else f"{row.ppl:.3f}" if row.ppl < 1e4 else f"{row.ppl:.2e}",
            "not finite" if row.kld is None else f"{row.kld:z.4f}",
            "-" if row.top1 is None else f"{100 * row.top1:.1f}%",
            f"{row.prefill_tokens_per_s:.0f}",
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.seconds:.1f}",
        )
    return table


def _compare_notes(header: Header) -> list[str]:
    bits = {"float32": 32}.get(header.dtype, 16)
    lines = [
        f"{header.model}, {header.dtype}, {header.device}, {header.threads} threads; text {header.text} "
        f"(sha256 {header.text_sha256[:12]}): {header.prefix} tokens prefilled, {header.tokens} scored",
        "bits: per cached value of the packed part, everything included; cache: all of it, full-precision windows too",
        "kld, top-1: against the same model with a full-precision cache",
    ]
    if bits == 32:
        lines.append(
            "smaller: than a float32 cache, as this model runs in float32 here; halve it to compare with 16 bits"
        )
    return lines


def _prompt_inputs(tokenizer: Any, prompt: str, raw: bool) -> Any:
    if tokenizer.chat_template and not raw:
        message = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return tokenizer(prompt, return_tensors="pt")


def _load(model: str | None, dtype: str | None, device: str | None) -> Any:
    from transformers.utils import logging

    from kvfold import models

    logging.set_verbosity_error()
    return models.load(model, dtype, device)


def _json_target(path: str | None) -> Path | None:
    from kvfold.evaluation.schema import check_writable

    if path is None or path == "-":
        return None
    target = Path(path).expanduser()
    check_writable(target)
    return target


def _write_json(path: Path, value: Any) -> None:
    from kvfold.evaluation.schema import write_json

    write_json(path, value)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # A file or a pipe has no width: rather long lines than cut words.
    return console if console.is_terminal else Console(highlight=False, width=140)


def _table(title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _runs(layers: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Neighbouring layers that differ in nothing but their index, as (first, last, layer)."""
    start = 0
    for i, layer in enumerate(layers):
        following = layers[i + 1] if i + 1 < len(layers) else None
        if following is None or dataclasses.replace(following, layer_idx=layer.layer_idx) != layer:
            yield layers[start].layer_idx, layer.layer_idx, layer
            start = i + 1


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


from kvfold.bench.cli import bench  # noqa: E402
from kvfold.calibration.cli import artefact_group, calibrate  # noqa: E402

cli.add_command(calibrate)
cli.add_command(artefact_group)
cli.add_command(bench)
