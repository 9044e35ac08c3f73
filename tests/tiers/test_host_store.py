"""The host tier beside other instances: its memory is shared, limited and shown like theirs."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_instance import BLOCKS_PER_PAGE as B
from ledger_instance import Instance
from store_battery import RECORD_BYTES, WORLD, Bench, keys_of, read, records_of
from store_kinds import HOST, PAGE_BYTES
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.config import Config, load
from kvelastic.errors import InvalidArgumentError, SegmentExistsError
from kvelastic.shared import ledger, segment
from kvelastic.tiers.base import NO_KEY
from kvelastic.tiers.stores.host.store import HostStore

DEVICE_PAGES = 16
PER_PAGE = PAGE_BYTES // RECORD_BYTES
WHOLE = DEVICE_PAGES * PER_PAGE - 1
"""Records that fill the device; one block is the null block."""
RECLAIM_WAIT_S = str(DEADLINE_S)
"""Far beyond what a neighbour needs to give something up."""


class Tier:
    """A host tier on a device of this test's own, and neighbours there."""

    def __init__(self, policy: str) -> None:
        self.environ = {
            "KVELASTIC_LEDGER": f"test-{os.getpid()}-{random.randrange(1 << 32):x}",
            "KVELASTIC_HOST_MEMORY": str(DEVICE_PAGES * PAGE_BYTES),
            "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
        }
        self.settings: Config = load(self.environ)
        self.store = HostStore(
            RECORD_BYTES,
            DEVICE_PAGES * PAGE_BYTES,
            settings=self.settings,
            model="llama",
            policy=policy,
        )
        self.store.enter(WORLD)
        self.bench = Bench(HOST, self.store, None)  # type: ignore[arg-type]

    def neighbour(self) -> Instance:
        return Instance(**self.environ | {"KVELASTIC_RECLAIM_WAIT": RECLAIM_WAIT_S})

    def look(self) -> ledger.LedgerInfo:
        group = self.environ["KVELASTIC_LEDGER"]
        (info,) = [info for info in ledger.list_ledgers() if info.group == group]
        return info

    def alive(self) -> list[int]:
        return [name for name in range(WHOLE) if self.bench.has(name) == [True]]

    def limit(self, limit_bytes: int) -> None:
        """As `kvctl limit`."""
        answer = segment.request(self.store._pool.name, limit_bytes=limit_bytes, wait_s=DEADLINE_S)
        assert answer.state in ("applied", "shrinking")


@pytest.fixture(params=["slru"])
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    made = Tier(request.param)
    try:
        yield made
        made.store.check_integrity()
    finally:
        made.store.close()
    assert made.environ["KVELASTIC_LEDGER"] not in {info.group for info in ledger.list_ledgers()}


def test_host_tier_is_shown_as_an_instance(tier: Tier) -> None:
    tier.bench.put(*range(3 * PER_PAGE))
    with segment.open_readonly(tier.store._pool.name) as opened:
        header = opened.control_block.read_header()
        usage = opened.control_block.read_usage()
    assert (header["engine"], header["model"]) == ("tier", "llama")
    assert usage["mapped_bytes"] == tier.store.capacity().used_bytes == 4 * PAGE_BYTES
    (member,) = tier.look().members
    assert member.granted_bytes == 4 * PAGE_BYTES


def test_host_tier_name_is_unique(tier: Tier) -> None:
    with pytest.raises(SegmentExistsError):
        HostStore(RECORD_BYTES, PAGE_BYTES, settings=tier.settings, name=tier.store._pool.name)


