"""One engine's day over one pool: staggered decode, a prefix cache, then nothing to do.

    python -m benchmarks.ledger.staggered '{"movable": true, "blocks_per_page": 64, ...}'

answers with one JSON line. Requests come with prompts that share prefixes; each decodes a token a
step, so all that run take one block at a time, and each ends after another number of tokens. What a
request leaves goes to the prefix cache, found by the tokens' name. Then the engine is idle while
the maintenance thread runs. At the end every name is looked up in the cache, and the contents of
each block are compared with what was written there.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PAGE_BYTES = 2 << 20
BLOCK_TOKENS = 16
PREFIXES = 40
PREFIX_BLOCKS = 8
OWN_BLOCKS_MOST = 16
"""Of a prompt, after its shared prefix."""
OUTPUT_TOKENS = (16, 256)
SETTLE_S = 30.0


@dataclass(frozen=True)
class Day:
    """One arm of the comparison."""

    movable: bool
    blocks_per_page: int
    requests: int
    at_once: int
    cached_tokens: int
    idle_trim_s: float
    seed: int


@dataclass
class Outcome:
    """What was held, and what was still to be found."""

    peak_bytes: int
    busy_end_bytes: int
    """When the last request has ended."""
    idle_bytes: int
    """What the operating system says the pool's file holds, once nothing changes any more."""
    packed_bytes: int
    """As few pages as can hold the cached blocks and the null block."""
    cached_blocks: int
    moved_blocks: int
    settle_s: float
    prompt_blocks: int
    hits: int
    """Of prompt_blocks, while there was traffic."""
    known_before: int
    """Blocks that the prefix cache knew before the idle time."""
    known_after: int
    """Those of them that it still knows, with their contents as they were written."""


@dataclass
class Request:
    """One request that runs."""

    names: list[int]
    """Of its full blocks, in order."""
    blocks: list[int]
    tokens_left: int
    tokens: int = 0
    """Decoded so far."""


@dataclass
class Engine:
    """A prefix cache over a pool, and the requests that run."""

    pool: Any
    address: int
    layout: Any
    pages: int
    known: dict[int, int] = field(default_factory=dict)
    """Block of each name, in use or cached."""
    names: dict[int, int] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    hits: int = 0
    prompt_blocks: int = 0
    next_name: int = 1

    def new_name(self) -> int:
        """As a hash of tokens that nobody else has."""
        self.next_name += 1
        return self.next_name

    def write(self, block: int, name: int) -> None:
        """First and last word of the block's memory."""
        for at in self._words(block):
            ctypes.c_uint64.from_address(at).value = name

    def is_there(self, block: int, name: int) -> bool:
        """Whether the memory says so too."""
        return all(ctypes.c_uint64.from_address(at).value == name for at in self._words(block))

    def _words(self, block: int) -> tuple[int, int]:
        begin = self.address + self.layout.offset_bytes(block, 0, self.pages)
        return begin, begin + self.layout.block_bytes - 8

    def follow(self) -> None:
        """What has become of cached blocks, before any is looked up."""
        if not self.pool.has_evicted:
            return
        for block, to in self.pool.take_changes():
            name = self.names.pop(block, None)
            if name is None:
                continue
            if to < 0:
                del self.known[name]
            else:
                self.names[to] = name
                self.known[name] = to

    def take(self, name: int | None) -> int:
        """A new block; `name` for one that is full."""
        ids = self.pool.alloc(1)
        assert ids is not None, "the pool is too small for this day"
        self.follow()
        self.users[ids[0]] = 1
        if name is not None:
            self.fill(ids[0], name)
        return int(ids[0])

    def fill(self, block: int, name: int) -> None:
        """The block is full of tokens that are called so."""
        self.write(block, name)
        if name not in self.known:
            self.known[name] = block
            self.names[block] = name

    def start(self, prompt: list[int], output_tokens: int) -> Request:
        """Blocks that are known from the beginning on are used again."""
        self.follow()
        self.prompt_blocks += len(prompt)
        blocks: list[int] = []
        for name in prompt:
            block = self.known.get(name)
            if block is None:
                break
            assert self.is_there(block, name), "a hit on other contents"
            if self.users.get(block, 0) == 0:
                self.pool.touch([block])
            self.users[block] = self.users.get(block, 0) + 1
            blocks.append(block)
        self.hits += len(blocks)
        blocks += [self.take(name) for name in prompt[len(blocks) :]]
        return Request(list(prompt), blocks, output_tokens)

    def step(self, request: Request) -> bool:
        """One token; False when it was the last one."""
        if request.tokens % BLOCK_TOKENS == 0:
            request.blocks.append(self.take(None))
        request.tokens += 1
        if request.tokens % BLOCK_TOKENS == 0:
            request.names.append(self.new_name())
            self.fill(request.blocks[-1], request.names[-1])
        request.tokens_left -= 1
        return request.tokens_left > 0

    def end(self, request: Request) -> None:
        """Full blocks are cached, the last one first to be evicted first; the rest is free."""
        cached: list[int] = []
        free: list[int] = []
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                (cached if block in self.names else free).append(block)
        self.pool.free(free)
        self.pool.cache(cached)
        self.follow()


