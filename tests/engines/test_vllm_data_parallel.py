"""Data parallel of a dense model: each rank is an engine and an instance of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_server import Request
from vllm_server import PAGE_BYTES, VllmServer, make_requests

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.timeout(900)

NAME = f"kvelastic_dp_{os.getpid()}"
NAMES = {NAME, f"{NAME}_dp1"}
ELASTIC = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": NAME,
    "KVELASTIC_MAX_CACHED_TOKENS": "-1",
}


def instances() -> dict[str, dict[str, int]]:
    """Usage of the ranks' instances."""
    found = {}
    for name in NAMES & {info.name for info in segment.list_segments()}:
        with segment.open_readonly(name) as seg:
            found[name] = seg.control_block.read_usage()
    return found


def test_each_data_parallel_rank_has_its_own_limit(
    stock: VllmServer, tiny_model: Path, log_folder: Path
) -> None:
    requests = [
        Request(prompt, 33) for prompt, _ in make_requests(12, seed=41, shortest=200, longest=500)
    ]
    expected = stock.complete_all(requests)
    two = ["--data-parallel-size", "2"]
    with VllmServer(tiny_model, log_folder / "data_parallel.log", ELASTIC, two) as server:
        server.wait_until_ready()
        assert set(instances()) == NAMES
        assert server.complete_all(requests, at_once=8) == expected
        for name, usage in instances().items():
            assert usage["mapped_bytes"] > PAGE_BYTES, name
        segment.request(f"{NAME}_dp1", limit_bytes=4 * PAGE_BYTES, wait_s=5)
        assert instances()[f"{NAME}_dp1"]["mapped_bytes"] <= 4 * PAGE_BYTES
        assert server.complete_all(requests, at_once=8) == expected
        server.stop()
    segment.reap()
    ledger.reap()
    assert instances() == {}