@pytest.mark.slow
def test_neighbour_reclaims_unheld_memory(tier: Tier) -> None:
    assert all(tier.bench.put(*range(WHOLE)))
    hold = tier.store.hold(keys_of(range(PER_PAGE)))
    assert hold.count == PER_PAGE
    with tier.neighbour() as other:
        ids = other.alloc(10 * B - 1)
        assert ids is not None
        assert tier.store.capacity().used_bytes <= 6 * PAGE_BYTES
        kept = tier.alive()
        assert set(range(PER_PAGE)) <= set(kept)
        # Records were moved off the pages that went: what is left is full.
        assert len(kept) > 5 * PER_PAGE
        assert all(tier.bench.get(*kept))
        gone = [name for name in range(WHOLE) if name not in kept]
        assert not any(tier.bench.get(*gone))
        assert tier.store.statistics().evicted == len(gone)
        tier.store.check_integrity()
        # What it has not got it cannot store; what it has, it uses again.
        assert sum(tier.bench.put(*range(1000, 1000 + PER_PAGE))) == PER_PAGE
        assert tier.store.capacity().used_bytes <= 6 * PAGE_BYTES
        assert all(tier.bench.get(*range(PER_PAGE)))
        hold.release()


@pytest.mark.slow
def test_memory_shortage_evicts_by_the_policy(tier: Tier) -> None:
    """The beginning of a chain is the oldest, and still goes last."""
    with tier.neighbour() as other:
        assert other.alloc(12 * B - 1) is not None
        chain = list(range(2 * PER_PAGE))
        for name in chain:
            after = keys_of([name - 1]) if name else NO_KEY
            keys = keys_of([name])
            assert tier.store.put(keys, records_of(keys), chain_after=after) == [True]
        for name in range(1000, 1000 + 8 * PER_PAGE):
            assert tier.bench.put(name, chain=True) == [True]
            kept = tier.bench.has(*chain)
            assert kept == sorted(kept, reverse=True), "a beginning went before its continuation"
        assert tier.store.capacity().records == 4 * PER_PAGE - 1
        tier.store.check_integrity()


def test_memory_of_a_dead_neighbour_becomes_available(tier: Tier) -> None:
    with tier.neighbour() as other:
        assert other.alloc(12 * B - 1) is not None
        tier.bench.put(*range(WHOLE))
        assert tier.store.capacity().used_bytes <= 4 * PAGE_BYTES
        other.kill()
        segment.reap()
        ledger.reap()
        wait_until(
            lambda: (tier.bench.put(*range(WHOLE)), tier.store.capacity().records)[1] == WHOLE,
            "the memory of the dead does not come back",
        )
    assert all(tier.bench.get(*range(WHOLE)))


def test_limit_set_by_kvctl_is_respected(tier: Tier) -> None:
    tier.bench.put(*range(WHOLE))
    tier.limit(4 * PAGE_BYTES)
    have = tier.store.capacity()
    assert have.used_bytes <= 4 * PAGE_BYTES == have.limit_bytes
    assert have.records <= 4 * PER_PAGE - 1
    for name in range(2000, 2000 + 6 * PER_PAGE):
        assert tier.bench.put(name) == [True]
        assert tier.store.capacity().used_bytes <= 4 * PAGE_BYTES
    assert tier.store.capacity().records == 4 * PER_PAGE - 1
    tier.store.check_integrity()
    tier.limit(DEVICE_PAGES * PAGE_BYTES)
    assert all(tier.bench.put(*range(WHOLE)))
    assert tier.store.capacity().records == WHOLE


def test_sleeping_tier_is_empty_and_refuses_objects(tier: Tier) -> None:
    tier.bench.put(*range(WHOLE))
    segment.request(tier.store._pool.name, asleep=True, wait_s=DEADLINE_S)
    assert tier.store.capacity().used_bytes == 0
    assert tier.alive() == []
    assert tier.bench.put(1, 2) == [False, False]
    assert tier.store.statistics().refused == 2
    tier.store.check_integrity()
    segment.request(tier.store._pool.name, asleep=False, wait_s=DEADLINE_S)
    assert tier.bench.put(1, 2) == [True, True]
    assert tier.bench.get(1, 2) == [True, True]


def test_limit_below_a_page_holds_nothing(tier: Tier) -> None:
    tier.bench.put(*range(PER_PAGE))
    tier.store.set_limit(PAGE_BYTES - 1)
    assert tier.store.capacity().used_bytes == 0
    assert tier.bench.put(1) == [False]
    tier.store.set_limit(PAGE_BYTES)
    assert all(tier.bench.put(*range(PER_PAGE - 1)))
    assert tier.store.capacity().used_bytes == PAGE_BYTES


