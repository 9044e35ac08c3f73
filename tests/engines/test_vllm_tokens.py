"""The same requests, the same tokens: vLLM on kvelastic against stock vLLM."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_server import Request
from vllm_server import KV_BYTES, PAGE_BYTES, make_requests, worker_memory_bytes, zero_worker_memory
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(900)


def differing(left: list[list[int]], right: list[list[int]]) -> int:
    assert len(left) == len(right)
    return sum(one != other for one, other in zip(left, right, strict=True))


def usage(name: str) -> dict:
    return segment.inspect(name).usage


def first_answer(name: str, limit_bytes: int) -> str:
    """Request for a limit; the state of the first answer, which may be before it is reached."""
    with segment.open_writable(name) as opened:
        with opened.writing() as record:
            revision = record.write_request(limit_bytes=limit_bytes)
        assert opened.control_block.wait_ack(revision, 10.0), "no answer to a request in 10 s"
        return opened.control_block.read_ack()["state"]


@pytest.mark.end_to_end
def test_same_tokens_in_alternation_with_prefix_hits(stock, elastic) -> None:
    hits = [server.metrics()["prefix_cache_hits_total"] for server in (stock, elastic)]
    for seed in (1, 2):
        requests = make_requests(24, seed)
        for _ in range(2):  # the second time, every prompt is in the prefix cache
            expected = stock.complete_all(requests)
            assert differing(elastic.complete_all(requests), expected) == 0
    gained = [
        server.metrics()["prefix_cache_hits_total"] - before
        for server, before in zip((stock, elastic), hits, strict=True)
    ]
    assert gained[1] > 1000
    # Which requests overlap in time differs a little from run to run, and so do the hits.
    assert gained[1] == pytest.approx(gained[0], rel=0.2)


@pytest.mark.end_to_end
def test_zeroed_memory_changes_the_tokens(stock, elastic, instance_name) -> None:
    """The control: the comparison above does see bad KV."""
    requests = make_requests(16, seed=3, shortest=100)
    expected = stock.complete_all(requests)
    assert differing(elastic.complete_all(requests), expected) == 0
    assert zero_worker_memory(elastic.processes()["worker"]) >= PAGE_BYTES
    assert differing(elastic.complete_all(requests), expected) >= len(requests) // 2

    # A limit of one page drops what is cached, but in that page, all of which one request needs:
    # from then on the answers are right again.
    segment.request(instance_name, limit_bytes=PAGE_BYTES, wait_s=DEADLINE_S)
    elastic.complete(Request([5] * 990, 1))
    segment.request(instance_name, limit_bytes=KV_BYTES, wait_s=DEADLINE_S)
    assert differing(elastic.complete_all(requests), expected) == 0


@pytest.mark.end_to_end
def test_limit_below_working_set_preempts_and_keeps_tokens(stock, elastic, instance_name) -> None:
    requests = make_requests(32, seed=4, shortest=100, longest=600)
    expected = stock.complete_all(requests)
    preempted = elastic.metrics()["num_preemptions_total"]
    answer = segment.request(instance_name, limit_bytes=3 * PAGE_BYTES, wait_s=DEADLINE_S)
    assert (answer.state, answer.effective_limit_bytes) == ("applied", 3 * PAGE_BYTES)
    assert differing(elastic.complete_all(requests), expected) == 0
    assert elastic.metrics()["num_preemptions_total"] > preempted
    assert usage(instance_name)["mapped_bytes"] <= 3 * PAGE_BYTES
    assert worker_memory_bytes(elastic.processes()["worker"]) <= 3 * PAGE_BYTES


@pytest.mark.end_to_end
def test_limit_lowered_while_idle_evicts_and_unmaps(elastic, instance_name) -> None:
    worker = elastic.processes()["worker"]
    elastic.complete_all(make_requests(16, seed=5, shortest=200))
    wait_until(
        lambda: usage(instance_name)["mapped_bytes"] == worker_memory_bytes(worker),
        "parked pages are unmapped meanwhile; then both are the same",
    )
    before = usage(instance_name)
    assert before["cached_bytes"] > 4 * PAGE_BYTES
    assert before["blocks_in_use"] == 0

    answer = segment.request(instance_name, limit_bytes=2 * PAGE_BYTES, wait_s=DEADLINE_S)
    assert (answer.state, answer.over_bytes) == ("applied", 0)
    # At once: nothing runs in the engine that could do it later.
    assert worker_memory_bytes(worker) <= 2 * PAGE_BYTES
    after = usage(instance_name)
    assert after["mapped_bytes"] <= 2 * PAGE_BYTES
    assert 0 < after["cached_bytes"] < before["cached_bytes"]


def test_parked_pages_are_unmapped_when_idle(elastic, instance_name) -> None:
    requests = make_requests(16, seed=6, shortest=200)
    elastic.complete_all(requests)
    wait_until(lambda: usage(instance_name)["parked_bytes"] == 0, "parked pages stayed")


def test_oversized_request_waits_for_limit_without_spinning(stock, elastic, instance_name) -> None:
    # 31 blocks are in one page beside the null block; the last tokens need a 32nd.
    request = Request([3 + index % 500 for index in range(990)], 30)
    expected = stock.complete(request)
    segment.request(instance_name, limit_bytes=PAGE_BYTES, wait_s=DEADLINE_S)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(elastic.complete, request)
        found = elastic.processes()
        deadline = time.monotonic() + DEADLINE_S
        wait_until(lambda: elastic.metrics()["num_requests_waiting"] == 1)
        _wait_until_calm(list(found.values()), deadline)
        assert not answer.done()
        segment.request(instance_name, limit_bytes=KV_BYTES, wait_s=DEADLINE_S)
        assert answer.result(timeout=DEADLINE_S) == expected


def _wait_until_calm(processes: list, deadline: float) -> None:
    """Until the server's processes use less than a quarter of one core together for a second."""
    while True:
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        started = time.monotonic()
        time.sleep(1)
        used = sum(sum(process.cpu_times()[:2]) for process in processes) - before
        if used / (time.monotonic() - started) < 0.25:
            return
        assert time.monotonic() < deadline, f"{used} s of processor time in a second of waiting"


