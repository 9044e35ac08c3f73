"""Runs an engine for a replica, and ends it when the replica's process has ended.

    python -m kvelastic.integration.ray.launcher PARENT_PID COMMAND [ARGUMENT ...]

A replica starts this program instead of the engine, for two reasons. A killed replica cannot end
its engine, but this program waits for the end of its parent. And a Ray process must not run Python
between fork and exec (gRPC's threads hold locks), but this program may.

    parent has ended         ->  SIGTERM to the engine, then the rest of the process group ends
    SIGTERM                  ->  SIGTERM to the engine; the parent ends the rest
    the engine has ended     ->  this program ends with the engine's exit code
    this program is killed   ->  the kernel sends the engine SIGTERM

The engine's environment has no Ray variables: an engine that uses Ray would join the replica's job.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

from kvelastic.controller.launch.process_group import running_in_group

END_S: Final = 15.0
"""Time for an engine to end after its replica."""
_REST_S: Final = 3.0
"""Time for an engine's helpers to end afterwards; they remove its shared memory."""
_LOOK_EVERY_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_SIGNAL_CODE: Final = 128
"""A shell's exit code for a program killed by a signal, minus the signal's number."""


def main(parent: int, command: list[str]) -> int:
    """Run the command until it or the parent has ended; return its exit code. Blocks."""
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    replica = os.pidfd_open(parent)
    if os.getppid() != parent:  # it ended before the pidfd was opened
        return 1
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    try:
        engine = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=_end_with_launcher,  # noqa: PLW1509 - this program has one thread
        )
    except OSError as error:
        print(f"{command[0]!r} cannot be run: {error.strerror}", file=sys.stderr)
        return _SIGNAL_CODE - 1
    ended = os.pidfd_open(engine.pid)
    waiting = select.poll()
    for fd in (replica, signals, ended):
        waiting.register(fd, select.POLLIN)
    events = {fd for fd, _ in waiting.poll()}
    if ended not in events:
        engine.terminate()
        if replica not in events:
            waiting.unregister(signals)
            events = {fd for fd, _ in waiting.poll()}
    if replica in events:
        with suppress(subprocess.TimeoutExpired):
            engine.wait(END_S)
        _end_group()
    code = engine.wait()
    return code if code >= 0 else _SIGNAL_CODE - code


def _end_with_launcher() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group() -> None:
    """End this process's group including itself, if it is the group's leader."""
    group = os.getpid()
    if os.getpgrp() != group:
        return
    os.killpg(0, signal.SIGTERM)
    end_s = time.monotonic() + _REST_S
    while any(pid != group for pid in running_in_group(group)) and time.monotonic() < end_s:
        time.sleep(_LOOK_EVERY_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
