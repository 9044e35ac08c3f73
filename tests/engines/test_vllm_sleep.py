"""Sleep and wake: nothing held, nothing lost, the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_server import Request
from ledger_instance import Instance
from vllm_server import VllmServer, make_requests, worker_memory_bytes
from waiting import DEADLINE_S, stopped_during, wait_until

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.timeout(600)

LONG = Request([7, 8, 9], 900)


@pytest.fixture
def awake(elastic: VllmServer) -> Iterator[VllmServer]:
    """vLLM with kvelastic; woken again afterwards, whatever the test did."""
    yield elastic
    if elastic.process.poll() is None and elastic.is_sleeping():
        elastic.post("/wake_up")


def held_bytes(server: VllmServer, name: str) -> tuple[int, int]:
    """What the segment says, and what the operating system says."""
    mapped: int = segment.inspect(name).usage["mapped_bytes"]
    return mapped, worker_memory_bytes(server.processes()["worker"])


@pytest.mark.end_to_end
def test_sleep_unmaps_everything_and_wake_keeps_tokens(stock, awake, instance_name) -> None:
    requests = make_requests(12, seed=21)
    expected = stock.complete_all(requests)
    assert awake.complete_all(requests) == expected
    assert not awake.is_sleeping()
    assert held_bytes(awake, instance_name)[0] > 0

    awake.post("/sleep?level=1")
    assert awake.is_sleeping()
    assert held_bytes(awake, instance_name) == (0, 0)
    assert segment.inspect(instance_name).usage["asleep"] == 1
    awake.post("/sleep?level=1")  # again does nothing
    assert held_bytes(awake, instance_name) == (0, 0)

    awake.post("/wake_up")
    assert not awake.is_sleeping()
    assert segment.inspect(instance_name).usage["asleep"] == 0
    assert awake.complete_all(requests) == expected
    assert held_bytes(awake, instance_name)[0] > 0


def test_wake_by_tags_wakes_weights_before_cache(awake, instance_name) -> None:
    awake.post("/sleep?level=1")
    awake.post("/wake_up?tags=weights")
    assert awake.is_sleeping()
    assert segment.inspect(instance_name).usage["asleep"] == 1, "only the weights woke"
    awake.post("/wake_up?tags=kv_cache")
    assert not awake.is_sleeping()
    assert segment.inspect(instance_name).usage["asleep"] == 0


def test_level_0_keeps_the_cache(awake, instance_name) -> None:
    awake.complete(Request([5, 6, 7], 40))
    before = segment.inspect(instance_name).usage
    awake.post("/sleep?level=0")
    after = segment.inspect(instance_name).usage
    assert after["asleep"] == 0
    assert after["blocks_cached"] == before["blocks_cached"] > 0
    awake.post("/wake_up?tags=scheduling")


def test_request_during_sleep_is_served_after_wake(stock, awake, instance_name) -> None:
    requests = make_requests(4, seed=22)
    expected = stock.complete_all(requests)
    awake.post("/sleep?level=1")
    with ThreadPoolExecutor(len(requests)) as threads:
        before = awake.connections()  # vLLM's own figures stand still while it is paused
        answers = [threads.submit(awake.complete, request) for request in requests]
        wait_until(lambda: awake.connections() == before + len(requests))
        assert held_bytes(awake, instance_name) == (0, 0)
        assert not any(answer.done() for answer in answers)
        awake.post("/wake_up")
        assert [answer.result(timeout=120) for answer in answers] == expected


def test_operator_sleep_suspends_running_and_new_requests(stock, awake, instance_name) -> None:
    later = Request([11, 12, 13], 30)
    expected = stock.complete_all([LONG, later])
    with ThreadPoolExecutor(2) as threads:
        with stopped_during(
            awake.processes()["worker"],
            lambda: threads.submit(awake.complete, LONG),
            lambda: awake.metrics()["num_requests_running"] == 1,
            "it runs",
        ) as running:
            answer = segment.request(instance_name, asleep=True)
        assert answer.state in {"shrinking", "applied"}
        # Without another block the running request is preempted; it waits, and loses nothing.
        wait_until(lambda: held_bytes(awake, instance_name) == (0, 0))
        coming = threads.submit(awake.complete, later)
        wait_until(lambda: awake.metrics()["num_requests_waiting"] == 2)
        assert not awake.is_sleeping(), "vLLM itself knows nothing of it"
        segment.request(instance_name, asleep=False, wait_s=DEADLINE_S)
        assert [running.result(timeout=120), coming.result(timeout=120)] == expected


def test_segment_shows_vllm_asleep_after_waking_cache_alone(awake, instance_name) -> None:
    def engine_asleep() -> bool | None:
        return segment.inspect(instance_name).engine_asleep

    assert engine_asleep() is False
    awake.post("/sleep?level=1")
    assert engine_asleep() is True
    segment.request(instance_name, asleep=True, wait_s=DEADLINE_S)
    answer = segment.request(instance_name, asleep=False, wait_s=DEADLINE_S)
    assert (answer.asleep, answer.engine_asleep, awake.is_sleeping()) == (False, True, True)
    awake.post("/wake_up?tags=kv_cache")
    assert engine_asleep() is True
    awake.post("/wake_up")
    assert engine_asleep() is False


def test_vllm_wake_ends_the_operator_sleep(stock, awake, instance_name) -> None:
    request = Request([15, 16, 17], 20)
    segment.request(instance_name, asleep=True, wait_s=DEADLINE_S)
    awake.post("/sleep?level=1")
    awake.post("/wake_up")
    assert segment.inspect(instance_name).usage["asleep"] == 0
    assert awake.complete(request) == stock.complete(request)


def test_wake_without_room_is_refused_and_later_succeeds(stock, awake, instance_name) -> None:
    """What vLLM has reserved (its weights) is others' while it sleeps; here one has taken it."""
    request = Request([18, 19, 20], 20)
    expected = stock.complete(request)
    info = next(
        info
        for info in ledger.list_ledgers()
        if instance_name in {member.name for member in info.members}
    )
    reserved_bytes = segment_member(instance_name).reserve_bytes
    assert reserved_bytes > 0, "vLLM's workers hold nothing"
    awake.post("/sleep?level=1")
    with awake.refusing():
        with Instance(
            KVELASTIC_LEDGER=info.group,
            KVELASTIC_MIN=str(info.capacity_bytes),
            KVELASTIC_RESERVE=str(info.outside_bytes),
        ) as neighbour:
            for _ in range(2):
                status, answer = awake.request("/wake_up", "POST", 60)
                assert status == 500
                said = answer.decode()
                assert f"{neighbour.name} has" in said, said
                assert "reserved" in said, said
                assert awake.is_sleeping()
                assert segment.inspect(instance_name).usage["asleep"] == 1
                assert segment.inspect(instance_name).engine_asleep is True
                assert segment_member(instance_name).pledged_bytes == 0
        awake.post("/wake_up")
        assert not awake.is_sleeping()
        assert segment_member(instance_name).pledged_bytes == reserved_bytes
        assert awake.complete(request) == expected


def segment_member(name: str) -> ledger.Member:
    """An instance's place in its ledger."""
    members = (member for info in ledger.list_ledgers() for member in info.members)
    return next(member for member in members if member.name == name)
