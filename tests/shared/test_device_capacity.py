"""The capacity of a device, changed while instances run: who gives, who gets, and what is refused.

Every instance is a process with a pool and a maintenance thread (programs/ledger_instance.py). They
share a device of `DEVICE_PAGES` pages. Nothing is trimmed: only the capacity takes pages away.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner, Result
from ledger_instance import BLOCKS_PER_PAGE as B
from ledger_instance import PAGE_BYTES as PAGE
from ledger_instance import Instance
from own_device import DEVICE_PAGES, Device
from processes import LineProgram
from waiting import DEADLINE_S, wait_until

from kvelastic.cli.kvctl import main
from kvelastic.errors import GuaranteeError, InvalidArgumentError, LedgerError, LedgerForeignError
from kvelastic.shared import segment

pytestmark = pytest.mark.slow


@pytest.fixture
def device() -> Iterator[Device]:
    with Device(KVELASTIC_IDLE_TRIM_SECONDS="-1", KVELASTIC_RECLAIM_WAIT="0") as made:
        yield made


def fill(of: Instance, pages: int) -> list[int]:
    """All blocks of that many pages, in use; the null block is on the first."""
    ids = of.alloc(pages * B - 1)
    assert ids is not None
    return ids


@contextmanager
def stopped(instance: Instance) -> Iterator[None]:
    instance.stop()
    try:
        yield
    finally:
        instance.go_on()


def kvctl(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environ)


# ----------------------------------------------------------------------------------- lowered


def test_lowered_capacity_releases_parked_then_cached_then_used(device):
    high, low = device.start(KVELASTIC_PRIORITY="5"), device.start()
    mine, others = fill(high, 12), fill(low, 16)
    high.free(mine[8 * B - 1 :])  # 4 pages parked, of the one with the higher priority
    low.cache(others[8 * B - 1 :])  # 8 pages cached
    assert device.held() == 28

    # An instance that does not answer within 20 ms is passed over and the next one is asked, so
    # only the one whose turn it is runs: no other instance asks it, or is asked in its place.
    with stopped(low):
        assert device.set_pages(24) == DEVICE_PAGES
        wait_until(lambda: device.held() <= 24, "the parked pages are not given")
        assert (device.pages(high), device.pages(low)) == (8, 16)
        assert device.member(low).wanted_bytes == 0

    with stopped(high):
        device.set_pages(18)
        wait_until(lambda: device.held() <= 18, "the cached pages are not given")
        assert (device.pages(high), device.pages(low)) == (8, 10)
        assert device.member(high).wanted_bytes == 0

    device.set_pages(12)  # 2 more cached pages, and 4 of the lower priority that are in use
    wait_until(lambda: device.pages(low) == 8, "the last cached pages are not given")
    wait_until(lambda: low.alloc(1) is None, "who has to give blocks in use hands out new ones")
    low.free(others[2 * B - 1 : 8 * B - 1])
    wait_until(lambda: device.held() <= 12, "what is freed is not given")
    assert device.pages(high) == 8
    for one in high, low:
        one.ask("check_integrity")


def test_lowered_capacity_respects_guarantees(device):
    first = device.start(KVELASTIC_MIN=str(10 * PAGE))
    second = device.start(KVELASTIC_PRIORITY="5")
    first.cache(fill(first, 16))
    second.cache(fill(second, 16))
    device.set_pages(12)
    wait_until(lambda: device.held() <= 12, "it is not given back")
    wait_until(lambda: device.pages(first) <= 10, "the first one gives the second one's pages")
    assert device.pages(first) == 10
    # Less than 2 on a busy machine: who does not answer in time is passed over for a while.
    assert device.pages(second) <= 2


def test_stopped_instance_is_skipped_by_reclaim(device):
    still, other = device.start(), device.start(KVELASTIC_PRIORITY="5")
    for one in still, other:
        one.cache(fill(one, 12))
    with stopped(still):
        device.set_pages(16)
        wait_until(lambda: device.held() <= 16, "the others wait for one that is stopped")
        assert device.pages(still) == 12


def test_limit_follows_a_changed_capacity(device):
    one = device.start()
    device.set_pages(8)
    wait_until(lambda: one.stats()["pages_limit"] == 8, "the limit is not cut")
    info = segment.inspect(one.name)
    assert info.usage["capacity_bytes"] == 8 * PAGE
    assert one.alloc(8 * B) is None
    device.set_pages(2 * DEVICE_PAGES)
    wait_until(lambda: one.stats()["pages_limit"] == 2 * DEVICE_PAGES, "the limit does not grow")
    fill(one, 2 * DEVICE_PAGES)


def test_instance_without_reserve_starts_on_overfull_device(device):
    fill(device.start(), 12)
    device.set_pages(8)
    assert device.start().alloc(1) is None


# ------------------------------------------------------------------------------------ raised


def test_raised_capacity_wakes_a_waiting_instance(device):
    holder, starved = device.start(), device.start()
    fill(holder, DEVICE_PAGES - 1)
    fill(starved, 1)
    seen = starved.ask("availability_epoch")
    starved.send("alloc", 4 * B)
    starved.send("wait_for_epoch", seen, DEADLINE_S)  # at once: a pool soon forgets an alloc
    assert starved.read() is None
    device.set_pages(DEVICE_PAGES + 4)
    assert starved.read() != seen
    wait_until(lambda: starved.stats()["pages_mapped"] == 5, "the pages do not come")
    wait_until(lambda: starved.alloc(4 * B) is not None, "what has come is not handed out")


# ------------------------------------------------------------------------------ refused, killed


def test_capacity_below_guarantees_is_rejected_with_both_values(device):
    device.start(KVELASTIC_MIN=str(6 * PAGE))
    device.start(KVELASTIC_MIN=str(4 * PAGE))
    with pytest.raises(GuaranteeError, match=r"16\.00 MiB.*20\.00 MiB"):
        device.set_pages(8)
    with pytest.raises(InvalidArgumentError, match="at least"):
        device.set_pages(0)
    assert device.look().capacity_bytes == DEVICE_PAGES * PAGE
    assert device.set_pages(10) == DEVICE_PAGES


def test_guarantees_of_dead_members_do_not_count(device):
    device.start()
    dead = device.start(KVELASTIC_MIN=str(20 * PAGE))
    dead.kill()
    assert device.set_pages(4) == DEVICE_PAGES


SETTER = """
import sys
from kvelastic.shared import ledger
print("ready", flush=True)
while True:
    for pages in int(sys.argv[2]), int(sys.argv[3]):
        ledger.set_capacity("host", group=sys.argv[1], capacity_bytes=pages << 21)
