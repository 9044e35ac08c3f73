"""The store in a shared folder: two machines on one, damage, links, sweeping, failures."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from disk_records import MODEL, key, keys, put, record, whole
from processes import run_python
from waiting import DEADLINE_S

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import Selection
from kvelastic.tiers.stores.folder import format as folder_format
from kvelastic.tiers.stores.folder.store import FolderStore

RECORD = 5000
COUNT = 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def opened(path: Path, **more: object) -> FolderStore:
    return FolderStore(path, RECORD, MODEL, **more)  # type: ignore[arg-type]


def wait_for_sweep(store: FolderStore) -> None:
    assert store._sweeping is not None
    assert store._sweeping.ended.wait(DEADLINE_S)


class SlowListing:
    """Listings of a folder that wait to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.count = 0
        self._files = folder_format.files
        monkeypatch.setattr(folder_format, "files", self._list)

    def _list(self, root: int, abandoned_s: float) -> list[tuple[str, os.stat_result]]:
        self.count += 1
        self.began.set()
        assert self.go_on.wait(DEADLINE_S)
        return list(self._files(root, abandoned_s))


def file_of(path: Path, number: int) -> Path:
    name = key(number).hex()
    return path / name[:2] / name


def test_objects_are_shared_between_machines(path: Path) -> None:
    one, other = opened(path), opened(path)
    assert put(one, range(COUNT)) == [True] * COUNT
    assert put(other, range(COUNT)) == [True] * COUNT
    assert other.statistics().puts == 0  # they were there
    assert whole(other, range(COUNT + 5)) == list(range(COUNT))
    with other.hold(keys(range(COUNT + 5))) as hold:
        assert hold.count == COUNT
    assert one.erase(keys([3, 99])) == 1
    assert other.has(keys(range(5))) == [True, True, True, False, True]
    for store in (one, other):
        store.check_integrity()
        store.close()
        assert whole(store, range(COUNT)) == []


def test_files_and_folders_are_private_to_the_user(path: Path) -> None:
    store = opened(path)
    put(store, range(3))
    store.close()
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.glob("??/*")} == {0o600}
    path.chmod(0o702)
    with pytest.raises(InvalidArgumentError, match="written by all"):
        opened(path)
    link = path.parent / "link"
    link.symlink_to(path)
    with pytest.raises(InvalidArgumentError, match="a link"):
        opened(link)
    with pytest.raises(InvalidArgumentError):
        FolderStore(path, 0)


@pytest.mark.slow
def test_random_damage_never_serves_wrong_bytes(path: Path) -> None:
    store = opened(path)
    lost = 0
    for seed in range(300):
        rng = random.Random(seed)
        put(store, [1])
        file = file_of(path, 1)
        raw = bytearray(file.read_bytes())
        kind = rng.randrange(4)
        if kind == 0:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[rng.randrange(len(raw)) :]
        elif kind == 2:
            start = rng.randrange(len(raw))
            raw[start : start + 512] = rng.randbytes(len(raw[start : start + 512]))
        else:
            raw += b"more"
        file.write_bytes(raw)
        lost += whole(store, [1]) == []
    assert lost == 300
    assert store.statistics().torn == 300
    store.close()


def test_object_under_another_keys_name_is_invalid(path: Path) -> None:
    store = opened(path)
    put(store, [1, 2])
    file_of(path, 1).write_bytes(file_of(path, 2).read_bytes())
    assert whole(store, [1, 2]) == [2]
    assert store.statistics().torn == 1
    store.close()


def test_links_and_pipes_are_not_read(path: Path) -> None:
    store = opened(path)
    put(store, range(4))
    elsewhere = path.parent / "elsewhere"
    file_of(path, 1).rename(elsewhere)
    file_of(path, 1).symlink_to(elsewhere)
    file_of(path, 2).unlink()
    os.mkfifo(file_of(path, 2))
    assert whole(store, range(4)) == [0, 3]
    assert store.has(keys(range(4))) == [True, False, False, True]
    assert elsewhere.exists()
    shard = file_of(path, 3).parent
    shard.rename(path.parent / "moved")
    shard.symlink_to(path.parent / "moved")
    assert 3 not in whole(store, [3])
    store.close()


def test_erase_by_model_namespace_and_age(path: Path) -> None:
    wall = Clock()
    store = opened(path, wall_clock=wall)
    put(store, range(3))
    wall.now_s += 100
    store.enter(replace(MODEL, generation=1))
    put(store, range(10, 13))
    store.enter(replace(MODEL, model="two"))
    put(store, range(20, 23))
    assert store.erase_matching(Selection(model="three")) == 0
    assert store.erase_matching(Selection(model="one", older_than_s=50)) == 3
    assert store.erase_matching(Selection(namespace=replace(MODEL, generation=1))) == 3
    assert whole(store, range(30)) == [20, 21, 22]
    assert store.erase_matching(Selection()) == 3
    assert store.capacity().records == 0
    store.close()


