"""One replica without Ray: a fake engine with a real instance, started by the launcher."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.models.gate import State
from kvelastic.errors import ClusterError
from kvelastic.integration.ray import engine_logs
from kvelastic.integration.ray.messages import ASLEEP, Cut, EngineRequest, Head, Unserved
from kvelastic.integration.ray.replica import EngineReplica
from kvelastic.integration.ray.settings import ClusterSettings, parse
from kvelastic.shared import segment

FAKE = Path(__file__).parents[1] / "fakes" / "engine.py"
_numbers = itertools.count()
Result = TypeVar("Result")


def settings(*more: str, **model: Any) -> ClusterSettings:
    command = [sys.executable, str(FAKE), "--outlives-its-parent", "--port", "{port}", *more]
    env = {"KVELASTIC_HOST_MEMORY": "256M"}
    whole = {"name": "m", "command": command, "env": env, "stop_timeout": 5, **model}
    return parse({"models": [whole], "sleep": {"min_sleep": 0}})


class Served:
    """A replica in a loop of its own, and what tests ask of it."""

    def __init__(self, cluster: ClusterSettings) -> None:
        self.loop = asyncio.new_event_loop()
        self.replica = EngineReplica(cluster, "m", f"r{os.getpid()}-{next(_numbers)}")
        self.run(self.replica.start())
        self.url = self.replica.model.replicas[0].address
        launcher = psutil.Process(self.replica.model.engine_pid)
        self.launcher = launcher
        self.engine = wait_until(launcher.children)[0]

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(asyncio.wait_for(work, DEADLINE_S))

    def wait_until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(wait())

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(self.url + "/fake/state", timeout=DEADLINE_S).json()
        return found

    def change(self, **changed: Any) -> None:
        httpx.post(self.url + "/fake/set", json=changed, timeout=DEADLINE_S).raise_for_status()

    async def ask(self, *, knows_of_sleep: bool = False, **body: Any) -> list[Any]:
        sleepers = frozenset([self.replica.replica] if knows_of_sleep else [])
        raw = json.dumps({"model": "m", "prompt": "x", **body}).encode()
        headers = [(b"content-type", b"application/json")]
        request = EngineRequest(
            "POST", "/v1/completions", headers=headers, body=raw, sleepers=sleepers
        )
        return [part async for part in self.replica.serve(request)]

    def end(self) -> None:
        self.run(self.replica.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    served = Served(settings("--instance", guarantee="16M", limit="64M"))
    yield served
    served.end()
    wait_until(lambda: not served.engine.is_running() and not served.launcher.is_running())


@pytest.fixture
def served(shared: Served) -> Served:
    httpx.post(shared.url + "/fake/reset", timeout=DEADLINE_S).raise_for_status()
    return shared


@pytest.fixture
def own() -> Iterator[Served]:
    """A replica that the test may break."""
    served = Served(settings())
    yield served
    served.end()
    assert not served.launcher.is_running()
    assert not served.engine.is_running()


def test_response_is_passed_through_unchanged(served: Served) -> None:
    (head,) = served.run(served.ask(max_tokens=2))
    assert isinstance(head, Head)
    assert (head.status, head.is_stream) == (200, False)
    assert json.loads(head.first)["choices"][0]["text"] == "x x "
    assert (b"x-engine", b"fake") in [(k.lower(), v) for k, v in head.headers]


def test_stream_starts_at_first_token_and_is_complete(served: Served) -> None:
    head, *rest = served.run(served.ask(stream=True, max_tokens=3))
    assert head.is_stream
    assert head.first.startswith(b"data: ")
    whole = head.first + b"".join(rest)
    assert whole.count(b"data: ") == 4
    assert whole.endswith(b"data: [DONE]\n\n")


def test_broken_stream_ends_with_cut(served: Served) -> None:
    head, *rest = served.run(served.ask(stream=True, max_tokens=3, fake={"cut_after": 1}))
    assert isinstance(head, Head)
    assert isinstance(rest[-1], Cut)


def test_stream_broken_before_first_token_is_unserved(served: Served) -> None:
    (only,) = served.run(served.ask(stream=True, fake={"cut_after": 0}))
    assert isinstance(only, Unserved)
    assert (only.status, only.code) == (502, "engine_failed")


def test_connection_reset_by_the_engine_is_unserved(served: Served) -> None:
    (only,) = served.run(served.ask(fake={"reset": True}))
    assert isinstance(only, Unserved)


def test_errors_of_a_healthy_engine_are_passed_on(served: Served) -> None:
    for status in (400, 429, 500, 503):
        (head,) = served.run(served.ask(fake={"status": status}))
        assert isinstance(head, Head)
        assert head.status == status


def test_closing_the_iterator_cancels_the_engine_request(served: Served) -> None:
    async def begin_and_leave() -> None:
        raw = json.dumps({"model": "m", "stream": True, "fake": {"hang": "stream"}}).encode()
        request = EngineRequest("POST", "/v1/completions", body=raw)
        parts = served.replica.serve(request)
        assert isinstance(await anext(parts), Head)
        await parts.aclose()  # type: ignore[attr-defined]

    served.run(begin_and_leave())
    wait_until(lambda: served.state()["counts"].get("cancelled"))
    served.wait_until(lambda: served.replica.model.gate.in_flight == 0)


def test_many_requests_wake_a_sleeping_replica_once(served: Served) -> None:
    model = served.replica.model

    async def sleep_and_ask() -> list[Any]:
        assert model.gate.ask_sleep(asyncio.get_running_loop().time(), by_hand=True) is None
        await model.settled()
        assert model.state is State.ASLEEP
        assert segment.inspect(served.replica.instance).usage["asleep"]
        (only,) = await served.ask()
        assert (only.code, model.state) == (ASLEEP, State.ASLEEP)
        return await asyncio.gather(*(served.ask(knows_of_sleep=True) for _ in range(20)))

    wakes = model.wakes
    answers = served.run(sleep_and_ask())
    assert all(isinstance(head, Head) and head.status == 200 for (head,) in answers)
    assert model.wakes == wakes + 1
    assert served.state()["counts"]["wake_calls"] == 1
    assert "requests_while_asleep" not in served.state()["counts"]


def test_operator_routes_reach_the_replicas_controller(served: Served) -> None:
    async def call(method: str, path: str, **body: Any) -> tuple[int, Any]:
        request = EngineRequest(method, path, body=json.dumps(body).encode())
        reply = await served.replica.control(request)
        assert (reply.replica, reply.instance) == (served.replica.replica, served.replica.instance)
        return reply.status, json.loads(reply.body)

    status, memory = served.run(call("GET", "/memory"))
    assert status == 200
    assert served.replica.instance in [row["name"] for row in memory["instances"]]
    status, changed = served.run(call("PATCH", "/memory/*", limit="32M", wait=DEADLINE_S))
    assert (status, changed["answer"]["limit_bytes"]) == (200, 32 << 20), changed
    served.run(call("PATCH", "/memory/*", limit="64M", wait=DEADLINE_S))
    for action, state in (("sleep", State.ASLEEP), ("wakeup", State.AWAKE)):
        status, told = served.run(call("POST", f"/action/{action}/*"))
        assert (status, told["success"], served.replica.model.state) == (200, True, state)
    assert served.run(call("PATCH", "/memory/*", limit="wrong"))[0] == 400
    assert served.run(call("GET", "/none"))[0] == 404


def test_report_matches_the_ledger(served: Served) -> None:
    report = served.replica.report()
    assert (report["state"], report["queue"]) == ("awake", 0)
    assert report["guarantee_bytes"] == 16 << 20
    assert 0 < report["room_bytes"] <= 64 << 20
    assert served.replica.device_capacity_bytes() == 256 << 20
    assert json.loads(json.dumps(report)) == report


def test_unhealthy_engine_marks_the_replica_down(own: Served) -> None:
    own.change(health_status=503)
    own.wait_until(lambda: own.replica.problem)
    assert own.replica.report()["state"] == "down"
    (only,) = own.run(own.ask())
    assert isinstance(only, Unserved)
    assert only.code == "model_down"


def test_error_of_an_unhealthy_engine_is_unserved(own: Served) -> None:
    own.change(health_status=503)
    (only,) = own.run(own.ask(fake={"status": 500}))
    assert isinstance(only, Unserved)


def test_killed_engine_leaves_the_request_unserved(own: Served) -> None:
    async def ask_and_kill() -> list[Any]:
        asking = asyncio.create_task(own.ask(fake={"hang": "first"}))
        while not await asyncio.to_thread(lambda: own.state()["in_flight"]):
            await asyncio.sleep(0.01)
        own.engine.kill()
        return await asking

    (only,) = own.run(ask_and_kill())
    assert isinstance(only, Unserved)
    own.wait_until(lambda: own.replica.problem)
    assert "ended with 137" in (own.replica.problem or "")


def test_failed_engine_start_error_has_its_output() -> None:
    async def start() -> None:
        await EngineReplica(settings("--die=3"), "m", "r").start()

    with pytest.raises(ClusterError, match=r"ended with 3\n.*dying as told"):
        asyncio.run(start())


def test_replica_log_is_kept_only_after_a_problem(own: Served) -> None:
    path = engine_logs.path_of(own.replica.instance)
    assert path.read_text().startswith("ready ")
    engine_logs.remove_oldest()
    assert path.exists()
    own.run(own.replica.stop())
    assert not path.exists()
    with pytest.raises(ClusterError):
        own.run(EngineReplica(settings("--die=3"), "m", "failing").start())
    assert "dying as told" in engine_logs.path_of("ray-m-failing").read_text()


def test_start_removes_the_oldest_logs_of_ended_replicas(shared: Served) -> None:
    folder = engine_logs.path_of("x").parent
    running = engine_logs.path_of(shared.replica.instance)
    os.utime(running, (1, 1))
    old = [folder / f"old{number}.log" for number in range(engine_logs.KEPT + 3)]
    for age, path in enumerate(old):
        path.write_text("x")
        os.utime(path, (4e9 - age, 4e9 - age))
    engine_logs.remove_oldest()
    assert [path.exists() for path in old] == [True] * engine_logs.KEPT + [False] * 3
    assert running.exists()
    for path in old:
        path.unlink(missing_ok=True)


def test_launcher_ends_engine_after_replica_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'kvelastic.integration.ray.launcher',"
        " str(os.getpid()), *sys.argv[1:]], start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(1000)\n"
    )
    command = [sys.executable, str(FAKE), "--outlives-its-parent"]
    replica = psutil.Popen(
        [sys.executable, "-c", program, *command], stdout=-1, text=True, env=dict(os.environ)
    )
    launcher = psutil.Process(int(replica.stdout.readline()))
    assert replica.stdout.readline().startswith("ready ")  # it listens
    (engine,) = launcher.children()
    replica.send_signal(signal.SIGKILL)
    wait_until(lambda: not launcher.is_running() and not engine.is_running())
    replica.wait()
    replica.stdout.close()
