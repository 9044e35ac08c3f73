"""One simulated instance: its pages, its queue, and the reclaim requests of others.

Pure accounting in whole pages, where vmm_csrc/pool counts blocks: a page is in use, cached or
parked. Who may have how many is for the device (simulation.py) to say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvelastic.errors import IntegrityError
from tools.reclaim_simulator import REQUEST_EXPIRY_NS, Contender, Depth
from tools.reclaim_simulator.trace import Arrival, ModelSpec

PRESSURE_EXPIRY_NS: Final = 500_000_000
"""Memory pressure that no request renews ends after this time (vmm_csrc/pool/pressure.h)."""


@dataclass(eq=False)
class Request:
    """One request on its way through the instance."""

    arrival: Arrival
    pages: int
    cached_pages: int
    queued_ns: int
    """When it began to wait."""
    waited_ns: int = 0
    """In waits before that one: it was preempted then."""
    started: int = 0
    """How often it has begun; an end that was meant for an earlier start does not count."""


@dataclass
class Owed:
    """Bytes that an requester waits for."""

    requester: int
    bytes: int


@dataclass
class Instance:
    """The state of one model. Pages, unless a name says otherwise."""

    index: int
    spec: ModelSpec
    limit_pages: int
    asleep: bool = False
    """It holds nothing, and its guarantee and reserve count for nothing."""
    is_to_sleep: bool = False
    """When it has no request left."""
    claimed_ns: int | None = None
    """Since when it claims its guarantee and reserve, to wake; None: it does not."""
    cached: int = 0
    parked: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    """By id(); the newest last."""
    in_use: int = 0
    queue: deque[Request] = field(default_factory=deque)

    active_ns: int = 0
    parked_low: int = 0
    """The least that was parked since the last step of the decay."""
    parked_taken: int = 0
    """Parked pages that requests took since then."""
    decay_taken: deque[int] | None = None
    """The same in each of the last steps; None: no decay is set."""
    decay_kept: int = 0
    """Pages that the last step left."""

    request_bytes: int = 0
    request_since_ns: int = 0
    request_seen_ns: int = 0
    wait_until_ns: int | None = None
    """The end of the wait of an alloc that waits now."""
    has_waited: bool = False
    """Whether that alloc has waited at all."""
    no_wait_before_ns: int = 0
    missing_pages: int = 0
    """What the last alloc could not be granted: the maintenance thread renews its request."""
    missing_since_ns: int = 0

    reclaim: dict[Depth, list[Owed]] = field(default_factory=lambda: {d: [] for d in Depth})
    reclaim_since_ns: int = 0
    pressure_pages: int | None = None
    pressure_since_ns: int = 0
    pressure_until_ns: int = 0
    owed: list[Owed] = field(default_factory=list)
    """Pages that memory pressure has still to free."""

    cached_lost: int = 0
    """Evicted for requests of others."""
    cached_evicted: int = 0
    """Evicted for its own requests."""
    peak: int = 0

    @property
    def counts(self) -> bool:
        """Whether its guarantee and reserve are in the device's account."""
        return not self.asleep or self.claimed_ns is not None

    @property
    def held(self) -> int:
        """All that is mapped."""
        return self.in_use + self.cached + self.parked

    @property
    def granted_bytes(self) -> int:
        """The same in bytes."""
        return self.held * self.spec.page_bytes

    @property
    def guaranteed(self) -> int:
        """What nobody takes."""
        return -(-self.spec.min_bytes // self.spec.page_bytes)

    @property
    def bound(self) -> int:
        """The limit that counts now: memory pressure makes it smaller."""
        if self.pressure_pages is None:
            return self.limit_pages
        return min(self.limit_pages, self.pressure_pages)

    @property
    def over(self) -> int:
        """What it has to give back before it may take anything."""
        return max(0, self.held - self.bound)

    def mappable(self) -> int:
        """How many pages it may still request."""
        return max(0, self.bound - self.held)

    def reachable(self) -> int:
        """What an alloc could have if the device had everything."""
        return min(self.bound - self.in_use, self.parked + self.cached + self.mappable())

    def requested(self, now_ns: int) -> int:
        """Bytes; a request expires unless it is renewed."""
        return self.request_bytes if now_ns - self.request_seen_ns < REQUEST_EXPIRY_NS else 0

    def open_bytes(self) -> int:
        """Bytes of all open reclaim requests."""
        return sum(one.bytes for requests in self.reclaim.values() for one in requests)

    def contender(self, now_ns: int) -> Contender:
        """The facts that the policy plans by; one with a request in use is never idle."""
        page_bytes = self.spec.page_bytes
        request_bytes = self.requested(now_ns)
        return Contender(
            granted_bytes=self.granted_bytes,
            min_bytes=self.spec.min_bytes if self.counts else 0,
            priority=self.spec.priority,
            parked_bytes=self.parked * page_bytes,
            cached_bytes=self.cached * page_bytes,
            page_bytes=page_bytes,
            idle_ns=0 if self.running else now_ns - self.active_ns,
            request_bytes=request_bytes,
            request_ns=now_ns - self.request_since_ns if request_bytes > 0 else 0,
            reclaim_bytes=self.open_bytes(),
            reclaim_ns=now_ns - self.reclaim_since_ns,
        )

    def fall_asleep(self) -> None:
        """Give everything back. Pre: no request runs or waits."""
        self.asleep, self.is_to_sleep = True, False
        self.cached = self.parked = self.parked_low = 0
        self.missing_pages = self.request_bytes = 0
        self.wait_until_ns = self.pressure_pages = None
        self.owed.clear()

    # --- pages ----------------------------------------------------------------------------------

    def note_activity(self, now_ns: int) -> None:
        """Say that there was an alloc or a free."""
        self.active_ns = now_ns

    def add(self, pages: int) -> None:
        """Take granted pages in: they are parked."""
        self.parked += pages
        self.peak = max(self.peak, self.held)

    def begin(self, request: Request, now_ns: int) -> None:
        """Use parked pages for a request. Pre: enough are parked."""
        self.parked -= request.pages
        self.parked_taken += request.pages
        self.in_use += request.pages
        self.parked_low = min(self.parked_low, self.parked)
        request.started += 1
        self.running[id(request)] = request
        self.note_activity(now_ns)

    def end(self, request: Request, cached: int, now_ns: int) -> None:
        """Take a request's pages out of use; `cached` of them keep their contents."""
        del self.running[id(request)]
        self.in_use -= request.pages
        self.cached += cached
        self.parked += request.pages - cached
        self.note_activity(now_ns)

    def evict(self, pages: int) -> int:
        """Park cached pages, at most so many; returns how many it were."""
        pages = min(pages, self.cached)
        self.cached -= pages
        self.parked += pages
        return pages

    def unmap(self, pages: int) -> int:
        """Give parked pages away, at most so many; returns how many it were."""
        pages = min(pages, self.parked)
        self.parked -= pages
        self.parked_low = min(self.parked_low, self.parked)
        return pages

    def give_up(self, pages: int, depth: Depth, now_ns: int) -> int:
        """Reclaim pages for others, step by step; returns the pages given at once.

        Memory pressure on blocks in use: no request begins until enough have ended.
        """
        target = max(self.held - pages, min(self.guaranteed, self.held))
        given = self._down_to(target, depth)
        if depth is Depth.IN_USE and self.held > target:
            if self.pressure_pages is None:
                self.pressure_since_ns = now_ns
            self.pressure_pages = target
            self.pressure_until_ns = now_ns + PRESSURE_EXPIRY_NS
        if given > 0 and self.held < self.guaranteed:
            raise IntegrityError(f"{self.spec.name} was taken below its min.")
        return given

    def enforce(self) -> int:
        """Give back what is over the bound and not in use; returns the pages given."""
        return self._down_to(self.bound, Depth.CACHED) if self.over > 0 else 0

    def _down_to(self, target: int, depth: Depth) -> int:
        missing = max(0, self.held - target)
        if depth is not Depth.PARKED and self.parked < missing:
            self.cached_lost += self.evict(missing - self.parked)
        return self.unmap(missing)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where the books of this instance contradict themselves."""
        name = self.spec.name
        if min(self.cached, self.parked, self.in_use) < 0:
            raise IntegrityError(f"{name} has less than nothing of some kind of page.")
        if self.in_use != sum(request.pages for request in self.running.values()):
            raise IntegrityError(f"{name} counts pages as in use that no request has.")
        if self.asleep and self.held:
            raise IntegrityError(f"{name} sleeps and holds {self.held} pages.")
        if self.held > self.limit_pages:
            raise IntegrityError(f"{name} holds {self.held} pages, over {self.limit_pages}.")
