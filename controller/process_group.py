"""How a launched program and all its processes are ended: asked first, and waited for.

An engine's own helpers tidy up after it: Python's resource tracker, for one, removes the engine's
shared memory once the engine has gone. Whoever kills the group together with its leader leaves
that memory behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import Process
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOOK_EVERY_S: Final = 0.02
_AFTER_LEADER_S: Final = 2.0
"""At least so long the others have after their leader has gone."""
_STATE_FIELD, _GROUP_FIELD = 0, 2
"""In /proc/PID/stat, counted after the name (proc_pid_stat(5))."""


async def end_group(leader: Process, stop_timeout_s: float) -> None:
    """End the process group that `leader` began; returns when none of it runs any more.

    SIGTERM to the leader, which ends its own processes; once it has gone, SIGTERM to those that
    are left; SIGKILL to what there is after `stop_timeout_s` seconds. Call it in the loop that
    started the leader.
    """
    end_s = time.monotonic() + stop_timeout_s
    if leader.returncode is None:
        with suppress(ProcessLookupError):
            leader.send_signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(leader.wait(), stop_timeout_s)
    if leader.returncode is not None:
        _signal_group(leader.pid, signal.SIGTERM)
        end_s = max(end_s, time.monotonic() + _AFTER_LEADER_S)
        while time.monotonic() < end_s and _group_runs(leader.pid):
            await asyncio.sleep(_LOOK_EVERY_S)
    _signal_group(leader.pid, signal.SIGKILL)
    await leader.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_runs(group: int) -> bool:
    """Whether a process of the group runs; one that has ended and waits to be reaped does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_bytes().rpartition(b")")[2].split()
            if int(fields[_GROUP_FIELD]) == group and fields[_STATE_FIELD] not in {b"Z", b"X"}:
                return True
    return False
