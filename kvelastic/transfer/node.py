"""A node: registers this process's memory, links to other nodes, and serves their requests."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, Protocol
from weakref import WeakSet

from kvelastic import _vmm
from kvelastic.closing import Closing
from kvelastic.errors import (
    ChannelClosedError,
    ConfigError,
    InvalidArgumentError,
    KvelasticError,
    LinkExistsError,
    LinkLimitError,
    MessageError,
    NodeIdTakenError,
    TransferError,
    UnsupportedError,
)
from kvelastic.messages import Address, Connection, Endpoint, Message, Request, SecretFile
from kvelastic.transfer.leases import (
    Hold,
    Holder,
    Lease,
    Leases,
    Ranges,
    Registered,
    release,
)
from kvelastic.transfer.link import Link, PeerThreads, submit
from kvelastic.transfer.status import PUBLISH_S, StatusPublisher
from kvelastic.transfer.streams import Carrier, Streams, passed_stream
from kvelastic.transfer.wire import (
    MOST_BYTES,
    PROTOCOL,
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

_log = logging.getLogger("kvelastic.transfer")
MOST_LINKS: Final = 512
DEFAULT_LEASE_S: Final = 5.0
_MOST_ENDED: Final = 16
_LOST_NOTICED_S: Final = 1.0

Answerer = Callable[[Link, bytes], bytes]
"""Returns the reply to a question of a peer's user; runs in a thread of the node.

An exception is sent to the peer as the reply.
"""


class HeldRequest(NamedTuple):
    """Memory of a request that the node's user holds until a peer has read it."""

    request: str
    size_bytes: int
    left_s: float
    """Seconds until the hold expires."""


class Holds(Protocol):
    """The holds of the node's user, for operators."""

    @property
    def expired(self) -> int:
        """Number of expired holds."""

    def held(self) -> Sequence[HeldRequest]:
        """Return the holds in the order in which they expire."""


Claimant = Callable[[Link, bytes, Sequence[Piece]], Hold]
"""Checks the claim of a copy whose memory is held; returns a further hold.

Raises to refuse the copy.
"""


