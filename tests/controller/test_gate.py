"""The rules of one model's gate, with effects that only write down what they are told."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.models.engine_calls import EngineCalls
from kvelastic.controller.models.gate import Gate, Rules, State, Ticket, TicketState
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.settings.settings import ModelSettings, SleepSettings


class RecordingEffects:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.admitted: list[Ticket] = []
        self.refused: list[Ticket] = []
        self.reminders: list[float] = []

    def admit(self, ticket: Ticket) -> None:
        self.admitted.append(ticket)

    def refuse(self, ticket: Ticket) -> None:
        self.refused.append(ticket)

    def wake(self) -> None:
        self.said.append("wake")

    def sleep(self) -> None:
        self.said.append("sleep")

    def remind(self, at_s: float) -> None:
        self.reminders.append(at_s)


DEFAULT = Rules()


def asleep(rules: Rules = DEFAULT, *, by_hand: bool = True) -> tuple[Gate, RecordingEffects]:
    effects = RecordingEffects()
    gate = Gate(effects, rules)
    assert gate.ask_sleep(0.0, by_hand=by_hand) is None
    gate.slept(True, 0.0)
    return gate, effects


def code_of(ticket: Ticket) -> str:
    assert ticket.refusal is not None
    return ticket.refusal.code


def test_a_thousand_requests_wake_a_sleeping_model_once() -> None:
    gate, effects = asleep()
    tickets = [Ticket() for _ in range(1000)]
    for ticket in tickets:
        gate.arrive(ticket, 1.0)
    assert effects.said == ["sleep", "wake"]
    gate.woken(None, 2.0)
    assert effects.admitted == tickets
    assert gate.in_flight == 1000


def test_wakes_without_a_request_follow_its_rules() -> None:
    """`may_wake` is for models that are woken although no request waits for them."""
    gate, _ = asleep(Rules(min_sleep_s=60.0), by_hand=False)
    assert [gate.may_wake(now_s) for now_s in (59.0, 60.0)] == [False, True]
    assert gate.ask_wake(60.0) is None
    assert not gate.may_wake(61.0), "it wakes already"
    gate.woken(Refusal(503, "wake_failed", ""), 70.0)
    assert [gate.may_wake(now_s) for now_s in (70.5, 71.0)] == [False, True]
    gate.closing = Refusal(503, "model_removed", "")
    assert not gate.may_wake(1e9)
    unwoken, _ = asleep(Rules(wake_on_request=False))
    assert not unwoken.may_wake(1e9)


def test_shared_refusal_keeps_no_traceback() -> None:
    async def run() -> None:
        settings = ModelSettings(name="m", url="http://127.0.0.1:1")
        model = ServedModel(settings, SleepSettings(), EngineCalls(None))  # type: ignore[arg-type]
        model.gate.closing = shared = Refusal(503, "model_removed", "gone", 5.0)
        with pytest.raises(Refusal) as caught:
            await model.enter(Ticket())
        assert (caught.value.code, caught.value.retry_after_s) == ("model_removed", 5.0)
        assert shared.__traceback__ is None

    asyncio.run(run())


def test_full_queue_is_429_with_retry_after() -> None:
    gate, effects = asleep(Rules(queue_limit=2))
    tickets = [Ticket() for _ in range(3)]
    for ticket in tickets:
        gate.arrive(ticket, 1.0)
    assert effects.refused == tickets[2:]
    refusal = tickets[2].refusal
    assert refusal is not None
    assert (refusal.status, refusal.retry_after_s) == (429, 1.0)


def test_higher_priority_is_admitted_first_equals_fifo() -> None:
    gate, effects = asleep()
    low, first, second, high = Ticket(-1), Ticket(), Ticket(), Ticket(5)
    for ticket in (low, first, second, high):
        gate.arrive(ticket, 1.0)
    gate.woken(None, 2.0)
    assert effects.admitted == [high, first, second, low]


def test_queue_deadline_ends_the_wait() -> None:
    gate, effects = asleep(Rules(queue_timeout_s=10.0))
    ticket = Ticket()
    gate.arrive(ticket, 1.0)
    gate.tick(10.9)
    assert ticket.state is TicketState.QUEUED
    gate.tick(11.0)
    assert code_of(ticket) == "queue_timeout"
    gate.woken(None, 12.0)
    assert not effects.admitted


def test_client_disconnect_frees_its_queue_slot() -> None:
    gate, effects = asleep(Rules(queue_limit=1))
    gone, next_one = Ticket(), Ticket()
    gate.arrive(gone, 1.0)
    gate.leave(gone, 1.0)
    gate.leave(gone, 1.0)
    gate.arrive(next_one, 1.0)
    gate.woken(None, 2.0)
    assert effects.admitted == [next_one]


def test_sleep_is_refused_with_requests_in_flight() -> None:
    effects = RecordingEffects()
    gate = Gate(effects, Rules())
    ticket = Ticket()
    gate.arrive(ticket, 0.0)
    for by_hand in (True, False):
        refusal = gate.ask_sleep(100.0, by_hand=by_hand)
        assert refusal is not None
        assert refusal.code == "model_busy"
    gate.leave(ticket, 100.0)
    assert gate.ask_sleep(100.0, by_hand=False) is None


def test_request_during_sleep_transition_wakes_the_model() -> None:
    effects = RecordingEffects()
    gate = Gate(effects, Rules())
    assert gate.ask_sleep(0.0, by_hand=True) is None
    ticket = Ticket()
    gate.arrive(ticket, 0.1)
    assert effects.said == ["sleep"]
    gate.slept(True, 1.0)
    assert effects.said == ["sleep", "wake"]


def test_failed_sleep_admits_waiting_requests() -> None:
    effects = RecordingEffects()
    gate = Gate(effects, Rules())
    gate.ask_sleep(0.0, by_hand=False)
    ticket = Ticket()
    gate.arrive(ticket, 0.1)
    gate.slept(False, 1.0)
    assert effects.admitted == [ticket]
    assert gate.state is State.AWAKE


def test_failed_wake_refuses_waiters_and_backs_off() -> None:
    gate, effects = asleep()
    first, second, third = Ticket(), Ticket(), Ticket()
    gate.arrive(first, 1.0)
    gate.woken(Refusal(503, "wake_failed", "no", 2.0), 2.0)
    assert code_of(first) == "wake_failed"
    gate.arrive(second, 2.5)
    assert code_of(second) == "wake_failed"
    assert effects.said.count("wake") == 1
    gate.arrive(third, 3.0)
    assert effects.said.count("wake") == 2


def test_min_sleep_delays_the_wake() -> None:
    gate, effects = asleep(Rules(min_sleep_s=60.0), by_hand=False)
    ticket = Ticket()
    gate.arrive(ticket, 1.0)
    assert effects.said == ["sleep"]
    assert 60.0 in effects.reminders
    gate.tick(59.9)
    assert effects.said == ["sleep"]
    gate.tick(60.0)
    assert effects.said == ["sleep", "wake"]


def test_request_that_would_time_out_is_refused() -> None:
    gate, _ = asleep(Rules(min_sleep_s=60.0, queue_timeout_s=10.0), by_hand=False)
    ticket = Ticket()
    gate.arrive(ticket, 1.0)
    assert ticket.refusal is not None
    assert (ticket.refusal.status, ticket.refusal.retry_after_s) == (503, 59.0)


def test_without_wake_on_request_model_stays_asleep() -> None:
    gate, effects = asleep(Rules(wake_on_request=False))
    ticket = Ticket()
    gate.arrive(ticket, 1.0)
    assert code_of(ticket) == "model_asleep"
    assert gate.ask_wake(2.0) is None
    assert effects.said == ["sleep", "wake"]


def test_max_in_flight_is_respected() -> None:
    effects = RecordingEffects()
    gate = Gate(effects, Rules(max_in_flight=1))
    first, second = Ticket(), Ticket()
    gate.arrive(first, 0.0)
    gate.arrive(second, 0.0)
    assert effects.admitted == [first]
    gate.leave(first, 1.0)
    assert effects.admitted == [first, second]


@pytest.mark.parametrize("state", [State.AWAKE, State.ASLEEP])
def test_closing_gate_begins_no_sleep_or_wake(state: State) -> None:
    effects = RecordingEffects()
    gate = Gate(effects, Rules(), state)
    gate.closing = Refusal(503, "model_removed", "It was removed.", 5.0)
    ask = gate.ask_wake(0.0) if state is State.ASLEEP else gate.ask_sleep(0.0, by_hand=True)
    assert ask is gate.closing
    assert (gate.state, effects.said) == (state, [])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "leave", "tick", "sleep", "slept", "unslept", "wake", "woken",
                         "unwoken", "rules"]),
        st.integers(0, 30),
    ),
    max_size=80,
)  # fmt: skip


@pytest.mark.slow
@given(STEPS)
def test_random_steps_keep_the_gate_consistent(steps: list[tuple[str, int]]) -> None:
    effects = RecordingEffects()
    gate = Gate(effects, Rules(queue_limit=5, queue_timeout_s=20.0, min_sleep_s=7.0))
    tickets: list[Ticket] = []
    now_s = 0.0
    for what, number in steps:
        now_s += number / 3
        if what == "arrive":
            tickets.append(Ticket(priority=number % 3))
            gate.arrive(tickets[-1], now_s)
        elif what == "leave" and tickets:
            gate.leave(tickets[number % len(tickets)], now_s)
        elif what == "tick":
            gate.tick(now_s)
        elif what == "sleep":
            gate.ask_sleep(now_s, by_hand=number % 2 == 0)
        elif what == "wake":
            gate.ask_wake(now_s)
        elif what in {"slept", "unslept"} and gate.state is State.FALLING_ASLEEP:
            gate.slept(what == "slept", now_s)
        elif what in {"woken", "unwoken"} and gate.state is State.WAKING:
            gate.woken(None if what == "woken" else Refusal(503, "no", "no", 1.0), now_s)
        elif what == "rules":
            gate.set_rules(Rules(queue_limit=5, queue_timeout_s=20.0, max_in_flight=number % 3))
        gate.check_integrity()
        assert gate.queued <= 5
        assert gate.in_flight == sum(t.state is TicketState.ADMITTED for t in tickets)
        assert effects.said.count("wake") <= effects.said.count("sleep") * 100
        assert len(set(map(id, effects.admitted))) == len(effects.admitted)
        assert len(set(map(id, effects.refused))) == len(effects.refused)


@pytest.mark.slow
@given(
    priorities=st.lists(st.integers(-2, 2), max_size=8),
    gone=st.sets(st.integers(0, 7)),
    room=st.integers(0, 4),
    is_awake=st.booleans(),
)
def test_waiting_requests_move_with_order_and_deadline(
    priorities: list[int], gone: set[int], room: int, is_awake: bool
) -> None:
    old, _ = asleep(by_hand=False, rules=Rules(min_sleep_s=60))
    tickets = [Ticket(priority) for priority in priorities]
    for number, ticket in enumerate(tickets):
        old.arrive(ticket, float(number))
    for number in gone & set(range(len(tickets))):
        old.leave(tickets[number], 9.0)
    left = [t for n, t in enumerate(tickets) if n not in gone]
    effects = RecordingEffects()
    new = Gate(effects, Rules(max_in_flight=room, queue_limit=0))
    new.state = State.AWAKE if is_awake else State.STARTING
    new.adopt(old.take_waiting(), 10.0)
    old.check_integrity()
    new.check_integrity()
    assert (old.queued, effects.refused) == (0, [])
    if not is_awake:
        assert (new.queued, effects.admitted) == (len(left), [])
        new.set_state(State.AWAKE, 11.0)
    while new.in_flight < len(left) and new.queued:
        new.leave(effects.admitted[-1], 12.0)
    assert effects.admitted == sorted(left, key=lambda t: (-t.priority, tickets.index(t)))
    assert [t.deadline_s for t in tickets] == [n + 120.0 for n in range(len(tickets))]
