"""Which replica gets a request: every rank, and what moves a replica out of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.controller.models.gate import State
from kvelastic.integration.ray.autoscaling import Rules
from kvelastic.integration.ray.ranking import (
    MOST_NAMES,
    QUEUE_SLACK,
    SeenPrefixes,
    Standing,
    ranks,
)

MIB = 1 << 20
RULES = Rules(requests=4.0, memory_after_s=2.0)


def awake(name: str, room_mib: int = 100, **more: Any) -> Standing:
    return replace(Standing(name, State.AWAKE, room_bytes=room_mib * MIB), **more)


def test_equal_replicas_share_one_rank() -> None:
    assert ranks([awake("a"), awake("b")]) == [["a", "b"]]


def test_prefix_hit_comes_first() -> None:
    assert ranks([awake("a"), awake("b", hits=3), awake("c", hits=1)]) == [["b"], ["a", "c"]]


def test_prefix_hit_does_not_outweigh_a_long_queue() -> None:
    near = awake("b", hits=3, queue=QUEUE_SLACK)
    assert ranks([awake("a"), near])[0] == ["b"]
    far = awake("b", hits=3, queue=QUEUE_SLACK + 1)
    assert ranks([awake("a"), far]) == [["a", "b"]]


def test_free_memory_outranks_prefix_hits() -> None:
    assert ranks([awake("a", 10, hits=9), awake("b", 100)]) == [["b"], ["a"]]


def test_requests_since_a_report_reduce_its_room() -> None:
    reported = awake("a", 40, in_use_bytes=60 * MIB, reported_queue=20, queue=20)
    assert ranks([reported, awake("b", 100)]) == [["b"], ["a"]]
    assert ranks([reported, awake("b", 100, queue=6)]) == [["b"], ["a"]]
    assert ranks([reported, awake("b", 100, queue=20)]) == [["a", "b"]]
    assert ranks([reported, awake("b", 100, queue=40)]) == [["a"], ["b"]]


def test_idle_replica_with_used_memory_keeps_room() -> None:
    held = awake("a", 100, in_use_bytes=90 * MIB, queue=1)
    assert ranks([held, awake("b", 100)]) == [["a", "b"]]


def test_replicas_without_any_room_share_a_rank() -> None:
    assert ranks([awake("a", 0), awake("b", 0)]) == [["a", "b"]]


@pytest.mark.parametrize("room_mib", [0, 100])
def test_sleeping_replicas_rank_last_in_separate_ranks(room_mib: int) -> None:
    sleepers = [Standing(name, State.ASLEEP) for name in ("d", "c")]
    assert ranks([*sleepers, awake("a", room_mib)]) == [["a"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("busy", "first"),
    [
        ([awake("a", queue=4)], "c"),
        ([awake("a", asked_s=2.0)], "c"),
        ([awake("a", queue=4, hits=9)], "c"),
        ([awake("a", queue=3, asked_s=1.9)], "a"),
        ([awake("a", queue=4), awake("b", 9)], "a"),
    ],
)
def test_sleeper_comes_first_if_others_are_full(busy: list[Standing], first: str) -> None:
    sleepers = [Standing(name, State.ASLEEP) for name in ("d", "c")]
    assert ranks([*sleepers, *busy], RULES)[0] == [first]
    assert ranks([*sleepers, *busy])[0] == ["a"]


def test_full_sleepers_are_passed_over() -> None:
    full = awake("a", queue=9)
    coming = Standing("b", State.WAKING, queue=4)
    held = awake("d", is_memory_asleep=True)
    assert ranks([full, coming, held], RULES)[0] == ["a"]
    assert ranks([full, coming, held, Standing("c", State.ASLEEP)], RULES)[0] == ["c"]


def test_waking_replica_ranks_before_sleeping_ones() -> None:
    coming = Standing("z", State.WAKING)
    assert ranks([Standing("a", State.ASLEEP), coming]) == [["z"], ["a"]]


def test_replica_asleep_by_operator_ranks_last() -> None:
    held = awake("a", is_memory_asleep=True)
    assert ranks([held, Standing("b", State.ASLEEP)]) == [["b"], ["a"]]


def test_failed_and_tried_replicas_come_last() -> None:
    found = ranks([Standing("a", State.DOWN), awake("b", is_tried=True), awake("c", 1)])
    assert found == [["c"], ["b"], ["a"]]


def test_replica_without_a_report_is_ranked() -> None:
    assert ranks([Standing.of("a", {})]) == [["a"]]


def test_sleep_notice_overrides_an_older_report() -> None:
    old = {"state": "awake", "room_bytes": 9 * MIB}
    assert ranks([Standing.of("a", old, is_asleep=True), awake("b", 1)]) == [["b"], ["a"]]


def test_report_of_a_replica_becomes_its_standing() -> None:
    report = {
        "state": "awake", "room_bytes": 7, "in_use_bytes": 8, "queue": 2, "asked_s": 0.5, "new": 1
    }  # fmt: skip
    standing = Standing("a", State.AWAKE, False, 7, 8, 2, 5, 3, True, 0.5)
    assert Standing.of("a", report, 5, 3, True) == standing


def test_unknown_queue_is_the_reported_one() -> None:
    assert Standing.of("a", {"queue": 3}).queue == 3
    assert Standing.of("a", {}).queue == 0


def test_report_without_a_queue_includes_all_requests() -> None:
    standing = Standing.of("a", {"state": "awake", "room_bytes": MIB}, queue=4)
    assert (standing.queue, standing.reported_queue) == (4, 4)


@given(
    st.lists(
        st.builds(
            Standing,
            st.uuids().map(str),
            st.sampled_from(State),
            st.booleans(),
            st.integers(0, 1 << 40),
            st.integers(0, 1 << 40),
            st.integers(0, 100),
            st.integers(0, 100),
            st.integers(0, 64),
            st.booleans(),
            st.floats(0, 4),
        ),
        max_size=8,
        unique_by=lambda standing: standing.replica,
    ),
    st.sampled_from([None, RULES]),
)
def test_each_replica_is_in_exactly_one_rank(
    standings: list[Standing], rules: Rules | None
) -> None:
    found = ranks(standings, rules)
    assert sorted(name for rank in found for name in rank) == sorted(s.replica for s in standings)
    assert all(found)


def test_prefix_hits_count_from_the_start() -> None:
    seen = SeenPrefixes()
    seen.add("a", [b"1", b"2"])
    assert seen.hits("a", [b"1", b"2", b"3"]) == 2
    assert seen.hits("a", [b"3", b"1"]) == 0
    assert seen.hits("b", [b"1"]) == 0


def test_old_prefixes_and_ended_replicas_are_forgotten() -> None:
    seen = SeenPrefixes()
    seen.add("a", [b"%d" % number for number in range(MOST_NAMES + 1)])
    assert seen.hits("a", [b"0"]) == 0
    assert seen.hits("a", [b"1"]) == 1
    seen.keep_only(["b"])
    assert seen.hits("a", [b"1"]) == 0
