"""An instance whose pages lie on several devices: a grant by every ledger, or by none."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from device_ledgers import Machine
from native_pools import HUGE, LAYOUTS
from processes import PROGRAMS, LineProgram
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device.selection import Device
from kvelastic.errors import (
    GuaranteeError,
    IntegrityError,
    InvalidArgumentError,
    LedgerError,
    ReserveError,
)
from kvelastic.pool.pool import local_range, native_geometry, open_pool
from kvelastic.shared import ledger, segment
from kvelastic.shared.device_set import capacity_bytes, copies_by_device, join_all

PAGED = LAYOUTS["paged"]
BLOCKS = PAGED.blocks_per_page


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine({"a": 8, "b": 8, "c": 4})
    yield made
    made.close()


# ----------------------------------------------------------------------------------- who is where


def test_placement_counts_a_copy_per_rank_and_device(machine: Machine) -> None:
    devices = [machine.devices[name] for name in "bba"]
    assert copies_by_device(devices) == [("b", 2), ("a", 1)]
    assert capacity_bytes(devices) == 12 * HUGE  # b has room for four pages of two copies
    mine = machine.join("bba")
    assert mine.device_set.devices == [("a", 1), ("b", 2)]
    assert mine.device_set.page_bytes == 3 * HUGE
    assert mine.device_set.capacity_bytes == 12 * HUGE
    assert [one.member.capacity_bytes for one in mine.ledgers] == [8 * HUGE, 8 * HUGE]


def test_devices_are_locked_in_one_order(machine: Machine) -> None:
    a, b = (one.member for one in machine.join("ab").ledgers)
    assert _vmm.DeviceSet([(b, [0]), (a, [1, 2])], HUGE).devices == [("a", 2), ("b", 1)]


def test_invalid_placements_are_rejected(machine: Machine) -> None:
    a = machine.join("a").ledgers[0].member
    b = machine.join("b").ledgers[0].member
    with pytest.raises(InvalidArgumentError, match="on one device at least"):
        _vmm.DeviceSet([], HUGE)
    with pytest.raises(InvalidArgumentError, match="a is named twice"):
        _vmm.DeviceSet([(a, [0]), (a, [1])], HUGE)
    with pytest.raises(InvalidArgumentError, match="rank 1 is named twice"):
        _vmm.DeviceSet([(a, [0, 1]), (b, [1])], HUGE)
    with pytest.raises(InvalidArgumentError, match="0 bytes"):
        _vmm.DeviceSet([(a, [0])], 0)
    with pytest.raises(InvalidArgumentError, match="device set is for pages of"):
        _vmm.Pool(
            _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(PAGED, 2)),
            max_blocks=8,
            limit_bytes=HUGE,
            capacity_bytes=HUGE,
            device_set=_vmm.DeviceSet([(a, [0])], 2 * HUGE),
        )


def test_start_rejected_by_one_ledger_joins_none(machine: Machine) -> None:
    machine.join("b", "owner", min_bytes=7 * HUGE)
    with pytest.raises(GuaranteeError, match=r"^b: no room for 4.00 MiB"):
        machine.join("ab", "late", min_bytes=4 * HUGE)
    assert machine.granted("a") == {}
    assert list(machine.granted("b")) == ["owner"]
    bad = machine.devices["a"], Device("b" * 65, HUGE, _vmm.HostDriver)
    with pytest.raises((LedgerError, InvalidArgumentError)):
        join_all(bad, group=machine.group, name="x", uuid=bytes(16), copy_bytes=HUGE)
    assert machine.granted("a") == {}


# ------------------------------------------------------------------------------------------ grants


def test_full_device_prevents_grants_on_the_others(machine: Machine) -> None:
    holder = machine.join("b", "holder")
    assert holder.device_set.grant(8) == 8
    mine = machine.join("ab", "mine")
    before = machine.members("a")["mine"]
    requester = machine.join("a", "requester")
    requester.device_set.request_memory(1)
    seen = requester.ledgers[0].member.bell
    assert mine.device_set.room() == mine.device_set.grant(3) == 0
    assert requester.ledgers[0].member.bell == seen, "nothing was taken on a for a moment"
    requester.device_set.end_memory_request()
    assert machine.granted("a")["mine"] == machine.granted("b")["mine"] == 0
    holder.device_set.give_back(2)
    assert mine.device_set.grant(3) == 2
    assert machine.granted("a")["mine"] == machine.granted("b")["mine"] == 2
    mine.device_set.check_integrity(2)
    with pytest.raises(IntegrityError, match=r"^a: "):
        mine.device_set.check_integrity(3)
    assert before.granted_bytes == 0
    machine.check()


def test_every_ledger_grants_its_copies(machine: Machine) -> None:
    mine = machine.join("aabc", "mine")
    assert mine.device_set.grant(99) == 4  # of two copies on a, of one on c
    assert [machine.granted(name)["mine"] for name in "abc"] == [8, 4, 4]
    assert mine.device_set.granted_bytes == 16 * HUGE
    mine.device_set.give_back(4)
    assert [machine.granted(name)["mine"] for name in "abc"] == [0, 0, 0]


def test_opposite_device_orders_do_not_deadlock(machine: Machine) -> None:
    """Neither holds a device that the other one waits for; together they hold all of both."""
    both = [machine.join("ab", "one"), machine.join("ba", "two")]
    had_all = [False, False]
    start = threading.Barrier(2)
    deadline = time.monotonic() + DEADLINE_S

    def take(which: int) -> None:
        device_set = both[which].device_set
        start.wait(DEADLINE_S)
        rounds = 0
        # One that is switched away while it holds pages keeps them: the other one may be through
        # with any number of rounds before it runs again.
        while rounds < 3000 or not (had_all[which] or time.monotonic() > deadline):
            pages = device_set.grant(8)
            had_all[which] |= pages == 8
            device_set.give_back(pages)
            rounds += 1

    threads = [threading.Thread(target=take, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert had_all == [True, True]
    for device in "ab":
        assert set(machine.granted(device).values()) == {0}
    assert both[0].device_set.grant(8) + both[1].device_set.grant(8) == 8
    machine.check()


def test_foreign_usage_is_measured_per_device(machine: Machine) -> None:
    mine = machine.join("aab", "mine")
    assert mine.device_set.grant(2) == 2
    mine.device_set.arrived(2)
    total = 8 * HUGE
    # Four pages of mine are on a: beside them two more are taken, as rank 0 has seen it.
    seen = [(total, 2 * HUGE), (total, 3 * HUGE), (total, 6 * HUGE)]
    assert mine.device_set.see_devices(lambda: seen) == "exact"
    others = {info.device: info.others_bytes for info in ledger.list_ledgers()}
    assert (others["a"], others["b"]) == (2 * HUGE, 0)
    assert mine.device_set.room() == 1
    assert mine.device_set.see_devices(lambda: [None, None, None]) == "none"


_GRANTS = """
import mmap, sys
sys.path.insert(0, sys.argv[1])
from device_ledgers import Machine
machine = Machine({"a": 8, "b": 8})
machine.group = sys.argv[2]
device_set = machine.join("ab", "victim").device_set
with open(sys.argv[3], "r+b") as file:
    rounds = mmap.mmap(file.fileno(), 1)
