"""One process that takes pages of a ledger and returns them; eight_takers.py runs several.

It holds up to `MOST_GRANTS` grants at a time and returns any of them, so that the device is full
now and then. What it holds it also adds to a total that all share, in one atomic step, after it was
granted and until before it is returned: that total is never more than what is granted, so one look
that finds it above the capacity proves that a page was two's.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks.ledger.baseline import Baseline, Place
from benchmarks.ledger.own_device import join

PAGE_BYTES = 2 << 20
MOST_PAGES = 2
"""One grant asks for 1 to this many."""
MOST_GRANTS = 2
BETWEEN_CLOCKS = 64
NATIVE_CALLS = 5_000


@dataclass(frozen=True)
class Order:
    """What to do in one round: `how` is checked, ledger, mutex or end."""

    how: str
    begin_s: float = 0.0
    """By time.monotonic(), which all processes share: so all begin together."""
    seconds: float = 0.0


@dataclass
class Done:
    """What one taker did in one round."""

    operations: int = 0
    """Grants that gave something, and returns."""
    refused: int = 0
    """Grants that gave nothing: the device was full."""
    longest_without_s: float = 0.0
    """From one grant that gave something to the next one."""
    longest_refused_cpu_s: float = 0.0
    """Processor time that it has spent from one such grant to the next one, about: what it was
    refused in, and not what the machine had no processor for."""
    most_total_pages: int = 0
    """The shared total, as it was right after this taker had added to it."""
    held_pages: int = 0
    """When the round is over."""
    seconds: float = 0.0


@dataclass
class Taker:
    """One member of the ledger, and what it holds of it."""

    group: str
    capacity_pages: int
    name: str
    place: Place
    held: list[int] = field(default_factory=list)

    def serve(self, orders: Connection) -> None:
        """Carries out what comes through the pipe until told to end."""
        dice = random.Random(self.name)
        baseline = Baseline.open(self.place)
        with join(self.group, self.capacity_pages * PAGE_BYTES, self.name) as joined:
            orders.send("ready")
            while True:
                order: Order = orders.recv()
                if order.how == "end":
                    break
                time.sleep(max(order.begin_s - time.monotonic(), 0))
                if order.how == "checked":
                    done = self.checked(joined.member, baseline, dice, order.seconds)
                else:
                    done = self.native(joined.member, baseline, order)
                orders.send(done)
            for pages in self.held:
                baseline.add_to_total(-pages)
                joined.member.give_back(pages, PAGE_BYTES)
        baseline.close()

    def checked(self, member: object, baseline: Baseline, dice: random.Random, s: float) -> Done:
        """Takes and returns from Python; every step is checked."""
        grant, give_back = member.grant, member.give_back  # type: ignore[attr-defined]
        done = Done()
        begin = last = now = time.perf_counter()
        served_cpu_s = time.thread_time()
        while now < begin + s:
            last_before = last
            for _ in range(BETWEEN_CLOCKS):
                if self.held and (len(self.held) == MOST_GRANTS or dice.random() < 0.5):
                    pages = self.held.pop(dice.randrange(len(self.held)))
                    baseline.add_to_total(-pages)
                    give_back(pages, PAGE_BYTES)
                    done.operations += 1
                    continue
                pages = grant(dice.randint(1, MOST_PAGES), PAGE_BYTES)
                if pages == 0:
                    done.refused += 1
                    continue
                total = baseline.add_to_total(pages)
                self.held.append(pages)
                done.operations += 1
                done.most_total_pages = max(done.most_total_pages, total)
                now = time.perf_counter()
                done.longest_without_s = max(done.longest_without_s, now - last)
                last = now
            now, cpu_s = time.perf_counter(), time.thread_time()
            done.longest_refused_cpu_s = max(done.longest_refused_cpu_s, cpu_s - served_cpu_s)
            if last != last_before:
                served_cpu_s = cpu_s
        done.longest_without_s = max(done.longest_without_s, now - last)
        done.held_pages = sum(self.held)
        done.seconds = now - begin
        return done

    def native(self, member: object, baseline: Baseline, order: Order) -> Done:
        """One page taken and returned in a native loop: by the ledger, or under the mutex."""
        done = Done()
        begin = now = time.perf_counter()
        while now < begin + order.seconds:
            if order.how == "ledger":
                member.measure_grant_ns(PAGE_BYTES, NATIVE_CALLS)  # type: ignore[attr-defined]
            else:
                baseline.mutex_ns(self.capacity_pages, NATIVE_CALLS)
            done.operations += 2 * NATIVE_CALLS
            now = time.perf_counter()
        done.seconds = now - begin
        return done
