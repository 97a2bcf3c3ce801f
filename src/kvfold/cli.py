"""The command line: parses, calls, prints. Wrong input exits with status 2 and one line, an interrupt with 130."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import click

import kvfold
from kvfold import outlet
from kvfold.errors import KVFoldError, OutputError
from kvfold.sheet import Column, Sheet
from kvfold.terminal import (
    JSON_HELP,
    Stream,
    check_temperature,
    console,
    json_target,
    load,
    method_option,
    model_options,
    prompt_text,
    publish,
    sampling_options,
    say,
    show,
    spread,
)
from kvfold.threads import settle

COMPUTE = ("calibrate", "chat", "compare", "domains", "eval", "generate")
"""Commands whose threads are told how to wait; benchmarks measure what they find."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; default: those of the process.

    Returns
    -------
    int
        Exit status: 0, 1 where a result or standard output cannot be written or memory does not suffice, 2 for wrong input, 130
        when interrupted.
    """
    arguments = spread(list(sys.argv[1:] if argv is None else argv))
    with outlet.forgiving():
        status = _run(arguments)
        if (failed := outlet.finish()) is not None and not status:
            status = 1 if failed.errno == errno.EPIPE else _fail(f"standard output: {failed.strerror}", 1)
    return status


def _run(arguments: list[str]) -> int:
    try:
        _settle(arguments)
        result = cli(arguments, prog_name="kvfold", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "kvfold"
        return _fail(f"{_line(error.format_message())} (see {command} --help)")
    except KVFoldError as error:
        return _fail(_line(str(error)), 1 if isinstance(error, OutputError) else 2)
    except (click.Abort, KeyboardInterrupt):  # click makes the one of the other, once it has ended the line
        print("kvfold: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # what click makes of a closed pipe
        return stop.code if isinstance(stop.code, int) else 1
    except OSError as error:
        return _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _fail(f"memory: {_line(str(error)) or 'not enough'}; give a smaller model, context or window", 1)


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _settle(arguments: Sequence[str]) -> None:
    """Have threads wait without spinning, in commands that compute, unless torch is there already; say so."""
    if not arguments or arguments[0] not in COMPUTE or {"-h", "--help"} & set(arguments) or "torch" in sys.modules:
        return
    if said := settle(os.environ):
        print(f"kvfold: {said}", file=sys.stderr)


def _fail(message: str, status: int = 2) -> int:
    with contextlib.suppress(OSError):
        print(f"kvfold: error: {message}", file=sys.stderr)
    return status


def _line(message: str) -> str:
    return " ".join(message.split())


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(kvfold.__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Fold the KV cache of a transformer into 1 to 4 bits per value, and see what that costs and saves.

    A method is named by a string: NAME, or NAME:KEY=VALUE,KEY=VALUE (for example kivi:bits=2,sink=32). Several are joined by +:
    k=fold:bits=3+v=kivi for keys and values, fold+keep=0,1 for layers in full precision, fold+0-3=kivi:bits=4 for some layers.
    """


