"""Instances killed at any moment, and many at once: every byte is somebody's, and none is two's."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from ledger_instance import BLOCKS_PER_PAGE as B
from ledger_instance import PAGE_BYTES as PAGE
from ledger_instance import Instance
from processes import LineProgram
from waiting import wait_until

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.slow


SHM = Path("/dev/shm")
PAGES = 24
SAME_LOOKS = 5
"""A look at a ledger is no snapshot: what a page leaves while another one gets it may be counted
twice. Pages that are granted twice are seen as often as one looks."""


class Group:
    """Instances of one ledger, and a thread that watches it all the time."""

    def __init__(self, pages: int = PAGES) -> None:
        self.name = f"test-{os.getpid()}-{random.randrange(1 << 32):x}"
        self.pages = pages
        self.wrong: list[str] = []
        self.looks = self.full_looks = 0
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._stack = ExitStack()

    def start(self, **environ: str) -> Instance:
        settings = {
            "KVELASTIC_LEDGER": self.name,
            "KVELASTIC_HOST_MEMORY": str(self.pages * PAGE),
            "KVELASTIC_RECLAIM_WAIT": "0.005",
        }
        return self._stack.enter_context(Instance(**settings | environ))

    def look(self) -> ledger.LedgerInfo | None:
        found = [info for info in ledger.list_ledgers() if info.group == self.name]
        assert len(found) <= 1, "two ledgers of one device"
        return found[0] if found else None

    def _granted(self) -> tuple[int, ...]:
        info = self.look()
        return tuple(member.granted_bytes for member in info.members) if info else ()

    def _watch(self) -> None:
        while not self._stop.is_set():
            granted = self._granted()
            self.looks += 1
            self.full_looks += sum(granted) == self.pages * PAGE
            if sum(granted) > self.pages * PAGE and all(
                self._granted() == granted for _ in range(SAME_LOOKS)
            ):
                self.wrong.append(f"{sum(granted) // PAGE} pages are granted: {granted}")
            time.sleep(0.0005)

    def __enter__(self) -> Group:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._stop.set()
        self._watcher.join()
        ledger.reap()
        segment.reap()
        assert self.wrong == []
        assert self.look() is None


@pytest.fixture
def group() -> Iterator[Group]:
    with Group() as made:
        yield made
        assert made.looks > 10


def names_in_shared_memory() -> set[str]:
    return {path.name for path in SHM.iterdir()}


def _usage_equals_grant(one: Instance) -> bool:
    return bool(one.ask("granted") == one.mapped_bytes)


@pytest.mark.timeout(3600)  # a thousand of them on a busy machine
@pytest.mark.parametrize("kills", [12, pytest.param(1000, marks=pytest.mark.soak)])
def test_killed_instances_release_all_grants(group, kills):
    """A group of four that take, cache and give back; one is killed, another takes its place."""
    moments = random.Random(7)
    pids = set()
    survived = 0

    def churning() -> Instance:
        one = group.start(
            KVELASTIC_MIN=str(2 * PAGE), KVELASTIC_PRIORITY=str(moments.randint(0, 1))
        )
        one.send("churn", 0.1, 12)
        pids.add(one.pid)
        return one

    alive = [churning() for _ in range(4)]
    for kill in range(kills):
        time.sleep(moments.random() * 0.02)  # the moment: any will do
        victim = alive.pop(moments.randrange(4))
        victim.kill()
        # The bytes are back with the next look, whatever the others do meanwhile.
        ledger.reap()
        info = group.look()
        assert info is not None
        assert victim.pid not in [member.pid for member in info.members]
        assert victim.name in segment.reap() or victim.name not in names_in_shared_memory()

        if kill % 4 == 3:  # they rest, and the books are compared to the last byte
            for one in alive:
                counts = one.read()  # of a churn that ends with check_integrity()
                assert counts["got"] + counts["none"] > 0
                survived += counts["got"]
            for one in alive:
                # What the maintenance thread is at may still change: compare when it does not.
                wait_until(
                    partial(_usage_equals_grant, one),
                    "a survivor holds what it was not granted",
                )
                one.ask("check_integrity")

            def adds_up() -> bool:
                info = group.look()
                assert info is not None
                held = {one.pid: one.mapped_bytes for one in alive}
                return {m.pid: m.granted_bytes for m in info.members} == held

            wait_until(adds_up, "bytes are granted that nobody holds")
        else:
            # A churn that has ended starts again with the next rest at the latest.
            for one in alive:
                survived += one.read()["got"]
        for one in alive:
            one.send("churn", 0.1, 12)
        alive.append(churning())
    for one in alive:
        survived += one.read()["got"]
        one.close()
    assert survived > kills
    segment.reap()
    ledger.reap()
    left = {name for name in names_in_shared_memory() for pid in pids if f"_{pid}" in name}
    assert left == set()
    assert group.look() is None


# Takes and gives back grants without any pool, as fast as it can: most of its life is between two
# steps of a grant.
GRABBER = """
import os, random, sys
from kvelastic.shared import ledger
dice = random.Random(os.getpid())
with ledger.join("bare", group=sys.argv[1], capacity_bytes=int(sys.argv[2]), name="n",
                 uuid=bytes(16)) as place:
    print("here", flush=True)
    member, page_bytes = place.member, 2 << 20
    while True:
        got = member.grant(dice.randint(1, 9), page_bytes)
        member.request_memory(dice.randint(1, 9) * page_bytes)
        member.publish(0, got * page_bytes, 0, page_bytes, active=True)
        member.handled(member.open_reclaim()[0])
        member.give_back(got, page_bytes)
        member.end_memory_request()
