"""Identity and access check of a socket's peer, and detection of lost hosts."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from kvelastic.errors import AccessDeniedError, ChannelClosedError, InvalidArgumentError

Network = IPv4Network | IPv6Network
LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
LOST_AFTER_S: Final = 0.6
"""A host is lost if its kernel acknowledges no data for this many seconds."""
ALIVE_EVERY_S: Final = 0.2
"""Interval at which an idle connection sends data, so that there is data to acknowledge."""
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Peer:
    """The peer of a socket, as reported by the kernel."""

    pid: int | None = None
    """Unix socket: pid in this pid namespace; None if the kernel does not report it."""
    uid: int | None = None
    address: str = ""
    """TCP: the address without the port."""

    def __str__(self) -> str:
        return f"process {self.pid}" if self.uid is not None else self.address


def networks(texts: Sequence[str]) -> list[Network]:
    """Parse networks or addresses, e.g. `10.0.0.0/8`. Raises `InvalidArgumentError`."""
    return [_network(text) for text in texts]


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{text!r} is no network: {error}; write 10.0.0.0/8 or an address"
        ) from None


def peer_of(connected: socket.socket) -> Peer:
    """Return the peer of a socket. Raises `ChannelClosedError` if the peer is gone."""
    try:
        if connected.family == socket.AF_UNIX:
            raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(raw)
            return Peer(pid=pid or None, uid=uid)
        return Peer(address=str(_plain(connected.getpeername()[0])))
    except OSError as error:
        raise ChannelClosedError(f"the peer has gone: {error}") from error


def check_peer(peer: Peer, allowed: Sequence[Network] | None) -> None:
    """Raise `AccessDeniedError` unless the peer has this user's uid or an allowed address.

    The address is checked on TCP only. `allowed` None accepts every address, for a peer that this
    process chose itself.
    """
    if peer.uid is not None:
        if peer.uid != os.geteuid():
            raise AccessDeniedError(
                f"process {peer.pid} is user {peer.uid}'s; only user {os.geteuid()} gets in"
            )
        return
    if allowed is not None:
        address = ip_address(peer.address)
        if not any(address in network for network in allowed):
            raise AccessDeniedError(
                f"{peer.address} is in none of the allowed networks; add it to them"
            )


def prepare(connected: socket.socket) -> None:
    """Configure a TCP socket: send small messages immediately, and detect lost hosts in time.

    The peer's kernel acknowledges data, not its program. So a busy or stopped process is not lost.
    """
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LOST_AFTER_S * 1000))


def _plain(text: str) -> IPv4Address | IPv6Address:
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
