"""The command as a process."""

import subprocess
import sys

LOST = """
import os, signal, sys, time
from kvfold import __main__, cli

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

def work():
    Held()
    time.sleep(20)
    return 0

cli.main = work
sys.exit(__main__.main())
"""


def test_an_interrupt_within_a_destructor_is_not_lost():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nkvfold: interrupted\n")