def test_limit_changed_at_random_under_load(stock, elastic, instance_name, soak_seconds) -> None:
    requests = make_requests(32, seed=7, shortest=100, longest=600)
    expected = stock.complete_all(requests)
    pick = random.Random(8)
    done = threading.Event()
    states: list[str] = []
    gauges: list[float] = []

    def change_limits() -> None:
        while not done.is_set():
            limit = pick.choice([1, 2, 3, 4, 6, 8, 16, 32]) * PAGE_BYTES
            states.append(first_answer(instance_name, limit))
            gauges.append(elastic.metrics()["kv_cache_usage_perc"])
            done.wait(pick.random() * 0.3)

    changer = threading.Thread(target=change_limits)
    changer.start()
    try:
        deadline = time.monotonic() + soak_seconds
        rounds = 0
        while time.monotonic() < deadline or rounds < 2:
            assert differing(elastic.complete_all(requests), expected) == 0
            rounds += 1
    finally:
        done.set()
        changer.join()
    assert set(states) <= {"applied", "shrinking"}
    assert {"applied", "shrinking"} <= set(states)
    assert min(gauges) >= 0
    assert max(gauges) <= 1
    final = segment.request(instance_name, limit_bytes=4 * PAGE_BYTES, wait_s=DEADLINE_S)
    assert (final.state, final.over_bytes) == ("applied", 0)
    assert elastic.process.poll() is None


def test_segment_shows_engine_model_and_usage(elastic, instance_name) -> None:
    info = segment.inspect(instance_name)
    assert (info.status, info.header["engine"], info.header["model"]) == ("alive", "vLLM", "m")
    assert info.usage["blocks_total"] == KV_BYTES // (64 << 10)
    log = elastic.log_but_for_refusals()
    assert "Traceback" not in log
    assert "IntegrityError" not in log
