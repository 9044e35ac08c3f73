"""All requests wait for memory, and some comes: in what order, driven by hand, with nothing timed.

The pool, its ledger and its neighbour are real; vLLM's scheduler and core are stood in for by what
the wrappers read of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from native_pools import HUGE
from two_pools import BLOCKS_PER_PAGE, PAGED, PAGES, TwoPools

from kvelastic.integration.vllm.scheduler_class import ElasticScheduler

pytestmark = [
    pytest.mark.slow,
    needs.vllm,
    pytest.mark.usefixtures("vllm_is_imported"),
    pytest.mark.filterwarnings("ignore"),
]

WANTED = 4
"""Blocks that the one request needs."""
FOREVER_S = -1.0


class Requests:
    """What `ElasticScheduler` reads and calls of vLLM's scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: dict[str, Any] = {"r": None}
        self.running: list[Any] = []
        self.finished_req_ids: set[str] = set()
        self.num_waiting_for_streaming_input = 1
        self.pause_state = 0
        self.reserved_blocks = 0
        self.connector = None
        self.max_model_len = 1 << 20
        self.kv_cache_manager = SimpleNamespace(
            block_pool=engine.pool, watermark_blocks=0, get_block_ids=lambda _: ([],)
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.requests) - len(self.running)

    def _inflight_prefill_reserved_blocks(self) -> int:
        return self.reserved_blocks

    def schedule(self) -> SimpleNamespace:
        return self._engine.schedule()

    def update_from_output(self, scheduler_output: object, *args: object, **kwargs: object) -> None:
        pass


class Scheduler(ElasticScheduler, Requests):
    """As vLLM makes it of its own scheduler."""


