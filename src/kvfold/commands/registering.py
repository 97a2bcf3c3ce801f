"""lm-eval's own command finds the model kvfold: for good in an environment, or for one run by a task file.

lm-eval looks for models in its own package and asks nobody else. A ``.pth`` file is what Python offers: its line runs whenever
the environment's Python starts. Ours imports nothing. It waits for ``lm_eval.models`` to be imported and names the class then.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from kvfold import files
from kvfold.errors import KVFoldError, OutputError

NAME = "kvfold-lm-eval.pth"
TASK_FILE = Path(__file__).parents[1] / "evaluation" / "lm_eval.yaml"
"""A group without tasks. lm-eval imports what it names before it looks for the model."""
HOOK = '''
"""kvfold as a model of lm-eval; kvfold lm-eval --unregister removes this file."""
import sys

class KVFoldInLMEval:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "lm_eval.models":
            try:
                from lm_eval.api.registry import model_registry
            except ImportError:
                return None
            if "kvfold" not in model_registry:
                model_registry.register("kvfold", target="kvfold.evaluation.harness:KVFoldLM")
        return None

sys.meta_path.insert(0, KVFoldInLMEval)
'''
"""Finds no module, ever; that it is asked for lm-eval's models is the moment to register one more, by its name alone."""
CHECK = "import sys, lm_eval.models; from lm_eval.api.registry import model_registry; sys.exit('kvfold' not in model_registry)"


def place() -> Path:
    """The file in this Python's environment."""
    return Path(sysconfig.get_path("purelib")) / NAME


def register() -> Path:
    """Make ``lm_eval --model kvfold`` work in this environment, and see that it does.

    Raises
    ------
    KVFoldError
        This lm-eval does not take the model; nothing is left behind.
    OutputError
        The environment cannot be written.
    """
    target = place()
    try:
        files.write(target, f"import sys; exec({HOOK!r})\n")
    except OSError as error:
        raise OutputError(f"register: cannot write {target}: {error.strerror}; {_without()}") from error
    asked = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    if asked.returncode:
        target.unlink(missing_ok=True)
        why = (asked.stderr.strip().splitlines() or ["it does not know it afterwards"])[-1]
        raise KVFoldError(f"register: lm-eval {version('lm_eval')} did not take the model ({why}); {_without()}")
    return target


def unregister() -> Path | None:
    """Take it back; None where nothing was registered.

    Raises
    ------
    OutputError
        The environment cannot be written.
    """
    target = place()
    try:
        target.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"unregister: cannot remove {target}: {error.strerror}") from error
    return target


def _without() -> str:
    return '`kvfold lm-eval` and `--tasks "$(kvfold lm-eval --task-file)" ...` need no registration'
