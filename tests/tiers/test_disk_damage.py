"""Files of the disk tier that are damaged in every way: found, counted, and never served."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_records import MODEL, keys, open_store, put, whole

from kvelastic.tiers.base import NO_KEY
from kvelastic.tiers.stores.disk.format import Entry, Geometry, pack_entry, pack_header
from kvelastic.tiers.stores.disk.store import DiskStore
from kvelastic.tiers.stores.record_owner import Owner

RECORD = 16 * 1024
COUNT = 100
LIMIT = 1_720_000
"""Little more than COUNT records: nearly all of a file is in use."""
PROGRAM = Path(__file__).parents[1] / "programs" / "disk_records.py"


def copied(folder: Path, to: Path) -> Path:
    """A copy, file by file while somebody may write; only of the records' files."""
    to.mkdir(mode=0o700)
    for path in folder.glob("*.kv"):
        shutil.copyfile(path, to / path.name)
        (to / path.name).chmod(0o600)
    return to


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    folder = tmp_path / "filled"
    store = open_store(folder, RECORD, LIMIT)
    assert all(put(store, range(COUNT)))
    store.close()
    return folder


def opened_and_read(folder: Path) -> tuple[list[int], int]:
    """What can be read (none of it wrong), and what was counted as torn, of all that was put."""
    store = open_store(folder, RECORD, LIMIT)
    found = whole(store, range(COUNT))
    torn = store.statistics().torn
    store.check_integrity()
    assert whole(store, range(COUNT)) == found
    assert all(put(store, range(COUNT)))  # and it is used again
    assert whole(store, range(COUNT)) == list(range(COUNT))
    store.check_integrity()
    store.close()
    return found, torn


def data_file(folder: Path) -> Path:
    [path] = folder.glob("*.kv")
    return path


