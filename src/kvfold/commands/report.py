"""The command ``kvfold report``."""

from __future__ import annotations

import click

from kvfold import files
from kvfold.commands.terminal import complete_method
from kvfold.errors import OutputError


@click.command("report", short_help="One page of tables and plots of what was evaluated.")
@click.argument("results", metavar="RESULTS ...", nargs=-1, required=True)
@click.option("--out", metavar="FILE", default="report.html", show_default=True, help="Page to write.")
@click.option(
    "--baseline",
    "baselines",
    metavar="METHOD",
    multiple=True,
    shell_complete=complete_method,
    help="Methods that the others are compared with, where a file has them; may be given again.  [default: none fold]",
)
def report(results: tuple[str, ...], out: str, baselines: tuple[str, ...]) -> None:
    """Make one page, for any browser and without a network, of rows that kvfold eval, compare and domains wrote.

    RESULTS are folders and files. Tables have effective bits, windows and intervals; plots show quality by bits, by decode time
    and by position, and needles by depth and length. Rows of different settings lie in different sections and are not
    compared.
    """
    target = files.expanded(out)
    files.check(target, "out", "a page", ("<!DOCTYPE html>",))
    from kvfold import methods
    from kvfold.evaluation.report import BASELINES
    from kvfold.evaluation.report import report as page

    against = [str(methods.get(name)) for name in baselines] or BASELINES
    text = page([files.expanded(name) for name in results], against)
    try:
        files.write(target, text)
    except OSError as error:
        raise OutputError(f"out: cannot write {target}: {error.strerror or error}", None) from error
    click.echo(f"written: {target}")
