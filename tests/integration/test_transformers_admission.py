"""After a preemption transformers admits nobody until a request ends, or memory has come."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from two_pools import BLOCKS_PER_PAGE, PAGES, TwoPools

from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.pool.scheduling.over_limit import OverLimit

pytestmark = [pytest.mark.slow, needs.transformers]

WANTED = BLOCKS_PER_PAGE + 1


class Processor:
    """What the wrappers read of a processor; it looks for `WANTED` blocks in each step."""

    def __init__(self, pool: Any) -> None:
        from kvelastic.integration.transformers import in_batches, in_cache

        blocks = self.blocks = SchedulerBlocks(pool)
        self.cache = SimpleNamespace()
        batches = SimpleNamespace(
            blocks=blocks,
            over_limit=OverLimit(blocks, None),
            found_none=False,
            name_streams=lambda _: None,
        )
        setattr(self.cache, in_cache._KEPT, batches)
        self.inputs_and_outputs = SimpleNamespace(compute_stream=None)
        self.scheduler = SimpleNamespace(
            active_requests={},
            block_new_requests=False,
            schedule_batch=lambda: (blocks.prepare(WANTED) >= WANTED or None,),
        )
        in_batches.processor_init(lambda _: None, self)

    def step(self) -> bool:
        """Whether a request runs; where none does, one is preempted and no other is admitted."""
        (runs,) = self.scheduler.schedule_batch()
        if not runs:
            self.scheduler.block_new_requests = True
        return bool(runs)


def test_new_memory_lifts_the_admission_block(shared: TwoPools) -> None:
    a, b = shared.pools
    theirs = b.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert theirs is not None
    b.report_busy(True)
    processor = Processor(a)
    for _ in range(3):
        assert not processor.step()
    assert processor.scheduler.block_new_requests
    b.free(theirs)
    b.trim()
    assert a.ensure(WANTED) >= WANTED  # as the maintenance thread does when it is told
    assert processor.step()
    assert not processor.scheduler.block_new_requests


def test_blocks_of_a_preempted_request_keep_admission_blocked(shared: TwoPools) -> None:
    """Another would be admitted, and be preempted in its turn."""
    a, b = shared.pools
    theirs = b.alloc((PAGES - 1) * BLOCKS_PER_PAGE - 1)
    assert theirs is not None
    b.report_busy(True)
    processor = Processor(a)
    mine = processor.blocks.take(2)
    assert mine is not None
    assert not processor.step()
    processor.blocks.give_back(mine)
    processor.scheduler.schedule_batch()
    assert processor.scheduler.block_new_requests


def test_step_reserve_follows_the_peak_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from kvelastic.integration.transformers import in_batches, in_cache
    from kvelastic.integration.transformers.batches import Batches

    statistics = iter(
        [{"reserved_bytes": {"all": {"peak": 70, "current": held}}} for held in (5, 9)]
    )
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: next(statistics))
    followed: list[int] = []
    blocks = SimpleNamespace(session=nullcontext, report_busy=lambda _: None)
    batches = Batches(
        SimpleNamespace(memory=blocks, warms_up=False),
        SimpleNamespace(  # type: ignore[arg-type]
            step_reserve=SimpleNamespace(follow=followed.append), pool=SimpleNamespace(name="x")
        ),
        [torch.zeros(1)],
    )
    cache = SimpleNamespace()
    setattr(cache, in_cache._KEPT, batches)
    processor = SimpleNamespace(cache=cache, has_pending_requests=lambda: True)
    for _ in range(2):
        in_batches.update_batch(lambda _: None, processor)
    assert followed == [5, 9]


def test_request_larger_than_the_limit_is_reported(
    shared: TwoPools, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from kvelastic.integration.transformers import in_batches, in_cache
    from kvelastic.integration.transformers.batches import Batches, NothingFits

    pool = shared.pools[0]
    blocks = SchedulerBlocks(pool)
    reports: list[tuple[int, int, int]] = []
    batches = Batches(
        SimpleNamespace(memory=blocks, warms_up=False),
        SimpleNamespace(step_reserve=None, pool=SimpleNamespace(name="chat")),  # type: ignore[arg-type]
        [torch.zeros(1)],
    )
    report = batches.waiting.report

    def reported(requests: int, *, first_blocks: int = 0, first_may_blocks: int = 0) -> None:
        reports.append((requests, first_blocks, first_may_blocks))
        report(requests, first_blocks=first_blocks, first_may_blocks=first_may_blocks)

    batches.waiting.report = reported  # type: ignore[method-assign]
    pool.set_limit(2 << 20)
    allocator = SimpleNamespace(
        needs_new_blocks=lambda _id, past, query: -(-(past + query) // 16), blocks_per_sector=2
    )
    cache = SimpleNamespace(cache_allocators={"full": allocator, "sliding": allocator})
    setattr(cache, in_cache._KEPT, batches)
    large = SimpleNamespace(initial_tokens=[1] * 1000, generated_tokens=[], max_new_tokens=25)
    small = SimpleNamespace(initial_tokens=[1] * 10, generated_tokens=[], max_new_tokens=5)
    processor = SimpleNamespace(
        cache=cache,
        has_pending_requests=lambda: True,
        inputs_and_outputs=SimpleNamespace(compute_stream=None),
        model_runner=SimpleNamespace(pad_inputs=False),
        scheduler=SimpleNamespace(active_requests={"l": large}, waiting_requests={"s": small}),
    )
    attempts = iter([NothingFits(), None])

    def prepare(_: Any) -> bool:
        problem = next(attempts)
        if problem is not None:
            raise problem
        return True

    while not in_batches.prepare_next_batch(prepare, processor):
        pass
    assert reports == [(2, 2 * 32, 2 * 32), (0, 0, 0)]
    assert "2 requests wait for KV cache memory" in caplog.text
    assert "kvctl limit chat " in caplog.text