def flip(path: Path, at: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def test_flipped_bit_in_an_object_loses_that_object(filled: Path) -> None:
    path = data_file(filled)
    flip(path, path.stat().st_size // 2)
    found, torn = opened_and_read(filled)
    assert (len(found), torn) == (COUNT - 1, 1)


@pytest.mark.parametrize("at", [4096, 4096 + 50, 4096 + 100, 4096 + 127])
def test_flipped_bit_of_an_entry_loses_its_object(filled: Path, at: int) -> None:
    path = data_file(filled)
    with path.open("rb") as file:
        file.seek(4096)
        used = next(slot for slot in range(1000) if any(file.read(128)))
    flip(path, at + used * 128)
    found, torn = opened_and_read(filled)
    assert (len(found), torn) == (COUNT - 1, 1)


@pytest.mark.parametrize("at", [0, 9, 16, 40, 60])
def test_damaged_header_loses_the_whole_file(filled: Path, at: int) -> None:
    flip(data_file(filled), at)
    found, _ = opened_and_read(filled)
    assert found == []


def test_swapped_entries_are_invalid(filled: Path) -> None:
    path = data_file(filled)
    raw = bytearray(path.read_bytes())
    used = [slot for slot in range(200) if any(raw[4096 + slot * 128 : 4224 + slot * 128])]
    a, b = (slice(4096 + slot * 128, 4224 + slot * 128) for slot in used[:2])
    raw[a], raw[b] = raw[b], raw[a]
    path.write_bytes(raw)
    found, torn = opened_and_read(filled)
    assert (len(found), torn) == (COUNT - 2, 2)


def test_truncated_file_keeps_the_rest(filled: Path) -> None:
    path = data_file(filled)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    found, torn = opened_and_read(filled)
    assert 0 < len(found) < COUNT
    assert torn == COUNT - len(found)


def test_damage_at_runtime_is_detected(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = open_store(folder, RECORD, LIMIT)
    put(store, range(COUNT))
    path = data_file(folder)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
        file.flush()
        found = whole(store, range(COUNT))
        file.truncate(size // 4)
    assert len(found) < COUNT
    assert store.statistics().torn == COUNT - len(found)
    left = whole(store, range(COUNT))
    assert len(left) < len(found)
    assert store.has(keys(range(COUNT))).count(True) == len(left)
    store.check_integrity()
    store.close()


def damages(rng: random.Random) -> list[Callable[[bytearray], None]]:
    def flip_bits(raw: bytearray) -> None:
        for _ in range(rng.choice((1, 3, 40))):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)

    def flip_in_the_table(raw: bytearray) -> None:
        for _ in range(rng.randint(1, 30)):
            raw[rng.randrange(min(len(raw), 4096 + 256 * 128))] ^= 1 << rng.randrange(8)

    def cut(raw: bytearray) -> None:
        del raw[rng.randrange(len(raw)) :]

    def zero(raw: bytearray) -> None:
        start = rng.randrange(len(raw))
        size = rng.choice((512, 4096, 100_000))
        raw[start : start + size] = bytes(len(raw[start : start + size]))

    def move(raw: bytearray) -> None:
        size = rng.choice((128, 512, 4096, RECORD))
        source, to = (rng.randrange(max(1, len(raw) // size)) * size for _ in range(2))
        part = raw[source : source + size]
        raw[to : to + len(part)] = part

    def noise(raw: bytearray) -> None:
        start = rng.randrange(len(raw))
        part = len(raw[start : start + rng.choice((8, 512, 20_000))])
        raw[start : start + part] = rng.randbytes(part)

    return [flip_bits, flip_in_the_table, cut, zero, move, noise]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_random_damage_never_serves_wrong_bytes(filled: Path, tmp_path: Path, rounds: int) -> None:
    good = data_file(filled).read_bytes()
    lost = 0
    for seed in range(rounds):
        rng = random.Random(seed)
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            if raw:
                rng.choice(damages(rng))(raw)
        folder = tmp_path / f"damaged{seed}"
        folder.mkdir(mode=0o700)
        path = folder / "0123456789abcdef.kv"
        path.write_bytes(raw)
        path.chmod(0o600)
        store = open_store(folder, RECORD, LIMIT)
        lost += COUNT - len(whole(store, range(COUNT)))
        store.check_integrity()
        store.close()
        shutil.rmtree(folder)
    assert lost > rounds // 2  # the damages do damage


def writer(folder: Path, first: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), "write", str(folder), str(RECORD), str(LIMIT)]
    return subprocess.Popen([*command, str(first)], stdout=subprocess.PIPE, text=True)


def said(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def newest_said(child: subprocess.Popen[str]) -> int:
    """The last number in the pipe, which may hold thousands; waits for one. Not beside `said`."""
    assert child.stdout is not None
    pipe, text = child.stdout.fileno(), b""
    while not text.endswith(b"\n"):  # a full pipe cuts a line in two
        text += os.read(pipe, 1 << 16)
        os.set_blocking(pipe, False)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(pipe, 1 << 16):
                text += more
        os.set_blocking(pipe, True)
    return int(text.split()[-1])


@pytest.mark.slow
def test_copies_during_writes_never_serve_wrong_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with writer(folder, 0) as child:
        try:
            for number in range(10):
                first = last = newest_said(child)
                # It goes round: slots are written over as they are copied.
                while last < first + 320:
                    last = newest_said(child)
                copy = copied(folder, tmp_path / f"copy{number}")
                end = newest_said(child)
                store = open_store(copy, RECORD, LIMIT)
                assert len(whole(store, range(max(0, last - 320), end + 64))) > 0
                store.check_integrity()
                store.close()
        finally:
            child.kill()


@pytest.mark.slow
def test_killed_writer_loses_no_acknowledged_object(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    first = 0
    for round_number in range(8):
        with writer(folder, first) as child:
            for _ in range(3 + 7 * round_number):
                last = said(child)
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert child.stdout is not None
            # It may have written much more since: the store keeps what is newest.
            last = int([str(last), *child.stdout.read().split()][-1])
        store = DiskStore([folder], RECORD, LIMIT, MODEL)
        # The slots hold more than what this round has put, and the policy keeps the newest.
        assert set(range(max(first, last - 40), last)) <= set(whole(store, range(last)))
        assert store.statistics().torn == 0
        store.check_integrity()
        store.close()
        first = last + 1000


def test_entry_with_the_empty_key_is_invalid(tmp_path: Path) -> None:
    """Its checksum is right: somebody has made it so."""
    folder = tmp_path / "made"
    folder.mkdir(mode=0o700)
    geometry, file_id = Geometry(RECORD, COUNT), b"f" * 16
    entry = Entry(NO_KEY, NO_KEY, Owner(b"n" * 16, b"m" * 16, 0), RECORD, 1, 0, 0)
    raw = pack_header(geometry, file_id) + pack_entry(entry, file_id, 0)
    path = folder / "made.kv"
    path.write_bytes(raw.ljust(geometry.file_bytes, b"\0"))
    path.chmod(0o600)
    assert opened_and_read(folder) == ([], 1)
