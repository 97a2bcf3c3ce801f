"""What is loaded when: the command's help, its version and a shell's completion need no torch, nor does ``import kvfold``."""

import os
import subprocess
import sys

import pytest

import kvfold
from kvfold import methods
from kvfold.commands import terminal

HEAVY = ("torch", "transformers", "numpy", "rich", "safetensors", "huggingface_hub", "numba")
LIMIT = 300
"""Modules that a command loads before it knows what to do: the interpreter's own, click, and a handful of ours."""

TELL = "import sys; print(); print(len(sys.modules), *(m for m in %r if m in sys.modules))" % (HEAVY,)  # noqa: UP031


def loaded(program, **environment):
    """Number of modules loaded, and the heavy ones, at the end of a program in a process of its own; and what it printed."""
    code = f"import atexit\natexit.register(lambda: exec({TELL!r}, {{}}))\n{program}"
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    *printed, last = done.stdout.splitlines()
    count, *heavy = last.split()
    return int(count), heavy, "\n".join(printed)


COMMANDS = ("generate", "chat", "explain", "methods", "compare", "domains", "eval", "calibrate", "artefact", "bench")


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], [], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_and_version_load_nothing_heavy(arguments):
    count, heavy, printed = loaded(f"from kvfold.cli import main; main({arguments!r})")
    assert heavy == [] and count < LIMIT
    assert "kvfold" in printed or not arguments


def complete(words, cword):
    return loaded(
        "from kvfold.cli import main; main([])",
        _KVFOLD_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(cword),
    )


def test_a_shell_completes_commands_options_and_methods():
    for words, cword, expected in (
        ("kvfold ", 1, {"plain,generate", "plain,compare", "plain,bench"}),
        ("kvfold generate --m", 2, {"plain,--method", "plain,--model", "plain,--max-new-tokens"}),
        ("kvfold generate --method kiv", 3, {"plain,kivi"}),
        ("kvfold compare --methods s", 3, {"plain,squat", "plain,squat_pre"}),
        ("kvfold bench ", 2, {"plain,attention"}),
    ):
        count, heavy, printed = complete(words, cword)
        assert expected <= set(printed.split()), words
        assert heavy == [] and count < LIMIT


def test_completion_knows_every_method():
    assert set(terminal.METHOD_NAMES) == set(methods.REGISTRY)


def test_importing_kvfold_loads_nothing_heavy_and_dir_lists_what_there_is():
    count, heavy, printed = loaded("import kvfold; print(*dir(kvfold)); print(kvfold.__version__)")
    assert heavy == [] and count < LIMIT
    listed, version = printed.split("\n")[:2]
    assert set(kvfold.__all__) <= set(listed.split()) and version == kvfold.__version__


def test_what_all_names_is_there():
    for name in kvfold.__all__:
        assert getattr(kvfold, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'abacus'"):
        _ = kvfold.abacus
