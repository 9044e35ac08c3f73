"""Tensor parallel: two workers, one pool; a map is one operation over both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_server import START_DEADLINE_S, Request
from killed_engines import kill_group
from simulated_machine import SimulatedMachine
from vllm_server import (
    PAGE_BYTES,
    VllmServer,
    engine_environment,
    make_requests,
    worker_memory_bytes,
)

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.timeout(900)

NAME = f"kvelastic_tp_{os.getpid()}"
TWO_RANKS = ["--tensor-parallel-size", "2"]
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""Without it vLLM wants a NUMA node for each rank."""
IPC_TIMEOUT_S = 5.0
ELASTIC = {
    **BOUND,
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": NAME,
    "KVELASTIC_IPC_TIMEOUT": str(IPC_TIMEOUT_S),
    "KVELASTIC_MAX_CACHED_TOKENS": "-1",
    "KVELASTIC_MIN_RESERVED_PAGES": "0",
    "KVELASTIC_MAX_RESERVED_PAGES": "0",
    # What two ranks and the record say is compared: no page may go between one look and the next.
    "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
    "VLLM_SERVER_DEV_MODE": "1",
}
REQUESTS = [
    Request(prompt, 33) for prompt, _ in make_requests(12, seed=31, shortest=290, longest=291)
]
"""Two of a rank's pages have 127 blocks for them. All prompts fit, in 123; each request then fills
a block more than its prompt does, with its thirty-first token. So requests that come together are
preempted. Two ranks on two cores make a dozen steps a second: few requests, short answers."""
ENDED_S = 60.0
"""How long a server may take to end after one of its workers failed."""


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What stock vLLM answers with two ranks: sums over ranks differ from those of one."""
    folder = tmp_path_factory.mktemp("stock_tp")
    (folder / "requests.json").write_text(json.dumps(REQUESTS))
    program = Path(__file__).parents[1] / "programs" / "inprocess_engine.py"
    requests, answers = folder / "requests.json", folder / "tokens.json"
    engine = subprocess.Popen(
        [sys.executable, program, tiny_model, requests, answers, "2"],
        env=engine_environment(**BOUND),
        start_new_session=True,
    )
    try:
        assert engine.wait(START_DEADLINE_S) == 0
    finally:
        kill_group(engine)
    tokens: list[list[int]] = json.loads((folder / "tokens.json").read_text())
    return tokens


@pytest.fixture(scope="module")
def parallel(tiny_model: Path, log_folder: Path) -> Iterator[VllmServer]:
    """One server for all tests but those that end one; the last test ends this."""
    with VllmServer(tiny_model, log_folder / "parallel.log", ELASTIC, TWO_RANKS) as server:
        yield server.wait_until_ready()


def held_bytes_per_rank(server: VllmServer) -> list[int]:
    processes = server.processes()
    return [worker_memory_bytes(processes[name]) for name in ("worker0", "worker1")]


def is_everything_released() -> bool:
    alive = [info for info in segment.list_segments() if info.name == NAME]
    members = [m.name for info in ledger.list_ledgers() for m in info.members if m.name == NAME]
    return not alive and not members


def wait_for_exit(server: VllmServer) -> str:
    """The server ends by itself; answers what it printed."""
    server.process.wait(ENDED_S)
    server.wait_until_gone()
    segment.reap()
    ledger.reap()
    assert is_everything_released()
    return server.log.read_text(errors="replace")


def test_two_ranks_grow_shrink_and_sleep_together(parallel: VllmServer, expected) -> None:
    assert held_bytes_per_rank(parallel) == [PAGE_BYTES, PAGE_BYTES], (
        "the null block's page in each"
    )
    assert parallel.complete_all(REQUESTS) == expected
    held = held_bytes_per_rank(parallel)
    usage = segment.inspect(NAME).usage
    assert held[0] == held[1] > 2 * PAGE_BYTES
    assert usage["mapped_bytes"] == sum(held), "what the device gives, both copies"
    assert usage["page_bytes"] == 2 * PAGE_BYTES

    # Two of a rank's pages, in two ranks: below the working set, with preemptions.
    answer = segment.request(NAME, limit_bytes=4 * PAGE_BYTES, wait_s=10)
    assert (answer.state, answer.mapped_bytes) == ("applied", 4 * PAGE_BYTES)
    assert held_bytes_per_rank(parallel) == [2 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert parallel.complete_together(REQUESTS) == expected
    assert sum(held_bytes_per_rank(parallel)) <= 4 * PAGE_BYTES
    assert parallel.metrics()["num_preemptions_total"] > 0
    segment.request(NAME, limit_bytes=1 << 30, wait_s=10)

    parallel.post("/sleep?level=1")
    assert held_bytes_per_rank(parallel) == [0, 0]
    parallel.post("/wake_up")
    assert parallel.complete_all(REQUESTS) == expected
    (member,) = [m for i in ledger.list_ledgers() for m in i.members if m.name == NAME]
    assert member.granted_bytes == segment.inspect(NAME).usage["mapped_bytes"]


def test_two_gpus_have_equal_usage_and_matching_ledgers(
    tiny_model: Path, tmp_path: Path, expected
) -> None:
    """Two simulated GPUs, a rank on each: what is granted is granted on both, or on none."""
    name = f"{NAME}_gpus"
    with SimulatedMachine(tmp_path, devices=2, memory_bytes=256 << 20) as machine:
        environment = ELASTIC | machine.engine_environment() | {"KVELASTIC_IPC_NAME": name}
        with VllmServer(tiny_model, tmp_path / "gpus.log", environment, TWO_RANKS) as server:
            server.wait_until_ready()

            def held() -> list[int]:
                return [machine.used_bytes(device) for device in (0, 1)]

            def granted() -> list[int]:
                return [
                    member.granted_bytes
                    for info in ledger.list_ledgers()
                    for member in info.members
                    if member.name == name
                ]

            assert held() == [PAGE_BYTES, PAGE_BYTES]
            assert server.complete_all(REQUESTS) == expected
            assert held()[0] == held()[1] > 2 * PAGE_BYTES
            assert granted() == held()
            assert segment.inspect(name).usage["mapped_bytes"] == sum(held())
            answer = segment.request(name, limit_bytes=4 * PAGE_BYTES, wait_s=10)
            assert (answer.state, held()) == ("applied", [2 * PAGE_BYTES] * 2)
            assert server.complete_all(REQUESTS) == expected
            assert max(held()) <= 2 * PAGE_BYTES
            server.post("/sleep?level=1")
            assert held() == [0, 0]
            server.post("/wake_up")
            assert held() == [PAGE_BYTES, PAGE_BYTES]
            assert server.stop() == 0
        assert held() == [0, 0]


def test_hung_rank_fails_requests_within_the_deadline(parallel: VllmServer) -> None:
    parallel.complete_all(REQUESTS)
    assert held_bytes_per_rank(parallel)[0] > PAGE_BYTES
    worker = parallel.processes()["worker1"]
    worker.send_signal(signal.SIGSTOP)
    while worker.status() != psutil.STATUS_STOPPED:  # its threads run on for a moment
        pass
    named = f"worker {worker.pid} (rank 1) did not answer in {IPC_TIMEOUT_S * 1000:.0f} ms"
    since = time.monotonic()
    try:
        answer = segment.request(NAME, limit_bytes=2 * PAGE_BYTES, wait_s=60)
        assert answer.state == "failed"
        assert named in answer.reason
        assert time.monotonic() - since < 4 * IPC_TIMEOUT_S, "and this machine may be busy"
        # The engine hears of it when it wants blocks, and ends: no request hangs.
        with pytest.raises((AssertionError, OSError)):
            parallel.complete(Request([9 + index % 400 for index in range(900)], 4))
    finally:
        worker.send_signal(signal.SIGCONT)
    assert named in wait_for_exit(parallel)


def test_killed_rank_ends_the_server(tiny_model: Path, log_folder: Path) -> None:
    with VllmServer(tiny_model, log_folder / "killed.log", ELASTIC, TWO_RANKS) as server:
        server.wait_until_ready()
        server.processes()["worker1"].kill()
        assert "Executor failed" in wait_for_exit(server)
