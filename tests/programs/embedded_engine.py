"""An engine of numpy over a real pool with tiers, that knows every byte of its blocks.

Its prompts are chains of numbers, many with common beginnings. A block holds what its key says and
nothing else holds that, so a block that was loaded, found again or kept can be compared to the last
byte. A wrong one is an exception, and so an exit status.

As a program: `embedded_engine.py NAME --seed S --steps N --disk FOLDER --host-bytes SIZE` prints
a line of JSON with counts every `--report` steps, and a last one with what its tiers hold, after it
has given everything back and compared all accounts. A test kills it where it likes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from waiting import DEADLINE_S

from kvelastic import _vmm
from kvelastic.config import Config, load
from kvelastic.device.selection import host, resolve
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool
from kvelastic.shared import segment
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Selection, Store
from kvelastic.tiers.load import Load
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.policy import Copies, Rules, WritePolicy
from kvelastic.tiers.publisher import show

PAGES = 24
BLOCK_BYTES = 16 << 10
BUFFERS = 4
BLOCKS_PER_PAGE = 32
PAGE_BYTES = 2 << 20
RECORD_BYTES = BLOCK_BYTES * BUFFERS
SLOTS = 24
DOCUMENTS = 16
MOST_TOKENS = 48
"""Blocks of a prompt: a token is a block."""
MOST_REQUESTS = 6
SOON_S = DEADLINE_S
LAYOUT = PageLayout(BLOCK_BYTES, BUFFERS, BLOCKS_PER_PAGE, PAGE_BYTES)


class Contents:
    """What blocks hold, by their keys. On a GPU (`gpu`) by its copies: nothing else reaches it."""

    def __init__(self, address: int, pages: int, gpu: _vmm.CudaDriver | None) -> None:
        self._address = address
        self._pages = pages
        self._gpu = gpu
        self._count = np.arange(BLOCK_BYTES // 8, dtype=np.uint64)

    def _copy(self, there: int, here: Any, *, to_block: bool) -> None:
        """Between a place of the range and an array."""
        pieces = [(here.ctypes.data, BLOCK_BYTES), (self._address + there, BLOCK_BYTES)]
        source, target = pieces if to_block else reversed(pieces)
        if self._gpu is None:
            ctypes.memmove(target[0], source[0], BLOCK_BYTES)
        else:
            packed = [_vmm.pack_pieces([source]), _vmm.pack_pieces([target])]
            _vmm.copy_pieces_on_gpu(self._gpu, *packed)

    def _expected(self, key: bytes, buffer: int) -> Any:
        seed = np.uint64(int.from_bytes(key[:8], "little") ^ (buffer * 0x9E3779B97F4A7C15 % 2**64))
        return self._count * np.uint64(0x2545F4914F6CDD1D) + seed

    def write(self, block: int, key: bytes) -> None:
        for buffer in range(BUFFERS):
            there = LAYOUT.offset_bytes(block, buffer, self._pages)
            self._copy(there, self._expected(key, buffer), to_block=True)

    def check(self, block: int, key: bytes, what: str) -> None:
        for buffer in range(BUFFERS):
            found = np.empty_like(self._count)
            there = LAYOUT.offset_bytes(block, buffer, self._pages)
            self._copy(there, found, to_block=False)
            is_right = np.array_equal(found, self._expected(key, buffer))
            assert is_right, f"block {block} holds other bytes in buffer {buffer}: {what}"


@dataclass
class Request:
    """A prompt that is being served."""

    keys: list[bytes]
    ids: list[int]
    load: Load | None
    loading: range
    """DeviceSet of its blocks that the load brings."""


class Engine:
    """One life of it. Not thread-safe; the pool's and tiers' threads work beside it."""

    def __init__(
        self,
        pool: ElasticPool,
        tiers: Tiers,
        namespace: Namespace,
        dice: random.Random,
        gpu: _vmm.CudaDriver | None = None,
    ) -> None:
        self.pool = pool
        self.blocks = pool.blocks
        self.tiers = tiers
        self.dice = dice
        assert isinstance(pool.memory, _vmm.Range)
        self.contents = Contents(pool.memory.address, PAGES, gpu)
        self.namespace = namespace
        self.counts: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.by_key: dict[bytes, int] = {}
        """Blocks that can be found again, in use or cached."""
        self.key_of: dict[int, bytes] = {}
        self.users: Counter[int] = Counter()
        self.is_asleep = False
        self.is_calm = False
        """Whether records are never erased: all that is stored can be found by the next life."""

    # --- prompts -------------------------------------------------------------------------------

    def prompt(self) -> list[bytes]:
        """Keys of a document's beginning; documents share theirs with one another."""
        document = self.dice.randrange(DOCUMENTS)
        count = self.dice.randint(1, MOST_TOKENS)
        keys, parent = [], self.namespace.fingerprint
        for place in range(count):
            # The first blocks are those of a few families, the later ones the document's own.
            token = document % 4 if place < 8 else document
            parent = hashlib.sha256(parent + token.to_bytes(4, "big")).digest()[:KEY_BYTES]
            keys.append(parent)
        return keys

    # --- steps ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One thing that an engine or an operator does."""
        if self.is_asleep and self.dice.random() < 0.2:
            self.sleep_or_wake()
        actions = {
            self.begin: 46,
            self.end: 34,
            self.check_all: 5,
            self.limit: 5,
            self.sleep_or_wake: 2,
            self.trim: 2,
            self.clean: 4,
        }
        if not self.is_calm:
            actions |= {self.forget: 1, self.erase: 1}
        (action,) = self.dice.choices(list(actions), list(actions.values()))
        action()
        self.counts[action.__name__] += 1
        self.follow()

    def begin(self) -> None:
        if len(self.requests) >= MOST_REQUESTS:
            self.end()
            return
        keys = self.prompt()
        with self.blocks.session():
            self.follow()
            ids = []
            for key in keys:
                if key not in self.by_key:
                    break
                ids.append(self.by_key[key])
            self.blocks.touch([block for block in ids if not self.users[block]])
            self.users.update(ids)
        for block, key in zip(ids, keys, strict=False):
            self.contents.check(block, key, "found again")
        self.counts["found"] += len(ids)
        rest = keys[len(ids) :]
        after = keys[len(ids) - 1] if ids else NO_KEY
        with self.tiers.match(b"".join(rest), chain_after=after) as match:
            new = self.blocks.alloc(len(rest)) if rest else []
            self.follow()
            if new is None:
                self.counts["none"] += 1
                self._give_back(ids, keys)
                return
            for block in new:
                assert not self.users[block], f"block {block} is in use already"
                assert block not in self.key_of, f"block {block} was cached, not evicted"
            load = self.tiers.load(match, new[: match.count]) if match.count else None
        self.users.update(new)
        loading = range(len(ids), len(ids) + match.count)
        request = Request(keys, ids + new, load, loading)
        self.requests.append(request)
        for place in range(loading.stop, len(keys)):
            self.contents.write(request.ids[place], keys[place])
            self._register(request.ids[place], keys[place])
        self.counts["computed"] += len(keys) - loading.stop
        if load is not None and self.dice.random() < 0.2:
            load.cancel()
            self.counts["cancelled"] += 1
        if self.dice.random() < 0.5:
            self._finish_load(request)

    def _finish_load(self, request: Request) -> None:
        load, request.load = request.load, None
        if load is None:
            return
        assert load.wait(SOON_S), "a load did not end"
        failed = set(load.failed)
        for at, place in enumerate(request.loading):
            block, key = request.ids[place], request.keys[place]
            if at in failed:
                self.contents.write(block, key)
                self.counts["missed"] += 1
            else:
                self.contents.check(block, key, "loaded")
                self.counts["loaded"] += 1
            self._register(block, key)

    def _register(self, block: int, key: bytes) -> None:
        """It can be found from now on, unless another one is found under this key already."""
        if key not in self.by_key:
            self.by_key[key] = block
            self.key_of[block] = key

    def end(self) -> None:
        if not self.requests:
            return
        request = self.requests.pop(self.dice.randrange(len(self.requests)))
        self._finish_load(request)
        for block, key in zip(request.ids, request.keys, strict=True):
            self.contents.check(block, key, "in use")
        self._give_back(request.ids, request.keys)

    def _give_back(self, ids: list[int], keys: list[bytes]) -> None:
        """Ends of prompts first, as they are of use to fewer."""
        cached: list[int] = []
        freed: list[int] = []
        for block in reversed(ids):
            self.users[block] -= 1
            if self.users[block]:
                continue
            del self.users[block]
            (cached if block in self.key_of else freed).append(block)
        self.blocks.free(freed)
        self.blocks.cache(cached, b"".join(self.key_of[block] for block in cached))

    def follow(self) -> None:
        """Forget what was evicted, and find what was moved."""
        if not self.blocks.has_evicted:
            return
        for block, to in self.blocks.take_changes():
            key = self.key_of.pop(block)
            assert not self.users[block], f"block {block} was evicted in use"
            if to >= 0:
                self.by_key[key], self.key_of[to] = to, key
                self.counts["moved"] += 1
            else:
                del self.by_key[key]
                self.counts["demoted" if to == -2 else "dropped"] += 1

    def check_all(self) -> None:
        with self.blocks.session():
            self.follow()
            loading = {
                request.ids[place]
                for request in self.requests
                if request.load is not None
                for place in request.loading
            }
            for block, key in self.key_of.items():
                if block not in loading:
                    self.contents.check(block, key, "kept")
        self.blocks.check_integrity()

    def limit(self) -> None:
        pages = self.dice.choice([1, 3, 6, 12, PAGES, PAGES])
        segment.request(
            self.pool.name, limit_bytes=pages * PAGE_BYTES, wait_s=self.dice.choice([0, 0.05])
        )

    def sleep_or_wake(self) -> None:
        self.is_asleep = not self.is_asleep
        # Blocks in use are not given up, whoever waits for them.
        while self.requests:
            self.end()
        wait_s = self.dice.choice([0, SOON_S])
        segment.request(self.pool.name, asleep=self.is_asleep, wait_s=wait_s)

    def trim(self) -> None:
        self.blocks.trim()
        self.blocks.compact()

    def clean(self) -> None:
        self.tiers.clean_all(self.dice.choice([0.0, 0.01, 1.0]))

    def forget(self) -> None:
        """As weights that change in place: the same tokens have other contents from now on."""
        while self.requests:
            self.end()
        self.namespace = self.tiers.forget()
        self._reset()

    def _reset(self) -> None:
        with self.blocks.session():
            self.follow()
            cached = [block for block in self.key_of if not self.users[block]]
            self.blocks.free(cached)
            for block in cached:
                del self.by_key[self.key_of.pop(block)]

    def erase(self) -> None:
        self.tiers.erase(self.dice.choice([None, Selection(older_than_s=0.0)]))

    # --- the end -------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Give everything back; raises `AssertionError` for a block or a byte that is left."""
        while self.requests:
            self.end()
        segment.request(self.pool.name, asleep=False, limit_bytes=PAGES * PAGE_BYTES, wait_s=SOON_S)
        self.check_all()
        assert self.tiers.drain(SOON_S)
        self.tiers.check_integrity()
        capacities = {store.name: store.capacity() for store in self.tiers.stores}
        self._reset()
        stats = self.blocks.stats()
        assert stats["blocks_used"] <= 1, f"blocks are left in use: {stats}"  # the null block
        assert stats["blocks_cached"] == stats["blocks_pinned"] == 0, stats
        assert stats["blocks_demoted"] == self.counts["demoted"], (stats, self.counts)
        assert stats["blocks_dropped"] == self.counts["dropped"], (stats, self.counts)
        self.blocks.check_integrity()
        return {
            name: {"used_bytes": capacity.used_bytes, "records": capacity.records}
            for name, capacity in capacities.items()
        }


