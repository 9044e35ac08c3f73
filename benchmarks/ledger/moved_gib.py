"""A GiB that moves from an idle instance's prefix cache to a busy one's blocks, on the host."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Figure
from benchmarks.ledger import kernel_floor
from benchmarks.ledger.instance import BLOCKS_PER_PAGE, LOOK_EVERY_S, Instance
from benchmarks.ledger.own_device import OwnDevice
from kvelastic import _vmm

GIB = 1 << 30
PAGE_MIB = 16
"""The default page of a Llama-3-8B."""
PAGES = (GIB >> 20) // PAGE_MIB
BLOCKS = PAGES * BLOCKS_PER_PAGE
GIVER_LOOK_EVERY_S = 0.001
IDLE_S = _vmm.RECLAIM_IDLE_NS / 1e9 + 0.05
SOON_S = 30.0


@dataclass(frozen=True)
class Size:
    """How many times it moves."""

    rounds: int


FULL = Size(rounds=100)
QUICK = Size(rounds=5)
COMPARE_EVERY = 10
"""Rounds; what explains the kernel's times takes longer than the round itself."""
FIRST_PAGE_MS = 10
LEAST_RATE = 0.85


@dataclass
class Round:
    """One GiB moved, and what the kernel alone took for it right after."""

    asked_ms: float
    refused: int
    """How many allocs of the requester answered no before one had all."""
    requester_cpu_ms: float
    giver_cpu_ms: float
    first_page_ms: float
    """Until the requester had blocks of the first page that came, mapped and zeroed."""
    rest_bytes: int
    """What came after that."""
    first_given_ms: float
    """Until the giver had given its first batch."""
    given_ms: float
    """Until it had given the last one."""
    kernel: kernel_floor.KernelTimes

    @property
    def rest_rate(self) -> float:
        """Bytes a millisecond of what came after the first page."""
        return self.rest_bytes / (self.asked_ms - self.first_page_ms)

    @property
    def kernel_rate(self) -> float:
        """Bytes a millisecond when the kernel does as much with nobody in between."""
        return GIB / self.kernel.moved_ms


@dataclass
class GiverWatch:
    """When the giver's first and its last batch came back, by the ledger."""

    device: OwnDevice
    name: str
    times_s: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until stopped."""
        last = self.device.granted()[self.name]
        while not self._stop.wait(GIVER_LOOK_EVERY_S):
            now = self.device.granted()[self.name]
            if now < last:
                self.times_s.append(time.perf_counter())
            last = now

    def stop(self) -> None:
        """The thread ends soon."""
        self._stop.set()


def move(device: OwnDevice, idle: Instance, name: str, busy: Instance) -> Round:
    """Pre: the idle one's blocks are cached, and it holds all but a page."""
    while device.idle_s(idle.pid) < IDLE_S:
        time.sleep(0.02)
    watch = GiverWatch(device, name)
    thread = threading.Thread(target=watch.run)
    before = idle.ask("nothing")["cpu_total_ms"]
    thread.start()
    start = time.perf_counter()
    answer: dict[str, Any] = busy.ask("alloc_until", BLOCKS, SOON_S)
    watch.stop()
    thread.join()
    got: dict[str, Any] = answer["result"]
    assert got["ids"] is not None, "it did not get them"
    giver_cpu_ms = idle.ask("nothing")["cpu_total_ms"] - before
    given_back = device.granted()[name]
    assert given_back <= (PAGE_MIB << 20), f"{given_back} bytes are still the idle one's"
    busy.ask("free", got["ids"])
    busy.ask("trim")
    idle.ask("take_changes")
    times_ms = [1000 * (at - start) for at in watch.times_s]
    # All in one batch: then the first page has come with the last.
    first_ms = got["done_ms"] if got["first_ms"] is None else got["first_ms"]
    first_bytes = (got["first_blocks"] * (PAGE_MIB << 20)) // BLOCKS_PER_PAGE
    return Round(
        asked_ms=got["done_ms"],
        refused=got["refused"],
        requester_cpu_ms=answer["cpu_ms"],
        giver_cpu_ms=giver_cpu_ms,
        first_page_ms=first_ms,
        rest_bytes=GIB - first_bytes,
        first_given_ms=times_ms[0],
        given_ms=times_ms[-1],
        kernel=kernel_floor.measure(GIB, PAGE_MIB << 20),
    )


