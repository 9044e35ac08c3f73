"""Servers that start and end at the same moment, and clients that stop waiting for one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
from spoken import PROTOCOL, answer
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import ChannelClosedError, ChannelError, ChannelTimeoutError
from kvelastic.messages import Address, Connection, Endpoint, endpoint, parse_address, sockets
from kvelastic.messages.sockets import ListeningSocket, connect_socket


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return parse_address(f"unix://{tmp_path}/s")


def once(do: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `do` in its first call only."""
    left = [do]

    def call() -> None:
        if left:
            left.pop()()

    return call


class Interrupted(BaseException):
    """A signal's handler raises it."""


def interrupt(*_: object) -> None:
    raise Interrupted


@pytest.fixture
def interrupted_by_signals() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def wait_for(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def is_reachable(address: Address) -> bool:
    connect_socket(address, DEADLINE_S).close()
    return True


def test_two_servers_starting_at_once_exclude_another(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one starts when the first has its file and does not listen yet."""
    listen = socket.socket.listen

    @once
    def start_second() -> None:
        with pytest.raises(ChannelError, match="choose another"):
            ListeningSocket(address)

    def listen_late(self: socket.socket, backlog: int) -> None:
        start_second()
        listen(self, backlog)

    monkeypatch.setattr(sockets, "_FOLDER_WAIT_S", 0.0)
    monkeypatch.setattr(socket.socket, "listen", listen_late)
    first = ListeningSocket(address)
    try:
        assert is_reachable(address)
    finally:
        first.close()


def test_slow_connect_shortens_the_handshake(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

    def connect_slowly(to: Address, timeout_s: float) -> socket.socket:
        clock.now_s += timeout_s
        return connect_socket(to, timeout_s)

    clock = Clock()
    with socket.socket(socket.AF_UNIX) as silent, Endpoint(PROTOCOL, answer) as client:
        silent.bind(address.path)
        silent.listen()
        monkeypatch.setattr(endpoint, "time", clock)
        monkeypatch.setattr(endpoint, "connect_socket", connect_slowly)
        with pytest.raises(ChannelTimeoutError, match="has not answered"):
            client.connect(address, DEADLINE_S)


def test_close_after_a_late_connect_closes_its_socket(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's thread sees that it ends before it has seen the connection."""
    run = Endpoint._run

    def run_late(self: Endpoint) -> None:
        wait_until(lambda: self._is_closing)
        run(self)

    connected: list[socket.socket] = []

    def connect(to: Address, timeout_s: float) -> socket.socket:
        connected.append(connect_socket(to, timeout_s))
        return connected[0]

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address.path)
        silent.listen()
        monkeypatch.setattr(Endpoint, "_run", run_late)
        monkeypatch.setattr(endpoint, "connect_socket", connect)
        with (
            Endpoint(PROTOCOL, answer) as client,
            pytest.raises(ChannelTimeoutError, match="has not answered"),
        ):
            client.connect(address, 0.0)
        assert connected[0].fileno() == -1, "the socket is open"


def test_connect_waits_while_the_backlog_is_full(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address.path)
        server.listen(0)
        stack.enter_context(connect_socket(address, DEADLINE_S))
        with pytest.raises(ChannelClosedError, match="does not accept in 0 s"):
            connect_socket(address, 0.0)

        def accept_one(_: float) -> None:
            stack.enter_context(server.accept()[0])

        monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=monotonic, sleep=accept_one))
        stack.enter_context(connect_socket(address, DEADLINE_S))


@pytest.mark.usefixtures("interrupted_by_signals")
def test_interrupted_connect_leaves_no_connection(address: Address) -> None:
    """The server answers after that."""
    answers = threading.Event()
    main_thread = threading.get_ident()

    def interrupt_handshake() -> None:
        wait_until(lambda: client._newcomers.doors, "the handshake has not begun")
        signal.pthread_kill(main_thread, signal.SIGUSR1)

    with (
        Endpoint(PROTOCOL, answer, listen=[address]) as server,
        Endpoint(PROTOCOL, answer) as client,
    ):
        server.run_soon(lambda: wait_for(answers))
        other = threading.Thread(target=interrupt_handshake)
        other.start()
        try:
            with pytest.raises(Interrupted):
                client.connect(address, DEADLINE_S)
        finally:
            answers.set()
            other.join()
        wait_until(lambda: not client._newcomers.doors, "the handshake goes on")
        has_served = threading.Event()
        client.run_soon(has_served.set)
        wait_for(has_served)
        assert not any(one.is_open for one in client.connections)


def test_connect_interrupted_after_its_handshake_closes(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_and_interrupt(futures: Sequence[Future[Connection]], timeout_s: float) -> None:
        wait(futures, timeout_s)
        interrupt()

    monkeypatch.setattr(endpoint, "wait", wait_and_interrupt)
    with (
        Endpoint(PROTOCOL, answer, listen=[address]) as server,
        Endpoint(PROTOCOL, answer) as client,
    ):
        with pytest.raises(Interrupted):
            client.connect(address, DEADLINE_S)
        wait_until(lambda: not client.connections, "the client keeps the connection")
        wait_until(lambda: not server.connections, "the server keeps the connection")


def test_ending_server_keeps_its_successors_socket(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor starts just before the server that ends removes its file."""
    unlink = Path.unlink
    successors: list[ListeningSocket] = []

    @once
    def start_successor() -> None:
        with contextlib.suppress(ChannelError):  # the first server still has the address
            successors.append(ListeningSocket(address))

    def unlink_late(self: Path, missing_ok: bool = False) -> None:
        start_successor()
        unlink(self, missing_ok)

    first = ListeningSocket(address)
    monkeypatch.setattr(Path, "unlink", unlink_late)
    first.close()
    if not successors:
        successors.append(ListeningSocket(address))
    try:
        assert is_reachable(address)
    finally:
        successors[0].close()


def test_child_of_a_starting_server_holds_no_lock(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread forks while the server starts, and the child goes on."""
    listen = socket.socket.listen
    children: list[int] = []

    def fork_and_listen(self: socket.socket, backlog: int) -> None:
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        children.append(child)
        listen(self, backlog)

    monkeypatch.setattr(sockets, "_FOLDER_WAIT_S", 0.0)
    monkeypatch.setattr(socket.socket, "listen", fork_and_listen)
    beside = parse_address(f"{address}2")
    servers: list[ListeningSocket] = []
    try:
        servers += [ListeningSocket(one) for one in (address, beside)]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for server in servers:
            server.close()
