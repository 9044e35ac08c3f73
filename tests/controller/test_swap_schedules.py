"""Random schedules of starts, sleeps, wakes and growth, by the ledger's real rules."""

from __future__ import annotations

import random

import pytest
from swap_simulation import SECOND_NS, Engine, TurnSimulation, group

from tools.reclaim_simulator.trace import Arrival, ModelSpec, Trace

pytestmark = pytest.mark.slow


PAGE = 2 << 20
NEVER_NS = 10**18


def schedule(seed: int) -> TurnSimulation:
    """Any number of models, of which some fit together, and requests in bursts."""
    dice = random.Random(seed)
    capacity = dice.randint(20, 60)
    are_equal = dice.random() < 0.5
    models, engines = [], []
    groups = {
        "g": group(at_once=dice.randint(1, 2), exclusive=dice.random() < 0.3),
        "p": group(persistent=True),
    }
    for number in range(dice.randint(2, 6)):
        least = dice.randint(2, 5)
        models.append(
            ModelSpec(
                f"m{number}",
                min_bytes=least * PAGE,
                priority=0 if are_equal else dice.randint(-1, 1),
                reserved_bytes=dice.randint(0, capacity - least) * PAGE,
                is_asleep=True,
                give_back_ns=dice.choice((100_000, 1_000_000, 50_000_000)),
            )
        )
        wake_s = dice.choice((0.0, 0.5, 3.0, 20.0))
        engines.append(
            Engine(
                wake_s=wake_s,
                sleep_s=dice.choice((0.0, 0.2, 2.0)),
                is_start=dice.random() < 0.4,
                claims_after_s=dice.random() * wake_s,
                group=dice.choice((None, None, "g", "p")),
                failing_wakes=dice.choice((0, 0, 0, 1)),
            )
        )
    arrivals = []
    for number, model in enumerate(models):
        at_s = 0.0
        for _ in range(dice.randint(1, 4)):
            at_s += dice.choice((0.0, 1.0, 5.0, 30.0)) * dice.random() * 2
            for _ in range(dice.randint(1, 8)):
                at_s += dice.random() * dice.choice((0.0, 0.5, 3.0))
                pages = dice.randint(1, model.min_bytes // PAGE)
                arrivals.append(
                    Arrival(
                        round(at_s * SECOND_NS),
                        number,
                        pages * PAGE,
                        round(dice.random() * 4 * SECOND_NS),
                        dice.randint(0, pages) * PAGE,
                        NEVER_NS,
                    )
                )
    trace = Trace(
        capacity * PAGE,
        tuple(models),
        tuple(sorted(arrivals, key=lambda arrival: arrival.at_ns)),
        total_bytes=dice.choice((0, capacity + dice.randint(0, 20))) * PAGE,
    )
    simulation = TurnSimulation(
        trace,
        tuple(engines),
        min_awake_s=dice.choice((0.0, 2.0, 10.0)),
        groups=groups if dice.random() < 0.3 else {},
        starts_at_once=dice.choice((0, 1)),
    )
    for _ in range(dice.randint(0, 4)):
        chosen = dice.randint(0, 9)
        simulation.after(dice.random() * 60, lambda chosen=chosen: simulation.give_up(chosen))
    for _ in range(dice.randint(0, 3)):
        each = dice.choice(simulation.served)
        simulation.after(
            dice.random() * 60,
            lambda each=each: each.gate.ask_sleep(simulation.now_s, by_hand=True),
        )
    return simulation


def check(seed: int) -> None:
    simulation = schedule(seed)
    simulation.run()
    served = sum(model.served for model in simulation.result.models)
    assert served + simulation.lost == len(simulation.trace.arrivals)
    for each in simulation.served:
        assert not each.gate.queued
    spaced(simulation)
    if all(spec.priority == 0 for spec in simulation.trace.models):
        no_model_starves(simulation)


def spaced(simulation: TurnSimulation) -> None:
    """At most one swap a `min_awake` and model."""
    for each in simulation.served:
        for before, after in zip(each.left_s, each.left_s[1:], strict=False):
            assert after - before >= simulation.min_awake_s


def no_model_starves(simulation: TurnSimulation) -> None:
    """Of equals each gets its turn after at most one turn of each of the others.

    A turn is a start or wake, the time that nobody has to give way, the end of what is in flight,
    and a sleep. Failed wakes are turns, too.
    """
    wake_s = max(each.engine.wake_s for each in simulation.served)
    sleep_s = max(each.engine.sleep_s for each in simulation.served)
    failing = sum(each.engine.failing_wakes for each in simulation.served)
    turn_s = wake_s + simulation.min_awake_s + simulation.longest_drain_s + sleep_s + 6
    turns = len(simulation.served) + failing + 1
    for each in simulation.served:
        assert max(each.turn_waits_s, default=0.0) <= turns * turn_s


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_random_schedules_neither_fail_nor_starve(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.soak
def test_ten_thousand_schedules() -> None:
    for seed in range(10_000):
        check(seed)
