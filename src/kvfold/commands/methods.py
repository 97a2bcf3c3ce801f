"""The command ``kvfold methods``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvfold.commands.terminal import JSON_HELP, console, json_target, publish, say
from kvfold.sheet import Column, Sheet


@click.command("methods", short_help="List every method and its options.")
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
