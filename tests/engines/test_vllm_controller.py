"""A real vLLM behind the controller: requests, sleep, and a request that wakes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vllm_server import VllmServer, make_requests, worker_memory_bytes

from kvelastic.shared import segment

sys.path.append(str(Path(__file__).parents[1] / "controller"))
from running import Controller

MODEL = "m"
"""The name that vLLM serves it by."""


@pytest.mark.end_to_end
def test_request_through_controller_wakes_sleeping_vllm(
    stock: VllmServer, elastic: VllmServer, instance_name: str
) -> None:
    (request,) = make_requests(1, seed=51)
    body = {
        "model": MODEL,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    model = {
        "name": MODEL,
        "engine": "vllm",
        "url": f"http://127.0.0.1:{elastic.port}",
        "instance": instance_name,
    }
    expected = stock.complete(request)
    worker = elastic.processes()["worker"]
    with Controller({"models": [model], "sleep": {"min_sleep": 0}}) as front:

        def tokens() -> list[int]:
            answer = front.post("/v1/completions", body, timeout=300)
            assert answer.status_code == 200, answer.text
            token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
            return token_ids

        assert tokens() == expected
        assert worker_memory_bytes(worker) > 0
        assert front.post(f"/action/sleep/{MODEL}").json()["success"]
        assert elastic.is_sleeping()
        assert worker_memory_bytes(worker) == 0
        assert segment.inspect(instance_name).usage["mapped_bytes"] == 0
        assert tokens() == expected
        assert front.state(MODEL) == "awake"
        assert not elastic.is_sleeping()
