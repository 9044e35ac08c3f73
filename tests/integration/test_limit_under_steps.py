"""A limit is lowered while steps are on their way: how many steps until it holds, and at what cost.

The scheduler is simulated, and everything else is real; steps are counted, and nothing is timed.
"""

from __future__ import annotations

from typing import NamedTuple

import needs
import pytest
from simulated_scheduler import SimulatedScheduler
from test_elastic_block_pool import LAYOUT, key_of

from kvelastic import _vmm
from kvelastic.pool import native_geometry

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
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool

    blocks = PAGES * LAYOUT.blocks_per_page
    memory = _vmm.Pool(
        _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(LAYOUT, PAGES)),
        max_blocks=blocks,
        limit_bytes=PAGES * LAYOUT.page_bytes,
        capacity_bytes=PAGES * LAYOUT.page_bytes,
        min_reserved_pages=0,
        max_reserved_pages=0,
        movable=True,
    )
    pool = ElasticBlockPool(
        blocks,
        memory=memory,
        id_span=LAYOUT.id_span(PAGES),
        enable_caching=prefix_caching,
        hash_block_size=32,
    )
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
def test_steps_on_their_way_hold_a_lowered_limit_up_by_half_at_most(prefix_caching: bool) -> None:
    """And nobody is preempted who would not have been with no step on its way."""
    alone = lower_the_limit(0, prefix_caching=prefix_caching)
    assert 1 < alone.steps < MOST_STEPS
    for steps_on_their_way in (1, 2):
        one = lower_the_limit(steps_on_their_way, prefix_caching=prefix_caching)
        assert one.steps <= 1.5 * alone.steps, (steps_on_their_way, one, alone)
        assert one.preemptions <= 1.1 * alone.preemptions, (steps_on_their_way, one, alone)
        assert one.running >= 0.5 * alone.running, (steps_on_their_way, one, alone)
