"""The tests' own look at /proc while other threads open and close files."""

from __future__ import annotations

import os
import threading

import pytest
from open_memfds import open_memfds

from kvelastic import _vmm

pytestmark = pytest.mark.slow


def test_files_closed_during_listing_are_ignored() -> None:
    before = open_memfds()
    driver = _vmm.HostDriver()
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for fd in [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]:
                os.close(fd)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        found = [open_memfds().keys() - before.keys() for _ in range(200)]
    finally:
        done.set()
        thread.join()
    assert all(len(new) == 1 for new in found)
    del driver
