"""Stores that outlive the process are used once the weights are hashed, and never before."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import DEADLINE_S, wait_until

from kvelastic.config import load
from kvelastic.device.selection import host
from kvelastic.errors import InvalidArgumentError
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool
from kvelastic.shared.tier_status import TierRequest
from kvelastic.tiers import hash_cache, weights_fingerprint
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Selection, Store
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.opening import open_tiers
from kvelastic.tiers.operator_requests import carry_out
from kvelastic.tiers.stores.disk.store import DiskStore
from kvelastic.tiers.stores.identified import IdentifiedStore
from kvelastic.tiers.weights_fingerprint import WeightFiles

RECORD_BYTES = 4096
WORLD = Namespace("m", weights="settings", record_bytes=RECORD_BYTES)
LIMIT_BYTES = 8 << 20


def key(number: int) -> bytes:
    return random.Random(number).randbytes(KEY_BYTES)


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def record(number: int) -> memoryview:
    return memoryview(bytearray([number]) * RECORD_BYTES)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    return folder


@contextmanager
def opened(disk: Path, *, fingerprint: str | None = None) -> Iterator[IdentifiedStore]:
    store = IdentifiedStore(DiskStore([disk], RECORD_BYTES, LIMIT_BYTES, WORLD))
    store.enter(WORLD)
    if fingerprint is not None:
        store.identify(fingerprint)
    yield store
    store.check_integrity()
    store.close()


def found(store: Store, numbers: Sequence[int]) -> list[int]:
    """Those of these records that are read whole."""
    views = [memoryview(bytearray(RECORD_BYTES)) for _ in numbers]
    whole = store.get(keys(*numbers), views)
    assert whole == store.has(keys(*numbers))
    for number, view, is_whole in zip(numbers, views, whole, strict=True):
        assert not is_whole or view == record(number), "a wrong record was served"
    return [number for number, is_whole in zip(numbers, whole, strict=True) if is_whole]


# --- the store ------------------------------------------------------------------------------------


def test_wrapper_forwards_every_store_method() -> None:
    """A default of the base class would hide what the inner store does."""
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public <= set(vars(IdentifiedStore)) | {
        "name",
        "record_bytes",
        "asks_medium",
        "takes_records",
    }


class Untouched(DiskStore):
    """A store that may not be asked for a record."""

    def _refuse(self, *arguments: object, **more: object) -> None:
        raise AssertionError("a store whose weights are not known was asked")

    enter = has = leading = hold = reserve = put = get = erase = _refuse  # type: ignore[assignment]


def test_unidentified_store_reads_and_writes_nothing(disk: Path) -> None:
    store = IdentifiedStore(Untouched([disk], RECORD_BYTES, LIMIT_BYTES, WORLD))
    store.enter(WORLD)
    assert not store.is_ready
    assert store.has(keys(1, 2)) == [False, False]
    assert store.leading(keys(1)) == (0, 0)
    with store.hold(keys(1)) as hold:
        assert hold.count == 0
    assert store.put(keys(1), [record(1)], chain_after=NO_KEY) == [False]
    assert store.get(keys(1), [record(0)]) == [False]
    reservation = store.reserve(keys(1))
    assert reservation is not None
    assert store.erase(keys(1)) == 0
    assert store.erase_matching(Selection(namespace=WORLD)) == 0
    with pytest.raises(InvalidArgumentError):
        store.put(b"short", [record(1)])
    store.close()


def test_objects_are_found_only_with_same_weights(disk: Path) -> None:
    with opened(disk, fingerprint="a") as store:
        assert store.is_ready
        assert all(store.put(keys(1, 2), [record(1), record(2)], chain_after=NO_KEY))
        assert found(store, [1, 2, 3]) == [1, 2]
    with opened(disk, fingerprint="b") as store:
        assert found(store, [1, 2]) == []
        assert all(store.put(keys(1), [record(1)], chain_after=key(7)))
    with opened(disk) as store:
        assert found(store, [1, 2]) == []
        store.identify("a")
        assert found(store, [1, 2]) == [1, 2]
        with store.hold(keys(1, 2, 3)) as hold:
            assert hold.count == 2
        assert store.leading(keys(1, 2, 3))[0] == 2


def test_namespace_is_erased_only_for_these_weights(disk: Path) -> None:
    with opened(disk, fingerprint="a") as store:
        store.put(keys(1), [record(1)])
    with opened(disk, fingerprint="b") as store:
        store.put(keys(1), [record(1)])
        assert store.erase_matching(Selection(namespace=WORLD)) == 1
        assert found(store, [1]) == []
    with opened(disk, fingerprint="a") as store:
        assert found(store, [1]) == [1]
    with opened(disk) as store:
        assert store.erase_matching(Selection(model="m")) == 1, "needs no identity"


def test_generation_ended_before_identification_stays_ended(disk: Path) -> None:
    with opened(disk) as store:
        store.enter(WORLD.next_generation())
        store.identify("a")
        store.put(keys(1), [record(1)])
        assert store.erase_matching(Selection(namespace=WORLD)) == 0
        assert store.erase_matching(Selection(namespace=WORLD.next_generation())) == 1


# --- tiers of an engine ---------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, which remembers files however young they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hash_cache, "_SETTLED_NS", -60_000_000_000)


class Hashing:
    """The thread that hashes stands until it is let go."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()
        self.files = 0


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    held = Hashing()
    original = weights_fingerprint._hash

    def hash_when_told(path: str, is_cancelled) -> str:
        held.files += 1
        held.has_begun.set()
        while not held.may_go_on.wait(0.01):
            if is_cancelled():
                break
        return original(path, is_cancelled)

    monkeypatch.setattr(weights_fingerprint, "_hash", hash_when_told)
    yield held
    held.may_go_on.set()


