"""One model's gate: who may go to its engines now, who waits, and when it must wake.

Pure policy. It is told what happens and the time, and calls `Effects`; it starts no task, reads no
clock and is used by one loop only::

    request   arrive -> admitted ----------------------------> leave
                     -> queued -> admitted / refused / leave (its client has gone)
    model     AWAKE -ask_sleep-> FALLING_ASLEEP -slept-> ASLEEP -arrive-> WAKING -woken-> AWAKE
                                                           ^  not_begun     |
                                                           +----------------+
              STARTING / DOWN: a launched engine that is not ready / that has ended

A request counts as in flight from `admit` until its last byte is sent, so a stream keeps its model
awake. A wake is asked for once, however many wait for it. It may have to wait for memory first
(`turns`), and ends without having begun when nobody wants it any more. An engine that is started on
demand sleeps where it is stopped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from kvelastic.controller.refusal import Refusal
from kvelastic.errors import IntegrityError

FIRST_HOLD_OFF_S: Final = 1.0
LAST_HOLD_OFF_S: Final = 30.0
"""After a wake that failed the next one is not tried for this long; it doubles in between."""

_GONE_ASLEEP: Final = Refusal(503, "model_asleep", "The model is asleep.", retry_after_s=30.0)


class State(str, Enum):
    """Of a model."""

    STARTING = "starting"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    DOWN = "down"


class Place(str, Enum):
    """Where a request is."""

    NEW = "new"
    QUEUED = "queued"
    ADMITTED = "admitted"
    OUT = "out"


@dataclass(eq=False)
class Ticket:
    """One request at the gate."""

    priority: int = 0
    """Higher goes first; those of one priority in the order in which they came."""
    deadline_s: float = 0.0
    """Set by `arrive`."""
    place: Place = Place.NEW
    refusal: Refusal | None = None
    waiter: Any = None
    """The effects' own: what they wake when the request is admitted or refused."""
    model: Any = None
    """The effects' own: the model where it waits or runs."""


class Effects(Protocol):
    """What a gate can have done; all return at once."""

    def admit(self, ticket: Ticket) -> None:
        """Let the request go to an engine."""

    def refuse(self, ticket: Ticket) -> None:
        """Answer the request with `ticket.refusal`."""

    def wake(self) -> None:
        """Begin to wake the model; `Gate.woken` follows."""

    def sleep(self) -> None:
        """Begin to put the model to sleep; `Gate.slept` follows."""

    def remind(self, at_s: float) -> None:
        """Have `Gate.tick` called at that time, or soon after; of several the earliest counts."""


@dataclass(frozen=True)
class Rules:
    """What the configuration says of one model's gate."""

    queue_limit: int = 1024
    queue_timeout_s: float = 120.0
    wake_on_request: bool = True
    min_sleep_s: float = 0.0
    max_in_flight: int = 0


