"""Stamped records for the tests of stores on disks: whose they are can be told from their bytes.

python disk_records.py write FOLDER RECORD_BYTES LIMIT_BYTES FIRST      puts until it is killed
"""

from __future__ import annotations

import fcntl
import hashlib
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvelastic.tiers.base import NO_KEY, Store
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.disk.store import DiskStore

NUMBERS = 3000
"""What `anything` puts and erases begins below this, and ends 30 above it at most."""
MODEL = Namespace(model="one", block_tokens=16)


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()[:16]


def keys(numbers: Iterable[int]) -> bytes:
    return b"".join(key(number) for number in numbers)


def record(number: int, record_bytes: int) -> memoryview:
    return memoryview(hashlib.shake_128(b"record %d" % number).digest(record_bytes))


def put(store: Store, numbers: Iterable[int], **more: Any) -> list[bool]:
    numbers = list(numbers)
    return store.put(keys(numbers), [record(n, store.record_bytes) for n in numbers], **more)


def whole(store: Store, numbers: Iterable[int]) -> list[int]:
    """Which of these can be read; fails where one of them is another's, or is not whole."""
    numbers = list(numbers)
    views = [memoryview(bytearray(store.record_bytes)) for _ in numbers]
    answers = store.get(keys(numbers), views)
    found = []
    for number, answer, view in zip(numbers, answers, views, strict=True):
        if answer:
            assert view == record(number, store.record_bytes), f"record {number} is wrong"
            found.append(number)
    return found


def open_store(folder: Path, record_bytes: int, limit_bytes: int, **more: Any) -> DiskStore:
    return DiskStore([folder], record_bytes, limit_bytes, MODEL, **more)


def disk_bytes(folder: Path) -> int:
    """What the files of a folder take; under the lock with which engines make and remove them."""
    with (folder / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = [path for path in folder.iterdir() if path.suffix != ".live"]
        return sum(path.stat().st_blocks * 512 for path in names)


def _write(folder: str, record_bytes: str, limit_bytes: str, first: str) -> None:
    store = open_store(Path(folder), int(record_bytes), int(limit_bytes))
    number = int(first)
    while True:
        put(store, range(number, number + 8))
        number += 8
        print(number, flush=True)


def _anything(folder: str, record_bytes: str, limit_bytes: str, seed: str) -> None:
    rng = random.Random(int(seed))
    limit = int(limit_bytes)
    store = open_store(Path(folder), int(record_bytes), limit)
    while True:
        first = rng.randrange(NUMBERS)
        numbers = range(first, first + rng.randint(1, 30))
        kind = rng.randrange(12)
        if kind < 7:
            put(store, numbers, chain_after=NO_KEY)
        elif kind < 9:
            whole(store, numbers)
        elif kind == 9:
            store.erase(keys(numbers))
        elif kind == 10:
            store.set_limit(rng.choice((limit, limit // 2, limit // 4, limit)))
        else:
            store.close()
            store = open_store(Path(folder), int(record_bytes), limit)
        print(kind, flush=True)


if __name__ == "__main__":
    {"write": _write, "anything": _anything}[sys.argv[1]](*sys.argv[2:])
