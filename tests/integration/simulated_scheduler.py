"""vLLM's scheduling loop without a model, over a real `ElasticBlockPool`; deterministic.

    scheduler = SimulatedScheduler(pool, steps_on_their_way=1)
    scheduler.step()

New requests come for ever, so that the pool is always wanted whole. A step looks for a block for
every running request that needs one, preempts the request that came last where there is none, and
admits waiting requests where nobody was preempted, as vLLM's does. Its outcome is known when as
many further steps have been scheduled as are on their way at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

BLOCK_TOKENS = 32


@dataclass(eq=False)
class SimulatedRequest:
    """One request: it is prefilled at once, and gets one token a step from then on."""

    number: int
    prompt_tokens: int
    max_tokens: int
    blocks: list[Any] = field(default_factory=list)
    scheduled_tokens: int = 0
    """For which there are blocks; more than were computed while a step is on its way."""
    done_tokens: int = 0
    """Tokens of answers that steps have come back with."""
    preemptions: int = 0

    @property
    def length(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + self.done_tokens

    def is_over(self) -> bool:
        """Whether the answer is complete."""
        return self.done_tokens >= self.max_tokens


class SimulatedScheduler:
    """`step()` it; `preemptions` and `finished` count what became of the requests."""

    def __init__(
        self, pool: Any, *, steps_on_their_way: int, at_once: int, key_of: Any = None
    ) -> None:
        self.pool = pool
        self.at_once = at_once
        self.preemptions = 0
        self.finished = 0
        self.running: list[SimulatedRequest] = []
        self.waiting: deque[SimulatedRequest] = deque()
        self._depth = steps_on_their_way
        self._on_their_way: deque[tuple[int, list[tuple[SimulatedRequest, int]]]] = deque()
        self._next_number = 0
        self._key_of = key_of

    def step(self) -> None:
        """Schedule one step; the one that is `steps_on_their_way` older than it has ended then."""
        while len(self.waiting) < self.at_once:
            self._next_number += 1
            number = self._next_number
            # Lengths differ, so that requests do not all end in the same step.
            prompt_tokens, max_tokens = 40 + 7 * number % 90, 60 + 13 * number % 50
            self.waiting.append(SimulatedRequest(number, prompt_tokens, max_tokens))
        with self.pool.session():
            work = self._schedule()
        self._on_their_way.append((self.pool.memory.step_begins(), work))
        while len(self._on_their_way) > self._depth:
            self._end_a_step()

    def drain(self) -> None:
        """End every step that is on its way, and every request."""
        while self._on_their_way:
            self._end_a_step()
        while self.running:
            self.pool.free_blocks(reversed(self.running.pop().blocks))

    def _schedule(self) -> list[tuple[SimulatedRequest, int]]:
        work: list[tuple[SimulatedRequest, int]] = []
        preempted = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if request.scheduled_tokens >= request.prompt_tokens + request.max_tokens - 1:
                index += 1  # its last token is on its way
                continue
            while not self._has_blocks(request):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            if request not in self.running:
                break
            request.scheduled_tokens += 1
            work.append((request, request.preemptions))
            index += 1
        while not preempted and self.waiting and len(self.running) < self.at_once:
            request = self.waiting[0]
            request.scheduled_tokens = request.length
            if not self._has_blocks(request):
                request.scheduled_tokens = 0
                break
            self.waiting.popleft()
            self.running.append(request)
            work.append((request, request.preemptions))
        return work

    def _has_blocks(self, request: SimulatedRequest) -> bool:
        """Take what the request needs for one more token; False, and nothing taken, without it."""
        wanted = -(-(request.scheduled_tokens + 1) // BLOCK_TOKENS)
        hits = [] if request.blocks else self._cached(request)
        missing = wanted - len(request.blocks) - len(hits)
        needed = missing + sum(block.ref_cnt == 0 for block in hits)
        if needed > 0:
            self.pool.memory.prepare(needed)
            if needed > self.pool.get_num_free_blocks():
                return False
        self.pool.touch(hits)
        request.blocks += hits
        new = self.pool.get_new_blocks(missing)
        request.blocks += new
        if self._key_of is not None:
            full = request.scheduled_tokens // BLOCK_TOKENS
            for place in range(full):
                block = request.blocks[place]
                if block.block_hash is None:
                    self.pool._insert_block_hash(
                        self._key_of(request.number * 1000 + place), block, num_tokens=BLOCK_TOKENS
                    )
        return True

    def _cached(self, request: SimulatedRequest) -> list[Any]:
        if self._key_of is None:
            return []
        hits: list[Any] = []
        while (len(hits) + 1) * BLOCK_TOKENS <= request.scheduled_tokens:
            key = (request.number * 1000 + len(hits)).to_bytes(8, "big")
            found = self.pool.get_cached_block(key, [0])
            if not found:
                break
            hits += found
        return hits

    def _preempt(self, request: SimulatedRequest) -> None:
        self.preemptions += 1
        request.preemptions += 1
        self._give_back(request)
        request.scheduled_tokens = 0
        self.waiting.appendleft(request)

    def _give_back(self, request: SimulatedRequest) -> None:
        blocks, request.blocks = request.blocks, []
        self.pool.free_blocks(reversed(blocks))

    def _end_a_step(self) -> None:
        number, work = self._on_their_way.popleft()
        self.pool.memory.step_ends(number)
        for request, preemptions in work:
            if request.preemptions != preemptions:
                continue  # preempted meanwhile: what came of it is thrown away
            request.done_tokens += 1
            if request.is_over():
                self.running.remove(request)
                self._give_back(request)
                self.finished += 1
