"""The commands ``kvfold calibrate`` and ``kvfold artefact``; mounted by :mod:`kvfold.cli`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvfold.errors import KVFoldError
from kvfold.terminal import check_text, print_json, seed_option

if TYPE_CHECKING:
    from kvfold.calibration.run import LayerDone


def spread_text(arguments: list[str]) -> list[str]:
    """``--text A B`` as ``--text A --text B``, for ``calibrate`` only."""
    if not arguments or arguments[0] != "calibrate":
        return arguments
    spread: list[str] = []
    listing = False
    for argument in arguments:
        if argument.startswith("-"):
            listing = argument == "--text"
        elif listing and spread[-1] != "--text":
            spread.append("--text")
        spread.append(argument)
    return spread


class _Calibrate(click.Command):
    """Takes several files after one ``--text``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_text(["calibrate", *args])[1:])


@click.command(cls=_Calibrate, short_help="Learn a method's codebooks from text.")
@click.option(
    "--model", metavar="M", help="Hub id, local folder or .gguf file.  [default: embedded SmolLM2-135M-Instruct]"
)
@click.option("--method", "spec", metavar="X", default="commvq:bits=2", show_default=True, help="Method to learn.")
@click.option(
    "--text", "paths", metavar="FILE ...", multiple=True, required=True, help="UTF-8 text, one or more files."
)
@click.option("--tokens", metavar="N", type=int, default=32768, show_default=True, help="Tokens of it to use.")
@click.option(
    "--out", metavar="FILE", required=True, help="Where the artefact goes; FILE.partial keeps finished layers."
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one, else cpu]")
@click.option(
    "--preset",
    metavar="NAME",
    help="Of commvq. fast: minutes on a CPU. long: the same with more steps, for a GPU. paper: as published, for a GPU.  "
    "[default: fast]",
)
@click.option(
    "--encoder",
    metavar="NAME",
    help="Of commvq's values. scalar: closed form, seconds a layer. mlp: the paper's network, better at 1 bit, a minute a "
    "layer on a CPU.  [default: the preset's: scalar, for paper mlp]",
)
@seed_option("Same seed, same artefact.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def calibrate(
    model: str | None,
    spec: str,
    paths: tuple[str, ...],
    tokens: int,
    out: str,
    device: str | None,
    preset: str | None,
    encoder: str | None,
    seed: int,
    force: bool,
) -> None:
    """Learn a method's codebooks from text and write them to a file; a killed run goes on where it stopped.

    Prints each layer's errors on held-out text: of keys and values (squared error over squared length); for commvq of
    scores (over their variance) and of attention outputs; for kvquant of keys and values weighted by sensitivity.
    """
    from kvfold import methods
    from kvfold.calibration.artefact import check_target
    from kvfold.evaluation.text import load_text
    from kvfold.methods.learned import LearnedMethod

    method = methods.get(spec)
    if not isinstance(method, LearnedMethod):
        learn_something = [name for name, kind in methods.REGISTRY.items() if issubclass(kind, LearnedMethod)]
        raise KVFoldError(f"method: {method.name} learns nothing beforehand; allowed: {', '.join(learn_something)}")
    if method.artefact:
        raise KVFoldError(
            f"method: artefact={method.artefact} is what calibrate makes; leave it out, and name it with --out"
        )
    for option, value in (("preset", preset), ("encoder", encoder)):
        if value is not None and method.name != "commvq":
            raise KVFoldError(f"{option}: {method.name} has none; allowed: leave it out, or method commvq")
    target = Path(out).expanduser()
    check_text(out, "out")
    try:
        usable = dataclasses.replace(method, artefact=str(target))
    except KVFoldError as error:
        raise KVFoldError(f"out: {error}") from None
    check_target(target, force)
    texts = [load_text(path) for path in paths]

    from kvfold.calibration.commvq import ENCODERS, PRESETS
    from kvfold.calibration.run import calibrate as learn
    from kvfold.models import load

    if preset is not None and preset not in PRESETS:
        raise KVFoldError(f"preset: {preset!r} is not known; allowed: {', '.join(PRESETS)}")
    if encoder is not None and encoder not in ENCODERS:
        raise KVFoldError(f"encoder: {encoder!r} is not known; allowed: {', '.join(ENCODERS)}")
    loaded, tokenizer, info = load(model, None, device)
    progress = _Progress()
    result = learn(
        loaded,
        tokenizer,
        info.name,
        method,
        texts,
        tokens,
        target,
        preset=preset or "fast",
        encoder=encoder,
        seed=seed,
        force=force,
        on_layer=progress.layer,
        on_window=progress.window,
    )
    click.echo(f"held-out errors, mean over layers: {_errors(result.mean_errors())}")
    click.echo(f"written: {target} ({result.nbytes / 1e6:.1f} MB); use it with --method {shlex.quote(str(usable))}")