@contextmanager
def engine(model: Path, disk: Path) -> Iterator[tuple[ElasticPool, Tiers]]:
    """A pool with a disk tier, as an engine opens it."""
    settings = load({"KVELASTIC_TIERS": f"disk:{disk}:64M", "KVELASTIC_TIER_IDLE_SECONDS": "-1"})
    machine = host(settings)
    layout = PageLayout.solve(64 << 10, 1, page_size_bytes=2 << 20)
    weights = WeightFiles.at(str(model))
    with open_pool(
        settings,
        layout,
        pages=4,
        num_blocks=64,
        block_tokens=16,
        engine="test",
        devices=[machine],
        memory=local_range(machine),
    ) as pool:
        tiers = open_tiers(pool, settings, Namespace(str(model)), weights=weights)
        assert tiers is not None
        try:
            yield pool, tiers
        finally:
            tiers.close()


def demote(pool: ElasticPool, tiers: Tiers, number: int) -> None:
    """A block is computed, cached, and taken away."""
    ids = pool.blocks.alloc(1)
    assert ids is not None
    pool.blocks.cache(ids, key(number))
    tiers.clean_all(DEADLINE_S if tiers.stores[0].is_ready else 0.0)
    pool.blocks.sleep()
    assert pool.blocks.take_changes()
    pool.blocks.wake()


def count_found(tiers: Tiers, number: int) -> int:
    with tiers.match(key(number)) as match:
        return match.count


def count_objects_on(disk: Path) -> int:
    store = DiskStore([disk], 64 << 10, 64 << 20)
    try:
        return store.capacity().records
    finally:
        store.close()


def test_disk_is_used_once_weights_are_hashed(model: Path, disk: Path, hashing: Hashing) -> None:
    with engine(model, disk) as (pool, tiers):
        assert hashing.has_begun.wait(DEADLINE_S)
        demote(pool, tiers, 1)
        assert count_found(tiers, 1) == 0
        hashing.may_go_on.set()
        wait_until(lambda: tiers.stores[0].is_ready, "the weights are known")
        demote(pool, tiers, 2)
        assert (count_found(tiers, 1), count_found(tiers, 2)) == (0, 1)
    assert count_objects_on(disk) == 1

    # The next start reads no file, and has the disk from its first request on.
    hashing.may_go_on.clear()
    with engine(model, disk) as (_, tiers):
        assert tiers.stores[0].is_ready
        assert count_found(tiers, 2) == 1
    assert hashing.files == 1


def test_changed_weights_find_no_objects(model: Path, disk: Path) -> None:
    with engine(model, disk) as (pool, tiers):
        wait_until(lambda: tiers.stores[0].is_ready, "the weights are known")
        demote(pool, tiers, 1)
        assert count_found(tiers, 1) == 1
    (model / "model.safetensors").write_bytes(b"weightz" * 1000)
    with engine(model, disk) as (_, tiers):
        wait_until(lambda: tiers.stores[0].is_ready, "the weights are known")
        assert count_found(tiers, 1) == 0


def test_weights_changed_before_hashing_are_used_privately(
    model: Path, disk: Path, hashing: Hashing, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has loaded the old files or the new ones: nobody knows."""
    logging.getLogger("kvelastic").propagate = True
    with caplog.at_level("WARNING", "kvelastic"), engine(model, disk) as (pool, tiers):
        assert hashing.has_begun.wait(DEADLINE_S)
        (model / "model.safetensors").write_bytes(b"weightz" * 1000)
        hashing.may_go_on.set()
        wait_until(lambda: tiers.stores[0].is_ready, "the tier is of this process")
        demote(pool, tiers, 1)
        assert count_found(tiers, 1) == 1
    assert "model.safetensors has changed since the engine started" in caplog.text
    with engine(model, disk) as (_, tiers):
        wait_until(lambda: tiers.stores[0].is_ready, "the weights are known")
        assert count_found(tiers, 1) == 0


def test_close_during_hashing_leaves_no_thread(model: Path, disk: Path, hashing: Hashing) -> None:
    with engine(model, disk) as (_, tiers):
        assert hashing.has_begun.wait(DEADLINE_S)
    assert not tiers.stores[0].is_ready
    assert "kvelastic-hash" not in [thread.name for thread in threading.enumerate()]


def test_clear_requires_hashed_weights_and_erase_does_not(
    model: Path, disk: Path, hashing: Hashing
) -> None:
    with engine(model, disk) as (_, tiers):
        answer = carry_out(1, TierRequest("clear"), tiers)
        assert answer.state == "failed"
        assert "weights are being hashed" in answer.reason
        answer = carry_out(2, TierRequest("erase", model=str(model)), tiers)
        assert answer.state == "done"
        hashing.may_go_on.set()
        wait_until(lambda: tiers.stores[0].is_ready, "the weights are known")
        answer = carry_out(3, TierRequest("clear"), tiers)
        assert answer.state == "done"
