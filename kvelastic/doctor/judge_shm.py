"""Findings about shared memory, its segments and ledgers, and visible processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Outcome, check, note, ok, problem, warning
from kvelastic.doctor.judge_instance import ended, unknown
from kvelastic.units import MIB_BYTES, format_size

if TYPE_CHECKING:
    from kvelastic.shared.segment_listing import SegmentInfo

_DOCKER_DEFAULT_BYTES: Final = 64 * MIB_BYTES
# Engines pass tensors between their processes in /dev/shm and would fill less than this.
_LITTLE_BYTES: Final = 16 * MIB_BYTES
_CONTAINER: Final = "start the container with --shm-size=8g or --ipc=host"


@check("shm.mount")
def _mount(facts: Facts) -> Outcome:
    if facts.shm.filesystem:
        return ok(f"/dev/shm: file system {facts.shm.filesystem}")
    return Outcome(
        # A plain folder can hold segments too, but on a disk.
        "problem" if facts.shm.write_error else "warning",
        "no file system is mounted at /dev/shm",
        "run as root: mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
    )


@check("shm.write", fine="files can be created in /dev/shm")
def _write(facts: Facts) -> Iterator[Outcome]:
    if facts.shm.write_error:
        yield problem(
            f"no file can be created in /dev/shm: {facts.shm.write_error}",
            "set its mode to 1777 and mount it writable (a container with --read-only needs"
            " --tmpfs /dev/shm)",
        )


@check("shm.locks")
def _locks(facts: Facts) -> Outcome:
    if facts.shm.has_liveness_locks or facts.shm.write_error:
        return ok("liveness locks work in /dev/shm")
    return warning(
        "liveness locks do not work in /dev/shm: the segment of a killed instance is never"
        " removed, and its memory stays granted",
        "run as root: mount -t tmpfs -o mode=1777 tmpfs /dev/shm; until then remove the segment of"
        " a dead instance with kvctl delete NAME --force, and stop all instances to remove their"
        " ledger",
    )


@check("shm.shared")
def _shared(facts: Facts) -> Outcome:
    pids = facts.shm.pids_with_another
    if pids:
        return problem(
            f"instances use another /dev/shm (process {', '.join(map(str, pids[:8]))}): each"
            " /dev/shm has a separate ledger, and each ledger grants the whole device",
            "give all containers one /dev/shm (--ipc=host, --ipc=container:NAME, or one shared"
            " volume), or divide the memory between them with KVELASTIC_HOST_MEMORY or"
            " KVELASTIC_GPU_UTILIZATION",
        )
    if facts.system.is_own_pid_namespace:
        return note(
            "instances in other containers are not visible here; one with a separate /dev/shm has"
            " a second ledger for the same device",
            "run kvctl doctor as root outside the container, or with --pid=host; give all"
            " containers one /dev/shm (--ipc=host)",
        )
    return ok("no instance with another /dev/shm is visible")


@check("shm.size")
def _size(facts: Facts) -> Outcome:
    shm = facts.shm
    seen = f"/dev/shm: {format_size(shm.free_bytes)} of {format_size(shm.size_bytes)} free"
    if shm.free_bytes < shm.needed_bytes:
        return problem(
            f"{seen}; a segment needs {format_size(shm.needed_bytes)}",
            f"remove unused files (ls -l /dev/shm; kvctl gc), or {_CONTAINER}",
        )
    if shm.size_bytes <= _DOCKER_DEFAULT_BYTES:
        return warning(f"{seen}: enough for kvelastic, too little for most engines", _CONTAINER)
    if shm.free_bytes < _LITTLE_BYTES:
        return warning(seen, f"remove unused files (ls -l /dev/shm; kvctl gc), or {_CONTAINER}")
    return ok(seen)


def _with_status(facts: Facts, status: str) -> list[SegmentInfo]:
    return [segment for segment in facts.segments if segment.status == status]


def _of(segment: SegmentInfo, said: Outcome) -> Outcome:
    return said._replace(what=f"{segment.name}: {said.what[0].lower()}{said.what[1:]}")


@check("segments.dead", fine="no segments of dead instances")
def _dead(facts: Facts) -> Iterator[Outcome]:
    for segment in _with_status(facts, "dead"):
        yield _of(segment, ended(segment.header.get("pid", 0), is_ours=segment.is_ours))


@check("segments.unreadable", fine="all segments are readable")
def _unreadable(facts: Facts) -> Iterator[Outcome]:
    for segment in _with_status(facts, "unreadable"):
        yield warning(
            f"{segment.name}: {segment.problem}",
            "run the kvctl of the kvelastic version that created it; if no process uses it (lsof"
            f" /dev/shm/{segment.name}), run kvctl delete {segment.name} --force",
        )


@check("segments.unknown")
def _unknown(facts: Facts) -> Iterator[Outcome]:
    for segment in _with_status(facts, "unknown"):
        yield _of(segment, unknown(segment.name))


@check("segments.orphaned")
def _orphaned(facts: Facts) -> Iterator[Outcome]:
    for segment in _with_status(facts, "orphaned"):
        pid = segment.header["pid"]
        yield warning(
            f"{segment.name}: process {pid} is an engine core whose server has ended; it serves no"
            " requests, and keeps its memory and its name",
            f"run kill {pid}; if it still runs after 30 s, run kill -9 {pid}",
        )


@check("segments.hidden")
def _hidden(facts: Facts) -> Iterator[Outcome]:
    for segment in _with_status(facts, "hidden"):
        yield note(
            f"{segment.name} belongs to another user and cannot be read",
            "run kvctl as that user or as root to list and limit it",
        )


def _ledgers(facts: Facts, *, foreign: bool) -> list[str]:
    return [
        f"the ledger of {ledger.device}: {ledger.problem}"
        for ledger in facts.ledgers
        if (ledger.status == "foreign") is foreign
    ]


@check("ledgers.usable")
def _usable(facts: Facts) -> Iterator[Outcome]:
    if not facts.ledgers:
        yield ok("all ledgers are usable")


@check("ledgers.foreign")
def _foreign(facts: Facts) -> Iterator[Outcome]:
    for what in _ledgers(facts, foreign=True):
        yield problem(
            what,
            "start all engines as one user; or divide the memory between the users"
            " (KVELASTIC_HOST_MEMORY, KVELASTIC_GPU_UTILIZATION) and set KVELASTIC_LEDGER to a"
            " different name for each; if the ledger is unused, run kvctl gc as its owner or root",
        )


@check("ledgers.unreadable")
def _damaged(facts: Facts) -> Iterator[Outcome]:
    for what in _ledgers(facts, foreign=False):
        yield problem(
            what,
            "stop the instances that use it and remove the file, or set KVELASTIC_LEDGER to"
            " another name",
        )


@check("permissions.proc", fine="/proc shows all processes")
def _proc(facts: Facts) -> Iterator[Outcome]:
    if facts.system.hidepid not in {"0", "off"}:
        yield note(
            f"/proc is mounted with hidepid={facts.system.hidepid}: other users' processes are"
            " hidden",
            "ignore this for your own instances; if the pid of another user's dead instance is"
            " reused, the instance looks alive until its owner runs kvctl",
        )


@check("permissions.namespace", fine="kvctl runs in the machine's own pid namespace")
def _namespace(facts: Facts) -> Iterator[Outcome]:
    if not facts.system.has_pid_namespace:
        yield warning(
            "/proc/self/ns/pid cannot be read: containers cannot be distinguished",
            "mount /proc; until then run kvctl only where the instances run",
        )
    elif facts.system.is_own_pid_namespace:
        yield note(
            "kvctl runs in a container with a separate pid namespace",
            "run kvctl in the engine's container; to limit engines of several containers, let"
            " them share the pid namespace (--pid=host) and /dev/shm (--ipc=host)",
        )


CHECKS: Final = (
    *(_mount, _write, _size, _locks, _shared),
    *(_dead, _unreadable, _unknown, _orphaned, _hidden),
    *(_usable, _foreign, _damaged),
)
PERMISSIONS: Final = (_proc, _namespace)
