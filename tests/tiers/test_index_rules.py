"""The index of a tier beside a model, in any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from index_model import IndexModel

from kvelastic._vmm import TierIndex
from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import NO_KEY

pytestmark = pytest.mark.slow


numbers = st.integers(min_value=1, max_value=24)


def key(number: int) -> bytes:
    """A key that can be read in a report; 0 is that of no block."""
    return number.to_bytes(16, "big")


# Runs of neighbours, as prompts are, and keys in any order, some of them twice.
runs = st.builds(
    lambda first, count: [key(first + i) for i in range(count)],
    numbers,
    st.integers(min_value=0, max_value=6),
)
mixed = st.lists(numbers.map(key), max_size=6)
some_keys = st.one_of(runs, mixed)
parents = st.one_of(st.none(), st.just(NO_KEY), numbers.map(key))


class IndexMachine(RuleBasedStateMachine):
    """Every call goes to both; answers, and what can be seen after it, must be the same."""

    @initialize(
        slots=st.integers(min_value=0, max_value=12),
        policy=st.sampled_from(["lru", "lfu", "slru", "fifo"]),
    )
    def open(self, slots: int, policy: str) -> None:
        self.index = TierIndex(slots, policy)
        self.model = IndexModel(slots, policy)

    def pending(self) -> list[bytes]:
        return [name for name, entry in self.model.entries.items() if not entry.ready]

    @rule(keys=some_keys)
    def match(self, keys: list[bytes]) -> None:
        assert self.index.match(b"".join(keys)) == len(self.model.use(keys))

    @rule(keys=some_keys)
    def hold(self, keys: list[bytes]) -> None:
        ticket, slots = self.index.hold(b"".join(keys))
        assert ticket not in self.model.holds
        assert slots == self.model.hold(ticket, keys)

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.model.holds)))
        assert sorted(self.index.release(ticket)) == sorted(self.model.release(ticket))
        with pytest.raises(InvalidArgumentError):
            self.index.release(ticket)

    @rule(keys=some_keys, chain_after=parents)
    def claim(self, keys: list[bytes], chain_after: bytes | None) -> None:
        held = self.model.held()
        answer = self.index.claim(b"".join(keys), chain_after)
        assert answer == self.model.claim(keys, chain_after)
        assert not held & {slot for slot in answer[0] if slot >= 0}

    @rule(keys=some_keys, chain_after=parents)
    def put(self, keys: list[bytes], chain_after: bytes | None) -> None:
        slots, displaced = self.index.claim(b"".join(keys), chain_after)
        assert (slots, displaced) == self.model.claim(keys, chain_after)
        taken = [name for name, slot in zip(keys, slots, strict=True) if slot >= 0]
        assert self.index.commit(b"".join(taken)) == self.model.commit(taken)

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), written=st.booleans())
    def end_writing(self, data: st.DataObject, *, written: bool) -> None:
        done = data.draw(st.lists(st.sampled_from(self.pending()), unique=True, min_size=1))
        if written:
            assert self.index.commit(b"".join(done)) == self.model.commit(done)
        else:
            self.index.abandon(b"".join(done))
            self.model.abandon(done)

    @rule(name=numbers.map(key))
    def end_unclaimed_key(self, name: bytes) -> None:
        if name in self.pending():
            return
        for end in (self.index.commit, self.index.abandon):
            with pytest.raises(InvalidArgumentError):
                end(b"".join(self.pending()) + name)

    @rule(keys=some_keys)
    def erase(self, keys: list[bytes]) -> None:
        assert self.index.erase(b"".join(keys)) == self.model.erase(keys)

    @rule(name=numbers.map(key), slot=st.integers(min_value=0, max_value=16), parent=parents)
    def restore(self, name: bytes, slot: int, parent: bytes | None) -> None:
        answer = self.index.restore(name, slot, parent)
        assert answer == self.model.restore(name, slot, parent or NO_KEY)

    @rule(slots=st.integers(min_value=0, max_value=16))
    def resize(self, slots: int) -> None:
        assert self.index.resize(slots) == self.model.resize(slots)

    @rule(count=st.integers(min_value=0, max_value=16))
    def displace(self, count: int) -> None:
        assert self.index.displace(count) == self.model.displace(count)

    @rule(first=st.integers(min_value=0, max_value=16), count=st.integers(0, 16))
    def close(self, first: int, count: int) -> None:
        assert self.index.close(first, count) == self.model.close(first, count)

    @rule(count=st.integers(min_value=0, max_value=16))
    def close_by_policy(self, count: int) -> None:
        assert self.index.close_by_policy(count) == self.model.close_by_policy(count)

    @precondition(lambda self: self.model.closed)
    @rule(data=st.data())
    def open_closed(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model.closed)), unique=True))
        self.index.open(slots)
        self.model.closed -= set(slots)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        assert self.index.stats() == self.model.stats()
        every = [key(number) for number in range(1, 32)]
        assert self.index.has(b"".join(every)) == [self.model.is_ready(name) for name in every]
        for name in every:
            slot = self.model.entries[name].slot if self.model.is_ready(name) else -1
            assert self.index.slot_of(name) == slot


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestIndex = IndexMachine.TestCase
