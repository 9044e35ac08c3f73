"""Swapping in simulated time: the policy and real gates over the simulator of a device's memory.

    engines = Engine(wake_s=2.0), Engine(wake_s=20.0, is_start=True)
    simulation = TurnSimulation(trace, engines, min_awake_s=10)
    simulation.run()
    simulation.waits_s

The ledger's rules are the real ones (`tools.reclaim_simulator`): a wake claims its guarantee and
reserve, caches beyond guarantees are reclaimed, and what the sums do not allow is refused. Models
wake by `swap_policy.decide` only. What an engine does takes the time that `Engine` says; one that
is started shows itself in the ledger late, as real ones do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.models.admission import Admission, Claim, Device, Model, Stand
from kvelastic.controller.models.gate import Gate, Rules, State, Ticket, TicketState
from kvelastic.controller.models.swap_policy import SPARED_PART, Want, decide
from kvelastic.controller.settings.settings import GroupSettings
from tools.reclaim_simulator.instance import Instance, Request
from tools.reclaim_simulator.simulation import Simulation
from tools.reclaim_simulator.trace import Arrival, Trace

SECOND_NS = 1_000_000_000
DEVICE = "default/gpu0"


@dataclass(frozen=True)
class Engine:
    """How one model's engine behaves."""

    wake_s: float = 1.0
    sleep_s: float = 0.5
    is_start: bool = False
    claims_after_s: float = 0.0
    """From its turn until it claims its memory in the ledger; at most `wake_s`."""
    group: str | None = None
    failing_wakes: int = 0
    """So many of its first wakes fail."""


@dataclass(eq=False)
class Served:
    """One model: the effects of its gate."""

    simulation: TurnSimulation
    one: Instance
    engine: Engine
    gate: Gate = field(init=False)
    has_turn: bool = False
    spares_until_s: float = 0.0
    want: int | None = None
    """The number of its want, while it waits for its turn."""
    wanted_s: float = 0.0
    awake_since_s: float | None = None
    left_s: list[float] = field(default_factory=list)
    """When it was put to sleep to make room."""
    turn_waits_s: list[float] = field(default_factory=list)
    fails_left: int = 0

    def __post_init__(self) -> None:
        rules = Rules(queue_limit=1 << 30, queue_timeout_s=1e9)
        self.gate = Gate(self, rules)
        self.gate.state = State.ASLEEP if self.one.asleep else State.AWAKE
        self.gate._may_wake_at_once = True
        self.fails_left = self.engine.failing_wakes

    def admit(self, ticket: Ticket) -> None:
        self.simulation.to_engine(ticket)

    def refuse(self, ticket: Ticket) -> None:
        self.simulation.lose(ticket)

    def wake(self) -> None:
        self.want = self.simulation.next_number()
        self.wanted_s = self.simulation.now_s

    def sleep(self) -> None:
        self.simulation.after(self.engine.sleep_s, partial(self.simulation.slept, self))

    def remind(self, at_s: float) -> None:
        """Nobody has a deadline here; a wake that is held off is looked at then."""
        if at_s < 1e8:
            self.simulation.after(
                max(0.0, at_s - self.simulation.now_s) + 0.001,
                lambda: self.gate.tick(self.simulation.now_s),
            )


