"""Runs a command that dies with whoever has started it, however that dies.

    python tests/fakes/mortal.py COMMAND [ARGUMENT ...]

The kernel sees to it, so it holds for programs that are stopped and for parents that are killed.
The parent is a thread: start it in one that lives as long as the command is to.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("its parent has ended")


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
