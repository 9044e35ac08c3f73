"""Sleep and wake with real processes: by hand, by time, by requests, and when engines fail."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running import Controller, Engine, config_for
from waiting import wait_until

pytestmark = pytest.mark.slow


def many(url: str, count: int, **body: Any) -> list[tuple[int, str | None]]:
    """So many requests at once: the status of each, and its Retry-After."""

    async def run() -> list[tuple[int, str | None]]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one() -> tuple[int, str | None]:
                request = {"model": "m", "prompt": "x", **body}
                async with session.post(url + "/v1/completions", json=request) as response:
                    await response.read()
                    return response.status, response.headers.get("retry-after")

            return await asyncio.gather(*(one() for _ in range(count)))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Engine, Controller]]:
    with Engine() as engine, Controller(config_for(engine)) as front:
        yield engine, front


@pytest.fixture
def both(shared: tuple[Engine, Controller]) -> tuple[Engine, Controller]:
    """An engine and a controller as if they had just started, for tests of the usual settings."""
    engine, front = shared
    engine.reset()
    wait_until(lambda: front.post("/action/wakeup/m").status_code == 200)
    engine.reset()
    return engine, front


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_sleep_and_wake_by_hand(kind: str) -> None:
    with Engine(kind) as engine, Controller(config_for(engine)) as front:
        answer = front.post("/action/sleep/m")
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert engine.state()["asleep"]
        status = front.get("/sleep/status").json()
        assert status["sleeping_models"]["m"]["manual_sleep"] is True
        assert front.post("/action/sleep/m").json()["success"]  # again: it sleeps already
        assert engine.count("sleep_calls") == 1
        assert front.post("/action/wakeup/m").json()["success"]
        assert not engine.state()["asleep"]
        assert front.get("/sleep/status").json()["sleeping_models"] == {}


def queued(front: Controller) -> int:
    return int(front.get("/models").json()["models"]["m"]["queued"])


def memory_mib(front: Controller) -> float:
    status = Path(f"/proc/{front.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) / 1024


def test_thousand_concurrent_requests_wake_a_model_once(
    both: tuple[Engine, Controller],
) -> None:
    engine, front = both
    before_mib = memory_mib(front)
    front.post("/action/sleep/m")
    engine.change(wake_hold="w")

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(many, front.url, 1000)
        wait_until(lambda: queued(front) == 1000)
        engine.release("w")
        answers = asked.result()
    assert [status for status, _ in answers] == [200] * 1000
    grown_mib = memory_mib(front) - before_mib
    print(f"its memory's peak has grown by {grown_mib:.0f} MiB")
    assert grown_mib < 150  # with a connection, a request and an answer for each of them
    assert engine.count("wake_calls") == 1
    assert engine.count("requests") == 1000
    assert engine.count("requests_while_asleep") == 0


def test_full_queue_is_429_with_retry_after(
    both: tuple[Engine, Controller],
) -> None:
    engine, front = both
    lines = len(front.lines)

    def refused() -> int:
        return sum('"status": 429' in line for line in list(front.lines)[lines:])

    config = config_for(engine, sleep={"queue_limit": 10, "min_sleep": 0})
    with front.reloaded(config), ThreadPoolExecutor(1) as threads:
        front.post("/action/sleep/m")
        engine.change(wake_hold="w")
        asked = threads.submit(many, front.url, 50)
        wait_until(lambda: refused() == 40)
        engine.release("w")
        answers = asked.result()
        assert sorted(status for status, _ in answers) == [200] * 10 + [429] * 40
        assert all(after for status, after in answers if status == 429)
        assert engine.count("wake_calls") == 1


def test_queued_request_times_out(both: tuple[Engine, Controller]) -> None:
    engine, front = both
    with front.reloaded(config_for(engine, sleep={"queue_timeout": "100ms", "min_sleep": 0})):
        front.post("/action/sleep/m")
        engine.change(wake_hold="w")
        response = front.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
        assert response.headers["retry-after"]
        engine.release("w")


def test_disconnected_client_leaves_the_queue(
    both: tuple[Engine, Controller],
) -> None:
    engine, front = both
    front.post("/action/sleep/m")
    engine.change(wake_hold="w")

    body = json.dumps({"model": "m"}).encode()
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        wait_until(lambda: queued(front) == 1)
    wait_until(lambda: queued(front) == 0)
    engine.release("w")
    wait_until(lambda: front.state() == "awake")
    assert engine.count("requests") == 0


def test_a_stream_keeps_its_model_awake(both: tuple[Engine, Controller]) -> None:
    """Another model that is used after the stream has begun falls asleep twice meanwhile."""
    engine, front = both
    sleep = {"check_every": "20ms", "min_sleep": 0}
    with Engine("vllm", "other") as other:
        config = config_for(engine, other, model={"ttl": "100ms"}, sleep=sleep)
        with front.reloaded(config):
            body = {"model": "m", "stream": True, "fake": {"hold": "h"}}
            with front.client.stream("POST", "/v1/completions", json=body) as response:
                pieces = response.iter_raw()
                next(pieces)
                before = engine.count("sleep_calls")  # it may have slept before the request
                refused = front.post("/action/sleep/m")
                assert (refused.status_code, refused.json()["success"]) == (409, False)
                for _ in range(2):
                    assert front.complete("other").status_code == 200
                    wait_until(lambda: other.state()["asleep"])
                candidates = front.get("/sleep/candidates").json()["sleep_candidates"]
                assert "m" not in str(candidates)
                assert engine.count("sleep_calls") == before
                engine.release("h")
                b"".join(pieces)
            wait_until(lambda: engine.state()["asleep"])
            assert engine.count("slept_while_busy") == 0


def test_unused_model_sleeps_and_a_request_wakes_it() -> None:
    with Engine() as engine:
        sleep = {"auto": True, "idle_after": "100ms", "check_every": "20ms", "min_sleep": 0}
        with Controller(config_for(engine, sleep=sleep)) as front:
            wait_until(lambda: engine.state()["asleep"])
            assert front.complete().status_code == 200
            wait_until(lambda: engine.count("sleep_calls") == 2)


def test_a_pinned_model_stays_awake() -> None:
    with Engine("vllm", "pinned") as pinned, Engine("vllm", "free") as free:
        sleep = {"auto": True, "idle_after": "50ms", "check_every": "20ms"}
        config = config_for(pinned, free, sleep=sleep)
        config["models"][0]["pin"] = True
        with Controller(config) as front:
            wait_until(lambda: front.state("free") == "asleep")
            assert front.state("pinned") == "awake"
            assert pinned.count("sleep_calls") == 0


def test_request_waits_for_min_sleep() -> None:
    with Engine() as engine:
        sleep = {"auto": True, "idle_after": "50ms", "check_every": "20ms", "min_sleep": "500ms"}
        with Controller(config_for(engine, sleep=sleep)) as front:
            wait_until(lambda: front.state() == "asleep")
            before_s = time.monotonic()
            slept_s = front.get("/sleep/status").json()["sleeping_models"]["m"]["sleep_duration"]
            assert front.complete().status_code == 200
            assert time.monotonic() - before_s + slept_s >= 0.45


def test_without_wake_on_request_asleep_model_is_503(both: tuple[Engine, Controller]) -> None:
    engine, front = both
    with front.reloaded(config_for(engine, sleep={"wake_on_request": False})):
        front.post("/action/sleep/m")
        response = front.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_asleep")
        assert engine.state()["asleep"]


def test_failed_sleep_is_rolled_back(
    both: tuple[Engine, Controller],
) -> None:
    engine, front = both
    engine.change(sleep_status=500)
    answer = front.post("/action/sleep/m")
    assert (answer.status_code, answer.json()["success"]) == (502, False)
    assert "127.0.0.1" not in answer.text
    assert front.complete().status_code == 200
    assert front.state() == "awake"


def test_sleep_of_a_broken_engine_reports_down(both: tuple[Engine, Controller]) -> None:
    engine, front = both
    engine.change(sleep_status=500, health_status=503)
    answer = front.post("/action/sleep/m")
    assert (answer.status_code, answer.json()["state"]) == (503, "down")
    assert "serves as before" not in answer.json()["message"]


def test_ended_engine_is_down_until_it_returns() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front:
        assert front.state() == "awake"
        engine.end(signal.SIGKILL)
        wait_until(lambda: front.state() == "down")
        assert front.complete().json()["error"]["code"] == "engine_unreachable"
        woken = front.post("/action/wakeup/m")
        assert (woken.status_code, woken.json()["success"]) == (503, False)
        with Engine("vllm", "m", engine.port):
            assert front.complete().status_code == 200, "requests are tried while it is down"
            assert front.state() == "awake"


def test_failed_wake_is_rolled_back_in_all_replicas() -> None:
    with Engine() as one, Engine() as two:
        config = config_for(one, model={"url": None, "urls": [one.url, two.url]})
        with Controller(config) as front:
            front.post("/action/sleep/m")
            two.change(wake_status=500)
            response = front.complete()
            assert (response.status_code, response.json()["error"]["code"]) == (503, "wake_failed")
            assert response.headers["retry-after"]
            assert one.state()["asleep"]
            assert front.state() == "asleep"
            two.change(wake_status=200)
            assert front.post("/action/wakeup/m").json()["success"]
            assert front.complete().status_code == 200


def test_hanging_wake_times_out_all_waiters(both: tuple[Engine, Controller]) -> None:
    """The requests come while it falls asleep, so all of them wait for the same wake."""
    engine, front = both
    config = config_for(engine, sleep={"wake_timeout": "100ms", "min_sleep": 0})
    with front.reloaded(config), ThreadPoolExecutor(2) as threads:
        engine.change(sleep_hold="s", wake_hold="never")
        slept = threads.submit(front.post, "/action/sleep/m")
        wait_until(lambda: "s" in engine.state()["held"])
        asked = threads.submit(many, front.url, 20)
        wait_until(lambda: queued(front) == 20)
        engine.release("s")
        assert slept.result().status_code == 200
        assert [status for status, _ in asked.result()] == [503] * 20
        assert engine.count("wake_calls") == 1


def test_starting_controller_finds_models_asleep() -> None:
    with Engine() as engine:
        with Controller(config_for(engine)) as front:
            front.post("/action/sleep/m")
        with Controller(config_for(engine)) as front:
            assert front.state() == "asleep"
            assert front.complete().status_code == 200
        assert engine.count("requests_while_asleep") == 0


def test_sleep_of_engine_without_sleep_is_400() -> None:
    with Engine("openai") as engine, Controller(config_for(engine)) as front:
        answer = front.post("/action/sleep/m")
        assert (answer.status_code, answer.json()["success"]) == (400, False)
        assert front.post("/action/sleep/nobody").status_code == 404
        assert front.get("/action/sleep/m").status_code == 405


def test_sigterm_waits_for_requests_and_exits_0() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front:
        body = {"model": "m", "stream": True, "fake": {"hold": "h"}}
        with front.client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            first = next(pieces)
            front.send(signal.SIGTERM)
            front.wait_for_line("Shutting down")
            engine.release("h")
            assert b"[DONE]" in first + b"".join(pieces)
        assert front.wait() == 0  # a second SIGTERM would end it at once
        assert not [line for line in front.lines if "Traceback" in line]
