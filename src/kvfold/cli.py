"""The command line: parses, calls, prints. Wrong input exits with status 2 and one line, an interrupt with 130."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

import click

import kvfold
from kvfold import outlet
from kvfold.commands.ablate import ablate
from kvfold.commands.artefact import artefact_group
from kvfold.commands.bench import bench
from kvfold.commands.calibrate import calibrate
from kvfold.commands.chat import chat
from kvfold.commands.compare import compare
from kvfold.commands.domains import domains
from kvfold.commands.eval import evaluate
from kvfold.commands.explain import explain
from kvfold.commands.generate import generate
from kvfold.commands.lm_eval import OWN, lm_eval
from kvfold.commands.methods import list_methods
from kvfold.commands.plan import plan
from kvfold.commands.recommend import recommend
from kvfold.commands.report import report
from kvfold.commands.terminal import spread
from kvfold.errors import KVFoldError, OutputError
from kvfold.threads import note, settle

COMPUTE = ("ablate", "calibrate", "chat", "compare", "domains", "eval", "generate", "lm-eval", "recommend")
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
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = given if given[:1] == ["lm-eval"] else spread(given)  # whose flags are its own
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
        command = " ".join(["kvfold", *(name for name in arguments[:1] if name in cli.commands)])
        if isinstance(error, click.UsageError) and error.ctx:  # an option without its value has none
            command = error.ctx.command_path
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
    """Have threads wait without spinning, in commands that compute, unless torch is there already; it is said later."""
    if (
        not arguments
        or arguments[0] not in COMPUTE
        or {"-h", "--help", *OWN} & set(arguments)
        or "torch" in sys.modules
    ):
        return
    if said := settle(os.environ):
        note(said)


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


for _command in (
    generate,
    explain,
    plan,
    list_methods,
    chat,
    compare,
    domains,
    evaluate,
    ablate,
    recommend,
    report,
    lm_eval,
    calibrate,
    artefact_group,
    bench,
):
    cli.add_command(_command)
