"""Engines of one machine that share the folders of the disk tier, and how they divide the limit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from disk_records import MODEL, NUMBERS, disk_bytes, keys, open_store, put, record, whole
from waiting import DEADLINE_S

from kvelastic.tiers.base import Selection
from kvelastic.tiers.stores.disk.erase import ErasedAtRest, erase_at_rest
from kvelastic.tiers.stores.disk.store import DiskStore

MIB = 1 << 20
RECORD = 16 * 1024
PROGRAM = Path(__file__).parents[1] / "programs" / "disk_records.py"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.mark.slow
def test_two_engines_converge_to_a_fair_share(folder: Path) -> None:
    clock = Clock()
    limit_bytes = 16 * MIB
    first = open_store(folder, RECORD, limit_bytes, clock=clock)
    for number in range(0, 2000, 100):
        put(first, range(number, number + 100))
    alone = first.capacity().records
    second = open_store(folder, RECORD, limit_bytes, clock=clock)
    assert put(second, range(5000, 5010)) == [False] * 10  # there is no room yet
    for round_number in range(20):
        clock.now_s += 2
        put(first, range(9000 + round_number, 9001 + round_number))
        clock.now_s += 2
        put(second, range(5000 + 50 * round_number, 5050 + 50 * round_number))
        assert disk_bytes(folder) <= limit_bytes
    shares = [store.capacity().records for store in (first, second)]
    assert min(shares) > 0.4 * alone
    assert sum(shares) > 0.9 * alone
    for store in (first, second):
        store.check_integrity()
    assert whole(second, range(2000)) == []  # each has its own
    second.close()
    for number in range(0, 4000, 100):  # what it leaves lies there until somebody needs the room
        clock.now_s += 2
        put(first, range(20_000 + number, 20_100 + number))
    first.check_integrity()
    assert disk_bytes(folder) <= limit_bytes
    first.close()
    both = open_store(folder, RECORD, limit_bytes, clock=clock)
    assert len(whole(both, range(30_000))) == both.capacity().records > 0.9 * alone
    both.close()


@pytest.mark.slow
def test_concurrent_writers_stay_below_the_limit(folder: Path) -> None:
    limit_bytes = 8 * MIB
    command = [sys.executable, str(PROGRAM), "write", str(folder), str(RECORD), str(limit_bytes)]
    children = [
        subprocess.Popen([*command, str(start)], stdout=subprocess.PIPE, text=True)
        for start in (0, 1_000_000)
    ]
    try:
        last = [0, 0]
        for _ in range(300):
            for i, child in enumerate(children):
                assert child.stdout is not None
                last[i] = int(child.stdout.readline())
            assert disk_bytes(folder) <= limit_bytes
    finally:
        for i, child in enumerate(children):
            child.send_signal(signal.SIGKILL)
            # It may have written much more than was read: the store keeps what is newest.
            last[i] = int([str(last[i]), *child.communicate()[0].split()][-1])
    store = open_store(folder, RECORD, limit_bytes)
    assert store.statistics().torn == 0
    found = whole(store, [*range(last[0]), *range(1_000_000, last[1])])
    assert len(found) > 100
    store.check_integrity()
    store.close()


def test_files_of_a_closed_neighbour_are_adopted(folder: Path) -> None:
    clock = Clock()
    store = open_store(folder, RECORD, 8 * MIB, clock=clock)
    neighbour = open_store(folder, RECORD, 8 * MIB, clock=clock)
    assert all(put(neighbour, range(480)))
    assert put(store, [1000]) == [False]
    neighbour.close()
    clock.now_s += 2
    put(store, range(1000, 1010))
    clock.now_s += 2
    assert put(store, range(1000, 1010)) == [True] * 10
    assert len(whole(store, range(480))) >= 460
    assert disk_bytes(folder) <= 8 * MIB
    store.check_integrity()
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [5, pytest.param(60, marks=pytest.mark.soak)])
def test_random_operations_with_kills_damage_no_object(folder: Path, rounds: int) -> None:
    """Two at once, killed in the middle of it, again and again: nothing torn, nothing wrong."""
    limit_bytes = 6 * MIB
    rng = random.Random(7)
    command = [sys.executable, str(PROGRAM), "anything", str(folder), str(RECORD), str(limit_bytes)]
    for _ in range(rounds):
        children = [
            subprocess.Popen(
                [*command, str(rng.randrange(1 << 30))], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        try:
            for _ in range(rng.randint(5, 150)):
                for child in children:
                    assert child.stdout is not None
                    assert child.stdout.readline(), "it ended by itself; see above"
                assert disk_bytes(folder) <= limit_bytes
        finally:
            for child in children:
                child.send_signal(signal.SIGKILL)
                child.communicate()
        store = open_store(folder, RECORD, limit_bytes)
        assert len(whole(store, range(NUMBERS + 30))) == store.capacity().records
        seen = store.statistics()
        assert (seen.torn, seen.errors) == (0, 0)
        store.check_integrity()
        store.close()
        assert disk_bytes(folder) <= limit_bytes


def test_files_of_a_running_engine_are_left_alone(folder: Path) -> None:
    first = open_store(folder, RECORD, 16 * MIB)
    put(first, range(10))
    second = open_store(folder, RECORD, 16 * MIB)
    assert second.capacity().records == 0
    assert second.erase(keys(range(10))) == 0
    second.close()
    assert whole(first, range(10)) == list(range(10))
    first.close()


def test_objects_of_another_size_are_evicted_for_space(folder: Path) -> None:
    old = open_store(folder, 2 * RECORD, 8 * MIB)
    put(old, range(100))
    old.close()
    store = open_store(folder, RECORD, 8 * MIB)
    put(store, range(10))
    back = open_store(folder, 2 * RECORD, 8 * MIB)
    taken_back = back.capacity().records
    back.close()
    for first in range(0, 1000, 100):
        put(store, range(first, first + 100))
    assert store.capacity().records > 400
    assert disk_bytes(folder) <= 8 * MIB
    store.close()
    assert taken_back in {0, 100}


def test_erase_reaches_files_of_closed_engines(folder: Path) -> None:
    for record_bytes in (RECORD, 2 * RECORD):
        store = open_store(folder, record_bytes, record_bytes // RECORD * 8 * MIB)
        put(store, range(10))
        store.enter(replace(MODEL, model="two"))
        put(store, range(10, 15))
        store.close()
    words = [bytes(record(number, RECORD)[:64]) for number in (3, 12)]

    def lying() -> list[bool]:
        content = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        return [word in content for word in words]

    assert lying() == [True, True]
    assert erase_at_rest([folder], Selection(model="two")) == ErasedAtRest(records=10)
    assert lying() == [True, False]
    store = open_store(folder, 2 * RECORD, 16 * MIB)
    assert whole(store, range(20)) == list(range(10))
    assert erase_at_rest([folder], Selection(model="one")) == ErasedAtRest(10, busy_files=1)
    assert whole(store, range(20)) == list(range(10))
    assert store.erase_matching(Selection(model="one")) == 10
    assert lying() == [False, False]
    store.check_integrity()
    store.close()
    [first, _] = sorted(folder.glob("*.kv"))
    first.write_bytes(b"damaged" + bytes(record(1, RECORD)))
    assert erase_at_rest([folder], Selection(model="one")) == ErasedAtRest(damaged_files=1)
    assert not first.exists()


def test_store_of_a_forked_child_is_empty(folder: Path) -> None:
    store = open_store(folder, RECORD, 8 * MIB)
    put(store, range(5))
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()

    def child() -> None:
        empty = store.has(keys(range(5))) == [False] * 5 and put(store, [9]) == [False]
        ready.set()
        release.wait(DEADLINE_S)
        os._exit(0 if empty else 1)

    process = context.Process(target=child)
    process.start()
    assert ready.wait(DEADLINE_S)
    assert whole(store, range(5)) == list(range(5))
    store.close()
    again = DiskStore([folder], RECORD, 8 * MIB, MODEL)  # while the child lives
    assert whole(again, range(5)) == list(range(5))
    again.close()
    release.set()
    process.join()
    assert process.exitcode == 0


class HangingFiles:
    """Writes wait until `release` is set."""

    engine = "hanging"

    def __init__(self) -> None:
        self.reached, self.release = threading.Event(), threading.Event()

    def write(self, places: Sequence[object], *_: object) -> list[tuple[int, int]]:
        self.reached.set()
        assert self.release.wait(DEADLINE_S)
        return [(RECORD, 0) for _ in places]


def test_store_closes_in_a_child_forked_during_calls(folder: Path) -> None:
    files = HangingFiles()
    store = open_store(folder, RECORD, 8 * MIB, io=files)
    putting = threading.Thread(target=put, args=(store, [1]))
    putting.start()

    def read_and_close() -> None:
        whole(store, [1])
        store.close()

    assert files.reached.wait(DEADLINE_S)
    with store._counting:  # as a thread that counts would
        child = multiprocessing.get_context("fork").Process(target=read_and_close)
        child.start()
    child.join(DEADLINE_S)
    files.release.set()
    putting.join()
    assert child.exitcode == 0
    store.close()