def traffic(engine: Engine, day: Day, held: list[int]) -> None:
    """All requests, `at_once` of them running at any time."""
    dice = random.Random(day.seed)
    prefixes = [[engine.new_name() for _ in range(PREFIX_BLOCKS)] for _ in range(PREFIXES)]
    waiting = deque(range(day.requests))
    running: list[Request] = []
    while waiting or running:
        while waiting and len(running) < day.at_once:
            waiting.popleft()
            own = [engine.new_name() for _ in range(dice.randint(0, OWN_BLOCKS_MOST))]
            prompt = dice.choice(prefixes)[: dice.randint(1, PREFIX_BLOCKS)] + own
            running.append(engine.start(prompt, dice.randint(*OUTPUT_TOKENS)))
        still = []
        for request in running:
            if engine.step(request):
                still.append(request)
            else:
                engine.end(request)
        running = still
        held.append(engine.pool.mapped_bytes)


def memfd_bytes() -> int:
    """What this process's pool holds at the operating system."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own descriptor
            if "memfd:kvelastic" in str(fd.readlink()):
                total += fd.stat().st_blocks * 512
    return total


def settle(pool: Any, quiet_s: float) -> float:
    """Seconds until nothing has changed for `quiet_s`."""
    start = last = time.monotonic()
    before = None
    while time.monotonic() - last < quiet_s and time.monotonic() - start < SETTLE_S:
        stats = pool.stats()
        now = (stats["pages_mapped"], stats["blocks_moved"])
        if now != before:
            before, last = now, time.monotonic()
        time.sleep(0.01)
    return last - start


def live(day: Day) -> Outcome:
    """The day, from start to idle."""
    from kvelastic.config import load
    from kvelastic.device.selection import host
    from kvelastic.pool.layout import PageLayout
    from kvelastic.pool.pool import local_range, open_pool

    settings = load()
    block_bytes = PAGE_BYTES // day.blocks_per_page
    layout = PageLayout(block_bytes, 1, day.blocks_per_page, PAGE_BYTES)
    device = host(settings)
    pages = device.capacity_bytes // PAGE_BYTES
    with open_pool(
        settings,
        layout,
        pages,
        num_blocks=pages * day.blocks_per_page,
        block_tokens=BLOCK_TOKENS,
        engine="bench",
        devices=[device],
        memory=local_range(device),
        movable=day.movable,
    ) as opened:
        opened.start_maintenance()
        pool: Any = opened.blocks
        memory: Any = opened.memory
        engine = Engine(pool, memory.address, layout, pages)
        held: list[int] = []
        traffic(engine, day, held)
        engine.follow()
        before = dict(engine.known)
        moved_before = pool.stats()["blocks_moved"]
        settle_s = settle(pool, 4 * day.idle_trim_s)
        engine.follow()
        pool.check_integrity()
        stats = pool.stats()
        after = [n for n in before if n in engine.known and engine.is_there(engine.known[n], n)]
        packed_pages = -(-(stats["blocks_cached"] + 1) // day.blocks_per_page)
        return Outcome(
            peak_bytes=max(held),
            busy_end_bytes=held[-1],
            idle_bytes=memfd_bytes(),
            packed_bytes=packed_pages * PAGE_BYTES,
            cached_blocks=stats["blocks_cached"],
            moved_blocks=stats["blocks_moved"] - moved_before,
            settle_s=settle_s,
            prompt_blocks=engine.prompt_blocks,
            hits=engine.hits,
            known_before=len(before),
            known_after=len(after),
        )


if __name__ == "__main__":
    chosen = Day(**json.loads(sys.argv[1]))
    os.environ["KVELASTIC_IDLE_TRIM_SECONDS"] = str(chosen.idle_trim_s)
    os.environ["KVELASTIC_MAX_CACHED_TOKENS"] = str(chosen.cached_tokens)
    print(json.dumps(asdict(live(chosen))))
