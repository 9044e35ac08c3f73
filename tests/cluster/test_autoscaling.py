"""How many replicas a model needs, and which sleeper is woken before one starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvelastic.integration.ray.autoscaling import (
    Autoscaler,
    Load,
    Rules,
    stats_of,
    wanted_replicas,
)

RULES = Rules(requests=4.0, memory_after_s=2.0)
POLICY = Autoscaler(**asdict(RULES))


ASLEEP = Load(0.0, 0.0)


def load(queue: float, asked_s: float = 0.0) -> Load:
    return Load(queue, asked_s)


@pytest.mark.parametrize(
    ("loads", "target", "wanted"),
    [
        ([], 1, 0),
        ([load(4)], 1, 1),
        ([load(5)], 1, 2),
        ([load(8), ASLEEP], 2, 2),  # the router wakes the sleeper
        ([load(9), ASLEEP], 2, 3),
        ([load(1), load(1)], 2, 1),
        ([ASLEEP, ASLEEP], 2, 0),
    ],
)
def test_requests_decide_the_number(loads: list[Load], target: int, wanted: int) -> None:
    assert wanted_replicas(loads, target, RULES) == wanted


@pytest.mark.parametrize(
    ("loads", "target", "wanted"),
    [
        ([load(1, 1.9)], 1, 1),
        ([load(1, 2.0)], 1, 2),
        ([load(1, 2.0)], 2, 2),  # the second one starts already
        ([load(1, 2.0), ASLEEP], 2, 2),  # the router wakes the sleeper
        ([load(1, 9.0), load(1)], 2, 2),
        ([load(1, 9.0), load(1, 9.0)], 2, 3),
        ([load(13, 9.0), load(0)], 2, 4),
    ],
)
def test_memory_pressure_decides_the_number(loads: list[Load], target: int, wanted: int) -> None:
    assert wanted_replicas(loads, target, RULES) == wanted


def test_requests_without_a_replica_count() -> None:
    assert wanted_replicas([load(4)], 1, RULES, waiting=1.0) == 2


@dataclass
class Sample:
    value: float


def context(**more: Any) -> Any:
    reports = {
        "a": {"queue": 1, "asked_s": 3.0, "state": "awake"},
        "b": {"queue": 0, "asked_s": 0.0, "state": "asleep"},
    }
    stats = {name: stats_of(report) for name, report in reports.items()}
    names = ("queue", "asked_s")
    known = {
        "aggregated_metrics": {m: {r: stats[r][m] for r in stats} for m in names},
        "raw_metrics": {m: {r: [Sample(9.0), Sample(stats[r][m])] for r in stats} for m in names},
        "target_num_replicas": 2,
        "total_queued_requests": None,
    }
    return SimpleNamespace(**{**known, **more})


def test_policy_reads_the_last_reports() -> None:
    assert POLICY(context()) == (2, {})
    assert POLICY(context(total_queued_requests=8.0)) == (3, {})


def test_policy_without_reports_wants_no_replica() -> None:
    assert POLICY(context(aggregated_metrics={}, raw_metrics={})) == (0, {})