class TurnSimulation(Simulation):
    """A simulated device whose models wake in turn."""

    def __init__(
        self,
        trace: Trace,
        engines: tuple[Engine, ...],
        *,
        min_awake_s: float,
        groups: dict[str, GroupSettings] | None = None,
        starts_at_once: int = 0,
    ) -> None:
        super().__init__(trace)
        self.min_awake_s = min_awake_s
        self.groups = groups or {}
        self.starts_at_once = starts_at_once
        self.served = [
            Served(self, one, engine) for one, engine in zip(self.instances, engines, strict=True)
        ]
        self.by_name = {each.one.spec.name: each for each in self.served}
        self._number = 0
        self._seen: object = None
        self._look_again_s = 0.0
        self._tickets: dict[int, Ticket] = {}
        """By the identity of the arrival."""
        self.arrived_s: dict[Ticket, float] = {}
        self.waits_s: list[float] = []
        """Of every request, until it was at its engine."""
        self.lost = 0
        self.longest_drain_s = 0.0
        self._yielding_since_s: dict[str, float] = {}

    @property
    def now_s(self) -> float:
        return self.now_ns / SECOND_NS

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def after(self, seconds: float, happen: object) -> None:
        self._at(self.now_ns + round(seconds * SECOND_NS), happen)  # type: ignore[arg-type]

    def run(self, most_s: float = 1e7) -> None:
        """To the end of the last request. An assertion fails where a rule is broken."""
        while self.step():
            self.turn()
            self.check_integrity()
            for each in self.served:
                each.gate.check_integrity()
            assert self.now_s < most_s, "it does not come to an end"
        assert sum(m.wakes_refused for m in self.result.models) == 0, "admitted, and no memory"

    # --- requests -------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        each = self.served[arrival.model]
        ticket = Ticket()
        ticket.waiter = arrival
        self.arrived_s[ticket] = self.now_s
        each.gate.arrive(ticket, self.now_s)

    def to_engine(self, ticket: Ticket) -> None:
        self.waits_s.append(self.now_s - self.arrived_s.pop(ticket))
        self._tickets[id(ticket.waiter)] = ticket
        ticket.model = self.served[ticket.waiter.model]
        super()._arrive(ticket.waiter)

    def lose(self, ticket: Ticket) -> None:
        del self.arrived_s[ticket]
        self.lost += 1
        self._undone -= 1

    def give_up(self, chosen: int) -> None:
        """One of those that wait goes away."""
        waiting = [t for t in self.arrived_s if t.state is TicketState.QUEUED]
        if not waiting:
            return
        ticket = waiting[chosen % len(waiting)]
        each = self.served[ticket.waiter.model]
        each.gate.leave(ticket, self.now_s)
        self.lose(ticket)
        if each.want is not None and each.gate.queued == 0:
            each.want = None
            each.gate.not_begun(None, self.now_s)

    def _end(self, one: Instance, request: Request, started: int) -> None:
        undone = self._undone
        super()._end(one, request, started)
        if self._undone < undone:
            ticket = self._tickets.pop(id(request.arrival))
            ticket.model.gate.leave(ticket, self.now_s)

    # --- sleep and wake -------------------------------------------------------------------------

    def _sleep_if_idle(self, one: Instance) -> None:
        """Only gates decide that."""

    def slept(self, each: Served) -> None:
        assert not each.one.running
        assert not each.one.queue
        each.one.fall_asleep()
        self._wake_requesters(each.one)
        each.gate.slept(True, self.now_s)

    def go(self, each: Served) -> None:
        """Its turn has come."""
        each.turn_waits_s.append(self.now_s - each.wanted_s)
        each.want, each.has_turn = None, True
        ready_ns = self.now_ns + round(each.engine.wake_s * SECOND_NS)
        delay_s = min(each.engine.claims_after_s, each.engine.wake_s)
        self.after(delay_s, lambda: self._wake(each.one))
        self._at(ready_ns, partial(self._ready, each))

    def _ready(self, each: Served) -> None:
        if each.one.asleep and each.one.claimed_ns is not None:
            self.after(0.01, partial(self._ready, each))  # others still give what it claims
            return
        assert not each.one.asleep, "its claim was refused"
        each.has_turn = False
        each.awake_since_s = self.now_s
        if each.fails_left:
            each.fails_left -= 1
            each.one.fall_asleep()
            self._wake_requesters(each.one)
            each.gate.woken(Refusal(503, "wake_failed", "as told"), self.now_s)
            return
        each.gate.woken(None, self.now_s)

    # --- turns ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """As `swap.Swapper` does it, after whatever has happened."""
        seen = tuple(
            (each.gate.generation, each.gate.may_make_room, each.want, each.has_turn)
            for each in self.served
        )
        if seen == self._seen and self.now_s < self._look_again_s:
            return  # nothing that anybody waits for has changed
        self._seen, self._look_again_s = seen, 1e18
        wanting = [each for each in self.served if each.want is not None]
        if not wanting:
            for each in self.served:
                each.gate.set_yields(False)
            return
        planned = {each.one.spec.name: self._planned(each) for each in self.served}
        wants = [
            Want(
                each.one.spec.name,
                each.want or 0,
                is_start=each.engine.is_start,
                spares_s=max(0.0, each.spares_until_s - self.now_s),
            )
            for each in wanting
        ]
        device = Device(self.trace.capacity_bytes, self.trace.total_bytes)
        decision = decide(
            Admission({DEVICE: device}, self.groups), planned, wants, self.starts_at_once
        )
        for name in decision.go:
            self.go(self.by_name[name])
        assert not decision.refused, decision.refused
        for name in decision.sleep:
            each = self.by_name[name]
            assert each.gate.in_flight == 0
            assert each.gate.ask_sleep(self.now_s, by_hand=False, for_others=True) is None
            each.left_s.append(self.now_s)
            each.spares_until_s = self.now_s + SPARED_PART * self.min_awake_s
            since_s = self._yielding_since_s.pop(name, self.now_s)
            self.longest_drain_s = max(self.longest_drain_s, self.now_s - since_s)
        for each in self.served:
            name = each.one.spec.name
            each.gate.set_yields(name in decision.yielding)
            if name in decision.yielding:
                self._yielding_since_s.setdefault(name, self.now_s)
            else:
                self._yielding_since_s.pop(name, None)
        if decision.look_again_in_s is not None:
            self._look_again_s = self.now_s + decision.look_again_in_s
            self.after(decision.look_again_in_s + 0.001, lambda: None)

    def _planned(self, each: Served) -> Model:
        spec, gate = each.one.spec, each.gate
        stand = {
            State.AWAKE: Stand.THERE,
            State.FALLING_ASLEEP: Stand.GOING,
            State.ASLEEP: Stand.AWAY,
            State.WAKING: Stand.COMING if each.has_turn else Stand.AWAY,
        }[gate.state]
        since_s = self.now_s if stand is Stand.COMING else each.awake_since_s
        return Model(
            spec.name,
            {DEVICE: Claim(spec.reserved_bytes, spec.min_bytes)},
            priority=spec.priority,
            group=each.engine.group,
            is_busy=stand is not Stand.THERE or not gate.may_make_room,
            idle_s=0.0 if not gate.is_idle else self.now_s - gate.last_activity_s,
            is_in_use=not gate.is_idle or self.now_s - gate.last_activity_s < self.min_awake_s,
            stays_s=0.0 if since_s is None else max(0.0, since_s + self.min_awake_s - self.now_s),
            yields=gate.yields,
            stand=stand,
            is_starting=each.engine.is_start,
        )


def group(**rules: object) -> GroupSettings:
    """Return a group with these rules; which models are in it is said by the models."""
    return GroupSettings.model_validate({"name": "g", "models": ("m",), **rules})