"""


def test_killed_capacity_setter_leaves_a_consistent_ledger(device):
    one = device.start(KVELASTIC_MIN=str(6 * PAGE))
    for _ in range(5):
        with LineProgram("-c", SETTER, device.group, "8", "24") as setter:
            assert setter.read() == "ready"
            wait_until(
                lambda: device.look().capacity_bytes != DEVICE_PAGES * PAGE, "it sets nothing"
            )
        assert device.look().capacity_bytes in {8 * PAGE, 24 * PAGE}
        device.set_pages(DEVICE_PAGES)
    wait_until(lambda: one.stats()["pages_limit"] == DEVICE_PAGES, "the limit does not grow")
    one.cache(fill(one, 12))
    device.set_pages(7)
    wait_until(lambda: device.held() <= 7, "it is not given back")
    one.ask("check_integrity")


def test_invalid_ledger_file_is_rejected(device):
    with pytest.raises(LedgerError, match="no instance"):
        device.set_pages(8)
    device.path.write_bytes(b"none")
    try:
        with pytest.raises(LedgerError):
            device.set_pages(8)
        if os.geteuid() == 0:
            os.chown(device.path, 12345, -1)
            with pytest.raises(LedgerForeignError, match="12345"):
                device.set_pages(8)
            done = kvctl("capacity", "host", "8G", "--group", device.group)
            assert (done.exit_code, done.stdout) == (1, "")
            assert "12345" in done.stderr
    finally:
        device.path.unlink()


# ----------------------------------------------------------------------------------- kvctl


def test_kvctl_capacity_sets_waits_and_prints(device):
    one = device.start(KVELASTIC_MIN=str(2 * PAGE))
    ids = fill(one, 12)
    of = ("--group", device.group)

    refused = kvctl("capacity", "host", "1M", *of)
    assert refused.exit_code == 1
    assert "4.00 MiB" in refused.stderr
    assert kvctl("capacity", "host", "much", *of).exit_code == 2
    absent = kvctl("capacity", "GPU-0", "1G", *of)
    assert absent.exit_code == 1
    assert "no instance" in absent.stderr

    late = kvctl("capacity", "host", "16M", *of, "--wait", "0.05")
    assert late.exit_code == 3
    assert "8.00 MiB are still to be given back" in late.stderr
    assert kvctl("capacity", "host", "16M", *of).exit_code == 0
    one.free(ids[7 * B :])
    done = kvctl("capacity", "host", "16M", *of, "--wait", str(DEADLINE_S))
    assert done.exit_code == 0, done.stderr
    assert "16.00 MiB are held" in done.stdout

    # Another environment's variable is not what the instances go by.
    shown = kvctl("devices", "--json", KVELASTIC_HOST_MEMORY="3G", KVELASTIC_LEDGER=device.group)
    assert json.loads(shown.stdout)[0]["capacity_bytes"] == 16 << 20


def test_capacity_is_kept_until_the_last_member_leaves(device):
    with device.start():
        device.set_pages(8)
        with device.start():
            assert device.look().capacity_bytes == 8 * PAGE
    assert not device.path.exists()
    with device.start():
        assert device.look().capacity_bytes == DEVICE_PAGES * PAGE
