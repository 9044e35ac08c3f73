"""Models that do not all fit take turns: real processes, real memory of the host's ledger."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ledger_instance import Instance
from ports import free_port
from running import FAKES, Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.slow


LEDGER = f"turns-{os.getpid()}"
MEMORY = {"KVELASTIC_HOST_MEMORY": "256M", "KVELASTIC_LEDGER": LEDGER}
OWN_MEMORY = MEMORY | {"KVELASTIC_LEDGER": f"{LEDGER}-own"}
"""Of engines that are launched here: no other instance is in its ledger."""
QUICK = {"min_awake": "50ms"}


def waiting_reason(front: Controller, model: str) -> str:
    found = front.get("/models").json()["models"][model]["waits"]
    return "" if found is None else str(found["why"])


def put_to_sleep_directly(engine: Engine) -> None:
    """Put it to sleep past the controller."""
    httpx.post(engine.url + "/sleep?level=1", timeout=DEADLINE_S).raise_for_status()


class Three:
    """Engines a, b and c, each with an instance that is guaranteed 100 of 256 MiB; c sleeps."""

    def __init__(self, stack: ExitStack) -> None:
        self.engines = {name: stack.enter_context(Engine("vllm", name)) for name in "abc"}
        self.instances: dict[str, Instance] = {}
        for name in "cab":
            instance = stack.enter_context(Instance(KVELASTIC_MIN="100M", **MEMORY))
            self.instances[name] = instance
            if name == "c":
                segment.request(instance.name, asleep=True, wait_s=DEADLINE_S)
                put_to_sleep_directly(self.engines["c"])

    def config(self, **sections: Any) -> dict[str, Any]:
        sections.setdefault("swap", QUICK)
        config = config_for(*self.engines.values(), **sections)
        for model in config["models"]:
            model["instance"] = self.instances[model["name"]].name
        return config


@pytest.fixture(scope="module")
def shared() -> Iterator[Three]:
    with ExitStack() as stack:
        yield Three(stack)


@pytest.fixture
def three(shared: Three) -> Three:
    """As at the beginning."""
    for name, engine in shared.engines.items():
        engine.reset()
        segment.request(shared.instances[name].name, asleep=True, wait_s=DEADLINE_S)
    put_to_sleep_directly(shared.engines["c"])
    for name in "ab":
        segment.request(shared.instances[name].name, asleep=False, priority=0, wait_s=DEADLINE_S)
    return shared


def test_requested_model_displaces_the_longest_idle_one(three: Three) -> None:
    with Controller(three.config(swap={"min_awake": 0})) as front:
        assert front.complete("a").status_code == 200
        assert front.complete("c").status_code == 200
        assert [front.state(name) for name in "abc"] == ["awake", "asleep", "awake"]
        assert segment.inspect(three.instances["b"].name).usage["asleep"] == 1
        assert front.complete("b").status_code == 200
        assert front.state("a") == "asleep"


def test_model_with_higher_priority_is_not_displaced(three: Three) -> None:
    config = three.config()
    config["models"][1]["memory"] = {"priority": 1}
    with Controller(config) as front:
        assert front.complete("a").status_code == 200  # so b is the idlest
        wait_until(lambda: front.get("/memory/b").json()["memory"]["priority"] == 1)
        wait_until(lambda: front.get("/models").json()["models"]["a"]["in_flight"] == 0)
        assert front.complete("c").status_code == 200
        assert [front.state(name) for name in "abc"] == ["asleep", "awake", "awake"]


def held_stream(front: Controller, model: str) -> Any:
    body = {"model": model, "stream": True, "fake": {"hold": "h"}}
    return front.client.stream("POST", "/v1/completions", json=body)


def test_swap_waits_for_requests_in_flight(three: Three) -> None:
    """a and b stream; c waits for one of them to end. New requests for that one wait for c."""
    with (
        Controller(three.config()) as front,
        ThreadPoolExecutor(4) as threads,
        held_stream(front, "a") as one,
        held_stream(front, "b") as two,
    ):
        pieces = [one.iter_raw(), two.iter_raw()]
        for each in pieces:
            next(each)
        wanted = threads.submit(front.complete, "c")
        wait_until(lambda: "ends its requests first" in waiting_reason(front, "c"))
        models = front.get("/models").json()["models"]
        (leaver,) = models["c"]["waits"]["for_room_of"]
        assert models[leaver]["makes_room_for"] == {"c": models["c"]["waits"]["why"]}
        behind = threads.submit(front.complete, leaver)
        wait_until(lambda: front.get("/models").json()["models"][leaver]["queued"] == 1)
        assert not wanted.done()
        three.engines[leaver].release("h")
        b"".join(pieces["ab".index(leaver)])
        assert wanted.result().status_code == 200
        other = "ab".replace(leaver, "")
        assert behind.result().status_code == 200
        three.engines[other].release("h")
        b"".join(pieces["ab".index(other)])
    for engine in three.engines.values():
        assert engine.count("slept_while_busy") == engine.count("requests_while_asleep") == 0


def test_wake_without_room_is_503_naming_the_holders(three: Three) -> None:
    config = three.config()
    for model in config["models"][:2]:
        model["pin"] = True
    with Controller(config) as front:
        response = front.complete("c")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "no_room")
        assert response.headers["retry-after"]
        assert "a has 100.00 MiB guaranteed, b has" in error["message"].replace("; ", ", ")
        assert "b has 100.00 MiB guaranteed" in error["message"]
        assert front.state("c") == "asleep"
        answer = front.post("/action/wakeup/c")
        assert not answer.json()["success"]
        assert "There is no room" in answer.text


def test_memory_woken_outside_the_controller_is_counted(three: Three) -> None:
    """The engine sleeps, and its instance has been woken: the ledger would refuse the next wake."""
    put_to_sleep_directly(three.engines["a"])
    config = three.config()
    config["models"][1]["pin"] = True
    with Controller(config) as front:
        assert front.state("a") == "asleep"
        error = front.complete("c").json()["error"]
        assert error["code"] == "no_room"
        assert f"{three.instances['a'].name} has 100.00 MiB guaranteed" in error["message"]
        assert three.engines["c"].count("wake_calls") == 0


def test_timed_out_wait_names_reason_and_displaces_nothing(three: Three) -> None:
    config = three.config(sleep={"queue_timeout": "300ms", "min_sleep": 0})
    with (
        Controller(config) as front,
        held_stream(front, "a") as one,
        held_stream(front, "b") as two,
    ):
        response = front.complete("c")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "queue_timeout")
        assert "ends its requests first" in error["message"]
        wait_until(lambda: front.state("c") == "asleep")
        for name, stream in (("a", one), ("b", two)):
            three.engines[name].release("h")
            stream.read()
            assert front.complete(name).status_code == 200  # it is not held back any more
        assert [front.state(name) for name in "abc"] == ["awake", "awake", "asleep"]
        assert three.engines["c"].count("wake_calls") == 0


def ask_and_disconnect(front: Controller, model: str) -> None:
    """Send a request that waits for memory, and go away."""
    body = json.dumps({"model": model}).encode()
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        wait_until(lambda: waiting_reason(front, model))
    wait_until(lambda: front.state(model) == "asleep")


def test_disconnected_client_displaces_no_model(three: Three) -> None:
    with (
        Controller(three.config()) as front,
        held_stream(front, "a") as one,
        held_stream(front, "b") as two,
    ):
        ask_and_disconnect(front, "c")
        for name, stream in (("a", one), ("b", two)):
            three.engines[name].release("h")
            stream.read()
        assert [front.state(name) for name in "abc"] == ["awake", "awake", "asleep"]


def test_operator_wake_times_out_after_disconnected_request(three: Three) -> None:
    """The time of the request ends first, and the model waits on for the operator."""
    config = three.config(sleep={"queue_timeout": "1s", "min_sleep": 0})
    with (
        Controller(config) as front,
        held_stream(front, "a") as one,
        held_stream(front, "b") as two,
    ):
        ask_and_disconnect(front, "c")
        assert front.post("/action/wakeup/c").status_code == 502
        assert front.state("c") == "asleep"
        for name, stream in (("a", one), ("b", two)):
            three.engines[name].release("h")
            stream.read()


def test_highest_request_priority_is_served_first(three: Three) -> None:
    """All three want, one after the other: b fills the device alone with what it is guaranteed."""
    config = config_for(
        *three.engines.values(),
        swap=QUICK,
        groups=[{"name": "g", "models": ["a", "b", "c"], "at_once": 1}],
    )
    for name in "bc":
        three.engines[name].reset()
        put_to_sleep_directly(three.engines[name])
    with (
        Controller(config) as front,
        ThreadPoolExecutor(4) as threads,
        held_stream(front, "a") as stream,
    ):
        wait_until(lambda: front.state("b") == front.state("c") == "asleep")
        order: list[str] = []

        def ask(name: str, priority: int) -> None:
            headers = {"X-Kvelastic-Priority": str(priority)}
            body = {"model": name, "prompt": "x"}
            answer = front.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            order.append(name)

        asked = [threads.submit(ask, "b", 0)]
        wait_until(lambda: waiting_reason(front, "b"))
        asked.append(threads.submit(ask, "c", 5))
        wait_until(lambda: waiting_reason(front, "c"))
        three.engines["a"].release("h")
        stream.read()
        for each in asked:
            each.result()
        assert order == ["c", "b"]


def test_random_bursts_lose_no_request_within_min_awake(three: Three) -> None:
    """Three of which two fit, their caches filled while they are awake."""
    dice = random.Random(5)
    with Controller(three.config(swap={"min_awake": "200ms"})) as front:
        failed: list[httpx.Response] = []

        def burst(name: str) -> None:
            for _ in range(12):
                answer = front.complete(name, max_tokens=2, fake={"first_s": 0.01})
                if answer.status_code != 200:
                    failed.append(answer)

        for _ in range(10):
            active = dice.sample("abc", dice.choice((1, 2, 3)))
            threads = [threading.Thread(target=burst, args=(name,)) for name in active]
            for thread in threads:
                thread.start()
            for name in active:
                ids = three.instances[name].alloc(40)  # None while it sleeps
                if ids:
                    three.instances[name].cache(ids)
            for thread in threads:
                thread.join()
        said = [line for line in front.lines if "failed" in line and "wake" in line]
        assert not failed, said
        models = front.get("/models").json()["models"].values()
        assert [model["last_problem"] for model in models] == [None] * 3
    assert sum(engine.count("wake_calls") for engine in three.engines.values()) > 1
    for engine in three.engines.values():
        assert engine.count("slept_while_busy") == engine.count("requests_while_asleep") == 0
    (info,) = [one for one in ledger.list_ledgers() if one.group == LEDGER]
    assert info.guaranteed_bytes == 200 << 20


# --------------------------------------------------------------------------------------- on demand


def on_demand(tmp_path: Path, *names: str, arguments: tuple[str, ...] = (), **launch: Any) -> Any:
    """Models that a request starts, each with an instance that is guaranteed 160 of 256 MiB."""
    return [
        {
            "name": name,
            "engine": "openai",
            "instance": f"kvelastic_{LEDGER}_{name}",
            "memory": {"min": "160M"},
            "launch": {
                "command": [
                    sys.executable,
                    str(FAKES / "engine.py"),
                    "--kind=openai",
                    f"--model={name}",
                    "--port={port}",
                    "--instance",
                    *arguments,
                ],
                "port": free_port(),
                "env": {"KVELASTIC_MIN": "160M"},
                "on_demand": True,
                "log_file": str(tmp_path / f"{name}.log"),
                **launch,
            },
        }
        for name in names
    ]


def pid_of(front: Controller, name: str) -> int | None:
    return front.get(f"/admin/models/{name}/logs").json()["pid"]


def test_request_starts_engine_and_stops_the_displaced_one(tmp_path: Path) -> None:
    config = {"models": on_demand(tmp_path, "a", "b"), "swap": {"min_awake": 0}}
    with Controller(config, environment=OWN_MEMORY) as front:
        wait_until(lambda: [front.state(name) for name in "ab"] == ["asleep", "asleep"])
        assert front.complete("a").status_code == 200
        pid = pid_of(front, "a")
        assert pid
        assert front.get("/memory/a").json()["memory"]["min_bytes"] == 160 << 20
        assert front.complete("b").status_code == 200
        assert not psutil.pid_exists(pid)
        assert [front.state(name) for name in "ab"] == ["asleep", "awake"]
        assert front.post("/action/sleep/b").json()["success"]
        assert pid_of(front, "b") is None
        assert front.post("/action/wakeup/a").json()["success"]
        assert front.end() == 0
    assert not [i for i in segment.list_segments() if LEDGER in i.name]


def test_concurrent_starts_do_not_exceed_the_device(tmp_path: Path) -> None:
    """Neither shows in the ledger yet; the second would be refused there, and end with 3."""
    models = on_demand(tmp_path, "a", "b", arguments=("--slow-start-s=0.3",))
    with Controller({"models": models, "swap": QUICK}, environment=OWN_MEMORY) as front:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(front.complete, "abababab"))
        assert [answer.status_code for answer in answers] == [200] * 8
        logs = [(tmp_path / f"{name}.log").read_text() for name in "ab"]
        assert not [log for log in logs if "no memory" in log]
        assert front.end() == 0


def test_idle_engine_stops_and_crashed_engine_stays_stopped(tmp_path: Path) -> None:
    config = {
        "models": on_demand(tmp_path, "a", backoff="10ms"),
        "sleep": {"check_every": "20ms"},
    }
    with Controller(config, environment=OWN_MEMORY) as front:
        assert front.complete("a").status_code == 200
        pid = pid_of(front, "a")
        assert pid
        psutil.Process(pid).kill()
        wait_until(lambda: front.state("a") == "asleep" and pid_of(front, "a") is None)
        assert "ended with -9" in front.get("/models").json()["models"]["a"]["last_problem"]
        wait_until(lambda: front.complete("a").status_code == 200)
        config["models"][0]["ttl"] = "50ms"
        front.write(config)
        front.post("/admin/reload")
        wait_until(lambda: front.state("a") == "asleep")
        assert pid_of(front, "a") is None
        assert front.end() == 0


def test_preload_starts_fitting_models_in_file_order(tmp_path: Path) -> None:
    models = on_demand(tmp_path, "a", "b", "c")
    for model in models[1:]:
        model["launch"]["preload"] = True
    with Controller({"models": models}, environment=OWN_MEMORY) as front:
        wait_until(lambda: front.state("b") == "awake")
        wait_until(lambda: front.state("c") == "asleep")
        assert front.state("a") == "asleep"
        assert front.end() == 0


def test_failed_start_is_503_and_leaves_no_process(tmp_path: Path) -> None:
    config = {"models": on_demand(tmp_path, "a", arguments=("--die=4",))}
    with Controller(config, environment=OWN_MEMORY) as front:
        response = front.complete("a")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "wake_failed")
        assert front.state("a") == "asleep"
        assert "ended with 4" in front.get("/models").json()["models"]["a"]["last_problem"]


def test_shutdown_does_not_wait_for_a_starting_engine(tmp_path: Path) -> None:
    config = {"models": on_demand(tmp_path, "a", arguments=("--slow-start-s=600",))}
    with Controller(config, environment=OWN_MEMORY) as front, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(front.complete, "a")
        wait_until(lambda: pid_of(front, "a") is not None)
        assert front.end() == 0
        assert asked.result().status_code == 503


def test_configured_needs_bound_engines_without_instances(tmp_path: Path) -> None:
    """Engines without an instance on a device without a ledger: llama.cpp's, say."""
    models = on_demand(tmp_path, "a", "b", "c")
    for model in models:
        del model["instance"]
        model["memory"] = {"needs": "10G"}
        model["launch"]["command"].remove("--instance")
    config = {"models": models, "devices": {"gpu0": "24G"}, "swap": {"min_awake": 0}}
    with Controller(config) as front:
        for name in "abcab":
            assert front.complete(name).status_code == 200
            awake = [each for each in "abc" if front.state(each) == "awake"]
            assert name in awake
            assert len(awake) <= 2
        config["models"][0]["memory"]["needs"] = "30G"
        front.write(config)
        front.post("/admin/reload")
        front.post("/action/sleep/a")
        error = front.complete("a").json()["error"]
        assert error["code"] == "no_room"
        assert "30.00 GiB reserved of gpu0, which has 24.00 GiB" in error["message"]


