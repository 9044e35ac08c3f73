"""A real SGLang in a replica of Ray Serve: stock's tokens, a sleep and a killed scheduler."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs
import pytest
from sglang_pair import NEW_TOKENS, PAGED, PROMPTS, Pairs
from sglang_server import command_of
from waiting import DEADLINE_S, wait_until

sys.path.append(str(Path(__file__).parents[1] / "cluster"))
from ray_hosts import RayHosts

pytestmark = [needs.sglang, needs.ray, needs.hosts, pytest.mark.matrix]


def all_tokens(cluster: RayHosts) -> list[list[int]]:
    """The cluster's tokens for all prompts, sent at once."""

    def tokens_of(prompt: list[int]) -> list[int]:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        answer = cluster.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return [int(word[1:]) for word in answer.json()["choices"][0]["text"].split()]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(tokens_of, PROMPTS))


def test_replica_matches_stock_after_sleep_and_scheduler_crash(
    sglang_pairs: Pairs, sglang_model: Path
) -> None:
    expected = sglang_pairs[PAGED].expected
    model = {
        "name": "m",
        "engine": "sglang",
        "command": command_of(sglang_model, "{port}", ("--served-model-name", "m")),
        "env": {
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "KVELASTIC_HOST_MEMORY": "256M",
        },
        "guarantee": "16M",
        "num_cpus": 0.5,
    }
    with RayHosts(1) as cluster:
        config = {"models": [model], "sleep": {"min_sleep": 0}, "health": {"timeout": 5}}
        cluster.deploy({**config, "front": {"retry_for": DEADLINE_S}})

        assert all_tokens(cluster) == expected
        (replica,) = cluster.replicas()
        assert replica["guarantee_bytes"] == 16 << 20
        slept = cluster.post(f"/action/sleep/{replica['replica']}")
        assert slept.json()["state"] == "asleep", slept.text
        assert all_tokens(cluster) == expected
        (replica,) = cluster.replicas()
        assert replica["wakes"] == 1
        (scheduler,) = cluster.hosts[0].find("sglang::scheduler")
        scheduler.kill()
        # Its requests wait until another replica has started, and then they are served.
        assert all_tokens(cluster) == expected
        (successor,) = cluster.replicas()
        assert successor["replica"] != replica["replica"]
        wait_until(lambda: cluster.free_mib() == {"127.0.0.1": 240.0})
