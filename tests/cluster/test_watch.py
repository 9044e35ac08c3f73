"""Replicas that do not respond are found out, and their requests learn it."""

from __future__ import annotations

from functools import partial

import pytest

from kvelastic.integration.ray.settings import HealthSettings
from kvelastic.integration.ray.watch import Watch, watch_of

PERIOD_S = 0.5
SILENCE_S = 2.0


def watch() -> Watch:
    made = Watch(PERIOD_S, SILENCE_S)
    made.look(["a", "b"], 0.0)
    return made


def look(made: Watch, *, heard: str = "", times: int = 1) -> None:
    for _ in range(times):
        for name in heard:
            made.responded(name)
        made.look(["a", "b"], PERIOD_S)


def note(lost: list[str], replica: str, why: str) -> None:
    lost.append(replica + why[:1])


@pytest.mark.parametrize("late_s", [0.0, 0.01])
def test_silent_replica_is_found_within_two_timeouts(late_s: float) -> None:
    health = HealthSettings()
    made = Watch(health.period, health.silence)
    made.responded("a")
    looks = 0
    while not made.silent():
        made.look(["a"], health.period + late_s)
        looks += 1
    assert health.timeout < looks * (health.period + late_s) <= 2 * health.timeout


def test_silent_replica_loses_only_its_own_requests() -> None:
    made, lost = watch(), list[str]()
    for number, replica in enumerate("aab"):
        made.follow(number, partial(note, lost, replica))
        made.accepted(number, replica)
    made.leave(1)
    look(made, heard="ab")
    look(made, heard="b", times=3)
    assert (lost, made.silent()) == ([], frozenset())
    look(made, heard="b")
    assert (lost, made.silent()) == (["aa"], {"a"})
    look(made, heard="b", times=5)
    assert lost == ["aa"]
    look(made, heard="ab")
    assert made.silent() == frozenset()


def test_unaccepted_request_is_lost_with_a_silent_replica() -> None:
    made, lost = watch(), list[str]()
    made.follow(7, lost.append)
    look(made, heard="ab", times=9)
    assert (lost, made.is_accepted(7)) == ([], False)
    look(made, heard="b", times=9)
    assert lost == ["a did not respond for 2 s"]


def test_stall_of_this_process_makes_no_replica_silent() -> None:
    made = watch()
    look(made, heard="ab")
    made.look(["a", "b"], 60.0)
    assert made.silent() == frozenset()


def test_ended_replicas_are_forgotten() -> None:
    made = watch()
    look(made, times=9)
    made.look(["b"], PERIOD_S)
    assert made.silent() == {"b"}
    made.reported({"b": {"room_bytes": 1}})
    assert made.reports() == {"b": {"room_bytes": 1}}


def test_front_and_router_share_a_watch() -> None:
    assert watch_of("m", 1, 2) is watch_of("m", 1, 2)
    assert watch_of("m", 1, 2) is not watch_of("other", 1, 2)
