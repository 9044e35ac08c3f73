"""A cluster of the chaos: caches come and go in elastic pools, and all clusters copy at once.

    python chaotic_cluster.py ID FOLDER PORT OTHER_ID:PORT...

It answers "did" on stdin with what it did so far. At "stop" it stops copying and says "stopped".
After one more line it compares all accounts and says what it did and what was wrong.

A *source* is filled with stamps that no other row ever had, told to the others after that, and not
written again: what is pulled from it is the stamp that was told, to the last byte, or an error. An
*inbox* has a block for each pusher, who pulls back what it has pushed. What is copied and swapped
in a cluster is compared with where it came from.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from waiting import wait_until

from kvelastic import _vmm
from kvelastic.datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)

MIB = 1 << 20
ROWS, TENSORS, ROW_BYTES = 6, 4, 24 << 10  # pieces that divide no page
DEVICE = CacheDesc(TENSORS, [ROWS, ROW_BYTES], DataType.DT_INT8)
HOST = CacheDesc(TENSORS, [ROWS, ROW_BYTES], DataType.DT_INT8, Placement.HOST)
POOL_BYTES = 20 * MIB
MOST_SOURCES = 5
INBOX_MODEL = 1 << 40

S = LLMStatusCode
# What the others' ends, a lack of memory and lost races come to; anything else is wrong.
MAY_HAPPEN = {
    S.LLM_KV_CACHE_NOT_EXIST, S.LLM_OUT_OF_MEMORY, S.LLM_TIMEOUT, S.LLM_WAIT_PROCESS_TIMEOUT,
    S.LLM_LINK_FAILED, S.LLM_NOT_YET_LINK, S.LLM_LINK_BUSY, S.LLM_ALREADY_LINK,
    S.LLM_PROCESSING_LINK,
}  # fmt: skip


class ChaoticCluster:
    def __init__(self, cluster_id: int, folder: Path, port: int, others: dict[int, int]) -> None:
        self.cluster_id, self.folder, self.others = cluster_id, folder, others
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.mem_pool_cfg = config.host_mem_pool_cfg = json.dumps({"memory_size": POOL_BYTES})
        config.listen_ip_info = f"127.0.0.1:{port}"
        config.sync_kv_timeout = 1000
        self.datadist = LLMDataDist(LLMRole.MIX, cluster_id)
        self.datadist.init(config.generate_options())
        self.manager = self.datadist.cache_manager
        self.pools = [memory.pool for memory in self.manager._caches.pools]
        self.lock = threading.Lock()
        self.last_stamp = (cluster_id % 1000 << 48) + (os.getpid() << 24)
        self.last_model = 0
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()
        self.sources: dict[int, tuple[Cache, dict[str, Any]]] = {}
        self.inbox = self.make_inbox()
        for row in range(ROWS):
            fill(self.inbox, row, 0)
        self.tell()

    def make_inbox(self) -> Cache:
        """The others may hold all memory, for a while."""
        while True:
            with self.expected():
                return self.manager.allocate_blocks_cache(DEVICE, BlocksCacheKey(0, INBOX_MODEL))

    def stamp(self) -> int:
        with self.lock:
            self.last_stamp += 1
            return self.last_stamp

    def count(self, what: str) -> None:
        with self.lock:
            self.did[what] += 1

    # --- caches come and go, and so do their pages ---------------------------------------------

    def tell(self) -> None:
        """The others learn what there is, a moment late."""
        told = self.folder / f"{self.cluster_id}.new"
        told.write_text(json.dumps([one for _, one in self.sources.values()]))
        told.rename(self.folder / f"{self.cluster_id}.caches")

    def churn(self) -> None:
        rng = random.Random(self.last_stamp)
        while not self.stop.is_set():
            with self.expected():
                step = rng.randrange(10)
                if step < 5 and len(self.sources) < MOST_SOURCES:
                    self.add_source(rng)
                elif step < 8 and self.sources:
                    self.drop_source(rng)
                elif step == 8:  # as an operator, or the ledger for others, would
                    blocks = rng.choice(self.pools).blocks
                    blocks.set_limit(rng.randrange(3, 12) * 2 * MIB)
                    blocks.trim()
                else:
                    for pool in self.pools:
                        pool.blocks.set_limit(POOL_BYTES + 2 * MIB)
            self.stop.wait(0.002)
        for _ in range(len(self.sources)):
            self.drop_source(rng)

    def add_source(self, rng: random.Random) -> None:
        self.last_model += 1
        is_blocks = rng.randrange(2)
        cache = (
            self.manager.allocate_blocks_cache(DEVICE, BlocksCacheKey(0, self.last_model))
            if is_blocks
            else self.manager.allocate_cache(DEVICE)
        )
        stamps = [self.stamp() for _ in range(ROWS)]
        for row, stamp in enumerate(stamps):
            fill(cache, row, stamp)
        said = {"model": self.last_model if is_blocks else None, "id": cache.cache_id}
        self.sources[cache.cache_id] = (cache, {**said, "stamps": stamps})
        self.tell()

    def drop_source(self, rng: random.Random) -> None:
        """Sometimes before the others are told."""
        cache, said = self.sources.pop(rng.choice(list(self.sources)))
        if rng.randrange(2):
            self.tell()
        if said["model"] is None:
            self.manager.deallocate_cache(cache)
        else:
            self.manager.deallocate_blocks_cache(cache)
        self.tell()

    # --- what it does with others --------------------------------------------------------------

    def remote(self) -> None:
        rng = random.Random(self.last_stamp + threading.get_ident())
        while not self.stop.is_set():
            other = rng.choice(list(self.others))
            with self.expected(), self.row_cache() as ours, self.block_cache() as blocks:
                self.link(other, rng)
                if rng.randrange(3):
                    self.pull(other, rng, ours, blocks)
                else:
                    self.push(other, rng, blocks)

    def link(self, other: int, rng: random.Random) -> None:
        peer = self.datadist._links._peers.get(other)
        if peer is None or not peer.is_linked:
            info = LLMClusterInfo()
            info.remote_cluster_id = other
            info.append_local_ip_info("127.0.0.1", 0)
            info.append_remote_ip_info("127.0.0.1", self.others[other])
            status, _ = self.datadist.link_clusters([info], 1000)
            if status is not S.LLM_SUCCESS:
                raise LLMException("not linked", status_code=status)
            self.count("links")
        elif peer.link.connection.peer.pid is not None:  # now the one way, now the other
            peer.link.reads_memory = bool(rng.randrange(2))
        if rng.randrange(200) == 0:
            info = LLMClusterInfo()
            info.remote_cluster_id = other
            self.datadist.unlink_clusters([info], 500, bool(rng.randrange(2)))

    def pull(self, other: int, rng: random.Random, ours: Cache, blocks: Cache) -> None:
        with contextlib.suppress(FileNotFoundError):
            told = json.loads((self.folder / f"{other}.caches").read_text())
            if not told:
                return
            said = rng.choice(told)
            rows = rng.sample(range(ROWS), rng.randrange(1, 4))
            stamps = [said["stamps"][row] for row in rows]
            if said["model"] is not None:
                to = rng.sample(range(ROWS), len(rows))
                key = BlocksCacheKey(other, said["model"])
                self.manager.pull_blocks(key, blocks, rows, to)
                self.compare("pull_blocks", blocks, to, stamps)
            else:
                row_key = CacheKeyByIdAndIndex(other, said["id"], rows[0])
                self.manager.pull_cache(row_key, ours, rows[0])
                self.compare("pull_cache", ours, rows[:1], stamps[:1])

    def push(self, other: int, rng: random.Random, blocks: Cache) -> None:
        """To the block of the inbox that is this cluster's own, one push at a time."""
        place = self.cluster_id % ROWS
        of, back = rng.sample(range(ROWS), 2)
        stamp = self.stamp()
        fill(blocks, of, stamp)
        key = BlocksCacheKey(other, INBOX_MODEL)
        with self.pushing:
            self.manager.push_blocks(key, blocks, [of], [place])
            self.manager.pull_blocks(key, blocks, [place], [back])
        self.compare("push_blocks", blocks, [back], [stamp])

    pushing = threading.Lock()

    # --- what it does by itself ----------------------------------------------------------------

    def local(self) -> None:
        rng = random.Random(self.last_stamp + 1)
        while not self.stop.is_set():
            with (
                self.expected(),
                self.block_cache() as blocks,
                self.block_cache(HOST) as host,
                self.row_cache() as rows,
                self.row_cache() as others,
            ):
                self.swap_and_copy(rng, blocks, host)
                self.copy_rows(rng, rows, others)

    def swap_and_copy(self, rng: random.Random, blocks: Cache, host: Cache) -> None:
        stamps = [self.stamp() for _ in range(ROWS)]
        for row, stamp in enumerate(stamps):
            fill(blocks, row, stamp)
        out = dict(zip(range(ROWS), rng.sample(range(ROWS), ROWS), strict=True))
        self.manager.swap_blocks(blocks, host, out)
        self.compare("swap out", host, list(out.values()), stamps)
        back = dict(zip(out.values(), rng.sample(range(ROWS), ROWS), strict=True))
        self.manager.swap_blocks(host, blocks, back)
        self.compare("swap in", blocks, list(back.values()), stamps)
        of, *to = rng.sample(range(ROWS), 4)
        first = stamps[list(back.values()).index(of)]
        self.manager.copy_blocks(blocks, {of: to})
        self.compare("copy_blocks", blocks, to, [first] * 3)

    def copy_rows(self, rng: random.Random, rows: Cache, others: Cache) -> None:
        of, to, stamp = rng.randrange(ROWS), rng.randrange(ROWS), self.stamp()
        fill(rows, of, stamp)
        self.manager.copy_cache(others, rows, to, of)
        self.compare("copy_cache", others, [to], [stamp])

    # --- caches of one step --------------------------------------------------------------------

    @contextlib.contextmanager
    def row_cache(self) -> Iterator[Cache]:
        cache = self.manager.allocate_cache(DEVICE)
        try:
            yield cache
        finally:
            self.manager.deallocate_cache(cache)

    @contextlib.contextmanager
    def block_cache(self, desc: CacheDesc = DEVICE) -> Iterator[Cache]:
        cache = self.manager.allocate_blocks_cache(desc)
        try:
            yield cache
        finally:
            self.manager.deallocate_blocks_cache(cache)

    def compare(self, call: str, cache: Cache, rows: list[int], stamps: list[int]) -> None:
        for row, stamp in zip(rows, stamps, strict=True):
            if content(cache, row) != pattern(stamp) * TENSORS:
                self.wrong.append(f"{call}: row {row} is not {stamp:#x} as a whole")
        self.count(call)

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        try:
            yield
        except LLMException as error:
            self.count(error.status_code.name)
            if error.status_code not in MAY_HAPPEN:
                self.wrong.append(f"{error.status_code.name}: {error}")
            self.stop.wait(0.005)
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    # --- the end -------------------------------------------------------------------------------

    def report(self) -> None:
        """Nobody copies any more: nothing is leased, pinned or held for nothing."""
        self.manager.deallocate_blocks_cache(self.inbox)
        node = self.datadist._links._node

        def holds_nothing() -> bool:
            return not len(node.leases) and not any(one.blocks.pinned() for one in self.pools)

        wait_until(holds_nothing, "leases or pins are left")
        node.check_integrity()
        self.manager.check_integrity()
        for pool in self.pools:
            assert isinstance(pool.memory, _vmm.Range)
            pool.memory.check_integrity()
            used = pool.blocks.stats()["blocks_used"]
            if used:
                self.wrong.append(f"{used} pages of {pool.name} are in use for nothing")
        self.datadist.finalize()
        print(json.dumps({"did": self.did, "wrong": self.wrong[:20]}), flush=True)


def pattern(stamp: int) -> bytes:
    return stamp.to_bytes(8, "little") * (ROW_BYTES // 8)


def fill(cache: Cache, row: int, stamp: int) -> None:
    for address in cache.tensor_addrs:
        ctypes.memmove(address + row * ROW_BYTES, pattern(stamp), ROW_BYTES)


def content(cache: Cache, row: int) -> bytes:
    return b"".join(
        ctypes.string_at(address + row * ROW_BYTES, ROW_BYTES) for address in cache.tensor_addrs
    )


def main() -> None:
    cluster_id, folder, port, *rest = sys.argv[1:]
    others = {int(one): int(at) for one, at in (text.split(":") for text in rest)}
    chaotic = ChaoticCluster(int(cluster_id), Path(folder), int(port), others)
    work: list[Callable[[], None]] = [chaotic.churn, chaotic.remote, chaotic.remote, chaotic.local]
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    while sys.stdin.readline() == "did\n":
        print(json.dumps(chaotic.did), flush=True)
    chaotic.stop.set()
    for thread in threads:
        thread.join()
    print("stopped", flush=True)
    sys.stdin.readline()
    chaotic.report()


if __name__ == "__main__":
    main()
