"""A link to another node: sends questions, pulls bytes from the peer, pushes bytes to it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from kvelastic import _vmm
from kvelastic.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    DeviceUnavailableError,
    KvelasticError,
    LeaseLostError,
    MessageError,
    TransferBusyError,
    TransferError,
)
from kvelastic.messages import Connection, Message, Reply
from kvelastic.transfer.wire import (
    MOST_BYTES,
    MOST_PIECES,
    Ask,
    Begin,
    Begun,
    Check,
    Done,
    Hello,
    Piece,
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
QUESTIONS: Final = 2
SENDS: Final = 4
PUSHES: Final = 4
Counted = Literal[
    "pulled_bytes", "pushed_bytes", "peer_pulled_bytes", "peer_pushed_bytes", "retries", "failures"
]
_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


class PeerThreads:
    """The threads that serve the peer of a link, so that no other peer waits for them.

        questions    pins memory and calls the node's user; never waits for a peer
        sends        sends bytes over a stream; waits until the peer has read them
        pushes       reads the peer's memory; waits for a send of the peer, and for its reply

    A send never waits for a push, so copies in both directions make progress. A node whose push
    threads are all busy still sends what its peers requested. Threads start on demand.
    """

    def __init__(self) -> None:
        self.questions: Final = ThreadPoolExecutor(QUESTIONS, "kvelastic-questions")
        self.sends: Final = ThreadPoolExecutor(SENDS, "kvelastic-sends")
        self.pushes: Final = ThreadPoolExecutor(PUSHES, "kvelastic-pushes")

    def end(self, *, wait: bool = False) -> None:
        """Start no further work. With `wait`, block until running work has finished. Idempotent."""
        for threads in (self.questions, self.sends, self.pushes):
            threads.shutdown(wait=wait, cancel_futures=True)


def submit(to: ThreadPoolExecutor, work: Callable[[], _T]) -> Future[_T]:
    """Schedule work in a link's threads; cancelled if the link ends before it starts.

    Never blocks. Raises `TransferBusyError` if the link has ended or no thread can be started.
    """
    try:
        return to.submit(work)
    except RuntimeError as error:
        raise TransferBusyError(
            f"the peer cannot be served: {error}; if threads are short, raise `ulimit -u`"
        ) from error


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
        self._late_pushes: list[Reply] = []
        self._late_lock = threading.Lock()  # while one thread waits for these replies
        self._lock = threading.Lock()
        self.counts: Final[Counter[Counted]] = Counter()
        """Statistics; `shared.link_status.LinkStatus` describes them."""
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
            self.count("pulled_bytes", size_bytes)

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
        Raises the same errors as `pull`. After `ChannelTimeoutError` the peer may still write to
        the targets: later pushes to it wait until it has stopped.
        """
        for size_bytes in self._copied(self._push_once, sources, targets, timeout_s, claim):
            self.count("pushed_bytes", size_bytes)

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
        """Call `once` for each portion, again if its lease was lost; yield the bytes of each.

        Raises `InvalidArgumentError` for invalid pieces, and if the sides differ in total size.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            for source, target, size_bytes in _vmm.portions_of_pieces(
                _vmm.pack_pieces(sources), _vmm.pack_pieces(targets), MOST_PIECES, MOST_BYTES
            ):
                for _ in range(MOST_TRIES - 1):
                    with contextlib.suppress(LeaseLostError):
                        once(source, target, claim, deadline_s)
                        break
                    self.count("retries")
                else:
                    once(source, target, claim, deadline_s)
                yield size_bytes
        except KvelasticError:
            self.count("failures")
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
        self._wait_for_late_pushes(deadline_s)
        with self._node.leases.lent(self.connection, ours, deadline_s) as lease:
            push = Push(lease, ours, targets, claim, _left_ms(deadline_s))
            reply = self.connection.request(push)
            try:
                if not reply.arrives_within(_left_s(deadline_s)):
                    raise ChannelTimeoutError("the peer has not copied a push in time")
            except BaseException:
                self._late_pushes.append(reply)
                raise
            _checked(reply.take()[0], Done, push)

    def _wait_for_late_pushes(self, deadline_s: float) -> None:
        """Wait until the peer has replied to each push that was given up.

        It would write over the targets of the next one, also after that has succeeded.
        """
        if not self._late_pushes:
            return
        if self._late_lock.acquire(timeout=_left_s(deadline_s)):
            try:
                late = self._late_pushes
                while late and late[0].arrives_within(_left_s(deadline_s)):
                    late.pop(0).drop()
                if not late:
                    return
            finally:
                self._late_lock.release()
        raise ChannelTimeoutError("the peer still copies a push that was given up")

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

    def count(self, what: Counted, by: int = 1) -> None:
        """Add to the statistics."""
        with self._lock:
            self.counts[what] += by

    def _call(
        self,
        message: Message,
        wanted: type[_M],
        timeout_s: float,
        descriptors: Sequence[int] = (),
    ) -> _M:
        return _checked(self.connection.call(message, timeout_s, descriptors), wanted, message)


def _checked(reply: Message, wanted: type[_M], to: Message) -> _M:
    if not isinstance(reply, wanted):
        raise MessageError(f"a {type(reply).__name__} is no reply to {type(to).__name__}")
    return reply


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise ChannelTimeoutError("the copy has not ended in time")
    return left_s


def _left_ms(deadline_s: float) -> int:
    return min(int(_left_s(deadline_s) * 1000) + 1, 3_600_000)
