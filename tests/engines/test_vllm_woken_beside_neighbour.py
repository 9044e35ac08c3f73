"""A woken model whose memory an idle neighbour holds: only arriving memory ends its pause.

The order of events is read from the engine's own log; nothing is timed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from engine_server import REQUEST_DEADLINE_S, Request
from vllm_server import VllmServer, make_requests
from waiting import wait_until

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.timeout(900)

MIB = 1 << 20
DEVICE_MIB = 100
PAGE_MIB = 8
SHORT = Request([5, 6, 7], 8)
STARVED = "requests wait for blocks"
FED = "Blocks have come"
MISSED = "became runnable without a wake-up"


def name_of(model: str) -> str:
    return f"kvelastic_test_{os.getpid()}_{model}"


@pytest.fixture(scope="module")
def neighbours(tiny_model: Path, log_folder: Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Two models on one device: the first ranks before the second."""

    def start(model: str, **environment: str) -> VllmServer:
        return VllmServer(
            tiny_model,
            log_folder / f"neighbour_{model}.log",
            {
                "ENABLE_KVELASTIC": "true",
                "KVELASTIC_IPC_NAME": name_of(model),
                "KVELASTIC_LEDGER": f"kvelastic-test-{os.getpid()}",
                "KVELASTIC_HOST_MEMORY": f"{DEVICE_MIB}M",
                "KVELASTIC_PAGE_SIZE_MB": str(PAGE_MIB),
                "KVELASTIC_MAX_CACHED_TOKENS": "-1",
                "KVELASTIC_LOG_LEVEL": "DEBUG",
                "VLLM_SERVER_DEV_MODE": "1",  # /sleep and /wake_up
                **environment,
            },
            ["--kv-cache-memory-bytes", str(DEVICE_MIB * MIB)],
        )

    with ExitStack() as stack:
        a = stack.enter_context(start("aa", KVELASTIC_PRIORITY="10", KVELASTIC_LIMIT="60M"))
        b = stack.enter_context(start("bb"))
        yield a.wait_until_ready(), b.wait_until_ready()
        for server in (a, b):
            server.stop()
    segment.reap()
    ledger.reap()


def test_memory_released_by_idle_neighbour_resumes_waiting_request(neighbours) -> None:
    a, b = neighbours
    expected = a.complete(SHORT)
    for turn in range(3):
        a.post("/sleep?level=1")
        seed = 100 * turn
        while segment.inspect(name_of("bb")).usage["mapped_bytes"] <= (DEVICE_MIB - PAGE_MIB) * MIB:
            b.complete_all(make_requests(32, seed, shortest=400, longest=900))
            seed += 1
            assert seed % 100 < 20, "the neighbour does not fill the device"
        before = len(a.log.read_text())
        a.post("/wake_up")
        # It gives nothing up before the woken one has looked for memory and found none.
        core = b.processes()["core"]
        core.suspend()
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(a.complete, SHORT)
            try:
                wait_until(partial(_has_waited_for_memory, a, before))
                assert not answer.done()
            finally:
                core.resume()
            assert answer.result(timeout=REQUEST_DEADLINE_S) == expected
        said = a.log.read_text()[before:]
        assert FED in said[said.index(STARVED) :]
        assert MISSED not in said


def _has_waited_for_memory(server: VllmServer, after: int) -> bool:
    return STARVED in server.log.read_text()[after:]
