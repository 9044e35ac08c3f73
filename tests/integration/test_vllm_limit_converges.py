"""A limit that requests keep from being met: how many steps until it holds, and at what cost.

The scheduler is simulated, and has the names that the wrapper of vLLM's knows; everything else is
real. Steps are counted, and nothing is timed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import needs
import pytest
from elastic_pools import LAYOUT, key_of, make_memory, make_pool
from simulated_scheduler import SimulatedRequest, SimulatedScheduler

from kvelastic.pool.scheduling.over_limit import OverLimit

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


class PauseState(enum.IntEnum):
    """vLLM's."""

    UNPAUSED = 0
    PAUSED_NEW = 1


class Scheduler(SimulatedScheduler):
    """With what the wrapper reads and calls of vLLM's."""

    def __init__(self, pool: Any, **options: Any) -> None:
        super().__init__(pool, **options)
        self._pause_state = PauseState.UNPAUSED
        self.requires_kv_delivery = False
        self.kv_cache_manager = self

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def get_block_ids(self, request_id: int) -> tuple[list[int], ...]:
        (request,) = [one for one in self.running if one.number == request_id]
        return ([block.block_id for block in request.blocks],)

    def _request_blocks_can_be_freed(self, _: SimulatedRequest) -> bool:
        return True

    def _preempt_request(
        self, request: SimulatedRequest, timestamp: float, drop_stale_output: bool
    ) -> None:
        self._preempt(request)

    def _schedule(self) -> list[tuple[SimulatedRequest, int]]:
        from kvelastic.integration.vllm import scheduler_class

        for request in self.running:
            request.request_id = request.number  # type: ignore[attr-defined]
            request.num_computed_tokens = request.scheduled_tokens  # type: ignore[attr-defined]
        at_once = self.at_once
        with scheduler_class._preempted_over_limit(self.pool, self):
            if self._pause_state is PauseState.PAUSED_NEW:
                self.at_once = 0
            work = super()._schedule()
            self.at_once = at_once
        return work


def preempts_after(wait_s: float | None) -> Callable[..., SimulatedScheduler]:
    """Makes a scheduler that preempts for a limit after that time; None: never."""

    def make(pool: Any, **options: Any) -> SimulatedScheduler:
        pool.over_limit = OverLimit(pool.memory, wait_s)
        return Scheduler(pool, **options)

    return make


class Outcome(NamedTuple):
    steps: int
    """Scheduled until no byte was over the limit."""
    preemptions: int
    running: int
    """Requests that run when the limit holds."""


def lower_the_limit(
    steps_on_their_way: int,
    *,
    prefix_caching: bool,
    make: Callable[..., SimulatedScheduler] = SimulatedScheduler,
) -> Outcome:
    _, memory = make_memory(pages=PAGES)
    pool = make_pool(memory, pages=PAGES, enable_caching=prefix_caching)
    scheduler = make(
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
@pytest.mark.parametrize("steps_on_their_way", [0, 1, 2])
def test_limit_holds_after_the_steps_in_flight(
    steps_on_their_way: int, prefix_caching: bool
) -> None:
    outcome = lower_the_limit(
        steps_on_their_way, prefix_caching=prefix_caching, make=preempts_after(0.0)
    )
    assert outcome.steps <= 2 + steps_on_their_way
    assert outcome.running > 0, "more have made way than the limit needs"


def test_without_a_wait_time_requests_are_not_preempted() -> None:
    outcome = lower_the_limit(1, prefix_caching=True, make=preempts_after(None))
    assert 10 < outcome.steps < MOST_STEPS


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
