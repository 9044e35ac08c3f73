"""Pulls and pushes between two nodes of this process, in each of the ways that bytes travel."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from linked import KINDS, Memory, address_of, linked, secret_file
from native_pools import LAYOUTS
from native_pools import Memory as Pages
from processes import LineProgram
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    ConfigError,
    InvalidArgumentError,
    KvelasticError,
    LeaseLostError,
    LinkExistsError,
    LinkLimitError,
    MappingError,
    NodeIdTakenError,
    NotRegisteredError,
    UnknownBlockError,
    UnsupportedError,
)
from kvelastic.messages import parse_address
from kvelastic.transfer import Hold, Link, Node, Piece, register_blocks
from kvelastic.transfer import link as links

Nodes = tuple[Node, Node, Link]


def total(pieces: Sequence[Piece]) -> int:
    return sum(size for _, size in pieces)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nodes(kind: str, tmp_path: Path) -> Iterator[Nodes]:
    secret = secret_file(tmp_path)
    with (
        Node(1, listen=[address_of(kind, tmp_path)], secret=secret) as owner,
        Node(2, secret=secret) as reader,
        linked(kind, owner, reader) as link,
    ):
        yield owner, reader, link
        assert len(owner.leases) == 0
        assert len(reader.leases) == 0
        owner.check_integrity()
        reader.check_integrity()


def test_pull_and_push_copy_both_ways(nodes: Nodes) -> None:
    owner, reader, link = nodes
    theirs, ours = Memory(os.urandom(100_000)), Memory(bytes(100_000))
    owner.register(theirs.address, theirs.size)
    reader.register(ours.address, ours.size)
    link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert ours.content == theirs.content
    ours.buffer.raw = os.urandom(100_000)
    link.push([ours.piece()], [theirs.piece()], timeout_s=DEADLINE_S)
    assert theirs.content == ours.content
    (back,) = owner.links  # the other end of the same link
    theirs.buffer.raw = os.urandom(100_000)
    back.push([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert ours.content == theirs.content
    ours.buffer.raw = os.urandom(100_000)
    back.pull([ours.piece()], [theirs.piece()], timeout_s=DEADLINE_S)
    assert ours.content == theirs.content
    assert (link.counts["pulled_bytes"], link.counts["pushed_bytes"]) == (100_000, 100_000)


@pytest.mark.slow
def test_pieces_of_all_sizes_are_copied(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces need not match; more of them than a lease may have are several leases."""
    monkeypatch.setattr(links, "MOST_PIECES", 100)
    owner, _, link = nodes
    rng = random.Random(7)
    theirs, ours = Memory(os.urandom(1 << 20)), Memory(bytes(1 << 20))
    owner.register(theirs.address, theirs.size)

    def cut(memory: Memory, parts: int) -> list[Piece]:
        cuts = sorted(rng.choices(range(memory.size), k=parts))
        return [
            memory.piece(first, last - first)
            for first, last in zip([0, *cuts], [*cuts, memory.size], strict=True)
        ]

    sources, targets = cut(theirs, 3000), cut(ours, 2500)
    order = list(range(len(sources)))
    rng.shuffle(order)
    link.pull([sources[i] for i in order], targets, timeout_s=DEADLINE_S)
    shuffled = b"".join(
        theirs.content[at - theirs.address : at - theirs.address + size]
        for at, size in (sources[i] for i in order)
    )
    assert ours.content == shuffled


