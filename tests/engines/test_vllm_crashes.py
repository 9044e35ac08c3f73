"""Killed workers, engine cores and servers: nothing stays behind, and the next start works."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_server import PAGE_BYTES, VllmServer, make_requests
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(900)

NAME = f"kvelastic_crash_{os.getpid()}"
LONGEST_DELAY_S = 2.0


@pytest.fixture
def start(tiny_model, log_folder) -> Iterator[Callable[..., VllmServer]]:
    """Starts servers, all by one name, one after the other; kills what is left at the end."""
    servers: list[VllmServer] = []

    def start_next(**more: str) -> VllmServer:
        log = log_folder / f"crash_{os.getpid()}_{time.monotonic_ns()}.log"
        environment = {"ENABLE_KVELASTIC": "true", "KVELASTIC_IPC_NAME": NAME, **more}
        servers.append(VllmServer(tiny_model, log, environment))
        return servers[-1].wait_until_ready()

    yield start_next
    for server in servers:
        server.kill()
    segment.reap()


def segment_file() -> Path:
    return Path("/dev/shm") / NAME


@contextlib.contextmanager
def load_on(server: VllmServer) -> Iterator[None]:
    """Requests without end; that they fail once the server dies is what is expected."""
    requests = make_requests(64, seed=9, shortest=100, longest=600)
    done = threading.Event()

    def send(index: int) -> None:
        while not done.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
                server.complete(requests[index % len(requests)])
                index += 8

    threads = [threading.Thread(target=send, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


# All by one name: that a server starts here shows that what came before left nothing in its way.


@pytest.mark.parametrize(
    "victim", ["worker", "core", "api", pytest.param("all", marks=pytest.mark.soak)]
)
def test_server_killed_at_random_leaves_no_segment(start, victim) -> None:
    server = start()
    processes = server.processes()
    assert set(processes) == {"api", "core", "worker"}
    assert segment.inspect(NAME).status == "alive"
    delay_s = random.random() * LONGEST_DELAY_S
    with load_on(server):
        _wait_for_memory()
        time.sleep(delay_s)  # the random moment
        for process in processes.values() if victim == "all" else [processes[victim]]:
            process.kill()
        server.wait_until_gone()
    segment.reap()  # as the next kvctl, or the next start, does it
    assert not segment_file().exists(), f"killed after {delay_s:.3f} s"


def test_stopped_server_leaves_no_segment(start) -> None:
    server = start()
    assert server.complete_all(make_requests(4, seed=10))
    assert server.stop() == 0
    # Nobody had to look for it: vLLM kills its engine core, and the front end clears up after it.
    assert not segment_file().exists()


@pytest.mark.parametrize("tiers", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_stopped_worker_is_killed_by_its_engine(start, tmp_path, tiers) -> None:
    environment = {"KVELASTIC_IPC_TIMEOUT": "2", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1"}
    if tiers:
        environment["KVELASTIC_TIERS"] = f"disk:{tmp_path / 'disk'}:64M"
    server = start(**environment)
    worker = server.processes()["worker"]
    assert server.complete_all(make_requests(8, seed=11, shortest=300, longest=600))
    worker.suspend()
    segment.request(NAME, limit_bytes=PAGE_BYTES)  # what its scheduler misses it by
    wait_until(lambda: segment.inspect(NAME).ack["state"] == "failed")
    with load_on(server):
        server.process.wait(60)
    server.wait_until_gone()


def test_core_killed_during_sleep_ends_the_server(start) -> None:
    server = start(VLLM_SERVER_DEV_MODE="1")
    core = server.processes()["core"]
    core.suspend()  # so the call is under way when the core is killed
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(server.request, "/sleep", "POST")
        wait_until(lambda: server.connections() > 0)
        core.kill()
        status, text = call.result(DEADLINE_S)
    assert status == 500, text
    server.wait_until_gone()
    assert not segment_file().exists()


def _wait_for_memory() -> None:
    wait_until(lambda: segment.inspect(NAME).usage["mapped_bytes"] >= 3 * PAGE_BYTES)