@dataclass
class Gate:
    """See the module. Times are seconds of any one clock that never goes back."""

    effects: Effects
    rules: Rules
    state: State = State.AWAKE
    in_flight: int = 0
    slept_at_s: float = 0.0
    by_hand: bool = False
    """The last sleep was an operator's."""
    last_activity_s: float = 0.0
    """When a request last came or ended, or the model woke."""
    failed_wakes: int = 0
    hold_off_until_s: float = 0.0
    closing: Refusal | None = None
    """Set: every new request gets it."""
    yields: bool = False
    """While awake: new requests wait, so that it gets idle and can make room for another model."""
    waits_for: str = ""
    """While it wakes or starts: what it waits for, for people."""
    generation: int = 0
    """Counts changes of `state`. Who reads something to change the state by it, and waits for the
    answer, drops an answer that he asked for in another generation."""
    _may_wake_at_once: bool = False
    """`min_sleep` does not count for the present sleep."""
    _heap: list[tuple[int, int, Ticket]] = field(default_factory=list)
    _queued: int = 0
    _number: int = 0

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self._queued

    @property
    def is_idle(self) -> bool:
        """Nothing in flight and nothing waiting."""
        return self.in_flight == 0 and self._queued == 0

    @property
    def may_make_room(self) -> bool:
        """Nothing is in flight, and what waits has been held back so that it could end."""
        return self.in_flight == 0 and (self._queued == 0 or self.yields)

    @property
    def waiting_priority(self) -> int:
        """The highest of the requests that wait; 0 if none does."""
        waiting = (t.priority for _, _, t in self._heap if t.place is Place.QUEUED)
        return max(waiting, default=0)

    # ------------------------------------------------------------------------------ requests

    def arrive(self, ticket: Ticket, now_s: float) -> None:
        """A request comes: it is admitted, queued or refused before this returns."""
        self.last_activity_s = now_s
        if self.closing is not None:
            return self._refuse(ticket, self.closing)
        if self.state is State.AWAKE and self._has_room and self._queued == 0:
            return self._admit(ticket)
        obstacle = self._obstacle(now_s)
        if obstacle is not None:
            return self._refuse(ticket, obstacle)
        if self._queued >= self.rules.queue_limit:
            return self._refuse(
                ticket,
                Refusal(
                    429,
                    "queue_full",
                    f"{self._queued} requests wait for this model already; try again later.",
                    retry_after_s=1.0,
                ),
            )
        ticket.deadline_s = now_s + self.rules.queue_timeout_s
        self._queue(ticket)
        self._wake_if_due(now_s)
        return None

    def leave(self, ticket: Ticket, now_s: float) -> None:
        """A request is over, or its client has gone; safe to repeat."""
        place, ticket.place = ticket.place, Place.OUT
        if place is Place.QUEUED:
            self._queued -= 1
            self._forget_gone()
        elif place is Place.ADMITTED:
            self.in_flight -= 1
            self.last_activity_s = now_s
            self._pump()

    def tick(self, now_s: float) -> None:
        """Time has passed: refuse those whose deadline is over, wake a model whose sleep is due."""
        for _, _, ticket in sorted(self._heap):
            if ticket.place is Place.QUEUED and ticket.deadline_s <= now_s:
                self._queued -= 1
                self._refuse(
                    ticket,
                    Refusal(
                        503,
                        "queue_timeout",
                        f"The model was not ready within {self.rules.queue_timeout_s:g} s"
                        f" ({self._waits_in_words}); try again later.",
                        retry_after_s=5.0,
                    ),
                )
        self._forget_gone()
        if self._queued:
            waiting = [t.deadline_s for _, _, t in self._heap if t.place is Place.QUEUED]
            self.effects.remind(min(waiting))
            self._wake_if_due(now_s)

    # --------------------------------------------------------------------------------- sleep

    def ask_sleep(self, now_s: float, *, by_hand: bool, for_others: bool = False) -> Refusal | None:
        """Begin to fall asleep; a refusal if it may not now. Asleep already: None.

        `for_others`: it makes room. Requests that were held back for that wait for its next turn,
        which `min_sleep` does not delay.
        """
        if self.state in {State.ASLEEP, State.FALLING_ASLEEP}:
            return None
        if self.state is not State.AWAKE:
            return Refusal(409, "model_not_awake", f"The model is {self.state.value}.")
        if not (self.may_make_room if for_others else self.is_idle):
            return Refusal(
                409,
                "model_busy",
                f"{self.in_flight} requests are in flight and {self._queued} wait; a model sleeps"
                " only when there are none.",
                retry_after_s=1.0,
            )
        self._become(State.FALLING_ASLEEP)
        self.by_hand = by_hand
        self._may_wake_at_once = by_hand or for_others
        self.effects.sleep()
        return None

    def slept(self, ok: bool, now_s: float) -> None:
        """The engines are asleep; not `ok`: they are awake as before."""
        self._expect(State.FALLING_ASLEEP)
        if not ok:
            self._become(State.AWAKE)
            self.last_activity_s = now_s  # or it would be tried again at once
            self._pump()
            return
        self._become(State.ASLEEP)
        self.slept_at_s = now_s
        self._settle_asleep(now_s)

    def ask_wake(self, now_s: float) -> Refusal | None:
        """Begin to wake by an operator's request; None also where it is awake or waking."""
        if self.state in {State.AWAKE, State.WAKING}:
            return None
        if self.state is not State.ASLEEP:
            return Refusal(409, "model_not_asleep", f"The model is {self.state.value}.")
        self._wake()
        return None

    def woken(self, refusal: Refusal | None, now_s: float) -> None:
        """The engines are awake; with a refusal: they are not, and everybody is told why."""
        self._expect(State.WAKING)
        self.last_activity_s = now_s
        if refusal is None:
            self._become(State.AWAKE)
            self.failed_wakes = 0
            self.hold_off_until_s = 0.0
            self._pump()
            return
        self._become(State.ASLEEP)
        self._may_wake_at_once = True  # it has slept long enough: somebody wanted it awake
        hold_off_s = min(LAST_HOLD_OFF_S, FIRST_HOLD_OFF_S * 2.0 ** min(self.failed_wakes, 10))
        self.failed_wakes += 1
        self.hold_off_until_s = now_s + hold_off_s
        self.refuse_all(refusal)

    def not_begun(self, refusal: Refusal | None, now_s: float) -> None:
        """It was to wake and has not begun to; a refusal tells those who wait why.

        The next request may try it again at once.
        """
        self._expect(State.WAKING)
        self._become(State.ASLEEP)
        self._may_wake_at_once = True
        if refusal is not None:
            self.refuse_all(refusal)
        elif self._queued:
            self._wake_if_due(now_s)

    def set_yields(self, yields: bool) -> None:
        """Hold new requests back while it is awake, or let them go on.

        Where requests wake no model they would be lost, and are not held back.
        """
        yields = yields and self.rules.wake_on_request
        if yields != self.yields and (self.state is State.AWAKE or not yields):
            self.yields = yields
            self._pump()

    def set_state(self, state: State, now_s: float, why: Refusal | None = None) -> None:
        """What was found out of an engine: it started, ended, or somebody else let it sleep.

        Going DOWN answers all who wait with `why`.
        """
        if state is self.state:
            return
        self._become(state)
        if state is State.ASLEEP:
            self.slept_at_s, self.by_hand, self._may_wake_at_once = now_s, True, True
            self._settle_asleep(now_s)
        elif state is State.AWAKE:
            self.last_activity_s = now_s
            self._pump()
        elif state is State.DOWN and why is not None:
            self.refuse_all(why)

    def refuse_all(self, refusal: Refusal) -> None:
        """Answer everybody who waits."""
        waiting, self._heap = sorted(self._heap), []
        for _, _, ticket in waiting:
            if ticket.place is Place.QUEUED:
                self._queued -= 1
                self._refuse(ticket, refusal)

    def take_waiting(self) -> list[Ticket]:
        """Those that wait, in their order; they wait here no more."""
        waiting = [entry[2] for entry in sorted(self._heap) if entry[2].place is Place.QUEUED]
        self._heap, self._queued = [], 0
        for ticket in waiting:
            ticket.place = Place.NEW
        return waiting

    def adopt(self, waiting: list[Ticket], now_s: float) -> None:
        """Those that waited at another gate wait here, or go on; they keep deadline and order."""
        for ticket in waiting:
            obstacle = self.closing or self._obstacle(now_s)
            if obstacle is not None:
                self._refuse(ticket, obstacle)
                continue
            self._queue(ticket)
        self._pump()
        if self._queued:
            self._wake_if_due(now_s)

    def set_rules(self, rules: Rules) -> None:
        """New rules hold at once; who waits keeps its deadline."""
        self.rules = rules
        self._pump()

    def check_integrity(self) -> None:
        """Recount; raises `IntegrityError`."""
        queued = sum(ticket.place is Place.QUEUED for _, _, ticket in self._heap)
        if queued != self._queued or self.in_flight < 0:
            raise IntegrityError(f"{queued} queued, {self._queued} counted, {self.in_flight} out")
        if self._queued and self.state is State.AWAKE and self._has_room:
            raise IntegrityError(f"{queued} wait for a model that is awake and has room")
        if self.in_flight and self.state in {State.FALLING_ASLEEP, State.ASLEEP, State.WAKING}:
            raise IntegrityError(f"{self.in_flight} in flight while {self.state.value}")

    # -------------------------------------------------------------------------------- inside

    @property
    def _has_room(self) -> bool:
        most = self.rules.max_in_flight
        return not self.yields and (most == 0 or self.in_flight < most)

    @property
    def _waits_in_words(self) -> str:
        return f"{self.state.value}: {self.waits_for}" if self.waits_for else self.state.value

    def _obstacle(self, now_s: float) -> Refusal | None:
        """Why waiting would be in vain."""
        if self.state is State.DOWN:
            return Refusal(503, "model_down", "The model's engine does not run.", retry_after_s=5.0)
        if self.state is not State.ASLEEP:
            return None
        if not self.rules.wake_on_request:
            return Refusal(
                503,
                "model_asleep",
                "The model is asleep, and requests do not wake it; POST /action/wakeup does.",
                retry_after_s=30.0,
            )
        if now_s < self.hold_off_until_s:
            return Refusal(
                503,
                "wake_failed",
                "The model could not be woken just now; try again later.",
                retry_after_s=self.hold_off_until_s - now_s,
            )
        left_s = self._wake_due_s - now_s
        if left_s > self.rules.queue_timeout_s:
            return Refusal(
                503,
                "model_asleep",
                f"The model sleeps for another {left_s:.0f} s (sleep.min_sleep).",
                retry_after_s=left_s,
            )
        return None

    @property
    def _wake_due_s(self) -> float:
        return self.slept_at_s + (0.0 if self._may_wake_at_once else self.rules.min_sleep_s)

    def _wake_if_due(self, now_s: float) -> None:
        if self.state is not State.ASLEEP or not self.rules.wake_on_request:
            return
        due_s = max(self._wake_due_s, self.hold_off_until_s)
        if now_s >= due_s:
            self._wake()
        else:
            self.effects.remind(due_s)

    def _settle_asleep(self, now_s: float) -> None:
        """Requests came while it fell asleep: they wake it, or learn that they do not."""
        if self._queued and self.rules.wake_on_request:
            self._wake_if_due(now_s)
        elif self._queued:
            self.refuse_all(self._obstacle(now_s) or _GONE_ASLEEP)

    def _wake(self) -> None:
        self._become(State.WAKING)
        self.effects.wake()

    def _pump(self) -> None:
        while self._queued and self.state is State.AWAKE and self._has_room:
            _, _, ticket = heapq.heappop(self._heap)
            if ticket.place is Place.QUEUED:
                self._queued -= 1
                self._admit(ticket)

    def _admit(self, ticket: Ticket) -> None:
        ticket.place = Place.ADMITTED
        self.in_flight += 1
        self.effects.admit(ticket)

    def _refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        ticket.place = Place.OUT
        ticket.refusal = refusal
        self.effects.refuse(ticket)

    def _queue(self, ticket: Ticket) -> None:
        ticket.place = Place.QUEUED
        self._number += 1
        self._queued += 1
        heapq.heappush(self._heap, (-ticket.priority, self._number, ticket))
        self.effects.remind(ticket.deadline_s)

    def _become(self, state: State) -> None:
        self.state = state
        self.yields = False
        self.waits_for = ""
        self.generation += 1

    def _forget_gone(self) -> None:
        """Keep the heap near the size of the queue, whatever comes and goes."""
        if len(self._heap) > 2 * self._queued + 8:
            self._heap = [entry for entry in self._heap if entry[2].place is Place.QUEUED]
            heapq.heapify(self._heap)

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise IntegrityError(f"the model is {self.state.value}, not {state.value}")
