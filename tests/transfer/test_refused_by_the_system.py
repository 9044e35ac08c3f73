"""Copies in a process to which the system refuses process_vm_readv, as in some containers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from linked import Memory, address_of

from kvelastic.transfer import Node

NUMBERS = {"x86_64": 310, "aarch64": 270}
"""Of process_vm_readv, by processor."""

READER = """
import ctypes, errno, os, sys
from linked import Memory
from kvelastic.messages import parse_address
from kvelastic.transfer import Node

class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
                ("k", ctypes.c_uint32)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]

number = int(sys.argv[2])
load, jump_if_equal, answer = 0x20, 0x15, 0x06
filter = (Instruction * 4)(
    Instruction(load, 0, 0, 0),
    Instruction(jump_if_equal, 1, 0, number),
    Instruction(answer, 0, 0, 0x7FFF0000),
    Instruction(answer, 0, 0, 0x00050000 | errno.EPERM),
)
libc = ctypes.CDLL(None, use_errno=True)
program = Program(4, filter)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(program)) == 0  # PR_SET_SECCOMP

theirs, size = int(sys.argv[3]), int(sys.argv[4])
ours = Memory(bytes(size))
with Node(2) as node:  # its threads are made under the filter
    link = node.link(parse_address(sys.argv[1]), timeout_s=60)
    link.pull([(theirs, size)], [ours.piece()], timeout_s=60)
    assert not link.reads_memory
    ours.buffer[:] = ours.content[::-1]
    link.push([ours.piece()], [(theirs, size)], timeout_s=60)
"""


@pytest.mark.skipif(platform.machine() not in NUMBERS, reason="its number is not known here")
def test_bytes_travel_over_a_stream_where_process_vm_readv_is_refused(tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 3)
    theirs = Memory(content)
    with Node(1, listen=[address_of("unix", tmp_path)]) as owner:
        owner.register(theirs.address, theirs.size)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                READER,
                str(owner.addresses[0]),
                str(NUMBERS[platform.machine()]),
                str(theirs.address),
                str(theirs.size),
            ],
            cwd=Path(__file__).parent,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert theirs.content == content[::-1]
