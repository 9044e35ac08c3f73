"""Sleep and wake of a model's KV cache: real instances over host memory, behind fake engines."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ledger_instance import Instance
from ports import free_port
from running import FAKES, Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment

pytestmark = pytest.mark.slow


MIB = 1 << 20


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance(KVELASTIC_HOST_MEMORY="256M", KVELASTIC_LEDGER=f"ctls-{os.getpid()}") as instance:
        yield instance


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("vllm", "org/m") as engine:
        yield engine


@pytest.fixture
def front(engine: Engine, instance: Instance) -> Iterator[Controller]:
    with Controller(config_for(engine, model={"instance": instance.name})) as front:
        yield front


def memory(front: Controller) -> dict[str, Any]:
    return front.get("/memory/org/m").json()["memory"]


def sleep(front: Controller) -> None:
    answer = front.post("/action/sleep/org/m")
    assert answer.json()["success"], answer.text


def test_sleep_releases_all_memory_and_keeps_limit(
    front: Controller, instance: Instance, engine: Engine
) -> None:
    front.client.patch("/memory/org/m", json={"limit": "128M", "wait": DEADLINE_S})
    ids = instance.alloc(64)
    assert ids
    instance.cache(ids)
    sleep(front)
    wait_until(lambda: instance.mapped_bytes == 0)
    row = memory(front)
    assert (row["asleep"], row["granted_bytes"]) == (True, 0)
    assert row["limit_bytes"] == row["requested_limit_bytes"] == 128 * MIB
    assert instance.alloc(1) is None
    assert front.complete("org/m").status_code == 200
    row = memory(front)
    assert (row["asleep"], row["limit_bytes"]) == (False, 128 * MIB)
    assert row["revision"] == 3, "limit, sleep, wake: none of the last two was about the limit"
    assert instance.alloc(64) is not None


def test_limit_set_while_asleep_applies_after_wake(front: Controller, instance: Instance) -> None:
    sleep(front)
    request = {"limit": "96M", "min": "8M", "priority": 4, "wait": DEADLINE_S}
    response = front.client.patch("/memory/org/m", json=request)
    answer = response.json()["answer"]
    assert (response.status_code, answer["state"], answer["asleep"]) == (200, "asleep", True)
    row = memory(front)
    assert (row["limit_bytes"], row["min_bytes"], row["priority"]) == (96 * MIB, 8 * MIB, 4)
    assert (row["asleep"], row["mapped_bytes"]) == (True, 0)
    assert front.complete("org/m").status_code == 200
    row = memory(front)
    assert (row["limit_bytes"], row["effective_limit_bytes"]) == (96 * MIB, 96 * MIB)


def test_limit_set_by_kvctl_while_asleep_survives_wake(
    front: Controller, instance: Instance
) -> None:
    """By kvctl, of which the controller hears nothing; also a limit of 0 is one like any other."""
    for limit_bytes in (48 * MIB, 0):
        sleep(front)
        segment.request(instance.name, limit_bytes=limit_bytes, wait_s=DEADLINE_S)
        assert front.post("/action/wakeup/org/m").json()["success"]
        assert memory(front)["limit_bytes"] == limit_bytes
        assert memory(front)["asleep"] is False


def test_default_limit_is_shown_while_asleep(front: Controller, instance: Instance) -> None:
    assert memory(front)["limit_bytes"] == 256 * MIB
    sleep(front)
    row = memory(front)
    assert (row["asleep"], row["requested_limit_bytes"], row["limit_bytes"]) == (
        True,
        None,
        256 * MIB,
    )
    rows = front.get("/memory").json()
    assert rows["models"]["org/m"]["limit_bytes"] == 256 * MIB


def test_engine_sleeps_before_and_wakes_after_its_memory(
    front: Controller, instance: Instance, engine: Engine
) -> None:
    """While the engine's own call runs its memory is there: it may still need it."""
    engine.change(sleep_hold="s", wake_hold="w")
    going = threading.Thread(target=sleep, args=(front,))
    going.start()
    wait_until(lambda: "s" in engine.state()["held"])
    assert segment.inspect(instance.name).usage["asleep"] == 0
    engine.release("s")
    going.join()
    assert segment.inspect(instance.name).usage["asleep"] == 1
    woken = threading.Thread(target=front.post, args=("/action/wakeup/org/m",))
    woken.start()
    wait_until(lambda: "w" in engine.state()["held"])
    assert segment.inspect(instance.name).usage["asleep"] == 0
    engine.release("w")
    woken.join()
    assert front.state("org/m") == "awake"


def test_failed_engine_sleep_keeps_the_memory(
    front: Controller, instance: Instance, engine: Engine
) -> None:
    engine.change(sleep_status=500)
    assert front.post("/action/sleep/org/m").status_code == 502
    assert segment.inspect(instance.name).request["asleep"] is None
    assert instance.alloc(1) is not None


