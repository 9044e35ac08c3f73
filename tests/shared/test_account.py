"""What an instance reserves besides its KV cache: in one account with everybody's caches."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import ExitStack

import pytest
from native_pools import HUGE
from processes import LineProgram, run_python
from two_pools import BLOCKS_PER_PAGE, PAGES, TwoPools
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.device.host_memory import machine_memory_bytes
from kvelastic.device.process_memory import anonymous_bytes
from kvelastic.errors import GuaranteeError, IntegrityError, ReserveError
from kvelastic.shared import ledger, segment

CAPACITY = PAGES * HUGE


def fill(pool: _vmm.Pool) -> list[int]:
    """Every page of the device, in use."""
    ids = pool.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert ids is not None
    return ids


def is_sound(shared: TwoPools) -> None:
    shared.check()
    with (
        shared.ledgers[0].path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
    ):
        _vmm.ledger_check_integrity(memory)


# --- two pools of this process ------------------------------------------------------------------


def test_reserved_memory_is_not_granted(shared: TwoPools) -> None:
    a, b = shared.ledgers
    a.member.reserve(2 * HUGE)
    assert shared.pools[1].alloc(PAGES * BLOCKS_PER_PAGE - 1) is None
    assert b.member.room(HUGE) <= PAGES - 2
    (info,) = [one for one in ledger.list_ledgers() if one.group == a.path.name.split("_")[2]]
    assert (info.reserved_bytes, info.members[0].reserve_bytes) == (2 * HUGE, 2 * HUGE)
    assert info.free_bytes == CAPACITY - 2 * HUGE - info.granted_bytes
    is_sound(shared)


def test_wake_reclaims_neighbours_cache_for_its_reserve(shared: TwoPools) -> None:
    a, b = shared.pools
    shared.ledgers[0].member.reserve(4 * HUGE)
    a.sleep()
    ids = fill(b)
    b.cache(ids)  # all of it is cache now
    maintenance = _vmm.MaintenanceThread.start(
        b, shared.segments[1].control_block, idle_trim_s=-1.0
    )
    try:
        a.wake(DEADLINE_S)
    finally:
        maintenance.stop()
    assert not a.is_asleep
    assert b.mapped_bytes <= 2 * HUGE
    is_sound(shared)


def test_refused_wake_leaves_the_pool_asleep(shared: TwoPools) -> None:
    a, b = shared.pools
    shared.ledgers[0].member.reserve(4 * HUGE)
    a.sleep()
    theirs = fill(b)  # and nobody is there to give it
    with pytest.raises(ReserveError, match=rf"{shared.segments[1].name} has 12.00 MiB of cache"):
        a.wake(timeout_s=0.05)
    assert a.is_asleep
    assert a.alloc(1) is None
    b.free(theirs)
    assert fill(b), "nothing is kept for it"
    shared.ledgers[1].member.set_min(3 * HUGE)
    with pytest.raises(GuaranteeError, match=r"6.00 MiB guaranteed"):
        a.wake()
    assert a.is_asleep
    is_sound(shared)


@pytest.mark.parametrize("is_followed", [False, True], ids=["alone", "with a later limit"])
def test_wake_request_is_acknowledged_once_memory_is_reserved(
    shared: TwoPools, is_followed: bool
) -> None:
    """By request, as kvctl does it, while the neighbour has to preempt for it."""
    a, b = shared.pools
    shared.ledgers[0].member.reserve(4 * HUGE)
    maintenance_threads = [
        _vmm.MaintenanceThread.start(pool, one.control_block, idle_trim_s=-1.0)
        for pool, one in zip(shared.pools, shared.segments, strict=True)
    ]
    name = shared.segments[0].name
    try:
        assert segment.request(name, asleep=True, wait_s=DEADLINE_S).state == "applied"
        theirs = fill(b)
        answers = []
        waker = threading.Thread(
            target=lambda: answers.append(segment.request(name, asleep=False, wait_s=DEADLINE_S))
        )
        waker.start()
        # It is asked for blocks in use, and its engine preempts.
        wait_until(lambda: b.is_over_limit or not waker.is_alive())
        assert a.is_asleep
        if is_followed:
            segment.request(name, limit_bytes=6 * HUGE)
            wait_until(lambda: a.limit_state()["limit_bytes"] == 6 * HUGE)
        b.free(theirs)
        waker.join(DEADLINE_S)
        (answer,) = answers
        assert (answer.state, answer.asleep) == ("applied", False)
        is_sound(shared)
    finally:
        for maintenance in maintenance_threads:
            maintenance.stop()


def test_refused_wake_request_has_the_reason(shared: TwoPools) -> None:
    shared.ledgers[0].member.reserve(4 * HUGE)
    name = shared.segments[0].name
    maintenance = _vmm.MaintenanceThread.start(
        shared.pools[0], shared.segments[0].control_block, idle_trim_s=-1.0
    )
    try:
        assert segment.request(name, asleep=True, wait_s=DEADLINE_S).state == "applied"
        shared.ledgers[1].member.set_min(3 * HUGE)
        answer = segment.request(name, asleep=False, min_bytes=HUGE, wait_s=DEADLINE_S)
        assert (answer.state, answer.asleep, answer.min_bytes) == ("refused", True, 0)
        assert "no room for 2.00 MiB guaranteed and 8.00 MiB reserved" in answer.reason
        shared.ledgers[1].member.set_min(HUGE)
        assert segment.request(name, asleep=False, wait_s=DEADLINE_S).state == "applied"
        is_sound(shared)
    finally:
        maintenance.stop()


def test_guarantee_set_while_a_wake_waits_stays(shared: TwoPools) -> None:
    """The wake is refused, with the guarantee that it asked for."""
    a, b = shared.pools
    shared.ledgers[0].member.reserve(4 * HUGE)
    maintenance = _vmm.MaintenanceThread.start(
        a, shared.segments[0].control_block, idle_trim_s=-1.0
    )
    name = shared.segments[0].name
    try:
        assert segment.request(name, asleep=True, wait_s=DEADLINE_S).state == "applied"
        fill(b)
        segment.request(name, asleep=False, min_bytes=2 * HUGE)
        wait_until(lambda: shared.ledgers[0].member.min_bytes == 2 * HUGE)
        answer = segment.request(name, min_bytes=HUGE, wait_s=DEADLINE_S)
        assert (answer.state, answer.asleep, answer.min_bytes) == ("applied", True, HUGE)
        group = shared.ledgers[0].path.name.split("_")[2]

        def pledged_bytes() -> int:
            (info,) = [one for one in ledger.list_ledgers() if one.group == group]
            return next(one.pledged_bytes for one in info.members if one.name == name)

        wait_until(lambda: not pledged_bytes(), "the wake is not refused")
        assert shared.ledgers[0].member.min_bytes == HUGE
    finally:
        maintenance.stop()


def test_one_of_two_concurrent_wakes_is_refused(shared: TwoPools) -> None:
    for joined, pool in zip(shared.ledgers, shared.pools, strict=True):
        pool.sleep()
        joined.member.set_min(2 * HUGE)
        joined.member.reserve(2 * HUGE)
    refused = []

    def wake(pool: _vmm.Pool) -> None:
        try:
            pool.wake()
        except GuaranteeError as error:
            refused.append(error)

    for _ in range(50):
        wakers = [threading.Thread(target=wake, args=(pool,)) for pool in shared.pools]
        for waker in wakers:
            waker.start()
        for waker in wakers:
            waker.join(DEADLINE_S)
        assert sorted(pool.is_asleep for pool in shared.pools) == [False, True]
        is_sound(shared)
        for pool in shared.pools:
            pool.sleep()
    assert len(refused) == 50


def test_capacity_below_reserves_and_guarantees_is_rejected(shared: TwoPools) -> None:
    group = shared.ledgers[0].path.name.split("_")[2]
    shared.ledgers[0].member.reserve(2 * HUGE)
    shared.ledgers[1].member.set_min(2 * HUGE)
    with pytest.raises(GuaranteeError, match=r"4.00 MiB guaranteed and 4.00 MiB reserved"):
        ledger.set_capacity("host", group=group, capacity_bytes=4 * HUGE - 1)
    assert ledger.set_capacity("host", group=group, capacity_bytes=4 * HUGE) == CAPACITY
    assert shared.ledgers[1].member.room(HUGE) == 2
    is_sound(shared)


def test_corrupt_grant_total_is_named(shared: TwoPools) -> None:
    fill(shared.pools[1])
    raw = mmap.mmap(-1, _vmm.LEDGER_BYTES)
    raw[:] = shared.ledgers[0].path.read_bytes()
    granted = (6 * HUGE // _vmm.GRANT_UNIT_BYTES << 32).to_bytes(8, "little")
    (at,) = [at for at in range(0, len(raw), 8) if raw[at : at + 8] == granted]
    raw[at : at + 8] = (7 * HUGE // _vmm.GRANT_UNIT_BYTES << 32).to_bytes(8, "little")
    with pytest.raises(IntegrityError, match=r"grants add up to 14.00 MiB"):
        _vmm.ledger_check_integrity(raw)


def test_host_reserves_use_memory_outside_the_capacity_first() -> None:
    group = f"kvoutside-{os.getpid()}"
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(
                ledger.join(
                    "host",
                    group=group,
                    capacity_bytes=CAPACITY,
                    total_bytes=CAPACITY + 4 * HUGE,
                    name=who,
                    uuid=who.encode() * 16,
                )
            )
            for who in "ab"
        )
        a.member.reserve(4 * HUGE)
        assert b.member.room(HUGE) == PAGES, "the caches' part is what it was"
        a.member.reserve(5 * HUGE)
        assert b.member.room(HUGE) == PAGES - 1
        (info,) = [one for one in ledger.list_ledgers() if one.group == group]
        assert (info.outside_bytes, info.taken_bytes) == (4 * HUGE, HUGE)
        with pytest.raises(GuaranteeError):
            b.member.reserve(6 * HUGE)


# --- processes ------------------------------------------------------------------------------------

LINGERING = """
import mmap, sys
from kvelastic import _vmm
from kvelastic.shared import ledger
joined = ledger.join(
    "host", group=sys.argv[1], capacity_bytes=64 << 20, total_bytes=64 << 20, name="a",
    uuid=b"a" * 16,
)
joined.member.grant(1, 2 << 20)
path = joined.path
joined.member.linger()
joined.linger()
del joined
with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
    (entry,) = _vmm.read_ledger(memory)["members"]
    byte = _vmm.ledger_liveness_byte(entry["slot"], entry["incarnation"], 0)
    print(entry["granted_bytes"], _vmm.liveness_of(file.fileno(), byte))
