"""An instance that works by itself and knows every byte of its blocks: what chaos is made of.

As a program it makes an instance over host memory and prints `{"name": ...}`, or `{"error": ...}`.
Then it allocs, frees, caches, finds again and reads, at random, until its stdin closes. Each block
holds a stamp: who wrote it, under which id, and the number of that write. A stamp is checked at
each use of its block. A wrong one is an exception, and so an exit status.

Lines on stdin: `rest` (answered with counts, when its books agree; then it does nothing) and `go`.
With `--joins` it makes no pool: it joins the ledger, takes grants and leaves, over and over.
As a module, for tests: `Stamped(name, seed, KVELASTIC_LEDGER="x").wait_until_ready()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import struct
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from processes import LineProgram

PAGES = 64
BLOCK_BYTES = 64 << 10
BUFFERS = 4
BLOCKS_PER_PAGE = 8
PAGE_BYTES = 2 << 20
MOST_REQUESTS = 12
MOST_BLOCKS = 3 * BLOCKS_PER_PAGE
MOST_RESERVED_PAGES = 4
RESERVES_A_STEP = 0.01


class Stamped(LineProgram):
    """Such a process, under the control of a test."""

    def __init__(self, name: str, log: Path, *arguments: str, **environ: str) -> None:
        super().__init__(__file__, name, *arguments, environment=environ, log=log)
        self.name = name
        self.is_stopped = False

    def has_said_something(self) -> bool:
        """Whether `read` and `wait_until_ready` return at once."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def wait_until_ready(self) -> str:
        """What it could not start for, or nothing."""
        return str(self.read().get("error", ""))

    def rest(self) -> None:
        """Ask it to do nothing; `read` the counts when it does nothing."""
        self.send("rest")

    def go(self) -> None:
        """After a rest."""
        self.send("go")

    def read(self) -> Any:
        return json.loads(super().read())

    def stop(self) -> None:
        super().stop()
        self.is_stopped = True

    def go_on(self) -> None:
        super().go_on()
        self.is_stopped = False

    def leave(self) -> None:
        """Let it end in the ordinary way. Raises `AssertionError` if it ends in another."""
        assert self.finish() == 0, self.how_it_ended()

    def resident_bytes(self) -> int:
        """What the kernel holds for its blocks, by the files that the process has open."""
        held = {}
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "memfd:kvelastic" in str(entry.readlink()):
                    state = entry.stat()
                    held[state.st_ino] = state.st_blocks * 512
        return sum(held.values())


# --- the instance ---------------------------------------------------------------------------------


