"""Files that results go to. Everything the package writes goes through :func:`write` or :func:`append`.

A regular file is replaced in one step, so that readers see the old one or the new one and never half of it, and a symbolic link
stays one: what it points to is replaced. What is no regular file (a device, a FIFO, ``/dev/stdout``) is written through.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvfold.errors import KVFoldError

Content = str | bytes | Callable[[Path], object]
"""Text (written as UTF-8), bytes, or what writes a file of a given name."""
_streams: dict[Path, IO[bytes]] = {}


def expanded(given: str | os.PathLike[str]) -> Path:
    """The path that a user means, with ``~`` and ``~user`` as a shell takes them: what is in nobody's home stays as it is."""
    return Path(os.path.expanduser(given))


def home() -> Path:
    """Folder of what kvfold keeps: ``$KVFOLD_HOME``, or ``~/.cache/kvfold``.

    Raises
    ------
    KVFoldError
        It is in nobody's home.
    """
    given = expanded(os.environ.get("KVFOLD_HOME") or "~/.cache/kvfold")
    if given.parts[0].startswith("~"):
        raise KVFoldError(f"KVFOLD_HOME: {given} is in nobody's home; set it to a folder for converted models")
    return given


def is_stream(path: Path) -> bool:
    """Whether writing goes through to a reader or a device, so that nothing can lie beside it or be read back."""
    if _descriptor(path) is not None:
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # not there yet
        return False


def check(path: Path, field: str, kind: str = "", begins: tuple[str, ...] = ()) -> None:
    """Fail before the work, not after it, when a result could not be written.

    Parameters
    ----------
    field
        The option that named the file; errors begin with it.
    kind, begins
        What a file may hold that is replaced, for errors, and what such a file begins with. An empty one may be replaced.

    Raises
    ------
    KVFoldError
        It is a folder, a disk or write-protected, its folder is missing or cannot be written, its name is too long, or it
        holds something else.
    """
    try:
        _check(path, field)
        if begins and not is_stream(path) and path.is_file():
            with path.open("rb") as file:
                head = file.read(256).lstrip()
            if head and not head.startswith(tuple(text.encode() for text in begins)):
                raise KVFoldError(f"{field}: {path} exists and is not {kind}; give another name, or remove it")
    except OSError as error:
        raise KVFoldError(f"{field}: cannot write {path}: {error.strerror}") from error


def _check(path: Path, field: str) -> None:
    if path == Path():
        raise KVFoldError(f"{field}: {str(path)!r} names no file; give a file name")
    if (own := _descriptor(path)) is not None:
        import fcntl  # where there are descriptors by name

        if fcntl.fcntl(own, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise KVFoldError(f"{field}: {path} is not open for writing")
        return
    target = Path(os.path.realpath(path))
    try:
        kind = os.stat(target).st_mode
    except FileNotFoundError:
        kind = None
    if kind is not None and stat.S_ISDIR(kind):
        raise KVFoldError(f"{field}: {path} is a folder; give a file name")
    if kind is not None and (stat.S_ISBLK(kind) or stat.S_ISSOCK(kind)):
        raise KVFoldError(f"{field}: {path} is a {'disk' if stat.S_ISBLK(kind) else 'socket'}; give a file name")
    if kind is not None and not os.access(target, os.W_OK):
        raise KVFoldError(f"{field}: {path} is write-protected")
    if kind is not None and not stat.S_ISREG(kind):
        return
    if not target.parent.is_dir():
        raise KVFoldError(f"{field}: there is no folder {target.parent}")
    if hasattr(os, "pathconf") and len(os.fsencode(target.name)) > os.pathconf(target.parent, "PC_NAME_MAX"):
        raise KVFoldError(f"{field}: the name {target.name[:40]}... is too long")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise KVFoldError(f"{field}: cannot write in {target.parent}: {error.strerror}") from error


def write(path: Path, content: Content) -> None:
    """Write a file; see the module.

    Raises
    ------
    OSError
        It cannot be written. A regular file is then as it was.
    """
    if is_stream(path):
        _through(path, content)
        return
    target = Path(os.path.realpath(path))
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask  # mkstemp makes private files; a result is an ordinary one
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".kvfold-")
    try:
        with os.fdopen(descriptor, "r+b") as file:
            if callable(content):
                content(Path(name))  # may put another file in the place of this one
            else:
                file.write(_bytes(content))
                file.flush()
                os.fsync(file.fileno())  # a full disk may show only now
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def append(path: Path, text: str) -> None:
    """Add whole lines at the end of a file, or none of them; an interrupt leaves those that are there.

    A line that a killed process left without an end gets one first. A FIFO stays open until the process ends: its reader would
    take the first end for the last.

    Raises
    ------
    OSError
        It cannot be written. A regular file is then as it was.
    """
    if is_stream(path):
        if _descriptor(path) is not None:
            _through(path, text)
            return
        if path not in _streams:
            _streams[path] = open(path, "wb", buffering=0)
        _streams[path].write(text.encode())
        return
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            text = text if file.read(1) == b"\n" else "\n" + text
        lines = text.encode()
        try:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        except BaseException as error:
            with contextlib.suppress(OSError):  # what is still in the buffer
                file.close()
            # Lines that an interrupt finds whole were made: only how soon they reach the disk is open.
            if isinstance(error, Exception) or os.stat(path).st_size != size + len(lines):
                os.truncate(path, size)
            raise


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _through(path: Path, content: Content) -> None:
    own = _descriptor(path)
    for stream in (sys.stdout, sys.stderr):  # in the order of what was printed
        if stream is not None and own in (1, 2):
            stream.flush()
    with contextlib.ExitStack() as stack:
        # opening the name of a descriptor again would cut its file off
        file = stack.enter_context(open(path, "wb") if own is None else os.fdopen(os.dup(own), "wb"))
        if not callable(content):
            file.write(_bytes(content))
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        content(Path(folder) / "content")
        with (Path(folder) / "content").open("rb") as made:
            shutil.copyfileobj(made, file)


def _descriptor(path: Path) -> int | None:
    """The open descriptor of this process that a path names (``/dev/stdout``, ``/dev/fd/3``), or None."""
    name = os.path.abspath(path)
    for _ in range(40):  # as many links as the system follows
        folder, last = os.path.split(name)
        found = re.fullmatch(r"/proc/(\d+)/fd|/dev/fd", os.path.realpath(folder))
        if found and last.isdigit():
            return int(last) if found[1] in (None, str(os.getpid())) else None
        if not os.path.islink(name):
            break
        name = os.path.join(folder, os.readlink(name))
    return None
