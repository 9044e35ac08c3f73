"""Asleep and awake again, time after time and under traffic: nothing is lost, and nothing grows.

Clients ask without a pause while a server is put to sleep in every way there is: by vLLM's own
`/sleep` in its three modes, and by the operator's request, which is for the KV cache alone.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import pytest
from asking_threads import AskingThreads
from known_answers import Answered, Known, Times, ask, know
from vllm_server import VllmServer, make_requests, worker_memory_bytes

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(1800)

NAME = f"kvelastic_cycles_{os.getpid()}"
WAYS = ("keep", "request", "abort", "request", "wait", "request")
"""The modes of vLLM's `/sleep`, and the operator's request; taken in turn."""
CLIENTS = 4
SLEEP_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 120.0
CYCLES_TO_WARM_UP = 10
GROWTH_PART = 0.03
GROWTH_BYTES = 16 << 20
"""A process may grow by this or by `GROWTH_PART` of what it was, whichever is more."""


def call(server: VllmServer, method: str, path: str) -> tuple[int, bytes]:
    return server.request(path, method, SLEEP_DEADLINE_S)


def fall_asleep(server: VllmServer, name: str, way: str) -> None:
    """Put the server to sleep in one of `WAYS`. Returns once that was answered."""
    if way == "request":
        answer = segment.request(name, asleep=True, wait_s=SLEEP_DEADLINE_S)
        assert (answer.state, answer.asleep) == ("applied", True), answer
    else:
        status, body = call(server, "POST", f"/sleep?level=1&mode={way}")
        assert status == 200, body
        assert b"true" in call(server, "GET", "/is_sleeping")[1]


def wake_up(server: VllmServer, name: str, way: str) -> None:
    if way == "request":
        answer = segment.request(name, asleep=False, wait_s=SLEEP_DEADLINE_S)
        assert (answer.state, answer.asleep) == ("applied", False), answer
    else:
        status, body = call(server, "POST", "/wake_up")
        assert status == 200, body
        assert b"false" in call(server, "GET", "/is_sleeping")[1]


def workers_of(server: VllmServer) -> list[psutil.Process]:
    server.processes()  # has the server remember them
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "Worker" in " ".join(child.cmdline())]


def held_bytes(workers: Sequence[psutil.Process]) -> int:
    """What the operating system holds for the KV caches of all workers together."""
    return sum(worker_memory_bytes(worker) for worker in workers)


@dataclass
class Traffic(AskingThreads):
    """Clients that ask all the time."""

    server: VllmServer
    known: Sequence[Known]
    answered: list[Answered] = field(default_factory=list)
    failed: list[Exception] = field(default_factory=list)
    sent: int = 0

    def seeds(self) -> range:
        return range(CLIENTS)

    def _send(self, pick: random.Random) -> None:
        while not self._done.is_set():
            self.sent += 1
            try:
                self.answered.append(ask(self.server, pick.choice(self.known)))
            except Exception as error:  # whatever it is, the test fails with it
                self.failed.append(error)


def cycle(
    server: VllmServer,
    name: str,
    way: str,
    workers: Sequence[psutil.Process],
    late: Sequence[Known],
) -> dict[str, int]:
    """Asleep and awake once; answers the bytes that each process had resident while asleep."""
    fall_asleep(server, name, way)
    _wait_until_nothing_is_held(name, workers)
    with ThreadPoolExecutor(len(late)) as threads:
        waiting = [threads.submit(ask, server, known) for known in late]
        try:
            until_s = time.monotonic() + 0.3
            while time.monotonic() < until_s:
                assert held_bytes(workers) == 0
                assert segment.inspect(name).usage["mapped_bytes"] == 0
                time.sleep(0.02)
            assert not any(answer.done() for answer in waiting)
            found = server.processes()
            resident = {who: found[who].memory_info().rss for who in ("core", "worker")}
        finally:
            wake_up(server, name, way)
        for answer in waiting:
            assert answer.result(ANSWER_DEADLINE_S).tokens == answer.result().known.tokens
    return resident


def _wait_until_nothing_is_held(name: str, workers: Sequence[psutil.Process]) -> None:
    deadline_s = time.monotonic() + SLEEP_DEADLINE_S
    while held_bytes(workers) or segment.inspect(name).usage["mapped_bytes"]:
        assert time.monotonic() < deadline_s, segment.inspect(name)
        time.sleep(0.005)


def run_cycles(server: VllmServer, name: str, known: Sequence[Known], count: int) -> str:
    """So many cycles under traffic, with all that must hold; answers what happened in a line."""
    pick = random.Random(count)
    workers = workers_of(server)
    aborts, resident = Times(), []
    started_s = time.monotonic()
    with Traffic(server, known) as traffic:
        for way in itertools.islice(itertools.cycle(WAYS), count):
            time.sleep(pick.uniform(0.1, 1.0))
            begin_s = time.monotonic()
            resident.append(cycle(server, name, way, workers, pick.sample(known, 2)))
            if way == "abort":
                aborts.append((begin_s, time.monotonic()))
    assert not traffic.failed
    assert len(traffic.answered) == traffic.sent
    wrong = [answer for answer in traffic.answered if not answer.is_right]
    assert not wrong, f"{len(wrong)} answers have wrong tokens, such as {wrong[0]}"
    cut = [answer for answer in traffic.answered if not answer.is_full]
    assert all(aborts.overlap(answer.sent_s, answer.ended_s) for answer in cut), cut
    assert len(traffic.answered) > len(cut)
    growth = _growth(resident) if count > CYCLES_TO_WARM_UP else "not looked at"
    return (
        f"{count} cycles in {time.monotonic() - started_s:.0f} s, {traffic.sent} requests and "
        f"{2 * count} sent to a sleeping server, {len(cut)} aborted; growth: {growth}"
    )


def _growth(resident: Sequence[dict[str, int]]) -> str:
    early, last = resident[CYCLES_TO_WARM_UP - 1], resident[-1]
    for who, before in early.items():
        allowed = max(GROWTH_BYTES, int(before * GROWTH_PART))
        course = [each[who] >> 20 for each in resident]
        assert last[who] - before <= allowed, f"{who} grew, in MiB: {course}"
    return ", ".join(f"{who} {(last[who] - early[who]) / 2**20:+.1f} MiB" for who in early)


def test_a_few_cycles_under_traffic(stock, elastic, instance_name, capsys) -> None:
    known = know(stock, make_requests(32, seed=21, longest=400))
    summary = run_cycles(elastic, instance_name, known, 3)
    with capsys.disabled():
        print(f"\nsleep cycles: {summary}")


@pytest.mark.soak
def test_fifty_cycles_under_traffic_leak_no_memory(stock, tiny_model, log_folder, capsys):
    known = know(stock, make_requests(32, seed=21, longest=400))
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": NAME,
        "KVELASTIC_LEDGER": os.environ["KVELASTIC_LEDGER"],
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
        "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
        "KVELASTIC_SANITY_CHECK": "true",
        # Else the worker keeps code for every size of batch it has met, as stock vLLM's does: about
        # 4 MiB a cycle, which would hide what kvelastic might leak.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
    }
    with VllmServer(tiny_model, log_folder / "cycles.log", environment) as server:
        summary = run_cycles(server.wait_until_ready(), NAME, known, 50)
        assert server.stop() == 0
    with capsys.disabled():
        print(f"\nsleep cycles: {summary}")
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log
    assert "sanity check failed" not in log