class Node(Closing):
    """A node of the transfer network. Thread-safe. `close()` it, or use it as a context manager."""

    def __init__(
        self,
        node_id: int,
        *,
        answer: Answerer | None = None,
        claim: Claimant | None = None,
        listen: Sequence[Address] = (),
        secret: SecretFile | None = None,
        allowed: Sequence[str] = (),
        lease_s: float = DEFAULT_LEASE_S,
        most_links: int = MOST_LINKS,
        data_ports: tuple[int, int] | None = None,
        role: str = "",
        on_link: Callable[[Link], None] | None = None,
        on_end: Callable[[Link], None] | None = None,
        held: Holds | None = None,
    ) -> None:
        """Start the node.

        `lease_s` bounds how long memory is held for a peer, in seconds. `data_ports` is the first
        and last port for data streams, if the node listens on TCP; it uses the first free port, or
        any port for None. `role` is shown to operators. `on_end` is called when a link has ended
        for any reason; it must not block. `held` has what the node's user holds for peers, for
        operators. See `messages.Endpoint` for the other parameters and for the exceptions.

        If a copy carries a claim, the node calls `claim` after it holds the memory and before a
        byte is read. So `claim` can refuse memory that has been reused in the meantime.
        """
        if not 0 <= node_id < 1 << 64:
            raise InvalidArgumentError(f"{node_id} is no id of a node; use 0 to 2**64-1")
        if lease_s <= 0:
            raise InvalidArgumentError(f"a lease of {lease_s} s holds nothing; use more than 0")
        self.node_id: Final = node_id
        self.start: Final = secrets.token_bytes(16)
        self.lease_s: Final = lease_s
        self.role: Final = role
        self._answer, self._claim = answer, claim
        self._on_link, self._on_end = on_link, on_end
        self.held: Final = held
        self._most_links = most_links
        self._pid = os.getpid()
        self._secret = secret
        self.ranges: Final = Ranges()
        self.leases: Final = Leases(self.ranges)
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._by_connection: dict[Connection, Link] = {}
        self._early: dict[Connection, list[Request]] = {}
        """Requests of peers that consider the link open before `link` has returned."""
        self._ended: deque[Link] = deque(maxlen=_MOST_ENDED)
        self._link_numbers = itertools.count(1)
        self._is_timer_set = False
        # Includes ended links while one of their threads runs.
        self._threads: WeakSet[PeerThreads] = WeakSet()
        host = next((address.host for address in listen if not address.is_unix), None)
        self.streams: Final = Streams(host, data_ports)
        try:
            self._endpoint = Endpoint(
                PROTOCOL,
                self._handle,
                listen=listen,
                secret=secret,
                allowed=allowed,
                most_connections=most_links + 64,
                on_close=self._closed,
                doors=self.streams.doors,
                name="kvelastic-transfer",
            )
        except BaseException:
            for door in self.streams.doors:
                door.listener.close()
            raise
        self._status = StatusPublisher(self)
        self._endpoint.run_later(PUBLISH_S, self._refresh_status)

    # --- memory --------------------------------------------------------------------------------

    def register(self, address: int, size_bytes: int, hold: Holder | None = None) -> Registered:
        """Allow peers to read and write this memory, which must stay valid until `unregister`.

        If the memory can move, `hold` must keep the pieces of a copy in place. Raises
        `InvalidArgumentError` if the memory overlaps a registered range.
        """
        return self.ranges.add(address, size_bytes, hold)

    def unregister(self, registered: Registered) -> None:
        """End the registration: new copies are refused, and running pulls fail.

        Idempotent. Blocks while a push holds the memory, for at most `lease_s`. A peer's kernel may
        still be reading from the memory for a moment; the peer discards those bytes.
        """
        self.ranges.remove(registered)
        self.leases.end_in(registered)
        registered.wait_until_unwritten()

    # --- links ---------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Addresses on which the node listens, with the actual ports."""
        return self._endpoint.addresses

    @property
    def links(self) -> tuple[Link, ...]:
        """The open links."""
        return tuple(self._links.values())

    @property
    def ended_links(self) -> tuple[Link, ...]:
        """The last ended links, oldest first, except of peers that are linked again."""
        with self._lock:
            return tuple(link for link in self._ended if link.peer_id not in self._links)

    @property
    def strangers_refused(self) -> int:
        """Number of refused connections."""
        return self._endpoint.refused

    def cut(self, number: int, peer_id: int) -> bool:
        """End a link on an operator's request, as if the peer had gone; False if it is not open."""
        link = self._links.get(peer_id)
        if link is None or link.number != number or not link.is_open:
            return False
        link.end_reason = "cut"
        link.connection.end(ChannelClosedError("an operator has cut the link"))
        self.forget(link)
        return True

    def link(self, address: Address, timeout_s: float) -> Link:
        """Open a link to the node that listens at `address`.

        Blocks for at most `timeout_s` seconds. If two nodes link to each other at the same time,
        the link of the node with the lower id is kept, and the other node's call raises
        `LinkExistsError`.

        Raises `ChannelClosedError` if no node listens there, `ChannelTimeoutError`,
        `AccessDeniedError`, `MessageVersionError`, `LinkExistsError` if the two are already linked,
        `LinkLimitError` if either node has its maximum of links, `NodeIdTakenError` if both nodes
        have one id or a linked node has the peer's id, and `ConfigError` for TCP without a secret.
        """
        if not address.is_unix and self._secret is None:
            raise ConfigError(f"a link to {address} needs a secret that both sides have")
        deadline_s = time.monotonic() + timeout_s
        connection = self._endpoint.connect(address, timeout_s)
        with self._lock:
            self._early[connection] = []
        try:
            hello = Hello(self.node_id, self.start, self.streams.port)
            reply = connection.call(hello, deadline_s - time.monotonic())
            if not isinstance(reply, Hello):
                raise MessageError(f"a {type(reply).__name__} is no reply to a Hello")
            self._look_after(reply.node_id, deadline_s)
            return self._add(connection, reply, is_client=True)
        except BaseException:
            with self._lock:
                self._early.pop(connection, None)
            connection.close()
            raise

    def link_with(self, node_id: int, address: Address, timeout_s: float) -> Link:
        """Return the link to this node. Without a link, link to it at `address`.

        A link that the peer has made at the same time counts. Blocks and raises as `link` does, and
        raises `NodeIdTakenError` if another node listens there.
        """
        link = self._links.get(node_id)
        if link is not None and link.is_open:
            return link
        try:
            link = self.link(address, timeout_s)
        except LinkExistsError:
            link = self._links.get(node_id)
            if link is None or not link.is_open:
                raise
        if link.peer_id != node_id:
            link.unlink(0.0, force=True)
            raise NodeIdTakenError(
                f"{address} belongs to node {link.peer_id} now, not to {node_id}: that one has"
                " ended, or listens elsewhere"
            )
        return link

    def _look_after(self, node_id: int, deadline_s: float) -> None:
        """Detect that the linked node is gone before a new node is refused for using its id."""
        standing = self._links.get(node_id)
        if standing is not None and standing.is_open:
            with contextlib.suppress(KvelasticError):
                standing.check(min(deadline_s - time.monotonic(), _LOST_NOTICED_S))

    def forget(self, link: Link) -> None:
        """Remove an ended link; called by `Link`."""
        with self._lock:
            was_known = self._by_connection.pop(link.connection, None) is not None
            if self._links.get(link.peer_id) is link:
                del self._links[link.peer_id]
                self._ended.append(link)
            if not link.end_reason:
                link.end_reason = "unlinked" if link.ended is None else link.ended.code
        link.threads.end()
        self.leases.end_of(link.connection)
        self.streams.end_of(link.connection)
        if was_known and self._on_end is not None:
            self._on_end(link)

    def _add(self, connection: Connection, hello: Hello, *, is_client: bool) -> Link:
        if hello.node_id < 0:
            raise MessageError(f"{hello.node_id} is no id of a node")
        link = Link(self, connection, hello, next(self._link_numbers), is_client=is_client)
        crossed: Link | None = None
        with self._lock:
            standing = self._links.get(hello.node_id)
            if hello.node_id == self.node_id:
                raise NodeIdTakenError(
                    f"both nodes are called {self.node_id}; give each its own id"
                )
            if standing is not None and standing.is_open:
                if standing.peer_start != hello.start:
                    raise NodeIdTakenError(
                        f"node {self.node_id} is linked to another node that is called"
                        f" {hello.node_id}; give each its own id"
                    )
                if not is_client or standing.is_client or self.node_id > hello.node_id:
                    raise LinkExistsError(
                        f"node {self.node_id} has a link to node {hello.node_id}; unlink it first"
                    )
                crossed = standing
            if standing is None and len(self._links) >= self._most_links:
                raise LinkLimitError(
                    f"node {self.node_id} has {len(self._links)} links and may have"
                    f" {self._most_links}; unlink some"
                )
            if not connection.is_open:
                raise ChannelClosedError("the peer has gone before the link stood")
            self._threads.add(link.threads)
            self._links[hello.node_id] = link
            self._by_connection[connection] = link
            early = self._early.pop(connection, [])
        if not connection.is_open:
            self.forget(link)
        if self._on_link is not None:
            self._on_link(link)
        if crossed is not None:
            crossed.end_reason = "crossed"
            crossed.connection.close()
            self.forget(crossed)
        for request in early:
            self._endpoint.run_soon(partial(self._handle_early, request))
        return link

    def _closed(self, connection: Connection) -> None:
        link = self._by_connection.get(connection)
        if link is not None:
            self.forget(link)

    # --- requests of peers: in the endpoint's thread -------------------------------------------

    def _handle(self, request: Request) -> None:
        link = self._by_connection.get(request.connection)
        if link is None:
            if self._keep_early(request):
                return
            link = self._by_connection.get(request.connection)
        if link is not None:
            self._handle_for(link, request)
        elif isinstance(request.message, Hello):
            self._add(request.connection, request.message, is_client=False)
            request.answer(Hello(self.node_id, self.start, self.streams.port))
        else:
            raise MessageError("a link begins with Hello")

    def _handle_for(self, link: Link, request: Request) -> None:
        message = request.message
        match message:
            case Settle(number):
                lease = self.leases.find(number, link.connection)
                if request.wants_reply and lease is not None and lease.sent is not None:
                    # The reply contains the checksum, which is known once all bytes are sent.
                    lease.sent.add_done_callback(
                        lambda _: _reply(request, partial(self._settled, link, number, lease))
                    )
                else:
                    # A notification means that the copy has failed: count nothing and wait for
                    # nothing.
                    read = lease if request.wants_reply else None
                    request.answer(self._settled(link, number, read))
            case Begin():
                _serve(link.threads.questions, request, partial(self._begin, link, message))
            case Ask():
                _serve(link.threads.questions, request, partial(self._answered, link, message))
            case Send():
                self._send(request, link, message)
            case Push():
                deadline_s = time.monotonic() + message.timeout_ms / 1000
                pushed = partial(self._pushed, link, message, deadline_s)
                _serve(link.threads.pushes, request, pushed)
            case Check():
                request.answer(Done())
            case Unlink():
                self.forget(link)  # before the reply, so that the peer can rely on it
                request.answer(Done())
                # The reply must be sent before the connection closes. The peer closes it. If it
                # does not, this node does.
                self._endpoint.run_later(1.0, link.connection.close)
            case _:
                raise MessageError(f"a {type(message).__name__} is not asked")

    def _keep_early(self, request: Request) -> bool:
        """Return whether the link is still being set up here.

        If so, a check is answered immediately. Another request that wants a reply is served once
        the link is open.
        """
        with self._lock:
            early = self._early.get(request.connection)
            if early is None or request.connection in self._by_connection:
                return False
            is_check = isinstance(request.message, Check)
            if request.wants_reply and not is_check:  # at most 256 per peer
                early.append(request)
        if is_check:  # two nodes linking to each other may both block on a check
            request.answer(Done())
        return True

    def _handle_early(self, request: Request) -> None:
        with request.refusing_errors():
            self._handle(request)

    def _answered(self, link: Link, ask: Ask) -> Told:
        if self._answer is None:
            raise UnsupportedError(f"node {self.node_id} answers no questions")
        return Told(self._answer(link, ask.body))

    def _claimed(self, link: Link, claim: bytes, pieces: bytes) -> Hold | None:
        if not claim:
            return None
        if self._claim is None:
            raise UnsupportedError(f"node {self.node_id} knows no claims")
        numbers = array("Q", pieces)
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        return self._claim(link, claim, pairs)

    def _begin(self, link: Link, begin: Begin) -> Begun:
        size_bytes = _held_at_once(begin.pieces)
        # The lease must not outlast the reader's timeout.
        lease_s = min(self.lease_s, begin.timeout_ms / 1000)
        claim = partial(self._claimed, link, begin.claim, begin.pieces)
        lease = self.leases.begin(link.connection, begin.pieces, lease_s, claim)
        lease.read_bytes = size_bytes
        if not link.is_open:  # it ended before the lease was in the table
            self.leases.end_of(link.connection)
        self._set_timer()
        return Begun(lease.number)

    def _settled(self, link: Link, number: int, lease: Lease | None) -> Settled:
        checksum = None if lease is None else lease.checksum
        is_whole = self.leases.settle(number, link.connection)
        if is_whole and lease is not None:
            link.count("peer_pulled_bytes", lease.read_bytes)
        return Settled(is_whole, checksum)

    def _send(self, request: Request, link: Link, send: Send) -> None:
        lease = self.leases.find(send.lease, link.connection)
        if lease is None or lease.sent is not None:
            raise TransferError("there is no such lease, or its bytes have been sent already")
        # Stop with the lease, so that a peer that does not read cannot block the sender.
        deadline_s = min(time.monotonic() + send.timeout_ms / 1000, lease.deadline_s)
        carrier: Carrier | None = passed_stream(request.take_descriptors())
        if carrier is None and link.connection.peer.uid is not None:
            raise TransferError("a stream on this host is a socket that is passed")
        if carrier is None and not link.is_client:
            carrier = self.streams.expect(link, send.token)

        def work() -> None:
            try:
                self.streams.send(link, lease, send.token, carrier, deadline_s)
            except (KvelasticError, OSError) as error:
                _log.info("a copy for node %d was not sent: %s", link.peer_id, error)

        def close_if_cancelled(sent: Future[None]) -> None:
            if sent.cancelled():
                close()

        def close() -> None:
            if carrier is not None:
                carrier.close()  # its end notifies the peer

        try:
            lease.sent = submit(link.threads.sends, work)
        except KvelasticError:
            close()
            raise
        lease.sent.add_done_callback(close_if_cancelled)
        request.answer(Done())

    def _pushed(self, link: Link, push: Push, deadline_s: float) -> Done:
        size_bytes = _held_at_once(push.targets)
        if _vmm.bytes_of_pieces(push.sources) != size_bytes:
            raise InvalidArgumentError("a push of as many bytes as it has room for is wanted")
        self._wait_for_ended_pushes(link.peer_id)
        # The targets are held as long as under a lease, so the same bound applies.
        deadline_s = min(deadline_s, time.monotonic() + self.lease_s)
        # The holds end first, so that `unregister` waits for them too.
        with contextlib.ExitStack() as writing, contextlib.ExitStack() as holds:
            held = self.ranges.hold(push.targets)
            holds.callback(release, held.values())
            for registered in held:
                writing.enter_context(registered.being_written())
            # Refuse a range that was unregistered before it was marked as being written, also if
            # its addresses are registered again.
            self.ranges.check_still(held)
            if (claimed := self._claimed(link, push.claim, push.targets)) is not None:
                holds.callback(claimed.release)
            checksum = link.read(push.lease, push.sources, push.targets, deadline_s)
            link.settle(push.lease, checksum, deadline_s)
            link.count("peer_pushed_bytes", size_bytes)
        return Done()

    def _wait_for_ended_pushes(self, peer_id: int) -> None:
        """Wait for pushes of the peer's earlier links, which may write to the same targets."""
        with self._lock:
            ended = [link.threads.pushes for link in self._ended if link.peer_id == peer_id]
        for pushes in ended:
            pushes.shutdown()

    def _set_timer(self) -> None:
        """Start the timer that expires leases. One timer serves every lease."""
        if not self._is_timer_set:
            self._is_timer_set = True
            self._endpoint.run_later(self.lease_s / 4, self._look_at_leases)

    def _look_at_leases(self) -> None:
        self._is_timer_set = False
        if self.leases.expire() is not None:
            self._set_timer()

    def _refresh_status(self) -> None:
        self._endpoint.run_later(PUBLISH_S, self._refresh_status)
        self._status.refresh()

    # --- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """End all links and leases, and wait for the requests being served.

        Idempotent. Does nothing in a forked child, because the parent owns the node.
        """
        if self._pid != os.getpid():
            return
        self._endpoint.close()
        self._status.close()
        for threads in list(self._threads):
            threads.end(wait=True)
        self.leases.end_all()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` or AssertionError if the tables are inconsistent."""
        self.ranges.check_integrity()
        self.leases.check_integrity()


def _serve(threads: ThreadPoolExecutor, request: Request, serve: Callable[[], Message]) -> None:
    """Run `serve` in one of the threads; reply with its result or its exception."""
    submit(threads, partial(_reply, request, serve))


def _reply(request: Request, serve: Callable[[], Message]) -> None:
    with request.refusing_errors():
        request.answer(serve())


def _held_at_once(pieces: bytes) -> int:
    """Return the bytes of a peer's pieces.

    Raises `InvalidArgumentError` if they exceed `MOST_BYTES` or are invalid.
    """
    size_bytes = _vmm.bytes_of_pieces(pieces)
    if size_bytes > MOST_BYTES:
        raise InvalidArgumentError(f"{size_bytes} bytes in one copy; {MOST_BYTES} are held at once")
    return size_bytes
