"""Two hosts, two models, fake engines with real instances, and a real Ray Serve over them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import needs
import pytest
from ray_hosts import MIB_PER_HOST, Load, RayHosts
from waiting import wait_until

from kvelastic.integration.ray.prompt_prefix import PIECE_BYTES
from kvelastic.integration.ray.ranking import QUEUE_SLACK
from kvelastic.integration.ray.settings import LAUNCHER

pytestmark = [pytest.mark.matrix, needs.ray, needs.hosts]

FAKE = Path(__file__).parents[1] / "fakes" / "engine.py"
MIB = 1 << 20
GUARANTEE_MIB = 32


def model(name: str) -> dict[str, Any]:
    arguments = ["--instance", "--outlives-its-parent", "--model", name, "--port", "{port}"]
    return {
        "name": name,
        "command": [sys.executable, str(FAKE), *arguments],
        "env": {"KVELASTIC_HOST_MEMORY": f"{MIB_PER_HOST}M"},
        "guarantee": f"{GUARANTEE_MIB}M",
        "replicas": 2,
        "replicas_per_node": 1,
        "num_cpus": 0.1,
        "stop_timeout": 5,
    }


CONFIG = {
    "models": [model("chat"), model("code")],
    "sleep": {"min_sleep": 0},
    "front": {"resources": {"host0": 0.01}},
    "health": {"timeout": 3},  # other tests have the processors
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    with RayHosts(2) as cluster:
        cluster.deploy(CONFIG)
        wait_until(lambda: len(cluster.replicas()) == 4)
        yield cluster


def of(cluster: RayHosts, name: str) -> list[dict[str, Any]]:
    return [each for each in cluster.replicas() if each["model"] == name]


def node_states(cluster: RayHosts) -> dict[str, str]:
    return {each["node"]: each["state"] for each in cluster.get("/memory").json()["nodes"]}


def awake(cluster: RayHosts, name: str) -> int:
    return sum(each["state"] == "awake" for each in of(cluster, name))


def check_sums(cluster: RayHosts) -> None:
    """What Ray has placed on each host is what the ledgers there guarantee."""

    def agree() -> bool:
        guaranteed: Counter[str] = Counter()
        for each in cluster.replicas():
            guaranteed[each["node"]] += each["guarantee_bytes"] // MIB
        free = cluster.free_mib()
        return all(guaranteed[host] == MIB_PER_HOST - mib for host, mib in free.items())

    wait_until(agree, lambda: f"{cluster.free_mib()}, {cluster.replicas()}")


def failed(answers: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [answer for answer in answers if answer[0] != 200 or '"choices"' not in answer[1]]


def begin_endless(client: httpx.Client, prompt: str = "x") -> httpx.Response:
    body = {"model": "chat", "prompt": prompt, "stream": True, "fake": {"hang": "stream"}}
    return client.send(client.build_request("POST", "/v1/completions", json=body), stream=True)


@contextmanager
def endless_stream(client: httpx.Client, replicas: Container[str]) -> Iterator[Iterator[str]]:
    """The lines after the first token of a stream that one of these replicas serves."""
    while True:
        stream = begin_endless(client)
        if stream.headers["x-kvelastic-replica"] in replicas:
            break
        stream.close()
    with contextlib.closing(stream):
        lines = stream.iter_lines()
        assert '"t0 "' in next(lines)
        yield lines


def test_replicas_spread_and_ray_resources_match_guarantees(
    cluster: RayHosts,
) -> None:
    found = {(each["model"], each["node"]) for each in cluster.replicas()}
    assert found == {(name, node) for name in ("chat", "code") for node in cluster.addresses}
    check_sums(cluster)


def test_proxy_serves_both_models_and_refuses_others(cluster: RayHosts) -> None:
    for name in ("chat", "code"):
        answer = cluster.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
        assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == (name, "x x ")
    assert [m["id"] for m in cluster.get("/v1/models").json()["data"]] == ["chat", "code"]
    unknown = cluster.post("/v1/completions", {"model": "other", "prompt": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert cluster.post("/sleep").status_code == 404


def test_stream_is_complete(cluster: RayHosts) -> None:
    body = {"model": "chat", "prompt": "x", "max_tokens": 40, "stream": True}
    answer = cluster.post("/v1/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    texts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:40]]
    assert texts == [f"t{number} " for number in range(40)]
    assert events[40:] == ["data: [DONE]", ""]


def test_burst_with_one_prefix_is_spread(cluster: RayHosts) -> None:
    served: Counter[str] = Counter()
    with (
        contextlib.ExitStack() as streams,
        cluster.hosts[0].network(),
        cluster.client() as client,
    ):
        for _ in range(4 * QUEUE_SLACK):
            stream = begin_endless(client, PIECE_BYTES * "x")
            streams.callback(stream.close)
            served[stream.headers["x-kvelastic-replica"]] += 1
    assert len(served) == 2
    assert max(served.values()) - min(served.values()) <= QUEUE_SLACK + 1, served


def test_many_requests_to_sleeping_replicas_wake_one(cluster: RayHosts) -> None:
    for each in of(cluster, "chat"):
        answer = cluster.post(f"/action/sleep/{each['replica']}")
        assert answer.json()["state"] == "asleep", answer.text
    before = sum(each["wakes"] for each in of(cluster, "chat"))
    body = {"model": "chat", "prompt": "x"}
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: cluster.post("/v1/completions", body), range(12)))
    assert [answer.status_code for answer in answers] == [200] * 12
    assert sum(each["wakes"] for each in of(cluster, "chat")) == before + 1
    for each in of(cluster, "chat"):
        cluster.post(f"/action/wakeup/{each['replica']}")
    assert awake(cluster, "chat") == 2


def test_one_address_shows_and_changes_all_nodes(cluster: RayHosts) -> None:
    view = cluster.get("/memory").json()
    assert view["nodes"] == [{"node": node, "state": "ok"} for node in cluster.addresses]
    replicas = {each["replica"]: each for each in cluster.replicas()}
    assert {name: row["node"] for name, row in view["models"].items()} == {
        name: each["node"] for name, each in replicas.items()
    }
    assert "<title>kvelastic</title>" in cluster.get("/").text
    assert cluster.get("/dashboard/main.js").status_code == 200
    rows = cluster.get("/models").json()["models"]
    assert {name: (row["model"], row["node"]) for name, row in rows.items()} == {
        name: (each["model"], each["node"]) for name, each in replicas.items()
    }
    assert cluster.get("/traffic/stats?window=60").json()["traffic_stats"].keys() == rows.keys()
    assert cluster.get("/links").json() == {"nodes": []}
    past = cluster.get("/devices/history?seconds=60").json()
    assert {(each["node"], each["group"]) for each in past["devices"]} == {
        (node, "cluster") for node in cluster.addresses
    }
    metrics = cluster.get("/metrics").text
    for node in cluster.addresses:
        assert f'kvelastic_node_up{{node="{node}"}} 1.0' in metrics
        assert (
            f'kvelastic_device_capacity_bytes{{device="host",group="cluster",node="{node}"}}'
            in metrics
        )
    listed = cluster.kvctl("list", "--json")
    assert {row["node"] for row in json.loads(listed.stdout)} == set(cluster.addresses)
    assert "NODE" in cluster.kvctl("list").stdout
    for each in replicas.values():
        done = cluster.kvctl("limit", each["instance"], "100M", "--wait=60")
        assert done.returncode == 0, done.stderr
    limits = {row["limit_bytes"] for row in cluster.get("/memory").json()["models"].values()}
    assert limits == {100 * MIB}
    for name in replicas:
        assert cluster.kvctl("limit", name, "none", "--wait=60").returncode == 0
    assert cluster.post("/action/sleep/nobody").json()["error"]["code"] == "replica_not_found"


def test_killed_engine_loses_no_request_and_is_replaced(cluster: RayHosts) -> None:
    names = {each["replica"] for each in of(cluster, "code")}
    engines = cluster.hosts[1].find(str(FAKE), "code")
    (engine,) = [process for process in engines if LAUNCHER not in process.cmdline()]
    with Load(cluster, {"model": "code", "prompt": "x", "max_tokens": 2}) as load:
        load.wait_for_more(20)
        engine.kill()
        wait_until(lambda: {each["replica"] for each in of(cluster, "code")} != names)
        wait_until(lambda: awake(cluster, "code") == 2)
        load.wait_for_more(20)
    assert failed(load.answers) == []
    check_sums(cluster)


def test_hanging_replica_ends_its_stream_and_stays_listed(cluster: RayHosts) -> None:
    there = cluster.addresses[1]
    hanging = next(each for each in of(cluster, "chat") if each["node"] == there)
    (process,) = cluster.hosts[1].find("ray::ServeReplica:kvelastic:KvEngine:chat")
    with (
        cluster.hosts[0].network(),
        cluster.client() as client,
        endless_stream(client, {hanging["replica"]}) as lines,
        Load(cluster, {"model": "chat", "prompt": "x", "max_tokens": 2}) as load,
    ):
        load.wait_for_more(20)
        process.suspend()
        last = [line for line in lines if line][-1]
        states = {each["replica"]: each["state"] for each in of(cluster, "chat")}
        view = cluster.get("/memory").json()
        load.wait_for_more(20)
        process.kill()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert sorted(states.values()) == ["awake", "no_reply"]
    assert states[hanging["replica"]] == "no_reply"
    assert view["no_reply"] == [hanging["replica"]]
    assert view["models"][hanging["replica"]]["name"] == hanging["instance"]
    assert failed(load.answers) == []
    wait_until(lambda: awake(cluster, "chat") == 2)
    check_sums(cluster)


def test_request_waits_while_all_replicas_hang(cluster: RayHosts) -> None:
    name = "ray::ServeReplica:kvelastic:KvEngine:code"
    processes = [each for host in cluster.hosts for each in host.find(name)]
    body = {"model": "code", "prompt": "x", "max_tokens": 2}
    assert cluster.post("/v1/completions", body).status_code == 200
    with ThreadPoolExecutor(1) as thread:
        for process in processes:
            process.suspend()
        wait_until(lambda: {each["state"] for each in of(cluster, "code")} == {"no_reply"})
        answer = thread.submit(cluster.post, "/v1/completions", body)
        other = cluster.post("/v1/completions", {**body, "model": "chat"})
        for process in processes:
            process.resume()
        assert (answer.result().status_code, other.status_code) == (200, 200)
    wait_until(lambda: awake(cluster, "code") == 2)


def test_killed_host_loses_no_unstarted_request(cluster: RayHosts) -> None:
    lost = cluster.addresses[1]
    there = {each["replica"] for each in of(cluster, "chat") if each["node"] == lost}
    with (
        cluster.hosts[0].network(),
        cluster.client() as client,
        endless_stream(client, there) as lines,
        Load(cluster, {"model": "chat", "prompt": "x", "max_tokens": 2}) as load,
    ):
        load.wait_for_more(20)
        cluster.hosts[1].kill()
        last = [line for line in lines if line][-1]
        load.wait_for_more(20)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert failed(load.answers) == []
    wait_until(lambda: {each["node"] for each in cluster.replicas()} == {cluster.addresses[0]})
    wait_until(lambda: node_states(cluster) == {cluster.addresses[0]: "ok", lost: "dead"})
    check_sums(cluster)
