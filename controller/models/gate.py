"""One model's gate: which requests may go to its engines, which wait, and when it must wake.

Pure policy. Callers report events and the time; the gate calls `Effects`. It starts no task, reads
no clock, and is used by one event loop only::

    request   arrive -> admitted ----------------------------> leave
                     -> queued -> admitted / refused / leave (its client has disconnected)
    model     AWAKE -ask_sleep-> FALLING_ASLEEP -slept-> ASLEEP -arrive-> WAKING -woken-> AWAKE
                                                           ^  not_begun     |
                                                           +----------------+
              STARTING / DOWN: a launched engine that is not ready / that has ended

A request is in flight from `admit` until its last byte is sent, so a stream keeps its model awake.
A wake is requested once for all waiting requests. It may first have to wait for memory (`swap`),
and is cancelled if no request waits for it. An engine that starts on demand counts as asleep while
it is stopped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from kvelastic.controller.http.refusal import Refusal
from kvelastic.errors import IntegrityError

FIRST_HOLD_OFF_S: Final = 1.0
LAST_HOLD_OFF_S: Final = 30.0
"""Bounds of the delay after a failed wake; it doubles with each failure in a row."""

_GONE_ASLEEP: Final = Refusal(503, "model_asleep", "The model is asleep.", retry_after_s=30.0)


class State(str, Enum):
    """The state of a model."""

    STARTING = "starting"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    DOWN = "down"


class TicketState(str, Enum):
    """The state of a request at the gate."""

    NEW = "new"
    QUEUED = "queued"
    ADMITTED = "admitted"
    OUT = "out"


@dataclass(eq=False)
class Ticket:
    """One request at the gate."""

    priority: int = 0
    """Higher goes first; requests of equal priority in order of arrival."""
    deadline_s: float = 0.0
    """Set by `arrive`."""
    needs_awake: bool = False
    """It waits only while the model is awake and makes no room for another one."""
    state: TicketState = TicketState.NEW
    refusal: Refusal | None = None
    waiter: Any = None
    """For the effects: the future to complete when the request is admitted or refused."""
    model: Any = None
    """For the effects: the model where the request waits or runs."""


class Effects(Protocol):
    """The actions of a gate; none blocks."""

    def admit(self, ticket: Ticket) -> None:
        """Let the request go to an engine."""

    def refuse(self, ticket: Ticket) -> None:
        """Refuse the request with `ticket.refusal`."""

    def wake(self) -> None:
        """Begin to wake the model; `Gate.woken` follows."""

    def sleep(self) -> None:
        """Begin to put the model to sleep; `Gate.slept` follows."""

    def remind(self, at_s: float) -> None:
        """Call `Gate.tick` at or soon after that time. The earliest of several times counts."""


@dataclass(frozen=True)
class Rules:
    """The configuration of one model's gate."""

    queue_limit: int = 1024
    queue_timeout_s: float = 120.0
    wake_on_request: bool = True
    min_sleep_s: float = 0.0
    max_in_flight: int = 0


