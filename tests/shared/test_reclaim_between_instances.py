"""Memory that moves between real instances: from whom, how much, when, and never what is guarded.

Every instance is a process with a pool, a maintenance thread and a segment
(programs/ledger_instance.py). They share a device of `DEVICE_PAGES` pages. Blocks of the first
`alloc` fill it from page 0 on, which has one block less than the others: the null block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from ledger_instance import BLOCKS_PER_PAGE as B
from ledger_instance import PAGE_BYTES as PAGE
from ledger_instance import Instance
from own_device import DEVICE_PAGES, Device
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.slow


@pytest.fixture
def device() -> Iterator[Device]:
    with Device(KVELASTIC_RECLAIM_WAIT=str(DEADLINE_S)) as made:
        yield made


class DisturbedError(Exception):
    """An instance that works has done nothing for so long that others may take it for idle."""


class Pace:
    """Of instances that work: the product calls an instance idle after 0.5 s."""

    def __init__(self) -> None:
        self._seen_s = time.monotonic()

    def check(self) -> None:
        """Raise DisturbedError if the last check was too long ago."""
        before_s, self._seen_s = self._seen_s, time.monotonic()
        if self._seen_s - before_s > 0.4:
            raise DisturbedError


def retry_until_undisturbed(scenario: Callable[[Device], None]) -> None:
    """Run a scenario on a new device, again and again until nothing disturbs it."""

    def ended() -> bool:
        with suppress(DisturbedError), Device(KVELASTIC_RECLAIM_WAIT=str(DEADLINE_S)) as device:
            scenario(device)
            return True
        return False

    wait_until(ended, "the machine was never quiet for long enough")


def fill(of: Instance, pages: int) -> list[int]:
    """All blocks of the first `pages` pages, in use."""
    ids = of.alloc(pages * B - 1)
    assert ids is not None
    assert len(ids) == pages * B - 1
    return ids


def by_page(ids: list[int]) -> dict[int, list[int]]:
    """The layout has one buffer, so block ids are dense."""
    pages: dict[int, list[int]] = {}
    for block in sorted(ids):
        pages.setdefault(block // B, []).append(block)
    return pages


def sound(device: Device, *instances: Instance) -> None:
    """The books of everybody, and of the device, agree once no page is in transit.

    A page that a maintenance thread maps or unmaps is granted and not mapped.
    """
    for one in instances:
        one.ask("check_integrity")

    def do_books_agree() -> bool:
        held = [one.mapped_bytes for one in instances]
        granted = [one.ask("granted") for one in instances]
        return granted == held and device.look().granted_bytes == sum(held)

    wait_until(do_books_agree, "granted and mapped memory differ")
    info = device.look()
    assert info.granted_bytes <= info.capacity_bytes


# ------------------------------------------------------------------------------------- who gives


def test_busy_instance_gets_cheapest_pages_of_idle_cache(device):
    idle, busy = device.start(), device.start()
    pages = by_page(fill(idle, DEVICE_PAGES))
    # Page 5 holds one cached block, page 6 two, all others four; page 0 is in use.
    idle.cache([block for page in range(1, DEVICE_PAGES) for block in pages[page]])
    idle.ask("touch", pages[5][1:] + pages[6][2:])
    idle.free(pages[5][1:] + pages[6][2:])
    device.wait_until_idle(idle)
    got = busy.alloc(2 * B - 1)
    assert got is not None
    evicted = {block for block, _ in idle.ask("take_changes")}
    assert evicted == set(pages[5][:1] + pages[6][:2]), "the cheapest pages go first"
    sound(device, idle, busy)
    assert (device.pages(idle), device.pages(busy)) == (DEVICE_PAGES - 2, 2)
    # Of pages that cost the same those go first that were filled first.
    device.wait_until_idle(idle)
    assert busy.alloc(3 * B) is not None
    evicted = {block for block, _ in idle.ask("take_changes")}
    assert len(by_page(list(evicted))) == 3
    assert all(len(blocks) == B for blocks in by_page(list(evicted)).values())
    assert evicted <= set(range(1 * B, DEVICE_PAGES * B))
    sound(device, idle, busy)


def test_parked_pages_are_reclaimed_before_cached_ones(device):
    idle, busy = device.start(KVELASTIC_IDLE_TRIM_SECONDS="-1"), device.start()
    ids = fill(idle, DEVICE_PAGES)
    idle.cache(ids[: 16 * B])
    idle.free(ids[16 * B :])
    device.wait_until_idle(idle)
    assert busy.alloc(10 * B - 1) is not None
    assert idle.ask("take_changes") == []
    assert busy.alloc(10 * B) is not None
    assert idle.ask("take_changes") != []
    sound(device, idle, busy)


def test_used_blocks_of_an_idle_equal_are_kept(device):
    idle, busy = device.start(), device.start(KVELASTIC_RECLAIM_WAIT="0.1")
    fill(idle, DEVICE_PAGES)
    device.wait_until_idle(idle)
    assert busy.alloc(1) is None
    assert device.pages(idle) == DEVICE_PAGES
    sound(device, idle, busy)


@pytest.mark.parametrize("joined", ["longer idle first", "longer idle last"])
def test_longer_idle_instance_is_asked_first(device, joined):
    """Asked once. Whoever does not answer in time is another test's: here nobody can answer."""
    first, second = device.start(), device.start()
    if joined == "longer idle last":
        first, second = second, first
    half = DEVICE_PAGES // 2
    first.cache(fill(first, half))
    # Else both may become idle in one tick of the coarse clock, for good.
    wait_until(lambda: _is_idle_with_cache(device.member(first)), "the first one never gets idle")
    second.cache(fill(second, half))
    wait_until(
        lambda: device.member(first).idle_s > device.member(second).idle_s > 0.6,
        "they never get idle",
    )
    first.stop()
    second.stop()
    with device.requester() as requester:
        assert requester.request_memory(4 * PAGE)
        asked = [device.member(one).wanted_bytes for one in (first, second)]
        requester.end_memory_request()
    assert asked == [4 * PAGE, 0]
    first.go_on()
    second.go_on()
    wait_until(lambda: device.pages(first) == half - 4, "it does not give what it was asked for")
    sound(device, first, second)


