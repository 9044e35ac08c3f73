"""Peers that lie, stop, share an id or ask for too much; and a process without descriptors."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from linked import Memory, address_of, linked, secret_file
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic._vmm import pack_pieces as pack
from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    InvalidArgumentError,
    KvelasticError,
    LinkLimitError,
    NodeIdTakenError,
    NotRegisteredError,
    TransferError,
)
from kvelastic.transfer import Hold, Link, Node, Registered, leases, streams
from kvelastic.transfer.node import MOST_LINKS
from kvelastic.transfer.wire import Begin, Begun, Done, Push, Send

Pair = tuple[Node, Node, Link]


@contextlib.contextmanager
def pair(kind: str, folder: Path, *, lease_s: float = 600.0) -> Iterator[Pair]:
    secret = secret_file(folder)
    with (
        Node(1, listen=[address_of(kind, folder)], secret=secret, lease_s=lease_s) as owner,
        Node(2, secret=secret) as reader,
        linked(kind, owner, reader) as link,
    ):
        yield owner, reader, link
        owner.check_integrity()


def begin(link: Link, memory: Memory) -> int:
    return link._call(Begin(pack([memory.piece()]), b"", 60_000), Begun, DEADLINE_S).lease


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.slow
def test_passed_descriptor_must_be_a_stream(tmp_path: Path) -> None:
    memory = Memory(b"x" * 100)
    with pair("unix", tmp_path) as (owner, _, link):
        owner.register(memory.address, memory.size)
        gc.collect()  # what earlier tests left closes its descriptors when it likes
        before = open_descriptors()
        read, write = os.pipe()
        one, other = socket.socketpair()
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with one, other, datagrams:
            for passed in ([read], [one.fileno(), other.fileno()], [datagrams.fileno()], []):
                with pytest.raises(TransferError):
                    link._call(Send(begin(link, memory), b"", 60_000), Done, DEADLINE_S, passed)
        os.close(read)
        os.close(write)
        link.check(DEADLINE_S)
        assert open_descriptors() <= before


def test_leased_bytes_are_sent_once(tmp_path: Path) -> None:
    """Or one lease would be any number of streams and threads."""
    memory = Memory(b"x" * 100)
    with pair("unix", tmp_path) as (owner, _, link):
        owner.register(memory.address, memory.size)
        lease = begin(link, memory)
        one, other = socket.socketpair()
        with one, other:
            link.ask_to_send(lease, b"", 1e9, one)
            with pytest.raises(TransferError, match="sent already"):
                link.ask_to_send(lease, b"", 1e9, one)


def test_request_for_more_than_the_lease_is_rejected(tmp_path: Path) -> None:
    """Or a short message would make the owner look at any number of blocks."""
    size = (64 << 20) // 16
    memory = Memory(bytes(size))
    piece = pack([memory.piece()])
    with pair("unix", tmp_path) as (owner, _, link):
        held: list[bytes] = []

        class Counted:
            def is_whole(self) -> bool:
                return True

            def release(self) -> None:
                pass

        def hold(pieces: bytes) -> Hold:
            held.append(pieces)
            return Counted()

        owner.register(memory.address, memory.size, hold)
        link._call(Begin(16 * piece, b"", 60_000), Begun, DEADLINE_S)
        with pytest.raises(InvalidArgumentError, match="held at once"):
            link._call(Begin(17 * piece, b"", 60_000), Begun, DEADLINE_S)
        with pytest.raises(InvalidArgumentError, match="held at once"):
            link._call(Push(1, 17 * piece, 17 * piece, b"", 60_000), Done, DEADLINE_S)
        assert len(held) == 1


def test_unused_send_requests_block_no_push(tmp_path: Path) -> None:
    """It says that it waits for an hour; the lease is over before."""
    memory, ours = Memory(b"x" * 100), Memory(b"y" * 100)
    with pair("tcp", tmp_path, lease_s=0.2) as (owner, _, link):
        owner.register(memory.address, memory.size)
        asked = 0

        def pushed() -> bool:
            with contextlib.suppress(KvelasticError):
                link.push([ours.piece()], [memory.piece()], timeout_s=5)
            return memory.content == ours.content

        while asked < 16:
            lease = begin(link, memory)
            with contextlib.suppress(TransferError):  # a lease that has ended before
                link._call(Send(lease, os.urandom(32), 3_600_000), Done, DEADLINE_S)
                asked += 1
        wait_until(pushed, "no push comes through")


def test_second_node_with_the_same_id_is_rejected(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    with Node(1, listen=[address]) as owner, Node(2) as first:
        link = first.link(address, timeout_s=DEADLINE_S)
        with Node(2) as second, pytest.raises(NodeIdTakenError, match="each its own id"):
            second.link(address, timeout_s=DEADLINE_S)
        link.check(timeout_s=DEADLINE_S)
        (back,) = owner.links
        assert back.peer_start == first.start
        other = address_of("unix", tmp_path, "other")
        with (
            Node(1, listen=[other]),
            pytest.raises(NodeIdTakenError, match="each its own id"),
        ):
            first.link(other, timeout_s=DEADLINE_S)
        link.check(timeout_s=DEADLINE_S)
        first.close()
        with Node(2) as anew:  # its end was noticed: the id is free
            anew.link(address, timeout_s=DEADLINE_S).check(timeout_s=DEADLINE_S)


def test_memory_reregistered_during_a_copy_is_not_used(tmp_path: Path) -> None:
    memory, ours = Memory(b"x" * 100), Memory(bytes(100))
    released = []

    class Swapped:
        """While memory is held, it goes, and something else takes its address."""

        def __call__(self, pieces: bytes) -> Hold:
            owner.ranges.remove(
                registered
            )  # as `unregister` begins; it waits for a push after that
            owner.leases.end_in(registered)
            again.append(owner.register(memory.address, memory.size))
            return self

        def is_whole(self) -> bool:
            return True

        def release(self) -> None:
            released.append(True)

    again: list[Registered] = []
    with pair("unix", tmp_path) as (owner, _, link):
        for copy in (link.pull, link.push):
            registered = owner.register(memory.address, memory.size, Swapped())
            pieces = [memory.piece()], [ours.piece()]
            with pytest.raises(NotRegisteredError, match="unregistered before it began"):
                copy(*(pieces if copy == link.pull else pieces[::-1]), timeout_s=DEADLINE_S)
            owner.unregister(again.pop())
        assert released == [True, True]
        assert memory.content == b"x" * 100
        assert ours.content == bytes(100)


def test_lease_ended_at_its_beginning_is_released_once() -> None:
    """Its link ends between the entry in the table and the check that its ranges are there."""
    memory = Memory(b"x" * 100)
    released = []

    class Held:
        def is_whole(self) -> bool:
            return True

        def release(self) -> None:
            released.append(True)

    def end_first(found: Iterable[Registered]) -> None:
        held.end_of("peer")
        ranges.remove(registered)
        check_still(found)

    ranges = leases.Ranges()
    held = leases.Leases(ranges)
    registered = ranges.add(memory.address, memory.size, lambda _: Held())
    check_still = ranges.check_still
    ranges.check_still = end_first  # type: ignore[method-assign]
    with pytest.raises(NotRegisteredError):
        held.begin("peer", pack([memory.piece()]), 60.0)
    assert released == [True]
    held.check_integrity()


def test_failing_hold_still_releases_the_other_holds(tmp_path: Path) -> None:
    released = threading.Event()

    class Hostile:
        def __init__(self, fail: Callable[[], None]) -> None:
            self.release = fail

        def is_whole(self) -> bool:
            raise ZeroDivisionError

    def fail() -> None:
        raise ZeroDivisionError

    one, other, ours = Memory(b"x" * 100), Memory(b"x" * 100), Memory(bytes(200))
    with pair("unix", tmp_path) as (owner, _, link):
        owner.register(one.address, one.size, lambda _: Hostile(fail))
        owner.register(other.address, other.size, lambda _: Hostile(released.set))
        with pytest.raises(KvelasticError):
            link.pull([one.piece(), other.piece()], [ours.piece()], timeout_s=DEADLINE_S)
        assert released.wait(DEADLINE_S)
        assert len(owner.leases) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unix stream", "tcp"])
def test_slow_stream_reader_is_not_disconnected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a lost host is waited for, with more bytes than any socket buffers."""
    receive = _vmm.receive_pieces

    class Busy:
        def __getattr__(self, name: str) -> object:
            return getattr(_vmm, name)

        def receive_pieces(self, fd: int, pieces: bytes, timeout_s: float) -> int:
            threading.Event().wait(1.0)
            return receive(fd, pieces, timeout_s)

    monkeypatch.setattr(streams, "_vmm", Busy())
    theirs, ours = Memory(os.urandom(48 << 20)), Memory(bytes(48 << 20))
    with pair(kind, tmp_path) as (owner, _, link):
        owner.register(theirs.address, theirs.size)
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert ours.content == theirs.content


