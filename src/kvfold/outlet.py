"""Standard output and error as they are: terminals without the letters, full disks, closed pipes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvfold.errors import OutputError


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    r"""Within, letters that standard output or error cannot show are printed as escapes (``\xe9``); one that was closed takes
    what is printed nowhere."""
    changed = []
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            with contextlib.suppress(OSError):  # what is still in its buffer cannot be written
                before = stream.errors
                stream.reconfigure(errors="backslashreplace")
                changed.append((stream, before))
    try:
        yield
    finally:
        for stream, before in changed:
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors=before)
        for name in closed:
            getattr(sys, name).close()
            setattr(sys, name, None)


def as_json(value: Any, encoding: str | None = "utf-8") -> str:
    """A result as JSON: in its own letters where the encoding has all of them, else with escapes, which mean the same."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=2, allow_nan=False)
    return text


def publish(
    value: Any,
    show: Callable[[], None],
    write: Callable[[], None] | None = None,
    written: Path | None = None,
    failure: OutputError | None = None,
) -> None:
    """Write a result and print it, so that neither is lost with the other.

    Parameters
    ----------
    value
        The result, for JSON.
    show
        Prints it.
    write
        Writes it, before it is printed; None: that was done, or nobody asked for it.
    written
        The file that ``write`` writes, or that holds the result already.
    failure
        Why it could not be written.

    Raises
    ------
    OutputError
        It could not be written, but is printed, or standard output cannot be written. Where no file holds the result then, it
        has gone to standard error as JSON.
    OSError
        Standard output is a closed pipe.
    """
    if write is not None:
        try:
            write()
        except OutputError as error:
            failure = error
    try:
        show()
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise (failure or error) from None
        where = f"is in {written}"
        if written is None or failure is not None:
            where = "is above"
            print(as_json(value, sys.stderr.encoding), file=sys.stderr)
        raise OutputError(f"standard output: {error.strerror or error}; the result {where}") from error
    if failure is not None:
        raise failure


def finish() -> OSError | None:
    """Write out what is buffered; where that fails, drop it, so that the interpreter's end does not fail as well."""
    failed = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                failed = error
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    return failed
