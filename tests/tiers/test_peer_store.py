"""Blocks that one engine holds and another reads, over real nodes; the pools are fakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_tiers import key_of, keys_of
from waiting import wait_until

from kvelastic import _vmm
from kvelastic.errors import DriverError, MessageError, NotRegisteredError, UnsupportedError
from kvelastic.messages import SecretFile, parse_address
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.peer import store as peer_store
from kvelastic.tiers.stores.peer.held import HeldRequests
from kvelastic.tiers.stores.peer.serving import Serving
from kvelastic.tiers.stores.peer.split import Split
from kvelastic.tiers.stores.peer.store import PeerStore, Ticket
from kvelastic.transfer import Node

RECORD_BYTES = 4096
NAMESPACE = Namespace(model="m", ranks="tensor 1", record_bytes=RECORD_BYTES)


class Blocks:
    """A pool whose blocks hold their own number, and its pins."""

    def __init__(self) -> None:
        self.pins: dict[int, list[int]] = {}
        self.content: dict[int, int] = {}
        self.record: bytes | None = None
        """What each block holds instead of its number."""
        self.before_copy = threading.Event()
        self.before_copy.set()
        self.is_copying = threading.Event()
        self._newest = 0

    def pin(self, ids: Sequence[int]) -> int:
        self._newest += 1
        self.pins[self._newest] = list(ids)
        return self._newest

    def unpin(self, ticket: int) -> bool:
        return self.pins.pop(ticket, None) is not None

    def copy_out(self, ids: Sequence[int], staging: _vmm.Staging, slots: Sequence[int]) -> None:
        self.is_copying.set()
        assert self.before_copy.wait(60)
        for block, slot in zip(ids, slots, strict=True):
            view = staging.view(slot)
            view[:] = self.record or bytes([self.content.get(block, block)]) * len(view)

    def copy_in(self, staging: _vmm.Staging, slots: Sequence[int], ids: Sequence[int]) -> None:
        raise AssertionError("the owner's blocks are not written")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Owner:
    """A prefill engine."""

    def __init__(
        self, address: str, secret: SecretFile | None = None, split: Split | None = None
    ) -> None:
        slots, record_bytes = 4, RECORD_BYTES if split is None else split.record_bytes
        self.blocks = Blocks()
        self.clock = Clock()
        self.identity = b""
        blocks: Any = self.blocks
        self.held = HeldRequests(blocks, hold_s=60, block_bytes=RECORD_BYTES, clock=self.clock)
        staging = self.staging = _vmm.Staging(slots, record_bytes)
        self.serving = Serving(self.held, blocks, staging, lambda: self.identity, split)
        self.node = Node(
            1,
            answer=self.serving.answer,
            claim=self.serving.claim,
            on_end=self.serving.ended,
            listen=[parse_address(address)],
            secret=secret,
            held=self.held,
        )
        end = staging.address(slots - 1) + record_bytes
        self.node.register(staging.address(0), end - staging.address(0))

    def hold(self, numbers: Sequence[int]) -> Ticket:
        ticket = self.held.hold("req", numbers, keys_of(numbers))
        return Ticket(ticket, self.node.node_id, self.node.addresses[0])


class Both:
    """An owner and a reader."""

    def __init__(
        self,
        address: str,
        secret: SecretFile | None = None,
        owned: Split | None = None,
        read: Split | None = None,
    ) -> None:
        """`owned` and `read`: how the owner's and the reader's records are divided."""
        self.owner = Owner(address, secret, owned)
        self.node = Node(2, secret=secret)
        record_bytes = RECORD_BYTES if read is None else read.record_bytes
        self.store = PeerStore(record_bytes, self.node, identified=True, split=read)
        self.store.enter(NAMESPACE)
        self.owner.identity = self.store.identity

    def expect(self, ticket: Ticket, numbers: Sequence[int]) -> None:
        """The reader's own keys differ from those between the engines."""
        own = keys_of([100 + number for number in numbers])
        self.store.expect("own", ticket, own, keys_of(numbers))

    def get(self, numbers: Sequence[int]) -> list[int | None]:
        """The number that each block holds; None for a miss."""
        records = self.records(numbers)
        assert all(len(set(record)) == 1 for record in records if record is not None)
        return [None if record is None else record[0] for record in records]

    def records(self, numbers: Sequence[int]) -> list[bytes | None]:
        """The bytes of each block; None for a miss."""
        into = [memoryview(bytearray(self.store.record_bytes)) for _ in numbers]
        whole = self.store.get(keys_of([100 + number for number in numbers]), into)
        return [bytes(view) if each else None for view, each in zip(into, whole, strict=True)]

    def close(self) -> None:
        self.store.close()
        self.node.close()
        self.owner.node.close()
        self.owner.held.close()