def test_limit_below_a_page_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "kvelastic"):
        HostStore(RECORD_BYTES, PAGE_BYTES - 1).close()
    assert "less than a page" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", "kvelastic"):
        HostStore(RECORD_BYTES, PAGE_BYTES).close()
        HostStore(RECORD_BYTES, 0).close()
    assert caplog.text == ""


def test_lower_limit_keeps_most_recently_used_objects(tier: Tier) -> None:
    """The survivors lie all over the pages; they are moved together, and none of them is lost."""
    names = list(range(WHOLE))
    tier.bench.put(*names)
    random.Random(5).shuffle(names)
    room = 4 * PER_PAGE - 1
    for _ in range(2):
        for name in names[-room:]:
            tier.store.hold(keys_of([name])).release()
    tier.store.set_limit(4 * PAGE_BYTES)
    assert set(tier.alive()) == set(names[-room:])
    assert all(tier.bench.get(*names[-room:]))
    assert tier.store.capacity().used_bytes == 4 * PAGE_BYTES


def test_reads_are_correct_while_memory_changes(tier: Tier) -> None:
    """Threads put, hold and read stamped records; limits, sleep and a neighbour take them away."""
    failures: list[BaseException] = []
    ended = threading.Event()
    held_reads = [0]

    def serve(seed: int) -> None:
        dice = random.Random(seed)
        try:
            while not ended.is_set():
                names = sorted(dice.sample(range(2 * WHOLE), 4))
                keys = keys_of(names)
                tier.store.put(keys, records_of(keys))
                with tier.store.hold(keys) as hold:
                    held = keys_of(names[: hold.count])
                    assert all(read(tier.store, held)), "a held record was taken"
                    held_reads[0] += hold.count
                keys = keys_of([dice.randrange(2 * WHOLE) for _ in range(4)])
                read(tier.store, keys)
                if dice.random() < 0.1:
                    tier.store.has(keys)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(3)]
    with tier.neighbour() as other:
        for thread in threads:
            thread.start()
        try:
            dice = random.Random(9)
            turn = 0
            while turn < 40 or not (held_reads[0] or failures):
                turn += 1
                match (turn - 1) % 4:
                    case 0:
                        ids = other.alloc(dice.randint(1, 6 * B))
                    case 1:
                        tier.store.set_limit(dice.randint(0, DEVICE_PAGES) * PAGE_BYTES)
                    case 2:
                        tier.limit(dice.randint(1, DEVICE_PAGES) * PAGE_BYTES)
                    case _:
                        if ids:
                            other.free(ids)
                        tier.store.set_limit(DEVICE_PAGES * PAGE_BYTES)
                tier.store.check_integrity()
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert not failures, failures
    assert held_reads[0] > 0


def test_close_waits_for_running_copies(tier: Tier) -> None:
    """Copies on their way end before the memory goes; later calls are misses and refusals."""
    tier.bench.put(*range(PER_PAGE))
    begin = threading.Barrier(3)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            begin.wait(DEADLINE_S)
            for _ in range(200):
                read(tier.store, keys_of(range(4)))
                tier.bench.put(*range(100, 104))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    begin.wait(DEADLINE_S)
    tier.store.close()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert tier.bench.has(0) == [False]
    assert tier.bench.get(0) == [False]
    assert tier.bench.put(0) == [False]
    assert tier.store.erase(keys_of([0])) == 0
    assert tier.store.hold(keys_of([0])).count == 0
    assert tier.store.capacity().used_bytes == 0
    tier.store.set_limit(PAGE_BYTES)


