"""Connections whose peer is not authenticated yet: bounded in number and in time.

    newcomers.listen(Door(ListeningSocket(address), most=64, greet=MyNewcomer))
    newcomers.accept(door); newcomers.receive(newcomer)         # as the selector reports
    newcomers.expire(now_s)

Each newcomer has a few seconds for a step of its authentication. At its door's bound, a new one
replaces the one that has made no progress for longest. So clients that only connect cannot lock
others out. Data that arrived in time counts, even if the thread reads it late.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from kvelastic.errors import ChannelError, ChannelTimeoutError, KvelasticError
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.peers import Network, Peer, check_peer, peer_of
from kvelastic.messages.sockets import ListeningSocket

_WITHOUT_DESCRIPTORS_S: Final = 0.1
_SHORTAGE: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


class Newcomer(ABC):
    """A connection whose peer is not authenticated. Only the endpoint's thread uses it."""

    def __init__(self, connected: socket.socket, step_s: float) -> None:
        """`step_s` is the time for each step, in seconds."""
        self.socket: Final = connected
        self.step_s: Final = step_s
        self.peer = Peer()
        """Who it is, once the kernel has told."""
        self.has_progressed()

    def has_progressed(self) -> None:
        """Give it the time for another step."""
        self.deadline_s = time.monotonic() + self.step_s

    @abstractmethod
    def begin(self) -> None:
        """Start the authentication of an allowed peer. May raise to refuse it."""

    @abstractmethod
    def receive(self) -> bool:
        """Read once; return whether the peer is authenticated. Raises to refuse it."""

    @abstractmethod
    def admit(self) -> None:
        """Take over the socket, which no selector watches any more."""

    @abstractmethod
    def refuse(self, error: Exception) -> None:
        """Close the socket because of the error."""


class Door(NamedTuple):
    """Where newcomers arrive: a listening socket, their maximum number, and what they become."""

    listener: ListeningSocket
    most: int
    greet: Callable[[socket.socket], Newcomer]


class Newcomers:
    """The newcomers of an endpoint. Only the endpoint's thread uses it."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        allowed: Sequence[Network],
        run_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """`allowed` are the networks of peers on TCP."""
        self._selector = selector
        self._allowed = allowed
        self._run_later = run_later
        self.doors: Final[dict[Newcomer, Door | None]] = {}
        """The newcomers, with the door at which each arrived."""

    def listen(self, door: Door) -> None:
        """Watch a door."""
        self._selector.register(door.listener.socket, selectors.EVENT_READ, door)

    def accept(self, door: Door) -> None:
        """Accept a connection at the door."""
        try:
            accepted, _ = door.listener.socket.accept()
        except OSError as error:
            if error.errno in _SHORTAGE:  # no descriptor is left: look again later
                self._selector.unregister(door.listener.socket)
                self._run_later(_WITHOUT_DESCRIPTORS_S, partial(self.listen, door))
            return
        drop_in_children(accepted)
        accepted.setblocking(False)
        self.add(door.greet(accepted), door)

    def add(self, newcomer: Newcomer, door: Door | None = None) -> None:
        """Begin with a newcomer. Without a door, this process has connected to it."""
        try:
            newcomer.peer = peer_of(newcomer.socket)
            check_peer(newcomer.peer, None if door is None else self._allowed)
            newcomer.begin()
        except (KvelasticError, OSError) as error:
            newcomer.refuse(error)
            return
        here = [one for one, its in self.doors.items() if its is door]
        if door is not None and len(here) >= door.most:
            oldest = min(here, key=lambda one: one.deadline_s)
            self.refuse(oldest, ChannelError("others came after it"))
        self.doors[newcomer] = door
        self._selector.register(newcomer.socket, selectors.EVENT_READ, newcomer)

    def receive(self, newcomer: Newcomer) -> None:
        """Read what has arrived, and admit or refuse the newcomer if that decides it."""
        if newcomer not in self.doors:
            return  # it was refused after this event was reported
        try:
            is_authenticated = newcomer.receive()
        except (KvelasticError, OSError) as error:
            self.refuse(newcomer, error)
            return
        if is_authenticated:
            self._remove(newcomer)
            newcomer.admit()

    def refuse(self, newcomer: Newcomer, error: Exception) -> None:
        """End a newcomer. Does nothing if it was admitted or refused."""
        if newcomer in self.doors:
            self._remove(newcomer)
            newcomer.refuse(error)

    def _remove(self, newcomer: Newcomer) -> None:
        del self.doors[newcomer]
        self._selector.unregister(newcomer.socket)

    def expire(self, now_s: float) -> None:
        """Refuse the newcomers whose time is over."""
        for newcomer in [one for one in self.doors if one.deadline_s <= now_s]:
            self.receive(newcomer)
            if newcomer.deadline_s <= now_s:
                late = ChannelTimeoutError(f"no handshake in {newcomer.step_s:g} s")
                self.refuse(newcomer, late)

    def refuse_all(self, error: Exception) -> None:
        """End all newcomers."""
        for newcomer in list(self.doors):
            self.refuse(newcomer, error)