class Contents:
    """Stamps in the memory of blocks, at both ends and in the middle of every buffer's part."""

    STAMP = struct.Struct("=QQQ")

    def __init__(self, address: int, layout: Any, pages: int) -> None:
        self._memory = memoryview(
            (ctypes.c_ubyte * layout.range_bytes(pages)).from_address(address)
        ).cast("B")
        self._layout = layout
        self._pages = pages
        self._owner = int.from_bytes(os.urandom(7), "big") | 1

    def _places(self, block: int) -> list[int]:
        ends = (0, BLOCK_BYTES // 2, BLOCK_BYTES - self.STAMP.size)
        return [
            self._layout.offset_bytes(block, buffer, self._pages) + end
            for buffer in range(BUFFERS)
            for end in ends
        ]

    def check_new(self, block: int) -> None:
        """It was handed out just now: zeros, or what this instance once wrote."""
        for at in self._places(block):
            owner, *_ = self.STAMP.unpack_from(self._memory, at)
            assert owner in (0, self._owner), f"block {block} holds what another instance wrote"

    def write(self, block: int, serial: int) -> tuple[int, int, int]:
        """Answers what `check` has to find."""
        stamp = (self._owner, block, serial)
        for at in self._places(block):
            self.STAMP.pack_into(self._memory, at, *stamp)
        return stamp

    def check(self, block: int, stamp: tuple[int, int, int]) -> None:
        """Raises `AssertionError` if anything else is there."""
        for at in self._places(block):
            found = self.STAMP.unpack_from(self._memory, at)
            assert found == stamp, f"block {block} holds {found} at {at}, not {stamp}"


class Engine:
    """What an engine does to a pool, at random; it follows what is evicted and moved."""

    def __init__(self, blocks: Any, contents: Contents, dice: random.Random) -> None:
        self.blocks = blocks
        self.contents = contents
        self.dice = dice
        self.requests: list[list[int]] = []
        self.stamps: dict[int, tuple[int, int, int]] = {}
        """Of the blocks in use."""
        self.cached: dict[int, tuple[int, int, int]] = {}
        self.counts: Counter[str] = Counter()
        self._serial = 0

    def step(self) -> None:
        """One call or a few of the pool."""
        what = self.dice.random()
        if what < 0.45:
            self.begin()
        elif what < 0.75:
            self.end()
        elif what < 0.93:
            self.reuse_cached_blocks()
        elif what < 0.97:
            self.check_all()
        elif what < 0.98:
            self.blocks.ensure(self.dice.randint(1, MOST_BLOCKS))
        elif what < 0.985:
            if self.blocks.try_to_reserve(self.dice.randint(1, MOST_BLOCKS)):
                self.blocks.free_reserved()
        elif what < 0.99:
            self.blocks.trim()
        elif what < 0.995:
            self.blocks.compact()
        else:
            self.clear()
        self.follow()

    def begin(self) -> None:
        """A request; where there is no room, an older one makes way."""
        if len(self.requests) >= MOST_REQUESTS:
            self.end()
            return
        ids = self.blocks.alloc(self.dice.randint(1, MOST_BLOCKS))
        self.follow()
        if ids is None:
            self.counts["none"] += 1
            if self.requests and self.dice.random() < 0.5:
                self.end()
            return
        self._take(ids, new=True)
        for block in ids:
            self.contents.check_new(block)
            self._serial += 1
            self.stamps[block] = self.contents.write(block, self._serial)
        self.counts["blocks"] += len(ids)
        self.requests.append(ids)

    def _take(self, ids: list[int], *, new: bool) -> None:
        for block in ids:
            assert block != 0, "the null block was handed out"
            assert block not in self.stamps, f"block {block} is in use already"
            assert not new or block not in self.cached, f"block {block} was cached, not evicted"

    def end(self) -> None:
        """A request's blocks are cached or free again."""
        if not self.requests:
            return
        ids = self.requests.pop(self.dice.randrange(len(self.requests)))
        for block in ids:
            self._read(block, self.stamps[block])
        if self.dice.random() < 0.6:
            self.cached |= {block: self.stamps.pop(block) for block in ids}
            self.blocks.cache(ids)
        else:
            for block in ids:
                del self.stamps[block]
            self.blocks.free(ids)

    def reuse_cached_blocks(self) -> None:
        """As a prefix cache does: look and take, with nothing in between."""
        with self.blocks.session():
            self.follow()
            count = min(len(self.cached), self.dice.randint(1, MOST_BLOCKS))
            found = self.dice.sample(sorted(self.cached), count)
            if not found or len(self.requests) >= MOST_REQUESTS:
                return
            self.blocks.touch(found)
        self._take(found, new=False)
        for block in found:
            self.stamps[block] = self.cached.pop(block)
            self._read(block, self.stamps[block])
            self.counts["found again"] += 1
        self.requests.append(found)

    def follow(self) -> None:
        """Forget what was evicted, and find what was moved."""
        if not self.blocks.has_evicted:
            return
        for block, moved_to in self.blocks.take_changes():
            stamp = self.cached.pop(block, None)
            self.counts["moved" if moved_to >= 0 else "evicted"] += 1
            if stamp is not None and moved_to >= 0:
                assert moved_to not in self.stamps, f"a cached block moved onto {moved_to}, in use"
                self.cached[moved_to] = stamp

    def check_all(self) -> None:
        """Every block in use, and every cached one while nobody may evict or move it."""
        for block, stamp in self.stamps.items():
            self._read(block, stamp)
        with self.blocks.session():
            self.follow()
            for block, stamp in self.cached.items():
                self._read(block, stamp)

    def _read(self, block: int, stamp: tuple[int, int, int]) -> None:
        self.counts["reads"] += 1
        self.contents.check(block, stamp)

    def clear(self) -> None:
        """All of it, as a test of an engine does."""
        self.blocks.clear()
        self.requests.clear()
        self.stamps.clear()
        self.follow()
        self.cached.clear()


def commands() -> IO[bytes]:
    """Return stdin without a buffer: `select` would not see a second line that lies in one."""
    return open(0, "rb", buffering=0)


def obey_stdin(stdin: IO[bytes], counts: Counter[str], rest: Any) -> bool:
    """Does what stdin says; waits there during a rest."""
    if not select.select([stdin], [], [], 0)[0]:
        return False
    word = stdin.readline()
    while word == b"rest\n":
        rest()
        print(json.dumps(counts), flush=True)
        counts.clear()
        word = stdin.readline()
        if word == b"go\n":
            return False
    return True


def serve(name: str, seed: int) -> None:
    """Until stdin closes."""
    from kvelastic import _vmm
    from kvelastic.config import load
    from kvelastic.device.selection import host
    from kvelastic.errors import KvelasticError
    from kvelastic.pool.layout import PageLayout
    from kvelastic.pool.pool import local_range, open_pool

    settings = load()
    layout = PageLayout(BLOCK_BYTES, BUFFERS, BLOCKS_PER_PAGE, PAGE_BYTES)
    # As a GPU has it: what is reserved comes out of the capacity, and not out of memory beside it.
    device = replace(host(settings), total_bytes=0)
    try:
        opened = open_pool(
            settings,
            layout,
            PAGES,
            num_blocks=PAGES * BLOCKS_PER_PAGE,
            block_tokens=16,
            engine="chaos",
            devices=[device],
            memory=local_range(device),
            name=name,
            movable=True,
            reserve_bytes=settings.reserve or 0,
        )
    except KvelasticError as error:
        print(json.dumps({"error": f"{error.code}: {error}"}), flush=True)
        return
    with opened as pool:
        pool.start_maintenance()
        dice = random.Random(seed)
        assert isinstance(pool.memory, _vmm.Range)
        contents = Contents(pool.memory.address, layout, PAGES)
        engine = Engine(pool.blocks, contents, dice)

        def rest() -> None:
            engine.check_all()
            pool.blocks.check_integrity()

        stdin = commands()
        print(json.dumps({"name": pool.name}), flush=True)
        while not obey_stdin(stdin, engine.counts, rest):
            engine.step()
            if dice.random() < RESERVES_A_STEP:
                reserve_anew(pool, dice, engine.counts)
            if dice.random() < 0.3:
                time.sleep(dice.random() * 0.005)  # an engine computes
        engine.check_all()
        pool.blocks.check_integrity()


def reserve_anew(pool: Any, dice: random.Random, counts: Counter[str]) -> None:
    """As an engine whose batches grow; others may not have so much, or not give it in time."""
    from kvelastic.errors import GuaranteeError, ReserveError

    before = pool.ledgers[0].member.reserve_bytes
    wanted = dice.randint(0, MOST_RESERVED_PAGES) * PAGE_BYTES
    try:
        pool.reserve(wanted)
    except (GuaranteeError, ReserveError):
        assert pool.ledgers[0].member.reserve_bytes == before, "a refused reserve is in force"
        counts["reserves refused"] += 1
        return
    reserved = pool.ledgers[0].member.reserve_bytes
    assert reserved == wanted, f"reserve({wanted}) has returned, and {reserved} bytes are reserved"
    counts["larger reserves" if wanted > before else "smaller reserves"] += 1


def join_and_leave(name: str, seed: int) -> None:
    """Until stdin closes: a member without memory, again and again."""
    from kvelastic.config import load
    from kvelastic.device.selection import host
    from kvelastic.errors import KvelasticError

    settings = load()
    capacity_bytes = host(settings).capacity_bytes
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    stdin = commands()
    print(json.dumps({"name": name}), flush=True)
    while not obey_stdin(stdin, counts, lambda: None):
        try:
            join_briefly(name, settings.ledger, capacity_bytes, dice)
            counts["joins"] += 1
        except KvelasticError as error:
            counts[f"refused: {error.code}"] += 1
        time.sleep(dice.random() * 0.005)


def join_briefly(name: str, group: str, capacity_bytes: int, dice: random.Random) -> None:
    """Nobody may take a live member's grant, or remove its segment."""
    from kvelastic.shared import ledger, segment

    with (
        segment.create(name, engine="chaos") as mine,
        ledger.join(
            "host",
            group=group,
            capacity_bytes=capacity_bytes,
            name=name,
            uuid=mine.control_block.read_header()["uuid"],
            min_bytes=dice.choice([0, 0, PAGE_BYTES]),
        ) as joined,
    ):
        inode = mine.path.stat().st_ino
        got = joined.member.grant(dice.randint(1, 4), PAGE_BYTES)
        joined.member.request_memory(PAGE_BYTES)
        time.sleep(dice.random() * 0.002)
        held_bytes = joined.member.granted_bytes
        assert held_bytes == got * PAGE_BYTES, f"granted {got} pages, now {held_bytes} bytes"
        joined.member.give_back(got, PAGE_BYTES)
        assert mine.path.stat().st_ino == inode, "its segment was replaced"


if __name__ == "__main__":
    name, seed, *more = sys.argv[1:]
    (join_and_leave if more == ["--joins"] else serve)(name, int(seed))
