"""`kvctl --address` against a real controller with a real instance, and against other servers."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from called_kvctl import kvctl
from ledger_instance import Instance
from running import Controller, Engine, config_for
from waiting import wait_until

from kvelastic.shared import segment

pytestmark = pytest.mark.slow

MIB = 1 << 20
ADMIN = "for-operators"


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    group = f"adr-{os.getpid()}"
    with Instance(KVELASTIC_HOST_MEMORY="256M", KVELASTIC_LEDGER=group) as instance:
        yield instance


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("vllm", "org/m") as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine, instance: Instance) -> Iterator[Controller]:
    auth = {"api_keys": ["for-clients"], "admin_keys": [ADMIN]}
    with Controller(config_for(engine, model={"instance": instance.name}, auth=auth)) as front:
        yield front


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_CONTROLLER_KEY", ADMIN)


def limit_of(instance: Instance) -> int:
    return int(segment.inspect(instance.name).usage["limit_bytes"])


def test_list_shows_the_remote_instances(front: Controller, instance: Instance) -> None:
    remote = json.loads(kvctl("--address", front.url, "list", instance.name, "--json").stdout)
    local = json.loads(kvctl("list", instance.name, "--json").stdout)
    assert [row.keys() for row in remote] == [row.keys() for row in local]
    assert (remote[0]["name"], remote[0]["pid"]) == (instance.name, local[0]["pid"])
    assert instance.name in kvctl("--address", front.url, "list").stdout
    by_model = kvctl("--address", front.url, "watch", "--count=1", "--json", "org/m").stdout
    assert json.loads(by_model)[0]["name"] == instance.name


def test_limits_are_set_remotely(front: Controller, instance: Instance) -> None:
    done = kvctl("--address", front.url, "limit", instance.name, "64M", "--wait", "60")
    assert (done.exit_code, limit_of(instance)) == (0, 64 * MIB), done.stderr
    assert done.stdout.startswith(f"{instance.name}: limit 64.00 MiB (67108864 bytes) applied")
    done = kvctl("--address", front.url, "limit-percent", "org/m", "50%", "--wait", "60")
    assert (done.exit_code, limit_of(instance)) == (0, 128 * MIB), done.stderr
    words = ("set", "org/m", "--min=16M", "--limit=none", "--priority=3", "--wait=60")
    done = kvctl("--address", front.url, *words)
    assert done.exit_code == 0, done.stderr
    row = json.loads(kvctl("list", instance.name, "--json").stdout)[0]
    assert (row["min_bytes"], row["priority"], row["is_limited"]) == (16 * MIB, 3, False)
    assert kvctl("--address", front.url, "trim", "org/m", "--wait=60").exit_code == 0


def test_refused_change_exits_1_with_reason(front: Controller) -> None:
    refused = kvctl("--address", front.url, "set", "org/m", "--min", "1T", "--wait", "60")
    assert refused.exit_code == 1
    assert "refused" in refused.stderr


def test_sleep_and_wake_include_the_engine(front: Controller, engine: Engine) -> None:
    slept = kvctl("--address", front.url, "sleep", "org/m")
    assert (slept.exit_code, slept.stdout) == (0, "org/m: The model is asleep.\n"), slept.stderr
    assert front.get("/models", headers={"x-api-key": ADMIN}).json()["models"]["org/m"][
        "state"
    ] == ("asleep")
    assert kvctl("--address", front.url, "wake", "org/m").exit_code == 0
    wait_until(lambda: engine.count("wake_calls"))


@pytest.mark.parametrize("words", [("limit", "nobody", "1G"), ("sleep", "nobody"), ("list", "x")])
def test_unknown_name_lists_the_known_ones(front: Controller, words: tuple[str, ...]) -> None:
    failed = kvctl("--address", front.url, *words)
    assert failed.exit_code == 1
    assert "org/m" in failed.stderr


def test_remote_change_of_instance_without_model_fails(front: Controller) -> None:
    with Instance(KVELASTIC_HOST_MEMORY="64M", KVELASTIC_LEDGER=f"oth-{os.getpid()}") as other:
        failed = kvctl("--address", front.url, "limit", other.name, "1G")
    assert failed.exit_code == 1
    assert "belongs to no model" in failed.stderr


@pytest.mark.parametrize(("key", "status"), [("", 401), ("wrong", 401), ("for-clients", 403)])
def test_wrong_key_names_the_variable(
    front: Controller, monkeypatch: pytest.MonkeyPatch, key: str, status: int
) -> None:
    monkeypatch.setenv("KVELASTIC_CONTROLLER_KEY", key)
    words = ("limit", "org/m", "1G") if status == 403 else ("list",)
    failed = kvctl("--address", front.url, *words)
    assert failed.exit_code == 1
    assert f"({status})" in failed.stderr
    assert "KVELASTIC_CONTROLLER_KEY" in failed.stderr
    assert "wrong" not in failed.stderr


def test_key_invalid_as_header_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_CONTROLLER_KEY", "secret\nx: y")
    failed = kvctl("--address", "http://127.0.0.1:1", "list")
    assert failed.exit_code == 1
    assert "secret" not in failed.stderr


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:8080", "ftp://x", "http://", "http://a:b@c", "http://a:99999", "x",
        "http://[::1", "http://[x]", "http://my host:8080", "http://a\x01b",
    ],
)  # fmt: skip
def test_malformed_address_is_a_usage_error(address: str) -> None:
    failed = kvctl("--address", address, "list")
    assert (failed.exit_code, "is not accepted" in failed.stderr) == (2, True)


@pytest.mark.parametrize(
    ("address", "server"),
    [("http://[::1]", ("::1", 80)), ("https://[2001:db8::a]", ("2001:db8::a", 443))],
)
def test_ipv6_address_without_port_has_the_default(
    address: str, server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def refuse(server: tuple[str, int], *_: object) -> socket.socket:
        asked.append(server)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    failed = kvctl("--address", address, "list")
    assert (failed.exit_code, asked) == (1, [server])
    assert f"{address} cannot be reached" in failed.stderr


def test_local_only_command_lists_the_remote_ones() -> None:
    failed = kvctl("--address", "http://127.0.0.1:1", "gc")
    assert failed.exit_code == 2
    assert "limit-percent, list" in failed.stderr


def test_closed_port_error_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        failed = kvctl("--address", address, "list")
    assert (failed.exit_code, f"{address} cannot be reached" in failed.stderr) == (1, True)


@contextmanager
def server(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server with one answer for every connection, and the requests that it got."""
    got: list[bytes] = []

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                got.append(connection.recv(65536))
                if got[-1] == b"end":
                    return
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", got
        with socket.create_connection(listener.getsockname()) as last:
            last.sendall(b"end")
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01 not http",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[[[[[[[[[",
        b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n" + b"[" * 60000,
        b'HTTP/1.1 200 OK\r\ncontent-length: 35\r\n\r\n{"models": {}, "instances": [{"a":1}]}',
        b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_responses_of_other_servers_are_errors(answer: bytes) -> None:
    with server(answer) as (address, _):
        failed = kvctl("--address", address, "list")
    assert failed.exit_code == 1
    assert address in failed.stderr


def test_redirect_is_not_followed() -> None:
    moved = b"HTTP/1.1 307 Moved\r\nlocation: %s/memory\r\ncontent-length: 0\r\n\r\n"
    with server(b"") as (other, got), server(moved % other.encode()) as (address, _):
        assert kvctl("--address", address, "list").exit_code == 1
        assert got == []
