"""A node of the chaos: a pool whose blocks come and go, and copies from and to all the others.

    python chaotic_node.py ID FOLDER unix|tcp OTHER_ID...

It answers each line on stdin with what it did so far, and ends with stdin. Its exit code is 1 if
something was wrong, and stderr says what. Every block in
use is filled with a stamp that no block ever had before. A pull names the stamp that it wants, and
what arrives must be that stamp to the last byte; a block that was pushed to must be the pusher's.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from linked import Memory, secret_file
from native_pools import LAYOUTS
from native_pools import Memory as Pages

from kvelastic.errors import KvelasticError, UnknownBlockError
from kvelastic.messages import Address, parse_address
from kvelastic.transfer import Hold, Link, Node, Piece, register_blocks

LAYOUT = LAYOUTS["block that divides no page"]
PAGES = 8
LEASE_S = 0.3
BLOCK = LAYOUT.block_bytes
RECORD = BLOCK * LAYOUT.buffers


class Nothing:
    """What a claim holds besides the pins: nothing."""

    def is_whole(self) -> bool:
        return True

    def release(self) -> None:
        pass


class ChaoticNode:
    def __init__(self, node_id: int, folder: Path, kind: str, others: list[int]) -> None:
        self.node_id, self.folder, self.kind, self.others = node_id, folder, kind, others
        self.memory = Pages(LAYOUT, PAGES)
        self.pool = self.memory.pool()
        self.lock = threading.Lock()
        self.stamps: dict[int, int] = {}
        self.last_stamp = (node_id << 48) + (os.getpid() << 24)
        self.did = {"pulls": 0, "pushes": 0, "refused": 0, "broken": 0}
        self.wrong: list[str] = []
        self.stop = threading.Event()
        address = f"unix://{folder}/{node_id}" if kind == "unix" else "tcp://127.0.0.1:0"
        self.node = Node(
            node_id,
            listen=[parse_address(address)],
            secret=secret_file(folder),
            answer=self.answer,
            claim=self.claim,
            lease_s=LEASE_S,
        )
        register_blocks(self.node, self.memory.range, self.pool)
        told = folder / f"{node_id}.new"
        told.write_text(str(self.node.addresses[0]))
        told.rename(folder / f"{node_id}.address")

    def pieces(self, block: int) -> list[Piece]:
        base = self.memory.range.address
        return [
            (base + LAYOUT.offset_bytes(block, buffer, PAGES), BLOCK)
            for buffer in range(LAYOUT.buffers)
        ]

    def stamp(self) -> int:
        with self.lock:
            self.last_stamp += 1
            return self.last_stamp

    def fill(self, block: int, stamp: int) -> None:
        for address, size in self.pieces(block):
            ctypes.memmove(address, stamp.to_bytes(8, "little") * (size // 8), size)

    def content(self, block: int) -> bytes:
        return b"".join(ctypes.string_at(address, size) for address, size in self.pieces(block))

    # --- blocks come and go, and so do their pages ---------------------------------------------

    def churn(self) -> None:
        rng = random.Random(self.last_stamp)
        while not self.stop.is_set():
            step = rng.randrange(10)
            if step < 5 and (taken := self.pool.alloc(1)):
                stamp = self.stamp()
                self.fill(taken[0], stamp)
                with self.lock:
                    self.stamps[taken[0]] = stamp
            elif step < 8:
                with self.lock:
                    block = rng.choice(list(self.stamps)) if self.stamps else None
                    if block is not None:
                        del self.stamps[block]
                if block is not None:
                    self.pool.free([block])
            elif step == 8:
                self.pool.set_limit(rng.randrange(2, PAGES + 1) * LAYOUT.page_bytes)
                self.pool.trim()
            else:
                self.pool.set_limit(PAGES * LAYOUT.page_bytes)

    # --- what others ask -----------------------------------------------------------------------

    def answer(self, link: Link, body: bytes) -> bytes:
        match json.loads(body):
            case ["which"]:
                with self.lock:
                    if not self.stamps:
                        raise UnknownBlockError("none is in use")
                    block, stamp = random.choice(list(self.stamps.items()))
                return json.dumps([block, self.pieces(block), stamp]).encode()
            case ["room"]:
                taken = self.pool.alloc(1)
                if not taken:
                    raise UnknownBlockError("none is free")
                self.fill(taken[0], 0)
                # Whatever becomes of the push, the block is given back a while later.
                return json.dumps([taken[0], self.pieces(taken[0])]).encode()
            case ["pushed", block, stamp]:
                if stamp and self.content(block) != stamp.to_bytes(8, "little") * (RECORD // 8):
                    self.wrong.append(f"a push of {stamp:#x} is not what arrived")
                self.pool.free([block])
                return b"[]"
        raise UnknownBlockError("a question of nobody's")

    def claim(self, link: Link, claim: bytes, pieces: Sequence[Piece]) -> Hold:
        block, stamp = json.loads(claim)
        with self.lock:
            if self.stamps.get(block) != stamp:
                raise UnknownBlockError("that block is another's by now")
        return Nothing()

    # --- what it asks others -------------------------------------------------------------------

    def link(self, other: int) -> Link:
        standing = next((one for one in self.node.links if one.peer_id == other), None)
        if standing is not None:
            return standing
        address: Address = parse_address((self.folder / f"{other}.address").read_text())
        return self.node.link(address, timeout_s=1)

    def copy(self, stream: bool) -> None:
        ours = Memory(bytes(RECORD))
        rng = random.Random(self.last_stamp + stream)
        while not self.stop.is_set():
            self.copy_once(rng, ours, stream)

    def copy_once(self, rng: random.Random, ours: Memory, stream: bool) -> None:
        try:
            link = self.link(rng.choice(self.others))
            link.reads_memory = not stream and link.connection.peer.pid is not None
            if rng.randrange(3):
                self.pull(link, ours)
            else:
                self.push(link, ours)
        except UnknownBlockError:
            self.did["refused"] += 1
        except (KvelasticError, OSError):  # a peer that was killed, stopped, or is late
            self.did["broken"] += 1
            self.stop.wait(0.02)

    def pull(self, link: Link, ours: Memory) -> None:
        block, pieces, stamp = json.loads(link.ask(b'["which"]', timeout_s=1))
        sources = [(address, size) for address, size in pieces]
        claim = json.dumps([block, stamp]).encode()
        link.pull(sources, [ours.piece()], timeout_s=1, claim=claim)
        if ours.content != stamp.to_bytes(8, "little") * (RECORD // 8):
            self.wrong.append(f"a pull of {stamp:#x} brought something else")
        self.did["pulls"] += 1

    def push(self, link: Link, ours: Memory) -> None:
        stamp = self.stamp()
        ctypes.memmove(ours.address, stamp.to_bytes(8, "little") * (RECORD // 8), RECORD)
        block, pieces = json.loads(link.ask(b'["room"]', timeout_s=1))
        good = 0
        try:
            link.push([ours.piece()], [(address, size) for address, size in pieces], timeout_s=1)
            good = stamp
        finally:
            link.ask(json.dumps(["pushed", block, good]).encode(), timeout_s=1)
        self.did["pushes"] += 1

    # --- the end -------------------------------------------------------------------------------

    def report(self) -> None:
        self.node.close()
        with self.lock:
            blocks = list(self.stamps)
        self.pool.free(blocks)
        if self.pool.pinned():
            self.wrong.append(f"still pinned: {self.pool.pinned()}")
        if len(self.node.leases):
            self.wrong.append("a lease is left")
        self.pool.check_integrity()
        self.memory.range.check_integrity()
        held = self.memory.held_at_the_os()
        if held > self.memory.range.held_bytes:
            self.wrong.append(f"{held} bytes are held, {self.memory.range.held_bytes} counted")
        if self.wrong:
            sys.exit("\n".join(self.wrong))


if __name__ == "__main__":
    chaotic = ChaoticNode(
        int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], [int(text) for text in sys.argv[4:]]
    )
    threads = [threading.Thread(target=chaotic.churn)]
    threads += [threading.Thread(target=chaotic.copy, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(chaotic.did), flush=True)
    chaotic.stop.set()
    for thread in threads:
        thread.join()
    chaotic.report()
