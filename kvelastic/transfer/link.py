"""A link to another node: sends questions, pulls bytes from the peer, pushes bytes to it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from kvelastic.transfer.memory_pieces import Piece, portions
from kvelastic.transfer.peer_threads import PeerThreads
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
    """A link, opened by `Node.link` or by a peer. Thread-safe; copies may run concurrently."""

    def __init__(
        self, node: Node, connection: Connection, peer: Hello, number: int, *, is_client: bool
    ) -> None:
        self._node = node
        self.number: Final = number
        """Sequence number among the node's links."""
        self.connection: Final = connection
        self.peer_id: Final = peer.node_id
        self.peer_start: Final = peer.start
        self.data_port: Final = peer.data_port
        self.is_client: Final = is_client
        """Whether this node opened the link."""
        self.reads_memory = connection.peer.pid is not None
        """Whether the kernel reads the peer's memory; else bytes come over a stream."""
        self.threads: Final = PeerThreads()
        """Threads that serve the peer; used by `Node`."""
        self._lock = threading.Lock()
        self.pulled_bytes = 0
        self.pushed_bytes = 0
        self.peer_pulled_bytes = 0
        self.peer_pushed_bytes = 0
        self.retries = 0
        self.failures = 0
        self.since_s: Final = time.time()
        self.end_reason = ""
        """Why the link ended: unlinked, cut, crossed, or a code of kvelastic/errors.py. "" while
        open."""

    @property
    def is_open(self) -> bool:
        """False once the kernel has reported that the peer is gone."""
        return self.connection.is_open

    @property
    def ended(self) -> KvelasticError | None:
        """The error that ended the connection; None if there was none."""
        return self.connection.ended

    def ask(self, body: bytes, timeout_s: float) -> bytes:
        """Send a question to the peer's user (see `Node`) and return the reply.

        Blocks. Raises the same errors as `Connection.call`.
        """
        return self._call(Ask(body), Told, timeout_s).body

    def check(self, timeout_s: float) -> None:
        """Raise `ChannelTimeoutError` or `ChannelClosedError` unless the peer replies. Blocks."""
        self._call(Check(), Done, timeout_s)

    def pull(
        self,
        sources: Sequence[Piece],
        targets: Sequence[Piece],
        timeout_s: float,
        *,
        claim: bytes = b"",
    ) -> None:
        """Copy the peer's `sources` to this process's `targets`, in order.

        Blocks for at most `timeout_s` seconds, without the GIL. The caller must keep the targets
        valid until this returns. `claim` is passed to the peer's user, who can check whether the
        memory still has the expected content (see `Node`). If the memory changes during the copy,
        the copy is retried.

        Raises `LeaseLostError` after three such tries, `NotRegisteredError`, the errors of the
        peer's hold, `ChannelTimeoutError`, `ChannelClosedError` and `MappingError`. The content of
        the targets is then undefined.
        """
        for size_bytes in self._copied(self._pull_once, sources, targets, timeout_s, claim):
            self.count(pulled=size_bytes)

    def push(
        self,
        sources: Sequence[Piece],
        targets: Sequence[Piece],
        timeout_s: float,
        *,
        claim: bytes = b"",
    ) -> None:
        """Have the peer copy this process's `sources` to its `targets`, in order.

        Blocks for at most `timeout_s` seconds. The sources must not change until this returns.
        Raises the same errors as `pull`.
        """
        for size_bytes in self._copied(self._push_once, sources, targets, timeout_s, claim):
            self.count(pushed=size_bytes)

    def unlink(self, timeout_s: float, *, force: bool = False) -> None:
        """End the link. Blocks while the peer confirms.

        With `force` the peer is not notified and detects the end itself. Raises the same errors as
        `check` if the peer does not reply; then the link stays open.
        """
        if not force:
            self._call(Unlink(), Done, timeout_s)
        self.end_reason = self.end_reason or "unlinked"
        self.connection.close()
        self._node.forget(self)

    def _copied(
        self,
        once: Callable[[bytes, bytes, bytes, float], None],
        sources: Sequence[Piece],
        targets: Sequence[Piece],
        timeout_s: float,
        claim: bytes,
    ) -> Iterator[int]:
        """Call `once` for each portion, again if its lease was lost; yield the bytes of each."""
        deadline_s = time.monotonic() + timeout_s
        try:
            for source, target, size_bytes in portions(sources, targets):
                for _ in range(MOST_TRIES - 1):
                    with contextlib.suppress(LeaseLostError):
                        once(source, target, claim, deadline_s)
                        break
                    self.count(retries=1)
                else:
                    once(source, target, claim, deadline_s)
                yield size_bytes
        except KvelasticError:
            self.count(failures=1)
            raise

    # --- one attempt ---------------------------------------------------------------------------

    def _pull_once(self, sources: bytes, ours: bytes, claim: bytes, deadline_s: float) -> None:
        begin = Begin(sources, claim, _left_ms(deadline_s))
        lease = self._call(begin, Begun, _left_s(deadline_s)).lease
        try:
            checksum = self.read(lease, sources, ours, deadline_s)
        except BaseException:
            with contextlib.suppress(ChannelClosedError):
                self.connection.notify(Settle(lease))  # so that the peer unpins its memory
            raise
        self.settle(lease, checksum, deadline_s)

    def _push_once(self, ours: bytes, targets: bytes, claim: bytes, deadline_s: float) -> None:
        # This side pins nothing, because the caller keeps the sources valid until this returns. The
        # lease ends before that, so a peer that reads later learns that its copy is lost.
        with self._node.lent(self, ours, deadline_s) as lease:
            push = Push(lease, ours, targets, claim, _left_ms(deadline_s))
            self._call(push, Done, _left_s(deadline_s))

    def read(self, lease: int, sources: bytes, ours: bytes, deadline_s: float) -> int | None:
        """Copy the memory under a lease; return the checksum, or None if no stream was used."""
        if self.reads_memory:
            pid = self.connection.peer.pid
            assert pid is not None
            try:
                _vmm.read_from_process(pid, sources, ours, _left_s(deadline_s))
                return None
            except DeviceUnavailableError:  # seccomp or a kernel setting
                self.reads_memory = False
        return self._node.streams.receive(self, lease, ours, deadline_s)

    def settle(self, lease: int, checksum: int | None, deadline_s: float) -> None:
        """Raise `LeaseLostError` if the copied memory was not held all the time.

        Raises `TransferError` if the checksums differ.
        """
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
        """Request that the peer sends the lease's bytes; called by `Streams`."""
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
        """Add to the statistics."""
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
