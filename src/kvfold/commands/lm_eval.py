"""The command ``kvfold lm-eval``."""

from __future__ import annotations

import importlib.util
import sys

import click

from kvfold.errors import KVFoldError


@click.command(
    "lm-eval",
    short_help="lm-eval's command line, with kvfold as a model.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval with the model kvfold known to it; all arguments are lm-eval's.

    \b
    kvfold lm-eval --model kvfold --model_args pretrained=M method=fold:bits=2 --tasks gsm8k arc_easy
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise KVFoldError('lm-eval: it is not installed; pip install "kvfold[lm-eval]"')
    from lm_eval.__main__ import cli_evaluate

    import kvfold.evaluation.harness  # noqa: F401  # registers the model

    mine = sys.argv
    sys.argv = ["lm-eval", *arguments]  # where it looks
    try:
        cli_evaluate()
    except ValueError as error:
        unknown = str(error).partition(": ")
        if unknown[0] != "Tasks not found":
            raise
        raise KVFoldError(
            f"tasks: lm-eval has no {unknown[2]}; `lm-eval ls tasks` lists its names, --include_path FOLDER adds others"
        ) from error
    finally:
        sys.argv = mine
