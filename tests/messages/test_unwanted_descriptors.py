"""Descriptors that nothing takes: the receiver closes them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from spoken import PROTOCOL, Answer, Ask, answer
from waiting import DEADLINE_S

from kvelastic.errors import KvelasticError, LimitError
from kvelastic.messages import Endpoint, parse_address
from kvelastic.messages.frames import (
    MOST_DESCRIPTORS,
    Frame,
    FrameReader,
    FrameWriter,
    Kind,
    error_body,
)
from kvelastic.messages.handshake import Handshake

HELLO = Handshake(PROTOCOL, None, FrameReader(), FrameWriter(), is_client=True).begin()
REQUEST = PROTOCOL.encode(Ask("kv"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Endpoint]:
    with Endpoint(PROTOCOL, answer, listen=[parse_address(f"unix://{tmp_path}/s")]) as endpoint:
        yield endpoint


def with_descriptors(frame: bytes, count: int) -> bytes:
    """Return the frame with another number of announced descriptors."""
    return frame[:6] + bytes([count]) + frame[7:]


@pytest.mark.parametrize(
    ("is_authenticated", "frame"),
    [
        (False, with_descriptors(HELLO, MOST_DESCRIPTORS)),
        (False, FrameWriter().write(Kind.REQUEST, 1, REQUEST, MOST_DESCRIPTORS)),
        (True, FrameWriter().write(Kind.REQUEST, 1, REQUEST, MOST_DESCRIPTORS - 1)),
        (True, FrameWriter().write(Kind.ERROR, 0, error_body(LimitError("")), MOST_DESCRIPTORS)),
    ],
    ids=["hello", "request before hello", "more than announced", "error"],
)
def test_descriptors_of_a_bad_frame_are_closed(
    is_authenticated: bool, frame: bytes, server: Endpoint
) -> None:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(read, "rb", buffering=0) as end, socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(server.addresses[0].path)
        if is_authenticated:
            peer.sendall(HELLO)
            assert peer.recv(4096)
        socket.send_fds(peer, [frame], [write] * MOST_DESCRIPTORS)
        os.close(write)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
        has_served = threading.Event()
        server.run_soon(has_served.set)
        assert has_served.wait(DEADLINE_S)
        assert end.read(1) == b"", "the server holds the pipe's other end"


class SlowReplies(dict[int, "SimpleQueue[Frame | KvelasticError]"]):
    """Its reader is interrupted after it has found the caller, until the caller's time is over."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.is_late = threading.Event(), threading.Event()

    def pop(self, number: int, default: object = None) -> object:  # type: ignore[override]
        arrived = super().pop(number, default)
        if threading.current_thread() is threading.main_thread():
            self.is_late.set()
        else:
            self.found.set()
            assert self.is_late.wait(DEADLINE_S)
        return arrived


def test_reply_found_at_the_deadline_is_returned(server: Endpoint) -> None:
    with Endpoint(PROTOCOL, answer) as client:
        connection = client.connect(server.addresses[0], DEADLINE_S)
        replies = connection._waiting = SlowReplies()
        send = connection._send

        def send_and_find_reply(*arguments: Any, **named: Any) -> None:
            send(*arguments, **named)
            assert replies.found.wait(DEADLINE_S)

        connection._send = send_and_find_reply  # type: ignore[method-assign]
        reply, received = connection.call_for_descriptors(Ask("descriptor"), timeout_s=0)
        assert reply == Answer(1)
        for fd in received:
            assert os.read(fd, 100) == b"through a pipe"
            os.close(fd)