@cli.command(short_help="Answer a prompt with a folded cache.")
@click.argument("prompt", required=False)
@method_option("Method of the cache.")
@model_options
@sampling_options(128, "Stop after so many tokens.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the model's chat template.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def generate(
    prompt: str | None,
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
    """Answer PROMPT with a folded cache, as a stream; then say speed, cache size and saving.

    Without PROMPT, or with -, it is read from standard input: echo Hello | kvfold generate
    """
    prompt = prompt_text(prompt)
    if max_new_tokens < 1:
        raise KVFoldError(f"max-new-tokens: {max_new_tokens}; give at least 1")
    check_temperature(temperature)
    target = json_target(json_path)
    import torch

    from kvfold import methods, models, sizes
    from kvfold.graph import decoding

    method = methods.get(spec)
    loaded, tokenizer, info = load(model, dtype, device)
    chat = prompt if raw or not tokenizer.chat_template else [{"role": "user", "content": prompt}]
    ids = torch.tensor([models.prompt_tokens(tokenizer, chat, info.name)], device=loaded.device)
    prompt_tokens = ids.shape[1]
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
    streamer = Stream(tokenizer, sys.stderr if json_path == "-" else sys.stdout, needed=json_path is None)
    graphs = decoding(loaded, cache, max_new_tokens, required=False) if on_gpu else nullcontext()
    with torch.inference_mode(), graphs as steps:
        output = loaded.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            **sampling,
        )
    new = output[0, prompt_tokens:]
    result = {
        "method": str(method),
        "model": info.name,
        "dtype": info.dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(new),
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens_per_s": streamer.tokens_per_s(),
        "decoding": "step by step" if steps is None else str(steps),
        **sizes.to_dict(cache, loaded.dtype, info.max_context),
    }

    def summary() -> None:
        if streamer.failed is not None:
            raise streamer.failed
        speed = "" if result["tokens_per_s"] is None else f", {result['tokens_per_s']:.1f} tokens/s"
        click.echo()
        say(f"[{method}] {len(new)} tokens{speed}; {sizes.said(cache, loaded.dtype)}" + (f"; {steps}" if steps else ""))
        if ahead := sizes.ahead(cache, loaded.dtype, info.max_context):
            say(ahead)

    publish(result, json_path, target, summary)


@cli.command(short_help="Say what a method does to a model's cache, layer by layer.")
@model_options
@method_option("Method to explain.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def explain(model: str | None, dtype: str | None, device: str | None, spec: str, json_path: str | None) -> None:
    """Say, layer by layer, what a method does to a model's cache, and what stays as it is."""
    from kvfold import methods

    method = methods.get(spec)
    target = json_target(json_path)
    loaded, _, info = load(model, dtype, device)
    plan = kvfold.explain(loaded, method)

    def table() -> None:
        show(plan.sheet(f"{info.name} with {method}"))
        for line in plan.summary():
            say(line)
        limit = f"up to {info.max_context:,} tokens" if info.max_context else "the configuration does not say"
        say(f"context: {limit}")

    publish(plan.to_dict(), json_path, target, table)


@cli.command("methods", short_help="List every method and its options.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def list_methods(json_path: str | None) -> None:
    """List every method: what it is, its paper, effective bits, and options with their defaults."""
    from kvfold import methods

    target = json_target(json_path)
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
    publish(entries, json_path, target, lambda: _show_methods(entries))


def _show_methods(entries: Sequence[dict[str, Any]]) -> None:
    columns = (
        Column("method", key=True),
        Column("bits", right=True),
        Column("what", wraps=True),
        Column("options with defaults; presets", wraps=True),
    )
    sheet = Sheet(columns)
    for entry in entries:
        options = ", ".join(f"{key}={_cell(value)}" for key, value in entry["options"].items())
        source = " ".join(str(part) for part in (entry["paper"], entry["url"]) if part)
        what = "\n".join(filter(None, (entry["summary"], source)))
        presets = "".join(f"\n{key} = {spec}" for key, spec in entry["presets"].items())
        sheet.add(entry["name"], f"{entry['effective_bits']:.2f}", what, options + presets)
    console().print(sheet)
    say("bits: effective bits per cached value with the defaults, head_dim 128, everything but the windows included")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


from kvfold.bench.cli import bench  # noqa: E402
from kvfold.calibration.cli import artefact_group, calibrate  # noqa: E402
from kvfold.chat import chat  # noqa: E402
from kvfold.evaluate import evaluate  # noqa: E402
from kvfold.quality import compare, domains  # noqa: E402

cli.add_command(chat)
cli.add_command(compare)
cli.add_command(domains)
cli.add_command(evaluate)
cli.add_command(calibrate)
cli.add_command(artefact_group)
cli.add_command(bench)