def _is_idle_with_cache(member):
    return member.evictable_bytes > 0 and member.in_use_bytes == 0 and member.idle_s > 0.1


# ------------------------------------------------------------------------- guarantee, priority


@pytest.mark.parametrize("priority", ["0", "10"])
def test_guarantee_is_never_reclaimed(device, priority):
    kept = 20
    guarded = device.start(KVELASTIC_MIN=str(kept * PAGE))
    requester = device.start(KVELASTIC_PRIORITY=priority, KVELASTIC_RECLAIM_WAIT="0.2")
    guarded.cache(fill(guarded, DEVICE_PAGES))
    device.wait_until_idle(guarded)
    assert requester.alloc((DEVICE_PAGES - kept) * B) is None, "one page more than there is"
    wait_until(lambda: requester.alloc((DEVICE_PAGES - kept) * B - 1), "nothing came")
    for _ in range(20):
        assert requester.alloc(1) is None
        assert device.pages(guarded) >= kept
    assert device.pages(guarded) == kept
    sound(device, guarded, requester)


def test_higher_priority_reclaims_blocks_in_use(device):
    low, high = device.start(), device.start(KVELASTIC_PRIORITY="1")
    ids = fill(low, DEVICE_PAGES)
    pages = by_page(ids)
    high.send("alloc", 4 * B - 1)
    answer = wait_until(
        lambda: (now := segment.inspect(low.name).ack)["state"] == "shrinking" and now,
        "the lower one does not say that it shrinks",
    )
    assert answer["over_bytes"] == 4 * PAGE
    assert answer["effective_limit_bytes"] == (DEVICE_PAGES - 4) * PAGE
    assert low.alloc(1) is None
    # Its engine preempts: what it frees goes to the requester, and not to itself.
    for page in (9, 10, 11, 12):
        low.free(pages[page])
    assert len(high.read()) == 4 * B - 1
    wait_until(
        lambda: segment.inspect(low.name).ack["state"] == "applied",
        "the memory pressure does not end",
    )
    assert (device.pages(low), device.pages(high)) == (DEVICE_PAGES - 4, 4)
    sound(device, low, high)
    assert low.stats()["pages_limit"] == DEVICE_PAGES, "what is over is over"


