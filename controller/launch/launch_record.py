"""Finds the engines that controllers of this user have launched, including dead controllers.

    write(record)                    # when an engine has been started
    for engine in find_engines(): print(engine.mark.model, engine.is_orphan, engine.processes)
    remove(record)                   # when it and its processes have ended

Two sources identify an engine. Each of its processes has a *mark* in its environment. A *record* in
a file names its first process. Programs may overwrite their environment (to change their title in
`ps`), and a record may be lost. Either is enough to find all processes of an engine: the marked
ones, and all others in their sessions. An engine starts in a new session, and a process cannot join
a session from outside.

The functions read /proc and files, so they block for milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from kvelastic.config import LAUNCHED_BY
from kvelastic.controller.settings.settings import ModelSettings
from kvelastic.errors import ControllerError
from kvelastic.shared.liveness import (
    Liveness,
    ProcessIdentity,
    boot_id,
    pid_namespace,
    start_time_ticks,
)

_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 10
_MOST_RECORDS: Final = 1000


@dataclass(frozen=True)
class Mark:
    """The mark of an engine in its environment."""

    source: str
    """Its controller's configuration file."""
    model: str
    port: int
    launch_digest: str
    """Digest of the launch settings; equal for engines launched in the same way."""
    controller: ProcessIdentity

    def to_text(self) -> str:
        """Return the mark as one line of JSON."""
        facts = {"version": _VERSION, **vars(self), "controller": astuple(self.controller)}
        return json.dumps(facts, default=bytes.hex)

    @classmethod
    def from_text(cls, text: str) -> Mark | None:
        """Parse `to_text` of this version; return None for anything else."""
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            raw = json.loads(text[:_MOST_BYTES])
            if raw["version"] == _VERSION:
                return cls(
                    source=str(raw["source"]),
                    model=str(raw["model"]),
                    port=int(raw["port"]),
                    launch_digest=str(raw["launch_digest"]),
                    controller=_identity_from_json(raw["controller"]),
                )
        return None


@dataclass(frozen=True)
class Record:
    """The contents of a launched engine's record file."""

    mark: Mark
    leader: ProcessIdentity

    @classmethod
    def of(cls, mark: Mark, pid: int) -> Record:
        """Return the record of an engine that this process has just started."""
        return cls(mark, _identity_of(pid, start_time_ticks(pid) or 0))


@dataclass(frozen=True)
class LaunchedEngine:
    """A launched engine with at least one running process."""

    mark: Mark
    leader: ProcessIdentity | None
    """Its first process, or None if only others are left."""
    processes: tuple[ProcessIdentity, ...]
    """All its processes."""

    @property
    def is_orphan(self) -> bool:
        """True if its controller has ended."""
        return self.mark.controller.liveness() is Liveness.DEAD

    def variable(self, name: str) -> str | None:
        """Return a variable of its first process's environment."""
        return None if self.leader is None else _environment(self.leader.pid).get(name)


def launch_digest(model: ModelSettings) -> str:
    """Return a digest of exactly the settings that determine a launch."""
    launch = model.launch
    assert launch is not None
    facts = (model.engine, launch.command, launch.port, sorted(launch.env.items()), launch.cwd)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# ------------------------------------------------------------------------------------- records


def folder() -> Path:
    """Return the folder of records and, by default, engines' output."""
    return Path(tempfile.gettempdir()) / f"kvelastic-controller-{os.geteuid()}"


def make_folder() -> None:
    """Create the folder if it is missing.

    Raises `ControllerError` if other users can write to it: the temporary directory is open to all.
    """
    path = folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.lstat()
    except OSError as error:
        raise ControllerError(f"cannot make {path}: {error.strerror}") from error
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise ControllerError(
            f"others can write to {path}: remove it, or set TMPDIR to a directory of your own"
        )


