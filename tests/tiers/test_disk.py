"""The store on disks: limits, order of eviction, reopening, erasing and budgets."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from disk_records import MODEL, disk_bytes, key, keys, open_store, put, record, whole

from kvelastic import _vmm
from kvelastic.errors import DeviceUnavailableError, InvalidArgumentError
from kvelastic.tiers.base import Selection
from kvelastic.tiers.stores.disk.store import DiskStore

MIB = 1 << 20
RECORD = 64 * 1024


def engines() -> list[str]:
    try:
        _vmm.RecordIo("io_uring")
    except DeviceUnavailableError:
        return ["threads"]
    return ["io_uring", "threads"]


@pytest.fixture(params=engines())
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.slow
@pytest.mark.parametrize("record_bytes", [1, 4096, 5000, RECORD, 3 * MIB + 1])
def test_stored_objects_are_read_again_after_reopening(
    folder: Path, engine: str, record_bytes: int
) -> None:
    store = open_store(folder, record_bytes, 64 * MIB, io=engine)
    assert store._io.engine == engine
    assert put(store, range(10)) == [True] * 10
    assert put(store, range(5, 12)) == [True] * 7
    assert whole(store, range(15)) == list(range(12))
    seen = store.statistics()
    assert (seen.puts, seen.hits, seen.misses, seen.torn, seen.errors) == (12, 12, 3, 0, 0)
    store.check_integrity()
    store.close()
    again = open_store(folder, record_bytes, 64 * MIB, io=engine)
    assert again.capacity().records == 12
    assert again.has(keys(range(13))) == [True] * 12 + [False]
    assert whole(again, range(15)) == list(range(12))
    again.check_integrity()
    again.close()


def test_files_and_folders_are_private_to_the_user(folder: Path) -> None:
    store = open_store(folder, RECORD, 8 * MIB)
    put(store, range(4))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    store.close()
    folder.chmod(0o750)
    with pytest.raises(InvalidArgumentError, match="open to others"):
        open_store(folder, RECORD, 8 * MIB)


@pytest.mark.slow
def test_disk_usage_stays_below_the_limit(folder: Path) -> None:
    limit_bytes = 100 * MIB
    store = open_store(folder, RECORD, limit_bytes)
    block = [memoryview(bytearray(RECORD)) for _ in range(64)]
    for first in range(0, 16384, 64):
        assert all(store.put(keys(range(first, first + 64)), block))
        assert disk_bytes(folder) <= limit_bytes
    held = store.capacity()
    assert held.used_bytes <= limit_bytes
    assert held.records > 0.98 * limit_bytes / RECORD
    assert store.statistics().evicted == 16384 - held.records
    store.check_integrity()
    store.close()
    assert disk_bytes(folder) <= limit_bytes


@pytest.mark.slow
def test_small_objects_stay_below_the_disk_limit(folder: Path) -> None:
    """Every second record is erased, so that the file system's own map is as large as it gets."""
    limit_bytes = 20 * MIB
    store = open_store(folder, 4096, limit_bytes)
    for first in range(0, 4096, 256):
        put(store, range(first, first + 256))
    store.erase(keys(range(0, 8192, 2)))
    store.set_limit(limit_bytes // 2)
    assert disk_bytes(folder) <= limit_bytes // 2
    store.set_limit(limit_bytes)
    for first in range(8192, 16384, 256):
        put(store, range(first, first + 256))
        assert disk_bytes(folder) <= limit_bytes
    store.check_integrity()
    store.close()


def test_fifo_evicts_the_oldest_objects_first(folder: Path) -> None:
    store = open_store(folder, RECORD, 4 * MIB, policy="fifo")
    for number in range(200):
        put(store, [number])
    held = store.capacity().records
    assert whole(store, range(200)) == list(range(200 - held, 200))
    store.close()


def test_lru_keeps_used_objects(folder: Path) -> None:
    store = open_store(folder, RECORD, 4 * MIB, policy="lru")
    put(store, range(10))
    for number in range(10, 200):
        put(store, [number])
        store.hold(keys([3])).release()
    assert whole(store, range(10)) == [3]
    store.close()


def test_held_records_are_not_evicted(folder: Path) -> None:
    store = open_store(folder, RECORD, 4 * MIB)
    put(store, range(10))
    with store.hold(keys(range(20))) as hold:
        assert hold.count == 10
        for first in range(100, 400, 10):
            put(store, range(first, first + 10))
        assert whole(store, range(10)) == list(range(10))
        assert store.erase(keys(range(5))) == 5
        assert store.has(keys(range(10))) == [False] * 5 + [True] * 5
        store.set_limit(0)
        assert whole(store, range(10)) == list(range(5, 10))
    hold.release()
    assert store.capacity().records == 0
    assert disk_bytes(folder) == 0
    store.check_integrity()
    store.close()


@pytest.mark.slow
def test_limit_changes_while_the_store_is_used(folder: Path) -> None:
    store = open_store(folder, RECORD, 32 * MIB, policy="fifo")
    for first in range(0, 480, 20):
        put(store, range(first, first + 20))
    for mib in (16, 5, 1):
        store.set_limit(mib * MIB)
        held = store.capacity()
        assert held.limit_bytes == mib * MIB
        assert disk_bytes(folder) <= mib * MIB
        assert held.records >= 0.95 * mib * MIB // RECORD - 2
        assert whole(store, range(480)) == list(range(480 - held.records, 480))
        store.check_integrity()
    store.set_limit(32 * MIB)
    for first in range(1000, 1480, 20):
        assert all(put(store, range(first, first + 20)))
    assert store.capacity().records >= 480
    assert disk_bytes(folder) <= 32 * MIB
    store.check_integrity()
    store.close()
    small = open_store(folder, RECORD, 2 * MIB)
    assert disk_bytes(folder) <= 2 * MIB
    assert len(whole(small, range(2000))) == small.capacity().records > 20
    small.check_integrity()
    small.close()


@pytest.mark.parametrize("record_bytes", [1, 4096, 8193, MIB])
def test_least_limit_fits_one_object(folder: Path, record_bytes: int) -> None:
    probe = open_store(folder, record_bytes, 0)
    least_bytes = probe.least_limit_bytes
    probe.close()
    assert least_bytes < record_bytes + 20480 + record_bytes // 100
    store = open_store(folder, record_bytes, least_bytes)
    assert put(store, [1]) == [True]
    assert disk_bytes(folder) <= least_bytes
    store.set_limit(least_bytes * 7 // 8)
    assert whole(store, [1]) == []
    store.close()


def test_erased_objects_are_unreadable_in_the_files(folder: Path) -> None:
    store = open_store(folder, RECORD, 8 * MIB)
    put(store, range(6))
    words = [bytes(record(number, RECORD)[:64]) for number in range(6)]

    def lying() -> list[bool]:
        content = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        return [word in content for word in words]

    assert lying() == [True] * 6
    assert store.erase(keys([1, 3, 99])) == 2
    assert lying() == [True, False, True, False, True, True]
    assert whole(store, range(6)) == [0, 2, 4, 5]
    assert store.erase_matching(Selection()) == 4
    assert lying() == [False] * 6
    store.check_integrity()
    store.close()
    again = open_store(folder, RECORD, 8 * MIB)
    assert again.capacity().records == 0
    assert again.statistics().torn == 0
    again.close()


def test_erase_by_model_namespace_and_age(folder: Path) -> None:
    wall = Clock()
    store = open_store(folder, RECORD, 8 * MIB, wall_clock=wall)
    put(store, range(3))
    wall.now_s += 100
    store.enter(replace(MODEL, generation=1))
    put(store, range(10, 13))
    store.enter(replace(MODEL, model="two"))
    put(store, range(20, 23))
    everything = [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert store.erase_matching(Selection(model="three")) == 0
    store.close()
    store = open_store(folder, RECORD, 8 * MIB, wall_clock=wall)
    assert whole(store, range(30)) == everything
    assert store.erase_matching(Selection(model="one", older_than_s=50)) == 3
    assert whole(store, range(30)) == everything[3:]
    assert store.erase_matching(Selection(namespace=MODEL)) == 0
    assert store.erase_matching(Selection(namespace=replace(MODEL, generation=1))) == 3
    assert store.erase_matching(Selection(model="two")) == 3
    store.check_integrity()
    store.close()


def test_daily_write_budget_survives_a_restart(folder: Path) -> None:
    wall = Clock()

    def budgeted() -> DiskStore:
        return open_store(folder, RECORD, 8 * MIB, daily_write_bytes=10 * RECORD, wall_clock=wall)

    store = budgeted()
    assert put(store, range(6)) == [True] * 6
    assert put(store, range(6)) == [True] * 6  # nothing is written again
    assert put(store, range(6, 12)) == [True] * 4 + [False] * 2
    assert store.statistics().refused == 2
    store.check_integrity()
    store.close()
    store = budgeted()
    assert put(store, range(20, 22)) == [False] * 2
    wall.now_s += 86400
    assert put(store, range(20, 22)) == [True] * 2
    assert store.statistics().bytes_written == 2 * RECORD
    store.close()


@pytest.mark.slow
def test_several_folders_are_filled_evenly(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    store = DiskStore(folders, RECORD, 256 * MIB, MODEL)
    for first in range(0, 3800, 100):
        store.put(keys(range(first, first + 100)), [memoryview(bytearray(RECORD))] * 100)
    sizes = [disk_bytes(folder) for folder in folders]
    assert sum(sizes) <= 256 * MIB
    assert min(sizes) > 0.4 * sum(sizes)
    assert store.capacity().records == 3800
    store.check_integrity()
    store.close()
    again = DiskStore(folders[::-1], RECORD, 256 * MIB, MODEL)
    assert again.capacity().records == 3800
    again.close()
    with pytest.raises(InvalidArgumentError, match="named twice"):
        DiskStore([folders[0], folders[0]], RECORD, 256 * MIB, MODEL)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.put(b"x" * 15, [memoryview(bytes(RECORD))]),
        lambda store: store.put(key(1), []),
        lambda store: store.get(key(1), [memoryview(bytearray(RECORD - 1))]),
        lambda store: store.has(b"x"),
        lambda store: store.set_limit(-1),
    ],
)
def test_invalid_store_calls_are_rejected(
    folder: Path, call: Callable[[DiskStore], object]
) -> None:
    store = open_store(folder, RECORD, 8 * MIB)
    with pytest.raises(InvalidArgumentError):
        call(store)
    store.close()


@pytest.mark.parametrize(
    "change", [{"record_bytes": 0}, {"limit_bytes": -1}, {"folders": []}, {"io": "magic"}]
)
def test_invalid_store_settings_are_rejected(folder: Path, change: dict[str, object]) -> None:
    settings = {"folders": [folder], "record_bytes": RECORD, "limit_bytes": MIB} | change
    with pytest.raises(InvalidArgumentError):
        DiskStore(**settings)  # type: ignore[arg-type]


def test_closed_store_is_empty_and_refuses_objects(folder: Path) -> None:
    store = open_store(folder, RECORD, 8 * MIB)
    put(store, range(3))
    store.close()
    store.close()
    assert store.has(keys(range(3))) == [False] * 3
    assert whole(store, range(3)) == []
    assert put(store, range(5, 7)) == [False] * 2
    assert store.erase(keys(range(3))) == 0
    assert store.capacity().records == 0


def test_python_and_file_checksums_agree(folder: Path, engine: Literal["auto", "threads"]) -> None:
    folder.mkdir()
    io = _vmm.RecordIo(engine, 2)
    data = hashlib.shake_128(b"x").digest(9000)
    with (folder / "file").open("w+b", buffering=0) as file:
        [(moved, checksum)] = io.write([(file.fileno(), 4096)], [data], key(1))
        assert (moved, checksum) == (9000, _vmm.record_checksum(data, key(1)))
        into = bytearray(9000)
        assert io.read([(file.fileno(), 4096)], [into], key(1)) == [(moved, checksum)]
        assert into == data
        with pytest.raises(InvalidArgumentError, match="each record has one"):
            io.read([(file.fileno(), 0)], [into], b"")
        with pytest.raises(BufferError):
            io.read([(file.fileno(), 0)], [data], key(1))
