"""What a dead engine left is taken over part by part, and no neighbour's lock is held for it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Selection
from kvelastic.tiers.stores.disk import adoption
from kvelastic.tiers.stores.disk import folder as disk_folder
from kvelastic.tiers.stores.disk.adoption import Adoption
from kvelastic.tiers.stores.disk.file import DataFile
from kvelastic.tiers.stores.disk.folder import Folder
from kvelastic.tiers.stores.disk.slots import SlotTable
from kvelastic.tiers.stores.disk.store import DiskStore

RECORD_BYTES = 4096
COUNT = 200
LIMIT_BYTES = 8 << 20


def key(number: int) -> bytes:
    return random.Random(number).randbytes(KEY_BYTES)


def record(number: int) -> memoryview:
    return memoryview(number.to_bytes(4, "big") * (RECORD_BYTES // 4))


KEYS = b"".join(map(key, range(COUNT)))


def open_store(folder: Path, clock: Callable[[], float] = lambda: 0.0) -> DiskStore:
    return DiskStore([folder], RECORD_BYTES, LIMIT_BYTES, clock=clock)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder with the records of an engine that is gone."""
    folder = tmp_path / "kv"
    store = open_store(folder)
    assert all(store.put(KEYS, [record(n) for n in range(COUNT)], chain_after=NO_KEY))
    store.close()
    return folder


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts of ten; how many entries each step restored."""
    monkeypatch.setattr(adoption, "PART", 10)
    done: list[int] = []
    original = Adoption.step

    def step(adoption: Adoption) -> None:
        before = adoption._index.stats()["ready"]
        original(adoption)
        done.append(adoption._index.stats()["ready"] - before)

    monkeypatch.setattr(Adoption, "step", step)
    return done


def later(now_s: list[float]) -> float:
    now_s[0] += 10.0
    return now_s[0]


def test_adoption_holds_no_folder_lock_while_reading(
    left: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = Folder(str(left))
    monkeypatch.setattr(disk_folder, "LOCK_WAIT_S", 0.0)

    def beside(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def call(*arguments: object) -> object:
            with neighbour.locked():  # raises if it has to wait
                return original(*arguments)

        monkeypatch.setattr(kind, name, call)

    beside(Adoption, "step")
    beside(SlotTable, "add_file")  # from here on it takes longer with each record
    store = open_store(left)
    assert all(store.has(KEYS))
    assert max(steps) <= 10 < len(steps)
    assert store.capacity().records == COUNT
    store.check_integrity()
    store.close()
    neighbour.close()


@pytest.fixture
def taking_over(left: Path, steps: list[int]) -> DiskStore:
    """A live store whose neighbour has died a moment ago."""
    aside = left.with_name("aside")
    left.rename(aside)
    now_s = [0.0]
    store = open_store(left, lambda: later(now_s))
    for file in aside.glob("*.kv"):
        file.rename(left / file.name)
    store._room.begin_to_adopt()
    assert not any(store.has(KEYS)), "nothing is restored under the folder's lock"
    return store


def test_each_put_adopts_a_bounded_part(taking_over: DiskStore, steps: list[int]) -> None:
    new: list[int] = []
    while not all(taking_over.has(KEYS)):
        before = len(steps)
        new.append(10_000 + len(new))
        taking_over.put(key(new[-1]), [record(new[-1])])
        assert before < len(steps) <= before + 12
        assert max(steps) <= 10
    assert len(new) > 3
    views = [memoryview(bytearray(RECORD_BYTES)) for _ in range(COUNT)]
    assert all(taking_over.get(KEYS, views))
    assert all(view == record(number) for number, view in enumerate(views))
    taking_over.check_integrity()
    taking_over.close()


@pytest.mark.parametrize("call", ["capacity", "erase", "clear", "check", "limit", "close"])
def test_calls_during_adoption_are_correct(taking_over: DiskStore, left: Path, call: str) -> None:
    taking_over.capacity()
    assert 0 <= sum(taking_over.has(KEYS)) < COUNT
    if call == "capacity":
        for _ in range(COUNT):
            taking_over.capacity()
        assert all(taking_over.has(KEYS))
    elif call == "erase":
        assert taking_over.erase(KEYS[: 50 * KEY_BYTES]) == 50
    elif call == "clear":
        assert taking_over.erase_matching(Selection(model="")) == COUNT
        assert not any(taking_over.has(KEYS))
    elif call == "limit":
        taking_over.set_limit(1 << 20)
        held = sum(file.stat().st_blocks * 512 for file in left.glob("*.kv"))
        assert any(taking_over.has(KEYS))
        assert held <= 1 << 20
    if call != "close":
        taking_over.check_integrity()
    taking_over.close()
    again = open_store(left)
    found = sum(again.has(KEYS))
    assert found == {"erase": COUNT - 50, "clear": 0}.get(call, found)
    if call in ("capacity", "check", "close"):
        assert found == COUNT
    again.check_integrity()
    again.close()


def test_slots_of_an_unreadable_table_are_reused(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> bytes:
        raise OSError(errno.EIO, "bad sector")

    now_s = [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "read_entries", unreadable)
        store = open_store(left, lambda: later(now_s))
    assert not any(store.has(KEYS))
    names = {file.name for file in left.glob("*.kv")}
    store.set_limit(sum(file.stat().st_blocks * 512 for file in left.glob("*.kv")) + 64 * 4096)
    new = b"".join(key(50_000 + n) for n in range(20))
    assert all(store.put(new, [record(n) for n in range(20)], chain_after=NO_KEY))
    assert {file.name for file in left.glob("*.kv")} == names, "its slots are used"
    store.check_integrity()
    store.close()
