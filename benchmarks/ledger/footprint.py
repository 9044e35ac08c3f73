"""What is held after traffic with staggered decode lengths has ended, and what of the cache goes.

The workload that kvcached's own benchmark uses: many requests of different output lengths at once,
decode takes one block at a time, so blocks that stay cached end up beside blocks that go, on many
pages. The floor is as few pages as the cached blocks fit into. Beside it, the same traffic in a
pool whose engine cannot follow a block to another id, so that nothing is ever moved.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from benchmarks.harness import Figure
from kvelastic import _vmm

PAGE_BYTES = 2 << 20
BLOCKS_PER_PAGE = 32
PAGES = 128
BLOCK_TOKENS = 16
MAX_CACHED_BLOCKS = 16 * BLOCKS_PER_PAGE - 1
AT_ONCE = 64
PREFIXES = 48
PREFIX_BLOCKS = 8
SHORTEST_TOKENS, LONGEST_TOKENS = 16, 256


@dataclass
class Running:
    """A request: its blocks, those of its prompt first, and the tokens that it has yet to make."""

    key: int
    prefix: list[int]
    own: list[int]
    made_tokens: int
    left_tokens: int


@dataclass
class Engine:
    """As much of an engine as the pool can tell: a prefix cache by key, and decode in steps."""

    pool: _vmm.Pool
    hits_blocks: int = 0
    asked_blocks: int = 0
    refs: dict[int, int] = field(default_factory=dict)
    found: dict[tuple[int, int], int] = field(default_factory=dict)
    """(prefix, place in it) -> block, of all that is cached or in use."""
    where: dict[int, tuple[int, int]] = field(default_factory=dict)

    def follow(self) -> None:
        """What the pool evicted or moved by itself."""
        for block, to in self.pool.take_changes():
            key = self.where.pop(block)
            if to < 0:
                del self.found[key]
            else:
                self.where[to], self.found[key] = key, to

    def start(self, key: int, tokens: int) -> Running:
        self.pool.enter()
        try:
            self.follow()
            self.asked_blocks += PREFIX_BLOCKS
            hits = 0
            while hits < PREFIX_BLOCKS and (key, hits) in self.found:
                hits += 1
            self.hits_blocks += hits
            prefix = [self.found[key, place] for place in range(hits)]
            self.pool.touch([block for block in prefix if self.refs.get(block, 0) == 0])
            fresh = self.take(PREFIX_BLOCKS - hits) if hits < PREFIX_BLOCKS else []
            for place, block in enumerate(fresh, hits):
                old = self.found.get((key, place))
                if old is None:
                    self.found[key, place], self.where[block] = block, (key, place)
            prefix += fresh
            for block in prefix:
                self.refs[block] = self.refs.get(block, 0) + 1
            return Running(key, prefix, [], 0, tokens)
        finally:
            self.pool.exit()

    def take(self, count: int) -> list[int]:
        ids = self.pool.alloc(count)
        assert ids is not None, "the workload fits"
        self.follow()
        return ids

    def step(self, one: Running) -> bool:
        """One token; False once it was the last."""
        if one.made_tokens % BLOCK_TOKENS == 0:
            one.own += self.take(1)
        one.made_tokens += 1
        one.left_tokens -= 1
        return one.left_tokens > 0

    def end(self, one: Running) -> None:
        for block in one.prefix:
            self.refs[block] -= 1
        over = [block for block in one.prefix if self.refs[block] == 0]
        for block in over:
            del self.refs[block]
        self.pool.cache([block for block in over if block in self.where])
        self.pool.free([*one.own, *(block for block in over if block not in self.where)])
        self.follow()


def serve(engine: Engine, requests: int) -> None:
    """The same requests in every run."""
    dice = random.Random(7)
    waiting = deque(
        (min(int(dice.expovariate(4 / PREFIXES)), PREFIXES - 1),
         dice.randint(SHORTEST_TOKENS, LONGEST_TOKENS))
        for _ in range(requests)
    )  # fmt: skip
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(engine.start(*waiting.popleft()))
        for one in list(running):
            if not engine.step(one):
                running.remove(one)
                engine.end(one)


def run(requests: int, *, movable: bool) -> tuple[float, float, int]:
    """Bytes held over the floor; hits of the blocks asked for; cached blocks that idling has lost."""
    geometry = _vmm.Geometry(
        pages=PAGES,
        extent_bytes=PAGE_BYTES,
        block_bytes=PAGE_BYTES // BLOCKS_PER_PAGE,
        blocks_per_page=BLOCKS_PER_PAGE,
    )
    memory = _vmm.Range.reserve(_vmm.HostDriver(), geometry)
    pool = _vmm.Pool(
        memory,
        max_blocks=PAGES * BLOCKS_PER_PAGE,
        limit_bytes=PAGES * PAGE_BYTES,
        capacity_bytes=PAGES * PAGE_BYTES,
        max_cached_blocks=MAX_CACHED_BLOCKS,
        movable=movable,
    )
    engine = Engine(pool)
    serve(engine, requests)
    # Idle: what the keeper does then, step by step.
    cached_before = len(engine.found)
    while pool.compact():
        engine.follow()
    pool.trim()
    engine.follow()
    pool.check_integrity()
    with_null_block = len(engine.found) + 1
    floor_pages = -(-with_null_block // BLOCKS_PER_PAGE)
    held = pool.mapped_bytes / (floor_pages * PAGE_BYTES)
    return held, 100 * engine.hits_blocks / engine.asked_blocks, cached_before - len(engine.found)


def figures(requests: int, rounds: int) -> list[Figure]:
    held = Figure("idle: held over the packed floor", "x", [], "<= 1.05", "nothing moved")
    hits = Figure("hits of prefix blocks", "%", [], "none lost", "nothing moved")
    lost = []
    for _ in range(rounds):
        over, percent, gone = run(requests, movable=True)
        held.samples.append(over)
        hits.samples.append(percent)
        lost.append(gone)
        over, percent, _ = run(requests, movable=False)
        held.floor_samples.append(over)
        hits.floor_samples.append(percent)
    held.note = f"{requests} requests; cached blocks lost by becoming idle: {max(lost)}"
    return [held, hits]
