"""Shared memory, the segments in it, and what of other processes may be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvelastic.doctor.facts import Facts, SegmentFact
from kvelastic.doctor.finding import Finding
from kvelastic.sizes import MIB_BYTES, format_size

_DOCKER_DEFAULT_BYTES: Final = 64 * MIB_BYTES
# Engines pass tensors between their processes here: less than this fills up.
_LITTLE_BYTES: Final = 16 * MIB_BYTES
_CONTAINER: Final = "start the container with --shm-size=8g or --ipc=host"


def shm_findings(facts: Facts) -> Iterator[Finding]:
    """`shm.*`."""
    shm = facts.shm
    if shm.filesystem:
        yield Finding("shm.mount", "ok", f"/dev/shm is {shm.filesystem}", "")
    else:
        yield Finding(
            "shm.mount",
            # A plain folder holds segments, too, but on a disk.
            "problem" if shm.write_error else "warning",
            "nothing is mounted at /dev/shm",
            "as root: mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        )
    if shm.write_error:
        yield Finding(
            "shm.write",
            "problem",
            f"no file can be made in /dev/shm: {shm.write_error}",
            "its mode must be 1777 and it must not be mounted read-only (--read-only containers"
            " need --tmpfs /dev/shm)",
        )
    else:
        yield Finding("shm.write", "ok", "files can be made in /dev/shm", "")
    yield _size(facts)
    yield _locks(facts)
    yield _shared(facts)


def _locks(facts: Facts) -> Finding:
    if facts.shm.has_life_locks or facts.shm.write_error:
        return Finding("shm.locks", "ok", "who lives and who is dead can be told", "")
    return Finding(
        "shm.locks",
        "warning",
        "/dev/shm has no locks by which the living are told from the dead: what an instance that"
        " was killed has left is never removed, and its memory stays granted",
        "as root: mount -t tmpfs -o mode=1777 tmpfs /dev/shm; until then kvctl delete NAME --force,"
        " and end all instances to remove their ledger",
    )


def _shared(facts: Facts) -> Finding:
    pids = facts.shm.pids_with_another
    if pids:
        return Finding(
            "shm.shared",
            "problem",
            f"instances with another /dev/shm are here (process {', '.join(map(str, pids[:8]))}):"
            " each /dev/shm has a ledger of its own, and each grants the whole device",
            "give all containers one /dev/shm (--ipc=host, --ipc=container:NAME, or one volume"
            " mounted there), or divide the memory between them with KVELASTIC_HOST_MEMORY or"
            " KVELASTIC_GPU_UTILIZATION",
        )
    if facts.system.is_own_pid_namespace:
        return Finding(
            "shm.shared",
            "note",
            "instances in other containers cannot be seen from here; one with a /dev/shm of its own"
            " would have a second ledger for the same device",
            "run kvctl doctor on the machine itself, as root, or with --pid=host; give all"
            " containers one /dev/shm (--ipc=host)",
        )
    return Finding("shm.shared", "ok", "no instance with another /dev/shm is seen", "")


def _size(facts: Facts) -> Finding:
    shm = facts.shm
    seen = f"/dev/shm: {format_size(shm.free_bytes)} of {format_size(shm.size_bytes)} free"
    if shm.free_bytes < shm.needed_bytes:
        return Finding(
            "shm.size",
            "problem",
            f"{seen}; a segment takes {format_size(shm.needed_bytes)}",
            f"remove what is not used (ls -l /dev/shm; kvctl gc), or {_CONTAINER}",
        )
    if shm.size_bytes <= _DOCKER_DEFAULT_BYTES:
        return Finding(
            "shm.size",
            "warning",
            f"{seen}, which is enough for kvelastic and too little for most engines",
            _CONTAINER,
        )
    if shm.free_bytes < _LITTLE_BYTES:
        return Finding(
            "shm.size",
            "warning",
            seen,
            f"remove what is not used (ls -l /dev/shm; kvctl gc), or {_CONTAINER}",
        )
    return Finding("shm.size", "ok", seen, "")


def segment_findings(facts: Facts) -> Iterator[Finding]:
    """`segments.*`; one finding for each segment that is not well."""
    found = [_segment(segment) for segment in facts.segments]
    if not any(finding.check == "segments.dead" for finding in found):
        yield Finding("segments.dead", "ok", "no segment of a dead instance", "")
    if not any(finding.check == "segments.unreadable" for finding in found):
        yield Finding("segments.unreadable", "ok", "no segment that cannot be read", "")
    yield from found


def _segment(segment: SegmentFact) -> Finding:
    name = segment.name
    if segment.status == "dead":
        return Finding(
            "segments.dead",
            "warning" if segment.is_ours else "note",
            f"{name}: its instance is dead" + ("" if segment.is_ours else "; another user's"),
            "kvctl gc" if segment.is_ours else "let its owner, or root, run `kvctl gc`",
        )
    if segment.status == "unreadable":
        return Finding(
            "segments.unreadable",
            "warning",
            f"{name}: {segment.problem}",
            "use the kvctl of the kvelastic that made it; if nothing uses it (lsof"
            f" /dev/shm/{name}), kvctl delete {name} --force",
        )
    if segment.status == "orphaned":
        return Finding(
            "segments.orphaned",
            "warning",
            f"{name}: process {segment.pid} is an engine core whose server has ended; it serves"
            " nobody, and keeps its memory and its name",
            f"kill {segment.pid}; kill -9 {segment.pid} if it is still there after 30 s",
        )
    if segment.status == "hidden":
        return Finding(
            "segments.hidden",
            "note",
            f"{name} belongs to another user and cannot be read",
            "run kvctl as that user, or as root, to see and limit it",
        )
    return Finding(
        "segments.unknown",
        "warning",
        f"{name}: whether its instance lives cannot be asked here, so it is never removed",
        "mount a tmpfs at /dev/shm; if its process has ended (kvctl list shows the pid as it is in"
        f" its own container), kvctl delete {name} --force",
    )


def ledger_findings(facts: Facts) -> Iterator[Finding]:
    """`ledgers.*`; one finding for each ledger that cannot be used."""
    if not facts.ledgers:
        yield Finding("ledgers.usable", "ok", "no ledger that cannot be used", "")
    for ledger in facts.ledgers:
        what = f"the ledger of {ledger.device}: {ledger.problem}"
        if ledger.status == "foreign":
            yield Finding(
                "ledgers.foreign",
                "problem",
                what,
                "start the engines as one user; or divide the memory between the users"
                " (KVELASTIC_HOST_MEMORY, KVELASTIC_GPU_UTILIZATION) and set KVELASTIC_LEDGER to a"
                " name for each; if nobody uses it any more, its owner, or root, runs kvctl gc",
            )
        else:
            yield Finding(
                "ledgers.unreadable",
                "problem",
                what,
                "end the instances that use it and remove the file, or set KVELASTIC_LEDGER to"
                " another name",
            )


def permission_findings(facts: Facts) -> Iterator[Finding]:
    """`permissions.*`."""
    system = facts.system
    if system.hidepid in {"0", "off"}:
        yield Finding("permissions.proc", "ok", "/proc shows all processes", "")
    else:
        yield Finding(
            "permissions.proc",
            "note",
            f"/proc is mounted with hidepid={system.hidepid}: other users' processes are hidden",
            "nothing for your own instances; another user's dead instance whose pid was given"
            " away again looks alive until its owner runs kvctl",
        )
    if not system.has_pid_namespace:
        yield Finding(
            "permissions.namespace",
            "warning",
            "/proc/self/ns/pid cannot be read: containers cannot be told apart",
            "mount /proc; until then use kvctl only where the instances run",
        )
    elif system.is_own_pid_namespace:
        yield Finding(
            "permissions.namespace",
            "note",
            "this is a container with pids of its own",
            "run kvctl in the engine's container; to limit engines of several containers, give"
            " them one namespace (--pid=host) and one /dev/shm (--ipc=host)",
        )
    else:
        yield Finding("permissions.namespace", "ok", "the machine's own pid namespace", "")