def write(record: Record) -> None:
    """Write a record, readable by this user only. Raises `OSError`, `ControllerError`."""
    make_folder()
    path = _path_of(record)
    facts = {"mark": record.mark.to_text(), "leader": astuple(record.leader)}
    text = json.dumps(facts, default=bytes.hex).encode()
    new = path.with_suffix(f".{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
    new.replace(path)


def remove(record: Record) -> None:
    """Delete a record, unless another engine's has replaced it. Never raises."""
    with suppress(OSError):
        path = _path_of(record)
        if _read(path) == record:
            path.unlink()


def _path_of(record: Record) -> Path:
    # Containers may share the directory and use the same ports.
    return folder() / f"engine-{record.leader.pid_namespace}-{record.mark.port}.json"


def _read(path: Path) -> Record | None:
    """Return None for a file that is not a complete record of this version."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            raw = json.loads(os.read(fd, _MOST_BYTES))
        finally:
            os.close(fd)
        mark = Mark.from_text(raw["mark"])
        if mark is not None:
            return Record(mark, _identity_from_json(raw["leader"]))
    return None


def _records() -> list[Record]:
    if not folder().exists():
        return []
    try:
        make_folder()
        paths = sorted(folder().glob("engine-*.json"))[:_MOST_RECORDS]
    except (OSError, ControllerError):
        return []
    return [record for path in paths if (record := _read(path)) is not None]


def _identity_from_json(raw: Any) -> ProcessIdentity:
    pid, ticks, boot, namespace, uid = raw
    return ProcessIdentity(int(pid), int(ticks), bytes.fromhex(boot), int(namespace), int(uid))


# ----------------------------------------------------------------------------------- processes


def find_engines() -> list[LaunchedEngine]:
    """Return every engine that a controller of this user has launched in this pid namespace.

    Removes records of engines that have ended. Raises `OSError` if `/proc` cannot be listed.
    """
    marked: dict[Mark, set[int]] = {}
    sessions: dict[int, set[int]] = {}
    for pid in _processes_of_this_user():
        with suppress(ProcessLookupError):
            sessions.setdefault(os.getsid(pid), set()).add(pid)
        mark = _mark_of(pid)
        if mark is not None:
            marked.setdefault(mark, set()).add(pid)
    leaders: dict[Mark, ProcessIdentity] = {}
    for record in _records():
        liveness = record.leader.liveness()
        if liveness is Liveness.ALIVE and record.leader.uid == os.geteuid():
            leaders[record.mark] = record.leader
            # An adopted engine's mark has its first controller; the record has the current one.
            mark = _mark_of(record.leader.pid)
            first = set() if mark is None else marked.pop(mark, set())
            marked.setdefault(record.mark, set()).update(first, {record.leader.pid})
        elif liveness is Liveness.DEAD and record.mark not in marked:
            remove(record)
    engines = [_engine(mark, pids, sessions, leaders.get(mark)) for mark, pids in marked.items()]
    return [engine for engine in engines if engine.processes]


def _engine(
    mark: Mark, marked: set[int], sessions: dict[int, set[int]], leader: ProcessIdentity | None
) -> LaunchedEngine:
    mine = os.getsid(0)  # a test may run in the session of the processes it looks for
    pids = set(marked)
    for session, members in sessions.items():
        if session != mine and members & marked:
            pids |= members
    pids.discard(os.getpid())
    starts = {pid: start_time_ticks(pid) for pid in pids}
    processes = [_identity_of(pid, at) for pid, at in starts.items() if at is not None]
    processes.sort(key=lambda each: (each.start_time_ticks, each.pid))
    if leader is None and processes and processes[0].pid in sessions:
        leader = processes[0]  # the oldest, and the first of its session
    return LaunchedEngine(mark, leader, tuple(processes))


def _processes_of_this_user() -> list[int]:
    uid = os.geteuid()
    found = []
    with os.scandir("/proc") as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == uid:
                    found.append(int(entry.name))
    return found


def _identity_of(pid: int, ticks: int) -> ProcessIdentity:
    return ProcessIdentity(pid, ticks, boot_id(), pid_namespace(), os.geteuid())


def _mark_of(pid: int) -> Mark | None:
    text = _environment(pid).get(LAUNCHED_BY)
    return None if text is None else Mark.from_text(text)


def _environment(pid: int) -> dict[str, str]:
    """Return the environment at start, or as the program has overwritten it."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition(b"=") for entry in raw.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}
