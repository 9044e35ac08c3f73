"""What vmm_csrc/driver/driver.h promises of every driver."""

from __future__ import annotations

import itertools
import os
import signal
import threading

import pytest
from processes import run_python

from kvelastic import errors

FAULTS = (signal.SIGSEGV, signal.SIGBUS)


@pytest.fixture
def unit(device):
    return device.driver.granularity_bytes


@pytest.fixture
def window(device, unit):
    """Addresses of eight pages; given back at the end, empty."""
    address = device.driver.reserve(8 * unit)
    yield address
    device.driver.release(address, 8 * unit)


def test_granularity_is_power_of_two_of_system_pages(unit):
    assert unit >= os.sysconf("SC_PAGE_SIZE")
    assert unit & (unit - 1) == 0


def test_reserved_range_is_aligned_and_uses_no_memory(device, unit):
    for bytes_ in (unit, 3 * unit, 4096 * unit):
        address = device.driver.reserve(bytes_)
        assert address % unit == 0
        assert device.held_bytes() == 0
        device.driver.release(address, bytes_)


def test_ranges_do_not_overlap(device, unit):
    spans = sorted((device.driver.reserve(n * unit), n * unit) for n in (1, 2, 3, 4, 5))
    for (first, length), (second, _) in itertools.pairwise(spans):
        assert first + length <= second
    for span in spans:
        device.driver.release(*span)


@pytest.mark.parametrize("pages", [1, 3])
def test_remapped_range_has_zeroed_pages(device, unit, pages, window):
    for _ in range(3):
        handle = device.driver.create(pages * unit)
        device.driver.map(window, pages * unit, handle)
        device.driver.set_access(window, pages * unit)
        assert device.read(window, pages * unit) == bytes(pages * unit)
        device.write(window, b"\xa5" * (pages * unit))
        device.driver.unmap(window, pages * unit)
        device.driver.destroy(handle, pages * unit)


def test_page_contents_survive_remapping(device, unit, window):
    handles = [device.driver.create(unit) for _ in range(3)]
    for i, handle in enumerate(handles):
        device.driver.map(window + i * unit, unit, handle)
    device.driver.set_access(window, 3 * unit)
    for i in range(3):
        device.write(window + i * unit, bytes([i + 1]) * unit)
    device.driver.unmap(window, 3 * unit)  # one call for a run of whole pages
    for i, handle in enumerate(reversed(handles)):
        device.driver.map(window + (4 + i) * unit, unit, handle)
    device.driver.set_access(window + 4 * unit, 3 * unit)
    for i in range(3):
        assert device.read(window + (4 + i) * unit, unit) == bytes([3 - i]) * unit
    device.driver.unmap(window + 4 * unit, 3 * unit)
    for handle in handles:
        device.driver.destroy(handle, unit)


def test_created_page_is_resident_before_first_access(device, unit, window):
    handle = device.driver.create(2 * unit)
    assert device.held_bytes() == 2 * unit
    device.driver.map(window, 2 * unit, handle)
    device.driver.set_access(window, 2 * unit)
    device.write(window + 2 * unit - 1, b"x")
    assert device.held_bytes() == 2 * unit
    device.driver.unmap(window, 2 * unit)
    assert device.held_bytes() == 2 * unit, "an unmapped page still holds its contents"
    device.driver.destroy(handle, 2 * unit)
    assert device.held_bytes() == 0


TOUCH = """
import ctypes, sys
{source}
unit = driver.granularity_bytes
at = driver.reserve(4 * unit)
if sys.argv[1] != "never mapped":
    handle = driver.create(unit)
    driver.map(at + unit, unit, handle)
    driver.set_access(at + unit, unit)
    ctypes.memset(at + unit, 7, unit)
if sys.argv[1] == "unmapped":
    driver.unmap(at + unit, unit)
print("alive", flush=True)
ctypes.string_at(at + int(sys.argv[2]) * unit, 1)
print("read", flush=True)
"""


@pytest.mark.parametrize(
    ("state", "page", "dies"),
    [
        ("never mapped", 1, True),
        ("mapped", 1, False),
        ("mapped", 0, True),
        ("mapped", 2, True),
        ("unmapped", 1, True),
    ],
)
def test_access_to_unmapped_pages_faults(device, state, page, dies):
    if not device.unmapped_faults:
        pytest.skip("addresses of this device are not the processor's")
    touch = TOUCH.format(source=device.source)
    run = run_python("-c", touch, state, str(page), exit_code=None)
    assert run.stdout.split() == (["alive"] if dies else ["alive", "read"]), run.stderr
    assert (-run.returncode in FAULTS) if dies else run.returncode == 0


