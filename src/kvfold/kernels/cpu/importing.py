"""Whether Numba, where it is installed, serves. Plans do not import it: what is in a process decides what else can be loaded
there."""

import os
import subprocess
import sys

from kvfold.errors import KVFoldError

PATIENCE = 60
"""Seconds that another process may take to import it."""
TRY = """
import sys
sys.path[:] = {path!r}
try:
    import llvmlite.binding, numba.extending
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", end="")
"""


class NumbaError(KVFoldError):
    """Numba is there and does not serve."""


class Known:
    """What this process knows of Numba.

    Attributes
    ----------
    failed : str or None
        What its import said.
    tried : bool
        Another process has imported it.
    """

    failed: str | None = None
    tried = False


known = Known()


def why_not() -> str | None:
    """Why nothing can be compiled for this CPU, as far as that is known without importing Numba; None if it may be."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return f"NUMBA_DISABLE_JIT={os.environ['NUMBA_DISABLE_JIT']}: numba compiles nothing"
    return f"numba is installed and cannot be imported ({known.failed})" if known.failed else None


def failure(error: Exception) -> NumbaError:
    """Note that Numba could not be imported here, which :func:`why_not` says from now on."""
    known.failed = f"{type(error).__name__}: {error}"
    return NumbaError(f"kernel: cpu needs Numba, which cannot be imported ({known.failed}); allowed: reference")


def try_elsewhere() -> None:
    """Have another process import Numba, unless this one has, so that :func:`why_not` knows. It takes a second, once."""
    if known.tried or known.failed or "numba" in sys.modules or not sys.executable:
        return
    known.tried = True
    command = [sys.executable, "-c", TRY.format(path=sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return  # nothing is known
    if done.returncode == 0 and done.stdout:
        known.failed = done.stdout
