"""One node, real Ray Serve: replicas are woken, started and ended by the load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import needs
import pytest
from ray_hosts import RayHosts
from test_ray_serve import awake, check_sums, model, of
from waiting import wait_until

pytestmark = [pytest.mark.matrix, needs.ray, needs.hosts]

FULL = 2


def scaling(name: str, end_after: str) -> dict[str, Any]:
    scale = {"most_replicas": 2, "requests": FULL, "start_after": 1, "end_after": end_after}
    return {
        **model(name),
        "replicas": 1,
        "replicas_per_node": None,
        "ttl": 1,
        "autoscale": scale,
    }


CONFIG = {
    "models": [scaling("keeps", "1h"), scaling("ends", "2s")],
    "sleep": {"min_sleep": 0},
    "health": {"timeout": 3},  # other tests have the processors
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    with RayHosts(1) as cluster:
        cluster.deploy(CONFIG)
        yield cluster


@contextlib.contextmanager
def streams(cluster: RayHosts, name: str) -> Iterator[Callable[[], None]]:
    """What begins one more stream; they end with the body."""
    endless = {"model": name, "prompt": "x", "stream": True, "fake": {"hang": "stream"}}
    kept = []  # an iterator without a reference closes its stream
    with (
        cluster.hosts[0].network(),
        cluster.client() as client,
        contextlib.ExitStack() as opened,
    ):

        def begin() -> None:
            stream = client.stream("POST", "/v1/completions", json=endless)
            lines = opened.enter_context(stream).iter_lines()
            kept.append(lines)
            assert '"t0 "' in next(lines)

        yield begin


def test_full_replica_starts_one_and_idle_replicas_sleep(cluster: RayHosts) -> None:
    assert len(of(cluster, "keeps")) == 1
    with streams(cluster, "keeps") as begin:
        for _ in range(FULL + 1):
            begin()
        wait_until(lambda: len(of(cluster, "keeps")) == 2)
    wait_until(lambda: {each["state"] for each in of(cluster, "keeps")} == {"asleep"})
    names = {each["replica"] for each in of(cluster, "keeps")}
    with streams(cluster, "keeps") as begin:
        begin()
        assert awake(cluster, "keeps") == 1

        def is_second_awake() -> bool:
            begin()
            return awake(cluster, "keeps") == 2

        wait_until(is_second_awake, "a full replica woke no other one")
        assert {each["replica"] for each in of(cluster, "keeps")} == names
    check_sums(cluster)


def test_replica_ends_after_the_load(cluster: RayHosts) -> None:
    with streams(cluster, "ends") as begin:
        for _ in range(FULL + 1):
            begin()
        wait_until(lambda: len(of(cluster, "ends")) == 2)
    wait_until(lambda: len(of(cluster, "ends")) == 1)
    check_sums(cluster)
    answer = cluster.post("/v1/completions", {"model": "ends", "prompt": "x", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "x x "