print("ready", flush=True)
while True:
    device_set.give_back(device_set.grant(1))
    rounds[0] = (rounds[0] + 1) % 256
"""


def test_process_killed_during_a_grant_keeps_nothing_granted(
    machine: Machine, tmp_path: Path
) -> None:
    """SIGSTOP until one ledger has granted and the other has not, then SIGKILL."""
    mine = machine.join("ab", "mine")
    counter = tmp_path / "rounds"
    counter.write_bytes(bytes(1))
    with (
        LineProgram("-c", _GRANTS, PROGRAMS, machine.group, counter) as victim,
        counter.open("r+b") as file,
        mmap.mmap(file.fileno(), 1) as rounds,
    ):
        assert victim.read() == "ready"

        def is_partly_granted() -> bool:
            seen = rounds[0]
            while rounds[0] == seen:  # it has gone on since it was stopped last
                assert victim.process.poll() is None
            os.kill(victim.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, victim.pid, os.WSTOPPED)
            if machine.granted("a")["victim"] != machine.granted("b")["victim"]:
                return True
            os.kill(victim.pid, signal.SIGCONT)
            return False

        wait_until(is_partly_granted, "it was never seen in the middle of a grant")
    ledger.reap()
    assert [machine.granted(name) for name in "ab"] == [{"mine": 0}, {"mine": 0}]
    assert mine.device_set.grant(8) == 8
    machine.check()


# -------------------------------------------------------------------------- guarantee and reserve


def test_guarantee_is_divided_by_copies(machine: Machine) -> None:
    mine = machine.join("aab", "mine", min_bytes=6 * HUGE)
    assert mine.device_set.min_bytes == 6 * HUGE
    assert machine.members("a")["mine"].min_bytes == 4 * HUGE
    assert machine.members("b")["mine"].min_bytes == 2 * HUGE
    # Whole pages count, which are the 6 MiB of all copies here.
    for asked_bytes, pages in ((12 * HUGE - 1, 3), (1, 1), (0, 0)):
        mine.device_set.set_min(asked_bytes)
        assert mine.device_set.min_bytes == asked_bytes
        assert machine.members("a")["mine"].min_bytes == pages * 2 * HUGE
        assert machine.members("b")["mine"].min_bytes == pages * HUGE


def test_two_guarantees_with_partial_pages_are_both_met(machine: Machine) -> None:
    """They fit the device in bytes; in pages rounded up they would not."""
    one = machine.join("c", "one", min_bytes=3 * HUGE // 2)
    other = machine.join("c", "other", min_bytes=5 * HUGE // 2)
    members = machine.members("c")
    assert (members["one"].min_bytes, members["other"].min_bytes) == (HUGE, 2 * HUGE)
    assert one.device_set.grant(9) == 4
    other.device_set.request_memory(2)
    assert one.device_set.open_reclaim()[0] == 2
    one.device_set.give_back(2)
    assert other.device_set.grant(2) == 2


@pytest.mark.parametrize("rejecting", ["a", "b"])
def test_guarantee_rejected_by_one_device_applies_to_none(machine: Machine, rejecting: str) -> None:
    mine = machine.join("ab", "mine", min_bytes=2 * HUGE)
    machine.join(rejecting, "other", min_bytes=5 * HUGE)
    for pages, named in ((4, rejecting), (9, "a")):  # nine exceed each device: the first refuses
        with pytest.raises(GuaranteeError, match=f"^{named}: "):
            mine.device_set.set_min(2 * pages * HUGE)
        assert mine.device_set.min_bytes == 2 * HUGE
        assert [machine.members(name)["mine"].min_bytes for name in "ab"] == [HUGE, HUGE]
        mine.device_set.fall_asleep()


def test_reserves_are_set_per_device(machine: Machine) -> None:
    mine = machine.join("ab", "mine", reserve_bytes={"a": 3 * HUGE, "b": HUGE})
    assert machine.members("a")["mine"].reserve_bytes == 3 * HUGE
    assert mine.device_set.room() == 5
    mine.reserve({"a": HUGE})
    assert machine.members("a")["mine"].reserve_bytes == HUGE
    assert machine.members("b")["mine"].reserve_bytes == HUGE
    with pytest.raises(InvalidArgumentError, match="2 devices"):
        mine.reserve(HUGE)
    with pytest.raises(InvalidArgumentError, match="another device than a, b"):
        mine.reserve({"c": HUGE})
    machine.join("c").reserve(HUGE)
    machine.check()


def test_reserve_rejected_by_one_device_changes_none(machine: Machine) -> None:
    mine = machine.join("ab", "mine", reserve_bytes={"a": 4 * HUGE, "b": HUGE})
    machine.join("b", "other", min_bytes=5 * HUGE)
    # It would grow on b, where there is no room, and shrink on a.
    with pytest.raises(GuaranteeError, match=r"^b: "):
        mine.reserve({"a": HUGE, "b": 4 * HUGE})
    for device, pages in (("a", 4), ("b", 1)):
        member = machine.members(device)["mine"]
        assert (member.reserve_bytes, member.pledged_bytes) == (pages * HUGE, pages * HUGE)
    machine.check()


def test_wake_rejected_by_one_device_claims_none(
    machine: Machine,
) -> None:
    mine = machine.join("ab", "mine", min_bytes=4 * HUGE, reserve_bytes={"a": HUGE, "b": 4 * HUGE})
    mine.device_set.fall_asleep()
    other = machine.join("b", "other")
    assert other.device_set.grant(6) == 6
    with pytest.raises(ReserveError, match=r"^b: 8.00 MiB to be reserved .* free; other has"):
        mine.device_set.wake(0.0)
    assert mine.device_set.is_asleep
    for device in "ab":
        member = machine.members(device)["mine"]
        assert (member.asleep, member.pledged_bytes, member.guaranteed_bytes) == (True, 0, 0)
    third = machine.join("a", "third")
    assert third.device_set.grant(8) == 8, "nothing is kept on the first device"
    third.device_set.give_back(8)
    other.device_set.set_min(5 * HUGE)
    with pytest.raises(GuaranteeError, match=r"^b: "):
        mine.device_set.wake(0.0)
    assert machine.members("a")["mine"].pledged_bytes == 0
    machine.check()
    other.device_set.set_min(0)
    other.device_set.give_back(6)
    mine.device_set.wake(0.0)
    assert not mine.device_set.is_asleep
    assert machine.members("a")["mine"].pledged_bytes == HUGE
    assert machine.members("b")["mine"].pledged_bytes == 4 * HUGE
    machine.check()


def test_wake_waits_for_every_device(machine: Machine) -> None:
    mine = machine.join("ab", "mine", reserve_bytes={"a": 4 * HUGE, "b": 4 * HUGE})
    mine.device_set.fall_asleep()
    others = [machine.join(device, f"on_{device}") for device in "ab"]
    for other in others:
        assert other.device_set.grant(8) == 8
    waker = threading.Thread(target=mine.device_set.wake, args=(DEADLINE_S,))
    waker.start()
    wait_until(
        lambda: all(other.device_set.open_reclaim()[0] == 4 for other in others), "both are asked"
    )
    others[1].device_set.give_back(4)
    wait_until(lambda: not machine.members("b")["mine"].asleep, "it does not wake on b")
    assert waker.is_alive()
    others[0].device_set.give_back(4)
    waker.join(DEADLINE_S)
    assert not waker.is_alive()
    assert not mine.device_set.is_asleep
    machine.check()


def test_sleep_cancels_a_pending_wake(machine: Machine) -> None:
    mine = machine.join("ab", "mine", reserve_bytes={"a": HUGE, "b": 4 * HUGE})
    mine.device_set.fall_asleep()
    other = machine.join("b", "other")
    assert other.device_set.grant(8) == 8
    caught: list[Exception] = []

    def wake() -> None:
        try:
            mine.device_set.wake(DEADLINE_S)
        except ReserveError as error:
            caught.append(error)

    waker = threading.Thread(target=wake)
    waker.start()
    wait_until(
        lambda: machine.members("a")["mine"].pledged_bytes and other.device_set.open_reclaim()[0]
    )
    mine.device_set.fall_asleep()
    waker.join(DEADLINE_S)
    assert "put to sleep" in str(caught[0])
    assert [machine.members(name)["mine"].pledged_bytes for name in "ab"] == [0, 0]
    machine.check()


# ------------------------------------------------------------------------------------------- asks


def test_memory_is_requested_only_where_missing(machine: Machine) -> None:
    other = machine.join("b", "other", priority=-1)
    assert other.device_set.grant(8) == 8
    mine = machine.join("ab", "mine")
    assert mine.device_set.request_memory(2)

    def stands() -> bool:
        mine.device_set.request_memory(2)  # which counts for 250 ms
        return [machine.members(name)["mine"].ask_bytes for name in "ab"] == [0, 2 * HUGE]

    wait_until(stands)
    assert mine.device_set.reach() == 0  # blocks in use, which it says nothing of
    assert other.device_set.open_reclaim() == (2, 3)
    mine.device_set.end_memory_request()
    assert machine.members("b")["mine"].ask_bytes == 0


def test_reclaim_request_of_one_device_releases_whole_pages(machine: Machine) -> None:
    """The pages that go for one device's sake go on all."""
    geometry = native_geometry(PAGED, 6)
    mine = machine.join("aab", "mine", priority=-1)
    with ExitStack() as stack:
        own = stack.enter_context(
            segment.create(f"{machine.group}_mine", engine="test", devices=[("a", 2), ("b", 1)])
        )
        pool = _vmm.Pool(
            _vmm.Range.reserve(_vmm.HostDriver(), geometry),
            max_blocks=6 * BLOCKS,
            limit_bytes=99 * HUGE,
            capacity_bytes=99 * HUGE,
            preallocate=False,
            device_set=mine.device_set,
        )
        ids = pool.alloc(4 * BLOCKS - 1)
        assert ids is not None
        assert pool.alloc(1) is None, "a has no room for two copies more"
        assert pool.mapped_bytes == 12 * HUGE
        pool.free(ids)
        maintenance = _vmm.MaintenanceThread.start(pool, own.control_block, idle_trim_s=-1.0)
        try:
            other = machine.join("b", "other")
            assert other.device_set.grant(8) == 4
            assert other.device_set.request_memory(3)

            def has_released() -> bool:
                other.device_set.request_memory(3)
                return machine.granted("b")["mine"] == 1

            wait_until(has_released)
            assert other.device_set.grant(3) == 3
        finally:
            maintenance.stop()
        assert machine.granted("a")["mine"] == 2 * machine.granted("b")["mine"] == 2
        pool.check_integrity()
        assert pool.close(discard=True) == 0
    machine.check()


