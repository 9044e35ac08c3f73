"""Everything at once, at random: load, limits, sleep, standing, trims; and, in the soak, killings.

One thread is the operator, a few are clients. A server that is killed, or whose worker is stopped
for too long, has to end by itself, and leaves nothing; the next one starts by the same name.

    CHAOS_SEED=7 CHAOS_SECONDS=120 pytest --soak tests/engines/test_vllm_chaos.py

What the operator does follows from the seed; when it meets what is going on does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections import Counter

import psutil
import pytest
from chaos import (
    SEED,
    SOAK_S,
    Clients,
    Operator,
    check_that_nothing_is_left,
    disturb_for,
    live_and_die,
    report,
)
from known_answers import know
from test_vllm_sleep_cycles import call, fall_asleep, held_bytes, wake_up, workers_of
from vllm_server import KV_BYTES, VllmServer, make_requests

from kvelastic.errors import SegmentError
from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(2400)

SHORT_S = 8.0

NAME = f"kvelastic_chaos_{os.getpid()}"
GROUP = f"chaos-{os.getpid()}"
IPC_TIMEOUT_S = 4
STEP_TIMEOUT_S = 20
"""vLLM's own patience with a worker."""
STOPPED_S = IPC_TIMEOUT_S + 3
END_DEADLINE_S = 90.0
"""Until a server has ended by itself after its worker or engine core was killed or stopped."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_TIMEOUT_S),
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": NAME,
    "KVELASTIC_LEDGER": GROUP,
    "KVELASTIC_IPC_TIMEOUT": str(IPC_TIMEOUT_S),
    "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
    "KVELASTIC_SANITY_CHECK": "true",
}
ENDS = ("core", "worker", "stopped", "stopped for ever")
"""What is killed, and that a worker is stopped; each comes once before any comes twice."""
VLLM_WAYS = ("keep", "abort", "wait")


class VllmOperator(Operator):
    """Also by vLLM's own `/sleep`, in its three modes."""

    KV_BYTES = KV_BYTES
    server: VllmServer

    def __init__(self, server: VllmServer, name: str, clients: Clients, pick: random.Random):
        super().__init__(server, name, clients, pick)
        self._workers = workers_of(server)
        self._has_sleep_routes = call(server, "GET", "/is_sleeping")[0] == 200

    def held_bytes(self) -> int:
        return held_bytes(self._workers)

    def own_way(self) -> str:
        return self.pick.choice(VLLM_WAYS) if self._has_sleep_routes else "request"

    def fall_asleep(self, way: str) -> None:
        fall_asleep(self.server, self.name, way)

    def wake_up(self, way: str) -> None:
        wake_up(self.server, self.name, way)

    def kill(self, how: str) -> None:
        kill_or_stop(self.server, self.name, how, self.clients.counts, self.pick)


# --- the end of a server ------------------------------------------------------------------------


def kill_or_stop(
    server: VllmServer, name: str, how: str, counts: Counter[str], pick: random.Random
) -> None:
    """End a server by what happens to one of its processes. Returns when it has ended."""
    workers = workers_of(server)
    server.processes()  # who they are, and what memory they share
    counts[how] += 1
    if how.startswith("stopped") and not _stop(pick.choice(workers), name, how):
        counts["stopped, and not missed"] += 1
        how = "core" if how == "stopped" else how
    if how == "core":
        server.processes()["core"].kill()
    elif how == "worker":
        pick.choice(workers).kill()
    begin_s = time.monotonic()
    try:
        server.process.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        what = f"{how}: the server lives on after {END_DEADLINE_S} s"
        raise AssertionError(f"{what}, see {server.log}: {server.tail()}") from None
    server.wait_until_gone()
    took_s = round(time.monotonic() - begin_s)
    counts["longest end, s"] = max(counts["longest end, s"], took_s)


def _stop(worker: psutil.Process, name: str, how: str) -> bool:
    """Stop a worker for longer than its scheduler waits for it; answers whether it was missed.

    It is missed where it has something to carry out for kvelastic: to give memory back, say. Where
    there is nothing of that kind, vLLM goes on as if nothing had been, once it is resumed.
    """
    with contextlib.suppress(SegmentError):
        segment.request(name, limit_bytes=KV_BYTES, wait_s=5)
    time.sleep(1)  # pages are mapped ahead of demand
    worker.suspend()
    end_s = time.monotonic() + STOPPED_S
    missed = False
    while time.monotonic() < end_s:
        try:
            segment.request(name, limit_bytes=0, trim=True)
            missed = missed or segment.inspect(name).ack["state"] == "failed"
        except SegmentError:  # it has ended
            missed = True
        time.sleep(0.2)
    if how == "stopped":
        with contextlib.suppress(psutil.Error):
            worker.resume()
    return missed


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.end_to_end
def test_random_requests_under_load(stock, elastic, instance_name, capsys) -> None:
    pick = random.Random(SEED)
    with Clients(know(stock, make_requests(20, seed=31, longest=400))) as clients:
        operator = VllmOperator(elastic, instance_name, clients, pick)
        disturb_for(operator, SHORT_S)
    clients.check()
    report(capsys, SHORT_S, clients)


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2], ids=["one_worker", "two_workers"])
def test_random_operations_crashes_and_load(tiny_model, log_folder, capsys, workers) -> None:
    with capsys.disabled():
        print(f"\nchaos, {workers} workers: CHAOS_SEED={SEED}, logs in {log_folder}")
    pick = random.Random(SEED)
    arguments = ["--tensor-parallel-size", str(workers)]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if workers == 2 else {}
    with VllmServer(tiny_model, log_folder / "chaos_stock.log", binding, arguments) as stock:
        known = know(stock.wait_until_ready(), make_requests(48, seed=32, longest=550))
        stock.stop()
    end_s = time.monotonic() + SOAK_S
    ends: list[str] = []
    with contextlib.ExitStack() as at_last, Clients(known) as clients:
        at_last.callback(segment.reap)  # where the test has failed
        while time.monotonic() < end_s:
            log = log_folder / f"chaos_{workers}_{clients.counts['starts']}.log"
            ends = ends or pick.sample(ENDS, len(ENDS))
            with VllmServer(tiny_model, log, ENVIRONMENT | binding, arguments) as server:
                operator = VllmOperator(server.wait_until_ready(), NAME, clients, pick)
                live_and_die(operator, ends, end_s)
            check_that_nothing_is_left(NAME, GROUP, clients.counts)
            text = log.read_text(errors="replace")
            assert "sanity check failed" not in text, log
            assert "IntegrityError" not in text, log
            assert not clients.broken, clients.broken
    clients.check()
    report(capsys, SOAK_S, clients)