"""


def test_lingering_member_counts_as_alive() -> None:
    """To another container, which sees the lock and not the process."""
    ended = run_python("-c", LINGERING, f"kvlinger-{os.getpid()}")
    assert ended.stdout == f"{2 << 20} alive\n"
    ledger.reap()


EMBEDDED = """
import sys
from kvelastic import errors
from kvelastic.kvcached import embedded
from kvelastic.integration.vllm import interfaces as kvi
kvi.init_kvelastic(device="cpu")
try:
    manager = kvi.get_kv_cache_manager(512, 16, 4096, 8)
except errors.KvelasticError as error:
    print(error, flush=True)
    sys.exit()
print(manager.name, flush=True)
for line in sys.stdin:
    try:
        embedded.reserve(int(line))
        print("done", flush=True)
    except errors.KvelasticError as error:
        print(error.code, error, flush=True)
"""


class Embedded(LineProgram):
    """An embedded user of its own process, on a ledger with a small capacity."""

    def __init__(self, group: str, **environ: str) -> None:
        settings = {"KVELASTIC_LEDGER": group, "KVELASTIC_HOST_MEMORY": "64M"} | environ
        super().__init__("-c", EMBEDDED, environment=settings)
        self.name = self.read()

    def reserve(self, size_bytes: int) -> str:
        return self.ask(str(size_bytes))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        segment.reap()
        ledger.reap()


@pytest.mark.slow
def test_reserve_of_embedded_user_ends_with_its_process() -> None:
    group = f"kvembedded-{os.getpid()}"
    outside = machine_memory_bytes() - (64 << 20)
    with Embedded(group, KVELASTIC_RESERVE=str(outside + (8 << 20))) as first:
        (info,) = [one for one in ledger.list_ledgers() if one.group == group]
        assert info.taken_bytes == 8 << 20
        with Embedded(group, KVELASTIC_MIN="16M") as second:  # whole pages
            refused = first.reserve(outside + (60 << 20))
            assert refused.startswith("GUARANTEE"), refused
            assert f"{second.name} has 16.00 MiB guaranteed" in refused
            assert first.reserve(outside + (40 << 20)) == "done"
            assert first.reserve(-1).startswith("INVALID_ARGUMENT")
            with Embedded(group, KVELASTIC_RESERVE="20M") as third:
                assert "no room for 20.00 MiB reserved" in third.name
            first.kill()
            with Embedded(group, KVELASTIC_RESERVE=str(outside)) as fourth:
                assert fourth.reserve(outside) == "done", "what the dead had reserved is free"


HOLDS = """
import mmap, os
from kvelastic.device.process_memory import anonymous_bytes
before_bytes = anonymous_bytes(os.getpid())
held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(held), 4096):
    held[at] = 1
print(anonymous_bytes(os.getpid()) - before_bytes)
"""


def test_anonymous_bytes_are_read_from_the_kernel() -> None:
    assert int(run_python("-c", HOLDS).stdout) > 60 << 20
    assert anonymous_bytes(1 << 30) == 0
