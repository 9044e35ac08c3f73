"""Forbids a call of io_uring to this process, as a container's seccomp profile does, and says what
kvelastic reads and writes with then.

    python forbid_io_uring.py 425 1       io_uring_setup answers EPERM
    python forbid_io_uring.py 426 38      io_uring_enter answers ENOSYS
    python forbid_io_uring.py 425 1 COMMAND ...       runs a command like that instead
"""

from __future__ import annotations

import os
import sys

from forbidden_calls import forbid

from kvelastic import _vmm
from kvelastic.errors import DeviceUnavailableError

if __name__ == "__main__":
    forbid(int(sys.argv[1]), int(sys.argv[2]))
    if command := sys.argv[3:]:
        os.execv(command[0], command)
    print(_vmm.RecordIo("auto").engine)
    try:
        _vmm.RecordIo("io_uring")
    except DeviceUnavailableError as error:
        print(error)