@pytest.mark.parametrize("call", ["reserve", "create"])
def test_invalid_sizes_are_refused(device, unit, call):
    for bytes_ in (0, 1, unit - 1, unit + 1, 3 * unit // 2):
        with pytest.raises(errors.InvalidArgumentError, match=str(bytes_)):
            getattr(device.driver, call)(bytes_)
    assert device.driver.stats()["creates"] == 0


@pytest.mark.parametrize("call", ["reserve", "create"])
@pytest.mark.parametrize("power", [48, 62, 63, 64])
def test_huge_sizes_are_refused_without_side_effects(device, unit, window, call, power):
    """The last size of 2^64 wraps around to nothing where sums are not looked after."""
    handles = [device.driver.create(unit) for _ in range(2)]
    for i, handle in enumerate(handles):
        device.driver.map(window + i * unit, unit, handle)
    device.driver.set_access(window, 2 * unit)
    device.write(window, b"k" * (2 * unit))
    for less in (1, 2):
        with pytest.raises((errors.DriverError, errors.InvalidArgumentError)):
            getattr(device.driver, call)((1 << power) - less * unit + (unit if power < 64 else 0))
    assert device.held_bytes() == 2 * unit
    assert device.read(window, 2 * unit) == b"k" * (2 * unit)
    fresh = device.driver.create(unit)
    device.driver.map(window + 2 * unit, unit, fresh)
    device.driver.set_access(window + 2 * unit, unit)
    device.write(window + 2 * unit, b"n" * unit)
    assert device.read(window, 2 * unit) == b"k" * (2 * unit), "a new page is nobody else's"
    device.driver.unmap(window, 3 * unit)
    for handle in (*handles, fresh):
        device.driver.destroy(handle, unit)


def test_statistics_count_driver_calls(device, unit, window):
    assert {device.driver.stats()[name] for name in ("creates", "maps")} == {0}
    handle = device.driver.create(unit)
    device.driver.map(window, unit, handle)
    device.driver.set_access(window, unit)
    device.driver.unmap(window, unit)
    device.driver.map(window + unit, unit, handle)
    device.driver.unmap(window + unit, unit)
    device.driver.destroy(handle, unit)
    stats = device.driver.stats()
    assert {name: stats[name] for name in ("creates", "destroys", "maps", "unmaps")} == {
        "creates": 1,
        "destroys": 1,
        "maps": 2,
        "unmaps": 2,
    }


def test_drain_returns(device):
    device.driver.drain()


@pytest.mark.slow
def test_concurrent_threads_get_distinct_pages(device, unit):
    """Each thread writes its mark into its pages and finds it there; at the end nothing is left."""
    threads, rounds = 4, 12
    base = device.driver.reserve(2 * threads * unit)
    wrong: list[object] = []

    def work(me: int) -> None:
        at = base + 2 * me * unit
        mark = bytes([me + 1]) * 4096
        try:
            for _ in range(rounds):
                handles = [device.driver.create(unit) for _ in range(2)]
                for i, handle in enumerate(handles):
                    device.driver.map(at + i * unit, unit, handle)
                device.driver.set_access(at, 2 * unit)
                if device.read(at, 2 * unit).count(0) != 2 * unit:
                    wrong.append("a new page is not zero")
                device.write(at, mark)
                device.write(at + unit, mark)
                if device.read(at, 4096) + device.read(at + unit, 4096) != 2 * mark:
                    wrong.append("another thread wrote here")
                device.driver.unmap(at, 2 * unit)
                for handle in handles:
                    device.driver.destroy(handle, unit)
        except Exception as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert device.held_bytes() == 0
    device.driver.release(base, 2 * threads * unit)


def test_forked_child_cannot_free_its_parents_pages(device, unit, window):
    """A child that drops what it inherited must not take the memory from under its parent."""
    handle = device.driver.create(unit)
    device.driver.map(window, unit, handle)
    device.driver.set_access(window, unit)
    device.write(window, b"parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for attempt in (
                lambda: device.driver.destroy(handle, unit),
                lambda: device.driver.create(unit),
            ):
                try:
                    attempt()
                except errors.DriverError:
                    continue
                os._exit(2)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child was not refused"
    assert device.read(window, 6) == b"parent"
    assert device.held_bytes() == unit
    device.driver.unmap(window, unit)
    device.driver.destroy(handle, unit)
