"""What was erased is nowhere in the files of a tier, whatever became of it before.

Each record is a pattern of its own; the tests look for the patterns in every byte of every file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_records import MODEL, disk_bytes, key, keys, open_store, put, record, whole
from fake_tiers import FakePool, FakeStaging
from waiting import DEADLINE_S

from kvelastic import _vmm
from kvelastic.shared.tier_status import TierRequest
from kvelastic.tiers.base import Selection, Store
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.operator_requests import carry_out
from kvelastic.tiers.policy import Rules
from kvelastic.tiers.stores.disk.erase import erase_at_rest
from kvelastic.tiers.stores.disk.file import DataFile
from kvelastic.tiers.stores.disk.store import DiskStore
from kvelastic.tiers.stores.folder.store import FolderStore

RECORD = 8192
MIB = 1 << 20
OTHER = replace(MODEL, model="two")


def lying(folder: Path, numbers: Iterable[int]) -> list[int]:
    """Which records have bytes in any file: the middle of a record is not in its entry."""
    content = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    middle = slice(RECORD // 2, RECORD // 2 + 64)
    return [n for n in numbers if bytes(record(n, RECORD)[middle]) in content]


# --- all tiers ------------------------------------------------------------------------------------


def open_disk(folder: Path, namespace: Namespace = MODEL) -> DiskStore:
    return DiskStore([folder], RECORD, 8 * MIB, namespace)


def open_folder(folder: Path, namespace: Namespace = MODEL) -> FolderStore:
    return FolderStore(folder, RECORD, namespace)


@pytest.mark.parametrize("open_it", [open_disk, open_folder])
def test_clear_erases_all_generations(tmp_path: Path, open_it: Callable[..., Store]) -> None:
    """A prefix cache that is reset twice leaves records of three generations."""
    store = open_it(tmp_path)
    pool: Any = FakePool()
    staging: Any = FakeStaging(4, RECORD)
    tiers = Tiers(pool, staging, MODEL, [store], Rules(idle_after_s=1e9, watermark=0.0))
    try:
        put(store, range(3))
        tiers.forget()
        put(store, range(10, 13))
        tiers.forget()
        put(store, range(20, 23))
        store.enter(OTHER)
        put(store, range(30, 33))
        store.enter(tiers.namespace)
        assert lying(tmp_path, range(40)) == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
        answer = carry_out(1, TierRequest("clear"), tiers)
        assert (answer.state, answer.counts) == ("done", (9,))
        assert lying(tmp_path, range(40)) == [30, 31, 32]
        assert carry_out(2, TierRequest("clear"), tiers).counts == (0,)
        assert tiers.erase() == {0: 0}
    finally:
        assert tiers.close(DEADLINE_S) == []
    after = open_it(tmp_path)
    assert whole(after, range(40)) == [30, 31, 32]
    after.close()


# --- disk -----------------------------------------------------------------------------------------


def test_next_erasure_wipes_evicted_objects(tmp_path: Path) -> None:
    store = open_store(tmp_path, RECORD, 8 * MIB)
    put(store, range(20))
    assert store.evict(5) == 5
    there = whole(store, range(20))
    assert len(there) == 15
    assert store.erase_matching(Selection(model="nobody's")) == 0
    assert lying(tmp_path, range(20)) == there
    assert store.evict(5) == 5
    assert store.erase(keys(there)) == 10
    assert lying(tmp_path, range(20)) == []
    store.check_integrity()
    assert all(put(store, range(30)))
    assert whole(store, range(30)) == list(range(30))
    store.close()


class _TornWrites:
    """Writes all bytes of records, and says that it has failed."""

    def __init__(self) -> None:
        self._io = _vmm.RecordIo("auto", 4)
        self.fails = False

    def write(self, places, views, keys):
        answers = self._io.write(places, views, keys)
        return [(-errno.EIO, 0)] * len(answers) if self.fails else answers

    def read(self, places, views, keys):
        return self._io.read(places, views, keys)


def test_erasure_wipes_remains_of_failed_writes(tmp_path: Path) -> None:
    files = _TornWrites()
    store = open_store(tmp_path, RECORD, 8 * MIB, io=files)
    put(store, range(2))
    files.fails = True
    assert put(store, range(2, 4)) == [False, False]
    files.fails = False
    assert lying(tmp_path, range(4)) == [0, 1, 2, 3]
    assert store.erase_matching(Selection()) == 2
    assert lying(tmp_path, range(4)) == []
    store.close()


def test_erasure_works_without_hole_punching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that were displaced stay in slots that are parked, also of files taken over."""

    def refuse(file: DataFile, slots: Iterable[int]) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(DataFile, "release", refuse)
    store = open_store(tmp_path, RECORD, 8 * MIB)
    put(store, range(20))
    store.evict(6)
    store.close()
    store = open_store(tmp_path, RECORD, 8 * MIB)
    assert len(whole(store, range(20))) == 14
    assert lying(tmp_path, range(20)) == list(range(20))
    assert store.erase_matching(Selection()) == 14
    assert store.unerased() == ("", "")
    assert lying(tmp_path, range(20)) == []
    assert disk_bytes(tmp_path) <= 8 * MIB
    store.check_integrity()
    store.close()


