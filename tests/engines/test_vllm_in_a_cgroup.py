"""A server in a memory cgroup that has room for the server itself and for little more.

The device is said to have far more memory than the cgroup. Requests want more KV cache than fits,
and computing them makes the server's own processes grow: some requests wait or are computed again,
and the kernel's OOM killer has nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import Request
from memory_cgroup import MemoryCgroup
from vllm_server import VllmServer, make_requests

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.timeout(600)

MIB = 1 << 20
ROOM_BYTES = 200 * MIB
PROMPT_TOKENS = 1700
MAX_TOKENS = 40
REQUESTS = 72
KV_BYTES_A_TOKEN = 2 << 10
WANTED_BYTES = REQUESTS * PROMPT_TOKENS * KV_BYTES_A_TOKEN
assert WANTED_BYTES > ROOM_BYTES


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    with MemoryCgroup.make() as made:
        yield made


def test_server_filling_its_cgroup_serves_without_oom_kill(
    cgroup: MemoryCgroup, tiny_model: Path, log_folder: Path
) -> None:
    name = f"kvelastic_cgroup_{os.getpid()}"
    requests = [
        Request(prompt[:PROMPT_TOKENS], MAX_TOKENS)
        for prompt, _ in make_requests(
            REQUESTS, seed=12, shortest=PROMPT_TOKENS, longest=PROMPT_TOKENS + 1
        )
    ]
    server = VllmServer(
        tiny_model,
        log_folder / "cgroup.log",
        {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": name,
            "KVELASTIC_LEDGER": name,
            "KVELASTIC_HOST_MEMORY": "8G",
        },
        [
            *("--kv-cache-memory-bytes", str(1 << 30)),
            *("--max-model-len", "2048"),
            *("--max-num-seqs", str(REQUESTS)),
        ],
    )
    with server:
        cgroup.add(server.process.pid)  # before it has children: they are born in it
        server.wait_until_ready()
        # What it loads and compiles for its first requests is none of what it needs for more.
        expected = server.complete_all(requests[:8], at_once=2)
        segment.request(name, limit_bytes=0, wait_s=30)
        resting_bytes = cgroup.held_bytes()
        segment.request(name, limit_bytes=1 << 30, wait_s=30)
        cgroup.limit(resting_bytes + ROOM_BYTES)

        answers = server.complete_all(requests, at_once=REQUESTS)
        assert [len(tokens) for tokens in answers] == [MAX_TOKENS] * REQUESTS
        assert answers[:8] == expected
        assert server.complete(requests[0]) == expected[0], "it is not alive any more"
        assert cgroup.oom_kills() == 0
        held_bytes = segment.inspect(name).usage["mapped_bytes"]
        assert ROOM_BYTES / 8 < held_bytes < ROOM_BYTES, "it has not used what there was"
        server.stop()
    segment.reap()
    ledger.reap()
