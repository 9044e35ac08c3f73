"""A real vLLM as a replica of Ray Serve: stock's tokens, a sleep, and a killed engine core."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs
from vllm_server import BLOCK_TOKENS, KV_BYTES, MAX_MODEL_TOKENS, VLLM, VllmServer, make_requests
from waiting import DEADLINE_S, wait_until

sys.path.append(str(Path(__file__).parents[1] / "cluster"))
from ray_hosts import RayHosts

pytestmark = [needs.ray, needs.hosts]


def test_replica_matches_stock_after_sleep_and_core_crash(
    stock: VllmServer, tiny_model: Path
) -> None:
    arguments = [
        "--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1",
        "--port", "{port}", "--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", "16",
        "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_CI_ENV": "1"}
    model = {
        "name": "m",
        "command": [str(VLLM), "serve", str(tiny_model), *arguments],
        "env": {**offline, "VLLM_SERVER_DEV_MODE": "1", "KVELASTIC_HOST_MEMORY": "256M"},
        "guarantee": "16M",
        "num_cpus": 0.5,
    }
    requests = [stock.decided(request) for request in make_requests(6, seed=39)]
    expected = [stock.complete(request) for request in requests]
    bodies = [
        {
            "model": "m",
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": bool(number % 2),
        }
        for number, request in enumerate(requests)
    ]
    with RayHosts(1) as cluster:
        config = {"models": [model], "sleep": {"min_sleep": 0}, "health": {"timeout": 5}}
        cluster.deploy({**config, "front": {"retry_for": DEADLINE_S}})

        def tokens_of(body: dict[str, object]) -> list[int]:
            answer = cluster.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            if not body["stream"]:
                return list(answer.json()["choices"][0]["token_ids"])
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]"
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            return [token for choice in choices for token in choice.get("token_ids") or []]

        def all_tokens() -> list[list[int]]:
            with ThreadPoolExecutor(len(bodies)) as threads:
                return list(threads.map(tokens_of, bodies))

        assert all_tokens() == expected
        (replica,) = cluster.replicas()
        assert replica["guarantee_bytes"] == 16 << 20
        slept = cluster.post(f"/action/sleep/{replica['replica']}")
        assert slept.json()["state"] == "asleep", slept.text
        assert all_tokens() == expected
        (replica,) = cluster.replicas()
        assert replica["wakes"] == 1
        (core,) = cluster.hosts[0].find("EngineCore")
        core.kill()
        # Its requests wait until another replica has started, and then they are served.
        assert all_tokens() == expected
        (successor,) = cluster.replicas()
        assert successor["replica"] != replica["replica"]
        wait_until(lambda: cluster.free_mib() == {"127.0.0.1": 240.0})
