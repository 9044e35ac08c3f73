"""Instances at work, killed, stopped, limited, put to sleep and joined by others, all at random.

Every so often all of them are stopped at whatever they do, and what the kernel says is resident is
compared with what the ledger has granted to each. Nothing of this is timed: what is compared holds
at every moment, and what takes time (a limit that converges) is waited for at a rest.

    CHAOS_SEED=7 CHAOS_SECONDS=60 pytest tests/crash/test_chaos.py -k short

What is done follows from the seed; at what the instances are then does not.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stamped_instance import PAGE_BYTES, Stamped
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError
from kvelastic.shared import ledger, segment, segment_listing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SEED = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
SECONDS = os.environ.get("CHAOS_SECONDS")
SHM = Path("/dev/shm")
CAPACITY_PAGES = 40
INSTANCES = 5
FREEZES = 8
NAMES = 8
"""Of instances; fewer than are started, so that names are used again."""
NEEDED = (
    "kills", "stops", "requests", "frozen", "all granted", "rests", "reads", "joins", "moved",
    "larger reserves", "reserved while frozen", "asleep with a reserve", "woken with a reserve",
)  # fmt: skip
"""What happens at least twice, of what is counted."""


def _flip_one_bit(raw: bytearray, pick: random.Random) -> bytes:
    raw[pick.randrange(min(len(raw), 4096))] ^= 1 << pick.randrange(8)
    return bytes(raw)


CORRUPTIONS: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "empty": lambda _, __: b"",
    "cut": lambda raw, pick: bytes(raw[: pick.randrange(len(raw))]),
    "one bit": _flip_one_bit,
    "noise": lambda raw, pick: pick.randbytes(len(raw)),
    "noise behind the header": lambda raw, pick: bytes(raw[:512]) + pick.randbytes(len(raw) - 512),
}


class Chaos:
    """The instances, and what is done to them."""

    def __init__(self, pick: random.Random, logs: Path) -> None:
        self.pick = pick
        self.counts: Counter[str] = Counter()
        self._logs = logs
        self._group = f"chaos-{os.getpid()}-{pick.randrange(1 << 32):x}"
        self._prefix = f"kvelastic_chaos_{os.getpid()}"
        self._live: list[Stamped] = []
        self._starting: list[Stamped] = []
        self._joiners: list[Stamped] = []
        self._inodes: dict[int, int] = {}
        """Of the segments of the live ones, by pid."""
        self._dead_pids: list[int] = []
        self._seen_asleep: set[bytes] = set()
        """Of those that reserve something, at the last look."""
        self._started = 0

    # --- instances --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to start one more. Its name may be taken, by a live one or by a broken segment."""
        self._starting.append(
            self._launch(
                f"{self._prefix}_{self.pick.randrange(NAMES)}",
                KVELASTIC_MIN=str(self.pick.choice([0, 0, 1, 4, 12]) * PAGE_BYTES),
                KVELASTIC_RESERVE=str(self.pick.choice([0, 1, 4]) * PAGE_BYTES),
                KVELASTIC_PRIORITY=str(self.pick.randint(-1, 1)),
                KVELASTIC_IDLE_TRIM_SECONDS=self.pick.choice(["0.02", "0.2", "-1"]),
                KVELASTIC_MAX_CACHED_TOKENS=self.pick.choice(["-1", "640"]),
                KVELASTIC_PAGE_PREALLOC_ENABLED=self.pick.choice(["true", "false"]),
            )
        )

    def fill_up(self, least: int = INSTANCES - 2) -> None:
        """Start as many as are missing; wait for them where too few are there."""
        while len(self._live) + len(self._starting) < INSTANCES:
            self.start()
        while len(self._live) < least or any(one.has_said_something() for one in self._starting):
            ready = next((one for one in self._starting if one.has_said_something()), None)
            self._greet(ready or self._starting[0])
            if not self._starting:
                self.start()

    def _greet(self, one: Stamped) -> None:
        """It has started, or says why it could not."""
        self._starting.remove(one)
        problem = one.wait_until_ready()
        if not problem:
            self._live.append(one)
            self._inodes[one.pid] = (SHM / one.name).stat().st_ino
            return
        # Guarantees and reserves may be more than there is, or others may not have given in time;
        # who was stopped may have held the ledger's lock.
        is_expected = problem.split(":")[0] in {"SEGMENT_EXISTS", "GUARANTEE", "RESERVE"}
        assert is_expected or "has held the lock" in problem, problem
        self.counts[f"refused: {problem.split(':')[0]}"] += 1
        one.leave()

    def start_joiner(self) -> None:
        """One that comes and goes."""
        one = self._launch(f"{self._prefix}_joiner{self._started}", "--joins")
        assert one.wait_until_ready() == ""
        self._joiners.append(one)

    def _launch(self, name: str, *arguments: str, **environ: str) -> Stamped:
        self._started += 1
        settings = {
            "KVELASTIC_LEDGER": self._group,
            "KVELASTIC_HOST_MEMORY": str(CAPACITY_PAGES * PAGE_BYTES),
            "KVELASTIC_RECLAIM_WAIT": "0.02",
            "KVELASTIC_SANITY_CHECK": "true",
        }
        log = self._logs / f"{self._started}.log"
        seed = str(self.pick.randrange(1 << 32))
        return Stamped(name, log, seed, *arguments, **(settings | environ))

    def _kill(self, one: Stamped) -> None:
        one.kill()
        self._dead_pids.append(one.pid)
        self.counts["kills"] += 1

    # --- what happens -------------------------------------------------------------------------

    def do_something(self) -> None:
        """One thing of all that can be done."""
        things = {
            self.kill: 4, self.leave: 1, self.stop_for_a_while: 6, self.request: 24, self.look: 4,
            self.compare_often: 10, self.rest: 3, self.kill_a_joiner: 1, self.kill_a_starter: 1,
        }  # fmt: skip
        self.pick.choices(list(things), list(things.values()))[0]()
        self.fill_up()
        self._all_are_well()
        self._note_sleepers()
        time.sleep(self.pick.random() * 0.02)  # the moment: any will do

    def kill(self) -> None:
        """One or two, running or stopped; their segments may lie there broken."""
        for _ in range(self.pick.choice([1, 1, 2])):
            victim = self._live.pop(self.pick.randrange(len(self._live)))
            if self.pick.random() < 0.3:
                victim.stop()
            self._kill(victim)
            inode = self._inodes.pop(victim.pid)
            if self.pick.random() < 0.5:
                self._corrupt(victim.name, inode)
            if self.pick.random() < 0.6:
                # Else the next process that reaps does it. Reaping passes over a segment whose lock
                # another process holds at that moment.
                wait_until(
                    partial(self._is_reaped, victim.name, inode), "a dead one's segment is left"
                )

    def _corrupt(self, name: str, inode: int) -> None:
        """The segment of a dead one, and never that of another which has its name by now."""
        how = self.pick.choice(list(CORRUPTIONS))
        try:
            with (SHM / name).open("r+b") as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    return
                broken = CORRUPTIONS[how](bytearray(file.read()), self.pick)
                file.seek(0)
                file.write(broken)
                file.truncate()
        except FileNotFoundError:
            return
        self.counts["corrupted segments"] += 1
        segment.list_segments()
        self._reap()
        self._remove_as_a_person(name, inode)

    def _remove_as_a_person(self, name: str, inode: int) -> None:
        """Remove what reaping does not recognise as a segment any more.

        Under the file's lock: nothing else removes it, so no starting instance takes its name.
        """
        with suppress(FileNotFoundError), (SHM / name).open("rb") as file:
            if os.fstat(file.fileno()).st_ino != inode:
                return
            with segment_listing.locked(file.fileno(), name, DEADLINE_S):
                if self._is_there(name, inode):
                    self.counts["left to a person"] += 1
                    (SHM / name).unlink()

    def _is_reaped(self, name: str, inode: int) -> bool:
        self._reap()
        return not self._is_there(name, inode)

    def _reap(self) -> None:
        """As every kvctl does it: of the dead nothing is left."""
        segment.reap()
        ledger.reap()
        info = self._ledger()
        members = [member.pid for member in info.members] if info else []
        left = [pid for pid in self._dead_pids if pid in members]
        assert not left, f"dead members of the ledger: {left}"
        self.counts["reaps"] += 1

    def leave(self) -> None:
        """In the ordinary way, stopped or not."""
        one = self._live.pop(self.pick.randrange(len(self._live)))
        one.leave()
        inode = self._inodes.pop(one.pid)
        assert not self._is_there(one.name, inode), f"{one.name} has left its segment"
        self.counts["leaves"] += 1

    def kill_a_starter(self) -> None:
        """At any point of its start."""
        if self._starting:
            self._kill(self._starting.pop())
            self.counts["killed as they started"] += 1

    def kill_a_joiner(self) -> None:
        """Most of its life is between two steps of joining or leaving."""
        self._kill(self._joiners.pop(0))
        self.start_joiner()

    def stop_for_a_while(self) -> None:
        """The others go on, and look after those who do not answer."""
        some = self.pick.sample(self._live + self._joiners, self.pick.randint(1, 3))
        for one in some:
            one.stop()
        self.counts["stops"] += len(some)
        if self.pick.random() < 0.5:
            self._reap()
        elif self.pick.random() < 0.5:
            self.request()
        time.sleep(self.pick.random() * 0.1)
        self._all_are_well()
        for one in some:
            one.go_on()

    def request(self) -> None:
        """Of limits mostly, and of several things at once."""
        pages = self.pick.choice([0, 1, 2, 4, 8, 16, CAPACITY_PAGES])
        changes: dict[str, Any] = self.pick.choice(
            [
                {"limit_bytes": pages * PAGE_BYTES},
                {"limit_bytes": pages * PAGE_BYTES},
                {"limit_bytes": 1 << 40},
                {"min_bytes": pages * PAGE_BYTES, "priority": self.pick.randint(-2, 2)},
                {"asleep": True},
                {"asleep": True},
                {"asleep": False},
                {"asleep": False},
                {"asleep": False, "limit_bytes": CAPACITY_PAGES * PAGE_BYTES},
                {"trim": True},
            ]
        )
        wait_s = self.pick.choice([0, 0, 0.02])
        names = [one.name for one in self._live]
        if changes.get("asleep") is False:
            names = self._note_sleepers() or names  # a wake of who is awake shows little
        try:
            answer = segment.request(self.pick.choice(names), wait_s=wait_s, **changes)
        except InvalidArgumentError:
            assert "min_bytes" in changes  # above the limit in force
            self.counts["guarantees above limits"] += 1
            return
        # Guarantees may be more than the device has, also those of who wakes; a limit never is.
        may_be_refused = "min_bytes" in changes or changes.get("asleep") is False
        allowed = {"applied", "shrinking", "none"} | ({"refused"} if may_be_refused else set())
        assert answer.state in allowed or not answer.is_of_the_request, (changes, answer)
        self.counts["requests"] += 1

    def _note_sleepers(self) -> list[str]:
        """Count those that sleep with a reserve, or have woken since the last look; their names."""
        info = self._ledger()
        members = info.members if info else ()
        asleep = {one.uuid for one in members if one.asleep and one.reserve_bytes}
        awake = {one.uuid for one in members if not one.asleep and one.reserve_bytes}
        self.counts["asleep with a reserve"] += len(asleep)
        self.counts["woken with a reserve"] += len(awake & self._seen_asleep)
        self._seen_asleep = asleep
        names = {member.name for member in members if member.asleep}
        return [one.name for one in self._live if one.name in names]

    def look(self) -> None:
        """As kvctl does it, which also removes the dead."""
        names = {info.name: info.status for info in segment.list_segments()}
        assert {names.get(one.name) for one in self._live} == {"alive"}
        self._reap()

    # --- what has to be so ---------------------------------------------------------------------

    def _all_are_well(self) -> None:
        for one in self._live + self._joiners:
            status = one.process.poll()
            assert one.log is not None
            text = one.log.read_text()
            assert status is None, f"{one.name} has ended: {status}; {text}"
            assert "sanity check failed" not in text, text
        for one in self._live:
            is_there = self._is_there(one.name, self._inodes[one.pid])
            assert is_there, self._why_its_segment_is_gone(one)

    def _why_its_segment_is_gone(self, one: Stamped) -> str:
        """Wait for the end of an instance that has failed: it removes its segment before that."""
        one.go_on()
        try:
            return one.how_it_ended()
        except subprocess.TimeoutExpired:
            return f"{one.name} is alive, and another process has removed its segment"

    def _is_there(self, name: str, inode: int) -> bool:
        """Another one may have the name by now."""
        try:
            return (SHM / name).stat().st_ino == inode
        except FileNotFoundError:
            return False

    def _ledger(self) -> ledger.LedgerInfo | None:
        found = [info for info in ledger.list_ledgers() if info.group == self._group]
        assert len(found) <= 1, "two ledgers of one device"
        return found[0] if found else None

    def compare_often(self) -> None:
        """What is wrong for microseconds only is met by many looks, if by any."""
        for _ in range(FREEZES):
            self.compare_frozen()
            time.sleep(self.pick.random() * 0.005)

    def compare_frozen(self) -> None:
        """All are stopped in the middle of what they do; a page without a grant would be seen."""
        everybody = self._live + self._joiners + self._starting
        for one in everybody:
            one.stop()
        info = self._ledger()
        assert info is not None, "the ledger of live instances is gone"
        granted = {member.pid: member.granted_bytes for member in info.members}
        resident = {one.pid: one.resident_bytes() for one in self._live}
        for one in self._live:
            assert one.pid in granted, f"{one.name} lives and is no member"
            assert resident[one.pid] <= granted[one.pid], (
                f"{one.name} has {resident[one.pid]} bytes and was granted {granted[one.pid]}"
            )
            self._is_within_its_limit(one, resident[one.pid])
            self.counts["comparisons"] += 1
        path = ledger.ledger_path(self._group, "host")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            _vmm.ledger_check_integrity(memory)
        total = sum(granted.values())
        capacity_bytes = CAPACITY_PAGES * PAGE_BYTES
        assert total <= capacity_bytes, f"{total} bytes are granted: {granted}"
        self.counts["all granted"] += total + info.reserved_bytes >= capacity_bytes
        self.counts["reserved while frozen"] += info.reserved_bytes > 0
        self._note_sleepers()
        self.counts["frozen"] += 1
        self.counts["resident pages"] += sum(resident.values()) // PAGE_BYTES
        for one in everybody:
            one.go_on()

    def _is_within_its_limit(self, one: Stamped, resident_bytes: int) -> None:
        with segment.open_readonly(one.name) as opened:
            request, answer = (
                opened.control_block.read_request(),
                opened.control_block.read_ack(),
            )
        if answer["state"] != "applied" or answer["revision"] != request["revision"]:
            return
        self.counts["applied requests looked at"] += 1
        limit_bytes = CAPACITY_PAGES * PAGE_BYTES
        if request["asleep"]:
            limit_bytes = 0
        elif request["limit_bytes"] is not None:
            limit_bytes = max(request["limit_bytes"], PAGE_BYTES)  # that of the null block
        assert resident_bytes <= limit_bytes, (one.name, resident_bytes, request, answer)

    def rest(self) -> None:
        """Nobody does anything: then what is held is what was granted, to the last byte."""
        while self._starting:
            self._greet(self._starting[0])
        for one in self._live + self._joiners:
            one.rest()
        for one in self._live + self._joiners:
            self.counts.update(one.read())
        self._reap()
        wait_until(lambda: not self._differences(), "memory at rest is not what is granted")
        self._adds_up()
        self.counts["rests"] += 1
        for one in self._live + self._joiners:
            one.go()

    def _adds_up(self) -> None:
        """The device's account, added up here and not by the code that keeps it.

        At rest nobody begins to claim; who was asked to wake may still be at it.
        """
        info = self._ledger()
        if info is None:
            return
        awake = [member for member in info.members if not member.asleep]
        reserved_bytes = sum(member.reserve_bytes for member in awake)
        left_bytes = CAPACITY_PAGES * PAGE_BYTES - reserved_bytes
        guaranteed_bytes = sum(member.min_bytes for member in awake)
        assert info.granted_bytes <= left_bytes, f"grants and reserves: {info}"
        assert guaranteed_bytes <= left_bytes, f"guarantees: {info}"

    def _differences(self) -> dict[str, tuple[int, int | None]]:
        """Of those who hold something else than they were granted: both."""
        info = self._ledger()
        granted = {member.pid: member.granted_bytes for member in info.members} if info else {}
        found = {one.name: (one.resident_bytes(), granted.pop(one.pid, None)) for one in self._live}
        found |= {f"process {pid}": (0, bytes_) for pid, bytes_ in granted.items()}
        return {name: both for name, both in found.items() if both[0] != both[1]}

    def end(self) -> None:
        """All of them leave, and nothing stays behind."""
        self.fill_up(INSTANCES)
        self.rest()
        while self._live:
            self.leave()
        for one in self._joiners:
            one.leave()
        self._joiners.clear()
        segment.reap()
        ledger.reap()
        pids = {str(pid) for pid in self._dead_pids}
        left = [
            path.name
            for path in SHM.iterdir()
            if self._group in path.name
            or self._prefix in path.name
            or (path.name.startswith(".kvelastic_new_") and pids & set(path.name.split("_")))
        ]
        assert not left, f"left in shared memory: {left}"

    def kill_all(self) -> None:
        """Where the test has failed."""
        for one in self._live + self._joiners + self._starting:
            one.kill()
        segment.reap()
        ledger.reap()


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0.0, id="short"), pytest.param(270.0, id="long", marks=pytest.mark.soak)],
)
def test_random_faults_corrupt_nothing_and_exceed_no_grant(seconds, tmp_path, capsys) -> None:
    with capsys.disabled():
        print(f"\nchaos: CHAOS_SEED={SEED}")
    end_s = time.monotonic() + float(SECONDS or seconds)
    chaos = Chaos(random.Random(SEED), tmp_path)
    try:
        for _ in range(2):
            chaos.start_joiner()
        chaos.fill_up(INSTANCES)
        # The short one ends when each of these has happened; without them it would show nothing.
        while time.monotonic() < end_s or any(chaos.counts[what] < 2 for what in NEEDED):
            chaos.do_something()
        chaos.end()
    finally:
        chaos.kill_all()
    counts = chaos.counts
    with capsys.disabled():
        print("chaos:", ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    assert counts["resident pages"] > counts["frozen"], "hardly anything was held"