@pytest.mark.parametrize("relinks", [False, True])
def test_push_waits_for_an_earlier_one_given_up(
    kind: str, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, relinks: bool
) -> None:
    """The peer still copies it, and would write over what the later one has pushed."""
    owner, reader, link = nodes
    theirs, first, second = Memory(bytes(1000)), Memory(b"1" * 1000), Memory(b"2" * 1000)
    owner.register(theirs.address, theirs.size)
    (back,) = owner.links
    copying, go_on = threading.Event(), threading.Event()
    read = back.read

    def read_slowly(*arguments: Any) -> int | None:
        copying.set()
        assert go_on.wait(DEADLINE_S)
        return read(*arguments)

    monkeypatch.setattr(back, "read", read_slowly)
    with contextlib.ExitStack() as ending:
        ending.callback(go_on.set)
        with pytest.raises(ChannelTimeoutError):
            link.push([first.piece()], [theirs.piece()], timeout_s=0.2)
        assert copying.wait(DEADLINE_S)
        if relinks:
            link.unlink(DEADLINE_S)
            link = ending.enter_context(linked(kind, owner, reader))
        with pytest.raises(ChannelTimeoutError):
            link.push([second.piece()], [theirs.piece()], timeout_s=0.2)
        go_on.set()
        link.push([second.piece()], [theirs.piece()], timeout_s=DEADLINE_S)
    assert theirs.content == second.content


def test_unregistered_memory_is_rejected(nodes: Nodes) -> None:
    owner, _, link = nodes
    theirs, ours = Memory(b"x" * 1000), Memory(bytes(1000))
    half = owner.register(theirs.address, 500)
    for piece in (
        theirs.piece(0, 501),
        theirs.piece(499, 2),
        theirs.piece(500, 1),
        (theirs.address - 1, 2),
        (1, 1),
        ((1 << 63) - 1, 1),
    ):
        with pytest.raises(NotRegisteredError):
            link.pull([piece], [ours.piece(0, piece[1])], timeout_s=DEADLINE_S)
        with pytest.raises(NotRegisteredError):
            link.push([ours.piece(0, piece[1])], [piece], timeout_s=DEADLINE_S)
    assert ours.content == bytes(1000)
    with pytest.raises(InvalidArgumentError, match="must have the same size"):
        link.pull([theirs.piece(0, 10)], [ours.piece(0, 11)], timeout_s=DEADLINE_S)
    with pytest.raises(InvalidArgumentError):
        link.pull([(1 << 64, 1)], [ours.piece(0, 1)], timeout_s=DEADLINE_S)
    with pytest.raises(InvalidArgumentError, match="registered already"):
        owner.register(theirs.address + 499, 10)
    owner.unregister(half)
    owner.unregister(half)
    with pytest.raises(NotRegisteredError):
        link.pull([theirs.piece(0, 1)], [ours.piece(0, 1)], timeout_s=DEADLINE_S)
    link.pull([], [], timeout_s=DEADLINE_S)


def test_unmapped_memory_raises(nodes: Nodes) -> None:
    """On either side: an address that nobody has is no fault of the process's."""
    owner, _, link = nodes
    theirs, ours = Memory(b"x" * 8192), Memory(bytes(8192))
    owner.register(theirs.address, theirs.size)
    owner.register(4096, 8192)  # the kernel maps nothing there
    with pytest.raises(KvelasticError):
        link.pull([(4096, 8192)], [ours.piece()], timeout_s=DEADLINE_S)
    with pytest.raises(MappingError):
        link.pull([theirs.piece()], [(4096, 8192)], timeout_s=DEADLINE_S)
    with pytest.raises(KvelasticError):
        link.push([ours.piece()], [(4096, 8192)], timeout_s=DEADLINE_S)
    link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert ours.content == theirs.content


class CountedHold:
    """A hold that says what a test wants, and counts."""

    def __init__(self, answers: list[bool]) -> None:
        self.answers = answers
        self.begun = self.released = 0

    def __call__(self, pieces: bytes) -> Hold:
        self.begun += 1
        return self

    def is_whole(self) -> bool:
        return self.answers.pop(0)

    def release(self) -> None:
        self.released += 1


def test_lost_lease_is_retried_and_then_raised(nodes: Nodes) -> None:
    owner, _, link = nodes
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    hold = CountedHold([False, False, True])
    owner.register(theirs.address, theirs.size, hold)
    link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert (hold.begun, hold.released, link.counts["retries"]) == (3, 3, 2)
    hold.answers = [False] * 3
    with pytest.raises(LeaseLostError, match="try again"):
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert (hold.begun, hold.released) == (6, 6)
    assert owner.leases.lost == 5