def test_two_waiters_do_not_block_each_others_device(
    machine: Machine,
) -> None:
    """Each outranks the other on one device: what is kept there must not block both for ever."""
    one, two = machine.join("ab", "one"), machine.join("ba", "two")
    crowd = [machine.join("a", f"crowd{n}") for n in range(2)]
    # On a the shares are small, and `one` has less than its own; on b both lack some.
    assert one.device_set.grant(1) == 1
    assert two.device_set.grant(3) == 3
    assert crowd[0].device_set.grant(2) == 2
    assert crowd[1].device_set.grant(1) == 1
    for _ in range(2):
        two.device_set.request_memory(6)  # has waited longer
        one.device_set.request_memory(6)
        for member in crowd:
            member.device_set.request_memory(1)
    assert one.device_set.room() + two.device_set.room() > 0
    pages = one.device_set.grant(6) + two.device_set.grant(6)
    assert pages >= 1
    machine.check()


_SCHEDULER = """
import sys
sys.path.insert(0, sys.argv[1])
from device_ledgers import Machine
machine = Machine({"a": 8, "b": 8})
machine.group = sys.argv[2]
assert machine.join("ab", "scheduler").device_set.grant(3) == 3
print("ready", flush=True)
sys.stdin.read()
"""


def test_worker_holds_the_grant_of_its_own_device(machine: Machine) -> None:
    mine = machine.join("ab", "mine")
    with LineProgram("-c", _SCHEDULER, PROGRAMS, machine.group) as scheduler:
        assert scheduler.read() == "ready"
        uuid = b"scheduler".ljust(16)
        with pytest.raises(LedgerError, match="is in no ledger of c"):
            ledger.hold_as_worker(uuid, 1, "c")
        locks = ledger.hold_as_worker(uuid, 1, "b")
    ledger.reap()
    assert machine.granted("a") == {"mine": 0}
    assert machine.granted("b") == {"mine": 0, "scheduler": 3}
    for lock in locks:
        lock.release()
    assert mine.device_set.grant(8) == 5, "who looks for memory finds the dead later"
    ledger.reap()
    assert machine.granted("b") == {"mine": 5}