def rounds(count: int) -> list[Round]:
    """The GiB goes to the busy one and back, `count` times."""
    # Each instance always holds the page of its null block.
    capacity = (PAGES + 2) * (PAGE_MIB << 20)
    done = []
    with OwnDevice(capacity, "gib") as device:
        environ = device.settings | {
            "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
            "KVELASTIC_RECLAIM_WAIT": str(SOON_S),
        }
        with (
            Instance(PAGES + 2, PAGE_MIB, **environ) as idle,
            Instance(PAGES + 2, PAGE_MIB, **environ) as busy,
        ):
            name = idle.read()["name"]
            busy.read()
            for one in (idle, busy):
                assert one.ask("alloc", BLOCKS_PER_PAGE - 1)["result"] is not None
            for _ in range(count):
                ids = idle.ask("alloc_until", BLOCKS, SOON_S)["result"]["ids"]
                assert ids is not None, "the idle one does not get its GiB back"
                idle.ask("cache", ids)
                done.append(move(device, idle, name, busy))
    return done


def figures(size: Size) -> list[Figure]:
    """The two bars, and where the time goes, beside the kernel's."""
    done = rounds(size.rounds)
    compared = [
        kernel_floor.compare(GIB, PAGE_MIB << 20)
        for _ in range(max(size.rounds // COMPARE_EVERY, 1))
    ]
    bar = f"p99 <= {FIRST_PAGE_MS} ms"
    first = Figure("from ask to the first page", "ms", [one.first_page_ms for one in done], bar)
    given = Figure("  of it until it is given", "ms", [one.first_given_ms for one in done])
    bar = f"ratio >= {LEAST_RATE}"
    rest = Figure("the rest of 1 GiB", "GB/s", [one.rest_rate / 1e6 for one in done], bar)
    rest.floor_name = "kernel, punch + fill"
    rest.floor_samples = [one.kernel_rate / 1e6 for one in done]
    ask = Figure("from ask to mapped, 1 GiB", "ms", [one.asked_ms for one in done])
    ask.floor_name, ask.floor_samples = rest.floor_name, [one.kernel.moved_ms for one in done]
    requester = Figure(
        "  the requester's processor time", "ms", [one.requester_cpu_ms for one in done]
    )
    requester.floor_name = "kernel, fill"
    requester.floor_samples = [one.kernel.fill_ms for one in done]
    giver = Figure("  the giver's processor time", "ms", [one.giver_cpu_ms for one in done])
    giver.floor_name = "kernel, punch"
    giver.floor_samples = [one.kernel.punch_ms for one in done]
    last = Figure("  until the last batch is given", "ms", [one.given_ms for one in done])
    zero = Figure("kernel: 1 GiB of huge pages zeroed", "ms", [one.zero_ms for one in compared])
    zero.floor_name = "memset of as much"
    zero.floor_samples = [one.memset_ms for one in compared]
    pair = Figure("kernel: fill by two threads", "ms", [one.two_threads_ms for one in compared])
    pair.floor_name, pair.floor_samples = "by one", requester.floor_samples
    share = 100 * zero.median / ask.median
    first.note = (
        f"pages of {PAGE_MIB} MiB, seen within {1000 * LOOK_EVERY_S:g} ms of their coming;"
        f" {sum(one.first_page_ms <= FIRST_PAGE_MS for one in done)} of {len(done)} within the bar"
    )
    ask.note = (
        f"the kernel's zeroing alone is {share:.0f} % of it ({zero.median:.0f} ms);"
        f" {sum(one.refused > 0 for one in done)} of {len(done)} rounds were refused at first"
    )
    return [first, given, rest, ask, requester, giver, last, zero, pair]
