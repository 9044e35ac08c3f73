"""Ranks the replicas for a request: pure functions over replicas' reports.

for rank in ranks(standings): ...       # the best first; within a rank the shortest queue wins

a sleeper, if all that are awake are full      before rank 1; only with autoscaling (`Rules`)

awake, with room, most of the prompt cached    rank 1, if its queue is not much longer
awake, with room                               rank 2
awake, memory is short                         rank 3
waking or starting, then asleep                a rank each, so that only one is woken
failed, or already tried by this request       last

A report may be a second old, and a burst of requests arrives in less. So queues are Ray's current
ones, and the requests that a report does not include are expected to use some of its room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvelastic.controller.models.gate import State
from kvelastic.integration.ray.autoscaling import Rules, is_full

QUEUE_SLACK: Final = 4
"""How much longer than the shortest queue a queue may be for a prefix hit, in requests."""
_ROOM_PART: Final = 0.5
"""A replica has room if it has at least this fraction of the largest expected room of a replica."""
MOST_NAMES: Final = 8192
"""Maximum number of prefixes remembered per replica."""


@dataclass(frozen=True)
class Standing:
    """The last report of one replica, and its relation to one request."""

    replica: str
    state: State = State.STARTING
    is_memory_asleep: bool = False
    """True if its instance sleeps, independent of its engine."""
    room_bytes: int = 0
    """Memory still available to its requests, within its limit and its devices, as reported."""
    in_use_bytes: int = 0
    """Memory that its requests use, as reported."""
    reported_queue: int = 0
    """Number of its running and waiting requests, as reported."""
    queue: int = 0
    """The same, now."""
    hits: int = 0
    """Number of prefixes of this request's prompt that the replica has seen."""
    is_tried: bool = False
    """True if it has failed to serve this request."""
    asked_s: float = 0.0
    """Seconds that its instance has waited for memory; 0 if it does not wait."""

    @classmethod
    def of(
        cls,
        replica: str,
        report: Mapping[str, Any],
        queue: int | None = None,
        hits: int = 0,
        is_tried: bool = False,
        is_asleep: bool = False,
    ) -> Standing:
        """Build it from `report`, the result of `EngineReplica.report`, empty before the first one.

        `queue`: its number of requests now; None: unknown, so that of the report.
        `is_asleep`: the replica refused this request as asleep, after the report.
        """
        state = State(report.get("state", State.STARTING))
        reported_queue = int(report.get("queue", queue or 0))
        return cls(
            replica,
            State.ASLEEP if is_asleep and state is State.AWAKE else state,
            bool(report.get("memory_asleep")),
            int(report.get("room_bytes", 0)),
            int(report.get("in_use_bytes", 0)),
            reported_queue,
            reported_queue if queue is None else queue,
            hits,
            is_tried,
            float(report.get("asked_s", 0.0)),
        )

    @property
    def is_awake(self) -> bool:
        """True if a request would run without a wake-up."""
        return self.state is State.AWAKE and not self.is_memory_asleep


def ranks(standings: Sequence[Standing], rules: Rules | None = None) -> list[list[str]]:
    """Return the ranks of replicas' names. Each name occurs once, and no rank is empty.

    With `rules`, a sleeping replica comes first if all that are awake are full.
    """
    usable = [s for s in standings if not s.is_tried and s.state is not State.DOWN]
    awake = [s for s in usable if s.is_awake]
    roomy = _roomy(awake)
    shortest = min((s.queue for s in roomy), default=0)
    near = [s for s in roomy if s.hits and s.queue <= shortest + QUEUE_SLACK]
    best_hits = max((s.hits for s in near), default=0)
    sleepers = sorted((s for s in usable if not s.is_awake), key=_order_of_sleepers)
    found = [
        _next_to_wake(awake, sleepers, rules),
        [s for s in near if s.hits == best_hits],
        roomy,
        awake,
        *([s] for s in sleepers),
        [s for s in standings if s.is_tried and s.state is not State.DOWN],
        list(standings),
    ]
    seen: set[str] = set()
    ordered = []
    for rank in found:
        names = [s.replica for s in rank if s.replica not in seen]
        seen.update(names)
        if names:
            ordered.append(names)
    return ordered


def _roomy(awake: Sequence[Standing]) -> list[Standing]:
    """Return the replicas with enough room after the requests that their reports do not include.

    Each of those is expected to use the average of the reported requests.
    """
    reported = sum(s.reported_queue for s in awake)
    request_bytes = sum(s.in_use_bytes for s in awake) / reported if reported else 0
    rooms = [s.room_bytes - request_bytes * max(0, s.queue - s.reported_queue) for s in awake]
    least_bytes = max(rooms, default=0) * _ROOM_PART
    return [s for s, room in zip(awake, rooms, strict=True) if room > 0 and room >= least_bytes]


def _next_to_wake(
    awake: Sequence[Standing], sleepers: Sequence[Standing], rules: Rules | None
) -> list[Standing]:
    """Return the sleeper to wake although other replicas are awake, if any.

    A replica that an operator put to sleep is not woken for this.
    """
    if rules is None or not awake or not all(is_full(s.queue, s.asked_s, rules) for s in awake):
        return []
    able = (s for s in sleepers if not s.is_memory_asleep and s.queue < rules.requests)
    return [s for s in (next(able, None),) if s is not None]


def _order_of_sleepers(standing: Standing) -> tuple[bool, bool, int, str]:
    """Sort key by which all requests choose the same replica to wake.

    Replicas that an operator put to sleep come last.
    """
    is_coming = standing.state in {State.WAKING, State.STARTING}
    return standing.is_memory_asleep, not is_coming, -standing.room_bytes, standing.replica


class SeenPrefixes:
    """The prefixes sent to each replica. Bounded; used in one event loop only."""

    def __init__(self) -> None:
        self._names: dict[str, OrderedDict[bytes, None]] = {}

    def hits(self, replica: str, prefix: Sequence[bytes]) -> int:
        """Return how many leading hashes of the prefix the replica has seen."""
        names = self._names.get(replica) or OrderedDict()
        for count, name in enumerate(prefix):
            if name not in names:
                return count
        return len(prefix)

    def add(self, replica: str, prefix: Iterable[bytes]) -> None:
        """Record that a request with this prefix goes to the replica."""
        names = self._names.setdefault(replica, OrderedDict())
        for name in prefix:
            names[name] = None
            names.move_to_end(name)
        while len(names) > MOST_NAMES:
            names.popitem(last=False)

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Remove all other replicas, which have ended and lost their caches."""
        kept = set(replicas)
        for replica in [name for name in self._names if name not in kept]:
            del self._names[replica]
