"""Servers that start and end at the same moment, and clients that stop waiting for one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from kvelastic.errors import ChannelError
from kvelastic.messages import Address, parse_address, sockets
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
