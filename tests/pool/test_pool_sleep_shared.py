"""A pool asleep on a shared device: its ledger, control block and maintenance thread."""

from __future__ import annotations

from native_pools import HUGE
from two_pools import BLOCKS_PER_PAGE, PAGES, TwoPools
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.shared import ledger, segment


def test_memory_of_sleeping_pool_is_available_to_others(shared: TwoPools) -> None:
    a, b = shared.pools
    ids = a.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert ids is not None
    assert b.alloc(1) is None
    state = a.sleep()
    shared.check()
    assert state["over_bytes"] == shared.ledgers[0].member.granted_bytes == PAGES * HUGE
    a.free(ids)
    shared.check()
    assert shared.ledgers[0].member.granted_bytes == 0
    theirs = b.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert theirs is not None
    shared.check()
    # Awake again it gets what is free, and no more.
    a.wake()
    assert a.alloc(1) is None
    b.free(theirs)
    b.trim()
    shared.check()
    assert a.alloc(BLOCKS_PER_PAGE) is not None
    shared.check()


def test_sleep_releases_guaranteed_memory_and_keeps_the_guarantee(shared: TwoPools) -> None:
    a, b = shared.pools
    member = shared.ledgers[0].member
    member.set_min(2 * HUGE)
    a.free(a.alloc(2 * BLOCKS_PER_PAGE) or [])
    a.sleep()
    shared.check()
    assert (member.granted_bytes, member.min_bytes) == (0, 2 * HUGE)
    assert b.alloc(1) is not None
    shared.check()


def test_sleep_withdraws_a_pending_memory_request(shared: TwoPools) -> None:
    """With a maintenance thread: no instance releases memory for one that sleeps."""
    a, b = shared.pools
    theirs = b.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert theirs is not None
    maintenance = _vmm.MaintenanceThread.start(
        a, shared.segments[0].control_block, idle_trim_s=-1.0
    )
    try:

        def ask_bytes() -> int:
            (found,) = (
                member
                for info in ledger.list_ledgers()
                for member in info.members
                if member.name == shared.segments[0].name
            )
            return found.ask_bytes

        # An ask that is not repeated lapses after 250 ms.
        wait_until(lambda: a.alloc(4) is None and ask_bytes() > 0, "it does not ask")
        answer = segment.request(shared.segments[0].name, asleep=True, wait_s=DEADLINE_S)
        assert (answer.state, answer.mapped_bytes, answer.asleep) == ("applied", 0, True)
        wait_until(lambda: ask_bytes() == 0)
        b.free(theirs)
        b.trim()
        assert segment.inspect(shared.segments[0].name).usage["mapped_bytes"] == 0
    finally:
        maintenance.stop()


def test_maintenance_acknowledges_blocks_freed_while_asleep(shared: TwoPools) -> None:
    """The record says shrinking with the bytes over, then applied with none; no request between."""
    pool, name = shared.pools[0], shared.segments[0].name
    maintenance = _vmm.MaintenanceThread.start(
        pool, shared.segments[0].control_block, idle_trim_s=-1.0
    )
    try:
        ids = pool.alloc(BLOCKS_PER_PAGE)
        assert ids is not None
        held_bytes = pool.mapped_bytes
        segment.request(name, asleep=True)
        wait_until(lambda: segment.inspect(name).ack["state"] == "shrinking")
        assert segment.inspect(name).ack["over_bytes"] == held_bytes
        assert segment.inspect(name).usage["asleep"] == 1
        pool.free(ids)
        wait_until(lambda: segment.inspect(name).ack["state"] == "applied")
        info = segment.inspect(name)
        assert info.ack["effective_limit_bytes"] == info.ack["mapped_bytes"] == 0
        assert info.usage["mapped_bytes"] == 0
        answer = segment.request(name, asleep=False, wait_s=DEADLINE_S)
        assert (answer.state, answer.effective_limit_bytes) == ("applied", PAGES * HUGE)
        assert not answer.asleep
        assert pool.alloc(1) is not None
    finally:
        maintenance.stop()
