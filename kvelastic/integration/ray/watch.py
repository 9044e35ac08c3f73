"""Which replicas of a model respond, as seen from this process.

The router looks after its replicas every `period_s` and records their responses here. The front
follows its requests here, and is notified if the replica of a request falls silent. So a request
ends a known time after its replica's machine is cut off, independent of Ray's own timers.

One `Watch` for each model in a process, from `watch_of`. All methods are thread-safe and do not
block: the router and the front have different threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

_MOST_PERIODS: Final = 2
"""A longer time between two looks is a stall of this process, and says nothing of replicas."""
OnLost = Callable[[str], None]


@dataclass
class _Followed:
    on_lost: OnLost
    replica: str | None = None


class Watch:
    """The replicas of one model and the requests that they serve."""

    def __init__(self, period_s: float, silence_s: float) -> None:
        """Take the intended interval of `look`, and how long a replica may not respond."""
        self._period_s = period_s
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._silent_s: dict[str, float] = {}
        """By replica, the seconds without a response."""
        self._reports: dict[str, Mapping[str, Any]] = {}
        self._followed: dict[int, _Followed] = {}

    # ---------------------------------------------------------------------------- the router

    def look(self, replicas: Collection[str], elapsed_s: float) -> None:
        """Count the time since the last look as silence of these replicas, and forget all others.

        Calls `on_lost` for each request whose replica has fallen silent, or has not been accepted
        by any replica when one falls silent.
        """
        step_s = min(elapsed_s, self._period_s * _MOST_PERIODS)
        with self._lock:
            before = self._silent_s
            self._silent_s = {name: before.get(name, 0.0) + step_s for name in replicas}
            fell_silent = {
                name
                for name, silent_s in self._silent_s.items()
                if before.get(name, 0.0) <= self._silence_s < silent_s
            }
            lost = [
                each
                for each in self._followed.values()
                if each.replica in fell_silent or (fell_silent and each.replica is None)
            ]
        why = f"{', '.join(sorted(fell_silent))} did not respond for {self._silence_s:g} s"
        for each in lost:
            each.on_lost(why)

    def responded(self, replica: str) -> None:
        """Record that the replica has responded."""
        with self._lock:
            self._silent_s[replica] = 0.0

    def accepted(self, number: int, replica: str) -> None:
        """Record which replica serves a followed request."""
        with self._lock:
            followed = self._followed.get(number)
            if followed is not None:
                followed.replica = replica

    def reported(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the last report of each replica that Ray lists now."""
        with self._lock:
            self._reports = dict(reports)

    def serving(self) -> set[str]:
        """Return the replicas that serve followed requests."""
        with self._lock:
            return {each.replica for each in self._followed.values() if each.replica is not None}

    # ----------------------------------------------------------------------------- the front

    def follow(self, number: int, on_lost: OnLost) -> None:
        """Follow a request until `leave`. `on_lost` is called in any thread, with the reason."""
        with self._lock:
            self._followed[number] = _Followed(on_lost)

    def leave(self, number: int) -> None:
        """Follow the request no longer. Idempotent."""
        with self._lock:
            self._followed.pop(number, None)

    def is_accepted(self, number: int) -> bool:
        """Return whether a replica serves the followed request."""
        with self._lock:
            followed = self._followed.get(number)
            return followed is not None and followed.replica is not None

    def silent(self) -> frozenset[str]:
        """Return the replicas that do not respond."""
        with self._lock:
            return frozenset(
                name for name, silent_s in self._silent_s.items() if silent_s > self._silence_s
            )

    def reports(self) -> dict[str, Mapping[str, Any]]:
        """Return the last report of each replica that Ray lists; empty before its first one."""
        with self._lock:
            return dict(self._reports)


_watches: Final[dict[str, Watch]] = {}
_making: Final = threading.Lock()


def watch_of(model: str, period_s: float, silence_s: float) -> Watch:
    """Return this process's `Watch` of a model, made by the first call."""
    with _making:
        return _watches.setdefault(model, Watch(period_s, silence_s))
