"""Delays the start of each thread of a process, by up to `MOST_DELAY_S`.

Python imports this module at its start if its folder is in PYTHONPATH.
"""

from __future__ import annotations

import threading
import time
from random import random

MOST_DELAY_S = 0.2

_start = threading.Thread.start


def _start_late(thread: threading.Thread) -> None:
    run = thread.run

    def run_late() -> None:
        time.sleep(MOST_DELAY_S * random())
        run()

    thread.run = run_late  # type: ignore[method-assign]
    _start(thread)


threading.Thread.start = _start_late  # type: ignore[method-assign, assignment]