class Engine:
    """An engine core with one request, which runs as soon as its blocks can be had."""

    def __init__(self, memory: Any) -> None:
        from kvelastic.integration.vllm.block_pool import ElasticBlockPool

        self.pool = ElasticBlockPool(
            PAGES * BLOCKS_PER_PAGE,
            memory=memory,
            id_span=PAGED.id_span(PAGES),
            enable_caching=True,
            hash_block_size=32,
        )
        self.scheduler: Any = Scheduler(self)
        self.core = SimpleNamespace(scheduler=self.scheduler, batch_queue=[])
        self.wanted = WANTED
        self.looked: list[int] = []
        """Of every step, how many tokens it scheduled."""
        self.in_the_step: Callable[[], None] = lambda: None
        """Runs after the step has looked for blocks, and before it ends."""

    def turn(self) -> bool:
        """One turn of vLLM's loop; whether the scheduler was asked."""
        from kvelastic.integration.vllm import in_engine_core

        before = len(self.looked)
        in_engine_core.step(self._step, self.core)
        return len(self.looked) > before

    def _step(self, core: Any) -> tuple[dict[int, Any], bool]:
        output = core.scheduler.schedule()
        core.scheduler.update_from_output(output, None)
        return {}, output.total_num_scheduled_tokens > 0

    def schedule(self) -> SimpleNamespace:
        self.pool.memory.prepare(self.wanted)
        tokens = 1 if self.pool.get_num_free_blocks() >= self.wanted else 0
        self.in_the_step()
        self.looked.append(tokens)
        return SimpleNamespace(total_num_scheduled_tokens=tokens)


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause ends by its length: what is not told is never found."""
    from kvelastic.pool.scheduling import memory_wait

    monkeypatch.setattr(memory_wait, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def starved(shared: TwoPools, frozen_clock: None) -> tuple[Engine, Callable[[], None]]:
    """An engine whose neighbour has the whole device, and what brings it a page."""
    a, b = shared.pools
    theirs = b.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert theirs is not None

    def a_page_comes() -> None:
        b.free(theirs)
        b.trim()
        a.ensure(WANTED)  # as the maintenance thread does when the neighbour rings

    return Engine(a), a_page_comes


def test_page_arriving_during_the_step_ends_the_backoff(starved) -> None:
    engine, a_page_comes = starved
    engine.in_the_step = a_page_comes
    assert engine.turn()
    engine.in_the_step = lambda: None
    assert engine.looked == [0]
    assert engine.turn(), "memory is there, and the engine pauses"
    assert engine.looked == [0, 1]


def test_page_arriving_after_the_step_ends_the_backoff(starved) -> None:
    engine, a_page_comes = starved
    assert engine.turn()
    assert not engine.turn()
    assert not engine.turn()
    a_page_comes()
    assert engine.turn()
    assert engine.looked == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda scheduler: scheduler.requests.update(s=None),
        lambda scheduler: scheduler.finished_req_ids.add("r"),
        lambda scheduler: setattr(scheduler, "num_waiting_for_streaming_input", 0),
        lambda scheduler: setattr(scheduler, "pause_state", 1),
    ],
    ids=["a request comes", "a request is aborted", "a session goes on", "a pause"],
)
def test_change_of_the_requests_ends_the_backoff(starved, change) -> None:
    engine, _ = starved
    assert engine.turn()
    assert not engine.turn()
    change(engine.scheduler)
    assert engine.turn()
    assert engine.looked == [0, 0]


def backoff_gaps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times between one question to the scheduler and the next, in the course of 50 s."""
    from kvelastic.pool.scheduling import memory_wait

    now_s = 0.0
    monkeypatch.setattr(memory_wait, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert engine.turn()
    asked_s = [0.0]
    monkeypatch.setattr(engine.pool.memory, "wait_for_epoch", lambda *_: None)
    for tick in range(1, 5000):
        now_s = tick * 0.01
        if engine.turn():
            asked_s.append(now_s)
    return [later - sooner for sooner, later in pairwise(asked_s)]


def test_scheduler_backoff_doubles(shared: TwoPools, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = shared.pools
    assert b.alloc(PAGES * BLOCKS_PER_PAGE - 1) is not None
    gaps = backoff_gaps(Engine(a), monkeypatch)
    assert gaps[:4] == pytest.approx([0.01, 0.02, 0.04, 0.08], abs=0.011)
    assert max(gaps) == pytest.approx(10.0, abs=0.011)


def test_empty_steps_in_the_queue_allow_backoff(starved) -> None:
    """With several steps on their way the queue is never empty: an empty step is always in it."""
    from kvelastic.integration.vllm import in_engine_core

    engine, a_page_comes = starved
    outputs = []

    def with_queue(core: Any) -> tuple[None, bool]:
        outputs.append(core.scheduler.schedule())
        core.batch_queue.append(outputs[-1])
        return None, False

    in_engine_core.step_with_batch_queue(with_queue, engine.core)
    for _ in range(3):
        in_engine_core.step_with_batch_queue(with_queue, engine.core)
    assert engine.looked == [0], "it went on with empty steps"
    a_page_comes()
    in_engine_core.step_with_batch_queue(with_queue, engine.core)
    assert engine.looked == [0, 1]


def test_step_with_work_in_flight_prevents_backoff(starved) -> None:
    """Its end may be what the others wait for."""
    from kvelastic.integration.vllm import in_engine_core

    engine, _ = starved
    number = engine.pool.memory.step_begins(works=True)
    assert engine.turn()
    assert engine.pool.backoff.memory_wait is None
    engine.pool.memory.step_ends(number)
    assert engine.turn()
    assert engine.pool.backoff.memory_wait is not None
    assert in_engine_core._backs_off(engine.core)


def test_load_finds_memory_beside_prompts_in_progress(shared: TwoPools) -> None:
    engine = Engine(shared.pools[0])
    engine.scheduler.reserved_blocks = 3 * BLOCKS_PER_PAGE - 1  # whole pages, with the null block
    left = []

    def look_for_a_load() -> None:
        reserved = engine.scheduler._inflight_prefill_reserved_blocks()
        engine.pool.memory.prepare(reserved)
        engine.pool.memory.prepare(WANTED)
        left.append(engine.pool.get_num_free_blocks() - reserved)

    engine.in_the_step = look_for_a_load
    engine.turn()
    assert left[0] >= WANTED


def test_blocks_given_back_while_scheduling_are_pinned(shared: TwoPools) -> None:
    """The step may copy from them, as for a partial block that two requests share."""
    engine = Engine(shared.pools[0])
    given_back: set[int] = set()

    def give_back() -> None:
        blocks = engine.pool.get_new_blocks(2)
        given_back.update(block.block_id for block in blocks)
        engine.pool.free_blocks(blocks)

    engine.in_the_step = give_back
    output = engine.scheduler.schedule()
    assert engine.pool.memory.held_back == given_back
    assert len(given_back) == 2
    engine.scheduler.update_from_output(output, None)
    assert engine.pool.memory.held_back == set()


# --- what the engine gives back itself ----------------------------------------------------------


@pytest.fixture
def chunked(shared: TwoPools) -> tuple[Engine, Callable[[], None]]:
    """An engine with one page, whose request needs two; and what brings it another page.

    Every step runs a piece of the request, finds no block for the next, and preempts it.
    """
    a, b = shared.pools
    theirs = b.alloc((PAGES - 1) * BLOCKS_PER_PAGE - 1)
    assert theirs is not None
    engine = Engine(a)

    def run_a_chunk_and_preempt() -> None:
        if engine.pool.get_num_free_blocks() < engine.wanted:
            engine.pool.free_blocks(reversed(engine.pool.get_new_blocks(2)))

    def a_page_comes() -> None:
        b.free(theirs)
        b.trim()
        a.ensure(engine.wanted)

    engine.wanted = BLOCKS_PER_PAGE + 2
    a.ensure(2)
    engine.in_the_step = run_a_chunk_and_preempt
    return engine, a_page_comes


def test_own_freed_blocks_do_not_end_the_backoff(chunked, frozen_clock) -> None:
    """Once it is asked at once: what one request has given back another may take."""
    engine, _ = chunked
    assert [engine.turn() for _ in range(6)] == [True, True, False, False, False, False]
    assert engine.looked == [0, 0]


def test_later_page_ends_backoff_after_own_frees(chunked, frozen_clock) -> None:
    engine, a_page_comes = chunked
    for _ in range(3):
        engine.turn()
    a_page_comes()
    assert engine.turn()
    assert engine.looked == [0, 0, 1]


def test_page_wakes_the_waiter_after_own_frees(chunked) -> None:
    """The wait goes by the native count, which has what was given back in it."""
    engine, a_page_comes = chunked
    engine.turn()
    seen = engine.pool.memory.availability_epoch
    a_page_comes()
    engine.pool.memory.wait_for_epoch(seen, FOREVER_S)
    assert engine.pool.memory.availability_epoch != seen


def test_page_arriving_during_own_frees_ends_the_backoff(chunked, frozen_clock) -> None:
    """By another thread, at any moment: that is not taken for what the engine gives back."""
    engine, a_page_comes = chunked
    engine.turn()
    memory = engine.pool.memory.pool

    class ReleasingDuringFree:
        def __getattr__(self, name: str) -> Any:
            return getattr(memory, name)

        def free(self, ids: list[int]) -> None:
            a_page_comes()
            memory.free(ids)

    engine.pool.memory.pool = ReleasingDuringFree()
    assert engine.turn()
    engine.pool.memory.pool = memory
    assert engine.looked == [0, 0]
    assert engine.turn(), "memory is there, and the engine pauses"
    assert engine.looked == [0, 0, 1]


def test_backoff_doubles_for_a_request_in_chunks(chunked, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = chunked
    gaps = backoff_gaps(engine, monkeypatch)
    assert gaps[:4] == pytest.approx([0.01, 0.01, 0.02, 0.04], abs=0.011)
    assert max(gaps) == pytest.approx(10.0, abs=0.011)


# --- what operators are told of the requests that wait ------------------------------------------

BLOCK_TOKENS = 16


class Waits(Engine):
    """Its requests are looked at in their order, as vLLM does, up to the first without room."""

    def __init__(self, memory: Any) -> None:
        from kvelastic.integration.vllm import in_engine_core

        super().__init__(memory)
        self.scheduler.requests.clear()
        coordinator = SimpleNamespace(block_pool=self.pool)
        self._needed = partial(
            in_engine_core.make_blocks_needed(
                lambda _, request_id, tokens, *more: -(-tokens // BLOCK_TOKENS)
            ),
            coordinator,
        )

    def add(self, name: str, tokens: int, max_tokens: int = 1) -> None:
        self.scheduler.requests[name] = SimpleNamespace(
            request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, max_tokens=max_tokens
        )

    def schedule(self) -> SimpleNamespace:
        self.scheduler.running = []
        for request in self.scheduler.requests.values():
            chunk = min(request.num_tokens, 2 * BLOCK_TOKENS * BLOCKS_PER_PAGE)
            needed = self._needed(request.request_id, chunk, ([],), 0, 0, 0, chunk)
            if needed > self.pool.get_num_free_blocks():
                break
            self.scheduler.running.append(request)
        self.looked.append(len(self.scheduler.running))
        return SimpleNamespace(total_num_scheduled_tokens=self.looked[-1])


class Reports:
    """A native pool, and what was reported to it last: requests, and pages of the first."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.last: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def report_waiting(self, requests: int, **blocks: int) -> tuple[int, int, int]:
        answer: tuple[int, int, int] = self._pool.report_waiting(requests, **blocks)
        self.last = (requests, answer[0] // HUGE, answer[1] // HUGE)
        return answer


def test_waiting_request_reports_its_whole_need(
    shared: TwoPools,
) -> None:
    shared.pools[0].set_limit(2 * HUGE)
    engine = Waits(shared.pools[0])
    memory: Any = engine.pool.memory
    native = memory.pool = Reports(memory.pool)
    page_tokens = BLOCKS_PER_PAGE * BLOCK_TOKENS

    engine.add("small", 10)
    assert engine.turn()
    assert native.last == (0, 0, 0)
    engine.add("large", 4 * page_tokens - BLOCK_TOKENS, max_tokens=2 * page_tokens)
    engine.add("behind", 10)
    assert engine.turn()
    assert native.last == (2, 4, 6), "a part of it was looked for, of two pages"
    engine.scheduler.requests.pop("large")
    assert engine.turn()
    assert native.last == (0, 0, 0)