def test_copy_with_an_ended_lease_is_discarded(nodes: Nodes) -> None:
    """A reader that is late, for whatever reason, is told that what it has is nothing."""
    owner, _, link = nodes
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    hold = CountedHold([True] * 9)
    registered = owner.register(theirs.address, theirs.size, hold)

    def settle_late(lease: int, checksum: int | None, deadline_s: float) -> None:
        assert owner.leases.end_in(registered) == 1  # as at the end of its time
        return original(lease, checksum, deadline_s)

    original = link.settle
    link.settle = settle_late  # type: ignore[method-assign]
    with pytest.raises(LeaseLostError):
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert (hold.begun, hold.released) == (3, 3)


def test_lease_expires(tmp_path: Path) -> None:
    released = threading.Event()

    class Told(CountedHold):
        def release(self) -> None:
            released.set()

    secret = secret_file(tmp_path)
    with (
        Node(1, listen=[address_of("unix", tmp_path)], secret=secret, lease_s=0.05) as owner,
        Node(2, secret=secret) as reader,
    ):
        link = reader.link(owner.addresses[0], timeout_s=DEADLINE_S)
        theirs = Memory(b"x" * 100)
        owner.register(theirs.address, theirs.size, Told([True]))
        link.settle = lambda *_: None  # type: ignore[method-assign]  # never says that it is done
        ours = Memory(bytes(100))
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
        assert released.wait(DEADLINE_S)
        wait_until(lambda: owner.leases.expired == 1, "the lease did not end by its time")
        assert len(owner.leases) == 0


def test_claims_are_checked_and_questions_answered(tmp_path: Path) -> None:
    seen: list[tuple[int, bytes]] = []
    hold = CountedHold([True] * 9)

    def claim(link: Link, claimed: bytes, pieces: Sequence[Piece]) -> Hold:
        seen.append((link.peer_id, claimed))
        if claimed == b"gone":
            raise UnknownBlockError("that was given to somebody else")
        return hold(_vmm.pack_pieces(pieces))

    def answer(link: Link, body: bytes) -> bytes:
        if body == b"refuse":
            raise UnsupportedError("not this")
        return b"answer to " + body

    address = address_of("unix", tmp_path)
    with Node(1, listen=[address], claim=claim, answer=answer) as owner, Node(2) as reader:
        link = reader.link(address, timeout_s=DEADLINE_S)
        theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
        owner.register(theirs.address, theirs.size)
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S, claim=b"cache 7")
        with pytest.raises(UnknownBlockError, match="somebody else"):
            link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S, claim=b"gone")
        link.push([ours.piece()], [theirs.piece()], timeout_s=DEADLINE_S, claim=b"cache 8")
        assert seen == [(2, b"cache 7"), (2, b"gone"), (2, b"cache 8")]
        assert (hold.begun, hold.released) == (2, 2)
        assert link.ask(b"one", timeout_s=DEADLINE_S) == b"answer to one"
        with pytest.raises(UnsupportedError, match="not this"):
            link.ask(b"refuse", timeout_s=DEADLINE_S)
        (back,) = owner.links
        with pytest.raises(UnsupportedError, match="answers no questions"):
            back.ask(b"one", timeout_s=DEADLINE_S)


def test_link_and_unlink(nodes: Nodes, tmp_path: Path) -> None:
    owner, reader, link = nodes
    assert (link.peer_id, link.is_client, link.is_open) == (1, True, True)
    link.check(timeout_s=DEADLINE_S)
    with pytest.raises(LinkExistsError, match="unlink it first"):
        reader.link(owner.addresses[0], timeout_s=DEADLINE_S)
    assert reader.links == (link,)
    (back,) = owner.links
    ended = threading.Event()
    owner._on_end = lambda _: ended.set()
    link.unlink(timeout_s=DEADLINE_S)
    assert ended.wait(DEADLINE_S)
    assert reader.links == owner.links == ()
    again = reader.link(owner.addresses[0], timeout_s=DEADLINE_S)
    again.check(timeout_s=DEADLINE_S)
    ended.clear()
    again.unlink(timeout_s=0, force=True)  # the other side is not asked, and notices
    assert ended.wait(DEADLINE_S)
    with pytest.raises(ChannelClosedError):
        again.check(timeout_s=DEADLINE_S)
    with (
        Node(1, secret=secret_file(tmp_path)) as namesake,
        pytest.raises(NodeIdTakenError, match="each its own id"),
    ):
        namesake.link(owner.addresses[0], timeout_s=DEADLINE_S)
    assert not back.is_open


