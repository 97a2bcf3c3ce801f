"""The command ``kvfold explain``."""

from __future__ import annotations

import click

import kvfold
from kvfold.commands.terminal import JSON_HELP, json_target, load, method_option, model_options, publish, say, show


@click.command(short_help="Say what a method does to a model's cache, layer by layer.")
@model_options
@method_option("Method to explain.")
@click.option("--json", "json_path", metavar="FILE", help=JSON_HELP)
def explain(model: str | None, dtype: str | None, device: str | None, spec: str, json_path: str | None) -> None:
    """Say, layer by layer, what a method does to a model's cache, and what stays as it is."""
    from kvfold import methods

    method = methods.ready(spec)
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
