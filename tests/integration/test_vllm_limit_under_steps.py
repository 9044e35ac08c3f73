"""A limit is lowered while steps are on their way: how many steps until it holds, and at what cost.

The scheduler is simulated, and everything else is real; steps are counted, and nothing is timed.
"""

from __future__ import annotations

from typing import NamedTuple

import needs
import pytest
from elastic_pools import LAYOUT, key_of, make_memory, make_pool
from simulated_scheduler import SimulatedScheduler

pytestmark = [
    pytest.mark.slow,
    needs.vllm,
    pytest.mark.usefixtures("vllm_is_imported"),
    pytest.mark.filterwarnings("ignore"),
]

PAGES = 40
LOWERED_PAGES = 4
AT_ONCE = 96
WARM_UP_STEPS = 60
MOST_STEPS = 400
"""Far more than any of this needs: who has not arrived by then does not."""


class Outcome(NamedTuple):
    steps: int
    """Scheduled until no byte was over the limit."""
    preemptions: int
    running: int
    """Requests that run when the limit holds."""


def lower_the_limit(steps_on_their_way: int, *, prefix_caching: bool) -> Outcome:
    _, memory = make_memory(pages=PAGES)
    pool = make_pool(memory, pages=PAGES, enable_caching=prefix_caching)
    scheduler = SimulatedScheduler(
        pool,
        steps_on_their_way=steps_on_their_way,
        at_once=AT_ONCE,
        key_of=key_of if prefix_caching else None,
    )
    for _ in range(WARM_UP_STEPS):
        scheduler.step()
    preempted_before = scheduler.preemptions
    memory.set_limit(LOWERED_PAGES * LAYOUT.page_bytes)
    steps = 0
    while memory.limit_state()["over_bytes"] > 0 and steps < MOST_STEPS:
        scheduler.step()
        steps += 1
    outcome = Outcome(steps, scheduler.preemptions - preempted_before, len(scheduler.running))
    finished = scheduler.finished
    for _ in range(WARM_UP_STEPS):
        scheduler.step()
    assert scheduler.finished > finished, "it came to a dead end"
    assert memory.mapped_bytes <= LOWERED_PAGES * LAYOUT.page_bytes
    scheduler.drain()
    pool.check_integrity()
    return outcome


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_steps_in_flight_delay_limits_at_most_half(prefix_caching: bool) -> None:
    """And nobody is preempted who would not have been with no step on its way."""
    alone = lower_the_limit(0, prefix_caching=prefix_caching)
    assert 1 < alone.steps < MOST_STEPS
    for steps_on_their_way in (1, 2):
        one = lower_the_limit(steps_on_their_way, prefix_caching=prefix_caching)
        assert one.steps <= 1.5 * alone.steps, (steps_on_their_way, one, alone)
        assert one.preemptions <= 1.1 * alone.preemptions, (steps_on_their_way, one, alone)
        assert one.running >= 0.5 * alone.running, (steps_on_their_way, one, alone)
