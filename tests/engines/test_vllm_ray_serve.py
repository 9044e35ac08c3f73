"""A real vLLM in replicas of Ray Serve, and in those of Ray Serve LLM: stock's tokens, sleeps."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs
import pytest
from vllm_server import BLOCK_TOKENS, KV_BYTES, MAX_MODEL_TOKENS, VLLM, VllmServer, make_requests
from waiting import DEADLINE_S, wait_until

sys.path.append(str(Path(__file__).parents[1] / "cluster"))
from ray_hosts import RayHosts

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_CI_ENV": "1"}

pytestmark = [needs.ray, needs.hosts]


def bodies_and_tokens(stock: VllmServer) -> tuple[list[dict[str, object]], list[list[int]]]:
    """Requests, of which every second one is a stream, and stock's tokens for them."""
    requests = [stock.decided(request) for request in make_requests(6, seed=39)]
    bodies: list[dict[str, object]] = [
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
    return bodies, [stock.complete(request) for request in requests]


def all_tokens(cluster: RayHosts, bodies: list[dict[str, object]]) -> list[list[int]]:
    """The cluster's tokens for all requests, sent at once."""

    def tokens_of(body: dict[str, object]) -> list[int]:
        answer = cluster.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        if not body["stream"]:
            return list(answer.json()["choices"][0]["token_ids"])
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return [token for choice in choices for token in choice.get("token_ids") or []]

    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(tokens_of, bodies))


def test_replica_matches_stock_after_sleep_and_core_crash(
    stock: VllmServer, tiny_model: Path
) -> None:
    arguments = [
        "--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1",
        "--port", "{port}", "--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", "16",
        "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES),
    ]  # fmt: skip
    model = {
        "name": "m",
        "command": [str(VLLM), "serve", str(tiny_model), *arguments],
        "env": {**OFFLINE, "VLLM_SERVER_DEV_MODE": "1", "KVELASTIC_HOST_MEMORY": "256M"},
        "guarantee": "16M",
        "num_cpus": 0.5,
    }
    bodies, expected = bodies_and_tokens(stock)
    with RayHosts(1) as cluster:
        config = {"models": [model], "sleep": {"min_sleep": 0}, "health": {"timeout": 5}}
        cluster.deploy({**config, "front": {"retry_for": DEADLINE_S}})

        assert all_tokens(cluster, bodies) == expected
        (replica,) = cluster.replicas()
        assert replica["guarantee_bytes"] == 16 << 20
        slept = cluster.post(f"/action/sleep/{replica['replica']}")
        assert slept.json()["state"] == "asleep", slept.text
        assert all_tokens(cluster, bodies) == expected
        (replica,) = cluster.replicas()
        assert replica["wakes"] == 1
        (core,) = cluster.hosts[0].find("EngineCore")
        core.kill()
        # Its requests wait until another replica has started, and then they are served.
        assert all_tokens(cluster, bodies) == expected
        (successor,) = cluster.replicas()
        assert successor["replica"] != replica["replica"]
        wait_until(lambda: cluster.free_mib() == {"127.0.0.1": 240.0})


@needs.ray_llm
@pytest.mark.matrix
def test_ray_serve_llm_replicas_sleep_and_match_stock(stock: VllmServer, tiny_model: Path) -> None:
    bodies, expected = bodies_and_tokens(stock)
    model = {
        "model_loading_config": {"model_id": "m", "model_source": str(tiny_model)},
        "server_cls": "kvelastic.integration.ray.serve_llm:KvLLMServer",
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
        "runtime_env": {
            "env_vars": {
                **OFFLINE,
                "ENABLE_KVELASTIC": "true",
                "KVELASTIC_HOST_MEMORY": "256M",
                "KVELASTIC_MIN": "16M",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        },
        "log_engine_metrics": False,
        "deployment_config": {
            "num_replicas": 2,
            "autoscaling_config": None,
            "ray_actor_options": {"num_cpus": 0.5},
        },
        "engine_kwargs": {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_TOKENS,
            "max_num_seqs": 16,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": KV_BYTES,
        },
    }
    front = {
        "num_replicas": 1,
        "autoscaling_config": None,
        "ray_actor_options": {"num_cpus": 0.1},
    }
    with RayHosts(1) as cluster:

        def asleep() -> list[bool]:
            listed = json.loads(cluster.kvctl_on_head("list", "--json").stdout)
            return sorted(instance["engine_asleep"] for instance in listed)

        config = {"llm_configs": [model], "ingress_deployment_config": front}
        cluster.deploy(config, builder="ray.serve.llm:build_openai_app")
        assert cluster.free_mib() == {"127.0.0.1": 256.0 - 2 * 16.0}
        assert all_tokens(cluster, bodies) == expected
        assert asleep() == [False, False]

        def sleeper_gets_no_request() -> bool:
            """The router learns half a second later that a replica sleeps, and may wake it."""
            if asleep() == [False, False]:
                cluster.put_to_sleep("m")
            before = asleep()
            assert all_tokens(cluster, bodies) == expected
            return before == asleep() == [False, True]

        def both_sleep() -> bool:
            cluster.put_to_sleep("m")
            return asleep() == [True, True]

        wait_until(sleeper_gets_no_request)
        wait_until(both_sleep)
        assert all_tokens(cluster, bodies) == expected
        assert asleep() == [False, True]
