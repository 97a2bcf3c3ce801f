"""The command ``kvfold lm-eval``."""

from __future__ import annotations

import importlib.util
import sys

import click

from kvfold.errors import KVFoldError

OWN = {"--register", "--unregister", "--task-file"}
MISSING = 'lm-eval: it is not installed; pip install "kvfold[lm-eval]"'


@click.command(
    "lm-eval",
    short_help="lm-eval's command line, with kvfold as a model.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval with the model kvfold known to it. All arguments but these three, which stand alone, are lm-eval's:

    \b
    kvfold lm-eval --model kvfold --model_args pretrained=M method=fold:bits=2 --tasks gsm8k arc_easy
    kvfold lm-eval --register      from now on lm_eval --model kvfold works by itself in this environment
    kvfold lm-eval --unregister    takes that back
    kvfold lm-eval --task-file     prints a file; lm_eval --model kvfold --tasks FILE gsm8k works without any of these
    """
    if OWN & set(arguments):
        return _own(arguments)
    if importlib.util.find_spec("lm_eval") is None:
        raise KVFoldError(MISSING)
    if {"-h", "--help"} & set(arguments[:1]):
        context = click.get_current_context()
        click.echo(f"{context.command.get_help(context)}\n")
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


def _own(arguments: tuple[str, ...]) -> None:
    """What is ours and not lm-eval's."""
    from kvfold.commands import registering

    if len(arguments) > 1:
        (first, *_) = sorted(OWN & set(arguments))
        raise KVFoldError(f"{first.removeprefix('--')}: it stands alone; give kvfold lm-eval {first}")
    if arguments == ("--unregister",):
        gone = registering.unregister()
        click.echo(f"removed {gone}" if gone else f"nothing was registered: there is no {registering.place()}")
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise KVFoldError(MISSING)
    if arguments == ("--task-file",):
        click.echo(registering.TASK_FILE)
        return
    click.echo(f"wrote {registering.register()}: lm_eval --model kvfold works in this environment")