def of_vllm(tmp_path: Path, *names: str, needs: str, **launch: Any) -> dict[str, Any]:
    """A configuration with launched fake vLLM engines on a device of 24 GiB without a ledger."""
    models = on_demand(tmp_path, *names, **launch)
    for model in models:
        del model["instance"]
        model["engine"] = "vllm"
        model["memory"] = {"needs": needs}
        model["launch"]["command"].remove("--instance")
        model["launch"]["command"].remove("--kind=openai")
    return {"models": models, "devices": {"gpu0": "24G"}, "swap": {"min_awake": 0}}


def test_permanent_engines_start_in_turn_without_enough_memory(tmp_path: Path) -> None:
    """Each is loaded once, and the idlest sleeps: vLLM's wake is faster than its start."""
    config = of_vllm(tmp_path, "a", "b", "c", needs="10G", on_demand=False)
    with Controller(config) as front:
        wait_until(
            lambda: sorted(front.state(name) for name in "abc") == ["asleep", "awake", "awake"]
        )
        for name in "abc":
            assert front.complete(name).status_code == 200
        assert front.end() == 0


@pytest.mark.parametrize("is_on_demand", [False, True])
def test_engine_killed_while_its_wake_waits_restarts(tmp_path: Path, is_on_demand: bool) -> None:
    config = of_vllm(tmp_path, "a", "b", needs="16G", on_demand=is_on_demand, backoff="10ms")
    config["sleep"] = {"check_every": "20ms"}
    urls = {m["name"]: f"http://127.0.0.1:{m['launch']['port']}" for m in config["models"]}
    with Controller(config) as front, ThreadPoolExecutor(1) as threads:
        wait_until(lambda: "starting" not in map(front.state, "ab"))
        assert front.complete("b").status_code == 200
        httpx.post(urls["b"] + "/sleep?level=1", timeout=DEADLINE_S).raise_for_status()
        wait_until(lambda: front.state("b") == "asleep")
        with held_stream(front, "a") as stream:
            pieces = stream.iter_raw()
            next(pieces)
            asked = threads.submit(front.complete, "b")
            wait_until(lambda: waiting_reason(front, "b"))
            pid = pid_of(front, "b")
            assert pid
            psutil.Process(pid).kill()
            wait_until(lambda: pid_of(front, "b") is None and waiting_reason(front, "b"))
            httpx.post(urls["a"] + "/fake/release?name=h", timeout=DEADLINE_S)
            b"".join(pieces)
        wait_until(lambda: front.state("b") == "awake")
        assert asked.result().status_code == (200 if is_on_demand else 503)
        assert front.end() == 0


def test_start_fails_while_another_process_has_the_port(tmp_path: Path) -> None:
    """Its port is another one's: the start fails and says so, and the next one is tried."""
    (model,) = on_demand(tmp_path, "a", backoff="10ms")
    with (
        Engine(port=model["launch"]["port"]) as other,
        Controller({"models": [model]}, environment=OWN_MEMORY) as front,
    ):
        assert front.complete("a").json()["error"]["code"] == "wake_failed"
        assert "is taken by" in front.get("/models").json()["models"]["a"]["last_problem"]
        other.end()
        wait_until(lambda: front.complete("a").status_code == 200)
        assert front.end() == 0