"""


@pytest.mark.parametrize("kills", [10, pytest.param(300, marks=pytest.mark.soak)])
def test_grants_interrupted_by_sigkill_are_recovered(kills):
    """Also the claim that nobody ends goes with its owner."""
    group = f"test-{os.getpid()}-bare"
    path = ledger.ledger_path(group, "bare")
    moments = random.Random(8)

    def grabber() -> LineProgram:
        process = LineProgram("-c", GRABBER, group, str(PAGES * PAGE))
        assert process.read() == "here"
        return process

    alive = [grabber() for _ in range(3)]
    try:
        for _ in range(kills):
            time.sleep(moments.random() * 0.01)
            alive.pop(0).kill()
            alive.append(grabber())
    finally:
        for process in alive:
            process.kill()
    with ledger.join(
        "bare", group=group, capacity_bytes=PAGES * PAGE, name="n", uuid=bytes(16)
    ) as mine:
        assert mine.member.grant(PAGES + 1, PAGE) == PAGES, "bytes of the dead are lost"
    assert not path.exists()


@pytest.mark.parametrize("seconds", [2.5, pytest.param(60.0, marks=pytest.mark.soak)])
def test_eight_instances_share_memory_without_starvation(seconds):
    with Group(pages=40) as group:
        all_of_them = [group.start() for _ in range(8)]
        for one in all_of_them:
            one.send("churn", seconds, 24)
        counts = [one.read() for one in all_of_them]
        got = [count["got"] for count in counts]
        assert min(got) > 0
        # How many of its allocs succeed does not depend on how long each of them ran.
        rates = [count["got"] / (count["got"] + count["none"]) for count in counts]
        assert min(rates) * 5 >= sum(rates) / len(rates), f"one gets far less: {counts}"
        assert sum(count["none"] for count in counts) > 0, "nothing was at stake"
        assert group.full_looks > 0, "the device was never full"

        def adds_up() -> bool:
            info = group.look()
            assert info is not None
            held = {one.pid: one.mapped_bytes for one in all_of_them}
            return {m.pid: m.granted_bytes for m in info.members} == held

        wait_until(adds_up, "bytes are granted that nobody holds")
        for one in all_of_them:
            one.ask("check_integrity")
            one.ask("clear")
            one.ask("trim")
        for one in all_of_them[1:]:
            one.close()
        # All of it, for the one that is left, but the null block.
        assert len(all_of_them[0].alloc(40 * B - 1) or ()) == 40 * B - 1