@contextmanager
def opened(address: str, secret: SecretFile | None = None, *splits: Split) -> Iterator[Both]:
    both = Both(address, secret, *splits)
    try:
        yield both
    finally:
        both.close()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    with opened(f"unix://{tmp_path}/owner") as both:
        yield both


def test_more_blocks_than_slots_are_read(both: Both) -> None:
    numbers = list(range(1, 12))
    both.expect(both.owner.hold(numbers), numbers)
    assert both.store.has(keys_of([101, 111, 112])) == [True, True, False]
    assert both.get(numbers) == numbers
    assert both.store.statistics().hits == len(numbers)


TWO_HEADS = Split(1, rows=3, heads=2, head_bytes=1, common="m")
DIVIDED = {
    "one_to_two": (1, 2, b"abcdef", b"acebdf"),
    "two_to_one": (2, 1, b"acebdf", b"abcdef"),
    "one_to_four": (1, 4, b"abcdef", b"aceacebdfbdf"),
    "four_to_two": (4, 2, b"aceacebdfbdf", b"acebdf"),
}
"""Ranks of the owner and of the reader, and the record of each. Rows: ab, cd and ef."""


@pytest.mark.parametrize("name", DIVIDED)
def test_reader_of_other_ranks_gets_its_heads(name: str, tmp_path: Path) -> None:
    owner_ranks, reader_ranks, record, expected = DIVIDED[name]
    splits = TWO_HEADS.over(owner_ranks), TWO_HEADS.over(reader_ranks)
    with opened(f"unix://{tmp_path}/owner", None, *splits) as both:
        assert both.store.identity == both.owner.identity
        both.owner.blocks.record = record
        numbers = list(range(1, 12))
        both.expect(both.owner.hold(numbers), numbers)
        assert both.records(numbers) == [expected] * len(numbers)
        assert not both.owner.serving._readings, "all slots are free"


def test_ranks_without_equal_heads_are_refused(tmp_path: Path) -> None:
    from kvelastic.tiers.stores.peer.wire import PROTOCOL, Read

    with opened(f"unix://{tmp_path}/owner", None, TWO_HEADS, TWO_HEADS) as both:
        ticket = both.owner.hold([1])
        link = both.node.link(ticket.address, 60)
        for ranks in (0, 3, 1024):
            read = Read(ticket.ticket, both.store.identity, key_of(1), ranks)
            if ranks == 1024:
                link.ask(PROTOCOL.encode(read), 60)
                continue
            with pytest.raises(UnsupportedError, match=f"no equal parts for {ranks} ranks"):
                link.ask(PROTOCOL.encode(read), 60)
        many = Read(ticket.ticket, both.store.identity, key_of(1), 1025)
        with pytest.raises(MessageError):
            link.ask(PROTOCOL.encode(many), 60)


@pytest.mark.parametrize(
    "changes", [{"heads": 4}, {"rows": 4}, {"head_bytes": 2}, {"common": "other"}]
)
def test_other_heads_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    other = replace(TWO_HEADS, **changes)
    with opened(f"unix://{tmp_path}/owner", None, TWO_HEADS, other) as both:
        own = PeerStore(1, both.node, identified=True, split=TWO_HEADS)
        own.enter(NAMESPACE)
        both.owner.identity = own.identity
        both.expect(both.owner.hold([1]), [1])
        assert both.records([1]) == [None]
        assert "layout" in both.store.problem()
        own.close()


