"""Connects to a server and does the handshake."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import NamedTuple

from kvelastic.address import Address
from kvelastic.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    ConfigError,
    KvelasticError,
)
from kvelastic.messages.connection import receive_into
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.frames import Frame, FrameReader, FrameWriter
from kvelastic.messages.handshake import Handshake
from kvelastic.messages.peers import Peer, check_peer, peer_of, prepare
from kvelastic.messages.protocol import Protocol
from kvelastic.messages.secret import SecretFile
from kvelastic.messages.sockets import connect_socket


class Opened(NamedTuple):
    """A connected socket after the handshake."""

    socket: socket.socket
    peer: Peer
    reader: FrameReader
    writer: FrameWriter


def open_connection(
    address: Address, protocol: Protocol, secret: SecretFile | None, timeout_s: float
) -> Opened:
    """Connect to the server at `address`. Blocks for at most `timeout_s` seconds.

    Raises `ChannelClosedError` if no server listens there, `ChannelTimeoutError`,
    `AccessDeniedError` (from either side), `MessageVersionError`, and `ConfigError` for TCP without
    a secret.
    """
    if not address.is_unix and secret is None:
        raise ConfigError(f"{address} needs a secret: give the file that the peer has as well")
    deadline_s = time.monotonic() + timeout_s
    connected = connect_socket(address, timeout_s)
    reader, writer = FrameReader(), FrameWriter()
    try:
        drop_in_children(connected)
        prepare(connected)
        peer = peer_of(connected)
        check_peer(peer, None)
        handshake = Handshake(
            protocol, None if address.is_unix else secret, reader, writer, is_client=True
        )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A server that refuses the connection has sent the reason, and may have closed it.
            connected.sendall(handshake.begin())
        while not handshake.is_done:
            frame = receive(connected, reader, deadline_s)
            if answer := handshake.receive(frame):
                connected.sendall(answer)
    except BaseException as error:
        connected.close()
        for fd in reader.take_descriptors():
            os.close(fd)
        if isinstance(error, KvelasticError) or not isinstance(error, OSError):
            raise
        if isinstance(error, TimeoutError):
            raise ChannelTimeoutError(f"{address} has not answered in {timeout_s:g} s") from error
        raise ChannelClosedError(f"{address} has gone: {error}") from error
    return Opened(connected, peer, reader, writer)


def receive(connected: socket.socket, reader: FrameReader, deadline_s: float) -> Frame:
    """Return the next frame. Blocks; raises TimeoutError at the deadline."""
    while (frame := reader.next()) is None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connected.settimeout(left_s)
        receive_into(connected, reader)
    return frame
