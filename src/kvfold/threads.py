"""How a command's threads wait for each other, decided before torch's OpenMP runtime is loaded.

By default a thread that is done with its part spins for milliseconds until the others are. On a machine with a busy neighbour
the others wait for a core meanwhile, perhaps for the one that is spun on, and everything takes ten times as long and more.
docs/lessons.md has the measurements. A library does not decide this for a whole process: only the command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

SPINS = 1000
"""Turns of a waiting thread before it sleeps: microseconds, as libgomp has it where there are more threads than cores."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Who sets one of these has decided."""

_unsaid: list[str] = []
"""What was set and is said once the work begins: wrong input is answered by its error alone."""


def note(said: str) -> None:
    """Keep a line for :func:`tell`."""
    _unsaid[:] = [said]


def tell() -> None:
    """Say on standard error, once, what was set; where work begins."""
    while _unsaid:
        print(f"kvfold: {_unsaid.pop()}", file=sys.stderr)


def settle(environment: MutableMapping[str, str]) -> str | None:
    """Set what OpenMP runtimes read when they are loaded, unless the user has.

    Waiting threads soon sleep (of GNU's and LLVM's runtime). Where a container may use fewer cores than the process sees, there
    are as many threads as cores that may be used.

    Parameters
    ----------
    environment
        Of the process; changed.

    Returns
    -------
    str or None
        What was set and how to have it otherwise, in one line; None if nothing was.
    """
    done: dict[str, str] = {}
    if not any(name in environment for name in WAITING):
        done |= {"GOMP_SPINCOUNT": str(SPINS), "KMP_BLOCKTIME": "0"}
    allowed = quota()
    if "OMP_NUM_THREADS" not in environment and allowed is not None and allowed < cores():
        done["OMP_NUM_THREADS"] = str(allowed)
    if not done:
        return None
    environment.update(done)
    parts = []
    if "GOMP_SPINCOUNT" in done:
        parts.append(f"threads sleep while they wait, for busy neighbours' sake (GOMP_SPINCOUNT={SPINS})")
    if "OMP_NUM_THREADS" in done:
        parts.append(f"as many as the container may use cores (OMP_NUM_THREADS={allowed})")
    return f"{', '.join(parts)}; set the variable to have it otherwise"


def cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Cores' worth of time that the control group allows, rounded up; None if it sets no limit."""
    for allowed, period in ((root / "cpu.max", None), (root / "cpu/cpu.cfs_quota_us", root / "cpu/cpu.cfs_period_us")):
        try:
            words = allowed.read_text().split() + (period.read_text().split() if period else [])
            share, length = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # no such group, or "max"
            continue
        if share > 0 and length > 0:
            return max(1, -(-share // length))
    return None
