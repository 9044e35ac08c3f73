"""What one peer does, or does not do, never keeps another peer's work waiting."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from linked import KINDS, Memory, address_of, linked, secret_file
from waiting import DEADLINE_S, wait_until

from kvelastic._vmm import pack_pieces as pack
from kvelastic.errors import KvelasticError, TransferBusyError
from kvelastic.messages import Message
from kvelastic.transfer import Hold, Link, Node, Piece, leases
from kvelastic.transfer.link import PUSHES
from kvelastic.transfer.wire import Begin, Begun, Done, Push, Send, Settle, Settled

STREAMS = [kind for kind in KINDS if kind != "memory"]


@pytest.mark.parametrize("kind", STREAMS)
def test_pushes_in_both_directions_do_not_deadlock(kind: str, tmp_path: Path) -> None:
    """A node whose push threads are all busy still sends what the peer reads for its own."""
    threads, rounds, size = 16, 2, 64 << 10
    address, secret = address_of(kind, tmp_path), secret_file(tmp_path)
    busy = threading.Barrier(2 * PUSHES)
    all_busy = threading.Event()

    class Held:
        def is_whole(self) -> bool:
            return True

        def release(self) -> None:
            pass

    def claim(link: Link, claim: bytes, pieces: Sequence[Piece]) -> Hold:
        if not all_busy.is_set():
            busy.wait(DEADLINE_S)
            all_busy.set()
        return Held()

    with (
        Node(1, claim=claim, listen=[address], secret=secret, lease_s=DEADLINE_S) as one,
        Node(2, claim=claim, secret=secret, lease_s=DEADLINE_S) as other,
        linked(kind, one, other) as link,
        ThreadPoolExecutor(2 * threads) as pushers,
    ):
        (back,) = one.links
        wanted, pushes = [], []
        for way, target in ((link, one), (back, other)):
            for _ in range(threads):
                source, into = Memory(os.urandom(size)), Memory(bytes(size))
                target.register(into.address, into.size)
                wanted.append((source, into))

                def push(way: Link = way, source: Memory = source, into: Memory = into) -> None:
                    for _ in range(rounds):
                        way.push([source.piece()], [into.piece()], DEADLINE_S, claim=b"c")

                pushes.append(pushers.submit(push))
        for pushed in pushes:
            pushed.result(DEADLINE_S)
        assert all(source.content == into.content for source, into in wanted)


@contextlib.contextmanager
def stopped(link: Link) -> Iterator[Callable[[Message, type[Message]], None]]:
    """A peer that answers nothing any more; what it is given to ask, it asks."""
    node = link._node
    node._endpoint._handle = lambda request: None  # as under SIGSTOP: sockets stay open

    def ask(message: Message, wanted: type[Message]) -> None:
        with contextlib.suppress(KvelasticError):
            link._call(message, wanted, DEADLINE_S)

    asking: list[threading.Thread] = []

    def begin(message: Message, wanted: type[Message]) -> None:
        asking.append(threading.Thread(target=ask, args=(message, wanted)))
        asking[-1].start()

    try:
        yield begin
    finally:
        node.close()
        for thread in asking:
            thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_peer_does_not_block_others(kind: str, tmp_path: Path) -> None:
    """It pushes, pulls and settles far more than a node serves at once, and reads nothing."""
    secret = secret_file(tmp_path)
    theirs, ours = Memory(os.urandom(1000)), Memory(bytes(1000))
    address = address_of(kind, tmp_path)
    with (
        Node(1, answer=lambda _, body: body, listen=[address], secret=secret, lease_s=600) as owner,
        Node(2, secret=secret) as late,
        Node(3, secret=secret) as healthy,
        linked(kind, owner, late) as late_link,
        stopped(late_link) as ask,
    ):
        owner.register(theirs.address, theirs.size)
        piece = pack([theirs.piece()])
        (seen,) = owner.links
        for number in range(24):
            ask(Push(number, piece, piece, b"", 600_000), Done)
        wait_until(lambda: seen.connection._unanswered == 24, "the pushes have not come")
        if kind == "tcp":
            for _ in range(24):
                lease = late_link._call(Begin(piece, b"", 600_000), Begun, DEADLINE_S).lease
                late_link._call(Send(lease, os.urandom(32), 600_000), Done, DEADLINE_S)
                ask(Settle(lease), Settled)
            wait_until(lambda: seen.connection._unanswered == 48, "it has not settled")
        for _ in range(2):  # it can be linked again, too
            link = healthy.link(owner.addresses[0], timeout_s=DEADLINE_S)
            assert link.ask(b"there?", DEADLINE_S) == b"there?"
            link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
            assert ours.content == theirs.content
            ours.buffer.raw = os.urandom(1000)
            link.push([ours.piece()], [theirs.piece()], timeout_s=DEADLINE_S)
            assert ours.content == theirs.content
            link.unlink(DEADLINE_S)


def test_slow_question_does_not_block_other_peers(tmp_path: Path) -> None:
    let_go = threading.Event()

    def answer(link: Link, body: bytes) -> bytes:
        assert link.peer_id != 2 or let_go.wait(DEADLINE_S)
        return body

    address = address_of("unix", tmp_path)
    with (
        Node(1, answer=answer, listen=[address]) as owner,
        Node(2) as slow,
        Node(3) as healthy,
        ThreadPoolExecutor(16) as asking,
    ):
        slow_link = slow.link(address, DEADLINE_S)
        asked = [asking.submit(slow_link.ask, b"x", DEADLINE_S) for _ in range(16)]
        (seen,) = (one for one in owner.links if one.peer_id == 2)
        wait_until(lambda: seen.connection._unanswered == 16, "they have not come")
        try:
            assert healthy.link(address, DEADLINE_S).ask(b"y", DEADLINE_S) == b"y"
        finally:
            let_go.set()
        assert [one.result(DEADLINE_S) for one in asked] == 16 * [b"x"]


def test_leases_are_reserved_for_every_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MOST_LEASES", 64)
    monkeypatch.setattr(leases, "ALWAYS_A_PEER", 4)
    memory, ours = Memory(b"x" * 100), Memory(bytes(100))
    address = address_of("unix", tmp_path)
    with (
        Node(1, listen=[address], lease_s=600) as owner,
        Node(2) as greedy,
        Node(3) as healthy,
    ):
        owner.register(memory.address, memory.size)
        begin = Begin(pack([memory.piece()]), b"", 600_000)
        greedy_link = greedy.link(address, DEADLINE_S)
        for _ in range(64):
            greedy_link._call(begin, Begun, DEADLINE_S)
        with pytest.raises(TransferBusyError):
            greedy_link._call(begin, Begun, DEADLINE_S)
        link = healthy.link(address, DEADLINE_S)
        held = [link._call(begin, Begun, DEADLINE_S).lease for _ in range(4)]
        with pytest.raises(TransferBusyError):
            link._call(begin, Begun, DEADLINE_S)
        link._call(Settle(held[0]), Settled, DEADLINE_S)
        link.pull([memory.piece()], [ours.piece()], timeout_s=DEADLINE_S)
        assert ours.content == memory.content
        owner.check_integrity()


def test_queued_copies_end_with_their_link(tmp_path: Path) -> None:
    """Their streams are closed, and their tokens are forgotten."""
    secret = secret_file(tmp_path)
    memory = Memory(b"x" * 100)
    with (
        Node(1, listen=[address_of("tcp", tmp_path)], secret=secret, lease_s=600) as owner,
        Node(2, secret=secret) as reader,
        linked("tcp", owner, reader) as link,
    ):
        owner.register(memory.address, memory.size)
        begin = Begin(pack([memory.piece()]), b"", 600_000)
        for _ in range(16):
            lease = link._call(begin, Begun, DEADLINE_S).lease
            link._call(Send(lease, os.urandom(32), 600_000), Done, DEADLINE_S)
        port = owner.streams._port
        assert port is not None
        assert len(port._awaited) == 16
        link.unlink(0, force=True)
        wait_until(lambda: not port._awaited, "tokens are still expected")
        assert len(owner.leases) == 0
