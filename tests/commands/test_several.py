"""Options that take several values, one after the other."""

import click

from kvfold.cli import cli
from kvfold.commands import terminal


def test_what_is_said_to_take_several_values_takes_them():
    """An option of several values, ``N ...`` in the help, is one that ``spread`` knows, or its command does."""
    missing = [
        f"{name} {option.opts[0]}"
        for name, command in cli.commands.items()
        if not isinstance(command, terminal.SeveralTexts)
        for option in command.params
        if isinstance(option, click.Option) and option.multiple and option.metavar.endswith(" ...")
        if option.opts[0] not in terminal.LISTS
    ]
    assert not missing
