"""Who is at the other end of a socket, and who may be; and how soon a lost host is noticed."""

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
"""A host whose kernel acknowledges nothing for so long is gone."""
ALIVE_EVERY_S: Final = 0.2
"""How often a connection says something, so that there is something to acknowledge."""
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel knows it."""

    pid: int | None = None
    """Of a Unix socket, in this pid namespace; None where the kernel does not say."""
    uid: int | None = None
    address: str = ""
    """Of TCP, without the port."""

    def __str__(self) -> str:
        return f"process {self.pid}" if self.uid is not None else self.address


def networks(texts: Sequence[str]) -> list[Network]:
    """`10.0.0.0/8`, `10.1.2.3`. Raises `InvalidArgumentError` for what is none."""
    return [_network(text) for text in texts]


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{text!r} is no network: {error}; write 10.0.0.0/8 or an address"
        ) from None


def peer_of(connected: socket.socket) -> Peer:
    """Raises `ChannelClosedError` if it has gone."""
    try:
        if connected.family == socket.AF_UNIX:
            raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(raw)
            return Peer(pid=pid or None, uid=uid)
        return Peer(address=str(_plain(connected.getpeername()[0])))
    except OSError as error:
        raise ChannelClosedError(f"the peer has gone: {error}") from error


def check_peer(peer: Peer, allowed: Sequence[Network] | None) -> None:
    """Raises `AccessDeniedError` unless the peer is this user's process, or of an allowed network.

    `allowed` None: any network, for a peer that this process chose itself.
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
    """Let small messages leave at once, and the kernel notice in time a host that is gone.

    The peer's kernel acknowledges, not its program: a process that is busy or stopped is not lost.
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
