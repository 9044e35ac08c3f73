"""Ends a launched program and all its processes: SIGTERM first, then wait, then SIGKILL.

An engine's helper processes clean up after it. For example, Python's resource tracker removes the
engine's shared memory after the engine has ended. Killing the group together with its leader would
leak that memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from kvelastic.controller.timeout import timeout
from kvelastic.shared.liveness import ProcessIdentity, start_time_ticks

_LOOK_EVERY_S: Final = 0.02
_AFTER_LEADER_S: Final = 2.0
"""Minimum time that the other processes have after their leader has ended."""
_AFTER_KILL_S: Final = 5.0
"""The kernel may need seconds to free a large process."""
_STATE_FIELD, _GROUP_FIELD = 0, 2
"""Field indexes in /proc/PID/stat, counted after the name (proc_pid_stat(5))."""


class Leader(Protocol):
    """The interface of a group's first process. `asyncio.subprocess.Process` implements it."""

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its group."""

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""

    def send_signal(self, signal: int) -> None:
        """Send a signal. Raises `ProcessLookupError` if the process has ended."""

    async def wait(self) -> object:
        """Wait until the process has ended."""


class ForeignProcess:
    """A process that is not a child: it can be waited for and signalled safely.

    Construct it in the event loop. Raises `ProcessLookupError` if the process has ended.
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        self.pid = identity.pid
        self.returncode: int | None = None
        """None while it runs, then 0: only its parent receives the exit code."""
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(identity.pid)
        if start_time_ticks(identity.pid) != identity.start_time_ticks:
            os.close(self._fd)
            raise ProcessLookupError(f"process {identity.pid} has ended")
        asyncio.get_running_loop().add_reader(self._fd, self._on_end)

    def send_signal(self, number: int) -> None:
        """Send a signal. It never reaches another process, even if the process id was reused."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._fd, number)

    async def wait(self) -> object:
        """Wait until the process has ended; return 0."""
        await self._ended.wait()
        return self.returncode

    def _on_end(self) -> None:
        self.returncode = 0
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._ended.set()


async def end_group(leader: Leader, stop_timeout_s: float) -> None:
    """End the process group of `leader`; return when none of its processes runs.

    The leader gets SIGTERM and ends its own processes. After it has ended, the rest of the group
    gets SIGTERM. After `stop_timeout_s` seconds the group gets SIGKILL. Call it in the loop that
    started the leader.
    """
    end_s = time.monotonic() + stop_timeout_s
    if leader.returncode is None:
        with suppress(ProcessLookupError):
            leader.send_signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            async with timeout(stop_timeout_s):
                await leader.wait()
    if leader.returncode is not None:
        _signal_group(leader.pid, signal.SIGTERM)
        end_s = max(end_s, time.monotonic() + _AFTER_LEADER_S)
        while time.monotonic() < end_s and _group_runs(leader.pid):
            await asyncio.sleep(_LOOK_EVERY_S)
    _signal_group(leader.pid, signal.SIGKILL)
    await leader.wait()


def running_in_group(group: int) -> Iterator[int]:
    """Yield the ids of the group's processes that run. Zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_bytes().rpartition(b")")[2].split()
            if int(fields[_GROUP_FIELD]) == group and fields[_STATE_FIELD] not in {b"Z", b"X"}:
                yield int(stat.parent.name)


async def end_processes(
    first: ProcessIdentity | None, others: Iterable[ProcessIdentity], stop_timeout_s: float
) -> None:
    """End processes that are not children; return when none runs, or soon after SIGKILL.

    The order is that of `end_group`: SIGTERM to the first, then to the others, then SIGKILL.
    """
    leaders = _open([] if first is None else [first])
    rest = _open(others)
    end_s = time.monotonic() + stop_timeout_s
    for processes in (leaders, rest):
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await _wait(processes, max(0.0, end_s - time.monotonic()))
        end_s = max(end_s, time.monotonic() + _AFTER_LEADER_S)
    for process in (*leaders, *rest):
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    await _wait([*leaders, *rest], _AFTER_KILL_S)


def _open(identities: Iterable[ProcessIdentity]) -> list[ForeignProcess]:
    found = []
    for identity in identities:
        with suppress(ProcessLookupError):
            found.append(ForeignProcess(identity))
    return found


async def _wait(processes: list[ForeignProcess], timeout_s: float | None) -> None:
    if processes:
        waits = [asyncio.ensure_future(process.wait()) for process in processes]
        _, left = await asyncio.wait(waits, timeout=timeout_s)
        for wait in left:
            wait.cancel()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_runs(group: int) -> bool:
    """Return True if a process of the group runs. Zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(running_in_group(group))
