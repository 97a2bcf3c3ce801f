"""The commands ``kvfold artefact``: what an artefact is, whether it is whole, and publishing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvfold.commands.terminal import print_json
from kvfold.files import expanded

if TYPE_CHECKING:
    pass


def _parameters(tensors: dict[str, Any]) -> str:
    """What the tables add to a model, by side: names begin with layers.N.key or layers.N.value."""
    counts = {
        side: sum(t.numel() for name, t in tensors.items() if name.split(".")[2] == side) for side in ("key", "value")
    }
    return f"{sum(counts.values()):,} parameters ({counts['key']:,} for keys, {counts['value']:,} for values)"


def _preset(about: dict[str, Any]) -> dict[str, Any]:
    encoder = about.get("schedule", {}).get("encoder")
    return {about["preset"]: "", **({"value encoder": encoder} if encoder else {}), "seed": about["seed"]}


@click.group("artefact")
def artefact_group() -> None:
    """Look into, check and publish what ``kvfold calibrate`` wrote."""


@artefact_group.command()
@click.argument("location")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def info(location: str, as_json: bool) -> None:
    """Say what an artefact is for and how it was made.

    Held-out errors of its layers follow. LOCATION is a file, a folder or a hub id.
    """
    from kvfold.artefact import load

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
        ("held-out errors", errors_text(found.mean_errors())),
        ("made", f"{found.created} with {', '.join(f'{k} {v}' for k, v in found.versions.items())}"),
    ):
        click.echo(f"{name + ':':<17}{value}")
    for layer, errors in sorted(found.errors.items(), key=lambda item: int(item[0])):
        click.echo(f"  layer {layer:>3}: {errors_text(errors)}")


@artefact_group.command()
@click.argument("location")
@click.option("--model", metavar="M", help="Also check that it was made for this model.")
def verify(location: str, model: str | None) -> None:
    """Check an artefact, and whether it is a model's.

    Its checksum and schema; with --model, the configuration and the weights that it was made for. Exits with 2 if they differ.
    """
    from kvfold.artefact import load

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
    """Publish an artefact.

    FILE goes to TARGET, an existing folder or a hub id (owner/name).
    """
    from kvfold.artefact import push as publish

    click.echo(f"published: artefact={publish(expanded(file), target)}")


def errors_text(errors: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in errors.items())