@pytest.mark.parametrize("kind", ["unix stream", "tcp"])
def test_stream_ends_with_its_link(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at the deadline of whoever waits for its bytes."""
    let_go = threading.Event()

    class Stuck:
        def __getattr__(self, name: str) -> object:
            return getattr(_vmm, name)

        def send_pieces(self, fd: int, pieces: bytes, timeout_s: float) -> int:
            owner.links[0].connection.close()
            let_go.wait()
            return 0

    monkeypatch.setattr(streams, "_vmm", Stuck())
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    with pair(kind, tmp_path) as (owner, _, link):
        owner.register(theirs.address, theirs.size)
        try:
            with pytest.raises(ChannelClosedError):
                link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
        finally:
            let_go.set()


def test_unauthenticated_data_connections_do_not_block_copies(tmp_path: Path) -> None:
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    with pair("tcp", tmp_path) as (owner, _, link), contextlib.ExitStack() as unauthenticated:
        owner.register(theirs.address, theirs.size)
        for _ in range(80):
            unauthenticated.enter_context(
                socket.create_connection(("127.0.0.1", owner.streams.port))
            ).sendall(b"z" * 31)
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert ours.content == theirs.content


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unix stream", "tcp"])
def test_descriptor_shortage_fails_the_copy_not_the_link(kind: str, tmp_path: Path) -> None:
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    with pair(kind, tmp_path) as (owner, reader, link):
        owner.register(theirs.address, theirs.size)
        with no_descriptor_left():
            with pytest.raises(ChannelError):
                # Its sender waits for the stream as long, and the node's end for its sender.
                link.pull([theirs.piece()], [ours.piece()], timeout_s=0.5)
            with pytest.raises(ChannelError):
                reader.link(owner.addresses[0], timeout_s=DEADLINE_S)
            with pytest.raises(ChannelError):
                Node(3)
            link.check(timeout_s=DEADLINE_S)
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert ours.content == theirs.content


@pytest.mark.slow
@pytest.mark.parametrize("most", [64, pytest.param(MOST_LINKS, marks=pytest.mark.matrix)])
def test_maximum_number_of_links_work(tmp_path: Path, most: int) -> None:
    """Sixteen at a time, each of another node; all of them pull, and the next one is refused."""
    address = address_of("unix", tmp_path)
    memory = Memory(b"x" * 100)
    with contextlib.ExitStack() as nodes:
        owner = nodes.enter_context(Node(0, listen=[address], most_links=most))
        owner.register(memory.address, memory.size)

        def link(node_id: int) -> Node:
            node = Node(node_id)
            nodes.push(node)
            ours = Memory(bytes(100))
            standing = node.link(address, timeout_s=DEADLINE_S)
            standing.pull([memory.piece()], [ours.piece()], timeout_s=DEADLINE_S)
            assert ours.content == memory.content
            return node

        with ThreadPoolExecutor(16) as threads:
            linked = list(threads.map(link, range(1, most + 1)))
        assert len(owner.links) == most
        with pytest.raises(LinkLimitError, match=f"has {most} links and may have"):
            link(most + 1)
        linked[0].links[0].unlink(timeout_s=DEADLINE_S)
        link(most + 2)
        for node in linked[1:]:
            node.links[0].check(timeout_s=DEADLINE_S)
