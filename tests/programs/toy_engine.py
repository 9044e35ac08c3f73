"""A fourth engine, as small as one can be: a scheduler, a prefix cache, and steps that overlap.

    engine = ToyEngine(cache.blocks, memory=cache.pool.memory, layout=cache.layout, pages=...)
    engine.submit("a", [1, 2, 3], new_tokens=20)
    engine.finish()
    assert engine.answers["a"] == answer_of([1, 2, 3], 20)

It stands on `kvelastic.pool.scheduling` as an integration does. Its answers are read from its
blocks, and each block that a step reads must hold what its tokens say, also when the request was
preempted or aborted after the step had begun. A block without memory would be a fault.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field

from kvelastic import _vmm
from kvelastic.errors import IntegrityError
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks
from kvelastic.pool.scheduling.memory_wait import Backoff

BLOCK_TOKENS = 4


def tag_of(tokens: list[int]) -> int:
    """What a block that ends with these tokens holds, 1 to 250."""
    tag = 0
    for token in tokens:
        tag = (31 * tag + token + 1) % 250
    return tag + 1


def next_token(tags: list[int], rest: list[int]) -> int:
    """What follows blocks that hold these tags, and the tokens after them."""
    return (sum(tags) + tag_of(rest)) % 50


def answer_of(prompt: list[int], new_tokens: int) -> list[int]:
    """What any engine has to answer."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        rest = tokens[len(ends) * BLOCK_TOKENS :]
        tokens.append(next_token([tag_of(tokens[:end]) for end in ends], rest))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    new_tokens: int
    prompt_tokens: int
    blocks: list[int] = field(default_factory=list)
    known: int = 0
    """Leading blocks that hold what their tokens say."""
    step: int = 0
    """The step on its way that it is part of; 0: none."""

    @property
    def full(self) -> int:
        return len(self.tokens) // BLOCK_TOKENS

    @property
    def missing(self) -> int:
        """Blocks that it needs for its next step and does not have."""
        return max(0, -(-len(self.tokens) // BLOCK_TOKENS) - len(self.blocks))


@dataclass
class Work:
    """A request's part of one step: what it writes, reads, and computes from."""

    request: Request
    blocks: list[int]
    tags: list[int]
    known: int
    rest: list[int]


class ToyEngine:
    def __init__(
        self,
        blocks: SchedulerBlocks,
        *,
        memory: _vmm.Range,
        layout: PageLayout,
        pages: int,
        steps_on_their_way: int = 1,
    ) -> None:
        self.blocks = blocks
        self.blocks.on_changes = self._follow
        self.backoff = Backoff(blocks, lambda: len(self.requests))
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.preemptions = self.found = self.evicted = self.moved = 0
        self._memory, self._layout, self._pages = memory, layout, pages
        self._depth = steps_on_their_way
        self._on_their_way: deque[tuple[int, list[Work]]] = deque()
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._users: dict[int, int] = {}
        """Of every block in use, how many requests have it."""
        self._id_of: dict[tuple[int, ...], int] = {}
        """Of all tokens up to a block's end, the block; in use or cached."""
        self._key_of: dict[int, tuple[int, ...]] = {}

    # --- its interface --------------------------------------------------------------------------

    def submit(self, name: str, prompt: list[int], new_tokens: int) -> None:
        request = Request(name, list(prompt), new_tokens, len(prompt))
        self.requests[name] = request
        self._waiting.append(request)

    def abort(self, name: str) -> None:
        request = self.requests.pop(name)
        if request in self._running:
            self._running.remove(request)
            self._give_back(request)
        else:
            self._waiting.remove(request)

    def forget_all(self) -> None:
        """Drop the prefix cache. Pre: no request."""
        with self.blocks.session():
            self.blocks.drop(list(self._key_of))
            self._key_of.clear()
            self._id_of.clear()

    def turn(self) -> bool:
        """A turn of its loop; False: it paused in the place of a step."""
        memory_wait = self.backoff.memory_wait
        if memory_wait is not None and not self.blocks.waits_for_steps and memory_wait.pause():
            return False
        self.backoff.look()
        with self.blocks.session():
            work = self._schedule()
        step = self.blocks.step_begins(works=bool(work))
        for part in work:
            part.request.step = step
        self.backoff.has_looked(works=bool(work))
        self._on_their_way.append((step, work))
        while len(self._on_their_way) > self._depth:
            self.end_a_step()
        self.check_integrity()
        return True

    def finish(self, turns: int = 5000) -> None:
        """Turn until every request is answered, and no step is on its way."""
        while self.requests and turns:
            self.turn()
            turns -= 1
        assert not self.requests, "it came to a dead end"
        while self._on_their_way:
            self.end_a_step()

    # --- a step ---------------------------------------------------------------------------------

    def _schedule(self) -> list[Work]:
        work = []
        for request in list(self._running):
            while request in self._running and not request.step:
                if self._take(request, []):
                    work.append(self._work_of(request))
                    break
                self._preempt(self._running[-1])
        while self._waiting and self._admit(self._waiting[0]):
            self._running.append(self._waiting.popleft())
            work.append(self._work_of(self._running[-1]))
        return work

    def _admit(self, request: Request) -> bool:
        hits: list[int] = []
        for at in range(request.full):
            key = tuple(request.tokens[: (at + 1) * BLOCK_TOKENS])
            if key not in self._id_of:
                break
            hits.append(self._id_of[key])
        if not self._take(request, hits):
            return False
        self.found += len(hits)
        request.known = len(hits)
        return True

    def _take(self, request: Request, hits: list[int]) -> bool:
        """Refer to what was found, and take the rest; False, and nothing done: too few."""
        missing = request.missing - len(hits)
        unused = [block for block in hits if block not in self._users]
        wanted = missing + len(unused)
        if wanted and self.blocks.prepare(wanted) < wanted:
            return False
        self.blocks.touch(unused)
        taken = self.blocks.take(missing) if missing else []
        assert taken is not None, "what was prepared in a session can be taken"
        for block in (*hits, *taken):
            self._users[block] = self._users.get(block, 0) + 1
        request.blocks += [*hits, *taken]
        return True

    def _work_of(self, request: Request) -> Work:
        ends = [(at + 1) * BLOCK_TOKENS for at in range(request.full)]
        tags = [tag_of(request.tokens[:end]) for end in ends]
        rest = request.tokens[len(ends) * BLOCK_TOKENS :]
        return Work(request, request.blocks[: len(ends)], tags, request.known, rest)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._running.remove(request)
        self._give_back(request)
        self._waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        blocks, request.blocks = request.blocks, []
        request.known = request.step = 0
        free: list[int] = []
        cached: list[int] = []
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                (cached if block in self._key_of else free).append(block)
        self.blocks.give_back(free, cached)
        self.blocks.follow()

    def end_a_step(self) -> None:
        """The oldest step on its way is carried out, and what it did is learned."""
        step, work = self._on_their_way.popleft()
        tokens = [self._carry_out(part) for part in work]
        self.blocks.step_ends(step)
        for part, token in zip(work, tokens, strict=True):
            if part.request.step == step:
                self._learn(part, token)

    def _carry_out(self, part: Work) -> int:
        for block, tag in list(zip(part.blocks, part.tags, strict=True))[part.known :]:
            for at in self._places(block):
                ctypes.memset(at, tag, 1)
        read = [{ctypes.string_at(at, 1)[0] for at in self._places(at)} for at in part.blocks]
        assert read == [{tag} for tag in part.tags], "a block holds what another one wrote"
        return next_token([tag for (tag,) in read], part.rest)

    def _places(self, block: int) -> list[int]:
        """The first address of a block in every buffer."""
        layout, base = self._layout, self._memory.address
        return [
            base + layout.offset_bytes(block, buffer, self._pages)
            for buffer in range(layout.buffers)
        ]

    def _learn(self, part: Work, token: int) -> None:
        request = part.request
        for at in range(part.known, len(part.blocks)):
            key = tuple(request.tokens[: (at + 1) * BLOCK_TOKENS])
            if key not in self._id_of:  # else another request has the same, in a block of its own
                self._id_of[key], self._key_of[part.blocks[at]] = part.blocks[at], key
        request.known, request.step = len(part.blocks), 0
        request.tokens.append(token)
        answer = request.tokens[request.prompt_tokens :]
        if len(answer) == request.new_tokens:
            self.answers[request.name] = answer
            del self.requests[request.name]
            self._running.remove(request)
            self._give_back(request)

    # --- what the pool did ----------------------------------------------------------------------

    def _follow(self, changes: Changes) -> None:
        for block, moved_to in changes:
            key = self._key_of.pop(block)
            if block in self._users or self._id_of.pop(key) != block:
                raise IntegrityError(f"block {block} is in use, and the pool took it")
            if moved_to < 0:
                self.evicted += 1
                continue
            self.moved += 1
            self._id_of[key], self._key_of[moved_to] = moved_to, key

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        with self.blocks.session():
            cached = self._key_of.keys() - self._users.keys() - self.blocks.held_back
            stats = self.blocks.pool.stats()
            counted = (len(self._users), len(cached))
            if counted != (stats["blocks_used"], stats["blocks_cached"]):
                raise IntegrityError(f"{counted} blocks are in use and cached, the pool: {stats}")
        if {block: key for key, block in self._id_of.items()} != self._key_of:
            raise IntegrityError("the blocks of keys and the keys of blocks differ")
