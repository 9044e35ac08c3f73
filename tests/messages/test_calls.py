"""Requests and replies between endpoints and channels, over both kinds of sockets."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from channel import connect
from processes import LineProgram
from spoken import PROTOCOL, Answer, Ask, Numbers, answer
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    InvalidArgumentError,
    LimitError,
    MessageError,
)
from kvelastic.messages import Address, Endpoint, Request, SecretFile, parse_address
from kvelastic.messages.connection import MOST_UNANSWERED

Starter = Callable[[str], tuple[LineProgram, Address]]


def descriptors() -> int:
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_channel_call_returns_replies_and_errors(server: Endpoint, secret_path: Path) -> None:
    with connect(server.addresses[0], PROTOCOL, secret=SecretFile(secret_path)) as channel:
        assert channel.call(Ask("kv"), timeout_s=DEADLINE_S) == Answer(2, "kv")
        assert channel.call(Numbers([1, 2, 3]), timeout_s=DEADLINE_S) == Answer(6)
        assert channel.call(Ask("large"), timeout_s=DEADLINE_S) == Answer(0, "x" * 100_000)
        with pytest.raises(LimitError, match="no more than this"):
            channel.call(Ask("refuse"), timeout_s=DEADLINE_S)
        with pytest.raises(ChannelError.__base__, match="its log says why"):  # type: ignore[arg-type]
            channel.call(Ask("fail"), timeout_s=DEADLINE_S)
        assert channel.call(Ask("later"), timeout_s=DEADLINE_S) == Answer(7)


def test_endpoint_calls_from_many_threads(server: Endpoint, client: Endpoint) -> None:
    connection = client.connect(server.addresses[0], timeout_s=DEADLINE_S)

    def ask(number: int) -> None:
        text = str(number)
        assert connection.call(Ask(text), timeout_s=DEADLINE_S) == Answer(len(text), text)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(500)))
    with pytest.raises(LimitError):
        connection.call(Ask("refuse"), timeout_s=DEADLINE_S)


def test_both_ends_call_each_other(tmp_path: Path) -> None:
    heard: list[object] = []

    def ask_back(request: Request) -> None:
        def back() -> None:
            heard.append(request.connection.call(Ask("back"), timeout_s=DEADLINE_S))
            request.answer(Answer(1))

        threading.Thread(target=back).start()

    address = parse_address(f"unix://{tmp_path}/s")
    with Endpoint(PROTOCOL, ask_back, listen=[address]), Endpoint(PROTOCOL, answer) as other:
        assert other.connect(address).call(Ask("x"), timeout_s=DEADLINE_S) == Answer(1)
    assert heard == [Answer(4, "back")]


def test_blocking_call_in_handler_thread_raises(tmp_path: Path) -> None:
    def wrong(request: Request) -> None:
        request.connection.call(Ask("back"), timeout_s=DEADLINE_S)

    address = parse_address(f"unix://{tmp_path}/s")
    with (
        Endpoint(PROTOCOL, wrong, listen=[address]),
        connect(address, PROTOCOL) as channel,
        pytest.raises(InvalidArgumentError, match="a separate thread"),
    ):
        channel.call(Ask("x"), timeout_s=DEADLINE_S)


@pytest.mark.slow
def test_descriptors_are_passed_both_ways_without_leaks(tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/s")
    with Endpoint(PROTOCOL, answer, listen=[address]), Endpoint(PROTOCOL, answer) as client:
        connection = client.connect(address)
        before = descriptors()
        reply, received = connection.call_for_descriptors(Ask("descriptor"), timeout_s=DEADLINE_S)
        assert reply == Answer(1)
        (fd,) = received
        assert os.read(fd, 100) == b"through a pipe"
        assert not os.get_inheritable(fd)
        os.close(fd)
        ends = [os.pipe() for _ in range(2)]
        for number, (_, write) in enumerate(ends):
            os.write(write, str(number).encode())
        sent = [read for read, _ in ends]
        taken = connection.call(Ask("take"), timeout_s=DEADLINE_S, descriptors=sent)
        assert taken == Answer(2, "01")
        assert connection.call(Ask("not taken"), timeout_s=DEADLINE_S, descriptors=sent)
        assert connection.call(Ask("descriptor"), timeout_s=DEADLINE_S) == Answer(1)
        for read, write in ends:
            os.close(read)
            os.close(write)
        assert connection.call(Ask("all closed"), timeout_s=DEADLINE_S)
        assert descriptors() == before


def test_descriptors_over_tcp_are_rejected(secret_path: Path) -> None:
    secret = SecretFile(secret_path)
    listen = [parse_address("tcp://127.0.0.1:0")]
    with (
        Endpoint(PROTOCOL, answer, listen=listen, secret=secret) as server,
        Endpoint(PROTOCOL, answer, secret=secret) as client,
    ):
        connection = client.connect(server.addresses[0])
        with pytest.raises(InvalidArgumentError, match="Unix socket only"):
            connection.call(Ask("take"), timeout_s=DEADLINE_S, descriptors=[0])
        with pytest.raises(InvalidArgumentError, match="Unix socket only"):
            connection.call(Ask("descriptor"), timeout_s=DEADLINE_S)
        assert connection.call(Ask("goes on"), timeout_s=DEADLINE_S)


def test_late_reply_is_not_matched_to_next_request(server: Endpoint, client: Endpoint) -> None:
    connection = client.connect(server.addresses[0], timeout_s=DEADLINE_S)
    with pytest.raises(ChannelTimeoutError, match="has not answered a Ask in 0 s"):
        connection.call(Ask("silent"), timeout_s=0)
    assert connection.call(Ask("next"), timeout_s=DEADLINE_S) == Answer(4, "next")
    (at_server,) = server.connections
    at_server.kept.answer(Answer(99))  # type: ignore[attr-defined]
    assert connection.call(Ask("again"), timeout_s=DEADLINE_S) == Answer(5, "again")


def test_too_many_unanswered_requests_raise(server: Endpoint, client: Endpoint) -> None:
    connection = client.connect(server.addresses[0], timeout_s=DEADLINE_S)
    for _ in range(MOST_UNANSWERED):
        with pytest.raises(ChannelTimeoutError):
            connection.call(Ask("silent"), timeout_s=0)
    with pytest.raises(MessageError, match="ask later"):
        connection.call(Ask("one more"), timeout_s=DEADLINE_S)


def test_oversized_message_is_not_sent(server: Endpoint, client: Endpoint) -> None:
    connection = client.connect(server.addresses[0], timeout_s=DEADLINE_S)
    with pytest.raises(MessageError, match="send it in parts"):
        connection.call(Answer(0, "x" * 200_000), timeout_s=DEADLINE_S)
    assert connection.call(Ask("goes on"), timeout_s=DEADLINE_S)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_killed_peer_closes_connection_and_fails_calls(
    kind: str, tmp_path: Path, client: Endpoint, start_server: Starter
) -> None:
    process, address = start_server(
        f"unix://{tmp_path}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    )
    gone = threading.Event()
    client._on_close = lambda connection: gone.set()
    connection = client.connect(address, timeout_s=DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection.call, Ask("silent"), DEADLINE_S)
        # So the other one is on its way, too.
        assert connection.call(Ask("kv"), timeout_s=DEADLINE_S)
        process.kill()
        assert gone.wait(DEADLINE_S)
        with pytest.raises(ChannelClosedError):
            asked.result()
    assert not connection.is_open
    with pytest.raises(ChannelClosedError):
        connection.call(Ask("kv"), timeout_s=DEADLINE_S)
    # And a new server takes the place of the dead one.
    if kind == "unix":
        start_server(str(address))
        assert client.connect(address, timeout_s=DEADLINE_S).call(Ask("kv"), timeout_s=DEADLINE_S)


@pytest.mark.slow
def test_stopped_peer_times_out_and_stays_connected(
    client: Endpoint, start_server: Starter, tmp_path: Path
) -> None:
    process, address = start_server("tcp://127.0.0.1:0")
    connection = client.connect(address, timeout_s=DEADLINE_S)
    process.stop()
    with pytest.raises(ChannelTimeoutError):
        connection.call(Ask("kv"), timeout_s=1.5)  # twice what a lost host takes
    assert connection.is_open
    process.go_on()
    assert connection.call(Ask("kv"), timeout_s=DEADLINE_S)


def test_peer_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/s")
    let_go = threading.Event()
    with (
        Endpoint(PROTOCOL, answer, listen=[address]) as server,
        connect(address, PROTOCOL) as channel,
    ):
        assert channel.call(Ask("kv"), timeout_s=DEADLINE_S)
        (opened,) = server.connections

        def read_nothing() -> None:
            let_go.wait()

        channel.endpoint.run_soon(read_nothing)

        def send_much() -> None:
            for _ in range(1000):
                opened.notify(Answer(0, "x" * 100_000))

        try:
            with pytest.raises(ChannelClosedError, match="does not read"):
                send_much()
        finally:
            let_go.set()
        assert not opened.is_open


def test_forked_child_keeps_no_connection(tmp_path: Path, start_server: Starter) -> None:
    """The bug: a child of a killed process kept its connections, so nobody saw that it had gone."""
    program = """
import os, signal, sys
from spoken import PROTOCOL, answer
from kvelastic.messages import Endpoint, parse_address
endpoint = Endpoint(PROTOCOL, answer)
connection = endpoint.connect(parse_address(sys.argv[1]))
child = os.fork()
if child == 0:
    endpoint.close()
    os.write(1, b"forked\\n")
    signal.pause()
os.write(1, f"{child}\\n".encode())
sys.stdin.read()
"""
    gone = threading.Event()
    address = parse_address(f"unix://{tmp_path}/s")
    with Endpoint(PROTOCOL, answer, listen=[address], on_close=lambda _: gone.set()) as server:
        here = {"PYTHONPATH": str(Path(__file__).parent)}
        with LineProgram("-c", program, str(address), environment=here) as parent:
            lines = {parent.read(), parent.read()}
            assert "forked" in lines
            (child,) = lines - {"forked"}
            try:
                wait_until(lambda: bool(server.connections), "the connection has not come")
                parent.kill()
                assert gone.wait(DEADLINE_S)
            finally:
                os.kill(int(child), signal.SIGKILL)
