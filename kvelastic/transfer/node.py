"""A node: a process as others see it. It registers memory, has links, and serves what they ask."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final
from weakref import WeakSet

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
from kvelastic.messages.peers import LOOPBACK, networks
from kvelastic.transfer.leases import Lease, Leases
from kvelastic.transfer.link import Link
from kvelastic.transfer.peer_threads import PeerThreads, Queue
from kvelastic.transfer.pieces import MOST_BYTES, PackedPieces, Piece
from kvelastic.transfer.ranges import Hold, Holder, Ranges, Registered
from kvelastic.transfer.status import PUBLISH_S, LinkStatus
from kvelastic.transfer.streams import Carrier, Streams, passed_stream
from kvelastic.transfer.wire import (
    PROTOCOL,
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

_log = logging.getLogger("kvelastic.transfer")
MOST_LINKS: Final = 512
DEFAULT_LEASE_S: Final = 5.0
_MOST_ENDED: Final = 16
_LOST_NOTICED_S: Final = 1.0

Answerer = Callable[[Link, bytes], bytes]
"""Answers what a peer's user asks, in a thread of the node's; what it raises is the answer."""

Claimant = Callable[[Link, bytes, Sequence[Piece]], Hold]
"""Looks at a copy's claim, its memory held; raises to refuse it, or answers what else to hold."""


