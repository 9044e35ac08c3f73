"""A device that simulated instances share: replays a trace by the real policy, in simulated time.

    result = simulate(trace)
    result.models[0].served, result.moved_bytes

Deterministic: the same trace gives the same result. An alloc does what the product's does
(vmm_csrc/pool/grow.cpp): own parked pages, what the device has free, requests to others for at
most `alloc_wait_ns`, own cached contents; then it fails, the maintenance thread renews the request,
and the engine tries again. Nothing here sleeps or looks at a clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from kvelastic.errors import IntegrityError
from tools.reclaim_simulator import (
    PATIENCE_NS,
    REQUEST_EXPIRY_NS,
    RESERVE_WAIT_NS,
    Contender,
    Depth,
    ReclaimRequest,
    kept_bytes,
    plan_excess,
    plan_reclaim,
)
from tools.reclaim_simulator.account import Account
from tools.reclaim_simulator.instance import Instance, Owed, Request
from tools.reclaim_simulator.result import ModelResult, Move, SimulationResult
from tools.reclaim_simulator.trace import Arrival, Trace

LOOK_NS: Final = PATIENCE_NS
"""How often an alloc that waits, a maintenance thread and an engine look again."""
IDLE_TRIM_NS: Final = 5_000_000_000
"""The default of `KVELASTIC_IDLE_TRIM_SECONDS`."""
DECAY_STEPS: Final = 5
"""Steps in which parked pages go back (vmm_csrc/pool/parked_decay.h)."""
FRUITLESS_WAITS: Final = 8
"""After a fruitless wait, allocs do not wait for this many times its length (`Pool`)."""


def simulate(
    trace: Trace, after_step: Callable[[Simulation], None] | None = None
) -> SimulationResult:
    """Replay a trace to the end of its last request.

    `after_step` is called with the simulation after every event, for checks. Raises
    `IntegrityError` where the policy or the books break a rule.
    """
    simulation = Simulation(trace)
    while simulation.step():
        simulation.check_integrity()
        if after_step is not None:
            after_step(simulation)
    return simulation.finish()


class Simulation:
    """The device, its instances, and the events to come. Use `simulate`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now_ns = 0
        self.instances = [
            Instance(i, spec, trace.limit_bytes(i) // spec.page_bytes, asleep=spec.is_asleep)
            for i, spec in enumerate(trace.models)
        ]
        self.account = Account(trace.capacity_bytes, trace.total_bytes, self.instances)
        self.result = SimulationResult([ModelResult(spec.name) for spec in trace.models], [])
        self._undone = len(trace.arrivals)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._looks: list[int | None] = [None] * len(self.instances)
        self._answers: list[bool] = [False] * len(self.instances)
        for arrival in trace.arrivals:
            self._at(arrival.at_ns, partial(self._arrive, arrival))
        for sleep in trace.sleeps:
            self._at(sleep.at_ns, partial(self._put_to_sleep, self.instances[sleep.model]))

    def step(self) -> bool:
        """Let the next event happen. False: every request is done with."""
        if self._undone == 0:
            return False
        self.now_ns, _, happen = heapq.heappop(self._events)
        happen()
        return True

    def finish(self) -> SimulationResult:
        """Return the result, with the figures that the instances have."""
        for one, figures in zip(self.instances, self.result.models, strict=True):
            page_bytes = one.spec.page_bytes
            figures.peak_granted_bytes = one.peak * page_bytes
            figures.cached_lost_bytes = one.cached_lost * page_bytes
            figures.cached_evicted_bytes = one.cached_evicted * page_bytes
        self.result.end_ns = self.now_ns
        return self.result

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if more is held than there is, or an instance's books lie."""
        self.account.check_integrity()
        for one in self.instances:
            one.check_integrity()

    # --- events ---------------------------------------------------------------------------------

    def _at(self, time_ns: int, happen: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_ns, self._sequence, happen))

    def _look_at(self, one: Instance, time_ns: int) -> None:
        """Have that instance look around then, or earlier."""
        planned = self._looks[one.index]
        if planned is not None and planned <= time_ns:
            return
        self._looks[one.index] = time_ns
        self._at(time_ns, partial(self._look, one, time_ns))

    def _arrive(self, arrival: Arrival) -> None:
        one = self.instances[arrival.model]
        self.result.models[one.index].requests += 1
        page_bytes = one.spec.page_bytes
        pages = -(-arrival.bytes // page_bytes)
        request = Request(arrival, pages, -(-arrival.cached_bytes // page_bytes), self.now_ns)
        if pages > one.limit_pages:
            self._refuse(one)
            return
        one.queue.append(request)
        self._set_deadline(one, request)
        if one.asleep:
            self._wake(one)
        elif len(one.queue) == 1:
            self._serve_queue(one)

    def _set_deadline(self, one: Instance, request: Request) -> None:
        left_ns = max(0, request.arrival.deadline_ns - request.waited_ns)
        started = request.started

        def expire() -> None:
            if request.started != started or request not in one.queue:
                return
            if request is one.queue[0]:
                one.wait_until_ns = None
            one.queue.remove(request)
            self._refuse(one)
            self._serve_queue(one)
            self._sleep_if_idle(one)

        self._at(self.now_ns + left_ns, expire)

    def _refuse(self, one: Instance) -> None:
        self.result.models[one.index].refused += 1
        self._undone -= 1

    def _end(self, one: Instance, request: Request, started: int) -> None:
        if request.started != started or id(request) not in one.running:
            return  # it was preempted
        one.end(request, request.cached_pages, self.now_ns)
        figures = self.result.models[one.index]
        figures.served += 1
        figures.late += request.waited_ns > self.trace.late_ns
        figures.waits_ns.append(request.waited_ns)
        self._undone -= 1
        self._after_free(one)

    def _after_free(self, one: Instance) -> None:
        self._settle(one, one.enforce())
        self._arm_decay(one)
        self._serve_queue(one)
        self._sleep_if_idle(one)

    def _look(self, one: Instance, time_ns: int) -> None:
        """What waits, requests memory or is under pressure looks whether something has changed."""
        if self._looks[one.index] != time_ns:
            return  # an earlier look has taken its place
        self._looks[one.index] = None
        if one.asleep:
            self._pursue_claim(one)
            return
        self._watch_pressure(one)
        self._pursue(one)
        self._serve_queue(one)
        if one.queue or one.missing_pages > 0 or one.pressure_pages is not None:
            self._look_at(one, self.now_ns + LOOK_NS)

    # --- allocs ---------------------------------------------------------------------------------

    def _serve_queue(self, one: Instance) -> None:
        """The engine starts what it can, in the order of arrival."""
        while one.queue and not one.asleep and self._alloc(one, one.queue[0].pages):
            request = one.queue.popleft()
            request.waited_ns += self.now_ns - request.queued_ns
            one.begin(request, self.now_ns)
            end_ns = self.now_ns + request.arrival.hold_ns
            self._at(end_ns, partial(self._end, one, request, request.started))
        if one.queue and not one.asleep:
            self._look_at(one, self.now_ns + LOOK_NS)

    def _alloc(self, one: Instance, pages: int) -> bool:
        """Have so many pages parked; False: not now, or it waits (`wait_until_ns` is set)."""
        while pages <= one.reachable():
            if one.parked >= pages:
                one.wait_until_ns = None
                return True
            missing = min(pages - one.parked, one.mappable())
            if missing > 0:
                granted = self._grant(one, missing)
                if granted == missing:
                    self._satisfy(one)
                if granted > 0 or self._may_be_granted(one, missing):
                    continue
                if one.wait_until_ns is not None:
                    return False
            if pages > min(one.bound - one.in_use, one.parked + one.cached):
                break  # evicting what cannot be enough would lose contents for nothing
            one.cached_evicted += one.evict(pages - one.parked)
        one.wait_until_ns = None
        return False

    def _may_be_granted(self, one: Instance, pages: int) -> bool:
        """Ask for them. True: there is one already; else the wait is on or over."""
        if one.wait_until_ns is None:
            may_wait = self.now_ns >= one.no_wait_before_ns
            one.wait_until_ns = self.now_ns + (self.trace.alloc_wait_ns if may_wait else 0)
            one.has_waited = False
        hope = self._request(one, pages * one.spec.page_bytes)
        if self._room(one) > 0:
            return True
        if hope and self.now_ns < one.wait_until_ns:
            one.has_waited = True
            self._look_at(one, min(one.wait_until_ns, self.now_ns + LOOK_NS))
            return False
        if one.has_waited:
            one.no_wait_before_ns = self.now_ns + FRUITLESS_WAITS * self.trace.alloc_wait_ns
        one.wait_until_ns = None
        one.missing_pages, one.missing_since_ns = pages, self.now_ns
        self._look_at(one, self.now_ns + LOOK_NS)
        return False

    def _pursue(self, one: Instance) -> None:
        """Continue a failed alloc in the maintenance thread until its memory request expires."""
        if one.missing_pages == 0:
            return
        missing = min(one.missing_pages, one.mappable())
        if missing == 0 or self.now_ns - one.missing_since_ns > REQUEST_EXPIRY_NS:
            self._satisfy(one)
            return
        one.missing_pages = missing - self._grant(one, missing)
        if one.missing_pages == 0:
            self._satisfy(one)
        else:
            self._request(one, one.missing_pages * one.spec.page_bytes)

    def _satisfy(self, one: Instance) -> None:
        one.missing_pages = 0
        one.no_wait_before_ns = 0
        if one.request_bytes > 0:
            one.request_bytes = 0
            self._wake_requesters(one)  # what was kept for this one is theirs

    # --- the ledger -----------------------------------------------------------------------------

    def _room(self, one: Instance) -> int:
        """Pages that it would be granted now: what is free and kept for nobody who ranks before."""
        free_bytes = self.account.free_bytes
        if any(other is not one and other.requested(self.now_ns) for other in self.instances):
            contenders = [other.contender(self.now_ns) for other in self.instances]
            contenders[one.index] = replace(contenders[one.index], idle_ns=0)
            free_bytes -= kept_bytes(contenders, one.index, self.account.left_bytes)
        return max(0, free_bytes) // one.spec.page_bytes

    def _grant(self, one: Instance, pages: int) -> int:
        granted = min(pages, self._room(one))
        one.add(granted)
        if granted > 0:
            self._arm_decay(one)
        return granted

    def _request(self, one: Instance, count_bytes: int) -> bool:
        """Request missing bytes from others. Return False if no instance has to release any."""
        now_ns = self.now_ns
        if one.requested(now_ns) == 0:
            one.request_since_ns = now_ns
        one.request_seen_ns = now_ns
        one.request_bytes = count_bytes
        contenders = [other.contender(now_ns) for other in self.instances]
        free_bytes = self.account.free_bytes
        plan = plan_reclaim(contenders, one.index, free_bytes, self.account.left_bytes)
        self._send_requests(one, plan, contenders)
        return (
            bool(plan)
            or free_bytes >= count_bytes
            or any(facts.reclaim_bytes > 0 for i, facts in enumerate(contenders) if i != one.index)
        )

    def _send_requests(
        self, one: Instance, plan: list[ReclaimRequest], contenders: list[Contender]
    ) -> None:
        """Send the reclaim requests of a plan for an instance that lacks memory."""
        now_ns = self.now_ns
        for request in plan:
            facts = contenders[request.contender]
            left_bytes = facts.granted_bytes - facts.reclaim_bytes - request.bytes
            if left_bytes < facts.min_bytes:
                raise IntegrityError(f"a plan goes below the min of {request.contender}.")
            victim = self.instances[request.contender]
            if victim.open_bytes() == 0:
                victim.reclaim_since_ns = now_ns
            victim.reclaim[request.depth].append(Owed(one.index, request.bytes))
            if not self._answers[victim.index]:
                self._answers[victim.index] = True
                self._at(now_ns + victim.spec.give_back_ns, partial(self._answer, victim))

    # --- sleep and wake -------------------------------------------------------------------------

    def _put_to_sleep(self, one: Instance) -> None:
        one.is_to_sleep = not one.asleep
        self._sleep_if_idle(one)

    def _sleep_if_idle(self, one: Instance) -> None:
        """What it holds, its guarantee and its reserve are others' from now on."""
        if one.is_to_sleep and not one.running and not one.queue:
            one.fall_asleep()
            self._wake_requesters(one)

    def _wake(self, one: Instance) -> None:
        """Claim guarantee and reserve; refused where the sums do not allow it."""
        if one.claimed_ns is not None:
            return
        if self.account.has_room_for(one):
            one.claimed_ns = self.now_ns
            self._pursue_claim(one)
        else:
            self.result.models[one.index].wakes_refused += 1

    def _pursue_claim(self, one: Instance) -> None:
        """Wake it when its reserve is available; others must release it in a limited time."""
        if one.claimed_ns is None:
            return
        figures, waited_ns = self.result.models[one.index], self.now_ns - one.claimed_ns
        if self.account.is_there(one):
            one.asleep, one.claimed_ns = False, None
            figures.wakes_ns.append(waited_ns)
            one.note_activity(self.now_ns)
            self._serve_queue(one)
        elif waited_ns >= RESERVE_WAIT_NS:
            one.claimed_ns = None
            figures.wakes_refused += 1
            self._wake_requesters(one)
        else:
            contenders = [other.contender(self.now_ns) for other in self.instances]
            excess_bytes, left_bytes = self.account.excess_bytes, self.account.left_bytes
            self._send_requests(one, plan_excess(contenders, excess_bytes, left_bytes), contenders)
            self._look_at(one, self.now_ns + LOOK_NS)

    # --- victims --------------------------------------------------------------------------------

    def _answer(self, victim: Instance) -> None:
        """Its maintenance thread carries out all reclaim requests, the shallowest first."""
        self._answers[victim.index] = False
        for depth, requests in victim.reclaim.items():
            if not requests:
                continue
            victim.reclaim[depth] = []
            victim.reclaim_since_ns = self.now_ns
            pages = -(-sum(one.bytes for one in requests) // victim.spec.page_bytes)
            given = victim.give_up(pages, depth, self.now_ns)
            victim.owed += requests
            self._settle(victim, given, depth)
        if victim.pressure_pages is None:
            victim.owed.clear()  # no more was available
        else:
            self._look_at(victim, self.now_ns)

    def _settle(self, victim: Instance, pages: int, depth: Depth = Depth.IN_USE) -> None:
        """Credit released memory to the requesters, the first one first."""
        left_bytes = pages * victim.spec.page_bytes
        if left_bytes == 0:
            return
        while left_bytes > 0 and victim.owed:
            first = victim.owed[0]
            # An excess is the rest of a page: the last requester gets it.
            last = len(victim.owed) == 1
            given_bytes = left_bytes if last else min(left_bytes, first.bytes)
            first.bytes -= given_bytes
            left_bytes -= given_bytes
            self._book(victim, first.requester, given_bytes, depth)
            if first.bytes <= 0:
                victim.owed.pop(0)
        self._wake_requesters(victim)

    def _book(self, victim: Instance, requester: int, count_bytes: int, depth: Depth) -> None:
        got = self.result.models[requester].got_bytes_from
        got[victim.spec.name] = got.get(victim.spec.name, 0) + count_bytes
        self.result.moves.append(Move(self.now_ns, victim.index, requester, count_bytes, depth))

    def _watch_pressure(self, one: Instance) -> None:
        """Preempt while it is over its bound; end the pressure below it or without requests."""
        if one.pressure_pages is None:
            return
        if one.over > 0 and self.now_ns < one.pressure_until_ns:
            if one.running and self.now_ns - one.pressure_since_ns >= one.spec.preempt_ns:
                self._preempt(one)
            return
        one.pressure_pages = None
        one.owed.clear()

    def _preempt(self, one: Instance) -> None:
        """The newest request begins again later, before all that wait."""
        request = one.running[next(reversed(one.running))]
        one.end(request, 0, self.now_ns)
        self.result.models[one.index].preempted += 1
        request.queued_ns = self.now_ns
        one.wait_until_ns = None
        one.queue.appendleft(request)
        self._set_deadline(one, request)
        self._settle(one, one.enforce())

    def _wake_requesters(self, by: Instance) -> None:
        for other in self.instances:
            if other is not by and (other.request_bytes > 0 or other.claimed_ns is not None):
                self._look_at(other, self.now_ns)

    # --- decay ----------------------------------------------------------------------------------

    def _arm_decay(self, one: Instance) -> None:
        if one.parked > 0 and one.decay_taken is None:
            one.decay_taken = deque([one.parked_taken], maxlen=DECAY_STEPS)
            one.decay_kept = 0
            self._begin_step(one)

    def _begin_step(self, one: Instance) -> None:
        one.parked_low, one.parked_taken = one.parked, 0
        self._at(self.now_ns + IDLE_TRIM_NS // DECAY_STEPS, partial(self._decay, one))

    def _decay(self, one: Instance) -> None:
        """Of pages parked all through a step half stay, and no more than requests took lately."""
        assert one.decay_taken is not None
        one.decay_taken.append(one.parked_taken)
        halved = min(one.parked_low, one.decay_kept)
        half = halved + (one.parked_low - halved) // 2
        one.decay_kept = min(half, sum(one.decay_taken))
        if one.unmap(one.parked_low - one.decay_kept) > 0:
            self._wake_requesters(one)
        if one.parked > 0:
            self._begin_step(one)
        else:
            one.decay_taken = None
