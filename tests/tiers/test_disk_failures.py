"""What file systems and devices do to a disk store: misses and refused puts, and never an error."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_records import MODEL, keys, open_store, put, whole
from waiting import DEADLINE_S

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.stores.disk.file import DataFile
from kvelastic.tiers.stores.disk.folder import Folder
from kvelastic.tiers.stores.disk.store import DiskStore

MIB = 1 << 20
RECORD = 16 * 1024
LIMIT = 8 * MIB
IS_ROOT = os.geteuid() == 0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FailingFiles:
    """Reads and writes records, or says that it cannot; `fails` answers an errno for each call."""

    engine = "failing"

    def __init__(self) -> None:
        self.io = _vmm.RecordIo("threads", 2)
        self.fails: Callable[[str, int], int] = lambda way, at: 0
        self.calls = 0

    def _run(
        self, way: str, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> list[tuple[int, int]]:
        self.calls += 1
        answers = getattr(self.io, way)(places, views, keys)
        return [
            (-self.fails(way, at), 0) if self.fails(way, at) else answer
            for at, answer in enumerate(answers)
        ]

    def write(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> list[tuple[int, int]]:
        return self._run("write", places, views, keys)

    def read(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> list[tuple[int, int]]:
        return self._run("read", places, views, keys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EFBIG])
def test_failed_writes_are_refused_and_retried_later(folder: Path, code: int) -> None:
    clock, files = Clock(), FailingFiles()
    store = open_store(folder, RECORD, LIMIT, io=files, clock=clock)
    assert all(put(store, range(5)))
    files.fails = lambda way, at: code if way == "write" and at != 1 else 0
    assert put(store, range(10, 13)) == [False, True, False]
    seen = store.statistics()
    assert (seen.puts, seen.refused, seen.errors) == (6, 2, 2)
    calls = files.calls
    assert put(store, range(20, 22)) == [False] * 2  # circuit breaker open
    assert files.calls == calls
    assert whole(store, range(30)) == [0, 1, 2, 3, 4, 11]
    for _ in range(10):  # it is asked again and again, ever more rarely
        clock.now_s += 61
        assert put(store, [20]) == [False]
    assert store.statistics().errors == 12
    assert store.problem() == os.strerror(code)
    files.fails = lambda way, at: 0
    clock.now_s += 61
    assert put(store, range(20, 22)) == [True] * 2
    assert store.problem() == ""
    store.check_integrity()
    store.close()


def test_failed_reads_are_misses_and_retried_later(folder: Path) -> None:
    clock, files = Clock(), FailingFiles()
    store = open_store(folder, RECORD, LIMIT, io=files, clock=clock)
    put(store, range(5))
    files.fails = lambda way, at: errno.EIO if way == "read" and at == 1 else 0
    assert whole(store, range(5)) == [0, 2, 3, 4]
    seen = store.statistics()
    assert (seen.hits, seen.misses, seen.torn, seen.errors) == (4, 1, 0, 1)
    assert store.has(keys(range(5))) == [False] * 5  # circuit breaker open
    assert store.hold(keys(range(5))).count == 0
    files.fails = lambda way, at: 0
    clock.now_s += 1
    assert whole(store, range(5)) == list(range(5))
    store.check_integrity()
    store.close()


def test_hanging_medium_does_not_block_lease_release(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(folder, RECORD, LIMIT)
    put(store, range(1000))  # as many as there is room for
    there = whole(store, range(1000))
    holds = [store.hold(keys([number])) for number in there[-2:]]
    assert [hold.count for hold in holds] == [1, 1]
    clear_entry = DataFile.clear_entry
    reached, let_go, released = (threading.Event() for _ in range(3))

    def hang(file: DataFile, slot: int) -> None:
        reached.set()
        assert let_go.wait(DEADLINE_S)
        clear_entry(file, slot)

    def release() -> None:
        for hold in holds:
            hold.release()
        released.set()

    monkeypatch.setattr(DataFile, "clear_entry", hang)
    putting = threading.Thread(target=put, args=(store, range(2000, 2004)))
    engine = threading.Thread(target=release)
    putting.start()
    assert reached.wait(DEADLINE_S)
    engine.start()
    was_released = released.wait(DEADLINE_S / 2)  # less than the hanging call waits
    let_go.set()
    putting.join()
    engine.join()
    assert was_released
    store.check_integrity()
    assert store._index.stats()["held"] == 0, "who had the lock has ended them"
    store.close()


def test_store_falls_back_from_direct_io(folder: Path) -> None:
    files = FailingFiles()
    store = open_store(folder, RECORD, LIMIT, io=files)
    is_direct = any(file.is_direct for file in _files(store))

    def fails(way: str, at: int) -> int:
        return errno.EINVAL if any(file.is_direct for file in _files(store)) else 0

    files.fails = fails
    assert put(store, range(4)) == [True] * 4
    assert whole(store, range(4)) == list(range(4))
    assert store.statistics().errors == 0
    assert files.calls == (3 if is_direct or files.calls == 3 else 2)
    store.close()


def _files(store: DiskStore) -> list[DataFile]:
    return list(store._table.files())


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_medium_keeps_the_objects_that_fit(folder: Path) -> None:
    """A limit on the size of files stands for it; its signal is ignored, as Python does."""
    clock = Clock()
    with files_of_at_most(MIB):
        store = open_store(folder, RECORD, LIMIT, clock=clock)
        assert put(store, range(3)) == [False] * 3
        assert store.statistics().errors == 1
        assert put(store, range(3)) == [False] * 3
        assert store.statistics().errors == 1  # circuit breaker open
        clock.now_s += 61
        store.capacity()  # the folder can be looked at, which is not what fails
        assert "File too large" in store.problem()
    clock.now_s += 61
    assert put(store, range(3)) == [True] * 3
    assert store.problem() == ""
    assert [path.suffix for path in folder.iterdir()].count(".kv") == 1
    store.close()


def test_refused_growth_is_retried_ever_more_rarely(folder: Path) -> None:
    clock = Clock()
    store = open_store(folder, RECORD, LIMIT, clock=clock)
    with files_of_at_most(MIB):
        for number in range(300):
            assert put(store, [number]) == [False]
            assert "File too large" in store.problem()
            clock.now_s += 0.1
    assert store.statistics().errors == 7  # after 0, 1/4, 3/4, 7/4, ... seconds
    store.close()


def test_backoff_ends_once_files_grow_again(folder: Path) -> None:
    clock = Clock()
    store = open_store(folder, RECORD, 2 * MIB, clock=clock)
    with files_of_at_most(MIB):
        for _ in range(10):
            assert put(store, range(3)) == [False] * 3
            clock.now_s += 61
    assert put(store, range(3)) == [True] * 3
    store.set_limit(LIMIT)
    with files_of_at_most(2 * MIB):  # the second file is larger
        put(store, range(1000))
        assert "File too large" in store.problem()
    there = len(whole(store, range(1000)))
    clock.now_s += 1
    put(store, range(1000))
    assert len(whole(store, range(1000))) > there
    store.check_integrity()
    store.close()


def test_descriptor_shortage_refuses_the_put(folder: Path) -> None:
    clock = Clock()
    store = open_store(folder, RECORD, LIMIT, clock=clock)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open("/dev/null", os.O_RDONLY)
    os.close(held)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held, hard))
    try:
        assert put(store, range(3)) == [False] * 3
        assert store.capacity().records == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    clock.now_s += 61
    assert put(store, range(3)) == [True] * 3
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("with_folder", [True, False])
def test_removed_folder_is_recreated(folder: Path, with_folder: bool) -> None:
    clock = Clock()
    store = open_store(folder, RECORD, LIMIT, clock=clock)
    put(store, range(5))
    if with_folder:
        shutil.rmtree(folder)
    else:
        for path in folder.iterdir():
            path.unlink()
    for _ in range(4):
        clock.now_s += 61
        put(store, range(10, 15))
    assert whole(store, range(20)) == list(range(10, 15))
    assert folder.stat().st_mode & 0o777 == 0o700
    other = open_store(folder, RECORD, LIMIT)  # they see each other
    assert put(other, [1]) == [False]
    other.close()
    store.check_integrity()
    store.close()


def _replace_by_a_link(folder: Path) -> None:
    folder.symlink_to(folder.parent)


def _replace_by_a_file(folder: Path) -> None:
    folder.touch()


def _replace_by_an_open_folder(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _replace_by_a_foreign_folder(folder: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root gives folders to others")
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize(
    "replace",
    [
        _replace_by_a_link,
        _replace_by_a_file,
        _replace_by_an_open_folder,
        _replace_by_a_foreign_folder,
    ],
)
def test_replaced_folder_is_a_miss(
    folder: Path, replace: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    store = open_store(folder, RECORD, LIMIT, clock=clock)
    put(store, range(5))
    shutil.rmtree(folder)
    replace(folder)
    for _ in range(4):
        clock.now_s += 61
        stored = put(store, range(10, 15))
        store.capacity()
        store.set_limit(LIMIT)
        store.erase(keys([1]))
    assert stored == [False] * 5
    assert whole(store, range(20)) == []
    assert store.statistics().errors > 0
    assert str(folder) in caplog.text
    folder.unlink() if not folder.is_dir() or folder.is_symlink() else folder.rmdir()
    for _ in range(4):
        clock.now_s += 61
        stored = put(store, range(10, 15))
    assert stored == [True] * 5
    store.check_integrity()
    store.close()


def test_failed_takeover_in_one_folder_loses_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    exited = open_store(good, RECORD, LIMIT)
    put(exited, range(50))
    exited.close()
    take_over = Folder.take_over

    def refuse(folder: Folder) -> tuple[list[DataFile], list[str], int]:
        if folder.path == str(bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return take_over(folder)

    monkeypatch.setattr(Folder, "take_over", refuse)
    clock = Clock()
    store = DiskStore([good, bad], RECORD, 2 * LIMIT, MODEL, clock=clock)
    assert "Input/output error" in store.problem()
    monkeypatch.undo()
    numbers = itertools.count(100)
    while whole(store, range(50)) != list(range(50)):
        clock.now_s += 1
        assert put(store, [next(numbers)]) == [True]
        assert next(numbers) < 3000, "they were not adopted once the other file was full"
    store.check_integrity()
    store.close()


def test_unusable_folder_is_reported_until_usable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    blocked, free = tmp_path / "mount" / "kv", tmp_path / "kv"
    blocked.parent.symlink_to("/proc/kvelastic")  # where nothing can be made
    store = DiskStore([blocked, free], RECORD, LIMIT, MODEL, clock=clock)
    for _ in range(3):
        assert store.problem() == f"No such file or directory: {blocked}"
        clock.now_s += 61
        store.capacity()
        assert put(store, range(3)) == [True] * 3, "the other folder is used"
    assert store.statistics().errors == 4
    assert len([one for one in caplog.records if "goes without" in one.message]) == 1
    blocked.parent.unlink()
    clock.now_s += 61
    store.capacity()
    assert store.problem() == ""
    store.close()


def test_folder_that_cannot_be_created_is_skipped(tmp_path: Path) -> None:
    blocked = Path("/proc/kvelastic/kv")
    store = DiskStore([blocked], RECORD, LIMIT, MODEL)
    assert put(store, range(3)) == [False] * 3
    assert store.statistics().errors >= 1
    store.check_integrity()
    store.close()
    both = DiskStore([blocked, tmp_path / "kv"], RECORD, LIMIT, MODEL)
    assert put(both, range(3)) == [True] * 3
    both.close()


def test_limit_below_one_object_warns(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = open_store(folder, RECORD, RECORD + 4096)
    assert put(small, range(1)) == [False]
    assert "nothing is kept there" in caplog.text
    small.close()
    caplog.clear()
    enough = open_store(folder, RECORD, 2 * RECORD + 4096)
    assert put(enough, range(1)) == [True]
    assert not caplog.text
    enough.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InvalidArgumentError, match="a link"):
        open_store(tmp_path / "link", RECORD, LIMIT)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match="no folder"):
        open_store(tmp_path / "file", RECORD, LIMIT)
    store = open_store(tmp_path / "real", RECORD, LIMIT)
    put(store, range(3))
    store.close()
    [good] = (tmp_path / "real").glob("*.kv")
    elsewhere = tmp_path / "elsewhere"
    good.rename(elsewhere)
    for name, make in {
        "0000000000000001.kv": lambda path: path.symlink_to(elsewhere),
        "0000000000000002.kv": lambda path: path.mkdir(),
        "0000000000000003.kv": os.mkfifo,
        "0000000000000004.kv": lambda path: path.hardlink_to(elsewhere),
    }.items():
        make(tmp_path / "real" / name)
    store = open_store(tmp_path / "real", RECORD, LIMIT)
    assert store.capacity().records == 0
    store.check_integrity()
    store.close()


@pytest.mark.skipif(not IS_ROOT, reason="only root gives files to others")
def test_files_of_another_user_are_rejected(folder: Path) -> None:
    store = open_store(folder, RECORD, LIMIT)
    put(store, range(3))
    store.close()
    [file] = folder.glob("*.kv")
    os.chown(file, 12345, 12345)
    store = open_store(folder, RECORD, LIMIT)
    assert store.capacity().records == 0
    store.close()
    os.chown(folder, 12345, 12345)
    with pytest.raises(InvalidArgumentError, match="belongs to user 12345"):
        open_store(folder, RECORD, LIMIT)


@pytest.mark.slow
def test_stopped_folder_lock_holder_opens_the_circuit_breaker(
    folder: Path,
) -> None:
    clock = Clock()
    store = open_store(folder, RECORD, LIMIT, clock=clock)
    put(store, range(5))
    store.close()
    stopped = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    store = open_store(folder, RECORD, LIMIT, clock=clock)
    assert put(store, range(9)) == [False] * 9  # it does not know what lies there
    os.close(stopped)
    assert put(store, range(9)) == [False] * 9  # circuit breaker open
    clock.now_s += 61
    assert put(store, range(9)) == [True] * 9
    assert store.statistics().puts == 4  # the others were there
    assert whole(store, range(9)) == list(range(9))
    stopped = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    clock.now_s += 61
    assert put(store, range(20, 25)) == [True] * 5  # what it has it uses
    store.set_limit(0)
    assert store.capacity().records == 14
    os.close(stopped)
    clock.now_s += 61
    assert store.capacity().records == 0
    store.check_integrity()
    store.close()


def test_stopped_holder_of_daily_count_blocks_no_put(folder: Path) -> None:
    store = open_store(folder, RECORD, LIMIT, daily_write_bytes=10 * RECORD, wall_clock=lambda: 1e9)
    assert put(store, range(2)) == [True] * 2
    stopped = os.open(folder / ".written", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    stored: list[list[bool]] = []
    putting = threading.Thread(target=lambda: stored.append(put(store, range(2, 6))), daemon=True)
    putting.start()
    putting.join(DEADLINE_S)
    os.close(stopped)
    assert stored == [[True] * 4]
    assert put(store, range(6, 20)).count(True) == 4, "ten in all: none was forgotten"
    store.close()


def test_clock_before_the_epoch_is_accepted(folder: Path) -> None:
    now = [-1e9]
    more = {"daily_write_bytes": 3 * RECORD, "wall_clock": lambda: now[0]}
    store = open_store(folder, RECORD, LIMIT, **more)
    assert put(store, range(5)).count(True) == 3
    store.check_integrity()
    now[0] = 1e9
    assert put(store, range(10, 15)).count(True) == 3, "another day"
    now[0] = -1e9
    assert put(store, range(20, 25)).count(True) == 3, "and another"
    store.close()


FULL_DISK = """
import os, sys
from pathlib import Path
from disk_records import open_store, put, whole
folder = Path(sys.argv[1])
store = open_store(folder / "kv", 16384, 64 << 20)  # more than there is
put(store, range(1000))
seen = store.statistics()
assert seen.puts > 100 and seen.errors, seen
assert len(whole(store, range(1000))) == store.capacity().records > 100
store.check_integrity()
store.set_limit(0)
store.close()
filler = folder / "filler"
filler.write_bytes(bytes(7 << 20))
store = open_store(folder / "kv", 16384, 4 << 20)
put(store, range(80))
seen = store.statistics()
assert seen.refused + seen.puts >= 80, seen
assert len(whole(store, range(80))) == store.capacity().records
store.check_integrity()
store.close()
os.system(f"mount -o remount,ro {folder}")
store = open_store(folder / "kv", 16384, 4 << 20)
assert put(store, range(20, 22)) == [False] * 2
assert store.statistics().errors >= 1
store.check_integrity()
store.close()
print("fine")
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason="only root mounts a file system")
def test_small_file_system_full_and_read_only(tmp_path: Path) -> None:
    script = (
        f"mount -t tmpfs -o size=8m,mode=700 none {tmp_path} && exec {sys.executable} - {tmp_path}"
    )
    programs = Path(__file__).parents[1] / "programs"
    unshared = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    if unshared.returncode != 0:
        pytest.skip(f"no mount namespaces here: {unshared.stderr.decode()}")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        input=FULL_DISK,
        env=os.environ | {"PYTHONPATH": f"{programs}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "fine\n", done.stderr