class _Progress:
    """A line per layer on standard error, with the time that is left."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def window(self, done: int, count: int) -> None:
        """A line per eighth of the backward passes."""
        if done == count or done % max(1, count // 8) == 0:
            print(f"gradients: {done}/{count} windows", file=sys.stderr, flush=True)

    def layer(self, done: LayerDone) -> None:
        if done.seconds:
            self.seconds.append(done.seconds)
            left = (done.num_layers - done.layer_idx - 1) * sum(self.seconds) / len(self.seconds)
            time = f"{done.seconds:.0f} s, {left / 60:.0f} min left"
        else:
            time = "taken over from an earlier run"
        errors = _errors(done.errors) if done.errors else "kept in full precision"
        print(f"layer {done.layer_idx + 1}/{done.num_layers}: {errors}  ({time})", file=sys.stderr, flush=True)


def _parameters(tensors: dict[str, Any]) -> str:
    """What the tables add to a model, by side: names begin with layers.N.key or layers.N.value."""
    counts = {
        side: sum(t.numel() for name, t in tensors.items() if name.split(".")[2] == side) for side in ("key", "value")
    }
    return f"{sum(counts.values()):,} parameters ({counts['key']:,} for keys, {counts['value']:,} for values)"


def _preset(about: dict[str, Any]) -> dict[str, Any]:
    encoder = about.get("schedule", {}).get("encoder")
    return {about["preset"]: "", **({"value encoder": encoder} if encoder else {}), "seed": about["seed"]}


def _errors(errors: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in errors.items())


@click.group("artefact")
def artefact_group() -> None:
    """Look into, check and publish what ``kvfold calibrate`` wrote."""


@artefact_group.command()
@click.argument("location")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def info(location: str, as_json: bool) -> None:
    """Say what an artefact is for, how it was made, and its held-out errors.

    LOCATION is a file, a folder or a hub id.
    """
    from kvfold.calibration.artefact import load

    found = load(location)
    if as_json:
        print_json({**found.metadata(), "bytes": found.nbytes})
        return
    about: dict[str, Any] = found.calibration
    texts = ", ".join(f"{t['name']} ({t['sha256'][:12]})" for t in about["texts"])
    for name, value in (
        ("model", f"{found.model} (configuration {found.config_hash[:12]})"),
        ("method", found.method),
        ("shape", ", ".join(f"{k}={v}" for k, v in found.shape.items() if k != "no_rope_layers")),
        ("size", f"{found.nbytes / 1e6:.2f} MB, {_parameters(found.tensors)}"),
        ("calibrated on", f"{about['tokens']} tokens ({about['held_out_tokens']} held out) of {texts}"),
        ("preset", ", ".join(f"{name} {value}".strip() for name, value in _preset(about).items())),
        ("held-out errors", _errors(found.mean_errors())),
        ("made", f"{found.created} with {', '.join(f'{k} {v}' for k, v in found.versions.items())}"),
    ):
        click.echo(f"{name + ':':<17}{value}")
    for layer, errors in found.errors.items():
        click.echo(f"  layer {layer:>3}: {_errors(errors)}")


@artefact_group.command()
@click.argument("location")
@click.option("--model", metavar="M", help="Also check that it was made for this model.")
def verify(location: str, model: str | None) -> None:
    """Check an artefact's checksum and schema, and whether it was made for a model's configuration and weights; exits with 2
    if not.
    """
    from kvfold.calibration.artefact import load

    found, fits = load(location), ""
    if model is not None:
        from kvfold.models import load as load_model

        loaded, _, _ = load_model(model, None, "cpu")
        found.check_model(loaded.config)
        fits = f"; fits {model}'s configuration and weights (some elements of each are compared)"
        if not found.check_weights(loaded):
            fits = f"; fits {model}'s configuration (weights not compared: a file of schema 1 has no hash of them)"
    click.echo(f"sound: {found.method} for {found.model}{fits}")


@artefact_group.command()
@click.argument("file")
@click.argument("target")
def push(file: str, target: str) -> None:
    """Publish FILE to TARGET, an existing folder or a hub id (owner/name)."""
    from kvfold.calibration.artefact import push as publish

    click.echo(f"published: artefact={publish(Path(file).expanduser(), target)}")
