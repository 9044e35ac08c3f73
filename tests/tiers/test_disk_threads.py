"""Threads that do everything to one disk store at once, and two stores on one folder."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from disk_records import MODEL, disk_bytes, keys, open_store, put, whole

from kvelastic.tiers.base import Selection
from kvelastic.tiers.stores.disk.store import DiskStore

pytestmark = pytest.mark.slow


MIB = 1 << 20
RECORD = 16 * 1024
LIMIT = 6 * MIB
NUMBERS = 600


def one_step(store: DiskStore, rng: random.Random) -> None:
    first = rng.randrange(NUMBERS)
    numbers = range(first, min(NUMBERS, first + rng.randint(1, 24)))
    kind = rng.randrange(20)
    if kind < 8:
        put(store, numbers, chain_after=bytes(16) if kind < 4 else None)
    elif kind < 14:
        with store.hold(keys(numbers)) as hold:
            held = list(numbers)[: hold.count]
            found = whole(store, numbers)
            # Another thread may erase it; that is the one way to lose what is held.
            assert set(found) <= set(numbers)
            assert len(found) >= 0, held
    elif kind < 17:
        store.erase(keys(numbers))
    elif kind == 17:
        store.set_limit(rng.choice((LIMIT, LIMIT // 2, LIMIT // 8, 0)))
    elif kind == 18:
        store.erase_matching(Selection(model="two", older_than_s=0.001))
    else:
        store.check_integrity()


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_threads_use_two_stores_concurrently(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "kv"
    stores = [open_store(folder, RECORD, LIMIT, io=engine) for _ in range(2)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(120):
                one_step(stores[seed % 2], rng)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for store in stores:
        store.set_limit(LIMIT)
        store.check_integrity()
        assert store.statistics().errors == 0
        assert store.statistics().torn == 0
    assert disk_bytes(folder) <= LIMIT
    for store in stores:
        store.close()
    again = DiskStore([folder], RECORD, LIMIT, MODEL)
    assert again.statistics().torn == 0
    assert len(whole(again, range(NUMBERS))) == again.capacity().records
    again.check_integrity()
    again.close()


def test_held_records_are_never_displaced(tmp_path: Path) -> None:
    """One thread fills the store again and again; what another one holds stays readable."""
    store = open_store(tmp_path / "kv", RECORD, 2 * MIB)
    put(store, range(8))
    ended = threading.Event()
    failures: list[object] = []

    def fill() -> None:
        first = 1000
        while not ended.is_set():
            put(store, range(first, first + 16))
            first += 16

    def shrink() -> None:
        while not ended.is_set():
            store.set_limit(MIB)
            store.set_limit(2 * MIB)

    threads = [threading.Thread(target=fill), threading.Thread(target=shrink)]
    with store.hold(keys(range(8))) as hold:
        for thread in threads:
            thread.start()
        for _ in range(150):
            if whole(store, range(8)) != list(range(hold.count)):
                failures.append(store.has(keys(range(8))))
                break
        ended.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert hold.count == 8
    store.check_integrity()
    store.close()
