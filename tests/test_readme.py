"""The README's commands are commands, its extras exist, and its Python runs."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from kvfold import methods
from kvfold.cli import cli
from kvfold.commands.terminal import spread

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("kvfold ")]
CODE = [block for language, block in BLOCKS if language == "python"]


def parsed(line):
    """The command of a line and its parameters, as click takes them."""
    words = shlex.split(line, comments=True)
    assert words[0] == "kvfold"
    context = cli.make_context("kvfold", words[1:] if words[1] == "lm-eval" else spread(words[1:]))
    group = cli
    while isinstance(group, click.Group):
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
        group = command
    return context


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: " ".join(line.partition("#")[0].split()))
def test_a_command_is_one(line):
    if "--help" in line:
        with pytest.raises(click.exceptions.Exit) as stop:
            parsed(line)
        assert stop.value.exit_code == 0
        return
    options = parsed(line).params
    for spec in (options.get("spec"), *(options.get("specs") or ())):
        if spec is not None:
            methods.get(spec)


def test_recipes_are_understood():
    shown = [line.split()[0] for line in LINES if re.match(r"\S+=\S+ +#", line)]
    assert len(shown) == 3
    for spec in shown:
        again = str(methods.get(spec))
        assert methods.get(again) == methods.get(spec)


def test_every_command_is_shown():
    shown = {shlex.split(line, comments=True)[1] for line in COMMANDS}
    assert shown >= {
        "generate",
        "chat",
        "explain",
        "methods",
        "compare",
        "domains",
        "eval",
        "report",
        "lm-eval",
        "calibrate",
        "bench",
    }


def test_a_command_that_is_none_would_be_found():
    with pytest.raises(click.UsageError):
        parsed("kvfold generate --abacus 3")


def test_extras_exist_and_are_shown():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installs = [line for line in LINES if line.startswith("pip install")]
    shown = {name for line in installs for extras in re.findall(r"\[(.*?)\]", line) for name in extras.split(",")}
    assert {"cpu", "gpu", "demo", "plot", "lm-eval", "test"} <= shown <= set(project["optional-dependencies"])
    module, _, name = project["scripts"]["kvfold"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.split()[1] for line in LINES if line.startswith("make ")]
    assert targets and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


@pytest.mark.slow
def test_its_python_runs(tmp_path, monkeypatch, capsys):
    """With the embedded model from its folder instead of the hub, and fewer tokens; what needs a GPU is only compiled."""
    from kvfold.models import embedded

    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in CODE:
        for written, here in (
            ("HuggingFaceTB/SmolLM2-135M-Instruct", str(embedded())),
            ("new_tokens=200", "new_tokens=4"),
        ):
            block = block.replace(written, here)
        code = compile(block, "README.md", "exec")
        if "kvfold.decoding" not in block:
            exec(code, names)
    assert capsys.readouterr().out.startswith("The KV cache of a transformer")
