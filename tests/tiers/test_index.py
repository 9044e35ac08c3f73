"""The index of a tier: claims, holds, who is displaced, what a smaller size does."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvelastic._vmm import TierIndex, block_keys
from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import NO_KEY

POLICIES = ("lru", "lfu", "slru", "fifo")


def key(number: int) -> bytes:
    """A key of 16 bytes that tests can read."""
    return number.to_bytes(16, "big")


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def put(index: TierIndex, *numbers: int, chain_after: bytes | None = None) -> list[int]:
    """Claim and commit; the numbers of what was displaced, in order."""
    slots, displaced = index.claim(keys(*numbers), chain_after)
    taken = [number for number, slot in zip(numbers, slots, strict=True) if slot >= 0]
    assert index.commit(keys(*taken)) == []
    index.check_integrity()
    return [int.from_bytes(gone, "big") for gone, _ in displaced]


@pytest.mark.parametrize("policy", POLICIES)
def test_claimed_key_is_a_miss_before_commit(policy: str) -> None:
    index = TierIndex(4, policy)
    slots, displaced = index.claim(keys(1, 2))
    assert slots == [0, 1]
    assert displaced == []
    assert index.has(keys(1, 2)) == [False, False]
    assert index.match(keys(1, 2)) == 0
    assert index.slot_of(key(1)) == -1
    ticket, held = index.hold(keys(1, 2))
    assert held == []
    assert index.release(ticket) == []
    assert index.claim(keys(1, 2)) == ([-1, -1], [])
    index.commit(key(1))
    assert index.has(keys(1, 2)) == [True, False]
    index.abandon(key(2))
    assert index.stats() == {
        "slots": 4,
        "ready": 1,
        "pending": 0,
        "closed": 0,
        "held": 0,
        "displaced": 0,
    }
    assert index.claim(key(3))[0] == [1], "the slot of an abandoned key is free"
    index.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_held_and_pending_records_are_never_displaced(policy: str) -> None:
    index = TierIndex(3, policy)
    put(index, 1, 2)
    index.claim(key(3))
    ticket, _ = index.hold(keys(1, 2))
    assert index.claim(keys(4, 5)) == ([-2, -2], [])
    assert index.release(ticket) == []
    slots, displaced = index.claim(keys(4, 5))
    assert sorted(slots) == [0, 1]
    assert {gone for gone, _ in displaced} == {key(1), key(2)}
    assert index.claim(key(6)) == ([-2], [])
    index.check_integrity()


def test_each_policy_displaces_in_its_order() -> None:
    def order(policy: str) -> list[int]:
        index = TierIndex(5, policy)
        put(index, 1, 2, 3, 4, 5)
        for used in (1, 1, 1, 3, 2, 2):
            assert index.match(key(used)) == 1
        return put(index, 11, 12, 13, 14, 15)

    assert order("fifo") == [1, 2, 3, 4, 5]
    assert order("lru") == [4, 5, 1, 3, 2]
    assert order("lfu") == [4, 5, 3, 2, 1]
    assert order("slru") == [4, 5, 1, 3, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_leaves_are_displaced_before_inner_nodes(policy: str) -> None:
    index = TierIndex(4, policy)
    put(index, 3, chain_after=key(2))
    put(index, 2, chain_after=key(1))
    put(index, 1, chain_after=NO_KEY)
    put(index, 9)
    index.match(key(9))
    assert put(index, 10) == [3]
    assert put(index, 11) != [1]


def test_released_lease_cannot_be_released_again() -> None:
    index = TierIndex(1, "lru")
    put(index, 1)
    ticket, _ = index.hold(key(1))
    assert index.erase(key(1)) == []
    assert index.has(key(1)) == [False]
    assert index.claim(key(2)) == ([-2], [])
    assert index.release(ticket) == [(key(1), 0)]
    with pytest.raises(InvalidArgumentError, match="has ended or never was"):
        index.release(ticket)
    assert index.claim(key(2)) == ([0], [])


def test_match_makes_its_first_key_the_most_recent() -> None:
    index = TierIndex(3, "lru")
    put(index, 1, 2, 3)
    assert put(index, 4) == [1]
    index.match(keys(2, 3, 4))
    assert put(index, 5, 6, 7) == [4, 3, 2]


def test_slru_protects_four_of_five() -> None:
    index = TierIndex(5, "slru")
    put(index, 1, 2, 3, 4, 5)
    for number in (1, 2, 3, 4, 5):
        index.match(key(number))
    assert put(index, 6) == [1], "used least recently, so it went back to the probationary segment"
    assert put(index, 7) == [6]
    assert index.match(keys(2, 3, 4, 5)) == 4


def test_resize_closes_slots_as_they_become_free() -> None:
    index = TierIndex(4, "lru")
    put(index, 1, 2, 3)
    index.claim(key(4))
    ticket, _ = index.hold(keys(1, 2, 3))
    assert index.resize(1) == [], "two are held, one is being written"
    assert index.has(keys(1, 2, 3)) == [True, False, False]
    assert index.commit(key(4)) == [(key(4), 3)]
    assert sorted(index.release(ticket)) == [(key(2), 1), (key(3), 2)]
    assert index.claim(keys(5, 6)) == ([0, -2], [(key(1), 0)])
    assert index.resize(2) == []
    assert index.claim(keys(6)) == ([1], [])
    index.check_integrity()


def test_close_by_policy_takes_free_slots_before_objects() -> None:
    index = TierIndex(4, "lru")
    put(index, 1, 2, 3)
    ticket, _ = index.hold(key(1))
    assert index.close_by_policy(2) == ([3, 1], [(key(2), 1)])
    assert index.close_by_policy(2) == ([2], [(key(3), 2)]), "the last object is held"
    assert index.claim(key(4)) == ([-2], [])
    index.open([1])
    assert index.claim(key(4)) == ([1], [])
    assert index.release(ticket) == []
    assert index.stats()["closed"] == 2
    index.check_integrity()


def test_displace_frees_the_slots_of_the_oldest_objects() -> None:
    index = TierIndex(3, "lru")
    put(index, 1, 2)
    index.claim(key(3))
    assert index.displace(5) == [(key(1), 0), (key(2), 1)], "a pending object stays"
    assert index.claim(keys(4, 5)) == ([0, 1], [])
    index.check_integrity()


def test_key_erased_during_its_write_is_a_miss() -> None:
    index = TierIndex(1, "lru")
    index.claim(key(1))
    assert index.erase(key(1)) == []
    assert index.claim(keys(1, 2)) == ([-1, -2], []), "its writer is not done"
    assert index.commit(key(1)) == [(key(1), 0)]
    assert index.has(key(1)) == [False]
    assert index.claim(key(2)) == ([0], [])


@pytest.mark.parametrize(
    "call",
    [
        lambda index: index.has(b"short"),
        lambda index: index.claim(keys(1) + NO_KEY),
        lambda index: index.claim(keys(1), b"short"),
        lambda index: index.restore(NO_KEY, 0),
        lambda index: index.slot_of(keys(1, 2)),
        lambda index: index.commit(key(7)),
        lambda index: index.resize(2**40),
        lambda index: TierIndex(1, "arc"),
    ],
)
def test_invalid_calls_are_rejected_and_change_nothing(call: Callable[[TierIndex], object]) -> None:
    index = TierIndex(2)
    with pytest.raises(InvalidArgumentError):
        call(index)
    assert index.stats() == {
        "slots": 2,
        "ready": 0,
        "pending": 0,
        "closed": 0,
        "held": 0,
        "displaced": 0,
    }
    index.check_integrity()


def test_token_keys_are_chained_per_block() -> None:
    seed = bytes(range(16))
    tokens = array("q", range(64))
    all_keys = block_keys(tokens, 16, seed)
    assert len(all_keys) == 64
    assert block_keys(tokens[:40], 16, seed) == all_keys[:32], "what is no whole block has no key"
    assert block_keys(tokens[32:], 16, all_keys[16:32]) == all_keys[32:], "a key is a seed"
    assert block_keys(tokens, 16, bytes(16)) != all_keys
    assert block_keys(array("q"), 16, seed) == b""
    for wrong in (array("i", [1]), array("d", [1.0]), b"12345678"):
        with pytest.raises(InvalidArgumentError, match="int64"):
            block_keys(wrong, 1, seed)
    with pytest.raises(InvalidArgumentError, match="16 bytes"):
        block_keys(tokens, 16, b"short")
    with pytest.raises(InvalidArgumentError, match="one or more"):
        block_keys(tokens, 0, seed)
