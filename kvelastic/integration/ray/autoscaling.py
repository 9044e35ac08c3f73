"""Decides how many replicas a model needs: pure functions over the replicas' last reports.

    is_full(queue, asked_s, rules)         # the router wakes a sleeping replica if all others are
    wanted_replicas(loads, target, rules)  # the number that Ray keeps; sleeping replicas count

Requests and memory pressure first wake the replicas that sleep. Only if none sleeps is one started.
Ray calls `Autoscaler` in its controller, and ends a replica if fewer were wanted for `end_after`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_QUEUE: Final = "queue"
_ASKED: Final = "asked_s"


@dataclass(frozen=True)
class Rules:
    """When one replica of a model is full."""

    requests: float
    """Number of its running and waiting requests."""
    memory_after_s: float
    """How long it has waited for memory."""


@dataclass(frozen=True)
class Load:
    """The load of one replica that is ready."""

    queue: float
    """Number of its running and waiting requests."""
    asked_s: float
    """Seconds that its instance has waited for memory; 0 if it does not wait, or sleeps."""


def is_full(queue: float, asked_s: float, rules: Rules) -> bool:
    """Return whether further requests should go to another replica, if necessary by a wake."""
    return queue >= rules.requests or is_short(asked_s, rules)


def is_short(asked_s: float, rules: Rules) -> bool:
    """Return whether a replica has waited for memory too long."""
    return asked_s > 0 and asked_s >= rules.memory_after_s


def wanted_replicas(loads: Sequence[Load], target: int, rules: Rules, waiting: float = 0.0) -> int:
    """Return the number of replicas that the model needs, without its bounds.

    `target` is the number that Ray keeps now; it differs from `loads` while replicas start or end.
    `waiting` is the number of requests that wait for any replica. While a replica is short of
    memory, none ends. If all are, and so none sleeps, one more is needed.
    """
    wanted = math.ceil((waiting + sum(load.queue for load in loads)) / rules.requests)
    short = [is_short(load.asked_s, rules) for load in loads]
    if any(short):
        wanted = max(wanted, target)
        if all(short) and len(loads) >= target:
            wanted = max(wanted, len(loads) + 1)
    return wanted


class Autoscaler:
    """Ray's autoscaling policy: a class that Ray calls with its `AutoscalingContext`."""

    def __init__(self, **rules: float) -> None:
        """Take the fields of `Rules`."""
        self._rules = Rules(**rules)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas and no state. Does not block."""
        queues = context.aggregated_metrics.get(_QUEUE, {})
        asked = context.raw_metrics.get(_ASKED, {})
        loads = [
            Load(queue, asked[each][-1].value if asked.get(each) else 0.0)
            for each, queue in queues.items()
        ]
        waiting = context.total_queued_requests or 0.0
        return wanted_replicas(loads, context.target_num_replicas, self._rules, waiting), {}


def stats_of(report: dict[str, Any]) -> dict[str, float]:
    """Return what a replica records for `Autoscaler`, from its report."""
    return {name: float(report[name]) for name in (_QUEUE, _ASKED)}