@dataclass
class Gate:
    """The gate of one model. Times are seconds of any one monotonic clock."""

    effects: Effects
    rules: Rules
    state: State = State.AWAKE
    in_flight: int = 0
    slept_at_s: float = 0.0
    by_hand: bool = False
    """An operator requested the last sleep."""
    last_activity_s: float = 0.0
    """When a request last arrived or ended, or the model woke."""
    failed_wakes: int = 0
    hold_off_until_s: float = 0.0
    closing: Refusal | None = None
    """If set, every new request gets this refusal, and no sleep or wake begins."""
    yields: bool = False
    """While awake: hold new requests back, so that the model can make room for another one."""
    waits_for: str = ""
    """While it wakes or starts: the reason for the wait, as text."""
    generation: int = 0
    """Incremented on every change of `state`. Discard an awaited result if `generation` has changed
    since the call was made."""
    _may_wake_at_once: bool = False
    """`min_sleep` does not apply to the current sleep."""
    _heap: list[tuple[int, int, Ticket]] = field(default_factory=list)
    _queued: int = 0
    _number: int = 0

    @property
    def queued(self) -> int:
        """The number of waiting requests."""
        return self._queued

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight or waits."""
        return self.in_flight == 0 and self._queued == 0

    @property
    def may_make_room(self) -> bool:
        """True if no request is in flight and waiting ones were held back for another model."""
        return self.in_flight == 0 and (self._queued == 0 or self.yields)

    @property
    def waiting_priority(self) -> int:
        """The highest priority of the waiting requests; 0 without any."""
        waiting = (t.priority for _, _, t in self._heap if t.state is TicketState.QUEUED)
        return max(waiting, default=0)

    def may_wake(self, now_s: float) -> bool:
        """Return True if a request that came now would wake the model."""
        if self.state is not State.ASLEEP or not self.rules.wake_on_request:
            return False
        return self.closing is None and now_s >= max(self._wake_due_s, self.hold_off_until_s)

    # ------------------------------------------------------------------------------ requests

    def arrive(self, ticket: Ticket, now_s: float) -> None:
        """Admit, queue or refuse a new request before returning."""
        self.last_activity_s = now_s
        if self.closing is not None:
            return self._refuse(ticket, self.closing)
        if self.state is State.AWAKE and self._admits_more and self._queued == 0:
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
        """A request has ended, or its client has disconnected. Idempotent."""
        before, ticket.state = ticket.state, TicketState.OUT
        if before is TicketState.QUEUED:
            self._queued -= 1
            self._forget_gone()
        elif before is TicketState.ADMITTED:
            self.in_flight -= 1
            self.last_activity_s = now_s
            self._pump()

    def tick(self, now_s: float) -> None:
        """Refuse requests past their deadline; wake the model if it is due."""
        for _, _, ticket in sorted(self._heap):
            if ticket.state is TicketState.QUEUED and ticket.deadline_s <= now_s:
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
            waiting = [t.deadline_s for _, _, t in self._heap if t.state is TicketState.QUEUED]
            self.effects.remind(min(waiting))
            self._wake_if_due(now_s)

    # --------------------------------------------------------------------------------- sleep

    def ask_sleep(self, now_s: float, *, by_hand: bool, for_others: bool = False) -> Refusal | None:
        """Begin to fall asleep. Returns a refusal if that is not possible, None if already asleep.

        `for_others`: the model makes room. Requests held back for that wait for its next turn,
        which `min_sleep` does not delay.
        """
        if self.state in {State.ASLEEP, State.FALLING_ASLEEP}:
            return None
        if self.closing is not None:  # after a reload another model may use the same engines
            return self.closing
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
        """The engines are asleep, or awake as before if not `ok`."""
        self._expect(State.FALLING_ASLEEP)
        if not ok:
            self._become(State.AWAKE)
            self.last_activity_s = now_s  # otherwise it would be tried again at once
            self._pump()
            return
        self._become(State.ASLEEP)
        self.slept_at_s = now_s
        self._settle_asleep(now_s)

    def ask_wake(self, now_s: float) -> Refusal | None:
        """Begin to wake for an operator. Also returns None if the model is awake or waking."""
        if self.state in {State.AWAKE, State.WAKING}:
            return None
        if self.closing is not None:
            return self.closing
        if self.state is not State.ASLEEP:
            return Refusal(409, "model_not_asleep", f"The model is {self.state.value}.")
        self._wake()
        return None

    def woken(self, refusal: Refusal | None, now_s: float) -> None:
        """The engines are awake, or on a refusal not: then waiting requests get it."""
        self._expect(State.WAKING)
        self.last_activity_s = now_s
        if refusal is None:
            self._become(State.AWAKE)
            self.failed_wakes = 0
            self.hold_off_until_s = 0.0
            self._pump()
            return
        self._become(State.ASLEEP)
        self._may_wake_at_once = True  # it was wanted awake: `min_sleep` no longer applies
        hold_off_s = min(LAST_HOLD_OFF_S, FIRST_HOLD_OFF_S * 2.0 ** min(self.failed_wakes, 10))
        self.failed_wakes += 1
        self.hold_off_until_s = now_s + hold_off_s
        self.refuse_all(refusal)

    def not_begun(self, refusal: Refusal | None, now_s: float) -> None:
        """The wake was cancelled before it began; waiting requests get the refusal, if any.

        The next request may try again at once.
        """
        self._expect(State.WAKING)
        self._become(State.ASLEEP)
        self._may_wake_at_once = True
        if refusal is not None:
            self.refuse_all(refusal)
        elif self._queued:
            self._wake_if_due(now_s)

    def set_yields(self, yields: bool) -> None:
        """Hold new requests back while the model is awake, or let them continue.

        If requests do not wake the model they would be lost, so they are not held back.
        """
        yields = yields and self.rules.wake_on_request
        if yields != self.yields and (self.state is State.AWAKE or not yields):
            self.yields = yields
            self._refuse_needing_awake()
            self._pump()

    def set_state(self, state: State, now_s: float, why: Refusal | None = None) -> None:
        """Apply a state observed from outside: an engine started, ended, or was put to sleep.

        DOWN refuses waiting requests with `why`.
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
        """Refuse all waiting requests."""
        waiting, self._heap = sorted(self._heap), []
        for _, _, ticket in waiting:
            if ticket.state is TicketState.QUEUED:
                self._queued -= 1
                self._refuse(ticket, refusal)

    def take_waiting(self) -> list[Ticket]:
        """Remove and return the waiting requests, in order."""
        waiting = [entry[2] for entry in sorted(self._heap) if entry[2].state is TicketState.QUEUED]
        self._heap, self._queued = [], 0
        for ticket in waiting:
            ticket.state = TicketState.NEW
        return waiting

    def adopt(self, waiting: list[Ticket], now_s: float) -> None:
        """Queue or admit requests from another gate; they keep deadline and order."""
        for ticket in waiting:
            obstacle = self.closing or self._obstacle(now_s)
            if obstacle is not None:
                self._refuse(ticket, obstacle)
                continue
            self._queue(ticket)
        self._refuse_needing_awake()
        self._pump()
        if self._queued:
            self._wake_if_due(now_s)

    def set_rules(self, rules: Rules) -> None:
        """Apply new rules at once; waiting requests keep their deadlines."""
        self.rules = rules
        self._pump()

    def check_integrity(self) -> None:
        """Recount; raises `IntegrityError`."""
        queued = sum(ticket.state is TicketState.QUEUED for _, _, ticket in self._heap)
        if queued != self._queued or self.in_flight < 0:
            raise IntegrityError(f"{queued} queued, {self._queued} counted, {self.in_flight} out")
        if self._queued and self.state is State.AWAKE and self._admits_more:
            raise IntegrityError(f"{queued} wait for a model that is awake and has room")
        if self.in_flight and self.state in {State.FALLING_ASLEEP, State.ASLEEP, State.WAKING}:
            raise IntegrityError(f"{self.in_flight} in flight while {self.state.value}")

    # -------------------------------------------------------------------------------- inside

    @property
    def _admits_more(self) -> bool:
        most = self.rules.max_in_flight
        return not self.yields and (most == 0 or self.in_flight < most)

    @property
    def _waits_in_words(self) -> str:
        return f"{self.state.value}: {self.waits_for}" if self.waits_for else self.state.value

    def _obstacle(self, now_s: float) -> Refusal | None:
        """Return why waiting would be useless, or None."""
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
        """Requests arrived while it fell asleep: wake the model or refuse them."""
        if self._queued and self.rules.wake_on_request:
            self._wake_if_due(now_s)
        elif self._queued:
            self.refuse_all(self._obstacle(now_s) or _GONE_ASLEEP)

    def _wake(self) -> None:
        self._become(State.WAKING)
        self.effects.wake()

    def _pump(self) -> None:
        while self._queued and self.state is State.AWAKE and self._admits_more:
            _, _, ticket = heapq.heappop(self._heap)
            if ticket.state is TicketState.QUEUED:
                self._queued -= 1
                self._admit(ticket)

    def _admit(self, ticket: Ticket) -> None:
        ticket.state = TicketState.ADMITTED
        self.in_flight += 1
        self.effects.admit(ticket)

    def _refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        ticket.state = TicketState.OUT
        ticket.refusal = refusal
        self.effects.refuse(ticket)

    def _queue(self, ticket: Ticket) -> None:
        ticket.state = TicketState.QUEUED
        self._number += 1
        self._queued += 1
        heapq.heappush(self._heap, (-ticket.priority, self._number, ticket))
        self.effects.remind(ticket.deadline_s)

    def _become(self, state: State) -> None:
        self.state = state
        self.yields = False
        self.waits_for = ""
        self.generation += 1
        self._refuse_needing_awake()

    def _refuse_needing_awake(self) -> None:
        """Refuse the waiting requests that need an awake model, if it is not, or makes room."""
        if self.state is State.AWAKE and not self.yields:
            return
        code = "paused" if self.yields else self.state.value
        for _, _, ticket in sorted(self._heap):
            if ticket.state is TicketState.QUEUED and ticket.needs_awake:
                self._queued -= 1
                self._refuse(ticket, Refusal(503, code, "The model serves no requests now."))
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Keep the heap near the size of the queue by removing requests that have left."""
        if len(self._heap) > 2 * self._queued + 8:
            self._heap = [entry for entry in self._heap if entry[2].state is TicketState.QUEUED]
            heapq.heapify(self._heap)

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise IntegrityError(f"the model is {self.state.value}, not {state.value}")
