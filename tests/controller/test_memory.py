"""Memory routes against real instances over host memory: the same requests and answers as kvctl."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ledger_instance import PAGE_BYTES, Instance
from prometheus_client.parser import text_string_to_metric_families
from running import Controller, Engine, config_for, fake_launch
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import InvalidArgumentError
from kvelastic.shared import segment

pytestmark = pytest.mark.slow


MIB = 1 << 20


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance(KVELASTIC_HOST_MEMORY="256M", KVELASTIC_LEDGER=f"ctl-{os.getpid()}") as instance:
        yield instance


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    with Engine("vllm", "org/m") as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """Awake, whatever the last test did with it."""
    shared_engine.reset()
    httpx.post(shared_engine.url + "/wake_up", timeout=DEADLINE_S).raise_for_status()
    shared_engine.reset()
    return shared_engine


@pytest.fixture
def front(engine: Engine, instance: Instance) -> Iterator[Controller]:
    config = config_for(engine, model={"instance": instance.name})
    with Controller(config) as front:
        yield front


def memory_of(front: Controller) -> dict[str, Any]:
    return front.get("/memory/org%2Fm").json()["memory"]


def test_memory_shows_the_instances_usage(front: Controller, instance: Instance) -> None:
    ids = instance.alloc(16)
    assert ids
    wait_until(lambda: memory_of(front)["in_use_bytes"] == 16 * PAGE_BYTES // 4)
    row = memory_of(front)
    assert row["name"] == instance.name
    assert row["state"] in {"applied", "pending"}
    assert row["granted_bytes"] >= 4 * PAGE_BYTES
    everything = front.get("/memory").json()
    assert everything["models"]["org/m"]["name"] == instance.name
    assert instance.name in [row["name"] for row in everything["instances"]]


def test_device_usage_equals_its_instances_usage(front: Controller, instance: Instance) -> None:
    ids = instance.alloc(16)
    assert ids
    instance.cache(ids[::2])
    told = front.get("/memory").json()
    (device,) = (one for one in told["devices"] if one["group"] == f"ctl-{os.getpid()}")
    (member,) = device["members"]
    assert member["model"] == "org/m"
    for part in ("mapped", "in_use", "cached", "parked", "slack"):
        assert member[f"{part}_bytes"] == told["models"]["org/m"][f"{part}_bytes"], part
    assert member["cached_bytes"] == 8 * PAGE_BYTES // 4


def test_metrics_include_instance_and_device_memory(front: Controller, instance: Instance) -> None:
    assert instance.alloc(16)
    samples = [
        sample
        for family in text_string_to_metric_families(front.get("/metrics").text)
        for sample in family.samples
    ]
    (joined,) = (s for s in samples if s.name == "kvelastic_model_instance")
    assert joined.labels == {"model": "org/m", "name": instance.name}
    (granted,) = (
        s.value
        for s in samples
        if s.name == "kvelastic_instance_granted_bytes" and s.labels["name"] == instance.name
    )
    assert granted >= 16 * PAGE_BYTES // 4
    assert [s for s in samples if s.name == "kvelastic_device_capacity_bytes"]


def test_memory_request_is_applied(front: Controller, instance: Instance) -> None:
    request = {"limit": "64M", "min": 8 * MIB, "priority": 7, "wait": DEADLINE_S}
    response = front.client.patch("/memory/org/m", json=request)
    assert response.status_code == 200
    answer = response.json()["answer"]
    assert (answer["state"], answer["effective_limit_bytes"]) == ("applied", 64 * MIB)
    row = front.get("/memory/org/m").json()["memory"]
    assert (row["limit_bytes"], row["min_bytes"], row["priority"]) == (64 * MIB, 8 * MIB, 7)
    device = next(
        d for d in front.get("/devices").json()["devices"] if d["group"] == f"ctl-{os.getpid()}"
    )
    assert device["capacity_bytes"] == 256 * MIB
    assert [m["min_bytes"] for m in device["members"]] == [8 * MIB]


def test_limit_below_blocks_in_use_is_202_shrinking(front: Controller, instance: Instance) -> None:
    instance.alloc(64)
    response = front.client.patch("/memory/org/m", json={"limit": "4M", "wait": 0.1})
    assert response.status_code == 202
    assert response.json()["answer"]["state"] in {"pending", "shrinking"}
    wait_until(lambda: memory_of(front)["state"] == "shrinking")
    assert memory_of(front)["over_bytes"] > 0


def test_waiting_memory_requests_do_not_block_others(
    engine: Engine, front: Controller, instance: Instance
) -> None:
    """Fifty wait ten minutes for an instance that is stopped: each kept a thread of a few."""
    waiting = []
    instance.stop()
    try:
        for number in range(50):
            body = json.dumps({"limit": (number + 1) * PAGE_BYTES, "wait": "10m"}).encode()
            sock = socket.create_connection(("127.0.0.1", front.port), DEADLINE_S)
            sock.sendall(
                b"PATCH /memory/org%%2Fm HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
                % len(body)
                + body
            )
            waiting.append(sock)
        with segment.open_readonly(instance.name) as seen:
            wait_until(lambda: seen.control_block.read_request()["revision"] >= 50)
        assert front.get("/memory").status_code == 200
        assert front.get("/devices").status_code == 200
        assert front.get("/metrics").status_code == 200
        assert front.complete("org/m").status_code == 200
        front.send(signal.SIGTERM)
        for sock in waiting:
            with sock:
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 202")
        assert front.wait() == 0
    finally:
        instance.go_on()


def test_segment_lock_holder_does_not_block_reads(front: Controller, instance: Instance) -> None:
    """A kvctl that was stopped has the lock: the request is refused, and reading goes on."""
    with Path("/dev/shm", instance.name).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        answer = front.client.patch("/memory/org%2Fm", json={"limit": "64M"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "SEGMENT_BUSY")
        assert front.get("/memory").status_code == 200
    answer = front.client.patch("/memory/org%2Fm", json={"limit": "64M", "wait": "1m"})
    assert answer.status_code == 200


def test_trim_unmaps_parked_pages(front: Controller, instance: Instance) -> None:
    ids = instance.alloc(64)
    assert ids
    instance.free(ids)
    assert instance.mapped_bytes > 2 * PAGE_BYTES
    response = front.post("/memory/org/m/trim", {"wait": DEADLINE_S})
    assert response.status_code == 200
    assert instance.mapped_bytes <= 2 * PAGE_BYTES


WRONG: list[dict[str, object]] = [
    {},
    {"limit": -1},
    {"limit": "much"},
    {"limit": True},
    {"limit": 1.5},
    {"min": "2G", "limit": "1G"},
    {"priority": 1001},
    {"priority": "high"},
    {"wait": "1h", "limit": 1},
    {"wait": 10**400, "limit": 1},
    {"limits": 1},
]


def test_invalid_request_changes_nothing(front: Controller, instance: Instance) -> None:
    before = front.get("/memory/org/m").json()["memory"]["revision"]
    for request in WRONG:
        response = front.client.patch("/memory/org/m", json=request)
        assert response.status_code == 400, request
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert front.get("/memory/org/m").json()["memory"]["revision"] == before


def test_guarantee_above_the_current_limit_is_refused(
    front: Controller, instance: Instance
) -> None:
    def ask(**asked: object) -> int:
        return front.client.patch("/memory/org%2Fm", json=asked).status_code

    assert ask(limit="64M", wait=DEADLINE_S) == 200
    assert ask(min="65M") == 400
    assert ask(min="65M", limit="66M", wait=DEADLINE_S) == 200
    with pytest.raises(InvalidArgumentError, match=r"min. of 67.00 MiB is above the limit of 66"):
        segment.request(instance.name, min_bytes=67 * MIB)
    assert memory_of(front)["min_bytes"] == 65 * MIB


def test_change_of_a_dead_instance_is_refused(front: Controller, instance: Instance) -> None:
    instance.kill()
    response = front.client.patch("/memory/org/m", json={"limit": "1M"})
    assert response.status_code in {404, 409}
    assert response.json()["error"]["code"] in {"SEGMENT_NOT_FOUND", "SEGMENT_DEAD"}
    from kvelastic.shared import ledger, segment

    segment.reap()
    ledger.reap()


def test_configured_memory_is_requested_at_start(engine: Engine, instance: Instance) -> None:
    memory = {"min": "4M", "limit": "32M", "priority": 3}
    with Controller(
        config_for(engine, model={"instance": instance.name, "memory": memory})
    ) as front:
        row = front.get("/memory/org/m").json()["memory"]
        assert row["requested_limit_bytes"] == 32 * MIB
        assert (row["min_bytes"], row["priority"]) == (4 * MIB, 3)


def test_controller_that_cannot_listen_changes_no_limits(
    engine: Engine, instance: Instance, tmp_path: Path
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        config = config_for(
            engine,
            model={"instance": instance.name, "memory": {"limit": 8 * PAGE_BYTES}},
            server={"port": taken.getsockname()[1]},
        )
        path = tmp_path / "controller.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "kvelastic.controller", "--config", str(path)]
        ended = subprocess.run(command, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1
    first = segment.request(instance.name, priority=0, wait_s=DEADLINE_S)
    assert first.requested_revision == 1


def test_memory_pressure_suspends_idle_low_priority_models() -> None:
    group = f"ctl-press-{os.getpid()}"
    environ = {
        "KVELASTIC_HOST_MEMORY": "64M",
        "KVELASTIC_LEDGER": group,
        "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
    }
    with (
        Engine("vllm", "idle") as engine,
        Instance(KVELASTIC_MIN="60M", KVELASTIC_PRIORITY="-1", **environ) as idle,
        Instance(KVELASTIC_PRIORITY="5", **environ) as hungry,
    ):
        ids = idle.alloc(4 * 28)
        assert ids
        idle.cache(ids)  # guaranteed: only sleep makes it give that back
        sleep = {"auto": True, "idle_after": "1h", "check_every": "50ms", "pressure_after": 0}
        model = {"instance": idle.name, "memory": {"priority": -1}}
        with Controller(config_for(engine, model=model, sleep=sleep)) as front:
            wait_until(lambda: hungry.alloc(4 * 8) or front.state("idle") == "asleep")
            # Memory may arrive before the sleep is over.
            wait_until(lambda: front.state("idle") == "asleep", "it does not fall asleep")
            wait_until(lambda: hungry.alloc(4 * 8))


def test_exhausted_queues_do_not_block_other_requests(
    engine: Engine, instance: Instance, tmp_path: Path
) -> None:
    """Waits for memory, followers of logs, a full queue, and the reader of large bodies stopped."""
    config = config_for(engine, model={"instance": instance.name})
    launched = {"name": "l", "engine": "vllm", "launch": fake_launch(tmp_path, "--model=l")}
    config["models"].append({**launched, "max_in_flight": 1, "queue_limit": 4})
    config["server"] = {"drain_timeout": "100ms"}
    with Controller(config) as front, contextlib.ExitStack() as ending:

        def send(method: str, path: str, body: bytes = b"") -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", front.port), DEADLINE_S)
            ending.enter_context(sock)
            head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
            sock.sendall(f"{head}\r\n\r\n".encode() + body)
            return sock

        assert front.complete("l").status_code == 200
        large = json.dumps({"model": "org/m", "prompt": "x" * (2 << 20)}).encode()
        assert front.client.post("/v1/completions", content=large).status_code == 200
        (reader,) = (
            child
            for child in psutil.Process(front.process.pid).children()
            if "kvelastic.controller.routing.body_worker" in child.cmdline()
        )
        reader.suspend()
        ending.callback(instance.go_on)
        instance.stop()
        for number in range(20):
            wish = {"limit": (number + 1) * PAGE_BYTES, "wait": "10m"}
            send("PATCH", "/memory/org%2Fm", json.dumps(wish).encode())
            send("POST", "/v1/completions", large)
            send("GET", "/models/l/logs?follow=true")
            send("GET", "/models/l/logs?follow=true")
            hung = {"model": "l", "prompt": "x", "fake": {"hang": "first"}}
            send("POST", "/v1/completions", json.dumps(hung).encode())
        wait_until(lambda: front.get("/models").json()["models"]["l"]["queued"] == 4)
        wait_until(lambda: "kvelastic_log_followers 32.0" in front.get("/metrics").text)
        assert front.get("/models/l/logs?follow=true").status_code == 503
        assert front.complete("l").status_code == 429
        for path in ("/memory", "/devices", "/metrics", "/admin/models/l/logs", "/health/org%2Fm"):
            assert front.get(path).status_code == 200, path
        assert front.complete("org/m").status_code == 200
        assert front.end() == 0