def test_device_count_must_match_the_rank_count(machine: Machine) -> None:
    settings = Config(ledger=machine.group)
    for devices, why in (("ab", "2 devices are given for 1 ranks"), ("", "no device is given")):
        with pytest.raises(InvalidArgumentError, match=why):
            open_pool(
                settings,
                PAGED,
                2,
                num_blocks=8,
                block_tokens=16,
                engine="test",
                devices=[machine.devices[name] for name in devices],
                memory=local_range(machine.devices["a"]),
            )
    assert machine.granted("a") == machine.granted("b") == {}


def test_pool_over_two_devices_releases_everything(machine: Machine) -> None:
    """With a ring whose workers nobody has started: the ledgers are left at the end."""
    settings = Config(ledger=machine.group, minimum=4 * HUGE)

    def ring(own: segment.Segment, geometry: _vmm.Geometry) -> _vmm.Ring:
        return _vmm.Ring.create(own.control_block, geometry, 1.0, 3)

    with open_pool(
        settings,
        PAGED,
        4,
        num_blocks=32,
        block_tokens=16,
        engine="test",
        devices=[machine.devices[name] for name in "aab"],
        memory=ring,
        reserve_bytes={"a": HUGE, "b": 2 * HUGE},
    ) as pool:
        assert pool.segment.control_block.read_header()["devices"] == [("a", 2), ("b", 1)]
        assert [name for name, _ in pool.device_set.devices] == ["a", "b"]
        assert pool.device_set.min_bytes == 4 * HUGE
        pool.reserve({"b": HUGE})
        members = {device: next(iter(machine.members(device).values())) for device in "ab"}
        assert [members[device].reserve_bytes for device in "ab"] == [HUGE, HUGE]
        with pytest.raises(InvalidArgumentError, match="2 devices"):
            pool.reserve(HUGE)
    assert machine.members("a") == machine.members("b") == {}
