"""A GiB that moves from an idle instance's prefix cache to a busy one's blocks, on the host."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Figure
from benchmarks.ledger import kernel_floor
from benchmarks.ledger.instance import BLOCKS_PER_PAGE, Instance
from benchmarks.ledger.own_device import OwnDevice
from kvelastic import _vmm

GIB = 1 << 30
PAGE_MIB = 16
"""The default page of a Llama-3-8B."""
PAGES = (GIB >> 20) // PAGE_MIB
BLOCKS = PAGES * BLOCKS_PER_PAGE
LOOK_EVERY_S = 0.001
IDLE_S = _vmm.RECLAIM_IDLE_NS / 1e9 + 0.05
SOON_S = 30.0


@dataclass(frozen=True)
class Size:
    """How many times it moves."""

    rounds: int


FULL = Size(rounds=15)
QUICK = Size(rounds=3)


@dataclass
class Round:
    """One GiB moved, and what the kernel alone took for it right after."""

    asked_ms: float
    refused: int
    """How many allocs of the asker answered no before one had all."""
    asker_cpu_ms: float
    giver_cpu_ms: float
    first_page_ms: float
    """Until the giver had given its first batch."""
    given_ms: float
    """Until it had given the last one."""
    kernel: kernel_floor.KernelTimes


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
        while not self._stop.wait(LOOK_EVERY_S):
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
    idle.ask("take_evicted")
    times_ms = [1000 * (at - start) for at in watch.times_s]
    return Round(
        asked_ms=answer["ms"],
        refused=got["refused"],
        asker_cpu_ms=answer["cpu_ms"],
        giver_cpu_ms=giver_cpu_ms,
        first_page_ms=times_ms[0],
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
    """Of the ask, beside the kernel's time, and where the time goes."""
    done = rounds(size.rounds)
    serial = [one.kernel.punch_ms + one.kernel.fill_ms for one in done]
    ask = Figure("from ask to mapped, 1 GiB", "ms", [one.asked_ms for one in done], "<= 50 ms")
    ask.floor_name, ask.floor_samples = "kernel, punch + fill", serial
    asker = Figure("  the asker's processor time", "ms", [one.asker_cpu_ms for one in done])
    asker.floor_name = "kernel, fill"
    asker.floor_samples = [one.kernel.fill_ms for one in done]
    giver = Figure("  the giver's processor time", "ms", [one.giver_cpu_ms for one in done])
    giver.floor_name = "kernel, punch"
    giver.floor_samples = [one.kernel.punch_ms for one in done]
    first = Figure("  until the first batch is given", "ms", [one.first_page_ms for one in done])
    last = Figure("  until the last batch is given", "ms", [one.given_ms for one in done])
    zero = Figure("kernel: 1 GiB of huge pages zeroed", "ms", [one.kernel.zero_ms for one in done])
    zero.floor_name = "memset of as much"
    zero.floor_samples = [one.kernel.memset_ms for one in done]
    pair = Figure("kernel: fill by two threads", "ms", [one.kernel.two_threads_ms for one in done])
    pair.floor_name, pair.floor_samples = "by one", asker.floor_samples
    share = 100 * zero.median / ask.median
    ask.note = (
        f"pages of {PAGE_MIB} MiB; the kernel's zeroing alone is {share:.0f} % of it"
        f" ({zero.median:.0f} ms), so a bar under that cannot be reached on this machine;"
        f" {sum(one.refused > 0 for one in done)} of {len(done)} rounds were refused at first"
    )
    return [ask, asker, giver, first, last, zero, pair]
