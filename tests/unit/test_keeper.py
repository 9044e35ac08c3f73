"""The keeper: wishes are answered whatever Python does, memory comes and goes by itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvelastic import _vmm, segment
from kvelastic.layout import PageLayout
from kvelastic.pool import native_geometry

MIB = 1 << 20
PAGES = 16
LAYOUT = PageLayout(block_bytes=256 << 10, buffers=1, blocks_per_page=8, extent_bytes=2 * MIB)
PAGE = LAYOUT.page_bytes
ANSWER_S = 10.0


class Instance:
    def __init__(self, idle_trim_s: float, **options: Any) -> None:
        self.segment = segment.create(None, engine="keepertest")
        memory = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(LAYOUT, PAGES))
        total = PAGES * PAGE
        self.pool = _vmm.Pool(
            memory, max_blocks=PAGES * 8, limit_bytes=total, capacity_bytes=total, **options
        )
        self.keeper = _vmm.Keeper.start(self.pool, self.segment.record, idle_trim_s)

    def wish(self, limit_bytes: int | None = None, *, trim: bool = False) -> int:
        with segment.open_writable(self.segment.name) as other, other.writing() as record:
            return record.write_wish(limit_bytes=limit_bytes, trim=trim)

    def answer(self, revision: int, *, settled: bool) -> dict[str, Any]:
        record = self.segment.record
        assert record.wait_answer(revision, ANSWER_S, settled=settled)
        return record.read_answer()

    def close(self) -> None:
        self.keeper.stop()
        self.segment.close()


@pytest.fixture
def instance(request: pytest.FixtureRequest) -> Iterator[Instance]:
    made = Instance(**getattr(request, "param", {"idle_trim_s": -1.0}))
    yield made
    made.close()


def test_the_start_limit_is_the_first_answer(instance: Instance) -> None:
    answer = instance.segment.record.read_answer()
    assert (answer["state"], answer["effective_limit_bytes"]) == ("applied", PAGES * PAGE)


def test_a_limit_evicts_what_is_cached_while_python_is_idle(instance: Instance) -> None:
    ids = instance.pool.alloc(100)
    assert ids is not None
    instance.pool.cache(ids)
    answer = instance.answer(instance.wish(3 * PAGE), settled=True)
    assert (answer["state"], answer["effective_limit_bytes"]) == ("applied", 3 * PAGE)
    assert instance.pool.mapped_bytes <= 3 * PAGE
    assert instance.pool.has_evicted
    evicted = instance.pool.take_evicted()
    assert set(evicted) < set(ids)
    instance.pool.check_integrity()


def test_a_limit_below_what_is_in_use_shrinks_then_holds(instance: Instance) -> None:
    ids = instance.pool.alloc(100)
    assert ids is not None
    revision = instance.wish(2 * PAGE)
    answer = instance.answer(revision, settled=False)
    assert answer["state"] == "shrinking"
    assert answer["over_bytes"] >= 11 * PAGE, "thirteen pages are in use"
    assert instance.pool.alloc(1) is None
    instance.pool.free(ids)
    assert instance.answer(revision, settled=True)["state"] == "applied"
    assert instance.pool.mapped_bytes <= 2 * PAGE


@pytest.mark.parametrize(
    ("wished", "effective", "reason"),
    [
        (0, PAGE, "one page is always held"),
        (10**15, PAGES * PAGE, ""),
        (PAGES * PAGE // 2 + 1, PAGES * PAGE // 2, ""),
    ],
)
def test_what_is_made_of_odd_limits(
    instance: Instance, wished: int, effective: int, reason: str
) -> None:
    answer = instance.answer(instance.wish(wished), settled=True)
    assert (answer["state"], answer["effective_limit_bytes"]) == ("applied", effective)
    assert answer["reason"].startswith(reason)


def test_a_limit_restored_gives_all_of_it_back(instance: Instance) -> None:
    for limit in (2 * PAGE, PAGES * PAGE, 5 * PAGE, 100 * PAGES * PAGE):
        instance.answer(instance.wish(limit), settled=True)
    ids = instance.pool.alloc(8 * PAGES - 1)
    assert ids is not None
    assert len(set(ids)) == 8 * PAGES - 1


def test_a_trim_request_gives_parked_pages_back(instance: Instance) -> None:
    ids = instance.pool.alloc(60)
    assert ids is not None
    instance.pool.free(ids)
    revision = instance.wish(trim=True)
    instance.answer(revision, settled=True)
    # The answer says that the wish was seen; a second one comes when the pages are back.
    record = instance.segment.record
    bell = record.bell
    while record.read_usage()["mapped_bytes"] != PAGE:
        record.wait_bell(bell, 0.01)
    assert record.read_usage()["parked_bytes"] == 0


@pytest.mark.parametrize("instance", [{"idle_trim_s": 0.05}], indirect=True)
def test_parked_pages_go_back_when_nothing_happens(instance: Instance) -> None:
    ids = instance.pool.alloc(60)
    assert ids is not None
    instance.pool.free(ids)
    record = instance.segment.record
    bell = record.bell
    while record.read_usage()["mapped_bytes"] != PAGE:
        record.wait_bell(bell, 0.01)
    instance.pool.check_integrity()


def test_pages_are_mapped_ahead_of_demand(instance: Instance) -> None:
    record = instance.segment.record
    taken = [instance.pool.alloc(8) for _ in range(3)]
    assert None not in taken
    bell = record.bell
    while record.read_usage()["parked_bytes"] < 5 * PAGE:
        # Demand is what wakes it: one more block, given back at once.
        instance.pool.free(instance.pool.alloc(8) or [])
        record.wait_bell(bell, 0.01)
    assert instance.pool.stats()["provision_runs"] > 0


def test_nothing_is_mapped_ahead_when_that_is_off() -> None:
    made = Instance(-1.0, preallocate=False)
    for _ in range(3):
        assert made.pool.alloc(8) is not None
    answer = made.answer(made.wish(PAGES * PAGE), settled=True)  # the keeper has been round
    assert answer["mapped_bytes"] == 4 * PAGE
    assert made.pool.stats()["provision_runs"] == 0
    made.close()


def test_wishes_wait_for_the_session(instance: Instance) -> None:
    pool = instance.pool
    ids = pool.alloc(100)
    assert ids is not None
    pool.cache(ids)
    pool.enter()
    available = pool.available_mapped()
    revision = instance.wish(2 * PAGE)
    assert not instance.segment.record.wait_answer(revision, 0.1)
    assert not pool.has_evicted
    assert pool.available_mapped() == available
    assert pool.alloc(available) is not None, "what was seen can be taken"
    pool.exit()
    instance.answer(revision, settled=False)


def test_an_answer_needs_no_gil() -> None:
    """The owner's Python thread is in one long native call; the wish is answered all the same."""
    program = (
        "import sys, threading; sys.path.insert(0, sys.argv[1])\n"
        "from test_keeper import Instance\n"
        "made = Instance(-1.0)\n"
        "ids = made.pool.alloc(100); made.pool.cache(ids)\n"
        "sys.setswitchinterval(1000)\n"
        "print(made.segment.name, flush=True)\n"
        "while True: sum(range(10**8))\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        answer = segment.wish_limit(name, 3 * PAGE, wait_s=ANSWER_S)
        assert answer.state == "applied"
        assert answer.mapped_bytes <= 3 * PAGE
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        segment.reap()


def test_stop_is_prompt_and_repeatable(instance: Instance) -> None:
    stopper = threading.Thread(target=instance.keeper.stop)
    stopper.start()
    stopper.join(ANSWER_S)
    assert not stopper.is_alive()
    instance.keeper.stop()
