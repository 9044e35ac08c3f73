"""Calls of the system that are refused here, as a container's seccomp profile refuses them."""

from __future__ import annotations

import ctypes
import platform
import struct

PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}.get(platform.machine())
"""Its number; None: it is not known here."""

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
RETURN_ERRNO = 0x00050000
ALLOW = 0x7FFF0000


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def forbid(call: int, code: int) -> None:
    """From now on the call (by its number, that of this processor) fails with `code`."""
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