def test_failed_wake_puts_memory_back_to_sleep(
    front: Controller, instance: Instance, engine: Engine
) -> None:
    front.client.patch("/memory/org/m", json={"limit": "128M", "wait": DEADLINE_S})
    sleep(front)
    engine.change(wake_status=500)
    assert front.complete("org/m").status_code == 503
    row = memory(front)
    assert (row["asleep"], row["limit_bytes"]) == (True, 128 * MIB)
    engine.change(wake_status=200)
    assert front.post("/action/wakeup/org/m").json()["success"]
    row = memory(front)
    assert (row["asleep"], row["limit_bytes"]) == (False, 128 * MIB)


def test_wake_without_room_names_the_holders(front: Controller, instance: Instance) -> None:
    front.client.patch("/memory/org/m", json={"min": "160M", "wait": DEADLINE_S})
    sleep(front)
    with Instance(
        KVELASTIC_HOST_MEMORY="256M",
        KVELASTIC_LEDGER=f"ctls-{os.getpid()}",
        KVELASTIC_MIN="128M",
    ) as other:
        answer = front.post("/action/wakeup/org/m")
        assert not answer.json()["success"]
        assert "There is no room for the model" in answer.text
        assert other.name in answer.text
        assert memory(front)["asleep"]
    assert front.post("/action/wakeup/org/m").json()["success"]
    assert not memory(front)["asleep"]


def test_restarted_controller_wakes_models_put_to_sleep_before(
    engine: Engine, instance: Instance
) -> None:
    """Nothing has to be remembered: the limit was the instance's own all the time."""
    config = config_for(engine, model={"instance": instance.name})
    with Controller(config) as front:
        front.client.patch("/memory/org/m", json={"limit": "64M", "wait": DEADLINE_S})
        sleep(front)
    with Controller(config) as front:
        assert memory(front)["asleep"] is True
        assert front.complete("org/m").status_code == 200
        assert memory(front)["limit_bytes"] == 64 * MIB
    assert instance.alloc(64) is not None


def test_waking_the_engine_directly_wakes_its_memory(
    front: Controller, instance: Instance, engine: Engine
) -> None:
    sleep(front)
    httpx.post(engine.url + "/wake_up", timeout=DEADLINE_S).raise_for_status()
    wait_until(lambda: front.state("org/m") == "awake")
    assert segment.inspect(instance.name).usage["asleep"] == 0
    assert instance.alloc(1) is not None


def test_memory_asleep_by_kvctl_is_reported_and_wakeable(
    front: Controller, instance: Instance
) -> None:
    """The model is awake for the controller, and requests wait in its engine."""

    def problem() -> str | None:
        return front.get("/models").json()["models"]["org/m"]["last_problem"]

    segment.request(instance.name, asleep=True, wait_s=DEADLINE_S)
    wait_until(lambda: "was put to sleep outside the controller" in (problem() or ""))
    assert f"kvctl wake {instance.name} or POST /action/wakeup/org/m" in (problem() or "")
    assert front.state("org/m") == "awake"
    answer = front.post("/action/wakeup/org/m").json()
    assert answer["success"], answer
    assert answer["message"] == (
        "The model's memory, put to sleep outside the controller, is awake now."
    )
    assert segment.inspect(instance.name).usage["asleep"] == 0
    assert problem() is None
    again = front.post("/action/wakeup/org/m").json()
    assert again["message"] == "The model is awake already."


def test_wakeup_sees_a_sleep_by_another_client(front: Controller, engine: Engine) -> None:
    httpx.post(engine.url + "/sleep?level=1", timeout=DEADLINE_S).raise_for_status()
    answer = front.post("/action/wakeup/org/m").json()
    assert answer["success"], answer
    assert not engine.state()["asleep"]


def test_sleep_state_of_sglang_comes_from_its_instance(
    instance: Instance,
) -> None:
    """SGLang: what it notes in its segment outlives the controller."""
    with Engine("sglang", "org/m") as engine:
        config = config_for(engine, model={"instance": instance.name})
        with Controller(config) as front:
            assert front.state("org/m") == "awake"  # the instance has said nothing yet
            sleep(front)
            instance.ask("engine_sleeps", True)
            front.end(signal.SIGKILL)
        with Controller(config) as front:
            wait_until(lambda: front.state("org/m") == "asleep")
            assert front.complete("org/m").status_code == 200
            assert not engine.state()["asleep"]


def test_missing_instance_does_not_prevent_sleep_and_wake(
    front: Controller, instance: Instance, engine: Engine
) -> None:
    instance.close()
    sleep(front)
    assert engine.state()["asleep"]
    assert front.complete("org/m").status_code == 200


def test_configured_limit_is_requested_when_engine_is_ready(
    instance: Instance, tmp_path: Path
) -> None:
    launch = {
        "command": [sys.executable, str(FAKES / "engine.py"), "--port={port}"],
        "port": free_port(),
        "log_file": str(tmp_path / "engine.log"),
    }
    model = {
        "name": "m",
        "engine": "vllm",
        "launch": launch,
        "instance": instance.name,
        "memory": {"limit": "32M", "priority": 2},
    }
    with Controller({"models": [model]}) as front:
        assert front.complete("m").status_code == 200
        row = front.get("/memory/m").json()["memory"]
        assert (row["limit_bytes"], row["priority"]) == (32 * MIB, 2)
