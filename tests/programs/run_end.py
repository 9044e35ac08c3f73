"""What a run of the tests leaves behind: processes, and files in shared memory.

    traces = Traces()    # before the first test: marks the environment, and so that of all children
    traces.look()        # now and then: remembers which new files its processes use
    traces.left()        # at the end: what is still there, a line each

Others run programs on the same machine. A process is the run's own where it has the run's mark in
its environment, or descends from this process. A file is the run's own where kvelastic's name is on
it and no living process of others uses it, or where one of the run's processes was seen to use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

MARK = "TEST_RUN_OF_KVELASTIC"
SHM = Path("/dev/shm")
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Modules of Python's own processes, which end with the process that has started them."""
ENDING_S = 120.0
"""How long what was told to end may take for it."""

_OURS_BY_NAME = re.compile(r"\.?kvelastic[_-].*")
_USED = re.compile(r"/dev/shm/([^\n]+)")
_MAPPED_SEMAPHORE = re.compile(r" ([0-9a-f]+):([0-9a-f]+) (\d+) +/dev/shm/sem\.")
_seen_in_use: set[str] = set()


def note_files_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Remember the files of shared memory that these use, as the run's own; answers their names."""
    names = {name for process in processes for name in _names_used_by(process.pid)}
    _seen_in_use.update(names)
    return names


def semaphores_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Files of Python's named semaphores that these have mapped, by their inodes: who has made one
    maps it under a name that it had before, and `/proc/PID/maps` calls that deleted.
    """
    mapped: set[tuple[int, int]] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            for major, minor, inode in _MAPPED_SEMAPHORE.findall(text):
                mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    found = set()
    for path in SHM.glob("sem.*"):
        with contextlib.suppress(OSError):
            state = path.stat(follow_symlinks=False)
            if (state.st_dev, state.st_ino) in mapped:
                found.add(path.name)
    return found


def _names_used_by(pid: int) -> set[str]:
    """Mapped or open. None for a process that has ended, or that is another user's."""
    used: set[str] = set()
    with contextlib.suppress(OSError):
        used |= set(_USED.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                used |= set(_USED.findall(str(fd.readlink())))
    return {name for name in used if not name.endswith(" (deleted)")}


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _files() -> set[str]:
    return {path.name for path in SHM.iterdir()}


class Traces:
    """Of one run. Runs may be nested: what the inner one leaves is the outer one's, too."""

    def __init__(self) -> None:
        self._before = _files()
        self._looked_at: set[str] = set()
        own = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._mark = f"{os.environ[MARK]}/{own}" if MARK in os.environ else own
        os.environ[MARK] = self._mark
        # What sets its title writes it over its environment, unless told not to.
        os.environ["SPT_NOENV"] = "1"

    def look(self) -> None:
        """See which of the new files processes of the run use. Cheap: looks once at each."""
        new = _files() - self._before - self._looked_at
        if new:
            self._looked_at |= new
            note_files_of(self.processes())

    def processes(self) -> list[psutil.Process]:
        """The run's own, without this one, zombies, and Python's helpers that end with this one."""
        own = psutil.Process()
        found = {child.pid for child in own.children(recursive=True)}
        found |= {pid for pid in _pids() if self._is_marked(pid)}
        processes = []
        for pid in found - {own.pid}:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                is_helper = process.ppid() == own.pid and any(
                    helper in word for word in process.cmdline() for helper in HELPERS
                )
                if not is_helper and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def _is_marked(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        mark = f"{MARK}={self._mark}".encode()
        return any(one == mark or one.startswith(mark + b"/") for one in environment)

    def files(self) -> list[str]:
        """New ones of the run's own."""
        new = _files() - self._before
        if not new:
            return []
        ours = {process.pid for process in self.processes()} | {os.getpid()}
        others = {name for pid in _pids() if pid not in ours for name in _names_used_by(pid)}
        return sorted(
            name
            for name in new - others
            if name in _seen_in_use
            or (_OURS_BY_NAME.fullmatch(name) and self._is_of_this_user(name))
        )

    @staticmethod
    def _is_of_this_user(name: str) -> bool:
        try:
            return (SHM / name).stat(follow_symlinks=False).st_uid == os.geteuid()
        except OSError:
            return False

    def left(self) -> list[str]:
        """What is left, for people. Waits a moment for what is about to end, and kills the rest."""
        deadline = time.monotonic() + ENDING_S
        while (processes := self.processes()) and time.monotonic() < deadline:
            psutil.wait_procs(processes, timeout=0.1)
        told = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                told.append(f"process {process.pid}, now killed: {' '.join(process.cmdline())}")
                process.kill()
        return told + [f"file {SHM / name}" for name in self.files()]
