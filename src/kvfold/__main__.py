"""``python -m kvfold``, and the command ``kvfold``."""

import _thread
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class _Interrupt:
    """Raises KeyboardInterrupt as Python does, and remembers it: libraries make other errors of it while they are imported."""

    at = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.at = time.monotonic()
        signal.default_int_handler(number, frame)

    def lost(self, what: "UnraisableHookArgs") -> None:
        """Python drops what a destructor raises. An interrupt comes again then, when the destructor has ended."""
        if issubclass(what.exc_type, KeyboardInterrupt):
            again = threading.Timer(0.01, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            sys.__unraisablehook__(what)

    @property
    def came(self) -> bool:
        """Whether it came just now; a chat goes on after one, and what happens later has other reasons."""
        return time.monotonic() - self.at < 10


def main() -> int:
    """Run the command line. An interrupt is one line and status 130, at any time."""
    interrupt = _Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = interrupt.lost
    said = False
    try:
        from kvfold.cli import main as run

        status = run()
        said = status == 130
    except BaseException:
        if not interrupt.came:
            raise
        status = 130
    if interrupt.came and status:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if not said:
                print("\nkvfold: interrupted", file=sys.stderr)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:  # nobody listens
            pass
        os._exit(130)  # past what a library that was half imported would say at the end
    return status


if __name__ == "__main__":
    sys.exit(main())
