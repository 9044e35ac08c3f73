"""Which engine reads and writes records, where io_uring is not to be had."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from processes import PROGRAMS, run_python

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError

PROGRAM = PROGRAMS / "forbid_io_uring.py"


@pytest.mark.parametrize("call", [425, 426], ids=["setup", "enter"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_forbidden_io_uring_falls_back_to_threads(call: int, code: int) -> None:
    done = run_python(PROGRAM, str(call), str(code), exit_code=None)
    if "prctl" in done.stderr:
        pytest.skip(f"no seccomp here: {done.stderr}")
    engine, why = done.stdout.splitlines()
    assert engine == "threads"
    assert "io_uring cannot be used here" in why
    assert os.strerror(code) in why


def test_invalid_io_engines_and_depths_are_rejected() -> None:
    for arguments in (("magic", 8), ("threads", 0), ("threads", 257)):
        with pytest.raises(InvalidArgumentError):
            _vmm.RecordIo(*arguments)
    assert _vmm.RecordIo("threads", 3).depth == 3


def test_read_into_a_read_only_buffer_is_rejected(tmp_path: Path) -> None:
    io = _vmm.RecordIo("threads")
    with (tmp_path / "file").open("w+b") as file:
        with pytest.raises(BufferError):
            io.read([(file.fileno(), 0)], [b"abc"], bytes(16))
        assert io.read([(file.fileno(), 0)], [bytearray(3)], bytes(16))[0][0] == 0
        assert io.read([(-1, 0)], [bytearray(3)], bytes(16)) == [(-errno.EBADF, 0)]