def test_unneeded_memory_pressure_is_lifted(device):
    low = device.start()
    high = device.start(KVELASTIC_PRIORITY="1", KVELASTIC_RECLAIM_WAIT="0.1")
    fill(low, DEVICE_PAGES)
    assert high.alloc(4 * B - 1) is None
    wait_until(lambda: low.stats()["pages_limit"] == DEVICE_PAGES, "it stays under pressure")
    whole_bytes = DEVICE_PAGES * PAGE
    wait_until(
        lambda: segment.inspect(low.name).ack["effective_limit_bytes"] == whole_bytes,
        "operators are shown the memory pressure for ever",
    )
    wait_until(
        lambda: segment.inspect(low.name).ack["state"] == "applied",
        "it never says that it is over",
    )
    sound(device, low, high)


def test_death_of_the_requester_lifts_memory_pressure(device):
    low, high = device.start(), device.start(KVELASTIC_PRIORITY="1")
    ids = fill(low, DEVICE_PAGES)
    high.send("alloc", 4 * B - 1)
    wait_until(lambda: low.stats()["pages_limit"] == DEVICE_PAGES - 4, "it is not under pressure")
    high.kill()
    wait_until(lambda: low.stats()["pages_limit"] == DEVICE_PAGES, "it stays under pressure")
    low.free(ids[:4])
    assert low.alloc(4) is not None
    sound(device, low)


def test_cached_blocks_on_used_pages_cannot_be_reclaimed(device):
    """All pages of the lower one hold a block in use: none is available without memory pressure,
    however many bytes of it are cached."""
    low, high = device.start(), device.start(KVELASTIC_PRIORITY="1")
    pages = by_page(fill(low, DEVICE_PAGES))
    low.cache([block for blocks in pages.values() for block in blocks[1:]])
    high.send("alloc", B - 1)
    wait_until(
        lambda: low.stats()["pages_limit"] < DEVICE_PAGES,
        "the lower one is never asked for blocks in use",
    )
    low.free([pages[7][0]])
    assert high.read() is not None
    sound(device, low, high)


def test_instance_below_its_guarantee_outranks_a_higher_priority(device):
    high = device.start(KVELASTIC_PRIORITY="9")
    ids = fill(high, DEVICE_PAGES)
    poor = device.start(KVELASTIC_MIN=str(6 * PAGE))
    poor.send("alloc", 6 * B - 1)
    wait_until(
        lambda: segment.inspect(high.name).ack["over_bytes"] == 6 * PAGE,
        "the higher one is not asked",
    )
    assert high.alloc(1) is None
    pages = by_page(ids)
    for page in range(20, 26):
        high.free(pages[page])
    assert len(poor.read()) == 6 * B - 1
    assert (device.pages(high), device.pages(poor)) == (DEVICE_PAGES - 6, 6)
    sound(device, high, poor)


def test_guarantee_gives_no_right_to_more():
    retry_until_undisturbed(run_guarantee_gives_no_right_to_more)


def run_guarantee_gives_no_right_to_more(device: Device) -> None:
    high = device.start(KVELASTIC_PRIORITY="9")
    pages = by_page(fill(high, DEVICE_PAGES))
    poor = device.start(KVELASTIC_MIN=str(2 * PAGE))
    poor.send("alloc", 10 * B - 1)
    limit = wait_until(
        lambda: (pages := high.stats()["pages_limit"]) < DEVICE_PAGES and pages,
        "the higher one is not asked",
    )
    assert limit == DEVICE_PAGES - 2
    for page in range(20, 30):
        high.free(pages[page])
    held = device.pages(high)
    if device.member(high).idle_s > 0.4:  # one that is idle gives parked pages to any other
        raise DisturbedError
    assert held >= DEVICE_PAGES - 2
    poor.kill()
    ledger.reap()
    sound(device, high)