def test_closed_store_holds_no_descriptors() -> None:
    """Neither while it is referenced, nor until the collector runs."""

    def opened() -> HostStore:
        store = HostStore(RECORD_BYTES, 2 * PAGE_BYTES, model="llama")
        store.enter(WORLD)
        assert store.put(keys_of([0]), records_of(keys_of([0]))) == [True]
        return store

    def descriptors() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    opened().close()  # what a process opens once stays
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        store = opened()
        hold = store.hold(keys_of([0]))
        assert len(descriptors()) > len(before)
        store.close()
        # One is of the listing itself.
        wait_until(lambda: len(descriptors() - before) <= 1)
        store.close()
        hold.release()
        assert store.has(keys_of([0])) == [False]
        assert store.leading(keys_of([0])) == (0, 0)
        assert store.put(keys_of([0]), records_of(keys_of([0]))) == [False]
        assert store.reserve(keys_of([0])) is None
        assert store.get(keys_of([0]), [memoryview(bytearray(RECORD_BYTES))]) == [False]
        assert (store.erase(keys_of([0])), store.evict(1)) == (0, 0)
        assert store.capacity().records == 0
        store.set_limit(0)
        assert store.statistics().puts == 1
        store.check_integrity()
    finally:
        gc.enable()


def test_engine_limits_do_not_apply_to_the_tier(tier: Tier) -> None:
    """`KVELASTIC_MAX_CACHED_TOKENS`, `_LIMIT` and `_MIN` are the engine's."""
    tier.store.close()
    settings = replace(tier.settings, max_cached_tokens=0, limit=PAGE_BYTES, minimum=PAGE_BYTES)
    other = HostStore(RECORD_BYTES, 2 * PAGE_BYTES, settings=settings)
    try:
        other.enter(WORLD)
        keys = keys_of(range(2 * PER_PAGE - 1))
        assert all(other.put(keys, records_of(keys)))
        assert all(read(other, keys))
    finally:
        other.close()


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_invalid_size_is_rejected(size: int) -> None:
    with pytest.raises(InvalidArgumentError):
        HostStore(size, PAGE_BYTES)
    with pytest.raises(InvalidArgumentError):
        HostStore(RECORD_BYTES, -1 if size != -1 else True)


def test_unusable_views_are_rejected_and_change_nothing(tier: Tier) -> None:
    tier.bench.put(0)
    wide = memoryview(bytes(2 * RECORD_BYTES))[::2]
    with pytest.raises(InvalidArgumentError):
        tier.store.put(keys_of([1]), [wide])
    with pytest.raises(InvalidArgumentError):
        tier.store.get(keys_of([0]), [memoryview(bytes(RECORD_BYTES))])
    assert tier.bench.has(0, 1) == [True, False]
    assert tier.bench.put(1) == [True]
    tier.store.check_integrity()


def test_copies_beyond_their_block_are_rejected() -> None:
    block_bytes = 640 << 10
    geometry = _vmm.Geometry(
        pages=4, extent_bytes=PAGE_BYTES, block_bytes=block_bytes, blocks_per_page=2
    )
    memory = _vmm.Range.reserve(_vmm.HostDriver(), geometry)
    memory.map([0, 2])
    assert [geometry.first_id(page) for page in range(3)] == [0, 4, 7]
    whole = memoryview(bytes(range(256)) * (block_bytes // 256))
    _vmm.write_blocks(memory, [0, 8], [whole, whole[:100]])
    into = memoryview(bytearray(block_bytes))
    _vmm.read_blocks(memory, [0], [into])
    assert into == whole
    _vmm.read_blocks(memory, [8], [into[100:200]])
    assert into[100:200] == whole[:100]
    _vmm.write_blocks(memory, [], [])
    for ids, views in (
        ([-1], [whole]),
        ([2], [whole]),  # lies across two pages, and so is no block
        ([4], [whole]),  # its page is not mapped
        ([1 << 40], [whole]),
        ([1], [memoryview(bytes(block_bytes + 1))]),
        ([0], []),
    ):
        with pytest.raises(InvalidArgumentError):
            _vmm.write_blocks(memory, ids, views)
    with pytest.raises(InvalidArgumentError):  # and then none of them is copied
        _vmm.write_blocks(memory, [0, 4], [memoryview(bytes(block_bytes)), whole])
    _vmm.read_blocks(memory, [0], [into])
    assert into == whole
    with pytest.raises(BufferError):
        _vmm.read_blocks(memory, [0], [whole])
    memory.unmap([0, 2])
