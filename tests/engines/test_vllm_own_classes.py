"""Classes that the user names in vLLM's settings stay in use under kvelastic."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm_server import PAGE_BYTES, VllmServer, make_requests
from waiting import DEADLINE_S

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(900)

NAME = f"kvelastic_own_{os.getpid()}"


def test_own_worker_and_scheduler_keep_their_methods(
    stock: VllmServer, tiny_model: Path, log_folder: Path, tmp_path: Path
) -> None:
    requests = make_requests(4, seed=7)
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": NAME,
        "PYTHONPATH": str(Path(__file__).parent),
        "TEST_OWN_CLASSES": str(tmp_path),
    }
    arguments = [
        "--worker-cls",
        "own_classes.OwnWorker",
        "--scheduler-cls",
        "own_classes.OwnScheduler",
    ]
    with VllmServer(tiny_model, log_folder / "own.log", environment, arguments) as server:
        server.wait_until_ready()
        segment.request(NAME, limit_bytes=3 * PAGE_BYTES, wait_s=DEADLINE_S)
        assert server.complete_all(requests) == stock.complete_all(requests)
        assert segment.inspect(NAME).usage["mapped_bytes"] <= 3 * PAGE_BYTES
    assert {path.name for path in tmp_path.iterdir()} >= {"worker", "scheduler"}