def test_link_count_is_bounded(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    with Node(0, listen=[address], most_links=2), Node(1) as one, Node(2) as two, Node(3) as three:
        one.link(address, timeout_s=DEADLINE_S)
        two.link(address, timeout_s=DEADLINE_S)
        with pytest.raises(LinkLimitError, match="has 2 links and may have 2"):
            three.link(address, timeout_s=DEADLINE_S)


def test_another_host_needs_a_secret() -> None:
    with Node(1) as node, pytest.raises(ConfigError, match="needs a secret"):
        node.link(parse_address("tcp://127.0.0.1:9"), timeout_s=1)


def test_streams_without_a_token_are_closed(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    with Node(1, listen=[address_of("tcp", tmp_path)], secret=secret) as owner:
        for content in (b"", b"x" * 32, b"GET / HTTP/1.1\r\n\r\n" + b"y" * 100):
            with socket.create_connection(("127.0.0.1", owner.streams.port)) as unauthenticated:
                unauthenticated.settimeout(DEADLINE_S)
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    unauthenticated.sendall(content)
                    with contextlib.suppress(OSError):  # it may be closed already
                        unauthenticated.shutdown(socket.SHUT_WR)
                    assert unauthenticated.recv(100) == b""


# --- elastic pools --------------------------------------------------------------------------------


@pytest.fixture(params=sorted(LAYOUTS))
def memory(request: pytest.FixtureRequest) -> Pages:
    return Pages(LAYOUTS[request.param], pages=4)


def pieces_of(memory: Pages, blocks: Sequence[int]) -> list[Piece]:
    """All bytes of the blocks, buffer by buffer."""
    size = memory.layout.block_bytes
    return [
        (memory.range.address + memory.layout.offset_bytes(block, buffer, memory.pages), size)
        for buffer in range(memory.layout.buffers)
        for block in blocks
    ]


def test_pool_blocks_are_pulled(memory: Pages, nodes: Nodes) -> None:
    owner, _, link = nodes
    pool = memory.pool()
    register_blocks(owner, memory.range, pool)
    blocks = pool.alloc(min(5, memory.layout.blocks_per_page + 1))
    assert blocks
    for tag, block in enumerate(blocks):
        memory.write(block, tag + 1)
    pieces = pieces_of(memory, blocks)
    ours = Memory(bytes(total(pieces)))
    link.pull(pieces, [ours.piece()], timeout_s=DEADLINE_S)
    size = memory.layout.block_bytes
    for at in range(len(pieces)):
        tag = at % len(blocks) + 1
        assert ours.content[at * size] == ours.content[(at + 1) * size - 1] == tag
    assert pool.pinned() == []
    ours.buffer.raw = bytes([99]) * ours.size
    link.push([ours.piece()], pieces, timeout_s=DEADLINE_S)
    assert {value for block in blocks for value in memory.read(block)} == {99}
    assert pool.pinned() == []
    pool.free(blocks[1:])
    with pytest.raises(UnknownBlockError):
        link.pull(pieces, [ours.piece()], timeout_s=DEADLINE_S)
    with pytest.raises(KvelasticError):  # the null block is nobody's
        link.pull([(memory.range.address, 1)], [ours.piece(0, 1)], timeout_s=DEADLINE_S)
    assert pool.pinned() == []


def test_every_byte_maps_to_its_block_by_layout(memory: Pages) -> None:
    geometry = memory.range.geometry
    layout = memory.layout
    of_block: dict[int, int] = {}
    for page in range(memory.pages):
        for block in layout.ids(page):
            for buffer in range(layout.buffers):
                of_block[layout.offset_bytes(block, buffer, memory.pages)] = block
    step = math.gcd(layout.block_bytes, layout.extent_bytes)
    for offset in range(0, layout.range_bytes(memory.pages), step):
        piece = _vmm.pack_pieces([(offset, 1)])
        begin = max((at for at in of_block if at <= offset), default=None)
        if begin is not None and offset < begin + layout.block_bytes:
            assert _vmm.blocks_in(geometry, 0, piece) == [of_block[begin]]
        else:
            with pytest.raises(InvalidArgumentError, match="no block lies"):
                _vmm.blocks_in(geometry, 0, piece)


def blocks_for_peers(owner: Node, layout: str) -> tuple[_vmm.Pool, list[int], list[Piece]]:
    """Two blocks in use of a pool that peers may read."""
    memory = Pages(LAYOUTS[layout], pages=3)
    pool = memory.pool()
    register_blocks(owner, memory.range, pool)
    blocks = pool.alloc(2)
    assert blocks
    return pool, blocks, pieces_of(memory, blocks)


def test_block_being_read_is_not_reused(nodes: Nodes) -> None:
    """Freed while a peer reads it, and wanted by others: it waits for the end of the copy."""
    owner, _, link = nodes
    pool, blocks, pieces = blocks_for_peers(owner, "one block a page")
    settle = link.settle

    def settle_after_free(lease: int, checksum: int | None, deadline_s: float) -> None:
        pool.free(blocks)
        assert pool.alloc(2) is None
        assert sorted(pool.pinned()) == sorted(blocks)
        assert pool.trim() == 0
        settle(lease, checksum, deadline_s)

    link.settle = settle_after_free  # type: ignore[method-assign]
    ours = Memory(bytes(total(pieces)))
    link.pull(pieces, [ours.piece()], timeout_s=DEADLINE_S)
    assert pool.pinned() == []
    assert pool.alloc(2) is not None


def test_pool_closed_during_a_read_invalidates_the_copy(nodes: Nodes) -> None:
    """close(discard) ends pins: the page's generation is what tells."""
    owner, _, link = nodes
    pool, _, pieces = blocks_for_peers(owner, "paged")
    settle = link.settle

    def settle_after_close(lease: int, checksum: int | None, deadline_s: float) -> None:
        pool.close(discard=True)
        settle(lease, checksum, deadline_s)

    link.settle = settle_after_close  # type: ignore[method-assign]
    ours = Memory(bytes(total(pieces)))
    with pytest.raises(KvelasticError):  # the second try finds the pool closed
        link.pull(pieces, [ours.piece()], timeout_s=DEADLINE_S)
    assert owner.leases.lost == 1


def test_reading_unmapped_memory_creates_no_page() -> None:
    memory = Pages(LAYOUTS["paged"], pages=3)
    memory.range.map([0])
    before = memory.held_at_the_os()
    here = Memory(bytes(4096))
    for page in (1, 2):
        piece = (memory.range.address + page * memory.layout.extent_bytes, 4096)
        with pytest.raises(MappingError):
            _vmm.read_from_process(
                os.getpid(), _vmm.pack_pieces([piece]), _vmm.pack_pieces([here.piece()]), DEADLINE_S
            )
        with pytest.raises(MappingError):
            _vmm.read_from_process(
                os.getpid(), _vmm.pack_pieces([here.piece()]), _vmm.pack_pieces([piece]), DEADLINE_S
            )
    assert memory.held_at_the_os() == before


@pytest.mark.parametrize("processors", ["one", "all"])
def test_large_copies_are_complete_with_any_thread_count(processors: str) -> None:
    rng = random.Random(11)
    size = (13 << 20) + 7
    theirs, ours = Memory(rng.randbytes(size)), Memory(bytes(size))

    def cut(memory: Memory, parts: int) -> list[Piece]:
        cuts = sorted(rng.choices(range(size), k=parts))
        return [
            memory.piece(first, last - first)
            for first, last in zip([0, *cuts], [*cuts, size], strict=True)
        ]

    allowed = os.sched_getaffinity(0)
    try:
        if processors == "one":
            os.sched_setaffinity(0, {min(allowed)})
        sources, targets = cut(theirs, 700), cut(ours, 1500)
        _vmm.read_from_process(
            os.getpid(), _vmm.pack_pieces(sources), _vmm.pack_pieces(targets), DEADLINE_S
        )
        assert ours.content == theirs.content
        for hole in (2, len(sources) - 3):  # in the part of either thread
            damaged = [*sources]
            damaged[hole] = (4096, damaged[hole][1])
            with pytest.raises(MappingError):
                _vmm.read_from_process(
                    os.getpid(), _vmm.pack_pieces(damaged), _vmm.pack_pieces(targets), DEADLINE_S
                )
    finally:
        os.sched_setaffinity(0, allowed)


# --- peers that are killed and stopped ------------------------------------------------------------

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
READER = """
import sys
from pathlib import Path
from linked import Memory, secret_file
from kvelastic.messages import parse_address
from kvelastic.transfer import Node
from kvelastic.transfer.wire import Begin, Begun
from kvelastic._vmm import pack_pieces as pack
node = Node(2, secret=secret_file(Path(sys.argv[2])))
link = node.link(parse_address(sys.argv[1]), timeout_s=300)
pieces = pack([(int(sys.argv[3]), int(sys.argv[4]))])
lease = link._call(Begin(pieces, b"", 60000), Begun, 300).lease
print("holds", flush=True)
sys.stdin.readline()
ours = Memory(bytes(int(sys.argv[4])))
try:
    link.settle(lease, link.read(lease, pieces, pack([ours.piece()]), 1e9), 1e9)
    print("good", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_dead_or_stopped_peer_keeps_nothing_pinned(kind: str, end: str, tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    memory = Pages(LAYOUTS["paged"], pages=3)
    pool = memory.pool()
    lease_s = 600 if end == "killed" else 0.5
    ended = threading.Event()
    with Node(
        1,
        listen=[address_of(kind, tmp_path)],
        secret=secret,
        lease_s=lease_s,
        on_end=lambda _: ended.set(),
    ) as owner:
        register_blocks(owner, memory.range, pool)
        blocks = pool.alloc(1)
        assert blocks
        ((address, size), *_) = pieces_of(memory, blocks)
        with LineProgram(
            "-c",
            READER,
            str(owner.addresses[0]),
            tmp_path,
            str(address),
            str(size),
            environment=HERE,
        ) as reader:
            assert reader.read() == "holds"
            pool.free(blocks)
            if end == "killed":
                assert pool.pinned() == blocks
                reader.kill()
                assert ended.wait(DEADLINE_S)
                assert pool.pinned() == []
                return
            reader.stop()
            wait_until(lambda: pool.pinned() == [], "its lease's own time does not end it")
            assert len(owner.leases) == 0
            reader.go_on()
            assert reader.ask("go on") in {"LeaseLostError", "TransferError"}


def test_stopped_owner_times_out(tmp_path: Path) -> None:
    """Its memory could be read, but nobody says that it is good."""
    program = """
import sys
from pathlib import Path
from linked import Memory, secret_file
from kvelastic.messages import parse_address
from kvelastic.transfer import Node
memory = Memory(b"x" * 1000)
with Node(1, listen=[parse_address(sys.argv[1])]) as node:
    node.register(memory.address, memory.size)
    print(memory.address, flush=True)
    sys.stdin.readline()
"""
    address = address_of("unix", tmp_path)
    with LineProgram("-c", program, str(address), environment=HERE) as owner, Node(2) as reader:
        at = int(owner.read())
        ours = Memory(bytes(1000))
        link = reader.link(address, timeout_s=DEADLINE_S)
        owner.stop()
        with pytest.raises(ChannelTimeoutError):
            link.pull([(at, 1000)], [ours.piece()], timeout_s=0.1)
        assert link.is_open
        owner.go_on()
        link.pull([(at, 1000)], [ours.piece()], timeout_s=DEADLINE_S)
        assert ours.content == b"x" * 1000
        owner.kill()
        with pytest.raises(ChannelClosedError):
            link.pull([(at, 1000)], [ours.piece()], timeout_s=DEADLINE_S)
