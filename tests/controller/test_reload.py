"""The configuration is read again while requests run."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from running import Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until


def test_adding_and_removing_models_loses_no_request() -> None:
    with (
        Engine("vllm", "one") as one,
        Engine("vllm", "two") as two,
        Controller(config_for(one)) as front,
    ):
        body = {"model": "one", "stream": True, "fake": {"hold": "h"}}
        with front.client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            first = next(pieces)
            front.write(config_for(two))
            told = front.post("/admin/reload").json()
            assert (told["added"], told["removed"]) == (["two"], ["one"])
            assert front.complete("two").status_code == 200
            assert front.complete("one").status_code == 404
            one.release("h")
            assert b"[DONE]" in first + b"".join(pieces)
        front.write(config_for(one, two))
        front.send(signal.SIGHUP)
        wait_until(lambda: front.complete("one").status_code == 200)


@pytest.mark.slow
def test_changed_model_settings_apply_and_keep_state() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front:
        front.post("/action/sleep/m")
        front.write(config_for(engine, model={"aliases": ["new"]}))
        assert front.post("/admin/reload").json()["changed"] == ["m"]
        assert front.state() == "asleep"
        assert front.complete("new").status_code == 200


def test_invalid_file_changes_nothing() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front:
        front.path.write_text("models: [{name: x}]")
        answer = front.post("/admin/reload")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "CONTROLLER_CONFIG")
        front.send(signal.SIGHUP)
        front.wait_for_line("the configuration is as before")
        assert front.complete().status_code == 200


@pytest.mark.slow
def test_settings_that_need_restart_are_listed() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front:
        front.write(config_for(engine, server={"header_timeout": 3}))
        assert front.post("/admin/reload").json()["needs_restart"] == ["server.header_timeout"]


def test_reload_changes_keys() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front:
        front.write(config_for(engine, auth={"api_keys": ["k"], "admin_keys": ["a"]}))
        assert front.post("/admin/reload").status_code == 200
        assert front.complete().status_code == 401


def test_reload_keeps_keys_while_reachable_from_outside() -> None:
    keys = {"api_keys": ["user"], "admin_keys": ["admin"]}
    admin = {"Authorization": "Bearer admin"}
    with (
        Engine() as engine,
        Controller(config_for(engine, server={"host": "0.0.0.0"}, auth=keys)) as front,
    ):
        front.write(config_for(engine))  # on 127.0.0.1, but only after a restart
        answer = front.post("/admin/reload", headers=admin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "CONTROLLER_CONFIG")
        assert front.complete().status_code == 401
        front.write(config_for(engine, auth=keys))
        for _ in range(2):
            answer = front.post("/admin/reload", headers=admin)
            assert answer.json()["needs_restart"] == ["server.host"]


@pytest.mark.slow
@pytest.mark.parametrize("new_one_sleeps", [False, True])
def test_queued_requests_move_to_the_new_engine(new_one_sleeps: bool) -> None:
    with Engine() as old, Engine() as new, Controller(config_for(old)) as front:
        assert front.post("/action/sleep/m").status_code == 200
        old.change(wake_hold="w")
        if new_one_sleeps:
            httpx.post(new.url + "/sleep?level=1", timeout=DEADLINE_S).raise_for_status()
        with ThreadPoolExecutor(5) as pool:
            waiting = [
                pool.submit(
                    httpx.post,
                    front.url + "/v1/completions",
                    json={"model": "m", "prompt": "x"},
                    timeout=DEADLINE_S,
                )
                for _ in range(5)
            ]
            wait_until(lambda: front.get("/models").json()["models"]["m"]["queued"] == 5)
            front.write(config_for(new))
            assert front.post("/admin/reload").json()["changed"] == ["m"]
            assert [each.result().status_code for each in waiting] == [200] * 5
        assert (old.count("requests"), new.count("requests")) == (0, 5)
        assert new.count("requests_while_asleep") == 0
        old.release("w")


@pytest.mark.slow
def test_queued_requests_of_removed_model_are_503() -> None:
    with (
        Engine("vllm", "one") as one,
        Engine("vllm", "two") as two,
        Controller(config_for(one)) as front,
    ):
        assert front.post("/action/sleep/one").status_code == 200
        one.change(wake_hold="w")
        with ThreadPoolExecutor(1) as pool:
            body = {"model": "one", "prompt": "x"}
            waiting = pool.submit(
                httpx.post, front.url + "/v1/completions", json=body, timeout=DEADLINE_S
            )
            wait_until(lambda: front.get("/models").json()["models"]["one"]["queued"] == 1)
            front.write(config_for(two))
            front.post("/admin/reload")
            answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_removed")
        one.release("w")


@pytest.mark.slow
def test_queued_request_with_old_served_name_is_503() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front, ThreadPoolExecutor(1) as pool:
        assert front.post("/action/sleep/m").status_code == 200
        engine.change(wake_hold="w")
        waiting = pool.submit(front.complete)
        wait_until(lambda: front.get("/models").json()["models"]["m"]["queued"] == 1)
        with front.reloaded(config_for(engine, model={"served_name": "other"})):
            engine.release("w")
            answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_changed")


@pytest.mark.slow
def test_reloaded_drain_timeout_applies_to_shutdown() -> None:
    body = {"model": "m", "stream": True, "fake": {"hang": "stream"}}
    with (
        Engine() as engine,
        Controller(config_for(engine, server={"drain_timeout": "1h"})) as front,
        front.client.stream("POST", "/v1/completions", json=body) as response,
    ):
        pieces = response.iter_raw()
        next(pieces)
        front.write(config_for(engine, server={"drain_timeout": 0}))
        answer = httpx.post(front.url + "/admin/reload", timeout=DEADLINE_S)
        assert answer.json()["needs_restart"] == []
        assert front.end() == 0
