"""A disk that stalls in each of its calls: cancelled loads, demotions and operators beside it.

The disk is a real store whose reads, writes, erasures or new files wait for an event. The tier in
front of it goes on meanwhile, and every request is answered.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_tiers import FakePool, FakeStaging, FakeStore, keys_of, record_of
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.errors import SegmentBusyError
from kvelastic.shared import segment, tier_status
from kvelastic.shared.segment_listing import SegmentInfo
from kvelastic.shared.tier_status import TierAck, TierRequest
from kvelastic.tiers.base import Selection
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.policy import Rules
from kvelastic.tiers.publisher import show
from kvelastic.tiers.stores.disk.file import Answers, DataFile
from kvelastic.tiers.stores.disk.store import DiskStore

OPERATORS = 20
MIB = 1 << 20


class Stall:
    """Calls of one kind that wait until they are let go."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.began = threading.Event()
        self.release = threading.Event()

    def at(self, kind: str) -> None:
        if kind == self.kind and not self.release.is_set():
            self.began.set()
            assert self.release.wait(DEADLINE_S)


class StallingFiles:
    """Records of files; the stall holds no lock of the store."""

    def __init__(self) -> None:
        self.stall = Stall("none")
        self._io = _vmm.RecordIo("auto", 4)

    def write(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> Answers:
        self.stall.at("put")
        return self._io.write(places, views, keys)

    def read(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> Answers:
        self.stall.at("get")
        return self._io.read(places, views, keys)


class World:
    """A tier in memory in front of a disk, shown on a status file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        staging: Any = FakeStaging(16)
        pool: Any = FakePool()
        self.staging = staging
        self.pool = pool
        self.near = FakeStore("host", self.staging)
        files: Any = StallingFiles()
        self.files = files
        self.far = DiskStore([folder], self.staging.record_bytes, MIB, io=files)
        self.reading = threading.Event()
        get = self.far.get

        def seen_get(keys: bytes, into: Sequence[memoryview]) -> list[bool]:
            self.reading.set()
            return get(keys, into)

        monkeypatch.setattr(self.far, "get", seen_get)
        self.now_s = 0.0
        self.tiers = Tiers(
            self.pool,
            self.staging,
            Namespace("m"),
            [self.near, self.far],
            Rules(idle_after_s=1e9, watermark=0.0, tick_s=0.01),
            clock=lambda: self.now_s,
        )
        # These two stall with the store's lock held.
        sync, create = DataFile.sync, DataFile.create

        def stalling_sync(file: DataFile) -> None:
            self.files.stall.at("erase")
            sync(file)

        monkeypatch.setattr(DataFile, "sync", stalling_sync)

        def stalling_create(folder: int, geometry: object) -> DataFile:
            self.files.stall.at("grow")
            return create(folder, geometry)  # type: ignore[arg-type]

        monkeypatch.setattr(DataFile, "create", staticmethod(stalling_create))

    def put_far(self, numbers: Sequence[int]) -> None:
        views = [memoryview(record_of(number)) for number in numbers]
        assert all(self.far.put(keys_of(numbers), views))

    def stall(self, kind: str) -> Stall:
        """Have a call of this kind stall; answers when it does."""
        if kind != "grow":
            self.put_far(range(1, 9))
        stall = self.files.stall = Stall(kind)
        if kind == "get":
            self.cancel_a_load()
        elif kind == "erase":
            self.begin(lambda: self.far.erase(keys_of([7])))
        else:
            self.pool.put_dirty(range(100, 104))
            assert self.pool.shrink("limit")
        assert stall.began.wait(DEADLINE_S)
        if kind == "erase":
            self.cancel_a_load()
        return stall

    def cancel_a_load(self) -> None:
        with self.tiers.match(keys_of(range(1, 5))) as match:
            load = self.tiers.load(match, [50, 51, 52, 53])
        assert self.reading.wait(DEADLINE_S)
        load.cancel()
        assert load.wait(DEADLINE_S)

    def begin(self, work: Callable[[], object]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def is_stuck(self) -> bool:
        return 1 in self.tiers.stuck_tiers

    def wait_until_stuck(self) -> None:
        """Far more time passes than a tier may take."""

        def looked() -> bool:
            self.now_s += 1000.0
            self.tiers.drain(0)
            return self.is_stuck()

        wait_until(looked)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path / "disk", monkeypatch)
    yield made
    made.files.stall.release.set()
    assert made.tiers.close(DEADLINE_S) == []


STALLS = ["get", "put", "erase", "grow"]


@pytest.mark.parametrize("kind", STALLS)
def test_front_tier_works_while_the_disk_stalls(world: World, kind: str) -> None:
    stall = world.stall(kind)
    world.wait_until_stuck()
    for first in (200, 300, 400):
        world.pool.put_dirty(range(first, first + 8))
        assert world.pool.shrink("limit")
        with world.tiers.match(keys_of(range(first, first + 8))) as match:
            assert match.count == 8
            load = world.tiers.load(match, list(range(first + 8, first + 16)))
        assert load.wait(DEADLINE_S)
        assert load.leading == 8
    stall.release.set()
    assert world.tiers.drain(DEADLINE_S)
    world.tiers.check_integrity()
    assert not world.is_stuck()
    assert world.tiers.erase(Selection())[1] >= 0
    assert world.far.capacity().records == 0


REQUESTS = [
    TierRequest("limit", "disk", MIB),
    TierRequest("trim", "disk", 0),
    TierRequest("limit", "host", MIB),
    TierRequest("clear"),
    TierRequest("erase", model="m"),
    TierRequest("verify"),
]


@pytest.mark.parametrize("kind", STALLS)
def test_operators_are_answered_while_the_disk_stalls(world: World, kind: str) -> None:
    name = f"stalled_{os.getpid()}_{random.randrange(1 << 40):x}"
    with segment.create(name, engine="test"):
        info = segment.inspect(name)
        assert show(world.tiers, info.header["uuid"]) is not None
        stall = world.stall(kind)
        world.wait_until_stuck()
        answers: list[tuple[TierRequest, TierAck | None]] = []

        def operate(number: int) -> None:
            request = REQUESTS[number % len(REQUESTS)]
            for _ in range(2):
                answer = None
                while answer is None:
                    # As many as there is room for wait at once.
                    with suppress(SegmentBusyError):
                        answer = tier_status.ask(info, request, DEADLINE_S)
                answers.append((request, answer))

        threads = [threading.Thread(target=operate, args=(at,)) for at in range(OPERATORS)]
        for thread in threads:
            thread.start()
        world.pool.put_dirty(range(200, 208))
        # Beside an erasure a copy is dropped, and its block stays dirty for the next one.
        wait_until(lambda: world.pool.shrink("limit"), "no block leaves for the tier in front")
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(answers) == 2 * OPERATORS
        for request, answer in answers:
            assert answer is not None
            if request.tier == "host":
                assert answer.state == "refused", "a stand-in has no limit"
            else:
                assert answer.state == "failed"
                assert "disk" in answer.reason
        left = [one for one in threading.enumerate() if one.name == "kvelastic-operator"]
        assert len(left) <= 1, "requests that hang have piled up"
        stall.release.set()
        assert world.tiers.drain(DEADLINE_S)
        for request in (TierRequest("verify"), TierRequest("clear"), REQUESTS[0]):
            wait_until(partial(_is_done, info, request))
        assert world.far.capacity().records == 0


def _is_done(info: SegmentInfo, request: TierRequest) -> bool:
    answer = tier_status.ask(info, request, DEADLINE_S)
    return answer is not None and answer.state == "done"
