"""Copies in a process to which the system refuses process_vm_readv, as in some containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forbidden_calls import PROCESS_VM_READV
from linked import Memory, address_of
from processes import PROGRAMS, run_python

from kvelastic.transfer import Node

pytestmark = pytest.mark.slow


READER = """
import errno, os, sys
sys.path[:0] = [sys.argv[1], "."]
from forbidden_calls import PROCESS_VM_READV, forbid
from linked import Memory
from kvelastic.messages import parse_address
from kvelastic.transfer import Node

forbid(PROCESS_VM_READV, errno.EPERM)
theirs, size = int(sys.argv[3]), int(sys.argv[4])
ours = Memory(bytes(size))
with Node(2) as node:  # its threads are made under the filter
    link = node.link(parse_address(sys.argv[2]), timeout_s=300)
    link.pull([(theirs, size)], [ours.piece()], timeout_s=300)
    assert not link.reads_memory
    ours.buffer[:] = ours.content[::-1]
    link.push([ours.piece()], [(theirs, size)], timeout_s=300)
"""


@pytest.mark.skipif(PROCESS_VM_READV is None, reason="its number is not known here")
def test_refused_process_vm_readv_falls_back_to_stream(tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 3)
    theirs = Memory(content)
    with Node(1, listen=[address_of("unix", tmp_path)]) as owner:
        owner.register(theirs.address, theirs.size)
        run_python(
            "-c",
            READER,
            PROGRAMS,
            str(owner.addresses[0]),
            str(theirs.address),
            str(theirs.size),
            folder=Path(__file__).parent,
        )
    assert theirs.content == content[::-1]
