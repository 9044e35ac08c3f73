"""Forbids a call of io_uring to this process, as a container's seccomp profile does, and says what
kvelastic reads and writes with then.

    python forbid_io_uring.py 425 1       io_uring_setup answers EPERM
    python forbid_io_uring.py 426 38      io_uring_enter answers ENOSYS
    python forbid_io_uring.py 425 1 COMMAND ...       runs a command like that instead
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from kvelastic import _vmm
from kvelastic.errors import DeviceUnavailableError

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
RETURN_ERRNO = 0x00050000
ALLOW = 0x7FFF0000


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def forbid(call: int, code: int) -> None:
    """From now on the call (by its number, the same on every architecture) fails with `code`."""
    instructions = b"".join(
        struct.pack("<HBBI", *one)
        for one in (
            (0x20, 0, 0, 0),  # load the number of the call
            (0x15, 0, 1, call),  # another one: skip
            (0x06, 0, 0, RETURN_ERRNO | code),
            (0x06, 0, 0, ALLOW),
        )
    )
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = Program(len(instructions) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid(int(sys.argv[1]), int(sys.argv[2]))
    if command := sys.argv[3:]:
        os.execv(command[0], command)
    print(_vmm.RecordIo("auto").engine)
    try:
        _vmm.RecordIo("io_uring")
    except DeviceUnavailableError as error:
        print(error)