def test_records_travel_over_tcp(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("0123456789abcdef" * 4)
    with opened("tcp://127.0.0.1:0", SecretFile(path)) as both:
        both.expect(both.owner.hold([1, 2]), [1, 2])
        assert both.get([1, 2]) == [1, 2]


def test_finished_reader_ends_the_hold(both: Both) -> None:
    both.expect(both.owner.hold([1]), [1])
    assert both.get([1]) == [1]
    assert list(both.owner.blocks.pins.values()) == [[1]]
    both.store.finish("own")
    wait_until(lambda: not both.owner.blocks.pins)
    assert both.store.has(key_of(101)) == [False]


def test_stale_ticket_gets_no_other_bytes(both: Both) -> None:
    ticket = both.owner.hold([1, 2])
    both.owner.held.release(ticket.ticket)
    both.owner.blocks.content = {1: 66, 2: 77}  # another request's
    both.owner.hold([1, 2])
    both.expect(ticket, [1, 2])
    assert both.get([1, 2]) == [None, None]
    assert "the ticket is unknown" in both.store.problem()


def test_hold_expires_by_itself_while_idle(tmp_path: Path) -> None:
    blocks: Any = Blocks()
    held = HeldRequests(blocks, hold_s=0.02, block_bytes=1)
    held.hold("req", [1], key_of(1))
    wait_until(lambda: held.expired == 1)
    assert not blocks.pins
    held.close()


def test_hold_without_a_thread_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    blocks: Any = Blocks()
    held = HeldRequests(blocks, hold_s=60, block_bytes=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DriverError, match="no thread could be started"):
            held.hold("req", [1], key_of(1))
    assert not blocks.pins
    assert held.held() == []
    held.hold("req", [1], key_of(1))
    held.close()
    assert not blocks.pins


def test_expired_ticket_is_refused_before_expiry_runs(both: Both) -> None:
    ticket = both.owner.hold([1])
    both.expect(ticket, [1])
    both.owner.clock.now_s = 61.0
    assert both.get([1]) == [None]
    assert both.owner.held.expire() is None
    assert not both.owner.blocks.pins


def test_release_keeps_blocks_that_are_copied(both: Both) -> None:
    blocks = both.owner.blocks
    blocks.before_copy.clear()
    ticket = both.owner.hold([1])
    both.expect(ticket, [1])
    found: list[list[int | None]] = []
    reader = threading.Thread(target=lambda: found.append(both.get([1])))
    reader.start()
    assert blocks.is_copying.wait(60)
    assert both.owner.held.release(ticket.ticket)
    assert blocks.pins, "the copy reads them"
    blocks.before_copy.set()
    reader.join()
    assert found == [[1]]
    assert not blocks.pins


def test_slots_of_a_late_reader_are_reused(both: Both) -> None:
    from kvelastic.tiers.stores.peer.wire import PROTOCOL, Read, Reading

    ticket = both.owner.hold([1, 2])
    link = both.node.link(ticket.address, 60)
    body = PROTOCOL.encode(Read(ticket.ticket, both.store.identity, keys_of([1, 2]), 0))
    late = PROTOCOL.decode(link.ask(body, 60))
    both.owner.serving.ended(both.owner.node.links[0])  # as if its time were over
    both.owner.blocks.content = {1: 66, 2: 77}
    again = PROTOCOL.decode(link.ask(body, 60))
    assert isinstance(late, Reading)
    assert isinstance(again, Reading)
    assert set(again.addresses) == set(late.addresses)
    target = _vmm.Staging(1, RECORD_BYTES)
    piece = [(target.address(0), RECORD_BYTES)]
    with pytest.raises(NotRegisteredError):
        link.pull([(late.addresses[0], RECORD_BYTES)], piece, 60, claim=late.claim)
    with pytest.raises(NotRegisteredError):
        link.pull([(late.addresses[0] + 8, RECORD_BYTES)], piece, 60, claim=again.claim)
    assert not any(target.view(0))


def test_other_weights_are_refused(both: Both) -> None:
    both.expect(both.owner.hold([1]), [1])
    both.store.weights_changed()
    assert both.get([1]) == [None]
    assert "weights" in both.store.problem()


def test_reset_generation_keeps_the_identity(both: Both) -> None:
    both.store.enter(NAMESPACE.next_generation())
    assert both.store.identity == both.owner.identity


def test_dead_owner_is_a_miss_and_then_skipped(both: Both) -> None:
    both.expect(both.owner.hold([1]), [1])
    both.owner.node.close()
    assert both.get([1]) == [None]
    assert both.store.statistics().errors == 1
    assert both.store.has(key_of(101)) == [False]


def test_refused_notice_suspends_calls_to_the_owner(both: Both) -> None:
    """Otherwise each further notice would wait for it, before those to other engines."""
    both.expect(both.owner.hold([1]), [1])
    both.owner.node.close()
    both.store.finish("own")
    wait_until(lambda: 1 in both.store._peers and both.store._peers[1].breaker.problem)


def test_restarted_owner_at_the_address_is_refused(both: Both) -> None:
    numbered = both.owner.hold([1])
    both.expect(Ticket(numbered.ticket, 3, numbered.address), [1])
    assert both.get([1]) == [None]
    assert "has ended" in both.store.problem()
    assert both.node.links == ()


def test_invented_nodes_are_forgotten(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "MOST_PEERS", 3)
    held = both.owner.hold([1])
    both.owner.node.close()
    for node_id in range(10, 20):
        both.expect(Ticket(held.ticket, node_id, held.address), [1])
        assert both.get([1]) == [None]
    assert sorted(both.store._peers) == [17, 18, 19]