def test_sweep_keeps_the_limit_by_removing_the_oldest(path: Path) -> None:
    clock = Clock()
    size = RECORD + 128
    store = opened(path, limit_bytes=20 * size, clock=clock)
    for number in range(100):
        put(store, [number])
        wait_for_sweep(store)
        stamp = 1_000_000_000 + number
        os.utime(file_of(path, number), (stamp, stamp))
        files = list(path.glob("??/*"))
        assert len(files) <= 20 + 20 // 8 + 1
    held = whole(store, range(100))
    assert held == list(range(100 - len(held), 100))
    assert store.capacity().records == len(held)
    assert store.statistics().evicted == 100 - len(held)
    store.set_limit(5 * size)
    assert whole(store, range(100)) == list(range(100 - store.capacity().records, 100))
    assert 0 < store.capacity().records <= 5
    store.close()
    with pytest.raises(InvalidArgumentError, match="without a limit"):
        opened(path).set_limit(5 * size)


def test_put_does_not_wait_for_a_sweep(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = opened(path, limit_bytes=100 * RECORD, clock=clock)
    listing = SlowListing(monkeypatch)
    for number in range(3):
        assert put(store, [number]) == [True]
    assert listing.began.wait(DEADLINE_S)
    clock.now_s += 1000
    listing.go_on.set()
    wait_for_sweep(store)
    put(store, [3])
    wait_for_sweep(store)
    assert listing.count == 1, "the next one comes a minute after the end of the first"
    store.close()


def test_put_does_not_wait_for_a_listing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(path)
    listing = SlowListing(monkeypatch)
    counting = threading.Thread(target=store.capacity)
    counting.start()
    assert listing.began.wait(DEADLINE_S)
    assert put(store, [0]) == [True]
    listing.go_on.set()
    counting.join()
    assert store.capacity().records == 1
    store.close()


def test_old_objects_and_partial_files_are_swept(path: Path) -> None:
    wall, clock = Clock(), Clock()
    wall.now_s = 1_000_000_000.0
    size = RECORD + 128
    store = opened(path, limit_bytes=4 * size, clock=clock, wall_clock=wall)
    put(store, range(4))
    wait_for_sweep(store)
    for number in range(2):
        os.utime(file_of(path, number), (wall.now_s - 2000, wall.now_s - 2000))
    for number in range(2, 4):
        os.utime(file_of(path, number), (wall.now_s, wall.now_s))
    left = file_of(path, 0).parent / ".new-0123456789abcdef"
    left.write_bytes(b"half")
    os.utime(left, (wall.now_s - 4000, wall.now_s - 4000))
    clock.now_s += 61
    put(store, [9])
    wait_for_sweep(store)
    assert whole(store, range(10)) == [2, 3, 9]
    assert not left.exists()
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc refuses root as well")
def test_failing_file_system_is_a_miss() -> None:
    clock = Clock()
    store = FolderStore("/proc/kvelastic", RECORD, MODEL, clock=clock)
    assert store.statistics().errors == 1
    for _ in range(3):
        clock.now_s += 61
        assert put(store, range(3)) == [False] * 3
        clock.now_s += 61
        assert whole(store, range(3)) == []
        assert store.has(keys(range(3))) == [False] * 3
        assert store.capacity().records == 0
        assert "/proc/kvelastic" in store.problem()
    assert store.statistics().refused == 9
    store.check_integrity()
    store.close()


def test_removed_folder_is_recreated(path: Path) -> None:
    clock = Clock()
    store = opened(path, clock=clock)
    put(store, range(3))
    path.rename(path.parent / "gone")
    assert whole(store, range(3)) == []
    assert put(store, range(3)) == [True] * 3
    assert bytes(record(1, RECORD)) in file_of(path, 1).read_bytes()
    store.close()


HANGING = """
import sys, threading
from kvelastic.tiers.stores.folder import format as folder_format
from kvelastic.tiers.stores.folder.store import FolderStore
from kvelastic.tiers.lookup import Lookup
store = FolderStore(sys.argv[1], 4096)
looking = Lookup([store])
folder_format.is_there = lambda *_: threading.Event().wait()
assert looking.has(0, bytes(range(64))) == [False] * 4
print("ends")
"""


def test_hanging_server_does_not_block_process_exit(path: Path) -> None:
    done = run_python("-c", HANGING, path)
    assert (done.stdout, done.stderr) == ("ends\n", "")
