"""Findings about shared memory, its segments and ledgers, and visible processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvelastic.doctor.facts import Facts, SegmentFact
from kvelastic.doctor.finding import Said, check, note, ok, problem, warning
from kvelastic.doctor.judge_instance import ended, unknown
from kvelastic.sizes import MIB_BYTES, format_size

_DOCKER_DEFAULT_BYTES: Final = 64 * MIB_BYTES
# Engines pass tensors between their processes in /dev/shm and would fill less than this.
_LITTLE_BYTES: Final = 16 * MIB_BYTES
_CONTAINER: Final = "start the container with --shm-size=8g or --ipc=host"


@check("shm.mount")
def _mount(facts: Facts) -> Said:
    if facts.shm.filesystem:
        return ok(f"/dev/shm is {facts.shm.filesystem}")
    return Said(
        # A plain folder can hold segments too, but on a disk.
        "problem" if facts.shm.write_error else "warning",
        "nothing is mounted at /dev/shm",
        "as root: mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
    )


@check("shm.write", fine="files can be made in /dev/shm")
def _write(facts: Facts) -> Iterator[Said]:
    if facts.shm.write_error:
        yield problem(
            f"no file can be made in /dev/shm: {facts.shm.write_error}",
            "its mode must be 1777 and it must not be mounted read-only (--read-only containers"
            " need --tmpfs /dev/shm)",
        )


@check("shm.locks")
def _locks(facts: Facts) -> Said:
    if facts.shm.has_life_locks or facts.shm.write_error:
        return ok("who lives and who is dead can be told")
    return warning(
        "/dev/shm has no locks by which the living are told from the dead: what an instance that"
        " was killed has left is never removed, and its memory stays granted",
        "as root: mount -t tmpfs -o mode=1777 tmpfs /dev/shm; until then kvctl delete NAME --force,"
        " and end all instances to remove their ledger",
    )


@check("shm.shared")
def _shared(facts: Facts) -> Said:
    pids = facts.shm.pids_with_another
    if pids:
        return problem(
            f"instances with another /dev/shm are here (process {', '.join(map(str, pids[:8]))}):"
            " each /dev/shm has a ledger of its own, and each grants the whole device",
            "give all containers one /dev/shm (--ipc=host, --ipc=container:NAME, or one volume"
            " mounted there), or divide the memory between them with KVELASTIC_HOST_MEMORY or"
            " KVELASTIC_GPU_UTILIZATION",
        )
    if facts.system.is_own_pid_namespace:
        return note(
            "instances in other containers cannot be seen from here; one with a /dev/shm of its own"
            " would have a second ledger for the same device",
            "run kvctl doctor on the machine itself, as root, or with --pid=host; give all"
            " containers one /dev/shm (--ipc=host)",
        )
    return ok("no instance with another /dev/shm is seen")


@check("shm.size")
def _size(facts: Facts) -> Said:
    shm = facts.shm
    seen = f"/dev/shm: {format_size(shm.free_bytes)} of {format_size(shm.size_bytes)} free"
    if shm.free_bytes < shm.needed_bytes:
        return problem(
            f"{seen}; a segment takes {format_size(shm.needed_bytes)}",
            f"remove what is not used (ls -l /dev/shm; kvctl gc), or {_CONTAINER}",
        )
    if shm.size_bytes <= _DOCKER_DEFAULT_BYTES:
        return warning(
            f"{seen}, which is enough for kvelastic and too little for most engines", _CONTAINER
        )
    if shm.free_bytes < _LITTLE_BYTES:
        return warning(seen, f"remove what is not used (ls -l /dev/shm; kvctl gc), or {_CONTAINER}")
    return ok(seen)


def _with_status(facts: Facts, status: str) -> list[SegmentFact]:
    return [segment for segment in facts.segments if segment.status == status]


def _of(segment: SegmentFact, said: Said) -> Said:
    return said._replace(what=f"{segment.name}: {said.what[0].lower()}{said.what[1:]}")


@check("segments.dead", fine="no segment of a dead instance")
def _dead(facts: Facts) -> Iterator[Said]:
    for segment in _with_status(facts, "dead"):
        yield _of(segment, ended(segment.pid, is_ours=segment.is_ours))


@check("segments.unreadable", fine="no segment that cannot be read")
def _unreadable(facts: Facts) -> Iterator[Said]:
    for segment in _with_status(facts, "unreadable"):
        yield warning(
            f"{segment.name}: {segment.problem}",
            "use the kvctl of the kvelastic that made it; if nothing uses it (lsof"
            f" /dev/shm/{segment.name}), kvctl delete {segment.name} --force",
        )


@check("segments.unknown")
def _unknown(facts: Facts) -> Iterator[Said]:
    for segment in _with_status(facts, "unknown"):
        yield _of(segment, unknown(segment.name))


@check("segments.orphaned")
def _orphaned(facts: Facts) -> Iterator[Said]:
    for segment in _with_status(facts, "orphaned"):
        yield warning(
            f"{segment.name}: process {segment.pid} is an engine core whose server has ended; it"
            " serves nobody, and keeps its memory and its name",
            f"kill {segment.pid}; kill -9 {segment.pid} if it is still there after 30 s",
        )


@check("segments.hidden")
def _hidden(facts: Facts) -> Iterator[Said]:
    for segment in _with_status(facts, "hidden"):
        yield note(
            f"{segment.name} belongs to another user and cannot be read",
            "run kvctl as that user, or as root, to see and limit it",
        )


def _ledgers(facts: Facts, *, foreign: bool) -> list[str]:
    return [
        f"the ledger of {ledger.device}: {ledger.problem}"
        for ledger in facts.ledgers
        if (ledger.status == "foreign") is foreign
    ]


@check("ledgers.usable")
def _usable(facts: Facts) -> Iterator[Said]:
    if not facts.ledgers:
        yield ok("no ledger that cannot be used")


@check("ledgers.foreign")
def _foreign(facts: Facts) -> Iterator[Said]:
    for what in _ledgers(facts, foreign=True):
        yield problem(
            what,
            "start the engines as one user; or divide the memory between the users"
            " (KVELASTIC_HOST_MEMORY, KVELASTIC_GPU_UTILIZATION) and set KVELASTIC_LEDGER to a"
            " name for each; if nobody uses it any more, its owner, or root, runs kvctl gc",
        )


@check("ledgers.unreadable")
def _damaged(facts: Facts) -> Iterator[Said]:
    for what in _ledgers(facts, foreign=False):
        yield problem(
            what,
            "end the instances that use it and remove the file, or set KVELASTIC_LEDGER to"
            " another name",
        )


@check("permissions.proc", fine="/proc shows all processes")
def _proc(facts: Facts) -> Iterator[Said]:
    if facts.system.hidepid not in {"0", "off"}:
        yield note(
            f"/proc is mounted with hidepid={facts.system.hidepid}: other users' processes are"
            " hidden",
            "nothing for your own instances; another user's dead instance whose pid was given"
            " away again looks alive until its owner runs kvctl",
        )


@check("permissions.namespace", fine="the machine's own pid namespace")
def _namespace(facts: Facts) -> Iterator[Said]:
    if not facts.system.has_pid_namespace:
        yield warning(
            "/proc/self/ns/pid cannot be read: containers cannot be told apart",
            "mount /proc; until then use kvctl only where the instances run",
        )
    elif facts.system.is_own_pid_namespace:
        yield note(
            "this is a container with pids of its own",
            "run kvctl in the engine's container; to limit engines of several containers, give"
            " them one namespace (--pid=host) and one /dev/shm (--ipc=host)",
        )


CHECKS: Final = (
    *(_mount, _write, _size, _locks, _shared),
    *(_dead, _unreadable, _unknown, _orphaned, _hidden),
    *(_usable, _foreign, _damaged),
)
PERMISSIONS: Final = (_proc, _namespace)