# ------------------------------------------------------------------------------------- fairness


@pytest.mark.parametrize("pages", [32, 33], ids=["an even device", "an odd device"])
def test_busy_equals_converge_to_fair_shares(pages):
    retry_until_undisturbed(lambda device: run_busy_equals_at_fair_shares(device, pages))


def run_busy_equals_at_fair_shares(device: Device, pages: int) -> None:
    """Both want all of it, all the time, with contents that are worth caching."""
    first = device.start(pages, KVELASTIC_RECLAIM_WAIT="0.01")
    second = device.start(pages, KVELASTIC_RECLAIM_WAIT="0.01")
    first.cache(fill(first, pages))

    def work() -> None:
        for one in (first, second):
            ids = one.alloc(2 * B)
            if ids is not None:
                one.cache(ids)
            one.ask("take_changes")

    def shares() -> list[int]:
        work()
        return sorted([device.pages(first), device.pages(second)])

    wait_until(lambda: shares()[0] >= pages // 2, "no fair shares")
    moved = [one.stats()["pages_mapped_ever"] for one in (first, second)]
    # Longer than an ask must wait for its share: nothing moves any more, to and fro.
    pace = Pace()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        work()
        pace.check()
    now = shares()
    mapped = [one.stats()["pages_mapped_ever"] for one in (first, second)]
    pace.check()
    assert now == [pages // 2, (pages + 1) // 2]
    for after, before in zip(mapped, moved, strict=True):
        assert after - before <= 2
    sound(device, first, second)


def test_busy_higher_priority_keeps_its_memory():
    retry_until_undisturbed(run_busy_higher_priority)


def run_busy_higher_priority(device: Device) -> None:
    high = device.start(KVELASTIC_PRIORITY="1", KVELASTIC_RECLAIM_WAIT="0.01")
    low = device.start(KVELASTIC_RECLAIM_WAIT="0.01")
    high.cache(fill(high, DEVICE_PAGES))
    pace = Pace()
    for _ in range(40):
        ids = high.alloc(1)
        assert ids is not None
        high.cache(ids)
        got = low.alloc(1)
        pace.check()
        assert got is None
    held = device.pages(high)
    pace.check()
    assert held == DEVICE_PAGES
    sound(device, high, low)


# --------------------------------------------------------------------- the stopped and the dead


def test_stopped_instance_is_skipped_and_the_next_asked(device):
    stopped, next_one = device.start(), device.start()
    requester = device.start(KVELASTIC_RECLAIM_WAIT="3600")  # longer than a test may run
    half = DEVICE_PAGES // 2
    stopped.cache(fill(stopped, half))
    device.wait_until_idle(stopped)
    next_one.cache(fill(next_one, half))
    device.wait_until_idle(next_one)
    stopped.stop()
    # Far less than it has: it must not be asked again and again until it has been asked for all.
    for _ in range(3):
        assert requester.alloc(B) is not None
    assert device.pages(stopped) == half
    assert device.member(stopped).wanted_bytes <= PAGE * 4
    stopped.go_on()
    wait_until(lambda: device.member(stopped).wanted_bytes == 0, "it answers no more")
    sound(device, stopped, next_one, requester)


def test_waiter_gets_the_memory_of_a_killed_instance(device):
    victim, requester = device.start(), device.start(KVELASTIC_PRIORITY="1")
    fill(victim, DEVICE_PAGES)
    requester.send("alloc", DEVICE_PAGES * B - 1)
    wait_until(lambda: device.member(requester).ask_bytes > 0, "it does not ask")
    victim.kill()
    assert len(requester.read()) == DEVICE_PAGES * B - 1
    sound(device, requester)


def test_request_of_a_killed_instance_is_dropped(device):
    low = device.start(KVELASTIC_PRIORITY="-1")
    holder = device.start()
    requester = device.start(KVELASTIC_PRIORITY="5")
    fill(holder, DEVICE_PAGES - 4)
    holder.stop()
    requester.send("alloc", DEVICE_PAGES * B - 1)
    wait_until(lambda: device.member(requester).ask_bytes > 0, "it does not ask")
    wait_until(lambda: low.ask("available") == 0, "nothing is kept for it")
    requester.kill()
    wait_until(lambda: low.ask("available") >= 4 * B - 1, "pages are kept for the dead")
    assert low.alloc(4 * B - 1) is not None
    holder.go_on()
    sound(device, low, holder)


# ------------------------------------------------------------------------------- without waiting


def test_memory_arrives_without_a_waiting_alloc(device):
    idle, busy = device.start(), device.start(KVELASTIC_RECLAIM_WAIT="0")
    idle.cache(fill(idle, DEVICE_PAGES))
    device.wait_until_idle(idle)
    got: list[list[int]] = []

    def tried() -> bool:
        ids = busy.alloc(6 * B - 1)
        if ids is not None:
            got.append(ids)
        return bool(got)

    # A giver that is quick may answer between the ask and the look of one alloc.
    idle.stop()
    try:
        assert not tried(), "it has waited"
    finally:
        idle.go_on()
    wait_until(tried, "the maintenance thread brings nothing")
    sound(device, idle, busy)


def test_unrepeated_memory_request_expires(device):
    holder, once = device.start(), device.start(KVELASTIC_RECLAIM_WAIT="0")
    fill(holder, DEVICE_PAGES)
    assert once.alloc(B) is None
    wait_until(lambda: device.member(once).ask_bytes == 0, "it asks for ever")
    holder.close()
    assert device.pages(once) == 0


# ---------------------------------------------------------------------------------------- limits


def test_limit_raised_on_a_full_device_reclaims_memory(device):
    idle, busy = device.start(), device.start(KVELASTIC_LIMIT=str(2 * PAGE))
    idle.cache(fill(idle, DEVICE_PAGES))
    device.wait_until_idle(idle)
    assert fill(busy, 2)
    assert busy.alloc(1) is None, "past its limit"
    answer = segment.request(busy.name, limit_bytes=12 * PAGE, wait_s=DEADLINE_S)
    assert (answer.state, answer.effective_limit_bytes) == ("applied", 12 * PAGE)
    assert len(busy.alloc(10 * B)) == 10 * B
    assert busy.alloc(1) is None
    assert device.pages(busy) == 12
    assert device.member(busy).limit_bytes == 12 * PAGE
    sound(device, idle, busy)
    # Beyond the device there is nothing, whatever is requested.
    answer = segment.request(busy.name, limit_bytes=1 << 50, wait_s=DEADLINE_S)
    assert (answer.state, answer.effective_limit_bytes) == ("applied", DEVICE_PAGES * PAGE)


def test_available_blocks_include_reclaimable_memory_of_others(device):
    idle, busy = device.start(), device.start(KVELASTIC_LIMIT=str(20 * PAGE))
    assert busy.ask("available") == 20 * B - 1
    ids = fill(idle, DEVICE_PAGES)
    assert busy.ask("available") == 0
    while True:
        idle.cache(ids[-8 * B :])
        available = busy.ask("available")
        if device.member(idle).idle_s < 0.4:  # it was busy when that was asked
            break
        idle.ask("touch", ids[-8 * B :])
    assert available == 0, "a busy equal need not give"
    device.wait_until_idle(idle)
    assert busy.ask("available") == 8 * B - 1
    got = busy.alloc(8 * B - 1)
    assert got is not None
    assert busy.ask("available") == 0
    idle.close()
    assert busy.ask("available") == 12 * B
    assert busy.alloc(12 * B) is not None
    sound(device, busy)


def test_closed_instance_returns_all_memory(device):
    first, second = device.start(), device.start(KVELASTIC_PRIORITY="1")
    fill(first, DEVICE_PAGES)
    second.send("alloc", DEVICE_PAGES * B - 1)
    wait_until(lambda: device.member(second).ask_bytes > 0, "it does not ask")
    first.close()
    assert len(second.read()) == DEVICE_PAGES * B - 1
    assert [member.pid for member in device.look().members] == [second.pid]
    sound(device, second)
