"""A link to another node: ask it something, pull its bytes, push ours."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from kvelastic import _vmm
from kvelastic.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    DeviceUnavailableError,
    KvelasticError,
    LeaseLostError,
    MessageError,
    TransferError,
)
from kvelastic.messages import Connection, Message
from kvelastic.transfer.peer_threads import PeerThreads
from kvelastic.transfer.pieces import Piece, portions
from kvelastic.transfer.wire import (
    Ask,
    Begin,
    Begun,
    Check,
    Done,
    Hello,
    Push,
    Send,
    Settle,
    Settled,
    Told,
    Unlink,
)

if TYPE_CHECKING:
    from kvelastic.transfer.node import Node

MOST_TRIES: Final = 3
_M = TypeVar("_M", bound=Message)


class Link:
    """Made by `Node.link`, or by a peer that linked to us. Any thread; copies may run at once."""

    def __init__(
        self, node: Node, connection: Connection, peer: Hello, number: int, *, is_client: bool
    ) -> None:
        self._node = node
        self.number: Final = number
        """Of the links of its node, in the order in which they were made."""
        self.connection: Final = connection
        self.peer_id: Final = peer.node_id
        self.peer_start: Final = peer.start
        self.data_port: Final = peer.data_port
        self.is_client: Final = is_client
        """Whether this node has made the link."""
        self.reads_memory = connection.peer.pid is not None
        """Whether the peer's memory is read by the kernel; else bytes come over a stream."""
        self.threads: Final = PeerThreads()
        """For `Node`: they serve the peer."""
        self._lock = threading.Lock()
        self.pulled_bytes = 0
        self.pushed_bytes = 0
        self.peer_pulled_bytes = 0
        self.peer_pushed_bytes = 0
        self.retries = 0
        self.failures = 0
        self.since_s: Final = time.time()
        self.end_reason = ""
        """In a word, when it has ended: unlinked, cut, or a code of kvelastic/errors.py."""

    @property
    def is_open(self) -> bool:
        """False from the moment on at which the kernel has said that the peer has gone."""
        return self.connection.is_open

    @property
    def ended(self) -> KvelasticError | None:
        """Why it has ended."""
        return self.connection.ended

    def ask(self, body: bytes, timeout_s: float) -> bytes:
        """What the peer's user answers (see `Node`). Blocks. Raises as `Connection.call`."""
        return self._call(Ask(body), Told, timeout_s).body

    def check(self, timeout_s: float) -> None:
        """Raises `ChannelTimeoutError` or `ChannelClosedError` unless the peer answers. Blocks."""
        self._call(Check(), Done, timeout_s)

    def pull(
        self,
        sources: Sequence[Piece],
        targets: Sequence[Piece],
        timeout_s: float,
        *,
        claim: bytes = b"",
    ) -> None:
        """Copy the peer's `sources` to our `targets`, in order. Blocks, without the GIL.

        The targets stay the caller's and must be there until it returns. `claim` is for the peer's
        user, who may look whether the memory is still what it was (`Node`). A lost race is retried.
        Raises `LeaseLostError` after three of them, `NotRegisteredError`, what the peer's hold
        raises, `ChannelTimeoutError`, `ChannelClosedError`, `MappingError`; the targets hold
        nothing that can be used then.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            for theirs, ours, size_bytes in portions(sources, targets):
                self._retried(partial(self._pull_once, theirs, ours, claim, deadline_s))
                self.count(pulled=size_bytes)
        except KvelasticError:
            self.count(failures=1)
            raise

    def push(
        self,
        sources: Sequence[Piece],
        targets: Sequence[Piece],
        timeout_s: float,
        *,
        claim: bytes = b"",
    ) -> None:
        """Let the peer read our `sources` into its `targets`, in order. Blocks.

        The sources must stay as they are until it returns. Raises as `pull`.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            for ours, theirs, size_bytes in portions(sources, targets):
                self._retried(partial(self._push_once, ours, theirs, claim, deadline_s))
                self.count(pushed=size_bytes)
        except KvelasticError:
            self.count(failures=1)
            raise

    def unlink(self, timeout_s: float, *, force: bool = False) -> None:
        """End the link. Blocks. With `force` the peer is not asked; it notices by itself.

        Raises as `check` where the peer does not answer, and the link stays then.
        """
        if not force:
            self._call(Unlink(), Done, timeout_s)
        self.end_reason = self.end_reason or "unlinked"
        self.connection.close()
        self._node.forget(self)

    # --- one try -------------------------------------------------------------------------------

    def _retried(self, once: Callable[[], None]) -> None:
        for _ in range(MOST_TRIES - 1):
            with contextlib.suppress(LeaseLostError):
                once()
                return
            self.count(retries=1)
        once()

    def _pull_once(self, sources: bytes, ours: bytes, claim: bytes, deadline_s: float) -> None:
        begin = Begin(sources, claim, _left_ms(deadline_s))
        lease = self._call(begin, Begun, _left_s(deadline_s)).lease
        try:
            checksum = self.read(lease, sources, ours, deadline_s)
        except BaseException:
            with contextlib.suppress(ChannelClosedError):
                self.connection.notify(Settle(lease))  # nothing stays pinned for what has failed
            raise
        self.settle(lease, checksum, deadline_s)

    def _push_once(self, ours: bytes, targets: bytes, claim: bytes, deadline_s: float) -> None:
        # Nothing of ours is pinned: the caller keeps it until this returns, and the lease is over
        # before that, so a peer that reads on is told that what it has is nothing.
        with self._node.lent(self, ours, deadline_s) as lease:
            push = Push(lease, ours, targets, claim, _left_ms(deadline_s))
            self._call(push, Done, _left_s(deadline_s))

    def read(self, lease: int, sources: bytes, ours: bytes, deadline_s: float) -> int | None:
        """Copy what the peer holds under a lease; the checksum, if bytes came over a stream."""
        if self.reads_memory:
            pid = self.connection.peer.pid
            assert pid is not None
            try:
                _vmm.read_from_process(pid, sources, ours, _left_s(deadline_s))
                return None
            except DeviceUnavailableError:  # seccomp, or a setting of the kernel's
                self.reads_memory = False
        return self._node.streams.receive(self, lease, ours, deadline_s)

    def settle(self, lease: int, checksum: int | None, deadline_s: float) -> None:
        """Raises `LeaseLostError` unless what was read under the lease is good."""
        settled = self._call(Settle(lease), Settled, _left_s(deadline_s))
        if not settled.is_whole:
            raise LeaseLostError(
                f"node {self.peer_id} held the memory no longer when the copy was done; try again"
            )
        if settled.checksum != checksum:
            raise TransferError("the bytes were changed on their way; check the network")

    def ask_to_send(
        self, lease: int, token: bytes, deadline_s: float, stream: socket.socket | None = None
    ) -> None:
        """For `streams`: the peer has been told to send."""
        descriptors = () if stream is None else (stream.fileno(),)
        send = Send(lease, token, _left_ms(deadline_s))
        self._call(send, Done, _left_s(deadline_s), descriptors)

    def count(
        self,
        *,
        pulled: int = 0,
        pushed: int = 0,
        peer_pulled: int = 0,
        peer_pushed: int = 0,
        retries: int = 0,
        failures: int = 0,
    ) -> None:
        """Add to the figures."""
        with self._lock:
            self.pulled_bytes += pulled
            self.pushed_bytes += pushed
            self.peer_pulled_bytes += peer_pulled
            self.peer_pushed_bytes += peer_pushed
            self.retries += retries
            self.failures += failures

    def _call(
        self,
        message: Message,
        wanted: type[_M],
        timeout_s: float,
        descriptors: Sequence[int] = (),
    ) -> _M:
        reply = self.connection.call(message, timeout_s, descriptors)
        if not isinstance(reply, wanted):
            raise MessageError(f"a {type(reply).__name__} is no reply to {type(message).__name__}")
        return reply


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise ChannelTimeoutError("the copy has not ended in time")
    return left_s


def _left_ms(deadline_s: float) -> int:
    return min(int(_left_s(deadline_s) * 1000) + 1, 3_600_000)
