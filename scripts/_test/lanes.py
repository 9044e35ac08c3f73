"""A lane: a pytest process with a private process table, /dev/shm and temporary folder.

with Workspace() as workspace:
    lane = workspace.start_lane("engines", ["--tier=default"])
    while lane.is_running():
        for event in lane.new_events(): ...

Linux namespaces (`unshare`) give the isolation. They also give a clean end: when the first process
of a PID namespace dies, the kernel kills all others, and the mounts go with them. A user who may
not create namespaces gets lanes without isolation: leaving the workspace then kills the processes
that carry the run's mark (tests/programs/run_end.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from run_end import Traces

PREFIX = "kvt-"
"""Prefix of temporary folders. It is short, because a Unix socket's path has at most 107 bytes."""
RESULTS = Path("build/test")
"""Events and output of each lane of the last run."""

# The shell stays the first process of the namespace and reaps orphans.
_WITH_OWN_SHM = """mount -t tmpfs -o mode=1777 tmpfs /dev/shm && "$@" """

Self = TypeVar("Self", bound="Workspace")


class Lane:
    """A pytest process. Its output goes to the file `output`."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self.output = RESULTS / f"{name}.log"
        self._events = RESULTS / f"{name}.jsonl"
        self._events.write_bytes(b"")
        self._offset = 0
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"--lane-events={self._events.resolve()}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        return self.process.poll() is None

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the last call; an incomplete last line waits for the next call."""
        with self._events.open("rb") as file:
            file.seek(self._offset)
            lines, _, _ = file.read().rpartition(b"\n")
        if lines:
            self._offset += len(lines) + 1
            yield from map(json.loads, lines.split(b"\n"))

    def kill(self) -> None:
        """Kill its processes. Safe at any time. Blocks until the first process is reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Workspace:
    """The temporary folder and the lanes of a run. Leaving the block ends both.

    A run that is itself ended by SIGKILL leaves its folder, and the next run removes it.
    """

    def __init__(self) -> None:
        _remove_abandoned_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _lock_folder(self.folder)
        self.is_isolated = _may_unshare()
        self._traces = Traces()
        self._lanes: list[Lane] = []
        shutil.rmtree(RESULTS, ignore_errors=True)
        RESULTS.mkdir(parents=True)

    def start_lane(self, name: str, pytest_arguments: Sequence[str]) -> Lane:
        temporary = self.folder / str(len(self._lanes))
        temporary.mkdir()
        command = [sys.executable, "-m", "pytest", f"--basetemp={temporary / 'p'}"]
        if self.is_isolated:
            command = [*_UNSHARE, "sh", "-c", _WITH_OWN_SHM, "sh", *command]
        environment = os.environ | {"TMPDIR": str(temporary)}
        # pytest rewrites the assertions of every test file, which takes ten seconds unless cached.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        lane = Lane(name, [*_KILLED_WITH_PARENT, *command, *pytest_arguments], environment)
        self._lanes.append(lane)
        return lane

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._lanes:
            lane.kill()
        for line in () if self.is_isolated else self._traces.left():
            print(f"left behind: {line}", file=sys.stderr)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_KILLED_WITH_PARENT = ("setpriv", "--pdeathsig=KILL") if shutil.which("setpriv") else ()


def _may_unshare() -> bool:
    command = [*_UNSHARE, "sh", "-c", _WITH_OWN_SHM, "sh", "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def _lock_folder(folder: Path) -> int:
    """Return a descriptor whose lock shows that a run uses the folder.

    Raises BlockingIOError if another run uses it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            os.close(_lock_folder(folder))
            shutil.rmtree(folder, ignore_errors=True)
