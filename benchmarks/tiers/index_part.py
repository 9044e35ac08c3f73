"""What a prompt of 256 blocks costs in the index: its keys, looking them up, taking them in.

Each round has prompts of its own in an index of 200,000 records, so nothing lies in a cache that
would not in an engine. All times are those of Python calls, the binding and its lists included; the
row `a call with no keys` says what of it is the call itself.
"""

from __future__ import annotations

import random
import time
import zlib
from array import array
from collections.abc import Callable
from functools import partial

from benchmarks.harness import Figure
from kvelastic._vmm import TierIndex, block_keys
from kvelastic.tiers.base import NO_KEY

SLOTS, BLOCKS, BLOCK_TOKENS = 200_000, 256, 16
ROUNDS, HITS = 300, 20
SEED = bytes(range(16))
BAR_ALL, BAR_HIT = "hash + match + insert <= 72 us", "<= 3.5 us"


def prompts(count: int, seed: int) -> list[array[int]]:
    """Prompts of `BLOCKS` blocks that share nothing."""
    pick = random.Random(seed)
    tokens = BLOCKS * BLOCK_TOKENS
    return [array("q", pick.choices(range(150_000), k=tokens)) for _ in range(count)]


def timed_us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def insert(index: TierIndex, keys: bytes) -> None:
    index.claim(keys, NO_KEY)
    index.commit(keys)


def rows(policy: str, *, full: bool) -> list[Figure]:
    """An index that has room for each prompt, or that is full, so that each block displaces one."""
    index = TierIndex(SLOTS, policy)
    for prompt in prompts(SLOTS // BLOCKS + 1 if full else SLOTS // BLOCKS // 2, seed=1):
        insert(index, block_keys(prompt, BLOCK_TOKENS, SEED))
    label = f"{policy}, {'full' if full else 'half full'}: "
    hashed = Figure(label + "hash", "us", [], "", "crc32 of the tokens")
    matched = Figure(label + "match, nothing there", "us", [], "", "crc32 of the keys")
    inserted = Figure(label + "insert", "us", [], "", "crc32 of the keys")
    together = Figure(label + "all three", "us", [], BAR_ALL, "crc32 of tokens and keys")
    hit = Figure(label + "full hit", "us", [], BAR_HIT, "crc32 of the keys")
    again = Figure(label + "full hit, control", "us", [], "the same again", "full hit")
    for prompt in prompts(ROUNDS, seed=2):
        keys = block_keys(prompt, BLOCK_TOKENS, bytes(16))  # others: only to have some bytes
        over_tokens = timed_us(partial(zlib.crc32, prompt))
        over_keys = timed_us(partial(zlib.crc32, keys))
        start = time.perf_counter_ns()
        keys = block_keys(prompt, BLOCK_TOKENS, SEED)
        after_hash = time.perf_counter_ns()
        found = index.match(keys)
        after_match = time.perf_counter_ns()
        insert(index, keys)
        end = time.perf_counter_ns()
        assert found == 0
        hits = [timed_us(partial(index.match, keys)) for _ in range(2 * HITS)]
        assert index.match(keys) == BLOCKS
        for figure, sample, floor in (
            (hashed, (after_hash - start) / 1000, over_tokens),
            (matched, (after_match - after_hash) / 1000, over_keys),
            (inserted, (end - after_match) / 1000, over_keys),
            (together, (end - start) / 1000, over_tokens + over_keys),
            (hit, sum(hits[0::2]) / HITS, over_keys),
            (again, sum(hits[1::2]) / HITS, sum(hits[0::2]) / HITS),
        ):
            figure.samples.append(sample)
            figure.floor_samples.append(floor)
    return [hashed, matched, inserted, together, hit, again]


def figures() -> list[Figure]:
    """An index with room, then a full one for each policy."""
    found = rows("slru", full=False)
    for policy in ("slru", "lru", "lfu", "fifo"):
        found += rows(policy, full=True)
    index = TierIndex(SLOTS)
    nothing = Figure("a call with no keys", "us", [], "", "a bare call")
    for _ in range(ROUNDS):
        nothing.floor_samples.append(timed_us(lambda: None))
        nothing.samples.append(timed_us(lambda: index.match(b"")))
    return [*found, nothing]
