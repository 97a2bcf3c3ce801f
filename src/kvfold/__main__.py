"""``python -m kvfold``, and the command ``kvfold``."""

import os
import signal
import sys
import time
from types import FrameType


class _Interrupt:
    """Raises KeyboardInterrupt as Python does, and remembers it: libraries make other errors of it while they are imported."""

    at = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.at = time.monotonic()
        signal.default_int_handler(number, frame)

    @property
    def came(self) -> bool:
        """Whether it came just now; a chat goes on after one, and what happens later has other reasons."""
        return time.monotonic() - self.at < 10


def main() -> int:
    """Run the command line. An interrupt is one line and status 130, at any time."""
    interrupt = _Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
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