def open_engine(
    name: str,
    dice: random.Random,
    *,
    settings: Config | None = None,
    disk: Path | None = None,
    disk_bytes: int = 32 << 20,
    host_bytes: int = 0,
    rules: Rules | None = None,
    on_gpu: bool = False,
) -> Engine:
    """A pool of host memory that stands for a device, with a host tier and a disk tier as asked.

    `on_gpu`: on a GPU.
    """
    settings = load() if settings is None else settings
    gpu: _vmm.CudaDriver | None = None
    if on_gpu:
        device = resolve("cuda", settings)
        driver = device.driver()
        assert isinstance(driver, _vmm.CudaDriver)
        driver.use_streams([])  # copies are waited for
        gpu = driver
    else:
        device = replace(host(settings), total_bytes=0)
    pool = open_pool(
        replace(settings, max_cached_tokens=-1),
        LAYOUT,
        PAGES,
        num_blocks=PAGES * BLOCKS_PER_PAGE,
        block_tokens=1,
        engine="embedded",
        devices=[device],
        memory=local_range(device),
        name=name,
        movable=True,
    )
    namespace = Namespace("embedded", block_tokens=1, record_bytes=pool.blocks.record_bytes)
    stores: list[Store] = []
    if host_bytes:
        from kvelastic.tiers.stores.host.store import HostStore

        stores.append(HostStore(RECORD_BYTES, host_bytes, settings=settings, name=f"{name}_tier"))
    if disk is not None:
        from kvelastic.tiers.stores.disk.store import DiskStore

        stores.append(DiskStore([disk], RECORD_BYTES, disk_bytes, namespace))
    staging = _vmm.Staging(SLOTS, pool.blocks.record_bytes)
    tiers = Tiers(pool.blocks, staging, namespace, stores, rules)
    show(tiers, pool.segment.control_block.read_header()["uuid"])
    pool.start_maintenance()
    return Engine(pool, tiers, namespace, dice, gpu)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--report", type=int, default=50)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--disk-bytes", type=int, default=32 << 20)
    parser.add_argument("--host-bytes", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="on the simulated GPU")
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--policy", default="write_back")
    parser.add_argument("--copies", default="all")
    parser.add_argument("--idle", type=float, default=5.0)
    asked = parser.parse_args()
    engine = open_engine(
        asked.name,
        random.Random(asked.seed),
        disk=asked.disk,
        disk_bytes=asked.disk_bytes,
        host_bytes=asked.host_bytes,
        on_gpu=asked.gpu,
        # It looks often, so that blocks are copied while the engine works.
        rules=Rules(
            WritePolicy(asked.policy), Copies(asked.copies), idle_after_s=asked.idle, tick_s=0.002
        ),
    )
    engine.is_calm = asked.calm
    print(json.dumps({"ready": True}), flush=True)
    for step in range(1, asked.steps + 1):
        engine.step()
        if step % asked.report == 0:
            print(json.dumps(engine.counts), flush=True)
    tiers = engine.finish()
    assert engine.tiers.close(SOON_S) == []
    engine.pool.close()
    print(json.dumps({"tiers": tiers, "counts": engine.counts}), flush=True)


if __name__ == "__main__":
    main()