class Node:
    """Listens, links, and serves. `close()` it, or use it as a context manager. Any thread."""

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
    ) -> None:
        """`lease_s`: no memory is held longer for a peer. `data_ports`: the first and the last
        port of those that data streams may come at, if it listens on TCP; it takes the first that
        is free, and None is any. `role`: what the node is to its users, shown to
        operators. `on_end`: a link has ended, by whomever; it must not block. The rest as
        `messages.Endpoint`, and raises as that.

        A copy that comes with a claim is shown to `claim` when its memory is held and before a byte
        is read, so that what was given to somebody else meanwhile is not taken for what it was.
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
        self._most_links = most_links
        self._pid = os.getpid()
        self._secret = secret
        self.ranges: Final = Ranges()
        self.leases: Final = Leases(self.ranges)
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._by_connection: dict[Connection, Link] = {}
        self._early: dict[Connection, list[Request]] = {}
        """Of peers that know that a link stands before `link` does."""
        self._ended: deque[Link] = deque(maxlen=_MOST_ENDED)
        self._link_numbers = itertools.count(1)
        self._is_timer_set = False
        # Also of links that have ended, for as long as one of their threads runs.
        self._threads: WeakSet[PeerThreads] = WeakSet()
        host = next((address.host for address in listen if not address.is_unix), None)
        self.streams: Final = Streams(host, networks([*LOOPBACK, *allowed]), data_ports)
        try:
            self._endpoint = Endpoint(
                PROTOCOL,
                self._handle,
                listen=listen,
                secret=secret,
                allowed=allowed,
                most_connections=most_links + 64,
                on_close=self._closed,
                name="kvelastic-transfer",
            )
        except BaseException:
            self.streams.close()
            raise
        self._status = LinkStatus(self)
        self._endpoint.run_later(PUBLISH_S, self._refresh_status)

    # --- memory --------------------------------------------------------------------------------

    def register(self, address: int, size_bytes: int, hold: Holder | None = None) -> Registered:
        """Let peers copy out of and into this memory, which must stay until `unregister`.

        `hold` keeps a part of it in place for a copy, where it would not stay by itself. Raises
        `InvalidArgumentError` where it overlaps what is registered.
        """
        return self.ranges.add(address, size_bytes, hold)

    def unregister(self, registered: Registered) -> None:
        """No copy begins in it any more, and pulls that run are lost. Safe to repeat.

        Blocks while a push writes into it, `lease_s` at most. A peer's kernel may read there a
        moment longer; what it reads then is no use to anybody.
        """
        self.ranges.remove(registered)
        self.leases.end_in(registered)
        registered.wait_until_unwritten()

    # --- links ---------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it listens, with the ports that were chosen."""
        return self._endpoint.addresses

    @property
    def links(self) -> tuple[Link, ...]:
        """Those that stand."""
        return tuple(self._links.values())

    @property
    def ended_links(self) -> tuple[Link, ...]:
        """The last ones that ended, the latest last, unless their peers are linked again."""
        with self._lock:
            return tuple(link for link in self._ended if link.peer_id not in self._links)

    @property
    def strangers_refused(self) -> int:
        """How many were not let in."""
        return self._endpoint.refused

    def cut(self, number: int, peer_id: int) -> bool:
        """End a link as an operator asks, as if the peer had gone; False: there is none such."""
        link = self._links.get(peer_id)
        if link is None or link.number != number or not link.is_open:
            return False
        link.end_reason = "cut"
        link.connection.end(ChannelClosedError("an operator has cut the link"))
        self.forget(link)
        return True

    def link_to(self, node_id: int) -> Link | None:
        """The link to this node, if there is one."""
        return self._links.get(node_id)

    def link(self, address: Address, timeout_s: float) -> Link:
        """A link to the node that listens there. Blocks.

        Of two nodes that link each other at once, the link of the lower id stands: the call of the
        other one raises `LinkExistsError` when it does.

        Raises `ChannelClosedError` if no node listens there, `ChannelTimeoutError`,
        `AccessDeniedError`, `MessageVersionError`, `LinkExistsError` if the two are linked,
        `LinkLimitError` if either has as many links as it may have, `NodeIdTakenError` if both have
        one id or a linked node has the peer's, and `ConfigError` for TCP without a secret.
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

    def _look_after(self, node_id: int, deadline_s: float) -> None:
        """Notice that a node has gone before another one that took its id is refused for it."""
        standing = self._links.get(node_id)
        if standing is not None and standing.is_open:
            with contextlib.suppress(KvelasticError):
                standing.check(min(deadline_s - time.monotonic(), _LOST_NOTICED_S))

    def forget(self, link: Link) -> None:
        """For `Link`: it has ended."""
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

    # --- what peers ask: in the endpoint's thread ----------------------------------------------

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
                    # The peer learns the checksum, which is known when all bytes are sent.
                    lease.sent.add_done_callback(
                        lambda _: _reply(request, partial(self._settled, link, number, lease))
                    )
                else:
                    # A notice says that the copy has failed: nothing is counted, nor waited for.
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
                self.forget(link)  # first: who has the reply may count on it
                request.answer(Done())
                # The reply has to leave before the end; the peer closes. If it does not, we do.
                self._endpoint.run_later(1.0, link.connection.close)
            case _:
                raise MessageError(f"a {type(message).__name__} is not asked")

    def _keep_early(self, request: Request) -> bool:
        """Whether its link is being made here; it is served when it stands, if it wants a reply."""
        with self._lock:
            early = self._early.get(request.connection)
            if early is None or request.connection in self._by_connection:
                return False
            is_check = isinstance(request.message, Check)
            if request.wants_reply and not is_check:  # a peer may have 256
                early.append(request)
        if is_check:  # two nodes that link each other may both check before either goes on
            request.answer(Done())
        return True

    def _handle_early(self, request: Request) -> None:
        try:
            self._handle(request)
        except KvelasticError as error:
            request.refuse(error)

    def _answered(self, link: Link, ask: Ask) -> Told:
        if self._answer is None:
            raise UnsupportedError(f"node {self.node_id} answers no questions")
        return Told(self._answer(link, ask.body))

    def _claimed(self, link: Link, claim: bytes, pieces: Sequence[Piece]) -> Hold | None:
        if not claim:
            return None
        if self._claim is None:
            raise UnsupportedError(f"node {self.node_id} knows no claims")
        return self._claim(link, claim, pieces)

    def _begin(self, link: Link, begin: Begin) -> Begun:
        pieces = _held_at_once(begin.pieces)
        # For no longer than the reader waits.
        lease_s = min(self.lease_s, begin.timeout_ms / 1000)
        claim = partial(self._claimed, link, begin.claim, pieces)
        lease = self.leases.begin(link.connection, pieces, lease_s, claim)
        lease.read_bytes = pieces.size_bytes
        if not link.is_open:  # it ended before the lease stood in the table
            self.leases.end_of(link.connection)
        self._set_timer()
        return Begun(lease.number)

    def _settled(self, link: Link, number: int, lease: Lease | None) -> Settled:
        checksum = None if lease is None else lease.checksum
        is_whole = self.leases.settle(number, link.connection)
        if is_whole and lease is not None:
            link.count(peer_pulled=lease.read_bytes)
        return Settled(is_whole, checksum)

    def _send(self, request: Request, link: Link, send: Send) -> None:
        lease = self.leases.find(send.lease, link.connection)
        if lease is None or lease.sent is not None:
            raise TransferError("there is no such lease, or its bytes have been sent already")
        # No longer than the lease: a peer that asks and does not read holds up no other peer's.
        deadline_s = min(time.monotonic() + send.timeout_ms / 1000, lease.deadline_s)
        carrier: Carrier = passed_stream(request.take_descriptors())
        if carrier is None and link.connection.peer.uid is not None:
            raise TransferError("a stream on this host is a socket that is passed")
        if carrier is None and not link.is_client:
            carrier = self.streams.expect(link, send.token)

        def work() -> None:
            try:
                self.streams.send(link, lease, send.token, carrier, deadline_s)
            except (KvelasticError, OSError) as error:
                _log.info("a copy for node %d was not sent: %s", link.peer_id, error)

        def abandon_if_cancelled(sent: Future[None]) -> None:
            if sent.cancelled():
                self.streams.abandon(link, send.token, carrier)

        try:
            lease.sent = link.threads.sends.submit(work)
        except KvelasticError:
            self.streams.abandon(link, send.token, carrier)
            raise
        lease.sent.add_done_callback(abandon_if_cancelled)
        request.answer(Done())

    def _pushed(self, link: Link, push: Push, deadline_s: float) -> Done:
        targets = _held_at_once(push.targets)
        if PackedPieces(push.sources).size_bytes != targets.size_bytes:
            raise InvalidArgumentError("a push of as many bytes as it has room for is wanted")
        # No longer than a lease, for the targets are held as long.
        deadline_s = min(deadline_s, time.monotonic() + self.lease_s)
        with contextlib.ExitStack() as holds:
            found = self.ranges.find(targets)
            for registered, some in found.items():
                holds.enter_context(registered.being_written())
                holds.callback(registered.hold(some).release)
            # What was unregistered before it was marked is not written, nor what took
            # its place.
            self.ranges.check_still(found)
            if (claimed := self._claimed(link, push.claim, targets)) is not None:
                holds.callback(claimed.release)
            checksum = link.read(push.lease, push.sources, push.targets, deadline_s)
            link.settle(push.lease, checksum, deadline_s)
            link.count(peer_pushed=targets.size_bytes)
        return Done()

    @contextlib.contextmanager
    def lent(self, link: Link, packed: bytes, deadline_s: float) -> Iterator[int]:
        """For `Link`: a lease of the caller's own memory, for as long as the block lasts."""
        lease = self.leases.lend(link.connection, packed, deadline_s)
        try:
            yield lease.number
        finally:
            self.leases.end(lease)

    def _set_timer(self) -> None:
        """Look at the leases' ends: once for all of them, however many there are."""
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

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End all links, hold nothing any more. Safe to repeat. Waits for what it serves now.

        In a forked child it does nothing: all of it is the parent's.
        """
        if self._pid != os.getpid():
            return
        self._endpoint.close()
        self._status.close()
        self.streams.close()
        for threads in list(self._threads):
            threads.end(wait=True)
        self.leases.end_all()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` or AssertionError."""
        self.ranges.check_integrity()
        self.leases.check_integrity()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(queue: Queue, request: Request, serve: Callable[[], Message]) -> None:
    """Reply with what `serve` returns, or raises, in a thread of the queue."""
    queue.submit(partial(_reply, request, serve))


def _reply(request: Request, serve: Callable[[], Message]) -> None:
    try:
        request.answer(serve())
    except KvelasticError as error:
        request.refuse(error)
    except Exception as error:
        _log.exception("a %s was not answered", type(request.message).__name__)
        request.refuse(error)


def _held_at_once(packed: bytes) -> PackedPieces:
    """What a peer names; refused where it takes longer to hold than a copy may."""
    pieces = PackedPieces(packed)
    if pieces.size_bytes > MOST_BYTES:
        raise InvalidArgumentError(
            f"{pieces.size_bytes} bytes in one copy; {MOST_BYTES} are held at once"
        )
    return pieces