def test_lease_delays_erasure_until_its_release(tmp_path: Path) -> None:
    store = open_store(tmp_path, RECORD, 8 * MIB)
    put(store, range(4))
    hold = store.hold(keys([0, 1]))
    assert store.erase_matching(Selection()) == 4
    assert store.erase_matching(Selection()) == 0
    assert lying(tmp_path, range(4)) == [0, 1]
    hold.release()
    assert lying(tmp_path, range(4)) == []
    put(store, range(4))
    store.hold(keys([2]))
    assert store.erase_matching(Selection()) == 4
    store.close()
    assert lying(tmp_path, range(4)) == [], "a hold that is open at the end keeps nothing"


def test_offline_erasure_wipes_everything_selected(tmp_path: Path) -> None:
    """Displaced records, damaged entries, files without a whole header."""
    erased, kept = 0, []
    for record_bytes, first in ((RECORD, 0), (2 * RECORD, 100)):
        store = DiskStore([tmp_path], record_bytes, record_bytes // RECORD * 8 * MIB, MODEL)
        put(store, range(first, first + 6))
        store.enter(OTHER)
        put(store, range(first + 6, first + 12))
        assert store.evict(2) == 2
        erased += len(whole(store, range(first, first + 6)))
        kept += whole(store, range(first + 6, first + 12))
        store.close()
    damaged = tmp_path / "0123456789abcdef.kv"
    damaged.write_bytes(b"damaged" + bytes(record(50, RECORD)))
    damaged.chmod(0o600)
    assert lying(tmp_path, range(112)) == [*range(12), 50, *range(100, 112)]
    done = erase_at_rest([tmp_path], Selection(namespace=MODEL))
    assert (done.records, done.busy_files, done.damaged_files) == (erased, 0, 1)
    assert not damaged.exists()
    assert lying(tmp_path, range(112)) == sorted(kept)
    again = DiskStore([tmp_path], 2 * RECORD, 16 * MIB, MODEL)
    assert whole(again, range(112)) == [n for n in kept if n >= 100]
    again.close()


class _FailingWipe:
    """`DataFile.wipe` that an erroneous medium refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = True
        wipe = DataFile.wipe

        def failing(file: DataFile, slots: Iterable[int]) -> None:
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            wipe(file, slots)

        monkeypatch.setattr(DataFile, "wipe", failing)


def test_failed_wipe_is_reported_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(tmp_path)
    pool: Any = FakePool()
    staging: Any = FakeStaging(4, RECORD)
    tiers = Tiers(pool, staging, MODEL, [store], Rules(idle_after_s=1e9, watermark=0.0))
    try:
        put(store, range(4))
        medium = _FailingWipe(monkeypatch)
        answer = carry_out(1, TierRequest("clear"), tiers)
        assert (answer.state, answer.counts) == ("failed", (4,))
        assert answer.reason == "disk: 4 records could not be wiped"
        assert lying(tmp_path, range(4)) == [0, 1, 2, 3]
        medium.fails = False
        answer = carry_out(2, TierRequest("clear"), tiers)
        assert (answer.state, answer.counts, answer.reason) == ("done", (0,), "")
        assert lying(tmp_path, range(4)) == []
    finally:
        assert tiers.close(DEADLINE_S) == []


def test_failed_erasure_unlocks_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Room for a file of 64 MiB each, the least that is made.
    exited = [open_store(tmp_path, RECORD, 160 * MIB) for _ in range(2)]
    for number, store in enumerate(exited):
        put(store, [number])
    for store in exited:
        store.close()
    sync = DataFile.sync
    failed: list[DataFile] = []

    def fail_once(file: DataFile) -> None:
        if not failed:
            failed.append(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    monkeypatch.setattr(DataFile, "sync", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        erase_at_rest([tmp_path], Selection())
    done = erase_at_rest([tmp_path], Selection())
    assert (done.busy_files, lying(tmp_path, range(2))) == (0, [])


def test_files_of_running_neighbours_are_reported(tmp_path: Path) -> None:
    # Room for a file of 64 MiB each, the least that is made.
    store, neighbour = (open_store(tmp_path, RECORD, 160 * MIB) for _ in range(2))
    put(store, range(2))
    put(neighbour, range(2, 4))
    assert store.erase_matching(Selection()) == 2
    assert store.unerased() == ("", "1 files of other engines were left")
    neighbour.close()
    assert store.erase_matching(Selection()) == 2
    assert store.unerased() == ("", "")
    assert lying(tmp_path, range(4)) == []
    store.close()


# --- a shared folder ------------------------------------------------------------------------------


def test_erasure_removes_damaged_and_partial_files(tmp_path: Path) -> None:
    store = open_folder(tmp_path)
    put(store, range(8))
    store.enter(OTHER)
    put(store, range(8, 12))

    def path_of(number: int) -> Path:
        name = key(number).hex()
        return tmp_path / name[:2] / name

    whole_file = path_of(0).read_bytes()
    path_of(1).write_bytes(whole_file)  # another key's record
    path_of(2).write_bytes(path_of(2).read_bytes()[: RECORD // 2 + 256])
    path_of(3).write_bytes(b"?" + path_of(3).read_bytes()[1:])
    path_of(8).write_bytes(b"?" + path_of(8).read_bytes()[1:])
    shard = path_of(4).parent
    path_of(4).rename(shard / ".new-00112233")  # a writer that was killed before its rename
    path_of(9).rename(path_of(9).parent / ".new-44556677")
    path_of(5).rename(shard / ".new-8899aabb")
    with (shard / ".new-8899aabb").open("r+b") as half:
        half.truncate(100)
    (shard / ".new-begun").touch()
    assert store.erase_matching(Selection(namespace=MODEL, every_generation=True)) == 9
    assert store.unerased() == ("", "")
    assert lying(tmp_path, range(12)) == [9, 10, 11]
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted([key(10).hex(), key(11).hex(), ".new-44556677", ".new-begun"])
    assert store.capacity().records == 2
    store.check_integrity()
    store.close()


def test_erasure_ignores_an_open_circuit_breaker(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = open_folder(folder)
    put(store, range(4))
    folder.rename(tmp_path / "aside")
    folder.symlink_to(tmp_path / "aside")
    assert put(store, [4]) == [False]
    assert store.erase_matching(Selection()) == 0
    assert "could not be looked at" in store.unerased().failed
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    assert store.has(keys([0])) == [False], "it is left alone for a while"
    assert store.erase(keys([0])) == 1
    assert store.erase_matching(Selection()) == 3
    assert store.unerased() == ("", "")
    assert lying(tmp_path, range(5)) == []
    store.close()
